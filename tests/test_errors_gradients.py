"""Some ranks require gradients and others do not: the forward call raises EpMismatch on all ranks.

Otherwise only some ranks would call backward, which is collective, and these would wait until the timeout.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import Case, check_outcomes, generator, indices_of, keep, make_layer, outcome
from fused_cases import Experts, StagedOp, make_op, same, tensors
from pace import HANG_S

BAD = 1  # the rank that requires no gradients
CASE = Case(num_local=2, topk=2, hidden=16, max_tokens=8, tokens="full", dtype=torch.float32, weights=True)
TEXTS = ("ranks disagree in requires_grad", f"rank {BAD} has 0", "rank 0 has 1")


@pytest.mark.parametrize("leaf", ["input", "weight"])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_errors_gradients_of_a_stage(ranks, op, leaf):
    """One leaf that requires gradients is enough on each rank, and the ranks may have different leaves.

    backward is the same collective call in these cases.
    """

    def run(world, device):
        layer = make_layer(world, device, CASE)
        g = generator(CASE.seed, world.rank)
        idx = indices_of(CASE, world.rank, world.size).to(device)
        x, weight = torch.randn(8, 16, generator=g).to(device), torch.rand(8, 2, generator=g).to(device)
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        leaves = {"input": x, "weight": weight} if op == "dispatch" else {"input": rows, "weight": row_weight}

        def call():
            y = getattr(layer, op)(**leaves, layout=layout)
            return y[0] if op == "dispatch" else y

        leaves[leaf].requires_grad_(world.rank != BAD)
        got = outcome(call, layer)
        leaves["weight" if leaf == "input" and world.rank == BAD else leaf].requires_grad_()
        call().sum().backward()
        layer.synchronize()
        has_gradient = [t.grad is not None and bool(t.grad.isfinite().all())
                        for t in leaves.values() if t.requires_grad]
        layer.finalize()
        return got, has_gradient

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([got for got, _ in results], "EpMismatch", *TEXTS)
    assert [has_gradient for _, has_gradient in results] == [[True]] * len(results)


@pytest.mark.parametrize("op", ["mega_dispatch_group_gemm", "mega_group_gemm_combine"])
@pytest.mark.parametrize("saving", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_errors_gradients_of_a_fused_operation(ranks, op, saving, fused):
    case = Experts(dtype=torch.bfloat16, bias=False, activation=None)

    def run(world, device):
        layer = make_op(world, device, case, StagedOp, token_saving=saving, fused=fused)
        t = tensors(case, world.rank, world.size, device)

        def first(with_grad):
            with torch.set_grad_enabled(with_grad):
                return layer.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight)

        def second(with_grad, h, row_weight, layout):
            with torch.set_grad_enabled(with_grad):
                return layer.mega_group_gemm_combine(h, t.w2, layout, row_weight)

        t.x.requires_grad_()
        t.w2.requires_grad_()
        before = second(False, *first(False))
        with_grad = world.rank != BAD
        got = outcome(lambda: first(with_grad) if op == "mega_dispatch_group_gemm"
                      else second(with_grad, *first(True)), layer)
        world.exchange(b"back")
        same({"y": second(False, *first(False))}, {"y": before}, f"rank {world.rank}, after {got}")
        second(True, *first(True)).sum().backward()
        layer.synchronize()
        is_finite = bool(t.x.grad.isfinite().all()) and bool(t.w2.grad.isfinite().all())
        layer.finalize()
        return got, is_finite

    results = ranks(run, world_size=3, at_least=2)
    check_outcomes([got for got, _ in results], "EpMismatch", *TEXTS)
    assert all(is_finite for _, is_finite in results)


def call_module_without_grad_on_one_rank(world, device, how):
    """Call a module, on rank BAD without gradients. Return (outcome, whether the next step has gradients)."""
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
    for with_grad in (False, True):  # compile now: compilation takes seconds, and other ranks would wait
        with torch.set_grad_enabled(with_grad):
            call(x, idx, weight)
    world.exchange(b"made")
    with torch.set_grad_enabled(world.rank != BAD):
        got = outcome(lambda: call(x, idx, weight), moe.layer)
    call(x, idx, weight).sum().backward()
    moe.layer.synchronize()
    is_finite = all(bool(t.grad.isfinite().all()) for t in (x, *moe.parameters()))
    moe.finalize()
    return got, is_finite


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_errors_gradients_of_a_module(ranks, how):
    results = ranks.isolated(call_module_without_grad_on_one_rank, how, world_size=2, at_least=2,
                             timeout_s=HANG_S)
    check_outcomes([got for got, _ in results], "EpMismatch", *TEXTS)
    assert all(is_finite for _, is_finite in results)


def module_of(world, device, dtype, **options):
    torch.manual_seed(0)
    moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, world, max_tokens=8, dtype=dtype, device=device, **options)
    keep(world, moe)
    return moe


def inputs_of_module(world, device, dtype, num_tokens=8):
    g = generator(3, world.rank)
    x = torch.randn(num_tokens, 16, generator=g).to(device, dtype)
    weight = torch.rand(num_tokens, 2, generator=g)
    return x, torch.randint(0, 2 * world.size, (num_tokens, 2), generator=g).to(device), weight.to(device)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaf", ["input", "weight", "no tokens"])
def test_gradients_of_tokens_that_only_some_ranks_want(ranks, leaf, dtype, size):
    """The parameters want gradients on all ranks, so all make the same calls in the backward.

    "no tokens": rank BAD has none, and its x wants no gradient.
    """

    def run(world, device):
        moe, grads = module_of(world, device, dtype), []
        wants_alone = world.rank != BAD if leaf == "no tokens" else world.rank == 0
        num_tokens = 0 if leaf == "no tokens" and world.rank == BAD else 8
        for wants in (True, wants_alone):
            x, idx, weight = inputs_of_module(world, device, dtype, num_tokens)
            mine = weight if leaf == "weight" else x
            mine.requires_grad_(wants)
            moe.zero_grad()
            moe(x, idx, weight).float().square().sum().backward()
            moe.layer.synchronize()
            grads.append([p.grad.clone() for p in moe.parameters()])
            grads[-1] += [mine.grad] if mine.requires_grad else []
        moe.finalize()
        return all(torch.equal(a, b) for a, b in zip(*grads))

    assert all(ranks(run, world_size=size, at_least=2))


@pytest.mark.parametrize("options", [
    {"dtype": torch.float32}, {"dtype": torch.float32, "bias": True}, {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "token_saving": False}], ids=str)
def test_gradients_of_other_tensors_on_each_rank(ranks, options):
    """torch.autograd.grad() runs what leads to the tensors that a rank names, and its peers wait for all."""

    def run(world, device):
        moe = module_of(world, device, **options)
        x, idx, weight = inputs_of_module(world, device, moe.layer.dtype)
        leaves = [x.requires_grad_(), weight.requires_grad_(), *moe.parameters()]
        moe(x, idx, weight).float().square().sum().backward()
        for i, t in enumerate(leaves):
            wanted = leaves[i if world.rank == 0 else 0]
            got, = torch.autograd.grad(moe(x, idx, weight).float().square().sum(), [wanted])
            assert torch.equal(got, wanted.grad), f"rank {world.rank}, tensor {i}"
        moe.finalize()

    ranks(run, world_size=2, at_least=2)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaf", ["input", "weight", "parameter"])
def test_errors_gradients_that_only_one_rank_wants(ranks, leaf, dtype, size):
    """The ranks without a gradient make no backward.  It is the same in a layer that decodes by itself."""

    def run(world, device):
        moe, results = module_of(world, device, dtype), []
        moe.requires_grad_(leaf == "parameter" and world.rank != BAD)
        x, idx, weight = inputs_of_module(world, device, dtype)
        if leaf != "parameter":
            (x if leaf == "input" else weight).requires_grad_(world.rank != BAD)
        results.append(outcome(lambda: moe(x, idx, weight), moe.layer))
        moe.requires_grad_(True)
        moe(x, idx, weight).sum().backward()
        moe.layer.synchronize()
        moe.finalize()
        return results[0]

    check_outcomes(ranks(run, world_size=size, at_least=2), "EpMismatch", *TEXTS)


@pytest.mark.parametrize("how", ["enable_grad", "checkpoint", "reentrant"])
@pytest.mark.parametrize("options", [
    {"dtype": torch.float32}, {"dtype": torch.bfloat16},
    {"dtype": torch.bfloat16, "compute_dtype": torch.float8_e4m3fn}], ids=str)
def test_errors_gradients_in_inference_mode(ranks, how, options):
    """Torch can save nothing for a backward there. A backward itself may run there."""

    def run(world, device):
        moe = module_of(world, device, **options)
        x, idx, weight = inputs_of_module(world, device, moe.layer.dtype)
        is_bad = world.rank == BAD

        def forward():
            with torch.inference_mode(is_bad), torch.enable_grad():
                moe(x, idx, weight)

        def recompute():
            y = checkpoint(moe, x, idx, weight, use_reentrant=how == "reentrant")
            loss = y.float().sum()
            with torch.inference_mode(is_bad):
                loss.backward()

        x.requires_grad_()
        got = outcome(forward if how == "enable_grad" else recompute, moe.layer)
        loss = moe(x, idx, weight).float().sum()
        x.grad = None
        with torch.inference_mode(is_bad):
            loss.backward()
        moe.layer.synchronize()
        moe.finalize()
        return got, bool(x.grad.isfinite().all())

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], ["PeerError", "RuntimeError"], "leave inference mode out",
                   on_rank=BAD)
    assert all(is_finite for _, is_finite in results)
