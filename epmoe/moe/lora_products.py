"""The products of LoRA: those of an active adapter, and of a mixture where each token has its own.

    layer in 16 bits, the adapter in the same dtype   LoraOfCall: the calls of experts.py, in which one kernel
                                                      multiplies by W and adds u @ B.T before anything is
                                                      rounded, where u = s * (rows @ A.T); for a mixture A
                                                      and B are those of all its adapters, and of u a row
                                                      keeps the columns of its own one
    otherwise                                         _linear: three products, each rounded, and a sum; for a
                                                      mixture _Groups

The second is the road of float32, which has derivatives of any order, of weights in FP8 and 4 bits, of
adapters in another dtype, of dropout, in which W and A multiply different rows, and of several nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _C
from ..a2a.low_latency import LowLatencyAll2All
from ..a2a.ops import count_products, expert_offsets, saved_tensors
from ..comm.error_propagation import reporting
from ..gemm.activations import Activation, Kernel, activate, as_kernel, is_gated
from ..gemm.grouped import FORWARD, WGRAD, aligned, grouped_gemm
from ..gemm.quantize import quantize_fp8
from ..torch_modes import call, check_backward, implement, is_transformed, is_watched, requires_grad
from . import decode as decoding
from . import experts as experts_ops
from .experts import Low, Mixture, Weights, expert_of_row, is_one_call
from .weights import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..a2a.layer import EPAll2AllLayer
    from ..a2a.layout import EPLayout, Layout
    from .lora import Adapter, State
    from .module import EPMoE

_COLUMNS = 16  # the kernels of 16 bits take multiples of this
_lib = torch.library.Library("epmoe", "FRAGMENT")
_FEW_COLUMNS = 256  # r of all adapters of a mixture together, up to which one product has them all


# ---- an active adapter, in the calls of experts.py ----


class LoraOfCall:
    """An adapter, or a mixture of adapters, as a call of experts.py takes it.

    Attributes:
        factors: A [L, R, H] and B [L, N, R] of gate and up, A [L, R, I] and B [L, H, R] of down, padded; None
            and None for a weight that the adapter leaves alone.
        scaling: s.
        mixture: The number of each token's adapter [T] int32, and how many of the R an adapter has; or None.
    """

    def __init__(self, factors: Sequence[Tensor | None], scaling: float = 1.0,
                 mixture: Mixture | None = None) -> None:
        self.factors, self.scaling, self.mixture = tuple(factors), scaling, mixture

    @classmethod
    def of_adapter(cls, moe: EPMoE, adapter: Adapter) -> LoraOfCall:
        return cls([t for name in WEIGHTS for t in _factors(moe, adapter, name)], adapter.scaling)

    def low(self) -> tuple[Low | None, Low | None]:
        """Return what the forward adds beside gate and up, and beside down."""
        return _low_of(self.factors, self.scaling)

    def count(self, rows: Tensor, offsets: Tensor, parameters: Weights) -> None:
        """Let a mode of torch that counts operations see the products of a forward."""
        count_products(rows, offsets, parameters[0], parameters[2], *self.factors)

    def apply(self, x: Tensor, weight: Tensor, parameters: Weights, layer: EPAll2AllLayer,
              topk_idx: Tensor | None, layout: EPLayout, kernel: Kernel) -> Tensor:
        """Run a forward whose backward has the gradients of x, weight and the factors."""
        frozen = [None if p is None else p.detach() for p in parameters]
        return cast(Tensor, _Experts.apply(x, weight, *self.factors, self.scaling, frozen, layer, topk_idx,
                                           layout, kernel))


def takes(moe: EPMoE, adapter: Adapter, layer: EPAll2AllLayer | LowLatencyAll2All,
          weights: Weights) -> bool:
    """Whether a call with an adapter is one of experts.py.

    Also where a mode of torch watches: it must not change bits, nor what is saved for the backward.
    """
    return (not is_transformed() and is_one_call(layer, weights)
            and _adds_at_once(moe, weights[0], [adapter]) and not (adapter.dropout and adapter.training))


def _adds_at_once(moe: EPMoE, like: Tensor, adapters: Sequence[Adapter]) -> bool:
    """Whether the products with the weights also add those of adapters.  like: of the layer's dtype."""
    return (like.dtype != torch.float32 and moe._format.has_gradients
            and all(p.dtype == like.dtype for adapter in adapters for p in adapter.parameters())
            and _has_activation_kernel(like, moe._shapes["down_proj"][2]))


def _factors(moe: EPMoE, adapter: Adapter, name: str) -> tuple[Tensor | None, Tensor | None]:
    """Return A [L, r, K] and B [L, N, r] of a weight, padded, or (None, None)."""
    factors = adapter.factors(name)
    if factors is None:
        return None, None
    return _padded(moe._scaled("", factors.lora_A), moe._scaled("", factors.lora_B))


def _low_of(factors: Sequence[Tensor | None], scaling: float, backward: bool = False) -> tuple[
        Low | None, Low | None]:
    """Return (low_in, low_out) beside gate and up, and beside down.

    Forward it is (s A, B), backward (s B, A).
    """
    def pair(a: Tensor | None, b: Tensor | None) -> Low | None:
        if a is None or b is None:
            return None
        # a program may have given a factor other memory
        first, second = (aligned(t.detach().contiguous()) for t in ((b, a) if backward else (a, b)))
        return first if scaling == 1 else first * scaling, second

    return pair(*factors[:2]), pair(*factors[2:])


class _Experts(torch.autograd.Function):
    """The experts with an adapter, in 16 bits, from tokens to tokens.

    With the weights W of gate and up and V of down, the factors A and B of W, and C and D of V:
        u = rows @ (s A).T;  a = act(h) of h = rows @ W.T + u @ B.T + bias
        v = a @ (s C).T;     the rows to combine are a @ V.T + v @ D.T + bias
    Backward, where g has dy of each row, and w is the weight of a row:
        q = g @ (s D);    d_a = g @ V + q @ C;        dD = g.T @ (w v);  dC = q.T @ (w a)
        p = d_h @ (s B);  the rows of dx: d_h @ W + p @ A;  dB = d_h.T @ u;  dA = p.T @ rows
    where the kernel of the activation's gradient makes d_h, which has w in it, and w a.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a_up: Tensor | None, b_up: Tensor | None,
                a_down: Tensor | None, b_down: Tensor | None, scaling: float, parameters: Weights,
                layer: EPAll2AllLayer, topk_idx: Tensor | None, layout: EPLayout, kernel: Kernel) -> Tensor:
        factors = a_up, b_up, a_down, b_down
        y, rows, h, row_weight, recv, u, v = experts_ops.forward(
            layer, x, topk_idx, weight, layout, parameters, kernel, layer._unread_rows or -1, True,
            low=_low_of(factors, scaling))
        count_products(rows, expert_offsets(layer, layout.plan), parameters[0], parameters[2], *factors)
        ctx.layer, ctx.buffer, ctx.kernel, ctx.num_tokens = layer, layout.buffer, kernel, x.shape[0]
        ctx.scaling, (gate_up, _, down, down_bias) = scaling, parameters
        ctx.save_for_backward(layout.plan, gate_up, down, down_bias, rows, h, row_weight, recv, u, v,
                              *factors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        layer, needed = ctx.layer, ctx.needs_input_grad[:6]
        plan, gate_up, down, down_bias, rows, h, row_weight, recv, u, v, *factors = saved_tensors(
            ctx, layer, _C.OP_DISPATCH, dy)
        d_a_down = d_b_down = None
        with reporting(layer, _C.OP_DISPATCH, ctx.buffer, plan):
            check_backward(dy, gate_up, down, *factors)
            if torch.is_grad_enabled():
                raise NotImplementedError(f"create_graph=True: the experts have no second derivatives in "
                                          f"{layer.dtype}: use dtype=torch.float32")
            up, below = _low_of(factors, ctx.scaling, backward=True)
            g, d_h, weighted, dots, q = experts_ops.backward_down(
                layer, dy.contiguous(), plan, down, down_bias, h, row_weight, ctx.kernel, ctx.buffer, below)
            ctx.maybe_clear_saved_tensors()
            del h
            offsets = expert_offsets(layer, plan)
            if q is not None:
                d_a_down = _product(WGRAD, q, weighted, offsets) if needed[4] else None
                weighted_v = (v * row_weight[:, None]).to(v.dtype)
                d_b_down = _product(WGRAD, g, weighted_v, offsets) if needed[5] else None
            # Also where this rank wants no gradient of x: the other ranks wait for its rows.
            dx, d_weight, p = experts_ops.backward_up(layer, d_h, gate_up, dots, plan, recv, rows, g,
                                                      weighted, None, g, None, ctx.buffer, ctx.num_tokens, up)
        count_products(rows, offsets, gate_up, down, *factors)
        d_a_up = _product(WGRAD, p, rows, offsets) if p is not None and needed[2] else None
        d_b_up = _product(WGRAD, d_h, u, offsets) if p is not None and needed[3] else None
        return (dx if needed[0] else None, d_weight if needed[1] else None, d_a_up, d_b_up, d_a_down,
                d_b_down, *[None] * 6)


def _product(kind: int, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    tensors = a, b, offsets, None, None, None, None
    return cast(Tensor, call("grouped_gemm", tensors, kind, as_kernel(None), False, None))


# ---- an active adapter, one product after the other ----


def multiply(moe: EPMoE, adapter: Adapter, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the outputs [M, H] of this rank's experts with an adapter, for rows [M, H] grouped by expert.

    rows: of the layer's dtype.
    """
    with torch.autocast(rows.device.type, enabled=False):  # the dtypes are chosen already
        h = _linear(moe, adapter, "gate_up_proj", rows, offsets)
        return _linear(moe, adapter, "down_proj", activate_rows(h, moe.activation, offsets), offsets)


def _held(moe: EPMoE, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a weight as the parameters hold it: its numbers, scales and zeros."""
    of_four, numbers = moe._format.scales(moe), getattr(moe, name).detach()
    if of_four is None:
        return numbers, moe._scale_of(name), None
    first = 2 * WEIGHTS.index(name)
    return numbers, of_four[first], of_four[first + 1]


def _base(moe: EPMoE, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return rows @ W.T + bias, of which only the rows have a gradient."""
    bias, weight = getattr(moe, name + "_bias"), _held(moe, name)
    bias = None if bias is None else bias.detach()
    if rows.dtype == torch.float32:  # grouped_gemm has derivatives of any order
        return grouped_gemm(rows, weight[0], offsets=offsets, bias=bias)
    return _Frozen.apply(rows, offsets, moe, name, bias, *weight)


def padded_rank(r: int) -> int:
    """Return the rank of factors in 16 bits, so that the kernels take them."""
    return r + -r % _COLUMNS


def _padded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A [L, r, K] and B [L, N, r] with more zeros, so that the kernels take r."""
    more = 0 if a.dtype == torch.float32 else padded_rank(a.shape[1]) - a.shape[1]
    return (F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))) if more else (a, b)  # zeros change no sum


def _linear(moe: EPMoE, adapter: Adapter, name: str, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return rows @ W.T + bias + s * (dropout(rows) @ A.T) @ B.T."""
    base, factors = _base(moe, name, rows, offsets), adapter.factors(name)
    if factors is None:
        return base
    a, b = moe._scaled("", factors.lora_A), moe._scaled("", factors.lora_B)
    return add_product(base, rows, a, b, adapter.scaling, offsets, adapter.dropout if adapter.training else 0)


def add_product(base: Tensor, rows: Tensor, a: Tensor, b: Tensor, scaling: float, offsets: Tensor,
                dropout: float = 0.0) -> Tensor:
    """Return base + s * (dropout(rows) @ A.T) @ B.T.

    base: [M, N], rows @ W.T.  rows: [M, K], grouped by expert.  a: [L, r, K].  b: [L, N, r].  scaling: s.
    """
    a, b = _padded(a, b)
    x = F.dropout(rows, dropout) if dropout else rows
    delta = grouped_gemm(grouped_gemm(x.to(a.dtype), a, offsets=offsets), b, offsets=offsets)
    if base.dtype == torch.float32:
        return torch.add(base, delta, alpha=scaling)
    # Not torch.add with an alpha: on a CPU its bits depend on the place of a number.
    return (base.float() + delta.float() * scaling).to(base.dtype)


def activate_rows(h: Tensor, activation: Activation, offsets: Tensor) -> Tensor:
    """Return activation(h) of rows grouped by expert, computed in float32 and rounded once."""
    return (activate(h, activation) if h.dtype == torch.float32
            else cast(Tensor, _Activation.apply(h, activation, offsets)))


# ---- a mixture: each token has its own adapter ----


def check_numbers(layer: EPAll2AllLayer, names: tuple[str, ...], numbers: Any, x: Tensor,
                  topk_weights: Tensor) -> Tensor:
    """Return the number of each token's adapter [T] int32.

    layer: that of the module.  numbers: as for EPMoE.forward.  x: as there.  topk_weights: [T, K].
    """
    if not names:
        raise ValueError("adapters: this EPMoE has no list of adapters: call set_adapter([..]) first")
    if not isinstance(numbers, Tensor):
        raise TypeError(f"adapters: wanted a tensor, because set_adapter was called with the list "
                        f"{list(names)}, got {type(numbers).__name__}")
    if numbers.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"adapters: wanted int32 or int64, got {numbers.dtype}")
    if numbers.shape != x.shape[:-1] or numbers.device != x.device:
        raise ValueError(f"adapters: wanted shape {list(x.shape[:-1])} on {x.device}, a number for each "
                         f"token, got {list(numbers.shape)} on {numbers.device}")
    if layer.nodes is not None:
        raise ValueError("adapters: not over several nodes: use set_adapter with one name")
    if requires_grad(x, topk_weights):
        raise RuntimeError("adapters: a mixture of adapters has no gradients: call it under torch.no_grad(), "
                           "or train with set_adapter and one name")
    # Another number than those of the list means none, also one that int32 does not have.
    numbers = numbers.flatten().contiguous()
    return numbers if numbers.dtype == torch.int32 else numbers.clamp(-1, len(names)).to(torch.int32)


@torch.no_grad()  # also where a program has let all parameters require gradients
def run_mixed(moe: EPMoE, state: State, layer: EPAll2AllLayer | LowLatencyAll2All, x: Tensor,
              topk_idx: Tensor, topk_weights: Tensor, numbers: Tensor) -> tuple[Tensor, Layout | None]:
    """Apply the experts, each token with its own adapter of a list.  Returns (y, layout).

    numbers: of check_numbers.  They travel with the tokens.
    """
    is_few = isinstance(layer, LowLatencyAll2All)
    try:
        factors, weights = state.copied_factors(moe), moe._weights()
    except Exception as error:
        layer._propagate(_C.OP_LL_DISPATCH if is_few else _C.OP_PLAN, error, 0)
    if factors.are_columns:
        return _run_columns(moe, factors, weights, layer, x, topk_idx, topk_weights, numbers)
    if isinstance(layer, LowLatencyAll2All):
        rows, number, counts, handle = layer._dispatch_tagged(x, topk_idx, topk_weights, numbers)
        if moe._records_stats:
            moe._count(counts)
        try:
            y = _multiply_mixed(moe, factors, rows, handle.expert_offsets, number)
        except Exception as error:
            layer._propagate(_C.OP_LL_COMBINE, error, handle.buffer)
        return layer.combine(y, handle), None
    rows, row_weight, number, layout = layer._dispatch_tagged(x, topk_idx, topk_weights, numbers)
    try:
        y = _multiply_mixed(moe, factors, rows, layout.expert_offsets, number)
    except Exception as error:
        layer._propagate(_C.OP_COMBINE, error, layout.buffer)
    return layer.combine(y, layout, row_weight), layout


def _run_columns(moe: EPMoE, copied: CopiedFactors, weights: Weights,
                 layer: EPAll2AllLayer | LowLatencyAll2All, x: Tensor, topk_idx: Tensor, topk_weights: Tensor,
                 numbers: Tensor) -> tuple[Tensor, Layout | None]:
    """Apply the experts in one call of the module."""
    pairs = [copied.factors.get(name, (None, None)) for name in WEIGHTS]
    lora = LoraOfCall([t for pair in pairs for t in pair], mixture=(numbers, copied.r))
    if isinstance(layer, LowLatencyAll2All):
        y, counts = decoding.run(layer, x, topk_idx, topk_weights, weights, moe.activation, lora=lora)
        if moe._records_stats:
            moe._count(counts)
        return y, None
    return experts_ops.run(layer, x, topk_idx, topk_weights, weights, moe.activation, lora=lora)


def _multiply_mixed(moe: EPMoE, copied: CopiedFactors, rows: Tensor, offsets: Tensor,
                    numbers: Tensor) -> Tensor:
    """Return the outputs [M, H] for rows [M, H].  numbers: [M], that of each row's adapter."""
    with torch.autocast(rows.device.type, enabled=False):  # the dtypes are chosen already
        mixture = _Groups(moe, copied, offsets, numbers)
        h = mixture.linear("gate_up_proj", rows)
        return mixture.linear("down_proj", activate_rows(h, moe.activation, offsets))


class CopiedFactors:
    """The factors of several adapters in one tensor, all padded to the largest rank r.

    It stays where it is when it is copied again: a captured CUDA graph reads it.

    Attributes:
        adapters: Those of the list.
        are_columns: Whether the factors are those of one adapter of rank n * r, or of L * n experts.
        factors: {weight: (s A, B)} of those that an adapter changes: [L, n * r, K] and [L, N, n * r], or
            [L * n, r, K] and [L * n, N, r].
        r: The largest rank, padded.
    """

    def __init__(self, moe: EPMoE, adapters: Sequence[Adapter]) -> None:
        self.adapters, self._versions = adapters, list[tuple[int, int]]()
        self._copied: torch.cuda.Event | None = None  # when the last copy has run
        self._num, like = len(adapters), next(adapters[0].parameters())
        widest = max(adapter.r for adapter in adapters)
        self.r = widest if like.dtype == torch.float32 else padded_rank(widest)
        self.are_columns = (self._num * self.r <= _FEW_COLUMNS and like.dtype == moe.layer.dtype
                            and _adds_at_once(moe, like, adapters)
                            and is_one_call(moe.layer, moe._weights()))
        self._device = like.device
        self.factors = dict[str, Low]()
        with torch.inference_mode(False):
            for name in WEIGHTS:
                if any(adapter.factors(name) for adapter in adapters):
                    num, n, k = moe._shapes[name]
                    a = like.new_zeros(num * self._num, self.r, k)
                    b = (like.new_zeros(num, n, self._num * self.r) if self.are_columns
                         else like.new_zeros(num * self._num, n, self.r))
                    self.factors[name] = a.view(num, -1, k) if self.are_columns else a, b

    def fits(self, moe: EPMoE) -> bool:
        """Whether a call of a module can use these, which may have got other weights since."""
        return not self.are_columns or is_one_call(moe.layer, moe._weights())

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module makes its own."""

    def update(self, always: bool = False) -> None:
        """Copy the factors, if a program has written to one since the last time, or given it other memory.

        always: copy them in any case, as also those that were made in inference mode, which count no writes.
        """
        params = [p for adapter in self.adapters for p in adapter.parameters()]
        always = always or any(p.is_inference() for p in params)
        versions = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in params]
        on_gpu = self._device.type == "cuda"
        captures = on_gpu and torch.cuda.is_current_stream_capturing()
        if versions == self._versions and not always:
            if self._copied is not None and not captures:  # on another stream, perhaps
                torch.cuda.current_stream().wait_event(self._copied)
            return
        with torch.inference_mode(False), torch.no_grad():
            for name, (a, b) in self.factors.items():
                of_a = a.view(-1, self._num, self.r, a.shape[-1])  # [L, n, r, K] and [L, n, N, r]
                of_b = (b.unflatten(2, (self._num, self.r)).permute(0, 2, 1, 3) if self.are_columns
                        else b.unflatten(0, (-1, self._num)))
                for i, adapter in enumerate(self.adapters):
                    pair = adapter.factors(name)
                    if pair is not None:
                        of_a[:, i, :adapter.r] = pair.lora_A * adapter.scaling
                        of_b[:, i, :, :adapter.r] = pair.lora_B
        if not captures:  # a captured copy has not run
            self._versions = versions
            self._copied = torch.cuda.current_stream().record_event() if on_gpu else None


class _Groups:
    """The rows of a call, in the order of (expert, adapter): a grouped GEMM has a group for each pair."""

    def __init__(self, moe: EPMoE, copied: CopiedFactors, offsets: Tensor, numbers: Tensor) -> None:
        self.moe, self.offsets, self.copied = moe, offsets, copied
        num, num_local = len(copied.adapters), len(offsets) - 1
        expert = expert_of_row(offsets, len(numbers))
        self.has = ((expert < num_local) & (numbers >= 0) & (numbers < num))[:, None]
        number = torch.where(self.has[:, 0], numbers, 0).to(torch.int64)
        group = torch.where(self.has[:, 0], expert * num + number, num_local * num)
        group, self.order = torch.sort(group, stable=True)
        bounds = torch.arange(num_local * num + 1, device=group.device)
        self.groups = torch.searchsorted(group, bounds).to(torch.int32)

    def linear(self, name: str, rows: Tensor) -> Tensor:
        """Return rows @ W.T + bias + (rows @ (s A).T) @ B.T, with A, B and s of each row."""
        base = _base(self.moe, name, rows, self.offsets)
        if name not in self.copied.factors:
            return base
        a, b = self.copied.factors[name]
        t = grouped_gemm(rows[self.order].to(a.dtype), a, offsets=self.groups)
        t = grouped_gemm(t, b, offsets=self.groups)
        delta = torch.empty_like(t)
        delta[self.order] = t
        y = (base.float() + delta.float()).to(base.dtype)
        return torch.where(self.has, y, base)  # other rows of delta are undefined


class _Frozen(torch.autograd.Function):
    """The product of rows and a weight without a gradient.

    The bias is added before the result is rounded, with and without a gradient of the rows.  The backward
    multiplies by the weights in the layer's dtype.  Weights of 8 and 4 bits are dequantised for it, of all
    experts of the rank at once: grouped_gemm has no product with the transposed weights of these formats.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, moe: EPMoE, name: str, bias: Tensor | None,
                *weight: Tensor | None) -> Tensor:
        ctx.moe, ctx.name = moe, name
        ctx.save_for_backward(offsets, *weight)  # torch then notices a change in place
        numbers, scale, zero = weight
        assert numbers is not None
        if moe.is_fp8:
            q, row_scale = quantize_fp8(rows, num_rows=offsets[-1:])
            return cast(Tensor, grouped_gemm(q, numbers, offsets=offsets, bias=bias, a_scale=row_scale,
                                             b_scale=scale, out_dtype=rows.dtype))
        return cast(Tensor, grouped_gemm(rows, numbers, offsets=offsets, bias=bias, b_scale=scale,
                                         b_zero=zero))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        offsets, numbers, *_ = ctx.saved_tensors
        is_plain = ctx.moe._format.has_gradients
        weight = numbers if is_plain else ctx.moe._format.dequantized(ctx.moe, ctx.name)
        return grouped_gemm(g, weight.transpose(1, 2), offsets=offsets), *[None] * 7


class _Activation(torch.autograd.Function):
    """The activation of h in 16 bits, computed in float32 and rounded once.

    Only h is kept for the backward, which computes the activation again.  The kernel of the gradient also
    makes the activation itself.  torch's functions on a CPU give a number other bits at another place.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, activation: Activation, offsets: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(h, offsets)
        if not _has_activation_kernel(h, _columns(h, activation)):
            return activate(h.float(), activation).to(h.dtype)
        d = h.new_zeros(len(h), _columns(h, activation))
        return _gradient_and_activation(h, d, activation, offsets)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        check_backward(g)
        h, offsets = ctx.saved_tensors
        if _has_activation_kernel(h, _columns(h, ctx.activation)):
            return _gradient_and_activation(h, g.contiguous(), ctx.activation, offsets)[0], None, None
        with torch.enable_grad():
            wide = h.detach().float().requires_grad_()
            a = activate(wide, ctx.activation)
        return torch.autograd.grad(a, wide, g.float())[0].to(h.dtype), None, None


def _columns(h: Tensor, activation: Activation) -> int:
    return h.shape[1] // (1 + is_gated(activation))


def _has_activation_kernel(h: Tensor, columns: int) -> bool:
    """Whether the gradient of an activation with so many columns has a kernel.  h: a tensor of its device."""
    return h.device.type == "cpu" or h.device.type == "cuda" and bool(_C.HAS_CUDA) and columns % 8 == 0


def _gradient_and_activation(h: Tensor, d: Tensor, activation: Activation,
                             offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of h where that of activation(h) is d, and activation(h)."""
    d_h, a, dots = torch.empty_like(h), torch.empty_like(d), h.new_empty(len(h), dtype=torch.float32)
    _C.activation(as_kernel(activation), aligned(h), aligned(d), aligned(offsets), None, d_h, a, dots, None,
                  None, False)
    return d_h, a


