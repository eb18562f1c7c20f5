"""Ranks for tests and examples: processes with a deadline, threads, shared GPUs, and named routings."""

import contextlib
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from .comm.rendezvous import environment
from .comm.world import World, thread_worlds

# No rank goes on, and perhaps ends, while others still connect to it.
_INIT_BARRIER = {"TORCH_DIST_INIT_BARRIER": "1"}
_GRACE_S = 5.0  # for the other ranks to fail by themselves after the first has failed
_NO_RESULT = ("the process ended without a result: its stderr may say why (ranks are spawned, so fn must be "
              "importable, and not from a notebook or stdin)")
# For ranks that are threads side by side on one GPU.  Set them before the process uses CUDA.
SIDE_BY_SIDE = {
    # By default all streams of a process share 8 hardware queues.  A kernel waits for the kernels before it
    # in its queue, also for a kernel of another rank, which waits for this rank: a deadlock.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # The first use of a kernel that CUDA loads lazily may wait for all running kernels: the same deadlock.
    "CUDA_MODULE_LOADING": "EAGER",
}


def meeting_place() -> dist.TCPStore:
    """Open a store of torch.distributed where ranks on this machine can meet.

    The store's port is taken as long as the store lives, so no other program can take it before the first
    rank connects.

    Returns:
        A TCPStore that listens on 127.0.0.1 and on no other interface; its `port` is what the ranks need.

    Examples:
        >>> from epmoe.testing import meeting_place
        >>> meeting_place().port > 0
        True
    """
    with socket.create_server(("127.0.0.1", 0)) as server:  # the store by itself would take all interfaces
        return dist.TCPStore("127.0.0.1", server.getsockname()[1], is_master=True, wait_for_workers=False,
                             master_listen_fd=os.dup(server.fileno()))


def _end_with_parent() -> None:
    """Start a thread that kills this process when its parent has ended, however the parent ended."""

    def main() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=main, daemon=True, name="epmoe parent").start()


def _rank_main(fn: Callable[..., Any], rank: int, world_size: int, port: int, backend: str | None,
               args: tuple[Any, ...], pipe: Connection) -> None:
    _end_with_parent()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        if backend and "nccl" in backend:
            set_device(rank, world_size)
        if backend:
            store = dist.TCPStore("127.0.0.1", port)
            with environment(_INIT_BARRIER):
                dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        buffer = io.BytesIO()
        # by value: this process may end before the parent reads
        torch.save(fn(rank, world_size, *args), buffer)
        pipe.send((True, buffer.getvalue()))
    except BaseException:  # the parent shows it
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0,
              backend: str | None = "gloo", may_die: Collection[int] = ()) -> list[Any]:
    """Run a function in several processes, one for each rank.  No process is left afterwards.

    This holds also after Ctrl-C, and when this process is killed: the ranks then end by themselves.  A rank
    may start processes of its own, for example the workers of a DataLoader.

    A script must call it under `if __name__ == "__main__":`, because spawned processes import the script.

    Args:
        fn: Called as fn(rank, world_size, *args) in each process.  The processes are spawned, so fn must be
            importable, and the result must be something that torch.save takes.
        world_size: The number of processes.
        *args: Passed to fn; must be picklable.
        timeout_s: Seconds after which ranks that are still running are killed.
        backend: Of torch.distributed, which is initialized in each process: "gloo", "nccl",
            "cpu:gloo,cuda:nccl".  None: not initialized.
        may_die: Ranks whose process may end without a result; their result is then None.

    Returns:
        A list of the results, in rank order.

    Raises:
        AssertionError: When a rank raises, dies or does not finish in time.  The message has each such rank's
            traceback.  After the first failure the other ranks have 5 s to end by themselves.

    Examples:
        >>> import operator
        >>> from epmoe.testing import run_ranks
        >>> run_ranks(operator.add, 2, backend=None)  # rank + world_size
        [2, 3]
    """
    spawn = multiprocessing.get_context("spawn")
    store = meeting_place() if backend else None
    processes, pipes, is_done = [], [], False
    try:
        for rank in range(world_size):
            mine, theirs = spawn.Pipe(duplex=False)
            args_of_rank = (fn, rank, world_size, store and store.port, backend, args, theirs)
            # Not a daemon: such a process may have no children, and a DataLoader with workers needs some.
            processes.append(spawn.Process(target=_rank_main, args=args_of_rank))  # before Ctrl-C can come
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        results, errors, waiting = _collect(pipes, timeout_s, may_die)
        is_done = not waiting
    finally:  # also after Ctrl-C
        for p in processes:
            if p.pid is None:
                continue  # it has not started
            p.join(_GRACE_S if is_done else 0.0)
            if p.is_alive():
                p.kill()
                p.join()
    for rank in waiting:
        errors.setdefault(rank,
                          "killed after another rank had failed" if errors
                          else f"not done after {timeout_s} s")
    if errors:
        raise AssertionError("\n".join(f"rank {r}:\n{text}" for r, text in sorted(errors.items())))
    return results


def _collect(pipes: list[Connection], timeout_s: float,
             may_die: Collection[int]) -> tuple[list[Any], dict[int, str], dict[int, Connection]]:
    """Receive what the ranks send.

    Return the results, {rank: error}, and the ranks that are still running.
    """
    deadline = time.monotonic() + timeout_s
    results = [None] * len(pipes)
    errors = {}
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        seconds = min(1.0, max(0.0, deadline - time.monotonic()))
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=seconds)
        for rank in [r for r, p in waiting.items() if p in ready]:
            try:
                ok, value = waiting.pop(rank).recv()
            except EOFError:
                if rank not in may_die:
                    errors[rank] = _NO_RESULT
                continue
            if ok:
                results[rank] = torch.load(io.BytesIO(value), weights_only=False)
            else:
                errors[rank] = value
        if errors:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return results, errors, waiting


def run_threads(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0,
                device: torch.device | str = "cpu") -> list[Any]:
    """Run a function in several threads of this process, which are the ranks of one world.

    Python's garbage collector is off while the ranks run: a collection while torch reads the state of a
    random number generator would deadlock with another thread that reads it.

    On a GPU the ranks share it, side by side.  Each rank has a CUDA stream of its own and its own part of the
    SMs, so the kernels of all ranks really run at the same time.  One process for several ranks has limits:

    - The variables of epmoe.testing.SIDE_BY_SIDE must be set before the process uses CUDA.
      CUDA_MODULE_LOADING=LAZY is accepted, too.  Then let one rank do everything first, so that every kernel
      is loaded before ranks wait for each other.
    - Autograd has one thread for each GPU, which runs the backward of all ranks.  No backward may wait on the
      host.
    - What synchronises the GPU (cudaFree, torch.cuda.synchronize) waits for the kernels of all ranks.
    - Do not replay CUDA graphs while other ranks are in an operation: a graph may then not start before the
      kernels of another rank end, which wait for this rank.  The operation ends with EpTimeout.  Ranks that
      replay graphs should be processes under NVIDIA MPS.
    - Capture a CUDA graph on a stream of its own, with capture_error_mode="thread_local", between two calls
      of world.exchange(), so that no other rank is in an operation.

    Args:
        fn: Called as fn(world, *args) in each thread, with the thread's World.
        num_ranks: The number of threads, 1 to 8.
        *args: Passed to fn.
        timeout_s: Seconds that each wait for a thread may take; also the world's timeout.
        device: "cpu", or a GPU, which becomes each thread's current device.

    Returns:
        A list of the results, in rank order.

    Raises:
        AssertionError: When a rank raises or does not finish in time.  The message has each rank's traceback.
        ValueError: For a number of ranks outside 1 to 8.
        RuntimeError: For several ranks on a GPU without the variables of SIDE_BY_SIDE.

    Examples:
        >>> from epmoe.testing import run_threads
        >>> run_threads(lambda world: world.rank, 3)
        [0, 1, 2]
    """
    shares = num_ranks > 1 and torch.device(device).type == "cuda"
    with _side_by_side() if shares else collector_off():
        return _run_threads(fn, num_ranks, args, timeout_s, device)


def _run_threads(fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout_s: float,
                 device: torch.device | str) -> list[Any]:
    worlds = thread_worlds(num_ranks, timeout_s)
    results = [None] * num_ranks
    errors = {}

    def main(rank: int) -> None:
        try:
            with own_stream(device):
                results[rank] = fn(worlds[rank], *args)
        except BaseException as e:  # the caller shows it
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
        texts = {r: "".join(traceback.format_exception(e)) for r, e in sorted(errors.items())}
        raise AssertionError("\n".join(f"rank {r}: {text}" for r, text in texts.items()))
    if any(t.is_alive() for t in threads):
        raise AssertionError(f"not done after {timeout_s} s")
    return results


def shares_gpu() -> bool:
    """Return whether EPMOE_SHARE_GPU=1 allows several ranks on one GPU, for development and tests.

    Returns:
        True or False.

    Examples:
        >>> from epmoe.testing import shares_gpu
        >>> type(shares_gpu())
        <class 'bool'>
    """
    return os.environ.get("EPMOE_SHARE_GPU") == "1"


def set_device(local_rank: int, num_local_ranks: int) -> torch.device:
    """Make a GPU of this machine the current device of this rank.

    With more local ranks than GPUs, ranks share GPUs.  epmoe allows that only with EPMOE_SHARE_GPU=1 on all
    ranks.  NCCL refuses two ranks of one host on one GPU.  Therefore each rank then gets an NCCL_HOSTID of
    its own, and NCCL uses sockets on the loopback interface.  Call this before the first NCCL communicator is
    created.

    Args:
        local_rank: The number of this rank on this machine.
        num_local_ranks: The number of ranks on this machine.

    Returns:
        The torch.device of GPU local_rank % (number of GPUs).

    Raises:
        RuntimeError: Without a GPU that torch can use.

    Examples:
        >>> import torch
        >>> from epmoe.testing import set_device
        >>> device = set_device(0, 1) if torch.cuda.is_available() else torch.device("cpu")
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("there is no GPU that torch can use")
    if num_local_ranks > num_gpus:
        # An inherited NCCL_HOSTID is replaced: all ranks would have the same.
        os.environ["NCCL_HOSTID"] = f"epmoe-rank-{local_rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Return a context manager that stops Python's garbage collector in this process.

    Yields:
        Nothing.

    Examples:
        >>> import gc
        >>> from epmoe.testing import collector_off
        >>> with collector_off():
        ...     gc.isenabled()
        False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _side_by_side() -> Iterator[None]:
    """Check that this process is prepared for ranks as threads on one GPU, and stop the garbage collector.

    What frees CUDA memory waits for all kernels of the process.  The collector may free memory in any thread
    at any time, also while kernels of other ranks wait for the rank of this very thread.
    """
    missing = " ".join(f"{name}={value}" for name, value in SIDE_BY_SIDE.items() if name not in os.environ)
    if missing:
        raise RuntimeError(f"ranks that are threads on one GPU can deadlock without {missing}: set it before "
                           "the process uses CUDA")
    gc.collect()
    with collector_off():
        yield


@contextlib.contextmanager
def own_stream(device: torch.device | str) -> Iterator[None]:
    """Return a context manager that gives this thread a CUDA stream of its own.  On the CPU it does nothing.

    Args:
        device: The GPU, which becomes the current device of this thread, or "cpu".

    Yields:
        Nothing.

    Examples:
        >>> from epmoe.testing import own_stream
        >>> with own_stream("cpu"):
        ...     pass
    """
    if torch.device(device).type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


PATTERNS = ("uniform", "distinct", "one_expert", "one_rank", "own_rank", "heavy_drop", "all_dropped",
            "duplicates",
            "edges", "sentinels")


def routing(pattern: str, num_tokens: int, topk: int, num_experts: int, num_ranks: int, rank: int,
            generator: torch.Generator) -> torch.Tensor:
    """Return expert indices of a named pattern.

    Args:
        pattern: One of PATTERNS.  "uniform": any expert; "distinct": as a router's top-k, no expert twice in
            a token; "one_expert": 90 % of the choices to expert E // 2; "one_rank": all to the last rank;
            "own_rank": all to this rank; "heavy_drop": 90 % dropped; "all_dropped"; "duplicates": a token's
            choices are all the same; "edges": only the first and the last expert; "sentinels": 30 % -1, then
            30 % E, both dropped.
        num_tokens: T.
        topk: K.
        num_experts: E.
        num_ranks: W.
        rank: This rank, for "own_rank".
        generator: A torch.Generator on the CPU.

    Returns:
        [T, K] int64 on the CPU.

    Examples:
        >>> import torch
        >>> from epmoe.testing import routing
        >>> routing("all_dropped", 2, 3, 8, 2, 0, torch.Generator())
        tensor([[-1, -1, -1],
                [-1, -1, -1]])
    """
    local = num_experts // num_ranks

    def uniform(low: int = 0, high: int = num_experts) -> torch.Tensor:
        return torch.randint(low, high, (num_tokens, topk), generator=generator, device="cpu")

    def random(columns: int) -> torch.Tensor:
        return torch.rand(num_tokens, columns, generator=generator, dtype=torch.float32, device="cpu")

    def share(part: float) -> torch.Tensor:
        return random(topk) < part

    idx = uniform()
    if pattern == "distinct" and topk <= num_experts:
        idx = random(num_experts).topk(topk).indices
    elif pattern == "one_expert":
        idx[share(0.9)] = num_experts // 2
    elif pattern == "one_rank":
        idx = uniform((num_ranks - 1) * local, num_experts)
    elif pattern == "own_rank":
        idx = uniform(rank * local, (rank + 1) * local)
    elif pattern == "heavy_drop":
        idx[share(0.9)] = -1
    elif pattern == "sentinels":
        idx[share(0.3)] = -1
        idx[share(0.3)] = num_experts
    elif pattern == "all_dropped":
        idx.fill_(-1)
    elif pattern == "duplicates":
        idx = idx[:, :1].repeat(1, topk)
    elif pattern == "edges":
        idx = torch.where(idx % 2 == 0, 0, num_experts - 1)
    return idx
