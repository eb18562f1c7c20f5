"""move_experts of EPMoE: the experts go to the places of another map while the module serves calls.

A place is a physical expert.  A move has rounds (rounds_of).  In a round some places, the targets, get other
weights.  Each logical expert keeps a place that is no target, so the module can always serve all of them.
Steps of a round:

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
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import _C
from ..a2a.base import together
from ..comm.device import integer, status_of
from ..comm.heap import SymmetricHeap
from ..comm.world import World
from ..errors import EpMismatch
from ..torch_modes import mark_written, writing
from .placement import ALIGNMENT, ExpertMap, agree, check, route_by, world_of
from .shards import as_bytes, tensors

if TYPE_CHECKING:
    from .module import EPMoE

_STATE = struct.Struct("<IIB")  # number of the move, its steps so far, whether a rank's copies are done


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
    num_of = Counter(e for e in now if e >= 0)  # places of each expert
    num_final = Counter(e for e, goal in zip(now, wanted) if e == goal)  # those that stay to the end
    lent = -1  # a place that holds an expert for a while, so that this expert's own place is free
    while now != list(wanted):
        left, room = num_of.copy(), [at_once] * (len(now) // num_local)
        goals: dict[int, int] = {}
        for p, e in enumerate(now):
            # The place that was lent may go when its expert has reached a place of its own.
            if (e != wanted[p] and room[p // num_local]
                    and (e < 0 or (num_final[e] > 0 if p == lent else left[e] > 1))):
                goals[p] = wanted[p]
                room[p // num_local] -= 1
                left[e] -= 1
        if not goals:  # each expert that must move has one place only
            lent = next((p for p, e in enumerate(now) if e < 0 or num_of[e] > 1), -1)
            if lent < 0:
                raise ValueError("move_experts: the experts cannot change places while the module works, "
                                 "because no physical expert is spare: create the module with a larger "
                                 "num_physical, or use set_expert_map, which stops the module")
            goals = {lent: now[next(p for p, e in enumerate(now) if e != wanted[p])]}
        before = [-1 if p in goals else e for p, e in enumerate(now)]
        places: dict[int, list[int]] = {}
        for p, e in enumerate(before):
            places.setdefault(e, []).append(p)
        moves = []
        for p, e in goals.items():
            sources = places[e] if e >= 0 else []
            near = [q for q in sources if q // num_local == p // num_local] or sources
            moves.append((p, near[p % len(near)] if near else -1))
        for p, e in goals.items():
            num_of[now[p]] -= 1
            num_of[e] += 1
            num_final[now[p]] -= now[p] == wanted[p]
            num_final[e] += e == wanted[p]
            now[p] = e
        rounds.append(Round(moves, before, list(now)))
    return rounds


class ExpertMove:
    """The experts of an EPMoE on their way to the places of another map; EPMoE.move_experts begins it.

    Attributes:
        is_done: Whether the move has ended.

    Examples:
        See EPMoE.move_experts.
    """

    is_done: bool

    def __init__(self, moe: EPMoE, rounds: list[Round], rooms: Rooms | None, number: int) -> None:
        self.is_done = not rounds
        self._moe, self._rounds, self._rooms = moe, rounds, rooms
        self._number, self._num_steps = number, 0  # equal on all ranks
        self._next = 0  # the round that begins next
        # what the next _begin_round uses; made while copies are on their way
        self._map = self._next_map() if rounds else None
        self._step: Callable[[], Callable[[], Any]] = self._begin_round
        self._error: Exception | None = None  # that this rank had when it enqueued the copies of this step
        self._tensors = tensors(moe)  # as each advance finds them
        self._seen = self._versions()
        device, is_cuda = moe.layer.device, moe.layer.device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._event = torch.cuda.Event() if is_cuda else None  # after the copies of this step

    def advance(self) -> bool:
        """Do what can be done without waiting for copies.  Collective.

        All ranks call it between the same two calls of the module, on the stream of these calls.  A round of
        the move takes at least two calls.  The host exchanges a few bytes with the other ranks.

        Returns:
            Whether the module has the map.  After that, advance does nothing, and is not collective.

        Raises:
            RuntimeError: On this rank, during the capture of a CUDA graph, and after the module's finalize.
                Also where its experts were written since the last call; the move has ended then.
            PeerError: On the other ranks, when one rank raises in its copies, or has written its experts.
                The move has ended then, and the module works on without the places that were being written.
            EpMismatch: On all ranks, when they go on with different moves.  Nothing was done.
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
                try:
                    self._step = self._step()
                except BaseException as error:
                    self._tell_others(error)  # in their next advance
                    raise
                self._num_steps += 1
        except EpMismatch:  # nothing was done
            raise
        except BaseException:
            if self._stream is not None:
                self._stream.synchronize()  # nothing of this move may arrive during the next one
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
        try:
            if self._error is not None:
                raise self._error
            self._tensors = tensors(self._moe)
            if self._versions() != self._seen:
                raise RuntimeError("the parameters or buffers of the experts were written or exchanged since "
                                   "the last advance: the move has ended, because it may have copied old "
                                   "ones")
            is_done = self._event is None or self._event.query()
        except Exception as error:
            self._tell_others(error)
            raise
        mine = _STATE.pack(self._number, self._num_steps, is_done)
        states = [_STATE.unpack(its) for its in cast(World, self._moe.layer.world).exchange(mine)]
        for rank, its in enumerate(states):
            if its[:2] != states[0][:2]:
                raise EpMismatch(f"ranks disagree: rank {rank} calls advance() of another move than rank 0, "
                                 f"or has called it more or less often: call those of all modules in the "
                                 f"same order")
        return all(done for *_, done in states)

    def _tell_others(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):
            _C.world_propagate_error(cast(World, self._moe.layer.world)._c, status_of(error))

    def _versions(self) -> list[tuple[int, int]]:
        """Return the address of each tensor of experts, and how often torch has seen it written."""
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in self._tensors]

    def _begin_round(self) -> Callable[[], Any]:
        """Use the map after the round before, or end; then steps 1 and 2 of the next round."""
        if self._stream is not None:  # it has finished: this tells tools that look for races
            torch.cuda.current_stream(self._moe.layer.device).wait_stream(self._stream)
        # The copies counted as writes when they were enqueued.  A call since may have made another form of
        # the weights, from what was there before they arrived.
        mark_written([t for t in self._tensors if not t.is_inference()])
        assert self._map is not None
        route_by(self._moe, *self._map)
        if self._next == len(self._rounds):
            self._end()
        else:
            self._enqueue(self._send)
        return self._begin_copies

    def _begin_copies(self) -> Callable[[], Any]:
        """Step 3."""
        self._enqueue(self._receive)
        self._next += 1
        self._map = self._next_map()
        return self._begin_round

    def _next_map(self) -> tuple[ExpertMap, list[int]]:
        """Return the map during the next round, or after the last one, also as a list."""
        is_over = self._next == len(self._rounds)
        holds = self._rounds[-1].after if is_over else self._rounds[self._next].before
        return ExpertMap(torch.tensor(holds, dtype=torch.int64, device="cpu"), self._moe.num_experts), holds

    def _enqueue(self, copy: Callable[[], None]) -> None:
        """Run copy() on the stream of the copies, after what the current stream has.

        The next advance raises its error, on all ranks.
        """
        try:
            if self._stream is None or self._event is None:
                copy()
            else:
                self._stream.wait_stream(torch.cuda.current_stream(self._moe.layer.device))
                with torch.cuda.stream(self._stream):
                    copy()
                self._event.record(self._stream)
                for t in self._tensors:
                    t.record_stream(self._stream)
        except Exception as error:
            self._error = error
        self._seen = self._versions()

    def _send(self) -> None:
        local, rank = self._moe.layer.num_local_experts, self._moe.layer.rank
        rooms = self._rooms_of_tensors()
        for target, source, room in self._moves():
            if source >= 0 and source // local == rank:
                for t, memory in rooms:
                    self._heap.put(memory[room], t[source % local], target // local)

    def _receive(self) -> None:
        local, rank = self._moe.layer.num_local_experts, self._moe.layer.rank
        rooms = self._rooms_of_tensors()
        for target, source, room in self._moves():
            if target // local == rank:
                for t, memory in rooms:
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

    def _rooms_of_tensors(self) -> list[tuple[Tensor, Tensor]]:
        """Return (tensor of this rank's experts, the rooms for its rows) of all tensors."""
        assert self._rooms is not None
        return [(as_bytes(t.detach()), memory) for t, memory in zip(self._tensors, self._rooms.memory)]

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
        num_bytes = sum(at_once * t[0].numel() * t.element_size() + ALIGNMENT for t in of_experts)
        self.at_once = at_once
        self.heap = SymmetricHeap(world, num_bytes, moe.layer.device)
        try:
            self.memory = [self.heap.malloc_symmetric((at_once, *t.shape[1:]), t.dtype, ALIGNMENT)
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


def move_experts(moe: EPMoE, expert_map: ExpertMap | None, at_once: int) -> ExpertMove:
    """Begin to move the experts of a module to the places of a map, while it works.  Collective."""
    world = world_of(moe)
    with together(world):
        if integer("at_once", at_once) < 1:
            raise ValueError(f"move_experts: at_once {at_once}: must be at least 1")
        at_once = min(at_once, moe.layer.num_local_experts)
        expert_map = check(moe, expert_map)
        holds = expert_map.physical_to_logical_map.tolist()
        rounds = rounds_of(moe._holds, holds, moe.layer.num_local_experts, at_once)
    world._num_moves += 1
    agree(moe, world, holds, at_once, world._num_moves)
    if rounds and not (moe._rooms is not None and moe._rooms.fits(moe, at_once)):
        if moe._rooms is not None:
            moe._rooms.heap.close()
            moe._rooms = None
        moe._rooms = Rooms(moe, world, at_once)
    with together(world):
        move = ExpertMove(moe, rounds, moe._rooms, world._num_moves)
    moe._move = None if move.is_done else move
    return move
