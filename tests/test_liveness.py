"""Liveness: ranks, nodes and stores that die, stop or leave, as the ranks of all nodes see it.

test_faults_nodes.py tests what they see when the network is cut.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

import epmoe
from cases import outcome, process_ranks
from epmoe import _C
from epmoe.comm import liveness
from epmoe.comm.liveness import LEAVE_GRACE_S, Liveness
from pace import HANG_S, WAIT_S, Events, await_stopped, is_soon, slowness, wait_until
from traces import held

pytestmark = pytest.mark.cpu_only


def team_of(rank, size, local):
    """The World of a rank's node, where nodes have `local` ranks."""
    groups = [dist.new_group(list(range(first, first + local))) for first in range(0, size, local)]
    return epmoe.World(groups[rank // local], WAIT_S)


def start(team, on_end=None):
    return Liveness(dist.group.WORLD, team, on_end, WAIT_S)


def leave_together(watch):
    watch.expects_leaves = True
    dist.barrier()
    watch.leave()


def _reason(world):
    return _C.world_reason(world._c)


# ---- deaths ----


def kill(pids, victims, folder):
    with open(os.path.join(folder, "time"), "w") as f:
        f.write(str(time.monotonic()))
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)


def since_death(folder, now):
    with open(os.path.join(folder, "time")) as f:
        return now - float(f.read())


def _until_deaths(rank, size, local, victims, folder):
    """Rank main: the victims are killed. Returns what a survivor saw."""
    team, events = team_of(rank, size, local), Events(folder)
    before, ends = held(), []
    watch = start(team, lambda: ends.append(time.monotonic()))
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    events.set(f"{rank} waits")
    if rank == victims[0]:  # it kills all victims, so that they die at the same moment
        for other in range(size):
            events.wait(f"{other} waits")
        kill(pids, victims[::-1], folder)
    if rank in victims:
        time.sleep(HANG_S)
    # Half of the ranks wait inside of epmoe: the end of the team must end this wait. Nobody answers them.
    wait = (lambda: team.exchange(b"x")) if rank % 2 == 0 and local > 1 else None
    got = outcome(wait) if wait else None
    has_ended = watch.has_ended(HANG_S)
    latency = since_death(folder, time.monotonic())
    check = outcome(team.check)
    wait_until(lambda: set(watch.lost_ranks()) >= set(victims), "all dead ranks are known")
    wait_until(lambda: ends, "on_end was called")
    lost = watch.lost_ranks()
    watch.leave()
    left = {what: (before[what], n) for what, n in held().items() if what in ("fds", "threads")}
    outcome(team.close)
    waited = got.kind if got else "PeerDied"
    return {"waited": waited, "ended": has_ended, "kind": check.kind, "text": check.text,
            "lost": lost, "latency": latency, "ends": len(ends), "left": left}


@pytest.mark.parametrize("local, victims, named", [
    (2, (3,), r"rank 3 \(rank 1 of node 1\)"), (2, (0,), r"rank 0 \(rank 0 of node 0\)"),
    (2, (2, 3), r"node 1 \(ranks 2 to 3\) died"), (1, (2,), r"node 2 \(rank 2\) died"),
])
def test_liveness_names_who_died_on_all_nodes(tmp_path, local, victims, named):
    """kill -9 of a rank, or of a whole node: every survivor raises PeerDied that names it, within 3 s."""
    results = process_ranks(_until_deaths, 4, local, victims, str(tmp_path), may_die=victims)
    for rank, seen in enumerate(results):
        assert (seen is None) == (rank in victims)
        if seen is None:
            continue
        assert seen["ended"] and seen["kind"] == seen["waited"] == "PeerDied", seen
        # On a busy machine the system closes the connections of one dead process long before the other's.
        one_of_them = "|".join(rf"rank {v} \(" for v in victims) if slowness() > 2 else named
        assert re.search(named, seen["text"]) or re.search(one_of_them, seen["text"]), seen["text"]
        assert seen["lost"] == list(victims) and seen["ends"] == 1
        assert is_soon(seen["latency"], 3), f"seen {seen['latency']:.2f} s after the death"
        for what, (before, after) in seen["left"].items():
            assert after <= before, f"{what}: {before} became {after}"


def _fork_then_die(rank, size, folder):
    """Rank main: rank 1 of node 1 forks a child and is killed. The child lives until rank 0 knows."""
    team, events = team_of(rank, size, 1), Events(folder)
    watch = start(team)
    if rank == 1 and os.fork() == 0:
        assert watch.lost_ranks() == []
        watch.leave()  # does nothing here
        events.wait("seen")
        os._exit(0)
    dist.barrier()
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    watch.has_ended(HANG_S)
    got = outcome(team.check)
    events.set("seen")
    watch.leave()
    return got


def test_liveness_sees_a_death_while_a_forked_child_lives(tmp_path):
    results = process_ranks(_fork_then_die, 2, str(tmp_path), may_die=(1,))
    assert results[0].kind == "PeerDied" and "node 1 (rank 1) died" in results[0].text


# ---- the store ----

STORE = """
import signal, sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


def _with_store(rank, size, port, pid, fault, folder):
    """Rank main. The store is in another process, or in rank 0 (no port), which dies or is stopped."""
    events = Events(folder)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0 and not port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    team = team_of(rank, size, 1)
    watch = start(team)
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    events.set(f"{rank} has all pids")
    if rank == size - 1:  # it causes the fault
        for other in range(size):
            events.wait(f"{other} has all pids")
        if fault == "stopped":
            os.kill(pid, signal.SIGSTOP)
            await_stopped(pid)
        kill([pid or pids[0]] if fault == "dies" else pids, [0] if fault == "dies" else [rank], folder)
    if rank == 0 and not pid:
        time.sleep(HANG_S)
    watch.has_ended(HANG_S)
    latency = since_death(folder, time.monotonic())
    begin = time.monotonic()
    watch.leave()
    return outcome(team.check), latency, time.monotonic() - begin


def _port_of_rank_0(rank, size, folder):
    """Rank main: rank 0 has the store and is killed."""
    events, place = Events(folder), os.path.join(folder, "port")
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as s:
            port = s.getsockname()[1]
        with open(place, "w") as f:
            f.write(str(port))
        events.set("has port")
    events.wait("has port")
    with open(place) as f:
        port = int(f.read())
    real = dist.TCPStore
    dist.TCPStore = lambda host, _, **options: real(host, port, **options | {"is_master": rank == 0})
    return _with_store(rank, size, port, 0, "dies", folder)


def test_liveness_names_the_rank_that_dies_with_the_store(tmp_path):
    results = process_ranks(_port_of_rank_0, 3, str(tmp_path), backend=None, may_die=(0,))
    for got, latency, _ in results[1:]:
        assert got.kind == "PeerDied" and "node 0 (rank 0) died" in got.text, got.text
        assert is_soon(latency, 3)


@pytest.mark.parametrize("fault", ["dies", "stopped"])
def test_liveness_store_that_is_gone_hangs_no_rank(tmp_path, fault):
    """The store is in a process that is no rank. It dies; or it is stopped while a rank dies."""
    process = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        dead = () if fault == "dies" else (2,)
        results = process_ranks(_with_store, 3, port, process.pid, fault, str(tmp_path), backend=None,
                                may_die=dead)
    finally:
        process.kill()
        process.communicate()
    for got, latency, seconds in (r for rank, r in enumerate(results) if rank not in dead):
        named = "node 2 (rank 2) died" if dead else "the process with the store of the process group died"
        assert got.kind == "PeerDied" and named in got.text, got.text
        assert is_soon(latency, 3) and is_soon(seconds, 3), (latency, seconds)


@pytest.mark.parametrize("raw", [
    b"", b"\xff\xfe", b"[" * 100000, b"{}", b"[]", b"17", b'[-4, "x"]', b'[-4, "x", 3]', b'[-4, "x", [4]]',
    b'[-4, "x", [-1]]', b'[-4, "x", [true]]', b'[0, "x", []]', b'[-99, "x", []]', b'["-4", "x", []]',
    b'[-4, 5, []]', b'[-4, null, []]', b'[-4, [1], []]', b"[" + b"9" * 10000 + b', "x", []]'])
def test_liveness_nonsense_in_the_store_is_an_end(raw):
    code, text, lost = liveness._read_end(raw, 4)
    assert (code, lost) == (_C.ESYS, []) and "no reason that this rank can read" in text


def test_liveness_texts_of_the_store_are_cut_and_printable():
    raw = json.dumps([_C.EPEERDIED, "a\n\0\ud800" + "b" * 1000, [1, 3]])
    assert liveness._read_end(raw, 4) == (_C.EPEERDIED, "a   " + "b" * 246, [1, 3])


# ---- ranks that live ----


def _stopped(rank, size, folder):
    """Node 3, a rank alone, is stopped for longer than a host may be silent. Returns whether it is called
    dead.
    """
    team, events = team_of(rank, size, 1), Events(folder)
    watch = start(team)
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    events.set(f"{rank} has all pids")
    if rank == 0:
        # gloo needs rank 3 until rank 2 has returned from all_gather, which can be after rank 0 has.
        for other in range(size):
            events.wait(f"{other} has all pids")
        os.kill(pids[3], signal.SIGSTOP)
        await_stopped(pids[3])
        time.sleep(watch._silent_s + 0.5)
        events.set("was stopped")
    if rank != 3:
        events.wait("was stopped")
        reason = _reason(team)
        events.set(f"{rank} has looked")
    if rank == 0:
        for other in (1, 2):
            events.wait(f"{other} has looked")
        os.kill(pids[3], signal.SIGCONT)
    dist.barrier()
    reason = _reason(team) if rank == 3 else reason
    leave_together(watch)
    team.close()
    return reason


def _close_late(rank, size):
    """Rank 0 closes long before the others. Nobody reports it."""
    nodes = epmoe.Nodes(local_world_size=2, timeout_s=WAIT_S)
    if rank:
        time.sleep(LEAVE_GRACE_S + 0.5)
    reason = _reason(nodes.team)
    nodes.close()
    nodes.close()  # does nothing
    team = team_of(rank, size, 2)
    before = held()
    leave_together(start(team))
    after = held()
    team.close()
    return reason, {what: (before[what], after[what]) for what in ("fds", "threads")}


def _leave_alone(rank, size):
    """Rank 1 leaves by itself. After the grace time the others miss it."""
    team = team_of(rank, size, 1)
    watch, got = start(team), None
    if rank == 1:
        watch.leave()
        watch.leave()  # does nothing
    else:
        early = _reason(team)
        watch.has_ended(HANG_S)
        got = early, _reason(team), watch.lost_ranks()
        watch.leave()
    dist.barrier()
    team._leave(False)
    return got


def _time_out(rank, size):
    """On node 0 rank 1 does not come to an exchange. The ranks of node 1 learn why their team has ended."""
    team = team_of(rank, size, 2)
    watch = start(team)
    if rank < 2:
        team.set_timeout(0.3)
    got = outcome(lambda: team.exchange(b"x")) if rank in (0, 2) else None
    watch.has_ended(HANG_S)
    got = got or outcome(team.check)
    dist.barrier()
    watch.leave()
    dist.barrier()
    team._leave(False)
    return got.kind, got.text, watch.lost_ranks()


def _call_on_end(rank, size):
    """The world of node 2 ends. Every rank calls on_end, once."""
    team, ends, called = team_of(rank, size, 1), [], threading.Event()
    watch = start(team, lambda: (ends.append(1), called.set()))
    early = watch.has_ended()
    if rank == 2:
        _C.world_abort(team._c, _C.ESYS, "the test ends the world of node 2")
    called.wait(HANG_S)
    has_ended = watch.has_ended()
    dist.barrier()
    watch.leave()
    reason = _reason(team)
    team._leave(False)
    return early, has_ended, len(ends), reason


def _nonsense(rank, size):
    """A program writes nonsense into the store. Every rank raises an error."""
    team = team_of(rank, size, 1)
    watch = start(team)
    if rank == 2:
        watch._ask(lambda store: store.set("end", b"\xff{"))
    watch.has_ended(HANG_S)
    got = outcome(team.check)
    dist.barrier()
    watch.leave()
    team._leave(False)
    return got


def _stranger(rank, size):
    """A program connects to the listening sockets, sends something and leaves. Nobody notices."""
    team = team_of(rank, size, 1)
    watch = start(team)
    dist.barrier()
    for _ in range(100):
        with socket.create_connection(watch._listener.getsockname(), timeout=HANG_S) as s:
            s.sendall(b"GET / HTTP/1.0\r\n\r\n")
    time.sleep(2 * liveness.SETTLE_S)
    reason = _reason(team)
    leave_together(watch)
    team.close()
    return reason


def _listening(rank, size):
    """The addresses at which this process listens for other nodes, meanwhile and afterwards."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with epmoe.Nodes(local_world_size=1, timeout_s=WAIT_S):
        found = [s.getsockname()[0] for s in liveness._listening]
    os.environ.pop("GLOO_SOCKET_IFNAME")
    return found, len(liveness._listening)


def _mistakes(rank, size):
    """Rank 1 makes several mistakes. After each, all ranks can try again."""
    team, results = team_of(rank, size, 1), []
    for name, value in (("EPMOE_NODE_TIMEOUT_S", "0"), ("GLOO_SOCKET_IFNAME", "none0")):
        before = os.environ.get(name)
        if rank == 1:
            os.environ[name] = value
        results.append(outcome(lambda: start(team)))
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # the network does not let it
            with socket.create_server(("127.0.0.1", 0)) as s:
                nobody = s.getsockname()
            real = socket.create_connection
            patch.setattr(socket, "create_connection", lambda _, limit_s: real(nobody, limit_s))
        results.append(outcome(lambda: start(team)))
    leave_together(start(team))
    team.close()
    return results


def _living_ranks(rank, size, folder):
    # A virtual machine may stand still for 2 s, the default. Set here: rank processes do not inherit it.
    os.environ["EPMOE_NODE_TIMEOUT_S"] = "5"
    return {"stopped": _stopped(rank, size, folder), "closed": _close_late(rank, size),
            "left": _leave_alone(rank, size), "timed out": _time_out(rank, size),
            "on_end": _call_on_end(rank, size), "nonsense": _nonsense(rank, size),
            "stranger": _stranger(rank, size), "listening": _listening(rank, size),
            "mistakes": _mistakes(rank, size)}


@pytest.fixture(scope="module")
def living(tmp_path_factory):
    """What four ranks see, none of which dies."""
    return process_ranks(_living_ranks, 4, str(tmp_path_factory.mktemp("living")))


def test_liveness_calls_no_stopped_node_dead(living):
    assert [r["stopped"] for r in living] == [None] * 4


def test_liveness_closes_without_a_false_report(living):
    for result in living:
        reason, left = result["closed"]
        assert reason is None
        for what, (before, after) in left.items():
            assert after <= before, f"{what}: {before} became {after}"


def test_liveness_misses_a_rank_that_leaves_alone(living):
    for rank in (0, 2, 3):
        early, (code, text), lost = living[rank]["left"]
        assert early is None and code == _C.EPEERDIED and lost == [1]
        assert "rank 1 (rank 0 of node 1) left alone" in text


def test_liveness_tells_the_other_nodes_why_a_world_has_ended(living):
    for result in living:
        kind, text, lost = result["timed out"]
        assert kind == "EpTimeout" and lost == []
        assert "node 0 (its rank 0 is rank 0 of all): rank 0 timed out waiting for rank 1" in text


def test_liveness_calls_on_end_once_on_every_rank(living):
    for result in living:
        assert result["on_end"] == (False, True, 1, (_C.ESYS, "the test ends the world of node 2"))


def test_liveness_nonsense_in_the_store_ends_every_rank(living):
    for result in living:
        assert result["nonsense"].kind == "EpError" and "can read" in result["nonsense"].text


def test_liveness_ignores_strangers(living):
    assert [r["stranger"] for r in living] == [None] * 4


def test_liveness_listens_only_at_the_interface_that_is_named(living):
    assert [r["listening"] for r in living] == [(["127.0.0.1"], 0)] * 4


def test_liveness_mistakes_of_a_rank_are_errors_on_all(living):
    texts = ("EPMOE_NODE_TIMEOUT_S='0'", "GLOO_SOCKET_IFNAME=none0", "rank 1 cannot connect to rank 0 at")
    for rank, result in enumerate(living):
        for mistake, text, own in zip(result["mistakes"], texts, ("ValueError", "ValueError", "PeerDied"),
                                      strict=True):
            assert mistake.kind == (own if rank == 1 else "PeerError"), f"rank {rank}: {mistake}"
            assert text in mistake.text
            assert mistake.is_within(3)


def _die_while_connecting(rank, size):
    team = team_of(rank, size, 1)
    if rank == 2:
        liveness.Liveness._connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return outcome(lambda: start(team))


def test_liveness_death_while_the_nodes_connect_ends_it():
    results = process_ranks(_die_while_connecting, 3, may_die=(2,))
    for got in results[:2]:
        assert got.kind == "PeerDied" and is_soon(got.seconds, 3), str(got)


@pytest.mark.parametrize("text", ["0.5", "soon", "nan"])
def test_liveness_rejects_a_wrong_node_timeout(monkeypatch, text):
    monkeypatch.setenv("EPMOE_NODE_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="EPMOE_NODE_TIMEOUT_S"):
        liveness._node_timeout_s()


# ---- the world of a node ----


def test_liveness_world_says_which_node_it_is():
    """A death on the node names the rank among all; an end elsewhere names no rank of this node."""
    a, b, c = epmoe.thread_worlds(3)
    for world in (a, b, c):
        _C.world_set_place(world._c, 2, 6)
        assert _reason(world) is None
    _C.world_abort(a._c, _C.EPEERDIED, "rank 1 (rank 1 of node 0) died")
    for world in (a, b, c):
        got = outcome(lambda: world.exchange(b"x"))
        assert got.kind == "PeerDied" and got.text == "rank 1 (rank 1 of node 0) died"
        assert world.lost_ranks() == []
        page = world.flight_record().splitlines()
        assert page[0] == "culprit: on another node, as the next line says" and "PeerDied" in page[1]
    a, b = epmoe.thread_worlds(2)
    for world in (a, b):
        _C.world_set_place(world._c, 2, 6)
    with pytest.raises(KeyError), b:
        raise KeyError
    got = outcome(lambda: a.exchange(b"x"))
    assert got.text.startswith("rank 7 (rank 1 of node 2): rank 1 left the world alone")
    assert a.lost_ranks() == [1] and _reason(b) is None
