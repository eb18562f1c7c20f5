"""Measures the forward pass of a whole layer.

- EPMoE in its two fused kernels, and unfused: the same stages one after the other.
- The fused kernels with a capacity.  Without one, the host reads the number of rows between the plan and the
  first kernel.
- The same layer over each peer's all-to-alls, with torch's GEMMs.
- torch's two GEMMs alone on the same rows, and epmoe's, with the activation ("own GEMMs"); and each fused
  kernel compared with the GEMM in it.

All alternate, so that each meets the GPU in the same state.
"""

import contextlib
import functools
from dataclasses import replace

import torch

import epmoe
from epmoe.reference import activate

from .check import poisoned, sums_error
from .measure import alternated, slowest

DECODE = {"cuda": (128, 1024), "cpu": (16,)}  # tokens of a rank in decoding


def torch_linear(x, weight, offsets):
    """Multiply without epmoe's kernels: torch's grouped GEMM on a GPU, one GEMM per expert on the CPU."""
    if x.device.type == "cuda" and len(x):  # in a skewed routing a rank may have no rows
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets[1:])
    return epmoe.grouped_gemm(x, weight, offsets=offsets)


def jobs(run):
    return [(shape.label, functools.partial(measure, run, shape)) for shape in run.with_skews(shapes(run))]


def shapes(run):
    """Yield the shapes of the run, and after dsv3 also dsv3 with the tokens of a decoding rank.

    In decoding, reading the weights takes all the time of a layer.
    """
    for shape in run.shapes():
        yield shape
        if shape == run.shape("dsv3"):
            yield from (replace(shape, name=f"{shape.name} T={t}", tokens=t) for t in DECODE[run.device.type])


def alternate(run, **fns):
    """Measure collective functions in alternation; return {name: milliseconds}."""
    rounds, round_ms = (5, 40.0) if run.on_gpu else (2, 1.0)
    return dict(zip(fns, alternated(list(fns.values()), run.device, run.cpu_group,
                                    run.options.iters or rounds, round_ms)))


def record_layer(run, bench, shape, impl, ms, over=None, **more):
    # of one rank, on average
    tflops = 6.0 * shape.tokens * shape.topk * shape.hidden * shape.inner / ms / 1e9
    run.record(bench, shape, impl, ms, over=over, rate=f"{tflops:{'.1f' if run.on_gpu else '.1g'}} TFLOP/s",
               tflops=round(tflops, 4), **more)


class Layer:
    """An EPMoE on an EpAll2AllFusedOp, its inputs, and the peer that it is compared with."""

    def __init__(self, run, shape, **options):
        self.run, self.shape, self.inputs = run, shape, run.inputs(shape)
        x, _, _ = self.inputs
        self.op = run.layer(shape, x.dtype, epmoe.EpAll2AllFusedOp, **options)
        self.moe = self.experts(self.op)
        self.torch_peer = run.torch_peer(shape, self.inputs)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.op.synchronize()
            self.op.finalize()

    def experts(self, op):
        shape = self.shape
        return epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, dtype=op.dtype, layer=op)

    @contextlib.contextmanager
    def with_capacity(self):
        """Yield an EPMoE with the same weights, whose capacity is the most rows that a rank receives."""
        _, idx, _ = self.inputs
        rows = int(slowest(self.run.cpu_group, self.op.preprocess(idx).num_rows))
        op = self.run.layer(self.shape, self.op.dtype, epmoe.EpAll2AllFusedOp, capacity=rows)
        moe = self.experts(op)
        moe.gate_up_proj, moe.down_proj = self.moe.gate_up_proj, self.moe.down_proj
        yield moe
        op.synchronize()
        op.finalize()

    def __call__(self):
        return self.moe(*self.inputs)

    def unfused(self):
        return self.moe._in_stages(self.moe.layer, *self.inputs, *self.moe._weights())[0]

    def over(self, peer):
        """Compute the layer with a peer's all-to-alls and torch's GEMMs."""
        return peer.combine(self.torch_experts(peer.dispatch(), peer.expert_offsets))

    def torch_experts(self, rows, offsets):
        """Compute the experts' outputs with torch's GEMMs."""
        h = activate(torch_linear(rows, self.moe.gate_up_proj, offsets))
        return torch_linear(h, self.moe.down_proj, offsets)

    def check(self):
        """Check the sums against those over torch's collectives, and fused against unfused bit by bit."""
        with poisoned():
            y, again = self(), self.unfused()
        rows, offsets = self.torch_peer.dispatch(), self.torch_peer.expert_offsets
        h = epmoe.grouped_gemm(rows, self.moe.gate_up_proj, offsets=offsets, activation=self.moe.activation)
        h = epmoe.grouped_gemm(h, self.moe.down_proj, offsets=offsets)
        # a GEMM may round a row differently when it runs again
        self.run.agree(sums_error(y, h, self.torch_peer, slack=2.0))
        self.run.agree("" if torch.equal(y, again) else "fused and unfused results differ in their bits")

    def parts(self):
        """Return {name: function to time} of the two fused kernels and of the GEMMs on the same rows."""
        x, idx, weight = self.inputs
        rows, row_weight, layout = self.op.dispatch(x, idx, weight)
        offsets = layout.expert_offsets
        inner = epmoe.grouped_gemm(rows, self.moe.gate_up_proj, offsets=offsets,
                                   activation=self.moe.activation)
        gate_up, down, activation = self.moe.gate_up_proj, self.moe.down_proj, self.moe.activation
        return {
            "gate and up": lambda: torch_linear(rows, gate_up, offsets),
            "down": lambda: torch_linear(inner, down, offsets),
            "own gate and up": lambda: epmoe.grouped_gemm(rows, gate_up, offsets=offsets,
                                                          activation=activation),
            "own down": lambda: epmoe.grouped_gemm(inner, down, offsets=offsets),
            "dispatch + gemm": lambda: self.op.mega_dispatch_group_gemm(
                x, layout=layout, weight=weight, gemm_weight=gate_up, activation=activation),
            "gemm + combine": lambda: self.op.mega_group_gemm_combine(inner, down, layout, row_weight)}


@torch.no_grad()
def measure(run, shape):
    with Layer(run, shape) as layer, layer.with_capacity() as ahead:
        layer.check()
        run.agree("" if torch.equal(ahead(*layer.inputs), layer())
                  else "the result with a capacity differs in its bits")
        parts = layer.parts()
        fns = {"torch layer": lambda: layer.over(layer.torch_peer)}
        if run.deep_ep:
            for num_sm in (24, 48):
                peer = run.deep_ep_peer(shape, layer.inputs, num_sm)
                if peer is None:
                    continue
                peer.tune(lambda fn: run.time(layer.op, fn, iters=5))
                h = layer.torch_experts(layer.torch_peer.dispatch(), layer.torch_peer.expert_offsets)
                run.agree(sums_error(layer.over(peer), h, layer.torch_peer, slack=2.0))
                fns[f"DeepEP layer, {num_sm} SMs"] = functools.partial(layer.over, peer)
        ours = {"GEMMs alone": lambda: (parts["gate and up"](), parts["down"]()),
                "own GEMMs": lambda: (parts["own gate and up"](), parts["own down"]()),
                "one after the other": layer.unfused, "fused": layer,
                "with a capacity": functools.partial(ahead, *layer.inputs)}
        ms = alternate(run, **fns, **parts, **ours)
        for name in fns:
            record_layer(run, "layer", shape, name, ms[name])
        record_layer(run, "layer", shape, "GEMMs alone", ms["GEMMs alone"])
        record_layer(run, "layer", shape, "epmoe GEMMs alone", ms["own GEMMs"],
                     {"GEMMs": ms["GEMMs alone"]})
        deep_ep = [ms[name] for name in fns if name.startswith("DeepEP")]
        over = {"GEMMs": ms["GEMMs alone"], "own GEMMs": ms["own GEMMs"], "torch": ms["torch layer"],
                **({"DeepEP": min(deep_ep)} if deep_ep else {})}
        record_layer(run, "layer", shape, "epmoe layer, one after the other", ms["one after the other"], over)
        record_layer(run, "layer", shape, "epmoe layer", ms["fused"], over)
        record_layer(run, "layer", shape, "epmoe layer with a capacity", ms["with a capacity"], over)
        for kernel, product in (("dispatch + gemm", "gate and up"), ("gemm + combine", "down")):
            own = ms[f"own {product}"]
            run.record("layer", shape, f"torch {product} alone", ms[product])
            run.record("layer", shape, f"epmoe {product} alone", own, over={"torch": ms[product]})
            run.record("layer", shape, f"epmoe {kernel}", ms[kernel],
                       over={f"{product} alone": ms[product], f"own {product}": own})
