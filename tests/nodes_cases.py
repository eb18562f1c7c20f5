"""Ranks of several nodes for tests: threads of this process, or processes on this machine."""

import threading

import torch

import epmoe
from epmoe.testing import own_stream
from pace import HANG_S

SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))  # nodes x local


class ThreadRail:
    """A rail whose ranks are threads: the calls of epmoe.nodes.rail.TorchRail, through memory."""

    def __init__(self, shared, position):
        self.shared = shared
        self.position = position
        self.size = len(shared.slots)

    def _swap(self, mine):
        try:
            self.shared.slots[self.position] = mine
            self.shared.barrier.wait(HANG_S)
            theirs = list(self.shared.slots)
            self.shared.barrier.wait(HANG_S)
        except threading.BrokenBarrierError:
            raise epmoe.PeerDied("a rank of the rail left") from None
        return theirs

    def meet(self, mine):
        return self._swap(mine)

    def exchange(self, out, mine, out_splits=None, splits=None):
        splits = splits or [len(mine) // self.size] * self.size
        theirs = self._swap([part.clone() for part in mine.split(splits)])
        parts = [parts[self.position] for parts in theirs]
        wanted = out_splits or [len(out) // self.size] * self.size
        assert [len(p) for p in parts] == list(wanted), "the two ends of the rail disagree about sizes"
        out.copy_(torch.cat(parts))

    def set_timeout(self, timeout_s):
        pass

    def close(self):
        pass


class _Shared:
    def __init__(self, size):
        self.slots = [None] * size
        self.barrier = threading.Barrier(size)


def thread_nodes(num_nodes, num_local):
    """Nodes of ranks that are threads, in rank order."""
    teams = [epmoe.thread_worlds(num_local, HANG_S) for _ in range(num_nodes)]
    rails = [_Shared(num_nodes) for _ in range(num_local)]
    return [epmoe.Nodes._of_parts(teams[n][r], ThreadRail(rails[r], n) if num_nodes > 1 else None, n,
                                  num_nodes) for n in range(num_nodes) for r in range(num_local)]


def run_nodes(fn, num_nodes, num_local, *args, device="cpu"):
    """Run fn(nodes, *args) on every rank, in threads. Returns the results in rank order."""
    everyone = thread_nodes(num_nodes, num_local)
    results, errors = [None] * len(everyone), []

    def main(rank, nodes):
        torch.set_num_threads(1)
        try:
            with own_stream(device):
                results[rank] = fn(nodes, *args)
        except BaseException as error:  # the caller raises it
            errors.append((rank, error))
            nodes.team._leave(False)
            if nodes.rail is not None:
                nodes.rail.shared.barrier.abort()

    threads = [threading.Thread(target=main, args=pair, daemon=True) for pair in enumerate(everyone)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(HANG_S)
    for nodes in everyone:
        nodes.team._leave(False)
    if errors:
        first = next((e for e in errors if not isinstance(e[1], epmoe.PeerDied)), errors[0])
        raise AssertionError(f"rank {first[0]} of {len(everyone)} raised {first[1]!r}") from first[1]
    assert not any(t.is_alive() for t in threads), "a rank did not end"
    return results
