"""Measures a whole layer with weights in FP8, beside one in 16 bits: their time, and their error.

Both are an EPMoE on the same layer, with the same weights before they were quantised.  The one in 16 bits
runs its fused kernels, and so does the one in FP8, whose tokens are sent in FP8 and return in 16 bits; it is
also measured with all stages one after the other.  A rank that is alone computes as one rank of
four: a quarter of the experts, and as many rows.  Errors are those of the experts' outputs on the rows of a
rank, compared with float64, for normal and for heavy-tailed numbers.
"""

import functools
from dataclasses import replace

import torch

import epmoe
from epmoe.gemm.grouped import FP8_BLOCK
from epmoe.moe import fp8 as moe_fp8
from epmoe.reference import activate

from .check import poisoned
from .gemm_fp8 import E4M3, dequantized, heavy_tailed
from .layer import DECODE, alternate, record_layer
from .measure import slowest

RANKS = 4  # a rank that is alone computes as one of them
SAMPLED = 16  # rows of an expert whose error is computed
# The norm of an error over that of the result: of e4m3 numbers, and of sums in tensor cores.
MOST_ERROR, MOST_ERROR_OF_SUMS = 0.2, 0.02


def jobs(run):
    found = []
    for shape in run.shapes("dsv3", "qwen3-235b", "seed", "qwen3-30b"):
        if not run.on_gpu:  # small shapes are not multiples of a block
            shape = replace(shape, hidden=-(-shape.hidden // FP8_BLOCK) * FP8_BLOCK,
                            inner=-(-shape.inner // FP8_BLOCK) * FP8_BLOCK)
        if shape.hidden % FP8_BLOCK or shape.inner % FP8_BLOCK:
            run.say(f"skipped: {shape.name}, because H or I is not a multiple of {FP8_BLOCK}")
            continue
        if run.size == 1 and shape.experts >= RANKS * shape.topk:
            shape = replace(shape, experts=shape.experts // RANKS)
        found.append(shape)
        if shape.name.startswith("dsv3"):  # also with the tokens of a decoding rank
            found += [replace(shape, name=f"{shape.name} T={t}", tokens=t) for t in DECODE[run.device.type]]
    return [(shape.label, functools.partial(measure, run, shape)) for shape in run.with_skews(found)]


class Pair:
    """A layer, an EPMoE in 16 bits and one in FP8 on it, and their inputs."""

    def __init__(self, run, shape):
        x, self.idx, self.weight = run.inputs(shape)
        self.run, self.x = run, x.to(torch.bfloat16)
        self.op = run.layer(shape, torch.bfloat16, epmoe.EpAll2AllFusedOp)
        sizes = shape.hidden, shape.inner, shape.experts, shape.topk
        self.plain = epmoe.EPMoE(*sizes, layer=self.op)
        self.fp8 = epmoe.EPMoE(*sizes, layer=self.op, weight_dtype=E4M3)
        self.generator = torch.Generator(run.device).manual_seed(run.rank)

    def normal(self, *size):
        return torch.randn(*size, device=self.run.device, generator=self.generator)

    def fill(self, numbers):
        """Set tokens and weights to numbers(*size), with weights that keep the size of a row."""
        self.x.copy_(numbers(*self.x.shape))
        for p in (self.plain.gate_up_proj, self.plain.down_proj):
            for e in range(len(p)):
                p[e] = numbers(*p.shape[1:]) * p.shape[2]**-0.5
        self.fp8.load_state_dict(self.plain.state_dict())

    def unfused(self):
        return self.plain._in_stages(self.op, self.x, self.idx, self.weight, *self.plain._weights())[0]

    def unfused_fp8(self):
        return self.fp8._in_stages(self.op, self.x, self.idx, self.weight, *self.fp8._weights())[0]

    def dispatched(self):
        """Return (rows, scales, row_weight, layout) in FP8."""
        return self.op.dispatch_fp8(self.x, self.idx, self.weight)

    def errors(self):
        """Return {name: relative error} of sampled rows, the largest of all ranks.  Collective."""
        plain, _, layout = self.op.dispatch(self.x, self.idx)
        rows, scales, _, _ = self.op.dispatch_fp8(self.x, layout=layout)
        offsets = layout.expert_offsets
        h = epmoe.grouped_gemm(plain, self.plain.gate_up_proj, offsets=offsets, activation="swiglu")
        results = {"16 bits": epmoe.grouped_gemm(h, self.plain.down_proj, offsets=offsets),
                   "FP8": self.fp8._multiply(self.fp8.layer, rows, scales, offsets, *self.fp8._weights())}
        squares = dict.fromkeys([*results, "of sums", "exact"], 0.0)
        ends = offsets.tolist()
        for e in sorted({0, len(ends) - 2}):
            at = slice(ends[e], min(ends[e] + SAMPLED, ends[e + 1]))
            exact = self.exact(plain[at].double(), e)
            squares["exact"] += exact.square().sum().item()
            for name, got in results.items():
                squares[name] += (got[at].double() - exact).square().sum().item()
            quantised = self.quantised(rows[at], scales[at], e)
            squares["of sums"] += (results["FP8"][at].double() - quantised).square().sum().item()
        size = squares.pop("exact") or 1.0
        return {n: slowest(self.run.cpu_group, (square / size)**0.5) for n, square in squares.items()}

    def exact(self, rows, e):
        h = activate(rows @ self.plain.gate_up_proj[e].double().t())
        return h @ self.plain.down_proj[e].double().t()

    def quantised(self, rows, scales, e):
        """The result in float64 of the quantised numbers."""
        def weights(name):
            scale = getattr(self.fp8, name + moe_fp8.SCALE)[e]
            return dequantized(getattr(self.fp8, name)[e], scale, (FP8_BLOCK, FP8_BLOCK)).t()

        h = activate(dequantized(rows, scales, (1, FP8_BLOCK)) @ weights("gate_up_proj"))
        return dequantized(*epmoe.quantize_fp8(h.to(torch.bfloat16)), (1, FP8_BLOCK)) @ weights("down_proj")

    def check(self):
        """Check the layer in FP8 against its stages, bit by bit, and its experts against float64."""
        with poisoned():
            y = self.fp8(self.x, self.idx, self.weight, decode=False)
            rows, scales, row_weight, layout = self.dispatched()
            h = self.fp8._multiply(self.fp8.layer, rows, scales, layout.expert_offsets, *self.fp8._weights())
            again = self.op.combine(h, layout, row_weight)
            errors = self.errors()
        self.run.agree("" if torch.equal(y, again) else "FP8: the layer and its stages differ in their bits")
        wrong = not (errors["FP8"] < MOST_ERROR and errors["of sums"] < MOST_ERROR_OF_SUMS)
        self.run.agree(f"FP8: the experts' outputs differ from float64: {errors}" if wrong else "")

    def parts(self):
        """Return {name: function to time} of the stages in FP8, and of those in 16 bits that they replace."""
        rows, scales, row_weight, layout = self.dispatched()
        plain, _, same = self.op.dispatch(self.x, self.idx, self.weight)
        offsets, fp8 = layout.expert_offsets, self.fp8
        inner = epmoe.grouped_gemm(rows, fp8.gate_up_proj, offsets=offsets, activation="swiglu",
                                   a_scale=scales, b_scale=fp8.gate_up_proj_scale_inv)
        q, q_scales = epmoe.quantize_fp8(inner)
        return {
            "quantize + dispatch": lambda: self.op.dispatch_fp8(self.x, weight=self.weight, layout=layout),
            "quantize, then dispatch + gate and up": lambda: self.op.mega_dispatch_group_gemm(
                self.x, None, layout, fp8.gate_up_proj, self.weight, activation="swiglu",
                gemm_scale=fp8.gate_up_proj_scale_inv),
            "gate and up": lambda: epmoe.grouped_gemm(
                rows, fp8.gate_up_proj, offsets=offsets, activation="swiglu", a_scale=scales,
                b_scale=fp8.gate_up_proj_scale_inv),
            "quantize": lambda: epmoe.quantize_fp8(inner),
            "down": lambda: epmoe.grouped_gemm(q, fp8.down_proj, offsets=offsets, a_scale=q_scales,
                                               b_scale=fp8.down_proj_scale_inv),
            "combine": lambda: self.op.combine(plain, layout, row_weight),
            "quantize, then down + combine": lambda: self.op.mega_group_gemm_combine(
                inner, fp8.down_proj, layout, row_weight, gemm_scale=fp8.down_proj_scale_inv),
            "dispatch in 16 bits": lambda: self.op.dispatch(self.x, weight=self.weight, layout=same)}


def record_errors(run, shape, errors, data):
    for name, error in errors.items():
        run.record("layer", shape, f"error: {name}, {data}", rate=f"{100 * error:.3f} %",
                   error=round(error, 7))


@torch.no_grad()
def measure(run, shape):
    pair = Pair(run, shape)
    pair.fill(pair.normal)
    pair.check()
    normal = pair.errors()
    parts = pair.parts()
    args = pair.x, pair.idx, pair.weight
    own = {"GEMMs alone": lambda: (parts["gate and up"](), parts["down"]())}
    ms = alternate(run, plain=lambda: pair.plain(*args), unfused=pair.unfused, fp8=lambda: pair.fp8(*args),
                   unfused_fp8=pair.unfused_fp8, **own, **parts)
    record_layer(run, "layer", shape, "epmoe 16 bits", ms["plain"])
    record_layer(run, "layer", shape, "epmoe 16 bits, one after the other", ms["unfused"])
    record_layer(run, "layer", shape, "FP8: GEMMs alone", ms["GEMMs alone"])
    record_layer(run, "layer", shape, "epmoe FP8", ms["fp8"],
                 {"16 bits": ms["plain"], "16 bits one after the other": ms["unfused"],
                  "one after the other": ms["unfused_fp8"], "own GEMMs": ms["GEMMs alone"]})
    record_layer(run, "layer", shape, "epmoe FP8, one after the other", ms["unfused_fp8"])
    for name in parts:
        run.record("layer", shape, f"FP8: {name}" if "bits" not in name else name, ms[name],
                   over={"the layer": ms["fp8"]})
    record_errors(run, shape, normal, "normal")
    pair.fill(functools.partial(heavy_tailed, pair.normal))
    record_errors(run, shape, pair.errors(), "heavy tails")
    pair.op.synchronize()
    pair.plain.finalize()
