"""torch.ops.epmoe.*: the stages as operators, so that autograd and torch.compile see them.

dispatch and combine are each other's backward: the backward of dispatch adds up what dispatch copied, and the
backward of combine copies what combine added up.  An operator names its layer by the text layer.id.  A result
that is absent is a tensor without dimensions.  `after` orders operators and is not read: see inductor.py.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .. import _C
from ..comm.error_propagation import reporting
from ..gemm.activations import Kernel, as_kernel, out_columns
from ..gemm.grouped import DGRAD, aligned
from ..gemm.weight_gradients import gradient_of, deferred_wgrad_of
from ..torch_modes import check_mode, implement, is_watched, new_size, num_not_after, record_gradient

if TYPE_CHECKING:
    from .fused import EpAll2AllFusedOp
    from .layer import EPAll2AllLayer

_F = TypeVar("_F", bound=Callable[..., Any])

layers: weakref.WeakValueDictionary[str, EPAll2AllLayer] = weakref.WeakValueDictionary()  # id -> layer
lib = torch.library.Library("epmoe", "DEF")
lib.define("plan(Tensor indices, Tensor? scatter, str layer, int buffer, Tensor? after=None) -> Tensor")
lib.define("dispatch(Tensor x, Tensor? x_scale, Tensor? weight, Tensor plan, str layer, int buffer, "
           "SymInt num_rows, bool requires_grad=False, Tensor? after=None) -> (Tensor, Tensor, Tensor, "
           "Tensor)")
lib.define("combine(Tensor rows, Tensor? row_weight, Tensor? row_scalar, Tensor plan, Tensor recv, str "
           "layer, int buffer, SymInt num_tokens, bool requires_grad=False, Tensor? after=None) -> (Tensor, "
           "Tensor)")


def layer_of(layer_id: str) -> Any:
    """Return the layer: an EPAll2AllLayer, or an EpAll2AllFusedOp where an operator is of one."""
    layer = layers.get(layer_id)
    if layer is None:
        raise RuntimeError(f"this process has no epmoe layer {layer_id}: keep a reference to the layer while "
                           f"compiled code or a backward uses it; a program that was made in another process "
                           f"names a layer of that process, and cannot be used here")
    return layer


def absent(like: Tensor) -> Tensor:
    """Return the result that means "no tensor": an operator's results must all be tensors."""
    return like.new_empty((), dtype=torch.float32)


def no_scales(like: Tensor) -> Tensor:
    """As absent, but without a number that nothing writes: torch can compare the results of two runs."""
    return like.new_empty(0, dtype=torch.float32)


# ---- implementations ----


def _plan(indices: Tensor, scatter: Tensor | None, layer_id: str, buffer: int,
          after: Tensor | None = None) -> Tensor:
    layer: EPAll2AllLayer = layer_of(layer_id)
    return layer._plan(indices, scatter, buffer)


def _dispatch(x: Tensor, x_scale: Tensor | None, weight: Tensor | None, plan: Tensor, layer_id: str,
              buffer: int, num_rows: int, requires_grad: bool = False,
              after: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer: EPAll2AllLayer = layer_of(layer_id)
    with reporting(layer, _C.OP_DISPATCH, buffer, plan, num_rows < 0):
        rows, row_weight, recv, row_scale = layer._dispatch(aligned(x), aligned(weight), plan, buffer,
                                                            num_rows, requires_grad, x_scale=x_scale)
    return (rows, absent(x) if row_weight is None else row_weight, recv,
            no_scales(x) if row_scale is None else row_scale)


def _combine(rows: Tensor, row_weight: Tensor | None, row_scalar: Tensor | None, plan: Tensor, recv: Tensor,
             layer_id: str, buffer: int, num_tokens: int, requires_grad: bool = False,
             after: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    layer: EPAll2AllLayer = layer_of(layer_id)
    with reporting(layer, _C.OP_COMBINE, buffer, plan):
        none = absent(rows) if row_scalar is None else None  # before the operation: after it no rank waits
        out, out_scalar = layer._combine(aligned(rows), aligned(row_weight), aligned(row_scalar), plan, recv,
                                         buffer, num_tokens, requires_grad)
    return out, none if out_scalar is None else out_scalar


implement(lib, "plan", _plan)
implement(lib, "dispatch", _dispatch)
implement(lib, "combine", _combine)


# ---- fake implementations, for tracers ----


def register_fake(name: str) -> Callable[[_F], _F]:
    """Return a decorator that registers the fake implementation of an operator.

    Every rank enters every operation, also one whose result it does not need, and all in the same order.  So
    the operator is marked as having a side effect: a compiler must not remove or move it.
    """
    torch.fx.node.has_side_effect(getattr(torch.ops.epmoe, name).default)

    def register(fn: _F) -> _F:
        @torch.library.register_fake(f"epmoe::{name}", lib=lib)
        def fake(*args: Any, **kwargs: Any) -> Any:
            check_not_exported()
            from .inductor import keep_order  # slow to import; a compiler has imported most of it

            keep_order()
            return fn(*args, **kwargs)

        return fn

    return register


def check_not_exported() -> None:
    """Raise RuntimeError inside of torch.export.

    An operator names a layer by its number in this process.  An exported program may be loaded in another
    process, and would then use whatever layer has the number there.
    """
    if torch.compiler.is_exporting():
        raise RuntimeError("torch.export: a layer of epmoe is memory that the ranks of this process's group "
                           "share, which an exported program cannot hold: export the parts of the model "
                           "around it, or use torch.compile")


def rows_to_trace(layer: EPAll2AllLayer, num_rows: Any) -> Any:
    """Return num_rows, or a new dynamic size for -1: the number is known only when the operator runs.

    The code of EPMoE that uses the size is traceable, so that its layers ask for no break of the graph.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

    if not guard_or_false(num_rows < 0):
        return num_rows
    return new_size(breaks_graph=not layer.is_of_module)


@register_fake("plan")
def _(indices: Tensor, scatter: Tensor | None, layer_id: str, buffer: int,
      after: Tensor | None = None) -> Tensor:
    layer: EPAll2AllLayer = layer_of(layer_id)
    return indices.new_empty(layer._plan_words(indices.shape[0]), dtype=torch.int32)


@register_fake("dispatch")
def _(x: Tensor, x_scale: Tensor | None, weight: Tensor | None, plan: Tensor, layer_id: str, buffer: int,
      num_rows: Any, requires_grad: bool = False,
      after: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer: EPAll2AllLayer = layer_of(layer_id)
    num_rows = rows_to_trace(layer, num_rows)
    row_weight = absent(x) if weight is None else x.new_empty(num_rows, dtype=torch.float32)
    row_scale = no_scales(x) if x_scale is None else x_scale.new_empty(num_rows, x_scale.shape[1])
    rows = x.new_empty(num_rows, layer.hidden, dtype=layer.dtype if x_scale is None else x.dtype)
    return rows, row_weight, plan.new_empty(layer._recv_words), row_scale


@register_fake("combine")
def _(rows: Tensor, row_weight: Tensor | None, row_scalar: Tensor | None, plan: Tensor, recv: Tensor,
      layer_id: str, buffer: int, num_tokens: int, requires_grad: bool = False,
      after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    layer: EPAll2AllLayer = layer_of(layer_id)
    if row_scalar is None:
        out_scalar = absent(rows)
    else:
        out_scalar = rows.new_empty(num_tokens, layer.topk, dtype=torch.float32)
    return rows.new_empty(num_tokens, layer.hidden, dtype=layer.dtype), out_scalar


# ---- backward ----


def saved_tensors(ctx: Any, layer: EPAll2AllLayer, op: int, grad: Any) -> tuple[Tensor, ...]:
    """Return what a backward has saved.

    torch raises an error where a saved parameter was changed in place, and in a second backward without
    retain_graph.  The other ranks then learn it in op, the operation with which they begin this backward.
    grad: the gradient with which the backward was called.
    """
    try:
        return ctx.saved_tensors
    except Exception as error:
        is_traced = grad is not None and type(grad) is not torch.Tensor  # then no rank waits
        # Under checkpointing this runs the forward again.  An error of that has frames of its own, and where
        # epmoe has raised it, the other ranks know it already.
        is_of_forward = getattr(error.__traceback__, "tb_next", None) is not None
        if is_traced or is_of_forward:
            raise
        layer._propagate(op, error, ctx.buffer)


def check_gradient(*scales: Tensor | None) -> None:
    """Raise RuntimeError for an operator in FP8, which has scales, where a gradient is wanted."""
    if any(scale is not None for scale in scales):
        raise RuntimeError("an operation in FP8 has no gradient: call it under torch.no_grad()")


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x_scale, weight, plan, ctx.layer, ctx.buffer, *_ = inputs
    check_gradient(x_scale)
    ctx.num_tokens = x.shape[0]
    ctx.has_weight = weight is not None
    ctx.save_for_backward(plan, output[2])


def _dispatch_backward(ctx: Any, d_rows: Tensor, d_row_weight: Tensor,
                       *_: Any) -> tuple[Tensor | None, ...]:
    plan, recv = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_COMBINE, d_rows)
    with reporting(layer_of(ctx.layer), _C.OP_COMBINE, ctx.buffer, plan):
        check_mode(d_rows, d_row_weight, may_batch=True)
        d_rows = d_rows.contiguous()
        scalar = d_row_weight.contiguous() if ctx.has_weight else None
        dx, d_weight = torch.ops.epmoe.combine(d_rows, None, scalar, plan, recv, ctx.layer, ctx.buffer,
                                               ctx.num_tokens)
    return dx, None, d_weight if ctx.has_weight else None, *[None] * 6


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    rows, row_weight, row_scalar, plan, _, ctx.layer, ctx.buffer, *_ = inputs
    ctx.has_weight = row_weight is not None
    ctx.has_scalar = row_scalar is not None
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(plan, *((rows, row_weight) if ctx.has_weight else ()))


def row_dots(g: Tensor, rows: Tensor) -> Tensor:
    """Return the dot product of each row of g and rows: [M] float32, also under autocast."""
    with torch.autocast(g.device.type, enabled=False):
        return torch.linalg.vecdot(g.float(), rows.float())


def _combine_backward(ctx: Any, d_out: Tensor, d_scalar: Tensor) -> tuple[Tensor | None, ...]:
    # Read once: under checkpointing a second read is an error.
    plan, *weighted = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_DISPATCH, d_out)
    d_weight = None
    with reporting(layer_of(ctx.layer), _C.OP_DISPATCH, ctx.buffer, plan):
        check_mode(d_out, d_scalar, *weighted, may_batch=True)
        d_out = d_out.contiguous()
        scalar = d_scalar.contiguous() if ctx.has_scalar else None
        g, d_row_scalar, *_ = torch.ops.epmoe.dispatch(d_out, None, scalar, plan, ctx.layer, ctx.buffer,
                                                       ctx.num_rows)
    if ctx.has_weight:
        rows, row_weight = weighted
        g, d_weight = _weigh(ctx, plan, g, rows, row_weight)
    return g, d_weight, d_row_scalar if ctx.has_scalar else None, *[None] * 7


def _weigh(ctx: Any, plan: Tensor, g: Tensor, rows: Tensor,
           row_weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of rows and of their weights.  Nobody knows whether an operation follows."""
    exists = _existing(layer_of(ctx.layer), plan, g.shape[0])
    d_weight = _weight_gradient(g, rows, exists) if ctx.needs_input_grad[1] else None
    weighted = (g * row_weight[:, None]).to(g.dtype)
    return weighted if exists is None else weighted.where(exists[:, None], 0), d_weight


def _existing(layer: EPAll2AllLayer, plan: Tensor, num_rows: int) -> Tensor | None:
    """Return which of the rows came from a token, [num_rows] bool, or None: all.

    The others are padding, or after row M of a layer with a capacity.  They have no gradient, whatever they
    hold.
    """
    if layer.capacity is None and layer.expert_alignment == 1:
        return None
    num, first = layer.num_local_experts, layer.rank * layer.num_local_experts
    offsets = expert_offsets(layer, plan)
    counts = plan.narrow(0, layer._plan_front["counts"], layer.world_size * layer.num_experts)
    filled = counts.view(layer.world_size, -1).narrow(1, first, num).sum(0)
    row = torch.arange(num_rows, device=plan.device, dtype=torch.int32)
    expert = num_not_after(offsets[1:], row)  # L after the last expert's rows
    known = expert.clamp(max=num - 1)
    return (expert < num) & (row - offsets[known] < filled[known])


def _weight_gradient(g: Tensor, rows: Tensor, exists: Tensor | None) -> Tensor:
    """Return the gradient of the weights of rows [M] float32, where g is that of the weighted rows."""
    dots = row_dots(g, rows)
    return dots if exists is None else dots.where(exists, 0)


record_gradient(lib, "dispatch", _save_dispatch, _dispatch_backward)
record_gradient(lib, "combine", _save_combine, _combine_backward)


# ---- the fused kernels ----

lib.define("dispatch_gemm(Tensor x, Tensor? x_scale, Tensor? weight, Tensor plan, Tensor gemm_weight, "
           "Tensor? gemm_scale, Tensor? bias, str layer, int buffer, SymInt num_rows, float[] activation, "
           "bool requires_grad=False, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)")
# Computes nothing: FlopCounterMode counts a product of the rows with each of the weights [L, N, K].
lib.define("counted_products(Tensor rows, Tensor offsets, Tensor[] weights) -> Tensor")
lib.define("gemm_combine(Tensor a, Tensor? a_scale, Tensor gemm_weight, Tensor? gemm_scale, Tensor? bias, "
           "Tensor? row_weight, Tensor plan, Tensor recv, str layer, int buffer, SymInt num_tokens, "
           "bool requires_grad=False, Tensor? after=None) -> (Tensor, Tensor)")


def expert_offsets(layer: EPAll2AllLayer, plan: Tensor) -> Tensor:
    """Return [L + 1] int32: where the rows of each local expert begin."""
    return plan.narrow(0, layer._plan_front["expert_row"], layer.num_local_experts + 1)


def _run_dispatch_gemm(x: Tensor, x_scale: Tensor | None, weight: Tensor | None, plan: Tensor,
                       gemm_weight: Tensor, gemm_scale: Tensor | None, bias: Tensor | None, layer_id: str,
                       buffer: int, num_rows: int, activation: Kernel, requires_grad: bool = False,
                       after: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer: EpAll2AllFusedOp = layer_of(layer_id)
    with reporting(layer, _C.OP_DISPATCH_GEMM, buffer, plan, num_rows < 0):
        out, rows, row_weight, recv, _ = layer._dispatch_gemm(
            aligned(x), aligned(weight), plan, gemm_weight, bias, buffer, num_rows, activation,
            requires_grad, x_scale, gemm_scale)
    return out, rows, absent(x) if row_weight is None else row_weight, recv


def _run_gemm_combine(a: Tensor, a_scale: Tensor | None, gemm_weight: Tensor, gemm_scale: Tensor | None,
                      bias: Tensor | None, row_weight: Tensor | None, plan: Tensor, recv: Tensor,
                      layer_id: str, buffer: int, num_tokens: int, requires_grad: bool = False,
                      after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    layer: EpAll2AllFusedOp = layer_of(layer_id)
    with reporting(layer, _C.OP_GEMM_COMBINE, buffer, plan):
        return layer._gemm_combine(a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens,
                                   requires_grad, a_scale, gemm_scale)[:2]


def count_products(rows: Tensor, offsets: Tensor, *weights: Tensor | None) -> None:
    """Let a mode of torch that counts operations see products that a call of the module has made."""
    if is_watched():
        torch.ops.epmoe.counted_products(rows, offsets, [w for w in weights if w is not None])


implement(lib, "counted_products", lambda rows, offsets, weights: rows.new_empty(0))
implement(lib, "dispatch_gemm", _run_dispatch_gemm)
implement(lib, "gemm_combine", _run_gemm_combine)


@register_fake("dispatch_gemm")
def _(x: Tensor, x_scale: Tensor | None, weight: Tensor | None, plan: Tensor, gemm_weight: Tensor,
      gemm_scale: Tensor | None, bias: Tensor | None, layer_id: str, buffer: int, num_rows: Any,
      activation: Kernel, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer: EpAll2AllFusedOp = layer_of(layer_id)
    num_rows = rows_to_trace(layer, num_rows)
    row_weight = absent(x) if weight is None else x.new_empty(num_rows, dtype=torch.float32)
    columns = out_columns(gemm_weight.shape[1], activation)
    like = x.new_empty(0, dtype=layer.dtype)
    out = like.new_empty(num_rows, columns)
    rows = x.new_empty(num_rows, layer.hidden, dtype=layer.dtype if x_scale is None else x.dtype)
    return out, rows, row_weight, plan.new_empty(layer._recv_words)


@register_fake("gemm_combine")
def _(a: Tensor, a_scale: Tensor | None, gemm_weight: Tensor, gemm_scale: Tensor | None, bias: Tensor | None,
      row_weight: Tensor | None, plan: Tensor, recv: Tensor, layer_id: str, buffer: int, num_tokens: int,
      requires_grad: bool = False, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    like = a.new_empty(0, dtype=layer_of(layer_id).dtype)
    return like.new_empty(num_tokens, gemm_weight.shape[1]), like.new_empty(a.shape[0], gemm_weight.shape[1])


def _save_dispatch_gemm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, x_scale, weight, plan, gemm_weight, _, _, ctx.layer, ctx.buffer, _, ctx.activation, *_ = inputs
    check_gradient(x_scale)
    ctx.num_tokens = x.shape[0]
    ctx.has_weight = weight is not None
    ctx.deferred_wgrad = deferred_wgrad_of(gemm_weight)
    ctx.set_materialize_grads(False)  # only a second derivative has a gradient of the rows
    ctx.shape = output[0].shape
    ctx.save_for_backward(plan, gemm_weight, output[1], output[3])


def _dispatch_gemm_backward(ctx: Any, d_out: Tensor | None, of_rows: Tensor | None,
                            d_row_weight: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of x and the weights.

    of_rows: In a second derivative, the gradient of the received rows, which the first backward reads.
    """
    grad = next((g for g in (d_out, of_rows, d_row_weight) if g is not None), None)
    plan, gemm_weight, rows, recv = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_COMBINE, grad)
    layer: EpAll2AllFusedOp = layer_of(ctx.layer)
    gemm = torch.ops.epmoe.grouped_gemm
    with reporting(layer, _C.OP_COMBINE, ctx.buffer, plan):
        if ctx.activation[0]:
            raise RuntimeError("dispatch_gemm with an activation has no backward: apply the activation after "
                               "it")
        check_mode(d_out, of_rows, d_row_weight, gemm_weight, may_batch=True)
        offsets = expert_offsets(layer, plan)
        d_out = rows.new_zeros(ctx.shape) if d_out is None else d_out.contiguous()
        if d_row_weight is None:
            d_row_weight = rows.new_zeros(ctx.shape[0], dtype=torch.float32)
        d_gemm_weight = None
        if ctx.needs_input_grad[4]:
            d_gemm_weight = gradient_of(ctx.deferred_wgrad, d_out, rows, offsets)
        d_rows = gemm(d_out, gemm_weight, offsets, None, None, None, None, DGRAD, as_kernel(None), False,
                      None)
        if of_rows is not None:
            d_rows = d_rows + of_rows
        scalar = d_row_weight.contiguous() if ctx.has_weight else None
        num_tokens = ctx.num_tokens * layer._copies
        dx, d_weight = torch.ops.epmoe.combine(d_rows, None, scalar, plan, recv, ctx.layer, ctx.buffer,
                                               num_tokens)
    return (layer._by_token(dx), None, d_weight if ctx.has_weight else None, None, d_gemm_weight,
            *[None] * 8)


def _save_gemm_combine(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a, a_scale, gemm_weight, _, _, row_weight, plan, _, ctx.layer, ctx.buffer, *_ = inputs
    check_gradient(a_scale)
    ctx.has_weight = row_weight is not None
    ctx.num_rows = a.shape[0]
    ctx.set_materialize_grads(False)  # only a second derivative has a gradient of the products
    ctx.shape = output[0].shape
    ctx.deferred_wgrad = deferred_wgrad_of(gemm_weight)
    ctx.save_for_backward(plan, a, gemm_weight, *((output[1], row_weight) if ctx.has_weight else ()))


def _gemm_combine_backward(ctx: Any, d_out: Tensor | None,
                           of_rows: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of a and the weights.

    of_rows: In a second derivative, the gradient of the products, which the first backward reads.
    """
    grad = of_rows if d_out is None else d_out
    plan, a, gemm_weight, *weighted = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_DISPATCH, grad)
    layer: EpAll2AllFusedOp = layer_of(ctx.layer)
    gemm = torch.ops.epmoe.grouped_gemm
    d_weight = None
    with reporting(layer, _C.OP_DISPATCH, ctx.buffer, plan):
        check_mode(d_out, of_rows, a, gemm_weight, *weighted, may_batch=True)
        d_out = a.new_zeros(ctx.shape) if d_out is None else d_out.contiguous()
        g, *_ = torch.ops.epmoe.dispatch(d_out, None, None, plan, ctx.layer, ctx.buffer, ctx.num_rows)
    # The layer's next operation of this backward is a combine; there is none without a gradient of the rows.
    calls_combine = ctx.needs_input_grad[0]
    with reporting(layer, _C.OP_COMBINE, ctx.buffer, plan) if calls_combine else contextlib.nullcontext():
        if ctx.has_weight:
            rows, row_weight = weighted
            if ctx.needs_input_grad[5]:
                d_weight = _weight_gradient(g, rows, _existing(layer, plan, g.shape[0]))
            g = (g * row_weight[:, None]).to(g.dtype)
        if of_rows is not None:
            g = g + of_rows
        offsets = expert_offsets(layer, plan)
        da = None
        d_gemm_weight = None
        if ctx.needs_input_grad[0]:
            da = gemm(g, gemm_weight, offsets, None, None, None, None, DGRAD, as_kernel(None), False, None,
                      zeros=layer.capacity is not None)
        if ctx.needs_input_grad[2]:
            d_gemm_weight = gradient_of(ctx.deferred_wgrad, g, a, offsets)
    return da, None, d_gemm_weight, None, None, d_weight, *[None] * 7


record_gradient(lib, "dispatch_gemm", _save_dispatch_gemm, _dispatch_gemm_backward)
record_gradient(lib, "gemm_combine", _save_gemm_combine, _gemm_combine_backward)


# ---- for layer.py ----


def plan(layer: EPAll2AllLayer, indices: Tensor, scatter: Tensor | None, buffer: int) -> Tensor:
    return torch.ops.epmoe.plan(indices, scatter, layer.id, buffer)


def dispatch(layer: EPAll2AllLayer, x: Tensor, weight: Tensor | None, plan: Tensor, buffer: int,
             num_rows: int, with_grad: bool = False,
             x_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    rows, row_weight, recv, row_scale = torch.ops.epmoe.dispatch(x, x_scale, weight, plan, layer.id, buffer,
                                                                 num_rows, with_grad)
    return rows, None if weight is None else row_weight, recv, None if x_scale is None else row_scale


def combine(layer: EPAll2AllLayer, rows: Tensor, row_weight: Tensor | None, plan: Tensor,
            recv: Tensor | None, buffer: int, num_tokens: int, with_grad: bool) -> Tensor:
    return torch.ops.epmoe.combine(rows, row_weight, None, plan, recv, layer.id, buffer, num_tokens,
                                   with_grad)[0]
