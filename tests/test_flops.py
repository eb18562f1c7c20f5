"""FlopCounterMode counts the products of the rows that a rank has received, as torch's for these rows."""

import contextlib
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import epmoe
import fused_cases
import fused_fp8_cases
from cases import generator, keep, process_ranks
from epmoe.moe.fp8_rows import experts_fp8  # its operators exist when it is imported
from pace import HANG_S

HIDDEN, INNER, TOPK, LOCAL, TOKENS = 256, 128, 2, 2, 8
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NO_PRODUCTS = {"plan", "dispatch", "combine", "quantize_fp8", "sum_of_rows", "nodes_plan", "nodes_out",
               "nodes_return", "quantize_fp8_weight_pair"}


def indices_of(rank, size):
    """The choices of a rank [T, K]; some are dropped."""
    idx = torch.rand(TOKENS, LOCAL * size, generator=generator(7, rank)).topk(TOPK).indices
    idx[::3, 1] = -1
    return idx


def torch_flops(num_rows, backward):
    """What FlopCounterMode counts for the products of these rows by torch, and for their backward.

    x takes part in the backward also where it needs no gradient: all ranks make the same calls.
    """
    x = torch.ones(num_rows, HIDDEN, requires_grad=True)
    gate_up, down = torch.ones(2 * INNER, HIDDEN, requires_grad=True), torch.ones(HIDDEN, INNER)
    with FlopCounterMode(display=False) as counter:
        y = (x @ gate_up.t())[:, :INNER] @ down.requires_grad_().t()
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


def count(world, device, dtype=BF16, backward=True, of_x=True, decode=None, op=None, counts=True, **options):
    """Call an EPMoE, with its backward.  Returns what was counted, and what torch counts for its rows.

    op: the class of a layer, which runs stages in the place of the fused kernels on the CPU.
    """
    torch.manual_seed(0)
    options = {"bias": True, "max_tokens": TOKENS} | options
    size = torch.distributed.get_world_size() if world is None else world.size
    rank = torch.distributed.get_rank() if world is None else world.rank
    if op is not None:
        names = "max_tokens", "capacity", "token_saving", "fused"
        of_op = {name: options.pop(name) for name in names if name in options}
        options["layer"] = op(world, hidden=HIDDEN, topk=TOPK, num_tot_experts=LOCAL * size, dtype=dtype,
                              device=device, fused=True, **of_op)
    moe = epmoe.EPMoE(HIDDEN, INNER, LOCAL * size, TOPK, world, dtype=dtype, device=device, **options)
    if world is not None:
        keep(world, moe)
    if decode:
        moe.enable_decode(TOKENS)
    if options.get("fuse_wgrad_accumulation"):
        for p in moe.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, device=device).requires_grad_(backward and of_x)
    idx, weight = indices_of(rank, size).to(device), torch.rand(TOKENS, TOPK, device=device)
    counter = FlopCounterMode(display=False)
    with torch.set_grad_enabled(backward):
        if counts:
            with counter:
                step(moe, x, idx, weight, decode, backward)
        else:
            step(moe, x, idx, weight, decode, backward)
    chosen = torch.cat([indices_of(r, size) for r in range(size)])
    num_rows = int((chosen // LOCAL == rank).sum())
    moe.layer.synchronize()
    moe.finalize()
    return counter.get_total_flops() if counts else None, torch_flops(num_rows, backward)


def step(moe, x, idx, weight, decode, backward):
    y = moe(x, idx, weight, decode=decode)
    if backward:
        y.sum().backward()
    if moe._has_other_gradients and moe._weight_gradients.delays:
        moe.backward_dw()


MANY = {"max_tokens": 1024, "backward": False}  # a module that does not decode by itself
CASES = {
    "float32": {"dtype": torch.float32},
    "float32, capacity": {"dtype": torch.float32, "capacity": 100},
    "float32, second layer of the model": {"dtype": torch.float32, "of_x": False},
    "bfloat16": {},
    "bfloat16, capacity": {"capacity": 100},
    "bfloat16, tokens without a gradient": {"of_x": False},
    "every choice alone": {"token_saving": False},
    "delayed": {"delay_wgrad_compute": True},
    "into main_grad": {"fuse_wgrad_accumulation": True},
    "fused": {"op": fused_cases.StagedOp},
    "fused, capacity": {"op": fused_cases.StagedOp, "capacity": 100},
    "fused, float32 elsewhere": {"op": fused_cases.StagedOp, "dtype": torch.float32},
    "fused, into main_grad": {"op": fused_cases.StagedOp, "fuse_wgrad_accumulation": True},
    "without gradients": MANY,
    "without gradients, fused": {"op": fused_cases.StagedOp, **MANY},
    "without gradients, few tokens": {"backward": False},
    "decode": {"decode": True, **MANY},
    "FP8": {"weight_dtype": FP8, **MANY},
    "FP8, capacity": {"weight_dtype": FP8, "capacity": 100, **MANY},
    "FP8, fused": {"weight_dtype": FP8, "op": fused_fp8_cases.StagedOp, **MANY},
    "FP8, few tokens": {"weight_dtype": FP8, "backward": False},
    "products in FP8": {"compute_dtype": FP8},
    "products in FP8, gradients of weights in 16 bits": {"compute_dtype": FP8, "wgrad_dtype": BF16},
    "products in FP8, into main_grad": {"compute_dtype": FP8, "fuse_wgrad_accumulation": True},
    "products in FP8, delayed": {"compute_dtype": FP8, "delay_wgrad_compute": True},
    "products in FP8, without gradients": {"compute_dtype": FP8, **MANY},
    "4 bits": {"weight_dtype": "mxfp4", **MANY},
    "4 bits, few tokens": {"weight_dtype": "int4", "backward": False},
    "4 bits, tokens in FP8": {"weight_dtype": "int4", "dispatch_dtype": FP8, **MANY},
    "4 bits, products in FP8": {"weight_dtype": "mxfp4", "compute_dtype": FP8, **MANY},
}


def count_all(world, device):
    return {name: count(world, device, **case) for name, case in CASES.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_flops_are_those_of_torch(ranks, num_ranks):
    for counts in ranks.isolated(count_all, world_size=num_ranks, timeout_s=HANG_S):
        assert counts == {name: (wanted, wanted) for name, (_, wanted) in counts.items()}
        assert min(wanted for _, wanted in counts.values()) > 0


def count_on_one_rank(world, device):
    is_counting = world.rank == 0
    return [count(world, device, counts=is_counting, **case)
            for case in ({"backward": False}, {"decode": True, **MANY}, MANY, {})]


def test_flops_may_be_counted_by_one_rank(ranks):
    """The rank that counts makes the same collective operations as the others."""
    results = ranks.isolated(count_on_one_rank, world_size=2, timeout_s=HANG_S)
    assert all(counted == wanted for counted, wanted in results[0])


def count_over_nodes(rank, size):
    options = {"local_world_size": 1, "timeout_s": HANG_S}
    return [count(None, "cpu", **options, **case)
            for case in ({}, {"dtype": torch.float32}, {"num_chunks": 2, "reserve_sms": 8}, MANY)]


@pytest.mark.cpu_only
def test_flops_over_nodes():
    for results in process_ranks(count_over_nodes, 2, timeout_s=HANG_S):
        assert all(counted == wanted > 0 for counted, wanted in results), results


def test_grouped_gemm_counts_the_rows_of_its_experts():
    """Rows before the first and after the last expert's are not multiplied."""
    x = torch.ones(9, 16, requires_grad=True)
    weight = torch.ones(2, 8, 16)
    with FlopCounterMode(display=False) as counter:
        y = epmoe.grouped_gemm(x, weight, offsets=torch.tensor([1, 3, 6], dtype=torch.int32))
        (dx,) = torch.autograd.grad(y.square()[1:6].sum(), x, create_graph=True)
        dx.square().sum().backward()
    product = 2 * 5 * 8 * 16
    of_calls = {str(k): n / product for k, n in counter.get_flop_counts()["Global"].items()}
    assert of_calls == {"epmoe.grouped_gemm": 4}  # y, dx, the gradient of dx in dy, and of y in x


def test_every_operator_has_a_formula_or_no_products():
    names = {name.removeprefix("epmoe::").split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("epmoe::")}
    with_formula = {op.__name__ for op in flop_registry if str(op).startswith("epmoe.")}
    assert names and with_formula | NO_PRODUCTS == names and not with_formula & NO_PRODUCTS


@pytest.mark.parametrize("wgrad_dtype", [None, BF16], ids=str)
def test_experts_fp8_of_rows(wgrad_dtype):
    """Those of the adapters for Megatron-core and torchtitan."""
    rows = torch.randn(9, HIDDEN, dtype=BF16, requires_grad=True)
    gate_up = torch.randn(2, 2 * INNER, HIDDEN).bfloat16().requires_grad_()
    down = torch.randn(2, HIDDEN, INNER).bfloat16().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = experts_fp8(rows, gate_up, down, torch.tensor([0, 3, 7], dtype=torch.int32),
                        wgrad_dtype=wgrad_dtype)
        y.float().sum().backward()
    assert counter.get_total_flops() == torch_flops(7, True)


class NoGradient(torch.autograd.Function):
    """The identity, for which autograd has no gradient."""

    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return None


def without_a_gradient(world, device):
    """The gradients of a step whose backward has none for the experts, while rank 0 counts."""
    moe = epmoe.EPMoE(HIDDEN, INNER, LOCAL * world.size, TOPK, world, max_tokens=TOKENS, device=device)
    keep(world, moe)
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16().requires_grad_()
    idx = indices_of(world.rank, world.size).to(device)
    with FlopCounterMode(display=False) if world.rank == 0 else contextlib.nullcontext():
        y = NoGradient.apply(moe(x, idx, torch.ones(TOKENS, TOPK, device=device)))
        (y.sum() + x.sum()).backward()
    moe.finalize()
    return [x.grad.float().unique().tolist(), *(p.grad.any().item() for p in moe.parameters())]


def test_flops_of_a_step_without_a_gradient(ranks):
    """Operators then get None for it, which the module's own call never sees."""
    assert all(found == [[1], False, False] for found in
               ranks.isolated(without_a_gradient, world_size=2, timeout_s=HANG_S))


def test_experts_fp8_of_rows_without_a_gradient():
    leaves = [torch.randn(shape, dtype=BF16, requires_grad=True)
              for shape in ((9, HIDDEN), (2, 2 * INNER, HIDDEN), (2, HIDDEN, INNER))]
    y = experts_fp8(*leaves, torch.tensor([0, 3, 9], dtype=torch.int32))
    NoGradient.apply(y).sum().backward()
    assert not any(t.grad.any() for t in leaves)


@pytest.mark.long
@pytest.mark.parametrize("first", ["epmoe", "torch.utils.flop_counter"])
def test_formulas_are_registered_in_any_order_of_imports(first):
    """epmoe does not import FlopCounterMode, which imports Triton: half a second."""
    script = f"""import sys, torch, {first}
assert ("torch.utils.flop_counter" in sys.modules) == ({first!r} != "epmoe")
import epmoe
from torch.utils import flop_counter
assert sum(str(op).startswith("epmoe.") for op in flop_counter.flop_registry) == 9
from epmoe.moe import fp8_rows
assert sum(str(op).startswith("epmoe.") for op in flop_counter.flop_registry) == 11
assert not any("epmoe" in type(finder).__module__ for finder in sys.meta_path)
assert flop_counter.__spec__.name == "torch.utils.flop_counter"
import inspect; inspect.getsource(flop_counter)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
