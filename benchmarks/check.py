"""Checks results before they are timed: rows bit by bit, sums against float32.

The expected values come from torch's own collectives.  Each stand-in expert multiplies its rows by a power of
two that depends on the expert.  So a row at the wrong expert, or a weight at the wrong row, changes the sums.
"""

import contextlib

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def poisoned():
    """Fill the memory of torch.empty with NaN or the largest integer, so that unwritten results are seen."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def experts(rows, offsets, first_expert):
    """Return the output of the stand-in experts for rows [M, H], which begin at offsets [L + 1]."""
    expert = torch.arange(len(offsets) - 1, device=rows.device) + first_expert
    factor = torch.exp2((expert % 4).float() - 1).to(rows.dtype)
    return rows * factor.repeat_interleave(offsets.diff().long(), output_size=len(rows))[:, None]


def rows_error(rows, row_weight, torch_peer):
    """Return what is wrong with dispatched rows [M, H] and weights [M], or ""."""
    theirs = torch_peer.dispatch()
    if rows.shape != theirs.shape:
        return f"dispatch: wanted rows of shape {tuple(theirs.shape)}, got {tuple(rows.shape)}"
    if not torch.equal(rows, theirs):
        wrong = int((rows != theirs).any(1).sum())
        return f"dispatch: {wrong} of {len(rows)} rows differ from those of torch's collectives"
    if row_weight is not None and not torch.equal(row_weight, torch_peer.row_weights()):
        return "dispatch: the weights are not in the order of their rows"
    return ""


def sums_error(y, rows, torch_peer, slack=1.0):
    """Return what is wrong with y [T, H], the weighted sums of rows [M, H], or "".

    The bound on the error is the sum of magnitudes times two roundings to y's dtype (a partial sum and the
    sum) and K roundings to float32, times slack.
    """
    want, most = torch_peer.combine(rows.float()), torch_peer.combine(rows.float().abs())
    eps = torch.finfo(y.dtype).eps + 4 * torch_peer.topk * torch.finfo(torch.float32).eps
    bad = ~((y.float() - want).abs() <= slack * eps * most)
    wrong = int(bad.any(1).sum())
    return f"combine: {wrong} of {len(y)} tokens differ from those of torch's collectives" if wrong else ""
