"""The grouped GEMM with what LoRA needs: a product of low rank that is added before anything is rounded.

    FORWARD  act(a[r] @ b[e].T + low_a[r] @ low_b[e].T + bias[e])   low_a [M, R], low_b [L, N, R]
    DGRAD    a[r] @ b[e] + low_a[r] @ low_b[e]                      low_a [M, R], low_b [L, R, K]

On a GPU and in 16 bits on a CPU it is one kernel, which reads R more values of the contraction.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from .. import _C
from ..torch_modes import call, implement
from .activations import activate
from .grouped import DGRAD, FORWARD, Kernel, _lib, _out_shape, activation_of, aligned, has_kernel
from .grouped import rows_of_experts, tile_counter

Factors = tuple[Tensor, Tensor]  # low_a, low_b

_lib.define("grouped_gemm_low_rank(Tensor a, Tensor b, Tensor offsets, Tensor? bias, Tensor? low_a, Tensor? "
            "low_b, int kind, bool saves, bool portable, int activation, float alpha, float limit) -> "
            "(Tensor, Tensor)")


def multiply(a: Tensor, b: Tensor, offsets: Tensor, low: Factors | None, kind: int = FORWARD,
             kernel: Kernel = (0, 0.0, 0.0), bias: Tensor | None = None,
             saves: bool = False, portable: bool = False) -> tuple[Tensor, Tensor]:
    """Return (out, saved).  No gradients.

    kernel: of as_kernel, for FORWARD.  bias: [L, N] of a's dtype, for FORWARD.  saved: with saves, for an
    activation, the product with its bias before the activation [M, N], rounded; else an empty tensor.
    portable: use the kernel for any GPU also on a Hopper GPU.
    """
    tensors = a, b, offsets, bias, *(low or (None, None))
    results = call("grouped_gemm_low_rank", tensors, kind, saves, portable, *kernel)
    return cast("tuple[Tensor, Tensor]", results)


def _by_expert(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, low: Factors | None, kind: int,
               out: Tensor, saved: Tensor, kernel: Kernel) -> None:
    """Compute it by torch, one expert after the other, for any device and sizes.  The host reads offsets."""
    wide = torch.promote_types(a.dtype, torch.float32)
    named = activation_of(*kernel)
    with torch.autocast(a.device.type, enabled=False):
        for e, begin, end in rows_of_experts(offsets, a.shape[0]):
            y = torch.zeros((), dtype=wide, device=a.device)
            for rows, weight in ((a, b), *(() if low is None else (low,))):
                w = weight[e].to(wide)
                y = y + rows[begin:end].to(wide) @ (w if kind == DGRAD else w.t())
            y = y if bias is None else y + bias[e].to(wide)
            if len(saved):
                saved[begin:end] = y
            out[begin:end] = y if named is None else activate(y, named)


def _grouped_gemm_low_rank(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, low_a: Tensor | None,
                           low_b: Tensor | None, kind: int, saves: bool, portable: bool, activation: int,
                           alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    out = a.new_empty(_out_shape(a, b, offsets, kind, activation))
    saved = a.new_empty((a.shape[0], b.shape[1]) if saves else (0, b.shape[1]))
    low = None if low_a is None or low_b is None else (low_a, low_b)
    if not has_kernel(a, b) or low is not None and not has_kernel(*low):
        _by_expert(a, b, offsets, bias, low, kind, out, saved, (activation, alpha, limit))
        return out, saved
    if a.device.type == "cpu":
        rows_of_experts(offsets, a.shape[0])  # raises
    a, b, offsets, bias = aligned(a), aligned(b), aligned(offsets), aligned(bias)
    low_a, low_b = (None, None) if low is None else map(aligned, low)
    _C.grouped_gemm(kind, activation, alpha, limit, a, b, offsets, bias, None, tile_counter(a), out, portable,
                    None, None, None, saved if saves else None, low_a, low_b)
    return out, saved


implement(_lib, "grouped_gemm_low_rank", _grouped_gemm_low_rank)


@torch.library.register_fake("epmoe::grouped_gemm_low_rank", lib=_lib)
def _(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, low_a: Tensor | None, low_b: Tensor | None,
      kind: int, saves: bool, portable: bool, activation: int, alpha: float,
      limit: float) -> tuple[Tensor, Tensor]:
    return (a.new_empty(_out_shape(a, b, offsets, kind, activation)),
            a.new_empty((a.shape[0], b.shape[1]) if saves else (0, b.shape[1])))
