"""A Mixture-of-Experts layer on several ranks, compared with the same layer in one process.

    python examples/03_moe_layer.py
    torchrun --nproc-per-node 4 examples/03_moe_layer.py

epmoe.EPMoE has E/W of the E experts on each of W ranks.  Its parameters have the names and shapes of
checkpoints.  The program does not reduce gradients over the ranks: the gradient of an expert already includes
the tokens of all ranks.
"""

import torch
import torch.distributed as dist
from _launch import launch

import epmoe
from epmoe import reference

TOKENS, HIDDEN, INNER, EXPERTS_PER_RANK, TOPK = 48, 64, 96, 4, 3
# Bounds on max|a - b| / max|b|, where b is in float64: a few rounding errors of each dtype.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def gather(tensor):
    """Return the concatenated tensors of all ranks, in float64 on the CPU."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts).double().cpu()


def main(rank, world_size, device):
    torch.manual_seed(rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_experts = EXPERTS_PER_RANK * world_size
    moe = epmoe.EPMoE(HIDDEN, INNER, num_experts, TOPK, max_tokens=TOKENS, dtype=dtype, device=device)

    # Each rank has its own tokens, and its router chooses the experts.
    x = torch.randn(TOKENS, HIDDEN, device=device).to(dtype).requires_grad_()
    probs = torch.randn(TOKENS, num_experts, device=device).softmax(-1)
    weights, idx = probs.topk(TOPK)
    weights.requires_grad_()
    g = torch.randn(TOKENS, HIDDEN, device=device).to(dtype)  # the gradient of the layer's output

    y = moe(x, idx, weights)
    y.backward(g)

    mine = {"y": y, "dx": x.grad, "d weights": weights.grad,
            "d gate_up_proj": moe.gate_up_proj.grad, "d down_proj": moe.down_proj.grad}
    mine = {name: gather(t) for name, t in mine.items()}

    # The reference: all tokens and all experts in one process, in float64, with plain PyTorch.
    inputs = [gather(t).requires_grad_() for t in (x, weights, moe.gate_up_proj, moe.down_proj)]
    want_y = reference.moe(inputs[0], gather(idx).long(), *inputs[1:])
    want_y.backward(gather(g))
    want = dict(zip(mine, [want_y.detach()] + [t.grad for t in inputs]))

    differences = {name: ((mine[name] - w).abs().max() / w.abs().max()).item() for name, w in want.items()}
    rows = moe.last_layout.rows_per_rank.tolist()
    moe.finalize()
    if rank == 0:
        print(f"{world_size} ranks on {device.type}, {num_experts} experts, top {TOPK}, {dtype}")
        print(f"each rank has {TOKENS} tokens; the ranks receive these numbers of rows: {rows}\n")
        print(f"  {'tensor':16}{'max|reference|':>16}{'relative difference':>22}")
        for name, difference in differences.items():
            print(f"  {name:16}{want[name].abs().max():16.3e}{difference:22.2e}")
    worst = max(differences.values(), key=lambda d: d if d == d else float("inf"))
    assert worst <= BOUNDS[dtype], f"differences up to {worst}, bound {BOUNDS[dtype]}"
    if rank == 0:
        print(f"\nlargest difference {worst:.1e}, bound {BOUNDS[dtype]}: ok")


if __name__ == "__main__":
    launch(main)
