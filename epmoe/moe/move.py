"""move_experts of EPMoE: the experts go to the places of another map while the module serves calls.

A move has rounds (rounds_of).  In a round some physical experts, the targets, get other weights.  Each
logical expert keeps a place that is no target, so the module can always serve all of them.  Steps of a round:

1. The map without the targets is used: from now on no token goes to them.
2. The ranks that have the weights copy them to the ranks of the targets, into symmetric memory (put).
3. When all ranks have finished 2, each rank copies the weights into its targets, after the calls of the
   module that were enqueued before.
4. When all ranks have finished 3, the map with the targets is used.

advance() goes on where all ranks can.  The ranks tell each other on the host, so no kernel waits for another
rank.  Copies are enqueued on a stream of their own.  All ranks call advance() between the same two calls of
the module.  So when it uses another map, no call is half done.  Only a rank's own operations read its
weights, and those that were called before come before the copies into the targets in stream order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import _C
from ..comm.device import status_of
from ..comm.heap import SymmetricHeap
from ..comm.world import World
from ..torch_modes import writing
from .shards import as_bytes, tensors

if TYPE_CHECKING:
    from .module import EPMoE
    from .placement import ExpertMap

_ALIGNMENT = 256  # bytes, of the weights in symmetric memory


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a move.

    Attributes:
        moves: (target, source) of each target: the physical expert that has its weights, or -1 for none.
        before: [P]: the logical expert that each physical one holds during the round; -1 for the targets.
        after: [P]: the same after the round.
    """

    moves: list[tuple[int, int]]
    before: list[int]
    after: list[int]


def rounds_of(holds: Sequence[int], wanted: Sequence[int], num_local: int, at_once: int) -> list[Round]:
    """Return the rounds that lead from one map to another.  All ranks find the same.

    holds, wanted: [P]: the logical expert that each physical one holds, or -1.  num_local: P/W.  at_once: The
    most targets of a rank in a round.

    Raises ValueError where the experts cannot change places, because there is no spare one.
    """
    now, rounds = list(holds), []
    lent = -1  # a place that holds an expert for a while, so that this expert's own place is free
    while now != list(wanted):
        targets: list[int] = []
        for p in range(len(now)):
            of_rank = sum(q // num_local == p // num_local for q in targets)
            if now[p] != wanted[p] and of_rank < at_once and _is_free(now, wanted, p, targets, p == lent):
                targets.append(p)
        goals = {p: wanted[p] for p in targets}
        if not targets:  # each expert that must move has one place only
            lent = next((p for p in range(len(now)) if _is_free(now, wanted, p, [], False)), -1)
            if lent < 0:
                raise ValueError("move_experts: the experts cannot change places while the module works, "
                                 "because no physical expert is spare: create the module with a larger "
                                 "num_physical, or use set_expert_map, which stops the module")
            first = next(p for p in range(len(now)) if now[p] != wanted[p])
            goals = {lent: now[first]}
        before = [-1 if p in goals else e for p, e in enumerate(now)]
        moves = []
        for p, e in goals.items():
            sources = [q for q, held in enumerate(before) if held == e >= 0]
            near = [q for q in sources if q // num_local == p // num_local] or sources
            moves.append((p, near[p % len(near)] if near else -1))
        now = [goals.get(p, e) for p, e in enumerate(now)]
        rounds.append(Round(moves, before, now))
    return rounds


def _is_free(now: Sequence[int], wanted: Sequence[int], place: int, targets: list[int],
             is_lent: bool) -> bool:
    """Whether a place may become a target: its expert has another place that stays.

    is_lent: the place has lent itself to its expert, which must have reached a place of its own.
    """
    e = now[place]
    return e < 0 or any(q != place and q not in targets and held == e and (not is_lent or wanted[q] == e)
                        for q, held in enumerate(now))


class ExpertMove:
    """The experts of an EPMoE on their way to the places of another map; EPMoE.move_experts begins it.

    Attributes:
        is_done: Whether the move has ended.

    Examples:
        See EPMoE.move_experts.
    """

    is_done: bool

    def __init__(self, moe: EPMoE, expert_map: ExpertMap, rounds: list[Round], rooms: Rooms | None) -> None:
        self.is_done = not rounds
        self._moe, self._rounds, self._rooms = moe, rounds, rooms
        # The copies to the device make the host wait, so they are made now.
        self._maps = [[moe._placed(type(expert_map)(torch.tensor(held, dtype=torch.int64, device="cpu"),
                                                    moe.num_experts)) for held in (r.before, r.after)]
                      for r in rounds]
        self._next = 0  # the round that begins next
        self._step = self._begin_round
        self._event: torch.cuda.Event | None = None  # after the copies of the present step
        self._error: Exception | None = None  # that this rank had when it enqueued them
        device = moe.layer.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def advance(self) -> bool:
        """Do what can be done without waiting for copies.  Collective.

        All ranks call it between the same two calls of the module, on the stream of these calls.  A round of
        the move takes at least two calls.  The host exchanges a byte with the other ranks.

        Returns:
            Whether the module has the map.  After that, advance does nothing, and is not collective.

        Raises:
            RuntimeError: On this rank, during the capture of a CUDA graph, and after the module's finalize.
            PeerError: On the other ranks, when one rank raises in its copies.  The move then has ended, and
                the module works on, without the places that were being written.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            See EPMoE.move_experts.
        """
        if self.is_done:
            return True
        if self._moe._move is not self:
            raise RuntimeError("advance: the module was finalized, so the move has ended")
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("advance: a CUDA graph is being captured: call it between replays")
        try:
            if self._have_all_finished():
                self._step = self._step()
        except BaseException:
            self._end()
            raise
        return self.is_done

    def finish(self) -> None:
        """Call advance until the move is done; the host waits for the copies.  Collective.

        Raises:
            RuntimeError: As advance.
            EpError: As advance.

        Examples:
            See EPMoE.move_experts.
        """
        while not self.advance():
            if self._event is not None:
                self._event.synchronize()

    def _have_all_finished(self) -> bool:
        """Whether the copies of all ranks are done.  Raises the error that this rank had in them."""
        world = cast(World, self._moe.layer.world)
        try:
            if self._error is not None:
                raise self._error
            is_done = self._event is None or self._event.query()
        except Exception as error:
            with contextlib.suppress(Exception):
                _C.world_propagate_error(world._c, status_of(error))
            raise
        return all(its[0] for its in world.exchange(bytes([is_done])))

    def _begin_round(self) -> Callable[[], Any]:
        """Use the map after the round before, or end; then steps 1 and 2 of the next round."""
        if self._stream is not None:  # it has finished: this tells tools that look for races
            torch.cuda.current_stream(self._moe.layer.device).wait_stream(self._stream)
        if self._next == len(self._rounds):
            self._moe._use_map(self._maps[-1][1], self._rounds[-1].after)
            self._end()
        else:
            self._moe._use_map(self._maps[self._next][0], self._rounds[self._next].before)
            self._enqueue(self._send)
        return self._begin_copies

    def _begin_copies(self) -> Callable[[], Any]:
        """Step 3."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._moe.layer.device))
        self._enqueue(self._receive)
        self._next += 1
        return self._begin_round

    def _enqueue(self, copy: Callable[[], None]) -> None:
        """Run copy() on the stream of the copies.  The next advance raises its error, on all ranks."""
        self._event = None
        stream, context = self._stream, contextlib.nullcontext()
        try:
            with context if stream is None else torch.cuda.stream(stream):
                copy()
                if stream is not None:
                    self._event = torch.cuda.Event()
                    self._event.record(stream)
        except Exception as error:
            self._error = error

    def _send(self) -> None:
        local, rank = self._moe.layer.num_local_experts, self._moe.layer.rank
        for target, source, room in self._moves():
            if source >= 0 and source // local == rank:
                for t, memory in self._rooms_of_tensors():
                    self._heap.put(memory[room], t[source % local], target // local)

    def _receive(self) -> None:
        local, rank = self._moe.layer.num_local_experts, self._moe.layer.rank
        for target, source, room in self._moves():
            if target // local == rank:
                for t, memory in self._rooms_of_tensors():
                    with writing([t]):
                        if source < 0:
                            t[target % local].zero_()
                        else:
                            t[target % local].copy_(memory[room])

    def _moves(self) -> Iterator[tuple[int, int, int]]:
        """Yield (target, source, number of its room at the target's rank) of the present round."""
        local, used = self._moe.layer.num_local_experts, [0] * self._moe.layer.world_size
        for target, source in self._rounds[self._next].moves:
            yield target, source, used[target // local]
            used[target // local] += 1

    def _rooms_of_tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tensor of this rank's experts, the rooms for its rows)."""
        assert self._rooms is not None
        if not self._rooms.fits(self._moe, 1):
            raise RuntimeError("the experts have got or lost parameters or buffers since move_experts: the "
                               "move has ended")
        return zip((as_bytes(t.detach()) for t in tensors(self._moe)), self._rooms.memory)

    @property
    def _heap(self) -> SymmetricHeap:
        assert self._rooms is not None
        return self._rooms.heap

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module is not on its way."""

    def _end(self) -> None:
        self.is_done = True
        if self._moe._move is self:
            self._moe._move = None


class Rooms:
    """Symmetric memory for the experts that a rank gets in a round.

    Attributes:
        at_once: For how many.
        memory: For each tensor of experts: [at_once, ..].
    """

    def __init__(self, moe: EPMoE, world: World, at_once: int) -> None:
        of_experts = [as_bytes(t.detach()) for t in tensors(moe)]
        num_bytes = sum(at_once * t[0].numel() * t.element_size() + _ALIGNMENT for t in of_experts)
        self.at_once = at_once
        self.heap = SymmetricHeap(world, num_bytes, moe.layer.device)
        try:
            self.memory = [self.heap.malloc_symmetric((at_once, *t.shape[1:]), t.dtype, _ALIGNMENT)
                           for t in of_experts]
        except BaseException:
            with contextlib.suppress(Exception):
                self.heap.close()
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a module makes its own."""

    def fits(self, moe: EPMoE, at_once: int) -> bool:
        """Whether a move of a module fits, which may have got other tensors since."""
        return at_once <= self.at_once and [(t.shape[1:], t.dtype) for t in self.memory] == [
            (t.shape[1:], t.dtype) for t in map(as_bytes, tensors(moe))]
