"""Measures LowLatencyAll2All by T, the tokens of a rank: its calls, their halves, and a whole decode layer.

in a graph  the time of a call among many in a CUDA graph: device time only, with warm caches
eager       the time of a call in a row of eager calls
host        the time until a call returns, without waiting for the device

The time of a line is that in a graph; on the CPU, and for what reads on the host, it is that of eager calls.
A ratio compares two times of the same kind.  max_tokens is T.  recv is measured after the sends of HALVES
calls, so most rows have arrived.  There are 288 experts: 72 for each of four ranks, also where ranks are
fewer.
"""

import dataclasses
import functools
import statistics

import torch
import torch.distributed as dist

import epmoe
from epmoe import reference

from . import deep_ep_low_latency
from .check import experts, poisoned, sums_error
from .layer import torch_linear
from .measure import alternated, captured, graphed, host_microseconds, in_turn, slowest
from .shapes import Shape
from .torch_nccl import TorchAllToAll

TOKENS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "cpu": (1, 16)}
SHAPES = {"cuda": Shape(1, 7168, 2048, 288, 8, "decode"), "cpu": Shape(1, 512, 128, 32, 4, "decode-small")}
HALVES = 8  # calls that are under way at once where halves are measured, each on its own buffer
GROUP = 128  # numbers that share a scale


def jobs(run):
    tokens = TOKENS[run.device.type]
    if run.on_gpu and torch.cuda.device_count() < run.size:
        run.say("several ranks share a GPU: flags and rows go through its L2, not over links; T <= 128")
        tokens = [t for t in tokens if t <= 128]  # the memory of one GPU
    tokens = run.options.tokens or tokens
    found = run.with_skews([shape.with_tokens(t) for shape in shapes(run) for t in tokens])
    return [(f"{shape.label}, T {shape.tokens}", functools.partial(measure, run, shape)) for shape in found]


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
    return [dataclasses.replace(shape, experts=local * run.size)]


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
    run.record("decode", shape, impl, ms[kind], rate=text, ratios=ratios, **more)


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
        run.leave_out("DeepEP", shape, error, ", low-latency kernels")
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


# ---- what is measured: the calls of a LowLatencyAll2All and a layer over it, with the checks of both ----


def arrived(rows, counts):
    """Return the rows [M, ..] that arrived, in the order of experts, from either layout.

    counts: [L], the rows of each expert.
    """
    if rows.dim() == 2:
        return rows[:int(counts.sum())]
    return rows[torch.arange(rows.shape[1], device=rows.device) < counts[:, None]]


class Decode:
    """A LowLatencyAll2All, its inputs, and the peer that says what is right."""

    def __init__(self, run, shape):
        self.run, self.shape = run, shape
        x, idx, weight = run.inputs(shape)
        self.inputs = x.bfloat16(), idx, weight
        self.layer = epmoe.LowLatencyAll2All(
            run.world, shape.tokens, shape.hidden, shape.topk, shape.experts, dtype=torch.bfloat16,
            device=run.device, num_buffers=HALVES, num_sm=run.num_sm)
        self.torch_peer = run.torch_peer(shape, self.inputs)
        self.torch_peer.dispatch()  # now it can combine
        self.kinds = {"": False} if shape.hidden % GROUP else {"": False, " fp8": True}
        if shape.hidden % GROUP:
            run.say(f"left out: fp8, because H is {shape.hidden} and not a multiple of {GROUP}")

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.layer.synchronize()
            self.layer.finalize()

    def experts(self, rows):
        """Return the output of the stand-in experts for rows of the masked layout."""
        num = len(rows)
        each = experts(rows.flatten(1), torch.arange(num + 1, device=rows.device), self.layer.rank * num)
        return each.view_as(rows)

    def sums_error(self, y):
        return sums_error(y, self.y_rows, self.torch_peer)

    def check(self):
        """Check every way to call: rows and scales bit by bit, sums within their bound.

        Afterwards y has the experts' rows in the masked layout, and handle is of its dispatch.
        """
        for layout in ("masked", "compact"):
            for fp8 in self.kinds.values():
                with poisoned():
                    whole = self.layer.dispatch(*self.inputs, fp8=fp8, layout=layout)
                    sent = self.layer.dispatch_send(*self.inputs, fp8=fp8, layout=layout, buffer=1).recv()
                for rows, scales, counts, _ in (whole, sent):
                    self.run.agree(self.rows_error(rows, scales, counts, fp8))
        with poisoned():
            rows, _, counts, self.handle = self.layer.dispatch(*self.inputs)
            self.y = self.experts(rows)
            self.y_rows = arrived(self.y, counts)
            sums = self.layer.combine(self.y, self.handle)
            again = self.layer.combine_send(self.y, self.handle).recv()
            of_fp8 = self.layer.combine(self.y, self.handle, fp8=True) if len(self.kinds) > 1 else sums
        self.layer.synchronize()
        self.run.agree(self.sums_error(sums) or self.sums_error(again))
        wrong = not (of_fp8.float() - sums.float()).norm() <= 0.05 * sums.float().norm()
        self.run.agree("combine: the sums in FP8 differ from those in bfloat16" if wrong else "")

    def rows_error(self, rows, scales, counts, fp8):
        """Return what is wrong with dispatched rows and scales, or ""."""
        self.layer.synchronize()
        x, idx, weight = self.inputs
        wanted, got = [x], [rows]
        if fp8:
            q, lines = reference.quantize_fp8(x)
            wanted = [q.view(torch.uint8), lines]
            got = [rows.view(torch.uint8), scales]
        for what, sent, have in zip(("rows", "scales"), wanted, got):
            want = TorchAllToAll(sent, idx, weight, self.shape.experts, self.run.size).dispatch()
            if not torch.equal(arrived(have, counts), want):
                return f"dispatch: {what} differ from those of torch's collectives"
        return ""

    def calls(self):
        """Return {name: function to time} of the calls in one piece."""
        found = {f"dispatch{name}": functools.partial(self.layer.dispatch, *self.inputs, fp8=fp8)
                 for name, fp8 in self.kinds.items()}
        found["combine"] = lambda: self.layer.combine(self.y, self.handle)
        if len(self.kinds) > 1:
            found["combine fp8"] = lambda: self.layer.combine(self.y, self.handle, fp8=True)

        def pair(fp8):
            *_, handle = self.layer.dispatch(*self.inputs, fp8=fp8)
            return self.layer.combine(self.y, handle)

        return found | {f"pair{name}": functools.partial(pair, fp8) for name, fp8 in self.kinds.items()}

    def sends(self):
        """Return {name: function of a buffer that sends a call and returns it}."""
        handles = [self.layer.dispatch(*self.inputs, buffer=b)[3] for b in range(HALVES)]
        found = {f"dispatch{name}": functools.partial(self._dispatch_send, fp8)
                 for name, fp8 in self.kinds.items()}
        return found | {"combine": lambda buffer: self.layer.combine_send(self.y, handles[buffer])}

    def _dispatch_send(self, fp8, buffer):
        return self.layer.dispatch_send(*self.inputs, fp8=fp8, buffer=buffer)


class DecodeLayer:
    """The experts of a layer between a dispatch and a combine: two grouped GEMMs on compact rows."""

    def __init__(self, run, shape, of):
        self.run, self.of, num = run, of, of.layer.num_local_experts
        g = torch.Generator(run.device).manual_seed(3000 + run.rank)

        def random(*size):
            values = torch.empty(size, dtype=torch.bfloat16, device=run.device)
            return values.normal_(0, size[-1]**-0.5, generator=g)

        self.gate_up = random(num, 2 * shape.inner, shape.hidden)
        self.down = random(num, shape.hidden, shape.inner)
        self.offsets = torch.zeros(num + 1, dtype=torch.int32, device=run.device)

    def __call__(self):
        rows, _, counts, handle = self.of.layer.dispatch(*self.of.inputs, layout="compact")
        torch.cumsum(counts, 0, dtype=torch.int32, out=self.offsets[1:])
        return self.of.layer.combine(self.experts(rows, self.offsets), handle)

    def experts(self, rows, offsets):
        # dispatch makes room for the most rows that can come
        at = {"offsets": offsets, "expected_rows": self.of.layer.expected_rows}
        h = epmoe.grouped_gemm(rows, self.gate_up, activation="swiglu", **at)
        return epmoe.grouped_gemm(h, self.down, **at)

    def check(self):
        y, peer = self(), self.of.torch_peer
        rows = peer.dispatch()
        # a GEMM may round a row differently when it runs again
        self.run.agree(sums_error(y, self.experts(rows, peer.expert_offsets), peer, slack=2.0))

    def gemms(self):
        """Return {name: function to time} of the two GEMMs on the rows that arrive, epmoe's and torch's."""
        rows = self.of.torch_peer.dispatch()
        offsets = self.of.torch_peer.expert_offsets
        inner = epmoe.grouped_gemm(rows, self.gate_up, offsets=offsets, activation="swiglu")
        return {"GEMMs alone": lambda: self.experts(rows, offsets),
                "torch GEMMs alone": lambda: (torch_linear(rows, self.gate_up, offsets),
                                              torch_linear(inner, self.down, offsets))}
