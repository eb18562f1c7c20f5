"""Guards of experts beside data parallelism: what EPMoE refuses, and the functions of torch that it wraps.

DistributedDataParallel and FSDP take parameters for copies of the same numbers, unless they are told
otherwise.  Without the checks the results would be wrong, and no error would tell.

torch takes plain gradients for replicas, which are equal on all ranks.  It computes their norm, to clip them,
and GradScaler looks for infinities in them, on each rank by itself.  With different experts the ranks would
get different results: one scales the shared parameters otherwise than the others, or skips a step alone.
torch has no hooks there.  So this file wraps functions of torch.  They do what they did before for gradients
and parameters without experts.

| function | what the wrapper adds |
|---|---|
| torch.nn.utils.clip_grad._get_total_norm | the norm is over the experts of all ranks |
| torch.nn.utils.clip_grad._clip_grads_with_norm_ | meshes are scaled apart; an error if gradients wait |
| torch.amp.GradScaler.unscale_ | an infinity counts on all ranks; an error if gradients wait |
| torch.amp.GradScaler._check_inf_per_device | the same |
| DistributedDataParallel._build_params_for_reducer | which gradients it averages is remembered |
| torch.optim.Optimizer.state_dict, .load_state_dict | what a first step adds (shards.teach) |
| FSDPParam.__init__ of FSDP2 | the shard is remembered; an error over ranks with different experts |

All but the last are wrapped when a process creates its first EPMoE of several ranks, with room for more
experts than there are, or with delay_wgrad_compute.  FSDPParam is wrapped when fully_shard visits an EPMoE.
With EPMOE_WRAP_TORCH=0 nothing is wrapped.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from ..gemm.weight_gradients import check_no_delay, parameters_of
from . import shards
from .shards import is_dtensor, is_spread, learn_mesh, of_ranks, owners

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    from .module import EPMoE

_lock = threading.Lock()  # ranks may be threads
_is_installed = False
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param"  # private


def _ranks(group: ProcessGroup | None) -> set[int]:
    return set(dist.get_process_group_ranks(group))


def check_ddp(moe: EPMoE, ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError if DistributedDataParallel averages the experts of `moe`, and must not.

    Also if it does not average a parameter that requires a gradient.
    """
    world, own = moe.layer.world, {id(t) for t in shards.tensors(moe)}
    # Private: ddp.parameters() has those that are ignored, too, and those that were added later.
    managed = {id(t) for t in (*ddp._module_parameters, *ddp.modules_buffers)}
    is_managed = not own.isdisjoint(managed)
    if is_managed and moe._fuses_gradients:
        raise RuntimeError("DistributedDataParallel averages the gradients of this EPMoE, but not main_grad, "
                           "where fuse_wgrad_accumulation puts them: leave fuse_wgrad_accumulation out")
    if torch.is_grad_enabled():
        _check_trained(ddp)
    if not is_spread(world) or len(_ranks(world.group) & _ranks(ddp.process_group)) < 2:
        return
    if is_managed:
        raise RuntimeError("DistributedDataParallel takes the experts of this EPMoE for copies, and has "
                           "overwritten those of all ranks with one rank's: make the model again, and wrap "
                           "it as DistributedDataParallel(epmoe.prepare_ddp(model)), after all "
                           "parametrizations, masks and adapters were added")
    for t in _leaves(moe):
        if id(t) not in own and id(t) in managed:
            name = next((n for n, p in ddp.module.named_parameters() if p is t), "a parameter")
            raise RuntimeError(f"the weights of this EPMoE are computed from {name}, which is not below it, "
                               f"so that DistributedDataParallel takes it for the same on all ranks, and has "
                               f"overwritten it: make the model again, and call moe.adopt(module), with "
                               f"the module that has it, before epmoe.prepare_ddp(model)")


def _check_trained(ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError for parameters whose gradients DistributedDataParallel does not average.

    It averages those that required gradients when it was made: _noting_averaged has recorded their ids.
    """
    ignored = set(ddp.parameters_to_ignore)  # names: parameters may be replaced
    known = ddp.__dict__.get("_epmoe_known")
    if known is None:  # it was made before torch was wrapped
        return
    if new := [name for name, p in ddp.module.named_parameters()
               if p.requires_grad and name not in ignored and id(p) not in known]:
        raise RuntimeError(f"parameter {new[0]} did not require a gradient when DistributedDataParallel was "
                           f"made, so its gradient is not averaged over the ranks: make a new "
                           f"DistributedDataParallel after set_lora, set_adapter or requires_grad_")


def _leaves(moe: EPMoE) -> list[Tensor]:
    """Return the tensors from which the weights of an EPMoE are computed, as autograd knows them."""
    names = "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"
    grad_fns = [getattr(getattr(moe, name), "grad_fn", None) for name in names]
    nodes: list[Any] = [node for node in grad_fns if node is not None]
    seen: set[Any] = set()
    leaves: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        later = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(later)
        nodes += later
    return leaves


def check_sharded(moe: EPMoE, name: str, value: DTensor) -> None:
    """Raise ValueError if FSDP shards a module over ranks with different experts.

    value: What FSDP has set in the place of the parameter.
    """
    world = moe.layer.world
    if moe._has_other_gradients:
        raise ValueError(f"{name} would be sharded by FSDP, which reduces gradients in the backward: leave "
                         f"delay_wgrad_compute and fuse_wgrad_accumulation out")
    if not moe._format.is_saved_as_held:
        raise ValueError(f"{name} would be sharded by FSDP, but weights in {moe._format.title} cannot be: "
                         f"pass the experts as ignored_params= to prepare_fsdp and to fully_shard")
    mesh = value.device_mesh
    if moe.expert_map is not None and mesh.size() > 1:
        raise ValueError(f"{name} would be sharded over {mesh.size()} ranks, which needs as many experts on "
                         f"each rank: {moe.num_experts} experts on {world.size} ranks, with "
                         f"{moe.layer.num_experts} physical ones, are not.  Use ep_group with all ranks")
    if not is_spread(world):
        return
    if len(_ranks(world.group) & set(mesh.mesh.flatten().tolist())) > 1:
        raise ValueError(f"{name} would be sharded over ranks that hold different experts: first call "
                         f"epmoe.prepare_fsdp(model), then fully_shard(model); or fully_shard(moe, mesh=...) "
                         f"for each EPMoE, with a mesh of the ranks that hold the same experts")
    learn_mesh(moe, mesh)


def may_be_sharded(moe: EPMoE) -> bool:
    """Return whether FSDP2 shards the parameters of a module, or may do so.

    With EPMOE_WRAP_TORCH=0 epmoe does not see what FSDP2 shards.  Then it may, once it is imported.
    """
    return moe._is_sharded or not _may_wrap() and _FSDP in sys.modules


def check_flat(moe: EPMoE) -> None:
    """Raise RuntimeError if a tensor of the experts of `moe` is a part of the flat parameter of FSDP1."""
    held = (t for root in shards.roots(moe) for _, m in shards.modules_below(root)
            for t in (*m.parameters(recurse=False), *m.__dict__.values()) if isinstance(t, torch.Tensor))
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes seconds to import
    if fsdp and is_spread(moe.layer.world) and any(isinstance(t._base, fsdp.FlatParameter) for t in held):
        raise RuntimeError("FullyShardedDataParallel (FSDP1) takes the experts of this EPMoE for copies, and "
                           "has mixed those of different ranks: make the model again, and use FSDP2: "
                           "fully_shard(epmoe.prepare_fsdp(model))")


# ---- functions of torch ----


def _may_wrap() -> bool:
    """Whether torch may be wrapped: EPMOE_WRAP_TORCH=0 forbids it."""
    return os.environ.get("EPMOE_WRAP_TORCH", "") != "0"


def install() -> None:
    """Wrap the functions that compute with all gradients, once in a process."""
    global _is_installed
    with _lock:
        if _is_installed or not _may_wrap():
            return
        # The public names beside the private ones are what users have imported already, too late to wrap.
        scaler, optimizer = torch.amp.GradScaler, torch.optim.Optimizer
        parallel = torch.nn.parallel.DistributedDataParallel
        for owner, name, wrap in ((clip_grad, "_get_total_norm", _over_experts),
                                  (clip_grad, "_clip_grads_with_norm_", _mesh_by_mesh),
                                  (scaler, "unscale_", _of_all_ranks),
                                  (scaler, "_check_inf_per_device", _of_all_ranks),
                                  (parallel, "_build_params_for_reducer", _noting_averaged),
                                  (optimizer, "state_dict", _knowing_experts),
                                  (optimizer, "load_state_dict", _knowing_experts)):
            setattr(owner, name, wrap(getattr(owner, name)))
        _is_installed = True


def install_fsdp() -> None:
    """Let FSDP2 refuse to shard the tensors of experts over ranks with different ones, once in a process.

    Its module takes seconds to import, so this does nothing where it is not imported.
    """
    sharded = getattr(sys.modules.get(_FSDP), "FSDPParam", None)
    with _lock:
        if sharded is not None and _may_wrap() and not hasattr(sharded.__init__, "__wrapped__"):
            sharded.__init__ = _without_experts(sharded.__init__)


def _without_experts(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap FSDPParam.__init__, which shards a parameter."""

    @functools.wraps(init)
    def wrapper(self: Any, param: nn.Parameter, module_info: Any, *args: Any, **kwargs: Any) -> None:
        owners = shards.owners_of(param)
        init(self, param, module_info, *args, **kwargs)
        for moe in owners:
            moe._is_sharded = True
            if shards.is_registered(moe):
                check_sharded(moe, module_info.param_name, self.sharded_param)
            shards.note_fsdp(moe, self)

    return wrapper


def _by_world(grads: Iterable[Tensor],
              known: Mapping[int, EPMoE]) -> tuple[list[tuple[EPMoE, list[Tensor]]], list[Tensor]]:
    """Return [(an EPMoE of a world, the gradients of the experts of this world)], and the other gradients.

    Of worlds with several ranks.
    """
    worlds: dict[int, tuple[EPMoE, list[Tensor]]] = {}
    others: list[Tensor] = []
    for grad in grads:
        if (moe := known.get(id(grad))) is None or moe.layer.world_size == 1:
            others.append(grad)
        else:
            worlds.setdefault(id(moe.layer.world), (moe, []))[1].append(grad)
    return list(worlds.values()), others


def _over_experts(get_total_norm: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function with which torch.nn.utils.clip_grad_norm_ computes the norm of gradients."""

    @functools.wraps(get_total_norm)
    def wrapper(tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, error_if_nonfinite: bool = False,
                foreach: bool | None = None) -> Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        worlds, others = _by_world(tensors, owners(lambda p: p.grad))
        if not worlds:
            return get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
        if not float(norm_type) > 0:
            raise ValueError(f"norm_type {norm_type}: must be positive")
        device, norms = tensors[0].device, _norms(get_total_norm, others, norm_type, foreach)
        for moe, grads in worlds:
            mine = get_total_norm(_norms(get_total_norm, grads, norm_type, foreach), norm_type)
            norms += of_ranks(moe, mine.to(torch.float32)).unbind()
        return get_total_norm([n.to(device, torch.float32) for n in norms], norm_type, error_if_nonfinite)

    return wrapper


def _alike(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[list[Tensor]]:
    """Return lists of tensors whose gradients torch can take together: plain ones, and of each mesh."""
    lists: dict[Any, list[Tensor]] = {}
    for t, grad in zip(tensors, grads):
        lists.setdefault(getattr(grad, "device_mesh", None), []).append(t)
    return list(lists.values())


def _mesh_by_mesh(clip_grads_with_norm_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function with which clip_grad_norm_ scales gradients.  FSDP shards experts on another mesh."""

    @functools.wraps(clip_grads_with_norm_)
    def wrapper(parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor,
                foreach: bool | None = None) -> None:
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check_no_delay(params, "clip_grad_norm_ scales gradients", "clip_grad_norm_")
        params = [p for p in params if p.grad is not None]
        for alike in _alike(params, [p.grad for p in params]):
            clip_grads_with_norm_(alike, max_norm, total_norm, foreach)

    return wrapper


def _norms(get_total_norm: Callable[..., Any], grads: Sequence[Tensor], norm_type: float,
           foreach: bool | None) -> list[Tensor]:
    """Return norms that together have the norm of the gradients; of sharded ones over all shards."""
    norms = []
    for alike in _alike(grads, grads):
        norm = get_total_norm(alike, norm_type, False, foreach)
        norms.append(norm.full_tensor() if is_dtensor(norm) else norm)
    return norms


def _of_all_ranks(find_infinities: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of GradScaler that looks for infinities in the gradients of an optimizer."""

    @functools.wraps(find_infinities)
    def wrapper(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        if self.is_enabled():
            check_no_delay(parameters_of(optimizer), "GradScaler.unscale_ scales gradients", "unscale_")
        found = find_infinities(self, optimizer)
        if self.is_enabled():
            own = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            for moe, _ in _by_world(params, owners())[0]:
                total = sum(t.to(moe.layer.device) for t in own)
                for t in own:
                    t.copy_(of_ranks(moe, total).amax())
        return found

    return wrapper


def _noting_averaged(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of DistributedDataParallel that chooses which gradients it averages.

    _epmoe_known: The ids of the parameters that it averages or was told to ignore.
    """

    @functools.wraps(build)
    def wrapper(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        parameters, *others = build(self, *args, **kwargs)
        # Wrappers such as peft's give a parameter another name during a call.
        ignored = [p for name, p in self.module.named_parameters(remove_duplicate=False)
                   if name in self.parameters_to_ignore]
        self.__dict__["_epmoe_known"] = {id(p) for p in (*parameters, *ignored)}
        return parameters, *others

    return wrapper


def _knowing_experts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Optimizer.  Adagrad has states before its first step."""

    @functools.wraps(method)
    def wrapper(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        shards.teach(self)
        return method(self, *args, **kwargs)

    return wrapper
