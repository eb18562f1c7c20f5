"""Whether a layer spans several nodes."""

import torch.distributed as dist

from ... import _C
from ...comm.nodes import Nodes, is_mesh, sizes_of
from ...comm.rendezvous import process_group
from ...comm.world import World, _of_group as worlds


def spans_nodes(group, local_world_size=None):
    """Whether a layer with these arguments spans several nodes.

    Where the arguments are wrong, a group that fits a World is taken for one node, whose layer says so.
    """
    if isinstance(group, (Nodes, World)):
        return isinstance(group, Nodes) and group.num_nodes > 1
    if is_mesh(group):
        return group.mesh.shape[0] > 1
    try:
        key = process_group(group)
    except (TypeError, ValueError):
        return False
    if key is None or id(key) in worlds:  # ranks that share a World are one node
        return False
    try:
        size, local = sizes_of(key, local_world_size)
    except (TypeError, ValueError):
        return dist.get_world_size(key) > _C.MAX_RANKS
    return local < size
