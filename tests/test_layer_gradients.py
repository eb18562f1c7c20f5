"""Gradients of a layer as a user's graph may want them: twice, from anywhere in memory, under autocast and
checkpointing, and of numbers that 16 bits do not hold."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import MODES, Case, generator, indices_of, keep, make_layer
from epmoe import reference


def problem(world, device, case):
    """x, weights and a matrix, and where the tokens go, of a rank."""
    g = generator(case.seed, world.rank)
    x, weight = torch.randn(case.max_tokens, case.hidden, generator=g), torch.rand(case.max_tokens, case.topk,
                                                                                   generator=g)
    a = torch.randn(case.hidden, case.hidden, generator=generator(7)) / case.hidden**0.5
    idx = indices_of(case, world.rank, world.size)
    return *(t.to(device).requires_grad_() for t in (x, weight, a)), idx.to(device)


@pytest.mark.parametrize("capacity", [None, "roomy"])
@pytest.mark.parametrize("mode", MODES)
def test_layer_second_derivatives(ranks, mode, capacity):
    """Of a norm of the first ones, with respect to everything; all is linear but for tanh, so a rank's own
    oracle is enough.
    """
    case = Case(dtype=torch.float32, mode=mode, capacity=capacity)

    def run(world, device):
        layer = make_layer(world, device, case)
        x, weight, a, idx = problem(world, device, case)

        def through(x, weight, a):
            rows, row_weight, layout = layer.dispatch(x, idx, weight)
            valid = torch.arange(len(rows), device=device) < layout.num_rows
            return layer.combine(torch.tanh(rows @ a) * valid[:, None], layout, row_weight)

        def oracle(x, weight, a):
            return (torch.tanh(x @ a)[:, None] * weight[..., None]).sum(1)

        seen = []
        for fn in (through, oracle):
            first = torch.autograd.grad(fn(x, weight, a).square().sum(), [x, weight], create_graph=True)
            norm = sum(g.square().sum() for g in first)
            # a's gradient is a sum over the tokens that this rank computes, which are the others': only their
            # sum is the oracle's.
            seen.append([g.detach() for g in first] + list(torch.autograd.grad(norm, [x, weight])))
        layer.finalize()
        return seen

    for rank, (got, want) in enumerate(ranks(run)):
        for i, (g, w) in enumerate(zip(got, want)):
            # sums of squares: small numbers are differences of large ones
            off = (g - w).abs().max() / w.abs().max()
            assert off < 1e-4 and w.abs().max() > 0.1, f"rank {rank}, {i}: {off}"


def test_layer_gradients_from_anywhere_in_memory(ranks):
    """torch.cat's backward gives a part of a tensor, at any address."""

    def run(world, device):
        moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, max_tokens=9, dtype=torch.float32, device=device)
        keep(world, moe)
        x, weight, _, idx = problem(world, device, Case(dtype=torch.float32))
        seen = []
        for shift in (0, 1):
            y = moe(x, idx, weight)
            z = torch.cat([torch.zeros(shift, device=device, requires_grad=True), y.flatten()])
            (z * torch.arange(-shift, y.numel(), device=device)).sum().backward()
            seen.append([t.grad.clone() for t in (x, weight)])
            x.grad = weight.grad = None
        moe.finalize()
        return seen

    for rank, (even, odd) in enumerate(ranks(run)):
        for a, b in zip(even, odd):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3, msg=lambda m: f"rank {rank}: {m}")
            assert a.abs().max() > 1


@pytest.mark.parametrize("inside", [False, True], ids=["forward", "both"])
def test_layer_gradients_under_autocast(ranks, inside):
    """Those of a layer of float32 are of float32, also where backward runs under autocast."""

    def run(world, device):
        moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, max_tokens=9, dtype=torch.float32, device=device)
        keep(world, moe)
        x, weight, _, idx = problem(world, device, Case(dtype=torch.float32))

        def gradients(forward, backward):
            with torch.autocast(device.type, torch.bfloat16, enabled=forward):
                y = moe(x, idx, weight).square().sum()
            with torch.autocast(device.type, torch.bfloat16, enabled=backward):
                return torch.autograd.grad(y, [x, weight, *moe.parameters()])

        seen = gradients(True, inside), gradients(False, False)
        moe.finalize()
        return seen

    for rank, (got, want) in enumerate(ranks(run)):
        for i, (g, w) in enumerate(zip(got, want)):
            assert torch.equal(g, w), f"rank {rank}, {i}"


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_layer_checkpointing_tells_nobody_of_its_own_end(ranks, monkeypatch, fused):
    """It ends a forward that it repeats by an exception: no rank has failed."""
    told = []
    monkeypatch.setattr(epmoe._C, "layer_refuse", lambda *args: told.append(args))

    def run(world, device):
        op = epmoe.EpAll2AllFusedOp(world, 16, 32, 2, num_tot_experts=2 * world.size, dtype=torch.bfloat16,
                                    device=device, fused=fused)
        keep(world, op)
        g = generator(3, world.rank)
        x, w = (torch.randn(s, generator=g).to(device, torch.bfloat16).requires_grad_()
                for s in ((16, 32), (2, 64, 32)))
        idx = indices_of(Case(max_tokens=16), world.rank, world.size).to(device)

        def part(x, w):
            return op.mega_dispatch_group_gemm(x, idx, gemm_weight=w, activation="swiglu")[0]

        checkpoint(part, x, w, use_reentrant=False).float().sum().backward()
        got = x.grad.clone()
        x.grad = None
        part(x, w).float().sum().backward()
        op.synchronize()
        op.finalize()
        return torch.equal(x.grad, got)

    assert all(ranks(run)) and not told


@pytest.mark.parametrize("activation, gate, up", [("gpt_oss", -9000.0, 7.0),
                                                  (epmoe.GptOss(limit=float("inf")), -300.0, 300.0),
                                                 (epmoe.GptOss(limit=float("inf")), -60.0, 1200.0)])
def test_layer_gpt_oss_of_large_numbers(activation, gate, up):
    """What 16 bits do not hold in between is not in the result, nor in its gradient."""
    h = torch.tensor([[gate, up]], dtype=torch.float16, requires_grad=True)
    y = reference.activate(h, activation)
    y.sum().backward()
    assert y.dtype == torch.float16 and y.item() == 0 and not h.grad.isnan().any()
