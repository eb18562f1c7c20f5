"""The oracle: what epmoe computes, in plain PyTorch, in one process, without a line of epmoe's own code.

epmoe itself takes `activate` from here, where no kernel of its own applies an activation (gemm.py, fused.py).

Letters: W ranks, E experts, L = E/W, T tokens, K choices, H hidden, I inner.  Lists have one entry a rank.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F


def plan(indices, num_experts):
    """Where every choice goes.  indices: [T_w, K] of each rank; -1 and E are dropped.

    Returns a dict: counts [W, E]; rows: per rank [M, 3] int64 of (source rank, token, choice), in row order;
    token_row: per rank [T, K], row at the expert's rank or -1; send_tokens [W, W], distinct tokens from rank to rank.
    """
    num_ranks, local = len(indices), num_experts // len(indices)
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int64)
    send_tokens = torch.zeros(num_ranks, num_ranks, dtype=torch.int64)
    entries = []  # (expert, source, token, choice) of everything that is sent
    for w, idx in enumerate(indices):
        idx = idx.long().cpu()
        t, k = torch.nonzero((idx >= 0) & (idx < num_experts), as_tuple=True)
        e = idx[t, k]
        counts[w] = torch.bincount(e, minlength=num_experts)
        for r in range(num_ranks):
            send_tokens[w, r] = torch.unique(t[e // local == r]).numel()
        entries.append(torch.stack([e, torch.full_like(t, w), t, k], 1))
    entries = torch.cat(entries)
    order = torch.argsort(entries[:, 0], stable=True)  # the list is by source, token, choice already
    entries = entries[order]
    token_row = [torch.full(tuple(i.shape), -1, dtype=torch.int64) for i in indices]
    rows = []
    for r in range(num_ranks):
        mine = entries[entries[:, 0] // local == r]
        rows.append(mine[:, 1:])
        at = torch.arange(len(mine))
        for w in range(num_ranks):
            of = mine[:, 1] == w
            token_row[w][mine[of, 2], mine[of, 3]] = at[of]
    return {"counts": counts, "rows": rows, "token_row": token_row, "send_tokens": send_tokens}


def dispatch(xs, p):
    """Rows of every rank: per rank [M, H], from xs, per rank [T, H]."""
    out = []
    for rows in p["rows"]:
        got = xs[0].new_empty(len(rows), *xs[0].shape[1:])
        for w, x in enumerate(xs):
            of = rows[:, 0] == w
            got[of.to(got.device)] = x[rows[of, 1].to(x.device)]
        out.append(got)
    return out


def dispatch_weights(ws, p):
    """Weights of every rank's rows: per rank [M], from ws, per rank [T, K]."""
    out = []
    for rows in p["rows"]:
        got = ws[0].new_empty(len(rows))
        for w, weight in enumerate(ws):
            of = rows[:, 0] == w
            got[of.to(got.device)] = weight[rows[of, 1].to(weight.device), rows[of, 2].to(weight.device)]
        out.append(got)
    return out


def combine(ys, p, indices, num_experts, weights=None, local_combine=False):
    """Each token's sum: per rank [T, H], from ys, per rank [M, H], and weights, per rank [M] or None.

    Products and sums are rounded to float32 one by one, over k = 0, 1, ...; with local_combine over the
    choices of each rank first, each partial sum rounded to the rows' dtype, then over ranks 0, 1, ...
    """
    num_ranks, local = len(indices), num_experts // len(indices)
    out = []
    for idx, at in zip(indices, p["token_row"]):
        device, dtype, hidden = ys[0].device, ys[0].dtype, ys[0].shape[1]
        total = torch.zeros(len(idx), hidden, device=device)
        for group in range(num_ranks) if local_combine else [None]:
            partial = torch.zeros(len(idx), hidden, device=device)
            for k in range(idx.shape[1]):
                for r in range(num_ranks) if group is None else [group]:
                    of = (at[:, k] >= 0) & (idx[:, k].long().cpu() // local == r)
                    row = at[of, k].to(device)
                    term = ys[r][row].float()
                    if weights is not None:
                        term = weights[r][row, None] * term
                    partial[of.to(device)] += term
            total = total + partial.to(dtype).float() if local_combine else partial
        out.append(total.to(dtype))
    return out


class GptOss(NamedTuple):
    """The activation of GPT-OSS, with other numbers than that model's: (up + 1) * gate * sigmoid(alpha * gate), where gate <= limit and
    |up| <= limit; a limit of infinity is none."""

    alpha: float = 1.702
    limit: float = 7.0


def gpt_oss_numbers(activation):
    """(alpha, limit) of "gpt_oss" or a GptOss; None of any other.  Raises ValueError where there is no such activation."""
    if activation == "gpt_oss":
        activation = GptOss()
    if not isinstance(activation, GptOss):
        return None
    alpha, limit = map(float, activation)
    if not (abs(alpha) < math.inf and limit > 0):
        raise ValueError(f"activation {activation}: wanted a finite alpha and a positive limit")
    return alpha, limit


def activate(h, activation="swiglu"):
    """Gate and up halves [.., 2I] to [.., I] (swiglu, gpt_oss), or h itself (gelu).

    swiglu: silu(gate) * up, gate rows first (DeepSeek, Qwen, Mixtral checkpoints).
    gpt_oss: interleaved gate, up; gate <= 7, |up| <= 7; (up + 1) * gate * sigmoid(1.702 * gate) (GPT-OSS); GptOss(alpha, limit) has
        other numbers.
    """
    if activation == "gelu":
        return F.gelu(h)
    if activation == "swiglu":
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    if numbers := gpt_oss_numbers(activation):
        if h.dtype in (torch.float16, torch.bfloat16):  # in between are numbers that these do not have
            return activate(h.float(), activation).to(h.dtype)
        alpha, limit = numbers
        gate, up = h[..., 0::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    raise ValueError(f"activation {activation!r}: swiglu, gpt_oss or gelu, or GptOss(alpha, limit)")


def moe(x, idx, weight, gate_up_proj, down_proj, activation="swiglu", gate_up_bias=None, down_bias=None):
    """A Mixture-of-Experts layer, expert after expert: x [.., H], idx and weight [.., K], gate_up_proj [E, 2I, H]
    ([E, I, H] for gelu), down_proj [E, H, I], biases [E, 2I] and [E, H].  Differentiable, any floating dtype."""
    shape, num_experts = x.shape, gate_up_proj.shape[0]
    x, idx, weight = x.reshape(-1, shape[-1]), idx.reshape(-1, idx.shape[-1]), weight.reshape(-1, weight.shape[-1])
    y = torch.zeros_like(x)
    for e in range(num_experts):
        t, k = torch.nonzero(idx == e, as_tuple=True)
        h = F.linear(x[t], gate_up_proj[e], None if gate_up_bias is None else gate_up_bias[e])
        h = F.linear(activate(h, activation), down_proj[e], None if down_bias is None else down_bias[e])
        y = y.index_add(0, t, h * weight[t, k, None].to(h.dtype))
    return y.reshape(shape)
