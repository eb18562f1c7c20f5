"""EpAll2AllFusedOp with weights in FP8: dispatch and GEMM in one launch.  There are no gradients."""

import torch

from . import _C, ops
from .autograd import check_mode
from .direct import implement, is_watched, requires_grad
from .fp8 import quantize_fp8
from .fused_parts import fuses_fp8
from .gemm import FP8_BLOCK, GATED, aligned, as_kernel, check_activation, grouped_gemm
from .layer_parts import cast

ops.lib.define("dispatch_gemm_fp8(Tensor x, Tensor x_scale, Tensor? weight, Tensor plan, Tensor gemm_weight, "
               "Tensor gemm_scale, Tensor? bias, str layer, int buffer, SymInt num_rows, int activation, "
               "float alpha=0, float limit=0, Tensor? after=None) -> (Tensor, Tensor, Tensor)")


def _run(x, x_scale, weight, plan, gemm_weight, gemm_scale, bias, layer, buffer, num_rows, *activation):
    layer = ops.layer_of(layer)
    if num_rows < 0:
        num_rows = layer._num_rows(plan, buffer)
    out, row_weight, recv = layer._dispatch_gemm_fp8(aligned(x), x_scale, aligned(weight), plan,
                                                     (gemm_weight, gemm_scale, bias), buffer, num_rows,
                                                     activation[:3])
    return out, ops.absent(x_scale) if row_weight is None else row_weight, recv


implement(ops.lib, "dispatch_gemm_fp8", _run)


@ops.register_fake("dispatch_gemm_fp8")
def _(x, x_scale, weight, plan, gemm_weight, gemm_scale, bias, layer, buffer, num_rows, *activation, **__):
    layer, activation = ops.layer_of(layer), activation[0]
    num_rows = ops.rows_to_trace(layer, num_rows)
    row_weight = ops.absent(x_scale) if weight is None else x_scale.new_empty(num_rows)
    columns = gemm_weight.shape[1] // (2 if activation in GATED else 1)
    out = x_scale.new_empty(num_rows, columns, dtype=layer.dtype)
    return out, row_weight, plan.new_empty(layer._recv_words)


def _scales_shape(gemm_weight):
    """Return the shape of the scales of weights [L, N, K], with one for each block."""
    return [gemm_weight.shape[0], *(-(-size // FP8_BLOCK) for size in gemm_weight.shape[1:])]


class FusedFp8:
    """The part of EpAll2AllFusedOp for weights in FP8."""

    def _is_fused_fp8(self, gemm_weight, activation):
        """Whether the fused kernel exists for these weights [L, N, K] on this device, and is to be used."""
        columns = gemm_weight.shape[1]
        number = as_kernel(activation)[0]
        # gates in front of ups: a tile has as many of both, and each 64 of them must have one scale
        fits = columns % FP8_BLOCK == 0 or number not in GATED or number == as_kernel("gpt_oss")[0]
        is_best = not self._chooses or fuses_fp8(self.max_tokens, columns)
        return (self.fused and is_best and self._has_kernels and fits and columns % 16 == 0
                and self.hidden % 16 == 0 and self.dtype in (torch.bfloat16, torch.float16))

    def _check_fp8(self, gemm_weight, gemm_scale, bias, activation):
        """Check the arguments of the product."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"dtype {self.dtype} with weights in FP8: the layer must be of torch.bfloat16 or "
                            f"torch.float16")
        if self.hidden % 16:
            raise ValueError(f"hidden {self.hidden} with weights in FP8: must be a multiple of 16")
        self._check_tensor("gemm_weight", gemm_weight, torch.float8_e4m3fn,
                           (self.num_local_experts, None, self.hidden))
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

    def _mega_dispatch_fp8(self, input, exp_indices, layout, product, weight, full_scatter_indices, buffer):
        """mega_dispatch_group_gemm in FP8.  product: gemm_weight, gemm_scale, bias and activation."""
        gemm_weight, gemm_scale, bias, activation = product
        op = _C.OP_DISPATCH_GEMM_FP8 if self.fused else _C.OP_DISPATCH_FP8
        try:
            check_mode(input, weight, gemm_weight, bias)
            leaves = (input, weight, gemm_weight, gemm_scale, bias)
            if requires_grad(*(t for t in leaves if isinstance(t, torch.Tensor))):
                raise RuntimeError("dispatch + GEMM in FP8 has no gradients: call it under torch.no_grad(), "
                                   "or use weights in 16 bits for training")
            self._check_fp8(*product)
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
        try:
            x, x_scale = quantize_fp8(input.contiguous())
            shape = _scales_shape(gemm_weight)
            if list(gemm_scale.shape) != shape:
                gemm_scale = gemm_scale.reshape(-1, 1, 1).expand(shape)
            weights = (gemm_weight.contiguous(), gemm_scale.contiguous(),
                       None if bias is None else bias.to(self.dtype).contiguous())
        except Exception as error:
            self._refuse(op, error, layout.buffer)
        if is_watched():
            h, row_weight, layout.recv = torch.ops.epmoe.dispatch_gemm_fp8(
                x, x_scale, weight, layout.plan, *weights, self.id, layout.buffer, num_rows,
                *as_kernel(activation))
            row_weight = None if weight is None else row_weight
        else:
            num_rows = self._num_rows(layout.plan, layout.buffer) if num_rows < 0 else num_rows
            h, row_weight, layout.recv = self._dispatch_gemm_fp8(
                x, x_scale, weight, layout.plan, weights, layout.buffer, num_rows, as_kernel(activation))
        return h, cast(row_weight, self.weight_dtype), layout

    def _dispatch_gemm_fp8(self, x, x_scale, weight, plan, weights, buffer, num_rows, activation):
        """Allocate the outputs and call the module.  Returns the products, the row weights and recv.

        weights: gemm_weight, its scale for each block, and its bias.  activation: as as_kernel returns it.
        """
        try:
            number, alpha, limit = (*activation, 0.0, 0.0)[:3]
            rows, row_scale, row_weight, recv = self._fp8_outputs(weight, num_rows, by_row=False)
            columns = weights[0].shape[1] // (2 if number in GATED else 1)
            out = torch.empty((num_rows, columns), dtype=self.dtype, device=self.device)
            gemm_weight, gemm_scale, bias = map(aligned, weights)
        except Exception as error:
            self._refuse(_C.OP_DISPATCH_GEMM_FP8, error, buffer)
        # DLPack of some versions of torch has no FP8, so the module gets bytes
        _C.layer_dispatch_gemm_fp8(self._c, buffer, (
            x.view(torch.uint8), x_scale, weight, plan, rows, row_scale, row_weight, recv,
            gemm_weight.view(torch.uint8), gemm_scale, bias, out, number, alpha, limit, self._move_sms,
            self._tail_sms, not self.block_wise_barrier, self._copies))
        return out, row_weight, recv
