"""A whole layer, unfused: EPMoE's forward, the same over the peers with torch's products, and those alone on the same rows."""

import functools

import torch

import epmoe
from epmoe.bench.check import poisoned, sums_error
from epmoe.reference import activate


def torch_linear(x, weight, offsets):
    """What a user has without epmoe: torch's grouped product on a GPU, one product an expert on the CPU."""
    if x.device.type == "cuda":
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets[1:])
    return epmoe.grouped_gemm(x, weight, offsets=offsets)


def jobs(run):
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes()]


@torch.no_grad()
def measure(run, shape):
    inputs = x, idx, weight = run.inputs(shape)
    with run.layer(shape, x.dtype) as layer:
        moe = epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, dtype=x.dtype, layer=layer)
        torch_peer = run.torch_peer(shape, inputs)

        def experts(rows, offsets):
            return torch_linear(activate(torch_linear(rows, moe.gate_up_proj, offsets)), moe.down_proj, offsets)

        def our_experts(rows, offsets):
            h = epmoe.grouped_gemm(rows, moe.gate_up_proj, offsets=offsets, activation=moe.activation)
            return epmoe.grouped_gemm(h, moe.down_proj, offsets=offsets)

        def unfused(peer):
            rows = peer.dispatch()
            return peer.combine(experts(rows, peer.expert_offsets))

        with poisoned():
            y = moe(x, idx, weight)
        run.agree(sums_error(y, our_experts(torch_peer.dispatch(), torch_peer.expert_offsets), torch_peer, slack=2.0))
        h = experts(torch_peer.dispatch(), torch_peer.expert_offsets)  # slack 2: a product may round a row otherwise when it runs again
        rows, _, layout = layer.dispatch(x, idx, weight)
        offsets, inner = layout.expert_offsets, activate(torch_linear(rows, moe.gate_up_proj, layout.expert_offsets))

        def gemms():
            torch_linear(rows, moe.gate_up_proj, offsets)
            torch_linear(inner, moe.down_proj, offsets)

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
