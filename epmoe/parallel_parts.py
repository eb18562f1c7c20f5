"""What EPMoE does beside data parallelism: checks, gradients of means, rows of whole checkpoints.

DistributedDataParallel and FSDP take parameters for copies of the same numbers, unless they are told
otherwise.  Without the checks the results would be wrong, and no error would tell.
"""

import torch
import torch.distributed as dist

def _ranks(group):
    return set(dist.get_process_group_ranks(group))


def is_spread(world):
    """Return whether experts are on several ranks of a process group."""
    return world.size > 1 and world.group is not None


def check_ddp(moe, ddp):
    """Raise RuntimeError if DistributedDataParallel averages the experts of `moe` over its ranks."""
    world = moe.layer.world
    if not is_spread(world) or len(_ranks(world.group) & _ranks(ddp.process_group)) < 2:
        return
    managed = {id(p) for p in ddp._module_parameters}
    if any(id(p) in managed for p in moe.parameters(recurse=False)):
        raise RuntimeError("DistributedDataParallel takes the experts of this EPMoE for copies, and has "
                           "overwritten those of all ranks with one rank's: make the model again, and wrap "
                           "it as DistributedDataParallel(epmoe.prepare_ddp(model))")


def check_sharded(moe, name, value):
    """Raise ValueError if FSDP shards a parameter over ranks that hold different experts.

    value: What FSDP sets in the place of the parameter.
    """
    world = moe.layer.world
    if type(value) is torch.nn.Parameter or not hasattr(value, "device_mesh") or not is_spread(world):
        return
    mesh = value.device_mesh
    if len(_ranks(world.group) & set(mesh.mesh.flatten().tolist())) > 1:
        raise ValueError(f"{name} would be sharded over ranks that hold different experts: first call "
                         f"fully_shard(moe, mesh=...) for each EPMoE, with a mesh of the ranks that hold the "
                         f"same experts, then fully_shard(model) (docs/guide.md, Training with FSDP2)")


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, t, scale):
        ctx.scale = scale
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


def own_rows(moe, state_dict, prefix):
    """Return {key: rows of this rank} of the entries of an EPMoE that have the experts of all ranks."""
    num, num_all = moe.layer.num_local_experts, moe.layer.num_experts
    first, own = moe.layer.rank * num, {}
    for name, p in moe.named_parameters(recurse=False):
        t = state_dict.get(prefix + name)
        if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == num_all != num:
            own[prefix + name] = t[first:first + num].clone()
    return own


def which_experts(moe, prefix):
    """Return a line for an error: which experts a rank has."""
    first, num = moe.layer.rank * moe.layer.num_local_experts, moe.layer.num_local_experts
    return (f"{prefix.rstrip('.') or 'EPMoE'} of rank {moe.layer.rank} has the experts {first} to "
            f"{first + num - 1} of {moe.layer.num_experts}: pass these, or all {moe.layer.num_experts}.")
