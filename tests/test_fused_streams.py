"""On GPUs: the fused operator in CUDA graphs, on several streams, and beside NCCL."""

import dataclasses

import pytest
import torch

from cases import make_op
from fused_cases import (Experts, StagedOp, check_numbers, cut, dispatch_gemm, gemm_combine, grown,
                         inputs_of, poison_staging, same, step, tensors)

pytestmark = pytest.mark.cuda_only


def launch(op, case, t, **options):
    """Both operations, without a wait on the host: the arguments of cut()."""
    h, row_weight, layout = dispatch_gemm(op, case, t, **options)
    return h, row_weight, gemm_combine(op, t, h, row_weight, layout), layout


def delay_buffers(device):
    """(host_buffer, device_buffer): a copy of 256 MiB between them delays a stream."""
    host_buffer = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True, device="cpu")
    return host_buffer, torch.zeros(2**28, dtype=torch.uint8, device=device)


def capture(world, op, forward):
    """(graph, results): forward() runs once on a side stream and is then captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    op.synchronize()
    world.exchange(b"x")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    return graph, captured


@pytest.mark.parametrize("mode, activation, knobs", [
    ("local", "swiglu", {}),
    ("scatter", None, {"num_sm": 24, "num_tail_sms": 8}),
    ("gather", "gpt_oss", {"combine_order": "serial", "block_wise_barrier": False}),
])
def test_fused_in_a_cuda_graph(ranks, mode, activation, knobs):
    """One captured graph is replayed with new tokens and routings. Calls outside the graph alternate with it.
    """
    base = grown(ranks, Experts(mode=mode, activation=activation, num_local=4, topk=4, hidden=192, inner=144,
                                tokens="full", capacity="roomy"))

    def run(world, device):
        plain, op = (make_op(world, device, base, StagedOp, **options)
                     for options in ({"fused": False}, knobs))
        poison_staging(plain), poison_staging(op)
        t = tensors(base, world.rank, world.size, device)
        graph, captured = capture(world, op, lambda: launch(op, base, t))
        errors = []
        for i in range(20):
            pattern = ("uniform", "one_expert", "sentinels", "all_dropped", "one_rank")[i % 5]
            new = inputs_of(dataclasses.replace(base, seed=i, pattern=pattern), world.rank, world.size)
            for name in ("x", "idx", "weight"):
                getattr(t, name).copy_(new[name])
            want = step(plain, base, t)
            for out in captured[:3]:
                out.fill_(torch.nan)
            graph.replay()
            results = [captured] + ([launch(op, base, t)] if i % 3 == 2 else [])
            for result in results:
                op.synchronize()
                try:
                    same(cut(*result), want, f"replay {i}")
                except AssertionError as error:
                    errors.append(str(error))
        for o in (plain, op):
            o.finalize()
        return errors

    assert ranks(run) == [[]] * ranks.size()


def test_fused_on_streams_delayed_differently(ranks):
    """Two operators run on two streams. Every rank calls the first operator first.

    A copy delays the first stream on some ranks and the second stream on the others. Each kernel fills its
    GPU and waits for the same kernel of its peers. So different launch orders on two ranks would deadlock.
    """
    case = grown(ranks, Experts(activation="swiglu"))

    def run(world, device):
        ops = [make_op(world, device, case, StagedOp) for _ in range(2)]
        t = tensors(case, world.rank, world.size, device)
        first = [step(op, case, t) for op in ops]
        layouts = [op.preprocess(t.idx) for op in ops]
        host_buffer, device_buffer = delay_buffers(device)
        streams = [torch.cuda.Stream() for _ in ops]
        for _ in range(3):
            torch.cuda.synchronize()
            world.exchange(b"x")
            with torch.cuda.stream(streams[world.rank % 2]):
                host_buffer.copy_(device_buffer, non_blocking=True)
            seen = []
            for op, layout, stream in zip(ops, layouts, streams):
                with torch.cuda.stream(stream):
                    seen.append(launch(op, case, t, layout=layout))
        torch.cuda.synchronize()
        for result, want in zip(seen, first):
            same(cut(*result), want, f"rank {world.rank}")
        for op in ops:
            op.synchronize()
            op.finalize()
        return first[0]

    check_numbers(ranks(run), case)


def test_fused_beside_an_nccl_collective(ranks):
    """An NCCL all-reduce runs on another stream. A copy delays the all-reduce on some ranks and the fused
    kernels on the others. With reserved SMs this does not deadlock.
    """
    case = grown(ranks, Experts(activation="swiglu"))

    def run(world, device):
        import torch.distributed as dist

        op = make_op(world, device, case, StagedOp, reserve_sms=40)
        t = tensors(case, world.rank, world.size, device)
        first = step(op, case, t)
        layout = op.preprocess(t.idx)
        number = torch.ones(2**24, device=device)
        group = dist.new_group(backend="nccl")
        dist.all_reduce(number, group=group)
        host_buffer, device_buffer = delay_buffers(device)
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(3):
            torch.cuda.synchronize()
            world.exchange(b"x")
            with torch.cuda.stream(streams[world.rank % 2]):
                host_buffer.copy_(device_buffer, non_blocking=True)
            with torch.cuda.stream(streams[0]):
                dist.all_reduce(number, group=group)
            with torch.cuda.stream(streams[1]):
                seen = launch(op, case, t, layout=layout)
        torch.cuda.synchronize()
        same(cut(*seen), first, f"rank {world.rank}")
        op.synchronize()
        op.finalize()
        dist.destroy_process_group(group)
        return first, float(number[0])

    results = ranks(run, at_least=2)
    check_numbers([first for first, _ in results], case)
    assert all(n == len(results) ** 4 for _, n in results)


def test_fused_with_capacity_never_waits_on_host(ranks):
    """In torch's sync debug mode each synchronisation of host and device raises an error."""
    case = grown(ranks, Experts(capacity="roomy"))

    def run(world, device):
        op = make_op(world, device, case, StagedOp)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)["y"]
        op.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                y = launch(op, case, t)[2]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        op.synchronize()
        op.finalize()
        return torch.equal(y, want)

    assert all(ranks(run))
