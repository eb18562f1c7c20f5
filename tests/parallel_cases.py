"""A model with experts on several ranks beside data parallelism, and its gradients in one process."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     get_optimizer_state_dict)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune

import epmoe
from cases import outcome
from pace import WAIT_S

HIDDEN, INNER, EXPERTS, TOPK = 16, 24, 4, 2


class Block(nn.Module):
    def __init__(self, group=None, bias=True):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.moe = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, group, max_tokens=32, dtype=torch.float32,
                               device="cpu", bias=bias, timeout_s=WAIT_S)

    def forward(self, x):
        weight, idx = self.router(x).softmax(-1).topk(TOPK)
        return x + self.moe(x, idx, weight)


def make(group=None, bias=True):
    torch.manual_seed(0)
    return Block(group, bias)


def tokens(rank):
    return torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(rank))


def close(model):
    model.moe.layer.world.close()


def whole_model(state, xs):
    """The mean loss over ranks in one process, as a function of a whole state dict of plain tensors."""
    loss = 0
    for x in xs:
        weight, idx = F.linear(x, state["router.weight"]).softmax(-1).topk(TOPK)
        h = torch.einsum("tkch,th->tkc", state["moe.gate_up_proj"][idx], x)
        gate, up = (h + state["moe.gate_up_proj_bias"][idx]).chunk(2, -1)
        y = torch.einsum("tkhc,tkc->tkh", state["moe.down_proj"][idx], F.silu(gate) * up)
        y = ((y + state["moe.down_proj_bias"][idx]) * weight[..., None]).sum(1)
        loss = loss + (x + y).square().mean() / len(xs)
    return loss


def gradients_of_one_process(state, num_ranks):
    state = {n: t.clone().requires_grad_() for n, t in state.items()}
    whole_model(state, [tokens(r) for r in range(num_ranks)]).backward()
    return {n: t.grad for n, t in state.items()}


def _prepared(rank, world_size, how):
    model = make()
    state = epmoe.whole_state_dict(model)
    if how == "copied":
        model = copy.deepcopy(epmoe.prepare_ddp(model))
    if how == "compiled":
        model.forward = torch.compile(model.forward, backend="eager")
    ddp = DistributedDataParallel(epmoe.prepare_ddp(epmoe.prepare_ddp(model)))
    num = 2 if how == "accumulated" else 1
    for _ in range(num):
        (ddp(tokens(rank)).square().mean() / num).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    close(model)
    return state, grads


def _sharded_wrongly(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make()
    got = outcome(lambda: fully_shard(model, mesh=init_device_mesh("cpu", (world_size,))))
    close(model)
    return got


def check_prepared_ddp(run, how):
    """run: process_ranks, or the same for ranks of several nodes."""
    results = run(_prepared, 2, how)
    for name, want in gradients_of_one_process(results[0][0], 2).items():
        got = [grads[name] for _, grads in results]
        if name.startswith("moe."):
            torch.testing.assert_close(torch.cat(got), want, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(*got)
            torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-6)


def check_wrong_mesh(run):
    for got in run(_sharded_wrongly, 2):
        assert "ValueError" in str(got) and "fully_shard(moe" in str(got), got


class Plus(nn.Module):
    """A parametrization: a matrix of low rank for each expert is added, as LoRA does."""

    def __init__(self, weight, generator):
        super().__init__()
        num, rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(num, 2, columns, generator=generator) / 4)
        self.b = nn.Parameter(torch.randn(num, rows, 2, generator=generator) / 4)

    def forward(self, weight):
        return weight + self.b @ self.a


class Times(nn.Module):
    """A parametrization with a parameter and a buffer that have no row for each expert, as a quantiser's."""

    def __init__(self, generator):
        super().__init__()
        self.shift = nn.Parameter(torch.rand(3, generator=generator))
        self.register_buffer("gain", torch.rand((), generator=generator))

    def forward(self, weight):
        return weight * (self.shift.mean() + self.gain)


class Delta(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight + self.delta


class Adapters(nn.Module):
    """A module that wraps an EPMoE and has adapters of experts, which it adds in forward, as PEFT's."""

    def __init__(self, moe, generator):
        super().__init__()
        self.base_layer, self.of_down = moe, Plus(moe.down_proj, generator)

    def forward(self, *inputs):
        delta = Delta(self.of_down.b @ self.of_down.a)
        parametrize.register_parametrization(self.base_layer, "down_proj", delta)
        try:
            return self.base_layer(*inputs)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "down_proj", leave_parametrized=False)


BELOW = ["lora", "quantised", "weight_norm", "pruned", "wrapped"]


def adapt(model, kind, seed=None, adopted=True):
    """Put something below the EPMoE of a model, or around it, with other numbers on each rank."""
    moe, generator = model.moe, torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(moe, name)
        if kind == "lora":
            parametrize.register_parametrization(moe, name, Plus(weight, generator))
        elif kind == "quantised":
            parametrize.register_parametrization(moe, name, Times(generator))
        elif kind == "weight_norm":
            nn.utils.parametrizations.weight_norm(moe, name)
        elif kind == "pruned":
            prune.custom_from_mask(moe, name, torch.rand(weight.shape, generator=generator) < 0.5)
    if kind == "wrapped":
        model.moe = Adapters(moe, generator)
        if adopted:
            moe.adopt(model.moe)
    return moe


def tensors_of(model):
    return dict((*model.moe.named_parameters(), *model.moe.named_buffers()))


def copies(named):
    return {n: t.detach().clone() for n, t in named.items()}


def same(got, want):
    return got.keys() == want.keys() and all(torch.equal(t, want[n]) for n, t in got.items())


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def state_of(model, optimizer):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def whole_of(model, optimizer):
    """The whole state of model and AdamW on rank 0, flat and of plain tensors."""
    model_state = get_model_state_dict(model, options=FULL)
    states = get_optimizer_state_dict(model, optimizer, options=FULL).get("state", {})
    return ({n: t.clone() for n, t in model_state.items()},
            {f"{n}.{k}": t.clone() for n, s in states.items() for k, t in s.items()})
