"""python -m benchmarks side on the CPU. As on a GPU, the ranks are threads of this process."""

import contextlib
import io
import types

import pytest

from benchmarks import cli, side

pytestmark = pytest.mark.cpu_only


def rows_of(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        rows = cli.run(cli.parse(["side", "--shapes", "qwen3-30b", *arguments]))
    return rows, out.getvalue()


def test_bench_side_has_all_rows(monkeypatch):
    monkeypatch.setenv("EPMOE_BACKEND", "cpu")
    monkeypatch.setattr(side, "REPLAYS", 2)
    rows, text = rows_of()
    names = ("barrier", "plan", "dispatch", "combine")
    wanted = {(f"epmoe {name}, {n} ranks", t) for name in names for n in side.RANKS for t in side.TOKENS}
    assert {(r["impl"], r["tokens"]) for r in rows} == wanted, rows
    assert all(r["ms"] > 0 for r in rows), rows
    assert "side:" in text


def test_bench_side_finds_a_wrong_sum(monkeypatch):
    """The command checks the result before it measures a time."""
    monkeypatch.setenv("EPMOE_BACKEND", "cpu")
    combine = side.epmoe.EPAll2AllLayer.combine
    monkeypatch.setattr(side.epmoe.EPAll2AllLayer, "combine", lambda layer, *a: combine(layer, *a) + 1)
    with pytest.raises(AssertionError, match="combine of dispatch is not K x the input"):
        rows_of()


def test_bench_side_is_skipped_with_several_ranks():
    class Run:
        size, on_gpu, said = 2, False, []

        def say(self, text):
            self.said.append(text)

    run = Run()
    assert side.jobs(run) == []
    assert "--ranks 1" in run.said[0]


def test_bench_side_takes_the_median_of_calls(monkeypatch):
    """On the CPU: milliseconds of a call, without the meeting of the ranks before it."""
    now, durations = [100.0], iter((0.003, 0.001, 0.009))

    def take(seconds):
        now[0] += seconds

    monkeypatch.setattr(side, "REPLAYS", 3)
    monkeypatch.setattr(side, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    world = types.SimpleNamespace(exchange=lambda text: take(5.0))
    assert side.called(world, None, lambda: take(next(durations))) == pytest.approx(3.0)
