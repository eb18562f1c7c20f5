"""The activations of experts, in plain PyTorch.

Where no kernel applies an activation, epmoe takes `activate`: in float32, and in the gradients of
`grouped_gemm` and of the mega functions.  EPMoE in 16 bits has kernels for the gradients, too.  The list of
the activations, and which of them have gates, is EP_ACTIVATIONS of csrc/protocol/activation.h.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F

from .. import _C
from ..torch_modes import constant_for_dynamo


class GptOss(NamedTuple):
    """The activation of GPT-OSS with other numbers than that model's.

    (up + 1) * gate * sigmoid(alpha * gate), where gate <= limit and |up| <= limit.  Creating one checks
    nothing; the functions that use it raise ValueError for numbers out of range.

    Attributes:
        alpha: The factor in the sigmoid; finite.  Default: 1.702.
        limit: The bound on gate and |up|; positive.  Infinity means no bound.  Default: 7.0.

    Examples:
        >>> import epmoe
        >>> epmoe.GptOss(limit=float("inf"))
        GptOss(alpha=1.702, limit=inf)

    References:
        The model code of OpenAI's gpt-oss-20b and gpt-oss-120b.
    """

    alpha: float = 1.702
    limit: float = 7.0


class SwiGLU(NamedTuple):
    """The gate of SwiGLU with other numbers.

    (up + offset) * gate * sigmoid(alpha * gate), where gate <= limit and |up| <= limit.  The first half of
    the weight rows are gates, the second half ups.  SwiGLU(limit=10.0) is the clamped gate of DeepSeek-V4.
    SwiGLU(1.702, 7.0, 1) is the function of GPT-OSS for rows that are not interleaved, as in MiniMax-M3.
    SwiGLU(1.702) has a quick GELU in the place of SiLU.  Creating one checks nothing; the functions that use
    it raise ValueError for numbers out of range.

    Attributes:
        alpha: The factor in the sigmoid; finite.  Default: 1.
        limit: The bound on gate and |up|; positive.  Default: infinity, no bound.
        offset: What is added to up after the clamp: 0 (default) or 1.

    Examples:
        >>> import epmoe
        >>> epmoe.SwiGLU(limit=10.0)
        SwiGLU(alpha=1.0, limit=10.0, offset=0)

    References:
        The model code of DeepSeek-V4 and MiniMax-M3 in Hugging Face's transformers.
    """

    alpha: float = 1.0
    limit: float = math.inf
    offset: int = 0


Activation: TypeAlias = str | SwiGLU | GptOss
# An activation as the module takes it: EpActivation of csrc/protocol/activation.h
Kernel: TypeAlias = Sequence[float]


def gpt_oss_numbers(activation: Activation | None) -> tuple[float, float] | None:
    """Return the numbers of a GPT-OSS activation.

    Args:
        activation: "gpt_oss", a GptOss, or any other activation.

    Returns:
        A tuple (alpha, limit) of floats, or None for any other activation.

    Raises:
        ValueError: For an alpha that is not finite, or a limit that is not positive.

    Examples:
        >>> from epmoe.gemm.activations import gpt_oss_numbers
        >>> gpt_oss_numbers("gpt_oss")
        (1.702, 7.0)
    """
    if activation == "gpt_oss":
        activation = GptOss()
    if not isinstance(activation, GptOss):
        return None
    return _numbers(activation)


def _numbers(activation: SwiGLU | GptOss) -> tuple[float, float]:
    alpha, limit = map(float, activation[:2])
    if not (abs(alpha) < math.inf and limit > 0):
        raise ValueError(f"activation {activation}: must have a finite alpha and a positive limit")
    if activation[2:] not in ((), (0,), (1,)):
        raise ValueError(f"activation {activation}: must have an offset of 0 or 1")
    return alpha, limit


# Whether each activation that is a name without numbers has a gate.
_IS_GATED = {name: is_gated for name, is_gated, has_numbers in _C.ACTIVATIONS[1:] if not has_numbers}
UNGATED = tuple(name for name, is_gated in _IS_GATED.items() if not is_gated)
_gelu_tanh = functools.partial(F.gelu, approximate="tanh")
# What they compute: of the columns, or of the gates, which the ups then multiply.
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "swiglu": F.silu, "geglu_tanh": _gelu_tanh, "relu2": lambda h: F.relu(h).square(),
    "gelu_tanh": _gelu_tanh, "silu": F.silu}


def is_gated(activation: Activation) -> bool:
    """Return whether an activation has a gate for each column of its result.

    Args:
        activation: As for activate.

    Returns:
        True or False.

    Raises:
        ValueError: As activate.

    Examples:
        >>> from epmoe.gemm.activations import is_gated
        >>> is_gated("swiglu"), is_gated("relu2")
        (True, False)
    """
    if isinstance(activation, str) and activation in _IS_GATED:
        return _IS_GATED[activation]
    if gpt_oss_numbers(activation):
        return True
    if isinstance(activation, SwiGLU):
        return bool(_numbers(activation))
    raise ValueError(f"activation {activation!r}: must be {', '.join(map(repr, _IS_GATED))}, 'gpt_oss', "
                     f"SwiGLU(alpha, limit, offset) or GptOss(alpha, limit)")


def activate(h: torch.Tensor, activation: Activation = "swiglu") -> torch.Tensor:
    """Apply an activation.

    Args:
        h: [.., 2I] for the gated activations, [.., I] for the others; any floating-point dtype.
        activation: One of

            - "swiglu": silu(gate) * up.  The first I columns are gates, the others ups, as in the checkpoints
              of DeepSeek, Qwen and Mixtral.
            - "gpt_oss" or GptOss(alpha, limit): (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit
              and |up| <= limit; 1.702 and 7 for "gpt_oss".  Gates and ups are interleaved.
            - SwiGLU(alpha, limit, offset): (up + offset) * gate * sigmoid(alpha * gate), with such limits.
              Gates first, then ups.
            - "geglu_tanh": gelu_tanh(gate) * up, as in Gemma 4.  Gates first, then ups.
            - Without a gate: "relu2": max(h, 0) squared, as in Nemotron; "gelu": the exact GELU, by the error
              function; "gelu_tanh": its approximation by tanh; "silu": h * sigmoid(h).

    Returns:
        [.., I], of h's dtype.

    Raises:
        ValueError: For any other activation, or for numbers of a GptOss or SwiGLU out of range.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> reference.activate(torch.tensor([[0.0, 2.0, 3.0, 4.0]]))
        tensor([[0.0000, 7.0464]])

    References:
        "swiglu": Shazeer, "GLU Variants Improve Transformer", 2020.  "gelu": Hendrycks and Gimpel, "Gaussian
        Error Linear Units", 2016.  "gpt_oss": the model code of OpenAI's gpt-oss.  "relu2": So et al.,
        "Primer: Searching for Efficient Transformers for Language Modeling", 2021.
    """
    if not is_gated(activation):
        return _FUNCTIONS[cast(str, activation)](h)
    gate, up = h.chunk(2, -1)
    if isinstance(activation, str) and activation in _FUNCTIONS:
        return _FUNCTIONS[activation](gate) * up
    # 16-bit dtypes are too coarse for the values in between
    if h.dtype in (torch.float16, torch.bfloat16):
        return activate(h.float(), activation).to(h.dtype)
    if numbers := gpt_oss_numbers(activation):
        gate, up, offset = h[..., 0::2], h[..., 1::2], 1
    else:
        gate_of = cast(SwiGLU, activation)
        numbers, offset = _numbers(gate_of), gate_of.offset
    alpha, limit = numbers
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + offset) * gate * torch.sigmoid(alpha * gate)


# ---- as the module takes them ----

_KINDS = {name: kind for kind, (name, _, _) in enumerate(_C.ACTIVATIONS)}
_NAMES = {kind: None if name == "none" else name for name, kind in _KINDS.items()}
_SWIGLU_KINDS = _KINDS["swiglu_numbers"], _KINDS["swiglu_plus_one"]  # by the offset of SwiGLU
_GPT_OSS = _KINDS["gpt_oss"]
_GATED_KINDS = tuple(kind for kind, (_, is_gated, _) in enumerate(_C.ACTIVATIONS) if is_gated)
# What as_kernel returns for an activation that is a name or None.
KERNELS: dict[str | None, Kernel] = {name: (kind, *(gpt_oss_numbers(name) or (0.0, 0.0)))
                                     for kind, name in _NAMES.items() if kind not in _SWIGLU_KINDS}


@constant_for_dynamo  # else the numbers would be inputs of its graph
def _of_name(name: str | None) -> Kernel | None:
    return KERNELS.get(name)


def as_kernel(activation: Activation | None) -> Kernel:
    """Return an activation as the module takes it.

    Args:
        activation: As for activate, or None.

    Returns:
        Its kind and its numbers: the fields of EpActivation in csrc/protocol/activation.h.

    Raises:
        ValueError: As activate.

    Examples:
        >>> from epmoe.gemm.activations import as_kernel
        >>> as_kernel("gpt_oss")
        (3, 1.702, 7.0)
    """
    if isinstance(activation, (str, type(None))) and (kernel := _of_name(activation)):
        return kernel
    gate = cast(SwiGLU | GptOss, activation)
    is_gated(gate)  # raises
    if numbers := gpt_oss_numbers(gate):
        return _GPT_OSS, *numbers
    gate = cast(SwiGLU, gate)
    return as_kernel("swiglu") if gate == SwiGLU() else (_SWIGLU_KINDS[int(gate.offset)], *_numbers(gate))


def activation_of(kernel: Kernel) -> Activation | None:
    """Return the activation of which as_kernel has returned this.

    Args:
        kernel: What as_kernel returns, also as a list.

    Returns:
        An activation, or None.

    Examples:
        >>> from epmoe.gemm.activations import activation_of, as_kernel
        >>> activation_of(as_kernel("swiglu"))
        'swiglu'
    """
    kind, alpha, limit = kernel
    if kind in _SWIGLU_KINDS:
        return SwiGLU(alpha, limit, _SWIGLU_KINDS.index(int(kind)))
    return GptOss(alpha, limit) if kind == _GPT_OSS else _NAMES[int(kind)]


def out_columns(columns: int, kernel: Kernel) -> int:
    """Return how many columns an activation makes of those of a product.

    Args:
        columns: Those of the product.
        kernel: What as_kernel returns.

    Returns:
        Half as many, if the activation has gates, else as many.

    Examples:
        >>> from epmoe.gemm.activations import as_kernel, out_columns
        >>> out_columns(8, as_kernel("swiglu")), out_columns(8, as_kernel(None))
        (4, 8)
    """
    return columns // 2 if has_gates(kernel) else columns


def has_gates(kernel: Kernel) -> bool:
    """Return whether half of the columns of a product are gates.

    Args:
        kernel: What as_kernel returns.

    Returns:
        True or False.

    Examples:
        >>> from epmoe.gemm.activations import as_kernel, has_gates
        >>> has_gates(as_kernel("swiglu")), has_gates(as_kernel("relu2"))
        (True, False)
    """
    return kernel[0] in _GATED_KINDS


def has_gates_first(kernel: Kernel) -> bool:
    """Return whether all gates come before the ups.  In the other gated activations they alternate.

    Args:
        kernel: What as_kernel returns.

    Returns:
        True or False.

    Examples:
        >>> from epmoe.gemm.activations import as_kernel, has_gates_first
        >>> has_gates_first(as_kernel("swiglu")), has_gates_first(as_kernel("gpt_oss"))
        (True, False)
    """
    return has_gates(kernel) and kernel[0] != _GPT_OSS
