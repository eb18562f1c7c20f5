"""Many layers over two nodes with delayed ranks and poisoned memory, also replayed from CUDA graphs.

    torchrun --nproc-per-node 4 tests/soak_nodes.py [-n 10000] [--backend gloo]

The ranks of this machine are two nodes of half of the ranks.  On GPUs the rows cross between the nodes with
NCCL, or with --backend gloo.  If there are more ranks than GPUs, ranks share GPUs; under NVIDIA MPS that is
many times faster.

Each batch creates an EPMoE with random shape and options, and four inputs with random routing.  Every output,
and in half of the batches every gradient, must have the bits that the separate stages give without delays.
Every other batch has fixed sizes.  There, with NCCL, a forward pass is also replayed from a CUDA graph, after
every fifth layer.
"""

import functools
import random
import sys

import torch
import torch.distributed as dist

import epmoe
from benchmarks.check import poisoned
from epmoe.testing import PATTERNS
from soak import TORCHRUN
from soak_fused import delay_sometimes, inputs_of, main


def make_batch(seed, number, size, device):
    """The parameters of a batch, equal on all ranks: (options of an EPMoE, patterns of the inputs)."""
    r, on_cuda = random.Random(f"{seed} {number} nodes"), device.type == "cuda"
    topk, max_tokens = r.choice((1, 2, 3, 8)), r.choice((1, 7, 60, 300) if on_cuda else (1, 7, 30))
    options = {"hidden": r.choice((64, 512, 1040) if on_cuda else (16, 32)), "topk": topk,
               "inner": r.choice((48, 272, 784) if on_cuda else (16, 48)), "max_tokens": max_tokens,
               "num_experts": size * r.choice((1, 2, 5)), "dtype": r.choice((torch.bfloat16, torch.float16)),
               "activation": r.choice(("swiglu", "gelu")), "combine_mode": r.choice(("scatter", "gather"))}
    if number % 2:
        options |= {"rail_capacity": max_tokens, "capacity": size * max_tokens * topk}
    else:
        options["num_chunks"] = r.choice((1, 2, 3))
    if on_cuda and torch.cuda.device_count() == 1 and size > 1:
        # A rank counts only the ranks of its node that use its GPU.  Here all ranks together take half of
        # the SMs, so that under MPS their kernels and NCCL's can run at the same time.
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        options["reserve_sms"] = num_sms // max(1, size // 2) - num_sms // (2 * size)
    return options, r.sample(PATTERNS, 4)


class Batch:
    """The EPMoE of a batch, its inputs, and what a step gives."""

    def __init__(self, nodes, device, seed, number, fused):
        options, patterns = make_batch(seed, number, nodes.size, device)
        sizes = [options.pop(name) for name in ("hidden", "inner", "num_experts", "topk")]
        self.moe = epmoe.EPMoE(*sizes, nodes, device=device, fused=fused, **options)
        g = torch.Generator().manual_seed(hash((seed, number, nodes.rank)) & 2**62 - 1)
        with torch.no_grad():
            for p in self.moe.parameters():
                p.copy_(torch.randn(p.shape, generator=g) / p.shape[2] ** 0.5)
        self.inputs = [inputs_of(self.moe.layer, pattern, nodes.rank, g) for pattern in patterns]
        self.dys = [torch.randn(x.shape, generator=g).to(x) for x, _, _ in self.inputs]
        self.trains = number % 4 < 2

    def step(self, i, delay=lambda: None):
        """[y], or [y, dx, dw, the gradients of the parameters], as bits."""
        x, idx, weight = self.inputs[i]
        with poisoned():
            if not self.trains:
                with torch.no_grad():
                    return [self.moe(x, idx, weight).view(torch.int16)]
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            y = self.moe(leaves[0], idx, leaves[1])
            delay()
            grads = torch.autograd.grad(y, [*leaves, *self.moe.parameters()], self.dys[i])
        return [t.detach().view(torch.int16) for t in (y, *grads)]

    def captured(self):
        """(graph, its inputs, its output)"""
        inputs = [t.clone() for t in self.inputs[0]]
        with torch.no_grad():
            self.moe(*inputs)
            self.moe.layer.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = self.moe(*inputs)
        return graph, inputs, y


@functools.cache
def group_of(backend):
    """A process group of all ranks.  One serves all batches."""
    return dist.new_group(backend="gloo") if backend == "gloo" else dist.group.WORLD


def run_batch(world, device, seed, number, num_layers, graph, backend):
    """The number of layers with a wrong result. graph: soak_fused.main passes it; here NCCL decides."""
    r = random.Random(f"{seed} {number} {world.rank} delays")

    def delay():
        delay_sometimes(r, device)

    with epmoe.Nodes(group_of(backend), max(1, world.size // 2)) as nodes:
        stages = Batch(nodes, device, seed, number, False)
        wanted = [stages.step(i) for i in range(4)]
        stages.trains = False  # with gradients the stages round differently
        of_replays = [stages.step(i) for i in range(4)]
        stages.moe.finalize()
        batch = Batch(nodes, device, seed, number, True)
        replays = batch.captured() if number % 2 and nodes.rail.is_nccl else None
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for n in range(num_layers):
            delay()
            got = batch.step(n % 4, delay)
            wrong += torch.stack([(a != b).any() for a, b in zip(got, wanted[n % 4])]).any()
            if replays and n % 5 == 0:
                delay()
                got = replay(*replays, batch.inputs[n % 4])
                wrong += (got.view(torch.int16) != of_replays[n % 4][0]).any()
            if n % 50 == 49:
                batch.moe.layer.synchronize()
        batch.moe.finalize()
        del replays
        return int(wrong)


def replay(graph, to, y, inputs):
    for target, source in zip(to, inputs):
        target.copy_(source)
    y.fill_(torch.nan)
    graph.replay()
    return y


if __name__ == "__main__":
    if not TORCHRUN:
        sys.exit("start it with torchrun: see its docstring")
    sys.exit(main(run_batch, "soak_nodes", "layers over two nodes", 10_000, backend="default"))
