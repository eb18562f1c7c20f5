"""EPMoE with weights in FP8: what is checked, and how weights are quantised.  There are no gradients.

The weights are those of FP8 checkpoints: numbers of float8_e4m3fn, and a scale in float32 for each block of
128 by 128.  Tokens are quantised before they are sent, with a scale for each 128 numbers of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..comm.device import integer
from ..comm.error_propagation import check_plain
from ..gemm.activations import Activation, gpt_oss_numbers, is_gated
from ..gemm.grouped import FP8_BLOCK, as_kernel
from ..gemm.quantize import quantize_fp8_weight
from ..torch_modes import requires_grad

if TYPE_CHECKING:
    from .module import EPMoE

E4M3 = torch.float8_e4m3fn
WEIGHTS = ("gate_up_proj", "down_proj")  # the parameters that have scales
SCALE = "_scale_inv"  # what the name of its scales has after that of a parameter


def check_weight_dtype(weight_dtype: torch.dtype | None, dtype: torch.dtype, hidden: int, inner: int,
                       activation: Activation) -> torch.dtype:
    """Return the dtype of the weights, or raise for one that EPMoE does not have with these sizes."""
    if weight_dtype in (None, dtype):
        return dtype
    if weight_dtype != E4M3:
        raise TypeError(f"weight_dtype {weight_dtype}: must be torch.float8_e4m3fn, or None: dtype, {dtype}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype {dtype} with weights in FP8: must be torch.bfloat16 or torch.float16")
    if integer("hidden", hidden) % FP8_BLOCK:
        raise ValueError(f"hidden {hidden} with weights in FP8: must be a multiple of {FP8_BLOCK}")
    # a block of the first linear map may not have rows of both gates and ups
    if is_gated(activation) and not gpt_oss_numbers(activation) and inner % FP8_BLOCK:
        raise ValueError(f"inner {inner} with weights in FP8 and the activation {activation!r}: must be a "
                         f"multiple of {FP8_BLOCK}")
    return E4M3


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of weights of a shape [L, N, K]."""
    return (shape[0], *(-(-size // FP8_BLOCK) for size in shape[1:]))


def put(moe: EPMoE, name: str, i: int, numbers: Tensor) -> None:
    """Quantise the numbers [N, K] of an expert, and make them those of the i-th expert of this rank."""
    q, scales = quantize_fp8_weight(numbers[None])
    getattr(moe, name)[i] = q[0]
    getattr(moe, name + SCALE)[i] = scales[0]


def _check_parameter(name: str, p: Any, device: torch.device) -> None:
    if not isinstance(p, torch.Tensor):
        raise TypeError(f"{name} of the module: wanted a tensor, got {type(p).__name__}")
    check_plain(name, p)
    if p.device != device:
        raise ValueError(f"{name} is on {p.device}, but the module was created on {device}: move it back")


def check_parameters(moe: EPMoE) -> None:
    """Raise an error if the parameters of a module are not as created, or its activation is unknown."""
    if not torch.compiler.is_compiling():
        as_kernel(moe.activation)
        for name in (*WEIGHTS, *(n + SCALE for n in WEIGHTS if moe.is_fp8)):
            _check_parameter(name, getattr(moe, name), moe.layer.device)
    if moe.is_fp8 and not all(getattr(moe, name).dtype == E4M3
                              and getattr(moe, name + SCALE).dtype == torch.float32 for name in WEIGHTS):
        raise TypeError(f"the parameters are {moe.gate_up_proj.dtype} and their scales "
                        f"{moe.gate_up_proj_scale_inv.dtype} now, but FP8 needs torch.float8_e4m3fn and "
                        f"torch.float32: do not cast the module; load its state dict again")
    if not moe.is_fp8 and moe.gate_up_proj.dtype != moe.layer.dtype:
        raise TypeError(f"the parameters are {moe.gate_up_proj.dtype} now, but the layer was made for "
                        f"{moe.layer.dtype}: pass dtype={moe.gate_up_proj.dtype} when creating the module, "
                        f"instead of casting it")


def check_gradients(moe: EPMoE, x: Tensor, topk_weights: Tensor) -> None:
    """Raise RuntimeError where a gradient is wanted of experts in FP8."""
    if requires_grad(x, topk_weights, *moe.parameters(recurse=False)):
        raise RuntimeError("an EPMoE with weights in FP8 has no gradients: call it under torch.no_grad(), or "
                           "make it without weight_dtype for training, in 16 bits")
