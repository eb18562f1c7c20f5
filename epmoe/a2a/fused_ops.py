"""torch.ops.epmoe.dispatch_gemm and gemm_combine: the fused kernels as operators; see ops.py."""

import contextlib

import torch

from .. import _C
from ..comm.refusals import reporting
from ..gemm.grouped import DGRAD, GATED
from ..gemm.weight_gradients import gradient_of, sink_of
from ..torch_modes import check_mode, implement
from .ops import absent, layer_of, lib, register_fake, row_dots, rows_to_trace, saved_tensors

lib.define("dispatch_gemm(Tensor x, Tensor? weight, Tensor plan, Tensor gemm_weight, Tensor? bias, str "
           "layer, int buffer, SymInt num_rows, int activation, float alpha=0, float limit=0, bool "
           "requires_grad=False, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)")
lib.define("gemm_combine(Tensor a, Tensor gemm_weight, Tensor? bias, Tensor? row_weight, Tensor plan, "
           "Tensor recv, str layer, int buffer, SymInt num_tokens, bool requires_grad=False, "
           "Tensor? after=None) -> (Tensor, Tensor)")


def expert_offsets(layer, plan):
    """Return [L + 1] int32: where the rows of each local expert begin."""
    return plan.narrow(0, layer._plan_front["expert_row"], layer.num_local_experts + 1)


def _run_dispatch_gemm(x, weight, plan, gemm_weight, bias, layer, buffer, num_rows, activation, alpha=0.0,
                       limit=0.0, *flags):
    requires_grad = bool(flags) and flags[0]  # flags: requires_grad, after
    layer = layer_of(layer)
    with reporting(layer, _C.OP_DISPATCH_GEMM, buffer, plan, num_rows < 0):
        out, rows, row_weight, recv = layer._dispatch_gemm(
            x, weight, plan, gemm_weight, bias, buffer, num_rows, activation, alpha, limit, requires_grad)
    return out, rows, absent(x) if row_weight is None else row_weight, recv


def _run_gemm_combine(a, gemm_weight, bias, row_weight, plan, recv, layer, buffer, num_tokens,
                      requires_grad=False, after=None):
    layer = layer_of(layer)
    with reporting(layer, _C.OP_GEMM_COMBINE, buffer, plan):
        return layer._gemm_combine(a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens,
                                   requires_grad)


implement(lib, "dispatch_gemm", _run_dispatch_gemm)
implement(lib, "gemm_combine", _run_gemm_combine)


@register_fake("dispatch_gemm")
def _(x, weight, plan, gemm_weight, bias, layer, buffer, num_rows, activation, *_, **__):
    layer = layer_of(layer)
    num_rows = rows_to_trace(layer, num_rows)
    row_weight = absent(x) if weight is None else x.new_empty(num_rows, dtype=torch.float32)
    columns = gemm_weight.shape[1] // (2 if activation in GATED else 1)
    like = x.new_empty(0, dtype=layer.dtype)
    out = like.new_empty(num_rows, columns)
    return out, like.new_empty(num_rows, layer.hidden), row_weight, plan.new_empty(layer._recv_words)


@register_fake("gemm_combine")
def _(a, gemm_weight, bias, row_weight, plan, recv, layer, buffer, num_tokens, requires_grad=False,
      after=None):
    like = a.new_empty(0, dtype=layer_of(layer).dtype)
    return like.new_empty(num_tokens, gemm_weight.shape[1]), like.new_empty(a.shape[0], gemm_weight.shape[1])


def _save_dispatch_gemm(ctx, inputs, output):
    x, weight, plan, gemm_weight, _, ctx.layer, ctx.buffer, _, ctx.activation, *_ = inputs
    ctx.num_tokens = x.shape[0]
    ctx.has_weight = weight is not None
    ctx.sink = sink_of(gemm_weight)
    ctx.save_for_backward(plan, gemm_weight, output[1], output[3])


def _dispatch_gemm_backward(ctx, d_out, d_rows, d_row_weight, _):
    plan, gemm_weight, rows, recv = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_COMBINE, d_out)
    layer = layer_of(ctx.layer)
    gemm = torch.ops.epmoe.grouped_gemm
    with reporting(layer, _C.OP_COMBINE, ctx.buffer, plan):
        if ctx.activation:
            raise RuntimeError("dispatch_gemm with an activation has no backward: apply the activation after "
                               "it")
        check_mode(d_out, d_row_weight, gemm_weight, may_batch=True)
        offsets = expert_offsets(layer, plan)
        d_out = d_out.contiguous()
        d_gemm_weight = None
        if ctx.needs_input_grad[3]:
            d_gemm_weight = gradient_of(ctx.sink, d_out, rows, offsets)
        d_rows = gemm(d_out, gemm_weight, offsets, None, None, DGRAD, 0, False)
        scalar = d_row_weight.contiguous() if ctx.has_weight else None
        num_tokens = ctx.num_tokens * layer._copies
        dx, d_weight = torch.ops.epmoe.combine(d_rows, None, scalar, plan, recv, ctx.layer, ctx.buffer,
                                               num_tokens)
    return layer._by_token(dx), d_weight if ctx.has_weight else None, None, d_gemm_weight, *[None] * 9


def _save_gemm_combine(ctx, inputs, output):
    a, gemm_weight, _, row_weight, plan, _, ctx.layer, ctx.buffer, *_ = inputs
    ctx.has_weight = row_weight is not None
    ctx.num_rows = a.shape[0]
    ctx.sink = sink_of(gemm_weight)
    ctx.save_for_backward(plan, a, gemm_weight, *((output[1], row_weight) if ctx.has_weight else ()))


def _gemm_combine_backward(ctx, d_out, _):
    plan, a, gemm_weight, *weighted = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_DISPATCH, d_out)
    layer = layer_of(ctx.layer)
    gemm = torch.ops.epmoe.grouped_gemm
    d_weight = None
    with reporting(layer, _C.OP_DISPATCH, ctx.buffer, plan):
        check_mode(d_out, a, gemm_weight, *weighted, may_batch=True)
        d_out = d_out.contiguous()
        g, _, _ = torch.ops.epmoe.dispatch(d_out, None, plan, ctx.layer, ctx.buffer, ctx.num_rows)
    # The layer's next operation of this backward is a combine; there is none without a gradient of the rows.
    calls_combine = ctx.needs_input_grad[0]
    with reporting(layer, _C.OP_COMBINE, ctx.buffer, plan) if calls_combine else contextlib.nullcontext():
        if ctx.has_weight:
            rows, row_weight = weighted
            d_weight = row_dots(g, rows) if ctx.needs_input_grad[3] else None
            g = (g * row_weight[:, None]).to(g.dtype)
        offsets = expert_offsets(layer, plan)
        da = None
        d_gemm_weight = None
        if ctx.needs_input_grad[0]:
            da = gemm(g, gemm_weight, offsets, None, None, DGRAD, 0, False)
        if ctx.needs_input_grad[1]:
            d_gemm_weight = gradient_of(ctx.sink, g, a, offsets)
    return da, d_gemm_weight, None, d_weight, *[None] * 7


torch.library.register_autograd("epmoe::dispatch_gemm", _dispatch_gemm_backward,
                                setup_context=_save_dispatch_gemm, lib=lib)
torch.library.register_autograd("epmoe::gemm_combine", _gemm_combine_backward,
                                setup_context=_save_gemm_combine,
                                lib=lib)
