"""EPMoE: the experts of a Mixture-of-Experts layer, spread over the ranks; a drop-in for a model's own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypedDict, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import _C
from ..a2a.base import propagate_layer_error, together, world_of
from ..a2a.fused import EpAll2AllFusedOp
from ..a2a.low_latency import LowLatencyAll2All
from ..comm.device import integer
from ..comm.error_propagation import check_plain
from ..comm.nodes import Nodes
from ..comm.validation import agree
from ..gemm.activations import Activation, is_gated
from ..gemm.grouped import aligned, grouped_gemm, is_transposed
from ..gemm.quantize import dequantize_fp8, quantize_fp8
from ..gemm.weight_gradients import WeightGradients
from ..torch_modes import check_recordable, is_traced, is_transformed, is_watched, join_backward
from ..torch_modes import requires_grad, without_dynamo
from . import balance as balancing, checkpoint, chunks, decode as decoding, experts as experts_ops
from . import formats, fp8, fp8_training
from . import guards, lora, lora_products, move as moving, numerics, placement, shards, statistics
from .balance import Balance, Balancer
from .experts import Weights
from .four_bits import FourBits
from .move import ExpertMove, Rooms
from .placement import ExpertMap, check_num_physical
from .shards import StateDict
from .weights import WEIGHTS, WeightDtype, WeightFormat

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..a2a.internode.layer import InternodeLayer
    from ..a2a.internode.plan import NodesLayout
    from ..a2a.layer import EPAll2AllLayer
    from ..a2a.layout import EPLayout
    from ..comm.heap import SymmetricHeap
    from ..comm.world import World

_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
Layout: TypeAlias = "EPLayout | NodesLayout"
_T = TypeVar("_T", Tensor, Tensor | None)
_DEFAULTS = inspect.signature(EpAll2AllFusedOp).parameters


def check_shared(layer: EPAll2AllLayer, hidden: int, topk: int, num_physical: int,
                 dtype: torch.dtype) -> None:
    """Raise ValueError if a module has other sizes than the layer that it shares."""
    for name, got, want in (("hidden", hidden, layer.hidden), ("topk", topk, layer.topk * layer._copies),
                            ("physical experts", num_physical, layer.num_experts),
                            ("dtype", dtype, layer.dtype)):
        if got != want:
            raise ValueError(f"{name} {got}, but the shared layer has {want}: must be the same")
    if layer.weight_dtype != torch.float32:
        raise ValueError(f"the shared layer has weight_dtype {layer.weight_dtype}: an EPMoE applies routing "
                         f"weights in float32: create the layer without weight_dtype")


def as_rows(layer: EPAll2AllLayer, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> list[Tensor]:
    """Return the three as [T, size], contiguous."""
    topk = layer.topk * layer._copies
    given = ("x", x, layer.hidden), ("topk_idx", topk_idx, topk), ("topk_weights", topk_weights, topk)
    device = layer.device
    return [t if type(t) is torch.Tensor and t.layout is torch.strided and t.device == device
            and t.dim() == 2 and t.shape[1] == size and t.is_contiguous() else flatten(name, t, size, device)
            for name, t, size in given]


def flatten(name: str, t: Any, size: int, device: torch.device) -> Tensor:
    """Return [.., size] as [T, size], contiguous.  Raises ValueError or TypeError for other tensors."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(t).__name__}")
    if t.is_nested or t.layout is not torch.strided:
        raise ValueError(f"{name}: wanted a dense tensor, got one of layout "
                         f"{'nested' if t.is_nested else t.layout}")
    check_plain(name, t)
    # a compiler cannot tell the other ranks: the layer checks it
    if torch.compiler.is_compiling():
        size = t.shape[-1] if t.dim() else size
    elif t.device != device:
        raise ValueError(f"{name}: wanted a tensor on {device}, where the module is, got one on {t.device}")
    if t.dim() == 0 or t.shape[-1] != size:
        raise ValueError(f"{name}: wanted shape [.., {size}], got {list(t.shape)}")
    return t.reshape(-1, size).contiguous()


def unflatten(t: Tensor, shape: torch.Size) -> Tensor:
    """Return t [T, H], which nothing else refers to, as [.., H].

    Not as a view for autograd, because FSDP's hooks fail on `y += ...` of a view.
    """
    return torch.ops.aten._unsafe_view(t, (*shape[:-1], t.shape[-1]))


def check_rows(layer: EPAll2AllLayer, most: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
    """Check what flatten has returned.  The layer would refuse it too, but under other names.

    most: The most tokens of a call.
    """
    if torch.compiler.is_compiling():
        return
    if x.dtype != layer.dtype:
        raise TypeError(f"x: wanted {layer.dtype}, the dtype of the module, got {x.dtype}")
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_idx: wanted int32 or int64, got {topk_idx.dtype}")
    if not topk_weights.dtype.is_floating_point:
        raise TypeError(f"topk_weights: wanted a floating-point dtype, got {topk_weights.dtype}")
    for name, t in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if t.shape[0] != x.shape[0]:
            raise ValueError(f"x has {x.shape[0]} tokens, but {name} has {t.shape[0]}: must be the same")
    if x.shape[0] > most:
        raise ValueError(f"x has {x.shape[0]} tokens: must be at most max_tokens, {most}")


def _check_strides(**weights: Tensor) -> None:
    """Check what the layer would refuse, too, but under another name."""
    for name, t in weights.items():
        if not (t.is_contiguous() or t.dim() == 3 and is_transposed(t)):
            raise ValueError(f"{name} must be contiguous, or the view transpose(1, 2) of a contiguous "
                             f"tensor: call contiguous() on it")


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _have_wrong_sizes(layer: EPAll2AllLayer, tokens: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> bool:
    """Whether a compiler knows that the operator will refuse tensors of these sizes."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes long to import

    num = tokens.shape[0]
    return bool(guard_or_false((tokens.shape[1] != layer.hidden) | (num != topk_idx.shape[0])
                               | (num != topk_weights.shape[0])))


class EPMoEOptions(TypedDict, total=False):
    """The options of EPMoE that EPMoE.from_experts takes; it finds the sizes and the activation itself."""

    max_tokens: int
    dtype: torch.dtype
    device: torch.device | str | None
    bias: bool
    layer: EPAll2AllLayer | None
    num_physical: int | None
    balance: Balance | Literal["auto"] | None
    weight_dtype: WeightDtype | None
    dispatch_dtype: torch.dtype | None
    compute_dtype: torch.dtype | None
    wgrad_dtype: torch.dtype | None
    fp8_recipe: fp8_training.Recipe | None
    recompute_gate_up: bool
    delay_wgrad_compute: bool
    fuse_wgrad_accumulation: bool
    num_chunks: int | None
    rank_invariant: bool
    capacity: int | None
    rank: int | None
    world_size: int | None
    local_world_size: int | None
    num_sm: int | None
    enable_local_combine: bool
    combine_mode: str
    num_tail_sms: int
    num_reduce_sms: int | None
    token_saving: bool
    token_sorting: bool
    block_wise_barrier: bool
    combine_order: str
    fused: bool | None
    host_counts: bool
    num_buffers: int
    reserve_sms: int
    heap: SymmetricHeap | None
    timeout_s: float | None
    rail_dtype: torch.dtype | None
    rail_capacity: int | None


class EPMoE(nn.Module):
    """The experts of a Mixture-of-Experts layer, spread over the ranks.

    Letters: W ranks, E experts, P physical experts (E, rounded up to a multiple of W), L = P/W of a rank, K
    choices per token, H hidden, I inner.

    On CUDA it runs the fused kernels of EpAll2AllFusedOp where they exist, elsewhere the same stages one
    after the other.  Creation is collective, except with `layer`; so are forward, backward and finalize.

    Parameters are as checkpoints hold them, out by in: gate_up_proj [L, 2I, H], or [L, I, H] without a gate,
    and down_proj [L, H, I].  Gate rows come first, then up rows; for GPT-OSS they are interleaved.  Where a
    checkpoint holds in by out, as transformers' GptOssExperts does ([E, H, 2I] and [E, I, H]), load it with
    .transpose(1, 2).  With H = I a wrong order raises no error.

    A checkpoint has tensors [E, ...].  load_state_dict() takes the rows of this rank's experts: rank * n up
    to, but not including, (rank + 1) * n, where n is E/W, rounded up.  In state_dict(), where the experts are
    on several ranks of a process group, they are DTensors [E, ...], of which each rank has its rows
    (docs/checkpoints.md).  whole_state_dict puts them together.  Physical experts that hold nothing are in no
    state dict.  They are zero, except that with balance they have copies of other experts after a call.

    load_state_dict() also takes the experts one by one, as most checkpoints have them: for each expert e
    e.gate_proj.weight, e.up_proj.weight and e.down_proj.weight, or e.w1.weight, e.w3.weight and e.w2.weight,
    of all experts or of those of this rank.

    FP8: with weight_dtype=torch.float8_e4m3fn the weights are as FP8 checkpoints hold them, with the scales
    gate_up_proj_scale_inv [L, 2I/128, H/128] and down_proj_scale_inv [L, H/128, I/128], float32, each for a
    block of 128 by 128; in a checkpoint with the experts one by one e.gate_proj.weight_scale_inv and so on.
    Weights of 16 or 32 bits are quantised as they are loaded.  Tokens are quantised, too.  There are no
    gradients.  See docs/fp8.md.

    4 bits: with weight_dtype="mxfp4", "int4" or an Int4 the weights have 4 bits, and the products the bits of
    those with the same weights in 16 bits, each rounded once to dtype.  H and I are multiples of 64, and of
    Int4's group_size.  There are no gradients.  state_dict() holds what checkpoints hold: for MXFP4, as
    gpt-oss, gate_up_proj_blocks and gate_up_proj_scales, for INT4, as compressed-tensors,
    gate_up_proj_packed, gate_up_proj_scale and, with zero points, gate_up_proj_zero_point; and in the same
    way down_proj.  With dispatch_dtype=torch.float8_e4m3fn tokens travel in FP8, and are multiplied in 16
    bits.  With compute_dtype=torch.float8_e4m3fn, for calls of many tokens, each call expands the weights to
    FP8, and multiplies in FP8.  load_state_dict() takes these, weights of 16 or 32 bits, which it quantises,
    and the experts one by one:

        DeepSeek-V4           e.w1.weight and e.w1.scale, MXFP4
        compressed-tensors    e.gate_proj.weight_packed, weight_scale, weight_zero_point and weight_shape
        GPTQ and AWQ          e.gate_proj.qweight, qzeros, scales and g_idx; GPTQ without act-order

    Training in FP8: with compute_dtype=torch.float8_e4m3fn the parameters stay in 16 bits, and the products
    of forward and backward are in FP8; see docs/fp8.md#training.

    Parameters start uniform in +-1/sqrt(fan-in), as nn.Linear's, each expert with other numbers.  With the
    same seed on all ranks they are those of one process.  They are on the layer's device from the start, also
    inside of torch.device("meta").  copy.deepcopy copies them and shares the communication layer.

    LoRA: add_adapter adds parameters of a low rank to each expert, and set_adapter lets forward use them.
    The weights have no gradients then, and may be in FP8 or 4 bits; see docs/lora.md.

    Ranks have different experts, so nothing may make them equal or average their gradients: wrap a model as
    DistributedDataParallel(prepare_ddp(model)).  Their gradients are sums over the tokens of all ranks: for a
    loss that is the mean over ranks, gradient_scale is 1 / W.

    Under autocast, x is cast to the layer's dtype, which is always that of the parameters.

    Args:
        hidden: H.
        inner: I, at least 1.
        num_experts: E.  P is at most 1024.
        topk: K.
        ep_group: A ProcessGroup, a DeviceMesh, a World, Nodes or None, as for EPAll2AllLayer.
        activation: One of reference.activate: "swiglu", SwiGLU(alpha, limit), "relu2" and others.
        max_tokens: The most tokens of a rank in one call.
        dtype: Of parameters and tokens: float32, float16 or bfloat16.
        device: Of parameters and tokens, as for SymmetricHeap.
        bias: Whether to have gate_up_proj_bias [L, 2I] and down_proj_bias [L, H].
        layer: None, or an EpAll2AllFusedOp or EPAll2AllLayer to share with other EPMoE modules of the same
            shapes.  The module then has its ranks, device, max_tokens, capacity and enable_local_combine.
        num_physical: P, a multiple of W, at least E; None: E rounded up.  A larger P is room for replicas.
        balance: A Balance, "auto": Balance(), or None.  With it, ranks that get few rows in a call compute
            rows of the experts with most (docs/experts.md).  P is E, rounded up, and the helper slots.  For
            bfloat16 and float16, on one node, without num_physical, capacity and delay_wgrad_compute.
        weight_dtype: torch.float8_e4m3fn, "mxfp4", "int4", an Int4, or None: dtype.
        dispatch_dtype: With weights of 4 bits, the dtype in which tokens travel to their experts:
            torch.float8_e4m3fn, with a scale for each 128 numbers, or None: dtype.  H is then a multiple of
            128.  The results are those of the tokens quantize_fp8(x), dequantised and rounded to dtype.  A
            call with an adapter sends dtype.
        compute_dtype: torch.float8_e4m3fn, or None: dtype.  The dtype of the operands of all products.  For
            weights of 16 bits, and of 4 bits.
        wgrad_dtype: With compute_dtype, that of the products that are the gradients of the weights: dtype, or
            None: compute_dtype.
        fp8_recipe: With compute_dtype in FP8, "blockwise" (or None): a scale for each 128 numbers of a row
            and for each block of 128 by 128 of the weights, as DeepSeek-V3 has; or "rowwise": one for each
            row and one for each expert, which is faster on Hopper.  The kernels that communicate while they
            multiply do not have it.
        recompute_gate_up: True: the backward multiplies by gate_up_proj again, instead of keeping gate and up
            [M, 2I] from the forward.  The bits are the same.  For training in bfloat16 and float16, also with
            compute_dtype; without balance and adapters.  Without compute_dtype on one node only, with
            token_saving, and H and I are multiples of 16.
        delay_wgrad_compute: True: the backward leaves the gradients of the weights to backward_dw.
        fuse_wgrad_accumulation: True: add the gradient of a weight p to p.main_grad, which the caller sets, a
            tensor of p's shape and of float32 or p's dtype, and leave p.grad alone; see docs/checkpoints.md.
        num_chunks: Over several nodes, the number of chunks, 1 to 64, in which tokens cross while others are
            multiplied; None: choose_chunks; see docs/nodes.md; only 1 with rail_capacity.
        rank_invariant: True: the results have the same bits for every W (docs/numerics.md).  Combine then
            adds up the rows of a token one by one, in the order of its choices, and not first those of each
            rank, so more rows return.  Not over several nodes.
        capacity: The most rows that a rank can receive.  With it, and over nodes with rail_capacity, the host
            reads nothing.
        rank, world_size, local_world_size: As for EpAll2AllFusedOp, and so are all that follow.  None of
            them, nor capacity, with `layer`.
        num_sm, enable_local_combine, combine_mode, num_tail_sms, num_reduce_sms, token_saving: As there.
        token_sorting, block_wise_barrier, combine_order, fused, host_counts, num_buffers: As there.
        reserve_sms, heap, timeout_s, rail_dtype, rail_capacity: As there.

    Attributes:
        gate_up_proj: A parameter.
        down_proj: A parameter.
        gate_up_proj_bias: A parameter, or None without bias.
        down_proj_bias: A parameter, or None without bias.
        gate_up_proj_scale_inv: A parameter, only in FP8, and so is down_proj_scale_inv.
        gate_up_proj_scales: A parameter, only in 4 bits, and so is down_proj_scales; with zero points also
            gate_up_proj_zeros and down_proj_zeros.  All have the layout of the kernels, and gate_up_proj and
            down_proj then, too (gemm/four_bit.py).
        weight_dtype: That of the weights: a dtype, "mxfp4" or an Int4.
        is_fp8: Whether it is that of FP8.
        computes_fp8: Whether compute_dtype is that of FP8.
        fp8_recipe: "blockwise" or "rowwise", or None without compute_dtype in FP8.
        layer: The communication layer.
        balance: The Balance, or None.
        rank_invariant: As passed.
        recompute_gate_up: As passed.
        num_experts: E.
        expert_map: The ExpertMap of topk_idx, or None where each expert is its own physical one.
        gradient_scale: A number by which the gradients of the parameters are multiplied: 1 by default, 1 / W
            after prepare_ddp.
        last_layout: The EPLayout of the latest call that was not compiled.  None before the first one, and
            after one that took the low-latency path.

    Raises:
        ValueError: On this rank, for an argument out of range, or one that differs from the shared layer's.
        TypeError: On this rank, for options of a layer together with `layer`.
        EpMismatch: On all ranks, when they ask for different layers, inner sizes, activations or biases.
        PeerError: On the other ranks, when one rank raises ValueError or TypeError.
        HeapExhausted: On all ranks, when one of them has no room.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=4, topk=2, dtype=torch.float32, device="cpu", max_tokens=8)
        >>> weights, idx = torch.randn(8, 4).softmax(-1).topk(2)
        >>> y = moe(torch.randn(8, 16), idx, weights)
        >>> y.sum().backward()
        >>> y.shape, moe.down_proj.grad.shape
        (torch.Size([8, 16]), torch.Size([4, 16, 32]))
        >>> moe.finalize()
    """

    gate_up_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None
    gate_up_proj_scale_inv: nn.Parameter  # these two only in FP8
    down_proj_scale_inv: nn.Parameter
    activation: Activation
    gate_up_proj_scales: nn.Parameter  # these two only in 4 bits
    down_proj_scales: nn.Parameter
    weight_dtype: WeightDtype
    is_fp8: bool
    computes_fp8: bool
    wgrad_dtype: torch.dtype | None
    fp8_recipe: fp8_training.Recipe | None
    num_experts: int
    num_chunks: int | None
    rank_invariant: bool
    balance: Balance | None
    layer: EPAll2AllLayer
    _balancer: Balancer | None
    expert_map: ExpertMap | None
    gradient_scale: float
    last_layout: Layout | None
    _adopted: tuple[nn.Module, ...] = ()  # modules whose tensors belong to the experts, too
    _weight_gradients: WeightGradients | None  # where the gradients of the weights go, if not to .grad
    _is_sharded = False  # by FSDP2
    _checked_ddp: int  # id of the DistributedDataParallel that was checked
    _holds: list[int]  # the logical experts of all physical ones, or -1
    _held: list[int]  # those of this rank
    _format: WeightFormat  # of the weights
    _shapes: dict[str, tuple[int, int, int]]  # of the weights [L, N, K], whatever their parameters hold
    _is_home: bool  # whether each expert is where state dicts have it

    # ---- creation ----

    def __init__(self, hidden: int, inner: int, num_experts: int, topk: int,
                 ep_group: World | Nodes | ProcessGroup | DeviceMesh | None = None,
                 activation: Activation = "swiglu", *, max_tokens: int = 4096,
                 dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None,
                 bias: bool = False, layer: EPAll2AllLayer | None = None, num_physical: int | None = None,
                 balance: Balance | Literal["auto"] | None = None,
                 weight_dtype: WeightDtype | None = None, dispatch_dtype: torch.dtype | None = None,
                 compute_dtype: torch.dtype | None = None, wgrad_dtype: torch.dtype | None = None,
                 fp8_recipe: fp8_training.Recipe | None = None,
                 recompute_gate_up: bool = False, delay_wgrad_compute: bool = False,
                 fuse_wgrad_accumulation: bool = False, num_chunks: int | None = None,
                 rank_invariant: bool = False, capacity: int | None = None, rank: int | None = None,
                 world_size: int | None = None,
                 local_world_size: int | None = None, num_sm: int | None = None,
                 enable_local_combine: bool = True, combine_mode: str = "scatter", num_tail_sms: int = 0,
                 num_reduce_sms: int | None = None, token_saving: bool = True, token_sorting: bool = True,
                 block_wise_barrier: bool = True, combine_order: str = "fuse_scatter",
                 fused: bool | None = None, host_counts: bool = False, num_buffers: int = 1,
                 reserve_sms: int = 0, heap: SymmetricHeap | None = None,
                 timeout_s: float | None = None, rail_dtype: torch.dtype | None = None,
                 rail_capacity: int | None = None) -> None:
        super().__init__()
        options: dict[str, Any] = {
            "capacity": capacity, "rank": rank, "world_size": world_size,
            "local_world_size": local_world_size, "num_sm": num_sm,
            "enable_local_combine": enable_local_combine, "combine_mode": combine_mode,
            "num_tail_sms": num_tail_sms, "num_reduce_sms": num_reduce_sms, "token_saving": token_saving,
            "token_sorting": token_sorting, "block_wise_barrier": block_wise_barrier,
            "combine_order": combine_order, "fused": fused, "host_counts": host_counts,
            "num_buffers": num_buffers, "reserve_sms": reserve_sms, "heap": heap, "timeout_s": timeout_s,
            "rail_dtype": rail_dtype, "rail_capacity": rail_capacity}
        given = layer is not None and [n for n, v in options.items() if v != _DEFAULTS[n].default]
        if given:
            raise TypeError(f"{', '.join(given)}: options of a new layer, but layer= passes one: "
                            f"leave either out")
        world = layer.world if layer is not None else world_of(ep_group, heap, timeout_s, local_world_size)
        try:
            self._weight_gradients = None
            if delay_wgrad_compute or fuse_wgrad_accumulation:
                self._weight_gradients = WeightGradients(delay_wgrad_compute, fuse_wgrad_accumulation)
            self.num_chunks = chunks.check_num_chunks(num_chunks)
            bias, self.rank_invariant = bool(bias), bool(rank_invariant)
            halves = 1 + is_gated(activation)  # raises for an unknown activation
            inner = integer("inner", inner)
            if inner < 1:
                raise ValueError(f"inner {inner}: must be positive")
            num_experts = integer("num_experts", num_experts)
            self._format = formats.choose(weight_dtype, dtype, hidden, inner, activation, dispatch_dtype)
            self.balance = balancing.check(balance, world, self._format, dtype, num_physical=num_physical,
                                           capacity=capacity, compute_dtype=compute_dtype,
                                           delay_wgrad_compute=delay_wgrad_compute,
                                           num_buffers=num_buffers != 1,
                                           **{"token_saving=False": not token_saving})
            num_physical = check_num_physical(num_experts, world.size, num_physical)
            if self.balance is not None:
                num_physical += world.size * self.balance.slots
                options["host_counts"] = True
            self.computes_fp8 = fp8_training.check_compute_dtype(compute_dtype, self._format, hidden, inner,
                                                                 token_saving, wgrad_dtype, fp8_recipe)
            self.recompute_gate_up = experts_ops.check_recompute(
                recompute_gate_up, self._format, hidden, inner, self.computes_fp8,
                **{"balance": self.balance is not None,
                   "token_saving=False": not token_saving,
                   "several nodes without compute_dtype": not self.computes_fp8 and isinstance(world, Nodes)})
            if not self._format.has_gradients and self._has_other_gradients:
                raise ValueError(f"delay_wgrad_compute and fuse_wgrad_accumulation: weights in "
                                 f"{self._format.title} have no gradients: leave these options out")
            if self.rank_invariant:
                numerics.check_rank_invariant(world, layer)
                options["enable_local_combine"] = False
            if layer is None:
                reserve_sms = chunks.reserved_sms(self.num_chunks, world, rail_capacity, reserve_sms,
                                                  (max_tokens, hidden, inner, num_physical, topk))
        except Exception as error:
            if layer is None:
                propagate_layer_error(world, heap, error)
            raise
        self.activation = activation
        self.weight_dtype = self._format.weight_dtype
        self.is_fp8 = self.weight_dtype == fp8.E4M3
        self.wgrad_dtype = wgrad_dtype or (fp8.E4M3 if self.computes_fp8 else None)
        self.fp8_recipe = (fp8_recipe or "blockwise") if self.computes_fp8 else None
        self._quantized = {name: fp8_training.QuantizedWeight(fp8_recipe == "rowwise")
                           for name in WEIGHTS}
        self.num_experts = num_experts
        if layer is not None:
            check_shared(layer, hidden, topk, num_physical, dtype)
            balancing.check_layer(self.balance, layer)
            fp8_training.check_layer(self.computes_fp8, layer)
            if self.recompute_gate_up and not self.computes_fp8 and layer._copies != 1:
                raise ValueError("recompute_gate_up: not with token_saving=False")
            chunks.check_layer(self.num_chunks, layer)
            self._make(layer, halves * inner, inner, bias)
            balancing.check_staging(self.balance, layer, self._weights(), fuse_wgrad_accumulation)
        else:
            layer = EpAll2AllFusedOp(ep_group, max_tokens, hidden, topk, num_tot_experts=num_physical,
                                     dtype=dtype, device=device, **options | {"reserve_sms": reserve_sms})
            try:
                with together(layer.world):
                    self._make(layer, halves * inner, inner, bias)
                # The layer does not know these: different experts would give wrong sums.
                agree(layer.world, f"inner {inner}, activation {activation!r}, bias {bias}, num_experts "
                                   f"{num_experts}, weight_dtype {self.weight_dtype}, dispatch_dtype "
                                   f"{dispatch_dtype}, compute_dtype {compute_dtype}, {self.fp8_recipe}, "
                                   f"num_chunks {num_chunks}, {self.balance}",
                      "rank {rank} has experts of {its}, rank 0 of {first}. Create the module with the same "
                      "arguments on all ranks.")
                if self.balance is not None:
                    balancing.make_staging(self.balance, layer, self._weights(),
                                           fuse_wgrad_accumulation)
            except Exception:
                with contextlib.suppress(Exception):  # all ranks fail here, so all close the layer
                    layer.finalize()
                raise
        self._register()

    def _make(self, layer: EPAll2AllLayer, wide: int, inner: int, bias: bool) -> None:
        """Make what a module has beside its layer.  wide: the rows of gate_up_proj of an expert."""
        self.layer = layer
        # Over nodes the operators belong to team_layer.
        getattr(layer, "team_layer", layer).is_of_module = True
        self.expert_map = None
        self._balancer = None if self.balance is None else balancing.Balancer(
            self.balance, layer, self._fuses_gradients)
        home = self._placed(ExpertMap.home(self.num_experts, layer.world_size, layer.num_experts))
        self._home = home.physical_to_logical_map.tolist()
        self._use_map(home, self._home)
        self.gradient_scale = 1.0
        self.last_layout = None
        self._checked_ddp = 0
        local, hidden = layer.num_local_experts, layer.hidden
        self._shapes = {"gate_up_proj": (local, wide, hidden), "down_proj": (local, hidden, inner)}
        self._make_parameters({"gate_up_proj_bias": (local, wide), "down_proj_bias": (local, hidden)}, bias)
        self.reset_parameters()
        self.register_state_dict_post_hook(checkpoint.save_own)

    def _make_parameters(self, bias_shapes: dict[str, tuple[int, ...]], bias: bool) -> None:
        """Create the parameters, or set them to None.  bias_shapes: {name: shape}."""
        layer, format = self.layer, self._format
        wanted = {name + end: of for name, shape in self._shapes.items()
                  for end, of in format.parameters(shape).items()}
        wanted |= {name: (shape, layer.dtype) for name, shape in bias_shapes.items()}
        for name, (shape, dtype) in wanted.items():
            needed = bias or name not in bias_shapes
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=layer.device),
                                             format.has_gradients) if needed else None)

    def reset_parameters(self) -> None:
        """Fill each parameter with uniform numbers in +-1/sqrt(fan-in).  Not collective.

        An expert's numbers follow from one random number of torch's generator and from the expert's number e
        among all E.  So with the same seed on all ranks, they do not depend on W.  Empty experts are zero.

        Raises:
            RuntimeError: Where a parametrization or pruning computes a weight, and where FSDP2 has sharded
                weights in FP8.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 16, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> moe.reset_parameters()
            >>> moe.gate_up_proj.abs().max().item() <= 0.25
            True
            >>> moe.finalize()
        """
        with torch.no_grad():
            self._fill(int(torch.randint(1 << 40, (), device="cpu")))

    def _fill(self, seed: int) -> None:
        """Fill the parameters as reset_parameters says."""
        if self._computed:
            raise RuntimeError(f"reset_parameters: {', '.join(self._computed)} of this EPMoE: computed by a "
                               f"parametrization or pruning: call it before, or fill the parameters below it")
        shards_of = shards.fsdp_shards(self)
        if shards_of and not self._format.has_gradients:
            raise RuntimeError(f"reset_parameters: FSDP has sharded weights in {self._format.title}: call it "
                               f"before fully_shard")
        generator = torch.Generator(self.layer.device)
        up_bound, down_bound = (1 / math.sqrt(self._shapes[name][2]) for name in WEIGHTS)
        bounds = {"gate_up_proj": up_bound, "down_proj": down_bound, "gate_up_proj_bias": up_bound,
                  "down_proj_bias": down_bound}
        # FSDP2 has shards of the parameters. Each rank fills all that it would have without FSDP.
        device, own = self.layer.device, dict(self.named_parameters(recurse=False))
        whole = {name: torch.empty(p.shape, dtype=p.dtype, device=device) if id(p) in shards_of else p
                 for name, p in own.items() if name in bounds}
        for i, e in enumerate(self._held):
            if e < 0:
                for t in (own | whole).values():
                    t[i].zero_()
                continue
            generator.manual_seed(seed + e)
            for name, bound in bounds.items():
                filled = whole.get(name)
                if name in WEIGHTS and not self._format.has_gradients:
                    numbers = torch.empty(self._shapes[name][1:], dtype=self.layer.dtype, device=device)
                    numbers.uniform_(-bound, bound, generator=generator)
                    self._format.put(self, name, i, numbers)
                elif filled is not None:
                    filled[i].uniform_(-bound, bound, generator=generator)
        for name, full in whole.items():
            if (shard := shards_of.get(id(own[name]))) is not None:
                for t in {id(t): t for t in (own[name], shard)}.values():
                    t.copy_(shards.like(full, t))

    @classmethod
    def from_experts(cls, experts: nn.Module,
                     ep_group: World | Nodes | ProcessGroup | DeviceMesh | None = None, *,
                     topk: int | None = None, **options: Unpack[EPMoEOptions]) -> EPMoE:
        """Make an EPMoE of the experts of a transformers model, which hold all E experts.  Collective.

        Args:
            experts: A module that use_experts_implementation of transformers has decorated, or one of those
                that transformers makes for models in FP8 or MXFP4, the same on all ranks.  Its parameters are
                copied.
            ep_group: As for EPMoE.
            topk: K; None: as the experts' configuration says.
            **options: Of EPMoE, for example max_tokens, or weight_dtype, which quantises the copy.

        Returns:
            An EPMoE with the experts of this rank.

        Raises:
            ValueError: On this rank, for experts that EPMoE cannot compute, and as EPMoE.
            EpError: As the creation of an EPMoE.  With `layer`, too, an error of one rank is PeerError on the
                others.

        Examples:
            With a model: epmoe.EPMoE.from_experts(model.model.layers[0].mlp.experts, max_tokens=4096).

            >>> import epmoe
            >>> import torch
            >>> epmoe.EPMoE.from_experts(torch.nn.Linear(2, 2))  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: Linear: wanted the experts of a transformers model, ...
        """
        from ..integrations.transformers_experts import from_experts

        return from_experts(cls, experts, ep_group, topk, options)

    def finalize(self) -> None:
        """Give the memory of the communication layer back.  Collective; a second call does nothing.

        Raises:
            EpError: As EPAll2AllLayer.finalize.

        Examples:
            >>> import epmoe
            >>> epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu").finalize()
        """
        if self.layer.low_latency is not None:
            self.layer.low_latency.finalize()
            self.layer.low_latency = None  # if the layer cannot be closed, the module works without the path
        self._move = None
        if self._rooms is not None:
            self._rooms.heap.close()
            self._rooms = None
        self.layer.finalize()

    # ---- forward ----

    def enable_decode(self, max_tokens: int) -> None:
        """Create a low-latency path for calls with decode=True.  Collective.

        With it, one module prefills and decodes.  Modules that share a layer share the path.  A module of at
        most 512 max_tokens, whose experts get few rows, needs no such call: its calls without gradients take
        the path by themselves.

        Args:
            max_tokens: The most tokens of a rank in a call with decode=True; see LowLatencyAll2All.

        Raises:
            ValueError: On this rank, for max_tokens out of range, and where there is such a path already.
            EpError: As the creation of a LowLatencyAll2All.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> moe.enable_decode(max_tokens=4)
            >>> with torch.no_grad():
            ...     y = moe(torch.randn(2, 16), torch.tensor([[0], [1]]), torch.ones(2, 1), decode=True)
            >>> y.shape
            torch.Size([2, 16])
            >>> moe.finalize()
        """
        if self.computes_fp8:
            other = ("without compute_dtype, which can have the same parameters" if
                     isinstance(self._format, FourBits) else "of weight_dtype=torch.float8_e4m3fn")
            raise ValueError(f"compute_dtype in FP8 has no low-latency path: decode with a module {other}")
        if self.layer.low_latency is not None:
            raise ValueError("this module, or one that shares its layer, has a decode path already")
        self.layer.low_latency = decoding.create(self.layer, max_tokens)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *,
                decode: bool | None = None, adapters: Tensor | None = None) -> Tensor:
        """Apply the experts to tokens.  Collective, also for a rank without tokens.

        Differentiable in x, topk_weights and the parameters: once in bfloat16 and float16, any number of
        times in float32.  The parameters must require gradients on all ranks or on none: else the ranks'
        backward passes would make different calls, and EpMismatch is raised.  Where they require none, that
        is so for x and topk_weights together, also where a rank has no tokens.  Where they do, x and
        topk_weights may differ between the ranks.

        Args:
            x: [.., H] of the layer's dtype; under autocast of any floating-point dtype.
            topk_idx: [.., K] int32 or int64: the experts of each token.  -1 and E mean dropped.
            topk_weights: [.., K] of a floating-point dtype: the weight of each choice, applied as float32.
                The three have equally many tokens, at most max_tokens.  They need not be contiguous.
            decode: True: take the low-latency path (enable_decode).  False: do not.  None: take it where the
                shape of the module decides so, under torch.no_grad() or in inference mode; with weights in
                FP8 or 4 bits always.  The same on all ranks.  The results have the same bits, with or
                without it, except where the fused kernels are used, and on the CPU in float32 also where a
                token chooses an expert twice: it then has one row there, not two, and torch.mm does not give
                the same bits for every number of rows.
            adapters: [..] int32 or int64, after set_adapter([..]): the number of each token's adapter in that
                list; any other number: none.

        Returns:
            [.., H] of the layer's dtype: the weighted sum of the experts' outputs of each token.

        Raises:
            ValueError: On this rank, for a wrong shape or device.
            TypeError: On this rank, for a wrong type or dtype.
            RuntimeError: On this rank, where a gradient is wanted of experts in FP8 or 4 bits without an
                adapter, with a list of adapters, or in inference mode, for decode=True where a gradient is
                wanted or a compiler traces, for gradients of experts after set_expert_map, where
                DistributedDataParallel or FSDP1 has taken the experts for copies, and for parameters without
                a main_grad that fits.
            NotImplementedError: On this rank, inside of a transform of torch.func, for a tensor with a
                tangent, and where torch.jit.trace or make_fx traces compute_dtype in FP8 or an adapter.
            PeerError: On the other ranks, when one rank raises one of these.
            EpIndexError: As EPAll2AllLayer.preprocess.
            EpOverflow: As EPAll2AllLayer.preprocess.
            EpMismatch: On all ranks, when they are not in the same call.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> moe(torch.randn(2, 3, 16), torch.zeros(2, 3, 1, dtype=torch.int64), torch.ones(2, 3, 1)).shape
            torch.Size([2, 3, 16])
            >>> moe.finalize()
        """
        is_compiling = torch.compiler.is_compiling()
        has_adapter = self._lora is not None and lora.is_active(self)
        if is_compiling and (self._weight_gradients is not None or self.computes_fp8 or has_adapter):
            return self._forward_untraced(x, topk_idx, topk_weights, decode, adapters)
        layer, mixed = self.layer, () if self._lora is None else self._lora.mixed
        has_no_room = bool(mixed) and layer.topk >= _C.MAX_TOPK  # for the number of a token's adapter
        path = None if self.computes_fp8 or has_no_room and decode is None else decoding.path_of(
            layer, decode, (self._format.has_gradients or has_adapter) and not mixed)
        try:
            if self._balancer is not None and not is_compiling:
                self._balancer.forget(self)  # first: all ranks do it, whatever happens to one of them
            ddp = DistributedDataParallel._active_ddp_module  # private: a module cannot ask who wraps it
            if ddp is not None and id(ddp) != self._checked_ddp:
                self._check_ddp(ddp)
            watched = is_watched()
            if watched and (self.computes_fp8 or has_adapter) and is_traced():
                what = "an adapter" if has_adapter else "compute_dtype in FP8"
                raise NotImplementedError(f"torch.jit.trace and make_fx with {what}: what they make would be "
                                          f"wrong: take torch.compile, which runs the module as it is")
            tokens, topk_idx, topk_weights = as_rows(layer, x, topk_idx, topk_weights)
            if torch.is_autocast_enabled(layer.device.type) and tokens.dtype.is_floating_point:
                tokens = tokens.to(layer.dtype)
            self._check_parameters(x, topk_weights)
            if mixed or adapters is not None:
                numbers = lora_products.check_numbers(layer, mixed, adapters, x, topk_weights)
            if decode is not None:
                decoding.check_path(path, decode, tokens, topk_weights, *self.parameters())
            if self._weight_gradients is not None:
                self._begin_gradients(tokens, topk_weights)
            weights = self._weights()
            if not is_compiling and torch.is_inference_mode_enabled():
                check_recordable(x, topk_weights, *weights, *self._adapter_leaves())
            at_once = self._runs_at_once(path or layer, tokens, topk_weights, weights, watched)
            # A call at once aligns what it needs.  Inside of a compiler or a transform they have no address.
            if not (at_once or is_compiling or is_transformed()):
                tokens = aligned(tokens)
            if not at_once or watched or self.expert_map is not None:  # else the module of C checks them
                check_rows(layer, layer.max_tokens // layer._copies if path is None else path.max_tokens,
                           tokens, topk_idx, topk_weights)
            passed = topk_idx
            if self.expert_map is not None:
                self._check_gradients()
                topk_idx = self.expert_map.physical(topk_idx, layer.rank)
            if path is not None:
                if not is_compiling:
                    self._set_last_layout(None)
            elif is_compiling and _have_wrong_sizes(layer, tokens, topk_idx, topk_weights):
                # The operator refuses them when it runs, on all ranks. Their backward cannot be traced.
                tokens, topk_weights = tokens.detach(), topk_weights.detach()
            elif ((not at_once or watched) and torch.is_grad_enabled()
                    and (not self.computes_fp8 or layer.nodes is not None)):
                tokens, topk_weights = join_backward(tokens, topk_weights, *weights, *self._adapter_leaves())
        except Exception as error:
            self._propagate(error, path)
        layout: Layout | None
        is_named = self.expert_map is None and layer._copies == 1 or is_compiling
        with contextlib.nullcontext() if is_named else placement.naming_experts(self, path or layer, passed):
            if mixed:
                y, layout = lora_products.run_mixed(self, cast(lora.State, self._lora), path or layer, tokens,
                                                    topk_idx, topk_weights, numbers)
            elif layer.nodes is not None:
                over_nodes = cast("InternodeLayer", layer)
                y, layout = over_nodes._apply(self, tokens, topk_idx, topk_weights)  # calls _compute
            else:
                y, layout = self._run(path or layer, tokens, topk_idx, topk_weights, weights, at_once,
                                      watched)
        if path is None and not is_compiling:  # recomputed compiled code must not do this
            self._set_last_layout(layout)
        if self._records_stats and layout is not None:
            self._count_layout(layout)
        return y if x.dim() == 2 else unflatten(y, x.shape)

    def _set_last_layout(self, layout: Layout | None) -> None:
        self.__dict__["last_layout"] = layout  # nn.Module.__setattr__ would first look for parameters: 4 us

    @without_dynamo
    def _forward_untraced(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, decode: bool | None,
                          adapters: Tensor | None) -> Tensor:
        """Run forward outside of compiled code, which would not see what a backward keeps."""
        return EPMoE.forward(self, x, topk_idx, topk_weights, decode=decode, adapters=adapters)

    def _check_parameters(self, x: Tensor, topk_weights: Tensor) -> None:
        """Raise an error for parameters that are not as created, and for gradients that experts lack."""
        gate_up, down, device = self.gate_up_proj, self.down_proj, self.layer.device
        if (type(gate_up) is type(down) is nn.Parameter and gate_up.device == down.device == device
                and gate_up.dtype == down.dtype == self.layer.dtype and self._format.has_gradients):
            return
        if torch.Tensor in map(type, (gate_up, down)):
            guards.check_flat(self)
        self._format.check(self)
        if not lora.is_active(self):
            self._format.check_gradients(self, x, topk_weights)

    def _weights(self) -> Weights:
        """Return the weights and biases as the stages take them."""
        if self._weight_gradients is None and self.gradient_scale == 1:
            return self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias
        return (self._scaled("gate_up_proj", self.gate_up_proj), self._scaled("", self.gate_up_proj_bias),
                self._scaled("down_proj", self.down_proj), self._scaled("", self.down_proj_bias))

    def _scaled(self, name: str, p: _T) -> _T:
        """Return a parameter, or None, whose gradient will be multiplied by gradient_scale."""
        if p is None or not (p.requires_grad and torch.is_grad_enabled()):
            return p
        if self._weight_gradients is not None and name in WEIGHTS:
            return self._weight_gradients.weight(p, self.gradient_scale)
        return p if self.gradient_scale == 1 else _ScaledGradient.apply(p, self.gradient_scale)

    def _runs_at_once(self, layer: EPAll2AllLayer | LowLatencyAll2All, x: Tensor, topk_weights: Tensor,
                      weights: Weights, watched: bool) -> bool:
        """Whether a call is one call of the module, or its operators: see experts.takes."""
        if self._lora is not None and lora.is_active(self):
            adapter = lora.adapter_of_call(self)
            return adapter is not None and lora_products.takes(self, adapter, layer, weights)
        return (not self.computes_fp8 and not self._format.sends_fp8
                and experts_ops.takes(layer, x, topk_weights, weights, watched))

    def _compute(self, layer: EPAll2AllLayer, x: Tensor, topk_idx: Tensor, topk_weights: Any,
                 weights: Any = None) -> tuple[Tensor, Any]:
        """Apply the experts of a node, for a layer over several nodes.  Returns (y, layout).

        layer: that of the node.  weights: None, or what _weights() has returned.
        """
        try:
            weights = self._weights() if weights is None else weights
            watched = is_watched()
            at_once = self._runs_at_once(layer, x, topk_weights, weights, watched)
        except Exception as error:
            layer._propagate(_C.OP_PLAN, error, 0)
        return self._run(layer, x, topk_idx, topk_weights, weights, at_once, watched)

    def _run(self, layer: EPAll2AllLayer | LowLatencyAll2All, x: Tensor, topk_idx: Tensor,
             topk_weights: Tensor, weights: Weights, at_once: bool,
             watched: bool) -> tuple[Tensor, Layout | None]:
        """Apply the experts, on the way that suits the call.  Returns (y, layout).

        1. at_once: all stages in one call of the module, or its operators; rows of 16 bits (experts.py).
           With an adapter, too, where lora_products.takes says so.
        2. With compute_dtype in FP8: fp8_training.py.
        3. Another EpAll2AllFusedOp: dispatch with gate and up, then down with combine.  The layer fuses each
           pair if it has a kernel for it.
        4. A LowLatencyAll2All or an EPAll2AllLayer, weights of 4 bits, or an adapter (lora_products.py):
           dispatch, the products, combine.
        """
        try:
            if self.recompute_gate_up and not (at_once or self.computes_fp8) and requires_grad(
                    x, topk_weights, *weights):
                raise ValueError(f"recompute_gate_up needs contiguous weights of {self.layer.dtype}: leave "
                                 f"it out, or give the parameters such tensors")
            scales = None if self._format.has_gradients else self._format.scales(self)
            adapter = None if self._lora is None else lora.adapter_of_call(self)
            of_call = None
            if at_once and adapter is not None:
                of_call = lora_products.LoraOfCall.of_adapter(self, adapter)
            balancer = self._balancer if of_call is None else None
            if balancer is not None and guards.may_be_sharded(self):
                balancer = None
        except Exception as error:
            first = _C.OP_LL_DISPATCH if isinstance(layer, LowLatencyAll2All) else _C.OP_PLAN
            layer._propagate(first, error, 0)
        if at_once:
            if isinstance(layer, LowLatencyAll2All):
                y, counts = decoding.run(layer, x, topk_idx, topk_weights, weights, self.activation, scales,
                                         of_call)
                if self._records_stats:
                    self._count(counts)
                return y, None
            return experts_ops.run(layer, x, topk_idx, topk_weights, weights, self.activation, scales,
                                   of_call, balancer, watched, self.recompute_gate_up)
        if self.computes_fp8:
            return fp8_training.run(self, cast("EPAll2AllLayer", layer), x, topk_idx, topk_weights, weights)
        gate_up, gate_up_bias, down, down_bias = weights
        if not isinstance(layer, EpAll2AllFusedOp) or scales is not None or lora.adapter_of_call(self):
            return self._in_stages(layer, x, topk_idx, topk_weights, *weights)
        try:
            scale_up, scale_down = map(self._scale_of, WEIGHTS)
            if not torch.compiler.is_compiling():
                _check_strides(gate_up_proj=gate_up, down_proj=down)
        except Exception as error:
            layer._propagate(_C.OP_PLAN, error, 0)
        h, row_weight, layout = layer.mega_dispatch_group_gemm(
            x, topk_idx, weight=topk_weights, gemm_weight=gate_up, bias=gate_up_bias,
            activation=self.activation, gemm_scale=scale_up)
        return layer.mega_group_gemm_combine(h, down, layout, row_weight, bias=down_bias,
                                             gemm_scale=scale_down), layout

    def _in_stages(self, layer: EPAll2AllLayer | LowLatencyAll2All, x: Tensor, topk_idx: Tensor,
                   topk_weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
                   down_bias: Tensor | None) -> tuple[Tensor, Layout | None]:
        """Dispatch, multiply, and combine.  Returns (y, layout); no layout for a LowLatencyAll2All."""
        weights = gate_up, gate_up_bias, down, down_bias
        # the adapter multiplies rows of 16 bits
        fp8 = self._format.sends_fp8 and lora.adapter_of_call(self) is None
        if isinstance(layer, LowLatencyAll2All):
            rows, row_scale, counts, handle = layer.dispatch(x, topk_idx, topk_weights, fp8=fp8,
                                                             layout="compact")
            if self._records_stats:
                self._count(counts)
            try:
                y = self._multiply(layer, rows, row_scale, handle.expert_offsets, *weights)
            except Exception as error:
                layer._propagate(_C.OP_LL_COMBINE, error, handle.buffer)
            return layer.combine(y, handle), None
        if fp8:
            rows, row_scale, row_weight, layout = layer.dispatch_fp8(x, topk_idx, topk_weights)
        else:
            rows, row_weight, layout = layer.dispatch(x, topk_idx, topk_weights)
            row_scale = None
        try:
            y = self._multiply(layer, rows, row_scale, layout.expert_offsets, *weights)
        except Exception as error:
            layer._propagate(_C.OP_COMBINE, error, layout.buffer)
        return layer.combine(y, layout, row_weight), layout

    def _multiply(self, layer: EPAll2AllLayer | LowLatencyAll2All, rows: Tensor, row_scale: Tensor | None,
                  offsets: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
                  down_bias: Tensor | None) -> Tensor:
        """Return the outputs [M, H] of this rank's experts for rows [M, H], grouped by expert.

        layer: what moved the rows.  row_scale: [M, H / 128] of rows in FP8, else None.
        """
        if (adapter := lora.adapter_of_call(self)) is not None:
            return lora_products.multiply(self, adapter, rows, offsets)
        if row_scale is not None and not self.is_fp8:  # weights of 4 bits take rows of 16 bits
            rows, row_scale = dequantize_fp8(rows, row_scale, self.layer.dtype), None
        dtype = self.layer.dtype if self.is_fp8 else None
        up_scale, up_zero, down_scale, down_zero = self._format.scales(self) or (
            self._scale_of("gate_up_proj"), None, self._scale_of("down_proj"), None)
        h = grouped_gemm(rows, gate_up, offsets=offsets, bias=gate_up_bias, activation=self.activation,
                         a_scale=row_scale, b_scale=up_scale, b_zero=up_zero, out_dtype=dtype,
                         expected_rows=layer.expected_rows)
        if self.is_fp8:
            h, row_scale = quantize_fp8(h, num_rows=offsets[-1:])
        return grouped_gemm(h, down, offsets=offsets, bias=down_bias, a_scale=row_scale, b_scale=down_scale,
                            b_zero=down_zero, out_dtype=dtype, expected_rows=layer.expected_rows)

    def _count(self, counts: Tensor) -> None:
        """Add the rows of this rank's experts [L] to those of earlier calls."""
        assert self._row_counts is not None
        self._row_counts.add_(counts)

    def _count_layout(self, layout: Layout) -> None:
        """Count the rows of a call, where their experts are, not where helpers computed them."""
        rows, helps = layout.unpadded_tokens_per_expert, getattr(layout, "_helps", None)
        self._count(rows if helps is None else balancing.count(self.layer, helps, rows))

    def _scale_of(self, name: str) -> Tensor | None:
        """Return the scales of weights in FP8, else None."""
        return getattr(self, name + fp8.SCALE) if self.is_fp8 else None

    def _chunks_of_call(self, gradients: bool) -> int:
        return chunks.chunks_of_call(self, gradients)

    def _propagate(self, error: Exception, path: LowLatencyAll2All | None) -> NoReturn:
        """Report an error to the other ranks in the operation that they enter, and raise it.

        path: the LowLatencyAll2All of the call, or None.
        """
        try:
            if path is not None:
                path._propagate(_C.OP_LL_DISPATCH, error, 0)
            self.layer._propagate(_C.OP_PLAN, error, 0)
        finally:
            del error

    # ---- training: products in FP8, and where the gradients of the weights go ----

    def requantize(self) -> None:
        """Let the next forward make its copies of the weights again.

        With compute_dtype in FP8 the copies are the quantised weights; with balance, those that helpers got
        in calls without gradients.  It does so by itself after a step of an optimizer of torch, after
        load_state_dict, and where an operation of torch has changed a weight in place.  A change that torch
        does not count needs this call: one through `.data`, NumPy or a flat buffer, and by a collective such
        as torch.distributed.broadcast.  Not collective: the rank calls it whose weights have changed.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu",
            ...                   compute_dtype=torch.float8_e4m3fn)
            >>> moe.down_proj.data.zero_()[0, 0, 0].item()
            0.0
            >>> moe.requantize()
            >>> moe.finalize()
        """
        for weight in self._quantized.values():
            weight.forget()
        if self._balancer is not None:
            self._balancer.forget_weights()

    @property
    def _has_other_gradients(self) -> bool:
        """Whether the gradients of the weights do not simply go to .grad in the backward."""
        return self._weight_gradients is not None

    @property
    def _fuses_gradients(self) -> bool:
        return self._weight_gradients is not None and self._weight_gradients.fuses

    def _begin_gradients(self, tokens: Tensor, topk_weights: Tensor) -> None:
        """Begin a forward pass.  Raises RuntimeError for parameters whose gradients cannot go elsewhere."""
        if self._weight_gradients is not None and torch.is_grad_enabled():
            wanted = {n: getattr(self, n) for n in WEIGHTS}
            layer = self.layer if self.layer.nodes is None else None
            self._weight_gradients.begin({n: p for n, p in wanted.items() if p.requires_grad}, layer,
                                         requires_grad(tokens, topk_weights))

    def backward_dw(self) -> None:
        """Compute the gradients of the weights of the oldest backward pass that waits.  Not collective.

        For delay_wgrad_compute=True: call it once for each backward pass of this module, at any time before
        the step of the optimizer, for example while a pipeline waits for its neighbour.  Until then the
        module keeps the factors of the gradients: the rows that it has received, and the gradients of its two
        products.  The result has the same bits as without delay_wgrad_compute.  Hooks of the parameters run
        now, and not in the backward.  It may be called on another stream than the backward: the stream waits
        for the factors.

        Raises:
            RuntimeError: Where no backward pass waits, without delay_wgrad_compute, and where a tensor that
                the gradients need was modified in place.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu",
            ...                   delay_wgrad_compute=True)
            >>> moe(torch.ones(2, 16), torch.tensor([[0], [1]]), torch.ones(2, 1)).sum().backward()
            >>> moe.down_proj.grad is None
            True
            >>> moe.backward_dw()
            >>> moe.down_proj.grad.shape
            torch.Size([2, 16, 32])
            >>> moe.finalize()

        References:
            `backward_dw` of the modules of Transformer Engine and Megatron-LM; the weights' half of the
            backward in "Zero Bubble Pipeline Parallelism", Qi et al., 2023.
        """
        if self._weight_gradients is None or not self._weight_gradients.delays:
            raise RuntimeError("backward_dw: the backward of this module computes the gradients of its "
                               "weights: create it with delay_wgrad_compute=True, or leave this call out")
        if any(getattr(self, n).requires_grad for n in WEIGHTS) or self._weight_gradients.pending:
            self._weight_gradients.compute()

    # ---- placement: which experts the parameters hold ----

    def set_expert_map(self, expert_map: ExpertMap | None) -> None:
        """Move the experts, so that each physical expert holds what a map says.  Collective.

        For inference: with a map, the experts have no gradients, and only whole_state_dict and a
        load_state_dict of all E experts know where they are.  Train and save before, or after
        set_expert_map(None).

        The weights go through symmetric memory, which takes as much memory as the parameters during the call.
        The host waits until they have arrived.  After an error the module has its old map and weights.
        Parameters and the map that forward uses are written in place: CUDA graphs that were captured with a
        map, or where P is not E, use the new one.  Other modules with the same parameters use the map, too.

        Args:
            expert_map: An ExpertMap of E logical and P physical experts, for example of balance_experts, the
                same on all ranks.  None: back to the experts of state dicts, without replicas.

        Raises:
            ValueError: On this rank, for a map of other sizes.
            TypeError: On this rank, for what is not an ExpertMap.
            RuntimeError: On this rank, for parameters that FSDP has sharded or that were moved or transposed.
            PeerError: On the other ranks, when one rank raises one of these.
            EpMismatch: On all ranks, when they pass different maps.  Nothing was moved.
            HeapExhausted: On all ranks, when one of them has no room.  Nothing was moved.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            The second of two experts gets most tokens, and so the third physical expert.

            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, 2, 1, num_physical=3, dtype=torch.float32, device="cpu")
            >>> moe.set_expert_map(epmoe.balance_experts([1, 5], num_ranks=1, num_physical=3))
            >>> with torch.no_grad():
            ...     y = moe(torch.ones(2, 16), torch.tensor([[1], [1]]), torch.ones(2, 1))
            >>> moe.last_layout.tokens_per_expert.tolist()
            [0, 1, 1]
            >>> moe.finalize()
        """
        placement.set_expert_map(self, expert_map)

    def move_experts(self, expert_map: ExpertMap | None, at_once: int = 1) -> ExpertMove:
        """Begin to move the experts to the places of a map, while the module serves calls.  Collective.

        As set_expert_map, but the module need not stop.  Call advance() of the result between calls of the
        module until it returns True.  Until then each expert has a place, and results stay as they are.  A
        place that gets another expert has no tokens meanwhile, so its other replicas have more.

        Copies are made on a stream of their own.  They need symmetric memory for at_once
        experts of each rank, which the module keeps until finalize.  P must be larger than E, or a map that
        exchanges experts has no place for the first of them.

        Args:
            expert_map: As for set_expert_map.
            at_once: The most experts that a rank gets in a round, at least 1.  Fewer disturb the calls less,
                more need fewer rounds.

        Returns:
            An ExpertMove.

        Raises:
            ValueError: On this rank, for a map of other sizes, for a wrong at_once, and where experts must
                change places and none is spare.
            TypeError, RuntimeError: On this rank, as set_expert_map; also while experts are moving.
            EpError: As set_expert_map.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, 2, 1, num_physical=3, dtype=torch.float32, device="cpu")
            >>> wanted = epmoe.balance_experts([1, 5], num_ranks=1, num_physical=3)
            >>> move = moe.move_experts(wanted)
            >>> while not move.advance():
            ...     with torch.no_grad():
            ...         y = moe(torch.ones(2, 16), torch.tensor([[1], [1]]), torch.ones(2, 1))
            >>> moe.expert_map.physical_to_logical_map.tolist()
            [0, 1, 1]
            >>> moe.finalize()
        """
        return moving.move_experts(self, expert_map, at_once)

    _move: ExpertMove | None = None  # that is under way
    _rooms: Rooms | None = None  # of all moves

    def _placed(self, expert_map: ExpertMap) -> ExpertMap:
        """Return a map on the layer's device.  Not of tensors that can be changed only in inference mode."""
        with torch.inference_mode(False):
            return expert_map.to(self.layer.device)

    def _use_map(self, expert_map: ExpertMap, holds: list[int]) -> None:
        """Route by a map on any device, whose experts the parameters hold now.

        holds: its physical_to_logical_map, as a list.
        """
        layer = self.layer
        is_home = holds == self._home
        if is_home and self.num_experts == layer.num_experts:
            self.expert_map = None
        elif self.expert_map is None:
            self.expert_map = self._placed(expert_map)
        else:
            self.expert_map._copy_(expert_map)
        self._holds, self._is_home = holds, is_home
        if self._lora is not None and self._lora.copied is not None:
            self._lora.copied.update()  # CUDA graphs read the copies
        if self._row_counts is not None:
            statistics.begin(self)  # they were those of other experts
        first = layer.rank * layer.num_local_experts
        self._held = holds[first:first + layer.num_local_experts]

    def _check_gradients(self) -> None:
        if self._is_home and self._move is None or not torch.is_grad_enabled():
            return
        weights = [*(getattr(self, name) for name in _PARAMETERS), *self._adapter_leaves()]
        if any(p is not None and p.requires_grad for p in weights):
            raise RuntimeError("with an expert map the experts have no gradients, because replicas would "
                               "differ after a step: call it under torch.no_grad() or after "
                               "requires_grad_(False), or call set_expert_map(None) first")

    # ---- statistics ----

    _row_counts: Tensor | None = None  # [L] int64, once record_stats was called: the rows of each expert
    _waited_before: list[int]  # that of statistics.waited_ns at record_stats, or at the last reset
    _records_stats = False
    record_stats = statistics.record_stats
    stats = statistics.stats

    # ---- LoRA ----

    _lora: lora.State | None = None  # None without adapters
    active_adapter = property(lora.active_adapter)
    is_merged = property(lora.is_merged)
    _adapter_leaves = lora.leaves_of_call
    add_adapter = lora.add_adapter
    set_adapter = lora.set_adapter
    remove_adapter = lora.remove_adapter
    merge_adapter = lora.merge_adapter
    unmerge_adapter = lora.unmerge_adapter
    adapter_state_dict = lora.adapter_state_dict
    load_adapter = lora.load_adapter

    # ---- checkpoints ----

    @property
    def _saved_keys(self) -> types.SimpleNamespace:
        keys = (name + ending.removeprefix("weight") for name in WEIGHTS for ending in self._format.saved)
        return types.SimpleNamespace(**dict.fromkeys(key for key in keys if not hasattr(self, key)))

    @property
    def _computed(self) -> list[str]:
        """The names of weights that are not parameters of this module, but computed from others."""
        own = dict(self.named_parameters(recurse=False, remove_duplicate=False))
        scales = (name + end for name in WEIGHTS for end in self._format.ends[1:])
        return [n for n in (*_PARAMETERS, *scales) if getattr(self, n) is not None and n not in own]

    def _save_to_state_dict(self, destination: StateDict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            checkpoint.write_weights(self, destination, prefix)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, metadata: StateDict, strict: bool,
                              missing: list[str], unexpected: list[str], errors: list[str]) -> None:
        lora.check_unmerged(self, "load_state_dict()")
        placement.check_still(self, "load_state_dict()")
        before = len(errors), len(missing), len(unexpected)
        with checkpoint.Staged(self) as staged:
            left, loaded = checkpoint.load_experts(self, state_dict, prefix, missing, errors)
            own = shards.own_entries(self, self, left, prefix, metadata, errors, checkpoint.saved(self))
            is_absent = not loaded and all("." in key[len(prefix):] for key in own)  # but for adapters
            if not loaded:
                left = checkpoint.read_weights(self, own, prefix, left, missing, errors)
            own |= loaded
            state_dict.update(own)  # in place, because the modules below load from it later
            super()._load_from_state_dict(left | own if own else left, prefix, metadata, strict, missing,
                                          unexpected, errors)
            new_errors, lacks, others = (
                of_call[n:] for of_call, n in zip((errors, missing, unexpected), before))
            # Experts that are missing altogether, and adapters that are too many, are a matter of the
            # caller's `strict`, which torch does not tell: it passes True to all modules below the root.
            others = [key for key in others if not key.startswith(f"{prefix}adapters.")]
            is_right = not new_errors and (not strict or not others and (is_absent or not lacks))
            below = checkpoint.below(self, prefix)
            wrong = {key for key, p in below.items() if not checkpoint.fits(state_dict.get(key), p)}
            if is_right and not wrong and not is_absent:
                staged.keep()
        if not is_right or wrong:  # an error where some keys are missing, too: nobody may forgive them now
            # The modules below load what they hold, except what is wrong, which torch then reports.
            state_dict.update({key: p for key, p in below.items() if key in state_dict and key not in wrong})
            few = f"{', '.join(lacks[:2])}{', ..' if len(lacks) > 2 else ''}"
            errors.append(f"{shards.which_experts(self, prefix)}  {f'Missing: {few}.  ' if lacks else ''}"
                          f"Nothing of it was loaded.")

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return {key of state dicts that is no parameter: attribute below which it is found}.

        torch.distributed.checkpoint.state_dict asks for it, because it looks each key of a state dict up.
        """
        return dict.fromkeys(vars(self._saved_keys), "_saved_keys")

    # ---- beside other modules ----

    def adopt(self, module: nn.Module) -> None:
        """Let the parameters and buffers below another module belong to this one's experts.  Not collective.

        All that is below an EPMoE belongs to its experts, for example the parameters of a parametrization:
        DistributedDataParallel and FSDP leave it to its rank, and state dicts and norms have that of all
        ranks.  Adapters of experts that are beside the EPMoE, for example in a module that wraps it, must be
        adopted.  Call it before prepare_ddp, prepare_fsdp and load_state_dict.

        Args:
            module: A module.  What is below another EPMoE inside of it is left out.  FSDP2 over replicas of
                experts needs one that contains this EPMoE.

        Raises:
            TypeError: For what is not a module.
            ValueError: For an EPMoE, and for a module that was adopted before.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
            >>> adapters = torch.nn.ParameterDict({"a": torch.zeros(2, 4, 32), "b": torch.zeros(2, 16, 4)})
            >>> moe.adopt(adapters)
            >>> len(epmoe.expert_parameters(torch.nn.ModuleList([moe, adapters])))
            4
            >>> moe.finalize()
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"adopt: wanted a torch.nn.Module, got {type(module).__name__}")
        if isinstance(module, EPMoE) or module in self._adopted:
            wrong = "an EPMoE" if isinstance(module, EPMoE) else "was adopted before"
            raise ValueError(f"adopt: {wrong}: its tensors belong to experts in any case")
        self._adopted = *self._adopted, module
        # partial, not a closure: a deep copy of both modules then refers to the copies
        module.register_state_dict_post_hook(functools.partial(shards.save, self))
        module.register_load_state_dict_pre_hook(functools.partial(shards.load_adopted, self))

    def _register(self) -> None:
        shards.know(self)
        if (self.layer.world_size > 1 or self.expert_map is not None or self._has_other_gradients
                or self.computes_fp8 or not self._format.is_saved_as_held):
            shards.register(self)
        delays = self._weight_gradients is not None and self._weight_gradients.delays
        if self.layer.world_size > 1 or self.layer.num_experts != self.num_experts or delays:
            guards.install()

    @without_dynamo
    def _check_ddp(self, ddp: DistributedDataParallel) -> None:
        guards.check_ddp(self, ddp)
        # without gradients, the check does not know from what the weights were computed
        self._checked_ddp = id(ddp) if torch.is_grad_enabled() else 0

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over the modules below, as nn.Module does; fully_shard calls it."""
        guards.install_fsdp()
        return super().named_children()

    def __setstate__(self, state: StateDict) -> None:  # of a deep copy
        super().__setstate__(state)
        self._register()

    def extra_repr(self) -> str:
        """Return the sizes for the module's repr."""
        layer = self.layer
        few = "" if self._format.has_gradients else f"weights in {self._format.title}, "
        few += f"products in FP8, {self.fp8_recipe}, " if self.computes_fp8 else ""
        if self._format.sends_fp8 and not self.is_fp8:
            few += "tokens sent in FP8, "
        if self.recompute_gate_up:
            few += "gate and up recomputed, "
        return (f"hidden={layer.hidden}, num_experts={self.num_experts}, "
                f"local_experts={layer.num_local_experts}, topk={layer.topk * layer._copies}, "
                f"activation={self.activation}, {few}rank={layer.rank} of {layer.world_size}")
