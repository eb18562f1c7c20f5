"""EPMoE modules in 4 bits of transformers' experts: those of an MXFP4 model, and those that are quantised."""

import types

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations import mxfp4
from transformers.integrations.finegrained_fp8 import FP8Experts

import epmoe
from epmoe.gemm import four_bit
from epmoe.integrations.transformers import spread_experts
from four_bit_cases import same

pytestmark = pytest.mark.cpu_only
NAMES = ("gate_up_proj", "down_proj")
CONFIG = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
              num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
              max_position_embeddings=64, eos_token_id=None, pad_token_id=0, bos_token_id=1)


def gpt_oss(hidden=CONFIG["hidden_size"]):
    """A model of GPT-OSS in 16 bits, with weights that MXFP4 can hold."""
    torch.manual_seed(0)
    config = GptOssConfig(**CONFIG | {"hidden_size": hidden})
    model = AutoModelForCausalLM.from_config(config).bfloat16().eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.normal_(0, 0.2)
            if n.endswith(NAMES):
                blocks, scales = epmoe.quantize_mxfp4(p.mT)
                p.copy_(mxfp4.convert_moe_packed_tensors(blocks, scales))  # of transformers
    return model


def by_triton(t):
    """A tensor as the Triton kernels have it, with the bytes of a column side by side."""
    layout = types.SimpleNamespace(unswizzle_data=lambda data: data.flip(-2).transpose(-1, -2))
    return types.SimpleNamespace(storage=types.SimpleNamespace(layout=layout, data=t.flip(-2)), shape=t.shape)


def mxfp4_experts(experts, kind):
    """The experts that transformers makes for a checkpoint in MXFP4 of the same weights.

    kind: "blocks", as transformers 4 has them, or "triton", of which this has no kernels.
    """
    with torch.device("cpu"):
        found = mxfp4.Mxfp4GptOssExperts(types.SimpleNamespace(**CONFIG, swiglu_limit=experts.limit))
    for name in NAMES:
        blocks, scales = epmoe.quantize_mxfp4(getattr(experts, name).detach().mT)
        getattr(found, f"{name}_bias").data.copy_(getattr(experts, f"{name}_bias"))
        delattr(found, name)
        if kind == "blocks":
            setattr(found, f"{name}_blocks", torch.nn.Parameter(blocks, False))
            setattr(found, f"{name}_scales", torch.nn.Parameter(scales, False))
        else:
            setattr(found, name, by_triton(blocks.flatten(-2)))
            setattr(found, f"{name}_precision_config", types.SimpleNamespace(weight_scale=by_triton(scales)))
    return found


def in_mxfp4(model, kind):
    """The model as transformers makes it for a checkpoint in MXFP4."""
    for layer in model.model.layers:
        layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, mxfp4_experts(layer.mlp.experts, kind))
    return model


def logits(model):
    ids = torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("kind", ["blocks", "triton"])
def test_transformers_mxfp4_model_becomes_modules_as_it_is(kind):
    """It has the bits of the dequantised model; biases are as before."""
    plain, model = gpt_oss(), in_mxfp4(gpt_oss(), kind)
    want = logits(spread_experts(plain, max_tokens=32))
    spread_experts(model, max_tokens=32)
    assert same(logits(model), want)
    modules = [layer.mlp.experts for layer in model.model.layers]
    assert modules[0].layer is modules[1].layer
    for moe, other in zip(modules, (layer.mlp.experts for layer in plain.model.layers)):
        assert isinstance(moe, epmoe.EPMoE) and moe.weight_dtype == "mxfp4" and "MXFP4" in repr(moe)
        assert not any(p.requires_grad for p in moe.parameters())
        assert all(same(getattr(moe, f"{n}_bias"), getattr(other, f"{n}_bias").detach()) for n in NAMES)
    state = epmoe.whole_state_dict(model)
    for i, layer in enumerate(plain.model.layers):
        key = f"model.layers.{i}.mlp.experts"  # as checkpoints of gpt-oss call them
        for name in NAMES:
            parts = state[f"{key}.{name}_blocks"], state[f"{key}.{name}_scales"]
            weight = mxfp4.convert_moe_packed_tensors(*parts)
            assert same(weight.mT.contiguous(), getattr(layer.mlp.experts, name).detach())
    modules[0].finalize()
    plain.model.layers[0].mlp.experts.finalize()


@pytest.mark.parametrize("weight_dtype", ["mxfp4", "int4", epmoe.Int4(64, zero_points=True)], ids=str)
def test_transformers_16_bit_experts_are_quantised(weight_dtype):
    """MXFP4 holds exactly what was MXFP4 before."""
    plain, model = gpt_oss(), gpt_oss()
    before = [{n: p.detach().clone() for n, p in layer.mlp.experts.named_parameters()}
              for layer in model.model.layers]
    want = logits(spread_experts(plain, max_tokens=32))
    spread_experts(model, max_tokens=32, weight_dtype=weight_dtype)
    got = logits(model)
    assert same(got, want) == (weight_dtype == "mxfp4")
    assert (got - want).norm() < 0.1 * want.norm()
    for layer, old in zip(model.model.layers, before):
        moe = layer.mlp.experts
        for name in NAMES:
            want = four_bit.quantize(moe._format.format, old[name].mT, torch.bfloat16)
            for end, t in zip(moe._format.ends, want):
                assert same(getattr(moe, name + end).detach(), t)
    model.model.layers[0].mlp.experts.finalize()
    plain.model.layers[0].mlp.experts.finalize()


def test_transformers_mxfp4_experts_on_several_ranks(ranks):
    """Each rank takes its experts of what transformers has loaded."""
    experts = [mxfp4_experts(gpt_oss().model.layers[0].mlp.experts, kind) for kind in ("blocks", "triton")]

    def run(world, device):
        found = []
        for one in experts:
            moe = epmoe.EPMoE.from_experts(one, world, topk=2, max_tokens=8)
            g = torch.Generator().manual_seed(world.rank)
            x, idx = torch.randn(5, 64, generator=g).bfloat16(), torch.rand(5, 4, generator=g).topk(2).indices
            with torch.no_grad():
                found.append(moe(x, idx, torch.rand(5, 2, generator=g)))
            moe.finalize()
        return found

    alone = ranks(run, world_size=1)
    for world_size in (2, 4):
        together = ranks(run, world_size=world_size)
        assert all(same(*found) for found in together)
        assert (together[0][0] - alone[0][0]).norm() < 0.01 * alone[0][0].norm()


def fp4_experts():
    config = types.SimpleNamespace(hidden_size=64, num_experts=4, moe_intermediate_size=64, swiglu_limit=None,
                                   dtype=torch.float16, hidden_act="silu", num_experts_per_tok=2)
    experts = FP8Experts(config, block_size=(128, 128), expert_dtype="fp4", scale_fmt="ue8m0")
    g = torch.Generator().manual_seed(3)
    weights = {}
    for name in NAMES:
        p, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        weights[name] = (torch.randn(*p.shape[:2], 2 * p.shape[2], generator=g) / 9).half()
        blocks, scales = epmoe.quantize_mxfp4(weights[name])
        p.data.copy_(blocks.flatten(-2).view(torch.int8))
        scale.data.view(torch.uint8).copy_(scales)
    return experts, weights


def test_transformers_fp4_experts_of_deepseek_v4_become_modules_as_they_are():
    experts, weights = fp4_experts()
    moe = spread_experts(torch.nn.ModuleList([experts]), max_tokens=8)[0]
    assert moe.weight_dtype == "mxfp4" and moe.layer.dtype == torch.float16
    for name in NAMES:
        want = four_bit.quantize(four_bit.Mxfp4(), weights[name], torch.float16)
        assert same(getattr(moe, name).detach(), want.numbers)
        assert same(getattr(moe, f"{name}_scales").detach(), want.scales)
    moe.finalize()


def test_transformers_mxfp4_experts_mistakes():
    with torch.device("cpu"):
        empty = mxfp4.Mxfp4GptOssExperts(types.SimpleNamespace(**CONFIG))
    with pytest.raises(ValueError, match="has no scales of gate_up_proj: load its checkpoint first"):
        epmoe.EPMoE.from_experts(empty, topk=2)
    experts = mxfp4_experts(gpt_oss().model.layers[0].mlp.experts, "blocks")
    with pytest.raises(ValueError, match="pass topk="):
        epmoe.EPMoE.from_experts(experts)
    experts.to("meta")
    with pytest.raises(ValueError, match="on the meta device"):
        epmoe.EPMoE.from_experts(experts, topk=2)


def test_transformers_experts_in_32_bits_become_modules_of_another_dtype():
    """4 bits need it."""
    experts = gpt_oss().float().model.layers[0].mlp.experts
    with pytest.raises(TypeError, match="dtype torch.float32 with weights in MXFP4"):
        epmoe.EPMoE.from_experts(experts, max_tokens=8, weight_dtype="mxfp4")
    moe = epmoe.EPMoE.from_experts(experts, max_tokens=8, weight_dtype="mxfp4", dtype=torch.float16)
    assert moe.layer.dtype == moe.down_proj_bias.dtype == torch.float16
    want = four_bit.quantize(four_bit.Mxfp4(), experts.down_proj.detach().mT, torch.float16)
    assert same(moe.down_proj.detach(), want.numbers)
    moe.finalize()


def test_transformers_modules_of_one_shape_have_the_same_options():
    """Those of the module, and not only those of the layer that they share."""
    E4M3 = torch.float8_e4m3fn
    for weight_dtype in (None, "mxfp4"):
        model = spread_experts(gpt_oss(), max_tokens=32, compute_dtype=E4M3, rank_invariant=True,
                               weight_dtype=weight_dtype)
        modules = [layer.mlp.experts for layer in model.model.layers]
        assert modules[0].layer is modules[1].layer
        assert all(moe.computes_fp8 and moe.rank_invariant for moe in modules)
        with torch.no_grad():
            assert model.eval()(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
        modules[0].finalize()
    model = spread_experts(gpt_oss(128).float(), max_tokens=32, weight_dtype="mxfp4", dtype=torch.bfloat16,
                           dispatch_dtype=E4M3)
    modules = [layer.mlp.experts for layer in model.model.layers]
    assert all(moe.layer.dtype == torch.bfloat16 and moe._format.sends_fp8 for moe in modules)
    model.model.layers[0].mlp.experts.finalize()


def test_transformers_mxfp4_experts_have_the_dtype_of_their_model():
    model = gpt_oss().half()
    for layer in model.model.layers:
        layer.mlp.experts = mxfp4_experts(layer.mlp.experts, "blocks")
    spread_experts(model, max_tokens=32)
    modules = [layer.mlp.experts for layer in model.model.layers]
    assert all(moe.layer.dtype == torch.float16 for moe in modules)
    with torch.no_grad():
        assert model.eval()(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
    modules[0].finalize()
