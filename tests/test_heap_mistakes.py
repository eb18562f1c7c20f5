"""Heap calls that are wrong on one rank or differ between ranks. All ranks raise, and the heap works
afterwards.
"""

import re
import resource

import pytest
import torch

import epmoe
from cases import MISTAKE_LIMIT_S, check_outcomes, outcome, process_ranks
from heap_cases import make_heap
from pace import WAIT_S


def run_differing_call(world, device, call):
    """The outcome of a call that differs between ranks, and whether the heap can allocate afterwards."""
    heap = make_heap(world, device)
    world.set_timeout(MISTAKE_LIMIT_S)
    got = outcome(lambda: call(heap, world.rank))
    used = heap.stats()["used"]
    t = heap.malloc_symmetric((4,))
    is_usable = not t.any() and heap.offset(t) >= 0
    heap.free(t)
    is_usable = is_usable and heap.stats()["used"] == used
    heap.close()
    return got, bool(is_usable)


def free_or_allocate(heap, rank):
    """Rank 1 allocates and frees, the other ranks allocate twice."""
    t = heap.malloc_symmetric((4,))
    return heap.free(t) if rank == 1 else heap.malloc_symmetric((4,))


@pytest.mark.parametrize("call, texts", [
    (lambda h, r: h.malloc_symmetric((100 + (r == 1),), torch.int32), ("rank 1", "404", "400")),
    (lambda h, r: h.malloc_symmetric((100,), torch.int64 if r == 1 else torch.int32),
     ("rank 1", "800", "400")),
    (lambda h, r: h.malloc_symmetric((100,), alignment=512 if r == 1 else 128), ("rank 1", "512", "128")),
    (free_or_allocate, ("rank 1", "in free (heap ", "in allocation (heap ")),
    (lambda h, r: h.free([h.malloc_symmetric((4,)), h.malloc_symmetric((0,))][r == 1]), ("rank 1", "frees")),
], ids=["size", "dtype", "alignment", "order", "nothing"])
def test_heap_calls_that_differ_between_ranks(ranks, call, texts):
    results = ranks(run_differing_call, call, world_size=3, at_least=2)
    check_outcomes([got for got, _ in results], "EpMismatch", *texts)
    assert all(is_usable for _, is_usable in results)


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
        "negative", "huge", "shape-text", "shape-none", "dimensions", "free-foreign", "free-none"])
def test_heap_wrong_argument_on_one_rank(ranks, call, kind, text):
    """That rank raises its own error; the others raise PeerError."""

    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((4,))
        world.set_timeout(MISTAKE_LIMIT_S)
        frees = "free" in call.__code__.co_names
        good = (lambda h: h.free(t)) if frees else (lambda h: h.malloc_symmetric((4,)))
        got = outcome(lambda: (call if world.rank == 1 else good)(heap))
        next_call = outcome(lambda: heap.free(heap.malloc_symmetric((4,))))
        return got, next_call, heap.stats()["num_allocations"]

    results = ranks(run, world_size=3, at_least=2)
    for rank, (got, next_call, num_allocations) in enumerate(results):
        wanted = kind if rank == 1 else "PeerError"
        is_right = any(k.endswith(wanted) for k in got.kinds) and got.is_within(2)
        assert is_right, f"rank {rank}: expected {wanted} within 2 s, got {got}"
        assert text in got.text if rank == 1 else "rank 1" in got.text, got.text
        assert not next_call.kinds, f"rank {rank}: the next call failed: {next_call}"
        assert num_allocations == 1, f"rank {rank}: the refused call changed the number of allocations"


@pytest.mark.parametrize("size_of, kind, texts", [
    (lambda r: (1 << 20) + (r == 1), "EpMismatch", (str((1 << 20) + 1), str(1 << 20), "rank 1")),
    (lambda r: 0 if r == 1 else 1 << 20, "ValueError", ("rank 1", "0 bytes")),
    (lambda r: 1 << 50 if r == 1 else 1 << 20, "ValueError", ("rank 1",)),
], ids=["differs", "zero", "absurd"])
def test_heap_creation_with_a_wrong_size(ranks, size_of, kind, texts):
    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: epmoe.SymmetricHeap(world, size_of(world.rank), device))
        return got, outcome(lambda: make_heap(world, device).close())

    results = ranks(run, world_size=3, at_least=2)
    # for a wrong argument only rank 1 raises ValueError; for different arguments all ranks raise EpMismatch
    elsewhere = "PeerError" if kind == "ValueError" else kind
    kinds = [kind if rank == 1 else elsewhere for rank in range(len(results))]
    check_outcomes([r[0] for r in results], kinds, *texts)
    check_outcomes([r[1] for r in results], "nothing")


def _heap_without_memory(rank, world_size):
    world = epmoe.World(timeout_s=WAIT_S)
    # A limit of the file size has the effect of a machine without memory. If the memory were really used up,
    # the kernel could kill other processes.
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    got = outcome(lambda: epmoe.SymmetricHeap(world, 64 << 20, "cpu"))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    again = outcome(lambda: epmoe.SymmetricHeap(world, 64 << 20, "cpu").close())
    world.close()
    return got, again


@pytest.mark.cpu_only
def test_heap_without_memory_on_one_rank():
    results = process_ranks(_heap_without_memory, 3)
    check_outcomes([r[0] for r in results], "HeapExhausted", "rank 1", "no room for a heap of ")
    for got, _ in results:  # the size includes what a heap needs for itself
        wanted = int(re.search(r"a heap of (\d+) bytes", got.text)[1])
        assert 64 << 20 < wanted < (64 << 20) + (64 << 10), got.text
    check_outcomes([r[1] for r in results], "nothing")


def test_heap_local_calls_refuse_wrong_tensors(ranks):
    """An object that is no tensor raises TypeError (not AttributeError). A tensor without dense memory raises
    ValueError.
    """

    def run(world, device):
        heap = make_heap(world, device)
        t, words = heap.malloc_symmetric((4,)), heap.malloc_symmetric((1,), torch.int64)
        seen = []
        sparse = torch.zeros(4, device=device).to_sparse()
        for bad in ([1.0] * 4, 3, None, torch.zeros(4, device="meta"), sparse):
            for call in (lambda: heap.put(t, bad, 0), lambda: heap.put(bad, t, 0),
                         lambda: heap.get(bad, t, 0), lambda: heap.translate(bad, 0),
                         lambda: heap.peer_view(bad, 0), lambda: heap.offset(bad),
                         lambda: heap.signal(bad, 0, 1, 0), lambda: heap.wait(bad, 0, 1)):
                seen.append(outcome(call).kind)
        heap.signal(words, 0, 1, world.rank)  # the heap still works
        heap.wait(words, 0, 1)
        heap.close()
        return seen

    for seen in ranks(run, world_size=2):
        assert seen == ["TypeError"] * 24 + ["ValueError"] * 16
