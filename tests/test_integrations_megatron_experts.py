"""Megatron-core's MoELayer with epmoe's experts and dispatcher, in Megatron's own DistributedDataParallel.

Compared with Megatron's SequentialMLP and its all-to-all dispatcher: main_grad after two micro-batches, with
gradient_accumulation_fusion, with delay_wgrad_compute, with both, and without them.  In FP8, compared with
the same in bfloat16 and with EPMoE.
"""

import contextlib
import dataclasses
import os

import pytest
import torch

import epmoe
import frameworks
from cases import process_ranks, same_bits
from megatron_cases import BF16, E, H, config_of, prepare

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
NUM_RANKS, EP = 4, 2  # two ranks have the same experts
OPTIONS = [(delay, fuse) for delay in (False, True) for fuse in (False, True)]
TOKENS = (3, 11, 1, 7)


def need():
    if "EPMOE_MEGATRON_SOURCE" in os.environ:
        pytest.skip("epmoe's experts are for megatron-core 0.16: unset EPMOE_MEGATRON_SOURCE")
    frameworks.need("megatron-core")


def copy_weights(own, theirs):
    """Both have all parameters of a layer, but store the experts' differently."""
    state = theirs.state_dict()
    weights = own.experts.weight1.view(E // EP, H, -1), own.experts.weight2.view(E // EP, -1, H)
    with torch.no_grad():
        for name, weight in zip(("linear_fc1", "linear_fc2"), weights):
            for i in range(E // EP):
                weight[i] = state.pop(f"experts.local_experts.{i}.{name}.weight").t()
    own.load_state_dict({n: t for n, t in state.items() if "local_experts" not in n}, strict=False)


def experts_of(layer, get):
    """What get returns of the experts' weights, as weights [L, 2I, H] and [L, H, I]."""
    if hasattr(layer.experts, "weight1"):
        w1, w2 = (get(p) for p in (layer.experts.weight1, layer.experts.weight2))
        return [w1.view(E // EP, H, -1).mT, w2.view(E // EP, -1, H).mT]
    return [torch.stack([get(getattr(e, n).weight) for e in layer.experts.local_experts])
            for n in ("linear_fc1", "linear_fc2")]


def make(experts, own, delay, fuse, dtype=torch.float32, **fp8):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config = dataclasses.replace(config_of(EP, 2, dtype, None),
                                 moe_token_dispatcher_type="flex" if own else "alltoall")
    options = {"delay_wgrad_compute": delay, "gradient_accumulation_fusion": fuse} | fp8
    for name, value in options.items():  # Megatron's check of fp8 needs Transformer Engine
        setattr(config, name, value)
    parts = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=own).submodules
    assert (parts.experts.module is experts) == own
    torch.manual_seed(0)
    return config, MoELayer(config, parts)


def train(config, layer, rank, has_waiting):
    """Outputs, gradients of inputs and main_grads of two micro-batches in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    ddp = DistributedDataParallel(config, options, layer)
    ddp.zero_grad_buffer()
    seen = []
    for batch in range(2):
        g = torch.Generator().manual_seed(9 * batch + rank)
        x = torch.randn(TOKENS[(rank + batch) % 4], 1, H, generator=g).to(config.params_dtype)
        x.requires_grad_()
        with contextlib.nullcontext() if batch else ddp.no_sync():
            y = ddp(x)[0]
            y.square().sum().backward()
            if has_waiting:
                layer.backward_dw()
        seen += [y.detach(), x.grad]
    assert all(p.grad is None for p in layer.parameters())  # Megatron's hooks have run
    ddp.finish_grad_sync()
    return seen + [layer.router.weight.main_grad] + experts_of(layer, lambda p: p.main_grad)


def main(rank, world_size):
    prepare(EP)
    import epmoe.integrations.megatron as integration
    import epmoe.integrations.megatron_experts as experts

    integration.use(experts=True)
    integration.use(experts=True)
    config, theirs = make(experts.EpmoeGroupedMLP, False, False, False)
    start = {n: t.clone() for n, t in theirs.state_dict().items() if isinstance(t, torch.Tensor)}
    results = [train(config, theirs, rank, False)]
    for delay, fuse in OPTIONS:
        config, own = make(experts.EpmoeGroupedMLP, True, delay, fuse)
        theirs.load_state_dict(start, strict=False)
        copy_weights(own, theirs)
        results.append(train(config, own, rank, delay))
    with pytest.raises(RuntimeError, match="no backward pass of this module waits"):
        own.backward_dw()
    return results


def test_integrations_megatron_experts_in_ddp():
    need()
    for want, *found in process_ranks(main, NUM_RANKS):
        for options, got in zip(OPTIONS, found, strict=True):
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert (a - b).abs().max() <= 2e-5 * b.abs().max(), (options, i)
        plain, fused, delayed, both = found
        assert all(torch.equal(a, b) for a, b in zip(plain, delayed))
        assert all(torch.equal(a, b) for a, b in zip(fused, both))


# ---- FP8 ----

FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
# A change of the configuration, and what the error says.
REFUSED = [({"fp8": "hybrid"}, "set fp8='e4m3' and fp8_recipe='blockwise'"),
           ({"fp8_recipe": "delayed"}, "fp8_recipe='delayed': .*--fp8-format e4m3 --fp8-recipe blockwise"),
           ({"fp8_recipe": "tensorwise"}, "fp8_recipe='tensorwise'"),
           ({"fp8_recipe": "mxfp8"}, "fp8_recipe='mxfp8'"),
           ({"first_last_layers_bf16": True}, "leave first_last_layers_bf16 out"),
           ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, "leave moe_act out"),
           ({"params_dtype": torch.float32}, "set bf16=True and params_dtype=torch.bfloat16"),
           ({"activation_func": torch.nn.functional.gelu}, "gated_linear_unit=True and fp8: must be silu"),
           ({"moe_ffn_hidden_size": 40}, "inner 40 with compute_dtype in FP8: must be a multiple of 16"),
           ({"fp8": None, "fp4": "e2m1"}, "leave fp4 out, or set fp8='e4m3'")]


def beside_epmoe(experts, rank, fp8_wgrad):
    """(name, Megatron's, EPMoE's) of one step in FP8 without DistributedDataParallel."""
    from megatron.core import parallel_state

    from epmoe.integrations.megatron import choices_of

    _, layer = make(experts, True, False, False, BF16, fp8_wgrad=fp8_wgrad, **FP8)
    group, mine = parallel_state.get_expert_model_parallel_group(), E // EP
    moe = epmoe.EPMoE(H, 48, E, 2, group, max_tokens=16, device="cpu", compute_dtype=torch.float8_e4m3fn,
                      wgrad_dtype=None if fp8_wgrad else BF16)
    own = layer.experts
    with torch.no_grad():
        moe.gate_up_proj.copy_(own.weight1.view(mine, H, -1).mT)
        moe.down_proj.copy_(own.weight2.view(mine, -1, H).mT)
    g = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(TOKENS[rank], 1, H, generator=g).to(BF16) for _ in range(2))
    probs, routing_map = layer.router(x)
    y = layer(x)[0]
    y.backward(dy)
    idx, weight = choices_of(routing_map, probs.detach(), 2)
    z = moe(x.view(-1, H), idx, weight)
    z.backward(dy.view(-1, H))
    results = [("y", y.detach().view(-1, H), z.detach()),
               ("gate_up", own.weight1.grad.view(mine, H, -1).mT, moe.gate_up_proj.grad),
               ("down", own.weight2.grad.view(mine, -1, H).mT, moe.down_proj.grad)]
    moe.finalize()
    return results


def sees_changes(experts):
    """Whether a change through .data is seen: before Megatron's schedule begins a step, and after."""
    _, layer = make(experts, True, False, False, BF16, **FP8)
    x, seen = torch.ones(4, 1, H, dtype=BF16), []
    with torch.no_grad():
        before = layer(x)[0]
        layer.experts.weight2.data.neg_()
        seen.append(torch.equal(layer(x)[0], -before))
        layer.set_is_first_microbatch()
        seen.append(torch.equal(layer(x)[0], -before))
        layer.experts.weight2.neg_()
        seen.append(torch.equal(layer(x)[0], before))
    return seen


def main_fp8(rank, world_size):
    prepare(EP)
    import epmoe.integrations.megatron as integration
    from epmoe.integrations.megatron_experts import EpmoeGroupedMLP as experts

    integration.use(experts=True)
    for change, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make(experts, True, False, False, BF16, **FP8 | change)
    steps = []
    for delay, fuse, fp8 in [(False, False, {}), *((*o, FP8) for o in OPTIONS)]:
        config, layer = make(experts, True, delay, fuse, BF16, **fp8)
        steps.append(train(config, layer, rank, delay))
    beside = [beside_epmoe(experts, rank, fp8_wgrad) for fp8_wgrad in (True, False)]
    return steps, beside, sees_changes(experts)


@pytest.fixture(scope="module")
def in_fp8():
    need()
    return process_ranks(main_fp8, NUM_RANKS)


def test_integrations_megatron_experts_in_fp8(in_fp8):
    """In DistributedDataParallel, with each option, beside bfloat16; errors of what there is not."""
    for (want, *found), *_ in in_fp8:
        for options, got in zip(OPTIONS, found, strict=True):
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert (a.float() - b.float()).norm() < 0.12 * b.float().norm(), (options, i)
                assert not torch.equal(a, b)
        plain, fused, delayed, both = found
        assert all(torch.equal(a, b) for a, b in zip(plain, delayed))
        assert all(torch.equal(a, b) for a, b in zip(fused, both))


def test_integrations_megatron_experts_in_fp8_beside_epmoe(in_fp8):
    """The gradients of the weights have the bits of EPMoE, with fp8_wgrad and without."""
    for _, results, _ in in_fp8:
        for of_y, *of_weights in results:
            torch.testing.assert_close(*of_y[1:], rtol=2.0**-6, atol=1e-2 * of_y[2].abs().max().item())
            for name, a, b in of_weights:
                same_bits(a.contiguous(), b, name)


def test_integrations_megatron_experts_in_fp8_see_new_weights(in_fp8):
    assert all(seen == [False, True, True] for *_, seen in in_fp8)
