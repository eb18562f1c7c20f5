"""Who takes part: a world of ranks, made from a process group, watched for deaths."""

import atexit
import os
import time
import weakref

import torch
import torch.distributed as dist

from . import _C
from .errors import EpError, EpMismatch, EpTimeout, PeerError

DEFAULT_TIMEOUT_S = 300.0
_open = weakref.WeakSet()
_of_group = {}  # id(group) -> World: one world serves all layers of a group


def default_timeout_s():
    """EPMOE_TIMEOUT_S, or 300 s."""
    text = os.environ.get("EPMOE_TIMEOUT_S", "")
    try:
        return float(text) if text else DEFAULT_TIMEOUT_S
    except ValueError:
        raise ValueError(f"EPMOE_TIMEOUT_S={text!r}: must be a number of seconds") from None


def _seconds(timeout_s):
    """timeout_s, or the default, as a number that the module takes: looked at before any rank waits for another."""
    timeout_s = default_timeout_s() if timeout_s is None else float(timeout_s)
    if not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout of {timeout_s:g} s: must be more than 0 and less than 1e6")
    return timeout_s


def _process_group(group):
    """A ProcessGroup from a ProcessGroup, a one-dimensional DeviceMesh, or None (the default group, if any)."""
    if hasattr(group, "get_group") and hasattr(group, "mesh"):  # a DeviceMesh, without importing it
        if group.ndim != 1:
            raise ValueError(f"a DeviceMesh of {group.ndim} dimensions: pass one of them, for example mesh['ep']")
        return group.get_group()
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if group is not None and dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in the group: new_group gives such a rank no ProcessGroup")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"wanted a ProcessGroup, a DeviceMesh, an epmoe.World or None, got {type(group).__name__}")
    return group


def _listen():
    """A socket, and the card that others are shown: its name, what to say there, and the build that it belongs to."""
    fd, name, nonce = _C.world_listen()
    return fd, name + nonce + _C.ABI_VERSION.to_bytes(4, "little")


def _all_gather_bytes(group, mine, timeout_s):
    """Every rank's bytes, as fixed-size uint8 tensors: nothing is pickled.  The group's own limit may be far longer."""
    on_gpu = "nccl" in dist.get_backend(group) and "gloo" not in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    t = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    out = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
    work, until = dist.all_gather(out, t, group=group, async_op=True), time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > until:
            raise EpTimeout(f"rank {dist.get_rank(group)} waited in vain for a rank to make a world with, {timeout_s:g} s")
        time.sleep(1e-4)
    work.wait()
    return [bytes(o.cpu().tolist()) for o in out]


class Shared:
    """Belongs to this process and its peers: a copy of it is the thing itself, and it cannot be pickled."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError(f"{type(self).__name__} belongs to this process and cannot be pickled; for a model save its state_dict()")


class World(Shared):
    """The ranks that share heaps and layers, with a connection between each pair that a watchdog looks after.

    Creation is collective.  group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the default
    group (a world of this process alone when torch.distributed is not initialised).  timeout_s: how long any
    wait for a rank that is alive may take (default EPMOE_TIMEOUT_S or 300); a rank that dies is noticed at
    once.  Ranks must be processes of one user on one machine, at most 8.

    Layers and heaps that are made from a group share a world, which the first of them makes.  When it has ended, those that
    come raise why, until World(group), on all ranks of the group, takes its place.  It outlives its group: World.of(group).close() goes
    before destroy_process_group(), where a program goes on after that.

    Raises EpTimeout if a rank does not come (30 s at most, once all have said where they are); EpMismatch if ranks
    have builds of epmoe that do not go together; ValueError for a world of more
    than 8 ranks, and where a launcher has started several but torch.distributed is not initialized, so that each would be alone;
    ValueError or TypeError here, and PeerError on the others, for a timeout_s that cannot be.
    """

    def __init__(self, group=None, timeout_s=None):
        self.group = _process_group(group)
        if self.group is None:
            started = os.environ.get("WORLD_SIZE", "1")
            if dist.is_available() and started.isdigit() and int(started) > 1:
                raise ValueError(f"{started} ranks were started (WORLD_SIZE), but torch.distributed is not initialized: call init_process_group first")
            self.rank, self.size = 0, 1
            self._c = _C.world_threads(1, _seconds(timeout_s))[0]
        else:
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.size > _C.MAX_RANKS:
                raise ValueError(f"a world has 1 to {_C.MAX_RANKS} ranks, this group has {self.size}")
            self._c = self._meet(timeout_s)
        _open.add(self)
        for other in list(_of_group.values()):  # what has ended keeps saying why, but no thread and no socket
            try:
                other.check()
            except EpError:
                other._leave(False)
        if id(self.group) in _of_group:  # whether that one has ended or not: ranks hear of an end at different times
            _of_group[id(self.group)] = self

    def _meet(self, timeout_s):
        """Tell all ranks where this one listens, and connect.  Who cannot take part shows an empty card, and nobody waits for it."""
        fd, card, error, limit_s = -1, bytes(_C.NAME_BYTES + _C.NONCE_BYTES + 4), None, DEFAULT_TIMEOUT_S
        try:
            limit_s = timeout_s = _seconds(timeout_s)
            fd, card = _listen()
        except Exception as e:
            error = e
        try:
            cards = _all_gather_bytes(self.group, card, limit_s)
            if error is not None:
                raise error
            for rank, c in enumerate(cards):
                if not c[0]:  # the length of a name
                    raise PeerError(f"rank {rank} could not make its world; its own error says why")
            for rank, c in enumerate(cards):
                if (abi := int.from_bytes(c[-4:], "little")) != _C.ABI_VERSION:
                    raise EpMismatch(f"rank {rank} has another epmoe (protocol {abi:x}) than this rank (protocol {_C.ABI_VERSION:x})")
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        names = b"".join(c[: _C.NAME_BYTES] for c in cards)
        return _C.world_create(self.rank, self.size, timeout_s, fd, cards[0][_C.NAME_BYTES : -4], names)

    @classmethod
    def _wrap(cls, capsule, rank, size):
        self = cls.__new__(cls)
        self.group, self.rank, self.size, self._c = None, rank, size, capsule
        _open.add(self)
        return self

    @classmethod
    def of(cls, group, timeout_s=None):
        """The world that the layers of a group share: made, with timeout_s, by the first call, which is collective.  A World is
        returned as it is.  So is one that has ended: if some ranks already found another, they would be alone in making it."""
        if isinstance(group, World):
            return group
        group = _process_group(group)
        world = _of_group.get(id(group))
        if world is None:
            world = _of_group[id(group)] = cls(group, timeout_s)
        return world

    def check(self):
        """Raise why the world has ended, if it has."""
        _C.world_check(self._c)

    def lost_ranks(self):
        """Ranks that are gone, in order: they have died, or left alone while the others went on.  As far as this rank knows: one of them is
        known when PeerDied is raised, more may be a moment later."""
        lost = _C.world_lost_ranks(self._c)
        return [rank for rank in range(self.size) if lost >> rank & 1]

    def set_timeout(self, timeout_s):
        """How long a wait for a living rank may take, from the next operation on: seconds, more than 0 and less than 1e6, else ValueError."""
        _C.world_set_timeout(self._c, float(timeout_s))

    def exchange(self, mine):
        """All ranks' bytes (at most 512, equally many on each), in rank order.  Collective.

        Raises EpMismatch on all ranks when they give different numbers of bytes; ValueError or TypeError here, and
        PeerError on the others, for what cannot be given.  After both the next exchange works.
        """
        try:
            mine = bytes(memoryview(mine))
            if len(mine) > _C.EXCHANGE_BYTES:
                raise ValueError(f"an exchange carries at most {_C.EXCHANGE_BYTES} bytes, not {len(mine)}")
        except (TypeError, ValueError, BufferError) as error:
            _C.world_refuse(self._c, _C.ETYPE if isinstance(error, TypeError) else _C.EINVAL)
            raise
        everything = _C.world_exchange(self._c, mine)
        return [everything[i * len(mine) : (i + 1) * len(mine)] for i in range(self.size)]

    def flight_record(self):
        """A page that says who ended the world, with the last operations of every rank: for a person to read.

        The first line names the culprit; then come each rank's last operation and the newest operations of all
        ranks side by side.  Works from the moment that PeerDied or EpTimeout is raised, also after close.
        Collects what the other ranks still say, for at most half a second.  On CUDA an operation that is
        "enqueued" may not have run.  With EPMOE_FLIGHT_RECORD=DIR, every rank adds its page to
        DIR/epmoe-rank{rank}-pid{pid}.txt when the world ends.
        """
        return _C.world_flight_record(self._c)

    def close(self):
        """Wait for all ranks, then leave.  Collective; a second call does nothing.

        Raises EpMismatch, or PeerError, where a rank was in another call: nobody has left then, and all close again; PeerDied or EpTimeout
        where one does not come: this rank has left all the same.
        """
        self._leave(True)

    def _leave(self, collective):
        try:
            _C.world_close(self._c, collective)
        except (EpMismatch, PeerError):  # it is open still
            raise
        except Exception:
            self._forget(collective)
            raise
        self._forget(collective)

    def _forget(self, collective):
        if (collective or self.size == 1) and _of_group.get(id(self.group)) is self:  # who leaves alone must not forget it alone
            del _of_group[id(self.group)]
        _open.discard(self)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self._leave(kind is None)  # after an exception: leave alone, the peers are told

    def __repr__(self):
        return f"epmoe.World(rank={self.rank}, size={self.size})"


def thread_worlds(num_ranks, timeout_s=None):
    """Worlds of num_ranks ranks inside this process, each for a thread of its own.  A list, in rank order.

    On a GPU all of them share it side by side.  Each thread must use a CUDA stream of its own: ValueError on the default
    stream, where operations that wait for each other would run one after the other.  epmoe.testing.run_threads does that.

    Raises ValueError for a number of ranks outside 1 to 8, and for a timeout_s (seconds, see World) that cannot be.
    """
    capsules = _C.world_threads(num_ranks, default_timeout_s() if timeout_s is None else float(timeout_s))
    return [World._wrap(c, r, num_ranks) for r, c in enumerate(capsules)]


@atexit.register
def _leave_all():
    """Tell the peers that this process ends in order.  Waits for nobody, but half a second for what is on its way in a world that was
    left by an exception."""
    _C.worlds_settle()
    for world in list(_open):
        world._leave(False)
