"""Many training steps of EPMoE with delayed ranks and poisoned memory.

    torchrun --nproc-per-node 4 tests/soak_train.py [-n 5000] [--compute fp8]

The options are those of soak_fused.py; --compute fp8: products in FP8; --balance yes: ranks help each other.
Each batch creates an EPMoE with random shape and options, and four inputs with random routing.  The output
and all gradients of every step must have the bits that the separate stages give.  With balance, the output
and the gradients of tokens and routing weights must have the bits of a module without; those of the
parameters must be near, and have the same bits each time.  Without GPUs, the ranks are threads on the CPU,
where all steps run the separate stages.
"""

import random
import sys

import torch

import epmoe
from benchmarks.check import poisoned
from epmoe.testing import routing
from soak_fused import delay_sometimes, inputs_of, main, make_batch


def train_step(moe, x, idx, weight, dy, r, device):
    """(y, dx, the gradient of weight, those of the parameters), of a rank that is late sometimes."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    with poisoned():
        y = moe(leaves[0], idx, leaves[1])
        delay_sometimes(r, device)
        return y, *torch.autograd.grad(y, [*leaves, *moe.parameters()], dy)


def run_balanced(world, device, seed, number, num_steps):
    """The number of steps with a wrong result, of a module in which ranks help each other."""
    options, inner, patterns, activation, *_ = make_batch(seed, number, world.size, device.type == "cuda")
    g = torch.Generator().manual_seed(hash((seed, number, world.rank)) & 2**62 - 1)
    r, common = random.Random(f"{seed} {number} {world.rank}"), random.Random(f"{seed} {number}")
    sizes = options["hidden"], inner, options["num_tot_experts"], options["topk"]
    balance = epmoe.Balance(common.choice((1, 2, 3)), common.choice((1, 8, 40)))
    plain, moe = (epmoe.EPMoE(*sizes, world, activation=activation or "silu", bias=number % 3 == 0,
                              max_tokens=options["max_tokens"], dtype=options["dtype"], device=device,
                              rank_invariant=True, balance=b) for b in (None, balance))
    first = world.rank * plain.layer.num_local_experts
    held = slice(min(plain.layer.num_local_experts, max(plain.num_experts - first, 0)))
    with torch.no_grad():
        for its, p in zip(plain.parameters(), moe.parameters()):
            p[held].copy_(its[held])
    inputs = []
    for pattern in patterns:
        t = moe.layer.max_tokens - (3 * world.rank) % (moe.layer.max_tokens + 1)
        idx = routing(pattern, t, moe.layer.topk, moe.num_experts, world.size, world.rank, g)
        x, weight = torch.randn(t, moe.layer.hidden, generator=g).to(moe.layer.dtype), torch.rand(
            t, moe.layer.topk, generator=g)
        inputs.append([v.to(device) for v in (x, idx, weight)])
    dys = [torch.randn(x.shape, generator=g).to(x) for x, _, _ in inputs]

    def step(i, moe=moe):
        """([y, dx, dw], the gradients of this rank's experts), as bits and as numbers."""
        found = train_step(moe, *inputs[i], dys[i], r, device)
        slots = [grad[held.stop:].any() for grad in found[3:]]
        of_experts = [grad[held] for grad in found[3:]]
        return [t.detach().view(torch.int16) for t in found[:3]], of_experts, slots

    wanted, first_of = [step(i, plain) for i in range(4)], {}
    plain.layer.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for n in range(num_steps):
        i = n % 4
        delay_sometimes(r, device)
        bits, grads, slots = step(i)
        differ = [(a != b).any() for a, b in zip(bits, wanted[i][0])] + slots
        for grad, its, before in zip(grads, wanted[i][1], first_of.setdefault(i, grads)):
            differ += [(grad.view(torch.int16) != before.view(torch.int16)).any(),
                       (grad - its).abs().max() > 2**-5 * its.abs().max()] if grad.numel() else []
        wrong += torch.stack(differ).any()
        if n % 50 == 49:
            moe.layer.synchronize()
    moe.layer.synchronize()
    for module in moe, plain:
        module.finalize()
    return int(wrong)


def run_batch(world, device, seed, number, num_steps, graph, compute="16 bits", balance="no"):
    """The number of steps with a wrong result."""
    if balance == "yes":
        return run_balanced(world, device, seed, number, num_steps)
    options, inner, patterns, activation, *_ = make_batch(seed, number, world.size, device.type == "cuda")
    g = torch.Generator().manual_seed(hash((seed, number, world.rank)) & 2**62 - 1)
    r = random.Random(f"{seed} {number} {world.rank} train")
    activation, bias = activation or "silu", number % 3 == 0
    compute_dtype, recipe = (None, None) if compute != "fp8" else (
        torch.float8_e4m3fn, ("blockwise", "rowwise")[number // 2 % 2])
    if compute_dtype:
        options["token_saving"] = True
    with (epmoe.EpAll2AllFusedOp(world, device=device, fused=False, **options) as plain,
          epmoe.EpAll2AllFusedOp(world, device=device, fused=True, **options) as op):
        stages, moe = (epmoe.EPMoE(op.hidden, inner, op.num_experts, op.topk, activation=activation,
                                   dtype=op.dtype, layer=layer, bias=bias, compute_dtype=compute_dtype,
                                   fp8_recipe=recipe) for layer in (plain, op))
        stages.load_state_dict(moe.state_dict())
        inputs = [inputs_of(op, pattern, world.rank, g) for pattern in patterns]
        dys = [torch.randn(x.shape, generator=g).to(x) for x, _, _ in inputs]

        def step(i, moe=moe):
            """[y, dx, dw, the gradients of the parameters] as bits."""
            found = train_step(moe, *inputs[i], dys[i], r, device)
            return [t.detach().view(torch.int16) for t in found]

        wanted = [step(i, stages) for i in range(4)]
        plain.synchronize()
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for n in range(num_steps):
            delay_sometimes(r, device)
            differ = [(a != b).any() for a, b in zip(step(n % 4), wanted[n % 4])]
            wrong += torch.stack(differ).any()
            if n % 50 == 49:
                op.synchronize()
        op.synchronize()
        return int(wrong)


if __name__ == "__main__":
    sys.exit(main(run_batch, "soak_train", "training steps", 5000, compute="16 bits", balance="no"))
