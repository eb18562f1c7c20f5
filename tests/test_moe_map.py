"""EPMoE.set_expert_map: the weights arrive, the results stay, and wrong use is an error on all ranks."""

import copy

import pytest
import torch

import epmoe
from cases import first, generator, keep
from outcomes import MISTAKE_LIMIT_S, check_outcomes, outcome

E, K, HIDDEN, INNER, TOKENS = 6, 2, 16, 24, 9
LOADS = ([50, 1, 1, 1, 1, 20], [0, 9, 0, 9, 0, 9], [1, 1, 1, 1, 1, 1])


def checkpoint(seed, num_experts, dtype):
    """The parameters of all experts. Ranks that are threads have one random generator in common."""
    shapes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
              "gate_up_proj_bias": (2 * INNER,), "down_proj_bias": (HIDDEN,)}
    return {n: torch.randn(num_experts, *s, generator=generator(seed, i)).div(4).to(dtype)
            for i, (n, s) in enumerate(shapes.items())}


def make(world, device, seed=3, num_experts=E, spare=2, **options):
    num_physical = (-(-num_experts // world.size) + spare) * world.size
    options = {"max_tokens": TOKENS, "dtype": torch.float32} | options
    moe = epmoe.EPMoE(HIDDEN, INNER, num_experts, K, world, num_physical=num_physical, bias=True,
                      device=device, **options)
    keep(world, moe)
    moe.load_state_dict(checkpoint(seed, num_experts, moe.layer.dtype))
    return moe


def maps_of(moe):
    """Balanced maps, and one with experts in any order, an empty physical expert, and replicas."""
    size, num = moe.layer.world_size, moe.layer.num_experts
    made = [epmoe.balance_experts(tokens[:moe.num_experts], size, num) for tokens in LOADS]
    held = torch.cat([torch.arange(moe.num_experts), torch.full((1,), -1), torch.arange(num)])[:num]
    held = torch.where(held < moe.num_experts, held, -1)
    return [*made, epmoe.ExpertMap(held[torch.randperm(num, generator=generator(size))], moe.num_experts)]


def inputs(moe, seed):
    g = generator(seed, moe.layer.rank)
    t = (moe.layer.rank * 3 + seed) % (TOKENS + 1)
    idx = torch.rand(t, moe.num_experts, generator=g).topk(K).indices
    idx[torch.rand(t, K, generator=g) < 0.1] = (-1, moe.num_experts)[seed % 2]
    tensors = torch.randn(t, HIDDEN, generator=g).to(moe.layer.dtype), idx, torch.rand(t, K, generator=g)
    return [v.to(moe.layer.device) for v in tensors]


def check_weights(moe, seed=3):
    """Each physical expert has the bits of its logical one, and whole_state_dict those of all."""
    want, whole = checkpoint(seed, moe.num_experts, moe.layer.dtype), epmoe.whole_state_dict(moe)
    for name, p in moe.named_parameters():
        if moe.layer.rank == 0:
            assert torch.equal(whole[name], want[name]), name
        for i, e in enumerate(moe._held):
            held = torch.zeros_like(want[name][0]) if e < 0 else want[name][e]
            assert torch.equal(p[i].detach().cpu(), held), (name, i, e)


def move(world, device, options):
    """The outputs of a module before any map, and with each map, in both paths."""
    moe, results = make(world, device, **options), []
    table = moe.expert_map._table.data_ptr()
    moe.requires_grad_(False)
    for step, expert_map in enumerate([None, *maps_of(moe), None]):
        moe.set_expert_map(expert_map)
        check_weights(moe)
        assert moe.expert_map._table.data_ptr() == table  # captured graphs use the new map
        x, idx, weight = inputs(moe, 5)
        y = moe(x, idx, weight, decode=False)
        with torch.no_grad():
            results.append((y, moe(x, idx, weight), moe.layer.low_latency is not None))
        rows = moe.layer.preprocess(moe.expert_map.physical(idx, world.rank)).tokens_per_expert
        assert not rows.cpu()[torch.tensor(moe._held) < 0].any()
    assert moe._is_home and (world.group is None or moe.state_dict()["down_proj"].shape[0] == E)
    moe.finalize()
    return results


@pytest.mark.parametrize("options, size", first(4, [
    ({}, 2), ({"dtype": torch.bfloat16}, 2), ({"combine_mode": "gather", "enable_local_combine": False}, 2),
    ({"token_saving": False}, 1), ({}, 1), ({}, 4), ({"dtype": torch.bfloat16}, 4),
    ({"combine_mode": "gather", "enable_local_combine": False}, 4), ({"token_saving": False}, 4)]), ids=str)
def test_moe_map_moves_weights_and_keeps_results(ranks, size, options):
    """A replica computes a row with the same weights. Sums over ranks, and GEMMs with other numbers of rows,
    round differently: a few units in the last place of the dtype."""
    for results in ranks(move, options, world_size=size):
        want = results[0][0]
        tol = {"rtol": 2e-2, "atol": 2e-2} if "dtype" in options else {"rtol": 1e-5, "atol": 1e-6}
        for stages, decoded, has_path in results:
            torch.testing.assert_close(stages, want, **tol)
            torch.testing.assert_close(decoded, want, **tol)
        assert torch.equal(results[-1][0], want)  # home again


def test_moe_map_without_room_permutes(ranks):
    """P = E: nothing is spare, and the experts change places."""

    def run(world, device):
        moe = make(world, device, num_experts=2 * world.size, spare=0).requires_grad_(False)
        before = [p.clone() for p in moe.parameters()]
        x, idx, weight = inputs(moe, 7)
        want = moe(x, idx, weight)
        moe.set_expert_map(epmoe.ExpertMap(torch.arange(2 * world.size).flip(0)))
        got, whole = moe(x, idx, weight), epmoe.whole_state_dict(moe)
        last = before[0][-1].cpu() if world.size == 1 else None
        assert last is None or torch.equal(moe.gate_up_proj[0].cpu(), last)
        moe.set_expert_map(None)
        same = all(map(torch.equal, before, moe.parameters())) and moe.expert_map is None
        assert all(torch.equal(whole[n], t) for n, t in epmoe.whole_state_dict(moe).items())
        moe.finalize()
        return got, want, same

    for got, want, same in ranks(run):
        assert same
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_moe_map_and_state_dicts(ranks):
    """With a map, a whole checkpoint goes in and out; what needs the experts' home is an error."""

    def run(world, device):
        moe, other = make(world, device), make(world, device, seed=9)
        part = other.state_dict()
        moe.set_expert_map(maps_of(moe)[0])
        moe.load_state_dict(checkpoint(9, E, torch.float32))
        check_weights(moe, 9)
        copied = copy.deepcopy(moe)
        got = [outcome(moe.state_dict), outcome(lambda: moe.load_state_dict(part))]
        moe.set_expert_map(None)
        assert copied.expert_map.logical_count.max() > 1 and moe.expert_map.logical_count.max() == 1
        assert all(torch.equal(p, q) for p, q in zip(moe.parameters(), other.parameters()))
        check_weights(copied, 9)
        return got

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([r[0] for r in results], "RuntimeError", "set_expert_map(None)", "whole_state_dict")
    check_outcomes([r[1] for r in results], "RuntimeError", "set_expert_map(None)", "all 6 experts")


def test_moe_map_of_one_module_of_a_shared_layer(ranks):
    """Each module has a map of its own."""

    def run(world, device):
        first = make(world, device).requires_grad_(False)
        second = epmoe.EPMoE(HIDDEN, INNER, E, K, dtype=torch.float32, bias=True, layer=first.layer,
                             num_physical=first.layer.num_experts).requires_grad_(False)
        second.load_state_dict(checkpoint(3, E, torch.float32))
        x, idx, weight = inputs(first, 6)
        want = first(x, idx, weight, decode=False)
        second.set_expert_map(maps_of(first)[0])
        check_weights(first)
        check_weights(second)
        assert first._is_home and torch.equal(first(x, idx, weight, decode=False), want)
        return second(x, idx, weight, decode=False), want

    for got, want in ranks(run, world_size=2):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def shared(world, device, own_layer):
    """A module, and one with its parameters: whether results stay, and what is refused."""
    moe = make(world, device, rank_invariant=True, dtype=torch.bfloat16)
    layer = {} if own_layer else {"layer": moe.layer}
    other = epmoe.EPMoE(HIDDEN, INNER, E, K, world, num_physical=moe.layer.num_experts, bias=True,
                        rank_invariant=True, **layer or {"device": device, "max_tokens": TOKENS})
    partly = epmoe.EPMoE(HIDDEN, INNER, E, K, layer=moe.layer, num_physical=moe.layer.num_experts, bias=True)
    for name, p in moe.named_parameters():
        setattr(other, name, p)
    found = []
    with torch.no_grad():
        wanted = moe(*inputs(moe, 0))

        def check():
            found.extend(torch.equal(m(*inputs(moe, 0)), wanted) for m in (moe, other))

        check()
        for module, expert_map in zip((moe, other, moe, other), [*maps_of(moe)[2:], None, maps_of(moe)[0]]):
            module.set_expert_map(expert_map)
            check()
            moe.set_expert_map(expert_map)  # it has that map: nothing moves
            check()
        under_way = other.move_experts(maps_of(moe)[3])
        refused = [outcome(lambda: moe.set_expert_map(None))]
        while not under_way.advance():
            check()
        check()
        moe.set_expert_map(None)
        partly.down_proj = moe.down_proj
        refused.append(outcome(lambda: moe.set_expert_map(maps_of(moe)[0])))
        partly.down_proj = torch.nn.Parameter(moe.down_proj.detach().clone())
        moe.set_expert_map(maps_of(moe)[3])
        check()
        for name, p in moe.named_parameters():
            setattr(partly, name, p)
        refused.append(outcome(lambda: moe.set_expert_map(None)))
    moe.layer.synchronize()
    for module in (moe, other) if own_layer else (moe,):
        module.finalize()
    return found, refused


@pytest.mark.parametrize("own_layer", [False, True], ids=["shared layer", "own layer"])
def test_moe_map_of_modules_with_the_same_parameters(ranks, own_layer):
    """All of them route by the map of one: the experts have moved for all."""
    results = ranks(shared, own_layer)
    assert all(all(found) for found, _ in results)
    for refused, text in zip(zip(*(refused for _, refused in results)),
                             ("on their way", "gate_up_proj of its own", "after they had moved")):
        check_outcomes(refused, "RuntimeError", text)


def test_moe_map_reset_parameters():
    """A replica starts as its expert does elsewhere."""
    moe, whole = make(epmoe.thread_worlds(1)[0], "cpu"), []
    for expert_map in (None, maps_of(moe)[0]):
        moe.set_expert_map(expert_map)
        torch.manual_seed(1)
        moe.reset_parameters()
        whole.append(epmoe.whole_state_dict(moe))
        for i, e in enumerate(moe._held):
            want = 0 * moe.down_proj[i] if e < 0 else whole[-1]["down_proj"][e]
            assert torch.equal(moe.down_proj[i], want)
    assert all(torch.equal(t, whole[1][n]) for n, t in whole[0].items())
    moe.finalize()


def test_moe_map_mistakes(ranks):
    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        moe = make(world, device)
        x, idx, weight = inputs(moe, 4)
        maps, got = maps_of(moe), []
        is_first = world.rank == 0
        small = epmoe.ExpertMap.home(E, world.size)
        for wrong in (small, maps[0].physical_to_logical_map):
            got.append(outcome(lambda wrong=wrong: moe.set_expert_map(wrong if is_first else maps[0])))
        got.append(outcome(lambda: moe.set_expert_map(maps[is_first])))
        assert moe._is_home and moe.expert_map.logical_count.max() == 1
        moe.set_expert_map(maps[0])
        got.append(outcome(lambda: moe(x, idx, weight)))
        with torch.no_grad():
            wrong = torch.full_like(idx, E + 1) if is_first else idx
            got.append(outcome(lambda: moe(x, wrong, weight, decode=False), moe.layer))
            y = moe(x, idx, weight, decode=False)
        x.requires_grad_()
        moe.requires_grad_(False)
        moe(x, idx, weight).sum().backward()  # frozen experts: the gradient of x goes through replicas
        grad = x.grad.clone()
        moe.set_expert_map(None)
        x.grad = None
        moe(x, idx, weight).sum().backward()
        torch.testing.assert_close(grad, x.grad, rtol=1e-5, atol=1e-6)
        return got, y.isfinite().all()

    results = ranks(run, world_size=2, at_least=2)
    others = ["PeerError"] * (len(results) - 1)
    check_outcomes([r[0][0] for r in results], ["ValueError", *others], "num_physical=", on_rank=0)
    check_outcomes([r[0][1] for r in results], ["TypeError", *others], "wanted an ExpertMap", on_rank=0)
    check_outcomes([r[0][2] for r in results], "EpMismatch", "another expert map")
    check_outcomes([r[0][3] for r in results], "RuntimeError", "no_grad()")
    check_outcomes([r[0][4] for r in results], "EpIndexError")
    assert all(finite for _, finite in results)


@pytest.mark.parametrize("options", [
    {}, {"dtype": torch.bfloat16}, {"token_saving": False}, {"spare": 0, "num_experts": 7}, {"decode": True}],
    ids=str)
@pytest.mark.parametrize("index", [-5, 1, 99])
def test_moe_map_errors_name_the_index_that_was_passed(ranks, index, options):
    """Not that of a physical expert: index is wrong by so many."""

    def run(world, device):
        moe, decode = make(world, device, **{n: v for n, v in options.items() if n != "decode"}), None
        if "decode" in options:
            moe.enable_decode(TOKENS)
            decode = True
        e = index if index < 0 else moe.num_experts + index
        idx = torch.zeros(TOKENS, K, dtype=torch.int64, device=device)
        idx[4, 1] = e if world.rank == 1 else 0
        x = torch.zeros(TOKENS, HIDDEN, dtype=moe.layer.dtype, device=device)
        with torch.no_grad():
            got = outcome(lambda: moe(x, idx, torch.ones(TOKENS, K, device=device), decode=decode))
        moe.finalize()
        return got, e, moe.num_experts

    results = ranks(run, world_size=2, at_least=2)
    for got, e, num_experts in results:
        assert got.kind == "EpIndexError"
        assert f"of token 4, choice 1 is outside [-1, {num_experts}]" in got.text
    assert f"rank 1: expert index {results[1][1]} of" in results[1][0].text


def compiled(world, device):
    torch._dynamo.reset()
    moe = make(world, device).requires_grad_(False)
    fast, results = torch.compile(moe, backend="aot_eager", fullgraph=True), []
    for expert_map in (None, *maps_of(moe)[:2]):
        moe.set_expert_map(expert_map)
        x, idx, weight = inputs(moe, 8)
        results.append((fast(x, idx, weight), moe(x, idx, weight, decode=False)))
    moe.finalize()
    return results


def test_moe_map_compiles(ranks):
    for results in ranks.isolated(compiled, world_size=2):
        for fast, eager in results:
            assert torch.equal(fast, eager)


def test_moe_map_of_a_module_made_in_inference_mode(ranks):
    """Its tensors can be written only in inference mode, also where the map is set outside of it."""

    def run(world, device):
        with torch.inference_mode():
            moe = make(world, device)
        whole = checkpoint(4, E, torch.float32)
        for expert_map in (*maps_of(moe), None):
            moe.set_expert_map(expert_map)
            check_weights(moe)
        moe.load_state_dict(whole)
        check_weights(moe, 4)
        moe.finalize()

    ranks(run)


class FailingHeap(epmoe.SymmetricHeap):
    """Raises in the fifth call of a method, on the last rank or on all."""

    where = ()  # a method, whether on all ranks, and whether the rank leaves the world

    def _call(self, name, *args):
        method, on_all, leaves = self.where
        if method == name and (on_all or self.world.rank == self.world.size - 1):
            self.left = getattr(self, "left", 5 if name == "get" else 1) - 1
            if self.left == 0:
                if leaves:
                    self.world._leave(False)
                raise MemoryError("no memory")
        return getattr(super(), name)(*args)

    def get(self, *args):
        return self._call("get", *args)

    def malloc_symmetric(self, *args):
        return self._call("malloc_symmetric", *args)

    def synchronize(self):
        return self._call("synchronize")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("where", [("get", False, False), ("synchronize", False, False), ("get", True, False),
                                   ("malloc_symmetric", True, False), ("get", False, True)], ids=str)
def test_moe_map_is_the_old_one_after_an_error(ranks, monkeypatch, where, size):
    """An error of one rank in the middle is an error on all, and no rank keeps a part of the new weights."""
    monkeypatch.setattr(epmoe.moe.placement, "SymmetricHeap", FailingHeap)

    def run(world, device):
        moe, got = make(world, device).requires_grad_(False), []
        maps = [epmoe.balance_experts(torch.arange(E).roll(n), world.size, moe.layer.num_experts)
                for n in (0, 3)]
        FailingHeap.where = (None, False, False)
        moe.set_expert_map(maps[0])
        before = [p.clone() for p in moe.parameters()], list(moe._holds)
        world.exchange(b"begin")
        FailingHeap.where = where
        got.append(outcome(lambda: moe.set_expert_map(maps[1])))
        is_old = all(map(torch.equal, before[0], moe.parameters())) and before[1] == moe._holds
        if not where[2]:
            world.exchange(b"done")
            FailingHeap.where = (None, False, False)
            check_weights(moe)
            moe.set_expert_map(maps[1])
            check_weights(moe)
            moe.finalize()
        return got[0], is_old

    results = ranks(run, world_size=size, at_least=2)
    others = "MemoryError" if where[1] else "PeerDied" if where[2] else "PeerError"
    check_outcomes([got for got, _ in results], [others] * (len(results) - 1) + ["MemoryError"], within_s=20)
    assert all(is_old for _, is_old in results)


def test_moe_map_step_with_gradients_of_other_experts_is_an_error(ranks):
    """After a backward: the step comes before the map, or after the way back."""

    def run(world, device):
        found, weights = [], []
        for mapped in (False, True):
            moe = make(world, device)
            moe.set_expert_map(None)
            optimizer = torch.optim.SGD(moe.parameters(), 0.1)
            moe(*inputs(moe, 1)).square().sum().backward()
            if mapped:
                moe.set_expert_map(maps_of(moe)[-1])
                found.append(outcome(optimizer.step).kind)
                moe.set_expert_map(None)
            optimizer.step()
            weights.append([p.detach().clone() for p in moe.parameters()])
            moe.finalize()
        return found, [torch.equal(a, b) for a, b in zip(*weights, strict=True)]

    for found, same in ranks(run):
        assert found == ["RuntimeError"] and all(same)
