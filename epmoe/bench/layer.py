"""A whole layer, forward: EPMoE in its two kernels, the same stages one after the other, the same over the peers with torch's
products, and torch's two products alone on the same rows; and each of the two kernels beside the product that is in it.

All are measured by turns, so that they meet the GPU in the same state.
"""

import functools
from dataclasses import replace

import torch

import epmoe
from epmoe.bench.check import poisoned, sums_error
from epmoe.bench.measure import alternated
from epmoe.reference import activate

DECODE = {"cuda": (128, 1024), "cpu": (16,)}  # tokens of a rank that decodes


def torch_linear(x, weight, offsets):
    """What a user has without epmoe: torch's grouped product on a GPU, one product an expert on the CPU."""
    if x.device.type == "cuda":
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets[1:])
    return epmoe.grouped_gemm(x, weight, offsets=offsets)


def jobs(run):
    return [(shape.name, functools.partial(measure, run, shape)) for shape in shapes(run)]


def shapes(run):
    """Those of the run; behind dsv3 also dsv3 with a decoding rank's tokens, where a layer's time is that of reading the weights."""
    for shape in run.shapes():
        yield shape
        if shape == run.shape("dsv3"):
            yield from (replace(shape, name=f"{shape.name} T={t}", tokens=t) for t in DECODE[run.device.type])


def by_turns(run, **fns):
    """{name: milliseconds} of what all ranks do together."""
    rounds, round_ms = (5, 40.0) if run.on_gpu else (2, 1.0)
    return dict(zip(fns, alternated(list(fns.values()), run.device, run.cpu_group, run.options.iters or rounds, round_ms)))


def record_layer(run, bench, shape, impl, ms, over=None):
    tflops = 6.0 * shape.tokens * shape.topk * shape.hidden * shape.inner / ms / 1e9  # of a rank, on average
    run.record(bench, shape, impl, ms, over=over, rate=f"{tflops:{'.1f' if run.on_gpu else '.1g'}} TFLOP/s", tflops=round(tflops, 4))


class Layer:
    """An EPMoE on a fused operator, its inputs, and what it is compared with."""

    def __init__(self, run, shape, **options):
        self.run, self.inputs = run, run.inputs(shape)
        x, _, _ = self.inputs
        self.op = run.layer(shape, x.dtype, epmoe.EpAll2AllFusedOp, **options)
        self.moe = epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, dtype=x.dtype, layer=self.op)
        self.torch_peer = run.torch_peer(shape, self.inputs)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.op.synchronize()
            self.op.finalize()

    def __call__(self):
        return self.moe(*self.inputs)

    def one_after_the_other(self):
        return self.moe._one_after_the_other(*self.inputs)

    def over(self, peer):
        """The layer over a peer's all-to-alls, with torch's products."""
        rows = peer.dispatch()
        return peer.combine(torch_linear(activate(torch_linear(rows, self.moe.gate_up_proj, peer.expert_offsets)), self.moe.down_proj,
                                         peer.expert_offsets))

    def check(self):
        """The sums are those of the same products over torch's collectives; and both of epmoe's ways agree to the bit."""
        with poisoned():
            y, again = self(), self.one_after_the_other()
        rows, offsets = self.torch_peer.dispatch(), self.torch_peer.expert_offsets
        h = epmoe.grouped_gemm(rows, self.moe.gate_up_proj, offsets=offsets, activation=self.moe.activation)
        h = epmoe.grouped_gemm(h, self.moe.down_proj, offsets=offsets)
        self.run.agree(sums_error(y, h, self.torch_peer, slack=2.0))  # a product may round a row otherwise when it runs again
        self.run.agree("" if torch.equal(y, again) else "fused and one after the other: not the same bits")

    def parts(self):
        """{name: what to time} of the two kernels and of the products in them, torch's, on the same rows."""
        x, idx, weight = self.inputs
        rows, row_weight, layout = self.op.dispatch(x, idx, weight)
        offsets = layout.expert_offsets
        inner = epmoe.grouped_gemm(rows, self.moe.gate_up_proj, offsets=offsets, activation=self.moe.activation)
        return {
            "gate and up": lambda: torch_linear(rows, self.moe.gate_up_proj, offsets),
            "down": lambda: torch_linear(inner, self.moe.down_proj, offsets),
            "dispatch + gemm": lambda: self.op.mega_dispatch_group_gemm(x, layout=layout, weight=weight, gemm_weight=self.moe.gate_up_proj,
                                                                        activation=self.moe.activation),
            "gemm + combine": lambda: self.op.mega_group_gemm_combine(inner, self.moe.down_proj, layout, row_weight)}


@torch.no_grad()
def measure(run, shape):
    with Layer(run, shape) as layer:
        layer.check()
        parts = layer.parts()
        fns = {"torch layer": lambda: layer.over(layer.torch_peer)}
        if run.deep_ep:
            for num_sm in (24, 48):
                peer = run.deep_ep_peer(shape, layer.inputs, num_sm)
                peer.tune(lambda fn: run.time(layer.op, fn, iters=5))
                h = torch_linear(activate(torch_linear(layer.torch_peer.dispatch(), layer.moe.gate_up_proj, layer.torch_peer.expert_offsets)),
                                 layer.moe.down_proj, layer.torch_peer.expert_offsets)
                run.agree(sums_error(layer.over(peer), h, layer.torch_peer, slack=2.0))
                fns[f"DeepEP layer, {num_sm} SMs"] = functools.partial(layer.over, peer)
        ms = by_turns(run, **fns, **parts, **{"GEMMs alone": lambda: (parts["gate and up"](), parts["down"]()),
                                              "one after the other": layer.one_after_the_other, "fused": layer})
        for name in fns:
            record_layer(run, "layer", shape, name, ms[name])
        record_layer(run, "layer", shape, "GEMMs alone", ms["GEMMs alone"])
        deep_ep = [ms[name] for name in fns if name.startswith("DeepEP")]
        over = {"GEMMs": ms["GEMMs alone"], "torch": ms["torch layer"], **({"DeepEP": min(deep_ep)} if deep_ep else {})}
        record_layer(run, "layer", shape, "epmoe layer, one after the other", ms["one after the other"], over)
        record_layer(run, "layer", shape, "epmoe layer", ms["fused"], over)
        for kernel, product in (("dispatch + gemm", "gate and up"), ("gemm + combine", "down")):
            run.record("layer", shape, f"torch {product} alone", ms[product])
            run.record("layer", shape, f"epmoe {kernel}", ms[kernel], over={f"{product} alone": ms[product]})
