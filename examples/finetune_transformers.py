"""Fine-tune a small Mixture-of-Experts model of transformers with its Trainer; epmoe moves the tokens.

    python examples/finetune_transformers.py
    torchrun --nproc-per-node 4 examples/finetune_transformers.py

The program makes the model itself, and the text is the source code of the Python standard library.  Each rank
holds a part of the experts, and transformers shards everything else with FSDP2.  At the end the model is
saved and loaded in one process, where it must have the same loss.  It needs the packages transformers and
accelerate.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from _launch import launch
from _transformers import load_sharded, save_small_model, windows
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

STEPS, BATCH, LENGTH = 30, 4, 64


class Windows(torch.utils.data.Dataset):
    """Windows of bytes as the Trainer takes them: each is its own label."""

    def __init__(self, text):
        self.text = text

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        ids = self.text[i].long()
        return {"input_ids": ids, "labels": ids}


def main(rank, world_size, device):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # accelerate looks for them
    os.environ.setdefault("MASTER_PORT", "29500")
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    folder = folder[0]
    if rank == 0:
        save_small_model(folder)
    dist.barrier()
    train, held_out = windows(LENGTH)
    held_out = held_out[:: len(held_out) // 64][:64]
    model = load_sharded(folder, world_size)
    arguments = TrainingArguments(folder, max_steps=STEPS, per_device_train_batch_size=BATCH,
                                  per_device_eval_batch_size=BATCH, learning_rate=4e-3, warmup_steps=3,
                                  logging_steps=10, report_to=[], use_cpu=device.type == "cpu",
                                  disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False)
    trainer = Trainer(model, arguments, train_dataset=Windows(train), eval_dataset=Windows(held_out))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    model.save_pretrained(f"{folder}/tuned")
    dist.barrier()
    if rank:
        return
    whole = AutoModelForCausalLM.from_pretrained(f"{folder}/tuned", dtype=torch.float32).eval()
    with torch.no_grad():
        again = whole(input_ids=held_out.long(), labels=held_out.long()).loss.item()
    print(f"{world_size} ranks on {device.type}; validation loss {before:.3f} -> {after:.3f} nats per byte")
    print(f"the saved model in one process: {again:.3f}")
    assert after < before - 1 and abs(again - after) < 1e-2, (before, after, again)
    print("fine-tuned: ok")


if __name__ == "__main__":
    launch(main)
