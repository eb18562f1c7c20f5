"""FP8: the quantisation of rows and weights, and the grouped GEMM of them, compared with sums in float64.

The sums in float64 are of the quantised numbers. Rows around those of the experts are NaN, and memory that is
not written holds NaN (see conftest.py).
"""

import itertools

import pytest
import torch

import epmoe
from cases import first, generator, pairwise
from epmoe import reference
from epmoe.gemm.quantize import dequantize_fp8
from gemm_cases import (ACTIVATIONS, EPS, MODELS, SIZES, TINY, bits, dequantized, finish64, forward64,
                        kernels, problem, products64, rows_of_experts)

E4M3 = torch.float8_e4m3fn
SHAPES = [(32, 16), (272, 208), (96, 1040), (400, 384)]  # N, K: also none of a multiple of a block
# The error of a sum of 128 products, divided by the sum of their magnitudes: in float32, and where the tensor
# cores of Hopper add up numbers of FP8. There it is a bound for random numbers.
FLOAT32, TENSOR_CORES = 2.0**-17, 2.0**-9


def fp8_problem(sizes, n, k, device, dtype=torch.bfloat16, seed=0):
    """x, its scales, weight, its scales; then bias, row_weight, offsets as problem() gives them."""
    x, weight, bias, row_weight, offsets = problem(sizes, n, k, dtype, device, seed=seed)
    # groups and blocks of very different magnitude, so that a wrong scale is seen
    g = generator(seed, n, k, 1)
    x = x * (2.0 ** torch.randint(-6, 2, (len(x), (k + 127) // 128), generator=g)).to(x).repeat_interleave(
        128, 1)[:, :k]
    return *epmoe.quantize_fp8(x), *epmoe.quantize_fp8_weight(weight), bias, row_weight, offsets


def error_of_sums(device, portable):
    on_hopper = device.type == "cuda" and not portable and torch.cuda.get_device_capability(device)[0] == 9
    return TENSOR_CORES if on_hopper else FLOAT32


def check(got, want, size, share, what):
    """Allow one rounding of the result, and `share` of the sum of the absolute terms, which is `size`."""
    slack = EPS[got.dtype] * want.abs() + share * size + TINY[got.dtype]
    worst = ((got.double() - want).abs() / slack).max().item() if want.numel() else 0.0
    is_right = worst <= 1 and not got.isnan().any()
    assert is_right, f"{what}: the error is {worst} times the bound"


# ---- quantisation ----

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m, k", [(0, 256), (1, 128), (7, 640), (5, 200), (3, 16), (2, 0)])
def test_fp8_rows_equal_the_reference(ranks, m, k, dtype):
    g = generator(m, k)
    x = (torch.randn(m, k, generator=g) * 10.0 ** torch.randint(-4, 3, (m, 1), generator=g)).to(dtype)
    x = x.to(ranks.device)
    q, scales = epmoe.quantize_fp8(x)
    padded = torch.nn.functional.pad(x, (0, -k % 128))
    want, want_scales = reference.quantize_fp8(padded)
    assert q.shape == (m, k) and q.is_contiguous() and scales.shape == (m, (k + 127) // 128)
    assert scales.t().is_contiguous()
    assert torch.equal(bits(q), bits(want)[:, :k]) and torch.equal(scales, want_scales)
    error = (dequantized(q, scales) - x.double()).abs()
    each = scales.double().repeat_interleave(128, 1)[:, :k]
    assert (error <= (2.0**-4 * x.double().abs()).maximum(2.0**-10 * each) * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 256, 384), (2, 272, 200), (1, 1, 1), (2, 96, 0), (0, 128, 128)],
                         ids=str)
def test_fp8_weights_equal_the_reference(ranks, shape, dtype):
    weight = torch.randn(shape, generator=generator(*shape)).to(dtype).to(ranks.device)
    q, scales = epmoe.quantize_fp8_weight(weight)
    assert q.shape == shape and scales.shape == (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))
    if weight.numel():
        want, want_scales = reference.quantize_fp8_weight(weight)
        assert torch.equal(bits(q), bits(want)) and torch.equal(scales, want_scales)
        assert dequantized(q, scales).sub(weight.double()).abs().max() <= 2.0**-4 * weight.abs().max()


def test_fp8_zeros_nan_infinity_and_the_smallest_numbers(ranks):
    x = torch.ones(6, 256)
    x[1] = 0
    x[2, 3] = float("nan")
    x[3, 3] = -float("inf")
    x[4] = 2.0**-140
    x[5] = float("nan")
    q, scales = (t.cpu() for t in epmoe.quantize_fp8(x.to(ranks.device)))
    tiny = 2.0**-100 / 448
    assert scales[0].tolist() == [torch.tensor(1 / 448.0)] * 2
    assert scales[1].tolist() == pytest.approx([tiny] * 2) and (q[1].float() == 0).all()
    assert scales[2].tolist() == scales[0].tolist() and q[2].isnan().nonzero().tolist() == [[3]]
    assert torch.equal(bits(q)[2, 4:], bits(q)[0, 4:])
    assert scales[3, 0] == float("inf") and scales[3, 1] == scales[0, 1]
    assert dequantized(q, scales)[3].isnan().tolist() == [True] * 128 + [False] * 128
    assert scales[4].tolist() == pytest.approx([tiny] * 2) and (q[4].float() == 0).all()
    assert scales[5].tolist() == pytest.approx([tiny] * 2) and q[5].isnan().all()
    weight = x[:3].to(ranks.device)[None]
    q, scales = (t.cpu() for t in epmoe.quantize_fp8_weight(weight))
    assert q[0].isnan().nonzero().tolist() == [[2, 3]] and (scales == torch.tensor(1 / 448.0)).all()


def test_dequantize_fp8_gives_no_infinity_in_float16(ranks):
    """A power of two as the scale can round the largest numbers of float16 up, beyond them."""
    x = torch.tensor([[65000.0, -65504, 1, 0]], device=ranks.device)
    for dtype, largest in ((torch.float16, 65504), (torch.bfloat16, 65536)):
        got = dequantize_fp8(*epmoe.quantize_fp8(x, pow2=True), dtype)
        assert got.tolist() == [[largest, -largest, 1, 0]]


def test_fp8_bits_are_those_of_the_low_latency_dispatch(ranks):
    x = torch.randn(9, 640, generator=generator(4)).bfloat16()

    def run(world, device):
        a2a = epmoe.LowLatencyAll2All(world, 9, 640, 1, world.size, device=device)
        rows, scales, _, _ = a2a.dispatch(x.to(device), torch.full((9, 1), world.rank, device=device),
                                          torch.ones(9, 1, device=device), fp8=True)
        results = bits(rows)[0, :9].clone(), scales[0, :9].clone()
        a2a.synchronize()
        a2a.finalize()
        return results

    q, scales = (t.cpu() for t in epmoe.quantize_fp8(x.to(ranks.device)))
    for got, got_scales in ranks(run, world_size=1):
        assert torch.equal(got, bits(q)) and torch.equal(got_scales, scales)


@pytest.mark.parametrize("quantize, good", [(epmoe.quantize_fp8, torch.ones(2, 128)),
                                            (epmoe.quantize_fp8_weight, torch.ones(2, 16, 128))])
def test_fp8_quantisation_refuses_other_tensors(quantize, good):
    for wrong, error, text in ((good[0], ValueError, "wanted "), (good.double(), TypeError, "float64"),
                               (good.int(), TypeError, "int32"), (good.tolist(), TypeError, "list"),
                               (good.clone().requires_grad_(), RuntimeError, "no gradient")):
        with pytest.raises(error, match=text):
            quantize(wrong)
    with torch.no_grad():
        quantize(good.clone().requires_grad_())


# ---- the grouped GEMM ----

@pytest.mark.parametrize("values", first(8, pairwise(
    sizes=list(SIZES), shape=SHAPES, dtype=(torch.bfloat16, torch.float16))),
    ids=lambda values: "-".join(map(str, values.values())))
def test_fp8_gemm_equals_sums_in_float64(ranks, values):
    sizes, (n, k), dtype = SIZES[values["sizes"]], values["shape"], values["dtype"]
    x, a_scale, weight, b_scale, bias, row_weight, offsets = fp8_problem(sizes, n, k, ranks.device, dtype)
    x64, weight64 = dequantized(x, a_scale), dequantized(weight, b_scale)
    # The rows of all experts at once, and their products once for all activations.
    experts, rows = rows_of_experts(offsets), slice(offsets[0].item(), offsets[-1].item())
    y64, size64 = (torch.cat(parts) for parts in
                   zip(*(products64(x64[begin:end], weight64[e]) for e, begin, end in experts)))
    bias_of_row = torch.cat([bias[e].expand(end - begin, n) for e, begin, end in experts])
    for portable, activation in itertools.product(kernels(ranks), ACTIVATIONS):
        for b, w in ((None, None), (bias, row_weight)):
            y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=b, activation=activation, row_weight=w,
                                   a_scale=a_scale, b_scale=b_scale, out_dtype=dtype, portable=portable)
            assert y.dtype == dtype
            want, size = finish64(y64, size64, None if b is None else bias_of_row, activation,
                                  None if w is None else w[rows])
            check(y[rows], want, size, error_of_sums(ranks.device, portable),
                  f"{activation}, bias and row weights: {b is not None}, portable {portable}")


@pytest.mark.parametrize("n, k", [(64, 48), (384, 640), (272, 208), (48, 1552)])
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_fp8_gemm_of_small_integers_is_exact(ranks, n, k, activation):
    """With small integers and scales that are powers of two, every sum is exact, also in tensor cores."""
    g = generator(n, k, 7)
    sizes = [1, 0, 130, 64, 300, 17]

    def small(*size):
        return torch.randint(-2, 3, size, generator=g).float().to(E4M3).to(ranks.device)

    def powers(*size):
        return (2.0 ** torch.randint(-3, 4, size, generator=g)).to(ranks.device)

    x, weight = small(sum(sizes), k), small(len(sizes), n, k)
    a_scale, b_scale = powers(len(x), -(-k // 128)), powers(len(sizes), -(-n // 128), -(-k // 128))
    counts = torch.tensor(sizes, device=ranks.device)
    parts = zip(dequantized(x, a_scale).split(sizes), dequantized(weight, b_scale))
    want = torch.cat([rows @ columns.t() for rows, columns in parts])
    for portable in kernels(ranks):
        y = epmoe.grouped_gemm(x, weight, counts, a_scale=a_scale, b_scale=b_scale, portable=portable,
                               activation=activation)
        if activation is None:
            assert torch.equal(y, want.float().bfloat16())
        else:
            torch.testing.assert_close(y.double(), reference.activate(want, activation), rtol=2.0**-8,
                                       atol=1e-5)


@pytest.mark.parametrize("sizes", [[1, 0, 3, 40], [130, 64, 0, 300]], ids=["few", "many"])
@pytest.mark.parametrize("a_shape", [(), (1, 1), None], ids=str)
@pytest.mark.parametrize("b_shape", [(1,), (4,), None], ids=str)
def test_fp8_gemm_with_one_scale_equals_sums_in_float64(ranks, sizes, a_shape, b_shape):
    """One scale of all rows, or of each expert, or of all weights. None: one of each block."""
    x, a_scale, weight, b_scale, bias, row_weight, offsets = fp8_problem(sizes, 272, 528, ranks.device)
    if a_shape is not None:
        a_scale = torch.full(a_shape, 0.3, device=ranks.device)
    if b_shape is not None:
        b_scale = torch.linspace(0.01, 0.07, b_shape[0], device=ranks.device)
    x64 = x.double() * a_scale.double() if a_shape is not None else dequantized(x, a_scale)
    weight64 = weight.double() * b_scale.double()[:, None, None] if b_shape else dequantized(weight, b_scale)
    for portable, activation in itertools.product(kernels(ranks), (None, "swiglu", "gelu")):
        y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias, activation=activation,
                               row_weight=row_weight, a_scale=a_scale, b_scale=b_scale, portable=portable)
        for e, begin, end in rows_of_experts(offsets):
            want, size = forward64(x64[begin:end], weight64[e], bias[e], activation, row_weight[begin:end])
            check(y[begin:end], want, size, error_of_sums(ranks.device, portable),
                  f"{activation}, expert {e}, portable {portable}")


def test_fp8_gemm_spreads_nan_only_as_far_as_it_reaches(ranks):
    x, a_scale, weight, b_scale, _, _, offsets = fp8_problem([40, 90], 272, 400, ranks.device)
    begin, end = offsets[0].item(), offsets[-1].item()

    def product(portable):
        return epmoe.grouped_gemm(x, weight, offsets=offsets, a_scale=a_scale, b_scale=b_scale,
                                  portable=portable)[begin:end]

    bits(x)[begin + 5, 300] = 0x7f  # NaN in a number of row 5
    a_scale[begin + 41, 2] = float("nan")  # in a scale of row 41, of expert 1
    a_scale[begin + 7, 1] = float("inf")
    bits(weight)[1, 33, 399] = 0xff  # in column 33 of expert 1
    b_scale[0, 2, 3] = float("nan")  # in columns 256 to 271 of expert 0
    want = torch.zeros(130, 272, dtype=torch.bool, device=ranks.device)
    want[[5, 7, 41]] = True
    want[40:, 33] = True
    want[:40, 256:] = True
    for portable in kernels(ranks):
        y = product(portable)
        assert torch.equal(~y.isfinite(), want)


def test_fp8_gemm_zero_and_subnormal_scales(ranks):
    """A product of two scales below 2^-126 is rounded to a multiple of 2^-149, the smallest float32."""
    x = torch.full((4, 128), 448.0, device=ranks.device).to(E4M3)
    weight = torch.full((1, 16, 128), 448.0, device=ranks.device).to(E4M3)
    a_scale = torch.tensor([[0.0], [2.0**-149], [3 * 2.0**-140], [2.0**-120]], device=ranks.device)
    b_scale = torch.full((1, 1, 1), 1.0, device=ranks.device)
    counts = torch.tensor([4], device=ranks.device)
    for portable in kernels(ranks):
        y = epmoe.grouped_gemm(x, weight, counts, a_scale=a_scale, b_scale=b_scale, portable=portable)
        want = 448.0**2 * 128 * a_scale.double()
        torch.testing.assert_close(y.double(), want.expand(4, 16), rtol=2.0**-8, atol=0)
        y = epmoe.grouped_gemm(x, weight, counts, a_scale=a_scale, b_scale=b_scale * 2.0**-40,
                               portable=portable)
        assert (y == 0).all()  # 2^-160 is 0 in float32


def test_fp8_gemm_takes_scales_of_any_strides_and_addresses(ranks):
    x, a_scale, weight, b_scale, _, _, offsets = fp8_problem([40, 9], 144, 400, ranks.device)
    want = epmoe.grouped_gemm(x, weight, offsets=offsets, a_scale=a_scale, b_scale=b_scale)
    lines = torch.full((a_scale.shape[1], len(x) + 3), float("nan"), device=ranks.device)
    lines[:, 1:-2] = a_scale.t()
    y = epmoe.grouped_gemm(x, weight, offsets=offsets, a_scale=lines[:, 1:-2].t(),
                           b_scale=b_scale.transpose(1, 2).contiguous().transpose(1, 2))
    begin, end = offsets[0].item(), offsets[-1].item()
    assert torch.equal(y[begin:end], want[begin:end])


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_fp8_gemm_quantises_its_result(ranks, activation):
    """out_dtype e4m3 gives the bits of quantize_fp8, and the next product takes its scales as they are."""
    x, a_scale, weight, b_scale, bias, row_weight, offsets = fp8_problem([40, 0, 9], 288, 400, ranks.device)
    product = dict(offsets=offsets, a_scale=a_scale, b_scale=b_scale, bias=bias, row_weight=row_weight,
                   activation=activation)
    q, scales = epmoe.grouped_gemm(x, weight, **product, out_dtype=E4M3)
    want_q, want_scales = epmoe.quantize_fp8(epmoe.grouped_gemm(x, weight, **product))
    begin, end = offsets[0].item(), offsets[-1].item()
    assert q.dtype == E4M3 and q.shape == want_q.shape and scales.shape == want_scales.shape
    assert torch.equal(q[begin:end].float(), want_q[begin:end].float())
    assert torch.equal(scales[begin:end], want_scales[begin:end])
    down, down_scale = epmoe.quantize_fp8_weight(torch.randn(3, 64, q.shape[1], device=ranks.device))
    y = epmoe.grouped_gemm(q, down, offsets=offsets, a_scale=scales, b_scale=down_scale)
    assert y[begin:end].isfinite().all() and y[begin:end].norm() > 0


def test_fp8_gemm_quantises_nan_and_infinity(ranks):
    """A NaN stays in its place, and does not change the scale of its row; an infinity does."""
    x, a_scale, weight, b_scale, bias, _, offsets = fp8_problem([100, 60], 512, 256, ranks.device)
    begin, end = offsets[0].item(), offsets[-1].item()
    bias[0, 3], bias[1, 300] = float("nan"), float("inf")
    product = dict(offsets=offsets, a_scale=a_scale, b_scale=b_scale, bias=bias, activation="swiglu")
    q, scales = epmoe.grouped_gemm(x, weight, **product, out_dtype=E4M3)
    want_q, want_scales = epmoe.quantize_fp8(epmoe.grouped_gemm(x, weight, **product))
    assert torch.equal(scales[begin:end], want_scales[begin:end])
    assert torch.equal(q[begin:end].view(torch.uint8), want_q[begin:end].view(torch.uint8))
    assert q[begin:begin + 100, 3].float().isnan().all() and scales[begin:begin + 100].isfinite().all()
    assert scales[begin + 100:end, 0].isinf().all()


def test_fp8_gemm_is_traced_by_the_compiler(ranks):
    x, a_scale, weight, b_scale, bias, _, offsets = fp8_problem([4, 0, 9], 32, 144, ranks.device)

    def layer(x, bias):
        return epmoe.grouped_gemm(x, weight, offsets=offsets, a_scale=a_scale * 2, b_scale=b_scale, bias=bias,
                                  activation="swiglu")

    begin, end = offsets[0].item(), offsets[-1].item()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, bias)[begin:end], layer(x, bias)[begin:end])
    quantised = torch.compile(lambda x: epmoe.grouped_gemm(x, weight, offsets=offsets, a_scale=a_scale,
                                                           b_scale=b_scale, out_dtype=E4M3),
                              fullgraph=True, backend="aot_eager")
    want, scales = epmoe.grouped_gemm(x, weight, offsets=offsets, a_scale=a_scale, b_scale=b_scale,
                                      out_dtype=E4M3)
    assert torch.equal(quantised(x)[0][begin:end].float(), want[begin:end].float())
    assert torch.equal(quantised(x)[1][begin:end], scales[begin:end])


@pytest.mark.parametrize("change, error, text", [
    (dict(a_scale=None), TypeError, "a_scale: rows and weights of float8_e4m3fn need scales"),
    (dict(b_scale=None), TypeError, "b_scale"),
    (dict(a_scale=torch.ones(4, 2).double()), TypeError, "float64"),
    (dict(a_scale=torch.ones(3, 1)), ValueError, "a_scale: wanted [4, 2], [4, 1]"),
    (dict(a_scale=torch.ones(4, 2, device="meta")), ValueError, "on cpu"),
    (dict(b_scale=torch.ones(2, 1, 2)), ValueError, "b_scale: wanted [2, 2, 2], [2] or one number"),
    (dict(b_scale=torch.ones(3)), ValueError, "b_scale: wanted [2, 2, 2], [2] or one number"),
    (dict(out_dtype=torch.float32), TypeError, "out_dtype"),
    (dict(weight=torch.ones(2, 144, 160)), TypeError, "one dtype"),
    (dict(x=torch.ones(4, 160), weight=torch.ones(2, 144, 160)), ValueError, "a_scale: give it only"),
    (dict(x=torch.ones(4, 160), weight=torch.ones(2, 144, 160), a_scale=None), ValueError, "b_scale: give"),
    (dict(x=torch.ones(4, 160).to(torch.float8_e5m2), weight=torch.ones(2, 144, 160).to(torch.float8_e5m2)),
     TypeError, "only float8_e4m3fn"),
    (dict(bias=torch.ones(2, 144).requires_grad_()), RuntimeError, "no gradient"),
    (dict(a_scale=torch.ones(4, 2).requires_grad_()), RuntimeError, "no gradient"),
    (dict(counts=torch.tensor([2, 5])), ValueError, "the number of rows"),
])
def test_fp8_gemm_error_names_the_wrong_argument(change, error, text):
    good = dict(x=torch.ones(4, 160).to(E4M3), weight=torch.ones(2, 144, 160).to(E4M3),
                counts=torch.tensor([2, 2]), a_scale=torch.ones(4, 2), b_scale=torch.ones(2, 2, 2))
    with pytest.raises(error) as caught:
        epmoe.grouped_gemm(**(good | change))
    assert text in str(caught.value)


@pytest.mark.cuda_only
@pytest.mark.parametrize("model", MODELS)
def test_fp8_gemm_of_models_equals_sums_in_float64(ranks, model):
    """The gate and up GEMMs of a layer at full size. Sampled rows are compared with float64."""
    n, k, num_experts, num_rows = MODELS[model]
    g = torch.Generator(device=ranks.device).manual_seed(1)
    counts = torch.bincount(torch.randint(num_experts, (num_rows,), device=ranks.device, generator=g),
                            minlength=num_experts)
    x, a_scale = epmoe.quantize_fp8(torch.randn(num_rows, k, device=ranks.device, generator=g).bfloat16())
    # One expert after the other, so that four ranks on one GPU have the memory.
    experts = [epmoe.quantize_fp8_weight(
        (torch.randn(1, n, k, device=ranks.device, generator=g) / k**0.5).bfloat16())
        for _ in range(num_experts)]
    weight, b_scale = (torch.cat(parts) for parts in zip(*experts))
    ends = [0, *counts.cumsum(0).tolist()]
    for activation in (None, "swiglu"):
        y = epmoe.grouped_gemm(x, weight, counts, a_scale=a_scale, b_scale=b_scale, activation=activation)
        for e in (0, num_experts // 2, num_experts - 1):
            at = torch.arange(ends[e], ends[e + 1], 37, device=ranks.device)
            want, size = forward64(dequantized(x[at], a_scale[at]), dequantized(weight[e], b_scale[e]), None,
                                   activation, None)
            check(y[at], want, size, error_of_sums(ranks.device, False), f"{activation} of expert {e}")
