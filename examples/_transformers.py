"""What the examples with transformers share: a small Mixture-of-Experts model, made here, and its text."""

import importlib.util
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

for package in ("transformers", "accelerate"):
    if importlib.util.find_spec(package) is None:
        sys.exit(f"this example needs the package {package}: pip install -r requirements-dev.txt")

import torch  # noqa: E402
from train_lm import read_corpus  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import epmoe.integrations.transformers  # noqa: E402, F401


def save_small_model(folder):
    """Save a Qwen3-MoE with random parameters whose tokens are the bytes of the text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", vocab_size=256, hidden_size=64, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8,
                                  num_experts_per_tok=2, moe_intermediate_size=64, intermediate_size=128,
                                  max_position_embeddings=512, eos_token_id=None, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def load_sharded(folder, world_size):
    """Load a model, with 1 / world_size of the experts on each rank.  This is all that epmoe needs."""
    config = DistributedConfig(fsdp_size=world_size, ep_size=world_size, ep_implementation="epmoe")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)


def windows(length):
    """Return the training and the validation text in windows of `length` bytes: [N, length] each."""
    return [t[: len(t) // length * length].view(-1, length) for t in read_corpus()]
