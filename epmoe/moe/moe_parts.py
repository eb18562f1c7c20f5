"""MoeParts: the private half of EPMoE: state dicts, refusals, and the experts one stage after the other."""

import math

import torch
from torch import nn

from .. import _C
from ..a2a.fused import EpAll2AllFusedOp
from ..gemm.grouped import grouped_gemm, is_transposed
from . import checkpoint as moe_load, experts as experts_ops, moe_fp8, shards, torch_hooks
from .parallel_parts import check_ddp
from .placement import ExpertMap
from .training import MoeTraining

_PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _check_strides(**weights):
    """Check what the layer would refuse, too, but under another name."""
    for name, t in weights.items():
        if not (t.is_contiguous() or t.dim() == 3 and is_transposed(t)):
            raise ValueError(f"{name} must be contiguous, or the view transpose(1, 2) of a contiguous "
                             f"tensor: call contiguous() on it")


class MoeParts(MoeTraining):
    """The private half of EPMoE."""

    _adopted = ()  # modules whose tensors belong to the experts, too

    @property
    def is_fp8(self):
        """Whether the weights are in FP8."""
        return self.weight_dtype == torch.float8_e4m3fn

    def _make_parameters(self, shapes, bias_shapes, bias):
        """Create the parameters, or set them to None.  shapes, bias_shapes: {name: shape}."""
        layer, options = self.layer, {"device": self.layer.device}
        for name, shape in (shapes | bias_shapes).items():
            dtype = self.weight_dtype if name in shapes else layer.dtype
            needed = bias or name in shapes
            p = nn.Parameter(torch.empty(shape, dtype=dtype, **options), not self.is_fp8) if needed else None
            setattr(self, name, p)
        for name, shape in shapes.items() if self.is_fp8 else ():
            scales = torch.empty(moe_fp8.scales_shape(shape), dtype=torch.float32, **options)
            setattr(self, name + moe_fp8.SCALE, nn.Parameter(scales, False))

    @property
    def _computed(self):
        """The names of weights that are not parameters of this module, but computed from others."""
        return [n for n in _PARAMETERS if getattr(self, n) is not None and n not in self._parameters]

    def _fill(self, seed):
        """Fill the parameters as reset_parameters says."""
        if self._computed:
            raise RuntimeError(f"reset_parameters: {', '.join(self._computed)} of this EPMoE: computed by a "
                               f"parametrization or pruning: call it before, or fill the parameters below it")
        generator = torch.Generator(self.layer.device)
        up_bound = 1 / math.sqrt(self.gate_up_proj.shape[2])
        down_bound = 1 / math.sqrt(self.down_proj.shape[2])
        bounds = {"gate_up_proj": up_bound, "down_proj": down_bound, "gate_up_proj_bias": up_bound,
                  "down_proj_bias": down_bound}
        for i, e in enumerate(self._held):
            if e < 0:
                for p in self.parameters(recurse=False):
                    p[i].zero_()
                continue
            generator.manual_seed(seed + e)
            for name, bound in bounds.items():
                p = getattr(self, name)
                if p is not None and self.is_fp8 and name in moe_fp8.WEIGHTS:
                    numbers = torch.empty(p.shape[1:], dtype=self.layer.dtype, device=p.device)
                    moe_fp8.put(self, name, i, numbers.uniform_(-bound, bound, generator=generator))
                elif p is not None:
                    p[i].uniform_(-bound, bound, generator=generator)

    @torch._disable_dynamo
    def _check_ddp(self, ddp):
        check_ddp(self, ddp)
        # without gradients, the check does not know from what the weights were computed
        self._checked_ddp = id(ddp) if torch.is_grad_enabled() else 0

    def named_children(self):
        """Return an iterator over the modules below, as nn.Module does; fully_shard calls it."""
        torch_hooks.install_fsdp()
        return super().named_children()

    def __setstate__(self, state):  # of a deep copy
        super().__setstate__(state)
        self._register()

    def _placed(self, expert_map):
        """Return a map on the layer's device.  Not of tensors that can be changed only in inference mode."""
        with torch.inference_mode(False):
            return expert_map.to(self.layer.device)

    def _use_map(self, expert_map, holds):
        """Route by a map on the layer's device, whose experts the parameters hold now.

        holds: its physical_to_logical_map, as a list.
        """
        layer = self.layer
        home = ExpertMap.home(self.num_experts, layer.world_size, layer.num_experts)
        is_home = holds == home.physical_to_logical_map.tolist()
        if is_home and self.num_experts == layer.num_experts:
            self.expert_map = None
        elif self.expert_map is None:
            self.expert_map = expert_map
        else:
            self.expert_map._copy_(expert_map)
        # what the host needs of the map: the logical experts of all physical ones, and of those of this rank
        self._holds, self._is_home = holds, is_home
        first = layer.rank * layer.num_local_experts
        self._held = holds[first:first + layer.num_local_experts]

    def _check_gradients(self):
        if self._is_home or not torch.is_grad_enabled():
            return
        weights = [getattr(self, name) for name in _PARAMETERS]
        if any(p is not None and p.requires_grad for p in weights):
            raise RuntimeError("with an expert map the experts have no gradients, because replicas would "
                               "differ after a step: call it under torch.no_grad() or after "
                               "requires_grad_(False), or call set_expert_map(None) first")

    def _register(self):
        if self.layer.world_size > 1 or self.expert_map is not None or self._has_other_gradients:
            shards.register(self)
            torch_hooks.install()

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        before = len(errors), len(missing), len(unexpected)
        with moe_load.Staged(self) as staged:
            left, loaded = moe_load.load_experts(self, state_dict, prefix, missing, errors)
            own = shards.own_entries(self, self, left, prefix, metadata, errors)
            moe_load.quantized(self, own, prefix, left, errors)
            own |= loaded
            state_dict.update(own)  # in place, because the modules below load from it later
            super()._load_from_state_dict(left | own if own else left, prefix, metadata, strict, missing,
                                          unexpected, errors)
            after = len(errors), len(missing), len(unexpected)
            is_right = after == before if strict else after[0] == before[0]
            if is_right:
                staged.keep()
        if not is_right:  # an error for missing keys, too: nobody may forgive them now
            errors.append(f"{shards.which_experts(self, prefix)}  Nothing of it was loaded.")

    def _refuse(self, error, path):
        """Report an error to the other ranks in the operation that they enter, and raise it.

        path: the LowLatencyAll2All of the call, or None.
        """
        try:
            if path is not None:
                path._refuse(_C.OP_LL_DISPATCH, error, 0)
            self.layer._refuse(_C.OP_PLAN, error, 0)
        finally:
            del error

    def _set_last_layout(self, layout):
        # recomputed compiled code, as in checkpointing, must not do this
        if not torch.compiler.is_compiling():
            self.last_layout = layout

    def _weights(self):
        """Return gate and up, their bias or None, down, its bias or None, as the stages take them."""
        return [self._scaled(name) for name in _PARAMETERS]

    def _compute(self, layer, x, topk_idx, topk_weights, weights=None):
        """Apply the experts through a layer.  Returns (y, layout).

        The layer is the module's, or, over several nodes, that of the node.  weights: None, or what
        _weights() has returned.
        """
        try:
            weights = self._weights() if weights is None else weights
            scales = [getattr(self, n + moe_fp8.SCALE) for n in moe_fp8.WEIGHTS] if self.is_fp8 else ()
            takes = not self.is_fp8 and experts_ops.takes(layer, x, topk_weights, *weights)
            if isinstance(layer, EpAll2AllFusedOp) and not torch.compiler.is_compiling():
                _check_strides(gate_up_proj=weights[0], down_proj=weights[2])
        except Exception as error:
            layer._refuse(_C.OP_PLAN, error, 0)
        if takes:
            return experts_ops.run(layer, x, topk_idx, topk_weights, weights, self.activation)
        if not isinstance(layer, EpAll2AllFusedOp):
            return self._unfused(layer, x, topk_idx, topk_weights, *weights)
        if self.is_fp8:
            return moe_fp8.run(layer, x, topk_idx, topk_weights, weights, scales, self.activation)
        gate_up, gate_up_bias, down, down_bias = weights
        h, row_weight, layout = layer.mega_dispatch_group_gemm(
            x, topk_idx, weight=topk_weights, gemm_weight=gate_up, bias=gate_up_bias,
            activation=self.activation)
        return layer.mega_group_gemm_combine(h, down, layout, row_weight, bias=down_bias), layout

    def _unfused(self, layer, x, topk_idx, topk_weights, gate_up, gate_up_bias, down, down_bias):
        if self.is_fp8:
            rows, scales, row_weight, layout = layer.dispatch_fp8(x, topk_idx, topk_weights)
        else:
            rows, row_weight, layout = layer.dispatch(x, topk_idx, topk_weights)
        try:
            offsets = layout.expert_offsets
            if self.is_fp8:
                h = moe_fp8.compute(self, rows, scales, offsets)
            else:
                h = grouped_gemm(rows, gate_up, offsets=offsets, bias=gate_up_bias,
                                 activation=self.activation)
                h = grouped_gemm(h, down, offsets=offsets, bias=down_bias)
        except Exception as error:
            layer._refuse(_C.OP_COMBINE, error, layout.buffer)
        return layer.combine(h, layout, row_weight), layout

    def extra_repr(self):
        """Return the sizes for the module's repr."""
        layer = self.layer
        return (f"hidden={layer.hidden}, num_experts={self.num_experts}, "
                f"local_experts={layer.num_local_experts}, topk={layer.topk * layer._copies}, "
                f"activation={self.activation}, {'weights in FP8, ' if self.is_fp8 else ''}"
                f"rank={layer.rank} of {layer.world_size}")
