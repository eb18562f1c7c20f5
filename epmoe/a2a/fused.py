"""EpAll2AllFusedOp: dispatch + grouped GEMM, and grouped GEMM + combine, each in one launch."""

import torch

from .. import _C
from ..comm.refusals import reported_after_plan
from ..gemm.activations import activate
from ..gemm.grouped import add_bias, as_kernel, grouped_gemm
from ..torch_modes import check_mode, is_watched, requires_grad
from . import fused_ops  # fused_ops defines the operators
from .fused_fp8 import FusedFp8
from .fused_parts import FusedParts, fuses
from .layer import EPAll2AllLayer
from .layer_parts import cast

__all__ = ["EpAll2AllFusedOp", "fused_ops", "fuses"]


class EpAll2AllFusedOp(FusedFp8, FusedParts, EPAll2AllLayer):
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
            average, and in FP8 if gemm_weight also has at least 4096 rows or max_tokens is at most 1024.
            A training step of EPMoE is not fused where its gate and up weights have 16384 rows or more.
        **options: combine_mode, capacity, num_buffers, reserve_sms, heap, device, timeout_s, rail_dtype and
            rail_capacity, as for EPAll2AllLayer.

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

    def __init__(self, ep_group, max_tokens, hidden, topk, rank=None, num_tot_experts=None,
                 local_world_size=None,
                 world_size=None, dtype=torch.bfloat16, weight_dtype=torch.float32, num_sm=None,
                 enable_local_combine=True, *, num_tail_sms=0, num_reduce_sms=None, token_saving=True,
                 token_sorting=True, block_wise_barrier=True, combine_order="fuse_scatter", fused=None,
                 **options):
        self.fused = fused
        self.token_saving = token_saving  # _check_options, whose errors reach all ranks, makes a bool of each
        self.token_sorting = token_sorting
        self.block_wise_barrier = block_wise_barrier
        self.combine_order = combine_order
        self._requested_sms = num_sm, num_tail_sms, num_reduce_sms
        super().__init__(ep_group, max_tokens, hidden, topk, rank, num_tot_experts, local_world_size,
                         world_size,
                         dtype, weight_dtype, num_sm, enable_local_combine, **options)

    def mega_dispatch_group_gemm(self, input, exp_indices=None, layout=None, gemm_weight=None, weight=None, *,
                                 bias=None, activation=None, full_scatter_indices=None, buffer=0,
                                 gemm_scale=None):
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
        if gemm_scale is not None:
            product = gemm_weight, gemm_scale, bias, activation
            return self._mega_dispatch_fp8(input, exp_indices, layout, product, weight, full_scatter_indices,
                                           buffer)
        try:
            check_mode(input, weight, gemm_weight, bias)
            self._check_product(gemm_weight, None, self.hidden, bias, activation)
            fused = self._is_fused(gemm_weight)
            if layout is None or not fused:
                self._check_tensor("input", input, self.dtype, (None, self.hidden))
        except Exception as error:
            op = _C.OP_DISPATCH_GEMM if self.fused else _C.OP_DISPATCH
            self._refuse(_C.OP_PLAN if layout is None else op, error, self._buffer_of(layout, buffer))
        if not fused:
            rows, row_weight, layout = self.dispatch(input, exp_indices, weight, full_scatter_indices,
                                                     layout=layout, buffer=buffer)
            try:
                h = grouped_gemm(rows, gemm_weight, offsets=layout.expert_offsets, bias=bias,
                                 activation=activation)
            except Exception as error:  # no memory: the next operation of the other ranks is combine
                self._refuse(_C.OP_COMBINE, error, layout.buffer)
            return h, row_weight, layout
        layout, weight, num_rows = self._prepare(_C.OP_DISPATCH_GEMM, input, exp_indices, weight,
                                                 full_scatter_indices, layout, buffer)
        return self._mega_dispatch_planned(layout, input, weight, gemm_weight, bias, activation, num_rows)

    @reported_after_plan(_C.OP_DISPATCH_GEMM)
    def _mega_dispatch_planned(self, layout, input, weight, gemm_weight, bias, activation, num_rows):
        with_grad = requires_grad(input, weight, gemm_weight, bias)
        # With gradients, torch's own bias and activation follow the kernel, because they have a backward.
        inside, added = (None, None) if with_grad else (activation, bias)
        gemm_weight = gemm_weight.contiguous()
        added = None if added is None else added.to(self.dtype).contiguous()
        if with_grad or is_watched():
            h, _, row_weight, recv = torch.ops.epmoe.dispatch_gemm(
                input, weight, layout.plan, gemm_weight, added, self.id, layout.buffer, num_rows,
                *as_kernel(inside), with_grad)
            row_weight = None if weight is None else row_weight
        else:
            h, _, row_weight, recv = self._dispatch_gemm(
                input, weight, layout.plan, gemm_weight, added, layout.buffer, num_rows, *as_kernel(inside))
        self._set_dispatched(layout, h, recv)
        if with_grad and bias is not None:  # an error is reported in the next operation of the other ranks
            h = add_bias(h, bias, layout.expert_offsets)
        if with_grad and activation is not None:
            h = activate(h, activation)
        return h, cast(row_weight, self.weight_dtype), layout

    def mega_group_gemm_combine(self, gemm_input, gemm_weight, layout, weight=None, *, bias=None,
                                gemm_scale=None):
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
        if gemm_scale is not None:
            return self._mega_combine_fp8(gemm_input, layout, (gemm_weight, gemm_scale, bias), weight)
        fused = False
        try:
            check_mode(gemm_input, weight, gemm_weight, bias)
            self._check_dispatched(layout)
            self._check_product(gemm_weight, self.hidden, None, bias, None)
            fused = self._is_fused(gemm_weight)
            weight = self._check_gemm_input(gemm_input, gemm_weight, layout, weight)
            with_grad = requires_grad(gemm_input, weight, gemm_weight, bias)
            fused = fused and not (with_grad and bias is not None)
            if fused:
                gemm_weight = gemm_weight.contiguous()
                bias = None if bias is None else bias.to(self.dtype).contiguous()
            else:
                rows = grouped_gemm(gemm_input, gemm_weight, offsets=layout.expert_offsets, bias=bias)
        except Exception as error:
            self._refuse(_C.OP_GEMM_COMBINE if fused else _C.OP_COMBINE, error, self._buffer_of(layout))
        if not fused:
            return self.combine(rows, layout, weight)
        return self._by_token(self._mega_combine_checked(layout, gemm_input, gemm_weight, bias, weight,
                                                         with_grad))

    @reported_after_plan(_C.OP_GEMM_COMBINE)
    def _mega_combine_checked(self, layout, gemm_input, gemm_weight, bias, weight, with_grad):
        if with_grad or is_watched():
            return torch.ops.epmoe.gemm_combine(gemm_input, gemm_weight, bias, weight, layout.plan,
                                                layout.recv, self.id, layout.buffer, layout.num_tokens,
                                                with_grad)[0]
        return self._gemm_combine(gemm_input, gemm_weight, bias, weight, layout.plan, layout.recv,
                                  layout.buffer, layout.num_tokens)[0]

    def _make_layout(self, exp_indices, scatter, buffer):
        if self._copies > 1:
            try:
                exp_indices = self._by_choice("exp_indices", exp_indices, self.max_tokens // self._copies)
                scatter = self._by_choice("full_scatter_indices", scatter, self.world_size * self.max_tokens)
            except Exception as error:
                self._refuse(_C.OP_PLAN, error, buffer)
        return super()._make_layout(exp_indices, scatter, buffer)

    def dispatch(self, input, exp_indices=None, weight=None, full_scatter_indices=None, *, layout=None,
                 buffer=0):
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

    def combine(self, input, layout, weight=None):
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
