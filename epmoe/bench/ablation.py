"""What each choice in the megakernels brings: one is made otherwise at a time, the rest stays at its default.

The columns: time of the layer, of its first kernel (dispatch + gemm) and of its second, over the time as it is.
"""

import functools

import torch

from .layer import Layer, by_turns

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
            continue  # there it is the number of threads
        if run.num_sm and options.get("num_tail_sms", 0) >= run.num_sm:
            run.say(f"left out: {choice}, of the {run.num_sm} of --num-sm none would send")
            continue
        with Layer(run, shape, **options) as layer:
            layer.check()
            parts = layer.parts()
            ms = by_turns(run, layer=layer, **{n: parts[n] for n in names.values()})
            usual = usual or ms
            run.record("ablation", shape, choice, ms["layer"], over={"layer": usual["layer"]} | {stage: usual[n] * ms["layer"] / ms[n] for stage, n in names.items()},
                       **{f"{stage}_ms": round(ms[n], 5) for stage, n in names.items()})
