"""The activations of experts, in plain PyTorch.

Where no kernel applies an activation, for example where a gradient is wanted, epmoe takes `activate`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F


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


def gpt_oss_numbers(activation):
    """Return the numbers of a GPT-OSS activation.

    Args:
        activation: "gpt_oss", a GptOss, or any other activation.

    Returns:
        A tuple (alpha, limit) of floats, or None for any other activation.

    Raises:
        ValueError: For an alpha that is not finite, or a limit that is not positive.

    Examples:
        >>> from epmoe.activations import gpt_oss_numbers
        >>> gpt_oss_numbers("gpt_oss")
        (1.702, 7.0)
    """
    if activation == "gpt_oss":
        activation = GptOss()
    if not isinstance(activation, GptOss):
        return None
    alpha, limit = map(float, activation)
    if not (abs(alpha) < math.inf and limit > 0):
        raise ValueError(f"activation {activation}: must have a finite alpha and a positive limit")
    return alpha, limit


def activate(h, activation="swiglu"):
    """Apply an activation.

    Args:
        h: [.., 2I] for the gated activations, [.., I] for "gelu"; any floating-point dtype.
        activation: One of

            - "swiglu": silu(gate) * up.  The first I columns are gates, the others ups, as in the checkpoints
              of DeepSeek, Qwen and Mixtral.
            - "gpt_oss" or GptOss(alpha, limit): (up + 1) * gate * sigmoid(alpha * gate), with gate <= limit
              and |up| <= limit; 1.702 and 7 for "gpt_oss".  Gates and ups are interleaved.
            - "gelu": the exact GELU, by the error function.

    Returns:
        [.., I], of h's dtype.

    Raises:
        ValueError: For any other activation, or for numbers of a GptOss out of range.

    Examples:
        >>> import torch
        >>> from epmoe import reference
        >>> reference.activate(torch.tensor([[0.0, 2.0, 3.0, 4.0]]))
        tensor([[0.0000, 7.0464]])

    References:
        "swiglu": Shazeer, "GLU Variants Improve Transformer", 2020.  "gelu": Hendrycks and Gimpel, "Gaussian
        Error Linear Units", 2016.  "gpt_oss": the model code of OpenAI's gpt-oss.
    """
    if activation == "gelu":
        return F.gelu(h)
    if activation == "swiglu":
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up
    if numbers := gpt_oss_numbers(activation):
        # 16-bit dtypes are too coarse for the values in between
        if h.dtype in (torch.float16, torch.bfloat16):
            return activate(h.float(), activation).to(h.dtype)
        alpha, limit = numbers
        gate = h[..., 0::2].clamp(max=limit)
        up = h[..., 1::2].clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    raise ValueError(f"activation {activation!r}: must be swiglu, gpt_oss or gelu, or GptOss(alpha, limit)")
