"""Models of transformers, tiny and random, for the tests of epmoe.integrations.transformers."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from epmoe.integrations import transformers_experts as parts

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=64, eos_token_id=None, pad_token_id=0, bos_token_id=1)
INNER = dict(moe_intermediate_size=24, intermediate_size=48)
# The sizes of each family's experts, and how epmoe computes their activation.
FAMILIES = {
    "qwen3_moe": (INNER | dict(num_experts=8, num_experts_per_tok=2), "swiglu"),
    "mixtral": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2), "swiglu"),
    "deepseek_v3": (INNER | dict(n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
                                 first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                                 qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4), "swiglu"),
    "gpt_oss": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2), "gpt_oss"),
    "olmoe": (dict(intermediate_size=24, num_experts=8, num_experts_per_tok=2), "swiglu"),
    "qwen2_moe": (INNER | dict(shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=2),
                  "swiglu"),
    "qwen3_next": (INNER | dict(shared_expert_intermediate_size=24, num_experts=8, num_experts_per_tok=2,
                                linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
                                linear_value_head_dim=8,
                                layer_types=["linear_attention", "full_attention"]), "swiglu"),
    "glm4_moe": (INNER | dict(n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
                              topk_group=1), "swiglu"),
    "minimax": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2), "swiglu"),
    "ernie4_5_moe": (INNER | dict(moe_num_experts=8, moe_k=2), "swiglu"),
    # a gate of its own: clamped
    "deepseek_v4": (INNER | dict(n_routed_experts=8, num_experts_per_tok=2, num_key_value_heads=1), None),
    # no gate
    "nemotron_h": (INNER | dict(layers_block_type=["moe", "attention"], n_routed_experts=8,
                                num_experts_per_tok=2, moe_shared_expert_intermediate_size=24, n_group=1,
                                topk_group=1), None),
    # a norm after each expert
    "muse_spark_text": (INNER | dict(num_local_experts=8, num_experts_per_tok=2, moe_hidden_size=24),
                        "swiglu"),
}


def make(family):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family][0]))
    kind = AutoModel if family == "muse_spark_text" else AutoModelForCausalLM
    model = kind.from_config(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():  # of the size at which a wrong gate or bias is seen
            p.normal_(0, 0.2)
    return model


def experts_of(model):
    return [m for m in model.modules() if parts.is_decorated(m)]


def tokens(*shape, seed=1):
    return torch.randint(2, 64, shape, generator=torch.Generator().manual_seed(seed))


def step(model, ids, forward=None):
    """Run forward and backward. Return the logits, or hidden states without a head, and {name: gradient}."""
    model.zero_grad()
    logits = (model if forward is None else forward)(input_ids=ids, use_cache=False)[0]
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def run(model, implementation, ids, forward=None):
    """step with an experts_implementation."""
    model.set_experts_implementation(implementation)
    return step(model, ids, forward)


def check_equal(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=2e-5, atol=2e-6)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        torch.testing.assert_close(got[1][name], grad, rtol=2e-4, atol=2e-6,
                                   msg=lambda m, n=name: f"{n}: {m}")
