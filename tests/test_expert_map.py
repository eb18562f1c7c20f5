"""ExpertMap and balance_experts: the maps alone, and layers whose experts are a map's physical experts."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.utils.flop_counter

import epmoe
from cases import generator, same_bits
from epmoe import _C, reference
from epmoe.testing import routing

E, K, HIDDEN, TOKENS = 8, 3, 16, 9


def maps_of(size):
    """Maps with many replicas, with replicas in any order, without a multiple of the ranks, with room."""
    load = torch.tensor([90.0, 5, 5, 30, 1, 0, 2, 60])
    twice = torch.cat([torch.arange(E), torch.arange(E), torch.full((E,), -1)])
    home = epmoe.ExpertMap.home
    return {"balanced": epmoe.balance_experts(load, size, (-(-E // size) + 4) * size), "home": home(E, size),
            "any": epmoe.ExpertMap(twice[torch.randperm(3 * E, generator=generator(size))]),
            "seven": home(7, size), "five": home(5, size, 8 * size)}


@pytest.mark.parametrize("size", (1, 2, 3, 4, 8))
def test_expert_map_tensors_agree(size):
    for m in maps_of(size).values():
        assert len(m.physical_to_logical_map) == m.num_physical and m.num_physical % size == 0
        assert m.logical_to_physical_map.shape == (m.num_experts, m.num_physical - m.num_experts + 1)
        for e, (row, count) in enumerate(zip(m.logical_to_physical_map.tolist(), m.logical_count.tolist())):
            holders = (m.physical_to_logical_map == e).nonzero()[:, 0].tolist()
            assert row == holders + [-1] * (len(row) - count) and count == len(holders) > 0


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("rank", (0, 3))
def test_expert_map_spreads_the_tokens_over_the_replicas(dtype, rank):
    for m in maps_of(4).values():
        n = m.num_experts
        idx = torch.arange(n, dtype=dtype).repeat(7, 1)
        physical = m.physical(idx, rank)
        assert physical.dtype == torch.int32
        assert torch.equal(m.physical_to_logical_map[physical.long()], idx.long())
        for t, e in itertools.product(range(7), range(n)):
            replica = (t + rank) % int(m.logical_count[e])
            assert physical[t, e] == m.logical_to_physical_map[e, replica]
        dropped = torch.tensor([[-1, n, -2, n + 1, -(1 << 31), (1 << 31) - 1]], dtype=dtype)
        got = m.physical(dropped, rank)[0].tolist()
        assert got == [-1, -1, -2, m.num_physical + 1, -2, m.num_physical + 1]
        assert m.physical(idx[:0], rank).shape == (0, n)
        assert torch.equal(m.physical(idx.t().contiguous().t(), rank), physical)
        with torch.utils.flop_counter.FlopCounterMode(display=False):  # as operators of torch
            assert torch.equal(m.physical(idx, rank), physical)
            assert m.physical(dropped, rank)[0].tolist() == got


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)),
                                    lambda m: m.to("cpu")], ids=("deepcopy", "pickle", "to"))
def test_expert_map_copies_take_over_other_maps(copied):
    m = copied(epmoe.ExpertMap(torch.tensor([0, 1, 2, 0])))
    other = epmoe.ExpertMap(torch.tensor([-1, 0, 1, 2]))
    m._copy_(other)
    for name in "physical_to_logical_map", "logical_to_physical_map", "logical_count", "_table":
        assert torch.equal(getattr(m, name), getattr(other, name)), name


def test_expert_map_fill_refuses_wrong_tensors():
    held, replicas = torch.tensor([0, 1, 0]), torch.empty(2, 2, dtype=torch.int64)
    count, table = torch.empty(2, dtype=torch.int64), torch.empty(6, 3, dtype=torch.int32)
    _C.fill_expert_map(held, replicas, count, table)
    assert replicas.tolist() == [[0, 2], [1, -1]] and count.tolist() == [2, 1]
    assert table.tolist() == [[1, -2, -1], [1, -1, -1], [2, 0, 2], [1, 1, -1], [1, -1, -1], [1, 4, -1]]
    for wrong, text in (((torch.tensor([0, 2, 0]), replicas, count, table), "holds expert 2 of 2"),
                        ((torch.tensor([0, 0, 0]), replicas, count, table), "or another has none"),
                        ((torch.tensor([0, 0, -1]), replicas, count, table), "physical expert holds"),
                        ((held[:1], replicas, count, table), "1 physical experts and 2 logical ones"),
                        ((held, replicas[:, :1], count, table), "replicas: wanted size 2"),
                        ((held, replicas, count, table.view(3, 6)), "table: wanted size 6"),
                        ((held, replicas, held[:2], table), "share")):
        with pytest.raises(ValueError, match=text):
            _C.fill_expert_map(*wrong)


def test_expert_map_logical_counts():
    for m in maps_of(2).values():
        counts = torch.randint(0, 99, (3, m.num_physical), generator=generator(1), dtype=torch.int32)
        holds = [m.physical_to_logical_map == e for e in range(m.num_experts)]
        want = [[int(row[held].sum()) for held in holds] for row in counts]
        assert m.logical_counts(counts).tolist() == want and m.logical_counts(counts).dtype == torch.int32
        assert m.logical_counts(counts[0]).tolist() == want[0]


def test_expert_map_compiles():
    m = maps_of(2)["balanced"]
    compiled = torch.compile(m.physical, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (5, 0, 9):
        idx = torch.randint(-1, E + 1, (num_tokens, K), generator=generator(num_tokens))
        assert torch.equal(compiled(idx), m.physical(idx))


HOME = epmoe.ExpertMap.home(2, 2)


@pytest.mark.parametrize("wrong, kind, text", [
    (lambda: epmoe.ExpertMap([0, 1]), TypeError, "wanted a tensor of integers, got list"),
    (lambda: epmoe.ExpertMap(torch.ones(2)), TypeError, "got torch.float32"),
    (lambda: epmoe.ExpertMap(torch.zeros(2, 2).long()), ValueError, r"\[2, 2\]: make a map for each"),
    (lambda: epmoe.ExpertMap(torch.tensor([0, 2])), ValueError, "no physical expert holds expert 1"),
    (lambda: epmoe.ExpertMap(torch.tensor([0, 2]), 2), ValueError, "physical expert 1 holds expert 2"),
    (lambda: epmoe.ExpertMap(torch.tensor([0, -2])), ValueError, "physical expert 1 holds expert -2"),
    (lambda: epmoe.ExpertMap(torch.tensor([-1, -1])), ValueError, "no physical expert holds any expert"),
    (lambda: epmoe.ExpertMap.home(5, 2, 7), ValueError, "num_physical 7: must be a multiple of the 2 ranks"),
    (lambda: epmoe.ExpertMap.home(5, 2, 4), ValueError, "at least 6 for 5 experts"),
    (lambda: epmoe.balance_experts(torch.ones(2, 4), 2), ValueError, "call it for each layer"),
    (lambda: epmoe.balance_experts([1, -1], 2), ValueError, "finite and not negative"),
    (lambda: epmoe.balance_experts([1, torch.nan], 2), ValueError, "finite and not negative"),
    (lambda: epmoe.balance_experts([1, 1], 2, 3), ValueError, "num_physical 3"),
    (lambda: epmoe.balance_experts([1, 1], 2, current=[0, 1]), TypeError, "wanted an ExpertMap"),
    (lambda: epmoe.balance_experts([1, 1, 1], 2, current=HOME), ValueError, "current has 2 experts"),
    (lambda: epmoe.balance_experts([1, 1], 2, 6, current=HOME), ValueError, "must be 2 and 6"),
    (lambda: epmoe.balance_experts([1, 1], 4, current=HOME), ValueError, "num_physical 2"),
    (lambda: epmoe.ExpertMap.home(2, 1).physical(torch.ones(2, 2)), TypeError, "int32 or int64"),
    (lambda: epmoe.ExpertMap.home(2, 1).physical(torch.tensor([1])), ValueError, r"shape \[T, K\]"),
    (lambda: epmoe.ExpertMap.home(2, 1).logical_counts(torch.ones(3)), ValueError, r"wanted shape \[.., 2\]"),
    (lambda: epmoe.ExpertMap.home(2, 1).to("meta").physical(torch.tensor([[1]])), ValueError, "'cpu'"),
])
def test_expert_map_mistakes(wrong, kind, text):
    with pytest.raises(kind, match=text):
        wrong()


# ---- balance ----


def load_of_ranks(m, load, size):
    share = torch.nn.functional.pad(load.double() / m.logical_count, (0, 1))  # the last one for -1
    return share[m.physical_to_logical_map].view(size, -1).sum(1)


@pytest.mark.parametrize("size", (1, 2, 4, 8))
@pytest.mark.parametrize("skew", (0.0, 1.0, 2.0))
def test_expert_map_balance(size, skew):
    for seed, spare in itertools.product(range(5), (0, 1, 4)):
        load = torch.randint(1, 1000, (16,), generator=generator(seed)).double() ** skew
        m = epmoe.balance_experts(load, size, 16 + spare * size)
        of_ranks, share = load_of_ranks(m, load, size), load / m.logical_count
        # Greedy packing: the fullest rank has at most one replica more than the others.
        assert of_ranks.max() - of_ranks.min() <= share.max() * (1 + 1e-9)
        again = epmoe.balance_experts(load.clone(), size, 16 + spare * size)
        assert torch.equal(again.physical_to_logical_map, m.physical_to_logical_map)


def test_expert_map_balance_replicates_the_busiest():
    """The largest share of a replica is the least that any numbers of replicas allow."""
    for seed in range(20):
        load = torch.randint(0, 100, (4,), generator=generator(seed, 2)).double()
        m = epmoe.balance_experts(load, 1, 9)
        best = min(max(n / c for n, c in zip(load.tolist(), counts))
                   for counts in itertools.product(range(1, 7), repeat=4) if sum(counts) == 9)
        assert (load / m.logical_count).max().item() == best


def num_changes(a, b):
    return int((a.physical_to_logical_map != b.physical_to_logical_map).sum())


@pytest.mark.parametrize("size", (1, 2, 4, 8))
@pytest.mark.parametrize("seed", range(4))
def test_expert_map_balance_from_a_map_moves_few(size, seed):
    """Nearly as even as without it, with a fraction of the changes; and nothing moves twice."""
    g = generator(seed, size)
    num, spare = 32 * size, 2 * size
    load = torch.rand(num, generator=g) ** -0.7
    start = epmoe.ExpertMap.home(num, size, num + spare)
    m = epmoe.balance_experts(load, size, current=start)
    best = epmoe.balance_experts(load, size, num + spare)
    before, after, least = (float(load_of_ranks(x, load, size).max()) for x in (start, m, best))
    assert after <= 1.08 * least and after <= before
    assert m.physical_to_logical_map.device.type == "cpu" and m.num_physical == num + spare
    assert num_changes(start, m) <= num // 4 < num_changes(start, best) or size == 1
    assert num_changes(m, epmoe.balance_experts(load, size, current=m)) == 0
    drifted = load * (0.8 + 0.4 * torch.rand(num, generator=g))
    then = epmoe.balance_experts(drifted, size, current=m)
    assert num_changes(m, then) <= num // 8
    assert load_of_ranks(then, drifted, size).max() <= load_of_ranks(m, drifted, size).max()


def test_expert_map_balance_from_a_map_small():
    """A busy expert gets the empty places, and the place of a replica that has less to do."""
    start = epmoe.ExpertMap(torch.tensor([0, 1, -1, 2, 3, -1]))
    assert epmoe.balance_experts([90, 1, 1, 1], 2, current=start).logical_count.tolist()[0] >= 2
    assert num_changes(start, epmoe.balance_experts([0, 0, 0, 0], 2, current=start)) == 0
    assert num_changes(start, epmoe.balance_experts([2, 2, 2, 2], 2, current=start)) == 0
    start = epmoe.ExpertMap(torch.tensor([0, 0, 1, 2]))
    found = epmoe.balance_experts([1, 1, 30], 2, current=start)
    assert found.logical_count.tolist() == [1, 1, 2] and num_changes(start, found) == 1
    full = epmoe.ExpertMap(torch.tensor([0, 1, 2, 3]))  # no replica: experts can only change places
    found = epmoe.balance_experts([9, 9, 1, 1], 2, current=full)
    assert num_changes(full, found) == 2
    assert load_of_ranks(found, torch.tensor([9, 9, 1, 1]), 2).tolist() == [10, 10]


def test_expert_map_balance_without_a_load():
    assert epmoe.balance_experts(torch.zeros(4), 2, 8).logical_count.tolist() == [2, 2, 2, 2]
    m = epmoe.balance_experts([1, 1, 1, 1, 1], 4)
    assert m.num_physical == 8 and m.logical_count.sum() == 8 and m.num_experts == 5


# ---- layers ----


def inputs(rank, size, num_experts):
    g = generator(rank, size, num_experts)
    num_tokens = (rank * 5 + 4) % (TOKENS + 1)
    idx = routing("sentinels", num_tokens, K, num_experts, 1, 0, g)
    return torch.randn(num_tokens, HIDDEN, generator=g), idx, torch.rand(num_tokens, K, generator=g)


def scales(logical):
    """What each expert multiplies its rows with."""
    return 1.5 + 0.37 * logical.float()


def through_layer(world, device, m, mode):
    """The sums of a layer with the physical experts of a map."""
    local = mode == "local"
    layer = epmoe.EPAll2AllLayer(world, TOKENS, HIDDEN, K, num_tot_experts=m.num_physical,
                                 dtype=torch.float32, device=device, enable_local_combine=local,
                                 combine_mode="scatter" if local else mode)
    x, idx, weight = (t.to(device) for t in inputs(world.rank, world.size, m.num_experts))
    idx = m.to(device).physical(idx, world.rank)
    rows, row_weight, layout = layer.dispatch(x, idx, weight)
    holds = m.physical_to_logical_map.view(world.size, -1)[world.rank].to(device)
    rows = rows * scales(holds.repeat_interleave(layout.tokens_per_expert))[:, None]
    y = layer.combine(rows, layout, row_weight)
    layer.finalize()
    return y, idx


def through_low_latency(world, device, m):
    a2a = epmoe.LowLatencyAll2All(world, TOKENS, HIDDEN, K, m.num_physical, dtype=torch.float32,
                                  device=device)
    x, idx, weight = (t.to(device) for t in inputs(world.rank, world.size, m.num_experts))
    idx = m.to(device).physical(idx, world.rank)
    rows, _, _, handle = a2a.dispatch(x, idx, weight)
    holds = m.physical_to_logical_map.view(world.size, -1)[world.rank].to(device)
    y = a2a.combine(rows * scales(holds)[:, None, None], handle)
    a2a.finalize()
    return y, idx


def by_hand(rank, size, m, physical=None):
    """The weighted sums of a rank's tokens, in the order of choices; with physical, by rank first."""
    x, idx, weight = inputs(rank, size, m.num_experts)
    kept = (idx >= 0) & (idx < m.num_experts)
    total = torch.zeros(len(x), HIDDEN)
    of_rank = torch.zeros_like(idx) if physical is None else physical.long() // (m.num_physical // size)
    for r in range(size):
        part = torch.zeros_like(total)
        for k in range(K):
            row = x * scales(idx[:, k])[:, None]
            term = torch.addcmul(part, weight[:, k, None], row)
            part = torch.where((kept[:, k] & (of_rank[:, k] == r))[:, None], term, part)
        total = total + part
    return total


@pytest.mark.parametrize("size", (1, 2, 4))
def test_expert_map_layers_equal_the_unmapped_layer(ranks, size):
    """With a map, each choice is computed once, by an equal expert: the same bits where the order of sums is
    the same.  Sums by rank differ by float32's rounding: at most one for each of the K terms."""

    def run(world, device):
        plain = epmoe.ExpertMap.home(E, world.size)
        found = {}
        for name, m in maps_of(world.size).items():
            if m.num_physical % world.size == 0:
                for mode in ("scatter", "gather", "local"):
                    found[name, mode] = through_layer(world, device, m, mode)
                found[name, "low latency"] = through_low_latency(world, device, m)
        if E % world.size == 0:
            found["plain"] = [through_layer(world, device, plain, mode)[0] for mode in ("scatter", "local")]
        return found

    results = ranks(run, world_size=size)
    size = len(results)
    maps = maps_of(size)
    for rank, found in enumerate(results):
        if "plain" in found:
            exact, by_rank = found.pop("plain")
            for name in ("balanced", "any", "home"):
                if (name, "scatter") in found:
                    same_bits(found[name, "scatter"][0], exact, f"rank {rank}: {name}")
                    same_bits(found[name, "gather"][0], exact, f"rank {rank}: {name}")
            same_bits(found["home", "local"][0], by_rank, f"rank {rank}: local")
            same_bits(found["home", "low latency"][0], by_rank, f"rank {rank}: low latency")
        for (name, mode), (y, idx) in found.items():
            want = by_hand(rank, size, maps[name], None if mode in ("scatter", "gather") else idx.cpu())
            torch.testing.assert_close(y.cpu(), want, rtol=0, atol=K * 2**-23 * 16 * 6, msg=f"{name} {mode}")
        for name in maps:
            if (name, "local") in found:
                same_bits(found[name, "local"][0], found[name, "low latency"][0], f"rank {rank}: {name}")


def test_expert_map_layers_refuse_a_number_that_is_no_multiple(ranks):
    def run(world, device):
        if world.size == 1:
            return "epmoe.ExpertMap"
        with pytest.raises(ValueError) as caught:
            epmoe.EPAll2AllLayer(world, 4, 16, 1, num_tot_experts=world.size + 1, device=device)
        return str(caught.value)

    assert all("epmoe.ExpertMap" in text for text in ranks(run, world_size=2))


def test_expert_map_wrong_index_stays_wrong(ranks):
    def run(world, device):
        m = epmoe.ExpertMap.home(2 * world.size - 1 or 1, world.size).to(device)
        layer = epmoe.EPAll2AllLayer(world, 4, 16, 1, num_tot_experts=m.num_physical, device=device)
        wrong = m.num_experts + 1 if world.rank == 0 else 0  # a physical expert, but not a logical one
        with pytest.raises(epmoe.EpIndexError):
            layer.preprocess(m.physical(torch.tensor([[wrong]], device=device), world.rank))
            layer.synchronize()
        layer.finalize()

    ranks(run, world_size=2)
