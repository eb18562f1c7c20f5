"""Measures a whole layer with weights of 4 bits in prefill, beside those of 16 bits and of FP8.

See w4.py for the layers and their checks.  A rank that is alone has a quarter of the experts and as many
rows as one rank of four, so all choices of its tokens are experts of its own.
"""

import functools

import torch

from . import w4_tables
from .layer import alternate, record_layer
from .w4 import OVER, Formats, alone, held, shapes


def jobs(run):
    found = shapes(run)
    return [(shape.name, functools.partial(measure, run, shape, shape is found[-1])) for shape in found]


@torch.no_grad()
def measure(run, of_all, is_last):
    """Measure a shape.  of_all: with the experts of all ranks."""
    shape = held(run, of_all)
    x, idx, weight = run.inputs(shape)
    args = x.bfloat16(), idx, weight
    with Formats(run, shape, shape.tokens) as formats:
        found, errors = formats.check([args], decode=False)
        modules = dict(formats.modules)
        for name in w4_tables.IN_FP8:
            modules[name], errors[name] = formats.in_fp8(name, args, found["bf16"][0])
        ms = alternate(run, **{name: functools.partial(moe, *args, decode=False)
                               for name, moe in modules.items()})
    for name, t in ms.items():
        over = {other: ms[other] for other in OVER.get(name, ()) if other in ms}
        record_layer(run, w4_tables.LAYER, shape, w4_tables.impl_of(name), t, over,
                     error=round(errors[name], 5), **alone(run, of_all))
    if is_last:
        for table in w4_tables.layer_tables(run.rows):
            run.say("\n".join(["", *w4_tables.aligned(table)]))
