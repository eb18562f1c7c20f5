"""Worlds that end in different ways, on the CPU or on GPUs.

The checks are: each rank sees the right error, and no descriptor, memory, file or thread is left.
`soak.py leaks` runs all of them.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import torch

import epmoe
from cases import Case, check_case, indices_of, inputs_of, make_layer, outcome, process_ranks, run_routing
from epmoe.testing import meeting_place, run_ranks
from faults import place
from pace import HANG_S, WAIT_S, is_soon, slowness
from traces import (abstract_names, files_in_use, gpu_held, held, left_over, remember_names,
                    shared_memory_names)

ENDINGS = ("close", "kill", "exception", "collected", "left")
CASE = Case(num_local=2, topk=3, hidden=64, max_tokens=40)
GPU_BYTES = 1 << 24  # allowed difference: the driver allocates in units of 2 MiB


def starter(kind):
    """The function that starts ranks. On GPUs, ranks cannot be forked from a process that has used CUDA."""
    return process_ranks if kind == "cpu" else run_ranks


# ---- close, kill, exception, garbage collection, leave ----


def use(world, device):
    heap = epmoe.SymmetricHeap(world, 1 << 18, device)
    t = heap.malloc_symmetric((16,))
    layer = make_layer(world, device, Case(num_buffers=2))
    run_routing(layer, Case())
    return heap, t, layer


def end_one(rank, world_size, how, folder, kind):
    """Rank main: a world that ends in one way. A killed rank returns nothing.

    Returns what this process held before and after, the files that it used, how many more bytes of its GPU
    are in use, and the name of the error that it saw.
    """
    gc.freeze()  # garbage collections skip the objects that exist now
    device = place(rank, kind)
    with epmoe.World(timeout_s=WAIT_S) as world:  # creates what a process creates only once
        use(world, device)
    del world
    gc.collect()
    before, files, names, bytes_before = held(), files_in_use(), remember_names(), gpu_held(device)
    world = epmoe.World(timeout_s=WAIT_S)
    with open(os.path.join(folder, f"names{rank}"), "w") as f:
        f.write("\n".join(names))
    heap, t, layer = use(world, device)
    used = files_in_use() - files
    bad = rank == world_size - 1
    if how == "kill" and bad:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        if how in ("kill", "exception"):
            with world:
                for i in range(10**6):
                    run_routing(layer, Case(seed=i))
                    if how == "exception" and bad and i == 20:
                        idx = torch.zeros(9, 2, dtype=torch.int64, device=device)
                        layer.preprocess(idx)  # the other ranks are in this step too
                        raise KeyError("in the middle of a step")
        error = "nothing"
    except (KeyError, epmoe.EpError) as e:
        error = type(e).__name__
    if how == "close":
        layer.finalize()
        heap.close()
        world.close()
    if how == "left":
        world._leave(False)
    world.__dict__.pop("_kept", None)
    del world, heap, layer, t
    gc.collect()
    after, end = held(), time.monotonic() + WAIT_S / 2
    # The memory is freed after the last peer has closed its mapping.
    while (grew := gpu_held(device) - bytes_before) > GPU_BYTES and time.monotonic() < end:
        time.sleep(0.05)
    return before, after, sorted(f for f in used if kind == "cpu" or "epmoe" in f), grew, error


def end_all(how, ranks, kind):
    """End a world in one way of ENDINGS. Check each rank's error, and that nothing is left."""
    bad, files = ranks - 1, shared_memory_names()
    with tempfile.TemporaryDirectory() as folder:
        results = starter(kind)(end_one, ranks, how, folder, kind, may_die=(bad,) if how == "kill" else ())
        names = set()
        for rank in range(ranks):
            with open(os.path.join(folder, f"names{rank}")) as f:
                names |= set(f.read().split())
    assert len(names) == ranks, f"{how}: {names} are not the meeting places of {ranks} ranks"
    for rank, result in enumerate(results):
        if rank == bad and how == "kill":
            assert result is None
            continue
        before, after, used, grew, error = result
        wanted = {"kill": "PeerDied", "exception": "KeyError" if rank == bad else "PeerDied"}
        wanted = wanted.get(how, "nothing")
        assert error == wanted, f"{how}: rank {rank} raised {error}, wanted {wanted}"
        assert not used, f"{how}: rank {rank} used files that a kill would leave: {used}"
        assert not (left := left_over(before, after, kind)), f"{how}: rank {rank}: {left}"
        assert grew <= GPU_BYTES, f"{how}: rank {rank}: {grew} bytes of its GPU are left"
    assert not (left := names & abstract_names()), f"{how}: socket names are left: {left}"
    assert shared_memory_names() <= files, f"{how}: left in /dev/shm: {shared_memory_names() - files}"


# ---- a layer and its world are deleted while an operation waits for ranks that have left ----


def drop_one(rank, world_size, kind):
    """Rank main: the seconds that rank 0 needs to delete a layer that the other ranks have left.

    Also returns the slowness of the machine at that time.
    """
    device = place(rank, kind)
    world = epmoe.World(timeout_s=WAIT_S)
    layer = make_layer(world, device, CASE)
    run_routing(layer, CASE)
    layer.synchronize()
    world.exchange(b"x")
    if rank:
        time.sleep(slowness())  # meanwhile rank 0 enters its barrier
        return 0.0, 1.0
    start = time.monotonic()
    outcome(layer.ep_barrier_all)  # on a GPU the kernel waits, and the call returns
    world.__dict__.pop("_kept", None)
    del layer, world
    gc.collect()
    seconds = time.monotonic() - start
    return seconds, slowness()


def drop_busy(ranks, kind):
    seconds, slow = starter(kind)(drop_one, ranks, kind)[0]
    assert 0.5 < seconds < 10 * slow, f"rank 0 needed {seconds} s to delete a layer that the others had left"


# ---- fork ----


def fork_one(rank, world_size, kind):
    device = place(rank, kind)
    world = epmoe.World(timeout_s=WAIT_S)
    heap = epmoe.SymmetricHeap(world, 1 << 20, device)
    t, words = heap.malloc_symmetric((4,)), heap.malloc_symmetric((2,), torch.int64)
    layer = make_layer(world, device, CASE)
    x, weight = (t.to(device) for t in inputs_of(CASE, rank, world_size))
    idx = indices_of(CASE, rank, world_size).to(device)
    four = torch.ones(4, device=device)
    rows, _, layout = layer.dispatch(x, idx, weight)
    layer.synchronize()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls = [world.check, lambda: world.exchange(b"x"),
                 lambda: heap.malloc_symmetric((1,)), lambda: heap.free(t),
                 lambda: heap.put(t, four, 0), lambda: heap.get(four, t, 0),
                 lambda: heap.signal(words, 0, 1, 0), lambda: heap.wait(words, 0, 0), heap.barrier,
                 lambda: layer.dispatch(x, idx, weight), lambda: layer.preprocess(idx),
                 lambda: layer.combine(rows, layout), layer.ep_barrier_all,
                 lambda: epmoe.SymmetricHeap(world, 1 << 16, device)]
        kinds = [outcome(c).kind for c in calls]
        closings = [outcome(c).seconds for c in (layer.finalize, heap.close, world.close)]
        epmoe.comm.world._leave_all()  # the interpreter calls this at exit
        del calls, layer, heap, t, words, rows, layout, x, weight, idx, four
        gc.collect()
        os.write(write, repr((kinds, max(closings))).encode())
        os._exit(0)
    os.close(write)
    text = b""
    while part := os.read(read, 4096):
        text += part
    status = os.waitpid(child, 0)[1]
    kinds, slowest = eval(text.decode())
    result = run_routing(layer, CASE)  # the parent's layer still works
    heap.barrier()
    layer.synchronize()
    layer.finalize()
    heap.close()
    world.close()
    return kinds, slowest, status, result


def fork_all(ranks, kind):
    """A forked child cannot use its parent's world: every call raises EpClosed. The parent still works."""
    results = starter(kind)(fork_one, ranks, kind)
    for kinds, slowest, status, _ in results:
        text = f"a forked child: {kinds}, status {status}, {slowest} s"
        assert kinds == ["EpClosed"] * len(kinds) and status == 0 and is_soon(slowest, 1), text
    check_case([r[3] for r in results], CASE)


# ---- the interpreter exits ----

BEGIN = """
import sys, threading, time
import torch, torch.distributed as dist
import epmoe
import epmoe.testing
rank, port, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if device == "cuda":
    epmoe.testing.set_device(rank, 2)
dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", int(port)), rank=rank, world_size=2)
world = epmoe.World(timeout_s=300)
layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=4, device=device, num_buffers=2)
layer.ep_barrier_all()
layer.synchronize()

def wait(buffer):  # enter a barrier that the other rank does not enter
    start = time.monotonic()
    try:
        layer.ep_barrier_all(buffer=buffer)
        layer.synchronize()
        print("nothing", end=" ")
    except epmoe.EpError as e:
        seconds = round(time.monotonic() - start, 2)
        print(type(e).__name__, seconds, str(e).replace(" ", "_"), end=" ", flush=True)
"""

EXIT = BEGIN + """
heap = epmoe.SymmetricHeap(world, 1 << 20, device)
t = heap.malloc_symmetric((4,))
if rank == 1:
    wait(0)
print("end", time.monotonic(), flush=True)
"""

EXIT_BUSY = BEGIN + """
threading.Thread(target=wait, args=(rank,)).start()
time.sleep(0.2)
try:
    with world:
        raise KeyError("mine")
except KeyError:
    pass
print("end", time.monotonic(), flush=True)
"""


def leave(script, kind):
    """Run script as two ranks. Returns what they printed, and how long each lived after it printed "end"."""
    store = meeting_place()
    processes = [subprocess.Popen([sys.executable, "-c", script, str(r), str(store.port), kind],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for r in (0, 1)]
    ended, deadline = [None, None], time.monotonic() + HANG_S
    while None in ended and time.monotonic() < deadline:
        for i, p in enumerate(processes):
            if ended[i] is None and p.poll() is not None:
                ended[i] = time.monotonic()
        time.sleep(0.01)
    outs, needed = [], []
    for i, p in enumerate(processes):
        if p.poll() is None:
            p.kill()
        out, err = p.communicate()
        assert ended[i] is not None and p.returncode == 0, f"rank {i}: {out}\n{err[-2000:]}"
        outs.append(out)
        needed.append(ended[i] - float(out.split("end ")[1].split()[0]))
    return outs, needed


def exit_unclosed(kind):
    """Neither rank closes its world. Rank 0 exits without a hang, and rank 1 raises PeerDied for rank 0."""
    limit = {"cpu": 2, "cuda": 6}[kind]  # the destruction of a CUDA context needs time
    # On a busy machine, the exit of an interpreter can be slow. One of three exits must be quick.
    for _ in range(3):
        outs, needed = leave(EXIT, kind)
        if is_soon(max(needed), limit):
            break
    error, seconds, text = outs[1].split()[:3]
    assert error == "PeerDied" and "rank_0" in text and is_soon(float(seconds), 4 + limit), outs[1]
    assert is_soon(max(needed), limit), f"the ranks needed {needed} s to leave"


def exit_busy(kind):
    """Both ranks leave by an exception while a thread of each waits for the other rank.

    The interpreter joins this thread at exit, so it can exit only because the wait ends.
    """
    outs, needed = leave(EXIT_BUSY, kind)
    assert ["EpClosed" in out for out in outs] == [True, True] and is_soon(max(needed), 6), (outs, needed)


def every(ranks, kind):
    """Run all checks of this file once."""
    for how in ENDINGS:
        end_all(how, ranks, kind)
    drop_busy(ranks, kind)
    fork_all(ranks, kind)
    exit_unclosed(kind)
    exit_busy(kind)
