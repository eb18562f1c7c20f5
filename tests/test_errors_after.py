"""What an error leaves behind: nothing that a later call would take for good, and nothing that is lost.

On CUDA an operation fails after its call has returned, so its caller may hold what a failed kernel has left,
and the next call may come from another stream, or while a graph is captured.
"""

import time

import pytest
import torch

import epmoe
from cases import (
    MISTAKE_LIMIT_S, Case, check_case, check_outcomes, indices_of, inputs_of, keep, make_layer,
    outcome, run_routing,
)

BAD = 1  # the rank that makes a mistake
CASE = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", weights=True)
OVERFULL = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", capacity="exact")


def too_many(layer, device):
    """Indices of more rows than rank 0 can receive."""
    return torch.zeros(layer.max_tokens, layer.topk, dtype=torch.int64, device=device)


# ---- what a failed operation has left is not taken for good ----


@pytest.mark.cuda_only
def test_errors_after_a_plan_with_bad_places(ranks):
    """The rows that the caller chose are looked at when the layout is there already."""
    case = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", capacity="roomy")

    def run(world, device):
        layer = make_layer(world, device, case)
        x, idx = inputs_of(case, world.rank, world.size)[0].to(device), indices_of(case, world.rank,
                                                                                   world.size).to(device)
        scatter = layer.preprocess(idx).token_dst_scatter_idx.contiguous()
        world.set_timeout(MISTAKE_LIMIT_S)
        if world.rank == BAD:
            scatter = scatter.clone()
            scatter[scatter >= 0] = 1 << 20
        layout = layer.preprocess(idx, scatter)
        got = [outcome(lambda: layer.dispatch(x, layout=layout), layer) for _ in range(3)]
        after = run_routing(layer, case)
        layer.synchronize()
        layer.finalize()
        return got, after

    results = ranks(run, at_least=2)
    for outcomes in zip(*(got for got, _ in results)):
        check_outcomes(outcomes, ["ValueError" if rank == BAD else "PeerError"
                                  for rank in range(len(results))])
    check_case([after for _, after in results], case)


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["scatter", "gather", "local"])
def test_errors_after_a_dispatch_that_failed(ranks, mode):
    """Its layout brings nothing home, on any rank."""
    case = Case(mode=mode, num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full")

    def run(world, device):
        layer = make_layer(world, device, case)
        x, weight = inputs_of(case, world.rank, world.size)
        x, weight, idx = x.to(device), torch.ones(len(x), 2,
                                                  device=device), indices_of(case, world.rank,
                                                                             world.size).to(device)
        rows, _, layout = layer.dispatch(x, idx)
        world.set_timeout(MISTAKE_LIMIT_S)
        got = [outcome(lambda: layer.dispatch(x, layout=layout, weight=weight if world.rank == BAD else None),
                       layer)]
        got += [outcome(lambda: layer.combine(rows, layout), layer) for _ in range(2)]
        layer.dispatch(x, layout=layout)  # the plan is good
        got.append(outcome(lambda: layer.combine(rows, layout), layer))
        after = run_routing(layer, case)
        layer.synchronize()
        layer.finalize()
        return got, after

    results = ranks(run, at_least=2)
    first, *void, again = zip(*(got for got, _ in results))
    check_outcomes(first, "EpMismatch", "has_weight")
    for outcomes in void:
        check_outcomes(outcomes, ["ValueError" if rank == 0 else "PeerError" for rank in range(len(results))],
                       "combine")
    check_outcomes(again, "nothing")
    check_case([after for _, after in results], case)


# ---- the next call comes from elsewhere ----


@pytest.mark.cuda_only
def test_errors_after_seen_by_a_capture(ranks):
    """What is captured clears nothing: the next call that runs does."""

    def run(world, device):
        layer = make_layer(world, device, OVERFULL)
        x, idx = inputs_of(OVERFULL, world.rank, world.size)[0].to(device), indices_of(OVERFULL, world.rank,
                                                                                       world.size).to(device)
        layer.preprocess(idx)
        layer.synchronize()
        layer.preprocess(too_many(layer, device))
        torch.cuda.synchronize()

        def capture():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer.dispatch(x, idx)

        got = [outcome(capture), outcome(layer.synchronize)]
        torch.cuda.synchronize()
        after = run_routing(layer, OVERFULL)
        layer.synchronize()
        layer.finalize()
        return got, after

    results = ranks(run, at_least=2)
    for outcomes in zip(*(got for got, _ in results)):
        check_outcomes(outcomes, "EpOverflow", "rank 0")
    check_case([after for _, after in results], OVERFULL)


@pytest.mark.cuda_only
def test_errors_after_seen_on_another_stream(ranks):
    """Rank 0 goes on from another stream while the first still has operations that the failed one made
    nothing of; the others see the failure when all of these are over."""

    def run(world, device):
        layer = make_layer(world, device, OVERFULL)
        x, idx = inputs_of(OVERFULL, world.rank, world.size)[0].to(device), indices_of(OVERFULL, world.rank,
                                                                                       world.size).to(device)
        rows, _, layout = layer.dispatch(x, idx)
        layer.synchronize()
        world.exchange(b"go")
        torch.cuda._sleep(2 * 10**8)  # 100 ms: all is on its way before the first of it fails
        layer.preprocess(too_many(layer, device))
        torch.cuda._sleep(10**9)
        layer.combine(rows, layout)
        time.sleep(0.35)
        if world.rank:
            torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            got = outcome(layer.synchronize)
        torch.cuda.synchronize()
        after = run_routing(layer, OVERFULL)
        layer.synchronize()
        layer.finalize()
        return got, after

    results = ranks(run, at_least=2)
    check_outcomes([got for got, _ in results], "EpOverflow", "rank 0")
    check_case([after for _, after in results], OVERFULL)


# ---- what could not be closed, or made ----


@pytest.mark.parametrize("which", ["layer", "heap"])
def test_errors_after_a_close_that_met_something_else(ranks, which):
    """It did nothing, on any rank: all close again, and all is given back."""

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        layer = make_layer(world, device, Case(num_buffers=2), heap=heap)
        keep(world, heap)
        world.set_timeout(MISTAKE_LIMIT_S)
        close = layer.finalize if which == "layer" else heap.close
        got = [outcome(close if world.rank == BAD else lambda: heap.malloc_symmetric((4,)))]
        alive = run_routing(layer, Case())
        got += [outcome(layer.finalize), outcome(layer.finalize)]
        left = heap.stats()["used"]
        got += [outcome(heap.close), outcome(heap.close), outcome(lambda: heap.malloc_symmetric((4,)))]
        return got, alive, left

    results = ranks(run, world_size=3, at_least=2)
    first, *closed, last = zip(*(got for got, _, _ in results))
    check_outcomes(first, "EpMismatch")
    for outcomes in closed:
        check_outcomes(outcomes, "nothing")
    check_outcomes(last, "EpClosed")
    check_case([alive for _, alive, _ in results], Case())
    assert [left for _, _, left in results] == [0] * len(results)


@pytest.mark.cuda_only
def test_errors_after_ranks_that_disagree_gives_the_memory_back(ranks):
    """A layer that was not made keeps nothing of the GPU."""

    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)

        def disagree():
            epmoe.EPAll2AllLayer(world, 4096, 4096, 2, num_tot_experts=2 * world.size,
                                 dtype=torch.bfloat16 if world.rank == BAD else torch.float16)

        outcome(disagree)
        world.exchange(b"x")
        before, got = torch.cuda.mem_get_info()[0], []
        for _ in range(3):
            got.append(outcome(disagree))
            world.exchange(b"x")
        return got, before - torch.cuda.mem_get_info()[0]

    results = ranks(run, at_least=2)
    for outcomes in zip(*(got for got, _ in results)):
        check_outcomes(outcomes, "EpMismatch", "dtype", "bfloat16", "float16")
    assert all(lost < 1 << 24 for _, lost in results), results


@pytest.mark.cuda_only
def test_errors_of_a_gpu_without_other_ranks():
    """A process by itself needs no torch.distributed."""
    world = epmoe.thread_worlds(1)[0]
    results = [run_routing(make_layer(world, torch.device("cuda", torch.cuda.current_device()), CASE), CASE)]
    check_case(results, CASE)
    world.close()
