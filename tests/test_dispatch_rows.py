"""dispatch compared bit by bit with the reference: rows and weights arrive unchanged."""

import dataclasses

import pytest
import torch

from cases import (Case, case_id, check_case, check_plan, check_rows, indices_of, inputs_of, layout_parts,
                   make_layer, poison_staging, run_case, run_routing, same_bits)


def test_dispatch_many_tokens(ranks):
    case = Case(num_local=8, topk=8, hidden=264, max_tokens=700, pattern="distinct", tokens="unequal",
                mode="local")
    check_case(ranks(run_case, case), case)


def test_dispatch_is_bit_identical_in_every_run(ranks):
    def run(world, device):
        case = Case(num_local=4, topk=6, hidden=32, max_tokens=60, num_sm=8)
        layer = make_layer(world, device, case)
        first = run_routing(layer, case)
        for _ in range(20):
            again = run_routing(layer, case)
            same_bits(again["rows"], first["rows"], "rows")
            same_bits(again["row_weight"], first["row_weight"], "row weights")
            same_bits(again["out"], first["out"], "sums")
        layer.finalize()
        return True

    assert all(ranks(run))


def test_dispatch_with_layout_uses_its_plan(ranks):
    """Cached dispatch: an existing layout with other tokens, with and without weights."""
    base = Case(num_local=3, topk=3, max_tokens=25, tokens="unequal")

    def run(world, device):
        layer = make_layer(world, device, base)
        layout = layer.preprocess(indices_of(base, world.rank, world.size).to(device))
        planned = layout_parts(layout)
        results = []
        for seed in (0, 11, 12):
            for weights in (True, False):
                case = dataclasses.replace(base, weights=weights)
                of_seed = dataclasses.replace(case, seed=seed, tokens="full")
                x, weight = inputs_of(of_seed, world.rank, world.size)
                x = x[: layout.num_tokens].contiguous()
                weight = None if weight is None else weight[: layout.num_tokens].contiguous()
                device_weight = None if weight is None else weight.to(device)
                rows, row_weight, same = layer.dispatch(x.to(device), weight=device_weight, layout=layout)
                assert same is layout
                results.append({"idx": indices_of(base, world.rank, world.size), "x": x, "weight": weight,
                                "rows": rows, "row_weight": row_weight, **planned})
        layer.finalize()
        return results

    results = ranks(run)
    for i in range(6):
        of_all = [r[i] for r in results]
        check_rows(of_all, check_plan(of_all, 3 * len(results)))


def test_dispatch_after_preprocess(ranks):
    case = Case(topk=3, max_tokens=15, tokens="unequal", mode="gather")

    def run(world, device):
        layer = make_layer(world, device, case)
        layout = layer.preprocess(indices_of(case, world.rank, world.size).to(device))
        result = run_routing(layer, case, layout=layout)
        layer.finalize()
        return result

    check_case(ranks(run), case)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float64], ids=case_id)
def test_dispatch_weight_dtype(ranks, weight_dtype):
    """Weights of any floating dtype are sent as float32 and arrive in the layer's weight_dtype."""

    def run(world, device):
        case = Case(topk=3, max_tokens=15)
        layer = make_layer(world, device, case, weight_dtype=weight_dtype)
        idx = indices_of(case, world.rank, world.size)
        x, _ = inputs_of(case, world.rank, world.size)
        weight = torch.rand(idx.shape, generator=torch.Generator().manual_seed(world.rank)).to(weight_dtype)
        rows, row_weight, layout = layer.dispatch(x.to(device), idx.to(device), weight.to(device))
        layer.finalize()
        return {"idx": idx, "x": x, "weight": weight.float(), "rows": rows, "row_weight": row_weight,
                **layout_parts(layout)}

    results = ranks(run)
    check_rows(results, check_plan(results, 2 * len(results)), weight_dtype)


def test_dispatch_does_not_change_its_arguments(ranks):
    def run(world, device):
        case = Case(topk=3, max_tokens=15)
        layer = make_layer(world, device, case)
        poison_staging(layer)
        x, weight = (t.to(device) for t in inputs_of(case, world.rank, world.size))
        idx = indices_of(case, world.rank, world.size).to(device)
        before = x.clone(), idx.clone(), weight.clone()
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        plan = layout.plan.clone()
        y = torch.ones_like(rows)
        layer.combine(y, layout, torch.ones_like(row_weight))
        layer.synchronize()
        for after, wanted in ((x, before[0]), (idx, before[1]), (weight, before[2]), (layout.plan, plan),
                              (y, torch.ones_like(y))):
            same_bits(after, wanted, "an argument")
        layer.finalize()
        return True

    assert all(ranks(run))


@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=case_id)
def test_dispatch_of_slices(ranks, topk, index_dtype):
    """Microbatches are contiguous slices of one batch, aligned only to the size of an element."""
    whole = Case(topk=topk, max_tokens=20, index_dtype=index_dtype)

    def run(world, device):
        layer = make_layer(world, device, whole)
        x, weight = (t.to(device) for t in inputs_of(whole, world.rank, world.size))
        idx = indices_of(whole, world.rank, world.size).to(device)
        results = []
        for a, b in ((0, 7), (7, 8), (8, 8), (8, 19), (19, 20)):
            rows, row_weight, layout = layer.dispatch(x[a:b], idx[a:b], weight[a:b])
            results.append({"idx": idx[a:b].cpu(), "x": x[a:b], "weight": weight[a:b], "rows": rows,
                            "row_weight": row_weight, **layout_parts(layout)})
        layer.finalize()
        return results

    results = ranks(run)
    for i in range(5):
        of_all = [{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in r[i].items()}
                  for r in results]
        check_rows(of_all, check_plan(of_all, 2 * len(results)))


def test_dispatch_of_empty_tensors_with_zero_strides(ranks):
    """A tensor without elements is contiguous with any strides. Some libraries make its strides zero."""

    def run(world, device):
        case = Case(topk=3, max_tokens=10)
        layer = make_layer(world, device, case)
        x, weight = (t.to(device) for t in inputs_of(case, world.rank, world.size))
        idx = indices_of(case, world.rank, world.size).to(device)
        if world.rank == 0:
            x, idx, weight = (torch.empty_strided((0, t.shape[1]), (0, 0), dtype=t.dtype, device=device)
                              for t in (x, idx, weight))
            assert x.is_contiguous()
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        out = layer.combine(torch.zeros_like(rows), layout, torch.zeros_like(row_weight))
        layer.finalize()
        return {"idx": idx, "x": x, "weight": weight, "rows": rows, "row_weight": row_weight,
                **layout_parts(layout)}, len(out)

    results = ranks(run)
    of_all = [{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in r.items()} for r, _ in results]
    check_rows(of_all, check_plan(of_all, 2 * len(results)))
    assert [n for _, n in results] == [0] + [10] * (len(results) - 1)
