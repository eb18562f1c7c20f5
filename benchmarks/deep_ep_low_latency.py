"""The peer DeepEP with its low-latency kernels, where they can be used: NVSHMEM must have been built in.

The interface is deep_ep.Buffer of DeepEP V1.  Its rows are masked, as LowLatencyAll2All's, in no fixed order.
It applies the weights in combine.
"""

import functools

import torch.distributed as dist

from .measure import slowest


class LowLatency:
    """Low-latency dispatch and combine of x [T, H], idx and weight [T, K]."""

    def __init__(self, module, inputs, num_experts, world_size):
        self.x, idx, self.weight = inputs
        self.idx = idx.to(module.topk_idx_t)
        self.max_tokens, hidden = self.x.shape
        self.num_experts, self.handle = num_experts, None
        num_bytes = module.Buffer.get_low_latency_rdma_size_hint(self.max_tokens, hidden, world_size,
                                                                 num_experts)
        self.buffer = module.Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True,
                                    num_qps_per_rank=num_experts // world_size, explicitly_destroy=True)

    def close(self):
        self.buffer.destroy()

    def dispatch(self, fp8=False):
        """Return rows [L, W * T, H], or with fp8 a tuple (rows, scales [L, W * T, H / 128])."""
        rows, _, self.handle, *_ = self.buffer.low_latency_dispatch(
            self.x, self.idx, self.max_tokens, self.num_experts, use_fp8=fp8)
        return rows

    def combine(self, y, handle):
        """Return the weighted sums [T, H] of y [L, W * T, H]."""
        return self.buffer.low_latency_combine(y, self.idx, self.weight, handle)[0]

    def calls(self, y):
        """Return {name: function to time}."""
        self.dispatch()
        handle = self.handle

        def pair(fp8):
            self.dispatch(fp8)
            return self.combine(y, self.handle)

        return {"dispatch": self.dispatch, "dispatch fp8": functools.partial(self.dispatch, True),
                "combine": lambda: self.combine(y, handle),
                "pair": functools.partial(pair, False), "pair fp8": functools.partial(pair, True)}


def load(run, shape, inputs):
    """Return (LowLatency, None), or (None, the reason) on all ranks.  Collective."""
    peer, error = None, "it does not work on all ranks"
    try:
        peer = LowLatency(run.deep_ep.module, inputs, shape.experts, run.size)
        peer.dispatch()
    # it must not stop the other measurements
    except Exception as e:
        peer, error = None, f"{type(e).__name__}: {e}".strip().split("\n")[0]
    if slowest(run.cpu_group, float(peer is None)):
        return None, error
    return peer, None
