"""Wrong calls of the fused operator: every rank raises the right error, and the operator works afterwards."""

import dataclasses
import threading
from unittest import mock

import pytest
import torch

import epmoe
import fused_fp8_cases
from cases import MISTAKE_LIMIT_S, check_outcomes, make_op, outcome
from fused_cases import (Experts, LatePlan, StagedOp, check_numbers, dispatch_gemm, poison_staging, same,
                         step, tensors, without_conversion)
from gemm_cases import bits

BAD = 1  # the rank that makes the wrong call
CASE = Experts(tokens="full", max_tokens=12, activation="swiglu", num_buffers=2)


def expected(results, kind):
    """The exception of each rank: `kind` on rank BAD, PeerError on the others."""
    return [kind if rank == BAD else "PeerError" for rank in range(len(results))]


# Wrong arguments of rank BAD, for each call: (argument, change, exception, texts of the message).
# "cached" is a dispatch with an existing layout.
WRONG = {
    "dispatch": [
        ("gemm_weight", lambda w: w.float(), "TypeError", ("gemm_weight", "bfloat16", "float32")),
        ("gemm_weight", lambda w: w.half(), "TypeError", ("gemm_weight", "bfloat16", "float16")),
        ("gemm_weight", lambda w: w[:1], "ValueError", ("gemm_weight", "[2, *, 64]", "[1, 96, 64]")),
        ("gemm_weight", lambda w: w[:, :, :32].contiguous(), "ValueError",
         ("gemm_weight", "[2, *, 64]", "[2, 96, 32]")),
        ("gemm_weight", lambda w: w[0], "ValueError", ("gemm_weight", "[96, 64]")),
        ("gemm_weight", lambda w: torch.stack([w, w], -1)[..., 0], "ValueError",
         ("gemm_weight", "contiguous")),
        ("gemm_weight", lambda w: w[:, :95].contiguous(), "ValueError", ("swiglu", "even", "95")),
        ("gemm_weight", lambda w: None, "TypeError", ("gemm_weight", "NoneType")),
        ("gemm_weight", lambda w: w.to("meta"), "ValueError", ("gemm_weight", "meta")),
        ("activation", lambda a: "relu", "ValueError", ("relu", "gpt_oss")),
        ("activation", lambda a: 2, "ValueError", ("2", "gpt_oss")),
        ("activation", lambda a: ["gelu"], "ValueError", ("gelu", "gpt_oss")),
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
        ("gemm_weight", lambda w: torch.stack([w, w], -1)[..., 0], "ValueError",
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


def run_wrong_argument(world, device, where, argument, change, fused, capacity):
    """Rank BAD makes a call with a wrong argument; the other ranks make the right call.

    Returns the outcome of the call and of the next exchange. If the exchange succeeds, the op must give the
    same results as before.
    """
    case = dataclasses.replace(CASE, capacity=capacity)
    op, other = (make_op(world, device, case, StagedOp, fused=fused) for _ in range(2))
    poison_staging(op)
    t = tensors(case, world.rank, world.size, device)
    before = step(op, case, t)
    op._planned, op._of_another = op.preprocess(t.idx), other.preprocess(t.idx)
    # a rank with a wrong buffer, or without a layout, reports its error through buffer 0
    buffer = 0 if argument in ("buffer", "layout") else 1
    good = {"input": t.x, "exp_indices": t.idx, "gemm_weight": t.w1, "weight": t.weight, "bias": t.b1,
            "activation": case.activation, "buffer": buffer}
    h, row_weight, layout = op.mega_dispatch_group_gemm(**good)
    call = op.mega_dispatch_group_gemm
    if where == "cached":
        good |= {"layout": layout, "exp_indices": None}
    if where == "combine":
        call = op.mega_group_gemm_combine
        good = {"gemm_input": h, "gemm_weight": t.w2, "layout": layout, "weight": row_weight, "bias": t.b2}
    op.synchronize()
    world.set_timeout(MISTAKE_LIMIT_S)
    world.exchange(b"go")
    arguments = good | {argument: change(good[argument])} if world.rank == BAD else good
    got = outcome(lambda: call(**arguments), op)
    alive = outcome(lambda: world.exchange(b"back"))
    after = None if alive.kinds else step(op, case, t)
    if after is not None:
        op.synchronize()
        op.finalize()
        other.finalize()
        same(after, before, f"rank {world.rank}, after {got}")
    return got, alive


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
@pytest.mark.parametrize("where, at", [(where, i) for where, rows in WRONG.items() for i in range(len(rows))],
                         ids=[f"{where}-{argument}-{i}" for where, rows in WRONG.items()
                              for i, (argument, *_) in enumerate(rows)])
def test_fused_wrong_argument_on_one_rank(ranks, where, at, fused):
    """That rank raises its own error, the others raise PeerError, and the op works as before."""
    argument, change, kind, texts = WRONG[where][at]
    results = ranks(run_wrong_argument, where, argument, change, fused, "roomy" if at % 2 else None,
                    world_size=3, at_least=2)
    for rank, (got, alive) in enumerate(results):
        assert not alive.kinds, f"rank {rank}: {got}, then the exchange failed: {alive}"
    check_outcomes([got for got, _ in results], expected(results, kind), *texts, on_rank=BAD,
                   elsewhere=(f"rank {BAD}",))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_fused_bad_index_and_overflow(ranks, fused):
    """All ranks detect these errors: all raise the same exception, and the op works afterwards."""
    case = dataclasses.replace(CASE, capacity="exact")

    def run(world, device):
        op = make_op(world, device, case, StagedOp, fused=fused)
        poison_staging(op)
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
    """Rank BAD cannot allocate the output, in either kernel. It reports that, and the op works afterwards."""

    def run(world, device):
        op = make_op(world, device, CASE, StagedOp, fused=fused)
        t = tensors(CASE, world.rank, world.size, device)
        before = step(op, CASE, t)
        h, row_weight, layout = dispatch_gemm(op, CASE, t)

        def combine():
            return op.mega_group_gemm_combine(h, t.w2, layout, row_weight)

        def dispatch():
            return op.mega_dispatch_group_gemm(t.x, layout=layout, gemm_weight=t.w1, weight=t.weight)

        world.set_timeout(MISTAKE_LIMIT_S)
        got = []
        for size_of_output, call in (((layout, "num_tokens"), combine), ((op, "_recv_words"), dispatch)):
            size = 1 << 55 if world.rank == BAD else getattr(*size_of_output)
            with mock.patch.object(*size_of_output, size):
                got.append(outcome(call, op))
            world.exchange(b"back")
        after = step(op, CASE, t)
        op.synchronize()
        op.finalize()
        same(after, before, f"rank {world.rank}")
        return got

    results = ranks(run, world_size=3, at_least=2)
    for outcomes in zip(*results):
        check_outcomes(outcomes, expected(outcomes, "RuntimeError"), on_rank=BAD, elsewhere=(f"rank {BAD}",))


# Allocations between two operations: (module or class, function that allocates, which of its calls fails,
# options of the op).
BETWEEN = {
    "product": (epmoe.a2a.fused, "grouped_gemm", 1, {"fused": False}),
    "second product": (epmoe.a2a.fused, "grouped_gemm", 2, {"fused": False}),
    "copies": (torch.Tensor, "repeat_interleave", 1, {"fused": False, "token_saving": False}),
    "activation": (epmoe.a2a.fused, "activate", 1, {"fused": True}),
    "backward of down": (epmoe.a2a.ops, "expert_offsets", 1, {"fused": True}),
    "backward of gate and up": (epmoe.a2a.ops, "expert_offsets", 2, {"fused": True}),
}


@pytest.mark.parametrize("where", BETWEEN)
def test_fused_without_memory_between_operations(ranks, monkeypatch, where):
    """Rank BAD fails between two operations. The other ranks raise PeerError in their next one, at once."""
    place, name, failing_call, options = BETWEEN[where]
    with_grad, calls, real = options["fused"], {}, getattr(place, name)

    def this_rank():
        # Under torchrun each rank is a process, where backward runs in another thread. Else it is a thread.
        return 0 if ranks.is_torchrun else threading.get_ident()

    def counted(*args, **rest):
        if this_rank() in calls:
            calls[this_rank()] += 1
            if calls[this_rank()] == failing_call:
                raise torch.OutOfMemoryError("raised by the test")
        return real(*args, **rest)

    monkeypatch.setattr(place, name, counted)
    case = dataclasses.replace(CASE, bias=False, num_buffers=1)

    def run(world, device):
        op = make_op(world, device, case, StagedOp, **options)
        t = tensors(case, world.rank, world.size, device)

        def run_step():
            for leaf in (t.x, t.w1, t.w2):
                leaf.requires_grad_(with_grad).grad = None
            y = step(op, case, t)["y"]
            if with_grad:
                y.backward(t.dy)
            return {"y": y.detach(), "x": t.x.grad, "w1": t.w1.grad, "w2": t.w2.grad}

        before = run_step()
        op.synchronize()
        world.set_timeout(MISTAKE_LIMIT_S)
        world.exchange(b"go")
        if world.rank == BAD:
            calls[this_rank()] = 0
        got = outcome(run_step, op)
        calls.pop(this_rank(), None)
        alive = outcome(lambda: world.exchange(b"back"))
        if not alive.kinds:
            same(run_step(), before, f"rank {world.rank}, after {got}")
            op.synchronize()
            op.finalize()
        return got, alive

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([alive for _, alive in results], "nothing")
    check_outcomes([got for got, _ in results], expected(results, "OutOfMemoryError"), on_rank=BAD,
                   elsewhere=(f"rank {BAD}", "no memory"))


class LateOp(LatePlan, fused_fp8_cases.StagedOp):
    pass


@pytest.mark.parametrize("fp8", [False, True])
def test_fused_without_memory_after_a_wrong_index(ranks, fp8):
    """Rank BAD has a wrong index, and rank 0 no memory for the dispatch after this plan.

    Rank 0 must not report that, because no other rank calls the dispatch.
    """

    def run(world, device):
        op = make_op(world, device, CASE, LateOp)
        t = tensors(CASE, world.rank, world.size, device)
        before = fused_fp8_cases.call(op, CASE, t)[-1]
        product = fused_fp8_cases.product_of(t) if fp8 else {"gemm_weight": t.w1}
        bias = without_conversion(t.b1) if world.rank == 0 else t.b1.double()
        idx = t.idx.clone()
        if world.rank == BAD:
            idx[2, 0] = 1000
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: op.mega_dispatch_group_gemm(t.x, idx, bias=bias, **product), op)
        return got, torch.equal(bits(fused_fp8_cases.call(op, CASE, t)[-1]), bits(before))

    with torch.no_grad():
        results = ranks(run, at_least=2)
    check_outcomes([r[0] for r in results], "EpIndexError", f"rank {BAD}", "1000")
    assert all(is_right for _, is_right in results)


# With token_saving=False epmoe makes a token of each choice. The error must name the argument and the sizes
# that the user passed.
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


@pytest.mark.parametrize("method, at", [
    (method, i) for method in ("dispatch", "mega_dispatch_group_gemm", "preprocess")
    for i, (argument, _, texts) in enumerate(WRONG_BY_CHOICE)
    if method != "preprocess" or texts[0] == argument != "weight"
])
def test_fused_wrong_argument_without_token_saving(ranks, method, at):
    argument, change, texts = WRONG_BY_CHOICE[at]

    def run(world, device):
        op = make_op(world, device, CASE, StagedOp, token_saving=False)
        t = tensors(CASE, world.rank, world.size, device)
        before = step(op, CASE, t)
        op.synchronize()
        world.set_timeout(MISTAKE_LIMIT_S)
        values = {"input": t.x, "exp_indices": t.idx, "weight": t.weight, "gemm_weight": t.w1,
                  "full_scatter_indices": None}
        parameters = {"preprocess": ("exp_indices", "full_scatter_indices"),
                      "dispatch": ("input", "exp_indices", "weight", "full_scatter_indices")}
        if world.rank == BAD:
            values[argument] = change(values[argument]).to(device)
        arguments = {name: values[name] for name in parameters.get(method, values)}
        got = outcome(lambda: getattr(op, method)(**arguments), op)
        world.exchange(b"back")
        same(step(op, CASE, t), before, f"rank {world.rank}, after {got}")
        op.synchronize()
        op.finalize()
        return got

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes(results, expected(results, "ValueError"), *texts, on_rank=BAD, elsewhere=(f"rank {BAD}",))


@pytest.mark.parametrize("order", ["fuse", "", None])
def test_fused_unknown_combine_order(ranks, order):
    """All ranks pass the same unknown value."""

    def run(world, device):
        return outcome(lambda: make_op(world, device, CASE, combine_order=order))

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
    """Rank BAD raises ValueError when it creates the op, and the other ranks raise PeerError.

    Some of the options would leave no CTA that sends, or no CTA that reduces. Afterwards all ranks create an
    op that works.
    """
    options, text = WRONG_OPTIONS[name]

    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: make_op(world, device, CASE, **(options if world.rank == BAD else {})))
        alive = outcome(lambda: world.exchange(b"back"))
        if alive.kinds:
            return got, alive, None
        op = make_op(world, device, CASE)
        seen = step(op, CASE, tensors(CASE, world.rank, world.size, device))
        op.synchronize()
        op.finalize()
        return got, alive, seen

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([got for got, _, _ in results], expected(results, "ValueError"), text, on_rank=BAD)
    check_outcomes([alive for _, alive, _ in results], "nothing")
    check_numbers([seen for _, _, seen in results], CASE)
