"""Nothing depends on torch's default device or default dtype, which belong to the program around epmoe."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch

import epmoe
from cases import process_ranks
from epmoe import reference
from epmoe.testing import routing
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
SIZES = dict(max_tokens=16, topk=2, hidden=128, dtype=BF16, device=CPU)
# Makers of tensors.  Those of the second line make integers from integers.
MAKERS = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "rand", "randn", "linspace",
          "eye", "scalar_tensor", "empty_strided", "arange", "randint", "randperm"}
MAKE_INTEGERS = {"arange", "randint", "randperm"}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {"meta": lambda: torch.device("meta"), "float64": lambda: default_dtype(torch.float64),
            "bfloat16": lambda: default_dtype(BF16)}


def inputs(rank, hidden, dtype):
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(8, hidden, generator=g, dtype=torch.float32, device=CPU).to(dtype)
    idx = torch.rand(8, 4, generator=g, dtype=torch.float32, device=CPU).topk(2).indices
    return x, idx, torch.rand(8, 2, generator=g, dtype=torch.float32, device=CPU)


def flat(result):
    """The tensors of a result."""
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in flat(part)]


def experts(rank, size, dtype, **options):
    """A training step, a call without gradients, and state dicts of an EPMoE."""
    torch.manual_seed(0)
    moe = epmoe.EPMoE(128, 128, 4, 2, max_tokens=16, dtype=dtype, device=CPU, bias=True, **options)
    x, idx, weight = inputs(rank, 128, dtype)
    results = []
    if not moe.is_fp8:
        y = moe(x.requires_grad_(), idx, weight.requires_grad_())
        y.float().square().sum().backward()
        results += [y, x.grad, weight.grad, *(p.grad for p in moe.parameters())]
    with torch.no_grad():
        results += [moe(x, idx, weight), moe(x, idx, weight, decode=False)]
    whole = epmoe.whole_state_dict(moe)
    results += list(whole.values())
    moe.load_state_dict(moe.state_dict())
    moe.finalize()
    return results


def replicas(rank, size):
    """Maps, and a module with replicas."""
    counts = [9, 1, 1, 1], torch.tensor([9, 1, 1, 1], device=CPU), torch.tensor([.5, 1.5, 9, 9], device=CPU)
    maps = [epmoe.balance_experts(tokens, size, 8) for tokens in counts]
    torch.manual_seed(0)
    moe = epmoe.EPMoE(128, 128, 4, 2, max_tokens=16, dtype=BF16, device=CPU, num_physical=8)
    with torch.no_grad():
        moe.set_expert_map(maps[0])
        y = moe(*inputs(rank, 128, BF16))
        counts = moe.expert_map.logical_counts(torch.tensor([5, 1, 2, 4, 0, 0, 0, 1], device=CPU))
    moe.finalize()
    home = epmoe.ExpertMap.home(3, 2)
    return [y, counts, *(t for m in (*maps, home) for t in
                         (m.physical_to_logical_map, m.logical_to_physical_map, m.logical_count))]


def stages(rank, size):
    """Layers of stages, also with padding, in FP8, and of few tokens."""
    results = []
    x, idx, weight = inputs(rank, 128, BF16)
    for options in ({}, {"expert_alignment": 8}, {"capacity": 64}, {"enable_local_combine": True}):
        layer = epmoe.EPAll2AllLayer(None, num_tot_experts=4, **SIZES, **options)
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        results += [layer.combine(rows, layout, row_weight), layout.tokens_per_expert, layout.expert_offsets]
        layer.finalize()
    layer = epmoe.EPAll2AllLayer(None, num_tot_experts=4, **SIZES)
    results += layer.dispatch_fp8(x, idx, weight)[:3]
    layer.finalize()
    a2a = epmoe.LowLatencyAll2All(None, num_experts=4, **SIZES)
    for fp8 in (False, True):
        rows, scales, counts, handle = a2a.dispatch(x, idx, weight, layout="compact", fp8=fp8)
        results += [counts, a2a.combine(torch.ones(rows.shape, dtype=BF16, device=CPU), handle)]
    a2a.finalize()
    heap = epmoe.SymmetricHeap(epmoe.World.of(None), 4096, CPU)
    results.append(heap.malloc_symmetric((4,), torch.int32).zero_())
    heap.close()
    return results


def products(rank, size):
    """What is local to a rank, with its oracle."""
    x, idx, weight = inputs(rank, 128, torch.float32)
    w = torch.ones(2, 128, 128, dtype=torch.float32, device=CPU)
    b = torch.ones(2, 128, dtype=torch.float32, device=CPU)
    counts = torch.tensor([3, 5], device=CPU)
    x.requires_grad_()
    y = epmoe.grouped_gemm(x, w, counts, bias=b, activation="swiglu", row_weight=weight[:, 0])
    (dx,) = torch.autograd.grad(y.sum(), x)
    (q, q_scale), (w8, w_scale) = epmoe.quantize_fp8(x.detach()), epmoe.quantize_fp8_weight(w)
    indices = [idx, idx]
    p = reference.plan(indices, 4)
    moved = reference.dispatch([x.detach(), x.detach()], p)
    return [y, dx, q, q_scale, w8, w_scale,
            epmoe.grouped_gemm(q, w8, counts, a_scale=q_scale, b_scale=w_scale),
            p["counts"], p["token_row"], moved, reference.combine(moved, p, indices, 4),
            reference.combine(moved, p, indices, 4, local_combine=True),
            routing("sentinels", 8, 2, 4, 2, 0, torch.Generator().manual_seed(1)),
            routing("distinct", 8, 2, 4, 2, 0, torch.Generator().manual_seed(1))]


ONE_NODE = {
    "float32": lambda *at: experts(*at, torch.float32),
    "bfloat16": lambda *at: experts(*at, BF16),
    "capacity": lambda *at: experts(*at, BF16, capacity=64),
    "FP8": lambda *at: experts(*at, BF16, weight_dtype=FP8),
    "replicas": replicas, "stages": stages, "products": products,
}
TWO_NODES = {
    "nodes": lambda *at: experts(*at, torch.float32, local_world_size=1),
    "nodes, rail_capacity": lambda *at: experts(*at, torch.float32, local_world_size=1, capacity=64,
                                                rail_capacity=16),
    "nodes, chunks": lambda *at: experts(*at, BF16, local_world_size=1, num_chunks=2, reserve_sms=8),
}


def run_under(rank, size, programs):
    """Each program without a default and with each of them.  Returns the programs that differ."""
    differing = {}
    for name, program in globals()[programs].items():
        wanted = flat(program(rank, size))
        for default, context in DEFAULTS.items():
            try:
                with context():
                    got = flat(program(rank, size))
                bad = [i for i, (g, w) in enumerate(zip(got, wanted, strict=True))
                       if g.dtype != w.dtype or g.device != w.device or not torch.equal(
                           *(t.detach().reshape(-1).view(torch.uint8) for t in (g, w)))]
            except epmoe.EpTimeout:
                raise
            except Exception as error:
                bad = f"{type(error).__name__}: {error}"
            if bad:
                differing[name, default] = bad
    return differing


@pytest.mark.parametrize("programs", ["ONE_NODE", "TWO_NODES"])
def test_results_do_not_depend_on_defaults(programs):
    assert process_ranks(run_under, 2, programs, timeout_s=HANG_S) == [{}, {}]


def test_code_names_device_and_dtype_of_new_tensors():
    """The programs above do not reach every line: each call of a maker says what it wants."""
    found = []
    package = Path(epmoe.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.is_relative_to(package / "bench"):  # a program of its own
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if ast.unparse(call.func.value) != "torch" or call.func.attr not in MAKERS:
                continue
            wanted = {"device"} if call.func.attr in MAKE_INTEGERS else {"device", "dtype"}
            given = {k.arg for k in call.keywords}
            if None not in given and not wanted <= given:
                found.append(f"{path.relative_to(package)}:{call.lineno}: {ast.unparse(call)}")
    assert not found, "\n".join(found)
