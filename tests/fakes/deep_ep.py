"""A slow replacement of DeepEP's module for one node, over torch.distributed.

It has the calls that the benchmark makes. Shapes, dtypes, orders and assertions are those of the real module.
Buffer is that of V1. ElasticBuffer, that of V2, is epmoe's own adapter.
"""

import torch
import torch.distributed as dist

from epmoe.integrations.deep_ep import ElasticBuffer as Adapter

topk_idx_t = torch.int64


class ElasticBuffer(Adapter):
    """The rows of an expert are in epmoe's order, which DeepEP does not promise."""

    def __init__(self, group, *, num_max_tokens_per_rank, hidden, num_topk, prefer_overlap_with_compute,
                 explicitly_destroy):
        super().__init__(group, num_max_tokens_per_rank=num_max_tokens_per_rank,
                         explicitly_destroy=explicitly_destroy)
        self.sizes = num_max_tokens_per_rank, hidden, num_topk

    def dispatch(self, x, *, topk_idx, topk_weights, num_experts, num_max_tokens_per_rank, num_sms,
                 do_expand):
        assert (len(x), x.shape[1], topk_idx.shape[1]) == self.sizes and do_expand and num_sms % 2 == 0
        return super().dispatch(x, topk_idx, topk_weights, num_experts=num_experts, do_expand=True,
                                num_max_tokens_per_rank=num_max_tokens_per_rank)


class Config:
    def __init__(self, num_sms=20, nvl_send=6, nvl_recv=256, rdma_send=6, rdma_recv=256):
        assert 0 < nvl_send < nvl_recv and 0 < rdma_send < rdma_recv
        self.num_sms = num_sms


def exchange(x, send, recv):
    """all_to_all of the rows of x. send and recv are the numbers of rows for and from each rank."""
    out = x.new_empty(sum(recv), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), recv, send)
    return out


class Buffer:
    num_sms = 20

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
                 explicitly_destroy=False):
        assert explicitly_destroy and (num_rdma_bytes > 0 if low_latency_mode else num_nvl_bytes > 0)
        self.rank, self.size, self.alive = dist.get_rank(group), dist.get_world_size(group), True

    def destroy(self):
        assert self.alive
        self.alive = False

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config(Buffer.num_sms, 6, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks):
        return Config(Buffer.num_sms, 9, 256, 6, 128)

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and num_experts % self.size == 0
        to = topk_idx // (num_experts // self.size)
        is_in_rank = torch.stack([(to == r).any(1) for r in range(self.size)], 1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return is_in_rank.sum(0, dtype=torch.int32), None, per_expert, is_in_rank, None

    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
                 is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None,
                 config=None):
        assert self.alive and handle is None and x.is_contiguous() and config.num_sms % 2 == 0
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert is_token_in_rank.dtype == torch.bool
        assert topk_idx.dtype == topk_idx_t and topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape
        local = len(num_tokens_per_expert) // self.size
        counts = [torch.empty_like(num_tokens_per_rank) for _ in range(self.size)]
        dist.all_gather(counts, num_tokens_per_rank)
        # [source, destination], inclusive sums
        rank_prefix_matrix = torch.stack(counts).cumsum(0, dtype=torch.int32)
        send, recv = num_tokens_per_rank.tolist(), [int(c[self.rank]) for c in counts]
        tokens = [torch.nonzero(is_token_in_rank[:, r]).flatten() for r in range(self.size)]
        local_idx = [torch.where(topk_idx[t] // local == r, topk_idx[t] % local, -1)
                     for r, t in enumerate(tokens)]
        weights = [torch.where(i >= 0, topk_weights[t], 0.0) for i, t in zip(local_idx, tokens)]
        send_head = torch.where(is_token_in_rank, is_token_in_rank.cumsum(0) - 1, -1).int()
        channels = torch.zeros(self.size, config.num_sms // 2, dtype=torch.int32)
        src_idx = exchange(torch.cat(tokens).int(), send, recv)
        recv_idx = exchange(torch.cat(local_idx), send, recv)
        per_local_expert = torch.bincount(recv_idx[recv_idx >= 0], minlength=local).tolist()
        handle = (rank_prefix_matrix, channels, channels.clone(), src_idx, is_token_in_rank, send_head)
        return (exchange(x[torch.cat(tokens)], send, recv), recv_idx,
                exchange(torch.cat(weights), send, recv), per_local_expert, handle, None)

    def combine(self, x, handle, topk_weights=None, bias=None, config=None):
        rank_prefix_matrix, _, channels, src_idx, is_token_in_rank, send_head = handle
        assert self.alive and x.is_contiguous() and len(x) == len(src_idx)
        assert channels.shape[1] == config.num_sms // 2, "dispatched with another number of SMs"
        recv = rank_prefix_matrix[:, self.rank].diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
        send = is_token_in_rank.sum(0).tolist()
        back = exchange(x, recv, send).split(send)
        total = torch.zeros(len(is_token_in_rank), x.shape[1])
        for r, rows in enumerate(back):
            here = is_token_in_rank[:, r]
            total[here] += rows[send_head[here, r].long()].float()
        return total.to(x.dtype), None, None

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        return num_max_dispatch_tokens_per_rank * hidden * num_ranks * num_experts

    def low_latency_dispatch(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=True,
                             async_finish=False, return_recv_hook=False):
        assert self.alive and x.dtype == torch.bfloat16 and x.is_contiguous() and topk_idx.dtype == topk_idx_t
        assert len(x) <= num_max_dispatch_tokens_per_rank
        local, choice = num_experts // self.size, topk_idx.flatten().argsort(stable=True)
        expert = topk_idx.flatten()[choice]
        send = torch.bincount(expert // local, minlength=self.size)
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send)
        send, recv = send.tolist(), recv.tolist()
        rows, experts = (exchange(t, send, recv) for t in (x[choice // topk_idx.shape[1]], expert % local))
        # The rows of an expert have no fixed order; here it is from the last to the first.
        packed = x.new_empty(local, self.size * num_max_dispatch_tokens_per_rank, x.shape[1])
        place = torch.empty(len(rows), 2, dtype=torch.int64)
        counts = torch.zeros(local, dtype=torch.int32)
        for i in reversed(range(len(rows))):
            place[i] = torch.stack([experts[i], counts[experts[i]]])
            packed[tuple(place[i])] = rows[i]
            counts[experts[i]] += 1
        handle = place, choice, send, recv
        if not use_fp8:
            return packed, counts, handle, None, None
        groups = packed.float().unflatten(-1, (-1, 128))
        scales = groups.abs().amax(-1).clamp(min=1e-4) / 448
        numbers = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
        return (numbers, scales), counts, handle, None, None

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, zero_copy=False, async_finish=False,
                            return_recv_hook=False, out=None):
        place, choice, send, recv = handle
        assert self.alive and x.dtype == torch.bfloat16 and topk_weights.dtype == torch.float32
        home = x.new_empty(len(choice), x.shape[-1])
        home[choice] = exchange(x[place[:, 0], place[:, 1]], recv, send)
        sums = (home.view(*topk_idx.shape, -1).float() * topk_weights[..., None]).sum(1)
        return sums.to(x.dtype), None, None
