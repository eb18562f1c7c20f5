"""How times are measured: a barrier before each run, device events, the median, the slowest rank."""

import ctypes
import functools
import statistics
import time

import torch
import torch.distributed as dist


def slowest(cpu_group, value):
    """Return the largest of all ranks' values.  Collective."""
    if not dist.is_initialized():
        return value
    t = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX, group=cpu_group)
    return float(t)


@functools.cache
def _buffer_larger_than_l2(device):
    num_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 1 << 26)
    return torch.empty(2 * num_bytes, dtype=torch.int8, device=device)


def timed(fn, barrier, device, cpu_group, iters=30, warmup=5):
    """Return the median milliseconds of fn on the slowest rank.

    On the GPU this is the time between two events, which includes host time where the host is slower.  Before
    each run the L2 cache is overwritten, instead of rotating through many buffers.
    """
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(iters):
        if device.type == "cuda":
            _buffer_larger_than_l2(device).fill_(1)
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
    """Return the milliseconds of each fn: the median over the rounds, on the slowest rank.

    In a round each fn is called back to back for about round_ms, one fn after the other.  This is for work
    that the GPU's power limits: the clock falls within milliseconds, so each fn must meet it in the same
    state.  All ranks make equally many calls, so an fn may be collective.
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
    for r in range(rounds + 2):  # two rounds to warm up; every other round in reverse order
        for i in (range(len(fns)) if r % 2 else reversed(range(len(fns)))):
            t = span(fns[i], calls[i])
            if r >= 2:
                times[i].append(t)
    return [slowest(cpu_group, statistics.median(t)) for t in times]


def sm_clock(fn, device, calls):
    """Return the clock of the GPU's SMs in MHz while fn runs, or None where NVIDIA's library does not tell.

    fn is called `calls` times without a wait, which should take some 50 ms: longer than a query, and long
    enough that the limit of the power has set in.
    """
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    handle, mhz = ctypes.c_void_p(), ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    for _ in range(calls):
        fn()
    end, clocks = torch.cuda.Event(), []
    end.record()
    while not end.query():
        if nvml.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(mhz)) == 0:  # 1: NVML_CLOCK_SM
            clocks.append(mhz.value)
        time.sleep(0.002)
    return statistics.median(clocks[len(clocks) // 2:]) if clocks else None


def graphed(fn, cpu_group, calls=50, replays=20):
    """Return the milliseconds of fn as one of many calls in a CUDA graph: device time only, with warm caches.

    The launch of the graph, and the skew between the ranks' hosts, delay its first call only; so it has many.
    """
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


def captured(fns):
    """Capture each function in a CUDA graph of its own, after all were called once; return the graphs.

    A function may use what one before it has left, for example a call that it has sent.
    """
    for fn in fns:
        fn()
    graphs, stream = [], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for fn in fns:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            fn()
    return graphs


def in_turn(fns, device, rounds):
    """Return a list of milliseconds for each fn.  In each round all are called, one after the other.

    For device "cpu" this is the time until fn returns, also where it starts work on a GPU.
    """
    def mark():
        if device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    marks = []
    for _ in range(rounds + 2):  # two to warm up
        marks.append([mark()])
        for fn in fns:
            fn()
            marks[-1].append(mark())
    if device.type == "cuda":
        torch.cuda.synchronize()
    between = (lambda a, b: a.elapsed_time(b)) if device.type == "cuda" else (lambda a, b: b - a)
    return [[between(m[i], m[i + 1]) for m in marks[2:]] for i in range(len(fns))]


def host_microseconds(fn, sync, cpu_group, calls=200, rounds=20):
    """Return the microseconds until fn returns, without a wait for the device: the median over rounds."""
    times = []
    for _ in range(rounds + 1):  # one to warm up
        sync()
        t = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - t) / calls * 1e6)
    sync()
    return slowest(cpu_group, statistics.median(times[1:]))
