"""Measures calls of an EPMoE while its experts move to other places (EPMoE.move_experts).

epmoe             calls without a move
epmoe, moving     calls beside the copies of a move, with an advance() after each
worst             the longest of all these calls; with and without a move, because a machine has outliers
advance, host     the time until advance() returns

A call is decoding, on the GPU in a CUDA graph, or the forward of many tokens.  The host waits for each call,
as a server does that reads the tokens.  The module has two spare places a rank, and moves follow random
loads.  With rank_invariant=True a result has the same bits whatever the places are.  So each result is
compared with the first.
"""

import functools
import statistics
import time

import torch

import epmoe

from .measure import captured, slowest

DEFAULT = ("dsv3", "qwen3-30b")
DECODE_TOKENS = 64
SPARE_PLACES = 2  # of a rank


def jobs(run):
    return [(f"{s.name}, T {s.tokens}", functools.partial(measure, run, s))
            for shape in run.shapes(*DEFAULT)
            for s in dict.fromkeys((shape.with_tokens(min(DECODE_TOKENS, shape.tokens)), shape))]


class Timed:
    """A call of a module, its times, and whether all results had the bits of the first."""

    def __init__(self, run, fn):
        self.run, self.fn, self.want = run, fn, fn().clone()
        self.has_other_bits = torch.zeros((), dtype=torch.bool, device=run.device)

    def __call__(self):
        """Call once and wait for it.  Returns milliseconds."""
        if not self.run.on_gpu:
            begin = time.perf_counter()
            y = self.fn()
            took = (time.perf_counter() - begin) * 1e3
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            y = self.fn()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end)
        self.has_other_bits |= (y != self.want).any()
        return took

    def check(self):
        self.run.agree("a result has other bits while experts move" if bool(self.has_other_bits) else "")


def replayed(fn):
    """Return a function that replays fn, and returns what fn returned when it was captured."""
    results = []
    graph, = captured([lambda: results.append(fn())])
    return lambda: graph.replay() or results[-1]


def moving(run, moe, call, num_switches):
    """Return the milliseconds of calls during moves with at least so many changes of the map, the
    microseconds of their advance(), and the number of changes.
    """
    def placed():
        return moe.expert_map.physical_to_logical_map.tolist()

    took, host, switches = [], [], 0
    loads = torch.Generator().manual_seed(5)  # the same on all ranks
    while switches < num_switches:
        load = torch.rand(moe.num_experts, generator=loads)**8
        current, is_done = moe.expert_map, False
        move = moe.move_experts(epmoe.balance_experts(load, run.size, moe.layer.num_experts, current))
        while not is_done:
            before, begin = placed(), time.perf_counter()
            is_done = move.advance()
            host.append((time.perf_counter() - begin) * 1e6)
            switches += placed() != before
            took.append(call())
    return took, host, switches


@torch.no_grad()
def measure(run, shape):
    x, idx, weight = run.inputs(shape)
    moe = epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, run.world, dtype=x.dtype,
                      device=run.device, max_tokens=shape.tokens, num_sm=run.num_sm, rank_invariant=True,
                      num_physical=shape.experts + SPARE_PLACES * run.size)
    moe.set_expert_map(epmoe.balance_experts([1.0] * shape.experts, run.size, moe.layer.num_experts))
    fn = functools.partial(moe, x, idx, weight)
    decodes = shape.tokens <= DECODE_TOKENS
    call = Timed(run, replayed(fn) if run.on_gpu and decodes else fn)
    calls = run.options.iters or (300 if run.on_gpu else 10)
    still = [call() for _ in range(calls + 3)][3:]  # three to warm up
    took, host, switches = moving(run, moe, call, calls if run.on_gpu else 4)
    call.check()
    normal = slowest(run.cpu_group, statistics.median(still))
    what = "decode" if decodes else "forward"
    for name, ms in ((f"epmoe {what}", statistics.median(still)), (f"epmoe {what}, worst", max(still)),
                     (f"epmoe {what}, moving", statistics.median(took)),
                     (f"epmoe {what}, moving, worst", max(took))):
        of_all = slowest(run.cpu_group, ms)
        over = None if name == f"epmoe {what}" else {"epmoe": normal}
        run.record("move", shape, name, of_all, over=over, switches=switches)
    us = slowest(run.cpu_group, statistics.median(host))
    run.record("move", shape, f"epmoe {what}, advance, host", us / 1e3, rate=f"{us:.0f} us")
    moe.layer.synchronize()
    moe.finalize()
