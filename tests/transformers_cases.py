"""Models of transformers, tiny and random, for the tests of epmoe.integrations.transformers."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import epmoe
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
    # a gate of its own
    "glm4_moe": (INNER | dict(n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
                              topk_group=1, hidden_act="gelu"), None),
    "minimax": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2), "swiglu"),
    "ernie4_5_moe": (INNER | dict(moe_num_experts=8, moe_k=2), "swiglu"),
    # clamped gates
    "deepseek_v4": (INNER | dict(n_routed_experts=8, num_experts_per_tok=2, num_key_value_heads=1,
                                 swiglu_limit=0.5), epmoe.SwiGLU(limit=0.5)),
    "minimax_m3_vl_text": (dict(intermediate_size=24, dense_intermediate_size=48, shared_intermediate_size=24,
                                num_local_experts=8, num_experts_per_tok=2, rotary_dim=4, index_n_heads=2,
                                index_head_dim=8, swiglu_limit=0.5), epmoe.SwiGLU(1.702, 0.5, 1)),
    # transposed weights, and a clamped gate that is not interleaved
    "openai_privacy_filter": (dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2),
                              epmoe.SwiGLU(1.702, 7.0, 1)),
    # a gate with GELU
    "gemma4_text": (INNER | dict(enable_moe_block=True, num_experts=8, top_k_experts=2,
                                 vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
                                 global_head_dim=8, layer_types=["sliding_attention", "full_attention"]),
                    "geglu_tanh"),
    # no gate
    "nemotron_h": (INNER | dict(layers_block_type=["moe", "attention"], n_routed_experts=8,
                                num_experts_per_tok=2, moe_shared_expert_intermediate_size=24, n_group=1,
                                topk_group=1), "relu2"),
    # a norm after each expert
    "muse_spark_text": (INNER | dict(num_local_experts=8, num_experts_per_tok=2, moe_hidden_size=24),
                        "swiglu"),
}


# The standard deviation of the parameters, where it is not 0.2. It is so large that a wrong gate or bias is
# seen. With 0.2, qwen3_next has logits of up to 3.7, and those in float32 are 8e-6 away from those in
# float64. In one call with the tokens of four ranks, torch's GEMM rounds a row differently, which changes
# them by 2.4e-6, also with transformers' own experts. With 0.1 the logits are up to 1.9, and four ranks
# change them by 6e-7. (torch 2.13, transformers 5.24, CPU)
DEVIATION = {"qwen3_next": 0.1}

# Not with ep_implementation: they would repeat what the other families show, and transformers 5.24 itself
# cannot shard gemma4_text with ep_size.
ONE_PROCESS = ("minimax_m3_vl_text", "openai_privacy_filter", "gemma4_text")
SPREAD = [family for family in FAMILIES if family not in ONE_PROCESS]


def kind_of(family):
    return AutoModel if family in ("muse_spark_text", "openai_privacy_filter") else AutoModelForCausalLM


def make(family):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family][0]))
    model = kind_of(family).from_config(config).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, DEVIATION.get(family, 0.2))
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
