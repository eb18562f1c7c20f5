"""The peer DeepEP V2, where deep_ep.ElasticBuffer can be imported: dispatch in expand mode, and combine.

Rows [M, H] are ordered by local expert, as epmoe's, but in no fixed order inside of an expert.  Its combine
adds up the rows of each token without weights.  So the rows are weighted in advance, which is not timed: the
experts would do it in a kernel that they run anyway.  This favours DeepEP.  Layout, host read and allocation
are part of its dispatch.
"""

import torch
import torch.distributed as dist

from .measure import slowest

SM_COUNTS = (0, 24, 48, 64)  # 0: as many as DeepEP chooses


def load(cpu_group):
    """Return (the module deep_ep, None), or (None, the reason) on all ranks.  Collective."""
    module, error = None, "there is only one rank"
    if cpu_group is not None:
        try:
            import deep_ep

            if not hasattr(deep_ep, "ElasticBuffer"):
                raise ImportError("this deep_ep is V1: it has no ElasticBuffer")
            module = deep_ep
        # it must not stop the other measurements; the import can raise AssertionError
        except Exception as e:
            error = f"{type(e).__name__}: {e}".strip().split("\n")[0]
    if slowest(cpu_group, float(module is None)):
        return None, error if module is None else "it does not work on all ranks"
    return module, None


class DeepEPV2:
    """dispatch and combine of x [T, H], idx and weight [T, K].  One buffer for all numbers of SMs."""

    def __init__(self, module, x, idx, weight, num_experts):
        self.x, self.idx, self.weight, self.num_experts = x, idx.to(module.topk_idx_t), weight, num_experts
        self.num_sms = 0
        self.buffer = module.ElasticBuffer(
            dist.group.WORLD, num_max_tokens_per_rank=len(x), hidden=x.shape[1], num_topk=idx.shape[1],
            prefer_overlap_with_compute=False, explicitly_destroy=True)

    def with_sms(self, num_sms):
        """Return this peer, which then moves tokens with this number of SMs, or 0: as many as it chooses."""
        self.num_sms = num_sms
        return self

    def close(self):
        self.buffer.destroy()

    def dispatch(self):
        """Return rows [M, H].  Sets row_weight [M], and expert_offsets [L + 1]: where their rows begin."""
        rows, _, self.row_weight, self.handle, _ = self.buffer.dispatch(
            self.x, topk_idx=self.idx, topk_weights=self.weight, num_experts=self.num_experts,
            num_max_tokens_per_rank=len(self.x), num_sms=self.num_sms, do_expand=True)
        return rows

    @property
    def expert_offsets(self):
        ends = self.handle.psum_num_recv_tokens_per_expert.to(torch.int32)
        return torch.cat([ends.new_zeros(1), ends])

    def weighted(self, rows):
        """Return rows [M, H] of the last dispatch times their weights."""
        return rows * self.row_weight[:, None].to(rows.dtype)

    def combine(self, weighted):
        """Return the sums [T, H] of weighted rows [M, H] of the last dispatch."""
        return self.buffer.combine(weighted, self.handle, num_sms=self.num_sms)[0]
