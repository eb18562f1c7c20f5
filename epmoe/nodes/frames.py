"""An exchange of a few bytes between all ranks of all nodes."""

from .. import _C
from ..errors import EpError


def exchange_frames(nodes, length, data):
    """Exchange (length, data) with all ranks: over the rail, then in the node.  Collective.

    data: at most 512 bytes.  Returns a list in rank order.
    """
    frame = length.to_bytes(2, "little") + data.ljust(_C.EXCHANGE_BYTES, b"\0")
    of_local = [b""] * nodes.local_size
    try:
        joined = b"".join(nodes._meet_rail(frame))
        for i in range(0, len(joined), _C.EXCHANGE_BYTES):
            for local, piece in enumerate(nodes.team.exchange(joined[i : i + _C.EXCHANGE_BYTES])):
                of_local[local] += piece
    except EpError:
        if nodes._has_ended():  # no other rank may wait for this one
            nodes._drop_rail()
        raise
    frames = []
    for rank in range(nodes.size):
        node, local = divmod(rank, nodes.local_size)
        frame = of_local[local][node * len(frame) :][: len(frame)]
        length = int.from_bytes(frame[:2], "little")
        frames.append((length, frame[2 : 2 + length]))
    return frames
