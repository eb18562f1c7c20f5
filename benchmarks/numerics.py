"""Measures what EPMoE(rank_invariant=True) costs: a training step, the forward, and decode layers.

epmoe            EPMoE, which adds up the rows of a token at each rank before they return
epmoe invariant  the same with rank_invariant=True: each row of a token returns by itself

The two have the same experts, and alternate in rounds.  Decode layers run in CUDA graphs, on the CPU as plain
calls.  Before anything is timed, results and gradients are compared.
"""

import functools

import torch

import epmoe

from .check import poisoned
from .lora import inputs_of
from .measure import captured, in_turn, slowest
from .train import BOUNDS, PASSES, Inference, Step, alternate, relative_error
from .train import NAMES as RESULTS

DEFAULT = ("dsv3", "qwen3-30b", "seed")
DECODE_TOKENS = (16, 64, 128)
NAMES = ("epmoe", "epmoe invariant")


def jobs(run):
    return [(s.name, functools.partial(measure, run, s)) for s in run.shapes(*DEFAULT)]


def pair(run, shape, dtype, **options):
    """Return both modules by name, with the same parameters.  Collective."""
    found = {}
    for name in NAMES:
        found[name] = moe = epmoe.EPMoE(
            shape.hidden, shape.inner, shape.experts, shape.topk, run.world, dtype=dtype, device=run.device,
            max_tokens=shape.tokens, num_sm=run.num_sm, rank_invariant=name != "epmoe", **options)
        first = found["epmoe"]
        moe.gate_up_proj, moe.down_proj = first.gate_up_proj, first.down_proj
    return found


def differs(got, want):
    """Return what is wrong with the results of a step, or ""."""
    for name, a, b in zip(RESULTS, got, want):
        error = relative_error(a, b)
        if not error <= BOUNDS[b.dtype]:
            return f"{name} with rank_invariant differs by {error:.1e} of its norm"
    return ""


def finalize(modules):
    for moe in modules.values():
        moe.layer.synchronize()
        moe.finalize()


def measure_step(run, shape):
    x, idx, weight = inputs_of(run, shape)
    dy, modules = torch.randn_like(x), pair(run, shape, x.dtype)
    parameters = [modules["epmoe"].gate_up_proj, modules["epmoe"].down_proj]
    steps = {name: Step(functools.partial(lambda moe, x, w: moe(x, idx, w), moe), x, weight, dy, parameters)
             for name, moe in modules.items()}
    want = steps["epmoe"].results()
    run.agree(differs(steps["epmoe invariant"].results(), want))
    del want
    ms = alternate(run, steps | {f"{name} inference": Inference(steps[name]) for name in NAMES})
    for what in PASSES:
        for name in NAMES:
            record(run, shape, name, what, ms[name][what], ms["epmoe"][what])
    for name in NAMES:
        record(run, shape, name, "inference", ms[f"{name} inference"]["forward"],
               ms["epmoe inference"]["forward"])
    finalize(modules)


@torch.no_grad()
def measure_decode(run, shape):
    x, idx, weight = inputs_of(run, shape)
    modules = pair(run, shape, x.dtype, capacity=run.size * shape.tokens * shape.topk)
    calls = {name: functools.partial(moe, x, idx, weight) for name, moe in modules.items()}
    with poisoned():
        found = [calls[name]() for name in NAMES]
    run.agree(differs(found[1:], found[:1]))
    fns = ([graph.replay for graph in captured(list(calls.values()))] if run.on_gpu
           else list(calls.values()))
    times = in_turn(fns, run.device, run.options.iters or (50 if run.on_gpu else 3))
    ms = {name: slowest(run.cpu_group, float(torch.tensor(t).median())) for name, t in zip(NAMES, times)}
    for name in NAMES:
        record(run, shape, name, "decode", ms[name], ms["epmoe"])
    finalize(modules)


def record(run, shape, name, what, took, of_default):
    run.record("numerics", shape, f"{name} {what}", took,
               over={"epmoe": of_default} if name == "epmoe invariant" else None)


def measure(run, shape):
    measure_step(run, shape)
    for tokens in DECODE_TOKENS if run.on_gpu else DECODE_TOKENS[:1]:
        measure_decode(run, shape.with_tokens(tokens))
