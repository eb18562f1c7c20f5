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
                                  quantize_fp8_transposed, quantize_fp8_weight_pair)
from gemm_cases import EPS, SIZES, TINY, bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOST = {E4M3: 448, E5M2: 57344}
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


def scale_of(most, dtype):
    """The least power of two that is not less than most / the largest number, in float64."""
    mantissa, exponent = torch.frexp(most.cpu().double().clamp(min=2.0**-100) / MOST[dtype])
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    return torch.where(most.isinf(), math.inf, scale.to(most.device))


def blocks(x, offsets):
    """(rows of a block, its number) of all blocks."""
    for _, begin, end, first in blocks_of_experts(offsets, len(x)):
        for i, row in enumerate(range(begin, end, 128)):
            yield slice(row, min(row + 128, end)), first + i


def check_transposed(got, x, offsets, wanted, by_expert=False):
    """wanted(rows): (numbers in float64 before they are rounded, scales of columns) of a block of rows."""
    q, scales = got
    dtype, num_blocks = q.dtype, num_transposed_blocks(len(x), len(offsets) - 1)
    assert q.shape == (x.shape[1], 128 * num_blocks)
    if by_expert:
        experts = [e for e, begin, end, _ in blocks_of_experts(offsets, len(x))
                   for _ in range(begin, end, 128)]
        assert scales.shape == (len(offsets) - 1, -(-x.shape[1] // 128))
        used = scales.repeat_interleave(128, 1)[experts, :x.shape[1]]
        scales = torch.full((num_blocks, x.shape[1]), math.nan, device=x.device)
        scales[[block for _, block in blocks(x, offsets)]] = used
    assert scales.shape == (num_blocks, x.shape[1])
    unused = set(range(num_blocks))
    for rows, block in blocks(x, offsets):
        numbers, of_cols = wanted(rows)
        line = q[:, 128 * block:128 * (block + 1)]
        assert torch.equal(scales[block].double(), of_cols)
        assert torch.equal(bits(line[:, :len(numbers)]), bits(numbers.float().to(dtype)).t())
        assert not bits(line[:, len(numbers):]).any()
        unused.remove(block)
    for block in unused:
        assert q[:, 128 * block:128 * (block + 1)].float().isnan().all() and scales[block].isnan().all()


# ---- transposed rows ----

@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
def test_fp8_wgrad_transposes_rows(ranks, sizes, fp8, dtype):
    for cols in (16, 208):
        x, offsets = random_rows(sizes, cols, ranks.device)
        x = x.to(dtype)

        def wanted(rows):
            block = x[rows].double()
            scales = scale_of(block.abs().amax(0), fp8)
            return block / scales, scales

        check_transposed(quantize_fp8_transposed(x, offsets, dtype=fp8), x, offsets, wanted)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("sizes", BLOCKS.values(), ids=BLOCKS)
def test_fp8_wgrad_transposes_fp8(ranks, sizes, by_expert):
    """Numbers are exact, unless they become subnormal; all scales of a block and 128 columns are equal."""
    for cols in (16, 272):
        x, offsets = random_rows(sizes, cols, ranks.device)
        x[::7] *= 2.0**-9
        x, x_scale = epmoe.quantize_fp8(x, pow2=True)

        def wanted(rows):
            sharing = rows
            if by_expert:
                sharing, = (slice(begin, end) for _, begin, end, _ in blocks_of_experts(offsets, len(x))
                            if begin <= rows.start < end)
            of_group = x_scale[sharing].amax(0).double().repeat_interleave(128)[:cols]
            each = x_scale[rows].double().repeat_interleave(128, 1)[:, :cols]
            return x[rows].double() * each / of_group, of_group

        for scales in (x_scale, x_scale.contiguous()):
            got = quantize_fp8_transposed(x, offsets, scales, by_expert=by_expert)
            check_transposed(got, x, offsets, wanted, by_expert)


def test_fp8_wgrad_nan_infinity_zeros_and_large_numbers(ranks):
    x = torch.ones(128, 128, device=ranks.device)
    x[:, 1] = 0
    x[3, 2], x[4, 3], x[:, 4], x[5, 5] = math.nan, math.inf, 3e38, -448.0
    offsets = torch.tensor([0, 128], dtype=torch.int32, device=ranks.device)
    q, scales = (t.cpu() for t in quantize_fp8_transposed(x, offsets))
    numbers = q[:, :128].float().t()
    assert scales[0, 1] == 2.0**-108 and not numbers[:, 1].any()
    assert numbers[3, 2].isnan() and numbers[:, 2].isnan().sum() == 1 and scales[0, 2] == 2.0**-8
    assert numbers[4, 3].isnan() and not numbers[:4, 3].any() and scales[0, 3].isinf()
    assert (numbers[:, 4] >= 224).all() and numbers[5, 5] == -448 and scales[0, 5] == 1


@pytest.mark.cuda_only
@pytest.mark.parametrize("dtype", [*WIDE, E4M3], ids=str)
def test_fp8_wgrad_transposes_to_the_bits_of_the_cpu(ranks, dtype):
    for sizes in ([1, 0, 128, 300, 17, 0], [2000, 1, 3000], [50] * 40):
        for cols in (16, 1040):
            x, offsets = random_rows(sizes, cols, "cpu")
            x, scales = epmoe.quantize_fp8(x, pow2=True) if dtype == E4M3 else (x.to(dtype), None)
            want = quantize_fp8_transposed(x, offsets, scales)
            moved = [t if t is None else t.to(ranks.device) for t in (x, offsets, scales)]
            for got, wanted in zip(quantize_fp8_transposed(*moved), want):
                assert torch.equal(bits(got.cpu()), bits(wanted))


# ---- transposed weights ----

@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("shape", [(3, 256, 384), (2, 272, 208), (1, 16, 16), (0, 128, 128)], ids=str)
def test_fp8_wgrad_weights_in_both_orders(ranks, shape, dtype):
    num, n, k = shape
    g = generator(*shape)
    weight = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-6, 3, (num, n, 1), generator=g)
    weight = weight.to(dtype).to(ranks.device)
    q, scales, q_t, scales_t = quantize_fp8_weight_pair(weight)
    assert torch.equal(bits(q_t), bits(q).mT) and torch.equal(scales_t, scales.mT)
    assert q.is_contiguous() and q_t.is_contiguous() and scales.shape == (num, -(-n // 128), -(-k // 128))
    for e in range(num):
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                block = weight[e, i:i + 128, j:j + 128].double()
                scale = scale_of(block.abs().max(), E4M3)
                assert scales[e, i // 128, j // 128].double() == scale
                assert torch.equal(bits(q[e, i:i + 128, j:j + 128]), bits((block / scale).float().to(E4M3)))


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

def operands(sizes, n, k, device, a_dtype, scales, seed=0):
    """a, its scales, b, its scales, offsets.  b is made from FP8, unless scales is "column"."""
    dy, offsets = random_rows(sizes, n, device, seed)
    x, _ = random_rows(sizes, k, device, seed + 1)
    rows, of_rows = epmoe.quantize_fp8(x, pow2=True) if scales != "column" else (x, None)
    b = quantize_fp8_transposed(rows, offsets, of_rows, by_expert=scales == "expert")
    if scales != "expert":
        return *quantize_fp8_transposed(dy.bfloat16(), offsets, dtype=a_dtype), *b, offsets
    rows, of_rows = epmoe.quantize_fp8(dy, pow2=True)
    a, a_scale = quantize_fp8_transposed(rows, offsets, of_rows, by_expert=True)
    return a if a_dtype == E4M3 else a.float().to(E5M2), a_scale, *b, offsets


def products64(a, a_scale, b, b_scale, offsets):
    """The sum for each expert in float64, and the same sum of magnitudes."""
    num_rows, num_blocks = int(offsets[-1]), a.shape[1] // 128
    if len(a_scale) != num_blocks or a_scale.shape[1] != len(a):  # of experts
        wide = [torch.full((num_blocks, len(t)), math.nan, device=t.device) for t in (a, b)]
        for e, begin, end, first in blocks_of_experts(offsets, num_rows):
            for to, scale in zip(wide, (a_scale, b_scale)):
                to[first:first - (begin - end) // 128] = scale[e].repeat_interleave(128)[:to.shape[1]]
        a_scale, b_scale = wide
    for _, begin, end, first in blocks_of_experts(offsets, num_rows):
        used = slice(first, first - (begin - end) // 128)
        left, right = (t.unflatten(1, (-1, 128))[:, used].double() * s[used].double().t()[..., None]
                       for t, s in ((a, a_scale), (b, b_scale)))
        left, right = left.flatten(1), right.flatten(1)
        yield left @ right.t(), left.abs() @ right.abs().t()


def error_of_sums(device):
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return TENSOR_CORES if on_hopper else FLOAT32


@pytest.mark.parametrize("a_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scales", ["column", "block", "expert"])
@pytest.mark.parametrize("n, k", [(32, 16), (272, 208), (128, 528)])
@pytest.mark.parametrize("sizes", [SIZES["mixed"], BLOCKS["hot"], BLOCKS["empty"]], ids=str)
def test_fp8_wgrad_equals_sums_in_float64(ranks, sizes, n, k, scales, a_dtype):
    factors = operands(sizes, n, k, ranks.device, a_dtype, scales)
    for dtype in (torch.bfloat16, torch.float16):
        got = grouped_wgrad_fp8(*factors, dtype, scales=scales)
        assert got.shape == (len(sizes), n, k) and got.dtype == dtype
        for each, (want, size) in zip(got, products64(*factors)):
            slack = EPS[dtype] * want.abs() + error_of_sums(ranks.device) * size + TINY[dtype]
            assert ((each.double() - want).abs() <= slack).all()


@pytest.mark.parametrize("scales", ["column", "block", "expert"])
@pytest.mark.parametrize("alpha", [1.0, -0.7])
def test_fp8_wgrad_adds_to_float32(ranks, alpha, scales):
    """Numbers around the output keep their bits, and so do those of experts without rows."""
    sizes, n, k = SIZES["mixed"], 272, 208
    factors = operands(sizes, n, k, ranks.device, E4M3, scales)
    whole = torch.randn(len(sizes) * n * k + 128, generator=generator(4)).to(ranks.device)
    out, before = whole[64:-64].view(len(sizes), n, k), whole.clone()
    version = out._version
    assert grouped_wgrad_fp8(*factors, out=out, alpha=alpha, scales=scales) is out
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
    factors = operands(SIZES["mixed"], 272, 208, ranks.device, E4M3, "block")
    results = []
    for _ in range(3):
        out = torch.ones(len(SIZES["mixed"]), 272, 208, device=ranks.device)
        for scales in ("column", "block"):  # the same numbers, and so the same bits
            grouped_wgrad_fp8(*factors, out=out, alpha=0.3, scales=scales)
        results.append((out, grouped_wgrad_fp8(*factors), grouped_wgrad_fp8(*factors, scales="block")))
    for out, by_col, by_block in results:
        assert torch.equal(out, results[0][0]) and torch.equal(by_col, results[0][1])
        assert torch.equal(by_block, by_col)


def test_fp8_wgrad_is_near_the_gradient(ranks):
    """The error of the quantisation: three bits of a mantissa, at random."""
    sizes, n, k = [300, 129], 128, 256
    (dy, offsets), (x, _) = random_rows(sizes, n, ranks.device), random_rows(sizes, k, ranks.device, 5)
    dy, x = dy.bfloat16(), x.bfloat16()
    want = torch.ops.epmoe.grouped_gemm(dy, x, offsets, None, None, None, None, 2, 0, False, None).double()
    rows, scales = epmoe.quantize_fp8(x, pow2=True)
    factors = *quantize_fp8_transposed(dy, offsets), *quantize_fp8_transposed(rows, offsets, scales), offsets
    got = grouped_wgrad_fp8(*factors, scales="block").double()
    assert (got - want).norm() < 0.06 * want.norm()
    factors = []
    for t in (dy, x):
        rows, scales = epmoe.quantize_fp8(t, pow2=True)
        factors += quantize_fp8_transposed(rows, offsets, scales, by_expert=True)
    got = grouped_wgrad_fp8(*factors, offsets, scales="expert").double()
    assert (got - want).norm() < 0.06 * want.norm()


# ---- arguments ----

def test_fp8_wgrad_refuses_wrong_arguments(ranks):
    x, offsets = random_rows([5], 16, ranks.device)
    q, scales = quantize_fp8_transposed(x, offsets)
    whole = torch.zeros(1, 16, 16, device=ranks.device)
    for error, text, call in (
            (TypeError, "float8", lambda: quantize_fp8_transposed(x, offsets, dtype=torch.bfloat16)),
            (TypeError, "float8", lambda: quantize_fp8_transposed(x, offsets, torch.ones(13, 1))),
            (TypeError, "int32", lambda: quantize_fp8_transposed(x, offsets.long())),
            (ValueError, "rows", lambda: quantize_fp8_transposed(x[0], offsets)),
            (TypeError, "int64", lambda: quantize_fp8_transposed(x.long(), offsets)),
            (ValueError, "weights", lambda: quantize_fp8_weight_pair(x)),
            (TypeError, "int64", lambda: quantize_fp8_weight_pair(whole.long())),
            (TypeError, "a: wanted", lambda: grouped_wgrad_fp8(x, scales, q, scales, offsets)),
            (TypeError, "b: wanted", lambda: grouped_wgrad_fp8(q, scales, x, scales, offsets)),
            (TypeError, "float32",
             lambda: grouped_wgrad_fp8(q, scales, q, scales, offsets, out=whole.half())),
            (TypeError, "bfloat16",
             lambda: grouped_wgrad_fp8(q, scales, q, scales, offsets, torch.float64))):
        with pytest.raises(error, match=text):
            call()


def test_fp8_wgrad_takes_any_strides_and_addresses(ranks):
    x, offsets = random_rows([40, 3], 16, ranks.device)
    want = quantize_fp8_transposed(x, offsets)
    for rows in (misaligned(x), x.t().contiguous().t()):
        for got, wanted in zip(quantize_fp8_transposed(rows, misaligned(offsets)), want):
            assert torch.equal(bits(got), bits(wanted))
