"""Test cases: one routing through a layer on every rank, and the comparison of all results with the oracle.

A rank calls run_case or run_routing, which returns a dict of tensors. check_case compares the results of all
ranks with epmoe.reference. Moved rows are compared bit by bit. Sums have a fixed order and are also compared
bit by bit. Inputs are generated from seeds, so any rank can generate the inputs of every rank.

Letters: W ranks, E experts, L = E/W, T tokens of a rank, K choices, H hidden, M rows received.
"""

import dataclasses
import itertools
import os

import torch
import torch.utils.deterministic
from hypothesis import strategies as st

import epmoe
from epmoe import reference
from epmoe.testing import SIDE_BY_SIDE, routing
from outcomes import MISTAKE_LIMIT_S, check_outcomes, outcome  # noqa: F401
from rank_processes import process_ranks  # noqa: F401

TILE_ROWS = 128
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MODES = ("scatter", "gather", "local")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Case:
    num_local: int = 2  # L
    topk: int = 2
    hidden: int = 16
    max_tokens: int = 9
    tokens: str = "full"  # selects T of each rank: see num_tokens
    pattern: str = "uniform"
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int64
    mode: str = "scatter"
    weights: bool = True
    capacity: str | None = None  # None, "roomy" (more than can arrive) or "exact" (rows of the fullest rank)
    num_sm: int | None = None
    num_buffers: int = 1
    seed: int = 0
    expert_alignment: int = 1
    expert_capacity: int | None = None

    def plan(self, indices):
        return reference.plan(indices, self.num_local * len(indices), self.expert_alignment,
                              self.expert_capacity)

    def __str__(self):
        return "-".join(str(v).removeprefix("torch.") for v in dataclasses.astuple(self))


def pairwise(**values):
    """Cases, as {name: value}, in which each pair of values of two names occurs in at least one case."""
    names = list(values)
    missing = {(a, u, b, v): None for a, b in itertools.combinations(names, 2)
               for u in range(len(values[a])) for v in range(len(values[b]))}
    found = []
    while missing:
        a, u, b, v = next(iter(missing))
        case = {a: u, b: v}
        for name in names:
            if name not in case:
                case[name] = max(range(len(values[name])), key=lambda w: sum(
                    ((x, y, name, w) if names.index(x) < names.index(name) else (name, w, x, y)) in missing
                    for x, y in case.items()))
        for a, b in itertools.combinations(names, 2):
            missing.pop((a, case[a], b, case[b]), None)
        found.append({name: values[name][case[name]] for name in names})
    return found


def first(num, values):
    """The values as parameters of a test. Those after the first num are long."""
    import pytest

    return [v if i < num else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.long)
            for i, v in enumerate(values)]


def case_id(value):
    """The id of a test parameter, or None for pytest's default."""
    return str(value).removeprefix("torch.") if isinstance(value, (Case, torch.dtype)) else None


def generator(*numbers):
    g = torch.Generator()
    g.manual_seed(hash(tuple(int(n) for n in numbers)) & (2**62 - 1))
    return g


def num_tokens(case, rank, num_ranks):
    """T of a rank. It is at most max_tokens."""
    most = case.max_tokens
    if case.tokens == "full":
        return most
    if case.tokens == "none":
        return 0
    if case.tokens == "first_none":
        return 0 if rank == 0 else most
    if case.tokens == "only_last":
        return most if rank == num_ranks - 1 else 0
    if case.tokens == "unequal":
        return int(torch.randint(0, most + 1, (), generator=generator(case.seed, rank, 1)))
    raise ValueError(case.tokens)


def indices_of(case, rank, num_ranks):
    """The expert indices of a rank: [T, K]."""
    num_experts = case.num_local * num_ranks
    idx = routing(case.pattern, num_tokens(case, rank, num_ranks), case.topk, num_experts, num_ranks, rank,
                  generator(case.seed, rank, 2))
    return idx.to(case.index_dtype).contiguous()


def random_bits(shape, dtype, g):
    """Random bit patterns. They include NaNs with payloads, infinities, denormals and -0.0."""
    n = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape, n), generator=g, dtype=torch.uint8)
    return bits.view(dtype).squeeze(-1)


def random_numbers(shape, dtype, g):
    """Finite numbers of different magnitudes, some -0.0 or tiny. Their sum depends on the order."""
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-6, 7, shape, generator=g).float())
    pick = torch.rand(shape, generator=g)
    x = torch.where(pick < 0.02, -0.0, torch.where(pick < 0.04, x * 1e-7, x))
    return x.to(dtype)


def inputs_of(case, rank, num_ranks):
    """x [T, H] and weight [T, K] of a rank: random bit patterns."""
    t = num_tokens(case, rank, num_ranks)
    x = random_bits((t, case.hidden), case.dtype, generator(case.seed, rank, 3))
    if not case.weights:
        return x, None
    return x, random_bits((t, case.topk), torch.float32, generator(case.seed, rank, 4))


def misaligned(t):
    """A copy of t at an address that is not a multiple of 16."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def rows_for_combine(case, rank, num_rows, num_valid):
    """The inputs of combine: y [num_rows, H] and weight [num_rows]. Rows after num_valid hold NaN."""
    y = random_numbers((num_rows, case.hidden), case.dtype, generator(case.seed, rank, 5))
    w = random_numbers((num_rows,), torch.float32, generator(case.seed, rank, 6)) if case.weights else None
    y[num_valid:] = torch.nan
    if w is not None:
        w[num_valid:] = torch.nan
    return y, w


def capacity_of(case, num_ranks):
    if case.capacity == "roomy":
        return num_ranks * case.max_tokens * case.topk + 5 + case.num_local * (case.expert_alignment - 1)
    if case.capacity == "exact":
        indices = [indices_of(case, r, num_ranks) for r in range(num_ranks)]
        return max(1, max(len(rows) for rows in case.plan(indices)["rows"]))
    return None


def make_layer(world, device, case, **options):
    """A layer for a case. It lives as long as its world.

    Ranks that are threads access each other's memory by address. So a rank must not free its layer while
    another rank still uses it.
    """
    options = {"combine_mode": "scatter" if case.mode == "local" else case.mode,
               "enable_local_combine": case.mode == "local", "capacity": capacity_of(case, world.size),
               "num_sm": case.num_sm, "num_buffers": case.num_buffers, "device": device,
               "expert_alignment": case.expert_alignment, "expert_capacity": case.expert_capacity} | options
    if "heap" in options:
        del options["device"]
    layer = epmoe.EPAll2AllLayer(world, case.max_tokens, case.hidden, case.topk,
                                 num_tot_experts=case.num_local * world.size, dtype=case.dtype, **options)
    keep(world, layer)
    return layer


def keep(world, *things):
    """Keep objects alive as long as their world, if its ranks are threads. See make_layer."""
    if world.group is None:
        world.__dict__.setdefault("_kept", []).extend(things)


def layout_parts(layout):
    """All parts of a layout, by name."""
    names = ("counts", "expert_offsets", "tokens_per_expert", "token_dst_scatter_idx", "token_sort_indices",
             "token_slots", "send_tokens", "recv_tokens", "recv_offsets", "rows_per_rank", "tile_expert",
             "tile_row", "unpadded_tokens_per_expert")
    tensors = {n: getattr(layout, n).clone() for n in names}
    return tensors | {"num_rows": layout.num_rows, "num_tiles": layout.num_tiles}


def run_routing(layer, case, *, layout=None, buffer=0):
    """Run a case through a layer on one rank: the inputs and results of this rank, by name."""
    rank, size, device = layer.rank, layer.world_size, layer.device
    idx = indices_of(case, rank, size)
    x, weight = inputs_of(case, rank, size)
    to = {"device": device}
    args = (x.to(**to), None if weight is None else weight.to(**to))
    if layout is None:
        rows, row_weight, layout = layer.dispatch(args[0], idx.to(**to), args[1], buffer=buffer)
    else:
        rows, row_weight, layout = layer.dispatch(args[0], weight=args[1], layout=layout)
    y, w = rows_for_combine(case, rank, len(rows), layout.num_rows)
    ends, num = layout.expert_offsets.tolist(), layout.unpadded_tokens_per_expert.tolist()
    for first, n, end in zip(ends, num, ends[1:]):  # padding rows
        for t in (y,) if w is None else (y, w):
            t[first + n : end] = torch.nan
    out = layer.combine(y.to(**to), layout, None if w is None else w.to(**to))
    return {"idx": idx, "x": x, "weight": weight, "rows": rows, "row_weight": row_weight, "y": y, "w": w,
            "out": out, **layout_parts(layout)}


def run_case(world, device, case, **options):
    """Run a case through a new layer on one rank. The staging memory holds old data before the run."""
    layer = make_layer(world, device, case, **options)
    poison_staging(layer)
    result = run_routing(layer, case)
    layer.synchronize()
    layer.finalize()
    return result


def poison_staging(layer):
    """Fill a layer's staging memory with NaN rows. Each token goes to as many ranks as K allows, and back."""
    t, k, size, local = layer.max_tokens, layer.topk, layer.world_size, layer.num_local_experts
    choices = (torch.arange(t)[:, None] + torch.arange(k)[None, :]) % size * local
    capacity = layer.capacity
    if capacity is not None and capacity < size * t * k:
        choices = choices[: max(0, capacity // (size * k))]  # send only as many tokens as fit at every rank
    x = torch.full((len(choices), layer.hidden), torch.nan, dtype=layer.dtype, device=layer.device)
    w = torch.full(choices.shape, torch.nan, device=layer.device)
    for buffer in range(layer._config.num_buffers):
        rows, row_weight, layout = layer.dispatch(x, choices.contiguous().to(layer.device), w, buffer=buffer)
        layer.combine(torch.full_like(rows, torch.nan), layout, row_weight)


# ---- the comparison ----


def same_bits(got, want, what):
    """Assert that all bits are equal, including NaN payloads and signs of zero."""
    got, want = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    types = f"got {got.dtype} {list(got.shape)}, wanted {want.dtype} {list(want.shape)}"
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {types}"
    bits = BITS[got.element_size()]
    bad = (got.view(bits) != want.view(bits)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise AssertionError(f"{what}: {len(bad)} of {got.numel()} differ, the first at {at}: "
                             f"got {got[at].item()}, wanted {want[at].item()}")


def same_numbers(got, want, what):
    """Assert equal shapes and integers. Each value may be a tensor, a list or a number."""
    got, want = torch.as_tensor(got).cpu().long(), torch.as_tensor(want).cpu().long()
    assert got.shape == want.shape, f"{what}: got {list(got.shape)}, wanted {list(want.shape)}"
    assert torch.equal(got, want), f"{what}: got {str(got.tolist())[:300]}, wanted {str(want.tolist())[:300]}"


def slots_by_hand(idx, num_experts, num_ranks):
    """[T, W]: the position of each token among the tokens that go to a rank, or -1. One token at a time."""
    local, slots, used = num_experts // num_ranks, torch.full((len(idx), num_ranks), -1), [0] * num_ranks
    for t, choices in enumerate(idx.tolist()):
        for r in sorted({e // local for e in choices if 0 <= e < num_experts}):
            slots[t, r] = used[r]
            used[r] += 1
    return slots


def recv_offsets_by_hand(counts, size, local, expert_rows):
    """[W, L, W]: the first row of each (rank, local expert, source). Rows are sorted in this order."""
    offsets = []
    for rank in range(size):
        at, of_rank = 0, []
        for e in range(rank * local, (rank + 1) * local):
            of_rank.append([at + sum(counts[v][e] for v in range(source)) for source in range(size)])
            at += expert_rows[e]
        offsets.append(of_rank)
    return offsets


def tiles_by_hand(offsets):
    """(expert, first row) of each tile. A tile never contains rows of two experts."""
    return [(e, row) for e, (a, b) in enumerate(zip(offsets, offsets[1:])) for row in range(a, b, TILE_ROWS)]


def check_plan(results, num_experts, plan=None):
    """Compare every part of every rank's layout with the oracle's plan. Return that plan."""
    size = len(results)
    local = num_experts // size
    p = reference.plan([r["idx"] for r in results], num_experts) if plan is None else plan
    for rank, got in enumerate(results):
        where = f"rank {rank}: "
        flat = got["idx"].long().reshape(-1)
        kept = (flat >= 0) & (flat < num_experts)
        order = torch.argsort(torch.where(kept, flat, num_experts), stable=True)[: int(kept.sum())]
        here = slice(rank * local, (rank + 1) * local)
        rows_of_expert = p["expert_rows"][here]
        offsets = [0] + rows_of_expert.cumsum(0).tolist()
        same_numbers(got["counts"], p["counts"], where + "counts")
        same_numbers(got["tokens_per_expert"], rows_of_expert, where + "tokens_per_expert")
        same_numbers(got["unpadded_tokens_per_expert"], p["counts"].sum(0)[here], where + "unpadded tokens")
        same_numbers(got["expert_offsets"], offsets, where + "expert_offsets")
        same_numbers(got["num_rows"], len(p["rows"][rank]), where + "num_rows")
        same_numbers(got["rows_per_rank"], [len(rows) for rows in p["rows"]], where + "rows_per_rank")
        same_numbers(got["token_dst_scatter_idx"], p["token_row"][rank], where + "token_dst_scatter_idx")
        sort = torch.full_like(flat, -1)
        sort[: len(order)] = order
        same_numbers(got["token_sort_indices"], sort, where + "token_sort_indices")
        same_numbers(got["token_slots"], slots_by_hand(got["idx"], num_experts, size), where + "token_slots")
        same_numbers(got["send_tokens"], p["send_tokens"][rank], where + "send_tokens")
        same_numbers(got["recv_tokens"], p["send_tokens"][:, rank], where + "recv_tokens")
        recv_offsets = recv_offsets_by_hand(p["counts"].tolist(), size, local, p["expert_rows"].tolist())
        same_numbers(got["recv_offsets"], recv_offsets, where + "recv_offsets")
        tiles = list(zip(got["tile_expert"].tolist(), got["tile_row"].tolist()))[: got["num_tiles"]]
        assert tiles == tiles_by_hand(offsets), f"{where}tiles: got {tiles}, wanted {tiles_by_hand(offsets)}"
    return p


def check_rows(results, plan, weight_dtype=torch.float32):
    """Compare the rows and row weights that dispatch delivered with the oracle's."""
    rows = reference.dispatch([r["x"] for r in results], plan)
    with_weights = results[0]["weight"] is not None
    weights = [None] * len(results)
    if with_weights:
        weights = reference.dispatch_weights([r["weight"] for r in results], plan)
    for rank, got in enumerate(results):
        m = len(rows[rank])
        same_bits(got["rows"][:m], rows[rank], f"rank {rank}: rows")
        zeros = torch.zeros_like(got["rows"][m:], device="cpu")
        same_bits(got["rows"][m:], zeros, f"rank {rank}: rows after row M")
        assert (got["row_weight"] is not None) == with_weights
        if with_weights:
            # Not by assignment, which converts a single number to float64: a signalling NaN becomes quiet.
            want = torch.cat([weights[rank], torch.zeros(len(got["row_weight"]) - m)])
            same_bits(got["row_weight"], want.to(weight_dtype), f"rank {rank}: row weights")


def check_sums(results, plan, num_experts, mode):
    """Compare the results of combine with the oracle's sums."""
    ms = [len(rows) for rows in plan["rows"]]
    weights = None if results[0]["w"] is None else [r["w"][:m] for r, m in zip(results, ms)]
    wanted = reference.combine([r["y"][:m] for r, m in zip(results, ms)], plan, [r["idx"] for r in results],
                               num_experts, weights, mode == "local")
    for rank, (got, want) in enumerate(zip(results, wanted)):
        same_bits(got["out"], want, f"rank {rank}: combine")


def check_case(results, case):
    """Check plan, rows and sums of the results of run_case or run_routing."""
    num_experts = case.num_local * len(results)
    p = check_plan(results, num_experts, case.plan([r["idx"] for r in results]))
    check_rows(results, p)
    check_sums(results, p, num_experts, case.mode)


# ---- the order in which tokens are sent ----


def ordered(tokens, key):
    """tokens [N] sorted by (key, token). key is [N] too."""
    return tokens[torch.argsort(key * (int(tokens.max()) + 1 if len(tokens) else 1) + tokens)]


def slots_of(idx, num_experts, num_ranks, is_sorted):
    """The expected token_slots [T, W], and for each rank the expected list of tokens that go there."""
    idx, local = idx.long().cpu(), num_experts // num_ranks
    slots, sent = torch.full((len(idx), num_ranks), -1), []
    for r in range(num_ranks):
        here = (idx >= r * local) & (idx < (r + 1) * local)
        tokens = here.any(1).nonzero()[:, 0]
        first = torch.where(here, idx, num_experts).amin(1)[tokens]
        last = torch.where(here, idx, -1).amax(1)[tokens]
        home = ordered(tokens, last) if is_sorted else tokens
        slots[home, r] = torch.arange(len(tokens))
        sent.append(ordered(tokens, first) if is_sorted else tokens)
    return slots, sent


def orders_of(layout):
    """token_slots and, as "sent", the lists of sent tokens of a layout."""
    size, count = layout.layer.world_size, layout.send_tokens.tolist()
    lists = layout._part("send_token", size, layout.num_tokens)
    sent = [lists[r, :n].clone() for r, n in enumerate(count)]
    return {"token_slots": layout.token_slots.clone(), "sent": sent}


def check_orders(got, idx, num_experts, num_ranks, is_sorted, where=""):
    """Compare orders_of a layout with the expected orders."""
    slots, sent = slots_of(idx, num_experts, num_ranks, is_sorted)
    same_numbers(got["token_slots"], slots, f"{where}token_slots")
    for r in range(num_ranks):
        same_numbers(got["sent"][r], sent[r], f"{where}tokens sent to rank {r}")


# ---- errors ----


def afterwards(world, make, case):
    """After a wrong call: exchange a message with all ranks, then run a routing through the layer make().

    Returns (Outcome of the exchange, results of the routing). The results are None if the exchange failed.
    """
    world.set_timeout(MISTAKE_LIMIT_S)
    alive = outcome(lambda: world.exchange(b"back"))
    return alive, None if alive.kinds else run_routing(make(), dataclasses.replace(case, seed=77))


def check_afterwards(outcomes, states, case):
    """Assert that the world still works. outcomes: of the wrong call; states: what afterwards() returned."""
    if any(alive.kinds for alive, _ in states):
        lines = [f"rank {rank}: {got}, and then {alive}"
                 for rank, (got, (alive, _)) in enumerate(zip(outcomes, states))]
        raise AssertionError("\n".join(["not every rank returned from the call:", *lines]))
    check_case([result for _, result in states], dataclasses.replace(case, seed=77))


def share_gpus(num_local_ranks):
    """Let ranks share GPUs if this machine has fewer GPUs than ranks. Later child processes inherit this."""
    if 0 < torch.cuda.device_count() < num_local_ranks:
        os.environ.setdefault("EPMOE_SHARE_GPU", "1")


def side_by_side_settings():
    """Make the settings for ranks that are threads on one GPU. Call it before this process uses CUDA.

    Later child processes inherit them.
    """
    for name, value in {**SIDE_BY_SIDE, "EPMOE_SHARE_GPU": "1"}.items():
        os.environ.setdefault(name, value)


# ---- ranks as processes ----


def isolated(rank, world_size, fn, args, timeout_s):
    """One rank of Ranks.isolated: call fn(world, device, *args) in this process."""
    poison_memory()
    world = epmoe.World(timeout_s=timeout_s * 0.8)
    result = fn(world, torch.device("cpu"), *args)
    world.close()
    return result


def poison_memory():
    """Let torch.empty fill memory with NaN or the largest integer, so that tests notice unwritten memory."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def make_op(world, device, case, kind=epmoe.EpAll2AllFusedOp, **options):
    """An EpAll2AllFusedOp for a case. See cases.make_layer."""
    options = ({"fused": True} if issubclass(kind, epmoe.EpAll2AllFusedOp) else {}) | options
    options = {"combine_mode": "scatter" if case.mode == "local" else case.mode,
               "enable_local_combine": case.mode == "local", "capacity": capacity_of(case, world.size),
               "num_sm": case.num_sm, "num_buffers": case.num_buffers} | options
    op = kind(world, case.max_tokens, case.hidden, case.topk, num_tot_experts=case.num_local * world.size,
              dtype=case.dtype, device=device, **options)
    keep(world, op)
    return op


def scatter_within(p, idx, num_experts, rank):
    """full_scatter_indices of a rank that reverse the order of the rows of each expert."""
    size, local = len(p["rows"]), num_experts // len(p["rows"])
    rows = p["token_row"][rank].clone()
    per_expert = p["counts"].sum(0)
    for r in range(size):
        at = 0
        for e in range(r * local, (r + 1) * local):
            n, of = int(per_expert[e]), idx.long() == e
            rows[of] = 2 * at + n - 1 - rows[of]
            at += n
    return rows.to(torch.int32)


def any_indices(data, num_ranks):
    """A small Case and the indices [T, K] of each rank, with T up to 6. hypothesis draws both."""
    topk, num_local = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    choices = st.lists(st.integers(-1, num_local * num_ranks), min_size=topk, max_size=topk)
    indices = [torch.tensor(data.draw(st.lists(choices, max_size=6)), dtype=torch.int64).reshape(-1, topk)
               for _ in range(num_ranks)]
    return Case(num_local=num_local, topk=topk, max_tokens=6, hidden=8), indices
