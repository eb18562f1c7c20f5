"""Calls of the low-latency layer, and what each rank must receive and get back."""

import dataclasses

import torch

import epmoe
from cases import generator
from epmoe import reference
from epmoe.testing import routing


@dataclasses.dataclass(frozen=True)
class Shape:
    max_tokens: int = 9
    hidden: int = 128
    topk: int = 4
    num_local: int = 4
    dtype: torch.dtype = torch.bfloat16
    num_buffers: int = 1
    num_sm: int | None = None
    local: bool = True


@dataclasses.dataclass(frozen=True)
class Call:
    """One dispatch and combine.  Every rank can make the inputs of every rank."""

    seed: int = 0
    pattern: str = "uniform"
    layout: str = "masked"
    fp8: bool | str = False
    weights: bool = True
    index_dtype: torch.dtype = torch.int64
    tokens: str = "random"  # "full", "none", "only_last"
    halves: bool = False
    buffer: int = 0
    returns_fp8: bool = False

    def num_tokens(self, shape, rank, size):
        if self.tokens == "random":
            return int(torch.randint(0, shape.max_tokens + 1, (), generator=generator(self.seed, rank, 3)))
        has_tokens = self.tokens == "full" or self.tokens == "only_last" and rank == size - 1
        return shape.max_tokens if has_tokens else 0

    def inputs(self, shape, rank, size):
        g = generator(self.seed, rank, 4)
        t = self.num_tokens(shape, rank, size)
        idx = routing(self.pattern, t, shape.topk, shape.num_local * size, size, rank, g).to(self.index_dtype)
        x = torch.randn(t, shape.hidden, generator=g).to(shape.dtype)
        return x, idx, torch.rand(t, shape.topk, generator=g) if self.weights else None


def make(world, device, shape):
    sizes = shape.max_tokens, shape.hidden, shape.topk, shape.num_local * world.size
    return epmoe.LowLatencyAll2All(world, *sizes, dtype=shape.dtype, device=device,
                                   num_buffers=shape.num_buffers, num_sm=shape.num_sm,
                                   enable_local_combine=shape.local)


def expert(rows, number):
    """What expert `number` makes of its rows [.., H]: different for each, and exact enough to compare."""
    return (rows.float() * (0.5 + number % 7)).to(rows.dtype)


def origins(shape, call, size):
    """For each expert the list of (source rank, token), in the order of its rows."""
    all_idx = [call.inputs(shape, r, size)[1] for r in range(size)]
    return [[(w, t) for w, idx in enumerate(all_idx) for t in range(len(idx)) if (idx[t] == e).any()]
            for e in range(shape.num_local * size)]


def run_call(a2a, shape, call, out=None, sums=None):
    """Dispatch, the experts, combine.  Returns what check_call compares, on the device.

    out, sums: The results of earlier calls, to be written again.
    """
    x, idx, weights = (None if t is None else t.to(a2a.device)
                       for t in call.inputs(shape, a2a.rank, a2a.world_size))
    options = dict(fp8=call.fp8, layout=call.layout, buffer=call.buffer, out=out)
    if sums is not None:
        sums = sums[:len(x)]
    with torch.no_grad():
        if call.halves:
            rows, scales, counts, handle = a2a.dispatch_send(x, idx, weights, **options).recv()
        else:
            rows, scales, counts, handle = a2a.dispatch(x, idx, weights, **options)
        y = experts_of(a2a, shape, call, rows, x)
        combine = a2a.combine_send if call.halves else a2a.combine
        out = combine(y, handle, fp8=call.returns_fp8, out=sums)
        if call.halves:
            out = out.recv()
    return rows.view(torch.uint8) if call.fp8 else rows, scales, counts, out  # float8 cannot be pickled


def experts_of(a2a, shape, call, rows, x):
    """The outputs of this rank's experts, made from the true tokens: the bits do not depend on fp8."""
    y = torch.full(rows.shape, float("nan"), dtype=shape.dtype)
    base, first = 0, a2a.rank * shape.num_local
    sources = [call.inputs(shape, r, a2a.world_size)[0] for r in range(a2a.world_size)]
    for l, where in enumerate(origins(shape, call, a2a.world_size)[first:first + shape.num_local]):
        for i, (w, t) in enumerate(where):
            y[(l, i) if call.layout == "masked" else base + i] = expert(sources[w][t], first + l)
        base += len(where)
    return y.to(rows.device)


def check_rows(shape, call, size, rank, rows, scales, counts):
    sources = [call.inputs(shape, r, size)[0] for r in range(size)]
    first, base = rank * shape.num_local, 0
    for l, where in enumerate(origins(shape, call, size)[first:first + shape.num_local]):
        assert counts[l] == len(where)
        for i, (w, t) in enumerate(where):
            at = (l, i) if call.layout == "masked" else base + i
            if call.fp8:
                q, s = reference.quantize_fp8(sources[w][t][None], pow2=call.fp8 in ("pow2", "ue8m0"))
                s = reference.pack_ue8m0(s) if call.fp8 == "ue8m0" else s
                assert torch.equal(scales[at], s[0])
                assert torch.equal(rows[at], q[0].view(torch.uint8))
            else:
                assert torch.equal(rows[at], sources[w][t])
        base += len(where)


def check_call(shape, call, results):
    """results: of each rank."""
    size = len(results)
    inputs = [call.inputs(shape, r, size) for r in range(size)]
    for r, (rows, scales, counts, _) in enumerate(results):
        check_rows(shape, call, size, r, rows, scales, counts)
    # The sums of the normal combine: each choice has a row of its own there.
    plan = reference.plan([idx for _, idx, _ in inputs], shape.num_local * size)
    ys = []
    for r in range(size):
        y = torch.empty(len(plan["rows"][r]), shape.hidden, dtype=shape.dtype)
        for i, (w, t, k) in enumerate(plan["rows"][r].tolist()):
            y[i] = expert(inputs[w][0][t], int(inputs[w][1][t, k]))
        ys.append(y)
    weights = None
    if call.weights:
        weights = reference.dispatch_weights([w for _, _, w in inputs], plan)
    want = reference.combine(ys, plan, [idx for _, idx, _ in inputs], shape.num_local * size, weights,
                             local_combine=shape.local, fp8=call.returns_fp8)
    for (_, _, _, out), expected in zip(results, want):
        assert torch.equal(out, expected.to(out.dtype))
