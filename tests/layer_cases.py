"""What the tests of a layer's errors share: a call in which rank BAD makes a mistake, and its checks."""

import torch

from cases import (MISTAKE_LIMIT_S, Case, afterwards, check_afterwards, check_outcomes, generator,
                   indices_of, inputs_of, make_layer, outcome)

CASE = Case(num_local=2, topk=3, hidden=16, max_tokens=10, dtype=torch.bfloat16)
BAD = 1  # the rank that makes the mistake


def good_arguments(layer, case=CASE):
    x, weight = inputs_of(case, layer.rank, layer.world_size)
    return {"input": x.to(layer.device),
            "exp_indices": indices_of(case, layer.rank, layer.world_size).to(layer.device),
            "weight": weight.to(layer.device)}


def mistake(world, device, call_of, case=CASE, prepare=None, **options):
    """Make the call call_of(layer, arguments, is_bad, prepared). Then use the layer again.

    Return (outcome of the call, what check_afterwards needs).
    """
    layer = make_layer(world, device, case, **options)
    arguments = good_arguments(layer, case)
    prepared = prepare(layer, arguments) if prepare else None
    world.set_timeout(MISTAKE_LIMIT_S)
    got = outcome(lambda: call_of(layer, arguments, world.rank == BAD, prepared), layer)
    return got, afterwards(world, lambda: layer, case)


def check(results, own, own_texts, others, other_texts, case=CASE):
    """own: the class of rank BAD's exception, or "Error" for any; others: the class on the other ranks.

    own_texts and other_texts: what the messages contain.
    """
    outcomes = [r[0] for r in results]
    check_afterwards(outcomes, [r[1] for r in results], case)
    if own == "Error" and outcomes[BAD].kind.endswith("Error"):
        own = outcomes[BAD].kind
    wanted = [own if rank == BAD else others for rank in range(len(outcomes))]
    check_outcomes(outcomes, wanted, *own_texts, on_rank=BAD, elsewhere=other_texts)


def check_refused(results, own, own_texts, case=CASE):
    """Rank BAD raises its reason. The other ranks raise PeerError, which names rank BAD and its exception."""
    check(results, own, own_texts, "PeerError", (f"rank {BAD}", "" if own == "Error" else own), case)


def dispatched(layer, arguments):
    """Dispatch and return the arguments of combine: (input, layout, weight)."""
    rows, row_weight, layout = layer.dispatch(**arguments)
    return torch.ones_like(rows), layout, torch.ones_like(row_weight)


def problem(world, device, case):
    """x [T, H], weight [T, K], a matrix [H, H] and the expert indices [T, K] of a rank."""
    g = generator(case.seed, world.rank)
    x = torch.randn(case.max_tokens, case.hidden, generator=g)
    weight = torch.rand(case.max_tokens, case.topk, generator=g)
    a = torch.randn(case.hidden, case.hidden, generator=generator(7)) / case.hidden**0.5
    idx = indices_of(case, world.rank, world.size)
    return *(t.to(device).requires_grad_() for t in (x, weight, a)), idx.to(device)
