"""The base of the layers: their configuration, checks of arguments, and how errors reach all ranks.

A rank whose arguments are wrong must not leave the others waiting.  So each check that fails reports its
error to the other ranks, in the operation that they are about to enter (_propagate), before it raises.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..comm.device import capabilities, pick_device, status_of, stream_of
from ..comm.heap import SymmetricHeap
from ..comm.nodes import Nodes, is_mesh, sizes_of
from ..comm.error_propagation import check_plain, is_reported, mark_reported
from ..comm.rendezvous import process_group
from ..comm.world import Shared, World, _of_group as worlds
from ..errors import EpError
from ..gemm.grouped import is_transposed
from ..torch_modes import StopRecomputation, without_dynamo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# What a layer takes as its ranks.  None is the default group.
Group: TypeAlias = "World | Nodes | ProcessGroup | DeviceMesh | None"
_T = TypeVar("_T", Tensor, Tensor | None)

DTYPES = {torch.float32: _C.F32, torch.float16: _C.F16, torch.bfloat16: _C.BF16}
MODES = {"scatter": _C.COMBINE_SCATTER, "gather": _C.COMBINE_GATHER}
# The configuration of a layer, as the module takes it. A layer without a feature has a 0 in its field.
if TYPE_CHECKING:
    Config: TypeAlias = _C._Config
else:
    Config = collections.namedtuple("Config", _C.CONFIG_FIELDS, defaults=[0] * len(_C.CONFIG_FIELDS))
_LOCAL_WORLD_SIZE = 5  # its place among the arguments of a layer after ep_group
NO_CONFIG = Config()  # of a rank that has no valid configuration


def max_blocks(device: torch.device, reserve_sms: int) -> int:
    """Return the most thread blocks of an operation: on a GPU one for each SM that is not reserved."""
    num_sm = 1024 if device.type == "cpu" else capabilities(device).num_sms
    if not 0 <= reserve_sms <= num_sm - 2:
        raise ValueError(f"reserve_sms {reserve_sms}: must be 0 to {num_sm - 2}, so that two are left")
    return num_sm - reserve_sms


def default_num_sm(device: torch.device, row_bytes: int) -> int:
    """Return the thread blocks that move tokens by default.

    Short rows make a block wait longer than it copies, so they need more blocks (docs/experiments, E-005).
    """
    if device.type == "cpu":
        return 1
    return 64 if row_bytes >= 4096 else 96


def cast(t: _T, dtype: torch.dtype) -> _T:
    """Return t.to(dtype), or None.

    A tensor that is not floating-point is returned as it is, and refused when it is used (see _check_tensor).
    """
    # A call of to() that does nothing takes a microsecond.
    return t if t is None or t.dtype == dtype or not t.dtype.is_floating_point else t.to(dtype)


def spans_nodes(group: Group, local_world_size: int | None = None) -> TypeGuard[
        Nodes | ProcessGroup | DeviceMesh | None]:
    """Whether a layer with these arguments spans several nodes.

    Where the arguments are wrong, a group that fits a World is taken for one node, whose layer says so.
    """
    if isinstance(group, (Nodes, World)):
        return isinstance(group, Nodes) and group.num_nodes > 1
    nodes = Nodes._known(group)
    if nodes is not None:  # all layers of a group share them, whatever local_world_size says
        return nodes.num_nodes > 1
    if is_mesh(group):
        return group.mesh.shape[0] > 1
    try:
        key = process_group(group)
    except (TypeError, ValueError):
        return False
    if key is None or id(key) in worlds:  # ranks that share a World are one node
        return False
    try:
        size, local = sizes_of(key, local_world_size)
    except (TypeError, ValueError):
        return dist.get_world_size(key) > _C.MAX_RANKS
    return local < size


def nodes_of(ep_group: Group, local_world_size: int | None, timeout_s: float | None) -> Nodes:
    """Return the Nodes of a layer that is being created.

    Where they exist, and this rank says that they have another size, tell the other ranks, which go on.
    """
    assert not isinstance(ep_group, World)
    try:
        return Nodes.of(ep_group, local_world_size, timeout_s)
    except (TypeError, ValueError):
        nodes = Nodes._known(ep_group)
        if nodes is not None:
            with contextlib.suppress(EpError):
                nodes._propagate()
        raise


def world_of(ep_group: Group, heap: SymmetricHeap | None, timeout_s: float | None,
             local_world_size: int | None = None) -> World | Nodes:
    """Return the world of a layer with these arguments, or the Nodes of a layer that spans several.

    It comes first, because without a world this rank cannot report what is wrong with its arguments.
    """
    if isinstance(heap, SymmetricHeap) and ep_group is None:
        return heap.world
    if spans_nodes(ep_group, local_world_size):
        return nodes_of(ep_group, local_world_size, timeout_s)
    if is_mesh(ep_group) or isinstance(ep_group, Nodes):  # of one node
        return Nodes.of(ep_group, None, timeout_s).team
    return World.of(ep_group, timeout_s)


def propagate_layer_error(world: World | Nodes, heap: SymmetricHeap | None, error: BaseException) -> None:
    """Tell the other ranks, which are creating a layer, that this rank cannot.

    They first agree on the configuration, or, with heap=, enter the creation on that heap.  A rank whose heap
    is of another world, or not a heap, reports through world_propagate_error.
    """
    with contextlib.suppress(Exception):
        if isinstance(world, Nodes):
            world._propagate()
        elif heap is None:
            _C.layer_agree(world._c, NO_CONFIG, status_of(error))
        elif isinstance(heap, SymmetricHeap) and heap.world is world:
            _C.layer_create(heap._c, NO_CONFIG)
        else:
            _C.world_propagate_error(world._c, status_of(error))


@contextlib.contextmanager
def together(world: World | Nodes) -> Iterator[None]:
    """A block that all ranks finish, or none.  Collective.

    The block makes no collective call.  Where it raises on one rank, the others raise PeerError at its end.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # the others are at the end of the block
            if isinstance(world, Nodes):
                world._propagate()
            else:
                _C.world_propagate_error(world._c, status_of(error))
        raise
    world.exchange(b"")


class CollectiveLayer(Shared):
    """The base of the layers: what belongs to any object whose calls all ranks make together."""

    world: World | Nodes
    rank: int
    world_size: int
    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    num_local_experts: int
    dtype: torch.dtype
    device: torch.device
    heap: SymmetricHeap
    capacity: int | None
    expert_alignment = 1
    expert_capacity: int | None = None
    host_counts = False
    _num_buffers: int
    _num_sm: int
    _config: Config
    _c: _C._Layer
    _owns_heap: bool
    nodes: Nodes | None = None  # of a layer over several nodes
    _over_nodes: type[Any] | None = None  # its class for the ranks of several nodes, which a2a/internode sets
    _copies = 1  # tokens of the layer below for each token of a caller
    _fused_config: dict[str, int] = {}  # fields of the Config that are about fused operations
    _spare_buffers = 0  # communication buffers of the world that the layer must leave free

    def __new__(cls, ep_group: Group = None, *args: Any, **options: Any) -> Self:
        """Make a layer of one node; for the ranks of several nodes one that has a layer of its own node."""
        if cls._over_nodes is not None:
            local = args[_LOCAL_WORLD_SIZE] if len(args) > _LOCAL_WORLD_SIZE else options.get(
                "local_world_size")
            heap = options.get("heap")
            if (ep_group is not None or heap is None) and spans_nodes(ep_group, local):
                return super().__new__(cls._over_nodes)
        return super().__new__(cls)

    @property
    def expected_rows(self) -> int:
        """How many rows the experts of a rank get on average if each rank has max_tokens tokens: T * K.

        Outputs of a fixed size have room for more.  See epmoe.grouped_gemm.

        Examples:
            >>> import torch
            >>> layer = epmoe.LowLatencyAll2All(None, 8, 64, 2, 4, dtype=torch.float32, device="cpu")
            >>> layer.expected_rows
            16
        """
        return self.max_tokens * self.topk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.finalize()

    def finalize(self) -> None:
        raise NotImplementedError

    def _check_heap(self, heap: SymmetricHeap | None, device: torch.device | str | None) -> None:
        if heap is None:
            return
        if not isinstance(heap, SymmetricHeap):
            raise TypeError(f"heap: wanted a SymmetricHeap or None, got {type(heap).__name__}")
        if heap.world is not self.world:
            raise ValueError("the heap belongs to another world than ep_group: pass ep_group=None to use "
                             "the heap's")
        if device is not None and pick_device(device) != heap.device:
            raise ValueError(f"device {device}, but the heap is on {heap.device}: leave device out")

    def _make_config(self, mode: int, reserve_sms: int) -> Config:
        """Return the Config."""
        padding = self.num_local_experts * (self.expert_alignment - 1)
        most_rows = min(self.world_size * self.max_tokens * self.topk + padding, (1 << 31) - 1)
        capacity = most_rows if self.capacity is None else self.capacity
        return Config(ranks=self.world_size, num_experts=self.num_experts, topk=self.topk,
                      max_tokens=self.max_tokens, hidden=self.hidden, dtype=DTYPES[self.dtype],
                      combine_mode=mode, expert_alignment=self.expert_alignment,
                      expert_capacity=self.expert_capacity or 0, capacity=capacity,
                      num_buffers=self._num_buffers, num_sm=self._num_sm, reserve_sms=reserve_sms,
                      host_counts=self.host_counts, spare_buffers=self._spare_buffers,
                      num_copies=self._copies, **self._fused_config)

    def _create(self, world: World, heap: SymmetricHeap | None, num_bytes: int) -> None:
        """Agree with the other ranks on the configuration, and make the module's layer.  Collective."""
        self._owns_heap = heap is None
        if self._owns_heap:  # else ranks with different layers would only hear of different heap sizes
            _C.layer_agree(world._c, self._config, 0)
        self.heap = SymmetricHeap(world, num_bytes, self.device) if heap is None else heap
        try:
            self._c = _C.layer_create(self.heap._c, self._config)
        except Exception:
            with contextlib.suppress(Exception):  # all ranks fail here, so all close the heap of this layer
                if self._owns_heap:
                    self.heap.close()
            raise

    # ---- errors reach all ranks ----

    def _is_buffer(self, buffer: Any) -> bool:
        return isinstance(buffer, int) and 0 <= buffer < self._num_buffers

    def _check_buffer(self, op: int, buffer: Any) -> None:
        if not self._is_buffer(buffer):
            self._propagate(op, self._buffer_error(buffer), buffer)

    def _buffer_error(self, buffer: Any) -> Exception:
        kind = ValueError if isinstance(buffer, int) else TypeError
        n = self._num_buffers
        return kind(f"buffer {buffer!r}: must be 0 to {n - 1}, the layer has {n}")

    def _propagate(self, op: int, error: BaseException, buffer: Any) -> NoReturn:
        """Report to the other ranks that this one cannot take part in op, then raise the error.

        The report goes through the buffer of the call, or through the first where the call named no valid
        one.  An error of which they know is only raised.
        """
        if torch.compiler.is_compiling():  # a compiler must not trace this, but leave the call to Python
            self._propagate_untraced(op, error, buffer)
        try:
            if is_reported(error):
                raise error
            self._propagate_now(op, error, buffer)
        finally:
            del error

    # Not for calls outside of a compiler: its first call imports dynamo for seconds, while the peers wait.
    @without_dynamo
    def _propagate_untraced(self, op: int, error: BaseException, buffer: Any) -> NoReturn:
        try:
            self._propagate_now(op, error, buffer)
        finally:
            del error

    def _propagate_now(self, op: int, error: BaseException, buffer: Any) -> NoReturn:
        # An error refers to the frames that it has left, so one that a frame still names is in a cycle. The
        # cycle would keep the tensors and CUDA graphs of all callers until a garbage collection.
        try:
            if not isinstance(error, StopRecomputation):  # checkpointing needs no more of this forward
                valid = buffer if self._is_buffer(buffer) else 0
                mark_reported(error)
                _C.layer_propagate_error(self._c, valid, op, status_of(error), stream_of(self.device))
            raise error
        finally:
            del error

    def _check_tensor(self, name: str, t: Any, dtype: torch.dtype | None,
                      shape: tuple[int | None, ...]) -> None:
        """Check a tensor before the first operation of a call.

        The module would refuse it too, but in a later operation: then this rank would stop between two.
        """
        self._check_place(name, t)
        if torch.compiler.is_compiling():
            return  # the operator checks the rest when it runs and tells the other ranks; a compiler cannot
        if dtype is not None and t.dtype != dtype or not t.dtype.is_floating_point:
            raise TypeError(f"{name}: wanted {dtype or 'a floating-point dtype'}, got {t.dtype}")
        if t.shape != shape and not _fits(t.shape, shape):
            wanted = ", ".join("*" if d is None else str(d) for d in shape)
            raise ValueError(f"{name}: wanted shape [{wanted}], got {list(t.shape)}")
        if not (t.is_contiguous() or is_transposed(t)):
            raise ValueError(f"{name} must be contiguous: call contiguous() on it")

    def _check_place(self, name: str, t: Any) -> None:
        """Raise for what is no dense tensor with memory of its own on the device of the layer."""
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: wanted a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            layout = "nested" if t.is_nested else t.layout
            raise ValueError(f"{name}: wanted a dense tensor, got one of layout {layout}")
        check_plain(name, t)
        if t.device != self.device:
            raise ValueError(f"{name}: wanted a tensor on {self.device}, where the layer is, got one on "
                             f"{t.device}")


def _fits(got: Sequence[int], wanted: tuple[int | None, ...]) -> bool:
    """Whether a shape has the wanted sizes; a wanted size of None is any."""
    return len(got) == len(wanted) and all(w is None or g == w for g, w in zip(got, wanted))
