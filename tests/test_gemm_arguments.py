"""The arguments of a grouped GEMM: which are valid, what they do, and which are refused."""

import pytest
import torch

import epmoe
from cases import generator, misaligned, poison_memory
from gemm_cases import ACTIVATIONS, check, kernels, problem


def test_gemm_counts_equal_offsets(ranks):
    x, weight, _, _, _ = problem([4, 0, 9], 32, 16, torch.bfloat16, ranks.device, before=0, after=0)
    counts = torch.tensor([4, 0, 9], device=ranks.device)
    offsets = torch.tensor([0, 4, 4, 13], device=ranks.device, dtype=torch.int32)
    by_counts = epmoe.grouped_gemm(x, weight, counts)
    by_offsets = epmoe.grouped_gemm(x, weight, offsets=offsets)
    assert torch.equal(by_counts, by_offsets)


def test_gemm_tensors_at_any_address(ranks):
    """The CPU and torch accept any alignment. Hopper's copy engine (TMA) requires aligned addresses."""
    x, weight, bias, row_weight, offsets = problem([4, 0, 19], 32, 16, torch.bfloat16, ranks.device)
    want = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias, activation="gelu", row_weight=row_weight)
    begin, end = offsets[0].item(), offsets[-1].item()
    for which in range(5):  # 4: all of them
        given = [misaligned(t) if which in (i, 4) else t for i, t in enumerate((x, weight, bias, row_weight))]
        y = epmoe.grouped_gemm(given[0], given[1], offsets=misaligned(offsets), bias=given[2],
                               activation="gelu", row_weight=given[3])
        assert torch.equal(y[begin:end], want[begin:end])


def test_gemm_of_1500_experts(ranks):
    """A layer has at most 1024 experts. A grouped GEMM alone has no limit."""
    counts = torch.arange(1500) % 3
    x, weight, _, _, _ = problem(counts.tolist(), 32, 16, torch.bfloat16, ranks.device, before=0, after=0)
    y = epmoe.grouped_gemm(x, weight, counts.to(ranks.device))
    expert_of_row = torch.arange(1500).repeat_interleave(counts).to(ranks.device)
    want = torch.bmm(x.double()[:, None], weight.double()[expert_of_row].transpose(1, 2))[:, 0]
    check(y, want, torch.tensor(20.0), "1500 experts")


@pytest.mark.cuda_only
def test_gemm_clamps_offsets_to_the_rows(ranks):
    x, weight, _, _, _ = problem([4, 9], 32, 16, torch.bfloat16, ranks.device, before=0, after=0)
    for wrong in ([-7, 4, 2**31 - 1], [0, 9, 4], [2**30, 2**30, 2**30]):
        offsets = torch.tensor(wrong, device=ranks.device, dtype=torch.int32)
        y = epmoe.grouped_gemm(x, weight, offsets=offsets)
        begin, end = max(wrong[0], 0), min(wrong[1], 13)
        if begin < end <= 4:
            check(y[begin:end], x[begin:end].double() @ weight[0].double().t(), torch.tensor(20.0),
                  "expert 0")


@pytest.mark.cuda_only
def test_gemm_counts_its_tiles_whatever_the_offsets_are(ranks):
    """The kernels draw tiles from a counter, which a launch must leave at 0 for the next one."""
    x, weight, _, _, offsets = problem([3] * 60, 160, 64, torch.bfloat16, ranks.device, before=0, after=0)
    want = epmoe.grouped_gemm(x, weight, offsets=offsets)
    g = generator(4)
    for most in (2**31 - 1, 200, 1000):
        for _ in range(8):
            wrong = torch.randint(-most, most, (61,), generator=g, dtype=torch.int32).to(ranks.device)
            epmoe.grouped_gemm(x, weight, offsets=wrong)
            epmoe.grouped_gemm(x, weight, offsets=wrong.sort().values)
            assert torch.equal(epmoe.grouped_gemm(x, weight, offsets=offsets), want)


@pytest.mark.parametrize("clears", [False, True], ids=["stay", "zero"])
def test_gemm_rows_of_no_expert_are_not_written_or_are_zero(ranks, clears):
    x, weight, _, _, offsets = problem([130, 7], 64, 32, torch.bfloat16, ranks.device)
    for portable in kernels(ranks):
        out = torch.full((len(x), 64), 7.0, dtype=x.dtype, device=x.device)
        epmoe._C.grouped_gemm(0, (0, 0, 0), 0.0, x, weight, offsets, None, None, offsets.new_zeros(1).long(),
                              out, portable, *[None] * 6, 0, clears)
        rest = 0 if clears else 7
        assert (out[:3] == rest).all() and (out[140:] == rest).all()
        assert not (out[3:140] == 7).all(1).any() and out[3:140].any(1).all()


@pytest.mark.cuda_only
def test_gemm_module_refuses_an_output_in_the_memory_of_an_input(ranks):
    x, weight, bias, row_weight, offsets = problem([130, 7], 32, 32, torch.bfloat16, ranks.device)
    memory = torch.cat([x.flatten(), weight.flatten()])
    x, weight = memory[:x.numel()].view_as(x), memory[x.numel():].view_as(weight)
    for out, name in ((x, "rows"), (memory[8:][:x.numel()].view_as(x), "rows"),
                      (memory[-x.numel() - 8:-8].view_as(x), "(rows|weights)")):
        with pytest.raises(ValueError, match=f"output shares memory with {name}"):
            epmoe._C.grouped_gemm(0, (0, 0, 0), 0.0, x, weight, offsets, bias, row_weight,
                                  offsets.new_zeros(1).long(), out, False, *[None] * 6, 0, False)


@pytest.mark.parametrize("change, error, text", [
    (dict(x=torch.zeros(4, 8, 1)), ValueError, "rows [M, K]"),
    (dict(x=torch.zeros(4, 12)), ValueError, "[4, 12]"),
    (dict(x=torch.zeros(4, 16).double()), TypeError, "float64"),
    (dict(offsets=torch.zeros(4, dtype=torch.int32)), ValueError, "wanted offsets [3]"),
    (dict(counts=torch.zeros(2, dtype=torch.int32)), ValueError, "either"),
    (dict(offsets=None), ValueError, "either"),
    (dict(activation="relu"), ValueError, "relu"),
    (dict(activation=epmoe.GptOss(limit=0.0)), ValueError, "positive limit"),
    (dict(activation=epmoe.GptOss(alpha=float("inf"))), ValueError, "finite alpha"),
    (dict(bias=torch.zeros(2, 3)), ValueError, "bias [2, 10]"),
    (dict(row_weight=torch.zeros(5)), ValueError, "row weights [4]"),
    (dict(weight=torch.zeros(2, 9, 16), activation="swiglu"), ValueError, "even"),
    (dict(x=torch.zeros(4, 16).long(), weight=torch.zeros(2, 10, 16).long()), TypeError,
     "rows: wanted a floating-point dtype, got torch.int64"),
    (dict(x=[[0.0] * 16]), TypeError, "rows: wanted a tensor, got list"),
    (dict(weight=None), TypeError, "weights: wanted a tensor, got NoneType"),
    (dict(weight=torch.zeros(2, 10, 16, device="meta")), ValueError, "weights: wanted a tensor on cpu"),
    (dict(weight=torch.zeros(2, 10, 16).to_sparse()), ValueError, "weights: wanted a dense tensor"),
    (dict(offsets=None, counts=[2, 2]), TypeError, "counts: wanted a tensor, got list"),
    (dict(offsets=None, counts=torch.full((2,), 2.0)), TypeError,
     "counts: wanted integers, got torch.float32"),
    (dict(offsets=None, counts=torch.ones(2, dtype=torch.bool)), TypeError,
     "counts: wanted integers, got torch.bool"),
    (dict(offsets=None, counts=torch.tensor([2, 2], device="meta")), ValueError,
     "counts: wanted a tensor on cpu"),
    (dict(offsets=None, counts=torch.tensor([2, 1, 1])), ValueError, "wanted counts [2], got [3]"),
    (dict(offsets=None, counts=torch.tensor([2**32 + 2, 2])), ValueError, "the number of rows"),
    (dict(offsets=None, counts=torch.tensor([2, -(2**32) + 2])), ValueError, "the number of rows"),
    (dict(offsets=None, counts=torch.tensor(4)), ValueError, "wanted counts [2], got []"),
    (dict(offsets=[0, 2, 4]), TypeError, "offsets: wanted a tensor, got list"),
    (dict(offsets=torch.tensor([0, 2, 4])), TypeError, "offsets: wanted int32, got torch.int64"),
    (dict(bias=[0.0] * 20), TypeError, "bias: wanted a tensor, got list"),
    (dict(bias=torch.zeros(2, 10).int()), TypeError, "bias: wanted a floating-point dtype, got torch.int32"),
    (dict(bias=torch.zeros(2, 10, device="meta")), ValueError, "bias: wanted a tensor on cpu"),
    (dict(row_weight=torch.ones(4).long()), TypeError,
     "row weights: wanted a floating-point dtype, got torch.int64"),
    (dict(row_weight=torch.ones(4, device="meta")), ValueError, "row weights: wanted a tensor on cpu"),
    (dict(expected_rows=0), ValueError, "expected_rows 0: must be at least 1"),
    (dict(expected_rows=1.5), TypeError, "float"),
])
def test_gemm_error_names_the_wrong_argument(change, error, text):
    good = dict(x=torch.zeros(4, 16), weight=torch.zeros(2, 10, 16),
                offsets=torch.tensor([0, 2, 4], dtype=torch.int32))
    with pytest.raises(error) as caught:
        epmoe.grouped_gemm(**(good | change))
    assert text in str(caught.value)


@pytest.mark.cpu_only
@pytest.mark.parametrize("sizes", [{"counts": [4, -2, 8]}, {"counts": [-4, 8, 6]}, {"counts": [4, 4, 6]},
                                   {"offsets": [0, 6, 4, 10]}, {"offsets": [-1, 2, 4, 6]},
                                   {"offsets": [0, 2, 4, 11]}], ids=str)
def test_gemm_refuses_sizes_beyond_the_rows(sizes):
    (name, values), = sizes.items()
    with pytest.raises(ValueError, match="0 to 10, the number of rows"):
        epmoe.grouped_gemm(torch.randn(10, 16), torch.randn(3, 8, 16),
                           **{name: torch.tensor(values, dtype=torch.int32)})


@pytest.mark.parametrize("with_grad", [False, True], ids=["plain", "grad"])
def test_gemm_bias_and_row_weight_of_any_floating_dtype(ranks, with_grad):
    x, weight, bias, row_weight, offsets = problem([4, 9], 32, 16, torch.bfloat16, ranks.device, before=0,
                                                   after=0)
    x.requires_grad_(with_grad)
    row_weight = row_weight.bfloat16()  # every dtype of this test can represent these numbers
    want = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias, row_weight=row_weight.float())
    for dtype in (torch.float32, torch.float64):
        y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias.to(dtype),
                               row_weight=row_weight.to(dtype))
        assert y.dtype == x.dtype
        torch.testing.assert_close(y, want)


@pytest.mark.parametrize("with_grad", [False, True], ids=["plain", "grad"])
def test_gemm_applies_row_weight_in_float32(ranks, with_grad):
    x = torch.ones(1, 16, dtype=torch.bfloat16, device=ranks.device)
    weight = torch.full((1, 16, 16), 24.0, dtype=torch.bfloat16, device=ranks.device)
    row_weight = torch.tensor([1.0035], device=ranks.device)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=ranks.device)
    y = epmoe.grouped_gemm(x.requires_grad_(with_grad), weight, offsets=offsets, row_weight=row_weight)
    # 384 * 1.0035 is 385.344, which bfloat16 rounds to 386. The row weight itself rounded to bfloat16 is 1,
    # and would give 384.
    assert (y == 386).all()


@pytest.mark.cpu_only
def test_gemm_ignores_autocast():
    x, weight, counts = torch.randn(10, 16), torch.randn(2, 8, 16), torch.tensor([4, 6])
    want = epmoe.grouped_gemm(x, weight, counts)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(epmoe.grouped_gemm(x, weight, counts), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_gradients_of_rows_of_no_expert_are_zero(ranks, dtype, transposed):
    """What came before may have made all rows from one tensor, which gets the sum of their gradients."""
    x, weight, _, row_weight, offsets = problem([4, 0, 9, 1], 32, 16, dtype, ranks.device, after=40)
    begin, end = offsets[0].item(), offsets[-1].item()
    x = x.nan_to_num()
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    gain = torch.ones(16, dtype=dtype, device=ranks.device, requires_grad=True)
    scale = torch.ones_like(row_weight).requires_grad_()
    y = epmoe.grouped_gemm(x * gain, weight, offsets=offsets, activation="gelu",
                           row_weight=row_weight * scale)
    loss = y[begin:end].float().sum()
    poison_memory()
    loss.backward()
    own = torch.zeros(len(x), dtype=torch.bool, device=ranks.device)
    own[begin:end] = True
    assert gain.grad.isfinite().all() and gain.grad.any()
    assert scale.grad[own].isfinite().all() and not scale.grad[~own].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm_gradients_of_rows_of_no_expert_are_ignored(ranks, activation):
    """Rows of no expert are undefined, and so are their incoming gradients. A layer with a fixed capacity has
    rows of this kind.
    """
    x, weight, bias, row_weight, offsets = problem([4, 0, 9, 1], 32, 16, torch.bfloat16, ranks.device)
    begin, end = offsets[0].item(), offsets[-1].item()
    grads = []
    for poison in (0.0, float("nan")):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias, row_weight)]
        y = epmoe.grouped_gemm(leaves[0], leaves[1], offsets=offsets, bias=leaves[2], activation=activation,
                               row_weight=leaves[3])
        g = torch.full_like(y, poison)
        g[begin:end] = torch.randn(end - begin, y.shape[1], generator=generator(5)).to(y)
        y.backward(g)
        grads.append([leaves[0].grad[begin:end], leaves[1].grad, leaves[2].grad, leaves[3].grad[begin:end]])
    for clean, poisoned in zip(*grads):
        assert clean.isfinite().all()
        torch.testing.assert_close(poisoned, clean)  # not bit by bit: on a GPU the bias's sums have no order
