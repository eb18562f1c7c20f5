"""Adapters of EPMoE for tests: their numbers for all experts, and the oracle in float64."""

import torch

from cases import generator
from epmoe import reference
from moe_cases import inputs_of, make_moe, parameters_of

WEIGHTS = "gate_up_proj", "down_proj"
ALPHA = 5.0


def factors_of(model, num_experts, r, targets=WEIGHTS, seed=0, dtype=None):
    """{target: (A [E, r, K], B [E, N, r])} of all experts.  B is not zero, as after some training."""
    found = {}
    for i, name in enumerate(targets):
        _, n, k = parameters_of(model, num_experts)[name].shape
        g = generator(41, seed, i)
        a = torch.randn(num_experts, r, k, generator=g) / k**0.5
        b = torch.randn(num_experts, n, r, generator=g) / 4
        found[name] = tuple(t.to(dtype or model.dtype) for t in (a, b))
    return found


def experts_of(moe):
    """The experts of a rank as a slice."""
    num = moe.layer.num_local_experts
    return slice(moe.layer.rank * num, (moe.layer.rank + 1) * num)


def fill(moe, name, factors):
    """Give an adapter the factors of this rank's experts."""
    with torch.no_grad():
        for target, (a, b) in factors.items():
            own = getattr(moe.adapters[name], target)
            own.lora_A.copy_(a[experts_of(moe)])
            own.lora_B.copy_(b[experts_of(moe)])


def add(moe, name, model, r, targets=WEIGHTS, seed=0, **options):
    moe.add_adapter(name, r, ALPHA, targets, **options)
    fill(moe, name, factors_of(model, moe.num_experts, r, targets, seed, options.get("dtype")))


def make_lora(world, device, model, r, targets=WEIGHTS, adapter=None, **options):
    """A module with an active adapter."""
    moe = make_moe(world, device, model, **options)
    add(moe, "a", model, r, targets, **(adapter or {}))
    moe.set_adapter("a")
    return moe


def step(moe, model, x_grad=True):
    """A forward and a backward: {name: result or gradient}."""
    x, idx, weight, dy = (t.to(moe.layer.device) for t in inputs_of(model, moe.layer.rank,
                                                                    moe.layer.world_size))
    x.requires_grad_(x_grad)
    weight.requires_grad_(x_grad)
    moe.zero_grad()
    y = moe(x, idx, weight)
    y.backward(dy)
    moe.layer.synchronize()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in moe.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad} | grads


def wanted_of(model, size, r, targets=WEIGHTS, seed=0, dtype=None, parameters=None):
    """What `step` returns on every rank, from plain torch in float64, with the tokens of all ranks.

    parameters: those of all experts, where the module has other ones than the model says.
    """
    num_experts = model.num_local * size
    p = {k: v.double() for k, v in (parameters or parameters_of(model, num_experts)).items()}
    factors = {n: tuple(t.double().requires_grad_() for t in pair)
               for n, pair in factors_of(model, num_experts, r, targets, seed, dtype).items()}
    whole = dict(p)
    for name, (a, b) in factors.items():
        whole[name] = p[name] + ALPHA / r * torch.einsum("enr,erk->enk", b, a)
    wanted = []
    for rank in range(size):
        x, idx, weight, dy = inputs_of(model, rank, size)
        x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
        y = reference.moe(x, idx, weight, whole["gate_up_proj"], whole["down_proj"], model.activation,
                          whole.get("gate_up_proj_bias"), whole.get("down_proj_bias"))
        y.backward(dy.double(), retain_graph=True)
        wanted.append({"y": y.detach(), "x": x.grad, "weight": weight.grad})
    for rank in range(size):
        own = slice(rank * model.num_local, (rank + 1) * model.num_local)
        for name, (a, b) in factors.items():
            wanted[rank] |= {f"adapters.a.{name}.lora_A": a.grad[own],
                             f"adapters.a.{name}.lora_B": b.grad[own]}
    return wanted
