"""torch.ops.epmoe.*: the stages as operators, so that autograd and torch.compile see them.

dispatch and combine are each other's backward: what dispatch copies, its backward adds up, and the other
way round.  An operator names its layer by a text.  A result that is absent is a tensor without dimensions.
`after` is not looked at: see inductor.py.
"""

import contextlib
import weakref

import torch

from . import _C
from .gemm import aligned, untraced

layers = weakref.WeakValueDictionary()  # id -> layer
_lib = torch.library.Library("epmoe", "DEF")
_lib.define("plan(Tensor exp_indices, Tensor? scatter, str layer, int buffer, Tensor? after=None) -> Tensor")
_lib.define("dispatch(Tensor x, Tensor? weight, Tensor plan, str layer, int buffer, SymInt num_rows, "
            "bool requires_grad=False, Tensor? after=None) -> (Tensor, Tensor, Tensor)")
_lib.define("combine(Tensor rows, Tensor? row_weight, Tensor? row_scalar, Tensor plan, Tensor recv, str layer, int buffer, "
            "SymInt num_tokens, bool requires_grad=False, Tensor? after=None) -> (Tensor, Tensor)")


def _layer(idx):
    layer = layers.get(idx)
    if layer is None:
        raise RuntimeError(f"epmoe layer {idx} does not exist any more")
    return layer


def _absent(like):
    """Stands for "no tensor" among the results, which must all be tensors."""
    return like.new_empty((), dtype=torch.float32)


# ---- what runs ----


def _plan(exp_indices, scatter, layer, buffer, after=None):
    return _layer(layer)._plan(exp_indices, scatter, buffer)


def _dispatch(x, weight, plan, layer, buffer, num_rows, requires_grad=False, after=None):
    layer = _layer(layer)
    if num_rows < 0:
        num_rows = layer._num_rows(plan, buffer)
    rows, row_weight, recv = layer._dispatch(aligned(x), aligned(weight), plan, buffer, num_rows, requires_grad)
    return rows, _absent(x) if row_weight is None else row_weight, recv


def _combine(rows, row_weight, row_scalar, plan, recv, layer, buffer, num_tokens, requires_grad=False, after=None):
    out, out_scalar = _layer(layer)._combine(aligned(rows), aligned(row_weight), aligned(row_scalar), plan, recv, buffer, num_tokens,
                                             requires_grad)
    return out, _absent(rows) if out_scalar is None else out_scalar


for _name, _f in (("plan", _plan), ("dispatch", _dispatch), ("combine", _combine)):
    _lib.impl(_name, untraced(_f), "CompositeExplicitAutograd")


# ---- what a tracer sees ----


def register_fake(name):
    """What an operator gives, for who traces.  Every rank enters every operation, also one whose result it does not need, and all in one
    order: a compiler must not leave it out, nor move it."""
    torch.fx.node.has_side_effect(getattr(torch.ops.epmoe, name).default)

    def register(fn):
        @torch.library.register_fake(f"epmoe::{name}", lib=_lib)
        def fake(*args, **kwargs):
            from .inductor import keep_order  # slow to import, and there if a compiler is

            keep_order()
            return fn(*args, **kwargs)

    return register


def _rows_to_trace(num_rows):
    """-1: as many as there will be when it runs."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

    return torch.library.get_ctx().new_dynamic_size() if guard_or_false(num_rows < 0) else num_rows


@register_fake("plan")
def _(exp_indices, scatter, layer, buffer, after=None):
    return exp_indices.new_empty(_layer(layer)._plan_words(exp_indices.shape[0]), dtype=torch.int32)


@register_fake("dispatch")
def _(x, weight, plan, layer, buffer, num_rows, requires_grad=False, after=None):
    layer, num_rows = _layer(layer), _rows_to_trace(num_rows)
    row_weight = _absent(x) if weight is None else x.new_empty(num_rows, dtype=torch.float32)
    return x.new_empty(num_rows, layer.hidden, dtype=layer.dtype), row_weight, plan.new_empty(layer._recv_words)


@register_fake("combine")
def _(rows, row_weight, row_scalar, plan, recv, layer, buffer, num_tokens, requires_grad=False, after=None):
    layer = _layer(layer)
    out_scalar = _absent(rows) if row_scalar is None else rows.new_empty(num_tokens, layer.topk, dtype=torch.float32)
    return rows.new_empty(num_tokens, layer.hidden, dtype=layer.dtype), out_scalar


# ---- backward ----


@contextlib.contextmanager
def telling(layer, op, buffer, plan):
    """What fails in here, the other ranks hear of in op, which is their next one: a tensor for which there is no memory, say."""
    try:
        yield
    except Exception as error:
        if type(plan) is not torch.Tensor:  # only a tracer was here
            raise
        layer._refuse(op, error, buffer)


def _save_dispatch(ctx, inputs, output):
    x, weight, plan, ctx.layer, ctx.buffer, *_ = inputs
    ctx.num_tokens, ctx.has_weight = x.shape[0], weight is not None
    ctx.save_for_backward(plan, output[2])


def _dispatch_backward(ctx, d_rows, d_row_weight, _):
    plan, recv = ctx.saved_tensors
    with telling(_layer(ctx.layer), _C.OP_COMBINE, ctx.buffer, plan):
        d_rows, scalar = d_rows.contiguous(), d_row_weight.contiguous() if ctx.has_weight else None
    dx, d_weight = torch.ops.epmoe.combine(d_rows, None, scalar, plan, recv, ctx.layer, ctx.buffer, ctx.num_tokens)
    return dx, d_weight if ctx.has_weight else None, *[None] * 6


def _save_combine(ctx, inputs, output):
    rows, row_weight, row_scalar, plan, _, ctx.layer, ctx.buffer, *_ = inputs
    ctx.has_weight, ctx.has_scalar, ctx.num_rows = row_weight is not None, row_scalar is not None, rows.shape[0]
    ctx.save_for_backward(plan, *((rows, row_weight) if ctx.has_weight else ()))


def row_dots(g, rows):
    """[M] float32, also under autocast."""
    with torch.autocast(g.device.type, enabled=False):
        return torch.linalg.vecdot(g.float(), rows.float())


def _combine_backward(ctx, d_out, d_scalar):
    plan, *weighted = ctx.saved_tensors  # read once: under checkpointing a second read is an error
    d_weight = None
    with telling(_layer(ctx.layer), _C.OP_DISPATCH, ctx.buffer, plan):
        d_out, d_scalar = d_out.contiguous(), d_scalar.contiguous() if ctx.has_scalar else None
    g, d_row_scalar, _ = torch.ops.epmoe.dispatch(d_out, d_scalar, plan, ctx.layer, ctx.buffer, ctx.num_rows)
    if ctx.has_weight:
        rows, row_weight = weighted
        d_weight = row_dots(g, rows) if ctx.needs_input_grad[1] else None
        g = (g * row_weight[:, None]).to(g.dtype)
    return g, d_weight, d_row_scalar if ctx.has_scalar else None, *[None] * 7


torch.library.register_autograd("epmoe::dispatch", _dispatch_backward, setup_context=_save_dispatch, lib=_lib)
torch.library.register_autograd("epmoe::combine", _combine_backward, setup_context=_save_combine, lib=_lib)


# ---- for layer.py ----


def is_watched():
    """Whether somebody besides autograd wants to see operators: a compiler, a tracer, a mode.  Else the module is called as it is, which
    takes some microseconds less."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def is_transformed():
    """Whether this is inside of one of torch.func's transforms, which would take the operators' gradients for zeros."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def requires_grad(*tensors):
    """Whether a gradient flows through a call with these, so that a call of the backward follows on it."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def plan(layer, exp_indices, scatter, buffer):
    return torch.ops.epmoe.plan(exp_indices, scatter, layer.id, buffer)


def dispatch(layer, x, weight, plan, buffer, num_rows, with_grad):
    rows, row_weight, recv = torch.ops.epmoe.dispatch(x, weight, plan, layer.id, buffer, num_rows, with_grad)
    return rows, None if weight is None else row_weight, recv


def combine(layer, rows, row_weight, plan, recv, buffer, num_tokens, with_grad):
    return torch.ops.epmoe.combine(rows, row_weight, None, plan, recv, layer.id, buffer, num_tokens, with_grad)[0]
