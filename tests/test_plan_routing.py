"""Every part of the plan's layout, compared with the oracle for every kind of routing."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from cases import (Case, any_indices, check_case, check_plan, indices_of, layout_parts, make_layer,
                   num_tokens, run_case)


def plan_case(world, device, cases):
    """The plans of cases of one shape, computed by one layer."""
    layer = make_layer(world, device, cases[0])
    results = []
    for case in cases:
        idx = indices_of(case, world.rank, world.size)
        results.append({"idx": idx, **layout_parts(layer.preprocess(idx.to(device)))})
    layer.finalize()
    return results


def check(ranks, cases, **options):
    """Compare the plans of one or several cases with the oracle."""
    cases = cases if isinstance(cases, list) else [cases]
    results = ranks(plan_case, cases, **options)
    for i, case in enumerate(cases):
        check_plan([r[i] for r in results], case.num_local * len(results))


def test_plan_tiles_of_many_rows(ranks):
    """Experts with 0, 1, 127, 128, 129 and more rows. A tile ends where its expert ends."""
    check(ranks, [Case(num_local=3, topk=2, max_tokens=400, pattern=p)
                  for p in ("one_expert", "uniform", "edges")])

    def exact(world, device):
        case = Case(num_local=6, topk=1, max_tokens=520)
        layer = make_layer(world, device, case)
        sizes = [0, 1, 127, 128, 129, 135] if world.rank == 0 else [0] * 6
        idx = torch.repeat_interleave(torch.arange(6), torch.tensor(sizes))[:, None].contiguous()
        parts = {"idx": idx, **layout_parts(layer.preprocess(idx.to(device)))}
        layer.finalize()
        return parts

    results = ranks(exact, world_size=2)
    check_plan(results, 6 * len(results))
    if len(results) <= 8:
        got = results[0]
        tiles = list(zip(got["tile_expert"].tolist(), got["tile_row"].tolist()))[: got["num_tiles"]]
        assert tiles == [(1, 0), (2, 1), (3, 128), (4, 256), (4, 384), (5, 385), (5, 513)]


@pytest.mark.parametrize("max_tokens", [1500, 4100, 9000])  # the kernel has a few, 64 and 128 CTAs
def test_plan_many_tokens(ranks, max_tokens):
    check(ranks, [Case(num_local=16, topk=8, max_tokens=max_tokens, hidden=8, pattern=p, tokens="unequal")
                  for p in ("distinct", "sentinels")])


def test_plan_is_the_same_in_every_run(ranks):
    """The bits do not depend on the number of workers, or on the order of atomic operations."""

    def plans(world, device):
        seen = []
        for num_sm in (1, 2, 5, 16):
            case = Case(num_local=4, topk=6, max_tokens=70, num_sm=num_sm, pattern="sentinels")
            layer = make_layer(world, device, case)
            idx = indices_of(case, world.rank, world.size).to(device)
            for _ in range(8):
                layout = layer.preprocess(idx)
                rows = layer.dispatch(torch.zeros(len(idx), case.hidden, dtype=case.dtype, device=device),
                                      layout=layout)[0]
                seen.append((layout_parts(layout), rows.shape))
            layer.finalize()
        first = seen[0][0]
        for parts, _ in seen[1:]:
            for name, value in first.items():
                if name in ("tile_expert", "tile_row"):
                    assert torch.equal(parts[name][: parts["num_tiles"]], value[: parts["num_tiles"]]), name
                else:
                    assert torch.equal(torch.as_tensor(parts[name]), torch.as_tensor(value)), name
        return len(seen)

    assert ranks(plans) == [32] * ranks.size()


def test_plan_of_fewer_tokens_than_before(ranks):
    """A small plan contains nothing of an earlier, larger plan."""

    def shrink(world, device):
        case = Case(topk=4, max_tokens=60)
        layer = make_layer(world, device, case)
        results = []
        for n in (60, 7, 0, 1, 60, 3):
            smaller = dataclasses.replace(case, max_tokens=n, seed=n)
            idx = indices_of(smaller, world.rank, world.size) if n else torch.zeros(0, 4, dtype=torch.int64)
            results.append({"idx": idx, **layout_parts(layer.preprocess(idx.to(device)))})
        layer.finalize()
        return results

    results = ranks(shrink)
    for i in range(6):
        check_plan([r[i] for r in results], 2 * len(results))


@settings(max_examples=40, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_plan_any_indices(ranks, data):
    """Arbitrary indices of a few tokens. hypothesis shrinks a failing example."""
    case, indices = any_indices(data, ranks.size(3))

    def plan(world, device):
        layer = make_layer(world, device, case)
        parts = layout_parts(layer.preprocess(indices[world.rank].to(device)))
        layer.finalize()
        return {"idx": indices[world.rank], **parts}

    check_plan(ranks(plan, world_size=3), case.num_local * len(indices))


def test_plan_layout_repr_and_sizes(ranks):
    def body(world, device):
        case = Case(topk=2, max_tokens=5, capacity="roomy")
        layer = make_layer(world, device, case)
        layout = layer.preprocess(indices_of(case, world.rank, world.size).to(device))
        text = repr(layout)
        sizes = (layout.num_tokens, layout.plan.dtype, layout.plan.device.type == torch.device(device).type,
                 layout.num_rows)
        layer.finalize()
        return text, sizes

    for text, (n, dtype, is_on_device, rows) in ranks(body):
        assert "num_tokens=5" in text and "num_rows=None" in text  # repr() does not wait for the device
        assert n == num_tokens(Case(max_tokens=5), 0, 1) and dtype == torch.int32
        assert is_on_device and rows >= 0


def test_plan_index_dtype_and_workers_may_differ_between_ranks(ranks):
    """int32 indices on odd ranks and int64 on even ranks, and another number of workers on each rank."""
    case = Case(num_local=3, topk=4, max_tokens=50, tokens="unequal", pattern="sentinels")

    def run(world, device):
        mine = dataclasses.replace(case, index_dtype=torch.int32 if world.rank % 2 else torch.int64,
                                   num_sm=1 + world.rank)
        return run_case(world, device, mine)

    check_case(ranks(run), case)
