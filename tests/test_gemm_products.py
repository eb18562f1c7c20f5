"""Grouped GEMM against sums in float64: products, epilogues, gradients, in graphs, on streams and on other
GPUs.  How it is called: test_gemm_arguments.py.

Rows that belong to no expert are NaN before and behind; memory that is not written is poison (see conftest).
"""

import itertools
import os
import subprocess
import sys
import threading
import types

import pytest
import torch

import epmoe
from cases import generator
from epmoe import reference
from epmoe.gemm import DGRAD, WGRAD, _has_kernel
from pace import HANG_S

# Rows of each expert: none, one, a part of a tile, several tiles, one hot expert.
SIZES = {"mixed": [1, 0, 64, 130, 17, 200], "hot": [0, 0, 700, 1], "single": [300], "empty": [0, 0, 0],
         "many": [3] * 128}
SHAPES = [(32, 16), (272, 208), (96, 1040)]  # N, K: multiples of 16 that no tile divides
ACTIVATIONS = [None, "gelu", "swiglu", "gpt_oss", epmoe.GptOss(alpha=1.3, limit=0.6)]
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TINY = {torch.float32: 1e-30, torch.bfloat16: 1e-30, torch.float16: 2.0**-24}  # float16 has few small numbers
# N of gate and up, K, L, rows: the experts of one rank of four in models.
MODELS = {"seed": (3072, 1536, 96, 183501), "dsv3": (4096, 7168, 64, 65536),
          "qwen3-235b": (3072, 4096, 32, 65536),
          "mixtral": (28672, 4096, 2, 16384), "gpt-oss": (5760, 2880, 32, 32768)}


def problem(sizes, n, k, dtype, device, seed=0, before=3, behind=5):
    """x [M, K], weight [L, N, K], bias, row_weight, offsets; rows of nobody are NaN."""
    g = generator(seed, n, k, len(sizes), sum(sizes))
    rows = before + sum(sizes) + behind
    x = torch.randn(rows, k, generator=g)
    x[:before], x[before + sum(sizes):] = float("nan"), float("nan")
    weight, bias = torch.randn(len(sizes), n, k, generator=g) / k**0.5, torch.randn(len(sizes), n,
                                                                                    generator=g)
    offsets = torch.tensor([before, *sizes]).cumsum(0).to(torch.int32)
    x, weight, bias = (t.to(dtype).to(device) for t in (x, weight, bias))
    return x, weight, bias, torch.rand(rows, generator=g).to(device), offsets.to(device)


def check(got, want, size, what):
    """|got - want| within one rounding of the result, and the rounding of float32 sums of terms of this size.
    """
    got, slack = got.double(), EPS[got.dtype] * want.abs() + 2.0**-19 * size + TINY[got.dtype]
    worst = ((got - want).abs() / slack).max().item() if want.numel() else 0.0
    assert worst <= 1 and not got.isnan().any(), f"{what}: off by {worst} times what rounding allows"


def forward64(x, weight, bias, activation, row_weight):
    y = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    if activation not in (None, "gelu"):  # an error of one factor counts times the other
        gate, up = (size.chunk(2, -1)) if activation == "swiglu" else (size[:, 0::2], size[:, 1::2])
        size = 2 * (gate + 1) * (up + 1)
    y = y if activation is None else reference.activate(y, activation)
    return (y, size) if row_weight is None else (y * row_weight.double()[:, None],
                                                 size * row_weight.double()[:, None])


def kernels(ranks):
    """Values of `portable`: on a GPU also the kernel for any GPU.  The CPU has one way only."""
    return (False,) if ranks.device.type == "cpu" else (False, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_gemm_forward_equals_sums_in_float64(ranks, sizes, n, k, dtype):
    x, weight, bias, row_weight, offsets = problem(sizes, n, k, dtype, ranks.device)
    for portable, activation in itertools.product(kernels(ranks), ACTIVATIONS):
        for b, w in ((None, None), (bias, row_weight)):
            y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=b, activation=activation, row_weight=w,
                                   portable=portable)
            for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
                want, size = forward64(x[begin:end], weight[e], None if b is None else b[e], activation,
                                       None if w is None else w[begin:end])
                check(y[begin:end], want, size, f"{activation}, expert {e}")


@pytest.mark.parametrize("sizes", [[16, 9, 0, 24, 1, 33, 8, 17] * 8, [40, 0] * 32, [1] * 64],
                         ids=["about 16", "0 or 40", "1"])
def test_gemm_of_few_rows_and_many_columns(ranks, sizes):
    """On Hopper a block then has more tiles than it keeps: it writes several bursts of them."""
    x, weight, bias, row_weight, offsets = problem(sizes, 4112, 48, torch.bfloat16, ranks.device)
    for activation in (None, "swiglu"):
        y = epmoe.grouped_gemm(x, weight, offsets=offsets, bias=bias, activation=activation,
                               row_weight=row_weight)
        for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
            check(y[begin:end], *forward64(x[begin:end], weight[e], bias[e], activation,
                                           row_weight[begin:end]), f"{activation}, expert {e}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_gemm_backward_products_equal_sums_in_float64(ranks, sizes, n, k, dtype):
    x, weight, _, _, offsets = problem(sizes, n, k, dtype, ranks.device)
    dy = problem(sizes, k, n, dtype, ranks.device, seed=1)[0]
    op = torch.ops.epmoe.grouped_gemm
    for portable in kernels(ranks):
        dx = op(dy, weight, offsets, None, None, DGRAD, 0, portable)
        dw = op(dy, x, offsets, None, None, WGRAD, 0, portable)
        for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
            g, r, w = dy[begin:end].double(), x[begin:end].double(), weight[e].double()
            check(dx[begin:end], g @ w, g.abs() @ w.abs(), f"dx of expert {e}")
            check(dw[e], g.t() @ r, g.abs().t() @ r.abs(), f"dw of expert {e}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm_gradients_are_those_of_one_product_an_expert(ranks, activation):
    sizes = [5, 0, 40]
    x, weight, bias, row_weight, offsets = problem(sizes, 32, 48, torch.float16, ranks.device, before=0,
                                                   behind=0)
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias, row_weight)]
    y = epmoe.grouped_gemm(inputs[0], inputs[1], torch.tensor(sizes, device=ranks.device), bias=inputs[2],
                           activation=activation,
                           row_weight=inputs[3])
    g = torch.randn(y.shape, generator=generator(7)).to(y)
    got = torch.autograd.grad(y, inputs, g)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias, row_weight)]
    at, parts = 0, []
    for e, n in enumerate(sizes):
        h = exact[0][at:at + n] @ exact[1][e].t() + exact[2][e]
        parts.append((h if activation is None else reference.activate(h, activation)) * exact[3][at:at + n,
                                                                                                 None])
        at += n
    want = torch.autograd.grad(torch.cat(parts), exact, g.double())
    for name, a, b in zip(("x", "weight", "bias", "row_weight"), got, want):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2, msg=lambda m,
                                   name=name: f"gradient of {name}: {m}")


def test_gemm_is_traced_by_the_compiler(ranks):
    x, weight, bias, _, offsets = problem([4, 0, 9], 32, 16, torch.bfloat16, ranks.device, before=0, behind=0)

    def layer(x, weight):
        return epmoe.grouped_gemm(x * 2, weight, offsets=offsets, bias=bias, activation="swiglu")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), layer(x, weight))


@pytest.mark.cuda_only
@pytest.mark.parametrize("model", MODELS)
def test_gemm_of_models_equals_torch(ranks, model):
    """Full sizes, sampled rows in float64: every product of the layer's forward and backward."""
    n, k, num_experts, num_rows = MODELS[model]
    g = torch.Generator(device=ranks.device).manual_seed(1)
    counts = torch.bincount(torch.randint(num_experts, (num_rows,), device=ranks.device, generator=g),
                            minlength=num_experts)
    x = torch.randn(num_rows, k, device=ranks.device, generator=g).bfloat16()
    dy = torch.randn(num_rows, n, device=ranks.device, generator=g).bfloat16()
    weight = (torch.randn(num_experts, n, k, device=ranks.device, generator=g) / k**0.5).bfloat16()
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    op = torch.ops.epmoe.grouped_gemm
    y, h = op(x, weight, offsets, None, None, 0, 0, False), op(x, weight, offsets, None, None, 0, 2, False)
    dx, dw = op(dy, weight, offsets, None, None, DGRAD, 0, False), op(dy, x, offsets, None, None, WGRAD, 0,
                                                                      False)
    ends = offsets.tolist()
    for e in (0, num_experts // 2, num_experts - 1):
        begin, end = ends[e], ends[e + 1]
        at = torch.arange(begin, end, 37, device=ranks.device)
        for got, activation in ((y, None), (h, "swiglu")):
            check(got[at], *forward64(x[at], weight[e], None, activation, None),
                  f"{activation} of expert {e}")
        d = dy[at].double()
        check(dx[at], d @ weight[e].double(), d.abs() @ weight[e].double().abs(), f"dx of expert {e}")
        d, r = dy[begin:end, ::61].double(), x[begin:end].double()
        check(dw[e, ::61], d.t() @ r, d.abs().t() @ r.abs(), f"dw of expert {e}")


@pytest.mark.cuda_only
def test_gemm_in_a_graph_follows_sizes_on_the_device(ranks):
    x, weight, _, _, offsets = problem([40, 90], 64, 32, torch.bfloat16, ranks.device, before=0, behind=0)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    epmoe.grouped_gemm(x, weight, offsets=offsets)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        y = epmoe.grouped_gemm(x, weight, offsets=offsets)
    for first in (40, 0, 130, 77):
        offsets.copy_(torch.tensor([0, first, 130], dtype=torch.int32))
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, epmoe.grouped_gemm(x, weight, offsets=offsets)) and not y.isnan().any()


@pytest.mark.cuda_only
def test_gemm_streams_and_graphs_share_nothing(ranks):
    """Launches that run side by side hand out tiles of their own."""
    problems = [problem(sizes, 1024, 512, torch.bfloat16, ranks.device, seed=i, before=0, behind=0)
                for i, sizes in enumerate(([300, 0, 5000], [64] * 50, [4096, 1, 777]))]
    want = [epmoe.grouped_gemm(x, weight, offsets=offsets) for x, weight, _, _, offsets in problems]
    streams, graphs, replayed = [torch.cuda.Stream() for _ in problems], [torch.cuda.CUDAGraph()
                                                                          for _ in problems], []
    torch.cuda.synchronize()
    for graph, (x, weight, _, _, offsets) in zip(graphs, problems):
        with torch.cuda.graph(graph, stream=streams[0]):
            replayed.append(epmoe.grouped_gemm(x, weight, offsets=offsets))
    for _ in range(20):
        got = []
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                x, weight, _, _, offsets = problems[i]
                got.append(epmoe.grouped_gemm(x, weight, offsets=offsets))
                graphs[(i + 1) % len(graphs)].replay()
        torch.cuda.synchronize()
        for result in (got, replayed):
            assert all(torch.equal(a, b) for a, b in zip(result, want))
            for y in result:
                y.fill_(float("nan"))


# ---- other GPUs ----

@pytest.mark.parametrize("capability, has", [((7, 5), False), ((8, 0), True), ((9, 0), True),
                                             ((10, 0), True)])
def test_gemm_has_kernels_from_capability_8_on(monkeypatch, capability, has):
    """Before that torch multiplies; whose GPU it is, is all that the choice looks at, so none is needed here.
    """
    monkeypatch.setattr(epmoe._C, "HAS_CUDA", 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    a, b = (types.SimpleNamespace(shape=shape, dtype=torch.bfloat16, device=torch.device("cuda", 0))
            for shape in ((4, 16), (2, 32, 16)))
    assert _has_kernel(a, b) == has


OF_PTX_ALONE = """
import sys, torch
from epmoe import _C
torch.cuda.set_device(int(sys.argv[1]))
g = torch.Generator().manual_seed(1)
x, weight = torch.randn(200, 64, generator=g).bfloat16(), torch.randn(2, 48, 64, generator=g).bfloat16()
offsets, tickets, out = torch.tensor([0, 130, 200], dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.full((200, 48), torch.nan).bfloat16()
# no kernel of torch's: it has no such PTX
x_, weight_, offsets_, tickets_, out_ = (t.cuda() for t in (x, weight, offsets, tickets, out))
_C.grouped_gemm(0, 0, 0.0, 0.0, x_, weight_, offsets_, None, None, tickets_, out_, False)
want = torch.cat([x[:130].double() @ weight[0].double().t(), x[130:].double() @ weight[1].double().t()])
torch.testing.assert_close(out_.cpu().double(), want, rtol=2**-8, atol=1e-4)
"""


@pytest.mark.cuda_only
def test_gemm_of_ptx_alone_is_right(ranks):
    """As in a module built for older GPUs: the driver takes its PTX, in which Hopper's kernels have no body.
    """
    done = subprocess.run([sys.executable, "-c", OF_PTX_ALONE, str(ranks.device.index)],
                          env=os.environ | {"CUDA_FORCE_PTX_JIT": "1"},
                          capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.cuda_only
def test_gemm_in_graphs_that_torch_makes(ranks):
    """reduce-overhead tries everything on a stream with a pool of memory of its own, which must be empty
    afterwards.
    """
    x, weight, _, _, offsets = problem([40, 0, 9], 64, 32, torch.bfloat16, ranks.device)
    fast = torch.compile(lambda x: epmoe.grouped_gemm(x, weight, offsets=offsets, activation="gelu") * 2,
                         mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn_like(x)
        got, want = fast(x).clone(), epmoe.grouped_gemm(x, weight, offsets=offsets, activation="gelu") * 2
        begin, end = offsets[0].item(), offsets[-1].item()
        assert torch.equal(got[begin:end], want[begin:end])


@pytest.mark.cuda_only
def test_gemm_in_a_thread_that_has_done_nothing_on_the_gpu(ranks):
    """The first call of a thread, as of autograd's: the driver has no context there yet."""
    x, weight, _, _, offsets = problem([40, 0, 9], 64, 32, torch.bfloat16, ranks.device)
    want, got = epmoe.grouped_gemm(x, weight, offsets=offsets), torch.zeros(len(x), 64, dtype=x.dtype,
                                                                            device=x.device)
    torch.cuda.synchronize()
    errors = []

    def first():
        try:
            epmoe._C.grouped_gemm(0, 0, 0.0, 0.0, x, weight, offsets, None, None, tickets, got, False)
        except epmoe.EpError as e:
            errors.append(e)

    tickets = torch.zeros(1, dtype=torch.int64, device=x.device)
    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    begin, end = offsets[0].item(), offsets[-1].item()
    assert not errors and torch.equal(got[begin:end], want[begin:end])
