"""Measures quantize_fp8: its time beside that of a copy of as many bytes, and of torch's operations.

The rows are those of the two grouped GEMMs of one rank of four: tokens, and gates and ups.  A copy reads half
of the bytes and writes the other half.  Sampled rows are compared with float64 before anything is timed.
"""

import functools

import torch

import epmoe
from epmoe.gemm import quantize as fp8
from epmoe.gemm.activations import as_kernel
from epmoe.reference import activate

from .check import poisoned
from .gemm import random_rows
from .measure import alternated


def error(x, activation, q, scales):
    """Return what is wrong with sampled rows of quantize_fp8(x, activation), or ""."""
    at = torch.arange(0, len(x), max(1, len(x) // 64), device=x.device)
    want = x[at].double() if activation is None else activate(x[at].double(), activation)
    groups = torch.nn.functional.pad(want, (0, -want.shape[1] % 128)).unflatten(1, (-1, 128))
    most = groups.abs().amax(2)
    each = scales[at].double().repeat_interleave(128, 1)[:, :want.shape[1]]
    bound = (2.0**-4 * want.abs()).maximum(2.0**-10 * each) * 1.001
    num_wrong = (~((q[at].double() * each - want).abs() <= bound)).sum()
    num_wrong += (~((448 * scales[at].double() - most).abs() <= 1e-4 * most)).sum()
    return f"{int(num_wrong)} sampled numbers or scales differ from float64" if num_wrong else ""


@torch.no_grad()
def measure(run, shape):
    g, _, num_rows, _ = random_rows(run, shape)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    for name, columns, activation in (("", shape.hidden, None), (" SwiGLU", 2 * shape.inner, "swiglu")):
        x = torch.randn(num_rows, columns, device=run.device, generator=g).to(dtype)
        with poisoned():
            q, scales = epmoe.quantize_fp8(x, activation)
            run.agree(error(x, activation, q, scales))
        num_bytes = sum(t.numel() * t.element_size() for t in (x, q, scales))
        source, copy = torch.empty(2, num_bytes // 2, dtype=torch.uint8, device=run.device)
        fns = {f"epmoe quantise{name}": functools.partial(epmoe.quantize_fp8, x, activation),
               f"torch quantise{name}": functools.partial(fp8._quantize_by_torch, x, as_kernel(activation)),
               f"copy of as many bytes{name}": functools.partial(copy.copy_, source)}
        rounds, round_ms = (6, 20.0) if run.on_gpu else (3, 1.0)
        ms = dict(zip(fns, alternated(list(fns.values()), run.device, run.cpu_group,
                                      run.options.iters or rounds, round_ms)))
        ours = next(iter(ms))
        for impl in reversed(ms):
            over = {peer: ms[peer] for peer in ms if impl == ours and peer != impl}
            gbps = num_bytes / ms[impl] / 1e6
            run.record("gemm", shape, impl, ms[impl], over=over, rate=f"{gbps:.4g} GB/s",
                       gbps=round(gbps, 1))
