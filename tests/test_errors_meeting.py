"""Handshakes that fail: the ranks make different collective calls, or something interrupts the handshake.

Different calls are calls on another heap, of another layer or of another kind. All ranks raise EpMismatch,
the calls have no effect, and the next call works. Interruptions are a signal handler, a suspended job and too
few file descriptors.
"""

import os
import resource
import signal
import time

import pytest
import torch

import epmoe
from cases import Case, check_outcomes, make_layer, outcome, process_ranks
from pace import WAIT_S, Events, slowness, when_waiting

BAD = 1
CASE = Case(num_local=2, topk=3, hidden=64, max_tokens=40)


class Objects:
    """A world, two heaps, and two layers, each of which has its own heap."""

    def __init__(self, world, device):
        self.world, self.device = world, device
        self.heaps = [epmoe.SymmetricHeap(world, 1 << 20, device) for _ in range(2)]
        self.layers = [make_layer(world, device, CASE) for _ in range(2)]
        self.tensors = [heap.malloc_symmetric((64,)) for heap in self.heaps]

    def check(self):
        """Use all objects, and check that the heaps are still symmetric."""
        for heap in self.heaps:
            offset = heap.offset(heap.malloc_symmetric((64,)))
            offsets = self.world.exchange(offset.to_bytes(8, "little"))
            assert len(set(offsets)) == 1, offsets
            heap.barrier()
        for layer in self.layers:
            layer.ep_barrier_all()
        make_layer(self.world, self.device, CASE, heap=self.heaps[0]).finalize()

    def close(self):
        for layer in self.layers:
            layer.finalize()
        for heap in self.heaps:
            heap.close()


# The call of rank BAD, the call of all other ranks, and the names of both in the message.
DIFFERENT_CALLS = {
    "malloc": (lambda t: t.heaps[1].malloc_symmetric(64), lambda t: t.heaps[0].malloc_symmetric(64),
               "allocation (heap 1)", "allocation (heap 0)"),
    "free": (lambda t: t.heaps[1].free(t.tensors[1]), lambda t: t.heaps[0].free(t.tensors[0]),
             "free (heap 1)", "free (heap 0)"),
    "free and malloc": (lambda t: t.heaps[0].free(t.tensors[0]), lambda t: t.heaps[0].malloc_symmetric(64),
                        "free (heap 0)", "allocation (heap 0)"),
    "close": (lambda t: t.heaps[1].close(), lambda t: t.heaps[0].close(), "heap close (heap 1)",
              "heap close (heap 0)"),
    "finalize": (lambda t: t.layers[1].finalize(), lambda t: t.layers[0].finalize(), "layer close (layer 1)",
                 "layer close (layer 0)"),
    "layer in a heap": (lambda t: make_layer(t.world, t.device, CASE, heap=t.heaps[1]),
                        lambda t: make_layer(t.world, t.device, CASE, heap=t.heaps[0]),
                        "layer creation (heap 1)", "layer creation (heap 0)"),
    "layer with a heap": (lambda t: make_layer(t.world, t.device, CASE, heap=t.heaps[1]),
                          lambda t: make_layer(t.world, t.device, CASE), "layer creation (heap 1)",
                          "agreement on a layer"),
    "exchange and close": (lambda t: t.world.exchange(b"x"), lambda t: t.heaps[0].close(), "exchange",
                           "heap close (heap 0)"),
    "exchange and malloc": (lambda t: t.world.exchange(bytes(24)), lambda t: t.heaps[0].malloc_symmetric(4),
                            "exchange", "allocation (heap 0)"),
    "world and heap": (lambda t: t.world.close(), lambda t: t.heaps[0].close(), "world close",
                       "heap close (heap 0)"),
    "world and exchange": (lambda t: t.world.close(), lambda t: t.world.exchange(b"x"), "world close",
                           "exchange"),
    "world and malloc": (lambda t: t.world.close(), lambda t: t.heaps[1].malloc_symmetric(4), "world close",
                         "allocation (heap 1)"),
}


@pytest.fixture
def new_world(ranks):
    """Start the test in a new world, so that the heaps and layers have known numbers."""
    ranks.close()
    yield
    ranks.close()


@pytest.mark.parametrize("what", DIFFERENT_CALLS)
def test_errors_different_collective_calls(ranks, what, new_world):
    bad_call, good_call, bad_name, good_name = DIFFERENT_CALLS[what]

    def run(world, device):
        objects = Objects(world, device)
        call = bad_call if world.rank == BAD else good_call
        got = outcome(lambda: call(objects))
        objects.check()
        objects.close()
        return got

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes(results, "EpMismatch", "ranks are in different collective calls: rank ",
                   f"rank {BAD} in {bad_name}", f" in {good_name}")


def test_errors_peer_view_of_unsupported_dtype_or_empty_tensor(ranks):
    """peer_view rejects dtypes that it does not support. The view of an empty tensor is empty."""

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        t, empty = heap.malloc_symmetric((64,), torch.uint8), heap.malloc_symmetric((0, 4))
        got = [outcome(lambda: heap.peer_view(t.view(dtype), 0))
               for dtype in (torch.bool, torch.float8_e4m3fn)]
        view = heap.peer_view(empty, 0)
        heap.close()
        return got, tuple(view.shape)

    for got, shape in ranks(run):
        check_outcomes(got, "TypeError", "dtype torch.", "one of torch.float32")
        assert shape == (0, 4)


# ---- interrupted handshakes: the ranks are processes, which have signals and limits of their own ----


class Stop(Exception):
    pass


def _interrupt(rank, world_size, what, folder):
    """While rank 0 runs a signal handler, rank 1 sends the frame that rank 0 awaits. The handler raises."""
    world, events = epmoe.World(timeout_s=WAIT_S), Events(folder)

    def handler(*_):
        events.set("in the handler")
        events.wait("rank 1 calls")
        time.sleep(0.3 * slowness())
        raise Stop

    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        when_waiting(world, "exchange #", os.kill, os.getpid(), signal.SIGALRM)
    else:
        events.wait("in the handler")
        events.set("rank 1 calls")
    return outcome(lambda: world.exchange(b"x") if what == "exchange" else world.close())


@pytest.mark.cpu_only
@pytest.mark.parametrize("what", ["exchange", "close"])
def test_errors_of_signal_handler_are_raised(tmp_path, what):
    """The exception of the handler is raised even if the awaited frame arrives while the handler runs."""
    first, _ = process_ranks(_interrupt, 2, what, str(tmp_path))
    assert first.kind == "Stop", first


def _suspend(rank, world_size, what, folder, slow):
    """A child of rank 1 suspends all ranks while rank 0 waits. After that, rank 1 calls, and then rank 2."""
    events = Events(folder)
    first = epmoe.World(timeout_s=WAIT_S)
    pids = [int.from_bytes(b, "little") for b in first.exchange(os.getpid().to_bytes(4, "little"))]
    world = epmoe.World(timeout_s=WAIT_S)
    heap = epmoe.SymmetricHeap(world, 1 << 20, "cpu")
    heap.barrier()
    world.set_timeout(2 * slow)
    if rank == 0:
        when_waiting(world, "barrier" if what == "barrier" else "exchange", events.set, "waiting")
    if rank == 1 and os.fork() == 0:  # a process outside the world suspends all ranks
        events.wait("waiting")
        time.sleep(0.3)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5 * slow)
        for pid in pids[::-1]:
            os.kill(pid, signal.SIGCONT)
        events.set("continued")
        os._exit(0)
    if rank:
        events.wait("continued")
        time.sleep(0.3 * rank)
    return outcome(lambda: heap.barrier() if what == "barrier" else world.exchange(b"x"))


@pytest.mark.cpu_only
@pytest.mark.parametrize("what", ["exchange", "barrier"])
def test_errors_none_after_suspended_job(tmp_path, what):
    """All ranks are suspended for longer than the timeout. This time does not count, so no wait times out."""
    slow = slowness()
    check_outcomes(process_ranks(_suspend, 3, what, str(tmp_path), slow), "nothing", within_s=20 * slow)


def _make_heap_with_few_descriptors(rank, world_size, num_free):
    """Rank 0 makes a heap with only num_free free descriptors. Then all ranks make another heap."""
    world = epmoe.World(timeout_s=WAIT_S)
    if rank == 0:
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, hard_limit))
        for fd in held[:num_free]:
            os.close(fd)
    got = outcome(lambda: epmoe.SymmetricHeap(world, 1 << 20, "cpu"))
    if rank == 0:
        for fd in held[num_free:]:
            os.close(fd)
    return got, outcome(lambda: epmoe.SymmetricHeap(world, 1 << 20, "cpu").close())


@pytest.mark.cpu_only
def test_errors_of_too_few_descriptors_name_the_rank():
    """Rank 0 can open its own heap but not all peers' heaps. The message names rank 0, not a peer.

    The world still works.
    """
    texts = set()
    for num_free in range(1, 6):
        for got, again in process_ranks(_make_heap_with_few_descriptors, 4, num_free):
            check_outcomes([got], "EpError" if got.kinds else "nothing", within_s=20)
            check_outcomes([again], "nothing", within_s=20)
            texts.add(got.text)
    assert any("rank 0" in text and "no file descriptor came with it" in text for text in texts), texts


# ---- the flight record does not read a finalized layer ----


@pytest.mark.cpu_only
def test_errors_record_has_no_finalized_layer():
    """The flight record must not read the words of a finalized layer: another allocation may use that memory.

    The test makes more layers, one after another, than a world can watch at a time.
    """
    world = epmoe.World(timeout_s=WAIT_S)
    heap, kept = epmoe.SymmetricHeap(world, 1 << 22, "cpu"), []
    for _ in range(300):
        layer = make_layer(world, "cpu", CASE, heap=heap)
        kept.append(layer.preprocess(torch.zeros(4, CASE.topk, dtype=torch.int64)))
        layer.finalize()
    heap.malloc_symmetric((1 << 16,)).fill_(7)
    assert "entered" not in world.flight_record()
    world.close()
