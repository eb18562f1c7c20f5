"""transformers: the experts of its Mixture-of-Experts models, computed by epmoe.  It needs transformers 5.

The import registers "epmoe" with transformers, in two places.

experts_implementation="epmoe", beside "eager", "grouped_mm" and others: a process computes all experts of its
model by itself, with or without torch.distributed, so that DistributedDataParallel needs nothing else.

    import epmoe.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="epmoe")

ep_implementation="epmoe", beside "all_to_all" and others, where transformers has transformers.distributed
.expert_parallel: each rank holds a part of the experts.  transformers shards, loads and saves the model.

    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="epmoe")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

spread_experts replaces the experts of a model by EPMoE modules instead, for DistributedDataParallel.

peft adapts the experts of the first way.  Those of the third have adapters by epmoe.integrations.peft.
"""

import contextlib

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..moe.module import EPMoE
from . import transformers_experts as parts
from .transformers_experts import store_as_epmoe_reads

__all__ = ["experts_forward", "spread_experts", "store_as_epmoe_reads"]

# The options of an EPMoE that are not of its layer, and so not shared with it.
_OF_MODULE = {"topk", "num_physical", "weight_dtype", "compute_dtype", "wgrad_dtype", "fp8_recipe",
              "delay_wgrad_compute", "fuse_wgrad_accumulation", "num_chunks", "rank_invariant", "balance",
              "dispatch_dtype", "dtype", "bias", "recompute_gate_up"}
_alone = parts.Layers()  # of this process alone


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
        ValueError: For shapes that EPAll2AllLayer refuses.
        TypeError: For weights that are quantized, and for a dtype that EPAll2AllLayer refuses.

    Examples:
        The function is registered as "epmoe" when the module is imported (docs/transformers.md).

        >>> callable(experts_forward)
        True
    """
    if not parts.is_plain(experts):
        raise TypeError(f"{type(experts).__name__} has quantized weights, {experts.down_proj.dtype}, which "
                        f"epmoe does not multiply with: use another experts_implementation")
    down, _ = parts.held(experts, "down_proj")
    x = hidden_states.to(down.dtype).contiguous()
    idx, weight = top_k_index.contiguous(), top_k_weights.contiguous()
    num_experts = down.shape[0]
    layer = _alone.get(x.shape[0], x.shape[1], idx.shape[1], num_experts, x.dtype, x.device)
    return parts.compute(experts, layer, x, idx, weight).to(hidden_states.dtype)


def spread_experts(model, ep_group=None, **options):
    """Replace the experts of a model by EPMoE modules, which spread them over the ranks.  Collective.

    Every rank passes the same model, with all experts, and keeps E/W of them, rounded up.  The tokens of the
    ranks differ as before.  Then wrap it as DistributedDataParallel(epmoe.prepare_ddp(model)) to train it.
    Modules of one shape share a communication layer.  epmoe.whole_state_dict(model) is the model of one
    process, with two exceptions: GPT-OSS has its weights transposed there, and EPMoE has not; and what
    Nemotron-H, which has no gate, calls up_proj is gate_up_proj.

    Args:
        model: A model of transformers, or any module with experts that use_experts_implementation has
            decorated, or with those that transformers makes for a model in FP8 or MXFP4.
        ep_group: As for EPMoE.
        **options: Options of EPMoE.from_experts: max_tokens, device, capacity and others.

    Returns:
        The model.  Until all modules are made, it keeps its own experts, also after an error.

    Raises:
        ValueError: On this rank, where there are no experts, or peft has adapted them, where several modules
            have a parameter in common, for an activation that EPMoE does not have, and as EPMoE.
        EpError: As the creation of an EPMoE.

    Examples:
        See docs/transformers.md.

        >>> callable(spread_experts)
        True
    """
    found = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if parts.can_spread(m)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that transformers lets another "
                         f"implementation compute")
    if found[0][0].endswith("base_layer"):
        raise ValueError(f"{found[0][0]}: peft has put an adapter around the experts: spread them first, "
                         f"then call epmoe.integrations.peft.add_lora")
    _check_apart({id(experts): (path, experts) for path, experts in found}.values())
    layers, made, of_experts = {}, {}, {}
    try:
        for path, experts in found:
            if id(experts) in of_experts:  # one module under several paths
                made[path] = of_experts[id(experts)]
                continue
            shape = parts.layer_key(experts)
            shared = dict(options)
            if not hasattr(experts, "config") and hasattr(model, "config"):
                shared.setdefault("topk", parts.topk_of(model.config))
                if getattr(model, "dtype", None) in (torch.float16, torch.bfloat16):
                    shared.setdefault("dtype", model.dtype)
            if shape in layers:
                shared = {n: v for n, v in shared.items() if n in _OF_MODULE} | {"layer": layers[shape]}
            made[path] = of_experts[id(experts)] = EPMoE.from_experts(experts, ep_group, **shared)
            layers[shape] = made[path].layer
    except Exception:
        with contextlib.suppress(Exception):  # all ranks fail here, so all close the layers
            for layer in layers.values() if options.get("layer") is None else ():
                layer.finalize()
        raise
    for path, moe in made.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, moe)
    return model


def _check_apart(found):
    """Raise ValueError if two experts modules have a parameter in common, which would become two."""
    owner = {}
    for path, experts in found:
        for name, p in experts.named_parameters():
            first = owner.setdefault(id(p), path)
            if first != path:
                raise ValueError(f"{path}.{name} is a parameter of {first}, too: give both the same experts "
                                 f"module, or spread them as EPMoE modules and set their parameters")


ALL_EXPERTS_FUNCTIONS.register("epmoe", experts_forward)

with contextlib.suppress(ImportError):  # transformers before 5.20 has no registry of ways to move tokens
    from transformers.distributed.expert_parallel import EPImplementationInterface

    from .transformers_ep import EpmoeEP, set_ep_options

    EPImplementationInterface.register("epmoe", EpmoeEP)
    __all__ += ["EpmoeEP", "set_ep_options"]
