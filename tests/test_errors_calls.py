"""Wrong calls of the stages and of modules: rank BAD makes a mistake, all ranks get an exception.

These are tensors without usable memory, wrong shapes, types and buffers, and missing memory.
test_errors_layer.py tests each argument, test_errors_config.py the configuration of a layer,
test_errors_objects.py heaps, worlds and constructors, test_errors_local.py calls of a single rank.
"""

import dataclasses
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import epmoe
from call_cases import (
    BAD, CASE, Mistake, cached_dispatch, check_mistake, combine, dispatch, fake, negative, plan,
)
from cases import (
    MISTAKE_LIMIT_S, check_case, check_outcomes, indices_of, inputs_of, make_layer, outcome, run_routing,
)
from fused_cases import without_conversion


def call_moe(s, change=None, **changes):
    """Call a module on the existing layer. change() gets its parameter gate_up_proj."""
    module = epmoe.EPMoE(16, 8, s.layer.num_experts, 3, dtype=torch.float32, layer=s.layer)
    if change:
        module.gate_up_proj = torch.nn.Parameter(change(module.gate_up_proj))
    return module(**({"x": s.x, "topk_idx": s.idx, "topk_weights": s.weight} | changes))


def watched(s, call, **changes):
    """Make a call while a mode of torch sees its operators, and without gradients."""
    with FlopCounterMode(display=False), torch.no_grad():
        return call(s, **changes)


def plan_with(s, exp_indices=None, scatter=None):
    return plan(s, s.idx if exp_indices is None else exp_indices, scatter)


def with_huge_output(s, call, name, value):
    """Make a call whose output needs more memory than any machine has.

    name: the object and attribute that give the size of the output; value: their huge replacement.
    """
    with mock.patch.object(*name, value):
        return call(s)


MISTAKES = {
    # Tensors whose memory does not hold their values, or that have no memory.
    "input-negative-view": Mistake(
        lambda s: dispatch(s, input=negative(s.x)), dispatch, "ValueError", ("resolve_neg",)),
    "input-fake": Mistake(
        lambda s: dispatch(s, input=fake(s.x)), dispatch, "TypeError", ("input", "FakeTensor")),
    "input-nested": Mistake(
        lambda s: dispatch(s, input=torch.nested.nested_tensor([s.x])), dispatch, "ValueError",
        ("input", "nested")),
    "weight-negative-view": Mistake(
        lambda s: dispatch(s, weight=negative(s.weight)), dispatch, "ValueError", ("resolve_neg",)),
    "indices-negative-view": Mistake(
        lambda s: dispatch(s, exp_indices=negative(s.idx)), dispatch, "ValueError", ("resolve_neg",)),
    "indices-fake": Mistake(
        lambda s: plan(s, fake(s.idx)), plan, "TypeError", ("exp_indices", "FakeTensor")),
    "scatter-negative-view": Mistake(
        lambda s: plan(s, s.idx, negative(s.layout.token_dst_scatter_idx)), plan, "ValueError",
        ("resolve_neg",)),
    # What torch refuses before an operator of epmoe runs.
    "watched-indices-list": Mistake(
        lambda s: watched(s, dispatch, exp_indices=s.idx.tolist()), lambda s: watched(s, dispatch),
        "TypeError", ("exp_indices", "list")),
    "watched-indices-meta": Mistake(
        lambda s: watched(s, dispatch, exp_indices=s.idx.to("meta")), lambda s: watched(s, dispatch),
        "ValueError", ("exp_indices", "meta")),
    "watched-scatter-list": Mistake(
        lambda s: watched(s, plan_with, scatter=[[0]]), lambda s: watched(s, plan_with), "TypeError",
        ("full_scatter_indices", "list")),
    "watched-scatter-meta": Mistake(
        lambda s: watched(s, plan_with, scatter=s.layout.token_dst_scatter_idx.to("meta")),
        lambda s: watched(s, plan_with), "ValueError", ("full_scatter_indices", "meta")),
    "cached-input-negative-view": Mistake(
        lambda s: cached_dispatch(s, input=negative(s.x)), cached_dispatch, "ValueError", ("resolve_neg",)),
    "rows-negative-view": Mistake(
        lambda s: combine(s, input=negative(s.y)), combine, "ValueError", ("resolve_neg",)),
    "row-weight-negative-view": Mistake(
        lambda s: combine(s, weight=negative(s.row_weight)), combine, "ValueError", ("resolve_neg",)),
    # Shapes and types of the arguments of the stages.
    "indices-flat": Mistake(
        lambda s: plan(s, s.idx.reshape(-1)), plan, "ValueError", ("exp_indices", "2 dimensions", "got 1")),
    "indices-3-dimensions": Mistake(
        lambda s: plan(s, s.idx[None]), plan, "ValueError", ("exp_indices", "2 dimensions", "got 3")),
    "indices-nested": Mistake(lambda s: plan(s, torch.nested.nested_tensor([s.idx])), plan, "Error"),
    "indices-scalar": Mistake(lambda s: plan(s, s.idx[0, 0]), plan, "Error"),
    "indices-bool": Mistake(
        lambda s: plan(s, s.idx > 0), plan, "TypeError", ("exp_indices", "int32", "int64")),
    "indices-too-many-choices": Mistake(
        lambda s: plan(s, torch.cat([s.idx, s.idx[:, :1]], 1)), plan, "ValueError",
        ("exp_indices", "3", "4")),
    "scatter-meta": Mistake(
        lambda s: plan(s, s.idx, s.layout.token_dst_scatter_idx.to("meta")), plan, "Error"),
    "scatter-strided": Mistake(
        lambda s: plan(s, s.idx, torch.stack([s.layout.token_dst_scatter_idx] * 2, -1)[..., 0]), plan,
        "ValueError", ("full_scatter_indices", "contiguous")),
    "weight-whole-numbers": Mistake(
        lambda s: dispatch(s, weight=s.idx), dispatch, "TypeError", ("weight", "int64")),
    "layout-is-text": Mistake(
        lambda s: cached_dispatch(s, layout="the last"), cached_dispatch, "TypeError",
        ("layout", "EPLayout", "str")),
    "layout-and-other-tokens": Mistake(
        lambda s: cached_dispatch(s, input=s.x[:3], weight=s.weight[:3]), cached_dispatch, "ValueError",
        ("input", "10", "3")),
    "rows-too-many": Mistake(
        lambda s: combine(s, input=torch.cat([s.y, s.y]), weight=torch.cat([s.row_weight] * 2)), combine,
        "ValueError", ("input rows",)),
    "row-weight-whole-numbers": Mistake(
        lambda s: combine(s, weight=s.row_weight.long()), combine, "TypeError", ("weight", "int64")),
    "row-weight-on-one-rank-only": Mistake(
        lambda s: combine(s, weight=None), combine, "EpMismatch", ("has_weight",), others="EpMismatch"),
    "buffer-of-another-type": Mistake(
        lambda s: dispatch(s, buffer="first"), dispatch, "TypeError", ("buffer 'first'", "1")),
    "buffer-that-is-not-there": Mistake(
        lambda s: dispatch(s, buffer=1), dispatch, "ValueError", ("buffer 1", "1")),
    "buffer-of-a-plan": Mistake(
        lambda s: s.layer.preprocess(s.idx, buffer=-1), plan, "ValueError", ("buffer -1",)),
    "buffer-of-a-barrier": Mistake(
        lambda s: s.layer.ep_barrier_all(buffer=2**40), lambda s: s.layer.ep_barrier_all(), "ValueError",
        ("buffer",)),
    "cached-in-another-buffer": Mistake(
        lambda s: cached_dispatch(s, buffer=99), cached_dispatch, "ValueError", ("buffer 99", "buffer 0")),
    # Arguments of a module.
    "moe-x-none": Mistake(lambda s: call_moe(s, x=None), call_moe, "TypeError", ("x:", "NoneType")),
    "moe-x-list": Mistake(lambda s: call_moe(s, x=s.x.tolist()), call_moe, "TypeError", ("x:", "list")),
    "moe-x-scalar": Mistake(
        lambda s: call_moe(s, x=s.x[0, 0]), call_moe, "ValueError", ("x:", "[.., 16]", "[]")),
    "moe-x-nested": Mistake(lambda s: call_moe(s, x=torch.nested.nested_tensor([s.x])), call_moe, "Error"),
    "moe-indices-none": Mistake(
        lambda s: call_moe(s, topk_idx=None), call_moe, "TypeError", ("topk_idx", "NoneType")),
    "moe-indices-list": Mistake(
        lambda s: call_moe(s, topk_idx=s.idx.tolist()), call_moe, "TypeError", ("topk_idx", "list")),
    "moe-indices-scalar": Mistake(
        lambda s: call_moe(s, topk_idx=s.idx[0, 0]), call_moe, "ValueError", ("topk_idx", "[.., 3]", "[]")),
    "moe-indices-without-choices": Mistake(
        lambda s: call_moe(s, topk_idx=s.idx[:, :0]), call_moe, "ValueError",
        ("topk_idx", "[.., 3]", "[10, 0]")),
    "moe-weights-none": Mistake(
        lambda s: call_moe(s, topk_weights=None), call_moe, "TypeError", ("topk_weights", "NoneType")),
    "moe-weights-list": Mistake(
        lambda s: call_moe(s, topk_weights=s.weight.tolist()), call_moe, "TypeError",
        ("topk_weights", "list")),
    "moe-weights-scalar": Mistake(
        lambda s: call_moe(s, topk_weights=s.weight[0, 0]), call_moe, "ValueError",
        ("topk_weights", "[.., 3]", "[]")),
    "moe-weights-complex": Mistake(
        lambda s: call_moe(s, topk_weights=s.weight.to(torch.complex64)), call_moe, "TypeError",
        ("weight", "complex64")),
    "moe-parameter": Mistake(lambda s: call_moe(s, lambda w: w[:, :, :8].contiguous()), call_moe, "Error"),
    # A missing argument.
    "indices-missing": Mistake(
        lambda s: s.layer.dispatch(s.x), dispatch, "TypeError", ("exp_indices", "layout")),
    # Not enough memory for an output or for a conversion.
    "plan-without-memory": Mistake(
        lambda s: with_huge_output(s, plan, (s.layer, "_plan_words"), lambda num_tokens: 1 << 55), plan,
        "RuntimeError"),
    "dispatch-without-memory": Mistake(
        lambda s: with_huge_output(s, cached_dispatch, (s.layer, "_recv_words"), 1 << 55), cached_dispatch,
        "RuntimeError"),
    "combine-without-memory": Mistake(
        lambda s: with_huge_output(s, combine, (s.layout, "num_tokens"), 1 << 55), combine, "RuntimeError"),
    "dispatch-cast-without-memory": Mistake(
        lambda s: dispatch(s, weight=without_conversion(s.weight)), dispatch, "MemoryError",
        ("no memory for the conversion",)),
    "cached-dispatch-cast-without-memory": Mistake(
        lambda s: cached_dispatch(s, weight=without_conversion(s.weight)), cached_dispatch, "MemoryError",
        ("no memory for the conversion",)),
    "combine-cast-without-memory": Mistake(
        lambda s: combine(s, weight=without_conversion(s.row_weight)), combine, "MemoryError",
        ("no memory for the conversion",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_wrong_stage_call(ranks, name):
    check_mistake(ranks, MISTAKES[name])


# ---- a layout whose parts were overwritten ----


@pytest.mark.cpu_only  # on a GPU, kernels read the plan and the host does not validate it
@pytest.mark.parametrize("mode", ["scatter", "gather", "local"])
@pytest.mark.parametrize("part, value", [
    ("send_tokens", 2**30), ("send_tokens", -1), ("recv_tokens", 2**30), ("recv_tokens", 3),
    ("token_dst_scatter_idx", 2**30), ("token_dst_scatter_idx", -1), ("token_slots", 2**30),
    ("token_slots", -1),
], ids=lambda v: str(v))
def test_errors_overwritten_layout(ranks, part, value, mode):
    """The parts of a layout are views of its plan. Wrong values cause an error, not a store out of bounds."""
    case = dataclasses.replace(CASE, mode=mode)

    def run(world, device):
        layer = make_layer(world, device, case)
        x, _ = inputs_of(case, world.rank, world.size)
        rows, _, layout = layer.dispatch(x, indices_of(case, world.rank, world.size))
        world.set_timeout(MISTAKE_LIMIT_S)
        if world.rank == BAD:
            getattr(layout, part).fill_(value)
        got = [outcome(lambda: layer.combine(rows, layout)),
               outcome(lambda: layer.dispatch(x, layout=layout))]
        return got, run_routing(layer, case)

    results = ranks(run, world_size=3)
    for i in (0, 1):
        check_outcomes([r[0][i] for r in results],
                       [("ValueError" if rank == BAD else "PeerError") for rank in range(3)], "overwritten",
                       on_rank=BAD, elsewhere=[f"rank {BAD}"])
    check_case([r[1] for r in results], case)
