"""Faults on real GPUs: `python tests/gpu_faults.py [--ranks N] [--kills N]` on a machine with at least two.

A rank is killed, stopped, or late in the middle of steps.  The survivors must raise the error that names it,
their CUDA contexts must go on working, and a smaller world of them must compute right results.  Not part of
pytest under torchrun, because torchrun ends all ranks when one dies.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import epmoe
from epmoe.testing import run_ranks


def make_layer(world):
    torch.cuda.set_device(int(os.environ["RANK"]))
    return epmoe.EPAll2AllLayer(world, 256, 512, 4, num_tot_experts=8 * world.size, device="cuda", enable_local_combine=True)


def step(layer, generator):
    """One step of identity experts; True when the result is right."""
    x = torch.randn(256, 512, device="cuda", generator=generator).bfloat16()
    idx = torch.rand(256, layer.num_experts, device="cuda", generator=generator).topk(4).indices
    rows, _, layout = layer.dispatch(x, idx)
    y = layer.combine(rows, layout)
    return x, idx, y


def is_right(x, y):
    """Identity experts: four copies of a token; partial sums are powers of two or three times it, rounded once each."""
    return bool(((y.float() - 4 * x.float()).abs() <= 0.02 * x.float().abs() * 4 + 1e-6).all())


def survive(rank, world_size, victim, when, how, folder):
    torch.cuda.set_device(rank)
    world = epmoe.World(None, timeout_s=4.0 if how == "stop" else 60.0)
    layer = make_layer(world)
    g = torch.Generator("cuda").manual_seed(rank)
    start = time.monotonic()
    try:
        for i in range(100000):
            step(layer, g)
            if rank == victim and time.monotonic() - start > when:
                with open(os.path.join(folder, "when"), "w") as f:
                    f.write(repr(time.time()))
                os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        layer.synchronize()
        return "nothing raised"
    except (epmoe.PeerDied, epmoe.EpTimeout) as e:
        raised = time.time()
        error = f"{type(e).__name__}: {e}"
    with open(os.path.join(folder, "when")) as f:
        latency = raised - float(f.read())
    torch.cuda.synchronize()
    alive = float(torch.ones(1000, device="cuda").sum()) == 1000.0
    del layer, world
    if how == "stop":
        with open(os.path.join(folder, f"rank{rank}"), "w") as f:
            f.write(f"{latency:.3f} {alive} {error}")
        return None
    # A smaller world, of the survivors alone.
    others = [r for r in range(world_size) if r != victim]
    dist.destroy_process_group()
    store = dist.FileStore(os.path.join(folder, "store"), len(others))
    dist.init_process_group("gloo", store=store, rank=others.index(rank), world_size=len(others))
    world = epmoe.World(None, timeout_s=20.0)
    right = True
    with epmoe.EPAll2AllLayer(world, 256, 512, 4, num_tot_experts=8 * world.size, device="cuda", enable_local_combine=True) as layer:
        for i in range(20):
            x, _, y = step(layer, g)
            right = right and is_right(x, y)
        layer.synchronize()
    world.close()
    return error, latency, alive, right


def late(rank, world_size, folder):
    """A rank that is late, but within the limit: no error."""
    torch.cuda.set_device(rank)
    world = epmoe.World(None, timeout_s=8.0)
    layer = make_layer(world)
    g = torch.Generator("cuda").manual_seed(rank)
    right = True
    for i in range(3):
        if rank == 1:
            time.sleep(1.5)
        x, _, y = step(layer, g)
        right = right and is_right(x, y)
    layer.synchronize()
    layer.finalize()
    world.close()
    return right


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    p.add_argument("--kills", type=int, default=5)
    options = p.parse_args()
    if options.ranks < 2:
        print("needs at least two GPUs")
        return 77
    bad, latencies = 0, []
    for i in range(options.kills):
        victim = i % options.ranks
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(survive, options.ranks, victim, 0.05 + 0.13 * (i % 7), "kill", folder, timeout_s=60, may_die=(victim,))
        for rank, result in enumerate(results):
            if rank == victim:
                continue
            error, latency, alive, right = result
            latencies.append(latency)
            ok = error.startswith("PeerDied") and f"rank {victim} " in error and alive and right and latency < 3
            bad += not ok
            if not ok:
                print(f"kill {i}: rank {rank}: {result}")
    latencies.sort()
    print(f"{options.kills} kills: {len(latencies)} survivors raised, median {latencies[len(latencies) // 2] * 1e3:.1f} ms, "
          f"worst {latencies[-1] * 1e3:.1f} ms, {bad} bad", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        right = run_ranks(late, options.ranks, folder, timeout_s=60)
    print(f"late rank: {'right' if all(right) else right}", flush=True)
    bad += not all(right)
    with tempfile.TemporaryDirectory() as folder:
        victim = options.ranks - 1
        with contextlib.suppress(AssertionError):  # the stopped rank itself is never done
            run_ranks(survive, options.ranks, victim, 0.3, "stop", folder, timeout_s=25, may_die=(victim,))
        for rank in range(victim):
            with open(os.path.join(folder, f"rank{rank}")) as f:
                text = f.read()
            latency, alive, error = text.split(" ", 2)
            ok = error.startswith("EpTimeout") and f"rank {victim} " in error and alive == "True" and 3.5 < float(latency) < 6
            bad += not ok
            print(f"stopped rank: rank {rank} raised after {latency} s (limit 4): {error}" + ("" if ok else "  WRONG"), flush=True)
    print("faults: ok" if bad == 0 else f"faults: {bad} bad")
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
