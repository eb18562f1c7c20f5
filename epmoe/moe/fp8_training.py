"""The experts of EPMoE with products in FP8 and parameters in 16 bits: forward and backward.

Recipes.  "blockwise", that of DeepSeek-V3: rows have a scale for each 128 numbers of a row, weights one for
each block of 128 by 128.  "rowwise": what was quantised so then gets one scale for each row, and one for each
expert, so that the tensor cores add up whole products.  All scales are powers of two, so a row can get
another scale without an error.  Tokens, and gradients of the output, are quantised at their rank and travel
in FP8; combine returns sums in 16 bits.

    step        products in FP8                          in 16 bits or float32
    forward     h = rows @ gate_up.T + bias              activation, in float32, quantised
                a @ down.T + bias                        combine
    backward    g @ down; g = dispatch of dy             gradient of the activation; dots
                d_h @ gate_up                            combine of dx, and of dots to the tokens
                d_down = g.T @ weighted
                d_gate_up = d_h.T @ rows

The first four products are those of the forward GEMM.  The operands of the last two are transposed first,
and the tensor cores add up all rows of an expert (gemm/wgrad_fp8.py).  For the backward the rows are kept in
FP8, and gate and up in 16 bits.

Weights are quantised when they have changed: see QuantizedWeight.  Weights of 4 bits, which have no
gradients, are expanded to FP8 in each call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _C
from ..a2a.fused import EpAll2AllFusedOp
from ..a2a.layout import EPLayout
from ..a2a.ops import count_products, expert_offsets, row_dots, saved_tensors
from ..comm.error_propagation import reporting
from ..gemm.activations import Kernel, as_kernel
from ..gemm.grouped import FP8_BLOCK, grouped_gemm
from ..gemm.quantize import dequantize_fp8, quantize_fp8, rescale_fp8_weight
from ..gemm.weight_gradients import (Factors, deferred_wgrad_of, gradient_of, gradient_of_factors,
                                     of_one_backward)
from ..gemm.wgrad_fp8 import grouped_wgrad_fp8, quantize_fp8_weight_pair, transpose_fp8
from ..torch_modes import call, check_backward, check_mode, implement, requires_grad
from .experts import Weights, as_float32, expert_of_row
from .four_bits import FourBits
from .guards import may_be_sharded
from .weights import WEIGHTS, count_steps, num_steps

if TYPE_CHECKING:
    from ..a2a.layer import EPAll2AllLayer
    from .module import EPMoE
    from .weights import WeightFormat

E4M3 = torch.float8_e4m3fn
Recipe: TypeAlias = Literal["blockwise", "rowwise"]
_lib = torch.library.Library("epmoe", "FRAGMENT")
NO_COPIES = "token_saving=False with compute_dtype in FP8: leave token_saving out"
Quantized = tuple[Tensor, Tensor]  # weights or rows in FP8, and their scales
Pair = tuple[Tensor, Tensor, Tensor, Tensor]  # the same, and transposed; see quantize_fp8_weight_pair

def check_compute_dtype(compute_dtype: torch.dtype | None, format: WeightFormat, hidden: int, inner: int,
                        token_saving: bool, wgrad_dtype: torch.dtype | None,
                        fp8_recipe: Recipe | None = None) -> bool:
    """Return whether products are in FP8, or raise for what EPMoE does not have."""
    dtype = format.dtype
    if fp8_recipe not in (None, "blockwise", "rowwise"):
        raise ValueError(f"fp8_recipe {fp8_recipe!r}: must be \"blockwise\", \"rowwise\" or None")
    if compute_dtype in (None, dtype):
        for name, given in (("wgrad_dtype", wgrad_dtype not in (None, dtype)), ("fp8_recipe", fp8_recipe)):
            if given:
                raise ValueError(f"{name}: is for compute_dtype=torch.float8_e4m3fn: leave it out")
        return False
    if compute_dtype != E4M3:
        raise TypeError(f"compute_dtype {compute_dtype}: must be torch.float8_e4m3fn, or None: dtype, "
                        f"{dtype}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype {dtype} with compute_dtype in FP8: must be torch.bfloat16 or torch.float16")
    if isinstance(format, FourBits):
        for name, given in (("dispatch_dtype", format.sends_fp8), ("wgrad_dtype", wgrad_dtype is not None)):
            if given:
                raise ValueError(f"{name} with compute_dtype in FP8 and weights in {format.title}: tokens "
                                 f"travel in FP8 then, and there are no gradients: leave it out")
    elif not format.has_gradients:
        raise ValueError(f"weight_dtype {format.weight_dtype} and compute_dtype in FP8: weights of a "
                         f"checkpoint in {format.title} have no gradients: leave compute_dtype out, or "
                         f"weight_dtype for training")
    if wgrad_dtype not in (None, E4M3, dtype):
        raise TypeError(f"wgrad_dtype {wgrad_dtype}: must be {dtype}, or None: torch.float8_e4m3fn")
    for name, size in (("hidden", hidden), ("inner", inner)):
        if size % 16:
            raise ValueError(f"{name} {size} with compute_dtype in FP8: must be a multiple of 16")
    if not token_saving:
        raise ValueError(NO_COPIES)
    count_steps()
    return True


def check_layer(computes_fp8: bool, layer: EPAll2AllLayer) -> None:
    """Raise ValueError for a shared layer with which products cannot be in FP8."""
    if computes_fp8 and layer._copies != 1:
        raise ValueError(NO_COPIES)


class QuantizedWeight:
    """A weight in FP8, and transposed.  It is made again when the weight has changed.

    A change is seen by torch's version of the tensor, which every operation in place increases, and by each
    step of an optimizer of torch, because optimizers may write through `.data`, which torch does not count.
    Who writes through `.data` in another way, or by a collective, calls forget().  A CUDA graph quantises in
    each replay, because the weight may change between replays.
    """

    def __init__(self, rowwise: bool = False) -> None:
        self._rowwise = rowwise
        # A weak reference to the memory of the weight. With one to the weight itself, torch would not swap it
        # (torch.__future__.set_swap_module_params_on_conversion).
        self._memory: Callable[[], Any] = lambda: None
        self._version: tuple[int, ...] | None = None
        self._pair: Pair | None = None

    def of(self, p: Tensor, is_sharded: bool, shape: tuple[int, ...] | None = None) -> Pair:
        """Return q [L, N, K], scales, q transposed [L, K, N], and its scales.

        is_sharded: FSDP gathers the weight for each forward, and hides its changes.  A weight that was made
        in inference mode has no count of changes either.  Both are quantised in each call.
        shape: L, N, K, if the weight has another shape.
        """
        weights = p if shape is None else p.detach().view(shape)
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            return _quantize_weights(weights, self._rowwise)
        counts = not is_sharded and not p.is_inference()  # whether changes count, in p._version
        version = id(p), p.data_ptr(), p._version if counts else 0, num_steps()
        memory = p.untyped_storage()
        if self._pair is None or self._memory() is not memory or version != self._version or not counts:
            self._pair = None  # frees the old ones first
            self._pair, self._memory = _quantize_weights(weights, self._rowwise), weakref.ref(memory)
            self._version = version
        return self._pair

    def forget(self) -> None:
        self._pair = None

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        return QuantizedWeight(self._rowwise)

    def __reduce__(self) -> tuple[type[QuantizedWeight], tuple[bool]]:
        return QuantizedWeight, (self._rowwise,)


def _quantize_weights(weights: Tensor, rowwise: bool) -> Pair:
    q, scales, q_t, scales_t = quantize_fp8_weight_pair(weights)
    if rowwise:
        to = scales.flatten(1).amax(1)
        rescale_fp8_weight(q, scales, to)
        rescale_fp8_weight(q_t, scales_t, to)
        scales, scales_t = (to[:, None, None].expand_as(s) for s in (scales, scales_t))
    return q, scales, q_t, scales_t


def _multiply(rows: Tensor, scales: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None, offsets: Tensor,
              rowwise: bool, dtype: torch.dtype) -> Tensor:
    if rowwise:  # a view whose stride says that a row has one scale
        scales = scales.as_strided(scales.shape, (scales.stride(0), 0))
    return grouped_gemm(rows, w, offsets=offsets, bias=bias, a_scale=scales, b_scale=w_scale, out_dtype=dtype)


# The gradient of weights [L, N, K] from rows [M, N] and [M, K] in FP8; see grouped_wgrad_fp8 for out.
_lib.define("wgrad_fp8(Tensor a, Tensor b, Tensor offsets, Tensor a_scale, Tensor b_scale, Tensor(a!) out, "
            "float scale) -> ()")


def _wgrad_fp8(a: Tensor, b: Tensor, offsets: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor,
               scale: float) -> None:
    grouped_wgrad_fp8(*transpose_fp8(a, a_scale, offsets), *transpose_fp8(b, b_scale, offsets), offsets,
                      out=out, alpha=scale)


implement(_lib, "wgrad_fp8", _wgrad_fp8)


class Fp8Factors(Factors):
    """The factors of a gradient in FP8.  tensors: a, b, the offsets, and the scales of a and b."""

    def __init__(self, *tensors: Tensor, dtype: torch.dtype) -> None:
        super().__init__(*tensors)
        self.dtype = dtype

    def product(self, out: Tensor | None = None, scale: float = 1) -> Tensor:
        """Return the gradient [L, N, K], or add it, times scale, to out of float32 and return that."""
        a, b, offsets, a_scale, b_scale = self.tensors
        if out is None:
            assert self.dtype != torch.float32  # to which it would be added
            shape = len(offsets) - 1, a.shape[1], b.shape[1]
            out = torch.empty(shape, dtype=self.dtype, device=a.device)
        call("wgrad_fp8", (a, b, offsets, a_scale, b_scale, out), scale)
        return out

    def add_to(self, out: Tensor, scale: float) -> None:
        if out.dtype == torch.float32:
            self.product(out, scale)
        else:
            out.add_(self.product(), alpha=scale)


class ActivationGradient(NamedTuple):
    """What follows from the gradient of an activation, for rows grouped by expert.

    Attributes:
        dots: [M], the gradient of the weights of the rows.
        d_h8: The gradient of h in FP8, and its scales.
        weighted8: Makes the weighted rows of the activation in FP8, and their scales.
        d_h: The gradient of h [M, N] in 16 bits, or None.
        weighted: The weighted rows [M, I] in 16 bits, or None.
    """

    dots: Tensor
    d_h8: tuple[Tensor, Tensor]
    weighted8: Callable[[], tuple[Tensor, Tensor]]
    d_h: Any = None
    weighted: Any = None


def activation_gradient(kernel: Kernel, h: Tensor, d: Tensor, offsets: Tensor, row_weight: Tensor | None,
                        in_16_bits: bool, rowwise: bool = False) -> ActivationGradient:
    """Compute the gradient of h [M, N], where that of the activation, without row_weight, is d [M, I].

    rowwise: see quantize_fp8; of d_h alone.  in_16_bits: whether the results are wanted in 16 bits, too.
    Otherwise one kernel computes and quantises them, where each half of N is a multiple of 128.  d may be
    overwritten.
    """
    dots = h.new_empty(h.shape[0], dtype=torch.float32)
    if not in_16_bits and d.shape[1] % FP8_BLOCK == 0:
        q_h, q_y = (torch.empty_like(t, dtype=torch.float8_e4m3fn) for t in (h, d))
        scales = [t.new_empty(t.shape[1] // FP8_BLOCK, t.shape[0], dtype=torch.float32) for t in (h, d)]
        _C.activation(kernel, h, d, offsets, row_weight, q_h.view(torch.uint8), q_y.view(torch.uint8), dots,
                      scales[0], scales[1], rowwise)
        return ActivationGradient(dots, (q_h, scales[0].t()), lambda: (q_y, scales[1].t()))
    d_h = torch.empty_like(h)
    _C.activation(kernel, h, d, offsets, row_weight, d_h, d, dots, None, None, False)
    weighted = d  # the weighted rows of the activation take the place of the product
    return ActivationGradient(dots, quantize_fp8(d_h, num_rows=offsets[-1:], pow2=True, rowwise=rowwise),
                              lambda: quantize_fp8(weighted, num_rows=offsets[-1:], pow2=True), d_h, weighted)


def run(moe: EPMoE, layer: EPAll2AllLayer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor,
        parameters: Weights) -> tuple[Tensor, EPLayout]:
    """Plan, and apply the experts.  Returns (y, layout)."""
    try:
        check_mode(x, topk_weights, *parameters)
        weight = topk_weights if topk_weights.dtype == torch.float32 else as_float32(topk_weights)
        kernel = as_kernel(moe.activation)
    except Exception as error:
        layer._propagate(_C.OP_PLAN, error, 0)
    layout, _, num_rows = layer._prepare(_C.OP_PLAN, x, topk_idx, weight, None, None, 0)
    with reporting(layer, _C.OP_DISPATCH, layout.buffer, layout.plan, num_rows < 0):
        with torch.no_grad():
            rowwise = moe.fp8_recipe == "rowwise"
            if isinstance(moe._format, FourBits):
                return _forward(layer, x, weight, parameters, layout, num_rows,
                                functools.partial(moe._format.expanded, moe, rowwise), kernel, rowwise,
                                False)[0], layout
            up, down = moe._quantized["gate_up_proj"], moe._quantized["down_proj"]
            is_sharded = may_be_sharded(moe)
            if moe._computed:  # by a parametrization, which may give other numbers each time it is asked
                pairs = up.of(parameters[0].detach(), True), down.of(parameters[2].detach(), True)
            else:
                pairs = up.of(moe.gate_up_proj, is_sharded), down.of(moe.down_proj, is_sharded)
        if requires_grad(x, weight, *parameters):
            return _Fp8Experts.apply(x, weight, *parameters, layer, layout, num_rows, pairs, kernel, rowwise,
                                     moe.wgrad_dtype != E4M3, moe.recompute_gate_up,
                                     is_sharded or moe._computed), layout
        return _forward(layer, x, weight, parameters, layout, num_rows, _forward_weights(pairs), kernel,
                        rowwise, False)[0], layout


def _forward_weights(pairs: tuple[Pair, Pair]) -> Callable[[str], Quantized]:
    return dict(zip(WEIGHTS, (pair[:2] for pair in pairs))).__getitem__


def _forward(layer: EPAll2AllLayer, x: Tensor, weight: Tensor, parameters: Weights, layout: EPLayout,
             num_rows: int, quantized: Callable[[str], Quantized], kernel: Kernel, rowwise: bool,
             with_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the experts.  Returns (y, rows, their scales, h, row_weight, recv).

    quantized: Returns the weight of a name.  It is called when the weight is needed, and the result is not
    kept, so that expanded weights do not exist at the same time.
    """
    up_bias, down_bias = (None if b is None else b.detach().to(layer.dtype).contiguous()
                          for b in (parameters[1], parameters[3]))
    plan, buffer = layout.plan, layout.buffer
    offsets = expert_offsets(layer, plan)
    x8, x_scale = quantize_fp8(x.detach(), pow2=True, rowwise=rowwise)
    h, rows, row_scale, row_weight, recv = _dispatch_and_multiply(
        layer, x8, x_scale, weight, plan, buffer, num_rows, *quantized("gate_up_proj"), up_bias, rowwise,
        with_grad)
    layer._set_dispatched(layout, h, recv)
    assert row_weight is not None
    with reporting(layer, _C.OP_COMBINE, buffer, plan):
        a, a_scale = _quantized_activation(h, offsets, kernel, rowwise)
        y, _ = _multiply_and_combine(layer, a, a_scale, *quantized("down_proj"), down_bias, row_weight, None,
                                     plan, recv, buffer, x.shape[0], rowwise, with_grad)
    return y, rows, row_scale, h, row_weight, recv


def _quantized_activation(h: Tensor, offsets: Tensor, kernel: Kernel, rowwise: bool) -> tuple[Tensor, Tensor]:
    """Return the activation of gate and up, in FP8, with its scales."""
    return torch.ops.epmoe.quantize_fp8(h, offsets[-1:], kernel, True, rowwise)


def _dispatch_and_multiply(layer: EPAll2AllLayer, x: Tensor, x_scale: Tensor, weight: Tensor | None,
                           plan: Tensor, buffer: int, num_rows: int, w: Tensor, w_scale: Tensor,
                           bias: Tensor | None, rowwise: bool, with_grad: bool
                           ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Send tokens in FP8, and multiply the rows by weights [L, N, H].

    Returns the products in the layer's dtype, the rows, their scales, their weights, and recv.
    """
    if not rowwise and isinstance(layer, EpAll2AllFusedOp) and layer._is_fused_fp8(w):
        out, rows, row_weight, recv, row_scale = layer._dispatch_gemm(
            x, weight, plan, w, bias, buffer, num_rows, as_kernel(None), with_grad, x_scale, w_scale)
        assert rows is not None and row_scale is not None
        count_products(rows, expert_offsets(layer, plan), w)
        return out, rows, row_scale, row_weight, recv
    rows, row_weight, recv, row_scale = layer._dispatch(x, weight, plan, buffer, num_rows, with_grad,
                                                        x_scale=x_scale)
    assert row_scale is not None
    with reporting(layer, _C.OP_COMBINE, buffer, plan):
        out = _multiply(rows, row_scale, w, w_scale, bias, expert_offsets(layer, plan), rowwise, layer.dtype)
    return out, rows, row_scale, row_weight, recv


def _multiply_and_combine(layer: EPAll2AllLayer, a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor,
                          bias: Tensor | None, row_weight: Tensor | None, row_scalar: Tensor | None,
                          plan: Tensor, recv: Tensor, buffer: int, num_tokens: int, rowwise: bool,
                          with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Multiply rows in FP8 by weights [L, H, K], and add the products up.  Returns the sums and scalars."""
    if not rowwise and isinstance(layer, EpAll2AllFusedOp) and layer._is_fused_fp8(w, is_first=False):
        y, _, scalar = layer._gemm_combine(a, w, bias, row_weight, plan, recv, buffer, num_tokens, with_grad,
                                           a_scale, w_scale, row_scalar)
        count_products(a, expert_offsets(layer, plan), w)
        return y, scalar
    rows = _multiply(a, a_scale, w, w_scale, bias, expert_offsets(layer, plan), rowwise, layer.dtype)
    return layer._combine(rows, row_weight, row_scalar, plan, recv, buffer, num_tokens, with_grad)


class _Fp8Experts(torch.autograd.Function):
    """The experts of a training step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None,
                down: Tensor, down_bias: Tensor | None, layer: EPAll2AllLayer, layout: EPLayout,
                num_rows: int, pairs: tuple[Pair, Pair], kernel: Kernel, rowwise: bool,
                wgrad_in_16_bits: bool, recompute: bool, quantizes_each_time: bool) -> Tensor:
        y, rows, row_scale, h, row_weight, recv = _forward(
            layer, x, weight, (gate_up, gate_up_bias, down, down_bias), layout, num_rows,
            _forward_weights(pairs), kernel, rowwise, True)
        ctx.layer, ctx.buffer, ctx.kernel, ctx.num_tokens = layer, layout.buffer, kernel, x.shape[0]
        ctx.rowwise, ctx.wgrad_in_16_bits = rowwise, wgrad_in_16_bits
        ctx.deferred_wgrads = deferred_wgrad_of(gate_up), deferred_wgrad_of(down)
        # The transposed weights are kept, too: those of the next version have other memory.
        ctx.transposed = pairs[0][2:], pairs[1][2:]
        # Weights of FSDP or of a parametrization, which each forward quantises, are not kept in FP8: the
        # backward quantises them again.
        ctx.gate_up = pairs[0][:2] if recompute and not quantizes_each_time else None
        ctx.save_for_backward(layout.plan, gate_up, gate_up_bias, down, down_bias, rows, row_scale,
                              None if recompute else h, row_weight, recv)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with of_one_backward(ctx.layer, ctx.buffer, *ctx.deferred_wgrads):
            return *_backward(ctx, ctx.layer, dy), *[None] * 9


def _backward(ctx: Any, layer: EPAll2AllLayer, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, gate_up, gate_up_bias, down and down_bias, those that are needed."""
    plan, gate_up, gate_up_bias, down, down_bias, rows, row_scale, h, row_weight, recv = saved_tensors(
        ctx, layer, _C.OP_DISPATCH, dy)
    of_x, of_weight, of_gate_up, of_gate_up_bias, of_down, of_down_bias = ctx.needs_input_grad[:6]
    (up_t, up_t_scale), (down_t, down_t_scale) = ctx.transposed
    buffer, dtype = ctx.buffer, layer.dtype
    d_gate_up = d_gate_up_bias = d_down = d_down_bias = None
    with reporting(layer, _C.OP_DISPATCH, buffer, plan):
        check_backward(dy, gate_up, down)
        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph=True: the experts have no second derivatives in FP8: use "
                                      "dtype=torch.float32")
        offsets = expert_offsets(layer, plan)
        dy8, dy_scale = quantize_fp8(dy, pow2=True, rowwise=ctx.rowwise)
        d, g, g_scale, _, _ = _dispatch_and_multiply(layer, dy8, dy_scale, None, plan, buffer, rows.shape[0],
                                                     down_t, down_t_scale, None, ctx.rowwise, False)
    with reporting(layer, _C.OP_COMBINE, buffer, plan):
        if h is None:
            up_bias = None if gate_up_bias is None else gate_up_bias.detach().to(dtype).contiguous()
            up8, up_scale = ctx.gate_up or _quantize_weights(gate_up.detach(), ctx.rowwise)[:2]
            h = _multiply(rows, row_scale, up8, up_scale, up_bias, offsets, ctx.rowwise, dtype)
            del up8, up_scale
        found = activation_gradient(ctx.kernel, h, d, offsets, row_weight,
                                    ctx.wgrad_in_16_bits or of_gate_up_bias, ctx.rowwise)
        dots = found.dots
        ctx.maybe_clear_saved_tensors()
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # as torch frees what is saved
            ctx.gate_up = ctx.transposed = None
        del h, d
        if down_bias is not None or ctx.wgrad_in_16_bits:
            g16 = dequantize_fp8(g, g_scale, dtype)
        if down_bias is not None:
            bias = F.pad(down_bias.detach().to(dtype), (0, 0, 0, 1))  # the last one for rows of no expert
            dots += row_dots(g16, bias[expert_of_row(offsets, len(g16))])
        d_h8, d_h_scale = found.d_h8
        deferred_up, deferred_down = ctx.deferred_wgrads
        if of_down and ctx.wgrad_in_16_bits:
            d_down = gradient_of(deferred_down, g16, found.weighted, offsets)
        elif of_down:
            weighted8, weighted_scale = found.weighted8()
            d_down = gradient_of_factors(deferred_down, Fp8Factors(
                g, weighted8, offsets, g_scale, weighted_scale, dtype=down.dtype))
        if of_down_bias:
            d_down_bias = torch.ops.epmoe.sum_of_rows(g16, row_weight, offsets).to(down_bias.dtype)
        # Also where this rank wants neither: another rank may want one, and waits for the rows of all.
        dx, d_weight = _multiply_and_combine(layer, d_h8, d_h_scale, up_t, up_t_scale, None, None, dots, plan,
                                             recv, buffer, ctx.num_tokens, ctx.rowwise, False)
    if of_gate_up and ctx.wgrad_in_16_bits:
        d_gate_up = gradient_of(deferred_up, found.d_h, dequantize_fp8(rows, row_scale, dtype), offsets)
    elif of_gate_up:
        d_gate_up = gradient_of_factors(deferred_up, Fp8Factors(
            d_h8, rows, offsets, d_h_scale, row_scale, dtype=gate_up.dtype))
    if of_gate_up_bias:
        d_gate_up_bias = torch.ops.epmoe.sum_of_rows(found.d_h, None, offsets).to(gate_up_bias.dtype)
    return (dx if of_x else None, d_weight if of_weight else None, d_gate_up, d_gate_up_bias, d_down,
            d_down_bias)
