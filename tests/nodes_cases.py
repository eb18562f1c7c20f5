"""Ranks of several nodes for tests: threads of this process, or processes on this machine."""

import itertools
import threading

import torch

import epmoe
from cases import DTYPES, MODES, Case, generator, indices_of, inputs_of, random_numbers, same_bits
from epmoe import reference
from epmoe.testing import collector_off, own_stream
from pace import HANG_S

SHAPES = ((1, 1), (1, 2), (2, 1), (2, 2))  # nodes x local
SEVERAL = ((2, 1), (2, 2), (4, 1), (3, 2))  # the same, of several nodes


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


PATTERNS = ("uniform", "one_expert", "one_rank", "own_rank", "sentinels", "all_dropped", "duplicates",
            "edges")
OF_ROWS = ("rows", "row_weight", "d_rows", "d_row_weight", "y", "v", "dy", "dv")


def layer_of(nodes, case, device="cpu", **options):
    options = {"combine_mode": "scatter" if case.mode == "local" else case.mode, "device": device,
               "enable_local_combine": case.mode == "local", "num_buffers": case.num_buffers} | options
    return epmoe.EPAll2AllLayer(nodes, case.max_tokens, case.hidden, case.topk, dtype=case.dtype,
                                num_tot_experts=case.num_local * nodes.size, **options)


def run_one(layer, case, buffer=0):
    """One call forward and backward on this rank: inputs, results and gradients."""
    rank, device = layer.rank, layer.device

    def numbers(shape, dtype, seed):
        return random_numbers(shape, dtype, generator(case.seed, rank, seed)).to(device).requires_grad_()

    idx = indices_of(case, rank, layer.world_size)
    x, w = inputs_of(case, rank, layer.world_size)
    bits = w.view(torch.int32)  # the oracle assigns single weights: then torch makes signalling NaNs quiet
    x, w = x.to(device), torch.where(w.isnan(), bits | 1 << 22, bits).view(torch.float32).to(device)
    r = {"idx": idx, "bits": x, "weight_bits": w}  # NaNs and denormals travel unchanged
    r["rows"], r["row_weight"], layout = layer.dispatch(x, idx.to(device), w, buffer=buffer)
    x, w = numbers(x.shape, case.dtype, 7), numbers(w.shape, torch.float32, 8)
    rows, row_weight, layout = layer.dispatch(x, None, w, layout=layout)
    r["d_rows"] = numbers(rows.shape, case.dtype, 9).detach()
    r["d_row_weight"] = numbers(row_weight.shape, torch.float32, 10).detach()
    torch.autograd.backward([rows, row_weight], [r["d_rows"], r["d_row_weight"]])
    r |= {"dx": x.grad, "dw": w.grad}
    y, v = numbers(rows.shape, case.dtype, 5), numbers(row_weight.shape, torch.float32, 6)
    out = layer.combine(y, layout, v)
    r["d_out"] = numbers(out.shape, case.dtype, 11).detach()
    out.backward(r["d_out"])
    r |= {"y": y.detach(), "v": v.detach(), "out": out.detach(), "dy": y.grad, "dv": v.grad,
          "plain": layer.combine(y.detach(), layout)}
    r = {name: t.detach().cpu() for name, t in r.items()}
    r |= {name: r[name][: layout.num_rows] for name in OF_ROWS}  # with a capacity there are more
    return r | {"num_rows": layout.num_rows, "ends": layout.expert_offsets.tolist(),
                "of_expert": layout.tokens_per_expert_list, "sent": layout.send_tokens,
                "received": layout.recv_tokens}


def check_one(results, case, num_nodes, rail_dtype=None):
    """Compare the results of all ranks with the oracle, bit by bit."""
    size = len(results)
    oracle = TeamOracle([r["idx"] for r in results], case.num_local * size, num_nodes)
    local = case.mode == "local"

    def of(name):
        return [r[name] for r in results]

    wanted = {"rows": oracle.dispatch(of("bits")), "row_weight": oracle.dispatch_weights(of("weight_bits")),
              "out": oracle.combine(of("y"), of("v"), local, rail_dtype),
              "plain": oracle.combine(of("y"), None, local, rail_dtype),
              "dx": oracle.combine(of("d_rows"), None, local, rail_dtype),
              "dw": oracle.choices(of("d_row_weight"))}
    g = oracle.dispatch(of("d_out"))
    wanted["dy"] = [(rows * v[:, None]).to(case.dtype) for rows, v in zip(g, of("v"))]
    for name, values in wanted.items():
        for rank, (got, want) in enumerate(zip(results, values)):
            same_bits(got[name], want, f"{case}, rank {rank}: {name}")
    for rank, got in enumerate(results):
        terms = g[rank].double() * got["y"].double()
        assert ((got["dv"].double() - terms.sum(1)).abs() <= 1e-5 * terms.abs().sum(1)).all()
        plan = oracle.plans[rank // oracle.num_local]
        rows = plan["expert_rows"].view(oracle.num_local, -1)[rank % oracle.num_local].tolist()
        assert got["of_expert"] == rows and got["ends"][-1] == got["num_rows"] == sum(rows)
        of_rail = range(rank % oracle.num_local, size, oracle.num_local)
        sources = [s for s, _ in oracle.tokens[rank]]
        assert got["received"] == [sources.count(s) for s in of_rail]
        assert got["sent"] == [sum(s == rank for s, _ in oracle.tokens[r]) for r in of_rail]


def cases():
    """Every pattern, dtype, form of combine and distribution of tokens, in turn."""
    some = itertools.cycle(itertools.product(DTYPES, MODES))
    for seed, (pattern, tokens) in enumerate(itertools.product(
            PATTERNS, ("full", "unequal", "first_none", "only_last", "none"))):
        dtype, mode = next(some)
        yield Case(pattern=pattern, tokens=tokens, dtype=dtype, mode=mode, topk=1 + seed % 4, hidden=16,
                   num_local=1 + seed % 3, max_tokens=7, seed=seed,
                   index_dtype=(torch.int32, torch.int64)[seed % 2])
