"""The peer that always runs: sort, all_to_all_single, sort back: what torch.distributed alone gives."""

import torch
import torch.distributed as dist


class TorchAllToAll:
    """Unfused dispatch and combine over a process group (NCCL on GPUs, gloo on CPUs), of x [T, H], idx and weight [T, K].

    One row a choice crosses the link.  dispatch leaves rows by local expert, source rank, token and choice, as epmoe does.
    """

    def __init__(self, x, idx, weight, num_experts, world_size):
        self.x, self.idx, self.weight = x, idx, weight
        self.num_experts, self.world_size, self.topk = num_experts, world_size, idx.shape[1]

    def _exchange(self, out, x, out_sizes, in_sizes):
        if dist.is_initialized() and self.world_size > 1:
            dist.all_to_all_single(out, x, out_sizes, in_sizes)
        else:
            out.copy_(x)

    def dispatch(self):
        """Rows [M, H], grouped by local expert; expert_offsets [L + 1] says where each begins."""
        flat = self.idx.flatten()
        self.order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        theirs = torch.empty_like(counts)
        self._exchange(theirs, counts, None, None)
        self.send, self.recv = torch.stack([counts, theirs]).view(2, self.world_size, -1).sum(2).tolist()
        rows = self.x.new_empty(sum(self.recv), self.x.shape[1])
        self._exchange(rows, self.x[self.order // self.topk], self.recv, self.send)
        local = self.num_experts // self.world_size
        expert = torch.arange(local, device=flat.device).repeat(self.world_size).repeat_interleave(theirs, output_size=len(rows))
        self.by_expert = expert.argsort(stable=True)
        ends = theirs.view(self.world_size, local).sum(0).cumsum(0, dtype=torch.int32)
        self.expert_offsets = torch.cat([ends.new_zeros(1), ends])
        return rows[self.by_expert]

    def row_weights(self):
        """[M] of the last dispatch's rows.  Not timed: combine applies the weights at home, where they are."""
        weights = self.weight.new_empty(sum(self.recv))
        self._exchange(weights, self.weight.flatten()[self.order], self.recv, self.send)
        return weights[self.by_expert]

    def combine(self, rows):
        """Weighted sums [T, H] of the rows [M, H] of the last dispatch."""
        back = torch.empty_like(rows)
        back[self.by_expert] = rows
        mine = rows.new_empty(sum(self.send), rows.shape[1])
        self._exchange(mine, back, self.send, self.recv)
        home = torch.empty_like(mine)
        home[self.order] = mine
        return (home.view(*self.idx.shape, -1) * self.weight[..., None].to(rows.dtype)).sum(1)
