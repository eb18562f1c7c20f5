"""A short, seeded sample of fuzz_routing.py, and the proof that it would notice."""

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
    start, done, number = time.monotonic(), 0, 0
    while time.monotonic() - start < SAMPLE_S or done < 500:
        done += fuzz_routing.run_batch(20, number)
        number += 1
    print(f"{done} routings in {number} layers")


def test_fuzz_sample_on_these_ranks(ranks):
    """The same over the ranks of torchrun, where every process is one."""
    for number in range(12):
        b, g = routings.make_batch(21, number, ranks.size())
        work = routings.Work(b, g)
        results = ranks(routings.run_rank, work)
        for i in range(b.num_routings):
            routings.check_routing(work, i, [r[i] for r in results])


def test_fuzz_oracle_is_the_reference():
    """Two oracles, written apart: the plan of every routing, and the sums of some."""
    for number in range(25):
        b, g = routings.make_batch(22, number)
        if b.max_tokens * b.num_ranks * b.topk > 600:
            continue
        work = routings.Work(b, g)
        for routing in range(4):
            indices = [torch.from_numpy(i) for i in work.indices[routing]]
            want, p = routings.Wanted(b, work.indices[routing]), reference.plan(indices, b.num_experts)
            same_numbers(want.counts, p["counts"], "counts")
            same_numbers(want.send, p["send_tokens"], "send_tokens")
            same_numbers(want.num_rows, [len(r) for r in p["rows"]], "rows")
            same_numbers(want.choice_row, torch.cat([r.reshape(-1) for r in p["token_row"]]), "token_row")
            dtype = routings.DTYPES[b.dtype][0]
            ys = [torch.from_numpy(work.y[r, routing : routing + m].copy()).view(dtype) for r,
                  m in enumerate(want.num_rows)]
            ws = [torch.from_numpy(work.y_weight[r, routing : routing + m].copy()) for r,
                  m in enumerate(want.num_rows)] if b.weights else None
            sums = torch.cat(reference.combine(ys, p, indices, b.num_experts, ws, b.mode == "local"))
            got = torch.from_numpy(want.sums(b, work, routing)).view(dtype)
            assert torch.equal(got, sums), (number, routing)


@pytest.mark.cpu_only
@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["row", "weight", "plan", "sum"])
def test_fuzz_notices_one_wrong_bit(at):
    """One bit of one result of one rank is turned, and the routing is refused."""
    number = next(n for n in range(100) if (b := routings.make_batch(23, n)[0]).weights and b.num_ranks > 1
                  and b.max_tokens > 3 and not b.capacity)

    def turned(work):
        results = run_threads(lambda world: routings.run_rank(world, torch.device("cpu"), work),
                              work.batch.num_ranks)
        routing = next(i for i in range(work.batch.num_routings) if results[1][i][0].size
                       and results[1][i][3].size)
        part = results[1][routing][at]
        (routings.parts_of(part)["recv_tokens"] if at == 2 else part).reshape(-1)[0] ^= 1
        return results

    assert fuzz_routing.run_batch(23, number) > 0
    with pytest.raises(AssertionError, match="routing .* of Batch"):
        fuzz_routing.run_batch(23, number, turned)
