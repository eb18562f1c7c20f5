"""Two nodes with network namespaces of their own, for test_node_network.py.

    unshare --user --map-root-user --net --mount python tests/node_network.py

Node 0 is in the namespace of this program, node 1 in a second one. A pair of virtual interfaces connects
them: 10.9.0.1 and 10.9.0.2. Prints as JSON what each rank has seen after the link was cut.
"""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

import torch.distributed as dist

import epmoe
from cases import outcome, process_ranks
from pace import HANG_S, WAIT_S, Events, wait_until

CLONE_NEWNET = 0x40000000
LOCAL = 2  # ranks of a node
PORT = 29511  # free: nobody else is in the namespace


def ip(*arguments, of=None):
    enter = [] if of is None else ["nsenter", "--target", str(of), "--net"]
    subprocess.run([*enter, "ip", *arguments], check=True, timeout=HANG_S)


@contextlib.contextmanager
def two_namespaces():
    """Yield the path of the namespace of node 1. The link is `v0` here and `v1` there."""
    other = subprocess.Popen(["unshare", "--net", "sleep", "1000"])
    path = f"/proc/{other.pid}/ns/net"
    try:
        wait_until(lambda: os.readlink(path) != os.readlink("/proc/self/ns/net"), "the second namespace")
        ip("link", "add", "v0", "type", "veth", "peer", "name", "v1")
        ip("link", "set", "v1", "netns", str(other.pid))
        for name, address, of in (("v0", "10.9.0.1/24", None), ("v1", "10.9.0.2/24", other.pid)):
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


def watch_a_cut(rank, size, path, folder):
    """Rank main: exchange bytes with the other node until the link between the nodes is gone."""
    node, events = rank // LOCAL, Events(folder)
    if node:
        enter(path)
    os.environ.update(MASTER_ADDR="10.9.0.1", GLOO_SOCKET_IFNAME=f"v{node}")
    store = dist.TCPStore("10.9.0.1", PORT, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    nodes = epmoe.Nodes(None, LOCAL, timeout_s=WAIT_S)
    nodes.exchange(b"hello")
    events.set(f"{rank} is ready")
    got = outcome(lambda: [nodes.exchange(b"x") for _ in range(10**9)])
    seen_at = time.monotonic()
    with open(os.path.join(folder, "time")) as f:
        latency = seen_at - float(f.read())
    lost = nodes.lost_ranks()
    again = outcome(lambda: nodes.exchange(b"x")).kind
    outcome(nodes.close)
    events.set(f"{rank} is done")
    for other in range(size):  # rank 0 has the store
        events.wait(f"{other} is done")
    return {"again": again, "kind": got.kind, "text": got.text, "lost": lost, "latency": latency}


def main():
    with two_namespaces() as path, tempfile.TemporaryDirectory() as folder:
        events = Events(folder)

        def cut():
            for rank in range(2 * LOCAL):
                events.wait(f"{rank} is ready")
            time.sleep(0.5)
            with open(os.path.join(folder, "time"), "w") as f:
                f.write(str(time.monotonic()))
            ip("link", "set", "v0", "down")

        threading.Thread(target=cut, daemon=True).start()
        results = process_ranks(watch_a_cut, 2 * LOCAL, path, folder, backend=None)
        json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
