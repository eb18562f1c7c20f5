"""EpAll2AllFusedOp: dispatch + grouped GEMM and grouped GEMM + combine, each in one launch."""

import contextlib

import torch

from . import _C
from .gemm import _GATED, DGRAD, WGRAD, add_bias, aligned, as_kernel, grouped_gemm, untraced
from .layer import EPAll2AllLayer, cast
from .ops import _absent, _layer, _lib, _rows_to_trace, dispatch, is_watched, register_fake, requires_grad, row_dots, telling
from .reference import activate

_lib.define("dispatch_gemm(Tensor x, Tensor? weight, Tensor plan, Tensor gemm_weight, Tensor? bias, str layer, int buffer, SymInt num_rows, "
            "int activation, float alpha=0, float limit=0, bool requires_grad=False, Tensor? after=None) -> "
            "(Tensor, Tensor, Tensor, Tensor)")
_lib.define("gemm_combine(Tensor a, Tensor gemm_weight, Tensor? bias, Tensor? row_weight, Tensor plan, Tensor recv, str layer, int buffer, "
            "SymInt num_tokens, bool requires_grad=False, Tensor? after=None) -> (Tensor, Tensor)")


def fuses(max_tokens, topk, num_experts, world_size):
    """Whether moving and multiplying in one kernel is the faster way for a layer of this shape.  Not where an expert has 24 rows or fewer,
    as in decoding: there all time goes into reading the weights, and the product alone has tiles for that (benchmarks/NOTES.md)."""
    return world_size * max_tokens * topk > 24 * num_experts


class EpAll2AllFusedOp(EPAll2AllLayer):
    """An EPAll2AllLayer that can also multiply: tokens while they arrive, results while they leave.

    Where a GPU of compute capability 9.x multiplies bfloat16 or float16 and all sizes are multiples of 16, each of the two is
    one kernel; elsewhere they are the same stages one after the other, with the same results to the bit.

    Each kernel takes all SMs until it ends, but for reserve_sms.  A collective of NCCL that may be on its way at the same time, on
    another stream, wants some reserved: as many as it has channels (NCCL_MAX_CTAS), and 8, because blocks come in pairs that stand beside
    each other; or order the streams; or fused=False.

    Args: those of EPAll2AllLayer, and what the kernels can do in more than one way.  The defaults are what measured best.
        enable_local_combine: as there, but True by default.
        num_sm: thread blocks in which tokens are moved, beside the product; None: all.  Dispatch and combine alone take it, too; for None
            EPAll2AllLayer's default.
        num_tail_sms: of those, blocks that only receive, while the others only send (a dispatch in two stages); 0: all do both.
        num_reduce_sms: blocks in which tokens are added up; None: all.
        token_saving: a token that several experts of one rank want goes there once.  False: once for each; layouts are then of T * K
            tokens with one choice (an EpIndexError, too, counts them so), and partial sums are rounded as with
            combine_mode="scatter" and then added up in float32.
        token_sorting: tokens leave by the first expert that they want at a rank, and come home by the last: so that an expert's
            rows are complete early, and rows that are made together leave together.  False: by their place in the input.
        block_wise_barrier: a tile of the product waits for its own rows; False: for all rows of its expert.
        combine_order: "fuse_scatter", rows go home while others are made; "serial", when all of them are made.
        fused: True: one kernel each, where there are such; False: the stages one after the other; None: what measured best, see fuses().
    """

    def __init__(self, ep_group, max_tokens, hidden, topk, rank=None, num_tot_experts=None, local_world_size=None, world_size=None,
                 dtype=torch.bfloat16, weight_dtype=torch.float32, num_sm=None, enable_local_combine=True, *, num_tail_sms=0,
                 num_reduce_sms=None, token_saving=True, token_sorting=True, block_wise_barrier=True, combine_order="fuse_scatter", fused=None, **options):
        self.fused, self.token_saving = fused, bool(token_saving)
        self.token_sorting, self.block_wise_barrier, self.combine_order = bool(token_sorting), bool(block_wise_barrier), combine_order
        self._asked = num_sm, num_tail_sms, num_reduce_sms
        super().__init__(ep_group, max_tokens, hidden, topk, rank, num_tot_experts, local_world_size, world_size,
                         dtype, weight_dtype, num_sm, enable_local_combine, **options)

    def _check_options(self):
        if self.combine_order not in ("fuse_scatter", "serial"):
            raise ValueError(f"combine_order {self.combine_order!r}: fuse_scatter or serial")
        if not self.token_saving:  # every choice is a token of its own
            self._copies, self.max_tokens, self.topk = self.topk, self.max_tokens * self.topk, 1
        if self.fused is None:
            self.fused = fuses(self.max_tokens, self.topk, self.num_experts, self.world_size)
        most = self._num_blocks
        num_sm, num_tail, num_reduce = self._asked
        num_sm, num_tail = most if num_sm is None else min(int(num_sm), most), int(num_tail)
        num_reduce = most if num_reduce is None else int(num_reduce)
        if num_tail < 0 or num_tail >= max(num_sm, 1):
            raise ValueError(f"num_tail_sms {num_tail}: 0, or fewer than the {num_sm} blocks that move tokens")
        if num_reduce < 1:
            raise ValueError(f"num_reduce_sms {num_reduce}: some thread block must add up the tokens")
        self._knobs = num_sm, num_tail, num_reduce

    def _is_fused(self, gemm_weight):
        """Whether the kernels are there for a product with these weights [L, N, K]."""
        return (self.fused and self.device.type == "cuda" and self.dtype in (torch.bfloat16, torch.float16)
                and torch.cuda.get_device_capability(self.device)[0] == 9 and all(n % 16 == 0 for n in gemm_weight.shape[1:]))

    # The two below allocate outputs and call the module; the operators at the end of this file give them to autograd and torch.compile.

    def _dispatch_gemm(self, x, weight, plan, gemm_weight, bias, buffer, num_rows, activation, alpha=0.0, limit=0.0, with_grad=False):
        try:
            rows = torch.empty((num_rows, self.hidden), dtype=self.dtype, device=self.device)
            row_weight = None if weight is None else torch.empty(num_rows, dtype=torch.float32, device=self.device)
            recv = torch.empty(self._recv_words, dtype=torch.int32, device=self.device)
            columns = gemm_weight.shape[1] // (2 if activation in _GATED else 1)
            out = torch.empty((num_rows, columns), dtype=self.dtype, device=self.device)
            gemm_weight, bias = aligned(gemm_weight), aligned(bias)
        except Exception as error:
            self._refuse(_C.OP_DISPATCH_GEMM, error, buffer)
        num_move, num_tail, _ = self._knobs
        _C.layer_dispatch_gemm(self._c, buffer, x, weight, plan, rows, row_weight, recv, gemm_weight, bias, out, activation, alpha, limit, num_move,
                               num_tail, not self.block_wise_barrier, self._copies, with_grad)
        return out, rows, row_weight, recv

    def _gemm_combine(self, a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens, with_grad=False):
        try:
            rows = torch.empty((a.shape[0], self.hidden), dtype=self.dtype, device=self.device)
            out = torch.empty((num_tokens, self.hidden), dtype=self.dtype, device=self.device)
            gemm_weight, bias = aligned(gemm_weight), aligned(bias)
        except Exception as error:
            self._refuse(_C.OP_GEMM_COMBINE, error, buffer)
        num_move, _, num_reduce = self._knobs
        _C.layer_gemm_combine(self._c, buffer, a, gemm_weight, bias, rows, row_weight, plan, recv, out, num_move, num_reduce,
                              self.combine_order == "serial", with_grad)
        return out, rows

    def mega_dispatch_group_gemm(self, input, exp_indices=None, layout=None, gemm_weight=None, weight=None, *, bias=None, activation=None,
                                 full_scatter_indices=None, buffer=0):
        """activation(dispatch(input) @ gemm_weight[e].T + bias[e]): the rows of every local expert, multiplied as they arrive.

        Args:
            input, exp_indices, weight, layout, full_scatter_indices, buffer: see EPAll2AllLayer.dispatch.
            gemm_weight: [L, N, H] of the layer's dtype, as checkpoints hold it.
            bias: None, or [L, N] of any floating-point dtype; rounded to the layer's where no gradients are wanted.
            activation: None, "gelu", "swiglu" (rows of gemm_weight: gates, then ups), "gpt_oss" or GptOss(alpha, limit); see
                reference.activate.
        Returns: (rows [M, N], or [M, N / 2] for the gated activations; row weights [M] or None; layout).  With a capacity as many rows
            as that; what stands behind M is undefined.
        Differentiable in input, weight, gemm_weight and bias.  Errors: those of preprocess and of dispatch.
        """
        try:
            self._check_product(gemm_weight, None, self.hidden, bias, activation)
            fused = self._is_fused(gemm_weight)
            if layout is None or not fused:
                self._check_tensor("input", input, self.dtype, (None, self.hidden))
        except Exception as error:
            self._refuse(_C.OP_PLAN if layout is None else _C.OP_DISPATCH_GEMM if self.fused else _C.OP_DISPATCH, error,
                         self._meant(layout, buffer))
        if not fused:
            rows, row_weight, layout = self._dispatch_alone(input, exp_indices, weight, full_scatter_indices, layout, buffer)
            try:
                h = grouped_gemm(rows, gemm_weight, offsets=layout.expert_offsets, bias=bias, activation=activation)
            except Exception as error:  # no memory: the others will wait in combine
                self._refuse(_C.OP_COMBINE, error, layout.buffer)
            return h, row_weight, layout
        layout, weight, num_rows = self._prepare(_C.OP_DISPATCH_GEMM, input, exp_indices, weight, full_scatter_indices, layout, buffer)
        with_grad = requires_grad(input, weight, gemm_weight, bias)
        inside, added = (None, None) if with_grad else (activation, bias)  # with gradients both follow: their backward is torch's own
        try:
            gemm_weight, added = gemm_weight.contiguous(), None if added is None else added.to(self.dtype).contiguous()
        except Exception as error:
            self._refuse(_C.OP_DISPATCH_GEMM, error, layout.buffer)
        if with_grad or is_watched():
            h, _, row_weight, layout.recv = torch.ops.epmoe.dispatch_gemm(input, weight, layout.plan, gemm_weight, added, self.id, layout.buffer,
                                                                          num_rows, *as_kernel(inside), with_grad)
            row_weight = None if weight is None else row_weight
        else:
            num_rows = self._num_rows(layout.plan, layout.buffer) if num_rows < 0 else num_rows
            h, _, row_weight, layout.recv = self._dispatch_gemm(input, weight, layout.plan, gemm_weight, added, layout.buffer, num_rows,
                                                                *as_kernel(inside))
        try:
            if with_grad and bias is not None:
                h = add_bias(h, bias, layout.expert_offsets)
            if with_grad and activation is not None:
                h = activate(h, activation)
        except Exception as error:
            self._refuse(_C.OP_GEMM_COMBINE, error, layout.buffer)
        return h, cast(row_weight, self.weight_dtype), layout

    def mega_group_gemm_combine(self, gemm_input, gemm_weight, layout, weight=None, *, bias=None):
        """combine(gemm_input @ gemm_weight[e].T + bias[e]): results go home while others are made.

        Args:
            gemm_input: [M, K] (or [capacity, K]) of the layer's dtype, rows as mega_dispatch_group_gemm leaves them.
            gemm_weight: [L, H, K].
            layout: of the dispatch.
            weight: [M] (or [capacity]) or None; see EPAll2AllLayer.combine, which also says how is summed.
            bias: None, or [L, H], as there.
        Returns: [T, H].  Differentiable in gemm_input, weight, gemm_weight and bias.  Errors: those of combine.
        """
        fused = False
        try:
            self._check_layout(layout)
            if layout.recv is None:
                raise ValueError("combine needs the layout of a dispatch; this one was only planned")
            self._check_product(gemm_weight, self.hidden, None, bias, None)
            fused = self._is_fused(gemm_weight)
            num_rows = layout._num_rows if self.capacity is None else self.capacity
            self._check_tensor("gemm_input", gemm_input, self.dtype, (num_rows, gemm_weight.shape[2]))
            if weight is not None:
                self._check_tensor("weight", weight, None, (gemm_input.shape[0],))
                weight = cast(weight, torch.float32)
            with_grad = requires_grad(gemm_input, weight, gemm_weight, bias)
            fused = fused and not (with_grad and bias is not None)
            if fused:
                gemm_weight, bias = gemm_weight.contiguous(), None if bias is None else bias.to(self.dtype).contiguous()
            else:
                rows = grouped_gemm(gemm_input, gemm_weight, offsets=layout.expert_offsets, bias=bias)
        except Exception as error:
            self._refuse(_C.OP_GEMM_COMBINE if fused else _C.OP_COMBINE, error, self._meant(layout))
        if not fused:
            return self.combine(rows, layout, weight)
        if with_grad or is_watched():
            y = torch.ops.epmoe.gemm_combine(gemm_input, gemm_weight, bias, weight, layout.plan, layout.recv, self.id, layout.buffer,
                                             layout.num_tokens, with_grad)[0]
        else:
            y = self._gemm_combine(gemm_input, gemm_weight, bias, weight, layout.plan, layout.recv, layout.buffer, layout.num_tokens)[0]
        return self._by_token(y)

    # Without token saving every choice is a token of its own.

    def _by_token(self, y):
        return y if self._copies == 1 else y.view(-1, self._copies, self.hidden).float().sum(1).to(self.dtype)

    def preprocess(self, exp_indices, full_scatter_indices=None, *, buffer=0):
        if self._copies > 1:
            try:
                exp_indices = self._by_choice("exp_indices", exp_indices, self.max_tokens // self._copies)
                full_scatter_indices = self._by_choice("full_scatter_indices", full_scatter_indices, self.world_size * self.max_tokens)
            except Exception as error:
                self._refuse(_C.OP_PLAN, error, buffer)
        return super().preprocess(exp_indices, full_scatter_indices, buffer=buffer)

    def _by_choice(self, name, t, most):
        """[T, K] as the layer below has it; that looks at the rest."""
        if not isinstance(t, torch.Tensor):
            return t
        if t.dim() != 2 or t.shape[1] != self._copies:
            raise ValueError(f"{name}: wanted shape [*, {self._copies}], got {list(t.shape)}")
        if t.shape[0] > most:
            raise ValueError(f"{name} has {t.shape[0]} tokens; max_tokens is {most}")
        return t.reshape(-1, 1)

    def _dispatch_alone(self, input, exp_indices, weight, full_scatter_indices, layout, buffer):
        if self._copies == 1:
            return super().dispatch(input, exp_indices, weight, full_scatter_indices, layout=layout, buffer=buffer)
        layout, weight, num_rows = self._prepare(_C.OP_DISPATCH, input, exp_indices, weight, full_scatter_indices, layout, buffer)
        try:
            copies = input.repeat_interleave(self._copies, 0)
        except Exception as error:
            self._refuse(_C.OP_DISPATCH, error, layout.buffer)
        rows, row_weight, layout.recv = dispatch(self, copies, weight, layout.plan, layout.buffer, num_rows, requires_grad(input, weight))
        return rows, cast(row_weight, self.weight_dtype), layout

    def dispatch(self, input, exp_indices=None, weight=None, full_scatter_indices=None, *, layout=None, buffer=0):
        return self._dispatch_alone(input, exp_indices, weight, full_scatter_indices, layout, buffer)

    def combine(self, input, layout, weight=None):
        return self._by_token(super().combine(input, layout, weight))

    def _check_product(self, gemm_weight, rows, columns, bias, activation):
        """gemm_weight [L, rows, columns]; None is any."""
        self._check_tensor("gemm_weight", gemm_weight, self.dtype, (self.num_local_experts, rows, columns))
        if as_kernel(activation)[0] in _GATED and gemm_weight.shape[1] % 2:
            raise ValueError(f"activation {activation!r} wants an even number of weight rows, got {gemm_weight.shape[1]}")
        if bias is not None:
            self._check_tensor("bias", bias, None, tuple(gemm_weight.shape[:2]))


# ---- operators ----


def _offsets(layer, plan):
    """[L + 1] int32: where each local expert's rows begin."""
    return plan.narrow(0, layer._plan_front["expert_row"], layer.num_local_experts + 1)


def _run_dispatch_gemm(x, weight, plan, gemm_weight, bias, layer, buffer, num_rows, activation, alpha=0.0, limit=0.0, requires_grad=False,
                       after=None):
    layer = _layer(layer)
    if num_rows < 0:
        num_rows = layer._num_rows(plan, buffer)
    out, rows, row_weight, recv = layer._dispatch_gemm(x, weight, plan, gemm_weight, bias, buffer, num_rows, activation, alpha, limit,
                                                       requires_grad)
    return out, rows, _absent(x) if row_weight is None else row_weight, recv


def _run_gemm_combine(a, gemm_weight, bias, row_weight, plan, recv, layer, buffer, num_tokens, requires_grad=False, after=None):
    return _layer(layer)._gemm_combine(a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens, requires_grad)


_lib.impl("dispatch_gemm", untraced(_run_dispatch_gemm), "CompositeExplicitAutograd")
_lib.impl("gemm_combine", untraced(_run_gemm_combine), "CompositeExplicitAutograd")


@register_fake("dispatch_gemm")
def _(x, weight, plan, gemm_weight, bias, layer, buffer, num_rows, activation, alpha=0.0, limit=0.0, requires_grad=False, after=None):
    layer, num_rows = _layer(layer), _rows_to_trace(num_rows)
    row_weight = _absent(x) if weight is None else x.new_empty(num_rows, dtype=torch.float32)
    columns = gemm_weight.shape[1] // (2 if activation in _GATED else 1)
    like = x.new_empty(0, dtype=layer.dtype)
    return like.new_empty(num_rows, columns), like.new_empty(num_rows, layer.hidden), row_weight, plan.new_empty(layer._recv_words)


@register_fake("gemm_combine")
def _(a, gemm_weight, bias, row_weight, plan, recv, layer, buffer, num_tokens, requires_grad=False, after=None):
    like = a.new_empty(0, dtype=_layer(layer).dtype)
    return like.new_empty(num_tokens, gemm_weight.shape[1]), like.new_empty(a.shape[0], gemm_weight.shape[1])


def _save_dispatch_gemm(ctx, inputs, output):
    x, weight, plan, gemm_weight, _, ctx.layer, ctx.buffer, _, ctx.activation, *_ = inputs
    ctx.num_tokens, ctx.has_weight = x.shape[0], weight is not None
    ctx.save_for_backward(plan, gemm_weight, output[1], output[3])


def _dispatch_gemm_backward(ctx, d_out, d_rows, d_row_weight, _):
    plan, gemm_weight, rows, recv = ctx.saved_tensors
    if ctx.activation:
        raise RuntimeError("the backward of dispatch_gemm is that of a bare product")
    layer, gemm = _layer(ctx.layer), torch.ops.epmoe.grouped_gemm
    with telling(layer, _C.OP_COMBINE, ctx.buffer, plan):
        offsets, d_out = _offsets(layer, plan), d_out.contiguous()
        d_gemm_weight = gemm(d_out, rows, offsets, None, None, WGRAD, 0, False) if ctx.needs_input_grad[3] else None
        d_rows = gemm(d_out, gemm_weight, offsets, None, None, DGRAD, 0, False)
        scalar = d_row_weight.contiguous() if ctx.has_weight else None
    num_tokens = ctx.num_tokens * layer._copies
    dx, d_weight = torch.ops.epmoe.combine(d_rows, None, scalar, plan, recv, ctx.layer, ctx.buffer, num_tokens)
    return layer._by_token(dx), d_weight if ctx.has_weight else None, None, d_gemm_weight, *[None] * 9


def _save_gemm_combine(ctx, inputs, output):
    a, gemm_weight, _, row_weight, plan, _, ctx.layer, ctx.buffer, *_ = inputs
    ctx.has_weight, ctx.num_rows = row_weight is not None, a.shape[0]
    ctx.save_for_backward(plan, a, gemm_weight, *((output[1], row_weight) if ctx.has_weight else ()))


def _gemm_combine_backward(ctx, d_out, _):
    plan, a, gemm_weight, *weighted = ctx.saved_tensors
    layer, gemm, d_weight = _layer(ctx.layer), torch.ops.epmoe.grouped_gemm, None
    with telling(layer, _C.OP_DISPATCH, ctx.buffer, plan):
        d_out = d_out.contiguous()
    g, _, _ = torch.ops.epmoe.dispatch(d_out, None, plan, ctx.layer, ctx.buffer, ctx.num_rows)
    # Without a gradient of the rows nothing of the layer's follows in this backward.
    with telling(layer, _C.OP_COMBINE, ctx.buffer, plan) if ctx.needs_input_grad[0] else contextlib.nullcontext():
        if ctx.has_weight:
            rows, row_weight = weighted
            d_weight = row_dots(g, rows) if ctx.needs_input_grad[3] else None
            g = (g * row_weight[:, None]).to(g.dtype)
        offsets = _offsets(layer, plan)
        da = gemm(g, gemm_weight, offsets, None, None, DGRAD, 0, False) if ctx.needs_input_grad[0] else None
        d_gemm_weight = gemm(g, a, offsets, None, None, WGRAD, 0, False) if ctx.needs_input_grad[1] else None
    return da, d_gemm_weight, None, d_weight, *[None] * 7


torch.library.register_autograd("epmoe::dispatch_gemm", _dispatch_gemm_backward, setup_context=_save_dispatch_gemm, lib=_lib)
torch.library.register_autograd("epmoe::gemm_combine", _gemm_combine_backward, setup_context=_save_gemm_combine, lib=_lib)
