"""EPMoE in FP8 on ranks that are processes: torch.compile, checkpoints, and fully_shard."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

import epmoe
from outcomes import check_outcomes, outcome
from test_fp8 import bits
from test_moe_fp8 import HIDDEN, K, experts_of, inputs, make

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


def load_sharded(world, device):
    """What happens to a checkpoint with the experts one by one, after fully_shard and before it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = epmoe.EPMoE(HIDDEN, 128, 4, K, epmoe.thread_worlds(1)[0], max_tokens=4, device=device)
    plain = experts_of(4)
    alone.load_state_dict(plain)
    loaded = torch.equal(alone.down_proj[3], plain["3.down_proj.weight"])
    fully_shard(alone, mesh=init_device_mesh("cpu", (2,)))
    got = outcome(lambda: alone.load_state_dict(plain))
    alone.finalize()
    return loaded, got


def test_moe_loads_experts_one_by_one_before_fully_shard(ranks):
    results = ranks.isolated(load_sharded, world_size=2)
    assert all(loaded for loaded, _ in results)
    check_outcomes([got for _, got in results], "RuntimeError", "load before it")
