"""Ranks for tests and examples: processes with a deadline, whose tracebacks are shown; threads; routings."""

import contextlib
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
import traceback

import torch
import torch.distributed as dist


def meeting_place():
    """A store of torch.distributed where ranks on this machine meet; its `port` is taken as long as it lives, so that nobody else
    can take it before the first rank comes."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def shares_gpu():
    """Whether EPMOE_SHARE_GPU=1 lets several ranks use one GPU: for development and tests."""
    return os.environ.get("EPMOE_SHARE_GPU") == "1"


def set_device(local_rank, num_local_ranks):
    """Make GPU local_rank % (number of GPUs) the current device, and return it.

    Where there are more local ranks than GPUs, ranks share GPUs.  epmoe allows that only with EPMOE_SHARE_GPU=1.  NCCL refuses
    two ranks of one host on one GPU, so each rank then gets an NCCL_HOSTID of its own, and NCCL uses sockets on the loopback
    interface.  Call it before the first NCCL communicator is made.

    Args:
        local_rank: this rank among the ranks of this machine.
        num_local_ranks: how many ranks this machine has.
    Returns: the torch.device.
    Raises RuntimeError where there is no GPU.
    Example: `device = set_device(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))`
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("there is no GPU that torch can use")
    if num_local_ranks > num_gpus:
        os.environ["NCCL_HOSTID"] = f"epmoe-rank-{local_rank}"  # also over an inherited one, which would be the same on all ranks
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device


def _rank_main(fn, rank, world_size, port, backend, args, pipe):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        if backend and "nccl" in backend:
            set_device(rank, world_size)
        if backend:
            dist.init_process_group(backend, store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=world_size)
        buffer = io.BytesIO()
        torch.save(fn(rank, world_size, *args), buffer)  # by value: this process ends before the parent looks
        pipe.send((True, buffer.getvalue()))
    except BaseException:  # shown by the parent
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()


def run_ranks(fn, world_size, *args, timeout_s=60.0, backend="gloo", may_die=()):
    """Run fn(rank, world_size, *args) in world_size processes; return the list of results.

    torch.distributed is initialised with the backend in each (None: not at all).  A rank that raises, dies
    (unless it is in may_die: then its result is None) or is not done after timeout_s fails the call, with the
    rank's traceback; no process is left.
    """
    spawn = multiprocessing.get_context("spawn")
    store, processes, pipes = meeting_place() if backend else None, [], []
    for rank in range(world_size):
        mine, theirs = spawn.Pipe(duplex=False)
        p = spawn.Process(target=_rank_main, args=(fn, rank, world_size, store and store.port, backend, args, theirs), daemon=True)
        p.start()
        theirs.close()
        processes.append(p)
        pipes.append(mine)
    deadline, results, errors = time.monotonic() + timeout_s, [None] * world_size, {}
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=min(1.0, max(0.0, deadline - time.monotonic())))
        for rank in [r for r, p in waiting.items() if p in ready]:
            try:
                ok, value = waiting.pop(rank).recv()
            except EOFError:
                if rank not in may_die:
                    errors[rank] = "the process died without a word: its stderr may have one (ranks are spawned: fn must be importable, so not from a notebook or stdin)"
                continue
            if ok:
                results[rank] = torch.load(io.BytesIO(value), weights_only=False)
            else:
                errors[rank] = value
        if errors:  # the others get a moment to fail by themselves
            deadline = min(deadline, time.monotonic() + 5)
    for rank in waiting:
        errors.setdefault(rank, f"not done after {timeout_s} s" if not errors else "ended with the others")
    for p in processes:
        p.join(0.0 if waiting else 5.0)
        if p.is_alive():
            p.kill()
            p.join()
    if errors:
        raise AssertionError("\n".join(f"rank {r}:\n{text}" for r, text in sorted(errors.items())))
    return results


# For ranks that are threads side by side on one GPU; to be set before the process uses CUDA.
SIDE_BY_SIDE = {
    # By default all streams of a process share 8 hardware queues, and a kernel waits for those before it in its queue: also for
    # a kernel of another rank, which waits for this one.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # The first use of a kernel that is loaded lazily may wait for all running kernels: again for those that wait for this rank.
    "CUDA_MODULE_LOADING": "EAGER",
}


@contextlib.contextmanager
def _side_by_side():
    """Ranks as threads on one GPU: look whether the process is prepared, and keep the garbage collector away.

    What gives CUDA memory back waits for all kernels of the process.  The collector may do that in any thread at any time, also
    while the kernels of other ranks wait for the rank of this very thread.
    """
    missing = " ".join(f"{name}={value}" for name, value in SIDE_BY_SIDE.items() if name not in os.environ)
    if missing:
        raise RuntimeError(f"ranks that are threads on one GPU can deadlock without {missing}: set it before the process uses CUDA")
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _own_stream(device):
    """A CUDA stream for this thread alone; nothing on the CPU."""
    if torch.device(device).type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


def run_threads(fn, num_ranks, *args, timeout_s=60.0, device="cpu"):
    """Run fn(world, *args) in num_ranks threads of this process, which are the ranks of one world; return the list of results.

    device: "cpu", or a GPU that all ranks then share, side by side: each rank has a CUDA stream of its own and its own part of
    the SMs, so the kernels of all ranks really run at the same time.  What one process does for all its threads limits that:
    * The variables of SIDE_BY_SIDE must be set before the process uses CUDA.  CUDA_MODULE_LOADING=LAZY is accepted, too: then let one
      rank do everything first, so that every kernel is loaded before ranks wait for each other.
    * Python's garbage collector is off while the ranks run.
    * Autograd runs the backward of all ranks in one thread for each device.  That works as long as no backward waits on the host.
    * What synchronises the device (cudaFree, torch.cuda.synchronize) waits for the other ranks' kernels, too.
    * Capture a CUDA graph on a stream of its own, with capture_error_mode="thread_local", between two world.exchange(), so that
      no other rank is in an operation.
    Raises AssertionError with the traceback of every rank that failed, or if a rank is not done after timeout_s seconds;
    RuntimeError without the variables of SIDE_BY_SIDE.
    """
    with _side_by_side() if num_ranks > 1 and torch.device(device).type == "cuda" else contextlib.nullcontext():
        return _run_threads(fn, num_ranks, args, timeout_s, device)


def _run_threads(fn, num_ranks, args, timeout_s, device):
    from .world import thread_worlds

    worlds, results, errors = thread_worlds(num_ranks, timeout_s), [None] * num_ranks, {}

    def main(rank):
        try:
            with _own_stream(device):
                results[rank] = fn(worlds[rank], *args)
        except BaseException as e:  # shown by the caller
            errors[rank] = e
            worlds[rank]._leave(False)

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(num_ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout_s)
    for world in worlds:
        if not any(t.is_alive() for t in threads):
            world._leave(False)
    if errors:
        raise AssertionError("\n".join(f"rank {r}: {''.join(traceback.format_exception(e))}" for r, e in sorted(errors.items())))
    if any(t.is_alive() for t in threads):
        raise AssertionError(f"not done after {timeout_s} s")
    return results


PATTERNS = ("uniform", "distinct", "one_expert", "one_rank", "own_rank", "heavy_drop", "all_dropped", "duplicates", "edges", "sentinels")


def routing(pattern, num_tokens, topk, num_experts, num_ranks, rank, generator):
    """[num_tokens, topk] int64 expert indices of a named pattern."""
    local = num_experts // num_ranks

    def uniform(low=0, high=num_experts):
        return torch.randint(low, high, (num_tokens, topk), generator=generator)

    idx = uniform()
    if pattern == "distinct" and topk <= num_experts:  # what a router's top-k gives
        idx = torch.rand(num_tokens, num_experts, generator=generator).topk(topk).indices
    elif pattern == "one_expert":
        hot = torch.rand(num_tokens, topk, generator=generator) < 0.9
        idx[hot] = num_experts // 2
    elif pattern == "one_rank":
        idx = uniform((num_ranks - 1) * local, num_experts)
    elif pattern == "own_rank":
        idx = uniform(rank * local, (rank + 1) * local)
    elif pattern in ("heavy_drop", "sentinels"):
        drop = torch.rand(num_tokens, topk, generator=generator) < (0.9 if pattern == "heavy_drop" else 0.3)
        idx[drop] = -1
        if pattern == "sentinels":
            idx[torch.rand(num_tokens, topk, generator=generator) < 0.3] = num_experts
    elif pattern == "all_dropped":
        idx.fill_(-1)
    elif pattern == "duplicates":
        idx = idx[:, :1].repeat(1, topk)
    elif pattern == "edges":
        idx = torch.where(idx % 2 == 0, 0, num_experts - 1)
    return idx
