"""Statistics of an EPMoE, for people and for balance_experts: rows of experts, and waiting times.

Each rank adds up the rows of its own experts in a tensor on the device, which stays where it is: CUDA graphs
add to it, too.  The operations of the layer add up how long they waited for each rank, in memory that the
host reads without a synchronisation (ep_count_waits in csrc/protocol/flags.h).  Reading is collective,
because a rank knows its own experts and its own waits only.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .. import _C
from ..a2a.base import together
from ..errors import EpMismatch

if TYPE_CHECKING:
    from ..a2a.internode.layer import InternodeLayer
    from .module import EPMoE

_NUMBERS = _C.ALL_GATHER_BYTES // 8  # int64 of an exchange
_MOST_EXPERTS = 5  # in the table
_COLUMNS, _BAR = 80, 30  # of the table; characters of the fullest rank's bar


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertStats:
    """The rows that the experts of all ranks got, and how long the ranks waited for each other.

    A row is one choice of one token; in decoding (LowLatencyAll2All) a token that chooses an expert twice has
    one row there.  str() is a table of at most 80 columns, which names the fullest rank, the rank for which
    the others waited longest, and the busiest experts.

    Letters: W ranks, E experts, P physical experts.

    Attributes:
        tokens_per_expert: [E] int64, on the CPU: the rows of each expert, as balance_experts takes them.
        tokens_per_physical: [P] int64, on the CPU: those of each physical expert.
        rows_per_rank: [W] int64, on the CPU: those of each rank.
        physical_to_logical_map: [P] int64, on the CPU: the expert that each physical one holds, or -1.
        waited_s: [W, W] float64, on the CPU.  [r, s]: how long rank r waited for rank s, in seconds.

    Examples:
        See EPMoE.stats.
    """

    tokens_per_expert: Tensor
    tokens_per_physical: Tensor
    rows_per_rank: Tensor
    physical_to_logical_map: Tensor
    waited_s: Tensor

    @property
    def slowest_rank(self) -> int:
        """The rank for which the others waited longest; of several, the first."""
        return int(self.waited_s.sum(0).argmax())

    @property
    def fullest_rank(self) -> int:
        """The rank with the most rows; of several, the first."""
        return int(self.rows_per_rank.argmax())

    @property
    def skew(self) -> float:
        """The rows of the fullest rank over the mean of all ranks; 1 if there are none.

        Where products take the time, a layer takes about this many times as long as one that is balanced.
        """
        total = int(self.rows_per_rank.sum())
        return float(self.rows_per_rank.max()) * len(self.rows_per_rank) / total if total else 1.0

    def __str__(self) -> str:
        ranks, experts = self.rows_per_rank.tolist(), self.tokens_per_expert.tolist()
        total = sum(ranks)
        if not total:
            return f"no rows for {len(experts)} experts on {len(ranks)} ranks"
        mean, fullest = total / len(ranks), self.fullest_rank
        lines = [f"{total:,} rows of {len(experts)} experts on {len(ranks)} ranks",
                 f"rank {fullest} is the fullest: {self.skew:.2f} times the mean"]
        waits, slowest = self.waited_s.sum(0).tolist(), self.slowest_rank
        if waits[slowest]:
            lines.append(f"the others waited longest for rank {slowest}: {waits[slowest]:.4g} s altogether")
        lines += ["", f"{'rank':>6} {'rows':>15} {'over mean':>10} {'waited for, s':>14}"]
        lines += [f"{r:>6} {n:>15,} {n / mean:>10.2f} {waits[r]:>14.4g}  {_bar(n, ranks[fullest])}".rstrip()
                  for r, n in enumerate(ranks)]
        busiest = sorted(range(len(experts)), key=lambda e: -experts[e])[:_MOST_EXPERTS]
        lines += ["", f"{'expert':>6} {'rows':>15} {'of all':>10}  ranks"]
        for e in busiest:
            on = ", ".join(map(str, self._ranks_of(e)))
            lines.append(_cut(f"{e:>6} {experts[e]:>15,} {experts[e] / total:>10.1%}  {on}"))
        return "\n".join(lines)

    def _ranks_of(self, expert: int) -> list[int]:
        """Return the ranks that hold an expert."""
        of_rank = len(self.physical_to_logical_map) // len(self.rows_per_rank)
        held = torch.nonzero(self.physical_to_logical_map == expert).flatten() // of_rank
        return list(dict.fromkeys(held.tolist()))


def _bar(n: int, most: int) -> str:
    return "#" * max(round(_BAR * n / most), n > 0)


def _cut(line: str) -> str:
    return line if len(line) <= _COLUMNS else line[:_COLUMNS - 3] + "..."


# ---- methods of EPMoE ----


def waited_ns(moe: EPMoE) -> list[int]:
    """Return for each of the W ranks how long the layer's operations waited for it, since its creation."""
    layer, nodes = moe.layer, moe.layer.nodes
    if nodes is None:
        return _C.layer_waited(layer._c)
    found = [0] * layer.world_size  # of the ranks of other nodes nothing is known
    first = nodes.node * nodes.local_size
    team = cast("InternodeLayer", layer).team_layer
    found[first:first + nodes.local_size] = _C.layer_waited(team._c)
    return found


def begin(moe: EPMoE) -> None:
    """Set the counts of a module to zero."""
    assert moe._row_counts is not None
    moe._row_counts.zero_()
    moe._waited_before = waited_ns(moe)


def record_stats(moe: EPMoE, enabled: bool = True) -> None:
    """Begin to count rows and waits, or stop.  Not collective, but needed on all ranks for stats.

    It is off at first.  Beginning sets the counts to zero; where it is on already, they go on.  A call then
    takes up to two small operations more on the device, and the host waits for nothing.  A CUDA graph counts
    if the module did at the capture, in each replay.  Where activation checkpointing runs a whole forward
    again, its rows count again.

    Args:
        moe: The EPMoE.
        enabled: Whether to count.

    Raises:
        TypeError: For what is not a bool.
        RuntimeError: During the capture of a CUDA graph.

    Examples:
        See stats.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"record_stats: wanted True or False, got {type(enabled).__name__}")
    device = moe.layer.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("record_stats: a CUDA graph is being captured: call it before")
    if enabled and not moe._records_stats:
        if moe._row_counts is None:  # it is kept forever, because graphs may add to it
            with torch.inference_mode(False):
                moe._row_counts = torch.zeros(moe.layer.num_local_experts, dtype=torch.int64, device=device)
        begin(moe)
    moe._records_stats = enabled


def stats(moe: EPMoE, reset: bool = False) -> ExpertStats:
    """Return the rows of experts and ranks, and the waits, since record_stats or the last reset.  Collective.

    All calls count: with and without gradients, in decoding, and replays of CUDA graphs.  The host waits for
    what was enqueued on the current stream, and for the other ranks, but not for other streams.
    set_expert_map sets the counts to zero if it moves experts.

    Waits are those at the beginning of an operation, until the other rank has entered it, too: a rank whose
    products or whose work between two calls take longer is waited for.  Those of all modules that share the
    layer count, also while recording is off.  They do not have those of the low-latency path, nor waits
    between nodes.

    Args:
        moe: The EPMoE.
        reset: Whether to set the counts to zero afterwards.

    Returns:
        An ExpertStats, the same on all ranks.

    Raises:
        RuntimeError: On this rank, without record_stats before.
        TypeError: On this rank, for a reset that is not a bool.
        PeerError: On the other ranks, when one rank raises one of these.
        EpMismatch: On all ranks, when they are in different calls, or read modules of other sizes or maps.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=3, topk=1, dtype=torch.float32, device="cpu")
        >>> moe.record_stats()
        >>> y = moe(torch.ones(4, 16), torch.tensor([[2], [0], [2], [2]]), torch.ones(4, 1))
        >>> found = moe.stats()
        >>> found.tokens_per_expert.tolist(), found.rows_per_rank.tolist(), found.skew
        ([1, 0, 3], [4], 1.0)
        >>> epmoe.balance_experts(found.tokens_per_expert, num_ranks=1, num_physical=4)
        ExpertMap(3 experts, 4 physical, at most 2 replicas)
        >>> moe.finalize()
    """
    layer, world = moe.layer, moe.layer.world
    with together(world):
        if not isinstance(reset, bool):
            raise TypeError(f"stats: reset: wanted True or False, got {type(reset).__name__}")
        if moe._row_counts is None:
            raise RuntimeError("stats: nothing was counted: call record_stats() before, on all ranks")
        mine = moe._row_counts.tolist()
        mine += [now - then for now, then in zip(waited_ns(moe), moe._waited_before)]
    sizes = moe.num_experts, layer.hidden, moe._shapes, moe._holds
    for rank, its in enumerate(digests := world.exchange(hashlib.sha256(repr(sizes).encode()).digest())):
        if its != digests[0]:
            raise EpMismatch(f"ranks disagree: rank {rank} reads the statistics of a module with other sizes "
                             f"or another expert map than rank 0.  All ranks must read those of the same "
                             f"module")
    of_ranks: list[list[int]] = [[] for _ in range(layer.world_size)]
    for i in range(0, len(mine), _NUMBERS):
        for of_rank, part in zip(of_ranks, world.exchange(array.array("q", mine[i:i + _NUMBERS]).tobytes())):
            of_rank += array.array("q", part)
    if reset:
        begin(moe)
    numbers = torch.tensor(of_ranks, dtype=torch.int64, device="cpu")
    physical, waits = numbers.split([layer.num_local_experts, layer.world_size], 1)
    held = torch.tensor(moe._holds, dtype=torch.int64, device="cpu")
    of_experts = torch.zeros(moe.num_experts, dtype=torch.int64, device="cpu")
    of_experts.index_add_(0, held.clamp_min(0), physical.flatten() * (held >= 0))
    return ExpertStats(of_experts, physical.flatten(), physical.sum(1), held, waits.double() * 1e-9)
