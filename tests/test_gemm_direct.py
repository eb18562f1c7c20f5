"""Calls that go past the operator: when they do, and what still sees the operator.

Each operator's implementation is called directly only where nothing could tell the difference.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import epmoe
from cases import generator
from epmoe import torch_modes
from gemm_cases import ACTIVATIONS, problem

CASES = ["grouped_gemm", "grouped_gemm in FP8", "quantize_fp8"]  # each begins with the name of its operator
N, K, SIZES = 32, 16, [4, 0, 9]


@pytest.fixture
def direct_calls(monkeypatch):
    """The names of the operators whose implementations were called directly."""
    calls = []

    def recorded(name, fn):
        return lambda *args: calls.append(name) or fn(*args)

    monkeypatch.setattr(torch_modes, "_implementations",
                        {name: recorded(name, fn) for name, fn in torch_modes._implementations.items()})
    return calls


def case(name, device):
    """A function that needs the operator of this case, and its arguments."""
    x, weight, _, _, offsets = problem(SIZES, N, K, torch.bfloat16, device, before=0, after=0)
    if name == "quantize_fp8":
        return lambda x: epmoe.quantize_fp8(x)[0], (x,)
    if name == "grouped_gemm":
        return lambda x, weight, offsets: epmoe.grouped_gemm(x, weight, offsets=offsets), (x, weight, offsets)
    (q, a_scale), (fp8, b_scale) = epmoe.quantize_fp8(x), epmoe.quantize_fp8_weight(weight)
    return (lambda q, fp8, offsets, a_scale, b_scale:
            epmoe.grouped_gemm(q, fp8, offsets=offsets, a_scale=a_scale, b_scale=b_scale),
            (q, fp8, offsets, a_scale, b_scale))


def same(got, want):
    """Whether two tensors have the same dtype and bits."""
    return got.dtype == want.dtype and torch.equal(got.float(), want.float())


class Seen(TorchDispatchMode):
    """Records the names of the operators of epmoe."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "epmoe":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    """Records the texts of all functions."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A tensor that has another one, and that handles all operators itself."""

    seen = []
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(),
                                                   dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        out = func(*tree_map_only(Wrapper, lambda t: t.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, out)


class Named(torch.Tensor):
    """A tensor whose results are tensors of the same class, by torch's own __torch_function__."""


class Module(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


class Product(torch.autograd.Function):
    """A product whose backward is a grouped GEMM with other weights."""

    @staticmethod
    def forward(ctx, x, weight, offsets):
        ctx.save_for_backward(weight, offsets)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        weight, offsets = ctx.saved_tensors
        return epmoe.grouped_gemm(g, weight, offsets=offsets), None, None


# ---- the same bits ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gemm_direct_equals_operator(ranks, direct_calls, dtype):
    x, weight, bias, row_weight, offsets = problem(SIZES, N, K, dtype, ranks.device, before=0, after=0)
    for activation in ACTIVATIONS:
        for b, w in ((None, None), (bias, row_weight)):
            for weights in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
                given = dict(offsets=offsets, bias=b, row_weight=w, activation=activation)
                direct_calls.clear()
                y = epmoe.grouped_gemm(x, weights, **given)
                assert direct_calls == ["grouped_gemm"]
                with Seen() as seen:
                    assert same(epmoe.grouped_gemm(x, weights, **given), y)
                assert seen.names == direct_calls == ["grouped_gemm"]


def test_fp8_direct_equals_operator(ranks, direct_calls):
    _, (q, fp8, offsets, a_scale, b_scale) = case("grouped_gemm in FP8", ranks.device)
    for activation in ACTIVATIONS:
        given = dict(offsets=offsets, activation=activation, a_scale=a_scale, b_scale=b_scale,
                     out_dtype=torch.float8_e4m3fn)
        direct_calls.clear()
        y, scales = epmoe.grouped_gemm(q, fp8, **given)
        assert direct_calls == ["grouped_gemm", "quantize_fp8"]
        with Seen() as seen:
            again, scales_again = epmoe.grouped_gemm(q, fp8, **given)
        assert seen.names == direct_calls == ["grouped_gemm", "quantize_fp8"]
        assert same(again, y) and same(scales_again, scales)


def test_gemm_of_parameters_is_direct_without_gradients(ranks, direct_calls):
    _, (x, weight, offsets) = case("grouped_gemm", ranks.device)
    weight = torch.nn.Parameter(weight)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            epmoe.grouped_gemm(x, weight, offsets=offsets)
    assert direct_calls == ["grouped_gemm"] * 2


# ---- what sees the operator ----


@pytest.mark.parametrize("name", CASES)
def test_gemm_seen_by_function_mode(ranks, direct_calls, name):
    f, args = case(name, ranks.device)
    want = f(*args)
    direct_calls.clear()
    with SeenFunctions() as seen:
        assert same(f(*args), want)
    assert not direct_calls and any(f"epmoe.{name.split()[0]}" in text for text in seen.names)


@pytest.mark.parametrize("name", CASES)
def test_gemm_seen_by_fake_tensors(direct_calls, name):
    """Fake tensors have no numbers, whether their mode is on or not."""
    f, args = case(name, torch.device("cpu"))
    want = f(*args)
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t) for t in args]
    direct_calls.clear()
    with mode:
        inside = f(*fake)
    for y in (inside, f(*fake)):
        assert isinstance(y, FakeTensor) and y.shape == want.shape and y.dtype == want.dtype
    assert not direct_calls


@pytest.mark.parametrize("name", CASES)
def test_gemm_seen_on_meta(direct_calls, name):
    f, args = case(name, torch.device("cpu"))
    want = f(*args)
    direct_calls.clear()
    y = f(*(t.to("meta") for t in args))
    assert y.is_meta and y.shape == want.shape and not direct_calls


@pytest.mark.parametrize("name", CASES)
def test_gemm_seen_by_subclass_with_torch_dispatch(ranks, direct_calls, name):
    f, args = case(name, ranks.device)
    want = f(*args)
    direct_calls.clear()
    Wrapper.seen.clear()
    y = f(Wrapper(args[0]), *args[1:])
    assert type(y) is Wrapper and same(y.inner, want)
    assert not direct_calls and f"epmoe.{name.split()[0]}.default" in Wrapper.seen


def test_gemm_seen_by_subclass_with_torch_function(ranks, direct_calls):
    f, (x, weight, offsets) = case("grouped_gemm", ranks.device)
    want = f(x, weight, offsets)
    direct_calls.clear()
    y = f(x, weight.as_subclass(Named), offsets)
    assert type(y) is Named and same(y.as_subclass(torch.Tensor), want) and not direct_calls


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gemm_seen_by_make_fx(ranks, direct_calls, name, pre_dispatch):
    f, args = case(name, ranks.device)
    want = f(*args)
    direct_calls.clear()
    graph = make_fx(f, pre_dispatch=pre_dispatch)(*args)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert f"epmoe.{name.split()[0]}.default" in targets and not direct_calls
    assert same(graph(*args), want)


@pytest.mark.filterwarnings("ignore")  # torch deprecates it, and warns of sizes
def test_gemm_seen_by_jit_trace(ranks, direct_calls):
    f, args = case("grouped_gemm", ranks.device)
    want = f(*args)
    direct_calls.clear()
    traced = torch.jit.trace(f, args, check_trace=False)
    assert "epmoe::grouped_gemm" in str(traced.graph) and not direct_calls
    assert same(traced(*args), want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_gemm_seen_by_compiler(ranks, direct_calls, name, backend):
    f, args = case(name, ranks.device)
    want = f(*args)
    direct_calls.clear()
    torch._dynamo.reset()
    assert same(torch.compile(f, fullgraph=True, backend=backend)(*args), want)
    graph = torch.export.export(Module(f), args).graph
    targets = [str(node.target) for node in graph.nodes]
    assert f"epmoe.{name.split()[0]}.default" in targets and not direct_calls


def test_gemm_seen_by_vmap(ranks, direct_calls):
    _, (x, weight, offsets) = case("grouped_gemm", ranks.device)
    xs = torch.stack([x, 2 * x])
    want = [epmoe.grouped_gemm(x, weight, offsets=offsets) for x in xs]
    quantized = [epmoe.quantize_fp8(x)[1] for x in xs]
    direct_calls.clear()
    y = torch.func.vmap(lambda x: epmoe.grouped_gemm(x, weight, offsets=offsets))(xs)
    scales = torch.func.vmap(lambda x: epmoe.quantize_fp8(x)[1])(xs)
    assert same(y, torch.stack(want)) and same(scales, torch.stack(quantized))
    # vmap itself calls the operator, once for each element, through torch
    assert not direct_calls


def test_gemm_seen_by_batched_gradients(ranks, direct_calls):
    """autograd has a vmap of its own, whose tensors look like others to Python."""
    _, (x, _, offsets) = case("grouped_gemm", ranks.device)
    weight = torch.randn(len(SIZES), K, K, generator=generator(7)).to(x)
    gs = torch.randn(3, *x.shape, generator=generator(8)).to(x)
    want = [epmoe.grouped_gemm(g, weight, offsets=offsets) for g in gs]
    direct_calls.clear()
    leaf = x.detach().requires_grad_()
    grad, = torch.autograd.grad(Product.apply(leaf, weight, offsets), leaf, gs, is_grads_batched=True)
    assert same(grad, torch.stack(want)) and not direct_calls


def test_gemm_seen_by_autograd(ranks, direct_calls):
    _, (x, weight, offsets) = case("grouped_gemm", ranks.device)
    want = epmoe.grouped_gemm(x, weight, offsets=offsets)
    for leaf in (0, 1):
        direct_calls.clear()
        args = [t.detach().requires_grad_(i == leaf) for i, t in enumerate((x, weight))]
        y = epmoe.grouped_gemm(*args, offsets=offsets)
        assert same(y.detach(), want) and not direct_calls
        y.sum().backward()
        assert args[leaf].grad.abs().sum() > 0


def test_gemm_seen_by_negated_views(ranks, direct_calls):
    """A negated view has the memory of its base: torch negates it before it calls an operator."""
    x = torch.randn(8, K, generator=generator(3)).to(ranks.device)
    want, scales = epmoe.quantize_fp8(-x)
    direct_calls.clear()
    q, scales_of_view = epmoe.quantize_fp8(torch._neg_view(x))
    assert same(q, want) and same(scales_of_view, scales) and not direct_calls
