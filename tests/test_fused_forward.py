"""dispatch + product and product + combine: bit by bit what the stages give one after the other, and within
rounding of sums in float64.
"""

import dataclasses

import pytest
import torch

from cases import MODES, case_id, indices_of, misaligned
from epmoe import reference
from fused_cases import (
    ACTIVATIONS, Experts, LOW, Played, check, check_numbers, check_sums64, grown, is_played, same,
    soil, step, tensors,
)
from test_plan_slots import make_op, scatter_within


@pytest.mark.parametrize("dtype", LOW, ids=case_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_fused_equals_the_stages(ranks, mode, activation, dtype):
    for capacity in (None, "exact"):
        base = grown(ranks, Experts(mode=mode, activation=activation, dtype=dtype, capacity=capacity,
                                    pattern="sentinels", seed=1))
        check(ranks, [dataclasses.replace(base, bias=bias, weights=weights) for bias in (False, True)
                      for weights in (False, True)])


@pytest.mark.parametrize("pattern", ["uniform", "distinct", "one_expert", "one_rank", "own_rank",
                                     "heavy_drop", "all_dropped", "duplicates", "edges"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_pattern(ranks, mode, pattern):
    check(ranks, grown(ranks, Experts(mode=mode, pattern=pattern, activation="gpt_oss", num_local=3)))


@pytest.mark.parametrize("capacity", [None, "exact", "roomy"])
@pytest.mark.parametrize("tokens", ["full", "none", "first_none", "only_last"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_tokens_of_ranks(ranks, mode, tokens, capacity):
    """Ranks that send nothing, receive nothing, or both."""
    check(ranks, [grown(ranks, Experts(mode=mode, tokens=tokens, capacity=capacity, bias=bias,
                                       activation="gelu", pattern=pattern))
                  for bias, pattern in ((True, "uniform"), (False, "uniform"))])


@pytest.mark.parametrize("hidden, inner", [(64, 16), (192, 144), (320, 400), (512, 48), (128, 272)])
@pytest.mark.parametrize("mode", MODES)
def test_fused_shape(ranks, mode, hidden, inner):
    """Widths in one, two and more tiles of each width, with and without a rest; contractions shorter than a
    stage.
    """
    for activation in (None, "swiglu"):
        check(ranks, grown(ranks, Experts(mode=mode, hidden=hidden, inner=inner, activation=activation,
                                          max_tokens=9)))


@pytest.mark.parametrize("num_local", [1, 5, 64])
@pytest.mark.parametrize("mode", MODES)
def test_fused_experts(ranks, mode, num_local):
    check(ranks, grown(ranks, Experts(mode=mode, num_local=num_local, hidden=32, inner=16)))


@pytest.mark.parametrize("topk", [1, 8, 17, 32])
@pytest.mark.parametrize("mode", MODES)
def test_fused_topk(ranks, mode, topk):
    check(ranks, grown(ranks, Experts(mode=mode, topk=topk, num_local=5, max_tokens=5, pattern="sentinels",
                                      activation="gelu")))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_fused_world_size(ranks, world_size):
    check(ranks, [grown(ranks, Experts(mode="local", pattern=p)) for p in ("uniform", "duplicates")],
          world_size=world_size)


def test_fused_sizes_one_after_the_other(ranks):
    """Many tokens, then few, then none, on one op: nothing of the larger is left in the smaller."""
    base = grown(ranks, Experts(num_local=3, activation="gelu"))
    check(ranks, [dataclasses.replace(base, seed=s, tokens=tokens, pattern=p) for s, (tokens, p) in enumerate(
        (("full", "uniform"), ("only_last", "heavy_drop"), ("none", "uniform"), ("full", "one_expert"),
         ("full", "all_dropped"), ("unequal", "edges")))])


KNOBS = [{"num_sm": 1}, {"num_sm": 7}, {"num_sm": 2, "num_tail_sms": 1}, {"num_sm": 24, "num_tail_sms": 8},
         {"num_sm": 24, "num_tail_sms": 23},
         {"num_tail_sms": 40}, {"num_reduce_sms": 1}, {"num_sm": 3, "num_reduce_sms": 40},
         {"num_sm": 40, "num_reduce_sms": 3}, {"token_sorting": False},
         {"block_wise_barrier": False}, {"combine_order": "serial"},
         {"num_sm": 1, "num_reduce_sms": 1, "token_sorting": False, "block_wise_barrier": False,
          "combine_order": "serial"},
         {"num_sm": 5, "num_tail_sms": 2, "num_reduce_sms": 9, "block_wise_barrier": False},
         {"num_sm": 16, "num_tail_sms": 15, "token_sorting": False, "combine_order": "serial"}]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda k: "-".join(f"{n}={v}" for n, v in k.items()))
@pytest.mark.parametrize("mode", MODES)
def test_fused_knobs_change_no_bit(ranks, mode, knobs):
    base = Experts(mode=mode, num_local=3, capacity="roomy" if "num_tail_sms" in knobs else None, num_sm=None)
    check(ranks, [grown(ranks, dataclasses.replace(base, pattern=p)) for p in ("uniform", "one_expert")],
          knobs)


@pytest.mark.parametrize("mode", MODES)
def test_fused_rows_of_the_caller(ranks, mode):
    """full_scatter_indices: the rows of an expert in another order; its tiles still wait for what they hold.
    """
    case = grown(ranks, Experts(mode=mode, num_local=3, pattern="sentinels"))

    def run(world, device):
        num_experts, seen = case.num_local * world.size, []
        of_all = [indices_of(case, r, world.size) for r in range(world.size)]
        scatter = scatter_within(reference.plan(of_all, num_experts), of_all[world.rank], num_experts,
                                 world.rank).to(device)
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


@pytest.mark.parametrize("knobs",
                         [{}, {"num_sm": 5, "num_tail_sms": 2},
                          {"combine_order": "serial", "token_sorting": False}], ids=["all", "tail", "serial"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_without_token_saving(ranks, mode, knobs):
    """A token travels once for each of its choices; the stages do it in the same way."""
    base = grown(ranks, Experts(mode=mode, num_local=3, capacity="roomy" if knobs else None, topk=4), 12)
    check(ranks, [dataclasses.replace(base, pattern=p, weights=w) for p,
                  w in (("uniform", True), ("duplicates", True), ("sentinels", False))], knobs,
          {"token_saving": False})


def test_fused_parameters_that_are_parts_of_something_larger(ranks):
    """Views into a flat buffer of all parameters: one may begin anywhere."""
    case = grown(ranks, Experts())

    def run(world, device):
        op, t = make_op(world, device, case, Played), tensors(case, world.rank, world.size, device)
        want = step(op, case, t)
        for name in ("w1", "b1", "w2", "b2"):
            setattr(t, name, misaligned(getattr(t, name)))
        same(step(op, case, t), want, f"rank {world.rank}")
        op.finalize()

    ranks(run)


def test_fused_indices_of_32_bits(ranks):
    check(ranks, grown(ranks, Experts(index_dtype=torch.int32, pattern="sentinels")))


# ---- what falls back ----

FALLS_BACK = {"float32": Experts(dtype=torch.float32), "inner": Experts(inner=24),
              "hidden": Experts(hidden=40), "both": Experts(hidden=24, inner=9, activation=None)}


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
