"""What EPMoE does beside data parallelism: checks, and gradients of means.

DistributedDataParallel and FSDP take parameters for copies of the same numbers, unless they are told
otherwise.  Without the checks the results would be wrong, and no error would tell.
"""

import torch
import torch.distributed as dist

from . import shards
from .shards import is_dtensor, is_spread, learn_mesh


def _ranks(group):
    return set(dist.get_process_group_ranks(group))


def check_ddp(moe, ddp):
    """Raise RuntimeError if DistributedDataParallel averages the experts of `moe`, and must not."""
    world, own = moe.layer.world, {id(t) for t in shards.tensors(moe)}
    managed = {id(t) for t in (*ddp._module_parameters, *ddp.modules_buffers)}
    is_managed = not own.isdisjoint(managed)
    if is_managed and moe._fuses_gradients:
        raise RuntimeError("DistributedDataParallel averages the gradients of this EPMoE, but not main_grad, "
                           "where fuse_wgrad_accumulation puts them: leave fuse_wgrad_accumulation out")
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


def _leaves(moe):
    """Return the tensors from which the weights of an EPMoE are computed, as autograd knows them."""
    names = "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"
    grad_fns = [getattr(getattr(moe, name), "grad_fn", None) for name in names]
    nodes, seen, leaves = [node for node in grad_fns if node is not None], set(), []
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        later = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(later)
        nodes += later
    return leaves


def check_sharded(moe, name, value):
    """Raise ValueError if FSDP shards a parameter over ranks that hold different experts.

    value: What FSDP has set in the place of the parameter.
    """
    world = moe.layer.world
    if moe._has_other_gradients:
        raise ValueError(f"{name} would be sharded by FSDP, which reduces gradients in the backward: leave "
                         f"delay_wgrad_compute and fuse_wgrad_accumulation out")
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


def check_flat(moe):
    """Raise RuntimeError if a tensor of the experts of `moe` is a part of the flat parameter of FSDP1."""
    held = (t for root in shards.roots(moe) for _, m in shards.modules_below(root)
            for t in (*m._parameters.values(), *m.__dict__.values()) if isinstance(t, torch.Tensor))
    if is_spread(moe.layer.world) and any(getattr(t._base, "_is_flat_param", False) for t in held):
        raise RuntimeError("FullyShardedDataParallel (FSDP1) takes the experts of this EPMoE for copies, and "
                           "has mixed those of different ranks: make the model again, and use FSDP2: "
                           "fully_shard(epmoe.prepare_fsdp(model))")


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, t, scale):
        ctx.scale = scale
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None
