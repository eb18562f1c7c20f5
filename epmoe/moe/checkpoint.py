"""What EPMoE.load_state_dict takes beside its own parameters: checkpoints with the experts one by one.

Such a checkpoint has, for each expert e, `e.gate_proj.weight`, `e.up_proj.weight` and `e.down_proj.weight`,
[out, in], and in FP8 also `weight_scale_inv` of each.  EPMoE has them in gate_up_proj and down_proj.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..gemm.activations import gpt_oss_numbers, is_gated
from ..gemm.quantize import quantize_fp8_weight
from ..torch_modes import writing
from . import fp8
from .shards import StateDict, is_dtensor

if TYPE_CHECKING:
    from .module import EPMoE

_KEY = re.compile(r"(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale_inv|bias)")


class Staged:
    """A context in which an EPMoE has copies of its parameters and buffers, to load a state dict into them.

    Only keep() brings what was loaded into the module.  So a wrong tensor, or a lack of memory, in the middle
    changes nothing.
    """

    def __init__(self, moe: EPMoE) -> None:
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

    def run(self) -> set[str]:
        """Copy all, and return the keys that are of experts, on any rank."""
        known = {key for key in self.state_dict if self._is_known(key)}
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

    def _is_known(self, key: str) -> bool:
        match = _KEY.fullmatch(key[len(self.prefix):]) if key.startswith(self.prefix) else None
        if match is None or int(match[1]) >= self.moe.num_experts or match[2] not in self.parts:
            return False
        return {"weight": True, "bias": self.moe.down_proj_bias is not None,
                "weight_scale_inv": self.moe.is_fp8}[match[3]]

    def _get(self, key: str, to: Tensor) -> Tensor | None:
        """Return the tensor of a key if it has the shape of its destination."""
        t = self.state_dict.get(key)
        if t is None:
            self.missing.append(key)
        elif not isinstance(t, torch.Tensor) or t.shape != to.shape or not t.dtype.is_floating_point:
            got = f"{list(t.shape)} of {t.dtype}" if isinstance(t, torch.Tensor) else type(t).__name__
            self.errors.append(f"{key}: wanted {list(to.shape)} of a floating-point dtype, got {got}.")
        else:
            return t
        return None

    def _at(self, name: str, i: int, projection: str) -> Tensor:
        """Return the part of a parameter, of the i-th expert of this rank, that a projection has."""
        _, part, num_parts = self.parts[projection]
        return getattr(self.moe, name)[i].detach().chunk(num_parts)[part]

    def _load_one(self, i: int, e: int, projection: str) -> None:
        name, key = self.parts[projection][0], f"{self.prefix}{e}.{projection}."
        to = self._at(name, i, projection)
        t = self._get(key + "weight", to)
        if self.moe.down_proj_bias is not None:
            to_bias = self._at(name + "_bias", i, projection)
            if (bias := self._get(key + "bias", to_bias)) is not None:
                to_bias.copy_(bias)
        if t is None or (wrong := error_of_dtype(self.moe, t)) is not None:
            if t is not None:
                self.errors.append(f"{key}weight: {wrong}")
            return
        if not self.moe.is_fp8:
            to.copy_(t)
            return
        to_scales = self._at(name + fp8.SCALE, i, projection)
        if t.dtype == fp8.E4M3:
            scales = self._get(key + "weight_scale_inv", to_scales)
            if scales is None:
                return
        elif key + "weight_scale_inv" in self.state_dict:
            self.errors.append(f"{key}weight_scale_inv: is given, but the weights are {t.dtype}.")
            return
        else:
            t, scales = (q[0] for q in quantize_fp8_weight(t.detach().to(to.device)[None]))
        to.copy_(t)
        to_scales.copy_(scales)


def error_of_dtype(moe: EPMoE, t: Tensor) -> str | None:
    """Return what is wrong with the dtype of weights, or None.  torch would cast FP8 without its scales."""
    if t.dtype.itemsize != 1 or (moe.is_fp8 and t.dtype == fp8.E4M3):
        return None
    if moe.is_fp8:
        return f"wanted torch.float8_e4m3fn, or 16 or 32 bits to quantise, got {t.dtype}."
    return (f"the weights are {t.dtype}, but this EPMoE has {moe.layer.dtype}: create it with "
            f"weight_dtype=torch.float8_e4m3fn.")


def load_experts(moe: EPMoE, state_dict: StateDict, prefix: str, missing: list[str],
                 errors: list[str]) -> tuple[StateDict, StateDict]:
    """Load the experts of this rank from a state dict that has them one by one.

    Returns (what is left of the state dict, entries): the entries are the parameters themselves, where they
    have been loaded.
    """
    with torch.no_grad():
        known = _Loader(moe, state_dict, prefix, missing, errors).run()
    if not known:
        return state_dict, {}
    left = {key: t for key, t in state_dict.items() if key not in known}
    return left, {prefix + name: p for name, p in moe.named_parameters(recurse=False)}


def quantized(moe: EPMoE, own: StateDict, prefix: str, state_dict: StateDict, errors: list[str]) -> None:
    """Quantise the entries of weights that are in 16 or 32 bits, for a module with weights in FP8.

    own: {key: what this rank keeps}; changed in place.
    """
    for name in fp8.WEIGHTS:
        key, p = prefix + name, getattr(moe, name)
        t = own.get(key)
        if not isinstance(t, torch.Tensor):
            continue
        if (wrong := error_of_dtype(moe, t)) is not None:
            errors.append(f"{key}: {wrong}")
            own[key] = p
        elif moe.is_fp8 and t.dtype != fp8.E4M3 and t.shape == p.shape and t is not p:
            if key + fp8.SCALE in state_dict:
                errors.append(f"{key}{fp8.SCALE}: is given, but {name} is {t.dtype}.")
                continue
            with torch.no_grad():
                q, scales = quantize_fp8_weight(t.detach().to(p.device))
            own[key], own[key + fp8.SCALE] = q, scales
