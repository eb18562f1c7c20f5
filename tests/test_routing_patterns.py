"""epmoe.testing.routing: the expert indices of each pattern are as its docstring says."""

import pytest
import torch

from epmoe.testing import PATTERNS, routing

pytestmark = pytest.mark.cpu_only
E, K, TOKENS, RANKS, RANK = 8, 3, 300, 4, 1
ALL = set(range(E))


def share(idx, expert):
    return (idx == expert).double().mean().item()


# Whether the indices of 300 tokens are those of a pattern. Rank 1 has the experts 2 and 3.
IS_RIGHT = {
    "uniform": lambda idx, found: found == ALL and any(len(set(row)) < K for row in idx.tolist()),
    "distinct": lambda idx, found: found == ALL and all(len(set(row)) == K for row in idx.tolist()),
    "one_expert": lambda idx, found: found == ALL and 0.85 < share(idx, E // 2) < 0.95,
    "one_rank": lambda idx, found: found == {6, 7},
    "own_rank": lambda idx, found: found == {2, 3},
    "heavy_drop": lambda idx, found: found == ALL | {-1} and 0.85 < share(idx, -1) < 0.95,
    "all_dropped": lambda idx, found: found == {-1},
    "duplicates": lambda idx, found: found == ALL and torch.equal(idx, idx[:, :1].expand(-1, K)),
    "edges": lambda idx, found: found == {0, E - 1},
    "sentinels": lambda idx, found: (found == ALL | {-1, E} and 0.15 < share(idx, -1) < 0.27
                                     and 0.25 < share(idx, E) < 0.35),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_routing_pattern(pattern):
    idx = routing(pattern, TOKENS, K, E, RANKS, RANK, torch.Generator().manual_seed(0))
    assert idx.shape == (TOKENS, K) and idx.dtype == torch.int64
    assert IS_RIGHT[pattern](idx, set(idx.flatten().tolist()))
