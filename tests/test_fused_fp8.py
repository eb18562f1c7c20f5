"""The megakernels with weights in FP8 give the bits of their stages: dispatch_fp8, grouped_gemm, combine.

On a GPU of compute capability 9.x one launch does dispatch and GEMM, and one GEMM and combine. On the CPU
StagedOp runs the stages in the place of a launch, so that the Python code around it is tested there, too.
"""

import dataclasses
from unittest import mock

import pytest
import torch

import epmoe
from cases import MISTAKE_LIMIT_S, MODES, case_id, check_outcomes, keep, make_op, outcome
from fused_cases import ACTIVATIONS, LOW, Experts, grown, has_fused_path, tensors
from fused_fp8_cases import TOO_MANY, StagedOp, call, product_of
from gemm_cases import bits

BASE = Experts(hidden=272, inner=64)  # 128 rows of weights with gates; 272 numbers have a block of 16
BAD = 1  # the rank that makes a mistake


def run_both(world, device, case_list, knobs, shared, scales="blocks"):
    plain, op = (make_op(world, device, case_list[0], StagedOp, **(options | shared))
                 for options in ({"fused": False}, knobs))
    same, sizes = [], []
    for case in case_list:
        t = tensors(case, world.rank, world.size, device)
        before = op.num_launches
        want = call(plain, case, t, scales, apart=True)
        for got in (call(plain, case, t, scales), call(op, case, t, scales), call(op, case, t, scales)):
            same += [torch.equal(bits(a), bits(b)) for a, b in zip(got, want)]
            same += [not got[0].isnan().any().item(), got[0].dtype == case.dtype]
        same.append(op.num_launches - before == (4 if has_fused_path(device) else 0))
        sizes.append(want[0].float().abs().sum().item())
    same.append(plain.num_launches == 0)
    for o in (plain, op):
        o.synchronize()
        o.finalize()
    return same, sizes


def check(ranks, cases, knobs=None, shared=None, scales="blocks", has_rows=True, **options):
    cases = [grown(ranks, c) for c in (cases if isinstance(cases, list) else [cases])]
    results = ranks(run_both, cases, knobs or {}, shared or {}, scales, **options)
    assert all(all(same) for same, _ in results), results
    assert not has_rows or all(sum(sizes[i] for _, sizes in results) > 0 for i in range(len(cases)))


@pytest.mark.parametrize("dtype", LOW, ids=case_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_fp8_equals_stages(ranks, activation, dtype):
    for capacity in (None, "exact"):
        base = dataclasses.replace(BASE, activation=activation, dtype=dtype, capacity=capacity,
                                   pattern="sentinels", inner=64 if activation else 128)
        check(ranks, [dataclasses.replace(base, bias=bias, weights=weights)
                      for bias, weights in ((False, True), (True, False))])


@pytest.mark.parametrize("pattern", ["uniform", "one_expert", "one_rank", "own_rank", "heavy_drop",
                                     "all_dropped", "duplicates", "edges"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_fp8_routing_pattern(ranks, mode, pattern):
    check(ranks, dataclasses.replace(BASE, mode=mode, pattern=pattern, num_local=3),
          has_rows=pattern != "all_dropped")


@pytest.mark.parametrize("tokens", ["full", "none", "first_none", "only_last"])
def test_fused_fp8_ranks_without_tokens(ranks, tokens):
    check(ranks, [dataclasses.replace(BASE, tokens=tokens, capacity="roomy", activation="gelu"),
                  dataclasses.replace(BASE, tokens=tokens, capacity="roomy", bias=False)],
          has_rows=tokens != "none", at_least=2 if tokens == "first_none" else 1)


@pytest.mark.parametrize("hidden, inner", [(16, 64), (128, 192), (400, 320), (1040, 128), (640, 448)])
def test_fused_fp8_shape(ranks, hidden, inner):
    """Widths of one, two and more tiles, with and without a partial tile and a partial block of K."""
    check(ranks, dataclasses.replace(BASE, hidden=hidden, inner=inner, max_tokens=9))
    check(ranks, dataclasses.replace(BASE, hidden=hidden, inner=inner - 48, activation=None, max_tokens=9))


@pytest.mark.parametrize("scales", ["experts", "one"])
def test_fused_fp8_with_a_scale_for_each_expert(ranks, scales):
    check(ranks, dataclasses.replace(BASE, num_local=3), scales=scales)


@pytest.mark.parametrize("knobs", [
    {"num_sm": 1}, {"num_sm": 7}, {"num_sm": 2, "num_tail_sms": 1}, {"num_sm": 24, "num_tail_sms": 23},
    {"num_reduce_sms": 3}, {"combine_order": "serial"}, {"token_sorting": False},
    {"block_wise_barrier": False},
    {"num_sm": 5, "num_tail_sms": 2, "num_reduce_sms": 4, "block_wise_barrier": False,
     "token_sorting": False}],
    ids=lambda k: "-".join(f"{n}={v}" for n, v in k.items()))
def test_fused_fp8_knobs_change_no_bit(ranks, knobs):
    base = dataclasses.replace(BASE, num_local=3, num_sm=None, mode="local")
    check(ranks, [dataclasses.replace(base, pattern=p) for p in ("uniform", "one_expert")], knobs)


def test_fused_fp8_without_token_saving(ranks):
    check(ranks, [dataclasses.replace(BASE, topk=4, pattern=p) for p in ("uniform", "duplicates")],
          shared={"token_saving": False})


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fused_fp8_world_size(ranks, world_size):
    check(ranks, BASE, world_size=world_size)


def test_fused_fp8_falls_back_to_stages(ranks):
    """64 rows of gates and ups have blocks of both: dispatch + GEMM has no kernel, but has the result."""

    def run(world, device):
        case, same = dataclasses.replace(BASE, inner=32), []
        op = make_op(world, device, case, StagedOp)
        for activation, launches in (("swiglu", 1), (None, 2)):
            case = dataclasses.replace(case, activation=activation, inner=32 if activation else 64)
            t = tensors(case, world.rank, world.size, device)
            before, (h, *_) = op.num_launches, call(op, case, t)
            same.append(op.num_launches - before == (launches if has_fused_path(device) else 0))
            rows, scales, _, layout = op.dispatch_fp8(t.x, t.idx)
            product = product_of(t)
            want = epmoe.grouped_gemm(rows, product["gemm_weight"], offsets=layout.expert_offsets, bias=t.b1,
                                      a_scale=scales, b_scale=product["gemm_scale"], out_dtype=case.dtype,
                                      activation=activation)
            same.append(torch.equal(bits(h), bits(want[:layout.num_rows])))
        op.finalize()
        return same

    assert all(map(all, ranks(run)))


@pytest.mark.parametrize("dtype", LOW, ids=case_id)
def test_fused_fp8_moe(ranks, dtype):
    """An EPMoE in FP8 gives the same bits with and without the fused kernel."""

    def run(world, device):
        tokens = 9 if device.type == "cpu" else 300
        g = torch.Generator(device).manual_seed(world.rank)
        idx = torch.randint(-1, 2 * world.size, (tokens, 2), device=device, generator=g)
        x = torch.randn(tokens, 256, device=device, generator=g).to(dtype)
        weight = torch.rand(tokens, 2, device=device, generator=g)
        results, state = [], None
        for fused in (True, False):
            moe = epmoe.EPMoE(256, 128, 2 * world.size, 2, world, max_tokens=tokens, dtype=dtype,
                              device=device, fused=fused, weight_dtype=torch.float8_e4m3fn)
            keep(world, moe)
            state = state or moe.state_dict()  # rank threads share torch's seed
            moe.load_state_dict(state)
            with torch.no_grad():
                results.append(moe(x, idx, weight, decode=False))
            moe.layer.synchronize()
            moe.finalize()
        return torch.equal(*map(bits, results)), results[0].float().norm().item() > 0

    assert all(map(all, ranks(run)))


@pytest.mark.cuda_only
def test_fused_fp8_graph(ranks):
    """A captured launch, replayed."""
    if not ranks.is_torchrun:
        pytest.skip("ranks that are threads do not replay graphs")

    def run(world, device):
        case, same = grown(ranks, dataclasses.replace(BASE, capacity="roomy", tokens="full")), []
        op = make_op(world, device, case, StagedOp)
        t = tensors(case, world.rank, world.size, device)
        product, product2 = product_of(t), product_of(t, name="w2")

        def step():
            h, _, layout = op.mega_dispatch_group_gemm(t.x, t.idx, bias=t.b1, activation="swiglu", **product)
            return h, op.mega_group_gemm_combine(h, layout=layout, bias=t.b2, **product2), layout

        with torch.no_grad():
            m = step()[2].num_rows
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                h, y, _ = step()
            for _ in range(3):
                t.x.copy_(torch.randn_like(t.x))
                graph.replay()
                got, want = (h[:m].clone(), y.clone()), step()
                same.append(torch.equal(bits(got[0]), bits(want[0][:m])))
                same.append(torch.equal(bits(got[1]), bits(want[1])))
        op.synchronize()
        op.finalize()
        return same

    assert all(map(all, ranks(run)))


# ---- mistakes ----

WRONG = [
    ("input", lambda x: x.clone().requires_grad_(), "RuntimeError", "no gradients"),
    ("input", lambda x: x.float(), "TypeError", "bfloat16"),
    ("input", lambda x: x[:, :16], "ValueError", "272"),
    ("gemm_weight", lambda w: w.bfloat16(), "TypeError", "float8_e4m3fn"),
    ("gemm_weight", lambda w: w[:1], "ValueError", "[2, *, 272]"),
    ("gemm_scale", lambda s: s[:, :, :1], "ValueError", "[2, 1, 3]"),
    ("gemm_scale", lambda s: s.half(), "TypeError", "float32"),
    ("gemm_scale", lambda s: 1.0, "TypeError", "float"),
    ("gemm_scale", lambda s: None, "TypeError", "gemm_weight"),
    ("bias", lambda b: b[:, :-1].contiguous(), "ValueError", "bias"),
    ("activation", lambda a: "relu", "ValueError", "gpt_oss"),
]


@pytest.mark.parametrize("by_layout", [False, True], ids=["new", "layout"])
@pytest.mark.parametrize("name, change, error, text", WRONG)
def test_fused_fp8_mistakes_on_one_rank(ranks, name, change, error, text, by_layout):
    case = dataclasses.replace(BASE, tokens="full", max_tokens=12)

    def run(world, device):
        op = make_op(world, device, case, StagedOp)
        t = tensors(case, world.rank, world.size, device)
        arguments = {"input": t.x, "weight": t.weight, "bias": t.b1, "activation": "swiglu",
                     **product_of(t), "layout" if by_layout else "exp_indices": t.idx}
        if by_layout:
            arguments["layout"] = op.preprocess(t.idx)
        world.set_timeout(MISTAKE_LIMIT_S)
        wrong = arguments | {name: change(arguments[name])} if world.rank == BAD else arguments
        got = outcome(lambda: op.mega_dispatch_group_gemm(**wrong), op)
        want = op.dispatch_fp8(t.x, t.idx)[3].num_rows
        return got, len(call(op, case, t)[0]) == want

    results = ranks(run, at_least=2)
    wanted = [error if rank == BAD else "PeerError" for rank in range(len(results))]
    check_outcomes([r[0] for r in results], wanted, text, on_rank=BAD, elsewhere=(f"rank {BAD}",))
    assert all(is_right for _, is_right in results)


WRONG_OF_COMBINE = [
    ("gemm_input", lambda h: h.clone().requires_grad_(), "RuntimeError", "no gradients"),
    ("gemm_input", lambda h: h.float(), "TypeError", "bfloat16"),
    ("gemm_input", lambda h: h[:-1], "ValueError", "gemm_input"),
    ("gemm_weight", lambda w: w.bfloat16(), "TypeError", "float8_e4m3fn"),
    ("gemm_weight", lambda w: w[:, :16], "ValueError", "[2, 272, *]"),
    ("gemm_scale", lambda s: s[:, :2], "ValueError", "[2, 3, 1]"),
    ("gemm_scale", lambda s: s.half(), "TypeError", "float32"),
    ("weight", lambda w: w[:-1], "ValueError", "weight"),
    ("bias", lambda b: b[:, :-1].contiguous(), "ValueError", "bias"),
    ("layout", lambda layout: None, "TypeError", "EPLayout"),
]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
@pytest.mark.parametrize("name, change, error, text", WRONG_OF_COMBINE)
def test_fused_fp8_mistakes_of_combine_on_one_rank(ranks, name, change, error, text, fused):
    case = dataclasses.replace(BASE, tokens="full", max_tokens=12)

    def run(world, device):
        op = make_op(world, device, case, StagedOp, fused=fused)
        t = tensors(case, world.rank, world.size, device)
        before = call(op, case, t)[-1]
        with torch.no_grad():
            h, weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx, weight=t.weight, bias=t.b1,
                                                            activation="swiglu", **product_of(t))
        arguments = {"gemm_input": h, "layout": layout, "weight": weight, "bias": t.b2,
                     **product_of(t, name="w2")}
        world.set_timeout(MISTAKE_LIMIT_S)
        wrong = arguments | {name: change(arguments[name])} if world.rank == BAD else arguments
        got = outcome(lambda: op.mega_group_gemm_combine(**wrong), op)
        return got, torch.equal(bits(call(op, case, t)[-1]), bits(before))

    results = ranks(run, at_least=2)
    wanted = [error if rank == BAD else "PeerError" for rank in range(len(results))]
    check_outcomes([r[0] for r in results], wanted, text, on_rank=BAD, elsewhere=(f"rank {BAD}",))
    assert all(is_right for _, is_right in results)


@pytest.mark.parametrize("size_of_output", ["num_tokens", "_recv_words"])
def test_fused_fp8_without_memory(ranks, size_of_output):
    """Rank BAD cannot allocate an output of either kernel. It reports that, and the op works afterwards."""
    case = dataclasses.replace(BASE, tokens="full", max_tokens=12)

    def run(world, device):
        op = make_op(world, device, case, StagedOp)
        t = tensors(case, world.rank, world.size, device)
        before = call(op, case, t)[-1]
        with torch.no_grad():
            h, _, layout = op.mega_dispatch_group_gemm(t.x, t.idx, bias=t.b1, activation="swiglu",
                                                       **product_of(t))
        world.set_timeout(MISTAKE_LIMIT_S)
        of = layout if size_of_output == "num_tokens" else op
        size = TOO_MANY if world.rank == BAD else getattr(of, size_of_output)
        with mock.patch.object(of, size_of_output, size):
            if of is layout:
                got = outcome(lambda: op.mega_group_gemm_combine(h, layout=layout,
                                                                 **product_of(t, name="w2")), op)
            else:
                got = outcome(lambda: op.mega_dispatch_group_gemm(t.x, layout=layout, **product_of(t)), op)
        return got, torch.equal(bits(call(op, case, t)[-1]), bits(before))

    with torch.no_grad():
        results = ranks(run, at_least=2)
    wanted = ["RuntimeError" if rank == BAD else "PeerError" for rank in range(len(results))]
    check_outcomes([r[0] for r in results], wanted, on_rank=BAD, elsewhere=(f"rank {BAD}",))
    assert all(is_right for _, is_right in results)


def test_fused_fp8_on_one_rank_only(ranks):
    """The others multiply in 16 bits."""
    case = dataclasses.replace(BASE, tokens="full", max_tokens=12)

    def run(world, device):
        op = make_op(world, device, case)
        t = tensors(case, world.rank, world.size, device)
        product = product_of(t) if world.rank == BAD else {"gemm_weight": t.w1}
        world.set_timeout(MISTAKE_LIMIT_S)
        got = outcome(lambda: op.mega_dispatch_group_gemm(t.x, t.idx, **product), op)
        return got, call(op, case, t)[0].isfinite().all().item()

    with torch.no_grad():
        results = ranks(run, at_least=2)
    check_outcomes([r[0] for r in results], "EpMismatch", "FP8", f"rank {BAD}")
    assert all(is_right for _, is_right in results)
