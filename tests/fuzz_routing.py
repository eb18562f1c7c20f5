"""Random routings through random layers, compared bit by bit with a short vectorised oracle.

    python tests/fuzz_routing.py --cases 200000 --seed 1
    python tests/fuzz_routing.py --seed 1 --batch 17       repeats one batch; a failure prints this command
    torchrun --nproc-per-node 4 tests/fuzz_routing.py --cases 20000 --device cuda

A batch is one layer and up to 64 routings through it. Everything in it follows from the seed and the number
of the batch. On the CPU, the ranks of a batch are threads, and several processes run batches. Under
torchrun, each process is a rank. routings.py generates the batches and contains the oracle.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback

import torch
import torch.utils.deterministic

import epmoe
from cases import share_gpus
from epmoe.testing import run_threads, set_device
from pace import HANG_S
from routings import Work, check_routing, make_batch, run_rank

BATCH_LIMIT_S = HANG_S


def run_batch(seed, number, run=None):
    """Run and check one batch. Returns the number of its routings.

    run(work) returns the results of every rank. By default, the ranks are threads on the CPU.
    """
    b, g = make_batch(seed, number)
    work = Work(b, g)
    if run is None:
        results = run_threads(lambda world: run_rank(world, torch.device("cpu"), work), b.num_ranks,
                              timeout_s=BATCH_LIMIT_S)
    else:
        results = run(work)
    for i in range(b.num_routings):
        try:
            check_routing(work, i, [r[i] for r in results])
        except AssertionError as e:
            indices = "(large)"
            if sum(idx.size for idx in work.indices[i]) < 200:
                indices = [idx.tolist() for idx in work.indices[i]]
            raise AssertionError(f"{e}\nrouting {i} of {b}\nindices by rank: {indices}") from None
    return b.num_routings


def prepare():
    """Use one thread in torch, and let torch.empty fill memory with NaN."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def worker(seed, first, step, todo, pipe):
    """Main of a worker process: run batches first, first + step, ... while routings are left to do."""
    prepare()
    number = first
    try:
        while todo.value > 0:
            n = run_batch(seed, number)
            with todo.get_lock():
                todo.value -= n
            pipe.send((number, n, None))
            number += step
    except BaseException:
        pipe.send((number, 0, traceback.format_exc()))
    pipe.close()


def fuzz(cases, seed, processes, say=print):
    """Run batches in several processes until at least `cases` routings are done, or one fails.

    Returns (number of routings, seconds, failure). failure is None or (batch, text).
    """
    context = multiprocessing.get_context("spawn")
    todo, start, done, pipes, workers = context.Value("q", cases), time.monotonic(), 0, [], []
    for i in range(processes):
        mine, theirs = context.Pipe(duplex=False)
        p = context.Process(target=worker, args=(seed, i, processes, todo, theirs), daemon=True)
        p.start()
        theirs.close()
        pipes.append(mine)
        workers.append(p)
    shown, failure, last_message, at = start, None, time.monotonic(), {}
    while pipes and failure is None:
        for pipe in multiprocessing.connection.wait(pipes, timeout=1.0):
            last_message = time.monotonic()
            try:
                number, n, text = pipe.recv()
            except EOFError:
                pipes.remove(pipe)
                continue
            at[pipe] = number
            done += n
            if text:
                failure = number, text
        now = time.monotonic()
        if now - shown > 2:
            say(f"{done} routings, {done / (now - start):.0f}/s", flush=True)
            shown = now
        if now - last_message > BATCH_LIMIT_S + 30:
            batch = max(at.values(), default=0) + processes
            failure = batch, f"no process has finished a batch for {now - last_message:.0f} s"
    for i, p in enumerate(workers):
        p.join(0 if failure else 10)
        if p.exitcode not in (0, None) and failure is None:
            failure = at.get(i, 0), f"a process ended with exit code {p.exitcode}"
        if p.is_alive():
            p.kill()
    return done, time.monotonic() - start, failure


def join_torchrun(device):
    """Join the process group of torchrun. Returns (world, torch device) of this rank."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        share_gpus(num_local)
        set_device(int(os.environ.get("LOCAL_RANK", rank)), num_local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    world = epmoe.World(timeout_s=BATCH_LIMIT_S)
    if device == "cuda":
        return world, torch.device("cuda", torch.cuda.current_device())
    return world, torch.device("cpu")


def run_batch_torchrun(world, device, seed, number):
    """Run a batch on all processes; one of them checks it. Returns (routings, None or text of a failure)."""
    import torch.distributed as dist

    rank, size = world.rank, world.size
    b, g = make_batch(seed, number, size)
    work = Work(b, g)
    try:
        mine = run_rank(world, device, work), None
    except Exception:
        mine = None, f"rank {rank}: {traceback.format_exc()}"
    results = [None] * size
    dist.all_gather_object(results, mine)
    errors = [e for _, e in results if e]
    try:
        if errors:
            raise AssertionError("\n".join(errors))
        is_checker = rank == number % size  # ranks alternate, batch by batch
        for i in range(b.num_routings if is_checker else 0):
            check_routing(work, i, [r[i] for r, _ in results])
        verdict = None
    except AssertionError as e:
        verdict = f"{e}\n{b}"
    verdicts = [None] * size
    dist.all_gather_object(verdicts, verdict)
    return b.num_routings, next((v for v in verdicts if v), None)


def fuzz_torchrun(cases, seed, device, only=None):
    """As fuzz(), but each process is a rank. If `only` is given, run this batch only. Rank 0 prints."""
    import torch.distributed as dist

    world, device = join_torchrun(device)
    rank = world.rank
    done, number, failure, start, shown = 0, only or 0, None, time.monotonic(), time.monotonic()
    while done < cases and failure is None:
        num_routings, text = run_batch_torchrun(world, device, seed, number)
        failure = (number, text) if text else None
        done, number = done + num_routings, number + 1
        if rank == 0 and time.monotonic() - shown > 2:
            print(f"{done} routings, {done / (time.monotonic() - start):.0f}/s", flush=True)
            shown = time.monotonic()
        if only is not None:
            break
    if failure is None:
        world.close()
        dist.destroy_process_group()
    return done, time.monotonic() - start, failure


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", type=int, default=20000, help="minimum number of routings")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                   help="device of the ranks under torchrun")
    p.add_argument("--processes", type=int, default=os.cpu_count(),
                   help="processes that run batches at the same time (CPU)")
    p.add_argument("--batch", type=int, help="run this batch only")
    a = p.parse_args()
    prepare()
    is_torchrun = "RANK" in os.environ
    if a.device == "cuda" and not is_torchrun:
        p.error("--device cuda needs torchrun, which starts a process for each rank")
    if is_torchrun:
        done, seconds, failure = fuzz_torchrun(a.cases, a.seed, a.device, a.batch)
    elif a.batch is not None:
        start, failure, done = time.monotonic(), None, 0
        try:
            done = run_batch(a.seed, a.batch)
        except Exception:
            failure = a.batch, traceback.format_exc()
        seconds = time.monotonic() - start
    else:
        done, seconds, failure = fuzz(a.cases, a.seed, a.processes)
    if int(os.environ.get("RANK", 0)) == 0:
        if failure:
            command = "python tests/fuzz_routing.py"
            if is_torchrun:
                command = (f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} tests/fuzz_routing.py "
                           f"--device {a.device}")
            command += f" --seed {a.seed} --batch {failure[0]}"
            print(f"{failure[1]}\nFAILED after {done} routings. To repeat: {command}", flush=True)
        else:
            print(f"{done} routings, {seconds:.1f} s, {done / seconds:.0f}/s, no difference", flush=True)
    sys.stdout.flush()
    if failure:
        os._exit(1)  # without cleanup, because ranks may still wait for each other


if __name__ == "__main__":
    main()
