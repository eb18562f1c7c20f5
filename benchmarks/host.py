"""Measures the host overhead per call: eager, with a fixed capacity, for few tokens.

host        the time until the call returns, without waiting for the device
among many  the time per call in a row of calls: the kernel's time or the host's, whichever is longer
in a graph  the kernel's time alone; the row before says how much longer an eager call takes
"""

import functools

import torch

import epmoe

from .layer import Layer
from .measure import alternated, graphed, host_microseconds

TOKENS = 64


def jobs(run):
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes("qwen3-30b")]


def measure(run, shape):
    shape = shape.with_tokens(TOKENS)
    options = {"capacity": run.size * shape.tokens * shape.topk,
               "num_sm": run.num_sm or (8 if run.on_gpu else 1)}
    x, idx, weight = run.inputs(shape)
    with run.layer(shape, x.dtype, **options) as layer:
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        record(run, shape, {"preprocess": lambda: layer.preprocess(idx),
                            "cached dispatch": lambda: layer.dispatch(x, weight=weight, layout=layout),
                            "combine": lambda: layer.combine(rows, layout, row_weight)})
        layer.synchronize()
    del options["num_sm"]  # of the fused kernels it is another option
    with torch.no_grad(), Layer(run, shape, **options) as fused:
        fused.check()
        parts = fused.parts()
        record(run, shape, {name: parts[name] for name in ("dispatch + gemm", "gemm + combine")})
    with torch.no_grad(), epmoe.LowLatencyAll2All(run.world, shape.tokens, shape.hidden, shape.topk,
                                                  shape.experts, dtype=x.dtype, device=run.device,
                                                  num_sm=run.num_sm) as decode:
        out = decode.dispatch(x, idx, weight)
        y, handle, sums = torch.randn_like(out[0]), out[3], torch.empty_like(x)
        record(run, shape, {"low-latency dispatch": lambda: decode.dispatch(x, idx, weight),
                            "low-latency dispatch, out=": lambda: decode.dispatch(x, idx, weight, out=out),
                            "low-latency combine": lambda: decode.combine(y, handle),
                            "low-latency combine, out=": lambda: decode.combine(y, handle, out=sums)})
        decode.synchronize()


def record(run, shape, calls):
    """Measure and record each of {name: function}."""
    # on the CPU a call has finished when it returns
    sync = torch.cuda.synchronize if run.on_gpu else (lambda: None)
    for name, fn in calls.items():
        us = host_microseconds(fn, sync, run.cpu_group, **({} if run.on_gpu else {"calls": 10, "rounds": 3}))
        run.record("host", shape, f"epmoe {name}, host", us / 1e3, rate=f"{us:.1f} us")
        if run.on_gpu:
            many, = alternated([fn], run.device, run.cpu_group, run.iters, 5)
            kernel = graphed(fn, run.cpu_group)
            run.record("host", shape, f"epmoe {name}, among many", many,
                       rate=f"{(many - kernel) * 1e3:.1f} us beyond")
            run.record("host", shape, f"epmoe {name}, in a graph", kernel)
