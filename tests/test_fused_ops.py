"""dispatch + product and product + combine: bit by bit what the stages give one after the other, and within rounding of sums in float64.

A GPU of compute capability 9.x has each of the two in one launch.  Elsewhere Played does the stages where they would be
launched, so that what Python has around them is run here as well; what only the kernels can do wrong is seen under
torchrun.  Memory that nobody wrote is poison (see conftest), and so is staging memory (see soil).
"""

import dataclasses
import random
import time
import types

import pytest
import torch

import cases
import epmoe
from cases import MISTAKE_LIMIT_S, MODES, Case, case_id, check_outcomes, generator, indices_of, num_tokens, outcome, same_bits
from epmoe import reference
from epmoe.fused import _offsets
from epmoe.gemm import FORWARD
from test_gemm_products import EPS, TINY, check as check_product, forward64
from test_moe_layer import close
from test_plan_slots import make_op, scatter_within

ACTIVATIONS = (None, "gelu", "swiglu", "gpt_oss")
LOW = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}  # of gradients, see test_moe_layer
BAD = 1  # the rank that makes a mistake


@dataclasses.dataclass(frozen=True)
class Experts(Case):
    """A Case, and the experts behind it: two products each."""

    topk: int = 3
    hidden: int = 64
    max_tokens: int = 13
    tokens: str = "unequal"
    inner: int = 48
    activation: str | None = "swiglu"
    bias: bool = True


def grown(ranks, case, times=24):
    """On GPUs so many tokens that experts have several tiles of rows, and a rest."""
    return dataclasses.replace(case, max_tokens=times * case.max_tokens) if ranks.device.type == "cuda" else case


def parameters_of(case, num_experts):
    """w1, b1, w2, b2 of all ranks' experts."""
    g = generator(99, case.hidden, case.inner)
    wide = 2 * case.inner if case.activation in ("swiglu", "gpt_oss") else case.inner
    shapes = {"w1": (num_experts, wide, case.hidden), "b1": (num_experts, wide), "w2": (num_experts, case.hidden, case.inner), "b2": (num_experts, case.hidden)}
    p = {name: (torch.randn(shape, generator=g) / (shape[2] ** 0.5 if len(shape) == 3 else 1)).to(case.dtype) for name, shape in shapes.items()}
    return p if case.bias else p | {"b1": None, "b2": None}


def inputs_of(case, rank, size):
    """x [T, H], idx and weight [T, K], and the gradient of y [T, H] of a rank."""
    g, t = generator(case.seed, rank, 31), num_tokens(case, rank, size)
    x, dy = (torch.randn(t, case.hidden, generator=g).to(case.dtype) for _ in range(2))
    return {"x": x, "idx": indices_of(case, rank, size), "weight": torch.rand(t, case.topk, generator=g) - 0.2 if case.weights else None, "dy": dy}


def tensors(case, rank, size, device):
    """All that a rank's calls take."""
    local = slice(rank * case.num_local, (rank + 1) * case.num_local)
    p = {name: None if value is None else value[local].clone() for name, value in parameters_of(case, case.num_local * size).items()}
    return types.SimpleNamespace(**{name: None if v is None else v.to(device) for name, v in (p | inputs_of(case, rank, size)).items()})


class Played(epmoe.EpAll2AllFusedOp):
    """Where there are no megakernels, the stages in their place; what means nothing is NaN.  Counts the launches."""

    num_launches = 0

    def _is_fused(self, *products):
        fits = self.fused and self.dtype in LOW and all(n % 16 == 0 for w in products for n in w.shape[1:])
        return super()._is_fused(*products) or (self.device.type == "cpu" and fits)

    def _dispatch_gemm(self, x, weight, plan, gemm_weight, bias, buffer, num_rows, activation):
        self.num_launches += 1
        if self.device.type == "cuda":
            return super()._dispatch_gemm(x, weight, plan, gemm_weight, bias, buffer, num_rows, activation)
        rows, row_weight, recv = self._dispatch(x.repeat_interleave(self._copies, 0), weight, plan, buffer, num_rows)
        offsets = _offsets(self, plan)
        out = torch.ops.epmoe.grouped_gemm(rows, gemm_weight, offsets, bias, None, FORWARD, activation, False)
        for t in (out, rows) if row_weight is None else (out, rows, row_weight):
            t[offsets[-1]:] = torch.nan
        return out, rows, row_weight, recv

    def _gemm_combine(self, a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens):
        self.num_launches += 1
        if self.device.type == "cuda":
            return super()._gemm_combine(a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens)
        offsets = _offsets(self, plan)
        rows = torch.ops.epmoe.grouped_gemm(a, gemm_weight, offsets, bias, None, FORWARD, 0, False)
        rows[offsets[-1]:] = torch.nan
        return self._combine(rows, row_weight, None, plan, recv, buffer, num_tokens)[0], rows


def is_played(device):
    """Whether the two operators come to _dispatch_gemm and _gemm_combine here."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


def soil(op):
    """cases.soil, also where every choice is a token of its own: staging memory is full of NaN."""
    if op.token_saving:
        return cases.soil(op)
    num_tokens, k = op.max_tokens // op._copies, op._copies
    if op.capacity is not None:
        num_tokens = min(num_tokens, op.capacity // (op.world_size * k))
    idx = (torch.arange(num_tokens)[:, None] + torch.arange(k)) % op.world_size * op.num_local_experts
    x = torch.full((num_tokens, op.hidden), torch.nan, dtype=op.dtype, device=op.device)
    rows, _, layout = op.dispatch(x, idx.to(op.device))
    op.combine(torch.full_like(rows, torch.nan), layout)


def step(op, case, t, **options):
    """Both operators, one behind the other: what they give, rows cut to those that there are."""
    h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, None if "layout" in options else t.idx, gemm_weight=t.w1, weight=t.weight, bias=t.b1,
                                                        activation=case.activation, **options)
    y = op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2)
    return cut(h, row_weight, y, layout)


def cut(h, row_weight, y, layout):
    m = layout.num_rows
    return {"h": h[:m], "row_weight": None if row_weight is None else row_weight[:m], "y": y}


def same(got, want, what):
    for name, value in want.items():
        assert (got[name] is None) == (value is None), f"{what}: {name}"
        if value is not None:
            same_bits(got[name], value, f"{what}: {name}")


def both(world, device, some, knobs, shared=None):
    """Cases of one shape through an op, twice each, and through the stages: the same bits.  Returns what the op gave."""
    plain, op = (make_op(world, device, some[0], Played, **(options | (shared or {}))) for options in ({"fused": False}, knobs))
    soil(plain), soil(op)
    results = []
    for case in some:
        t = tensors(case, world.rank, world.size, device)
        launches = op.num_launches
        want, got, again = step(plain, case, t), step(op, case, t), step(op, case, t)
        results.append((want, got, again))
        assert op.num_launches - launches == (4 if is_played(device) else 0) and plain.num_launches == 0
    for o in (plain, op):
        o.synchronize()
        o.finalize()
    for case, (want, got, again) in zip(some, results):
        same(got, want, f"{case}, rank {world.rank}")
        same(again, want, f"{case}, rank {world.rank}, the second time")
    return [got for _, got, _ in results]


def sums64(case, t, p):
    """y of a rank in float64, and what rounding allows: of h, of the rows, of each rank's sum, of the end; and sums in float32."""
    y, slack = torch.zeros(t["x"].shape, dtype=torch.float64), torch.zeros(t["x"].shape, dtype=torch.float64)
    eps, tiny = EPS[case.dtype], TINY[case.dtype]
    for e in range(len(p["w1"])):
        at, k = (t["idx"] == e).nonzero(as_tuple=True)
        h, size = forward64(t["x"][at], p["w1"][e], None if p["b1"] is None else p["b1"][e], case.activation, None)
        w2, b2 = p["w2"][e].double(), 0 if p["b2"] is None else p["b2"][e].double()
        row, size_row = h @ w2.t() + b2, h.abs() @ w2.abs().t() + abs(b2)
        off = (eps * h.abs() + 2.0**-19 * size + tiny) @ w2.abs().t() + 2 * eps * row.abs() + 2.0**-19 * size_row + 2 * tiny
        weight = torch.ones(len(at), 1, dtype=torch.float64) if t["weight"] is None else t["weight"][at, k, None].double()
        y.index_add_(0, at, weight * row)
        slack.index_add_(0, at, weight.abs() * off)
    return y, slack + eps * y.abs() + len(p["w1"]) * tiny


def check_rows64(results, case):
    """h of every expert's rows, in the plan's order, and their weights."""
    size = len(results)
    params, inputs = parameters_of(case, case.num_local * size), [inputs_of(case, rank, size) for rank in range(size)]
    p = reference.plan([t["idx"] for t in inputs], case.num_local * size)
    rows = reference.dispatch([t["x"] for t in inputs], p)
    weights = reference.dispatch_weights([t["weight"] for t in inputs], p) if case.weights else None
    for rank, got in enumerate(results):
        assert len(got["h"]) == len(rows[rank]) and got["h"].dtype == case.dtype
        if weights is not None:
            same_bits(got["row_weight"], weights[rank], f"rank {rank}: row weights")
        begin = 0
        for e in range(rank * case.num_local, (rank + 1) * case.num_local):
            end = begin + int(p["counts"][:, e].sum())
            want, terms = forward64(rows[rank][begin:end], params["w1"][e], None if params["b1"] is None else params["b1"][e], case.activation, None)
            check_product(got["h"][begin:end], want, terms, f"rank {rank}: h of expert {e}")
            begin = end


def check_sums64(results, case):
    """y of every token."""
    size = len(results)
    params = parameters_of(case, case.num_local * size)
    wide = {name: None if v is None else v.double() for name, v in params.items()}
    for rank, got in enumerate(results):
        t = inputs_of(case, rank, size)
        want, slack = sums64(case, t, params)
        if case.activation is not None:
            weight = torch.ones(t["idx"].shape, dtype=torch.float64) if t["weight"] is None else t["weight"].double()
            want = reference.moe(t["x"].double(), t["idx"], weight, wide["w1"], wide["w2"], case.activation, wide["b1"], wide["b2"])
        y = got["y"].double()
        assert got["y"].dtype == case.dtype and y.shape == want.shape
        worst = ((y - want).abs() / slack).max().item() if want.numel() else 0.0
        assert worst <= 1 and not y.isnan().any(), f"rank {rank}: y is off by {worst} times what rounding allows"


def check_numbers(results, case):
    check_rows64(results, case)
    check_sums64(results, case)


def check(ranks, some, knobs=None, shared=None, **options):
    """knobs: of the op; shared: what the stages that it is compared with have, too."""
    some = some if isinstance(some, list) else [some]
    results = ranks(both, some, knobs or {}, shared, **options)
    for i, case in enumerate(some):
        check_numbers([r[i] for r in results], case)


# ---- forward ----


@pytest.mark.parametrize("dtype", LOW, ids=case_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_fused_equals_the_stages(ranks, mode, activation, dtype):
    for capacity in (None, "exact"):
        base = grown(ranks, Experts(mode=mode, activation=activation, dtype=dtype, capacity=capacity, pattern="sentinels", seed=1))
        check(ranks, [dataclasses.replace(base, bias=bias, weights=weights) for bias in (False, True) for weights in (False, True)])


@pytest.mark.parametrize("pattern", ["uniform", "distinct", "one_expert", "one_rank", "own_rank", "heavy_drop", "all_dropped", "duplicates", "edges"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_pattern(ranks, mode, pattern):
    check(ranks, grown(ranks, Experts(mode=mode, pattern=pattern, activation="gpt_oss", num_local=3)))


@pytest.mark.parametrize("capacity", [None, "exact", "roomy"])
@pytest.mark.parametrize("tokens", ["full", "none", "first_none", "only_last"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_tokens_of_ranks(ranks, mode, tokens, capacity):
    """Ranks that send nothing, receive nothing, or both."""
    check(ranks, [grown(ranks, Experts(mode=mode, tokens=tokens, capacity=capacity, bias=bias, activation="gelu", pattern=pattern))
                  for bias, pattern in ((True, "uniform"), (False, "uniform"))])


@pytest.mark.parametrize("hidden, inner", [(64, 16), (192, 144), (320, 400), (512, 48), (128, 272)])
@pytest.mark.parametrize("mode", MODES)
def test_fused_shape(ranks, mode, hidden, inner):
    """Widths in one, two and more tiles of each width, with and without a rest; contractions shorter than a stage."""
    for activation in (None, "swiglu"):
        check(ranks, grown(ranks, Experts(mode=mode, hidden=hidden, inner=inner, activation=activation, max_tokens=9)))


@pytest.mark.parametrize("num_local", [1, 5, 64])
@pytest.mark.parametrize("mode", MODES)
def test_fused_experts(ranks, mode, num_local):
    check(ranks, grown(ranks, Experts(mode=mode, num_local=num_local, hidden=32, inner=16)))


@pytest.mark.parametrize("topk", [1, 8, 17, 32])
@pytest.mark.parametrize("mode", MODES)
def test_fused_topk(ranks, mode, topk):
    check(ranks, grown(ranks, Experts(mode=mode, topk=topk, num_local=5, max_tokens=5, pattern="sentinels", activation="gelu")))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_fused_world_size(ranks, world_size):
    check(ranks, [grown(ranks, Experts(mode="local", pattern=p)) for p in ("uniform", "duplicates")], world_size=world_size)


def test_fused_sizes_one_after_the_other(ranks):
    """Many tokens, then few, then none, on one op: nothing of the larger is left in the smaller."""
    base = grown(ranks, Experts(num_local=3, activation="gelu"))
    check(ranks, [dataclasses.replace(base, seed=s, tokens=tokens, pattern=p) for s, (tokens, p) in enumerate(
        (("full", "uniform"), ("only_last", "heavy_drop"), ("none", "uniform"), ("full", "one_expert"), ("full", "all_dropped"), ("unequal", "edges")))])


KNOBS = [{"num_sm": 1}, {"num_sm": 7}, {"num_sm": 2, "num_tail_sms": 1}, {"num_sm": 24, "num_tail_sms": 8}, {"num_sm": 24, "num_tail_sms": 23},
         {"num_tail_sms": 40}, {"num_reduce_sms": 1}, {"num_sm": 3, "num_reduce_sms": 40}, {"num_sm": 40, "num_reduce_sms": 3}, {"token_sorting": False},
         {"block_wise_barrier": False}, {"combine_order": "serial"},
         {"num_sm": 1, "num_reduce_sms": 1, "token_sorting": False, "block_wise_barrier": False, "combine_order": "serial"},
         {"num_sm": 5, "num_tail_sms": 2, "num_reduce_sms": 9, "block_wise_barrier": False},
         {"num_sm": 16, "num_tail_sms": 15, "token_sorting": False, "combine_order": "serial"}]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda k: "-".join(f"{n}={v}" for n, v in k.items()))
@pytest.mark.parametrize("mode", MODES)
def test_fused_knobs_change_no_bit(ranks, mode, knobs):
    base = Experts(mode=mode, num_local=3, capacity="roomy" if "num_tail_sms" in knobs else None, num_sm=None)
    check(ranks, [grown(ranks, dataclasses.replace(base, pattern=p)) for p in ("uniform", "one_expert")], knobs)


@pytest.mark.parametrize("mode", MODES)
def test_fused_rows_of_the_caller(ranks, mode):
    """full_scatter_indices: the rows of an expert in another order; its tiles still wait for what they hold."""
    case = grown(ranks, Experts(mode=mode, num_local=3, pattern="sentinels"))

    def run(world, device):
        num_experts, seen = case.num_local * world.size, []
        of_all = [indices_of(case, r, world.size) for r in range(world.size)]
        scatter = scatter_within(reference.plan(of_all, num_experts), of_all[world.rank], num_experts, world.rank).to(device)
        t = tensors(case, world.rank, world.size, device)
        for fused in (False, True):
            op = make_op(world, device, case, Played, fused=fused)
            soil(op)
            seen.append(step(op, case, t, full_scatter_indices=scatter))
            seen.append(step(op, case, t))
            op.synchronize()
            op.finalize()
        stages, in_order, fused, again = seen
        same(fused, stages, f"rank {world.rank}")
        same(again, in_order, f"rank {world.rank}, in the plan's order")
        return fused, again

    results = ranks(run)
    check_numbers([again for _, again in results], case)
    check_sums64([fused for fused, _ in results], case)
    assert any(not torch.equal(fused["h"], again["h"]) for fused, again in results)  # they were moved


@pytest.mark.parametrize("knobs", [{}, {"num_sm": 5, "num_tail_sms": 2}, {"combine_order": "serial", "token_sorting": False}], ids=["all", "tail", "serial"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_without_token_saving(ranks, mode, knobs):
    """A token travels once for each of its choices; the stages do it in the same way."""
    base = grown(ranks, Experts(mode=mode, num_local=3, capacity="roomy" if knobs else None, topk=4), 12)
    check(ranks, [dataclasses.replace(base, pattern=p, weights=w) for p, w in (("uniform", True), ("duplicates", True), ("sentinels", False))], knobs,
          {"token_saving": False})


def test_fused_indices_of_32_bits(ranks):
    check(ranks, grown(ranks, Experts(index_dtype=torch.int32, pattern="sentinels")))


# ---- what falls back ----


FALLS_BACK = {"float32": Experts(dtype=torch.float32), "inner": Experts(inner=24), "hidden": Experts(hidden=40), "both": Experts(hidden=24, inner=9, activation=None)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FALLS_BACK)
def test_fused_falls_back(ranks, name, mode):
    """What the kernels cannot multiply goes through the stages, and is right."""
    case = dataclasses.replace(FALLS_BACK[name], mode=mode)

    def run(world, device):
        op = make_op(world, device, case, Played)
        soil(op)
        t = tensors(case, world.rank, world.size, device)
        seen = step(op, case, t)
        op.synchronize()
        op.finalize()
        return seen, op.num_launches

    results = ranks(run)
    check_numbers([seen for seen, _ in results], case)
    if name != "inner":  # 24 gates and 24 ups are 48 rows of weights, which the first product can have
        assert all(launches == 0 for _, launches in results)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=case_id)
def test_fused_as_it_is_made(ranks, dtype):
    """Not Played: the kernels where they are, and the stages elsewhere."""
    case = Experts(dtype=dtype)

    def run(world, device):
        op = make_op(world, device, case)
        t = tensors(case, world.rank, world.size, device)
        kernels = [op._is_fused(w) for w in (t.w1, t.w2, t.w1[:, :24], t.w2[:, :, :24])]
        seen = step(op, case, t)
        op.synchronize()
        op.finalize()
        return seen, kernels

    results = ranks(run)
    check_numbers([seen for seen, _ in results], case)
    there = ranks.device.type == "cuda" and is_played(ranks.device) and dtype in LOW
    assert all(kernels == [there, there, False, False] for _, kernels in results)


# ---- layouts and buffers ----


@pytest.mark.parametrize("capacity", [None, "exact"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_layout_again(ranks, mode, capacity):
    """A plan, made alone, and then used for the tokens of three steps in a row; the last combined first."""
    case = grown(ranks, Experts(mode=mode, capacity=capacity, num_local=3, pattern="sentinels"))

    def run(world, device):
        plain, op = (make_op(world, device, case, Played, fused=fused) for fused in (False, True))
        soil(plain), soil(op)
        t = [tensors(case, world.rank, world.size, device) for _ in range(3)]
        for i in (1, 2):  # other tokens, the same routing
            other = inputs_of(dataclasses.replace(case, seed=i), world.rank, world.size)
            n = min(len(other["x"]), len(t[i].x))
            t[i].x[:n], t[i].weight[:n] = other["x"][:n].to(device), other["weight"][:n].to(device)
        want = [step(plain, case, s) for s in t]
        layout = op.preprocess(t[0].idx)
        got = [step(op, case, s, layout=layout) for s in t] + [step(op, case, t[0], layout=layout)]
        sent = []
        for s in t:
            h, row_weight, of = op.mega_dispatch_group_gemm(s.x, layout=layout, gemm_weight=s.w1, weight=s.weight, bias=s.b1, activation=case.activation)
            assert of is layout
            sent.append((h, row_weight))
        late = [cut(h, w, op.mega_group_gemm_combine(h, s.w2, layout, w, bias=s.b2), layout) for s, (h, w) in reversed(list(zip(t, sent)))]
        for o in (plain, op):
            o.synchronize()
            o.finalize()
        for i, (a, b) in enumerate(zip(got + late, want + want[:1] + want[::-1])):
            same(a, b, f"rank {world.rank}, step {i}")
        return got[0]

    check_numbers(ranks(run), case)


@pytest.mark.parametrize("mode", MODES)
def test_fused_buffers_in_flight(ranks, mode):
    """Two microbatches, each on a buffer of its own: both are dispatched before either comes home, several times."""
    some = [grown(ranks, Experts(mode=mode, num_buffers=2, seed=s, pattern=p)) for s, p in enumerate(("uniform", "one_rank"))]

    def run(world, device):
        op = make_op(world, device, some[0], Played)
        soil(op)
        t = [tensors(case, world.rank, world.size, device) for case in some]
        results = []
        for turn in range(4):
            sent, seen = {}, {}
            for b in (0, 1) if turn % 2 else (1, 0):
                sent[b] = op.mega_dispatch_group_gemm(t[b].x, t[b].idx, gemm_weight=t[b].w1, weight=t[b].weight, bias=t[b].b1, activation=some[b].activation,
                                                      buffer=b)
            for b in (0, 1) if turn < 2 else (1, 0):
                h, row_weight, layout = sent[b]
                assert layout.buffer == b
                seen[b] = cut(h, row_weight, op.mega_group_gemm_combine(h, t[b].w2, layout, row_weight, bias=t[b].b2), layout)
            results.append(seen)
        op.synchronize()
        op.finalize()
        for turn, seen in enumerate(results[1:]):
            for b in (0, 1):
                same(seen[b], results[0][b], f"rank {world.rank}, buffer {b}, turn {turn + 1}")
        return results[0]

    results = ranks(run)
    for b, case in enumerate(some):
        check_numbers([r[b] for r in results], case)


def test_fused_and_plain_calls_in_turn(ranks):
    """The stages and the megakernels of one op share a buffer, and flags that count on."""
    case = grown(ranks, Experts(capacity="roomy", activation="gelu"))

    def run(world, device):
        op = make_op(world, device, case, Played)
        soil(op)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)
        for _ in range(3):
            rows, row_weight, layout = op.dispatch(t.x, t.idx, t.weight)
            h = epmoe.grouped_gemm(rows, t.w1, offsets=layout.expert_offsets, bias=t.b1, activation=case.activation)
            y = op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2)  # dispatched by the one, combined by the other
            same(cut(h, row_weight, y, layout), want, f"rank {world.rank}, dispatched by itself")
            h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, layout=layout, gemm_weight=t.w1, weight=t.weight, bias=t.b1, activation=case.activation)
            y = op.combine(epmoe.grouped_gemm(h, t.w2, offsets=layout.expert_offsets, bias=t.b2), layout, row_weight)
            same(cut(h, row_weight, y, layout), want, f"rank {world.rank}, combined by itself")
            op.ep_barrier_all()
        op.synchronize()
        op.finalize()
        return want

    check_numbers(ranks(run), case)


# ---- gradients ----


LEAVES = ("x", "weight", "w1", "b1", "w2", "b2")


def gradients(world, device, case, leaves, **options):
    """y, and the gradient of each leaf, through one op; twice, by the same layout the second time."""
    op = make_op(world, device, case, Played, **options)
    soil(op)
    t = tensors(case, world.rank, world.size, device)
    names, layout, seen = [n for n in LEAVES if n in leaves and getattr(t, n) is not None], None, []
    for _ in range(2):
        for n in names:
            setattr(t, n, getattr(t, n).detach().clone().requires_grad_())
        h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx if layout is None else None, layout, t.w1, t.weight, bias=t.b1, activation=case.activation)
        y = op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2)
        assert y.requires_grad
        y.backward(t.dy)
        seen.append({"y": y.detach(), **{n: getattr(t, n).grad for n in names}})
    op.synchronize()
    op.finalize()
    for name, value in seen[0].items():
        if name not in ("b1", "b2"):  # whose sums have no fixed order on a GPU
            same_bits(seen[1][name], value, f"rank {world.rank}: {name} by the same layout")
    return seen[0]


def gradients_of_both(world, device, case, leaves=LEAVES, **options):
    """The same from the op and from the stages: bit by bit, where sums have an order."""
    want, got = gradients(world, device, case, leaves, fused=False, **options), gradients(world, device, case, leaves, **options)
    for name, value in want.items():
        if name not in ("b1", "b2"):
            assert got[name] is not None, name
            same_bits(got[name], value, f"rank {world.rank}: {'y' if name == 'y' else 'gradient of ' + name}")
    return got


def moe64(case, t, p):
    """The oracle, also without an activation: two products, one behind the other."""
    weight = torch.ones(t["idx"].shape, dtype=torch.float64) if t["weight"] is None else t["weight"]
    if case.activation is not None:
        return reference.moe(t["x"], t["idx"], weight, p["w1"], p["w2"], case.activation, p["b1"], p["b2"])
    y = torch.zeros_like(t["x"])
    for e in range(len(p["w1"])):
        at, k = (t["idx"] == e).nonzero(as_tuple=True)
        h = t["x"][at] @ p["w1"][e].t() + (0 if p["b1"] is None else p["b1"][e])
        y = y.index_add(0, at, (h @ p["w2"][e].t() + (0 if p["b2"] is None else p["b2"][e])) * weight[at, k, None])
    return y


def check_gradients(results, case):
    """Those of the oracle in float64 over the tokens of all ranks."""
    size = len(results)
    p = {n: None if v is None else v.double().requires_grad_() for n, v in parameters_of(case, case.num_local * size).items()}
    wanted = []
    for rank in range(size):
        t = {n: v.double() if v is not None and v.is_floating_point() else v for n, v in inputs_of(case, rank, size).items()}
        for n in ("x", "weight"):
            if t[n] is not None:
                t[n].requires_grad_()
        y = moe64(case, t, p)
        y.backward(t["dy"])
        wanted.append({"y": y.detach(), "x": t["x"].grad, "weight": None if t["weight"] is None else t["weight"].grad})
    for rank, got in enumerate(results):
        local = slice(rank * case.num_local, (rank + 1) * case.num_local)
        want = wanted[rank] | {n: None if v is None else v.grad[local] for n, v in p.items()}
        for name, value in got.items():
            assert value.isfinite().all(), f"rank {rank}: {name}"
            loose = 4 if name in ("b1", "b2") else 1  # torch adds up the rows of a bias in its own dtype
            close(value, want[name], f"rank {rank}: {'y' if name == 'y' else 'gradient of ' + name}", loose * TOLERANCE[case.dtype])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_fused_gradients(ranks, mode, activation, bias):
    case = grown(ranks, Experts(mode=mode, activation=activation, bias=bias, dtype=LOW[bias], max_tokens=20, capacity=None if mode == "gather" else "roomy"), 12)
    check_gradients(ranks(gradients_of_both, case), case)


@pytest.mark.parametrize("capacity", [None, "exact"])
@pytest.mark.parametrize("pattern", ["one_expert", "one_rank", "sentinels", "duplicates", "all_dropped"])
def test_fused_gradients_pattern(ranks, pattern, capacity):
    case = grown(ranks, Experts(mode="local", pattern=pattern, capacity=capacity, bias=capacity is None, tokens="first_none", weights=pattern != "duplicates"))
    check_gradients(ranks(gradients_of_both, case), case)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_gradients_without_token_saving(ranks, mode, bias):
    case = grown(ranks, Experts(mode=mode, pattern="sentinels", activation="gelu", bias=bias, tokens="first_none", capacity="roomy" if bias else None))

    def run(world, device):
        return gradients_of_both(world, device, case, token_saving=False)

    check_gradients(ranks(run), case)


@pytest.mark.parametrize("leaves", [("x",), ("weight",), ("w1",), ("w2",), ("b1",), ("b2",), ("x", "w2"), ("weight", "w1")], ids="-".join)
@pytest.mark.parametrize("capacity", [None, "roomy"])
def test_fused_gradients_of_some(ranks, capacity, leaves):
    """Frozen tokens, routers or experts: the rest is as it was."""
    for bias in {True, any(n.startswith("b") for n in leaves)}:
        case = Experts(mode="scatter", capacity=capacity, bias=bias, activation="gelu", dtype=torch.float16)
        results = ranks(gradients_of_both, case, leaves)
        assert all(set(r) == {"y", *leaves} for r in results)
        check_gradients(results, case)


def test_fused_gradients_of_weights_that_nobody_used(ranks):
    """Weights that travelled along, and were not combined with: none of theirs is anything but 0."""
    case = Experts(bias=False, activation=None)

    def run(world, device):
        seen = []
        for fused in (False, True):
            op = make_op(world, device, case, Played, fused=fused)
            soil(op)
            t = tensors(case, world.rank, world.size, device)
            t.x.requires_grad_(), t.weight.requires_grad_()
            h, _, layout = op.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight)
            op.mega_group_gemm_combine(h, t.w2, layout).backward(t.dy)
            op.synchronize()
            op.finalize()
            seen.append((t.x.grad, t.weight.grad))
        same_bits(seen[1][0], seen[0][0], f"rank {world.rank}: gradient of x")
        return seen[1][0], [w is None or not w.any().item() for _, w in seen]

    results = ranks(run)
    assert all(zero == [True, True] for _, zero in results)
    check_gradients([{"x": x} for x, _ in results], dataclasses.replace(case, weights=False))


def test_fused_without_gradients(ranks):
    """no_grad, inference_mode and frozen parameters: the same bits, and no graph."""
    case = Experts()

    def run(world, device):
        op = make_op(world, device, case, Played)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)
        for n in ("x", "w1", "w2", "b1", "b2"):
            getattr(t, n).requires_grad_()
        with torch.no_grad():
            bare = step(op, case, t)
        with torch.inference_mode():
            inside = step(op, case, t)
        op.synchronize()
        op.finalize()
        for got in (bare, inside):
            assert not got["y"].requires_grad and not got["h"].requires_grad
            same(got, want, f"rank {world.rank}")
        return want

    check_numbers(ranks(run), case)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_fused_gradient_of_a_bias_in_float32(ranks, fused):
    """A bias may have any floating dtype, with gradients as without them."""
    case = Experts(dtype=torch.bfloat16, activation="gelu")

    def run(world, device):
        op = make_op(world, device, case, Played, fused=fused)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)["y"]
        t.b1, t.b2 = (b.float().requires_grad_() for b in (t.b1, t.b2))
        got = step(op, case, t)["y"]
        got.backward(t.dy)
        op.synchronize()
        op.finalize()
        return want, got.detach(), t.b1.grad, t.b2.grad

    for rank, (want, got, d1, d2) in enumerate(ranks(run)):
        assert got.dtype == want.dtype and d1.dtype == d2.dtype == torch.float32
        close(got, want, f"rank {rank}: y", TOLERANCE[case.dtype])


# ---- mistakes ----


MISTAKEN = Experts(tokens="full", max_tokens=12, activation="swiglu", num_buffers=2)

# What rank BAD passes instead, in which of the two: (argument, change, exception, texts of the message).
WRONG = {
    "dispatch": [
        ("gemm_weight", lambda w: w.float(), "TypeError", ("gemm_weight", "bfloat16", "float32")),
        ("gemm_weight", lambda w: w.half(), "TypeError", ("gemm_weight", "bfloat16", "float16")),
        ("gemm_weight", lambda w: w[:1], "ValueError", ("gemm_weight", "[2, *, 64]", "[1, 96, 64]")),
        ("gemm_weight", lambda w: w[:, :, :32].contiguous(), "ValueError", ("gemm_weight", "[2, *, 64]", "[2, 96, 32]")),
        ("gemm_weight", lambda w: w[0], "ValueError", ("gemm_weight", "[96, 64]")),
        ("gemm_weight", lambda w: w.transpose(1, 2).contiguous().transpose(1, 2), "ValueError", ("gemm_weight", "contiguous")),
        ("gemm_weight", lambda w: w[:, :95].contiguous(), "ValueError", ("swiglu", "even", "95")),
        ("gemm_weight", lambda w: None, "TypeError", ("gemm_weight", "NoneType")),
        ("gemm_weight", lambda w: w.to("meta"), "ValueError", ("gemm_weight", "meta")),
        ("activation", lambda a: "relu", "ValueError", ("relu", "gpt_oss")),
        ("activation", lambda a: 2, "ValueError", ("2", "gpt_oss")),
        ("activation", lambda a: ["gelu"], "TypeError", ()),
        ("bias", lambda b: b[:, :-1].contiguous(), "ValueError", ("bias", "[2, 96]", "[2, 95]")),
        ("bias", lambda b: b.long(), "TypeError", ("bias", "int64")),
        ("bias", lambda b: 0.5, "TypeError", ("bias", "float")),
        ("input", lambda x: x.float(), "TypeError", ("input", "bfloat16", "float32")),
        ("input", lambda x: x[:, :32].contiguous(), "ValueError", ("input", "[*, 64]")),
        ("input", lambda x: torch.cat([x, x]), "ValueError", ("24", "12")),
        ("weight", lambda w: w[:, :1].contiguous(), "ValueError", ("weight", "[12, 3]")),
        ("exp_indices", lambda i: i.float(), "TypeError", ("exp_indices", "float32")),
        ("buffer", lambda b: 2, "ValueError", ("buffer 2",)),
    ],
    "cached": [
        ("gemm_weight", lambda w: w.float(), "TypeError", ("gemm_weight", "bfloat16", "float32")),
        ("gemm_weight", lambda w: w[:1], "ValueError", ("gemm_weight", "[2, *, 64]", "[1, 96, 64]")),
        ("activation", lambda a: "relu", "ValueError", ("relu", "gpt_oss")),
        ("input", lambda x: x.half(), "TypeError", ("input", "bfloat16", "float16")),
        ("input", lambda x: x[:3], "ValueError", ("input", "3")),
        ("input", lambda x: None, "TypeError", ("input", "NoneType")),
        ("weight", lambda w: w[:3], "ValueError", ("weight",)),
        ("layout", lambda s: "the last", "TypeError", ("layout", "EPLayout", "str")),
    ],
    "combine": [
        ("gemm_weight", lambda w: w.float(), "TypeError", ("gemm_weight", "bfloat16", "float32")),
        ("gemm_weight", lambda w: w[:1], "ValueError", ("gemm_weight", "[2, 64, *]", "[1, 64, 48]")),
        ("gemm_weight", lambda w: w[:, :48].contiguous(), "ValueError", ("gemm_weight", "[2, 64, *]", "[2, 48, 48]")),
        ("gemm_weight", lambda w: w[:, :, :32].contiguous(), "ValueError", ("gemm_input", "32", "48")),
        ("gemm_weight", lambda w: w.transpose(1, 2).contiguous().transpose(1, 2), "ValueError", ("gemm_weight", "contiguous")),
        ("gemm_weight", lambda w: None, "TypeError", ("gemm_weight", "NoneType")),
        ("gemm_input", lambda h: h.float(), "TypeError", ("gemm_input", "bfloat16", "float32")),
        ("gemm_input", lambda h: h[:-1], "ValueError", ("gemm_input",)),
        ("gemm_input", lambda h: h[:, :32].contiguous(), "ValueError", ("gemm_input", "32", "48")),
        ("gemm_input", lambda h: h.tolist(), "TypeError", ("gemm_input", "list")),
        ("weight", lambda w: w[:-1], "ValueError", ("weight",)),
        ("weight", lambda w: w.long(), "TypeError", ("weight", "int64")),
        ("bias", lambda b: b[:1], "ValueError", ("bias", "[2, 64]", "[1, 64]")),
        ("layout", lambda s: None, "TypeError", ("layout", "EPLayout", "NoneType")),
        ("layout", lambda s: s.layer._planned, "ValueError", ("only planned",)),
        ("layout", lambda s: s.layer._of_another, "ValueError", ("another layer",)),
    ],
}


def mistake(world, device, where, change, fused, capacity):
    """A wrong argument on rank BAD; what all get, whether they came back, and what the op does afterwards, for all to compare."""
    case = dataclasses.replace(MISTAKEN, capacity=capacity)
    op, other = (make_op(world, device, case, Played, fused=fused) for _ in range(2))
    soil(op)
    t = tensors(case, world.rank, world.size, device)
    before = step(op, case, t)
    op._planned, op._of_another = op.preprocess(t.idx), other.preprocess(t.idx)
    name, to = change
    buffer = 0 if name in ("buffer", "layout") else 1  # who means a buffer that is not there, or none, is heard in the first
    good = {"input": t.x, "exp_indices": t.idx, "gemm_weight": t.w1, "weight": t.weight, "bias": t.b1, "activation": case.activation, "buffer": buffer}
    h, row_weight, layout = op.mega_dispatch_group_gemm(**good)
    call = op.mega_dispatch_group_gemm
    if where == "cached":
        good |= {"layout": layout, "exp_indices": None}
    if where == "combine":
        call, good = op.mega_group_gemm_combine, {"gemm_input": h, "gemm_weight": t.w2, "layout": layout, "weight": row_weight, "bias": t.b2}
    op.synchronize()
    world.set_timeout(MISTAKE_LIMIT_S)
    world.exchange(b"go")
    got = outcome(lambda: call(**(good | {name: to(good[name])} if world.rank == BAD else good)), op)
    alive = outcome(lambda: world.exchange(b"back"))
    after = None if alive.kinds else step(op, case, t)
    if after is not None:
        op.synchronize()
        op.finalize()
        other.finalize()
        same(after, before, f"rank {world.rank}, after {got}")
    return got, alive


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
@pytest.mark.parametrize("where, at", [(where, i) for where, mistakes in WRONG.items() for i in range(len(mistakes))],
                         ids=[f"{where}-{name}-{i}" for where, mistakes in WRONG.items() for i, (name, *_) in enumerate(mistakes)])
def test_fused_mistakes(ranks, where, at, fused):
    """On one rank: its own reason there, PeerError on the others, and afterwards all is as it was."""
    name, change, kind, texts = WRONG[where][at]
    results = ranks(mistake, where, (name, change), fused, "roomy" if at % 2 else None, world_size=3, at_least=2)
    outcomes = [got for got, _ in results]
    for rank, (got, alive) in enumerate(results):
        assert not alive.kinds, f"rank {rank}: {got}, and then {alive}"
    check_outcomes(outcomes, [kind if rank == BAD else "PeerError" for rank in range(len(outcomes))], *texts, who=BAD, elsewhere=(f"rank {BAD}",))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_fused_bad_index_and_overflow(ranks, fused):
    """What all can see raises the same on all, and the op goes on."""
    case = dataclasses.replace(MISTAKEN, capacity="exact")

    def run(world, device):
        op = make_op(world, device, case, Played, fused=fused)
        soil(op)
        t = tensors(case, world.rank, world.size, device)
        before = step(op, case, t)
        world.set_timeout(MISTAKE_LIMIT_S)
        wrong = t.idx.clone()
        if world.rank == BAD:
            wrong[5, 1] = 1000
        idx, got = t.idx, []
        for t.idx in (wrong, torch.zeros_like(idx)):
            got.append(outcome(lambda: step(op, case, t), op))
            world.exchange(b"back")
        t.idx = idx
        after = step(op, case, t)
        op.synchronize()
        op.finalize()
        same(after, before, f"rank {world.rank}")
        return got

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([r[0] for r in results], "EpIndexError", f"rank {BAD}", "token 5, choice 1")
    check_outcomes([r[1] for r in results], "EpOverflow", "rank 0", str(36 * len(results)))


@pytest.mark.parametrize("order", ["fuse", "", None])
def test_fused_unknown_combine_order(ranks, order):
    """On all ranks alike."""

    def run(world, device):
        return outcome(lambda: make_op(world, device, MISTAKEN, combine_order=order))

    check_outcomes(ranks(run, world_size=2), "ValueError", repr(order), "fuse_scatter or serial")


WRONG_OPTIONS = {
    "combine_order": ({"combine_order": "fuse"}, "fuse_scatter or serial"),
    "combine_mode": ({"combine_mode": "pull"}, "scatter or gather"),
    "num_sm": ({"num_sm": 0}, "num_sm 0"),
    "num_tail_sms-text": ({"num_tail_sms": "some"}, "some"),
    "num_tail_sms-negative": ({"num_tail_sms": -1}, "num_tail_sms -1"),
    "num_tail_sms-all": ({"num_sm": 4, "num_tail_sms": 4}, "num_tail_sms 4"),
    "num_tail_sms-more": ({"num_sm": 4, "num_tail_sms": 9}, "num_tail_sms 9"),
    "num_tail_sms-more-than-there-are": ({"num_tail_sms": 5000}, "num_tail_sms 5000"),
    "num_reduce_sms-text": ({"num_reduce_sms": "all"}, "all"),
    "num_reduce_sms-none": ({"num_reduce_sms": 0}, "num_reduce_sms 0"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_fused_wrong_option_on_one_rank(ranks, name):
    """What this rank cannot be made with, the others hear of while they make theirs; so also where no block would be left that
    sends, or that adds up.  Then all make one that works."""
    options, text = WRONG_OPTIONS[name]

    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: make_op(world, device, MISTAKEN, **(options if world.rank == BAD else {})))
        alive = outcome(lambda: world.exchange(b"back"))
        if alive.kinds:
            return got, alive, None
        op = make_op(world, device, MISTAKEN)
        seen = step(op, MISTAKEN, tensors(MISTAKEN, world.rank, world.size, device))
        op.synchronize()
        op.finalize()
        return got, alive, seen

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([got for got, _, _ in results], ["ValueError" if rank == BAD else "PeerError" for rank in range(len(results))], text, who=BAD)
    check_outcomes([alive for _, alive, _ in results], "nothing")
    check_numbers([seen for _, _, seen in results], MISTAKEN)


# ---- again and again ----


@pytest.mark.parametrize("capacity", [None, "roomy"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_many_launches(ranks, mode, capacity):
    """Ranks that come early and late, on the host and on the device, and routings in turn: the same bits each time."""
    on_gpu = ranks.device.type == "cuda"
    patterns = ("uniform", "one_expert", "sentinels", "own_rank")
    some = [grown(ranks, Experts(mode=mode, capacity=capacity, num_local=4, topk=4, hidden=128, pattern=p, seed=s)) for s, p in enumerate(patterns)]

    def run(world, device):
        late = random.Random(world.rank)
        plain, op = (make_op(world, device, some[0], Played, fused=fused) for fused in (False, True))
        soil(plain), soil(op)
        t = [tensors(case, world.rank, world.size, device) for case in some]
        want = [step(plain, case, s) for case, s in zip(some, t)]
        differ = torch.zeros((), dtype=torch.int64, device=device)
        for i in range(200 if on_gpu else 8):
            at = i % len(some)
            if late.random() < 0.3:
                time.sleep(late.random() * 0.003)
            if on_gpu and late.random() < 0.3:
                torch.cuda._sleep(late.randrange(1, 1_000_000))  # clock cycles
            s, case = t[at], some[at]
            h, row_weight, layout = op.mega_dispatch_group_gemm(s.x, s.idx, gemm_weight=s.w1, weight=s.weight, bias=s.b1, activation=case.activation)
            if on_gpu and late.random() < 0.3:
                torch.cuda._sleep(late.randrange(1, 300_000))
            y = op.mega_group_gemm_combine(h, s.w2, layout, row_weight, bias=s.b2)
            m = len(want[at]["h"])  # not read from the device: launches are to pile up
            for got, name in ((h[:m], "h"), (row_weight[:m], "row_weight"), (y, "y")):
                bits = torch.int32 if name == "row_weight" else torch.int16
                differ += (got.view(bits) != want[at][name].view(bits)).any()
        op.synchronize()
        count = differ.item()
        for o in (plain, op):
            o.finalize()
        return count

    assert ranks(run) == [0] * ranks.size()


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode, activation, knobs", [("local", "swiglu", {}), ("scatter", None, {"num_sm": 24, "num_tail_sms": 8}),
                                                    ("gather", "gpt_oss", {"combine_order": "serial", "block_wise_barrier": False})])
def test_fused_in_a_cuda_graph(ranks, mode, activation, knobs):
    """Captured once; replayed with other tokens and routings, also between calls that are not captured."""
    base = grown(ranks, Experts(mode=mode, activation=activation, num_local=4, topk=4, hidden=192, inner=144, tokens="full", capacity="roomy"))

    def run(world, device):
        plain, op = (make_op(world, device, base, Played, **options) for options in ({"fused": False}, knobs))
        soil(plain), soil(op)
        t = tensors(base, world.rank, world.size, device)

        def both_ways():
            h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight, bias=t.b1, activation=activation)
            return h, row_weight, op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2), layout

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both_ways()
        torch.cuda.current_stream().wait_stream(side)
        op.synchronize()
        world.exchange(b"x")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both_ways()
        wrong = []
        for i in range(20):
            pattern = ("uniform", "one_expert", "sentinels", "all_dropped", "one_rank")[i % 5]
            new = inputs_of(dataclasses.replace(base, seed=i, pattern=pattern), world.rank, world.size)
            for name in ("x", "idx", "weight"):
                getattr(t, name).copy_(new[name])
            want = step(plain, base, t)
            for out in captured[:3]:
                out.fill_(torch.nan)
            graph.replay()
            results = [captured] + ([both_ways()] if i % 3 == 2 else [])
            for result in results:
                op.synchronize()
                try:
                    same(cut(*result), want, f"replay {i}")
                except AssertionError as error:
                    wrong.append(str(error))
        for o in (plain, op):
            o.finalize()
        return wrong

    assert ranks(run) == [[]] * ranks.size()


@pytest.mark.cuda_only
def test_fused_with_a_capacity_never_waits_on_the_host(ranks):
    """torch's own guard raises at every synchronisation."""
    case = grown(ranks, Experts(capacity="roomy"))

    def run(world, device):
        op = make_op(world, device, case, Played)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)["y"]
        op.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight, bias=t.b1, activation=case.activation)
                y = op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        op.synchronize()
        op.finalize()
        return torch.equal(y, want)

    assert all(ranks(run))


# ---- the compiler ----


def compiled(world, device):
    """Forward and backward in one graph, without and with gradients, as they are outside of it; a second call reuses the graph."""
    torch._dynamo.reset()
    case = Experts(tokens="full", capacity="roomy", activation="gelu")
    op = make_op(world, device, case, Played)
    t = tensors(case, world.rank, world.size, device)

    def both_ways(x, weight, w1, b1, w2, b2):
        h, row_weight, layout = op.mega_dispatch_group_gemm(x, t.idx, gemm_weight=w1, weight=weight, bias=b1, activation=case.activation)
        return op.mega_group_gemm_combine(h, w2, layout, row_weight, bias=b2)

    fast, equal = torch.compile(both_ways, backend="aot_eager", fullgraph=True), []
    for with_grad in (False, True):
        seen = []
        for fn in (both_ways, fast, fast):
            leaves = [getattr(t, n).detach().clone().requires_grad_(with_grad) for n in LEAVES]
            y = fn(*leaves)
            if with_grad:
                y.backward(t.dy)
            seen.append([y.detach()] + [p.grad for p, n in zip(leaves, LEAVES) if with_grad and n[0] != "b"])
        equal += [torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later)]
    launches = op.num_launches
    op.synchronize()
    op.finalize()
    return equal, launches > 0 or not is_played(device)


def test_fused_is_traced_by_the_compiler(ranks):
    for equal, launched in ranks.isolated(compiled, world_size=1, timeout_s=180):
        assert launched and len(equal) == 2 + 2 * 5 and all(equal)
