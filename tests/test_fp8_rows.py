"""experts_fp8, the experts of FP8 training for rows that are on a rank, beside EPMoE."""

import pytest
import torch

import epmoe
from cases import same_bits
from epmoe.gemm.activations import as_kernel
from epmoe.moe.fp8_rows import experts_fp8
from pace import HANG_S

E4M3 = torch.float8_e4m3fn
H, I, E, T = 272, 144, 5, 200


def made(device, activation="swiglu", weights="ones", seed=3, dtype=torch.bfloat16):
    """(x, idx, weight, dy, gate_up, down): some tokens have no expert, and expert 2 has no rows."""
    g = torch.Generator().manual_seed(seed)
    idx = torch.randint(-1, E, (T, 1), generator=g)
    idx[idx == 2] = 3
    x, dy = torch.randn(T, H, generator=g), torch.randn(T, H, generator=g)
    weight = torch.ones(T, 1) if weights == "ones" else torch.rand(T, 1, generator=g)
    n = I if activation == "gelu" else 2 * I
    gate_up, down = torch.randn(E, n, H, generator=g) / H**0.5, torch.randn(E, H, I, generator=g) / I**0.5
    x, dy, gate_up, down = (t.to(device, dtype) for t in (x, dy, gate_up, down))
    return x, idx.to(device), weight.to(device), dy, gate_up, down


def by_epmoe(x, idx, weight, dy, gate_up, down, activation, wgrad_dtype):
    """y, and the gradients of x, weight, gate_up and down, of EPMoE on one rank."""
    moe = epmoe.EPMoE(H, I, E, 1, epmoe.thread_worlds(1)[0], max_tokens=T, device=x.device, dtype=x.dtype,
                      activation=activation, compute_dtype=E4M3, wgrad_dtype=wgrad_dtype)
    with torch.no_grad():
        moe.gate_up_proj.copy_(gate_up)
        moe.down_proj.copy_(down)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = moe(leaves[0], idx, leaves[1])
    results = [y.detach(), *torch.autograd.grad(y, [*leaves, moe.gate_up_proj, moe.down_proj], dy)]
    moe.layer.synchronize()
    moe.finalize()
    return results


def grouped(idx):
    """The tokens with experts in the order of their experts, and the offsets of the experts."""
    order = idx.flatten().argsort(stable=True)
    counts = torch.bincount(idx.flatten() + 1, minlength=E + 1)
    offsets = torch.nn.functional.pad(counts[1:].cumsum(0), (1, 0)).to(torch.int32)
    return order[counts[0]:], offsets


def by_rows(x, idx, weight, dy, gate_up, down, activation, wgrad_dtype, transposed, tail=0, of=experts_fp8):
    """The same as by_epmoe.  tail: rows after those of the last expert, which hold NaN."""
    order, offsets = grouped(idx)
    nothing = x.new_full((tail, H), float("nan"))
    leaves = [torch.cat([x[order], nothing]), weight[order, 0], gate_up, down]
    if tail:
        leaves[1] = torch.cat([leaves[1], leaves[1].new_zeros(tail)])
    if transposed:
        leaves[2:] = [t.mT.contiguous() for t in leaves[2:]]
    leaves = [t.clone().requires_grad_() for t in leaves]
    row_weight = None if (weight == 1).all() else leaves[1]
    y = of(leaves[0], leaves[2], leaves[3], offsets, row_weight, activation, wgrad_dtype=wgrad_dtype,
           transposed=transposed)
    found = torch.autograd.grad(y, leaves, torch.cat([dy[order], nothing]), allow_unused=True)
    results = []
    for t in (y.detach(), *found[:2]):
        results.append(None if t is None else x.new_zeros(T, *t.shape[1:], dtype=t.dtype))
        if t is not None:
            results[-1][order] = t[:len(order)]
    return [*results, *(t.mT if transposed else t for t in found[2:])]


@pytest.mark.parametrize("activation, wgrad_dtype, dtype, transposed, tail", [
    ("swiglu", None, torch.bfloat16, False, 0), ("swiglu", None, torch.bfloat16, True, 0),
    ("gelu", None, torch.bfloat16, False, 40), ("gpt_oss", torch.bfloat16, torch.bfloat16, True, 40),
    ("swiglu", torch.float16, torch.float16, False, 0)], ids=str)
@pytest.mark.parametrize("weights", ["ones", "any"])
def test_fp8_rows_have_the_bits_of_epmoe(ranks, activation, wgrad_dtype, dtype, transposed, tail, weights):
    given = made(ranks.device, activation, weights, dtype=dtype)
    want = by_epmoe(*given, activation, wgrad_dtype)
    got = by_rows(*given, activation, wgrad_dtype, transposed, tail)
    for name, a, b in zip(("y", "x", "weight", "gate_up", "down"), got, want, strict=True):
        if name == "weight":
            assert (a is None) == (weights == "ones")
            if a is None:
                continue
            b = b.flatten()
        if name == "y" and weights == "any":  # EPMoE rounds before it multiplies by the weight, and after
            torch.testing.assert_close(a, b, rtol=2.0**-7, atol=1e-6)
        else:
            same_bits(a, b, name)


@pytest.mark.parametrize("num_rows", [0, 1])
def test_fp8_rows_few(ranks, num_rows):
    _, _, _, _, gate_up, down = made(ranks.device)
    rows = torch.ones(num_rows, H, device=ranks.device, dtype=torch.bfloat16, requires_grad=True)
    gate_up, down = gate_up.requires_grad_(), down.requires_grad_()
    offsets = torch.tensor([0] * E + [num_rows], dtype=torch.int32, device=ranks.device)
    y = experts_fp8(rows, gate_up, down, offsets)
    y.sum().backward()
    assert y.shape == rows.grad.shape == rows.shape and y.isfinite().all()
    assert not gate_up.grad[:-1].any() and bool(gate_up.grad[-1].any()) == bool(num_rows)


def test_fp8_rows_without_gradients_of_weights(ranks):
    """Frozen weights get none, and the others have the same bits."""
    x, idx, _, dy, gate_up, down = made(ranks.device)
    order, offsets = grouped(idx)
    wanted = None
    for frozen in (False, True):
        rows = x[order].requires_grad_()
        weights = [t.clone().requires_grad_(not frozen) for t in (gate_up, down)]
        y = experts_fp8(rows, *weights, offsets)
        y.backward(dy[order])
        assert all((w.grad is None) == frozen for w in weights)
        wanted = wanted or (y, rows.grad)
        same_bits(y, wanted[0], "y")
        same_bits(rows.grad, wanted[1], "x")
    with torch.no_grad():
        same_bits(experts_fp8(rows, *weights, offsets), wanted[0], "y")


def _compiled(world, device):
    given = made(device, weights="any")
    fast = torch.compile(experts_fp8, backend="aot_eager", fullgraph=True, dynamic=True)
    options = "swiglu", None, False, 7
    return by_rows(*given, *options), by_rows(*given, *options, of=fast)


def test_fp8_rows_compile(ranks):
    """Without a graph break, to the same bits."""
    for want, got in ranks.isolated(_compiled, world_size=1, timeout_s=HANG_S):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same_bits(a, b, f"result {i}")


def test_fp8_rows_operators(ranks):
    """The fake results have the sizes, dtypes and strides of the real ones."""
    x, idx, weight, _, gate_up, down = made(ranks.device)
    order, offsets = grouped(idx)
    pairs = [torch.ops.epmoe.quantize_fp8_weight_pair(w) for w in (gate_up, down)]
    args = (x[order], gate_up.requires_grad_(), down.requires_grad_(), offsets, weight[order, 0],
            *pairs[0], *pairs[1], as_kernel("swiglu"), False, False)
    operators = torch.ops.epmoe
    backward = (x[order], offsets, weight[order, 0], *operators.experts_fp8(*args)[1:], *pairs[0][2:],
                *pairs[1][2:], as_kernel("swiglu"), False, False, True, False)
    for op, args in ((operators.quantize_fp8_weight_pair, (gate_up.detach(),)),
                     (operators.experts_fp8, args), (operators.experts_fp8_backward, backward)):
        torch.library.opcheck(op.default, args, test_utils="test_faketensor")


def test_fp8_rows_errors(ranks):
    rows, gate_up, down = torch.ones(1, 24).half(), torch.ones(1, 32, 24).half(), torch.ones(1, 24, 16).half()
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="need sizes that are multiples of 16"):
        experts_fp8(rows, gate_up, down, offsets)
    with pytest.raises(TypeError, match="bfloat16 or float16, all alike"):
        experts_fp8(rows.float(), gate_up, down, offsets)
    with pytest.raises(TypeError, match="wgrad_dtype torch.bfloat16: must be torch.float16, or None"):
        experts_fp8(rows, gate_up, down, offsets, wgrad_dtype=torch.bfloat16)
    rows, gate_up = torch.ones(1, 16).half().requires_grad_(), torch.ones(1, 32, 16).half()
    y = experts_fp8(rows, gate_up, gate_up[:, :16], offsets)
    with pytest.raises(NotImplementedError, match="no second derivatives in FP8"):
        torch.autograd.grad(y.sum(), rows, create_graph=True)


def test_fp8_rows_of_no_expert_have_no_gradient(ranks):
    def run(world, device):
        x, _, _, _, gate_up, down = made(device)
        offsets = torch.tensor([0, 3, 3, 40, 41, 50], dtype=torch.int32, device=device)
        x.requires_grad_()
        weight = torch.rand(T, device=device).requires_grad_()
        y = experts_fp8(x, gate_up, down, offsets, weight)
        y[:50].float().square().sum().backward()
        return [bool(t.grad[50:].any()) or not t.grad.isfinite().all() for t in (x, weight)]

    assert all(found == [False, False] for found in ranks(run, world_size=1))
