"""Traffic and time of a layer over several nodes, computed from rates: by which EPMoE chooses its chunks.

A rank has one network card. A token goes to the rank with its own local number on each node that holds one of
its experts (the rail). That node's ranks, the team, multiply it and add its rows up. One row for each (token,
node) comes home.

Assumptions: routing is uniform, so all ranks have the same load. A card sends and receives at the same time,
at the rail's rate each. The GEMMs hide what the links inside a node move, unless the links take longer.
The packing of rows and the last sum are not counted: they read and write memory, about 2 % of the time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

CHUNKS = (1, 2, 3, 4, 6, 8)
SAVINGS = ("choice", "rank", "node")
_TILE_ROWS = 128
_META_BYTES = 64  # the header that a rank sends to each rail peer before the rows
_INDEX_BYTES = 4  # of each choice beside it
_WEIGHT_BYTES = 4  # of each choice, beside the row on its way out; of its gradient on the way home


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens per rank, H hidden, I inner, E experts of all ranks, K choices per token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the machines do: bytes per second, FLOP per second, and seconds for each call.

    Args:
        rail: Bytes per second of a rank's network card, each way.
        link: Bytes per second of a rank's links inside its node, each way.
        gemm: FLOP per second of a rank in a fused layer on one node, with the rows of its half-full tiles.
        memory: Bytes per second of a rank's memory, for weights.
        rail_latency: Seconds of an exchange on the rail beyond its bytes.
        launch: Seconds of each of the team's two kernels beyond its work.
    """

    rail: float = 45e9
    link: float = 290e9
    gemm: float = 583e12
    memory: float = 4e12
    rail_latency: float = 60e-6
    launch: float = 15e-6


def _hit(pool: int, part: int, topk: int) -> float:
    """Return the probability that `topk` distinct experts of `pool` include one of a given `part`."""
    return 1 - math.comb(pool - part, topk) / math.comb(pool, topk)


def mean_nodes(nodes: int, experts: int, topk: int, limit: int | None = None) -> float:
    """Return the expected number of nodes that hold an expert of a token.

    Args:
        nodes: N, the number of nodes; each holds experts / nodes of the experts.
        experts: E, all experts.
        topk: K, the distinct experts that a token chooses, each set with the same probability.
        limit: M: a token first chooses M nodes at random, and then its experts among theirs (group-limited
            routing, DeepSeek-V3, arXiv 2412.19437, section 2.1.2). None: no limit.

    Returns:
        The expected number, a float, this rank's own node included.

    Raises:
        ValueError: When the experts are not a multiple of the nodes, or fewer than topk can be chosen.

    Examples:
        >>> from epmoe.moe.cost_model import mean_nodes
        >>> round(mean_nodes(8, 256, 8), 2), round(mean_nodes(8, 256, 8, limit=4), 2)
        (5.29, 3.63)
    """
    used = min(limit or nodes, nodes)
    if experts % nodes:
        raise ValueError(f"{experts} experts on {nodes} nodes: must be a multiple")
    pool = used * (experts // nodes)
    if topk > pool:
        raise ValueError(f"{topk} choices of a token among {pool} experts on {used} nodes: too many")
    return used * _hit(pool, experts // nodes, topk)


def rows_leaving(nodes: int, local_ranks: int, experts: int, topk: int, saving: str = "node",
                 limit: int | None = None) -> float:
    """Return the expected number of rows that leave a token's node, for each token.

    Args:
        nodes: N.
        local_ranks: L, the ranks of a node.
        experts: E.
        topk: K.
        saving: "choice": a row for each choice; "rank": one for each rank that holds a choice; "node": one
            for each node that holds a choice, as epmoe does.
        limit: As for mean_nodes.

    Returns:
        The expected number of rows, a float.

    Raises:
        ValueError: As mean_nodes, or for another saving.

    Examples:
        >>> from epmoe.moe.cost_model import rows_leaving
        >>> [round(rows_leaving(2, 8, 256, 8, saving), 2) for saving in ("choice", "rank", "node")]
        [4.0, 3.26, 1.0]
    """
    if saving not in SAVINGS:
        raise ValueError(f"saving {saving!r}: must be one of {', '.join(SAVINGS)}")
    away = (nodes - 1) / nodes
    if saving == "node":
        return away * mean_nodes(nodes, experts, topk, limit)
    mean_nodes(nodes, experts, topk, limit)  # check the arguments
    return away * (topk if saving == "choice" else _mean_ranks(nodes, local_ranks, experts, topk, limit))


def _mean_ranks(nodes: int, local_ranks: int, experts: int, topk: int, limit: int | None) -> float:
    """Return the expected number of ranks that hold an expert of a token."""
    used = min(limit or nodes, nodes)
    here = experts // nodes
    # With fewer experts than ranks, an expert has replicas. A token goes to one of them.
    parts = min(local_ranks, here)
    return used * parts * _hit(used * here, here // parts, topk)


def schedule(out_s: float, team_s: float, own_s: float, home_s: float, chunks: int, latency_s: float = 0.0,
             launch_s: float = 0.0) -> float:
    """Return the time of the pipeline of one rank: the rail and the team work at the same time.

    Order on the rail: out 1, out 2, home 1, out 3, home 2, ..., home C. Order of the team: own tokens,
    chunk 1, ..., chunk C. The team begins a chunk when it has arrived; the rail takes it home after that.

    Args:
        out_s: Seconds in which the rail sends all chunks.
        team_s: Seconds in which the team multiplies all chunks.
        own_s: Seconds in which the team multiplies its node's own tokens.
        home_s: Seconds in which the rail brings all chunks home.
        chunks: C.
        latency_s: Seconds more for each call on the rail.
        launch_s: Seconds more for each call of the team.

    Returns:
        Seconds until the last chunk is home.

    Examples:
        >>> from epmoe.moe.cost_model import schedule
        >>> schedule(2.0, 3.0, 1.0, 2.0, chunks=1), schedule(2.0, 3.0, 1.0, 2.0, chunks=2)
        (7.0, 5.0)
    """
    out, team, home = (s / chunks for s in (out_s, team_s, home_s))
    rail, gpu = 0.0, own_s + launch_s
    arrived: list[float] = []  # when each chunk has arrived, and when the team has done it
    done: list[float] = []

    def send() -> None:
        nonlocal rail
        rail += out + latency_s
        arrived.append(rail)

    def multiply() -> None:
        nonlocal gpu
        gpu = max(gpu, arrived[len(done)]) + team + launch_s
        done.append(gpu)

    send()
    for c in range(chunks):
        if c + 1 < chunks:
            send()
        multiply()
        rail = max(rail, done[c]) + home + latency_s
    return max(rail, gpu)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Traffic and time of one layer on one rank. Bytes and seconds.

    Attributes:
        rows: Rows that leave the node for each token.
        out_bytes, home_bytes: What a rank sends on the rail, and what it sends home.
        out_s, team_s, home_s: The three parts one after the other, without overlap.
        serial_s: Their sum.
        chunks: The number of chunks with the least time.
        pipelined_s: The time with that number.
    """

    rows: float
    out_bytes: float
    home_bytes: float
    out_s: float
    team_s: float
    home_s: float
    serial_s: float
    chunks: int
    pipelined_s: float


def team_seconds(shape: Shape, nodes: int, local_ranks: int, rates: Rates, share: float,
                 limit: int | None = None, passes: int = 1) -> float:
    """Return the time in which the team multiplies a share of a layer's rows. Balanced routing.

    Each half of a layer takes the time of its GEMMs or that of the links, whichever is longer. GEMMs read
    the weights once, and each expert has one tile of 128 rows that is half full on average.

    Args:
        shape: A Shape.
        nodes: N.
        local_ranks: L.
        rates: Rates.
        share: The part of the layer's rows, from 0 to 1.
        limit: As for mean_nodes.
        passes: 1 for a forward; 2 for a backward, which multiplies twice as much.

    Returns:
        Seconds, without launches.
    """
    here = max(1, shape.experts // (nodes * local_ranks))
    rows = share * shape.tokens * shape.topk + here * _TILE_ROWS / 2
    matrix = shape.hidden * shape.inner  # of one expert; there are three of them
    moved = (share * shape.tokens * _mean_ranks(nodes, local_ranks, shape.experts, shape.topk, limit)
             * (local_ranks - 1) / local_ranks * shape.hidden * 2 / rates.link)

    def half(matrices: int) -> float:
        multiplied = passes * 2 * rows * matrix * matrices / rates.gemm
        return max(multiplied, passes * 2 * here * matrix * matrices / rates.memory, moved)

    return half(2) + half(1)


def predict(shape: Shape, nodes: int, local_ranks: int, rates: Rates, saving: str = "node",
            limit: int | None = None, home_bytes: int = 2, backward: bool = False,
            team_s: float | None = None, chunks: Iterable[int] = CHUNKS) -> Prediction:
    """Return the Prediction for one layer on one rank.

    Args:
        shape: A Shape.
        nodes: N, at least 1.
        local_ranks: L.
        rates: Rates.
        saving: As for rows_leaving.
        limit: As for mean_nodes.
        home_bytes: Bytes of an element on the way home (rail_dtype): 2, or 4 for float32.
        backward: The backward instead: the same rows on the rail, twice the multiplications.
        team_s: Measured seconds of the team for a whole forward, instead of those from rates.
        chunks: The numbers of chunks from which the best is chosen.

    Returns:
        A Prediction.

    Raises:
        ValueError: As rows_leaving.

    Examples:
        >>> from epmoe.moe.cost_model import Rates, Shape, predict
        >>> p = predict(Shape(8192, 7168, 2048, 256, 8), 8, 8, Rates())
        >>> round(p.rows, 2), round(p.out_bytes / 1e6), p.chunks, round(p.pipelined_s * 1e3, 1)
        (4.63, 547, 2, 24.5)
    """
    passes = 2 if backward else 1
    rows = rows_leaving(nodes, local_ranks, shape.experts, shape.topk, saving, limit)
    meta = (nodes - 1) * (_META_BYTES + shape.tokens * shape.topk * _INDEX_BYTES)
    weights = rows * shape.tokens * shape.topk * _WEIGHT_BYTES
    out_bytes = rows * shape.tokens * shape.hidden * 2 + (0 if backward else weights)
    back_bytes = rows * shape.tokens * shape.hidden * home_bytes + (weights if backward else 0)
    out_s, home_s = out_bytes / rates.rail, back_bytes / rates.rail
    plan_s = (meta / rates.rail + rates.rail_latency) if nodes > 1 and not backward else 0.0

    def team(share: float) -> float:
        if team_s is not None:
            return share * passes * team_s
        return team_seconds(shape, nodes, local_ranks, rates, share, limit, passes)

    launch_s, latency_s = 2 * rates.launch, rates.rail_latency
    if nodes == 1:
        whole = team(1.0) + launch_s
        return Prediction(0.0, 0.0, 0.0, 0.0, whole, 0.0, whole, 1, whole)
    own = 1 / nodes
    times = {c: plan_s + schedule(out_s, c * team((1 - own) / c), team(own), home_s, c, latency_s, launch_s)
             for c in chunks}
    best = min(times, key=times.__getitem__)
    whole = team(1.0) + launch_s
    serial = plan_s + out_s + home_s + 2 * latency_s + whole
    return Prediction(rows, out_bytes + (0 if backward else meta), back_bytes, out_s, whole, home_s, serial,
                      best, times[best])
