"""A short, seeded sample of fuzz_routing.py, and tests that it finds a wrong bit."""

import re
import shlex
import sys
import time

import pytest
import torch

import epmoe
import fuzz_routing
import routing_oracle
import routings
from cases import first, same_numbers
from epmoe import reference
from epmoe.testing import run_threads

SAMPLE_S = 4.0


@pytest.mark.cpu_only
def test_fuzz_sample():
    """Random routings for SAMPLE_S seconds, and at least 500."""
    start, done, number = time.monotonic(), 0, 0
    while time.monotonic() - start < SAMPLE_S or done < 500:
        done += fuzz_routing.run_batch(20, number)
        number += 1
    print(f"checked {done} routings in {number} layers")


def test_fuzz_sample_on_these_ranks(ranks):
    """Under torchrun each process is a rank; else each thread is a rank."""
    for number in range(12):
        b, g = routings.make_batch(21, number, ranks.size(), fuzz_routing.ROUTINGS_OF_PROCESSES)
        work = routings.Work(b, g)
        routing_oracle.check_batch(work, ranks(routings.run_rank, work))


def test_fuzz_oracle_equals_the_reference():
    """routing_oracle.py and epmoe.reference share no code. They must give the same plans and sums."""
    for number in range(25):
        b, g = routings.make_batch(22, number)
        if b.max_tokens * b.num_ranks * b.topk > 600:
            continue
        work = routings.Work(b, g)
        for routing in range(4):
            indices = [torch.from_numpy(i) for i in work.indices_of(routing)]
            want = routing_oracle.Wanted(work, routing, routing + 1)
            p = reference.plan(indices, b.num_experts, b.expert_alignment)
            expert_rows = (want.expert_row[:, 1:] - want.expert_row[:, :-1]).reshape(-1)
            same_numbers(expert_rows, p["expert_rows"], "expert_rows")
            same_numbers(want.counts[0], p["counts"], "counts")
            same_numbers(want.send, p["send_tokens"], "send_tokens")
            same_numbers(want.num_rows, [len(r) for r in p["rows"]], "rows")
            same_numbers(want.choice_row, torch.cat([r.reshape(-1) for r in p["token_row"]]), "token_row")
            dtype = routings.DTYPES[b.dtype].torch
            ys = [torch.from_numpy(work.y[r, routing : routing + m].copy()).view(dtype)
                  for r, m in enumerate(want.num_rows)]
            ws = [torch.from_numpy(work.y_weight[r, routing : routing + m].copy())
                  for r, m in enumerate(want.num_rows)] if b.weights else None
            sums = torch.cat(reference.combine(ys, p, indices, b.num_experts, ws, b.mode == "local"))
            got = torch.from_numpy(want.sums(work, routing)).view(dtype)
            assert torch.equal(got, sums), f"batch {number}, routing {routing}: the sums differ"


@pytest.mark.cpu_only
def test_fuzz_oracle_of_many_routings_equals_that_of_each(monkeypatch):
    """The oracle computes many routings at once. It must be as strict as for each of them alone."""
    for number in range(3):
        b, g = routings.make_batch(24, number)
        work = routings.Work(b, g)
        results = run_threads(lambda world: routings.run_rank(world, torch.device("cpu"), work), b.num_ranks)
        for elements in (1, 1 << 12, 1 << 30):  # one routing, some, and all at once
            monkeypatch.setattr(routing_oracle, "CHUNK", elements)
            spans = list(routing_oracle.chunks(work))
            assert [i for span in spans for i in range(*span)] == list(range(b.num_routings))
            routing_oracle.check_batch(work, results)
        assert len(spans) == 1


@pytest.mark.cpu_only
def test_fuzz_batches_have_all_kinds():
    """300 batches have all dtypes, modes and numbers of ranks, and most have many routings."""
    batches = [routings.make_batch(0, number)[0] for number in range(300)]
    kinds = {"dtype": routings.DTYPES, "mode": routings.MODES, "num_ranks": range(1, 9), "num_sm": (1, 2, 3),
             "num_buffers": (1, 2), "expert_alignment": (1, 2, 3, 8, 16)}
    for name, values in kinds.items():
        assert {getattr(b, name) for b in batches} == set(values)
    for name in ("weights", "capacity", "is_large", "one_core"):
        assert {getattr(b, name) for b in batches} == {False, True}
    assert sum(b.num_routings == routings.ROUTINGS for b in batches) > 150
    assert min(b.num_routings for b in batches if not b.is_large) >= 16


# ---- wrong results ----


def has_several_results(b):
    """Whether a batch has weights, several ranks, more than three tokens and no capacity."""
    return b.weights and b.num_ranks > 1 and b.max_tokens > 3 and not b.capacity


def invert_one_bit(results, name, part=None):
    """Invert a bit of the last element of an array of a rank's Results, or of a part of a plan."""
    array = getattr(results, name)
    at = -1
    if part:
        routing, num_tokens = max(zip(results.read, results.parts), key=lambda pair: pair[1])
        at = results.plan_first[routing] + results.parts[num_tokens][part][0]
    array.reshape(-1)[at] ^= 1


WRONG = [("rows", None), ("sums", None), ("plan", routings.PARTS[0]), ("weights", None),
         *(("plan", part) for part in routings.PARTS[1:])]


@pytest.mark.cpu_only
@pytest.mark.parametrize("name, part", first(3, WRONG), ids=[part or name for name, part in WRONG])
def test_fuzz_finds_one_wrong_bit(name, part):
    """The test inverts one bit of one result of rank 1. The check of the batch must name one routing."""
    number = next(n for n in range(100) if has_several_results(routings.make_batch(23, n)[0]))

    def run_with_wrong_bit(work):
        results = run_threads(lambda world: routings.run_rank(world, torch.device("cpu"), work),
                              work.batch.num_ranks)
        invert_one_bit(results[1], name, part)
        return results

    with pytest.raises(AssertionError, match=r"differ, the first at [^$]*\nrouting \d+ of Batch"):
        fuzz_routing.run_batch(23, number, run_with_wrong_bit)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["rows", "weights"])
def test_fuzz_finds_what_is_not_zero_after_the_last_row(name):
    number = next(n for n in range(100) if (b := routings.make_batch(25, n)[0]).capacity and b.weights)

    def run_with_number(work):
        results = run_threads(lambda world: routings.run_rank(world, torch.device("cpu"), work),
                              work.batch.num_ranks)
        array, capacity = getattr(results[-1], name), work.batch.most_rows
        last = array.reshape(work.batch.num_routings, capacity, -1)[:, -1]
        last[int((last == 0).all(1).argmax()), 0] = 1
        return results

    with pytest.raises(AssertionError, match="after row M are not zero\nrouting"):
        fuzz_routing.run_batch(25, number, run_with_number)


# ---- the command ----


def command(monkeypatch, capsys, *options):
    """Call main(). Returns its output, and whether it has failed."""
    ends = []
    monkeypatch.setattr(sys, "argv", ["fuzz_routing.py", *options])
    monkeypatch.setattr(fuzz_routing.os, "_exit", ends.append)
    fuzz_routing.main()
    return capsys.readouterr().out, ends == [1]


@pytest.mark.long
@pytest.mark.cpu_only
def test_fuzz_command_with_threads(monkeypatch, capsys):
    """Ranks that keep their world for several batches, in two processes."""
    out, has_failed = command(monkeypatch, capsys, "--threads", "3", "--processes", "2", "--cases", "1500")
    assert not has_failed and int(re.search(r"(\d+) routings, .*no difference", out)[1]) >= 1500


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", [(), ("--threads", "3")])
def test_fuzz_command_prints_how_to_repeat_a_failure(monkeypatch, capsys, options):
    real = epmoe.EPAll2AllLayer.combine

    def combine(self, *arguments):
        y = real(self, *arguments)
        if y.numel():
            y[-1, -1] += 1
        return y

    again = ("--batch", "2", "--seed", "4", *options)
    assert not command(monkeypatch, capsys, *again)[1]
    monkeypatch.setattr(epmoe.EPAll2AllLayer, "combine", combine)
    out, has_failed = command(monkeypatch, capsys, *again)
    assert has_failed and "sums: " in out and "FAILED after 0 routings" in out
    repeat = shlex.split(out.rpartition("To repeat: ")[2])
    assert repeat[:2] == ["python", "tests/fuzz_routing.py"]
    assert command(monkeypatch, capsys, *repeat[2:])[1]
