"""NodeLinks: the ranks of all nodes learn when a rank or a node is gone, or when a world has ended.

A World watches the ranks of its own node. Between nodes, each rank has a TCP connection to the ranks with its
own local number, and also one to each rank of its node. One thread of each rank reads them all. What a rank
learns, it sends on once, so news reaches every rank in at most three steps: to its node, to another node, and
there to all ranks.

What ends a connection, and what it means:
  closed      the process has died: its operating system closes its sockets.
  silent      no answer of the other host for EPMOE_NODE_TIMEOUT_S: the host, or the way to it, is gone.
  after BYE   the rank has left in order.
A process that is stopped or busy is none of these, because the kernels answer each other.

A death on another node is reported after SETTLE_S. If meanwhile all ranks of a node have died, the text names
the node. Then the world of this node is ended with the reason, which ends every wait in it.
"""

import atexit
import contextlib
import os
import selectors
import socket
import struct
import threading
import time
import weakref

import torch.distributed as dist

from .. import _C
from ..errors import EpTimeout
from .node_meeting import meet
from .node_sockets import SILENT

SETTLE_S = 0.2
_LEAVE_GRACE_S = 2.0  # as of a World: a rank that has left alone may be missed after this time
_POLL_S = 0.02  # how often the thread looks whether the world of this node has ended
_LOST, _END, _READY, _BYE = range(1, 5)  # kinds of messages
_HEAD = struct.Struct("<HB")  # length of what follows the head, kind
_MAX_WAITING = 1 << 16  # bytes that wait for a peer that does not read; more messages are dropped
_open = weakref.WeakSet()


class _Link:
    """The connection to one rank."""

    def __init__(self, sock, rank):
        self.sock = sock
        self.rank = rank
        self.received = b""
        self.waiting = b""  # to be sent
        self.is_ready = False  # the peer waits in close()


class NodeLinks:
    """Connections between the ranks of several nodes, which carry the news of deaths and of ends.

    Creation is collective over all ranks of all nodes. Rank r is on node r // L, with local number r % L.

    Args:
        group: The ProcessGroup of all ranks of all nodes; None: the default group. It carries addresses and a
            secret, once.
        team: The World of this rank's node, of L ranks. It ends when a rank of any node dies, and when the
            world of any node ends.
        on_end: Called once, in a thread of its own, after the team has ended: for example to abort a process
            group in which this rank waits. None: nothing.
        timeout_s: Seconds for the creation and for close; None: as for World.

    Attributes:
        rank: This rank's number among all.
        size: The number of all ranks, W.
        node: The number of this node.
        num_nodes: N.

    Raises:
        EpError, EpTimeout: When this rank cannot connect to another.
        PeerError: On the other ranks, when one could not connect or take part. The text has its error.
        PeerDied: When a rank dies meanwhile.
        EpMismatch: On all ranks, when they have builds of epmoe with different protocols.
        ValueError: On this rank, for a team that is no part of nodes x L, a wrong timeout_s or a wrong
            environment variable.

    Examples:
        One node of one rank, which has nobody to watch:

        >>> import torch.distributed as dist
        >>> import epmoe
        >>> from epmoe.comm.node_links import NodeLinks
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> links = NodeLinks(None, epmoe.World())
        >>> links.lost_ranks()
        []
        >>> links.close()
        >>> dist.destroy_process_group()
    """

    def __init__(self, group, team, on_end=None, timeout_s=None):
        group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._team = team
        self._local_size = team.size
        self.node = self.rank // team.size
        self.num_nodes = self.size // team.size
        self._on_end = on_end
        self._pid = os.getpid()
        self._lost = {}  # rank -> (the rank that has seen it, whether it was silent)
        self._left = {}  # rank -> when its BYE arrived
        self._after_end = {}  # rank whose world has ended -> whether its connection has closed since
        self._settle_at = None
        self._told = None  # (code, text) of the end of another node's world, which waits for _settle_at
        self._has_told_end = False
        self._wanted = None  # "close" or "leave": what the thread has to do before it ends
        self._waits_for = None  # in close(): until when
        self._missing = []  # the ranks that did not come to close()
        self._ended = threading.Event()
        self._links = {}
        sockets, self._silent_s, self._close_timeout_s = meet(group, team, self._peers(), timeout_s)
        self._selector = selectors.DefaultSelector()
        for rank, sock in sockets.items():
            self._links[rank] = _Link(sock, rank)
            self._selector.register(sock, selectors.EVENT_READ, self._links[rank])
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        _C.world_set_place(team._c, self.node, self.node * team.size)
        self._thread = threading.Thread(target=self._main, name="epmoe node links", daemon=True)
        self._thread.start()
        _open.add(self)

    def _peers(self):
        """Return the ranks to which this rank has a connection: of its node, and with its local number."""
        local = self._local_size
        first = self.node * local
        rail = range(self.rank % local, self.size, local)
        return sorted({*range(first, first + local), *rail} - {self.rank})

    # ---- for the ranks ----

    def verdict(self, limit_s):
        """Wait until the team has ended, at most limit_s. Return whether it has.

        An operation between nodes that fails says only that a connection is gone. This rank learns a moment
        later which rank has died: then team.check() raises it.

        Returns:
            True if the team has ended.

        Examples:
            links.verdict(5.0)
        """
        return self._ended.wait(limit_s) or self._ended.is_set()

    def lost_ranks(self):
        """Return the ranks of all nodes that have died or cannot be reached, as this rank knows.

        Returns:
            A list of numbers among all ranks, in ascending order. It may become longer a moment later.

        Examples:
            links.lost_ranks() == [2, 3] after the death of node 1 of 2 x 2 ranks
        """
        first = self.node * self._local_size
        later = [rank for rank, is_gone in self._after_end.items() if is_gone and rank not in self._left]
        of_team = [first + rank for rank in self._team.lost_ranks()]
        return sorted({*self._lost, *later, *of_team} - {self.rank})

    def close(self):
        """Wait for all ranks of all nodes, then close the connections. Collective; once is enough.

        Ranks that are gone are not waited for. Close the links before the team.

        Raises:
            EpTimeout: When a rank does not come. This rank has left.

        Examples:
            links.close() on all ranks
        """
        self._finish("close")
        if self._missing:
            raise EpTimeout(f"rank {self.rank} timed out closing the links between nodes: rank "
                            f"{self._missing[0]} did not close them. All ranks must call close().")

    def _leave(self):
        """Close the connections without waiting. The other ranks are told."""
        self._finish("leave")

    def _finish(self, how):
        _open.discard(self)
        if os.getpid() != self._pid or not self._thread.is_alive():
            self._waker.close()
            return
        self._wanted = how
        with contextlib.suppress(OSError):
            self._waker.send(b"\1")
        try:
            while self._thread.is_alive():
                self._thread.join(0.1)  # so that Ctrl-C is seen
        except BaseException:
            self._wanted = "leave"
            raise
        self._waker.close()

    def __reduce__(self):
        raise TypeError("NodeLinks belongs to this process and cannot be pickled")

    def __repr__(self):
        return f"epmoe.NodeLinks(rank={self.rank}, size={self.size}, nodes={self.num_nodes})"

    # ---- the thread ----

    def _main(self):
        try:
            while not self._is_finished():
                for key, events in self._selector.select(_POLL_S):
                    if key.data is None:
                        self._wake.recv(64)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._flush(key.data)
                    if events & selectors.EVENT_READ:
                        self._read(key.data)
                self._look()
        except BaseException as error:  # without this thread nobody would see the next death
            text = f"rank {self.rank}: the thread that watches the other nodes has failed: {error!r}"
            _C.world_abort(self._team._c, _C.ESYS, text[:250])
        finally:
            self._ended.set()
            for link in list(self._links.values()):
                self._cut(link)
            self._selector.close()
            self._wake.close()

    def _look(self):
        """Do what has become due: report deaths, tell the end of the team, miss ranks that have left."""
        now = time.monotonic()
        if self._settle_at is not None and now >= self._settle_at:
            self._settle_at = None
            code, text = self._told or (_C.EPEERDIED, "")
            is_node = any(len(ranks) == self._local_size for ranks in self._by_node().values())
            if self._told is None or is_node:
                code, text = _C.EPEERDIED, self._describe()
            _C.world_abort(self._team._c, code, text)
        if self._wanted is None and not self._has_told_end:
            for rank, left_at in self._left.items():
                if now - left_at > _LEAVE_GRACE_S:
                    self._lost.setdefault(rank, (self.rank, False))
                    text = (f"{self._name(rank)} left alone: close() is collective, and all ranks must call "
                            f"it")
                    _C.world_abort(self._team._c, _C.EPEERDIED, text)
        reason = None if self._has_told_end else _C.world_reason(self._team._c)
        if reason:
            self._has_told_end = True
            code, text = reason
            lost = self.lost_ranks() if code == _C.EPEERDIED else []
            body = struct.pack(f"<iH{len(lost)}I", code, len(lost), *lost)
            self._tell_all(_END, body + text.encode()[:255])
            self._ended.set()
            if self._on_end is not None:
                threading.Thread(target=self._on_end, name="epmoe end", daemon=True).start()

    def _is_finished(self):
        """Whether close() or leave is done. Say READY and BYE in time."""
        if self._wanted is None:
            return False
        self._look()  # an end of the team is told before this rank leaves
        if self._wanted == "close" and self._waits_for is None:
            self._waits_for = time.monotonic() + self._close_timeout_s
            self._tell_all(_READY, b"")
        present = [link for link in self._links.values() if link.rank not in self._left]
        if self._wanted == "close" and not self._ended.is_set():
            missing = [link.rank for link in present if not link.is_ready]
            if missing and time.monotonic() < self._waits_for:
                return False
            self._missing = missing
        if not self._has_said_bye:
            self._has_said_bye = True
            self._tell_all(_BYE, b"")
            self._bye_until = time.monotonic() + 0.5
        return not any(link.waiting for link in self._links.values()) or time.monotonic() > self._bye_until

    _has_said_bye = False
    _bye_until = 0.0

    # ---- connections ----

    def _cut(self, link):
        self._selector.unregister(link.sock)
        link.sock.close()
        del self._links[link.rank]

    def _tell_all(self, kind, body, but=None):
        for link in list(self._links.values()):
            if link.rank != but and len(link.waiting) < _MAX_WAITING:
                link.waiting += _HEAD.pack(len(body), kind) + body
                self._flush(link)

    def _flush(self, link):
        try:
            while link.waiting:
                link.waiting = link.waiting[link.sock.send(link.waiting) :]
        except BlockingIOError:
            pass
        except OSError:
            link.waiting = b""  # the next read says what has happened
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        self._selector.modify(link.sock, events, link)

    def _read(self, link):
        is_silent = False
        try:
            data = link.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            data, is_silent = b"", error.errno in SILENT
        link.received += data
        while len(link.received) >= _HEAD.size:
            length, kind = _HEAD.unpack_from(link.received)
            if len(link.received) < _HEAD.size + length:
                break
            body = link.received[_HEAD.size : _HEAD.size + length]
            link.received = link.received[_HEAD.size + length :]
            self._take(link, kind, body)
        if not data:
            self._cut(link)
            if link.rank in self._after_end:  # a consequence of what ended its world
                self._after_end[link.rank] = True
            elif link.rank not in self._left:
                self._lose(link.rank, self.rank, is_silent, None)

    def _take(self, link, kind, body):
        if kind == _READY:
            link.is_ready = True
        elif kind == _BYE:
            self._left[link.rank] = time.monotonic()
        elif kind == _LOST:
            rank, by, is_silent = struct.unpack("<IIB", body)
            self._lose(rank, by, bool(is_silent), link.rank)
        elif kind == _END:
            self._after_end[link.rank] = False
            code, num = struct.unpack_from("<iH", body)
            lost = struct.unpack_from(f"<{num}I", body, 6)
            text = body[6 + 4 * num :].decode(errors="replace")
            for rank in lost:
                self._lose(rank, link.rank, False, link.rank)
            if code != _C.EPEERDIED:
                _C.world_abort(self._team._c, code, text)
            elif self._told is None:
                self._told = code, text
                self._settle_at = self._settle_at or time.monotonic() + SETTLE_S

    # ---- deaths ----

    def _lose(self, rank, by, is_silent, teller):
        """Note that a rank is gone, seen by rank `by`. Tell all but `teller`, which has told this rank."""
        if rank in self._lost or rank == self.rank or rank >= self.size or self._wanted == "leave":
            return
        self._lost[rank] = by, is_silent
        self._tell_all(_LOST, struct.pack("<IIB", rank, by, is_silent), teller)
        if is_silent:  # the host does not answer, so none of its ranks does
            first = rank - rank % self._local_size
            for other in range(first, first + self._local_size):
                if other != self.rank:
                    self._lost.setdefault(other, (by, True))
        if self._settle_at is None and not self._has_told_end:
            self._settle_at = time.monotonic() + SETTLE_S

    def _name(self, rank):
        node, local = divmod(rank, self._local_size)
        return f"rank {rank} (rank {local} of node {node})"

    def _by_node(self):
        nodes = {}
        for rank in sorted(self._lost):
            nodes.setdefault(rank // self._local_size, []).append(rank)
        return nodes

    def _describe(self):
        """Say which ranks and nodes are gone."""
        parts = []
        local = self._local_size
        for node, ranks in self._by_node().items():
            first = node * local
            numbers = f"rank {first}" if local == 1 else f"ranks {first} to {first + local - 1}"
            whole = f"node {node} ({numbers})"
            by, is_silent = self._lost[ranks[0]]
            if is_silent:
                parts.append(f"{whole} cannot be reached: no answer to rank {by} for {self._silent_s:g} s")
            elif len(ranks) == local:
                parts.append(f"{whole} died (seen by rank {by})")
            else:
                parts += [f"{self._name(r)} died (seen by rank {self._lost[r][0]})" for r in ranks]
        return "; ".join(parts)[:250]


@atexit.register
def _leave_all():
    """Tell the other nodes that this process ends in order."""
    for links in list(_open):
        links._leave()
