"""transformers: the experts of its Mixture-of-Experts models, computed by epmoe.

    import epmoe.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="epmoe")

The import registers "epmoe" beside transformers' own "eager", "grouped_mm" and others.  A process computes
all experts of its model by itself, with or without torch.distributed, so that DistributedDataParallel needs
nothing else.  spread_experts puts E/W of them on each rank instead.

It needs transformers 5.  Experts with a norm after each expert are not supported.
"""

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..fused import EpAll2AllFusedOp
from ..gemm import grouped_gemm
from ..layer import EPAll2AllLayer
from ..moe import EPMoE
from ..reference import GptOss, activate
from ..world import thread_worlds

__all__ = ["experts_forward", "spread_experts"]

# The names of K in configurations.
_TOPK = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")

_FEWEST_TOKENS = 1024  # of a layer; a longer call makes a larger one
_worlds = []  # the world of this process alone, once there is one
_layers = {}  # what layers of one kind have in common -> those layers, the largest last


def _same_gate(experts, activation):
    """Whether the gate of transformers' experts computes an activation of epmoe: compared on numbers."""
    x = torch.linspace(-9, 9, 64, dtype=torch.float64, device="cpu")  # not meta, while a model is made
    x = torch.cat([x, x.sign() * x.abs()**4])  # some are larger than any limit of a clamped gate
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))].reshape(2, -1)
    return torch.allclose(experts._apply_gate(x), activate(x, activation), rtol=1e-9, atol=1e-9)


def _activation_of(experts):
    """Return the activation for epmoe's GEMM, or None: the experts apply their own."""
    if not getattr(experts, "has_gate", True):
        return None
    known = ["swiglu"]
    if hasattr(experts, "alpha") and hasattr(experts, "limit"):
        known.append(GptOss(experts.alpha, experts.limit))
    with torch.no_grad():
        return next((a for a in known if _same_gate(experts, a)), None)


@torch._disable_dynamo
def _make_layer(layers, kind, num_tokens, hidden, topk, num_experts, dtype, device):
    """Make a layer for at least num_tokens, and keep the smaller ones: a backward may still use them."""
    if not _worlds:
        _worlds.extend(thread_worlds(1))
    max_tokens = max(_FEWEST_TOKENS, 1 << (num_tokens - 1).bit_length())
    layers.append(kind(_worlds[0], max_tokens, hidden, topk, num_tot_experts=num_experts, dtype=dtype,
                       device=device))


def _layer_of(kind, num_tokens, *shape):
    layers = _layers.setdefault((kind, *shape), [])
    if not layers or layers[-1].max_tokens < num_tokens:
        _make_layer(layers, kind, num_tokens, *shape)
    return layers[-1]


@torch._disable_dynamo
def _set_activation(experts):
    if getattr(experts, "has_post_expert_norm", False):
        raise ValueError(f"{type(experts).__name__} has a norm after each expert, which epmoe does not "
                         f"compute: use another experts_implementation")
    experts._epmoe_activation = _activation_of(experts)


def _linear(experts, name):
    """Return the weights [E, out, in] of a linear map, and its biases or None."""
    weight = getattr(experts, name)
    if getattr(experts, "is_transposed", False):
        weight = weight.transpose(1, 2).contiguous()
    return weight, getattr(experts, f"{name}_bias") if getattr(experts, "has_bias", False) else None


def experts_forward(experts, hidden_states, top_k_index, top_k_weights):
    """Compute the experts of a transformers model.  transformers calls it.

    Args:
        experts: The module of the experts, which use_experts_implementation has decorated.
        hidden_states: [T, H].
        top_k_index: [T, K] int64: the experts of each token; the number of experts means none.
        top_k_weights: [T, K] of a floating-point dtype.

    Returns:
        [T, H] of hidden_states' dtype.

    Raises:
        ValueError: For experts with a norm after each expert, and for shapes that EPAll2AllLayer refuses.
        TypeError: For a dtype that EPAll2AllLayer refuses.

    Examples:
        The function is registered as "epmoe" when the module is imported (docs/guide.md, transformers).

        >>> callable(experts_forward)
        True
    """
    if not hasattr(experts, "_epmoe_activation"):
        _set_activation(experts)
    has_gate = getattr(experts, "has_gate", True)
    up, up_bias = _linear(experts, "gate_up_proj" if has_gate else "up_proj")
    down, down_bias = _linear(experts, "down_proj")
    activation = experts._epmoe_activation
    x = hidden_states.to(up.dtype).contiguous()
    idx, weight = top_k_index.contiguous(), top_k_weights.contiguous()
    kind = EPAll2AllLayer if activation is None else EpAll2AllFusedOp
    layer = _layer_of(kind, x.shape[0], x.shape[1], idx.shape[1], up.shape[0], up.dtype, x.device)
    if activation is None:
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        h = grouped_gemm(rows, up, offsets=layout.expert_offsets, bias=up_bias)
        h = experts._apply_gate(h) if has_gate else experts.act_fn(h)
        y = grouped_gemm(h.contiguous(), down, offsets=layout.expert_offsets, bias=down_bias)
        return layer.combine(y, layout, row_weight).to(hidden_states.dtype)
    h, row_weight, layout = layer.mega_dispatch_group_gemm(x, idx, weight=weight, gemm_weight=up,
                                                           bias=up_bias, activation=activation)
    y = layer.mega_group_gemm_combine(h, down, layout, row_weight, bias=down_bias)
    return y.to(hidden_states.dtype)


# ---- one part of the experts on each rank ----


def _topk_of(config):
    found = next((k for name in _TOPK if isinstance(k := getattr(config, name, None), int)), None)
    if found is None:
        raise ValueError(f"{type(config).__name__} does not say how many experts a token has: wanted one of "
                         f"{', '.join(_TOPK)}")
    return found


def _spread(experts, layers, ep_group, options):
    """Return the EPMoE of transformers' experts.  layers: those made so far, which modules share."""
    _set_activation(experts)
    activation = experts._epmoe_activation
    if activation is None:
        raise ValueError(f"{type(experts).__name__} has a gate of its own, or none, and EPMoE has SwiGLU and "
                         f"that of GPT-OSS")
    (up, up_bias), (down, down_bias) = _linear(experts, "gate_up_proj"), _linear(experts, "down_proj")
    if up.is_meta:
        raise ValueError("the parameters are on the meta device: load them first")
    num_experts, hidden, inner = down.shape
    topk = _topk_of(experts.config)
    kind = hidden, num_experts, topk, up.dtype
    shared = {"layer": layers[kind]} if kind in layers else {"device": up.device} | options
    moe = EPMoE(hidden, inner, num_experts, topk, ep_group, activation, dtype=up.dtype,
                bias=up_bias is not None, **shared)
    layers[kind] = moe.layer
    whole = {"gate_up_proj": up, "down_proj": down, "gate_up_proj_bias": up_bias,
             "down_proj_bias": down_bias}
    moe.load_state_dict({name: t for name, t in whole.items() if t is not None})
    for p in moe.parameters():
        p.requires_grad_(up.requires_grad)
    return moe.train(experts.training)


def spread_experts(model, ep_group=None, **options):
    """Replace the experts of a model by EPMoE modules, which spread them over the ranks.  Collective.

    Every rank passes the same model, with all experts, and keeps E/W of them.  The tokens of the ranks differ
    as before.  Then wrap it as DistributedDataParallel(epmoe.prepare_ddp(model)) to train it.  Modules of one
    shape share a communication layer.  epmoe.whole_state_dict(model) is the model of one process; GPT-OSS has
    its weights transposed there, and EPMoE has not.

    Args:
        model: A model of transformers, or any module with experts that use_experts_implementation has
            decorated.
        ep_group: As for EPMoE.
        **options: Options of EPMoE: max_tokens, device, capacity and others.

    Returns:
        The model.

    Raises:
        ValueError: On this rank, where there are no experts, for a gate that EPMoE does not have, and as
            EPMoE.
        EpError: As the creation of an EPMoE.

    Examples:
        See docs/guide.md, Models of transformers.

        >>> callable(spread_experts)
        True
    """
    found = [(path, m) for path, m in model.named_modules()
             if hasattr(m, "is_transposed") and isinstance(getattr(m, "down_proj", None), torch.nn.Parameter)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that transformers lets another "
                         f"implementation compute")
    layers = {}
    for path, experts in found:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _spread(experts, layers, ep_group, options))
    return model


ALL_EXPERTS_FUNCTIONS.register("epmoe", experts_forward)
