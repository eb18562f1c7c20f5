"""Activations of the rows of experts.  torch.ops.epmoe.activation_backward: the gradient of an activation, of
its rows' weights, and what the weight gradient of the next product needs, in one pass over the rows.
"""

import torch

from . import _C
from .direct import implement
from .gemm import GATED, aligned

_lib = torch.library.Library("epmoe", "FRAGMENT")
_lib.define("activation_backward(Tensor h, Tensor d, Tensor offsets, Tensor? row_weight, int activation, "
            "float alpha=0, float limit=0) -> (Tensor, Tensor, Tensor)")


def run_activation_backward(h, d, offsets, row_weight, activation, alpha=0.0, limit=0.0, in_place=False):
    """Return (w * d * y'(h), w * y, the sum of d * y of each row) for y = activation(h).

    h is [M, I], or [M, 2I] for a gated activation, d [M, I], both of bfloat16 or float16; row_weight w is
    float32 [M] or None.  Numbers are float32 in between, and the third result [M] is float32, a sum in a
    fixed order.  Rows that belong to no expert are undefined.  in_place: the second result is written over d.
    """
    h, d, offsets, row_weight = map(aligned, (h, d, offsets, row_weight))
    d_h = torch.empty_like(h)
    weighted = d if in_place else torch.empty_like(d)
    dots = torch.empty(len(d), dtype=torch.float32, device=d.device)
    _C.activation(activation, alpha, limit, h, d, offsets, row_weight, d_h, weighted, dots)
    return d_h, weighted, dots


def run_activation(h, offsets, activation, alpha=0.0, limit=0.0):
    """Return activation(h) [M, I], rounded once.  h and the rest are as for run_activation_backward."""
    h = aligned(h)
    y = h.new_empty(h.shape[0], h.shape[1] // (2 if activation in GATED else 1))
    _C.activation(activation, alpha, limit, h, None, aligned(offsets), None, None, y, None)
    return y


def _activation_backward(h, d, offsets, row_weight, activation, alpha=0.0, limit=0.0):
    return run_activation_backward(h, d, offsets, row_weight, activation, alpha, limit)


implement(_lib, "activation_backward", _activation_backward)


@torch.library.register_fake("epmoe::activation_backward", lib=_lib)
def _(h, d, offsets, row_weight, activation, alpha=0.0, limit=0.0):
    return torch.empty_like(h), torch.empty_like(d), d.new_empty(d.shape[0], dtype=torch.float32)
