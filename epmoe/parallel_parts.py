"""What EPMoE does beside data parallelism: checks, and gradients of means.

DistributedDataParallel and FSDP take parameters for copies of the same numbers, unless they are told
otherwise.  Without the checks the results would be wrong, and no error would tell.
"""

import torch
import torch.distributed as dist

from .shards import is_dtensor, is_spread, learn_mesh


def _ranks(group):
    return set(dist.get_process_group_ranks(group))


def check_ddp(moe, ddp):
    """Raise RuntimeError if DistributedDataParallel averages the experts of `moe`, and must not."""
    world = moe.layer.world
    managed = {id(p) for p in ddp._module_parameters}
    is_managed = any(id(p) in managed for p in moe.parameters(recurse=False))
    if is_managed and moe._fuses_gradients:
        raise RuntimeError("DistributedDataParallel averages the gradients of this EPMoE, but not main_grad, "
                           "where fuse_wgrad_accumulation puts them: leave fuse_wgrad_accumulation out")
    if not is_spread(world) or len(_ranks(world.group) & _ranks(ddp.process_group)) < 2:
        return
    if is_managed:
        raise RuntimeError("DistributedDataParallel takes the experts of this EPMoE for copies, and has "
                           "overwritten those of all ranks with one rank's: make the model again, and wrap "
                           "it as DistributedDataParallel(epmoe.prepare_ddp(model))")


def check_sharded(moe, name, value):
    """Raise ValueError if FSDP shards a parameter over ranks that hold different experts.

    value: What FSDP sets in the place of the parameter.
    """
    world = moe.layer.world
    if type(value) is torch.nn.Parameter or not is_dtensor(value):
        return
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


def check_flat(moe, t):
    """Raise RuntimeError if t, a parameter of `moe`, is a part of the flat parameter of FSDP1."""
    if is_spread(moe.layer.world) and getattr(t._base, "_is_flat_param", False):
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
