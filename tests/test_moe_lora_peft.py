"""Adapters of EPMoE beside peft itself: files in both directions, results and gradients, in float32."""

import json
import os

import pytest
import torch
import torch.distributed as dist

import epmoe
import frameworks
from cases import generator, process_ranks

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]
R, ALPHA, TOKENS = 3, 7, 20
BOUND = 1e-6  # of the largest value
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 64}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PREFIX = "base_model.model.model.layers.1.mlp.experts."


def _model(family):
    """A small model, the same in all processes."""
    from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if family == "gpt_oss":
        model = GptOssForCausalLM(GptOssConfig(**SIZES, intermediate_size=24, num_local_experts=4,
                                               num_experts_per_tok=2))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, intermediate_size=48, moe_intermediate_size=24,
                                                   num_experts=4, num_experts_per_tok=2))
    _fill(model.float().named_parameters(), 0)
    return model


def _fill(named, seed):
    g = generator(seed, 77)
    with torch.no_grad():
        for _, p in sorted(named, key=lambda pair: pair[0]):
            p.copy_(torch.randn(p.shape, generator=g) * 0.2)


def _close(got, want, what):
    assert got.shape == want.shape, what
    error = (got - want).abs().max() / want.abs().max()
    assert error <= BOUND, f"{what}: {error}"


def _exchanged(rank, world_size, family, targets, folder):
    """Rank main: all ranks have the same tokens, so that the factors' gradients are W times peft's."""
    frameworks.add_to_path()
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file, save_file

    theirs = get_peft_model(_model(family), LoraConfig(r=R, lora_alpha=ALPHA, target_modules=[],
                                                       target_parameters=targets))
    _fill([(n, p) for n, p in theirs.named_parameters() if "lora_" in n], 1)
    if rank == 0:
        theirs.save_pretrained(folder)
    dist.barrier()
    file = load_file(f"{folder}/adapter_model.safetensors")
    moe = epmoe.EPMoE.from_experts(_model(family).model.layers[1].mlp.experts, max_tokens=TOKENS)
    moe.load_adapter("a", file, alpha=ALPHA, prefix=PREFIX)
    moe.set_adapter("a")

    g = generator(5)
    x, dy = (torch.randn(TOKENS, 32, generator=g) for _ in range(2))
    weights, idx = torch.randn(TOKENS, 4, generator=g).softmax(-1).topk(2)
    experts, grads = theirs.base_model.model.model.layers[1].mlp.experts, []
    for call in (experts, moe):
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        y = call(leaves[0], idx, leaves[1])
        y.backward(dy)
        grads.append([y.detach(), *(t.grad for t in leaves)])
    for what, got, want in zip(("y", "x", "weights"), grads[1], grads[0]):
        _close(got, want, what)

    # the gradients under the names of peft: those of an adapter that has them as its factors
    moe.add_adapter("gradients", R, ALPHA, moe.adapters.a.targets)
    with torch.no_grad():
        for to, p in zip(moe.adapters.gradients.parameters(), moe.adapters.a.parameters()):
            to.copy_(p.grad / world_size)
    of_factors, back = moe.adapter_state_dict("gradients"), moe.adapter_state_dict("a")
    moe.finalize()
    if rank > 0:
        return
    wanted = {n.replace(".default", ""): p.grad for n, p in experts.named_parameters() if p.grad is not None}
    assert wanted.keys() == of_factors.keys() and len(wanted) == 2 * len(targets)
    for key, t in of_factors.items():
        _close(t, wanted[key], key)

    # and from EPMoE to peft
    assert {PREFIX + key for key in back} == {key for key in file if key.startswith(PREFIX)}
    save_file(file | {PREFIX + key: t * 2 for key, t in back.items()}, f"{folder}/adapter_model.safetensors")
    config = json.loads(open(f"{folder}/adapter_config.json").read())
    assert (config["r"], config["lora_alpha"]) == (R, ALPHA)
    loaded = PeftModel.from_pretrained(_model(family), folder)
    own = loaded.base_model.model.model.layers[1].mlp.experts
    assert torch.equal(own.lora_A["default"].weight, 2 * experts.lora_A["default"].weight)
    assert torch.equal(own.lora_B["default"].weight, 2 * experts.lora_B["default"].weight)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family, targets", [("qwen3_moe", TARGETS), ("gpt_oss", TARGETS),
                                             ("qwen3_moe", TARGETS[1:])], ids=["qwen3", "gpt_oss", "down"])
def test_lora_computes_what_peft_computes(tmp_path, family, targets, size):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    frameworks.need("peft")
    process_ranks(_exchanged, size, family, targets, os.fspath(tmp_path))
