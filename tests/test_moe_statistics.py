"""EPMoE.record_stats and stats: the rows of experts and ranks, against the choices of all ranks."""

import copy
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import generator, keep
from epmoe.moe.statistics import ExpertStats
from nodes_cases import run_nodes
from outcomes import outcome
from pace import HANG_S

H, I, K, TOKENS = 64, 64, 2, 9
E4M3 = torch.float8_e4m3fn


def inputs(rank, num_experts, seed=0, device="cpu", dtype=torch.float32, hidden=H):
    """x, idx with dropped choices, and weights.  The ranks have different numbers of tokens.

    The first experts are chosen most.
    """
    g = generator(rank, seed, num_experts)
    t = (rank * 4 + seed + 3) % (TOKENS + 1)
    likely = torch.rand(t, num_experts, generator=g) ** (1 + torch.arange(num_experts))
    idx = likely.topk(K).indices
    idx[torch.rand(t, K, generator=g) < 0.2] = -1
    idx[torch.rand(t, K, generator=g) < 0.1] = num_experts
    x, weight = torch.randn(t, hidden, generator=g), torch.rand(t, K, generator=g)
    return [v.to(device) for v in (x.to(dtype), idx, weight)]


def counted(size, num_experts, seeds):
    """[E]: how many choices each expert gets, of all ranks in the calls with these seeds."""
    idx = torch.cat([inputs(rank, num_experts, seed)[1].flatten() for rank in range(size) for seed in seeds])
    return torch.bincount(idx[(idx >= 0) & (idx < num_experts)], minlength=num_experts)


def make(world, device, num_experts, **options):
    options = {"max_tokens": TOKENS, "dtype": torch.float32} | options
    moe = epmoe.EPMoE(options.pop("hidden", H), options.pop("inner", I), num_experts, K, world, device=device,
                      **options)
    keep(world, moe)
    return moe


def call(moe, seed, **options):
    layer = moe.layer
    return moe(*inputs(layer.rank, moe.num_experts, seed, layer.device, layer.dtype, layer.hidden), **options)


def facts(stats):
    return [getattr(stats, n).tolist() for n in ("tokens_per_expert", "tokens_per_physical", "rows_per_rank")]


# ---- the counts ----

# name -> options of EPMoE. Where W experts do not fit, they are a multiple of it.
FORMS = {
    "stages": {"fused": False}, "fused": {"dtype": torch.bfloat16}, "capacity": {"capacity": 400},
    "capacity, fused": {"capacity": 400, "dtype": torch.bfloat16}, "few copies": {"token_saving": False},
    "invariant": {"rank_invariant": True, "dtype": torch.bfloat16},
    "host counts": {"host_counts": True, "dtype": torch.float16}, "bias": {"bias": True},
    "weights in FP8": {"weight_dtype": E4M3, "dtype": torch.bfloat16, "hidden": 128, "inner": 128},
    "MXFP4": {"weight_dtype": "mxfp4", "dtype": torch.bfloat16},
    "INT4": {"weight_dtype": "int4", "dtype": torch.bfloat16},
    "products in FP8": {"compute_dtype": E4M3, "dtype": torch.bfloat16, "hidden": 128, "inner": 128},
}


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("form", FORMS)
def test_moe_statistics_count_the_choices_of_all_ranks(ranks, form, size):
    """In training, in prefill and in decoding: three calls with a reset before the last."""
    def run(world, device):
        moe = make(world, device, 2 * world.size + 3, **FORMS[form])
        call(moe, 9)  # not recorded
        moe.record_stats()
        found = [facts(moe.stats())]
        y = call(moe, 0)
        if y.requires_grad:
            y.sum().backward()
        with torch.no_grad():
            call(moe, 1, decode=False)
        found.append(facts(moe.stats(reset=True)))
        with torch.inference_mode():
            call(moe, 2)
        decoded = moe.last_layout is None
        found.append(facts(moe.stats()))
        moe.record_stats(False)
        call(moe, 3)
        found.append(facts(moe.stats()))
        moe.finalize()
        return found, decoded

    results = ranks(run, world_size=size)
    size = len(results)
    num_experts = 2 * size + 3
    of_rank = -(-num_experts // size)
    for found, decoded in results:
        assert decoded == (form not in ("products in FP8", "capacity", "capacity, fused"))
        for (experts, physical, per_rank), seeds in zip(found, ((), (0, 1), (2,), (2,)), strict=True):
            want = counted(size, num_experts, seeds) if seeds else torch.zeros(num_experts, dtype=torch.int64)
            assert experts == want.tolist()
            assert physical == experts + [0] * (of_rank * size - num_experts)
            assert per_rank == [sum(experts[r * of_rank:(r + 1) * of_rank]) for r in range(size)]


def test_moe_statistics_of_modules_that_share_a_layer(ranks):
    """Each has its own counts, and so has a copy. Padding rows do not count."""
    def run(world, device):
        layer = epmoe.EPAll2AllLayer(world, TOKENS, H, K, num_tot_experts=2 * world.size, dtype=torch.float32,
                                     device=device, expert_alignment=8)
        keep(world, layer)
        first, second, third = (epmoe.EPMoE(H, I, 2 * world.size, K, dtype=torch.float32, layer=layer)
                                for _ in range(3))
        first.record_stats()
        second.record_stats()
        call(first, 0), call(second, 1), call(third, 2)
        copied = copy.deepcopy(second)
        call(copied, 3)
        call(first, 4)
        found = [facts(m.stats())[0] for m in (first, second, copied)]
        layer.finalize()
        return found

    results = ranks(run, world_size=2)
    for found in results:
        assert found == [counted(len(results), 2 * len(results), s).tolist() for s in ((0, 4), (1,), (1, 3))]


def test_moe_statistics_of_a_path_for_decoding(ranks):
    def run(world, device):
        moe = make(world, device, 2 * world.size, max_tokens=600)
        moe.enable_decode(TOKENS)
        with torch.inference_mode():  # the counts can be changed outside of it, too
            moe.record_stats()
            call(moe, 0, decode=True)
        call(moe, 1).sum().backward()
        found = facts(moe.stats())[0]
        moe.finalize()
        return found

    results = ranks(run, world_size=2)
    assert all(found == counted(len(results), 2 * len(results), (0, 1)).tolist() for found in results)


def test_moe_statistics_with_adapters(ranks):
    """With one adapter, with one for each token, and in a checkpointed call, whose forward runs twice."""
    def run(world, device):
        moe = make(world, device, 2 * world.size, dtype=torch.bfloat16)
        moe.record_stats()
        for name in "ab":
            moe.add_adapter(name, 4, 8.0)
        moe.set_adapter("a")
        call(moe, 0).sum().backward()
        moe.set_adapter(["a", "b"])
        x, idx, weight = inputs(world.rank, moe.num_experts, 1, device, torch.bfloat16)
        moe(x, idx, weight, adapters=torch.arange(len(x), device=device) % 3)
        moe.set_adapter("b")
        found = [facts(moe.stats(reset=True))[0]]
        x, idx, weight = inputs(world.rank, moe.num_experts, 2, device, torch.bfloat16)
        checkpoint(moe, x.requires_grad_(), idx, weight, use_reentrant=True).sum().backward()
        found.append(facts(moe.stats())[0])
        moe.finalize()
        return found

    results = ranks(run, world_size=2)
    size = len(results)
    want = [counted(size, 2 * size, (0, 1)).tolist(), (2 * counted(size, 2 * size, (2,))).tolist()]
    assert all(found == want for found in results)


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", ({}, {"num_chunks": 3}, {"num_physical": 12}), ids=str)
def test_moe_statistics_over_nodes(options):
    num_experts = 8

    def run(nodes):
        moe = epmoe.EPMoE(H, I, num_experts, K, nodes, max_tokens=TOKENS, dtype=torch.bfloat16, device="cpu",
                          **options)
        moe.record_stats()
        call(moe, 0).sum().backward()
        with torch.no_grad():
            call(moe, 1)
        found = moe.stats()
        moe.finalize()
        return facts(found)

    results = run_nodes(run, 2, 2)
    want = counted(4, num_experts, (0, 1)).tolist()
    for experts, physical, per_rank in results:
        assert experts == want and sum(physical) == sum(want)
        assert per_rank == torch.tensor(physical).view(4, -1).sum(1).tolist()


def compiled(world, device):
    moe = make(world, device, 2 * world.size, dtype=torch.bfloat16)
    fast = torch.compile(moe, backend="aot_eager", fullgraph=True)
    found = []
    args = inputs(world.rank, moe.num_experts, 0, device, torch.bfloat16)
    for recorded in (False, True, True, False):  # it compiles again where this changes
        if recorded != moe._records_stats:
            moe.record_stats(recorded)
        fast(*args).sum().backward()
        if recorded:
            found.append(facts(moe.stats())[0])
    found.append(facts(moe.stats())[0])
    moe.finalize()
    return found


def test_moe_statistics_in_compiled_code(ranks):
    results = ranks.isolated(compiled, world_size=2, timeout_s=HANG_S)
    size = len(results)
    once = counted(size, 2 * size, (0,))
    assert all(found == [once.tolist(), (2 * once).tolist(), (2 * once).tolist()] for found in results)


@pytest.mark.cuda_only
@pytest.mark.parametrize("decode", (False, True))
def test_moe_statistics_in_a_cuda_graph(ranks, decode):
    """A graph counts in each replay, and goes on after record_stats(False). The host waits for nothing."""
    def run(world, device):
        moe = make(world, device, 2 * world.size, dtype=torch.bfloat16, capacity=400)
        moe.record_stats()
        args = inputs(world.rank, moe.num_experts, 0, device, torch.bfloat16)
        with torch.no_grad():
            moe(*args, decode=None if decode else False)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                moe(*args, decode=None if decode else False)
                inside = outcome(moe.record_stats)
        for _ in range(3):
            graph.replay()
        found = [facts(moe.stats(reset=True))[0]]
        moe.record_stats(False)
        graph.replay()
        found.append(facts(moe.stats())[0])
        moe.finalize()
        return found, inside

    results = ranks(run, world_size=2)
    once = counted(len(results), 2 * len(results), (0,))
    for found, inside in results:
        assert found == [(4 * once).tolist(), once.tolist()]
        assert inside.kind == "RuntimeError" and "is being captured" in inside.text


@pytest.mark.parametrize("decode", (None, False))
def test_moe_statistics_leave_out_calls_with_an_error(ranks, decode):
    """One rank has a wrong index. Nothing of the call counts on any rank."""
    def run(world, device):
        moe = make(world, device, 2 * world.size, dtype=torch.bfloat16)
        moe.record_stats()
        x, idx, weight = inputs(world.rank, moe.num_experts, 1, device, torch.bfloat16)
        if world.rank == world.size - 1:
            x, idx, weight = (torch.cat([t, t.new_ones(1, t.shape[1])]) for t in (x, idx, weight))
            idx[-1] = 99
        with torch.no_grad():
            call(moe, 0, decode=decode)
            error = outcome(lambda: moe(x, idx, weight, decode=decode), moe.layer.low_latency or moe.layer)
            call(moe, 2, decode=decode)
        found = facts(moe.stats())[0]
        moe.finalize()
        return error, found

    results = ranks(run, world_size=2)
    for error, found in results:
        assert error.kind == "EpIndexError", error
        assert found == counted(len(results), 2 * len(results), (0, 2)).tolist()


# ---- what they are for ----


@pytest.mark.parametrize("size", (2, 4))
def test_moe_statistics_balance_the_experts(ranks, size):
    """One line gives a map. With it the fullest rank has less, and the counts begin again."""
    def run(world, device):
        num_physical = 8 * world.size
        moe = make(world, device, 4 * world.size, num_physical=num_physical)
        moe.record_stats()
        with torch.no_grad():
            before = [call(moe, seed) for seed in range(6)][-1]
            first = moe.stats()
            moe.set_expert_map(epmoe.balance_experts(first.tokens_per_expert, world.size, num_physical))
            empty = moe.stats()
            after = [call(moe, seed) for seed in range(6)][-1]
            second = moe.stats()
            moe.set_expert_map(moe.expert_map)  # moves nothing
            same = moe.stats()
        torch.testing.assert_close(after, before)
        moe.finalize()
        return first, empty, second, same

    for first, empty, second, same in ranks(run, world_size=size, at_least=2):
        assert first.skew > 1.4 and second.skew < 1.25
        assert torch.equal(first.tokens_per_expert, second.tokens_per_expert)
        assert int(empty.tokens_per_physical.sum()) == 0 and empty.skew == 1.0
        assert torch.equal(same.tokens_per_physical, second.tokens_per_physical)
        held = second.physical_to_logical_map
        assert (second.tokens_per_physical[held < 0] == 0).all() and (torch.bincount(held) > 1).any()


@pytest.mark.parametrize("size", (2, 3))
def test_moe_statistics_name_the_rank_that_is_late(ranks, size):
    """One rank sleeps before its calls. The others have waited for it, and a reset forgets that."""
    def run(world, device):
        moe = make(world, device, 2 * world.size)
        late = world.size - 1
        call(moe, 0)
        moe.record_stats()
        found = []
        for seconds in (0.1, 0.4, 1.6, 6.4):  # longer where the machine is busy, so that all are late
            moe.stats(reset=True)
            if world.rank == late:
                time.sleep(seconds)
            call(moe, 1).sum().backward()
            found.append(moe.stats())
            if float(found[-1].waited_s[:late, late].min()) > seconds / 2:
                break
        call(moe, 2)
        before = moe.stats(reset=True).waited_s
        after = moe.stats().waited_s
        moe.finalize()
        return seconds, found[-1], before, after

    for seconds, found, before, after in ranks(run, world_size=size, at_least=2):
        size = len(found.rows_per_rank)
        assert found.slowest_rank == size - 1 and found.waited_s.shape == (size, size)
        assert (found.waited_s[:-1, -1] > seconds / 2).all() and (found.waited_s >= 0).all()
        assert not found.waited_s.diagonal().any()
        assert f"the others waited longest for rank {size - 1}: " in str(found)
        assert (before >= found.waited_s).all() and not after.any()


def stats_of(per_physical, num_ranks, held=None):
    physical = torch.tensor(per_physical)
    held = torch.arange(len(physical)) if held is None else torch.tensor(held)
    experts = torch.zeros(int(held.max()) + 1, dtype=torch.int64)
    experts.index_add_(0, held.clamp_min(0), physical * (held >= 0))
    return ExpertStats(experts, physical, physical.view(num_ranks, -1).sum(1), held,
                       torch.zeros(num_ranks, num_ranks, dtype=torch.float64))


def test_moe_statistics_are_a_table():
    found = stats_of([10, 20, 300, 70, 0, 0, 100, 300], 4, [0, 1, 2, 3, -1, 4, 5, 2])
    found.waited_s[0, 2], found.waited_s[3, 2], found.waited_s[2, 1] = 1.5, 1, 0.25
    assert found.fullest_rank == 3 and found.skew == 2.0 and found.rows_per_rank.tolist() == [30, 370, 0, 400]
    lines = str(found).split("\n")
    assert lines[:3] == ["800 rows of 6 experts on 4 ranks", "rank 3 is the fullest: 2.00 times the mean",
                         "the others waited longest for rank 2: 2.5 s altogether"]
    rows = [line.split() for line in lines[5:9]]
    assert [tuple(map(float, r[:4])) for r in rows] == [(0, 30, 0.15, 0), (1, 370, 1.85, 0.25),
                                                        (2, 0, 0, 2.5), (3, 400, 2, 0)]
    assert [len(r[4]) if len(r) > 4 else 0 for r in rows] == [2, 28, 0, 30]
    assert lines[11].split() == ["2", "600", "75.0%", "1,", "3"]
    assert lines[12].split() == ["5", "100", "12.5%", "3"] and len(lines) == 16


@pytest.mark.parametrize("num_ranks", (1, 4, 64))
def test_moe_statistics_fit_a_terminal(num_ranks):
    """80 columns, in ASCII, also with many ranks, large numbers, and an expert on all ranks."""
    per_rank = 4
    found = stats_of([10**11 + p for p in range(num_ranks * per_rank)], num_ranks, [0, 1, 2, 3] * num_ranks)
    found.waited_s.fill_(12345.678)
    assert max(map(len, str(found).split("\n"))) <= 80 and str(found).isascii()
    empty = str(stats_of([0] * num_ranks, num_ranks))
    assert empty == f"no rows for {num_ranks} experts on {num_ranks} ranks"


def test_moe_statistics_of_a_finalized_module(ranks):
    """The counts are still there, and so are those of another module of its layer."""
    def run(world, device):
        moe = make(world, device, 2 * world.size)
        other = epmoe.EPMoE(H, I, 2 * world.size, K, dtype=torch.float32, layer=moe.layer)
        for m in moe, other:
            m.record_stats()
            call(m, 1)
        before = moe.stats()
        moe.finalize()
        after = moe.stats()
        grows = (after.waited_s >= before.waited_s).all()
        return facts(before) == facts(after), grows, facts(other.stats())[0]

    results = ranks(run, world_size=2)
    for same, grows, counts in results:
        assert same and grows and counts == counted(len(results), 2 * len(results), (1,)).tolist()


# ---- misuse ----


@pytest.mark.parametrize("mistake, kind, text", [
    (lambda moe: moe.stats(), "RuntimeError", "nothing was counted: call record_stats"),
    (lambda moe: (moe.record_stats(), moe.stats(reset=1)), "TypeError", "reset: wanted True or False"),
])
def test_moe_statistics_mistakes_of_one_rank(ranks, mistake, kind, text):
    """The others have recorded. After the error the module works."""
    def run(world, device):
        moe = make(world, device, 2 * world.size)
        wrong = world.rank == world.size - 1
        if not wrong:
            moe.record_stats()
        found = outcome(lambda: mistake(moe) if wrong else moe.stats())
        moe.record_stats()
        call(moe, 0)
        counts = facts(moe.stats())[0]
        moe.finalize()
        return found, counts

    results = ranks(run, world_size=3, at_least=2)
    size = len(results)
    for rank, (found, counts) in enumerate(results):
        assert found.kind == (kind if rank == size - 1 else "PeerError"), found
        assert rank < size - 1 or text in found.text
        assert counts == counted(size, 2 * size, (0,)).tolist()


def test_moe_statistics_of_different_modules_are_an_error(ranks):
    def run(world, device):
        both = [make(world, device, 2 * world.size, inner=inner) for inner in (I, 2 * I)]
        for moe in both:
            moe.record_stats()
        found = outcome(lambda: both[world.rank > 0].stats())
        other = outcome(lambda: both[0].stats() if world.rank else both[0].layer.world.exchange(b"12345"))
        for moe in both:
            call(moe, 0)
            moe.stats()
            moe.finalize()
        return found, other

    for found, other in ranks(run, world_size=2, at_least=2):
        assert found.kind == "EpMismatch" and "rank 1 reads the statistics of a module with" in found.text
        assert other.kind == "EpMismatch"


@pytest.mark.cpu_only
def test_moe_statistics_when_a_rank_leaves(ranks):
    def run(world, device):
        moe = make(world, device, 2 * world.size)
        moe.record_stats()
        call(moe, 0)
        if world.rank == 2:
            world._leave(False)
            return None
        return outcome(moe.stats).kind

    assert ranks(run, world_size=3) == ["PeerDied", "PeerDied", None]


def test_moe_statistics_record_wants_a_bool(ranks):
    def run(world, device):
        moe = make(world, device, 2 * world.size)
        with pytest.raises(TypeError, match="record_stats: wanted True or False, got str"):
            moe.record_stats("yes")
        assert moe._row_counts is None and set(moe.state_dict()) == {"gate_up_proj", "down_proj"}
        moe.record_stats()
        assert set(moe.state_dict()) == {"gate_up_proj", "down_proj"} and not list(moe.buffers())
        moe.finalize()

    ranks(run, world_size=1)
