"""epmoe.integrations.deep_ep against plain PyTorch: what each rank must receive follows from all inputs."""

import gc
import weakref

import pytest
import torch

import epmoe
from deep_ep_cases import (BF16, H, K, L, added, expect, inputs, on, received, rows_to_add, same, scales_of,
                           settle)
from epmoe import reference
from epmoe.integrations import deep_ep
from outcomes import check_outcomes, outcome


def make(world, device, **options):
    return deep_ep.Buffer(world, explicitly_destroy=True, device=device, **options)


def layout_of(buffer, idx):
    per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, L * buffer.group_size)
    return dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in)


def run_v1(world, device):
    """Every option of dispatch and combine once.  The asserts run on the rank."""
    buffer, rank, size = make(world, device), world.rank, world.size
    for tokens in ("unequal", "many", "full"):  # the layers grow, and then serve fewer tokens, too
        x, idx, weights = on(device, *inputs(rank, size, tokens))
        want_x, want_idx, want_weights, want_token, _ = received(rank, size, tokens=tokens)
        layout = layout_of(buffer, idx)
        is_in = torch.stack([((idx >= 0) & (idx // L == r)).any(1) for r in range(size)], 1)
        assert torch.equal(layout["is_token_in_rank"], is_in)
        assert torch.equal(layout["num_tokens_per_rank"].long(), is_in.sum(0))
        counts = [int((want_idx == e).sum()) for e in range(L)]
        for with_fp8 in (False, True):
            sent = scales_of(x) if with_fp8 else x
            for with_topk in (False, True):
                topk = dict(topk_idx=idx, topk_weights=weights) if with_topk else {}
                got, got_idx, got_weights, got_counts, handle, event = buffer.dispatch(
                    sent, **layout, **topk, expert_alignment=4)
                assert event.event is None and len(handle) == 6
                assert got_counts == [-(-c // 4) * 4 for c in counts]
                want = scales_of(want_x) if with_fp8 else want_x
                for g, w in zip(got, want) if with_fp8 else [(got, want)]:
                    assert same(g, w.contiguous())
                assert torch.equal(handle[3].cpu().long(), want_token)
                if with_topk:
                    assert same(got_idx, want_idx) and same(got_weights, want_weights)
                else:
                    assert got_idx is None and got_weights is None
                again = buffer.dispatch(sent, handle=handle)
                for g, w in zip(again[0], got) if with_fp8 else [(again[0], got)]:
                    assert same(g, w.cpu())
                assert again[1:5] == (None,) * 4
                worst = buffer.dispatch(sent, **layout, **topk, num_worst_tokens=300 * size)
                first = worst[0][0] if with_fp8 else worst[0]
                assert worst[3] == [] and len(first) == 300 * size
                assert same(first[: len(want_x)], (got[0] if with_fp8 else got).cpu())
                if with_topk:
                    assert same(worst[1][: len(want_x)], want_idx) and (worst[1][len(want_x) :] == -1).all()
                y = torch.zeros(300 * size, H, dtype=BF16, device=device)
                y[: len(want_x)] = want_x.to(device)
                for y, handle in ((want_x.to(device), handle), (y, worst[4])):
                    check_combine(buffer, y, handle, x, is_in, with_topk)
    buffer.destroy()


def check_combine(buffer, y, handle, x, is_in, with_topk):
    """The rows of a token are all x[t]. The sum begins with the biases."""
    bias = tuple(torch.full_like(x, b) for b in (0.5, -1.0))
    weights = torch.full((len(y), K), 0.25, device=y.device) if with_topk else None
    for b, plus in ((None, 0), (bias[0], 0.5), (bias, -0.5)):
        out, out_weights, _ = buffer.combine(y, handle, topk_weights=weights, bias=b)
        want = torch.full_like(x, plus, dtype=torch.float32)
        for r in range(buffer.group_size):
            want += x * is_in[:, r : r + 1]
        assert out.dtype == BF16 and torch.equal(out, want.to(BF16))
        if with_topk:
            assert torch.equal(out_weights, is_in.sum(1, keepdim=True).expand(-1, K) * 0.25)
        else:
            assert out_weights is None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_integrations_deep_ep_v1(ranks, size):
    ranks(run_v1, world_size=size, timeout_s=60)


def run_bias(world, device):
    buffer, rank, size = make(world, device), world.rank, world.size
    _, _, _, token, source = received(rank, size)
    _, idx, _ = on(device, *inputs(rank, size))
    layout = layout_of(buffer, idx)
    for dtype in (torch.float32, BF16):  # float32 shows the order of the sum, bfloat16 where it is rounded
        made = [rows_to_add(r, (len(inputs(r, size)[0]), size, H), dtype, device) for r in range(size)]
        rows, biases = made[rank]
        _, _, _, _, handle, _ = buffer.dispatch(rows[:, 0].contiguous(), **layout)
        y = torch.zeros(len(token), H, dtype=dtype, device=device)
        for i, (s, t) in enumerate(zip(source.tolist(), token.tolist())):
            y[i] = made[s][0][t, rank]
        for bias in (None, biases[0], biases):
            if bias is None and rank == 0:  # a rank may have none where others have some
                bias = biases
            out = buffer.combine(y, handle, bias=bias)[0]
            used = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else bias
            assert same(out, added(used, rows, layout["is_token_in_rank"]))
        apart = torch.stack([biases[0], biases[0]], 1).transpose(0, 1)[1]  # not contiguous
        out = buffer.combine(y, handle, bias=apart)[0]
        assert same(out, added(biases[:1], rows, layout["is_token_in_rank"]))
    buffer.destroy()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_integrations_deep_ep_v1_bias_is_part_of_the_sum(ranks, size):
    """Biases come first, then the rows in the order of the ranks, and the sum is rounded once."""
    ranks(run_bias, world_size=size, timeout_s=60)


def test_integrations_deep_ep_biases_are_checked_before_the_sum():
    sizes = dict(max_tokens=4, hidden=8, topk=1, num_tot_experts=1, dtype=torch.float32, device="cpu")
    with epmoe.EPAll2AllLayer(epmoe.thread_worlds(1)[0], **sizes) as layer:
        rows, _, layout = layer.dispatch(torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int64))
        for biases, kind, text in (
                ((None, rows), ValueError, "bias_1: give bias_0, too"),
                ((rows[1:], None), ValueError, "bias_0: wanted size 3 in dimension 0, got 2"),
                ((rows, rows.double()), TypeError, "bias_1: wanted float32, got float64")):
            with pytest.raises(kind, match=text):
                layer._combine(rows, None, None, layout.plan, layout.recv, 0, 3, biases=biases)
        out, _ = layer._combine(rows, None, None, layout.plan, layout.recv, 0, 3, biases=(rows, rows))
        assert torch.equal(out, 3 * rows)


def run_events(world, device):
    buffer = make(world, device)
    x, idx, weights = on(device, *inputs(world.rank, world.size, "full"))
    want = received(world.rank, world.size, tokens="full")[0]
    for allocate in (False, True):
        streams = dict(previous_event=buffer.capture(), async_finish=True, allocate_on_comm_stream=allocate)
        per_rank, _, per_expert, is_in, event = buffer.get_dispatch_layout(idx, L * world.size, **streams)
        got, _, _, _, handle, event = buffer.dispatch(
            x, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in,
            previous_event=event, async_finish=True, allocate_on_comm_stream=allocate)
        with event:
            pass
        assert same(got, want)
        out, _, event = buffer.combine(got, handle, async_finish=True)
        told = []
        event.register_hook_after_wait(lambda told=told: told.append(1))
        with pytest.raises(RuntimeError, match="a hook already"):
            event.register_hook_after_wait(print)
        event.current_stream_wait(release_handle=True)
        assert told == [1] and event.event is None
        assert torch.equal(out, (x.float() * is_in.sum(1, keepdim=True)).to(BF16))
    assert buffer.get_comm_stream() is not None
    buffer.destroy()


def test_integrations_deep_ep_events_and_streams(ranks):
    ranks(run_events, world_size=2, timeout_s=60)
    with pytest.raises(RuntimeError, match="no event to wait for"):
        deep_ep.EventOverlap(None).current_stream_wait()


@pytest.mark.cpu_only
@pytest.mark.parametrize("cls", [deep_ep.Buffer, deep_ep.ElasticBuffer])
def test_integrations_deep_ep_buffer_is_no_cycle(cls):
    """A program that makes many gives their memory back at once."""
    gc.collect()
    gc.disable()
    try:
        buffer = cls(epmoe.thread_worlds(1)[0], explicitly_destroy=True, device="cpu")
        buffer.destroy()
        seen = weakref.ref(buffer)
        del buffer
        assert seen() is None
    finally:
        gc.enable()


def test_integrations_deep_ep_event_of_a_block():
    """The end of the block waits for the event, and drops it on request. Without an event it does nothing."""
    told, event = [], deep_ep.Buffer.capture()
    event.register_hook_after_wait(lambda: told.append(1))
    with event(release_handle=True):
        assert told == []
    assert told == [1] and event.event is None
    with event:
        pass


def run_mistakes(world, device):
    """What one rank does wrong, all ranks hear; the next call works."""
    buffer, is_first = make(world, device), world.rank == 0
    x, idx, weights = on(device, *inputs(world.rank, world.size, "full"))
    layout = layout_of(buffer, idx)

    def all_raise(kind, text, fn, wrong, right, others=epmoe.PeerError, other_text="rank 0"):
        if is_first:
            expect(kind, text, fn, **wrong)
        else:
            expect(others, other_text, fn, **right)

    right = dict(x=x, **layout, topk_idx=idx, topk_weights=weights)
    for change, kind, text in (
            (dict(x=x.double()), TypeError, "x: wanted bfloat16"),
            (dict(x=x.T), ValueError, "contiguous"),
            (dict(x=(x, x.float())), TypeError, "wanted float8_e4m3fn"),
            (dict(num_tokens_per_rank=None), TypeError, "num_tokens_per_rank: wanted a tensor"),
            (dict(is_token_in_rank=layout["is_token_in_rank"][:-1]), ValueError, "is_token_in_rank"),
            (dict(num_tokens_per_expert=layout["num_tokens_per_expert"][:-1]), ValueError, "per_expert. 5"),
            (dict(topk_weights=None), ValueError, "pass both or neither"),
            (dict(topk_weights=weights.double()), TypeError, "topk_weights: wanted torch.float32"),
            (dict(expert_alignment=0), ValueError, "expert_alignment 0")):
        all_raise(kind, text, buffer.dispatch, right | change, right)
    handle = buffer.dispatch(**right)[4]
    wrong = dict(topk_idx=None, topk_weights=None)
    all_raise(epmoe.EpMismatch, "num_topk .* is 0 on rank 0 and 4 on rank 1", buffer.dispatch, right | wrong,
              right, epmoe.EpMismatch, "num_topk")
    for index in (99, -2):
        all_raise(epmoe.EpIndexError, "rank 0: an index", buffer.dispatch,
                  right | dict(topk_idx=idx.clone().fill_(index)), right, epmoe.EpIndexError)
    all_raise(ValueError, "must be None with a handle", buffer.dispatch,
              dict(x=x, handle=handle, topk_idx=idx), dict(x=x, handle=handle))
    all_raise(ValueError, "num_worst_tokens 2: must be at least", buffer.dispatch,
              right | dict(x=x.repeat(3, 1), num_worst_tokens=2,
                           is_token_in_rank=layout["is_token_in_rank"].repeat(3, 1),
                           topk_idx=idx.repeat(3, 1), topk_weights=weights.repeat(3, 1)),
              right | dict(num_worst_tokens=2), (epmoe.PeerError, ValueError), ".")
    rows = buffer.dispatch(**right)[0]
    for change, kind, text in ((dict(x=rows[:-1]), ValueError, "x: wanted shape"),
                               (dict(handle=tuple(handle)), TypeError, "handle: wanted what dispatch"),
                               (dict(bias=rows[:1]), ValueError, "bias: wanted shape"),
                               (dict(bias=(rows,) * 3), ValueError, "tuple of two")):
        good = dict(x=rows, handle=handle)
        all_raise(kind, text, buffer.combine, good | change, good)
    expect(ValueError, "needs previous_event", buffer.combine, rows, handle, allocate_on_comm_stream=True)
    for wrong in (0, -2, 5):
        expect(ValueError, f"num_experts {wrong}: must be a multiple of 2 ranks", buffer.get_dispatch_layout,
               idx, wrong)
    expect(ValueError, "low_latency_mode=True", buffer.low_latency_dispatch, x, idx, 8, L * world.size)
    out = buffer.combine(rows, handle)[0]
    assert torch.equal(out, (x.float() * layout["is_token_in_rank"].sum(1, keepdim=True)).to(BF16))
    buffer.destroy()


def run_far_indices(world, device):
    """With num_worst_tokens an index that is no expert counts as none, also one that int32 does not have."""
    buffer, num_experts = make(world, device), L * world.size
    x = torch.ones(3, H, dtype=BF16, device=device)
    for far in (num_experts, 2**32, 2**32 + 1, -(2**32)):
        idx = torch.full((3, K), -1, dtype=torch.int64, device=device)
        idx[:, 0], idx[:, 1] = 0, far
        layout = layout_of(buffer, idx.where((idx >= 0) & (idx < num_experts), -1))
        weights = torch.full((3, K), 0.5, device=device)
        _, got_idx, got_weights, *_ = buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=weights,
                                                      num_worst_tokens=3 * world.size)
        assert (got_idx[:, 1:] == -1).all() and not got_weights[:, 1:].any(), far
        assert (got_idx[:, 0] == 0).all() if world.rank == 0 else (got_idx == -1).all(), far
    buffer.destroy()


def test_integrations_deep_ep_far_indices_are_no_experts(ranks):
    ranks(run_far_indices, world_size=min(2, ranks.size(2)), timeout_s=60)


def test_integrations_deep_ep_v1_mistakes(ranks):
    if ranks.size(2) == 2:
        ranks(run_mistakes, world_size=2, timeout_s=60)


@pytest.mark.parametrize("idx, kind, text", [
    (torch.zeros(2, K), TypeError, "topk_idx: wanted int64 or int32, got torch.float32"),
    ([[0, 1]], TypeError, "topk_idx: wanted a tensor, got list"),
    (torch.zeros(K, dtype=torch.int64), ValueError, "topk_idx: wanted shape"),
    (torch.zeros(2, K, dtype=torch.int64, device="meta"), ValueError, "topk_idx: wanted .*cpu"),
], ids=["dtype", "type", "shape", "device"])
def test_integrations_deep_ep_layout_refuses(idx, kind, text):
    """get_dispatch_layout does not count choices in what a dispatch would refuse later."""
    buffer = make(epmoe.thread_worlds(1)[0], "cpu")
    with pytest.raises(kind, match=text):
        buffer.get_dispatch_layout(idx, L)
    buffer.destroy()


def test_integrations_deep_ep_what_is_not_available():
    world = epmoe.thread_worlds(1)[0]
    expect(ValueError, "group is None", deep_ep.Buffer, None)
    expect(NotImplementedError, "mpi4py", deep_ep.Buffer, None, comm=object())
    expect(NotImplementedError, "masked ranks", deep_ep.Buffer, world, enable_shrink=True)
    expect(ValueError, "must be even", deep_ep.Buffer.set_num_sms, 3)
    buffer = deep_ep.Buffer(world, 17, 18, device="cpu")
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.is_sm90_compiled()) == (17, 18, True)
    expect(RuntimeError, "explicitly_destroy=True", buffer.destroy)
    for name in ("internode_dispatch", "internode_combine", "get_local_buffer_tensor",
                 "low_latency_clean_mask_buffer"):
        expect(NotImplementedError, name, getattr(buffer, name))
    for config in (buffer.get_dispatch_config(2), buffer.get_combine_config(2), deep_ep.Config(20, 6, 256)):
        assert config.num_sms == 20 and config.get_nvl_buffer_size_hint(512, 2) > 0
        assert config.get_rdma_buffer_size_hint(512, 2) == 0
    assert buffer.get_low_latency_rdma_size_hint(8, 512, 2, 8) > 0


# ---- low latency ----


def run_low_latency(world, device):
    buffer, rank, size = make(world, device, low_latency_mode=True), world.rank, world.size
    hidden = 512
    for seed, hooks in enumerate((False, True, False)):
        per_rank = [inputs(r, size, seed=seed) for r in range(size)]
        x, idx, weights = on(device, *per_rank[rank])
        x = x.repeat(1, 2)
        for fp8 in (False, True, "pow2", "ue8m0"):
            stats = torch.ones(L, dtype=torch.int32, device=device)
            kept = idx.clone()
            got, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, 8, L * size, cumulative_local_expert_recv_stats=stats, use_fp8=bool(fp8),
                round_scale=fp8 in ("pow2", "ue8m0"), use_ue8m0=fp8 == "ue8m0", async_finish=not hooks,
                return_recv_hook=hooks)
            idx.fill_(-1)  # the dispatch knows what it needs
            hook() if hooks else event.current_stream_wait()
            idx.copy_(kept)
            assert torch.equal(stats, counts + 1) and handle[2:] == (8, hidden, L * size)
            check_decode(got, counts, handle, fp8, per_rank, rank)
            y = got if not fp8 else torch.zeros(L, 8 * size, hidden, dtype=BF16, device=device)
            if fp8:
                for e in range(L):
                    n = int(counts[e])
                    y[e, :n] = x_of_rows(handle, per_rank, e, n).to(device)
            for zero_copy in (False, True):
                out = torch.empty(len(x), hidden, dtype=BF16, device=device)
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
                result, event, hook = buffer.low_latency_combine(
                    y, idx, weights, handle, zero_copy=zero_copy, async_finish=not hooks,
                    return_recv_hook=hooks, out=out)
                hook() if hooks else event.current_stream_wait()
                assert result is out
                want = x.float() * weights.masked_fill(idx < 0, 0).sum(1, keepdim=True)
                torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=1e-2)
    buffer.clean_low_latency_buffer(8, hidden, L * size)
    masked = idx.clone()
    masked[:, 0] = -1
    out = buffer.low_latency_combine(y, masked, weights, handle)[0]
    want = x.float() * weights.masked_fill(masked < 0, 0).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=1e-2)
    decode_mistakes(buffer, x, idx, weights, handle, y)
    buffer.destroy()


def x_of_rows(handle, per_rank, expert, n):
    """Return the tokens of an expert's rows, as the handle says."""
    rows = []
    for source, (x, _, _) in enumerate(per_rank):
        begin, count = int(handle[1][expert, source]) >> 32, int(handle[1][expert, source]) & (1 << 32) - 1
        rows += [x[int(t)] for t in handle[0][expert, begin : begin + count]]
    return torch.stack(rows).repeat(1, 2) if rows else torch.zeros(0, 512, dtype=BF16)


def check_decode(got, counts, handle, fp8, per_rank, rank):
    for e in range(L):
        want = [(s, t) for s, (_, idx, _) in enumerate(per_rank)
                for t in range(len(idx)) if (idx[t] == rank * L + e).any()]
        n = int(counts[e])
        assert n == len(want) and handle[0][e, :n].tolist() == [t for _, t in want]
        x = x_of_rows(handle, per_rank, e, n)
        if want:
            assert torch.equal(x, torch.stack([per_rank[s][0][t] for s, t in want]).repeat(1, 2))
        if not fp8:
            assert same(got[e, :n], x)
            continue
        q, scales = reference.quantize_fp8(x, pow2=fp8 != True)  # noqa: E712
        assert same(got[0][e, :n], q)
        scales = reference.pack_ue8m0(scales) if fp8 == "ue8m0" else scales
        assert torch.equal(got[1][e, :n].cpu(), scales)


def decode_mistakes(buffer, x, idx, weights, handle, y):
    dispatch, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    sizes = 8, L * buffer.group_size
    expect(NotImplementedError, "does not measure", dispatch, x, idx, *sizes, dispatch_wait_recv_cost_stats=1)
    expect(NotImplementedError, "does not measure", combine, y, idx, weights, handle,
           combine_wait_recv_cost_stats=1)
    expect((ValueError, epmoe.PeerError), ".", dispatch, x, idx, *sizes, use_ue8m0=True)
    expect((ValueError, epmoe.PeerError), ".", dispatch, x, idx, *sizes, async_finish=True,
           return_recv_hook=True)
    expect((TypeError, epmoe.PeerError), ".", dispatch, x.float(), idx, *sizes)
    expect((TypeError, epmoe.PeerError), ".", combine, y, idx, weights, tuple(handle))
    expect((ValueError, epmoe.PeerError), ".", combine, y[:, :-1], idx, weights, handle)
    if buffer.rank == 0:
        expect(ValueError, "needs use_fp8=True", dispatch, x, idx, *sizes, use_ue8m0=True)
        expect(TypeError, "topk_weights: wanted", combine, y, idx, weights.double(), handle)
    elif buffer.group_size > 1:
        expect(epmoe.PeerError, "rank 0", dispatch, x, idx, *sizes)
        expect(epmoe.PeerError, "rank 0", combine, y, idx, weights, handle)
    got, counts, handle, _, _ = dispatch(x, idx, *sizes, use_fp8=False)
    out = combine(got, idx, weights, handle)[0]
    want = x.float() * weights.masked_fill(idx < 0, 0).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_integrations_deep_ep_low_latency(ranks, size):
    ranks(run_low_latency, world_size=size, timeout_s=60)


def test_integrations_deep_ep_low_latency_of_different_dispatches(ranks):
    """Ranks that add up the rows of different dispatches learn it, and the next call works."""
    def run(world, device):
        buffer = deep_ep.Buffer(world, device=device, low_latency_mode=True, explicitly_destroy=True)
        idx = torch.tensor([[0, 1], [1, 0], [1, -1]], device=device)
        weights = torch.full((3, 2), 0.5, device=device)
        made = []
        for i in range(3):  # the first and the last are of the same turn
            x = torch.full((3, 64), i + 1.0, dtype=BF16, device=device)
            made.append(buffer.low_latency_dispatch(x, idx, 8, 2 * world.size, use_fp8=False))

        def combine(i):
            y = buffer.low_latency_combine(made[i][0], idx, weights, made[i][2])[0]
            return y[:, 0].tolist()

        wrong = outcome(lambda: (combine(2 * (world.rank % 2)), settle(buffer)))
        again = combine(2)
        buffer.destroy()
        return wrong, again

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([wrong for wrong, _ in results], "EpMismatch")
    assert all(again == [3.0, 3.0, 1.5] for _, again in results)
