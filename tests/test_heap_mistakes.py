"""The heap, where something is wrong on one rank, or different between ranks: everybody hears of it, and the
heap goes on.
"""

import resource

import pytest
import torch

import epmoe
from cases import MISTAKE_LIMIT_S, check_outcomes, outcome, process_ranks
from pace import WAIT_S
from test_heap_alloc import make_heap


def differing(world, device, call_of):
    heap = make_heap(world, device)
    world.set_timeout(MISTAKE_LIMIT_S)
    got = outcome(lambda: call_of(heap, world.rank))
    before = heap.stats()["used"]
    t = heap.malloc_symmetric((4,))
    ok = not t.any() and heap.offset(t) >= 0
    heap.free(t)
    used = heap.stats()["used"]
    heap.close()
    return got, bool(ok), before, used


@pytest.mark.parametrize("call, texts", [
    (lambda h, r: h.malloc_symmetric((100 + (r == 1),), torch.int32), ("rank 1", "404", "400")),
    (lambda h, r: h.malloc_symmetric((100,), torch.int64 if r == 1 else torch.int32),
     ("rank 1", "800", "400")),
    (lambda h, r: h.malloc_symmetric((100,), alignment=512 if r == 1 else 128), ("rank 1", "512", "128")),
    (lambda h, r: h.free(h.malloc_symmetric((4,))) if r == 1 else (h.malloc_symmetric((4,)),
                                                                   h.malloc_symmetric((4,))),
     ("rank 1", "in free (heap ", "in allocation (heap ")),
    (lambda h, r: h.free([h.malloc_symmetric((4,)), h.malloc_symmetric((0,))][r == 1]), ("rank 1", "frees")),
], ids=["size", "dtype", "alignment", "order", "nothing"])
def test_heap_ranks_that_differ(ranks, call, texts):
    results = ranks(differing, call, world_size=3, at_least=2)
    check_outcomes([r[0] for r in results], "EpMismatch", *texts)
    assert all(ok for _, ok, _, _ in results)


@pytest.mark.parametrize("call, kind, text", [
    (lambda h: h.malloc_symmetric((4,), alignment=3), "ValueError", "3"),
    (lambda h: h.malloc_symmetric((4,), alignment=0), "ValueError", "0"),
    (lambda h: h.malloc_symmetric((4,), alignment=-128), "ValueError", "-128"),
    (lambda h: h.malloc_symmetric((4,), alignment=4 << 20), "ValueError", str(4 << 20)),
    (lambda h: h.malloc_symmetric((4,), alignment="wide"), "Error", "wide"),
    (lambda h: h.malloc_symmetric((4,), torch.complex64), "TypeError", "complex64"),
    (lambda h: h.malloc_symmetric((4, -1)), "ValueError", "-1"),
    (lambda h: h.malloc_symmetric((1 << 40, 1 << 40)), "ValueError", "large"),
    (lambda h: h.malloc_symmetric("ab"), "Error", ""),
    (lambda h: h.malloc_symmetric(None), "TypeError", ""),
    (lambda h: h.malloc_symmetric((1,) * 9), "ValueError", "8"),
    (lambda h: h.free(torch.zeros(4)), "ValueError", "not in this symmetric heap"),
    (lambda h: h.free(None), "Error", ""),
], ids=["alignment-3", "alignment-0", "alignment-negative", "alignment-4M", "alignment-text", "dtype",
        "negative", "huge", "shape-text", "shape-none",
        "dimensions", "free-foreign", "free-none"])
def test_heap_call_that_one_rank_cannot_make(ranks, call, kind, text):
    """That rank raises its own reason; the others PeerError."""

    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((4,))
        world.set_timeout(MISTAKE_LIMIT_S)
        freeing = "free" in call.__code__.co_names
        good = (lambda h: h.free(t)) if freeing else (lambda h: h.malloc_symmetric((4,)))
        got = outcome(lambda: (call if world.rank == 1 else good)(heap))
        usable = outcome(lambda: heap.free(heap.malloc_symmetric((4,))))
        return got, usable, heap.stats()["num_allocations"]

    results = ranks(run, world_size=3, at_least=2)
    for rank, (got, usable, n) in enumerate(results):
        wanted = kind if rank == 1 else "PeerError"
        is_right = any(k.endswith(wanted) for k in got.kinds) and got.is_within(2)
        assert is_right, f"rank {rank}: wanted {wanted}, got {got}"
        assert text in got.text if rank == 1 else "rank 1" in got.text, got.text
        assert not usable.kinds, f"rank {rank} afterwards: {usable}"
        assert n == 1, "the refused call left something behind"


@pytest.mark.parametrize("size_of, kind, texts", [
    (lambda r: (1 << 20) + (r == 1), "EpMismatch", (str((1 << 20) + 1), str(1 << 20), "rank 1")),
    (lambda r: 0 if r == 1 else 1 << 20, "ValueError", ("rank 1", "0 bytes")),
    (lambda r: 1 << 50 if r == 1 else 1 << 20, "ValueError", ("rank 1",)),
], ids=["differs", "zero", "absurd"])
def test_heap_that_cannot_be_made(ranks, size_of, kind, texts):
    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: epmoe.SymmetricHeap(world, size_of(world.rank), device))
        return got, outcome(lambda: make_heap(world, device).close())

    results = ranks(run, world_size=3, at_least=2)
    elsewhere = "PeerError" if kind == "ValueError" else kind  # a wrong argument is wrong where it is
    check_outcomes([r[0] for r in results], [kind if rank == 1 else elsewhere
                                             for rank in range(len(results))], *texts)
    check_outcomes([r[1] for r in results], "nothing")


def _without_room(rank, world_size):
    world = epmoe.World(timeout_s=WAIT_S)
    if rank == 1:  # stands for a machine without memory: one that really has none ends other processes
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    got = outcome(lambda: epmoe.SymmetricHeap(world, 64 << 20, "cpu"))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = outcome(lambda: epmoe.SymmetricHeap(world, 64 << 20, "cpu").close())
    world.close()
    return got, again


@pytest.mark.cpu_only
def test_heap_without_room_on_one_rank():
    results = process_ranks(_without_room, 3)
    check_outcomes([r[0] for r in results], "HeapExhausted", "rank 1", str((64 << 20) + (64 << 10)))
    check_outcomes([r[1] for r in results], "nothing")


def test_heap_takes_tensors_that_have_memory(ranks):
    """Local calls: what is no tensor is a TypeError, not Python's AttributeError, and what has no memory says
    so.
    """

    def run(world, device):
        heap = make_heap(world, device)
        t, words = heap.malloc_symmetric((4,)), heap.malloc_symmetric((1,), torch.int64)
        seen = []
        for bad in ([1.0] * 4, 3, None, torch.zeros(4, device="meta"),
                    torch.zeros(4, device=device).to_sparse()):
            for call in (lambda: heap.put(t, bad, 0), lambda: heap.put(bad, t, 0),
                         lambda: heap.get(bad, t, 0), lambda: heap.translate(bad, 0),
                         lambda: heap.peer_view(bad, 0), lambda: heap.offset(bad),
                         lambda: heap.signal(bad, 0, 1, 0), lambda: heap.wait(bad, 0, 1)):
                seen.append(outcome(call).kind)
        heap.signal(words, 0, 1, world.rank)  # the heap goes on
        heap.wait(words, 0, 1)
        heap.close()
        return seen

    for seen in ranks(run, world_size=2):
        assert seen == ["TypeError"] * 24 + ["ValueError"] * 16
