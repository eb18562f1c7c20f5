"""Measures dispatch and combine over several nodes: the ranks of this machine, cut into nodes.

On the CPU also with a rail that is slowed down on purpose, beside the time that the cost model predicts for
its rate: the measured time of the nodes without the rail, plus the predicted bytes at that rate.
"""

import functools
import statistics
import time

import torch

import epmoe
from epmoe.moe.cost_model import Rates, predict

from .measure import slowest

SLOWED = 3  # the slowed rail takes so many times as long as the work of the nodes


class PacedRail:
    """A rail that counts bytes and seconds, and takes as long as one with a given rate does.

    An exchange takes the time of the bytes that leave this node, or of those that arrive if these are more.
    """

    def __init__(self, rail, rate=None):
        self._rail = rail
        self.rate = rate  # bytes per second; None: as fast as it is
        self.forget()

    def forget(self):
        self.bytes_sent, self.seconds = 0, 0.0

    def __getattr__(self, name):
        return getattr(self._rail, name)

    def exchange(self, out, mine, out_splits=None, splits=None):
        begin = time.perf_counter()
        self._rail.exchange(out, mine, out_splits, splits)
        sent, received = (self._away(t, s) for t, s in ((mine, splits), (out, out_splits)))
        if self.rate:
            time.sleep(max(0.0, max(sent, received) / self.rate - (time.perf_counter() - begin)))
        self.bytes_sent += sent
        self.seconds += time.perf_counter() - begin

    def _away(self, t, splits):
        """Return the bytes of the rows of the other nodes."""
        rows = len(t) * (self.size - 1) / self.size
        if splits is not None:
            rows = sum(splits) - splits[self.position]
        return int(rows * t[:1].numel() * t.element_size()) if len(t) else 0


def jobs(run):
    """Return the jobs, with nodes of --local-ranks, or of half of the ranks."""
    local = run.options.local_ranks or run.size // 2
    if not 0 < local < run.size or run.size % local:
        run.say(f"skipped: nodes, because {run.size} ranks are not several nodes of {max(local, 1)}")
        return []
    return [(f"{shape.name}, {run.size // local} x {local}", functools.partial(measure, run, shape, local))
            for shape in run.shapes("dsv3") if shape.experts % run.size == 0]


def layer_of(run, world, shape):
    return epmoe.EPAll2AllLayer(world, shape.tokens, shape.hidden, shape.topk, num_tot_experts=shape.experts,
                                dtype=torch.bfloat16, device=run.device, enable_local_combine=True,
                                num_sm=run.num_sm)


@torch.no_grad()
def measure(run, shape, local):
    x, idx, weight = run.inputs(shape)
    x = x.to(torch.bfloat16)
    with layer_of(run, run.world, shape) as layer:
        one = run.time(layer, step_of(layer, x, idx, weight))
    with epmoe.Nodes(None, local) as nodes, layer_of(run, nodes, shape) as layer:
        step = step_of(layer, x, idx, weight)
        # The weights of a token add up to 1 and the experts do nothing, so combine returns the tokens.
        error = (step().float() - x.float()).abs().max().item()
        run.agree("combine does not return the tokens" if error > 0.1 * x.abs().max().item() else None)
        if run.on_gpu:
            run.record("nodes", shape, "epmoe over nodes", run.time(layer, step), over={"one node": one})
            return
        nodes.rail = rail = PacedRail(nodes.rail)
        free_s, team_s, bytes_sent = paced(run, layer, step, rail)
        guess = predict(shape, nodes.num_nodes, local, Rates())
        rail.rate = (guess.out_bytes + guess.home_bytes) / (SLOWED * team_s)
        slow_s, _, _ = paced(run, layer, step, rail)
    rates = Rates(rail=rail.rate, rail_latency=0.0, launch=0.0)
    told = predict(shape, nodes.num_nodes, local, rates, team_s=team_s)
    told_bytes = told.out_bytes + told.home_bytes
    run.record("nodes", shape, "epmoe over nodes", free_s * 1e3, over={"one node": one},
               bytes_sent=bytes_sent, bytes_predicted=round(told_bytes))
    run.record("nodes", shape, "rail slowed down", slow_s * 1e3, over={"predicted": told.serial_s * 1e3},
               rate=f"{rail.rate / 1e6:.2f} MB/s", predicted_ms=told.serial_s * 1e3)
    run.say(f"  bytes of a rank on the rail: {bytes_sent}, {bytes_sent / told_bytes:.2f} of the predicted "
            f"{told_bytes:.0f}")


def step_of(layer, x, idx, weight):
    def step():
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        return layer.combine(rows, layout, row_weight)

    return step


def paced(run, layer, step, rail):
    """Return the median seconds of a step and of its part that is not on the rail, of the slowest rank.

    Also the mean bytes that a rank sends in a step.
    """
    wholes, parts = [], []
    for _ in range(run.iters):
        layer.ep_barrier_all()
        rail.forget()
        begin = time.perf_counter()
        step()
        wholes.append(time.perf_counter() - begin)
        parts.append(wholes[-1] - rail.seconds)
    sent = torch.tensor([float(rail.bytes_sent)])
    torch.distributed.all_reduce(sent, group=run.cpu_group)
    medians = (slowest(run.cpu_group, statistics.median(seconds)) for seconds in (wholes, parts))
    return *medians, round(sent.item() / run.size)
