"""EPMoE with weights in FP8 on ranks that are processes: torch.compile, and torch.distributed.checkpoint."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import epmoe
from test_fp8 import bits
from test_moe_fp8 import inputs, make

pytestmark = pytest.mark.cpu_only


def compile_and_load(world, device, path):
    """Whether a compiled module has the bits of the module, and a checkpoint of one rank those of two."""
    torch._dynamo.reset()
    moe = make(world, device, 5)
    fast, results = torch.compile(moe, backend="aot_eager", fullgraph=True), []
    for seed in range(2):
        args = inputs(world, device, 5, seed)
        with torch.no_grad():
            results.append(torch.equal(fast(*args), moe(*args, decode=False)))
    want = {n: p.clone() for n, p in moe.named_parameters()}
    for p in moe.parameters():
        bits(p).zero_()
    state = moe.state_dict()
    results.append(all(t.shape[0] == 5 for t in state.values()))  # the experts of all ranks
    dcp.load(state, checkpoint_id=path)
    moe.load_state_dict(state)
    results += [torch.equal(bits(p), bits(want[n])) for n, p in moe.named_parameters()]
    moe.finalize()
    return results


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_moe_fp8_compiles_and_loads_checkpoints_of_other_ranks(ranks, tmp_path):
    alone = make(epmoe.World(), "cpu", 5)
    dcp.save(alone.state_dict(), checkpoint_id=tmp_path)
    alone.finalize()
    assert all(map(all, ranks.isolated(compile_and_load, str(tmp_path), world_size=2)))
