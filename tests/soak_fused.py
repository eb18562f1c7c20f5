"""The megakernels over and over: `torchrun --nproc-per-node 4 tests/soak_fused.py [-n 10000]`, ranks late,
outputs poisoned.

With --threads N the ranks are N threads side by side on one GPU.

Each batch makes an EpAll2AllFusedOp of random shape and choices, and four inputs of random routing; what the
same stages give
one after the other is what every launch must give, to the bit, eagerly and from CUDA graphs.  Without GPUs
the ranks are threads on the CPU, where the operator does its stages one after the other anyway: then this
tries the test, not the kernels.
"""

import argparse
import random
import sys
import time

import torch

import epmoe
from epmoe.bench.check import poisoned
from epmoe.testing import PATTERNS, routing, run_threads
from soak import BATCH_LIMIT_S, RANK, TORCHRUN, progress, torchrun_world

ACTIVATIONS = (None, "swiglu", "gelu", "gpt_oss", epmoe.GptOss(alpha=1.3, limit=0.6))


def make_batch(seed, number, size, on_cuda):
    """The same on every rank: (options of the operator, sizes, patterns of the four inputs, activation,
    whether from a graph).
    """
    r = random.Random(f"{seed} {number}")
    topk, wide = r.choice((1, 2, 3, 8)), on_cuda
    options = {"dtype": r.choice((torch.bfloat16, torch.float16)),
               "num_tot_experts": size * r.choice((1, 2, 5, 16)), "topk": topk,
               "max_tokens": r.choice((1, 7, 60, 700) if wide else (1, 7, 30)),
               "hidden": r.choice((64, 512, 1040) if wide else (16, 32)),
               "enable_local_combine": r.random() < 0.6, "combine_mode": r.choice(("scatter", "gather"))}
    options |= r.choice(({}, {}, {"num_sm": 20, "num_tail_sms": 6}, {"block_wise_barrier": False},
                         {"token_sorting": False}, {"combine_order": "serial"},
                         {"num_reduce_sms": 3})) if on_cuda else {}
    graph = r.random() < 0.4
    if graph:
        options["capacity"] = size * options["max_tokens"] * topk
    return options, r.choice((48, 272, 784) if wide else (16, 48)), r.sample(PATTERNS,
                                                                             4), r.choice(ACTIVATIONS), graph and on_cuda


def inputs_of(op, pattern, rank, g):
    """x [T, H], idx [T, K], weight [T, K]; T differs from rank to rank, and may be 0."""
    t = op.max_tokens - (3 * rank) % (op.max_tokens + 1)
    idx = routing(pattern, t, op.topk, op.num_experts, op.world_size, rank, g)
    return [v.to(op.device) for v in (torch.randn(t, op.hidden, generator=g).to(op.dtype), idx,
                                      torch.rand(t, op.topk, generator=g))]


def run_batch(world, device, seed, number, num_launches, graph=True):
    """Launches whose result was wrong.  graph: some batches may replay a graph."""
    options, inner, patterns, activation, from_graph = make_batch(seed, number, world.size,
                                                                  device.type == "cuda")
    graph = graph and from_graph
    g, late, gated = torch.Generator().manual_seed(hash((seed, number,
                                                         world.rank)) & 2**62 - 1), random.Random(f"{seed} {number} {world.rank}"), activation not in (None, "gelu")
    with epmoe.EpAll2AllFusedOp(world, device=device, **options) as op, torch.no_grad():
        up = (torch.randn(op.num_local_experts, inner * (2 if gated else 1), op.hidden,
                          generator=g) / op.hidden**0.5).to(op.dtype).to(device)
        down = (torch.randn(op.num_local_experts, op.hidden, inner,
                            generator=g) / inner**0.5).to(op.dtype).to(device)
        inputs = [inputs_of(op, pattern, world.rank, g) for pattern in patterns]
        held = [v.clone() for v in inputs[0]]  # what a graph reads

        def step(x, idx, weight):
            h, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, weight=weight, gemm_weight=up,
                                                                activation=activation)
            return op.mega_group_gemm_combine(h, down, layout, row_weight)

        op.fused = False
        wanted = [step(*i).view(torch.int16) for i in inputs]
        op.synchronize()
        op.fused = True
        y = step(*held)
        if graph:
            replayed = torch.cuda.CUDAGraph()
            op.synchronize()
            # a capture begins with a wait for the device: no rank that is a thread may be in an operation
            world.exchange(b"x")
            with torch.cuda.graph(replayed, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                y = step(*held)
            world.exchange(b"x")
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for n in range(num_launches):
            if late.random() < 0.3:
                time.sleep(late.random() * 0.002)
            if device.type == "cuda" and late.random() < 0.3:
                torch.cuda._sleep(int(late.random() * 400_000))
            of = n % 4
            if graph:
                for to, now in zip(held, inputs[of]):
                    to.copy_(now)
                y.fill_(torch.nan)
                replayed.replay()
            else:
                with poisoned():
                    y = step(*inputs[of])
            wrong += (y.view(torch.int16) != wanted[of]).any()
            if n % 50 == 49:
                op.synchronize()
        op.synchronize()
        return int(wrong)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-n", "--num", type=int, default=10_000, help="launches of each kernel (default 10000)")
    p.add_argument("--each", type=int, default=250, help="launches with one operator")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, help="ranks that are threads side by side on one GPU")
    a = p.parse_args()
    batches = -(-a.num // a.each)

    def all_of(world, device, say=lambda done: None):
        wrong = {}
        world.set_timeout(BATCH_LIMIT_S)
        for number in range(batches):
            if n := run_batch(world, device, a.seed, number, a.each):
                wrong[number] = n
            say((number + 1) * a.each)
        return wrong

    start = time.monotonic()
    with progress("soak_fused", a.num, RANK == 0) as say:
        if TORCHRUN:
            with torchrun_world() as (world, device):
                results = [all_of(world, device, say)]
        elif a.threads:
            device = torch.device("cuda", 0)
            results = run_threads(lambda world: all_of(world, device, *([say] if world.rank == 0 else [])),
                                  a.threads, timeout_s=3600,
                                  device=device)
        else:
            results = run_threads(lambda world: all_of(world, torch.device("cpu")), 3)
    bad = any(results)
    if RANK == 0 or bad:
        print(
            f"soak_fused: {batches * a.each} launches of each kernel in {batches} operators, {time.monotonic() - start:.0f} s: "
            + (f"WRONG, by batch, of seed {a.seed}: {results}" if bad else "every one the same to the bit"),
            flush=True,
        )
    return bad


if __name__ == "__main__":
    sys.exit(main())
