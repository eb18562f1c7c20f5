"""Fixed capacity: outputs of one size, no read by the host, and an error on all ranks when it is not enough.
"""

import pytest
import torch

from cases import (
    MODES, Case, check_case, check_outcomes, indices_of, inputs_of, make_layer, outcome,
    run_routing, same_bits, soil,
)

@pytest.mark.parametrize("weights", [True, False], ids=["weights", "bare"])
@pytest.mark.parametrize("capacity", ["roomy", "exact"])
def test_layer_capacity_is_the_shape(ranks, capacity, weights):
    case = Case(topk=3, max_tokens=17, tokens="unequal", capacity=capacity, weights=weights,
                pattern="sentinels")

    def run(world, device):
        layer = make_layer(world, device, case)
        soil(layer)
        x, weight = inputs_of(case, world.rank, world.size)
        rows, row_weight, layout = layer.dispatch(x.to(device),
                                                  indices_of(case, world.rank, world.size).to(device),
                                                  weight if weight is None else weight.to(device))
        assert rows.shape == (layer.capacity, case.hidden) and "num_rows=None" in repr(layout)
        assert (row_weight is None) == (not weights) and (row_weight is None
                                                          or row_weight.shape == (layer.capacity,))
        tail = rows[layout.num_rows :].clone()
        weight_tail = None if row_weight is None else row_weight[layout.num_rows :].clone()
        layer.finalize()
        return tail, weight_tail

    for tail, weight_tail in ranks(run):
        same_bits(tail, torch.zeros_like(tail), "rows behind M")
        if weight_tail is not None:
            same_bits(weight_tail, torch.zeros_like(weight_tail), "weights behind M")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("short", [1, 5])
def test_layer_overflow_is_everybodys_error(ranks, mode, short):
    """Too many rows for one rank: EpOverflow on all, nothing moves, and the next call works."""
    case = Case(num_local=2, topk=2, max_tokens=12, pattern="one_rank", mode=mode)

    def run(world, device):
        layer = make_layer(world, device, case, capacity=world.size * 24 - short)
        soil(layer)
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
                       str(size * 24 - short))
    check_case([r[1] for r in results], Case(num_local=2, topk=2, max_tokens=11, mode=mode))


def test_layer_capacity_of_one_row(ranks):
    """The smallest capacity there is."""
    case = Case(num_local=1, topk=1, max_tokens=1, hidden=8)

    def run(world, device):
        layer = make_layer(world, device, case, capacity=1)
        idx = torch.tensor([[world.rank]], device=device)
        x = torch.full((1, 8), world.rank + 1.0, dtype=case.dtype, device=device)
        rows, _, layout = layer.dispatch(x, idx)
        out = layer.combine(rows, layout)
        same_bits(out, x, "what came home")
        all_at_one = outcome(lambda: layer.dispatch(x, torch.zeros_like(idx)), layer)
        layer.finalize()
        return all_at_one

    check_outcomes(ranks(run, at_least=2), "EpOverflow")
