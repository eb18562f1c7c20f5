"""Repeated calls of the fused operator: a reused layout, several buffers, and stages between the calls.

Streams and CUDA graphs are in test_fused_streams.py, torch.compile is in test_fused_compile.py.
"""

import dataclasses
import random
import time

import pytest
import torch

import epmoe
from cases import MODES, make_op
from fused_cases import (Experts, StagedOp, check_numbers, cut, dispatch_gemm, gemm_combine, grown,
                         inputs_of, poison_staging, same, step, tensors)


# ---- layouts and buffers ----

def tensors_of_one_routing(case, world, device, count):
    """The tensors of `count` steps: the tokens and weights differ, the routing is the same."""
    t = [tensors(case, world.rank, world.size, device) for _ in range(count)]
    for seed in range(1, count):
        other = inputs_of(dataclasses.replace(case, seed=seed), world.rank, world.size)
        n = min(len(other["x"]), len(t[seed].x))
        t[seed].x[:n] = other["x"][:n].to(device)
        t[seed].weight[:n] = other["weight"][:n].to(device)
    return t


@pytest.mark.parametrize("capacity", [None, "exact"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_reuses_a_layout(ranks, mode, capacity):
    """One plan serves three steps. Then three dispatches run before the first combine, in reverse order."""
    case = grown(ranks, Experts(mode=mode, capacity=capacity, num_local=3, pattern="sentinels"))

    def run(world, device):
        plain, op = (make_op(world, device, case, StagedOp, fused=fused) for fused in (False, True))
        poison_staging(plain), poison_staging(op)
        t = tensors_of_one_routing(case, world, device, 3)
        want = [step(plain, case, s) for s in t]
        layout = op.preprocess(t[0].idx)
        got = [step(op, case, s, layout=layout) for s in t] + [step(op, case, t[0], layout=layout)]
        sent = []
        for s in t:
            h, row_weight, used_layout = dispatch_gemm(op, case, s, layout=layout)
            assert used_layout is layout
            sent.append((s, h, row_weight))
        late = []
        for s, h, row_weight in reversed(sent):
            late.append(cut(h, row_weight, gemm_combine(op, s, h, row_weight, layout), layout))
        for o in (plain, op):
            o.synchronize()
            o.finalize()
        for i, (a, b) in enumerate(zip(got + late, want + want[:1] + want[::-1])):
            same(a, b, f"rank {world.rank}, step {i}")
        return got[0]

    check_numbers(ranks(run), case)


@pytest.mark.parametrize("mode", MODES)
def test_fused_two_buffers_at_once(ranks, mode):
    """Two microbatches use one buffer each. Both are dispatched before one is combined, several times."""
    case_list = [grown(ranks, Experts(mode=mode, num_buffers=2, seed=seed, pattern=pattern))
                 for seed, pattern in enumerate(("uniform", "one_rank"))]

    def run(world, device):
        op = make_op(world, device, case_list[0], StagedOp)
        poison_staging(op)
        t = [tensors(case, world.rank, world.size, device) for case in case_list]
        results = []
        for turn in range(4):
            sent, seen = {}, {}
            for b in (0, 1) if turn % 2 else (1, 0):
                sent[b] = dispatch_gemm(op, case_list[b], t[b], buffer=b)
            for b in (0, 1) if turn < 2 else (1, 0):
                h, row_weight, layout = sent[b]
                assert layout.buffer == b
                seen[b] = cut(h, row_weight, gemm_combine(op, t[b], h, row_weight, layout), layout)
            results.append(seen)
        op.synchronize()
        op.finalize()
        for turn, seen in enumerate(results[1:]):
            for b in (0, 1):
                same(seen[b], results[0][b], f"rank {world.rank}, buffer {b}, turn {turn + 1}")
        return results[0]

    results = ranks(run)
    for b, case in enumerate(case_list):
        check_numbers([r[b] for r in results], case)


def test_fused_alternates_with_stages(ranks):
    """The stages and the fused kernels of one op share a buffer and its epochs."""
    case = grown(ranks, Experts(capacity="roomy", activation="gelu"))

    def run(world, device):
        op = make_op(world, device, case, StagedOp)
        poison_staging(op)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)
        for _ in range(3):
            rows, row_weight, layout = op.dispatch(t.x, t.idx, t.weight)
            h = epmoe.grouped_gemm(rows, t.w1, offsets=layout.expert_offsets, bias=t.b1,
                                   activation=case.activation)
            y = gemm_combine(op, t, h, row_weight, layout)
            same(cut(h, row_weight, y, layout), want, f"rank {world.rank}, dispatch as a stage")
            h, row_weight, layout = dispatch_gemm(op, case, t, layout=layout)
            rows = epmoe.grouped_gemm(h, t.w2, offsets=layout.expert_offsets, bias=t.b2)
            y = op.combine(rows, layout, row_weight)
            same(cut(h, row_weight, y, layout), want, f"rank {world.rank}, combine as a stage")
            op.ep_barrier_all()
        op.synchronize()
        op.finalize()
        return want

    check_numbers(ranks(run), case)


# ---- many launches ----

@pytest.mark.parametrize("capacity", [None, "roomy"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_many_launches(ranks, mode, capacity):
    """Four routings alternate, with random delays on the host and on the device. The bits never change."""
    on_gpu = ranks.device.type == "cuda"
    patterns = ("uniform", "one_expert", "sentinels", "own_rank")
    case_list = [grown(ranks, Experts(mode=mode, capacity=capacity, num_local=4, topk=4, hidden=128,
                                      pattern=pattern, seed=seed))
                 for seed, pattern in enumerate(patterns)]

    def run(world, device):
        delays = random.Random(world.rank)
        plain, op = (make_op(world, device, case_list[0], StagedOp, fused=fused) for fused in (False, True))
        poison_staging(plain), poison_staging(op)
        t = [tensors(case, world.rank, world.size, device) for case in case_list]
        want = [step(plain, case, s) for case, s in zip(case_list, t)]
        num_wrong = torch.zeros((), dtype=torch.int64, device=device)
        for i in range(200 if on_gpu else 8):
            at = i % len(case_list)
            if delays.random() < 0.3:
                time.sleep(delays.random() * 0.003)
            if on_gpu and delays.random() < 0.3:
                torch.cuda._sleep(delays.randrange(1, 1_000_000))  # clock cycles
            h, row_weight, layout = dispatch_gemm(op, case_list[at], t[at])
            if on_gpu and delays.random() < 0.3:
                torch.cuda._sleep(delays.randrange(1, 300_000))
            y = gemm_combine(op, t[at], h, row_weight, layout)
            # layout.num_rows would be read from the device; without that wait many launches are queued
            m = len(want[at]["h"])
            for got, name in ((h[:m], "h"), (row_weight[:m], "row_weight"), (y, "y")):
                bits = torch.int32 if name == "row_weight" else torch.int16
                num_wrong += (got.view(bits) != want[at][name].view(bits)).any()
        op.synchronize()
        count = num_wrong.item()
        for o in (plain, op):
            o.finalize()
        return count

    assert ranks(run) == [0] * ranks.size()
