"""The gradient of an activation in one operation, compared with torch's autograd in float64."""

import math

import pytest
import torch

import epmoe
from cases import generator, misaligned
from epmoe import _C, reference
from epmoe.gemm.activations import as_kernel, is_gated
from epmoe.gemm.grouped import aligned
from epmoe.moe import fp8_training
from gemm_cases import ACTIVATIONS, EPS, TINY

LOW = [torch.bfloat16, torch.float16]


def run_activation_backward(h, d, offsets, row_weight, kernel, in_place=False):
    """Return (w * d * y'(h), w * y, the sum of d * y of each row) for y = activation(h).

    h is [M, I], or [M, 2I] for a gated activation, d [M, I], both of bfloat16 or float16; row_weight w is
    float32 [M] or None.  Numbers are float32 in between, and the third result [M] is float32, a sum in a
    fixed order.  Rows that belong to no expert are undefined.  in_place: the second result is written over d.
    """
    h, d, offsets, row_weight = map(aligned, (h, d, offsets, row_weight))
    d_h = torch.empty_like(h)
    weighted = d if in_place else torch.empty_like(d)
    dots = torch.empty(len(d), dtype=torch.float32, device=d.device)
    _C.activation(kernel, h, d, offsets, row_weight, d_h, weighted, dots, None, None, False)
    return d_h, weighted, dots


def problem(activation, rows, columns, dtype, device, before=0, after=0):
    """h, d, offsets and row weights; rows that belong to no expert are NaN."""
    g = generator(3, rows, columns)
    wide = columns * (1 + (activation is not None and is_gated(activation)))
    h, d = (torch.randn(before + rows + after, n, generator=g) for n in (wide, columns))
    h[:, ::5] *= 12  # far from 0, where a sigmoid is flat
    for t in (h, d):
        t[:before] = torch.nan
        t[before + rows:] = torch.nan
    row_weight = torch.randn(before + rows + after, generator=g)
    offsets = torch.tensor([before, before + rows // 3, before + rows // 3, before + rows], dtype=torch.int32)
    return h.to(device, dtype), d.to(device, dtype), offsets.to(device), row_weight.to(device)


def wanted(h, d, row_weight, activation):
    """The three results in float64."""
    h64 = h.double().requires_grad_()
    y = h64 if activation is None else reference.activate(h64, activation)
    w = h.new_ones(len(h), dtype=torch.float64) if row_weight is None else row_weight.double()
    d_h, = torch.autograd.grad(y, h64, d.double() * w[:, None])
    y = y.detach()
    return (d_h, y * w[:, None], (y * d.double()).sum(1)), (y * d.double()).abs().sum(1)


def check(got, want, slack, what):
    worst = ((got.double() - want).abs() / slack).max().item() if want.numel() else 0.0
    assert worst <= 1, f"{what}: the error is {worst} times the allowed rounding error"


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_gradients_equal_float64(ranks, activation, dtype):
    kernel = as_kernel(activation)
    for columns, weighted in ((8, True), (48, False), (520, True)):
        h, d, offsets, w = problem(activation, 33, columns, dtype, ranks.device, before=2, after=3)
        w = w if weighted else None
        got = run_activation_backward(h, d, offsets, w, kernel)
        again = run_activation_backward(h, d, offsets, w, kernel)
        used = slice(2, 35)
        want, size = wanted(h[used], d[used], None if w is None else w[used], activation)
        eps, tiny = EPS[dtype], TINY[dtype]
        # The factors of a gradient are at most some tens here, and each has an error of some 2^-22.
        wd = d[used].double().abs().max() * (1 if w is None else w[used].abs().max())
        for i, name in enumerate(("d_h", "weighted")):
            slack = eps * want[i].abs() + 2.0**-17 * max(wd, 1) * (1 + h[used].double().abs().max()) + tiny
            check(got[i][used], want[i], slack, f"{name} of {columns} columns")
        check(got[2][used], want[2], 2.0**-18 * size + 1e-6, f"dots of {columns} columns")
        assert all(torch.equal(a[used], b[used]) for a, b in zip(got, again))
        over = run_activation_backward(h, d, offsets, w, kernel, in_place=True)
        assert over[1].data_ptr() == d.data_ptr()
        assert all(torch.equal(a[used], b[used]) for a, b in zip(got, over))
        assert d[:2].isnan().all() and d[35:].isnan().all()  # rows of no expert are not written


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu_tanh", "silu", "gpt_oss"])
def test_activation_gradients_of_large_numbers(ranks, activation):
    """Where the activation is flat or linear, no product of 0 and infinity makes NaN."""
    halves = 1 + is_gated(activation)
    numbers = torch.tensor([-3e38, -1e30, -3000.0, -100.0, 100.0, 3000.0, 1e10, 1e17])
    h = numbers.repeat(halves).view(1, -1).to(ranks.device, torch.bfloat16)
    if activation == "gpt_oss":
        h = torch.stack([h[:, :8], h[:, 8:]], -1).view(1, -1)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=ranks.device)
    d = torch.full((1, 8), 0.5, device=ranks.device, dtype=torch.bfloat16)
    got = run_activation_backward(h, d, offsets, None, as_kernel(activation))
    want, _ = wanted(h, d, None, activation)
    for a, b in zip(got[:2], want):
        torch.testing.assert_close(a.double(), b.bfloat16().double(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activation_gradients_of_infinity(ranks, activation):
    """The slope is 1 at infinity and 0 at minus infinity, not NaN."""
    h = torch.tensor([[math.inf, -math.inf] * 4], device=ranks.device, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=ranks.device)
    d_h, *_ = run_activation_backward(h, torch.full_like(h, 0.5), offsets, None, as_kernel(activation))
    assert d_h.tolist() == [[0.5, 0.0] * 4]


def test_activation_gradients_of_nan(ranks):
    """NaN in a gate or an up value gives NaN in the weighted row and in the dot product."""
    h = torch.zeros(2, 32, device=ranks.device, dtype=torch.float16)
    h[0, 3], h[1, 20] = math.nan, math.nan
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=ranks.device)
    d = torch.ones(2, 16, device=ranks.device, dtype=torch.float16)
    for activation in ("swiglu", epmoe.SwiGLU(limit=7.0), "geglu_tanh"):
        d_h, weighted, dots = run_activation_backward(h, d, offsets, None, as_kernel(activation))
        assert dots.isnan().all() and weighted[0, 3].isnan() and weighted[1, 4].isnan(), activation
        assert d_h[0, 3].isnan() and weighted.isnan().sum() == 2, activation


def test_activation_gradients_without_rows_and_at_any_address(ranks):
    for rows in (0, 5):
        h, d, offsets, w = problem("swiglu", rows, 16, torch.bfloat16, ranks.device)
        want = run_activation_backward(h, d, offsets, w, as_kernel("swiglu"))
        got = run_activation_backward(misaligned(h), misaligned(d), offsets, misaligned(w),
                                      as_kernel("swiglu"))
        assert all(torch.equal(a, b) for a, b in zip(got, want)) and want[0].shape == (rows, 32)


@pytest.mark.parametrize("change, error, text", [
    (dict(d=torch.zeros(3, 16)), TypeError, "bfloat16 or float16"),
    (dict(h=torch.zeros(3, 16, dtype=torch.bfloat16)), ValueError, "size 32 in dimension 1"),
    (dict(offsets=torch.zeros(2)), TypeError, "int32"),
    (dict(row_weight=torch.zeros(2)), ValueError, "size 3 in dimension 0"),
    (dict(kernel=(len(_C.ACTIVATIONS), 0, 0)), ValueError, "must be one of EP_ACTIVATIONS"),
    (dict(kernel=(3, math.nan, 1)), ValueError, r"activation 3 \(alpha nan, limit 1\)"),
])
def test_activation_gradients_of_wrong_arguments(ranks, change, error, text):
    arguments = dict(h=torch.zeros(3, 32, dtype=torch.bfloat16), d=torch.zeros(3, 16, dtype=torch.bfloat16),
                     offsets=torch.tensor([0, 3], dtype=torch.int32), row_weight=None,
                     kernel=as_kernel("swiglu")) | change
    arguments = {n: v.to(ranks.device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(error, match=text):
        run_activation_backward(**arguments)


def test_activation_gradients_refuse_outputs_in_the_memory_of_inputs(ranks):
    """`weighted` may be the gradient d itself, but not a part of it."""
    h, d, offsets, _ = problem("swiglu", 5, 16, torch.bfloat16, ranks.device)
    dots = torch.empty(5, device=ranks.device)
    want = run_activation_backward(h, d, offsets, None, as_kernel("swiglu"))
    longer = torch.cat([d, d.new_zeros(1, 16)])

    def call(d, d_h, weighted):
        epmoe._C.activation(as_kernel("swiglu"), h, d, offsets, None, d_h, weighted, dots, None, None, False)

    for d_h, weighted, text in (
            (h, d, "gradient of the input shares memory with input of the activation"),
            (torch.empty_like(h), longer[1:], "weighted rows shares memory with gradient"),
            (torch.empty_like(h), h.view(-1)[80:].view(5, 16),
             "weighted rows shares memory with input of the activation")):
        with pytest.raises(ValueError, match=text):
            call(longer[:5], d_h, weighted)
    d_h = torch.empty_like(h)
    call(longer[:5], d_h, longer[:5])
    assert all(torch.equal(a, b) for a, b in zip((d_h, longer[:5], dots), want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [128, 384])
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "gelu", epmoe.SwiGLU(1.3, 0.6, 1), "relu2"],
                         ids=str)
def test_activation_gradients_are_quantised_as_by_two_kernels(ranks, activation, columns, dtype):
    """In FP8 training one kernel gives the bits of the gradient in 16 bits, quantised afterwards."""
    kernel, g = as_kernel(activation), generator(3, columns)
    offsets = torch.tensor([1, 4, 4, 30], dtype=torch.int32).to(ranks.device)
    h = (3 * torch.randn(33, columns * (1 + is_gated(activation)), generator=g)).to(dtype).to(ranks.device)
    d = torch.randn(33, columns, generator=g).to(dtype).to(ranks.device)
    weight = torch.rand(33, generator=g).to(ranks.device)
    want = fp8_training.activation_gradient(kernel, h, d.clone(), offsets, weight, True)
    got = fp8_training.activation_gradient(kernel, h, d, offsets, weight, False)
    rows = slice(1, 30)
    assert got.d_h is None and torch.equal(got.dots[rows], want.dots[rows])
    for (q, scales), (q_want, scales_want) in ((got.d_h8, want.d_h8), (got.weighted8(), want.weighted8())):
        assert torch.equal(q[rows].view(torch.uint8), q_want[rows].view(torch.uint8))
        assert torch.equal(scales[rows], scales_want[rows])


def test_activation_gradients_refuse_wrong_scales(ranks):
    h, d, offsets = (t.to(ranks.device) for t in (torch.zeros(4, 256).half(), torch.zeros(4, 128).half(),
                                                  torch.tensor([0, 4], dtype=torch.int32)))
    dots = torch.zeros(4, device=ranks.device)
    bytes_of_h, bytes_of_d = (torch.zeros(t.shape, dtype=torch.uint8, device=ranks.device) for t in (h, d))
    of_h, of_d = torch.zeros(2, 4, device=ranks.device), torch.zeros(1, 4, device=ranks.device)
    for scales, error, text in (((of_h, None), ValueError, "both or neither"),
                                ((of_d, of_d), ValueError, "scales of the gradient"),
                                ((of_h, of_h), ValueError, "scales of the weighted rows")):
        with pytest.raises(error, match=text):
            _C.activation(as_kernel("swiglu"), h, d, offsets, None, bytes_of_h, bytes_of_d, dots, *scales,
                          False)
