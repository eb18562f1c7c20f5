"""LowLatencyAll2All: dispatch and combine for decoding, where few tokens wait for each other."""

import contextlib

import torch

from .. import _C
from ..comm.device import allocator_of, integer, pick_device, stream_of
from ..comm.heap import SymmetricHeap
from ..comm.world import World
from .layer_parts import DTYPES, max_blocks, refuse_layer, world_of
from .low_latency_parts import BOTH, SEND, LowLatencyHandle, LowLatencyParts, PendingCall

__all__ = ["LowLatencyAll2All", "LowLatencyHandle", "PendingCall"]


class LowLatencyAll2All(LowLatencyParts):
    """Sends few tokens to the ranks of their experts, and returns the weighted sums, in few hops.

    For inference: it has no gradients.  Each of dispatch and combine is one launch without a plan before it.
    The host reads nothing, memory comes from torch's allocator alone, and no launch clears a buffer.  So
    calls can be captured in CUDA graphs, and replays may be mixed with other calls.

    Letters: W ranks, E experts, L = E/W experts of a rank, T tokens of this rank (may differ per rank and
    call, and be 0), K choices per token, H hidden.

    Creation is collective, and so are all methods except synchronize.  All ranks make the same calls in the
    same order.  On CUDA, operations return before they have run.  An error in a kernel is raised by the next
    call, or by synchronize(); rows that did not arrive are then NaN.

    Args:
        ep_group: A ProcessGroup, a one-dimensional DeviceMesh, an epmoe.World, or None for the default group.
        max_tokens: The most tokens of a rank in one call.  At most 4096, or less with many ranks and experts.
        hidden: H.  A row must be a multiple of 16 bytes; for fp8 a multiple of 128 numbers, for "ue8m0"
            of 512.
        topk: K, 1 to 32.
        num_experts: E, a multiple of W, at most 1024.  Expert e is on rank e // (E / W).  For other numbers,
            and for replicas of busy experts, see ExpertMap.
        dtype: Of the tokens: bfloat16, float16 or float32.
        device: As for SymmetricHeap.  With a heap: None, or the heap's device.
        num_buffers: Communication buffers, 1 to 16: operations that may be under way at once, for example one
            for each micro-batch.
        num_sm: CUDA: the most thread blocks of a kernel, by default all SMs.  CPU: worker threads, by default
            1.
        reserve_sms: As for EPAll2AllLayer.
        heap: A SymmetricHeap to share with other layers, or None: a heap of its own.
        timeout_s: As for World.

    Attributes:
        world: The World.
        heap: The SymmetricHeap that holds the buffers.
        rank: This rank.
        world_size: W.
        num_experts: E.
        num_local_experts: L.
        device: The torch.device of the heap.

    Raises:
        ValueError: On this rank, for an argument out of range.
        TypeError: On this rank, for an argument of the wrong type or dtype.
        PeerError: On the other ranks, when one rank raises ValueError or TypeError.
        EpMismatch: On all ranks, when they ask for different layers.
        HeapExhausted: On all ranks, when one of them has no room.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        Two ranks, four experts; each expert adds its number to its rows.

        >>> import epmoe
        >>> import torch
        >>> from epmoe.testing import run_threads
        >>> def main(world):
        ...     sizes = dict(max_tokens=2, hidden=4, topk=2, num_experts=4, dtype=torch.float32)
        ...     with epmoe.LowLatencyAll2All(world, device="cpu", **sizes) as a2a:
        ...         x = torch.full((1, 4), 10.0 * world.rank)
        ...         rows, _, counts, handle = a2a.dispatch(x, torch.tensor([[0, 3]]), torch.ones(1, 2))
        ...         numbers = torch.arange(2 * world.rank, 2 * world.rank + 2)
        ...         return a2a.combine(rows + numbers[:, None, None], handle)[0, 0].item()
        >>> run_threads(main, 2)
        [3.0, 23.0]

    References:
        The low-latency all-to-all of DeepSeek's DeepEP and of Triton-distributed.  Words with a tag
        that shows their arrival are from NCCL's LL protocol.
    """

    _copies = 1

    def __init__(self, ep_group, max_tokens, hidden, topk, num_experts, *, dtype=torch.bfloat16, device=None,
                 num_buffers=1, num_sm=None, reserve_sms=0, heap=None, timeout_s=None):
        self.world = world_of(ep_group, heap, timeout_s)
        self.rank = self.world.rank
        self.world_size = self.world.size
        try:
            if not isinstance(self.world, World):
                raise ValueError("LowLatencyAll2All is for the ranks of one node, but these are of several: "
                                 "pass the process group of one node; an EPMoE over several nodes has no "
                                 "low-latency path")
            self._check_heap(heap, device)
            if dtype not in DTYPES:
                raise TypeError(f"dtype {dtype}: must be float32, float16 or bfloat16")
            self.max_tokens = integer("max_tokens", max_tokens)
            self.hidden = integer("hidden", hidden)
            self.topk = integer("topk", topk)
            self.num_experts = integer("num_experts", num_experts)
            self.num_local_experts = self.num_experts // self.world_size
            self.dtype = dtype
            self.device = heap.device if heap is not None else pick_device(device)
            reserve_sms = integer("reserve_sms", reserve_sms)
            most = max_blocks(self.device, reserve_sms)
            self._num_buffers = integer("num_buffers", num_buffers)
            self._num_sm = (1 if self.device.type == "cpu" else most) if num_sm is None \
                else integer("num_sm", num_sm)
            # A token has one row at an expert, so more rows than these cannot arrive.
            self._most_tokens = self.world_size * self.max_tokens
            self.capacity = self._most_tokens * min(self.topk, self.num_local_experts)
            self._config = self._make_config(_C.LOW_LATENCY, reserve_sms)
            num_bytes = _C.layer_bytes(self._config)
            if timeout_s is not None:
                self.world.set_timeout(timeout_s)
        except Exception as error:
            refuse_layer(self.world, heap, error)
            raise
        self._owns_heap = heap is None
        if self._owns_heap:
            _C.layer_agree(self.world._c, self._config, 0)
        self.heap = SymmetricHeap(self.world, num_bytes, self.device) if heap is None else heap
        try:
            self._c = _C.layer_create(self.heap._c, self._config)
        except Exception:
            with contextlib.suppress(Exception):  # all ranks fail here, so all close the heap of this layer
                if self._owns_heap:
                    self.heap.close()
            raise
        self._handle_words, self._offsets_at = _C.ll_handle_words(self._config)
        self._pending = [None] * self._num_buffers
        self._allocate = allocator_of(self.device)
        self._shapes = {"masked": (self.num_local_experts, self._most_tokens, self.hidden),
                        "compact": (self.capacity, self.hidden)}
        self._outputs = {}  # (fp8, layout) -> a function that allocates the outputs

    def dispatch(self, x, topk_idx, topk_weights=None, *, fp8=False, layout="masked", buffer=0, out=None):
        """Send tokens to the ranks of their experts.  Collective.

        A token crosses the link once for each rank, and has one row at each expert.

        Args:
            x: [T, H] of the layer's dtype, contiguous.
            topk_idx: [T, K] int32 or int64, contiguous.  -1 and E mean that the choice is dropped.
            topk_weights: [T, K] of a floating-point dtype, with which combine multiplies, or None: 1.
            fp8: False: rows of the layer's dtype.  True: rows of float8_e4m3fn, quantised once at the source,
                with a scale for each 128 numbers: the largest magnitude / 448.  "pow2": the next power of
                two.  "ue8m0": that power as its exponent + 127 in a byte (reference.pack_ue8m0).  The same on
                all ranks.
            layout: "masked": a slab of W * max_tokens rows for each expert, its rows first.  "compact": the
                rows of an expert next to each other, experts in order.
            buffer: The communication buffer to use.
            out: None, or what an earlier dispatch with the same fp8 and layout returned: its tensors are
                written again, and its handle becomes that of this dispatch.  This saves the host the time to
                allocate tensors, half of the call.  x, topk_idx and float32 topk_weights are not in their
                memory.

        Returns:
            A tuple (recv_x, scales, recv_counts, handle).  recv_x is [L, W * max_tokens, H], or for "compact"
                [W * max_tokens * min(K, L), H]; an expert's rows are in the order (source rank, token), and
                rows after the last one are undefined.  32 bits that are all ones, NaN in every dtype,
                may arrive as another NaN.  scales is None, or float32 [.., H / 128], or for
                "ue8m0" int32 [.., H / 512], indexed as recv_x; in memory the scales of a group are next to
                each other, as grouped GEMMs want them.
                recv_counts is [L] int32.

        Raises:
            ValueError: On this rank, for a wrong shape, device, fp8, layout, buffer or out, and for an out
                that shares memory with an input.
            TypeError: On this rank, for a wrong type or dtype.
            RuntimeError: On this rank, when a gradient is wanted, also one of out.
            NotImplementedError: On this rank, for a tensor with a tangent, and inside of torch.func.
            PeerError: On the other ranks, when one rank raises one of these.
            EpIndexError: On all ranks, for an index outside [-1, E] on any of them.
            EpMismatch: On all ranks, when they are not in the same call, or with different fp8.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> a2a = epmoe.LowLatencyAll2All(epmoe.World(), 4, 4, 1, 2, dtype=torch.float32, device="cpu")
            >>> x = torch.tensor([[7.0] * 4, [8.0] * 4, [9.0] * 4])
            >>> rows, _, counts, handle = a2a.dispatch(x, torch.tensor([[1], [0], [1]]), layout="compact")
            >>> counts.tolist(), rows[:3, 0].tolist()
            ([1, 2], [8.0, 7.0, 9.0])
            >>> a2a.finalize()
        """
        arguments, result = self._prepare_dispatch(x, topk_idx, topk_weights, fp8, layout, buffer, out)
        _C.layer_ll_dispatch(self._c, buffer, (*arguments, BOTH))
        return result

    def dispatch_send(self, x, topk_idx, topk_weights=None, *, fp8=False, layout="masked", buffer=0,
                      out=None):
        """Send as dispatch does, and return before anything is received.  Collective.

        Work between this call and recv runs while the rows are on their way.  A buffer has one call under
        way.

        Args:
            x: As for dispatch, and so are all arguments.
            topk_idx: As there.
            topk_weights: As there.
            fp8: As there.
            layout: As there.
            buffer: As there.
            out: As there.

        Returns:
            A PendingCall, whose recv() returns what dispatch returns.

        Raises:
            EpError: As dispatch.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> a2a = epmoe.LowLatencyAll2All(epmoe.World(), 4, 4, 1, 2, dtype=torch.float32, device="cpu")
            >>> pending = a2a.dispatch_send(torch.ones(2, 4), torch.tensor([[1], [0]]))
            >>> pending.recv()[2].tolist()
            [1, 1]
            >>> a2a.finalize()
        """
        arguments, result = self._prepare_dispatch(x, topk_idx, topk_weights, fp8, layout, buffer, out)
        _C.layer_ll_dispatch(self._c, buffer, (*arguments, SEND))
        written = () if out is None else result[3]._written
        return self._set_pending(buffer, _C.layer_ll_dispatch, arguments, result, written)

    def combine(self, y, handle, *, fp8=False, out=None):
        """Return the experts' rows to the ranks of their tokens, and add them up there.  Collective.

        The sums are those of EPAll2AllLayer with enable_local_combine, bit for bit:

            y[t] = round(sum over ranks r = 0, 1, ... of round(sum over k at r of w_k * row_k))

        With fp8, each inner sum that crosses between two ranks is quantised after it was rounded, and so the
        result has an error: docs/decode.md#lowlatencyall2all.

        Args:
            y: The experts' outputs, of the layer's dtype, in the layout of dispatch's rows, contiguous.
            handle: What dispatch returned.
            fp8: Whether sums travel as float8_e4m3fn with a float32 scale for each 128 numbers, the largest
                magnitude / 448: about half of the bytes.  The same on all ranks, and independent of the
                dispatch's fp8.  The layer's dtype must be bfloat16 or float16, and H a multiple of 128.
            out: None, or a contiguous [T, H] tensor of the layer's dtype to write and return.  It shares no
                memory with y or the handle.

        Returns:
            [T, H] of the layer's dtype.

        Raises:
            ValueError: On this rank, for a wrong shape or device, another layer's handle, or an out that
                shares memory with y or the handle.
            TypeError: On this rank, for a wrong type or dtype.
            RuntimeError: On this rank, when a gradient is wanted, also one of out.
            NotImplementedError: On this rank, for a tensor with a tangent, and inside of torch.func.
            PeerError: On the other ranks, when one rank raises one of these.
            EpMismatch: On all ranks, when they are not in the same call, with different fp8, or use different
                dispatches.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> a2a = epmoe.LowLatencyAll2All(epmoe.World(), 4, 4, 2, 2, dtype=torch.float32, device="cpu")
            >>> weights = torch.tensor([[0.25, 0.5]])
            >>> rows, _, _, handle = a2a.dispatch(torch.ones(1, 4), torch.tensor([[0, 1]]), weights)
            >>> a2a.combine(rows, handle)
            tensor([[0.7500, 0.7500, 0.7500, 0.7500]])
            >>> a2a.finalize()
        """
        arguments, out = self._prepare_combine(y, handle, fp8, out)
        _C.layer_ll_combine(self._c, handle.buffer, (*arguments, BOTH))
        return out

    def combine_send(self, y, handle, *, fp8=False, out=None):
        """Send as combine does, and return before anything is received.  Collective.

        Args:
            y: As for combine.
            handle: As for combine.
            fp8: As for combine.
            out: As for combine.

        Returns:
            A PendingCall, whose recv() returns what combine returns.

        Raises:
            EpError: As combine.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> a2a = epmoe.LowLatencyAll2All(epmoe.World(), 4, 4, 1, 2, dtype=torch.float32, device="cpu")
            >>> rows, _, _, handle = a2a.dispatch(torch.ones(1, 4), torch.tensor([[1]]))
            >>> a2a.combine_send(2 * rows, handle).recv()
            tensor([[2., 2., 2., 2.]])
            >>> a2a.finalize()
        """
        arguments, result = self._prepare_combine(y, handle, fp8, out)
        _C.layer_ll_combine(self._c, handle.buffer, (*arguments, SEND))
        written = () if out is None else (out,)
        return self._set_pending(handle.buffer, _C.layer_ll_combine, arguments, result, written)

    def synchronize(self):
        """Wait on the host for the current stream, and raise what went wrong in it.  Not collective.

        Raises:
            EpError: The error of an operation that has failed.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a:
            ...     a2a.synchronize()
        """
        _C.layer_sync(self._c, stream_of(self.device))

    def finalize(self):
        """Give the memory back.  Collective; a second call does nothing.

        Raises:
            EpMismatch: On all ranks, when one of them is in another call.  All call finalize again.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            >>> import epmoe
            >>> epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu").finalize()
        """
        _C.layer_close(self._c)
        if self._owns_heap:
            self.heap.close()
