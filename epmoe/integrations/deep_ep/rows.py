"""What the rows are that travel: tokens, and beside them indices, weights and scales.  Checks of tensors."""

import torch

from ... import _C
from ...a2a.base import DTYPES


def to_ranks(is_token_in_rank):
    """Return the choices [T, W] of tokens that go to these ranks: the rank itself, or -1."""
    ranks = torch.arange(is_token_in_rank.shape[1], dtype=torch.int32, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, ranks, -1)


def to_ranks_by_choice(topk_idx, num_experts, num_ranks):
    """Return the ranks of choices [T, K] as choices [T, W]: -1s, then ranks by the last choice at each."""
    is_choice = (topk_idx >= 0) & (topk_idx < num_experts)
    rank = torch.where(is_choice, topk_idx // (num_experts // num_ranks), num_ranks).long()
    k = torch.arange(topk_idx.shape[1], dtype=torch.int32, device=topk_idx.device).expand(topk_idx.shape)
    last = k.new_full((len(topk_idx), num_ranks + 1), -1)
    last, ranks = last.scatter_reduce_(1, rank, k, "amax")[:, :-1].sort(1)
    return torch.where(last >= 0, ranks, -1).to(torch.int32)


def numbered(num_tokens, num_ranks, device):
    """Return the bits of the numbers of the tokens as weights [T, W], which dispatch moves unchanged."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device).view(torch.float32)
    return tokens[:, None].expand(-1, num_ranks).contiguous()



def as_rows(x):
    """Return tokens as rows of a dtype that layers have: numbers of one byte travel two by two."""
    return x.view(torch.bfloat16) if x.element_size() == 1 else x


def rows_key(x):
    return (torch.bfloat16, x.shape[1] // 2) if x.element_size() == 1 else (x.dtype, x.shape[1])


def num_words(*columns):
    """Return the float32 words of a row of pack()."""
    return -(-sum(c.shape[1] for c in columns if c is not None) // 4) * 4


def pack(*columns):
    """Return tensors [T, .] of 4-byte numbers side by side, as rows of float32, which move bit by bit."""
    words = torch.cat([c.view(torch.int32) for c in columns if c is not None], 1)
    return torch.nn.functional.pad(words, (0, -words.shape[1] % 4)).view(torch.float32)


def unpack(rows, *columns):
    """Return tensors [M, .] with the dtypes and widths of the columns that were packed; None for None."""
    at, found = 0, []
    for c in columns:
        width = 0 if c is None else c.shape[1]
        found.append(None if c is None else rows[:, at : at + width].contiguous().view(c.dtype))
        at += width
    return found


def check_rows(name, x, device):
    """Check a tensor whose rows are to be sent."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(x).__name__}")
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"{name}: wanted a contiguous tensor [num_tokens, hidden], got {list(x.shape)}")
    if x.element_size() != 1 and x.dtype not in DTYPES:
        raise TypeError(f"{name}: wanted bfloat16, float16, float32 or float8_e4m3fn, got {x.dtype}")
    if x.shape[1] == 0 or x.shape[1] * x.element_size() % 16:
        raise ValueError(f"{name}: a token has {x.shape[1]} numbers of {x.dtype}: wanted a multiple of 16 "
                         f"bytes")
    check_device(name, x, device)


def check_device(name, t, device):
    if t.device != device:
        raise ValueError(f"{name}: wanted a tensor on {device}, where the buffer is, got one on {t.device}")


def check_tensor(name, t, device, dtype, *shape):
    """Check a tensor's dtype and shape; a size of None is any."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(t).__name__}")
    if t.is_nested or t.layout is not torch.strided:
        raise ValueError(f"{name}: wanted a dense tensor, got one of layout "
                         f"{'nested' if t.is_nested else t.layout}")
    if t.shape == shape and t.dtype == dtype and t.device == device:
        return
    if t.dtype != dtype:
        raise TypeError(f"{name}: wanted {dtype}, got {t.dtype}")
    if t.dim() != len(shape) or any(w is not None and w != n for w, n in zip(shape, t.shape)):
        wanted = ", ".join("*" if d is None else str(d) for d in shape)
        raise ValueError(f"{name}: wanted shape [{wanted}], got {list(t.shape)}")
    check_device(name, t, device)


# ---- tokens with what belongs to them ----


def meta_key(*columns):
    """Return the key of the layer that moves what pack() returns, or None without columns."""
    num = num_words(*columns)
    return (torch.float32, num) if num else None


def dispatch_tokens(plan, x, scales, topk_idx, topk_weights, num_local_experts):
    """Send tokens, with their scales, indices and weights or None, to their ranks.

    Returns what this rank receives: (x, scales, local indices, weights, numbers of the tokens at their
    sources).  An index of another rank's expert becomes -1, and its weight 0.
    """
    world = plan.routes.world
    plan.routes.note(_C.OP_DISPATCH, x, topk_idx, topk_weights, scales)
    rows, numbers = plan.dispatch(as_rows(x), numbered(len(x), world.size, x.device))
    most = world.size * num_local_experts  # no expert, also where the index has more than 32 bits
    idx = None if topk_idx is None else (topk_idx.clamp(-1, most) + 1).to(torch.int32)  # 0: an absent row
    columns = idx, topk_weights, scales
    if meta_key(*columns):
        idx, topk_weights, scales = unpack(plan.dispatch(pack(*columns))[0], *columns)
    if idx is not None:
        idx = idx - (1 + world.rank * num_local_experts)
        idx = torch.where((idx >= 0) & (idx < num_local_experts), idx, -1).to(topk_idx.dtype)
        if topk_weights is not None:
            topk_weights = topk_weights.masked_fill(idx < 0, 0)
    return rows.view(x.dtype), scales, idx, topk_weights, numbers.view(torch.int32)


def combine_tokens(plan, x, topk_weights, biases):
    """Return the sums over the ranks of x [M, H], plus the biases, and of topk_weights [M, K] or None."""
    plan.routes.note(_C.OP_COMBINE, x, topk_weights)
    out = plan.combine(x, biases=biases)[0]
    if topk_weights is None:
        return out, None
    return out, plan.combine(pack(topk_weights))[0][:, : topk_weights.shape[1]].contiguous()


def count_choices(topk_idx, num_experts, num_ranks):
    """Return the tokens for each rank [W] int32 and each expert [E] int32, and which go where [T, W] bool."""
    device = topk_idx.device
    idx = torch.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, num_experts).long()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    per_expert.scatter_add_(0, idx.flatten(), torch.ones_like(idx, dtype=torch.int32).flatten())
    is_in = torch.zeros(len(idx), num_ranks + 1, dtype=torch.bool, device=device)
    is_in.scatter_(1, idx // (num_experts // num_ranks), True)
    is_in = is_in[:, :-1].contiguous()
    return is_in.sum(0, dtype=torch.int32), per_expert[:-1].clone(), is_in


def biases_of(bias):
    """Return the 0, 1 or 2 biases of a combine as a tuple."""
    if bias is None:
        return ()
    biases = (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
    if len(biases) > 2:
        raise ValueError(f"bias: wanted a tensor or a tuple of two, got {len(biases)}")
    return tuple(b for b in biases if b is not None)


def check_scales(scales, x, device):
    """Check the scales [T, S] of tokens, in any strides."""
    if not isinstance(scales, torch.Tensor):
        raise TypeError(f"the scales of x: wanted a tensor, got {type(scales).__name__}")
    if x.element_size() != 1:
        raise TypeError(f"x has scales, but is of {x.dtype}: wanted float8_e4m3fn")
    if scales.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"the scales of x: wanted float32 or int32, got {scales.dtype}")
    check_tensor("the scales of x", scales, device, scales.dtype, len(x), None)


def check_topk_idx(topk_idx, device, num_tokens=None, num_topk=None):
    if isinstance(topk_idx, torch.Tensor) and topk_idx.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"topk_idx: wanted int64 or int32, got {topk_idx.dtype}")
    check_tensor("topk_idx", topk_idx, device, getattr(topk_idx, "dtype", None), num_tokens, num_topk)
