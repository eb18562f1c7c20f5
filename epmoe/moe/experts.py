"""The experts of EPMoE in 16 bits, from tokens to tokens: one call of the module forward, two backward.

Forward: plan, dispatch, gate and up, the activation, down, combine.  For a backward the received rows and
gate and up are saved.  Backward: dispatch of dy, DGRAD of down, the gradient of the activation; then WGRAD of
down, DGRAD of gate and up, combine of dx, and WGRAD of gate and up.  csrc/layer/experts.c runs them.  Where
the fused kernels exist and are faster (csrc/layer/path.c), each product of rows shares a launch with the
communication beside it.  Elsewhere the stages run one after the other, with the same results, bit for bit.
The product with gate and up applies the activation; its gradient is a kernel of its own.

    call of the module   operations, in their order
    layer_experts        plan; dispatch of x; a = act(h) of h = rows @ gate_up.T + bias; a @ down.T + bias;
                         combine
    layer_experts_down   g = dispatch of dy; g @ down; of the activation d_h, and weighted = a * row_weight;
                         dots = what row_weight gets from g and a
    layer_experts_up     d_down = g.T @ weighted; d_h @ gate_up; combine of dx, and of dots to the tokens;
                         d_gate_up = d_h.T @ rows

g has no weights of rows in it, d_h has.  So the gradient of down's bias is a sum of weighted g, that of the
other bias a sum of d_h.

Eager calls go through an autograd.Function.  Where something must see operators, as a compiler, they are
torch.ops.epmoe.experts and the two of its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _C
from ..a2a.layout import EPLayout
from ..a2a.ops import expert_offsets, layer_of, lib, register_fake, row_dots, rows_to_trace, saved_tensors
from ..comm.error_propagation import reported_after_plan, reporting
from ..gemm.activations import KERNELS, Activation, Kernel, as_kernel, out_columns
from ..gemm.grouped import FORWARD, WGRAD
from ..gemm.weight_gradients import deferred_wgrad_of, gradient_at, gradient_of, of_one_backward
from ..torch_modes import call, check_backward, check_mode, implement, is_batch, is_plain, is_transformed
from ..torch_modes import is_watched, num_not_after, record_gradient, requires_grad

if TYPE_CHECKING:
    from .balance import Balancer
    from ..a2a.layer import EPAll2AllLayer
    from ..a2a.low_latency import LowLatencyAll2All
    from .lora_products import LoraOfCall
    from .weights import WeightFormat

# gate and up [L, N, H], their bias [L, N], down [L, H, I], its bias [L, H]
Weights: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
# of weights of 4 bits: scales and zeros of gate and up, scales and zeros of down
Scales: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
NO_SCALES = None, None, None, None
# LoRA beside a weight: `low_in` and `low_out` of csrc/protocol/ops.h
Low: TypeAlias = tuple[Tensor, Tensor]
NO_LOW = None, None
# A backward with at least so many bytes of rows makes the gradient of gate and up in a call of its own.
MANY_ROWS_BYTES = 1 << 27
# of a mixture of adapters: `tag` and `adapter_columns` of csrc/protocol/ops.h
Mixture: TypeAlias = tuple[Tensor, int]
_T = TypeVar("_T", Tensor, Tensor | None)
_Gradients: TypeAlias = tuple[Tensor | None, ...]  # of x, weight, and of the four Weights

lib.define("experts(Tensor x, Tensor weight, Tensor plan, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
           "Tensor? down_bias, str layer, int buffer, SymInt num_rows, float[] activation, "
           "bool recompute=False, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
lib.define("experts_backward_down(Tensor dy, Tensor plan, Tensor down, Tensor? down_bias, Tensor h, Tensor "
           "row_weight, str layer, int buffer, float[] activation, Tensor? after=None) "
           "-> (Tensor, Tensor, Tensor, Tensor)")
lib.define("experts_backward_up(Tensor d_h, Tensor gate_up, Tensor d_row_weight, Tensor plan, Tensor recv, "
           "str layer, int buffer, SymInt num_tokens, Tensor? after=None) -> (Tensor, Tensor)")
# The gradient of a bias: a grouped GEMM to the tensor cores, but a sum to who counts operations (flops.py).
lib.define("sum_of_rows(Tensor g, Tensor? row_weight, Tensor offsets) -> Tensor")


def takes(layer: EPAll2AllLayer | LowLatencyAll2All, x: Tensor, topk_weights: Tensor, weights: Weights,
          watched: bool) -> bool:
    """Whether `run` takes a call of a layer, or decode.run one of a low-latency path, with these weights.

    A layer over several nodes does not: its rows come with the operations of the rail.  Weights in FP8 have
    other operations.  Where something watches, a call without gradients has operators that keep nothing for
    a backward.
    """
    return is_one_call(layer, weights) and (not watched or requires_grad(x, topk_weights, *weights))


def is_one_call(layer: EPAll2AllLayer | LowLatencyAll2All, weights: Weights) -> bool:
    """Whether the experts of a layer with these weights are one call of the module, or its operators."""
    gate_up, _, down, _ = weights
    return (layer.nodes is None and layer.dtype in (torch.bfloat16, torch.float16) and layer._copies == 1
            and gate_up.dtype in (layer.dtype, torch.uint8)  # uint8: 4 bits
            and gate_up.dim() == down.dim() == 3 and gate_up.is_contiguous() and down.is_contiguous()
            and (layer.device.type == "cpu" or fits_kernels(*gate_up.shape[1:], *down.shape[1:])))


def check_recompute(recompute: bool, format: WeightFormat, hidden: int, inner: int, computes_fp8: bool,
                    **others: Any) -> bool:
    """Return whether a backward computes gate and up again, or raise ValueError where it cannot.

    others: Other options of EPMoE, with which it cannot: {name: whether the caller has given it}.
    """
    if not recompute:
        return False
    if not format.has_gradients:
        raise ValueError(f"recompute_gate_up: weights in {format.title} have no gradients: leave it out")
    if format.dtype == torch.float32:
        raise ValueError("recompute_gate_up with dtype float32: each product has its own place in the graph, "
                         "which keeps its input: use torch.utils.checkpoint, or 16 bits")
    if given := [name for name, is_given in others.items() if is_given]:
        raise ValueError(f"recompute_gate_up: not with {given[0]}")
    for name, size in (("hidden", hidden), ("inner", inner)) if not computes_fp8 else ():
        if not fits_kernels(size):
            raise ValueError(f"{name} {size} with recompute_gate_up: must be a multiple of 16")
    return True


def fits_kernels(*sizes: int) -> bool:
    """Whether the kernels take weights of these sizes."""
    return all(0 < n <= 1 << 24 and n % 16 == 0 for n in sizes)


def run(layer: EPAll2AllLayer, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor, parameters: Weights,
        activation: Activation, scales: Scales | None = None, lora: LoraOfCall | None = None,
        balancer: Balancer | None = None, as_operators: bool = False,
        recompute: bool = False) -> tuple[Tensor, EPLayout]:
    """Plan, and apply the experts.  Returns (y, layout).

    as_operators: something must see operators, which a call with an adapter does not have.  scales: those of
    weights of 4 bits, which have no gradients.  lora: an adapter or a mixture, beside which the weights have
    no gradients either.  balancer: what lets ranks help each other, of weights alone.  recompute: the
    backward computes gate and up again.
    """
    layout, first = None, _C.OP_PLAN  # the first operation that this rank has not entered
    try:
        plain = is_plain()
        if lora is None and (as_operators or not plain and is_transformed()):
            return _run_as_operators(layer, tokens, topk_idx, topk_weights, parameters, activation, recompute)
        kernel = type(activation) is str and KERNELS.get(activation) or as_kernel(activation)
        if not plain:
            check_mode(tokens, topk_weights, *parameters, *(lora.factors if lora else ()))
        weight = topk_weights if topk_weights.dtype == torch.float32 else as_float32(topk_weights)
        indices: Tensor | None = topk_idx
        if layer.plans_apart:  # the nodes tell each other the results of their plans
            layout, indices, first = layer._make_layout(topk_idx, None, 0), None, _C.OP_DISPATCH
        else:
            num_tokens = tokens.shape[0]  # len() of a tensor is a function of torch in Python
            plan = layer._allocator()((layer._plan_words(num_tokens),), (1,), torch.int32)
            layout = EPLayout(layer, plan, num_tokens, 0)
        if lora is not None and requires_grad(tokens, weight, *lora.factors):
            return lora.apply(tokens, weight, parameters, layer, indices, layout, kernel), layout
        if lora is None and scales is None and requires_grad(tokens, weight, *parameters):
            # One argument, because torch examines each one.
            of_call = layer, indices, layout, kernel, balancer, recompute
            return _Experts.apply(tokens, weight, *parameters, of_call), layout
        y, rows, *_ = forward(layer, tokens, indices, weight, layout, parameters, kernel, -1, False, scales,
                              lora.low() if lora else (None, None), balancer,
                              mixture=lora.mixture if lora else None)
        if lora is not None:
            lora.count(rows, expert_offsets(layer, layout.plan), parameters)
        return y, layout
    except Exception as error:
        if layout is not None and layout.recv is not None:
            raise  # the operations have run: nobody waits for this rank
        layer._propagate(first, error, 0)


def _run_as_operators(layer: EPAll2AllLayer, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor,
                      parameters: Weights, activation: Activation,
                      recompute: bool) -> tuple[Tensor, EPLayout]:
    layout, weight, num_rows = layer._prepare(_C.OP_PLAN, tokens, topk_idx, topk_weights, None, None, 0)
    if num_rows < 0 and layer._unread_rows:
        y, _, layout.recv = _run_planned(layer, layout, tokens, weight, parameters, layer._unread_rows,
                                         activation, recompute)
        return y, layout
    y, rows, recv = _run_planned(layer, layout, tokens, weight, parameters, num_rows, activation, recompute)
    layer._set_dispatched(layout, rows, recv)
    return y, layout


@reported_after_plan(_C.OP_DISPATCH)
def _run_planned(layer: EPAll2AllLayer, layout: EPLayout, tokens: Tensor, weight: Tensor | None,
                 parameters: Weights, num_rows: int, activation: Activation,
                 recompute: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, rows, _, _, recv = torch.ops.epmoe.experts(tokens, weight, layout.plan, *parameters, layer.id,
                                                  layout.buffer, num_rows, as_kernel(activation), recompute)
    return y, rows, recv


# ---- calls of the module ----


def as_float32(topk_weights: Tensor) -> Tensor:
    """Return routing weights as the module takes them.  Raises TypeError for integers."""
    if not topk_weights.dtype.is_floating_point:
        raise TypeError(f"topk_weights: wanted a floating-point dtype, got {topk_weights.dtype}")
    return topk_weights.to(torch.float32)


def forward(layer: EPAll2AllLayer, x: Tensor, topk_idx: Tensor | None, weight: Tensor, layout: EPLayout,
            parameters: Weights, kernel: Kernel, num_rows: int, saves: bool, scales: Scales | None = None,
            low: tuple[Low | None, Low | None] = (None, None), balancer: Balancer | None = None,
            wanted: Sequence[bool] = (), mixture: Mixture | None = None, recompute: bool = False) -> tuple[
                Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the experts.  Returns (y, rows, h, row_weight, recv, low_rows of gate_up, low_rows of down).

    topk_idx: None if the plan is made already.  num_rows: for how many rows to make room; they are as many as
    come, or more.  -1: as many as come, a number that only the plan has.  saves: for a backward.  low: LoRA
    beside gate and up, and beside down.  balancer: what may make a second plan, in which ranks help others.
    wanted: of which parameters the backward will have gradients, where there is a balancer.  mixture: low has
    the factors of several adapters.  recompute: there is no h, also for a backward.
    Outputs may be allocated before the number of rows is known: see a2a/layer.py.  When the operations have
    run, the layout has recv, and the number of rows if the host knows it.
    """
    gate_up, gate_up_bias, down, down_bias = parameters
    if gate_up_bias is not None or down_bias is not None:
        gate_up_bias, down_bias = bias_of(layer, gate_up_bias), bias_of(layer, down_bias)
    x, weight, gate_up, gate_up_bias, down, down_bias = aligned_all(x, weight, gate_up, gate_up_bias, down,
                                                                    down_bias)
    num_tokens, hidden, columns, inner = x.shape[0], layer.hidden, gate_up.shape[1], down.shape[2]
    if scales is not None:
        inner *= 2  # a byte has two weights
    up_scale, up_zero, down_scale, down_zero = scales or NO_SCALES
    is_planned = topk_idx is None
    known = layer.capacity if num_rows < 0 else num_rows
    awaits_rows = known is None
    kept_for = gate_up.data_ptr() if saves else None
    n = _C.layer_room(layer._c, num_tokens, kept_for) if known is None else known
    if n == _C.NO_ROOM:
        n = 0
    empty, dtype = layer._allocator(), layer.dtype
    tag, adapter_columns = mixture or (None, 0)
    held, *balance = None, 0, 0, 0
    moved = None
    if balancer is not None and not is_planned:
        weights = gate_up, gate_up_bias, down, down_bias
        held, *balance = balancer.options(wanted, weights, parameters, saves)
        moved = empty((num_tokens, layer.topk), (layer.topk, 1), torch.int32)
    recv = empty((layer._recv_words,), (1,), torch.int32)
    y = empty((num_tokens, hidden), (hidden, 1), dtype)
    while True:
        try:
            rows, a = empty((n, hidden), (hidden, 1), dtype), empty((n, inner), (inner, 1), dtype)
            row_weight = empty((n,), (1,), torch.float32)
            low_up, low_down = low_rows_of(empty, n, low[0], 1), low_rows_of(empty, n, low[1], 1)
            row_tag = None if tag is None else empty((n,), (1,), torch.int32)
            h = empty((n, columns), (columns, 1), dtype) if saves and not recompute else None
            # The first product has read the rows by then; but a backward reads them, too.
            out_rows = empty((n, hidden), (hidden, 1), dtype) if saves else rows
        except Exception:
            if not awaits_rows or n == 0:
                raise
            # torch frees all memory that it caches before it gives up: do not try again
            _C.layer_set_room(layer._c, num_tokens, kept_for, _C.NO_ROOM)
            n = 0
            continue
        found, is_launched, _ = _C.layer_experts(layer._c, layout.buffer, (
            x, topk_idx, weight, gate_up, gate_up_bias, up_scale, up_zero, down, down_bias, down_scale,
            down_zero, layout.plan, moved, held, recv, rows, row_weight, h, a, out_rows, y,
            *(low[0] or NO_LOW), low_up, *(low[1] or NO_LOW), low_down, tag, row_tag, adapter_columns, kernel,
            saves, *balance, is_planned, awaits_rows))
        if is_launched:
            layout.recv = recv
        if balancer is not None and not is_planned:
            layout._helps = balancer.helps(layer, layout.buffer, wanted, weights, parameters, saves)
        if is_launched:
            break
        n, awaits_rows, topk_idx, is_planned = found, False, None, True
        del rows, a, row_weight, row_tag, h, out_rows, low_up, low_down  # before others are allocated
    if layer.host_counts:
        layout._expert_rows = _C.layer_expert_rows(layer._c, layout.buffer, layout.plan)
        layout._num_rows = sum(layout._expert_rows)
    if known is None:
        layout._num_rows = found = found if awaits_rows else n
        if saves and found < n:
            for t in rows, row_weight, h, low_up, low_down:
                if t is not None:
                    t.resize_(found, *t.shape[1:])
    return y, rows, h, row_weight, recv, low_up, low_down


def low_rows_of(empty: Any, num_rows: int, low: Low | None, dim: int) -> Tensor | None:
    """Return room for the low_rows of a product of so many rows, or None without LoRA.

    empty: what a layer's _allocator() returns.  dim: of low_in, whose size is the rank.
    """
    if low is None:
        return None
    r = low[0].shape[dim]
    found: Tensor = empty((num_rows, r), (r, 1), low[0].dtype)
    return found


def backward_down(layer: EPAll2AllLayer, dy: Tensor, plan: Tensor, down: Tensor, down_bias: Tensor | None,
                  h: Tensor, row_weight: Tensor, kernel: Kernel, buffer: int,
                  low: Low | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Run the first half of the backward.  Returns (g, d_h, weighted, dots, low_rows): see protocol/ops.h."""
    n, columns = h.shape
    hidden, inner, dtype, empty = layer.hidden, down.shape[2], layer.dtype, layer._allocator()
    dy, down = aligned_all(dy, down)
    g, weighted = empty((n, hidden), (hidden, 1), dtype), empty((n, inner), (inner, 1), dtype)
    d_h, dots = empty((n, columns), (columns, 1), dtype), empty((n,), (1,), torch.float32)
    recv = empty((layer._recv_words,), (1,), torch.int32)  # not read: the combine of dx has the forward's
    low_rows = low_rows_of(empty, n, low, 2)
    _C.layer_experts_down(layer._c, buffer, (dy, down, plan, h, row_weight, recv, g, weighted, d_h, dots,
                                             *(low or NO_LOW), low_rows, kernel))
    if down_bias is not None:
        bias = F.pad(bias_of(layer, down_bias), (0, 0, 0, 1))  # the last one for rows of no expert
        dots += row_dots(g, bias[expert_of_row(expert_offsets(layer, plan), n)])
    return g, d_h, weighted, dots, low_rows


def backward_up(layer: EPAll2AllLayer, d_h: Tensor, gate_up: Tensor, dots: Tensor, plan: Tensor,
                recv: Tensor, rows: Tensor, g: Tensor, weighted: Tensor, d_down: Tensor | None,
                out_rows: Tensor, d_gate_up: Tensor | None, buffer: int, num_tokens: int,
                low: Low | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the second half of the backward.  Returns (dx, gradient of the routing weights [T, K], low_rows).

    d_down, d_gate_up: where these gradients go.  None: they are not made here, and g and weighted, or rows,
    are not read.  out_rows: for the rows of dx; may be g if nothing reads g afterwards: the gradient of down
    is made first, here or before.
    """
    hidden, topk, empty = layer.hidden, layer.topk, layer._allocator()
    dx = empty((num_tokens, hidden), (hidden, 1), layer.dtype)
    d_weight = empty((num_tokens, topk), (topk, 1), torch.float32)
    d_h, gate_up, dots = aligned_all(d_h, gate_up, dots)
    low_rows = low_rows_of(empty, d_h.shape[0], low, 2)
    _C.layer_experts_up(layer._c, buffer, (d_h, gate_up, dots, plan, recv, rows, g, weighted, d_down,
                                           out_rows, dx, d_weight, d_gate_up, *(low or NO_LOW), low_rows))
    return dx, d_weight, low_rows


def aligned_all(*tensors: Tensor | None) -> list[Any]:
    """Return what aligned does for each of the tensors."""
    return [t if t is None or t.data_ptr() % 16 == 0 else t.clone() for t in tensors]


def bias_of(layer: EPAll2AllLayer | LowLatencyAll2All, bias: _T) -> _T:
    """Return a bias as the module takes it, or None."""
    return None if bias is None else bias.to(layer.dtype).contiguous()


def expert_of_row(offsets: Tensor, num_rows: int) -> Tensor:
    """Return [M]: the expert of each row, and L for a row of no expert."""
    row = torch.arange(num_rows, device=offsets.device, dtype=torch.int32)
    return num_not_after(offsets, row) - 1


# ---- eager: an autograd.Function ----


class _Experts(torch.autograd.Function):
    """The experts of a training step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
                down: Tensor, down_bias: Tensor | None,
                of_call: tuple[EPAll2AllLayer, Tensor | None, EPLayout, Kernel, Balancer | None,
                               bool]) -> Tensor:
        layer, topk_idx, layout, kernel, balancer, recompute = of_call
        parameters = gate_up, gate_up_bias, down, down_bias
        y, rows, h, row_weight, recv, *_ = forward(layer, x, topk_idx, weight, layout, parameters, kernel,
                                                   layer._unread_rows or -1, True, balancer=balancer,
                                                   wanted=ctx.needs_input_grad[2:6], recompute=recompute)
        ctx.layer, ctx.buffer, ctx.kernel, ctx.num_tokens = layer, layout.buffer, kernel, x.shape[0]
        ctx.deferred_wgrads = deferred_wgrad_of(gate_up), deferred_wgrad_of(down)
        ctx.balancer, ctx.helps = balancer, layout._helps
        ctx.save_for_backward(layout.plan, *parameters, rows, h, row_weight, recv)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> _Gradients:
        up, down = ctx.deferred_wgrads
        if up is None and down is None:  # nothing is deferred, and the host saves three calls of Python
            return *_backward(ctx, ctx.layer, dy, ctx.needs_input_grad[:6]), None
        with of_one_backward(ctx.layer, ctx.buffer, up, down):
            return *_backward(ctx, ctx.layer, dy, ctx.needs_input_grad[:6]), None


def _gate_and_up(layer: EPAll2AllLayer, rows: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
                 plan: Tensor) -> Tensor:
    """Return gate and up of the rows, with the bits of the forward."""
    tensors = rows, gate_up, expert_offsets(layer, plan), bias_of(layer, gate_up_bias), None, None, None
    return cast(Tensor, call("grouped_gemm", tensors, FORWARD, as_kernel(None), False, None))


def _backward(ctx: Any, layer: EPAll2AllLayer, dy: Tensor, needed: Sequence[bool]) -> _Gradients:
    """Return the gradients of x, weight, gate_up, gate_up_bias, down and down_bias, those that are needed."""
    helps = ctx.helps
    slots_hold = helps is not None and helps.begin_backward()
    plan, gate_up, gate_up_bias, down, down_bias, rows, h, row_weight, recv = saved_tensors(
        ctx, layer, _C.OP_DISPATCH, dy)
    of_x, of_weight, of_gate_up, of_gate_up_bias, of_down, of_down_bias = needed
    d_gate_up = d_gate_up_bias = d_down = d_down_bias = None
    deferred_up, deferred_down = ctx.deferred_wgrads
    parameters = gate_up, gate_up_bias, down, down_bias
    if helps is not None:
        # Ranks send each other what was agreed in the forward, also if this backward needs less.
        if not of_gate_up:
            deferred_up = None
        if not of_down:
            deferred_down = None
        of_gate_up, of_gate_up_bias, of_down, of_down_bias = helps.wanted
        if not (slots_hold and helps.are_in(parameters)):
            gate_up, down = aligned_all(gate_up, down)
            down_bias = bias_of(layer, down_bias)
            # The backward does not read the bias of gate and up.
            ctx.balancer.restore(layer, ctx.buffer, plan, helps, (gate_up, None, down, down_bias))
    with reporting(layer, _C.OP_DISPATCH, ctx.buffer, plan):
        as_operators = is_watched() or is_transformed() or is_batch(dy)
        if helps is None:
            check_mode(dy, gate_up, down, may_batch=True)
        else:
            check_backward(dy, gate_up, down)  # the staging has room for one gradient of a slot
        if torch.is_grad_enabled():
            raise NotImplementedError(f"create_graph=True: the experts have no second derivatives in "
                                      f"{layer.dtype}: use dtype=torch.float32")
        dy = dy.contiguous()
        if h is None:
            h = _gate_and_up(layer, rows, gate_up, gate_up_bias, plan)
        if as_operators:
            g, d_h, weighted, dots = torch.ops.epmoe.experts_backward_down(
                dy, plan, down, down_bias, h, row_weight, layer.id, ctx.buffer, ctx.kernel)
        else:
            g, d_h, weighted, dots, _ = backward_down(layer, dy, plan, down, down_bias, h, row_weight,
                                                      ctx.kernel, ctx.buffer)
        # Without retain_graph, free gate and up here: their memory has room for gradients of the weights.
        ctx.maybe_clear_saved_tensors()
        del h
        # The call of the module makes the gradient of a weight. But a deferred wgrad takes its factors (that
        # of a frozen weight is None), and a compiler sees a product of its own. With many rows the gradient
        # of gate and up, the largest tensor of a step, gets memory only when g and weighted are free again.
        is_apart_up = as_operators or deferred_up is not None or (
            (g.numel() + weighted.numel()) * g.element_size() >= MANY_ROWS_BYTES)
        is_apart_down = as_operators or deferred_down is not None
        if of_down:
            d_down = (gradient_of(deferred_down, g, weighted, expert_offsets(layer, plan)) if is_apart_down
                      else torch.empty_like(down))
        if of_down_bias:
            d_down_bias = torch.ops.epmoe.sum_of_rows(g, row_weight,
                                                      expert_offsets(layer, plan)).to(parameters[3].dtype)
        if of_gate_up and not is_apart_up:
            d_gate_up = torch.empty_like(gate_up)
        # Also where this rank wants neither: another rank may want one, and waits for the rows of all.
        if as_operators:
            del g, weighted  # their memory serves the combine
            dx, d_weight = torch.ops.epmoe.experts_backward_up(d_h, gate_up, dots, plan, recv, layer.id,
                                                               ctx.buffer, ctx.num_tokens)
        else:
            # The deferred wgrad of down may multiply g in backward_dw.
            out_rows = g if deferred_down is None else torch.empty_like(g)
            dx, d_weight, _ = backward_up(layer, d_h, gate_up, dots, plan, recv, rows, g, weighted,
                                          None if is_apart_down else d_down, out_rows, d_gate_up, ctx.buffer,
                                          ctx.num_tokens)
            del g, weighted, out_rows
    returns_gradients = helps is not None and any(helps.wanted)
    with reporting(layer, _C.OP_BARRIER, ctx.buffer, plan) if returns_gradients else contextlib.nullcontext():
        if of_gate_up and is_apart_up:
            d_gate_up = gradient_of(deferred_up, d_h, rows, expert_offsets(layer, plan))
        if of_gate_up_bias:
            d_gate_up_bias = torch.ops.epmoe.sum_of_rows(d_h, None,
                                                         expert_offsets(layer, plan)).to(gate_up_bias.dtype)
        at_up, at_down = d_gate_up, d_down
        if returns_gradients:
            at_up, at_down = gradient_at(deferred_up, d_gate_up), gradient_at(deferred_down, d_down)
    if returns_gradients:
        ctx.balancer.return_gradients(layer, ctx.buffer, plan, helps,
                                      (at_up, d_gate_up_bias, at_down, d_down_bias), parameters)
    of_parameters = d_gate_up, d_gate_up_bias, d_down, d_down_bias
    return (dx if of_x else None, d_weight if of_weight else None,
            *(grad if is_needed else None for grad, is_needed in zip(of_parameters, needed[2:])))


# ---- operators, for compilers ----


def _run_experts(x: Tensor, weight: Tensor, plan: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
                 down: Tensor, down_bias: Tensor | None, layer_id: str, buffer: int, num_rows: int,
                 activation: Kernel, recompute: bool = False,
                 after: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    layer, parameters = layer_of(layer_id), (gate_up, gate_up_bias, down, down_bias)
    layout = EPLayout(layer, plan, x.shape[0], buffer)
    try:
        y, rows, h, row_weight, recv, *_ = forward(layer, x, None, weight, layout, parameters, activation,
                                                   num_rows, True, recompute=recompute)
        return y, rows, layer._empty(0, gate_up.shape[1]) if h is None else h, row_weight, recv
    except Exception:
        if layout.recv is not None:
            raise  # the operations have run: nobody waits for this rank
        with reporting(layer, _C.OP_DISPATCH, buffer, plan, num_rows < 0):
            raise


def _run_backward_down(dy: Tensor, plan: Tensor, down: Tensor, down_bias: Tensor | None, h: Tensor,
                       row_weight: Tensor, layer_id: str, buffer: int, activation: Kernel,
                       after: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer = layer_of(layer_id)
    with reporting(layer, _C.OP_DISPATCH, buffer, plan):
        return backward_down(layer, dy, plan, down, down_bias, h, row_weight, activation, buffer)[:4]


def _run_backward_up(d_h: Tensor, gate_up: Tensor, d_row_weight: Tensor, plan: Tensor, recv: Tensor,
                     layer_id: str, buffer: int, num_tokens: int,
                     after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    layer = layer_of(layer_id)
    with reporting(layer, _C.OP_COMBINE, buffer, plan):
        out_rows = layer._empty(len(d_h), layer.hidden)
        unread = out_rows  # in the place of rows, g and weighted: no gradient of a weight is made here
        return backward_up(layer, d_h, gate_up, d_row_weight, plan, recv, unread, unread, unread, None,
                           out_rows, None, buffer, num_tokens)[:2]


def _run_sum_of_rows(g: Tensor, row_weight: Tensor | None, offsets: Tensor) -> Tensor:
    """Return the sum [L, N] of each expert's rows of g, times their weights: WGRAD with one other column."""
    column = g.new_ones(g.shape[0]) if row_weight is None else row_weight.to(g.dtype)
    columns = F.pad(column[:, None], (0, 15))
    return torch.ops.epmoe.grouped_gemm(g, columns, offsets, None, None, None, None, WGRAD,
                                        as_kernel(None), False, None)[..., 0].contiguous()


for _name, _f in (("experts", _run_experts), ("experts_backward_down", _run_backward_down),
                  ("experts_backward_up", _run_backward_up), ("sum_of_rows", _run_sum_of_rows)):
    implement(lib, _name, _f)


@register_fake("experts")
def _(x: Tensor, weight: Tensor, plan: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
      down_bias: Tensor | None, layer_id: str, buffer: int, num_rows: int, activation: Kernel,
      recompute: bool = False, **__: Any) -> tuple[Tensor, ...]:
    layer = layer_of(layer_id)
    num_rows = rows_to_trace(layer, num_rows)
    like = x.new_empty(0, dtype=layer.dtype)
    return (like.new_empty(x.shape[0], layer.hidden), like.new_empty(num_rows, layer.hidden),
            like.new_empty(0 if recompute else num_rows, gate_up.shape[1]),
            x.new_empty(num_rows, dtype=torch.float32), plan.new_empty(layer._recv_words))


@register_fake("experts_backward_down")
def _(dy: Tensor, plan: Tensor, down: Tensor, down_bias: Tensor | None, h: Tensor, row_weight: Tensor,
      layer_id: str, buffer: int, activation: Kernel, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    like = dy.new_empty(0, dtype=layer_of(layer_id).dtype)
    columns = out_columns(h.shape[1], activation)
    return (like.new_empty(h.shape[0], down.shape[1]), torch.empty_like(h),
            like.new_empty(h.shape[0], columns), dy.new_empty(h.shape[0], dtype=torch.float32))


@register_fake("experts_backward_up")
def _(d_h: Tensor, gate_up: Tensor, d_row_weight: Tensor, plan: Tensor, recv: Tensor, layer_id: str,
      buffer: int, num_tokens: int, after: Tensor | None = None) -> tuple[Tensor, ...]:
    layer = layer_of(layer_id)
    return (d_h.new_empty(num_tokens, layer.hidden),
            d_h.new_empty(num_tokens, layer.topk, dtype=torch.float32))


@torch.library.register_fake("epmoe::sum_of_rows", lib=lib)
def _(g: Tensor, row_weight: Tensor | None, offsets: Tensor) -> Tensor:
    return g.new_empty(offsets.shape[0] - 1, g.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, plan, gate_up, gate_up_bias, down, down_bias, *others = inputs
    ctx.layer_id, ctx.buffer, _, ctx.kernel, recompute, _ = others
    _, rows, h, row_weight, recv = output
    ctx.num_tokens = x.shape[0]
    ctx.deferred_wgrads = deferred_wgrad_of(gate_up), deferred_wgrad_of(down)
    ctx.balancer = ctx.helps = None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rows, h, row_weight, recv)
    ctx.save_for_backward(plan, gate_up, gate_up_bias, down, down_bias, rows, None if recompute else h,
                          row_weight, recv)


def _backward_of_operator(ctx: Any, dy: Tensor | None, *_: Any) -> _Gradients:
    needed, layer = ctx.needs_input_grad, layer_of(ctx.layer_id)
    if dy is None:  # what came after the experts has returned no gradient; the other ranks may have one
        dy = torch.zeros(ctx.num_tokens, layer.hidden, dtype=layer.dtype, device=layer.device)
    with of_one_backward(layer, ctx.buffer, *ctx.deferred_wgrads):
        x, weight, *of_parameters = _backward(ctx, layer, dy, [*needed[:2], *needed[3:7]])
    return x, weight, None, *of_parameters, *[None] * 6


record_gradient(lib, "experts", _save, _backward_of_operator)
