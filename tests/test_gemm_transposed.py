"""Weights whose memory is transposed: read as they are, with the results of contiguous weights."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epmoe
from cases import keep
from fused_cases import Experts, StagedOp, grown, has_fused_path, tensors
from gemm_cases import EPS, SIZES, check, forward64, kernels, problem, rows_of_experts


def transposed(weight):
    """The same values, in memory as contiguous [L, K, N]."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


class Calls(TorchDispatchMode):
    """Records what the grouped GEMMs read as weights, and the sizes of copies."""

    def __init__(self):
        super().__init__()
        self.read, self.copied = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.epmoe.grouped_gemm.default:
            self.read.append(args[1].data_ptr())
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default,
                    torch.ops.aten._to_copy.default):
            self.copied.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [SIZES[name] for name in ("mixed", "empty", "many")],
                         ids=["mixed", "empty", "many"])
def test_gemm_transposed_equals_sums_in_float64(ranks, sizes, dtype):
    x, weight, _, row_weight, offsets = problem(sizes, 272, 208, dtype, ranks.device)
    for portable in kernels(ranks):
        for w in (None, row_weight):
            y = epmoe.grouped_gemm(x, transposed(weight), offsets=offsets, row_weight=w, portable=portable)
            for e, begin, end in rows_of_experts(offsets):
                want, size = forward64(x[begin:end], weight[e], None, None,
                                       None if w is None else w[begin:end])
                if w is not None:  # applied after the product was rounded
                    size = size + want.abs() * EPS[dtype] * 2.0**19
                check(y[begin:end], want, size, f"expert {e}")


@pytest.mark.parametrize("activation", [None, "swiglu", "gpt_oss", "relu2"])
def test_gemm_transposed_equals_contiguous(ranks, activation):
    """Values and gradients, with everything that follows the product."""
    given = problem([5, 0, 40], 32, 48, torch.float32, ranks.device, before=0, after=0)
    results = []
    for weight in (given[1], transposed(given[1])):
        leaves = [t.detach().requires_grad_() for t in (given[0], weight, given[2], given[3])]
        y = epmoe.grouped_gemm(leaves[0], leaves[1], offsets=given[4], bias=leaves[2], activation=activation,
                               row_weight=leaves[3])
        with torch.no_grad():
            plain = epmoe.grouped_gemm(leaves[0], leaves[1], offsets=given[4], bias=leaves[2],
                                       activation=activation, row_weight=leaves[3])
        y.square().sum().backward()
        assert leaves[1].grad.stride() == weight.stride()
        results.append([y, plain, *(t.grad for t in leaves)])
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # torch's products: not the same sums


def test_gemm_transposed_is_not_copied(ranks):
    """Neither in the forward nor in the backward, also where the parameter is what was transposed."""
    dtype = torch.float32 if ranks.device.type == "cpu" else torch.bfloat16
    x, weight, _, _, offsets = problem([5, 0, 40], 32, 48, dtype, ranks.device, before=0, after=0)
    p = weight.transpose(1, 2).contiguous().requires_grad_()
    with Calls() as calls:
        y = epmoe.grouped_gemm(x.requires_grad_(), p.transpose(1, 2), offsets=offsets)
        y.backward(torch.ones_like(y))
    assert calls.read[:2] == [p.data_ptr()] * 2 and len(calls.read) == 3
    assert not [shape for shape in calls.copied if len(shape) == 3]
    assert p.grad.is_contiguous()


def test_gemm_of_other_strides(ranks):
    """They are copied: every other row, and rows of a wider matrix."""
    x, weight, _, _, offsets = problem([5, 0, 40], 64, 48, torch.float32, ranks.device, before=0, after=0)
    apart = torch.stack([weight, weight], 3)[..., 0]
    for view in (weight[:, ::2], weight[:, :32], transposed(weight)[:, 8:], apart):
        assert torch.equal(epmoe.grouped_gemm(x, view, offsets=offsets),
                           epmoe.grouped_gemm(x, view.contiguous(), offsets=offsets))


def test_gemm_transposed_is_traced_by_the_compiler(ranks):
    x, weight, bias, _, offsets = problem([4, 0, 9], 32, 16, torch.bfloat16, ranks.device, before=0, after=0)

    def layer(x, weight):
        weight = weight.transpose(1, 2)
        return epmoe.grouped_gemm(x * 2, weight, offsets=offsets, bias=bias, activation="swiglu")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for f in (layer, compiled):
        p = weight.transpose(1, 2).contiguous().requires_grad_()
        y = f(x, p)
        y.sum().backward()
        grads.append((y, p.grad))
    for eager, traced in zip(*grads):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize("order", [lambda w: w, transposed], ids=["contiguous", "transposed"])
def test_gemm_derivatives_of_any_order(ranks, order):
    """The three products are the gradients of each other."""
    x, weight, _, _, offsets = problem([2, 0, 3], 4, 3, torch.float64, ranks.device, before=0, after=0)
    leaves = x.requires_grad_(), order(weight).requires_grad_()

    def product(x, weight):
        return epmoe.grouped_gemm(x, weight, offsets=offsets)

    assert torch.autograd.gradcheck(product, leaves) and torch.autograd.gradgradcheck(product, leaves)


def _layer(world, device, case, order, with_grad):
    """y of the two mega_ calls with weights of an order, with and without gradients, and the launches."""
    t = tensors(case, world.rank, world.size, device)
    op = StagedOp(world, case.max_tokens, case.hidden, case.topk, num_tot_experts=case.num_local * world.size,
                  dtype=case.dtype, device=device, fused=True)
    keep(world, op)
    w1, w2 = (order(w).requires_grad_(with_grad) for w in (t.w1, t.w2))
    h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx, weight=t.weight, gemm_weight=w1,
                                                        bias=t.b1, activation=case.activation)
    y = op.mega_group_gemm_combine(h, w2, layout, row_weight, bias=t.b2)
    grads = torch.autograd.grad(y.float().square().sum(), (w1, w2)) if with_grad else ()
    op.finalize()
    return y.detach(), *grads, op.num_launches


@pytest.mark.parametrize("with_grad", [False, True], ids=["plain", "grad"])
def test_gemm_transposed_in_a_fused_layer(ranks, with_grad):
    """The stages run one after the other. The fused kernels do not read such weights."""
    case = grown(ranks, Experts(dtype=torch.bfloat16, activation="gpt_oss"))
    fused = ranks(_layer, case, lambda w: w, with_grad)
    for got, want in zip(ranks(_layer, case, transposed, with_grad), fused):
        assert got[-1] == 0 and (want[-1] > 0) == has_fused_path(ranks.device)
        for a, b in zip(got[:-1], want[:-1]):
            largest = b.abs().max().item() if b.numel() else 0
            torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.02 * largest)
