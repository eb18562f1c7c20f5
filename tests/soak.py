"""Long runs: `python tests/soak.py cycles|ops|leaks [-n N]`.

ops      runs plan, dispatch and combine many times, with random routings, sizes, dtypes, modes of combine and
         delays. The epochs of a layer start just below 2^31 or 2^32. Payloads are small integers, so every
         sum is known exactly.
cycles   creates and closes worlds, heaps and layers many times. Nothing may grow.
leaks    ends worlds in every way, from a close to kill -9. Nothing may be left.

Each run prints a table. The exit status is 1 after any fault.

On the CPU, the command starts the ranks as threads (ops) or processes (cycles, leaks). Under torchrun, each
process is a rank and uses a GPU if there is one. If there are more ranks than GPUs, ranks share GPUs:
    torchrun --nproc-per-node 4 tests/soak.py ops -n 100000
    torchrun --nproc-per-node 4 tests/soak.py cycles -n 200
With --threads N, the ranks of ops are N threads that share one GPU. This is much faster:
    python tests/soak.py ops -n 100000 --threads 4
In a module that was built with EPMOE_CHAOS=1 (make soak), ranks are also delayed inside the operations.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import time
import traceback

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

import endings
import epmoe
from cases import (Case, make_layer, poison_memory, process_ranks, run_routing, share_gpus,
                   side_by_side_settings)
from epmoe import _C
from epmoe.testing import run_threads, set_device
from pace import HANG_S, WAIT_S
from soak_ops import BATCH_LIMIT_S, SWITCH_S, make_batch, run_batch, run_batch_on_rank
from traces import gpu_held, grown, held

TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ
RANK = int(os.environ.get("RANK", 0))


# ---- ops ----


def ops(a, say):
    """Run batches until a.num operations are done. Yields the rows of the table."""
    done, seen, start = 0, collections.Counter(), time.monotonic()

    def count(b, n):
        nonlocal done
        done += n
        seen.update({b.mode: n, str(b.dtype).removeprefix("torch."): n, f"over 2^{b.epoch.bit_length()}": n,
                     f"{b.num_ranks} ranks": n})
        say(done)

    def batches(world, device, count):
        poison_memory()
        number, num_ops = 0, 0
        while num_ops < a.num:
            b = make_batch(a.seed, number, world.size, a.steps, device.type == "cuda")
            n = run_batch_on_rank(world, device, b)
            world.__dict__.pop("_kept", None)
            count(b, n)
            number, num_ops = number + 1, num_ops + n

    if TORCHRUN:
        with torchrun_world() as (world, device):
            batches(world, device, count)
    elif a.threads:
        def main_of_thread(world):
            world.set_timeout(BATCH_LIMIT_S)
            batches(world, torch.device("cuda", 0), count if world.rank == 0 else lambda b, n: None)

        side_by_side_settings()
        sys.setswitchinterval(SWITCH_S)
        run_threads(main_of_thread, a.threads, timeout_s=3600, device="cuda:0")
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(a.processes, context) as pool:
            number, running = 0, set()
            while done < a.num:
                while len(running) < 2 * a.processes:
                    running.add(pool.submit(run_batch, a.seed, number, a.steps))
                    number += 1
                first = concurrent.futures.FIRST_COMPLETED
                ended, running = concurrent.futures.wait(running, return_when=first)
                for future in ended:
                    count(*future.result())
            pool.shutdown(cancel_futures=True)
    seconds = time.monotonic() - start
    yield "operations", f"{done}, every sum right"
    yield "operations a second", f"{done / seconds:.0f}"
    yield "delays", f"between calls{' and inside them' if _C.CHAOS else ''}"
    yield "of them", ", ".join(f"{k} {v}" for k, v in sorted(seen.items()))


# ---- cycles ----


def one_life(world, device, number):
    """Create a heap, a tensor and a layer. The number decides whether they are used, and whether closed."""
    heap = epmoe.SymmetricHeap(world, 1 << 18, device)
    t = heap.malloc_symmetric((16,))
    options = {} if number % 3 else {"heap": heap}
    layer = make_layer(world, device, Case(num_buffers=1 + number % 2), **options)
    if number % 10 == 0:
        run_routing(layer, Case())
    layer.ep_barrier_all()
    if number % 2:
        layer.finalize()
        heap.free(t)
        heap.close()
    if number % 2 == 0 and world.group is not None:
        heap.barrier()  # a rank must not delete memory that another rank still writes to


def live(num, device, new_world, say):
    """Run cycles in this process. Returns what it held before and after the last num cycles.

    Other cycles run first, until malloc has reached a steady state: as many as num, at least 20, at most
    2000.
    """
    warm, marks = min(max(20, num), 2000), []
    for number in range(warm + num):
        world = new_world()
        one_life(world, device, number)
        world.close() if number % 4 else world._leave(False)
        world.__dict__.pop("_kept", None)
        del world
        if number + 1 in (warm, warm + num):
            marks.append(held() | {"gpu": gpu_held(device)})
        say(number + 1 - warm)
    return marks


def live_as_process(rank, world_size, num):
    """Rank main on the CPU. Rank 0 shows its progress."""
    with progress("cycles", num, rank == 0) as say:
        return live(num, torch.device("cpu"), lambda: epmoe.World(timeout_s=WAIT_S), say)


def cycles(a, say):
    """Run a.num cycles on each rank. Yields the rows of the table."""
    start = time.monotonic()
    if TORCHRUN:
        with torchrun_world() as (world, device):
            marks = [live(a.num, device, lambda: epmoe.World(timeout_s=120), say)]
    else:
        marks = process_ranks(live_as_process, a.ranks, a.num, timeout_s=HANG_S + a.num)
    yield "cycles", f"{a.num}, {a.num / (time.monotonic() - start):.0f} a second"
    for rank, (before, after) in enumerate(marks):
        faults = grown(before, after, maps=8, rss_kib=a.rss_kib)
        if after["gpu"] > before["gpu"] + (1 << 24):
            faults += f", GPU bytes of all processes: {before['gpu']} became {after['gpu']}"
        assert not faults, f"rank {rank if len(marks) > 1 else RANK}: {faults}"
    yield "growth", ", ".join(f"{k} {after[k] - before[k]}" for k in after) + " (rss in KiB)"


# ---- leaks ----


def leaks(a, say):
    """Try all endings a.num times. Yields the row of the table."""
    ranks = 3 if a.device == "cpu" else max(2, torch.cuda.device_count())
    if a.device == "cuda":
        share_gpus(ranks)
    for number in range(a.num):
        endings.every(ranks, a.device)
        say(number + 1)
    ways = ", ".join((*endings.ENDINGS, "deleted while busy", "forked", "interpreter exit"))
    yield "endings", f"{a.num} of each ({ways}): nothing left"


# ---- the command ----


@contextlib.contextmanager
def torchrun_world():
    """The world and the device of this process under torchrun."""
    import torch.distributed as dist

    on_cuda = bool(_C.HAS_CUDA) and torch.cuda.is_available() and os.environ.get("EPMOE_BACKEND") != "cpu"
    device = torch.device("cpu")
    if on_cuda:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        share_gpus(num_local)
        device = set_device(int(os.environ.get("LOCAL_RANK", RANK)), num_local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    world = epmoe.World(timeout_s=BATCH_LIMIT_S)
    with world:
        yield world, device
    world.close()
    dist.destroy_process_group()


@contextlib.contextmanager
def progress(what, total, shown=True):
    """Yields say(done), which updates a progress bar. The bar is shown only on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not shown or not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                epilog="\n".join(__doc__.splitlines()[2:]),
                                formatter_class=argparse.RawTextHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    for name, num, text in (("ops", 1_000_000, "operations of each rank"), ("cycles", 10_000, "cycles"),
                            ("leaks", 10, "how many times each ending is tried")):
        s = sub.add_parser(name)
        s.add_argument("-n", "--num", type=int, default=num, help=f"{text} (default {num})")
        s.add_argument("--seed", type=int, default=0)
        if name == "ops":
            s.add_argument("--steps", type=int, default=1000, help="steps with one layer")
            s.add_argument("--processes", type=int, default=os.cpu_count(),
                           help="processes that run batches at the same time (CPU)")
            s.add_argument("--threads", type=int, help="run this number of ranks as threads on one GPU")
        if name == "leaks":
            s.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                           help="cuda: as many ranks as there are GPUs")
        if name == "cycles":
            s.add_argument("--ranks", type=int, default=2)
            s.add_argument("--rss-kib", type=int, default=1024,
                           help="allowed growth of a process in KiB (default 1024)")
    a = p.parse_args()
    if TORCHRUN and a.what == "leaks":
        p.error("leaks kills ranks, and torchrun would end the others: run it without torchrun")
    from rich.console import Console
    from rich.table import Table

    start, code, rows = time.monotonic(), 0, []
    try:
        with progress(a.what, a.num, RANK == 0 and not (a.what == "cycles" and not TORCHRUN)) as say:
            rows += globals()[a.what](a, say)
        verdict = "no fault"
    except Exception:
        code, verdict = 1, f"FAULT (seed {a.seed}):\n{traceback.format_exc()}"
    if RANK == 0 or code:
        table = Table(title=f"soak {a.what}", show_header=False)
        for row in (*rows, ("seconds", f"{time.monotonic() - start:.1f}"),
                    ("verdict", verdict.splitlines()[0])):
            table.add_row(*row)
        Console(width=140).print(table)
        if code:
            print(verdict, flush=True)
    sys.stdout.flush()
    if code:
        os._exit(1)  # without cleanup, because ranks may still wait for each other
    return 0


if __name__ == "__main__":
    sys.exit(main())
