"""The symmetric allocator: offsets, alignment, statistics, exhaustion, scopes, and the end of a heap."""

import random
import re
import subprocess
import sys

import pytest
import torch

import epmoe
from cases import check_outcomes, keep, outcome, same_bits
from heap_cases import KINDS, make_heap
from pace import HANG_S


def test_heap_same_offset_on_every_rank(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        tensors = [heap.malloc_symmetric(shape, dtype) for shape in ((3,), (5, 7), 64, (2, 3, 4), ())
                   for dtype in KINDS]
        for t in tensors:
            assert t.device.type == torch.device(device).type and t.is_contiguous() and not t.any()
        shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors]
        offsets = [heap.offset(t) for t in tensors]
        ends = [o + t.numel() * t.element_size() for o, t in zip(offsets, tensors)]
        assert all(a_end <= b for a_end, b in zip(ends, offsets[1:])), "allocations overlap"
        heap.close()
        return offsets, shapes

    results = ranks(run)
    assert all(r == results[0] for r in results)
    assert results[0][1][:2] == [((3,), "torch.float32"), ((3,), "torch.float64")]


def test_heap_memory_is_zeroed_every_time(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        for i in range(6):
            t = heap.malloc_symmetric((1000 + i,), torch.int32)
            assert not t.any(), "fresh memory is not zero"
            t.fill_(-1)
            heap.synchronize()
            heap.free(t)
        heap.close()
        return True

    assert all(ranks(run))


@pytest.mark.parametrize("alignment", [1, 16, 128, 256, 4096, 1 << 16, 1 << 20, 2 << 20])
def test_heap_alignment_of_addresses(ranks, alignment):
    def run(world, device):
        heap = make_heap(world, device, 8 << 20)
        heap.malloc_symmetric((3,))  # so that the next tensor is not located at the start of the heap
        t = heap.malloc_symmetric((5,), alignment=alignment)
        address_rest, offset_rest = t.data_ptr() % alignment, heap.offset(t) % alignment
        heap.close()
        return address_rest, offset_rest

    assert ranks(run, world_size=2) == [(0, 0)] * ranks.size(2)


def test_heap_statistics_add_up(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        start = heap.stats()
        assert start["used"] == start["peak"] == start["num_allocations"] == 0
        assert start["total"] == start["free"] == start["largest_free"] == 1 << 20
        tensors = [heap.malloc_symmetric((n,), torch.uint8) for n in (1, 1000, 100_000)]
        full = heap.stats()
        assert full["num_allocations"] == 3
        assert 101_001 <= full["used"] <= 110_000
        assert full["used"] + full["free"] == full["total"]
        heap.free(tensors[1])
        fragmented = heap.stats()
        assert fragmented["num_allocations"] == 2
        assert fragmented["largest_free"] < fragmented["free"]
        assert fragmented["peak"] == full["used"]
        heap.free(tensors[0])
        heap.free(tensors[2])
        heap.free(heap.malloc_symmetric((1,), torch.uint8))  # does not change the peak
        end = heap.stats()
        assert end == start | {"peak": full["used"]}
        assert f"{end['used']} of {end['total']} bytes used" in repr(heap)
        heap.close()
        return end

    results = ranks(run)
    assert all(r == results[0] for r in results)


def test_heap_largest_free_is_not_the_last_part(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        large, _ = heap.malloc_symmetric((900_000,), torch.uint8), heap.malloc_symmetric((1,), torch.uint8)
        heap.free(large)
        s = heap.stats()
        heap.close()
        return 900_000 <= s["largest_free"] < s["free"]

    assert all(ranks(run, world_size=2))


def test_heap_random_allocations_never_overlap(ranks):
    """300 random allocations and frees. Allocations are disjoint and equal on all ranks, and at the end all
    memory is free again.
    """

    def run(world, device):
        heap, rng, live, trace = make_heap(world, device, 1 << 15), random.Random(5), [], []
        for _ in range(300):
            if live and rng.random() < 0.48:
                heap.free(live.pop(rng.randrange(len(live)))[2])
                continue
            n = rng.choice([1, 7, 256, 300, 4096, 10_000, 20_000])
            alignment = rng.choice([1, 128, 1024, 4096])
            try:
                t = heap.malloc_symmetric((n,), torch.uint8, alignment)
            except epmoe.HeapExhausted:
                trace.append(-1)
                continue
            a = heap.offset(t)
            assert a % alignment == 0
            assert all(a + n <= b or b + m <= a for b, m, _ in live), "two tensors share memory"
            live.append((a, n, t))
            trace.append(a)
        for _, _, t in live:
            heap.free(t)
        assert heap.stats()["used"] == 0 and heap.stats()["free"] == heap.stats()["largest_free"]
        heap.close()
        return trace

    results = ranks(run, world_size=2)
    assert all(r == results[0] for r in results) and -1 in results[0]


def test_heap_exhaustion_names_needed_and_free(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        heap.malloc_symmetric((1000,), torch.uint8)
        before = heap.stats()
        got = outcome(lambda: heap.malloc_symmetric((4 << 20,), torch.uint8))
        same = heap.stats() == before
        rest = heap.malloc_symmetric((before["largest_free"],), torch.uint8)  # all bytes reported as free
        again = outcome(lambda: heap.malloc_symmetric((1,), torch.uint8))
        heap.free(rest)
        heap.close()
        return got, same, before["free"], again

    for got, same, free, again in ranks(run):
        check_outcomes([got, again], "HeapExhausted", "exhausted")
        assert "MemoryError" in got.kinds and same
        numbers = [int(n) for n in re.findall(r"\d+", got.text)]
        assert 4 << 20 in numbers and free in numbers, got.text
        assert "0 free" in again.text


def test_heap_holds_many_small_allocations(ranks):
    def run(world, device):
        heap = make_heap(world, device, 4 << 20)
        live = []
        got = None
        for _ in range(3000):
            got = outcome(lambda: live.append(heap.malloc_symmetric((4,))))
            if got.kinds:
                break
        for t in live:
            heap.free(t)
        end = heap.stats()
        heap.close()
        return len(live), got.kind, end["used"], end["free"] == end["largest_free"]

    for n, kind, used, merged in ranks(run, world_size=2):
        assert n >= 500 and kind in ("nothing", "HeapExhausted") and used == 0 and merged


def test_heap_empty_tensor(ranks):
    """A tensor without elements can be allocated, copied and freed like any other."""

    def run(world, device):
        heap = make_heap(world, device)
        before = heap.stats()["used"]
        t = heap.malloc_symmetric((0, 5))
        assert t.shape == (0, 5)
        heap.put(t, torch.zeros(0, 5, device=device), 0)
        heap.free(t)
        after = heap.stats()["used"]
        heap.close()
        return before, after

    assert ranks(run, world_size=2) == [(0, 0)] * ranks.size(2)


def test_heap_tensor_of_eight_dimensions(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((2, 1, 2, 1, 2, 1, 2, 3))
        got = tuple(t.shape), t.is_contiguous(), heap.peer_view(t, 0).dim()
        heap.close()
        return got

    assert ranks(run, world_size=2) == [((2, 1, 2, 1, 2, 1, 2, 3), True, 8)] * ranks.size(2)


def test_heap_scope_frees_its_allocations(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        outer = heap.malloc_symmetric((10,))
        used = heap.stats()["used"]
        with heap.scope():
            heap.malloc_symmetric((100,))
            with heap.scope() as same:
                assert same is heap
                heap.malloc_symmetric((1000,))
            heap.malloc_symmetric((100,))
        assert heap.stats()["used"] == used
        with pytest.raises(KeyError), heap.scope():
            left = heap.malloc_symmetric((1000,))
            raise KeyError("every rank")
        # free is collective, and a rank does not know whether the other ranks raised too
        assert heap.stats()["used"] > used
        heap.free(left)
        assert heap.stats()["used"] == used
        heap.free(outer)
        heap.close()
        return True

    assert all(ranks(run))


def test_heap_scope_after_a_free_inside(ranks):
    """The scope does not free a tensor twice, even if a later tensor has the same address."""

    def run(world, device):
        heap = make_heap(world, device)
        with heap.scope():
            heap.free(heap.malloc_symmetric((100,)))
            heap.malloc_symmetric((100,))
        assert heap.stats()["num_allocations"] == 0
        heap.close()
        return True

    assert all(ranks(run, world_size=2))


def test_heap_tensors_outlive_the_heap(ranks):
    """A tensor keeps its memory after the heap is closed and deleted."""

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        t = heap.malloc_symmetric((1000,), torch.float32)
        part = t[100:200]
        heap.close()
        heap.close()  # a second call does nothing
        del heap, t
        part.copy_(torch.arange(100.0))
        return part.sum().item()

    assert ranks(run) == [4950.0] * ranks.size()


def test_heap_calls_after_close_are_refused(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((10,))
        heap.close()
        calls = [
            lambda: heap.malloc_symmetric((1,)),
            lambda: heap.free(t),
            lambda: heap.barrier(),
            lambda: heap.put(t, torch.zeros(10, device=device), 0),
            lambda: heap.translate(t, 0),
            lambda: heap.offset(t),
            lambda: heap.synchronize(),
            lambda: heap.stats(),
            lambda: heap.device_handle(),
        ]
        return [outcome(call) for call in calls], repr(heap)

    for outcomes, text in ranks(run):
        check_outcomes(outcomes, "EpClosed", "closed")
        assert ", closed, " in text


def test_heap_with_statement_closes_the_heap(ranks):
    def run(world, device):
        with epmoe.SymmetricHeap(world, 1 << 16, device) as heap:
            keep(world, heap)
            heap.malloc_symmetric((3,)).fill_(1)
        return outcome(lambda: heap.malloc_symmetric((3,))).kind

    assert ranks(run) == ["EpClosed"] * ranks.size()


def test_heap_stays_open_if_the_with_statement_raises(ranks):
    def run(world, device):
        with pytest.raises(KeyError), epmoe.SymmetricHeap(world, 1 << 16, device) as heap:
            keep(world, heap)
            raise KeyError
        used = outcome(heap.barrier).kind
        heap.close()
        return used

    assert ranks(run, world_size=2) == ["nothing"] * ranks.size(2)


def test_heap_without_a_world_is_for_one_rank(ranks):
    """Without a world and torch.distributed, a heap creates a world of this process alone."""
    if ranks.is_torchrun:
        pytest.skip("torch.distributed is initialised here")
    with epmoe.SymmetricHeap(None, 1 << 16, "cpu") as heap:
        t = heap.malloc_symmetric((8,), torch.int64)
        heap.signal(t, 0, 5, 0)
        heap.wait(t, 0, 5)
        same_bits(heap.peer_view(t, 0), torch.tensor([5] + [0] * 7), "word")
        assert (heap.world.rank, heap.world.size) == (0, 1)
    heap.world.close()


@pytest.mark.cpu_only
def test_heap_deleted_by_one_thread_stays_mapped(tmp_path):
    """Ranks that are threads write to each other by address. If one of them deletes its heap object, the
    memory must stay valid for the others.
    """
    script = tmp_path / "delete.py"
    script.write_text(
        "import torch, epmoe, threading\n"
        "from epmoe.testing import run_threads\n"
        "deleted = threading.Event()\n"
        "def fn(world):\n"
        "    heap = epmoe.SymmetricHeap(world, 1 << 20, 'cpu')\n"
        "    t = heap.malloc_symmetric((1000,))\n"
        "    if world.rank == 1:\n"
        "        del heap, t\n"
        "        deleted.set()\n"
        "        return\n"
        "    deleted.wait(10)\n"
        "    heap.put(t, torch.ones(1000), 1)\n"
        "run_threads(fn, 2, timeout_s=600)\n"
        "print('alive')\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANG_S)
    is_right = done.returncode == 0 and done.stdout.strip() == "alive"
    assert is_right, f"exit status {done.returncode}\n{done.stderr[-500:]}"


def test_heap_scope_forgets_what_it_frees(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        with heap.scope():
            t = heap.malloc_symmetric((4,))
        other = heap.malloc_symmetric((4,))
        return outcome(lambda: heap.free(t)), outcome(lambda: heap.free(other))

    for again, once in ranks(run):
        assert (again.kind, once.kind) == ("ValueError", "nothing")
