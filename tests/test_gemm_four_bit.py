"""grouped_gemm with weights of 4 bits: it has the bits of the product with the weights in 16 bits."""

import pytest
import torch

import epmoe
from cases import first, misaligned, poison_memory
from epmoe.gemm import four_bit, grouped, quantize, wgrad_fp8
from outcomes import check_outcomes, outcome

FORMATS = [four_bit.Mxfp4(), four_bit.Int4(32), four_bit.Int4(64, True), four_bit.Int4(128),
           four_bit.Int4(128, True)]
# experts, N, K, rows of each expert; the last ones have tiles for large M on a GPU
SHAPES = [(64, 64, (1,)), (192, 320, (4, 0, 9, 33)), (576, 640, (7, 24, 1)), (128, 256, (0, 300, 70, 0, 513)),
          (320, 1152, (65, 128, 0, 257, 190))]


def _problem(format, n, k, sizes, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k = -(-k // max(64, format.group_size)) * max(64, format.group_size)
    weight = torch.randn(len(sizes), n, k, generator=generator)
    weight *= torch.exp2(torch.randint(-9, 2, (len(sizes), n, 1), generator=generator))
    packed = four_bit.Packed(*(None if t is None else t.to(device)
                               for t in four_bit.quantize(format, weight, dtype)))
    x = torch.randn(sum(sizes), k, generator=generator).to(dtype).to(device)
    bias = torch.randn(len(sizes), n, generator=generator).to(dtype).to(device)
    row_weight = torch.rand(sum(sizes), generator=generator).to(device)
    return packed, x, torch.tensor(sizes, device=device), bias, row_weight


def _devices():
    return ["cpu", *["cuda"] * (bool(epmoe._C.HAS_CUDA) and torch.cuda.is_available())]


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("dtype, shapes", first(1, [
    (torch.bfloat16, SHAPES), (torch.float16, SHAPES[:2]), (torch.float16, SHAPES[2:])]),
    ids=("bfloat16", "float16-small", "float16-large"))
@pytest.mark.parametrize("format", first(2, FORMATS), ids=repr)
def test_the_bits_of_16_bit_weights(format, dtype, shapes, device):
    for i, (n, k, sizes) in enumerate(shapes):
        packed, x, counts, bias, row_weight = _problem(format, n, k, sizes, dtype, device, i)
        plain = four_bit.dequantize(format, *packed, dtype)
        for activation in (None, "swiglu", "gpt_oss", "gelu", epmoe.SwiGLU(1.3, 2.0, 1), "relu2"):
            for options in ({}, {"bias": bias, "row_weight": row_weight}):
                poison_memory()
                got = epmoe.grouped_gemm(x, packed.numbers, counts, activation=activation, **options,
                                         b_scale=packed.scales, b_zero=packed.zeros)
                want = epmoe.grouped_gemm(x, plain, counts, activation=activation, **options)
                assert torch.equal(got, want), (n, k, sizes, activation)


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_in_fp8_they_have_the_bits_of_quantised_16_bit_weights(format, dtype, device):
    for n, k, sizes in [(64, 64, (1,)), (192, 320, (1, 2)), (576, 640, (1, 1, 1))]:
        packed = _problem(format, n, k, sizes, dtype, device)[0]
        packed.scales[0, 0, 0, :3] = four_bit._BIAS if isinstance(format, four_bit.Mxfp4) else 0  # 2^-127
        plain = four_bit.dequantize(format, *packed, dtype)
        poison_memory()
        got = quantize.expand_fp8(*packed, dtype)
        want = wgrad_fp8.quantize_fp8_weight_pair(plain)
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(got[1], want[1])


def test_in_fp8_mxfp4_is_exact():
    """Where the scales of a block differ by less than 2^13."""
    weight = torch.randn(2, 128, 256) * torch.exp2(torch.arange(128) % 12 - 11.0)[:, None]
    packed = four_bit.quantize(four_bit.Mxfp4(), weight, torch.bfloat16)
    q, scales = quantize.expand_fp8(*packed, torch.bfloat16)
    got = q.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert torch.equal(got, four_bit.dequantize(four_bit.Mxfp4(), *packed, torch.float32))


def test_in_fp8_wrong_arguments():
    numbers, scales, _ = four_bit.quantize(four_bit.Mxfp4(), torch.ones(2, 64, 128), torch.bfloat16)
    zeros = torch.zeros_like(scales)
    for wrong, error, text in [((numbers[:, :32], scales, None), "ValueError", "32 by 128"),
                               ((numbers, scales[:1], None), "ValueError", "scales of the weights"),
                               ((numbers, scales, zeros), "ValueError", "MXFP4 has no zeros"),
                               ((numbers[0], scales, None), "ValueError", "[L, N, K / 2], got [64, 64]"),
                               ((numbers, scales.float(), None), "TypeError", "bfloat16"),
                               ((numbers.int(), scales, None), "TypeError", "uint8"),
                               ((None, scales, None), "TypeError", "NoneType"),
                               ((numbers, scales, 8), "TypeError", "int")]:
        check_outcomes([outcome(lambda: quantize.expand_fp8(*wrong, torch.bfloat16))], error, text)
    check_outcomes([outcome(lambda: quantize.expand_fp8(numbers, scales, None, torch.float32))], "TypeError",
                   "dtype torch.float32: must be")


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_in_fp8_they_may_have_any_strides_and_addresses(format, device):
    """As in grouped_gemm."""
    packed = _problem(format, 128, 512, (1, 2), torch.bfloat16, device)[0]
    want = quantize.expand_fp8(*packed, torch.bfloat16)
    for change in (misaligned, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)):
        got = quantize.expand_fp8(*(None if t is None else change(t) for t in packed), torch.bfloat16)
        assert all(torch.equal(g.view(torch.uint8), w.view(torch.uint8)) for g, w in zip(got, want))


@pytest.mark.parametrize("device", _devices())
def test_against_float64(device):
    for format in FORMATS:
        packed, x, counts, _, _ = _problem(format, 192, 384, (5, 40, 0, 90), torch.bfloat16, device)
        weight = four_bit.dequantize(format, *packed, torch.bfloat16).double()
        rows = torch.repeat_interleave(torch.arange(4, device=device), counts)
        want = torch.einsum("mk,mnk->mn", x.double(), weight[rows])
        size = torch.einsum("mk,mnk->mn", x.double().abs(), weight[rows].abs())
        got = epmoe.grouped_gemm(x, packed.numbers, counts, b_scale=packed.scales, b_zero=packed.zeros)
        # the result is rounded to 8 bits; sums in float32 add less than 2^-14 of their magnitudes
        assert ((got.double() - want).abs() <= 2**-8 * want.abs() + 2**-14 * size).all()


@pytest.mark.cuda_only
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_the_kernel_for_any_gpu(format):
    packed, x, counts, bias, _ = _problem(format, 192, 320, (4, 0, 9, 33), torch.float16, "cuda")
    plain = four_bit.dequantize(format, *packed, torch.float16)
    for activation in (None, "swiglu", "gpt_oss"):
        got = epmoe.grouped_gemm(x, packed.numbers, counts, bias=bias, activation=activation, portable=True,
                                 b_scale=packed.scales, b_zero=packed.zeros)
        assert torch.equal(got, epmoe.grouped_gemm(x, plain, counts, bias=bias, activation=activation,
                                                   portable=True))


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("is_refused", [False, True], ids=["kernel", "no kernel"])
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_64_columns_with_a_gated_activation(format, is_refused, device, monkeypatch):
    """Each half has 32, which no kernel for 4 bits on CUDA takes: the weights are multiplied in 16 bits."""
    if is_refused:
        monkeypatch.setattr(grouped, "_fits_four_bits", lambda *_: False)
    packed, x, counts, bias, row_weight = _problem(format, 64, 192, (3, 0, 50, 5), torch.float16, device)
    plain = four_bit.dequantize(format, *packed, torch.float16)
    for activation in ("swiglu", "gpt_oss", "geglu_tanh", epmoe.SwiGLU(1.3, 2.0, 1)):
        for options in ({}, {"bias": bias, "row_weight": row_weight}):
            poison_memory()
            got = epmoe.grouped_gemm(x, packed.numbers, counts, activation=activation, **options,
                                     b_scale=packed.scales, b_zero=packed.zeros)
            assert got.shape == (58, 32)
            assert torch.equal(got, epmoe.grouped_gemm(x, plain, counts, activation=activation, **options))


@pytest.mark.parametrize("device", _devices())
@pytest.mark.parametrize("n, k", [(48, 64), (64, 96), (32, 64), (96, 128), (64, 32)])
def test_sizes_that_are_no_multiples_of_64(n, k, device):
    """The same for all formats, on all devices, before a kernel could read past the end of the weights."""
    x, counts = torch.ones(8, k, dtype=torch.bfloat16, device=device), torch.tensor([3, 5], device=device)
    numbers = torch.zeros(2, n, k // 2, dtype=torch.uint8, device=device)
    for dtype, in_block in ((torch.uint8, 8), (torch.bfloat16, 8), (torch.bfloat16, 4), (torch.bfloat16, 2)):
        for rows in (n // 64, -(-n // 64)):
            scales = torch.ones(2, rows, 1, 64 * in_block, dtype=dtype, device=device)
            with pytest.raises(ValueError, match=rf"weights \[2, {n}, {k}\] with N and K multiples of 64"):
                epmoe.grouped_gemm(x, numbers, counts, b_scale=scales)


def test_half_a_group():
    x, counts = torch.ones(8, 192, dtype=torch.bfloat16), torch.tensor([8])
    numbers, scales = torch.zeros(1, 64, 96, dtype=torch.uint8), torch.ones(1, 1, 1, 128).bfloat16()
    with pytest.raises(ValueError, match="K 192 .* groups of 128: must be a multiple of 128"):
        epmoe.grouped_gemm(x, numbers, counts, b_scale=scales)


def test_compiled():
    packed, x, counts, bias, _ = _problem(four_bit.Int4(32, True), 64, 64, (3, 5), torch.bfloat16, "cpu")

    def product(x):
        return epmoe.grouped_gemm(x, packed.numbers, counts, bias=bias, b_scale=packed.scales,
                                  b_zero=packed.zeros) * 2

    assert torch.equal(torch.compile(product, backend="aot_eager", fullgraph=True)(x), product(x))


def test_wrong_arguments():
    packed, x, counts, _, _ = _problem(four_bit.Int4(32, True), 64, 128, (3, 5), torch.bfloat16, "cpu")
    numbers, scales, zeros = packed

    def gemm(x=x, weight=numbers, **options):
        return epmoe.grouped_gemm(x, weight, counts, **{"b_scale": scales, "b_zero": zeros} | options)

    for error, text, options in (
            (TypeError, "rows: wanted bfloat16 or float16", {"x": x.float()}),
            (ValueError, r"weights \[L, N, K / 2\]", {"x": x[:, :64]}),
            (TypeError, "b_scale: wanted torch.uint8 or torch.bfloat16", {"b_scale": scales.float()}),
            (ValueError, r"b_scale: wanted \[2", {"b_scale": scales[..., :3]}),
            (ValueError, r"b_scale: wanted \[2", {"b_scale": scales.mT}),
            (ValueError, "b_zero: wanted", {"b_zero": zeros[..., :1]}),
            (TypeError, "b_zero: wanted torch.uint8", {"b_zero": zeros.int()}),
            (ValueError, "b_scale: wanted a tensor on cpu.* got one on meta", {"b_scale": scales.to("meta")}),
            (ValueError, "b_zero: wanted a tensor on cpu.* got one on meta", {"b_zero": zeros.to("meta")}),
            (ValueError, "none for MXFP4", {"b_scale": torch.zeros_like(zeros)}),
            (TypeError, "weights: wanted a floating-point dtype", {"b_scale": None, "b_zero": None}),
            (TypeError, "out_dtype", {"out_dtype": torch.float16})):
        with pytest.raises(error, match=text):
            gemm(**options)
    with pytest.raises(RuntimeError, match="no gradient"):
        gemm(x=x.clone().requires_grad_())
