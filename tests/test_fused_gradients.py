"""Gradients of the fused operator in an MoE layer: equal to those of the stages, and to float64 within
rounding.
"""

import dataclasses
import math

import pytest
import torch

import epmoe
from cases import MODES, make_op, same_bits
from fused_cases import (ACTIVATIONS, LEAVES, LOW, TOLERANCE, Experts, StagedOp, check_gradients,
                         check_numbers, dispatch_gemm, gemm_combine, grown, poison_staging, same, step,
                         tensors)
from moe_cases import close


def gradients(world, device, case, leaves, **options):
    """y and the gradient of each leaf, through one op.

    The op runs twice: first it makes a layout, then it uses that layout. Both runs must give the same bits.
    """
    op = make_op(world, device, case, StagedOp, **options)
    poison_staging(op)
    t = tensors(case, world.rank, world.size, device)
    names, layout, seen = [n for n in LEAVES if n in leaves and getattr(t, n) is not None], None, []
    for _ in range(2):
        for n in names:
            setattr(t, n, getattr(t, n).detach().clone().requires_grad_())
        of_layout = {} if layout is None else {"layout": layout}
        h, row_weight, layout = dispatch_gemm(op, case, t, **of_layout)
        y = gemm_combine(op, t, h, row_weight, layout)
        assert y.requires_grad
        y.backward(t.dy)
        seen.append({"y": y.detach(), **{n: getattr(t, n).grad for n in names}})
    op.synchronize()
    op.finalize()
    for name, value in seen[0].items():
        if name not in ("b1", "b2"):  # on a GPU the sums of these gradients have no fixed order
            same_bits(seen[1][name], value, f"rank {world.rank}: {name} by the same layout")
    return seen[0]


def gradients_of_both(world, device, case, leaves=LEAVES, **options):
    """gradients() of the fused op; equal to those of the stages bit by bit, where sums have a fixed order."""
    want = gradients(world, device, case, leaves, fused=False, **options)
    got = gradients(world, device, case, leaves, **options)
    for name, value in want.items():
        if name not in ("b1", "b2"):
            assert got[name] is not None, name
            same_bits(got[name], value, f"rank {world.rank}: {'y' if name == 'y' else 'gradient of ' + name}")
    return got


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS[:4], "geglu_tanh", "relu2",
                                        epmoe.GptOss(alpha=1.3, limit=math.inf),
                                        epmoe.SwiGLU(1.3, math.inf, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_fused_gradients(ranks, mode, activation, bias):
    """GptOss and SwiGLU have no limit here. With a limit, rounding could move a value across it, and the
    gradient would differ from that in float64.
    """
    case = grown(ranks, Experts(mode=mode, activation=activation, bias=bias, dtype=LOW[bias], max_tokens=20,
                                capacity=None if mode == "gather" else "roomy"), 12)
    check_gradients(ranks(gradients_of_both, case), case)


@pytest.mark.parametrize("capacity", [None, "exact"])
@pytest.mark.parametrize("pattern", ["one_expert", "one_rank", "sentinels", "duplicates", "all_dropped"])
def test_fused_gradients_routing_pattern(ranks, pattern, capacity):
    case = grown(ranks, Experts(mode="local", pattern=pattern, capacity=capacity, bias=capacity is None,
                                tokens="first_none", weights=pattern != "duplicates"))
    check_gradients(ranks(gradients_of_both, case), case)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_gradients_without_token_saving(ranks, mode, bias):
    case = grown(ranks, Experts(mode=mode, pattern="sentinels", activation="gelu", bias=bias,
                                tokens="first_none", capacity="roomy" if bias else None))

    def run(world, device):
        return gradients_of_both(world, device, case, token_saving=False)

    check_gradients(ranks(run), case)


@pytest.mark.parametrize("leaves", [("x",), ("weight",), ("w1",), ("w2",), ("b1",), ("b2",), ("x", "w2"),
                                    ("weight", "w1")], ids="-".join)
@pytest.mark.parametrize("capacity", [None, "roomy"])
def test_fused_gradients_of_some_leaves(ranks, capacity, leaves):
    """Tokens, router or experts are frozen. The other leaves still get the right gradients."""
    for bias in {True, any(n.startswith("b") for n in leaves)}:
        case = Experts(mode="scatter", capacity=capacity, bias=bias, activation="gelu", dtype=torch.float16)
        results = ranks(gradients_of_both, case, leaves)
        assert all(set(r) == {"y", *leaves} for r in results)
        check_gradients(results, case)


@pytest.mark.parametrize("fused", [False, True])
def test_fused_gradients_of_rows_after_the_first_m(ranks, fused):
    """With a capacity there are rows that no token has filled. Their gradients are 0."""
    case = Experts(capacity="roomy", activation=None, bias=False)

    def run(world, device):
        op = make_op(world, device, case, StagedOp, fused=fused)
        poison_staging(op)
        t = tensors(case, world.rank, world.size, device)
        found = []
        for _ in range(3):
            rows, row_weight, layout = op.dispatch(t.x, t.idx, t.weight)
            gain = torch.ones(case.hidden, dtype=rows.dtype, device=device, requires_grad=True)
            scale = torch.ones_like(row_weight).requires_grad_()
            first = torch.ones(t.w1.shape[0], case.hidden, case.hidden, dtype=rows.dtype, device=device)
            y = op.mega_group_gemm_combine(rows * gain, first, layout, row_weight * scale)
            y.float().sum().backward()
            found += [gain.grad.clone(), scale.grad[layout.num_rows:].clone(), scale.grad.isfinite().all()]
        op.synchronize()
        op.finalize()
        return found

    for found in ranks(run):
        for gain, after, is_finite in zip(*[iter(found)] * 3):
            assert gain.isfinite().all() and not after.any() and is_finite


@pytest.mark.parametrize("capacity", [None, "roomy"])
def test_fused_second_derivatives(ranks, capacity):
    """The first backward reads rows and products that the operators have saved: they have gradients, too."""
    case = Experts(capacity=capacity, activation=None, bias=False)

    def run(world, device):
        seen = []
        for fused in (False, True):
            op = make_op(world, device, case, StagedOp, fused=fused)
            poison_staging(op)
            t = tensors(case, world.rank, world.size, device)
            leaves = [v.detach().clone().requires_grad_() for v in (t.x, t.weight, t.w1, t.w2)]
            x, weight, w1, w2 = leaves
            h, row_weight, layout = op.mega_dispatch_group_gemm(x, t.idx, None, w1, weight)
            y = op.mega_group_gemm_combine(h, w2, layout, row_weight).float()
            first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
            norm = sum((g.float() / g.detach().abs().max().float()).square().sum() for g in first)
            seen.append([g.cpu() for g in torch.autograd.grad(norm, leaves)])
            op.synchronize()
            op.finalize()
        return seen

    for rank, (stages, fused) in enumerate(ranks(run)):
        for name, want, got in zip(("x", "weight", "w1", "w2"), stages, fused):
            want, got = want.double(), got.double()
            assert want.norm() > 0 and (got - want).norm() <= 2**-6 * want.norm(), f"rank {rank}: {name}"


def test_fused_gradients_of_unused_weights(ranks):
    """Dispatch sends the weights, but combine does not use them: their gradient is None or 0."""
    case = Experts(bias=False, activation=None)

    def run(world, device):
        seen = []
        for fused in (False, True):
            op = make_op(world, device, case, StagedOp, fused=fused)
            poison_staging(op)
            t = tensors(case, world.rank, world.size, device)
            t.x.requires_grad_(), t.weight.requires_grad_()
            h, _, layout = op.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight)
            op.mega_group_gemm_combine(h, t.w2, layout).backward(t.dy)
            op.synchronize()
            op.finalize()
            seen.append((t.x.grad, t.weight.grad))
        same_bits(seen[1][0], seen[0][0], f"rank {world.rank}: gradient of x")
        return seen[1][0], [w is None or not w.any().item() for _, w in seen]

    results = ranks(run)
    assert all(zero == [True, True] for _, zero in results)
    check_gradients([{"x": x} for x, _ in results], dataclasses.replace(case, weights=False))


def test_fused_without_gradients(ranks):
    """Under no_grad and inference_mode the results have the same bits and no autograd graph."""
    case = Experts()

    def run(world, device):
        op = make_op(world, device, case, StagedOp)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)
        for n in ("x", "w1", "w2", "b1", "b2"):
            getattr(t, n).requires_grad_()
        with torch.no_grad():
            without_grad = step(op, case, t)
        with torch.inference_mode():
            in_inference = step(op, case, t)
        op.synchronize()
        op.finalize()
        for got in (without_grad, in_inference):
            assert not got["y"].requires_grad and not got["h"].requires_grad
            same(got, want, f"rank {world.rank}")
        return want

    check_numbers(ranks(run), case)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_fused_gradient_of_float32_bias(ranks, fused):
    """A bias can have any floating-point dtype, with and without gradients."""
    case = Experts(dtype=torch.bfloat16, activation="gelu")

    def run(world, device):
        op = make_op(world, device, case, StagedOp, fused=fused)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)["y"]
        t.b1, t.b2 = ((b.float() * 1.0001).requires_grad_() for b in (t.b1, t.b2))
        got = step(op, case, t)["y"]
        got.backward(t.dy)
        of_stages = step(make_op(world, device, case, fused=False), case, t)["y"].detach()
        same_bits(got, of_stages, f"rank {world.rank}: y, compared with the stages")
        op.synchronize()
        op.finalize()
        return want, got.detach(), t.b1.grad, t.b2.grad

    for rank, (want, got, d1, d2) in enumerate(ranks(run)):
        assert got.dtype == want.dtype and d1.dtype == d2.dtype == torch.float32
        close(got, want, f"rank {rank}: y", TOLERANCE[case.dtype])
