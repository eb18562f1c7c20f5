"""Wrong calls, one a line: what rank 1 calls, what the others call meanwhile, what each of them gets, and
that all goes on.

The errors of arguments by kind stand in test_errors_layer.py, of configurations in test_errors_config.py;
here are tensors that only seem to be in memory, misuse of heaps and worlds, calls out of order, and things
that are closed. Every rank hears of it within two seconds; then a whole routing through the same layer is
compared with the oracle, and the heap and the world are used again.
"""

import types
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import epmoe
from cases import (
    MISTAKE_LIMIT_S, Case, afterwards, check_afterwards, check_case, check_outcomes, indices_of,
    inputs_of, keep, make_layer, outcome, run_routing,
)

CASE = Case(num_local=2, topk=3, hidden=16, max_tokens=10, dtype=torch.float32)
BAD = 1


def negative(t):
    """The same numbers, in memory with the other sign: what the imaginary part of a conjugate is."""
    return torch._neg_view(-t)


def fake(t):
    with FakeTensorMode():
        return torch.ones(t.shape, dtype=t.dtype)


def scribbled(layout, part, value):
    """A layout whose owner wrote into one of its parts: they are views of the plan."""
    getattr(layout, part).fill_(value)
    return layout


def make_state(world, device):
    """All that a call may need."""
    s = types.SimpleNamespace(world=world, device=device, heap=epmoe.SymmetricHeap(world, 1 << 20, device),
                              layer=make_layer(world, device, CASE))
    keep(world, s.heap)
    x, weight = inputs_of(CASE, world.rank, world.size)
    s.x, s.weight, s.idx = x.nan_to_num(0, 1, 1).to(device), weight.to(device), indices_of(CASE, world.rank,
                                                                                           world.size).to(device)
    s.t, s.words = s.heap.malloc_symmetric((4, 4)), s.heap.malloc_symmetric((4,), torch.int64)
    s.rows, s.row_weight, s.layout = s.layer.dispatch(s.x, s.idx, s.weight)
    s.y, s.row_weight = torch.ones_like(s.rows), torch.ones_like(s.row_weight)
    s.ones = torch.ones(4, 4, device=device)
    return s


def dispatch(s, **changes):
    return s.layer.dispatch(**({"input": s.x, "exp_indices": s.idx, "weight": s.weight} | changes))


def again(s, **changes):
    return s.layer.dispatch(**({"input": s.x, "layout": s.layout, "weight": s.weight} | changes))


def combine(s, **changes):
    return s.layer.combine(**({"input": s.y, "layout": s.layout, "weight": s.row_weight} | changes))


def without_memory(s, call, name, value):
    """A call whose outputs no machine has room for: in its rank one number that they are as large as is out
    of all measure.
    """
    with mock.patch.object(*name, value):
        return call(s)


class NoRoom(torch.Tensor):
    """Of a dtype that has to be cast, and no machine has room for that."""

    def to(self, *_):
        raise MemoryError("no room for these")


def no_room(t):
    return t.double().as_subclass(NoRoom)


def plan(s, *changes):
    return s.layer.preprocess(*(changes or (s.idx,)))


def exchange(s, mine=b"xy"):
    return s.world.exchange(mine)


def malloc(s):
    return s.heap.free(s.heap.malloc_symmetric((4,)))


def new_heap(s, num_bytes=1 << 16, device=None):
    return epmoe.SymmetricHeap(s.world, num_bytes, device or s.device).close()


def small(s, kind=epmoe.EPAll2AllLayer, **options):
    """A layer on the heap that is there."""
    options = {"ep_group": s.world, "max_tokens": 4, "hidden": 16, "topk": 1, "heap": s.heap} | options
    keep(s.world, kind(num_tot_experts=s.world.size, dtype=torch.float32, **options))


def own(s, kind=epmoe.EPAll2AllLayer, **options):
    """A layer with a heap of its own."""
    small(s, kind, **({"heap": None, "device": s.device} | options))


def fused(s, **options):
    own(s, epmoe.EpAll2AllFusedOp, token_saving=False, **options)


def new_moe(s, **options):
    keep(s.world, epmoe.EPMoE(**({"hidden": 16, "inner": 8, "num_experts": s.world.size, "topk": 1,
                                  "ep_group": s.world, "dtype": torch.float32,
                                  "max_tokens": 4, "device": s.device} | options)))


def moe(s, change=None, **changes):
    """A module over the layer that is there; change gets its parameters."""
    module = epmoe.EPMoE(16, 8, s.layer.num_experts, 3, dtype=torch.float32, layer=s.layer)
    if change:
        module.gate_up_proj = torch.nn.Parameter(change(module.gate_up_proj))
    return module(**({"x": s.x, "topk_idx": s.idx, "topk_weights": s.weight} | changes))


def scoped(s):
    with s.heap.scope():
        s.heap.malloc_symmetric((4,))


def scope_left(s):
    """Its own error comes through at once; the others are at the end of theirs, where a free by hand meets
    them.
    """
    try:
        with s.heap.scope():
            t = s.heap.malloc_symmetric((4,))
            raise KeyError("mine")
    finally:
        s.heap.free(t)


# name: (what rank 1 calls, what the others call, exception of rank 1, its texts, exception of the others or
# None: PeerError)
TOGETHER = {
    # tensors that are not what their memory says, or have none
    "input-negative-view": (lambda s: dispatch(s, input=negative(s.x)), dispatch, "ValueError",
                            ("resolve_neg",), None),
    "input-fake": (lambda s: dispatch(s, input=fake(s.x)), dispatch, "ValueError", (), None),
    "input-nested": (lambda s: dispatch(s, input=torch.nested.nested_tensor([s.x])), dispatch, "ValueError",
                     ("input", "nested"), None),
    "weight-negative-view": (lambda s: dispatch(s, weight=negative(s.weight)), dispatch, "ValueError",
                             ("resolve_neg",), None),
    "indices-negative-view": (lambda s: dispatch(s, exp_indices=negative(s.idx)), dispatch, "ValueError",
                              ("resolve_neg",), None),
    "indices-fake": (lambda s: plan(s, fake(s.idx)), plan, "ValueError", (), None),
    "scatter-negative-view": (lambda s: plan(s, s.idx, negative(s.layout.token_dst_scatter_idx)), plan,
                              "ValueError", ("resolve_neg",), None),
    "cached-input-negative-view": (lambda s: again(s, input=negative(s.x)), again, "ValueError",
                                   ("resolve_neg",), None),
    "rows-negative-view": (lambda s: combine(s, input=negative(s.y)), combine, "ValueError", ("resolve_neg",),
                           None),
    "row-weight-negative-view": (lambda s: combine(s, weight=negative(s.row_weight)), combine, "ValueError",
                                 ("resolve_neg",), None),
    # shapes and kinds of the stages
    "indices-flat": (lambda s: plan(s, s.idx.reshape(-1)), plan, "ValueError",
                     ("exp_indices", "2 dimensions", "got 1"), None),
    "indices-3-dimensions": (lambda s: plan(s, s.idx[None]), plan, "ValueError",
                             ("exp_indices", "2 dimensions", "got 3"), None),
    "indices-nested": (lambda s: plan(s, torch.nested.nested_tensor([s.idx])), plan, "Error", (), None),
    "indices-scalar": (lambda s: plan(s, s.idx[0, 0]), plan, "Error", (), None),
    "indices-bool": (lambda s: plan(s, s.idx > 0), plan, "TypeError", ("exp_indices", "int32", "int64"),
                     None),
    "indices-too-many-choices": (lambda s: plan(s, torch.cat([s.idx, s.idx[:, :1]], 1)), plan, "ValueError",
                                 ("exp_indices", "3", "4"), None),
    "scatter-meta": (lambda s: plan(s, s.idx, s.layout.token_dst_scatter_idx.to("meta")), plan, "Error", (),
                     None),
    "scatter-strided": (lambda s: plan(s, s.idx, torch.stack([s.layout.token_dst_scatter_idx] * 2,
                                                             -1)[..., 0]), plan, "ValueError",
                        ("full_scatter_indices", "contiguous"), None),
    "weight-whole-numbers": (lambda s: dispatch(s, weight=s.idx), dispatch, "TypeError", ("weight", "int64"),
                             None),
    "layout-is-text": (lambda s: again(s, layout="the last"), again, "TypeError",
                       ("layout", "EPLayout", "str"), None),
    "layout-and-other-tokens": (lambda s: again(s, input=s.x[:3], weight=s.weight[:3]), again, "ValueError",
                                ("input", "10", "3"), None),
    "rows-too-many": (lambda s: combine(s, input=torch.cat([s.y, s.y]), weight=torch.cat([s.row_weight] * 2)),
                      combine, "ValueError", ("input rows",), None),
    "row-weight-whole-numbers": (lambda s: combine(s, weight=s.row_weight.long()), combine, "TypeError",
                                 ("weight", "int64"), None),
    "row-weight-on-one-rank-only": (lambda s: combine(s, weight=None), combine, "EpMismatch", ("has_weight",),
                                    "EpMismatch"),
    "buffer-of-another-kind": (lambda s: dispatch(s, buffer="first"), dispatch, "TypeError",
                               ("buffer 'first'", "1"), None),
    "buffer-that-is-not-there": (lambda s: dispatch(s, buffer=1), dispatch, "ValueError", ("buffer 1", "1"),
                                 None),
    "buffer-of-a-plan": (lambda s: s.layer.preprocess(s.idx, buffer=-1), plan, "ValueError", ("buffer -1",),
                         None),
    "buffer-of-a-barrier": (lambda s: s.layer.ep_barrier_all(buffer=2**40),
                            lambda s: s.layer.ep_barrier_all(), "ValueError", ("buffer",), None),
    "cached-in-another-buffer": (lambda s: again(s, buffer=99), again, "ValueError",
                                 ("buffer 99", "buffer 0"), None),
    # whole modules
    "moe-x-none": (lambda s: moe(s, x=None), moe, "TypeError", ("x:", "NoneType"), None),
    "moe-x-list": (lambda s: moe(s, x=s.x.tolist()), moe, "TypeError", ("x:", "list"), None),
    "moe-x-scalar": (lambda s: moe(s, x=s.x[0, 0]), moe, "ValueError", ("x:", "[.., 16]", "[]"), None),
    "moe-x-nested": (lambda s: moe(s, x=torch.nested.nested_tensor([s.x])), moe, "Error", (), None),
    "moe-indices-none": (lambda s: moe(s, topk_idx=None), moe, "TypeError", ("topk_idx", "NoneType"), None),
    "moe-indices-list": (lambda s: moe(s, topk_idx=s.idx.tolist()), moe, "TypeError", ("topk_idx", "list"),
                         None),
    "moe-indices-scalar": (lambda s: moe(s, topk_idx=s.idx[0, 0]), moe, "ValueError",
                           ("topk_idx", "[.., 3]", "[]"), None),
    "moe-indices-without-choices": (lambda s: moe(s, topk_idx=s.idx[:, :0]), moe, "ValueError",
                                    ("topk_idx", "[.., 3]", "[10, 0]"), None),
    "moe-weights-none": (lambda s: moe(s, topk_weights=None), moe, "TypeError", ("topk_weights", "NoneType"),
                         None),
    "moe-weights-list": (lambda s: moe(s, topk_weights=s.weight.tolist()), moe, "TypeError",
                         ("topk_weights", "list"), None),
    "moe-weights-scalar": (lambda s: moe(s, topk_weights=s.weight[0, 0]), moe, "ValueError",
                           ("topk_weights", "[.., 3]", "[]"), None),
    "moe-weights-complex": (lambda s: moe(s, topk_weights=s.weight.to(torch.complex64)), moe, "TypeError",
                            ("weight", "complex64"), None),
    "moe-parameter": (lambda s: moe(s, lambda w: w[:, :, :8].contiguous()), moe, "Error", (), None),
    "indices-forgotten": (lambda s: s.layer.dispatch(s.x), dispatch, "TypeError", ("exp_indices", "layout"),
                          None),
    # no memory for what comes out
    "plan-without-memory": (lambda s: without_memory(s, plan, (s.layer, "_plan_words"),
                                                     lambda num_tokens: 1 << 55), plan, "RuntimeError", (),
                            None),
    "dispatch-without-memory": (lambda s: without_memory(s, again, (s.layer, "_recv_words"), 1 << 55), again,
                                "RuntimeError", (), None),
    "combine-without-memory": (lambda s: without_memory(s, combine, (s.layout, "num_tokens"), 1 << 55),
                               combine, "RuntimeError", (), None),
    "dispatch-cast-without-memory": (lambda s: dispatch(s, weight=no_room(s.weight)), dispatch, "MemoryError",
                                     ("no room",), None),
    "again-cast-without-memory": (lambda s: again(s, weight=no_room(s.weight)), again, "MemoryError",
                                  ("no room",), None),
    "combine-cast-without-memory": (lambda s: combine(s, weight=no_room(s.row_weight)), combine,
                                    "MemoryError", ("no room",), None),
    # the world
    "exchange-of-another-size": (lambda s: exchange(s, b"xyz"), exchange, "EpMismatch", ("2 bytes", "3"),
                                 "EpMismatch"),
    "exchange-of-nothing": (lambda s: exchange(s, b""), exchange, "EpMismatch", ("0", "2"), "EpMismatch"),
    "exchange-too-long": (lambda s: exchange(s, b"x" * 513), exchange, "ValueError", ("513", "512"), None),
    "exchange-text": (lambda s: exchange(s, "xy"), exchange, "TypeError", (), None),
    "exchange-none": (lambda s: exchange(s, None), exchange, "TypeError", (), None),
    "exchange-number": (lambda s: exchange(s, 2), exchange, "TypeError", (), None),
    # calls that do not belong together
    "exchange-beside-malloc": (exchange, malloc, "EpMismatch", ("in exchange", "in allocation"),
                               "EpMismatch"),
    "malloc-beside-exchange": (malloc, exchange, "EpMismatch", ("in allocation", "in exchange"),
                               "EpMismatch"),
    "heap-beside-malloc": (new_heap, malloc, "EpMismatch", (), "EpMismatch"),
    "layer-beside-heap": (small, new_heap, "EpMismatch", (), "EpMismatch"),
    "layer-beside-malloc": (small, malloc, "EpMismatch", (), "EpMismatch"),
    "heap-larger-than-the-machine": (lambda s: new_heap(s, 1 << 45), lambda s: new_heap(s, 1 << 45),
                                     "HeapExhausted", (str(1 << 45)[:4],), "HeapExhausted"),
    "layer-of-another-kind": (lambda s: small(s, combine_mode="gather", enable_local_combine=False),
                              lambda s: small(s, num_buffers=2), "EpMismatch", (), "EpMismatch"),
    # what cannot be made
    "heap-of-negative-bytes": (lambda s: new_heap(s, -1), new_heap, "ValueError", ("-1 bytes",), None),
    "heap-of-endless-bytes": (lambda s: new_heap(s, 1 << 70), new_heap, "ValueError", (f"{1 << 70} bytes",),
                              None),
    "heap-of-text": (lambda s: new_heap(s, "x"), new_heap, "ValueError", ("'x'",), None),
    "heap-of-nothing": (lambda s: new_heap(s, None), new_heap, "TypeError", (), None),
    "heap-on-meta": (lambda s: new_heap(s, device="meta"), new_heap, "ValueError", ("meta",), None),
    "heap-on-a-device-of-no-kind": (lambda s: new_heap(s, device="abacus"), new_heap, "RuntimeError",
                                    ("abacus",), None),
    "layer-on-a-device-of-no-kind": (lambda s: own(s, device="abacus"), own, "RuntimeError", ("abacus",),
                                     None),
    "layer-with-timeout-negative": (lambda s: own(s, timeout_s=-1), own, "ValueError", ("timeout", "-1"),
                                    None),
    "layer-with-timeout-text": (lambda s: own(s, timeout_s="soon"), own, "ValueError", ("soon",), None),
    "layer-in-heap-with-timeout": (lambda s: small(s, timeout_s=0), small, "ValueError", ("timeout",), None),
    "layer-by-heap-with-timeout": (lambda s: small(s, ep_group=None, timeout_s=0),
                                   lambda s: small(s, ep_group=None), "ValueError", ("timeout",), None),
    "layer-in-heap-elsewhere": (lambda s: small(s, ep_group=None, device="cuda:7"), small, "ValueError",
                                ("cuda:7",), None),
    "layer-in-heap-of-text": (lambda s: small(s, heap="the heap"), small, "TypeError",
                              ("SymmetricHeap", "str"), None),
    "layer-in-heap-of-others": (lambda s: small(s, heap=epmoe.SymmetricHeap(epmoe.thread_worlds(1)[0],
                                                                            1 << 16, "cpu")), small,
                                "ValueError",
                                ("another world",), None),
    "fused-topk-none": (lambda s: fused(s, topk=None), fused, "TypeError", (), None),
    "fused-tokens-text": (lambda s: fused(s, max_tokens="some"), fused, "ValueError", ("some",), None),
    "moe-activation": (lambda s: new_moe(s, activation="relu"), new_moe, "ValueError",
                       ("swiglu, gpt_oss or gelu",), None),
    "moe-activation-in-heap": (lambda s: new_moe(s, activation="relu", heap=s.heap),
                               lambda s: new_moe(s, heap=s.heap), "ValueError",
                               ("swiglu, gpt_oss or gelu",), None),
    "moe-inner": (lambda s: new_moe(s, inner=0), new_moe, "ValueError", ("inner 0",), None),
    "moe-timeout": (lambda s: new_moe(s, timeout_s=-1), new_moe, "ValueError", ("timeout",), None),
    # the heap
    "malloc-endless": (lambda s: s.heap.malloc_symmetric((float("inf"),)), malloc, "OverflowError",
                       ("infinity",), None),
    "scope-left-by-an-error": (scope_left, scoped, "KeyError", ("mine",), "nothing"),
    "free-twice": (lambda s: s.heap.free(s.t) or s.heap.free(s.t), lambda s: s.heap.free(s.t)
                   or s.heap.free(s.words), "ValueError", ("no allocation begins",), None),
    "free-the-middle": (lambda s: s.heap.free(s.t[1]), lambda s: s.heap.free(s.t), "ValueError",
                        ("no allocation begins",), None),
    "free-another": (lambda s: s.heap.free(s.words), lambda s: s.heap.free(s.t), "EpMismatch", ("frees",),
                     "EpMismatch"),
    "malloc-fractions": (lambda s: s.heap.malloc_symmetric(("a", 2)), malloc, "ValueError", (), None),
}

# The same for calls that concern no other rank: (call, exception, texts).
ALONE = {
    "put-negative-view": (lambda s: s.heap.put(s.t, negative(s.ones), 0), "ValueError", ("resolve_neg",)),
    "put-fake": (lambda s: s.heap.put(s.t, fake(s.ones), 0), "ValueError", ("no memory of its own",)),
    "put-meta": (lambda s: s.heap.put(s.t, s.ones.to("meta"), 0), "Error", ()),
    "put-list": (lambda s: s.heap.put(s.t, [1.0] * 16, 0), "Error", ("list",)),
    "put-peer-negative": (lambda s: s.heap.put(s.t, s.ones, -1), "ValueError", ("-1",)),
    "put-peer-huge": (lambda s: s.heap.put(s.t, s.ones, 2**40), "ValueError", (str(2**40),)),
    "put-peer-text": (lambda s: s.heap.put(s.t, s.ones, "0"), "TypeError", ("integer",)),
    "get-into-negative-view": (lambda s: s.heap.get(negative(s.ones), s.t, 0), "ValueError",
                               ("resolve_neg",)),
    "get-into-expanded": (lambda s: s.heap.get(torch.ones(1, 1).expand(4, 4), s.t, 0), "ValueError",
                          ("contiguous",)),
    "signal-index": (lambda s: s.heap.signal(s.words, 4, 1, 0), "IndexError", ("4",)),
    "signal-index-negative": (lambda s: s.heap.signal(s.words, -1, 1, 0), "IndexError", ("-1",)),
    "signal-dtype": (lambda s: s.heap.signal(s.t, 0, 1, 0), "TypeError", ("int64", "float32")),
    "signal-value-negative": (lambda s: s.heap.signal(s.words, 0, -5, 0), "ValueError", ("-5",)),
    "signal-value-huge": (lambda s: s.heap.signal(s.words, 0, 2**64, 0), "ValueError", (str(2**64),)),
    "signal-value-fraction": (lambda s: s.heap.signal(s.words, 0, 1.5, 0), "TypeError", ("integer",)),
    "signal-op": (lambda s: s.heap.signal(s.words, 0, 1, 0, op="max"), "ValueError", ("'max'", "set", "add")),
    "signal-peer": (lambda s: s.heap.signal(s.words, 0, 1, s.world.size), "ValueError", ("rank",)),
    "signal-foreign": (lambda s: s.heap.signal(torch.zeros(4, dtype=torch.int64, device=s.device), 0, 1, 0),
                       "ValueError", ("not in this symmetric heap",)),
    "wait-cmp": (lambda s: s.heap.wait(s.words, 0, 0, cmp="lt"), "ValueError", ("'lt'", "ge", "eq")),
    "wait-index": (lambda s: s.heap.wait(s.words, 99, 0), "IndexError", ("99",)),
    "translate-foreign": (lambda s: s.heap.translate(s.ones, 0), "ValueError",
                          ("not in this symmetric heap",)),
    "translate-peer": (lambda s: s.heap.translate(s.t, 8), "ValueError", ("rank 8",)),
    "timeout-none": (lambda s: s.world.set_timeout(None), "TypeError", ()),
    "timeout-endless": (lambda s: s.world.set_timeout(float("inf")), "ValueError", ("timeout",)),
}


def run_together(world, device, name):
    wrong, good, *_ = TOGETHER[name]
    s = make_state(world, device)
    world.set_timeout(MISTAKE_LIMIT_S)
    world.exchange(b"go")
    got = outcome(lambda: (wrong if world.rank == BAD else good)(s), s.layer)
    return got, go_on(s)


def go_on(s):
    """The world, the heap and the layer still work."""

    def use():
        t = s.heap.malloc_symmetric((3,))
        s.heap.barrier()
        s.heap.free(t)
        return s.layer

    return afterwards(s.world, use, CASE)


@pytest.mark.parametrize("name", TOGETHER)
def test_errors_wrong_call(ranks, name):
    _, _, own, texts, others = TOGETHER[name]
    results = ranks(run_together, name, world_size=3, at_least=2)
    outcomes = [r[0] for r in results]
    if own == "Error":
        assert outcomes[BAD].kind in ("ValueError", "TypeError", "BufferError", "RuntimeError",
                                      "NotImplementedError"), outcomes[BAD]
        own = outcomes[BAD].kind
    check_outcomes(outcomes, [own if rank == BAD else others or "PeerError" for rank in range(len(results))],
                   *texts, who=BAD,
                   elsewhere=() if others else (f"rank {BAD}",))
    check_afterwards(outcomes, [r[1] for r in results], CASE)


def run_alone(world, device):
    s = make_state(world, device)
    before = s.t.clone()
    got = {name: outcome(lambda call=call: call(s)) for name, (call, *_) in ALONE.items()}
    return got, bool(torch.equal(s.t, before) and not s.words.any()), go_on(s)


@pytest.fixture(scope="module")
def alone(_ranks):
    return _ranks(run_alone, world_size=2, at_least=2)


@pytest.mark.parametrize("name", ALONE)
def test_errors_wrong_call_of_one_rank(alone, name):
    """Nothing is written, no other rank hears of it."""
    _, kind, texts = ALONE[name]
    outcomes = [got[name] for got, _, _ in alone]
    if kind == "Error":
        assert all(o.kind in ("ValueError", "TypeError", "AttributeError", "BufferError", "RuntimeError")
                   for o in outcomes), outcomes[0]
        kind = outcomes[0].kind
    check_outcomes(outcomes, kind, *texts)


def test_errors_wrong_calls_of_one_rank_change_nothing(alone):
    assert all(clean for _, clean, _ in alone)
    check_afterwards([next(iter(got.values())) for got, _, _ in alone], [state for _, _, state in alone],
                     CASE)


# ---- closed ----

CLOSED = {
    "exchange": exchange, "check": lambda s: s.world.check(), "heap": new_heap, "layer-with-heap": small,
    "malloc": lambda s: s.heap.malloc_symmetric((4,)),
    "free": lambda s: s.heap.free(s.t), "heap-barrier": lambda s: s.heap.barrier(),
    "put": lambda s: s.heap.put(s.t, s.ones, 0),
    "wait": lambda s: s.heap.wait(s.words, 0, 0), "signal": lambda s: s.heap.signal(s.words, 0, 1, 0),
    "plan": plan, "dispatch": dispatch, "cached-dispatch": again,
    "combine": combine, "barrier": lambda s: s.layer.ep_barrier_all(),
    "finalize": lambda s: s.layer.finalize(), "heap-close": lambda s: s.heap.close(),
}


def run_closed(world, device):
    """Threads and processes of this test alone: the world is gone afterwards."""
    s = make_state(world, device)
    world.close()
    world.close()
    return {name: outcome(lambda call=call: call(s)) for name, call in CLOSED.items()}


@pytest.fixture(scope="module")
def closed():
    from epmoe.testing import run_threads

    return run_threads(lambda world: run_closed(world, torch.device("cpu")), 2)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", CLOSED)
def test_errors_use_of_a_closed_world(closed, name):
    check_outcomes([got[name] for got in closed], "EpClosed", "closed")


# ---- a layout that its owner wrote over ----


@pytest.mark.cpu_only  # on a GPU the plan is read where nobody looks at it first
@pytest.mark.parametrize("mode", ["scatter", "gather", "local"])
@pytest.mark.parametrize("part, value",
                         [("send_tokens", 2**30), ("send_tokens", -1), ("recv_tokens", 2**30),
                          ("recv_tokens", 3), ("token_dst_scatter_idx", 2**30), ("token_dst_scatter_idx", -1),
                                         ("token_slots", 2**30), ("token_slots", -1)], ids=lambda v: str(v))
def test_errors_layout_written_over(ranks, part, value, mode):
    """A layout's parts are views of the plan: nonsense in it is an error, and no wild store."""
    import dataclasses

    case = dataclasses.replace(CASE, mode=mode)

    def run(world, device):
        layer = make_layer(world, device, case)
        x, _ = inputs_of(case, world.rank, world.size)
        rows, _, layout = layer.dispatch(x, indices_of(case, world.rank, world.size))
        world.set_timeout(MISTAKE_LIMIT_S)
        if world.rank == BAD:
            scribbled(layout, part, value)
        got = [outcome(lambda: layer.combine(rows, layout)),
               outcome(lambda: layer.dispatch(x, layout=layout))]
        return got, run_routing(layer, case)

    results = ranks(run, world_size=3)
    for i in (0, 1):
        check_outcomes([r[0][i] for r in results],
                       [("ValueError" if rank == BAD else "PeerError") for rank in range(3)], "overwritten",
                       who=BAD, elsewhere=[f"rank {BAD}"])
    check_case([r[1] for r in results], case)
