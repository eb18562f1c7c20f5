"""torch.ops.epmoe.*: the stages as operators, so that autograd and torch.compile see them.

dispatch and combine are each other's backward: the backward of dispatch adds up what dispatch copied, and the
backward of combine copies what combine added up.  An operator names its layer by the text layer.id.  A result
that is absent is a tensor without dimensions.  `after` orders operators and is not read: see inductor.py.
"""

import weakref

import torch
from torch._library.fake_impl import allocate_size

from .. import _C
from ..comm.refusals import reporting
from ..gemm.grouped import aligned
from ..torch_modes import check_mode, implement

layers = weakref.WeakValueDictionary()  # id -> layer
lib = torch.library.Library("epmoe", "DEF")
lib.define("plan(Tensor indices, Tensor? scatter, str layer, int buffer, Tensor? after=None) -> Tensor")
lib.define("dispatch(Tensor x, Tensor? weight, Tensor plan, str layer, int buffer, SymInt num_rows, "
           "bool requires_grad=False, Tensor? after=None) -> (Tensor, Tensor, Tensor)")
lib.define("combine(Tensor rows, Tensor? row_weight, Tensor? row_scalar, Tensor plan, Tensor recv, str "
           "layer, int buffer, SymInt num_tokens, bool requires_grad=False, Tensor? after=None) -> (Tensor, "
           "Tensor)")


def layer_of(idx):
    layer = layers.get(idx)
    if layer is None:
        raise RuntimeError(f"this process has no epmoe layer {idx}: keep a reference to the layer while "
                           f"compiled code or a backward uses it; a program that was made in another process "
                           f"names a layer of that process, and cannot be used here")
    return layer


def absent(like):
    """Return the result that means "no tensor": an operator's results must all be tensors."""
    return like.new_empty((), dtype=torch.float32)


# ---- implementations ----


def _plan(indices, scatter, layer, buffer, after=None):
    return layer_of(layer)._plan(indices, scatter, buffer)


def _dispatch(x, weight, plan, layer, buffer, num_rows, requires_grad=False, after=None):
    layer = layer_of(layer)
    with reporting(layer, _C.OP_DISPATCH, buffer, plan, num_rows < 0):
        rows, row_weight, recv = layer._dispatch(aligned(x), aligned(weight), plan, buffer, num_rows,
                                                 requires_grad)
    return rows, absent(x) if row_weight is None else row_weight, recv


def _combine(rows, row_weight, row_scalar, plan, recv, layer, buffer, num_tokens, requires_grad=False,
             after=None):
    layer = layer_of(layer)
    with reporting(layer, _C.OP_COMBINE, buffer, plan):
        none = absent(rows) if row_scalar is None else None  # before the operation: after it no rank waits
        out, out_scalar = layer._combine(aligned(rows), aligned(row_weight), aligned(row_scalar), plan, recv,
                                         buffer, num_tokens, requires_grad)
    return out, none if out_scalar is None else out_scalar


for _name, _f in (("plan", _plan), ("dispatch", _dispatch), ("combine", _combine)):
    implement(lib, _name, _f)


# ---- fake implementations, for tracers ----


def register_fake(name):
    """Return a decorator that registers the fake implementation of an operator.

    Every rank enters every operation, also one whose result it does not need, and all in the same order.  So
    the operator is marked as having a side effect: a compiler must not remove or move it.
    """
    torch.fx.node.has_side_effect(getattr(torch.ops.epmoe, name).default)

    def register(fn):
        @torch.library.register_fake(f"epmoe::{name}", lib=lib)
        def fake(*args, **kwargs):
            check_not_exported()
            from .inductor import keep_order  # slow to import; a compiler has imported most of it

            keep_order()
            return fn(*args, **kwargs)

    return register


def check_not_exported():
    """Raise RuntimeError inside of torch.export.

    An operator names a layer by its number in this process.  An exported program may be loaded in another
    process, and would then use whatever layer has the number there.
    """
    if torch.compiler.is_exporting():
        raise RuntimeError("torch.export: a layer of epmoe is memory that the ranks of this process's group "
                           "share, which an exported program cannot hold: export the parts of the model "
                           "around it, or use torch.compile")


def rows_to_trace(layer, num_rows):
    """Return num_rows, or a new dynamic size for -1: the number is known only when the operator runs.

    By default torch.compile breaks the graph at an operator of dynamic size, because code that uses the size
    may be untraceable.  That of EPMoE is traceable, and its layers ask for no break.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

    if not guard_or_false(num_rows < 0):
        return num_rows
    tracer = torch.library.get_ctx()
    if layer.is_of_module and tracer._shape_env is not None:
        return allocate_size(tracer._shape_env)
    return tracer.new_dynamic_size()


@register_fake("plan")
def _(indices, scatter, layer, buffer, after=None):
    return indices.new_empty(layer_of(layer)._plan_words(indices.shape[0]), dtype=torch.int32)


@register_fake("dispatch")
def _(x, weight, plan, layer, buffer, num_rows, requires_grad=False, after=None):
    layer = layer_of(layer)
    num_rows = rows_to_trace(layer, num_rows)
    row_weight = absent(x) if weight is None else x.new_empty(num_rows, dtype=torch.float32)
    return x.new_empty(num_rows, layer.hidden,
                       dtype=layer.dtype), row_weight, plan.new_empty(layer._recv_words)


@register_fake("combine")
def _(rows, row_weight, row_scalar, plan, recv, layer, buffer, num_tokens, requires_grad=False, after=None):
    layer = layer_of(layer)
    if row_scalar is None:
        out_scalar = absent(rows)
    else:
        out_scalar = rows.new_empty(num_tokens, layer.topk, dtype=torch.float32)
    return rows.new_empty(num_tokens, layer.hidden, dtype=layer.dtype), out_scalar


# ---- backward ----


def saved_tensors(ctx, layer, op, grad):
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
        is_of_forward = error.__traceback__.tb_next is not None
        if is_traced or is_of_forward:
            raise
        layer._refuse(op, error, ctx.buffer)


def _save_dispatch(ctx, inputs, output):
    x, weight, plan, ctx.layer, ctx.buffer, *_ = inputs
    ctx.num_tokens = x.shape[0]
    ctx.has_weight = weight is not None
    ctx.save_for_backward(plan, output[2])


def _dispatch_backward(ctx, d_rows, d_row_weight, _):
    plan, recv = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_COMBINE, d_rows)
    with reporting(layer_of(ctx.layer), _C.OP_COMBINE, ctx.buffer, plan):
        check_mode(d_rows, d_row_weight, may_batch=True)
        d_rows = d_rows.contiguous()
        scalar = d_row_weight.contiguous() if ctx.has_weight else None
        dx, d_weight = torch.ops.epmoe.combine(d_rows, None, scalar, plan, recv, ctx.layer, ctx.buffer,
                                               ctx.num_tokens)
    return dx, d_weight if ctx.has_weight else None, *[None] * 6


def _save_combine(ctx, inputs, output):
    rows, row_weight, row_scalar, plan, _, ctx.layer, ctx.buffer, *_ = inputs
    ctx.has_weight = row_weight is not None
    ctx.has_scalar = row_scalar is not None
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(plan, *((rows, row_weight) if ctx.has_weight else ()))


def row_dots(g, rows):
    """Return the dot product of each row of g and rows: [M] float32, also under autocast."""
    with torch.autocast(g.device.type, enabled=False):
        return torch.linalg.vecdot(g.float(), rows.float())


def _combine_backward(ctx, d_out, d_scalar):
    # Read once: under checkpointing a second read is an error.
    plan, *weighted = saved_tensors(ctx, layer_of(ctx.layer), _C.OP_DISPATCH, d_out)
    d_weight = None
    with reporting(layer_of(ctx.layer), _C.OP_DISPATCH, ctx.buffer, plan):
        check_mode(d_out, d_scalar, *weighted, may_batch=True)
        d_out = d_out.contiguous()
        d_scalar = d_scalar.contiguous() if ctx.has_scalar else None
        g, d_row_scalar, _ = torch.ops.epmoe.dispatch(d_out, d_scalar, plan, ctx.layer, ctx.buffer,
                                                      ctx.num_rows)
    if ctx.has_weight:
        g, d_weight = _weigh(g, *weighted, ctx.needs_input_grad[1])
    return g, d_weight, d_row_scalar if ctx.has_scalar else None, *[None] * 7


def _weigh(g, rows, row_weight, needs_weight):
    """Return the gradients of rows and of their weights.  Nobody knows whether an operation follows."""
    d_weight = row_dots(g, rows) if needs_weight else None
    return (g * row_weight[:, None]).to(g.dtype), d_weight


torch.library.register_autograd("epmoe::dispatch", _dispatch_backward, setup_context=_save_dispatch, lib=lib)
torch.library.register_autograd("epmoe::combine", _combine_backward, setup_context=_save_combine, lib=lib)


# ---- for layer.py ----


def plan(layer, indices, scatter, buffer):
    return torch.ops.epmoe.plan(indices, scatter, layer.id, buffer)


def dispatch(layer, x, weight, plan, buffer, num_rows, with_grad):
    rows, row_weight, recv = torch.ops.epmoe.dispatch(x, weight, plan, layer.id, buffer, num_rows, with_grad)
    return rows, None if weight is None else row_weight, recv


def combine(layer, rows, row_weight, plan, recv, buffer, num_tokens, with_grad):
    return torch.ops.epmoe.combine(rows, row_weight, None, plan, recv, layer.id, buffer, num_tokens,
                                   with_grad)[0]
