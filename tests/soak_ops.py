"""The batches of `soak.py ops`: random layers, routings and delays, whose sums are known exactly."""

import dataclasses
import random
import sys
import time

import torch

import epmoe
from cases import MODES, keep, poison_memory
from epmoe import _C
from epmoe.testing import PATTERNS, routing, run_threads
from pace import HANG_S, on_one_core

BATCH_LIMIT_S = HANG_S
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Steps that are checked at once on a GPU, because each check waits for it. They are few: a thread that fills
# the queue of its stream could keep the threads of other ranks from launching what its kernels wait for.
CHECKED_AT_ONCE = {"cuda": 10, "cpu": 1}
SWITCH_S = 0.0005  # Python's time slice of a thread: threads wait for each other very often


@dataclasses.dataclass(frozen=True)
class Batch:
    """The parameters of one layer, and how many steps use it."""

    number: int
    num_ranks: int
    num_steps: int
    mode: str
    dtype: torch.dtype
    index_dtype: torch.dtype
    num_local: int
    topk: int
    hidden: int
    max_tokens: int
    weights: bool
    capacity: bool
    num_sm: int | None
    num_buffers: int
    epoch: int  # the epoch of the first operation of each buffer
    seed: int
    one_core: bool  # whether its ranks share one core (threads on the CPU)


def make_batch(seed, number, num_ranks=None, num_steps=1000, on_cuda=False):
    r = random.Random(f"{seed} {number}")
    num_ranks = num_ranks or r.choice((1, 2, 2, 3, 3, 4))
    epoch = r.choice((2**31, 2**32)) - r.randrange(1, 2 * num_steps)
    return Batch(number, num_ranks, num_steps, MODES[number % 3], r.choice(DTYPES),
                 r.choice((torch.int32, torch.int64)), r.randint(1, 4), r.randint(1, 4),
                 r.choice((8, 16, 24, 40)), r.choice((1, 2, 5, 9, 33)), r.random() < 0.7, r.random() < 0.3,
                 None if on_cuda else r.choice((1, 1, 2, 3)), r.randint(1, 2), epoch, r.randrange(2**31),
                 r.random() < 0.5)


def factor(expert):
    """The factor by which an expert multiplies its rows."""
    return expert % 3 + 1


def make_routing(b, rank, pattern, g, device):
    """x, indices, weight and the expected result: integers of at most 72, which are exact in every dtype."""
    num_experts = b.num_local * b.num_ranks
    num_tokens = int(torch.randint(0, b.max_tokens + 1, (), generator=g))
    idx = routing(pattern, num_tokens, b.topk, num_experts, b.num_ranks, rank, g)
    x = torch.randint(-3, 4, (num_tokens, b.hidden), generator=g)
    weight = torch.randint(0, 3, (num_tokens, b.topk), generator=g)
    kept = (idx >= 0) & (idx < num_experts)
    want = x * ((weight if b.weights else 1) * factor(idx) * kept).sum(1, keepdim=True)
    return (x.to(device=device, dtype=b.dtype), idx.to(device=device, dtype=b.index_dtype),
            weight.to(device=device, dtype=torch.float32) if b.weights else None,
            want.to(device=device, dtype=b.dtype))


def sleep_sometimes(r):
    """In 5 % of the calls, delay this rank by microseconds, or rarely by up to 3 ms."""
    dice = r.random()
    if dice < 0.05:
        time.sleep(r.random() * (0.003 if dice < 0.001 else 0.0002))


def apply_experts(layout, rows, factors):
    """Multiply each row by the factor of its expert, without a wait for a GPU.

    The last factor is NaN. With a capacity, it is the factor of the rows after row M.
    """
    if layout.layer.capacity is None:
        of_rows = torch.repeat_interleave(factors[:-1], layout.tokens_per_expert, output_size=len(rows))
    else:
        row = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        of_rows = factors[torch.searchsorted(layout.expert_offsets[1:], row, right=True)]
    return rows * of_rows[:, None]


def check_sums(b, rank, sums):
    """Compare the (step, got, wanted) of several steps. This waits for a GPU once."""
    _, got, want = zip(*sums)
    same_shapes = all(g.shape == w.shape for g, w in zip(got, want))
    if len(sums) > 1 and same_shapes:  # torch.equal waits
        got, want = [torch.cat(got)], [torch.cat(want)]
    if all(map(torch.equal, got, want)):
        return
    for step, g, w in sums:
        assert g.shape == w.shape, f"step {step}, rank {rank}: shape {g.shape}, wanted {w.shape}; {b}"
        if not torch.equal(g, w):
            at = tuple((g != w).nonzero()[0].tolist())
            raise AssertionError(f"step {step}, rank {rank}: element {at} is {g[at].item()}, "
                                 f"wanted {w[at].item()}; {b}")
    raise AssertionError(f"steps {sums[0][0]} to {sums[-1][0]}, rank {rank}: wrong, and then right; {b}")


def run_batch_on_rank(world, device, b):
    """Run all steps of a batch as one rank. Returns the number of operations.

    A wrong sum raises AssertionError, which names the step and the first wrong number.
    """
    r, g = random.Random(b.seed + world.rank), torch.Generator().manual_seed(b.seed + 1000 * world.rank)
    options = {"enable_local_combine": b.mode == "local",
               "combine_mode": "scatter" if b.mode == "local" else b.mode}
    capacity = b.num_ranks * b.max_tokens * b.topk if b.capacity else None
    layer = epmoe.EPAll2AllLayer(world, b.max_tokens, b.hidden, b.topk,
                                 num_tot_experts=b.num_local * b.num_ranks, dtype=b.dtype, num_sm=b.num_sm,
                                 capacity=capacity, num_buffers=b.num_buffers, device=device, **options)
    keep(world, layer)
    experts = torch.arange(layer.rank * b.num_local, (layer.rank + 1) * b.num_local, device=device)
    factors = torch.cat([factor(experts), torch.tensor([torch.nan], device=device)]).to(b.dtype)
    pool = [make_routing(b, world.rank, pattern, g, device) for pattern in (*PATTERNS, "uniform", "uniform")]
    for buffer in range(b.num_buffers):
        _C.layer_set_epoch(layer._c, buffer, b.epoch, epmoe.comm.device.stream_of(device))
    world.exchange(b"x")  # no rank starts an operation before all ranks have set their epochs
    layout, shared_random, num_ops, sums = None, random.Random(b.seed), 0, []
    for step in range(b.num_steps):
        repeat = shared_random.random() < 0.1 and layout is not None  # all ranks decide alike
        if not repeat:
            x, idx, weight, want = pool[r.randrange(len(pool))]
        sleep_sometimes(r)
        if repeat:
            rows, row_weight, layout = layer.dispatch(x, weight=weight, layout=layout)
        else:
            rows, row_weight, layout = layer.dispatch(x, idx, weight, buffer=step % b.num_buffers)
        num_ops += 2 if repeat else 3
        y = apply_experts(layout, rows, factors)
        sleep_sometimes(r)
        sums.append((step, layer.combine(y, layout, row_weight), want))
        if len(sums) == CHECKED_AT_ONCE[device.type]:
            check_sums(b, world.rank, sums)
            sums.clear()
    layer.synchronize()
    if sums:
        check_sums(b, world.rank, sums)
    layer.finalize()
    return num_ops


def run_batch(seed, number, num_steps):
    """Run a batch with threads as ranks. Returns (Batch, number of operations of one rank)."""
    poison_memory()
    sys.setswitchinterval(SWITCH_S)
    b = make_batch(seed, number, num_steps=num_steps)
    with on_one_core(b.one_core, number):
        results = run_threads(lambda world: run_batch_on_rank(world, torch.device("cpu"), b), b.num_ranks,
                              timeout_s=BATCH_LIMIT_S)
    return b, results[0]
