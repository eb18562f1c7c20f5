"""What commands of python -m benchmarks measure, and how: their jobs, their rows on a GPU, calls in turn."""

import importlib.util
import sys
import types
import unittest.mock

import pytest
import torch

from benchmarks import cli, gemm, host, measure, transformers
from benchmarks.shapes import SHAPES

pytestmark = pytest.mark.cpu_only


def run_of(command, on_gpu, shapes=()):
    """A stand-in for the Run of a command whose options choose `shapes`. It records no rows."""
    options = cli.parse([command, *(["--shapes", ",".join(shapes)] if shapes else [])])
    return unittest.mock.Mock(on_gpu=on_gpu, device=torch.device("cuda" if on_gpu else "cpu"), iters=1,
                              options=options, shapes=lambda *default: [SHAPES[n] for n in shapes or default])


@pytest.mark.parametrize("on_gpu, end", [(True, ""), (False, "-small")])
def test_bench_gemm_adds_a_dense_gemm_and_decoding(on_gpu, end):
    """They are added without --shapes only. A CPU gets small ones."""
    jobs = gemm.jobs(run_of("gemm", on_gpu))
    assert [label for label, _ in jobs] == [f"dense{end}", f"dsv3-decode{end}"]
    assert [call.args[1].name for _, call in jobs] == [f"dense{end}", f"dsv3-decode{end}"]
    assert [label for label, _ in gemm.jobs(run_of("gemm", on_gpu, ["mixtral"]))] == ["mixtral"]


def test_bench_transformers_measures_prefill_decoding_and_training(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    jobs = transformers.jobs(run_of("transformers", False, ["mixtral"]))
    most = SHAPES["mixtral"].tokens
    assert [(call.args[1].tokens, call.args[2]) for _, call in jobs] == [
        (most, False), (transformers.DECODE_TOKENS, False), (most, True)]


@pytest.mark.parametrize("on_gpu, number_bytes", [(True, 2), (False, 4)])
def test_bench_transformers_leaves_out_what_copies_too_much(monkeypatch, on_gpu, number_bytes):
    """batched_mm copies gate, up and down of each choice of a token."""
    functions = types.SimpleNamespace(ALL_EXPERTS_FUNCTIONS={"batched_mm": None, "epmoe": None})
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", functions)
    run, shape = run_of("transformers", on_gpu), SHAPES["mixtral"].with_tokens(16)
    copied = 16 * shape.topk * 3 * shape.hidden * shape.inner * number_bytes
    for most, names in ((copied, ["eager", "batched_mm", "epmoe"]), (copied - 1, ["eager", "epmoe"])):
        monkeypatch.setattr(transformers, "COPIED_BYTES", most)
        assert transformers.implementations(run, shape, False, lambda name: None) == names


def test_bench_host_has_three_rows_of_a_call_on_a_gpu(monkeypatch):
    """The row of many calls says how much longer a call takes than the kernel alone."""
    monkeypatch.setattr(host, "host_microseconds", lambda fn, sync, cpu_group: 5.0)
    monkeypatch.setattr(host, "alternated", lambda fns, *rest: [0.025 for _ in fns])
    monkeypatch.setattr(host, "graphed", lambda fn, cpu_group: 0.015)
    run = run_of("host", True)
    host.record(run, SHAPES["mixtral"], {"combine": lambda: None})
    rows = {call.args[2]: (call.args[3], call.kwargs.get("rate")) for call in run.record.call_args_list}
    assert rows == {"epmoe combine, host": (0.005, "5.0 us"),
                    "epmoe combine, among many": (0.025, "10.0 us beyond"),
                    "epmoe combine, in a graph": (0.015, None)}


def test_bench_times_calls_in_turn(monkeypatch):
    """Each round calls all functions, and each has its own time. Two rounds to warm up do not count."""
    now, called, seconds = [100.0], [], {"a": iter(range(1, 9)), "b": iter(range(20, 29))}

    def call(name):
        called.append(name)
        now[0] += next(seconds[name])

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    found = measure.in_turn([lambda: call("a"), lambda: call("b")], torch.device("cpu"), rounds=3)
    assert called == ["a", "b"] * 5 and found == [[3000, 4000, 5000], [22000, 23000, 24000]]
