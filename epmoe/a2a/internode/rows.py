"""The way of rows between nodes, and its gradients: out to the nodes of a token's experts, and home.

Each is the backward of the other.  Out: a token is copied to each node where it has an expert, once.  Home:
the rows of a token are rounded to rail_dtype, added up in node order, in float32, and rounded once.  Rows of
the own node are rounded too; they are copied in memory and never cross the rail.
"""

import torch

from ...comm import validation
from ...torch_modes import check_mode


def out(layout, x, scalar):
    """Return the tokens [A, H] that this rank has for its node, and their scalars [A, K] or None.

    x: [T, H]; scalar: [T, K] or None.
    """
    nodes, own = layout.layer.nodes, layout.num_own
    sent, received = layout.splits()
    results = []
    for t in (x, scalar):
        if t is None:
            results.append(None)
            continue
        arrived = t.new_empty(own + sum(received), t.shape[1])
        arrived[:own], leaving = layout.pick(t)
        nodes._exchange_rows(arrived[own:], leaving, received, sent)
        results.append(arrived)
    return results


def home(layout, rows, scalar):
    """Return the sums [T, H] of this rank's tokens, and the scalars [T, K] of their choices, or None.

    rows: [A, H], one for each token of out(); scalar: [A, K] or None.  The scalar of a choice comes from the
    node that owns the choice; the others have none of it.
    """
    rounded = rows.to(layout.layer.rail_dtype)
    total = _returned(layout, rounded, _add, torch.float32)
    return layout.finish_sums(total, rows.dtype), None if scalar is None else scalars_home(layout, scalar)


def scalars_home(layout, scalar):
    """Return the scalars [T, K] of the choices of this rank's tokens.  scalar: [A, K]."""
    return layout.finish_sums(_returned(layout, scalar, _select, scalar.dtype), scalar.dtype)


def _returned(layout, rows, put, dtype):
    nodes, own = layout.layer.nodes, layout.num_own
    sent, received = layout.splits()
    back = rows.new_empty(sum(sent), rows.shape[1])
    nodes._exchange_rows(back, rows[own:].contiguous(), sent, received)
    total = layout.make_sums(rows, dtype)
    for node, first, end in layout.sent_segments():
        part = rows[:own] if node == layout.layer.node else back[first - own : end - own]
        put(total, layout.send_idx[first:end], part, layout.owner, node)
    return total


def _add(total, at, part, owner, node):
    total.index_add_(0, at, part.float())  # no token is twice in `at`: the order of a sum is that of nodes


def _select(total, at, part, owner, node):
    total[at] = torch.where(owner[at] == node, part, total[at])


def meet_backward(layout, op, *tensors):
    """Meet before the rows of a backward move, so that an error of one rank reaches all."""
    layer = layout.layer
    try:
        check_mode(*tensors, may_batch=False)
    except Exception as error:
        layer._meet(op, error=error)
    layer._meet(op, layout)


class Out(torch.autograd.Function):
    """out(); the backward is home()."""

    @staticmethod
    def forward(ctx, x, scalar, layout, met):
        ctx.layout = layout
        ctx.has_scalar = scalar is not None
        if not met:
            meet_backward(layout, validation.COMBINE_BACKWARD, x)
        return tuple(out(layout, x, scalar))

    @staticmethod
    def backward(ctx, d_rows, d_scalar):
        d_scalar = d_scalar.contiguous() if ctx.has_scalar else None
        dx, d_scalar = Home.apply(d_rows.contiguous(), d_scalar, ctx.layout, False)
        return dx, d_scalar, None, None


class Home(torch.autograd.Function):
    """home(); the backward is out()."""

    @staticmethod
    def forward(ctx, rows, scalar, layout, met):
        ctx.layout = layout
        ctx.has_scalar = scalar is not None
        if not met:
            meet_backward(layout, validation.DISPATCH_BACKWARD, rows)
        return home(layout, rows, scalar)

    @staticmethod
    def backward(ctx, d_out, d_scalar):
        d_scalar = d_scalar.contiguous() if ctx.has_scalar else None
        d_rows, d_scalar = Out.apply(d_out.contiguous(), d_scalar, ctx.layout, False)
        return d_rows, d_scalar, None, None
