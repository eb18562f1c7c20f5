"""Random routings through random layers, compared bit by bit with a short vectorised oracle.

    python tests/fuzz_routing.py --cases 200000 --seed 1
    python tests/fuzz_routing.py --seed 1 --batch 17       repeats one batch; a failure prints this command
    python tests/fuzz_routing.py --cases 20000 --device cuda --threads 4
    torchrun --nproc-per-node 4 tests/fuzz_routing.py --cases 20000 --device cuda

A batch is one layer and up to 256 routings through it. Everything in it follows from the seed, the number of
the batch and, where that is given, the number of ranks. On the CPU, the ranks of a batch are threads, and
several processes run batches. With --threads N, N ranks are threads of one process, which keep their world
and run one batch after the other; on CUDA they share one GPU, which is much faster than processes. Under
torchrun, each process is a rank. routings.py generates the batches, routing_oracle.py checks them.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
import types

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

import epmoe
from cases import poison_memory, share_gpus, side_by_side_settings
from epmoe.testing import run_threads, set_device
from pace import HANG_S, on_one_core
from routing_oracle import check_batch
from routings import Work, make_batch, run_rank

BATCH_LIMIT_S = HANG_S
# Of a batch whose ranks are processes. They take long on one GPU, so less of their time goes to one layer.
ROUTINGS_OF_PROCESSES = 64
ALL_BATCHES_LIMIT_S = 7 * 24 * 3600.0


def run_batch(seed, number, run=None):
    """Run and check one batch. Returns the number of its routings.

    run(work) returns the results of every rank. By default, the ranks are threads on the CPU.
    """
    b, g = make_batch(seed, number)
    work = Work(b, g)
    if run is None:
        with on_one_core(b.one_core, number):
            results = run_threads(lambda world: run_rank(world, torch.device("cpu"), work), b.num_ranks,
                                  timeout_s=BATCH_LIMIT_S)
    else:
        results = run(work)
    check_batch(work, results)
    return b.num_routings


def run_in_threads(seed, numbers, num_ranks, device, report):
    """Run the batches of these numbers with threads that keep their world. Calls report(number, routings)."""
    shared = types.SimpleNamespace(number=None, work=None, results=[None] * num_ranks)

    def main(world):
        world.set_timeout(BATCH_LIMIT_S)
        while True:
            if world.rank == 0:
                shared.number = next(numbers, None)
                is_over = shared.number is None
                shared.work = None if is_over else Work(*make_batch(seed, shared.number, num_ranks))
            world.exchange(b"x")  # rank 0 has made the inputs
            if shared.work is None:
                return
            shared.results[world.rank] = run_rank(world, device, shared.work)
            world.exchange(b"x")  # all ranks have their results, and none uses the layer any more
            world.__dict__.pop("_kept", None)
            if world.rank == 0:
                check_batch(shared.work, shared.results)
                report(shared.number, shared.work.batch.num_routings)

    sys.setswitchinterval(0.0005)  # the threads wait for each other very often
    run_threads(main, num_ranks, timeout_s=ALL_BATCHES_LIMIT_S, device=device)


def worker(seed, first, step, todo, pipe, num_ranks, device):
    """Main of a worker process: run batches first, first + step, ... while routings are left to do."""
    poison_memory()
    number = first

    def numbers():
        nonlocal number
        while todo.value > 0:
            yield number
            number += step

    def report(number, n):
        with todo.get_lock():
            todo.value -= n
        pipe.send((number, n, None))

    try:
        if num_ranks:
            run_in_threads(seed, numbers(), num_ranks, device, report)
        else:
            for number in numbers():
                report(number, run_batch(seed, number))
    except BaseException:
        pipe.send((number, 0, traceback.format_exc()))
    pipe.close()


def fuzz(cases, seed, processes, say=print, num_ranks=None, device=None):
    """Run batches in several processes until at least `cases` routings are done, or one fails.

    With num_ranks, each process has a world of so many threads on the device.
    Returns (number of routings, seconds, failure). failure is None or (batch, text).
    """
    context = multiprocessing.get_context("spawn")
    todo, start, done, pipes, workers = context.Value("q", cases), time.monotonic(), 0, [], []
    for i in range(processes):
        mine, theirs = context.Pipe(duplex=False)
        p = context.Process(target=worker, daemon=True,
                            args=(seed, i, processes, todo, theirs, num_ranks, device))
        p.start()
        theirs.close()
        pipes.append(mine)
        workers.append(p)
    of_workers = list(pipes)
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
            batch = at.get(of_workers[i], i - processes) + processes  # the one after its last message
            failure = batch, f"a process ended with exit code {p.exitcode}"
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
    b, g = make_batch(seed, number, size, ROUTINGS_OF_PROCESSES)
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
        if is_checker:
            check_batch(work, [r for r, _ in results])
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


def fuzz_one(seed, number, num_ranks, device):
    """As fuzz(), but one batch in this process."""
    start, failure, done = time.monotonic(), None, 0
    try:
        if num_ranks:
            counts = []
            run_in_threads(seed, iter([number]), num_ranks, device, lambda _, n: counts.append(n))
            done = sum(counts)
        else:
            done = run_batch(seed, number)
    except Exception:
        failure = number, traceback.format_exc()
    return done, time.monotonic() - start, failure


def command_of(a, batch):
    """The command that repeats a batch."""
    options = f"--seed {a.seed} --batch {batch}"
    if a.threads or a.is_torchrun:
        options = f"--device {a.device} " + (f"--threads {a.threads} " if a.threads else "") + options
    start = f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']}" if a.is_torchrun else "python"
    return f"{start} tests/fuzz_routing.py {options}"


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", type=int, default=20000, help="minimum number of routings")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                   help="device of the ranks under torchrun or with --threads")
    p.add_argument("--threads", type=int, help="run this number of ranks as threads of one process")
    p.add_argument("--processes", type=int, help="processes that run batches at the same time: by default "
                   "as many as there are cores, on CUDA one. Several on one GPU want NVIDIA MPS")
    p.add_argument("--batch", type=int, help="run this batch only")
    a = p.parse_args()
    a.is_torchrun = "RANK" in os.environ
    if a.device == "cuda" and not a.is_torchrun and not a.threads:
        p.error("--device cuda needs --threads, or torchrun, which starts a process for each rank")
    if a.threads and a.is_torchrun:
        p.error("under torchrun each process is a rank: leave --threads out")
    return a


def main():
    a = arguments()
    poison_memory()
    device = a.device
    if a.threads and a.device == "cuda":
        side_by_side_settings()
        device = "cuda:0"
    if a.is_torchrun:
        done, seconds, failure = fuzz_torchrun(a.cases, a.seed, a.device, a.batch)
    elif a.batch is not None:
        done, seconds, failure = fuzz_one(a.seed, a.batch, a.threads, torch.device(device))
    else:
        processes = a.processes or (1 if a.device == "cuda" else os.cpu_count())
        done, seconds, failure = fuzz(a.cases, a.seed, processes, print, a.threads, torch.device(device))
    if int(os.environ.get("RANK", 0)) == 0:
        if failure:
            print(f"{failure[1]}\nFAILED after {done} routings. To repeat: {command_of(a, failure[0])}",
                  flush=True)
        else:
            print(f"{done} routings, {seconds:.1f} s, {done / seconds:.0f}/s, no difference", flush=True)
    sys.stdout.flush()
    if failure:
        os._exit(1)  # without cleanup, because ranks may still wait for each other


if __name__ == "__main__":
    main()
