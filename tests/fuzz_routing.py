"""Random routings through random layers, compared bit by bit with an oracle of a few vectorised lines.

    python tests/fuzz_routing.py --cases 200000 --seed 1
    python tests/fuzz_routing.py --seed 1 --batch 17             one batch again, as a failure prints it
    torchrun --nproc-per-node 4 tests/fuzz_routing.py --cases 20000 --device cuda

A batch is one layer and some dozen routings through it; seed and batch number decide everything in it.  On the
CPU the ranks of a batch are threads, and several processes work on batches; under torchrun every process is a rank.
The oracle is not epmoe.reference, which is written to be read; test_fuzz_sample.py compares the two.

Letters: W ranks, E experts, L = E/W, T tokens of a rank, N of all ranks, K choices, H hidden, M rows received.
"""

import argparse
import dataclasses
import multiprocessing
import os
import random
import sys
import time
import traceback

import numpy as np
import torch
import torch.utils.deterministic

import epmoe
from epmoe.testing import run_threads

DTYPES = {"float32": (torch.float32, np.int32, 4), "bfloat16": (torch.bfloat16, np.int16, 8), "float16": (torch.float16, np.int16, 8)}
MODES = ("scatter", "gather", "local")
PATTERNS = ("uniform", "distinct", "one_expert", "one_rank", "own_rank", "heavy_drop", "all_dropped", "duplicates", "edges", "sentinels", "mixed")
ROUTINGS = 64  # of a batch, at most
TILE_ROWS = 128
PARTS = ("counts", "expert_offsets", "send_tokens", "recv_tokens", "rows_per_rank", "tile_expert", "tile_row", "token_dst_scatter_idx",
         "token_sort_indices", "token_slots")
BATCH_LIMIT_S = 120


# ---- a batch: everything follows from (seed, number) ----


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

    @property
    def num_experts(self):
        return self.num_local * self.num_ranks


def make_batch(seed, number, num_ranks=None):
    """(Batch, generator of its numbers).  Most are small, so that there are many; some are not."""
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
    b = Batch(w, min(local, 512 // w), topk, hidden, tokens, dtype, pick.choice(MODES), pick.choice((torch.int32, torch.int64)), pick.random() < 0.6,
              pick.random() < 0.3, pick.choice((1,) * 8 + (2, 3)), pick.choice((1, 1, 2)), 4 if large else ROUTINGS)
    return b, np.random.default_rng([abs(int(seed)), number])


def make_indices(b, rank, pattern, tokens, g):
    """[T, K] int64 of one rank."""
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
    """Bits of float32 numbers rounded to dtype, to nearest and even."""
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
    """The inputs of a batch: of every routing and rank, and pools that rows are cut from."""

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
            self.indices.append([make_indices(b, r, pattern if pattern != "mixed" else PATTERNS[g.integers(len(PATTERNS) - 1)], int(t), g)
                                 for r, t in enumerate(tokens)])
        # Rows of a routing begin at its own number, so none are what an earlier routing had at the same place.
        self.x = g.integers(info.min, info.max, (b.num_ranks, most, b.hidden), bits, endpoint=True)
        self.weight = g.integers(-(2**31), 2**31 - 1, (b.num_ranks, most, b.topk), np.int32, endpoint=True)
        rows = b.num_ranks * b.max_tokens * b.topk
        numbers = g.standard_normal((b.num_ranks, rows + b.num_routings, b.hidden), np.float32)
        numbers *= np.exp2(g.integers(-5, 6, (*numbers.shape[:2], 1))).astype(np.float32)
        self.y = from_float32(numbers, b.dtype)
        self.y_weight = g.standard_normal((b.num_ranks, rows + b.num_routings), np.float32)

    def x_of(self, routing, rank):
        return self.x[rank, routing : routing + len(self.indices[routing][rank])]

    def weight_of(self, routing, rank):
        return self.weight[rank, routing : routing + len(self.indices[routing][rank])]


def run_rank(world, device, work):
    """All routings of a batch on one rank: what came back of each, as numpy arrays."""
    b, rank = work.batch, world.rank
    dtype, bits, _ = DTYPES[b.dtype]
    rows_at_most = b.num_ranks * b.max_tokens * b.topk
    layer = epmoe.EPAll2AllLayer(world, b.max_tokens, b.hidden, b.topk, num_tot_experts=b.num_experts, dtype=dtype, num_sm=b.num_sm, device=device,
                                 combine_mode="gather" if b.mode == "gather" else "scatter", enable_local_combine=b.mode == "local",
                                 capacity=rows_at_most if b.capacity else None, num_buffers=b.num_buffers)
    world.__dict__.setdefault("_kept", []).append(layer) if world.group is None else None  # threads use each other's addresses

    def tensor(array, as_type):  # a copy: numpy does not care for alignment
        return torch.from_numpy(np.ascontiguousarray(array)).view(as_type).to(device, copy=True)

    results = []
    y_pool, w_pool = tensor(work.y[rank], dtype), tensor(work.y_weight[rank], torch.float32)  # rows are multiples of 16 bytes
    for i in range(b.num_routings):
        idx = torch.from_numpy(work.indices[i][rank]).to(device=device, dtype=b.index_dtype)
        weight = tensor(work.weight_of(i, rank), torch.float32) if b.weights else None
        rows, row_weight, layout = layer.dispatch(tensor(work.x_of(i, rank), dtype), idx, weight, buffer=i % b.num_buffers)
        m = len(rows)
        out = layer.combine(y_pool[i : i + m], layout, w_pool[i : i + m] if b.weights else None)
        results.append((rows, row_weight, layout, out))
    layer.synchronize()
    as_bits = {4: torch.int32, 2: torch.int16}[bits().itemsize]
    places = {}  # T -> where the parts of a layout stand in its plan
    for rows, w, layout, out in results:
        if layout.num_tokens not in places:
            parts = {name: getattr(layout, name) for name in PARTS}
            places[layout.num_tokens] = {name: (p.storage_offset(), p.numel(), tuple(p.shape)) for name, p in parts.items()}
    results = [(rows.view(as_bits).cpu().numpy(), None if w is None else w.view(torch.int32).cpu().numpy(),
                {"plan": layout.plan.cpu().numpy(), "at": places[layout.num_tokens], "num_tiles": layout.num_tiles, "num_rows": layout.num_rows},
                out.view(as_bits).cpu().numpy()) for rows, w, layout, out in results]
    layer.finalize()
    return results


def parts_of(plan):
    """A layout's parts by name, as views of its plan."""
    views = {name: plan["plan"][a : a + n].reshape(shape) for name, (a, n, shape) in plan["at"].items()}
    return views | {"num_tiles": plan["num_tiles"], "num_rows": plan["num_rows"]}


# ---- the oracle ----


class Wanted:
    """What a routing must give, all ranks at once; arrays of tokens are those of all ranks one behind the other."""

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
        self.expert_row = np.concatenate([np.zeros((w, 1), int), of_expert.cumsum(1)], 1)
        self.num_rows = self.expert_row[:, -1]
        self.row_base = np.concatenate([[0], self.num_rows.cumsum()])
        order = np.argsort(e, kind="stable")
        self.row_choice = at[order]  # the choice that each row, of all ranks, comes from
        rank = e[order] // local
        self.choice_row = np.full(n * k, -1)  # row at its rank of each choice
        self.choice_row[self.row_choice] = np.arange(len(at)) - self.row_base[rank]
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
        start, size = self.expert_row[rank][:-1], np.diff(self.expert_row[rank])
        num = -(-size // TILE_ROWS)
        expert = np.repeat(np.arange(len(size)), num)
        first = np.concatenate([[0], num.cumsum()])[expert]
        return expert, start[expert] + TILE_ROWS * (np.arange(len(expert)) - first)

    def sums(self, b, work, routing):
        """Bits of every token's sum."""
        n, k, w = len(self.slot), b.topk, b.num_ranks
        y = np.concatenate([work.y[r, routing : routing + m] for r, m in enumerate(self.num_rows)])
        y = to_float32(np.ascontiguousarray(y), b.dtype)
        if b.weights:
            y = np.concatenate([work.y_weight[r, routing : routing + m] for r, m in enumerate(self.num_rows)])[:, None] * y
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
            detail = f"{len(bad)} of {got.size} differ, the first at {tuple(bad[0].tolist())}: got {got[tuple(bad[0])]}, wanted {want[tuple(bad[0])]}"
        raise AssertionError(f"{what}: {detail}")


def check_routing(work, routing, got):
    """got: what run_rank gave for this routing, of every rank."""
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
        assert len(rows) == (w * b.max_tokens * k if b.capacity else m), f"rank {r}: {len(rows)} rows"
        if b.capacity:
            assert not rows[m:].any() and (weight is None or not weight[m:].any()), f"rank {r}: what is behind M is not zero"
        assert (weight is not None) == b.weights
    same(np.concatenate([plan["token_dst_scatter_idx"] for _, _, plan, _ in got]).reshape(-1), want.choice_row, "rows of choices")
    same(np.concatenate([plan["token_sort_indices"] for _, _, plan, _ in got]), want.sort, "sorted choices")
    same(np.concatenate([plan["token_slots"] for _, _, plan, _ in got]), want.slot, "slots")
    x = np.concatenate([work.x_of(routing, r) for r in range(w)])
    same(np.concatenate([g[0][:m] for g, m in zip(got, want.num_rows)]), x[want.row_choice // k], "rows")
    if b.weights:
        weight = np.concatenate([work.weight_of(routing, r) for r in range(w)]).reshape(-1)
        same(np.concatenate([g[1][:m] for g, m in zip(got, want.num_rows)]), weight[want.row_choice], "row weights")
    same(np.concatenate([g[3] for g in got]), want.sums(b, work, routing), "sums")


# ---- running ----


def run_batch(seed, number, run=None):
    """Run and check one batch; the number of its routings.  run(work) gives every rank's results."""
    b, g = make_batch(seed, number)
    work = Work(b, g)
    results = run(work) if run else run_threads(lambda world: run_rank(world, torch.device("cpu"), work), b.num_ranks, timeout_s=BATCH_LIMIT_S)
    for i in range(b.num_routings):
        try:
            check_routing(work, i, [r[i] for r in results])
        except AssertionError as e:
            small = [idx.tolist() for idx in work.indices[i]] if sum(idx.size for idx in work.indices[i]) < 200 else "(large)"
            raise AssertionError(f"{e}\nrouting {i} of {b}\nindices by rank: {small}") from None
    return b.num_routings


def prepare():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # what nobody wrote is NaN


def worker(seed, first, step, todo, pipe):
    """One process of several: batches first, first + step, ... until told to stop."""
    prepare()
    number = first
    try:
        while todo.value > 0:
            n = run_batch(seed, number)
            with todo.get_lock():
                todo.value -= n
            pipe.send((number, n, None))
            number += step
    except BaseException:
        pipe.send((number, 0, traceback.format_exc()))
    pipe.close()


def fuzz(cases, seed, processes, say=print):
    """Run batches 0, 1, ... in several processes until `cases` routings are done.  None, or (batch, text) of a failure."""
    context = multiprocessing.get_context("spawn")
    todo, start, done, pipes, workers = context.Value("q", cases), time.monotonic(), 0, [], []
    for i in range(processes):
        mine, theirs = context.Pipe(duplex=False)
        p = context.Process(target=worker, args=(seed, i, processes, todo, theirs), daemon=True)
        p.start()
        theirs.close()
        pipes.append(mine)
        workers.append(p)
    shown, failure, heard, at = start, None, time.monotonic(), {}
    while pipes and failure is None:
        for pipe in multiprocessing.connection.wait(pipes, timeout=1.0):
            heard = time.monotonic()
            try:
                number, n, text = pipe.recv()
            except EOFError:
                pipes.remove(pipe)
                continue
            at[pipe] = number
            done += n
            if text:
                failure = number, text
        now = time.monotonic()
        if now - shown > 2:
            say(f"{done} routings, {done / (now - start):.0f}/s", flush=True)
            shown = now
        if now - heard > BATCH_LIMIT_S + 30:
            failure = max(at.values(), default=0) + processes, "a process says nothing any more"
    for i, p in enumerate(workers):
        p.join(0 if failure else 10)
        if p.exitcode not in (0, None) and failure is None:
            failure = at.get(i, 0), f"a process ended with {p.exitcode}"
        if p.is_alive():
            p.kill()
    return done, time.monotonic() - start, failure


def fuzz_torchrun(cases, seed, device, only=None):
    """Every process is a rank; rank 0 checks and speaks."""
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    world = epmoe.World(timeout_s=BATCH_LIMIT_S)
    at = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    done, number, failure, start, shown = 0, only or 0, None, time.monotonic(), time.monotonic()
    while done < cases and failure is None:
        b, g = make_batch(seed, number, size)
        work = Work(b, g)
        try:
            mine = run_rank(world, at, work), None
        except Exception:
            mine = None, f"rank {rank}: {traceback.format_exc()}"
        everybody = [None] * size
        dist.all_gather_object(everybody, mine)
        errors = [e for _, e in everybody if e]
        try:
            if errors:
                raise AssertionError("\n".join(errors))
            for i in range(b.num_routings if rank == number % size else 0):  # the ranks take turns in checking
                check_routing(work, i, [r[i] for r, _ in everybody])
            verdict = None
        except AssertionError as e:
            verdict = f"{e}\n{b}"
        verdicts = [None] * size
        dist.all_gather_object(verdicts, verdict)
        failure = next(((number, v) for v in verdicts if v), None)
        done, number = done + b.num_routings, number + 1
        if rank == 0 and time.monotonic() - shown > 2:
            print(f"{done} routings, {done / (time.monotonic() - start):.0f}/s", flush=True)
            shown = time.monotonic()
        if only is not None:
            break
    if failure is None:
        world.close()
        dist.destroy_process_group()
    return done, time.monotonic() - start, failure


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", type=int, default=20000, help="routings, at least")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks under torchrun")
    p.add_argument("--processes", type=int, default=os.cpu_count(), help="that work on batches side by side (CPU)")
    p.add_argument("--batch", type=int, help="run this batch only")
    a = p.parse_args()
    prepare()
    ranked = "RANK" in os.environ
    if a.device == "cuda" and not ranked:
        p.error("--device cuda needs torchrun, which starts a process for each GPU")
    if ranked:
        done, seconds, failure = fuzz_torchrun(a.cases, a.seed, a.device, a.batch)
    elif a.batch is not None:
        start, failure, done = time.monotonic(), None, 0
        try:
            done = run_batch(a.seed, a.batch)
        except Exception:
            failure = a.batch, traceback.format_exc()
        seconds = time.monotonic() - start
    else:
        done, seconds, failure = fuzz(a.cases, a.seed, a.processes)
    if int(os.environ.get("RANK", 0)) == 0:
        if failure:
            how = f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']} tests/fuzz_routing.py --device {a.device}" if ranked else "python tests/fuzz_routing.py"
            print(f"{failure[1]}\nFAILED after {done} routings; again: {how} --seed {a.seed} --batch {failure[0]}", flush=True)
        else:
            print(f"{done} routings, {seconds:.1f} s, {done / seconds:.0f}/s, no difference", flush=True)
    sys.stdout.flush()
    if failure:
        os._exit(1)  # ranks may still wait for each other


if __name__ == "__main__":
    main()
