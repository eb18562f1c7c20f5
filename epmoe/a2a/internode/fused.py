"""EpAll2AllFusedOp over several nodes: rows cross the rail, the megakernels of the node do the rest."""

import torch

from ...comm import validation
from ...torch_modes import check_mode
from ..fused import EpAll2AllFusedOp
from ..fused_fp8 import check_no_gradients
from .layer import OverNodes


class FusedOverNodes(OverNodes, EpAll2AllFusedOp):
    """EpAll2AllFusedOp over several nodes: the megakernels work on the tokens that have arrived."""

    _team_class = EpAll2AllFusedOp

    def _take(self, team, max_tokens, num_experts):
        super()._take(team, max_tokens, num_experts)
        for name in ("fused", "token_saving", "token_sorting", "block_wise_barrier", "combine_order"):
            setattr(self, name, getattr(team, name))

    def _check_weights(self, name, leaves, rows, columns, product):
        """Check the product of a fused call, which is in FP8 where it has scales.

        leaves: the other tensors of the call.  product: gemm_weight [L, rows, columns], where None is any
        size, its scales or None, the bias and the activation.
        """
        gemm_weight, gemm_scale, bias, activation = product
        check_mode(*leaves, gemm_weight, bias)
        if gemm_scale is None:
            self._check_product(gemm_weight, rows, columns, bias, activation)
        else:
            check_no_gradients(name, *leaves, gemm_weight, gemm_scale, bias)
            self._check_fp8(rows, columns, *product)

    @torch._disable_dynamo
    def mega_dispatch_group_gemm(self, input, exp_indices=None, layout=None, gemm_weight=None, weight=None, *,
                                 bias=None, activation=None, full_scatter_indices=None, buffer=0,
                                 gemm_scale=None):
        """As EpAll2AllFusedOp's.  Between nodes tokens travel in the layer's dtype, also with gemm_scale."""
        try:
            self._check_weights("dispatch + GEMM", (input, weight), None, self.hidden,
                                (gemm_weight, gemm_scale, bias, activation))
        except Exception as error:
            self._meet(validation.PLAN if layout is None else validation.DISPATCH, error=error)
        layout, here, weight_here = self._send(input, exp_indices, weight, full_scatter_indices, layout,
                                               buffer, gemm_weight, bias)
        with self._ending():
            h, row_weight, layout.team = self.team_layer.mega_dispatch_group_gemm(
                here, None, layout.team, gemm_weight, weight_here, bias=bias, activation=activation,
                gemm_scale=gemm_scale)
        return h, row_weight, layout

    @torch._disable_dynamo
    def mega_group_gemm_combine(self, gemm_input, gemm_weight, layout, weight=None, *, bias=None,
                                gemm_scale=None):
        try:
            self._check_weights("GEMM + combine", (gemm_input, weight), self.hidden, None,
                                (gemm_weight, gemm_scale, bias, None))
            self._check_rows("gemm_input", gemm_input, gemm_weight.shape[2], weight, layout)
        except Exception as error:
            self._meet(validation.COMBINE, error=error)

        def combine():
            return self.team_layer.mega_group_gemm_combine(gemm_input, gemm_weight, layout.team, weight,
                                                           bias=bias, gemm_scale=gemm_scale)

        return self._return(layout, combine, weight, gemm_input, gemm_weight, bias)


EpAll2AllFusedOp._over_nodes = FusedOverNodes
