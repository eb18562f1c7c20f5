"""Gradients of a layer in unusual graphs: second derivatives, gradients at any address, autocast, activation
checkpointing, and intermediate values that exceed the range of 16 bits.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import MODES, Case, generator, indices_of, keep, make_layer
from epmoe import reference
from layer_cases import problem


@pytest.mark.parametrize("capacity", [None, "roomy"])
@pytest.mark.parametrize("mode", MODES)
def test_layer_second_derivatives(ranks, mode, capacity):
    """Second derivatives, compared with an oracle that each rank computes for its own tokens.

    The function is the squared norm of the first derivatives. Each output token depends only on its own input
    token, so an oracle without communication is enough.
    """
    case = Case(dtype=torch.float32, mode=mode, capacity=capacity)

    def run(world, device):
        layer = make_layer(world, device, case)
        x, weight, a, idx = problem(world, device, case)

        def with_layer(x, weight, a):
            rows, row_weight, layout = layer.dispatch(x, idx, weight)
            valid = torch.arange(len(rows), device=device) < layout.num_rows
            return layer.combine(torch.tanh(rows @ a) * valid[:, None], layout, row_weight)

        def oracle(x, weight, a):
            return (torch.tanh(x @ a)[:, None] * weight[..., None]).sum(1)

        seen = []
        for fn in (with_layer, oracle):
            first = torch.autograd.grad(fn(x, weight, a).square().sum(), [x, weight], create_graph=True)
            norm = sum(g.square().sum() for g in first)
            # The gradient of a is not compared. In the layer it is a sum over the tokens that this rank
            # received, in the oracle a sum over the rank's own tokens.
            seen.append([g.detach() for g in first] + list(torch.autograd.grad(norm, [x, weight])))
        layer.finalize()
        return seen

    for rank, (got, want) in enumerate(ranks(run)):
        for i, (g, w) in enumerate(zip(got, want)):
            # Small values are differences of large ones, so the error is relative to the largest value.
            error = (g - w).abs().max() / w.abs().max()
            assert error < 1e-4, f"rank {rank}, derivative {i}: relative error {error}"
            assert w.abs().max() > 0.1, f"rank {rank}, derivative {i}: the values are too small to compare"


def test_layer_gradients_at_any_address(ranks):
    """The backward of torch.cat returns a part of a larger tensor, which can begin at any address."""

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


@pytest.mark.parametrize("autocast_backward", [False, True], ids=["forward", "both"])
def test_layer_gradients_under_autocast(ranks, autocast_backward):
    """A float32 layer computes in float32, even if forward and backward run under autocast."""

    def run(world, device):
        moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, max_tokens=9, dtype=torch.float32, device=device)
        keep(world, moe)
        x, weight, _, idx = problem(world, device, Case(dtype=torch.float32))

        def gradients(forward, backward):
            with torch.autocast(device.type, torch.bfloat16, enabled=forward):
                y = moe(x, idx, weight).square().sum()
            with torch.autocast(device.type, torch.bfloat16, enabled=backward):
                return torch.autograd.grad(y, [x, weight, *moe.parameters()])

        seen = gradients(True, autocast_backward), gradients(False, False)
        moe.finalize()
        return seen

    for rank, (got, want) in enumerate(ranks(run)):
        for i, (g, w) in enumerate(zip(got, want)):
            assert torch.equal(g, w), f"rank {rank}, gradient {i}"


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stages"])
def test_layer_checkpointing_is_not_reported_as_an_error(ranks, monkeypatch, fused):
    """torch's checkpoint raises an internal exception to stop the repeated forward early. epmoe must not
    report it to the peers, because no rank has failed.
    """
    refusals = []
    monkeypatch.setattr(epmoe._C, "layer_propagate_error", lambda *args: refusals.append(args))

    def run(world, device):
        op = epmoe.EpAll2AllFusedOp(world, 16, 32, 2, num_tot_experts=2 * world.size, dtype=torch.bfloat16,
                                    device=device, fused=fused)
        keep(world, op)
        g = generator(3, world.rank)
        x, w = (torch.randn(s, generator=g).to(device, torch.bfloat16).requires_grad_()
                for s in ((16, 32), (2, 64, 32)))
        idx = indices_of(Case(max_tokens=16), world.rank, world.size).to(device)

        def forward(x, w):
            return op.mega_dispatch_group_gemm(x, idx, gemm_weight=w, activation="swiglu")[0]

        checkpoint(forward, x, w, use_reentrant=False).float().sum().backward()
        got = x.grad.clone()
        x.grad = None
        forward(x, w).float().sum().backward()
        op.synchronize()
        op.finalize()
        return torch.equal(x.grad, got)

    assert all(ranks(run)) and not refusals


@pytest.mark.parametrize("activation, gate, up", [
    ("gpt_oss", -9000.0, 7.0),
    (epmoe.GptOss(limit=float("inf")), -300.0, 300.0),
    (epmoe.GptOss(limit=float("inf")), -60.0, 1200.0),
])
def test_layer_gpt_oss_of_large_numbers(activation, gate, up):
    """Intermediate values exceed the range of float16. The result and its gradient must not become NaN."""
    h = torch.tensor([[gate, up]], dtype=torch.float16, requires_grad=True)
    y = reference.activate(h, activation)
    y.sum().backward()
    assert y.dtype == torch.float16 and y.item() == 0 and not h.grad.isnan().any()
