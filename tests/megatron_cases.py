"""Groups and configurations of Megatron-core for tests."""

import torch
import torch.utils.checkpoint

import frameworks

H, E = 32, 8
# (T of each rank, K, dtype, recompute, expert capacity factor)
F32, BF16 = torch.float32, torch.bfloat16


def prepare(ep):
    """Import Megatron-core on a machine without a GPU, and make its groups."""
    frameworks.prepare_megatron()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)


def config_of(ep, topk, dtype, capacity_factor):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, num_moe_experts=E, moe_router_topk=topk,
        moe_ffn_hidden_size=48, ffn_hidden_size=48, expert_model_parallel_size=ep, add_bias_linear=False,
        use_cpu_initialization=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", params_dtype=dtype,
        bf16=dtype == BF16, moe_expert_capacity_factor=capacity_factor)
