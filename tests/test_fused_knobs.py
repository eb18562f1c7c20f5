"""The arguments that the fused operator's options pass to the kernels.

The options do not change any bit of a result. So only this file notices an option without effect.
"""

import dataclasses
from unittest import mock

import pytest
import torch

import epmoe
from cases import make_op
from epmoe import _C
from epmoe.a2a.fused import fuses
from epmoe.bench.shapes import SHAPES
from epmoe.gemm.grouped import as_kernel
from epmoe.moe import experts as experts_ops
from fused_cases import Experts

CASE = Experts(max_tokens=12)
# The last arguments of the operations, after the tensors, in order.
DISPATCH = {"activation": 3, "alpha": 1.5, "limit": 2.5, "num_move": 1024, "num_tail": 0,
            "waits_for_expert": False, "num_copies": 1, "requires_grad": True, "kind": 0,
            "awaits_rows": 0}
COMBINE = {"num_move": 1024, "num_reduce": 1024, "is_serial": False, "requires_grad": True,
           "kind": 0}


def last_arguments(function, names):
    """{name: value} of the last arguments of an operation, whose function is mocked."""
    _, _, arguments = function.call_args.args
    return dict(zip(names, arguments[-len(names):]))


def passed_arguments(world, options):
    """({name: value} for dispatch + GEMM, for GEMM + combine) that the module receives. It needs no GPU."""
    op = make_op(world, torch.device("cpu"), CASE, **options)
    copies, t = op._copies, torch.zeros(12, 64, dtype=torch.bfloat16)
    weight, plan = torch.zeros(2, 96, 64, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
    with (mock.patch.object(_C, "layer_dispatch_gemm") as dispatch,
          mock.patch.object(_C, "layer_gemm_combine") as combine):
        op._dispatch_gemm(t, None, plan, weight, None, 0, 24, *as_kernel(epmoe.GptOss(1.5, 2.5)), True)
        op._gemm_combine(t, weight, None, None, plan, plan, 0, 12 * copies, True)
        forward = last_arguments(dispatch, DISPATCH), last_arguments(combine, COMBINE)
    knobs = experts_ops._knobs(op, True)  # what EPMoE passes
    assert knobs == (True, *(forward[0][n] for n in ("num_move", "num_tail", "waits_for_expert")),
                     *(forward[1][n] for n in ("num_reduce", "is_serial")))
    op.finalize()
    return forward


@pytest.mark.cpu_only
@pytest.mark.parametrize("options, of_dispatch, of_combine", [
    ({}, {}, {}),
    ({"num_sm": 7}, {"num_move": 7}, {"num_move": 7}),
    ({"num_sm": 7, "num_tail_sms": 3}, {"num_move": 7, "num_tail": 3}, {"num_move": 7}),
    ({"num_reduce_sms": 5}, {}, {"num_reduce": 5}),
    ({"reserve_sms": 24}, {"num_move": 1000}, {"num_move": 1000, "num_reduce": 1000}),
    ({"block_wise_barrier": False}, {"waits_for_expert": True}, {}),
    ({"combine_order": "serial"}, {}, {"is_serial": True}),
    ({"token_saving": False}, {"num_copies": CASE.topk}, {}),
], ids=lambda o: "-".join(o) or "none" if isinstance(o, dict) else None)
def test_fused_knobs_reach_kernels(ranks, options, of_dispatch, of_combine):
    (dispatch, combine), *_ = ranks(lambda world, device: passed_arguments(world, options), world_size=1)
    assert dispatch == DISPATCH | of_dispatch
    assert combine == COMBINE | of_combine


def test_fused_default_depends_on_shape(ranks):
    """The default depends on the shape alone, so all ranks choose the same. The caller's value has priority.
    """
    assert all(fuses(s.tokens, s.topk, s.experts, 4) for s in SHAPES.values())
    dsv3 = SHAPES["dsv3"]
    chosen = [t for t in (64, 128, 192, 193, 1024) if fuses(t, dsv3.topk, dsv3.experts, 4)]
    assert chosen == [193, 1024]  # 192 tokens give an expert 24 rows on average

    def run(world, device):
        many = dataclasses.replace(CASE, max_tokens=500)
        ops = [make_op(world, device, case, fused=fused)
               for case, fused in ((CASE, None), (many, None), (many, False), (CASE, True))]
        chosen = [op.fused for op in ops]
        for op in ops:
            op.finalize()
        return chosen

    assert all(chosen == [False, True, False, True] for chosen in ranks(run, world_size=2))


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype, fused", [(torch.bfloat16, True), (torch.float16, True),
                                          (torch.float32, True), (torch.bfloat16, False)])
def test_fused_kernels_have_sizes_of_16(dtype, fused):
    """The module refuses other sizes, so the stages compute them. They also read transposed weights."""
    with epmoe.World() as world:
        op = make_op(world, torch.device("cpu"), dataclasses.replace(CASE, dtype=dtype), fused=fused)
        op._has_fused_fp8 = True  # as on a GPU that has them
        shapes = ((96, 64), (16, 16), (24, 64), (96, 72), (1, 64), (97, 65))
        found = [op._is_fused(torch.empty(2, *shape, dtype=dtype)) for shape in shapes]
        transposed = op._is_fused(torch.empty(2, 64, 96, dtype=dtype).transpose(1, 2))
    exist = fused and dtype != torch.float32
    assert found == [exist, exist, False, False, False, False] and not transposed


def test_fused_default_in_fp8_depends_on_columns(ranks):
    """A layer for many tokens fuses weights in FP8 of many columns only, unless the caller wants it."""
    def run(world, device):
        found = []
        for tokens, fused in ((2000, None), (2000, True), (2000, False), (1000, None)):
            op = epmoe.EpAll2AllFusedOp(world, tokens, 128, 2, num_tot_experts=4, dtype=torch.bfloat16,
                                        device=device, fused=fused)
            op._has_fused_fp8 = True  # as on a GPU that has them
            found.append([op._is_fused_fp8(torch.empty(2, columns, 128, device="meta"), "swiglu")
                          for columns in (3072, 4096)])
            op.finalize()
        return found

    wanted = [[False, True], [True, True], [False, False], [True, True]]
    assert all(found == wanted for found in ranks(run, world_size=2))
