"""EPMoE compiled by inductor, which moves operators as their sizes make it worth: sizes differ from rank to
rank, the order must not.
"""

import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import epmoe
from cases import generator, keep
from pace import HANG_S

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler for the CPU wants g++")


class Block(nn.Module):
    def __init__(self, world, device, **options):
        super().__init__()
        self.router = nn.Linear(32, 2 * world.size, device=device)
        self.moe = epmoe.EPMoE(32, 24, 2 * world.size, 2, world, dtype=torch.float32, device=device,
                               **options)

    def forward(self, x):
        weight, idx = self.router(x).softmax(-1).topk(2)
        return x + self.moe(x, idx, weight)


def both(fn, inputs, parameters, **options):
    """Whether fn compiled gives what it gives otherwise: its result, and all gradients."""
    seen = []
    for f in (fn, torch.compile(fn, fullgraph=True, **options)):
        y = f(*inputs)
        seen.append([y.detach(), *(torch.autograd.grad(y, (*inputs, *parameters)) if y.requires_grad
                                   else ())])
    for want, got in zip(*seen, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def side_by_side(world, device):
    """Two modules that share a layer, of inputs that have nothing to do with each other: many tokens here,
    few there.
    """
    a = Block(world, device, max_tokens=512)
    b = Block(world, device, layer=a.moe.layer)
    keep(world, a, b)

    def loss(text, image):
        return a(text).square().sum() + b(image).square().sum()

    sizes, g = (200, 4) if world.rank % 2 == 0 else (4, 200), generator(1, world.rank)
    inputs = [torch.randn(n, 32, generator=g).to(device) for n in sizes]
    with torch.no_grad():
        both(loss, inputs, ())
    both(loss, [t.requires_grad_() for t in inputs], [*a.parameters(), *b.parameters()])


def no_tokens_here(world, device):
    """Nothing ties the backward of two layers together where there is no token."""
    blocks = nn.Sequential(*(Block(world, device, max_tokens=64, capacity=128 * world.size)
                             for _ in range(2)))
    keep(world, blocks)
    x = torch.randn(0 if world.rank == 1 else 50, 32,
                    generator=generator(2, world.rank)).to(device).requires_grad_()
    both(lambda x: blocks(x).square().sum(), [x], list(blocks.parameters()), dynamic=True)


def recomputed(world, device):
    """Checkpointing computes a block again in its backward, which others might begin with earlier."""
    blocks = nn.ModuleList(Block(world, device, max_tokens=512) for _ in range(2))
    keep(world, blocks)

    def loss(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().sum()

    x = torch.randn(200 if world.rank % 2 == 0 else 4, 32,
                    generator=generator(3, world.rank)).to(device).requires_grad_()
    both(loss, [x], list(blocks.parameters()), dynamic=True)


def in_order(world, device, name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    {"side_by_side": side_by_side, "no_tokens_here": no_tokens_here,
     "recomputed": recomputed}[name](world, device)
    return True


@pytest.mark.parametrize("name", ["side_by_side", "no_tokens_here", "recomputed"])
def test_moe_inductor_keeps_order(ranks, name):
    assert all(ranks.isolated(in_order, name, world_size=2, timeout_s=HANG_S))


def test_moe_inductor_passes_of_others():
    """A pass that was there before ours goes on being called; and graphs are kept only where both say who
    they are.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from epmoe.inductor import KeepOrder

    class Theirs(CustomGraphPass):
        seen = 0

        def __call__(self, graph):
            self.seen += 1

        def uuid(self):
            return "theirs"

    theirs = Theirs()
    KeepOrder(theirs)(torch.fx.Graph())
    assert (
        theirs.seen == 1
        and "theirs" in KeepOrder(theirs).uuid()
        and KeepOrder(None).uuid() != KeepOrder(theirs).uuid()
    )
    KeepOrder([theirs, theirs])(torch.fx.Graph())
    assert theirs.seen == 3 and KeepOrder([theirs,
                                           lambda graph: None]).uuid() is None and KeepOrder(lambda graph: None).uuid() is None
