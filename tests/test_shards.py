"""State dicts, DCP, gradient clipping, GradScaler and FSDP2 of a model with experts on several ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     get_optimizer_state_dict, set_model_state_dict,
                                                     set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import epmoe
from cases import first, outcome, process_ranks
from parallel_cases import (BELOW, FULL, Block, adapt, close, copies, gradients_of_one_process, same,
                            state_of, tensors_of, tokens, whole_of)

pytestmark = pytest.mark.cpu_only


def make(how, seed=0):
    """A model, and what is called to train it: "ddp", "fsdp", "hsdp" or "replicas" (groups of 2 ranks)."""
    torch.manual_seed(seed)
    size, group = dist.get_world_size(), None
    if how in ("replicas", "hsdp") and size > 2:
        group = [dist.new_group([r, r + 1]) for r in range(0, size, 2)][dist.get_rank() // 2]
    model = Block(group)
    if how == "ddp":
        return model, DistributedDataParallel(epmoe.prepare_ddp(model))
    from torch.distributed.fsdp import fully_shard

    shape, names = ((size // 2, 2), ("r", "s")) if how == "hsdp" else ((size,), None)
    fully_shard(epmoe.prepare_fsdp(model), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return model, model


def _save(rank, world_size, how, path):
    model, trained = make(how)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        trained(tokens(rank)).square().mean().backward()
        optimizer.step()
    dcp.save(state_of(model, optimizer), checkpoint_id=path)
    whole, ours = whole_of(model, optimizer), epmoe.whole_state_dict(model)
    if rank == 0:
        assert all(torch.equal(ours[n], t) for n, t in whole[0].items())
    close(model)
    return whole


def _load(rank, world_size, how, path):
    model, _ = make(how, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    whole = whole_of(model, optimizer)
    model(tokens(rank)).square().mean().backward()
    optimizer.step()
    close(model)
    return whole


@pytest.mark.parametrize("how, others", first(2, [("fsdp", (2, 1)), ("ddp", (4, 2, 1)),
                                                  ("hsdp", (4, 2)), ("replicas", (4, 1))]))
def test_shards_dcp_of_model_and_optimizer_loads_on_other_numbers_of_ranks(tmp_path, how, others):
    want = process_ranks(_save, 4, how, str(tmp_path))[0]
    assert any(t.any() for n, t in want[1].items() if n == "moe.down_proj.exp_avg")
    for num_ranks in others:
        for wanted, got in zip(want, process_ranks(_load, num_ranks, how, str(tmp_path))[0], strict=True):
            assert wanted.keys() == got.keys()
            for name, t in wanted.items():
                assert torch.equal(t, got[name]), (num_ranks, name)


def _whole(rank, world_size, how, whole):
    """Load a whole model and its optimizer, as one process has them."""
    model, _ = make(how, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    states = {}
    for key, t in whole[1].items():
        name, _, field = key.rpartition(".")
        states.setdefault(name, {})[field] = t
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, dict(whole[0]), options=options)
    group = get_optimizer_state_dict(model, optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer, {"state": states, "param_groups": group}, options=options)
    got = whole_of(model, optimizer)
    close(model)
    return got


@pytest.mark.parametrize("how", ["ddp", "replicas"])
def test_shards_whole_model_and_optimizer_in_and_out(tmp_path, how):
    whole = process_ranks(_save, 2, "ddp", str(tmp_path))[0]
    for wanted, got in zip(whole, process_ranks(_whole, 4, how, whole)[0], strict=True):
        assert all(torch.equal(t, got[n]) for n, t in wanted.items())


def _adagrad(rank, world_size, path, saves):
    """Save or load an Adagrad, which has states before its first step.  Returns that of a weight."""
    model, trained = make("ddp")
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    if saves:
        trained(tokens(rank)).square().mean().backward()
        optimizer.step()
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
    else:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    close(model)
    return optimizer.state[model.moe.down_proj]["sum"]


def test_shards_optimizer_with_states_before_its_first_step_loads_on_other_numbers_of_ranks(tmp_path):
    want = torch.cat(process_ranks(_adagrad, 2, str(tmp_path), True))
    assert want.any()
    for num_ranks in 2, 1:
        assert torch.equal(torch.cat(process_ranks(_adagrad, num_ranks, str(tmp_path), False)), want)


def _adagrad_with_room(rank, world_size):
    """Return the rows of a state of an Adagrad before and after its first step."""
    moe = epmoe.EPMoE(8, 16, 4, 2, num_physical=8, max_tokens=4, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.Adagrad(moe.parameters(), 0.01)
    found = [len(optimizer.state_dict()["state"][0]["sum"])]
    moe(torch.ones(4, 8), torch.arange(8).view(4, 2) % 4, torch.ones(4, 2)).sum().backward()
    optimizer.step()
    moe.finalize()
    return [*found, len(optimizer.state_dict()["state"][0]["sum"])]


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_shards_states_before_the_first_step_have_the_rows_of_all_experts(num_ranks):
    assert process_ranks(_adagrad_with_room, num_ranks) == [[4, 4]] * num_ranks


def _copied(rank, world_size):
    """Copy a module and its optimizer, where a rank has as many places as there are experts."""
    moe = epmoe.EPMoE(8, 16, 4, 2, num_physical=8, max_tokens=4, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.SGD(moe.parameters(), 0.1, momentum=0.5)
    moe(torch.ones(4, 8), torch.arange(8).view(4, 2) % 4, torch.ones(4, 2)).sum().backward()
    optimizer.step()
    copied, its = copy.deepcopy((moe, optimizer))
    for p in copied.parameters():
        p.grad = torch.zeros_like(p)
    its.step()
    states = [o.state[m.down_proj]["momentum_buffer"] for m, o in ((moe, optimizer), (copied, its))]
    moe.finalize()
    return states


def test_shards_copy_of_an_optimizer_keeps_its_states():
    for state, copied in process_ranks(_copied, 2):
        assert state.any() and torch.equal(copied, 0.5 * state)


def _own_files(rank, world_size, path):
    """Each rank saves its own file and loads it; then all ranks load the file of rank 0."""
    model, trained = make("ddp")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trained(tokens(rank)).square().mean().backward()
    optimizer.step()
    torch.save([model.state_dict(), optimizer.state_dict()], f"{path}/{rank}")
    before = [p.clone() for p in model.parameters()]
    states = torch.load(f"{path}/{rank}", weights_only=True)
    again = torch.optim.AdamW(model.parameters(), 0.01)
    model.load_state_dict(states[0])
    again.load_state_dict(states[1])
    again.step()
    optimizer.load_state_dict(states[1])
    optimizer.step()
    same = all(torch.equal(t, optimizer.state[model.moe.down_proj][n])
               for n, t in again.state[model.moe.down_proj].items())
    model.load_state_dict(states[0])
    same = same and all(map(torch.equal, before, model.parameters()))
    plain = all(type(t) is torch.Tensor for s in again.state.values() for t in s.values())
    dist.barrier()
    wrong = outcome(lambda: model.load_state_dict(torch.load(f"{path}/0", weights_only=True)[0]))
    close(model)
    return same, plain, wrong


def test_shards_file_of_another_rank_raises(tmp_path):
    (same, plain, first), (same_1, plain_1, second) = process_ranks(_own_files, 2, str(tmp_path))
    assert same and plain and same_1 and plain_1 and first.kinds == (), (first, second)
    assert "has the experts 0 to 1, because another rank" in str(second), second


def _clipped(rank, world_size, how):
    model, trained = make(how)
    state = epmoe.whole_state_dict(model)
    trained(tokens(rank)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    router = model.router.weight.grad
    router = router.full_tensor() if hasattr(router, "full_tensor") else router
    close(model)
    return state, norm, router


@pytest.mark.parametrize("how", ["ddp", "fsdp", "replicas", "hsdp"])
def test_shards_plain_clip_grad_norm_is_that_of_one_process(how):
    results = process_ranks(_clipped, 4, how)
    want = {n: torch.nn.Parameter(t) for n, t in results[0][0].items()}
    for n, g in gradients_of_one_process(results[0][0], 4).items():
        want[n].grad = g
    norm = torch.nn.utils.clip_grad_norm_(want.values(), 0.01)
    for _, got, router in results:
        torch.testing.assert_close(got, norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(router, want["router.weight"].grad, rtol=1e-4, atol=1e-8)


def _scaled(rank, world_size, fused, sharded):
    """Only the experts of rank 1 get an infinity."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model, trained = make("ddp")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=fused)
    scaler = (ShardedGradScaler if sharded else torch.amp.GradScaler)("cpu", init_scale=4.0)
    before = [p.clone() for p in model.parameters()]
    scaler.scale(trained(tokens(rank)).square().mean()).backward()
    if rank == 1:
        model.moe.down_proj.grad[0, 0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    same = all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    scaler.scale(trained(tokens(rank)).square().mean()).backward()
    scaler.step(optimizer)
    moved = not all(map(torch.equal, before, model.parameters()))
    close(model)
    return same, scaler.get_scale(), moved


@pytest.mark.parametrize("fused, sharded", [(False, False), (True, False), (True, True)])
def test_shards_grad_scaler_skips_the_step_on_all_ranks(fused, sharded):
    assert process_ranks(_scaled, 2, fused, sharded) == [(True, 2.0, True)] * 2


def _mistakes(rank, world_size):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, trained = make("ddp")
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    lbfgs = torch.optim.LBFGS(model.parameters())
    before = copies(dict(model.named_parameters()))
    trained(tokens(rank)).square().mean().backward()
    got = [[outcome(zero.step), outcome(zero.step)],
           [outcome(lambda: lbfgs.step(lambda: torch.ones(()))) for _ in range(2)]]
    assert same(dict(model.named_parameters()), before)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("r", "s"))
    got.append(outcome(lambda: fully_shard(model, mesh=mesh)))
    close(model)
    return got


def test_shards_optimizers_that_cannot_be_right_and_hsdp_of_an_unprepared_model_raise():
    """Each step of the optimizers, not only the first one."""
    for zero, lbfgs, hsdp in process_ranks(_mistakes, 2):
        for got in zero + lbfgs:
            assert got.kind == "RuntimeError" and "expert_parameters" in got.text, got
        assert "prepare_fsdp" in str(hsdp), hsdp


def _lbfgs(rank, world_size):
    """The other parameters in LBFGS, with gradients and loss of all ranks, and the experts in AdamW."""
    model, trained = make("ddp")
    of_experts = torch.optim.AdamW(epmoe.expert_parameters(model), 0.01)
    lbfgs = torch.optim.LBFGS(model.router.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")

    def closure():
        lbfgs.zero_grad()
        loss = trained(tokens(rank)).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / world_size

    for _ in range(2):
        of_experts.zero_grad()
        lbfgs.step(closure)
        of_experts.step()
    router = model.router.weight.detach().clone()
    close(model)
    return router


def test_shards_lbfgs_of_the_other_parameters_keeps_replicas_equal():
    first, second = process_ranks(_lbfgs, 2)
    assert torch.equal(first, second)


# ---- what is below an EPMoE, or adopted by it ----


def _numbers(named, rank):
    """Give each tensor numbers of its own on each rank."""
    with torch.no_grad():
        for i, t in enumerate(named.values()):
            numbers = torch.rand(t.shape, generator=torch.Generator().manual_seed(100 * rank + i))
            t.copy_(4 * numbers)


def _saved_below(rank, world_size, kind, path):
    """Save in all ways, change all numbers, and load again.  Returns what was not restored, and the whole."""
    model, wrong = make("ddp")[0], []
    moe = adapt(model, kind)
    _numbers(tensors_of(model), rank)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(tokens(rank)).square().mean().backward()
    model.router.weight.grad.zero_()  # the replicas stay equal
    optimizer.step()
    want, moments = copies(tensors_of(model)), copies({n: optimizer.state[p]["exp_avg"]
                                                      for n, p in model.moe.named_parameters()})
    dcp.save(state_of(model, optimizer), checkpoint_id=f"{path}/dcp")
    whole = [epmoe.whole_state_dict(model)]
    full = get_model_state_dict(model, options=FULL)
    if rank == 0 and not all(torch.equal(whole[0][n], t) for n, t in full.items()):
        wrong.append("another full state dict")
    dist.broadcast_object_list(whole)
    torch.save(model.state_dict(), f"{path}/{rank}")
    y = model(tokens(rank)).detach()

    def from_dcp():
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=f"{path}/dcp")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    loads = {"dcp": from_dcp, "whole": lambda: model.load_state_dict(whole[0]),
             "assign": lambda: model.load_state_dict(whole[0], assign=True),
             "own": lambda: model.load_state_dict(torch.load(f"{path}/{rank}", weights_only=True))}
    for name, load in loads.items():
        _numbers(tensors_of(model), rank + 50)
        load()
        if not (same(copies(tensors_of(model)), want) and torch.equal(model(tokens(rank)), y)):
            wrong.append(name)
        if name == "dcp" and not all(torch.equal(optimizer.state[p]["exp_avg"], moments[n])
                                     for n, p in model.moe.named_parameters()):
            wrong.append("optimizer")
    dist.barrier()
    theirs = torch.load(f"{path}/{(rank + 1) % world_size}", weights_only=True)
    other = outcome(lambda: model.load_state_dict(theirs))
    moe.layer.world.close()
    return wrong, other, whole[0], y


def _loaded_below(rank, world_size, kind, path, whole):
    """Load on another number of ranks."""
    model = make("ddp", seed=1)[0]
    moe = adapt(model, kind)
    got = [outcome(lambda: model.load_state_dict(whole))]
    y = model(tokens(rank)).detach()
    _numbers(tensors_of(model), 50)
    state = {"model": get_model_state_dict(model)}
    try:
        dcp.load(state, checkpoint_id=f"{path}/dcp")
        set_model_state_dict(model, state["model"])
        got.append("")
    except dcp.CheckpointException as error:  # no Exception
        got.append(str(error))
    again = model(tokens(rank)).detach()
    moe.layer.world.close()
    return got, y, again


@pytest.mark.parametrize("num_ranks", first(1, [2, 4]))
@pytest.mark.parametrize("kind", first(2, BELOW))
def test_shards_checkpoints_have_what_is_below_the_experts_of_all_ranks(tmp_path, kind, num_ranks):
    results = process_ranks(_saved_below, num_ranks, kind, str(tmp_path))
    for wrong, other, whole, _ in results:
        assert wrong == [] and "because another rank saved" in other.text, (wrong, other)
    if kind == "quantised":  # [W, ..]
        assert whole["moe.parametrizations.down_proj.0.shift"].shape == (num_ranks, 3)
        assert whole["moe.parametrizations.down_proj.0.gain"].shape == (num_ranks,)
    loaded = process_ranks(_loaded_below, 6 - num_ranks, kind, str(tmp_path), whole)
    for (from_whole, from_dcp), y, again in loaded:
        if kind == "quantised":
            assert from_whole.kind == "RuntimeError", from_whole
            assert f"is of {num_ranks} ranks" in from_whole.text, from_whole
            assert "Size mismatch between saved" in from_dcp, from_dcp
        else:
            assert not from_whole.kinds and not from_dcp, (from_whole, from_dcp)
    for (_, _, _, want), (_, y, again) in zip(results, loaded) if kind != "quantised" else ():
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(again, y)


def _replicated_below(rank, world_size, kind):
    """Save and load a whole model that FSDP2 has sharded over two replicas."""
    from torch.distributed.fsdp import fully_shard

    groups = [dist.new_group([r, r + 1]) for r in range(0, world_size, 2)]
    model = Block(groups[rank // 2])
    moe = adapt(model, kind, seed=rank % 2)
    fully_shard(epmoe.prepare_fsdp(model), mesh=init_device_mesh("cpu", (world_size,)))
    want = copies(get_model_state_dict(model))
    y, whole = model(tokens(rank)).detach(), get_model_state_dict(model, options=FULL)
    whole = [whole]
    dist.broadcast_object_list(whole)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, whole[0], options=options)
    got = get_model_state_dict(model)
    parts = [[getattr(t, "to_local", lambda: t)() for t in (got[n], want[n])] for n in want]
    is_same = all(torch.equal(*part) for part in parts)
    again = model(tokens(rank)).detach()
    moe.layer.world.close()
    return is_same, torch.equal(again, y)


@pytest.mark.parametrize("kind", first(1, BELOW))
def test_shards_whole_state_of_what_is_below_experts_over_replicas(kind):
    assert process_ranks(_replicated_below, 4, kind) == [(True, True)] * 4


def _unknown(rank, world_size):
    class Odd(torch.nn.Module):
        def get_extra_state(self):
            return torch.ones(1)

    model = make("ddp")[0]
    model.moe.odd = Odd()
    got = outcome(model.state_dict)
    close(model)
    return got


def test_shards_tensor_that_is_neither_parameter_nor_buffer_raises():
    for got in process_ranks(_unknown, 2):
        assert got.kind == "RuntimeError" and "moe.odd._extra_state belongs to the experts" in got.text, got
