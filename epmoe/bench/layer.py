"""A whole layer, unfused: EPMoE's forward, the same over the peers, and its two grouped GEMMs alone on the same rows."""

import functools

import torch

import epmoe
from epmoe.bench.check import poisoned, sums_error
from epmoe.moe import _grouped_linear
from epmoe.reference import activate


def jobs(run):
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes()]


@torch.no_grad()
def measure(run, shape):
    inputs = x, idx, weight = run.inputs(shape)
    with run.layer(shape, x.dtype) as layer:
        moe = epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, dtype=x.dtype, layer=layer)
        torch_peer = run.torch_peer(shape, inputs)

        def experts(rows, offsets):
            h = _grouped_linear(rows, moe.gate_up_proj, offsets, None)
            return _grouped_linear(activate(h), moe.down_proj, offsets, None)

        def unfused(peer):
            rows = peer.dispatch()
            return peer.combine(experts(rows, peer.expert_offsets))

        with poisoned():
            y = moe(x, idx, weight)
        h = experts(torch_peer.dispatch(), torch_peer.expert_offsets)
        # Slack 2: a GEMM may round a row otherwise when it runs again.
        run.agree(sums_error(y, h, torch_peer, slack=2.0))
        rows, _, layout = layer.dispatch(x, idx, weight)
        offsets, inner = layout.expert_offsets, activate(_grouped_linear(rows, moe.gate_up_proj, layout.expert_offsets, None))

        def gemms():
            _grouped_linear(rows, moe.gate_up_proj, offsets, None)
            _grouped_linear(inner, moe.down_proj, offsets, None)

        flops = 6.0 * shape.tokens * shape.topk * shape.hidden * shape.inner  # of a rank, on average

        def record(impl, ms, over=None):
            tflops = flops / ms / 1e9
            run.record("layer", shape, impl, ms, over=over, rate=f"{tflops:{'.1f' if run.on_gpu else '.1g'}} TFLOP/s", tflops=round(tflops, 4))

        times = {"torch": run.time(layer, lambda: unfused(torch_peer))}
        record("torch layer", times["torch"])
        if run.deep_ep:
            for num_sm in (24, 48):
                run.bar.note(f"layer {shape.name}: DeepEP, {num_sm} SMs")
                peer = run.deep_ep_peer(shape, inputs, num_sm)
                peer.tune(lambda fn: run.time(layer, fn, iters=5))
                run.agree(sums_error(unfused(peer), h, torch_peer, slack=2.0))
                ms = run.time(layer, lambda: unfused(peer))
                times["DeepEP"] = min(ms, times.get("DeepEP", ms))
                record(f"DeepEP layer, {num_sm} SMs", ms)
        times["GEMMs"] = run.time(layer, gemms)
        record("GEMMs alone", times["GEMMs"])
        record("epmoe layer", run.time(layer, lambda: moe(x, idx, weight)), times)
        layer.synchronize()
