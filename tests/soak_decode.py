"""Many low-latency calls with delayed ranks, poisoned outputs, graph replays and two micro-batches.

    torchrun --nproc-per-node 4 tests/soak_decode.py [-n 100000]

If there are more ranks than GPUs, ranks share GPUs; under NVIDIA MPS that is many times faster. Without GPUs,
the ranks are threads on the CPU.

Each batch creates a LowLatencyAll2All with random shape, and eight inputs with random routing, in which every
rank has another number of tokens. Every dispatch must give the rows of EPAll2AllLayer, and every combine its
sums, bit by bit; FP8 rows are those of reference.quantize_fp8. Epochs begin just below 2^31, 2^32 or 2^48 in
most batches.
"""

import argparse
import random
import sys
import time

import torch

import epmoe
from benchmarks.check import poisoned
from epmoe import _C, reference
from epmoe.testing import PATTERNS, routing, run_threads
from soak import BATCH_LIMIT_S, RANK, TORCHRUN, progress, torchrun_world
from soak_fused import delay_sometimes

NUM_INPUTS = 8
FP8 = (False, False, True, "pow2", "ue8m0")


def make_batch(seed, number, size, on_cuda):
    """The sizes of a batch, equal on all ranks, and the epoch with which its buffers begin."""
    r = random.Random(f"{seed} {number}")
    topk = r.choice((1, 2, 4, 8))
    sizes = {"max_tokens": r.choice((1, 5, 40, 200) if on_cuda else (1, 5, 12)), "topk": topk,
             "hidden": r.choice((128, 1024, 7168) if on_cuda else (128, 512)),
             "num_experts": size * max(topk, r.choice((2, 9, 36))),
             "dtype": r.choice((torch.bfloat16, torch.float16))}
    return sizes, r.choice((1, 2**31 - 40, 2**32 - 40, 2**48 - 40)), r.sample(PATTERNS, 3)


def distinct(idx, num_experts):
    """Drop a choice that repeats an earlier one: a token has one row at an expert."""
    for k in range(1, idx.shape[1]):
        repeated = (idx[:, :k] == idx[:, k:k + 1]).any(1)
        idx[repeated, k] = num_experts
    return idx


def make_input(a2a, pattern, g):
    t = int(torch.randint(0, a2a.max_tokens + 1, (), generator=g))
    idx = routing(pattern, t, a2a.topk, a2a.num_experts, a2a.world_size, a2a.rank, g)
    idx = distinct(idx, a2a.num_experts)
    x = torch.randn(t, a2a.hidden, generator=g).to(a2a.dtype)
    return [v.to(a2a.device) for v in (x, idx, torch.rand(t, a2a.topk, generator=g))]


def wanted_of(layer, inputs):
    """(rows [M, H], what the experts make of them, sums) of EPAll2AllLayer."""
    x, idx, weights = inputs
    rows, row_weights, layout = layer.dispatch(x, idx, weights)
    e = torch.arange(layer.num_local_experts, device=x.device).repeat_interleave(layout.tokens_per_expert)
    y = (rows.float() * (0.5 + (e + layer.rank) % 7)[:, None]).to(layer.dtype)
    return rows, y, layer.combine(y, layout, row_weights)


def wrong_rows(wanted, rows, scales, fp8):
    """Whether rows differ from the wanted ones: a tensor on the device."""
    m = len(wanted)
    if not fp8:
        return (rows[:m].view(torch.int16) != wanted.view(torch.int16)).any()
    q, s = reference.quantize_fp8(wanted, pow2=fp8 is not True)
    s = reference.pack_ue8m0(s) if fp8 == "ue8m0" else s
    return (rows[:m].view(torch.uint8) != q.view(torch.uint8)).any() | (scales[:m] != s).any()


class Batch:
    """A LowLatencyAll2All with its inputs, and the calls on it."""

    def __init__(self, world, device, seed, number):
        sizes, self.epoch, patterns = make_batch(seed, number, world.size, device.type == "cuda")
        g = torch.Generator().manual_seed(hash((seed, number, world.rank)) & 2**62 - 1)
        self.local = (seed + number) % 3 > 0
        self.a2a = epmoe.LowLatencyAll2All(world, **sizes, num_buffers=2, device=device,
                                           enable_local_combine=self.local)
        self.inputs = [make_input(self.a2a, patterns[i % 3], g) for i in range(NUM_INPUTS)]
        sizes["num_tot_experts"] = sizes.pop("num_experts")
        with epmoe.EPAll2AllLayer(world, **sizes, enable_local_combine=self.local, device=device) as layer:
            self.wanted = [wanted_of(layer, i) for i in self.inputs]
        self.in_fp8 = {}  # number of an input -> its first sums that travelled in FP8
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        world.exchange(b"x")  # no rank is in an operation while epochs are set
        for buffer in range(2):
            _C.layer_set_epoch(self.a2a._c, buffer, self.epoch, epmoe.comm.device.stream_of(device))
        world.exchange(b"x")

    def experts(self, i, rows):
        y = torch.full_like(rows, float("nan"), dtype=self.a2a.dtype)
        y[:len(self.wanted[i][1])] = self.wanted[i][1]
        return y

    def check(self, i, rows, scales, fp8, out):
        self.wrong += wrong_rows(self.wanted[i][0], rows, scales, fp8)
        self.wrong += (out.view(torch.int16) != self.wanted[i][2].view(torch.int16)).any()

    def call(self, i, fp8):
        with poisoned():
            rows, scales, _, handle = self.a2a.dispatch(*self.inputs[i], fp8=fp8, layout="compact")
            y = self.experts(i, rows)
            self.check(i, rows, scales, fp8, self.a2a.combine(y, handle))
            if fp8 and self.local:
                bits = self.a2a.combine(y, handle, fp8=True).view(torch.int16)
                self.wrong += (bits != self.in_fp8.setdefault(i, bits)).any()

    def micro_batches(self, i, j, fp8):
        """Two calls at once, in halves."""
        with poisoned():
            pending = [self.a2a.dispatch_send(*self.inputs[n], fp8=fp8, layout="compact", buffer=b)
                       for b, n in enumerate((i, j))]
            got = [p.recv() for p in pending]
            pending = [self.a2a.combine_send(self.experts(n, r[0]), r[3]) for n, r in zip((i, j), got)]
            for n, r, p in zip((i, j), got, pending):
                self.check(n, r[0], r[1], fp8, p.recv())

    def capture(self, i):
        """A graph of a call with input i, and its results."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows, _, _, handle = self.a2a.dispatch(*self.inputs[i], layout="compact")
            out = self.a2a.combine(self.experts(i, rows), handle)
        return lambda: (graph.replay(), self.check(i, rows, None, False, out))


def run_batch(world, device, seed, number, num_calls, graphs):
    """The number of wrong results of num_calls calls. graphs: some are replayed from a CUDA graph."""
    batch, done = Batch(world, device, seed, number), 0
    same, mine = random.Random(f"{seed} {number} same"), random.Random(f"{seed} {number} {world.rank}")
    with torch.no_grad(), batch.a2a as a2a:
        replay = batch.capture(0) if graphs and device.type == "cuda" else lambda: batch.call(0, False)
        while done < num_calls:
            delay_sometimes(mine, device)
            kind, i, j = same.random(), same.randrange(NUM_INPUTS), same.randrange(NUM_INPUTS)
            fp8 = same.choice(FP8 if a2a.hidden % 512 == 0 else FP8[:-1])
            if kind < 0.25:
                replay()
            elif kind < 0.5:
                batch.micro_batches(i, j, fp8)
            else:
                batch.call(i, fp8)
            done += 4 if 0.25 <= kind < 0.5 else 2
            if done % 64 < 2:
                a2a.synchronize()
        a2a.synchronize()
    return int(batch.wrong)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("-n", "--num", type=int, default=100_000, help="dispatches and combines (default 100000)")
    p.add_argument("--each", type=int, default=2000, help="of them with one LowLatencyAll2All")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    batches = -(-a.num // a.each)

    def run_all(world, device, say=lambda done: None, graphs=False):
        """{batch: number of wrong results} of the batches with wrong results."""
        wrong = {}
        world.set_timeout(BATCH_LIMIT_S)
        for number in range(batches):
            if n := run_batch(world, device, a.seed, number, a.each, graphs):
                wrong[number] = n
            say((number + 1) * a.each)
        return wrong

    start = time.monotonic()
    with progress("soak_decode", a.num, RANK == 0) as say:
        if TORCHRUN:
            with torchrun_world() as (world, device):
                results = [run_all(world, device, say, graphs=True)]
        else:
            results = run_threads(lambda world: run_all(world, torch.device("cpu")), 4, timeout_s=36000)
    bad = any(results)
    if RANK == 0 or bad:
        verdict = "every result is the same to the bit"
        if bad:
            verdict = f"WRONG results (seed {a.seed}), {{batch: wrong results}} of each rank: {results}"
        seconds = time.monotonic() - start
        print(f"soak_decode: {batches * a.each} calls in {batches} batches, {seconds:.0f} s: {verdict}",
              flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
