"""Liveness: the ranks of all nodes learn when a rank or a node is gone, and why a world has ended.

A World watches the ranks of its own node.  Between nodes there are lifelines and words.

A lifeline is an idle TCP connection, from each rank to each rank of the other nodes.  It carries nothing, and
nobody accepts it: the kernels keep it.  What ends it says what has happened:
  closed or reset  the process has ended: its operating system closes its sockets.
  silent           the other host has not answered for EPMOE_NODE_TIMEOUT_S: it, or the way to it, is gone.
A process that is stopped or busy does neither, because its kernel answers.  A heartbeat in a store could not
tell it from a dead one.

Words go through the store of the process group, torch's TCPStore in most jobs:
  end     why the nodes have ended.  The first rank whose world ends writes it, once, and all look for it.
  left/r  rank r leaves in order.  So the end of its lifelines is no death.

A death is reported after SETTLE_S.  If meanwhile all ranks of a node have died, the text names the node.
Then the world of this node is ended with the reason, which ends every wait in it.
"""

import contextlib
import errno
import fcntl
import json
import os
import queue
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import torch.distributed as dist

from .. import _C
from ..errors import EpError, EpTimeout, PeerDied, PeerError
from .rendezvous import all_gather_bytes
from .world import World, at_exit

_End: TypeAlias = tuple[int, str, list[int]]  # the code and the text with which the nodes ended; lost ranks
_Call: TypeAlias = Callable[[dist.Store], Any]

SETTLE_S = 0.2
LEAVE_GRACE_S = 2.0  # as of a World: a rank that has left alone may be missed after this time
_POLL_S = 0.02  # how often a rank looks whether the world of its node has ended
_LISTEN_S = 0.1  # how often it looks for the end of another node
_STORE_S = 1.0  # how long a rank waits for the store, which a thread of its own asks
_CONNECT_S = 30.0
_MAX_CALLERS = 4096  # that wait at a listening socket, if net.core.somaxconn is not less
_MAX_TEXT = 250
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}
_SIOCGIFADDR = 0x8915

_open: "weakref.WeakSet[Liveness]" = weakref.WeakSet()
_listening: set[socket.socket] = set()  # the sockets at which this process listens
_forking = threading.Lock()


def _close_in_child() -> None:
    for listener in _listening:
        listener.close()
    _listening.clear()
    _forking.release()


# A forked child that kept a listening socket would hide the death of its parent.
os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)


class Liveness:
    """Ends the World of this node when a rank of another node dies, or when the world of another node ends.

    Creation is collective over all ranks of all nodes.  Rank r is on node r // L, with local number r % L.

    Args:
        group: The ProcessGroup of all ranks of all nodes.  Its store carries the words.
        team: The World of this rank's node, of L ranks.
        on_end: Called once, in a thread of its own, after the team has ended: for example to abort a process
            group in which this rank waits.  None: nothing.
        timeout_s: Seconds for the creation.

    Attributes:
        expects_leaves: True: ranks that leave are no error.  All ranks set it before the first one leaves.

    Raises:
        EpError, EpTimeout: When this rank cannot connect to another.
        PeerError: On the other ranks, when one could not connect or take part.  The text has its error.
        PeerDied: When a rank dies meanwhile.
        ValueError: On this rank, for a wrong environment variable.

    Examples:
        One node of one rank, which has nobody to watch:

        >>> import torch.distributed as dist
        >>> import epmoe
        >>> from epmoe.comm.liveness import Liveness
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> liveness = Liveness(dist.group.WORLD, epmoe.World())
        >>> liveness.lost_ranks()
        []
        >>> liveness.leave()
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup, team: World, on_end: Callable[[], None] | None = None,
                 timeout_s: float = 300.0) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.expects_leaves = False
        self._team = team
        self._local_size = team.size
        self._first = self.rank // team.size * team.size  # rank of this node
        self._on_end = on_end
        self._pid = os.getpid()
        # Rank whose lifeline has closed -> when; it moves to one of the next two.
        self._closed: dict[int, float] = {}
        self._left: dict[int, float] = {}  # rank that has left in order -> when this rank has learned it
        self._lost: dict[int, bool] = {}  # rank of another node -> whether its host was silent
        self._lost_at: float | None = None  # when the first of them was
        self._end: _End | None = None  # of another node, as _read_end returns it
        self._end_at: float | None = None
        self._failure: RuntimeError | None = None  # the error of the store
        self._failed_at: float | None = None  # when it was; the store is not asked again
        self._is_mute = False  # whether the store has not answered in time
        # For the thread of the store: what it calls, and an event that it sets afterwards.
        self._calls: queue.SimpleQueue[tuple[_Call, threading.Event | None] | None] = queue.SimpleQueue()
        self._has_ended = threading.Event()
        self._stopped = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        try:
            store = self._bootstrap(group, timeout_s)
        except BaseException:
            self._disconnect()
            raise
        _C.world_set_place(team._c, self._first // team.size, self._first)
        self._watcher = threading.Thread(target=self._watch, name="epmoe lifelines", daemon=True)
        self._talker = threading.Thread(target=self._talk, args=(store,), name="epmoe words", daemon=True)
        self._watcher.start()
        self._talker.start()
        _open.add(self)

    # ---- for the ranks ----

    def has_ended(self, limit_s: float = 0.0) -> bool:
        """Wait until the team has ended, at most limit_s.  Return whether it has.

        An operation between nodes that fails says only that a connection is gone.  This rank learns a moment
        later which rank has died: then team.check() raises it.  A rank that expects others to leave ends no
        team: then it is True as soon as one has left or died.
        """
        return self._has_ended.wait(limit_s)

    def lost_ranks(self) -> list[int]:
        """Return the ranks of all nodes that have died or cannot be reached, as this rank knows, in order.

        The list may become longer a moment later.  A rank whose team was ended by another rank may not yet
        know which rank has died.  It then waits for its own lifelines, for as long as a host may be silent.
        """
        until = time.monotonic() + self._silent_s
        while not (lost := self._known_lost()) and self._is_open() and time.monotonic() < until:
            code, _ = _C.world_reason(self._team._c) or (0, "")
            if code != _C.EPEERDIED:
                break
            time.sleep(_POLL_S)
        return lost

    def _known_lost(self) -> list[int]:
        reported = self._end[2] if self._end else []
        of_team = [self._first + rank for rank in self._team.lost_ranks()]
        return sorted({*self._lost, *reported, *of_team} - {self.rank})

    def leave(self) -> None:
        """Disconnect, without waiting for other ranks.  They are told.  Once is enough."""
        if not self._is_open():
            return
        _open.discard(self)
        self._stopped.set()
        self._watcher.join()
        self._ask(lambda store: store.add(f"left/{self.rank}", 1))  # unlike set, it waits for the store
        self._calls.put(None)
        self._talker.join(0.0 if self._is_mute else _STORE_S)
        self._disconnect()

    def _is_open(self) -> bool:
        return self in _open and os.getpid() == self._pid

    # ---- connections ----

    def _bootstrap(self, group: dist.ProcessGroup, timeout_s: float) -> dist.Store:
        """Learn the addresses of all ranks, and connect to those of the other nodes.  Return the store."""
        mine, error = "", None  # type: str, Exception | None
        store: Any = None
        try:
            self._silent_s = _node_timeout_s()
            self._listener, address = _listen()
            mine = f"{address} {self._listener.getsockname()[1]} {os.urandom(8).hex()}"
        except (OSError, ValueError) as e:
            error = e
        endpoints = [text.split(" ") for text in _gather(group, mine, error, timeout_s)]
        until = time.monotonic() + min(timeout_s, _CONNECT_S)
        try:
            for rank, (address, port, _) in enumerate(endpoints):
                if not self._first <= rank < self._first + self._local_size:
                    self._connect(rank, address, int(port), max(0.01, until - time.monotonic()))
            store = group.get_group_store()
            words: Any = dist.PrefixStore(f"epmoe/nodes/{endpoints[0][2]}", store)
            store = words.clone()  # a connection of its own
        except (ValueError, RuntimeError) as e:  # EpError is a RuntimeError
            error = e
        _gather(group, "", error, timeout_s)
        return store

    def _connect(self, rank: int, address: str, port: int, limit_s: float) -> None:
        """Make a lifeline, which this host's kernel ends when the other host is silent."""
        try:
            sock = socket.create_connection((address, port), limit_s)
        except OSError as error:
            is_dead = isinstance(error, (ConnectionRefusedError, ConnectionResetError))
            kind = PeerDied if is_dead else EpTimeout if isinstance(error, TimeoutError) else EpError
            raise kind(f"rank {self.rank} cannot connect to rank {rank} at {address} port {port}: {error}. "
                       f"Either that rank has died, or the network does not let them: GLOO_SOCKET_IFNAME "
                       f"names the interface to use") from error
        self._selector.register(sock, selectors.EVENT_READ, rank)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(self._silent_s / 2)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._silent_s * 1000))

    def _disconnect(self) -> None:
        for key in list(self._selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()
        self._selector.close()
        if self._listener is not None:
            _listening.discard(self._listener)
            self._listener.close()

    # ---- the thread of the store, which may not answer ----

    def _ask(self, call: _Call) -> None:
        """Let the thread call call(store), and wait for it, unless the store does not answer."""
        is_done = threading.Event()
        self._calls.put((call, is_done))
        self._is_mute = not is_done.wait(0.0 if self._is_mute else _STORE_S)

    def _talk(self, store: dist.Store) -> None:
        while True:
            try:
                work = self._calls.get(timeout=_LISTEN_S)
            except queue.Empty:
                work = self._hear, None
            if work is None:
                return
            call, is_done = work
            try:
                if self._failed_at is None:
                    call(store)
            except RuntimeError as error:
                self._failure, self._failed_at = error, time.monotonic()
            if is_done is not None:
                is_done.set()

    def _hear(self, store: dist.Store) -> None:
        for rank in list(self._closed):
            if store.check([f"left/{rank}"]):
                self._left[rank] = time.monotonic()
            else:
                self._lose([rank], False)
            self._closed.pop(rank, None)
        if self._end is None and store.check(["end"]):
            end = _read_end(store.get("end"), self.size)
            self._end_at, self._end = time.monotonic(), end

    # ---- the thread of the lifelines ----

    def _watch(self) -> None:
        try:
            while not self._stopped.is_set():
                for key, _ in self._selector.select(_POLL_S):
                    self._read(cast(socket.socket, key.fileobj), key.data)
                self._look(time.monotonic())
            self._look(time.monotonic())  # an end of the team is told before this rank leaves
        except BaseException as error:  # without this thread nobody would see the next death
            text = f"rank {self.rank}: the thread that watches the other nodes has failed: {error!r}"
            _C.world_abort(self._team._c, _C.ESYS, text[:_MAX_TEXT])
            self._has_ended.set()

    def _read(self, sock: socket.socket, rank: int) -> None:
        try:
            if sock.recv(4096):
                return  # a lifeline carries nothing
            is_silent = False
        except BlockingIOError:
            return
        except OSError as error:
            is_silent = error.errno in _SILENT
        self._selector.unregister(sock)
        sock.close()
        if is_silent:  # the host does not answer, so none of its ranks does
            first = rank - rank % self._local_size
            self._lose(range(first, first + self._local_size), True)
        elif rank not in self._lost:
            self._closed[rank] = time.monotonic()
            self._calls.put((self._hear, None))

    def _lose(self, ranks: Iterable[int], is_silent: bool) -> None:
        for rank in ranks:
            self._lost.setdefault(rank, is_silent)
        self._lost_at = self._lost_at or time.monotonic()

    def _look(self, now: float) -> None:
        """Report deaths that are due.  If the team has ended, tell the other nodes why, once."""
        for rank, at in list(self._closed.items()):
            if self._failed_at is not None or now > at + _STORE_S:  # nobody says whether it has left
                self._lose([rank], False)
                self._closed.pop(rank, None)
        if self._has_ended.is_set():
            return
        if self.expects_leaves:
            if self._lost or self._left or self._failed_at is not None:
                self._has_ended.set()
        elif due := self._due(now):
            _C.world_abort(self._team._c, *due)
        if reason := _C.world_reason(self._team._c):
            self._has_ended.set()
            if self._on_end is not None:
                threading.Thread(target=self._on_end, name="epmoe end", daemon=True).start()
            lost = self._known_lost() if reason[0] == _C.EPEERDIED else []
            self._ask(lambda store: store.compare_set("end", "", json.dumps([*reason, lost])))

    def _due(self, now: float) -> tuple[int, str] | None:
        """Return the code and the text with which the team is to end now, or None."""
        if self._end and self._end[0] != _C.EPEERDIED:
            return self._end[0], self._end[1]
        if self._failed_at is not None and now > self._failed_at + LEAVE_GRACE_S:
            return _C.EPEERDIED, (f"rank {self.rank}: the process with the store of the process group died, "
                                  f"through which the nodes tell each other why they end: "
                                  f"{self._failure}"[:_MAX_TEXT])
        if self._lost or self._end:
            if now < min(at for at in (self._lost_at, self._end_at) if at is not None) + SETTLE_S:
                return None
            is_node = any(len(ranks) == self._local_size for ranks in self._by_node().values())
            return _C.EPEERDIED, self._end[1] if self._end and not is_node else self._describe()
        for rank, at in self._left.items():
            if now > at + LEAVE_GRACE_S:
                self._lost[rank] = False
                return _C.EPEERDIED, (f"{self._name(rank)} left alone: close() is collective, and all ranks "
                                      f"must call it")
        return None

    # ---- texts ----

    def _name(self, rank: int) -> str:
        node, local = divmod(rank, self._local_size)
        return f"rank {rank} (rank {local} of node {node})"

    def _by_node(self) -> dict[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank in sorted(self._lost):
            nodes.setdefault(rank // self._local_size, []).append(rank)
        return nodes

    def _describe(self) -> str:
        """Say which ranks and nodes are gone."""
        parts = []
        local = self._local_size
        for node, ranks in self._by_node().items():
            first = node * local
            numbers = f"rank {first}" if local == 1 else f"ranks {first} to {first + local - 1}"
            if self._lost[ranks[0]]:
                parts.append(f"node {node} ({numbers}) cannot be reached: no answer to rank {self.rank} for "
                             f"{self._silent_s:g} s")
            elif len(ranks) == local:
                parts.append(f"node {node} ({numbers}) died (seen by rank {self.rank})")
            else:
                parts += [f"{self._name(r)} died (seen by rank {self.rank})" for r in ranks]
        return "; ".join(parts)[:_MAX_TEXT]


def _node_timeout_s() -> float:
    """Return the seconds after which a silent host counts as gone: EPMOE_NODE_TIMEOUT_S, or 2."""
    text = os.environ.get("EPMOE_NODE_TIMEOUT_S", "") or "2"
    with contextlib.suppress(ValueError):
        if 1 <= float(text) < 1e4:
            return float(text)
    raise ValueError(f"EPMOE_NODE_TIMEOUT_S={text!r}: must be a number of seconds, 1 or more")


def _own_addresses() -> list[str]:
    """Return where this host can be reached by gloo's rule: GLOO_SOCKET_IFNAME, else the host's name."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                answer = fcntl.ioctl(s, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise ValueError(f"GLOO_SOCKET_IFNAME={name}: no interface of this host with an IPv4 address "
                             f"({error})") from None
        return [socket.inet_ntoa(answer[20:24])]
    found: list[Any] = []
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found] + ["127.0.0.1"]


def _listen() -> tuple[socket.socket, str]:
    """Listen at the first of the own addresses that this host has.  Return the socket and the address."""
    error: OSError | None = None
    for address in _own_addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with _forking:
                listener = socket.create_server((address, 0), family=family, backlog=_MAX_CALLERS)
                _listening.add(listener)
            return listener, address
        except OSError as e:
            error = e
    raise error or OSError("this host has no address")


def _gather(group: dist.ProcessGroup, mine: str, error: Exception | None, timeout_s: float) -> list[str]:
    """Exchange texts.  Raise this rank's error, or name the first rank that has one."""
    text = f"-{error}"[:_MAX_TEXT] if error else f"+{mine}"
    try:
        texts = [raw.decode(errors="replace") for raw in all_gather_bytes(group, text.encode(), timeout_s)]
    except EpError as of_group:
        raise error or of_group from of_group
    if error:
        raise error
    for rank, text in enumerate(texts):
        if text.startswith("-"):
            raise PeerError(f"rank {rank} could not connect the nodes. It raised: {text[1:]}")
    return [text[1:] for text in texts]


def _read_end(raw: bytes, size: int) -> _End:
    """Return the code, the text and the lost ranks that a rank has written.  Nonsense is an end, too."""
    try:
        code, text, lost = json.loads(raw)
        if (type(text) is str and type(code) is int and -13 <= code < 0
                and all(type(r) is int and 0 <= r < size for r in lost)):
            return code, "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT]), lost
    except (ValueError, TypeError, RecursionError):
        pass
    return _C.ESYS, "the nodes have ended, and the store has no reason that this rank can read", []


def _leave_all() -> None:
    """Tell the other nodes that this process ends in order."""
    left = [liveness for liveness in list(_open) if liveness._is_open()]
    for liveness in left:
        liveness.leave()
    if any(liveness.size > liveness._local_size for liveness in left):
        time.sleep(2 * _LISTEN_S)  # this process may hold the store, which the other ranks ask for left/r


at_exit(_leave_all)
