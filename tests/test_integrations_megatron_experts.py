"""Megatron-core's MoELayer with epmoe's experts and dispatcher, in Megatron's own DistributedDataParallel.

Compared with Megatron's SequentialMLP and its all-to-all dispatcher: main_grad after two micro-batches, with
gradient_accumulation_fusion, with delay_wgrad_compute, with both, and without them.
"""

import contextlib
import dataclasses
import os

import pytest
import torch

import frameworks
from cases import process_ranks
from megatron_cases import E, H, config_of, prepare

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
NUM_RANKS, EP = 4, 2  # two ranks have the same experts
OPTIONS = [(delay, fuse) for delay in (False, True) for fuse in (False, True)]
TOKENS = (3, 11, 1, 7)


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


def make(experts, own, delay, fuse):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config = dataclasses.replace(config_of(EP, 2, torch.float32, None),
                                 moe_token_dispatcher_type="flex" if own else "alltoall")
    config.delay_wgrad_compute, config.gradient_accumulation_fusion = delay, fuse
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
        x = torch.randn(TOKENS[(rank + batch) % 4], 1, H, generator=g, requires_grad=True)
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
    config.fp8 = "e4m3"
    with pytest.raises(ValueError, match="leave fp8 and fp4 out"):
        experts.EpmoeGroupedMLP(1, config)
    return results


def test_integrations_megatron_experts_in_ddp():
    if "EPMOE_MEGATRON_SOURCE" in os.environ:
        pytest.skip("epmoe's experts are for megatron-core 0.16: unset EPMOE_MEGATRON_SOURCE")
    frameworks.need("megatron-core")
    for want, *found in process_ranks(main, NUM_RANKS):
        for options, got in zip(OPTIONS, found, strict=True):
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert (a - b).abs().max() <= 2e-5 * b.abs().max(), (options, i)
        plain, fused, delayed, both = found
        assert all(torch.equal(a, b) for a, b in zip(plain, delayed))
        assert all(torch.equal(a, b) for a, b in zip(fused, both))
