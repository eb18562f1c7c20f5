"""Measures the experts of transformers in one process: experts_implementation="epmoe" beside all others.

One layer with all experts of a known model, on one GPU, in prefill and in decoding, and a training step.
Every implementation that transformers has registered is measured, if it can run here; batched_mm copies the
weights of each choice, so that it is left out where they would not fit.  Each result is compared with float64
on sampled tokens before it is timed.  The ratio is the time of an implementation over that of epmoe.
"""

import copy
import functools
import importlib.util

import torch

from epmoe.reference import activate

from .check import poisoned
from .measure import alternated

DEFAULT = ("qwen3-30b", "gpt-oss-120b", "mixtral")
DECODE_TOKENS = 16
COPIED_BYTES = 8 << 30  # the most that batched_mm may copy


def jobs(run):
    if not importlib.util.find_spec("transformers"):
        run.say("transformers: skipped, because it is not installed")
        return []
    return [(f"{shape.name} T={tokens}", functools.partial(measure, run, shape.with_tokens(tokens), training))
            for shape in run.shapes(*DEFAULT)
            for tokens, training in ((shape.tokens, False), (DECODE_TOKENS, False), (shape.tokens, True))]


def experts_class(shape):
    """Return the class of transformers' own module for the shape, of GPT-OSS or of Qwen3, and its config."""
    if shape.name.startswith("gpt-oss"):
        from transformers.models.gpt_oss.modeling_gpt_oss import (GptOssConfig as Config,
                                                                  GptOssExperts as Experts)
        sizes = dict(intermediate_size=shape.inner, num_local_experts=shape.experts)
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import (Qwen3MoeConfig as Config,
                                                                      Qwen3MoeExperts as Experts)
        sizes = dict(moe_intermediate_size=shape.inner, num_experts=shape.experts)
    return Experts, Config(hidden_size=shape.hidden, num_experts_per_tok=shape.topk, **sizes)


def make_experts(shape, dtype, device):
    """Return transformers' own module for the shape, with random parameters."""
    kind, config = experts_class(shape)
    with torch.device(device):
        experts = kind(config).to(dtype)
    generator = torch.Generator(device).manual_seed(3000)
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_(0, 0.5 if p.dim() == 2 else shape.hidden**-0.5, generator=generator)
    return experts


def wrong_tokens(experts, x, idx, weight, got):
    """Return what is wrong with sampled tokens of a result, or ""."""
    from epmoe.integrations.transformers_experts import activation_of, up_and_down

    (up, up_bias, _), (down, down_bias, _) = up_and_down(experts)
    sample = range(0, len(x), max(1, len(x) // 8))
    want = torch.zeros(len(sample), x.shape[1], dtype=torch.float64, device=x.device)
    for i, t in enumerate(sample):
        for e, w in zip(idx[t].tolist(), weight[t].tolist()):
            h = up[e].double() @ x[t].double() + (0 if up_bias is None else up_bias[e].double())
            h = activate(h[None], activation_of(experts))[0]
            want[i] += w * (down[e].double() @ h + (0 if down_bias is None else down_bias[e].double()))
    worst = ((got[list(sample)].double() - want).abs().max() / want.abs().max()).item()
    bound = 30 * torch.finfo(x.dtype).eps if x.dtype != torch.bfloat16 else 4e-2
    return "" if worst <= bound else f"sampled tokens differ from float64 by {worst:.1e} of the largest"


def implementations(run, shape, training, call):
    """Return the names that can run here, after a call of each; say why others cannot."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    copied = shape.tokens * shape.topk * 3 * shape.hidden * shape.inner * (2 if run.on_gpu else 4)
    found = []
    for name in ["eager", *sorted(ALL_EXPERTS_FUNCTIONS)]:
        if name == "batched_mm" and (copied > COPIED_BYTES or training):
            run.say(f"  {name}: left out, because it copies {copied / 2**30:.3g} GiB of weights")
            continue
        try:
            call(name)
        except Exception as error:
            if name in ("epmoe", "eager"):
                raise
            run.say(f"  {name}: cannot run here: {error!r}"[:100])
            continue
        found.append(name)
    return found


def measure(run, shape, training):
    from epmoe.integrations.transformers import store_as_epmoe_reads  # the import registers "epmoe"

    x, idx, weight = run.inputs(shape)
    weight = weight.to(x.dtype)
    experts = make_experts(shape, x.dtype, run.device)
    experts.requires_grad_(training)
    x.requires_grad_(training)
    # transposed weights are in the order that each implementation reads
    own = store_as_epmoe_reads(copy.deepcopy(experts)) if experts.is_transposed else experts

    def forward(name):
        module = own if name == "epmoe" else experts
        module.config._experts_implementation = name
        return module(x, idx, weight)

    def call(name):
        y = forward(name)
        if training:
            y.backward(x.detach())
            for t in (x, *experts.parameters(), *own.parameters()):
                t.grad = None

    names = implementations(run, shape, training, call)
    with torch.no_grad():
        for name in names:
            with poisoned():
                got = forward(name)
            error = wrong_tokens(experts, x, idx, weight, got)
            run.agree(error and f"{name}: {error}")
    rounds, round_ms = (6, 20.0) if run.on_gpu else (2, 1.0)
    times = alternated([functools.partial(call, name) for name in names], run.device, run.cpu_group,
                       run.options.iters or rounds, round_ms)
    ms = dict(zip(names, times))
    suffix = ", training step" if training else ""
    for name in sorted(names, key=lambda n: n == "epmoe"):
        over = None if name == "epmoe" else {"epmoe": ms["epmoe"]}
        flops = (3 if training else 1) * 6.0 * shape.tokens * shape.topk * shape.hidden * shape.inner
        run.record("transformers", shape, name + suffix, ms[name], over=over,
                   rate=f"{flops / ms[name] / 1e9:.3g} TFLOP/s", tflops=round(flops / ms[name] / 1e9, 4))
