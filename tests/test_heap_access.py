"""Access to a peer's memory: translate, peer_view, put, get, signal, wait and barrier."""

import ctypes
import threading
import time

import pytest
import torch

import epmoe
from cases import check_outcomes, generator, outcome, random_bits, same_bits
from epmoe.testing import run_threads
from heap_cases import KINDS, make_heap
from pace import WAIT_S


def test_heap_translate_keeps_the_offset(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        a, b = heap.malloc_symmetric((10,)), heap.malloc_symmetric((33,), torch.float64)
        distance = b.data_ptr() - a.data_ptr()
        assert heap.translate(b, world.rank) == b.data_ptr()
        assert heap.offset(a) == heap.offset(b) - distance
        assert heap.offset(b[3:]) == heap.offset(b) + 24
        for peer in range(world.size):
            assert heap.translate(b, peer) - heap.translate(a, peer) == distance
            assert heap.peer_view(b, peer).data_ptr() == heap.translate(b, peer)
        num_addresses = len({heap.translate(a, p) for p in range(world.size)})
        no_such_rank = outcome(lambda: heap.translate(a, world.size))
        foreign_tensor = outcome(lambda: heap.offset(torch.zeros(3, device=device)))
        heap.close()
        return num_addresses, no_such_rank, foreign_tensor

    for num_addresses, no_such_rank, foreign_tensor in ranks(run):
        assert num_addresses == ranks.size()
        check_outcomes([no_such_rank], "ValueError", f"rank {ranks.size()}", f"world of {ranks.size()}")
        check_outcomes([foreign_tensor], "ValueError", "not in this symmetric heap")


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_heap_peer_view_reads_and_writes(ranks, dtype):
    def run(world, device):
        heap = make_heap(world, device)
        box = heap.malloc_symmetric((world.size, 50), dtype)
        for peer in range(world.size):
            sent = random_bits((50,), dtype, generator(world.rank, peer)).to(device)
            heap.peer_view(box, peer)[world.rank].copy_(sent)
        heap.barrier()
        got = box.clone()
        seen = heap.peer_view(box, (world.rank + 1) % world.size).clone()
        heap.barrier()
        heap.close()
        return got, seen

    results = ranks(run)
    for rank, (got, seen) in enumerate(results):
        for writer in range(len(results)):
            same_bits(got[writer], random_bits((50,), dtype, generator(writer, rank)),
                      f"written by rank {writer} to rank {rank}")
        same_bits(seen, results[(rank + 1) % len(results)][0], f"read by rank {rank} from the next rank")


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_heap_put_and_get(ranks, dtype):
    """put to every rank, then get from the next rank, in rows of a larger tensor."""

    def run(world, device):
        heap = make_heap(world, device)
        box = heap.malloc_symmetric((world.size, 7, 9), dtype)
        mine = random_bits((7, 9), dtype, generator(world.rank)).to(device)
        for peer in range(world.size):
            heap.put(box[world.rank], mine, peer)
        heap.barrier()
        got = torch.empty((7, 9), dtype=dtype, device=device)
        heap.get(got, box[world.rank], (world.rank + 1) % world.size)
        heap.synchronize()
        heap.barrier()
        all_rows = box.clone()
        heap.close()
        return all_rows, got

    for rank, (rows, got) in enumerate(ranks(run)):
        for writer in range(len(rows)):
            same_bits(rows[writer], random_bits((7, 9), dtype, generator(writer)), f"put by rank {writer}")
        same_bits(got, random_bits((7, 9), dtype, generator(rank)), "get")


def test_heap_put_and_get_refuse_wrong_tensors(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((4, 4))
        calls = [
            lambda: heap.put(t, torch.zeros(4, 5, device=device), 0),
            lambda: heap.put(t, torch.zeros(4, 4, dtype=torch.float16, device=device), 0),
            lambda: heap.put(t, torch.zeros(4, 8, device=device)[:, ::2], 0),
            lambda: heap.put(t.t(), torch.zeros(4, 4, device=device), 0),
            lambda: heap.put(t, torch.zeros(4, 4, device=device), world.size),
            lambda: heap.put(torch.zeros(4, 4, device=device), t, 0),
            lambda: heap.get(torch.zeros(4, 5, device=device), t, 0),
            lambda: heap.get(t, torch.zeros(4, 4, device=device), 0),
            lambda: heap.peer_view(t.t(), 0),
            lambda: heap.peer_view(t, world.size),
        ]
        got = [outcome(c) for c in calls]
        is_unchanged = not t.any()
        heap.close()
        return got, bool(is_unchanged)

    texts = (("16", "20"), ("float32", "float16"), ("contiguous",), ("contiguous",),
             (f"rank {ranks.size(2)}",), ("not in this symmetric heap",), ("16", "20"),
             ("not in this symmetric heap",), ("contiguous",), (f"rank {ranks.size(2)}",))
    for got, is_unchanged in ranks(run, world_size=2):
        for o, t in zip(got, texts, strict=True):
            check_outcomes([o], "ValueError", *t)
        assert is_unchanged


def test_heap_put_and_get_refuse_a_part_of_the_same_memory(ranks):
    """The whole of it is a copy to itself, and its neighbours are other memory."""
    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((8, 4))
        t.copy_(torch.arange(32.0).view(8, 4))
        heap.barrier()
        mine, peer = world.rank, (world.rank + 1) % world.size
        got = [outcome(lambda: heap.put(t[1:5], t[:4], mine)), outcome(lambda: heap.get(t[:4], t[1:5], mine)),
               outcome(lambda: heap.put(t[:4], heap.peer_view(t, peer)[3:7], peer)),
               outcome(lambda: heap.get(heap.peer_view(t, peer)[1:5], t[:4], peer))]
        heap.put(t, t, mine)
        heap.get(t[:4], t[:4], mine)
        heap.synchronize()
        is_unchanged = t.view(-1).tolist() == list(range(32))
        heap.put(t[4:], t[:4], mine)
        heap.synchronize()
        is_copied = torch.equal(t[4:], t[:4])
        heap.barrier()
        heap.close()
        return got, is_unchanged, is_copied

    for got, is_unchanged, is_copied in ranks(run, world_size=2):
        check_outcomes(got, "ValueError", "dst and src share a part of their memory")
        assert is_unchanged and is_copied


def test_heap_signal_publishes_earlier_puts(ranks):
    """Messages in a ring of ranks: after word 0 has the value i, message i is in memory."""

    def run(world, device):
        heap = make_heap(world, device)
        words, box = heap.malloc_symmetric((4,), torch.int64), heap.malloc_symmetric((2, 500), torch.int32)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        for i in range(1, 101):
            # until the right rank has read message i - 2, which is in this half of box
            heap.wait(words, 1, i - 2 if i > 2 else 0)
            heap.put(box[i % 2], torch.full((500,), 1000 * world.rank + i, dtype=torch.int32, device=device),
                     right)
            heap.signal(words, 0, i, right)
            heap.wait(words, 0, i)
            got = box[i % 2].clone()
            heap.synchronize()
            assert (got == 1000 * left + i).all(), f"message {i}: {got.unique().tolist()}"
            heap.signal(words, 1, i, left)
        heap.barrier()
        heap.close()
        return True

    assert all(ranks(run))


def test_heap_signal_add_from_all_ranks(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        words = heap.malloc_symmetric((3,), torch.int64)
        for _ in range(50):
            for peer in range(world.size):
                heap.signal(words, 2, 1, peer, op="add")
        heap.wait(words, 2, 50 * world.size, cmp="eq")
        heap.barrier()
        got = words.tolist()
        heap.close()
        return got

    assert ranks(run) == [[0, 0, 50 * ranks.size()]] * ranks.size()


def test_heap_wait_compares(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        words = heap.malloc_symmetric((2,), torch.int64)
        heap.signal(words, 0, 7, world.rank)
        heap.wait(words, 0, 7, cmp="eq")
        for value in (0, 6, 7):
            heap.wait(words, 0, value)
        heap.signal(words, 0, 2**62, world.rank)
        heap.wait(words, 0, 2**40)
        heap.synchronize()
        calls = [
            lambda: heap.signal(words, 2, 1, 0),
            lambda: heap.wait(words, -1, 1),
            lambda: heap.wait(words, 0, 1, cmp="lt"),
            lambda: heap.signal(words, 0, 1, 0, op="max"),
            lambda: heap.signal(heap.malloc_symmetric((2,)), 0, 1, 0),
            lambda: heap.signal(words, 0, 1, world.size),
            lambda: heap.signal(words[::2], 0, 1, 0),
            lambda: heap.wait(heap.malloc_symmetric((2, 2), torch.int64)[:, 1], 1, 0),
        ]
        outcomes = [outcome(c) for c in calls]
        heap.close()
        return outcomes

    for outcomes in ranks(run, world_size=2):
        check_outcomes(outcomes, ["IndexError", "IndexError", "ValueError", "ValueError", "TypeError",
                                  "ValueError", "nothing", "ValueError"])


def test_heap_wait_for_equal_ignores_greater_values(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        words = heap.malloc_symmetric((1,), torch.int64)
        heap.signal(words, 0, 8, world.rank)
        heap.barrier()
        if world.rank == 0:
            heap.synchronize()
            time.sleep(0.3)
            for peer in range(world.size):
                heap.signal(words, 0, 7, peer)
        heap.wait(words, 0, 7, cmp="eq")
        got = words.clone()
        heap.barrier()
        heap.close()
        return got.item()

    assert ranks(run, world_size=2) == [7] * ranks.size(2)


def test_heap_wait_times_out(ranks):
    """No rank sets the word. EpTimeout names the expected and the found value, and the world ends on every
    rank.
    """

    def run(world, device):
        heap = make_heap(world, device)
        words = heap.malloc_symmetric((2,), torch.int64)
        heap.signal(words, 1, 3, world.rank)
        heap.barrier()
        heap.synchronize()
        world.set_timeout(0.5 if world.rank == 0 else WAIT_S)
        got = outcome(lambda: (heap.wait(words, 1, 9), heap.synchronize()))
        return got, outcome(lambda: heap.barrier(), None)

    results = ranks(run, world_size=3)
    check_outcomes([r[0] for r in results], "EpTimeout", within_s=3)
    waited = results[0][0]
    assert waited.seconds > 0.4 and "expected value 9, found 3" in waited.text, waited
    check_outcomes([r[1] for r in results], "EpTimeout")


def test_heap_barrier_orders_puts(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        box = heap.malloc_symmetric((world.size,), torch.int32)
        for i in range(1, 61):
            number = torch.tensor([i], dtype=torch.int32, device=device)
            for peer in range(world.size):
                heap.put(box[world.rank : world.rank + 1], number, peer)
            heap.barrier()
            got = box.clone()
            heap.barrier()
            heap.synchronize()
            assert (got == i).all(), f"round {i}: {got.tolist()}"
        heap.close()
        return True

    assert all(ranks(run))


@pytest.mark.cpu_only
def test_heap_barriers_of_two_threads_are_two():
    """Each of them waits for one of the other rank."""
    returned, first, began = [], threading.Event(), []

    def rank(world):
        heap = epmoe.SymmetricHeap(world, 1 << 16, device="cpu")

        def barrier():
            heap.barrier()
            returned.append(time.monotonic())
            first.set()

        if world.rank:
            heap.barrier()
            assert first.wait(WAIT_S)
            time.sleep(0.05)
            began.append(time.monotonic())
            heap.barrier()
        else:
            threads = [threading.Thread(target=barrier) for _ in range(2)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        heap.close()

    for _ in range(20):
        returned.clear(), first.clear(), began.clear()
        run_threads(rank, 2)
        assert len(returned) == 2 and max(returned) > began[0]


def test_heaps_of_one_world_are_separate(ranks):
    """Tensors of two heaps can have the same offset, but never the same memory."""

    def run(world, device):
        a, b = make_heap(world, device), make_heap(world, device, 1 << 18)
        s, t = a.malloc_symmetric((100,)), b.malloc_symmetric((100,))
        a.put(s, torch.ones(100, device=device), (world.rank + 1) % world.size)
        a.barrier()
        b.barrier()
        got = s.sum().item(), t.sum().item(), outcome(lambda: a.free(t)).kind
        b.close()
        a.barrier()
        a.close()
        return got

    assert ranks(run) == [(100.0, 0.0, "ValueError")] * ranks.size()


@pytest.mark.cpu_only
def test_heap_view_of_a_peer_outlives_the_peers_heap(ranks):
    """A view of a peer's memory keeps that memory alive."""

    def run(world, device):
        heap = make_heap(world, device)
        view = heap.peer_view(heap.malloc_symmetric((100,)), (world.rank + 1) % world.size)
        heap.barrier()
        heap.close()
        view.fill_(1)
        return view.sum().item()

    assert ranks(run) == [100.0] * ranks.size()


def test_heap_device_handle_has_peer_addresses(ranks):
    class Handle(ctypes.Structure):  # EpDeviceHeap of csrc/epmoe_device.h
        _fields_ = [("base", ctypes.c_uint64 * 8), ("world_ended", ctypes.c_uint64),
                    ("timeout_ns", ctypes.c_uint64), ("my_rank", ctypes.c_uint32),
                    ("num_ranks", ctypes.c_uint32)]

    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((10,))
        h = Handle.from_buffer_copy(heap.device_handle())
        assert (h.my_rank, h.num_ranks) == (world.rank, world.size) and h.timeout_ns > 0 and h.world_ended
        for peer in range(world.size):
            assert h.base[peer] + heap.offset(t) == heap.translate(t, peer)
        assert not any(h.base[world.size :])
        heap.close()
        return outcome(heap.device_handle)

    check_outcomes(ranks(run), "EpClosed", "closed")


def test_heap_refuses_another_device(ranks, monkeypatch):
    monkeypatch.delenv("EPMOE_BACKEND", raising=False)

    def run(world, device):
        return [outcome(lambda: epmoe.SymmetricHeap(world, 1 << 16, "meta")),
                outcome(lambda: epmoe.comm.heap.pick_device("mps"))]

    for got in ranks(run, world_size=2):
        check_outcomes(got, "ValueError", "epmoe works on cpu and cuda")


@pytest.mark.parametrize("num_dims", [0, 5, 8])
def test_heap_put_and_get_of_many_dimensions(ranks, num_dims):
    """malloc_symmetric makes tensors of at most 8 dimensions.  The tensor outside the heap may have more."""

    def run(world, device):
        heap = make_heap(world, device)
        box = heap.malloc_symmetric((2,) * num_dims, torch.float64)
        mine = torch.full((1, 1, *box.shape), world.rank + 0.5, dtype=box.dtype, device=device)
        heap.put(box, mine, (world.rank + 1) % world.size)
        heap.barrier()
        got = torch.zeros_like(mine)
        heap.get(got, box, world.rank)
        heap.synchronize()
        heap.barrier()
        heap.close()
        return got.unique().tolist(), got.shape

    results = ranks(run, world_size=2)
    for rank, (got, shape) in enumerate(results):
        assert got == [(rank - 1) % len(results) + 0.5]
        assert shape == (1, 1, *(2,) * num_dims)
