"""How the ranks of a new world find each other: the process group, the timeout, and each rank's address."""

import contextlib
import os
import time

import torch
import torch.distributed as dist

from . import _C
from .errors import EpError, EpMismatch, EpTimeout, PeerDied, PeerError

DEFAULT_TIMEOUT_S = 300.0
_ABI_BYTES = 4
ADDRESS_BYTES = _C.NAME_BYTES + _C.NONCE_BYTES + _ABI_BYTES
# A longer gap between two looks at the clock means that the job was suspended: port.h, EP_MAX_COUNTED_GAP_NS.
_MAX_COUNTED_GAP_S = 0.5
# What gloo says, in small letters, when the process at the other end of a connection is gone.
SIGNS_OF_DEATH = ("closed by peer", "reset by peer", "broken pipe", "connection refused")


@contextlib.contextmanager
def environment(values):
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


def default_timeout_s():
    """Return the timeout of a new world in seconds: EPMOE_TIMEOUT_S, or 300."""
    text = os.environ.get("EPMOE_TIMEOUT_S", "")
    try:
        return float(text) if text else DEFAULT_TIMEOUT_S
    except ValueError:
        raise ValueError(f"EPMOE_TIMEOUT_S={text!r}: must be a number of seconds, for example 60") from None


def checked_timeout_s(timeout_s):
    """Return timeout_s, or the default, as a number that the module accepts.

    A wrong timeout raises ValueError here, before any rank waits for another.
    """
    timeout_s = default_timeout_s() if timeout_s is None else float(timeout_s)
    if not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout of {timeout_s:g} s: must be more than 0 and less than 1e6")
    return timeout_s


def process_group(group):
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


def listen():
    """Open this rank's listening socket.  Return its descriptor and this rank's address.

    The address is what the other ranks need to connect: the socket's name, a nonce and the protocol version.
    """
    fd, name, nonce = _C.world_listen()
    return fd, name + nonce + _C.ABI_VERSION.to_bytes(_ABI_BYTES, "little")


def all_gather_bytes(group, mine, timeout_s):
    """Return the bytes of every rank.  All ranks give equally many; nothing is pickled.

    The group's own timeout may be far longer than timeout_s, so the wait is a loop with a limit of its own.
    Errors of the group become errors of epmoe.
    """
    try:
        work, out = _start_gather(group, mine)
        _await(work, group, timeout_s)
    except EpError:
        raise
    except RuntimeError as error:
        raise _error_of_group(error, dist.get_rank(group)) from error
    return [bytes(o.cpu().tolist()) for o in out]


def _start_gather(group, mine):
    size = dist.get_world_size(group)
    on_gpu = "nccl" in dist.get_backend(group) and "gloo" not in dist.get_backend(group)
    t = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    if on_gpu:
        t = t.to(torch.device("cuda", torch.cuda.current_device()))
        out = [torch.empty_like(t) for _ in range(size)]
        return dist.all_gather(out, t, group=group, async_op=True), out
    # gloo gathers around a ring.  After a death, ranks that are not next to the dead rank would wait until
    # the limit.  In an all-to-all every rank waits for every other one, so all survivors see the death at
    # once.
    out = t.new_empty(size * t.numel())
    return dist.all_to_all_single(out, t.repeat(size), group=group, async_op=True), out.chunk(size)


def _await(work, group, timeout_s):
    looked = time.monotonic()
    deadline = looked + timeout_s
    while not work.is_completed():
        gap = time.monotonic() - looked
        looked += gap
        deadline += max(0.0, gap - _MAX_COUNTED_GAP_S)
        if looked > deadline:
            raise EpTimeout(f"rank {dist.get_rank(group)} timed out after {timeout_s:g} s: not every rank "
                            f"of the group has created the world. All ranks must make the first layer, heap "
                            f"or World.")
        time.sleep(1e-4)
    work.wait()


def _error_of_group(error, rank):
    """Return the error of epmoe for an error of the process group, by its text: its class is RuntimeError."""
    text = str(error)
    if any(sign in text.lower() for sign in SIGNS_OF_DEATH):
        return PeerDied(f"rank {rank}: a rank of the group died, or left the group, while the ranks created "
                        f"a world: {text}")
    if any(sign in text.lower() for sign in ("timed out", "timeout")):
        return EpTimeout(f"rank {rank}: the process group timed out, because not every rank of the group has "
                         f"created the world: {text}")
    return EpError(f"rank {rank}: the process group failed while the ranks created a world: {text}")


def meet(group, rank, size, timeout_s):
    """Exchange the addresses of all ranks of a group and connect.  Collective.  Return the C world.

    A rank that cannot take part gives an empty address, so that no other rank waits for it.
    """
    fd = -1
    address = bytes(ADDRESS_BYTES)
    error = None
    limit_s = DEFAULT_TIMEOUT_S
    try:
        limit_s = timeout_s = checked_timeout_s(timeout_s)
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
    return _C.world_create(rank, size, timeout_s, fd, nonce, names)


def _check_addresses(addresses):
    for rank, address in enumerate(addresses):
        if not address[0]:  # the length of a name
            raise PeerError(f"rank {rank} could not make its world. See the error that it raised.")
    for rank, address in enumerate(addresses):
        abi = int.from_bytes(address[-_ABI_BYTES:], "little")
        if abi != _C.ABI_VERSION:
            raise EpMismatch(f"rank {rank} has another epmoe (protocol {abi:x}) than this rank "
                             f"(protocol {_C.ABI_VERSION:x}): install the same epmoe for all ranks")
