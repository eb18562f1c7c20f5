"""The arguments of EPMoE, compared between the ranks, and of EPMoE.forward, as rows of tokens.

Errors have the names that the caller knows.
"""

import torch

from ..comm.refusals import check_plain
from ..errors import EpMismatch

_DESCRIPTION_BYTES = 256  # of the experts, padded, in an exchange


def agree(world, mine):
    """Raise EpMismatch on all ranks if they have different experts.  Collective.

    The layer does not know these arguments.  Without this check different experts would give wrong sums.
    """
    descriptions = world.exchange(mine.encode().ljust(_DESCRIPTION_BYTES))
    for rank, its in enumerate(descriptions):
        if its != descriptions[0]:
            its, first = (d.decode(errors="replace").rstrip() for d in (its, descriptions[0]))
            raise EpMismatch(f"ranks disagree: rank {rank} has experts of {its}, rank 0 of "
                             f"{first}. Create the module with the same arguments on all ranks.")


def check_shared(layer, hidden, topk, num_physical, dtype):
    """Raise ValueError if a module has other sizes than the layer that it shares."""
    for name, got, want in (("hidden", hidden, layer.hidden), ("topk", topk, layer.topk * layer._copies),
                            ("physical experts", num_physical, layer.num_experts),
                            ("dtype", dtype, layer.dtype)):
        if got != want:
            raise ValueError(f"{name} {got}, but the shared layer has {want}: must be the same")


def flatten(name, t, size):
    """Return [.., size] as [T, size], contiguous."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(t).__name__}")
    if t.is_nested or t.layout is not torch.strided:
        raise ValueError(f"{name}: wanted a dense tensor, got one of layout "
                         f"{'nested' if t.is_nested else t.layout}")
    check_plain(name, t)
    # a compiler cannot tell the other ranks: the layer checks it
    if t.dim() and torch.compiler.is_compiling():
        size = t.shape[-1]
    if t.dim() == 0 or t.shape[-1] != size:
        raise ValueError(f"{name}: wanted shape [.., {size}], got {list(t.shape)}")
    return t.reshape(-1, size).contiguous()


def unflatten(t, shape):
    """Return t [T, H], which nothing else refers to, as [.., H].

    Not as a view for autograd, because FSDP's hooks fail on `y += ...` of a view.
    """
    return torch.ops.aten._unsafe_view(t, (*shape[:-1], t.shape[-1]))


def check(layer, most, x, topk_idx, topk_weights):
    """Check what flatten has returned.  The layer would refuse it too, but under other names.

    most: The most tokens of a call.
    """
    if torch.compiler.is_compiling():
        return
    if x.dtype != layer.dtype:
        raise TypeError(f"x: wanted {layer.dtype}, the dtype of the module, got {x.dtype}")
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx: wanted int32 or int64, got {topk_idx.dtype}")
    if not topk_weights.dtype.is_floating_point:
        raise TypeError(f"topk_weights: wanted a floating-point dtype, got {topk_weights.dtype}")
    for name, t in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if t.device != layer.device:
            raise ValueError(f"{name}: wanted a tensor on {layer.device}, where the module is, got one on "
                             f"{t.device}")
        if t.shape[0] != x.shape[0]:
            raise ValueError(f"x has {x.shape[0]} tokens, but {name} has {t.shape[0]}: must be the same")
    if x.shape[0] > most:
        raise ValueError(f"x has {x.shape[0]} tokens: must be at most max_tokens, {most}")
