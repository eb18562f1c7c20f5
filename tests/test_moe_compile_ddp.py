"""EPMoE compiled inside of DistributedDataParallel, which splits the graph between buckets of gradients."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import epmoe
from cases import process_ranks
from pace import HANG_S, WAIT_S

pytestmark = pytest.mark.cpu_only
BUCKET_MB = 1  # the smallest that torch's compiler accepts
WIDE = 9000  # two such matrices fill a bucket


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, WIDE), nn.Linear(WIDE, 32)
        self.router = nn.Linear(32, 4)
        self.moe = epmoe.EPMoE(32, 16, 4, 2, max_tokens=32, dtype=torch.float32, device="cpu",
                               timeout_s=WAIT_S)

    def forward(self, x):
        x = x + self.down(self.up(x).relu())
        weight, idx = self.router(x).softmax(-1).topk(2)
        return x + self.moe(x, idx, weight)


def _trained(rank, world_size):
    """Rank main: steps of a compiled model and of the model itself. Returns the number of its graphs."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    ddp = DistributedDataParallel(epmoe.prepare_ddp(model), bucket_cap_mb=BUCKET_MB)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(ddp, backend=backend)
    for num_tokens in (6 + rank, 20 - rank):
        x = torch.randn(num_tokens, 32, generator=torch.Generator().manual_seed(rank))
        seen = []
        for call in (ddp, compiled):
            model.zero_grad()
            y = call(x)
            y.square().mean().backward()
            seen.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
        for want, got in zip(*seen, strict=True):
            torch.testing.assert_close(got, want)
    model[0].moe.layer.world.close()
    return len(graphs)


@pytest.mark.long
def test_moe_compile_in_ddp_splits_graphs():
    """The number of rows, a size of the run, crosses from one graph to the next."""
    for num_graphs in process_ranks(_trained, 2, timeout_s=HANG_S):
        assert num_graphs >= 4
