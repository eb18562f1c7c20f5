"""combine compared bit by bit with the reference.

This is possible because sums have a fixed order: see EPAll2AllLayer.combine.
"""

import dataclasses

import pytest
import torch

from cases import (DTYPES, MODES, Case, case_id, check_case, check_sums, generator, indices_of, inputs_of,
                   make_layer, poison_staging, random_numbers, rows_for_combine, run_case, same_bits)
from epmoe import reference


@pytest.mark.parametrize("mode", MODES)
def test_combine_many_tokens(ranks, mode):
    case = Case(num_local=8, topk=8, hidden=136, max_tokens=400, mode=mode, pattern="distinct",
                tokens="unequal")
    check_case(ranks(run_case, case), case)


def combine_once(layer, case, y_of, w_of=None):
    """Dispatch, then combine the rows y_of(M, H) with the weights w_of(M). Return (indices, sums, layout)."""
    idx = indices_of(case, layer.rank, layer.world_size).to(layer.device)
    x, _ = inputs_of(case, layer.rank, layer.world_size)
    rows, _, layout = layer.dispatch(x.to(layer.device), idx)
    y = y_of(*rows.shape).to(case.dtype).to(layer.device)
    w = None if w_of is None else w_of(len(rows)).to(layer.device)
    return idx, layer.combine(y, layout, w), layout


@pytest.mark.parametrize("mode", MODES)
def test_combine_dropped_tokens_are_positive_zero(ranks, mode):
    """A token without a choice gets zeros, not the old content of the buffer."""
    case = Case(topk=3, max_tokens=16, mode=mode, pattern="all_dropped")

    def run(world, device):
        layer = make_layer(world, device, case)
        poison_staging(layer)
        _, out, _ = combine_once(layer, case, torch.ones)
        layer.finalize()
        return out

    for out in ranks(run):
        same_bits(out, torch.zeros(16, case.hidden, dtype=case.dtype), "sums of dropped tokens")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_combine_of_ones_counts_the_choices(ranks, mode, dtype):
    """y[t] is the number of choices that were not dropped. Small integers are exact in every dtype."""
    case = Case(num_local=3, topk=7, max_tokens=40, mode=mode, dtype=dtype, pattern="sentinels")

    def run(world, device):
        layer = make_layer(world, device, case)
        idx, out, _ = combine_once(layer, case, torch.ones)
        layer.finalize()
        kept = ((idx >= 0) & (idx < layer.num_experts)).sum(1)
        return torch.equal(out.float(), kept[:, None].expand(out.shape).float())

    assert all(ranks(run))


@pytest.mark.parametrize("mode", MODES)
def test_combine_overflow_gives_infinity(ranks, mode):
    """combine adds in float32 and rounds at the end. A sum that is too large for float16 becomes infinity."""
    case = Case(topk=4, max_tokens=10, mode=mode, dtype=torch.float16, pattern="own_rank", weights=False)

    def run(world, device):
        layer = make_layer(world, device, case)
        _, out, _ = combine_once(layer, case, lambda m, h: torch.full((m, h), 20000.0))
        _, opposite, _ = combine_once(layer, case, lambda m, h: torch.full((m, h), -20000.0))
        layer.finalize()
        return out, opposite

    for out, opposite in ranks(run):
        assert (out == torch.inf).all() and (opposite == -torch.inf).all()


@pytest.mark.parametrize("mode", MODES)
def test_combine_nan_of_any_payload_stays_nan(ranks, mode):
    """Rounding adds to the bits of a number. From a NaN whose bits are all 1 it would make a zero."""
    case = Case(hidden=64, mode=mode, weights=False)

    def run(world, device):
        layer = make_layer(world, device, case)
        idx = indices_of(case, world.rank, world.size).to(device)
        x = torch.ones(len(idx), case.hidden, dtype=case.dtype, device=device)
        rows, _, layout = layer.dispatch(x, idx)
        nans = torch.tensor([0x7fffffff, -1, 0x7f800001], dtype=torch.int32).view(torch.float32).to(device)
        outs = [layer.combine(rows, layout, nan.expand(len(rows)).contiguous()) for nan in nans]
        layer.finalize()
        return [bool(out[(idx >= 0).any(1)].isnan().all()) for out in outs]

    assert ranks(run) == [[True] * 3] * ranks.size()


@pytest.mark.parametrize("mode", MODES)
def test_combine_nan_stays_with_its_token(ranks, mode):
    case = Case(num_local=2, topk=2, max_tokens=12, mode=mode)

    def run(world, device):
        layer = make_layer(world, device, case)
        idx = indices_of(case, world.rank, world.size)
        x = torch.ones(len(idx), case.hidden, dtype=case.dtype)
        x[world.rank :: 5] = torch.nan
        rows, _, layout = layer.dispatch(x.to(device), idx.to(device))
        out = layer.combine(rows, layout).float().cpu()
        layer.finalize()
        is_nan = x.isnan()
        twos = torch.full_like(out, 2)
        return torch.equal(out.isnan(), is_nan) and torch.equal(out[~is_nan], twos[~is_nan])

    assert all(ranks(run))


def test_combine_scatter_and_gather_agree(ranks):
    """scatter and gather give the same bits. Pre-reduction rounds its partial sums, so it may differ."""
    case = Case(num_local=3, topk=6, hidden=48, max_tokens=25, dtype=torch.bfloat16)

    def run(world, device):
        def y_of(m, h):
            return random_numbers((m, h), case.dtype, generator(1, world.rank)).float()

        outs = []
        for mode in MODES:
            c = dataclasses.replace(case, mode=mode)
            layer = make_layer(world, device, c)
            outs.append(combine_once(layer, c, y_of)[1].clone())
            layer.finalize()
        return outs

    for scatter, gather, local in ranks(run):
        same_bits(gather, scatter, "gather")
        scale = scatter.float().abs().mean()
        assert (local.float() - scatter.float()).abs().max() < 0.5 * scale


@pytest.mark.parametrize("mode", MODES)
def test_combine_of_an_older_layout(ranks, mode):
    """combine uses the layout of its dispatch, even if later dispatches made other layouts."""
    cases = [Case(num_local=2, topk=3, max_tokens=20, tokens="unequal", mode=mode, seed=s) for s in range(3)]

    def run(world, device):
        layer = make_layer(world, device, cases[0])
        sent = []
        for case in cases:
            x, weight = inputs_of(case, world.rank, world.size)
            sent.append(layer.dispatch(x.to(device), indices_of(case, world.rank, world.size).to(device),
                                       weight.to(device)))
        results = [None] * 3
        for i in (1, 2, 0, 1):  # layout 1 twice
            rows, _, layout = sent[i]
            y, w = rows_for_combine(cases[i], world.rank, len(rows), layout.num_rows)
            out = layer.combine(y.to(device), layout, w.to(device))
            results[i] = {"idx": indices_of(cases[i], world.rank, world.size), "y": y, "w": w, "out": out}
        layer.finalize()
        return results

    results = ranks(run)
    for i in range(3):
        of_all = [r[i] for r in results]
        plan = reference.plan([r["idx"] for r in of_all], 2 * len(results))
        check_sums(of_all, plan, 2 * len(results), mode)


def test_combine_of_unchanged_rows_gives_the_weighted_token(ranks):
    """If the experts return their rows unchanged, y[t] = x[t] * the sum of the weights of t.

    The products are exact because the weights are powers of two.
    """
    case = Case(num_local=2, topk=2, hidden=16, max_tokens=20, dtype=torch.float32)

    def run(world, device):
        layer = make_layer(world, device, case)
        idx = indices_of(case, world.rank, world.size)
        x = torch.randn(len(idx), case.hidden, generator=generator(world.rank))
        weight = torch.exp2(torch.randint(-3, 3, idx.shape, generator=generator(world.rank, 1)).float())
        rows, row_weight, layout = layer.dispatch(x.to(device), idx.to(device), weight.to(device))
        out = layer.combine(rows, layout, row_weight).cpu()
        layer.finalize()
        return torch.equal(out, x * weight[:, :1] + x * weight[:, 1:])

    assert all(ranks(run))
