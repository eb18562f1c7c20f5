"""Measures an EPMoE for inference with skewed routings, with and without replicas of its hot experts.

epmoe            each rank has its experts
epmoe, replicas  each rank has SPARE_PLACES more places, and balance_experts has chosen who holds what, from
                 the numbers of tokens of this routing: the best that a server can reach which counts tokens

A call is decoding, on the GPU as one of many in a CUDA graph, or the forward of many tokens.  The results of
both are compared.
"""

import functools

import torch
import torch.distributed as dist

import epmoe

from .measure import graphed

DEFAULT = ("dsv3", "qwen3-30b")
DECODE_TOKENS = 64
SPARE_PLACES = 8  # of a rank
SKEWS = (1.5, 2.0, 3.0)


def jobs(run):
    found = [s for shape in run.shapes(*DEFAULT)
             for s in dict.fromkeys((shape.with_tokens(min(DECODE_TOKENS, shape.tokens)), shape))]
    return [(f"{s.label}, T {s.tokens}", functools.partial(measure, run, s))
            for s in run.with_skews(found, SKEWS)]


def module(run, shape, dtype, **options):
    return epmoe.EPMoE(shape.hidden, shape.inner, shape.experts, shape.topk, run.world, dtype=dtype,
                       device=run.device, max_tokens=shape.tokens, num_sm=run.num_sm, **options)


def tokens_of_experts(run, shape, idx):
    """Return the tokens of all ranks for each expert, [E].  Collective."""
    load = torch.bincount(idx.flatten(), minlength=shape.experts).cpu()
    if run.cpu_group is not None:
        dist.all_reduce(load, group=run.cpu_group)
    return load


@torch.no_grad()
def measure(run, shape):
    x, idx, weight = run.inputs(shape)
    home = module(run, shape, x.dtype)
    served = module(run, shape, x.dtype, num_physical=shape.experts + SPARE_PLACES * run.size)
    served.load_state_dict(home.state_dict())
    load = tokens_of_experts(run, shape, idx)
    served.set_expert_map(epmoe.balance_experts(load, run.size, served.layer.num_experts))
    decodes = shape.tokens <= DECODE_TOKENS
    what, over = "decode" if decodes else "forward", None
    want = home(x, idx, weight)
    for name, moe in ((f"epmoe {what}", home), (f"epmoe {what}, replicas", served)):
        fn = functools.partial(moe, x, idx, weight)
        difference = (fn().float() - want.float()).norm() / want.float().norm()
        run.agree("" if difference < 1e-2 else f"{name}: the result differs by {difference:.2e} of its norm")
        ms = graphed(fn, run.cpu_group) if run.on_gpu and decodes else run.time(moe.layer, fn)
        moe.record_stats()
        fn()
        run.record("replicas", shape, name, ms, over=over and {"epmoe": over},
                   fullest=round(moe.stats().skew, 3))
        over = over or ms
    for moe in (home, served):
        moe.layer.synchronize()
        moe.finalize()
