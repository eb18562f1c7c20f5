"""FP8 with one scale for a row, and one for an expert: the numbers bit by bit, and products.

The reference rounds in float64.  Rows that belong to no expert are NaN.
"""

import math

import pytest
import torch

import epmoe
from cases import generator
from epmoe.gemm import four_bit
from epmoe.gemm.activations import as_kernel
from epmoe.gemm.quantize import dequantize_fp8, expand_fp8, rescale_fp8_weight
from epmoe.gemm.wgrad_fp8 import quantize_fp8_weight_pair
from epmoe.moe import fp8_training
from gemm_cases import bits
from outcomes import check_outcomes, outcome

E4M3 = torch.float8_e4m3fn


def rows_of(m, k, seed=0):
    """Rows whose groups of 128 numbers differ in magnitude by up to 2^12."""
    g = generator(seed, m, k)
    x = torch.randn(m, -(-k // 128), 128, generator=g) * torch.exp2(
        torch.randint(-6, 7, (m, -(-k // 128), 1), generator=g))
    return x.flatten(1)[:, :k].contiguous()


def rescaled(q, scales):
    """Rows with the largest of their scales, rounded in float64."""
    most = scales.double().amax(1, keepdim=True)
    ratio = (scales.double() / most).repeat_interleave(128, 1)[:, :q.shape[1]]
    return (q.double() * ratio).float().to(E4M3), most.float().expand_as(scales)


@pytest.mark.parametrize("m, k", [(1, 16), (5, 128), (37, 272), (300, 1040), (0, 256), (70, 7168)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_get_one_scale(ranks, m, k, dtype):
    x = rows_of(m, k).to(ranks.device, dtype)
    got, want = epmoe.quantize_fp8(x, pow2=True, rowwise=True), rescaled(*epmoe.quantize_fp8(x, pow2=True))
    assert torch.equal(bits(got[0]), bits(want[0])) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "gelu"])
def test_activations_get_one_scale_where_rows_exist(ranks, activation):
    x = rows_of(9, 512 if activation == "gelu" else 1024).to(ranks.device).bfloat16()
    whole = rescaled(*epmoe.quantize_fp8(x, activation, pow2=True))
    for num in (-3, 0, 4, 9):
        q, scales = epmoe.quantize_fp8(x, activation, torch.tensor([num], dtype=torch.int32, device=x.device),
                                       pow2=True, rowwise=True)
        some = slice(max(num, 0))
        assert torch.equal(bits(q[some]), bits(whole[0][some])) and torch.equal(scales[some], whole[1][some])
        assert scales[max(num, 0):].isnan().all()  # poisoned memory, see conftest.py


def test_gradients_of_activations_get_one_scale(ranks):
    """Also beside the weighted rows, which keep a scale for each 128 numbers."""
    h, d = (rows_of(70, k).to(ranks.device).bfloat16() for k in (512, 256))
    offsets = torch.tensor([0, 30, 64], dtype=torch.int32, device=ranks.device)
    found = {}
    for rowwise in (False, True):
        of_h, in_16 = (fp8_training.activation_gradient(as_kernel("swiglu"), h, d.clone(), offsets, None,
                                                        in_16_bits, rowwise) for in_16_bits in (False, True))
        for a, b in zip((*of_h.d_h8, *of_h.weighted8()), (*in_16.d_h8, *in_16.weighted8())):
            assert torch.equal(bits(a[:64].contiguous()), bits(b[:64].contiguous()))
        found[rowwise] = of_h
    want = rescaled(*(t[:64] for t in found[False].d_h8))
    assert torch.equal(bits(found[True].d_h8[0][:64]), bits(want[0]))
    assert torch.equal(found[True].d_h8[1][:64], want[1])
    for a, b in zip(found[True].weighted8(), found[False].weighted8()):
        assert torch.equal(bits(a[:64].contiguous()), bits(b[:64].contiguous()))


def test_nan_and_infinity_stay_in_their_rows(ranks):
    x = torch.ones(4, 384)
    x[1, 200], x[2, 5] = math.nan, math.inf
    x[:, 256:] *= 64
    q, scales = epmoe.quantize_fp8(x.to(ranks.device), pow2=True, rowwise=True)
    got = dequantize_fp8(q, scales, torch.float32).cpu()
    assert torch.equal(got[0], x[0]) and torch.equal(got[3], x[3])
    assert got[1].isnan().nonzero().tolist() == [[200]] and got[2].isnan().all()


@pytest.mark.parametrize("shape", [(3, 256, 384), (2, 272, 208), (1, 16, 16)], ids=str)
def test_experts_get_one_scale(ranks, shape):
    g = generator(*shape)
    weight = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-3, 3, (1, shape[1], 1), generator=g))
    q, scales, *_ = quantize_fp8_weight_pair(weight.bfloat16().to(ranks.device))
    to, before = scales.flatten(1).amax(1), (q.double(), scales.clone())
    rescale_fp8_weight(q, scales, to)
    assert torch.equal(scales, before[1])
    of_number = before[1].double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    ratio = of_number[:, :shape[1], :shape[2]] / to.double()[:, None, None]
    assert torch.equal(bits(q), bits((before[0] * ratio).float().to(E4M3)))


@pytest.mark.parametrize("format", [four_bit.Mxfp4(), four_bit.Int4(32), four_bit.Int4(128, True)], ids=repr)
def test_weights_of_4_bits_get_one_scale(ranks, format):
    """It is large enough for all weights, and at most four times too large."""
    weight = (torch.randn(3, 192, 256, generator=generator(3)) * torch.tensor([0.01, 1, 3])[:, None, None])
    packed = four_bit.quantize(format, weight.to(ranks.device), torch.bfloat16)
    to = four_bit.expert_scale(format, packed.scales)
    plain = four_bit.dequantize(format, *packed, torch.bfloat16).double()
    assert torch.equal(torch.frexp(to)[0], torch.full_like(to, 0.5))
    most = plain.abs().amax((1, 2))
    assert (most <= 448 * to.double() * 1.004).all() and (8 * most >= 448 * to.double() / 2).all()
    q, scales = expand_fp8(*packed, torch.bfloat16, to)
    assert torch.equal(scales, to[:, None, None].expand_as(scales))
    assert torch.equal(bits(q), bits((plain / to.double()[:, None, None]).float().clamp(-448, 448).to(E4M3)))


def test_a_scale_of_4_bits_that_is_no_number():
    packed = four_bit.quantize(four_bit.Int4(32), torch.ones(2, 64, 64), torch.bfloat16)
    packed.scales[1, 0, 0, 3] = math.inf
    found = four_bit.expert_scale(four_bit.Int4(32), packed.scales)
    assert found[0].isfinite() and found[1].isnan()


@pytest.mark.parametrize("sizes", [[1, 0, 3, 40], [130, 64, 0, 300], [1]], ids=str)
@pytest.mark.parametrize("activation", [None, "swiglu", "gpt_oss", "relu2"])
def test_products_with_a_scale_for_each_row(ranks, sizes, activation):
    """Against the product with a scale for each block, and alike for any number of rows."""
    num, n, k = len(sizes), 256, 528
    offsets = torch.tensor([2, *sizes]).cumsum(0).to(torch.int32).to(ranks.device)
    x = rows_of(2 + sum(sizes) + 3, k).to(ranks.device)
    x[:2] = x[-3:] = math.nan
    q, scales = epmoe.quantize_fp8(x, pow2=True, rowwise=True)
    weight = torch.randn(num, n, k, generator=generator(n)) / 16
    w, w_scale, *_ = quantize_fp8_weight_pair(weight.to(ranks.device))
    to = w_scale.flatten(1).amax(1)
    rescale_fp8_weight(w, w_scale, to)
    bias = torch.randn(num, n, generator=generator(5)).bfloat16().to(ranks.device)
    options = dict(activation=activation, bias=bias)
    rows = slice(2, 2 + sum(sizes))
    want = epmoe.grouped_gemm(q, w, offsets=offsets, a_scale=scales,
                              b_scale=to[:, None, None].expand_as(w_scale).contiguous(), **options)[rows]
    got = epmoe.grouped_gemm(q, w, offsets=offsets, a_scale=scales[:, :1], b_scale=to, **options)[rows]
    assert (got.double() - want.double()).norm() <= 2.0**-8 * want.double().norm()
    for expected in (1, 10**6):
        again = epmoe.grouped_gemm(q, w, offsets=offsets, a_scale=scales[:, :1], b_scale=to,
                                   expected_rows=expected, **options)[rows]
        assert torch.equal(bits(again), bits(got))
    if ranks.device.type == "cuda":  # on the CPU the products of FP8 are torch's
        last = max(e for e in range(num) if sizes[e])
        row = offsets[last].item()
        alone = epmoe.grouped_gemm(q[row:row + 1], w[last:last + 1], torch.tensor([1], device=ranks.device),
                                   a_scale=scales[row:row + 1, :1], b_scale=to[last:last + 1],
                                   activation=activation, bias=bias[last:last + 1])
        assert torch.equal(bits(alone[0]), bits(got[row - 2]))


def test_wrong_arguments(ranks):
    q, scales, *_ = quantize_fp8_weight_pair(torch.ones(2, 256, 128, device=ranks.device))
    to = torch.ones(2, device=ranks.device)
    for args, error, text in [((q.float(), scales, to), "TypeError", "float8_e4m3fn"),
                              ((q, scales[:1], to), "ValueError", "scales"),
                              ((q, scales.double(), to), "TypeError", "scales"),
                              ((q[:, ::2], scales[:, :1], to), "ValueError", "contiguous"),
                              ((q[0], scales[0], to), "ValueError", "3 dimensions"),
                              ((q, scales, to[:1]), "ValueError", "scales of the experts")]:
        check_outcomes([outcome(lambda: rescale_fp8_weight(*args))], error, text)
    check_outcomes([outcome(lambda: epmoe.quantize_fp8(torch.ones(2, 16), rowwise=True))], "ValueError",
                   "needs pow2=True")


@pytest.mark.cuda_only
def test_rows_of_other_sizes_are_refused_on_a_gpu(ranks):
    x = torch.ones(2, 24, device=ranks.device)
    check_outcomes([outcome(lambda: epmoe.quantize_fp8(x, pow2=True, rowwise=True))], "ValueError",
                   "multiple of 16")
