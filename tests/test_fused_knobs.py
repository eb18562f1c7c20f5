"""The arguments that the fused operator's options pass to the kernels.

The options do not change any bit of a result. So only this file notices an option without effect.
"""

import dataclasses

import pytest
import torch

import epmoe
from benchmarks.shapes import SHAPES
from cases import make_op
from epmoe.a2a.fused import fuses
from fused_cases import Experts

CASE = Experts(max_tokens=12)
# Fields of the configuration that the module takes.
KNOBS = {"fused": 2, "num_move": 1024, "num_tail_sms": 0, "num_reduce_sms": 1024, "waits_for_expert": False,
         "is_serial": False, "token_sorting": True, "num_copies": 1}


@pytest.mark.cpu_only
@pytest.mark.parametrize("options, changed", [
    ({}, {}),
    ({"num_sm": 7}, {"num_move": 7}),
    ({"num_sm": 7, "num_tail_sms": 3}, {"num_move": 7, "num_tail_sms": 3}),
    ({"num_reduce_sms": 5}, {"num_reduce_sms": 5}),
    ({"reserve_sms": 24}, {"num_move": 1000, "num_reduce_sms": 1000}),
    ({"block_wise_barrier": False}, {"waits_for_expert": True}),
    ({"combine_order": "serial"}, {"is_serial": True}),
    ({"token_sorting": False}, {"token_sorting": False}),
    ({"token_saving": False}, {"num_copies": CASE.topk}),
    ({"fused": True}, {"fused": 1}),
    ({"fused": False}, {"fused": 0}),
], ids=lambda o: "-".join(o) or "none" if isinstance(o, dict) else None)
def test_fused_knobs_reach_the_module(ranks, options, changed):
    def run(world, device):
        op = make_op(world, torch.device("cpu"), CASE, **{"fused": None} | options)
        found = {name: getattr(op._config, name) for name in KNOBS}
        op.finalize()
        return found

    assert ranks(run, world_size=1)[0] == KNOBS | changed


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
        with pytest.raises(AttributeError):
            ops[0].fused = True  # the layers of the other ranks would not know of it
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
        shapes = ((96, 64), (16, 16), (24, 64), (96, 72), (1, 64), (97, 65))
        found = [op._is_fused(torch.empty(2, *shape, dtype=dtype)) for shape in shapes]
        transposed = op._is_fused(torch.empty(2, 64, 96, dtype=dtype).transpose(1, 2))
    exist = fused and dtype != torch.float32
    assert found == [exist, exist, False, False, False, False] and not transposed


@pytest.mark.parametrize("size", [2, 3])
def test_fused_default_in_fp8(ranks, size):
    """For many tokens, a layer fuses weights in FP8 of more than two ranks and many columns only, unless the
    caller wants it.
    """
    def run(world, device):
        found = []
        for tokens, fused in ((2000, None), (2000, True), (2000, False), (1000, None)):
            op = epmoe.EpAll2AllFusedOp(world, tokens, 128, 2, num_tot_experts=2 * world.size, device=device,
                                        dtype=torch.bfloat16, fused=fused)
            op._has_fused_fp8 = True  # as on a GPU that has them
            found.append([op._is_fused_fp8(torch.empty(2, columns, 128, device="meta"), "swiglu", is_first)
                          for columns, is_first in ((3072, True), (4096, True), (128, False))])
            op.finalize()
        return world.size, found

    for num_ranks, found in ranks(run, world_size=size):
        by_default = [False, num_ranks > 2, num_ranks > 2]
        assert found == [by_default, [True] * 3, [False] * 3, [True] * 3]
