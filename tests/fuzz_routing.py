"""Random routings through random layers, compared bit by bit with an oracle of a few vectorised lines.

    python tests/fuzz_routing.py --cases 200000 --seed 1
    python tests/fuzz_routing.py --seed 1 --batch 17             one batch again, as a failure prints it
    torchrun --nproc-per-node 4 tests/fuzz_routing.py --cases 20000 --device cuda

A batch is one layer and some dozen routings through it; seed and batch number decide everything in it.  On
the CPU the ranks of a batch are threads, and several processes work on batches; under torchrun every process
is a rank. routings.py makes the batches, and knows what must come out.
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
    """Run and check one batch; the number of its routings.  run(work) gives every rank's results."""
    b, g = make_batch(seed, number)
    work = Work(b, g)
    results = run(work) if run else run_threads(lambda world: run_rank(world, torch.device("cpu"), work),
                                                b.num_ranks, timeout_s=BATCH_LIMIT_S)
    for i in range(b.num_routings):
        try:
            check_routing(work, i, [r[i] for r in results])
        except AssertionError as e:
            small = [idx.tolist() for idx in work.indices[i]] if sum(idx.size
                                                                     for idx in work.indices[i]) < 200 else "(large)"
            raise AssertionError(f"{e}\nrouting {i} of {b}\nindices by rank: {small}") from None
    return b.num_routings


def prepare():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # what nobody wrote is NaN


def worker(seed, first, step, todo, pipe):
    """One process of several: batches first, first + step, ... until told to stop."""
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
    """Run batches 0, 1, ...

    in several processes until `cases` routings are done.  None, or (batch, text) of a failure.
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
    shown, failure, heard, at = start, None, time.monotonic(), {}
    while pipes and failure is None:
        for pipe in multiprocessing.connection.wait(pipes, timeout=1.0):
            heard = time.monotonic()
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
        if now - heard > BATCH_LIMIT_S + 30:
            failure = max(at.values(), default=0) + processes, "a process says nothing any more"
    for i, p in enumerate(workers):
        p.join(0 if failure else 10)
        if p.exitcode not in (0, None) and failure is None:
            failure = at.get(i, 0), f"a process ended with {p.exitcode}"
        if p.is_alive():
            p.kill()
    return done, time.monotonic() - start, failure


def fuzz_torchrun(cases, seed, device, only=None):
    """Every process is a rank; rank 0 checks and speaks."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        share_gpus(num_local)
        set_device(int(os.environ.get("LOCAL_RANK", rank)), num_local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    world = epmoe.World(timeout_s=BATCH_LIMIT_S)
    at = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    done, number, failure, start, shown = 0, only or 0, None, time.monotonic(), time.monotonic()
    while done < cases and failure is None:
        b, g = make_batch(seed, number, size)
        work = Work(b, g)
        try:
            mine = run_rank(world, at, work), None
        except Exception:
            mine = None, f"rank {rank}: {traceback.format_exc()}"
        everybody = [None] * size
        dist.all_gather_object(everybody, mine)
        errors = [e for _, e in everybody if e]
        try:
            if errors:
                raise AssertionError("\n".join(errors))
            for i in range(b.num_routings if rank == number % size
                           else 0):  # the ranks take turns in checking
                check_routing(work, i, [r[i] for r, _ in everybody])
            verdict = None
        except AssertionError as e:
            verdict = f"{e}\n{b}"
        verdicts = [None] * size
        dist.all_gather_object(verdicts, verdict)
        failure = next(((number, v) for v in verdicts if v), None)
        done, number = done + b.num_routings, number + 1
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
    p.add_argument("--cases", type=int, default=20000, help="routings, at least")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks under torchrun")
    p.add_argument("--processes", type=int, default=os.cpu_count(),
                   help="that work on batches side by side (CPU)")
    p.add_argument("--batch", type=int, help="run this batch only")
    a = p.parse_args()
    prepare()
    ranked = "RANK" in os.environ
    if a.device == "cuda" and not ranked:
        p.error("--device cuda needs torchrun, which starts a process for each rank")
    if ranked:
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
            how = (
                f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} tests/fuzz_routing.py --device {a.device}"
                if ranked
                else "python tests/fuzz_routing.py"
            )
            print(
                f"{failure[1]}\nFAILED after {done} routings; again: {how} --seed {a.seed} --batch {failure[0]}",
                flush=True,
            )
        else:
            print(f"{done} routings, {seconds:.1f} s, {done / seconds:.0f}/s, no difference", flush=True)
    sys.stdout.flush()
    if failure:
        os._exit(1)  # ranks may still wait for each other


if __name__ == "__main__":
    main()
