"""How the ranks of a new world find each other: the process group, the timeout, and each rank's address."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _C
from ..errors import EpClosed, EpError, EpMismatch, EpTimeout, PeerDied, PeerError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_TIMEOUT_S = 300.0
_ABI_BYTES = 4
_TOKEN_BYTES = 16
_LOOK_S = 0.1  # interval at which a rank that waits looks for dead ranks
# How long a rank whose peer refuses it waits for the reason from that peer, before it calls it dead.
_REASON_S = 0.5
_TAG = 0x65706D6F  # of messages that no rank sends: see _look_for_deaths
ADDRESS_BYTES = _C.NAME_BYTES + _C.NONCE_BYTES + _ABI_BYTES
# A longer gap between two looks at the clock means that the job was suspended: port.h, EP_MAX_COUNTED_GAP_NS.
_MAX_COUNTED_GAP_S = 0.5
# What gloo says, in small letters, when the process at the other end of a connection is gone.
SIGNS_OF_DEATH = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "failed to recv")


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment in the block: torch reads some where a process group is made."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def default_timeout_s() -> float:
    """Return the timeout of a new world in seconds: EPMOE_TIMEOUT_S, or 300."""
    text = os.environ.get("EPMOE_TIMEOUT_S", "")
    try:
        return float(text) if text else DEFAULT_TIMEOUT_S
    except ValueError:
        raise ValueError(f"EPMOE_TIMEOUT_S={text!r}: must be a number of seconds, for example 60") from None


def checked_timeout_s(timeout_s: float | None) -> float:
    """Return timeout_s, or the default, as a number that the module accepts.

    A wrong timeout raises ValueError here, before any rank waits for another.
    """
    timeout_s = default_timeout_s() if timeout_s is None else float(timeout_s)
    if not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout of {timeout_s:g} s: must be more than 0 and less than 1e6")
    return timeout_s


def process_group(group: Any) -> ProcessGroup | None:
    """Return the ProcessGroup of a ProcessGroup, a one-dimensional DeviceMesh or None.

    None gives the default group, or None where torch.distributed is not initialized.
    """
    if hasattr(group, "get_group") and hasattr(group, "mesh"):  # a DeviceMesh, without importing it
        if group.ndim != 1:
            raise ValueError(f"a DeviceMesh of {group.ndim} dimensions: pass one of them, for example "
                             f"mesh['ep']")
        return group.get_group()
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if group is not None and dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: new_group returns no ProcessGroup on such a rank")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"wanted a ProcessGroup, a DeviceMesh, an epmoe.World or None, got "
                        f"{type(group).__name__}")
    return group


def listen() -> tuple[int, bytes]:
    """Open this rank's listening socket.  Return its descriptor and this rank's address.

    The address is what the other ranks need to connect: the socket's name, a nonce and the protocol version.
    """
    fd, name, nonce = _C.world_listen()
    return fd, name + nonce + _C.ABI_VERSION.to_bytes(_ABI_BYTES, "little")


# Of each group: one thread of a rank meets the others.
_locks: collections.defaultdict[str, threading.Lock] = collections.defaultdict(threading.Lock)
_of_parent: ProcessGroup | None = None  # in a forked child: the default group of its parent


def _note_parents_group() -> None:
    global _of_parent
    _of_parent = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


os.register_at_fork(after_in_child=_note_parents_group)


def check_caller() -> None:
    """Raise an error where no world can be made: in a forked child on the group of its parent (EpClosed), and
    in a signal handler that runs while this thread waits in epmoe (ValueError)."""
    _C.world_check_handler()
    if _of_parent is not None and dist.is_initialized() and dist.group.WORLD is _of_parent:
        raise EpClosed("this process was forked, and the process group belongs to its parent: no rank would "
                       "answer. Start the process with spawn or forkserver, or fork it before "
                       "init_process_group")


def all_gather_bytes(group: ProcessGroup, mine: bytes, timeout_s: float) -> list[bytes]:
    """Return the bytes of every rank, which may be of different lengths; nothing is pickled.  Collective.

    The ranks meet in the store of the group, and not in a collective operation of the group.  A rank that
    gives up withdraws what it has written, and can come again.  An operation that it had begun could not be
    taken back: the group's own collectives would stay one apart between the ranks.

    Each rank writes an entry, with a token that no other entry has.  Rank 0 waits until there is a new entry
    of every rank, and then writes all of them as a round.  A rank has met the others when a round has its
    entry.  An entry that the newest round has is old: its rank has met the others, and has not come again.
    Errors of the group and of its store become errors of epmoe.
    """
    check_caller()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    entry = os.urandom(_TOKEN_BYTES) + bytes(mine)
    try:
        store = _store_of(group)
        with _locks[group.group_name], _signal_handlers_refused():
            entries = _meet_in_store(store, group, rank, size, entry, timeout_s)
    except EpError:
        raise
    except RuntimeError as error:
        raise _error_of_group(error, rank) from error
    return [e[_TOKEN_BYTES:] for e in entries]


def _store_of(group: ProcessGroup) -> Any:
    """Return the Store of a group.  Its type hints say str where it takes bytes."""
    return group.get_group_store()


@contextlib.contextmanager
def _signal_handlers_refused() -> Iterator[None]:
    """Refuse calls of epmoe by signal handlers in the block, in which this thread waits."""
    before = _C.world_set_waiting(True)
    try:
        yield
    finally:
        _C.world_set_waiting(before)


def _meet_in_store(store: Any, group: ProcessGroup, rank: int, size: int, entry: bytes,
                   timeout_s: float) -> list[bytes]:
    limit = _Limit(timeout_s)
    num_rounds = store.add("epmoe/rounds", 0)
    store.set(f"epmoe/{rank}", entry)
    try:
        pause_s = 0.0005
        while True:
            if rank == 0:
                _write_round(store, size)
            if store.add("epmoe/rounds", 0) != num_rounds:
                num_rounds = store.add("epmoe/rounds", 0)
                entries = _split(store.get("epmoe/round"))
                if len(entries) == size and entries[rank] == entry:
                    return entries
            if limit.is_over():
                raise EpTimeout(f"rank {rank} timed out after {timeout_s:g} s: not every rank of the group "
                                f"has created the world. All ranks must make the first layer, heap or World.")
            if limit.is_time_to_look():
                _look_for_deaths(group, rank, size)
            time.sleep(pause_s)
            pause_s = min(0.02, 1.3 * pause_s)
    except BaseException:
        with contextlib.suppress(Exception):
            store.set(f"epmoe/{rank}", b"")
        raise


def _write_round(store: Any, size: int) -> None:
    """Write a round, if there is a new entry of every rank."""
    keys = [f"epmoe/{r}" for r in range(size)]
    if not store.check(keys):
        return
    entries = store.multi_get(keys)
    before = _split(store.get("epmoe/round")) if store.check(["epmoe/round"]) else []
    if all(entries) and not any(e in before for e in entries):
        store.set("epmoe/round", b"".join(len(e).to_bytes(4, "little") + bytes(e) for e in entries))
        store.add("epmoe/rounds", 1)


def _split(joined: bytes) -> list[bytes]:
    entries, at = [], 0
    while at < len(joined):
        size = int.from_bytes(joined[at : at + 4], "little")
        entries.append(joined[at + 4 : at + 4 + size])
        at += 4 + size
    return entries


class _Limit:
    """A time limit that does not count the time during which the process was suspended."""

    def __init__(self, limit_s: float) -> None:
        self._looked = time.monotonic()
        self._deadline = self._looked + limit_s
        self._next_look = self._looked + _LOOK_S

    def is_over(self) -> bool:
        gap = time.monotonic() - self._looked
        self._looked += gap
        self._deadline += max(0.0, gap - _MAX_COUNTED_GAP_S)
        return self._looked > self._deadline

    def is_time_to_look(self) -> bool:
        is_time = self._looked > self._next_look
        if is_time:
            self._next_look = self._looked + _LOOK_S
        return is_time


def _look_for_deaths(group: ProcessGroup, rank: int, size: int) -> None:
    """Raise gloo's error if the connection to a rank is closed.  Another backend cannot say this.

    A receive on a closed connection fails at once.  On an open one it waits for a message that no rank sends.
    It takes no part in the group's collectives, and is forgotten.
    """
    if "gloo" not in dist.get_backend(group):
        return
    for r in range(size):
        if r != rank:
            dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), group=group, group_src=r, tag=_TAG)


def _error_of_group(error: RuntimeError, rank: int) -> EpError:
    """Return the error of epmoe for an error of the process group, by its text: its class is RuntimeError."""
    text = str(error)
    if any(sign in text.lower() for sign in SIGNS_OF_DEATH):
        return PeerDied(f"rank {rank}: a rank of the group died, or left the group, while the ranks created "
                        f"a world: {text}")
    if any(sign in text.lower() for sign in ("timed out", "timeout")):
        return EpTimeout(f"rank {rank}: the process group timed out, because not every rank of the group has "
                         f"created the world: {text}")
    return EpError(f"rank {rank}: the process group failed while the ranks created a world: {text}")


def meet(group: ProcessGroup, rank: int, size: int, timeout_s: float | None) -> _C._World:
    """Exchange the addresses of all ranks of a group and connect.  Collective.  Return the C world.

    A rank that cannot take part gives an empty address, so that no other rank waits for it.
    """
    fd = -1
    address = bytes(ADDRESS_BYTES)
    error: Exception | None = None
    limit_s = DEFAULT_TIMEOUT_S
    try:
        limit_s = checked_timeout_s(timeout_s)
        fd, address = listen()
    except Exception as e:
        error = e
    try:
        addresses = all_gather_bytes(group, address, limit_s)
        if error is not None:
            raise error
        _check_addresses(addresses)
    except BaseException:
        if fd >= 0:
            _C.world_unlisten(fd)
        raise
    names = b"".join(c[: _C.NAME_BYTES] for c in addresses)
    nonce = addresses[0][_C.NAME_BYTES : -_ABI_BYTES]
    try:
        return _C.world_create(rank, size, limit_s, fd, nonce, names)
    except BaseException as failure:
        explained = failure
        with contextlib.suppress(RuntimeError):  # without the store, the error stays as it is
            explained = _explain(failure, _store_of(group), rank, addresses)
        raise explained


def _explain(error: BaseException, store: Any, rank: int, addresses: list[bytes]) -> BaseException:
    """Return the error of this rank, whose connections have failed, and tell the other ranks why.

    A rank that cannot connect closes its socket, and its peers find it closed, as that of a dead rank.
    So each rank that fails writes its reason into the store.  A rank that takes a peer for dead looks there
    first.
    """
    until = time.monotonic() + _REASON_S
    while isinstance(error, PeerDied):
        reasons = [_reason_of(store, r, a) for r, a in enumerate(addresses) if r != rank]
        error = next(filter(None, reasons), error)
        if any(reasons) or time.monotonic() > until:
            break
        time.sleep(0.005)
    text = f"{type(error).__name__}:{error}".encode()
    store.set(f"epmoe/failed/{rank}", addresses[rank] + text)
    return error


def _reason_of(store: Any, rank: int, address: bytes) -> EpError | None:
    """Return the error of a rank that has failed at this address and was alive, or None."""
    key = f"epmoe/failed/{rank}"
    written = store.get(key) if store.check([key]) else b""
    if not written.startswith(address):
        return None
    kind, _, text = written[len(address) :].decode().partition(":")
    of_all = {"PeerDied": PeerDied, "EpTimeout": EpTimeout, "PeerError": PeerError}
    if kind in of_all:
        return of_all[kind](text)
    return PeerError(f"rank {rank} could not make its world ({kind}). See the error that it raised.")


def _check_addresses(addresses: list[bytes]) -> None:
    for rank, address in enumerate(addresses):
        if not address[0]:  # the length of a name
            raise PeerError(f"rank {rank} could not make its world. See the error that it raised.")
    for rank, address in enumerate(addresses):
        abi = int.from_bytes(address[-_ABI_BYTES:], "little")
        if abi != _C.ABI_VERSION:
            raise EpMismatch(f"rank {rank} has another epmoe (protocol {abi:x}) than this rank "
                             f"(protocol {_C.ABI_VERSION:x}): install the same epmoe for all ranks")
