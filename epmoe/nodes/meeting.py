"""All ranks meet in each call of a layer over several nodes: each learns the call and the errors of all.

It has two hops.  Over the rail each rank tells the same local ranks of the other nodes what it calls.  Then
each node's ranks tell each other what they have found.  So an error of any rank reaches all ranks, before a
row has moved, and all reach the same verdict.  Both hops are on the host.
"""

import struct
from typing import NamedTuple

from .. import _C
from ..errors import EpIndexError, EpMismatch, PeerError

OPS = ("plan", "dispatch", "combine", "the backward of dispatch", "the backward of combine", "barrier")
PLAN, DISPATCH, COMBINE, DISPATCH_BACKWARD, COMBINE_BACKWARD, BARRIER = range(len(OPS))
OP_OF = {_C.OP_PLAN: PLAN, _C.OP_DISPATCH: DISPATCH, _C.OP_DISPATCH_GEMM: DISPATCH, _C.OP_COMBINE: COMBINE,
         _C.OP_GEMM_COMBINE: COMBINE, _C.OP_BARRIER: BARRIER}
FAILED, SECOND = 1, 2
_NOTHING, _FAILURE, _DISAGREE, _INDEX = range(4)


class Header(NamedTuple):
    """What a rank tells about its call.  All but failed must be the same on all ranks."""

    layer: int  # the number of the layer among those of the Nodes
    op: int
    weights: int  # whether weights travel
    gradients: int  # whether a gradient is needed, so that a backward follows
    chunks: int = 0  # in which an EPMoE moves the tokens
    failed: int = 0  # FAILED: the rank cannot take part; SECOND: because another rank of its node cannot

    def pack(self):
        return struct.pack("<6q", *self)

    @classmethod
    def unpack(cls, raw):
        return cls(*struct.unpack("<6q", raw))


_SHARED = ("layer", "op", "weights", "gradients", "chunks")


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

    Raises on all ranks when one has failed or is in another call.
    """
    num_local = nodes.local_size
    on_rail = [node * num_local + nodes.local_rank for node in range(nodes.num_nodes)]
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
            got, want = OPS[got], OPS[want]
        elif name in ("weights", "gradients"):
            name, got, want = f"whether they pass {name}", bool(got), bool(want)
        raise EpMismatch(f"ranks disagree in {name}: rank {rank} has {got}, rank {verdict.first} has {want} "
                         f"(in {OPS[header.op]}). All ranks of all nodes must make the same calls in the "
                         f"same order.")


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
