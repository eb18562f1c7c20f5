"""EPMoE with weights in FP8 in CUDA graphs: the bits of a call, in prefill with a capacity and in decode."""

import pytest
import torch

from test_moe_fp8 import HIDDEN, TOKENS, K, inputs, make


@pytest.mark.cuda_only
@pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
def test_moe_fp8_graphs(ranks, decode):
    """A captured module, replayed between calls outside of the graph."""
    if not ranks.is_torchrun:
        pytest.skip("ranks that are threads do not replay graphs")

    def run(world, device):
        num_experts = 2 * world.size
        moe, same = make(world, device, num_experts, capacity=world.size * TOKENS * K), []
        if decode:
            moe.enable_decode(TOKENS)
        with torch.no_grad():
            fixed = [t[:5] for t in inputs(world, device, num_experts, seed=3 + world.rank)]
            fixed = [torch.cat([t, t.new_zeros(5 - len(t), *t.shape[1:])]) for t in fixed]
            moe(*fixed, decode=decode)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = moe(*fixed, decode=decode)
            for _ in range(4):
                fixed[0].copy_(torch.randn(5, HIDDEN, device=device))
                graph.replay()
                got = y.clone()
                same.append(torch.equal(got, moe(*fixed, decode=decode)) and not got.isnan().any().item())
        moe.layer.synchronize()
        moe.finalize()
        return same

    assert all(map(all, ranks(run)))
