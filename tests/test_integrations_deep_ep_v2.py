"""epmoe.integrations.deep_ep: ElasticBuffer against plain PyTorch."""

import pytest
import torch

import epmoe
from deep_ep_cases import BF16, H, K, L, added, expect, inputs, on, received, rows_to_add, same, scales_of
from epmoe.integrations import deep_ep


def run_v2(world, device):
    rank, size = world.rank, world.size
    buffer = deep_ep.ElasticBuffer(world, num_max_tokens_per_rank=9, explicitly_destroy=True, device=device)
    want_x, want_idx, want_weights, want_token, want_source = received(rank, size)
    x, idx, weights = on(device, *inputs(rank, size))
    n, counts = len(want_x), [int((want_idx == e).sum()) for e in range(L)]
    ranks_of_token = torch.stack([((idx >= 0) & (idx // L == r)).any(1) for r in range(size)], 1).sum(1)
    bias = (torch.full_like(x, 0.5), torch.full_like(x, -1.0))
    for sync, align, with_fp8 in ((True, 1, False), (True, 4, True), (False, 1, True), (False, 4, False)):
        sent = scales_of(x) if with_fp8 else x
        want = scales_of(want_x) if with_fp8 else (want_x,)
        stats = torch.zeros(L, dtype=torch.int32, device=device)
        options = dict(topk_idx=idx, topk_weights=weights, num_experts=L * size, expert_alignment=align,
                       do_cpu_sync=sync, cumulative_local_expert_recv_stats=stats)
        got, got_idx, got_weights, handle, _ = buffer.dispatch(sent, **options)
        got = got if with_fp8 else (got,)
        assert stats.tolist() == counts and len(got[0]) == (n if sync else 9 * size)
        assert all(same(g[:n], w.contiguous()) for g, w in zip(got, want))
        assert same(got_idx[:n], want_idx) and same(got_weights[:n], want_weights)
        assert (got_idx[n:] == -1).all()
        padded = [-(-c // align) * align for c in counts]
        assert handle.num_recv_tokens_per_expert_list == (padded if sync else [])
        assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(padded).cumsum(0).tolist()
        ends = [int((want_source <= r).sum()) for r in range(size)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends
        assert torch.equal(handle.recv_src_metadata[:n, 0].cpu().long(), want_source * 9 + want_token)
        again = buffer.dispatch(sent, handle=handle)
        assert same(again[1], got_idx.cpu()) and again[3] is handle and again[2] is None
        y = torch.zeros(len(got[0]), H, dtype=BF16, device=device)
        y[:n] = want_x.to(device)
        kept = torch.where(got_idx >= 0, got_weights, 9.0)  # what is not of this rank does not count
        out, out_weights, _ = buffer.combine(y, handle, topk_weights=kept, bias=bias)
        total = torch.full_like(x, -0.5, dtype=torch.float32)
        for i in range(size):
            total += x * (i < ranks_of_token[:, None])
        assert torch.equal(out, total.to(BF16))
        assert torch.equal(out_weights, weights.masked_fill(idx < 0, 0))
        check_expanded(buffer, sent, options, (want, want_x, want_idx, want_weights), counts, x)
    assert torch.equal(handle.topk_idx, idx) and handle.topk_idx is not idx
    buffer.barrier(with_cpu_sync=True)
    v2_mistakes(buffer, x, idx, weights, handle)
    buffer.destroy()


def check_expanded(buffer, sent, options, wanted, counts, x):
    want, want_x, want_idx, want_weights = wanted
    idx, align, size = options["topk_idx"], options["expert_alignment"], buffer.num_ranks
    rows, none, row_weights, handle, event = buffer.dispatch(
        sent, **options, do_expand=True, use_tma_aligned_col_major_sf=True, async_with_compute_stream=True)
    event.current_stream_wait()
    rows = rows if isinstance(rows, tuple) else (rows,)
    assert none is None
    if len(rows) == 2:
        assert rows[1].stride(0) == 1 and rows[1].stride(1) % 4 == 0
    start, at = 0, handle.recv_src_metadata[: len(want_idx), 2:].cpu()
    for e in range(L):
        tokens = (want_idx == e).nonzero()
        for r, w in zip(rows, want):
            assert same(r[start : start + counts[e]].contiguous(), w[tokens[:, 0]].contiguous())
        assert same(row_weights[start : start + counts[e]], want_weights[want_idx == e])
        assert at[want_idx == e].tolist() == list(range(start, start + counts[e]))
        assert int(handle.psum_num_recv_tokens_per_expert[e]) == start + counts[e]
        start += -(-counts[e] // align) * align
    assert (at[want_idx < 0] == -1).all()
    if options["do_cpu_sync"]:
        assert len(rows[0]) == start
    again = buffer.dispatch(sent, handle=handle, do_expand=True, do_zero_padding=True,
                            topk_weights=options["topk_weights"])
    zero = again[0] if len(rows) == 1 else again[0][0]
    ends = handle.psum_num_recv_tokens_per_expert.tolist()
    for e, end in enumerate(ends):
        pad = zero[end : -(-end // align) * align]
        assert not pad.float().any()
        assert same(zero[end - counts[e] : end], rows[0][end - counts[e] : end].cpu())
        assert not again[2][end : -(-end // align) * align].any()
    y = torch.full((len(rows[0]), H), torch.nan, dtype=BF16, device=x.device)
    for e, end in enumerate(ends):
        y[end - counts[e] : end] = want_x[(want_idx == e).nonzero()[:, 0]].to(x.device)
    out, out_weights, _ = buffer.combine(y, handle, topk_weights=row_weights)
    partial = torch.stack([(x.float() * ((idx >= 0) & (idx // L == r)).sum(1, keepdim=True)).to(BF16).float()
                           for r in range(size)])
    assert torch.equal(out, sum(partial).to(BF16))
    assert torch.equal(out_weights, options["topk_weights"].masked_fill(idx < 0, 0))


def v2_mistakes(buffer, x, idx, weights, handle):
    right = dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=L * buffer.num_ranks)
    expect(ValueError, "needs allocate_on_comm", buffer.dispatch, x, idx, previous_event=buffer.capture())
    both = ValueError, epmoe.PeerError
    for change, text in ((dict(num_experts=None), "num_experts None"),
                         (dict(do_zero_padding=True), "do_expand"), (dict(handle=handle), "must be None"),
                         (dict(topk_weights=weights[:, 1:]), "topk_weights: wanted shape")):
        expect(both, f"{text}|rank", buffer.dispatch, **right | change)
    expect(both, "the handle has|rank", buffer.dispatch, x, handle=handle, num_experts=999)
    expect(both, "wanted shape|rank", buffer.combine, x.new_zeros(999, H), handle)
    expect((TypeError, epmoe.PeerError), "wanted what dispatch of this buffer returned, got tuple|rank",
           buffer.combine, x, (handle,))
    expect(NotImplementedError, "Engram", buffer.engram_fetch)
    got, _, _, handle, _ = buffer.dispatch(**right)
    assert buffer.combine(got, handle)[0].shape == x.shape


@pytest.mark.parametrize("size", [1, 2, 4])
def test_integrations_deep_ep_v2(ranks, size):
    ranks(run_v2, world_size=size, timeout_s=60)


def ranks_in_order(idx):
    """Return for each choice [T, K] whether it is the last one of its token at its rank."""
    rank = torch.where(idx >= 0, idx // L, -1)
    later = torch.ones(K, K, dtype=torch.bool, device=idx.device).triu(1)
    return (idx >= 0) & ~((rank[:, :, None] == rank[:, None, :]) & later).any(2)


def run_v2_sums(world, device):
    rank, size = world.rank, world.size
    for reduces in (False, True):
        buffer = deep_ep.ElasticBuffer(world, num_max_tokens_per_rank=9, allow_multiple_reduction=reduces,
                                       explicitly_destroy=True, device=device)
        all_idx = [inputs(r, size)[1].to(device) for r in range(size)]
        idx = all_idx[rank]
        for dtype in (torch.float32, BF16):
            made = [rows_to_add(r, (len(all_idx[r]), K, H), dtype, device) for r in range(size)]
            rows, biases = made[rank]
            same_rank = (idx[:, :, None] // L == idx[:, None, :] // L) & (idx >= 0)[:, None, :]
            sums = torch.stack([added((), rows, same_rank[:, k]) for k in range(K)], 1)  # of a choice's rank
            for expand in (False, True):
                handle = buffer.dispatch(rows[:, 0].contiguous(), idx, num_experts=L * size,
                                         do_expand=expand)[3]
                table = handle.recv_src_metadata
                y = torch.zeros(handle.num_out_rows, H, dtype=dtype, device=device)
                for i, (number, _, *places) in enumerate(table.tolist()):
                    (theirs, _), their_idx = made[number // 9], all_idx[number // 9][number % 9]
                    if not expand:
                        here = (their_idx >= 0) & (their_idx // L == rank)
                        y[i] = added((), theirs[None, number % 9], here[None])[0]
                    for k, at in enumerate(places):
                        if at >= 0:
                            y[at] = theirs[number % 9, k]
                for used in ((), biases[:1], biases):
                    out = buffer.combine(y, handle, bias=used or None)[0]
                    if expand and not reduces:
                        assert same(out, added(used, rows, idx >= 0))
                    else:
                        assert same(out, added(used, sums, ranks_in_order(idx)))
        buffer.destroy()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_integrations_deep_ep_v2_adds_in_the_order_of_choices(ranks, size):
    """Biases come first, then the rows by choice, or the ranks by their last choice; all is rounded once."""
    ranks(run_v2_sums, world_size=size, timeout_s=60)
