"""peft: LoRA on a model of transformers whose experts are spread over ranks.  It needs peft 0.19 or newer.

One LoraConfig describes the adapter, as for peft.get_peft_model.  Its target_parameters that are weights of
experts become an adapter of each EPMoE.  peft itself adapts everything else, for example the attention.

    spread_experts(model, max_tokens=4096)
    add_lora(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"],
                               target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))

save_lora writes the files that PeftModel.from_pretrained reads, and load_lora reads those of peft, on any
number of ranks.  A model whose experts are not spread needs nothing of this module: peft works as it is.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peft import (LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model,
                  set_peft_model_state_dict)
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as _DEFAULT_TARGETS
from peft.utils.other import get_pattern_key
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file, save_file

from ..a2a.base import together
from ..gemm.activations import is_gated
from ..moe import lora
from ..moe.module import EPMoE

__all__ = ["add_lora", "load_lora", "save_lora", "set_lora"]

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of the names in peft's files, before the path of a module
# The fields of a LoraConfig that may differ from their defaults.  The others are about things that the
# adapters of experts do not have, for example DoRA, or that peft does not do for target_parameters.
_KNOWN_FIELDS = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path",
                 "revision", "inference_mode", "r", "lora_alpha", "use_rslora", "rank_pattern",
                 "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform",
                 "layers_pattern", "target_parameters"}


def add_lora(model: torch.nn.Module, config: LoraConfig, adapter_name: str = "default", *,
             dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Add a LoRA adapter to the experts and other modules of a model, and activate it.  Collective.

    Afterwards the parameters of the adapter require gradients, and no others of the model do.  Call it after
    spread_experts, and before prepare_ddp or prepare_fsdp.  The ranks start with the same numbers if they
    have the same seed.  DistributedDataParallel copies those of rank 0 for what peft adapts.

    Args:
        model: A model with EPMoE modules, for example of spread_experts.  It is changed in place.
        config: A LoraConfig of peft.  target_parameters name weights of experts as transformers calls them,
            for example "mlp.experts.gate_up_proj".  As in peft, target_modules may name what transformers 4
            had there, for example "gate_proj".  Only the fields for r, lora_alpha, use_rslora, patterns and
            targets may differ from their defaults.
        adapter_name: As for EPMoE.add_adapter.
        dtype: Of the factors of experts, as for EPMoE.add_adapter; None: that of the experts.  Those of
            other modules have the dtype that get_peft_model gives them: float32.

    Returns:
        The model.

    Raises:
        ValueError: On this rank, for a field that the experts do not have, targets that are not in the
            model, two weights of a module with different lora_alpha / r, and a name that is taken.
        RuntimeError: On this rank, while an adapter is merged in any of the experts.
        TypeError: On this rank, where config is no LoraConfig, or the model is one of peft.
        PeerError: On the other ranks, when one rank raises one of these.
        EpMismatch: On all ranks, when they pass different configurations.
        EpError: As EPMoE.add_adapter.

    Examples:
        See docs/lora.md.

        >>> import torch
        >>> from peft import LoraConfig
        >>> import epmoe
        >>> from epmoe.integrations.peft import add_lora
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> model = torch.nn.ModuleDict({"experts": moe, "head": torch.nn.Linear(16, 4)})
        >>> config = LoraConfig(r=4, target_modules=["head"], target_parameters=["experts.down_proj"])
        >>> [n for n, p in add_lora(model, config).named_parameters() if p.requires_grad][:2]
        ['experts.adapters.default.down_proj.lora_A', 'experts.adapters.default.down_proj.lora_B']
        >>> moe.finalize()
    """
    def add(moe, path, adapter):
        moe.add_adapter(adapter_name, adapter.r, adapter.alpha, tuple(adapter.ranks), dtype=dtype)
        with torch.no_grad():  # what is zero in both factors has no gradient, and stays zero
            for target, r in adapter.ranks.items():
                lora.adapters_of(moe)[adapter_name].factors(target).lora_A[:, r:] = 0

    _add(model, config, adapter_name, add)
    return model


def set_lora(model: torch.nn.Module, adapter_name: str | None) -> None:
    """Let the model use an adapter of add_lora or load_lora, or none.  Collective.

    With an adapter its parameters require gradients.  Nothing else does.

    Args:
        model: A model after add_lora or load_lora.
        adapter_name: The name of an adapter, or None.

    Raises:
        ValueError: On this rank, for a name that no adapter has.
        TypeError: On this rank, for anything but a name or None.
        RuntimeError: On this rank, while an adapter is merged in any of the experts.
        EpError: As EPMoE.set_adapter.

    Examples:
        >>> import torch
        >>> from peft import LoraConfig
        >>> import epmoe
        >>> from epmoe.integrations.peft import add_lora, set_lora
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> model = add_lora(torch.nn.ModuleDict({"experts": moe}),
        ...                  LoraConfig(target_modules=[], target_parameters=["experts.down_proj"]))
        >>> set_lora(model, None)
        >>> moe.active_adapter is None
        True
        >>> moe.finalize()
    """
    experts = _experts_of(model)
    with together(_world_of(experts)):
        if adapter_name is not None:
            _config_of(model, adapter_name)
        _check_unmerged(experts, "set_lora")
    for moe in experts.values():
        moe.set_adapter(adapter_name if adapter_name in lora.adapters_of(moe) else None)
        moe._checked_ddp = 0  # also where it has no adapter of this name
    for module in _tuned(model):
        module.enable_adapters(adapter_name is not None)
        if adapter_name is not None:
            module.set_adapter(adapter_name)


def save_lora(model: torch.nn.Module, folder: str | os.PathLike, adapter_name: str = "default") -> None:
    """Save an adapter as peft does, with the experts of all ranks.  Collective.

    Rank 0 of the experts' ranks writes adapter_model.safetensors and adapter_config.json.  On one process
    PeftModel.from_pretrained(model, folder) reads them, and load_lora on any number of ranks.  When the
    function returns on a rank, the files are written.

    Args:
        model: A model after add_lora or load_lora.  Not one that wraps it: pass the module of
            DistributedDataParallel.
        folder: The folder, which is made if it does not exist.
        adapter_name: The name of an adapter.  It is not saved.

    Raises:
        ValueError: On this rank, for a name that no adapter has.
        OSError: On rank 0, where it cannot write.
        EpError: As EPMoE.adapter_state_dict.

    Examples:
        >>> import os, tempfile
        >>> import torch
        >>> from peft import LoraConfig
        >>> import epmoe
        >>> from epmoe.integrations.peft import add_lora, save_lora
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> model = add_lora(torch.nn.ModuleDict({"experts": moe}),
        ...                  LoraConfig(target_modules=[], target_parameters=["experts.down_proj"]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_lora(model, folder)
        ...     print(sorted(os.listdir(folder)))
        ['adapter_config.json', 'adapter_model.safetensors']
        >>> moe.finalize()
    """
    experts = _experts_of(model)
    world, state = _world_of(experts), {}
    with together(world):
        config = _config_of(model, adapter_name)
        plan, _ = _plan(model, experts, config)
    for path, adapter in plan.items():
        of_experts = experts[path].adapter_state_dict(adapter_name)
        state |= {f"{_PREFIX}{path}.{key}": t for key, t in
                  _with_ranks(of_experts, experts[path], adapter.ranks).items()}
    with together(world):
        if world.rank == 0:
            state |= {_PREFIX + key: t.detach().to("cpu").contiguous()
                      for key, t in _state_of_others(model, experts, adapter_name).items()}
            config = copy.copy(config)
            config.inference_mode = True
            config.base_model_name_or_path = config.base_model_name_or_path or getattr(
                model, "name_or_path", None)
            config.save_pretrained(os.fspath(folder))  # makes the folder
            save_file(state, os.path.join(folder, _FILE), metadata={"format": "pt"})


def load_lora(model: torch.nn.Module, folder: str | os.PathLike, adapter_name: str = "default", *,
              dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Add an adapter that save_lora or peft has saved, and make it the active one.  Collective.

    Every rank reads the files, and each EPMoE takes the factors of its experts.  The rest is as after
    add_lora: the adapter can be trained further.

    Args:
        model: As for add_lora.
        folder: The folder of the files, on all ranks.
        adapter_name: As for add_lora.
        dtype: As for add_lora.

    Returns:
        The model.

    Raises:
        ValueError: On this rank, for tensors that the model lacks or that do not fit, and as add_lora.
        OSError: On this rank, where it cannot read.
        EpError: As EPMoE.load_adapter.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from peft import LoraConfig
        >>> import epmoe
        >>> from epmoe.integrations.peft import add_lora, load_lora, save_lora
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> model = add_lora(torch.nn.ModuleDict({"experts": moe}),
        ...                  LoraConfig(target_modules=[], target_parameters=["experts.down_proj"]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_lora(model, folder)
        ...     model = load_lora(model, folder, "again")
        >>> moe.active_adapter
        'again'
        >>> moe.finalize()
    """
    experts = _experts_of(model)
    with together(_world_of(experts)):
        if not os.path.isfile(os.path.join(folder, _CONFIG)):  # peft would look for a repository of this name
            raise FileNotFoundError(f"{folder} has no {_CONFIG}")
        config = PeftConfig.from_pretrained(os.fspath(folder))
        config.inference_mode, config.init_lora_weights = False, True  # neither is about what is loaded
        state = load_file(os.path.join(folder, _FILE))
        if wrong := [key for key in state if not key.startswith(_PREFIX)]:
            raise ValueError(f"{_FILE}: {wrong[0]!r} does not begin with {_PREFIX!r}, as in peft's files")

    def load(moe, path, adapter):
        prefix = f"{_PREFIX}{path}."
        with together(moe.layer.world):
            own = {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}
            _check_ranks(own, moe, path, adapter.ranks)
            own = _with_ranks(own, moe, dict.fromkeys(adapter.ranks, adapter.r))
        moe.load_adapter(adapter_name, own, alpha=adapter.alpha, targets=tuple(adapter.ranks), dtype=dtype)

    _add(model, config, adapter_name, load, state)
    return model


# ---- what the functions share ----


class _OfExperts(NamedTuple):
    """What a LoraConfig says of the experts of a module.

    Its weights may have different ranks, if lora_alpha / r is the same.  The adapter of the EPMoE then has
    the larger one, and zeros in the factors of the other.
    """

    r: int
    alpha: float
    ranks: dict[str, int]  # by weight


def _experts_of(model):
    """Return {path: EPMoE} of a model."""
    if isinstance(model, (PeftModel, torch.nn.parallel.DistributedDataParallel)):
        raise TypeError(f"wanted the model itself, got {type(model).__name__}, which wraps it")
    found = {path: m for path, m in model.named_modules() if path and isinstance(m, EPMoE)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no EPMoE: call spread_experts first, or, where one "
                         f"process holds all experts, use peft.get_peft_model")
    return found


def _world_of(experts):
    return next(iter(experts.values())).layer.world


def _check_unmerged(experts, what):
    """Raise RuntimeError where an adapter is merged, before any of the experts has another adapter."""
    for moe in experts.values():
        lora.check_unmerged(moe, what)


def _configs_of(model):
    """Return {name of an adapter: its LoraConfig}, which is kept in the model."""
    return model.__dict__.setdefault("_epmoe_lora", {})


def _config_of(model, adapter_name):
    known = _configs_of(model)
    if not isinstance(adapter_name, str):
        raise TypeError(f"adapter_name: wanted a name or None, got {type(adapter_name).__name__}; a list of "
                        f"adapters is for EPMoE.set_adapter")
    if adapter_name not in known:
        raise ValueError(f"no adapter {adapter_name!r}: add_lora and load_lora have added "
                         f"{', '.join(sorted(known)) or 'none'}")
    return known[adapter_name]


def _tuned(model):
    """Return the modules that peft has put around others."""
    return [m for m in model.modules() if isinstance(m, BaseTunerLayer)]


@contextlib.contextmanager
def _hidden(model, experts):
    """Take the experts out of the model for a time, so that peft neither adapts nor saves what is in them."""
    for path in experts:
        model.set_submodule(path, torch.nn.Identity())
    try:
        yield
    finally:
        for path, moe in experts.items():
            model.set_submodule(path, moe)


def _add(model, config, adapter_name, add, state=None):
    """Add an adapter and activate it, or leave the model as it is.  Collective.

    add(moe, path, adapter) adds that of an EPMoE, an _OfExperts.  state: of peft's files, or None.
    """
    experts = _experts_of(model)
    world = _world_of(experts)
    with together(world):
        if not isinstance(config, LoraConfig):
            raise TypeError(f"wanted a LoraConfig of peft, got {type(config).__name__}")
        _check_unmerged(experts, "add_lora")
        config = copy.deepcopy(config)
        # peft does this first, too: the target_modules gate_proj, up_proj and down_proj of transformers 4
        # become the target_parameters gate_up_proj, with twice the r and lora_alpha, and down_proj.
        convert_peft_config_for_transformers(config, model, None)
        plan, others = _plan(model, experts, config)
        lora.check_name(adapter_name)
        if state is not None:  # what is left is for peft, which finds names that nothing has
            of_experts = tuple(f"{_PREFIX}{path}." for path in plan)
            state = {key: t for key, t in state.items() if not key.startswith(of_experts)}
        if adapter_name in _configs_of(model):
            raise ValueError(f"this model has an adapter {adapter_name!r} already")
    text = json.dumps(config.to_dict(), default=sorted, sort_keys=True)
    number = hashlib.sha256(text.encode()).hexdigest()[:8]
    lora.agree(world, f"add_lora({adapter_name!r}, configuration {number}: r={config.r}, lora_alpha="
                      f"{config.lora_alpha})")
    before, active = {p: p.requires_grad for p in model.parameters()}, _active_of(model)
    try:
        with together(world):
            _add_others(model, experts, others, adapter_name, state)
        model.requires_grad_(False)
        for path, adapter in plan.items():
            add(experts[path], path, adapter)
        config.target_modules = config.target_modules if others is None else others.target_modules
        _configs_of(model)[adapter_name] = config
        set_lora(model, adapter_name)
    except BaseException:
        _forget(model, experts, adapter_name)
        _activate_again(active)
        for p, requires_grad in before.items():
            p.requires_grad_(requires_grad)
        raise


def _active_of(model):
    """Return what _activate_again takes: which adapters of peft are active in each module."""
    return [(module, list(module.active_adapters), module.disable_adapters) for module in _tuned(model)]


def _activate_again(active):
    for module, names, disabled in active:
        module.set_adapter(names)
        module.enable_adapters(not disabled)


def _forget(model, experts, adapter_name):
    """Remove an adapter from all modules that have it."""
    _configs_of(model).pop(adapter_name, None)
    for moe in experts.values():
        if adapter_name in lora.adapters_of(moe):
            lora.remove(moe, adapter_name)
    for module in _tuned(model):
        module.delete_adapter(adapter_name)
    # Without adapters, parameters have their old names: peft's wrappers go, the inner of two wrappers first.
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, BaseTunerLayer) and not module._get_available_adapters():
            model.set_submodule(path, module.base_layer)
    configs = getattr(model, "peft_config", {})
    configs.pop(adapter_name, None)
    if not configs and hasattr(model, "peft_config"):
        del model.peft_config


def _names_in(path, moe):
    """Return {a weight's name in transformers: its name in EPMoE}."""
    up = "gate_up_proj" if is_gated(moe.activation) else "up_proj"
    return {f"{path}.{up}": "gate_up_proj", f"{path}.down_proj": "down_proj"}


def _matches(pattern, names):
    """Whether a key of rank_pattern or alpha_pattern is about one of these names."""
    return any(get_pattern_key([pattern], name) == pattern for name in names)


def _plan(model, experts, config):
    """Return ({path of an EPMoE: _OfExperts}, LoraConfig of all other modules or None)."""
    defaults = LoraConfig()
    wrong = [f.name for f in dataclasses.fields(config) if f.name not in _KNOWN_FIELDS
             and getattr(config, f.name) != getattr(defaults, f.name)]
    if wrong:
        raise ValueError(f"LoraConfig({', '.join(f'{n}={getattr(config, n)!r}' for n in wrong)}): not for "
                         f"experts: leave it out, or adapt the experts by EPMoE.add_adapter and the other "
                         f"modules by peft")
    weights = {name: (path, of) for path, moe in experts.items() for name, of in _names_in(path, moe).items()}
    inside = tuple(f"{path}." for path in experts)
    dense = [n.replace(".base_layer", "") for n, _ in model.named_parameters() if not n.startswith(inside)]
    found, others = {path: {} for path in experts}, []
    for target in sorted(config.target_parameters or ()):
        hits = [name for name in weights if f".{name}".endswith(f".{target}")]
        if any(f".{name}".endswith(f".{target}") for name in dense):
            others.append(target)
        elif not hits:
            raise ValueError(f"target_parameters: no parameter of the model is called {target!r}; its first "
                             f"experts have {', '.join(list(weights)[:2])}")
        for name in hits:
            path, of = weights[name]
            r = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
            alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
            found[path][of] = r, alpha / (math.sqrt(r) if config.use_rslora else r)
    plan = {path: _of_experts(path, of) for path, of in found.items() if of}
    if not plan:
        raise ValueError("target_parameters: none of them is a weight of experts: use peft.get_peft_model")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    is_default = config.target_modules is None and model_type in _DEFAULT_TARGETS
    if not (others or config.target_modules or is_default):
        return plan, None
    of_others = copy.copy(config)
    of_others.target_parameters = others or None
    modules = [path for path, _ in model.named_modules() if not f"{path}.".startswith(inside)]
    for name in ("rank_pattern", "alpha_pattern"):  # peft warns of patterns that match nothing
        setattr(of_others, name, {p: v for p, v in getattr(config, name).items()
                                  if _matches(p, [*modules, *dense]) or not _matches(p, weights)})
    return plan, of_others


def _of_experts(path, found):
    """Return the _OfExperts of a module.  found: {weight: (r, scaling)}."""
    scaling = {scaling for _, scaling in found.values()}
    if max(scaling) - min(scaling) > 1e-12 * max(map(abs, scaling)):
        raise ValueError(f"rank_pattern, alpha_pattern: the two weights of {path} must have the same "
                         f"lora_alpha / r, got {' and '.join(map(str, sorted(scaling)))}")
    r = max(r for r, _ in found.values())
    return _OfExperts(r, r * min(scaling), {name: of for name, (of, _) in found.items()})


def _keys(ranks):
    """Return {key of peft: r}.  ranks: {weight: r}."""
    return {key: r for target, r in ranks.items() for key in lora.keys_of(target, tuple(ranks))}


def _check_ranks(state, moe, path, ranks):
    """Raise ValueError for tensors of peft whose names or ranks are not those of the configuration."""
    wanted = _keys(ranks)
    rows = {key: t.shape["lora_B" in key] if t.dim() == 2 else 0 for key, t in state.items()}
    if rows != {key: r * moe.num_experts for key, r in wanted.items()}:
        found = {key: rows_of / moe.num_experts for key, rows_of in rows.items()}
        raise ValueError(f"{_FILE}: {path}: wanted tensors with the ranks {wanted}, as the configuration "
                         f"says, got {found or 'none'}")


def _with_ranks(state, moe, ranks):
    """Return tensors of peft with other ranks: more are zeros, fewer are left out."""
    wanted, found = _keys(ranks), {}
    for key, t in state.items():
        dim = int("lora_B" in key)  # A is [r * E, K], and B is [N, r * E] with the experts innermost
        t = t.unflatten(dim, (-1, moe.num_experts) if dim else (moe.num_experts, -1))[:, :wanted[key]]
        t = F.pad(t, (0, 0, 0, wanted[key] - t.shape[1]))
        found[key] = t.flatten(dim, dim + 1).contiguous()
    return found


def _add_others(model, experts, config, adapter_name, state):
    """Let peft adapt the modules that are not experts, and give them the numbers of a state dict, or None."""
    if config is None:
        if state:
            raise ValueError(f"the file has tensors of modules that its configuration does not name: "
                             f"{', '.join(sorted(state)[:2])}")
        return
    with _hidden(model, experts), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")  # of another adapter
        inject_adapter_in_model(config, model, adapter_name)
        cast_adapter_dtype(model, adapter_name)  # as get_peft_model does
        if state is None:
            return
        found = set_peft_model_state_dict(model, state, adapter_name)
        missing = [n for n in found.missing_keys if "lora_" in n and f".{adapter_name}." in n]
        if missing or found.unexpected_keys:
            raise ValueError(f"the file does not fit the model: missing {missing[:2]}, unexpected "
                             f"{found.unexpected_keys[:2]}")


def _state_of_others(model, experts, adapter_name):
    """Return {key: tensor} of what peft has adapted, with the names of its files except for the prefix."""
    if adapter_name not in getattr(model, "peft_config", {}):
        return {}
    with _hidden(model, experts):
        return get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
