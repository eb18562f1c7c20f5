"""Measures the exchange of rows between each two nodes: python -m epmoe.env --nodes, under torchrun.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 \\
        -m epmoe.env --nodes

The ranks with the same local number are a rail.  For each pair of nodes all rails exchange rows at the same
time, both ways, as a layer does.  Rank 0 prints the rate of each rail and warns about slow and uneven ones.
"""

import os
import statistics
import struct
import sys
import time

import torch
import torch.distributed as dist

from .comm.nodes import Nodes
from .comm.share_gpu import set_device

SLOW_GBPS = 35.0  # NCCL reaches 45 on a card of 400 Gb/s; RoCE or GPUDirect that is wrongly set up, 5 to 25
UNEVEN = 0.8  # of the median of all
_MIB = {"cuda": 64, "cpu": 4}  # that a rank sends
_TIMES = 3


def measure_pair(nodes, device, a, b, num_bytes):
    """Return the bytes per second between nodes a and b, each way, or 0.0 on another node.  Collective."""
    other = {a: b, b: a}.get(nodes.node)
    splits = [num_bytes if node == other else 0 for node in range(nodes.num_nodes)]
    mine = torch.zeros(sum(splits), 1, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(mine)
    best = float("inf")
    for _ in range(1 + _TIMES):  # the first one connects
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        nodes.exchange(b"")
        begin = time.perf_counter()
        nodes._exchange_rows(theirs, mine, splits, splits)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return num_bytes / best if other is not None else 0.0


def measure(nodes, device, num_bytes=None):
    """Return {(node a, node b): [bytes per second of each rail, each way]}.  Collective.

    The rate of a rail is that of its slower end.
    """
    num_bytes = num_bytes or _MIB[device.type] << 20
    found = {}
    for a in range(nodes.num_nodes):
        for b in range(a + 1, nodes.num_nodes):
            rate = measure_pair(nodes, device, a, b, num_bytes)
            rates = [struct.unpack("<d", raw)[0] for raw in nodes.exchange(struct.pack("<d", rate))]
            local = nodes.local_size
            found[a, b] = [min(rates[a * local + r], rates[b * local + r]) for r in range(local)]
    return found


def warnings(found, slow_gbps):
    """Return what is wrong with measured rates, as lines of text.

    Args:
        found: As measure returns it.
        slow_gbps: GB/s below which a rail is slow; None: no rate is too low.

    Returns:
        A list of lines, empty where all is well.

    Examples:
        >>> from epmoe.env_nodes import warnings
        >>> for line in warnings({(0, 1): [44e9, 45e9, 46e9, 12e9]}, 35.0):
        ...     print(line)
        slow: rail 3 between nodes 0 and 1: 12.0 GB/s, expected at least 35
        uneven: rail 3 between nodes 0 and 1: 12.0 GB/s, 27 % of the median 44.5
    """
    lines = []
    median = statistics.median(rate for rates in found.values() for rate in rates)
    for (a, b), rates in found.items():
        for rail, rate in enumerate(rates):
            where = f"rail {rail} between nodes {a} and {b}: {rate / 1e9:.1f} GB/s"
            if slow_gbps is not None and rate < slow_gbps * 1e9:
                lines.append(f"slow: {where}, expected at least {slow_gbps:g}")
            if rate < UNEVEN * median:
                lines.append(f"uneven: {where}, {100 * rate / median:.0f} % of the median {median / 1e9:.1f}")
    return lines


def text(found, lines):
    """Return rates and warnings as text of at most 80 columns, for a few rails."""
    num = len(next(iter(found.values())))
    out = ["Rails, GB/s each way, all at the same time", "  nodes     " + "".join(f"{f'rail {r}':>8}"
                                                                                 for r in range(num))]
    out += [f"  {f'{a} - {b}':10}" + "".join(f"{rate / 1e9:8.2f}" for rate in rates)
            for (a, b), rates in found.items()]
    return "\n".join(out + (["", *lines] if lines else ["", "no rail is slow or uneven"]))


def run():
    """Measure.  Returns a dict of plain values on rank 0, None on the other ranks."""
    if "RANK" not in os.environ:
        sys.exit("python -m epmoe.env --nodes: start it on every node with torchrun, for example: torchrun "
                 "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 -m epmoe.env "
                 "--nodes")
    on_gpu = torch.cuda.is_available()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    device = set_device(int(os.environ["LOCAL_RANK"]), local) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        with Nodes() as nodes:
            if nodes.num_nodes == 1:
                sys.exit(f"python -m epmoe.env --nodes: the {nodes.size} ranks are on one node")
            found = measure(nodes, device)
            lines = warnings(found, SLOW_GBPS if on_gpu else None)
            return None if nodes.rank else {"rates": found, "warnings": lines}
    finally:
        dist.destroy_process_group()
