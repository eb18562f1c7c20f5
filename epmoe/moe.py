"""EPMoE: a Mixture-of-Experts layer whose experts are spread over the ranks; a drop-in for a model's own."""

import inspect
import math

import torch
from torch import nn

from . import _C
from .errors import EpMismatch
from .fused import EpAll2AllFusedOp
from .gemm import grouped_gemm
from .layer import EPAll2AllLayer
from .reference import activate


def _flat(name, t, size):
    """[.., size] as [T, size], contiguous."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(t).__name__}")
    if t.is_nested or t.layout is not torch.strided:
        raise ValueError(f"{name}: wanted a dense tensor, got one of layout {'nested' if t.is_nested else t.layout}")
    if t.dim() and torch.compiler.is_compiling():  # the layer looks at it when it runs: a compiler cannot tell the other ranks
        size = t.shape[-1]
    if t.dim() == 0 or t.shape[-1] != size:
        raise ValueError(f"{name}: wanted shape [.., {size}], got {list(t.shape)}")
    return t.reshape(-1, size).contiguous()


def _of_shape(t, shape):
    """t [T, H], which nobody else has, as [.., H]; no view for autograd: FSDP's hooks do not live through `y += ...` on one."""
    return torch.ops.aten._unsafe_view(t, (*shape[:-1], t.shape[-1]))


_LAYER_OPTIONS = {name for kind in (EpAll2AllFusedOp, EPAll2AllLayer) for name in inspect.signature(kind).parameters} - {
    "ep_group", "max_tokens", "hidden", "topk", "num_tot_experts", "dtype", "capacity", "enable_local_combine", "device", "options"}


class EPMoE(nn.Module):
    """Experts of a Mixture-of-Experts layer, E/W of them on each rank.

    Args:
        hidden, inner, num_experts, topk: H, I, E, K.
        ep_group: ProcessGroup, DeviceMesh, World or None, see EPAll2AllLayer.
        activation: "swiglu", "gpt_oss", GptOss(alpha, limit) or "gelu"; reference.activate has the formulas.
        max_tokens: tokens per rank and call, at most.
        dtype, device: of parameters and tokens.
        capacity: None, or rows a rank can receive: no host read then (see EPAll2AllLayer).
        bias: with gate_up_proj_bias and down_proj_bias.
        enable_local_combine: sum at the expert's rank first; one row per (token, rank) crosses the link.
        layer: an EpAll2AllFusedOp, or EPAll2AllLayer, to share with other EPMoE modules of the same shapes.  Its ranks, device, max_tokens,
            capacity and enable_local_combine are those of this module then.
        Further keywords go to EpAll2AllFusedOp, which says where moving and multiplying are one kernel each; none with a layer.

    Creation is collective, except with a layer.  Errors: those of EPAll2AllLayer.

    Parameters, as checkpoints have them, out by in: gate_up_proj [L, 2I, H] (for gelu [L, I, H]), down_proj [L, H, I]; gate rows first,
    then up rows (gpt_oss: interleaved).  Where a checkpoint has them in by out, as transformers' GptOssExperts ([E, H, 2I] and [E, I, H]:
    with H = I nothing would notice), load them with .transpose(1, 2).  Of [E, ...] in a checkpoint a rank takes rows rank * L to (rank +
    1) * L, and its state_dict() has these only: save it on every rank, to a file of its own.  torch.distributed.checkpoint takes plain
    tensors for copies of each other and keeps one rank's: wrap them (README, "In a model").  copy.deepcopy copies them, and shares the
    communication layer.  They start uniform in +-1/sqrt(fan-in), as nn.Linear's do, each expert otherwise; with the same seed on all
    ranks, as in one process.  They are on the layer's device from the start, also inside of torch.device("meta").

    Ranks have different experts, so nothing may make them alike or average their gradients: leave them out of
    DistributedDataParallel (README, "In a model").  Their gradients are sums over the tokens of all ranks: for a loss that is the
    mean over ranks, divide by W.  Under autocast x is cast to the layer's dtype, which is the parameters' for good.
    """

    def __init__(self, hidden, inner, num_experts, topk, ep_group=None, activation="swiglu", *, max_tokens=4096, dtype=torch.bfloat16,
                 device=None, capacity=None, bias=False, enable_local_combine=True, layer=None, **layer_options):
        super().__init__()
        if layer is not None and layer_options:
            raise TypeError(f"{', '.join(layer_options)}: options of a layer to be made, but there is one already, layer=")
        heap, timeout_s = layer_options.get("heap"), layer_options.get("timeout_s")
        world = EpAll2AllFusedOp._world_of(ep_group, heap, timeout_s) if layer is None else None
        try:
            if unknown := sorted(layer_options.keys() - _LAYER_OPTIONS):
                raise TypeError(f"{', '.join(unknown)}: no option of EPMoE, nor of EpAll2AllFusedOp")
            activate(torch.zeros(1, 2), activation)  # a wrong name fails here
            inner = int(inner)
            if inner < 1:
                raise ValueError(f"inner {inner}: must be positive")
        except Exception as error:  # the other ranks are making the layer
            if world is not None:
                EpAll2AllFusedOp._refuse_layer(world, heap, error)
            raise
        if layer is None:
            layer = EpAll2AllFusedOp(ep_group, max_tokens, hidden, topk, num_tot_experts=num_experts, dtype=dtype, device=device,
                                     capacity=capacity, enable_local_combine=enable_local_combine, **layer_options)
            self._agree(layer, f"inner {inner}, activation {activation!r}, bias {bool(bias)}")
        else:
            for name, got, want in (("hidden", hidden, layer.hidden), ("topk", topk, layer.topk * layer._copies),
                                    ("num_experts", num_experts, layer.num_experts), ("dtype", dtype, layer.dtype)):
                if got != want:
                    raise ValueError(f"{name} {got}, but the shared layer has {want}")
        self.layer, self.activation, self.last_layout = layer, activation, None
        local, wide, device = layer.num_local_experts, inner if activation == "gelu" else 2 * inner, layer.device
        self.gate_up_proj = nn.Parameter(torch.empty(local, wide, hidden, dtype=dtype, device=device))
        self.down_proj = nn.Parameter(torch.empty(local, hidden, inner, dtype=dtype, device=device))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(local, wide, dtype=dtype, device=device)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(local, hidden, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    @staticmethod
    def _agree(layer, mine):
        """What the layer does not know of: with other experts elsewhere tokens would come home wrong, and nobody would say so."""
        said = [text.decode().rstrip() for text in layer.world.exchange(mine.encode().ljust(256))]
        for rank, its in enumerate(said):
            if its != said[0]:
                layer.finalize()
                raise EpMismatch(f"ranks disagree: rank {rank} makes experts of {its}; rank 0 of {said[0]}")

    def reset_parameters(self):
        """Uniform in +-1/sqrt(fan-in), each parameter; from one number of torch's generator, and the expert's number."""
        seed, first = int(torch.randint(1 << 40, (), device="cpu")), self.layer.rank * self.layer.num_local_experts
        generator = torch.Generator(self.layer.device)
        with torch.no_grad():
            for e in range(self.layer.num_local_experts):
                generator.manual_seed(seed + first + e)
                for p, fan_in in ((self.gate_up_proj, self.gate_up_proj.shape[2]), (self.down_proj, self.down_proj.shape[2]),
                                  (self.gate_up_proj_bias, self.gate_up_proj.shape[2]), (self.down_proj_bias, self.down_proj.shape[2])):
                    if p is not None:
                        p[e].uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=generator)

    def forward(self, x, topk_idx, topk_weights):
        """y from x, as a Mixture-of-Experts layer.

        Args:
            x: [.., H] of the layer's dtype; under autocast of any floating-point dtype.
            topk_idx: [.., K] int32 or int64; -1 and E are dropped.
            topk_weights: [.., K] of a floating-point dtype; applied as float32.
            None of them has to be contiguous.  As many tokens in each, at most max_tokens.
            x and topk_weights want gradients on all ranks or on none, also where a rank has no tokens, and so do the parameters: else
            EpMismatch, for backward would not be the same call.
        Returns: [.., H] of the layer's dtype.
        Differentiable in x, topk_weights and the parameters.  Errors: those of EPAll2AllLayer.preprocess, dispatch and combine.
        last_layout is then that of this call, but for compiled ones.
        """
        topk = self.layer.topk * self.layer._copies
        try:
            tokens, topk_idx = _flat("x", x, self.layer.hidden), _flat("topk_idx", topk_idx, topk)
            topk_weights = _flat("topk_weights", topk_weights, topk)
            if torch.is_autocast_enabled(self.layer.device.type):
                tokens = tokens.to(self.layer.dtype)
            if self.gate_up_proj.dtype != self.layer.dtype:
                raise TypeError(f"the parameters are {self.gate_up_proj.dtype} now, but the layer was made for {self.layer.dtype}: give dtype= at construction")
        except Exception as error:  # the other ranks are planning
            self.layer._refuse(_C.OP_PLAN, error, 0)
        if not isinstance(self.layer, EpAll2AllFusedOp):
            return _of_shape(self._one_after_the_other(tokens, topk_idx, topk_weights), x.shape)
        h, row_weight, layout = self.layer.mega_dispatch_group_gemm(
            tokens, topk_idx, weight=topk_weights, gemm_weight=self.gate_up_proj, bias=self.gate_up_proj_bias, activation=self.activation)
        self._keep(layout)
        return _of_shape(self.layer.mega_group_gemm_combine(h, self.down_proj, layout, row_weight, bias=self.down_proj_bias), x.shape)

    def _keep(self, layout):
        if not torch.compiler.is_compiling():  # a compiled part that is computed again, as in checkpointing, may change nothing outside
            self.last_layout = layout

    def _one_after_the_other(self, x, topk_idx, topk_weights):
        rows, row_weight, layout = self.layer.dispatch(x, topk_idx, topk_weights)
        offsets = layout.expert_offsets
        try:
            h = grouped_gemm(rows, self.gate_up_proj, offsets=offsets, bias=self.gate_up_proj_bias, activation=self.activation)
            h = grouped_gemm(h, self.down_proj, offsets=offsets, bias=self.down_proj_bias)
        except Exception as error:
            self.layer._refuse(_C.OP_COMBINE, error, layout.buffer)
        self._keep(layout)
        return self.layer.combine(h, layout, row_weight)

    def extra_repr(self):
        layer = self.layer
        return (f"hidden={layer.hidden}, num_experts={layer.num_experts}, local_experts={layer.num_local_experts}, topk={layer.topk * layer._copies}, "
                f"activation={self.activation}, rank={layer.rank} of {layer.world_size}")

    def finalize(self):
        """Give the layer's communication memory back.  Collective."""
        self.layer.finalize()
