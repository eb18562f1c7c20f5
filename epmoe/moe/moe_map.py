"""EPMoE.set_expert_map: the weights of a map's physical experts, from the ranks that have them."""

import contextlib
import hashlib

from ..a2a.layer_parts import together
from ..comm.heap import SymmetricHeap
from ..comm.world import World
from ..errors import EpMismatch
from ..torch_modes import writing
from .placement import ExpertMap
from .shards import as_bytes, is_by_expert, is_dtensor, named_tensors, roots, tensors

_ALIGNMENT = 256  # of the weights in symmetric memory


def _check(moe, expert_map):
    """Return the map, that of the home for None, or raise for what this rank cannot do."""
    layer = moe.layer
    if expert_map is None:
        expert_map = ExpertMap.home(moe.num_experts, layer.world_size, layer.num_experts)
    if not isinstance(expert_map, ExpertMap):
        raise TypeError(f"expert_map: wanted an ExpertMap or None, got {type(expert_map).__name__}")
    sizes = expert_map.num_experts, expert_map.num_physical
    if sizes != (moe.num_experts, layer.num_experts):
        raise ValueError(f"expert_map has {sizes[0]} experts and {sizes[1]} physical ones, but this EPMoE "
                         f"has {moe.num_experts} and {layer.num_experts}: both must be the same "
                         f"(num_physical= of EPMoE)")
    if hasattr(moe, "unshard") or any(is_dtensor(p) for p in tensors(moe)):
        raise RuntimeError("set_expert_map cannot move experts that FSDP has sharded: call it without "
                           "fully_shard, for inference")
    for name, p in (named for root in roots(moe) for named in named_tensors(root).items()):
        if not is_by_expert(moe, p):
            raise RuntimeError(f"set_expert_map: {name} belongs to the experts, but its shape "
                               f"{list(p.shape)} does not begin with the {layer.num_local_experts} experts "
                               f"of a rank, so that its rows cannot move with them: "
                               f"give it a row for each expert, or make the "
                               f"weights plain parameters first (remove_parametrizations, prune.remove)")
        if p.device != layer.device or not p.is_contiguous():
            raise RuntimeError(f"set_expert_map: {name} must be contiguous and on {layer.device}, as it was "
                               f"created")
    return expert_map


def _sources(moe, holds):
    """Return, for each physical expert of this rank, a physical expert that has what it shall hold, or -1.

    holds: [P]: the logical experts of the new map, as moe._holds of the present one.
    """
    num, rank = moe.layer.num_local_experts, moe.layer.rank
    own, sources = range(rank * num, (rank + 1) * num), []
    for p in own:
        replicas = [q for q, e in enumerate(moe._holds) if e == holds[p] >= 0]
        near = [q for q in replicas if q == p] or [q for q in replicas if q in own] or replicas
        sources.append(near[rank % len(near)] if near else -1)  # ranks take it from different ranks
    return sources


def _move(moe, sources, use_map):
    """Copy the weights of this rank's physical experts from where they are, and use the map.  Collective.

    The old weights are in symmetric memory until all ranks have the new ones.  So after an error every rank
    has its old weights back.
    """
    layer, params = moe.layer, [as_bytes(p.detach()) for p in tensors(moe)]
    num = layer.num_local_experts
    num_bytes = sum(p.numel() * p.element_size() + _ALIGNMENT for p in params)
    heap = SymmetricHeap(layer.world, num_bytes, layer.device)
    try:
        before = [heap.malloc_symmetric(p.shape, p.dtype, _ALIGNMENT) for p in params]
        with together(layer.world):
            for p, old in zip(params, before):
                old.copy_(p)
        heap.barrier()
        try:
            with together(layer.world), writing(params):
                for p, old in zip(params, before):
                    for i, q in enumerate(sources):
                        if q < 0:
                            p[i].zero_()
                        elif q != layer.rank * num + i:
                            heap.get(p[i], old[q % num], q // num)
                heap.synchronize()  # nothing is read any more, and all errors are known
        except BaseException:
            with writing(params):
                for p, old in zip(params, before):
                    p.copy_(old)
            raise
        use_map()
    except BaseException:
        with contextlib.suppress(Exception):  # all ranks have failed
            heap.close()
        raise
    heap.close()


def set_expert_map(moe, expert_map):
    """Make a map that of a module, and move its weights.  Collective."""
    world = moe.layer.world
    if not isinstance(world, World):
        raise ValueError("set_expert_map moves weights through symmetric memory, which the ranks of one node "
                         "share, but this module spans several nodes")
    with together(world):
        expert_map = moe._placed(_check(moe, expert_map))
        holds = expert_map.physical_to_logical_map.tolist()
        moved = [(p.shape, p.dtype) for p in tensors(moe)]
    digests = world.exchange(hashlib.sha256(repr((moe._holds, holds, moved)).encode()).digest())
    for rank, its in enumerate(digests):
        if its != digests[0]:
            raise EpMismatch(f"ranks disagree: rank {rank} passes another expert map than rank 0, or passes "
                             f"it to another module, or one with other parameters and buffers.  Add up the "
                             f"numbers of tokens of all ranks, and pass the same map on all")
    if holds != moe._holds:
        _move(moe, _sources(moe, holds), lambda: moe._use_map(expert_map, holds))
