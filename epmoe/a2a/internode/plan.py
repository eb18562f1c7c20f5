"""NodesLayout: the plan of a dispatch over several nodes, from the indices of the rail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..layout import EPLayout, Layout

if TYPE_CHECKING:
    from .layer import InternodeLayer

Segments = list[tuple[int, int, int]]  # (node, first, end) of rows in memory


class NodesLayout:
    """The plan of one dispatch over several nodes.

    A layer over several nodes returns it in the place of an EPLayout.  Each rank of a node has the tokens of
    its rail for the node: its own first, then those of the other nodes, in node order.  The layout of the
    node, `team`, says where their rows are.

    Letters: N nodes, L ranks of a node, W = N * L, K choices, M rows that this rank receives, A tokens that
    this rank has for its node.

    With rail_capacity (fixed.py) send_tokens and recv_tokens read the device on each access.

    Attributes:
        layer: The layer that made the plan, and the only one that can use it.
        team: The EPLayout of the node's ranks for the A tokens.  Its expert numbers are those of the node.
        num_tokens: T, the tokens of this rank.
        buffer: The communication buffer of the plan.
        send_tokens: A list of N numbers: the tokens of this rank that have an expert on each node.
        recv_tokens: A list of N numbers: the tokens of each node's rank that have an expert on this node.
        num_rows, expert_offsets, tokens_per_expert, tokens_per_expert_list, unpadded_tokens_per_expert,
            num_tiles, tile_expert, tile_row: As for EPLayout, of this rank.
        chunks: None; or, where an EPMoE has moved the tokens in C chunks, a list of C + 1 layouts: of the
            own node's tokens, and of each chunk of the others.  Each has its `team`; this one has none, and
            num_rows and the tokens per expert are sums.
    """

    is_void = False  # whether its plan has failed, as the host learned later
    of_experts_in_16_bits = False  # of an EPMoE, whose backward has no second derivatives then
    indices: Tensor  # [A, K] int32: the experts, on this node, of the tokens that this rank has
    send_idx: Tensor  # [S] int64: the tokens that this rank sends, its own node's first
    owner: Tensor  # [T, K]: the node of each choice
    places: Tensor  # of a chunk: where its received tokens are among the A

    def __init__(self, layer: InternodeLayer, num_tokens: int, buffer: int, send: list[int],
                 recv: list[int]) -> None:
        self.layer = layer
        self.number = layer._num_plans  # the same on all ranks
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._sent = send
        self._received = recv
        self.team: Layout | None = None
        self.chunks: list[NodesLayout] | None = None  # where an EPMoE has moved the tokens in chunks
        self.dispatched = False
        # Nodes in the order in which rows are in memory: this one first, because its rows stay.
        self.order = [layer.node, *(n for n in range(layer.num_nodes) if n != layer.node)]

    @property
    def send_tokens(self) -> list[int]:
        """N numbers: the tokens of this rank that have an expert on each node."""
        return self._sent

    @property
    def recv_tokens(self) -> list[int]:
        """N numbers: the tokens of each node's rank that have an expert on this node."""
        return self._received

    def take(self, goes_to: Tensor, owner: Tensor) -> None:
        """Keep what this rank sends: goes_to [N, T], and owner [T, K], the node of each choice or -1."""
        total = sum(self.send_tokens)
        self.send_idx = torch.nonzero_static(goes_to[self.order], size=total)[:, 1].contiguous()
        self.owner = owner

    @classmethod
    def of_tensors(cls, layer: InternodeLayer, send_idx: Tensor, owner: Tensor, counts: Tensor) -> Self:
        """Return a layout with all that rows.py needs, of the results of nodes_plan."""
        send, recv, number = counts.tolist()
        self = cls(layer, owner.shape[0], 0, send, recv)
        self.number = number[0]
        self.send_idx = send_idx
        self.owner = owner
        return self

    def parts(self, num_chunks: int) -> list[NodesLayout]:
        """Return the layouts of the own node's tokens, and of each chunk of those that cross the rail.

        They have the tokens that are sent and received; `places` are those of the received ones among the A.
        """
        return [self._part(chunk, num_chunks) for chunk in range(num_chunks + 1)]

    def _part(self, chunk: int, num_chunks: int) -> NodesLayout:
        def cut(counts: list[int]) -> list[tuple[int, int]]:
            ranges = []
            for node, first, end in self.segments(counts):
                num, begin, end = end - first, 0, 0
                if node == self.layer.node:
                    end = num if chunk == 0 else 0
                elif chunk:
                    begin, end = num * (chunk - 1) // num_chunks, num * chunk // num_chunks
                ranges.append((first + begin, first + end))
            return ranges

        sent, received = cut(self.send_tokens), cut(self.recv_tokens)
        part = NodesLayout(self.layer, self.num_tokens, self.buffer, [e - b for b, e in sent],
                           [e - b for b, e in received])
        part.owner = self.owner
        part.send_idx = torch.cat([self.send_idx[b:e] for b, e in sent])
        part.indices = torch.cat([self.indices[b:e] for b, e in received])
        part.places = torch.cat([torch.arange(b, e, device=self.layer.device) for b, e in received])
        return part

    def segments(self, counts: list[int]) -> Segments:
        """Return [(node, first, end)] of rows in memory, in node order."""
        ends: dict[int, tuple[int, int, int]] = {}
        at = 0
        for node in self.order:
            ends[node] = (node, at, at + counts[node])
            at += counts[node]
        return [ends[node] for node in range(len(counts))]

    @property
    def num_own(self) -> int:
        """The tokens of this rank that stay on its own node."""
        return self.send_tokens[self.layer.node]

    def splits(self) -> tuple[list[int], list[int]]:
        """Return (sent, received): the rows for and of each node that cross the rail."""
        sent, received = list(self.send_tokens), list(self.recv_tokens)
        sent[self.layer.node] = received[self.layer.node] = 0
        return sent, received

    def sent_segments(self) -> Segments:
        """Return [(node, first, end)] of the rows that leave and return, in node order."""
        return self.segments(self.send_tokens)

    def pick(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return (own, others): the rows of t [T, ..] that stay, and those that cross the rail."""
        return t[self.send_idx[: self.num_own]], t[self.send_idx[self.num_own :]]

    def make_sums(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros to which rows are added: [T, ..], with another row for unused places, if any."""
        return like.new_zeros(len(self.owner), like.shape[1], dtype=dtype)

    def finish_sums(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sums [T, ..] in a dtype."""
        return total.to(dtype)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_TEAM and self.team is not None:
            return getattr(self.team, name)
        if name in _SUMS and self.chunks is not None:
            return _SUMS[name]([getattr(part.team, name) for part in self.chunks])
        if name in vars(EPLayout):
            raise AttributeError(f"{name}: a layout over several nodes does not have it; layout.team has "
                                 f"that of the ranks of this node")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self) -> str:
        return (f"NodesLayout(num_tokens={self.num_tokens}, send_tokens={self.send_tokens}, "
                f"recv_tokens={self.recv_tokens}, buffer={self.buffer})")


_OF_TEAM = {"num_rows", "_num_rows", "expert_offsets", "tokens_per_expert", "tokens_per_expert_list",
            "unpadded_tokens_per_expert", "num_tiles", "tile_expert", "tile_row"}
_SUMS: dict[str, Callable[[list[Any]], Any]] = {
    "num_rows": sum, "tokens_per_expert": sum, "unpadded_tokens_per_expert": sum,
    "tokens_per_expert_list": lambda lists: [sum(of_expert) for of_expert in zip(*lists)]}


def local_indices(layer: InternodeLayer, everyone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the choices of the rail's tokens on this node, and what the host must know of them.

    everyone: [N, T_max, K] int32, the indices of the rail's tokens, -1 after the last token.

    Returns (local, hit, facts): local [N, T_max, K] int32, the expert's number on this node, or -1 where it
    is on another; hit [N, T_max], whether a token has an expert here; facts [3, N] int64: the tokens from
    each node, the position of its first index that is out of range (-1 if there is none), and that index.
    """
    num = layer.num_experts // layer.num_nodes
    local = everyone - layer.node * num
    is_here = (local >= 0) & (local < num)
    hit = is_here.any(2)
    flat = everyone.flatten(1)
    is_bad = (flat < -1) | (flat > layer.num_experts)
    first = is_bad.to(torch.uint8).argmax(1)
    facts = torch.stack([hit.sum(1), torch.where(is_bad.any(1), first, -1),
                         flat.gather(1, first[:, None])[:, 0].long()])
    return torch.where(is_here, local, -1), hit, facts


def destinations(layer: InternodeLayer, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return (goes_to [N, T], owner [T, K]): whether a token has an expert on a node; a choice's node."""
    num = layer.num_experts // layer.num_nodes
    is_kept = (indices >= 0) & (indices < layer.num_experts)
    owner = torch.where(is_kept, indices // num, -1)
    nodes = torch.arange(layer.num_nodes, device=indices.device)
    return (owner[None] == nodes[:, None, None]).any(2), owner


def arrivals(layout: NodesLayout, local: Tensor, hit: Tensor) -> Tensor:
    """Return [A, K] int32: the experts, on this node, of the tokens that this rank has for it."""
    total = sum(layout.recv_tokens)
    at = torch.nonzero_static(hit[layout.order], size=total)
    return local[layout.order][at[:, 0], at[:, 1]].contiguous()
