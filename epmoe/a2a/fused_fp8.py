"""EpAll2AllFusedOp with weights in FP8: the two megakernels.  There are no gradients."""

import torch

from .. import _C
from ..comm.refusals import reported_after_plan, reporting
from ..gemm.grouped import FP8_BLOCK, GATED, aligned, as_kernel, check_activation, grouped_gemm
from ..gemm.quantize import quantize_fp8
from ..torch_modes import check_mode, implement, is_watched, requires_grad
from . import ops
from .fused_parts import fuses_fp8
from .layer_parts import cast

ops.lib.define("dispatch_gemm_fp8(Tensor x, Tensor x_scale, Tensor? weight, Tensor plan, Tensor gemm_weight, "
               "Tensor gemm_scale, Tensor? bias, str layer, int buffer, SymInt num_rows, int activation, "
               "float alpha=0, float limit=0, Tensor? after=None) -> (Tensor, Tensor, Tensor)")

ops.lib.define("gemm_combine_fp8(Tensor a, Tensor a_scale, Tensor gemm_weight, Tensor gemm_scale, "
               "Tensor? bias, Tensor? row_weight, Tensor plan, Tensor recv, str layer, int buffer, "
               "SymInt num_tokens, Tensor? after=None) -> Tensor")


def _run(x, x_scale, weight, plan, gemm_weight, gemm_scale, bias, layer, buffer, num_rows, *activation):
    weights = gemm_weight, gemm_scale, bias
    layer = ops.layer_of(layer)
    with reporting(layer, _C.OP_DISPATCH_GEMM_FP8, buffer, plan, num_rows < 0):
        out, row_weight, recv = layer._dispatch_gemm_fp8(
            aligned(x), x_scale, aligned(weight), plan, weights, buffer, num_rows, activation[:3])
    return out, ops.absent(x_scale) if row_weight is None else row_weight, recv


def _run_gemm_combine(a, a_scale, gemm_weight, gemm_scale, bias, row_weight, plan, recv, layer, buffer,
                      num_tokens, after=None):
    weights = gemm_weight, gemm_scale, bias
    layer = ops.layer_of(layer)
    with reporting(layer, _C.OP_GEMM_COMBINE_FP8, buffer, plan):
        return layer._gemm_combine_fp8(a, a_scale, weights, row_weight, plan, recv, buffer, num_tokens)


implement(ops.lib, "dispatch_gemm_fp8", _run)
implement(ops.lib, "gemm_combine_fp8", _run_gemm_combine)


@ops.register_fake("dispatch_gemm_fp8")
def _(x, x_scale, weight, plan, gemm_weight, gemm_scale, bias, layer, buffer, num_rows, *activation, **__):
    layer, activation = ops.layer_of(layer), activation[0]
    num_rows = ops.rows_to_trace(layer, num_rows)
    row_weight = ops.absent(x_scale) if weight is None else x_scale.new_empty(num_rows)
    columns = gemm_weight.shape[1] // (2 if activation in GATED else 1)
    out = x_scale.new_empty(num_rows, columns, dtype=layer.dtype)
    return out, row_weight, plan.new_empty(layer._recv_words)


@ops.register_fake("gemm_combine_fp8")
def _(a, a_scale, gemm_weight, gemm_scale, bias, row_weight, plan, recv, layer, buffer, num_tokens,
      after=None):
    return a_scale.new_empty(num_tokens, gemm_weight.shape[1], dtype=ops.layer_of(layer).dtype)


def _scales_shape(gemm_weight):
    """Return the shape of the scales of weights [L, N, K], with one for each block."""
    return [gemm_weight.shape[0], *(-(-size // FP8_BLOCK) for size in gemm_weight.shape[1:])]


def check_no_gradients(name, *leaves):
    """Raise RuntimeError if a gradient of one of these arguments of a call is wanted."""
    if requires_grad(*(t for t in leaves if isinstance(t, torch.Tensor))):
        raise RuntimeError(f"{name} in FP8 has no gradients: call it under torch.no_grad(), or use weights "
                           f"in 16 bits for training")


class FusedFp8:
    """The part of EpAll2AllFusedOp for weights in FP8."""

    def _has_fp8_kernels(self, gemm_weight):
        """Whether the fused kernels exist for weights [L, N, K] on this device, and are wanted."""
        return (self.fused and self._has_fused_fp8 and self.dtype in (torch.bfloat16, torch.float16)
                and self.hidden % 16 == 0 and all(size % 16 == 0 for size in gemm_weight.shape[1:]))

    def _is_fused_fp8(self, gemm_weight, activation):
        """Whether dispatch and the product with these weights [L, N, H] are to be one launch."""
        columns = gemm_weight.shape[1]
        number = as_kernel(activation)[0]
        # gates in front of ups: a tile has as many of both, and each 64 of them must have one scale
        fits = columns % FP8_BLOCK == 0 or number not in GATED or number == as_kernel("gpt_oss")[0]
        is_best = not self._chooses or fuses_fp8(self.max_tokens, columns)
        return is_best and fits and self._has_fp8_kernels(gemm_weight)

    def _check_fp8(self, rows, columns, gemm_weight, gemm_scale, bias, activation=None):
        """Check the arguments of a product with weights [L, rows, columns], where None is any size."""
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

    def _fp8_weights(self, gemm_weight, gemm_scale, bias):
        """Return weights, a scale for each of their blocks, and the bias, as the fused kernels take them."""
        shape = _scales_shape(gemm_weight)
        if list(gemm_scale.shape) != shape:
            gemm_scale = gemm_scale.reshape(-1, 1, 1).expand(shape)
        return (gemm_weight.contiguous(), gemm_scale.contiguous(),
                None if bias is None else bias.to(self.dtype).contiguous())

    def _mega_dispatch_fp8(self, input, exp_indices, layout, product, weight, full_scatter_indices, buffer):
        """mega_dispatch_group_gemm in FP8.  product: gemm_weight, gemm_scale, bias and activation."""
        gemm_weight, gemm_scale, bias, activation = product
        op = _C.OP_DISPATCH_GEMM_FP8 if self.fused else _C.OP_DISPATCH_FP8
        try:
            check_mode(input, weight, gemm_weight, bias)
            check_no_gradients("dispatch + GEMM", input, weight, *product[:3])
            self._check_fp8(None, self.hidden, *product)
            fused = self._is_fused_fp8(gemm_weight, activation)
            self._check_tensor("input", input, self.dtype, (None, self.hidden))
        except Exception as error:
            self._refuse(_C.OP_PLAN if layout is None else op, error, self._buffer_of(layout, buffer))
        if not fused:
            rows, scales, row_weight, layout = self.dispatch_fp8(input, exp_indices, weight,
                                                                 full_scatter_indices, layout=layout,
                                                                 buffer=buffer)
            try:
                h = grouped_gemm(rows, gemm_weight, offsets=layout.expert_offsets, bias=bias,
                                 activation=activation, a_scale=scales, b_scale=gemm_scale,
                                 out_dtype=self.dtype)
            except Exception as error:  # no memory: the next operation of the other ranks is combine
                self._refuse(_C.OP_COMBINE, error, layout.buffer)
            return h, row_weight, layout
        layout, weight, num_rows = self._prepare(op, input, exp_indices, weight, full_scatter_indices, layout,
                                                 buffer)
        return self._mega_fp8_planned(layout, input, weight, product, num_rows)

    @reported_after_plan(_C.OP_DISPATCH_GEMM_FP8)
    def _mega_fp8_planned(self, layout, input, weight, product, num_rows):
        x, x_scale = quantize_fp8(input.contiguous())
        weights, activation = self._fp8_weights(*product[:3]), product[3]
        if is_watched():
            h, row_weight, recv = torch.ops.epmoe.dispatch_gemm_fp8(
                x, x_scale, weight, layout.plan, *weights, self.id, layout.buffer, num_rows,
                *as_kernel(activation))
            row_weight = None if weight is None else row_weight
        else:
            h, row_weight, recv = self._dispatch_gemm_fp8(x, x_scale, weight, layout.plan, weights,
                                                          layout.buffer, num_rows, as_kernel(activation))
        self._set_dispatched(layout, h, recv)
        return h, cast(row_weight, self.weight_dtype), layout

    def _dispatch_gemm_fp8(self, x, x_scale, weight, plan, weights, buffer, num_rows, activation):
        """Allocate the outputs and call the module.  Returns the products, the row weights and recv.

        weights: gemm_weight, its scale for each block, and its bias.  activation: as as_kernel returns it.
        """
        number, alpha, limit = (*activation, 0.0, 0.0)[:3]
        columns = weights[0].shape[1] // (2 if number in GATED else 1)
        x = x.view(torch.uint8)  # DLPack of some versions of torch has no FP8, so the module gets bytes

        def make(n):
            rows, row_scale, row_weight, recv = self._fp8_outputs(weight, n, by_row=False)
            gemm_weight, gemm_scale, bias = map(aligned, weights)
            return ([row_weight, self._empty(n, columns)],
                    [rows, row_scale, recv, gemm_weight.view(torch.uint8), gemm_scale, bias])

        def launch(outputs, others, awaits_rows):
            (row_weight, out), (rows, row_scale, *others) = outputs, others
            return _C.layer_dispatch_gemm_fp8(self._c, buffer, (
                x, x_scale, weight, plan, rows, row_scale, row_weight, *others, out, number, alpha, limit,
                self._move_sms, self._tail_sms, not self.block_wise_barrier, self._copies, awaits_rows))

        call = plan, buffer, x.shape[0]
        (row_weight, out), others = self._run_dispatch(call, num_rows, make, launch)
        return out, row_weight, others[2]

    def _mega_combine_fp8(self, gemm_input, layout, product, weight):
        """mega_group_gemm_combine in FP8.  product: gemm_weight, gemm_scale and bias."""
        gemm_weight, gemm_scale, bias = product
        fused = False
        try:
            check_mode(gemm_input, weight, gemm_weight, bias)
            check_no_gradients("GEMM + combine", gemm_input, weight, *product)
            self._check_dispatched(layout)
            self._check_fp8(self.hidden, None, *product)
            fused = self._has_fp8_kernels(gemm_weight)
            weight = self._check_gemm_input(gemm_input, gemm_weight, layout, weight)
            offsets = layout.expert_offsets
            rows, scales = quantize_fp8(gemm_input, num_rows=offsets[-1:])
            if fused:
                weights = self._fp8_weights(*product)
            else:
                rows = grouped_gemm(rows, gemm_weight, offsets=offsets, bias=bias, a_scale=scales,
                                    b_scale=gemm_scale, out_dtype=self.dtype)
        except Exception as error:
            self._refuse(_C.OP_GEMM_COMBINE_FP8 if fused else _C.OP_COMBINE, error, self._buffer_of(layout))
        if not fused:
            return self.combine(rows, layout, weight)
        return self._by_token(self._combine_fp8_checked(layout, rows, scales, weights, weight))

    @reported_after_plan(_C.OP_GEMM_COMBINE_FP8)
    def _combine_fp8_checked(self, layout, rows, scales, weights, weight):
        if is_watched():
            return torch.ops.epmoe.gemm_combine_fp8(rows, scales, *weights, weight, layout.plan, layout.recv,
                                                    self.id, layout.buffer, layout.num_tokens)
        return self._gemm_combine_fp8(rows, scales, weights, weight, layout.plan, layout.recv, layout.buffer,
                                      layout.num_tokens)

    def _gemm_combine_fp8(self, a, a_scale, weights, row_weight, plan, recv, buffer, num_tokens):
        """Allocate the outputs and call the module.  Returns the sums.

        weights: gemm_weight, its scale for each block, and its bias.
        """
        rows, out = self._empty(a.shape[0], self.hidden), self._empty(num_tokens, self.hidden)
        gemm_weight, gemm_scale, bias = map(aligned, weights)
        # DLPack of some versions of torch has no FP8, so the module gets bytes
        _C.layer_gemm_combine_fp8(self._c, buffer, (
            a.view(torch.uint8), a_scale, gemm_weight.view(torch.uint8), gemm_scale, bias, rows, row_weight,
            plan, recv, out, self._move_sms, self._reduce_sms, self.combine_order == "serial"))
        return out
