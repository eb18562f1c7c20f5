"""In how many chunks an EPMoE over several nodes moves its tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, cast

import torch

from ..comm.nodes import Nodes
from ..comm.rail import RESERVE_SMS
from .cost_model import CHUNKS, Rates, Shape, predict

if TYPE_CHECKING:
    from ..a2a.internode.layer import InternodeLayer
    from ..a2a.layer import EPAll2AllLayer
    from ..comm.world import World
    from .module import EPMoE

MAX_CHUNKS = 64
_SMS = 132  # of a GPU of Hopper


def check_num_chunks(num_chunks: Any) -> int | None:
    """Return num_chunks, None or 1 to 64.  Raises TypeError or ValueError."""
    if num_chunks is None:
        return None
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int):
        raise TypeError(f"num_chunks {num_chunks!r}: must be an integer or None")
    if not 1 <= num_chunks <= MAX_CHUNKS:
        raise ValueError(f"num_chunks {num_chunks}: must be 1 to {MAX_CHUNKS}")
    return num_chunks


def choose_chunks(max_tokens: int, hidden: int, inner: int, num_experts: int, topk: int, num_nodes: int,
                  local_size: int, trains: bool = False) -> int:
    """Return the number of chunks with the least time that cost_model.py predicts.

    A pure function of numbers that all ranks share.  With chunks, the node's kernels leave SMs to NCCL and so
    multiply more slowly.  The rates are those of an H200 with a network card of 400 Gb/s for each rank.

    Args:
        max_tokens: T, the most tokens of a rank.
        hidden: H.
        inner: I.
        num_experts: E of all ranks.
        topk: K.
        num_nodes: N.
        local_size: L, the ranks of a node.
        trains: Whether a backward follows, which takes the chunks of its forward.

    Returns:
        1, where overlap brings nothing; else 2, 3, 4, 6 or 8.

    Examples:
        >>> from epmoe.moe.chunks import choose_chunks
        >>> choose_chunks(8192, 7168, 2048, 256, 8, num_nodes=2, local_size=8)
        4
        >>> choose_chunks(64, 7168, 2048, 256, 8, num_nodes=2, local_size=8)
        1
    """
    if num_nodes == 1 or topk > num_experts or num_experts % num_nodes:
        return 1
    shape = Shape(max_tokens, hidden, inner, num_experts, topk)
    whole = Rates()
    shared = dataclasses.replace(whole, gemm=whole.gemm * (1 - RESERVE_SMS / _SMS))

    def seconds(c: int) -> float:
        total = 0.0
        for backward in (False, True)[: 1 + trains]:
            told = predict(shape, num_nodes, local_size, whole if c == 1 else shared, backward=backward,
                           chunks=(c,))
            total += told.serial_s if c == 1 else told.pipelined_s
        return total

    return min(CHUNKS, key=seconds)


def _check_fixed(num_chunks: int | None, rail_capacity: int) -> None:
    if (num_chunks or 1) > 1:
        raise ValueError(f"num_chunks {num_chunks} with rail_capacity {rail_capacity}: exchanges of fixed "
                         f"sizes have one chunk: leave one of them out")


def reserved_sms(num_chunks: int | None, world: World | Nodes, rail_capacity: int | None, reserve_sms: int,
                 sizes: tuple[int, int, int, int, int]) -> int:
    """Return the reserve_sms of a new layer: with SMs for NCCL's kernels, if any call may have chunks.

    sizes: T, H, I, E and K.
    """
    if not isinstance(world, Nodes) or world.num_nodes == 1:
        return reserve_sms
    if rail_capacity is not None:
        _check_fixed(num_chunks, rail_capacity)
        return reserve_sms
    if num_chunks == 1:
        return reserve_sms
    try:
        t, h, i, e, k = map(int, sizes)
        if num_chunks is None and all(choose_chunks(t, h, i, e, k, world.num_nodes, world.local_size, trains)
                                      == 1 for trains in (False, True)):
            return reserve_sms
    except (TypeError, ValueError, ArithmeticError):  # the layer will say what is wrong with the sizes
        return reserve_sms
    return max(RESERVE_SMS, reserve_sms or 0)


def check_layer(num_chunks: int | None, layer: EPAll2AllLayer) -> None:
    """Check a layer that a module shares.  Raises ValueError."""
    if layer.rail_capacity is not None and getattr(layer, "num_nodes", 1) > 1:
        _check_fixed(num_chunks, layer.rail_capacity)
    if (num_chunks or 1) > 1 and not getattr(layer, "leaves_sms", True):
        raise ValueError(f"num_chunks {num_chunks}: the shared layer leaves no SMs to NCCL, which works at "
                         f"the same time: create it with reserve_sms={RESERVE_SMS}, or pass num_chunks=1")


_choose = functools.cache(choose_chunks)


def chunks_of_call(moe: EPMoE, gradients: bool) -> int:
    """Return the number of chunks of a call: the same on all ranks that make the same call."""
    layer = cast("InternodeLayer", moe.layer)
    if layer.rail_capacity is not None or gradients and (moe._has_other_gradients or moe._adapter_leaves()):
        return 1
    if moe.num_chunks is not None:
        return moe.num_chunks
    if layer.device.type == "cpu" or not layer.leaves_sms or gradients and layer.dtype == torch.float32:
        return 1
    nodes = layer.world
    _, hidden, inner = moe._shapes["down_proj"]
    return _choose(layer.max_tokens // layer._copies, hidden, inner, layer.num_experts,
                   layer.topk * layer._copies, nodes.num_nodes, nodes.local_size, gradients)
