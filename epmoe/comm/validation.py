"""What ranks of several nodes tell each other of a call, and the verdict at which all of them arrive.

A validation (Nodes._validate) begins every collective call of Nodes and of their layers.  It has the same
size in all of them, so ranks that are in different calls still meet, and learn that they differ.

It has two hops.  Over the rail each rank tells the same local ranks of the other nodes what it calls
(Header).  Then each node's ranks tell each other what they have found (Verdict).  So an error of any rank
reaches all ranks, before a row has moved, and all reach the same verdict.  Both hops are on the host.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .. import _C
from ..errors import EpMismatch, PeerError

if TYPE_CHECKING:
    from .nodes import Nodes
    from .world import World

OPS = ("plan", "dispatch", "combine", "the backward of dispatch", "the backward of combine", "barrier",
       "exchange or creation", "finalize", "close")
(PLAN, DISPATCH, COMBINE, DISPATCH_BACKWARD, COMBINE_BACKWARD, BARRIER, EXCHANGE, FINALIZE,
 CLOSE) = range(len(OPS))
OP_OF = {_C.OP_PLAN: PLAN, _C.OP_DISPATCH: DISPATCH, _C.OP_DISPATCH_GEMM: DISPATCH, _C.OP_COMBINE: COMBINE,
         _C.OP_GEMM_COMBINE: COMBINE, _C.OP_BARRIER: BARRIER}
FAILED, SECOND = 1, 2
NOTHING, FAILURE, DISAGREE, INDEX = range(4)  # kinds of a Verdict
_HASH_BYTES = 32
_TEXT_BYTES = _C.ALL_GATHER_BYTES - _HASH_BYTES


def agree(world: World | Nodes, mine: str, message: str) -> None:
    """Raise EpMismatch on all ranks if they pass other texts.  Collective.

    mine: of any length; an error shows its beginning.  message: that of the error, with {rank}, {its} text
    and {first}, the text of rank 0.
    """
    text = mine.encode()
    texts = world.exchange(hashlib.sha256(text).digest() + text[:_TEXT_BYTES].ljust(_TEXT_BYTES))
    for rank, its in enumerate(texts):
        if its != texts[0]:
            other, first = (t[_HASH_BYTES:].decode(errors="replace").rstrip() for t in (its, texts[0]))
            raise EpMismatch("ranks disagree: " + message.format(rank=rank, its=other, first=first))


class Header(NamedTuple):
    """What a rank tells about its call.  All but failed must be the same on all ranks."""

    op: int
    layer: int = -1  # the number of the layer among those of the Nodes; -1: the call is of no layer
    plan: int = 0  # the number of the layout among those of the layer; 0: the call has none
    weights: int = 0  # whether weights travel
    gradients: int = 0  # 1: gradients of rows are needed, 2: of other tensors; so a backward follows
    chunks: int = 0  # in which an EPMoE moves the tokens
    num_bytes: int = 0  # of each rank in an exchange
    failed: int = 0  # FAILED: the rank cannot take part; SECOND: because another rank of its node cannot

    def pack(self) -> bytes:
        return struct.pack(_HEADER, *self)

    @classmethod
    def unpack(cls, raw: bytes) -> "Header":
        return cls(*struct.unpack(_HEADER, raw))


_HEADER = "<8q"
_SHARED = Header._fields[:-1]


class Verdict(NamedTuple):
    """What is wrong, as numbers: a kind, a rank, and what the kind needs."""

    kind: int = NOTHING
    rank: int = 0
    a: int = 0  # failure: FAILED or SECOND; disagreement: the field; index: the position, token * K + choice
    got: int = 0
    want: int = 0
    first: int = 0  # disagreement: the rank that has `want`

    def pack(self) -> bytes:
        return struct.pack(_VERDICT, *self)

    @classmethod
    def unpack(cls, raw: bytes) -> "Verdict":
        return cls(*struct.unpack(_VERDICT, raw))


_VERDICT = "<6q"
VERDICT_BYTES = struct.calcsize(_VERDICT)


def disagreement(headers: Sequence[Header], ranks: Sequence[int]) -> Verdict:
    """Return the first field in which a rank differs from the first one."""
    for rank, header in zip(ranks, headers):
        for field in range(len(_SHARED)):
            if header[field] != headers[0][field]:
                return Verdict(DISAGREE, rank, field, header[field], headers[0][field], ranks[0])
    return Verdict()


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that all ranks raise: of a rank that failed by itself, before its consequences."""
    def order(v: Verdict) -> tuple[bool, bool, int]:
        return v.kind != FAILURE, v.a == SECOND, v.rank

    return min((v for v in verdicts if v.kind != NOTHING), key=order, default=Verdict())


def raise_verdict(verdict: Verdict, header: Header) -> None:
    """Raise the error of a failure or a disagreement in the call of this header."""
    rank = verdict.rank
    if verdict.kind == FAILURE:
        raise PeerError(f"rank {rank} could not take part in {OPS[header.op]}. See the error that it raised.")
    if verdict.kind == DISAGREE:
        name = _SHARED[verdict.a]
        got: object = verdict.got
        want: object = verdict.want
        if name == "op":
            name, got, want = "the call", OPS[verdict.got], OPS[verdict.want]
        elif name == "num_bytes":
            name = "the bytes of an exchange"
        elif name == "plan":
            name = "the plan of the layout"
        elif name in ("weights", "gradients"):
            name, got, want = f"whether they pass {name}", bool(got), bool(want)
        raise EpMismatch(f"ranks disagree in {name}: rank {rank} has {got}, rank {verdict.first} has {want} "
                         f"(in {OPS[header.op]}). All ranks of all nodes must make the same calls in the "
                         f"same order.")
