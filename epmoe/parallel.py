"""Experts beside data parallelism: DistributedDataParallel, clipping of gradients, whole checkpoints."""

import math
import struct

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _C
from .moe import EPMoE
from .parallel_parts import is_spread

__all__ = ["clip_grad_norm_", "expert_parameters", "prepare_ddp", "whole_state_dict"]


def _experts(model):
    """Return {name: (EPMoE, parameter)} of all expert parameters, each once."""
    found, seen = {}, set()
    for path, part in model.named_modules():
        if isinstance(part, EPMoE):
            for name, p in part.named_parameters(recurse=False):
                if id(p) not in seen:
                    seen.add(id(p))
                    found[f"{path}.{name}" if path else name] = part, p
    return found


def expert_parameters(model):
    """Return the parameters of all EPMoE modules of a model: those that differ between the ranks.

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
    return [p for _, p in _experts(model).values()]


def prepare_ddp(model, process_group=None):
    """Prepare a model for DistributedDataParallel: it will leave the experts alone.  Not collective.

    The gradient of an expert is the sum over the tokens of all ranks.  DistributedDataParallel averages the
    other gradients over the ranks, so those of the experts are divided by W: EPMoE.gradient_scale is 1 / W.

    Args:
        model: A module, which is then passed to DistributedDataParallel.
        process_group: The group that DistributedDataParallel gets.  None: the default group.

    Returns:
        The model.

    Raises:
        ValueError: If the group has other ranks than the experts are on.  Then some ranks hold the same
            experts, which nothing would average: use FSDP2 (docs/guide.md).

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
    for moe, _ in spread.values():
        own, ranks = (sorted(dist.get_process_group_ranks(g or dist.group.WORLD))
                      for g in (moe.layer.world.group, process_group))
        if own != ranks:
            raise ValueError(f"the experts are on ranks {own}, but the group of DistributedDataParallel has "
                             f"ranks {ranks}: with several groups of experts use FSDP2 (docs/guide.md)")
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    names = list(dict.fromkeys([*before, *spread]))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    for moe, _ in spread.values():
        moe.gradient_scale = 1 / moe.layer.world_size
    return model


# ---- clipping ----


def _alike(params):
    """Return lists of parameters whose gradients torch can take together: plain ones, and of each mesh."""
    lists = {}
    for p in params:
        lists.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    return list(lists.values())


def _norm(params, norm_type):
    """Return the norm of the gradients as a number; of sharded ones over all shards."""
    norms = []
    for alike in _alike(params):
        norm = torch.nn.utils.get_total_norm([p.grad for p in alike], norm_type)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).double().item())
    return _norm_of(norms, norm_type)


def _norm_of(norms, norm_type):
    if any(math.isnan(n) for n in norms):
        return math.nan
    if norm_type == math.inf:
        return max(norms, default=0.0)
    return sum(n**norm_type for n in norms)**(1 / norm_type)


def clip_grad_norm_(model, max_norm, norm_type=2.0):
    """Clip gradients as torch.nn.utils.clip_grad_norm_ does, with the norm over the experts of all ranks.

    Collective.  torch's function computes the norm of one rank's experts.  Ranks would then scale the
    parameters that they share differently, and those would drift apart.

    Args:
        model: The module whose gradients are clipped, not its parameters.  They may be sharded by FSDP2.
        max_norm: The largest norm.
        norm_type: p of the norm, positive; math.inf for the largest magnitude.

    Returns:
        The norm before clipping, a float32 tensor on the CPU, the same on all ranks.

    Raises:
        ValueError: On this rank, for a norm_type that is not positive.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.
        EpMismatch: On all ranks, when they are not in the same call.

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
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type {norm_type}: must be positive")
    experts, of_world = _experts(model), {}
    for moe, p in experts.values():
        of_world.setdefault(id(moe.layer.world), (moe.layer.world, []))[1].append(p)
    own = {id(p) for _, p in experts.values()}
    params = [p for p in model.parameters() if p.grad is not None]
    norms = [_norm([p for p in params if id(p) not in own], norm_type)]
    for world, of in of_world.values():
        mine = struct.pack("d", _norm([p for p in of if p.grad is not None], norm_type))
        norms += [struct.unpack("d", theirs)[0] for theirs in world.exchange(mine)]
    total = torch.tensor(_norm_of(norms, norm_type), dtype=torch.float32)
    for alike in _alike(params):
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, total.to(alike[0].grad.device))
    return total


# ---- whole checkpoints ----


def _exchanged(world, raw):
    """Return the bytes of all ranks, which have no process group."""
    parts = [torch.empty_like(raw) for _ in range(world.size)]
    for first in range(0, len(raw), _C.EXCHANGE_BYTES):
        piece = raw[first:first + _C.EXCHANGE_BYTES].clone()
        for part, theirs in zip(parts, world.exchange(bytes(piece.untyped_storage()))):
            part[first:first + len(piece)] = torch.frombuffer(bytearray(theirs), dtype=torch.uint8)
    return parts


def _to_first(world, t):
    """Return the tensors of all ranks on the CPU of rank 0, and [] on the others.  Collective."""
    t = t.detach().contiguous()
    raw = t.reshape(-1).view(torch.uint8)
    if world.group is None:
        parts = _exchanged(world, raw.cpu())
    elif world.rank:
        dist.send(raw, dist.get_global_rank(world.group, 0), world.group)
        return []
    else:
        parts, piece = [raw.cpu()], torch.empty_like(raw)
        for rank in range(1, world.size):
            dist.recv(piece, dist.get_global_rank(world.group, rank), world.group)
            parts.append(piece.to("cpu", copy=True))
    return [] if world.rank else [p.view(t.dtype).view(t.shape) for p in parts]


def whole_state_dict(model):
    """Return the state dict of the whole model, with the experts of all ranks, on rank 0.  Collective.

    It is what one process that holds all experts would have, for example for a checkpoint that others can
    read.  load_state_dict() takes such a dict on any number of ranks: each EPMoE takes its experts' rows.

    Args:
        model: A module.  Parameters that FSDP2 has sharded are put together, too.

    Returns:
        On rank 0 of the experts' ranks a dict of tensors on the CPU; on the others {}.  The expert parameters
            are [E, ..].

    Raises:
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
    experts, whole = _experts(model), {}
    by_id = {id(p): moe.layer.world for moe, p in experts.values()}
    is_first = all(world.rank == 0 for world in by_id.values())
    for name, t in model.state_dict(keep_vars=True).items():
        world = by_id.get(id(t))
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        if world is not None:
            parts = _to_first(world, t)
            if is_first:
                whole[name] = torch.cat(parts)
        elif is_first:
            whole[name] = t.detach().to("cpu", copy=True) if isinstance(t, torch.Tensor) else t
    return whole
