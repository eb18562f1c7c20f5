"""Ranks that want gradients where others want none: backward would be a call that some ranks do not make, so
the forward is none.
"""

import pytest
import torch

import epmoe
from cases import Case, check_outcomes, generator, indices_of, keep, make_layer, outcome
from fused_cases import Experts, Played, make_op, same, tensors
from pace import HANG_S

BAD = 1  # the rank that wants none
CASE = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", dtype=torch.float32, weights=True)
NAMED = (f"rank {BAD} has 0", "rank 0 has 1")


@pytest.mark.parametrize("leaf", ["input", "weight"])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_errors_gradients_of_a_stage(ranks, op, leaf):
    """One leaf is enough, and which one may differ: backward is the same call."""

    def run(world, device):
        layer = make_layer(world, device, CASE)
        g, idx = generator(CASE.seed, world.rank), indices_of(CASE, world.rank, world.size).to(device)
        x, weight = torch.randn(8, 16, generator=g).to(device), torch.rand(8, 2, generator=g).to(device)
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        given = {"input": x, "weight": weight} if op == "dispatch" else {"input": rows, "weight": row_weight}

        def call():
            y = getattr(layer, op)(**given, layout=layout)
            return y[0] if op == "dispatch" else y

        given[leaf].requires_grad_(world.rank != BAD)
        got = outcome(call, layer)
        given["weight" if leaf == "input" and world.rank == BAD else leaf].requires_grad_()
        call().sum().backward()
        layer.synchronize()
        seen = [t.grad is not None and bool(t.grad.isfinite().all()) for t in given.values()
                if t.requires_grad]
        layer.finalize()
        return got, seen

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([got for got, _ in results], "EpMismatch", "ranks disagree in requires_grad", *NAMED)
    assert [seen for _, seen in results] == [[True]] * len(results)


@pytest.mark.parametrize("op", ["mega_dispatch_group_gemm", "mega_group_gemm_combine"])
@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_errors_gradients_of_a_product(ranks, op, saving, fused):
    case = Experts(dtype=torch.bfloat16, bias=False, activation=None)

    def run(world, device):
        layer = make_op(world, device, case, Played, token_saving=saving, fused=fused)
        t = tensors(case, world.rank, world.size, device)

        def first(wants):
            with torch.set_grad_enabled(wants):
                return layer.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight)

        def second(wants, h, row_weight, layout):
            with torch.set_grad_enabled(wants):
                return layer.mega_group_gemm_combine(h, t.w2, layout, row_weight)

        t.x.requires_grad_(), t.w2.requires_grad_()
        before = second(False, *first(False))
        wants = world.rank != BAD
        got = outcome(lambda: first(wants) if op == "mega_dispatch_group_gemm"
                      else second(wants, *first(True)), layer)
        world.exchange(b"back")
        same({"y": second(False, *first(False))}, {"y": before}, f"rank {world.rank}, after {got}")
        second(True, *first(True)).sum().backward()
        layer.synchronize()
        seen = bool(t.x.grad.isfinite().all()) and bool(t.w2.grad.isfinite().all())
        layer.finalize()
        return got, seen

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([got for got, _ in results], "EpMismatch", "ranks disagree in requires_grad", *NAMED)
    assert all(seen for _, seen in results)


def without_gradients_here(world, device, how):
    """A module's call on which rank BAD wants no gradients: (what came of it, whether the next step trains).
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, world, max_tokens=8, dtype=torch.float32, device=device,
                      capacity=16 * world.size)
    keep(world, moe)
    call = moe if how == "eager" else torch.compile(moe, backend="aot_eager", fullgraph=True)
    g = generator(3, world.rank)
    x, weight = torch.randn(8, 16, generator=g).to(device), torch.rand(8, 2, generator=g).to(device)
    idx = torch.randint(0, 2 * world.size, (8, 2), generator=g).to(device)
    x.requires_grad_()
    for wants in (False, True):  # what a compiler has to do takes seconds: not while others wait
        with torch.set_grad_enabled(wants):
            call(x, idx, weight)
    world.exchange(b"made")
    with torch.set_grad_enabled(world.rank != BAD):
        got = outcome(lambda: call(x, idx, weight), moe.layer)
    call(x, idx, weight).sum().backward()
    moe.layer.synchronize()
    trained = all(bool(t.grad.isfinite().all()) for t in (x, *moe.parameters()))
    moe.finalize()
    return got, trained


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_errors_gradients_of_a_module(ranks, how):
    results = ranks.isolated(without_gradients_here, how, world_size=2, at_least=2, timeout_s=HANG_S)
    check_outcomes([got for got, _ in results], "EpMismatch", "ranks disagree in requires_grad", *NAMED)
    assert all(trained for _, trained in results)
