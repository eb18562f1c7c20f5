"""World: the ranks that take part, connected to each other and monitored for deaths."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import torch.distributed as dist

from .. import _C
from ..errors import EpError, EpMismatch, PeerError
from .rendezvous import check_caller, checked_timeout_s, default_timeout_s, meet, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

BytesLike: TypeAlias = bytes | bytearray | memoryview

_open: weakref.WeakSet[World] = weakref.WeakSet()  # worlds that this process has not left
_of_group: dict[int, World] = {}  # id(group) -> World: one world serves all layers of a group
_creating: dict[int, threading.Lock] = {}  # id(group) -> held by the thread that creates its world


class Shared:
    """An object that belongs to this process and its peers.

    Copying it returns the same object.  Pickling it raises TypeError.
    """

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} belongs to this process and cannot be pickled; "
                        f"to save a model, save its state_dict()")


class World(Shared):
    """The ranks that share heaps and layers.

    Each pair of ranks has a socket, and a watchdog thread on each rank monitors them, so that a death is
    noticed at once.  The ranks must be processes of one user on one machine, at most 8.

    Creation is collective: all ranks of the group must create the world.

    Layers and heaps of one group share a world, which the first of them creates (see World.of).  After that
    world has ended, new layers and heaps raise the reason of its end, until World(group) on all ranks
    replaces it.  A process has at most 256 open worlds.  A world outlives its group: a program that continues
    after destroy_process_group must call World.of(group).close() before it.

    A world is also a context manager.  Leaving the block closes the world; leaving it by an exception leaves
    the world at once, without waiting, and the other ranks raise PeerDied.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None.  None is the default group, or a world
            of this process alone where torch.distributed is not initialized.
        timeout_s: Seconds that a wait for a living rank may take, more than 0 and less than 1e6.  Default:
            EPMOE_TIMEOUT_S, or 300.

    Attributes:
        group: The ProcessGroup, or None.
        rank: This rank's number in the world.
        size: The number of ranks, W.

    Raises:
        EpTimeout: On the ranks that came, when another does not come: after timeout_s.  Once all ranks have
            exchanged addresses, the limit for connecting is 30 s at most.
        EpMismatch: On all ranks, when they have builds of epmoe with different protocols.
        PeerError: On the other ranks, when one rank cannot take part, for example with a wrong timeout_s, or
            cannot connect.
        PeerDied: On all surviving ranks, when a rank dies meanwhile.
        EpClosed: In a forked child, for the process group of its parent.
        EpError: When the process group fails for another reason.  Its exception is the __cause__.
        ValueError: For a group of more than 8 ranks, a DeviceMesh of several dimensions, a wrong timeout_s,
            on a rank that is not in the group, and when a launcher has started several ranks (WORLD_SIZE)
            but torch.distributed is not initialized, so that each rank would be alone.  Also in a signal
            handler that runs while this thread waits in epmoe.
        TypeError: For a group or timeout_s of another type.

    Examples:
        >>> import epmoe
        >>> with epmoe.World() as world:  # without torch.distributed: one rank
        ...     print(world)
        epmoe.World(rank=0, size=1)
    """

    _num_moves = 0  # that all ranks have begun together: EPMoE.move_experts

    def __init__(self, group: ProcessGroup | DeviceMesh | None = None,
                 timeout_s: float | None = None) -> None:
        check_caller()
        self.group = process_group(group)
        if self.group is None:
            started = os.environ.get("WORLD_SIZE", "1")
            if dist.is_available() and started.isdigit() and int(started) > 1:
                raise ValueError(f"{started} ranks were started (WORLD_SIZE), but torch.distributed is not "
                                 f"initialized: call init_process_group first")
            self.rank = 0
            self.size = 1
            self._c = _C.world_threads(1, checked_timeout_s(timeout_s))[0]
        else:
            self.rank = dist.get_rank(self.group)
            self.size = dist.get_world_size(self.group)
            if self.size > _C.MAX_RANKS:
                raise ValueError(f"a world has 1 to {_C.MAX_RANKS} ranks, this group has {self.size}: "
                                 f"pass a smaller group, or the group to a layer with local_world_size=")
            self._c = meet(self.group, self.rank, self.size, timeout_s)
        _open.add(self)
        for other in list(_of_group.values()):  # ended worlds keep their reason, but no thread and no socket
            try:
                other.check()
            except EpError:
                other._leave(False)
        # Also when the world of the group has not ended here: ranks learn of an end at different times.
        if id(self.group) in _of_group:
            _of_group[id(self.group)] = self

    @classmethod
    def _wrap(cls, capsule: _C._World, rank: int, size: int) -> World:
        self = cls.__new__(cls)
        self.group = None
        self.rank = rank
        self.size = size
        self._c = capsule
        _open.add(self)
        return self

    @classmethod
    def of(cls, group: World | ProcessGroup | DeviceMesh | None, timeout_s: float | None = None) -> World:
        """Return the world that the layers and heaps of a group share.

        The first call of a group creates the world and is collective.  Later calls return the same world,
        also after it has ended: if some ranks created another one, they would be alone in it.

        Args:
            group: As for World; a World is returned as it is.
            timeout_s: As for World.  Used only by the call that creates the world.

        Returns:
            The World of the group.

        Raises:
            EpError, ValueError, TypeError: Those of World, from the call that creates it.

        Examples:
            >>> import epmoe
            >>> world = epmoe.World.of(None)
            >>> epmoe.World.of(None) is world and epmoe.World.of(world) is world
            True
            >>> world.close()
        """
        if isinstance(group, World):
            return group
        group = process_group(group)
        world = _of_group.get(id(group))
        if world is None:
            with _creating.setdefault(id(group), threading.Lock()):  # of two threads, one waits
                world = _of_group.get(id(group))
                if world is None:
                    world = _of_group[id(group)] = cls(group, timeout_s)
        return world

    def check(self) -> None:
        """Raise the reason why the world has ended, if it has.

        Returns:
            None, while the world lives.

        Raises:
            EpError: The reason: PeerDied, EpTimeout, EpMismatch or another subclass; EpClosed after close.

        Examples:
            >>> import epmoe
            >>> epmoe.World().check()
        """
        _C.world_check(self._c)

    def lost_ranks(self) -> list[int]:
        """Return the ranks that have died, or left while the others continued.

        The list is what this rank knows now.  When PeerDied is raised it has at least one rank; it may
        become longer a moment later.

        Returns:
            A list of rank numbers, in ascending order.

        Examples:
            >>> import epmoe
            >>> epmoe.World().lost_ranks()
            []
        """
        lost = _C.world_lost_ranks(self._c)
        return [rank for rank in range(self.size) if lost >> rank & 1]

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long a wait for a living rank may take, from the next operation on.

        Each rank sets its own; the call is not collective.

        Args:
            timeout_s: Seconds, more than 0 and less than 1e6.

        Raises:
            ValueError: On this rank, for a number outside that range.
            TypeError: On this rank, for what is not a number.

        Examples:
            >>> import epmoe
            >>> epmoe.World().set_timeout(60)
        """
        _C.world_set_timeout(self._c, float(timeout_s))

    def exchange(self, mine: BytesLike) -> list[bytes]:
        """Give some bytes to all ranks and return those of every rank.  Collective.

        Args:
            mine: A bytes-like object of at most 512 bytes, equally many on all ranks.

        Returns:
            A list of bytes objects, in rank order.

        Raises:
            EpMismatch: On all ranks, when they give different numbers of bytes or are in different calls.
                The next exchange works.
            ValueError: On this rank, for more than 512 bytes.  Also in a signal handler that runs while this
                thread waits in epmoe; then the other ranks learn nothing of the call.
            TypeError: On this rank, for what is not bytes-like.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.  The next exchange
                works.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After close.

        Examples:
            >>> from epmoe.testing import run_threads
            >>> run_threads(lambda world: world.exchange(bytes([world.rank])), 2)
            [[b'\\x00', b'\\x01'], [b'\\x00', b'\\x01']]
        """
        try:
            mine = bytes(memoryview(mine))
            if len(mine) > _C.ALL_GATHER_BYTES:
                raise ValueError(f"an exchange carries at most {_C.ALL_GATHER_BYTES} bytes, not {len(mine)}")
        except (TypeError, ValueError, BufferError) as error:
            _C.world_propagate_error(self._c, _C.ETYPE if isinstance(error, TypeError) else _C.EINVAL)
            raise
        everything = _C.world_all_gather(self._c, mine)
        return [everything[i * len(mine) : (i + 1) * len(mine)] for i in range(self.size)]

    def flight_record(self) -> str:
        """Return a page of text that names the rank that ended the world.  For a person to read.

        The first line names that rank.  Then come each rank's last operation and, side by side, the newest
        operations of all ranks.  On CUDA an operation that is "enqueued" may not have run.

        It can be called as soon as PeerDied or EpTimeout is raised, and also after close.  It waits at most
        half a second for the records of the other ranks.  With EPMOE_FLIGHT_RECORD=DIR, every rank writes
        its page to a new file DIR/epmoe-rank{rank}-pid{pid}.txt when the world ends (with -2, -3, ... before
        .txt if that name exists).  It waits at most 2 s for the file; if the file cannot be written, the page
        says so.

        Returns:
            The page, a str.

        Examples:
            >>> import epmoe
            >>> print(epmoe.World().flight_record().splitlines()[0])
            culprit: none, because no fault has ended the world
        """
        return _C.world_flight_record(self._c)

    def close(self) -> None:
        """Wait for all ranks, then leave the world.  Collective; a second call does nothing.

        Raises:
            EpMismatch: On all ranks, when one of them is in another call.  No rank has left; all close again.
            PeerError: When another rank could not take part.  No rank has left; all close again.
            PeerDied: On all surviving ranks, when a rank has died.  This rank has left.
            EpTimeout: On all ranks, when one does not come.  This rank has left.

        Examples:
            >>> import epmoe
            >>> world = epmoe.World()
            >>> world.close()
        """
        self._leave(True)

    def _leave(self, collective: bool) -> None:
        try:
            _C.world_close(self._c, collective)
        except (EpMismatch, PeerError):  # it is still open
            raise
        except Exception:
            self._unregister(collective)
            raise
        self._unregister(collective)

    def _unregister(self, collective: bool) -> None:
        # A rank that leaves alone keeps the entry: without it, the next layer here would create a world
        # alone.
        if (collective or self.size == 1) and _of_group.get(id(self.group)) is self:
            _of_group.pop(id(self.group), None)  # another thread may close it, too
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._leave(kind is None)  # after an exception: leave alone, which the other ranks are told

    def __repr__(self) -> str:
        return f"epmoe.World(rank={self.rank}, size={self.size})"


def thread_worlds(num_ranks: int, timeout_s: float | None = None) -> list[World]:
    """Create a world whose ranks are threads of this process, for tests and examples.

    On a GPU the ranks share it, side by side.  Each thread must then use a CUDA stream of its own: on the
    default stream, operations that wait for each other would run one after the other.
    epmoe.testing.run_threads does that.

    Args:
        num_ranks: The number of ranks, 1 to 8.
        timeout_s: As for World.

    Returns:
        A list of World objects in rank order.  Each must be used by a thread of its own.

    Raises:
        ValueError: For a number of ranks outside 1 to 8, or a wrong timeout_s.
        TypeError: For arguments that are not numbers.

    Examples:
        >>> import epmoe
        >>> epmoe.thread_worlds(2)
        [epmoe.World(rank=0, size=2), epmoe.World(rank=1, size=2)]
    """
    timeout_s = default_timeout_s() if timeout_s is None else float(timeout_s)
    capsules = _C.world_threads(num_ranks, timeout_s)
    return [World._wrap(c, r, num_ranks) for r, c in enumerate(capsules)]


def at_exit(leave: Callable[[], None]) -> None:
    """Call leave when this process ends in order.  Of several such functions the newest is called first.

    A process that multiprocessing has forked may not call the functions of atexit (Python 3.11 and 3.12 do
    not), but it calls the finalizers of multiprocessing.  Where both are called, leave is called twice.
    """
    def of_fork(leave: Callable[[], None]) -> None:
        multiprocessing.util.Finalize(None, leave, exitpriority=_LAST)

    atexit.register(leave)
    multiprocessing.util.register_after_fork(leave, of_fork)
    if multiprocessing.parent_process():  # which has imported epmoe after the fork
        of_fork(leave)


_LAST = -100  # as in atexit: after other finalizers, and after the processes that this one has started


def _leave_all() -> None:
    """Tell the peers that this process ends in order.

    It waits for no rank.  In a world that was left by an exception, it waits up to half a second for the
    operations that are still running.
    """
    _C.worlds_settle()
    for world in list(_open):
        world._leave(False)


at_exit(_leave_all)
