"""python -m benchmarks move on the CPU: what it measures, and its check of the bits."""

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
        advance, calls = epmoe.moe.move.ExpertMove.advance, []

        def wrong_advance(self):
            calls.append(0)
            if len(calls) == 3:
                with torch.no_grad():
                    self._moe.down_proj.mul_(2)
                self._seen = self._versions()  # the move notices what torch counts
            return advance(self)

        epmoe.moe.move.ExpertMove.advance = wrong_advance
    return run_command(["move", "--iters", "2", "--shapes", "qwen3-30b", "--json", file])


def test_bench_move_measures_calls_beside_a_move(tmp_path):
    rows, *_ = process_ranks(run_bench, 2, str(tmp_path / "rows.json"), timeout_s=HANG_S)[0]
    found = {row["impl"]: row for row in rows}
    assert set(found) == {f"epmoe decode{more}" for more in ("", ", worst", ", moving", ", moving, worst",
                                                             ", advance, host")}
    assert all(row["ms"] > 0 for row in found.values())
    assert found["epmoe decode, moving"]["switches"] >= 4
    assert found["epmoe decode, moving, worst"]["ms"] >= found["epmoe decode, moving"]["ms"]


@pytest.mark.long
def test_bench_move_finds_a_result_with_other_bits(tmp_path):
    with pytest.raises(AssertionError, match="other bits while experts move"):
        process_ranks(run_bench, 2, str(tmp_path / "rows.json"), True, timeout_s=HANG_S)
