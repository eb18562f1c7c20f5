"""Measures the grouped GEMMs alone, compared with torch's: those of one rank of four, forward and backward.

The rows are the choices of T tokens, spread at random over the rank's experts.  Every GEMM is compared with
float64 on sampled rows before it is timed, alternating with torch's.  Two shapes are added: a dense GEMM, and
a decoding batch, where reading the weights takes all the time.
"""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F

import epmoe
from epmoe.gemm.activations import as_kernel
from epmoe.gemm.grouped import DGRAD, FORWARD, WGRAD
from epmoe.reference import activate

from .check import poisoned
from .measure import alternated
from .shapes import SHAPES, Shape

RANKS = 4  # the GEMMs are those of one of them
DENSE = Shape(8192, 8192, 4096, 1, 1, "dense")  # gate and up: 8192 x 8192 x 8192
DECODE = replace(SHAPES["dsv3"], name="dsv3-decode", tokens=128)


def jobs(run):
    shapes = run.shapes()
    found = [(shape.name, functools.partial(measure, run, shape)) for shape in shapes]
    if not run.options.shapes:
        found += [(s.name, functools.partial(measure, run, s)) for s in (DENSE, DECODE)
                  for s in [s if run.on_gpu else s.small()]]
    return found


def ours(kind, activation, a, b, offsets):
    if kind == FORWARD:
        return epmoe.grouped_gemm(a, b, offsets=offsets, activation=activation)
    return torch.ops.epmoe.grouped_gemm(a, b, offsets, None, None, None, None, kind, as_kernel(None), False,
                                        None)


def with_torch(run, kind, a, b, offsets):
    """Compute the same GEMM with torch: one call on a GPU, one per expert on the CPU."""
    if not run.on_gpu:
        return ours(kind, None, a, b, offsets)
    if len(offsets) == 2 and kind != WGRAD:
        return a @ (b[0].t() if kind == FORWARD else b[0])
    if kind == WGRAD:
        return torch._grouped_mm(a.t(), b, offs=offsets[1:])
    return torch._grouped_mm(a, b.transpose(-2, -1) if kind == FORWARD else b, offs=offsets[1:])


def product_error(kind, activation, a, b, offsets, got):
    """Return what is wrong with sampled rows of a GEMM's result, or ""."""
    ends = offsets.tolist()
    for e in sorted({0, len(ends) // 2 - 1, len(ends) - 2}):
        begin, end = max(ends[e], 0), ends[e + 1]
        if kind == WGRAD:
            left, right, have = a[begin:end, ::61].t().double(), b[begin:end].double(), got[e, ::61].double()
        else:
            at = torch.arange(begin, end, max(1, (end - begin) // 16), device=a.device)
            left, have = a[at].double(), got[at].double()
            right = (b[e].t() if kind == FORWARD else b[e]).double()
        want, size = left @ right, left.abs() @ right.abs()
        if activation:
            want, size = activate(want, activation), 2 * (size.chunk(2, 1)[0] + 1) * (size.chunk(2, 1)[1] + 1)
        eps = torch.finfo(got.dtype).eps
        bad = ~((have - want).abs() <= eps * want.abs() + 2.0**-19 * size)
        if bad.any():
            return f"{int(bad.sum())} of {bad.numel()} sampled numbers of expert {e} differ from float64"
    return ""


def random_rows(run, shape):
    """Return a generator, and the numbers of experts and rows and the offsets of a random routing."""
    g = torch.Generator(run.device).manual_seed(2000 + run.rank)
    num_experts, num_rows = max(1, shape.experts // RANKS), shape.tokens * shape.topk
    counts = torch.bincount(torch.randint(num_experts, (num_rows,), device=run.device, generator=g),
                            minlength=num_experts)
    return g, num_experts, num_rows, F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


@torch.no_grad()
def measure(run, shape):
    g, num_experts, num_rows, offsets = random_rows(run, shape)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32

    def random(*size):
        return torch.randn(*size, device=run.device, generator=g).to(dtype)

    x, h, dy, dgu = (random(num_rows, n) for n in (shape.hidden, shape.inner, shape.hidden, 2 * shape.inner))
    gate_up = random(num_experts, 2 * shape.inner, shape.hidden)
    down = random(num_experts, shape.hidden, shape.inner)
    gate_up /= shape.hidden**0.5
    products = [("gate and up", FORWARD, None, x, gate_up),
                ("gate and up, SwiGLU", FORWARD, "swiglu", x, gate_up), ("down", FORWARD, None, h, down),
                ("dgrad of down", DGRAD, None, dy, down), ("dgrad of gate and up", DGRAD, None, dgu, gate_up),
                ("wgrad of down", WGRAD, None, dy, h), ("wgrad of gate and up", WGRAD, None, dgu, x)]

    def time(*fns):
        rounds, round_ms = (6, 20.0) if run.on_gpu else (3, 1.0)
        return alternated(fns, run.device, run.cpu_group, run.options.iters or rounds, round_ms)

    for name, kind, activation, a, b in products:
        with poisoned():
            run.agree(product_error(kind, activation, a, b, offsets, ours(kind, activation, a, b, offsets)))
        columns = b.shape[1] * b.shape[2] if kind != WGRAD else a.shape[1] * b.shape[1]
        flops, weight_bytes = 2.0 * num_rows * columns, b.numel() * b.element_size() if kind != WGRAD else 0

        def record(impl, ms, over=None):
            tflops, gbps = flops / ms / 1e9, weight_bytes / ms / 1e6
            rate = f"{gbps:.0f} GB/s" if shape.tokens <= 128 and gbps else f"{tflops:.3g} TFLOP/s"
            run.record("gemm", shape, impl, ms, over=over, rate=rate, tflops=round(tflops, 4),
                       weight_gbps=round(gbps, 1))

        def product(activation=None):
            return ours(kind, activation, a, b, offsets)

        if activation:
            bare, fused = time(product, lambda: product(activation))
            record(f"epmoe {name}", fused, {"without": bare})
        else:
            theirs, our = time(lambda: with_torch(run, kind, a, b, offsets), product)
            record(f"torch {name}", theirs)
            record(f"epmoe {name}", our, {"torch": theirs})
