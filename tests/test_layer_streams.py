"""On GPUs: streams, CUDA graphs, and what may not make the host wait."""

import dataclasses

import pytest
import torch

from cases import (
    MODES, Case, check_case, check_outcomes, check_plan, check_rows, check_sums, indices_of,
    inputs_of, layout_parts, make_layer, outcome, rows_for_combine, soil,
)

pytestmark = pytest.mark.cuda_only
CASE = Case(num_local=4, topk=4, hidden=256, max_tokens=300, tokens="unequal", capacity="roomy")


def on_device(case, world, device):
    x, weight = inputs_of(case, world.rank, world.size)
    return x.to(device), indices_of(case, world.rank, world.size).to(device), weight.to(device)


def result_of(case, world, rows, row_weight, layout, y, w, out):
    x, weight = inputs_of(case, world.rank, world.size)
    return {"idx": indices_of(case, world.rank, world.size), "x": x, "weight": weight, "rows": rows.clone(),
            "row_weight": row_weight.clone(), "y": y.cpu(),
            "w": w.cpu(), "out": out.clone(), **layout_parts(layout)}


@pytest.mark.parametrize("mode", MODES)
def test_layer_in_a_cuda_graph(ranks, mode):
    """Captured once; replayed with other tokens and routings, between calls that are not captured."""
    base = dataclasses.replace(CASE, mode=mode, tokens="full")

    def run(world, device):
        layer = make_layer(world, device, base)
        soil(layer)
        x, idx, weight = on_device(base, world, device)
        y, w = (t.to(device) for t in rows_for_combine(base, world.rank, layer.capacity, layer.capacity))

        def step():
            rows, row_weight, layout = layer.dispatch(x, idx, weight)
            return rows, row_weight, layout, layer.combine(y, layout, w)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        layer.synchronize()
        world.exchange(b"x")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, row_weight, layout, out = step()
        results = []
        for seed in range(6):
            case = dataclasses.replace(base, seed=seed)
            if seed % 3 == 2:  # not captured, in between
                result = step()
            else:
                for t, new in zip((x, idx, weight), on_device(case, world, device)):
                    t.copy_(new)
                graph.replay()
                result = rows, row_weight, layout, out
            layer.synchronize()
            results.append(result_of(dataclasses.replace(base, seed=seed if seed % 3 != 2 else seed - 1),
                                     world, *result[:3], y, w, result[3]))
        layer.finalize()
        return results

    results = ranks(run)
    for i in range(6):
        of_all = [r[i] for r in results]
        plan = check_plan(of_all, 4 * len(results))
        check_rows(of_all, plan)
        check_sums(of_all, plan, 4 * len(results), mode)


def test_layer_on_a_side_stream(ranks):
    """Work goes to the stream that is current, and its results are there when that stream says so."""

    def run(world, device):
        layer = make_layer(world, device, CASE)
        args = on_device(CASE, world, device)
        y, w = (t.to(device) for t in rows_for_combine(CASE, world.rank, layer.capacity, layer.capacity))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            rows, row_weight, layout = layer.dispatch(*args)
            out = layer.combine(y, layout, w)
        side.synchronize()
        result = result_of(CASE, world, rows, row_weight, layout, y, w, out)
        layer.synchronize()
        layer.finalize()
        return result

    check_case(ranks(run), CASE)


def test_layer_that_changes_streams(ranks):
    """Calls on one buffer from several streams, without a word of order from the caller: the layer keeps them
    apart.
    """

    def run(world, device):
        layer = make_layer(world, device, CASE)
        args = on_device(CASE, world, device)
        y, w = (t.to(device) for t in rows_for_combine(CASE, world.rank, layer.capacity, layer.capacity))
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        results = []
        for i in range(12):
            with torch.cuda.stream(streams[i % 3]):
                rows, row_weight, layout = layer.dispatch(*args)
                results.append((rows, row_weight, layout, layer.combine(y, layout, w)))
        torch.cuda.synchronize()
        results = [result_of(CASE, world, *r[:3], y, w, r[3]) for r in results]
        layer.finalize()
        return results

    results = ranks(run)
    for i in range(12):
        check_case([r[i] for r in results], CASE)


def test_layer_buffers_on_streams(ranks):
    """Two microbatches on two streams, each with a buffer of its own, at once."""
    base = dataclasses.replace(CASE, num_buffers=2)

    def run(world, device):
        layer = make_layer(world, device, base)
        streams = [torch.cuda.Stream() for _ in range(2)]
        cases = [dataclasses.replace(base, seed=s) for s in range(2)]
        args = [on_device(c, world, device) for c in cases]
        ys = [[t.to(device) for t in rows_for_combine(c, world.rank, layer.capacity, layer.capacity)]
              for c in cases]
        torch.cuda.synchronize()
        results = [None] * 2
        for _ in range(10):
            for b in (0, 1):
                with torch.cuda.stream(streams[b]):
                    rows, row_weight, layout = layer.dispatch(*args[b], buffer=b)
                    results[b] = rows, row_weight, layout, layer.combine(ys[b][0], layout, ys[b][1])
        torch.cuda.synchronize()
        results = [result_of(c, world, *r[:3], *y, r[3]) for c, r, y in zip(cases, results, ys)]
        layer.finalize()
        return results

    results = ranks(run)
    for b in (0, 1):
        check_case([r[b] for r in results], dataclasses.replace(base, seed=b))


def test_layer_on_streams_that_would_cross(ranks):
    """Two layers on two streams, of as many thread blocks as there are SMs, and barriers of their heaps.
    What is before them on the streams holds up the first one's on some ranks, the second one's on the others:
    they keep the order of their calls."""

    def run(world, device):
        num_sm = torch.cuda.get_device_properties(device).multi_processor_count
        layers = [make_layer(world, device, CASE, num_sm=num_sm) for _ in range(2)]
        args = on_device(CASE, world, device)
        y, w = (t.to(device) for t in rows_for_combine(CASE, world.rank, layers[0].capacity,
                                                       layers[0].capacity))
        far, near = (torch.zeros(2**28, dtype=torch.uint8, pin_memory=pin, device="cpu" if pin else device)
                     for pin in (True, False))
        streams = [torch.cuda.Stream() for _ in layers]
        for layer in layers:
            layer.combine(y, layer.dispatch(*args)[2], w)
        for _ in range(3):
            torch.cuda.synchronize()
            world.exchange(b"x")
            with torch.cuda.stream(streams[world.rank % 2]):
                far.copy_(near, non_blocking=True)
            results = []
            for layer, stream in zip(layers, streams):
                with torch.cuda.stream(stream):
                    rows, row_weight, layout = layer.dispatch(*args)
                    layer.heap.barrier()
                    results.append((rows, row_weight, layout, layer.combine(y, layout, w)))
        torch.cuda.synchronize()
        results = [result_of(CASE, world, *r[:3], y, w, r[3]) for r in results]
        for layer in layers:
            layer.synchronize()
            layer.finalize()
        return results

    results = ranks(run)
    for i in range(2):
        check_case([r[i] for r in results], CASE)


def test_layer_capacity_never_waits_on_the_host(ranks):
    """torch's own guard raises at every synchronisation."""

    def run(world, device):
        layer = make_layer(world, device, CASE)
        args = on_device(CASE, world, device)
        y = torch.ones(layer.capacity, CASE.hidden, dtype=CASE.dtype, device=device)
        layer.combine(y, layer.dispatch(*args)[2])
        layer.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                layer.combine(y, layer.dispatch(*args)[2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        layer.synchronize()
        layer.finalize()
        return True

    assert all(ranks(run))


def test_layer_overflow_in_a_graph_is_reported(ranks):
    """What goes wrong in a replay is raised by synchronize on every rank, and the graph can be replayed
    again.
    """
    case = Case(num_local=1, topk=1, hidden=64, max_tokens=32)

    def run(world, device):
        layer = make_layer(world, device, case, capacity=40)
        x = torch.ones(32, 64, dtype=case.dtype, device=device)
        idx = torch.full((32, 1), world.rank, device=device)
        layer.combine(layer.dispatch(x, idx)[0], layer.dispatch(x, idx)[2])
        layer.synchronize()
        world.exchange(b"x")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, _, layout = layer.dispatch(x, idx)
            out = layer.combine(rows, layout)
        graph.replay()
        good = outcome(layer.synchronize)
        first = out.clone()
        idx.zero_()
        graph.replay()
        bad = outcome(layer.synchronize)
        idx.fill_(world.rank)
        graph.replay()
        again = outcome(layer.synchronize)
        same = torch.equal(first, x) and torch.equal(out, x)
        layer.finalize()
        return [good, bad, again], same

    results = ranks(run, at_least=2)
    for i, kind in enumerate(("nothing", "EpOverflow", "nothing")):
        check_outcomes([r[0][i] for r in results], kind)
    assert all(same for _, same in results)
