"""dispatch_fp8 against dispatch and quantize_fp8: the same rows in the same places, bit by bit."""

import dataclasses

import pytest
import torch

import epmoe
from cases import (MISTAKE_LIMIT_S, Case, case_id, check_outcomes, generator, indices_of, inputs_of, keep,
                   make_layer, outcome)
from gemm_cases import bits
from layer_cases import BAD, check, mistake

CASES = [
    Case(hidden=640, max_tokens=21, topk=3), Case(hidden=16, tokens="unequal", mode="gather", weights=False),
    Case(hidden=272, num_local=3, mode="local", pattern="one_rank", dtype=torch.float16, num_sm=3),
    Case(hidden=256, capacity="roomy", tokens="first_none", dtype=torch.float32, weights=False),
    Case(hidden=4240, capacity="exact", pattern="sentinels"), Case(hidden=256, tokens="none"),
    Case(hidden=256, expert_alignment=16, pattern="duplicates", mode="local"),
    Case(hidden=144, expert_capacity=200, tokens="first_none"), Case(hidden=400, num_buffers=2)]


def both(world, device, case, **options):
    """Dispatch in both ways, and combine the rows of the first with both layouts."""
    layer = make_layer(world, device, case, **options)
    x, weight = inputs_of(case, world.rank, world.size)  # random bits: also infinities and NaN
    x, idx = x.to(device), indices_of(case, world.rank, world.size).to(device)
    weight = weight.to(device) if case.weights else None
    buffer = case.num_buffers - 1
    plain, plain_weight, layout = layer.dispatch(x, idx, weight, buffer=buffer)
    want, want_scales = epmoe.quantize_fp8(plain)
    rows, scales, row_weight, again = layer.dispatch_fp8(x, idx, weight, buffer=buffer)
    first = layer.combine(plain, layout, plain_weight)
    same = [torch.equal(bits(layer.combine(plain, again, row_weight)), bits(first))]  # some are NaN
    repeated = layer.dispatch_fp8(x, weight=weight, layout=layout)
    is_zero = (plain == 0).all(1)  # also rows of no token
    same += [torch.equal(bits(rows), bits(want)), torch.equal(bits(repeated[0]), bits(rows)),
             torch.equal(scales[~is_zero], want_scales[~is_zero]), not scales[is_zero].any(),
             torch.equal(repeated[1], scales), repeated[3] is layout, scales.shape == want_scales.shape,
             scales.is_contiguous(), rows.dtype == torch.float8_e4m3fn]
    same += [row_weight is plain_weight or torch.equal(bits(row_weight), bits(plain_weight))]
    layer.synchronize()
    layer.finalize()
    return same


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_dispatch_fp8_equals_dispatch_of_quantised_rows(ranks, case, size):
    results = ranks(both, case, world_size=size)
    assert all(map(all, results)), results


def test_dispatch_fp8_of_the_fused_layer(ranks):
    """Also where each choice is a token of its own."""

    def run(world, device):
        found = []
        for options in ({}, {"token_saving": False}, {"token_saving": False, "capacity": 200}):
            layer = epmoe.EpAll2AllFusedOp(world, 9, 256, 3, num_tot_experts=2 * world.size, device=device,
                                           **options)
            keep(world, layer)
            case = Case(hidden=256, topk=3, max_tokens=9)
            x, weight = (t.to(device) for t in inputs_of(case, world.rank, world.size))
            idx = indices_of(case, world.rank, world.size).to(device)
            plain, _, layout = layer.dispatch(x, idx, weight)
            rows, scales, row_weight, again = layer.dispatch_fp8(x, idx, weight)
            want, want_scales = epmoe.quantize_fp8(plain)
            n = layout.num_rows
            found += [torch.equal(bits(rows), bits(want)), torch.equal(scales[:n], want_scales[:n]),
                      torch.equal(*(bits(layer.combine(plain, each)) for each in (again, layout)))]
            layer.finalize()
        return found

    assert all(map(all, ranks(run)))


def test_dispatch_fp8_feeds_grouped_gemm(ranks):
    def run(world, device):
        case = Case(hidden=256, tokens="first_none")
        layer = make_layer(world, device, case)
        idx, g = indices_of(case, world.rank, world.size), generator(world.rank)
        x = torch.randn(len(idx), 256, generator=g).bfloat16()
        rows, scales, _, layout = layer.dispatch_fp8(x.to(device), idx.to(device))
        weight = (torch.randn(2, 128, 256, generator=g) / 16).to(device)
        weight, b_scale = epmoe.quantize_fp8_weight(weight)
        y = epmoe.grouped_gemm(rows, weight, offsets=layout.expert_offsets, a_scale=scales, b_scale=b_scale)
        wide = (rows.float() * scales.repeat_interleave(128, 1)).to(torch.bfloat16)
        unscaled = (weight.float() * b_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)).bfloat16()
        want = epmoe.grouped_gemm(wide, unscaled, offsets=layout.expert_offsets)
        layer.finalize()
        return ((y - want).float().norm() <= 0.02 * want.float().norm()).item()

    assert all(ranks(run))


# ---- mistakes ----

@pytest.mark.parametrize("change, error, text", [
    (lambda a: a | {"input": a["input"].clone().requires_grad_()}, "RuntimeError", "no gradients"),
    (lambda a: a | {"weight": a["weight"].clone().requires_grad_()}, "RuntimeError", "torch.no_grad()"),
    (lambda a: a | {"input": a["input"].double()}, "TypeError", "bfloat16"),
    (lambda a: a | {"input": a["input"].to(torch.float8_e4m3fn)}, "TypeError", "bfloat16"),
    (lambda a: a | {"input": a["input"][:, :8]}, "ValueError", "16"),
    (lambda a: a | {"input": "x"}, "TypeError", "str"),
    (lambda a: a | {"exp_indices": None}, "TypeError", "exp_indices")])
def test_dispatch_fp8_mistakes_on_one_rank(ranks, change, error, text):
    def call(layer, arguments, is_bad, _):
        return layer.dispatch_fp8(**(change(arguments) if is_bad else arguments))

    check(ranks(lambda world, device: mistake(world, device, call), at_least=2), error, (text,), "PeerError",
          (f"rank {BAD}",))


def test_dispatch_fp8_layout_mistakes_on_one_rank(ranks):
    """With a layout, the peers learn it in the dispatch."""

    def call(layer, arguments, is_bad, layout):
        x = arguments["input"]
        return layer.dispatch_fp8(x.clone().requires_grad_() if is_bad else x, layout=layout)

    def prepare(layer, arguments):
        return layer.preprocess(arguments["exp_indices"])

    results = ranks(lambda world, device: mistake(world, device, call, prepare=prepare), at_least=2)
    check(results, "RuntimeError", ("no gradients",), "PeerError", (f"rank {BAD}", "dispatch in FP8"))


def test_dispatch_fp8_on_one_rank_only(ranks):
    def run(world, device):
        case = Case()
        layer = make_layer(world, device, case)
        x, _ = inputs_of(case, world.rank, world.size)
        idx = indices_of(case, world.rank, world.size).to(device)
        world.set_timeout(MISTAKE_LIMIT_S)
        call = layer.dispatch_fp8 if world.rank == BAD else layer.dispatch
        got = outcome(lambda: call(x.to(device), idx), layer)
        rows = layer.dispatch_fp8(x.to(device), idx)[0]
        return got, rows.dtype == torch.float8_e4m3fn

    results = ranks(run, at_least=2)
    check_outcomes([r[0] for r in results], "EpMismatch", "dispatch in FP8", f"rank {BAD}")
    assert all(r[1] for r in results)


def test_dispatch_fp8_wants_rows_of_16_bytes(ranks):
    case = dataclasses.replace(Case(), hidden=24)

    def run(world, device):
        layer = make_layer(world, device, case)
        x, _ = inputs_of(case, world.rank, world.size)
        idx = indices_of(case, world.rank, world.size).to(device)
        world.set_timeout(MISTAKE_LIMIT_S)
        return outcome(lambda: layer.dispatch_fp8(x.to(device), idx))

    check_outcomes(ranks(run), "ValueError", "hidden 24")
