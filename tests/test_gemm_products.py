"""The grouped GEMM compared with sums in float64: products, epilogues and gradients. It also runs on
GPUs without Hopper's kernels. test_gemm_arguments.py has its arguments, test_gemm_streams.py its launches.

The rows before the first expert and after the last one are NaN. Memory that is not written holds NaN too (see
conftest.py).
"""

import itertools
import os
import subprocess
import sys
import types

import pytest
import torch

import epmoe
from cases import generator
from epmoe import reference
from epmoe.comm.device import Capabilities
from epmoe.gemm.activations import as_kernel
from epmoe.gemm.grouped import DGRAD, WGRAD, has_kernel
from gemm_cases import (ACTIVATIONS, MODELS, SIZES, check, finish64, forward64, kernels, problem, products64,
                        rows_of_experts)
from pace import HANG_S

SHAPES = [(32, 16), (272, 208), (96, 1040)]  # N, K: multiples of 16, but not of a tile's size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_gemm_forward_equals_sums_in_float64(ranks, sizes, n, k, dtype):
    x, weight, bias, row_weight, offsets = problem(sizes, n, k, dtype, ranks.device)
    # The rows of all experts at once, and their products once for all activations.
    experts, rows = rows_of_experts(offsets), slice(offsets[0].item(), offsets[-1].item())
    y64, size64 = (torch.cat(parts) for parts in
                   zip(*(products64(x[begin:end], weight[e]) for e, begin, end in experts)))
    bias_of_row = torch.cat([bias[e].expand(end - begin, n) for e, begin, end in experts])
    for portable, activation in itertools.product(kernels(ranks), ACTIVATIONS):
        for b, w in ((None, None), (bias, row_weight)):
            y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=b, activation=activation, row_weight=w,
                                   portable=portable)
            want, size = finish64(y64, size64, None if b is None else bias_of_row, activation,
                                  None if w is None else w[rows])
            check(y[rows], want, size, f"{activation}, bias and row weights: {b is not None}")


@pytest.mark.parametrize("sizes", [[16, 9, 0, 24, 1, 33, 8, 17] * 8, [40, 0] * 32, [1] * 64],
                         ids=["about 16", "0 or 40", "1"])
def test_gemm_of_few_rows_and_many_columns(ranks, sizes):
    """On Hopper a CTA then has more finished tiles than it can hold, so it writes them in several bursts."""
    x, weight, bias, row_weight, offsets = problem(sizes, 4112, 48, torch.bfloat16, ranks.device)
    for activation in (None, "swiglu"):
        y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias, activation=activation,
                               row_weight=row_weight)
        for e, begin, end in rows_of_experts(offsets):
            want, size = forward64(x[begin:end], weight[e], bias[e], activation, row_weight[begin:end])
            check(y[begin:end], want, size, f"{activation}, expert {e}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_gemm_backward_products_equal_sums_in_float64(ranks, sizes, n, k, dtype):
    x, weight, _, _, offsets = problem(sizes, n, k, dtype, ranks.device)
    dy = problem(sizes, k, n, dtype, ranks.device, seed=1)[0]
    op = torch.ops.epmoe.grouped_gemm
    for portable in kernels(ranks):
        dx = op(dy, weight, offsets, None, None, None, None, DGRAD, as_kernel(None), portable, None)
        dw = op(dy, x, offsets, None, None, None, None, WGRAD, as_kernel(None), portable, None)
        for e, begin, end in rows_of_experts(offsets):
            g, r, w = dy[begin:end].double(), x[begin:end].double(), weight[e].double()
            check(dx[begin:end], g @ w, g.abs() @ w.abs(), f"dx of expert {e}")
            check(dw[e], g.t() @ r, g.abs().t() @ r.abs(), f"dw of expert {e}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm_gradients_equal_one_gemm_per_expert(ranks, activation):
    sizes = [5, 0, 40]
    x, weight, bias, row_weight, offsets = problem(sizes, 32, 48, torch.float16, ranks.device, before=0,
                                                   after=0)
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias, row_weight)]
    y = epmoe.grouped_gemm(inputs[0], inputs[1], torch.tensor(sizes, device=ranks.device), bias=inputs[2],
                           activation=activation, row_weight=inputs[3])
    g = torch.randn(y.shape, generator=generator(7)).to(y)
    got = torch.autograd.grad(y, inputs, g)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias, row_weight)]
    parts = []
    for e, begin, end in rows_of_experts(offsets):
        h = exact[0][begin:end] @ exact[1][e].t() + exact[2][e]
        h = h if activation is None else reference.activate(h, activation)
        parts.append(h * exact[3][begin:end, None])
    want = torch.autograd.grad(torch.cat(parts), exact, g.double())
    for name, a, b in zip(("x", "weight", "bias", "row_weight"), got, want):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2,
                                   msg=lambda m, name=name: f"gradient of {name}: {m}")


def test_gemm_is_traced_by_the_compiler(ranks):
    x, weight, bias, _, offsets = problem([4, 0, 9], 32, 16, torch.bfloat16, ranks.device, before=0, after=0)

    def layer(x, weight):
        return epmoe.grouped_gemm(x * 2, weight, offsets=offsets, bias=bias, activation="swiglu")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), layer(x, weight))

    def with_numbers(x, weight):  # an activation that is made inside of the compiled code
        return epmoe.grouped_gemm(x, weight, offsets=offsets, activation=epmoe.SwiGLU(1.3, 2.0))

    compiled = torch.compile(with_numbers, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), with_numbers(x, weight))


@pytest.mark.cuda_only
@pytest.mark.parametrize("model", MODELS)
def test_gemm_of_models_equals_sums_in_float64(ranks, model):
    """The GEMMs of a layer's forward and backward at full size. Sampled rows are compared with float64."""
    n, k, num_experts, num_rows = MODELS[model]
    g = torch.Generator(device=ranks.device).manual_seed(1)
    counts = torch.bincount(torch.randint(num_experts, (num_rows,), device=ranks.device, generator=g),
                            minlength=num_experts)
    x, dy, weight = (torch.randn(*shape, dtype=torch.bfloat16, device=ranks.device, generator=g)
                     for shape in ((num_rows, k), (num_rows, n), (num_experts, n, k)))
    weight.div_(k**0.5)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    op = torch.ops.epmoe.grouped_gemm
    y = op(x, weight, offsets, None, None, None, None, 0, as_kernel(None), False, None)
    h = op(x, weight, offsets, None, None, None, None, 0, as_kernel("swiglu"), False, None)
    dx = op(dy, weight, offsets, None, None, None, None, DGRAD, as_kernel(None), False, None)
    dw = op(dy, x, offsets, None, None, None, None, WGRAD, as_kernel(None), False, None)
    ends = offsets.tolist()
    for e in (0, num_experts // 2, num_experts - 1):
        begin, end = ends[e], ends[e + 1]
        at = torch.arange(begin, end, 37, device=ranks.device)
        for got, activation in ((y, None), (h, "swiglu")):
            want, size = forward64(x[at], weight[e], None, activation, None)
            check(got[at], want, size, f"{activation} of expert {e}")
        d = dy[at].double()
        check(dx[at], d @ weight[e].double(), d.abs() @ weight[e].double().abs(), f"dx of expert {e}")
        d, r = dy[begin:end, ::61].double(), x[begin:end].double()
        check(dw[e, ::61], d.t() @ r, d.abs().t() @ r.abs(), f"dw of expert {e}")


# ---- other GPUs ----

@pytest.mark.parametrize("capability, expected", [((7, 5), False), ((8, 0), True), ((9, 0), True),
                                                  ((10, 0), True)])
def test_gemm_has_kernels_from_capability_8_on(monkeypatch, capability, expected):
    """For older GPUs torch multiplies. The choice depends on the capability, so the test needs no GPU."""
    monkeypatch.setattr(epmoe._C, "HAS_CUDA", 1)
    monkeypatch.setattr("epmoe.gemm.grouped.capabilities",
                        lambda device: Capabilities(*capability, 132, False))
    a, b = (types.SimpleNamespace(shape=shape, dtype=torch.bfloat16, device=torch.device("cuda", 0))
            for shape in ((4, 16), (2, 32, 16)))
    assert has_kernel(a, b) == expected


GEMM_FROM_PTX = """
import sys, torch
from epmoe import _C
torch.cuda.set_device(int(sys.argv[1]))
g = torch.Generator().manual_seed(1)
x, weight = torch.randn(200, 64, generator=g).bfloat16(), torch.randn(2, 48, 64, generator=g).bfloat16()
offsets, counter = torch.tensor([0, 130, 200], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
out = torch.full((200, 48), torch.nan).bfloat16()
# torch itself may launch no kernel here, because it has no PTX that the driver could compile
x_, weight_, offsets_, counter_, out_ = (t.cuda() for t in (x, weight, offsets, counter, out))
_C.grouped_gemm(0, (0, 0, 0), 0.0, x_, weight_, offsets_, None, None, counter_, out_, False, *[None] * 6, 0,
                False)
want = torch.cat([x[:130].double() @ weight[0].double().t(), x[130:].double() @ weight[1].double().t()])
torch.testing.assert_close(out_.cpu().double(), want, rtol=2**-8, atol=1e-4)
"""


@pytest.mark.cuda_only
def test_gemm_from_ptx(ranks):
    """The driver compiles the module's PTX, as for a module built for older GPUs. The kernels for Hopper have
    no body in that PTX.
    """
    done = subprocess.run([sys.executable, "-c", GEMM_FROM_PTX, str(ranks.device.index)],
                          env=os.environ | {"CUDA_FORCE_PTX_JIT": "1"},
                          capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


def test_gemm_bias_gradient_is_of_the_rows_of_experts(ranks):
    """Rows before the first expert's and after the last one's add nothing, whatever their gradient is."""
    x = torch.ones(10, 16, device=ranks.device)
    weight = torch.ones(2, 32, 16, device=ranks.device)
    bias = torch.zeros(2, 32, device=ranks.device, requires_grad=True)
    offsets = torch.tensor([2, 5, 7], dtype=torch.int32, device=ranks.device)
    y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias)
    y.backward(torch.ones_like(y))
    assert bias.grad[:, 0].tolist() == [3, 2] and (bias.grad == bias.grad[:, :1]).all()


def test_gemm_second_derivative_without_rows(ranks):
    """A rank whose experts got no rows takes part in the second backward of the others."""

    def run(world, device):
        shapes = (0, 16), (2, 8, 16), (2, 8)
        leaves = [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]
        x, weight, bias = leaves
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        y = epmoe.grouped_gemm(x, weight, counts, bias=bias, activation="gelu")
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves, materialize_grads=True)
        return [(tuple(t.shape), t.count_nonzero().item()) for t in (*first, *second)]

    for found in ranks(run):
        assert found == [((0, 16), 0), ((2, 8, 16), 0), ((2, 8), 0)] * 2
