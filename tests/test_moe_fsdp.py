"""EPMoE while FSDP2 has its shards, or has gathered the whole parameters: in evaluations, and with
reshard_after_forward=False until the next backward. Then the module has other tensors than an optimizer.
"""

import pytest
import torch
import torch.distributed as dist

import epmoe
from cases import outcome, process_ranks
from parallel_cases import EXPERTS, Block, close, tokens

pytestmark = pytest.mark.cpu_only


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


def sharded(world_size, group=None, adapters=(), **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Block(group)
    for name in adapters:
        model.moe.add_adapter(name, 4, 8)
    return fully_shard(epmoe.prepare_fsdp(model, **options), mesh=init_device_mesh("cpu", (world_size,)))


def groups_of(size, rank, world_size):
    """The group of this rank, of groups of `size` ranks. All ranks make all of them."""
    return [dist.new_group(list(range(r, r + size))) for r in range(0, world_size, size)][rank // size]


def _evaluated(rank, world_size):
    model = sharded(world_size, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(tokens(rank)).square().mean().backward()
    optimizer.step()
    down = model.moe.down_proj
    want = [local(t).detach().clone() for t in (down, optimizer.state[down]["exp_avg"])]
    found = []
    for evaluates in (False, True):
        if evaluates:
            with torch.no_grad():
                model(tokens(rank))
        states = optimizer.state_dict()["state"].values()
        moments = [s["exp_avg"] for s in states if s["exp_avg"].dim() == 3]
        shapes = sorted({tuple(t.shape) for t in moments})
        has_own = any(torch.equal(local(t), want[1]) for t in moments)
        whole = [epmoe.whole_state_dict(model)]
        dist.broadcast_object_list(whole)
        num = EXPERTS // world_size
        own = whole[0]["moe.down_proj"][rank * num:][:num]
        found.append((shapes, has_own, torch.equal(own, want[0])))
    close(model)
    return found


def test_moe_fsdp_checkpoints_after_an_evaluation_have_all_experts():
    for found in process_ranks(_evaluated, 2):
        assert found == [([(EXPERTS, 16, 24), (EXPERTS, 48, 16)], True, True)] * 2


def _accumulated(rank, world_size):
    """The norm over the experts of all ranks, where FSDP2 keeps whole parameters between backward passes."""
    norms = []
    for keeps in (False, True):
        model = sharded(world_size)
        model.set_reshard_after_backward(not keeps)
        params = list(model.parameters())  # the shards, as an optimizer has them
        for _ in range(2):
            model(tokens(rank)).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1e-3).item())
        close(model)
    return norms


def test_moe_fsdp_clips_with_the_same_norm_where_parameters_stay_whole():
    found = process_ranks(_accumulated, 2)
    assert found[0] == found[1] and found[0][0] > 0 and found[0][0] == pytest.approx(found[0][1], 1e-6)


def _filled(rank, world_size, size, gathers):
    group = groups_of(size, rank, world_size)
    plain = Block(group)
    torch.manual_seed(1)
    plain.moe.reset_parameters()
    want = epmoe.whole_state_dict(plain)
    model = sharded(world_size, group, reshard_after_forward=False)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7)
        if gathers:
            model(tokens(rank))
    torch.manual_seed(1)
    model.moe.reset_parameters()
    got = epmoe.whole_state_dict(model)
    close(model)
    close(plain)
    return [n for n in want if n.startswith("moe.") and not torch.equal(got[n], want[n])], len(want)


@pytest.mark.parametrize("num_ranks, size, gathers", [(2, 2, False), (4, 2, False), (4, 2, True),
                                                      (2, 1, True)])
def test_moe_fsdp_fills_sharded_experts_as_plain_ones(num_ranks, size, gathers):
    found = process_ranks(_filled, num_ranks, size, gathers)
    assert all(not wrong for wrong, _ in found) and found[0][1] == 5


def _switched(rank, world_size, size):
    model = sharded(world_size, groups_of(size, rank, world_size), adapters=("a", "b"),
                    reshard_after_forward=False)
    with torch.no_grad():
        model(tokens(rank))
    model.moe.set_adapter("b")
    found = []
    for _ in range(2):
        model.zero_grad()
        model(tokens(rank)).square().mean().backward()
        found.append(sorted({n.split(".")[2] for n, p in model.named_parameters()
                             if n.startswith("moe.") and p.grad is not None}))
    found.append([p.requires_grad for n, p in model.named_parameters() if n.endswith("moe.down_proj")])
    close(model)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_moe_fsdp_trains_the_adapter_that_was_set_after_an_evaluation(size):
    assert process_ranks(_switched, 2, size) == [[["b"], ["b"], [False]]] * 2


def _ignored(rank, world_size, size):
    model = Block(groups_of(size, rank, world_size))
    experts = set(epmoe.expert_parameters(model))
    got = outcome(lambda: epmoe.prepare_fsdp(model, ignored_params=experts))
    close(model)
    return got


def test_moe_fsdp_refuses_to_ignore_experts_of_which_there_are_copies():
    for got in process_ranks(_ignored, 4, 2):
        assert "ValueError" in got.kinds and "nobody would average" in got.text, got
    assert all(got.kinds == () for got in process_ranks(_ignored, 2, 2))


class Several(torch.nn.Module):
    """EPMoE modules and nothing else."""

    def __init__(self, *moes):
        super().__init__()
        self.moes = torch.nn.ModuleList(moes)

    def forward(self, x, idx, weight):
        return [moe(x, idx, weight).float() for moe in self.moes]


def _loads_after_an_evaluation(rank, world_size):
    """With gathered parameters: a load, a wrong one, and the next forward."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for has_more in (True, False):
        if has_more:
            model, x = sharded(world_size, reshard_after_forward=False), (tokens(rank),)
            name, unshard = "moe.down_proj", model.moe.unshard
        else:  # the EPMoE is the first module of its group that is loaded
            model = fully_shard(Several(epmoe.EPMoE(
                16, 32, 4, 2, epmoe.thread_worlds(1)[0], max_tokens=64, dtype=torch.float32, device="cpu")))
            x = (torch.randn(8, 16), torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
            name, unshard = "moes.0.down_proj", model.unshard
        state = {n: t.clone() for n, t in model.state_dict().items()}
        with torch.no_grad():
            unshard()
            want = torch.cat(list(model(*x)))
            model.load_state_dict({n: torch.zeros_like(t) for n, t in state.items()})
            zeros = torch.cat(list(model(*x))).flatten() - (x[0].flatten() if has_more else 0)
            wrong = outcome(lambda m=model, bad=state | {name: torch.zeros(3)}: m.load_state_dict(bad)).kind
            model.load_state_dict(state)
            found.append((not zeros.any(), wrong, torch.equal(torch.cat(list(model(*x))), want)))
        if has_more:
            close(model)
    return found


def test_moe_fsdp_loads_after_an_evaluation():
    for found in process_ranks(_loads_after_an_evaluation, 2):
        assert found == [(True, "RuntimeError", True)] * 2, found


def _shares_parameters(rank, world_size):
    """A module in FP8 and one in 16 bits with its parameters, in any order: both see new weights."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for _ in range(3):
        moes = [epmoe.EPMoE(32, 32, 4, 2, epmoe.thread_worlds(1)[0], max_tokens=16, device="cpu",
                            compute_dtype=dtype) for dtype in (torch.float8_e4m3fn, None)]
        moes[1].gate_up_proj, moes[1].down_proj = moes[0].gate_up_proj, moes[0].down_proj
        model = fully_shard(Several(*moes))
        x, (weight, idx) = torch.randn(8, 32).bfloat16(), torch.rand(8, 4).topk(2)
        with torch.no_grad():
            for _ in range(2):
                y, z = model(x, idx, weight)
                found.append(0.9 < (y.norm() / z.norm()).item() < 1.1)
                for p in model.parameters():
                    p.mul_(2)
        found += [moe._is_sharded for moe in moes]
    return found


def test_moe_fsdp_of_modules_with_the_same_parameters():
    assert all(process_ranks(_shares_parameters, 1)[0])
