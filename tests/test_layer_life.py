"""Creation, use and end of a layer: arguments, shared heaps, several buffers, epochs and finalize."""

import dataclasses
import gc
import itertools
import weakref

import pytest
import torch

import epmoe
from cases import (
    MODES, Case, check_case, check_outcomes, check_plan, check_rows, check_sums, indices_of,
    inputs_of, keep, layout_parts, make_layer, outcome, rows_for_combine, run_routing, poison_staging,
)
from epmoe import _C
from pace import WAIT_S


def dispatch_case(layer, world, device, case, **options):
    """(idx, x, weight, results of dispatch) of a case on this rank."""
    x, weight = inputs_of(case, world.rank, world.size)
    idx = indices_of(case, world.rank, world.size)
    return idx, x, weight, layer.dispatch(x.to(device), idx.to(device), weight.to(device), **options)


def combine_case(layer, world, device, case, dispatched):
    """Combine what dispatch_case returned. Returns the same dict as run_routing."""
    idx, x, weight, (rows, row_weight, layout) = dispatched
    y, w = rows_for_combine(case, world.rank, len(rows), layout.num_rows)
    out = layer.combine(y.to(device), layout, w.to(device))
    return {"idx": idx, "x": x, "weight": weight, "rows": rows, "row_weight": row_weight, "y": y, "w": w,
            "out": out, **layout_parts(layout)}


def test_layer_has_rank_and_sizes_of_its_group(ranks):
    def run(world, device):
        layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, world.rank, 2 * world.size, world.size, world.size,
                                     device=device)
        keep(world, layer)
        got = (layer.rank, layer.world_size, layer.num_local_experts, layer.num_experts, layer.dtype,
               layer.weight_dtype)
        layer.finalize()
        return got == (world.rank, world.size, 2, 2 * world.size, torch.bfloat16, torch.float32)

    assert all(ranks(run))


@pytest.mark.parametrize("options, text", [({"rank": 7}, "rank=7"), ({"world_size": 9}, "world_size=9"),
                                           ({"local_world_size": 1}, "local_world_size=1")])
def test_layer_refuses_wrong_rank_and_sizes(ranks, options, text):
    def run(world, device):
        return outcome(lambda: epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=2 * world.size,
                                                    device=device, **options))

    check_outcomes(ranks(run, at_least=2), "ValueError", text)


def test_layer_shares_a_heap_with_other_layers(ranks):
    """Layers of different shapes use one heap alternately. No layer overwrites another layer's memory."""
    cases = [
        Case(num_local=2, topk=2, hidden=16, max_tokens=9, mode="scatter", seed=1),
        Case(num_local=1, topk=5, hidden=40, max_tokens=20, mode="gather", dtype=torch.float32, seed=2,
             pattern="sentinels"),
        Case(num_local=4, topk=3, hidden=24, max_tokens=14, mode="local", dtype=torch.float16, seed=3,
             tokens="unequal"),
    ]

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 4 << 20, device)
        keep(world, heap)
        layers = [make_layer(world, device, case, heap=heap) for case in cases]
        used = heap.stats()["used"]
        for layer in layers:
            poison_staging(layer)
        # all layers dispatch before the first one combines
        sent = [dispatch_case(layer, world, device, case) for layer, case in zip(layers, cases)]
        results = [combine_case(layer, world, device, case, dispatched)
                   for layer, case, dispatched in zip(layers, cases, sent)]
        layers[1].finalize()
        again = run_routing(layers[2], cases[2])
        layers[0].finalize()
        layers[2].finalize()
        after = heap.stats()["used"]
        heap.close()
        return results, again, used, after

    results = ranks(run)
    for i, case in enumerate(cases):
        check_case([r[0][i] for r in results], case)
    check_case([r[1] for r in results], cases[2])
    assert all(used > 0 and after == 0 for _, _, used, after in results)


@pytest.mark.parametrize("mode", MODES)
def test_layer_two_buffers_at_once(ranks, mode):
    """Two microbatches use one buffer each. Both are dispatched before one is combined, several times."""
    base = Case(num_local=2, topk=3, max_tokens=16, tokens="unequal", mode=mode, num_buffers=2)

    def run(world, device):
        layer = make_layer(world, device, base)
        poison_staging(layer)
        results = []
        for step in range(4):
            sent = []
            for buffer in (0, 1):
                case = dataclasses.replace(base, seed=10 * step + buffer)
                sent.append((case, dispatch_case(layer, world, device, case, buffer=buffer)))
            for case, dispatched in reversed(sent):
                results.append(combine_case(layer, world, device, case, dispatched))
        layer.finalize()
        return results

    results = ranks(run)
    for i in range(8):
        of_all = [r[i] for r in results]
        plan = check_plan(of_all, 2 * len(results))
        check_rows(of_all, plan)
        check_sums(of_all, plan, 2 * len(results), mode)


def test_layer_refuses_wrong_buffer(ranks):
    def run(world, device):
        layer = make_layer(world, device, Case(num_buffers=2))
        x = torch.zeros(4, 16, dtype=torch.bfloat16, device=device)
        idx = torch.zeros(4, 2, dtype=torch.int32, device=device)
        got = [outcome(lambda b=b: layer.dispatch(x, idx, buffer=b)) for b in (2, 99)]
        result = run_routing(layer, Case())
        layer.finalize()
        return got, result

    results = ranks(run, world_size=2)
    for i, b in enumerate((2, 99)):
        check_outcomes([r[0][i] for r in results], "ValueError", f"buffer {b}", "2")
    check_case([r[1] for r in results], Case())


@pytest.mark.parametrize("epoch", [2**31 - 3, 2**32 - 3, 2**33 + 1, 2**63 - 9])
def test_layer_epochs_past_2_31_and_2_32(ranks, epoch):
    """Words that cross ranks hold the epoch, some only its lower 32 bits. An overflow of those has no effect.
    """

    def run(world, device):
        layer = make_layer(world, device, Case(topk=3, tokens="unequal"))
        run_routing(layer, Case(topk=3, tokens="unequal"))
        layer.ep_barrier_all()
        layer.synchronize()
        world.exchange(b"x")  # after this, no rank is in an operation
        _C.layer_set_epoch(layer._c, 0, epoch, epmoe.comm.device.stream_of(layer.device))
        world.exchange(b"x")
        results = [run_routing(layer, Case(topk=3, tokens="unequal", seed=s)) for s in range(4)]
        layer.finalize()
        return results

    results = ranks(run)
    for s in range(4):
        check_case([r[s] for r in results], Case(topk=3, tokens="unequal", seed=s))


def test_layer_knows_which_calls_were_void(ranks):
    """The calls of a layer have ascending numbers. A rank whose peer failed knows which calls were void."""

    def run(world, device):
        layer = make_layer(world, device, Case(num_buffers=2))
        x, idx = torch.ones(2, layer.hidden, dtype=layer.dtype, device=device), torch.zeros(
            2, layer.topk, dtype=torch.int64, device=device)
        seen, bad_idx = [], idx.float()

        def newest():
            return _C.layer_newest_call(layer._c, 0)

        for _ in range(18):  # it keeps 16
            layer.dispatch(x, idx)
            good = newest()
            kind = outcome(lambda: layer.dispatch(x, bad_idx if world.rank == 1 else idx), layer).kind
            voids = [_C.layer_was_void(layer._c, 0, number) for number in (good, good + 1, newest())]
            layer.dispatch(x, idx)
            seen.append((good, newest(), kind, *voids, _C.layer_was_void(layer._c, 0, newest()),
                         _C.layer_was_void(layer._c, 1, good + 1)))
        oldest = [_C.layer_was_void(layer._c, 0, seen[i][0]) for i in (0, 3, 17)]
        layer.synchronize()
        layer.finalize()
        return seen, oldest

    results = ranks(run, world_size=2, at_least=2)
    for rank, (seen, oldest) in enumerate(results):
        numbers = [n for good, newest, *_ in seen for n in (good, newest)]
        assert numbers == sorted(set(numbers))
        for _, _, kind, *voids in seen:
            assert kind == ("TypeError" if rank == 1 else "PeerError")
            if rank == 0:
                assert voids == [False, True, True, False, False]
        if rank == 0:
            assert oldest == [True, False, False]  # of those before the 16 newest errors it knows nothing


def test_layer_barrier_and_synchronize(ranks):
    def run(world, device):
        layer = make_layer(world, device, Case(num_buffers=2))
        for i in range(30):
            layer.ep_barrier_all(buffer=i % 2)
        layer.synchronize()
        result = run_routing(layer, Case())
        layer.finalize()
        return result

    check_case(ranks(run), Case())


def test_layer_calls_after_finalize_are_refused(ranks):
    case = Case()

    def run(world, device):
        layer = make_layer(world, device, case)
        x, _ = inputs_of(case, world.rank, world.size)
        idx = indices_of(case, world.rank, world.size).to(device)
        x = x.to(device)
        rows, _, layout = layer.dispatch(x, idx)
        layer.finalize()
        layer.finalize()  # has no effect
        calls = [lambda: layer.dispatch(x, idx), lambda: layer.preprocess(idx),
                 lambda: layer.dispatch(x, layout=layout), lambda: layer.combine(rows, layout),
                 lambda: layer.ep_barrier_all(), lambda: layer.synchronize()]
        return [outcome(c) for c in calls]

    for outcomes in ranks(run):
        check_outcomes(outcomes, "EpClosed", "finalized")


def test_layer_with_statement_finalizes(ranks):
    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        keep(world, heap)
        with make_layer(world, device, Case(), heap=heap) as layer:
            result = run_routing(layer, Case())
        used = heap.stats()["used"]
        next_call = outcome(lambda: layer.ep_barrier_all()).kind
        heap.close()
        return result, used, next_call

    results = ranks(run)
    check_case([r[0] for r in results], Case())
    assert all(used == 0 and next_call == "EpClosed" for _, used, next_call in results)


def test_layer_finalize_closes_its_own_heap(ranks):
    def run(world, device):
        layer = make_layer(world, device, Case())
        layer.finalize()
        return outcome(lambda: layer.heap.malloc_symmetric((1,))).kind

    assert ranks(run, world_size=2) == ["EpClosed"] * ranks.size(2)


@pytest.mark.cpu_only
def test_layer_that_is_finalized_has_no_place_in_the_world():
    """Also while the program keeps it: a world has 256 places, and a layer with its heap takes two."""
    world = epmoe.thread_worlds(1)[0]
    kept = []
    for _ in range(260):
        kept.append(epmoe.EPAll2AllLayer(world, 4, 16, 1, num_tot_experts=1, device="cpu"))
        kept[-1].finalize()
    world.close()


def test_layer_of_a_closed_heap_is_refused(ranks):
    """A layer has no view of its heap, whose memory is gone then."""

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 4 << 20, device)
        layer = epmoe.EPAll2AllLayer(world, 4, 16, 1, num_tot_experts=world.size, device=device, heap=heap)
        layer.synchronize()
        heap.close()
        return [outcome(call) for call in (layer.synchronize, layer.ep_barrier_all)]

    for got in ranks(run):
        check_outcomes(got, "EpClosed", "this heap is closed")


def test_layer_stays_open_if_the_with_statement_raises(ranks):
    def run(world, device):
        with pytest.raises(KeyError), make_layer(world, device, Case()) as layer:
            raise KeyError
        result = run_routing(layer, Case())
        layer.finalize()
        return result

    check_case(ranks(run, world_size=2), Case())


def test_layer_without_room_leaves_the_heap_unchanged(ranks):
    """The heap has room for one of two buffers. All ranks raise HeapExhausted, and the first one is freed."""
    case = Case(hidden=1024, max_tokens=64, num_buffers=2)

    def run(world, device):
        small = make_layer(world, device, dataclasses.replace(case, max_tokens=1, num_buffers=1))
        config = small._config._replace(max_tokens=case.max_tokens, capacity=world.size * 64 * 2)
        size = _C.layer_bytes(config)
        heap = epmoe.SymmetricHeap(world, size + size // 2, device)
        keep(world, heap)
        got = outcome(lambda: make_layer(world, device, case, heap=heap))
        after = heap.stats()["used"]
        layer = make_layer(world, device, dataclasses.replace(case, num_buffers=1), heap=heap)
        result = run_routing(layer, dataclasses.replace(case, num_buffers=1))
        return got, after, result

    results = ranks(run, world_size=2)
    check_outcomes([r[0] for r in results], "HeapExhausted", "needs", "free")
    assert [after for _, after, _ in results] == [0] * len(results)
    check_case([r[2] for r in results], case)


@pytest.mark.cuda_only
def test_layer_memory_is_freed_after_peers_have_read(ranks):
    """Rank 0 has no tokens and is ready for finalize at once, while the other ranks still read rows from its
    memory. It must not free that memory early: the bytes that it writes afterwards must not appear in y.
    """

    def run(world, device):
        tokens, hidden = 4096, 2048
        heap = epmoe.SymmetricHeap(world, 1 << 28, device)
        seen = []
        for _ in range(5):
            layer = epmoe.EPAll2AllLayer(None, tokens, hidden, 1, num_tot_experts=world.size,
                                         combine_mode="gather", num_sm=2, heap=heap)
            x = torch.ones(tokens if world.rank else 0, hidden, dtype=torch.bfloat16, device=device)
            rows, _, layout = layer.dispatch(x, torch.zeros(len(x), 1, dtype=torch.int64, device=device))
            y = layer.combine(rows * 3, layout)
            layer.finalize()
            words = heap.malloc_symmetric((heap.stats()["largest_free"] // 2,), torch.uint8)
            words.fill_(255)
            seen.append(bool((y == 3).all()))
            heap.free(words)
        heap.close()
        return seen

    assert ranks(run, at_least=2) == [[True] * 5] * ranks.size()


def test_layer_refuses_a_heap_of_another_world(ranks):
    if ranks.is_torchrun:
        pytest.skip("creates a world of one rank, which needs ranks that are threads")

    def run(world, device):
        other = epmoe.SymmetricHeap(epmoe.thread_worlds(1)[0], 1 << 16, "cpu")
        return outcome(lambda: epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=4, heap=other))

    check_outcomes(ranks(run, world_size=2), "ValueError", "another world")


def test_layer_is_garbage_collected(ranks):
    """epmoe keeps no reference to a layer after finalize."""

    def run(world, device):
        layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=2 * world.size, device=device)
        run_routing(layer, Case(max_tokens=8))
        layer.finalize()
        reference = weakref.ref(layer)
        del layer
        gc.collect()
        return reference() is None

    assert all(ranks(run))


def _close_in_every_order(world, device):
    """Close a world, a heap and a layer in each order, directly after an operation, without a wait for it."""
    results = []
    for order in itertools.permutations(("layer", "heap", "world")):
        new_world = epmoe.World(world.group, timeout_s=WAIT_S)
        heap = epmoe.SymmetricHeap(new_world, 1 << 22, device)
        layer = epmoe.EPAll2AllLayer(new_world, 8, 16, 2, num_tot_experts=2 * new_world.size,
                                     dtype=torch.float32, heap=heap)
        x = torch.ones(8, 16, device=device)
        idx = torch.arange(16, device=device).view(8, 2) % (2 * new_world.size)
        rows, _, layout = layer.dispatch(x, idx)
        y = layer.combine(rows, layout)
        close = {"layer": layer.finalize, "heap": heap.close, "world": new_world.close}
        results.append((order, [outcome(close[name]) for name in order], bool((y == 2).all())))
        del new_world, heap, layer, layout, close
        gc.collect()
    return results


# What must be open for a layer, a heap or a world to be closed without EpClosed.
NEEDS = {"layer": ("heap", "world"), "heap": ("world",), "world": ()}


def test_layer_heap_and_world_close_in_any_order(ranks):
    """No call hangs and the sums are right. A close after that of an object it needs may raise EpClosed."""
    for of_all_ranks in zip(*ranks.isolated(_close_in_every_order), strict=True):
        for order, outcomes, sums_are_right in of_all_ranks:
            assert sums_are_right, f"{order}: a wrong sum"
            for name, got in zip(order, outcomes, strict=True):
                is_late = any(order.index(name) > order.index(needed) for needed in NEEDS[name])
                kinds = ("nothing", "EpClosed") if is_late else ("nothing",)
                assert got.kind in kinds and got.is_within(2), f"{order}, {name}: {got}"
