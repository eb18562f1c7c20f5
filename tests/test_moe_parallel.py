"""EPMoE beside data parallelism: what would make its experts equal is an error, and the helpers are right."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import epmoe
from cases import first, outcome, process_ranks
from epmoe.testing import run_threads
from parallel_cases import (BELOW, EXPERTS, HIDDEN, INNER, Adapters, adapt, check_prepared_ddp,
                            check_wrong_mesh, close, copies, gradients_of_one_process, make, same,
                            tensors_of, tokens)

pytestmark = pytest.mark.cpu_only


# ---- DistributedDataParallel ----


def _unprepared(rank, world_size, compiled):
    model = make()
    if compiled:
        model.forward = torch.compile(model.forward, backend="eager")
    got = outcome(lambda: DistributedDataParallel(model)(tokens(rank)))
    model.moe.layer.synchronize()
    close(model)
    return got


@pytest.mark.parametrize("compiled", [False, True])
def test_moe_ddp_of_an_unprepared_model_raises(compiled):
    for got in process_ranks(_unprepared, 2, compiled):
        assert "RuntimeError" in str(got) and "prepare_ddp" in str(got), got


@pytest.mark.parametrize("how", ["once", "accumulated", "copied", "compiled"])
def test_moe_ddp_of_a_prepared_model_has_the_gradients_of_one_process(how):
    check_prepared_ddp(process_ranks, how)


def _two_groups(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = make(groups[rank // 2])
    got = outcome(lambda: epmoe.prepare_ddp(model))
    within = epmoe.prepare_ddp(model, groups[rank // 2]) is model
    close(model)
    return got, within


def test_moe_ddp_over_several_groups_of_experts_raises():
    for got, within in process_ranks(_two_groups, 4):
        assert "ValueError" in str(got) and "FSDP2" in str(got) and within, got


def _over_copies(rank, world_size):
    """Each EP group has one rank: the experts are copies, and averaging them is right."""
    groups = [dist.new_group([r]) for r in range(world_size)]
    model = make(groups[rank])
    ddp = DistributedDataParallel(model)
    ddp(tokens(rank)).square().mean().backward()
    grad = model.moe.down_proj.grad.clone()
    close(model)
    return grad


def test_moe_ddp_averages_experts_that_are_copies():
    assert torch.equal(*process_ranks(_over_copies, 2))


# ---- FSDP ----


def test_moe_fsdp_over_ranks_of_different_experts_raises():
    check_wrong_mesh(process_ranks)


def _unequal_groups(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = make(groups[rank // 2])
    got = outcome(lambda: epmoe.prepare_fsdp(model))
    close(model)
    return got


def test_moe_fsdp_over_groups_of_unequal_size_raises():
    """Also on a rank that is a group of its own."""
    for got in process_ranks(_unequal_groups, 3):
        assert got.kind == "ValueError", got
        assert "ranks [[0, 1], [2]], do not divide all 3 ranks" in got.text, got


def _groups_of_one(rank, world_size):
    groups = [dist.new_group([r]) for r in range(world_size)]
    model = make(groups[rank])
    epmoe.prepare_fsdp(model)
    scale = model.moe.gradient_scale
    close(model)
    return scale


def test_moe_fsdp_over_groups_of_one_rank_leaves_experts_alone():
    assert process_ranks(_groups_of_one, 2) == [1.0, 1.0]


def _flattened(rank, world_size, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = make()
    on_cpu = torch.device("cpu")
    sharded = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=on_cpu)
    got = outcome(lambda: sharded(tokens(rank)))
    close(model)
    return got


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_moe_fsdp1_around_experts_raises(use_orig_params):
    for got in process_ranks(_flattened, 2, use_orig_params):
        assert "RuntimeError" in str(got) and "prepare_fsdp" in str(got), got


# ---- what is below an EPMoE, or adopted by it ----


def _below(rank, world_size, kind):
    """Train without DDP, then with it.  Returns what is wrong, and two norms of the gradients."""
    model, wrong = make(bias=False), []
    moe, x = adapt(model, kind), tokens(rank)
    moe.gradient_scale = 1 / world_size
    y = model(x)
    y.square().mean().backward()
    want = {n: t.grad.clone() for n, t in tensors_of(model).items() if t.grad is not None}
    model.zero_grad()
    before = copies(tensors_of(model))
    ddp = DistributedDataParallel(epmoe.prepare_ddp(model))
    for _ in range(2):  # the second forward broadcasts buffers
        model.zero_grad()
        got = ddp(x)
        got.square().mean().backward()
    if not torch.equal(got, y):
        wrong.append("another result")
    if not same(copies(tensors_of(model)), before):
        wrong.append("overwritten")
    if not same({n: t.grad for n, t in tensors_of(model).items() if t.grad is not None}, want):
        wrong.append("other gradients")
    if {id(p) for p in epmoe.expert_parameters(model)} != {id(p) for p in model.moe.parameters()}:
        wrong.append("other parameters")
    squares = sum(g.square().sum() for g in want.values())
    dist.all_reduce(squares)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    moe.layer.world.close()
    return wrong, norm, (squares + model.router.weight.grad.square().sum()).sqrt()


@pytest.mark.parametrize("num_ranks", first(1, [2, 4]))
@pytest.mark.parametrize("kind", BELOW)
def test_moe_ddp_leaves_what_is_below_experts_to_their_rank(kind, num_ranks):
    for wrong, norm, want in process_ranks(_below, num_ranks, kind):
        assert wrong == []
        torch.testing.assert_close(norm, want, rtol=1e-5, atol=0)


def _prepared_too_early(rank, world_size, kind):
    """What is added after prepare_ddp, or is not adopted, DDP overwrites: the first forward says so."""
    model = epmoe.prepare_ddp(make(bias=False))
    moe = adapt(model, kind, adopted=False)
    if kind == "wrapped":
        epmoe.prepare_ddp(model)
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        outcome(lambda: ddp(tokens(rank)))  # without gradients nobody knows how weights were computed
    got = outcome(lambda: ddp(tokens(rank)))
    moe.layer.world.close()
    return got


@pytest.mark.parametrize("kind, text", [("lora", "make the model again"), ("pruned", "make the model again"),
                                        ("wrapped", "computed from moe.of_down.")])
def test_moe_ddp_that_overwrites_what_is_below_experts_raises(kind, text):
    for got in process_ranks(_prepared_too_early, 2, kind):
        assert got.kind == "RuntimeError" and text in got.text, got


def _fsdp_below(rank, world_size, kind):
    """Train under FSDP2, in groups of two ranks, and without it.  An unprepared model is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    groups = [dist.new_group([r, r + 1]) for r in range(0, world_size, 2)]
    num = rank % 2  # its place in the group: the experts that it has
    model, plain, wrong = (make(groups[rank // 2], bias=False) for _ in range(3))
    moe, reference, other = (adapt(m, kind, seed=num) for m in (model, plain, wrong))
    refused = outcome(lambda: fully_shard(wrong, mesh=init_device_mesh("cpu", (world_size,))))
    fully_shard(epmoe.prepare_fsdp(model), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer, reference.gradient_scale = torch.optim.SGD(model.parameters(), 0.5), 1 / 2
    model(tokens(rank)).square().mean().backward()
    plain(tokens(rank)).square().mean().backward()
    replicas = dist.new_group(range(num, world_size, 2), use_local_synchronization=True)
    squares = torch.zeros(())
    for n, t in tensors_of(plain).items():
        if t.grad is not None:
            dist.all_reduce(t.grad, group=replicas)
            t.grad /= world_size // 2
            squares += t.grad.square().sum()
            t.data -= 0.5 * t.grad
    dist.all_reduce(squares, group=groups[rank // 2])
    for p in plain.router.parameters():
        dist.all_reduce(p.grad)
        squares += (p.grad / world_size).square().sum()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    got = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors_of(model).items()}
    want = copies(tensors_of(plain))
    for m in (moe, reference, other):
        m.layer.world.close()
    return refused, copies(got), want, norm, squares.sqrt()


@pytest.mark.parametrize("num_ranks", first(1, [2, 4]))
@pytest.mark.parametrize("kind", BELOW)
def test_moe_fsdp_leaves_what_is_below_experts_to_their_ranks(kind, num_ranks):
    for refused, got, want, norm, wanted_norm in process_ranks(_fsdp_below, num_ranks, kind):
        assert refused.kind == "ValueError" and "prepare_fsdp" in refused.text, refused
        assert got.keys() == want.keys()
        for name, t in want.items():
            torch.testing.assert_close(got[name], t, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(norm, wanted_norm, rtol=1e-4, atol=0)


def _flattened_below(rank, world_size, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = make(bias=False)
    moe = adapt(model, "lora")
    sharded = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    got = outcome(lambda: sharded(tokens(rank)))
    moe.layer.world.close()
    return got


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_moe_fsdp1_around_what_is_below_experts_raises(use_orig_params):
    for got in process_ranks(_flattened_below, 2, use_orig_params):
        assert "RuntimeError" in str(got) and "prepare_fsdp" in str(got), got


def _moved_below(rank, world_size, kind):
    """Move the experts of a model, and back; also save them."""
    model = make(bias=False)
    moe = adapt(model, kind)
    with torch.no_grad():
        y, before, whole = model(tokens(rank)), copies(tensors_of(model)), epmoe.whole_state_dict(model)
        moved = outcome(lambda: moe.set_expert_map(epmoe.ExpertMap(torch.arange(EXPERTS).flip(0))))
        again, same_whole = model(tokens(rank)), same(epmoe.whole_state_dict(model), whole)
        wants = outcome(lambda: torch.enable_grad()(model)(tokens(rank)))
        moe.set_expert_map(None) if not moved.kinds else None
    home = same(copies(tensors_of(model)), before)
    moe.layer.world.close()
    return moved, torch.equal(again, y), same_whole, home, wants


@pytest.mark.parametrize("num_ranks", first(1, [2, 4]))
@pytest.mark.parametrize("kind", BELOW)
def test_moe_map_moves_what_is_below_experts(kind, num_ranks):
    for moved, same_result, same_whole, home, wants in process_ranks(_moved_below, num_ranks, kind):
        assert same_result and same_whole and home
        if kind == "quantised":
            assert moved.kind == "RuntimeError" and "give it a row for each expert" in moved.text, moved
        else:
            assert not moved.kinds and "experts have no gradients" in wants.text, (moved, wants)


def test_moe_with_computed_weights_refuses_to_fill_them():
    def main(world):
        model = make(world, bias=False)
        adapt(model, "lora", seed=world.rank)
        before, ones = copies(tensors_of(model)), torch.ones(INNER, HIDDEN)
        one_by_one = {f"moe.{e}.{name}.weight": ones.T if name == "down_proj" else ones
                      for e in range(EXPERTS) for name in ("gate_proj", "up_proj", "down_proj")}
        got = [outcome(model.moe.reset_parameters),
               outcome(lambda: model.load_state_dict(one_by_one, strict=False))]
        wrong = [outcome(lambda: model.moe.adopt(m)) for m in (model.moe, 1)]
        unchanged = same(copies(tensors_of(model)), before)
        model.moe.finalize()
        return got, wrong, unchanged

    for got, wrong, unchanged in run_threads(main, 2):
        assert unchanged and [o.kind for o in wrong] == ["ValueError", "TypeError"]
        assert all(o.kind == "RuntimeError" and "gate_up_proj, down_proj" in o.text for o in got), got


def test_moe_copies_of_a_model_with_adopted_adapters_are_apart():
    def main(world):
        model = make(world, bias=False)
        moe = model.moe
        model.moe = Adapters(moe, torch.Generator().manual_seed(world.rank))
        moe.adopt(model.moe)
        again = copy.deepcopy(model)
        mine, theirs = epmoe.expert_parameters(model), epmoe.expert_parameters(again)
        own = again.moe.base_layer._adopted[0] is again.moe
        moe.finalize()
        return own, len(mine), len(theirs), len({id(p) for p in mine + theirs})

    assert run_threads(main, 2) == [(True, 4, 4, 8)] * 2


# ---- clipping ----


def _clipped(rank, world_size, norm_type, how):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make()
    state = epmoe.whole_state_dict(model)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "ep"))
        fully_shard(model.moe, mesh=mesh["dp"])
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        model.moe.gradient_scale = 1 / world_size
        trained = model
    else:
        trained = DistributedDataParallel(epmoe.prepare_ddp(model))
    trained(tokens(rank)).square().mean().backward()
    norm = epmoe.clip_grad_norm_(trained if how == "ddp" else model, 0.01, norm_type)
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    names = [n for n, _ in model.named_parameters()]
    close(model)
    return state, norm, dict(zip(names, grads))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_moe_clip_grad_norm_is_that_of_one_process(norm_type, how):
    results = process_ranks(_clipped, 2, norm_type, how)
    want = {n: nn.Parameter(t) for n, t in results[0][0].items()}
    for n, g in gradients_of_one_process(results[0][0], 2).items():
        want[n].grad = g
    norm = nn.utils.clip_grad_norm_(want.values(), 0.01, norm_type)
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][1], norm, rtol=1e-5, atol=0)
    for n, p in want.items():
        got = [grads[n] for _, _, grads in results]
        got = torch.cat(got) if n.startswith("moe.") else got[1]
        torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-8)


def test_moe_clip_grad_norm_of_nothing_and_of_nan():
    def main(world):
        model = make(world)
        empty = epmoe.clip_grad_norm_(model, 1.0)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if world.rank == 1:
            model.moe.down_proj.grad[0, 0, 0] = math.nan
        norm = epmoe.clip_grad_norm_(model, 1.0)
        wrong = outcome(lambda: epmoe.clip_grad_norm_(model, 1.0, 0))
        model.moe.finalize()
        return empty.item(), norm.item(), wrong

    for empty, norm, wrong in run_threads(main, 2):
        assert empty == 0 and math.isnan(norm) and "ValueError" in str(wrong)


# ---- whole checkpoints ----


def _saved(rank, world_size, as_threads=None):
    model = make(as_threads)
    whole, y = epmoe.whole_state_dict(model), model(tokens(0)).detach()
    own = {n: t.detach().clone() for n, t in model.named_parameters()}
    model.moe.finalize()
    return whole, own, y


def _loaded(rank, world_size, state, assign):
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    matched = model.load_state_dict(state, assign=assign)
    y = model(tokens(0)).detach()
    own = {n: t.detach().clone() for n, t in model.named_parameters()}
    close(model)
    return matched.missing_keys + matched.unexpected_keys, y, own


def test_moe_whole_state_dict_loads_on_any_number_of_ranks():
    saved = process_ranks(_saved, 2)
    whole, y = saved[0][0], saved[0][2]
    assert saved[1][0] == {} and whole["moe.gate_up_proj"].shape == (EXPERTS, 2 * INNER, HIDDEN)
    for n, t in whole.items():
        own = [o[n] for _, o, _ in saved]
        assert torch.equal(t, torch.cat(own) if n.startswith("moe.") else own[0])
    for num_ranks in (1, 2, 4):
        for rank, (wrong, got, own) in enumerate(process_ranks(_loaded, num_ranks, whole, num_ranks == 4)):
            assert wrong == []
            torch.testing.assert_close(got, y, rtol=1e-5, atol=1e-6)
            rows = own["moe.down_proj"]
            assert torch.equal(rows, whole["moe.down_proj"].chunk(num_ranks)[rank])
            assert rows.untyped_storage().nbytes() == rows.nbytes


def test_moe_whole_state_dict_of_threads():
    results = run_threads(lambda world: _saved(world.rank, world.size, world), 2)
    own = [own["moe.down_proj"] for _, own, _ in results]
    assert torch.equal(results[0][0]["moe.down_proj"], torch.cat(own))


def _wrong_shape(rank, world_size):
    model = make()
    state = model.state_dict() | {"moe.down_proj": torch.zeros(3, HIDDEN, INNER)}
    got = outcome(lambda: model.load_state_dict(state))
    close(model)
    return got


def test_moe_load_state_dict_says_which_experts_it_wants():
    for rank, got in enumerate(process_ranks(_wrong_shape, 2)):
        assert f"moe of rank {rank} has the experts {2 * rank} to {2 * rank + 1} of 4" in str(got), got


@pytest.mark.parametrize("part", ["router", "adapters"])
def test_moe_load_state_dict_without_the_experts_is_a_matter_of_strict(part):
    def main(world):
        model = make(world)
        model.moe.add_adapter("a", 2, 2)
        before = copies(dict(model.named_parameters()))
        state = {name: torch.full_like(t, 7) for name, t in before.items() if part in name}
        missing = model.load_state_dict(state, strict=False).missing_keys
        got = copies(dict(model.named_parameters())), sorted(missing)
        strict = outcome(lambda: model.load_state_dict(state))
        some = outcome(lambda: model.load_state_dict(state | {"moe.down_proj": before["moe.down_proj"]},
                                                     strict=False))
        model.moe.finalize()
        return got, (before | state, sorted(before.keys() - state.keys())), strict, some

    for (got, missing), (want, lacks), strict, some in run_threads(main, 2):
        assert same(got, want) and missing == lacks
        assert "Missing key(s) in state_dict" in strict.text and "Nothing of it" not in strict.text
        assert "Missing: moe.gate_up_proj" in some.text and "Nothing of it was loaded" in some.text, some


def test_moe_load_state_dict_one_by_one_of_a_rank_without_experts():
    """Three ranks have two, two and none of four experts, and each passes its own."""
    def main(world):
        moe = epmoe.EPMoE(16, 32, 4, 2, world, max_tokens=8, dtype=torch.float32, device="cpu")
        own = range(2 * world.rank, min(2 * world.rank + 2, 4))
        g = torch.Generator().manual_seed(1)
        whole = {f"{e}.{name}.weight": torch.randn(shape, generator=g) for e in range(4)
                 for name, shape in (("gate_proj", (32, 16)), ("up_proj", (32, 16)), ("down_proj", (16, 32)))}
        moe.load_state_dict({key: t for key, t in whole.items() if int(key[0]) in own})
        got = moe.down_proj.detach()[:len(own)]
        right = all(torch.equal(t, whole[f"{e}.down_proj.weight"]) for e, t in zip(own, got))
        wrong = outcome(lambda: moe.load_state_dict({"down_proj": torch.zeros(2, 16, 32)})).kind
        moe.finalize()
        return right, len(own), wrong

    assert run_threads(main, 3) == [(True, n, "RuntimeError") for n in (2, 2, 0)]


def _fp8_in_ddp(rank, world_size):
    moe = epmoe.EPMoE(128, 128, 4, 2, device="cpu", max_tokens=16, weight_dtype=torch.float8_e4m3fn)
    moe.add_adapter("a", r=2, alpha=1)
    moe.set_adapter("a")
    model = torch.nn.ModuleDict({"moe": moe, "other": torch.nn.Linear(4, 4)})
    before = moe.down_proj.detach().clone()
    DistributedDataParallel(epmoe.prepare_ddp(model))
    same = torch.equal(before.view(torch.uint8), moe.down_proj.detach().view(torch.uint8))
    moe.finalize()
    return same


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_moe_ddp_leaves_experts_in_fp8_alone(num_ranks):
    assert all(process_ranks(_fp8_in_ddp, num_ranks))


# ---- the experts' parameters ----


def test_moe_expert_parameters_names_each_once():
    def main(world):
        model = make(world)
        model.again = model.moe
        got = [id(p) for p in epmoe.expert_parameters(model)]
        want = [id(p) for p in model.moe.parameters()]
        model.moe.finalize()
        return sorted(got) == sorted(want)

    assert all(run_threads(main, 2))


WRAPPED = """
import threading
import epmoe
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.utils import clip_grad

OWNERS = ((clip_grad, "_get_total_norm"), (clip_grad, "_clip_grads_with_norm_"), (FSDPParam, "__init__"),
          (torch.amp.GradScaler, "unscale_"), (torch.amp.GradScaler, "_check_inf_per_device"),
          (torch.optim.Optimizer, "state_dict"), (torch.optim.Optimizer, "load_state_dict"),
          (torch.nn.parallel.DistributedDataParallel, "_build_params_for_reducer"))

def functions():
    return {name: getattr(owner, name) for owner, name in OWNERS}

def make(world):
    moe = epmoe.EPMoE(16, 16, 2, 1, world, max_tokens=1, dtype=torch.float32, device="cpu")
    list(moe.named_children())  # as fully_shard does
    moe.finalize()

before = functions()
make(epmoe.World())
print(*sorted(n for n, f in functions().items() if f is not before[n]), sep=",")
threads = [threading.Thread(target=make, args=(w,)) for w in epmoe.thread_worlds(2)]
[t.start() for t in threads]
[t.join() for t in threads]
print(*sorted(n for n, f in functions().items() if f is not before[n]), sep=",")
"""


@pytest.mark.parametrize("setting, alone, several", [  # __init__ of FSDPParam notes shards of one rank, too
    (None, "__init__",
           "__init__,_build_params_for_reducer,_check_inf_per_device,_clip_grads_with_norm_,_get_total_norm,"
           "load_state_dict,state_dict,unscale_"),
    pytest.param("0", "", "", marks=pytest.mark.long)])
def test_moe_wraps_only_the_functions_of_torch_that_it_needs(setting, alone, several):
    environment = {name: value for name, value in os.environ.items() if name != "EPMOE_WRAP_TORCH"}
    if setting is not None:
        environment["EPMOE_WRAP_TORCH"] = setting
    done = subprocess.run([sys.executable, "-c", WRAPPED], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{alone}\n{several}\n", done.stderr
