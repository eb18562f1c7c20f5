"""torch.ops.epmoe.experts: the experts of a training step, from tokens to tokens, with a backward of its own.

Forward: dispatch, gate and up, the activation, down, combine.  Saved are the received rows and gate and up.
Backward: dispatch of dy, DGRAD of down, the gradient of the activation, DGRAD of gate and up, combine of dx,
and a WGRAD of each of the two.  Where the fused kernels exist, each product of rows shares a launch with the
communication beside it.  Elsewhere the stages run one after the other, with the same results, bit for bit.
"""

import contextlib

import torch
import torch.nn.functional as F

from . import _C
from .activation_ops import run_activation, run_activation_backward
from .autograd import check_mode
from .direct import implement, requires_grad
from .fused import EpAll2AllFusedOp
from .fused_ops import expert_offsets
from .gemm import DGRAD, FORWARD, GATED, SWIGLU, WGRAD, activation_of, aligned, as_kernel
from .ops import layer_of, lib, register_fake, row_dots, rows_to_trace, saved_tensors
from .refusals import reported_after_plan, reporting
from .weight_gradients import gradient_of, sink_of

lib.define("experts(Tensor x, Tensor weight, Tensor plan, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
           "Tensor? down_bias, str layer, int buffer, SymInt num_rows, int activation, float alpha, float "
           "limit, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
lib.define("experts_backward_down(Tensor dy, Tensor plan, Tensor down, Tensor? down_bias, Tensor h, Tensor "
           "row_weight, str layer, int buffer, int activation, float alpha, float limit, Tensor? after=None) "
           "-> (Tensor, Tensor, Tensor, Tensor)")
lib.define("experts_backward_up(Tensor d_h, Tensor gate_up, Tensor d_row_weight, Tensor plan, Tensor recv, "
           "str layer, int buffer, SymInt num_tokens, Tensor? after=None) -> (Tensor, Tensor)")
# The gradient of a bias: a grouped GEMM to the tensor cores, but a sum to who counts operations (flops.py).
lib.define("sum_of_rows(Tensor g, Tensor? row_weight, Tensor offsets) -> Tensor")


def trains(layer, *tensors):
    """Whether a call of EPMoE with these tokens, weights and parameters takes the operator.

    A layer over several nodes does not: its rows come with the operations of the rail.
    """
    _, _, gate_up, _, down, _ = tensors
    return (getattr(layer, "nodes", None) is None and layer.dtype in (torch.bfloat16, torch.float16)
            and layer._copies == 1 and requires_grad(*tensors) and gate_up.dim() == down.dim() == 3
            and gate_up.is_contiguous() and down.is_contiguous()
            and (layer.device.type == "cpu" or _fits_kernels(*gate_up.shape[1:], *down.shape[1:])))


def _fits_kernels(*sizes):
    """Whether the kernels take weights of these sizes."""
    return all(0 < n <= 1 << 24 and n % 16 == 0 for n in sizes)


def run(layer, tokens, topk_idx, topk_weights, parameters, activation):
    """Plan, and apply the experts.  Returns (y, layout).

    parameters: gate_up [L, N, H], its bias or None, down [L, H, I], its bias or None.
    """
    layout, weight, num_rows = layer._prepare(_C.OP_PLAN, tokens, topk_idx, topk_weights, None, None, 0)
    y, rows, recv = _run_planned(layer, layout, tokens, weight, parameters, num_rows, activation)
    layer._set_dispatched(layout, rows, recv)
    return y, layout


@reported_after_plan(_C.OP_DISPATCH)
def _run_planned(layer, layout, tokens, weight, parameters, num_rows, activation):
    y, rows, _, _, recv = torch.ops.epmoe.experts(tokens, weight, layout.plan, *parameters, layer.id,
                                                  layout.buffer, num_rows, *as_kernel(activation))
    return y, rows, recv


def _is_fused(layer, weight, columns):
    """Whether the product of these weights shares a launch with the communication beside it.

    columns: N of the gate and up weights [L, N, H].
    """
    return isinstance(layer, EpAll2AllFusedOp) and layer._is_fused_training(weight, columns)


def _dispatches(layer, weight, columns):
    """Return the operation that dispatches and multiplies with these weights, or that only dispatches."""
    return _C.OP_DISPATCH_GEMM if _is_fused(layer, weight, columns) else _C.OP_DISPATCH


def _combines(layer, weight, columns):
    """Return the operation that multiplies with these weights and combines, or that only combines."""
    return _C.OP_GEMM_COMBINE if _is_fused(layer, weight, columns) else _C.OP_COMBINE


# ---- implementations ----


def _bias_of(layer, bias):
    return None if bias is None else aligned(bias.to(layer.dtype).contiguous())


def _check_parameters(layer, gate_up, gate_up_bias, down, down_bias, activation):
    """Check the parameters.  activation: as as_kernel returns it."""
    layer._check_product(gate_up, None, layer.hidden, gate_up_bias, activation_of(*activation))
    inner = gate_up.shape[1] // (2 if activation[0] in GATED else 1)
    layer._check_product(down, layer.hidden, inner, down_bias, None)


def _run_experts(x, weight, plan, gate_up, gate_up_bias, down, down_bias, layer, buffer, num_rows, *last):
    """last: activation, alpha, limit, after."""
    layer = layer_of(layer)
    gemm = torch.ops.epmoe.grouped_gemm
    columns = gate_up.shape[1]
    fused = _is_fused(layer, gate_up, columns)
    with reporting(layer, _dispatches(layer, gate_up, columns), buffer, plan, num_rows < 0) as entered:
        offsets = expert_offsets(layer, plan)
        _check_parameters(layer, gate_up, gate_up_bias, down, down_bias, last[:3])
        gate_up_bias, down_bias = _bias_of(layer, gate_up_bias), _bias_of(layer, down_bias)
        x, weight = aligned(x), aligned(weight)
        a = None
        if fused and last[0] == SWIGLU:
            a, h, rows, row_weight, recv = layer._dispatch_swiglu(x, weight, plan, gate_up, gate_up_bias,
                                                                  buffer, num_rows)
        elif fused:
            h, rows, row_weight, recv = layer._dispatch_gemm(x, weight, plan, gate_up, gate_up_bias, buffer,
                                                             num_rows, 0, with_grad=True)
        else:
            rows, row_weight, recv = layer._dispatch(x, weight, plan, buffer, num_rows, True,
                                                     gate_up.data_ptr())
        entered.op, entered.awaits_plan = _combines(layer, down, columns), False
        if not fused:
            h = gemm(rows, gate_up, offsets, gate_up_bias, None, FORWARD, 0, False)
        a = run_activation(h, offsets, *last[:3]) if a is None else a
        if _is_fused(layer, down, columns):
            y = layer._gemm_combine(a, down, down_bias, row_weight, plan, recv, buffer, len(x), True)[0]
        else:
            y_rows = gemm(a, down, offsets, down_bias, None, FORWARD, 0, False)
            y = layer._combine(y_rows, row_weight, None, plan, recv, buffer, len(x), True)[0]
    return y, rows, h, row_weight, recv


def _run_backward_down(dy, plan, down, down_bias, h, row_weight, layer, buffer, *last):
    """Return dy of each row [M, H], d_h, the weighted activation [M, I] and the row weights' gradient [M]."""
    layer = layer_of(layer)
    fused = _is_fused(layer, down, h.shape[1])
    with reporting(layer, _dispatches(layer, down, h.shape[1]), buffer, plan):
        offsets = expert_offsets(layer, plan)
        if fused:
            d, g = layer._dispatch_dgrad(dy, plan, down, buffer, len(h))
        else:
            g, _, _ = layer._dispatch(aligned(dy), None, plan, buffer, len(h))
    # `trains` has seen that all sizes are those of the kernels, so gate and up are fused exactly if down is
    next_op = _C.OP_GEMM_COMBINE if fused else _C.OP_COMBINE
    with reporting(layer, next_op, buffer, plan):
        if not fused:
            d = torch.ops.epmoe.grouped_gemm(g, down, offsets, None, None, DGRAD, 0, False)
        d_h, weighted, dots = run_activation_backward(h, d, offsets, row_weight, *last[:3], in_place=True)
        if down_bias is not None:
            bias = F.pad(_bias_of(layer, down_bias), (0, 0, 0, 1))  # the last one for rows of no expert
            dots += row_dots(g, bias[_expert_of_row(offsets, len(g))])
    return g, d_h, weighted, dots


def _run_backward_up(d_h, gate_up, d_row_weight, plan, recv, layer, buffer, num_tokens, after=None):
    """Return dx [T, H] and the gradient of the routing weights [T, K]."""
    layer = layer_of(layer)
    columns = gate_up.shape[1]
    with reporting(layer, _combines(layer, gate_up, columns), buffer, plan):
        if _is_fused(layer, gate_up, columns):
            return layer._dgrad_combine(d_h, gate_up, d_row_weight, plan, recv, buffer, num_tokens)
        d_rows = torch.ops.epmoe.grouped_gemm(d_h, gate_up, expert_offsets(layer, plan), None, None, DGRAD, 0,
                                              False)
        return layer._combine(d_rows, None, d_row_weight, plan, recv, buffer, num_tokens)


def _expert_of_row(offsets, num_rows):
    """Return [M]: the expert of each row, and L for a row of no expert."""
    row = torch.arange(num_rows, device=offsets.device, dtype=torch.int32)
    return (torch.searchsorted(offsets, row, right=True) - 1) % len(offsets)


def _run_sum_of_rows(g, row_weight, offsets):
    """Return the sum [L, N] of each expert's rows of g, times their weights: WGRAD with one other column."""
    column = g.new_ones(g.shape[0]) if row_weight is None else row_weight.to(g.dtype)
    columns = F.pad(column[:, None], (0, 15))
    return torch.ops.epmoe.grouped_gemm(g, columns, offsets, None, None, WGRAD, 0, False)[..., 0].contiguous()


for _name, _f in (("experts", _run_experts), ("experts_backward_down", _run_backward_down),
                  ("experts_backward_up", _run_backward_up), ("sum_of_rows", _run_sum_of_rows)):
    implement(lib, _name, _f)


@register_fake("experts")
def _(x, weight, plan, gate_up, gate_up_bias, down, down_bias, layer, buffer, num_rows, *_, **__):
    layer = layer_of(layer)
    num_rows = rows_to_trace(layer, num_rows)
    like = x.new_empty(0, dtype=layer.dtype)
    return (like.new_empty(x.shape[0], layer.hidden), like.new_empty(num_rows, layer.hidden),
            like.new_empty(num_rows, gate_up.shape[1]), x.new_empty(num_rows, dtype=torch.float32),
            plan.new_empty(layer._recv_words))


@register_fake("experts_backward_down")
def _(dy, plan, down, down_bias, h, row_weight, layer, buffer, activation, *_, **__):
    like = dy.new_empty(0, dtype=layer_of(layer).dtype)
    columns = h.shape[1] // (2 if activation in GATED else 1)
    return (like.new_empty(h.shape[0], down.shape[1]), torch.empty_like(h),
            like.new_empty(h.shape[0], columns), dy.new_empty(h.shape[0], dtype=torch.float32))


@register_fake("experts_backward_up")
def _(d_h, gate_up, d_row_weight, plan, recv, layer, buffer, num_tokens, after=None):
    layer = layer_of(layer)
    return (d_h.new_empty(num_tokens, layer.hidden),
            d_h.new_empty(num_tokens, layer.topk, dtype=torch.float32))


@torch.library.register_fake("epmoe::sum_of_rows", lib=lib)
def _(g, row_weight, offsets):
    return g.new_empty(offsets.shape[0] - 1, g.shape[1])


# ---- backward ----


def _save(ctx, inputs, output):
    (x, _, plan, gate_up, gate_up_bias, down, down_bias, ctx.layer, ctx.buffer, _, *ctx.activation,
     _) = inputs
    _, rows, h, row_weight, recv = output
    ctx.num_tokens = x.shape[0]
    ctx.sinks = sink_of(gate_up), sink_of(down)
    ctx.first_op = _dispatches(layer_of(ctx.layer), down, gate_up.shape[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rows, h, row_weight, recv)
    ctx.save_for_backward(plan, gate_up, gate_up_bias, down, down_bias, rows, h, row_weight, recv)


def _backward(ctx, dy, *_):
    plan, gate_up, gate_up_bias, down, down_bias, rows, h, row_weight, recv = saved_tensors(
        ctx, ctx.first_op, dy)
    layer = layer_of(ctx.layer)
    with reporting(layer, ctx.first_op, ctx.buffer, plan):
        check_mode(dy, gate_up, down, may_batch=True)
        if torch.is_grad_enabled():
            raise NotImplementedError(f"create_graph=True: the experts have no second derivatives in "
                                      f"{layer.dtype}: use dtype=torch.float32")
        dy = dy.contiguous()
        of_x, of_weight, _, of_gate_up, of_gate_up_bias, of_down, of_down_bias = ctx.needs_input_grad[:7]
        g, d_h, weighted, dots = torch.ops.epmoe.experts_backward_down(
            dy, plan, down, down_bias, h, row_weight, ctx.layer, ctx.buffer, *ctx.activation)
    next_op = _combines(layer, gate_up, gate_up.shape[1])
    grads = [None] * 7
    with reporting(layer, next_op, ctx.buffer, plan):
        # Without retain_graph, free gate and up here: the gradients of the weights have room in their memory.
        ctx.maybe_clear_saved_tensors()
        del h
        offsets = expert_offsets(layer, plan)
        if of_down:
            grads[5] = gradient_of(ctx.sinks[1], g, weighted, offsets)
        if of_down_bias:
            grads[6] = torch.ops.epmoe.sum_of_rows(g, row_weight, offsets).to(down_bias.dtype)
        del g, weighted  # their memory serves the combine
        # Also where this rank wants neither: another rank may want one, and waits for the rows of all.
        dx, d_weight = torch.ops.epmoe.experts_backward_up(
            d_h, gate_up, dots, plan, recv, ctx.layer, ctx.buffer, ctx.num_tokens)
    grads[0], grads[1] = dx if of_x else None, d_weight if of_weight else None
    del dx, d_weight
    if of_gate_up:
        grads[3] = gradient_of(ctx.sinks[0], d_h, rows, offsets)
    if of_gate_up_bias:
        grads[4] = torch.ops.epmoe.sum_of_rows(d_h, None, offsets).to(gate_up_bias.dtype)
    return *grads, *[None] * 7


torch.library.register_autograd("epmoe::experts", _backward, setup_context=_save, lib=lib)
