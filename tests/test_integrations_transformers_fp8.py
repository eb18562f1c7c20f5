"""EPMoE modules in FP8 of transformers' experts: those of an FP8 model, and those that are quantised."""

import types

import pytest
import torch
from transformers import MixtralConfig
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import epmoe
from cases import generator
from epmoe import reference
from epmoe.integrations.transformers import spread_experts
from gemm_cases import bits, dequantized

pytestmark = pytest.mark.cpu_only
E4M3 = torch.float8_e4m3fn
NAMES = ("gate_up_proj", "down_proj")


def fp8_experts(seed, **options):
    """Experts as transformers makes them for an FP8 model, with random numbers."""
    config = types.SimpleNamespace(hidden_size=128, num_experts=4, moe_intermediate_size=128,
                                   dtype=torch.float16, hidden_act="silu", num_experts_per_tok=2)
    experts = FP8Experts(config, **{"block_size": (128, 128)} | options)
    g = generator(seed)
    for name in NAMES:
        p = getattr(experts, name)
        q, scales = epmoe.quantize_fp8_weight(torch.randn(p.shape, generator=g) / 11)
        p.data.copy_(q)
        if not options:  # else the shape of the scales is another one
            getattr(experts, name + "_scale_inv").data.copy_(scales)
    return experts


def check(moe, weights):
    """Compare a module with weights {name: [E, N, K] in float64}."""
    g = generator(7)
    x, weight = torch.randn(5, 128, generator=g).to(moe.layer.dtype), torch.rand(5, 2, generator=g)
    idx = torch.rand(5, 4, generator=g).topk(2).indices
    with torch.no_grad():
        y = moe(x, idx, weight)
    want = reference.moe(x.double(), idx, weight.double(), weights["gate_up_proj"], weights["down_proj"])
    assert y.dtype == moe.layer.dtype and (y.double() - want).norm() < 0.1 * want.norm()


def test_transformers_fp8_experts_become_modules_as_they_are():
    model = torch.nn.ModuleList([fp8_experts(seed) for seed in (1, 2)])
    before = [dict(m.named_parameters()) for m in model]
    spread_experts(model, max_tokens=8)
    assert model[0].layer is model[1].layer and "FP8" in repr(model[0])
    for moe, old in zip(model, before):
        for name, p in moe.named_parameters():
            assert torch.equal(bits(p), bits(old[name])) and not p.requires_grad
        assert moe.layer.dtype == torch.float16 and moe.weight_dtype == E4M3
        check(moe, {n: dequantized(getattr(moe, n), getattr(moe, n + "_scale_inv")) for n in NAMES})
    model[0].finalize()


def test_transformers_experts_are_quantised():
    """Also those of a module that shares the layer of another."""
    config = MixtralConfig(hidden_size=128, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2)
    model = torch.nn.ModuleList([MixtralExperts(config) for _ in range(2)]).bfloat16()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.09)
    before = [{n: p.detach().double() for n, p in m.named_parameters()} for m in model]
    spread_experts(model, max_tokens=8, weight_dtype=E4M3)
    assert model[0].layer is model[1].layer
    for moe, old in zip(model, before):
        assert moe.gate_up_proj.dtype == E4M3 and not any(p.requires_grad for p in moe.parameters())
        check(moe, old)
    model[0].finalize()


@pytest.mark.parametrize("options, text", [({"block_size": None}, "blocks of None"),
                                           ({"block_size": (64, 128)}, "blocks of"),
                                           ({"activation_scheme": "static"}, "static")])
def test_transformers_fp8_experts_with_other_scales_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        epmoe.EPMoE.from_experts(fp8_experts(1, **options))


def test_transformers_experts_train_with_products_in_fp8():
    config = MixtralConfig(hidden_size=128, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(3)
    experts = MixtralExperts(config).bfloat16()
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.1)
    plain = epmoe.EPMoE.from_experts(experts, max_tokens=8)
    model = spread_experts(torch.nn.ModuleList([experts]), max_tokens=8, compute_dtype=E4M3)
    assert "products in FP8" in repr(model[0])
    g = generator(7)
    x, dy = (torch.randn(5, 128, generator=g).bfloat16() for _ in range(2))
    weight, idx = torch.rand(5, 2, generator=g), torch.rand(5, 4, generator=g).topk(2).indices
    results = []
    for moe in (model[0], plain):
        leaf = x.clone().requires_grad_()
        y = moe(leaf, idx, weight)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *moe.parameters()], dy)])
        moe.finalize()
    for a, b in zip(*results, strict=True):
        assert 0 < (a.float() - b.float()).norm() < 0.15 * b.float().norm()
