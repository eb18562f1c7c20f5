"""Fixed sizes between nodes (rail_capacity): a plan without a host read, and how its errors reach all ranks.

Every rank of a rail has the indices of the whole rail.  So all of them compute on the device, and alike, how
many tokens each node sends to each other one, and the first index that is out of range.  If a rail has an
error, each of its ranks gives the plan of its node an index that is out of range: _code, which says what is
wrong.  The plan is then void for all ranks of the node, and every node has a rank of each rail.

Two errors concern one node alone: more rows than `capacity`, and a rank that cannot make the plan.  So after
the plan of the node the rail exchanges whether it is void.  Where that of another node is, this rank writes a
status to its own plan, as the other ranks of its node do, and the operations that use the plan are void.

The host learns of it without waiting in the call.  On the CPU the exchange is over when it returns.  On CUDA
the result goes to a word in pinned memory.  In the next validation, which all ranks have in common, the host
waits until the plan of that call has written this word, and all ranks raise the same error, or none does.
"""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import _C
from ...errors import EpError, EpIndexError, EpOverflow, PeerError
from ..layout import EPLayout
from .plan import NodesLayout, Segments

if TYPE_CHECKING:
    from .layer import InternodeLayer

_LOW_BITS = 26  # of a code: the value of an index, or a node
_BIAS = 1 << (_LOW_BITS - 1)
_MOST = _BIAS - 1  # the largest absolute value of an index that a code can have
_WRONG_INDEX, _TOO_MANY = range(2)
_FAILED = 1  # the status of a node where this rank could not make the plan
_OF_ALL = 0, _C.EOVERFLOW, _C.EINDEX  # any other status of a plan: a rank could not make it


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class FixedLayout(NodesLayout):
    """The plan of a dispatch with fixed sizes.

    The A tokens of a rank for its node are all its own T tokens, then rail_capacity places for each other
    node, in node order.  Unused places have the indices -1.  Places are in the order of tokens, so rows are
    in the same order as with exact sizes.

    send_tokens and recv_tokens read the device on each access.
    """

    _counts: Tensor  # [2, N] on the device: the tokens sent and received

    def __init__(self, layer: InternodeLayer, num_tokens: int, buffer: int, rail_rows: int) -> None:
        super().__init__(layer, num_tokens, buffer, [], [])
        rows = [rail_rows] * layer.num_nodes
        rows[layer.node] = num_tokens
        self._rows = rows  # for each node and from each node
        self._num_places = sum(rows) - num_tokens

    @property
    def num_own(self) -> int:
        """All tokens of this rank."""
        return self.num_tokens

    @property
    def send_tokens(self) -> list[int]:
        """N numbers.  Reads the device."""
        sent: list[int] = self._counts[0].tolist()
        return sent

    @property
    def recv_tokens(self) -> list[int]:
        """N numbers.  Reads the device."""
        received: list[int] = self._counts[1].tolist()
        return received

    def splits(self) -> tuple[list[int], list[int]]:
        rows = list(self._rows)
        rows[self.layer.node] = 0
        return rows, rows

    def sent_segments(self) -> Segments:
        return self.segments(self._rows)

    def pick(self, t: Tensor) -> tuple[Tensor, Tensor]:
        # An unused place has the number T: it gets any row, which nothing reads.
        if len(t) == 0:
            return t, t.new_zeros(self._num_places, t.shape[1])
        return t, t[self.send_idx[self.num_tokens :].clamp(max=len(t) - 1)]

    def finish_sums(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return total[: self.num_tokens].to(dtype, copy=True)  # not a view of the larger tensor

    def __repr__(self) -> str:
        return (f"NodesLayout(num_tokens={self.num_tokens}, rail_capacity={self.layer.rail_capacity}, "
                f"buffer={self.buffer})")


def make_layout(layer: InternodeLayer, num_tokens: int, buffer: int, everyone: Tensor,
                rail_rows: int) -> FixedLayout:
    """Return the layout of a call.  Everything is computed on the device.

    everyone: [N, T_max, K] int32, the indices of the rail's tokens, -1 after the last token.
    rail_rows: the places for the tokens of each other node.
    """
    node, num_nodes = layer.node, layer.num_nodes
    num = layer.num_experts // num_nodes
    is_kept = (everyone >= 0) & (everyone < layer.num_experts)
    owner = torch.where(is_kept, everyone // num, num_nodes).long()
    goes_to = owner.new_zeros(*owner.shape[:2], num_nodes + 1, dtype=torch.bool)
    goes_to = goes_to.scatter_(2, owner, True)[:, :, :num_nodes]  # [source, token, node]
    counts = goes_to.sum(1)
    layout = FixedLayout(layer, num_tokens, buffer, rail_rows)
    layout._counts = torch.stack([counts[node], counts[:, node]])
    sent = _others(_places(goes_to[node, :num_tokens].t(), rail_rows, num_tokens), node)
    layout.send_idx = torch.cat([torch.arange(num_tokens, device=layer.device), sent.flatten()])
    layout.owner = torch.cat([owner[node, :num_tokens], owner.new_full((1, owner.shape[2]), num_nodes)])
    local = torch.where(owner == node, everyone - node * num, -1).long()
    arrived = _places(goes_to[:, :, node], rail_rows, local.shape[1])
    padded = torch.cat([local, local.new_full((num_nodes, 1, local.shape[2]), -1)], 1)
    places = padded.gather(1, arrived[:, :, None].expand(-1, -1, local.shape[2]))
    layout.indices = torch.cat([local[node, :num_tokens], _others(places, node).flatten(0, 1)])
    code = _code(layer, everyone, counts, rail_rows)
    last = layout.indices[-1:, :1]  # there is always a place, also without tokens
    last.copy_(torch.where(code == 0, last, code))
    return layout


def _others(t: Tensor, node: int) -> Tensor:
    """Return t [N, ..] without that of a node.  A list as an index would be copied to the device."""
    return torch.cat([t[:node], t[node + 1 :]])


def _places(is_member: Tensor, num: int, unused: int) -> Tensor:
    """Return [N, num] int64: for each line of is_member [N, T] the first members, then `unused`."""
    place = torch.where(is_member, is_member.cumsum(1) - 1, num).clamp(max=num)
    tokens = torch.arange(is_member.shape[1], device=is_member.device).expand_as(place)
    return place.new_full((len(place), num + 1), unused).scatter_(1, place, tokens)[:, :num]


def _code(layer: InternodeLayer, everyone: Tensor, counts: Tensor, rail_rows: int) -> Tensor:
    """Return a number on the device that all ranks of the rail compute alike: 0, or what is wrong."""
    num_nodes = layer.num_nodes
    flat = everyone.flatten().long()
    is_bad = (flat < -1) | (flat > layer.num_experts)
    position = torch.where(is_bad, torch.arange(len(flat), device=flat.device), len(flat)).amin()
    value = flat.gather(0, position.clamp(max=len(flat) - 1)[None])[0].clamp(-_MOST, _MOST)
    node = torch.arange(num_nodes, device=flat.device)
    most = torch.where(node[:, None] == node, 0, counts).amax(1)
    worst = (most * num_nodes + (num_nodes - 1 - node)).amax()  # the first node with the largest number
    most, source = worst // num_nodes, num_nodes - 1 - worst % num_nodes
    too_many = torch.where(most > rail_rows, _pack(most, source, _TOO_MANY), 0)
    return torch.where(position < len(flat), _pack(position, value + _BIAS, _WRONG_INDEX), too_many)


def _pack(high: Tensor, low: Tensor, kind: int) -> Tensor:
    return -(2 + ((high << _LOW_BITS | low) << 1 | kind))


def _unpack(code: int) -> tuple[int, int, int]:
    rest = -code - 2
    return rest >> (_LOW_BITS + 1), rest >> 1 & ((1 << _LOW_BITS) - 1), rest & 1


def explain(layer: InternodeLayer, error: BaseException | None, node: int, has_failed: bool) -> EpError:
    """Return the error of all ranks for that of the plan of this node.

    error: what the team raised, or None; node: the first node whose plan is void; has_failed: because a rank
    could not make it.
    """
    text = str(error)
    found = re.match(r"rank (\d+): expert index (-\d+) of ", text)
    if isinstance(error, EpIndexError):
        return _of_rail(layer, int(found[1]), *_unpack(int(found[2]))) if found else error
    if isinstance(error, EpOverflow):
        first = layer.node * layer.world.local_size
        return EpOverflow(re.sub(r"^rank (\d+)", lambda m: f"rank {first + int(m[1])}", text))
    if has_failed:
        return PeerError(f"a rank of node {node} could not take part in plan. See the error that it raised.")
    return EpOverflow(f"a rank of node {node} would receive more rows than its capacity, {layer.capacity}. "
                      f"Increase capacity or balance the routing.")


def _of_rail(layer: InternodeLayer, local: int, high: int, low: int, kind: int) -> EpError:
    """Return the error that a code says, which is of a rail, by the local number of its ranks."""
    num_local, topk = layer.world.local_size, layer.topk * layer._copies
    if kind == _TOO_MANY:
        return EpOverflow(f"rank {low * num_local + local} sends {high} tokens to another node; its "
                          f"rail_capacity is {layer.rail_capacity}. Increase rail_capacity or balance the "
                          f"routing.")
    node, at = divmod(high, layer._most * topk)
    value = low - _BIAS
    beyond = "" if abs(value) < _MOST else "at least " if value > 0 else "at most "
    return EpIndexError(f"rank {node * num_local + local}: expert index {beyond}{value} of token "
                        f"{at // topk}, choice {at % topk} is outside [-1, {layer.num_experts}]. Use -1 to "
                        f"drop a choice.")


def word_of(of_nodes: Tensor) -> Tensor:
    """Return [1] on the device: 0, or 1 + the first node whose plan is void, negative where it has failed.

    of_nodes: [N], the status of the plan of each node.
    """
    num = len(of_nodes)
    node = torch.arange(num, device=of_nodes.device)
    first = torch.where(of_nodes != 0, node, num).amin(0, keepdim=True)
    status = of_nodes.gather(0, first.clamp(max=num - 1))
    has_failed = (status != 0) & (status != _C.EOVERFLOW) & (status != _C.EINDEX)
    return torch.where(has_failed, -1 - first, torch.where(status == 0, 0, 1 + first))


class FixedPlans:
    """Makes the plans of a layer with rail_capacity, and raises their errors on all ranks.

    It takes the place of the team layer's plans.
    """

    def __init__(self, layer: InternodeLayer, rail_capacity: int) -> None:
        self.layer = layer
        self.rail_rows = min(rail_capacity, layer._most)  # a rank has no more tokens
        self.owes_result = False  # in _apply: whether the rail still waits for the result of this rank's plan
        device = layer.device
        self._defers = device.type == "cuda"  # whether the host learns later that a plan is void
        self._event: torch.cuda.Event | None = None  # after the plan whose result no validation has looked at
        self._was_captured = False
        self._latest: weakref.ref[FixedLayout] | None = None
        # word_of the first plan that is void since the last error was raised
        self._word = torch.zeros(1, dtype=torch.int32, device=device)
        self._host_word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=self._defers)
        team = layer.team_layer
        self._plan_of_team = team._make_layout
        team.plans_apart = True
        team._make_layout = self._plan_on_all  # type: ignore[method-assign]

    def make_layout(self, num_tokens: int, buffer: int, everyone: Tensor) -> FixedLayout:
        """Return the layout of a call, as the function of this name."""
        layout = make_layout(self.layer, num_tokens, buffer, everyone, self.rail_rows)
        self._latest = weakref.ref(layout)
        return layout

    def _plan_on_all(self, exp_indices: Tensor, scatter: Tensor | None, buffer: int) -> EPLayout:
        """Make the plan of the node and tell the rail whether it is void, without a host read on CUDA."""
        error: Exception | None = None
        layout = None
        try:
            layout = self._plan_of_team(exp_indices, scatter, buffer)
        except Exception as e:
            if self.layer.nodes._has_ended():
                raise
            error = e
        is_wrong = isinstance(error, (EpIndexError, EpOverflow))
        of_nodes = self._exchange_result(layout, _C.EOVERFLOW if is_wrong else _FAILED)
        if not self._defers and (error is None or is_wrong):
            for node, status in enumerate(of_nodes.tolist()):
                if status:
                    raise self._of_all(error, node, status not in _OF_ALL)
        try:
            if layout is None:
                assert error is not None
                raise error
        finally:
            del error
        return layout

    def _exchange_result(self, layout: EPLayout | None, status: int) -> Tensor:
        """Tell the rail the status of the plan of this node, and return [N], that of each node.

        status: where the layout is None.
        """
        of_nodes = torch.empty(self.layer.num_nodes, dtype=torch.int32, device=self.layer.device)
        mine = torch.full_like(of_nodes, status)
        if layout is not None:
            mine.copy_(layout.plan[_C.HEAD_STATUS])
        self.layer.nodes._exchange_rows(of_nodes, mine)
        self.owes_result = False
        if self._defers:
            self._keep_result(layout, of_nodes)
        return of_nodes

    def pay_result(self) -> None:
        """After an error of this rank in _apply, tell the rail that this rank has made no plan.

        Without it the other ranks of the rail would wait in _exchange_result, where this rank never comes.
        """
        if self.owes_result and not self.layer.nodes._has_ended():
            self._exchange_result(None, _FAILED)

    def _of_all(self, error: BaseException | None, node: int, has_failed: bool) -> EpError:
        """Return the error that all ranks of all nodes raise.  It does not end the nodes."""
        explained: Any = explain(self.layer, error, node, has_failed)
        explained._is_of_all = not has_failed
        return explained

    def _keep_result(self, layout: EPLayout | None, of_nodes: Tensor) -> None:
        """Make the plan void where that of another node is, and bring the result to the host's memory."""
        word = word_of(of_nodes)
        if layout is not None:
            own = layout.plan.narrow(0, _C.HEAD_STATUS, 1)
            own.copy_(torch.where((own == 0) & (word != 0), _C.EOVERFLOW, own))
        self._word.copy_(torch.where(self._word == 0, word, self._word))
        self._host_word.copy_(self._word, non_blocking=True)
        if is_capturing(self.layer.device):
            self._was_captured = True
        else:
            self._event = self._record()

    def _record(self) -> torch.cuda.Event:
        """Return an event after all that the stream has to do now."""
        return torch.cuda.current_stream(self.layer.device).record_event()

    def settle(self, error: BaseException | None = None, now: bool = False) -> None:
        """Raise the error of the latest plans, if one has failed: on all ranks, in the same validation.

        error: what this rank raises anyway; now: wait for the stream, not only for the latest plan.  After a
        capture it always waits for the stream, because only the stream knows of replays.
        """
        layer = self.layer
        if not self._defers or is_capturing(layer.device):
            return
        event, self._event = self._event, None
        if now or self._was_captured:
            event = self._record()
        if event is None:
            return
        try:
            assert layer.nodes.rail is not None
            layer.nodes.rail.wait_for(event)
        except EpError as e:
            raise layer.nodes._end_of_rail(e) from e
        word = int(self._host_word)
        if word == 0:
            return
        self._word.zero_()
        layout = None if self._latest is None else self._latest()
        if layout is not None:
            layout.is_void = True
        for _ in range(layer._num_buffers):  # each may have an error, after replays
            try:
                layer.team_layer.synchronize()
                break
            except EpError as e:
                if layer.nodes._has_ended():
                    raise
                error = e if error is None or type(error) is PeerError else error
        self._host_word.zero_()
        if error is None or isinstance(error, EpError):
            error = self._of_all(error, abs(word) - 1, word < 0)
        try:
            raise error
        finally:
            del error  # see CollectiveLayer._propagate_now
