"""Fine-tune a small language model with a LoRA adapter on its experts, save the adapter, and load it.

    python examples/lora.py
    torchrun --nproc-per-node 2 examples/lora.py

The model learns a rule: which token comes after each token.  Then an adapter learns another rule, and
everything else stays as it is.  The file of the adapter has the names and shapes of peft, and the experts of
all ranks.  A new model with the first weights and this file gives the same logits.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _launch import launch
from torch import nn

import epmoe

VOCABULARY, HIDDEN, INNER, EXPERTS, TOPK, TOKENS = 32, 64, 96, 8, 2, 128
STEPS, R, ALPHA = 60, 4, 8


class Model(nn.Module):
    """An embedding, one layer of experts, and a head."""

    def __init__(self, dtype, device):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=dtype, device=device)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=dtype, device=device)
        self.experts = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, max_tokens=TOKENS, dtype=dtype,
                                   device=device)
        self.head = nn.Linear(HIDDEN, VOCABULARY, dtype=dtype, device=device)

    def forward(self, tokens):
        x = F.rms_norm(self.embedding(tokens), (HIDDEN,))
        weights, idx = self.router(x).float().softmax(-1).topk(TOPK)
        return self.head(F.rms_norm(x + self.experts(x, idx, weights), (HIDDEN,))).float()


def train(model, rule, parameters, generator):
    """Let parameters learn which token follows each.  Returns the losses, means over the ranks."""
    own = {id(p) for p in epmoe.expert_parameters(model)}
    optimizer = torch.optim.AdamW(parameters, 0.01)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator).to(rule.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), rule[tokens])
        loss.backward()
        for p in parameters:  # the gradients of experts are sums over the tokens of all ranks already
            if id(p) not in own:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        epmoe.clip_grad_norm_(model, 1.0)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


def main(rank, world_size, device):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model(dtype, device)
    model.experts.gradient_scale = 1 / world_size
    first, second = (torch.randperm(VOCABULARY).to(device) for _ in range(2))
    generator = torch.Generator().manual_seed(rank)  # each rank has its own tokens
    train(model, first, list(model.parameters()), generator)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    base_file, adapter_file = (os.path.join(folder[0], name) for name in ("base.pt", "adapter.pt"))
    whole = epmoe.whole_state_dict(model)
    if rank == 0:
        torch.save(whole, base_file)

    # The adapter: its factors are the only parameters that are trained.
    model.requires_grad_(False)
    model.experts.add_adapter("second", r=R, alpha=ALPHA)
    model.experts.set_adapter("second")
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = train(model, second, trained, generator)
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)

    state = model.experts.adapter_state_dict("second")  # collective; on rank 0 the factors of all experts
    if rank == 0:
        torch.save(state, adapter_file)
    dist.barrier()

    # A new model, as another program would make it.
    other = Model(dtype, device)
    other.load_state_dict(torch.load(base_file, weights_only=True))
    other.experts.load_adapter("second", torch.load(adapter_file, weights_only=True), alpha=ALPHA)
    other.experts.set_adapter("second")
    tokens = torch.arange(VOCABULARY, device=device)
    with torch.no_grad():
        want, got = model(tokens), other(tokens)
        other.experts.set_adapter(None)
        without = other(tokens)
    is_same = torch.equal(got, want)
    knows = [(logits.argmax(-1) == rule).float().mean().item() for logits, rule in
             ((want, second), (without, first))]
    model.experts.finalize()
    other.experts.finalize()
    dist.barrier()
    if rank == 0:
        for file in (base_file, adapter_file):
            os.remove(file)
        os.rmdir(folder[0])
        num = sum(t.numel() for t in state.values())
        print(f"{world_size} ranks on {device.type}, {EXPERTS} experts, top {TOPK}, {dtype}")
        print(f"the adapter has {num} numbers, the experts {EXPERTS * 3 * HIDDEN * INNER}")
        print(f"loss on the second rule: {losses[0]:.2f} at first, {losses[-1]:.2f} after {STEPS} steps")
        print(f"tokens that follow the second rule with the adapter: {knows[0]:.0%}; the first rule without "
              f"it: {knows[1]:.0%}")
    assert is_same, "the loaded adapter gives other logits"
    assert losses[-1] < 0.2 * losses[0] and min(knows) > 0.9, (losses[0], losses[-1], knows)
    if rank == 0:
        print("saved and loaded, the same logits: ok")


if __name__ == "__main__":
    launch(main, default_ranks=2)
