"""Batches of random routings and the vectorised oracle of fuzz_routing.py.

This oracle is fast. It is independent of epmoe.reference, which is easy to read. test_fuzz_sample.py compares
the two.

Letters: W ranks, E experts, L = E/W, T tokens of a rank, N tokens of all ranks, K choices, H hidden, M rows
received.
"""

import dataclasses
import random

import numpy as np
import torch

import epmoe

# name: (torch dtype, numpy dtype for the bits, numbers in 16 bytes)
DTYPES = {"float32": (torch.float32, np.int32, 4), "bfloat16": (torch.bfloat16, np.int16, 8),
          "float16": (torch.float16, np.int16, 8)}
MODES = ("scatter", "gather", "local")
PATTERNS = ("uniform", "distinct", "one_expert", "one_rank", "own_rank", "heavy_drop", "all_dropped",
            "duplicates", "edges", "sentinels", "mixed")
ROUTINGS = 64  # the largest number of routings in a batch
TILE_ROWS = 128
PARTS = ("counts", "expert_offsets", "send_tokens", "recv_tokens", "rows_per_rank", "tile_expert", "tile_row",
         "token_dst_scatter_idx", "token_sort_indices", "token_slots")


# ---- a batch: everything in it follows from (seed, number) ----


@dataclasses.dataclass
class Batch:
    num_ranks: int
    num_local: int
    topk: int
    hidden: int
    max_tokens: int
    dtype: str
    mode: str
    index_dtype: torch.dtype
    weights: bool
    capacity: bool
    num_sm: int
    num_buffers: int
    num_routings: int
    expert_alignment: int = 1

    @property
    def num_experts(self):
        return self.num_local * self.num_ranks

    @property
    def most_rows(self):
        """The most rows that a rank can receive, with padding rows."""
        return self.num_ranks * self.max_tokens * self.topk + self.num_local * (self.expert_alignment - 1)


def make_batch(seed, number, num_ranks=None):
    """(Batch, generator of its numbers). Most batches are small, so that many can run. A few are large."""
    pick = random.Random(f"{seed}:{number}")
    w = num_ranks or pick.choice((1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7, 8))
    local = pick.choice((1, 1, 2, 2, 3, 5, 8, pick.randint(1, 512 // w)))
    topk = pick.choice((1, 2, 2, 3, 4, 5, 8, pick.randint(1, 32)))
    dtype = pick.choice(tuple(DTYPES))
    unit = DTYPES[dtype][2]
    hidden = unit * pick.choice((1, 1, 2, 3, 5, 7, pick.randint(1, 40)))
    tokens = pick.choice((1, 2, 3, 4, 5, 8, 9, 12, 17, pick.randint(1, 64)))
    large = pick.random() < 0.02
    if large:
        tokens, hidden = pick.randint(65, 300), unit * pick.randint(1, 9)
    b = Batch(w, min(local, 512 // w), topk, hidden, tokens, dtype, pick.choice(MODES),
              pick.choice((torch.int32, torch.int64)), pick.random() < 0.6, pick.random() < 0.3,
              pick.choice((1,) * 8 + (2, 3)), pick.choice((1, 1, 2)), 4 if large else ROUTINGS,
              pick.choice((1, 1, 1, 1, 2, 3, 8, 16)))
    return b, np.random.default_rng([abs(int(seed)), number])


def make_indices(b, rank, pattern, tokens, g):
    """The expert indices of one rank: [T, K] int64."""
    e, local, shape = b.num_experts, b.num_local, (tokens, b.topk)
    idx = g.integers(0, e, shape)
    if pattern == "distinct" and b.topk <= e:
        idx = np.argsort(g.random((tokens, e)), 1)[:, : b.topk]
    elif pattern == "one_expert":
        idx[g.random(shape) < 0.9] = e // 2
    elif pattern == "one_rank":
        idx = g.integers(e - local, e, shape)
    elif pattern == "own_rank":
        idx = g.integers(rank * local, (rank + 1) * local, shape)
    elif pattern == "heavy_drop":
        idx[g.random(shape) < 0.9] = -1
    elif pattern == "all_dropped":
        idx[:] = g.choice((-1, e), shape)
    elif pattern == "duplicates":
        idx = np.repeat(idx[:, :1], b.topk, 1)
    elif pattern == "edges":
        idx = g.choice((0, e - 1, local - 1, e - local), shape)
    elif pattern in ("sentinels", "mixed"):
        idx = g.integers(-1, e + 1, shape)
    return np.ascontiguousarray(idx)


def from_float32(x, dtype):
    """The bits of float32 numbers after rounding to dtype (to nearest, ties to even)."""
    if dtype == "float32":
        return x.view(np.int32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.int16)
    u = x.view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16).view(np.int16)


def to_float32(bits, dtype):
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class Work:
    """The inputs of a batch: indices of every routing and rank, and pools from which rows are sliced."""

    def __init__(self, b, g):
        self.batch = b
        bits = DTYPES[b.dtype][1]
        most = b.max_tokens + b.num_routings
        info = np.iinfo(bits)
        self.indices = []  # [routing][rank]
        for _ in range(b.num_routings):
            pattern = PATTERNS[g.integers(len(PATTERNS))]
            tokens = g.integers(0, b.max_tokens + 1, b.num_ranks)
            tokens[g.random(b.num_ranks) < 0.15] = 0
            tokens[g.random(b.num_ranks) < 0.15] = b.max_tokens
            of_ranks = []
            for r, t in enumerate(tokens):
                of_rank = PATTERNS[g.integers(len(PATTERNS) - 1)] if pattern == "mixed" else pattern
                of_ranks.append(make_indices(b, r, of_rank, int(t), g))
            self.indices.append(of_ranks)
        # The slice of routing i begins at row i of a pool. So a row differs from the row that the previous
        # routing had at the same position, and stale data is noticed.
        self.x = g.integers(info.min, info.max, (b.num_ranks, most, b.hidden), bits, endpoint=True)
        self.weight = g.integers(-(2**31), 2**31 - 1, (b.num_ranks, most, b.topk), np.int32, endpoint=True)
        rows = b.most_rows
        numbers = g.standard_normal((b.num_ranks, rows + b.num_routings, b.hidden), np.float32)
        numbers *= np.exp2(g.integers(-5, 6, (*numbers.shape[:2], 1))).astype(np.float32)
        self.y = from_float32(numbers, b.dtype)
        self.y_weight = g.standard_normal((b.num_ranks, rows + b.num_routings), np.float32)

    def x_of(self, routing, rank):
        return self.x[rank, routing : routing + len(self.indices[routing][rank])]

    def weight_of(self, routing, rank):
        return self.weight[rank, routing : routing + len(self.indices[routing][rank])]


def run_rank(world, device, work):
    """Run all routings of a batch on one rank. Returns the results of each, as numpy arrays."""
    b, rank = work.batch, world.rank
    dtype, bits, _ = DTYPES[b.dtype]
    layer = epmoe.EPAll2AllLayer(world, b.max_tokens, b.hidden, b.topk, num_tot_experts=b.num_experts,
                                 dtype=dtype, num_sm=b.num_sm, device=device,
                                 combine_mode="gather" if b.mode == "gather" else "scatter",
                                 enable_local_combine=b.mode == "local",
                                 capacity=b.most_rows if b.capacity else None, num_buffers=b.num_buffers,
                                 expert_alignment=b.expert_alignment)
    if world.group is None:  # threads access each other's memory by address: the layer must live as long
        world.__dict__.setdefault("_kept", []).append(layer)

    def tensor(array, as_type):  # a copy, because numpy arrays may not be aligned to 16 bytes
        return torch.from_numpy(np.ascontiguousarray(array)).view(as_type).to(device, copy=True)

    results = []
    y_pool = tensor(work.y[rank], dtype)  # a row has a multiple of 16 bytes, so slices are aligned
    w_pool = tensor(work.y_weight[rank], torch.float32)
    for i in range(b.num_routings):
        idx = torch.from_numpy(work.indices[i][rank]).to(device=device, dtype=b.index_dtype)
        weight = tensor(work.weight_of(i, rank), torch.float32) if b.weights else None
        rows, row_weight, layout = layer.dispatch(tensor(work.x_of(i, rank), dtype), idx, weight,
                                                  buffer=i % b.num_buffers)
        m = len(rows)
        out = layer.combine(y_pool[i : i + m], layout, w_pool[i : i + m] if b.weights else None)
        results.append((rows, row_weight, layout, out))
    layer.synchronize()
    as_bits = {4: torch.int32, 2: torch.int16}[bits().itemsize]
    places = {}  # T -> {part: (offset in the plan, number of elements, shape)}
    for _, _, layout, _ in results:
        if layout.num_tokens not in places:
            parts = {name: getattr(layout, name) for name in PARTS}
            places[layout.num_tokens] = {name: (p.storage_offset(), p.numel(), tuple(p.shape))
                                         for name, p in parts.items()}
    arrays = []
    for rows, w, layout, out in results:
        plan = {"plan": layout.plan.cpu().numpy(), "at": places[layout.num_tokens],
                "num_tiles": layout.num_tiles, "num_rows": layout.num_rows}
        arrays.append((rows.view(as_bits).cpu().numpy(),
                       None if w is None else w.view(torch.int32).cpu().numpy(),
                       plan, out.view(as_bits).cpu().numpy()))
    layer.finalize()
    return arrays


def parts_of(plan):
    """The parts of a layout by name, as views of its plan."""
    views = {name: plan["plan"][a : a + n].reshape(shape) for name, (a, n, shape) in plan["at"].items()}
    return views | {"num_tiles": plan["num_tiles"], "num_rows": plan["num_rows"]}


# ---- the oracle ----


class Wanted:
    """The expected results of a routing for all ranks. Tokens of all ranks are concatenated in each array."""

    def __init__(self, b, indices):
        w, e_all, k, local = b.num_ranks, b.num_experts, b.topk, b.num_local
        tokens = np.array([len(i) for i in indices])
        self.base = np.concatenate([[0], tokens.cumsum()])  # first token of each rank
        n = int(self.base[-1])
        flat = np.concatenate(indices).reshape(-1)
        at = np.flatnonzero((flat >= 0) & (flat < e_all))  # by source, token, choice
        e, source = flat[at], np.repeat(np.arange(w), tokens)[at // k] if len(at) else at
        self.counts = np.bincount(source * e_all + e, minlength=w * e_all).reshape(w, e_all)
        of_expert = self.counts.sum(0).reshape(w, local)
        padded = -(-of_expert // b.expert_alignment) * b.expert_alignment
        self.expert_row = np.concatenate([np.zeros((w, 1), int), padded.cumsum(1)], 1)
        self.num_rows = self.expert_row[:, -1]
        self.row_base = np.concatenate([[0], self.num_rows.cumsum()])
        order = np.argsort(e, kind="stable")
        rank = e[order] // local
        lower = of_expert.cumsum() - of_expert.ravel()  # the choices of lower experts
        row = self.expert_row[rank, e[order] % local] + np.arange(len(at)) - lower[e[order]]
        # The choice from which each row comes, for the rows of all ranks; -1 for a padding row.
        self.row_choice = np.full(self.row_base[-1], -1)
        self.row_choice[self.row_base[rank] + row] = at[order]
        self.choice_row = np.full(n * k, -1)  # the row of each choice at its rank
        self.choice_row[at[order]] = row
        self.choice_rank = np.where((flat >= 0) & (flat < e_all), flat // local, -1)
        mine = np.argsort(source * e_all + e, kind="stable")  # by source, expert, token, choice
        kept_before = np.concatenate([[0], np.bincount(source, minlength=w).cumsum()])
        self.sort = np.full(n * k, -1)
        if len(at):
            s = source[mine]
            self.sort[self.base[s] * k + np.arange(len(at)) - kept_before[s]] = at[mine] - self.base[s] * k
        hit = np.zeros((n, w), bool)
        hit[at // k, e // local] = True
        before = np.concatenate([np.zeros((1, w), int), hit.cumsum(0)])
        slot = before[:-1] - before[np.repeat(self.base[:-1], tokens)] if n else before[:-1]
        self.slot = np.where(hit, slot, -1)
        self.send = before[self.base[1:]] - before[self.base[:-1]]
        self.tokens = tokens

    def tiles(self, rank):
        """(expert, first row) of all tiles of a rank."""
        start, size = self.expert_row[rank][:-1], np.diff(self.expert_row[rank])
        num = -(-size // TILE_ROWS)
        expert = np.repeat(np.arange(len(size)), num)
        first = np.concatenate([[0], num.cumsum()])[expert]
        return expert, start[expert] + TILE_ROWS * (np.arange(len(expert)) - first)

    def sums(self, b, work, routing):
        """The bits of the sum of every token."""
        n, k, w = len(self.slot), b.topk, b.num_ranks
        y = np.concatenate([work.y[r, routing : routing + m] for r, m in enumerate(self.num_rows)])
        y = to_float32(np.ascontiguousarray(y), b.dtype)
        if b.weights:
            weights = [work.y_weight[r, routing : routing + m] for r, m in enumerate(self.num_rows)]
            y = np.concatenate(weights)[:, None] * y
        row = (self.row_base[self.choice_rank] + self.choice_row).reshape(n, k)
        rank, kept = self.choice_rank.reshape(n, k), self.choice_rank.reshape(n, k) >= 0
        partial = np.zeros((n, w if b.mode == "local" else 1, b.hidden), np.float32)
        for i in range(k):
            t = np.flatnonzero(kept[:, i])
            partial[t, rank[t, i] if b.mode == "local" else 0] += y[row[t, i]]
        if b.mode != "local":
            return from_float32(partial[:, 0], b.dtype)
        total = np.zeros((n, b.hidden), np.float32)
        for r in range(w):
            total += to_float32(from_float32(np.ascontiguousarray(partial[:, r]), b.dtype), b.dtype)
        return from_float32(total, b.dtype)


def same(got, want, what):
    if got.shape != want.shape or not np.array_equal(got, want):
        detail = f"shape {got.shape}, wanted {want.shape}"
        if got.shape == want.shape:
            bad = np.argwhere(got != want)
            at = tuple(bad[0].tolist())
            detail = f"{len(bad)} of {got.size} differ, the first at {at}: got {got[at]}, wanted {want[at]}"
        raise AssertionError(f"{what}: {detail}")


def check_routing(work, routing, got):
    """Compare the results of a routing with the oracle. got: for each rank, what run_rank returned for it."""
    b = work.batch
    want = Wanted(b, work.indices[routing])
    w, k = b.num_ranks, b.topk
    got = [(rows, weight, parts_of(plan), out) for rows, weight, plan, out in got]
    for r, (rows, weight, plan, _) in enumerate(got):
        m = int(want.num_rows[r])
        same(plan["counts"], want.counts, f"rank {r}: counts")
        same(plan["expert_offsets"], want.expert_row[r], f"rank {r}: expert offsets")
        assert plan["num_rows"] == m, f"rank {r}: {plan['num_rows']} rows, wanted {m}"
        same(plan["send_tokens"], want.send[r], f"rank {r}: distinct tokens sent")
        same(plan["recv_tokens"], want.send[:, r], f"rank {r}: distinct tokens received")
        same(plan["rows_per_rank"], want.num_rows, f"rank {r}: rows of all ranks")
        expert, first = want.tiles(r)
        assert plan["num_tiles"] == len(expert), f"rank {r}: {plan['num_tiles']} tiles, wanted {len(expert)}"
        same(plan["tile_expert"][: len(expert)], expert, f"rank {r}: experts of tiles")
        same(plan["tile_row"][: len(expert)], first, f"rank {r}: rows of tiles")
        assert len(rows) == (b.most_rows if b.capacity else m), f"rank {r}: {len(rows)} rows"
        if b.capacity:
            are_zero = not rows[m:].any() and (weight is None or not weight[m:].any())
            assert are_zero, f"rank {r}: rows or weights after row M are not zero"
        assert (weight is not None) == b.weights
    same(np.concatenate([plan["token_dst_scatter_idx"] for _, _, plan, _ in got]).reshape(-1),
         want.choice_row, "rows of choices")
    same(np.concatenate([plan["token_sort_indices"] for _, _, plan, _ in got]), want.sort, "sorted choices")
    same(np.concatenate([plan["token_slots"] for _, _, plan, _ in got]), want.slot, "slots")
    x = np.concatenate([work.x_of(routing, r) for r in range(w)])
    is_padding = want.row_choice < 0
    wanted = x[want.row_choice // k]
    wanted[is_padding] = 0
    same(np.concatenate([g[0][:m] for g, m in zip(got, want.num_rows)]), wanted, "rows")
    if b.weights:
        weight = np.concatenate([work.weight_of(routing, r) for r in range(w)]).reshape(-1)
        wanted = weight[want.row_choice]
        wanted[is_padding] = 0
        same(np.concatenate([g[1][:m] for g, m in zip(got, want.num_rows)]), wanted, "row weights")
    same(np.concatenate([g[3] for g in got]), want.sums(b, work, routing), "sums")
