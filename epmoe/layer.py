"""EPAll2AllLayer: plan, dispatch and combine of an expert-parallel layer."""

import contextlib
import itertools

import torch
from torch.utils.checkpoint import _StopRecomputationError

from . import _C, ops
from .heap import SymmetricHeap, pick_device, status_of, stream_of
from .layout import EPLayout
from .world import Shared, World

_DTYPES = {torch.float32: _C.F32, torch.float16: _C.F16, torch.bfloat16: _C.BF16}
_MODES = {"scatter": _C.COMBINE_SCATTER, "gather": _C.COMBINE_GATHER}


def _default_num_sm(device, row_bytes):
    """Short rows keep a block waiting more than moving, and want more blocks; benchmarks/NOTES.md has the measurements."""
    return 1 if device.type == "cpu" else 64 if row_bytes >= 4096 else 96


def _num_blocks(device, reserve_sms):
    """Thread blocks that an operation may have at most: on a GPU one a SM, but for those that are reserved."""
    num_sm = 1024 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 <= reserve_sms <= num_sm - 2:
        raise ValueError(f"reserve_sms {reserve_sms}: 0 to {num_sm - 2}, so that two are left")
    return num_sm - reserve_sms


_ids = itertools.count()


def cast(t, dtype):
    """t.to(dtype), or None; what is no floating-point number stays what it is, to be refused when it runs (see _check_tensor)."""
    return t if t is None or t.dtype == dtype or not t.dtype.is_floating_point else t.to(dtype)  # a call that does nothing takes a microsecond


class EPAll2AllLayer(Shared):
    """Moves tokens to the ranks that hold their experts, and the experts' rows home.

    Args:
        ep_group: a ProcessGroup, a one-dimensional DeviceMesh, an epmoe.World, or None (the default group).
        max_tokens: tokens per rank and call, at most.
        hidden: H; a row (H elements) must be a multiple of 16 bytes.
        topk: K, 1 to 32.
        rank, world_size, local_world_size: taken from the group; checked when given.
        num_tot_experts: E, a multiple of the ranks, at most 1024.  Expert e lives on rank e // (E / W).
        dtype: float32, float16 or bfloat16.
        weight_dtype: dtype of the weights that dispatch returns; they travel and are applied as float32.
        num_sm: thread blocks that move tokens (CUDA; default 64, or 96 where a row is under 4096 bytes), worker threads (CPU; 1).
        enable_local_combine: sum at the expert's rank first, so that one row per (token, rank) crosses the
            link.  The partial sums are rounded to dtype; combine's docstring has the exact formula.
        combine_mode: "scatter" (the expert's rank pushes one row per choice) or "gather" (the token's rank
            pulls them).  Without meaning when enable_local_combine is set.
        capacity: rows that a rank can receive.  None: outputs have exactly M rows, which costs one host read
            of M a call.  A number: outputs have `capacity` rows, nothing is read by the host, and the layer
            can be captured in a CUDA graph; more rows than that raise EpOverflow and move nothing.
        num_buffers: communication buffers.  On the CPU, calls on different ones may come from several threads at once.
        reserve_sms: SMs (CUDA) that no operation of this layer takes: room for kernels on other streams that wait for other ranks,
            too, as NCCL's do.  Without room for both, one kernel may be the first here, the other elsewhere, and all wait.
        heap: a SymmetricHeap shared with other layers; by default the layer makes one of its own.  Without ep_group the layer is
            of the heap's world.
        device: see SymmetricHeap; with a heap, None or the heap's.
        timeout_s: see World; a world that is there already takes it over.

    Creation is collective.  Raises ValueError or TypeError here, and PeerError on the others, for what cannot be; EpMismatch on all
    ranks when they ask for different layers, HeapExhausted on all without room.

    On a GPU a process's operations of epmoe run in the order of their calls, whatever their streams, and on all ranks that order must
    be the same.  Replays of CUDA graphs are not seen: replay graphs in one order on all ranks, on one stream.
    """

    # See EpAll2AllFusedOp: tokens travel in the order in which they stand; a row of the input is one token.
    token_sorting, _copies = False, 1

    def __init__(self, ep_group, max_tokens, hidden, topk, rank=None, num_tot_experts=None, local_world_size=None, world_size=None,
                 dtype=torch.bfloat16, weight_dtype=torch.float32, num_sm=None, enable_local_combine=False, *,
                 combine_mode="scatter", capacity=None, num_buffers=1, reserve_sms=0, heap=None, device=None, timeout_s=None):
        self.world = self._world_of(ep_group, heap, timeout_s)
        self.rank, self.world_size = self.world.rank, self.world.size
        try:
            if heap is not None and not isinstance(heap, SymmetricHeap):
                raise TypeError(f"heap: wanted a SymmetricHeap or None, got {type(heap).__name__}")
            if heap is not None and heap.world is not self.world:
                raise ValueError("the heap belongs to another world than ep_group")
            if heap is not None and device is not None and pick_device(device) != heap.device:
                raise ValueError(f"device {device}, but the heap is on {heap.device}")
            for name, got, want in (("rank", rank, self.rank), ("world_size", world_size, self.world_size),
                                    ("local_world_size", local_world_size, self.world_size)):
                if got is not None and got != want:
                    raise ValueError(f"{name}={got}, but the group says {want} (all ranks must be on one node)")
            if num_tot_experts is None:
                raise TypeError("num_tot_experts is missing")
            if dtype not in _DTYPES:
                raise TypeError(f"dtype {dtype}: must be float32, float16 or bfloat16")
            if not isinstance(weight_dtype, torch.dtype) or not weight_dtype.is_floating_point:
                raise TypeError(f"weight_dtype {weight_dtype}: must be a floating-point dtype")
            if combine_mode not in _MODES:
                raise ValueError(f"combine_mode {combine_mode!r}: scatter or gather (serial and fuse_scatter are combine_order's)")
            self.max_tokens, self.hidden, self.topk, self.num_experts = int(max_tokens), int(hidden), int(topk), int(num_tot_experts)
            self.dtype, self.weight_dtype = dtype, weight_dtype
            self.capacity = None if capacity is None else int(capacity)
            self.num_local_experts = self.num_experts // self.world_size
            self.device = heap.device if heap is not None else pick_device(device)
            self._num_blocks = _num_blocks(self.device, int(reserve_sms))
            self._check_options()
            most = min(self.world_size * self.max_tokens * self.topk, (1 << 31) - 1)
            mode = _C.COMBINE_LOCAL if enable_local_combine else _MODES[combine_mode]
            self._config = (self.world_size, self.num_experts, self.topk, self.max_tokens, self.hidden, _DTYPES[dtype], mode,
                            most if capacity is None else self.capacity, int(num_buffers),
                            _default_num_sm(self.device, self.hidden * dtype.itemsize) if num_sm is None else int(num_sm), int(reserve_sms))
            num_bytes = _C.layer_bytes(self._config)
            if timeout_s is not None:
                self.world.set_timeout(timeout_s)
        except Exception as error:
            self._refuse_layer(self.world, heap, error)
            raise
        self._owns_heap = heap is None
        if self._owns_heap:  # who wants another layer wants a heap of another size: that would be all that ranks hear
            _C.layer_agree(self.world._c, self._config, 0)
        self.heap = SymmetricHeap(self.world, num_bytes, self.device) if heap is None else heap
        try:
            self._c = _C.layer_create(self.heap._c, self._config)
        except Exception:
            with contextlib.suppress(Exception):  # all ranks are here: who was made for this layer goes with it
                if self._owns_heap:
                    self.heap.close()
            raise
        self._recv_words = self.world_size * self.max_tokens * (1 + self.topk)
        self._plan_front = _C.plan_layout(self._config, 0)
        # How torch.ops.epmoe.* name a layer.  With all that sizes depend on: a compiler that keeps graphs must not take another's.
        self.id = f"{next(_ids)} {self._config}"
        ops.layers[self.id] = self

    @staticmethod
    def _world_of(ep_group, heap, timeout_s):
        """The world of a layer with these arguments: the first thing to know, for without it nobody can be told what is wrong."""
        return heap.world if isinstance(heap, SymmetricHeap) and ep_group is None else World.of(ep_group, timeout_s)

    @staticmethod
    def _refuse_layer(world, heap, error):
        """This rank cannot make the layer that the others are making: let them know.  They begin with what the layer is to be, or are in the
        heap that is there; who has none of that world is heard all the same."""
        with contextlib.suppress(Exception):
            if heap is None:
                _C.layer_agree(world._c, (0,) * 11, status_of(error))
            elif isinstance(heap, SymmetricHeap) and heap.world is world:
                _C.layer_create(heap._c, (0,) * 11)
            else:
                _C.world_refuse(world._c, status_of(error))

    def _check_options(self):
        """What a kind of layer of its own was given: raises where the others still hear of it.  May change topk and max_tokens."""

    # The four below allocate outputs (a rank that has no memory for them tells the others) and call the module; ops.py gives them to
    # autograd and torch.compile.

    def _plan(self, exp_indices, scatter, buffer):
        num_tokens = exp_indices.size(0) if isinstance(exp_indices, torch.Tensor) and exp_indices.dim() else 0
        try:
            plan = torch.empty(self._plan_words(min(num_tokens, self.max_tokens)), dtype=torch.int32, device=self.device)
        except Exception as error:
            self._refuse(_C.OP_PLAN, error, buffer)
        _C.layer_plan(self._c, buffer, exp_indices, scatter, plan, self.token_sorting)
        return plan

    def _plan_words(self, num_tokens):
        """Length of a plan, as ep_plan_layout has it; num_tokens may be a tracer's symbol."""
        return self._plan_front["num_words"] + (num_tokens + 3) // 4 * 4 * (3 * self.topk + 2 * self.world_size)

    def _num_rows(self, plan, buffer):
        return _C.layer_num_rows(self._c, buffer, plan)

    def _dispatch(self, x, weight, plan, buffer, num_rows, with_grad=False):
        try:
            rows = torch.empty((num_rows, self.hidden), dtype=self.dtype, device=self.device)
            row_weight = None if weight is None else torch.empty(num_rows, dtype=torch.float32, device=self.device)
            recv = torch.empty(self._recv_words, dtype=torch.int32, device=self.device)
        except Exception as error:
            self._refuse(_C.OP_DISPATCH, error, buffer)
        _C.layer_dispatch(self._c, buffer, x, weight, plan, rows, row_weight, recv, with_grad)
        return rows, row_weight, recv

    def _combine(self, rows, row_weight, row_scalar, plan, recv, buffer, num_tokens, with_grad=False):
        try:
            out = torch.empty((num_tokens, self.hidden), dtype=self.dtype, device=self.device)
            out_scalar = None if row_scalar is None else torch.empty((num_tokens, self.topk), dtype=torch.float32, device=self.device)
        except Exception as error:
            self._refuse(_C.OP_COMBINE, error, buffer)
        _C.layer_combine(self._c, buffer, rows, row_weight, row_scalar, plan, recv, out, out_scalar, with_grad)
        return out, out_scalar

    def _is_buffer(self, buffer):
        return isinstance(buffer, int) and 0 <= buffer < self._config[8]

    def _check_buffer(self, op, buffer):
        if not self._is_buffer(buffer):
            kind = ValueError if isinstance(buffer, int) else TypeError
            self._refuse(op, kind(f"buffer {buffer!r} of {self._config[8]}"), buffer)

    def _refuse(self, op, error, buffer):
        """Let the other ranks know that this one cannot take part in op; then raise the error.  They hear of it in the
        buffer that was meant; who means one that is not there is heard in the first."""
        if torch.compiler.is_compiling():  # a compiler that traces its way here must not trace this: it leaves the call to Python
            self._refuse_untraced(op, error, buffer)
        self._refuse_now(op, error, buffer)

    @torch._disable_dynamo  # not for calls outside of a compiler: the first one imports what takes seconds, and the peers wait
    def _refuse_untraced(self, op, error, buffer):
        self._refuse_now(op, error, buffer)

    def _refuse_now(self, op, error, buffer):
        if isinstance(error, _StopRecomputationError):  # checkpointing has seen enough of this forward
            raise error
        _C.layer_refuse(self._c, buffer if self._is_buffer(buffer) else 0, op, status_of(error), stream_of(self.device))
        raise error

    def _meant(self, layout, buffer=0):
        """The buffer that a call meant, for _refuse: another layer's layout says nothing of this layer's."""
        return layout.buffer if getattr(layout, "layer", None) is self else buffer

    def preprocess(self, exp_indices, full_scatter_indices=None, *, buffer=0):
        """Plan a dispatch.

        Args:
            exp_indices: [T, K] int32 or int64, contiguous.  -1 and E are dropped choices; duplicates are allowed.
            full_scatter_indices: row of every choice at its expert's rank, chosen by the caller instead of by the
                plan: int32 [T, K] of this rank's tokens, or [sum of all ranks' T, K] in rank order.  Rows of a
                rank must be a permutation of 0 .. M-1; only that they lie there is checked (ValueError here, and PeerError in
                the others' dispatch), for no rank sees all of them.  Where one is given twice another is missing: its row is undefined,
                or, in dispatch and product as one kernel, waited for to twice the limit (EpTimeout).
            buffer: communication buffer to use.
        Returns: EPLayout.
        Raises on every rank: EpIndexError, EpOverflow, EpMismatch; ValueError or TypeError here and PeerError on
            the others; PeerDied, EpTimeout.
        """
        self._check_buffer(_C.OP_PLAN, buffer)
        is_watched = ops.is_watched()
        if ops.is_transformed():
            self._refuse(_C.OP_PLAN, NotImplementedError("torch.func's transforms do not go through epmoe: torch.autograd's gradients do"), buffer)
        if is_watched:
            plan = ops.plan(self, exp_indices, full_scatter_indices, buffer)
        else:
            plan = self._plan(exp_indices, full_scatter_indices, buffer)
        num_rows = None
        if self.capacity is None and not is_watched:
            num_rows = self._num_rows(plan, buffer)
        return EPLayout(self, plan, exp_indices.shape[0], buffer, num_rows)

    def dispatch(self, input, exp_indices=None, weight=None, full_scatter_indices=None, *, layout=None, buffer=0):
        """Send tokens to their experts' ranks.

        Args:
            input: [T, H] of the layer's dtype, contiguous.
            exp_indices, full_scatter_indices: [T, K], see preprocess.  Neither needed nor looked at with a layout.
            weight: [T, K] routing weights of a floating-point dtype to take along, or None.  On all ranks or on none.
            layout: of an earlier preprocess or dispatch: reuses its plan, and its buffer.
            buffer: see preprocess; with a layout, 0 or the layout's.
        Returns: (rows [M, H] of the layer's dtype, row weights [M] of weight_dtype or None, layout).  With a capacity: [capacity, H]
            and [capacity], zero behind M.  Rows stand by local expert, inside it by source rank, token, choice.
        Differentiable in input and weight; whether a gradient is wanted is the same on all ranks.
        Raises ValueError or TypeError here, and PeerError on the others, for a wrong argument; EpMismatch on all ranks when they are not
            in the same call; PeerDied, EpTimeout; without a layout also what preprocess raises.  On CUDA the call returns before it has
            run: what goes wrong in the kernels is raised by the next call on the layer, or by synchronize(), and the rows are NaN.
        """
        layout, weight, num_rows = self._prepare(_C.OP_DISPATCH, input, exp_indices, weight, full_scatter_indices, layout, buffer)
        with_grad = ops.requires_grad(input, weight)
        if with_grad or ops.is_watched():
            rows, row_weight, layout.recv = ops.dispatch(self, input, weight, layout.plan, layout.buffer, num_rows, with_grad)
        else:
            num_rows = self._num_rows(layout.plan, layout.buffer) if num_rows < 0 else num_rows
            rows, row_weight, layout.recv = self._dispatch(input, weight, layout.plan, layout.buffer, num_rows)
        return rows, cast(row_weight, self.weight_dtype), layout

    def combine(self, input, layout, weight=None):
        """Bring rows home and add them up: y[t] = sum over the choices k of token t, dropped ones left out.

        Args:
            input: [M, H] (or [capacity, H]) in the order of dispatch's rows.
            layout: of the dispatch.
            weight: [M] (or [capacity]) of a floating-point dtype: y[t] = sum of weight * row; or None.  On all ranks or on none.
        Returns: [T, H] of the layer's dtype.  Sums are in float32 and in a fixed order, so runs are bit-identical:
            scatter, gather:       y = round(sum over k = 0, 1, ... of w_k * row_k)
            enable_local_combine:  y = round(sum over ranks r = 0, 1, ... of round(sum over k at r of w_k * row_k))
        Differentiable in input and weight; whether a gradient is wanted is the same on all ranks.
        Raises ValueError or TypeError here, and PeerError on the others, for a wrong argument; EpMismatch on all ranks when they are not
            in the same call, or bring home another dispatch; PeerDied, EpTimeout.  On CUDA as dispatch does, later.
        """
        try:
            self._check_layout(layout)
            if layout.recv is None:
                raise ValueError("combine needs the layout of a dispatch; this one was only planned")
            num_rows = layout._num_rows if self.capacity is None else self.capacity
            self._check_tensor("input rows", input, self.dtype, (num_rows, self.hidden))
            if weight is not None:
                self._check_tensor("weight", weight, None, (input.shape[0],))
                weight = cast(weight, torch.float32)
        except Exception as error:
            self._refuse(_C.OP_COMBINE, error, self._meant(layout))
        with_grad = ops.requires_grad(input, weight)
        if with_grad or ops.is_watched():
            return ops.combine(self, input, weight, layout.plan, layout.recv, layout.buffer, layout.num_tokens, with_grad)
        return self._combine(input, weight, None, layout.plan, layout.recv, layout.buffer, layout.num_tokens)[0]

    def _prepare(self, op, input, exp_indices, weight, full_scatter_indices, layout, buffer):
        """What comes before a dispatch: its arguments are looked at, and there is a plan.  Returns the layout, the weights in float32,
        and how many rows to make: -1 where that is only known when it runs."""
        try:
            if layout is None:
                self._check_tensor("input", input, self.dtype, (None, self.hidden))
                if exp_indices is None:
                    raise TypeError("exp_indices is None: give them, or the layout of an earlier preprocess or dispatch")
                if isinstance(exp_indices, torch.Tensor) and exp_indices.dim() == 2 and exp_indices.shape[0] != input.shape[0]:
                    raise ValueError(f"input has {input.shape[0]} tokens, exp_indices {exp_indices.shape[0]}")
            else:
                self._check_layout(layout)
                if buffer not in (0, layout.buffer):
                    raise ValueError(f"buffer {buffer!r}, but the layout is of buffer {layout.buffer}")
                self._check_tensor("input", input, self.dtype, (layout.num_tokens // self._copies, self.hidden))
            if weight is not None:
                self._check_tensor("weight", weight, None, (input.shape[0], self.topk * self._copies))
                weight = cast(weight, torch.float32)
                weight = weight if self._copies == 1 else self._by_choice("weight", weight, self.max_tokens // self._copies)
        except Exception as error:
            self._refuse(_C.OP_PLAN if layout is None else op, error, self._meant(layout, buffer))
        if layout is None:
            layout = self.preprocess(exp_indices, full_scatter_indices, buffer=buffer)
        num_rows = -1 if layout._num_rows is None and self.capacity is None else self.capacity or layout._num_rows
        return layout, weight, num_rows

    def _check_layout(self, layout):
        if not isinstance(layout, EPLayout):
            raise TypeError(f"layout: wanted an EPLayout, got {type(layout).__name__}")
        if layout.layer is not self:
            raise ValueError("the layout belongs to another layer")

    def _check_tensor(self, name, t, dtype, shape):
        """What the module would refuse in its operation is refused before the first one: then no rank is left in between."""
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: wanted a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            raise ValueError(f"{name}: wanted a dense tensor, got one of layout {'nested' if t.is_nested else t.layout}")
        if t.device != self.device:
            raise ValueError(f"{name} is on {t.device}, the layer on {self.device}")
        if torch.compiler.is_compiling():
            return  # the module looks at the rest when it runs, and the other ranks hear of it: a compiler cannot tell them
        if dtype is not None and t.dtype != dtype or not t.dtype.is_floating_point:
            raise TypeError(f"{name}: wanted {dtype or 'a floating-point dtype'}, got {t.dtype}")
        if t.shape != shape and (t.dim() != len(shape) or any(want is not None and got != want for got, want in zip(t.shape, shape))):
            raise ValueError(f"{name}: wanted shape [{', '.join('*' if d is None else str(d) for d in shape)}], got {list(t.shape)}")
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous")

    def ep_barrier_all(self, *, buffer=0):
        """All ranks have come here, in stream order.  Collective.  buffer: see preprocess.

        Raises ValueError or TypeError here, and PeerError on the others, for a buffer that is not there; EpMismatch on all ranks when they are
        not in the same call; PeerDied, EpTimeout.  On CUDA the stream waits, not the host: what goes wrong is raised later, as by dispatch.
        """
        self._check_buffer(_C.OP_BARRIER, buffer)
        _C.layer_barrier(self._c, buffer, stream_of(self.device))

    def synchronize(self):
        """Wait for the current stream and raise what went wrong in it.

        On CUDA, dispatch and combine return before they have run: what goes wrong in them is raised by the next
        call on the layer, or here.
        """
        _C.layer_sync(self._c, stream_of(self.device))

    def finalize(self):
        """Give the layer's memory back.  Collective; a second call does nothing.

        Raises EpMismatch on all ranks when one of them is in another call: then nothing was given back, and all finalize again.
        """
        _C.layer_close(self._c)
        if self._owns_heap:
            self.heap.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.finalize()
