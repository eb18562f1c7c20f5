"""EpAll2AllFusedOp: dispatch + grouped GEMM, and grouped GEMM + combine, each in one launch."""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _C
from ..comm.device import capabilities, integer
from ..comm.heap import SymmetricHeap
from ..comm.error_propagation import reported_after_plan
from ..gemm.activations import Activation, Kernel, activate, as_kernel, has_gates_first, out_columns
from ..gemm.grouped import (FORWARD, FP8_BLOCK, add_bias, aligned, check_activation,
                            grouped_gemm, is_transposed)
from ..gemm.quantize import quantize_fp8
from ..torch_modes import check_mode, constant_for_dynamo, is_watched, requires_grad
from . import ops
from .base import NO_CONFIG, Group, cast
from .layer import EPAll2AllLayer, Outputs
from .layout import EPLayout, Layout

_FUSED = {False: 0, True: 1, None: 2}  # EpFused


def fuses(max_tokens: int, topk: int, num_experts: int, world_size: int) -> bool:
    """Return whether the fused kernels are the faster way for a layer of this shape.

    They are not where an expert has 24 rows or fewer, as in decoding (docs/experiments, E-033).

    Args:
        max_tokens: The most tokens of a rank.
        topk: K.
        num_experts: E.
        world_size: W.

    Examples:
        >>> from epmoe.a2a.fused import fuses
        >>> fuses(192, 8, 256, 4), fuses(193, 8, 256, 4)
        (False, True)
    """
    return _C.layer_has_many_rows(NO_CONFIG._replace(ranks=world_size, num_experts=num_experts, topk=topk,
                                                     max_tokens=max_tokens))


@constant_for_dynamo
def _shares_launch(layer_id: str, n: int, k: int, columns: int = 0, is_fp8: bool = False,
                   has_split_gates: bool = False) -> bool:
    """Whether a product with weights [L, n, k] shares a launch with communication: see csrc/layer/path.c.

    layer_id: a compiler makes symbols of the numbers in a layer's configuration, and a constant of its name.
    """
    layer: EpAll2AllFusedOp = ops.layer_of(layer_id)
    has_kernels = layer._has_fused_fp8 if is_fp8 else layer._has_fused
    return _C.layer_fuses(layer._config, has_kernels, n, k, columns, is_fp8, False, has_split_gates)


def _scales_shape(gemm_weight: Tensor) -> list[int]:
    """Return the shape of the scales of weights [L, N, K], with one for each block."""
    return [gemm_weight.shape[0], *(-(-size // FP8_BLOCK) for size in gemm_weight.shape[1:])]


def check_no_gradients(name: str, *leaves: Any) -> None:
    """Raise RuntimeError if a gradient of one of these arguments of a call is wanted."""
    if requires_grad(*(t for t in leaves if isinstance(t, torch.Tensor))):
        raise RuntimeError(f"{name} in FP8 has no gradients: call it under torch.no_grad(), or use weights "
                           f"in 16 bits for training")


class EpAll2AllFusedOp(EPAll2AllLayer):
    """An EPAll2AllLayer whose GEMMs can run in the same kernels: during dispatch, and during combine.

    Each of the two mega_ methods is one kernel on a GPU of compute capability 9.x, for bfloat16 and float16,
    where all sizes of the weights are multiples of 16.  Elsewhere, and with fused=False, it runs the stages
    one after the other.  The results are the same, bit for bit.

    Each fused kernel occupies all SMs until it ends, except the reserved ones.  A concurrent NCCL kernel can
    deadlock with it.  To prevent that, set reserve_sms to the number of NCCL's channels (NCCL_MAX_CTAS) plus
    8, because CTAs come in pairs of neighbours; or order the streams; or set fused=False.

    Creation is collective.  Defaults are the options that measured best.

    Args:
        ep_group: As for EPAll2AllLayer, and so are all arguments that are not described here.
        max_tokens: As there.
        hidden: As there.
        topk: As there.
        rank: As there.
        num_tot_experts: As there.
        local_world_size: As there.
        world_size: As there.
        dtype: As there.
        weight_dtype: As there.
        num_sm: Thread blocks whose spare warps move tokens beside the GEMM.  None: all.  dispatch and combine
            alone use it too, and for None the default of EPAll2AllLayer.
        enable_local_combine: As there, but True by default.
        num_tail_sms: The number of those blocks that only receive, while the others only send (a two-stage
            dispatch).  0: all do both.  Less than num_sm.
        num_reduce_sms: Thread blocks that add up the tokens, at least 1.  None: all.
        token_saving: A token for several experts of one rank is sent there once.  False: once per choice.
            Layouts then have T * K tokens with one choice each, and so does the message of an EpIndexError.
            The partial sums are rounded as with combine_mode="scatter" and then added up in float32.
        token_sorting: Tokens are sent in the order of the first expert that they need at a rank, and returned
            in the order of the last.  So an expert's rows are complete early, and rows that are computed
            together leave together.  False: in input order.
        block_wise_barrier: A GEMM tile waits for its own rows only.  False: for all rows of its expert.
        combine_order: "fuse_scatter": rows return while others are computed.  "serial": after all are.
        fused: True: the fused kernels, where they exist.  False: the stages one after the other.  None: what
            measured best for the shape: fused where max_tokens gives an expert more than 24 rows on
            average.  In FP8 also only where max_tokens is at most 1024, or with more than two ranks, and
            then dispatch only if gemm_weight has at least 4096 rows.
            A training step of EPMoE is not fused where its gate and up weights have 16384 rows or more.
        combine_mode, capacity, host_counts, num_buffers, reserve_sms, heap, device: As for EPAll2AllLayer.
        timeout_s, rail_dtype, rail_capacity: As there.

    Raises:
        ValueError: On this rank, for an argument out of range.
        TypeError: On this rank, for an argument of the wrong type or dtype.
        PeerError: On the other ranks, when one rank raises ValueError or TypeError.
        EpMismatch: On all ranks, when they ask for different layers.
        HeapExhausted: On all ranks, when one of them has no room.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> sizes = dict(max_tokens=4, hidden=16, topk=1, num_tot_experts=2)
        >>> with epmoe.EpAll2AllFusedOp(epmoe.World(), device="cpu", **sizes) as op:
        ...     x = torch.ones(1, 16, dtype=torch.bfloat16)
        ...     gate_up = torch.ones(2, 64, 16, dtype=torch.bfloat16)
        ...     down = torch.ones(2, 16, 64, dtype=torch.bfloat16)
        ...     h, _, layout = op.mega_dispatch_group_gemm(x, torch.tensor([[1]]), gemm_weight=gate_up)
        ...     y = op.mega_group_gemm_combine(h, down, layout)
        >>> y[0, 0].item()
        1024.0

    References:
        The interface and its options follow Triton-distributed's "Expert Parallelism All-to-All Fused
        Megakernel".
    """

    def __init__(self, ep_group: Group, max_tokens: int, hidden: int, topk: int, rank: int | None = None,
                 num_tot_experts: int | None = None, local_world_size: int | None = None,
                 world_size: int | None = None, dtype: torch.dtype = torch.bfloat16,
                 weight_dtype: torch.dtype = torch.float32, num_sm: int | None = None,
                 enable_local_combine: bool = True, *, num_tail_sms: int = 0,
                 num_reduce_sms: int | None = None, token_saving: bool = True, token_sorting: bool = True,
                 block_wise_barrier: bool = True,
                 combine_order: Literal["fuse_scatter", "serial"] = "fuse_scatter",
                 fused: bool | None = None, combine_mode: Literal["scatter", "gather"] = "scatter",
                 capacity: int | None = None, host_counts: bool = False, num_buffers: int = 1,
                 reserve_sms: int = 0, heap: SymmetricHeap | None = None,
                 device: torch.device | str | None = None, timeout_s: float | None = None,
                 rail_dtype: torch.dtype | None = None, rail_capacity: int | None = None) -> None:
        self._fused = fused
        self.token_saving = token_saving  # _check_options, whose errors reach all ranks, makes a bool of each
        self.token_sorting = token_sorting
        self.block_wise_barrier = block_wise_barrier
        self.combine_order = combine_order
        self._requested_sms = num_sm, num_tail_sms, num_reduce_sms
        super().__init__(ep_group, max_tokens, hidden, topk, rank, num_tot_experts, local_world_size,
                         world_size, dtype, weight_dtype, num_sm, enable_local_combine,
                         combine_mode=combine_mode, capacity=capacity, host_counts=host_counts,
                         num_buffers=num_buffers, reserve_sms=reserve_sms, heap=heap, device=device,
                         timeout_s=timeout_s, rail_dtype=rail_dtype, rail_capacity=rail_capacity)
        # It depends on what all ranks have alike, not on their numbers of tokens.
        self.may_decode = self.capacity is None and _C.layer_decodes(self._config)

    def mega_dispatch_group_gemm(self, input: Tensor, exp_indices: Tensor | None = None,
                                 layout: Layout | None = None, gemm_weight: Tensor | None = None,
                                 weight: Tensor | None = None, *, bias: Tensor | None = None,
                                 activation: Activation | None = None,
                                 full_scatter_indices: Tensor | None = None, buffer: int = 0,
                                 gemm_scale: Tensor | None = None) -> tuple[Tensor, Tensor | None, Layout]:
        """Send tokens to their experts' ranks and multiply each row as it arrives.  Collective.

        Returns activation(dispatch(input) @ gemm_weight[e].T + bias[e]).  Differentiable in input, weight,
        gemm_weight and bias.

        Args:
            input: [T, H], as for dispatch.
            exp_indices: [T, K], as for preprocess.  Not needed, and not read, with a layout.
            layout: As for dispatch.
            gemm_weight: [L, N, H] of the layer's dtype, contiguous, as checkpoints hold it.  Or, on all
                ranks, the view transpose(1, 2) of contiguous [L, H, N]: then the stages run one after the
                other, because the fused kernels would need a copy.
            weight: [T, K], as for dispatch.  The GEMM does not apply it.
            bias: None, or [L, N] of any floating-point dtype; rounded to the layer's where no gradient is
                needed.
            activation: None, or any of reference.activate, for example "swiglu".
            full_scatter_indices: As for preprocess.
            buffer: As for dispatch.
            gemm_scale: For gemm_weight of float8_e4m3fn: its scales, as b_scale of grouped_gemm.  Tokens then
                travel in FP8, as with dispatch_fp8, and are multiplied in FP8.  There are no gradients.

        Returns:
            A tuple (rows, row_weights, layout).  rows is [M, N], or [M, N / 2] for the gated activations;
                row_weights is [M], or None without weight.  With a capacity they have `capacity` rows, and
                those after the first M are undefined.

        Raises:
            ValueError: As preprocess and dispatch, and for weights or a bias of a wrong shape or device.
            TypeError: As preprocess and dispatch, and for weights or a bias of a wrong dtype.
            RuntimeError: On this rank, with gemm_scale, where a gradient is wanted.
            NotImplementedError: As dispatch.
            PeerError: On the other ranks, when one rank raises one of these.
            EpIndexError: As preprocess.
            EpOverflow: As preprocess.
            EpMismatch: As preprocess and dispatch.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> sizes = dict(max_tokens=4, hidden=4, topk=1, num_tot_experts=2, dtype=torch.float32)
            >>> with epmoe.EpAll2AllFusedOp(epmoe.World(), device="cpu", **sizes) as op:
            ...     weights = torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 3, 4).contiguous()
            ...     idx = torch.tensor([[1], [0]])
            ...     rows, _, layout = op.mega_dispatch_group_gemm(torch.ones(2, 4), idx, gemm_weight=weights)
            >>> rows
            tensor([[4., 4., 4.],
                    [8., 8., 8.]])

        References:
            `mega_kernel_dispatch_token_moe_grouped_gemm` of Triton-distributed.
        """
        scales = None
        out_dtype = None if gemm_scale is None else self.dtype
        try:
            check_mode(input, weight, gemm_weight, bias)
            if gemm_scale is None:
                gemm_weight = self._check_product(gemm_weight, None, self.hidden, bias, activation)
                fused = self._is_fused(gemm_weight)
            else:
                check_no_gradients("dispatch + GEMM", input, weight, gemm_weight, gemm_scale, bias)
                gemm_weight = self._check_fp8(None, self.hidden, gemm_weight, gemm_scale, bias, activation)
                fused = self._is_fused_fp8(gemm_weight, activation)
            if layout is None or not fused or gemm_scale is not None:
                self._check_tensor("input", input, self.dtype, (None, self.hidden))
        except Exception as error:
            op = _C.OP_DISPATCH_GEMM if self.fused else _C.OP_DISPATCH
            self._propagate(_C.OP_PLAN if layout is None else op, error, self._buffer_of(layout, buffer))
        if not fused:
            if gemm_scale is None:
                rows, row_weight, layout = self.dispatch(input, exp_indices, weight, full_scatter_indices,
                                                         layout=layout, buffer=buffer)
            else:
                rows, scales, row_weight, layout = self.dispatch_fp8(input, exp_indices, weight,
                                                                     full_scatter_indices, layout=layout,
                                                                     buffer=buffer)
            try:
                h = grouped_gemm(rows, gemm_weight, offsets=layout.expert_offsets, bias=bias,
                                 activation=activation, a_scale=scales, b_scale=gemm_scale,
                                 out_dtype=out_dtype, expected_rows=self.expected_rows)
            except Exception as error:  # no memory: the next operation of the other ranks is combine
                self._propagate(_C.OP_COMBINE, error, layout.buffer)
            return h, row_weight, layout
        layout, weight, num_rows = self._prepare(_C.OP_DISPATCH_GEMM, input, exp_indices, weight,
                                                 full_scatter_indices, layout, buffer)
        return self._mega_dispatch_planned(layout, input, weight, gemm_weight, bias, activation, num_rows,
                                           gemm_scale)

    def mega_group_gemm_combine(self, gemm_input: Tensor, gemm_weight: Tensor, layout: Layout,
                                weight: Tensor | None = None, *, bias: Tensor | None = None,
                                gemm_scale: Tensor | None = None) -> Tensor:
        """Multiply rows and return each to its token's rank while others are computed.  Collective.

        Returns combine(gemm_input @ gemm_weight[e].T + bias[e]).  Differentiable in gemm_input, weight,
        gemm_weight and bias.

        Args:
            gemm_input: [M, K], or [capacity, K], of the layer's dtype, in the order of
                mega_dispatch_group_gemm's rows.
            gemm_weight: [L, H, K] of the layer's dtype, contiguous; or a view, as there.
            layout: The EPLayout that dispatch or mega_dispatch_group_gemm returned.
            weight: [M], or [capacity], or None, as for combine.
            bias: None, or [L, H], as for mega_dispatch_group_gemm.
            gemm_scale: For gemm_weight of float8_e4m3fn: its scales, as b_scale of grouped_gemm.  The rows
                are quantised as quantize_fp8 does and multiplied in FP8, and return in the layer's dtype.
                There are no gradients.

        Returns:
            [T, H] of the layer's dtype, summed as combine does.

        Raises:
            ValueError: As combine, and for weights or a bias of a wrong shape or device.
            TypeError: As combine, and for weights or a bias of a wrong dtype.
            RuntimeError: On this rank, with gemm_scale, where a gradient is wanted.
            NotImplementedError: As dispatch.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.
            EpMismatch: As combine.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> sizes = dict(max_tokens=4, hidden=4, topk=1, num_tot_experts=2, dtype=torch.float32)
            >>> with epmoe.EpAll2AllFusedOp(epmoe.World(), device="cpu", **sizes) as op:
            ...     rows, _, layout = op.dispatch(torch.ones(1, 4), torch.tensor([[1]]))
            ...     op.mega_group_gemm_combine(rows, torch.ones(2, 4, 4), layout)
            tensor([[4., 4., 4., 4.]])

        References:
            `mega_kernel_moe_grouped_gemm_combine_token` of Triton-distributed.
        """
        fused = False
        rows, scales, out_dtype = gemm_input, None, None
        try:
            check_mode(gemm_input, weight, gemm_weight, bias)
            if gemm_scale is not None:
                check_no_gradients("GEMM + combine", gemm_input, weight, gemm_weight, gemm_scale, bias)
            layout = self._check_dispatched(layout)
            if gemm_scale is None:
                self._check_product(gemm_weight, self.hidden, None, bias, None)
                fused = self._is_fused(gemm_weight)
            else:
                self._check_fp8(self.hidden, None, gemm_weight, gemm_scale, bias)
                fused = self._is_fused_fp8(gemm_weight, is_first=False)
                out_dtype = self.dtype
            weight = self._check_gemm_input(gemm_input, gemm_weight, layout, weight)
            with_grad = requires_grad(gemm_input, weight, gemm_weight, bias)
            fused = fused and not (with_grad and bias is not None)
            if gemm_scale is not None:
                rows, scales = quantize_fp8(gemm_input, num_rows=layout.expert_offsets[-1:])
            if fused:
                if gemm_scale is not None:
                    gemm_scale = self._scale_blocks(gemm_weight, gemm_scale)
                gemm_weight = gemm_weight.contiguous()
                bias = None if bias is None else bias.to(self.dtype).contiguous()
            else:
                rows = grouped_gemm(rows, gemm_weight, offsets=layout.expert_offsets, bias=bias,
                                    a_scale=scales, b_scale=gemm_scale, out_dtype=out_dtype,
                                    expected_rows=self.expected_rows)
        except Exception as error:
            self._propagate(_C.OP_GEMM_COMBINE if fused else _C.OP_COMBINE, error, self._buffer_of(layout))
        if not fused:
            return self.combine(rows, layout, weight)
        return self._by_token(self._mega_combine_checked(layout, rows, gemm_weight, bias, weight, with_grad,
                                                         scales, gemm_scale))

    def dispatch(self, input: Tensor, exp_indices: Tensor | None = None, weight: Tensor | None = None,
                 full_scatter_indices: Tensor | None = None, *, layout: Layout | None = None,
                 buffer: int = 0) -> tuple[Tensor, Tensor | None, Layout]:
        """Send tokens to their experts' ranks without a GEMM, as EPAll2AllLayer.dispatch.  Collective.

        Args:
            input: [T, H], as there.
            exp_indices: [T, K], as there.
            weight: [T, K] or None, as there.
            full_scatter_indices: As there.
            layout: As there; mega_dispatch_group_gemm's may be used too.
            buffer: As there.

        Returns:
            A tuple (rows, row_weights, layout), as there.

        Raises:
            EpError, ValueError, TypeError: As there.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> with epmoe.EpAll2AllFusedOp(epmoe.World(), 4, 16, 2, num_tot_experts=2, device="cpu") as op:
            ...     op.dispatch(torch.ones(1, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]]))[0].shape
            torch.Size([2, 16])
        """
        return super().dispatch(input, exp_indices, weight, full_scatter_indices, layout=layout,
                                buffer=buffer)

    def combine(self, input: Tensor, layout: Layout, weight: Tensor | None = None) -> Tensor:
        """Return rows and sum them without a GEMM, as EPAll2AllLayer.combine.  Collective.

        Args:
            input: [M, H], or [capacity, H], as there.
            layout: As there.
            weight: [M], or [capacity], or None, as there.

        Returns:
            [T, H] of the layer's dtype.

        Raises:
            EpError, ValueError, TypeError: As there.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> with epmoe.EpAll2AllFusedOp(epmoe.World(), 4, 16, 2, num_tot_experts=2, device="cpu") as op:
            ...     x = torch.ones(1, 16, dtype=torch.bfloat16)
            ...     rows, _, layout = op.dispatch(x, torch.tensor([[0, 1]]))
            ...     op.combine(rows, layout)[0, 0].item()
            2.0
        """
        return self._by_token(super().combine(input, layout, weight))

    # ---- options, and which way a call takes ----

    def _check_options(self) -> None:
        self._fused = None if self._fused is None else bool(self._fused)
        for name in ("token_saving", "token_sorting", "block_wise_barrier"):
            setattr(self, name, bool(getattr(self, name)))
        if self.combine_order not in ("fuse_scatter", "serial"):
            raise ValueError(f"combine_order {self.combine_order!r}: must be fuse_scatter or serial")
        if not self.token_saving:  # every choice becomes a token of its own
            self._copies = self.topk
            self.max_tokens *= self.topk
            self.topk = 1
        # Asked here, because a compiler cannot trace the call of the module.
        on_cpu = self.device.type == "cpu"  # where a fused operation runs its stages one after the other
        self._has_fused_fp8 = not on_cpu and capabilities(self.device).has_hopper
        self._has_fused = on_cpu or self._has_fused_fp8
        most = self._num_blocks
        num_sm, num_tail, num_reduce = self._requested_sms
        self._fused_config = {
            "fused": _FUSED[self._fused],
            "num_move": most if num_sm is None else min(integer("num_sm", num_sm), most),
            "num_tail_sms": integer("num_tail_sms", num_tail),
            "num_reduce_sms": most if num_reduce is None else integer("num_reduce_sms", num_reduce),
            "waits_for_expert": not self.block_wise_barrier, "is_serial": self.combine_order == "serial",
            "token_sorting": self.token_sorting}
        if self._fused is None:
            self._fused = fuses(self.max_tokens, self.topk, self.num_experts, self.world_size)

    @property
    def fused(self) -> bool:
        """Whether the fused kernels run, where they exist: as passed, or what None has chosen."""
        return bool(self._fused)

    def _is_fused(self, gemm_weight: Tensor) -> bool:
        """Whether a product with these weights [L, N, K] shares a launch with the communication beside it."""
        n, k = map(operator.index, gemm_weight.shape[1:])  # to a compiler, sizes may be symbols
        return not is_transposed(gemm_weight) and _shares_launch(self.id, n, k)

    def _is_fused_fp8(self, gemm_weight: Tensor, activation: Activation | None = None,
                      is_first: bool = True) -> bool:
        """The same for weights in FP8.  is_first: they multiply the rows that dispatch brings."""
        n, k = map(operator.index, gemm_weight.shape[1:])
        return _shares_launch(self.id, n, k, n if is_first else 0, True,
                              has_gates_first(as_kernel(activation)))

    # ---- checks ----

    def _check_gemm_input(self, gemm_input: Tensor, gemm_weight: Tensor, layout: EPLayout,
                          weight: Tensor | None) -> Tensor | None:
        """Check the rows and their weights before GEMM + combine.  Returns the weights, in float32."""
        num_rows = layout._num_rows if self.capacity is None else self.capacity
        self._check_tensor("gemm_input", gemm_input, self.dtype, (num_rows, gemm_weight.shape[2]))
        if weight is None:
            return None
        self._check_tensor("weight", weight, None, (gemm_input.shape[0],))
        return cast(weight, torch.float32)

    def _check_fp8(self, rows: int | None, columns: int | None, gemm_weight: Any, gemm_scale: Any, bias: Any,
                   activation: Activation | None = None) -> Tensor:
        """As _check_product, for a product in FP8.  Returns gemm_weight [L, rows, columns]."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"dtype {self.dtype} with weights in FP8: the layer must be of torch.bfloat16 or "
                            f"torch.float16")
        if self.hidden % 16:
            raise ValueError(f"hidden {self.hidden} with weights in FP8: must be a multiple of 16")
        self._check_tensor("gemm_weight", gemm_weight, torch.float8_e4m3fn,
                           (self.num_local_experts, rows, columns))
        check_activation(activation, gemm_weight.shape[1])
        if not isinstance(gemm_scale, torch.Tensor):
            raise TypeError(f"gemm_scale: wanted a tensor, got {type(gemm_scale).__name__}")
        if gemm_scale.dtype != torch.float32 or gemm_scale.layout is not torch.strided:
            raise TypeError(f"gemm_scale: wanted float32, got {gemm_scale.dtype}")
        shape = _scales_shape(gemm_weight)
        is_one = list(gemm_scale.shape) == shape[:1] or gemm_scale.numel() == 1
        if gemm_scale.device != self.device or (list(gemm_scale.shape) != shape and not is_one):
            raise ValueError(f"gemm_scale: wanted {shape}, {shape[:1]} or one number, on {self.device}, got "
                             f"{list(gemm_scale.shape)} on {gemm_scale.device}")
        if bias is not None:
            self._check_tensor("bias", bias, None, tuple(gemm_weight.shape[:2]))
        return gemm_weight

    def _scale_blocks(self, gemm_weight: Tensor, gemm_scale: Tensor) -> Tensor:
        """Return a scale for each block of weights, as the fused kernels take them."""
        shape = _scales_shape(gemm_weight)
        if list(gemm_scale.shape) != shape:
            gemm_scale = gemm_scale.reshape(-1, 1, 1).expand(shape)
        return gemm_scale.contiguous()

    # ---- calls of the module; ops.py makes operators of them ----

    @reported_after_plan(_C.OP_DISPATCH_GEMM)
    def _mega_dispatch_planned(self, layout: EPLayout, input: Tensor, weight: Tensor | None,
                               gemm_weight: Tensor, bias: Tensor | None, activation: Activation | None,
                               num_rows: int,
                               gemm_scale: Tensor | None) -> tuple[Tensor, Tensor | None, EPLayout]:
        with_grad = requires_grad(input, weight, gemm_weight, bias)
        # With gradients, torch's own bias and activation follow the kernel, because they have a backward.
        inside, added = (None, None) if with_grad else (activation, bias)
        x_scale = None
        if gemm_scale is not None:
            input, x_scale = quantize_fp8(input.contiguous())
            gemm_scale = self._scale_blocks(gemm_weight, gemm_scale)
        gemm_weight = gemm_weight.contiguous()
        added = None if added is None else added.to(self.dtype).contiguous()
        if with_grad or is_watched():
            h, _, row_weight, recv = torch.ops.epmoe.dispatch_gemm(
                input, x_scale, weight, layout.plan, gemm_weight, gemm_scale, added, self.id, layout.buffer,
                num_rows, as_kernel(inside), with_grad)
            row_weight = None if weight is None else row_weight
        else:
            h, _, row_weight, recv, _ = self._dispatch_gemm(
                input, weight, layout.plan, gemm_weight, added, layout.buffer, num_rows, as_kernel(inside),
                False, x_scale, gemm_scale)
        self._set_dispatched(layout, h, recv)
        if with_grad and bias is not None:  # an error is reported in the next operation of the other ranks
            h = add_bias(h, bias, layout.expert_offsets)
        if with_grad and activation is not None:
            h = activate(h, activation)
        return h, cast(row_weight, self.weight_dtype), layout

    @reported_after_plan(_C.OP_GEMM_COMBINE)
    def _mega_combine_checked(self, layout: EPLayout, a: Tensor, gemm_weight: Tensor, bias: Tensor | None,
                              weight: Tensor | None, with_grad: bool, a_scale: Tensor | None,
                              gemm_scale: Tensor | None) -> Tensor:
        if with_grad or is_watched():
            return torch.ops.epmoe.gemm_combine(a, a_scale, gemm_weight, gemm_scale, bias, weight,
                                                layout.plan, layout.recv, self.id, layout.buffer,
                                                layout.num_tokens, with_grad)[0]
        return self._gemm_combine(a, gemm_weight, bias, weight, layout.plan, layout.recv, layout.buffer,
                                  layout.num_tokens, False, a_scale, gemm_scale)[0]

    def _dispatch_gemm(self, x: Tensor, weight: Tensor | None, plan: Tensor, gemm_weight: Tensor,
                       bias: Tensor | None, buffer: int, num_rows: int, activation: Kernel,
                       with_grad: bool = False, x_scale: Tensor | None = None,
                       gemm_scale: Tensor | None = None
                       ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """Allocate the outputs and call the module.

        Returns the products, the rows, their weights, recv, and in FP8 the scales of the rows.
        """
        columns = out_columns(gemm_weight.shape[1], activation)
        if x_scale is not None:  # DLPack of some versions of torch has no FP8, so the module gets bytes
            x, gemm_weight = x.view(torch.uint8), gemm_weight.view(torch.uint8)
            gemm_scale = aligned(gemm_scale)
        gemm_weight, bias = aligned(gemm_weight), aligned(bias)

        def make(n: int) -> Outputs:
            row_weight = None if weight is None else self._empty(n, dtype=torch.float32)
            recv = self._empty(self._recv_words, dtype=torch.int32)
            out, others = self._empty(n, columns), [recv, gemm_weight, gemm_scale, bias]
            if x_scale is None:
                return [self._empty(n, self.hidden), None, row_weight, out], others
            return [*self._fp8_rows(n, by_row=False), row_weight, out], others

        def launch(outputs: list[Any], others: list[Any], awaits_rows: bool) -> _C._Ran:
            *of_rows, out = outputs
            return _C.layer_dispatch_gemm(self._c, buffer, (
                x, x_scale, weight, plan, *of_rows, *others, out, None, activation, with_grad,
                FORWARD, awaits_rows))

        call = plan, buffer, x.shape[0]
        kept_for = gemm_weight.data_ptr() if with_grad else None
        made, others = self._run_dispatch(call, num_rows, make, launch, kept_for)
        rows, row_scale, row_weight, out = made
        if x_scale is not None:
            rows = rows.view(torch.float8_e4m3fn)
        return out, rows, row_weight, others[0], row_scale

    def _gemm_combine(self, a: Tensor, gemm_weight: Tensor, bias: Tensor | None, row_weight: Tensor | None,
                      plan: Tensor, recv: Tensor | None, buffer: int, num_tokens: int,
                      with_grad: bool = False, a_scale: Tensor | None = None,
                      gemm_scale: Tensor | None = None,
                      row_scalar: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Allocate the outputs and call the module.

        Returns the sums, the rows that were added up, and the scalars of the tokens' choices.
        """
        rows, out = self._empty(a.shape[0], self.hidden), self._empty(num_tokens, self.hidden)
        out_scalar = None if row_scalar is None else self._empty(num_tokens, self.topk, dtype=torch.float32)
        gemm_weight, bias = aligned(gemm_weight), aligned(bias)
        if a_scale is not None:  # DLPack of some versions of torch has no FP8, so the module gets bytes
            a, gemm_weight = a.view(torch.uint8), gemm_weight.view(torch.uint8)
            gemm_scale = aligned(gemm_scale)
        _C.layer_gemm_combine(self._c, buffer, (
            a, a_scale, gemm_weight, gemm_scale, bias, None, None, rows, row_weight, row_scalar, plan, recv,
            out, out_scalar, with_grad, FORWARD))
        return out, rows, out_scalar

    # ---- without token saving, every choice is a token of its own (_copies > 1) ----

    def _make_layout(self, exp_indices: Any, scatter: Any, buffer: int) -> EPLayout:
        if self._copies > 1:
            try:
                exp_indices = self._by_choice("exp_indices", exp_indices, self.max_tokens // self._copies)
                scatter = self._by_choice("full_scatter_indices", scatter, self.world_size * self.max_tokens)
            except Exception as error:
                self._propagate(_C.OP_PLAN, error, buffer)
        return super()._make_layout(exp_indices, scatter, buffer)

    def _by_token(self, y: Tensor) -> Tensor:
        return y if self._copies == 1 else y.view(-1, self._copies, self.hidden).float().sum(1).to(self.dtype)
