"""Nodes: the ranks of several nodes; a World on each node, and a rail for each local rank between them."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeGuard

import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..errors import EpClosed, EpError, EpIndexError, EpMismatch, EpTimeout, PeerDied, PeerError
from .liveness import Liveness
from .rail import TorchRail, is_open, named, new_group
from .rendezvous import ADDRESS_BYTES, DEFAULT_TIMEOUT_S, all_gather_bytes, checked_timeout_s, process_group
from .validation import (CLOSE, EXCHANGE, FAILED, FAILURE, INDEX, OPS, VERDICT_BYTES, Header, Verdict,
                         disagreement, raise_verdict, worst)
from .world import BytesLike, Shared, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_of_group: dict[int, Nodes] = {}  # id(group) -> Nodes: one serves all layers of a group
_CODES = {EpTimeout: _C.ETIMEOUT, EpMismatch: _C.EMISMATCH, EpClosed: _C.ECLOSED}  # others: EPEERDIED
_VERDICT_S = 5.0  # how long a rank waits for the name of a rank that has died: Liveness needs 3 s at most

_HOST_BYTES = 8
_of_mesh: dict[tuple[int, ...], ProcessGroup] = {}  # ranks -> group: Nodes that are made again use it again
_NAME_BYTES = ADDRESS_BYTES - 8 - _HOST_BYTES


# ---- which rank is on which node ----


class Card(NamedTuple):
    """What a rank tells the others before they form nodes."""

    abi: int  # of the protocol
    local_size: int  # ranks of a node, as this rank was told; 0: this rank cannot take part
    host: bytes  # equal on two ranks exactly if they can share memory
    name: str  # of the host, for people, perhaps cut

    def pack(self) -> bytes:
        """Return the card in the form of an address without a name, which no World accepts (rendezvous.py).

        So ranks of one group that disagree whether they are one node raise an error, instead of taking cards
        for addresses.
        """
        name = self.name.encode(errors="replace")[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        return (b"\0N" + self.abi.to_bytes(4, "little") + self.local_size.to_bytes(2, "little") + self.host
                + name)

    @classmethod
    def unpack(cls, raw: bytes) -> Card | None:
        """Return the Card, or None where a rank sent the address of a World."""
        if raw[:2] != b"\0N":
            return None
        host = raw[8 : 8 + _HOST_BYTES]
        name = raw[8 + _HOST_BYTES :].rstrip(b"\0").decode(errors="replace")
        return cls(int.from_bytes(raw[2:6], "little"), int.from_bytes(raw[6:8], "little"), host, name)


def own_card(local_size: int) -> Card:
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


def is_mesh(group: Any) -> TypeGuard[DeviceMesh]:
    """Whether group is a DeviceMesh of two dimensions: nodes x local."""
    return hasattr(group, "get_group") and hasattr(group, "mesh") and group.ndim == 2


def group_of_mesh(mesh: DeviceMesh, timeout_s: float) -> ProcessGroup:
    """Return a process group of all ranks of a DeviceMesh, in the order of the mesh."""
    ranks = mesh.mesh.flatten().tolist()
    whole = dist.group.WORLD
    if whole is not None and ranks == dist.get_process_group_ranks(whole):
        return whole
    group = _of_mesh.get(tuple(ranks))
    if group is None or not is_open(group):  # also where the default group was made again
        group = _of_mesh[tuple(ranks)] = dist.new_group(
            ranks, timeout=datetime.timedelta(seconds=timeout_s), use_local_synchronization=True)
    return group


def sizes_of(group: ProcessGroup | DeviceMesh | None, local_world_size: int | None = None) -> tuple[int, int]:
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


def _ranges(ranks: list[int]) -> str:
    """Return ascending numbers as text: "0-3, 8"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def describe(cards: Sequence[Card]) -> str:
    """Return the layout as text for people, with a line for each host."""
    hosts: dict[bytes, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    lines = []
    for ranks in hosts.values():
        sizes = sorted({cards[rank].local_size for rank in ranks})
        lines.append(f"  host {cards[ranks[0]].name}: ranks {_ranges(ranks)}, local_world_size "
                     f"{', '.join(map(str, sizes))}")
    return "\n".join(lines)


def check_layout(told: Sequence[Card | None]) -> int:
    """Raise an error, the same on all ranks, unless the ranks are nodes x local.  Return the ranks of a node.

    The ranks of a node must have consecutive numbers and be on one host.  A host may have several nodes.

    Args:
        told: The Card of every rank, in rank order; None where a rank takes the group for one node.

    Raises:
        PeerError: When a rank cannot take part.
        EpMismatch: When ranks have different protocols or different local_world_size.
        ValueError: When the ranks are not nodes x local; the text has the layout.
    """
    cards: list[Card] = []
    for rank, card in enumerate(told):
        if card is None:
            raise EpMismatch(f"rank {rank} takes the group for one node, others for several: pass the same "
                             f"local_world_size on all ranks")
        if card.local_size == 0:
            raise PeerError(f"rank {rank} could not take part in the creation of nodes. See the error that "
                            f"it raised.")
        if cards and card.abi != cards[0].abi:
            raise EpMismatch(f"rank {rank} has another epmoe (protocol {card.abi:x}) than rank 0 (protocol "
                             f"{cards[0].abi:x}): install the same epmoe on all nodes")
        cards.append(card)
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


# ---- the ranks of these nodes ----


class Nodes(Shared):
    """The ranks of several nodes, for layers that span them.

    Letters: N nodes, L ranks of each, W = N * L.  Rank r is on node r // L and has the local number r % L.

    The ranks of a node are a team: a World, which loads and stores in the others' memory.  The ranks with the
    same local number are a rail: process groups of torch.distributed, NCCL for rows on GPUs and gloo
    otherwise, which this class creates.  Layers use both: see EPAll2AllLayer's local_world_size.

    Creation is collective over the group.  Several nodes may be on one host, for development.

    Args:
        group: A ProcessGroup of all ranks, None for the default group, or a DeviceMesh of two dimensions:
            nodes x local.  Its order of ranks must have those of a node one after the other.
        local_world_size: L, at most 8.  None: the second dimension of the mesh; else LOCAL_WORLD_SIZE, which
            torchrun sets.
        timeout_s: As for World; also for the exchanges between nodes.

    Attributes:
        group: The ProcessGroup of all ranks.
        rank: This rank's number among all.
        size: W.
        node: The number of this node.
        num_nodes: N.
        local_rank: This rank's number on its node.
        local_size: L.
        team: The World of this node.
        rail: What exchanges bytes and rows with the equal local ranks of the other nodes; None for one node.

    Raises:
        ValueError: On all ranks, where the ranks are not nodes x local; the text has the layout.  On this
            rank, for a wrong local_world_size or timeout_s.
        TypeError: On this rank, for arguments of another type.
        PeerError: On the other ranks, when one rank raises ValueError or TypeError for itself.
        EpMismatch: On all ranks, when they pass different local_world_size or have different builds.
        EpError: As World.

    Examples:
        One node; with torchrun over two machines, epmoe.Nodes() has two.

        >>> import epmoe
        >>> with epmoe.Nodes() as nodes:
        ...     print(nodes)
        epmoe.Nodes(rank=0, nodes=1, local=1)
    """

    _reason: EpError | None  # the error of the rail that ended it
    _liveness: Liveness | None  # None for one node, and for ranks that are threads

    def __init__(self, group: ProcessGroup | DeviceMesh | None = None, local_world_size: int | None = None,
                 timeout_s: float | None = None) -> None:
        size, local = 0, 0
        limit_s = DEFAULT_TIMEOUT_S
        error: Exception | None = None
        self._key: ProcessGroup | DeviceMesh | None
        self.group: ProcessGroup | None
        self._key = group if is_mesh(group) else process_group(group)
        try:
            limit_s = checked_timeout_s(timeout_s)
            size, local = sizes_of(group, local_world_size)
        except (TypeError, ValueError) as e:
            error = e
        self.group = group_of_mesh(group, limit_s) if is_mesh(group) else process_group(group)
        if error is not None and self.group is None:
            raise error
        if error is None and size == local:
            self._set_sizes(World.of(self.group, limit_s), None, 0, 1)
        else:
            assert self.group is not None  # a rank alone is one node
            raw = own_card(0 if error else local).pack()
            cards = [Card.unpack(c) for c in all_gather_bytes(self.group, raw, limit_s)]
            if error is not None:
                raise error
            self._connect(self.group, check_layout(cards), limit_s)
        if id(self._key) in _of_group:
            _of_group[id(self._key)] = self

    def _connect(self, group: ProcessGroup, local: int, timeout_s: float) -> None:
        """Create the process groups and the team.  Every rank creates only its own, in the same order."""
        ranks = dist.get_process_group_ranks(group)
        rank, num_nodes = dist.get_rank(group), dist.get_world_size(group) // local
        node, local_rank = divmod(rank, local)
        # Names that no other groups have: those that remain of nodes before these may differ between ranks.
        nonce = all_gather_bytes(group, secrets.token_bytes(8), timeout_s)[0].hex()
        on_rail = range(local_rank, len(ranks), local)
        with named(rank, [r for r in range(len(ranks)) if r != rank]):
            team = new_group(f"epmoe team {nonce} {node}", ranks[node * local : (node + 1) * local], "gloo",
                             timeout_s)
            rail = TorchRail.create(group, ranks, list(on_rail), f"{nonce} {local_rank}", timeout_s)
        self._set_sizes(World(team, timeout_s), rail, node, num_nodes)
        try:
            liveness = Liveness(group, self.team, rail.abort, timeout_s)
        except BaseException:
            self._leave(False)
            raise
        self._liveness, rail.has_ended = liveness, liveness.has_ended

    def _propagate(self) -> None:
        """Report in an exchange that this rank cannot take part."""
        if self.rail is None:
            _C.world_propagate_error(self.team._c, _C.EINVAL)
        else:
            with contextlib.suppress(EpError):  # this rank raises its own error
                self._validate(Header(EXCHANGE, failed=FAILED))

    def _set_sizes(self, team: World, rail: TorchRail | None, node: int, num_nodes: int) -> None:
        self.team = team
        self.rail = rail
        self.node = node
        self.num_nodes = num_nodes
        self.local_rank = team.rank
        self.local_size = team.size
        self.rank = node * team.size + team.rank
        self.size = num_nodes * team.size
        self._num_layers = 0  # that were created
        self._is_waiting = False  # whether a call is in an exchange
        self._reason = None
        self._liveness = None

    @classmethod
    def _of_parts(cls, team: World, rail: TorchRail | None, node: int, num_nodes: int) -> Nodes:
        """Return the Nodes of a team and a rail that exist: ranks that are threads have no process group."""
        self = cls.__new__(cls)
        self._key = self.group = None
        self._set_sizes(team, rail, node, num_nodes)
        return self

    @classmethod
    def of(cls, group: Nodes | ProcessGroup | DeviceMesh | None, local_world_size: int | None = None,
           timeout_s: float | None = None) -> Nodes:
        """Return the Nodes that all layers of a group share, as World.of does.

        The first call of a group creates them and is collective.

        Args:
            group: As for Nodes; a Nodes is returned as it is.
            local_world_size: As for Nodes; checked when they exist already.
            timeout_s: As for Nodes.  Used only by the call that creates them.

        Returns:
            The Nodes of the group.

        Raises:
            EpError, TypeError: Those of Nodes, from the call that creates them.
            ValueError: As Nodes, and for another local_world_size than that of the Nodes that exist.

        Examples:
            >>> import epmoe
            >>> nodes = epmoe.Nodes.of(None)
            >>> epmoe.Nodes.of(None) is nodes and epmoe.Nodes.of(nodes) is nodes
            True
            >>> nodes.close()
        """
        if isinstance(group, Nodes):
            nodes = group
        else:
            key = id(group if is_mesh(group) else process_group(group))
            if key not in _of_group:
                _of_group[key] = cls(group, local_world_size, timeout_s)
                return _of_group[key]
            nodes = _of_group[key]
        if local_world_size not in (None, nodes.local_size):
            raise ValueError(f"local_world_size={local_world_size}, but the nodes of this group have "
                             f"{nodes.local_size} ranks: leave it out")
        return nodes

    @classmethod
    def _known(cls, group: Any) -> Nodes | None:
        """Return the Nodes that the layers of a group share already, or None."""
        if isinstance(group, Nodes):
            return group
        try:
            return _of_group.get(id(group if is_mesh(group) else process_group(group)))
        except (TypeError, ValueError):
            return None

    def exchange(self, mine: BytesLike) -> list[bytes]:
        """Give some bytes to all ranks of all nodes and return those of every rank.  Collective.

        They go over the rail first, then inside each node.

        Args:
            mine: A bytes-like object of at most 512 bytes, equally many on all ranks.

        Returns:
            A list of bytes objects, in rank order.

        Raises:
            EpMismatch: On all ranks, when they give different numbers of bytes or are in different calls.
                The next exchange works.
            ValueError: On this rank, for more than 512 bytes.
            TypeError: On this rank, for what is not bytes-like.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.  The next exchange
                works.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> with epmoe.Nodes() as nodes:
            ...     nodes.exchange(b"hello")
            [b'hello']
        """
        if self.rail is None:
            return self.team.exchange(mine)
        try:
            mine = bytes(memoryview(mine))
            if len(mine) > _C.ALL_GATHER_BYTES:
                raise ValueError(f"an exchange carries at most {_C.ALL_GATHER_BYTES} bytes, not {len(mine)}")
        except (TypeError, ValueError, BufferError):
            self._propagate()
            raise
        self._validate(Header(EXCHANGE, num_bytes=len(mine)))
        with self._ending():
            joined = b"".join(self._meet_rail(mine)) if mine else b""  # of the ranks with this local number
            of_local = [b""] * self.local_size
            for i in range(0, len(joined), _C.ALL_GATHER_BYTES):
                for local, piece in enumerate(self.team.exchange(joined[i : i + _C.ALL_GATHER_BYTES])):
                    of_local[local] += piece
        return [of_local[rank % self.local_size][rank // self.local_size * len(mine) :][: len(mine)]
                for rank in range(self.size)]

    def _validate(self, header: Header) -> None:
        """Tell all ranks what this one calls.  Collective.

        Raises on all ranks when one has failed or is in another call.  The next call works then.
        """
        num_local = self.local_size
        on_rail = [node * num_local + self.local_rank for node in range(self.num_nodes)]
        self.check()
        if self._is_waiting:
            raise ValueError(f"{OPS[header.op]} during another call of these nodes: a signal handler or a "
                             f"second thread cannot make it")
        with self._ending():
            headers = [Header.unpack(raw) for raw in self._meet_rail(header.pack())]
            failures = [Verdict(FAILURE, rank, h.failed) for rank, h in zip(on_rail, headers) if h.failed]
            of_rail = worst([*failures, disagreement(headers, on_rail)])
            team = self.team.exchange(of_rail.pack() + header.pack())
        verdicts = [Verdict.unpack(raw[:VERDICT_BYTES]) for raw in team]
        first = self.node * num_local
        of_team = disagreement([Header.unpack(raw[VERDICT_BYTES:]) for raw in team],
                               range(first, first + num_local))
        raise_verdict(worst([*verdicts, of_team]), header)

    def _check_indices(self, bad: list[int], values: list[int], topk: int, num_experts: int) -> None:
        """Raise EpIndexError on all ranks if a rank has an expert index out of range.  Collective.

        bad: for each rank of the rail the position of its first wrong index, or -1; values: these indices.
        """
        found = [Verdict(INDEX, node * self.local_size + self.local_rank, at, value)
                 for node, (at, value) in enumerate(zip(bad, values)) if at >= 0]
        bad_one = worst([Verdict.unpack(raw) for raw in self.team.exchange(worst(found).pack())])
        if bad_one.kind == INDEX:
            token, choice = divmod(bad_one.a, topk)
            raise EpIndexError(f"rank {bad_one.rank}: expert index {bad_one.got} of token {token}, "
                               f"choice {choice} is outside [-1, {num_experts}]. Use -1 to drop a "
                               f"choice.")

    def _meet_rail(self, mine: bytes) -> list[bytes]:
        """Exchange bytes with the rail, in node order.  An error ends the nodes, so all ranks know."""
        assert self.rail is not None
        with self._ending():
            return self.rail.meet(mine)

    def _exchange_rows(self, out: Tensor, mine: Tensor, out_splits: list[int] | None = None,
                       splits: list[int] | None = None) -> None:
        """Exchange rows with the rail, as TorchRail.exchange.  An error ends the nodes."""
        assert self.rail is not None
        with self._ending():
            self.rail.exchange(out, mine, out_splits, splits)

    def _start_rows(self, out: Tensor, mine: Tensor, out_splits: list[int] | None,
                    splits: list[int] | None) -> Callable[[], None]:
        """Start an exchange of rows.  Returns a function that waits for it.  An error ends the nodes."""
        assert self.rail is not None
        with self._ending():
            wait = self.rail.start(out, mine, out_splits, splits)

        def finish() -> None:
            with self._ending():
                wait()

        return finish

    def _read(self, t: Tensor) -> Any:
        """Return the numbers of a tensor that an exchange writes, after it.  An error ends the nodes."""
        assert self.rail is not None
        with self._ending():
            return self.rail.read(t)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End the nodes after an error in the block, in which other ranks wait for this one.

        A signal handler may raise any exception there, for example KeyboardInterrupt.
        """
        was_waiting, self._is_waiting = self._is_waiting, True
        try:
            yield
        except EpError as error:
            known = self._end_of_rail(error)
            if known is error:
                raise
            raise known from error
        except BaseException as error:
            self._end(error)
            raise
        finally:
            self._is_waiting = was_waiting

    def _end_of_rail(self, error: EpError) -> EpError:
        """End the nodes, and return why: the lifelines may know which rank has died."""
        may_know = type(error) in (EpError, PeerDied)
        if may_know and self._liveness is not None and self._liveness.has_ended(_VERDICT_S):
            try:
                self.team.check()
            except EpError as known:
                error = known
        self._end(error)
        return error

    def _end(self, reason: BaseException) -> None:
        """Leave the world of this node and the rail, so that no other rank waits for this one.

        reason: what check() raises from now on, here and on the other ranks: an EpError; else EpClosed, which
            names this rank.
        """
        if not isinstance(reason, EpError):
            reason = EpClosed(f"rank {self.rank} left a call in which the other ranks need it: "
                              f"{type(reason).__name__} {reason}"[:250])
        self._reason = self._reason or reason
        _C.world_abort(self.team._c, _CODES.get(type(reason), _C.EPEERDIED), str(reason)[:250])
        if self._liveness is not None:
            self._liveness.has_ended(_VERDICT_S)  # it tells the other ranks
        with contextlib.suppress(EpError):
            self.team._leave(False)
        self._drop_rail()

    def check(self) -> None:
        """Raise the reason why these nodes have ended for this rank, if they have.

        Raises:
            EpError: As World.check; or what ended the exchange with the other nodes.

        Examples:
            >>> import epmoe
            >>> with epmoe.Nodes() as nodes:
            ...     nodes.check()
        """
        if self._reason is not None:
            raise type(self._reason)(str(self._reason))
        self.team.check()

    def _has_ended(self) -> bool:
        try:
            self.check()
        except EpError:
            return True
        return False

    def lost_ranks(self) -> list[int]:
        """Return the ranks of all nodes that have died, cannot be reached, or left while others continued.

        Returns:
            A list of numbers among all ranks, in ascending order.

        Raises:
            EpError: As World.lost_ranks.

        Examples:
            >>> import epmoe
            >>> with epmoe.Nodes() as nodes:
            ...     nodes.lost_ranks()
            []
        """
        if self._liveness is not None:
            return self._liveness.lost_ranks()
        return [self.node * self.local_size + rank for rank in self.team.lost_ranks()]

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long a wait for a living rank may take, from the next operation on.

        Args:
            timeout_s: As for World.set_timeout.

        Raises:
            ValueError: On this rank, for a number outside the range.
            TypeError: On this rank, for what is not a number.

        Examples:
            >>> import epmoe
            >>> with epmoe.Nodes() as nodes:
            ...     nodes.set_timeout(60)
        """
        self.team.set_timeout(timeout_s)
        if self.rail is not None:
            self.rail.set_timeout(float(timeout_s))

    def flight_record(self) -> str:
        """Return the page of text of this node's world, as World.flight_record.

        Returns:
            The page, a str.  Its rank numbers are local ones.

        Raises:
            EpError: As World.flight_record.

        Examples:
            >>> import epmoe
            >>> with epmoe.Nodes() as nodes:
            ...     print(nodes.flight_record().splitlines()[0])
            culprit: none, because no fault has ended the world
        """
        return self.team.flight_record()

    def close(self) -> None:
        """Wait for all ranks of all nodes, then leave.  Collective; a second call does nothing.

        Raises:
            EpMismatch: On all ranks, when one of them is in another call.  No rank has left; all close again.
            PeerError: As World.close.  No rank has left; all close again.
            EpError: As World.close.  This rank has left.

        Examples:
            >>> import epmoe
            >>> epmoe.Nodes().close()
        """
        self._leave(True)

    def _leave(self, collective: bool) -> None:
        try:
            if collective and self.rail is not None and not self._has_ended():
                self._validate(Header(CLOSE))
                self._expect_leaves()
            self.team._leave(collective)
        except (ValueError, PeerError):  # it is still open; EpMismatch is a ValueError
            if self._liveness is not None:
                self._liveness.expects_leaves = False
            raise
        except Exception:
            self._forget(collective)
            raise
        self._forget(collective)

    def _expect_leaves(self) -> None:
        """All ranks expect others to leave, before any rank of this rail or this node leaves.  Collective."""
        if self._liveness is not None and self.rail is not None:
            self._liveness.expects_leaves = True
            with contextlib.suppress(EpError):  # a rank that dies now is no longer needed
                self.rail.meet(b"x")

    def _forget(self, collective: bool) -> None:
        if collective and _of_group.get(id(self._key)) is self:
            del _of_group[id(self._key)]
        self._drop_rail(collective)

    def _drop_rail(self, in_order: bool = False) -> None:
        """Close the connections to the other nodes."""
        if self._liveness is not None:
            self._liveness.leave()
        if self.rail is not None:
            self.rail.close(in_order)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._leave(kind is None)

    def __repr__(self) -> str:
        return f"epmoe.Nodes(rank={self.rank}, nodes={self.num_nodes}, local={self.local_size})"
