"""A dispatch and a combine on a second stream, beside other work, as docs/layouts.md shows it."""

import pytest
import torch

from cases import Case, indices_of, make_layer

CASE = Case(num_local=2, topk=2, max_tokens=200, hidden=64, tokens="unequal", dtype=torch.float32)


def step(layer, x, idx, weight, a, is_apart):
    """The result and the gradients of a layer and of work that needs nothing of it."""
    streams = torch.get_device_module(x.device)
    current = streams.current_stream()
    side = streams.Stream() if is_apart else current
    side.wait_stream(current)
    with streams.stream(side):
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
    shared = torch.tanh(x @ a)
    current.wait_stream(side)
    y = torch.tanh(rows @ a)
    side.wait_stream(current)
    with streams.stream(side):
        out = layer.combine(y, layout, row_weight)
    shared = shared @ a
    current.wait_stream(side)
    result = out + shared
    return [result.detach(), *torch.autograd.grad(result.square().sum(), [x, weight, a])]


@pytest.mark.parametrize("options", [{}, {"capacity": 8 * 200 * 2}, {"expert_alignment": 16},
                                     {"expert_capacity": 8 * 200 * 2}], ids=lambda o: next(iter(o), "exact"))
def test_layer_side_stream_changes_nothing(ranks, options):
    """Results and gradients are those of one stream, in each of several steps."""

    def run(world, device):
        layer = make_layer(world, device, CASE, **options)
        idx = indices_of(CASE, world.rank, world.size).to(device)
        g = torch.Generator().manual_seed(world.rank)
        a = (torch.randn(64, 64, generator=g) / 8).to(device).requires_grad_()
        seen = []
        for is_apart in (False, True):
            g.manual_seed(5)
            for _ in range(4):
                x = torch.randn(len(idx), 64, generator=g).to(device).requires_grad_()
                weight = torch.rand(len(idx), 2, generator=g).to(device).requires_grad_()
                seen.append(step(layer, x, idx, weight, a, is_apart))
        layer.synchronize()
        layer.finalize()
        return seen

    for rank, seen in enumerate(ranks(run)):
        for i in range(4):
            for name, want, got in zip(("result", "x", "weight", "a"), seen[i], seen[4 + i]):
                where = f"rank {rank}, step {i}: {name}"
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda m: f"{where}: {m}")
