"""Protocol overhead: ranks side by side on one GPU.

The ranks are threads of one process, each with a stream and a part of the SMs.  Their flags and rows go
through the L2 of one GPU, not over links.  So these figures show what the protocol itself costs, and how that
grows with the number of ranks.  They say nothing about the speed of several GPUs.

barrier            enter and nothing else: one round of flags
plan, dispatch, …  one operation among many in a CUDA graph, few tokens; on the CPU one call
"""

import functools
import os
import statistics
import time

import torch

import epmoe
from epmoe.testing import SIDE_BY_SIDE, run_threads

RANKS = (1, 2, 4)
TOKENS = (1, 16, 128)
CALLS, REPLAYS = 50, 20


def jobs(run):
    if run.size > 1 or (run.on_gpu and any(name not in os.environ for name in SIDE_BY_SIDE)):
        run.say("left out: side starts ranks as threads of one process: python -m benchmarks side --ranks 1")
        return []
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes("qwen3-30b")]


def measure(run, shape):
    for tokens in TOKENS:
        few = shape.with_tokens(tokens)
        for num_ranks in RANKS:
            fn = functools.partial(one_rank, few, run.device)
            times = run_threads(fn, num_ranks, timeout_s=300, device=run.device)
            for name in times[0]:
                ms = max(t[name] for t in times)
                run.record("side", few, f"epmoe {name}, {num_ranks} ranks", ms,
                           rate="through the L2" if run.on_gpu else "", ranks=num_ranks)


def one_rank(shape, device, world):
    """{operation: milliseconds} of one rank, after its result was checked."""
    on_gpu, world_size = device.type == "cuda", world.size
    g = torch.Generator().manual_seed(world.rank)
    x = torch.randint(-3, 4, (shape.tokens, shape.hidden), generator=g)
    x = x.to(device, torch.bfloat16 if on_gpu else torch.float32)
    idx = torch.rand(shape.tokens, shape.experts, generator=g).topk(shape.topk).indices.to(device)
    layer = epmoe.EPAll2AllLayer(world, shape.tokens, shape.hidden, shape.topk, num_tot_experts=shape.experts,
                                 dtype=x.dtype, device=device, enable_local_combine=True,
                                 capacity=world_size * shape.tokens * shape.topk)
    rows, _, layout = layer.dispatch(x, idx)
    if not torch.equal(layer.combine(rows, layout), x * shape.topk):  # small integers: every sum is exact
        raise AssertionError(f"rank {world.rank} of {world_size}: combine of dispatch is not K x the input")
    calls = {"barrier": layer.ep_barrier_all, "plan": lambda: layer.preprocess(idx),
             "dispatch": lambda: layer.dispatch(x, layout=layout),
             "combine": lambda: layer.combine(rows, layout)}
    times = {name: (graphed if on_gpu else called)(world, layer, fn) for name, fn in calls.items()}
    layer.synchronize()
    layer.finalize()
    return times


def graphed(world, layer, fn):
    """Milliseconds of fn among CALLS of them in a graph that all ranks replay at the same time."""
    layer.synchronize()
    world.exchange(b"x")  # a capture begins with a wait for the device: no rank may be in an operation
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for _ in range(CALLS):
            fn()
    world.exchange(b"x")
    events = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        events.append((begin, end))
    layer.synchronize()
    world.exchange(b"x")
    return statistics.median(a.elapsed_time(b) for a, b in events) / CALLS


def called(world, layer, fn):
    """Milliseconds of one call, median of some."""
    times = []
    for _ in range(REPLAYS):
        world.exchange(b"x")
        begin = time.perf_counter()
        fn()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)
