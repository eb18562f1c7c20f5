"""LowLatencyAll2All against plain PyTorch, and its sums against EPAll2AllLayer's, bit by bit."""

import itertools

import pytest
import torch

import epmoe
from cases import first, pairwise
from epmoe import _C
from epmoe.testing import PATTERNS
from low_latency_cases import Call, Shape, check_call, experts_of, make, run_call
from outcomes import outcome


def run_calls(ranks, shape, calls, **options):
    def run(world, device):
        a2a = make(world, device, shape)
        results = [run_call(a2a, shape, call) for call in calls]
        a2a.synchronize()
        a2a.finalize()
        return results

    results = ranks(run, **options)
    for i, call in enumerate(calls):
        check_call(shape, call, [r[i] for r in results])


@pytest.mark.parametrize("values", pairwise(
    world_size=(4, 2, 1), dtype=(torch.bfloat16, torch.float16, torch.float32), layout=("masked", "compact"),
    local=(True, False)), ids=lambda values: "-".join(map(str, values.values())))
def test_low_latency_dtypes_and_layouts(ranks, values):
    world_size, dtype, layout, local = values.values()
    calls = [Call(seed=s, layout=layout, pattern=p, index_dtype=i, weights=s % 3 > 0)
             for s, (p, i) in enumerate(itertools.product(PATTERNS, (torch.int64, torch.int32)))]
    run_calls(ranks, Shape(dtype=dtype, hidden=72, local=local), calls, world_size=world_size)


@pytest.mark.parametrize("num_sm", [1, 3])
def test_low_latency_expert_offsets(ranks, num_sm):
    """Each expert's rows begin after those of the experts before it, and the last offset is their number."""
    shape = Shape(num_sm=num_sm)

    def run(world, device):
        a2a = make(world, device, shape)
        found = []
        for seed in range(6):
            x, idx, _ = (None if t is None else t.to(device)
                         for t in Call(seed=seed).inputs(shape, world.rank, world.size))
            _, _, counts, handle = a2a.dispatch(x, idx, layout="compact")
            found.append((counts.tolist(), handle.expert_offsets.tolist()))
        a2a.finalize()
        return found

    for found in ranks(run):
        for counts, offsets in found:
            assert offsets == list(itertools.accumulate(counts, initial=0))


@pytest.mark.parametrize("values", pairwise(
    fp8=(True, "pow2", "ue8m0"), layout=("masked", "compact"), dtype=(torch.bfloat16, torch.float16)),
    ids=lambda values: "-".join(map(str, values.values())))
def test_low_latency_fp8(ranks, values):
    fp8, layout, dtype = values.values()
    calls = [Call(seed=s, layout=layout, fp8=fp8) for s in range(6)]
    run_calls(ranks, Shape(dtype=dtype, hidden=1024 if fp8 == "ue8m0" else 640, max_tokens=17), calls)


@pytest.mark.parametrize("fp8", [False, True, "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_latency_sums_in_fp8(ranks, fp8, dtype):
    patterns = "uniform", "uniform", "sentinels", "one_rank", "edges", "duplicates"
    calls = [Call(seed=s, layout=("masked", "compact")[s % 2], fp8=fp8, halves=s % 3 == 1, pattern=pattern,
                  weights=s % 4 > 0, returns_fp8=s % 5 > 0) for s, pattern in enumerate(patterns)]
    run_calls(ranks, Shape(dtype=dtype, hidden=1024 if fp8 == "ue8m0" else 640, max_tokens=17), calls)


def test_low_latency_error_of_sums_in_fp8(ranks):
    """The bound of the documents, and that this rank's own sums have no error."""
    shape = Shape(hidden=1024, max_tokens=64)
    calls = [Call(tokens="full", returns_fp8=fp8) for fp8 in (False, True)]

    def run(world, device):
        a2a = make(world, device, shape)
        results = [run_call(a2a, shape, call)[3].float() for call in calls]
        a2a.finalize()
        return results

    for exact, got in ranks(run):
        error = ((got - exact).norm() / exact.norm()).item()
        assert error < 0.03 and (error > 0.01 or ranks.size() == 1)


@pytest.mark.parametrize("shape", first(4, [
    Shape(max_tokens=1, topk=1, num_local=1, hidden=8), Shape(topk=32, num_local=40, max_tokens=3),
    Shape(num_sm=3), Shape(max_tokens=40, num_local=3, topk=3, hidden=7168),
    Shape(max_tokens=130, topk=8, num_local=16, hidden=1096), Shape(max_tokens=600, topk=2, hidden=16),
    Shape(max_tokens=130, topk=8, num_local=16, hidden=1096, local=False),
    Shape(topk=32, num_local=40, max_tokens=3, local=False), Shape(num_sm=3, local=False),
    Shape(max_tokens=1, topk=1, num_local=1, hidden=8, local=False)]), ids=str)
def test_low_latency_shapes(ranks, shape):
    run_calls(ranks, shape, [Call(seed=1), Call(seed=2, layout="compact", tokens="full")])


@pytest.mark.parametrize("tokens", ["none", "only_last", "full"])
def test_low_latency_numbers_of_tokens(ranks, tokens):
    run_calls(ranks, Shape(), [Call(seed=s, tokens=tokens) for s in range(4)])


def test_low_latency_halves(ranks):
    calls = [Call(seed=s, halves=s % 2 == 0, layout=("masked", "compact")[s % 3 == 0]) for s in range(8)]
    for local in (True, False):
        run_calls(ranks, Shape(local=local), calls)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("layout", ["masked", "compact"])
def test_low_latency_out(ranks, layout, fp8):
    """The same tensors are written by calls on several buffers, with other numbers of tokens."""
    shape = Shape(num_buffers=2)
    calls = [Call(seed=s, halves=s % 3 == 0, buffer=s % 2, layout=layout, fp8=fp8) for s in range(9)]

    def run(world, device):
        a2a = make(world, device, shape)
        with torch.no_grad():
            x, idx, weights = (t.to(device) for t in calls[0].inputs(shape, a2a.rank, a2a.world_size))
            kept = a2a.dispatch(x, idx, weights, fp8=fp8, layout=layout)
            sums = torch.empty(shape.max_tokens, shape.hidden, dtype=shape.dtype, device=device)
            assert a2a.dispatch(x, idx, weights, fp8=fp8, layout=layout, out=kept) is kept
        results = [[None if t is None else t.clone() for t in run_call(a2a, shape, call, kept, sums)]
                   for call in calls]
        a2a.synchronize()
        a2a.finalize()
        return results

    results = ranks(run)
    for i, call in enumerate(calls):
        check_call(shape, call, [r[i] for r in results])


def test_low_latency_out_of_other_tensors(ranks):
    """A tuple of tensors that its handle does not write, and an out of combine that is no tensor of rows."""
    def run(world, device):
        a2a = make(world, device, Shape())
        x, idx, weights = (t.to(device) for t in Call(seed=1).inputs(Shape(), a2a.rank, a2a.world_size))
        got = []
        with torch.no_grad():
            kept = a2a.dispatch(x, idx, weights)
            sums = a2a.combine(kept[0], kept[3])
            for i, other in enumerate((kept[0].clone(), torch.ones(1, device=device), kept[2].clone())):
                got.append(outcome(lambda: a2a.dispatch(x, idx, weights, out=(*kept[:i], other,
                                                                              *kept[i + 1:]))))
            kept = a2a.dispatch(x, idx, weights, out=kept)
            for out in ([1], torch.tensor(1.0, device=device)):
                got.append(outcome(lambda: a2a.combine(kept[0], kept[3], out=out)))
                kept = a2a.dispatch(x, idx, weights)
            same = torch.equal(a2a.combine(kept[0], kept[3]), sums)
        a2a.finalize()
        return got, same

    for got, same in ranks(run):
        assert [g.kind for g in got] == ["ValueError"] * 3 + ["TypeError", "ValueError"] and same


@pytest.mark.parametrize("layout", ["masked", "compact"])
def test_low_latency_out_beside_the_inputs(ranks, layout):
    """Views of one memory that do not overlap; routing weights in the memory of out, which are cast first."""
    shape = Shape(dtype=torch.float32)
    call = Call(seed=3, tokens="full", layout=layout)

    def run(world, device):
        a2a = make(world, device, shape)
        x, idx, weights = (t.to(device) for t in call.inputs(shape, world.rank, world.size))
        with torch.no_grad():
            kept = a2a.dispatch(x, idx, weights, layout=layout)
            a2a.dispatch(kept[0].view(-1, shape.hidden)[:0], idx[:0], None, layout=layout, out=kept)
            narrow = kept[0].view(-1).view(torch.float16)[:weights.numel()].view_as(weights).copy_(weights)
            rows, scales, counts, handle = a2a.dispatch(x, idx, narrow, layout=layout, out=kept)
            memory = torch.full((rows.numel() + 2 * x.numel(),), float("nan"), device=device)
            y = memory[x.numel():-x.numel()].view_as(rows).copy_(rows)
            sums = [a2a.combine(y, handle, out=out.view_as(x))
                    for out in (memory[:x.numel()], memory[-x.numel():])]
        want = x * weights.half().float().sum(1, keepdim=True)
        close = [torch.allclose(s, want, rtol=1e-4, atol=1e-4) for s in sums]
        a2a.finalize()
        return close

    assert all(map(all, ranks(run)))


def test_low_latency_buffers_are_interleaved(ranks):
    """Two micro-batches: the rows of one are on their way while the other is computed."""
    shape = Shape(num_buffers=2)
    calls = [Call(seed=s, buffer=s % 2) for s in range(6)]

    def run(world, device):
        a2a, results = make(world, device, shape), []
        for pair in zip(calls[::2], calls[1::2]):
            inputs = [[t.to(device) for t in c.inputs(shape, a2a.rank, a2a.world_size)] for c in pair]
            pending = [a2a.dispatch_send(*i, buffer=c.buffer) for c, i in zip(pair, inputs)]
            received = [p.recv() for p in pending]
            ys = [experts_of(a2a, shape, c, r[0], i[0]) for c, r, i in zip(pair, received, inputs)]
            pending = [a2a.combine_send(y, r[3]) for y, r in zip(ys, received)]
            results += [(*r[:3], p.recv()) for r, p in zip(received, pending)]
        a2a.synchronize()
        a2a.finalize()
        return results

    results = ranks(run)
    for i, call in enumerate(calls):
        check_call(shape, call, [r[i] for r in results])


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3, 2**47 - 3, 2**48 - 3, 2**63 - 9])
def test_low_latency_epochs(ranks, epoch):
    """A cell has 48 bits of the epoch.  An overflow of those has no effect."""
    shape, calls = Shape(), [Call(seed=s) for s in range(4)]

    def run(world, device):
        a2a = make(world, device, shape)
        # The first call leaves words in memory.  Its epoch must not be one that comes again after an
        # overflow: 2^48 calls later, all words would have been overwritten.
        for next_epoch in (1000, epoch):
            world.exchange(b"x")  # after this, no rank is in an operation
            _C.layer_set_epoch(a2a._c, 0, next_epoch, epmoe.comm.device.stream_of(a2a.device))
            world.exchange(b"x")
            if next_epoch != epoch:
                run_call(a2a, shape, Call(seed=99, tokens="full"))
                a2a.synchronize()
        results = [run_call(a2a, shape, call) for call in calls]
        a2a.synchronize()
        a2a.finalize()
        return results

    results = ranks(run)
    for i, call in enumerate(calls):
        check_call(shape, call, [r[i] for r in results])


def test_low_latency_shares_a_heap(ranks):
    """Two of them, and a layer that prefills, in one heap.  Their sums are the same bits."""
    shape = Shape(max_tokens=8)

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 22, device)
        options = dict(dtype=shape.dtype, heap=heap)
        sizes = shape.max_tokens, shape.hidden, shape.topk
        a, b = (epmoe.LowLatencyAll2All(None, *sizes, shape.num_local * world.size, **options) for _ in "ab")
        layer = epmoe.EPAll2AllLayer(None, *sizes, num_tot_experts=shape.num_local * world.size,
                                     enable_local_combine=True, **options)
        results = [run_call(a, shape, Call(seed=5)), run_call(b, shape, Call(seed=5))]
        x, idx, weights = (t.to(device) for t in Call(seed=5).inputs(shape, a.rank, a.world_size))
        rows, row_weights, layout = layer.dispatch(x, idx, weights)
        e = torch.repeat_interleave(torch.arange(shape.num_local, device=device), layout.tokens_per_expert)
        y = (rows.float() * (0.5 + (e + a.rank * shape.num_local) % 7)[:, None]).to(shape.dtype)
        same = layer.combine(y, layout, row_weights)
        for each in (a, b, layer, heap):
            (each.finalize if hasattr(each, "finalize") else each.close)()
        return *results, same

    results = ranks(run)
    for i in range(2):
        check_call(shape, Call(seed=5), [r[i] for r in results])
    for r in results:
        assert torch.equal(r[0][3], r[2])


@pytest.mark.cuda_only
def test_low_latency_graphs(ranks):
    """Replays, mixed with calls outside of graphs, and with other inputs in the same memory."""
    if not ranks.is_torchrun:
        pytest.skip("ranks that are threads do not replay graphs")
    shape, calls = Shape(max_tokens=16, hidden=1024), [Call(seed=s, tokens="full") for s in range(6)]

    def run(world, device):
        a2a, results = make(world, device, shape), []
        fixed = [t.to(device) for t in calls[0].inputs(shape, a2a.rank, a2a.world_size)]
        number = torch.zeros(1, dtype=torch.bfloat16, device=device)

        def layer():
            rows, scales, counts, handle = a2a.dispatch(*fixed)
            e = torch.arange(shape.num_local, device=device) + a2a.rank * shape.num_local
            y = (rows.float() * (0.5 + e % 7)[:, None, None]).to(shape.dtype)
            return rows, scales, counts, a2a.combine(y, handle)

        with torch.no_grad():
            layer()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                got = layer()
            for i, call in enumerate(calls):
                if i % 3 == 2:
                    results.append(run_call(a2a, shape, call))
                    continue
                for to, new in zip(fixed, call.inputs(shape, a2a.rank, a2a.world_size)):
                    to.copy_(new)
                graph.replay()
                results.append([None if t is None else t.clone() for t in got])
        del number
        a2a.synchronize()
        a2a.finalize()
        return results

    results = ranks(run)
    for i, call in enumerate(calls):
        check_call(shape, call, [r[i] for r in results])
