"""The GEMMs of the experts: one call for all experts of a rank, each with any number of rows.

    python examples/04_grouped_gemm.py
    torchrun --nproc-per-node 4 examples/04_grouped_gemm.py

The rows are grouped by expert, as dispatch returns them.  The numbers of rows stay on the device.  No expert
is padded, and there is no separate launch for each expert.  Every rank compares a SwiGLU expert layer,
forward and backward, with a loop over the experts in float64.
"""

import torch
from _launch import launch

import epmoe
from epmoe import reference

ROWS, HIDDEN, INNER, EXPERTS = 500, 64, 96, 8
# Bounds on max|a - b| / max|b|, where b is in float64: a few rounding errors of each dtype.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def by_expert(x, gate_up, down, counts):
    """Compute the same layer, one expert after the other."""
    parts = x.split(counts.tolist())
    return torch.cat([reference.activate(rows @ w.t(), "swiglu") @ v.t()
                      for rows, w, v in zip(parts, gate_up, down)])


def main(rank, world_size, device):
    torch.manual_seed(rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    expert = torch.randint(EXPERTS - 1, (ROWS,))  # the last expert gets no rows
    counts = torch.bincount(expert, minlength=EXPERTS).to(device)
    sizes = (ROWS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER), (ROWS, HIDDEN)
    x, gate_up, down, g = (torch.randn(*size, device=device).mul(size[-1] ** -0.5).to(dtype).requires_grad_()
                           for size in sizes)

    # gate_up has the rows of gate first, then those of up, as in checkpoints.
    h = epmoe.grouped_gemm(x, gate_up, counts, activation="swiglu")
    y = epmoe.grouped_gemm(h, down, counts)
    y.backward(g.detach())

    leaves = [t.detach().double().requires_grad_() for t in (x, gate_up, down)]
    want_y = by_expert(*leaves, counts)
    want_y.backward(g.detach().double())

    want = {"y": want_y, "dx": leaves[0].grad, "d gate_up": leaves[1].grad, "d down": leaves[2].grad}
    got = {"y": y, "dx": x.grad, "d gate_up": gate_up.grad, "d down": down.grad}
    differences = {name: ((got[name].double() - w).abs().max() / w.abs().max()).item()
                   for name, w in want.items()}
    if rank == 0:
        print(f"{world_size} ranks on {device.type}, {EXPERTS} experts each, {dtype}; rows of each expert "
              f"of rank 0: {counts.tolist()}\n")
        for name, difference in differences.items():
            print(f"  {name:12} relative difference from float64 {difference:9.2e}")
    worst = max(differences.values(), key=lambda d: d if d == d else float("inf"))
    assert worst <= BOUNDS[dtype], f"differences up to {worst}, bound {BOUNDS[dtype]}"
    if rank == 0:
        print(f"\nlargest difference {worst:.1e}, bound {BOUNDS[dtype]}: ok")


if __name__ == "__main__":
    launch(main)
