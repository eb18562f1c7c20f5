"""Wrong calls that concern a single rank, and calls after a world was closed.

A call that is not collective fails on the rank that makes it. It writes nothing, and no peer gets an error.
"""

import pytest
import torch

from call_cases import (
    CASE, cached_dispatch, combine, dispatch, exchange, fake, layer_in_heap, make_state, negative, new_heap,
    plan, use_again,
)
from cases import check_afterwards, check_outcomes, outcome

# name: (call, exception, texts of its message)
CALLS = {
    "put-negative-view": (lambda s: s.heap.put(s.t, negative(s.ones), 0), "ValueError", ("resolve_neg",)),
    "put-fake": (lambda s: s.heap.put(s.t, fake(s.ones), 0), "ValueError", ("no memory of its own",)),
    "put-meta": (lambda s: s.heap.put(s.t, s.ones.to("meta"), 0), "Error", ()),
    "put-list": (lambda s: s.heap.put(s.t, [1.0] * 16, 0), "Error", ("list",)),
    "put-peer-negative": (lambda s: s.heap.put(s.t, s.ones, -1), "ValueError", ("-1",)),
    "put-peer-huge": (lambda s: s.heap.put(s.t, s.ones, 2**40), "ValueError", (str(2**40),)),
    "put-peer-text": (lambda s: s.heap.put(s.t, s.ones, "0"), "TypeError", ("integer",)),
    "get-into-negative-view": (
        lambda s: s.heap.get(negative(s.ones), s.t, 0), "ValueError", ("resolve_neg",)),
    "get-into-expanded": (
        lambda s: s.heap.get(torch.ones(1, 1).expand(4, 4), s.t, 0), "ValueError", ("contiguous",)),
    "signal-index": (lambda s: s.heap.signal(s.words, 4, 1, 0), "IndexError", ("4",)),
    "signal-index-negative": (lambda s: s.heap.signal(s.words, -1, 1, 0), "IndexError", ("-1",)),
    "signal-dtype": (lambda s: s.heap.signal(s.t, 0, 1, 0), "TypeError", ("int64", "float32")),
    "signal-value-negative": (lambda s: s.heap.signal(s.words, 0, -5, 0), "ValueError", ("-5",)),
    "signal-value-huge": (lambda s: s.heap.signal(s.words, 0, 2**64, 0), "ValueError", (str(2**64),)),
    "signal-value-fraction": (lambda s: s.heap.signal(s.words, 0, 1.5, 0), "TypeError", ("integer",)),
    "signal-op": (lambda s: s.heap.signal(s.words, 0, 1, 0, op="max"), "ValueError", ("'max'", "set", "add")),
    "signal-peer": (lambda s: s.heap.signal(s.words, 0, 1, s.world.size), "ValueError", ("rank",)),
    "signal-foreign": (
        lambda s: s.heap.signal(torch.zeros(4, dtype=torch.int64, device=s.device), 0, 1, 0), "ValueError",
        ("not in this symmetric heap",)),
    "wait-cmp": (lambda s: s.heap.wait(s.words, 0, 0, cmp="lt"), "ValueError", ("'lt'", "ge", "eq")),
    "wait-index": (lambda s: s.heap.wait(s.words, 99, 0), "IndexError", ("99",)),
    "translate-foreign": (
        lambda s: s.heap.translate(s.ones, 0), "ValueError", ("not in this symmetric heap",)),
    "translate-peer": (lambda s: s.heap.translate(s.t, 8), "ValueError", ("rank 8",)),
    "timeout-none": (lambda s: s.world.set_timeout(None), "TypeError", ()),
    "timeout-infinite": (lambda s: s.world.set_timeout(float("inf")), "ValueError", ("timeout",)),
}


def make_all_calls(world, device):
    """Return (outcome of each call, whether the heap is unchanged, state of the rank after the calls)."""
    s = make_state(world, device)
    before = s.t.clone()
    got = {name: outcome(lambda call=call: call(s)) for name, (call, *_) in CALLS.items()}
    return got, bool(torch.equal(s.t, before) and not s.words.any()), use_again(s)


@pytest.fixture(scope="module")
def results(_ranks):
    return _ranks(make_all_calls, world_size=2, at_least=2)


@pytest.mark.parametrize("name", CALLS)
def test_errors_wrong_local_call(results, name):
    _, kind, texts = CALLS[name]
    outcomes = [got[name] for got, _, _ in results]
    if kind == "Error":
        assert all(o.kind in ("ValueError", "TypeError", "AttributeError", "BufferError", "RuntimeError")
                   for o in outcomes), outcomes[0]
        kind = outcomes[0].kind
    check_outcomes(outcomes, kind, *texts)


def test_errors_wrong_local_calls_change_nothing(results):
    assert all(is_unchanged for _, is_unchanged, _ in results)
    check_afterwards([next(iter(got.values())) for got, _, _ in results], [state for _, _, state in results],
                     CASE)


# ---- a closed world ----

CALLS_WHEN_CLOSED = {
    "exchange": exchange,
    "check": lambda s: s.world.check(),
    "heap": new_heap,
    "layer-with-heap": layer_in_heap,
    "malloc": lambda s: s.heap.malloc_symmetric((4,)),
    "free": lambda s: s.heap.free(s.t),
    "heap-barrier": lambda s: s.heap.barrier(),
    "put": lambda s: s.heap.put(s.t, s.ones, 0),
    "wait": lambda s: s.heap.wait(s.words, 0, 0),
    "signal": lambda s: s.heap.signal(s.words, 0, 1, 0),
    "plan": plan,
    "dispatch": dispatch,
    "cached-dispatch": cached_dispatch,
    "combine": combine,
    "barrier": lambda s: s.layer.ep_barrier_all(),
    "finalize": lambda s: s.layer.finalize(),
    "heap-close": lambda s: s.heap.close(),
}


def call_closed_world(world, device):
    s = make_state(world, device)
    world.close()
    world.close()
    return {name: outcome(lambda call=call: call(s)) for name, call in CALLS_WHEN_CLOSED.items()}


@pytest.fixture(scope="module")
def closed_results():
    """The outcomes in a world that only these tests use, because it ends here."""
    from epmoe.testing import run_threads

    return run_threads(lambda world: call_closed_world(world, torch.device("cpu")), 2)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", CALLS_WHEN_CLOSED)
def test_errors_call_in_closed_world(closed_results, name):
    check_outcomes([got[name] for got in closed_results], "EpClosed", "closed")
