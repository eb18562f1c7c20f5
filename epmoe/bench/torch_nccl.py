"""The peer that always runs: sort, all_to_all_single, sort back: what torch.distributed alone gives."""

import torch
import torch.distributed as dist


class TorchAllToAll:
    """Unfused dispatch and combine over a process group (NCCL on GPUs, gloo on CPUs)."""

    def __init__(self, num_experts, world_size, device):
        self.num_experts, self.world_size, self.device = num_experts, world_size, device

    def _exchange(self, out, x, out_sizes, in_sizes):
        if dist.is_initialized() and self.world_size > 1:
            dist.all_to_all_single(out, x, out_sizes, in_sizes)
        else:
            out.copy_(x)

    def dispatch(self, x, idx):
        """Rows grouped by local expert, and what combine needs.  One row a choice crosses the link."""
        flat = idx.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        theirs = torch.empty_like(counts)
        self._exchange(theirs, counts, None, None)
        send, recv = torch.stack([counts, theirs]).view(2, self.world_size, -1).sum(2).tolist()
        rows = x.new_empty(sum(recv), x.shape[1])
        self._exchange(rows, x[order // idx.shape[1]], recv, send)
        local = self.num_experts // self.world_size
        expert = torch.arange(local, device=self.device).repeat(self.world_size).repeat_interleave(theirs, output_size=sum(recv))
        by_expert = expert.argsort(stable=True)
        return rows[by_expert], (order, by_expert, send, recv, idx.shape)

    def combine(self, rows, state, weight):
        """Weighted sums of the rows, at home."""
        order, by_expert, send, recv, (num_tokens, topk) = state
        back = torch.empty_like(rows)
        back[by_expert] = rows
        mine = rows.new_empty(sum(send), rows.shape[1])
        self._exchange(mine, back, send, recv)
        home = torch.empty_like(mine)
        home[order] = mine
        return (home.view(num_tokens, topk, -1) * weight[..., None].to(rows.dtype)).sum(1)
