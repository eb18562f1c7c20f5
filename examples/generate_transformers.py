"""Generate with a Mixture-of-Experts model of transformers whose experts are spread over the ranks.

    python examples/generate_transformers.py
    torchrun --nproc-per-node 4 examples/generate_transformers.py

Each rank has prompts of its own, of another length.  The texts must be those of the same model in one
process.  The parameters are random, so the texts mean nothing.  It needs the packages transformers and
accelerate.
"""

import tempfile

import torch
import torch.distributed as dist
from _launch import launch
from _transformers import load_sharded, save_small_model
from transformers import AutoModelForCausalLM


def main(rank, world_size, device):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    if rank == 0:
        save_small_model(folder[0])
    dist.barrier()
    model = load_sharded(folder[0], world_size)
    prompt = torch.tensor([list(b"def main():"[: 4 + rank])], device=device)
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)
    tokens = model.generate(prompt, **options)
    whole = AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float32).to(device)
    want = whole.generate(prompt, **options)
    assert torch.equal(tokens, want), f"rank {rank}: {tokens.tolist()}, in one process {want.tolist()}"
    dist.barrier()
    if rank == 0:
        print(f"{world_size} ranks on {device.type}: {bytes(tokens[0].tolist())!r}")
        print("the texts of all ranks are those of one process: ok")


if __name__ == "__main__":
    launch(main)
