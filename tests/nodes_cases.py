"""Ranks of several nodes for tests: threads of this process, or processes on this machine."""

import threading

import torch

import epmoe
from cases import indices_of
from epmoe import reference
from epmoe.testing import collector_off, own_stream
from pace import HANG_S

SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))  # nodes x local


class ThreadRail:
    """A rail whose ranks are threads: the calls of epmoe.comm.rail.TorchRail, through memory."""

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

    def start(self, *arguments):
        self.exchange(*arguments)
        return lambda: None

    def read(self, t):
        return t.tolist()

    def set_timeout(self, timeout_s):
        pass

    def close(self, in_order):
        if not in_order:
            self.shared.barrier.abort()


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
    with collector_off():  # as run_threads
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


# ---- the oracle: reference.py for each node, then the documented order between nodes ----


class TeamOracle:
    """What each node sees of a routing: the tokens that its ranks have for it, and their plan."""

    def __init__(self, indices, num_experts, num_nodes):
        self.indices, self.num_nodes = indices, num_nodes
        self.num_local = len(indices) // num_nodes
        self.experts = num_experts // num_nodes
        owner = [torch.where((i >= 0) & (i < num_experts), i // self.experts, -1) for i in indices]
        self.tokens, self.local, self.plans = [], [], []  # by rank; by rank; by node
        for rank in range(len(indices)):
            node, local = divmod(rank, self.num_local)
            others = [m for m in range(num_nodes) if m != node]
            sources = [m * self.num_local + local for m in [node, *others]]
            self.tokens.append([(s, t) for s in sources for t in range(len(indices[s]))
                                if (owner[s][t] == node).any()])
            here_shape = indices[rank].shape[1:]
            here = [torch.where(owner[s][t] == node, indices[s][t] - node * self.experts, -1)
                    for s, t in self.tokens[rank]]
            self.local.append(torch.stack(here) if here else indices[rank].new_empty(0, *here_shape))
        for node in range(num_nodes):
            self.plans.append(reference.plan(self.local[self.ranks(node)], self.experts))

    def ranks(self, node):
        return slice(node * self.num_local, (node + 1) * self.num_local)

    def arrived(self, xs):
        """By rank [A, ..]: the tokens that the rank has for its node."""
        return [torch.stack([xs[s][t] for s, t in tokens]) if tokens else xs[0].new_empty(0, *xs[0].shape[1:])
                for tokens in self.tokens]

    def by_node(self, fn, *lists):
        """Concatenate fn(lists of a node, its plan, its indices) of all nodes."""
        out = []
        for node, plan in enumerate(self.plans):
            at = self.ranks(node)
            out += fn(*(None if values is None else values[at] for values in lists), plan, self.local[at])
        return out

    def dispatch(self, xs):
        return self.by_node(lambda x, plan, _: reference.dispatch(x, plan), self.arrived(xs))

    def dispatch_weights(self, ws):
        return self.by_node(lambda w, plan, _: reference.dispatch_weights(w, plan), self.arrived(ws))

    def combine(self, ys, weights=None, local_combine=False, rail_dtype=None):
        """The documented sum: in each node, rounded; then over the nodes in order, in float32; rounded."""
        partial = self.by_node(lambda y, w, plan, idx: reference.combine(y, plan, idx, self.experts, w,
                                                                         local_combine), ys, weights)
        sums = [torch.zeros(len(idx), ys[0].shape[1]) for idx in self.indices]
        for node in range(self.num_nodes):
            for rank in range(len(self.indices))[self.ranks(node)]:
                for row, (s, t) in zip(partial[rank], self.tokens[rank]):
                    sums[s][t] += row.to(rail_dtype or row.dtype).float()
        return [s.to(ys[0].dtype) for s in sums]

    def choices(self, values):
        """By rank [T, K]: a number of each row, given back to the choice from which the row came."""
        out = [torch.zeros(idx.shape) for idx in self.indices]
        for node, plan in enumerate(self.plans):
            for r, rows in enumerate(plan["rows"]):
                value = values[node * self.num_local + r]
                for v, (source, at, choice) in zip(value, rows.tolist()):
                    s, t = self.tokens[node * self.num_local + source][at]
                    out[s][t, choice] = v
        return out


def most_of(case, num_nodes, num_local):
    """The largest number of tokens that a rank sends to another node, and the most rows of a rank."""
    size = num_nodes * num_local
    indices = [indices_of(case, rank, size) for rank in range(size)]
    oracle = TeamOracle(indices, case.num_local * size, num_nodes)
    sent = [sum(s == rank for s, _ in oracle.tokens[other]) for rank in range(size)
            for other in range(rank % num_local, size, num_local) if other != rank]
    return max(sent), max(len(rows) for plan in oracle.plans for rows in plan["rows"])
