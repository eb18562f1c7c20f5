"""The way of rows between nodes, and its gradients: out to the nodes of a token's experts, and back.

Each is the backward of the other.  Out: a token is copied to each node where it has an expert, once.  Return:
the rows of a token are rounded to rail_dtype, added up in node order, in float32, and rounded once.  Rows of
the own node are rounded too; they are copied in memory and never cross the rail.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...comm import validation
from ...torch_modes import check_backward
from .plan import NodesLayout


def out(layout: NodesLayout, x: Tensor, scalar: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the tokens [A, H] that this rank has for its node, and their scalars [A, K] or None.

    x: [T, H]; scalar: [T, K] or None.
    """
    return _arrived(layout, x), None if scalar is None else _arrived(layout, scalar)


def _arrived(layout: NodesLayout, t: Tensor) -> Tensor:
    own = layout.num_own
    sent, received = layout.splits()
    arrived = t.new_empty(own + sum(received), t.shape[1])
    arrived[:own], leaving = layout.pick(t)
    layout.layer.nodes._exchange_rows(arrived[own:], leaving, received, sent)
    return arrived


def return_rows(layout: NodesLayout, rows: Tensor, scalar: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the sums [T, H] of this rank's tokens, and the scalars [T, K] of their choices, or None.

    rows: [A, H], one for each token of out(); scalar: [A, K] or None.  The scalar of a choice comes from the
    node that owns the choice; the others have none of it.
    """
    rounded = rows.to(layout.layer.rail_dtype)
    total = _returned(layout, rounded, _add, torch.float32)
    return layout.finish_sums(total, rows.dtype), None if scalar is None else scalars_back(layout, scalar)


def scalars_back(layout: NodesLayout, scalar: Tensor) -> Tensor:
    """Return the scalars [T, K] of the choices of this rank's tokens.  scalar: [A, K]."""
    return layout.finish_sums(_returned(layout, scalar, _select, scalar.dtype), scalar.dtype)


def _returned(layout: NodesLayout, rows: Tensor, put: Callable[[Tensor, Tensor, Tensor, Tensor, int], None],
              dtype: torch.dtype) -> Tensor:
    nodes, own = layout.layer.nodes, layout.num_own
    sent, received = layout.splits()
    back = rows.new_empty(sum(sent), rows.shape[1])
    nodes._exchange_rows(back, rows[own:].contiguous(), sent, received)
    total = layout.make_sums(rows, dtype)
    for node, first, end in layout.sent_segments():
        part = rows[:own] if node == layout.layer.node else back[first - own : end - own]
        put(total, layout.send_idx[first:end], part, layout.owner, node)
    return total


def _add(total: Tensor, at: Tensor, part: Tensor, owner: Tensor, node: int) -> None:
    total.index_add_(0, at, part.float())  # no token is twice in `at`: the order of a sum is that of nodes


def _select(total: Tensor, at: Tensor, part: Tensor, owner: Tensor, node: int) -> None:
    total[at] = torch.where(owner[at] == node, part, total[at])


def validate_backward(layout: NodesLayout, op: int, *tensors: Tensor) -> None:
    """Validate a backward before its rows move, so that an error of one rank reaches all."""
    layer = layout.layer
    try:
        check_backward(*tensors)
        if layout.of_experts_in_16_bits and torch.is_grad_enabled():
            raise NotImplementedError(f"create_graph=True: the experts have no second derivatives in "
                                      f"{layer.dtype}: use dtype=torch.float32")
    except Exception as error:
        layer._validate(op, error=error)
    layer._validate(op, layout)


class Out(torch.autograd.Function):
    """out(); the backward is return_rows()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalar: Tensor | None,
                layout: NodesLayout) -> tuple[Tensor, Tensor | None]:
        ctx.layout = layout
        ctx.has_scalar = scalar is not None
        return out(layout, x, scalar)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_scalar: Tensor) -> tuple[Tensor | None, ...]:
        validate_backward(ctx.layout, validation.DISPATCH_BACKWARD, d_rows)
        scalar = d_scalar.contiguous() if ctx.has_scalar else None
        dx, scalar = Return.apply(d_rows.contiguous(), scalar, ctx.layout)
        return dx, scalar, None


class Return(torch.autograd.Function):
    """return_rows(); the backward is out()."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scalar: Tensor | None,
                layout: NodesLayout) -> tuple[Tensor, Tensor | None]:
        ctx.layout = layout
        ctx.has_scalar = scalar is not None
        return return_rows(layout, rows, scalar)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_scalar: Tensor) -> tuple[Tensor | None, ...]:
        validate_backward(ctx.layout, validation.COMBINE_BACKWARD, d_out)
        scalar = d_scalar.contiguous() if ctx.has_scalar else None
        d_rows, scalar = Out.apply(d_out.contiguous(), scalar, ctx.layout)
        return d_rows, scalar, None
