"""The grouped GEMM that adds a product of low rank, compared with sums in float64.

The rows before the first expert and after the last one are NaN, those of low rank too.
"""

import itertools

import pytest
import torch

from cases import first, generator
from epmoe import _C
from epmoe.gemm.activations import as_kernel
from epmoe.gemm.grouped import DGRAD, FORWARD, WGRAD, _out_shape, tile_counter
from gemm_cases import ACTIVATIONS, SIZES, check, finish64, kernels, problem, products64, rows_of_experts


def low_rank_problem(sizes, n, k, r, dtype, device):
    """As `problem`, and low_a [M, R] and low_b [L, N, R]."""
    x, weight, bias, _, offsets = problem(sizes, n, k, dtype, device)
    g = generator(7, n, k, r)
    low_a = torch.randn(len(x), r, generator=g).to(dtype).to(device)
    low_a[torch.isnan(x[:, 0])] = float("nan")
    low_b = (torch.randn(len(sizes), n, r, generator=g) / r**0.5).to(dtype).to(device)
    return x, weight, bias, offsets, low_a, low_b


def multiply(x, weight, offsets, low, kind=FORWARD, kernel=as_kernel(None), bias=None, saves=False,
             portable=False):
    """Return (out, saved) of the module's product, to which it adds low = (low_a, low_b), or None.

    saved: the product with its bias, before the activation, or an empty tensor.
    """
    out = x.new_empty(_out_shape(x, weight, offsets, kind, kernel))
    saved = x.new_empty((len(x) if saves else 0, weight.shape[1]))
    _C.grouped_gemm(kind, kernel, 0.0, x, weight, offsets, bias, None, tile_counter(x), out, portable, None,
                    None, None, saved if saves else None, *(low or (None, None)), 0, False)
    return out, saved


def sums(rows, weight, low_a, low_b):
    y, size = products64(rows, weight)
    of_low, size_of_low = products64(low_a, low_b)
    return y + of_low, size + size_of_low


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("n, k, r", [(32, 16, 16), (272, 208, 80), (96, 1040, 144)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_low_rank_forward_equals_sums_in_float64(ranks, sizes, n, k, r, dtype):
    x, weight, bias, offsets, low_a, low_b = low_rank_problem(sizes, n, k, r, dtype, ranks.device)
    for portable, activation in itertools.product(kernels(ranks), ACTIVATIONS):
        options = dict(kernel=as_kernel(activation), bias=bias, portable=portable)
        y, nothing = multiply(x, weight, offsets, (low_a, low_b), **options)
        assert nothing.numel() == 0
        saved = None
        if activation is not None:
            same, saved = multiply(x, weight, offsets, (low_a, low_b), saves=True, **options)
        for e, begin, end in rows_of_experts(offsets):
            rows = slice(begin, end)
            want, size = sums(x[rows], weight[e], low_a[rows], low_b[e])
            if saved is not None:
                assert torch.equal(y[rows], same[rows]), "what is saved changes the result"
                check(saved[rows], *finish64(want, size, bias[e], None, None), f"saved for {activation}")
            check(y[rows], *finish64(want, size, bias[e], activation, None), f"{activation}, expert {e}")


@pytest.mark.parametrize("dtype", first(1, [torch.float16, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("n, k, r", [(32, 16, 16), (272, 208, 80), (96, 528, 144)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_low_rank_gradient_of_rows_equals_sums_in_float64(ranks, sizes, n, k, r, dtype):
    x, weight, _, offsets, low_a, low_b = low_rank_problem(sizes, k, n, r, dtype, ranks.device)
    weight, low_b = (t.transpose(1, 2).contiguous() for t in (weight, low_b))  # [L, N, K], [L, R, K]
    for portable in kernels(ranks):
        y, _ = multiply(x, weight, offsets, (low_a, low_b), DGRAD, portable=portable)
        for e, begin, end in rows_of_experts(offsets):
            rows = slice(begin, end)
            want, size = sums(x[rows], weight[e].t(), low_a[rows], low_b[e].t())
            check(y[rows], want, size, f"expert {e}")


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("kind", [FORWARD, DGRAD])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_few_columns_have_the_bits_of_many(ranks, sizes, kind, dtype):
    """Hopper multiplies by few columns in kernels of its own: by first factors, and their gradients."""
    x, weight, _, offsets, _, _ = low_rank_problem(sizes, 272, 592, 16, dtype, ranks.device)
    weight = weight if kind == FORWARD else weight.transpose(1, 2).contiguous()
    many, _ = multiply(x, weight, offsets, None, kind)
    rows = slice(offsets[0].item(), offsets[-1].item())
    for num in (16, 32, 48, 112, 128):
        few = weight[:, 7:7 + num] if kind == FORWARD else weight[..., 7:7 + num]
        got, _ = multiply(x, few.contiguous(), offsets, None, kind)
        assert torch.equal(got[rows], many[rows, 7:7 + num]), f"{num} columns"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_rank_may_be_absent(ranks, dtype):
    x, weight, bias, offsets, _, _ = low_rank_problem([40, 0, 9], 64, 32, 16, dtype, ranks.device)
    y, saved = multiply(x, weight, offsets, None, kernel=as_kernel("swiglu"), bias=bias, saves=True)
    for e, begin, end in rows_of_experts(offsets):
        want = products64(x[begin:end], weight[e])
        check(saved[begin:end], *finish64(*want, bias[e], None, None), "saved")
        check(y[begin:end], *finish64(*want, bias[e], "swiglu", None), "swiglu")


@pytest.mark.parametrize("num_zeros", [16, 48])
def test_low_rank_of_zeros_changes_no_bit(ranks, num_zeros):
    """Columns of zeros are added to a row's sum as zeros: each token of a mixture has such columns."""
    x, weight, bias, offsets, low_a, low_b = low_rank_problem([40, 0, 190], 96, 80, 16, torch.bfloat16,
                                                              ranks.device)
    for portable in kernels(ranks):
        y, _ = multiply(x, weight, offsets, (low_a, low_b), bias=bias, portable=portable)
        zeros = low_a.new_zeros(len(low_a), num_zeros)
        random = torch.randn(len(low_b), low_b.shape[1], num_zeros, device=low_b.device).to(low_b.dtype)
        for wide_a, wide_b in (((zeros, low_a), (random, low_b)), ((low_a, zeros), (low_b, random))):
            got, _ = multiply(x, weight, offsets, (torch.cat(wide_a, 1), torch.cat(wide_b, 2)),
                              bias=bias, portable=portable)
            rows = slice(offsets[0].item(), offsets[-1].item())
            assert torch.equal(got[rows], y[rows])


def test_low_rank_refuses_wrong_operands(ranks):
    x, weight, _, offsets, low_a, low_b = low_rank_problem([40, 0, 9], 64, 32, 16, torch.bfloat16,
                                                           ranks.device)
    for low, kind, text in (((low_a[:-1], low_b), FORWARD, "rows of low rank"),
                            ((low_a, low_b[:, :-16].contiguous()), FORWARD, "weights of low rank"),
                            ((low_a, low_b), DGRAD, "low rank|weights"),
                            ((low_a.half(), low_b), FORWARD, "rows of low rank"),
                            ((low_a, low_b), WGRAD, "low rank|dimensions")):
        with pytest.raises((ValueError, TypeError, IndexError, RuntimeError), match=text):
            multiply(x, weight, offsets, low, kind)
