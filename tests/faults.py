"""Ranks that die, stop or are late, on CPU or GPUs.

    python tests/faults.py [--kills N] [--ranks N] [--device cpu|cuda]

kill   A random rank is killed by SIGKILL at a random moment of a loop. The kind of loop alternates: it moves
       tokens ("move"), trains a layer ("train", in FP8 "blockwise" and "rowwise", with helpers "balance"),
       multiplies tokens as they arrive ("fuse", on GPUs in the megakernels), or makes low-latency calls
       ("decode"). Every survivor must
       - raise PeerDied that names the killed rank, within 3 s; from 20 kills on, the median is at most 50 ms,
       - find that rank in its flight record,
       - still be able to use its device, and compute right results in a smaller world,
       - leave no descriptor, memory or file.
       The table shows how long after the kill the survivors raised.
stop   A rank stops itself between two operations. The others raise EpTimeout at their limit, which names it.
late   A rank stops itself, and is continued before the limit. No rank raises an error.
Ranks stop in loops of both kinds of calls, "move" and "decode".

The command starts its own processes. It cannot run under torchrun, which ends all ranks when one dies.
"""

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import weakref

import torch
import torch.distributed as dist

import epmoe
from cases import MODES, poison_memory, process_ranks, share_gpus
from epmoe import _C
from epmoe.testing import run_ranks, set_device
from pace import HANG_S, WAIT_S, Events, continue_later, is_soon, slowness
from traces import (abstract_names, held, holdings, kept, left_over, more_of_ours, remember_names,
                    shared_memory_names)

SIZES = {"cpu": (40, 64, 3), "cuda": (256, 512, 4)}  # T, H, K
BALANCE = epmoe.Balance(slots=2, min_rows=4)
FP8_RECIPES = ("blockwise", "rowwise")
STOP_LIMIT_S = 2.0
MEDIAN_S, WORST_S = 0.05, 3.0  # limits of the time from a kill until a survivor raises


def place(rank, device):
    """Prepare this process to be a rank. Returns its torch device."""
    if device == "cuda":
        return set_device(rank, int(os.environ["WORLD_SIZE"]))
    poison_memory()
    return torch.device("cpu")


def make_layer(world, device, mode, how="move"):
    tokens, hidden, topk = SIZES[device.type]
    if how == "decode":
        return epmoe.LowLatencyAll2All(world, tokens, hidden, topk, 4 * world.size, dtype=torch.float32,
                                       device=device)
    if how == "balance" or how in FP8_RECIPES:
        options = {"balance": BALANCE} if how == "balance" else fp8_options(how) | {"dtype": torch.bfloat16}
        return epmoe.EPMoE(hidden, 32, 4 * world.size, topk, world, max_tokens=tokens, device=device,
                           **options).layer
    kind, dtype = epmoe.EPAll2AllLayer, torch.float32
    if how == "fuse":
        kind, dtype = epmoe.EpAll2AllFusedOp, torch.bfloat16
    return kind(world, tokens, hidden, topk, num_tot_experts=4 * world.size, dtype=dtype, device=device,
                enable_local_combine=mode == "local",
                combine_mode="gather" if mode == "gather" else "scatter")


def move(layer, g):
    """One step with experts that multiply by 1, 2 or 3. True if every sum is right.

    All numbers are small integers, so the sums are exact.
    """
    tokens, hidden, topk = SIZES[layer.device.type]
    x = torch.randint(-4, 5, (tokens, hidden), generator=g).float().to(layer.device)
    idx = torch.randint(0, layer.num_experts, (tokens, topk), generator=g).to(layer.device)
    rows, _, layout = layer.dispatch(x, idx)
    first = layer.rank * layer.num_local_experts
    factors = (torch.arange(first, first + layer.num_local_experts, device=layer.device) % 3 + 1).float()
    row_factors = torch.repeat_interleave(factors, layout.tokens_per_expert, output_size=len(rows))
    y = layer.combine(rows * row_factors[:, None], layout)
    return bool(torch.equal(y, x * (idx % 3 + 1).sum(1, keepdim=True)))


def decode(a2a, g):
    """A step of low-latency calls with the same sums as move()."""
    tokens, hidden, topk = SIZES[a2a.device.type]
    x = torch.randint(-4, 5, (tokens, hidden), generator=g).float().to(a2a.device)
    idx = torch.randint(0, a2a.num_experts, (tokens, topk), generator=g).to(a2a.device)
    rows, _, _, handle = a2a.dispatch(x, idx)
    first = a2a.rank * a2a.num_local_experts
    factors = torch.arange(first, first + a2a.num_local_experts, device=a2a.device) % 3 + 1
    y = a2a.combine(rows * factors[:, None, None], handle)
    return bool(torch.equal(y, x * (idx % 3 + 1).sum(1, keepdim=True)))


def fuser(layer):
    """A step with the same sums as move(). Weights are 1, 2 or 3 times the identity: exact in bfloat16."""
    eye = torch.eye(layer.hidden, dtype=layer.dtype, device=layer.device)
    eye = eye.expand(layer.num_local_experts, -1, -1)
    first = layer.rank * layer.num_local_experts
    factors = torch.arange(first, first + layer.num_local_experts, device=layer.device)
    factors = factors.to(layer.dtype) % 3 + 1
    up, down = (eye * factors[:, None, None]).contiguous(), eye.contiguous()

    def step(_, g):
        tokens, hidden, topk = SIZES[layer.device.type]
        x = torch.randint(-4, 5, (tokens, hidden), generator=g).to(layer.dtype).to(layer.device)
        idx = torch.randint(0, layer.num_experts, (tokens, topk), generator=g).to(layer.device)
        h, _, layout = layer.mega_dispatch_group_gemm(x, idx, gemm_weight=up)
        y = layer.mega_group_gemm_combine(h, down, layout)
        return bool(torch.equal(y, x * (idx % 3 + 1).sum(1, keepdim=True)))

    return step


def fp8_options(recipe):
    return {"compute_dtype": torch.float8_e4m3fn, "fp8_recipe": recipe}


def trainer(layer, balance=None, **options):
    """A training step: forward and backward of an EPMoE that uses the given layer.

    balance: with it most tokens choose two experts, with which ranks help the first.
    """
    num_experts = layer.num_experts - (balance.slots * layer.world_size if balance else 0)
    moe = epmoe.EPMoE(layer.hidden, 32, num_experts, layer.topk, dtype=layer.dtype, layer=layer,
                      balance=balance, **options)
    optimizer = torch.optim.SGD(moe.parameters(), lr=1e-3)

    def step(_, g):
        x = torch.randn(SIZES[layer.device.type][0], layer.hidden, generator=g)
        x = x.to(layer.dtype).to(layer.device).requires_grad_()
        scores = torch.randn(len(x), num_experts, generator=g)
        scores[:, :2] += 3 * (balance is not None)
        weight, idx = torch.softmax(scores, -1).topk(layer.topk)
        moe(x, idx.to(layer.device), weight.to(layer.device)).square().mean().backward()
        assert bool(moe.last_layout.helps) == (balance is not None)
        optimizer.step()
        optimizer.zero_grad()
        return bool(torch.isfinite(x.grad).all())

    return step


def step_of(layer, how):
    """Return the function of (layer, generator) that runs a step of a loop."""
    if how in FP8_RECIPES:
        return trainer(layer, **fp8_options(how))
    if how in ("train", "balance"):
        return trainer(layer, BALANCE if how == "balance" else None)
    return fuser(layer) if how == "fuse" else decode if how == "decode" else move


def until_error(layer, step, g, limit_s=WAIT_S):
    """Repeat the step until it raises. Returns (error, time of the error)."""
    end = time.monotonic() + limit_s
    try:
        while time.monotonic() < end:
            if not step(layer, g):
                layer.synchronize()  # raises if the operation failed on the GPU: then a wrong sum is no fault
                raise AssertionError("a wrong sum")
        layer.synchronize()
    except epmoe.EpError as e:
        return e, time.monotonic()
    raise AssertionError(f"no step raised an error within {limit_s} s")


def begin(device, mode, how, g):
    """Create a world and a layer, and run one step. Returns (world, layer, step)."""
    world = epmoe.World(None, timeout_s=WAIT_S)
    layer = make_layer(world, device, mode, how)
    step = step_of(layer, how)
    step(layer, g)
    return world, layer, step


def runs_in_a_smaller_world(rank, world_size, victim, folder, device, mode, g):
    """After a kill: the survivors form a new process group and world. True if all sums there are right."""
    others = [r for r in range(world_size) if r != victim]
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "store"), len(others))
    dist.init_process_group("gloo", store=store, rank=others.index(rank), world_size=len(others))
    world = epmoe.World(None, timeout_s=WAIT_S)
    with make_layer(world, device, mode) as layer:
        sums = [move(layer, g) for _ in range(10)]  # all 10 steps, also after a wrong sum: ranks stay in step
        layer.synchronize()
    world.close()
    return all(sums)


def killed(rank, world_size, victim, delay, how, mode, kind, folder):
    """Rank main of one kill. The survivors return what they saw."""
    gc.freeze()  # garbage collections skip the objects that exist now
    device, g = place(rank, kind), torch.Generator().manual_seed(rank)
    note = os.path.join(folder, "when")
    # The first world creates what a process creates only once, such as torch's threads for gradients on GPUs.
    world, layer, step = begin(device, mode, how, g)
    layer.finalize()
    world.close()
    before, things, names = held(), holdings(), remember_names()
    world, layer, step = begin(device, mode, how, g)
    ended = weakref.ref(world)
    world.exchange(b"go")

    def die():  # runs in a timer thread: the main thread may be anywhere in a step
        with open(note, "w") as f:
            f.write(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        threading.Timer(delay, die).start()
    error, when = until_error(layer, step, g)
    with open(note) as f:
        latency = when - float(f.read())
    text, culprit = f"{type(error).__name__}: {error}", layer.world.flight_record().splitlines()[0]
    works = float(torch.ones(1000, device=device).sum()) == 1000.0
    del layer, world, step, error
    right = runs_in_a_smaller_world(rank, world_size, victim, folder, device, mode, g)
    if not (left := kept(ended)):
        left = (left_over(before, held(), kind, maps=200) if kind == "cpu"
                else more_of_ours(things, holdings()))
    left = left and f"{left}; in all {dict(holdings() - things)}"
    return text, culprit, latency, works and right, left, names


def kills(num, ranks, kind, seed=0, say=lambda done: None):
    """Kill a rank num times. say(n) is called after each kill.

    Returns ({kind of loop: seconds after which each survivor raised, sorted}, texts of the faults found).
    """
    start = process_ranks if kind == "cpu" else run_ranks
    latencies = {how: [] for how in ("move", "train", "fuse", "decode", "balance", *FP8_RECIPES)}
    bad, files = [], shared_memory_names()
    for i in range(num):
        r = random.Random(f"{seed} {i}")
        victim, delay = r.randrange(ranks), r.random() * (0.1 if kind == "cpu" else 1.0)
        how, mode = tuple(latencies)[i % len(latencies)], r.choice(MODES)
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = start(killed, ranks, victim, delay, how, mode, kind, folder, timeout_s=HANG_S,
                                may_die=(victim,))
            except AssertionError as e:
                bad.append(f"kill {i} (rank {victim}, {how}, {mode}): {e}")
                continue
        names = set()
        for rank, result in enumerate(results):
            if rank == victim:
                continue
            text, culprit, latency, right, left, mine = result
            latencies[how].append(latency)
            names |= set(mine)
            named = text.startswith("PeerDied") and f"rank {victim} " in text and f"rank {victim} " in culprit
            if not (named and right and not left and is_soon(latency, WORST_S)):
                bad.append(f"kill {i} of rank {victim} ({how}, {mode}): rank {rank}: {result}")
        if left := (names & abstract_names()) | (shared_memory_names() - files):
            bad.append(f"kill {i}: these names still exist: {left}")
        say(i + 1)
    return {how: sorted(seconds) for how, seconds in latencies.items()}, bad


def stopped(rank, world_size, limit_s, folder, kind, how):
    """Rank main: the last rank stops itself by SIGSTOP.

    Rank 0 continues it after 1.5 s or, if folder is not empty, after all other ranks have raised.
    Returns what this rank saw, and after how many seconds.
    """
    events = Events(folder)
    device, g = place(rank, kind), torch.Generator().manual_seed(rank)
    world = epmoe.World(None, timeout_s=WAIT_S)
    layer = make_layer(world, device, "local", how)
    step = step_of(layer, how)
    pids = [int.from_bytes(b, "little") for b in world.exchange(os.getpid().to_bytes(4, "little"))]
    for _ in range(5):
        step(layer, g)
    world.exchange(b"go")
    world.set_timeout(limit_s)
    if rank == 0:
        others = range(world_size - 1 if folder else 0)
        continue_later(pids[-1], 0 if folder else 1.5, after=lambda: [events.wait(str(r)) for r in others])
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    try:
        right = all([step(layer, g) for _ in range(50)])
        layer.synchronize()
        return "nothing" if right else "a wrong sum", time.monotonic() - start
    except epmoe.EpError as e:
        seconds = time.monotonic() - start
        assert float(torch.ones(1000, device=device).sum()) == 1000.0
        return f"{type(e).__name__}: {e}", seconds
    finally:
        if folder:
            events.set(str(rank))
            events.wait(str(world_size - 1))  # a thread of rank 0 continues the last rank


def stops(ranks, kind, how):
    """Stop a rank beyond the limit, and then for a shorter time. Returns texts of the faults found."""
    start, bad, victim = process_ranks if kind == "cpu" else run_ranks, [], ranks - 1
    limit = STOP_LIMIT_S * slowness()
    with tempfile.TemporaryDirectory() as folder:
        results = start(stopped, ranks, limit, folder, kind, how, timeout_s=HANG_S)
    for rank, (text, seconds) in enumerate(results):
        if not text.startswith("EpTimeout") or f"rank {victim}" not in text:
            bad.append(f"stopped, {how}: rank {rank}: {text}")
        if rank != victim and not is_soon(seconds, limit + 2):
            bad.append(f"stopped, {how}: rank {rank} raised after {seconds:.2f} s, its limit is {limit}")
    if max(seconds for _, seconds in results[:victim]) < 0.9 * limit:
        bad.append(f"stopped, {how}: all ranks raised before the limit of {limit} s: {results}")
    results = start(stopped, ranks, WAIT_S, "", kind, how, timeout_s=HANG_S)
    for rank, (text, seconds) in enumerate(results):
        if text != "nothing":
            bad.append(f"late, {how}: rank {rank}: {text} after {seconds:.2f} s")
    if max(seconds for _, seconds in results[:victim]) < 1:
        bad.append(f"late, {how}: no rank waited: {results}")
    return bad


def main():
    on_cuda = bool(_C.HAS_CUDA) and torch.cuda.is_available()
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_cuda else "cpu")
    p.add_argument("--ranks", type=int,
                   help="default: the number of GPUs; 4 ranks share a single GPU; 4 on the CPU")
    p.add_argument("--kills", type=int, default=28)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    num_gpus = torch.cuda.device_count() if a.device == "cuda" else 1
    ranks = a.ranks or (num_gpus if num_gpus > 1 else 4)
    if ranks < 2:
        p.error("needs at least two ranks")
    if a.device == "cuda":
        share_gpus(ranks)
    from rich.console import Console
    from rich.table import Table
    from soak import progress

    with progress("kills", a.kills) as say:
        latencies, bad = kills(a.kills, ranks, a.device, a.seed, say)
    for how in ("move", "decode"):
        bad += stops(ranks, a.device, how)
    table = Table(title=f"faults on {ranks} ranks ({a.device})", show_header=False)
    table.add_row("kills", f"{a.kills}, {sum(map(len, latencies.values()))} survivors raised")
    medians = {how: seconds[len(seconds) // 2] for how, seconds in latencies.items() if seconds}
    # A rank that trains spends most of its time in torch. It sees the death at its next call of epmoe.
    for how, seconds in latencies.items():
        if seconds:
            table.add_row(f"from kill to exception, {how}",
                          f"median {medians[how] * 1e3:.1f} ms, worst {seconds[-1] * 1e3:.1f} ms")
    slow = {how: median for how, median in medians.items() if median > MEDIAN_S}
    if a.kills >= 20 and slow:
        bad.append(f"survivors of kills raised too late, medians in seconds: {slow}")
    are_stops_right = not any("kill" not in b for b in bad)
    table.add_row("stopped and late ranks", "as expected" if are_stops_right else "WRONG")
    table.add_row("verdict", "no fault" if not bad else f"{len(bad)} FAULTS (seed {a.seed})")
    Console(width=140).print(table)
    print("\n".join(bad), end="")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
