"""Experts with products in FP8 for rows that are on this rank, grouped by expert: forward and backward.

The recipe and the building blocks are those of fp8_training.py, without dispatch and combine.  The adapters
for Megatron-core and torchtitan use it, whose token dispatchers move the rows.  It consists of operators of
torch, so that torch.compile takes it without a graph break.
"""

from typing import Any

import torch
from torch import Tensor

from .. import _C, flops
from ..gemm.activations import Activation, Kernel, as_kernel
from ..gemm.grouped import FORWARD, grouped_gemm
from ..gemm.quantize import dequantize_fp8, quantize_fp8
from ..gemm.weight_gradients import (DeferredWgrad, Factors, deferred_wgrad_of, gradient_of_factors,
                                     of_one_backward)
from ..gemm.wgrad_fp8 import quantize_fp8_weight_pair
from ..torch_modes import check_backward, check_mode, implement, record_gradient
from .fp8_training import E4M3, Fp8Factors, Pair, activation_gradient

_lib = torch.library.Library("epmoe", "FRAGMENT")
_lib.define("quantize_fp8_weight_pair(Tensor weight) -> (Tensor, Tensor, Tensor, Tensor)")
# gate_up and down are only what gets a gradient: the products read up, down8 and what is transposed.
_lib.define("experts_fp8(Tensor rows, Tensor gate_up, Tensor down, Tensor offsets, Tensor? row_weight, "
            "Tensor up, Tensor up_scale, Tensor up_t, Tensor up_t_scale, Tensor down8, Tensor down_scale, "
            "Tensor down_t, Tensor down_t_scale, float[] activation, "
            "bool wgrad_in_16_bits, bool transposed) -> (Tensor, Tensor, Tensor, Tensor)")
_lib.define("experts_fp8_backward(Tensor dy, Tensor offsets, Tensor? row_weight, Tensor rows, "
            "Tensor row_scale, Tensor h, Tensor up_t, Tensor up_t_scale, Tensor down_t, Tensor down_t_scale, "
            "float[] activation, bool wgrad_in_16_bits, bool transposed, "
            "bool of_gate_up, bool of_down) -> (Tensor, Tensor, Tensor, Tensor)")


def experts_fp8(rows: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor,
                row_weight: Tensor | None = None, activation: Activation = "swiglu", *,
                wgrad_dtype: torch.dtype | None = None, transposed: bool = False,
                quantized: tuple[Pair, Pair] | None = None) -> Tensor:
    """Apply experts to rows, with products in FP8 forward and backward.  Local to a rank.

    Row r of expert e gives row_weight[r] * (activation(rows[r] @ gate_up[e].T) @ down[e].T).  Differentiable
    in rows, row_weight, gate_up and down.  The gradients have the bits of those of EPMoE(compute_dtype=
    torch.float8_e4m3fn) on one rank with one choice a token, and so has the result without row_weight.  With
    row_weight the result is rounded once, that of EPMoE twice.

    Args:
        rows: [M, H] bfloat16 or float16: first all rows of expert 0, then of expert 1, and so on.
        gate_up: [L, 2I, H] of the dtype of rows; [L, I, H] for activations without a gate.
        down: [L, H, I] of the same dtype.
        offsets: [L + 1] int32 on the device of rows: where each expert's rows begin.
        row_weight: None, or [M] of a floating-point dtype; applied as float32.
        activation: One of grouped_gemm's.
        wgrad_dtype: The dtype of the products that are the gradients of the weights: that of rows, or None:
            torch.float8_e4m3fn.
        transposed: The weights are [L, H, 2I] and [L, I, H], as Megatron-core stores them.
        quantized: What quantize_fp8_weight_pair returns for gate_up and for down, if the caller has it.

    Returns:
        [M, H] of the dtype of rows.  Rows that belong to no expert are undefined.

    Raises:
        ValueError: For sizes H and I that are not multiples of 16, and an unknown activation.
        TypeError: For other dtypes.
        NotImplementedError: For gradients of gradients, and inside of transforms of torch.func.

    Examples:
        >>> import torch
        >>> from epmoe.moe.fp8_rows import experts_fp8
        >>> rows = torch.ones(3, 16, dtype=torch.bfloat16, requires_grad=True)
        >>> gate_up, down = torch.ones(2, 32, 16).bfloat16(), torch.ones(2, 16, 16).bfloat16()
        >>> y = experts_fp8(rows, gate_up, down, torch.tensor([0, 1, 3], dtype=torch.int32))
        >>> y.sum().backward()
        >>> y.shape, rows.grad.shape
        (torch.Size([3, 16]), torch.Size([3, 16]))

    References:
        DeepSeek-V3 Technical Report, section 3.3: FP8 training.
    """
    if rows.dtype not in (torch.bfloat16, torch.float16) or not rows.dtype == gate_up.dtype == down.dtype:
        raise TypeError(f"wanted rows and weights of bfloat16 or float16, all alike, got {rows.dtype}, "
                        f"{gate_up.dtype} and {down.dtype}")
    if wgrad_dtype not in (None, E4M3, rows.dtype):
        raise TypeError(f"wgrad_dtype {wgrad_dtype}: must be {rows.dtype}, or None: {E4M3}")
    sizes = *gate_up.shape[1:], *down.shape[1:]
    if any(size % 16 for size in sizes):
        raise ValueError(f"weights {list(gate_up.shape)} and {list(down.shape)}: products in FP8 need sizes "
                         f"that are multiples of 16")
    check_mode(rows, gate_up, down, row_weight)
    if quantized is None:
        pairs = [torch.ops.epmoe.quantize_fp8_weight_pair(w.detach().contiguous()) for w in (gate_up, down)]
    else:
        pairs = list(quantized)
    if transposed:
        pairs = [(*p[2:], *p[:2]) for p in pairs]
    row_weight = None if row_weight is None else row_weight.to(torch.float32).contiguous()
    y, *_ = torch.ops.epmoe.experts_fp8(rows.contiguous(), gate_up, down, offsets, row_weight, *pairs[0],
                                        *pairs[1], as_kernel(activation),
                                        wgrad_dtype not in (None, E4M3), transposed)
    return y


def _forward(rows: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor, row_weight: Tensor | None,
             up: Tensor, up_scale: Tensor, up_t: Tensor, up_t_scale: Tensor, down8: Tensor,
             down_scale: Tensor, down_t: Tensor, down_t_scale: Tensor, activation: Kernel,
             wgrad_in_16_bits: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, and for the backward the rows in FP8, their scales, and gate and up."""
    x, x_scale = quantize_fp8(rows.detach(), num_rows=offsets[-1:], pow2=True)
    h = grouped_gemm(x, up, offsets=offsets, a_scale=x_scale, b_scale=up_scale, out_dtype=rows.dtype)
    a, a_scale = torch.ops.epmoe.quantize_fp8(h, offsets[-1:], activation, True)
    y = grouped_gemm(a, down8, offsets=offsets, a_scale=a_scale, b_scale=down_scale, out_dtype=rows.dtype,
                     row_weight=None if row_weight is None else row_weight.detach())
    return y, x, x_scale, h


def _gradients(dy: Tensor, offsets: Tensor, row_weight: Tensor | None, rows: Tensor, row_scale: Tensor,
               h: Tensor, up_t: Tensor, up_t_scale: Tensor, down_t: Tensor, down_t_scale: Tensor,
               activation: Kernel, wgrad_in_16_bits: bool, transposed: bool,
               of_gate_up: bool, of_down: bool, deferred_up: DeferredWgrad | None = None,
               deferred_down: DeferredWgrad | None = None
               ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of rows and row_weight, and of gate_up and down where they are wanted."""
    d_gate_up = d_down = None
    num_rows, dtype = offsets[-1:], h.dtype
    g, g_scale = quantize_fp8(dy, num_rows=num_rows, pow2=True)
    d = grouped_gemm(g, down_t, offsets=offsets, a_scale=g_scale, b_scale=down_t_scale, out_dtype=dtype)
    found = activation_gradient(activation, h, d, offsets, row_weight, wgrad_in_16_bits)

    def wgrad(deferred: DeferredWgrad | None, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor],
              a16: Tensor | None, b16: Tensor | None) -> Tensor | None:
        """Return the gradient of weights from a and b in FP8, which in 16 bits are a16 and b16, or None."""
        if transposed:
            a, b, a16, b16 = b, a, b16, a16
        if not wgrad_in_16_bits:
            return gradient_of_factors(deferred, Fp8Factors(a[0], b[0], offsets, a[1], b[1], dtype=dtype))
        a16, b16 = (dequantize_fp8(*q, dtype) if t is None else t for q, t in ((a, a16), (b, b16)))
        return gradient_of_factors(deferred, Factors(a16, b16, offsets))

    if of_down:
        d_down = wgrad(deferred_down, (g, g_scale), found.weighted8(), None, found.weighted)
    d_h8 = found.d_h8
    # Rows of no expert have no gradient.
    dx = torch.ops.epmoe.grouped_gemm(d_h8[0], up_t, offsets, None, None, d_h8[1], up_t_scale, FORWARD,
                                      as_kernel(None), False, dtype, zeros=True)
    dots = torch.where(torch.arange(len(h), device=h.device) < num_rows, found.dots, 0.0)
    if of_gate_up:
        d_gate_up = wgrad(deferred_up, d_h8, (rows, row_scale), found.d_h, None)
    return dx, dots, d_gate_up, d_down


def _run_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dots, *gradients = _gradients(*args)
    d_gate_up, d_down = (dx.new_empty(0) if t is None else t for t in gradients)
    return dx, dots, d_gate_up, d_down


implement(_lib, "quantize_fp8_weight_pair", quantize_fp8_weight_pair)
implement(_lib, "experts_fp8", _forward)
implement(_lib, "experts_fp8_backward", _run_backward)


@torch.library.register_fake("epmoe::quantize_fp8_weight_pair", lib=_lib)
def _(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num, n, k = weight.shape
    num_n, num_k = (-(-size // 128) for size in (n, k))
    return (weight.new_empty((num, n, k), dtype=E4M3),
            weight.new_empty((num, num_n, num_k), dtype=torch.float32),
            weight.new_empty((num, k, n), dtype=E4M3),
            weight.new_empty((num, num_k, num_n), dtype=torch.float32))


@torch.library.register_fake("epmoe::experts_fp8", lib=_lib)
def _(rows: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor, row_weight: Tensor | None, up: Tensor,
      *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, scales = torch.ops.epmoe.quantize_fp8(rows, None, as_kernel(None), True)
    return rows.new_empty(rows.shape), q, scales, rows.new_empty(rows.shape[0], up.shape[1])


@torch.library.register_fake("epmoe::experts_fp8_backward", lib=_lib)
def _(dy: Tensor, offsets: Tensor, row_weight: Tensor | None, rows: Tensor, row_scale: Tensor, h: Tensor,
      up_t: Tensor, up_t_scale: Tensor, down_t: Tensor, down_t_scale: Tensor, activation: Kernel,
      wgrad_in_16_bits: bool, transposed: bool, of_gate_up: bool,
      of_down: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # A transposed weight has the shape of the weight's gradient, but for the order of the last two.
    d_gate_up, d_down = (dy.new_empty(t.shape if transposed else t.mT.shape) if wanted else dy.new_empty(0)
                         for t, wanted in ((up_t, of_gate_up), (down_t, of_down)))
    return dy.new_empty(rows.shape), dy.new_empty(h.shape[0], dtype=torch.float32), d_gate_up, d_down


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, gate_up, down, offsets, row_weight, *pairs = inputs[:13]
    _, _, up_t, up_t_scale, _, _, down_t, down_t_scale = pairs
    ctx.options = inputs[13:]
    y, rows, row_scale, h = output
    ctx.like_y = {"size": y.shape, "dtype": y.dtype, "device": y.device}
    ctx.deferred = deferred_wgrad_of(gate_up), deferred_wgrad_of(down)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rows, row_scale, h)
    ctx.save_for_backward(offsets, row_weight, rows, row_scale, h, up_t, up_t_scale, down_t, down_t_scale)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if dy is None:  # what came after the experts has returned no gradient
        dy = torch.zeros(**ctx.like_y)
    check_backward(dy, *saved)
    if torch.is_grad_enabled():
        raise NotImplementedError("create_graph=True: the experts have no second derivatives in FP8: compute "
                                  "in 16 or 32 bits")
    of_rows, of_gate_up, of_down, _, of_row_weight = ctx.needs_input_grad[:5]
    args = dy.contiguous(), *saved, *ctx.options, of_gate_up, of_down
    if any(d is not None for d in ctx.deferred):
        with of_one_backward(None, 0, *ctx.deferred):
            dx, dots, d_gate_up, d_down = _gradients(*args, *ctx.deferred)
    else:
        dx, dots, d_gate_up, d_down = torch.ops.epmoe.experts_fp8_backward(*args)
    return (dx if of_rows else None, d_gate_up if of_gate_up else None, d_down if of_down else None, None,
            dots if of_row_weight else None, *[None] * 11)


record_gradient(_lib, "experts_fp8", _save, _backward)
flops.add_fp8_rows()
