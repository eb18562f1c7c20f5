"""The native module, csrc/python/.  All arguments are positional.

Objects are capsules.  A stream is a CUDA stream as an integer, or 0 on the CPU.  Errors are the classes of
epmoe.errors.  csrc/epmoe.h says what each call does, and which calls are collective.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NewType

from torch import Tensor

_World = NewType("_World", object)
_Heap = NewType("_Heap", object)
_Layer = NewType("_Layer", object)
_DLPackCapsule = NewType("_DLPackCapsule", object)

# The configuration of a layer.  EP_CONFIG_FIELDS of csrc/epmoe.h names its fields.
class _Config(tuple[int, ...]):
    _fields: tuple[str, ...]
    @classmethod
    def _make(cls, numbers: Iterable[int]) -> _Config: ...
    def __new__(cls, **fields: int) -> _Config: ...
    def __getattr__(self, field: str) -> int: ...
    def _replace(self, **fields: int) -> _Config: ...

CONFIG_FIELDS: Final[tuple[str, ...]]
SPANS: Final[tuple[str, ...]]  # the names of EpSpan from number 1 on
# (name, is_gated, has_numbers) of each EpActivationKind, in the order of the kinds
ACTIVATIONS: Final[tuple[tuple[str, bool, bool], ...]]
TRACE_WARPS: Final[int]  # warps of a CTA that the profiler records

HAS_CUDA: Final[int]
CHAOS: Final[int]  # the seed of the random delays in a build for tests; 0 without delays
TRACE: Final[int]  # 1 in a build with the profiler, else 0
ABI_VERSION: Final[int]  # of the protocol between ranks; must be the same on all
MAX_RANKS: Final[int]
MAX_TOPK: Final[int]
LL_ID: Final[int]  # of the words of a low-latency handle, the one with the number of its dispatch
NAME_BYTES: Final[int]
NONCE_BYTES: Final[int]
ALL_GATHER_BYTES: Final[int]
# EpBackendKind
CPU: Final[int]
CUDA: Final[int]
# EpDtype
F32: Final[int]
F16: Final[int]
BF16: Final[int]
# EpCombineMode
COMBINE_LOCAL: Final[int]
COMBINE_SCATTER: Final[int]
COMBINE_GATHER: Final[int]
LOW_LATENCY: Final[int]
LOW_LATENCY_SCATTER: Final[int]
# EpOpKind
OP_PLAN: Final[int]
OP_DISPATCH: Final[int]
OP_COMBINE: Final[int]
OP_BARRIER: Final[int]
OP_DISPATCH_GEMM: Final[int]
OP_GEMM_COMBINE: Final[int]
OP_LL_DISPATCH: Final[int]
OP_LL_COMBINE: Final[int]
# EpCode
EINVAL: Final[int]
ENOMEM: Final[int]
NO_ROOM: Final[int]
BALANCE_HOLDS: Final[int]
EPEERDIED: Final[int]
EOVERFLOW: Final[int]
EINDEX: Final[int]
ESYS: Final[int]
ETIMEOUT: Final[int]
EMISMATCH: Final[int]
ECLOSED: Final[int]
ETYPE: Final[int]
ERUNTIME: Final[int]
# Indices of words in the head of a plan.
HEAD_STATUS: Final[int]
HEAD_NUM_ROWS: Final[int]
HEAD_NUM_TILES: Final[int]
HEAD_NUM_SEND: Final[int]
HEAD_NUM_RECV: Final[int]
HEAD_RANK_ROWS: Final[int]

def set_exceptions(classes: dict[str, type[Exception]], /) -> None: ...
def world_listen() -> tuple[int, bytes, bytes]: ...  # file descriptor, name, nonce
def world_unlisten(listen_fd: int, /) -> None: ...  # where world_create does not take it
def world_create(
    rank: int,
    num_ranks: int,
    timeout_s: float,
    listen_fd: int,
    nonce: bytes,
    names: bytes,
    /,
) -> _World: ...
def world_threads(num_ranks: int, timeout_s: float, /) -> list[_World]: ...
def world_check(world: _World, /) -> None: ...
def world_reason(world: _World, /) -> tuple[int, str] | None: ...  # code, text
def world_abort(world: _World, code: int, text: str, /) -> None: ...  # for an event on another node
def world_set_place(world: _World, node: int, first_rank: int, /) -> None: ...
def world_check_handler() -> None: ...
def world_set_waiting(is_waiting: bool, /) -> bool: ...
def world_lost_ranks(world: _World, /) -> int: ...
def world_set_timeout(world: _World, timeout_s: float, /) -> None: ...
def world_close(world: _World, collective: bool, /) -> None: ...
def worlds_settle() -> None: ...
def world_all_gather(world: _World, mine: bytes, /) -> bytes: ...
def world_flight_record(world: _World, /) -> str: ...
def world_propagate_error(world: _World, code: int, /) -> None: ...
def heap_create(world: _World, kind: int, device: int, num_bytes: int, status: int, /) -> _Heap: ...
def heap_alloc(heap: _Heap, num_bytes: int, alignment: int, status: int, /) -> int: ...
def heap_free(heap: _Heap, off: int, /) -> None: ...
def heap_translate(heap: _Heap, off: int, peer: int, /) -> int: ...
def heap_offset(heap: _Heap, address: int, num_bytes: int, /) -> int: ...
def heap_stats(heap: _Heap, /) -> dict[str, int]: ...
def heap_tensor(
    heap: _Heap,
    off: int,
    peer: int,
    shape: tuple[int, ...],
    dl_code: int,
    dl_bits: int,
    /,
) -> _DLPackCapsule: ...
def heap_put(heap: _Heap, dst_off: int, src: Tensor, peer: int, /) -> None: ...
def heap_get(heap: _Heap, src_off: int, dst: Tensor, peer: int, /) -> None: ...
def heap_signal(heap: _Heap, off: int, value: int, add: int, peer: int, stream: int, /) -> None: ...
def heap_wait(heap: _Heap, off: int, value: int, exact: int, stream: int, /) -> None: ...
def heap_barrier(heap: _Heap, stream: int, /) -> None: ...
def heap_sync(heap: _Heap, stream: int, /) -> None: ...
def heap_handle(heap: _Heap, /) -> bytes: ...
def heap_close(heap: _Heap, /) -> None: ...
def layer_bytes(config: _Config, /) -> int: ...
def layer_agree(world: _World, config: _Config, status: int, /) -> None: ...
def layer_create(heap: _Heap, config: _Config, /) -> _Layer: ...
def layer_has_many_rows(config: _Config, /) -> bool: ...
def layer_decodes(config: _Config, /) -> bool: ...
def layer_unread_rows(config: _Config, /) -> int: ...
def layer_room(layer: _Layer, num_tokens: int, kept_for: int | None, /) -> int: ...
def layer_set_room(layer: _Layer, num_tokens: int, kept_for: int | None, num_rows: int, /) -> None: ...
def layer_fuses(
    config: _Config,
    has_kernels: bool,
    n: int,
    k: int,
    columns: int,
    is_fp8: bool,
    trains: bool,
    has_split_gates: bool,
    /,
) -> bool: ...
def layer_close(layer: _Layer, /) -> None: ...
def ll_handle_words(config: _Config, /) -> tuple[int, int]: ...  # length, offset of the expert offsets
def plan_layout(config: _Config, num_tokens: int, /) -> dict[str, int]: ...
# The arguments of an operation are one tuple, as csrc/protocol/ops.h lists them: names, kinds and shapes.
_Arguments = tuple[Any, ...]

# What an operation did: the rows of the plan that it awaited, whether it was launched, its fused operations.
_Ran = tuple[int, bool, int]

def layer_plan(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_dispatch(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_combine(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_dispatch_gemm(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_gemm_combine(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_ll_dispatch(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_ll_combine(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_experts(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_experts_down(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_experts_up(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_ll_experts(layer: _Layer, buffer: int, arguments: _Arguments, /) -> _Ran: ...
def layer_num_rows(layer: _Layer, buffer: int, plan: Tensor, /) -> int: ...
def layer_expert_rows(layer: _Layer, buffer: int, plan: Tensor, /) -> list[int]: ...
def layer_waited(layer: _Layer, /) -> list[int]: ...
def layer_helps(layer: _Layer, buffer: int, /) -> list[tuple[int, int, int]]: ...
def layer_set_staging(layer: _Layer, heap: _Heap, offset: int, slot_bytes: int, num_slots: int,
                      /) -> None: ...
def layer_restore_weights(layer: _Layer, buffer: int, plan: Tensor, helps: list[tuple[int, int, int]],
                          gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
                          down_bias: Tensor | None, /) -> None: ...
def find_helps(config: _Config, helper_slots: int, min_rows: int, choices: list[int], held: Tensor | None,
               /) -> list[tuple[int, int, int, int, int]]: ...
def layer_trace(layer: _Layer, buffer: int, events: Tensor | None, capacity: int, /) -> None: ...
def layer_propagate_error(layer: _Layer, buffer: int, op: int, code: int, stream: int, /) -> None: ...
def layer_barrier(layer: _Layer, buffer: int, stream: int, /) -> None: ...
def layer_sync(layer: _Layer, stream: int, /) -> None: ...
def layer_newest_call(layer: _Layer, buffer: int, /) -> int: ...
def layer_was_void(layer: _Layer, buffer: int, number: int, /) -> bool: ...
def layer_set_epoch(layer: _Layer, buffer: int, epoch: int, stream: int, /) -> None: ...

def device_query(device: int, /) -> tuple[int, int, int, bool]: ...  # epmoe.comm.device.Capabilities

def gemm_has_counter(tensor: Tensor, /) -> bool: ...  # for the current stream of the tensor's device

# See csrc/protocol/gemm_params.h.  With both scales a and b are uint8, the bytes of FP8 numbers, on a CUDA
# device.  With b_scale alone b has 4 bits, see csrc/protocol/four_bit.h.  saved: a training step's product.
# low_a, low_b: EpLowRank.
def grouped_gemm(
    kind: int,
    activation: Sequence[float],
    scale: float,
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    row_weight: Tensor | None,
    tile_counter: Tensor | None,
    out: Tensor,
    portable: bool,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    b_zero: Tensor | None,
    saved: Tensor | None,
    low_a: Tensor | None,
    low_b: Tensor | None,
    expected_rows: int,
    clears: bool,
    /,
) -> None: ...

# See csrc/protocol/activation_gradient.h.
def activation(
    activation: Sequence[float],
    h: Tensor,
    d: Tensor,
    offsets: Tensor,
    row_weight: Tensor | None,
    d_h: Tensor,
    weighted: Tensor,
    dots: Tensor,
    d_h_scale: Tensor | None,
    weighted_scale: Tensor | None,
    is_rowwise: bool,
    /,
) -> None: ...

# The physical experts of choices, int32 [T, K].  table: [E + 4, 1 + R]; see csrc/protocol/expert_map.h.
def map_choices(topk_idx: Tensor, table: Tensor, out: Tensor, rank: int, /) -> None: ...

# From held, int64 [P]: replicas, int64 [E, R]; count, int64 [E]; and the table.  All on the CPU.
def fill_expert_map(held: Tensor, replicas: Tensor, count: Tensor, table: Tensor, /) -> None: ...

# Rows to FP8, after an activation.  q is uint8 here.  scales: [K / 128, M].
def quantize_fp8(
    activation: Sequence[float],
    x: Tensor,
    num_rows: Tensor | None,
    q: Tensor,
    scales: Tensor,
    is_pow2: bool,
    is_rowwise: bool,
    /,
) -> None: ...

# Weights of 4 bits to FP8; see csrc/protocol/four_bit.h.  q is uint8 here.
def expand_fp8(
    numbers: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    q: Tensor,
    q_scales: Tensor,
    to: Tensor | None,
    is_f16: bool,
    /,
) -> None: ...

# Weights of FP8 with other scales, in place; see csrc/protocol/quantize.h.  q is uint8 here.
def rescale_fp8_weight(q: Tensor, scales: Tensor, to: Tensor, /) -> None: ...

# The gradient of weights in FP8; see csrc/protocol/wgrad_fp8.h.  Numbers of FP8 are uint8 here.
def transpose_fp8(
    x: Tensor, x_scale: Tensor, offsets: Tensor, q: Tensor, scales: Tensor, /
) -> None: ...
def quantize_fp8_weight(
    x: Tensor,
    q: Tensor,
    transposed: Tensor,
    scales: Tensor,
    transposed_scales: Tensor,
    /,
) -> None: ...
def wgrad_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    tile_counter: Tensor | None,
    out: Tensor,
    scale: float,
    /,
) -> None: ...
