"""The ladder of cases: plan, order of tokens, dispatch and combine of one routing, each bit by bit.

Each pair of values of two parameters occurs in a case. A case runs through a layer, which sends tokens in the
order of the input, and through an operator that sorts them. Both must give the plan, rows and sums of the
reference, although the orders differ. Rows hold random bits, also NaNs with payloads, infinities, denormals
and -0.0. The other files of these stages have what a single case of this kind does not show.
"""

import dataclasses

import pytest
import torch

from cases import (DTYPES, MODES, Case, check_case, check_orders, make_layer, make_op, orders_of, pairwise,
                   poison_staging, run_routing, same_bits, same_numbers)
from epmoe.testing import PATTERNS

# hidden: rows of a few bytes, of an odd multiple of 16 bytes, and of more than a worker copies in a turn.
# num_local: from one expert a rank to more than a warp has lanes. topk: also more than 16, and the most.
SHAPES = pairwise(
    size=(4, 1, 2, 3, 5, 8), mode=MODES, dtype=DTYPES, pattern=[p for p in PATTERNS if p != "all_dropped"],
    topk=(1, 2, 3, 5, 8, 17, 31, 32), hidden=(8, 24, 40, 72, 520, 1048), num_local=(2, 1, 3, 9, 33, 64, 128),
    max_tokens=(9, 21, 33, 70), tokens=("full", "unequal"), capacity=(None, "roomy", "exact"),
    num_sm=(None, 1, 2, 3, 7, 32), weights=(True, False), index_dtype=(torch.int64, torch.int32))
# Ranks that send nothing, receive nothing, or both. Such a case tests no other pair of values.
EMPTY = pairwise(
    size=(4, 1, 2), mode=MODES, tokens=("none", "first_none", "only_last", "full"), topk=(3, 1),
    pattern=("uniform", "all_dropped", "one_rank", "own_rank"), capacity=(None, "roomy", "exact"),
    weights=(True, False))


def seeds_of(case):
    """An exact capacity is that of the first routing."""
    return (0,) if case.capacity == "exact" else (0, 1)


def run(world, device, case):
    """Routings through a layer, and the first of them through an operator that sorts tokens."""
    layer = make_layer(world, device, case)
    poison_staging(layer)
    results = [run_routing(layer, dataclasses.replace(case, seed=seed)) for seed in seeds_of(case)]
    layer.synchronize()
    layer.finalize()
    op = make_op(world, device, case, token_sorting=True)
    poison_staging(op)
    layout = op.preprocess(results[0]["idx"].to(device))
    of_sorted = run_routing(op, case, layout=layout) | orders_of(layout)
    op.synchronize()
    op.finalize()
    return results, of_sorted


@pytest.mark.parametrize("values", SHAPES + EMPTY, ids=lambda values: "-".join(map(str, values.values())))
def test_stages_of_a_case(ranks, values):
    case = Case(**{name: value for name, value in values.items() if name != "size"})
    results = ranks(run, case, world_size=values["size"])
    num_ranks = len(results)
    for seed in seeds_of(case):
        check_case([plain[seed] for plain, _ in results], dataclasses.replace(case, seed=seed))
    for rank, ((plain, *_), got) in enumerate(results):
        check_orders(got, got["idx"], case.num_local * num_ranks, num_ranks, True, f"rank {rank}: ")
        rows, tiles = plain["num_rows"], plain["num_tiles"]
        same_bits(got["rows"][:rows], plain["rows"][:rows], f"rank {rank}: rows, sorted and not")
        same_bits(got["out"], plain["out"], f"rank {rank}: sums, sorted and not")
        for name in ("counts", "expert_offsets", "token_dst_scatter_idx", "token_sort_indices", "send_tokens",
                     "recv_tokens", "recv_offsets", "rows_per_rank", "num_rows", "num_tiles"):
            same_numbers(got[name], plain[name], f"rank {rank}: {name}, sorted and not")
        for name in ("tile_expert", "tile_row"):
            same_numbers(got[name][:tiles], plain[name][:tiles], f"rank {rank}: {name}, sorted and not")
