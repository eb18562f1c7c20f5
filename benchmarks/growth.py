"""Measures a whole layer by T, the tokens of a rank: how its time grows, and where the GEMMs dominate it."""

import functools

import torch

from .layer import Layer, alternate, record_layer

TOKENS = {"cuda": (256, 512, 1024, 2048, 4096, 8192, 16384, 32768), "cpu": (16, 64)}


def jobs(run):
    return [(f"{shape.name}, T {t}", functools.partial(measure, run, shape.with_tokens(t)))
            for shape in run.shapes("qwen3-235b") for t in TOKENS[run.device.type]]


@torch.no_grad()
def measure(run, shape):
    with Layer(run, shape) as layer:
        layer.check()
        parts = layer.parts()
        ms = alternate(run, **{"torch layer": lambda: layer.over(layer.torch_peer),
                               "GEMMs alone": lambda: (parts["gate and up"](), parts["down"]()),
                              "epmoe layer, one after the other": layer.unfused, "epmoe layer": layer})
        over = {"GEMMs": ms["GEMMs alone"], "torch": ms["torch layer"]}
        for impl, t in ms.items():
            record_layer(run, "growth", shape, impl, t, over if impl.startswith("epmoe") else None)
