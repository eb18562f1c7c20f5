"""After an error: no later call uses the results of a failed operation, and no memory is lost.

On CUDA an operation fails after its call has returned. So the caller may pass results of a failed kernel to
the next call. The next call may also use another stream, or run during the capture of a graph.
"""

import time
import weakref

import pytest
import torch

import epmoe
from cases import (
    MISTAKE_LIMIT_S, Case, check_case, check_outcomes, indices_of, inputs_of, keep, make_layer,
    outcome, run_routing,
)
from epmoe import _C
from epmoe.comm.error_propagation import reporting

BAD = 1  # the rank that makes a mistake
CASE = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", weights=True)
OVERFULL = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", capacity="exact")


def too_many(layer, device):
    """Return indices that send more rows to rank 0 than it can receive."""
    return torch.zeros(layer.max_tokens, layer.topk, dtype=torch.int64, device=device)


def device_inputs(case, world, device):
    """Return (x, expert indices) of this rank on its device."""
    x, _ = inputs_of(case, world.rank, world.size)
    return x.to(device), indices_of(case, world.rank, world.size).to(device)


class Local:
    """A variable of a caller, in place of a tensor or a CUDA graph."""


def handled(call, *args):
    """Make a call that raises, and return a reference to a variable of this frame."""
    local = Local()
    with pytest.raises((TypeError, MemoryError, epmoe.PeerError)):
        call(*args)
    return weakref.ref(local)


def test_errors_keep_no_variables_of_callers(ranks):
    """After an error was handled, nothing refers to its frames.  Threads collect no garbage here."""
    def run(world, device):
        layer = make_layer(world, device, CASE)
        moe = epmoe.EPMoE(CASE.hidden, 16, layer.num_experts, CASE.topk, layer=layer, dtype=CASE.dtype)
        x, idx = device_inputs(CASE, world, device)
        wrong, weight = x.double() if world.rank == 0 else x, torch.ones(idx.shape, device=device)

        def experts():
            moe(wrong, idx, weight)
            layer.synchronize()  # on a GPU the error may come only here

        found = [handled(layer.dispatch, wrong, idx), handled(experts)]
        planned = layer.preprocess(idx)

        def dispatch():
            if world.rank == 0:  # what a dispatch does that has no memory
                with reporting(layer, _C.OP_DISPATCH, planned.buffer, planned.plan):
                    raise MemoryError("no memory")
            layer.dispatch(x, layout=planned)
            layer.synchronize()  # on a GPU the error may come only here

        found.append(handled(dispatch))
        layer.finalize()
        return [f() is None for f in found]

    assert all(all(found) for found in ranks(run))


# ---- no later call uses the results of a failed operation ----


@pytest.mark.cuda_only
def test_errors_after_plan_with_wrong_rows(ranks):
    """The kernel validates the rows that the caller chose. By then the caller already has the layout."""
    case = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", capacity="roomy")

    def run(world, device):
        layer = make_layer(world, device, case)
        x, idx = device_inputs(case, world, device)
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
    wanted = ["ValueError" if rank == BAD else "PeerError" for rank in range(len(results))]
    for outcomes in zip(*(got for got, _ in results)):
        check_outcomes(outcomes, wanted)
    check_case([after for _, after in results], case)


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode", ["scatter", "gather", "local"])
def test_errors_after_failed_dispatch(ranks, mode):
    """combine with the layout of a failed dispatch raises on all ranks, until a dispatch succeeds."""
    case = Case(mode=mode, num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full")

    def run(world, device):
        layer = make_layer(world, device, case)
        x, idx = device_inputs(case, world, device)
        weight = torch.ones(len(x), 2, device=device) if world.rank == BAD else None
        rows, _, layout = layer.dispatch(x, idx)
        world.set_timeout(MISTAKE_LIMIT_S)
        got = [outcome(lambda: layer.dispatch(x, layout=layout, weight=weight), layer)]
        got += [outcome(lambda: layer.combine(rows, layout), layer) for _ in range(2)]
        layer.dispatch(x, layout=layout)  # the plan in the layout is still valid
        got.append(outcome(lambda: layer.combine(rows, layout), layer))
        after = run_routing(layer, case)
        layer.synchronize()
        layer.finalize()
        return got, after

    results = ranks(run, at_least=2)
    failed_dispatch, *combines, last_combine = zip(*(got for got, _ in results))
    check_outcomes(failed_dispatch, "EpMismatch", "has_weight")
    wanted = ["ValueError" if rank == 0 else "PeerError" for rank in range(len(results))]
    for outcomes in combines:
        check_outcomes(outcomes, wanted, "combine")
    check_outcomes(last_combine, "nothing")
    check_case([after for _, after in results], case)


# ---- the next call is captured, or uses another stream ----


@pytest.mark.cuda_only
def test_errors_after_reported_during_capture(ranks):
    """A captured call raises the error but does not clear it. The next call that runs raises it again."""

    def run(world, device):
        layer = make_layer(world, device, OVERFULL)
        x, idx = device_inputs(OVERFULL, world, device)
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
def test_errors_after_reported_on_another_stream(ranks):
    """Rank 0 uses another stream while operations after the failed one are still queued on the first stream.

    The other ranks read the error after all these operations have ended.
    """

    def run(world, device):
        layer = make_layer(world, device, OVERFULL)
        x, idx = device_inputs(OVERFULL, world, device)
        rows, _, layout = layer.dispatch(x, idx)
        layer.synchronize()
        world.exchange(b"go")
        torch.cuda._sleep(2 * 10**8)  # 100 ms: the host launches all operations before the first one fails
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


# ---- a close or a constructor that failed ----


@pytest.mark.parametrize("which", ["layer", "heap"])
def test_errors_after_close_with_another_call(ranks, which):
    """A close on rank BAD and an allocation on the other ranks both fail without effect.

    Then all ranks close again, and the heap gets all its memory back.
    """

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
def test_errors_after_failed_constructor_frees_gpu_memory(ranks):
    """If the ranks disagree in a layer's options, its constructor fails and frees all its GPU memory."""

    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        dtype = torch.bfloat16 if world.rank == BAD else torch.float16

        def disagree():
            epmoe.EPAll2AllLayer(world, 4096, 4096, 2, num_tot_experts=2 * world.size, dtype=dtype)

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
def test_errors_one_gpu_without_torch_distributed():
    """A world of one rank needs no torch.distributed."""
    world = epmoe.thread_worlds(1)[0]
    device = torch.device("cuda", torch.cuda.current_device())
    check_case([run_routing(make_layer(world, device, CASE), CASE)], CASE)
    world.close()
