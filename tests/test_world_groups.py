"""Worlds of process groups, subgroups and meshes; exchange(), timeouts, leaving and closing."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

import epmoe
from cases import (Case, check_case, check_outcomes, keep, make_layer, outcome, process_ranks, run_case,
                   run_routing)
from epmoe.testing import meeting_place, run_ranks, run_threads
from epmoe.comm.world import default_timeout_s
from pace import HANG_S, WAIT_S, is_soon, slowness, until_ended, wait_until
from traces import grown, held

pytestmark = pytest.mark.cpu_only
CASE = Case(topk=3, tokens="unequal")


def _default_group(rank, world_size):
    world = epmoe.World()
    same = epmoe.World.of(None) is epmoe.World.of(dist.group.WORLD)
    text = repr(world)
    got = world.exchange(bytes([rank]) * 3)
    empty, full = world.exchange(b""), world.exchange(bytes([rank]) * 512)
    result = run_case(world, "cpu", CASE)
    world.close()
    world.close()
    epmoe.World.of(None).close()
    return same, text, got, len(empty), [f[-1] for f in full], result, outcome(world.check).kind


def test_world_of_default_group():
    """The ranks are new interpreters, as a launcher starts them."""
    results = run_ranks(_default_group, 3, timeout_s=HANG_S)
    for rank, (same, text, got, n, full, _, after) in enumerate(results):
        assert same and text == f"epmoe.World(rank={rank}, size=3)" and after == "EpClosed"
        assert got == [bytes([r]) * 3 for r in range(3)] and n == 3 and full == [0, 1, 2]
    check_case([r[5] for r in results], CASE)


def _subgroups(rank, world_size):
    """Rank main: two worlds of two ranks and one world of all four ranks are used at the same time."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = epmoe.World(pairs[rank // 2])
    everyone = epmoe.World.of(None)
    layer, wide = make_layer(pair, "cpu", CASE), make_layer(everyone, "cpu", CASE)
    results = [(run_routing(layer, CASE), run_routing(wide, CASE)) for _ in range(3)][-1]
    facts = (pair.rank, pair.size, everyone.rank, everyone.size)
    layer.finalize()
    pair.close()
    again = run_routing(wide, CASE)  # the close of one world does not affect the other
    wide.finalize()
    everyone.close()
    return results, again, facts


def test_world_of_subgroups():
    results = process_ranks(_subgroups, 4)
    assert [r[2] for r in results] == [(0, 2, 0, 4), (1, 2, 1, 4), (0, 2, 2, 4), (1, 2, 3, 4)]
    for pair in (results[:2], results[2:]):
        check_case([r[0][0] for r in pair], CASE)
    check_case([r[0][1] for r in results], CASE)
    check_case([r[1] for r in results], CASE)


def _mesh(rank, world_size):
    """Rank main: layers over a mesh of one dimension and over one dimension of a mesh of two."""
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    wrong = outcome(lambda: epmoe.World(grid))
    facts, results = [], []
    for mesh in (line, grid["ep"]):
        layer = epmoe.EPAll2AllLayer(mesh, CASE.max_tokens, CASE.hidden, CASE.topk,
                                     num_tot_experts=2 * mesh.size(), dtype=CASE.dtype, device="cpu")
        facts.append((layer.rank, layer.world_size, epmoe.World.of(mesh) is layer.world))
        results.append(run_routing(layer, CASE))
        layer.finalize()
        layer.world.close()
    return wrong, facts, results


def test_world_of_a_device_mesh():
    results = process_ranks(_mesh, 4)
    for rank, (wrong, facts, _) in enumerate(results):
        check_outcomes([wrong], "ValueError", "2 dimensions", "mesh['ep']")
        assert facts == [(rank, 4, True), (rank % 2, 2, True)]
    check_case([r[2][0] for r in results], CASE)
    check_case([r[2][1] for r in results[:2]], CASE)
    check_case([r[2][1] for r in results[2:]], CASE)


@pytest.mark.parametrize("attribute", ["get_group", "mesh"])
def test_world_of_no_group_says_what_is_wanted(attribute):
    """An object that has only one attribute of a DeviceMesh is none."""
    got = outcome(lambda: epmoe.World(types.SimpleNamespace(**{attribute: None})))
    check_outcomes([got], "TypeError", "wanted a ProcessGroup, a DeviceMesh", "SimpleNamespace")


def _heaps_by_group(rank, world_size):
    with epmoe.SymmetricHeap(None, 1 << 16, "cpu") as heap:
        t = heap.malloc_symmetric((4,))
        heap.put(t, torch.full((4,), rank + 1.0), (rank + 1) % world_size)
        heap.barrier()
        got = t[0].item()
    heap.world.close()
    return got


def test_world_heap_of_default_group():
    assert process_ranks(_heaps_by_group, 3) == [3.0, 1.0, 2.0]


def test_world_of_one():
    """Without torch.distributed, a world consists of this process alone. All operations work."""
    world = epmoe.World(timeout_s=WAIT_S)
    assert (world.rank, world.size, world.exchange(b"ab")) == (0, 1, [b"ab"])
    world.close()
    check_case(run_threads(lambda w: run_case(w, "cpu", CASE), 1), CASE)


def test_world_timeout_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("EPMOE_TIMEOUT_S", raising=False)
    assert default_timeout_s() == 300.0
    monkeypatch.setenv("EPMOE_TIMEOUT_S", "0.4")
    assert default_timeout_s() == 0.4

    worlds = epmoe.thread_worlds(2)
    got = outcome(lambda: worlds[0].exchange(b"x"))
    check_outcomes([got], "EpTimeout", "rank 1", within_s=2)
    assert got.seconds > 0.3
    for w in worlds:
        w._leave(False)


@pytest.mark.parametrize("by_heap", [False, True], ids=["world", "heap"])
def test_world_timeout_can_be_set_by_layer(ranks, by_heap):
    """timeout_s of a layer sets the timeout of its world, which is given as a group or by a heap."""
    limit = 0.5 * slowness()

    def run(world, device):
        world.set_timeout(WAIT_S)
        options = {"device": device, "ep_group": world}
        if by_heap:
            options = {"heap": epmoe.SymmetricHeap(world, 1 << 20, device), "ep_group": None}
        layer = epmoe.EPAll2AllLayer(max_tokens=8, hidden=16, topk=2, num_tot_experts=world.size,
                                     timeout_s=limit, **options)
        keep(world, layer)
        world.exchange(b"x")
        if world.rank == 0:
            return outcome(layer.ep_barrier_all)
        until_ended(world)
        return outcome(lambda: None)

    got = ranks(run, world_size=2)[0]
    check_outcomes([got], "EpTimeout", "rank 1", within_s=limit + 1.5)


def test_world_left_by_exception():
    """A rank whose with-block raises leaves the world. The other rank raises PeerDied before its limit."""

    def run(world):
        if world.rank == 1:
            with pytest.raises(KeyError), world:
                raise KeyError("mine")
            return None
        return outcome(lambda: world.exchange(b"x"))

    got, _ = run_threads(run, 2, timeout_s=HANG_S)
    check_outcomes([got], "PeerDied", "rank 1", "left the world", within_s=4)


def test_world_leaving_is_reported_as_leaving():
    """A rank leaves while another sends to it. The error says that it left, and not that it died."""
    texts, lock = [], threading.Lock()

    def pair():
        first, second = epmoe.thread_worlds(2, WAIT_S)
        gate = threading.Barrier(2)

        def leave():
            gate.wait()
            second._leave(False)

        t = threading.Thread(target=leave)
        t.start()
        gate.wait()
        got = outcome(lambda: first.exchange(b"x"))
        t.join()
        first._leave(False)
        with lock:
            texts.append(got.text)

    threads = [threading.Thread(target=pair) for _ in range(60)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(HANG_S)
    assert len(texts) == 60 and all("rank 1 left the world" in t for t in texts), set(texts)


def test_world_closed_is_not_returned_again():
    first = epmoe.World.of(None)
    first.close()
    second = epmoe.World.of(None)
    assert second is not first and epmoe.World.of(None) is second
    second.close()


def _world_after_an_end(rank, world_size, how):
    """Rank main: after the default world has ended, create a layer without and with a new world."""
    def make():
        return epmoe.EPAll2AllLayer(None, CASE.max_tokens, CASE.hidden, CASE.topk,
                                    num_tot_experts=2 * world_size, dtype=CASE.dtype,
                                    device="cpu", timeout_s=WAIT_S)

    first = make()
    if rank == 0 and how == "late":
        first.world.set_timeout(0.5)
    if rank == 1 and how == "late":
        until_ended(first.world)
    if rank == 1 and how == "left":
        with contextlib.suppress(KeyError), first.world:
            raise KeyError("mine")
    ended = outcome(first.ep_barrier_all)
    again = outcome(make)
    before = held()
    world = epmoe.World()
    # After "left", the rank that left keeps its sockets for two seconds, for messages on their way.
    left = grown(before, held(), maps=8) if how == "late" else ""
    second = make()
    is_default, is_new = epmoe.World.of(None) is world is second.world, first.world is not world
    return ended, again, is_default, is_new, run_routing(second, CASE), left


@pytest.mark.parametrize("how, kinds", [("late", ["EpTimeout", "EpTimeout"]),
                                        ("left", ["PeerDied", "EpClosed"])])
def test_world_replaces_ended_default_world(how, kinds):
    """A new World becomes the default world of its group, which new layers use.

    Until then, every new layer raises the error that ended the old world.
    """
    results = process_ranks(_world_after_an_end, 2, how)
    for i in (0, 1):
        check_outcomes([r[i] for r in results], kinds, within_s=4)
    assert all(is_default and is_new for _, _, is_default, is_new, *_ in results)
    assert [r[5] for r in results] == ["", ""], "the ended world still has its thread and its sockets"
    check_case([r[4] for r in results], CASE)


def _misbehave(rank, world_size, how):
    if rank == 1 and how == "raise":
        raise KeyError("the reason")
    if rank == 1 and how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(HANG_S)
    return rank


@pytest.mark.parametrize("how, text", [("raise", "KeyError: 'the reason'"),
                                       ("exit", "ended without a result"), ("hang", "not done after")])
def test_world_run_ranks_reports_failure(how, text):
    """run_ranks reports which rank failed, and why."""
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1") as e:
        process_ranks(_misbehave, 2, how, backend=None, timeout_s=3 if how == "hang" else HANG_S)
    assert text in str(e.value) and is_soon(time.monotonic() - start, 15)
    assert process_ranks(_misbehave, 2, "exit", backend=None, may_die=(1,)) == [0, None] or how != "exit"


RANKS_PROGRAM = """
import os, signal, sys, time
from epmoe.testing import run_ranks


def main(rank, world_size, folder):
    os.rename(os.path.join(folder, "new"), os.path.join(folder, str(os.getpid())))
    time.sleep(1000)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell
    open(os.path.join(sys.argv[1], "new"), "w").close()
    try:
        run_ranks(main, 1, sys.argv[1], backend=None)
    except KeyboardInterrupt:
        print("caught", flush=True)
        time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_world_run_ranks_leaves_no_process(tmp_path, number):
    """The program catches Ctrl-C and goes on, or it is killed."""
    script, folder = tmp_path / "program.py", tmp_path / "pids"
    script.write_text(RANKS_PROGRAM)
    folder.mkdir()
    program = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.PIPE)
    try:
        wait_until(lambda: any(name.name.isdigit() for name in folder.iterdir()), "a rank has started")
        pid = int(next(folder.iterdir()).name)
        program.send_signal(number)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the rank has ended", 20 * slowness())
        assert number != signal.SIGINT or program.stdout.readline() == b"caught\n"
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def _load_data(rank, world_size):
    loader = torch.utils.data.DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork")
    return [int(x) for x in loader]


def test_world_run_ranks_lets_ranks_have_processes():
    """A DataLoader with workers starts processes, which a daemon may not."""
    assert process_ranks(_load_data, 2, backend=None) == [[0, 1, 2, 3]] * 2


def test_world_meeting_place_listens_on_loopback_only():
    store = meeting_place()
    listeners = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        listeners += [r[1] for r in rows if r[3] == "0A" and int(r[1].rpartition(":")[2], 16) == store.port]
    assert listeners == [f"0100007F:{store.port:04X}"]


def test_world_run_threads_reports_failure():
    """run_threads reports which rank failed and why, and does not wait forever for a thread."""

    def run(world):
        if world.rank == 1:
            raise KeyError("the reason")
        world.exchange(b"x")

    with pytest.raises(AssertionError, match="KeyError: 'the reason'") as e:
        run_threads(run, 2, timeout_s=HANG_S)
    assert "PeerDied" in str(e.value)
    before, gate = threading.active_count(), threading.Event()
    with pytest.raises(AssertionError, match="not done after"):
        run_threads(lambda world: gate.wait(), 1, timeout_s=0.2)
    gate.set()
    wait_until(lambda: threading.active_count() <= before, "the rank's thread has ended")


# ---- a world in a separate program ----


def run_program(program):
    """Run a Python program, which has no other threads than those of its worlds."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)


SIGNAL_PROGRAM = """
import os, signal, epmoe
world = epmoe.thread_worlds(1)[0]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
print(signal.sigtimedwait({signal.SIGUSR1}, 120).si_signo == signal.SIGUSR1)
"""


def test_world_watchdog_blocks_signals():
    """A program that uses sigtimedwait blocks the signal in its threads. The watchdog must not receive it."""
    done = run_program(SIGNAL_PROGRAM)
    assert (done.returncode, done.stdout) == (0, "True\n"), done


TOO_FEW_FILES_PROGRAM = """
import resource, epmoe
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
try:
    epmoe.thread_worlds(8)
except epmoe.EpError as e:
    print(e)
"""


def test_world_creation_error_is_kept():
    """The error says why the world cannot be created. Errors of the teardown do not replace it."""
    done = run_program(TOO_FEW_FILES_PROGRAM)
    assert done.stdout == "cannot create a socket pair: Too many open files\n", done
