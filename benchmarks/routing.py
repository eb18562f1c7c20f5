"""Routings: which experts the tokens choose, uniformly or with a fullest rank.

The skew of a routing is the number of rows of its fullest rank over the mean of all ranks.  A row is one
choice of one token.
"""

import torch

SEED = 4000


def most_skew(shape, world_size):
    """Return the largest skew that K distinct experts of a token allow: all that fit go to one rank."""
    return world_size * min(shape.topk, shape.experts // world_size) / shape.topk


def uniform(tokens, experts, topk, generator):
    """Return idx [T, K]: for each token K distinct experts, all equally likely."""
    numbers = torch.rand(tokens, experts, generator=generator, device=generator.device)
    return numbers.topk(topk).indices


def skewed(shape, world_size, skew, seed=SEED):
    """Return idx [W, T, K] of all ranks' tokens, on the CPU, the same wherever it is called.

    Rank 0 gets round(skew * T * K) rows, and the others equally many, within one row.  It begins with a
    uniform routing.  Then random choices move to rank 0.  They go to its experts by Zipf's law: expert i in
    proportion to 1 / (i + 1), if the token has not chosen it yet.  So a few hot experts make the rank full.
    Last, random choices move between the other ranks, to experts that are all equally likely.  The K experts
    of a token stay distinct.

    Raises ValueError for a skew below 1 and above most_skew.
    """
    most = most_skew(shape, world_size)
    if not 1 <= skew <= most:
        raise ValueError(f"skew {skew:g}: must be 1 to {most:g} for {shape.topk} distinct experts of "
                         f"{shape.experts} on {world_size} ranks")
    g = torch.Generator("cpu").manual_seed(seed)
    idx = torch.cat([uniform(shape.tokens, shape.experts, shape.topk, g) for _ in range(world_size)])
    local, mean = shape.experts // world_size, shape.tokens * shape.topk
    target = torch.full((world_size,), mean)
    target[0] = round(skew * mean)
    others = world_size * mean - int(target[0])
    for r in range(1, world_size):
        target[r] = others // (world_size - 1) + (r <= others % (world_size - 1))
    while (missing := target - torch.bincount(idx.flatten() // local, minlength=world_size)).any():
        to = 0 if missing[0] > 0 else int(missing.argmax())
        source = None if to == 0 else int(missing.argmin())
        _move(idx, source, to, int(missing[to] if to == 0 else min(missing[to], -missing[source])), local, g)
    return idx.view(world_size, shape.tokens, shape.topk)


def _move(idx, source, to, most, local, generator):
    """Move at most `most` choices, one of a token, to rank `to`: of rank `source`, or None: of all others.

    There is always one that can move: two ranks of which one has more rows than the other have a token for
    which this is so, too.
    """
    rank = idx // local
    gives = rank != to if source is None else rank == source
    tokens = torch.nonzero(gives.any(1) & ((rank == to).sum(1) < local)).flatten()
    tokens = tokens[torch.randperm(len(tokens), generator=generator)[:most]]
    choice = (torch.rand(len(tokens), idx.shape[1], generator=generator) + gives[tokens]).argmax(1)
    # The largest of log(p) + Gumbel noise is a sample in proportion to p.
    likely = torch.empty(len(tokens), local).exponential_(generator=generator).log_().neg_()
    if to == 0:
        likely -= torch.arange(1.0, local + 1).log()
    taken = torch.zeros(len(tokens), idx.shape[1], local, dtype=torch.bool)
    chosen = idx[tokens] - to * local
    taken.scatter_(2, chosen.clamp(0, local - 1)[..., None], ((chosen >= 0) & (chosen < local))[..., None])
    likely[taken.any(1)] = -torch.inf
    idx[tokens, choice] = likely.argmax(1) + to * local
