"""Worlds that end in every way, on the CPU. `soak.py leaks --device cuda` does the same on GPUs."""

import threading
import time

import pytest

import endings
import epmoe
from cases import keep, outcome, process_ranks
from epmoe import _C
from epmoe.testing import run_threads
from pace import HANG_S, WAIT_S, until_ended
from traces import held

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("how", endings.ENDINGS)
def test_endings_leave_nothing(how):
    endings.end_all(how, 3, "cpu")


def test_endings_forked_child_raises():
    """A child cannot use the objects of its parent. Its calls raise EpClosed, and the parent still works."""
    endings.fork_all(2, "cpu")


def test_endings_interpreter_exits_without_close():
    endings.exit_unclosed("cpu")


def test_endings_interpreter_exits_during_operation():
    endings.exit_busy("cpu")


def _end_without_close(rank, size):
    """Rank main: rank 1 ends in order, but does not close its world."""
    world = epmoe.World.of(None)  # which the module keeps until the process ends
    world.exchange(b"")
    if rank == 1:
        return None
    until_ended(world)
    return outcome(world.check)


def test_endings_process_of_multiprocessing_has_left_and_not_died():
    """A process that multiprocessing has forked need not call the functions of atexit."""
    got = process_ranks(_end_without_close, 2)[0]
    assert got.kind == "PeerDied" and "rank 1 left the world alone" in got.text


def test_endings_garbage_collection_leaves_nothing():
    """Objects that are never closed are freed by the garbage collection."""

    def life():
        world = epmoe.thread_worlds(1)[0]
        heap = epmoe.SymmetricHeap(world, 1 << 16, "cpu")
        heap.malloc_symmetric((4,)).fill_(1)
        layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=4, device="cpu")
        keep(world, layer)  # creates a cycle of references

    for _ in range(5):
        life()
    before = held()
    for _ in range(30):
        life()
    after = held()
    for what in ("fds", "memfds", "heaps", "threads"):
        assert after[what] <= before[what], f"{what}: {before} became {after}"


def test_world_deleted_while_it_waits():
    endings.drop_busy(3, "cpu")


def close_in_threads(closes):
    """Call functions, each in a thread of its own, which begin together.  Returns their errors."""
    begin, errors = threading.Barrier(len(closes)), []

    def call(close):
        begin.wait()
        try:
            close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=[c], daemon=True) for c in closes]
    for t in threads:
        t.start()
    for t in threads:
        t.join(HANG_S)
    assert not any(t.is_alive() for t in threads)
    return errors


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_world_closed_by_several_threads(num_ranks):
    """Of the threads of a rank one closes it, and the others find it closed."""
    for _ in range(300 // num_ranks):
        assert not close_in_threads([w.close for w in 2 * epmoe.thread_worlds(num_ranks)])


def _make_closable(world, kind):
    if kind == "heap":
        return epmoe.SymmetricHeap(world, 1 << 16, "cpu").close
    if kind == "low latency":
        return epmoe.LowLatencyAll2All(world, 8, 16, 2, 4, device="cpu").finalize
    return epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=4, device="cpu").finalize


@pytest.mark.parametrize("kind", ("heap", "layer", "low latency"))
def test_endings_of_a_heap_closed_by_several_threads(kind):
    """Of the threads of a rank one closes it, and the others find it closed. The next call works."""

    def main(world):
        found = []
        for _ in range(30):
            close = _make_closable(world, kind)
            found += close_in_threads([close, close] if world.rank == 0 else [close])
            world.exchange(b"")
        return found

    assert not any(run_threads(main, 2))


def test_world_that_ends_during_a_close_says_why():
    """Also if another thread leaves it meanwhile, as World() does with worlds that have ended."""
    for _ in range(100):
        world, other = epmoe.thread_worlds(2)
        errors = []

        def close():
            try:
                world.close()
            except epmoe.EpTimeout as error:
                errors.append(error)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        while thread.is_alive() and "close" not in world.flight_record():
            time.sleep(0.001)  # until it waits for the other rank
        time.sleep(0.01)
        _C.world_abort(other._c, _C.ETIMEOUT, "the other rank has given up")
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            try:
                world.check()
            except epmoe.EpError:
                break
        world._leave(False)
        thread.join(HANG_S)
        other._leave(False)
        assert len(errors) == 1 and "the other rank has given up" in str(errors[0])
