"""torch.ops.epmoe.nodes_*: the ways between nodes as operators, for compiled code; see epmoe/a2a/ops.py.

    nodes_plan   validates the call, exchanges the indices, and says which tokens this rank sends and has
    nodes_out    brings tokens to the nodes of their experts
    nodes_return   bring rows back and adds them up

nodes_out and nodes_return are each other's backward.  `call` is the call that all ranks validate first
(validation.py), or -1 where they have validated it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...comm import validation
from ...torch_modes import implement, new_size, record_gradient
from ..ops import absent, lib, register_fake
from ..layout import Layout
from . import plan, rows

if TYPE_CHECKING:
    from ...moe.module import EPMoE
    from .layer import InternodeLayer

layers: weakref.WeakValueDictionary[str, InternodeLayer] = weakref.WeakValueDictionary()  # id -> layer
lib.define("nodes_plan(Tensor x, Tensor? weight, Tensor indices, str layer, bool gradients, "
           "Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)")
lib.define("nodes_out(Tensor x, Tensor? scalar, Tensor send_idx, Tensor owner, Tensor counts, str layer, "
           "SymInt num_here, int call, Tensor? after=None) -> (Tensor, Tensor)")
lib.define("nodes_return(Tensor rows, Tensor? scalar, Tensor send_idx, Tensor owner, Tensor counts, "
           "str layer, SymInt num_tokens, int call, bool gradients=False, Tensor? after=None) -> (Tensor, "
           "Tensor)")


def _plan(x: Tensor, weight: Tensor | None, indices: Tensor, layer_id: str, gradients: bool,
          after: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the experts here [A, K], the tokens to send [S], the node of each choice, and counts [3, N].

    counts: tokens sent, tokens received, and N times the number of the plan.
    """
    layer = layers[layer_id]
    try:
        layer._checked(x, indices, weight, None, None, 0)
    except Exception as error:
        layer._validate(validation.PLAN, error=error)
    layer._validate(validation.PLAN, weights=weight is not None, gradients=gradients)
    layout = layer._plan_rail(indices, 0)
    counts = torch.tensor([layout.send_tokens, layout.recv_tokens, [layout.number] * layer.num_nodes],
                          device="cpu", dtype=torch.int64)
    return layout.indices, layout.send_idx, layout.owner, counts


def _out(x: Tensor, scalar: Tensor | None, send_idx: Tensor, owner: Tensor, counts: Tensor, layer_id: str,
         num_here: int, call: int, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    layer = layers[layer_id]
    layout = plan.NodesLayout.of_tensors(layer, send_idx, owner, counts)
    if call >= 0:
        layer._validate(call, layout)
    with layer._ending():
        out, out_scalar = rows.out(layout, x, scalar)
    return out, absent(x) if out_scalar is None else out_scalar


def _return(rows_: Tensor, scalar: Tensor | None, send_idx: Tensor, owner: Tensor, counts: Tensor,
          layer_id: str, num_tokens: int, call: int, gradients: bool = False,
          after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    layer = layers[layer_id]
    layout = plan.NodesLayout.of_tensors(layer, send_idx, owner, counts)
    if call >= 0:
        layer._validate(call, layout, gradients=gradients)
    with layer._ending():
        out, out_scalar = rows.return_rows(layout, rows_, scalar)
    return out, absent(rows_) if out_scalar is None else out_scalar


implement(lib, "nodes_plan", _plan)
implement(lib, "nodes_out", _out)
implement(lib, "nodes_return", _return)


@register_fake("nodes_plan")
def _(x: Tensor, weight: Tensor | None, indices: Tensor, layer_id: str, gradients: bool,
      after: Tensor | None = None) -> tuple[Tensor, ...]:
    here, sent = new_size(breaks_graph=False), new_size(breaks_graph=False)  # as rows_to_trace
    return (indices.new_empty(here, indices.shape[1], dtype=torch.int32),
            indices.new_empty(sent, dtype=torch.int64), torch.empty_like(indices),
            torch.empty(3, layers[layer_id].num_nodes, dtype=torch.int64, device="cpu"))


@register_fake("nodes_out")
def _(x: Tensor, scalar: Tensor | None, send_idx: Tensor, owner: Tensor, counts: Tensor, layer_id: str,
      num_here: int, call: int, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out_scalar = absent(x) if scalar is None else scalar.new_empty(num_here, scalar.shape[1])
    return x.new_empty(num_here, x.shape[1]), out_scalar


@register_fake("nodes_return")
def _(rows_: Tensor, scalar: Tensor | None, send_idx: Tensor, owner: Tensor, counts: Tensor, layer_id: str,
      num_tokens: int, call: int, gradients: bool = False,
      after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out_scalar = absent(rows_) if scalar is None else scalar.new_empty(num_tokens, scalar.shape[1])
    return rows_.new_empty(num_tokens, rows_.shape[1]), out_scalar


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    t, scalar, send_idx, owner, counts, ctx.layer, *_ = inputs
    ctx.num = t.shape[0]
    ctx.has_scalar = scalar is not None
    ctx.save_for_backward(send_idx, owner, counts)


def _out_backward(ctx: Any, d_rows: Tensor, d_scalar: Tensor) -> tuple[Tensor | None, ...]:
    scalar = d_scalar.contiguous() if ctx.has_scalar else None
    dx, d_scalar = torch.ops.epmoe.nodes_return(d_rows.contiguous(), scalar, *ctx.saved_tensors, ctx.layer,
                                              ctx.num, validation.DISPATCH_BACKWARD)
    return dx, d_scalar if ctx.has_scalar else None, *[None] * 7


def _return_backward(ctx: Any, d_out: Tensor, d_scalar: Tensor) -> tuple[Tensor | None, ...]:
    scalar = d_scalar.contiguous() if ctx.has_scalar else None
    d_rows, d_scalar = torch.ops.epmoe.nodes_out(d_out.contiguous(), scalar, *ctx.saved_tensors, ctx.layer,
                                                 ctx.num, validation.COMBINE_BACKWARD)
    return d_rows, d_scalar if ctx.has_scalar else None, *[None] * 8


record_gradient(lib, "nodes_out", _save, _out_backward)
record_gradient(lib, "nodes_return", _save, _return_backward)


def apply(layer: InternodeLayer, moe: EPMoE, gradients: bool, x: Tensor, topk_idx: Tensor,
          topk_weights: Tensor) -> tuple[Tensor, Layout | None]:
    """Apply the experts of an EPMoE as operators, for a compiler.  Returns (y, layout of the node)."""
    here_idx, *kept = torch.ops.epmoe.nodes_plan(x, topk_weights, topk_idx, layer.id, gradients)
    here, weight = torch.ops.epmoe.nodes_out(x, topk_weights, *kept, layer.id, here_idx.shape[0], -1)
    y, layout = moe._compute(layer.team_layer, here, here_idx, weight)
    y = torch.ops.epmoe.nodes_return(y, None, *kept, layer.id, x.shape[0], validation.COMBINE, gradients)[0]
    return y, layout
