"""EPMoE with a number of experts that is not a multiple of the ranks, and with room for replicas."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, set_model_state_dict,
                                                     set_optimizer_state_dict)
from torch.nn.parallel import DistributedDataParallel

import epmoe
from cases import outcome, process_ranks
from pace import WAIT_S
from parallel_cases import HIDDEN, INNER, TOPK, close, gradients_of_one_process, state_of, tokens, whole_of

pytestmark = pytest.mark.cpu_only
WHOLE = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self, num_experts, num_physical, group=None):
        super().__init__()
        self.router = nn.Linear(HIDDEN, num_experts, bias=False)
        self.moe = epmoe.EPMoE(HIDDEN, INNER, num_experts, TOPK, group, max_tokens=32, dtype=torch.float32,
                               device="cpu", bias=True, num_physical=num_physical, timeout_s=WAIT_S)

    def forward(self, x):
        weight, idx = self.router(x).softmax(-1).topk(TOPK)
        return x + self.moe(x, idx, weight)


def make(how, num_experts, spare, seed=0):
    """A model with `spare` physical experts more than needed on each rank, and what is called to train it."""
    torch.manual_seed(seed)
    size = dist.get_world_size()
    num_physical = (-(-num_experts // size) + spare) * size if spare else None
    model = Block(num_experts, num_physical)
    if how == "ddp":
        return model, DistributedDataParallel(epmoe.prepare_ddp(model))
    from torch.distributed.fsdp import fully_shard

    return fully_shard(epmoe.prepare_fsdp(model)), model


# ---- training ----


def _train(rank, size, how, num_experts, spare):
    model, trained = make(how, num_experts, spare)
    whole = epmoe.whole_state_dict(model)
    trained(tokens(rank)).square().mean().backward()
    empty = [i for i, e in enumerate(model.moe._held) if e < 0]
    for p in model.moe.parameters():
        p, grad = (t.to_local() if hasattr(t, "to_local") else t for t in (p, p.grad))
        assert not p[empty].any() and not grad[empty].any()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    before = {n: p.grad for n, p in model.named_parameters()}
    with torch.no_grad():  # the gradients, as a whole model
        for p in model.parameters():
            p.copy_(p.grad)
    gradients = epmoe.whole_state_dict(model)
    close(model)
    return whole, gradients, norm, sorted(before)


@pytest.mark.parametrize("size, how, num_experts, spare", [
    (1, "ddp", 5, 2), (2, "ddp", 5, 0), (3, "ddp", 4, 1), (4, "ddp", 6, 0), (4, "fsdp", 6, 0),
    (2, "fsdp", 4, 2)])
def test_moe_experts_gradients_are_those_of_one_process(size, how, num_experts, spare):
    (whole, gradients, norm, names), *_ = process_ranks(_train, size, how, num_experts, spare)
    assert all(t.shape[0] == num_experts for n, t in whole.items()) and sorted(whole) == names
    wanted = gradients_of_one_process(whole, size)
    for name, want in wanted.items():
        torch.testing.assert_close(gradients[name], want, rtol=1e-5, atol=1e-7, msg=name)
    of_all = torch.stack([t.norm() for t in wanted.values()]).norm()
    torch.testing.assert_close(norm, of_all, rtol=1e-5, atol=0)


def _start(rank, size, num_experts, spare):
    model, _ = make("ddp", num_experts, spare, seed=4)
    whole = epmoe.whole_state_dict(model)
    close(model)
    return whole


def test_moe_experts_start_alike_on_any_number_of_ranks():
    want, *_ = process_ranks(_start, 1, 5, 0)
    for size, spare in ((2, 0), (4, 1)):
        got = process_ranks(_start, size, 5, spare)[0]
        assert got.keys() == want.keys() and all(torch.equal(got[n], t) for n, t in want.items())


# ---- state dicts ----


def _save(rank, size, how, spare, path):
    model, trained = make(how, 5, spare)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        trained(tokens(rank)).square().mean().backward()
        optimizer.step()
    state = state_of(model, optimizer)
    assert all(t.shape[0] == 5 for n, t in state["model"].items())
    dcp.save(state, checkpoint_id=path)
    whole, ours = whole_of(model, optimizer), epmoe.whole_state_dict(model)
    if rank == 0:
        assert all(torch.equal(ours[n], t) for n, t in whole[0].items())
    close(model)
    return whole


def _load(rank, size, how, spare, path, whole):
    """Load the checkpoint; then load it as whole tensors into another model."""
    results = []
    for with_dcp in (True, False):
        model, trained = make(how, 5, spare, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        if with_dcp:
            state = state_of(model, optimizer)
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        else:
            states = {}
            for key, t in whole[1].items():
                name, _, field = key.rpartition(".")
                states.setdefault(name, {})[field] = t.clone()
            set_model_state_dict(model, dict(whole[0]), options=WHOLE)
            group = state_of(model, optimizer)["optimizer"]["param_groups"]
            state = {"state": states, "param_groups": group}
            set_optimizer_state_dict(model, optimizer, state, options=WHOLE)
        results.append(whole_of(model, optimizer))
        trained(tokens(rank)).square().mean().backward()
        optimizer.step()
        for p in model.moe.parameters():
            held = torch.tensor(model.moe._held) < 0
            assert not (p.to_local() if hasattr(p, "to_local") else p)[held].any()
    close(model)
    return results


@pytest.mark.parametrize("how, size, spare, others", [
    ("ddp", 4, 0, ((3, 0), (2, 1), (1, 0))), ("fsdp", 2, 1, ((4, 0), (1, 3)))])
def test_moe_experts_checkpoints_have_all_experts_once(tmp_path, how, size, spare, others):
    want = process_ranks(_save, size, how, spare, str(tmp_path))[0]
    assert all(t.shape[0] == 5 for n, t in want[1].items() if t.dim() and "moe" in n)
    for size, spare in others:
        for way, got in enumerate(process_ranks(_load, size, how, spare, str(tmp_path), want)[0]):
            for wanted, loaded in zip(want, got, strict=True):
                assert wanted.keys() == loaded.keys()
                differ = [n for n, t in wanted.items() if not torch.equal(t, loaded[n])]
                assert not differ, (size, spare, way, differ)


def _mistakes(rank, size):
    from torch.distributed.fsdp import fully_shard

    got = []
    model = make("ddp", 5, 0)[0]
    for rows in (6, 4):  # 6 is P: a state dict has the experts alone
        wrong = {n: t.new_zeros(rows, *t.shape[1:]) for n, t in model.moe.state_dict().items()}
        got.append(outcome(lambda wrong=wrong: model.moe.load_state_dict(wrong)))
    own = model.moe.state_dict()
    assert own["down_proj"].to_local().shape[0] == (3 if rank == 0 else 2)
    model.moe.load_state_dict({n: t.to_local() for n, t in own.items()})
    got.append(outcome(lambda: epmoe.EPMoE(16, 16, 5, 2, layer=model.moe.layer, num_physical=8)))
    got.append(outcome(lambda: epmoe.EPMoE(16, 16, 5, 1, device="cpu", num_physical=5)))
    got.append(outcome(lambda: epmoe.EPMoE(16, 16, 5 + rank, 1, device="cpu")))
    model.moe.set_expert_map(epmoe.balance_experts([9, 1, 1, 1, 1], size))
    got.append(outcome(model.state_dict))
    got.append(outcome(lambda: model.moe.load_state_dict(own)))
    model.moe.set_expert_map(None)
    model.moe.load_state_dict(own)
    fully_shard(epmoe.prepare_fsdp(model))
    got.append(outcome(lambda: model.moe.set_expert_map(None)))
    close(model)
    alone = Block(3, 4, epmoe.thread_worlds(1)[0])
    got.append(outcome(lambda: fully_shard(alone)))
    return got


def test_moe_experts_mistakes():
    for got in process_ranks(_mistakes, 2):
        texts = ("has the experts", "has the experts", "physical experts 8, but the shared layer has 6",
                 "num_physical 5: must be a multiple of the 2 ranks, and at least 6", "num_experts 6",
                 "set_expert_map(None)", "set_expert_map(None)", "FSDP has sharded",
                 "would be sharded over 2 ranks")
        for text, o in zip(texts, got, strict=True):
            assert text in str(o)
