"""full_scatter_indices: the caller chooses the rows instead of the plan."""

import dataclasses

import pytest
import torch

import epmoe
from cases import (MISTAKE_LIMIT_S, Case, afterwards, check_afterwards, check_outcomes, check_plan,
                   check_rows, check_sums, indices_of, inputs_of, layout_parts, make_layer, outcome,
                   rows_for_combine)
from epmoe import reference
from epmoe.comm.device import capabilities

CASE = Case(num_local=2, topk=3, max_tokens=11, tokens="unequal", pattern="sentinels", mode="scatter")


def scattered(size, case=CASE, seed=0):
    """The plan's rows in another order: a permutation at each destination rank.

    Returns (for each rank [T, K] int32, the plan of the oracle with these rows).
    """
    indices = [indices_of(case, r, size) for r in range(size)]
    p = reference.plan(indices, case.num_local * size)
    g = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(rows), generator=g) for rows in p["rows"]]
    rows = []
    for w, (idx, at) in enumerate(zip(indices, p["token_row"])):
        rank_of = idx.long() // case.num_local
        new = torch.full_like(at, -1)
        for r in range(size):
            of = (at >= 0) & (rank_of == r)
            new[of] = orders[r][at[of]]
        rows.append(new.to(torch.int32))
    moved = p | {"rows": [rows_at[torch.argsort(order)] for rows_at, order in zip(p["rows"], orders)],
                 "token_row": [r.long() for r in rows]}
    return rows, moved


@pytest.mark.parametrize("mode", ["scatter", "gather", "local"])
@pytest.mark.parametrize("form", ["own", "gathered"])
def test_plan_scatter_indices_move_rows(ranks, form, mode):
    """A rank may pass its own indices, or those of all ranks."""

    def run(world, device):
        case = dataclasses.replace(CASE, mode=mode)
        layer = make_layer(world, device, case)
        rows, _ = scattered(world.size)
        scatter = (rows[world.rank] if form == "own" else torch.cat(rows)).contiguous().to(device)
        idx = indices_of(case, world.rank, world.size)
        x, weight = inputs_of(case, world.rank, world.size)
        got, row_weight, layout = layer.dispatch(x.to(device), idx.to(device), weight.to(device), scatter)
        y, w = rows_for_combine(case, world.rank, len(got), layout.num_rows)
        out = layer.combine(y.to(device), layout, w.to(device))
        layer.finalize()
        return {"idx": idx, "x": x, "weight": weight, "rows": got, "row_weight": row_weight, "y": y, "w": w,
                "out": out, **layout_parts(layout)}

    results = ranks(run)
    _, moved = scattered(len(results))
    check_plan(results, 2 * len(results), moved)
    check_rows(results, moved)
    check_sums(results, moved, 2 * len(results), mode)


def test_plan_scatter_indices_of_the_plan_change_nothing(ranks):
    def run(world, device):
        layer = make_layer(world, device, CASE)
        idx = indices_of(CASE, world.rank, world.size).to(device)
        first = layer.preprocess(idx)
        second = layer.preprocess(idx, first.token_dst_scatter_idx.contiguous())
        same = [torch.equal(getattr(first, name), getattr(second, name))
                for name in ("token_dst_scatter_idx", "token_sort_indices")]
        layer.finalize()
        return all(same)

    assert all(ranks(run))


def test_plan_scatter_indices_of_dropped_choices_are_ignored(ranks):
    def run(world, device):
        layer = make_layer(world, device, CASE)
        idx = indices_of(CASE, world.rank, world.size)
        rows = scattered(world.size)[0][world.rank].clone()
        rows[rows < 0] = 12345
        parts = layout_parts(layer.preprocess(idx.to(device), rows.to(device)))
        layer.finalize()
        return {"idx": idx, **parts}

    results = ranks(run)
    check_plan(results, 2 * len(results), scattered(len(results))[1])


# ---- wrong indices on one rank: the other ranks must not hang in their next operation ----


WRONG = Case(num_local=2, topk=3, max_tokens=8)


def wrong_scatter(world, device, make_wrong):
    """Rank 1 passes wrong indices to dispatch. Returns (the outcome, what afterwards() returned)."""
    case = WRONG
    layer = make_layer(world, device, case)
    idx = indices_of(case, world.rank, world.size).to(device)
    rows = layer.preprocess(idx).token_dst_scatter_idx.clone()
    if world.rank == 1:
        rows = make_wrong(rows)
    world.set_timeout(MISTAKE_LIMIT_S)
    x = torch.ones(len(idx), case.hidden, dtype=case.dtype, device=device)
    got = outcome(lambda: layer.dispatch(x, idx, full_scatter_indices=rows)[0].shape, layer)
    return got, afterwards(world, lambda: layer, case)


def change(at, value):
    """A function that sets one index to a value."""
    def make_wrong(rows):
        rows[at] = value
        return rows

    return make_wrong


@pytest.mark.parametrize("make_wrong", [lambda r: r[:-1].contiguous(), lambda r: torch.cat([r, r, r[:1]]),
                                        lambda r: r[:0]], ids=["short", "long", "none"])
def test_plan_scatter_indices_of_wrong_length(ranks, make_wrong):
    results = ranks(wrong_scatter, make_wrong, world_size=3, at_least=2)
    check_outcomes([r[0] for r in results], "ValueError", "rank 1", "full_scatter_indices")
    check_afterwards([r[0] for r in results], [r[1] for r in results], WRONG)


@pytest.mark.parametrize("make_wrong",
                         [change((0, 0), 10**6), change((0, 0), -7), change((-1, -1), 2**31 - 1)],
                         ids=["far", "negative", "largest"])
def test_plan_scatter_index_outside_rows(ranks, make_wrong):
    """Rank 1 raises ValueError. The other ranks raise ValueError or PeerError that names rank 1."""
    results = ranks(wrong_scatter, make_wrong, world_size=3, at_least=2)
    outcomes = [r[0] for r in results]
    kinds = [o.kind if o.kind in ("ValueError", "PeerError") else "ValueError" for o in outcomes]
    check_outcomes(outcomes, kinds, "rank 1")
    assert outcomes[1].kind == "ValueError" and "full_scatter_indices" in outcomes[1].text
    check_afterwards([r[0] for r in results], [r[1] for r in results], WRONG)


@pytest.mark.parametrize("make_wrong, kind", [
    (lambda r: r.long(), "TypeError"),
    (lambda r: r[:, :2].contiguous(), "ValueError"),
    (lambda r: r.reshape(-1), "ValueError"),
    (lambda r: [1, 2], "TypeError"),
], ids=["int64", "columns", "flat", "list"])
def test_plan_scatter_indices_of_wrong_kind(ranks, make_wrong, kind):
    results = ranks(wrong_scatter, make_wrong, world_size=3, at_least=2)
    kinds = [kind if rank == 1 else "PeerError" for rank in range(len(results))]
    check_outcomes([r[0] for r in results], kinds, elsewhere=["rank 1"], on_rank=1)
    check_afterwards([r[0] for r in results], [r[1] for r in results], WRONG)


def _row_given_twice(world, device):
    """Rank 0 gives row 255 twice and row 0 not at all. The product waits for row 0, which never arrives."""
    own = epmoe.World(world.group, timeout_s=MISTAKE_LIMIT_S)
    op = epmoe.EpAll2AllFusedOp(own, max_tokens=256, hidden=64, topk=1, num_tot_experts=world.size,
                                dtype=torch.bfloat16, device=device)
    x = torch.ones(256, 64, dtype=torch.bfloat16, device=device)
    idx = torch.zeros(256, 1, dtype=torch.int64, device=device)  # all to rank 0
    w = torch.ones(1, 64, 64, dtype=torch.bfloat16, device=device)
    op.mega_dispatch_group_gemm(x, idx, gemm_weight=w)  # loads the kernels
    op.synchronize()
    rows = op.preprocess(idx).token_dst_scatter_idx.clone()
    if world.rank == 0:
        rows[0] = rows[255]
    own.set_timeout(3)

    def run():
        op.mega_dispatch_group_gemm(x, idx, gemm_weight=w, full_scatter_indices=rows)
        op.synchronize()

    result = outcome(run)
    world.exchange(b"")  # until rank 0 has its error, no rank may leave the world `own`
    return result


@pytest.mark.cuda_only
def test_plan_scatter_row_given_twice(ranks):
    if not ranks.is_torchrun or not capabilities(ranks.device).has_hopper:
        pytest.skip("needs ranks that are processes, and the fused kernels of Hopper")
    results = ranks(_row_given_twice)
    check_outcomes(results[:1], "EpTimeout", "127 of 128 rows", "full_scatter_indices", within_s=10)
