"""EPMoE: a Mixture-of-Experts layer whose experts are spread over the ranks; a drop-in for a model's own."""

import math

import torch
from torch import nn

from .fused import EpAll2AllFusedOp
from .gemm import grouped_gemm
from .reference import activate


class EPMoE(nn.Module):
    """Experts of a Mixture-of-Experts layer, E/W of them on each rank.

    Args:
        hidden, inner, num_experts, topk: H, I, E, K.
        ep_group: ProcessGroup, DeviceMesh, World or None, see EPAll2AllLayer.
        activation: "swiglu", "gpt_oss" or "gelu"; reference.activate has the formulas.
        max_tokens: tokens per rank and call, at most.
        dtype, device: of parameters and tokens.
        capacity: None, or rows a rank can receive: no host read then (see EPAll2AllLayer).
        bias: with gate_up_proj_bias and down_proj_bias.
        enable_local_combine: sum at the expert's rank first; one row per (token, rank) crosses the link.
        layer: an EpAll2AllFusedOp, or EPAll2AllLayer, to share with other EPMoE modules of the same shapes.
        Further keywords go to EpAll2AllFusedOp, which says where moving and multiplying are one kernel each.

    Parameters, as in checkpoints: gate_up_proj [L, 2I, H] (for gelu [L, I, H]), down_proj [L, H, I]; gate rows
    first, then up rows (gpt_oss: interleaved).  They start uniform in +-1/sqrt(fan-in), as nn.Linear's do.
    copy.deepcopy copies them, and shares the communication layer; to save a model, save its state_dict().
    """

    def __init__(self, hidden, inner, num_experts, topk, ep_group=None, activation="swiglu", *, max_tokens=4096, dtype=torch.bfloat16,
                 device=None, capacity=None, bias=False, enable_local_combine=True, layer=None, **layer_options):
        super().__init__()
        activate(torch.zeros(1, 2), activation)  # a wrong name fails here
        if layer is None:
            layer = EpAll2AllFusedOp(ep_group, max_tokens, hidden, topk, num_tot_experts=num_experts, dtype=dtype, device=device,
                                     capacity=capacity, enable_local_combine=enable_local_combine, **layer_options)
        elif (layer.hidden, layer.topk * layer._copies, layer.num_experts, layer.dtype) != (hidden, topk, num_experts, dtype):
            raise ValueError("the shared layer has another hidden, topk, num_experts or dtype")
        self.layer, self.activation, self.last_layout = layer, activation, None
        local, wide, device = layer.num_local_experts, inner if activation == "gelu" else 2 * inner, layer.device
        self.gate_up_proj = nn.Parameter(torch.empty(local, wide, hidden, dtype=dtype, device=device))
        self.down_proj = nn.Parameter(torch.empty(local, hidden, inner, dtype=dtype, device=device))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(local, wide, dtype=dtype, device=device)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(local, hidden, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    def reset_parameters(self):
        """Uniform in +-1/sqrt(fan-in), each parameter."""
        for p, fan_in in ((self.gate_up_proj, self.gate_up_proj.shape[2]), (self.down_proj, self.down_proj.shape[2]),
                          (self.gate_up_proj_bias, self.gate_up_proj.shape[2]), (self.down_proj_bias, self.down_proj.shape[2])):
            if p is not None:
                nn.init.uniform_(p, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(self, x, topk_idx, topk_weights):
        """y [.., H] from x [.., H], expert indices [.., K] (int32 or int64; -1 and E are dropped) and weights [.., K].

        Differentiable in x, topk_weights and the parameters.  Errors: see EPAll2AllLayer.preprocess.
        """
        shape = x.shape
        x = x.reshape(-1, shape[-1]).contiguous()
        topk_idx = topk_idx.reshape(-1, topk_idx.shape[-1]).contiguous()
        topk_weights = topk_weights.reshape(-1, topk_weights.shape[-1]).float().contiguous()
        if not isinstance(self.layer, EpAll2AllFusedOp):
            return self._one_after_the_other(x, topk_idx, topk_weights).reshape(shape)
        h, row_weight, self.last_layout = self.layer.mega_dispatch_group_gemm(
            x, topk_idx, weight=topk_weights, gemm_weight=self.gate_up_proj, bias=self.gate_up_proj_bias, activation=self.activation)
        y = self.layer.mega_group_gemm_combine(h, self.down_proj, self.last_layout, row_weight, bias=self.down_proj_bias)
        return y.reshape(shape)

    def _one_after_the_other(self, x, topk_idx, topk_weights):
        rows, row_weight, layout = self.layer.dispatch(x, topk_idx, topk_weights)
        offsets = layout.expert_offsets
        h = grouped_gemm(rows, self.gate_up_proj, offsets=offsets, bias=self.gate_up_proj_bias, activation=self.activation)
        h = grouped_gemm(h, self.down_proj, offsets=offsets, bias=self.down_proj_bias)
        self.last_layout = layout
        return self.layer.combine(h, layout, row_weight)

    def extra_repr(self):
        layer = self.layer
        return (f"hidden={layer.hidden}, num_experts={layer.num_experts}, local_experts={layer.num_local_experts}, topk={layer.topk}, "
                f"activation={self.activation}, rank={layer.rank} of {layer.world_size}")

    def finalize(self):
        """Give the layer's communication memory back.  Collective."""
        self.layer.finalize()
