"""dispatch + GEMM and GEMM + combine give the same bits as the stages, one after the other. They agree with
sums in float64 within rounding.
"""

import dataclasses

import pytest
import torch

from cases import MODES, case_id, indices_of, make_op, misaligned, pairwise, scatter_within
from epmoe import reference
from epmoe.testing import PATTERNS
from fused_cases import (ACTIVATIONS, LOW, Experts, StagedOp, check, check_numbers, check_sums64, grown,
                         has_fused_path, poison_staging, same, step, tensors)

# Widths of one, two and more tiles, with and without a partial tile. Some contractions are shorter than a
# pipeline stage.
SHAPES = (64, 48), (64, 16), (192, 144), (320, 400), (512, 48), (128, 272)
LADDER = pairwise(
    size=(4, 1, 2, 3), mode=MODES, dtype=LOW, activation=ACTIVATIONS, bias=(False, True),
    pattern=[p for p in PATTERNS if p != "all_dropped"], topk=(3, 1, 8, 17, 32), shape=SHAPES,
    num_local=(2, 1, 3, 5), tokens=("full", "unequal"), capacity=(None, "exact", "roomy"),
    weights=(True, False), index_dtype=(torch.int64, torch.int32))
# Ranks that send nothing, receive nothing, or both. Such a case tests no other pair of values.
EMPTY = pairwise(
    size=(4, 2), mode=MODES, tokens=("none", "first_none", "only_last", "full"), bias=(False, True),
    pattern=("uniform", "all_dropped", "one_rank", "own_rank"), capacity=(None, "exact", "roomy"),
    weights=(True, False))


def name_of(values):
    return "-".join(str(v).replace(" ", "") for v in values.values())


@pytest.mark.parametrize("values", LADDER + EMPTY, ids=name_of)
def test_fused_equals_stages(ranks, values):
    fields = dict(values)
    hidden, inner = fields.pop("shape", SHAPES[0])
    size = fields.pop("size")
    base = grown(ranks, Experts(hidden=hidden, inner=inner, **fields))
    check(ranks, [base, dataclasses.replace(base, bias=not base.bias, weights=not base.weights)],
          world_size=size)


@pytest.mark.parametrize("mode", MODES)
def test_fused_many_ranks_and_experts(ranks, mode):
    check(ranks, grown(ranks, Experts(mode=mode, num_local=64, hidden=32, inner=16)), world_size=8)


def test_fused_sizes_in_sequence(ranks):
    """One op gets many tokens, then few, then none: no data of the larger call is in the smaller result."""
    base = grown(ranks, Experts(num_local=3, activation="gelu"))
    sizes = [("full", "uniform"), ("only_last", "heavy_drop"), ("none", "uniform"), ("full", "one_expert"),
             ("full", "all_dropped"), ("unequal", "edges")]
    check(ranks, [dataclasses.replace(base, seed=seed, tokens=tokens, pattern=pattern)
                  for seed, (tokens, pattern) in enumerate(sizes)])


KNOBS = [
    {"num_sm": 1},
    {"num_sm": 7},
    {"num_sm": 2, "num_tail_sms": 1},
    {"num_sm": 24, "num_tail_sms": 8},
    {"num_sm": 24, "num_tail_sms": 23},
    {"num_tail_sms": 40},
    {"num_reduce_sms": 1},
    {"num_sm": 3, "num_reduce_sms": 40},
    {"num_sm": 40, "num_reduce_sms": 3},
    {"token_sorting": False},
    {"block_wise_barrier": False},
    {"combine_order": "serial"},
    {"num_sm": 1, "num_reduce_sms": 1, "token_sorting": False, "block_wise_barrier": False,
     "combine_order": "serial"},
    {"num_sm": 5, "num_tail_sms": 2, "num_reduce_sms": 9, "block_wise_barrier": False},
    {"num_sm": 16, "num_tail_sms": 15, "token_sorting": False, "combine_order": "serial"},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda k: "-".join(f"{n}={v}" for n, v in k.items()))
@pytest.mark.parametrize("mode", MODES)
def test_fused_knobs_change_no_bit(ranks, mode, knobs):
    base = Experts(mode=mode, num_local=3, capacity="roomy" if "num_tail_sms" in knobs else None, num_sm=None)
    check(ranks, [grown(ranks, dataclasses.replace(base, pattern=p)) for p in ("uniform", "one_expert")],
          knobs)


@pytest.mark.parametrize("mode", MODES)
def test_fused_scatter_indices_of_caller(ranks, mode):
    """With full_scatter_indices an expert's rows have another order. Each tile still waits for its own rows.
    """
    case = grown(ranks, Experts(mode=mode, num_local=3, pattern="sentinels"))

    def run(world, device):
        num_experts, seen = case.num_local * world.size, []
        indices = [indices_of(case, r, world.size) for r in range(world.size)]
        plan = reference.plan(indices, num_experts)
        scatter = scatter_within(plan, indices[world.rank], num_experts, world.rank).to(device)
        t = tensors(case, world.rank, world.size, device)
        for fused in (False, True):
            op = make_op(world, device, case, StagedOp, fused=fused)
            poison_staging(op)
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
    assert any(not torch.equal(fused["h"], again["h"]) for fused, again in results), "no row was moved"


@pytest.mark.parametrize("knobs", [{}, {"num_sm": 5, "num_tail_sms": 2},
                                   {"combine_order": "serial", "token_sorting": False}],
                         ids=["all", "tail", "serial"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_without_token_saving(ranks, mode, knobs):
    """A token is sent once for each of its choices, by the kernels and by the stages."""
    base = grown(ranks, Experts(mode=mode, num_local=3, capacity="roomy" if knobs else None, topk=4), 12)
    variants = [("uniform", True), ("duplicates", True), ("sentinels", False)]
    check(ranks, [dataclasses.replace(base, pattern=p, weights=w) for p, w in variants], knobs,
          {"token_saving": False})


def test_fused_parameters_at_any_address(ranks):
    """The parameters are views into a flat buffer, so a view can begin at any address."""
    case = grown(ranks, Experts())

    def run(world, device):
        op, t = make_op(world, device, case, StagedOp), tensors(case, world.rank, world.size, device)
        want = step(op, case, t)
        for name in ("w1", "b1", "w2", "b2"):
            setattr(t, name, misaligned(getattr(t, name)))
        same(step(op, case, t), want, f"rank {world.rank}")
        op.finalize()

    ranks(run)


# ---- shapes and dtypes for which there is no fused kernel ----

UNSUPPORTED = {
    "float32": Experts(dtype=torch.float32),
    "inner": Experts(inner=24),
    "hidden": Experts(hidden=40),
    "both": Experts(hidden=24, inner=9, activation=None),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fused_falls_back_to_stages(ranks, name, mode):
    """Weights that the fused kernels do not support go through the stages, with correct results."""
    case = dataclasses.replace(UNSUPPORTED[name], mode=mode)

    def run(world, device):
        op = make_op(world, device, case, StagedOp)
        poison_staging(op)
        t = tensors(case, world.rank, world.size, device)
        seen = step(op, case, t)
        op.synchronize()
        op.finalize()
        return seen, op.num_launches

    results = ranks(run)
    check_numbers([seen for seen, _ in results], case)
    if name != "inner":  # 24 gates and 24 ups are 48 rows of weights, which the first fused kernel supports
        assert all(launches == 0 for _, launches in results)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=case_id)
def test_fused_op_of_the_package(ranks, dtype):
    """EpAll2AllFusedOp itself: it runs the kernels where they exist, and the stages elsewhere."""
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
    has_kernels = has_fused_path(ranks.device) and dtype in LOW
    assert all(kernels == [has_kernels, has_kernels, False, False] for _, kernels in results)
