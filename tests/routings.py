"""Batches of random routings for fuzz_routing.py: what each has as inputs, and how a rank runs it.

routing_oracle.py has the results that are expected.

Letters: W ranks, E experts, L = E/W, T tokens of a rank, N tokens of all ranks, K choices, H hidden, M rows
received, R routings of a batch.
"""

import dataclasses
import random

import numpy as np
import torch

import epmoe


@dataclasses.dataclass(frozen=True)
class Format:
    """A dtype: how torch calls it, and where its bits are."""

    torch: torch.dtype
    bits: type  # the numpy dtype that holds its bits
    mantissa: int  # the number of bits of the mantissa
    bias: int  # of the exponent

    @property
    def unit(self):
        """The numbers in 16 bytes."""
        return 16 // self.bits().itemsize


DTYPES = {"float32": Format(torch.float32, np.int32, 23, 127),
          "bfloat16": Format(torch.bfloat16, np.int16, 7, 127),
          "float16": Format(torch.float16, np.int16, 10, 15)}
MODES = ("scatter", "gather", "local")
PATTERNS = ("uniform", "distinct", "one_expert", "one_rank", "own_rank", "heavy_drop", "all_dropped",
            "duplicates", "edges", "sentinels", "mixed")
ROUTINGS = 256  # the largest number of routings in a batch
OUTPUT_BYTES = 1 << 28  # about the largest outputs of a batch: with larger ones it has fewer routings
# A rank waits for its GPU after so many routings. A thread that fills the queue of its stream could keep the
# threads of other ranks from launching what its kernels wait for.
QUEUED = 16
SHIFTS = 64  # the slices of a pool begin at this many different rows
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
    expert_alignment: int
    is_large: bool
    one_core: bool  # whether its ranks share one core (threads on the CPU)
    most_routings: int = ROUTINGS

    @property
    def num_experts(self):
        return self.num_local * self.num_ranks

    @property
    def most_rows(self):
        """The most rows that a rank can receive, with padding rows."""
        return self.num_ranks * self.max_tokens * self.topk + self.num_local * (self.expert_alignment - 1)

    @property
    def num_routings(self):
        if self.is_large:
            return 4
        rows = self.most_rows * (self.num_ranks if self.capacity else 1)
        row_bytes = self.hidden * DTYPES[self.dtype].bits().itemsize
        most = ROUTINGS if self.num_sm == 1 else ROUTINGS // 4  # several workers on the CPU take long
        return max(16, min(most, self.most_routings, OUTPUT_BYTES // (rows * row_bytes)))


def make_batch(seed, number, num_ranks=None, most_routings=ROUTINGS):
    """(Batch, generator of its numbers). Most batches are small, so that many can run. A few are large."""
    pick = random.Random(f"{seed}:{number}")
    w = num_ranks or pick.choice((1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7, 8))
    local = pick.choice((1, 1, 2, 2, 3, 5, 8, pick.randint(1, 512 // w)))
    topk = pick.choice((1, 2, 2, 3, 4, 5, 8, pick.randint(1, 32)))
    dtype = pick.choice(tuple(DTYPES))
    unit = DTYPES[dtype].unit
    hidden = unit * pick.choice((1, 1, 2, 3, 5, 7, pick.randint(1, 40)))
    tokens = pick.choice((1, 2, 3, 4, 5, 8, 9, 12, 17, pick.randint(1, 64)))
    is_large = pick.random() < 0.02
    if is_large:
        tokens, hidden = pick.randint(65, 300), unit * pick.randint(1, 9)
    b = Batch(w, min(local, 512 // w), topk, hidden, tokens, dtype, pick.choice(MODES),
              pick.choice((torch.int32, torch.int64)), pick.random() < 0.6, pick.random() < 0.3,
              pick.choice((1,) * 8 + (2, 3)), pick.choice((1, 1, 2)),
              pick.choice((1, 1, 1, 1, 2, 3, 8, 16)), is_large, pick.random() < 0.875, most_routings)
    return b, np.random.default_rng([abs(int(seed)), number])


def make_choices(b, pattern, ranks, idx, g):
    """The expert indices of tokens that follow one pattern: [tokens, K] int64.

    ranks[t] is the rank of token t. idx are uniform indices, which some patterns use.
    """
    e, local, shape = b.num_experts, b.num_local, idx.shape
    if pattern == "distinct" and b.topk <= e:
        return np.argpartition(g.random((len(idx), e), np.float32), b.topk - 1, 1)[:, : b.topk]
    if pattern == "one_expert":
        return np.where(g.random(shape) < 0.9, e // 2, idx)
    if pattern == "one_rank":
        return g.integers(e - local, e, shape)
    if pattern == "own_rank":
        return ranks[:, None] * local + g.integers(0, local, shape)
    if pattern == "heavy_drop":
        return np.where(g.random(shape) < 0.9, -1, idx)
    if pattern == "all_dropped":
        return g.choice((-1, e), shape)
    if pattern == "duplicates":
        return np.repeat(idx[:, :1], b.topk, 1)
    if pattern == "edges":
        return g.choice((0, e - 1, local - 1, e - local), shape)
    if pattern == "sentinels":
        return g.integers(-1, e + 1, shape)
    return idx


def random_bits(shape, bits, g):
    num_bytes = int(np.prod(shape)) * bits().itemsize
    words = g.integers(0, 2**64 - 1, -(-num_bytes // 8), np.uint64, endpoint=True)
    return words.view(bits)[: int(np.prod(shape))].reshape(shape)


def random_numbers(shape, dtype, g):
    """The bits of random numbers of both signs from 2^-5 to 2^6, every exponent as often."""
    f = DTYPES[dtype]
    unsigned = np.dtype(f.bits).str.replace("i", "u")
    u = random_bits(shape, f.bits, g).view(unsigned)
    sign = 1 << 8 * f.bits().itemsize - 1
    field = (sign - 1) >> f.mantissa << f.mantissa
    exponent = ((u & field) >> f.mantissa) % 11 + (f.bias - 5)
    return ((u & (sign | (1 << f.mantissa) - 1)) | exponent << f.mantissa).view(f.bits)


class Work:
    """The inputs of a batch: indices of every routing and rank, and pools from which rows are sliced.

    The slice of routing i begins at row shift(i) of a pool. So a row differs from the row that the previous
    routing had at the same position, and stale data is noticed.
    """

    def __init__(self, b, g):
        self.batch = b
        shape = (b.num_ranks, b.num_routings)
        self.tokens = g.integers(0, b.max_tokens + 1, shape)
        self.tokens[g.random(shape) < 0.15] = 0
        self.tokens[g.random(shape) < 0.15] = b.max_tokens
        pattern = np.broadcast_to(g.integers(len(PATTERNS), size=b.num_routings), shape)
        pattern = np.where(pattern == PATTERNS.index("mixed"), g.integers(len(PATTERNS) - 1, size=shape),
                           pattern)
        pattern_of_token = np.repeat(pattern.reshape(-1), self.tokens.reshape(-1))
        rank_of_token = np.repeat(np.arange(b.num_ranks), self.tokens.sum(1))
        idx = g.integers(0, b.num_experts, (len(rank_of_token), b.topk))
        for i, name in enumerate(PATTERNS):
            at = np.flatnonzero(pattern_of_token == i)
            idx[at] = make_choices(b, name, rank_of_token[at], idx[at], g)
        # indices[rank]: the tokens of all routings. Those of routing i begin at first[rank, i].
        self.indices = np.split(idx, self.tokens.sum(1).cumsum()[:-1])
        self.first = np.concatenate([np.zeros((b.num_ranks, 1), int), self.tokens.cumsum(1)], 1)
        most, most_rows = b.max_tokens + SHIFTS, b.most_rows + SHIFTS
        self.x = random_bits((b.num_ranks, most, b.hidden), DTYPES[b.dtype].bits, g)
        self.weight = random_bits((b.num_ranks, most, b.topk), np.int32, g)
        self.y = random_numbers((b.num_ranks, most_rows, b.hidden), b.dtype, g)
        self.y_weight = g.standard_normal((b.num_ranks, most_rows), np.float32)

    def indices_of(self, routing):
        """The indices of each rank in a routing."""
        return [idx[first[routing] : first[routing + 1]] for idx, first in zip(self.indices, self.first)]


def shift(routing):
    """The row of a pool at which the slice of this routing begins. It may be an array of numbers."""
    return routing % SHIFTS


# ---- a rank ----


@dataclasses.dataclass
class Results:
    """What a rank received in all routings of a batch, as numpy arrays without an axis for the routing."""

    lengths: list  # the number of rows that dispatch returned in each routing
    rows: np.ndarray  # bits, as all rows and sums
    weights: np.ndarray | None
    plan: np.ndarray
    plan_first: np.ndarray  # where the plan of each routing begins
    parts: dict  # T -> {part of the layout: (its offset in the plan, its shape)}
    read: dict  # routing -> (layout.num_rows, layout.num_tiles), for one routing with each T: they wait
    sums: np.ndarray


def make_layer(world, device, b):
    layer = epmoe.EPAll2AllLayer(world, b.max_tokens, b.hidden, b.topk, num_tot_experts=b.num_experts,
                                 dtype=DTYPES[b.dtype].torch, num_sm=b.num_sm, device=device,
                                 combine_mode="gather" if b.mode == "gather" else "scatter",
                                 enable_local_combine=b.mode == "local",
                                 capacity=b.most_rows if b.capacity else None, num_buffers=b.num_buffers,
                                 expert_alignment=b.expert_alignment)
    if world.group is None:  # threads access each other's memory by address: the layer must live as long
        world.__dict__.setdefault("_kept", []).append(layer)
    return layer


def run_rank(world, device, work):
    """Run all routings of a batch on one rank. Returns the Results.

    All results are fetched at the end. Before, this function waits for a GPU only once in QUEUED routings.
    """
    b, rank = work.batch, world.rank
    layer = make_layer(world, device, b)

    def tensor(array, as_type):  # a copy, because numpy arrays may not be aligned to 16 bytes
        return torch.from_numpy(array).view(as_type).to(device, copy=True)

    # A row has a multiple of 16 bytes, so slices of x and y are aligned. The others need not be.
    x, y = tensor(work.x[rank], DTYPES[b.dtype].torch), tensor(work.y[rank], DTYPES[b.dtype].torch)
    weight, y_weight = tensor(work.weight[rank], torch.float32), tensor(work.y_weight[rank], torch.float32)
    tokens = work.tokens[rank].tolist()
    indices = torch.from_numpy(work.indices[rank]).to(device=device, dtype=b.index_dtype).split(tokens)
    dispatched, layouts, sums = [], [], []
    world.exchange(b"x")  # on a GPU, no rank allocates the inputs while others wait for it in an operation
    for i, t in enumerate(tokens):
        at = shift(i)
        rows, row_weight, layout = layer.dispatch(x.narrow(0, at, t), indices[i],
                                                  weight.narrow(0, at, t) if b.weights else None,
                                                  buffer=i % b.num_buffers)
        m = rows.shape[0]
        sums.append(layer.combine(y.narrow(0, at, m), layout,
                                  y_weight.narrow(0, at, m) if b.weights else None))
        dispatched.append((rows, row_weight))
        layouts.append(layout)
        if i % QUEUED == QUEUED - 1:
            layer.synchronize()
    layer.synchronize()
    world.exchange(b"x")  # nor what the results are copied to
    results = results_of(b, dispatched, layouts, sums)
    layer.finalize()
    return results


def results_of(b, dispatched, layouts, sums):
    as_bits = {4: torch.int32, 2: torch.int16}[DTYPES[b.dtype].bits().itemsize]

    def numpy(tensors, as_type):
        return torch.cat(tensors).view(as_type).cpu().numpy()

    rows, weights = zip(*dispatched)
    has_weights = all(w is not None for w in weights)
    parts, read = {}, {}
    for i, layout in enumerate(layouts):
        if layout.num_tokens not in parts:
            read[i] = layout.num_rows, layout.num_tiles
            views = {name: getattr(layout, name) for name in PARTS}
            parts[layout.num_tokens] = {name: (p.storage_offset(), tuple(p.shape))
                                        for name, p in views.items()}
    sizes = [layout.plan.numel() for layout in layouts]
    return Results([len(r) for r in rows], numpy(rows, as_bits),
                   numpy(weights, torch.int32) if has_weights else None,
                   numpy([layout.plan for layout in layouts], torch.int32), np.cumsum([0, *sizes])[:-1],
                   parts, read, numpy(sums, as_bits))
