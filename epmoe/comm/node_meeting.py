"""How the ranks of several nodes connect to each other: what each sends, and which rank calls."""

import contextlib
import os
import time

import torch.distributed as dist

from .. import _C
from ..errors import EpError, EpMismatch, EpTimeout, PeerDied, PeerError
from .node_sockets import (SECRET_BYTES, Acceptor, call, is_listening, listen, own_addresses, pack_card,
                           unpack_card, watch_silence)
from .rendezvous import DEFAULT_TIMEOUT_S, all_gather_bytes, checked_timeout_s

_MEETING_S = 30.0
_PROBE_S = 0.5  # how often this rank looks whether a rank that has not called is still there
_FRAME_BYTES = 200  # of an exchange: a card, or the text of an error
_FAILED, _ABSENT = 1, 2  # what a rank says of itself


def node_timeout_s():
    """Return the seconds after which a silent node counts as gone: EPMOE_NODE_TIMEOUT_S, or 2.

    Raises:
        ValueError: When EPMOE_NODE_TIMEOUT_S is not a number of at least 1.

    Examples:
        >>> from epmoe.comm.node_meeting import node_timeout_s
        >>> node_timeout_s()
        2.0
    """
    text = os.environ.get("EPMOE_NODE_TIMEOUT_S", "") or "2"
    with contextlib.suppress(ValueError):
        if 1 <= float(text) < 1e4:
            return float(text)
    raise ValueError(f"EPMOE_NODE_TIMEOUT_S={text!r}: must be a number of seconds, 1 or more")


def meet(group, team, peers, timeout_s):
    """Connect this rank to its peers. Collective over the group.

    Args:
        group: The ProcessGroup of all ranks of all nodes.
        team: The World of this rank's node.
        peers: The ranks to which this rank needs a connection.
        timeout_s: As for World.

    Returns:
        {rank: socket}, the seconds after which a silent node counts as gone, and timeout_s as a number.

    Raises:
        EpError: As NodeLinks says.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    listeners, card, error, silent_s, sockets = [], b"", None, 0.0, {}
    limit_s = DEFAULT_TIMEOUT_S
    try:
        limit_s = timeout_s = checked_timeout_s(timeout_s)
        silent_s = node_timeout_s()
        if size % team.size or team.rank != rank % team.size:
            raise ValueError(f"rank {rank} of {size} is rank {team.rank} of a team of {team.size}: must be "
                             f"nodes x local, with the ranks of a node one after the other")
        addresses = own_addresses()
        listeners = listen(addresses)
        card = pack_card(listeners[0].getsockname()[1], addresses, os.urandom(SECRET_BYTES))
    except Exception as e:
        error = e
    try:
        cards = _gather(group, card, error, limit_s)
        try:
            _connect(listeners, rank, peers, cards, sockets, time.monotonic() + min(limit_s, _MEETING_S))
        except Exception as e:
            error = e
        _gather(group, b"", error, limit_s)
    except BaseException:
        for sock in (*sockets.values(), *listeners):
            sock.close()
        raise
    for sock in sockets.values():
        watch_silence(sock, silent_s)
    return sockets, silent_s, limit_s


def _gather(group, mine, error, limit_s):
    """Exchange what every rank has done. Raise this rank's error, or name the first rank that has one."""
    if error is not None:
        mine = str(error).encode()[:_FRAME_BYTES]
    # A rank that does not come may still say why. Then its reason counts.
    status = 0 if error is None else _ABSENT if isinstance(error, PeerDied) else _FAILED
    head = _C.ABI_VERSION.to_bytes(4, "little") + bytes([status, len(mine)])
    try:
        frames = all_gather_bytes(group, head + mine.ljust(_FRAME_BYTES, b"\0"), limit_s)
    except EpError as of_group:
        if error is None:
            raise
        raise error from of_group
    if status == _FAILED:
        raise error
    for rank, frame in enumerate(frames):
        abi = int.from_bytes(frame[:4], "little")
        if abi != _C.ABI_VERSION:
            raise EpMismatch(f"rank {rank} has another epmoe (protocol {abi:x}) than this rank (protocol "
                             f"{_C.ABI_VERSION:x}): install the same epmoe on all nodes")
    for rank, frame in enumerate(frames):
        if frame[4] == _FAILED:
            why = frame[6 : 6 + frame[5]].decode(errors="replace")
            raise PeerError(f"rank {rank} could not connect the nodes. It raised: {why}")
    if error is not None:
        raise error
    for rank, frame in enumerate(frames):
        if frame[4] == _ABSENT:
            raise PeerError(f"rank {rank} could not connect the nodes, because another rank did not come")
    return [frame[6 : 6 + frame[5]] for frame in frames]


def _connect(listeners, rank, peers, cards, sockets, deadline):
    """Call the peers below this rank; those above call this rank. The sockets go into `sockets`."""
    cards = [unpack_card(card) for card in cards]
    secret = cards[0][2]
    acceptor = Acceptor(listeners, rank, secret, [p for p in peers if p > rank])
    try:
        for peer in peers:
            if peer < rank:
                sockets[peer] = call(cards[peer], rank, peer, secret, deadline)
        probe_at = time.monotonic() + _PROBE_S
        while missing := acceptor.wait(0.1):
            first, now = missing[0], time.monotonic()
            if now > deadline:
                raise EpTimeout(f"rank {first} did not connect to rank {rank}: it may be stopped, or the "
                                f"network does not let it")
            if now < probe_at:
                continue
            probe_at = now + _PROBE_S
            # A rank that has connected to all its peers closes its listening socket, too.
            if not is_listening(cards[first]) and first in acceptor.wait(0.0):
                raise PeerDied(f"rank {first} died or failed while the nodes were connected")
    finally:
        acceptor.stop()
        sockets.update(acceptor.found)
