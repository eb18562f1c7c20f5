"""EPMoE as a part of models: initialization, checkpoints, autocast, dtypes, DistributedDataParallel."""

import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import epmoe
from cases import keep, outcome, process_ranks

HIDDEN, INNER, TOPK = 16, 24, 2


def make_moe(world, device, seed, **options):
    torch.manual_seed(seed)
    moe = epmoe.EPMoE(HIDDEN, INNER, 3 * world.size, TOPK, world, max_tokens=8,
                      **({"dtype": torch.float32, "device": device} | options))
    keep(world, moe)
    return moe


def routed(world, device, tokens=6, dtype=torch.float32):
    """Random x [T, H], expert indices and weights [T, K]."""
    g = torch.Generator().manual_seed(world.rank)
    weight, idx = torch.rand(tokens, 3 * world.size, generator=g).topk(TOPK)
    return torch.randn(tokens, HIDDEN, generator=g).to(device, dtype), idx.to(device), weight.to(device)


def _start(rank, world_size, bias):
    torch.manual_seed(5)
    moe = epmoe.EPMoE(HIDDEN, INNER, 6, TOPK, dtype=torch.float32, device="cpu", bias=bias)
    parameters = {n: p.detach() for n, p in moe.named_parameters()}
    moe.finalize()
    return parameters


@pytest.mark.cpu_only
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_moe_initial_values_do_not_depend_on_number_of_ranks(bias):
    """With the same seed on all ranks, each rank has its part of the parameters that a single process has.

    All experts differ from each other.
    """
    results, alone = process_ranks(_start, 2, bias), _start(0, 1, bias)
    for name, p in alone.items():
        fan_in = HIDDEN if name.startswith("gate_up") else INNER
        assert p.abs().max() <= fan_in**-0.5 and 0.4 < p.abs().mean() * fan_in**0.5 < 0.6, name
        assert len({tuple(e.flatten().tolist()) for e in p}) == len(p), f"{name}: two experts are the same"
        assert torch.equal(torch.cat([r[name] for r in results]), p), name


def test_moe_from_full_checkpoint(ranks):
    """Each rank loads the slice of its experts from each full parameter."""

    def run(world, device):
        g = torch.Generator().manual_seed(3)
        num_experts = 3 * world.size
        full = {"gate_up_proj": torch.randn(num_experts, 2 * INNER, HIDDEN, generator=g),
                "down_proj": torch.randn(num_experts, HIDDEN, INNER, generator=g)}
        moe = make_moe(world, device, 0)
        local = moe.layer.num_local_experts
        mine = slice(world.rank * local, (world.rank + 1) * local)
        moe.load_state_dict({name: p[mine] for name, p in full.items()})
        x, idx, weight = routed(world, device)
        y = moe(x, idx, weight).detach()
        moe.finalize()
        want = torch.zeros_like(x)
        for t in range(len(x)):
            for e, w in zip(idx[t].tolist(), weight[t].tolist()):
                gate, up = F.linear(x[t], full["gate_up_proj"][e].to(device)).chunk(2)
                want[t] += w * F.linear(F.silu(gate) * up, full["down_proj"][e].to(device))
        return y, want

    for y, want in ranks(run):
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)


def test_moe_under_autocast(ranks):
    """Under autocast, EPMoE converts inputs to its own dtype. Without autocast it raises TypeError."""

    def run(world, device):
        moe = make_moe(world, device, 1)
        x, idx, weight = routed(world, device)
        half = x.to(torch.bfloat16)
        want = moe(half.float(), idx, weight)
        with torch.autocast(device.type, torch.bfloat16):
            y = moe(half, idx, weight)
        without = outcome(lambda: moe(half, idx, weight))
        moe.finalize()
        return torch.equal(y, want) and y.dtype == torch.float32, without.kinds

    assert all(same and "TypeError" in kinds for same, kinds in ranks(run))


def test_moe_converted_to_another_dtype_raises(ranks):
    """After moe.bfloat16(), a call raises an error that says what to do. moe.float() repairs the module."""

    def run(world, device):
        moe = make_moe(world, device, 1)
        x, idx, weight = routed(world, device)
        want = moe(x, idx, weight)

        def call():
            return moe.bfloat16()(x.bfloat16(), idx, weight) if world.rank == 0 else moe(x, idx, weight)

        got = outcome(call)
        again = moe.float()(x, idx, weight)
        moe.finalize()
        return got, again.shape == want.shape

    for rank, (got, again) in enumerate(ranks(run)):
        assert again and ("TypeError" if rank == 0 else "PeerError") in got.kinds
        assert rank or "pass dtype=torch.bfloat16 when creating the module" in got.text


class Block(torch.nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, num_experts)
        self.moe = epmoe.EPMoE(HIDDEN, INNER, num_experts, TOPK, max_tokens=8, dtype=torch.float32,
                               device="cpu")

    def forward(self, x):
        weight, idx = self.router(x).softmax(-1).topk(TOPK)
        return x + self.moe(x, idx, weight)


def _train(rank, world_size):
    """Rank main: one training step with DistributedDataParallel, as docs/guide.md describes it.

    Returns the parameters, their gradients, the tokens, and the names of the expert parameters.
    """
    torch.manual_seed(0)
    model = Block(3 * world_size)
    own = [id(p) for p in epmoe.expert_parameters(model)]
    experts = [n for n, p in model.named_parameters() if id(p) in own]
    ddp = DistributedDataParallel(epmoe.prepare_ddp(model))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(rank))
    ddp(x).square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.moe.finalize()
    return start, grads, x, experts


@pytest.mark.cpu_only
def test_moe_with_distributed_data_parallel():
    """Every parameter has the gradient of the mean loss over ranks, as computed in one process."""
    results = process_ranks(_train, 2)
    experts = results[0][3]
    assert experts == ["moe.gate_up_proj", "moe.down_proj"]
    whole = {n: torch.cat([r[0][n] for r in results]) if n in experts else results[0][0][n]
             for n in results[0][0]}
    assert len({tuple(e.flatten().tolist()) for e in whole["moe.down_proj"]}) == 6
    whole = {n: p.requires_grad_() for n, p in whole.items()}
    loss = 0
    for _, _, x, _ in results:
        weight, idx = F.linear(x, whole["router.weight"], whole["router.bias"]).softmax(-1).topk(TOPK)
        gate, up = torch.einsum("tkch,th->tkc", whole["moe.gate_up_proj"][idx], x).chunk(2, -1)
        y = torch.einsum("tkhc,tkc,tk->th", whole["moe.down_proj"][idx], F.silu(gate) * up, weight)
        loss = loss + (x + y).square().mean() / len(results)
    loss.backward()
    for n, p in whole.items():
        got = torch.cat([r[1][n] for r in results]) if n in experts else results[1][1][n]
        torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.cpu_only
def test_moe_without_process_group_raises():
    """Under torchrun but without init_process_group, each rank would silently train a separate model."""
    text = "4 ranks were started .WORLD_SIZE., but torch.distributed is not initialized"
    with mock.patch.dict(os.environ, {"WORLD_SIZE": "4"}):
        with pytest.raises(ValueError, match=text):
            epmoe.World()


def _checkpointed(rank, world_size):
    """Rank main: whether a compiled step with activation checkpointing gives the results of eager mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block(2 * world_size)
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    step = torch.compile(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
                         backend="aot_eager", fullgraph=True)
    y, want = step(x), model(x)
    grad, = torch.autograd.grad(y.sum(), x)
    wanted, = torch.autograd.grad(want.sum(), x)
    model.moe.finalize()
    return torch.equal(y, want) and torch.allclose(grad, wanted)


@pytest.mark.long
@pytest.mark.cpu_only
def test_moe_checkpoint_inside_compiled_step():
    assert all(process_ranks(_checkpointed, 2))
