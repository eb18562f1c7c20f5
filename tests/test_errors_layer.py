"""What bad input gets: a named exception that says what was wanted and what came, on every rank, soon; and
the layer goes on.

One rank makes the mistake: it raises its own reason, the others PeerError (or, where all can see it, the same
exception), and nobody waits.  After every mistake a whole routing is compared with the oracle.
"""

import dataclasses

import pytest
import torch

from cases import (
    MISTAKE_LIMIT_S, Case, afterwards, check_afterwards, check_case, check_outcomes, indices_of,
    inputs_of, make_layer, misaligned, outcome, run_routing,
)
from pace import slowness, until_ended

CASE = Case(num_local=2, topk=3, hidden=16, max_tokens=10, dtype=torch.bfloat16)
BAD = 1  # the rank that makes the mistake


def good_arguments(layer, case=CASE):
    x, weight = inputs_of(case, layer.rank, layer.world_size)
    return {"input": x.to(layer.device),
            "exp_indices": indices_of(case, layer.rank, layer.world_size).to(layer.device),
            "weight": weight.to(layer.device)}


def mistake(world, device, call_of, case=CASE, prepare=None, **options):
    """call_of(layer, arguments, is_bad, prepared) makes the call; then the layer must still work."""
    layer = make_layer(world, device, case, **options)
    arguments = good_arguments(layer, case)
    prepared = prepare(layer, arguments) if prepare else None
    world.set_timeout(MISTAKE_LIMIT_S)
    got = outcome(lambda: call_of(layer, arguments, world.rank == BAD, prepared), layer)
    return got, afterwards(world, lambda: layer, case)


def check(results, own, own_texts, others, other_texts, case=CASE):
    """own: a class of the bad rank's exception, or "Error" for any; others: of the other ranks'."""
    outcomes = [r[0] for r in results]
    check_afterwards(outcomes, [r[1] for r in results], case)
    if own == "Error" and outcomes[BAD].kind.endswith("Error"):
        own = outcomes[BAD].kind
    check_outcomes(outcomes, [own if rank == BAD else others for rank in range(len(outcomes))], *own_texts,
                   who=BAD, elsewhere=other_texts)


def check_refused(results, own, own_texts, case=CASE):
    """The bad rank has its own reason; the others hear that it has one, and of which kind."""
    check(results, own, own_texts, "PeerError", (f"rank {BAD}", "" if own == "Error" else own), case)


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


# What rank BAD passes instead, by argument: (name, change, exception, texts of the message).
WRONG_DISPATCH = [
    ("input", lambda t: t.float(), "TypeError", ("input", "bfloat16", "float32")),
    ("input", lambda t: t.to(torch.float16), "TypeError", ("input", "bfloat16", "float16")),
    ("input", lambda t: t[:, :8].contiguous(), "ValueError", ("input", "16", "8")),
    ("input", lambda t: t.reshape(-1), "ValueError", ("input", "16")),
    ("input", lambda t: t[None], "ValueError", ("input", "16")),
    ("input", lambda t: t.tolist(), "TypeError", ("input", "list")),
    ("input", lambda t: None, "TypeError", ("input", "None")),
    ("input", lambda t: t.to("meta"), "Error", ("meta",)),
    ("input", strided, "ValueError", ("input", "contiguous")),
    ("input", lambda t: t.t().contiguous().t(), "ValueError", ("input", "contiguous")),
    ("input", lambda t: t.to_sparse(), "Error", ()),
    ("input", misaligned, "ValueError", ("input", "16")),
    ("input", lambda t: torch.cat([t, t]), "ValueError", ("20", "10")),
    ("exp_indices", lambda t: t.short(), "TypeError", ("exp_indices", "int32", "int64", "got int16")),
    ("exp_indices", lambda t: t.float(), "TypeError", ("exp_indices", "int32", "float32")),
    ("exp_indices", lambda t: t[:, :2].contiguous(), "ValueError",
     ("exp_indices", "size 3 in dimension 1, got 2")),
    ("exp_indices", lambda t: t.reshape(-1), "ValueError", ("exp_indices",)),
    ("exp_indices", lambda t: t.tolist(), "TypeError", ("list",)),
    ("exp_indices", lambda t: None, "TypeError", ("None",)),
    ("exp_indices", lambda t: t.to("meta"), "Error", ()),
    ("exp_indices", strided, "ValueError", ("exp_indices", "contiguous")),
    ("exp_indices", lambda t: t[:4], "ValueError", ("10", "4")),
    ("weight", lambda t: t[:, :2].contiguous(), "ValueError", ("weight", "3", "2")),
    ("weight", lambda t: t[:4], "ValueError", ("weight", "10", "4")),
    ("weight", lambda t: t.reshape(-1), "ValueError", ("weight", "3")),
    ("weight", lambda t: t.tolist(), "Error", ("weight", "list")),
    ("weight", lambda t: t.to("meta"), "Error", ("meta",)),
    ("weight", strided, "ValueError", ("weight", "contiguous")),
    ("weight", lambda t: t.to(torch.complex64), "TypeError", ("weight", "complex64")),
]


@pytest.mark.parametrize("name, change, kind, texts", WRONG_DISPATCH,
                         ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG_DISPATCH)])
def test_errors_dispatch_argument(ranks, name, change, kind, texts):
    def call(layer, arguments, is_bad, _):
        if is_bad:
            arguments = arguments | {name: change(arguments[name])}
        return layer.dispatch(**arguments)

    check_refused(ranks(mistake, call, world_size=3, at_least=2), kind, texts)


@pytest.mark.parametrize("name, change, kind, texts", [w for w in WRONG_DISPATCH
                                                       if w[0] in ("input", "weight")],
                         ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG_DISPATCH)
                              if n in ("input", "weight")])
def test_errors_cached_dispatch_argument(ranks, name, change, kind, texts):
    """The same mistakes, over the layout of before."""

    def call(layer, arguments, is_bad, layout):
        arguments = {"input": arguments["input"], "weight": arguments["weight"]}
        if is_bad:
            arguments |= {name: change(arguments[name])}
        return layer.dispatch(**arguments, layout=layout)

    check_refused(ranks(mistake, call, CASE, lambda layer, a: layer.preprocess(a["exp_indices"]),
                        world_size=3, at_least=2), kind, texts)


def test_errors_too_many_tokens(ranks):
    def call(layer, arguments, is_bad, _):
        if is_bad:
            arguments = {k: torch.cat([v, v[:1]]) for k, v in arguments.items()}
        return layer.dispatch(**arguments)

    check_refused(ranks(mistake, call, world_size=3, at_least=2), "ValueError", ("11", "max_tokens", "10"))


@pytest.mark.parametrize("value", [-2, -(2**31), 7, 6 + 1000, 2**31 - 1])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_errors_index_outside(ranks, value, index_dtype):
    """All ranks name the rank, the index, the token and the choice; a value just past E is no sentinel."""

    def call(layer, arguments, is_bad, _):
        idx = arguments["exp_indices"].to(index_dtype)
        if is_bad:
            idx[4, 2] = value if value < 0 or value > 100 else layer.num_experts + 1
            idx[7, 0] = -2  # the first one is the one that is named
        return layer.dispatch(arguments["input"], idx, arguments["weight"])

    results = ranks(mistake, call, world_size=3, at_least=2)
    e = 2 * len(results)
    said = f"rank {BAD}: expert index {value if value < 0 or value > 100 else e + 1} of token 4, choice 2 is outside [-1, {e}]"
    check(results, "EpIndexError", (said,), "EpIndexError", (said,))
    assert all("IndexError" in r[0].kinds for r in results)


@pytest.mark.parametrize("value", [2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63), 2**31])
def test_errors_index_outside_int32(ranks, value):
    """An int64 index is not cut to 32 bits before it is judged."""

    def call(layer, arguments, is_bad, _):
        if is_bad:
            arguments["exp_indices"][0, 1] = value
        return layer.preprocess(arguments["exp_indices"])

    results = ranks(mistake, call, world_size=3, at_least=2)
    said = f"rank {BAD}: expert index {value} of token 0, choice 1 "
    check(results, "EpIndexError", (said,), "EpIndexError", (said,))


def test_errors_weights_on_one_rank_only(ranks):
    def call(layer, arguments, is_bad, _):
        return layer.dispatch(**(arguments | ({"weight": None} if is_bad else {})))

    results = ranks(mistake, call, world_size=3, at_least=2)
    check(results, "EpMismatch", ("has_weight", f"rank {BAD}"), "EpMismatch", ("has_weight", f"rank {BAD}"))


# ---- combine ----


def dispatched(layer, arguments):
    rows, row_weight, layout = layer.dispatch(**arguments)
    return torch.ones_like(rows), layout, torch.ones_like(row_weight)


WRONG_COMBINE = [
    (0, lambda t: t.float(), "TypeError", ("bfloat16", "float32")),
    (0, lambda t: t[:, :8].contiguous(), "ValueError", ("16", "8")),
    (0, lambda t: t.reshape(-1), "ValueError", ("2", "1")),
    (0, lambda t: t.tolist(), "TypeError", ("list",)),
    (0, lambda t: None, "TypeError", ("None",)),
    (0, lambda t: t.to("meta"), "Error", ("meta",)),
    (0, strided, "ValueError", ("contiguous",)),
    (0, misaligned, "ValueError", ("16",)),
    (2, lambda t: t[:-1], "ValueError", ("weight",)),
    (2, lambda t: t[:, None], "ValueError", ("weight", "1", "2")),
    (2, lambda t: t.tolist(), "Error", ("weight", "list")),
    (2, lambda t: t.to("meta"), "Error", ("meta",)),
    (2, strided, "ValueError", ("weight", "contiguous")),
    (1, lambda t: None, "TypeError", ("layout", "EPLayout", "NoneType")),
    (1, lambda t: t.plan, "TypeError", ("layout", "EPLayout", "Tensor")),
]


@pytest.mark.parametrize("mode", ["scatter", "gather", "local"])
@pytest.mark.parametrize("at, change, kind, texts", WRONG_COMBINE,
                         ids=[f"{('input', 'layout', 'weight')[w[0]]}-{i}" for i,
                              w in enumerate(WRONG_COMBINE)])
def test_errors_combine_argument(ranks, at, change, kind, texts, mode):
    def call(layer, arguments, is_bad, prepared):
        prepared = list(prepared)
        if is_bad:
            prepared[at] = change(prepared[at])
        return layer.combine(*prepared)

    case = dataclasses.replace(CASE, mode=mode)
    check_refused(ranks(mistake, call, case, dispatched, world_size=3, at_least=2), kind, texts, case)


def too_few_rows(world, device, mode):
    case, states = dataclasses.replace(CASE, mode=mode), []
    for num_missing in (1, 1000):
        for weights in (True, False):

            def call(layer, arguments, is_bad, prepared):
                rows, layout, row_weight = prepared
                if is_bad:
                    kept = max(0, len(rows) - num_missing)
                    rows, row_weight = rows[:kept].clone(), row_weight[:kept].clone()
                return layer.combine(rows, layout, row_weight if weights else None)

            states.append(mistake(world, device, call, case, dispatched))
    return states


@pytest.mark.parametrize("mode", ["scatter", "gather", "local"])
def test_errors_combine_of_too_few_rows(ranks, mode):
    """Rows that are not there are neither read nor left out of a sum."""
    results = ranks.isolated(too_few_rows, mode, world_size=3, at_least=2)
    for i in range(4):
        check_refused([r[i] for r in results], "ValueError", ("row",), dataclasses.replace(CASE, mode=mode))


def test_errors_combine_before_dispatch(ranks):
    """A layout that was only planned has no rows to bring home: on one rank, and on all."""

    def call(layer, arguments, is_bad, prepared):
        planned, (rows, layout, _) = prepared
        return layer.combine(rows, planned if is_bad else layout)

    def prepare(layer, arguments):
        return layer.preprocess(arguments["exp_indices"]), dispatched(layer, arguments)

    check_refused(ranks(mistake, call, CASE, prepare, world_size=3, at_least=2), "ValueError", ("dispatch",))

    def all_of_them(layer, arguments, is_bad, prepared):
        return layer.combine(prepared[1][0], prepared[0])

    results = ranks(mistake, all_of_them, CASE, prepare, world_size=3)
    check(results, "ValueError", ("dispatch",), "ValueError", ("dispatch",))


def test_errors_layout_of_another_layer(ranks):
    def run(world, device):
        layer, other = make_layer(world, device, CASE), make_layer(world, device, CASE)
        mine, theirs = dispatched(layer, good_arguments(layer)), dispatched(other, good_arguments(other))
        world.set_timeout(MISTAKE_LIMIT_S)
        is_bad = world.rank == BAD
        got = [outcome(lambda: layer.combine(mine[0], theirs[1] if is_bad else mine[1]), layer),
               outcome(lambda: layer.dispatch(good_arguments(layer)["input"],
                                              layout=theirs[1] if is_bad else mine[1]), layer)]
        return got, [afterwards(world, lambda: layer, CASE), afterwards(world, lambda: other, CASE)]

    results = ranks(run, world_size=3, at_least=2)
    for i in (0, 1):
        check_refused([(r[0][i], r[1][i]) for r in results], "ValueError", ("another layer",))


def test_errors_layouts_that_differ(ranks):
    """One rank combines by the plan before: the ranks see that they do not speak of the same call."""

    def prepare(layer, arguments):
        return dispatched(layer, arguments), dispatched(layer, arguments)

    def call(layer, arguments, is_bad, prepared):
        rows, layout, _ = prepared[0 if is_bad else 1]
        return layer.combine(rows, layout)

    results = ranks(mistake, call, CASE, prepare, world_size=3, at_least=2)
    check(results, "EpMismatch", ("plan_idx", f"rank {BAD}"), "EpMismatch", ("plan_idx", f"rank {BAD}"))


@pytest.mark.parametrize("order", ["combine", "dispatch", "barrier", "plan"])
def test_errors_order_of_calls(ranks, order):
    """One rank is in another operation than the others: both are named."""

    def call(layer, arguments, is_bad, prepared):
        rows, layout, _ = prepared
        calls = {"combine": lambda: layer.combine(rows, layout),
                 "dispatch": lambda: layer.dispatch(arguments["input"], layout=layout),
                 "barrier": layer.ep_barrier_all, "plan": lambda: layer.preprocess(arguments["exp_indices"])}
        return calls[order if is_bad else "barrier" if order == "combine" else "combine"]()

    results = ranks(mistake, call, CASE, dispatched, world_size=3, at_least=2)
    others = "barrier" if order == "combine" else "combine"
    check(results, "EpMismatch", (order, others, f"rank {BAD}"), "EpMismatch", (order, others, f"rank {BAD}"))


def test_errors_follow_each_other(ranks):
    """Many mistakes of several ranks in turn, good calls between them: nobody gets out of step."""

    def run(world, device):
        layer = make_layer(world, device, CASE)
        arguments = good_arguments(layer)
        kinds = []
        for i in range(30):
            bad = i % (world.size + 1) == world.rank
            changed = [{"input": arguments["input"].float()},
                       {"exp_indices": arguments["exp_indices"] + 1000}, {"weight": None},
                       {"exp_indices": arguments["exp_indices"][:, :1].contiguous()}][i % 4]
            kinds.append(outcome(lambda: layer.dispatch(**(arguments | (changed if bad else {}))),
                                 layer).kind)
        result = run_routing(layer, CASE)
        layer.finalize()
        return kinds, result

    results = ranks(run, world_size=3, at_least=2)
    size = len(results)
    for i in range(30):
        bad = i % (size + 1)
        kinds = [r[0][i] for r in results]
        own, others = [("TypeError", "PeerError"), ("EpIndexError", "EpIndexError"),
                       ("EpMismatch", "EpMismatch"), ("ValueError", "PeerError")][i % 4]
        assert kinds == ["nothing" if bad == size else own if rank == bad else others
                         for rank in range(size)], f"call {i}"
    check_case([r[1] for r in results], CASE)


def test_errors_two_ranks_at_once(ranks):
    """Each keeps its own reason; the rank without a fault hears of the first."""

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
    """A dispatch that failed does not spoil the layout that it was given."""

    def run(world, device):
        layer = make_layer(world, device, CASE)
        arguments = good_arguments(layer)
        layout = layer.preprocess(arguments["exp_indices"])
        got = outcome(lambda: layer.dispatch(arguments["input"].float() if world.rank == BAD
                                             else arguments["input"], layout=layout), layer)
        result = run_routing(layer, CASE, layout=layout)
        layer.finalize()
        return got, result

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([r[0] for r in results], ["TypeError" if rank == BAD else "PeerError"
                                             for rank in range(len(results))])
    check_case([r[1] for r in results], CASE)


def test_errors_one_rank_stays_away(ranks):
    """A rank that does not take part: the others get EpTimeout at the limit, which names it."""
    limit = 0.7 * slowness()

    def run(world, device):
        layer = make_layer(world, device, CASE)
        world.exchange(b"x")
        world.set_timeout(limit)
        if world.rank == BAD:
            got = outcome(lambda: None)
            until_ended(world)
            return got, outcome(world.check)
        return outcome(lambda: layer.dispatch(**good_arguments(layer)),
                       layer), outcome(lambda: layer.ep_barrier_all())

    results = ranks(run, world_size=3, at_least=2)
    for rank, (first, second) in enumerate(results):
        check_outcomes([second], "EpTimeout", f"rank {BAD}")
        if rank != BAD:
            check_outcomes([first], "EpTimeout", f"rank {BAD}", within_s=limit + 2)
    assert any("wanted" in first.text and "saw" in first.text for first, _ in results)
    assert all("TimeoutError" in second.kinds for _, second in results)
