"""In how many chunks an EPMoE over several nodes moves its tokens."""

import dataclasses

import torch

from ..comm.rail import RESERVE_SMS
from .cost_model import CHUNKS, Rates, Shape, predict

MAX_CHUNKS = 64
_SMS = 132  # of a GPU of Hopper


def check_num_chunks(num_chunks):
    """Return num_chunks, None or 1 to 64.  Raises TypeError or ValueError."""
    if num_chunks is None:
        return None
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int):
        raise TypeError(f"num_chunks {num_chunks!r}: must be an integer or None")
    if not 1 <= num_chunks <= MAX_CHUNKS:
        raise ValueError(f"num_chunks {num_chunks}: must be 1 to {MAX_CHUNKS}")
    return num_chunks


def choose_chunks(max_tokens, hidden, inner, num_experts, topk, num_nodes, local_size, trains=False):
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

    def seconds(c):
        total = 0.0
        for backward in (False, True)[: 1 + trains]:
            told = predict(shape, num_nodes, local_size, whole if c == 1 else shared, backward=backward,
                           chunks=(c,))
            total += told.serial_s if c == 1 else told.pipelined_s
        return total

    return min(CHUNKS, key=seconds)


class Chunks:
    """The part of EPMoE that says in how many chunks tokens cross between nodes."""

    def _init_chunks(self, num_chunks, world, options):
        """Take num_chunks of a new module with the options of its layer.  Raises TypeError or ValueError."""
        self.num_chunks = check_num_chunks(num_chunks)
        rail_capacity = options.get("rail_capacity")
        if rail_capacity is not None and getattr(world, "num_nodes", 1) > 1:
            self._check_fixed(rail_capacity)
        self._chosen = {}  # arguments of choose_chunks -> its result

    def _with_room(self, world, options, sizes):
        """Return the options of a new layer: with SMs for NCCL's kernels, if any call may have chunks.

        sizes: T, H, I, E and K.
        """
        if (getattr(world, "num_nodes", 1) == 1 or self.num_chunks == 1
                or options.get("rail_capacity") is not None):
            return options
        of_world = world.num_nodes, world.local_size
        try:
            if self.num_chunks is None and all(choose_chunks(*map(int, sizes), *of_world, trains) == 1
                                               for trains in (False, True)):
                return options
        except (TypeError, ValueError, ArithmeticError):  # the layer will say what is wrong with the sizes
            return options
        return options | {"reserve_sms": max(RESERVE_SMS, options.get("reserve_sms") or 0)}

    def _check_fixed(self, rail_capacity):
        if (self.num_chunks or 1) > 1:
            raise ValueError(f"num_chunks {self.num_chunks} with rail_capacity {rail_capacity}: exchanges of "
                             f"fixed sizes have one chunk: leave one of them out")

    def _check_room(self, layer):
        """Check a shared layer."""
        if layer.rail_capacity is not None and getattr(layer, "num_nodes", 1) > 1:
            self._check_fixed(layer.rail_capacity)
        if (self.num_chunks or 1) > 1 and not getattr(layer, "leaves_sms", True):
            raise ValueError(f"num_chunks {self.num_chunks}: the shared layer leaves no SMs to NCCL, which "
                             f"works at the same time: create it with reserve_sms={RESERVE_SMS}, or pass "
                             f"num_chunks=1")

    def _num_chunks_of(self, gradients):
        """Return the number of chunks of a call: the same on all ranks that make the same call."""
        layer = self.layer
        if layer.rail_capacity is not None or gradients and self._has_other_gradients:
            return 1
        if self.num_chunks is not None:
            return self.num_chunks
        if layer.device.type == "cpu" or not layer.leaves_sms or gradients and layer.dtype == torch.float32:
            return 1
        inner = self.down_proj.shape[2]
        of = (layer.max_tokens // layer._copies, layer.hidden, inner, layer.num_experts,
              layer.topk * layer._copies, layer.num_nodes, layer.world.local_size, gradients)
        if of not in self._chosen:
            self._chosen[of] = choose_chunks(*of)
        return self._chosen[of]
