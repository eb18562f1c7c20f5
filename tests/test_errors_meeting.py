"""Calls in which all ranks meet, but not the same one: on another heap, of another layer, of another kind.
All are told, nothing is
done, and the next call works.  And what else may come between ranks that meet: a signal, a stop of them all,
too few descriptors."""

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


class Things:
    """Two heaps, two layers, each with a heap of its own, and their world."""

    def __init__(self, world, device):
        self.world, self.device = world, device
        self.heaps = [epmoe.SymmetricHeap(world, 1 << 20, device) for _ in range(2)]
        self.layers = [make_layer(world, device, CASE) for _ in range(2)]
        self.tensors = [heap.malloc_symmetric((64,)) for heap in self.heaps]

    def check(self):
        """Everything still works, and the heaps are symmetric."""
        for heap in self.heaps:
            offsets = self.world.exchange(heap.offset(heap.malloc_symmetric((64,))).to_bytes(8, "little"))
            assert len(set(offsets)) == 1, offsets
            heap.barrier()
        for layer in self.layers:
            layer.ep_barrier_all()
        make_layer(self.world, self.device, CASE, heap=self.heaps[0]).finalize()

    def close(self):
        for thing in self.layers:
            thing.finalize()
        for thing in self.heaps:
            thing.close()


# what rank BAD does, what all others do; how the error names the two
MEETINGS = {
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
                          lambda t: make_layer(t.world, t.device, CASE),
                          "layer creation (heap 1)", "agreement on a layer"),
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
def world_of_its_own(ranks):
    """The numbers of heaps and layers are those of a new world."""
    ranks.close()
    yield
    ranks.close()


@pytest.mark.parametrize("what", MEETINGS)
def test_errors_of_calls_that_do_not_belong_together(ranks, what, world_of_its_own):
    bad, good, bad_name, good_name = MEETINGS[what]

    def run(world, device):
        things = Things(world, device)
        got = outcome(lambda: (bad if world.rank == BAD else good)(things))
        things.check()
        things.close()
        return got

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes(results, "EpMismatch", "ranks are in different collective calls: rank ",
                   f"rank {BAD} in {bad_name}", f" in {good_name}")


def test_errors_peer_view_of_what_has_no_view(ranks):
    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        t, nothing = heap.malloc_symmetric((64,), torch.uint8), heap.malloc_symmetric((0, 4))
        got = [outcome(lambda: heap.peer_view(t.view(dtype), 0))
               for dtype in (torch.bool, torch.float8_e4m3fn)]
        view = heap.peer_view(nothing, 0)
        heap.close()
        return got, tuple(view.shape)

    for got, shape in ranks(run):
        check_outcomes(got, "TypeError", "dtype torch.", "one of torch.float32")
        assert shape == (0, 4)


# ---- what comes between ---- (processes: signals, limits)


class Stop(Exception):
    pass


def _interrupted(rank, world_size, what, folder):
    """The frame that rank 0 waits for comes while a signal's handler runs, which raises in the end."""
    world, events = epmoe.World(timeout_s=WAIT_S), Events(folder)

    def handler(*_):
        events.set("in the handler")
        events.wait("the other comes")
        time.sleep(0.3 * slowness())
        raise Stop

    if rank == 0:
        signal.signal(signal.SIGALRM, handler)
        when_waiting(world, "exchange #", os.kill, os.getpid(), signal.SIGALRM)
    else:
        events.wait("in the handler")
        events.set("the other comes")
    return outcome(lambda: world.exchange(b"x") if what == "exchange" else world.close())


@pytest.mark.cpu_only
@pytest.mark.parametrize("what", ["exchange", "close"])
def test_errors_of_a_signal_handler_are_raised_when_the_frame_comes_meanwhile(tmp_path, what):
    first, _ = process_ranks(_interrupted, 2, what, str(tmp_path))
    assert first.kind == "Stop", first


def _suspended(rank, world_size, what, folder, slow):
    """A child of rank 1 stops all ranks while rank 0 waits.  Rank 1 comes soon after that, then rank 2."""
    events = Events(folder)
    first = epmoe.World(timeout_s=WAIT_S)
    pids = [int.from_bytes(b, "little") for b in first.exchange(os.getpid().to_bytes(4, "little"))]
    world = epmoe.World(timeout_s=WAIT_S)
    heap = epmoe.SymmetricHeap(world, 1 << 20, "cpu")
    heap.barrier()
    world.set_timeout(2 * slow)
    if rank == 0:
        when_waiting(world, "barrier" if what == "barrier" else "exchange", events.set, "waiting")
    if rank == 1 and os.fork() == 0:  # somebody else stops them all
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
def test_errors_do_not_come_of_a_job_that_was_suspended(tmp_path, what):
    """All ranks are stopped for longer than the limit: nobody has waited for it, neither for the first to
    come nor for the last.
    """
    slow = slowness()
    check_outcomes(process_ranks(_suspended, 3, what, str(tmp_path), slow), "nothing", within_s=20 * slow)


def _without_descriptors(rank, world_size, num_free):
    world = epmoe.World(timeout_s=WAIT_S)
    if rank == 0:
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(64)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1,
                                                    resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for fd in held[:num_free]:
            os.close(fd)
    got = outcome(lambda: epmoe.SymmetricHeap(world, 1 << 20, "cpu"))
    if rank == 0:
        for fd in held[num_free:]:
            os.close(fd)
    return got, outcome(lambda: epmoe.SymmetricHeap(world, 1 << 20, "cpu").close())


@pytest.mark.cpu_only
def test_errors_of_too_few_descriptors_blame_no_peer():
    """Rank 0 can open its own heap, and not all of its peers': it is named, and the world goes on."""
    texts = set()
    for num_free in range(1, 6):
        for got, again in process_ranks(_without_descriptors, 4, num_free):
            check_outcomes([got], "EpError" if got.kinds else "nothing", within_s=20)
            check_outcomes([again], "nothing", within_s=20)
            texts.add(got.text)
    assert any("rank 0" in text and "no file descriptor came with it" in text for text in texts), texts


# ---- a layer that is finalized is looked at by nobody ----


@pytest.mark.cpu_only
def test_errors_record_has_no_finalized_layer():
    """Its words are somebody else's numbers; and more layers than a world can watch may have been there."""
    world = epmoe.World(timeout_s=WAIT_S)
    heap, kept = epmoe.SymmetricHeap(world, 1 << 22, "cpu"), []
    for _ in range(300):
        layer = make_layer(world, "cpu", CASE, heap=heap)
        kept.append(layer.preprocess(torch.zeros(4, CASE.topk, dtype=torch.int64)))
        layer.finalize()
    heap.malloc_symmetric((1 << 16,)).fill_(7)
    assert "entered" not in world.flight_record()
    world.close()
