"""When and how EPMoE uses LowLatencyAll2All: for layers of few tokens, where no gradient is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _C
from ..a2a.low_latency import LowLatencyAll2All
from ..errors import HeapExhausted
from ..gemm.activations import KERNELS, Activation, as_kernel
from ..torch_modes import check_mode, is_plain, is_traced, is_watched, requires_grad
from . import experts as experts_ops

if TYPE_CHECKING:
    from ..a2a.layer import EPAll2AllLayer
    from .lora_products import LoraOfCall

SPARE_BUFFERS = 32  # of the 256 communication buffers of a world


class _Path(LowLatencyAll2All):
    """A path that a call makes by itself: it leaves communication buffers for what the program asks for."""

    _spare_buffers = SPARE_BUFFERS


def create(layer: EPAll2AllLayer, max_tokens: int,
           kind: type[LowLatencyAll2All] = LowLatencyAll2All) -> LowLatencyAll2All:
    """Return a LowLatencyAll2All of a layer's shape and with its sums.  Collective.

    It uses no more SMs than the layer.
    """
    return kind(layer.world, max_tokens, layer.hidden, layer.topk * layer._copies, layer.num_experts,
                dtype=layer.dtype, device=layer.device, num_sm=layer._requested_num_sm,
                enable_local_combine=layer._config.combine_mode == _C.COMBINE_LOCAL,
                reserve_sms=layer._config.reserve_sms)


def path_of(layer: EPAll2AllLayer, decode: bool | None, has_gradients: bool) -> LowLatencyAll2All | None:
    """Return the LowLatencyAll2All that a call uses, or None: the layer's stages.

    decode: as for EPMoE.forward.  All ranks must decide alike.  So the tensors of the call do not count, of
    which only this rank's may require a gradient.
    has_gradients: whether the experts can have any.

    The first call of a layer that decodes by itself creates the path, on all ranks.  An error of that reaches
    all ranks, so it must not be reported again.
    """
    if decode is not None:
        # check_path refuses decode=1.  In the call that it means, the other ranks most likely are.
        return layer.low_latency if getattr(decode, "ndim", 0) == 0 and decode else None
    if not layer.may_decode or torch.is_grad_enabled() and has_gradients or is_traced():
        return None
    if layer.low_latency is None:
        if layer.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # nothing can be created now
        try:
            layer.low_latency = create(layer, layer.max_tokens // layer._copies, _Path)
        except HeapExhausted:  # on all ranks
            layer.may_decode = False
            return None
    # A path of enable_decode may be for fewer tokens than a call may have.  Then decode=True chooses it.
    is_for_all = layer.low_latency.max_tokens >= layer.max_tokens // layer._copies
    return layer.low_latency if is_for_all else None


def check_path(path: LowLatencyAll2All | None, decode: Any, *tensors: Tensor | None) -> None:
    """Raise for a wrong `decode`, and for decode=True without a path, or where a gradient is wanted."""
    if not isinstance(decode, bool):
        raise TypeError(f"decode: wanted True, False or None, got {type(decode).__name__}")
    if not decode:
        return
    if path is None:
        raise ValueError("decode=True, but this module has no decode path: call enable_decode() first")
    if requires_grad(*tensors) or is_traced():
        raise RuntimeError("decode=True has no gradients and cannot be compiled: call it under "
                           "torch.no_grad(), outside of torch.compile")


def run(a2a: LowLatencyAll2All, x: Tensor, topk_idx: Tensor, topk_weights: Tensor,
        weights: experts_ops.Weights, activation: Activation,
        scales: experts_ops.Scales | None = None,
        lora: LoraOfCall | None = None) -> tuple[Tensor, Tensor]:
    """Dispatch, apply the experts, and combine, in one call of the module.

    Returns (y [T, H], the number of rows of each expert [L]).

    weights: as EPMoE._weights returns them, for which experts.takes says yes.  scales: those of weights of 4
    bits.  lora: an adapter or a mixture.
    """
    gate_up, gate_up_bias, down, down_bias = weights
    capacity = a2a.capacity
    assert capacity is not None  # of a low-latency layer
    try:
        a2a._check_idle(_C.OP_LL_DISPATCH, 0)
        if not is_plain():
            check_mode(x, topk_weights, *weights, *(lora.factors if lora else ()))
        kernel = type(activation) is str and KERNELS.get(activation) or as_kernel(activation)
        allocate, hidden, inner = a2a._allocator(), a2a.hidden, down.shape[2] * (1 if scales is None else 2)
        up_scale, up_zero, down_scale, down_zero = scales or experts_ops.NO_SCALES
        weight = topk_weights if topk_weights.dtype == torch.float32 else experts_ops.as_float32(topk_weights)
        if gate_up_bias is not None or down_bias is not None:
            gate_up_bias, down_bias = (experts_ops.bias_of(a2a, b) for b in (gate_up_bias, down_bias))
        x, weight, gate_up, gate_up_bias, down, down_bias = experts_ops.aligned_all(
            x, weight, gate_up, gate_up_bias, down, down_bias)
        handle = allocate((a2a._handle_words,), (1,), torch.int32)
        counts = allocate((a2a.num_local_experts,), (1,), torch.int32)
        rows = allocate((capacity, hidden), (hidden, 1), a2a.dtype)
        a = allocate((capacity, inner), (inner, 1), a2a.dtype)
        y = allocate((x.shape[0], hidden), (hidden, 1), a2a.dtype)
        low = (None, None) if lora is None else lora.low()
        tag, adapter_columns = lora and lora.mixture or (None, 0)
        row_tag = None if tag is None else allocate((capacity,), (1,), torch.int32)
        low_up, low_down = (experts_ops.low_rows_of(allocate, capacity, pair, 1) for pair in low)
        # The second product writes into the rows, which the first has read by then.
        _C.layer_ll_experts(a2a._c, 0, (x, topk_idx, weight, gate_up, gate_up_bias, up_scale, up_zero, down,
                                        down_bias, down_scale, down_zero, handle, rows, counts, a, rows, y,
                                        *(low[0] or experts_ops.NO_LOW), low_up,
                                        *(low[1] or experts_ops.NO_LOW), low_down, tag, row_tag,
                                        adapter_columns, kernel))
    except Exception as error:
        a2a._propagate(_C.OP_LL_DISPATCH, error, 0)
    if lora is not None and is_watched():
        lora.count(rows, F.pad(counts.cumsum(0), (1, 0)).to(torch.int32), weights)
    return y, counts
