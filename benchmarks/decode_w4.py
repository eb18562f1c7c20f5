"""Measures a decode layer with weights of 4 bits by T, the tokens of a rank, beside 16 bits and FP8.

See w4.py for the layers and their checks, and w4_transformers.py for the peers.  A rank that is alone gets
the tokens of four ranks, and of their choices those of its own experts: the others are dropped.

The time of a line is that of a call among CALLS in a CUDA graph, on the CPU that of eager calls.  Each call
has other tokens, which choose other experts, so that the L2 cache holds little of the weights that the next
call reads.  The graphs of all layers are replayed in turn.  The speed is that at which the parameters of the
experts that get tokens would have to be read in that time, which also has the dispatch and the combine.
"""

import functools
import statistics

import torch

from . import w4_tables, w4_transformers
from .measure import captured, in_turn, slowest
from .w4 import OVER, Formats, alone, error_of, gathered, have_same_bits, held, ranks_of, shapes

TOKENS = {"cuda": (1, 2, 4, 8, 16, 32), "cpu": (1, 16)}
CALLS = {"cuda": 16, "cpu": 2}


def jobs(run):
    return [(shape.name, functools.partial(measure, run, shape)) for shape in shapes(run)]


@torch.no_grad()
def measure(run, shape):
    all_tokens = run.options.tokens or TOKENS[run.device.type]
    most, before = max(all_tokens) * ranks_of(run, shape) // run.size, len(run.rows)
    with Formats(run, held(run, shape), most) as formats:
        peers = w4_transformers.load(run, formats)
        for tokens in all_tokens:
            run.bar.show(f"{shape.name}, T {tokens}")
            measure_tokens(run, shape.with_tokens(tokens), formats, peers)
    for table in w4_tables.decode_tables(run.rows[before:]):
        run.say("\n".join(["", *w4_tables.aligned(table)]))


def inputs_of(run, shape, number):
    """Return x, idx and weight of a call: of T tokens, or alone of those of all the ranks."""
    ranks = ranks_of(run, shape)
    g = torch.Generator(run.device).manual_seed(1000 * (CALLS["cuda"] * shape.tokens + number) + run.rank)
    num_tokens = shape.tokens * ranks // run.size
    x = torch.randn(num_tokens, shape.hidden, device=run.device, generator=g).bfloat16()
    order = torch.rand(num_tokens, shape.experts, device=run.device, generator=g)
    weight = torch.rand(num_tokens, shape.topk, device=run.device, generator=g)
    idx = order.topk(shape.topk).indices
    return x, torch.where(idx < held(run, shape).experts, idx, -1), weight / weight.sum(1, keepdim=True)


def of_rank(run, formats, inputs):
    """Return the inputs of all ranks, with this rank's numbers of its experts, and -1 for others.

    Collective.
    """
    x, idx, weight = (gathered(run, t) for t in inputs)
    num = formats.op.num_local_experts
    idx = idx - formats.op.rank * num
    return x, torch.where((idx >= 0) & (idx < num), idx, -1), weight


def num_chosen(idx):
    """Return how many experts have a token."""
    return len(idx[idx >= 0].unique())


class Calls:
    """One call of a layer for each of its inputs.  results: those of the last time."""

    def __init__(self, layer, inputs):
        self.layer, self.inputs, self.results = layer, inputs, []

    def __call__(self):
        self.results = [self.layer(*args) for args in self.inputs]


def measure_tokens(run, shape, formats, peers):
    """Measure all layers with T tokens."""
    inputs = [inputs_of(run, shape, number) for number in range(CALLS[run.device.type])]
    of_experts = [of_rank(run, formats, args) for args in inputs]
    formats.modules["bf16"].enable_decode(len(inputs[0][0]))
    found, errors = formats.check(inputs, decode=True)
    formats.twin_of("MXFP4")  # whose weights the peers have
    for name, peer in peers.items():
        found[name], errors[name] = w4_transformers.check(run, peer, of_experts, found["MXFP4"])
    calls = {name: Calls(functools.partial(moe, decode=True), inputs)
             for name, moe in formats.modules.items()}
    calls |= {name: Calls(peer, of_experts) for name, peer in peers.items()}
    ms = times(run, calls, found)
    num_experts = statistics.mean(num_chosen(idx) for _, idx, _ in of_experts)
    num_experts = slowest(run.cpu_group, num_experts)
    for name, t in ms.items():
        num_bytes = formats.bytes_of_expert(name if name in formats.modules else peers[name].held_as)
        record(run, shape, name, ms, num_experts, num_bytes, error=round(errors[name], 5))
    formats.op.synchronize()
    formats.op.low_latency.finalize()
    formats.op.low_latency = None  # the next T has one of its size


def times(run, calls, wanted):
    """Return {name: milliseconds of one call}, measured in turn.

    calls: {name: Calls}.  wanted: {name: results}, which graphs must give, epmoe's bit by bit.
    """
    fns = list(calls.values())
    if run.on_gpu:
        graphs = captured(fns)
        for call in fns:
            for y in call.results:
                y.fill_(torch.nan)
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        for name, call in calls.items():
            is_right = (have_same_bits(call.results, wanted[name]) if name in w4_tables.FORMATS else
                        error_of(run, call.results, wanted[name]) <= w4_transformers.MOST_ERROR)
            run.agree("" if is_right else f"{name}: the graph gives another result")
        fns = [graph.replay for graph in graphs]
    measured = in_turn(fns, run.device, run.iters)
    return {name: slowest(run.cpu_group, statistics.median(ms)) / len(call.inputs)
            for (name, call), ms in zip(calls.items(), measured)}


def record(run, shape, name, ms, num_experts, num_bytes, **more):
    """Record the time of a format or a peer.  num_experts: those of the rank that get tokens."""
    tbps = num_experts * num_bytes / ms[name] / 1e9
    run.record(w4_tables.DECODE, shape, w4_tables.impl_of(name), ms[name],
               over={other: ms[other] for other in OVER.get(name, ()) if other in ms},
               rate=f"{tbps:.2f} TB/s, {tbps / w4_tables.HBM_TBPS:.0%}", experts=round(num_experts, 2),
               bytes_of_expert=int(num_bytes), tbps=round(tbps, 4), **alone(run, shape), **more)
