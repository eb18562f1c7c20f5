"""The oracle: what epmoe computes, in plain PyTorch, in one process.

It uses no code of epmoe, except the activations (activations.py), which are plain PyTorch too.

Letters: W ranks, E experts, L = E/W experts of a rank, T tokens, K choices, H hidden, I inner, M rows of a
rank. "Per rank" means a list with one entry for each rank.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .gemm.activations import Activation, activate

Plan: TypeAlias = dict[str, Any]  # what plan returns


def plan(indices: Sequence[Tensor], num_experts: int, expert_alignment: int = 1,
         expert_capacity: int | None = None) -> Plan:
    """Compute where every choice goes.

    Args:
        indices: Per rank [T, K] integers, the experts of each token; -1 and E mean dropped.  T may differ.
        num_experts: E, a multiple of the number of ranks.
        expert_alignment: The rows of an expert are padded to a multiple of it.
        expert_capacity: None, or the rows of each expert, with padding; it has no more choices.

    Returns:
        A dict: counts [W, E], the choices of rank w for expert e; rows, per rank [M, 3] of (source rank,
            token, choice) in row order, and -1 for a padding row; expert_rows [E], the rows of each expert,
            with padding; token_row, per rank [T, K], the row at the expert's rank, or -1; send_tokens [W, W],
            the distinct tokens from rank to rank.  All are int64 on the CPU.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> p = reference.plan([torch.tensor([[0, 1]]), torch.tensor([[1, -1]])], num_experts=2)
        >>> p["counts"].tolist()
        [[1, 1], [0, 1]]
        >>> p["rows"][1].tolist()  # rank 1 holds expert 1
        [[0, 0, 1], [1, 0, 0]]
    """
    num_ranks = len(indices)
    local = num_experts // num_ranks
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int64, device="cpu")
    send_tokens = torch.zeros(num_ranks, num_ranks, dtype=torch.int64, device="cpu")
    of_ranks = []  # (expert, source, token, choice) of every choice that is not dropped
    for w, idx in enumerate(indices):
        idx = idx.long().cpu()
        t, k = torch.nonzero((idx >= 0) & (idx < num_experts), as_tuple=True)
        e = idx[t, k]
        counts[w] = torch.bincount(e, minlength=num_experts)
        for r in range(num_ranks):
            send_tokens[w, r] = torch.unique(t[e // local == r]).numel()
        of_ranks.append(torch.stack([e, torch.full_like(t, w), t, k], 1))
    entries = torch.cat(of_ranks)
    order = torch.argsort(entries[:, 0], stable=True)  # the list is ordered by source, token, choice already
    entries = entries[order]
    token_row = [torch.full(tuple(i.shape), -1, dtype=torch.int64, device="cpu") for i in indices]
    rows = []
    num = counts.sum(0)
    expert_rows = -(-num // expert_alignment) * expert_alignment
    if expert_capacity is not None:
        expert_rows = torch.full_like(num, expert_capacity)
    for r in range(num_ranks):
        mine = entries[entries[:, 0] // local == r]
        here = slice(r * local, (r + 1) * local)
        padding = (expert_rows - num)[here]
        at = torch.arange(len(mine), device="cpu") + (padding.cumsum(0) - padding)[mine[:, 0] - r * local]
        rows.append(mine.new_full((int(expert_rows[here].sum()), 3), -1).index_copy(0, at, mine[:, 1:]))
        for w in range(num_ranks):
            of = mine[:, 1] == w
            token_row[w][mine[of, 2], mine[of, 3]] = at[of]
    return {"counts": counts, "rows": rows, "expert_rows": expert_rows, "token_row": token_row,
            "send_tokens": send_tokens}


def dispatch(xs: Sequence[Tensor], p: Plan) -> list[Tensor]:
    """Compute the rows that every rank receives.

    Args:
        xs: Per rank [T, H], the tokens.
        p: The result of plan.

    Returns:
        Per rank [M, H], on the device of xs[0].

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> p = reference.plan([torch.tensor([[0], [1]]), torch.tensor([[0]])], num_experts=2)
        >>> reference.dispatch([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])], p)
        [tensor([[1.],
                [3.]]), tensor([[2.]])]
    """
    out = []
    for rows in p["rows"]:
        got = xs[0].new_zeros(len(rows), *xs[0].shape[1:])
        for w, x in enumerate(xs):
            of = rows[:, 0] == w
            got[of.to(got.device)] = x[rows[of, 1].to(x.device)]
        out.append(got)
    return out


def dispatch_weights(ws: Sequence[Tensor], p: Plan) -> list[Tensor]:
    """Compute the weights of the rows that every rank receives.

    Args:
        ws: Per rank [T, K], the routing weights.
        p: The result of plan.

    Returns:
        Per rank [M], on the device of ws[0].

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> p = reference.plan([torch.tensor([[1, 0]])], num_experts=2)
        >>> reference.dispatch_weights([torch.tensor([[0.25, 0.75]])], p)
        [tensor([0.7500, 0.2500])]
    """
    out = []
    for rows in p["rows"]:
        got = ws[0].new_zeros(len(rows))
        for w, weight in enumerate(ws):
            # Numbers of rows, not a mask: with a mask, torch converts a single number to float64, and a
            # signalling NaN becomes quiet.
            of = (rows[:, 0] == w).nonzero()[:, 0]
            got[of.to(got.device)] = weight[rows[of, 1].to(weight.device), rows[of, 2].to(weight.device)]
        out.append(got)
    return out


def combine(ys: Sequence[Tensor], p: Plan, indices: Sequence[Tensor], num_experts: int,
            weights: Sequence[Tensor] | None = None, local_combine: bool = False,
            fp8: bool = False) -> list[Tensor]:
    """Compute the sum of each token's rows.

    Products and sums are rounded to float32 one by one, over k = 0, 1, ...  With local_combine they go over
    the choices at each rank first; each partial sum is rounded to the rows' dtype; then over ranks 0, 1, ...

    Args:
        ys: Per rank [M, H], the rows.
        p: The result of plan.
        indices: As for plan.
        num_experts: E.
        weights: None, or per rank [M], the weight of each row.
        local_combine: Whether to sum at the expert's rank first, as enable_local_combine does.
        fp8: With local_combine: whether the partial sums of other ranks are quantised, as
            LowLatencyAll2All.combine does.

    Returns:
        Per rank [T, H], of the rows' dtype.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> indices = [torch.tensor([[0, 1]])]
        >>> p = reference.plan(indices, num_experts=2)
        >>> reference.combine([torch.tensor([[1.0], [10.0]])], p, indices, num_experts=2)
        [tensor([[11.]])]
    """
    num_ranks = len(indices)
    local = num_experts // num_ranks
    device, dtype, hidden = ys[0].device, ys[0].dtype, ys[0].shape[1]
    out = []
    for rank, (idx, at) in enumerate(zip(indices, p["token_row"])):
        total = torch.zeros(len(idx), hidden, dtype=torch.float32, device=device)
        for group in range(num_ranks) if local_combine else [None]:
            partial = torch.zeros(len(idx), hidden, dtype=torch.float32, device=device)
            for k in range(idx.shape[1]):
                for r in range(num_ranks) if group is None else [group]:
                    of = (at[:, k] >= 0) & (idx[:, k].long().cpu() // local == r)
                    row = at[of, k].to(device)
                    term = ys[r][row].float()
                    if weights is not None:
                        term = weights[r][row, None] * term
                    partial[of.to(device)] += term
            if local_combine:
                partial = partial.to(dtype).float()
            if fp8 and group != rank:
                q, scales = quantize_fp8(partial)
                partial = (q.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)
            total = total + partial if local_combine else partial
        out.append(total.to(dtype))
    return out


def quantize_fp8(x: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise rows to float8_e4m3fn, with a scale for each 128 numbers.

    The scale is the largest magnitude / 448, computed in float32.  A group of zeros has a tiny scale.  A NaN
    does not change the scale.

    Args:
        x: [.., H] floating point; H is a multiple of 128.
        pow2: Round each scale up to a power of two.

    Returns:
        A tuple (q, scales): [.., H] float8_e4m3fn and [.., H / 128] float32.  x is about q * scale.

    Raises:
        RuntimeError: Where H is not a multiple of 128.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> q, scales = reference.quantize_fp8(torch.full((1, 128), 7.0, dtype=torch.bfloat16))
        >>> q[0, 0].item(), scales.tolist()
        (448.0, [[0.015625]])

    References:
        DeepSeek-V3 Technical Report, section 3.3.2: 1x128 groups of activations.
    """
    groups = x.float().unflatten(-1, (-1, 128))
    most = groups.abs().nan_to_num(0.0, math.inf).amax(-1).clamp(min=2.0**-100)
    scales = most / torch.full_like(most, 448)  # to divide by a number, torch multiplies by 1 / 448 on a GPU
    if pow2:  # add 1 to the exponent if the mantissa is not 0, then clear the mantissa
        scales = (scales.view(torch.int32) + 0x7fffff & 0x7f800000).view(torch.float32)
    q = (groups * (1 / scales)[..., None]).to(torch.float8_e4m3fn)
    return q.flatten(-2), scales


def quantize_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights to float8_e4m3fn, with a scale for each block of 128 by 128 numbers.

    Args:
        weight: [L, N, K] floating point.  The last blocks are smaller where N or K is no multiple of 128.

    Returns:
        A tuple (q, scales): [L, N, K] float8_e4m3fn and [L, ceil(N / 128), ceil(K / 128)] float32.

    Raises:
        RuntimeError: For another number of dimensions.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> q, scales = reference.quantize_fp8_weight(torch.full((1, 130, 128), 7.0))
        >>> q[0, 129, 0].item(), scales.tolist()
        (448.0, [[[0.015625], [0.015625]]])

    References:
        DeepSeek-V3 Technical Report, section 3.3.2: 128x128 blocks of weights.
    """
    magnitudes = weight.float().abs().nan_to_num(0.0, math.inf)
    most = F.max_pool2d(magnitudes, 128, ceil_mode=True).clamp(min=2.0**-100)
    scales = most / torch.full_like(most, 448)
    inverse = (1 / scales).repeat_interleave(128, 1).repeat_interleave(128, 2)
    q = weight.float() * inverse[:, :weight.shape[1], :weight.shape[2]]
    return q.to(torch.float8_e4m3fn), scales


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Pack scales that are powers of two: the exponent + 127 of each in a byte, four bytes in a word.

    Args:
        scales: [.., G] float32 powers of two; G is a multiple of 4.

    Returns:
        [.., G / 4] int32.  The lowest byte of a word is of the first of its four scales.

    Raises:
        RuntimeError: Where G is not a multiple of 4.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> [hex(word) for word in reference.pack_ue8m0(torch.tensor([1.0, 2.0, 4.0, 0.5]))]
        ['0x7e81807f']

    References:
        OCP Microscaling Formats (MX) Specification 1.0, section 5.4.1: E8M0.
    """
    exponents = (scales.view(torch.int32) >> 23 & 0xff).to(torch.uint8)
    return exponents.unflatten(-1, (-1, 4)).contiguous().view(torch.int32).squeeze(-1)


def moe(x: Tensor, idx: Tensor, weight: Tensor, gate_up_proj: Tensor, down_proj: Tensor,
        activation: Activation = "swiglu", gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None) -> Tensor:
    """Apply a Mixture-of-Experts layer, expert after expert.  Differentiable, for any floating-point dtype.

    Args:
        x: [.., H], the tokens.
        idx: [.., K] integers, the experts of each token; -1 and E mean dropped.
        weight: [.., K], the weight of each choice.
        gate_up_proj: [E, 2I, H], or [E, I, H] for an activation without a gate.
        down_proj: [E, H, I].
        activation: As for activate.
        gate_up_bias: None, or [E, 2I] ([E, I] without a gate).
        down_bias: None, or [E, H].

    Returns:
        [.., H], of x's dtype.

    Raises:
        ValueError: As activate.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> one = torch.ones(1, 1, 1)
        >>> reference.moe(torch.tensor([[2.0]]), torch.tensor([[0]]), torch.tensor([[0.5]]), one, one, "gelu")
        tensor([[0.9772]])
    """
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    idx = idx.reshape(-1, idx.shape[-1])
    weight = weight.reshape(-1, weight.shape[-1])
    y = torch.zeros_like(x)
    for e in range(gate_up_proj.shape[0]):
        t, k = torch.nonzero(idx == e, as_tuple=True)
        h = F.linear(x[t], gate_up_proj[e], None if gate_up_bias is None else gate_up_bias[e])
        h = F.linear(activate(h, activation), down_proj[e], None if down_bias is None else down_bias[e])
        y = y.index_add(0, t, h * weight[t, k, None].to(h.dtype))
    return y.reshape(shape)
