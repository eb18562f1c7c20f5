"""What the tests of wrong calls share: the objects of a rank, the right calls, and a call with one mistake.

All ranks make a call at the same time. Rank BAD makes it in a wrong way. Each rank must get its exception
within two seconds. Then a complete routing through the same layer is compared with the reference, and the
ranks use the heap and the world again.
"""

import types
from typing import Callable, NamedTuple

import torch
from torch._subclasses import FakeTensorMode

import epmoe
from cases import (
    MISTAKE_LIMIT_S, Case, afterwards, check_afterwards, check_outcomes, indices_of, inputs_of, keep,
    make_layer, outcome,
)

CASE = Case(num_local=2, topk=3, hidden=16, max_tokens=10, dtype=torch.float32)
BAD = 1  # the rank that makes the mistake


# ---- tensors whose memory does not hold their values ----


def negative(t):
    """Return the same values with negated memory, like the imaginary part of a conjugate."""
    return torch._neg_view(-t)


def fake(t):
    with FakeTensorMode():
        return torch.ones(t.shape, dtype=t.dtype)


# ---- the objects of a rank, and right calls ----


def make_state(world, device):
    """Return all objects that a call may need."""
    s = types.SimpleNamespace(world=world, device=device, heap=epmoe.SymmetricHeap(world, 1 << 20, device),
                              layer=make_layer(world, device, CASE))
    keep(world, s.heap)
    x, weight = inputs_of(CASE, world.rank, world.size)
    s.x, s.weight = x.nan_to_num(0, 1, 1).to(device), weight.to(device)
    s.idx = indices_of(CASE, world.rank, world.size).to(device)
    s.t, s.words = s.heap.malloc_symmetric((4, 4)), s.heap.malloc_symmetric((4,), torch.int64)
    s.rows, s.row_weight, s.layout = s.layer.dispatch(s.x, s.idx, s.weight)
    s.y, s.row_weight = torch.ones_like(s.rows), torch.ones_like(s.row_weight)
    s.ones = torch.ones(4, 4, device=device)
    return s


def plan(s, *changes):
    return s.layer.preprocess(*(changes or (s.idx,)))


def dispatch(s, **changes):
    return s.layer.dispatch(**({"input": s.x, "exp_indices": s.idx, "weight": s.weight} | changes))


def cached_dispatch(s, **changes):
    return s.layer.dispatch(**({"input": s.x, "layout": s.layout, "weight": s.weight} | changes))


def combine(s, **changes):
    return s.layer.combine(**({"input": s.y, "layout": s.layout, "weight": s.row_weight} | changes))


def exchange(s, mine=b"xy"):
    return s.world.exchange(mine)


def malloc(s):
    return s.heap.free(s.heap.malloc_symmetric((4,)))


def new_heap(s, num_bytes=1 << 16, device=None):
    return epmoe.SymmetricHeap(s.world, num_bytes, device or s.device).close()


def layer_in_heap(s, kind=epmoe.EPAll2AllLayer, **options):
    """Make a layer in the existing heap."""
    options = {"ep_group": s.world, "max_tokens": 4, "hidden": 16, "topk": 1, "heap": s.heap} | options
    keep(s.world, kind(num_tot_experts=s.world.size, dtype=torch.float32, **options))


# ---- mistakes ----


class Mistake(NamedTuple):
    """A wrong call of rank BAD while the other ranks make a right call. Both take the objects of a rank."""

    wrong: Callable
    right: Callable
    error: str  # class of rank BAD's exception; "Error": any of those in check_mistake
    texts: tuple = ()  # what its message contains
    others: str = "PeerError"  # class of the other ranks' exception; a PeerError names rank BAD


def make_mistake(world, device, mistake):
    """Make the calls of a mistake. Return (outcome, state of the rank after it)."""
    s = make_state(world, device)
    world.set_timeout(MISTAKE_LIMIT_S)
    world.exchange(b"go")
    call = mistake.wrong if world.rank == BAD else mistake.right
    got = outcome(lambda: call(s), s.layer)
    return got, use_again(s)


def use_again(s):
    """Use the world, the heap and the layer again. Return what check_afterwards needs."""

    def use():
        t = s.heap.malloc_symmetric((3,))
        s.heap.barrier()
        s.heap.free(t)
        return s.layer

    return afterwards(s.world, use, CASE)


def check_mistake(ranks, mistake):
    results = ranks(make_mistake, mistake, world_size=3, at_least=2)
    outcomes = [r[0] for r in results]
    error = mistake.error
    if error == "Error":
        error = outcomes[BAD].kind
        assert error in ("ValueError", "TypeError", "BufferError", "RuntimeError",
                         "NotImplementedError"), outcomes[BAD]
    names_bad = (f"rank {BAD}",) if mistake.others == "PeerError" else ()
    check_outcomes(outcomes, [error if rank == BAD else mistake.others for rank in range(len(results))],
                   *mistake.texts, on_rank=BAD, elsewhere=names_bad)
    check_afterwards(outcomes, [r[1] for r in results], CASE)
