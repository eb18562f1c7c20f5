"""EPMoE compared with an oracle that computes the experts of all ranks in one process."""

import dataclasses
import math

import torch

import epmoe
from cases import generator, keep
from epmoe import reference
from epmoe.gemm.activations import is_gated
from epmoe.testing import routing

ACTIVATIONS = ("swiglu", "gpt_oss", "gelu", "geglu_tanh", "relu2", epmoe.SwiGLU(1.3, math.inf, 1),
               epmoe.GptOss(alpha=1.3, limit=3.0), epmoe.SwiGLU(limit=3.0), "gelu_tanh", "silu")


@dataclasses.dataclass(frozen=True)
class Model:
    hidden: int = 16
    inner: int = 32  # multiples of 16, which the kernels of 16 bits take
    num_local: int = 2
    topk: int = 3
    tokens: int = 13
    activation: str = "swiglu"
    bias: bool = False
    local: bool = True
    mode: str = "scatter"
    capacity: bool = False
    pattern: str = "uniform"
    dtype: torch.dtype = torch.float32
    unequal: bool = True

    def __str__(self):
        return "-".join(str(v).removeprefix("torch.") for v in dataclasses.astuple(self))


def parameters_of(model, num_experts):
    """The parameters of the experts of all ranks, by name, as in a checkpoint."""
    g = generator(99)
    wide = model.inner * (1 + is_gated(model.activation))
    p = {"gate_up_proj": torch.randn(num_experts, wide, model.hidden, generator=g) / model.hidden**0.5,
         "down_proj": torch.randn(num_experts, model.hidden, model.inner, generator=g) / model.inner**0.5}
    if model.bias:
        p["gate_up_proj_bias"] = torch.randn(num_experts, wide, generator=g)
        p["down_proj_bias"] = torch.randn(num_experts, model.hidden, generator=g)
    return {k: v.to(model.dtype) for k, v in p.items()}


def inputs_of(model, rank, size, step=0):
    """The inputs of a rank: x [T, H], indices and weights [T, K], and the gradient of y [T, H]."""
    g = generator(7, rank, step)
    t = model.tokens - (3 * rank) % (model.tokens + 1) if model.unequal else model.tokens
    idx = routing(model.pattern, t, model.topk, model.num_local * size, size, rank, g)
    weight = torch.rand(t, model.topk, generator=g)
    x, dy = torch.randn(t, model.hidden, generator=g), torch.randn(t, model.hidden, generator=g)
    return x.to(model.dtype), idx, weight, dy.to(model.dtype)


def make_moe(world, device, model, **options):
    size = world.size
    moe = epmoe.EPMoE(model.hidden, model.inner, model.num_local * size, model.topk, world, model.activation,
                      max_tokens=model.tokens, dtype=model.dtype, device=device, bias=model.bias,
                      enable_local_combine=model.local, combine_mode=model.mode,
                      capacity=size * model.tokens * model.topk if model.capacity else None,
                      **({"fused": True} | options))
    keep(world, moe)
    local = slice(world.rank * model.num_local, (world.rank + 1) * model.num_local)
    moe.load_state_dict({k: v[local] for k, v in parameters_of(model, model.num_local * size).items()})
    return moe


def run_moe(world, device, model, x_grad=True, weight_grad=True, make=make_moe):
    moe = make(world, device, model)
    x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
    x.requires_grad_(x_grad)
    weight.requires_grad_(weight_grad)
    y = moe(x, idx, weight)
    y.backward(dy)
    moe.layer.synchronize()
    grads = {name: p.grad for name, p in moe.named_parameters()}
    rows = moe.last_layout.num_rows
    moe.finalize()
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad, **grads, "rows": rows}


def wanted_of(model, size):
    """The expected results of every rank: from the oracle, in float64, with the tokens of all ranks."""
    num_experts = model.num_local * size
    p = {k: v.double().requires_grad_() for k, v in parameters_of(model, num_experts).items()}
    wanted = []
    for rank in range(size):
        x, idx, weight, dy = inputs_of(model, rank, size)
        x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
        y = reference.moe(x, idx, weight, p["gate_up_proj"], p["down_proj"], model.activation,
                          p.get("gate_up_proj_bias"), p.get("down_proj_bias"))
        y.backward(dy.double())
        wanted.append({"y": y.detach(), "x": x.grad, "weight": weight.grad})
    for rank in range(size):
        local = slice(rank * model.num_local, (rank + 1) * model.num_local)
        wanted[rank] |= {name: v.grad[local] for name, v in p.items()}
    return wanted


def close(got, want, what, tolerance):
    """Assert that errors are at most tolerance times the largest wanted value, a natural unit of sums."""
    shape = None if got is None else got.shape
    assert shape == want.shape, f"{what}: got shape {shape}, wanted {want.shape}"
    got, want = got.double().cpu(), want.double()
    if not want.numel():
        return
    worst = (got - want).abs().max().item()
    scale = max(want.abs().max().item(), 1e-3)
    assert worst <= tolerance * scale, f"{what}: off by {worst:.3g}, largest value {scale:.3g}"


def check_moe(results, model, tolerance=None, without=()):
    tolerance = tolerance or {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[model.dtype]
    for rank, (got, want) in enumerate(zip(results, wanted_of(model, len(results)))):
        for name, value in want.items():
            if name not in without:
                close(got[name], value, f"rank {rank}: {'y' if name == 'y' else 'gradient of ' + name}",
                      tolerance)
