"""Fine-tune a small Mixture-of-Experts model of transformers with LoRA, by its Trainer, on several ranks.

    python examples/finetune_lora.py
    torchrun --nproc-per-node 2 examples/finetune_lora.py

The program makes the model itself, and the text is the source code of the Python standard library.  Each rank
holds a part of the experts and trains their adapters.  The adapters of the attention are on all ranks, and
DistributedDataParallel averages their gradients.  At the end the adapter is saved.  peft loads it in one
process, onto the experts of transformers, where the logits must be the same.  The program needs the packages
transformers, accelerate and peft.
"""

import importlib.util
import os
import sys
import tempfile

if importlib.util.find_spec("peft") is None:
    sys.exit("this example needs the package peft: pip install peft")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _launch import launch  # noqa: E402
from _transformers import save_small_model, windows  # noqa: E402
from finetune_transformers import Windows  # noqa: E402
from peft import LoraConfig, PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402

import epmoe  # noqa: E402
from epmoe.integrations.peft import add_lora, save_lora  # noqa: E402
from epmoe.integrations.transformers import spread_experts  # noqa: E402

STEPS, BATCH, LENGTH = 40, 4, 64
CONFIG = LoraConfig(r=8, lora_alpha=32, task_type="CAUSAL_LM",
                    target_modules=["q_proj", "v_proj", "lm_head"],  # the head of this model is random, too
                    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


class LoraTrainer(Trainer):
    """The Trainer, which saves the adapter.  All ranks call save_model, which here collects their experts."""

    def save_model(self, output_dir=None, _internal_call=False):
        save_lora(self.model, output_dir or self.args.output_dir)


def main(rank, world_size, device):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # accelerate looks for them
    os.environ.setdefault("MASTER_PORT", "29500")
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    folder = folder[0]
    if rank == 0:
        save_small_model(folder)
    dist.barrier()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    spread_experts(model, max_tokens=BATCH * LENGTH)
    add_lora(model, CONFIG)
    epmoe.prepare_ddp(model)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

    train, held_out = windows(LENGTH)
    held_out = held_out[:: len(held_out) // 64][:64]
    arguments = TrainingArguments(f"{folder}/run", max_steps=STEPS, per_device_train_batch_size=BATCH,
                                  per_device_eval_batch_size=BATCH, learning_rate=1e-2, warmup_steps=3,
                                  logging_steps=10, report_to=[], use_cpu=device.type == "cpu",
                                  disable_tqdm=True, save_steps=STEPS // 2, save_only_model=True,
                                  dataloader_pin_memory=False)
    trainer = LoraTrainer(model, arguments, train_dataset=Windows(train), eval_dataset=Windows(held_out))
    assert trainer.accelerator.num_processes == world_size
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/adapter")
    ids = held_out[:BATCH].long().to(device)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    dist.barrier()
    if rank:
        return

    # As another program would load it, in one process and without epmoe.
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    whole = PeftModel.from_pretrained(base.to(device), f"{folder}/adapter").eval()
    with torch.no_grad():
        difference = (whole(input_ids=ids).logits - logits).abs().max() / logits.abs().max()
    num_all = sum(p.numel() for p in base.parameters())
    print(f"{world_size} ranks on {device.type}; rank 0 trains {num_trained} numbers, the model has "
          f"{num_all}")
    print(f"validation loss {before:.3f} -> {after:.3f} nats per byte")
    print(f"saved: {', '.join(sorted(os.listdir(f'{folder}/adapter')))}; and while it trained: "
          f"{', '.join(sorted(os.listdir(f'{folder}/run')))}")
    print(f"largest difference of the logits with peft in one process: {difference:.1e}")
    assert after < before - 1 and difference < 1e-5, (before, after, difference)
    print("fine-tuned with LoRA: ok")


if __name__ == "__main__":
    launch(main, default_ranks=2)
