"""Errors of a training step on one rank: that rank raises at once, the others raise PeerError.

The next step works.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cases import Case, check_outcomes, generator, indices_of, keep, make_layer, outcome
from experts_cases import make_moe, works_after
from fused_cases import Experts, LatePlan, StagedOp, make_op, tensors

BAD = 1
CASE = Experts()


class LateOp(LatePlan, StagedOp):
    pass


# name: (parameter, what rank BAD has in its place, its error, text)
WRONG = {
    "experts": ("gate_up_proj", lambda p: torch.cat([p, p[:1]]), "ValueError", "gate_up_proj: wanted size"),
    "hidden": ("down_proj", lambda p: torch.cat([p, p], 1), "ValueError", "down_proj: wanted size"),
    "inner": ("down_proj", lambda p: p[..., :-16].contiguous(), "ValueError", "gate_up_proj: wanted size"),
    "dtype": ("down_proj", lambda p: p.float(), "TypeError", "down_proj: wanted bfloat16"),
    "bias": ("down_proj_bias", lambda p: p[:, :1].contiguous(), "ValueError", "bias"),
    "first bias": ("gate_up_proj_bias", lambda p: p[:1], "ValueError", "bias"),
}


def own_on_bad(results, kind, text):
    """Check that rank BAD has this error, and the others know of it."""
    check_outcomes(results, [kind if r == BAD else "PeerError" for r in range(len(results))], text,
                   on_rank=BAD, elsewhere=[f"rank {BAD} failed before its"])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_experts_refuse_wrong_parameters(ranks, name, fused):
    """As a call without gradients does.  On the CPU torch would broadcast some of them."""
    attribute, change, kind, text = WRONG[name]

    def run(world, device):
        t = tensors(CASE, world.rank, world.size, device)
        moe = make_moe(world, device, CASE, t, kind=LateOp, fused=fused)
        keep(world, moe)
        right = getattr(moe, attribute)
        if world.rank == BAD:
            setattr(moe, attribute, torch.nn.Parameter(change(right.detach())))
        got = outcome(lambda: moe(t.x, t.idx, t.weight), moe.layer)
        # and with a wrong index at the same time: then no rank enters the plan that would find it
        idx = t.idx.clone()
        if world.rank == 0:
            idx[0, 0] = 1000
        both = outcome(lambda: moe(t.x, idx, t.weight), moe.layer)
        setattr(moe, attribute, right)
        return got, both, works_after(world, moe, t)

    results = ranks(run, world_size=2, at_least=2)
    own_on_bad([got for got, _, _ in results], kind, text)
    own_on_bad([both for _, both, _ in results], kind, text)
    assert all(is_finite for *_, is_finite in results)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["changed", "again"])
def test_experts_report_what_torch_refuses_in_a_backward(ranks, how, fused):
    """A parameter was changed in place before the backward, or the backward is the second of its forward."""
    def run(world, device):
        t = tensors(CASE, world.rank, world.size, device)
        moe = make_moe(world, device, CASE, t, fused=fused)
        keep(world, moe)
        y = moe(t.x.requires_grad_(), t.idx, t.weight)
        if how == "again":
            y.backward(t.dy)
            world.exchange(b"once")
        elif world.rank == BAD:
            with torch.no_grad():
                moe.down_proj.add_(0)
        repeats = how == "changed" or world.rank == BAD
        with torch.autograd.set_multithreading_enabled(False):  # the backward runs in this thread on GPUs too
            got = outcome(lambda: y.backward(t.dy) if repeats else moe(t.x, t.idx, t.weight), moe.layer)
        return got, works_after(world, moe, t)

    results = ranks(run, world_size=2, at_least=2)
    text = "inplace operation" if how == "changed" else "second time"
    own_on_bad([got for got, _ in results], "RuntimeError", text)
    assert all(is_finite for _, is_finite in results)


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_stages_report_a_second_backward(ranks, op):
    """The other ranks are in their next forward by then."""
    case = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", weights=True)

    def run(world, device):
        layer = make_layer(world, device, case)
        keep(world, layer)
        g = generator(case.seed, world.rank)
        idx = indices_of(case, world.rank, world.size).to(device)
        x = torch.randn(8, 16, generator=g).to(device, case.dtype).requires_grad_()
        rows, row_weight, layout = layer.dispatch(x, idx, torch.rand(8, 2, generator=g).to(device))

        def loss():
            if op == "combine":
                leaf = rows.detach().requires_grad_()
                return layer.combine(leaf, layout, row_weight.detach().requires_grad_()).float().sum()
            return layer.dispatch(x, layout=layout)[0].float().sum()

        y = loss()
        y.backward()
        world.exchange(b"once")
        with torch.autograd.set_multithreading_enabled(False):
            got = outcome(y.backward if world.rank == BAD else loss, layer)
        world.exchange(b"raised")
        loss().backward()
        layer.synchronize()
        layer.finalize()
        return got

    own_on_bad(ranks(run, world_size=3, at_least=2), "RuntimeError", "second time")


@pytest.mark.parametrize("op", ["mega_dispatch_group_gemm", "mega_group_gemm_combine"])
def test_megakernels_report_a_changed_parameter(ranks, op):
    """Weights that the backward of a fused operation has saved were changed in place."""
    case = Experts(dtype=torch.bfloat16, bias=False, activation=None)

    def run(world, device):
        layer = make_op(world, device, case, StagedOp)
        keep(world, layer)
        t = tensors(case, world.rank, world.size, device)
        w1, w2 = t.w1.requires_grad_(), t.w2.requires_grad_()

        def forward():
            h, row_weight, layout = layer.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=w1,
                                                                   weight=t.weight)
            return layer.mega_group_gemm_combine(h, w2, layout, row_weight)

        y = forward()
        if world.rank == BAD:
            with torch.no_grad():
                (w1 if op == "mega_dispatch_group_gemm" else w2).add_(0)
        with torch.autograd.set_multithreading_enabled(False):
            got = outcome(lambda: y.backward(t.dy), layer)
        world.exchange(b"raised")
        w1.grad = w2.grad = None  # on a GPU, the failed backward may have added NaN before the error came
        forward().backward(t.dy)
        layer.synchronize()
        layer.finalize()
        return got, bool(w2.grad.isfinite().all())

    results = ranks(run, world_size=2, at_least=2)
    own_on_bad([got for got, _ in results], "RuntimeError", "inplace operation")
    assert all(is_finite for _, is_finite in results)


def test_experts_report_an_error_of_a_recomputed_forward_once(ranks):
    """With checkpointing, the backward runs the forward again. There rank BAD has tokens of a wrong dtype."""
    def run(world, device):
        t = tensors(CASE, world.rank, world.size, device)
        moe = make_moe(world, device, CASE, t)
        keep(world, moe)
        is_wrong, refused, refuse = False, [], moe.layer._propagate_now

        def refuse_and_count(op, error, buffer):
            refused.append(op)
            refuse(op, error, buffer)

        moe.layer._propagate_now = refuse_and_count

        def forward(x):
            return moe(x.double() if is_wrong and world.rank == BAD else x, t.idx, t.weight)

        y = checkpoint(forward, t.x.requires_grad_(), use_reentrant=False, preserve_rng_state=False)
        is_wrong = True
        with torch.autograd.set_multithreading_enabled(False):
            got = outcome(lambda: y.backward(t.dy), moe.layer)
        is_wrong = False
        return got, works_after(world, moe, t), len(refused)

    results = ranks(run, world_size=2, at_least=2)
    own_on_bad([got for got, *_ in results], "TypeError", "wanted bfloat16")
    assert [works for _, works, _ in results] == [True] * len(results)
    assert [num for *_, num in results] == [0] * len(results)  # the module reports it, Python does not
