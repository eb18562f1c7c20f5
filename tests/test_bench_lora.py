"""python -m benchmarks lora on the CPU: what it measures, its checks, its rows."""

import contextlib
import json
import os
import types

import pytest
import torch

from bench_cases import on_the_cpu, run_command  # noqa: F401
from benchmarks import lora
from cases import first, process_ranks
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
STEPS = "epmoe", "epmoe LoRA", "torch LoRA"


def run_bench(rank, world_size, file):
    os.environ["EPMOE_BACKEND"] = "cpu"  # this process may be forked from a server
    return run_command(["lora", "--iters", "1", "--json", file])


@pytest.mark.parametrize("size", first(1, [1, 2]))
def test_bench_lora_prints_and_writes_rows(tmp_path, size):
    file = str(tmp_path / "lora.json")
    run = run_bench(0, 1, file) if size == 1 else process_ranks(run_bench, 2, file, timeout_s=HANG_S)[0]
    rows, out, _ = run
    found = {row["impl"]: row for row in rows}
    wanted = {f"{name} {what}" for name in STEPS for what in ("forward", "backward", "both", "kept bytes")}
    few = {"epmoe decode", "epmoe LoRA decode", "epmoe 8 adapters decode"}
    assert set(found) == wanted | few | {"epmoe inference", "epmoe LoRA inference",
                                         "epmoe 8 adapters inference", "epmoe with AdamW",
                                         "epmoe LoRA with AdamW"}
    assert set(found["epmoe LoRA with AdamW"]["ratios"]) == {"epmoe"}
    for name, row in found.items():
        assert row["bench"] == "lora" and row["tokens"] == (16 if name in few else 64)
        assert row["num_bytes" if name.endswith("bytes") else "ms"] > 0
    assert set(found["epmoe LoRA both"]["ratios"]) == {"epmoe", "torch LoRA"}
    assert found["epmoe LoRA kept bytes"]["bytes_over_full"] < 2
    assert json.loads((tmp_path / "lora.json").read_text())["rows"] == rows
    assert "peft: not measured" in out and max(map(len, out.splitlines())) <= 100


def test_bench_lora_names_a_wrong_gradient():
    want = [torch.ones(4, 4, dtype=torch.bfloat16)] * len(lora.NAMES)
    for i, name in enumerate(lora.NAMES):
        got = [t.clone() for t in want]
        assert lora.differs(got, want) == ""
        got[i][0, 0] = 2
        assert lora.differs(got, want).startswith(name)


def test_bench_lora_compares_peft_before_it_measures_it(monkeypatch):
    """peft is a fake here: tests/test_moe_lora_peft.py compares with the real one."""
    said, x = [], torch.ones(2, 4)
    run = types.SimpleNamespace(size=1, say=said.append)
    steps, want = {}, [x, x, None]
    for factor in (1.0, 3.0):
        monkeypatch.setattr(lora, "peft_layer", lambda *_: ((lambda x, w: x * factor), []))
        monkeypatch.setattr(lora, "poisoned", contextlib.nullcontext)
        lora.add_peft(run, None, steps, (x, None, torch.ones(2, 1)), x, None, want)
        assert (list(steps) == ["peft"], len(said)) == ((True, 0) if factor == 1 else (True, 1))
    assert "y differs from that of torch LoRA" in said[0]


def test_bench_lora_trains_with_adamw():
    w = torch.ones(4, 4, requires_grad=True)
    step = lora.WithAdamW.of(lora.Step(lambda x, weight: x @ w * weight, torch.ones(2, 4), torch.ones(2, 1),
                                       torch.ones(2, 4), [w]))
    step.backward(step.forward())
    assert not torch.equal(w, torch.ones(4, 4)) and step.moments() == 2 * 4 * 4 * 4
