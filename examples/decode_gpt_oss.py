"""Decode with a small gpt-oss whose experts are in MXFP4 and spread over the ranks.

    python examples/decode_gpt_oss.py
    torchrun --nproc-per-node 4 examples/decode_gpt_oss.py

Rank 0 saves a model with random parameters as gpt-oss is published: a folder with config.json and safetensors
in which the experts have 4 bits.  Each rank reads its own experts and all other parameters, and decodes a
prompt of its own.  The program compares MXFP4 with the same weights in bfloat16, with the model in one
process, and with transformers itself.  The parameters are random, so the texts mean nothing.  It needs the
packages transformers and safetensors.
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from _launch import launch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, Mxfp4Config  # noqa: E402
from transformers.utils import logging  # noqa: E402

import epmoe  # noqa: E402
from epmoe.gemm import four_bit  # noqa: E402

NEW_TOKENS, MAX_TOKENS = 24, 16  # tokens to decode; the most tokens of a rank in one call
DTYPE = torch.bfloat16
WEIGHTS = "gate_up_proj", "down_proj"
logging.set_verbosity_error()
logging.disable_progress_bar()


def save_checkpoint(folder):
    """Save a small gpt-oss whose tokens are bytes, with the experts in MXFP4."""
    config = GptOssConfig(vocab_size=256, hidden_size=256, intermediate_size=256, num_local_experts=8,
                          num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4,
                          num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, eos_token_id=None,
                          pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 150000.0})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    state = {}
    for key, t in model.state_dict().items():
        t = t.normal_(0, 0.4)
        if key.endswith(WEIGHTS):  # [E, in, out]
            state[f"{key}_blocks"], state[f"{key}_scales"] = epmoe.quantize_mxfp4(t.mT)
        else:
            state[key] = t
    save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)


def load(folder, world, device, weight_dtype):
    """Return the model, with the experts of this rank of a world in EPMoE modules.

    weight_dtype: "mxfp4", or None: the same weights in bfloat16.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # no memory for the experts of the other ranks
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    shared = dict(ep_group=world, max_tokens=MAX_TOKENS, device=device, rank_invariant=True)
    for block in model.model.layers:
        activation = epmoe.GptOss(limit=getattr(config, "swiglu_limit", 7.0))  # not all versions have it
        moe = epmoe.EPMoE(config.hidden_size, config.intermediate_size, config.num_local_experts,
                          config.num_experts_per_tok, activation=activation,
                          dtype=DTYPE, bias=True, weight_dtype=weight_dtype, **shared)
        block.mlp.experts = moe
        shared = dict(layer=moe.layer, rank_invariant=True)  # the layers share their communication
    num = -(-config.num_local_experts // world.size)
    own = slice(world.rank * num, (world.rank + 1) * num)
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        state = {key: (file.get_slice(key)[own] if ".experts." in key else file.get_tensor(key)).to(device)
                 for key in file.keys()}
    if weight_dtype is None:
        state = in_16_bits(state)
    model.load_state_dict(state, assign=True)
    # its buffers are in no checkpoint
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def in_16_bits(state):
    """Return a state dict with MXFP4 weights in bfloat16."""
    found = {key: t for key, t in state.items() if not key.endswith(("_blocks", "_scales"))}
    for key, blocks in state.items():
        if key.endswith("_blocks"):
            name = key.removesuffix("_blocks")
            packed = four_bit.read_mxfp4(blocks, state[f"{name}_scales"])
            found[name] = four_bit.dequantize(four_bit.Mxfp4(), *packed, DTYPE)
    return found


@torch.no_grad()
def decode(model, prompt):
    """Return (the tokens after the prompt, seconds)."""
    options = dict(attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0)
    model.generate(prompt, max_new_tokens=2, **options)  # the first calls make buffers
    start = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=NEW_TOKENS, **options)[0, prompt.shape[1]:].tolist()
    return tokens, time.perf_counter() - start


def num_bytes(module):
    return sum(p.numel() * p.itemsize for p in module.parameters())


def close(model):
    model.model.layers[0].mlp.experts.finalize()


def main(rank, world_size, device):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    folder = folder[0]
    if rank == 0:
        save_checkpoint(folder)
    dist.barrier()
    prompt = torch.tensor([list(b"the experts "[: 5 + rank])], device=device)

    world, tokens, lines = epmoe.World(), {}, []
    for name, weight_dtype in (("bfloat16", None), ("MXFP4", "mxfp4")):
        model = load(folder, world, device, weight_dtype)
        tokens[name], seconds = decode(model, prompt)
        slowest = torch.tensor(seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        experts = sum(num_bytes(block.mlp.experts) for block in model.model.layers)
        lines.append(f"  {name:10}{world_size * NEW_TOKENS / slowest.item():10.0f}{experts:16,}"
                     f"{num_bytes(model):18,}")
        close(model)

    alone = load(folder, epmoe.thread_worlds(1)[0], device, "mxfp4")
    in_one_process, _ = decode(alone, prompt)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True),
                                                  dtype=DTYPE).to(device)
    with torch.no_grad():
        got, want = (model(input_ids=prompt, use_cache=False).logits.float() for model in (alone, theirs))
    close(alone)
    difference = ((got - want).norm() / want.norm()).item()
    assert tokens["MXFP4"] == tokens["bfloat16"], f"rank {rank}: MXFP4 and bfloat16 differ: {tokens}"
    assert tokens["MXFP4"] == in_one_process, f"rank {rank}: {tokens['MXFP4']}, alone {in_one_process}"
    assert difference < 0.05, f"rank {rank}: the logits differ from those of transformers by {difference}"
    dist.barrier()
    world.close()
    if rank == 0:
        print(f"{world_size} ranks on {device.type}, each with a prompt: {NEW_TOKENS} new tokens\n")
        print(f"  {'experts':10}{'tokens/s':>10}{'bytes of them':>16}{'of the model':>18}   on a rank")
        print("\n".join(lines))
        print(f"\ntokens of rank 0: {tokens['MXFP4']}")
        print(f"logits beside transformers in bfloat16: {difference:.1e} of their norm")
        print("MXFP4, bfloat16 and the model in one process decode the same tokens on all ranks: ok")


if __name__ == "__main__":
    launch(main)
