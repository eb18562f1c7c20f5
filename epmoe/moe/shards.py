"""Which tensors belong to experts, and a rank's experts as a part of all experts in state dicts.

torch takes plain tensors for replicas: of a tensor that all ranks have under one name, it saves one rank's.
So a state dict holds the experts as DTensors of shape [E, ..], of which each rank has its rows.  Then
torch.distributed.checkpoint saves all of them, and another number of ranks can load them.  Parameters, and
the states that optimizers keep for them, stay plain tensors: docs/internals.md says why.

The tensors of experts are all parameters and buffers below an EPMoE, however deep, and those below the
modules that it has adopted.  named_tensors() is the one definition: DistributedDataParallel, FSDP, norms,
optimizers, state dicts and set_expert_map all ask it.  With L experts on a rank, a tensor [L, ..] has a row
for each expert: is_by_expert().  Of another tensor nothing is known but that it is the rank's own.
"""

from __future__ import annotations

import itertools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only  # torch has no public pytree

from .. import _C
from ..comm.nodes import Nodes
from ..comm.world import World
from ..torch_modes import without_dynamo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    from .module import EPMoE

StateDict: TypeAlias = dict[str, Any]

_HOME = "first call set_expert_map(None) on it, on all ranks"
# each EPMoE whose experts are on several ranks, or whose P is not E
_modules: weakref.WeakSet[EPMoE] = weakref.WeakSet()
# World -> {(device type, mesh of FSDP): DeviceMesh}
_meshes: weakref.WeakKeyDictionary[World | Nodes, dict[tuple[str, DeviceMesh | None], DeviceMesh]] = (
    weakref.WeakKeyDictionary())
_lock = threading.Lock()  # ranks may be threads
_all: weakref.WeakSet[EPMoE] = weakref.WeakSet()  # of this process, also those that are not registered
_fsdp_params: weakref.WeakKeyDictionary[EPMoE, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()
_has_hook = False


def is_spread(world: World | Nodes) -> bool:
    """Return whether experts are on several ranks of a process group."""
    return world.size > 1 and world.group is not None


def register(moe: EPMoE) -> None:
    """Let this file know a module whose parameters are not simply all experts, or that FSDP may not shard.

    The first one sets a hook, with which optimizers learn what belongs to experts.
    """
    global _has_hook
    with _lock:
        _modules.add(moe)
        if not _has_hook:
            register_optimizer_step_pre_hook(_before_step)
            _has_hook = True


def is_registered(moe: EPMoE) -> bool:
    """Whether register() was called for a module."""
    with _lock:
        return moe in _modules


def owners(of: Callable[[Tensor], Tensor | None] = lambda p: p) -> dict[int, EPMoE]:
    """Return {id(of(p)): its EPMoE} of the parameters of all modules that are registered.

    Also of FSDP2's shards, which optimizers have, while the modules have whole parameters in their place.
    """
    with _lock:
        modules = list(_modules)
    return {id(of(p)): moe for moe in modules for p in (*tensors(moe), *fsdp_shards(moe).values())}


def know(moe: EPMoE) -> None:
    """Let owners_of and sharing find a module."""
    with _lock:
        _all.add(moe)


def sharing(moe: EPMoE) -> list[EPMoE]:
    """Return the modules that have a parameter of a module: it, and others."""
    own = {id(p) for p in moe._parameters.values() if p is not None}
    with _lock:
        modules = [m for m in _all if m is not moe]
    # list(), because another thread may add to a module of its own meanwhile
    return [moe, *(m for m in modules if any(id(p) in own for p in list(m._parameters.values())))]


def owners_of(p: Tensor) -> list[EPMoE]:
    """Return the modules to whose experts a parameter belongs, whether they are registered or not."""
    with _lock:
        modules = list(_all)
    return [moe for moe in modules if any(t is p for t in tensors(moe))]


def note_fsdp(moe: EPMoE, fsdp_param: Any) -> None:
    """Record the FSDPParam that FSDP2 has made for a parameter of an EPMoE."""
    with _lock:
        _fsdp_params.setdefault(moe, []).append(weakref.ref(fsdp_param))


def fsdp_shards(moe: EPMoE) -> dict[int, nn.Parameter]:
    """Return {id of a parameter that a module has now: FSDP2's shard of it}.

    While FSDP2 has gathered the parameters, the module has the gathered tensors, and not the shards.  At each
    gather, FSDP2 copies numbers and requires_grad of the shards to the gathered tensors.
    """
    with _lock:
        found = [ref() for ref in _fsdp_params.get(moe, ())]
    held = [(fp._module_info, fp.sharded_param) for fp in found if fp is not None]  # private
    return {id(info.module._parameters.get(info.param_name)): shard for info, shard in held}


# ---- the tensors of experts ----


def modules_below(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return [(path, module)] of a module and all below it, but not of another EPMoE and what is below it."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if module in seen or (module is not root and hasattr(module, "_adopted")):
            continue
        seen.add(module)
        found.append((path, module))
        waiting += [(f"{path}.{name}" if path else name, m) for name, m in reversed(module._modules.items())
                    if m is not None]
    return found


def roots(moe: EPMoE) -> tuple[nn.Module, ...]:
    """Return the modules whose tensors belong to the experts of an EPMoE: it, and those it has adopted."""
    return moe, *moe._adopted


def named_tensors(root: nn.Module) -> dict[str, Tensor]:
    """Return {name: tensor} of the parameters and buffers of experts below one of roots(moe)."""
    return {f"{path}.{name}" if path else name: t for path, module in modules_below(root)
            for named in (module.named_parameters, module.named_buffers)
            for name, t in named(recurse=False, remove_duplicate=False)}


def tensors(moe: EPMoE) -> list[Tensor]:
    """Return all tensors that belong to the experts of an EPMoE, each once."""
    return list({id(t): t for root in roots(moe) for t in named_tensors(root).values()}.values())


def is_by_expert(moe: EPMoE, t: Tensor) -> bool:
    """Return whether a tensor of this rank has a row for each of its experts."""
    return t.dim() > 0 and t.shape[0] == moe.layer.num_local_experts


def is_dtensor(t: Any) -> TypeGuard[DTensor]:
    """Return whether t is a DTensor.  Does not import torch.distributed.tensor, which takes a second."""
    return hasattr(t, "device_mesh")


def as_bytes(t: Tensor) -> Tensor:
    """Return t, or for FP8 and bool its bytes: DLPack takes neither, and not every operator of torch FP8."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


# ---- meshes, and tensors of all ranks ----


def exchanged(world: World | Nodes, raw: Tensor) -> list[Tensor]:
    """Return the bytes of all ranks, which may be more than one exchange carries.  Collective.

    raw: A one-dimensional uint8 tensor on the CPU, of the same size on all ranks.
    """
    parts = [torch.empty_like(raw) for _ in range(world.size)]
    for first in range(0, len(raw), _C.ALL_GATHER_BYTES):
        piece = raw[first:first + _C.ALL_GATHER_BYTES].clone()
        for part, theirs in zip(parts, world.exchange(bytes(piece.untyped_storage()))):
            part[first:first + len(piece)] = torch.frombuffer(bytearray(theirs), dtype=torch.uint8)
    return parts


def to_first(world: World | Nodes, t: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks on the CPU of rank 0, and [] on the others.  Collective."""
    t = t.detach().contiguous()
    raw = t.reshape(-1).view(torch.uint8)
    if world.group is None:
        parts = exchanged(world, raw.cpu())
        return [] if world.rank else [p.view(t.dtype).view(t.shape) for p in parts]
    if "cpu:" in dist.get_backend_config(world.group):  # gloo ends the process that sends from a GPU
        raw = raw.cpu()
    if world.rank:
        dist.send(raw, dist.get_global_rank(world.group, 0), world.group)
        return []
    parts, piece = [raw.cpu()], torch.empty_like(raw)
    for rank in range(1, world.size):
        dist.recv(piece, dist.get_global_rank(world.group, rank), world.group)
        parts.append(piece.to("cpu", copy=True))
    return [p.view(t.dtype).view(t.shape) for p in parts]


def joined(of: Callable[[list[Tensor]], Tensor], parts: list[Tensor]) -> Tensor:
    """Return torch.cat or torch.stack of parts, also where autocast has another dtype than they have."""
    with torch.autocast(parts[0].device.type, enabled=False):
        return of(parts)


def learn_mesh(moe: EPMoE, mesh: DeviceMesh) -> None:
    """Make the mesh of all ranks that have shards of a parameter, which FSDP shards over `mesh`.

    Collective among the ranks of the experts, once for each mesh.  Its first dimension has these ranks; the
    others are those of `mesh`, which has different ranks for each of them.
    """
    from torch.distributed.device_mesh import DeviceMesh

    world = moe.layer.world
    known, key = _meshes.setdefault(world, {}), (mesh.device_type, mesh)
    if not is_spread(world) or key in known:
        return
    mine = torch.tensor(mesh.mesh.tolist(), dtype=torch.int32, device="cpu")  # contiguous, whatever the sizes
    rows = [raw.view(torch.int32).view(mine.shape) for raw in
            exchanged(world, mine.view(-1).view(torch.uint8))]
    assert world.group is not None  # is_spread says so
    groups = [world.group, *(mesh.get_group(i) for i in range(mesh.ndim))]
    names = ("experts", *(f"replicas{i}" for i in range(mesh.ndim)))
    known[key] = DeviceMesh.from_group(groups, mesh.device_type, torch.stack(rows), mesh_dim_names=names)


def _mesh_of(world: World | Nodes, t: Tensor) -> DeviceMesh:
    """Return the mesh of all ranks that have shards of what t is a part of."""
    from torch.distributed.device_mesh import DeviceMesh

    known = _meshes.setdefault(world, {})
    if is_dtensor(t):
        return known[t.device_mesh.device_type, t.device_mesh]
    if (t.device.type, None) not in known:
        assert world.group is not None  # the caller has asked is_spread
        known[t.device.type, None] = DeviceMesh.from_group(world.group, t.device.type)
    return known[t.device.type, None]


# ---- parts and wholes ----


def as_shard(moe: EPMoE, t: Tensor, p: Tensor) -> Tensor:
    """Return t of this rank, without a copy, as a DTensor of all ranks.

    t: p, or what an optimizer has for p.
    One with a row for each expert becomes [E, ..], of which the rank has its experts; as in torch's chunks,
    the last ranks have fewer.  Another p becomes [W, ..], with a row for each rank.  Other states of an
    optimizer are put one after the other.  Without a process group, return the rows of the rank's experts.
    """
    is_own = t.shape == p.shape
    if t.dim() == 0 and not is_own:
        return t
    if not moe._is_home:
        raise RuntimeError(f"state_dict() of an EPMoE whose experts were moved: {_HOME}, or take "
                           f"epmoe.whole_state_dict(model)")
    world = moe.layer.world
    placements: Sequence[Any] = t.placements if is_dtensor(t) else ()
    local = t.to_local() if is_dtensor(t) else t
    if is_own and not is_by_expert(moe, t):
        if not is_spread(world):
            return t
        from torch.distributed.tensor import Shard

        later = [Shard(p.dim + 1) if p.is_shard() else p for p in placements]
        return _of_mesh(local[None], _mesh_of(world, t), [Shard(0), *later], (world.size, *t.shape))
    num_all = t.shape[0] * world.size
    if is_by_expert(moe, t):
        first, end = experts_of_rank(moe)
        num_all = moe.num_experts
        if end - first < len(moe._held):  # FSDP has not split it: see check_sharded
            local = local[:end - first]
    shape = num_all, *t.shape[1:]
    if is_spread(world):
        from torch.distributed.tensor import Shard

        return _of_mesh(local, _mesh_of(world, t), [Shard(0), *placements], shape, t.stride())
    return _of_mesh(local, t.device_mesh, placements, shape, t.stride()) if is_dtensor(t) else local


def _of_mesh(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int],
             stride: tuple[int, ...] | None = None) -> Tensor:
    """Return the DTensor of a shape, of which `local` is this rank's part."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta", dtype=local.dtype).stride() if stride is None else stride
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape),
                              stride=stride)


def own_part(moe: EPMoE, t: Tensor, p: Tensor) -> Tensor:
    """Return what this rank keeps of t, which belongs to its tensor p: the inverse of as_shard.

    t: What as_shard returns, or that of all ranks as a plain tensor; also a number.
    """
    if t.dim() == 0:
        return t
    if not is_by_expert(moe, p) and t.shape in (p.shape, _shape_of_ranks(moe, p)):
        return _own_row(moe, t, p)
    first, end = experts_of_rank(moe)
    num_all = moe.num_experts
    if not moe._is_home and (is_dtensor(t) or t.shape[0] != num_all):
        raise RuntimeError(f"an EPMoE whose experts were moved cannot load the part of a rank: {_HOME}, or "
                           f"load all {num_all} experts")
    if is_dtensor(t) and is_dtensor(p) and t.device_mesh == p.device_mesh:
        if t.shape[0] != num_all or len(moe._held) == end - first == num_all:
            return t
        t = t.full_tensor()  # set_model_state_dict has sharded all experts over the mesh of FSDP
    if is_dtensor(t):
        is_ours = t.shape[0] == num_all
        num = len(moe._held) if is_ours else t.shape[0] // moe.layer.world_size
        shape, t = (num, *t.shape[1:]), t.to_local()
        if is_ours and num > end - first:
            t = _placed(moe, t, first)
    else:
        is_whole = t.shape[0] == num_all
        if is_whole or t.shape[0] == end - first:
            t = _placed(moe, t, 0 if is_whole else first)
        shape = None
    return like(t, p, shape)


def _shape_of_ranks(moe: EPMoE, p: Tensor) -> torch.Size:
    """Return the shape of all ranks' tensors p, where p has no row for each expert."""
    return torch.Size((moe.layer.world_size, *p.shape) if moe.layer.world_size > 1 else p.shape)


def _own_row(moe: EPMoE, t: Tensor, p: Tensor) -> Tensor:
    """Return own_part of t for a p without a row for each expert."""
    is_row = t.shape == p.shape
    if is_dtensor(t) and is_dtensor(p) and t.device_mesh == p.device_mesh:
        if is_row:
            return t
        t = t.full_tensor()  # as in own_part
    if is_dtensor(t):
        return like(t.to_local()[0], p, p.shape) if not is_row else t
    return like(t if is_row else t[moe.layer.rank].clone(), p, None)


def like(t: Tensor, p: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return t as p is: plain, or sharded.  shape: of the whole, if t is a shard, else None."""
    if not is_dtensor(p):
        return t
    from torch.distributed.tensor import distribute_tensor

    if shape is None:
        return distribute_tensor(t.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
    return _of_mesh(t, p.device_mesh, p.placements, shape)


def _placed(moe: EPMoE, t: Tensor, first: int) -> Tensor:
    """Return [L, ..] of this rank's physical experts.  t: the experts from `first` on."""
    if moe._held == list(range(first, first + t.shape[0])):
        return t
    rows = torch.tensor(moe._held, device=t.device, dtype=torch.int64) - first
    held = torch.tensor([e >= 0 for e in moe._held], device=t.device, dtype=torch.bool)
    out = t.new_zeros(len(rows), *t.shape[1:])
    as_bytes(out)[held] = as_bytes(t)[rows[held]]
    return out


def save(moe: EPMoE, root: nn.Module, state_dict: StateDict, prefix: str, metadata: StateDict,
         saved: dict[str, Tensor] | None = None) -> None:
    """Put the tensors of experts below one of roots(moe) into its state dict as DTensors.

    Notes in the metadata which experts they are.  With keep_vars=True the tensors themselves are left there.
    saved: None, or {name: a tensor of as many experts} where state dicts have others than named_tensors.
    """
    own = named_tensors(root)
    named, tensors = own | (saved or {}), {id(p) for p in own.values()}
    for name, p in named.items():
        t = state_dict.get(prefix + name)
        if isinstance(t, torch.Tensor) and id(t) not in tensors:
            state_dict[prefix + name] = as_shard(moe, t, p)
    if not is_spread(moe.layer.world):
        return
    metadata["experts"] = experts_of_rank(moe)
    others = tuple(f"{prefix}{path}." for path, m in root.named_modules()
                   if m is not root and hasattr(m, "_adopted"))
    for key, t in state_dict.items():
        if (isinstance(t, torch.Tensor) and key.startswith(prefix) and key[len(prefix):] not in named
                and not key.startswith(others)):
            raise RuntimeError(f"state_dict(): {key} belongs to the experts of a rank, but is neither a "
                               f"parameter nor a buffer: make it one (register_buffer)")


def own_entries(moe: EPMoE, root: nn.Module, state_dict: StateDict, prefix: str, metadata: StateDict,
                errors: list[str], named: dict[str, Tensor] | None = None) -> StateDict:
    """Return {key: what this rank keeps} of the tensors of experts below one of roots(moe), in a state dict.

    Appends to `errors` if they are the experts of another rank, whose file this rank has read.
    named: None, or what the state dict may have in the place of named_tensors.
    """
    saved = metadata.get("experts")
    own: StateDict = {}
    for name, p in (named_tensors(root) if named is None else named).items():
        t = state_dict.get(prefix + name)
        if not isinstance(t, torch.Tensor):
            continue
        is_by_rank = not is_by_expert(moe, p)
        if is_by_rank and t.shape not in (p.shape, _shape_of_ranks(moe, p)):
            got = f"of {t.shape[0]} ranks" if t.dim() and t.shape[1:] == p.shape else str(list(t.shape))
            errors.append(f"{prefix}{name}: is {got}, but wanted {list(p.shape)} of each of "
                          f"{moe.layer.world_size} ranks.  The shape does not say which experts its parts "
                          f"belong to, so that only as many ranks can load it.")
            own[prefix + name] = p
            continue
        try:
            own[prefix + name] = own_part(moe, t, p)
        except RuntimeError as error:
            errors.append(f"{prefix}{name}: {error}.")
            own[prefix + name] = p
        if is_by_rank:
            is_whole = t.shape == _shape_of_ranks(moe, p)
        else:
            is_whole = own[prefix + name] is not t and t.dim() > 0 and t.shape[0] == moe.num_experts
        if saved not in (None, experts_of_rank(moe)) and (is_dtensor(t) or not is_whole):
            errors.append(f"{prefix}{name}: has the experts {saved[0]} to {saved[1] - 1}, because "
                          f"another rank saved its state_dict() alone.  Save with "
                          f"torch.distributed.checkpoint, or "
                          f"epmoe.whole_state_dict(model), or a file for each rank.")
    return own


def load_adopted(moe: EPMoE, root: nn.Module, state_dict: StateDict, prefix: str, metadata: StateDict,
                 strict: bool, missing: list[str], unexpected: list[str], errors: list[str]) -> None:
    """A hook of a module that an EPMoE has adopted, before it loads a state dict."""
    state_dict.update(own_entries(moe, root, state_dict, prefix, metadata, errors))


def experts_of_rank(moe: EPMoE) -> tuple[int, int]:
    """Return the first expert that a rank has, and the one after its last, in the home of the experts."""
    num = -(-moe.num_experts // moe.layer.world_size)
    first = min(moe.layer.rank * num, moe.num_experts)
    return first, min(first + num, moe.num_experts)


def which_experts(moe: EPMoE, prefix: str) -> str:
    """Return a line for an error: which experts a rank has."""
    first, end = experts_of_rank(moe)
    has = f"the experts {first} to {end - 1}" if end > first else "none"
    return (f"{prefix.rstrip('.') or 'EPMoE'} of rank {moe.layer.rank} has {has} "
            f"of {moe.num_experts}: pass these, or all {moe.num_experts}.")


# ---- optimizers ----


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _map_states(optimizer: torch.optim.Optimizer, state_dict: StateDict,
                function: Callable[[EPMoE, Tensor, Tensor], Tensor]) -> StateDict:
    """Return a state dict with function(moe, t, p) of each tensor in the state of an expert parameter p."""
    known, states = owners(), dict(state_dict["state"])
    keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    for key, p in zip(keys, _params(optimizer)):
        if (moe := known.get(id(p))) is not None and key in states:
            states[key] = tree_map_only(torch.Tensor, lambda t: function(moe, t, p), states[key])
    return {**state_dict, "state": states}


def _after_state_dict(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    return _map_states(optimizer, state_dict, as_shard)


def _before_load_state_dict(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
    return _map_states(optimizer, state_dict, own_part)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that torch calls before each step of each optimizer."""
    teach(optimizer)
    with _lock:
        moved = [moe for moe in _modules if not moe._is_home or moe._move is not None]
    if not moved:
        return
    theirs = {id(p) for moe in moved for p in tensors(moe)}
    if any(p.grad is not None and id(p) in theirs for p in _params(optimizer)):
        raise RuntimeError("a step of an optimizer while an EPMoE routes by another map: the gradients are "
                           "those of the experts that were there before: call set_expert_map(None) first")


def teach(optimizer: torch.optim.Optimizer) -> None:
    """Let the state dict of an optimizer hold the states of experts as DTensors, from now on."""
    if "_knows_experts" not in optimizer.__dict__:
        _teach(optimizer)


@without_dynamo
def _teach(optimizer: Any) -> None:
    known = owners()
    mine = [(known[id(p)], p) for p in _params(optimizer) if id(p) in known]
    if mine and type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise RuntimeError("ZeroRedundancyOptimizer would overwrite the experts of all ranks with one rank's:"
                           " give it the other parameters, and another optimizer "
                           "epmoe.expert_parameters(model)")
    if isinstance(optimizer, torch.optim.LBFGS) and any(moe.layer.world_size > 1 for moe, _ in mine):
        raise RuntimeError("LBFGS computes one step from all its gradients, so that each rank, with other "
                           "experts, would step the shared parameters otherwise: give it the other "
                           "parameters, and another optimizer, for example AdamW, "
                           "epmoe.expert_parameters(model)")
    optimizer._knows_experts = True
    optimizer.register_state_dict_post_hook(_after_state_dict)
    optimizer.register_load_state_dict_pre_hook(_before_load_state_dict)
    for moe, p in mine:  # a state that was loaded before, or is this rank's own, as in a deep copy
        if p in optimizer.state:
            own = tree_map_only(
                torch.Tensor, lambda t: t if t.shape == p.shape and is_dtensor(t) == is_dtensor(p)
                else own_part(moe, t, p), optimizer.state[p])
            optimizer.state[p] = own


# ---- numbers of all ranks ----


def of_ranks(moe: EPMoE, number: Tensor) -> Tensor:
    """Return the numbers of all ranks, a tensor [W], from a tensor with one number.  Collective."""
    world = moe.layer.world
    if world.group is None:
        raw = world.exchange(struct.pack("d", number.item()))
        return torch.tensor([struct.unpack("d", r)[0] for r in raw], dtype=number.dtype, device=number.device)
    mine = number.detach().reshape(1).to(moe.layer.device)
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine, world.group)
    return torch.cat(parts).to(number.device)
