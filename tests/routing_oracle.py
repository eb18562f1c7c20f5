"""The vectorised oracle of fuzz_routing.py: what routings must give, and the comparison with it.

This oracle is fast, because it computes many routings at once. It is independent of epmoe.reference, which
is easy to read. test_fuzz_sample.py compares the two.

Letters: as in routings.py. The arrays have the tokens, the rows or the plans of one rank after the other, and
for each rank those of one routing after the other. A party is a rank in a routing: party p of n routings is
rank p // n in routing p % n.
"""

import numpy as np

from epmoe import _C
from routings import shift

TILE_ROWS = 128
CHUNK = 1 << 22  # about the most elements of an array of the oracle, of which it has several


def from_float32(x, dtype):
    """The bits of float32 numbers after rounding to dtype (to nearest, ties to even)."""
    if dtype == "float32":
        return x.view(np.int32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.int16)
    u = x.view(np.uint32)
    return ((u + (0x7FFF + (u >> 16 & 1))) >> 16).astype(np.uint16).view(np.int16)  # no NaN: no overflow


def to_float32(bits, dtype):
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def ranges(starts, sizes):
    """The numbers start, start + 1, ..., start + size - 1 of each pair."""
    ends = sizes.cumsum()
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)


class Wanted:
    """The expected results of the routings first .. last - 1 for all ranks."""

    def __init__(self, work, first, last):
        b, n = work.batch, last - first
        w, k, local, e_all = b.num_ranks, b.topk, b.num_local, b.num_experts
        self.num_routings, parties = n, w * n
        self.tokens = work.tokens[:, first:last].reshape(-1)
        self.base = np.concatenate([[0], self.tokens.cumsum()])  # first token of each party
        flat = np.concatenate([idx[at[first] : at[last]] for idx, at in zip(work.indices, work.first)])
        num_tokens, flat = len(flat), flat.reshape(-1)
        at = np.flatnonzero((flat >= 0) & (flat < e_all))  # by source, token, choice
        e, source = flat[at], np.repeat(np.arange(parties), self.tokens * k)[at]
        to = e // local
        rank = to * n + source % n  # the party that receives the choice
        expert = rank * local + e % local
        counts = np.bincount((source % n * w + source // n) * e_all + e, minlength=parties * e_all)
        self.counts = counts.reshape(n, w, e_all)
        of_expert = np.bincount(expert, minlength=parties * local).reshape(parties, local)
        padded = -(-of_expert // b.expert_alignment) * b.expert_alignment
        self.expert_row = np.concatenate([np.zeros((parties, 1), int), padded.cumsum(1)], 1)
        self.num_rows = self.expert_row[:, -1]
        self.row_base = np.concatenate([[0], self.num_rows.cumsum()])
        order = np.argsort(expert, kind="stable")
        lower = of_expert.cumsum() - of_expert.reshape(-1)  # the choices of lower experts
        sorted_expert = expert[order]
        row = (self.expert_row[:, :-1].reshape(-1) - lower)[sorted_expert] + np.arange(len(at))
        # The choice from which each row comes, for the rows of all parties; -1 for a padding row.
        self.row_choice = np.full(self.row_base[-1], -1)
        self.row_choice[self.row_base[sorted_expert // local] + row] = at[order]
        self.choice_row = np.full(num_tokens * k, -1)  # the row of each choice at its rank
        self.choice_row[at[order]] = row
        self.choice_rank = np.full(num_tokens * k, -1)
        self.choice_rank[at] = to
        mine = np.argsort(source * e_all + e, kind="stable")  # by source, expert, token, choice
        kept_before = np.concatenate([[0], np.bincount(source, minlength=parties).cumsum()])
        self.sort = np.full(num_tokens * k, -1)
        begin = self.base[source] * k  # source is sorted, so source[mine] is source
        self.sort[begin + np.arange(len(at)) - kept_before[source]] = at[mine] - begin
        hit = np.zeros((num_tokens, w), bool)
        hit[at // k, to] = True
        before = np.concatenate([np.zeros((1, w), int), hit.cumsum(0)])
        self.slot = np.where(hit, before[:-1] - np.repeat(before[self.base[:-1]], self.tokens, 0), -1)
        self.send = before[self.base[1:]] - before[self.base[:-1]]

    def tiles(self):
        """The number of tiles of each party, and expert and first row of all tiles."""
        size, start = np.diff(self.expert_row), self.expert_row[:, :-1]
        num = -(-size // TILE_ROWS)
        local, flat = size.shape[1], num.reshape(-1)
        expert = np.repeat(np.arange(len(flat)), flat)
        row = start.reshape(-1)[expert] + TILE_ROWS * ranges(np.zeros_like(flat), flat)
        return num.sum(1), expert % local, row

    def sums(self, work, first):
        """The bits of the sum of every token. The first routing is number `first` of the batch."""
        b, n = work.batch, self.num_routings
        k, w, num_tokens = b.topk, b.num_ranks, len(self.slot)
        y, y_weight = work.y.reshape(-1, b.hidden), work.y_weight.reshape(-1)
        shifts = np.repeat(shift(first + np.arange(len(self.tokens)) % n), self.tokens)
        rank, kept = self.choice_rank.reshape(num_tokens, k), self.choice_row.reshape(num_tokens, k) >= 0
        row = rank * work.y.shape[1] + shifts[:, None] + self.choice_row.reshape(num_tokens, k)
        partial = np.zeros((num_tokens, w if b.mode == "local" else 1, b.hidden), np.float32)
        for i in range(k):
            t = np.flatnonzero(kept[:, i])
            terms = to_float32(y.take(row[t, i], 0), b.dtype)
            if b.weights:
                terms = y_weight[row[t, i], None] * terms
            if b.mode == "local":
                partial[t, rank[t, i]] += terms
            else:
                partial[t, 0] += terms
        if b.mode != "local":
            return from_float32(partial[:, 0], b.dtype)
        total = np.zeros((num_tokens, b.hidden), np.float32)
        for r in range(w):
            total += to_float32(from_float32(np.ascontiguousarray(partial[:, r]), b.dtype), b.dtype)
        return from_float32(total, b.dtype)


def shapes_of_parts(b, num_tokens):
    """The shape of each part of a layout. That of tiles has no fixed size."""
    return {"counts": (b.num_ranks, b.num_experts), "expert_offsets": (b.num_local + 1,),
            "send_tokens": (b.num_ranks,), "recv_tokens": (b.num_ranks,), "rows_per_rank": (b.num_ranks,),
            "token_dst_scatter_idx": (num_tokens, b.topk), "token_sort_indices": (num_tokens * b.topk,),
            "token_slots": (num_tokens, b.num_ranks)}


class Plans:
    """The plans that all ranks made in a batch."""

    def __init__(self, work, got):
        b, self.tokens = work.batch, work.tokens
        self.plan = np.concatenate([g.plan for g in got])
        before = np.cumsum([0, *(len(g.plan) for g in got)])[:-1]
        self.start = np.stack([g.plan_first for g in got]) + before[:, None]
        self.at = {}  # part -> (offset, size) by rank and T
        for r, g in enumerate(got):
            for t, parts in g.parts.items():
                for name, shape in shapes_of_parts(b, t).items():
                    assert parts[name][1] == shape, f"rank {r}, {t} tokens: shape {parts[name][1]} of {name}"
                for name, (offset, shape) in parts.items():
                    tables = self.at.setdefault(name, np.zeros((2, b.num_ranks, b.max_tokens + 1), int))
                    tables[:, r, t] = offset, np.prod(shape)

    def numbers(self, word, first, last):
        """A word at the head of each plan."""
        return self.plan[self.start[:, first:last].reshape(-1) + word]

    def part(self, name, first, last, sizes=None):
        """A part of each plan of the routings first .. last - 1, or its first `sizes` words."""
        ranks = np.arange(len(self.start))[:, None]
        offset, size = self.at[name][:, ranks, self.tokens[:, first:last]]
        starts = (self.start[:, first:last] + offset).reshape(-1)
        return self.plan[ranges(starts, size.reshape(-1) if sizes is None else sizes)]


def same(got, want, what):
    if got.size == want.size:
        got = got.reshape(want.shape)
    if got.shape != want.shape or not np.array_equal(got, want):
        detail = f"shape {got.shape}, wanted {want.shape}"
        if got.shape == want.shape:
            bad = np.argwhere(got != want)
            at = tuple(bad[0].tolist())
            detail = f"{len(bad)} of {got.size} differ, the first at {at}: got {got[at]}, wanted {want[at]}"
        raise AssertionError(f"{what}: {detail}")


def check_plans(work, plans, want, first, last):
    b, n = work.batch, last - first
    w = b.num_ranks

    def check(name, wanted):
        same(plans.part(name, first, last), wanted, name)

    # The first axes are the rank and the routing, so that a message says which ones differ.
    check("counts", np.broadcast_to(want.counts, (w, *want.counts.shape)))
    check("expert_offsets", want.expert_row.reshape(w, n, -1))
    same(plans.numbers(_C.HEAD_NUM_ROWS, first, last), want.num_rows, "num_rows")
    check("send_tokens", want.send.reshape(w, n, w))
    check("recv_tokens", want.send.reshape(w, n, w).transpose(2, 1, 0))
    check("rows_per_rank", np.broadcast_to(want.num_rows.reshape(w, n).T, (w, n, w)))
    num_tiles, expert, row = want.tiles()
    same(plans.numbers(_C.HEAD_NUM_TILES, first, last), num_tiles, "num_tiles")
    same(plans.part("tile_expert", first, last, num_tiles), expert, "tile_expert")
    same(plans.part("tile_row", first, last, num_tiles), row, "tile_row")
    check("token_dst_scatter_idx", want.choice_row)
    check("token_sort_indices", want.sort)
    check("token_slots", want.slot)
    return num_tiles


def check_routings(work, plans, got, first, last):
    """Compare the routings first .. last - 1 with the oracle. got: the Results of each rank."""
    b, n = work.batch, last - first
    want = Wanted(work, first, last)
    num_tiles = check_plans(work, plans, want, first, last)
    for party, (m, tiles) in enumerate(zip(want.num_rows, num_tiles)):
        read = got[party // n].read.get(first + party % n, (m, tiles))
        assert read == (m, tiles), f"num_rows and num_tiles of rank {party // n}: {read}, wanted {m, tiles}"
    lengths = np.full_like(want.num_rows, b.most_rows) if b.capacity else want.num_rows
    same(np.concatenate([g.lengths[first:last] for g in got]), lengths, "numbers of returned rows")
    is_row = (np.arange(b.most_rows) < want.num_rows[:, None]).reshape(-1) if b.capacity else None

    def rows_of(name):
        """The rows or weights of all parties. Those after row M are zero."""
        begin = [sum(g.lengths[:first]) for g in got]
        end = [at + sum(g.lengths[first:last]) for g, at in zip(got, begin)]
        rows = np.concatenate([getattr(g, name)[i:j] for g, i, j in zip(got, begin, end)])
        if not b.capacity:
            return rows
        assert not rows[~is_row].any(), f"{name} after row M are not zero"
        return rows[is_row]

    # The row of the pools from which each token came.
    party = np.arange(n * b.num_ranks)
    pool_row = ranges(party // n * work.x.shape[1] + shift(first + party % n), want.tokens)
    is_padding = want.row_choice < 0
    token = pool_row[want.row_choice // b.topk] if len(pool_row) else want.row_choice
    wanted = work.x.reshape(-1, b.hidden).take(token, 0)
    wanted[is_padding] = 0
    same(rows_of("rows"), wanted, "rows")
    assert all((g.weights is not None) == b.weights for g in got)
    if b.weights:
        wanted = work.weight.reshape(-1)[token * b.topk + want.row_choice % b.topk]
        wanted[is_padding] = 0
        same(rows_of("weights"), wanted, "row weights")
    sums = [g.sums[at[first] : at[last]] for g, at in zip(got, work.first)]
    same(np.concatenate(sums), want.sums(work, first), "sums")


def chunks(work):
    """(first, last) of routings that are checked at once, so that the arrays of the oracle stay small."""
    b = work.batch
    of_token = b.hidden * (b.topk + (b.num_ranks if b.mode == "local" else 1))
    size = work.tokens.sum(0) * of_token + b.num_ranks**2 * b.num_experts
    size += b.num_experts * (b.expert_alignment - 1) * b.hidden
    size += b.num_ranks * b.most_rows * b.hidden if b.capacity else 0
    first, total = 0, 0
    for i, of_routing in enumerate(size.tolist()):
        if total and total + of_routing > CHUNK:
            yield first, i
            first, total = i, 0
        total += of_routing
    yield first, len(size)


def check_batch(work, got):
    """Compare the Results of all ranks with the oracle. An error names the first routing that differs."""
    b, plans = work.batch, Plans(work, got)
    for first, last in chunks(work):
        try:
            check_routings(work, plans, got, first, last)
        except AssertionError as error:
            for i in range(first, last):
                try:
                    check_routings(work, plans, got, i, i + 1)
                except AssertionError as e:
                    indices = work.indices_of(i)
                    is_short = sum(idx.size for idx in indices) < 200
                    text = [idx.tolist() for idx in indices] if is_short else "(large)"
                    raise AssertionError(f"{e}\nrouting {i} of {b}\nindices by rank: {text}") from None
            raise AssertionError(f"{error}\nrouting {first} to {last - 1} of {b}") from None
