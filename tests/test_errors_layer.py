"""Wrong arguments of a layer: every rank raises an exception within two seconds, and the layer still works.

Rank BAD makes the mistake. Its exception names the expected and the actual value. The other ranks raise
PeerError, or the same exception if all ranks can detect the mistake. After every mistake a complete routing
is compared with the reference.
"""

import dataclasses

import pytest
import torch

from cases import misaligned
from layer_cases import BAD, CASE, check, check_refused, dispatched, mistake


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


# (argument, how rank BAD changes it, exception, texts of the message)
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


@pytest.mark.parametrize("name, change, kind, texts",
                         [w for w in WRONG_DISPATCH if w[0] in ("input", "weight")],
                         ids=[f"{n}-{i}" for i, (n, *_) in enumerate(WRONG_DISPATCH)
                              if n in ("input", "weight")])
def test_errors_cached_dispatch_argument(ranks, name, change, kind, texts):
    """The same mistakes in a dispatch with an existing layout."""

    def call(layer, arguments, is_bad, layout):
        arguments = {"input": arguments["input"], "weight": arguments["weight"]}
        if is_bad:
            arguments |= {name: change(arguments[name])}
        return layer.dispatch(**arguments, layout=layout)

    def prepare(layer, arguments):
        return layer.preprocess(arguments["exp_indices"])

    check_refused(ranks(mistake, call, CASE, prepare, world_size=3, at_least=2), kind, texts)


def test_errors_too_many_tokens(ranks):
    def call(layer, arguments, is_bad, _):
        if is_bad:
            arguments = {k: torch.cat([v, v[:1]]) for k, v in arguments.items()}
        return layer.dispatch(**arguments)

    check_refused(ranks(mistake, call, world_size=3, at_least=2), "ValueError", ("11", "max_tokens", "10"))


@pytest.mark.parametrize("value", [-2, -(2**31), 7, 6 + 1000, 2**31 - 1])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_errors_index_out_of_range(ranks, value, index_dtype):
    """All ranks name the rank, the index, the token and the choice. E is a valid sentinel, E + 1 is not."""

    def index(num_experts):
        return value if value < 0 or value > 100 else num_experts + 1

    def call(layer, arguments, is_bad, _):
        idx = arguments["exp_indices"].to(index_dtype)
        if is_bad:
            idx[4, 2] = index(layer.num_experts)
            idx[7, 0] = -2  # the message names the first wrong index, not this one
        return layer.dispatch(arguments["input"], idx, arguments["weight"])

    results = ranks(mistake, call, world_size=3, at_least=2)
    e = 2 * len(results)
    text = f"rank {BAD}: expert index {index(e)} of token 4, choice 2 is outside [-1, {e}]"
    check(results, "EpIndexError", (text,), "EpIndexError", (text,))
    assert all("IndexError" in r[0].kinds for r in results)


@pytest.mark.parametrize("value", [2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63), 2**31])
def test_errors_index_out_of_range_of_int32(ranks, value):
    """An int64 index is validated before it is converted to 32 bits."""

    def call(layer, arguments, is_bad, _):
        if is_bad:
            arguments["exp_indices"][0, 1] = value
        return layer.preprocess(arguments["exp_indices"])

    results = ranks(mistake, call, world_size=3, at_least=2)
    text = f"rank {BAD}: expert index {value} of token 0, choice 1 "
    check(results, "EpIndexError", (text,), "EpIndexError", (text,))


def test_errors_weights_on_one_rank_only(ranks):
    def call(layer, arguments, is_bad, _):
        return layer.dispatch(**(arguments | ({"weight": None} if is_bad else {})))

    texts = ("has_weight", f"rank {BAD}")
    check(ranks(mistake, call, world_size=3, at_least=2), "EpMismatch", texts, "EpMismatch", texts)


# ---- combine ----


# (position in what dispatched() returns, how rank BAD changes it, exception, texts of the message)
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
                         ids=[f"{('input', 'layout', 'weight')[w[0]]}-{i}"
                              for i, w in enumerate(WRONG_COMBINE)])
def test_errors_combine_argument(ranks, at, change, kind, texts, mode):
    def call(layer, arguments, is_bad, prepared):
        prepared = list(prepared)
        if is_bad:
            prepared[at] = change(prepared[at])
        return layer.combine(*prepared)

    case = dataclasses.replace(CASE, mode=mode)
    check_refused(ranks(mistake, call, case, dispatched, world_size=3, at_least=2), kind, texts, case)


def combine_too_few_rows(world, device, mode):
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
def test_errors_combine_too_few_rows(ranks, mode):
    """combine raises. It does not read past the rows, and it does not leave missing rows out of a sum."""
    results = ranks.isolated(combine_too_few_rows, mode, world_size=3, at_least=2)
    for i in range(4):
        check_refused([r[i] for r in results], "ValueError", ("row",), dataclasses.replace(CASE, mode=mode))


def test_errors_combine_before_dispatch(ranks):
    """combine with a layout that no dispatch has used raises, on one rank and on all ranks."""

    def call(layer, arguments, is_bad, prepared):
        planned, (rows, layout, _) = prepared
        return layer.combine(rows, planned if is_bad else layout)

    def prepare(layer, arguments):
        return layer.preprocess(arguments["exp_indices"]), dispatched(layer, arguments)

    check_refused(ranks(mistake, call, CASE, prepare, world_size=3, at_least=2), "ValueError", ("dispatch",))

    def call_on_all_ranks(layer, arguments, is_bad, prepared):
        planned, (rows, _, _) = prepared
        return layer.combine(rows, planned)

    results = ranks(mistake, call_on_all_ranks, CASE, prepare, world_size=3)
    check(results, "ValueError", ("dispatch",), "ValueError", ("dispatch",))
