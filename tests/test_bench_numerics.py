"""python -m benchmarks numerics on the CPU: what it measures, and its checks."""

import os

import pytest
import torch

from bench_cases import on_the_cpu, run_command  # noqa: F401
from benchmarks import numerics
from cases import process_ranks
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
WHAT = "forward", "backward", "both", "inference", "decode"


def run_bench(rank, world_size, file, changes=False):
    os.environ["EPMOE_BACKEND"] = "cpu"  # this process may be forked from a server
    if changes:
        pair = numerics.pair

        def other_pair(*arguments, **options):
            found = pair(*arguments, **options)
            found["epmoe invariant"].down_proj = torch.nn.Parameter(found["epmoe"].down_proj.detach() * 2)
            return found

        numerics.pair = other_pair
    return run_command(["numerics", "--iters", "1", "--shapes", "qwen3-30b", "--json", file])


@pytest.mark.long
def test_bench_numerics_compares_both_modules(tmp_path):
    rows, *_ = process_ranks(run_bench, 2, str(tmp_path / "rows.json"), timeout_s=HANG_S)[0]
    found = {row["impl"]: row for row in rows}
    assert set(found) == {f"{name} {what}" for name in numerics.NAMES for what in WHAT}
    for name, row in found.items():
        assert row["ms"] > 0 and ("ratios" in row) == ("invariant" in name)


@pytest.mark.long
def test_bench_numerics_measures_nothing_that_is_wrong(tmp_path):
    with pytest.raises(AssertionError, match="y with rank_invariant differs"):
        process_ranks(run_bench, 2, str(tmp_path / "rows.json"), True, timeout_s=HANG_S)
