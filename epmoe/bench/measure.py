"""How a figure is taken: a barrier before each iteration, events on the device, the median of many, the slowest rank."""

import functools
import statistics
import time

import torch
import torch.distributed as dist


def slowest(cpu_group, value):
    """The largest of all ranks' values."""
    if not dist.is_initialized():
        return value
    t = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX, group=cpu_group)
    return float(t)


@functools.cache
def _more_than_the_l2(device):
    num_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 1 << 26)
    return torch.empty(2 * num_bytes, dtype=torch.int8, device=device)


def timed(fn, barrier, device, cpu_group, iters=30, warmup=5):
    """Median milliseconds of fn, the slowest rank's.  On the GPU: device time between two events, host time included
    where the host is the slower one.  The L2 is overwritten before each, in place of rotating through many buffers."""
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(iters):
        if device.type == "cuda":
            _more_than_the_l2(device).fill_(1)
            barrier()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            fn()
            end.record()
            times.append((begin, end))
        else:
            barrier()
            t = time.perf_counter()
            fn()
            times.append((time.perf_counter() - t) * 1e3)
    if device.type == "cuda":
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in times]
    return slowest(cpu_group, statistics.median(times))


def alternated(fns, device, cpu_group, rounds, round_ms):
    """Milliseconds of each fn, called back to back for a round_ms and in turn with the others: median over the rounds, slowest rank's.

    For work that a GPU's power limits: its clock falls within milliseconds, so each must meet it in the same state.  All ranks
    make as many calls, so an fn may be one that they make together.
    """
    def span(fn, calls):
        if device.type != "cuda":
            t = time.perf_counter()
            for _ in range(calls):
                fn()
            return (time.perf_counter() - t) * 1e3 / calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        fn()
        begin.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    calls, times = [max(1, int(round_ms / slowest(cpu_group, span(fn, 2)))) for fn in fns], [[] for _ in fns]
    for r in range(rounds + 2):  # two rounds to warm up; every other one backwards
        for i in (range(len(fns)) if r % 2 else reversed(range(len(fns)))):
            t = span(fns[i], calls[i])
            if r >= 2:
                times[i].append(t)
    return [slowest(cpu_group, statistics.median(t)) for t in times]


def graphed(fn, cpu_group, calls=50, replays=20):
    """Milliseconds of one fn among `calls` of them in a CUDA graph: device time without the host's, caches warm.  The
    start of a graph, and what the ranks' hosts start it apart, is of the first call; so there are many."""
    fn()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            fn()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return slowest(cpu_group, statistics.median(a.elapsed_time(b) for a, b in times) / calls)


def host_microseconds(fn, sync, cpu_group, calls=200, rounds=20):
    """Microseconds that the caller of fn is kept, device work not waited for: median over rounds of so many calls."""
    times = []
    for _ in range(rounds + 1):  # one to warm up
        sync()
        t = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - t) / calls * 1e6)
    sync()
    return slowest(cpu_group, statistics.median(times[1:]))
