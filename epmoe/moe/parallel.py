"""Experts beside data parallelism: DistributedDataParallel, clipping of gradients, whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import checkpoint, shards
from .module import EPMoE
from .shards import is_dtensor, is_spread, joined, to_first

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["clip_grad_norm_", "expert_parameters", "prepare_ddp", "prepare_fsdp", "whole_state_dict"]
_Model = TypeVar("_Model", bound=nn.Module)


class FullyShardOptions(TypedDict, total=False):
    """The options of torch's fully_shard that prepare_fsdp passes on."""

    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None


def _experts(model: nn.Module) -> dict[str, tuple[EPMoE, Tensor]]:
    """Return {name: (EPMoE, tensor)} of the parameters and buffers of all experts, under all their names."""
    of = {id(t): moe for moe in model.modules() if isinstance(moe, EPMoE) for t in shards.tensors(moe)}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: (of[id(t)], t) for name, t in named if id(t) in of}


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all EPMoE modules of a model: those that differ between the ranks.

    They are all parameters below an EPMoE, also those of a parametrization, and below the modules that it has
    adopted (EPMoE.adopt).

    Args:
        model: A module.

    Returns:
        A list of parameters, in the order of model.parameters().

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> model = torch.nn.ModuleDict({"router": torch.nn.Linear(16, 2), "experts": moe})
        >>> [list(p.shape) for p in epmoe.expert_parameters(model)]
        [[2, 64, 16], [2, 16, 32]]
        >>> moe.finalize()
    """
    known = {id(t) for _, t in _experts(model).values()}
    return [p for p in model.parameters() if id(p) in known]


def _check_unwrapped(model: nn.Module) -> None:
    """Raise ValueError where peft has put an adapter of its own around the experts of a rank."""
    for path, module in model.named_modules():
        is_of_peft = any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)
        if is_of_peft and isinstance(getattr(module, "base_layer", None), EPMoE):
            raise ValueError(f"{path}: peft has put an adapter around an EPMoE, whose factors would be taken "
                             f"for those of the same experts on all ranks: use EPMoE.add_adapter, or "
                             f"add_lora of epmoe.integrations.peft")


def prepare_ddp(model: _Model, process_group: ProcessGroup | None = None) -> _Model:
    """Prepare a model for DistributedDataParallel: it will leave the experts alone.  Not collective.

    Call it last, after parametrizations, pruning and adapters were added: it takes the parameters and buffers
    below each EPMoE, and those that it has adopted (EPMoE.adopt).

    The gradient of an expert is the sum over the tokens of all ranks.  DistributedDataParallel averages the
    other gradients over the ranks, so those of the experts are divided by W: EPMoE.gradient_scale is 1 / W.

    Args:
        model: A module, which is then passed to DistributedDataParallel.
        process_group: The group that DistributedDataParallel gets.  None: the default group.

    Returns:
        The model.

    Raises:
        ValueError: If the group has other ranks than the experts are on.  Then some ranks hold the same
            experts, which nothing would average: use prepare_fsdp and FSDP2.  If peft has put an adapter of
            its own around an EPMoE, which does not have all experts.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> model = torch.nn.ModuleDict({"router": torch.nn.Linear(16, 2), "experts": moe})
        >>> epmoe.prepare_ddp(model) is model  # then: DistributedDataParallel(model)
        True
        >>> moe.finalize()
    """
    spread = {name: found for name, found in _experts(model).items() if is_spread(found[0].layer.world)}
    if spread:
        _check_unwrapped(model)
    for moe, _ in spread.values():
        own, ranks = (sorted(dist.get_process_group_ranks(g or dist.group.WORLD))
                      for g in (moe.layer.world.group, process_group))
        if own != ranks:
            raise ValueError(f"the experts are on ranks {own}, but the group of DistributedDataParallel has "
                             f"ranks {ranks}: with several groups of experts use FSDP2: "
                             f"fully_shard(epmoe.prepare_fsdp(model))")
    # Private: the constructor of DistributedDataParallel has no argument for them.
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    # DDP would send FP8 at its creation, which gloo does not know; it has no gradients.
    in_fp8 = [name for name, (_, t) in _experts(model).items() if t.dtype.itemsize == 1]
    names = list(dict.fromkeys([*before, *spread, *in_fp8]))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    for moe, _ in spread.values():
        moe.gradient_scale = 1 / moe.layer.world_size
    return model


def _groups_of_experts(moe: EPMoE) -> list[list[int]]:
    """Return the ranks of each group that has all experts, as rows of equal length.  Collective."""
    ranks = dist.get_process_group_ranks(moe.layer.world.group)
    mine = torch.tensor([min(ranks), moe.layer.rank], device=moe.layer.device, dtype=torch.int64)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, mine)
    groups: dict[int, list[tuple[int, int]]] = {}  # first rank of a group -> (place in the group, rank)
    for rank, (group, place) in enumerate(t.tolist() for t in theirs):
        groups.setdefault(group, []).append((place, rank))
    rows = [[rank for _, rank in sorted(members)] for members in groups.values()]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"the groups of experts, ranks {rows}, do not divide all {len(theirs)} ranks into "
                         f"groups of equal size: pass mesh=")
    return rows


def prepare_fsdp(model: _Model, mesh: DeviceMesh | None = None,
                 **options: Unpack[FullyShardOptions]) -> _Model:
    """Prepare a model for fully_shard (FSDP2): shard each EPMoE over the ranks with the same experts.

    Collective over the default process group, unless `mesh` is given.  Then call fully_shard(model) as usual;
    it leaves the experts alone.  Where an EPMoE has adopted a module that contains it, that module is
    sharded in its place.  FSDP averages their gradients over the ranks with the same experts, and
    EPMoE.gradient_scale becomes 1 / W, so that they are those of the mean over all ranks.

    Args:
        model: A module.
        mesh: None, or a DeviceMesh of the ranks that have the same experts as this one.
        **options: Of fully_shard, for example reshard_after_forward, mp_policy or offload_policy.  A policy
            of mixed precision must leave the parameters in the layer's dtype.

    Returns:
        The model.

    Raises:
        ValueError: If the groups of experts do not divide all ranks into groups of equal size, `mesh` has
            ranks with different experts, or an EPMoE has adopted a module that does not contain it, and for
            experts in ignored_params of which several ranks would train copies.  For an adapter of peft as
            prepare_ddp.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> epmoe.prepare_fsdp(moe) is moe  # in one process nothing is to do; then: fully_shard(model)
        True
        >>> moe.finalize()
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    meshes: dict[int, DeviceMesh | None] = {}
    for moe in {id(moe): moe for moe, _ in _experts(model).values()}.values():
        world = moe.layer.world
        if world.group is None or dist.get_world_size() == 1:
            continue
        if mesh is None and id(world) not in meshes:
            groups = _groups_of_experts(moe)  # also on a rank that has all experts: others may be in groups
            meshes[id(world)] = None if not is_spread(world) else DeviceMesh(
                moe.layer.device.type, groups, mesh_dim_names=("replicas", "experts"))["replicas"]
        if not is_spread(world):
            continue
        _check_unwrapped(model)
        own_mesh = meshes[id(world)] if mesh is None else mesh
        ignored = {id(p) for p in options.get("ignored_params") or ()}
        if own_mesh is not None and own_mesh.size() > 1 and any(
                id(p) in ignored and p.requires_grad for p in moe.parameters()):
            raise ValueError(f"ignored_params has parameters of an EPMoE that require gradients, and "
                             f"{own_mesh.size()} ranks have copies of them, whose gradients nobody would "
                             f"average: use one group of experts for all ranks, or DistributedDataParallel")
        around = [m for m in moe._adopted if any(part is moe for part in m.modules())]
        outer = max(around, key=lambda m: sum(1 for _ in m.modules()), default=moe)
        within = {id(p) for p in outer.parameters()}
        if any(id(t) not in within and isinstance(t, torch.nn.Parameter) for t in shards.tensors(moe)):
            raise ValueError("FSDP cannot gather the parameters of a module that stands beside an EPMoE "
                             "when the EPMoE needs them: put both into one module, and let the EPMoE "
                             "adopt() that")
        fully_shard(outer, mesh=own_mesh, **options)
        moe.gradient_scale = 1 / world.size
    return model


# ---- clipping ----


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients as torch.nn.utils.clip_grad_norm_ does, with the norm over the experts of all ranks.

    Collective.  It calls torch's function, which does the same where an EPMoE has some of the experts.

    Args:
        model: The module whose gradients are clipped, not its parameters.  They may be sharded by FSDP2.
        max_norm: The largest norm.
        norm_type: p of the norm, positive; math.inf for the largest magnitude.

    Returns:
        The norm before clipping, a float32 tensor on the CPU, the same on all ranks.

    Raises:
        ValueError: On this rank, for a norm_type that is not positive.
        RuntimeError: The error of the process group, when a rank dies or does not make the call before the
            group's timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> moe(torch.ones(4, 16), torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1)).sum().backward()
        >>> norm = epmoe.clip_grad_norm_(moe, 1.0)
        >>> bool(norm > 1), round(epmoe.clip_grad_norm_(moe, 1.0).item(), 3)
        (True, 1.0)
        >>> moe.finalize()
    """
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type {norm_type}: must be positive")
    norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm, norm_type)
    return (norm.full_tensor() if is_dtensor(norm) else norm).to("cpu", torch.float32)


# ---- whole checkpoints ----


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of the whole model, with the experts of all ranks, on rank 0.  Collective.

    It is what one process that holds all experts would have, for example for a checkpoint that others can
    read.  load_state_dict() takes such a dict on any number of ranks: each EPMoE takes its experts' rows.

    Args:
        model: A module.  Parameters that FSDP2 has sharded are put together, too.

    Returns:
        On rank 0 of the experts' ranks a dict of tensors on the CPU; on the others {}.  Tensors of experts
            are [E, ..], or, where a rank's has no row for each of its experts, [W, ..], with a row of each
            rank.

    Raises:
        RuntimeError: On all ranks, for such a tensor after set_expert_map.
        RuntimeError: The error of the process group, which moves the experts, when a rank dies or does not
            make the call before the group's timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> whole = epmoe.whole_state_dict(moe)
        >>> whole["gate_up_proj"].shape
        torch.Size([2, 64, 16])
        >>> moe.load_state_dict(whole)
        <All keys matched successfully>
        >>> moe.finalize()
    """
    state = model.state_dict(keep_vars=True)  # first: it puts FSDP2's shards in the place of whole parameters
    experts = _experts(model)
    whole: dict[str, Any] = {}
    by_id = {id(p): moe for moe, p in experts.values()}
    for name, (moe, t) in experts.items():
        if not (moe._is_home or shards.is_by_expert(moe, t)):
            raise RuntimeError(f"whole_state_dict: {name}, {list(t.shape)} on a rank, has no row for each "
                               f"of its experts, which were moved: first call set_expert_map(None)")
    for moe in by_id.values():
        checkpoint.check_writable(moe)
    is_first = all(moe.layer.rank == 0 for moe in by_id.values())
    for name, t in state.items():
        owner = by_id.get(id(t))
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        if owner is not None:
            parts = to_first(owner.layer.world, t)
            if is_first and not shards.is_by_expert(owner, t):
                whole[name] = joined(torch.stack, parts) if len(parts) > 1 else parts[0]
            elif is_first:
                whole[name] = joined(torch.cat, parts)
                if owner.expert_map is not None:
                    whole[name] = whole[name][owner.expert_map.logical_to_physical_map[:, 0].cpu()]
        elif is_first:
            whole[name] = t.detach().to("cpu", copy=True) if isinstance(t, torch.Tensor) else t
    for path, module in model.named_modules(remove_duplicate=False) if is_first else ():
        if isinstance(module, EPMoE):
            checkpoint.write_weights(module, whole, f"{path}." if path else "")
    return whole
