"""python -m benchmarks overlap: its table, plots and traces.

Only GPUs record events, so here the events are given.
"""

import contextlib
import json
import re
import types
import unittest.mock

import pytest
import torch

import epmoe
from bench_cases import on_the_cpu, run_command  # noqa: F401
from benchmarks import overlap
from epmoe import trace

pytestmark = pytest.mark.cpu_only
SEND, GEMM = (next(w for w, n in trace.SPANS.items() if n == name) for name in ("send", "gemm"))
# CTA, warp, begin and duration in ns, span, rank or expert. The events cover 8 us.
EVENTS = torch.tensor([[0, 1, 0, 2000, SEND, 1],
                       [0, 1, 3000, 1000, SEND, 0],
                       [1, 2, 0, 3000, SEND, 1],
                       [0, 4, 0, 8000, GEMM, 5]])


class Recorded(contextlib.nullcontext):
    """Replaces trace.Trace: each of two ranks has recorded EVENTS."""

    def __init__(self, op, room):
        super().__init__(self)

    def events(self):
        return EVENTS

    def gather(self):
        return [EVENTS, EVENTS]


@pytest.mark.parametrize("given", [["trace"], ["json"], ["trace", "json"]])
def test_bench_overlap_prints_shares_and_plots(tmp_path, given):
    """The command writes a plot next to each file that an option names."""
    options = [a for option in given for a in (f"--{option}", str(tmp_path / f"{option}.json"))]
    with (unittest.mock.patch.object(epmoe._C, "TRACE", 1),
          unittest.mock.patch.object(trace, "Trace", Recorded)):
        rows, out, _ = run_command(["overlap", *options])
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 100
    for kernel in overlap.KERNELS:
        found = {r["impl"]: (r["total_us"], r["share"], r["spans"])
                 for r in rows if r["impl"].startswith(kernel)}
        # The events have two communication warps and one MMA warp.
        assert found == {f"{kernel}: send": (6.0, 6 / 16, 3), f"{kernel}: gemm": (8.0, 1.0, 1)}
        name = re.escape(kernel)
        assert re.search(name + r": send +6\.0 us +37\.5% +3 spans of 2\.00 us$", out, re.MULTILINE)
        assert re.search(name + r": gemm +8\.0 us +100\.0% +1 spans of 8\.00 us$", out, re.MULTILINE)
    plots = {f"{option}_overlap.png" for option in given}
    traces = {f"trace_{k.replace(' + ', '_')}.json" for k in overlap.KERNELS if "trace" in given}
    assert {p.name for p in tmp_path.iterdir()} - {"json.json"} == plots | traces
    for name in plots:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    for name in traces:
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        assert len([e for e in events if e["ph"] == "X"]) == 2 * len(EVENTS)


def test_trace_begins_where_the_first_enter_ends():
    """The kernels write two words for an event: when it begins; its length, its span and whom it is for."""
    enter = next(w for w, n in trace.SPANS.items() if n == "enter")
    recorded = object.__new__(trace.Trace)  # on the CPU there is no operator that records
    recorded.room = 2
    recorded._raw = torch.zeros(2, epmoe._C.TRACE_WARPS, 2, 2, dtype=torch.int64)
    recorded._raw[0, 1, 0] = torch.tensor([100, 7 | enter << 32])
    recorded._raw[0, 1, 1] = torch.tensor([150, 20 | SEND << 32 | 3 << 48])
    recorded._raw[1, 0, 0] = torch.tensor([90, 30 | enter << 32])
    assert recorded.events().tolist() == [[0, 1, -7, 7, enter, 0], [0, 1, 43, 20, SEND, 3],
                                          [1, 0, -17, 30, enter, 0]]


def test_trace_records_the_first_buffer_inside_of_the_block(monkeypatch):
    """At the end it waits for the device before it stops the recording."""
    calls, zeros = [], torch.zeros
    monkeypatch.setattr(trace, "capabilities", lambda device: types.SimpleNamespace(num_sms=2))
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(epmoe._C, "layer_trace", lambda layer, buffer, raw, room: calls.append(
        (layer, buffer, 0 if raw is None else len(raw), room)))
    with trace.Trace(types.SimpleNamespace(device=torch.device("cuda"), _c="layer"), room=5):
        calls.append("operations")
    num_words = 2 * epmoe._C.TRACE_WARPS * 5 * 2  # of 2 CTAs; an event has two words
    assert calls == [("layer", 0, num_words, 5), "operations", "synchronize", ("layer", 0, 0, 0)]


def test_trace_counts_busy_warps():
    """Each point is the middle of a part of the time, here of 1 us."""
    times, found = trace.busy(EVENTS, ("send", "gemm"), bins=8)
    assert times.tolist() == pytest.approx([0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5])
    assert found["send"].tolist() == pytest.approx([2, 2, 1, 1, 0, 0, 0, 0])
    assert found["gemm"].tolist() == pytest.approx([1] * 8)
