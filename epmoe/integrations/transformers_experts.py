"""What the integrations with transformers share: its experts modules, and epmoe's layers for them.

An experts module is one that transformers' use_experts_implementation has decorated.  It says of itself
whether it has a gate, biases, transposed weights and a norm after each expert.  Nothing here imports
transformers.
"""

import contextlib
import threading
from typing import NamedTuple

import torch

from .. import _C
from ..a2a.fused import EpAll2AllFusedOp, fuses
from ..a2a.base import propagate_layer_error, together, world_of
from ..comm.error_propagation import check_plain
from ..comm.world import thread_worlds
from ..gemm.activations import UNGATED, GptOss, SwiGLU, activate
from ..gemm.four_bit import PACKED_DTYPES
from ..gemm.grouped import grouped_gemm
from ..moe import experts as experts_ops
from ..moe import lora_products
from ..torch_modes import is_watched, join_backward, num_not_after, without_dynamo

# The names of K in configurations.
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")

FEWEST_TOKENS = 1024  # max_tokens of the smallest layer that Layers makes


# ---- an experts module ----


def is_decorated(module):
    """Whether transformers lets another implementation compute this module."""
    # While a parametrization computes down_proj, it is an attribute of the class.  Nothing is computed here.
    return hasattr(module, "is_transposed") and any(hasattr(m, "down_proj") for m in (type(module), module))


def has_gate(experts):
    return getattr(experts, "has_gate", True)  # older versions of transformers lack some of the marks


def has_post_norm(experts):
    return getattr(experts, "has_post_expert_norm", False)


def is_plain(experts):
    """Whether the experts are two linear maps of ordinary weights, which epmoe's GEMM can multiply with."""
    return (is_decorated(experts) and not hasattr(experts, "down_proj_scale_inv")
            and held(experts, "down_proj")[0].dtype in (torch.float32, torch.float16, torch.bfloat16))


def is_fp8(experts):
    """Whether the experts are those that transformers makes for an FP8 model."""
    return hasattr(experts, "down_proj_scale_inv") and experts.down_proj.dtype == torch.float8_e4m3fn


def is_gpt_oss_mxfp4(experts):
    """Whether the experts are those that transformers makes for GPT-OSS in MXFP4."""
    return any(hasattr(experts, f"down_proj_{of}") for of in ("blocks", "precision_config"))


def is_mxfp4(experts):
    """Whether the experts are those that transformers makes for a model with experts in MXFP4."""
    return is_gpt_oss_mxfp4(experts) or (hasattr(experts, "down_proj_scale_inv")
                                         and experts.down_proj.dtype in PACKED_DTYPES)


def can_spread(experts):
    """Whether a module is one of experts, of those that spread_experts looks for."""
    return is_decorated(experts) or is_fp8(experts) or is_mxfp4(experts)


def _number_of(experts, *names):
    """Return a number that the experts have under one of these names, or None."""
    values = (getattr(experts, name, None) for name in names)
    return next((float(v) for v in values if isinstance(v, (int, float))), None)


def _candidates(experts):
    """Return the activations of epmoe that the experts may have.  Those with a limit come first."""
    if not has_gate(experts):
        return UNGATED
    limit = _number_of(experts, "limit", "swiglu_limit")
    alpha = _number_of(experts, "alpha", "swiglu_alpha")
    if limit is None or not limit > 0:
        return ["swiglu", "geglu_tanh"]
    others = [GptOss(alpha, limit), SwiGLU(alpha, limit, 1)] if alpha else []
    return [SwiGLU(limit=limit), *others, "swiglu", "geglu_tanh"]


def _is_activation_of(experts, activation):
    """Whether the experts of transformers compute an activation of epmoe: compared on numbers."""
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(-9, 9, 64, dtype=torch.float64, device="cpu")  # not meta, while a model is made
    limit = min(getattr(activation, "limit", 1.0), 1e30)
    x = torch.cat([x, x.sign() * x.abs()**4, x * limit])  # some are larger than the limit of a clamped gate
    x = x[torch.randperm(len(x), generator=generator, device="cpu")].reshape(2, -1)
    try:
        got = experts._apply_gate(x) if has_gate(experts) else experts.act_fn(x)
    except RuntimeError:  # it wants another dtype or device, because it has parameters: none of epmoe's
        return False
    # some compute in float32, whatever the dtype of the rows
    return torch.allclose(got, activate(x, activation), rtol=1e-6, atol=1e-6)


@without_dynamo
def _find_activation(experts):
    """Set _epmoe_activation: the activation for epmoe's GEMM, or None where the experts apply their own."""
    with torch.no_grad():
        experts._epmoe_activation = next((a for a in _candidates(experts) if _is_activation_of(experts, a)),
                                         None)


def activation_of(experts):
    """Return the activation for epmoe's GEMM, or None: the experts apply their own."""
    if is_gpt_oss_mxfp4(experts):
        return GptOss(float(experts.alpha), float(experts.limit))
    if not hasattr(experts, "_epmoe_activation"):
        _find_activation(experts)
    return experts._epmoe_activation


class Factors(NamedTuple):
    """What an adapter of peft adds to weights W: scaling * left @ right, of W's dtype."""

    left: torch.Tensor  # [E, W.shape[1], r]
    right: torch.Tensor  # [E, r, W.shape[2]]
    scaling: float


def held(experts, name):
    """Return (weights, None); or (W, Factors), where peft adds something to the weights W, and no more.

    peft's ParamWrapper calls the experts while a parametrization of torch computes the weights as W plus the
    product of two factors.  A parametrization that is not of this form computes its weights here.
    """
    made = getattr(experts, "parametrizations", {})
    if name in made and len(made[name]) == 1 and type(made[name][0]).__module__.startswith("peft."):
        of_peft, original = made[name][0], getattr(made[name], "original", None)
        factors = [getattr(of_peft, of, None) for of in ("lhs", "rhs", "scaling")]
        if all(f is not None for f in (original, *factors)):
            return original, Factors(*factors)
    return getattr(experts, name), None


class Linear(NamedTuple):
    """A linear map of the experts."""

    weight: torch.Tensor  # [E, out, in]
    bias: torch.Tensor | None  # [E, out]
    factors: Factors | None = None  # of an adapter, for weights [E, out, in]


def linear(experts, name):
    """Return a linear map of the experts."""
    weight, factors = held(experts, name)
    if experts.is_transposed:
        weight = weight.transpose(1, 2)
        if factors is not None:
            left, right, scaling = factors
            factors = Factors(right.transpose(1, 2), left.transpose(1, 2), scaling)
    return Linear(weight, getattr(experts, f"{name}_bias") if getattr(experts, "has_bias", False) else None,
                  factors)


def up_and_down(experts):
    """Return the first and the second linear map of the experts."""
    return linear(experts, "gate_up_proj" if has_gate(experts) else "up_proj"), linear(experts, "down_proj")


def store_as_epmoe_reads(model):
    """Store the transposed expert weights of a model in the order in which epmoe's GEMM reads them.

    The experts of GPT-OSS, Aria and Privacy Filter have weights [E, in, out].  epmoe's kernels read them as
    they are.  But only for [E, out, in] do they also apply biases and the gate, communicate in the same
    launch, and have tiles for few rows, as in decoding.  Names, shapes and values stay.  Only the strides
    change, so that training, state_dict and save_pretrained work as before.  A model without transposed
    weights is left as it is.

    Call it after loading and before the model is wrapped, compiled or captured in a CUDA graph.  It needs
    memory for a second copy of one parameter.

    Args:
        model: A model of transformers.

    Returns:
        The model.

    Raises:
        ValueError: For parameters on the meta device, and for DTensors, as fully_shard makes them.

    Examples:
        >>> import torch
        >>> from epmoe.integrations.transformers_experts import store_as_epmoe_reads
        >>> store_as_epmoe_reads(torch.nn.Linear(2, 2))  # without experts: left as it is
        Linear(in_features=2, out_features=2, bias=True)
    """
    for path, experts in model.named_modules():
        if not is_decorated(experts) or not experts.is_transposed:
            continue
        for name in ("gate_up_proj" if has_gate(experts) else "up_proj", "down_proj"):
            p = getattr(experts, name)
            if p.is_meta or hasattr(p, "device_mesh"):
                kind = "on the meta device" if p.is_meta else "a DTensor"
                raise ValueError(f"{path}.{name} is {kind}: call store_as_epmoe_reads after the model is "
                                 f"loaded and before it is sharded")
            p.data = p.data.transpose(1, 2).contiguous().transpose(1, 2)
    return model


# ---- layers, and what runs in them ----


class Layers:
    """The communication layers of one world, by shape.

    transformers does not say how many tokens a call can have.  So a call with more tokens than the layer's
    max_tokens makes a larger layer.  The smaller ones stay, because a backward may still use them.
    """

    def __init__(self, world=None, max_tokens=None, **options):
        self.world = world  # None: that of this process alone, created with the first layer
        self.max_tokens = max_tokens  # None: as large as the calls need
        self.options = options
        self.of_shape = {}  # -> a list, the largest layer last
        self._lock = threading.Lock()  # held while a thread makes a layer

    def _lacks(self, layers, num_tokens):
        """Whether there is no layer for num_tokens among the layers of a shape."""
        return not layers or (self.max_tokens is None and layers[-1].max_tokens < num_tokens)

    @without_dynamo
    def _make(self, layers, fused, num_tokens, hidden, topk, num_experts, dtype, device):
        with self._lock:
            if not self._lacks(layers, num_tokens):  # another thread has made it
                return
            if self.world is None:
                self.world = thread_worlds(1)[0]
            max_tokens = self.max_tokens or max(FEWEST_TOKENS, 1 << (num_tokens - 1).bit_length())
            # With None the layer also decides, by the weights, whether training uses the fused kernels.
            options = self.options | {"fused": self.options.get("fused") if fused else False}
            layers.append(EpAll2AllFusedOp(self.world, max_tokens, hidden, topk, num_tot_experts=num_experts,
                                           dtype=dtype, device=device, **options))

    def get(self, num_tokens, *shape):
        """Return a layer for num_tokens, of a shape (hidden, topk, num_experts, dtype, device).

        Collective where it makes a layer: num_tokens is then the same on all ranks.  Calls of few tokens, as
        in decoding, have a layer of their own, without fused kernels.  With max_tokens set, there is one
        layer of a shape, which refuses more tokens.
        """
        _, topk, num_experts, _, _ = shape
        fused = self.options.get("fused")
        if fused is None:
            size = self.world.size if self.world else 1
            fused = fuses(self.max_tokens or num_tokens, topk, num_experts, size)
        layers = self.of_shape.setdefault((fused, *shape), [])
        if self._lacks(layers, num_tokens):
            self._make(layers, fused, num_tokens, *shape)
        return layers[-1]


def compute(experts, layer, x, idx, weight):
    """Compute plain experts for tokens x [T, H], with indices and weights [T, K], and return [T, H].

    Collective over the ranks of the layer.  The activations that epmoe has run inside of its kernels.
    Others, and norms after each expert, are transformers' own code on the rows of this rank.  A training step
    in 16 bits runs torch.ops.epmoe.experts, as EPMoE does, unless the weights are transposed.  While an
    adapter of peft is at work, its products run beside those of the weights, as in EPMoE.
    """
    try:
        linears = up_and_down(experts)
        (up, up_bias, *_), (down, down_bias, *_) = linears
        activation = activation_of(experts)
        has_norm = has_post_norm(experts)
        weights = up, up_bias, down, down_bias
        factors = [m.factors for m in linears if m.factors is not None]
        for name, t in (("hidden_states", x), ("top_k_index", idx), ("top_k_weights", weight)):
            if type(t) is not torch.Tensor:
                check_plain(name, t)
        watched = is_watched()
        takes = (activation is not None and not has_norm and not factors
                 and experts_ops.takes(layer, x, weight, weights, watched))
        if not takes:
            x, weight = join_backward(x, weight, *weights, *(t for f in factors for t in (f.left, f.right)))
    except Exception as error:
        layer._propagate(_C.OP_PLAN, error, 0)
    if takes:
        return experts_ops.run(layer, x, idx, weight, weights, activation, as_operators=watched)[0]
    if factors:
        return _compute_adapted(experts, layer, x, idx, weight, *linears)
    h, row_weight, layout = layer.mega_dispatch_group_gemm(x, idx, weight=weight, gemm_weight=up,
                                                           bias=up_bias, activation=activation)
    try:
        if activation is None:
            h = _activated(experts, h)
        if has_norm:
            y = grouped_gemm(h, down, offsets=layout.expert_offsets, bias=down_bias)
            y = experts.post_expert_norm(y).contiguous()
    except Exception as error:  # the other ranks are in their next operation, and learn of it there
        layer._propagate(_C.OP_GEMM_COMBINE if layer.fused and not has_norm else _C.OP_COMBINE, error,
                      layout.buffer)
    if has_norm:
        return layer.combine(y, layout, row_weight)
    return layer.mega_group_gemm_combine(h, down, layout, row_weight, bias=down_bias)


def _activated(experts, h):
    """Return the rows h after the experts' own activation."""
    return (experts._apply_gate(h) if has_gate(experts) else experts.act_fn(h)).contiguous()


def _compute_adapted(experts, layer, x, idx, weight, up, down):
    """As compute, for linear maps of which at least one has the factors of an adapter."""
    rows, row_weight, layout = layer.dispatch(x, idx, weight)
    offsets, activation = layout.expert_offsets, activation_of(experts)

    def product(rows, of):
        y = grouped_gemm(rows, of.weight, offsets=offsets, bias=of.bias)
        if of.factors is None:
            return y
        left, right, scaling = of.factors
        return lora_products.add_product(y, rows, right, left, scaling, offsets)

    try:
        with torch.autocast(rows.device.type, enabled=False):  # the dtypes are chosen already
            h = product(rows, up)
            h = (_activated(experts, h) if activation is None
                 else lora_products.activate_rows(h, activation, offsets))
            y = product(h, down)
            if has_post_norm(experts):
                y = experts.post_expert_norm(y).contiguous()
    except Exception as error:
        layer._propagate(_C.OP_COMBINE, error, layout.buffer)
    return layer.combine(y, layout, row_weight)


def compute_rows(forward, layer, x, idx, weight):
    """As compute, with a forward(rows, expert indices, weights) of transformers for any experts.

    It gets the rows of this rank, with one choice each: the local index of the expert, and the weight 1.
    """
    rows, row_weight, layout = layer.dispatch(x, idx, weight)
    row = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    expert = num_not_after(layout.expert_offsets[1:], row)
    try:
        if len(rows):
            y = forward(rows, expert[:, None], rows.new_ones(len(rows), 1))
        else:  # transformers' experts need a row; it also connects the parameters to the backward
            y = forward(rows.sum(0, keepdim=True), expert.new_zeros(1, 1), rows.new_ones(1, 1))[:0]
        y = y.to(layer.dtype).contiguous()
    except Exception as error:
        layer._propagate(_C.OP_COMBINE, error, layout.buffer)
    return layer.combine(y, layout, row_weight)


# ---- an EPMoE of an experts module ----


def topk_of(config):
    """Return K of a configuration, or raise ValueError."""
    found = next((k for name in _TOPK if isinstance(k := getattr(config, name, None), int)), None)
    if found is None:
        raise ValueError(f"{type(config).__name__} does not say how many experts a token has: pass topk=, "
                         f"or name it {', '.join(_TOPK)}")
    return found


def _fp8_parameters(experts):
    """Return {name: parameter of all experts} of an FP8 model, or raise ValueError for other scales."""
    name = type(experts).__name__
    if tuple(experts.block_size or ()) != (128, 128):
        raise ValueError(f"{name} has scales for blocks of {experts.block_size}: EPMoE wants 128 by 128")
    if getattr(experts, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(f"{name} has the activation_scheme {experts.activation_scheme!r}: EPMoE wants "
                         f"\"dynamic\", because it computes the scales of activations itself")
    return _scaled_parameters(experts)


def _scaled_parameters(experts):
    """Return {name: parameter of all experts} of weights that have a scale_inv."""
    up = "gate_up_proj" if has_gate(experts) else "up_proj"
    names = {"gate_up_proj": up, "down_proj": "down_proj"}
    return {to + end: getattr(experts, of + end) for to, of in names.items() for end in ("", "_scale_inv")}


def _mxfp4_parameters(experts):
    """Return {name: parameter of all experts} of GPT-OSS in MXFP4, as its checkpoints hold them."""
    found = {}
    for name in ("gate_up_proj", "down_proj"):
        if hasattr(experts, f"{name}_blocks"):
            blocks, scales = (getattr(experts, f"{name}_{of}") for of in ("blocks", "scales"))
        else:
            blocks, scales = _from_triton(experts, name)
        found |= {f"{name}_blocks": blocks, f"{name}_scales": scales,
                  f"{name}_bias": getattr(experts, f"{name}_bias")}
    return found


def _from_triton(experts, name):
    """Return blocks and scales of weights that transformers has given to the Triton kernels of GPT-OSS.

    As Mxfp4ReverseDeserialize of transformers does for save_pretrained.
    """
    config = getattr(experts, f"{name}_precision_config")
    if config is None:
        raise ValueError(f"{type(experts).__name__} has no scales of {name}: load its checkpoint first")
    parts = [t.storage.layout.unswizzle_data(t.storage.data).transpose(-1, -2)
             for t in (getattr(experts, name), config.weight_scale)]
    return parts[0].reshape(*parts[1].shape, -1), parts[1]


def layer_key(experts):
    """Return what experts that can share a layer have in common."""
    if is_gpt_oss_mxfp4(experts):
        return experts.num_experts, experts.hidden_size, experts.intermediate_size, "mxfp4", False
    return tuple(experts.down_proj.shape), experts.down_proj.dtype, getattr(experts, "is_transposed", False)


def _sizes_of(experts, topk):
    """Return ({name: parameter of all experts}, K), or raise ValueError for what EPMoE cannot compute."""
    name = type(experts).__name__
    if not is_plain(experts) and not is_fp8(experts) and not is_mxfp4(experts):
        raise ValueError(f"{name}: wanted the experts of a transformers model, which "
                         f"use_experts_implementation has decorated, with weights that are not quantized, "
                         f"or in FP8 or MXFP4")
    if has_post_norm(experts):
        raise ValueError(f"{name} has a norm after each expert, and EPMoE has none")
    if activation_of(experts) is None:
        raise ValueError(f"{name} has an activation that EPMoE does not have: use "
                         f"ep_implementation=\"epmoe\"")
    whole = _parameters_of(experts)
    if any(t.is_meta for t in whole.values()):
        raise ValueError(f"{name}: the parameters are on the meta device: load them first")
    return whole, topk_of(getattr(experts, "config", None)) if topk is None else topk


def _parameters_of(experts):
    """Return {name of EPMoE's parameter: that of all experts}."""
    if is_fp8(experts):
        return _fp8_parameters(experts)
    if is_mxfp4(experts):
        return _mxfp4_parameters(experts) if is_gpt_oss_mxfp4(experts) else _scaled_parameters(experts)
    (up, up_bias, _), (down, down_bias, _) = up_and_down(experts)
    whole = {"gate_up_proj": up, "down_proj": down, "gate_up_proj_bias": up_bias, "down_proj_bias": down_bias}
    return {n: t for n, t in whole.items() if t is not None}


def from_experts(cls, experts, ep_group, topk, options):
    """EPMoE.from_experts, for a class of its own."""
    if options.get("layer") is not None:
        with together(options["layer"].world):
            moe = _made(cls, experts, ep_group, *_sizes_of(experts, topk), options)
            return _loaded(moe, experts)
    try:
        whole, topk = _sizes_of(experts, topk)
    except Exception as error:
        heap = options.get("heap")
        propagate_layer_error(world_of(ep_group, heap, options.get("timeout_s")), heap, error)
        raise
    moe = _made(cls, experts, ep_group, whole, topk, options)
    try:
        with together(moe.layer.world):
            return _loaded(moe, experts)
    except Exception:
        with contextlib.suppress(Exception):  # all ranks fail here, so all close the layer
            moe.finalize()
        raise


def _made(cls, experts, ep_group, whole, topk, options):
    """Return an EPMoE for the parameters {name: all experts}, without their numbers."""
    down = whole.get("down_proj_blocks", whole.get("down_proj"))
    num_experts, hidden, inner = down.shape[0], down.shape[1], down[0, 0].numel()
    if "layer" not in options:
        options = {"device": down.device} | options
    dtype = down.dtype
    if is_fp8(experts) or is_mxfp4(experts):
        dtype = getattr(getattr(experts, "config", None), "dtype", None) or torch.bfloat16
        options = {"weight_dtype": "mxfp4" if is_mxfp4(experts) else torch.float8_e4m3fn} | options
        inner *= 1 + is_mxfp4(experts)  # two numbers in a byte
    options = {"dtype": dtype, "bias": "down_proj_bias" in whole} | options
    return cls(hidden, inner, num_experts, topk, ep_group, activation_of(experts), **options)


def _loaded(moe, experts):
    """Copy the experts of this rank, and return the module."""
    whole = _parameters_of(experts)
    moe.load_state_dict(whole)
    if is_gpt_oss_mxfp4(experts):
        moe._is_hooked = True  # else transformers' module above calls its Triton kernels
    if moe._format.has_gradients:
        for parameter, t in whole.items():
            getattr(moe, parameter).requires_grad_(t.requires_grad)
    return moe.train(experts.training)
