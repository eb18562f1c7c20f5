"""epmoe.integrations.deep_ep: what one rank does wrong, all ranks learn at once, and the next call works.

Rank 1 makes the wrong call, and the others the right one. They must raise PeerError: an error that comes from
the order of calls has another class, and so has a timeout.
"""

import os
import unittest.mock

import pytest
import torch

import epmoe
from deep_ep_cases import BF16, H, K, L, check_combined, expect, inputs, on, scales_of, v1_call
from epmoe import _C
from epmoe.integrations import deep_ep


def check(kind, text, fn, right, wrong):
    """Rank 1 calls fn with the wrong arguments, then all ranks call it with the right ones."""
    rank = fn.__self__.world.rank
    if rank == 1:
        expect(kind, text, fn, **right | wrong)
    else:
        expect(epmoe.PeerError, "rank 1", fn, **right)
    return fn(**right)


# ---- constructors ----


def run_constructors(world, device):
    for cls, wrong, kind, text in (
            (deep_ep.Buffer, dict(device="xpu"), ValueError, "xpu"),
            (deep_ep.Buffer, dict(device="cpu:1"), ValueError, "there is one CPU"),
            (deep_ep.Buffer, dict(comm=object()), NotImplementedError, "mpi4py"),
            (deep_ep.Buffer, dict(enable_shrink=True), NotImplementedError, "masked ranks"),
            (deep_ep.ElasticBuffer, dict(device="xpu"), ValueError, "xpu"),
            (deep_ep.ElasticBuffer, dict(num_cpu_bytes=1), NotImplementedError, "Engram"),
            (deep_ep.ElasticBuffer, dict(num_gpu_timeout_secs=-1), ValueError, "timeout of -1 s"),
            (deep_ep.ElasticBuffer, dict(num_cpu_timeout_secs="long"), ValueError, "could not convert")):
        right = dict(explicitly_destroy=True, device=device)
        if world.rank == 1:
            expect(kind, text, cls, world, **right | wrong)
        else:
            expect(epmoe.PeerError, "rank 1", cls, world, **right)
        cls(world, **right).destroy()


def test_integrations_deep_ep_constructors_refuse(ranks):
    ranks(run_constructors, world_size=2, at_least=2, timeout_s=60)


def run_backend(world, device):
    for cls in (deep_ep.Buffer, deep_ep.ElasticBuffer):
        if world.rank == 1:
            with unittest.mock.patch.dict(os.environ, EPMOE_BACKEND="tpu"):
                expect(ValueError, "EPMOE_BACKEND='tpu'", cls, world)
        else:
            expect(epmoe.PeerError, "rank 1", cls, world, device=device)
        cls(world, explicitly_destroy=True, device=device).destroy()


def test_integrations_deep_ep_backend_of_one_rank(ranks):
    ranks.isolated(run_backend, world_size=2, at_least=2, timeout_s=60)


# ---- V1 ----


WRONG_V1 = (
    (dict(allocate_on_comm_stream=True), ValueError, "needs previous_event"),
    (dict(previous_event=3), TypeError, "previous_event: wanted an EventOverlap"),
    (dict(x=None), TypeError, "x: wanted a tensor"),
    (dict(x=(1, 2, 3)), TypeError, "x: wanted a tensor, got tuple"))


def run_v1(world, device, worst):
    buffer = deep_ep.Buffer(world, explicitly_destroy=True, device=device)
    right = v1_call(buffer, num_worst_tokens=worst)
    wrong = [*WRONG_V1, (dict(expert_alignment="a"), ValueError, "expert_alignment 'a'"),
             *((dict([(name, right[name].to_sparse())]), ValueError, f"{name}: wanted a dense tensor")
               for name in ("topk_idx", "topk_weights", "is_token_in_rank"))]
    if worst:
        wrong += [(dict(num_worst_tokens=n), ValueError, "num_worst_tokens|max_tokens")
                  for n in (1, -8, 10**12, "a")]
    for change, kind, text in 2 * wrong:  # the first time the layers are not there yet
        rows, _, _, _, handle, _ = check(kind, text, buffer.dispatch, right, change)
        check_combined(buffer, right, rows, handle)
    other = deep_ep.Buffer(epmoe.thread_worlds(1)[0], device=device)
    foreign = other.dispatch(**v1_call(other))[4]
    of_handle = [*((c, k, t) for c, k, t in WRONG_V1[:3]),
                 (dict(x=right["x"].double()), TypeError, "x: wanted bfloat16"),
                 (dict(handle=tuple(handle)), TypeError, "handle: wanted"),
                 (dict(handle=foreign), ValueError, "another group")]
    for change, kind, text in of_handle:
        again = check(kind, text, buffer.dispatch, dict(x=right["x"], handle=handle), change)[0]
        assert torch.equal(again, rows)
        check(kind, text, buffer.combine, dict(x=rows, handle=handle), change)
    check_combined(buffer, right, rows, handle)
    buffer.destroy()


@pytest.mark.parametrize("worst", [0, 64])
def test_integrations_deep_ep_v1_refuses(ranks, worst):
    ranks(run_v1, worst, world_size=2, at_least=2, timeout_s=60)


def run_grown(world, device):
    """A handle of an earlier dispatch is of smaller layers than that of the latest one."""
    buffer = deep_ep.Buffer(world, explicitly_destroy=True, device=device)
    right = v1_call(buffer)
    rows, _, _, _, handle, _ = buffer.dispatch(**right)
    many = v1_call(buffer, "many")
    many_rows, _, _, _, many_handle, _ = buffer.dispatch(**many)
    assert len(buffer._routes.made) == 2
    wrong = dict(handle=None), TypeError, "handle: wanted"
    for _ in range(2):
        change, kind, text = wrong
        check(kind, text, buffer.combine, dict(x=rows, handle=handle), change)
        check(kind, text, buffer.combine, dict(x=many_rows, handle=many_handle), change)
        check(kind, text, buffer.dispatch, dict(x=right["x"], handle=handle), dict(handle=(1, 2)))
    check_combined(buffer, right, rows, handle)
    check_combined(buffer, many, many_rows, many_handle)
    buffer.destroy()


def test_integrations_deep_ep_refuses_after_the_buffer_has_grown(ranks):
    ranks(run_grown, world_size=2, at_least=2, timeout_s=60)


# ---- V2 ----


def run_v2(world, device, do_cpu_sync, do_expand):
    buffer = deep_ep.ElasticBuffer(world, num_max_tokens_per_rank=8, explicitly_destroy=True, device=device)
    size = world.size
    x, idx, weights = on(device, *inputs(world.rank, size, "full"))
    right = dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=L * size, do_cpu_sync=do_cpu_sync,
                 do_expand=do_expand)
    event = buffer.capture()
    streams = ((dict(previous_event=event), ValueError, "needs allocate_on_comm_stream"),
               (dict(previous_event_before_epilogue=3), TypeError, "previous_event_before_epilogue: wanted"))
    stats = "cumulative_local_expert_recv_stats"
    of_stats = ((dict({stats: torch.zeros(L + 1, dtype=torch.int32, device=device)}), ValueError, stats),
                (dict({stats: torch.zeros(L, device=device)}), TypeError, stats))
    wrong = (*streams, *of_stats, (dict(expert_alignment=0), ValueError, "expert_alignment 0"),
             (dict(expert_alignment=-3), ValueError, "expert_alignment -3"),
             (dict(expert_alignment=1 << 40), ValueError, "capacity"),
             (dict(num_experts=L * size + 1), ValueError, "num_experts"),
             (dict(num_experts="a"), ValueError, "num_experts 'a'"),
             (dict(num_max_tokens_per_rank=-1), ValueError, "must be at most num_max_tokens_per_rank, -1"),
             (dict(num_max_tokens_per_rank=10**12), ValueError, "max_tokens"),
             (dict(x=(1, 2, 3)), TypeError, "x: wanted a tensor, got tuple"))
    for change, kind, text in 2 * wrong:
        rows, _, _, handle, _ = check(kind, text, buffer.dispatch, right, change)
        assert buffer.combine(rows, handle)[0].shape == x.shape
    of_handle = (*streams, (dict(x=None), TypeError, "x: wanted a tensor"),
                 (dict(handle=(1, 2)), TypeError, "handle: wanted"))
    again = dict(x=x, handle=handle, do_expand=do_expand)
    for change, kind, text in (*of_handle, *of_stats):
        assert torch.equal(check(kind, text, buffer.dispatch, again, change)[0], rows)
    for change, kind, text in of_handle:
        check(kind, text, buffer.combine, dict(x=rows, handle=handle), change)
    buffer.destroy()


@pytest.mark.parametrize("do_expand", [False, True])
@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_integrations_deep_ep_v2_refuses(ranks, do_cpu_sync, do_expand):
    ranks(run_v2, do_cpu_sync, do_expand, world_size=2, at_least=2, timeout_s=60)


def run_index(world, device, do_expand):
    """The index E is no expert. Where the host reads nothing, it is a choice that is dropped, as -1."""
    buffer = deep_ep.ElasticBuffer(world, num_max_tokens_per_rank=8, explicitly_destroy=True, device=device)
    x, idx, weights = on(device, *inputs(world.rank, world.size, "full"))
    num_experts = L * world.size
    call = dict(x=x, topk_weights=weights, num_experts=num_experts, do_expand=do_expand)
    beyond = idx.masked_fill(idx < 0, num_experts)
    if world.rank != 1:
        beyond = idx
    expect(epmoe.EpIndexError, "rank 1", buffer.dispatch, topk_idx=beyond, **call)
    want, _, _, want_handle, _ = buffer.dispatch(topk_idx=idx, do_cpu_sync=False, **call)
    rows, _, _, handle, _ = buffer.dispatch(topk_idx=beyond, do_cpu_sync=False, **call)
    assert torch.equal(rows, want)
    assert torch.equal(handle.dst_buffer_slot_idx, want_handle.dst_buffer_slot_idx)
    assert torch.equal(buffer.combine(rows, handle)[0], buffer.combine(want, want_handle)[0])
    buffer.destroy()


@pytest.mark.parametrize("do_expand", [False, True])
def test_integrations_deep_ep_v2_index_of_no_expert(ranks, do_expand):
    ranks(run_index, do_expand, world_size=2, at_least=2, timeout_s=60)


# ---- low latency ----


def run_low_latency(world, device):
    buffer = deep_ep.Buffer(world, low_latency_mode=True, explicitly_destroy=True, device=device)
    size = world.size
    x, idx, weights = on(device, *inputs(world.rank, size, "full"))
    stats = "cumulative_local_expert_recv_stats"
    wrong = ((dict(dispatch_wait_recv_cost_stats=1), NotImplementedError, "does not measure"),
             (dict({stats: torch.zeros(L + 1, dtype=torch.int32, device=device)}), ValueError, stats),
             (dict({stats: torch.zeros(L, device=device)}), TypeError, stats),
             (dict(x=x.float()), TypeError, "x: wanted bfloat16"),
             (dict(x=None), TypeError, "x: wanted a tensor"),
             (dict(topk_idx=idx[0]), ValueError, "topk_idx: wanted shape"),
             (dict(topk_idx=idx[1:]), ValueError, "topk_idx: wanted size"),
             (dict(use_ue8m0=True), ValueError, "use_ue8m0"),
             (dict(num_experts=L * size + 1), ValueError, "num_experts"),
             (dict(num_max_dispatch_tokens_per_rank=0), ValueError, "tokens_per_rank 0"))
    of_combine = ((dict(combine_wait_recv_cost_stats=1), NotImplementedError, "does not measure"),
                  (dict(handle=None), TypeError, "handle: wanted"),
                  (dict(topk_weights=weights.double()), TypeError, "topk_weights: wanted"),
                  (dict(x=None), TypeError, "x: wanted a tensor"))
    want = x.float() * weights.masked_fill(idx < 0, 0).sum(1, keepdim=True)
    for most in (8, 9):
        right = dict(x=x, topk_idx=idx, num_max_dispatch_tokens_per_rank=most, num_experts=L * size,
                     use_fp8=False)
        for change, kind, text in 2 * wrong:
            rows, _, handle, _, _ = check(kind, text, buffer.low_latency_dispatch, right, change)
        if most == 9:  # the latest dispatch is of other layers than the next combine
            rows_of_9, handle_of_9, (rows, handle) = rows, handle, earlier
        call = dict(x=rows, topk_idx=idx, topk_weights=weights, handle=handle)
        for change, kind, text in 2 * of_combine:
            out = check(kind, text, buffer.low_latency_combine, call, change)[0]
            torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=1e-2)
        earlier = rows, handle
    out = buffer.low_latency_combine(rows_of_9, idx, weights, handle_of_9)[0]
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=1e-2)
    buffer.destroy()


def test_integrations_deep_ep_low_latency_refuses(ranks):
    ranks(run_low_latency, world_size=2, at_least=2, timeout_s=60)


def run_mode(world, device):
    buffer = deep_ep.Buffer(world, low_latency_mode=world.rank != 1, explicitly_destroy=True, device=device)
    x, idx, _ = on(device, *inputs(world.rank, world.size, "full"))
    kind, text = (ValueError, "low_latency_mode=True") if world.rank == 1 else (epmoe.PeerError, "rank 1")
    expect(kind, text, buffer.low_latency_dispatch, x, idx, 8, L * world.size, use_fp8=False)
    buffer.destroy()


def test_integrations_deep_ep_low_latency_mode_of_one_rank(ranks):
    ranks(run_mode, world_size=2, at_least=2, timeout_s=60)


# ---- all operations of a call ----


@pytest.fixture
def operations(monkeypatch):
    """Lists of (layer, operation): those that calls have run, those that the latest wrong call refuses."""
    calls, refused = [], []
    for name, op in (("plan", _C.OP_PLAN), ("dispatch", _C.OP_DISPATCH), ("combine", _C.OP_COMBINE),
                     ("ll_dispatch", _C.OP_LL_DISPATCH), ("ll_combine", _C.OP_LL_COMBINE)):
        def run(layer, buffer, arguments, op=op, real=getattr(_C, f"layer_{name}")):
            calls.append((layer, op))
            return real(layer, buffer, arguments)
        monkeypatch.setattr(_C, f"layer_{name}", run)

    def refuse(world, error, steps):
        refused[:] = [(layer._c, op) for layer, _, op in steps]
        raise error

    for module in ("buffer", "elastic", "low_latency", "routes"):
        monkeypatch.setattr(f"epmoe.integrations.deep_ep.{module}.refuse", refuse)
    return calls, refused


def test_integrations_deep_ep_refuses_all_operations(operations):
    """On a GPU the other ranks have launched all of them before they learn of an error."""
    calls, refused = operations
    world = epmoe.thread_worlds(1)[0]

    def compare(fn, wrong, **right):
        fn(**right)
        calls.clear()
        result = fn(**right)
        with pytest.raises((ValueError, TypeError)):
            fn(**right | wrong)
        assert refused == calls
        return result

    v1 = deep_ep.Buffer(world, device="cpu", low_latency_mode=True)
    v2 = deep_ep.ElasticBuffer(world, num_max_tokens_per_rank=8, device="cpu")
    x, idx, weights = inputs(0, 1, "full")
    no_x, no_event, no_bias = dict(x=None), dict(previous_event=3), dict(bias=3)
    v2_wrong = (no_event, no_x, dict(x=(1, 2, 3)), dict(topk_idx=None), dict(topk_idx=idx[1:]),
                dict(cumulative_local_expert_recv_stats=weights), dict(expert_alignment=0),
                dict(expert_alignment=1 << 40), dict(num_experts=-1), dict(num_experts="a"),
                dict(num_max_tokens_per_rank=-1), dict(num_max_tokens_per_rank=10**12))
    for sent in (x, scales_of(x)):
        call = v1_call(v1, x=sent, num_worst_tokens=16)
        handle = compare(v1.dispatch, no_event, **call)[4]
        for wrong in (dict(num_worst_tokens="a"), dict(num_worst_tokens=10**12), no_x,
                      dict(expert_alignment=0), dict(topk_idx=idx[1:]), dict(is_token_in_rank=None)):
            compare(v1.dispatch, wrong, **call)
        for wrong in (no_event, dict(handle=(1, 2))):
            compare(v1.dispatch, wrong, x=sent, handle=handle)
        rows, row_weights = torch.zeros(16, H, dtype=BF16), torch.zeros(16, K)
        compare(v1.combine, no_bias, x=rows, handle=handle, topk_weights=row_weights)
        for wrong in (no_x, dict(handle=None)):
            compare(v1.combine, wrong, x=rows, handle=handle)
        for expand in (False, True):
            for given in (None, weights):
                call = dict(x=sent, topk_weights=given, do_expand=expand)
                full = call | dict(topk_idx=idx, num_experts=L, do_cpu_sync=False)
                wide = [] if given is None else [dict(topk_weights=given.double())]
                for wrong in (*v2_wrong, *wide):
                    handle = compare(v2.dispatch, wrong, **full)[3]
                for wrong in (no_event, dict(handle=(1, 2)), dict(x=None)):
                    compare(v2.dispatch, wrong, **call, handle=handle)
            rows = torch.zeros(handle.num_out_rows, H, dtype=BF16)
            row_weights = torch.zeros(rows.shape[:1] if expand else (len(rows), K))
            compare(v2.combine, no_bias, x=rows, handle=handle, topk_weights=row_weights)
            for wrong in (no_x, dict(handle=None)):
                compare(v2.combine, wrong, x=rows, handle=handle)
    call = dict(x=x, topk_idx=idx, num_max_dispatch_tokens_per_rank=8, num_experts=L, use_fp8=False)
    rows, _, handle, _, _ = compare(v1.low_latency_dispatch, no_x, **call)
    call = dict(x=rows, topk_idx=idx, topk_weights=weights, handle=handle)
    for wrong in (no_x, dict(handle=None)):
        compare(v1.low_latency_combine, wrong, **call)
