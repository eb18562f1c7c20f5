"""Steps of EPMoE with balance=, and the same without."""

import torch

import epmoe
from cases import generator

K, HIDDEN, INNER = 3, 16, 32
NAMES = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
BALANCE = epmoe.Balance(slots=2, min_rows=4)


def make(world, device, num_experts=8, balance=BALANCE, **options):
    """An EPMoE whose experts are the same with balance and without."""
    options = {"dtype": torch.bfloat16, "bias": True, "max_tokens": 64} | options
    moe = epmoe.EPMoE(HIDDEN, INNER, num_experts, K, world, device=device, balance=balance, **options)
    fill(moe)
    return moe


def fill(moe):
    with torch.no_grad():
        for name in NAMES:
            p = getattr(moe, name)
            if p is not None:
                g = generator(len(name))
                whole = torch.randn(moe.num_experts, *p.shape[1:], generator=g) / p.shape[-1]**0.5
                for i, e in enumerate(moe._held):
                    if e >= 0:
                        p[i] = whole[e]


def batch(moe, step=0, hot=(0, 1), tokens=None):
    """x, choices and weights of this rank, of which most go to the hot experts."""
    g = generator(step, moe.layer.rank)
    t = 40 + 3 * moe.layer.rank if tokens is None else tokens
    scores = torch.randn(t, moe.num_experts, generator=g)
    scores[:, [e % moe.num_experts for e in hot]] += 3
    weights, idx = scores.softmax(-1).topk(K)
    idx[torch.rand(t, K, generator=g) < 0.05] = -1
    x = torch.randn(t, HIDDEN, generator=g).to(moe.layer.dtype)
    device = moe.layer.device
    return x.to(device), idx.to(device), weights.to(device)


def forward(moe, step=0, hot=(0, 1), tokens=None, run=None):
    """(y, x, weights) of a step, for a backward."""
    x, idx, weights = batch(moe, step, hot, tokens)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    return (run or moe)(x, idx, weights), x, weights


def backward(y, x, weights, step=0):
    dy = torch.randn(y.shape, generator=generator(9, step)).to(y.dtype).to(y.device)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad}


def gradients(moe):
    """The gradients of this rank's own experts; those of the slots must be zero."""
    own = [i for i, e in enumerate(moe._held) if e >= 0]
    found = {}
    for name in NAMES:
        p = getattr(moe, name)
        if p is not None:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            assert not any(grad[i].any() for i in range(len(grad)) if i not in own), name
            found[name] = grad[own].clone()
            p.grad = None
    return found


def train(world, device, balance=BALANCE, steps=3, hot=(0, 1), num_experts=8, tokens=None, **options):
    """The results of some steps, [the helps of each step], and the gradients of the experts."""
    moe = make(world, device, num_experts, balance, **options)
    seen, helps = [], []
    for step in range(steps):
        seen.append(backward(*forward(moe, step, hot, tokens), step))
        helps.append(moe.last_layout.helps)
    grads = gradients(moe)
    moe.layer.synchronize()
    moe.finalize()
    return seen, helps, grads
