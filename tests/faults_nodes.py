"""Ranks that die, stop or cannot be reached, on two nodes with network namespaces of their own.

    python tests/faults_nodes.py [--each N] [--kinds rank,node,cut,stop]

Each node has two ranks. Node 0 is in the namespace of this program, node 1 in a second one. A pair of virtual
interfaces connects them: 10.9.0.1 and 10.9.0.2. So nothing passes between the nodes but through that link.
All ranks run a loop of layers. At a random moment of it

rank   a random rank is killed by SIGKILL,
node   both ranks of a random node are killed,
cut    the link goes down,
stop   a random rank is stopped for longer than a death takes to be seen, and then continued.

After a kill, each surviving rank must raise PeerDied within 3 s. The error names the dead ranks. Then the
survivors create new nodes, and the sums there must be right. After a cut, each rank must raise PeerDied
within 5 s, and the error names the other node. After a stop, no rank may raise an error, and all sums must be
right. No process, shared memory or name may be left. The table shows how long after the fault the ranks
raised. The exit status is 1 if epmoe did anything else.

It starts itself again with `unshare`, which needs user namespaces.
"""

import argparse
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

import epmoe
from cases import MODES, process_ranks
from faults import WORST_S, make_layer, move, until_error
from pace import HANG_S, WAIT_S, Events, continue_later, is_soon, slowness, wait_until
from soak import progress
from traces import abstract_names, remember_names, shared_memory_names

UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
CLONE_NEWNET = 0x40000000
LOCAL, RANKS = 2, 4  # ranks of a node, and of both
STORE = "10.9.0.1"
CUT_S = 5.0  # 2 s of silence, which a kernel notices at its next probe, and 1 s for the store beyond the cut
STOP_S = WORST_S + 1
STEPS_AFTER = 20  # after a stop
INSIDE = "EPMOE_FAULTS_INSIDE"  # set where this program is in its own namespaces


def ip(*arguments, of=None):
    enter = [] if of is None else ["nsenter", "--target", str(of), "--net"]
    subprocess.run([*enter, "ip", *arguments], check=True, timeout=HANG_S)


@contextlib.contextmanager
def two_namespaces():
    """Yield the path of the namespace of node 1. The link is `v0` here and `v1` there."""
    other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    path = f"/proc/{other.pid}/ns/net"
    try:
        wait_until(lambda: os.readlink(path) != os.readlink("/proc/self/ns/net"), "the second namespace")
        ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
        ip("link", "set", "v1", "netns", str(other.pid))
        for name, address, of in (("v0", f"{STORE}/24", None), ("v1", "10.9.0.2/24", other.pid)):
            ip("addr", "add", address, "dev", name, of=of)
            ip("link", "set", name, "up", of=of)
            ip("link", "set", "lo", "up", of=of)
        yield path
    finally:
        other.kill()
        other.wait()


def enter(path):
    """Move this process to a network namespace. Sockets that are open stay where they are."""
    fd = os.open(path, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(fd)


# ---- what a rank does ----


def join(port, name, rank, size):
    """Create the default process group of torch. The store is in the program that started the ranks."""
    store = dist.PrefixStore(name, dist.TCPStore(STORE, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def loop(layer, kind, g):
    """Run layers until the fault. Returns (name and text of the error, time of the error)."""
    if kind == "stop":
        right = all([move(layer, g) for _ in range(STEPS_AFTER)])
        return "nothing" if right else "a wrong sum", time.monotonic()
    error, when = until_error(layer, move, g)
    return f"{type(error).__name__}: {error}", when


def begin_fault(nodes, kind, victims, delay, events):
    """Start a thread that causes the fault after a delay, if this rank has to do it."""
    pids = [int.from_bytes(b, "little") for b in nodes.exchange(os.getpid().to_bytes(4, "little"))]
    events.set(f"{nodes.rank} is ready")
    if kind in ("rank", "node") and nodes.rank == victims[0]:
        def die():  # the main thread may be anywhere in a step
            write_time(events)
            for victim in reversed(victims):
                os.kill(pids[victim], signal.SIGKILL)

        threading.Timer(delay, die).start()
    elif kind == "stop" and nodes.rank == victims[0]:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    elif kind == "stop" and nodes.rank == (victims[0] + 1) % RANKS:
        continue_later(pids[victims[0]], STOP_S)


def write_time(events):
    with open(os.path.join(events.folder, "time"), "w") as f:
        f.write(repr(time.monotonic()))


def rank_main(rank, size, path, port, folder, kind, victims, delay, mode):
    """Returns (what this rank raised, seconds after the fault, ranks that it says are lost, whether its sums
    in new nodes are right, names that it has made).
    """
    if rank >= LOCAL:
        enter(path)
    os.environ.update(GLOO_SOCKET_IFNAME=f"v{rank // LOCAL}", WORLD_SIZE=str(size))
    events, g = Events(folder), torch.Generator().manual_seed(rank)
    join(port, folder, rank, size)
    nodes = epmoe.Nodes(None, LOCAL, timeout_s=WAIT_S)
    layer = make_layer(nodes, torch.device("cpu"), mode)
    move(layer, g)
    names = remember_names()
    begin_fault(nodes, kind, victims, delay, events)
    text, when = loop(layer, kind, g)
    if kind == "stop":
        layer.finalize()
        nodes.close()
        return text, 0.0, [], True, names
    with open(os.path.join(folder, "time")) as f:
        latency = when - float(f.read())
    lost = nodes.lost_ranks()
    with contextlib.suppress(epmoe.EpError):
        nodes.close()
    right = kind == "cut" or goes_on(rank, [r for r in range(size) if r not in victims], port, folder, g)
    return text, latency, lost, right, names


def goes_on(rank, others, port, folder, g):
    """The survivors make new nodes. Returns whether their sums are right there."""
    dist.destroy_process_group()
    join(port, folder + " again", others.index(rank), len(others))
    local = LOCAL if len(others) == LOCAL else 1  # three ranks are three nodes, of which two are on one host
    with epmoe.Nodes(None, local, timeout_s=WAIT_S) as nodes:
        layer = make_layer(nodes, torch.device("cpu"), "local")
        right = all([move(layer, g) for _ in range(5)])
        layer.finalize()
    dist.destroy_process_group()
    return right


# ---- the program ----


def cut_later(events, delay):
    """Start a thread that takes the link down once all ranks run."""
    def cut():
        for rank in range(RANKS):
            events.wait(f"{rank} is ready")
        time.sleep(delay)
        write_time(events)
        ip("link", "set", "v0", "down")

    thread = threading.Thread(target=cut, daemon=True)
    thread.start()
    return thread


def wrong(kind, victims, rank, seen):
    """What is wrong with what a rank has seen, or ""."""
    text, latency, lost, right, _ = seen
    if kind == "stop":
        return "" if text == "nothing" else text
    dead = list(victims) if kind != "cut" else [r for r in range(RANKS) if r // LOCAL != rank // LOCAL]
    node = dead[0] // LOCAL
    wanted = [f"rank {dead[0]} " if kind == "rank" else f"node {node} "]
    if kind == "node" and slowness() > 2:  # one of two dead processes may have closed its connections first
        wanted += [f"rank {r} " for r in dead]
    is_named = text.startswith("PeerDied") and any(w in text for w in wanted) and lost == dead
    if kind == "cut":
        is_named = is_named and f"node {node} (ranks {dead[0]} to {dead[1]}) cannot be reached" in text
    return "" if is_named and right and is_soon(latency, CUT_S if kind == "cut" else WORST_S) else repr(seen)


def run(kind, number, seed, path, port):
    """Cause one fault. Returns (seconds until each rank raised, texts of what is wrong)."""
    r = random.Random(f"{seed} {kind} {number}")
    node, rank = r.randrange(2), r.randrange(RANKS)
    victims = {"rank": (rank,), "stop": (rank,), "cut": ()}.get(kind, (LOCAL * node, LOCAL * node + 1))
    files = shared_memory_names()
    with tempfile.TemporaryDirectory() as folder:
        delay, mode = r.random() * 0.3, r.choice(MODES)
        thread = cut_later(Events(folder), delay) if kind == "cut" else None
        try:
            results = process_ranks(rank_main, RANKS, path, port, folder, kind, victims, delay, mode,
                                    backend=None, may_die=() if kind == "stop" else victims)
        except AssertionError as error:
            return [], [f"{kind} {number} {victims}: {error}"]
        finally:
            if thread is not None:
                thread.join(HANG_S)
                ip("link", "set", "v0", "up")
    seen = {rank: result for rank, result in enumerate(results)
            if kind == "stop" or rank not in victims}
    bad = [f"{kind} {number} {victims}: rank {rank}: {text}" for rank, result in seen.items()
           if (text := wrong(kind, victims, rank, result))]
    names = {name for result in seen.values() for name in result[4]}
    if left := (names & abstract_names()) | (shared_memory_names() - files):
        bad.append(f"{kind} {number}: these names still exist: {left}")
    return [] if kind == "stop" else [result[1] for result in seen.values()], bad


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--each", type=int, default=50, help="faults of each kind (default 50)")
    p.add_argument("--kinds", type=lambda text: text.split(","), default=["rank", "node", "cut", "stop"])
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    if INSIDE not in os.environ:
        more = {INSIDE: "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch warns of addresses without names
        more["EPMOE_NODE_TIMEOUT_S"] = ""  # the default of 2 s, which the limit after a cut needs
        os.execvpe(UNSHARE[0], [*UNSHARE, sys.executable, *sys.argv], os.environ | more)
    from rich.console import Console
    from rich.table import Table

    seconds, bad, done = {kind: [] for kind in a.kinds}, [], 0
    with two_namespaces() as path, progress("faults", a.each * len(a.kinds)) as say:
        store = dist.TCPStore(STORE, 0, is_master=True, wait_for_workers=False)
        for kind in a.kinds:
            for number in range(a.each):
                latencies, texts = run(kind, number, a.seed, path, store.port)
                seconds[kind] += latencies
                bad += texts
                done += 1
                say(done)
    table = Table(title="faults on 2 nodes of 2 ranks, in network namespaces", show_header=False)
    for kind, found in seconds.items():
        found.sort()
        text = "nobody raised"
        if found:
            text = (f"{len(found)} ranks raised, median {found[len(found) // 2]:.3f} s, "
                    f"worst {found[-1]:.3f} s")
        table.add_row(f"{kind}, {a.each} times", text)
    table.add_row("verdict", "no fault" if not bad else f"{len(bad)} FAULTS (seed {a.seed})")
    Console(width=100).print(table)
    print("\n".join(bad), end="")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
