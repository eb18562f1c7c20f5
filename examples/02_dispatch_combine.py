"""Dispatch and combine with a routing that is small enough to print.

    python examples/02_dispatch_combine.py
    torchrun --nproc-per-node 4 examples/02_dispatch_combine.py

Every rank has three tokens.  Each token chooses two experts; one choice is dropped.  dispatch sends a row for
each choice to the rank of its expert.  The expert multiplies the row by (1 + its number).  combine adds up
the rows of each token at the token's rank.
"""

import torch
import torch.distributed as dist
from _launch import launch

import epmoe
from epmoe import reference

T, K, H, LOCAL = 3, 2, 8, 2  # tokens of a rank, choices of a token, hidden, experts of a rank


def inputs(rank, num_experts):
    """Return the tokens, choices and weights of a rank.

    Each rank can compute the inputs of all ranks.  The reference needs them.
    """
    generator = torch.Generator().manual_seed(rank)
    x = torch.arange(T, dtype=torch.float32)[:, None] + 10 * rank + torch.zeros(T, H)
    idx = torch.stack([torch.randperm(num_experts, generator=generator)[:K] for _ in range(T)])
    idx[1, 0] = -1  # dropped: this choice is not sent and adds nothing
    idx[2] = torch.tensor([0, 1])  # both experts are on rank 0, so the token is sent to rank 0 only once
    weight = torch.rand(T, K, generator=generator)
    return x, idx, weight


def show(rank, idx, layout, rows):
    """Return the lines of this rank for the two tables."""
    sent, got = [], []
    for t in range(T):
        where = [f"expert {e} = rank {e // LOCAL} row {r}" if e >= 0 else "dropped" for e, r in
                 zip(idx[t].tolist(), layout.token_dst_scatter_idx[t].tolist())]
        sent.append(f"  {10 * rank + t:5d}   " + "".join(f"{text:26}" for text in where))
    for expert, (first, last) in enumerate(layout.expert_offsets.unfold(0, 2, 1).tolist()):
        tokens = " ".join(f"{int(v):3d}" for v in rows[first:last, 0])
        got.append(f"  {rank:4d}   {rank * LOCAL + expert:6d}   {tokens}")
    return sent, got


def main(rank, world_size, device):
    num_experts = LOCAL * world_size
    x, idx, weight = (t.to(device) for t in inputs(rank, num_experts))
    sizes = dict(max_tokens=T, hidden=H, topk=K, num_tot_experts=num_experts)
    with epmoe.EPAll2AllLayer(None, dtype=torch.float32, device=device, **sizes) as layer:
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        experts = torch.arange(LOCAL, device=device) + rank * LOCAL
        factor = 1 + torch.repeat_interleave(experts, layout.tokens_per_expert)
        out = layer.combine(rows * factor[:, None], layout, row_weight)
        sent_tokens = layout.send_tokens.cpu()

        tables = [None] * world_size
        dist.all_gather_object(tables, show(rank, idx, layout, rows))

    if rank == 0:
        print(f"{world_size} ranks on {device.type}, {num_experts} experts\n")
        print("Dispatch: the rank and row of each choice\n  token   choices")
        print("\n".join(line for sent, _ in tables for line in sent))
        print("\nThe rows of each expert\n  rank   expert   tokens")
        print("\n".join(line for _, got in tables for line in got))

    # The reference is plain PyTorch in one process, with the inputs of all ranks.
    xs, indices, weights = zip(*(inputs(r, num_experts) for r in range(world_size)))
    plan, chosen = reference.plan(indices, num_experts), torch.stack(indices)
    want_rows = reference.dispatch(xs, plan)
    ys = [y * (1 + chosen[tuple(source.T)])[:, None] for y, source in zip(want_rows, plan["rows"])]
    want = reference.combine(ys, plan, indices, num_experts, reference.dispatch_weights(weights, plan))
    assert torch.equal(rows.cpu(), want_rows[rank]), "dispatch differs from the reference"
    assert torch.equal(out.cpu(), want[rank]), "combine differs from the reference"
    assert torch.equal(sent_tokens, plan["send_tokens"][rank].int()), "numbers of sent tokens differ"
    dist.barrier()
    if rank == 0:
        print("\nThe rows and sums of every rank are equal to the reference, bit by bit.")
        print("dispatch and combine: ok")


if __name__ == "__main__":
    launch(main)
