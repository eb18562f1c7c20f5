"""python -m benchmarks decode and worklog, one rank: their checks find wrong results, their shapes fit."""

import json
import unittest.mock
from pathlib import Path

import pytest
import torch

import epmoe
from bench_cases import on_the_cpu, run_command  # noqa: F401
from benchmarks import cli, decode, worklog
from benchmarks.decode import arrived

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent


def changed(name, change):
    """Replace a method of LowLatencyAll2All by one whose result is changed."""
    right = getattr(epmoe.LowLatencyAll2All, name)
    return unittest.mock.patch.object(epmoe.LowLatencyAll2All, name,
                                      lambda self, *args, **options: change(right(self, *args, **options)))


def wrong_row(result):
    result[0].view(torch.uint8)[..., 0] ^= 1
    return result


def wrong_scale(result):
    if result[1] is not None:
        result[1].mul_(2)
    return result


@pytest.mark.parametrize("name, change, text", [
    ("dispatch", wrong_row, "dispatch: rows differ"), ("dispatch", wrong_scale, "dispatch: scales differ"),
    ("combine", lambda y: y + 1, "combine: 3 of 3 tokens")])
def test_bench_decode_finds_a_wrong_result(name, change, text):
    with changed(name, change), pytest.raises(AssertionError, match=text):
        run_command(["decode", "--tokens", "3", "--iters", "1"])


def test_bench_decode_finds_a_wrong_half():
    right = epmoe.PendingCall.recv
    with (unittest.mock.patch.object(epmoe.PendingCall, "recv", lambda self: wrong_row(right(self))),
          pytest.raises(AssertionError, match="dispatch: rows differ")):
        run_command(["decode", "--tokens", "3", "--iters", "1"])


def test_bench_decode_finds_a_wrong_layer():
    """The sums of the calls, whose rows are masked, stay right."""
    right = epmoe.LowLatencyAll2All.combine

    def wrong(self, y, handle, **options):
        return right(self, y, handle, **options) + (handle.layout == "compact")

    with (unittest.mock.patch.object(epmoe.LowLatencyAll2All, "combine", wrong),
          pytest.raises(AssertionError, match="3 of 3 tokens differ")):
        run_command(["decode", "--tokens", "3", "--iters", "1"])


def test_bench_decode_raises_an_error_of_its_calls_before_the_layer(monkeypatch):
    """On a GPU a call returns before it fails. synchronize raises its error, which the layer would hide."""
    halves, layer = decode.halves, unittest.mock.Mock()

    def fail_late(run, send):
        monkeypatch.setattr(epmoe.LowLatencyAll2All, "synchronize",
                            unittest.mock.Mock(side_effect=epmoe.EpError("late")))
        return halves(run, send)

    monkeypatch.setattr(decode, "halves", fail_late)
    monkeypatch.setattr(decode, "measure_layer", layer)
    with pytest.raises(epmoe.EpError, match="late"):
        run_command(["decode", "--tokens", "3", "--iters", "1"])
    assert not layer.called


def test_bench_decode_leaves_fp8_out_where_it_does_not_fit():
    rows, out, _ = run_command(["decode", "--tokens", "2", "--iters", "1", "--shapes", "dsv3,gpt-oss-120b"])
    assert "left out: fp8, because H is 448" in out and "skipped: gpt-oss-120b-small" in out
    assert not [r for r in rows if "fp8" in r["impl"]] and [r for r in rows if r["impl"] == "epmoe pair"]


@pytest.mark.parametrize("size, experts", [(1, 72), (2, 144), (3, 216), (4, 288), (8, 288)])
def test_bench_decode_has_72_experts_for_each_of_four_ranks(size, experts):
    run = unittest.mock.Mock(size=size, device=torch.device("cuda"), options=cli.parse(["decode"]))
    shape, = decode.shapes(run)
    assert (shape.hidden, shape.topk, shape.experts) == (7168, 8, experts)
    assert f"{experts // size} experts for each of {size} ranks" in run.say.call_args.args[0]


def test_bench_decode_says_that_ranks_share_a_gpu():
    run = unittest.mock.Mock(size=4, on_gpu=True, device=torch.device("cuda"), options=cli.parse(["decode"]),
                             with_skews=lambda shapes: shapes)
    with unittest.mock.patch("torch.cuda.device_count", lambda: 1):
        found = decode.jobs(run)
    assert [label for label, _ in found][:2] == ["decode, T 1", "decode, T 2"] and len(found) == 8
    assert "through its L2" in run.say.call_args_list[0].args[0]


def test_bench_decode_reads_rows_of_both_layouts():
    counts = torch.tensor([2, 0, 1])
    masked = torch.arange(12).view(3, 4, 1)
    assert arrived(masked, counts).flatten().tolist() == [0, 1, 8]
    assert arrived(torch.arange(12)[:, None], counts).flatten().tolist() == [0, 1, 2]


def test_bench_worklog_finds_a_wrong_sum():
    with changed("combine", lambda y: y + 1), pytest.raises(AssertionError, match="epmoe: .* tokens differ"):
        run_command(["worklog", "--iters", "1"])


def test_bench_worklog_has_the_shapes_of_the_problem():
    shapes = [worklog.shape_of(problem, on_gpu=True) for problem in worklog.PROBLEMS]
    assert [(s.experts, s.topk, s.hidden, s.tokens) for s in shapes] == list(worklog.PROBLEMS)
    for s in (worklog.shape_of(problem, on_gpu=False) for problem in worklog.PROBLEMS):
        assert s.hidden * 2 % 16 == 0 and s.experts % 8 == 0 and s.tokens <= 16


def test_bench_worklog_published_times_are_of_its_problems():
    """Another size makes the times of docs/performance.md those of another problem."""
    rows = json.loads((ROOT / "benchmarks/results/h200x4.json").read_text())["rows"]
    shapes = [worklog.shape_of(problem, on_gpu=True) for problem in worklog.PROBLEMS]
    assert ({(r["shape"], r["tokens"]) for r in rows if r["bench"] == "worklog"}
            == {(s.name, s.tokens) for s in shapes})
