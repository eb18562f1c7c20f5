"""EPMoE(balance=...): ranks with few rows help the others, and the results are those without help."""

import contextlib
import copy
import functools
import itertools
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import epmoe
from balance_cases import (BALANCE, HIDDEN, INNER, K, NAMES, backward, batch, fill, forward, gradients, make,
                           train)
from cases import same_bits
from outcomes import outcome
from epmoe import _C
from epmoe.a2a.base import NO_CONFIG
from epmoe.moe import balance as balancing


def pairs(ranks, run, **options):
    """(with balance, without), of each rank."""
    return zip(*(ranks(functools.partial(run, **options, balance=b)) for b in (BALANCE, None)))


def find_helps(rows, num_ranks, slots, min_rows=1, held=None):
    """[(expert, slot, first choice, number of choices)], and with held which of the slots hold the expert."""
    config = NO_CONFIG._replace(ranks=num_ranks, num_experts=len(rows), topk=1, max_tokens=1, hidden=16,
                                capacity=1, num_buffers=1, num_sm=1)
    found = _C.find_helps(config, slots, min_rows, rows, held)
    if held is None:
        assert not any(is_held for *_, is_held in found)
        return [tuple(help[:4]) for help in found]
    return [tuple(help[:4]) for help in found], [bool(is_held) for *_, is_held in found]


def loads(rows, num_ranks):
    local = len(rows) // num_ranks
    return [sum(rows[r * local:(r + 1) * local]) for r in range(num_ranks)]


# ---- who helps whom ----


@pytest.mark.parametrize("num_ranks, local, slots", [(2, 3, 1), (4, 6, 2), (8, 10, 8), (3, 5, 4), (1, 4, 2)])
def test_helps_keep_the_rows_and_pass_no_mean(num_ranks, local, slots):
    rng = random.Random(f"{num_ranks} {local} {slots}")
    helped = 0
    for trial in range(200):
        rows = [0 if i % local >= local - slots else int(rng.paretovariate(0.7)) % 5000 * (trial % 7 > 0)
                for i in range(num_ranks * local)]
        min_rows = rng.choice((1, 1, 50))
        helps = find_helps(rows, num_ranks, slots, min_rows)
        after, before, mean = list(rows), loads(rows, num_ranks), -(-sum(rows) // num_ranks)
        for expert, slot, first, num in helps:
            assert num >= min_rows and expert % local < local - slots <= slot % local
            assert expert // local != slot // local and after[slot] == 0
            assert first + num == after[expert]  # the last rows, so that each has one place
            after[expert], after[slot] = first, num
        assert sum(after) == sum(rows) and helps == find_helps(rows, num_ranks, slots, min_rows)
        for old, new in zip(before, loads(after, num_ranks)):
            assert min(old, mean) <= new <= max(old, mean)
        helped += bool(helps)
    assert (helped > 50) == (num_ranks > 1)


def test_helps_of_hot_experts_level_the_ranks():
    """One and two hot experts, and 3.0 times the mean on a rank, with two slots: at most 1.1 of the mean."""
    local, slots = 10, 2
    for num_ranks, hot in itertools.product((2, 4, 8), (1, 2)):
        rows = [0 if i % local >= local - slots else 100 for i in range(num_ranks * local)]
        for e in range(hot):
            rows[e] += 2 * 800 * (num_ranks - 1) // hot
        after = list(rows)
        for expert, slot, _, num in find_helps(rows, num_ranks, slots, 64):
            after[expert] -= num
            after[slot] += num
        mean = sum(rows) / num_ranks
        assert max(loads(rows, num_ranks)) > 1.45 * mean and max(loads(after, num_ranks)) <= 1.1 * mean


def test_slots_that_hold_an_expert_help_with_it():
    """Which rank helps depends on the rows alone.  A slot holds the expert that it got last."""
    num_ranks, local, slots = 4, 6, 2
    num, rng = num_ranks * local, random.Random(4)
    held, holds = torch.zeros(num + 1, 2, dtype=torch.int32), {}
    hits = calls = 0
    for _ in range(300):
        rows = [0 if i % local >= local - slots else rng.randrange(20) for i in range(num)]
        for expert in rng.sample((0, 1, 6), 2):
            rows[expert] += rng.randrange(500)
        helps, are_held = find_helps(rows, num_ranks, slots, 10, held)
        assert [(e, slot // local, *its) for e, slot, *its in helps] == [
            (e, slot // local, *its) for e, slot, *its in find_helps(rows, num_ranks, slots, 10)]
        assert len({slot for _, slot, *_ in helps}) == len(helps)
        for (expert, slot, *_), is_held in zip(helps, are_held):
            rank = range(slot // local * local, (slot // local + 1) * local)
            assert is_held == any(holds.get(s) == expert for s in rank) and slot % local >= local - slots
            assert not is_held or holds[slot] == expert
        calls += len(helps)
        hits += sum(are_held)
        holds |= {slot: expert for expert, slot, *_ in helps}
        assert {s: int(held[s, 0]) - 1 for s in range(num) if held[s, 0]} == holds
    assert calls > 300 and hits > 0.6 * calls


def test_the_slot_that_rested_longest_gets_another_expert():
    rows = {hot: [100 * (e == hot) for e in range(8)] for hot in (0, 1)}
    held = torch.zeros(9, 2, dtype=torch.int32)
    seen = [find_helps(rows[hot], 2, 2, held=held) for hot in (0, 0, 1, 0, 1)]
    assert [(help[1], is_held) for (help,), (is_held,) in seen] == [(6, False), (6, True), (7, False),
                                                                   (6, True), (7, True)]
    held[6:8, 0] = 0  # as with other experts: now slot 6 has rested longest
    assert find_helps(rows[1], 2, 2, held=held)[0][0][1] == 6


def test_helps_leave_balanced_rows_alone():
    assert find_helps([7, 9, 0, 8, 8, 0], 2, 1) == []
    assert find_helps([0, 0, 0, 0, 0, 0], 2, 1) == []
    assert find_helps([20, 0, 0, 0, 0, 0], 2, 1, min_rows=11) == []
    assert find_helps([20, 0, 0, 0, 0, 0], 2, 1, min_rows=10) == [(0, 5, 10, 10)]


# ---- results ----


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("options", [
    {}, {"bias": False, "activation": "gpt_oss"}, {"activation": "relu2"}, {"num_experts": 7},
    {"rank_invariant": False}, {"fused": False}, {"max_tokens": 512}], ids=str)
def test_balanced_steps_have_the_results_of_others(ranks, dtype, options):
    options = {"rank_invariant": True, "dtype": dtype} | options
    for balanced, other in pairs(ranks, train, **options):
        seen, helps, grads = balanced
        assert all(helps) == (ranks.size() > 1) and not any(other[1])
        for mine, its in zip(seen, other[0]):
            for name in its:
                if options["rank_invariant"]:
                    same_bits(mine[name], its[name], name)
                else:
                    assert (mine[name].float() - its[name].float()).abs().max() <= (
                        2**-6 * its[name].float().abs().max())
        for name, its in other[2].items():
            assert (grads[name].float() - its.float()).abs().max() <= 2**-6 * its.float().abs().max(), name


def even(world, device):
    moe = make(world, device)
    layouts = []
    for hot in ((0, 1), (2, 7)):
        forward(moe, 1, hot)
        layout = moe.last_layout
        layouts.append((layout.num_rows, layout.helps))
        slots = [slot for _, slot, _ in layout._helps.list] if layout.helps else []
        assert slots == sorted(slots)  # the order in which gradients are added
    moe.finalize()
    return layouts


def test_ranks_have_equally_many_rows(ranks):
    for call in zip(*ranks(even)):
        rows, helps = [n for n, _ in call], [h for _, h in call]
        assert max(rows) <= 1.1 * sum(rows) / len(rows)
        assert all(h == helps[0] for h in helps)
        assert all(0 <= rank < ranks.size() and n >= 4 for _, rank, n in helps[0])


def interleaved(world, device, balance=BALANCE):
    """Backwards in another order than their forwards, twice through one graph, and a recomputed forward."""
    moe = make(world, device, balance=balance, rank_invariant=True)
    first, second, third = (forward(moe, step, hot) for step, hot in enumerate(((0, 1), (6, 7), (3, 4))))
    y, x, weights = first
    y.sum().backward(retain_graph=True)
    again = [x.grad.clone(), weights.grad.clone()]
    x.grad = weights.grad = None
    seen = [backward(*third), backward(*first), backward(*second)]
    assert again[0].isfinite().all()
    recomputed = forward(moe, 3, (5, 6), run=lambda *call: checkpoint(moe, *call, use_reentrant=False))
    forward(moe, 4, (0, 2))
    seen += [backward(*recomputed), dict(zip("ab", again))]
    grads = gradients(moe)
    moe.layer.synchronize()
    moe.finalize()
    return seen, grads


def check_steps(ranks, run):
    """With balance and without: the same results, and gradients of parameters within rounding."""
    for (balanced, grads), (other, other_grads) in pairs(ranks, run):
        for mine, its in zip(balanced, other):
            for name in its:
                same_bits(mine[name], its[name], name)
        for name, its in other_grads.items():
            assert (grads[name] - its).abs().max() <= 2**-5 * its.abs().max(), name


def test_slots_are_restored_for_backwards(ranks):
    check_steps(ranks, interleaved)


def restores(world, device):
    """How often the weights of the slots traveled again, in backwards after one forward and after two."""
    moe, calls = make(world, device), []
    restore = moe._balancer.restore
    moe._balancer.restore = lambda *args: (calls.append(name), restore(*args))
    name = "only"
    backward(*forward(moe, 0))
    first, second = forward(moe, 1), forward(moe, 2, (6, 7))
    y, _, _ = forward(moe, 3, (3, 5))
    name = "latest, twice"
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    with torch.no_grad():
        moe(*batch(moe, 4, (1, 2)))
    for name, step in ("second", second), ("first", first):
        backward(*step)
    moe.layer.synchronize()
    moe.finalize()
    return calls


def test_weights_travel_again_only_if_the_slots_were_written(ranks):
    for calls in ranks(restores):
        assert calls == (["second", "first"] if ranks.size() > 1 else [])


def infer(moe, step=0, hot=(0, 1)):
    with torch.no_grad():
        return moe(*batch(moe, step, hot))


def spoil_slots(moe):
    """Overwrite the helper slots of this rank, so that torch does not count it."""
    for name in NAMES:
        getattr(moe, name).data[-BALANCE.slots:] = 100


def keeps(world, device):
    """{event: whether this rank's result shows that slots were not written again after it}."""
    moe = make(world, device, rank_invariant=True)
    plain = make(world, device, balance=None, rank_invariant=True)
    want, seen = infer(plain), {}
    twin = epmoe.EPMoE(HIDDEN, INNER, 8, K, world, layer=moe.layer, bias=True, balance=BALANCE, device=device)
    for name in NAMES:
        setattr(twin, name, getattr(moe, name))

    def fail():
        x, idx, weights = batch(moe)
        got = outcome(lambda: moe(x.double() if world.rank == 0 else x, idx, weights), moe.layer)
        assert got.kind == ("TypeError" if world.rank == 0 else "PeerError"), str(got)
        world.exchange(b"")

    def change(rank):
        if world.rank == rank:
            with torch.no_grad():
                moe.down_proj += 0

    def change_and_watch():
        change(world.size - 1)
        with FlopCounterMode(display=False) if world.rank == 0 else contextlib.nullcontext():
            infer(moe)

    def exchange():
        memory = moe.down_proj.data
        moe.down_proj.data = memory.clone()
        infer(moe)
        moe.down_proj.data = memory

    def restore():
        for p in moe.parameters():
            p.data = p.data.clone()
        infer(moe)
        backward(*pending)

    def fused_step():
        for p in moe.parameters():
            p.grad = torch.zeros_like(p)
        torch.optim.AdamW(moe.parameters(), lr=0.0, fused=True).step()
        moe.zero_grad()

    for name, event in (
            ("nothing", lambda: None),
            ("a call with other experts", lambda: infer(moe, 1, (6, 7))),
            ("a call without help", lambda: infer(moe, 1, range(8))),
            ("a change on rank 0", lambda: change(0)),
            ("a change on the last rank", lambda: change(world.size - 1)),
            ("a change, and a call in which nobody helps", change_and_watch),
            ("requantize on rank 0", lambda: moe.requantize() if world.rank == 0 else None),
            ("a step", lambda: backward(*forward(moe))),
            ("a forward", lambda: forward(moe)),
            ("a backward", lambda: backward(*pending)),
            ("another module with the same weights", lambda: infer(twin, 1, (6, 7))),
            ("a call that fails on rank 0", fail),
            ("other memory and back", exchange),
            ("a backward into other memory", restore),
            ("a fused step", fused_step),
            ("a load", lambda: moe.load_state_dict(plain.state_dict())),
            ("a copy", lambda: copy.deepcopy(moe)(*batch(moe)))):
        pending = forward(moe, 1, (6, 7))
        for _ in range(2):
            same_bits(infer(moe), want, name)
        assert world.size == 1 or moe.last_layout.helps
        spoil_slots(moe)
        event()
        seen[name] = not torch.equal(infer(moe), want)
        moe.requantize()
    moe.layer.synchronize()
    for module in moe, plain:
        module.finalize()
    return seen


def test_weights_travel_once_without_gradients(ranks):
    found = ranks(keeps)
    kept = {name for seen in found for name, is_kept in seen.items() if is_kept}
    assert kept == ({"nothing", "a call with other experts", "a call without help", "a copy"}
                    if ranks.size() > 1 else set())


def made_elsewhere(world, device):
    """Modules that were made in inference mode, and under another default device."""
    want = infer(plain := make(world, device, balance=None, rank_invariant=True))
    plain.finalize()
    for context in (torch.inference_mode(), torch.device("meta")):
        with context:
            moe = epmoe.EPMoE(HIDDEN, INNER, 8, K, world, bias=True, max_tokens=64, rank_invariant=True,
                              balance=BALANCE, device=device)
        with torch.inference_mode():
            fill(moe)
        for _ in range(2):
            same_bits(infer(moe), want, "a call")
        moe.finalize()


def test_balance_of_modules_made_elsewhere(ranks):
    ranks(made_elsewhere)


def at_random(world, device, seed, balance=BALANCE):
    """The results of calls with gradients and without, beside what changes weights, or fails on one rank."""
    moe, seen = make(world, device, balance=balance, rank_invariant=True), []
    shared, own = random.Random(seed), random.Random(f"{seed} {world.rank}")
    for step in range(30):
        hot = shared.choice(((0, 1), (0, 1), (0, 2), (6, 7)))
        way = shared.choice(("infer", "infer", "infer", "train", "load", "change", "fail", "watched"))
        culprit = shared.randrange(world.size) == world.rank
        if way == "train":
            seen.append(backward(*forward(moe, step, hot), step))
        elif way in ("change", "load"):
            with torch.no_grad():
                if way == "load":
                    fill(moe)
                for i, e in enumerate(moe._held):
                    if e >= 0 and own.random() < 0.5:
                        moe.down_proj[i] *= 1 + step % 2
        elif way == "fail":
            x, idx, weights = batch(moe, step, hot)
            got = outcome(lambda: moe(x, idx, weights[:, :1] if culprit else weights), moe.layer)
            assert got.kind == ("ValueError" if culprit else "PeerError"), str(got)
            world.exchange(b"")
        else:
            is_watched = way == "watched" and culprit
            with FlopCounterMode(display=False) if is_watched else contextlib.nullcontext():
                seen.append({"y": infer(moe, step, hot)})
    moe.layer.synchronize()
    moe.finalize()
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_calls_with_gradients_and_without_at_random(ranks, seed):
    for balanced, other in pairs(ranks, at_random, seed=seed):
        assert len(balanced) == len(other)
        for mine, its in zip(balanced, other):
            for name in its:
                same_bits(mine[name], its[name], name)


def apart(world, device, balance=BALANCE):
    """Backwards after calls that rank 0 refuses, or that a counter of operations watches there only."""
    moe, seen = make(world, device, balance=balance, rank_invariant=True), []
    for way in ("refused", "watched"):
        pending = forward(moe, 0)
        x, idx, weights = batch(moe, 1, (6, 7))
        if world.rank == 0 and way == "refused":
            x = x.double()
        is_watched = world.rank == 0 and way == "watched"
        with FlopCounterMode(display=False) if is_watched else contextlib.nullcontext():
            got = outcome(lambda: moe(x, idx, weights), moe.layer)
        kind = "TypeError" if world.rank == 0 else "PeerError"
        assert got.kind == (kind if way == "refused" else "nothing"), str(got)
        world.exchange(b"4")
        seen.append(backward(*pending))
    grads = gradients(moe)
    moe.layer.synchronize()
    moe.finalize()
    return seen, grads


def test_backwards_after_calls_that_differ_between_ranks(ranks):
    check_steps(ranks, apart)


def sharing(world, device, balance=BALANCE):
    """Two modules of one layer, and a copy of one, in one graph."""
    one = make(world, device, balance=balance, rank_invariant=True)
    two = epmoe.EPMoE(HIDDEN, 16, 8, K, world, layer=one.layer, bias=False, balance=balance, device=device)
    fill(two)
    three = copy.deepcopy(one)
    seen = []
    x, idx, weights = batch(one, 5)
    x.requires_grad_()
    y = three(two(one(x, idx, weights), (idx + 3).clamp_max(7), weights), (idx + 5).clamp_max(7), weights)
    y.float().pow(2).sum().backward()
    seen.append({"y": y.detach(), "x": x.grad})
    grads = [gradients(moe) for moe in (one, two, three)]
    one.layer.synchronize()
    one.finalize()
    return seen, grads


def test_modules_share_the_staging(ranks):
    for balanced, other in pairs(ranks, sharing):
        for name, its in other[0][0].items():
            same_bits(balanced[0][0][name], its, name)
        for mine, its in zip(balanced[1], other[1]):
            for name in its:
                assert (mine[name] - its[name]).abs().max() <= 2**-5 * its[name].abs().max().clamp_min(1e-3)


def misaligned(moe):
    """Weights at addresses that no kernel takes: the products read copies."""
    for p in moe.gate_up_proj, moe.down_proj:
        flat = torch.zeros(p.numel() + 1, dtype=p.dtype, device=p.device)
        p.data = flat[1:].view(p.shape).copy_(p.data)


def biased(moe):
    """A bias in float32: the products read it in 16 bits."""
    for p in moe.gate_up_proj_bias, moe.down_proj_bias:
        p.data = p.data.float()


def other_weights(world, device, change, balance=BALANCE):
    moe = make(world, device, balance=balance, rank_invariant=True)
    change(moe)
    step, grads = backward(*forward(moe, 0)), gradients(moe)
    helps = moe.last_layout.helps
    moe.layer.synchronize()
    moe.finalize()
    return step, grads, helps


@pytest.mark.parametrize("change", (misaligned, biased))
def test_slots_are_those_that_the_products_read(ranks, change):
    for (step, grads, helps), (want, want_grads, _) in pairs(ranks, other_weights, change=change):
        assert bool(helps) == (ranks.size() > 1)
        for name in want:
            same_bits(step[name], want[name], name)
        for name, its in want_grads.items():
            assert (grads[name].float() - its.float()).abs().max() <= 2**-6 * its.float().abs().max(), name


def changed_slots(world, device, balance=BALANCE):
    """Between a forward and its backward a second module writes the slots, and .data is exchanged."""
    one, two = (make(world, device, balance=balance, rank_invariant=True) for _ in range(2))
    saved = {name: getattr(one, name).data.clone() for name in NAMES}
    for name in NAMES:
        setattr(two, name, getattr(one, name))
    first, second = forward(one, 0), forward(one, 1, (4, 6))
    with torch.no_grad():
        two(*batch(two, 2, (2, 3)))
    seen = [backward(*first)]
    for name in NAMES:
        getattr(one, name).data = saved[name]
    seen.append(backward(*second))
    one.layer.synchronize()
    one.finalize()
    two.finalize()
    return seen


def test_what_writes_the_slots_between_forward_and_backward(ranks):
    for balanced, other in pairs(ranks, changed_slots):
        for mine, its in zip(balanced, other):
            for name in its:
                same_bits(mine[name], its[name], name)


def written_unseen(world, device, balance=BALANCE):
    """The slots change, and no module has noted what they hold: .data, and a module with copies of biases."""
    one, two = (make(world, device, balance=balance, rank_invariant=True) for _ in range(2))
    biased(two)
    for name in ("gate_up_proj", "down_proj"):
        setattr(two, name, getattr(one, name))
    saved = {name: getattr(one, name).data.clone() for name in NAMES}
    step = forward(one, 0)
    for name in NAMES:
        getattr(one, name).data = saved[name]
    seen = [backward(*step)]
    step = forward(one, 0)
    with torch.no_grad():
        two(*batch(two, 2, (2, 3)))
    seen.append(backward(*step))
    one.layer.synchronize()
    one.finalize()
    two.finalize()
    return seen


def test_slots_are_restored_if_nobody_noted_what_they_hold(ranks):
    for balanced, other in pairs(ranks, written_unseen):
        for mine, its in zip(balanced, other):
            for name in its:
                same_bits(mine[name], its[name], name)


def unlike(world, device, difference, balance=BALANCE):
    """One rank cannot help, or wants gradients of other weights."""
    moe = make(world, device, balance=balance, rank_invariant=True)
    is_last = world.rank == world.size - 1
    context = contextlib.nullcontext()
    if is_last and difference == "mode":
        context = FlopCounterMode(display=False)
    if is_last and difference == "frozen":
        moe.down_proj.requires_grad_(False)
    with context:
        step = backward(*forward(moe, 0))
    helps, grads = moe.last_layout.helps, gradients(moe)
    moe.layer.synchronize()
    moe.finalize()
    return step, grads, helps


@pytest.mark.parametrize("difference", ("mode", "frozen"))
def test_nobody_helps_where_one_rank_cannot(ranks, difference):
    for (step, grads, helps), (want, want_grads, _) in pairs(ranks, unlike, difference=difference):
        assert not helps or ranks.size() == 1
        for mine, its in ((step, want), (grads, want_grads)):
            for name in its:
                same_bits(mine[name], its[name], name)


def partly(world, device, balance=BALANCE):
    """One rank asks for the gradient of x alone. The others get all of theirs."""
    moe = make(world, device, balance=balance, rank_invariant=True)
    y, x, _ = forward(moe, 0)
    leaves = [getattr(moe, name) for name in NAMES] if world.rank else []
    found = torch.autograd.grad(y.float().pow(2).sum(), [x, *leaves])
    own = [i for i, e in enumerate(moe._held) if e >= 0]
    moe.layer.synchronize()
    moe.finalize()
    return [found[0], *(g[own] for g in found[1:])]


def test_backwards_that_need_other_gradients(ranks):
    for balanced, other in pairs(ranks, partly):
        for mine, its in zip(balanced, other, strict=True):
            assert (mine.float() - its.float()).abs().max() <= 2**-6 * its.float().abs().max()


def frozen(world, device, balance=BALANCE):
    moe = make(world, device, balance=balance, rank_invariant=True)
    moe.requires_grad_(False)
    first, second = forward(moe, 0), forward(moe, 1, (4, 5))
    seen = [backward(*first), backward(*second)]
    with torch.no_grad():
        seen.append({"y": moe(*batch(moe, 2)).clone()})
    gradients(moe)
    moe.finalize()
    return seen


def test_balance_with_frozen_experts_and_without_gradients(ranks):
    for balanced, other in pairs(ranks, frozen):
        for mine, its in zip(balanced, other):
            for name in its:
                same_bits(mine[name], its[name], name)


def accumulating(world, device, balance=BALANCE, dtype=torch.float32):
    """main_grad of some steps, which autograd's gradients must be close to."""
    moe = make(world, device, balance=balance, rank_invariant=True, fuse_wgrad_accumulation=True)
    weights = moe.gate_up_proj, moe.down_proj
    for p in weights:
        p.main_grad = torch.zeros_like(p, dtype=dtype)
    backward(*forward(moe, 0)), backward(*forward(moe, 1, (6, 7)))
    own = [i for i, e in enumerate(moe._held) if e >= 0]
    found = [p.main_grad[own].clone() for p in weights] + [moe.down_proj_bias.grad[own].clone()]
    moe.layer.synchronize()
    empty = all(p.grad is None and not p.main_grad[[i for i in range(len(p)) if i not in own]].any()
                for p in weights)
    moe.finalize()
    return found, empty


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_main_grad_of_helped_experts(ranks, dtype):
    """In float32 the sums of ranks differ by the order only: nothing is rounded to 16 bits."""
    for balanced, other in pairs(ranks, accumulating, dtype=dtype):
        for i, (mine, its) in enumerate(zip(balanced[0], other[0])):
            bound = 1e-5 if dtype == torch.float32 and i < 2 else 2**-6
            assert (mine - its).abs().max() <= bound * its.abs().max() and its.any()
        assert balanced[1]


def learn(world, device, balance=BALANCE):
    """The losses of some steps of Adam, and what a checkpoint holds then."""
    moe = make(world, device, balance=balance, dtype=torch.bfloat16, rank_invariant=True)
    optimizer, losses = torch.optim.AdamW(moe.parameters(), lr=3e-3, weight_decay=0.1), []
    for step in range(8):
        x, idx, weights = batch(moe, step % 2, (step % 3, 1))
        loss = (moe(x, idx, weights).float() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = moe.state_dict()
    plain = make(world, device, balance=None, rank_invariant=True)
    plain.load_state_dict(state)
    x, idx, weights = batch(moe, 9)
    with torch.no_grad():
        same = torch.equal(plain(x, idx, weights), moe(x, idx, weights))
    shapes = {name: t.numel() for name, t in state.items()}
    moe.finalize()
    plain.finalize()
    return losses, shapes, same


def test_training_and_checkpoints(ranks):
    for balanced, other in pairs(ranks, learn):
        assert balanced[0] == pytest.approx(other[0], rel=0.02) and balanced[0][-2] < balanced[0][0]
        assert balanced[1] == other[1]
        assert balanced[2]


def oracle(world, device):
    """Gradients of experts, tokens and weights against float64."""
    moe = make(world, device, num_experts=6, bias=False, rank_invariant=True)
    y, x, weights = forward(moe, 0)
    got = backward(y, x, weights)
    helps, grads = moe.last_layout.helps, gradients(moe)
    moe.finalize()
    return got, grads, helps


def test_gradients_against_float64(ranks):
    found = ranks(oracle)
    world = epmoe.thread_worlds(1)[0]
    whole = make(world, "cpu", num_experts=6, balance=None, bias=False)

    def batch_of(rank):
        whole.layer.rank = rank  # only for batch()
        return batch(whole)

    up, down = (p.detach().double().requires_grad_() for p in (whole.gate_up_proj, whole.down_proj))
    batches = [batch_of(rank) for rank in range(len(found))]
    whole.finalize()
    for rank, (got, _, _) in enumerate(found):
        x, idx, weights = batches[rank]
        x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
        y = torch.zeros_like(x)
        for e in range(6):
            gate, u = (x @ up[e].T).chunk(2, -1)
            share = (weights * (idx == e)).sum(1, keepdim=True)
            y = y + share * ((torch.nn.functional.silu(gate) * u) @ down[e].T)
        backward(y, x, weights)
        for name, want in (("y", y), ("x", x.grad), ("weights", weights.grad)):
            assert (got[name].double().cpu() - want).abs().max() <= 0.02 * want.abs().max(), name
    local = -(-6 // ranks.size())
    for rank, (_, grads, _) in enumerate(found):
        for name, want in (("gate_up_proj", up.grad), ("down_proj", down.grad)):
            mine = want[rank * local:rank * local + len(grads[name])]
            wrong = (grads[name].double().cpu() - mine).abs()
            assert not len(mine) or wrong.max() <= 0.02 * want.abs().max(), name


def counted(world, device):
    moe = make(world, device)
    moe.record_stats()
    with torch.no_grad():
        for step in range(2):
            moe(*batch(moe, step))
    helps = moe.last_layout.helps if world.size > 1 else ()
    found = moe.stats()
    want = torch.zeros(8, dtype=torch.int64)
    for step in range(2):
        idx = batch(moe, step)[1].cpu().flatten()
        want += torch.bincount(idx[idx >= 0], minlength=8)
    moe.finalize()
    return found.tokens_per_expert.tolist(), want, helps, str(found)


def test_statistics_count_where_experts_are(ranks):
    found = ranks(counted)
    want = sum(w for _, w, _, _ in found).tolist()
    for got, _, helps, text in found:
        assert got == want and bool(helps) == (ranks.size() > 1) and "is the fullest" in text


# ---- mistakes ----


def spoil(moe, how):
    """Let this rank fail when weights travel: before it sends any, or after, when it receives some."""
    layer, staging = moe.layer, moe.layer.staging
    off, num_bytes = staging._heap.offset(staging._memory), staging.num_bytes
    if how == "send":
        num_bytes = 256
    else:
        off += 1 << 40
    _C.layer_set_staging(layer._c, staging._heap._c, off, num_bytes, staging.balance.slots)


def raises_together(world, device):
    """A wrong index, a rank that fails while it helps, and one that fails in its backward; then it works."""
    moe = make(world, device, rank_invariant=True)
    x, idx, weights = batch(moe)
    bad = idx.clone()
    if world.rank == 0:
        bad[1, 1] = 99
    errors = [outcome(lambda: moe(x, bad, weights), moe.layer)]
    world.exchange(b"1")
    last = world.size - 1

    for how in ("send", "receive"):
        if world.rank == last and world.size > 1:
            spoil(moe, how)
        errors.append(outcome(lambda: moe(x, idx, weights), moe.layer))
        if moe.layer.staging is not None:
            moe.layer.staging.give_to(moe.layer)
        world.exchange(b"2")
    one, two = forward(moe, 0), forward(moe, 1, (6, 7))
    if world.rank == last and world.size > 1:
        spoil(moe, "send")
    errors.append(outcome(lambda: one[0].sum().backward(), moe.layer))
    if moe.layer.staging is not None:
        moe.layer.staging.give_to(moe.layer)
    world.exchange(b"3")
    works = backward(*two)
    moe.zero_grad()
    fresh = backward(*forward(moe, 0))
    moe.finalize()
    other = make(world, device, balance=None, rank_invariant=True)
    want, want_two = backward(*forward(other, 0)), backward(*forward(other, 1, (6, 7)))
    other.finalize()
    return errors, [(fresh, want), (works, want_two)]


def test_errors_reach_all_ranks_and_nothing_is_lost(ranks):
    for rank, (errors, pairs) in enumerate(ranks(raises_together)):
        assert errors[0].kind == "EpIndexError" and "token 1, choice 1" in errors[0].text
        if ranks.size() > 1:
            kind = "ValueError" if rank == ranks.size() - 1 else "PeerError"
            assert [e.kind for e in errors[1:]] == [kind] * 3, list(map(str, errors))
        for got, want in pairs:
            for name in want:
                same_bits(got[name], want[name], name)


def batched(world, device):
    """A batch of gradients is refused on all ranks, and the same graph has its gradients afterwards."""
    moe = make(world, device)
    y, *leaves = forward(moe)
    batch_of_two = torch.stack([torch.ones_like(y)] * 2)
    error = outcome(lambda: torch.autograd.grad(y, leaves, batch_of_two, retain_graph=True,
                                                is_grads_batched=True), moe.layer)
    world.exchange(b"1")
    got = backward(y, *leaves)
    moe.zero_grad()
    want = backward(*forward(moe))
    moe.finalize()
    return error, got, want


def test_a_batch_of_gradients_is_refused(ranks):
    for error, got, want in ranks(batched, world_size=2):
        if ranks.size() > 1:  # else nobody helps
            assert error.kind == "NotImplementedError" and "one gradient at a time" in error.text, error
        for name in want:
            same_bits(got[name], want[name], name)


def restores_wrong_slots(world, device):
    """The module is given helps that no plan has found; then it works."""
    moe = make(world, device)
    want = forward(moe)[0]
    local, weights = moe.layer.num_local_experts, (moe.gate_up_proj, None, moe.down_proj, None)
    slot = 2 * local - 1  # of rank 1
    num = moe.layer.num_experts
    wrong = [(num, slot), (0, num), (0, local), (local, slot), (0, slot - 2)]
    errors = []
    for help in wrong:
        def restore(helps=[help], **_):
            _C.layer_restore_weights(moe.layer._c, 0, moe.last_layout.plan, helps, *weights)

        errors.append(outcome(restore, moe.layer))
        world.exchange(b"1")
    for helps in ([(0, slot)] * 65, [(0,)], [[0, slot]], ((0, slot),)):
        errors.append(outcome(functools.partial(restore, helps), moe.layer))
    for i in range(4):  # weights that are not those of a module
        of_module = [getattr(moe, name) for name in NAMES]
        of_module[i] = of_module[i][:-1].detach()
        errors.append(outcome(functools.partial(_C.layer_restore_weights, moe.layer._c, 0,
                                                moe.last_layout.plan, [], *of_module), moe.layer))
        world.exchange(b"1")
    got = forward(moe)[0]
    moe.finalize()
    return [e.kind for e in errors], [e.text for e in errors[:5]], torch.equal(got, want)


def test_slots_that_are_none_are_refused(ranks):
    for kinds, texts, works in ranks(restores_wrong_slots, at_least=2):
        assert kinds == ["ValueError"] * 5 + ["TypeError"] * 4 + ["ValueError"] * 4 and works
        assert all("helper slot" in text for text in texts), texts


def fails_late(world, device, how):
    """One rank fails in a backward: it loses the weights, its own have changed, or main_grad is missing."""
    fuses = how == "main_grad"
    moe = make(world, device, rank_invariant=True, fuse_wgrad_accumulation=fuses)
    for p in (moe.gate_up_proj, moe.down_proj) if fuses else ():
        p.main_grad = torch.zeros_like(p)
    one, is_last = forward(moe, 0), world.rank == world.size - 1
    if is_last and how == "changed":
        with torch.no_grad():
            moe.down_proj.add_(0)
    two = forward(moe, 1, (6, 7))

    if is_last and how == "main_grad":
        moe.gate_up_proj.main_grad = None
    if is_last and how == "lost":
        spoil(moe, "receive")
    errors = [outcome(lambda: one[0].sum().backward(retain_graph=True), moe.layer)]
    if is_last and how == "main_grad":
        moe.gate_up_proj.main_grad = torch.zeros_like(moe.gate_up_proj)
    if is_last and how == "lost":
        moe.layer.staging.give_to(moe.layer)
    world.exchange(b"1")
    seen = [backward(*two, 1)]
    if how != "changed":
        one[1].grad = one[2].grad = None
        seen.insert(0, backward(*one))
    moe.layer.synchronize()
    moe.finalize()
    other = make(world, device, balance=None, rank_invariant=True)
    want = [backward(*forward(other, 0), 0), backward(*forward(other, 1, (6, 7)), 1)][-len(seen):]
    other.finalize()
    return errors, zip(seen, want)


@pytest.mark.parametrize("how, kind", [("lost", "ValueError"), ("changed", "RuntimeError"),
                                       ("main_grad", "RuntimeError")])
def test_a_backward_that_fails_on_one_rank(ranks, how, kind):
    results = ranks(functools.partial(fails_late, how=how), at_least=2)
    for rank, (errors, pairs) in enumerate(results):
        assert errors[0].kind == (kind if rank == len(results) - 1 else "PeerError"), errors[0]
        for got, want in pairs:
            for name in want:
                same_bits(got[name], want[name], name)


def wrong(world, device, kind, options):
    error = outcome(lambda: make(world, device, **options))
    moe = make(world, device)
    moe.finalize()
    return error


@pytest.mark.parametrize("options, kind, text", [
    ({"balance": 2}, TypeError, "wanted an epmoe.Balance"),
    ({"dtype": torch.float32}, ValueError, "wanted weights in bfloat16 or float16, got torch.float32"),
    ({"capacity": 400}, ValueError, "balance with capacity: not possible"),
    ({"num_physical": 16}, ValueError, "balance with num_physical"),
    ({"delay_wgrad_compute": True}, ValueError, "balance with delay_wgrad_compute"),
    ({"num_buffers": 2}, ValueError, "balance with num_buffers"),
    ({"token_saving": False}, ValueError, "balance with token_saving=False"),
], ids=lambda o: next(iter(o)) if isinstance(o, dict) else "")
def test_wrong_options(ranks, options, kind, text):
    for error in ranks(wrong, kind, options):
        assert error.kind == kind.__name__ and text in error.text


def other_mistakes(world, device):
    moe = make(world, device)
    errors = [outcome(lambda: moe.set_expert_map(None)),
              outcome(lambda: epmoe.EPMoE(HIDDEN, 16, 8, K, world, layer=moe.layer, device=device,
                                           balance=epmoe.Balance(slots=3))),
              outcome(lambda: epmoe.EPMoE(HIDDEN, 64, 8, K, world, layer=moe.layer, device=device,
                                           balance=BALANCE))]
    errors.append(outcome(lambda: make(world, device, layer=moe.layer)))  # experts of the same size
    moe.finalize()
    errors.append(outcome(lambda: epmoe.EPMoE(128, 128, 8, K, world, weight_dtype=torch.float8_e4m3fn,
                                              balance="auto", device=device)))
    errors.append(outcome(lambda: make(world, device, balance=epmoe.Balance(1 + world.rank % 2, 4))))
    return errors


def test_other_mistakes(ranks):
    for errors in ranks(other_mistakes):
        assert errors[0].kind == "RuntimeError" and "each call chooses" in errors[0].text
        assert errors[1].kind == "ValueError"
        assert errors[2].kind == "ValueError" and "experts are larger" in errors[2].text
        assert errors[3].kind == "nothing", errors[3]
        assert errors[4].kind == "ValueError" and "got FP8" in errors[4].text
        if ranks.size() > 1:
            assert errors[5].kind == "EpMismatch"


@pytest.mark.parametrize("wrong, kind", [
    (lambda: epmoe.Balance(0), ValueError), (lambda: epmoe.Balance(2, 0), ValueError),
    (lambda: epmoe.Balance([2]), TypeError)])
def test_wrong_balance(wrong, kind):
    with pytest.raises(kind, match="slots|min_rows"):
        wrong()


def promised(world, device):
    found = []
    for options in ({"rank_invariant": True}, {}):
        moe = make(world, device, **options)
        found.append(epmoe.numerics(moe).reasons)
        moe.finalize()
    return found


def test_numerics_of_balance(ranks):
    for invariant, local in ranks(promised):
        assert list(invariant) == ["rank_invariant"] and "gradients of parameters" in str(invariant)
        assert "choose the ranks that help" in local["batch_invariant"]


def test_default_of_min_rows():
    assert epmoe.Balance() == epmoe.Balance(2, None) and set(balancing._MIN_ROWS) == {"cuda", "cpu"}


@pytest.mark.cpu_only
def test_balance_between_processes(ranks):
    """Weights and gradients travel through memory that processes share."""
    for balanced, other in zip(ranks.isolated(train, BALANCE, 2, world_size=3),
                               ranks.isolated(train, None, 2, world_size=3)):
        assert all(balanced[1]) and not any(other[1])
        for name, its in other[2].items():
            assert (balanced[2][name].float() - its.float()).abs().max() <= 2**-6 * its.float().abs().max()
