"""What EPMoE's state dicts hold, and what it loads beside them: checkpoints with the experts one by one.

Such a checkpoint has, for each expert e, `e.gate_proj.weight`, `e.up_proj.weight` and `e.down_proj.weight`,
[out, in], or `e.w1.weight`, `e.w3.weight` and `e.w2.weight`; and with scales also, for example,
`weight_scale_inv` of each.  EPMoE has them in gate_up_proj and down_proj.  What tensors a weight has, and how
they become parameters, is a matter of its format (weights.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..gemm.activations import gpt_oss_numbers, is_gated
from ..torch_modes import writing
from . import lora, shards
from .shards import StateDict, is_dtensor
from .weights import WEIGHTS, Source, WeightFormat

if TYPE_CHECKING:
    from .module import EPMoE

_KEY = re.compile(r"(\d+)\.(\w+)\.(\w+)")
_OTHER_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # of Mixtral and DeepSeek-V4


class Staged:
    """A context in which an EPMoE has copies of its parameters and buffers, to load a state dict into them.

    Only keep() brings what was loaded into the module.  So a wrong tensor, or a lack of memory, in the middle
    changes nothing.
    """

    def __init__(self, moe: EPMoE) -> None:
        _to_shards(moe)
        # Private: setattr would also call the hooks of registration, which must not see copies.
        self._stores: tuple[dict[str, Any], ...] = moe._parameters, moe._buffers

    def __enter__(self) -> Self:
        self._own = [dict(store) for store in self._stores]
        self._copies = [{name: self._copy(t) for name, t in own.items()} for own in self._own]
        for store, copies in zip(self._stores, self._copies):
            store.update(copies)
        return self

    def _copy(self, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        with torch.no_grad():
            copy = t.detach().clone()
        return torch.nn.Parameter(copy, t.requires_grad) if isinstance(t, torch.nn.Parameter) else copy

    def keep(self) -> None:
        """Write what was loaded in place, except tensors that were assigned (assign=True)."""
        for store, own, copies in zip(self._stores, self._own, self._copies):
            for name, copy in copies.items():
                if copy is None:
                    continue
                if store[name] is not copy:
                    own[name] = store[name]
                    continue
                with writing([own[name]]):
                    own[name].copy_(copy)

    def __exit__(self, *_: object) -> None:
        for store, own in zip(self._stores, self._own):
            store.update(own)


def _to_shards(moe: EPMoE) -> None:
    """Let FSDP2 put its shards in the place of parameters that it has gathered, as it does in each load.

    Its hook would do it when the copies are there, and take them for what it has gathered.
    """
    for hook in list(moe._load_state_dict_pre_hooks.values()):  # private
        if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard"):
            hook()


def _parts(moe: EPMoE) -> dict[str, tuple[str, int, int]]:
    """Return {projection: (name of its parameter, which of its equal parts, how many parts)}."""
    if is_gated(moe.activation):
        return {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2),
                "down_proj": ("down_proj", 0, 1)}
    return {"up_proj": ("gate_up_proj", 0, 1), "down_proj": ("down_proj", 0, 1)}


class _Loader:
    """Copies the experts of a rank from a state dict that has them one by one."""

    def __init__(self, moe: EPMoE, state_dict: StateDict, prefix: str, missing: list[str],
                 errors: list[str]) -> None:
        self.moe, self.state_dict, self.prefix = moe, state_dict, prefix
        self.missing, self.errors = missing, errors
        self.parts = _parts(moe)
        self.names = {projection: projection for projection in self.parts}  # in the state dict

    def run(self) -> set[str]:
        """Copy all, and return the keys that are of experts, on any rank."""
        known = self._known()
        if not known and is_gated(self.moe.activation):
            self.names = _OTHER_NAMES
            known = self._known()
        if not known:
            return known
        if gpt_oss_numbers(self.moe.activation):
            self.errors.append(f"{self.prefix}: has gates and ups apart, but this EPMoE has them "
                               f"interleaved: load gate_up_proj and down_proj.")
        elif any(is_dtensor(p) for p in self.moe.parameters(recurse=False)):
            self.errors.append(f"{self.prefix}: has the experts one by one, which cannot be loaded after "
                               f"fully_shard: load before it.")
        elif self.moe._computed:
            self.errors.append(f"{self.prefix}: has the experts one by one, which cannot be loaded into "
                               f"{', '.join(self.moe._computed)}, computed by a parametrization or pruning: "
                               f"load before it was added.")
        else:
            for i, e in enumerate(self.moe._held):
                for projection in self.parts if e >= 0 else ():
                    self._load_one(i, e, projection)
        return known

    def _known(self) -> set[str]:
        """Return the keys of experts."""
        endings = {*self.moe._format.endings, *(["bias"] if self.moe.down_proj_bias is not None else [])}
        found = set()
        for key in self.state_dict:
            match = _KEY.fullmatch(key[len(self.prefix):]) if key.startswith(self.prefix) else None
            if (match is not None and int(match[1]) < self.moe.num_experts
                    and match[2] in self.names.values() and match[3] in endings):
                found.add(key)
        return found

    def _load_one(self, i: int, e: int, projection: str) -> None:
        name, part, num_parts = self.parts[projection]
        moe, key = self.moe, f"{self.prefix}{e}.{self.names[projection]}"
        _, n, k = moe._shapes[name]
        source = Source(self.state_dict, key, (n // num_parts, k), moe.layer.device, self.missing,
                        self.errors)
        if moe.down_proj_bias is not None:
            to = getattr(moe, name + "_bias")[i].detach().chunk(num_parts)[part]
            if (bias := source.get("bias", to.shape)) is not None:
                to.copy_(bias)
        for end, t in moe._format.read(source).items():
            moe._format.part(end, getattr(moe, name + end)[i].detach(), part, num_parts).copy_(t)


def load_experts(moe: EPMoE, state_dict: StateDict, prefix: str, missing: list[str],
                 errors: list[str]) -> tuple[StateDict, StateDict]:
    """Load the experts of this rank from a state dict that has them one by one.

    Returns (what is left of the state dict, entries): the entries are the parameters themselves, where they
    have been loaded.
    """
    with torch.no_grad():
        known = _Loader(moe, state_dict, prefix, missing, errors).run()
    has_none = max(moe._held) < 0 and not any(prefix + name in state_dict for name in saved(moe))
    if not known and not has_none:  # a rank without experts has none to load one by one
        return state_dict, {}
    left = {key: t for key, t in state_dict.items() if key not in known}
    return left, {prefix + name: p for name, p in moe.named_parameters(recurse=False)}


# ---- all experts in one tensor ----


def save_own(moe: EPMoE, state_dict: StateDict, prefix: str, metadata: StateDict) -> None:
    """A hook of an EPMoE, after its state dict was made."""
    shards.save(moe, moe, state_dict, prefix, metadata, saved(moe))


def _keys(format: WeightFormat, name: str) -> list[str]:
    """Return what state dicts with all experts in one tensor may call the tensors of a weight."""
    return [name + ending.removeprefix("weight") for ending in format.endings if ending.startswith("weight")]


def saved(moe: EPMoE) -> dict[str, Tensor]:
    """Return {what a state dict may have of the experts: a tensor that has as many experts}."""
    named = shards.named_tensors(moe)
    for name in WEIGHTS if not moe._format.is_saved_as_held else ():
        if name in named:
            numbers = named[name]
            named = {key: t for key, t in named.items() if key not in _held(moe, name)}
            named |= dict.fromkeys(_keys(moe._format, name), numbers)
    return named


def _held(moe: EPMoE, name: str) -> list[str]:
    """Return the names of the parameters of a weight."""
    return [name + end for end in moe._format.ends]


def read_weights(moe: EPMoE, own: StateDict, prefix: str, state_dict: StateDict, missing: list[str],
                 errors: list[str]) -> StateDict:
    """Let the entries of weights be what the parameters hold.

    own: {key: what this rank keeps}; changed in place.
    Returns what is left of the state dict: that without the keys that are no parameters.
    """
    format = moe._format
    if moe._computed and not format.is_saved_as_held:
        errors.append(f"{_computed(moe)}.")
        return state_dict
    for name in WEIGHTS:
        if name in moe._computed:
            continue
        keys = [prefix + key for key in _keys(format, name)]
        held = {prefix + key: getattr(moe, key) for key in _held(moe, name)}
        before, absent = len(errors), list[str]()
        source = Source(own, prefix + name, moe._shapes[name], moe.layer.device, absent, errors)
        is_wrong = any(own.get(key) is t for key in keys for t in held.values())  # as own_entries has said
        with torch.no_grad():
            found = {} if is_wrong else format.read(source)
        if not format.is_saved_as_held:
            state_dict = {key: t for key, t in state_dict.items() if key not in keys}
            for key in keys:
                own.pop(key, None)
            missing += absent
        elif len(errors) == before:
            held = {}  # torch reports what is missing
        own.update(held)
        own.update({prefix + name + end: t for end, t in found.items()})
    return state_dict


def write_weights(moe: EPMoE, state_dict: StateDict, prefix: str) -> None:
    """Let a state dict that holds the parameters hold what it should have of the weights.

    It may have the experts of this rank, or of all ranks.
    """
    format = moe._format
    check_writable(moe)
    for name in WEIGHTS if not format.is_saved_as_held else ():
        weight = {end: state_dict.pop(prefix + name + end) for end in format.ends}
        for ending, t in format.write(weight).items():
            state_dict[prefix + name + ending.removeprefix("weight")] = t


def below(moe: EPMoE, prefix: str) -> StateDict:
    """Return {key: tensor} of the modules below, as adapters, which torch loads after the module itself."""
    return {prefix + name: t for name, t in shards.named_tensors(moe).items() if "." in name}


def fits(t: Any, p: Tensor) -> bool:
    """Whether torch loads t into p without an error.  Absent entries (None) are a matter of `strict`."""
    if t is None:
        return True
    return isinstance(t, torch.Tensor) and (t.shape == p.shape or not p.dim() and t.shape == (1,))


def check_writable(moe: EPMoE) -> None:
    """Raise RuntimeError for weights that a state dict cannot have."""
    lora.check_unmerged(moe, "state_dict()")
    if moe._computed and not moe._format.is_saved_as_held:
        raise RuntimeError(f"state_dict(): {_computed(moe)}")


def _computed(moe: EPMoE) -> str:
    return (f"{', '.join(moe._computed)} of this EPMoE with weights in {moe._format.title}: computed by a "
            f"parametrization or pruning, which state dicts of such weights cannot have: remove it first")
