"""EPMoE.move_experts: calls between the steps have the results of the map before, and nothing is lost."""

import copy
import random

import pytest
import torch

import epmoe
from cases import first, generator
from epmoe.moe.move import rounds_of
from outcomes import outcome
from test_moe_map import E, check_weights, inputs, make, maps_of

HIDDEN, INNER = 16, 24


# ---- rounds ----


def random_holds(r, num_experts, num_physical):
    """[P] with each expert at least once, replicas, and places that hold nothing."""
    held = list(range(num_experts)) + [r.choice((-1, r.randrange(num_experts)))
                                       for _ in range(num_physical - num_experts)]
    r.shuffle(held)
    return held


@pytest.mark.parametrize("seed", range(40))
def test_rounds_keep_a_place_of_each_expert(seed):
    r = random.Random(seed)
    num_ranks, num_local, at_once = r.choice((1, 2, 3, 4)), r.choice((2, 3, 8)), r.choice((1, 2, 5))
    num_physical = num_ranks * num_local
    num_experts = r.randrange(1, num_physical)
    now, wanted = (random_holds(r, num_experts, num_physical) for _ in range(2))
    rounds = rounds_of(now, wanted, num_local, at_once)
    assert rounds_of(now, wanted, num_local, at_once) == rounds
    for one in rounds:
        targets = [p for p, _ in one.moves]
        assert len(set(targets)) == len(targets) > 0
        assert max(sum(p // num_local == rank for p in targets) for rank in range(num_ranks)) <= at_once
        assert one.before == [-1 if p in targets else e for p, e in enumerate(now)]
        assert set(range(num_experts)) <= set(one.before), "an expert has no place during the round"
        for target, source in one.moves:
            now[target] = one.before[source] if source >= 0 else -1
            assert source < 0 or one.before[source] >= 0
        assert now == one.after
    assert now == wanted and len(rounds) <= 3 * num_physical


def test_rounds_without_a_spare_place():
    assert rounds_of([0, 1, 2], [0, 1, 2], 3, 1) == []
    with pytest.raises(ValueError, match="no physical expert is spare"):
        rounds_of([0, 1, 2], [1, 0, 2], 3, 1)
    # the spare place lends itself to expert 0, and has expert 2 again in the end
    assert rounds_of([0, 1, 2, 2], [1, 0, 2, 2], 2, 1)[-1].after == [1, 0, 2, 2]


# ---- modules ----


def move(world, device, options):
    """The outputs of calls between the steps of some moves, and those of the same module before."""
    moe = make(world, device, rank_invariant=True, **options)
    differ, steps = [], 0
    with torch.no_grad():
        wanted = [moe(*inputs(moe, seed)).clone() for seed in range(3)]
        for wanted_map in [*maps_of(moe), None]:
            under_way = moe.move_experts(wanted_map, at_once=1 + (wanted_map is None))
            while not under_way.advance():
                steps += 1
                y = moe(*inputs(moe, steps % 3))
                differ.append((y != wanted[steps % 3]).any())
            held = (wanted_map or epmoe.ExpertMap.home(E, world.size, moe.layer.num_experts))
            assert moe._holds == held.physical_to_logical_map.tolist() and under_way.is_done
            check_weights(moe)
            assert under_way.advance() and moe._move is None
    moe.layer.synchronize()
    differ = sum(map(int, differ))
    moe.finalize()
    return differ, steps


@pytest.mark.parametrize("options, size", first(3, [
    ({"dtype": torch.bfloat16}, 2), ({"dtype": torch.bfloat16, "max_tokens": 600}, 3), ({"spare": 1}, 1),
    ({"dtype": torch.float16, "spare": 4}, 4), ({"dtype": torch.bfloat16, "capacity": 100}, 2)]))
def test_results_stay_while_experts_move(ranks, size, options):
    """bfloat16: the same bits, on whatever rank an expert is. In float32 the bits depend on the map."""
    results = ranks(lambda world, device: move(world, device, {"dtype": torch.bfloat16} | options),
                    world_size=size)
    for differ, steps in results:
        assert differ == 0 and steps >= 6 and steps == results[0][1]


def switches(world, device, num):
    moe = make(world, device, rank_invariant=True, dtype=torch.bfloat16, spare=2)
    r, wrong, done = random.Random(7), 0, 0
    with torch.no_grad():
        wanted = [moe(*inputs(moe, seed)).clone() for seed in range(3)]
        while done < num:
            held = random_holds(r, E, moe.layer.num_experts)
            under_way = moe.move_experts(epmoe.ExpertMap(torch.tensor(held), E), at_once=r.choice((1, 2)))
            while not under_way.advance():
                seed = r.randrange(3)
                wrong += int((moe(*inputs(moe, seed)) != wanted[seed]).any())
            done += 1
    check_weights(moe)
    moe.finalize()
    return wrong


def test_many_moves_lose_nothing(ranks):
    assert not any(ranks(lambda world, device: switches(world, device, 40), world_size=2))


@pytest.mark.long
def test_a_thousand_moves_lose_nothing(ranks):
    assert not any(ranks(lambda world, device: switches(world, device, 1000), world_size=3,
                         timeout_s=400))


def test_moves_between_processes(ranks):
    assert ranks.isolated(move, {"dtype": torch.bfloat16}, world_size=2)[0][0] == 0


@pytest.mark.parametrize("options", [
    {"weight_dtype": torch.float8_e4m3fn}, {"weight_dtype": "mxfp4"}, {"weight_dtype": "int4"}], ids=str)
def test_weights_of_other_formats_move(ranks, options):
    """Scales and zeros go with their experts, and so do adapters."""
    def run(world, device):
        moe = epmoe.EPMoE(128, 128, 4, 2, world, max_tokens=9, dtype=torch.bfloat16, device=device,
                          num_physical=4 + 2 * world.size if world.size < 4 else 12, rank_invariant=True,
                          **options)
        moe.add_adapter("a", 8, 16)
        g = generator(3, world.rank)
        x, idx = torch.randn(9, 128, generator=g).bfloat16(), torch.rand(9, 4, generator=g).topk(2).indices
        call = [t.to(device) for t in (x, idx, torch.rand(9, 2, generator=g))]
        with torch.no_grad():
            for p in moe.parameters():
                if p.dtype == torch.bfloat16:
                    p.normal_(0, 0.1, generator=torch.Generator(device).manual_seed(world.rank))
            before = [moe(*call), None]
            moe.set_adapter("a")
            before[1] = moe(*call)
            held = epmoe.balance_experts([9, 1, 1, 5], world.size, moe.layer.num_experts)
            moe.move_experts(held).finish()
            after = [None, moe(*call)]
            moe.set_adapter(None)
            after[0] = moe(*call)
        same = [torch.equal(a, b) for a, b in zip(before, after)]
        moe.finalize()
        return same

    assert all(same == [True, True] for same in ranks(run, world_size=2))


def late_copies(world, device, options):
    """As on a GPU whose copies arrive late: they count as writes before, and a call reads what was there."""
    moe = epmoe.EPMoE(128, 128, 4, 2, world, max_tokens=9, device=device, num_physical=12,
                      rank_invariant=True, **options)
    g = generator(3, world.rank)
    x, idx = torch.randn(9, 128, generator=g).bfloat16(), torch.rand(9, 4, generator=g).topk(2).indices
    call = [t.to(device) for t in (x, idx, torch.rand(9, 2, generator=g))]
    more = {}
    if not options:
        for name in ("a", "b"):
            moe.add_adapter(name, 8, 16)
        with torch.no_grad():
            for p in moe.parameters():
                p.normal_(0, 0.1, generator=torch.Generator(device).manual_seed(world.rank))
        moe.set_adapter(["a", "b"])
        more["adapters"] = torch.arange(9, device=device) % 3
    with torch.no_grad():
        wanted = moe(*call, **more)
        move = moe.move_experts(epmoe.balance_experts([9, 1, 1, 5], world.size, 12))
        receive, begin = move._receive, move._begin_round

        def receive_nothing():
            before = [t.detach().clone() for t in moe.parameters()]
            receive()
            move.late = [t.detach().clone() for t in moe.parameters()]
            for t, old in zip(moe.parameters(), before):
                t.data.copy_(old)  # which torch does not count

        def begin_late():
            for t, new in zip(moe.parameters(), getattr(move, "late", ())):
                t.data.copy_(new)
            return begin()

        move._receive, move._begin_round, move._step = receive_nothing, begin_late, begin_late
        same = []
        while not move.advance():
            same.append(torch.equal(moe(*call, **more), wanted))
        same.append(torch.equal(moe(*call, **more), wanted))
    moe.finalize()
    return same


@pytest.mark.parametrize("options", [{"compute_dtype": torch.float8_e4m3fn}, {}], ids=("FP8", "adapters"))
def test_forms_of_weights_are_made_again_when_copies_have_arrived(ranks, options):
    for same in ranks(lambda world, device: late_copies(world, device, options), world_size=2):
        assert len(same) > 4 and all(same), same


# ---- mistakes ----


def writes(world, device, write):
    """One rank writes weights during a move, which then ends on all. The module works, and moves again."""
    moe = make(world, device, dtype=torch.bfloat16, rank_invariant=True)
    moe.add_adapter("a", 4, 8)
    moe.add_adapter("b", 4, 8)
    moe.set_adapter("a")
    under_way = moe.move_experts(maps_of(moe)[0])
    errors = [outcome(under_way.advance)]
    if world.rank == world.size - 1:
        write(moe)
    errors.append(outcome(under_way.advance))
    moe.move_experts(maps_of(moe)[1]).finish()
    moe.finalize()
    return errors, under_way.is_done


@pytest.mark.parametrize("write", [
    lambda moe: moe.reset_parameters(), lambda moe: moe.down_proj.detach().add_(1),
    lambda moe: setattr(moe.down_proj, "data", moe.down_proj.data.clone())], ids=("reset", "add", "data"))
def test_writes_during_a_move_end_it(ranks, write):
    results = ranks(lambda world, device: writes(world, device, write), world_size=2, at_least=2)
    for rank, (errors, is_done) in enumerate(results):
        assert errors[0].kind == "nothing" and is_done
        assert errors[1].kind == ("RuntimeError" if rank == len(results) - 1 else "PeerError")


def crossed(world, device):
    """Two moves, which the ranks go on with in another order. Then they do so in the same one."""
    first, second = (make(world, device, seed) for seed in (1, 2))
    moves = [moe.move_experts(maps_of(moe)[0]) for moe in (first, second)]
    error = outcome((moves if world.rank % 2 else moves[::-1])[0].finish)
    for move in moves:
        move.finish()
    check_weights(first, 1), check_weights(second, 2)
    for moe in first, second:
        moe.finalize()
    return error


def test_moves_in_another_order(ranks):
    for error in ranks(crossed, world_size=2, at_least=2):
        assert error.kind == "EpMismatch" and "advance() of another move" in error.text


def gradients_during_a_move(world, device):
    moe = make(world, device, spare=1)
    loads = [9] + [1] * (E - 1)
    under_way = moe.move_experts(epmoe.balance_experts(loads, world.size, moe.layer.num_experts))
    under_way.advance()
    error = outcome(lambda: moe(*inputs(moe, 1)))
    under_way.finish()
    moe.finalize()
    return error


def test_no_gradients_during_a_move(ranks):
    for error in ranks(gradients_during_a_move, world_size=2):
        assert error.kind == "RuntimeError" and "the experts have no gradients" in error.text


def mistakes(world, device):
    moe = make(world, device, dtype=torch.bfloat16, rank_invariant=True)
    maps = maps_of(moe)
    last, found = world.size - 1, []
    with torch.no_grad():
        wanted = moe(*inputs(moe, 1)).clone()
    found.append(outcome(lambda: moe.move_experts(maps[world.rank == last and 1])))
    found.append(outcome(lambda: moe.move_experts(maps[0], at_once=0 if world.rank == last else 1)))
    under_way = moe.move_experts(maps[0])
    found.append(outcome(lambda: moe.move_experts(maps[1])))
    found.append(outcome(lambda: moe.set_expert_map(maps[1])))
    found.append(outcome(lambda: moe.load_state_dict({})))
    copied = copy.deepcopy(moe)
    found.append(copied._move is None and copied._rooms is None)

    def broken(*_):
        raise MemoryError("no room")

    if world.rank == last:
        under_way._send = broken
    errors = [outcome(under_way.advance) for _ in range(2)]
    ended = under_way.is_done and moe._move is None
    with torch.no_grad():
        same = torch.equal(moe(*inputs(moe, 1)), wanted)
    again = moe.move_experts(maps[1])
    again.finish()
    check_weights(moe)
    with torch.no_grad():
        same = same and torch.equal(moe(*inputs(moe, 1)), wanted)
    late = moe.move_experts(maps[2])
    moe.finalize()
    found.append(outcome(late.advance))
    return found, errors, ended, same


def test_mistakes(ranks):
    results = ranks(mistakes, world_size=2, at_least=2)
    for rank, (found, errors, ended, same) in enumerate(results):
        is_last = rank == len(results) - 1
        assert found[0].kind == "EpMismatch" and "another expert map" in found[0].text
        assert found[1].kind == ("ValueError" if is_last else "PeerError")
        for error in found[2:4]:
            assert error.kind == "RuntimeError" and "call finish()" in error.text
        assert "on their way" in found[4].text and found[5]
        assert errors[0].kind == "nothing" and errors[1].kind == ("MemoryError" if is_last else "PeerError")
        assert ended and same
        assert found[6].kind == "RuntimeError" and "was finalized" in found[6].text


@pytest.mark.cpu_only
def test_a_rank_dies_during_a_move(ranks):
    def run(world, device):
        moe = make(world, device)
        under_way = moe.move_experts(maps_of(moe)[0])
        under_way.advance()
        if world.rank == 2:
            world._leave(False)
            return None
        return outcome(under_way.finish).kind

    assert ranks(run, world_size=3) == ["PeerDied", "PeerDied", None]
