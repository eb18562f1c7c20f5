"""Measures the grouped GEMMs of FP8: their time beside torch's and bfloat16, and their error.

Those of one rank of four: forward, and the gradients of the weights.  epmoe has a scale for each 128 numbers
of a row and each block of 128 by 128 of the weights, or one scale for each row and one for each expert.
torch._scaled_grouped_mm has a scale for each row and each column, and adds up in the tensor cores alone (fast
accumulation).  Each result is compared with float64 before it is timed.  With the tokens of a decoding rank,
the rate is that of the weights that are read.

The gradients of the weights are timed with operands that are quantised and transposed already.  There, each
expert has a multiple of 16 rows, which torch needs.
"""

import functools
from dataclasses import replace

import torch

import epmoe
from epmoe.gemm.grouped import FORWARD, WGRAD
from epmoe.gemm.wgrad_fp8 import grouped_wgrad_fp8, transpose_fp8
from epmoe.reference import activate

from . import quantize
from .check import poisoned
from .gemm import ours, random_rows, with_torch
from .measure import alternated, sm_clock

E4M3 = torch.float8_e4m3fn
# The error of a sum of products, divided by the sum of their magnitudes: in float32, and in tensor cores.
ERROR_FLOAT32, ERROR_TENSOR_CORES = 2.0**-17, 2.0**-9


DECODE = {"cuda": (16, 128), "cpu": (4,)}  # tokens of a rank in decoding


def jobs(run):
    shapes = run.shapes("dsv3", "qwen3-235b", "seed")
    found = [(s.name, functools.partial(fn, run, s)) for s in shapes
             for fn in (measure, measure_wgrad, quantize.measure)]
    few = [replace(s, name=f"{s.name} T={t}", tokens=t) for s in shapes[:1] for t in DECODE[run.device.type]]
    return found + [(s.name, functools.partial(measure_decode, run, s)) for s in few]


def by_row(t):
    """Quantise with a scale for each row: (q, scales)."""
    scales = t.float().abs().amax(-1) / 448
    return (t / scales[..., None]).to(E4M3), scales


def with_one_scale(t):
    """Quantise a matrix with one scale for all of it: (q, scale [1])."""
    scale = t.abs().amax().float().reshape(1) / 448
    return (t / scale).to(E4M3), scale


def dequantized(q, scales, blocks):
    """Return a matrix in float64; blocks: how many numbers share a scale, along each dimension."""
    for dim, size in enumerate(blocks):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, q.shape[dim])
    return q.double() * scales.double()


def heavy_tailed(normal, *size):
    """Return random numbers of Student's t distribution with 3 degrees of freedom."""
    return normal(*size) / (sum(normal(*size).square() for _ in range(3)) / 3).sqrt()


class Product:
    """One product: its operands in bfloat16, with scales by block, and with scales by row."""

    def __init__(self, run, x, weight, offsets):
        self.on_gpu, self.offsets = run.on_gpu, offsets
        self.x, self.weight = x, weight
        self.rows, self.a_scale = epmoe.quantize_fp8(x)
        self.columns, self.b_scale = epmoe.quantize_fp8_weight(weight)
        self.whole_rows, self.row_scale = epmoe.quantize_fp8(x, pow2=True, rowwise=True)
        self.columns_of_one, self.b_one = map(torch.stack, zip(*map(with_one_scale, weight)))
        if run.on_gpu:
            self.by_row = by_row(x)
            each = [by_row(w) for w in weight]
            self.weight_by_row = tuple(torch.stack(parts) for parts in zip(*each))

    def epmoe_fp8(self, activation=None):
        return epmoe.grouped_gemm(self.rows, self.columns, offsets=self.offsets, activation=activation,
                                  a_scale=self.a_scale, b_scale=self.b_scale)

    def epmoe_by_row(self):
        return epmoe.grouped_gemm(self.whole_rows, self.columns_of_one, offsets=self.offsets,
                                  a_scale=self.row_scale[:, :1], b_scale=self.b_one[:, 0])

    def epmoe_plain(self):
        return epmoe.grouped_gemm(self.x, self.weight, offsets=self.offsets)

    def torch_plain(self):
        return with_torch(self, FORWARD, self.x, self.weight, self.offsets)

    def torch_by_row(self):
        (q, scale), (w, w_scale) = self.by_row, self.weight_by_row
        return torch._scaled_grouped_mm(q, w.transpose(-2, -1), scale, w_scale, offs=self.offsets[1:],
                                        out_dtype=torch.bfloat16, use_fast_accum=True)

    def peers(self):
        """Return {name: function} of everything that is timed."""
        found = {"epmoe FP8": self.epmoe_fp8, "epmoe FP8 by row": self.epmoe_by_row,
                 "epmoe 16 bits": self.epmoe_plain}
        if self.on_gpu:
            found["torch FP8 by row"] = self.torch_by_row
            found["torch 16 bits"] = self.torch_plain
        return found

    def error(self, activation, got, is_by_row=False):
        """Return what is wrong with sampled rows of a result of epmoe, or ""."""
        ends = self.offsets.tolist()
        for e in sorted({0, len(ends) - 2}):
            at = torch.arange(ends[e], ends[e + 1], max(1, (ends[e + 1] - ends[e]) // 16),
                              device=got.device)
            if is_by_row:
                left = self.whole_rows[at].double() * self.row_scale[at, :1].double()
                right = (self.columns_of_one[e].double() * self.b_one[e].double()).t()
            else:
                left = dequantized(self.rows[at], self.a_scale[at], (1, 128))
                right = dequantized(self.columns[e], self.b_scale[e], (128, 128)).t()
            if error := error_of(got[at], left, right, activation, self.on_gpu):
                return f"expert {e}: {error}"
        return ""


def error_of(got, left, right, activation, on_gpu):
    """Return what is wrong with the product of two matrices in float64, or ""."""
    want, size = left @ right, left.abs() @ right.abs()
    if activation:
        size = 2 * (size.chunk(2, 1)[0] + 1) * (size.chunk(2, 1)[1] + 1)
        want = activate(want, activation)
    share = ERROR_TENSOR_CORES if on_gpu else ERROR_FLOAT32
    bad = ~((got.double() - want).abs() <= 2.0**-8 * want.abs() + share * size)
    return f"{int(bad.sum())} of {bad.numel()} sampled numbers differ from float64" if bad.any() else ""


def relative_errors(product):
    """Return {name: error}: the norm of the error of expert 0's first rows, over the norm of the result.

    "of sums" is the error without that of the quantisation, and without rounding of the result to 16 bits.
    """
    end = min(64, int(product.offsets[1]))
    exact = product.x[:end].double() @ product.weight[0].double().t()
    quantized = (dequantized(product.rows[:end], product.a_scale[:end], (1, 128))
                 @ dequantized(product.columns[0], product.b_scale[0], (128, 128)).t())

    def relative(got, want):
        return ((got[:end].double() - want).norm() / want.norm()).item()

    found = {name: relative(fn(), exact) for name, fn in product.peers().items()}
    rounded = relative(quantized.to(torch.bfloat16), quantized)
    found["of sums"] = max(0.0, relative(product.epmoe_fp8(), quantized)**2 - rounded**2)**0.5
    return found


@torch.no_grad()
def measure(run, shape):
    g, num_experts, num_rows, offsets = random_rows(run, shape)
    dtype = torch.bfloat16 if run.on_gpu else torch.float32

    def normal(*size):
        return torch.randn(*size, device=run.device, generator=g)

    for name, n, k in (("gate and up", 2 * shape.inner, shape.hidden), ("down", shape.hidden, shape.inner)):
        weight = normal(num_experts, n, k).mul_(k**-0.5).to(dtype)
        product = Product(run, normal(num_rows, k).to(dtype), weight, offsets)
        for activation in (None, "swiglu") if name == "gate and up" else (None,):
            with poisoned():
                run.agree(product.error(activation, product.epmoe_fp8(activation)))
        with poisoned():
            run.agree(product.error(None, product.epmoe_by_row(), is_by_row=True))
        fns = product.peers()
        if name == "gate and up":
            fns["epmoe FP8 SwiGLU"] = functools.partial(product.epmoe_fp8, "swiglu")
        time_product(run, shape, name, fns, 2.0 * num_rows * n * k)
        record_errors(run, shape, name, relative_errors(product))
        heavy = Product(run, heavy_tailed(normal, 64, k).to(dtype),
                        heavy_tailed(normal, 1, n, k).mul_(k**-0.5).to(dtype), offsets.new_tensor([0, 64]))
        record_errors(run, shape, name + ", heavy tails", relative_errors(heavy))


class WeightGradient:
    """The gradient of weights: dy.T @ x for each expert, from operands in bfloat16 and in FP8."""

    def __init__(self, run, dy, x, offsets):
        self.on_gpu, self.dy, self.x, self.offsets = run.on_gpu, dy, x, offsets
        self.quantized = [epmoe.quantize_fp8(t, pow2=True) for t in (dy, x)]
        self.operands = [t for rows in self.quantized for t in transpose_fp8(*rows, offsets)]
        if run.on_gpu:
            self.columns = [self._by_column(t) for t in (dy, x)]

    def _by_column(self, t):
        """Quantise with a scale for each column of an expert: ([C, M], [L * C])."""
        parts = [by_row(part.t()) for part in t.split(self.offsets.diff().tolist())]
        return torch.cat([q for q, _ in parts], 1), torch.cat([scale for _, scale in parts])

    def epmoe_fp8(self):
        return grouped_wgrad_fp8(*self.operands, self.offsets)

    def torch_by_row(self):
        (a, a_scale), (b, b_scale) = self.columns
        return torch._scaled_grouped_mm(a, b.t(), a_scale, b_scale, offs=self.offsets[1:],
                                        out_dtype=torch.bfloat16, use_fast_accum=True)

    def peers(self):
        """Return {name: function} of everything that is timed."""
        found = {"epmoe FP8": self.epmoe_fp8,
                 "epmoe 16 bits": lambda: ours(WGRAD, None, self.dy, self.x, self.offsets)}
        if self.on_gpu:
            found["torch FP8 by row"] = self.torch_by_row
            found["torch 16 bits"] = lambda: with_torch(self, WGRAD, self.dy, self.x, self.offsets)
        return found

    def error(self, got):
        """Return what is wrong with sampled lines of a result of epmoe, or ""."""
        ends = self.offsets.tolist()
        for e in sorted({0, len(ends) - 2}):
            dy, x = (dequantized(q[ends[e]:ends[e + 1]], scales[ends[e]:ends[e + 1]], (1, 128))
                     for q, scales in self.quantized)
            if error := error_of(got[e, ::61], dy[:, ::61].t(), x, None, self.on_gpu):
                return f"expert {e}: {error}"
        return ""

    def relative_errors(self):
        """Return {name: error}: the norm of the error of expert 0's first lines, over that of the result."""
        end = int(self.offsets[1])
        exact = self.dy[:end, :64].double().t() @ self.x[:end].double()
        return {name: ((fn()[0, :64].double() - exact).norm() / exact.norm()).item()
                for name, fn in self.peers().items()}


@torch.no_grad()
def measure_wgrad(run, shape):
    g, _, _, offsets = random_rows(run, shape)
    offsets = offsets // 16 * 16
    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    for name, n, k in (("wgrad of gate and up", 2 * shape.inner, shape.hidden),
                       ("wgrad of down", shape.hidden, shape.inner)):
        dy, x = (torch.randn(int(offsets[-1]), size, device=run.device, generator=g).to(dtype)
                 for size in (n, k))
        product = WeightGradient(run, dy, x, offsets)
        with poisoned():
            run.agree(product.error(product.epmoe_fp8()))
        time_product(run, shape, name, product.peers(), 2.0 * len(x) * n * k)
        record_errors(run, shape, name, product.relative_errors())


def time_product(run, shape, name, fns, flops):
    rounds, round_ms = (6, 20.0) if run.on_gpu else (3, 1.0)
    times = alternated(list(fns.values()), run.device, run.cpu_group, run.options.iters or rounds, round_ms)
    ms = dict(zip(fns, times))
    for impl in reversed(ms):
        over = {peer: ms[peer] for peer in ms if impl == "epmoe FP8" and peer != impl}
        if impl == "epmoe FP8 by row":
            over = {peer: ms[peer] for peer in ("epmoe FP8", "torch FP8 by row") if peer in ms}
        tflops = flops / ms[impl] / 1e9
        run.record("gemm", shape, f"{impl} {name}", ms[impl], over=over, rate=f"{tflops:.4g} TFLOP/s",
                   tflops=round(tflops, 4))
    for impl in ("epmoe FP8", "epmoe FP8 by row", "torch FP8 by row") if run.on_gpu else ():
        if impl in fns and (mhz := sm_clock(fns[impl], run.device, max(1, int(60 / ms[impl])))):
            run.record("gemm", shape, f"SM clock: {impl} {name}", rate=f"{mhz:.0f} MHz", mhz=mhz)


@torch.no_grad()
def measure_decode(run, shape):
    g, num_experts, num_rows, offsets = random_rows(run, shape)
    num_used = int((offsets.diff() > 0).sum())
    for name, n, k in (("gate and up", 2 * shape.inner, shape.hidden), ("down", shape.hidden, shape.inner)):
        x, weight = (torch.randn(size, device=run.device, generator=g) for size in ((num_rows, k), (1, n, k)))
        rows, a_scale = epmoe.quantize_fp8(x)
        one, scale = epmoe.quantize_fp8_weight(weight * k**-0.5)
        columns, b_scale = (t.expand(num_experts, -1, -1).contiguous() for t in (one, scale))
        fn = functools.partial(epmoe.grouped_gemm, rows, columns, offsets=offsets, a_scale=a_scale,
                               b_scale=b_scale)
        with poisoned():
            got = fn()
        run.agree(error_of(got[::16], dequantized(rows[::16], a_scale[::16], (1, 128)),
                           dequantized(one[0], scale[0], (128, 128)).t(), None, run.on_gpu))
        rounds, round_ms = (6, 20.0) if run.on_gpu else (3, 1.0)
        ms, = alternated([fn], run.device, run.cpu_group, run.options.iters or rounds, round_ms)
        rate = num_used * one.numel() / ms / 1e9
        run.record("gemm", shape, f"epmoe FP8 few rows {name}", ms, rate=f"{rate:.3g} TB/s of weights",
                   weight_tb_s=round(rate, 4))


def record_errors(run, shape, name, errors):
    for impl, error in errors.items():
        run.record("gemm", shape, f"error: {impl} {name}", rate=f"{100 * error:.3f} %",
                   error=round(error, 7))
