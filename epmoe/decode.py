"""When and how EPMoE uses LowLatencyAll2All: for layers of few tokens, where no gradient is wanted."""

import torch

from . import _C, moe_fp8
from .direct import is_traced, requires_grad
from .errors import HeapExhausted
from .fused import EpAll2AllFusedOp, fuses
from .gemm import grouped_gemm
from .low_latency import LowLatencyAll2All

MOST_TOKENS = 512  # of a rank in a layer that decodes by itself
SPARE_BUFFERS = 32  # of the 256 communication buffers of a world


def decodes(max_tokens, topk, num_experts, world_size):
    """Whether calls of a layer of this shape, without gradients, take the low-latency path by themselves.

    It depends on the shape alone, because all ranks must decide alike, whatever their numbers of tokens.
    """
    return max_tokens <= MOST_TOKENS and not fuses(max_tokens, topk, num_experts, world_size)


class _Path(LowLatencyAll2All):
    """A path that a call makes by itself: it leaves communication buffers for what the program asks for."""

    _spare_buffers = SPARE_BUFFERS


def create(layer, max_tokens, kind=LowLatencyAll2All):
    """Return a LowLatencyAll2All of a layer's shape, which uses no more SMs than the layer.  Collective."""
    return kind(layer.world, max_tokens, layer.hidden, layer.topk * layer._copies, layer.num_experts,
                dtype=layer.dtype, device=layer.device, num_sm=layer._requested_num_sm,
                reserve_sms=layer._config.reserve_sms)


def decodes_alone(layer):
    """Whether calls without gradients take the low-latency path by themselves."""
    return (isinstance(layer, EpAll2AllFusedOp) and not layer.fused and layer.capacity is None
            and layer.may_decode and layer._config.combine_mode == _C.COMBINE_LOCAL
            and decodes(layer.max_tokens // layer._copies, layer.topk * layer._copies, layer.num_experts,
                        layer.world_size))


def path_of(layer, decode, is_fp8):
    """Return the LowLatencyAll2All that a call uses, or None: the layer's stages.

    decode: as for EPMoE.forward.  All ranks must decide alike.  So the tensors of the call do not count, of
    which only this rank's may require a gradient.  Experts in FP8 have no gradients.

    The first call of a layer that decodes by itself creates the path, on all ranks.  An error of that reaches
    all ranks, so it must not be reported again.
    """
    if decode is not None:
        return layer.low_latency if decode is True else None
    if is_traced() or torch.is_grad_enabled() and not is_fp8 or not decodes_alone(layer):
        return None
    if layer.low_latency is None:
        if layer.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # nothing can be created now
        try:
            layer.low_latency = create(layer, layer.max_tokens // layer._copies, _Path)
        except HeapExhausted:  # on all ranks
            layer.may_decode = False
    return layer.low_latency


def check_path(path, decode, *tensors):
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


def run(moe, a2a, x, topk_idx, topk_weights):
    """Dispatch, the experts of moe, and combine through a2a."""
    rows, scales, _, handle = a2a.dispatch(x, topk_idx, topk_weights, fp8=moe.is_fp8, layout="compact")
    try:
        offsets = handle.expert_offsets
        if moe.is_fp8:
            y = moe_fp8.compute(moe, rows, scales, offsets)
        else:
            h = grouped_gemm(rows, moe.gate_up_proj, offsets=offsets, bias=moe.gate_up_proj_bias,
                             activation=moe.activation)
            y = grouped_gemm(h, moe.down_proj, offsets=offsets, bias=moe.down_proj_bias)
    except Exception as error:
        a2a._refuse(_C.OP_LL_COMBINE, error, handle.buffer)
    return a2a.combine(y, handle)
