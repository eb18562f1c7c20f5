"""The peer that always runs: sort, all_to_all_single, sort back, with torch.distributed alone."""

import torch
import torch.distributed as dist


class TorchAllToAll:
    """dispatch and combine over a process group (NCCL on GPUs, gloo on CPUs), of x [T, H], idx and weight [T,
    K].

    One row per choice crosses the link.  Rows are ordered by local expert, source rank, token, choice, as
    epmoe's.
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
        """Return rows [M, H], grouped by local expert.

        Sets expert_offsets [L + 1]: where each expert's rows begin.
        """
        flat = self.idx.flatten()
        self.order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        theirs = torch.empty_like(counts)
        self._exchange(theirs, counts, None, None)
        self.send, self.recv = torch.stack([counts, theirs]).view(2, self.world_size, -1).sum(2).tolist()
        rows = self.x.new_empty(sum(self.recv), self.x.shape[1])
        self._exchange(rows, self.x[self.order // self.topk], self.recv, self.send)
        local = self.num_experts // self.world_size
        expert = torch.arange(local, device=flat.device).repeat(self.world_size)
        expert = expert.repeat_interleave(theirs, output_size=len(rows))
        self.by_expert = expert.argsort(stable=True)
        ends = theirs.view(self.world_size, local).sum(0).cumsum(0, dtype=torch.int32)
        self.expert_offsets = torch.cat([ends.new_zeros(1), ends])
        return rows[self.by_expert]

    def row_weights(self):
        """Return the weights [M] of the last dispatch's rows.

        Not timed, because combine applies the weights at the token's rank, where they are.
        """
        weights = self.weight.new_empty(sum(self.recv))
        self._exchange(weights, self.weight.flatten()[self.order], self.recv, self.send)
        return weights[self.by_expert]

    def combine(self, rows):
        """Return the weighted sums [T, H] of the rows [M, H] of the last dispatch."""
        back = torch.empty_like(rows)
        back[self.by_expert] = rows
        mine = rows.new_empty(sum(self.send), rows.shape[1])
        self._exchange(mine, back, self.send, self.recv)
        home = torch.empty_like(mine)
        home[self.order] = mine
        return (home.view(*self.idx.shape, -1) * self.weight[..., None].to(rows.dtype)).sum(1)
