"""epmoe.integrations.deep_ep: more different sizes than a world has communication buffers for."""

import pytest
import torch

from deep_ep_cases import BF16, H, K, L, check_combined, inputs, on, v1_call
from epmoe.integrations import deep_ep


def run_worst_sizes(world, device):
    """More sizes than a world has buffers for."""
    buffer = deep_ep.Buffer(world, explicitly_destroy=True, device=device)
    right = v1_call(buffer)
    want, want_idx, want_weights, _, _, _ = buffer.dispatch(**right)
    for most in (*range(8, 80), *range(200, 8, -7)):
        num_rows = most * world.size + 1  # it need not be a multiple of the ranks
        rows, idx, weights, _, handle, _ = buffer.dispatch(**right, num_worst_tokens=num_rows)
        for got, wanted, rest in ((rows, want, 0), (idx, want_idx, -1), (weights, want_weights, 0)):
            assert len(got) == num_rows and torch.equal(got[:len(wanted)], wanted)
            assert (got[len(wanted):] == rest).all() and got.is_contiguous()
        check_combined(buffer, right, rows, handle)
    assert len(buffer._worst.made) == 6  # 8, 16, 32, 64, 128, 256
    buffer.destroy()


def test_integrations_deep_ep_v1_many_sizes(ranks):
    ranks(run_worst_sizes, world_size=2, timeout_s=60)


def run_v2_sizes(world, device, do_cpu_sync, do_expand):
    x, idx, weights = on(device, *inputs(world.rank, world.size, "full"))
    buffer = deep_ep.ElasticBuffer(world, explicitly_destroy=True, device=device)
    fresh = deep_ep.ElasticBuffer(world, explicitly_destroy=True, device=device)
    call = dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=L * world.size, do_expand=do_expand,
                do_cpu_sync=do_cpu_sync, expert_alignment=4)
    for most in (*range(8, 80), 9):
        rows, _, row_weights, handle, _ = buffer.dispatch(**call, num_max_tokens_per_rank=most)
        out, out_weights, _ = buffer.combine(rows, handle, topk_weights=row_weights)
        if most in (9, 16, 33):  # as the layers of this size alone
            want, _, want_weights, other, _ = fresh.dispatch(**call, num_max_tokens_per_rank=most)
            assert torch.equal(rows, want) and torch.equal(row_weights, want_weights)
            assert torch.equal(handle.recv_src_metadata, other.recv_src_metadata)
            want = fresh.combine(want, other, topk_weights=want_weights)
            assert torch.equal(out, want[0]) and torch.equal(out_weights, want[1])
            fresh.destroy()
            fresh = deep_ep.ElasticBuffer(world, explicitly_destroy=True, device=device)
    (by_size,) = buffer._routes.values()
    assert [routes.max_tokens for routes in by_size.made] == [8, 16, 32, 64, 128]
    fresh.destroy()
    buffer.destroy()


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_integrations_deep_ep_v2_many_sizes(ranks, do_cpu_sync, do_expand):
    ranks(run_v2_sizes, do_cpu_sync, do_expand, world_size=2, timeout_s=60)


def run_growth(world, device):
    """Exact dispatches of ever more tokens: handles of earlier ones can still be used."""
    buffer = deep_ep.Buffer(world, explicitly_destroy=True, device=device)
    made = []
    for n in range(1, 2000, 97):
        x = torch.ones(n, H, dtype=BF16, device=device)
        idx = torch.arange(n, device=device)[:, None].expand(-1, K) % (L * world.size)
        per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx.contiguous(), L * world.size)
        call = dict(x=x, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert,
                    is_token_in_rank=is_in)
        made.append((call, *buffer.dispatch(**call)))
    assert len(buffer._routes.made) <= 6
    for call, rows, _, _, _, handle, _ in made:
        check_combined(buffer, call, rows, handle)
    buffer.destroy()


def test_integrations_deep_ep_v1_grows_in_few_steps(ranks):
    ranks(run_growth, world_size=2, timeout_s=60)
