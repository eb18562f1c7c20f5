"""Many launches of the megakernels with delayed ranks and poisoned outputs.

    torchrun --nproc-per-node 4 tests/soak_fused.py [-n 10000]

If there are more ranks than GPUs, ranks share GPUs; under NVIDIA MPS that is many times faster. With
--threads N, the ranks are N threads that share one GPU, and no launch is replayed from a graph (E-063).

Each batch creates an EpAll2AllFusedOp with random shape and options, and four inputs with random routing.
The weights of some batches are in FP8.
Every launch must give the bits that the separate stages give, also if it is replayed from a CUDA graph.
Without GPUs, the ranks are threads on the CPU, where the operator always runs separate stages. Then this
tests only the script, not the kernels.
"""

import argparse
import random
import sys
import time

import torch

import epmoe
from benchmarks.check import poisoned
from epmoe.gemm.activations import is_gated
from epmoe.testing import PATTERNS, routing, run_threads
from soak import BATCH_LIMIT_S, RANK, TORCHRUN, progress, torchrun_world

ACTIVATIONS = (None, "swiglu", "gelu", "gpt_oss", epmoe.GptOss(alpha=1.3, limit=0.6),
               epmoe.SwiGLU(1.3, 0.6, 1), "geglu_tanh", "relu2")


def make_batch(seed, number, size, on_cuda):
    """The parameters of a batch, equal on all ranks.

    Returns (options of the operator, inner size, patterns of the four inputs, activation, whether to use a
    graph, whether the weights are in FP8).
    """
    r = random.Random(f"{seed} {number}")
    topk = r.choice((1, 2, 3, 8))
    options = {"dtype": r.choice((torch.bfloat16, torch.float16)),
               "num_tot_experts": size * r.choice((1, 2, 5, 16)), "topk": topk,
               "max_tokens": r.choice((1, 7, 60, 700) if on_cuda else (1, 7, 30)),
               "hidden": r.choice((64, 512, 1040) if on_cuda else (16, 32)),
               "enable_local_combine": r.random() < 0.6, "combine_mode": r.choice(("scatter", "gather"))}
    options |= r.choice(({}, {}, {"num_sm": 20, "num_tail_sms": 6}, {"block_wise_barrier": False},
                         {"token_sorting": False}, {"combine_order": "serial"},
                         {"num_reduce_sms": 3})) if on_cuda else {}
    graph = r.random() < 0.4
    if graph:
        options["capacity"] = size * options["max_tokens"] * topk
    inner = r.choice((48, 272, 784) if on_cuda else (16, 48))
    patterns = r.sample(PATTERNS, 4)
    activation = r.choice(ACTIVATIONS)
    return options, inner, patterns, activation, graph and on_cuda, r.random() < 0.4


def inputs_of(op, pattern, rank, g):
    """x [T, H], idx [T, K], weight [T, K]. T differs between ranks and may be 0."""
    t = op.max_tokens - (3 * rank) % (op.max_tokens + 1)
    idx = routing(pattern, t, op.topk, op.num_experts, op.world_size, rank, g)
    x = torch.randn(t, op.hidden, generator=g).to(op.dtype)
    weight = torch.rand(t, op.topk, generator=g)
    return [v.to(op.device) for v in (x, idx, weight)]


def delay_sometimes(r, device):
    """Delay this rank: the host in 30 % of the calls, and the GPU in 30 %."""
    if r.random() < 0.3:
        time.sleep(r.random() * 0.002)
    if device.type == "cuda" and r.random() < 0.3:
        torch.cuda._sleep(int(r.random() * 400_000))


def run_batch(world, device, seed, number, num_launches, graph):
    """The number of launches with a wrong result. If graph is true, some batches replay a CUDA graph."""
    options, inner, patterns, activation, from_graph, fp8 = make_batch(seed, number, world.size,
                                                                       device.type == "cuda")
    graph = graph and from_graph
    g = torch.Generator().manual_seed(hash((seed, number, world.rank)) & 2**62 - 1)
    delays = random.Random(f"{seed} {number} {world.rank}")
    wide = inner * (1 + (activation is not None and is_gated(activation)))
    with (epmoe.EpAll2AllFusedOp(world, device=device, fused=False, **options) as plain,
          epmoe.EpAll2AllFusedOp(world, device=device, fused=True, **options) as op, torch.no_grad()):
        up = torch.randn(op.num_local_experts, wide, op.hidden, generator=g) / op.hidden**0.5
        up = up.to(op.dtype).to(device)
        down = torch.randn(op.num_local_experts, op.hidden, inner, generator=g) / inner**0.5
        down = down.to(op.dtype).to(device)
        (up, up_scale), (down, down_scale) = ((epmoe.quantize_fp8_weight(w) if fp8 else (w, None))
                                              for w in (up, down))
        inputs = [inputs_of(op, pattern, world.rank, g) for pattern in patterns]
        graph_inputs = [v.clone() for v in inputs[0]]

        def step(x, idx, weight, op=op):
            h, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, weight=weight, gemm_weight=up,
                                                                activation=activation,
                                                                gemm_scale=up_scale)
            return op.mega_group_gemm_combine(h, down, layout, row_weight, gemm_scale=down_scale)

        wanted = [step(*i, plain).view(torch.int16) for i in inputs]
        plain.synchronize()
        y = step(*graph_inputs)
        if graph:
            replayed = torch.cuda.CUDAGraph()
            with torch.cuda.graph(replayed):
                y = step(*graph_inputs)
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for n in range(num_launches):
            delay_sometimes(delays, device)
            i = n % 4
            if graph:
                for target, source in zip(graph_inputs, inputs[i]):
                    target.copy_(source)
                y.fill_(torch.nan)
                replayed.replay()
            else:
                with poisoned():
                    y = step(*inputs[i])
            wrong += (y.view(torch.int16) != wanted[i]).any()
            if n % 50 == 49:
                op.synchronize()
        op.synchronize()
        return int(wrong)


def main(run_batch=run_batch, name="soak_fused", what="launches of each kernel", num=10_000, **more):
    """Run batches, and print the verdict.  soak_train.py and soak_nodes.py have another run_batch.

    more: name -> the default of another option, which run_batch gets.
    """
    p = argparse.ArgumentParser(prog=name)
    p.add_argument("-n", "--num", type=int, default=num, help=f"{what} (default {num})")
    p.add_argument("--each", type=int, default=250, help="launches with one operator")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, help="run this number of ranks as threads on one GPU")
    for option, default in more.items():
        p.add_argument(f"--{option}", default=default, help=f"default {default}")
    a = p.parse_args()
    batches = -(-a.num // a.each)
    of_more = {option: getattr(a, option) for option in more}

    def run_all(world, device, say=lambda done: None, graph=True):
        """{batch: number of wrong launches} of the batches with wrong launches."""
        wrong = {}
        world.set_timeout(BATCH_LIMIT_S)
        for number in range(batches):
            if n := run_batch(world, device, a.seed, number, a.each, graph, **of_more):
                wrong[number] = n
            say((number + 1) * a.each)
        return wrong

    start = time.monotonic()
    with progress(name, a.num, RANK == 0) as say:
        if TORCHRUN:
            with torchrun_world() as (world, device):
                results = [run_all(world, device, say)]
        elif a.threads:
            device = torch.device("cuda", 0)

            def rank_main(world):
                return run_all(world, device, say if world.rank == 0 else lambda done: None, graph=False)

            results = run_threads(rank_main, a.threads, timeout_s=3600, device=device)
        else:
            results = run_threads(lambda world: run_all(world, torch.device("cpu")), 3)
    bad = any(results)
    if RANK == 0 or bad:
        what = f"{batches * a.each} {what} in {batches} operators"
        verdict = "every result is the same to the bit"
        if bad:
            verdict = f"WRONG results (seed {a.seed}), {{batch: number of them}} of each rank: {results}"
        print(f"{name}: {what}, {time.monotonic() - start:.0f} s: {verdict}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
