"""Gradients of weights that are added to a buffer: compared with sums in float64, on every kernel."""

import pytest
import torch

import epmoe
from cases import generator, misaligned
from gemm_cases import EPS, SIZES, kernels, problem, rows_of_experts

SCALES = (1.0, 0.25, -0.7)
MARGIN = 64  # numbers before and after the buffer, which must not change


def factors(sizes, n, k, dtype, device):
    """dy [M, N], x [M, K] and offsets; rows that belong to no expert are NaN."""
    x, *_, offsets = problem(sizes, n, k, dtype, device)
    dy = torch.randn(len(x), n, generator=generator(3, n, k, len(x))).to(dtype).to(device)
    dy[x[:, 0].isnan()] = float("nan")
    return dy, x, offsets


def buffer(num_experts, n, k, dtype, device, seed):
    """A contiguous [L, N, K] of random numbers in the middle of a larger tensor, and that tensor."""
    size = num_experts * n * k
    whole = torch.randn(size + 2 * MARGIN, generator=generator(4, seed, size)).to(dtype).to(device)
    return whole[MARGIN:MARGIN + size].view(num_experts, n, k), whole


def check(out, before, dy, x, offsets, scale):
    """The error of a sum is one rounding of the result, that of a float32 sum of terms, and its rounding."""
    for e, begin, end in rows_of_experts(offsets):
        left, right = dy[begin:end].double().t(), x[begin:end].double()
        want = before[e].double() + scale * (left @ right)
        size = before[e].double().abs() + abs(scale) * (left.abs() @ right.abs())
        slack = EPS[out.dtype] * want.abs() + 2.0**-19 * size
        assert ((out[e].double() - want).abs() <= slack).all(), f"expert {e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n, k", [(32, 16), (272, 208)])
@pytest.mark.parametrize("sizes", [SIZES[name] for name in ("mixed", "hot", "empty")])
def test_gemm_accumulates_in_float32(ranks, sizes, n, k, dtype):
    dy, x, offsets = factors(sizes, n, k, dtype, ranks.device)
    for portable in kernels(ranks):
        for seed, scale in enumerate(SCALES):
            out, whole = buffer(len(sizes), n, k, torch.float32, ranks.device, seed)
            before, version = whole.clone(), out._version
            torch.ops.epmoe.grouped_wgrad_add(dy, x, offsets, out, scale, portable)
            check(out, before[MARGIN:MARGIN + out.numel()].view_as(out), dy, x, offsets, scale)
            changed = torch.zeros_like(whole, dtype=torch.bool)
            has_rows = torch.tensor(sizes, device=x.device).bool()
            changed[MARGIN:MARGIN + out.numel()] = has_rows.repeat_interleave(n * k)
            assert torch.equal(whole[~changed], before[~changed])  # bit by bit, also experts without rows
            assert out._version > version or not sum(sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gemm_accumulates_in_other_buffers(ranks, dtype):
    """Of the inputs' dtype; at an address that the kernel cannot take; rows at such an address."""
    sizes = SIZES["mixed"]
    dy, x, offsets = factors(sizes, 32, 16, dtype, ranks.device)
    for out_dtype in {torch.float32, dtype}:
        for odd in (False, True):
            out, _ = buffer(len(sizes), 32, 16, out_dtype, ranks.device, 1)
            out, left = (misaligned(out), misaligned(dy)) if odd else (out.clone(), dy)
            before = out.clone()
            torch.ops.epmoe.grouped_wgrad_add(left, x, offsets, out, 0.5, False)
            check(out, before, dy, x, offsets, 0.5)


@pytest.mark.parametrize("which, name", [(0, "rows"), (1, "input")])
def test_gemm_accumulates_into_other_memory_than_it_reads(ranks, which, name):
    """Each expert's sum would change the rows of the next one.  Neighbours in one memory are right."""
    sizes = SIZES["mixed"]
    *inputs, offsets = factors(sizes, 32, 16, torch.bfloat16, ranks.device)
    num = inputs[which].numel() * 2 // 4  # of float32 numbers
    memory = torch.zeros(num + len(sizes) * 32 * 16, device=ranks.device)
    inputs[which] = memory[:num].view(torch.bfloat16).view_as(inputs[which]).copy_(inputs[which])
    for portable in kernels(ranks):
        before = memory.clone()
        overlapping = memory[num - 4:][:len(sizes) * 32 * 16].view(len(sizes), 32, 16)
        with pytest.raises(ValueError, match=f"output shares memory with {name}"):
            torch.ops.epmoe.grouped_wgrad_add(*inputs, offsets, overlapping, 0.5, portable)
        assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
        beside = memory[num:].view(len(sizes), 32, 16)
        torch.ops.epmoe.grouped_wgrad_add(*inputs, offsets, beside, 0.5, portable)
        check(beside, before[num:].view_as(beside), *inputs, offsets, 0.5)


def test_gemm_accumulates_twice_in_the_same_order(ranks):
    """Two additions give the same bits in every run: one warp adds to a number."""
    dy, x, offsets = factors(SIZES["mixed"], 272, 208, torch.bfloat16, ranks.device)
    results = []
    for _ in range(3):
        out, _ = buffer(len(SIZES["mixed"]), 272, 208, torch.float32, ranks.device, 2)
        for scale in (1.0, 0.3):
            torch.ops.epmoe.grouped_wgrad_add(dy, x, offsets, out, scale, False)
        results.append(out.clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.cuda_only
def test_gemm_accumulates_in_a_graph(ranks):
    """Each replay adds once more, also with other numbers and other sizes of the experts."""
    dy, x, offsets = factors(SIZES["mixed"], 272, 208, torch.bfloat16, ranks.device)
    out = torch.zeros(len(SIZES["mixed"]), 272, 208, device=ranks.device)
    torch.ops.epmoe.grouped_wgrad_add(dy, x, offsets, out, 1.0, False)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.epmoe.grouped_wgrad_add(dy, x, offsets, out, 1.0, False)
    for sizes in ((2, 3, 60, 130, 17, 200), (0, 0, 400, 12, 0, 0)):
        offsets.copy_(torch.tensor([3, *sizes]).cumsum(0))
        out.zero_()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        check(out, torch.zeros_like(out), dy, x, offsets, 2.0)
