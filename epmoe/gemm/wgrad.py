"""torch.ops.epmoe.grouped_wgrad_add: weights' gradients that are added to a buffer, such as float32 ones."""

import torch

from .. import _C
from ..torch_modes import implement, mark_written
from .grouped import WGRAD, aligned, has_kernel, rows_of_experts, tile_counter

_lib = torch.library.Library("epmoe", "FRAGMENT")
_lib.define("grouped_wgrad_add(Tensor a, Tensor b, Tensor offsets, Tensor(a!) out, float scale, bool "
            "portable) -> ()")


def _bytes_of(t):
    """Return where the first element of t begins, and where the last one ends."""
    reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) + 1
    return t.data_ptr(), t.data_ptr() + reach * t.element_size() * (t.numel() > 0)


def _check_apart(out, **inputs):
    """Raise ValueError for an out that shares memory with an input, as the module does for its kernels."""
    begin, end = _bytes_of(out)
    for name, (first, last) in ((name, _bytes_of(t)) for name, t in inputs.items()):
        if first < end and begin < last and first < last:
            raise ValueError(f"output shares memory with {name}, but the call writes the first while it uses "
                             f"the second: pass a tensor with memory of its own")


def _by_expert(a, b, offsets, out, scale):
    """Add by torch, one product per expert.  Products of 16-bit numbers are not rounded before the sum."""
    _check_apart(out, rows=a, input=b, offsets=offsets)
    wide = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        for e, begin, end in rows_of_experts(offsets, a.shape[0]):
            if end > begin:
                out[e] += (a[begin:end].to(wide).t() @ b[begin:end].to(wide)).mul_(scale)


def _grouped_wgrad_add(a, b, offsets, out, scale, portable):
    """out[e] [N, K] += scale * the sum of a[r]^T b[r] over the rows of expert e.

    a is [M, N] and b [M, K].  Where a float32 out is aligned to 16 bytes, the kernel adds to it once, and on
    Hopper the L2 makes the addition.  There, numbers below 2^-126 count as zero.
    """
    if not has_kernel(a, b):
        _by_expert(a, b, offsets, out, scale)
        return
    a, b, offsets = map(aligned, (a, b, offsets))
    fits = out.dtype == torch.float32 and out.is_contiguous() and out.data_ptr() % 16 == 0
    sums = out if fits else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    counter = tile_counter(a)
    mark_written((sums,))
    _C.grouped_gemm(WGRAD, 0, scale, 0.0, a, b, offsets, None, None, counter, sums, portable)
    if not fits:
        out.add_(sums)


implement(_lib, "grouped_wgrad_add", _grouped_wgrad_add)
