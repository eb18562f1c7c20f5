"""Short samples of soak.py, faults.py and fuzz_module.py, and tests that each of them detects faults."""

import dataclasses
import os
import random
import sys
import types
import weakref

import pytest
import torch

import epmoe
import faults
import fuzz_module
import soak
import soak_ops
from cases import first, process_ranks
from epmoe import _C
from epmoe.testing import run_threads
from pace import HANG_S, WAIT_S
from traces import grown, held, holdings, kept, more_of_ours

OPTIONS = {"seed": 7, "num": 600, "steps": 100, "processes": 1, "ranks": 2, "rss_kib": 8192}


def options(**changes):
    return types.SimpleNamespace(**(OPTIONS | changes))


def nothing(done):
    pass


# ---- ops ----


@pytest.mark.cpu_only
@pytest.mark.parametrize("number", range(3))
def test_soak_ops_sample(number):
    batch, num_ops = soak_ops.run_batch(7, number, 60)
    assert num_ops > 60 * 2


def test_soak_ops_on_these_ranks(ranks):
    """The same with the ranks of the fixture, which under torchrun are processes."""
    batches = [soak_ops.make_batch(8, number, ranks.size(3), 60, ranks.device.type == "cuda")
               for number in range(3)]
    results = ranks(lambda world, device: [soak_ops.run_batch_on_rank(world, device, b) for b in batches],
                    world_size=3)
    assert all(r == results[0] and min(r) > 60 * 2 for r in results)


def test_soak_batches_cross_both_epoch_limits():
    """60 batches contain every combine mode and dtype, and epochs that cross 2^31 and 2^32."""
    batches = [soak_ops.make_batch(0, number) for number in range(60)]
    assert {b.mode for b in batches} == set(soak_ops.MODES)
    assert {b.dtype for b in batches} == set(soak_ops.DTYPES)
    assert 15 < sum(b.one_core for b in batches) < 45
    for limit in (2**31, 2**32):
        assert sum(b.epoch < limit < b.epoch + 2 * b.num_steps // b.num_buffers for b in batches) > 5


@pytest.mark.cpu_only
def test_soak_ops_detects_one_wrong_number(monkeypatch):
    real, calls = epmoe.EPAll2AllLayer.combine, []

    def combine(self, *arguments):
        y = real(self, *arguments)
        calls.append(self)
        if len(calls) > 20 and y.numel():
            y[-1, -1] += 1
        return y

    monkeypatch.setattr(epmoe.EPAll2AllLayer, "combine", combine)
    with pytest.raises(AssertionError, match="step .*, rank .*wanted"):
        soak_ops.run_batch(7, 1, 60)


@pytest.mark.cpu_only
@pytest.mark.parametrize("at_once", [1, 7])
def test_soak_ops_sample_with_capacity(monkeypatch, at_once):
    """The same sums, where the ranks check several steps at once as on a GPU."""
    monkeypatch.setattr(soak_ops, "CHECKED_AT_ONCE", {"cpu": at_once})
    b = dataclasses.replace(soak_ops.make_batch(9, 1, 2, 40), capacity=True)
    run_threads(lambda world: soak_ops.run_batch_on_rank(world, torch.device("cpu"), b), 2)


@pytest.mark.long
@pytest.mark.cpu_only
def test_soak_command_prints_table(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["soak.py", "ops", "--num", "400", "--steps", "50", "--processes", "1"])
    assert soak.main() == 0
    out = capsys.readouterr().out
    assert "every sum right" in out and "no fault" in out


# ---- cycles and leaks ----


@pytest.mark.cpu_only
def test_soak_cycles_sample():
    assert dict(soak.cycles(options(num=60), nothing))["cycles"].startswith("60,")


def keep_one_descriptor(rank, world_size):
    """Rank main: cycles that leave a file descriptor open in every tenth cycle."""
    made = []

    def new_world():
        if len(made) % 10 == 0:
            made.append(os.dup(0))
        made.append(None)
        return epmoe.World(timeout_s=WAIT_S)

    before, after = soak.live(30, torch.device("cpu"), new_world, nothing)
    return grown(before, after, maps=8)


@pytest.mark.long
@pytest.mark.cpu_only
def test_soak_cycles_detect_open_descriptor():
    assert all("fds" in text for text in process_ranks(keep_one_descriptor, 2))


@pytest.mark.long
@pytest.mark.cpu_only
def test_soak_leak_check_counts_heaps_and_threads():
    """held(), grown(), holdings() and kept() see a heap and a world, and see that both are freed."""
    before, things = held(), holdings()
    world = epmoe.thread_worlds(1)[0]
    heap = epmoe.SymmetricHeap(world, 1 << 16, "cpu")
    now = held()
    assert now["heaps"] == before["heaps"] + 1 and now["threads"] == before["threads"] + 1
    assert "threads" in grown(before, now)
    assert more_of_ours(things, holdings()) == "1 thread epmoe watchdog more"
    ended = weakref.ref(world)
    assert kept(ended).startswith("the World is kept by ") and "SymmetricHeap" in kept(ended)
    heap.close()
    world.close()
    del heap, world
    assert kept(ended) == "" and more_of_ours(things, holdings()) == ""


# ---- faults ----


@pytest.mark.cpu_only
def test_faults_sample():
    latencies, bad = faults.kills(7, 3, "cpu", seed=random.Random(5).randrange(100))
    assert not bad and all(len(seconds) == 2 for seconds in latencies.values()), bad


@pytest.mark.cpu_only
@pytest.mark.parametrize("how", first(1, ["move", "decode"]))
def test_faults_stopped_and_late_sample(monkeypatch, how):
    monkeypatch.setattr(faults, "STOP_LIMIT_S", 1.0)
    assert faults.stops(3, "cpu", how) == []


# ---- the module's functions ----


def test_module_fuzz_sample():
    failure, out = fuzz_module.fuzz(40, 3, timeout_s=HANG_S)
    assert failure is None, f"{failure}\n{out}"
    assert "40 examples" in out


def test_module_fuzz_calls_every_function():
    functions = {n for n in dir(_C) if callable(getattr(_C, n)) and not n.startswith("_")}
    assert set(fuzz_module.SIGNATURES) == functions
