"""Nodes: the ranks of several nodes; a World on each node, and a rail for each local rank between them."""

import contextlib
import secrets

import torch.distributed as dist

from .. import _C
from ..errors import EpClosed, EpError, EpMismatch, EpTimeout, PeerDied, PeerError
from . import node_errors as meeting
from .liveness import Liveness
from .node_layout import Card, check_layout, group_of_mesh, is_mesh, own_card, sizes_of
from .rail import TorchRail, named, new_group
from .rendezvous import DEFAULT_TIMEOUT_S, all_gather_bytes, checked_timeout_s, process_group
from .world import Shared, World

_of_group = {}  # id(group) -> Nodes: one serves all layers of a group
_CODES = {EpTimeout: _C.ETIMEOUT, EpMismatch: _C.EMISMATCH, EpClosed: _C.ECLOSED}  # others: EPEERDIED
_VERDICT_S = 5.0  # how long a rank waits for the name of a rank that has died: Liveness needs 3 s at most


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

    def __init__(self, group=None, local_world_size=None, timeout_s=None):
        self._key = group if is_mesh(group) else process_group(group)
        size, local, error = 0, 0, None
        limit_s = DEFAULT_TIMEOUT_S
        try:
            limit_s = timeout_s = checked_timeout_s(timeout_s)
            size, local = sizes_of(group, local_world_size)
        except (TypeError, ValueError) as e:
            error = e
        self.group = group_of_mesh(group, limit_s) if is_mesh(group) else self._key
        if error is not None and self.group is None:
            raise error
        if error is None and size == local:
            self._set_sizes(World.of(self.group, timeout_s), None, 0, 1)
        else:
            raw = own_card(0 if error else local).pack()
            cards = [Card.unpack(c) for c in all_gather_bytes(self.group, raw, limit_s)]
            if error is not None:
                raise error
            self._connect(check_layout(cards), timeout_s)
        if id(self._key) in _of_group:
            _of_group[id(self._key)] = self

    def _connect(self, local, timeout_s):
        """Create the process groups and the team.  Every rank creates only its own, in the same order."""
        ranks = dist.get_process_group_ranks(self.group)
        rank, num_nodes = dist.get_rank(self.group), dist.get_world_size(self.group) // local
        node, local_rank = divmod(rank, local)
        # Names that no other groups have: those that remain of nodes before these may differ between ranks.
        nonce = all_gather_bytes(self.group, secrets.token_bytes(8), timeout_s)[0].hex()
        on_rail = range(local_rank, len(ranks), local)
        with named(rank, [r for r in range(len(ranks)) if r != rank]):
            team = new_group(f"epmoe team {nonce} {node}", ranks[node * local : (node + 1) * local], "gloo",
                             timeout_s)
            rail = TorchRail.create(self.group, ranks, list(on_rail), f"{nonce} {local_rank}", timeout_s)
        self._set_sizes(World(team, timeout_s), rail, node, num_nodes)
        try:
            self._liveness = Liveness(self.group, self.team, rail.abort, timeout_s)
        except BaseException:
            self._leave(False)
            raise
        rail.has_ended = self._liveness.has_ended

    def _refuse(self):
        """Report in an exchange that this rank cannot take part."""
        if self.rail is None:
            _C.world_refuse(self.team._c, _C.EINVAL)
        else:
            with contextlib.suppress(EpError):  # this rank raises its own error
                meeting.meet(self, meeting.Header(meeting.EXCHANGE, failed=meeting.FAILED))

    def _set_sizes(self, team, rail, node, num_nodes):
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
        self._reason = None  # the error of the rail that ended it
        self._liveness = None  # None for one node, and for ranks that are threads

    @classmethod
    def _of_parts(cls, team, rail, node, num_nodes):
        """Return the Nodes of a team and a rail that exist: ranks that are threads have no process group."""
        self = cls.__new__(cls)
        self._key = self.group = None
        self._set_sizes(team, rail, node, num_nodes)
        return self

    @classmethod
    def of(cls, group, local_world_size=None, timeout_s=None):
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
        key = group if isinstance(group, Nodes) or is_mesh(group) else process_group(group)
        nodes = key if isinstance(key, Nodes) else _of_group.get(id(key))
        if nodes is None:
            nodes = _of_group[id(key)] = cls(group, local_world_size, timeout_s)
        elif local_world_size not in (None, nodes.local_size):
            raise ValueError(f"local_world_size={local_world_size}, but the nodes of this group have "
                             f"{nodes.local_size} ranks: leave it out")
        return nodes

    def exchange(self, mine):
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
            if len(mine) > _C.EXCHANGE_BYTES:
                raise ValueError(f"an exchange carries at most {_C.EXCHANGE_BYTES} bytes, not {len(mine)}")
        except (TypeError, ValueError, BufferError):
            self._refuse()
            raise
        return meeting.exchange(self, mine)

    def _meet_rail(self, mine):
        """Exchange bytes with the rail, in node order.  An error ends the nodes, so all ranks know."""
        with self._ending():
            return self.rail.meet(mine)

    def _exchange_rows(self, out, mine, out_splits=None, splits=None):
        """Exchange rows with the rail, as TorchRail.exchange.  An error ends the nodes."""
        with self._ending():
            self.rail.exchange(out, mine, out_splits, splits)

    def _start_rows(self, out, mine, out_splits, splits):
        """Start an exchange of rows.  Returns a function that waits for it.  An error ends the nodes."""
        with self._ending():
            wait = self.rail.start(out, mine, out_splits, splits)

        def finish():
            with self._ending():
                wait()

        return finish

    def _read(self, t):
        """Return the numbers of a tensor that an exchange writes, after it.  An error ends the nodes."""
        with self._ending():
            return self.rail.read(t)

    @contextlib.contextmanager
    def _ending(self):
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

    def _end_of_rail(self, error):
        """End the nodes, and return why: the lifelines may know which rank has died."""
        may_know = type(error) in (EpError, PeerDied) and self._liveness is not None
        if may_know and self._liveness.has_ended(_VERDICT_S):
            try:
                self.team.check()
            except EpError as known:
                error = known
        self._end(error)
        return error

    def _end(self, reason):
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

    def check(self):
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

    def _has_ended(self):
        try:
            self.check()
        except EpError:
            return True
        return False

    def lost_ranks(self):
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

    def set_timeout(self, timeout_s):
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

    def flight_record(self):
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

    def close(self):
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

    def _leave(self, collective):
        try:
            if collective and self.rail is not None and not self._has_ended():
                meeting.meet(self, meeting.Header(meeting.CLOSE))
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

    def _expect_leaves(self):
        """All ranks expect others to leave, before any rank of this rail or this node leaves.  Collective."""
        if self._liveness is not None:
            self._liveness.expects_leaves = True
            with contextlib.suppress(EpError):  # a rank that dies now is no longer needed
                self.rail.meet(b"x")

    def _forget(self, collective):
        if collective and _of_group.get(id(self._key)) is self:
            del _of_group[id(self._key)]
        self._drop_rail(collective)

    def _drop_rail(self, in_order=False):
        """Close the connections to the other nodes."""
        if self._liveness is not None:
            self._liveness.leave()
        if self.rail is not None:
            self.rail.close(in_order)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self._leave(kind is None)

    def __repr__(self):
        return f"epmoe.Nodes(rank={self.rank}, nodes={self.num_nodes}, local={self.local_size})"
