"""docs/tuning.md: its formula for the heap, against the layout that the module computes."""

import itertools
import re
from pathlib import Path

import pytest

import epmoe
from epmoe import _C
from epmoe.a2a.base import Config

pytestmark = pytest.mark.cpu_only
PAGE = (Path(__file__).resolve().parent.parent / "docs/tuning.md").read_text()
MODES = {"local": _C.COMBINE_LOCAL, "scatter": _C.COMBINE_SCATTER, "low_latency": _C.LOW_LATENCY,
         "low_latency_scatter": _C.LOW_LATENCY_SCATTER}


@pytest.fixture(scope="module")
def heap_bytes():
    names = {}
    exec(re.search(r"^def heap_bytes.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)[0], names)
    return names["heap_bytes"]


@pytest.mark.parametrize("mode", MODES)
def test_tuning_formula_is_the_size_of_the_heap(heap_bytes, mode):
    """It is never too small, and at most 2 % and 64 KiB for each buffer too large."""
    for ranks, topk, hidden, max_tokens, experts in itertools.product(
            (1, 2, 4, 8), (1, 8, 32), (64, 2048, 7168), (1, 100, 512, 8192), (8, 256, 1024)):
        if "low_latency" in mode and (max_tokens > 100 or experts > 256):
            continue  # the routes do not fit into the shared memory of a GPU
        for dtype, itemsize, num_buffers in ((_C.BF16, 2, 1), (_C.F32, 4, 3)):
            config = Config(ranks=ranks, num_experts=experts, topk=topk, max_tokens=max_tokens,
                            hidden=hidden, dtype=dtype, combine_mode=MODES[mode], num_sm=1, reserve_sms=0,
                            capacity=ranks * max_tokens * topk, num_buffers=num_buffers,
                            expert_alignment=1, expert_capacity=0, host_counts=0, spare_buffers=0)
            real = _C.layer_bytes(config)
            said = heap_bytes(ranks, max_tokens, hidden, topk, experts, itemsize, num_buffers, mode)
            assert real <= said <= 1.02 * real + (num_buffers << 16), (config, real, said)


def test_tuning_capacity_does_not_change_the_heap(heap_bytes):
    def total(**more):
        sizes = dict(max_tokens=64, hidden=512, topk=4, num_tot_experts=8)
        with epmoe.EPAll2AllLayer(epmoe.World(), device="cpu", **sizes, **more) as layer:
            return layer.heap.stats()["total"]

    assert abs(total() - total(capacity=7)) <= 256
    assert total() <= heap_bytes(1, 64, 512, 4, 8, mode="scatter") <= 1.02 * total() + (1 << 16)
    assert total(enable_local_combine=True) <= heap_bytes(1, 64, 512, 4, 8)


def test_tuning_table_is_computed_by_the_formula(heap_bytes):
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) MB \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for ranks, max_tokens, megabytes in rows:
        assert round(heap_bytes(int(ranks), int(max_tokens), 7168, 8, 256) / 1e6) == int(megabytes)
