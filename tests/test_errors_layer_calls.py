"""Wrong calls of a layer: layouts or operations that differ between ranks, several mistakes, a missing call.

test_errors_layer.py tests the arguments of each call.
"""

import pytest
import torch

import epmoe
from cases import (
    MISTAKE_LIMIT_S, afterwards, check_afterwards, check_case, check_outcomes, make_layer, outcome,
    run_routing,
)
from layer_cases import BAD, CASE, check, check_refused, dispatched, good_arguments, mistake
from pace import slowness, until_ended


def test_errors_layout_of_another_layer(ranks):
    def run(world, device):
        layer, other = make_layer(world, device, CASE), make_layer(world, device, CASE)
        arguments = good_arguments(layer)
        rows, layout, _ = dispatched(layer, arguments)
        _, other_layout, _ = dispatched(other, good_arguments(other))
        if world.rank == BAD:
            layout = other_layout
        world.set_timeout(MISTAKE_LIMIT_S)
        got = [outcome(lambda: layer.combine(rows, layout), layer),
               outcome(lambda: layer.dispatch(arguments["input"], layout=layout), layer)]
        return got, [afterwards(world, lambda: layer, CASE), afterwards(world, lambda: other, CASE)]

    results = ranks(run, world_size=3, at_least=2)
    for i in (0, 1):
        check_refused([(r[0][i], r[1][i]) for r in results], "ValueError", ("another layer",))


def test_errors_different_layouts(ranks):
    """Rank BAD combines with the layout of an earlier plan. All ranks detect that the plans differ."""

    def prepare(layer, arguments):
        return dispatched(layer, arguments), dispatched(layer, arguments)

    def call(layer, arguments, is_bad, prepared):
        rows, layout, _ = prepared[0 if is_bad else 1]
        return layer.combine(rows, layout)

    texts = ("plan_idx", f"rank {BAD}")
    results = ranks(mistake, call, CASE, prepare, world_size=3, at_least=2)
    check(results, "EpMismatch", texts, "EpMismatch", texts)


@pytest.mark.parametrize("operation", ["combine", "dispatch", "barrier", "plan"])
def test_errors_different_operations(ranks, operation):
    """Rank BAD calls another operation than the other ranks. The exception names both."""
    others = "barrier" if operation == "combine" else "combine"

    def call(layer, arguments, is_bad, prepared):
        rows, layout, _ = prepared
        calls = {"combine": lambda: layer.combine(rows, layout),
                 "dispatch": lambda: layer.dispatch(arguments["input"], layout=layout),
                 "barrier": layer.ep_barrier_all,
                 "plan": lambda: layer.preprocess(arguments["exp_indices"])}
        return calls[operation if is_bad else others]()

    texts = (operation, others, f"rank {BAD}")
    results = ranks(mistake, call, CASE, dispatched, world_size=3, at_least=2)
    check(results, "EpMismatch", texts, "EpMismatch", texts)


def test_errors_many_mistakes_in_sequence(ranks):
    """The ranks make mistakes one after another, with good calls between them. They remain in step."""

    def run(world, device):
        layer = make_layer(world, device, CASE)
        arguments = good_arguments(layer)
        kinds = []
        changes = [{"input": arguments["input"].float()},
                   {"exp_indices": arguments["exp_indices"] + 1000},
                   {"weight": None},
                   {"exp_indices": arguments["exp_indices"][:, :1].contiguous()}]
        for i in range(30):
            is_bad = i % (world.size + 1) == world.rank
            given = arguments | (changes[i % 4] if is_bad else {})
            kinds.append(outcome(lambda: layer.dispatch(**given), layer).kind)
        result = run_routing(layer, CASE)
        layer.finalize()
        return kinds, result

    results = ranks(run, world_size=3, at_least=2)
    size = len(results)
    wanted = [("TypeError", "PeerError"), ("EpIndexError", "EpIndexError"),
              ("EpMismatch", "EpMismatch"), ("ValueError", "PeerError")]
    for i in range(30):
        bad = i % (size + 1)  # the rank with the mistake; no rank has one if bad == size
        kinds = [r[0][i] for r in results]
        own, others = wanted[i % 4] if bad < size else ("nothing", "nothing")
        assert kinds == [own if rank == bad else others for rank in range(size)], f"call {i}"
    check_case([r[1] for r in results], CASE)


def test_errors_two_ranks_make_mistakes(ranks):
    """Each of the two ranks raises its own reason. Rank 0 has no mistake and raises the first of them."""

    def call(layer, arguments, is_bad, _):
        if layer.rank == 1:
            arguments["input"] = arguments["input"].float()
        if layer.rank == 2:
            arguments["exp_indices"] = arguments["exp_indices"][:, :2].contiguous()
        return layer.dispatch(**arguments)

    results = ranks(mistake, call, world_size=3, at_least=3)
    outcomes = [r[0] for r in results]
    check_outcomes(outcomes, ["PeerError", "TypeError", "ValueError"] + ["PeerError"] * (len(results) - 3))
    assert "rank 1" in outcomes[0].text
    check_afterwards(outcomes, [r[1] for r in results], CASE)


def test_errors_plan_outlives_a_failed_dispatch(ranks):
    """After a dispatch fails, another dispatch can use the same layout."""

    def run(world, device):
        layer = make_layer(world, device, CASE)
        arguments = good_arguments(layer)
        layout = layer.preprocess(arguments["exp_indices"])
        x = arguments["input"].float() if world.rank == BAD else arguments["input"]
        got = outcome(lambda: layer.dispatch(x, layout=layout), layer)
        result = run_routing(layer, CASE, layout=layout)
        layer.finalize()
        return got, result

    results = ranks(run, world_size=3, at_least=2)
    wanted = ["TypeError" if rank == BAD else "PeerError" for rank in range(len(results))]
    check_outcomes([r[0] for r in results], wanted)
    check_case([r[1] for r in results], CASE)


def test_errors_one_rank_makes_no_call(ranks):
    """Rank BAD does not call dispatch. The other ranks raise EpTimeout at the limit, which names rank BAD."""
    limit = 0.7 * slowness()

    def run(world, device):
        layer = make_layer(world, device, CASE)
        world.exchange(b"x")
        world.set_timeout(limit)
        if world.rank == BAD:
            got = outcome(lambda: None)
            until_ended(world)
            return got, outcome(world.check)
        first = outcome(lambda: layer.dispatch(**good_arguments(layer)), layer)
        return first, outcome(lambda: layer.ep_barrier_all())

    results = ranks(run, world_size=3, at_least=2)
    for rank, (first, second) in enumerate(results):
        check_outcomes([second], "EpTimeout", f"rank {BAD}")
        if rank != BAD:
            check_outcomes([first], "EpTimeout", f"rank {BAD}", within_s=limit + 2)
    assert any("wanted" in first.text and "saw" in first.text for first, _ in results)
    assert all("TimeoutError" in second.kinds for _, second in results)


@pytest.mark.cpu_only
@pytest.mark.parametrize("skipped, text", [
    ("layer", "Every rank must call every layer, also without tokens."),
    ("backward", "Every rank must call every layer, also without tokens."),
    ("creation", "All ranks must make the same calls in the same order."),
])
def test_errors_of_a_skipped_call_say_the_rule(ranks, skipped, text):
    """The last rank does not make a call. The error of the others says what the program must do."""

    def run(world, device):
        moe = epmoe.EPMoE(16, 32, 2 * world.size, 1, world, max_tokens=4, dtype=torch.float32, device=device)
        x, idx, weight = torch.ones(4, 16), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        y = moe(x, idx, weight)
        world.exchange(b"x")
        world.set_timeout(0.3 * slowness())
        calls = {"layer": lambda: moe(x, idx, weight), "backward": lambda: y.sum().backward(),
                 "creation": lambda: epmoe.EPAll2AllLayer(world, 4, 16, 1, num_tot_experts=world.size)}
        if world.rank < world.size - 1:
            return outcome(calls[skipped])
        until_ended(world)
        return outcome(world.check)

    check_outcomes(ranks(run, world_size=2), "EpTimeout", text)
