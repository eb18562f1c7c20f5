"""Measures a known problem: dispatch, y = x * (1 + rank), weighted combine, for five shapes in float16.

It is the first problem of the AMD Distributed Challenge of GPU MODE (8 x MI300X), which the worklog "My first
Multi-GPU kernel: Writing All-to-all for AMD MI300X" describes.  rank is that of the expert.  Each rank has a
random number of tokens below max_num_tokens.  The peer is plain PyTorch: sort, all_to_all_single, sort back.
--shapes has no effect.

epmoe                    dispatch, one multiplication of all places of the compact rows, combine
epmoe, factor in weights dispatch and combine alone: the routing weights are multiplied by 1 + rank before
in a graph               the time of a call among many in a CUDA graph; the peer reads counts on the host
"""

import functools

import torch

import epmoe

from .check import poisoned
from .measure import alternated, graphed
from .shapes import Shape

# (num_experts, experts_per_token, hidden_dim, max_num_tokens)
PROBLEMS = ((8, 2, 6144, 16), (64, 6, 2048, 32), (128, 4, 2880, 128), (128, 8, 4096, 256),
            (256, 8, 7168, 256))
TOLERANCE = {"rtol": 1e-2, "atol": 5e-3}  # of the challenge


def shape_of(problem, on_gpu):
    """Return the shape of a problem, whose tokens are max_num_tokens; smaller on the CPU."""
    num_experts, topk, hidden, max_tokens = problem
    name = f"worklog E={num_experts} H={hidden}"
    if not on_gpu:
        name, hidden, max_tokens = f"{name}-small", hidden // 8, min(16, max_tokens)
    return Shape(max_tokens, hidden, 0, num_experts, topk, name)


def jobs(run):
    shapes = [shape_of(problem, run.on_gpu) for problem in PROBLEMS]
    skipped = [s.name for s in shapes if s.experts % run.size]
    if skipped:
        run.say(f"skipped: {', '.join(skipped)}: the experts are not a multiple of {run.size} ranks")
    return [(s.name, functools.partial(measure, run, s)) for s in shapes if s.name not in skipped]


def inputs(run, shape):
    """Return x [T, H] float16, idx [T, K] int32 and weight [T, K] float32; T is random, at least 1."""
    g = torch.Generator(run.device).manual_seed(4000 + run.rank)
    num_tokens = int(torch.randint(1, shape.tokens, (), device=run.device, generator=g))
    scores = torch.rand(num_tokens, shape.experts, device=run.device, generator=g)
    x = torch.randn(num_tokens, shape.hidden, device=run.device, generator=g).half()
    weight = torch.rand(num_tokens, shape.topk, device=run.device, generator=g)
    return x, scores.topk(shape.topk).indices.int(), weight


def solutions(run, layer, data, peer):
    """Return {implementation: function that solves the problem}."""
    x, idx, weight = data
    ranks = idx // layer.num_local_experts

    def ours():
        rows, _, _, handle = layer.dispatch(x, idx, weight, layout="compact")
        return layer.combine(rows.mul_(1 + run.rank), handle)

    def in_weights():
        rows, _, _, handle = layer.dispatch(x, idx, weight * (1 + ranks), layout="compact")
        return layer.combine(rows, handle)

    def plain():
        return peer.combine(peer.dispatch() * (1 + run.rank))

    return {"torch": plain, "epmoe": ours, "epmoe, factor in weights": in_weights}


def wanted(data, num_local_experts):
    """Return the solution [T, H] in float32, without communication."""
    x, idx, weight = data
    return x.float() * (weight * (1 + idx // num_local_experts)).sum(1, keepdim=True)


@torch.no_grad()
def measure(run, shape):
    data = inputs(run, shape)
    peer = run.torch_peer(shape, (data[0], data[1].long(), data[2]))
    with epmoe.LowLatencyAll2All(run.world, shape.tokens, shape.hidden, shape.topk, shape.experts,
                                 dtype=torch.float16, device=run.device, num_sm=run.num_sm) as layer:
        fns = solutions(run, layer, data, peer)
        want = wanted(data, layer.num_local_experts)
        for name, fn in fns.items():
            with poisoned():
                y = fn()
            layer.synchronize()
            wrong = int((~torch.isclose(y.float(), want, **TOLERANCE)).any(1).sum())
            run.agree(wrong and f"{name}: {wrong} of {len(y)} tokens differ from x times the sum of weights")
        ms = dict(zip(fns, alternated(list(fns.values()), run.device, run.cpu_group, run.iters,
                                      5 if run.on_gpu else 1)))
        for name, t in ms.items():
            over = {"torch": ms["torch"]} if name != "torch" else None
            run.record("worklog", shape, name, t, over=over)
            if run.on_gpu and name != "torch":
                run.record("worklog", shape, f"{name}, in a graph", graphed(fns[name], run.cpu_group))
        layer.synchronize()
