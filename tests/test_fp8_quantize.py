"""quantize_fp8: every bit compared with a computation in float64, and activations within a stated error.

The reference rounds to e4m3 by a search among its numbers. Memory that is not written holds NaN (see
conftest.py).
"""

import itertools
import math

import pytest
import torch

import epmoe
from cases import generator
from epmoe.gemm import quantize as fp8
from epmoe.gemm.activations import activate, is_gated

E4M3 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (9, 7), (5, 130), (17, 1000), (70, 1536), (3, 4099), (130, 136)]  # M, K
ACTIVATIONS = ["swiglu", "gpt_oss", epmoe.GptOss(1.3, 0.6), epmoe.SwiGLU(limit=0.6),
               epmoe.SwiGLU(1.3, 0.6, 1), epmoe.SwiGLU(-0.7, math.inf, 1), "geglu_tanh", "relu2", "gelu",
               "gelu_tanh", "silu"]
ACTIVATION_ERROR = 2.0**-16  # relative, of an activation in float32
_NUMBERS = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
_MIDDLES = (_NUMBERS[1:] + _NUMBERS[:-1]) / 2


def codes(x64):
    """The e4m3 number nearest to each magnitude, of two the even one; -1 for NaN."""
    at = torch.bucketize(x64.abs(), _MIDDLES)
    is_tie = (at < 126) & (x64.abs() == _MIDDLES[at.clamp(max=125)])
    return torch.where(x64.isnan(), -1, at + (is_tie & (at % 2 == 1)))


def groups_of(x):
    """[M, G, 128]: the groups of rows in float64, filled up with zeros."""
    return torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))


def scale_of(groups, pow2=False):
    most = groups.abs().nan_to_num(0.0, math.inf).amax(2, keepdim=True).clamp(min=2.0**-100)
    if pow2:
        mantissa, exponent = torch.frexp(most.float().double() / 448)
        next_one = torch.where(mantissa == 0.5, exponent - 1, exponent).double().exp2()
        return most, torch.where(most.isinf(), most, next_one).float()
    return most, most.float().double().div(448).float()


def split(q, scales):
    """The signs and magnitudes of q, -1 for NaN, and the scales of the groups: on the CPU."""
    raw = groups_of(torch.zeros(q.shape)).to(torch.uint8)
    raw.flatten(1)[:, :q.shape[1]] = q.cpu().view(torch.uint8)
    magnitude = (raw & 127).long()
    return raw >> 7, torch.where(magnitude == 127, -1, magnitude), scales.cpu()[:, :, None]


def check_rows(x, q, scales, pow2=False):
    """All bits of quantize_fp8(x), without an activation; the sign of NaN does not count."""
    groups = groups_of(x.cpu())
    assert q.shape == x.shape and q.is_contiguous() and scales.t().is_contiguous()
    sign, magnitude, scale = split(q, scales)
    _, want_scale = scale_of(groups, pow2)
    assert torch.equal(scale, want_scale)
    product = (groups * (1 / want_scale.double()).float().double()).float().double()  # each rounded once
    assert torch.equal(magnitude, codes(product))
    signed = magnitude >= 0
    assert torch.equal(sign[signed].bool(), product.signbit()[signed])


def check_activated(h, activation, q, scales):
    """The scales and numbers lie between those of slightly smaller and larger activations."""
    want = groups_of(activate(h.cpu().double(), activation))
    sign, magnitude, scale = split(q, scales)
    most, _ = scale_of(want)
    assert ((scale.double() * 448 - most).abs() <= ACTIVATION_ERROR * most).all()
    inverse = 1 / scale.double()
    least, greatest = (codes(want * inverse * (1 + d * ACTIVATION_ERROR)) for d in (-1, 1))
    assert ((least <= magnitude) & (magnitude <= greatest)).all()
    is_sure = least > 0
    assert torch.equal(sign[is_sure].bool(), want.signbit()[is_sure])


def random_rows(m, k, dtype, seed=0):
    """Rows of Cauchy's distribution, groups of different magnitude: in float16 some numbers are infinite."""
    g = generator(m, k, seed)
    x = torch.randn(m, k, generator=g) / torch.randn(m, k, generator=g)
    return (x * 2.0 ** torch.randint(-12, 8, (m, 1), generator=g)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, k", SHAPES)
def test_fp8_quantize_gives_the_bits_of_the_reference(ranks, m, k, dtype):
    for x in (random_rows(m, k, dtype), torch.randn(m, k, generator=generator(m, k)).to(dtype)):
        for pow2 in (False, True):
            check_rows(x, *epmoe.quantize_fp8(x.to(ranks.device), pow2=pow2), pow2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp8_quantize_all_numbers_of_16_bits(ranks, dtype):
    """Also zeros, subnormal numbers, infinities and NaN, beside numbers of like and of other magnitude."""
    every = torch.arange(-2**15, 2**15, dtype=torch.int32).to(torch.int16)
    for rows in (every.view(-1, 128), every.view(128, -1).t(), every.view(-1, 64)):
        x = rows.contiguous().view(dtype)
        check_rows(x, *epmoe.quantize_fp8(x.to(ranks.device)))


def test_fp8_quantize_all_magnitudes_of_float32(ranks):
    exponents = torch.arange(256, dtype=torch.int32)[:, None] << 23
    mantissas = torch.randint(1 << 23, (256, 128), generator=generator(3), dtype=torch.int32)
    mantissas[:, :16] = torch.arange(16, dtype=torch.int32) << 19  # also ties
    x = (exponents | mantissas).view(torch.float32)
    x = torch.cat([x, -x.t().reshape(256, 128), 448 * 2.0 ** torch.arange(-128, 0).float()[None]])
    for pow2 in (False, True):
        check_rows(x, *epmoe.quantize_fp8(x.to(ranks.device), pow2=pow2), pow2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_fp8_quantize_after_an_activation(ranks, activation, dtype):
    for m, k in ((9, 7), (17, 1000), (40, 384)):
        width = 2 * k if is_gated(activation) else k
        g = generator(m, k, 5)
        h = torch.randn(m, width, generator=g) * 2.0 ** torch.randint(-10, 5, (m, 1), generator=g)
        h[:, ::11] *= 30
        h = h.to(dtype)
        q, scales = epmoe.quantize_fp8(h.to(ranks.device), activation)
        assert q.shape == (m, k) and scales.shape == (m, -(-k // 128))
        check_activated(h, activation, q, scales)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_fp8_quantize_nan_infinity_and_zeros_after_an_activation(ranks, activation):
    h = torch.ones(6, 512)
    h[1] = 0
    h[2, 0] = math.nan
    h[3, 256 if is_gated(activation) and not str(activation).startswith(("gpt", "Gpt")) else 1] = math.nan
    h[4, 2] = math.inf
    h[5] = -4.0  # below it the reference loses digits
    q, scales = (t.cpu() for t in epmoe.quantize_fp8(h.to(ranks.device), activation))
    want = activate(h.double(), activation)
    assert torch.equal(q[2:4].isnan(), want[2:4].isnan()) and q[2:4].isnan().any(1).all()
    assert (want[1] == 0).all() == (q[1].float() == 0).all()
    is_lost = scales.isinf() | groups_of(q.float()).isnan().any(2)  # an infinity times 0 may be either
    assert torch.equal(is_lost[4], ~groups_of(want)[4].isfinite().all(1))
    check_activated(h[[0, 1, 5]], activation, q[[0, 1, 5]], scales[[0, 1, 5]])


@pytest.mark.parametrize("activation", [None, "swiglu"])
@pytest.mark.parametrize("m, k", [(21, 392), (8, 33)])
def test_fp8_quantize_stops_at_the_number_of_rows(ranks, m, k, activation):
    x = random_rows(m, 2 * k if activation else k, torch.bfloat16).to(ranks.device)
    want, want_scales = epmoe.quantize_fp8(x, activation)
    offsets = torch.zeros(4, dtype=torch.int32, device=ranks.device)
    for num in (0, 1, 7, 8, m - 1, m, m + 1, 2**31 - 1, -1, -2**31):
        offsets[-1] = num
        q, scales = epmoe.quantize_fp8(x, activation, num_rows=offsets[-1:])
        num = min(max(num, 0), m)
        assert torch.equal(q[:num].view(torch.uint8), want[:num].view(torch.uint8))
        assert torch.equal(scales[:num], want_scales[:num])
        assert q[num:].isnan().all() and scales[num:].isnan().all()  # not written
    assert epmoe.quantize_fp8(x, num_rows=offsets[0])[0].isnan().all()  # a number without dimensions


@pytest.mark.parametrize("m, k", [(0, 256), (0, 0), (4, 0)])
def test_fp8_quantize_nothing(ranks, m, k):
    for activation in (None, "swiglu", "silu"):
        h = torch.ones(m, 2 * k if activation == "swiglu" else k, device=ranks.device)
        q, scales = epmoe.quantize_fp8(h, activation)
        assert q.shape == (m, k) and scales.shape == (m, k // 128)


def test_fp8_quantize_takes_any_strides_and_addresses(ranks):
    x = random_rows(20, 300, torch.bfloat16).to(ranks.device)
    for part in (x[3:, 5:], x.t(), x[:, ::2], x[1::3, 1:257]):
        check_rows(part, *epmoe.quantize_fp8(part))


def test_fp8_quantize_by_torch_gives_the_same_bits(ranks):
    """Torch computes it where epmoe has no kernel."""
    for dtype, pow2 in itertools.product(DTYPES, (False, True)):
        x = random_rows(33, 700, dtype)
        check_rows(x, *(t.contiguous() if t.dtype == E4M3 else t.t().contiguous().t()
                        for t in fp8._quantize_by_torch(x, (0, 0, 0), pow2)), pow2)


@pytest.mark.parametrize("activation", [None, pytest.param(epmoe.GptOss(1.3, 0.6), marks=pytest.mark.long)],
                         ids=str)
def test_fp8_quantize_is_an_operator(ranks, activation):
    x = random_rows(10, 272, torch.bfloat16).to(ranks.device)
    num_rows = torch.tensor([6], dtype=torch.int32, device=ranks.device)

    def quantize(x, num_rows):
        q, scales = epmoe.quantize_fp8(x, activation, num_rows)
        return q.view(torch.uint8)[:6], scales[:6]

    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager", dynamic=True)
    for got, want in zip(compiled(x, num_rows), quantize(x, num_rows)):
        assert torch.equal(got, want)
    arguments = (x, None, epmoe.gemm.activations.as_kernel(activation))
    torch.library.opcheck(torch.ops.epmoe.quantize_fp8.default, arguments,
                          test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("arguments, error, text", [
    ((torch.ones(2, 5), "swiglu"), ValueError, "as many gates as ups in a row, got rows of 5"),
    ((torch.ones(2, 4).to_sparse(),), ValueError, "a dense tensor, got one of layout torch.sparse_coo"),
    ((torch.ones(2, 4), "swish"), ValueError, "activation 'swish'"),
    ((torch.ones(2, 4), None, 1), TypeError, "pass x[:n]"),
    ((torch.ones(2, 4), None, torch.ones(1, dtype=torch.int64)), TypeError, "int64"),
    ((torch.ones(2, 4), None, torch.ones(2, dtype=torch.int32)), ValueError, "one number on cpu"),
    ((torch.ones(2, 4), None, torch.ones(1, dtype=torch.int32, device="meta")), ValueError, "on meta"),
])
def test_fp8_quantize_error_names_the_wrong_argument(arguments, error, text):
    with pytest.raises(error) as caught:
        epmoe.quantize_fp8(*arguments)
    assert text in str(caught.value)


def test_fp8_quantize_module_checks_what_it_gets():
    """The checks in C, which the operator's own arguments never need."""
    x, q, scales = torch.ones(3, 256), torch.empty(3, 256, dtype=torch.uint8), torch.empty(2, 3)
    for change, error, text in (
            (dict(x=x.double()), TypeError, "float64"), (dict(x=x[0]), ValueError, "2 dimensions"),
            (dict(activation=(2, 0, 0)), ValueError, "size 512"),
            (dict(activation=(99, 0, 0)), ValueError, "99"),
            (dict(activation=(0.5, 0, 0)), ValueError, "must be a whole number"),
            (dict(activation=2), TypeError, "its kind and 2 numbers"),
            (dict(activation=(2, 0)), TypeError, "its kind and 2 numbers"),
            (dict(q=q[:2]), ValueError, "size 3"), (dict(scales=scales[:1]), ValueError, "size 2"),
            (dict(num_rows=torch.ones(2, dtype=torch.int32)), ValueError, "size 1"),
            (dict(x=x.t().contiguous().t()), ValueError, "contiguous"),
            (dict(q=x.view(torch.uint8).view(-1)[:768].view(3, 256)), ValueError,
             "output shares memory with rows"),
            (dict(scales=x.view(-1)[-6:].view(2, 3)), ValueError, "address|scales shares memory with rows"),
            (dict(scales=q.view(-1)[:32].view(torch.float32)[:6].view(2, 3)), ValueError,
             "output shares memory with scales")):
        call = dict(activation=(0, 0, 0), x=x, num_rows=None, q=q, scales=scales,
                    is_pow2=False, is_rowwise=False) | change
        with pytest.raises(error, match=text):
            epmoe._C.quantize_fp8(*call.values())


@pytest.mark.cuda_only
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
def test_fp8_quantize_gives_the_bits_of_the_cpu(ranks, activation):
    for dtype in DTYPES:
        for m, k in ((9, 7), (257, 2048), (1000, 1000)):
            x = random_rows(m, 2 * k if activation and is_gated(activation) else k, dtype)
            got, want = epmoe.quantize_fp8(x.to(ranks.device), activation), epmoe.quantize_fp8(x, activation)
            assert torch.equal(got[0].cpu().view(torch.uint8), want[0].view(torch.uint8))
            assert torch.equal(got[1].cpu(), want[1])


@pytest.mark.cuda_only
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_fp8_quantize_is_captured(ranks, activation):
    x = random_rows(50, 512, torch.bfloat16).to(ranks.device)
    num_rows = torch.tensor([50], dtype=torch.int32, device=ranks.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scales = epmoe.quantize_fp8(x, activation, num_rows)
    for num in (50, 0, 13):
        num_rows.fill_(num)
        x.copy_(random_rows(50, 512, torch.bfloat16, seed=num))
        q.view(torch.uint8).fill_(1)
        scales.fill_(-1)
        graph.replay()
        want, want_scales = epmoe.quantize_fp8(x, activation)
        assert torch.equal(q[:num].view(torch.uint8), want[:num].view(torch.uint8))
        assert torch.equal(scales[:num], want_scales[:num])
        assert q[num:].isnan().all() and scales[num:].isnan().all()  # as the graph poisons them first
