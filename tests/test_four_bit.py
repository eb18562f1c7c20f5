"""Weights of 4 bits: the layout of the kernels, quantisation, and the forms of checkpoints.

Expected values come from loops over single weights, written from the definitions of the formats.
"""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epmoe
from cases import first as quick, generator
from epmoe.gemm import four_bit
from epmoe.gemm.four_bit import Int4, Mxfp4
from four_bit_cases import E2M1, awq, gptq, low_first, random_codes, same, weights_of, words_of

pytestmark = pytest.mark.cpu_only
INT4 = [Int4(g, z) for g in (32, 64, 128) for z in (False, True)]
DTYPES = [torch.bfloat16, torch.float16]


# ---- formats ----


def test_four_bit_formats_by_name():
    assert four_bit.as_format("mxfp4") == Mxfp4() and four_bit.as_format("int4") == Int4(32, False)
    assert four_bit.as_format(Int4(128, True)) == Int4(128, True) == epmoe.Int4(128, zero_points=True)
    assert (Mxfp4().name, Mxfp4().group_size, Mxfp4().zero_points) == ("mxfp4", 32, False)
    assert repr(Int4(64)) == "Int4(group_size=64, zero_points=False)"
    with pytest.raises(ValueError, match="'fp4': must be \"mxfp4\", \"int4\""):
        four_bit.as_format("fp4")
    with pytest.raises(TypeError, match="torch.int8"):
        four_bit.as_format(torch.int8)
    for group in (0, 16, 256, -32):
        with pytest.raises(ValueError, match=f"group_size {group}: must be 32, 64 or 128"):
            Int4(group)


def test_four_bit_shapes_and_dtypes():
    assert four_bit.shapes(Mxfp4(), 3, 128, 320) == ((3, 128, 160), (3, 2, 2, 512), None)
    assert four_bit.shapes(Int4(64), 3, 128, 256) == ((3, 128, 128), (3, 2, 1, 256), None)
    assert four_bit.shapes(Int4(128, True), 3, 192, 384) == ((3, 192, 192), *[(3, 3, 2, 128)] * 2)
    assert four_bit.scale_dtype(Mxfp4(), torch.float16) == torch.uint8
    assert four_bit.scale_dtype(Int4(), torch.float16) == torch.float16


@pytest.mark.parametrize("format, unit", [(Mxfp4(), 64), (Int4(32), 64), (Int4(64), 64), (Int4(128), 128)])
def test_four_bit_columns_are_multiples_of_the_layout_and_the_group(format, unit):
    for k in (unit, 3 * unit):
        four_bit.check_columns(format, "hidden", k)
    for k in (unit - 32, unit + 32, unit + unit // 2):
        with pytest.raises(ValueError, match=f"hidden {k} with weights in {format.name} .*of {unit}"):
            four_bit.check_columns(format, "hidden", k)


# ---- the layout of the kernels ----


def pair_of(word, i):
    """Pair i of a word of MXFP4, each code in one half: its sign in bit 15, the others in bits 8 to 6."""
    shifted = (word, word << 4, word << 10 | word >> 22, word << 6 ^ word >> 2)[i]
    return shifted & 0x81C081C0


@pytest.mark.parametrize("format", [Mxfp4(), Int4()], ids=str)
def test_four_bit_layout_is_the_one_that_kernels_read(format):
    codes = random_codes(2, 128, 192)
    numbers = four_bit.pack(format, codes)
    assert numbers.shape == (2, 128, 96) and numbers.dtype == torch.uint8 and numbers.is_contiguous()
    words = numbers.view(torch.int32).reshape(2, 2, 3, 32, 4, 2, 2).tolist()  # of 64 rows, of 64 values of k
    for e, n, k in itertools.product(range(2), range(128), range(192)):
        i, c, half = k % 64 // 8, k % 8 // 2, k % 2
        word = words[e][n // 64][k // 64][n % 64 // 2][c][n % 2][i // 4] & 0xFFFFFFFF
        if isinstance(format, Int4):
            code = word >> 4 * (i % 4 + 4 * half) & 15
        else:
            found = pair_of(word, i % 4) >> 16 * half & 0xFFFF
            code = found >> 15 << 3 | found >> 6 & 7
        assert code == codes[e, n, k], (e, n, k)


@pytest.mark.parametrize("format", [Mxfp4(), Int4()], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (5, 64, 128), (2, 3, 128, 320), (0, 64, 64), (2, 64, 256)])
def test_four_bit_layout_round_trip(format, shape):
    codes = random_codes(*shape)
    assert torch.equal(four_bit.unpack(format, four_bit.pack(format, codes)), codes)
    strided = random_codes(*shape[:-1], 2 * shape[-1])[..., ::2]
    assert torch.equal(four_bit.unpack(format, four_bit.pack(format, strided)), strided)


@pytest.mark.parametrize("shape, text", [((63, 64), "63 rows"), ((64, 32), "32 columns"),
                                         ((2, 96, 64), "96 rows"), ((2, 64, 96), "96 columns")])
def test_four_bit_layout_of_other_sizes(shape, text):
    for format in (Mxfp4(), Int4(32)):
        with pytest.raises(ValueError, match=f"weights: {text} of weights in {format.name}: must be a mult"):
            four_bit.pack(format, random_codes(*shape))


@pytest.mark.parametrize("format", INT4, ids=str)
def test_four_bit_layout_of_scales(format):
    k = 320 if format.group_size != 128 else 384
    numbers = four_bit.pack(format, random_codes(2, 128, k))
    scales = torch.rand(2, 128, k // format.group_size)
    packed = four_bit.pack_scales(format, scales)
    in_block = 256 // format.group_size
    assert packed.shape == (2, 2, 2, 64 * in_block)
    for n, group in itertools.product(range(128), range(k // format.group_size)):
        at = n % 64 * in_block + group % in_block
        assert torch.equal(packed[:, n // 64, group // in_block, at], scales[:, n, group])
    assert packed.count_nonzero() == scales.count_nonzero()  # what is past k is 0
    assert torch.equal(four_bit.unpack_scales(format, numbers, packed), scales)


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for t in found if isinstance(found, (list, tuple)) else [found]:
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel() * t.itemsize)
        return found


@pytest.mark.parametrize("format", [Mxfp4(), Int4()], ids=str)
def test_four_bit_layout_is_made_of_one_matrix_after_the_other(format):
    """The copies in 32 bits are those of one of 16: no tensor is larger than the result."""
    codes = random_codes(16 * 64, 128)
    with LargestTensor() as made:
        if isinstance(format, Mxfp4):
            scales = torch.full((16, 64, 4), 120, dtype=torch.uint8)
            got = four_bit.read_mxfp4(low_first(codes).unflatten(0, (16, 64)), scales)
            four_bit.write_mxfp4(*got[:2])
        else:
            words = words_of(codes).unflatten(0, (16, 64))
            got = four_bit.read_compressed_tensors(format, words, torch.ones(16, 64, 4).half(), None,
                                                   torch.float16)
            four_bit.write_compressed_tensors(*got)
        numbers = got.numbers.numel()
    assert torch.equal(four_bit.unpack(format, got.numbers).flatten(0, 1), codes)
    assert made.largest == numbers


# ---- what a weight is ----


@pytest.mark.parametrize("dtype", quick(1, DTYPES), ids=str)
def test_four_bit_mxfp4_all_codes_with_all_scales(dtype):
    """Also float16, where the small ones are rounded, to even halfway, and bfloat16, which has all."""
    scales = torch.arange(192).clamp(max=128).to(torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(192, 2 * 2)
    got = four_bit.dequantize(Mxfp4(), four_bit.pack(Mxfp4(), codes),
                              four_bit.pack_scales(Mxfp4(), scales[:, None].repeat(1, 2)), None, dtype)
    exact = torch.tensor([[E2M1[c] * 2.0 ** (s - 127) for c in range(16)] * 4 for s in scales.tolist()],
                         dtype=torch.float64)
    assert same(got, exact.to(dtype))
    if dtype == torch.bfloat16:
        assert torch.equal(got.double(), exact)
    else:
        table = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
        table = table[table.isfinite()].double()
        nearest = (table[:, None] - exact[:, :16].abs().flatten()).abs().amin(0)
        assert torch.equal((got.double() - exact).abs()[:, :16].flatten(), nearest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", INT4, ids=str)
def test_four_bit_int4_is_rounded_once(format, dtype):
    n, k = 64, 256
    g = generator(format.group_size, 1)
    codes = random_codes(n, k)
    scales = (torch.randn(n, k // format.group_size, generator=g) * 0.1).to(dtype)
    scales[0, 0], scales[1, 0] = torch.finfo(dtype).smallest_normal / 3, torch.finfo(dtype).max / 16
    zeros = random_codes(n, k // format.group_size, seed=1) if format.zero_points else None
    got = four_bit.dequantize(format, four_bit.pack(format, codes), four_bit.pack_scales(format, scales),
                              None if zeros is None else four_bit.pack_scales(format, zeros), dtype)
    assert same(got, weights_of(codes, scales, zeros).to(dtype))


def test_four_bit_dequantize_takes_several_experts():
    codes, scales = random_codes(3, 64, 128), torch.rand(3, 64, 2, generator=generator(2)).half()
    got = four_bit.dequantize(Int4(64), four_bit.pack(Int4(64), codes),
                              four_bit.pack_scales(Int4(64), scales), None, torch.float16)
    assert got.shape == (3, 64, 128)
    for e in range(3):
        assert same(got[e], weights_of(codes[e], scales[e], None).half())


# ---- quantisation ----


def mxfp4_by_loop(weight):
    """(codes [N, K], scales [N, K/32]): for each weight the code at the smallest distance."""
    rows, row_scales = [], []
    for row in weight.double().tolist():
        codes, scales = [], []
        for first in range(0, len(row), 32):
            group = row[first:first + 32]
            most = max(map(abs, group))
            exponent = math.floor(math.log2(most)) - 2 if most else -127
            exponent = max(exponent, -127)
            scales.append(exponent + 127)
            for x in group:
                magnitude = abs(x) / 2.0 ** exponent
                code = min(range(8), key=lambda c: (abs(E2M1[c] - magnitude), c % 2))
                codes.append(code + 8 * (math.copysign(1, x) < 0))
        rows.append(codes)
        row_scales.append(scales)
    return torch.tensor(rows, dtype=torch.uint8), torch.tensor(row_scales, dtype=torch.uint8)


def mxfp4_weights(dtype):
    """[N, 64] weights: random ones, all halves between numbers of E2M1, zeros, subnormal and large ones."""
    g = generator(7)
    rows = [torch.randn(6, 64, generator=g) * 2.0 ** torch.randint(-9, 4, (6, 1), generator=g)]
    halves = torch.arange(-64, 64)[None].view(2, 64) / 8
    halves[:, ::32] = 4.0
    rows += [halves, halves * 1.9375, halves / 512, torch.zeros(1, 64), -torch.zeros(1, 64)]
    rows.append(torch.linspace(-1, 1, 64)[None] * float(torch.finfo(dtype).max))
    tiny = torch.finfo(dtype).smallest_normal
    rows += [torch.linspace(-2, 2, 64)[None] * tiny, torch.linspace(-1, 1, 64)[None] * tiny / 4]
    return torch.cat(rows).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_four_bit_quantize_mxfp4_gives_the_nearest_codes(dtype):
    weight = mxfp4_weights(dtype)
    blocks, scales = epmoe.quantize_mxfp4(weight)
    want, want_scales = mxfp4_by_loop(weight)
    assert torch.equal(scales, want_scales)
    assert torch.equal(blocks, low_first(want))


def test_four_bit_quantize_mxfp4_all_numbers_of_bfloat16():
    """In groups of like magnitude, and beside a larger number."""
    every = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    others = every.flip(0).view(-1, 8).repeat(1, 3)
    for rows in (every.view(-1, 32), torch.cat((every.view(-1, 8), others), 1)):
        blocks, scales = epmoe.quantize_mxfp4(rows)
        assert (scales <= 252).all()
        table = torch.tensor(E2M1, dtype=torch.float64)
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
        inverse = 2.0 ** (127 - scales.double())
        scaled = rows.double() * inverse
        error = (table[codes.long()] - scaled).abs()
        nearest = (table[:, None, None] - scaled).abs().amin(0)
        assert torch.equal(error, nearest)
        assert torch.equal(codes >= 8, rows.signbit())
        most = scaled.abs().amax(1)
        assert ((most >= 4) & (most < 8) | (scales[:, 0] == 0)).all()


@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 5, 96), (0, 4, 64), (2, 0, 64)])
def test_four_bit_quantize_takes_any_leading_dimensions(shape):
    weight = torch.randn(shape, generator=generator(*shape))
    blocks, scales = epmoe.quantize_mxfp4(weight)
    assert blocks.shape == (*shape[:-1], shape[-1] // 32, 16) and scales.shape == blocks.shape[:-1]
    packed, int_scales = epmoe.quantize_int4(weight)
    assert packed.shape == (*shape[:-1], shape[-1] // 8) and int_scales.shape == scales.shape
    flat = weight.reshape(-1, shape[-1])
    for got, want in zip((blocks, scales, packed, int_scales),
                         (*epmoe.quantize_mxfp4(flat), *epmoe.quantize_int4(flat))):
        assert same(got.reshape(want.shape), want)


def int4_by_loop(weight, format):
    """(codes, scales, zeros): each weight has the nearest code."""
    dtype = torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype
    group = format.group_size
    codes, scales, zeros = [], [], []
    for row in weight.float().tolist():
        for first in range(0, len(row), group):
            part = row[first:first + group]
            if format.zero_points:
                low, high = min(*part, 0.0), max(*part, 0.0)
                scale = torch.tensor(high, dtype=torch.float32) - low
            else:
                scale = torch.tensor(2 * max(map(abs, part)), dtype=torch.float32)
            scale = (scale / 15).clamp(min=2.0**-23).to(dtype).float().item()
            zero = 8
            if format.zero_points:
                zero = min(round(float(torch.tensor(-low) / scale)), 15)
            scales.append(scale)
            zeros.append(zero)
            codes += [min(max(round(float(torch.tensor(x) / scale)) + zero, 0), 15) for x in part]
    shape = len(weight), -1
    return (torch.tensor(codes).to(torch.uint8).view(shape), torch.tensor(scales).to(dtype).view(shape),
            torch.tensor(zeros).to(torch.uint8).view(shape))


def int4_weights(dtype):
    g = generator(9)
    rows = [torch.randn(12, 128, generator=g) * 2.0 ** torch.randint(-9, 4, (12, 1), generator=g),
            torch.rand(1, 128, generator=g) + 1, -torch.rand(1, 128, generator=g) - 1, torch.zeros(1, 128),
            torch.arange(-64, 64)[None] / 8.0]
    return torch.cat(rows).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("format", INT4, ids=str)
def test_four_bit_quantize_int4_gives_the_nearest_codes(format, dtype):
    weight = int4_weights(dtype)
    got = epmoe.quantize_int4(weight, format.group_size, format.zero_points)
    codes, scales, zeros = int4_by_loop(weight, format)
    assert torch.equal(got[0], words_of(codes))
    assert same(got[1], scales)
    assert len(got) == 2 + format.zero_points
    if format.zero_points:
        assert torch.equal(got[2], words_of(zeros.T).T)
        assert zeros[-4:-2].unique().tolist() == [0, 15]  # all positive, all negative
    values = weights_of(codes, scales, zeros)
    error = (values - weight.double()).abs().unflatten(1, (-1, format.group_size))
    most = 1.1 if format.zero_points else 0.54  # halves, and 15 times the rounding of a scale
    assert (error <= scales.double()[..., None] * most).all()


@pytest.mark.parametrize("format", [Mxfp4(), *INT4], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_bit_quantize_into_the_layout(format, dtype):
    weight = torch.randn(2, 64, 256, generator=generator(4)).to(dtype)
    got = four_bit.quantize(format, weight, dtype)
    if isinstance(format, Mxfp4):
        want = four_bit.read_mxfp4(*epmoe.quantize_mxfp4(weight))
    else:
        parts = epmoe.quantize_int4(weight, format.group_size, format.zero_points)
        want = four_bit.read_compressed_tensors(format, *parts, *[None] * (3 - len(parts)), dtype)
    assert tuple(t.shape for t in got if t is not None) == tuple(
        s for s in four_bit.shapes(format, 2, 64, 256) if s is not None)
    for g, w in zip(got, want):
        assert (g is None and w is None) or same(g, w)
    # weights that the format can hold stay as they are
    again = four_bit.dequantize(format, *got, dtype)
    if isinstance(format, Mxfp4):
        for g, w in zip(four_bit.quantize(format, again, dtype), got):
            assert (g is None and w is None) or same(g, w)


def test_four_bit_mxfp4_of_dequantised_mxfp4_are_the_same_weights():
    """Also where the largest code of a group is small, or its scale: the new scale may then be another."""
    g = generator(11)
    most = torch.randint(8, (1024, 2, 1), generator=g, dtype=torch.uint8)
    codes = random_codes(1024, 2, 32)
    codes = (torch.minimum(codes & 7, most) | codes & 8).flatten(1)
    scales = torch.randint(129, (1024, 2), generator=g, dtype=torch.uint8)
    scales[:64] = torch.arange(64)[:, None] // 8
    packed = four_bit.read_mxfp4(low_first(codes), scales)
    want = four_bit.dequantize(Mxfp4(), *packed, torch.bfloat16)
    again = four_bit.quantize(Mxfp4(), want, torch.bfloat16)
    assert same(four_bit.dequantize(Mxfp4(), *again, torch.bfloat16), want)
    assert not torch.equal(again.scales, packed.scales)


@pytest.mark.parametrize("quantize", [epmoe.quantize_mxfp4, epmoe.quantize_int4])
@pytest.mark.parametrize("weight, error, text", [
    ([1.0], TypeError, "a tensor, got list"), (torch.ones(32), ValueError, r"\[\.\., N, K\].*\[32\]"),
    (torch.ones(2, 48), ValueError, "multiple of 32, got"),
    (torch.ones(2, 32).double(), TypeError, "float64"),
    (torch.ones(2, 32).to_sparse(), ValueError, "sparse"),
    (torch.full((2, 32), math.nan), ValueError, "NaN or infinity"),
    (torch.full((2, 32), -math.inf).half(), ValueError, "NaN or infinity"),
    (torch.ones(2, 32, requires_grad=True), RuntimeError, "no gradient"),
])
def test_four_bit_quantize_errors(quantize, weight, error, text):
    with pytest.raises(error, match=text):
        quantize(weight)


def test_four_bit_quantize_int4_errors_of_its_own():
    with pytest.raises(ValueError, match="group_size 48"):
        epmoe.quantize_int4(torch.ones(2, 96), 48)
    with pytest.raises(ValueError, match="multiple of 64, got"):
        epmoe.quantize_int4(torch.ones(2, 96), 64)
    with pytest.raises(ValueError, match="12 rows.*multiple of 8"):
        epmoe.quantize_int4(torch.ones(12, 64), 64, zero_points=True)
    assert epmoe.quantize_int4(torch.ones(2, 32, requires_grad=True).detach())
    for zero_points in (False, True):  # a scale of float16 is at most 65504
        large = torch.tensor(1.5e6).where(torch.arange(64) == 3, 1).expand(64, 64)
        with pytest.raises(ValueError, match="too large for scales of torch.float16"):
            four_bit.quantize(Int4(64, zero_points), large, torch.float16)
        four_bit.quantize(Int4(64, zero_points), large, torch.bfloat16)


@pytest.mark.parametrize("of_autocast, dtype", [(torch.bfloat16, torch.float16),
                                                (torch.float16, torch.bfloat16)])
def test_four_bit_quantizes_also_under_autocast_of_another_dtype(of_autocast, dtype):
    weight = torch.randn(2, 8, 64, generator=generator(8, 64)).to(dtype)
    want = epmoe.quantize_int4(weight, 64, zero_points=True)
    with torch.autocast("cpu", of_autocast):
        assert all(same(a, b) for a, b in zip(epmoe.quantize_int4(weight, 64, zero_points=True), want))
        moe = epmoe.EPMoE(64, 64, 2, 1, dtype=dtype, device="cpu", weight_dtype=Int4(64))
    moe.finalize()


# ---- checkpoints ----


def mxfp4_parts(n=64, k=192, leading=(2,), most=128):
    codes = random_codes(math.prod(leading) * n, k)
    scales = torch.randint(most + 1, (len(codes), k // 32), generator=generator(n, k), dtype=torch.uint8)
    return codes, scales, low_first(codes).view(*leading, n, k // 32, 16), scales.view(*leading, n, k // 32)


def exact_mxfp4(codes, scales):
    table = torch.tensor(E2M1, dtype=torch.float64)
    return table[codes.long()] * 2.0 ** (scales.double().repeat_interleave(32, 1) - 127)


@pytest.mark.parametrize("leading", [(), (3,), (2, 2)])
def test_four_bit_reads_and_writes_gpt_oss(leading):
    codes, scales, blocks, block_scales = mxfp4_parts(leading=leading)
    packed = four_bit.read_mxfp4(blocks, block_scales)
    assert torch.equal(four_bit.unpack(Mxfp4(), packed.numbers).view(codes.shape), codes)
    assert packed.zeros is None
    got = four_bit.dequantize(Mxfp4(), *packed, torch.bfloat16)
    assert torch.equal(got.double().view(codes.shape), exact_mxfp4(codes, scales))
    for t, want in zip(four_bit.write_mxfp4(*packed[:2]), (blocks, block_scales)):
        assert same(t, want) and t.is_contiguous()


def test_four_bit_reads_what_transformers_reads():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    _, _, blocks, scales = mxfp4_parts(leading=(3,))
    scales = scales.clamp(min=8)  # it computes in bfloat16, where ldexp loses 2^-127
    want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    got = four_bit.dequantize(Mxfp4(), *four_bit.read_mxfp4(blocks, scales), torch.bfloat16)
    assert same(got, want.mT.contiguous())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2], ids=str)
def test_four_bit_reads_deepseek_v4(dtype):
    codes, scales, blocks, block_scales = mxfp4_parts(leading=())
    packed = four_bit.read_mxfp4(blocks.flatten(-2).view(dtype), block_scales.view(torch.float8_e8m0fnu))
    want = four_bit.read_mxfp4(blocks, block_scales)
    assert same(packed.numbers, want.numbers) and same(packed.scales, want.scales)
    value = four_bit.dequantize(Mxfp4(), *packed, torch.bfloat16)
    scale = block_scales.view(torch.float8_e8m0fnu).double().repeat_interleave(32, 1)  # torch's conversion
    assert torch.equal(value.double(), torch.tensor(E2M1).double()[codes.long()] * scale)


@pytest.mark.parametrize("byte, text", [(129, r"3.w1: a scale is 2\^2 \(the byte 129\)"), (254, r"2\^127"),
                                        (255, r"3.w1: a scale is NaN")])
def test_four_bit_refuses_scales_that_kernels_cannot_read(byte, text):
    _, _, blocks, scales = mxfp4_parts()
    scales[1, 3, 2] = byte
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        with pytest.raises(ValueError, match=text):
            four_bit.read_mxfp4(blocks, scales.view(dtype), "3.w1")
    weight = torch.ones(1, 64, 64)
    four_bit.quantize(Mxfp4(), weight * 15.9, torch.bfloat16)
    with pytest.raises(ValueError, match="magnitude 16"):
        four_bit.quantize(Mxfp4(), weight * 16, torch.bfloat16)


def int4_parts(format, dtype, n=64, k=256, leading=(2,)):
    """(codes, scales, zeros) as matrices, zeros None for a format without."""
    rows, groups = math.prod(leading) * n, k // format.group_size
    scales = torch.randn(rows, groups, generator=generator(rows, k)).to(dtype)
    zeros = random_codes(rows, groups, seed=3) if format.zero_points else None
    return random_codes(rows, k), scales, zeros


def by_matrix(t, leading):
    """[rows, ..] of all matrices as [*leading, N, ..]."""
    return t.unflatten(0, (*leading, -1)) if leading else t


@pytest.mark.parametrize("leading", [(2, 2), *(pytest.param(v, marks=pytest.mark.long) for v in ((), (3,)))])
@pytest.mark.parametrize("format", INT4, ids=str)
def test_four_bit_reads_and_writes_compressed_tensors(format, leading):
    for dtype in DTYPES:
        codes, scales, zeros = int4_parts(format, dtype, leading=leading)
        packed, scale = by_matrix(words_of(codes), leading), by_matrix(scales, leading)
        zero_point = None if zeros is None else by_matrix(words_of(zeros.T).T, leading)
        got = four_bit.read_compressed_tensors(format, packed, scale, zero_point, dtype)
        weight = four_bit.dequantize(format, *got, dtype)
        assert same(weight.view(codes.shape), weights_of(codes, scales, zeros).to(dtype))
        for t, want in zip(four_bit.write_compressed_tensors(*got), (packed, scale, zero_point)):
            assert (t is None and want is None) or same(t, want) and t.is_contiguous()


def test_four_bit_zero_points_of_8_are_those_of_a_format_without():
    codes, scales, _ = int4_parts(Int4(64), torch.float16, leading=())
    eights = words_of(torch.full((4, 64), 8)).T
    plain = four_bit.read_compressed_tensors(Int4(64), words_of(codes), scales, None, torch.float16)
    also = four_bit.read_compressed_tensors(Int4(64), words_of(codes), scales, eights, torch.float16)
    assert also.zeros is None and same(also.numbers, plain.numbers)
    with_zeros = four_bit.read_compressed_tensors(Int4(64, True), words_of(codes), scales, None, scales.dtype)
    assert with_zeros.zeros.unique().tolist() == [8]
    unused = scales.clone()
    unused[:8, 0] = 0  # as in a place without an expert, where all is 0
    eights[0, 0] = 0
    four_bit.read_compressed_tensors(Int4(64), words_of(codes), unused, eights, torch.float16)
    with pytest.raises(ValueError, match=r"a zero point is not 8: use weight_dtype=epmoe.Int4\(64, zero_p"):
        four_bit.read_compressed_tensors(Int4(64), words_of(codes), scales, eights, torch.float16)


@pytest.mark.parametrize("format", INT4, ids=str)
def test_four_bit_reads_gptq(format):
    codes, scales, zeros = int4_parts(format, torch.float16, leading=())
    zeros = None if zeros is None else zeros.clamp(min=1)  # GPTQ has no 0
    want = weights_of(codes, scales, zeros).half()
    parts = gptq(codes, scales, zeros)
    for g_idx in (parts[3], parts[3].long(), None):
        got = four_bit.read_gptq(format, *parts[:3], g_idx, torch.float16)
        assert same(four_bit.dequantize(format, *got, torch.float16), want)
    several = [torch.stack((t, t)) for t in parts]
    got = four_bit.read_gptq(format, *several, torch.float16)
    assert same(four_bit.dequantize(format, *got, torch.float16), torch.stack((want, want)))


def test_four_bit_gptq_of_both_variants_and_what_it_refuses():
    codes, scales, _ = int4_parts(Int4(64), torch.float16, leading=())
    for is_v2 in (False, True):  # without zero points, both say 8
        got = four_bit.read_gptq(Int4(64), *gptq(codes, scales, None, is_v2), torch.float16)
        want = weights_of(codes, scales, None).half()
        assert same(four_bit.dequantize(Int4(64), *got, torch.float16), want)
    nines = torch.full(scales.shape, 9)
    with pytest.raises(ValueError, match=r"qzeros: a zero point is not 8"):
        four_bit.read_gptq(Int4(64), *gptq(codes, scales, nines, True), torch.float16)
    with pytest.raises(ValueError, match=r"3.gate_proj.qzeros: a stored zero point is 15"):
        four_bit.read_gptq(Int4(64, True), *gptq(codes, scales, nines * 0 + 16), torch.float16, "3.gate_proj")
    qweight, qzeros, stored_scales, g_idx = gptq(codes, scales, None)
    with pytest.raises(ValueError, match=r"3.up_proj.g_idx: .*act-order.*desc_act=False"):
        four_bit.read_gptq(Int4(64), qweight, qzeros, stored_scales, g_idx.flip(0), torch.float16,
                           "3.up_proj")


@pytest.mark.parametrize("format", INT4, ids=str)
def test_four_bit_reads_awq(format):
    codes, scales, zeros = int4_parts(format, torch.float16, leading=())
    want = weights_of(codes, scales, zeros).half()
    got = four_bit.read_awq(format, *awq(codes, scales, zeros), torch.float16)
    assert same(four_bit.dequantize(format, *got, torch.float16), want)


def test_four_bit_scales_are_rounded_to_the_dtype_of_the_layer():
    codes, scales, _ = int4_parts(Int4(32), torch.float16, leading=())
    got = four_bit.read_compressed_tensors(Int4(32), words_of(codes), scales, None, torch.bfloat16)
    assert got.scales.dtype == torch.bfloat16
    assert same(four_bit.unpack_scales(Int4(), got.numbers, got.scales), scales.bfloat16())
    scales = scales.float()
    for bad in (1e6, math.inf, math.nan):
        scales[2, 1] = bad
        with pytest.raises(ValueError, match="e: scales: a scale is NaN or too large for torch.float16"):
            four_bit.read_compressed_tensors(Int4(32), words_of(codes), scales, None, torch.float16, "e")


def test_four_bit_readers_check_shapes_and_dtypes():
    _, _, blocks, scales = mxfp4_parts()
    codes, int_scales, zeros = int4_parts(Int4(64, True), torch.float16, leading=())
    packed, zero_point = words_of(codes), words_of(zeros.T).T
    format = Int4(64, True)

    def mx(**change):
        four_bit.read_mxfp4(**dict(blocks=blocks, scales=scales, name="a") | change)

    def compressed(**change):
        four_bit.read_compressed_tensors(**dict(format=format, packed=packed, scale=int_scales, name="b",
                                                zero_point=zero_point, dtype=torch.float16) | change)

    def of_gptq(**change):
        parts = gptq(codes, int_scales, zeros.clamp(min=1))
        found = dict(zip((*names, "g_idx"), parts))
        four_bit.read_gptq(**found | dict(format=format, dtype=torch.float16, name="c") | change)

    def of_awq(**change):
        found = dict(zip(names, awq(codes, int_scales, zeros)))
        four_bit.read_awq(**found | dict(format=format, dtype=torch.float16, name="d") | change)

    names = "qweight", "qzeros", "scales"
    of_56_rows = codes[:56], int_scales[:56], zeros[:56].clamp(min=1)
    for read in (mx, compressed, of_gptq, of_awq):
        read()
    for read, change, error, text in (
            (mx, dict(blocks=blocks.float()), TypeError, "a: numbers: wanted torch.uint8 or"),
            (mx, dict(scales=scales.float()), TypeError, "a: scales: wanted torch.uint8 or"),
            (mx, dict(scales=scales[..., :5]), ValueError, r"a: scales: wanted shape \[2, 64, 6\], got"),
            (mx, dict(blocks=blocks[..., :5, :], scales=scales[..., :5]), ValueError, "a: the size 160"),
            (mx, dict(blocks=blocks[:, :48], scales=scales[:, :48]), ValueError, "a: 48 rows of .* in mxfp4"),
            (compressed, dict(packed=packed[:32], scale=int_scales[:32], zero_point=zero_point[:4]),
             ValueError, "b: 32 rows of weights in int4"),
            (compressed, dict(packed=packed.long()), TypeError, "b: packed weights: wanted torch.int32"),
            (compressed, dict(packed=packed[:, :24]), ValueError, r"b: scales: wanted shape \[64, 3\]"),
            (compressed, dict(packed=packed[:, :20]), ValueError, "b: the size 160"),
            (compressed, dict(scale=int_scales.int()), TypeError, "b: scales"),
            (compressed, dict(scale=int_scales[1:]), ValueError, r"b: scales: wanted shape \[64, 4\]"),
            (compressed, dict(zero_point=zero_point.T), ValueError, r"b: zero points: wanted shape \[8, 4\]"),
            (of_gptq, dict(qzeros=zero_point), ValueError, r"c.qzeros: wanted shape \[4, 8\]"),
            (of_gptq, dict(scales=int_scales), ValueError, r"c.scales: wanted shape \[4, 64\]"),
            (of_gptq, dict(g_idx=torch.zeros(3, dtype=torch.int32)), ValueError, r"c.g_idx: wanted shape"),
            (of_gptq, dict(qweight=packed.T.to(torch.int16)), TypeError, "c.qweight: wanted torch.int32"),
            (of_gptq, dict(zip(names, gptq(*of_56_rows))), ValueError, "c: 56 rows of weights in int4"),
            (of_awq, dict(zip(names, awq(*of_56_rows))), ValueError, "d: 56 rows of weights in int4"),
            (of_awq, dict(qweight=packed.T), ValueError, "d: the size 32"),
            (of_awq, dict(qzeros=zero_point.T[:, :1]), ValueError, r"d.qzeros: wanted shape \[4, 8\]")):
        with pytest.raises(error, match=text):
            read(**change)
