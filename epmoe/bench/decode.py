"""Measures LowLatencyAll2All by T, the tokens of a rank: its calls, their halves, and a whole decode layer.

in a graph  the time of a call among many in a CUDA graph: device time only, with warm caches
eager       the time of a call in a row of eager calls
host        the time until a call returns, without waiting for the device

The time of a line is that in a graph; on the CPU, and for what reads on the host, it is that of eager calls.
A ratio compares two times of the same kind.  max_tokens is T.  recv is measured after the sends of HALVES
calls, so most rows have arrived.  There are 288 experts: 72 for each of four ranks, also where ranks are
fewer.
"""

import functools
import statistics

import torch
import torch.distributed as dist

from epmoe.bench import deep_ep_low_latency
from epmoe.bench.decode_calls import HALVES, Decode, DecodeLayer
from epmoe.bench.measure import alternated, captured, graphed, host_microseconds, in_turn, slowest
from epmoe.bench.shapes import Shape

TOKENS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "cpu": (1, 16)}
SHAPES = {"cuda": Shape("decode", 1, 7168, 2048, 288, 8), "cpu": Shape("decode-small", 1, 512, 128, 32, 4)}


def jobs(run):
    tokens = TOKENS[run.device.type]
    if run.on_gpu and torch.cuda.device_count() < run.size:
        run.say("several ranks share a GPU: flags and rows go through its L2, not over links; T <= 128")
        tokens = [t for t in tokens if t <= 128]  # the memory of one GPU
    tokens = run.options.tokens or tokens
    return [(f"{shape.name}, T {t}", functools.partial(measure, run, shape.with_tokens(t)))
            for shape in shapes(run) for t in tokens]


def shapes(run):
    """Return the shapes of --shapes, else the one of this bench, with as many experts as fit the ranks."""
    if run.options.shapes:
        found = run.shapes()
        for s in found:
            if s.hidden % 8:
                run.say(f"skipped: {s.name}, because a row of {s.hidden} numbers is no multiple of 16 "
                        f"bytes")
        return [s for s in found if s.hidden % 8 == 0]
    shape = SHAPES[run.device.type]
    local = shape.experts // max(run.size, 4)
    run.say(f"{shape.name}: {local} experts for each of {run.size} ranks")
    return [Shape(shape.name, 1, shape.hidden, shape.inner, local * run.size, shape.topk)]


@torch.no_grad()
def measure(run, shape):
    with Decode(run, shape) as of:
        of.check()
        theirs = {"torch": measure_torch(run, shape, of), "DeepEP": measure_deep_ep(run, shape, of)}
        for name, fn in of.calls().items():
            record(run, shape, f"epmoe {name}", times(run, fn), {p: t.get(name) for p, t in theirs.items()})
        for name, send in of.sends().items():
            for half, t in zip(("send", "recv"), halves(run, send)):
                record(run, shape, f"epmoe {name} {half}", t)
        of.layer.synchronize()
        measure_layer(run, shape, of)


def times(run, fn, waits=False):
    """Return {"graph", "eager", "host": milliseconds} of a collective function.

    On the CPU, and of a function that waits for the device, only eager.
    """
    eager, = alternated([fn], run.device, run.cpu_group, run.iters, 5 if run.on_gpu else 1)
    if not run.on_gpu or waits:
        return {"eager": eager}
    host = host_microseconds(fn, torch.cuda.synchronize, run.cpu_group) / 1e3
    return {"graph": graphed(fn, run.cpu_group), "eager": eager, "host": host}


def halves(run, send):
    """Return the times, as of `times`, of the two halves of a call.

    send: a function of a buffer, returns a PendingCall.  HALVES calls are sent, then all are received.
    """
    under_way = []

    def send_all():
        under_way[:] = [send(buffer) for buffer in range(HALVES)]

    def receive_all():
        for call in under_way:
            call.recv()

    def of_each(ms):
        return [slowest(run.cpu_group, statistics.median(t)) / HALVES for t in ms]

    pair = [send_all, receive_all]
    found = {"eager": of_each(in_turn(pair, run.device, run.iters))}
    if run.on_gpu:
        found["host"] = of_each(in_turn(pair, torch.device("cpu"), run.iters))
        torch.cuda.synchronize()
        found["graph"] = of_each(in_turn([g.replay for g in captured(pair)], run.device, run.iters))
    return [{kind: ms[i] for kind, ms in found.items()} for i in range(2)]


def record(run, shape, impl, ms, over=None):
    """Record the times of a call, and its ratios to those of the peers, {peer: times or None}."""
    kind = "graph" if "graph" in ms else "eager"
    text = f"{ms['eager'] * 1e3:.1f} us eager, {ms['host'] * 1e3:.1f} host" if "host" in ms else ""
    ratios = {}
    for peer, theirs in (over or {}).items():
        same = kind if theirs and kind in theirs else "eager"
        if theirs:
            ratios[peer] = round(ms[same] / theirs[same], 4)
    more = {f"{name}_ms": round(t, 5) for name, t in ms.items()}
    if ratios:
        more |= {"ratios": ratios}
        text += "".join(f"  {r:.2f} {peer}" for peer, r in ratios.items())
    run.record("decode", shape, impl, ms[kind], rate=text, **more)


def measure_torch(run, shape, of):
    """Measure torch's collectives where there are several ranks; return {call: times}.

    They read counts on the host, so they are not captured.  The exchange alone knows its counts, and its rows
    are in order.
    """
    if run.size == 1:
        return {}
    peer = of.torch_peer
    rows = peer.dispatch()
    sent = peer.x[peer.order // peer.topk]
    exchange = functools.partial(dist.all_to_all_single, torch.empty_like(rows), sent, peer.recv, peer.send)
    calls = {"dispatch": peer.dispatch, "combine": lambda: peer.combine(rows),
             "pair": lambda: peer.combine(peer.dispatch()), "all_to_all_single alone": exchange}
    found = {name: times(run, fn, waits=True) for name, fn in calls.items()}
    for name, t in found.items():
        record(run, shape, f"torch {name}", t)
    return found


def measure_deep_ep(run, shape, of):
    """Measure DeepEP's low-latency kernels where they can be used; return {call: times}."""
    if not run.deep_ep:
        return {}
    peer, error = deep_ep_low_latency.load(run, shape, of.inputs)
    if peer is None:
        run.say(f"no low-latency kernels of DeepEP: {error}"[:100])
        return {}
    run.agree(deep_ep_error(peer, of))
    found = {name: times(run, fn) for name, fn in peer.calls(of.y).items()}
    for name, t in found.items():
        record(run, shape, f"DeepEP {name}", t)
    peer.close()
    return found


def deep_ep_error(peer, of):
    """Return what is wrong with the sums of DeepEP's calls, or "".  With fp8 5 % of their norm may be."""
    if of.sums_error(peer.combine(of.experts(peer.dispatch()), peer.handle)):
        return "DeepEP: the sums differ from those of torch's collectives"
    numbers, scales = peer.dispatch(True)
    rows = numbers.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    sums = peer.combine(of.experts(rows.flatten(-2).bfloat16()), peer.handle).float()
    want = of.torch_peer.combine(of.y_rows.float())
    wrong = not (sums - want).norm() <= 0.05 * want.norm()
    return "DeepEP: the sums of fp8 rows differ from those of torch's collectives" if wrong else ""


def measure_layer(run, shape, of):
    """Measure dispatch, two GEMMs and combine over the two GEMMs alone, on the same rows."""
    layer = DecodeLayer(run, shape, of)
    layer.check()
    alone = {name: times(run, fn) for name, fn in layer.gemms().items()}
    for name, t in alone.items():
        record(run, shape, name, t)
    over = {"GEMMs": alone["GEMMs alone"], "torch's": alone["torch GEMMs alone"]}
    record(run, shape, "epmoe layer", times(run, layer), over)
