"""Measures dispatch and combine by number of thread blocks that move tokens (threads on the CPU).

The remaining SMs are free for GEMMs.
"""

import functools

from . import a2a

SM_COUNTS = {"cuda": (8, 16, 24, 32, 48, 64, 96, 128), "cpu": (1, 2)}


def jobs(run):
    counts = run.options.num_sm or SM_COUNTS[run.device.type]
    return [(f"{shape.name}, {n}", functools.partial(a2a.measure, run, shape, "sm", n, peers=False))
            for shape in run.shapes("seed", "dsv3") for n in counts]
