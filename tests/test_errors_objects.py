"""Wrong calls of worlds, heaps and constructors: rank BAD makes a mistake, all ranks get an exception.

In some cases the other ranks make a different collective call at the same time.
"""

import pytest
import torch

import epmoe
from call_cases import Mistake, check_mistake, exchange, layer_in_heap, malloc, new_heap
from cases import keep


def new_layer(s, kind=epmoe.EPAll2AllLayer, **options):
    """Make a layer that has a heap of its own."""
    layer_in_heap(s, kind, **({"heap": None, "device": s.device} | options))


def new_fused_layer(s, **options):
    new_layer(s, epmoe.EpAll2AllFusedOp, token_saving=False, **options)


def new_moe(s, **options):
    options = {"hidden": 16, "inner": 8, "num_experts": s.world.size, "topk": 1, "ep_group": s.world,
               "dtype": torch.float32, "max_tokens": 4, "device": s.device} | options
    keep(s.world, epmoe.EPMoE(**options))


def use_scope(s):
    with s.heap.scope():
        s.heap.malloc_symmetric((4,))


def leave_scope_by_error(s):
    """Raise an error inside a scope.

    The error leaves the scope at once. The other ranks wait at the end of their scope until this rank frees.
    """
    try:
        with s.heap.scope():
            t = s.heap.malloc_symmetric((4,))
            raise KeyError("mine")
    finally:
        s.heap.free(t)


def free_again(s, twice=False, by_layer=False):
    """Free a tensor, and then what has taken its place, or the tensor once more."""
    t = s.heap.malloc_symmetric((4,))
    s.heap.free(t)
    if by_layer:
        layer_in_heap(s)
    other = s.heap.malloc_symmetric((4,))
    assert (s.heap.offset(other) == s.heap.offset(t)) != by_layer
    before = s.heap.stats()["num_allocations"]
    try:
        s.heap.free(t if twice else other)
    except epmoe.EpError:
        assert s.heap.stats()["num_allocations"] == before
        raise


MISTAKES = {
    # Exchanges of a world.
    "exchange-of-another-size": Mistake(
        lambda s: exchange(s, b"xyz"), exchange, "EpMismatch", ("2 bytes", "3"), others="EpMismatch"),
    "exchange-of-nothing": Mistake(
        lambda s: exchange(s, b""), exchange, "EpMismatch", ("0", "2"), others="EpMismatch"),
    "exchange-too-long": Mistake(lambda s: exchange(s, b"x" * 513), exchange, "ValueError", ("513", "512")),
    "exchange-text": Mistake(lambda s: exchange(s, "xy"), exchange, "TypeError"),
    "exchange-none": Mistake(lambda s: exchange(s, None), exchange, "TypeError"),
    "exchange-number": Mistake(lambda s: exchange(s, 2), exchange, "TypeError"),
    # Different calls on rank BAD and on the other ranks, or calls that no rank can make.
    "exchange-with-malloc": Mistake(
        exchange, malloc, "EpMismatch", ("in exchange", "in allocation"), others="EpMismatch"),
    "malloc-with-exchange": Mistake(
        malloc, exchange, "EpMismatch", ("in allocation", "in exchange"), others="EpMismatch"),
    "heap-with-malloc": Mistake(new_heap, malloc, "EpMismatch", others="EpMismatch"),
    "layer-with-heap-creation": Mistake(layer_in_heap, new_heap, "EpMismatch", others="EpMismatch"),
    "layer-with-malloc": Mistake(layer_in_heap, malloc, "EpMismatch", others="EpMismatch"),
    "heap-larger-than-the-machine": Mistake(
        lambda s: new_heap(s, 1 << 45), lambda s: new_heap(s, 1 << 45), "HeapExhausted", (str(1 << 45)[:4],),
        others="HeapExhausted"),
    "layers-with-different-options": Mistake(
        lambda s: layer_in_heap(s, combine_mode="gather", enable_local_combine=False),
        lambda s: layer_in_heap(s, num_buffers=2), "EpMismatch", others="EpMismatch"),
    # Heaps, layers and modules with wrong options.
    "heap-of-negative-bytes": Mistake(lambda s: new_heap(s, -1), new_heap, "ValueError", ("-1 bytes",)),
    "heap-of-too-many-bytes": Mistake(
        lambda s: new_heap(s, 1 << 70), new_heap, "ValueError", (f"{1 << 70} bytes",)),
    "heap-of-text": Mistake(lambda s: new_heap(s, "x"), new_heap, "ValueError", ("'x'",)),
    "heap-of-nothing": Mistake(lambda s: new_heap(s, None), new_heap, "TypeError"),
    "heap-on-meta": Mistake(lambda s: new_heap(s, device="meta"), new_heap, "ValueError", ("meta",)),
    "heap-on-unknown-device": Mistake(
        lambda s: new_heap(s, device="abacus"), new_heap, "RuntimeError", ("abacus",)),
    "layer-on-unknown-device": Mistake(
        lambda s: new_layer(s, device="abacus"), new_layer, "RuntimeError", ("abacus",)),
    "layer-with-timeout-negative": Mistake(
        lambda s: new_layer(s, timeout_s=-1), new_layer, "ValueError", ("timeout", "-1")),
    "layer-with-timeout-text": Mistake(
        lambda s: new_layer(s, timeout_s="soon"), new_layer, "ValueError", ("soon",)),
    "layer-in-heap-with-timeout": Mistake(
        lambda s: layer_in_heap(s, timeout_s=0), layer_in_heap, "ValueError", ("timeout",)),
    "layer-in-heap-without-group-with-timeout": Mistake(
        lambda s: layer_in_heap(s, ep_group=None, timeout_s=0), lambda s: layer_in_heap(s, ep_group=None),
        "ValueError", ("timeout",)),
    "layer-in-heap-of-another-device": Mistake(
        lambda s: layer_in_heap(s, ep_group=None, device="cuda:7"), layer_in_heap, "ValueError", ("cuda:7",)),
    "layer-in-heap-of-text": Mistake(
        lambda s: layer_in_heap(s, heap="the heap"), layer_in_heap, "TypeError", ("SymmetricHeap", "str")),
    "layer-in-heap-of-another-world": Mistake(
        lambda s: layer_in_heap(s, heap=epmoe.SymmetricHeap(epmoe.thread_worlds(1)[0], 1 << 16, "cpu")),
        layer_in_heap, "ValueError", ("another world",)),
    "fused-topk-none": Mistake(lambda s: new_fused_layer(s, topk=None), new_fused_layer, "TypeError"),
    "fused-tokens-text": Mistake(
        lambda s: new_fused_layer(s, max_tokens="some"), new_fused_layer, "ValueError", ("some",)),
    "moe-activation": Mistake(
        lambda s: new_moe(s, activation="relu"), new_moe, "ValueError", ("must be", "'swiglu'", "GptOss")),
    "moe-activation-in-heap": Mistake(
        lambda s: new_moe(s, activation="relu", heap=s.heap), lambda s: new_moe(s, heap=s.heap), "ValueError",
        ("must be", "'swiglu'", "GptOss")),
    "moe-inner": Mistake(lambda s: new_moe(s, inner=0), new_moe, "ValueError", ("inner 0",)),
    "moe-timeout": Mistake(lambda s: new_moe(s, timeout_s=-1), new_moe, "ValueError", ("timeout",)),
    # Allocations of a heap.
    "malloc-of-infinite-size": Mistake(
        lambda s: s.heap.malloc_symmetric((float("inf"),)), malloc, "ValueError", ("shape inf",)),
    "scope-left-by-an-error": Mistake(
        leave_scope_by_error, use_scope, "KeyError", ("mine",), others="nothing"),
    "free-twice": Mistake(
        lambda s: s.heap.free(s.t) or s.heap.free(s.t), lambda s: s.heap.free(s.t) or s.heap.free(s.words),
        "ValueError", ("no allocation begins",)),
    "free-after-another-took-its-place": Mistake(
        lambda s: free_again(s, twice=True), free_again, "ValueError", ("freed before",)),
    "free-where-a-layer-is": Mistake(
        lambda s: free_again(s, twice=True, by_layer=True), lambda s: free_again(s, by_layer=True),
        "ValueError", ("no allocation begins",)),
    "free-the-middle": Mistake(
        lambda s: s.heap.free(s.t[1]), lambda s: s.heap.free(s.t), "ValueError", ("no allocation begins",)),
    "free-a-part": Mistake(
        lambda s: s.heap.free(s.t[0]), lambda s: s.heap.free(s.t), "ValueError", ("part of an allocation",)),
    "free-another": Mistake(
        lambda s: s.heap.free(s.words), lambda s: s.heap.free(s.t), "EpMismatch", ("frees",),
        others="EpMismatch"),
    "malloc-text": Mistake(lambda s: s.heap.malloc_symmetric(("a", 2)), malloc, "ValueError"),
    "malloc-fractions": Mistake(
        lambda s: s.heap.malloc_symmetric((2.5, 3)), malloc, "ValueError", ("shape 2.5",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_wrong_object_call(ranks, name):
    check_mistake(ranks, MISTAKES[name])
