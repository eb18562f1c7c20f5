"""ExpertMap: which physical experts hold each logical expert; balance_experts makes one for a routing."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _C
from ..a2a.base import together
from ..comm.heap import SymmetricHeap
from ..comm.world import World
from ..errors import EpIndexError, EpMismatch
from ..torch_modes import is_plain, is_watched, writing
from .lora import check_unmerged
from .shards import as_bytes, is_by_expert, is_dtensor, named_tensors, roots, sharing, tensors

if TYPE_CHECKING:
    from ..a2a.layer import EPAll2AllLayer
    from ..a2a.low_latency import LowLatencyAll2All
    from .module import EPMoE

__all__ = ["ExpertMap", "balance_experts"]
ALIGNMENT = 256  # of the weights in symmetric memory
_WRONG_INDEX = re.compile(r"rank (\d+): .*expert index.* of token (\d+), choice (\d+) is outside")


class ExpertMap:
    """Which expert each place for an expert holds, so that a busy expert can have several places.

    A router chooses among E logical experts.  The ranks have P places for weights, P/W each: the physical
    experts.  Each holds a logical expert, or nothing.  A logical expert that several of them hold has
    replicas, which share its tokens.

    EPMoE takes a map in set_expert_map.  The other layers move tokens to physical experts: give them P as
    their number of experts, and physical(topk_idx, rank) as the indices.

    Args:
        physical_to_logical_map: [P] of an integer dtype: the logical expert of each physical one, or -1:
            none.  DeepSeek's EPLB returns it under this name.
        num_experts: E, or None: the largest logical expert and one.

    Attributes:
        num_experts: E.
        num_physical: P.
        physical_to_logical_map: [P] int64.
        logical_to_physical_map: [E, P - E + 1] int64: the replicas of each logical expert, then -1.
        logical_count: [E] int64: how many replicas each has.

    Raises:
        ValueError: For a wrong shape, an expert out of range, and a logical expert without a physical one.
        TypeError: For a wrong type or dtype.

    Examples:
        Expert 0 has two replicas.

        >>> import epmoe
        >>> import torch
        >>> m = epmoe.ExpertMap(torch.tensor([0, 1, 2, 0]))
        >>> m
        ExpertMap(3 experts, 4 physical, at most 2 replicas)
        >>> m.logical_to_physical_map.tolist(), m.logical_count.tolist()
        ([[0, 3], [1, -1], [2, -1]], [2, 1, 1])
    """

    num_experts: int
    num_physical: int
    physical_to_logical_map: Tensor
    logical_to_physical_map: Tensor
    logical_count: Tensor
    # [E + 4, 1 + P - E + 1], for indices -2 to E + 1: a wrong one, a dropped choice, the experts, a dropped
    # choice, a wrong one.  See csrc/protocol/expert_map.h.
    _table: Tensor
    _memory: Tensor  # of all four tensors

    def __init__(self, physical_to_logical_map: Tensor, num_experts: int | None = None) -> None:
        p2l = physical_to_logical_map
        if not isinstance(p2l, torch.Tensor) or p2l.dtype.is_floating_point or p2l.dtype == torch.bool:
            got = p2l.dtype if isinstance(p2l, torch.Tensor) else type(p2l).__name__
            raise TypeError(f"physical_to_logical_map: wanted a tensor of integers, got {got}")
        if p2l.dim() != 1:
            raise ValueError(f"physical_to_logical_map: wanted shape [P], got {list(p2l.shape)}: make a map "
                             f"for each layer")
        logical = p2l.tolist()
        num_experts = max(logical, default=-1) + 1 if num_experts is None else int(num_experts)
        wrong = next((p for p, e in enumerate(logical) if not -1 <= e < num_experts), None)
        if wrong is not None:
            raise ValueError(f"physical_to_logical_map: physical expert {wrong} holds expert "
                             f"{logical[wrong]}: must be -1 to {num_experts - 1}")
        held = set(logical)
        missing = next((e for e in range(num_experts) if e not in held), None)
        if missing is not None or not num_experts:
            raise ValueError(f"physical_to_logical_map: no physical expert holds "
                             f"{'any expert' if missing is None else f'expert {missing}'}")
        num_bytes = sum(math.prod(shape) * dtype.itemsize
                        for _, dtype, shape in _layout(num_experts, len(logical)))
        self._set_memory(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"), num_experts, len(logical))
        self.physical_to_logical_map.copy_(p2l)
        _C.fill_expert_map(self.physical_to_logical_map, self.logical_to_physical_map, self.logical_count,
                           self._table)
        if p2l.device.type != "cpu":
            self._set_memory(self._memory.to(p2l.device), num_experts, len(logical))

    def _set_memory(self, memory: Tensor, num_experts: int, num_physical: int) -> None:
        """Let the tensors be views of memory, [bytes] uint8.  So one copy moves a map to another device."""
        self.num_experts, self.num_physical, self._memory = num_experts, num_physical, memory
        at = 0
        for name, dtype, shape in _layout(num_experts, num_physical):
            begin, at = at, at + math.prod(shape) * dtype.itemsize
            setattr(self, name, memory[begin:at].view(dtype).view(shape))

    def __getstate__(self) -> tuple[Tensor, int, int]:
        return self._memory, self.num_experts, self.num_physical

    def __setstate__(self, state: tuple[Tensor, int, int]) -> None:
        self._set_memory(*state)  # pickle does not know that tensors share memory

    @classmethod
    def home(cls, num_experts: int, num_ranks: int, num_physical: int | None = None) -> ExpertMap:
        """Return the map without replicas, in which the experts are in order, and as many on each rank.

        With n = E/W rounded up, expert e is on rank e // n.  So the last rank with experts may have fewer,
        and ranks after it none.  A rank's physical experts that are left are empty.

        Args:
            num_experts: E.
            num_ranks: W.
            num_physical: P, a multiple of W; None: n * W.

        Returns:
            An ExpertMap on the CPU.

        Raises:
            ValueError: For a P that is too small or not a multiple of W.

        Examples:
            >>> import epmoe
            >>> epmoe.ExpertMap.home(5, num_ranks=2).physical_to_logical_map.tolist()
            [0, 1, 2, 3, 4, -1]
            >>> epmoe.ExpertMap.home(5, num_ranks=2, num_physical=8).physical_to_logical_map.tolist()
            [0, 1, 2, -1, 3, 4, -1, -1]
        """
        num_physical = check_num_physical(num_experts, num_ranks, num_physical)
        of_rank = -(-num_experts // num_ranks)
        held: list[int] = []
        for first in range(0, num_ranks * of_rank, of_rank):
            experts = list(range(min(first, num_experts), min(first + of_rank, num_experts)))
            held += experts + [-1] * (num_physical // num_ranks - len(experts))
        return cls(torch.tensor(held, device="cpu", dtype=torch.int64), num_experts)

    def to(self, device: torch.device | str) -> ExpertMap:
        """Return a copy of the map on a device.

        Args:
            device: A torch.device or its name.

        Returns:
            An ExpertMap.

        Examples:
            >>> import epmoe
            >>> epmoe.ExpertMap.home(2, 1).to("cpu")
            ExpertMap(2 experts, 2 physical, at most 1 replicas)
        """
        copy = object.__new__(type(self))
        copy._set_memory(self._memory.to(device, copy=True), self.num_experts, self.num_physical)
        return copy

    def physical(self, topk_idx: Tensor, rank: int = 0) -> Tensor:
        """Return the physical experts of a rank's choices.

        Of the n replicas of an expert, token t of rank r takes number (t + r) mod n, in the order of
        logical_to_physical_map.  So the same call gives the same result, the tokens of a rank are spread
        evenly, and so are single tokens of several ranks.  The host reads nothing.

        Args:
            topk_idx: [T, K] int32 or int64, on the device of the map.  -1 and E mean dropped.
            rank: r.

        Returns:
            [T, K] int32.  A dropped choice is -1.  An index below -1 becomes -2, and one above E becomes
                P + 1, which the layers refuse.

        Raises:
            ValueError: For a wrong shape or device.
            TypeError: For a wrong dtype.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> m = epmoe.ExpertMap(torch.tensor([0, 1, 2, 0]))
            >>> m.physical(torch.tensor([[0, 1], [0, 2], [0, -1]])).tolist()
            [[0, 1], [3, 2], [0, -1]]
        """
        if topk_idx.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"topk_idx: wanted int32 or int64, got {topk_idx.dtype}")
        if topk_idx.dim() != 2:
            raise ValueError(f"topk_idx: wanted shape [T, K], got {list(topk_idx.shape)}")
        if topk_idx.device != self._table.device:
            raise ValueError(f"topk_idx is on {topk_idx.device}, but the map is on {self._table.device}: "
                             f"use expert_map.to({str(topk_idx.device)!r})")
        if type(topk_idx) is Tensor and is_plain() and not is_watched() and (
                topk_idx.device.type == "cpu" or topk_idx.is_cuda and _C.HAS_CUDA):
            out = torch.empty(topk_idx.shape, dtype=torch.int32, device=topk_idx.device)
            _C.map_choices(topk_idx.contiguous(), self._table, out, rank)
            return out
        row = topk_idx.clamp(-2, self.num_experts + 1) + 2
        token = torch.arange(rank, rank + topk_idx.shape[0], device=topk_idx.device)[:, None]
        return self._table[row, 1 + token % self._table[row, 0]]

    def logical_counts(self, counts: Tensor) -> Tensor:
        """Return the counts of logical experts: of each, the sum over its replicas.  The host reads nothing.

        Args:
            counts: [.., P] of an integer dtype, on the device of the map, for example EPLayout.counts, which
                has the choices of all ranks.

        Returns:
            [.., E] of the same dtype.

        Raises:
            ValueError: For a wrong shape or device.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> m = epmoe.ExpertMap(torch.tensor([0, 1, 2, 0]))
            >>> m.logical_counts(torch.tensor([5, 1, 2, 4])).tolist()
            [9, 1, 2]
        """
        held = self.physical_to_logical_map
        if counts.dim() == 0 or counts.shape[-1] != self.num_physical or counts.device != held.device:
            raise ValueError(f"counts: wanted shape [.., {self.num_physical}] on {held.device}, got "
                             f"{list(counts.shape)} on {counts.device}")
        totals = counts.new_zeros(*counts.shape[:-1], self.num_experts)
        return totals.index_add_(-1, held.clamp_min(0), counts * (held >= 0))

    def _copy_(self, other: ExpertMap) -> None:
        """Take over a map of the same sizes, in place, for captured CUDA graphs.  The host does not wait."""
        source = other._memory
        if self._memory.is_cuda and not source.is_cuda:
            source = source.pin_memory()
        with writing([self._memory]):
            self._memory.copy_(source, non_blocking=True)

    def __repr__(self) -> str:
        return (f"ExpertMap({self.num_experts} experts, {self.num_physical} physical, at most "
                f"{int(self.logical_count.max())} replicas)")


def _layout(num_experts: int, num_physical: int) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    """Return (name, dtype, shape) of the tensors of an ExpertMap."""
    most = num_physical - num_experts + 1
    return (("physical_to_logical_map", torch.int64, (num_physical,)),
            ("logical_to_physical_map", torch.int64, (num_experts, most)),
            ("logical_count", torch.int64, (num_experts,)),
            ("_table", torch.int32, (num_experts + 4, 1 + most)))


class naming_experts:
    """A block in which an EpIndexError gets the numbers that the caller of an EPMoE has passed.

    The layer names a physical expert, and without token saving a choice as a token.  layer: the layer of the
    call.  topk_idx: [T, K], as passed.
    """

    __slots__ = ("moe", "layer", "topk_idx")

    def __init__(self, moe: EPMoE, layer: EPAll2AllLayer | LowLatencyAll2All, topk_idx: Tensor) -> None:
        self.moe, self.layer, self.topk_idx = moe, layer, topk_idx

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        found = _WRONG_INDEX.match(str(error)) if isinstance(error, EpIndexError) else None
        if error is None or found is None:
            return
        rank, token, choice = map(int, found.groups())
        topk, num_experts = self.topk_idx.shape[1], self.moe.num_experts
        at = token * (self.layer.topk if self.layer.nodes is None else topk) + choice
        index, hint = "the expert index", "The error of that rank has the index."
        if rank == self.moe.layer.rank:
            e = int(self.topk_idx.flatten()[at]) if at < self.topk_idx.numel() else 0
            if -1 <= e <= num_experts:  # on a GPU, the error may be that of an earlier call
                return
            index, hint = f"expert index {e}", "Use -1 to drop a choice."
        error.args = (f"rank {rank}: {index} of token {at // topk}, choice {at % topk} is outside [-1, "
                      f"{num_experts}]. {hint}",)


def check_num_physical(num_experts: int, num_ranks: int, num_physical: int | None) -> int:
    """Return P, which is that of ExpertMap.home for None, or raise ValueError."""
    if num_experts < 1:
        raise ValueError(f"{num_experts} experts: must be at least 1")
    least = -(-num_experts // num_ranks) * num_ranks
    if num_physical is None:
        return least
    if num_physical < least or num_physical % num_ranks:
        raise ValueError(f"num_physical {num_physical}: must be a multiple of the {num_ranks} ranks, and at "
                         f"least {least} for {num_experts} experts")
    return int(num_physical)


def balance_experts(tokens_per_expert: Tensor | Sequence[float], num_ranks: int,
                    num_physical: int | None = None, current: ExpertMap | None = None) -> ExpertMap:
    """Return a map with replicas, in which the ranks have about equally many tokens.  Not collective.

    Each of the P - E spare physical experts becomes a replica of the expert with the most tokens per replica.
    Then the replicas, the one with the most tokens first, go to the rank with the fewest tokens that has
    room.  The result depends on the arguments alone.  So all ranks get the same map for the same numbers; add
    up those of all ranks first.

    With `current` few experts move: of the changes of one place, and of exchanges of two, the one that makes
    the ranks most even is done, until the fullest rank has no more than 1.02 times the mean, or none helps
    much.  The fullest rank then often has some per cent more than without `current`.

    Args:
        tokens_per_expert: [E]: how many choices each logical expert got, or is expected to get; at least 0.
            The host reads it.
        num_ranks: W.
        num_physical: P, a multiple of W, at least E; None: that of current, or E rounded up to a multiple of
            W.
        current: The map to start from, of E and P experts, for example EPMoE.expert_map; or None.

    Returns:
        An ExpertMap on the CPU, without empty physical experts; with `current` some may stay empty.

    Raises:
        ValueError: For a wrong shape, a number that is negative or not finite, P out of range, and another
            map than one of E and P experts.
        TypeError: For what is not an ExpertMap.

    Examples:
        Of four experts, the first gets half of all tokens.  Two ranks have three physical experts each.

        >>> import epmoe
        >>> import torch
        >>> m = epmoe.balance_experts(torch.tensor([60, 20, 20, 20]), num_ranks=2, num_physical=6)
        >>> m.physical_to_logical_map.tolist()
        [0, 0, 2, 0, 1, 3]

        Later expert 3 gets more.  One place changes, so one expert travels.

        >>> epmoe.balance_experts([40, 20, 20, 60], 2, current=m).physical_to_logical_map.tolist()
        [3, 0, 2, 0, 1, 3]

    References:
        The global balancing of DeepSeek's EPLB (Expert Parallelism Load Balancer): replicate_experts and
        balanced_packing.
    """
    counted = torch.as_tensor(tokens_per_expert, dtype=torch.float64, device="cpu")
    if counted.dim() != 1 or not len(counted):
        raise ValueError(f"tokens_per_expert: wanted shape [E], got {list(counted.shape)}: call it for each "
                         f"layer")
    tokens = counted.tolist()
    if not all(0 <= n < float("inf") for n in tokens):
        raise ValueError("tokens_per_expert: the numbers must be finite and not negative")
    if current is not None:
        if not isinstance(current, ExpertMap):
            raise TypeError(f"current: wanted an ExpertMap or None, got {type(current).__name__}")
        num_physical = current.num_physical if num_physical is None else num_physical
        if (current.num_experts, current.num_physical) != (len(tokens), num_physical):
            raise ValueError(f"current has {current.num_experts} experts and {current.num_physical} physical "
                             f"ones: must be {len(tokens)} and {num_physical}")
    num_physical = check_num_physical(len(tokens), num_ranks, num_physical)
    if current is not None:
        held = current.physical_to_logical_map.to("cpu", copy=True)
        while _improve(counted, held, num_ranks):
            pass
        return ExpertMap(held, len(tokens))
    counts = [1] * len(tokens)
    # (-tokens of a replica, replicas, expert): the most tokens first
    most = [(-n, 1, e) for e, n in enumerate(tokens)]
    heapq.heapify(most)
    for _ in range(num_physical - len(tokens)):
        e = most[0][2]
        counts[e] += 1
        heapq.heapreplace(most, (-tokens[e] / counts[e], counts[e], e))
    replicas = sorted((-tokens[e] / counts[e], e) for e in range(len(tokens)) for _ in range(counts[e]))
    totals = [0.0] * num_ranks
    experts_of: list[list[int]] = [[] for _ in range(num_ranks)]
    for minus_tokens, e in replicas:
        r = min((r for r in range(num_ranks) if len(experts_of[r]) < num_physical // num_ranks),
                key=lambda r: (totals[r], e in experts_of[r]))
        experts_of[r].append(e)
        totals[r] -= minus_tokens
    return ExpertMap(torch.tensor([e for of in experts_of for e in sorted(of)], device="cpu",
                                  dtype=torch.int64), len(tokens))


# A change of a place must make the ranks more even by this part; so loads that come and go move nothing.
_LEAST_GAIN = 0.002
_EVEN = 1.02  # of the fullest rank, over the mean
_NUM_BUSY = 8  # experts of which a replica more is tried


def _unevenness(loads: Tensor) -> Tensor:
    """Return a number for loads [.., W], over their mean: near the largest, and less if fewer are large."""
    return loads.pow(16).sum(-1).pow(1 / 16)


def _improve(tokens: Tensor, held: Tensor, num_ranks: int) -> bool:
    """Make the best change of one place, or of two that exchange experts.  False: none is worth it.

    tokens: [E] float64.  held: [P]: the expert of each place, or -1.
    """
    local, device = len(held) // num_ranks, "cpu"
    if not tokens.any():
        return False
    tokens = tokens * num_ranks / tokens.sum()  # the mean of a rank is 1
    is_held, expert = held >= 0, held.clamp_min(0)
    rank = torch.arange(len(held), device=device) // local
    counts = torch.bincount(held[is_held], minlength=len(tokens)).double()
    share = tokens / counts  # of a replica
    of_place = torch.where(is_held, share[expert], 0.0)
    loads = tokens.new_zeros(num_ranks).index_add_(0, rank, of_place)
    if float(loads.max()) <= _EVEN:
        return False
    now = float(_unevenness(loads))

    # exchanges of a place of the fullest rank with one of another: two experts travel
    fullest = int(loads.argmax())
    mine, others = torch.nonzero(rank == fullest).flatten(), torch.nonzero(rank != fullest).flatten()
    gives = of_place[mine][:, None] - of_place[others]
    after = loads.repeat(len(mine), len(others), 1)
    after[..., fullest] -= gives
    after.scatter_add_(2, rank[others].expand(len(mine), -1)[..., None], gives[..., None])
    by_exchange = (now - _unevenness(after)) / 2

    # places that are empty, or whose expert has another, for one more replica of a busy expert
    busy = share.topk(min(_NUM_BUSY, len(tokens))).indices
    free = torch.nonzero(~is_held | (counts[expert] > 1)).flatten()
    places = tokens.new_zeros(num_ranks, len(tokens)).index_put_(
        (rank[is_held], held[is_held]), tokens.new_ones(int(is_held.sum())), accumulate=True)
    old = expert[free]
    more = torch.where(is_held[free], tokens[old] / (counts[old] - 1).clamp_min(1), 0.0)
    after = loads + places[:, old].T * torch.where(is_held[free], more - share[old], 0.0)[:, None]
    after = after.scatter_add(1, rank[free][:, None], -more[:, None])
    less = tokens[busy] / (counts[busy] + 1)
    after = after[:, None] + (places[:, busy] * (less - share[busy])).T
    after = after.scatter_add(2, rank[free][:, None, None].expand(-1, len(busy), 1),
                              less[:, None].expand(len(free), -1, 1))
    by_replica = (now - _unevenness(after)).masked_fill(held[free][:, None] == busy, 0.0)

    gains = [float(gain.max()) if gain.numel() else 0.0 for gain in (by_exchange, by_replica)]
    if max(gains) < _LEAST_GAIN * now:
        return False
    if gains[1] >= gains[0]:
        place, which = divmod(int(by_replica.argmax()), len(busy))
        held[free[place]] = busy[which]
    else:
        a, b = divmod(int(by_exchange.argmax()), len(others))
        pair = torch.stack([mine[a], others[b]])
        held[pair] = held[pair.flip(0)]
    return True


def check_still(moe: EPMoE, what: str) -> None:
    """Raise RuntimeError for what cannot be done while experts move."""
    if moe._move is not None:
        raise RuntimeError(f"{what}: experts are on their way to another map: call finish() of what "
                           f"move_experts has returned first")


def route_by(moe: EPMoE, expert_map: ExpertMap, holds: list[int]) -> None:
    """Let a module, and those with the same parameters, route by a map, whose experts these hold now."""
    for module in sharing(moe):
        module._use_map(expert_map, holds)


def check(moe: EPMoE, expert_map: ExpertMap | None) -> ExpertMap:
    """Return the map, that of the home for None, or raise for what this rank cannot do."""
    modules = sharing(moe)
    for module in modules:
        check_still(module, "set_expert_map")
    if expert_map is None:
        expert_map = ExpertMap.home(moe.num_experts, moe.layer.world_size, moe.layer.num_experts)
    if not isinstance(expert_map, ExpertMap):
        raise TypeError(f"expert_map: wanted an ExpertMap or None, got {type(expert_map).__name__}")
    for module in modules:
        _check_module(module, expert_map)
    moved = {id(t) for t in tensors(moe)}
    for other in modules[1:]:
        alone = [n for root in roots(other) for n, t in named_tensors(root).items() if id(t) not in moved]
        if alone:
            raise RuntimeError(f"set_expert_map: another EPMoE has parameters of this one, and {alone[0]} of "
                               f"its own, which would not move: let it have all parameters of this one, or "
                               f"call set_expert_map of the other if that has all of this one")
        if other._holds != moe._holds:
            raise RuntimeError("set_expert_map: another EPMoE got parameters of this one after they had "
                               "moved, and does not know where its experts are: give it others, call "
                               "set_expert_map(None), and let the two have the same parameters then")
    return expert_map


def _check_module(moe: EPMoE, expert_map: ExpertMap) -> None:
    """Raise for a map that a module cannot take, and for parameters that cannot move."""
    layer = moe.layer
    sizes = expert_map.num_experts, expert_map.num_physical
    if sizes != (moe.num_experts, layer.num_experts):
        raise ValueError(f"expert_map has {sizes[0]} experts and {sizes[1]} physical ones, but this EPMoE "
                         f"has {moe.num_experts} and {layer.num_experts}: both must be the same "
                         f"(num_physical= of EPMoE)")
    check_unmerged(moe, "set_expert_map")
    if moe.balance is not None:
        raise RuntimeError("set_expert_map: with balance each call chooses what the spare physical experts "
                           "compute: create the module with num_physical= instead")
    if hasattr(moe, "unshard") or any(is_dtensor(p) for p in tensors(moe)):
        raise RuntimeError("set_expert_map cannot move experts that FSDP has sharded: call it without "
                           "fully_shard, for inference")
    for name, p in (named for root in roots(moe) for named in named_tensors(root).items()):
        if not is_by_expert(moe, p):
            raise RuntimeError(f"set_expert_map: {name} belongs to the experts, but its shape "
                               f"{list(p.shape)} does not begin with the {layer.num_local_experts} experts "
                               f"of a rank, so that its rows cannot move with them: "
                               f"give it a row for each expert, or make the "
                               f"weights plain parameters first (remove_parametrizations, prune.remove)")
        if p.device != layer.device or not p.is_contiguous():
            raise RuntimeError(f"set_expert_map: {name} must be contiguous and on {layer.device}, as it was "
                               f"created")


def _sources(moe: EPMoE, holds: list[int]) -> list[int]:
    """Return, for each physical expert of this rank, a physical expert that has what it shall hold, or -1.

    holds: [P]: the logical experts of the new map, as moe._holds of the present one.
    """
    num, rank = moe.layer.num_local_experts, moe.layer.rank
    own, sources = range(rank * num, (rank + 1) * num), []
    for p in own:
        replicas = [q for q, e in enumerate(moe._holds) if e == holds[p] >= 0]
        near = [q for q in replicas if q == p] or [q for q in replicas if q in own] or replicas
        sources.append(near[rank % len(near)] if near else -1)  # ranks take it from different ranks
    return sources


def _move(moe: EPMoE, world: World, sources: list[int], use_map: Callable[[], None]) -> None:
    """Copy the weights of this rank's physical experts from where they are, and use the map.  Collective.

    The old weights are in symmetric memory until all ranks have the new ones.  So after an error every rank
    has its old weights back.
    """
    layer, params = moe.layer, [as_bytes(p.detach()) for p in tensors(moe)]
    num = layer.num_local_experts
    num_bytes = sum(p.numel() * p.element_size() + ALIGNMENT for p in params)
    heap = SymmetricHeap(world, num_bytes, layer.device)
    try:
        before = [heap.malloc_symmetric(p.shape, p.dtype, ALIGNMENT) for p in params]
        with together(world):
            for p, old in zip(params, before):
                old.copy_(p)
        heap.barrier()
        try:
            with together(world), writing(params):
                for p, old in zip(params, before):
                    for i, q in enumerate(sources):
                        if q < 0:
                            p[i].zero_()
                        elif q != layer.rank * num + i:
                            heap.get(p[i], old[q % num], q // num)
                heap.synchronize()  # nothing is read any more, and all errors are known
        except BaseException:
            with writing(params):
                for p, old in zip(params, before):
                    p.copy_(old)
            raise
        use_map()
    except BaseException:
        with contextlib.suppress(Exception):  # all ranks have failed
            heap.close()
        raise
    heap.close()


def set_expert_map(moe: EPMoE, expert_map: ExpertMap | None) -> None:
    """Make a map that of a module, and move its weights.  Collective."""
    world = world_of(moe)
    with together(world):
        expert_map = moe._placed(check(moe, expert_map))
        holds = expert_map.physical_to_logical_map.tolist()
    agree(moe, world, holds)
    if holds != moe._holds:
        _move(moe, world, _sources(moe, holds), lambda: route_by(moe, expert_map, holds))


def world_of(moe: EPMoE) -> World:
    """Return the ranks between which experts move."""
    if not isinstance(moe.layer.world, World):
        raise ValueError("experts move through symmetric memory, which the ranks of one node share, but this "
                         "module spans several nodes")
    return moe.layer.world


def agree(moe: EPMoE, world: World, *arguments: object) -> None:
    """Raise EpMismatch on all ranks, if they pass different arguments or modules.  Collective."""
    moved = [(p.shape, p.dtype) for p in tensors(moe)], len(sharing(moe))
    digests = world.exchange(hashlib.sha256(repr((moe._holds, moved, arguments)).encode()).digest())
    for rank, its in enumerate(digests):
        if its != digests[0]:
            raise EpMismatch(f"ranks disagree: rank {rank} passes another expert map than rank 0, or passes "
                             f"it to another module, or one with other parameters and buffers.  Add up the "
                             f"numbers of tokens of all ranks, and pass the same map on all")
