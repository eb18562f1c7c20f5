"""EPMoE compiled by inductor.

Inductor reorders operators depending on sizes, which differ between ranks. The order of epmoe's operators
must be the same on all ranks.
"""

import shutil

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import first, generator, keep
from pace import HANG_S

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler for the CPU needs g++")


class Block(nn.Module):
    def __init__(self, world, device, **options):
        super().__init__()
        self.router = nn.Linear(32, 2 * world.size, device=device)
        self.moe = epmoe.EPMoE(32, 24, 2 * world.size, 2, world, dtype=torch.float32, device=device,
                               **options)

    def forward(self, x):
        weight, idx = self.router(x).softmax(-1).topk(2)
        return x + self.moe(x, idx, weight)


def check_compiled(fn, inputs, parameters, **options):
    """Assert that the result and the gradients of the compiled fn are those of eager mode."""
    seen = []
    for f in (fn, torch.compile(fn, fullgraph=True, **options)):
        y = f(*inputs)
        grads = torch.autograd.grad(y, (*inputs, *parameters)) if y.requires_grad else ()
        seen.append([y.detach(), *grads])
    for want, got in zip(*seen, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def side_by_side(world, device):
    """Two modules share a layer and have independent inputs. One input has many tokens, the other few.

    On odd ranks it is the other way round.
    """
    a = Block(world, device, max_tokens=512)
    b = Block(world, device, layer=a.moe.layer)
    keep(world, a, b)

    def loss(text, image):
        return a(text).square().sum() + b(image).square().sum()

    sizes, g = (200, 4) if world.rank % 2 == 0 else (4, 200), generator(1, world.rank)
    inputs = [torch.randn(n, 32, generator=g).to(device) for n in sizes]
    return loss, inputs, [*a.parameters(), *b.parameters()]


def side_by_side_in_inference(world, device):
    loss, inputs, _ = side_by_side(world, device)
    with torch.no_grad():
        check_compiled(loss, inputs, ())


def side_by_side_in_training(world, device):
    loss, inputs, parameters = side_by_side(world, device)
    check_compiled(loss, [t.requires_grad_() for t in inputs], parameters)


def no_tokens_here(world, device):
    """On a rank without tokens, no data dependency orders the backward of two layers."""
    blocks = nn.Sequential(*(Block(world, device, max_tokens=64, capacity=128 * world.size)
                             for _ in range(2)))
    keep(world, blocks)
    x = torch.randn(0 if world.rank == 1 else 50, 32, generator=generator(2, world.rank))
    x = x.to(device).requires_grad_()
    check_compiled(lambda x: blocks(x).square().sum(), [x], list(blocks.parameters()), dynamic=True)


def recomputed(world, device):
    """Checkpointing recomputes a block in its backward. All ranks must start this at the same point."""
    blocks = nn.ModuleList(Block(world, device, max_tokens=512) for _ in range(2))
    keep(world, blocks)

    def loss(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().sum()

    x = torch.randn(200 if world.rank % 2 == 0 else 4, 32, generator=generator(3, world.rank))
    x = x.to(device).requires_grad_()
    check_compiled(loss, [x], list(blocks.parameters()), dynamic=True)


PROGRAMS = {"inference": side_by_side_in_inference, "training": side_by_side_in_training,
            "no_tokens_here": no_tokens_here, "recomputed": recomputed}


def run_program(world, device, name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    PROGRAMS[name](world, device)
    return True


@pytest.mark.parametrize("name", first(1, PROGRAMS))
def test_moe_inductor_keeps_order(ranks, name):
    """Ranks that disagree about the order would deadlock or compute wrong results."""
    assert all(ranks.isolated(run_program, name, world_size=2, timeout_s=HANG_S))


def test_moe_inductor_keeps_other_passes():
    """KeepOrder calls the passes that were set before it.

    It has a uuid, with which torch caches graphs, only if all these passes have one.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from epmoe.a2a.inductor import KeepOrder

    class Theirs(CustomGraphPass):
        seen = 0

        def __call__(self, graph):
            self.seen += 1

        def uuid(self):
            return "theirs"

    def without_uuid(graph):
        pass

    theirs = Theirs()
    KeepOrder(theirs)(torch.fx.Graph())
    assert theirs.seen == 1 and "theirs" in KeepOrder(theirs).uuid()
    assert KeepOrder(None).uuid() != KeepOrder(theirs).uuid()
    KeepOrder([theirs, theirs])(torch.fx.Graph())
    assert theirs.seen == 3
    assert KeepOrder([theirs, without_uuid]).uuid() is None and KeepOrder(without_uuid).uuid() is None


def test_moe_inductor_gets_no_search(ranks):
    """On GPUs, inductor of torch 2.11 searches a view from the beginning of the tensor of which it is one."""

    def run(world, device):
        torch._dynamo.reset()
        moe = epmoe.EPMoE(32, 24, 2 * world.size, 2, world, dtype=torch.float32, device=device, max_tokens=8,
                          bias=True, capacity=16 * world.size)
        seen = []

        def note(graph, _):
            seen.append(graph.code)
            return make_boxed_func(graph.forward)

        x, weight = torch.randn(8, 32, device=device).requires_grad_(), torch.ones(8, 2, device=device)
        idx = torch.arange(2, device=device).expand(8, 2)
        compiled = torch.compile(moe, fullgraph=True, backend=aot_autograd(fw_compiler=note))
        compiled(x, idx, weight.requires_grad_()).sum().backward()
        moe.finalize()
        return seen

    for forward, backward in ranks(run):
        assert "epmoe.dispatch" in forward and "epmoe.combine" in backward
        assert "searchsorted" not in forward + backward
