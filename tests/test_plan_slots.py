"""The order in which a rank sends tokens and receives their sums.

With token_sorting, a rank sends its tokens to a peer in the order of the first expert that they choose
there. The peer returns the sums in the order of the last expert. Without token_sorting, both use the order
of the input.

send_token of a layout lists the tokens that go to each rank. token_slots numbers the sums that each rank
returns. Rows and sums are the same in any order, bit by bit.
"""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from cases import (MODES, Case, any_indices, check_orders, check_rows, check_sums, generator, indices_of,
                   inputs_of, layout_parts, make_op, orders_of, poison_staging, run_routing, same_bits,
                   same_numbers, scatter_within, slots_of)
from epmoe import reference


def plan_case(world, device, cases):
    """The plans of cases of one shape: for each case the indices, and the plan with and without sorting."""
    ops = {s: make_op(world, device, cases[0], token_sorting=s) for s in (True, False)}
    results = []
    for case in cases:
        idx = indices_of(case, world.rank, world.size)
        layouts = {s: op.preprocess(idx.to(device)) for s, op in ops.items()}
        results.append({"idx": idx, **{s: orders_of(v) | layout_parts(v) for s, v in layouts.items()}})
    for op in ops.values():
        op.finalize()
    return results


def check(ranks, cases, **options):
    """Check the orders with and without sorting. All other parts of the two plans must be equal."""
    cases = cases if isinstance(cases, list) else [cases]
    results = ranks(plan_case, cases, **options)
    size = len(results)
    for rank, of_rank in enumerate(results):
        for case, got in zip(cases, of_rank):
            for is_sorted in (True, False):
                check_orders(got[is_sorted], got["idx"], case.num_local * size, size, is_sorted,
                             f"{case}, rank {rank}, sorted {is_sorted}: ")
            tiles = got[True]["num_tiles"]
            for name in set(got[True]) - {"token_slots", "sent"}:
                a, b = (torch.as_tensor(got[s][name]) for s in (True, False))
                if name.startswith("tile_"):
                    a, b = a[:tiles], b[:tiles]
                same_numbers(a, b, f"{case}, rank {rank}: {name}")


def test_slots_of_a_routing_by_hand(ranks):
    """Two ranks with three experts each. The expected orders are written by hand, to check the oracle too."""
    idx = torch.tensor([[2, 0], [1, 1], [0, 5], [4, 2], [-1, 3], [2, 2], [6, -1], [0, 0]])

    def run(world, device):
        op = make_op(world, device, Case(num_local=3, topk=2, max_tokens=8))
        got = orders_of(op.preprocess(idx.to(device)))
        op.finalize()
        return got

    out = {0: [0, 2, 7, 1, 3, 5], 1: [4, 3, 2]}  # first experts: 0 0 0 1 2 2 at rank 0, and 3 4 5 at rank 1
    home = {0: [2, 7, 1, 0, 3, 5], 1: [4, 3, 2]}  # last experts at rank 0: 0 0 1 2 2 2
    slots, sent = slots_of(idx, 6, 2, True)
    for r in (0, 1):
        assert sent[r].tolist() == out[r] and slots[home[r], r].tolist() == list(range(len(home[r])))
        assert (slots[:, r] >= 0).sum() == len(home[r])
    results = ranks(run, world_size=2, at_least=2)
    for got in results:
        check_orders(got, idx, 3 * len(results), len(results), True)


@pytest.mark.parametrize("topk", [8, 17])
def test_slots_many_tokens(ranks, topk):
    """So many tokens that the plan kernel has several CTAs. Each sorts its tokens into common positions."""
    most = 9000 if ranks.device.type == "cuda" else 1500
    check(ranks, [Case(num_local=16, topk=topk, max_tokens=most, hidden=8, pattern=p, tokens="unequal")
                  for p in ("distinct", "sentinels", "one_expert")])


def test_slots_of_fewer_tokens_than_before(ranks):
    """A small plan contains nothing of an earlier, larger plan."""

    def shrink(world, device):
        case = Case(num_local=3, topk=4, max_tokens=60)
        op = make_op(world, device, case)
        results = []
        for n in (60, 7, 0, 1, 60, 3):
            smaller = dataclasses.replace(case, max_tokens=n, seed=n)
            idx = indices_of(smaller, world.rank, world.size) if n else torch.zeros(0, 4, dtype=torch.int64)
            results.append((idx, orders_of(op.preprocess(idx.to(device)))))
        op.finalize()
        return results

    results = ranks(shrink)
    for of_rank in results:
        for idx, got in of_rank:
            check_orders(got, idx, 3 * len(results), len(results), True)


def test_slots_are_the_same_in_every_run(ranks):
    """The bits do not depend on the number of workers, or on the order in which they run."""

    def plans(world, device):
        case, seen = Case(num_local=4, topk=6, max_tokens=300, pattern="sentinels"), []
        idx = indices_of(case, world.rank, world.size).to(device)
        for num_sm in (1, 5):
            op = make_op(world, device, case, num_sm=num_sm)
            seen += [orders_of(op.preprocess(idx)) for _ in range(6)]
            op.finalize()
        same = all(torch.equal(s["token_slots"], seen[0]["token_slots"]) for s in seen)
        return same and all(torch.equal(a, b) for s in seen for a, b in zip(s["sent"], seen[0]["sent"]))

    assert all(ranks(plans))


@settings(max_examples=30, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_slots_of_any_indices(ranks, data):
    """Arbitrary indices of a few tokens. hypothesis shrinks a failing example."""
    case, indices = any_indices(data, ranks.size(3))

    def plan(world, device):
        op = make_op(world, device, case)
        got = orders_of(op.preprocess(indices[world.rank].to(device)))
        op.finalize()
        return got

    for idx, got in zip(indices, ranks(plan, world_size=3)):
        check_orders(got, idx, case.num_local * len(indices), len(indices), True)


def test_slots_do_not_depend_on_scatter_indices(ranks):
    """full_scatter_indices choose the rows, not the order in which tokens are sent."""
    case = Case(num_local=3, topk=4, max_tokens=21, pattern="sentinels", tokens="unequal")

    def run(world, device):
        op = make_op(world, device, case)
        num_experts = case.num_local * world.size
        indices = [indices_of(case, r, world.size) for r in range(world.size)]
        idx = indices[world.rank]
        scatter = scatter_within(reference.plan(indices, num_experts), idx, num_experts, world.rank)
        layout = op.preprocess(idx.to(device), scatter.to(device))
        x, _ = inputs_of(case, world.rank, world.size)
        rows = op.dispatch(x.to(device), layout=layout)[0]
        are_used = torch.equal(layout.token_dst_scatter_idx.cpu(), scatter)
        got = orders_of(layout) | {"idx": idx, "are_used": are_used, "x": x, "rows": rows, "scatter": scatter}
        op.finalize()
        return got

    results = ranks(run)
    size = len(results)
    num_experts = case.num_local * size
    for rank, got in enumerate(results):
        check_orders(got, got["idx"], num_experts, size, True)
        assert got["are_used"]
    for source in results:
        kept = (source["idx"] >= 0) & (source["idx"] < num_experts)
        t, k = kept.nonzero(as_tuple=True)
        for r in range(size):
            of = source["idx"][t, k] // case.num_local == r
            same_bits(results[r]["rows"][source["scatter"][t[of], k[of]].long()], source["x"][t[of]],
                      f"rows at rank {r}")


# ---- the order must not change rows, sums and gradients ----


@pytest.mark.parametrize("mode", MODES)
def test_slots_change_no_gradient(ranks, mode):
    """The gradients of the weights return in the same slots as the rows."""
    case = Case(num_local=4, topk=3, hidden=24, max_tokens=25, mode=mode, pattern="sentinels",
                dtype=torch.float32, tokens="unequal")

    def run(world, device):
        seen = []
        g = generator(11, world.rank)
        idx = indices_of(case, world.rank, world.size).to(device)
        x, dy = (torch.randn(len(idx), case.hidden, generator=g).to(device) for _ in range(2))
        weight = torch.rand(len(idx), case.topk, generator=g).to(device)
        for is_sorted in (True, False):
            op = make_op(world, device, case, token_sorting=is_sorted)
            poison_staging(op)
            leaves = [t.clone().requires_grad_() for t in (x, weight)]
            rows, row_weight, layout = op.dispatch(leaves[0], idx, leaves[1])
            op.combine(rows * rows, layout, row_weight).backward(dy)
            op.synchronize()
            seen.append([t.grad for t in leaves])
            op.finalize()
        return seen, (x, idx, weight, dy)

    results = ranks(run)
    num_experts = case.num_local * len(results)
    for rank, ((a, b), (x, idx, weight, dy)) in enumerate(results):
        for name, one, other in zip(("x", "weight"), a, b):
            same_bits(one, other, f"rank {rank}: gradient of {name}, sorted and not")
        kept = (idx >= 0) & (idx < num_experts)
        x, weight, dy = x.double(), weight.double(), dy.double()
        wanted = torch.where(kept, ((x * x) * dy).sum(1, keepdim=True), 0)  # y = sum of weight * x^2
        torch.testing.assert_close(a[1].double(), wanted, rtol=1e-4, atol=1e-4)
        wanted = 2 * x * dy * torch.where(kept, weight, 0).sum(1, keepdim=True)
        torch.testing.assert_close(a[0].double(), wanted, rtol=1e-4, atol=1e-4)


def test_slots_of_an_older_layout(ranks):
    """combine uses the slots of its own layout, also if other layouts were created after it."""
    cases = [Case(num_local=3, topk=3, max_tokens=20, tokens="unequal", mode="local", pattern="distinct",
                  seed=s) for s in range(3)]

    def run(world, device):
        op = make_op(world, device, cases[0])
        layouts = [op.preprocess(indices_of(case, world.rank, world.size).to(device)) for case in cases]
        results = [run_routing(op, cases[i], layout=layouts[i]) for i in (1, 2, 0)]
        op.finalize()
        return results

    results = ranks(run)
    num_experts = cases[0].num_local * len(results)
    for at in range(3):
        of_all = [r[at] for r in results]
        p = reference.plan([r["idx"] for r in of_all], num_experts)
        check_rows(of_all, p)
        check_sums(of_all, p, num_experts, "local")
