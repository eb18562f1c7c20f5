"""Recipes for EPMoE: docs/checkpoints.md.

They cover gradient clipping, torch.distributed.checkpoint, FSDP, and torch.device contexts.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import epmoe
from cases import outcome, process_ranks
from pace import HANG_S, WAIT_S

pytestmark = pytest.mark.cpu_only
HIDDEN, INNER, EXPERTS, TOPK = 16, 24, 4, 2


class Block(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.moe = epmoe.EPMoE(HIDDEN, INNER, EXPERTS, TOPK, group, max_tokens=32, dtype=torch.float32,
                               device="cpu", timeout_s=WAIT_S)

    def forward(self, x):
        weight, idx = self.router(x).softmax(-1).topk(TOPK)
        return self.moe(x, idx, weight)


def _experts(model):
    """The names of the expert parameters."""
    return [f"{path}.{name}" for path, part in model.named_modules() if isinstance(part, epmoe.EPMoE)
            for name, _ in part.named_parameters()]


def _x(rank):
    return torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(rank))


def _clipped(rank, world_size):
    """Rank main: three steps with the clipping of the guide. Returns the norm and the router's weight."""
    torch.manual_seed(0)
    model = Block()
    experts = _experts(model)
    replicated = [p for n, p in model.named_parameters() if n not in experts]
    model.moe.gradient_scale = 1 / world_size
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(_x(rank)).square().mean().backward()
        for p in replicated:
            dist.all_reduce(p.grad)
            p.grad /= world_size
        norm = epmoe.clip_grad_norm_(model, 0.01)
        optimizer.step()
    model.moe.layer.world.close()
    return norm, model.router.weight.detach().clone()


def test_moe_clipping_keeps_replicated_parameters_equal():
    """Both ranks compute the same norm and router weights, which are those of a single process."""
    (norm_a, router_a), (norm_b, router_b) = process_ranks(_clipped, 2)
    [(norm, router)] = process_ranks(_clipped_alone, 1)
    assert torch.equal(router_a, router_b) and torch.equal(norm_a, norm_b)
    torch.testing.assert_close(norm_a, norm, rtol=1e-4, atol=0)
    torch.testing.assert_close(router_a, router, rtol=1e-4, atol=1e-6)


def _clipped_alone(rank, world_size):
    """Rank main: the same in one process with the tokens of both ranks."""
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(model(_x(r)).square().mean() for r in range(2)) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    model.moe.layer.world.close()
    return norm, model.router.weight.detach().clone()


def _checkpointed(rank, world_size, path, saves):
    """Rank main: save the model if `saves`, clear the parameters, and load them.

    Returns whether each parameter is right, by name.
    """
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    model = Block()
    want = {n: t.detach().clone() for n, t in model.named_parameters()}
    if saves:
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    got = {n: torch.equal(t, want[n]) for n, t in model.named_parameters()}
    model.moe.layer.world.close()
    return got


def test_moe_checkpoint_loads_on_other_number_of_ranks(tmp_path):
    """Two ranks save a checkpoint. Two, one and four ranks load it."""
    for num_ranks in (2, 1, 4):
        for got in process_ranks(_checkpointed, num_ranks, str(tmp_path), num_ranks == 2):
            assert got == {n: True for n in ("router.weight", "moe.gate_up_proj", "moe.down_proj")}


class Shared(Block):
    """A block with a shared expert, whose output is added in place or not."""

    in_place = False

    def forward(self, x):
        y, shared = super().forward(x), self.router.weight.sum() * x
        if not self.in_place:
            return y + shared
        y += shared
        return y


def _sharded(rank, world_size, in_place):
    """Rank main: the gradients of the experts, which FSDP shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    model = Shared(mesh["ep"])
    model.in_place = in_place
    fully_shard(model.moe, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model(_x(rank)).square().mean().backward()
    grads = [p.grad.full_tensor() for p in model.moe.parameters()]
    model.moe.layer.world.close()
    return grads


def test_moe_under_fsdp_allows_in_place_addition():
    """An in-place addition to the result of EPMoE gives the same gradients as a normal addition."""
    results = [process_ranks(_sharded, 2, in_place, timeout_s=HANG_S) for in_place in (True, False)]
    for in_place, normal in zip(*results):
        assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(in_place, normal, strict=True))


def _made_on_meta(rank, world_size):
    """Rank main: create a block under torch.device("meta"), initialize it, and call it.

    Returns whether the parameters are right, the outcome of a call in which rank 1 passes a tensor on the
    meta device, and the outcome of a right call.
    """
    torch.manual_seed(0)
    like = Block()
    torch.manual_seed(0)
    with torch.device("meta"):
        block = Block()
    assert block.router.weight.is_meta and not block.moe.gate_up_proj.is_meta
    block.to_empty(device="cpu")
    torch.manual_seed(0)
    block.router.reset_parameters()
    block.moe.reset_parameters()
    same = [torch.equal(a, b) for a, b in zip(block.parameters(), like.parameters(), strict=True)]
    weight, idx = block.router(_x(0)).softmax(-1).topk(TOPK)
    wrong = outcome(lambda: block.moe(_x(0).to("meta") if rank else _x(0), idx, weight))
    again = outcome(lambda: block(_x(0)).sum().backward())
    block.moe.layer.world.close()
    return same, wrong, again


def test_moe_created_under_meta_device_context():
    """EPMoE ignores the device of the context. A tensor on the meta device raises an error."""
    (same, other, again), (_, wrong, _) = process_ranks(_made_on_meta, 2)
    assert same == [True] * 3 and again.kinds == (), again
    assert wrong.kind in ("ValueError", "TypeError") and "meta" in wrong.text and "cpu" in wrong.text, wrong
    assert other.kind == "PeerError" and "rank 1" in other.text, other
