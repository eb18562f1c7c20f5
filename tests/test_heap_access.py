"""Reaching into each other's memory: translate, views, put and get, signals, barrier."""

import ctypes
import time

import pytest
import torch

import epmoe
from cases import check_outcomes, outcome, random_bits, generator, same_bits
from pace import WAIT_S
from test_heap_alloc import KINDS, make_heap


def test_heap_translate_keeps_the_offset(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        a, b = heap.malloc_symmetric((10,)), heap.malloc_symmetric((33,), torch.float64)
        assert heap.translate(b,
                              world.rank) == b.data_ptr() and heap.offset(a) == heap.offset(b) - (b.data_ptr() - a.data_ptr())
        assert heap.offset(b[3:]) == heap.offset(b) + 24
        for peer in range(world.size):
            assert heap.translate(b, peer) - heap.translate(a, peer) == b.data_ptr() - a.data_ptr()
            assert heap.peer_view(b, peer).data_ptr() == heap.translate(b, peer)
        own = len({heap.translate(a, p) for p in range(world.size)})
        out = outcome(lambda: heap.translate(a, world.size)), outcome(lambda: heap.offset(torch.zeros(3,
                                                                                                      device=device)))
        heap.close()
        return own, out

    for own, out in ranks(run):
        assert own == ranks.size()
        check_outcomes([out[0]], "ValueError", f"rank {ranks.size()}", f"world of {ranks.size()}")
        check_outcomes([out[1]], "ValueError", "not in this symmetric heap")


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_heap_peer_view_reads_and_writes(ranks, dtype):
    def run(world, device):
        heap = make_heap(world, device)
        box = heap.malloc_symmetric((world.size, 50), dtype)
        for peer in range(world.size):
            heap.peer_view(box, peer)[world.rank].copy_(random_bits((50,), dtype,
                                                                    generator(world.rank, peer)).to(device))
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
                      f"what rank {writer} wrote at {rank}")
        same_bits(seen, results[(rank + 1) % len(results)][0], "what was read from the next rank")


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_heap_put_and_get(ranks, dtype):
    """put to the right, get from the left, in rows of a larger tensor."""

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
            same_bits(rows[writer], random_bits((7, 9), dtype, generator(writer)), f"put by {writer}")
        same_bits(got, random_bits((7, 9), dtype, generator(rank)), "get")


def test_heap_put_refuses_what_it_cannot_copy(ranks):
    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((4, 4))
        calls = [lambda: heap.put(t, torch.zeros(4, 5, device=device), 0),
                 lambda: heap.put(t, torch.zeros(4, 4, dtype=torch.float16, device=device), 0),
                 lambda: heap.put(t, torch.zeros(4, 8, device=device)[:, ::2], 0),
                 lambda: heap.put(t.t(), torch.zeros(4, 4, device=device), 0),
                 lambda: heap.put(t, torch.zeros(4, 4, device=device), world.size),
                 lambda: heap.put(torch.zeros(4, 4, device=device), t, 0),
                 lambda: heap.get(torch.zeros(4, 5, device=device), t, 0),
                 lambda: heap.get(t, torch.zeros(4, 4, device=device), 0),
                 lambda: heap.peer_view(t.t(), 0), lambda: heap.peer_view(t, world.size)]
        got = [outcome(c) for c in calls]
        clean = not t.any()
        heap.close()
        return got, bool(clean)

    texts = (("16", "20"), ("float32", "float16"), ("contiguous",), ("contiguous",),
             (f"rank {ranks.size(2)}",), ("not in this symmetric heap",), ("16", "20"),
             ("not in this symmetric heap",), ("contiguous",), (f"rank {ranks.size(2)}",))
    for got, clean in ranks(run, world_size=2):
        for o, t in zip(got, texts):
            check_outcomes([o], "ValueError", *t)
        assert clean


def test_heap_signal_publishes_what_was_put_before(ranks):
    """A ring of messages: the word says that the data is there."""

    def run(world, device):
        heap = make_heap(world, device)
        words, box = heap.malloc_symmetric((4,), torch.int64), heap.malloc_symmetric((2, 500), torch.int32)
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        for i in range(1, 101):
            heap.wait(words, 1, i - 2 if i > 2 else 0)  # the right one has read what stood in this half
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
        wrong = [outcome(c) for c in (lambda: heap.signal(words, 2, 1, 0), lambda: heap.wait(words, -1, 1),
                                      lambda: heap.wait(words, 0, 1, cmp="lt"),
                                      lambda: heap.signal(words, 0, 1, 0, op="max"),
                                      lambda: heap.signal(heap.malloc_symmetric((2,)), 0, 1, 0),
                                      lambda: heap.signal(words, 0, 1, world.size),
                                      lambda: heap.signal(words[::2], 0, 1, 0),
                                      lambda: heap.wait(heap.malloc_symmetric((2, 2), torch.int64)[:, 1], 1,
                                                        0))]
        heap.close()
        return wrong

    for wrong in ranks(run, world_size=2):
        check_outcomes(wrong, ["IndexError", "IndexError", "ValueError", "ValueError", "TypeError",
                               "ValueError", "nothing", "ValueError"])


def test_heap_wait_for_equal_lets_nothing_greater_pass(ranks):
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


def test_heap_wait_ends_at_its_limit(ranks):
    """A word that nobody sets: EpTimeout names what was wanted and seen, and the world has ended on every
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
            for peer in range(world.size):
                heap.put(box[world.rank : world.rank + 1], torch.tensor([i], dtype=torch.int32,
                                                                        device=device), peer)
            heap.barrier()
            got = box.clone()
            heap.barrier()
            heap.synchronize()
            assert (got == i).all(), f"round {i}: {got.tolist()}"
        heap.close()
        return True

    assert all(ranks(run))


def test_heaps_of_one_world_do_not_meet(ranks):
    """Two heaps: offsets may be equal, memory is not."""

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
    """Tensors over a peer's memory keep it, too."""

    def run(world, device):
        heap = make_heap(world, device)
        view = heap.peer_view(heap.malloc_symmetric((100,)), (world.rank + 1) % world.size)
        heap.barrier()
        heap.close()
        view.fill_(1)
        return view.sum().item()

    assert ranks(run) == [100.0] * ranks.size()


def test_heap_device_handle_says_where_peers_are(ranks):
    class Handle(ctypes.Structure):  # EpDeviceHeap
        _fields_ = [("base", ctypes.c_uint64 * 8), ("world_ended", ctypes.c_uint64),
                    ("timeout_ns", ctypes.c_uint64), ("my_rank", ctypes.c_uint32),
                    ("num_ranks", ctypes.c_uint32)]

    def run(world, device):
        heap = make_heap(world, device)
        t = heap.malloc_symmetric((10,))
        h = Handle.from_buffer_copy(heap.device_handle())
        assert (h.my_rank, h.num_ranks) == (world.rank, world.size) and h.timeout_ns > 0 and h.world_ended
        assert [h.base[r] + heap.offset(t) for r in range(world.size)] == [heap.translate(t, r)
                                                                           for r in range(world.size)]
        assert not any(h.base[world.size :])
        heap.close()
        return outcome(heap.device_handle)

    check_outcomes(ranks(run), "EpClosed", "closed")


def test_heap_refuses_another_device(ranks, monkeypatch):
    monkeypatch.delenv("EPMOE_BACKEND", raising=False)

    def run(world, device):
        return [outcome(lambda: epmoe.SymmetricHeap(world, 1 << 16, "meta")),
                outcome(lambda: epmoe.heap.pick_device("mps"))]

    for got in ranks(run, world_size=2):
        check_outcomes(got, "ValueError", "epmoe works on cpu and cuda")
