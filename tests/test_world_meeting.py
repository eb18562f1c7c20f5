"""The rendezvous of ranks that create a world.

A rank may fail, be absent or have another build. A process that is no rank may connect.
"""

import os
import signal
import socket
import threading
import time
import unittest.mock

import pytest
import torch
import torch.distributed as dist

import epmoe
from cases import Case, check_case, check_outcomes, make_layer, outcome, process_ranks, run_case
from epmoe import _C
from epmoe.comm import rendezvous
from pace import WAIT_S, Events, is_soon, slowness, when_waiting
from traces import grown, held

CASE = Case(topk=3, tokens="unequal")
WRONG_TIMES = (-1, 0, 1e6, float("nan"), "soon", [1])


def _one_rank_cannot_create(rank, world_size):
    """Rank main: rank 1 fails to create a world, for several reasons.

    The reasons are wrong timeouts (as argument of the world, of a layer, and in the environment), and a
    socket that cannot be created.
    """

    def world(timeout_s=WAIT_S):
        return epmoe.World(timeout_s=timeout_s)

    def layer(timeout_s=WAIT_S):
        return epmoe.EPAll2AllLayer(None, 8, 16, 2, num_tot_experts=4, device="cpu", timeout_s=timeout_s)

    def no_socket():
        raise OSError("no socket")

    before, got = held(), []
    for make in (world, layer):
        got += [outcome(lambda t=t: make(t) if rank == 1 else make()) for t in WRONG_TIMES]
    with unittest.mock.patch.dict(os.environ, {"EPMOE_TIMEOUT_S": "never"} if rank == 1 else {}):
        got.append(outcome(epmoe.World))
    with unittest.mock.patch.object(_C, "world_listen", no_socket if rank == 1 else _C.world_listen):
        got.append(outcome(epmoe.World))
    left = grown(before, held(), maps=8)
    with epmoe.World(timeout_s=WAIT_S) as w:
        return got, left, run_case(w, "cpu", CASE)


def test_world_creation_fails_on_one_rank():
    """The other ranks raise PeerError at once. The next world works, and no descriptor is left open."""
    results = process_ranks(_one_rank_cannot_create, 3)
    kinds = 2 * (["ValueError"] * (len(WRONG_TIMES) - 1) + ["TypeError"]) + ["ValueError", "OSError"]
    for of_all, kind in zip(zip(*(got for got, _, _ in results)), kinds, strict=True):
        check_outcomes(of_all, ["PeerError", kind, "PeerError"])
        check_outcomes([of_all[0], of_all[2]], "PeerError", "rank 1 could not make its world")
    assert [left for _, left, _ in results] == ["", "", ""], "descriptors are left open"
    check_case([r for _, _, r in results], CASE)


def _world_of_two_builds(rank, world_size):
    """Rank main: rank 1 has another ABI version. Then all ranks create a world with the same version."""
    with unittest.mock.patch.object(_C, "ABI_VERSION", _C.ABI_VERSION + (rank == 1)):
        got = outcome(lambda: epmoe.World(timeout_s=WAIT_S))
    with epmoe.World(timeout_s=WAIT_S) as w:
        return got, run_case(w, "cpu", CASE)


def test_world_of_two_builds_raises_mismatch():
    results = process_ranks(_world_of_two_builds, 3)
    for rank, (got, _) in enumerate(results):
        check_outcomes([got], "EpMismatch", f"rank {0 if rank == 1 else 1} has another epmoe")
    check_case([r for _, r in results], CASE)


def _absent_from_the_meeting(rank, world_size, folder, limit):
    """Rank main: rank 1 exchanges names through the process group, but does not connect to rank 0."""
    events = Events(folder)
    events.set(str(rank))
    events.wait(str(1 - rank))
    if rank == 1:
        rendezvous.all_gather_bytes(dist.group.WORLD, rendezvous.listen()[1], WAIT_S)
        events.wait("over")
        return None
    got = outcome(lambda: epmoe.World(timeout_s=limit))
    events.set("over")
    return got


def test_world_creation_times_out_without_connection(tmp_path):
    results = process_ranks(_absent_from_the_meeting, 2, str(tmp_path), slowness())
    check_outcomes(results[:1], "EpTimeout", "rank 1 did not connect")


def _absent_altogether(rank, world_size, folder):
    """Rank main: rank 1 does nothing until rank 0 has raised."""
    if rank == 1:
        return Events(folder).wait("over")
    got = outcome(lambda: epmoe.World(timeout_s=1.0))
    Events(folder).set("over")
    return got


def test_world_creation_times_out_without_a_rank(tmp_path):
    """The limit is timeout_s of the world, not the timeout of the process group."""
    results = process_ranks(_absent_altogether, 2, str(tmp_path))
    check_outcomes(results[:1], "EpTimeout", "rank 0 timed out after 1 s: not every rank")


def _unknown_clients_connect(rank, world_size):
    """Rank main: other clients connect to the socket of rank 0 before the ranks do.

    They do not know the nonce. They send nothing, or random messages with descriptors.
    """
    real = _C.world_create
    keep = []

    def create(me, size, timeout_s, fd, nonce, names):
        if me != 0:
            name = names[: _C.NAME_BYTES]
            address = b"\0" + name[1 : name[0]]
            # One of these has the length of a valid message.
            messages = [bytes(_C.ALL_GATHER_BYTES + n) for n in range(0, 65, 8)]
            for junk in (b"", b"x", *messages, bytes(4000)):
                s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                s.connect(address)
                if junk:
                    socket.send_fds(s, [junk], [0, 1])  # the receiver must close these descriptors
                    keep.append(s)
                else:
                    s.close()
        return real(me, size, timeout_s, fd, nonce, names)

    before = held()
    _C.world_create = create
    try:
        world = epmoe.World(timeout_s=WAIT_S)
    finally:
        _C.world_create = real
    result = run_case(world, "cpu", CASE)
    world.close()
    for s in keep:
        s.close()
    return result, grown(before, held(), maps=8)


def test_world_rejects_unknown_clients():
    results = process_ranks(_unknown_clients_connect, 2)
    check_case([r for r, _ in results], CASE)
    assert [more for _, more in results] == ["", ""], "descriptors of unknown clients are left open"


def _silent_client(rank, world_size):
    """Rank main: a client connects to a rank's socket and sends nothing."""
    real = _C.world_create
    keep = []

    def create(me, size, timeout_s, fd, nonce, names):
        if me == 1:
            name = names[: _C.NAME_BYTES]
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            s.connect(b"\0" + name[1 : name[0]])
            keep.append(s)
        return real(me, size, timeout_s, fd, nonce, names)

    _C.world_create = create
    got = outcome(lambda: epmoe.World(timeout_s=WAIT_S).close())
    _C.world_create = real
    return got


def test_world_does_not_wait_for_silent_client():
    """A silent client must not use up the time in which the ranks connect."""
    check_outcomes(process_ranks(_silent_client, 2), "nothing", within_s=3.5)


def _raised_by(call):
    """(the outcome of call(), the class of the exception from which its exception was raised)"""
    causes = []

    def noted():
        try:
            return call()
        except Exception as error:
            causes.append(type(error.__cause__).__name__)
            raise

    return outcome(noted), causes[0] if causes else None


def _dies_before_its_world(rank, world_size):
    """Rank main: rank 1 is killed while the other ranks wait for it in World()."""
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return _raised_by(lambda: epmoe.World(timeout_s=WAIT_S))


def test_world_creation_reports_death_in_the_process_group():
    """All survivors raise PeerDied, also those not next to the dead rank. The cause is gloo's error."""
    results = process_ranks(_dies_before_its_world, 4, may_die=(1,))
    survivors = [r for r in results if r is not None]
    assert len(survivors) == 3
    check_outcomes([got for got, _ in survivors], "PeerDied", "a rank of the group died", "onnection",
                   within_s=3)
    assert [cause for _, cause in survivors] == 3 * ["RuntimeError"]


def _group_fails(rank, world_size, folder):
    """Rank main: errors of the process group's store. Rank 0 alone calls World."""
    if rank == 1:
        return Events(folder).wait("over")
    got = []
    for text in ("broken pipe", "no such store", "wait timeout"):
        with unittest.mock.patch.object(rendezvous, "_store_of", side_effect=RuntimeError(text)):
            got.append(_raised_by(lambda: epmoe.World(timeout_s=WAIT_S)))
    Events(folder).set("over")
    return got


def test_world_creation_turns_errors_of_the_process_group_into_its_own(tmp_path):
    got = process_ranks(_group_fails, 2, str(tmp_path))[0]
    check_outcomes([o for o, _ in got], ["PeerDied", "EpError", "EpTimeout"], within_s=5)
    assert [cause for _, cause in got] == 3 * ["RuntimeError"]
    assert [o.kind for o, _ in got] == ["PeerDied", "EpError", "EpTimeout"]
    assert "no such store" in got[1][0].text and "process group" in got[1][0].text


def _comes_alone(rank, world_size, folder):
    """Rank main: each rank in turn is alone in World(). Then all make a world, and use their group."""
    events, got = Events(folder), []
    for alone in range(world_size):
        if rank == alone:
            got.append(outcome(lambda: epmoe.World(timeout_s=0.2)))
            events.set(f"{alone} is over")
        events.wait(f"{alone} is over")
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)  # the group's own collectives are not one apart
    results = []
    for _ in range(2):
        with epmoe.World(timeout_s=WAIT_S) as world:
            results.append(run_case(world, "cpu", CASE))
    return got, total.item(), results


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_world_can_be_made_after_ranks_came_alone(tmp_path, num_ranks):
    results = process_ranks(_comes_alone, num_ranks, str(tmp_path))
    check_outcomes([got[0] for got, _, _ in results], "EpTimeout", "not every rank", within_s=3)
    assert {total for _, total, _ in results} == {num_ranks * (num_ranks + 1) / 2}
    for i in range(2):
        check_case([r[i] for _, _, r in results], CASE)


def _fails_to_connect(rank, world_size):
    """Rank main: rank 1 has met the others, and then cannot connect. The next world works."""
    real = _C.world_create

    def create(me, size, timeout_s, fd, nonce, names):
        _C.world_unlisten(fd)
        raise OSError("no sockets are left")

    with unittest.mock.patch.object(_C, "world_create", create if rank == 1 else real):
        got = outcome(lambda: epmoe.World(timeout_s=WAIT_S))
    with epmoe.World(timeout_s=WAIT_S) as world:
        return got, run_case(world, "cpu", CASE)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_world_rank_that_fails_to_connect_is_not_called_dead(num_ranks):
    results = process_ranks(_fails_to_connect, num_ranks)
    got = [o for o, _ in results]
    check_outcomes(got[1:2], "OSError")
    check_outcomes(got[:1] + got[2:], "PeerError", "rank 1 could not make its world (OSError)", within_s=3)
    check_case([r for _, r in results], CASE)


def _forks_and_makes_a_world(rank, world_size):
    """Rank main: a forked child calls World() on the group of its parent."""
    mine, theirs = os.pipe()
    if os.fork() == 0:
        got = outcome(epmoe.World)
        os.write(theirs, f"{got.kind} {got.text}".encode())
        os._exit(0)
    os.close(theirs)
    begin = time.monotonic()
    answer = os.read(mine, 1000).decode()
    return answer, time.monotonic() - begin


def test_world_of_the_parents_group_in_a_forked_child():
    for answer, seconds in process_ranks(_forks_and_makes_a_world, 2):
        assert answer.startswith("EpClosed this process was forked, and the process group"), answer
        assert is_soon(seconds, 3)


def _handlers_call_epmoe(rank, world_size, folder):
    """Rank main: a handler of rank 0 calls epmoe while the rank waits in World(), and in an exchange."""
    events, seen = Events(folder), []
    other = epmoe.World(timeout_s=WAIT_S)
    heap = epmoe.SymmetricHeap(other, 1 << 20, device="cpu")
    layer = make_layer(other, "cpu", CASE, heap=heap)

    def handler(number, frame):
        calls = (lambda: other.exchange(b"wrong"), lambda: heap.malloc_symmetric(8), layer.finalize,
                 heap.close, other.close, epmoe.World, lambda: epmoe.SymmetricHeap(other, 1 << 20, "cpu"),
                 lambda: make_layer(other, "cpu", CASE, heap=heap))
        seen.extend(outcome(call) for call in calls)
        events.set(f"handled {number}")

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handler)
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    else:
        events.wait(f"handled {int(signal.SIGUSR1)}")
    epmoe.World(timeout_s=WAIT_S).close()
    if rank == 0:
        when_waiting(other, "exchange", os.kill, os.getpid(), signal.SIGUSR2)
    else:
        events.wait(f"handled {int(signal.SIGUSR2)}")
    steps = [other.exchange(bytes([i])) for i in range(3)]
    heap.malloc_symmetric(8)
    layer.finalize()
    heap.close()
    other.close()
    return seen, steps


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_world_handlers_of_signals_cannot_call_epmoe(tmp_path, num_ranks):
    """Their calls would take the place of the program's next calls, on this rank only."""
    results = process_ranks(_handlers_call_epmoe, num_ranks, str(tmp_path))
    seen = results[0][0]
    assert len(seen) == 16 and not any(s for s, _ in results[1:])
    check_outcomes(seen, "ValueError", "a signal handler called epmoe while an operation waits")
    for _, steps in results:
        assert steps == [num_ranks * [bytes([i])] for i in range(3)]


def _fill_queue(name):
    """Connect to a socket that accepts no connection yet, until its queue is full."""
    keep = []
    while True:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        keep.append(s)
        try:
            s.connect(b"\0" + name[1 : name[0]])
        except BlockingIOError:
            return keep


def _suspended_in_its_creation(rank, world_size, where, folder, slow):
    """Rank main: all ranks are suspended for longer than the limit while they create a world.

    addresses: ranks 0 and 1 wait for the address of rank 2.
    connection: ranks 1 and 2 connect to rank 0, which accepts no connection yet.
    """
    events, real, keep = Events(folder), _C.world_create, []

    def create(me, size, timeout_s, fd, nonce, names):
        if where == "connection" and me == 1:
            keep.extend(_fill_queue(names[: _C.NAME_BYTES]))
            events.set("waiting")
        if where == "connection" and me == 0:
            events.wait("continued")
            time.sleep(0.3)
        return real(me, size, timeout_s, fd, nonce, names)

    with epmoe.World(timeout_s=WAIT_S) as world:
        pids = [int.from_bytes(b, "little") for b in world.exchange(os.getpid().to_bytes(4, "little"))]
    if rank == 1 and os.fork() == 0:  # a process that is no rank suspends all ranks
        events.wait("waiting")
        time.sleep(0.3)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5 * slow)
        for pid in pids[::-1]:
            os.kill(pid, signal.SIGCONT)
        events.set("continued")
        os._exit(0)
    if where == "addresses" and rank == 0:
        events.set("waiting")
    if where == "addresses" and rank == 2:
        events.wait("continued")
        time.sleep(0.3)
    with unittest.mock.patch.object(_C, "world_create", create):
        got = outcome(lambda: epmoe.World(timeout_s=2 * slow).close())
    for s in keep:
        s.close()
    return got


@pytest.mark.parametrize("where", ["addresses", "connection"])
def test_world_creation_does_not_count_suspended_time(tmp_path, where):
    slow = slowness()
    results = process_ranks(_suspended_in_its_creation, 3, where, str(tmp_path), slow)
    check_outcomes(results, "nothing", within_s=20 * slow)
