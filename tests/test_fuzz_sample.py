"""A short, seeded sample of fuzz_routing.py, and a test that it finds a wrong bit."""

import time

import pytest
import torch

import fuzz_routing
import routings
from cases import same_numbers
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
        b, g = routings.make_batch(21, number, ranks.size())
        work = routings.Work(b, g)
        results = ranks(routings.run_rank, work)
        for i in range(b.num_routings):
            routings.check_routing(work, i, [r[i] for r in results])


def test_fuzz_oracle_equals_the_reference():
    """routings.py and epmoe.reference share no code. They must give the same plans and sums."""
    for number in range(25):
        b, g = routings.make_batch(22, number)
        if b.max_tokens * b.num_ranks * b.topk > 600:
            continue
        work = routings.Work(b, g)
        for routing in range(4):
            indices = [torch.from_numpy(i) for i in work.indices[routing]]
            want = routings.Wanted(b, work.indices[routing])
            p = reference.plan(indices, b.num_experts, b.expert_alignment)
            expert_rows = (want.expert_row[:, 1:] - want.expert_row[:, :-1]).reshape(-1)
            same_numbers(expert_rows, p["expert_rows"], "expert_rows")
            same_numbers(want.counts, p["counts"], "counts")
            same_numbers(want.send, p["send_tokens"], "send_tokens")
            same_numbers(want.num_rows, [len(r) for r in p["rows"]], "rows")
            same_numbers(want.choice_row, torch.cat([r.reshape(-1) for r in p["token_row"]]), "token_row")
            dtype = routings.DTYPES[b.dtype][0]
            ys = [torch.from_numpy(work.y[r, routing : routing + m].copy()).view(dtype)
                  for r, m in enumerate(want.num_rows)]
            ws = [torch.from_numpy(work.y_weight[r, routing : routing + m].copy())
                  for r, m in enumerate(want.num_rows)] if b.weights else None
            sums = torch.cat(reference.combine(ys, p, indices, b.num_experts, ws, b.mode == "local"))
            got = torch.from_numpy(want.sums(b, work, routing)).view(dtype)
            assert torch.equal(got, sums), f"batch {number}, routing {routing}: the sums differ"


def has_several_results(b):
    """Whether a batch has weights, several ranks, more than three tokens and no capacity."""
    return b.weights and b.num_ranks > 1 and b.max_tokens > 3 and not b.capacity


@pytest.mark.cpu_only
@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["row", "weight", "plan", "sum"])
def test_fuzz_finds_one_wrong_bit(at):
    """The test inverts one bit of one result of rank 1. The check of the batch must fail."""
    number = next(n for n in range(100) if has_several_results(routings.make_batch(23, n)[0]))

    def run_with_wrong_bit(work):
        results = run_threads(lambda world: routings.run_rank(world, torch.device("cpu"), work),
                              work.batch.num_ranks)
        of_rank = results[1]
        routing = next(i for i in range(work.batch.num_routings) if of_rank[i][0].size and of_rank[i][3].size)
        part = of_rank[routing][at]
        (routings.parts_of(part)["recv_tokens"] if at == 2 else part).reshape(-1)[0] ^= 1
        return results

    assert fuzz_routing.run_batch(23, number) > 0
    with pytest.raises(AssertionError, match="routing .* of Batch"):
        fuzz_routing.run_batch(23, number, run_with_wrong_bit)
