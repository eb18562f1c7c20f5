"""Tensors of the user that C writes: autograd learns of it, as of torch's own in-place operations."""

import pytest
import torch

import epmoe
from cases import check_outcomes, outcome

STALE = "modified by an inplace operation"


class Saves(torch.autograd.Function):
    """The identity of x, with a backward that reads t."""

    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(t)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        assert ctx.saved_tensors
        return g, None


def stale_after(write, *saved):
    """The outcomes of backward passes that have saved the tensors, each of which write() then changes."""
    results = [Saves.apply(torch.ones((), requires_grad=True), t) for t in saved]
    write()
    return [outcome(result.backward) for result in results]


def heap_writes(world, device):
    heap = epmoe.SymmetricHeap(world, 1 << 20, device)
    mine, words = heap.malloc_symmetric((2, 3)), heap.malloc_symmetric(2, torch.int64)
    other, leaf = torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device, requires_grad=True)
    peer = (world.rank + 1) % world.size
    got = [stale_after(lambda: heap.get(other, mine, peer), other.view(6)),
           stale_after(lambda: heap.put(mine, other, world.rank), mine),
           stale_after(lambda: heap.peer_view(mine, world.rank).zero_(), mine)]
    heap.barrier()
    before = words._version
    heap.signal(words, 0, 1, world.rank)
    assert words._version > before
    version = mine._version
    if world.size > 1:  # a copy to a peer changes no tensor of this rank
        heap.put(mine, leaf, peer)
        assert mine._version == version
    heap.barrier()
    refused = [outcome(lambda: heap.get(leaf, mine, peer)), outcome(lambda: heap.get(leaf[0], mine[0], peer)),
               outcome(lambda: heap.get(2 * leaf, mine, peer))]
    assert not leaf.detach().any()
    with torch.no_grad():
        heap.put(mine, torch.full((2, 3), 5.0, device=device), world.rank)
        heap.get(leaf, mine, world.rank)
    with torch.inference_mode():
        heap.get(torch.zeros(2, 3, device=device), mine, peer)
    heap.synchronize()
    assert leaf.detach().unique().tolist() == [5.0]
    heap.barrier()
    heap.close()
    return got, refused


def test_written_tensors_of_the_heap(ranks):
    for got, refused in ranks(heap_writes, world_size=2):
        for outcomes in got:
            check_outcomes(outcomes, "RuntimeError", STALE)
        check_outcomes(refused, "RuntimeError", "dst requires grad", "no_grad")


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_written_tensors_of_low_latency(ranks, fp8, halves):
    def run(world, device):
        a2a = epmoe.LowLatencyAll2All(world, 4, 128, 2, 2 * world.size, device=device)
        x = torch.ones(4, 128, dtype=torch.bfloat16, device=device)
        idx = torch.tensor([[0, 1]] * 4, device=device)
        options = dict(fp8=fp8, layout="compact")
        kept = a2a.dispatch(x, idx, **options)
        rows, scales, counts, handle = kept
        y = torch.ones(rows.shape, dtype=torch.bfloat16, device=device)
        sums = a2a.combine(y, handle)

        def dispatch():
            if halves:
                pending = a2a.dispatch_send(x, idx, out=kept, **options)
                versions = [t._version for t in saved]
                pending.recv()
                assert all(t._version > v for t, v in zip(saved, versions))
            else:
                a2a.dispatch(x, idx, out=kept, **options)

        def combine():
            a2a.combine_send(y, handle, out=sums).recv() if halves else a2a.combine(y, handle, out=sums)

        saved = [t for t in (rows, scales, counts, handle.expert_offsets) if t is not None]
        got = stale_after(dispatch, *saved) + stale_after(combine, sums[1:])
        with torch.inference_mode():
            a2a.combine(y, handle, out=a2a.combine(y, handle))
        a2a.synchronize()
        a2a.finalize()
        return got

    for outcomes in ranks(run, world_size=2):
        check_outcomes(outcomes, "RuntimeError", STALE)


def test_written_tensors_that_require_grad(ranks):
    """A rank whose out= requires grad raises, the others hear of it, and the next call works."""

    def run(world, device):
        a2a = epmoe.LowLatencyAll2All(world, 4, 16, 1, world.size, dtype=torch.float32, device=device)
        x, idx = torch.ones(4, 16, device=device), torch.zeros(4, 1, dtype=torch.int64, device=device)
        kept = a2a.dispatch(x, idx)
        kept[0].requires_grad_(world.rank == 0)
        refused = outcome(lambda: a2a.dispatch(x, idx, out=kept), a2a)
        kept[0].requires_grad_(False)
        rows, _, _, handle = a2a.dispatch(x, idx, out=kept)
        sums = torch.zeros(4, 16, device=device, requires_grad=world.rank == 0)
        refused_sums = outcome(lambda: a2a.combine(rows, handle, out=sums), a2a)
        result = a2a.combine(rows, handle).unique().tolist()
        a2a.synchronize()
        a2a.finalize()
        return refused, refused_sums, result

    results = ranks(run, world_size=2)
    for i in range(2):
        kinds = ["RuntimeError"] + ["PeerError"] * (len(results) - 1)
        check_outcomes([r[i] for r in results], kinds, "no_grad", on_rank=0, elsewhere=("rank 0",))
    assert all(r[2] == [1.0] for r in results)
