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

from cases import (MODES, Case, any_indices, case_id, check_rows, check_sums, generator, indices_of,
                   inputs_of, layout_parts, make_op, poison_staging, run_routing, same_bits, same_numbers,
                   scatter_within)
from epmoe import reference
from epmoe.testing import PATTERNS


def ordered(tokens, key):
    """tokens [N] sorted by (key, token). key is [N] too."""
    return tokens[torch.argsort(key * (int(tokens.max()) + 1 if len(tokens) else 1) + tokens)]


def slots_of(idx, num_experts, num_ranks, is_sorted):
    """The expected token_slots [T, W], and for each rank the expected list of tokens that go there."""
    idx, local = idx.long().cpu(), num_experts // num_ranks
    slots, sent = torch.full((len(idx), num_ranks), -1), []
    for r in range(num_ranks):
        here = (idx >= r * local) & (idx < (r + 1) * local)
        tokens = here.any(1).nonzero()[:, 0]
        first = torch.where(here, idx, num_experts).amin(1)[tokens]
        last = torch.where(here, idx, -1).amax(1)[tokens]
        home = ordered(tokens, last) if is_sorted else tokens
        slots[home, r] = torch.arange(len(tokens))
        sent.append(ordered(tokens, first) if is_sorted else tokens)
    return slots, sent


def orders_of(layout):
    """token_slots and, as "sent", the lists of sent tokens of a layout."""
    size, count = layout.layer.world_size, layout.send_tokens.tolist()
    lists = layout._part("send_token", size, layout.num_tokens)
    sent = [lists[r, :n].clone() for r, n in enumerate(count)]
    return {"token_slots": layout.token_slots.clone(), "sent": sent}


def check_orders(got, idx, num_experts, num_ranks, is_sorted, where=""):
    """Compare orders_of a layout with the expected orders."""
    slots, sent = slots_of(idx, num_experts, num_ranks, is_sorted)
    same_numbers(got["token_slots"], slots, f"{where}token_slots")
    for r in range(num_ranks):
        same_numbers(got["sent"][r], sent[r], f"{where}tokens sent to rank {r}")


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


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=case_id)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_slots_pattern(ranks, pattern, index_dtype):
    check(ranks, [Case(num_local=3, topk=4, max_tokens=33, pattern=pattern, index_dtype=index_dtype, seed=s)
                  for s in range(3)])


@pytest.mark.parametrize("tokens", ["full", "none", "first_none", "only_last", "unequal"])
def test_slots_numbers_of_tokens(ranks, tokens):
    check(ranks, [Case(num_local=3, topk=3, max_tokens=20, tokens=tokens, seed=s) for s in range(3)])


@pytest.mark.parametrize("topk", [1, 2, 8, 16, 17, 31, 32])
def test_slots_topk(ranks, topk):
    check(ranks, [Case(num_local=5, topk=topk, max_tokens=37, pattern=p, tokens="unequal")
                  for p in ("uniform", "sentinels", "duplicates", "heavy_drop")])


@pytest.mark.parametrize("num_local", [1, 2, 33, 64, 128])
def test_slots_experts(ranks, num_local):
    """From one expert on each rank, where sorting changes nothing, to more experts than a warp has lanes."""
    check(ranks, [Case(num_local=num_local, topk=4, max_tokens=60, pattern=p)
                  for p in ("uniform", "distinct", "edges", "one_expert")])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_slots_world_size(ranks, world_size):
    check(ranks, [Case(num_local=4, topk=4, max_tokens=13, tokens="unequal", pattern=p) for p in PATTERNS],
          world_size=world_size)


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


def moved(world, device, case, is_sorted):
    """The results of a case with or without sorting, on one rank."""
    op = make_op(world, device, case, token_sorting=is_sorted)
    poison_staging(op)
    result = run_routing(op, case)
    op.synchronize()
    op.finalize()
    return result


def check_moved(ranks, case, **options):
    """With and without sorting, rows and sums are those of the oracle. The two results are also equal."""

    def run(world, device):
        return [moved(world, device, case, is_sorted) for is_sorted in (True, False)]

    results = ranks(run, **options)
    num_experts, size = case.num_local * len(results), len(results)
    p = reference.plan([r[0]["idx"] for r in results], num_experts)
    for i, is_sorted in enumerate((True, False)):
        of_all = [r[i] for r in results]
        for got in of_all:
            same_numbers(got["token_slots"], slots_of(got["idx"], num_experts, size, is_sorted)[0],
                         f"token_slots, sorted {is_sorted}")
        check_rows(of_all, p)
        check_sums(of_all, p, num_experts, case.mode)
    for rank, (a, b) in enumerate(results):
        m = a["num_rows"]
        same_bits(a["rows"][:m], b["rows"][:m], f"rank {rank}: rows, sorted and not")
        same_bits(a["out"], b["out"], f"rank {rank}: sums, sorted and not")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=case_id)
@pytest.mark.parametrize("pattern", ["uniform", "distinct", "one_expert", "one_rank", "duplicates",
                                     "sentinels", "all_dropped"])
@pytest.mark.parametrize("mode", MODES)
def test_slots_change_no_row_and_no_sum(ranks, mode, pattern, dtype):
    check_moved(ranks, Case(num_local=4, topk=3, hidden=24, max_tokens=21, mode=mode, pattern=pattern,
                            dtype=dtype, tokens="unequal"))


@pytest.mark.parametrize("topk", [1, 17, 32])
@pytest.mark.parametrize("mode", MODES)
def test_slots_change_no_sum_of_many_choices(ranks, mode, topk):
    check_moved(ranks, Case(num_local=5, topk=topk, max_tokens=18, mode=mode, pattern="sentinels"))


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "bare"])
@pytest.mark.parametrize("tokens", ["none", "first_none", "only_last"])
@pytest.mark.parametrize("mode", MODES)
def test_slots_of_ranks_without_tokens_change_nothing(ranks, mode, tokens, weights):
    check_moved(ranks, Case(num_local=3, topk=3, max_tokens=14, mode=mode, tokens=tokens, weights=weights,
                            capacity="exact" if weights else None))


@pytest.mark.parametrize("num_sm", [1, 5])
@pytest.mark.parametrize("mode", MODES)
def test_slots_and_many_workers_change_nothing(ranks, mode, num_sm):
    """More tokens than one chunk of slots has. Several workers take chunks in any order."""
    most = 900 if ranks.device.type == "cuda" else 90
    check_moved(ranks, Case(num_local=8, topk=6, hidden=40, max_tokens=most, mode=mode, num_sm=num_sm,
                            pattern="distinct", capacity="roomy"))


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
