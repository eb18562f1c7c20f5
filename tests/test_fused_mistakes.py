"""Wrong calls of the fused operator: each its error, on every rank that takes part."""

import dataclasses
import threading
from unittest import mock

import pytest
import torch

import epmoe
from cases import MISTAKE_LIMIT_S, check_outcomes, outcome
from fused_cases import Experts, StagedOp, check_numbers, same, soil, step, tensors
from test_plan_slots import make_op


BAD = 1  # the rank that makes a mistake
MISTAKEN = Experts(tokens="full", max_tokens=12, activation="swiglu", num_buffers=2)

# What rank BAD passes instead, in which of the two: (argument, change, exception, texts of the message).
WRONG = {
    "dispatch": [
        ("gemm_weight", lambda w: w.float(), "TypeError", ("gemm_weight", "bfloat16", "float32")),
        ("gemm_weight", lambda w: w.half(), "TypeError", ("gemm_weight", "bfloat16", "float16")),
        ("gemm_weight", lambda w: w[:1], "ValueError", ("gemm_weight", "[2, *, 64]", "[1, 96, 64]")),
        ("gemm_weight", lambda w: w[:, :, :32].contiguous(), "ValueError",
         ("gemm_weight", "[2, *, 64]", "[2, 96, 32]")),
        ("gemm_weight", lambda w: w[0], "ValueError", ("gemm_weight", "[96, 64]")),
        ("gemm_weight", lambda w: w.transpose(1, 2).contiguous().transpose(1, 2), "ValueError",
         ("gemm_weight", "contiguous")),
        ("gemm_weight", lambda w: w[:, :95].contiguous(), "ValueError", ("swiglu", "even", "95")),
        ("gemm_weight", lambda w: None, "TypeError", ("gemm_weight", "NoneType")),
        ("gemm_weight", lambda w: w.to("meta"), "ValueError", ("gemm_weight", "meta")),
        ("activation", lambda a: "relu", "ValueError", ("relu", "gpt_oss")),
        ("activation", lambda a: 2, "ValueError", ("2", "gpt_oss")),
        ("activation", lambda a: ["gelu"], "TypeError", ()),
        ("bias", lambda b: b[:, :-1].contiguous(), "ValueError", ("bias", "[2, 96]", "[2, 95]")),
        ("bias", lambda b: b.long(), "TypeError", ("bias", "int64")),
        ("bias", lambda b: 0.5, "TypeError", ("bias", "float")),
        ("input", lambda x: x.float(), "TypeError", ("input", "bfloat16", "float32")),
        ("input", lambda x: x[:, :32].contiguous(), "ValueError", ("input", "[*, 64]")),
        ("input", lambda x: torch.cat([x, x]), "ValueError", ("24", "12")),
        ("weight", lambda w: w[:, :1].contiguous(), "ValueError", ("weight", "[12, 3]")),
        ("exp_indices", lambda i: i.float(), "TypeError", ("exp_indices", "float32")),
        ("buffer", lambda b: 2, "ValueError", ("buffer 2",)),
    ],
    "cached": [
        ("gemm_weight", lambda w: w.float(), "TypeError", ("gemm_weight", "bfloat16", "float32")),
        ("gemm_weight", lambda w: w[:1], "ValueError", ("gemm_weight", "[2, *, 64]", "[1, 96, 64]")),
        ("activation", lambda a: "relu", "ValueError", ("relu", "gpt_oss")),
        ("input", lambda x: x.half(), "TypeError", ("input", "bfloat16", "float16")),
        ("input", lambda x: x[:3], "ValueError", ("input", "3")),
        ("input", lambda x: None, "TypeError", ("input", "NoneType")),
        ("weight", lambda w: w[:3], "ValueError", ("weight",)),
        ("layout", lambda s: "the last", "TypeError", ("layout", "EPLayout", "str")),
    ],
    "combine": [
        ("gemm_weight", lambda w: w.float(), "TypeError", ("gemm_weight", "bfloat16", "float32")),
        ("gemm_weight", lambda w: w[:1], "ValueError", ("gemm_weight", "[2, 64, *]", "[1, 64, 48]")),
        ("gemm_weight", lambda w: w[:, :48].contiguous(), "ValueError",
         ("gemm_weight", "[2, 64, *]", "[2, 48, 48]")),
        ("gemm_weight", lambda w: w[:, :, :32].contiguous(), "ValueError", ("gemm_input", "32", "48")),
        ("gemm_weight", lambda w: w.transpose(1, 2).contiguous().transpose(1, 2), "ValueError",
         ("gemm_weight", "contiguous")),
        ("gemm_weight", lambda w: None, "TypeError", ("gemm_weight", "NoneType")),
        ("gemm_input", lambda h: h.float(), "TypeError", ("gemm_input", "bfloat16", "float32")),
        ("gemm_input", lambda h: h[:-1], "ValueError", ("gemm_input",)),
        ("gemm_input", lambda h: h[:, :32].contiguous(), "ValueError", ("gemm_input", "32", "48")),
        ("gemm_input", lambda h: h.tolist(), "TypeError", ("gemm_input", "list")),
        ("weight", lambda w: w[:-1], "ValueError", ("weight",)),
        ("weight", lambda w: w.long(), "TypeError", ("weight", "int64")),
        ("bias", lambda b: b[:1], "ValueError", ("bias", "[2, 64]", "[1, 64]")),
        ("layout", lambda s: None, "TypeError", ("layout", "EPLayout", "NoneType")),
        ("layout", lambda s: s.layer._planned, "ValueError", ("only planned",)),
        ("layout", lambda s: s.layer._of_another, "ValueError", ("another layer",)),
    ],
}


def mistake(world, device, where, change, fused, capacity):
    """A wrong argument on rank BAD; what all get, whether they came back, and what the op does afterwards,
    for all to compare.
    """
    case = dataclasses.replace(MISTAKEN, capacity=capacity)
    op, other = (make_op(world, device, case, StagedOp, fused=fused) for _ in range(2))
    soil(op)
    t = tensors(case, world.rank, world.size, device)
    before = step(op, case, t)
    op._planned, op._of_another = op.preprocess(t.idx), other.preprocess(t.idx)
    name, to = change
    buffer = 0 if name in ("buffer",
                           # who means a buffer that is not there, or none, is heard in the first
                           "layout") else 1
    good = {"input": t.x, "exp_indices": t.idx, "gemm_weight": t.w1, "weight": t.weight, "bias": t.b1,
            "activation": case.activation, "buffer": buffer}
    h, row_weight, layout = op.mega_dispatch_group_gemm(**good)
    call = op.mega_dispatch_group_gemm
    if where == "cached":
        good |= {"layout": layout, "exp_indices": None}
    if where == "combine":
        call, good = op.mega_group_gemm_combine, {"gemm_input": h, "gemm_weight": t.w2, "layout": layout,
                                                  "weight": row_weight, "bias": t.b2}
    op.synchronize()
    world.set_timeout(MISTAKE_LIMIT_S)
    world.exchange(b"go")
    got = outcome(lambda: call(**(good | {name: to(good[name])} if world.rank == BAD else good)), op)
    alive = outcome(lambda: world.exchange(b"back"))
    after = None if alive.kinds else step(op, case, t)
    if after is not None:
        op.synchronize()
        op.finalize()
        other.finalize()
        same(after, before, f"rank {world.rank}, after {got}")
    return got, alive


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
@pytest.mark.parametrize("where, at", [(where, i) for where,
                                       mistakes in WRONG.items() for i in range(len(mistakes))],
                         ids=[f"{where}-{name}-{i}" for where, mistakes in WRONG.items() for i,
                              (name, *_) in enumerate(mistakes)])
def test_fused_mistakes(ranks, where, at, fused):
    """On one rank: its own reason there, PeerError on the others, and afterwards all is as it was."""
    name, change, kind, texts = WRONG[where][at]
    results = ranks(mistake, where, (name, change), fused, "roomy" if at % 2 else None, world_size=3,
                    at_least=2)
    outcomes = [got for got, _ in results]
    for rank, (got, alive) in enumerate(results):
        assert not alive.kinds, f"rank {rank}: {got}, and then {alive}"
    check_outcomes(outcomes, [kind if rank == BAD else "PeerError" for rank in range(len(outcomes))], *texts,
                   who=BAD, elsewhere=(f"rank {BAD}",))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_fused_bad_index_and_overflow(ranks, fused):
    """What all can see raises the same on all, and the op goes on."""
    case = dataclasses.replace(MISTAKEN, capacity="exact")

    def run(world, device):
        op = make_op(world, device, case, StagedOp, fused=fused)
        soil(op)
        t = tensors(case, world.rank, world.size, device)
        before = step(op, case, t)
        world.set_timeout(MISTAKE_LIMIT_S)
        wrong = t.idx.clone()
        if world.rank == BAD:
            wrong[5, 1] = 1000
        idx, got = t.idx, []
        for t.idx in (wrong, torch.zeros_like(idx)):
            got.append(outcome(lambda: step(op, case, t), op))
            world.exchange(b"back")
        t.idx = idx
        after = step(op, case, t)
        op.synchronize()
        op.finalize()
        same(after, before, f"rank {world.rank}")
        return got

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([r[0] for r in results], "EpIndexError", f"rank {BAD}",
                   "expert index 1000 of token 5, choice 1")
    check_outcomes([r[1] for r in results], "EpOverflow", "rank 0", str(36 * len(results)))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_fused_without_memory(ranks, fused):
    """A rank that has no room for what comes out says so, in either kernel; then all is as it was."""

    def run(world, device):
        op = make_op(world, device, MISTAKEN, StagedOp, fused=fused)
        t = tensors(MISTAKEN, world.rank, world.size, device)
        before = step(op, MISTAKEN, t)
        h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight,
                                                            bias=t.b1, activation="swiglu")
        world.set_timeout(MISTAKE_LIMIT_S)
        got = []
        for of, call in (((layout, "num_tokens"), lambda: op.mega_group_gemm_combine(h, t.w2, layout,
                                                                                     row_weight)),
                         ((op, "_recv_words"), lambda: op.mega_dispatch_group_gemm(t.x, layout=layout,
                                                                                   gemm_weight=t.w1,
                                                                                   weight=t.weight))):
            with mock.patch.object(*of, 1 << 55 if world.rank == BAD else getattr(*of)):
                got.append(outcome(call, op))
            world.exchange(b"back")
        after = step(op, MISTAKEN, t)
        op.synchronize()
        op.finalize()
        same(after, before, f"rank {world.rank}")
        return got

    results = ranks(run, world_size=3, at_least=2)
    for which in zip(*results):
        check_outcomes(which, ["RuntimeError" if rank == BAD else "PeerError" for rank in range(len(which))],
                       who=BAD, elsewhere=(f"rank {BAD}",))


# Where between two operations there is no memory: the function that wants it, in which of its calls, and how
# the op is made.
BETWEEN = {
    "product": (epmoe.fused, "grouped_gemm", 1, {"fused": False}),
    "second product": (epmoe.fused, "grouped_gemm", 2, {"fused": False}),
    "copies": (torch.Tensor, "repeat_interleave", 1, {"fused": False, "token_saving": False}),
    "activation": (epmoe.fused, "activate", 1, {"fused": True}),
    "backward of down": (epmoe.fused_ops, "expert_offsets", 1, {"fused": True}),
    "backward of gate and up": (epmoe.fused_ops, "expert_offsets", 2, {"fused": True}),
}


@pytest.mark.parametrize("where", BETWEEN)
def test_fused_without_memory_between_operations(ranks, monkeypatch, where):
    """What fails there on one rank the others hear of in their next one, and do not wait."""
    place, name, turn, options = BETWEEN[where]
    with_grad, calls, real = options["fused"], {}, getattr(place, name)

    def me():  # of ranks that are threads; a backward on GPUs has threads of its own
        return 0 if ranks.is_torchrun else threading.get_ident()

    def counted(*args, **rest):
        if me() in calls:
            calls[me()] += 1
            if calls[me()] == turn:
                raise torch.OutOfMemoryError("says the test")
        return real(*args, **rest)

    monkeypatch.setattr(place, name, counted)
    case = dataclasses.replace(MISTAKEN, bias=False, num_buffers=1)

    def run(world, device):
        op = make_op(world, device, case, StagedOp, **options)
        t = tensors(case, world.rank, world.size, device)

        def whole():
            for leaf in (t.x, t.w1, t.w2):
                leaf.requires_grad_(with_grad).grad = None
            y = step(op, case, t)["y"]
            if with_grad:
                y.backward(t.dy)
            return {"y": y.detach(), "x": t.x.grad, "w1": t.w1.grad, "w2": t.w2.grad}

        before = whole()
        op.synchronize()
        world.set_timeout(MISTAKE_LIMIT_S)
        world.exchange(b"go")
        if world.rank == BAD:
            calls[me()] = 0
        got = outcome(whole, op)
        calls.pop(me(), None)
        alive = outcome(lambda: world.exchange(b"back"))
        if not alive.kinds:
            same(whole(), before, f"rank {world.rank}, after {got}")
            op.synchronize()
            op.finalize()
        return got, alive

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([alive for _, alive in results], "nothing")
    check_outcomes([got for got, _ in results], ["OutOfMemoryError" if rank == BAD else "PeerError"
                                                 for rank in range(len(results))], who=BAD,
                   elsewhere=(f"rank {BAD}", "no memory"))


# With every choice a token of its own: what the user gave is what is told.
WRONG_BY_CHOICE = [
    ("exp_indices", lambda i: i[:, :2].contiguous(), ("exp_indices", "[*, 3]", "[12, 2]")),
    ("exp_indices", lambda i: i[:5].contiguous(), ("input has 12 tokens, but exp_indices has 5",)),
    ("exp_indices", lambda i: i[0], ("exp_indices", "[3]")),
    ("exp_indices", lambda i: i.repeat(100, 1), ("exp_indices", "1200")),
    ("weight", lambda w: w[:, :2].contiguous(), ("weight", "[12, 3]", "[12, 2]")),
    ("input", lambda x: torch.cat([x, x]), ("input has 24 tokens, but exp_indices has 12",)),
    ("full_scatter_indices", lambda s: torch.zeros(12, 2, dtype=torch.int32),
     ("full_scatter_indices", "[*, 3]", "[12, 2]")),
]


@pytest.mark.parametrize("which, at", [(which, i) for which in ("dispatch", "mega_dispatch_group_gemm",
                                                                "preprocess")
                                       for i, (name, _, texts) in enumerate(WRONG_BY_CHOICE)
                                       if which != "preprocess" or texts[0] == name != "weight"])
def test_fused_mistakes_without_token_saving(ranks, which, at):
    name, change, texts = WRONG_BY_CHOICE[at]

    def run(world, device):
        op = make_op(world, device, MISTAKEN, StagedOp, token_saving=False)
        t = tensors(MISTAKEN, world.rank, world.size, device)
        before = step(op, MISTAKEN, t)
        op.synchronize()
        world.set_timeout(MISTAKE_LIMIT_S)
        given = {"input": t.x, "exp_indices": t.idx, "weight": t.weight, "gemm_weight": t.w1,
                 "full_scatter_indices": None}
        wanted = {"preprocess": ("exp_indices", "full_scatter_indices"),
                  "dispatch": ("input", "exp_indices", "weight", "full_scatter_indices")}
        if world.rank == BAD:
            given[name] = change(given[name]).to(device)
        got = outcome(lambda: getattr(op, which)(**{n: given[n] for n in wanted.get(which, given)}), op)
        world.exchange(b"back")
        same(step(op, MISTAKEN, t), before, f"rank {world.rank}, after {got}")
        op.synchronize()
        op.finalize()
        return got

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes(results, ["ValueError" if rank == BAD else "PeerError" for rank in range(len(results))],
                   *texts, who=BAD, elsewhere=(f"rank {BAD}",))


@pytest.mark.parametrize("order", ["fuse", "", None])
def test_fused_unknown_combine_order(ranks, order):
    """On all ranks alike."""

    def run(world, device):
        return outcome(lambda: make_op(world, device, MISTAKEN, combine_order=order))

    check_outcomes(ranks(run, world_size=2), "ValueError", repr(order), "fuse_scatter or serial")


WRONG_OPTIONS = {
    "combine_order": ({"combine_order": "fuse"}, "fuse_scatter or serial"),
    "combine_mode": ({"combine_mode": "pull"}, "scatter or gather"),
    "num_sm": ({"num_sm": 0}, "num_sm 0"),
    "num_tail_sms-text": ({"num_tail_sms": "some"}, "some"),
    "num_tail_sms-negative": ({"num_tail_sms": -1}, "num_tail_sms -1"),
    "num_tail_sms-all": ({"num_sm": 4, "num_tail_sms": 4}, "num_tail_sms 4"),
    "num_tail_sms-more": ({"num_sm": 4, "num_tail_sms": 9}, "num_tail_sms 9"),
    "num_tail_sms-more-than-there-are": ({"num_tail_sms": 5000}, "num_tail_sms 5000"),
    "num_reduce_sms-text": ({"num_reduce_sms": "all"}, "all"),
    "num_reduce_sms-none": ({"num_reduce_sms": 0}, "num_reduce_sms 0"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_fused_wrong_option_on_one_rank(ranks, name):
    """What this rank cannot be made with, the others hear of while they make theirs; so also where no block
    would be left that
    sends, or that adds up.  Then all make one that works."""
    options, text = WRONG_OPTIONS[name]

    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: make_op(world, device, MISTAKEN, **(options if world.rank == BAD else {})))
        alive = outcome(lambda: world.exchange(b"back"))
        if alive.kinds:
            return got, alive, None
        op = make_op(world, device, MISTAKEN)
        seen = step(op, MISTAKEN, tensors(MISTAKEN, world.rank, world.size, device))
        op.synchronize()
        op.finalize()
        return got, alive, seen

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([got for got, _, _ in results], ["ValueError" if rank == BAD else "PeerError"
                                                    for rank in range(len(results))], text, who=BAD)
    check_outcomes([alive for _, alive, _ in results], "nothing")
    check_numbers([seen for _, _, seen in results], MISTAKEN)
