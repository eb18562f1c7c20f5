"""EPAll2AllLayer: plan, dispatch and combine of an expert-parallel layer."""

import contextlib
import itertools

import torch

from .. import _C
from ..comm.device import allocator_of, integer, pick_device, stream_of
from ..comm.heap import SymmetricHeap
from ..comm.refusals import reported_after_plan
from ..torch_modes import check_mode, is_watched, requires_grad
from . import ops
from .dispatch_fp8 import Fp8Dispatch
from .layer_calls import LayerCalls
from .layer_parts import (MODES, LayerParts, cast, check_kinds, check_rail_capacity, check_rail_dtype,
                          default_num_sm, max_blocks, refuse_layer, world_of)

_ids = itertools.count()


class EPAll2AllLayer(Fp8Dispatch, LayerCalls, LayerParts):
    """Sends tokens to the ranks that hold their experts, and returns the experts' rows.

    Letters: W ranks, E experts, L = E/W experts of a rank, T tokens of this rank (may differ per rank and
    call, and be 0), K choices per token, H hidden, M rows that this rank receives.

    Creation is collective, and so are all methods except synchronize.  All ranks make the same calls in the
    same order.

    On a GPU, all epmoe operations of a process run in the order of their calls, whatever their streams.  That
    order must be the same on all ranks.  Replays of CUDA graphs are not seen: replay graphs in the same order
    on all ranks, on one stream.

    On CUDA, operations return before they have run.  An error in a kernel is raised by the next call on the
    layer, or by synchronize(), and the outputs of the failed operation are NaN.

    Args:
        ep_group: A ProcessGroup, a DeviceMesh, an epmoe.World or Nodes, or None for the default group.
        max_tokens: The most tokens of a rank in one call.  W * max_tokens * topk must be less than 2^31.
        hidden: H, at most 2^20.  A row must be a multiple of 16 bytes.
        topk: K, 1 to 32.
        rank: Taken from the group; checked when given.
        num_tot_experts: E, a multiple of W, at most 1024; see ExpertMap.  Expert e is on rank e // (E / W).
        local_world_size: The ranks of a node.  None: LOCAL_WORLD_SIZE, or the second dimension of a
            two-dimensional DeviceMesh.  With fewer than the group has, the layer spans nodes (docs/nodes.md).
        world_size: Taken from the group; checked when given.
        dtype: Of the tokens and rows: float32, float16 or bfloat16.
        weight_dtype: Of the weights that dispatch returns.  Weights travel and are applied as float32.
        num_sm: CUDA: thread blocks that move tokens, by default 64, or 96 where a row has less than 4096
            bytes.  CPU: worker threads (at most 64 run), by default 1.  1 to 1024; may differ between ranks.
        enable_local_combine: Sum at the expert's rank first, so that one row for each (token, rank) crosses
            the link.  The partial sums are rounded to dtype; combine has the formula.
        combine_mode: "scatter": the expert's rank pushes one row per choice.  "gather": the token's rank
            pulls them.  Without effect when enable_local_combine is set.
        capacity: The most rows that a rank can receive.  None: outputs have exactly M rows, which costs one
            host read of M per call.  A number: outputs have `capacity` rows, the host reads nothing, and the
            layer can be captured in a CUDA graph; a call with more rows raises EpOverflow.
        expert_alignment: The rows of each expert begin at a multiple of it.  Padding rows are zero, combine
            ignores them, and M and `capacity` count them: up to expert_alignment - 1 for each expert.
        expert_capacity: None, or the rows of each expert: outputs are [L, expert_capacity, H] as a view, and
            the host reads nothing, as with capacity.  More rows for an expert raise EpOverflow.
        host_counts: Read the rows of each expert together with M: layout.tokens_per_expert_list then waits
            for nothing.  Not with a capacity.  May differ between ranks.
        num_buffers: Communication buffers, 1 to 16; a world has at most 256.  On the CPU, calls on different
            buffers may come from several threads at once.  Those on one buffer wait for each other, and
            must have the same order on all ranks.
        reserve_sms: CUDA: SMs that no operation of this layer takes; may differ between ranks.  They are room
            for kernels on other streams that also wait for other ranks, such as NCCL's.  Without room for
            both, a different one may run first on each rank, and all wait: a deadlock.
        heap: A SymmetricHeap to share; its world is used where ep_group is None.  None: one of its own.
        device: As for SymmetricHeap.  With a heap: None, or the heap's device.
        timeout_s: As for World.  It also becomes the timeout of a world that exists already.
        rail_dtype: Of sums that return from other nodes: None: dtype.  In float32 also float16 or bfloat16.
        rail_capacity: The most tokens that a rank can send to one other node.  None: the host reads their
            numbers.  A number: with `capacity` as well, it reads nothing.  No effect on one node.

    Attributes:
        world: The World of the layer.
        heap: The SymmetricHeap that holds its buffers.
        rank: This rank.
        world_size: W.
        num_experts: E.
        num_local_experts: L.
        device: The torch.device of the heap.
        expert_alignment, expert_capacity, host_counts: As passed.

    Raises:
        ValueError: On this rank, for an argument out of range.
        TypeError: On this rank, for an argument of the wrong type or dtype.
        PeerError: On the other ranks, when one rank raises ValueError or TypeError.
        EpMismatch: On all ranks, when they ask for different layers; the message names what differs.
        HeapExhausted: On all ranks, when one of them has no room.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        Two ranks, four experts; each expert adds its number to its rows.

        >>> import epmoe
        >>> import torch
        >>> from epmoe.testing import run_threads
        >>> def main(world):
        ...     sizes = dict(max_tokens=2, hidden=4, topk=2, num_tot_experts=4, dtype=torch.float32)
        ...     with epmoe.EPAll2AllLayer(world, device="cpu", **sizes) as layer:
        ...         x = torch.full((1, 4), 10.0 * world.rank)
        ...         rows, _, layout = layer.dispatch(x, torch.tensor([[0, 3]]))
        ...         expert = torch.repeat_interleave(torch.arange(2), layout.tokens_per_expert)
        ...         y = layer.combine(rows + (2 * world.rank + expert)[:, None], layout)
        ...         return y[0, 0].item()
        >>> run_threads(main, 2)
        [3.0, 23.0]

    References:
        The interface follows Triton-distributed's "Expert Parallelism All-to-All (Intra-Node)".
    """

    # EpAll2AllFusedOp changes both: tokens travel in input order; each row of the input is one token.
    token_sorting = False
    _copies = 1

    def __init__(self, ep_group, max_tokens, hidden, topk, rank=None, num_tot_experts=None,
                 local_world_size=None, world_size=None, dtype=torch.bfloat16, weight_dtype=torch.float32,
                 num_sm=None, enable_local_combine=False, *, combine_mode="scatter", capacity=None,
                 expert_alignment=1, expert_capacity=None, host_counts=False, num_buffers=1, reserve_sms=0,
                 heap=None, device=None, timeout_s=None, rail_dtype=None, rail_capacity=None):
        self.world = world_of(ep_group, heap, timeout_s)
        self.rank = self.world.rank
        self.world_size = self.world.size
        try:
            self._check_heap(heap, device)
            self._check_group(rank, world_size, local_world_size)
            check_kinds(num_tot_experts, dtype, weight_dtype, combine_mode)
            self.max_tokens = integer("max_tokens", max_tokens)
            self.hidden = integer("hidden", hidden)
            self.topk = integer("topk", topk)
            self.num_experts = integer("num_tot_experts", num_tot_experts)
            self.num_local_experts = self.num_experts // self.world_size
            self.dtype = dtype
            self.weight_dtype = weight_dtype
            self.rail_dtype = check_rail_dtype(rail_dtype, dtype)
            self.rail_capacity = check_rail_capacity(rail_capacity)
            self.capacity = None if capacity is None else integer("capacity", capacity)
            self._set_padding(expert_alignment, expert_capacity, host_counts)
            self.device = heap.device if heap is not None else pick_device(device)
            self._allocate, self._rooms = allocator_of(self.device), {}
            reserve_sms = integer("reserve_sms", reserve_sms)
            self._num_blocks = max_blocks(self.device, reserve_sms)
            self._check_options()
            self._num_buffers = integer("num_buffers", num_buffers)
            self._requested_num_sm = num_sm
            most_sms = default_num_sm(self.device, self.hidden * dtype.itemsize)
            self._num_sm = most_sms if num_sm is None else integer("num_sm", num_sm)
            mode = _C.COMBINE_LOCAL if enable_local_combine else MODES[combine_mode]
            self._config = self._make_config(mode, reserve_sms)
            num_bytes = _C.layer_bytes(self._config)
            if timeout_s is not None:
                self.world.set_timeout(timeout_s)
        except Exception as error:
            refuse_layer(self.world, heap, error)
            raise
        self._owns_heap = heap is None
        if self._owns_heap:  # else ranks with different layers would only hear of different heap sizes
            _C.layer_agree(self.world._c, self._config, 0)
        self.heap = SymmetricHeap(self.world, num_bytes, self.device) if heap is None else heap
        try:
            self._c = _C.layer_create(self.heap._c, self._config)
        except Exception:
            with contextlib.suppress(Exception):  # all ranks fail here, so all close the heap of this layer
                if self._owns_heap:
                    self.heap.close()
            raise
        self._recv_words = self.world_size * self.max_tokens * (1 + self.topk)
        self._plan_front = _C.plan_layout(self._config, 0)
        # The name of a layer in torch.ops.epmoe.*.  It has all that sizes depend on: a compiler that caches
        # graphs must not take another layer's.
        self.id = f"{next(_ids)} {tuple(self._config)}"
        ops.layers[self.id] = self

    def preprocess(self, exp_indices, full_scatter_indices=None, *, buffer=0):
        """Plan a dispatch.  Collective.

        Args:
            exp_indices: [T, K] int32 or int64, contiguous, on the layer's device.  -1 and E mean that the
                choice is dropped; duplicates are allowed.
            full_scatter_indices: None: the plan chooses the rows.  Or the row of every choice at its expert's
                rank, chosen by the caller: int32 [T, K] of this rank's tokens, or [sum of all ranks' T, K] in
                rank order.  The rows of a rank must be a permutation of 0 .. M-1.  Only their range is
                checked, because no rank sees all of them.  If a row is given twice, another is missing and is
                undefined; a fused dispatch + GEMM waits for it up to twice the timeout (EpTimeout).  None in
                a layer with expert_alignment or expert_capacity.
            buffer: The communication buffer to use, 0 to num_buffers - 1.

        Returns:
            An EPLayout.

        Raises:
            EpIndexError: On all ranks, for an index outside [-1, E] on any of them.
            EpOverflow: On all ranks, when a rank exceeds its capacity or rail_capacity.
            EpMismatch: On all ranks, when they are not in the same call.
            ValueError: On this rank, for a wrong shape, device, buffer or scatter index.  A scatter index out
                of range raises PeerError on the other ranks in their dispatch.
            TypeError: On this rank, for a wrong type or dtype.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.
            NotImplementedError: On this rank, inside a transform of torch.func.  PeerError on the others.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 1, num_tot_experts=2, device="cpu")
            >>> layer.preprocess(torch.tensor([[1], [0], [1]])).tokens_per_expert.tolist()
            [1, 2]
            >>> layer.finalize()
        """
        self._check_buffer(_C.OP_PLAN, buffer)
        return self._read_rows(self._make_layout(exp_indices, full_scatter_indices, buffer))

    def dispatch(self, input, exp_indices=None, weight=None, full_scatter_indices=None, *, layout=None,
                 buffer=0):
        """Send tokens to their experts' ranks.  Collective.

        A token that goes to several experts of one rank crosses the link once.  Differentiable in input and
        weight.  Whether a gradient is needed must be the same on all ranks.

        Args:
            input: [T, H] of the layer's dtype, contiguous.
            exp_indices: [T, K], as for preprocess.  Not needed, and not read, with a layout.
            weight: [T, K] routing weights of a floating-point dtype, which travel with the rows, or None.  On
                all ranks or on none.
            full_scatter_indices: As for preprocess.  Not needed, and not read, with a layout.
            layout: The EPLayout of an earlier preprocess or dispatch, whose plan and buffer are used again.
            buffer: As for preprocess.  With a layout: 0, or the layout's.

        Returns:
            A tuple (rows, row_weights, layout).  rows is [M, H] of the layer's dtype, ordered by local
                expert, then source rank, token, choice.  row_weights is [M] of weight_dtype, or None without
                weight. With a capacity they are [capacity, H] and [capacity], zero after the first M.
                Padding rows (expert_alignment, expert_capacity) and their weights are zero.

        Raises:
            ValueError: On this rank, for a wrong shape, device or layout.
            TypeError: On this rank, for a wrong type or dtype.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.
            EpMismatch: On all ranks, when they are not in the same call.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.
            NotImplementedError: As preprocess, and for a tensor with a tangent (torch.autograd.forward_ad).
            EpIndexError: Without a layout, as preprocess.
            EpOverflow: Without a layout, as preprocess.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> sizes = dict(max_tokens=4, hidden=4, topk=1, num_tot_experts=2, dtype=torch.float32)
            >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), device="cpu", **sizes)
            >>> x = torch.tensor([[7.0] * 4, [8.0] * 4])
            >>> idx, weight = torch.tensor([[1], [0]]), torch.tensor([[0.5], [1.0]])
            >>> rows, row_weights, layout = layer.dispatch(x, idx, weight)
            >>> rows[:, 0], row_weights
            (tensor([8., 7.]), tensor([1.0000, 0.5000]))
            >>> layer.finalize()

        References:
            Sending a token once per rank is the "token saving" of Triton-distributed.
        """
        layout, weight, num_rows = self._prepare(_C.OP_DISPATCH, input, exp_indices, weight,
                                                 full_scatter_indices, layout, buffer)
        return self._dispatch_planned(layout, input, weight, num_rows)

    @reported_after_plan(_C.OP_DISPATCH)
    def _dispatch_planned(self, layout, input, weight, num_rows):
        with_grad = requires_grad(input, weight)
        if self._copies > 1:
            input = input.repeat_interleave(self._copies, 0)
        if with_grad or is_watched():
            rows, row_weight, recv = ops.dispatch(self, input, weight, layout.plan, layout.buffer, num_rows,
                                                  with_grad)
        else:
            rows, row_weight, recv = self._dispatch(input, weight, layout.plan, layout.buffer, num_rows)
        self._set_dispatched(layout, rows, recv)
        return rows, cast(row_weight, self.weight_dtype), layout

    def combine(self, input, layout, weight=None):
        """Return rows to their tokens' ranks and sum them there.  Collective.

        y[t] is the sum over the choices k of token t, without the dropped ones.  Sums are computed in float32
        and in a fixed order, so results are bit-identical from run to run:

            scatter, gather:       y = round(sum over k = 0, 1, ... of w_k * row_k)
            enable_local_combine:  y = round(sum over ranks r = 0, 1, ... of
                                             round(sum over k at r of w_k * row_k))

        Differentiable in input and weight.  Whether a gradient is needed must be the same on all ranks.

        Args:
            input: [M, H], or [capacity, H], in the order of dispatch's rows, contiguous.
            layout: The EPLayout that dispatch returned.
            weight: [M], or [capacity], of a floating-point dtype; each row is multiplied by its weight.
                None: plain sums.  On all ranks or on none.

        Returns:
            [T, H] of the layer's dtype.

        Raises:
            ValueError: On this rank, for a wrong shape or device, or a layout that has not been dispatched.
            TypeError: On this rank, for a wrong type or dtype.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.
            NotImplementedError: As dispatch.
            EpMismatch: On all ranks, when they are not in the same call, or use different dispatches.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> sizes = dict(max_tokens=4, hidden=4, topk=2, num_tot_experts=2, dtype=torch.float32)
            >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), device="cpu", **sizes)
            >>> weight = torch.tensor([[0.25, 0.5]])
            >>> rows, row_weights, layout = layer.dispatch(torch.ones(1, 4), torch.tensor([[0, 1]]), weight)
            >>> layer.combine(rows, layout, row_weights)
            tensor([[0.7500, 0.7500, 0.7500, 0.7500]])
            >>> layer.finalize()
        """
        try:
            check_mode(input, weight)
            self._check_dispatched(layout)
            num_rows = layout._num_rows if self.capacity is None else self.capacity
            self._check_tensor("input rows", input, self.dtype, (num_rows, self.hidden))
            if weight is not None:
                self._check_tensor("weight", weight, None, (input.shape[0],))
                weight = cast(weight, torch.float32)
        except Exception as error:
            self._refuse(_C.OP_COMBINE, error, self._buffer_of(layout))
        return self._combine_checked(layout, input, weight)

    @reported_after_plan(_C.OP_COMBINE)
    def _combine_checked(self, layout, input, weight):
        with_grad = requires_grad(input, weight)
        if with_grad or is_watched():
            return ops.combine(self, input, weight, layout.plan, layout.recv, layout.buffer,
                               layout.num_tokens, with_grad)
        return self._combine(input, weight, None, layout.plan, layout.recv, layout.buffer,
                             layout.num_tokens)[0]

    def ep_barrier_all(self, *, buffer=0):
        """Wait until all ranks have reached this call, in stream order.  Collective.

        On CUDA the stream waits, not the host.

        Args:
            buffer: As for preprocess.

        Raises:
            ValueError: On this rank, for a buffer that does not exist.
            TypeError: On this rank, for a buffer that is not an integer.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.
            EpMismatch: On all ranks, when they are not in the same call.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> with epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 1, num_tot_experts=2, device="cpu") as layer:
            ...     layer.ep_barrier_all()
        """
        self._check_buffer(_C.OP_BARRIER, buffer)
        _C.layer_barrier(self._c, buffer, stream_of(self.device))

    def synchronize(self):
        """Wait on the host for the current stream, and raise what went wrong in it.  Not collective.

        On CUDA, dispatch and combine return before they have run.  Their errors are raised here, or by the
        next call on the layer.  This includes the calls of an EPMoE's decode path on this layer.

        Raises:
            EpError: The error of an operation that has failed.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> with epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 1, num_tot_experts=2, device="cpu") as layer:
            ...     layer.synchronize()
        """
        _C.layer_sync(self._c, stream_of(self.device))
        if self.low_latency is not None:
            self.low_latency.synchronize()

    def finalize(self):
        """Give the layer's memory back.  Collective; a second call does nothing.

        Operations of other threads of this rank go on until all ranks have come to this call.  It waits for
        them, and then refuses new ones (EpClosed).

        As a context manager, the layer does this at the end of the block, unless an exception leaves it.

        Raises:
            EpMismatch: On all ranks, when one of them is in another call.  Nothing was given back; all call
                finalize again.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            >>> import epmoe
            >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 1, num_tot_experts=2, device="cpu")
            >>> layer.finalize()
        """
        _C.layer_close(self._c)
        if self._owns_heap:
            self.heap.close()
