"""The fused operator called again and again: layouts used twice, buffers in flight, CUDA graphs, the
compiler.
"""

import dataclasses
import random
import time

import pytest
import torch

import epmoe
from cases import MODES, same_bits
from fused_cases import (
    Experts, LEAVES, Played, check_numbers, cut, grown, inputs_of, is_played, same, soil, step,
    tensors,
)
from pace import HANG_S
from test_plan_slots import make_op


# ---- layouts and buffers ----

@pytest.mark.parametrize("capacity", [None, "exact"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_layout_again(ranks, mode, capacity):
    """A plan, made alone, and then used for the tokens of three steps in a row; the last combined first."""
    case = grown(ranks, Experts(mode=mode, capacity=capacity, num_local=3, pattern="sentinels"))

    def run(world, device):
        plain, op = (make_op(world, device, case, Played, fused=fused) for fused in (False, True))
        soil(plain), soil(op)
        t = [tensors(case, world.rank, world.size, device) for _ in range(3)]
        for i in (1, 2):  # other tokens, the same routing
            other = inputs_of(dataclasses.replace(case, seed=i), world.rank, world.size)
            n = min(len(other["x"]), len(t[i].x))
            t[i].x[:n], t[i].weight[:n] = other["x"][:n].to(device), other["weight"][:n].to(device)
        want = [step(plain, case, s) for s in t]
        layout = op.preprocess(t[0].idx)
        got = [step(op, case, s, layout=layout) for s in t] + [step(op, case, t[0], layout=layout)]
        sent = []
        for s in t:
            h, row_weight, of = op.mega_dispatch_group_gemm(s.x, layout=layout, gemm_weight=s.w1,
                                                            weight=s.weight, bias=s.b1,
                                                            activation=case.activation)
            assert of is layout
            sent.append((h, row_weight))
        late = [cut(h, w, op.mega_group_gemm_combine(h, s.w2, layout, w, bias=s.b2), layout) for s,
                (h, w) in reversed(list(zip(t, sent)))]
        for o in (plain, op):
            o.synchronize()
            o.finalize()
        for i, (a, b) in enumerate(zip(got + late, want + want[:1] + want[::-1])):
            same(a, b, f"rank {world.rank}, step {i}")
        return got[0]

    check_numbers(ranks(run), case)


@pytest.mark.parametrize("mode", MODES)
def test_fused_buffers_in_flight(ranks, mode):
    """Two microbatches, each on a buffer of its own: both are dispatched before either comes home, several
    times.
    """
    some = [grown(ranks, Experts(mode=mode, num_buffers=2, seed=s, pattern=p)) for s,
            p in enumerate(("uniform", "one_rank"))]

    def run(world, device):
        op = make_op(world, device, some[0], Played)
        soil(op)
        t = [tensors(case, world.rank, world.size, device) for case in some]
        results = []
        for turn in range(4):
            sent, seen = {}, {}
            for b in (0, 1) if turn % 2 else (1, 0):
                sent[b] = op.mega_dispatch_group_gemm(t[b].x, t[b].idx, gemm_weight=t[b].w1,
                                                      weight=t[b].weight, bias=t[b].b1,
                                                      activation=some[b].activation,
                                                      buffer=b)
            for b in (0, 1) if turn < 2 else (1, 0):
                h, row_weight, layout = sent[b]
                assert layout.buffer == b
                seen[b] = cut(h, row_weight, op.mega_group_gemm_combine(h, t[b].w2, layout, row_weight,
                                                                        bias=t[b].b2), layout)
            results.append(seen)
        op.synchronize()
        op.finalize()
        for turn, seen in enumerate(results[1:]):
            for b in (0, 1):
                same(seen[b], results[0][b], f"rank {world.rank}, buffer {b}, turn {turn + 1}")
        return results[0]

    results = ranks(run)
    for b, case in enumerate(some):
        check_numbers([r[b] for r in results], case)


def test_fused_and_plain_calls_in_turn(ranks):
    """The stages and the megakernels of one op share a buffer, and flags that count on."""
    case = grown(ranks, Experts(capacity="roomy", activation="gelu"))

    def run(world, device):
        op = make_op(world, device, case, Played)
        soil(op)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)
        for _ in range(3):
            rows, row_weight, layout = op.dispatch(t.x, t.idx, t.weight)
            h = epmoe.grouped_gemm(rows, t.w1, offsets=layout.expert_offsets, bias=t.b1,
                                   activation=case.activation)
            y = op.mega_group_gemm_combine(h, t.w2, layout, row_weight,
                                           bias=t.b2)  # dispatched by the one, combined by the other
            same(cut(h, row_weight, y, layout), want, f"rank {world.rank}, dispatched by itself")
            h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, layout=layout, gemm_weight=t.w1,
                                                                weight=t.weight, bias=t.b1,
                                                                activation=case.activation)
            y = op.combine(epmoe.grouped_gemm(h, t.w2, offsets=layout.expert_offsets, bias=t.b2), layout,
                           row_weight)
            same(cut(h, row_weight, y, layout), want, f"rank {world.rank}, combined by itself")
            op.ep_barrier_all()
        op.synchronize()
        op.finalize()
        return want

    check_numbers(ranks(run), case)


# ---- again and again ----

@pytest.mark.parametrize("capacity", [None, "roomy"])
@pytest.mark.parametrize("mode", MODES)
def test_fused_many_launches(ranks, mode, capacity):
    """Ranks that come early and late, on the host and on the device, and routings in turn: the same bits each
    time.
    """
    on_gpu = ranks.device.type == "cuda"
    patterns = ("uniform", "one_expert", "sentinels", "own_rank")
    some = [grown(ranks, Experts(mode=mode, capacity=capacity, num_local=4, topk=4, hidden=128, pattern=p,
                                 seed=s)) for s, p in enumerate(patterns)]

    def run(world, device):
        late = random.Random(world.rank)
        plain, op = (make_op(world, device, some[0], Played, fused=fused) for fused in (False, True))
        soil(plain), soil(op)
        t = [tensors(case, world.rank, world.size, device) for case in some]
        want = [step(plain, case, s) for case, s in zip(some, t)]
        differ = torch.zeros((), dtype=torch.int64, device=device)
        for i in range(200 if on_gpu else 8):
            at = i % len(some)
            if late.random() < 0.3:
                time.sleep(late.random() * 0.003)
            if on_gpu and late.random() < 0.3:
                torch.cuda._sleep(late.randrange(1, 1_000_000))  # clock cycles
            s, case = t[at], some[at]
            h, row_weight, layout = op.mega_dispatch_group_gemm(s.x, s.idx, gemm_weight=s.w1, weight=s.weight,
                                                                bias=s.b1, activation=case.activation)
            if on_gpu and late.random() < 0.3:
                torch.cuda._sleep(late.randrange(1, 300_000))
            y = op.mega_group_gemm_combine(h, s.w2, layout, row_weight, bias=s.b2)
            m = len(want[at]["h"])  # not read from the device: launches are to pile up
            for got, name in ((h[:m], "h"), (row_weight[:m], "row_weight"), (y, "y")):
                bits = torch.int32 if name == "row_weight" else torch.int16
                differ += (got.view(bits) != want[at][name].view(bits)).any()
        op.synchronize()
        count = differ.item()
        for o in (plain, op):
            o.finalize()
        return count

    assert ranks(run) == [0] * ranks.size()


@pytest.mark.cuda_only
@pytest.mark.parametrize("mode, activation, knobs", [("local", "swiglu", {}),
                                                     ("scatter", None, {"num_sm": 24, "num_tail_sms": 8}),
                                                    ("gather", "gpt_oss", {"combine_order": "serial",
                                                                           "block_wise_barrier": False})])
def test_fused_in_a_cuda_graph(ranks, mode, activation, knobs):
    """Captured once; replayed with other tokens and routings, also between calls that are not captured."""
    base = grown(ranks, Experts(mode=mode, activation=activation, num_local=4, topk=4, hidden=192, inner=144,
                                tokens="full", capacity="roomy"))

    def run(world, device):
        plain, op = (make_op(world, device, base, Played, **options) for options in ({"fused": False}, knobs))
        soil(plain), soil(op)
        t = tensors(base, world.rank, world.size, device)

        def both_ways():
            h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1, weight=t.weight,
                                                                bias=t.b1, activation=activation)
            return h, row_weight, op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2), layout

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            both_ways()
        torch.cuda.current_stream().wait_stream(side)
        op.synchronize()
        world.exchange(b"x")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both_ways()
        wrong = []
        for i in range(20):
            pattern = ("uniform", "one_expert", "sentinels", "all_dropped", "one_rank")[i % 5]
            new = inputs_of(dataclasses.replace(base, seed=i, pattern=pattern), world.rank, world.size)
            for name in ("x", "idx", "weight"):
                getattr(t, name).copy_(new[name])
            want = step(plain, base, t)
            for out in captured[:3]:
                out.fill_(torch.nan)
            graph.replay()
            results = [captured] + ([both_ways()] if i % 3 == 2 else [])
            for result in results:
                op.synchronize()
                try:
                    same(cut(*result), want, f"replay {i}")
                except AssertionError as error:
                    wrong.append(str(error))
        for o in (plain, op):
            o.finalize()
        return wrong

    assert ranks(run) == [[]] * ranks.size()


@pytest.mark.cuda_only
def test_fused_on_streams_that_would_cross(ranks):
    """Each rank's calls are first of one operator, then of the other; what is before them on the streams
    holds up the first
    operator's on some ranks, the second's on the others.  Each kernel fills its GPU and waits for its
    peers'."""
    case = grown(ranks, Experts(activation="swiglu"))

    def run(world, device):
        ops = [make_op(world, device, case, Played) for _ in range(2)]
        t = tensors(case, world.rank, world.size, device)
        first = [step(op, case, t) for op in ops]
        layouts = [op.preprocess(t.idx) for op in ops]
        far, near = (torch.zeros(2**28, dtype=torch.uint8, pin_memory=pin, device="cpu" if pin else device)
                     for pin in (True, False))
        streams = [torch.cuda.Stream() for _ in ops]
        for _ in range(3):
            torch.cuda.synchronize()
            world.exchange(b"x")
            with torch.cuda.stream(streams[world.rank % 2]):
                far.copy_(near, non_blocking=True)
            seen = []
            for op, layout, stream in zip(ops, layouts, streams):
                with torch.cuda.stream(stream):
                    h, row_weight, _ = op.mega_dispatch_group_gemm(t.x, layout=layout, gemm_weight=t.w1,
                                                                   weight=t.weight, bias=t.b1,
                                                                   activation=case.activation)
                    seen.append((h, row_weight, op.mega_group_gemm_combine(h, t.w2, layout, row_weight,
                                                                           bias=t.b2), layout))
        torch.cuda.synchronize()
        for one, before in zip(seen, first):
            same(cut(*one), before, f"rank {world.rank}")
        for op in ops:
            op.synchronize()
            op.finalize()
        return first[0]

    check_numbers(ranks(run), case)


@pytest.mark.cuda_only
def test_fused_leaves_room_for_a_collective(ranks):
    """An all-reduce of NCCL on another stream, the first here and the second there: with SMs reserved,
    neither keeps the other out.
    """
    case = grown(ranks, Experts(activation="swiglu"))

    def run(world, device):
        import torch.distributed as dist

        op = make_op(world, device, case, Played, reserve_sms=40)
        t = tensors(case, world.rank, world.size, device)
        first = step(op, case, t)
        layout = op.preprocess(t.idx)
        number = torch.ones(2**24, device=device)
        group = dist.new_group(backend="nccl")
        dist.all_reduce(number, group=group)
        far, near = (torch.zeros(2**28, dtype=torch.uint8, pin_memory=pin, device="cpu" if pin else device)
                     for pin in (True, False))
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(3):
            torch.cuda.synchronize()
            world.exchange(b"x")
            with torch.cuda.stream(streams[world.rank % 2]):
                far.copy_(near, non_blocking=True)
            with torch.cuda.stream(streams[0]):
                dist.all_reduce(number, group=group)
            with torch.cuda.stream(streams[1]):
                h, row_weight, _ = op.mega_dispatch_group_gemm(t.x, layout=layout, gemm_weight=t.w1,
                                                               weight=t.weight, bias=t.b1,
                                                               activation=case.activation)
                seen = h, row_weight, op.mega_group_gemm_combine(h, t.w2, layout, row_weight,
                                                                 bias=t.b2), layout
        torch.cuda.synchronize()
        same(cut(*seen), first, f"rank {world.rank}")
        op.synchronize()
        op.finalize()
        dist.destroy_process_group(group)
        return first, float(number[0])

    results = ranks(run, at_least=2)
    check_numbers([first for first, _ in results], case)
    assert all(n == len(results) ** 4 for _, n in results)


@pytest.mark.cuda_only
def test_fused_with_a_capacity_never_waits_on_the_host(ranks):
    """torch's own guard raises at every synchronisation."""
    case = grown(ranks, Experts(capacity="roomy"))

    def run(world, device):
        op = make_op(world, device, case, Played)
        t = tensors(case, world.rank, world.size, device)
        want = step(op, case, t)["y"]
        op.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                h, row_weight, layout = op.mega_dispatch_group_gemm(t.x, t.idx, gemm_weight=t.w1,
                                                                    weight=t.weight, bias=t.b1,
                                                                    activation=case.activation)
                y = op.mega_group_gemm_combine(h, t.w2, layout, row_weight, bias=t.b2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        op.synchronize()
        op.finalize()
        return torch.equal(y, want)

    assert all(ranks(run))


# ---- the compiler ----

def compiled(world, device):
    """Forward and backward in one graph, without and with gradients, as they are outside of it; a second call
    reuses the graph.
    """
    torch._dynamo.reset()
    case = Experts(tokens="full", capacity="roomy", activation="gelu")
    op = make_op(world, device, case, Played)
    t = tensors(case, world.rank, world.size, device)

    def both_ways(x, weight, w1, b1, w2, b2):
        h, row_weight, layout = op.mega_dispatch_group_gemm(x, t.idx, gemm_weight=w1, weight=weight, bias=b1,
                                                            activation=case.activation)
        return op.mega_group_gemm_combine(h, w2, layout, row_weight, bias=b2)

    fast, equal = torch.compile(both_ways, backend="aot_eager", fullgraph=True), []
    for with_grad in (False, True):
        seen = []
        for fn in (both_ways, fast, fast):
            leaves = [getattr(t, n).detach().clone().requires_grad_(with_grad) for n in LEAVES]
            y = fn(*leaves)
            if with_grad:
                y.backward(t.dy)
            seen.append([y.detach()] + [p.grad for p, n in zip(leaves, LEAVES) if with_grad and n[0] != "b"])
        equal += [torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later)]
    launches = op.num_launches
    op.synchronize()
    op.finalize()
    return equal, launches > 0 or not is_played(device)


def compiled_for_many(world, device, capacity, saving):
    """Graphs for forward and backward of twelve numbers of tokens, where torch is told that they change."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    case = Experts(tokens="full", max_tokens=16, capacity="roomy" if capacity else None, bias=False)
    op = make_op(world, device, case, Played, token_saving=saving)
    t = tensors(case, world.rank, world.size, device)

    def both_ways(x, idx, weight):
        h, row_weight, layout = op.mega_dispatch_group_gemm(x, idx, gemm_weight=t.w1, weight=weight,
                                                            activation=case.activation)
        return op.mega_group_gemm_combine(h, t.w2, layout, row_weight)

    fast = torch.compile(both_ways, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (5, 9, 7, 6, 8, 10, 11, 12, 13, 14, 15, 16):
        seen = []
        for fn in (both_ways, fast):
            x = t.x[:tokens].clone().requires_grad_()
            y = fn(x, t.idx[:tokens].clone(), t.weight[:tokens].clone())
            y.sum().backward()
            seen.append((y.detach(), x.grad))
        for a, b in zip(*seen):
            same_bits(b, a, f"{tokens} tokens")
    op.synchronize()
    op.finalize()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("saving", [True, False], ids=["once", "by-choice"])
@pytest.mark.parametrize("capacity", [False, True], ids=["exact", "capacity"])
def test_fused_of_many_sizes_is_one_graph(ranks, capacity, saving):
    seen = ranks.isolated(compiled_for_many, capacity, saving, world_size=1, timeout_s=HANG_S)
    assert seen == [1] * ranks.size(1)


def test_fused_is_traced_by_the_compiler(ranks):
    for equal, launched in ranks.isolated(compiled, world_size=1, timeout_s=HANG_S):
        assert launched and len(equal) == 2 + 2 * 5 and all(equal)
