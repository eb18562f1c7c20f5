"""LowLatencyAll2All: dispatch and combine for decoding, where few tokens wait for each other."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from .. import _C
from ..comm.device import integer, pick_device, stream_of
from ..comm.heap import SymmetricHeap
from ..comm.world import World
from ..torch_modes import Allocate, allocator_of, check_mode, is_plain, mark_written
from .base import DTYPES, CollectiveLayer, Group, cast, max_blocks, propagate_layer_error, world_of

Fp8: TypeAlias = bool | Literal["pow2", "ue8m0"]
SlabLayout: TypeAlias = Literal["masked", "compact"]
_T = TypeVar("_T")

FP8: dict[Fp8, int] = {False: 0, True: 1, "pow2": 2, "ue8m0": 3}  # EpLlFp8
LAYOUTS: dict[SlabLayout, bool] = {"masked": True, "compact": False}
GROUP = 128  # numbers that share a scale
SEND, RECEIVE, BOTH = 1, 2, 3  # EpLlParts


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))


class LowLatencyHandle:
    """What a dispatch keeps for its combine.  LowLatencyAll2All.dispatch returns it.

    Attributes:
        num_tokens: T of this rank.
        layout: "masked" or "compact".
        buffer: The communication buffer.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a, torch.no_grad():
        ...     x = torch.ones(3, 16, dtype=torch.bfloat16)
        ...     *_, handle = a2a.dispatch(x, torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
        >>> handle.num_tokens, handle.layout
        (3, 'masked')
    """

    __slots__ = ("_owner", "_key", "_outputs", "_written", "_rows", "num_tokens", "layout", "buffer")

    num_tokens: int
    buffer: int

    def __init__(self, owner: LowLatencyAll2All, key: tuple[Fp8, SlabLayout], outputs: tuple[Any, ...],
                 rows: tuple[Any, ...] = ()) -> None:
        self._owner = owner
        self._key = key  # (fp8, layout)
        self._outputs = outputs  # the module's arguments from the handle's words on
        # The tensors among them, which a dispatch writes.  The user has these, or views of them.
        self._written: tuple[Tensor, ...]
        self._written = outputs[:4] if outputs[2] is not None else (outputs[0], outputs[1], outputs[3])
        self._rows = rows  # the rows, their scales and the counts, as the user has them
        self.layout = key[1]

    def _drop_rows(self) -> None:
        """Keep only what combine reads, so that the owner of the rows can free them.  Not for out= again."""
        self._outputs, self._written, self._rows = self._outputs[:1], (), ()

    @property
    def expert_offsets(self) -> Tensor:
        """[L + 1] int32 on the device: the first row of each local expert, for epmoe.grouped_gemm.

        Only of the layout "compact".

        Raises:
            ValueError: For the layout "masked".

        Examples:
            >>> import epmoe
            >>> import torch
            >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a:
            ...     x = torch.ones(3, 16, dtype=torch.bfloat16)
            ...     *_, handle = a2a.dispatch(x, torch.tensor([[1], [0], [1]]), layout="compact")
            >>> handle.expert_offsets.tolist()
            [0, 1, 3]
        """
        if self.layout != "compact":
            raise ValueError("expert_offsets are of the layout compact, but this handle is masked: use "
                             "recv_counts")
        words: Tensor = self._outputs[0]
        return words.narrow(0, self._owner._offsets_at, self._owner.num_local_experts + 1)


# What a dispatch returns: the rows, their scales or None, the rows of each expert, and the handle.
Dispatched: TypeAlias = tuple[Tensor, Tensor | None, Tensor, LowLatencyHandle]


class PendingCall(Generic[_T]):
    """A dispatch or combine whose rows have been sent.  dispatch_send and combine_send return it.

    Until recv, do not change the tensors that were passed: this rank's own rows are read from them by recv.
    If the PendingCall is lost, the next call on its buffer receives, and drops what it has received.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a, torch.no_grad():
        ...     x = torch.ones(3, 16, dtype=torch.bfloat16)
        ...     pending = a2a.dispatch_send(x, torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
        ...     # other work of this rank goes here
        ...     rows, scales, counts, handle = pending.recv()
        >>> counts.tolist()
        [1, 2]
    """

    def __init__(self, owner: LowLatencyAll2All, buffer: int, call: Callable[..., _C._Ran],
                 arguments: tuple[Any, ...], result: _T, written: Iterable[Tensor]) -> None:
        self._owner, self._buffer = owner, buffer
        self._call, self._arguments, self._result = call, arguments, result
        self._written = written  # tensors that the user had before the call

    def recv(self) -> _T:
        """Receive, in stream order.  Collective.

        Returns:
            What the call without halves returns.

        Raises:
            RuntimeError: On this rank, for a second recv.
            EpError: As the call without halves.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a:
            ...     x = torch.ones(1, 16, dtype=torch.bfloat16)
            ...     rows, _, _, handle = a2a.dispatch(x, torch.tensor([[1]]), torch.full((1, 1), 0.5))
            ...     y = a2a.combine_send(rows, handle).recv()
            >>> y[0, 0].item()
            0.5
        """
        under_way = self._owner._pending[self._buffer]
        if under_way is None or under_way.pending() is not self:
            raise RuntimeError("this call has been received already: keep what the first recv returned")
        self._owner._pending[self._buffer] = None
        mark_written(self._written)
        self._call(self._owner._c, self._buffer, (*self._arguments, RECEIVE))
        return self._result


class _UnderWay:
    """A call whose rows have been sent.  Its owner keeps it: the caller may lose the PendingCall."""

    __slots__ = ("pending", "call", "arguments", "written")

    def __init__(self, pending: PendingCall[Any]) -> None:
        self.pending = weakref.ref(pending)
        self.call, self.arguments, self.written = pending._call, pending._arguments, pending._written

    def drop(self, owner: LowLatencyAll2All, buffer: int) -> None:
        """Receive for a PendingCall that is lost, into copies of what the user has."""
        arguments = [a.clone() if any(a is w for w in self.written) else a for a in self.arguments]
        self.call(owner._c, buffer, (*arguments, RECEIVE))


# Allocates the rows, the memory of the rows, the memory of the scales, and the scales as rows are indexed.
_Make: TypeAlias = Callable[[Allocate], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]

__all__ = ["LowLatencyAll2All", "LowLatencyHandle", "PendingCall"]


class LowLatencyAll2All(CollectiveLayer):
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
        enable_local_combine: Sum at the expert's rank first.  False: return a row for each choice; see
            combine.
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

    world: World

    def __init__(self, ep_group: Group, max_tokens: int, hidden: int, topk: int, num_experts: int, *,
                 dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None,
                 num_buffers: int = 1, num_sm: int | None = None, enable_local_combine: bool = True,
                 reserve_sms: int = 0, heap: SymmetricHeap | None = None,
                 timeout_s: float | None = None) -> None:
        world = world_of(ep_group, heap, timeout_s)
        try:
            if not isinstance(world, World):
                raise ValueError("LowLatencyAll2All is for the ranks of one node, but these are of several: "
                                 "pass the process group of one node; an EPMoE over several nodes has no "
                                 "low-latency path")
            self.world = world
            self.rank = world.rank
            self.world_size = world.size
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
            mode = _C.LOW_LATENCY if enable_local_combine else _C.LOW_LATENCY_SCATTER
            self._config = self._make_config(mode, reserve_sms)
            num_bytes = _C.layer_bytes(self._config)
            if timeout_s is not None:
                world.set_timeout(timeout_s)
        except Exception as error:
            propagate_layer_error(world, heap, error)
            raise
        self._create(world, heap, num_bytes)
        self._handle_words, self._offsets_at = _C.ll_handle_words(self._config)
        self._pending: list[_UnderWay | None] = [None] * self._num_buffers
        self._allocator = allocator_of(self.device)
        self._shapes: dict[SlabLayout, tuple[int, ...]]
        self._shapes = {"masked": (self.num_local_experts, self._most_tokens, self.hidden),
                        "compact": (self.capacity, self.hidden)}
        self._outputs: dict[tuple[Fp8, SlabLayout], _Make] = {}

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None = None, *,
                 fp8: Fp8 = False, layout: SlabLayout = "masked", buffer: int = 0,
                 out: Dispatched | None = None) -> Dispatched:
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
        result[3].num_tokens, result[3].buffer = x.shape[0], buffer
        return result

    def _dispatch_tagged(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor,
                         tag: Tensor) -> tuple[Tensor, Tensor, Tensor, LowLatencyHandle]:
        """Dispatch into compact rows.  Returns them, the tag of each row, the counts [L], and the handle.

        tag: [T] int32, a number that travels with each token.  A row of no expert has any tag.
        """
        arguments, (rows, _, counts, handle) = self._prepare_dispatch(x, topk_idx, topk_weights, False,
                                                                      "compact", 0, None)
        row_tag = rows.new_empty(len(rows), dtype=torch.int32)
        *others, _, _, is_masked, fp8 = arguments
        _C.layer_ll_dispatch(self._c, 0, (*others, tag, row_tag, is_masked, fp8, BOTH))
        handle.num_tokens, handle.buffer = x.shape[0], 0
        return rows, row_tag, counts, handle

    def dispatch_send(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None = None, *,
                      fp8: Fp8 = False, layout: SlabLayout = "masked", buffer: int = 0,
                      out: Dispatched | None = None) -> PendingCall[Dispatched]:
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
        result[3].num_tokens, result[3].buffer = x.shape[0], buffer
        written = () if out is None else result[3]._written
        return self._set_pending(buffer, _C.layer_ll_dispatch, arguments, result, written)

    def combine(self, y: Tensor, handle: LowLatencyHandle, *, fp8: bool = False,
                out: Tensor | None = None) -> Tensor:
        """Return the experts' rows to the ranks of their tokens, and add them up there.  Collective.

        The sums are those of EPAll2AllLayer with the same enable_local_combine, bit for bit:

            enable_local_combine:  y[t] = round(sum over ranks r = 0, 1, ... of
                                                round(sum over k at r of w_k * row_k))
            otherwise:             y[t] = round(sum over k = 0, 1, ... of w_k * row_k)

        The second one sends more rows, and does not depend on the number of ranks.

        With fp8, each inner sum that crosses between two ranks is quantised after it was rounded, and so the
        result has an error: docs/decode.md#lowlatencyall2all.

        Args:
            y: The experts' outputs, of the layer's dtype, in the layout of dispatch's rows, contiguous.
            handle: What dispatch returned.
            fp8: Whether sums travel as float8_e4m3fn with a float32 scale for each 128 numbers, the largest
                magnitude / 448: about half of the bytes.  The same on all ranks, and independent of the
                dispatch's fp8.  The layer's dtype must be bfloat16 or float16, H a multiple of 128, and
                enable_local_combine True.
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

    def combine_send(self, y: Tensor, handle: LowLatencyHandle, *, fp8: bool = False,
                     out: Tensor | None = None) -> PendingCall[Tensor]:
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

    def synchronize(self) -> None:
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

    def finalize(self) -> None:
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

    # ---- checks, and the arguments of the module ----

    def _check_idle(self, op: int, buffer: Any) -> None:
        is_valid = self._is_buffer(buffer)
        at = buffer if is_valid else 0  # the report of a wrong number goes through the first buffer
        under_way = self._pending[at]
        if under_way is not None and under_way.pending() is None:
            # Nobody can receive it any more.  The peers have received, or do it here, too: so receive now.
            self._pending[at] = None
            with contextlib.suppress(Exception):  # an error of that call; one that ends the world comes again
                under_way.drop(self, at)
        elif under_way is not None and is_valid:
            raise RuntimeError(f"a call is under way on buffer {buffer}: call recv() on what its send "
                               f"returned, or use another buffer")
        elif under_way is not None:  # a report would end the call that is under way on the first buffer
            raise self._buffer_error(buffer)
        if not is_valid:
            self._check_buffer(op, buffer)

    @staticmethod
    def _check_gradients(*tensors: Any) -> None:
        if any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
            raise RuntimeError("LowLatencyAll2All has no gradients: call it under torch.no_grad(), or use "
                               "EPAll2AllLayer")

    def _prepare_dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, fp8: Fp8,
                          layout: SlabLayout, buffer: int,
                          out: Dispatched | None) -> tuple[tuple[Any, ...], Dispatched]:
        """Return the arguments of the module without the last, and the result.

        The caller sets num_tokens and buffer of its handle after the call: one that fails changes neither.
        """
        self._check_idle(_C.OP_LL_DISPATCH, buffer)
        try:
            if torch.is_grad_enabled():
                self._check_gradients(x, topk_weights, *(out[:3] if type(out) is tuple else ()))
            if not is_plain():
                check_mode(x, topk_weights, *(out[:3] if type(out) is tuple else ()))
            if out is None:
                out = self._make_result(fp8, layout)
                handle = out[3]
            else:
                handle = self._check_result(out, fp8, layout)
                mark_written(handle._written)
            if isinstance(topk_weights, Tensor) and topk_weights.dtype is not torch.float32:
                topk_weights = cast(topk_weights, torch.float32)
        except Exception as error:
            self._propagate(_C.OP_LL_DISPATCH, error, buffer)
        *outputs, is_masked, fp8_number = handle._outputs
        return (x, topk_idx, topk_weights, *outputs, None, None, is_masked, fp8_number), out

    def _make_result(self, fp8: Fp8, layout: SlabLayout) -> Dispatched:
        """Return the result of a dispatch that is to be run."""
        make = self._outputs.get((fp8, layout)) or self._add_outputs(fp8, layout)
        allocate = self._allocator()
        rows, raw, lines, scales = make(allocate)
        words = allocate((self._handle_words,), (1,), torch.int32)
        counts = allocate((self.num_local_experts,), (1,), torch.int32)
        handle = LowLatencyHandle(self, (fp8, layout), (words, raw, lines, counts, LAYOUTS[layout], FP8[fp8]),
                                  (rows, scales, counts))
        return rows, scales, counts, handle

    def _check_result(self, out: Any, fp8: Fp8, layout: SlabLayout) -> LowLatencyHandle:
        """Return the handle of out, which must be the result of an earlier dispatch of this kind."""
        if type(out) is not tuple or len(out) != 4:
            raise TypeError(f"out: wanted the tuple that a dispatch returned, got {type(out).__name__}")
        handle = out[3]
        if type(handle) is not LowLatencyHandle or handle._owner is not self:
            self._check_handle(handle)
        if len(handle._rows) != 3 or any(mine is not its for mine, its in zip(out, handle._rows)):
            raise ValueError("out: its tensors are not those of its handle: pass the tuple that a dispatch "
                             "returned, as it is")
        if any(self._pending):
            words = handle._outputs[0]
            if any(a is words for one in self._pending if one and one.pending() for a in one.arguments):
                raise RuntimeError("out: a call that uses its handle is under way: call recv() first")
        if handle._key != (fp8, layout):
            raise ValueError(f"out is of a dispatch with fp8={handle._key[0]!r} and layout="
                             f"{handle.layout!r}, but this one has fp8={fp8!r} and layout={layout!r}")
        return handle

    def _add_outputs(self, fp8: Fp8, layout: SlabLayout) -> _Make:
        """Return a function that allocates the outputs, with the function that it is given.

        It returns the rows, the memory of the rows, the memory of the scales, and the scales as rows are
        indexed.
        """
        if fp8 not in FP8:
            raise ValueError(f"fp8 {fp8!r}: must be False, True, 'pow2' or 'ue8m0'")
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout!r}: must be masked or compact")
        group = 4 * GROUP if fp8 == "ue8m0" else GROUP  # numbers whose scales share a word
        if fp8 and self.hidden % group:
            raise ValueError(f"hidden {self.hidden}: fp8={fp8!r} needs a multiple of {group}")
        shape = self._shapes[layout]
        lines_shape = (*shape[:-2], self.hidden // group, (shape[-2] + 3) // 4 * 4)
        strides, lines_strides = strides_of(shape), strides_of(lines_shape)
        dtype = torch.float8_e4m3fn if fp8 else self.dtype
        scales_dtype = torch.int32 if fp8 == "ue8m0" else torch.float32

        def make_plain(allocate: Allocate) -> tuple[Tensor, Tensor, None, None]:
            rows = allocate(shape, strides, dtype)
            return rows, rows, None, None

        def make_fp8(allocate: Allocate) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            rows, lines = allocate(shape, strides, dtype), allocate(lines_shape, lines_strides, scales_dtype)
            return rows, rows.view(torch.uint8), lines, lines[..., :shape[-2]].transpose(-1, -2)

        self._outputs[fp8, layout] = make_fp8 if fp8 else make_plain
        return self._outputs[fp8, layout]

    def _check_handle(self, handle: Any) -> None:
        if not isinstance(handle, LowLatencyHandle):
            raise TypeError(f"handle: wanted a LowLatencyHandle, got {type(handle).__name__}")
        if handle._owner is not self:
            raise ValueError("the handle belongs to another LowLatencyAll2All: pass one that this one's "
                             "dispatch returned")

    def _prepare_combine(self, y: Tensor, handle: LowLatencyHandle, fp8: bool,
                         out: Tensor | None) -> tuple[tuple[Any, ...], Tensor]:
        buffer = getattr(handle, "buffer", 0)
        self._check_idle(_C.OP_LL_COMBINE, buffer)
        try:
            if torch.is_grad_enabled():
                self._check_gradients(y, out)
            if not is_plain():
                check_mode(y, out)
            if type(handle) is not LowLatencyHandle or handle._owner is not self:
                self._check_handle(handle)
            if type(fp8) is not bool:
                raise TypeError(f"fp8: wanted True or False, got {fp8!r}")
            if out is None:
                out = self._allocator()((handle.num_tokens, self.hidden), (self.hidden, 1), self.dtype)
            elif not isinstance(out, Tensor):
                raise TypeError(f"out: wanted a tensor, got {type(out).__name__}")
            elif out.shape[:1] != (handle.num_tokens,):
                raise ValueError(f"out: wanted {handle.num_tokens} rows, the tokens of the dispatch, got "
                                 f"{list(out.shape)}")
            else:
                mark_written((out,))
        except Exception as error:
            self._propagate(_C.OP_LL_COMBINE, error, buffer)
        return (y, handle._outputs[0], out, LAYOUTS[handle.layout], fp8), out

    def _set_pending(self, buffer: int, call: Callable[..., _C._Ran], arguments: tuple[Any, ...], result: _T,
                     written: Iterable[Tensor]) -> PendingCall[_T]:
        pending = PendingCall(self, buffer, call, arguments, result, written)
        self._pending[buffer] = _UnderWay(pending)
        return pending
