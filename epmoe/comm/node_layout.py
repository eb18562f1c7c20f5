"""Which rank is on which node: the sizes, where they come from, and the check that they are nodes x local."""

import datetime
import hashlib
import os
import socket
from typing import NamedTuple

import torch.distributed as dist

from .. import _C
from ..errors import EpMismatch, PeerError
from .rendezvous import ADDRESS_BYTES, process_group

_HOST_BYTES = 8
_of_mesh = {}  # ranks -> their group: Nodes that are made again use it again
_NAME_BYTES = ADDRESS_BYTES - 8 - _HOST_BYTES


class Card(NamedTuple):
    """What a rank tells the others before they form nodes."""

    abi: int  # of the protocol
    local_size: int  # ranks of a node, as this rank was told; 0: this rank cannot take part
    host: bytes  # equal on two ranks exactly if they can share memory
    name: str  # of the host, for people, perhaps cut

    def pack(self):
        """Return the card in the form of an address without a name, which no World accepts (rendezvous.py).

        So ranks of one group that disagree whether they are one node raise an error, instead of taking cards
        for addresses.
        """
        name = self.name.encode(errors="replace")[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        return (b"\0N" + self.abi.to_bytes(4, "little") + self.local_size.to_bytes(2, "little") + self.host
                + name)

    @classmethod
    def unpack(cls, raw):
        """Return the Card, or None where a rank sent the address of a World."""
        if raw[:2] != b"\0N":
            return None
        host = raw[8 : 8 + _HOST_BYTES]
        name = raw[8 + _HOST_BYTES :].rstrip(b"\0").decode(errors="replace")
        return cls(int.from_bytes(raw[2:6], "little"), int.from_bytes(raw[6:8], "little"), host, name)


def own_card(local_size):
    """Return the Card of this process."""
    parts = [socket.gethostname(), str(os.getuid())]
    try:  # the sockets of a World have names inside of a network namespace
        parts.append(os.readlink("/proc/self/ns/net"))
        with open("/proc/sys/kernel/random/boot_id") as f:
            parts.append(f.read())
    except OSError:
        pass
    host = hashlib.sha256("\n".join(parts).encode()).digest()[:_HOST_BYTES]
    return Card(_C.ABI_VERSION, local_size, host, parts[0])


def is_mesh(group):
    """Whether group is a DeviceMesh of two dimensions: nodes x local."""
    return hasattr(group, "get_group") and hasattr(group, "mesh") and group.ndim == 2


def group_of_mesh(mesh, timeout_s):
    """Return a process group of all ranks of a DeviceMesh, in the order of the mesh."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks == dist.get_process_group_ranks(dist.group.WORLD):
        return dist.group.WORLD
    group = _of_mesh.get(tuple(ranks))
    if group not in dist.distributed_c10d._world.pg_map:  # also where the default group was made again
        group = _of_mesh[tuple(ranks)] = dist.new_group(
            ranks, timeout=datetime.timedelta(seconds=timeout_s), use_local_synchronization=True)
    return group


def sizes_of(group, local_world_size=None):
    """Return (ranks of the group, ranks of a node) of a ProcessGroup, a DeviceMesh or None.

    Without local_world_size and without a mesh of two dimensions, LOCAL_WORLD_SIZE says how many ranks the
    launcher started on a node.  A group of no more ranks than that is taken for a part of one node.
    """
    if is_mesh(group):
        size = group.mesh.numel()
        local = group.mesh.shape[1]
        if local_world_size is not None and local_world_size != local:
            raise ValueError(f"local_world_size={local_world_size}, but the DeviceMesh has {local} ranks in "
                             f"its second dimension, which are those of a node: leave local_world_size out")
        return size, local
    group = process_group(group)
    size = 1 if group is None else dist.get_world_size(group)
    if local_world_size is not None:
        if isinstance(local_world_size, bool) or not isinstance(local_world_size, int):
            raise TypeError(f"local_world_size {local_world_size!r}: must be an integer")
        if not 1 <= local_world_size <= size:
            raise ValueError(f"local_world_size={local_world_size}: must be 1 to {size}, the ranks of the "
                             f"group")
        return size, local_world_size
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return size, min(size, int(text)) if text.isdigit() and int(text) > 0 else size


def _ranges(ranks):
    """Return ascending numbers as text: "0-3, 8"."""
    parts = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def describe(cards):
    """Return the layout as text for people, with a line for each host."""
    hosts = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    lines = []
    for ranks in hosts.values():
        sizes = sorted({cards[rank].local_size for rank in ranks})
        lines.append(f"  host {cards[ranks[0]].name}: ranks {_ranges(ranks)}, local_world_size "
                     f"{', '.join(map(str, sizes))}")
    return "\n".join(lines)


def check_layout(cards):
    """Raise an error, the same on all ranks, unless the ranks are nodes x local.  Return the ranks of a node.

    The ranks of a node must have consecutive numbers and be on one host.  A host may have several nodes.

    Args:
        cards: The Card of every rank, in rank order.

    Raises:
        PeerError: When a rank cannot take part.
        EpMismatch: When ranks have different protocols or different local_world_size.
        ValueError: When the ranks are not nodes x local; the text has the layout.
    """
    for rank, card in enumerate(cards):
        if card is None:
            raise EpMismatch(f"rank {rank} takes the group for one node, others for several: pass the same "
                             f"local_world_size on all ranks")
        if card.local_size == 0:
            raise PeerError(f"rank {rank} could not take part in the creation of nodes. See the error that "
                            f"it raised.")
        if card.abi != cards[0].abi:
            raise EpMismatch(f"rank {rank} has another epmoe (protocol {card.abi:x}) than rank 0 (protocol "
                             f"{cards[0].abi:x}): install the same epmoe on all nodes")
    size, local = len(cards), cards[0].local_size
    layout = f"The layout is\n{describe(cards)}"
    for rank, card in enumerate(cards):
        if card.local_size != local:
            raise EpMismatch(f"nodes of different sizes: rank {rank} has local_world_size {card.local_size}, "
                             f"rank 0 has {local}. Every node must have equally many ranks. {layout}")
    if size % local:
        raise ValueError(f"{size} ranks are not nodes of {local}: the ranks of the group must be a multiple "
                         f"of local_world_size. {layout}")
    if local > _C.MAX_RANKS:
        raise ValueError(f"local_world_size {local}: a node has at most {_C.MAX_RANKS} ranks. {layout}")
    for first in range(0, size, local):
        for rank in range(first, first + local):
            if cards[rank].host != cards[first].host:
                raise ValueError(f"ranks {first} to {first + local - 1} should be node {first // local}, but "
                                 f"rank {rank} is on another host than rank {first}. The ranks of a node "
                                 f"must be consecutive and on one host, and every node must have {local}. "
                                 f"{layout}")
    return local
