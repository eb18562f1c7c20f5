"""Measures the effect of token saving, sorting and pre-reduction.

Pre-reduction is an option of EPAll2AllLayer, so both ways are timed.  Token saving and sorting by expert are
always part of its dispatch.  For token saving, the bytes are counted that would cross the links without it;
ablation.py measures its effect on the fused kernels, where it is an option.  For sorting, the time is
measured that torch needs to permute as many rows, which a user of unsorted rows would have to add.
"""

import functools

import torch

from .a2a import checked

COMBINES = (("pre-reduced", {"enable_local_combine": True}),
            ("a row a choice, pushed", {"combine_mode": "scatter"}),
            ("a row a choice, pulled", {"combine_mode": "gather"}))


def jobs(run):
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes("dsv3")]


def rows_sent(layout, stage, once_a_token):
    """Return [W]: the rows that this rank sends to each rank in a stage.

    once_a_token: one row for all choices of a token at a rank.  Else one for each choice.
    """
    if once_a_token:
        return layout.send_tokens if stage == "dispatch" else layout.recv_tokens
    # [W, W]: from, to
    rank, choices = layout.layer.rank, layout.counts.unflatten(1, (layout.layer.world_size, -1)).sum(2)
    return choices[rank] if stage == "dispatch" else choices[:, rank]


def measure(run, shape):
    inputs = x, idx, weight = run.inputs(shape)
    row_bytes, peer, pre_reduced = x.shape[1] * x.element_size(), run.torch_peer(shape, inputs), None

    def wire(*what):
        return run.wire_bytes((rows_sent(*what), row_bytes))

    for name, options in COMBINES:
        with run.layer(shape, x.dtype, **{"enable_local_combine": False} | options) as layer:
            rows, row_weight, layout = checked(run, layer, inputs, peer)
            num_bytes = wire(layout, "combine", name == "pre-reduced")
            ms = run.time(layer, lambda: layer.combine(rows, layout, row_weight))
            pre_reduced = pre_reduced or ms
            run.record("features", shape, f"combine, {name}", ms, num_bytes, {"pre-reduced": pre_reduced},
                       f"{num_bytes / 1e6:.3g} MB")
            if name != "pre-reduced":
                continue
            saved, every = wire(layout, "dispatch", True), wire(layout, "dispatch", False)
            dispatch = run.time(layer, lambda: layer.dispatch(x, weight=weight, layout=layout))
            run.record("features", shape, "dispatch, token saving", dispatch, saved,
                       rate=f"{saved / 1e6:.3g} MB")
            run.record("features", shape, "dispatch, a row a choice: bytes", None, every,
                       rate=f"{every / 1e6:.3g} MB")
            order = torch.randperm(len(rows), device=rows.device)
            permute = run.time(layer, lambda: rows[order])
            run.record("features", shape, "torch permute, saved by sorting", permute,
                       over={"dispatch": dispatch})
            layer.synchronize()
