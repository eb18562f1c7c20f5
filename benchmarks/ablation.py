"""Measures the effect of each option of the fused kernels: one is changed at a time.

The columns: time of the layer, of its first kernel (dispatch + gemm) and of its second, each divided by the
time with the default options.
"""

import functools

import torch

from .layer import Layer, alternate

CHOICES = {
    "as it is": {},
    "no token saving": {"token_saving": False},
    "no token sorting": {"token_sorting": False},
    "a tile waits for its expert": {"block_wise_barrier": False},
    "two-stage dispatch, 32 tail SMs": {"num_tail_sms": 32},
    "tokens moved in 66 SMs": {"num_sm": 66},
    "tokens moved in 32 SMs": {"num_sm": 32},
    "added up in 32 SMs": {"num_reduce_sms": 32},
    "serial: combine after the GEMM": {"combine_order": "serial"},
    "no pre-reduction": {"enable_local_combine": False, "combine_mode": "scatter"},
    "one stage after the other": {"fused": False},
}


def jobs(run):
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes("seed", "dsv3")]


@torch.no_grad()
def measure(run, shape):
    names, usual = {"first": "dispatch + gemm", "second": "gemm + combine"}, None
    for choice, options in CHOICES.items():
        if not run.on_gpu and "num_sm" in options:
            continue  # on the CPU num_sm is the number of threads
        if run.num_sm and options.get("num_tail_sms", 0) >= run.num_sm:
            run.say(f"skipped: {choice}, because none of the {run.num_sm} blocks of --num-sm would send")
            continue
        with Layer(run, shape, **options) as layer:
            layer.check()
            parts = layer.parts()
            ms = alternate(run, layer=layer, **{n: parts[n] for n in names.values()})
            usual = usual or ms
            run.record("ablation", shape, choice, ms["layer"],
                       over={"layer": usual["layer"]}
                       | {stage: usual[n] * ms["layer"] / ms[n] for stage, n in names.items()},
                       **{f"{stage}_ms": round(ms[n], 5) for stage, n in names.items()})
