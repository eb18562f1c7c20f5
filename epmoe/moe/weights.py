"""How an EPMoE holds its weights: one object of a module, which weight_dtype decides.

WeightFormat is that of weights in 16 or 32 bits, each of which is one parameter.  fp8.py and four_bits.py
have others, whose weights have scales, and are quantised where a module gets numbers of 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm.error_propagation import check_plain
from ..gemm.four_bit import Int4
from ..gemm.activations import as_kernel
from ..torch_modes import requires_grad

if TYPE_CHECKING:
    from .experts import Scales
    from .module import EPMoE

WEIGHTS = ("gate_up_proj", "down_proj")  # biases have no format
WeightDtype: TypeAlias = torch.dtype | str | Int4
Encoded: TypeAlias = dict[str, Tensor]  # {what a parameter's name has after that of the weight: its numbers}


class Source:
    """The tensors of one weight in a state dict, which may be in one of several forms.

    A state dict with all experts in one tensor calls them, for example, gate_up_proj and
    gate_up_proj_scale_inv; one with the experts one by one 0.gate_proj.weight and
    0.gate_proj.weight_scale_inv.  Here they are weight and weight_scale_inv in both.

    Args:
        tensors: The state dict, or a part of it.
        name: What all keys begin with.
        shape: That of the weights: [L, N, K], or of one expert and projection [N, K].
        device: The module's.
        missing: Gets the keys that a form lacks.
        errors: Gets what is wrong with a tensor.
    """

    def __init__(self, tensors: Mapping[str, Any], name: str, shape: tuple[int, ...], device: torch.device,
                 missing: list[str], errors: list[str]) -> None:
        self.tensors, self.name, self.shape, self.device = tensors, name, shape, device
        self.missing, self.errors = missing, errors
        self.is_whole = len(shape) == 3

    def key(self, ending: str) -> str:
        """Return the key of a tensor."""
        return self.name + (ending.removeprefix("weight") if self.is_whole else f".{ending}")

    def has(self, ending: str) -> bool:
        """Whether there is a tensor."""
        return self.key(ending) in self.tensors

    def refuse(self, ending: str, wrong: str) -> None:
        """Report what is wrong with a tensor."""
        self.errors.append(f"{self.key(ending)}: {wrong}")

    def get(self, ending: str, shape: tuple[int, ...] | None = None) -> Tensor | None:
        """Return a tensor, or None after a report that it is missing or wrong.

        shape: None, or the shape of a tensor of a floating-point dtype.  Where all experts are in one tensor,
        torch checks it.
        """
        t = self.tensors.get(self.key(ending))
        if t is None:
            self.missing.append(self.key(ending))
            return None
        is_tensor = isinstance(t, torch.Tensor)
        shape = None if self.is_whole else shape
        if is_tensor and (shape is None or t.shape == shape and t.dtype.is_floating_point):
            assert isinstance(t, torch.Tensor)
            return t
        wanted = "a tensor" if shape is None else f"{list(shape)} of a floating-point dtype"
        got = f"{list(t.shape)} of {t.dtype}" if is_tensor else type(t).__name__
        self.refuse(ending, f"wanted {wanted}, got {got}.")
        return None


class WeightFormat:
    """Weights of 16 or 32 bits.

    Attributes:
        title: What errors call the format.
        has_gradients: Whether weights in it can be trained.
        ends: What the names of a weight's parameters have after its own; "" are the numbers.
        endings: What Source calls the tensors of a weight in checkpoints.
        is_saved_as_held: Whether state dicts have the parameters as they are, or what `write` returns.
        saved: The endings of what `write` returns.
        sends_fp8: Whether tokens travel to these weights in FP8, quantised at their rank.
        weight_dtype: As EPMoE has it.
        dtype: The layer's.
    """

    title = "16 or 32 bits"
    has_gradients = True
    ends: tuple[str, ...] = ("",)
    endings: tuple[str, ...] = ("weight",)
    is_saved_as_held = True
    saved: tuple[str, ...] = ()
    sends_fp8 = False

    def __init__(self, weight_dtype: WeightDtype, dtype: torch.dtype) -> None:
        self.weight_dtype, self.dtype = weight_dtype, dtype

    # ---- parameters ----

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {end: (shape, dtype)} of the parameters of weights [L, N, K]."""
        return {"": (shape, self.dtype)}

    def part(self, end: str, t: Tensor, index: int, num_parts: int) -> Tensor:
        """Return one of the equal parts of the rows N, of a parameter of one expert."""
        return t.chunk(num_parts)[index]

    def check(self, moe: EPMoE) -> None:
        """Raise an error if the parameters are not as created, or the activation is unknown."""
        if not torch.compiler.is_compiling():
            as_kernel(moe.activation)
            for name in WEIGHTS:
                for end in self.ends:
                    self._check_parameter(name + end, getattr(moe, name + end), moe.layer.device)
        self._check_dtypes(moe)

    def _check_parameter(self, name: str, p: Any, device: torch.device) -> None:
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{name} of the module: wanted a tensor, got {type(p).__name__}")
        check_plain(name, p)
        if p.device != device:
            raise ValueError(f"{name} is on {p.device}, but the module was created on {device}: move it back")

    def _check_dtypes(self, moe: EPMoE) -> None:
        if moe.gate_up_proj.dtype != self.dtype:
            raise TypeError(f"the parameters are {moe.gate_up_proj.dtype} now, but the layer was made for "
                            f"{self.dtype}: pass dtype={moe.gate_up_proj.dtype} when creating the module, "
                            f"instead of casting it")

    def check_gradients(self, moe: EPMoE, x: Tensor, topk_weights: Tensor) -> None:
        """Raise RuntimeError where a gradient is wanted of experts that have none."""
        if not self.has_gradients and requires_grad(x, topk_weights, *moe.parameters(recurse=False)):
            raise RuntimeError(f"an EPMoE with weights in {self.title} has no gradients: call it under "
                               f"torch.no_grad(), or make it without weight_dtype for training, in 16 bits")

    def scales(self, moe: EPMoE) -> Scales | None:
        """Return the scales of weights of 4 bits, which the kernels read beside them, else None."""
        return None

    # ---- numbers ----

    def dequantized(self, moe: EPMoE, name: str) -> Tensor:
        """Return the weights of a name [L, N, K] in the layer's dtype, each rounded at most once."""
        t = getattr(moe, name)
        assert isinstance(t, torch.Tensor)
        return t.detach()

    def encode(self, numbers: Tensor, name: str = "weights") -> Encoded:
        """Return numbers [.., N, K] of 16 or 32 bits as the parameters hold them.  name: for errors."""
        return {"": numbers}

    def put(self, moe: EPMoE, name: str, i: int, numbers: Tensor) -> None:
        """Make numbers [N, K] those of the i-th expert of this rank, in the weight of a name."""
        for end, t in self.encode(numbers[None]).items():
            getattr(moe, name + end)[i] = t[0]

    # ---- state dicts ----

    def read(self, source: Source) -> Encoded:
        """Return what the parameters get from a state dict: {} after a report."""
        t = source.get("weight", source.shape)
        if t is None:
            return {}
        if t.dtype.itemsize == 1:  # torch would cast the numbers without their scales
            other = ("torch.float8_e4m3fn" if t.dtype.is_floating_point and t.dtype != torch.float4_e2m1fn_x2
                     else '"mxfp4"')
            source.refuse("weight", f"the weights are {t.dtype}, but this EPMoE has {self.dtype}: create it "
                                    f"with weight_dtype={other}.")
            return {}
        return {"": t}

    def write(self, weight: Encoded) -> dict[str, Tensor]:
        """Return {ending: tensor} of a state dict, of the parameters of experts [.., N, K]."""
        raise NotImplementedError  # only where they are not saved as held


# ---- changes that torch does not count ----

_num_steps = 0  # of all optimizers of this process
_hook: Any = None


def count_steps() -> None:
    """Count the steps of optimizers of torch from now on.

    A step may change weights without a new version of them: a fused one, and one that writes through `.data`.
    """
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_step)


def num_steps() -> int:
    return _num_steps


def _after_step(*_: Any) -> None:
    global _num_steps
    _num_steps += 1
