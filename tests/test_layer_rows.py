"""Calls without a capacity or a layout, where only the plan knows the number of rows.

Before it is known, a call makes outputs with room for as many rows as earlier calls had and some more.
"""

import dataclasses
import types
import weakref

import pytest
import torch

import epmoe
import fused_cases
import fused_fp8_cases
from cases import MISTAKE_LIMIT_S, check_outcomes, make_op, outcome
from epmoe import _C
from fused_cases import Experts, LatePlan, grown, tensors
from gemm_cases import bits

BAD = 1  # the rank that makes a mistake
TOO_MANY = 1 << 50  # no memory holds so many rows
CASE = Experts(hidden=272, inner=64, tokens="full", max_tokens=12)


def room_of(op, num_tokens, kept_for=None):
    """For how many rows the next call makes room. kept_for: 0 if a backward of a dispatch needs them."""
    return _C.layer_room(op._c, num_tokens, kept_for)


def set_room(op, num_tokens, num_rows, kept_for=None):
    _C.layer_set_room(op._c, num_tokens, kept_for, num_rows)


def kept_room(op, num_rows):
    """The room after a call of a training step with so many rows, if it was smaller or much larger before."""
    return min(num_rows + num_rows // 32, max(num_rows, op._config.capacity))


class Op(LatePlan, fused_cases.StagedOp):
    pass


class OpInFp8(LatePlan, fused_fp8_cases.StagedOp):
    pass


def run_call(op, t, method, of_tokens=slice(None), **options):
    """Dispatch some of the tokens. Returns the layout and all outputs."""
    x, weight = t.x[of_tokens], t.weight[of_tokens]
    idx = None if "layout" in options else t.idx[of_tokens]
    if method == "dispatch":
        rows, row_weight, layout = op.dispatch(x, idx, weight, **options)
        return layout, rows, row_weight
    if method == "dispatch_fp8":
        rows, scales, row_weight, layout = op.dispatch_fp8(x, idx, weight, **options)
        return layout, rows, row_weight, scales
    product = fused_fp8_cases.product_of(t) if method == "fused FP8" else {"gemm_weight": t.w1}
    rows, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, weight=weight, **product, **options)
    return layout, rows, row_weight


METHODS = pytest.mark.parametrize("method", ["dispatch", "dispatch_fp8", "fused", "fused FP8"])


def make(ranks, world, device, method):
    case = grown(ranks, CASE)
    op = make_op(world, device, case, OpInFp8 if method == "fused FP8" else Op)
    return op, tensors(case, world.rank, world.size, device)


@METHODS
def test_layer_rows_are_those_of_the_plan(ranks, method):
    """The outputs are the same as those of a dispatch that knows the number from its layout."""

    def run(world, device):
        op, t = make(ranks, world, device, method)
        full, checks = len(t.x), []
        # the number of tokens, and how many rows the room lacks for all of them (None: leave it as it is)
        steps = [(full, None), (full, None), (full // 4, None), (0, None), (full // 2, None), (full, 0),
                 (full, 1), (1, None), (full, None)]
        for num_tokens, missing in steps:
            of_tokens = slice(num_tokens)
            if missing is not None:
                set_room(op, full, max(op.preprocess(t.idx).num_rows - missing, 0))
            room = room_of(op, num_tokens)
            layout, *got = run_call(op, t, method, of_tokens)
            again = op.preprocess(t.idx[of_tokens])
            _, *want = run_call(op, t, method, of_tokens, layout=again)
            checks += [torch.equal(bits(a), bits(b)) for a, b in zip(got, want)]
            checks += [len(a) == layout.num_rows == again.num_rows for a in got]
            checks += [got[0].is_contiguous(), room_of(op, num_tokens) >= layout.num_rows]
            # The rows are the beginning of the room, if there was enough. On the CPU a stage follows where
            # else the kernel is fused.
            if "fused" not in method or device.type == "cuda":
                made = room if layout.num_rows <= room else layout.num_rows
                checks.append(got[0].untyped_storage().nbytes() == made * got[0].shape[1] * got[0].itemsize)
        op.synchronize()
        op.finalize()
        return checks

    with torch.no_grad():
        assert all(map(all, ranks(run)))


def test_layer_rows_that_are_kept_for_a_backward_have_little_room(ranks):
    """The room of one call serves the next, but not where more than an eighth of it would be empty."""

    def run(world, device):
        op, t = make(ranks, world, device, "dispatch")
        t.x.requires_grad_()
        checks = []
        num_rows = op.preprocess(t.idx).num_rows
        least_too_large = next(n for n in range(num_rows, 3 * num_rows) if n - num_rows >= 1 + n // 8)
        # the room before a call, and whether the call uses it
        for room, is_used in ((0, False), (None, True), (num_rows - 1, False), (num_rows, True),
                              (least_too_large - 1, True), (least_too_large, False), (None, True)):
            room = room_of(op, len(t.x), 0) if room is None else room
            set_room(op, len(t.x), room, 0)
            layout, rows, _ = run_call(op, t, "dispatch")
            rows.sum().backward()
            made = rows.untyped_storage().nbytes() // rows.itemsize // CASE.hidden
            checks += [len(rows) == num_rows, made == (room if is_used else num_rows)]
            checks += [num_rows <= room_of(op, len(t.x), 0) <= max(room, kept_room(op, num_rows))]
        checks.append(room_of(op, len(t.x), 0) == kept_room(op, num_rows))
        op.synchronize()
        op.finalize()
        return checks

    assert all(map(all, ranks(run)))


@pytest.mark.parametrize("fused", [True, False])
def test_layer_rows_of_modules_with_one_layer_have_rooms_of_their_own(ranks, fused):
    """Two modules that train share a layer, and one receives fewer rows. Each has the room that it needs.

    The first step of a module has none, and the others have the bits of the first.
    """

    def run(world, device):
        case = grown(ranks, dataclasses.replace(CASE, max_tokens=60))
        op, t = make_op(world, device, case, Op, fused=fused), tensors(case, world.rank, world.size, device)
        op._unread_rows = 0  # as if the rows were too many to make room for all that can come
        moes = [epmoe.EPMoE(case.hidden, case.inner, op.num_experts, case.topk, layer=op, dtype=case.dtype,
                            device=device) for _ in range(2)]
        tokens = slice(len(t.x)), slice(len(t.x) - len(t.x) // 4)  # their lengths have one power of two
        steps = []
        for _ in range(3):
            for moe, some in zip(moes, tokens, strict=True):
                moe.zero_grad()
                x = t.x[some].clone().requires_grad_()
                y = moe(x, t.idx[some], t.weight[some])
                y.sum().backward()
                steps.append([y, x.grad, *(p.grad.clone() for p in moe.parameters())])
        same = [torch.equal(a, b) for of in (steps[2:4], steps[4:])
                for first, got in zip(steps[:2], of, strict=True) for a, b in zip(first, got, strict=True)]
        num_rows = [moe.last_layout.num_rows for moe in moes]
        rooms = [room_of(op, len(t.x), moe.gate_up_proj.data_ptr()) for moe in moes]
        one_power = len({len(t.x[some]).bit_length() for some in tokens}) == 1
        op.synchronize()
        op.finalize()
        return *same, one_power, num_rows[1] < num_rows[0], rooms == [kept_room(op, n) for n in num_rows]

    assert all(map(all, ranks(run)))


def test_layer_rows_outputs_that_do_not_fit_are_freed_first(ranks):
    """A step of a module that gets fewer rows than before takes no more memory than the step before."""

    def run(world, device):
        case = grown(ranks, dataclasses.replace(CASE, max_tokens=60))
        op, t = make_op(world, device, case, Op), tensors(case, world.rank, world.size, device)
        op._unread_rows = 0
        moe = epmoe.EPMoE(case.hidden, case.inner, op.num_experts, case.topk, layer=op, dtype=case.dtype,
                          device=device)
        live, allocator = [0, 0], op._allocator  # bytes, and the most of them

        def count(num_bytes):
            live[0] += num_bytes
            live[1] = max(live)

        def counting():
            def empty(*args, allocate=allocator()):
                made = allocate(*args)
                num_bytes = made.untyped_storage().nbytes()
                count(num_bytes)
                weakref.finalize(made, count, -num_bytes)
                return made
            return empty

        op._allocator, most = counting, []
        x = t.x.clone().requires_grad_()
        fewer = t.idx.clone()
        fewer[len(fewer) // 2:] = -1
        for idx in (t.idx, t.idx, fewer):
            live[:] = 0, 0
            moe(x, idx, t.weight)
            most.append(live[1])
        op.synchronize()
        op.finalize()
        return most

    for first, fitting, fewer in ranks(run):
        assert first <= fitting  # the first step has no room
        assert fewer <= fitting


@METHODS
def test_layer_rows_without_memory_for_the_room(ranks, method):
    """A rank whose memory does not hold the room makes outputs as large as they must be. It tries once."""

    def run(world, device):
        op, t = make(ranks, world, device, method)
        before = run_call(op, t, method)[1:]
        empty, tried = op._empty, []
        op._empty = lambda *sizes, **options: tried.append(sizes[0]) or empty(*sizes, **options)
        if world.rank == BAD:
            set_room(op, len(t.x), TOO_MANY)
        after = [run_call(op, t, method)[1:] for _ in range(2)]
        op.synchronize()
        op.finalize()
        same = [torch.equal(bits(a), bits(b)) for got in after for a, b in zip(before, got)]
        return *same, tried.count(TOO_MANY) == (world.rank == BAD)

    with torch.no_grad():
        assert all(map(all, ranks(run, at_least=2)))


def misaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("method, name, change, text", [
    ("dispatch", "x", misaligned, "16"),
    *[(method, "weight", torch._neg_view, "negated") for method in METHODS.args[1]],
])
def test_layer_rows_mistakes_that_the_module_finds(ranks, method, name, change, text):
    """Rank BAD passes a tensor that is refused after the plan has been made."""

    def run(world, device):
        op, t = make(ranks, world, device, method)
        before = run_call(op, t, method)[1:]
        world.set_timeout(MISTAKE_LIMIT_S)
        arguments = vars(t) | ({name: change(getattr(t, name))} if world.rank == BAD else {})
        got = [outcome(lambda: run_call(op, types.SimpleNamespace(**arguments), method), op)]
        # and with a wrong index at the same time: then no rank enters the dispatch
        bad_idx = t.idx.clone()
        if world.rank == 0:
            bad_idx[3, 0] = 1000
        arguments["idx"] = bad_idx
        got.append(outcome(lambda: run_call(op, types.SimpleNamespace(**arguments), method), op))
        after = run_call(op, t, method)[1:]
        op.synchronize()
        op.finalize()
        return got, [torch.equal(bits(a), bits(b)) for a, b in zip(before, after)]

    with torch.no_grad():
        results = ranks(run, at_least=2)
    wanted = ["ValueError" if rank == BAD else "PeerError" for rank in range(len(results))]
    check_outcomes([got[0] for got, _ in results], wanted, text, on_rank=BAD,
                   elsewhere=(f"rank {BAD}",))
    check_outcomes([got[1] for got, _ in results], "EpIndexError", "rank 0", "1000")
    assert all(map(all, (same for _, same in results)))


@pytest.mark.parametrize("change, kind", [(lambda plan: plan.long(), "TypeError"),
                                          (lambda plan: plan[:8].clone(), "ValueError"),
                                          (lambda plan: plan[None], "ValueError")],
                         ids=("dtype", "short", "dims"))
def test_layer_rows_of_what_is_no_plan(ranks, change, kind):
    """The other ranks learn of it at once, also where the host has not read the rows of the plan."""

    def run(world, device):
        layer = epmoe.EPAll2AllLayer(world, 4, 16, 1, num_tot_experts=world.size, device=device)
        layout = layer.preprocess(torch.zeros(4, 1, dtype=torch.int64, device=device))
        layout._num_rows = None
        if world.rank == BAD:
            layout.plan = change(layout.plan)
        world.set_timeout(MISTAKE_LIMIT_S)
        x = torch.ones(4, 16, dtype=torch.bfloat16, device=device)
        got = outcome(lambda: layer.dispatch(x, layout=layout), layer)
        layer.finalize()
        return got

    got = ranks(run, at_least=2)
    check_outcomes(got, [kind if rank == BAD else "PeerError" for rank in range(len(got))],
                   on_rank=BAD, elsewhere=(f"rank {BAD}",))
