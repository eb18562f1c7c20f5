"""EPAll2AllLayer: plan, dispatch and combine of an expert-parallel layer.

Each call allocates its outputs and calls the module.  Its caller reports an error to the other ranks
(error_propagation.py).  ops.py makes operators of them, for autograd and torch.compile.

A dispatch takes the number of its rows, or -1 if only the plan has it.  Then the host allocates the outputs
and prepares the launch before it knows the number.  csrc/layer/room.c says for how many rows the outputs have
room.  If they do not fit, the host allocates others.  Where few rows can come at all (ep_layer_unread_rows),
a training step of EPMoE makes room for all of them.  The host then waits for nothing, and later calls and
layer.synchronize() raise the errors of the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from .. import _C
from ..comm.device import integer, pick_device, stream_of
from ..comm.error_propagation import reported_after_plan
from ..comm.heap import SymmetricHeap
from ..comm.world import World
from ..gemm.activations import Activation
from ..gemm.grouped import FP8_BLOCK, aligned, check_activation
from ..gemm.quantize import quantize_fp8
from ..torch_modes import allocator_of, check_mode, is_watched, requires_grad
from . import ops
from .base import (DTYPES, MODES, CollectiveLayer, Group, cast, default_num_sm, max_blocks,
                   propagate_layer_error, world_of)
from .layout import EPLayout, Layout

if TYPE_CHECKING:
    from ..moe.balance import Staging
    from .low_latency import LowLatencyAll2All

# What _run_dispatch makes: tensors with a line for each row, or None, and other tensors.
Outputs: TypeAlias = tuple[list[Any], list[Any]]
_ids = itertools.count()


def check_kinds(num_tot_experts: Any, dtype: Any, weight_dtype: Any, combine_mode: Any) -> None:
    """Check the arguments of a layer that are not numbers, and that there is a number of experts."""
    if num_tot_experts is None:
        raise TypeError("num_tot_experts is missing: pass the number of experts of all ranks")
    if dtype not in DTYPES:
        raise TypeError(f"dtype {dtype}: must be float32, float16 or bfloat16")
    if not isinstance(weight_dtype, torch.dtype) or not weight_dtype.is_floating_point:
        raise TypeError(f"weight_dtype {weight_dtype}: must be a floating-point dtype")
    if combine_mode not in MODES:
        raise ValueError(f"combine_mode {combine_mode!r}: must be scatter or gather (serial and fuse_scatter "
                         f"are values of combine_order)")


def check_rail_dtype(rail_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums on their way between nodes, in a layer of some dtype."""
    if rail_dtype is None or rail_dtype == dtype:
        return dtype
    if rail_dtype not in DTYPES:
        raise TypeError(f"rail_dtype {rail_dtype}: must be None, float32, float16 or bfloat16")
    if dtype != torch.float32:
        raise ValueError(f"rail_dtype {rail_dtype} in a layer of {dtype}: the sum of a node is rounded to "
                         f"{dtype} before it leaves the node: leave rail_dtype out")
    return rail_dtype


def check_rail_capacity(rail_capacity: Any) -> int | None:
    """Return rail_capacity, None or a positive integer.  Raises TypeError or ValueError."""
    if rail_capacity is None:
        return None
    if isinstance(rail_capacity, bool) or not isinstance(rail_capacity, int):
        raise TypeError(f"rail_capacity {rail_capacity!r}: must be an integer or None")
    if rail_capacity < 1:
        raise ValueError(f"rail_capacity {rail_capacity}: must be at least 1 token")
    return rail_capacity


class EPAll2AllLayer(CollectiveLayer):
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

    is_of_module = False  # whether an EPMoE uses the layer: see ops.rows_to_trace
    low_latency: LowLatencyAll2All | None = None  # EPMoE: that of the modules that share the layer
    staging: Staging | None = None  # EPMoE: memory of the modules with balance that share the layer
    plans_apart = False  # whether EPMoE makes the plan in a call of its own, with _make_layout: FixedPlans
    may_decode = False  # EPMoE: whether calls without gradients create one by themselves

    def __init__(self, ep_group: Group, max_tokens: int, hidden: int, topk: int, rank: int | None = None,
                 num_tot_experts: int | None = None, local_world_size: int | None = None,
                 world_size: int | None = None, dtype: torch.dtype = torch.bfloat16,
                 weight_dtype: torch.dtype = torch.float32, num_sm: int | None = None,
                 enable_local_combine: bool = False, *,
                 combine_mode: Literal["scatter", "gather"] = "scatter", capacity: int | None = None,
                 expert_alignment: int = 1, expert_capacity: int | None = None, host_counts: bool = False,
                 num_buffers: int = 1, reserve_sms: int = 0, heap: SymmetricHeap | None = None,
                 device: torch.device | str | None = None, timeout_s: float | None = None,
                 rail_dtype: torch.dtype | None = None, rail_capacity: int | None = None) -> None:
        world = world_of(ep_group, heap, timeout_s, local_world_size)
        assert isinstance(world, World)  # __new__ makes another class of a layer over several nodes
        self.world = world
        self.rank = world.rank
        self.world_size = world.size
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
            self._allocator = allocator_of(self.device)
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
                world.set_timeout(timeout_s)
        except Exception as error:
            propagate_layer_error(world, heap, error)
            raise
        self._create(world, heap, num_bytes)
        self._recv_words = self.world_size * self.max_tokens * (1 + self.topk)
        self._plan_front = _C.plan_layout(self._config, 0)
        self._unread_rows = _C.layer_unread_rows(self._config)  # room of a training step of EPMoE, or 0
        # The name of a layer in torch.ops.epmoe.*.  It has all that sizes depend on: a compiler that caches
        # graphs must not take another layer's.
        self.id = f"{next(_ids)} {tuple(self._config)}"
        ops.layers[self.id] = self

    def preprocess(self, exp_indices: Tensor, full_scatter_indices: Tensor | None = None, *,
                   buffer: int = 0) -> Layout:
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

    def dispatch(self, input: Tensor, exp_indices: Tensor | None = None, weight: Tensor | None = None,
                 full_scatter_indices: Tensor | None = None, *, layout: Layout | None = None,
                 buffer: int = 0) -> tuple[Tensor, Tensor | None, Layout]:
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

    def _dispatch_tagged(self, input: Tensor, exp_indices: Tensor, weight: Tensor,
                         tag: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Layout]:
        """Dispatch without gradients.  Returns rows, row_weights, the tag of each row, and the layout.

        tag: [T] int32, a number that travels with each token.  A row of no expert has any tag.
        """
        layout, float_weight, num_rows = self._prepare(_C.OP_DISPATCH, input, exp_indices, weight, None, None,
                                                       0)
        return self._dispatch_tagged_planned(layout, input, float_weight, num_rows, tag)

    def dispatch_fp8(self, input: Tensor, exp_indices: Tensor | None = None, weight: Tensor | None = None,
                     full_scatter_indices: Tensor | None = None, *, layout: Layout | None = None,
                     buffer: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Layout]:
        """Send tokens to their experts' ranks in float8_e4m3fn, with their scales.  Collective.

        A token is quantised once, at its rank, as quantize_fp8 does, and its H + 4 ceil(H / 128) bytes are
        what crosses the link: about half of dispatch in 16 bits.  The rows are for grouped_gemm.  combine
        then returns the results in the layer's dtype.  For inference: it has no gradients.

        Args:
            input: [T, H] of the layer's dtype, contiguous; H a multiple of 16.
            exp_indices: As for dispatch, and so are all other arguments.
            weight: As there.
            full_scatter_indices: As there.
            layout: As there.
            buffer: As there.

        Returns:
            A tuple (rows, scales, row_weights, layout).  rows is [M, H] float8_e4m3fn, in the order of
                dispatch's rows; scales is [M, ceil(H / 128)] float32, contiguous.  row_weights and layout are
                as dispatch returns them.  With a capacity there are `capacity` rows.  Rows after the first M
                and padding rows are zero, and so are their scales.

        Raises:
            RuntimeError: On this rank, when a gradient of input or weight is wanted.
            ValueError: As dispatch, and for another H.
            TypeError: As dispatch.
            PeerError: On the other ranks, when one rank raises one of these.
            EpMismatch: On all ranks, when they are not in the same call.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.
            NotImplementedError: As dispatch.
            EpIndexError: Without a layout, as preprocess.
            EpOverflow: Without a layout, as preprocess.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), 4, 128, 1, num_tot_experts=2, device="cpu")
            >>> x = torch.tensor([[7.0], [3.5]]).expand(2, 128).bfloat16().contiguous()
            >>> rows, scales, _, layout = layer.dispatch_fp8(x, torch.tensor([[1], [0]]))
            >>> rows[:, 0].float(), scales
            (tensor([448., 448.]), tensor([[0.0078],
                    [0.0156]]))
            >>> layer.finalize()

        References:
            DeepSeek-V3 Technical Report, section 3.3.2 (1x128 groups) and 3.3.3 (dispatch in FP8).
        """
        try:
            if requires_grad(*(t for t in (input, weight) if isinstance(t, torch.Tensor))):
                raise RuntimeError("dispatch_fp8 has no gradients: call it under torch.no_grad(), or use "
                                   "dispatch")
            if self.hidden % 16:
                raise ValueError(f"hidden {self.hidden}: dispatch_fp8 needs a multiple of 16")
        except Exception as error:
            self._propagate(_C.OP_PLAN if layout is None else _C.OP_DISPATCH, error,
                            self._buffer_of(layout, buffer))
        layout, weight, num_rows = self._prepare(_C.OP_DISPATCH, input, exp_indices, weight,
                                                 full_scatter_indices, layout, buffer)
        return self._dispatch_fp8_planned(layout, input, weight, num_rows)

    def combine(self, input: Tensor, layout: Layout, weight: Tensor | None = None) -> Tensor:
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
            layout = self._check_dispatched(layout)
            num_rows = layout._num_rows if self.capacity is None else self.capacity
            self._check_tensor("input rows", input, self.dtype, (num_rows, self.hidden))
            if weight is not None:
                self._check_tensor("weight", weight, None, (input.shape[0],))
                weight = cast(weight, torch.float32)
        except Exception as error:
            self._propagate(_C.OP_COMBINE, error, self._buffer_of(layout))
        return self._combine_checked(layout, input, weight)

    def ep_barrier_all(self, *, buffer: int = 0) -> None:
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

    def synchronize(self) -> None:
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

    def finalize(self) -> None:
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
        if self.staging is not None:
            self.staging.close()
        if self._owns_heap:
            self.heap.close()

    # ---- creation ----

    def _check_group(self, rank: int | None, world_size: int | None, local_world_size: int | None) -> None:
        for name, got, want in (("rank", rank, self.rank), ("world_size", world_size, self.world_size),
                                ("local_world_size", local_world_size, self.world_size)):
            if got is not None and got != want:
                raise ValueError(f"{name}={got}, but the group says {want} (a World is on one node; for "
                                 f"several pass the process group): leave it out")

    def _set_padding(self, expert_alignment: int, expert_capacity: int | None, host_counts: bool) -> None:
        """Set how many rows an expert has beside those that arrive, and whether the host is told."""
        self.expert_alignment = integer("expert_alignment", expert_alignment)
        if self.expert_alignment < 1:
            raise ValueError(f"expert_alignment {expert_alignment}: must be at least 1")
        if expert_capacity is not None:
            self.expert_capacity = integer("expert_capacity", expert_capacity)
            if self.expert_capacity < 1:
                raise ValueError(f"expert_capacity {expert_capacity}: must be at least 1 row")
            if self.capacity is not None:
                raise ValueError(f"capacity {self.capacity} with expert_capacity {expert_capacity}: leave "
                                 f"capacity out, it is the expert_capacity times the experts of a rank")
            self.capacity = self.num_local_experts * self.expert_capacity
        self.host_counts = bool(host_counts)
        if self.host_counts and self.capacity is not None:
            raise ValueError("host_counts with a capacity or an expert_capacity, with which the host reads "
                             "nothing: leave one of them out")

    def _check_options(self) -> None:
        """Check the options of a subclass.  May change topk and max_tokens."""

    # ---- checks ----

    def _check_plan(self, buffer: int, exp_indices: Any, scatter: Any) -> None:
        try:
            check_mode()
            # torch refuses other arguments of an operator before the operator runs, so nothing would report.
            self._check_place("exp_indices", exp_indices)
            if scatter is not None:
                self._check_place("full_scatter_indices", scatter)
        except Exception as error:
            self._propagate(_C.OP_PLAN, error, buffer)

    def _prepare(self, op: int, input: Tensor, exp_indices: Tensor | None, weight: Tensor | None,
                 full_scatter_indices: Tensor | None, layout: Layout | None,
                 buffer: int) -> tuple[EPLayout, Tensor | None, int]:
        """Check the arguments of a dispatch, and make its plan if there is none.

        Returns the layout, the weights in float32, and the number of output rows: -1 where the operation
        itself reads it.
        """
        try:
            check_mode(input, weight)
            if layout is None:
                self._check_tensor("input", input, self.dtype, (None, self.hidden))
                if exp_indices is None:
                    raise TypeError("exp_indices is None: pass them, or the layout of an earlier preprocess "
                                    "or dispatch")
                is_matrix = isinstance(exp_indices, torch.Tensor) and exp_indices.dim() == 2
                # Under torch.compile the sizes may be symbolic: the operator checks them when the graph runs.
                if is_matrix and not torch.compiler.is_compiling() and (
                        exp_indices.shape[0] != input.shape[0]):
                    raise ValueError(f"input has {input.shape[0]} tokens, but exp_indices has "
                                     f"{exp_indices.shape[0]}: must be the same")
            else:
                layout = self._check_layout(layout)
                if buffer not in (0, layout.buffer):
                    raise ValueError(f"buffer {buffer!r}, but the layout is of buffer {layout.buffer}: "
                                     f"leave buffer out")
                self._check_tensor("input", input, self.dtype,
                                   (layout.num_tokens // self._copies, self.hidden))
            if weight is not None:
                self._check_tensor("weight", weight, None, (input.shape[0], self.topk * self._copies))
                weight = cast(weight, torch.float32)
                if self._copies > 1:
                    weight = self._by_choice("weight", weight, self.max_tokens // self._copies)
        except Exception as error:
            self._propagate(_C.OP_PLAN if layout is None else op, error, self._buffer_of(layout, buffer))
        if layout is None:
            self._check_buffer(_C.OP_PLAN, buffer)
            layout = self._make_layout(exp_indices, full_scatter_indices, buffer)
            if self.host_counts:  # now, because for an older plan the host waits for the stream
                self._read_rows(layout)
        num_rows = self.capacity or (-1 if layout._num_rows is None else layout._num_rows)
        return layout, weight, num_rows

    def _by_choice(self, name: str, t: Any, most: int) -> Any:
        """Return [T, K] as [T * K, 1], where every choice is a token of its own (_copies > 1).

        What is not a tensor is returned as it is: a later check refuses it.
        """
        if not isinstance(t, torch.Tensor):
            return t
        if t.dim() != 2 or t.shape[1] != self._copies:
            raise ValueError(f"{name}: wanted shape [*, {self._copies}], got {list(t.shape)}")
        if not torch.compiler.is_compiling() and t.shape[0] > most:  # in compiled code the operator checks it
            raise ValueError(f"{name} has {t.shape[0]} tokens: must be at most {most}; see max_tokens")
        return t.reshape(-1, 1)

    def _check_layout(self, layout: Any) -> EPLayout:
        """Return the layout, which must be one of this layer."""
        if not isinstance(layout, EPLayout):
            raise TypeError(f"layout: wanted an EPLayout, got {type(layout).__name__}")
        if layout.layer is not self:
            raise ValueError("the layout belongs to another layer: pass one that this layer's preprocess or "
                             "dispatch returned")
        return layout

    def _check_dispatched(self, layout: Any) -> EPLayout:
        """Return the layout, which must be of a dispatch of this layer."""
        layout = self._check_layout(layout)
        if layout.recv is None:
            raise ValueError("combine needs the layout of a dispatch, but this one was only planned: call "
                             "dispatch(layout=...) first")
        return layout

    def _check_product(self, gemm_weight: Any, rows: int | None, columns: int | None, bias: Any,
                       activation: Activation | None) -> Tensor:
        """Return gemm_weight [L, rows, columns], where None is any size.

        Checks it, the bias and the activation.
        """
        self._check_tensor("gemm_weight", gemm_weight, self.dtype, (self.num_local_experts, rows, columns))
        check_activation(activation, gemm_weight.shape[1])
        if bias is not None:
            self._check_tensor("bias", bias, None, tuple(gemm_weight.shape[:2]))
        return gemm_weight

    def _buffer_of(self, layout: Any, buffer: int = 0) -> int:
        """Return the buffer of a call, for _propagate.  Another layer's layout says nothing about this."""
        return layout.buffer if getattr(layout, "layer", None) is self else buffer

    # ---- calls of the module; ops.py makes operators of them ----

    def _empty(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor of one or two dimensions, of the layer's dtype or another."""
        return self._allocator()(sizes, (*sizes[1:], 1), dtype or self.dtype)

    def _plan(self, exp_indices: Any, scatter: Any, buffer: int) -> Tensor:
        try:
            has_tokens = isinstance(exp_indices, torch.Tensor) and exp_indices.dim()
            num_tokens = min(exp_indices.size(0), self.max_tokens) if has_tokens else 0
            plan = self._empty(self._plan_words(num_tokens), dtype=torch.int32)
        except Exception as error:
            self._propagate(_C.OP_PLAN, error, buffer)
        _C.layer_plan(self._c, buffer, (exp_indices, scatter, plan, 0))
        return plan

    def _plan_words(self, num_tokens: int) -> int:
        """Return the length of a plan, as ep_plan_layout computes it.

        num_tokens may be a tracer's symbol.
        """
        words_of_tokens = (num_tokens + 3) // 4 * 4 * (3 * self.topk + 2 * self.world_size)
        return self._plan_front["num_words"] + words_of_tokens

    def _num_rows(self, plan: Tensor, buffer: int) -> int:
        return _C.layer_num_rows(self._c, buffer, plan)

    def _make_layout(self, exp_indices: Any, scatter: Any, buffer: int) -> EPLayout:
        """Launch a plan.  Its layout does not have the number of rows yet: see _read_rows."""
        self._check_plan(buffer, exp_indices, scatter)
        if is_watched():
            plan = ops.plan(self, exp_indices, scatter, buffer)
        else:
            plan = self._plan(exp_indices, scatter, buffer)
        return EPLayout(self, plan, exp_indices.shape[0], buffer)

    def _read_rows(self, layout: EPLayout) -> EPLayout:
        """Wait until the plan of a layout has the number of rows.  Returns the layout, which knows it then.

        Raises the plan's error.  With a capacity, and where a compiler traces, only the device learns the
        number, and this does nothing.
        """
        if layout._num_rows is not None or self.capacity is not None or is_watched():
            return layout
        if self.host_counts:
            layout._expert_rows = _C.layer_expert_rows(self._c, layout.buffer, layout.plan)
            layout._num_rows = sum(layout._expert_rows)
        else:
            layout._num_rows = self._num_rows(layout.plan, layout.buffer)
        return layout

    @reported_after_plan(_C.OP_DISPATCH)
    def _dispatch_planned(self, layout: EPLayout, input: Tensor, weight: Tensor | None,
                          num_rows: int) -> tuple[Tensor, Tensor | None, EPLayout]:
        with_grad = requires_grad(input, weight)
        if self._copies > 1:
            input = input.repeat_interleave(self._copies, 0)
        if with_grad or is_watched():
            rows, row_weight, recv, _ = ops.dispatch(self, input, weight, layout.plan, layout.buffer,
                                                     num_rows, with_grad)
        else:
            rows, row_weight, recv, _ = self._dispatch(input, weight, layout.plan, layout.buffer, num_rows)
        self._set_dispatched(layout, rows, recv)
        return rows, cast(row_weight, self.weight_dtype), layout

    @reported_after_plan(_C.OP_DISPATCH)
    def _dispatch_tagged_planned(self, layout: EPLayout, input: Tensor, weight: Tensor | None, num_rows: int,
                                 tag: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Layout]:
        if self._copies > 1:
            input, tag = input.repeat_interleave(self._copies, 0), tag.repeat_interleave(self._copies, 0)
        rows, row_weight, recv, row_tag = self._dispatch(input, weight, layout.plan, layout.buffer, num_rows,
                                                         tag=tag)
        assert row_tag is not None  # tag is a tensor
        self._set_dispatched(layout, rows, recv)
        return rows, cast(row_weight, self.weight_dtype), row_tag, layout

    @reported_after_plan(_C.OP_DISPATCH)
    def _dispatch_fp8_planned(self, layout: EPLayout, input: Tensor, weight: Tensor | None,
                              num_rows: int) -> tuple[Tensor, Tensor, Tensor | None, EPLayout]:
        x, x_scale = quantize_fp8(input.contiguous())
        if self._copies > 1:
            x, x_scale = x.repeat_interleave(self._copies, 0), x_scale.repeat_interleave(self._copies, 0)
        scales: Any
        if is_watched():
            rows, row_weight, recv, scales = ops.dispatch(self, x, weight, layout.plan, layout.buffer,
                                                          num_rows, x_scale=x_scale)
        else:
            rows, row_weight, recv, scales = self._dispatch(x, weight, layout.plan, layout.buffer, num_rows,
                                                            x_scale=x_scale)
        self._set_dispatched(layout, rows, recv)
        return rows, scales, cast(row_weight, self.weight_dtype), layout

    def _dispatch(self, x: Tensor, weight: Tensor | None, plan: Tensor, buffer: int, num_rows: int,
                  with_grad: bool = False, x_scale: Tensor | None = None,
                  tag: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Allocate the outputs and call the module.  Returns the rows, their weights, recv and their scales.

        x_scale: of tokens in FP8.  tag: [T] int32, a number that travels with each token, not in FP8; those
        of the rows take the place of the scales.
        """
        if x_scale is not None:
            x = x.view(torch.uint8)  # DLPack of some versions of torch has no FP8

        def make(n: int) -> Outputs:
            row_weight = None if weight is None else self._empty(n, dtype=torch.float32)
            recv = self._empty(self._recv_words, dtype=torch.int32)
            row_tag = None if tag is None else self._empty(n, dtype=torch.int32)
            if x_scale is None:
                return [self._empty(n, self.hidden), None, row_weight], [recv, tag, row_tag]
            return [*self._fp8_rows(n, by_row=True), row_weight], [recv, tag, row_tag]

        def launch(outputs: list[Any], others: list[Any], awaits_rows: bool) -> _C._Ran:
            return _C.layer_dispatch(self._c, buffer, (x, x_scale, weight, plan, *outputs, *others, with_grad,
                                                       awaits_rows))

        call = plan, buffer, x.shape[0]
        (rows, row_scale, row_weight), (recv, _, row_tag) = self._run_dispatch(
            call, num_rows, make, launch, 0 if with_grad else None)
        if row_tag is not None:
            return rows, row_weight, recv, row_tag[:len(rows)]
        if x_scale is not None:
            rows = rows.view(torch.float8_e4m3fn)
        return rows, row_weight, recv, row_scale

    def _fp8_rows(self, num_rows: int, by_row: bool) -> tuple[Tensor, Tensor]:
        """Allocate the rows of a dispatch in FP8, as bytes, and their scales.

        by_row: The scales of a row are next to each other in memory, else those of a group.
        """
        rows = self._empty(num_rows, self.hidden, dtype=torch.uint8)
        groups = -(-self.hidden // FP8_BLOCK)
        if by_row:
            return rows, self._empty(num_rows, groups, dtype=torch.float32)
        return rows, self._empty(groups, num_rows, dtype=torch.float32).t()

    def _set_dispatched(self, layout: EPLayout, rows: Tensor, recv: Tensor) -> None:
        """Give a layout what its dispatch has returned: the received rows, and recv."""
        layout.recv = recv
        if self.capacity is None and not is_watched():
            layout._num_rows = rows.shape[0]

    def _run_dispatch(self, call: tuple[Tensor, int, int], num_rows: int, make: Callable[[int], Outputs],
                      launch: Callable[[list[Any], list[Any], bool], _C._Ran],
                      kept_for: int | None) -> Outputs:
        """Run a dispatch.  Returns its outputs.

        call: the plan, the buffer and the number of tokens.  make(n): returns the outputs, a
        list of tensors with n rows, and a list of other tensors.  launch(outputs, others, awaits_rows): calls
        the module, and returns what it returns.  kept_for: None, or the address of the weights for whose
        backward the outputs are kept, 0 without weights.
        """
        plan, buffer, num_tokens = call
        if num_rows < 0:
            made = self._run_ahead(num_tokens, make, launch, kept_for)
            if made is not None:
                return made
            num_rows = self._num_rows(plan, buffer)
        made = make(num_rows)
        launch(*made, False)
        return made

    def _run_ahead(self, num_tokens: int, make: Callable[[int], Outputs],
                   launch: Callable[[list[Any], list[Any], bool], _C._Ran],
                   kept_for: int | None) -> Outputs | None:
        """Run a dispatch with outputs that are made before the number of rows is known.  Returns them.

        Returns None, and launches nothing, if they do not fit the number, or if there is no memory for them.
        """
        room = _C.layer_room(self._c, num_tokens, kept_for)
        if room == _C.NO_ROOM:
            return None
        try:
            made = make(room)
        except Exception:  # torch frees all memory that it caches before it gives up: do not try again
            _C.layer_set_room(self._c, num_tokens, kept_for, _C.NO_ROOM)
            return None  # there may be memory for as many rows as are needed
        num_rows, is_launched, _ = launch(*made, True)
        if not is_launched:
            return None
        for i, t in enumerate(made[0] if num_rows < room else ()):
            if t is not None and t.is_contiguous():
                t.resize_(num_rows, *t.shape[1:])
            elif t is not None:  # scales, those of a group next to each other
                made[0][i] = t[:num_rows]
        return made

    @reported_after_plan(_C.OP_COMBINE)
    def _combine_checked(self, layout: EPLayout, input: Tensor, weight: Tensor | None) -> Tensor:
        with_grad = requires_grad(input, weight)
        if with_grad or is_watched():
            return ops.combine(self, input, weight, layout.plan, layout.recv, layout.buffer,
                               layout.num_tokens, with_grad)
        return self._combine(input, weight, None, layout.plan, layout.recv, layout.buffer,
                             layout.num_tokens)[0]

    def _combine(self, rows: Tensor, row_weight: Tensor | None, row_scalar: Tensor | None, plan: Tensor,
                 recv: Tensor | None, buffer: int, num_tokens: int, with_grad: bool = False,
                 biases: tuple[Tensor | None, Tensor | None] = (None, None),
                 by_choice: bool = False) -> tuple[Tensor, Tensor | None]:
        """biases, by_choice: see EP_ARGS_combine of csrc/protocol/ops.h."""
        out = self._empty(num_tokens, self.hidden)
        out_scalar = None
        if row_scalar is not None:
            out_scalar = self._empty(num_tokens, self.topk, dtype=torch.float32)
        _C.layer_combine(self._c, buffer, (rows, row_weight, row_scalar, *biases, plan, recv, out, out_scalar,
                                           with_grad, by_choice))
        return out, out_scalar
