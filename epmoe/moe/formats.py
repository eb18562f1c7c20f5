"""Which format the weights of an EPMoE have."""

from __future__ import annotations

import torch

from ..gemm.activations import Activation
from ..gemm.four_bit import Int4
from .four_bits import FourBits
from .fp8 import E4M3, Fp8
from .weights import WeightDtype, WeightFormat


def choose(weight_dtype: WeightDtype | None, dtype: torch.dtype, hidden: int, inner: int,
           activation: Activation, dispatch_dtype: torch.dtype | None = None) -> WeightFormat:
    """Return the format of the weights, or raise for one that EPMoE does not have with these arguments."""
    if isinstance(weight_dtype, (str, Int4)):
        return FourBits(weight_dtype, dtype, hidden, inner, dispatch_dtype)
    if dispatch_dtype is not None:
        raise ValueError(f"dispatch_dtype {dispatch_dtype}: only for weights of 4 bits.  Tokens travel in "
                         f"FP8 to weights and products in FP8, and else in dtype: leave it out")
    if weight_dtype is None or weight_dtype == dtype:
        return WeightFormat(dtype, dtype)
    if weight_dtype == E4M3:
        return Fp8(dtype, hidden, inner, activation)
    raise TypeError(f"weight_dtype {weight_dtype}: must be torch.float8_e4m3fn, \"mxfp4\", \"int4\", an "
                    f"epmoe.Int4, or None: dtype, {dtype}")
