"""All ranks meet in each call over several nodes: each learns the call and the errors of all.

A meeting begins every collective call of Nodes and of their layers.  It has the same size in all of them, so
ranks that are in different calls still meet, and learn that they differ.  What has other sizes follows it.

It has two hops.  Over the rail each rank tells the same local ranks of the other nodes what it calls.  Then
each node's ranks tell each other what they have found.  So an error of any rank reaches all ranks, before a
row has moved, and all reach the same verdict.  Both hops are on the host.
"""

import struct
from typing import NamedTuple

from .. import _C
from ..errors import EpIndexError, EpMismatch, PeerError

OPS = ("plan", "dispatch", "combine", "the backward of dispatch", "the backward of combine", "barrier",
       "exchange or creation", "finalize", "close")
(PLAN, DISPATCH, COMBINE, DISPATCH_BACKWARD, COMBINE_BACKWARD, BARRIER, EXCHANGE, FINALIZE,
 CLOSE) = range(len(OPS))
OP_OF = {_C.OP_PLAN: PLAN, _C.OP_DISPATCH: DISPATCH, _C.OP_DISPATCH_GEMM: DISPATCH, _C.OP_COMBINE: COMBINE,
         _C.OP_GEMM_COMBINE: COMBINE, _C.OP_BARRIER: BARRIER}
FAILED, SECOND = 1, 2
_NOTHING, _FAILURE, _DISAGREE, _INDEX = range(4)


class Header(NamedTuple):
    """What a rank tells about its call.  All but failed must be the same on all ranks."""

    op: int
    layer: int = -1  # the number of the layer among those of the Nodes; -1: the call is of no layer
    plan: int = 0  # the number of the layout among those of the layer; 0: the call has none
    weights: int = 0  # whether weights travel
    gradients: int = 0  # whether a gradient is needed, so that a backward follows
    chunks: int = 0  # in which an EPMoE moves the tokens
    bytes: int = 0  # of each rank in an exchange
    failed: int = 0  # FAILED: the rank cannot take part; SECOND: because another rank of its node cannot

    def pack(self):
        return struct.pack(_HEADER, *self)

    @classmethod
    def unpack(cls, raw):
        return cls(*struct.unpack(_HEADER, raw))


_HEADER = "<8q"
_SHARED = Header._fields[:-1]


class _Verdict(NamedTuple):
    """What is wrong, as numbers: a kind, a rank, and what the kind needs."""

    kind: int = _NOTHING
    rank: int = 0
    a: int = 0  # failure: FAILED or SECOND; disagreement: the field; index: the position, token * K + choice
    got: int = 0
    want: int = 0
    first: int = 0  # disagreement: the rank that has `want`


def _disagreement(headers, ranks):
    for rank, header in zip(ranks, headers):
        for field in range(len(_SHARED)):
            if header[field] != headers[0][field]:
                return _Verdict(_DISAGREE, rank, field, header[field], headers[0][field], ranks[0])
    return _Verdict()


def _worst(verdicts):
    """Return the verdict that all ranks raise: of a rank that failed by itself, before its consequences."""
    def order(v):
        return v.kind != _FAILURE, v.a == SECOND, v.rank

    return min((v for v in verdicts if v.kind != _NOTHING), key=order, default=_Verdict())


def meet(nodes, header):
    """Tell all ranks what this one calls.  Collective.

    Raises on all ranks when one has failed or is in another call.  The next call works then.
    """
    num_local = nodes.local_size
    on_rail = [node * num_local + nodes.local_rank for node in range(nodes.num_nodes)]
    nodes.check()
    if nodes._is_waiting:
        raise ValueError(f"{OPS[header.op]} during another call of these nodes: a signal handler or a second "
                         f"thread cannot make it")
    with nodes._ending():
        headers = [Header.unpack(raw) for raw in nodes._meet_rail(header.pack())]
        failures = [_Verdict(_FAILURE, rank, h.failed) for rank, h in zip(on_rail, headers) if h.failed]
        of_rail = _worst([*failures, _disagreement(headers, on_rail)])
        team = nodes.team.exchange(struct.pack("<6q", *of_rail) + header.pack())
    verdicts = [_Verdict(*struct.unpack("<6q", raw[:48])) for raw in team]
    first = nodes.node * num_local
    of_team = _disagreement([Header.unpack(raw[48:]) for raw in team], range(first, first + num_local))
    _raise(_worst([*verdicts, of_team]), header)


def _raise(verdict, header):
    rank = verdict.rank
    if verdict.kind == _FAILURE:
        raise PeerError(f"rank {rank} could not take part in {OPS[header.op]}. See the error that it raised.")
    if verdict.kind == _DISAGREE:
        name = _SHARED[verdict.a]
        got, want = verdict.got, verdict.want
        if name == "op":
            name, got, want = "the call", OPS[got], OPS[want]
        elif name == "bytes":
            name = "the bytes of an exchange"
        elif name == "plan":
            name = "the plan of the layout"
        elif name in ("weights", "gradients"):
            name, got, want = f"whether they pass {name}", bool(got), bool(want)
        raise EpMismatch(f"ranks disagree in {name}: rank {rank} has {got}, rank {verdict.first} has {want} "
                         f"(in {OPS[header.op]}). All ranks of all nodes must make the same calls in the "
                         f"same order.")


def exchange(nodes, mine):
    """Meet all ranks, and give each the bytes of every rank, in rank order.  Collective.

    mine: at most 512 bytes.

    Raises on all ranks when one has failed, is in another call or has another number of bytes.
    """
    meet(nodes, Header(EXCHANGE, bytes=len(mine)))
    with nodes._ending():
        joined = b"".join(nodes._meet_rail(mine)) if mine else b""  # of the ranks with this local number
        of_local = [b""] * nodes.local_size
        for i in range(0, len(joined), _C.ALL_GATHER_BYTES):
            for local, piece in enumerate(nodes.team.exchange(joined[i : i + _C.ALL_GATHER_BYTES])):
                of_local[local] += piece
    return [of_local[rank % nodes.local_size][rank // nodes.local_size * len(mine) :][: len(mine)]
            for rank in range(nodes.size)]


def check_indices(nodes, bad, values, topk, num_experts):
    """Raise EpIndexError on all ranks if a rank has an expert index out of range.  Collective.

    bad: for each rank of the rail the position of its first wrong index, or -1; values: these indices.
    """
    num_local = nodes.local_size
    found = [_Verdict(_INDEX, node * num_local + nodes.local_rank, at, value)
             for node, (at, value) in enumerate(zip(bad, values)) if at >= 0]
    team = nodes.team.exchange(struct.pack("<6q", *_worst(found)))
    worst = _worst([_Verdict(*struct.unpack("<6q", raw)) for raw in team])
    if worst.kind == _INDEX:
        raise EpIndexError(f"rank {worst.rank}: expert index {worst.got} of token {worst.a // topk}, choice "
                           f"{worst.a % topk} is outside [-1, {num_experts}]. Use -1 to drop a choice.")
