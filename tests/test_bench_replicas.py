"""python -m benchmarks replicas on the CPU: what it measures, and its check of the results."""

import os

import pytest
import torch

import epmoe
from bench_cases import on_the_cpu, run_command  # noqa: F401
from cases import process_ranks
from pace import HANG_S

pytestmark = pytest.mark.cpu_only


def run_bench(rank, world_size, file, changes=False):
    os.environ["EPMOE_BACKEND"] = "cpu"  # this process may be forked from a server
    if changes:
        set_expert_map = epmoe.EPMoE.set_expert_map

        def wrong(self, expert_map):
            set_expert_map(self, expert_map)
            with torch.no_grad():
                self.down_proj.mul_(2)

        epmoe.EPMoE.set_expert_map = wrong
    return run_command(["replicas", "--iters", "2", "--shapes", "qwen3-30b", "--skew", "1.5,3",
                        "--json", file])


def test_bench_replicas_measures_skewed_routings(tmp_path):
    rows, *_ = process_ranks(run_bench, 2, str(tmp_path / "rows.json"), timeout_s=HANG_S)[0]
    found = {(row["impl"], row.get("skew")): row for row in rows}
    assert set(found) == {(f"epmoe decode{more}", skew)
                          for more in ("", ", replicas") for skew in (None, 1.5)}
    assert all(row["ms"] > 0 for row in rows)  # two ranks can have no skew of 3
    home, served = found["epmoe decode", 1.5], found["epmoe decode, replicas", 1.5]
    assert home["fullest"] == 1.5 and served["fullest"] < 1.1
    assert set(served["ratios"]) == {"epmoe", "uniform"} and set(home["ratios"]) == {"uniform"}


@pytest.mark.long
def test_bench_replicas_finds_a_wrong_result(tmp_path):
    with pytest.raises(AssertionError, match="the result differs by"):
        process_ranks(run_bench, 2, str(tmp_path / "rows.json"), True, timeout_s=HANG_S)
