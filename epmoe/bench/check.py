"""What is looked at before it is timed: rows bit by bit, sums against float32, both by way of torch's own collectives.

The experts' stand-in multiplies a row by a power of two that its expert chooses, so a row that went to the wrong
expert, or a weight that met the wrong row, is seen in the sums.
"""

import contextlib

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def poisoned():
    """Memory that torch.empty hands out holds NaN, or the largest integer: what nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def experts(rows, offsets, first_expert):
    """Rows [M, H] of local experts, which begin at offsets [L + 1], as the stand-in leaves them."""
    expert = torch.arange(len(offsets) - 1, device=rows.device) + first_expert
    factor = torch.exp2((expert % 4).float() - 1).to(rows.dtype)
    return rows * factor.repeat_interleave(offsets.diff().long(), output_size=len(rows))[:, None]


def rows_error(rows, row_weight, torch_peer):
    """What is wrong with dispatched rows [M, H] and weights [M], or ""."""
    theirs = torch_peer.dispatch()
    if rows.shape != theirs.shape:
        return f"dispatch: {tuple(rows.shape)} rows instead of {tuple(theirs.shape)}"
    if not torch.equal(rows, theirs):
        return f"dispatch: {int((rows != theirs).any(1).sum())} of {len(rows)} rows are not those of torch's way"
    if row_weight is not None and not torch.equal(row_weight, torch_peer.row_weights()):
        return "dispatch: weights are not with their rows"
    return ""


def sums_error(y, rows, torch_peer, slack=1.0):
    """What is wrong with y [T, H], the weighted sums of rows [M, H], or "".

    Bound: two roundings to y's dtype (a partial sum and the sum) and K in float32, of the sum of magnitudes; times slack.
    """
    want, most = torch_peer.combine(rows.float()), torch_peer.combine(rows.float().abs())
    eps = torch.finfo(y.dtype).eps + 4 * torch_peer.topk * torch.finfo(torch.float32).eps
    bad = ~((y.float() - want).abs() <= slack * eps * most)
    return f"combine: {int(bad.any(1).sum())} of {len(y)} tokens are not what torch's way gives" if bad.any() else ""
