"""EPMoE with weights in FP8: what is checked, and how weights are quantised.  There are no gradients.

The weights are those of FP8 checkpoints: numbers of float8_e4m3fn, and a scale in float32 for each block of
128 by 128.  Tokens are quantised before they are sent, with a scale for each 128 numbers of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.device import integer
from ..gemm.activations import Activation, gpt_oss_numbers, is_gated
from ..gemm.grouped import FP8_BLOCK
from ..gemm.quantize import quantize_fp8_weight
from .weights import WEIGHTS, Encoded, Source, WeightFormat

if TYPE_CHECKING:
    from .module import EPMoE

E4M3 = torch.float8_e4m3fn
SCALE = "_scale_inv"  # what the name of its scales has after that of a parameter


def _scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of weights of a shape [.., N, K]."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


class Fp8(WeightFormat):
    """Weights in FP8."""

    title = "FP8"
    has_gradients = False
    sends_fp8 = True
    ends = "", SCALE
    endings = "weight", "weight_scale_inv"

    def __init__(self, dtype: torch.dtype, hidden: int, inner: int, activation: Activation) -> None:
        super().__init__(E4M3, dtype)
        if dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"dtype {dtype} with weights in FP8: must be torch.bfloat16 or torch.float16")
        if integer("hidden", hidden) % FP8_BLOCK:
            raise ValueError(f"hidden {hidden} with weights in FP8: must be a multiple of {FP8_BLOCK}")
        # a block of the first linear map may not have rows of both gates and ups
        if is_gated(activation) and not gpt_oss_numbers(activation) and inner % FP8_BLOCK:
            raise ValueError(f"inner {inner} with weights in FP8 and the activation {activation!r}: must be "
                             f"a multiple of {FP8_BLOCK}")

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {end: (shape, dtype)} of the parameters of weights [L, N, K]."""
        return {"": (shape, E4M3), SCALE: (_scales_shape(shape), torch.float32)}

    def _check_dtypes(self, moe: EPMoE) -> None:
        if not all(getattr(moe, name).dtype == E4M3 and getattr(moe, name + SCALE).dtype == torch.float32
                   for name in WEIGHTS):
            raise TypeError(f"the parameters are {moe.gate_up_proj.dtype} and their scales "
                            f"{moe.gate_up_proj_scale_inv.dtype} now, but FP8 needs torch.float8_e4m3fn and "
                            f"torch.float32: do not cast the module; load its state dict again")

    def dequantized(self, moe: EPMoE, name: str) -> Tensor:
        """Return the weights of a name [L, N, K] in the layer's dtype, each rounded once."""
        q, scales = getattr(moe, name).detach(), getattr(moe, name + SCALE).detach()
        wide = scales.repeat_interleave(FP8_BLOCK, 1)[:, :q.shape[1]]
        return (q.float() * wide.repeat_interleave(FP8_BLOCK, 2)[:, :, :q.shape[2]]).to(self.dtype)

    def encode(self, numbers: Tensor, name: str = "weights") -> Encoded:
        """Return numbers [L, N, K] of 16 or 32 bits as the parameters hold them."""
        q, scales = quantize_fp8_weight(numbers)
        return {"": q, SCALE: scales}

    def read(self, source: Source) -> Encoded:
        """Return what the parameters get from a state dict: {} after a report."""
        t = source.get("weight", source.shape)
        if t is None:
            return {}
        if t.dtype == E4M3:
            scales = source.get("weight_scale_inv", _scales_shape(source.shape))
            return {"": t} if scales is None else {"": t, SCALE: scales}
        if t.dtype.itemsize == 1:
            source.refuse("weight", f"wanted torch.float8_e4m3fn, or 16 or 32 bits to quantise, got "
                                    f"{t.dtype}.")
            return {}
        if source.has("weight_scale_inv"):
            source.refuse("weight_scale_inv", f"is given, but the weights are {t.dtype}.")
            return {}
        if t.shape != source.shape:
            return {"": t}  # torch says so
        numbers = t.detach().to(source.device)
        encoded = self.encode(numbers if source.is_whole else numbers[None])
        return encoded if source.is_whole else {end: q[0] for end, q in encoded.items()}
