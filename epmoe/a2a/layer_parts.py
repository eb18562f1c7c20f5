"""LayerParts: what the methods of EPAll2AllLayer are made of: options, checks and refusals.

A rank whose arguments are wrong must not leave the others waiting.  So each check that fails reports its
error to the other ranks, in the operation that they are about to enter (_refuse), before it raises.
"""

import collections
import contextlib

import torch
from torch.utils.checkpoint import _StopRecomputationError

from .. import _C
from ..comm.device import capabilities, integer, pick_device, status_of, stream_of
from ..comm.heap import SymmetricHeap
from ..comm.nodes import Nodes, is_mesh
from ..comm.refusals import check_plain, is_told, mark_told
from ..comm.world import Shared, World
from ..gemm.grouped import check_activation, is_transposed
from ..torch_modes import check_mode
from .internode.choice import spans_nodes
from .layout import EPLayout

DTYPES = {torch.float32: _C.F32, torch.float16: _C.F16, torch.bfloat16: _C.BF16}
MODES = {"scatter": _C.COMBINE_SCATTER, "gather": _C.COMBINE_GATHER}
# The configuration of a layer, as the module takes it.
Config = collections.namedtuple("Config", _C.CONFIG_FIELDS)
_LOCAL_WORLD_SIZE = 5  # its place among the arguments of a layer after ep_group
_NO_CONFIG = Config._make([0] * len(Config._fields))  # of a rank that has no valid configuration


def default_num_sm(device, row_bytes):
    """Return the thread blocks that move tokens by default.

    Short rows make a block wait longer than it copies, so they need more blocks (docs/experiments, E-005).
    """
    if device.type == "cpu":
        return 1
    return 64 if row_bytes >= 4096 else 96


def check_kinds(num_tot_experts, dtype, weight_dtype, combine_mode):
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


def check_rail_dtype(rail_dtype, dtype):
    """Return the dtype of sums on their way between nodes, in a layer of some dtype."""
    if rail_dtype is None or rail_dtype == dtype:
        return dtype
    if rail_dtype not in DTYPES:
        raise TypeError(f"rail_dtype {rail_dtype}: must be None, float32, float16 or bfloat16")
    if dtype != torch.float32:
        raise ValueError(f"rail_dtype {rail_dtype} in a layer of {dtype}: the sum of a node is rounded to "
                         f"{dtype} before it leaves the node: leave rail_dtype out")
    return rail_dtype


def check_rail_capacity(rail_capacity):
    """Return rail_capacity, None or a positive integer.  Raises TypeError or ValueError."""
    if rail_capacity is None:
        return None
    if isinstance(rail_capacity, bool) or not isinstance(rail_capacity, int):
        raise TypeError(f"rail_capacity {rail_capacity!r}: must be an integer or None")
    if rail_capacity < 1:
        raise ValueError(f"rail_capacity {rail_capacity}: must be at least 1 token")
    return rail_capacity


def max_blocks(device, reserve_sms):
    """Return the most thread blocks of an operation: on a GPU one for each SM that is not reserved."""
    num_sm = 1024 if device.type == "cpu" else capabilities(device).num_sms
    if not 0 <= reserve_sms <= num_sm - 2:
        raise ValueError(f"reserve_sms {reserve_sms}: must be 0 to {num_sm - 2}, so that two are left")
    return num_sm - reserve_sms


def cast(t, dtype):
    """Return t.to(dtype), or None.

    A tensor that is not floating-point is returned as it is, and refused when it is used (see _check_tensor).
    """
    # A call of to() that does nothing takes a microsecond.
    return t if t is None or t.dtype == dtype or not t.dtype.is_floating_point else t.to(dtype)


def world_of(ep_group, heap, timeout_s, local_world_size=None):
    """Return the world of a layer with these arguments, or the Nodes of a layer that spans several.

    It comes first, because without a world this rank cannot report what is wrong with its arguments.
    """
    if isinstance(heap, SymmetricHeap) and ep_group is None:
        return heap.world
    if spans_nodes(ep_group, local_world_size):
        return Nodes.of(ep_group, local_world_size, timeout_s)
    if is_mesh(ep_group) or isinstance(ep_group, Nodes):  # of one node
        return Nodes.of(ep_group, None, timeout_s).team
    return World.of(ep_group, timeout_s)


def refuse_layer(world, heap, error):
    """Tell the other ranks, which are creating a layer, that this rank cannot.

    They first agree on the configuration, or, with heap=, enter the creation on that heap.  A rank whose heap
    is of another world, or not a heap, reports through world_refuse.
    """
    with contextlib.suppress(Exception):
        if isinstance(world, Nodes):
            world._refuse()
        elif heap is None:
            _C.layer_agree(world._c, _NO_CONFIG, status_of(error))
        elif isinstance(heap, SymmetricHeap) and heap.world is world:
            _C.layer_create(heap._c, _NO_CONFIG)
        else:
            _C.world_refuse(world._c, status_of(error))


@contextlib.contextmanager
def together(world):
    """A block that all ranks finish, or none.  Collective.

    The block makes no collective call.  Where it raises on one rank, the others raise PeerError at its end.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # the others are at the end of the block
            if isinstance(world, Nodes):
                world._refuse()
            else:
                _C.world_refuse(world._c, status_of(error))
        raise
    world.exchange(b"")


class LayerParts(Shared):
    """The private half of EPAll2AllLayer."""

    _over_nodes = None  # the class of this layer over several nodes: epmoe/nodes sets it
    is_of_module = False  # whether an EPMoE uses the layer: see ops.rows_to_trace
    low_latency = None  # EPMoE: the LowLatencyAll2All of the modules that share the layer
    may_decode = True  # EPMoE: whether they may create one
    expert_alignment = 1
    expert_capacity = None
    host_counts = False
    _spare_buffers = 0  # communication buffers of the world that the layer must leave free

    def __new__(cls, ep_group=None, *args, **options):
        local = args[_LOCAL_WORLD_SIZE] if len(args) > _LOCAL_WORLD_SIZE else options.get("local_world_size")
        heap = options.get("heap")
        if cls._over_nodes and (ep_group is not None or heap is None) and spans_nodes(ep_group, local):
            cls = cls._over_nodes
        return super().__new__(cls)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.finalize()

    def _check_heap(self, heap, device):
        if heap is None:
            return
        if not isinstance(heap, SymmetricHeap):
            raise TypeError(f"heap: wanted a SymmetricHeap or None, got {type(heap).__name__}")
        if heap.world is not self.world:
            raise ValueError("the heap belongs to another world than ep_group: pass ep_group=None to use "
                             "the heap's")
        if device is not None and pick_device(device) != heap.device:
            raise ValueError(f"device {device}, but the heap is on {heap.device}: leave device out")

    def _check_group(self, rank, world_size, local_world_size):
        for name, got, want in (("rank", rank, self.rank), ("world_size", world_size, self.world_size),
                                ("local_world_size", local_world_size, self.world_size)):
            if got is not None and got != want:
                raise ValueError(f"{name}={got}, but the group says {want} (a World is on one node; for "
                                 f"several pass the process group): leave it out")

    def _set_padding(self, expert_alignment, expert_capacity, host_counts):
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

    def _make_config(self, mode, reserve_sms):
        """Return the Config."""
        padding = self.num_local_experts * (self.expert_alignment - 1)
        most_rows = min(self.world_size * self.max_tokens * self.topk + padding, (1 << 31) - 1)
        capacity = most_rows if self.capacity is None else self.capacity
        return Config(ranks=self.world_size, num_experts=self.num_experts, topk=self.topk,
                      max_tokens=self.max_tokens, hidden=self.hidden, dtype=DTYPES[self.dtype],
                      combine_mode=mode, expert_alignment=self.expert_alignment,
                      expert_capacity=self.expert_capacity or 0, capacity=capacity,
                      num_buffers=self._num_buffers, num_sm=self._num_sm, reserve_sms=reserve_sms,
                      host_counts=self.host_counts, spare_buffers=self._spare_buffers)

    def _check_options(self):
        """Check the options of a subclass.  May change topk and max_tokens."""

    def _apply(self, moe, *args):
        """Apply the experts of an EPMoE to tokens, with their choices and weights.  Returns (y, layout)."""
        return moe._compute(self, *args)

    # ---- refusals ----

    def _is_buffer(self, buffer):
        return isinstance(buffer, int) and 0 <= buffer < self._num_buffers

    def _check_buffer(self, op, buffer):
        if not self._is_buffer(buffer):
            kind = ValueError if isinstance(buffer, int) else TypeError
            n = self._num_buffers
            self._refuse(op, kind(f"buffer {buffer!r}: must be 0 to {n - 1}, the layer has {n}"), buffer)

    def _check_mode(self, buffer, exp_indices):
        try:
            check_mode()
            if isinstance(exp_indices, torch.Tensor):
                check_plain("exp_indices", exp_indices)
        except Exception as error:
            self._refuse(_C.OP_PLAN, error, buffer)

    def _refuse(self, op, error, buffer):
        """Report to the other ranks that this one cannot take part in op, then raise the error.

        The report goes through the buffer of the call, or through the first where the call named no valid
        one.  An error of which they know is only raised.
        """
        if torch.compiler.is_compiling():  # a compiler must not trace this, but leave the call to Python
            self._refuse_untraced(op, error, buffer)
        try:
            if is_told(error):
                raise error
            self._refuse_now(op, error, buffer)
        finally:
            del error

    # Not for calls outside of a compiler: its first call imports dynamo for seconds, while the peers wait.
    @torch._disable_dynamo
    def _refuse_untraced(self, op, error, buffer):
        try:
            self._refuse_now(op, error, buffer)
        finally:
            del error

    def _refuse_now(self, op, error, buffer):
        # An error refers to the frames that it has left, so one that a frame still names is in a cycle. The
        # cycle would keep the tensors and CUDA graphs of all callers until a garbage collection.
        try:
            if not isinstance(error, _StopRecomputationError):  # checkpointing needs no more of this forward
                valid = buffer if self._is_buffer(buffer) else 0
                mark_told(error)
                _C.layer_refuse(self._c, valid, op, status_of(error), stream_of(self.device))
            raise error
        finally:
            del error

    def _buffer_of(self, layout, buffer=0):
        """Return the buffer of a call, for _refuse.  Another layer's layout says nothing about this layer."""
        return layout.buffer if getattr(layout, "layer", None) is self else buffer

    # ---- checks ----

    def _prepare(self, op, input, exp_indices, weight, full_scatter_indices, layout, buffer):
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
                if is_matrix and exp_indices.shape[0] != input.shape[0]:
                    raise ValueError(f"input has {input.shape[0]} tokens, but exp_indices has "
                                     f"{exp_indices.shape[0]}: must be the same")
            else:
                self._check_layout(layout)
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
            self._refuse(_C.OP_PLAN if layout is None else op, error, self._buffer_of(layout, buffer))
        if layout is None:
            self._check_buffer(_C.OP_PLAN, buffer)
            layout = self._make_layout(exp_indices, full_scatter_indices, buffer)
            if self.host_counts:  # now, because for an older plan the host waits for the stream
                self._read_rows(layout)
        unknown = layout._num_rows is None and self.capacity is None
        num_rows = -1 if unknown else self.capacity or layout._num_rows
        return layout, weight, num_rows

    def _check_layout(self, layout):
        if not isinstance(layout, EPLayout):
            raise TypeError(f"layout: wanted an EPLayout, got {type(layout).__name__}")
        if layout.layer is not self:
            raise ValueError("the layout belongs to another layer: pass one that this layer's preprocess or "
                             "dispatch returned")

    def _check_dispatched(self, layout):
        self._check_layout(layout)
        if layout.recv is None:
            raise ValueError("combine needs the layout of a dispatch, but this one was only planned: call "
                             "dispatch(layout=...) first")

    def _check_tensor(self, name, t, dtype, shape):
        """Check a tensor before the first operation of a call.

        The module would refuse it too, but in a later operation: then this rank would stop between two.
        """
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: wanted a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            layout = "nested" if t.is_nested else t.layout
            raise ValueError(f"{name}: wanted a dense tensor, got one of layout {layout}")
        check_plain(name, t)
        if t.device != self.device:
            raise ValueError(f"{name}: wanted a tensor on {self.device}, where the layer is, got one on "
                             f"{t.device}")
        if torch.compiler.is_compiling():
            return  # the operator checks the rest when it runs and tells the other ranks; a compiler cannot
        if dtype is not None and t.dtype != dtype or not t.dtype.is_floating_point:
            raise TypeError(f"{name}: wanted {dtype or 'a floating-point dtype'}, got {t.dtype}")
        if t.shape != shape and not _fits(t.shape, shape):
            wanted = ", ".join("*" if d is None else str(d) for d in shape)
            raise ValueError(f"{name}: wanted shape [{wanted}], got {list(t.shape)}")
        if not (t.is_contiguous() or is_transposed(t)):
            raise ValueError(f"{name} must be contiguous: call contiguous() on it")

    def _check_product(self, gemm_weight, rows, columns, bias, activation):
        """Check gemm_weight [L, rows, columns], where None is any size, the bias and the activation."""
        self._check_tensor("gemm_weight", gemm_weight, self.dtype, (self.num_local_experts, rows, columns))
        check_activation(activation, gemm_weight.shape[1])
        if bias is not None:
            self._check_tensor("bias", bias, None, tuple(gemm_weight.shape[:2]))


def _fits(got, wanted):
    """Whether a shape has the wanted sizes; a wanted size of None is any."""
    return len(got) == len(wanted) and all(w is None or g == w for g, w in zip(got, wanted))
