"""Many training steps of EPMoE with delayed ranks and poisoned memory.

    torchrun --nproc-per-node 4 tests/soak_train.py [-n 5000] [--compute fp8]

The options are those of soak_fused.py; --compute fp8: products in FP8.  Each batch creates an EPMoE with
random shape and options, and four inputs with random routing.  The output and all gradients of every step
must have the bits that the separate stages give.  Without GPUs, the ranks are threads on the CPU, where all
steps run the separate stages.
"""

import random
import sys

import torch

import epmoe
from benchmarks.check import poisoned
from soak_fused import delay_sometimes, inputs_of, main, make_batch


def run_batch(world, device, seed, number, num_steps, graph, compute="16 bits"):
    """The number of steps with a wrong result."""
    options, inner, patterns, activation, *_ = make_batch(seed, number, world.size, device.type == "cuda")
    g = torch.Generator().manual_seed(hash((seed, number, world.rank)) & 2**62 - 1)
    r = random.Random(f"{seed} {number} {world.rank} train")
    activation, bias = activation or "silu", number % 3 == 0
    compute_dtype = torch.float8_e4m3fn if compute == "fp8" else None
    if compute_dtype:
        options["token_saving"] = True
    with (epmoe.EpAll2AllFusedOp(world, device=device, fused=False, **options) as plain,
          epmoe.EpAll2AllFusedOp(world, device=device, fused=True, **options) as op):
        stages, moe = (epmoe.EPMoE(op.hidden, inner, op.num_experts, op.topk, activation=activation,
                                   dtype=op.dtype, layer=layer, bias=bias,
                                   compute_dtype=compute_dtype) for layer in (plain, op))
        stages.load_state_dict(moe.state_dict())
        inputs = [inputs_of(op, pattern, world.rank, g) for pattern in patterns]
        dys = [torch.randn(x.shape, generator=g).to(x) for x, _, _ in inputs]

        def step(i, moe=moe):
            """[y, dx, dw, the gradients of the parameters] as bits."""
            x, idx, weight = inputs[i]
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            with poisoned():
                y = moe(leaves[0], idx, leaves[1])
                delay_sometimes(r, device)
                grads = torch.autograd.grad(y, [*leaves, *moe.parameters()], dys[i])
            return [t.detach().view(torch.int16) for t in (y, *grads)]

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
    sys.exit(main(run_batch, "soak_train", "training steps", 5000, compute="16 bits"))
