"""On GPUs: a layer on several streams and in CUDA graphs, and calls that must not make the host wait."""

import dataclasses

import pytest
import torch

import epmoe
from cases import (
    MODES, Case, check_case, check_outcomes, check_plan, check_rows, check_sums, indices_of,
    inputs_of, layout_parts, make_layer, outcome, rows_for_combine, poison_staging,
)

pytestmark = pytest.mark.cuda_only
CASE = Case(num_local=4, topk=4, hidden=256, max_tokens=300, tokens="unequal", capacity="roomy")


def on_device(case, world, device):
    x, weight = inputs_of(case, world.rank, world.size)
    return x.to(device), indices_of(case, world.rank, world.size).to(device), weight.to(device)


def result_of(case, world, rows, row_weight, layout, y, w, out):
    """A copy of the results of a rank, as run_routing returns them."""
    x, weight = inputs_of(case, world.rank, world.size)
    return {"idx": indices_of(case, world.rank, world.size), "x": x, "weight": weight, "rows": rows.clone(),
            "row_weight": row_weight.clone(), "y": y.cpu(), "w": w.cpu(), "out": out.clone(),
            **layout_parts(layout)}


@pytest.mark.parametrize("mode", MODES)
def test_layer_in_a_cuda_graph(ranks, mode):
    """One captured graph is replayed with new tokens and routings. Calls outside the graph alternate with it.
    """
    base = dataclasses.replace(CASE, mode=mode, tokens="full")

    def run(world, device):
        layer = make_layer(world, device, base)
        poison_staging(layer)
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
            if seed % 3 == 2:  # outside the graph, with the inputs of the last replay
                result = step()
            else:
                case = dataclasses.replace(base, seed=seed)
                for t, new in zip((x, idx, weight), on_device(case, world, device)):
                    t.copy_(new)
                graph.replay()
                result = rows, row_weight, layout, out
            layer.synchronize()
            results.append(result_of(case, world, *result[:3], y, w, result[3]))
        layer.finalize()
        return results

    results = ranks(run)
    for i in range(6):
        of_all = [r[i] for r in results]
        plan = check_plan(of_all, 4 * len(results))
        check_rows(of_all, plan)
        check_sums(of_all, plan, 4 * len(results), mode)


def test_layer_on_a_side_stream(ranks):
    """The layer uses the current stream. The results are complete when this stream is synchronized."""

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


def test_layer_one_buffer_on_several_streams(ranks):
    """Several streams use one buffer, and the caller does not order them. The layer orders the calls."""

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


@pytest.mark.parametrize("fused", (None, False))
def test_layer_training_steps_on_several_streams(ranks, fused):
    """The last product of a step counts its tiles in the buffer, which a step on another stream uses, too."""

    def run(world, device):
        num_experts = 8 * world.size
        moe = epmoe.EPMoE(512, 1024, num_experts, 4, world, max_tokens=1024, device=device, fused=fused)
        g = torch.Generator(device).manual_seed(world.rank)
        x, dy = (torch.randn(1024, 512, generator=g, device=device).bfloat16() for _ in range(2))
        x.requires_grad_()
        weight, idx = torch.rand(1024, num_experts, generator=g, device=device).topk(4)

        def step():
            return torch.autograd.grad(moe(x, idx, weight), (x, *moe.parameters()), dy)

        step()
        want = step()
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        world.exchange(b"x")
        results = []
        for i in range(20):
            with torch.cuda.stream(streams[i % 2]):
                results.append(step())
        torch.cuda.synchronize()
        same = [torch.equal(a, b) for got in results for a, b in zip(got, want, strict=True)]
        moe.finalize()
        return same

    assert all(map(all, ranks(run)))


def test_layer_one_buffer_per_stream(ranks):
    """Two microbatches run at the same time, each on a stream and a buffer that the other does not use."""
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


def test_layer_on_streams_delayed_differently(ranks):
    """Two layers and the barriers of their heaps run on two streams. Each kernel uses all SMs.

    A copy delays the first stream on some ranks and the second stream on the others. So the kernels would
    deadlock if epmoe did not launch them in the order of the calls.
    """

    def run(world, device):
        num_sm = torch.cuda.get_device_properties(device).multi_processor_count
        layers = [make_layer(world, device, CASE, num_sm=num_sm) for _ in range(2)]
        args = on_device(CASE, world, device)
        capacity = layers[0].capacity
        y, w = (t.to(device) for t in rows_for_combine(CASE, world.rank, capacity, capacity))
        host_buffer = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True, device="cpu")
        device_buffer = torch.zeros(2**28, dtype=torch.uint8, device=device)
        streams = [torch.cuda.Stream() for _ in layers]
        for layer in layers:
            layer.combine(y, layer.dispatch(*args)[2], w)
        for _ in range(3):
            torch.cuda.synchronize()
            world.exchange(b"x")
            with torch.cuda.stream(streams[world.rank % 2]):
                host_buffer.copy_(device_buffer, non_blocking=True)
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


def test_layer_with_capacity_never_waits_on_host(ranks):
    """In torch's sync debug mode each synchronisation of host and device raises an error."""

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
    """After a failed replay, synchronize raises on every rank. The graph can be replayed again."""
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
        idx.zero_()  # all ranks send their rows to rank 0, which has too few
        graph.replay()
        overflow = outcome(layer.synchronize)
        idx.fill_(world.rank)
        graph.replay()
        again = outcome(layer.synchronize)
        sums_are_right = torch.equal(first, x) and torch.equal(out, x)
        layer.finalize()
        return [good, overflow, again], sums_are_right

    results = ranks(run, at_least=2)
    for i, kind in enumerate(("nothing", "EpOverflow", "nothing")):
        check_outcomes([r[0][i] for r in results], kind)
    assert all(sums_are_right for _, sums_are_right in results)
