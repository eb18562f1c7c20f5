"""Cases: one routing through a layer on every rank, and the comparison of all that came back with the oracle.

A rank runs run_case or run_routing and returns a dict of tensors; check_case compares those of all ranks with
epmoe.reference.  What moves is compared bit by bit; sums have a fixed order and are compared bit by bit too.
Inputs come from seeds, so every rank and the checker can make those of any rank.

Letters: W ranks, E experts, L = E/W, T tokens of a rank, K choices, H hidden, M rows received.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import unittest.mock

import torch
import torch.utils.deterministic

import epmoe
from epmoe import reference
from epmoe.testing import routing, run_ranks
from outcomes import MISTAKE_LIMIT_S, check_outcomes, outcome  # noqa: F401
from pace import HANG_S

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
    tokens: str = "full"  # T of each rank: see num_tokens
    pattern: str = "uniform"
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int64
    mode: str = "scatter"
    weights: bool = True
    capacity: str | None = None  # None, "roomy" (more than can come) or "exact" (the fullest rank's rows)
    num_sm: int | None = None
    num_buffers: int = 1
    seed: int = 0

    def __str__(self):
        return "-".join(str(v).removeprefix("torch.") for v in dataclasses.astuple(self))


def case_id(value):
    """Names a parameter of a test."""
    return str(value).removeprefix("torch.") if isinstance(value, (Case, torch.dtype)) else None


def generator(*numbers):
    g = torch.Generator()
    g.manual_seed(hash(tuple(int(n) for n in numbers)) & (2**62 - 1))
    return g


def num_tokens(case, rank, num_ranks):
    """T of a rank, at most max_tokens."""
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
    """[T, K] expert indices of a rank."""
    num_experts = case.num_local * num_ranks
    idx = routing(case.pattern, num_tokens(case, rank, num_ranks), case.topk, num_experts, num_ranks, rank,
                  generator(case.seed, rank, 2))
    return idx.to(case.index_dtype).contiguous()


def random_bits(shape, dtype, g):
    """Every bit pattern: NaNs with payloads, infinities, denormals, -0.0."""
    n = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (*shape, n), generator=g, dtype=torch.uint8)
    return bits.view(dtype).squeeze(-1)


def random_numbers(shape, dtype, g):
    """Finite numbers over some magnitudes, with a few -0.0 and tiny ones: sums depend on their order."""
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-6, 7, shape, generator=g).float())
    pick = torch.rand(shape, generator=g)
    x = torch.where(pick < 0.02, -0.0, torch.where(pick < 0.04, x * 1e-7, x))
    return x.to(dtype)


def inputs_of(case, rank, num_ranks):
    """x [T, H] and weight [T, K] of a rank, any bits at all."""
    t = num_tokens(case, rank, num_ranks)
    x = random_bits((t, case.hidden), case.dtype, generator(case.seed, rank, 3))
    weight = random_bits((t, case.topk), torch.float32, generator(case.seed, rank,
                                                                  4)) if case.weights else None
    return x, weight


def misaligned(t):
    """The same numbers at an address that is no multiple of 16."""
    return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def rows_for_combine(case, rank, num_rows, num_valid):
    """y [num_rows, H] and weight [num_rows] that go into combine: NaN behind the rows that mean something."""
    y = random_numbers((num_rows, case.hidden), case.dtype, generator(case.seed, rank, 5))
    w = random_numbers((num_rows,), torch.float32, generator(case.seed, rank, 6)) if case.weights else None
    y[num_valid:] = torch.nan
    if w is not None:
        w[num_valid:] = torch.nan
    return y, w


def capacity_of(case, num_ranks):
    if case.capacity == "roomy":
        return num_ranks * case.max_tokens * case.topk + 5
    if case.capacity == "exact":
        p = reference.plan([indices_of(case, r, num_ranks) for r in range(num_ranks)],
                           case.num_local * num_ranks)
        return max(1, max(len(rows) for rows in p["rows"]))
    return None


def make_layer(world, device, case, **options):
    """A layer for a case.  It stays alive as long as its world does: ranks that are threads write into each
    other's memory by its address, so none may drop its own while another still works."""
    options = {"combine_mode": "scatter" if case.mode == "local" else case.mode,
               "enable_local_combine": case.mode == "local",
               "capacity": capacity_of(case, world.size), "num_sm": case.num_sm,
               "num_buffers": case.num_buffers, "device": device} | options
    if "heap" in options:
        del options["device"]
    layer = epmoe.EPAll2AllLayer(world, case.max_tokens, case.hidden, case.topk,
                                 num_tot_experts=case.num_local * world.size, dtype=case.dtype,
                                 **options)
    keep(world, layer)
    return layer


def keep(world, *things):
    """Hold things for as long as a world of threads, see make_layer."""
    if world.group is None:
        world.__dict__.setdefault("_kept", []).extend(things)


def layout_parts(layout):
    """Everything that a layout says, by name."""
    names = ("counts", "expert_offsets", "tokens_per_expert", "token_dst_scatter_idx", "token_sort_indices",
             "token_slots", "send_tokens",
             "recv_tokens", "recv_offsets", "rows_per_rank", "tile_expert", "tile_row")
    return {n: getattr(layout, n).clone() for n in names} | {"num_rows": layout.num_rows,
                                                             "num_tiles": layout.num_tiles}


def run_routing(layer, case, *, layout=None, buffer=0):
    """A case through a layer, as one rank sees it."""
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
    out = layer.combine(y.to(**to), layout, None if w is None else w.to(**to))
    return {"idx": idx, "x": x, "weight": weight, "rows": rows, "row_weight": row_weight, "y": y, "w": w,
            "out": out, **layout_parts(layout)}


def run_case(world, device, case, **options):
    """A case through a layer of its own; twice, so that what the first time left in the heap is there the
    second.
    """
    layer = make_layer(world, device, case, **options)
    soil(layer)
    result = run_routing(layer, case)
    layer.synchronize()
    layer.finalize()
    return result


def soil(layer):
    """Fill a layer's staging memory with NaN rows: every token to as many ranks as K allows, and home again.
    """
    t, k, size, local = layer.max_tokens, layer.topk, layer.world_size, layer.num_local_experts
    choices = (torch.arange(t)[:, None] + torch.arange(k)[None, :]) % size * local
    capacity = layer.capacity
    # no more rows than fit: as many tokens as each rank may send
    if capacity is not None and capacity < size * t * k:
        choices = choices[: max(0, capacity // (size * k))]
    x = torch.full((len(choices), layer.hidden), torch.nan, dtype=layer.dtype, device=layer.device)
    w = torch.full(choices.shape, torch.nan, device=layer.device)
    for buffer in range(layer._config[8]):
        rows, row_weight, layout = layer.dispatch(x, choices.contiguous().to(layer.device), w, buffer=buffer)
        layer.combine(torch.full_like(rows, torch.nan), layout, row_weight)


# ---- the comparison ----


def same_bits(got, want, what):
    """Equal bit by bit, NaN payloads and signs of zero included."""
    got, want = got.detach().cpu().contiguous(), want.detach().cpu().contiguous()
    assert (
        got.dtype == want.dtype and got.shape == want.shape
    ), f"{what}: got {got.dtype} {list(got.shape)}, wanted {want.dtype} {list(want.shape)}"
    bits = BITS[got.element_size()]
    bad = (got.view(bits) != want.view(bits)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise AssertionError(
            f"{what}: {len(bad)} of {got.numel()} differ, the first at {at}: got {got[at].item()}, wanted {want[at].item()}"
        )


def same_numbers(got, want, what):
    got, want = torch.as_tensor(got).cpu().long(), torch.as_tensor(want).cpu().long()
    assert got.shape == want.shape, f"{what}: got {list(got.shape)}, wanted {list(want.shape)}"
    assert torch.equal(got, want), f"{what}: got {str(got.tolist())[:300]}, wanted {str(want.tolist())[:300]}"


def slots_by_hand(idx, num_experts, num_ranks):
    """[T, W]: the position of a token among those that go to a rank, or -1; one token after the other."""
    local, slots, used = num_experts // num_ranks, torch.full((len(idx), num_ranks), -1), [0] * num_ranks
    for t, choices in enumerate(idx.tolist()):
        for r in sorted({e // local for e in choices if 0 <= e < num_experts}):
            slots[t, r] = used[r]
            used[r] += 1
    return slots


def recv_offsets_by_hand(counts, size, local):
    """[W, L, W]: rows stand by local expert, then by source."""
    offsets = []
    for rank in range(size):
        at, of_rank = 0, []
        for e in range(rank * local, (rank + 1) * local):
            of_rank.append([])
            for source in range(size):
                of_rank[-1].append(at)
                at += counts[source][e]
        offsets.append(of_rank)
    return offsets


def tiles_by_hand(offsets):
    """(expert, first row) of each tile: a tile never holds rows of two experts."""
    return [(e, row) for e, (a, b) in enumerate(zip(offsets, offsets[1:])) for row in range(a, b, TILE_ROWS)]


def check_plan(results, num_experts, plan=None):
    """Every part of every rank's layout."""
    size = len(results)
    local = num_experts // size
    p = reference.plan([r["idx"] for r in results], num_experts) if plan is None else plan
    for rank, got in enumerate(results):
        say = f"rank {rank}: "
        flat = got["idx"].long().reshape(-1)
        kept = (flat >= 0) & (flat < num_experts)
        order = torch.argsort(torch.where(kept, flat, num_experts), stable=True)[: int(kept.sum())]
        rows_of_expert = p["counts"].sum(0)[rank * local : (rank + 1) * local]
        offsets = [0] + rows_of_expert.cumsum(0).tolist()
        same_numbers(got["counts"], p["counts"], say + "counts")
        same_numbers(got["tokens_per_expert"], rows_of_expert, say + "tokens_per_expert")
        same_numbers(got["expert_offsets"], offsets, say + "expert_offsets")
        same_numbers(got["num_rows"], len(p["rows"][rank]), say + "num_rows")
        same_numbers(got["rows_per_rank"], [len(rows) for rows in p["rows"]], say + "rows_per_rank")
        same_numbers(got["token_dst_scatter_idx"], p["token_row"][rank], say + "token_dst_scatter_idx")
        sort = torch.full_like(flat, -1)
        sort[: len(order)] = order
        same_numbers(got["token_sort_indices"], sort, say + "token_sort_indices")
        same_numbers(got["token_slots"], slots_by_hand(got["idx"], num_experts, size), say + "token_slots")
        same_numbers(got["send_tokens"], p["send_tokens"][rank], say + "send_tokens")
        same_numbers(got["recv_tokens"], p["send_tokens"][:, rank], say + "recv_tokens")
        same_numbers(got["recv_offsets"], recv_offsets_by_hand(p["counts"].tolist(), size, local),
                     say + "recv_offsets")
        tiles = list(zip(got["tile_expert"].tolist(), got["tile_row"].tolist()))[: got["num_tiles"]]
        assert tiles == tiles_by_hand(offsets), f"{say}tiles: got {tiles}, wanted {tiles_by_hand(offsets)}"
    return p


def check_rows(results, plan, weight_dtype=torch.float32):
    """What dispatch moved."""
    rows = reference.dispatch([r["x"] for r in results], plan)
    with_weights = results[0]["weight"] is not None
    weights = reference.dispatch_weights([r["weight"] for r in results],
                                         plan) if with_weights else [None] * len(results)
    for rank, got in enumerate(results):
        m = len(rows[rank])
        same_bits(got["rows"][:m], rows[rank], f"rank {rank}: rows")
        same_bits(got["rows"][m:], torch.zeros_like(got["rows"][m:], device="cpu"),
                  f"rank {rank}: rows behind M")
        assert (got["row_weight"] is not None) == with_weights
        if with_weights:
            want = torch.zeros(len(got["row_weight"]))
            want[:m] = weights[rank]
            same_bits(got["row_weight"], want.to(weight_dtype), f"rank {rank}: row weights")


def check_sums(results, plan, num_experts, mode):
    """What combine brought home."""
    ms = [len(rows) for rows in plan["rows"]]
    weights = None if results[0]["w"] is None else [r["w"][:m] for r, m in zip(results, ms)]
    wanted = reference.combine([r["y"][:m] for r, m in zip(results, ms)], plan, [r["idx"] for r in results],
                               num_experts, weights, mode == "local")
    for rank, (got, want) in enumerate(zip(results, wanted)):
        same_bits(got["out"], want, f"rank {rank}: combine")


def check_case(results, case):
    """Everything, for results of run_case or run_routing."""
    num_experts = case.num_local * len(results)
    p = check_plan(results, num_experts)
    check_rows(results, p)
    check_sums(results, p, num_experts, case.mode)


# ---- errors ----

def afterwards(world, make, case):
    """After a mistake: have all ranks come back from it, and does a routing through make() work?  (Outcome,
    results).
    """
    world.set_timeout(MISTAKE_LIMIT_S)
    alive = outcome(lambda: world.exchange(b"back"))
    return alive, None if alive.kinds else run_routing(make(), dataclasses.replace(case, seed=77))


def check_afterwards(outcomes, states, case):
    """states: afterwards() of each rank."""
    if any(alive.kinds for alive, _ in states):
        told = "\n".join(f"rank {r}: {got}, and then {alive}" for r,
                         (got, (alive, _)) in enumerate(zip(outcomes, states)))
        raise AssertionError(f"not every rank came back from the call:\n{told}")
    check_case([result for _, result in states], dataclasses.replace(case, seed=77))


def share_gpus(num_local_ranks):
    """Where a test has more ranks than this machine has GPUs, they share them; processes that it starts find
    the setting.
    """
    if 0 < torch.cuda.device_count() < num_local_ranks:
        os.environ.setdefault("EPMOE_SHARE_GPU", "1")


# ---- ranks as processes, quickly ----


@contextlib.contextmanager
def _forkserver():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "epmoe.testing"])
    with unittest.mock.patch.object(multiprocessing, "get_context", lambda method=None: context):
        yield


def process_ranks(fn, world_size, *args, **options):
    """epmoe.testing.run_ranks, with processes that are forked from one that has imported torch already: a
    rank then costs a twentieth of a second instead of two."""
    with _forkserver():
        return run_ranks(fn, world_size, *args, **({"timeout_s": HANG_S} | options))


def isolated(rank, world_size, fn, args, timeout_s):
    """A rank of Ranks.isolated: fn(world, device, *args) in a process of its own."""
    poison_memory()
    world = epmoe.World(timeout_s=timeout_s * 0.8)
    result = fn(world, torch.device("cpu"), *args)
    world.close()
    return result


def poison_memory():
    """Memory that torch.empty hands out holds NaN, or the largest integer: what nobody wrote is seen."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
