"""Layers with a fixed capacity: outputs have one size, and an overflow is an error on all ranks."""

import pytest
import torch

from cases import (
    MODES, Case, check_case, check_outcomes, indices_of, inputs_of, make_layer, outcome,
    run_routing, same_bits, poison_staging,
)


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "bare"])
@pytest.mark.parametrize("capacity", ["roomy", "exact"])
def test_layer_capacity_sets_the_output_shape(ranks, capacity, weights):
    case = Case(topk=3, max_tokens=17, tokens="unequal", capacity=capacity, weights=weights,
                pattern="sentinels")

    def run(world, device):
        layer = make_layer(world, device, case)
        poison_staging(layer)
        x, weight = inputs_of(case, world.rank, world.size)
        idx = indices_of(case, world.rank, world.size)
        weight = weight if weight is None else weight.to(device)
        rows, row_weight, layout = layer.dispatch(x.to(device), idx.to(device), weight)
        assert rows.shape == (layer.capacity, case.hidden) and "num_rows=None" in repr(layout)
        assert (row_weight is None) == (not weights)
        assert row_weight is None or row_weight.shape == (layer.capacity,)
        tail = rows[layout.num_rows :].clone()
        weight_tail = None if row_weight is None else row_weight[layout.num_rows :].clone()
        layer.finalize()
        return tail, weight_tail

    for tail, weight_tail in ranks(run):
        same_bits(tail, torch.zeros_like(tail), "rows after the first M")
        if weight_tail is not None:
            same_bits(weight_tail, torch.zeros_like(weight_tail), "weights after the first M")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("missing_rows", [1, 5])
def test_layer_overflow_is_an_error_on_all_ranks(ranks, mode, missing_rows):
    """One rank has too few rows. All ranks raise EpOverflow, no token is sent, and the next call works."""
    case = Case(num_local=2, topk=2, max_tokens=12, pattern="one_rank", mode=mode)

    def run(world, device):
        layer = make_layer(world, device, case, capacity=world.size * 24 - missing_rows)
        poison_staging(layer)
        x, weight = (t.to(device) for t in inputs_of(case, world.rank, world.size))
        idx = indices_of(case, world.rank, world.size).to(device)
        got = [outcome(lambda: layer.dispatch(x, idx, weight), layer) for _ in range(2)]
        less = Case(num_local=2, topk=2, max_tokens=11, pattern="uniform", mode=mode)
        result = run_routing(layer, less)
        layer.finalize()
        return got, result

    results = ranks(run, at_least=2)
    size = len(results)
    for i in range(2):
        check_outcomes([r[0][i] for r in results], "EpOverflow", f"rank {size - 1}", str(size * 24),
                       str(size * 24 - missing_rows))
    check_case([r[1] for r in results], Case(num_local=2, topk=2, max_tokens=11, mode=mode))


def test_layer_capacity_of_one_row(ranks):
    """The smallest capacity."""
    case = Case(num_local=1, topk=1, max_tokens=1, hidden=8)

    def run(world, device):
        layer = make_layer(world, device, case, capacity=1)
        idx = torch.tensor([[world.rank]], device=device)
        x = torch.full((1, 8), world.rank + 1.0, dtype=case.dtype, device=device)
        rows, _, layout = layer.dispatch(x, idx)
        out = layer.combine(rows, layout)
        same_bits(out, x, "output of combine")
        overflow = outcome(lambda: layer.dispatch(x, torch.zeros_like(idx)), layer)  # all rows to rank 0
        layer.finalize()
        return overflow

    check_outcomes(ranks(run, at_least=2), "EpOverflow")
