"""Communication during the GEMMs: dispatch + first GEMM of the experts, and second GEMM + combine.

    python examples/05_fused.py
    torchrun --nproc-per-node 4 examples/05_fused.py

On Hopper GPUs each of the two calls is one kernel, which sends and receives tokens while it multiplies
others.  On other devices, each call runs the same stages one after the other.  Both ways give the same bits,
and every rank compares them.
"""

import torch
from _launch import launch

import epmoe

TOKENS, HIDDEN, INNER, TOPK = 300, 128, 192, 4


@torch.no_grad()
def main(rank, world_size, device):
    g = torch.Generator().manual_seed(rank)
    dtype, num_experts = torch.bfloat16, 4 * world_size
    x = torch.randn(TOKENS, HIDDEN, generator=g).to(device, dtype)
    weight, expert = torch.softmax(torch.randn(TOKENS, num_experts, generator=g), -1).topk(TOPK)
    # The four experts of this rank.
    gate_up = (torch.randn(4, 2 * INNER, HIDDEN, generator=g) / HIDDEN**0.5).to(device, dtype)
    down = (torch.randn(4, HIDDEN, INNER, generator=g) / INNER**0.5).to(device, dtype)

    with epmoe.EpAll2AllFusedOp(None, TOKENS, HIDDEN, TOPK, num_tot_experts=num_experts, dtype=dtype,
                                device=device) as op:
        h, row_weight, layout = op.mega_dispatch_group_gemm(
            x, expert.to(device), weight=weight.to(device), gemm_weight=gate_up, activation="swiglu")
        y = op.mega_group_gemm_combine(h, down, layout, row_weight)

        # The same computation, one stage after the other.
        rows, row_weight, layout = op.dispatch(x, weight=weight.to(device), layout=layout)
        h = epmoe.grouped_gemm(rows, gate_up, offsets=layout.expert_offsets, activation="swiglu")
        h = epmoe.grouped_gemm(h, down, offsets=layout.expert_offsets)
        again = op.combine(h, layout, row_weight)

    assert torch.equal(y, again), f"rank {rank}: {int((y != again).any(1).sum())} of {len(y)} tokens differ"
    if rank == 0:
        print(f"{world_size} ranks on {device.type}, {num_experts} experts, {dtype}")
        print(f"rank 0 sent {TOKENS} tokens and multiplied {len(rows)} rows")
        print("two fused calls and four stages: the same bits")


if __name__ == "__main__":
    launch(main)
