"""Measures plan, dispatch and combine by T, the tokens of a rank: from decoding to training."""

import functools

from . import a2a

TOKENS = {"cuda": (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), "cpu": (16, 64)}


def jobs(run):
    return [(f"{shape.name}, T {t}", functools.partial(a2a.measure, run, shape.with_tokens(t), "tokens"))
            for shape in run.shapes("dsv3") for t in TOKENS[run.device.type]]
