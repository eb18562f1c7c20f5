"""The gradient of weights in FP8: transposed rows and weights, bit by bit, and their product, compared with
sums in float64 of the quantised numbers.

The reference quantises with torch's own conversions, in float64 up to the rounding. Rows around those of the
experts are NaN, and memory that is not written holds NaN (see conftest.py).
"""

import math

import pytest
import torch

import epmoe
from cases import generator, misaligned
from epmoe.gemm.wgrad_fp8 import (blocks_of_experts, grouped_wgrad_fp8, num_transposed_blocks,
                                  quantize_fp8_weight_pair, transpose_fp8)
from gemm_cases import EPS, SIZES, TINY, bits

E4M3 = torch.float8_e4m3fn
WIDE = [torch.float32, torch.bfloat16, torch.float16]
BLOCKS = {"mixed": [1, 0, 128, 300, 17], "empty": [0, 0], "single": [257], "hot": [0, 700, 1]}
# Of a sum of 128 products, divided by the sum of their magnitudes; see test_fp8.py.
FLOAT32, TENSOR_CORES = 2.0**-17, 2.0**-9


def random_rows(sizes, cols, device, seed=0):
    """Rows of different magnitudes, so that a wrong scale is seen, and offsets; other rows are NaN."""
    g = generator(seed, cols, len(sizes), sum(sizes))
    x = torch.full((3 + sum(sizes) + 5, cols), math.nan)
    rows = torch.randn(sum(sizes), cols, generator=g)
    rows *= 2.0 ** torch.randint(-6, 4, (sum(sizes), 1), generator=g)
    rows *= 2.0 ** torch.randint(-4, 4, (1, cols), generator=g)
    x[3:3 + sum(sizes)] = rows
    return x.to(device), torch.tensor([3, *sizes]).cumsum(0).to(torch.int32).to(device)


def rows_in_fp8(*args, **options):
    """The same in FP8: rows, their scales, offsets."""
    x, offsets = random_rows(*args, **options)
    return *epmoe.quantize_fp8(x, pow2=True), offsets


def scale_of(most):
    """The least power of two that is not less than most / 448, in float64."""
    mantissa, exponent = torch.frexp(most.cpu().double().clamp(min=2.0**-100) / 448)
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return torch.where(most.isinf(), math.inf, scale.to(most.device))


# ---- transposed rows ----

@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
def test_fp8_wgrad_transposes_rows(ranks, sizes):
    """Numbers are exact, unless they become subnormal; all scales of an expert and 128 columns are equal."""
    for cols in (16, 272):
        x, offsets = random_rows(sizes, cols, ranks.device)
        x[::7] *= 2.0**-9
        x, x_scale = epmoe.quantize_fp8(x, pow2=True)
        num_blocks = num_transposed_blocks(len(x), len(sizes))
        for strided in (x_scale, x_scale.contiguous()):
            q, scales = transpose_fp8(x, strided, offsets)
            assert q.dtype == E4M3 and q.shape == (cols, 128 * num_blocks)
            assert scales.shape == (len(sizes), -(-cols // 128))
            unused = set(range(num_blocks))
            for e, begin, end, first in blocks_of_experts(offsets, len(x)):
                if begin == end:
                    continue
                assert torch.equal(scales[e], x_scale[begin:end].amax(0))
                ratio = (x_scale[begin:end].double() / scales[e].double()).repeat_interleave(128, 1)[:, :cols]
                numbers = (x[begin:end].double() * ratio).float().to(E4M3)
                line = q[:, 128 * first:128 * (first - (begin - end) // 128)]
                assert torch.equal(bits(line[:, :end - begin]), bits(numbers).t())
                assert not bits(line[:, end - begin:]).any()
                unused -= set(range(first, first - (begin - end) // 128))
            for block in unused:
                assert q[:, 128 * block:128 * (block + 1)].float().isnan().all()


def test_fp8_wgrad_transposes_nan_and_infinity(ranks):
    """A NaN stays in its place; all numbers that share a scale with an infinity are NaN or zero."""
    x = torch.ones(300, 256, device=ranks.device)
    x[3, 2], x[290, 200] = math.nan, math.inf
    offsets = torch.tensor([0, 100, 300], dtype=torch.int32, device=ranks.device)
    q, scales = (t.cpu() for t in transpose_fp8(*epmoe.quantize_fp8(x, pow2=True), offsets))
    numbers = q.float().t()
    assert numbers[3, 2].isnan() and numbers[:100].isnan().sum() == 1 and scales[0].isfinite().all()
    assert scales[1, 0].isfinite() and scales[1, 1].isinf()
    assert not numbers[128:328, :128].isnan().any() and numbers[128 + 190, 200].isnan()


@pytest.mark.cuda_only
def test_fp8_wgrad_transposes_to_the_bits_of_the_cpu(ranks):
    for sizes in ([1, 0, 128, 300, 17, 0], [2000, 1, 3000], [50] * 40):
        for cols in (16, 1040):
            args = rows_in_fp8(sizes, cols, "cpu")
            for got, wanted in zip(transpose_fp8(*(t.to(ranks.device) for t in args)), transpose_fp8(*args)):
                assert torch.equal(bits(got.cpu()), bits(wanted))


# ---- transposed weights ----

@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("shape", [(3, 256, 384), (2, 272, 208), (1, 16, 16), (0, 128, 128)], ids=str)
def test_fp8_wgrad_weights_in_both_orders(ranks, shape, dtype):
    num, n, k = shape
    g = generator(*shape)
    weight = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-6, 3, (num, n, 1), generator=g)
    weight = weight.to(dtype).to(ranks.device)
    check_pair(weight)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_fp8_wgrad_weights_with_nan_infinity_and_zeros(ranks, dtype):
    weight = torch.ones(1, 384, 256, device=ranks.device).to(dtype)
    weight[0, :128, :128] = 0
    weight[0, 130, 3], weight[0, 300, 5] = math.nan, math.inf
    q, scales, _, _ = check_pair(weight)
    assert scales[0, 0, 0] == 2.0**-108 and not q[0, :128, :128].float().any()
    assert q[0, 130, 3].float().isnan() and q[0, 128:256].float().isnan().sum() == 1
    assert scales[0, 2, 0].isinf() and q[0, 300, 5].float().isnan() and scales[0, 2, 1].isfinite()


def check_pair(weight):
    """Compare quantize_fp8_weight_pair with float64.  Returns its results."""
    num, n, k = weight.shape
    q, scales, q_t, scales_t = quantize_fp8_weight_pair(weight)
    assert torch.equal(bits(q_t), bits(q).mT) and torch.equal(scales_t, scales.mT)
    assert q.is_contiguous() and q_t.is_contiguous() and scales.shape == (num, -(-n // 128), -(-k // 128))
    for e in range(num):
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                block = weight[e, i:i + 128, j:j + 128].double()
                scale = scale_of(block.abs().nan_to_num(nan=0, posinf=math.inf).max())
                assert scales[e, i // 128, j // 128].double() == scale
                got, wanted = q[e, i:i + 128, j:j + 128], (block / scale).float().to(E4M3)
                is_nan = wanted.float().isnan()  # the sign of a NaN may differ
                assert torch.equal(got.float().isnan(), is_nan)
                assert torch.equal(bits(got)[~is_nan], bits(wanted)[~is_nan])
    return q, scales, q_t, scales_t


def test_fp8_wgrad_transposed_weights_are_those_of_dgrad(ranks):
    """DGRAD of FP8 is the forward product of the transposed weights."""
    g = generator(1)
    weight = torch.randn(2, 144, 272, generator=g).to(ranks.device)
    dy = torch.randn(7, 144, generator=g).to(ranks.device)
    counts = torch.tensor([3, 4], device=ranks.device)
    _, _, q_t, scales_t = quantize_fp8_weight_pair(weight)
    rows, a_scale = epmoe.quantize_fp8(dy, pow2=True)
    got = epmoe.grouped_gemm(rows, q_t, counts, a_scale=a_scale, b_scale=scales_t).double()
    want = torch.cat([dy[:3] @ weight[0], dy[3:] @ weight[1]]).double()
    assert (got - want).norm() < 0.06 * want.norm()


# ---- the product ----

def operands(sizes, n, k, device, seed=0):
    """a, its scales, b, its scales, offsets."""
    *dy, offsets = rows_in_fp8(sizes, n, device, seed)
    *x, _ = rows_in_fp8(sizes, k, device, seed + 1)
    return *transpose_fp8(*dy, offsets), *transpose_fp8(*x, offsets), offsets


def products64(a, a_scale, b, b_scale, offsets):
    """The sum for each expert in float64, and the same sum of magnitudes."""
    for e, begin, end, first in blocks_of_experts(offsets, int(offsets[-1])):
        line = slice(128 * first, 128 * (first - (begin - end) // 128))
        left, right = (t[:, line].double() * s[e].double().repeat_interleave(128)[:len(t), None]
                       for t, s in ((a, a_scale), (b, b_scale)))
        yield left @ right.t(), left.abs() @ right.abs().t()


def error_of_sums(device):
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return TENSOR_CORES if on_hopper else FLOAT32


@pytest.mark.parametrize("n, k", [(32, 16), (272, 208), (128, 528)])
@pytest.mark.parametrize("sizes", [SIZES["mixed"], BLOCKS["hot"], BLOCKS["empty"]], ids=str)
def test_fp8_wgrad_equals_sums_in_float64(ranks, sizes, n, k):
    factors = operands(sizes, n, k, ranks.device)
    for dtype in (torch.bfloat16, torch.float16):
        got = grouped_wgrad_fp8(*factors, dtype)
        assert got.shape == (len(sizes), n, k) and got.dtype == dtype
        for each, (want, size) in zip(got, products64(*factors), strict=True):
            slack = EPS[dtype] * want.abs() + error_of_sums(ranks.device) * size + TINY[dtype]
            assert ((each.double() - want).abs() <= slack).all()


@pytest.mark.parametrize("alpha", [1.0, -0.7])
def test_fp8_wgrad_adds_to_float32(ranks, alpha):
    """Numbers around the output keep their bits, and so do those of experts without rows."""
    sizes, n, k = SIZES["mixed"], 272, 208
    factors = operands(sizes, n, k, ranks.device)
    whole = torch.randn(len(sizes) * n * k + 128, generator=generator(4)).to(ranks.device)
    out, before = whole[64:-64].view(len(sizes), n, k), whole.clone()
    version = out._version
    assert grouped_wgrad_fp8(*factors, out=out, alpha=alpha) is out
    assert out._version > version
    start = before[64:-64].view_as(out)
    for e, (want, size) in enumerate(products64(*factors)):
        if sizes[e] == 0:
            assert torch.equal(out[e], start[e])
        want = start[e].double() + alpha * want
        slack = 2.0**-23 * (want.abs() + start[e].double().abs()) + error_of_sums(ranks.device) * size
        assert ((out[e].double() - want).abs() <= slack).all(), f"expert {e}"
    assert torch.equal(whole[:64], before[:64]) and torch.equal(whole[-64:], before[-64:])


def test_fp8_wgrad_gives_the_same_bits_in_every_run(ranks):
    factors = operands(SIZES["mixed"], 272, 208, ranks.device)
    results = []
    for _ in range(3):
        out = torch.ones(len(SIZES["mixed"]), 272, 208, device=ranks.device)
        results.append((grouped_wgrad_fp8(*factors), grouped_wgrad_fp8(*factors, out=out, alpha=0.3)))
    for rounded, added in results[1:]:
        assert torch.equal(rounded, results[0][0]) and torch.equal(added, results[0][1])


def test_fp8_wgrad_is_near_the_gradient(ranks):
    """The error of the quantisation: three bits of a mantissa, at random."""
    sizes, n, k = [300, 129], 128, 256
    (dy, offsets), (x, _) = random_rows(sizes, n, ranks.device), random_rows(sizes, k, ranks.device, 5)
    dy, x = dy.bfloat16(), x.bfloat16()
    want = torch.ops.epmoe.grouped_gemm(dy, x, offsets, None, None, None, None, 2, (0, 0, 0), False,
                                        None).double()
    a, b = (transpose_fp8(*epmoe.quantize_fp8(t, pow2=True), offsets) for t in (dy, x))
    got = grouped_wgrad_fp8(*a, *b, offsets).double()
    assert (got - want).norm() < 0.06 * want.norm()


# ---- arguments ----

def test_fp8_wgrad_refuses_wrong_arguments(ranks):
    x, x_scale, offsets = rows_in_fp8([5], 16, ranks.device)
    q, scales = transpose_fp8(x, x_scale, offsets)
    whole = torch.zeros(1, 16, 16, device=ranks.device)
    for error, text, call in (
            (TypeError, "rows: wanted torch.float8", lambda: transpose_fp8(x.float(), x_scale, offsets)),
            (TypeError, "float32", lambda: transpose_fp8(x, x_scale.double(), offsets)),
            (ValueError, "scales of the rows", lambda: transpose_fp8(x, x_scale[1:], offsets)),
            (TypeError, "int32", lambda: transpose_fp8(x, x_scale, offsets.long())),
            (ValueError, "rows", lambda: transpose_fp8(x[0], x_scale, offsets)),
            (ValueError, "weights", lambda: quantize_fp8_weight_pair(whole[0])),
            (TypeError, "int64", lambda: quantize_fp8_weight_pair(whole.long())),
            (TypeError, "a: wanted", lambda: grouped_wgrad_fp8(whole[0], scales, q, scales, offsets)),
            (TypeError, "b: wanted", lambda: grouped_wgrad_fp8(q, scales, whole[0], scales, offsets)),
            (TypeError, "float32",
             lambda: grouped_wgrad_fp8(q, scales, q, scales, offsets, out=whole.double())),
            (TypeError, "bfloat16",
             lambda: grouped_wgrad_fp8(q, scales, q, scales, offsets, torch.float64))):
        with pytest.raises(error, match=text):
            call()


def test_fp8_wgrad_takes_any_strides_and_addresses(ranks):
    x, x_scale, offsets = rows_in_fp8([40, 3], 16, ranks.device)
    want = transpose_fp8(x, x_scale, offsets)
    for rows in (misaligned(x), x.t().contiguous().t()):
        for got, wanted in zip(transpose_fp8(rows, x_scale, misaligned(offsets)), want):
            assert torch.equal(bits(got), bits(wanted))
