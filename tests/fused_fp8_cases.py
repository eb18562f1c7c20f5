"""The fused operator with weights in FP8, for tests: on the CPU, too, and counting its launches."""

import torch

import epmoe
from epmoe.a2a.ops import expert_offsets
from epmoe.gemm.activations import activation_of

TOO_MANY = 1 << 55  # no memory holds as many


class StagedOp(epmoe.EpAll2AllFusedOp):
    """An EpAll2AllFusedOp that takes the fused path on the CPU, too, and counts its launches."""

    num_launches = 0

    def _check_options(self):
        super()._check_options()
        self._has_fused_fp8 = self._has_fused_fp8 or self.device.type == "cpu"

    def _dispatch_gemm(self, x, weight, plan, gemm_weight, bias, buffer, num_rows, activation,
                       with_grad=False, x_scale=None, gemm_scale=None):
        self.num_launches += x_scale is not None
        if self.device.type == "cuda" or x_scale is None:
            return super()._dispatch_gemm(x, weight, plan, gemm_weight, bias, buffer, num_rows, activation,
                                          with_grad, x_scale, gemm_scale)
        q, x_scale = (t.repeat_interleave(self._copies, 0) for t in (x.view(torch.uint8), x_scale))
        rows, row_weight, recv, scales = self._dispatch(q.view(x.dtype), weight, plan, buffer, num_rows,
                                                        x_scale=x_scale)
        offsets = expert_offsets(self, plan)
        out = epmoe.grouped_gemm(rows, gemm_weight, offsets=offsets, bias=bias, a_scale=scales,
                                 b_scale=gemm_scale, out_dtype=self.dtype,
                                 activation=activation_of(activation))
        out[offsets[-1]:] = torch.nan
        return out, rows, row_weight, recv, scales

    def _gemm_combine(self, a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens, with_grad=False,
                      a_scale=None, gemm_scale=None, row_scalar=None):
        self.num_launches += a_scale is not None
        # Too many tokens are an error before the launch.
        if self.device.type == "cuda" or a_scale is None or num_tokens == TOO_MANY:
            return super()._gemm_combine(a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens,
                                         with_grad, a_scale, gemm_scale, row_scalar)
        offsets = expert_offsets(self, plan)
        rows = epmoe.grouped_gemm(a, gemm_weight, offsets=offsets, bias=bias, a_scale=a_scale,
                                  b_scale=gemm_scale, out_dtype=self.dtype)
        rows[offsets[-1]:] = torch.nan
        out, scalar = self._combine(rows, row_weight, row_scalar, plan, recv, buffer, num_tokens)
        return out, rows, scalar


def product_of(t, scales="blocks", name="w1"):
    """gemm_weight and gemm_scale of a rank."""
    q, scale = epmoe.quantize_fp8_weight(getattr(t, name))
    if scales == "experts":
        scale = scale.amax((1, 2))
    return {"gemm_weight": q, "gemm_scale": scale[:1, 0, 0] if scales == "one" else scale}


def second_apart(op, case, t, scales, h, row_weight, layout):
    """What mega_group_gemm_combine returns, from separate stages."""
    offsets, product = layout.expert_offsets, product_of(t, scales, "w2")
    q, q_scale = epmoe.quantize_fp8(h, num_rows=offsets[-1:])
    rows = epmoe.grouped_gemm(q, product["gemm_weight"], offsets=offsets, bias=t.b2, a_scale=q_scale,
                              b_scale=product["gemm_scale"], out_dtype=case.dtype)
    return op.combine(rows, layout, row_weight)


def call(op, case, t, scales="blocks", apart=False, **options):
    """The results of both operations, without the rows of no token, and a sum of numbered rows.

    apart: call the stages of the second operation instead.
    """
    idx = None if "layout" in options else t.idx
    with torch.no_grad():
        h, row_weight, layout = op.mega_dispatch_group_gemm(
            t.x, idx, weight=t.weight, bias=t.b1, activation=case.activation, **product_of(t, scales),
            **options)
        m = layout.num_rows
        numbered = torch.arange(len(h), device=op.device).remainder(61).to(case.dtype)
        sums = op.combine(numbered[:, None].expand(-1, case.hidden).contiguous(), layout)
        if apart:
            y = second_apart(op, case, t, scales, h, row_weight, layout)
        else:
            y = op.mega_group_gemm_combine(h, layout=layout, weight=row_weight, bias=t.b2,
                                           **product_of(t, scales, "w2"))
    return [h[:m], h[:m] if row_weight is None else row_weight[:m], sums, y]
