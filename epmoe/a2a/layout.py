"""EPLayout: the plan of one dispatch, and its parts as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .. import _C

if TYPE_CHECKING:
    from ..moe.balance import Helps
    from .internode.plan import NodesLayout
    from .layer import EPAll2AllLayer

Layout: TypeAlias = "EPLayout | NodesLayout"  # of a layer on one node, or over several


class EPLayout:
    """The plan of one dispatch: where each choice of this rank goes, and what this rank receives.

    EPAll2AllLayer.preprocess and dispatch create it.  It can be used again: dispatch(layout=...) repeats the
    dispatch, and combine returns the rows of the latest dispatch with it.  Its tensors are views of one plan
    tensor on the layer's device; do not write to them.

    Letters: W ranks, E experts, L = E/W experts of this rank, T tokens, K choices per token, M rows that this
    rank receives, with the padding rows of a layer with expert_alignment or expert_capacity.

    Attributes:
        layer: The layer that made the plan, and the only one that can use it.
        plan: The plan: an int32 tensor on the layer's device.
        recv: Which row came from which token: int32, filled by dispatch and needed by combine.  None before.
        num_tokens: T.
        buffer: The communication buffer of the plan.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 2, num_tot_experts=2, device="cpu")
        >>> layout = layer.preprocess(torch.tensor([[0, 1], [1, -1]]))
        >>> layout.num_rows
        3
        >>> layout.expert_offsets.tolist()
        [0, 1, 3]
        >>> layout.token_dst_scatter_idx.tolist()
        [[0, 1], [2, -1]]
        >>> layer.finalize()
    """

    __slots__ = ("layer", "plan", "recv", "num_tokens", "buffer", "_num_rows", "_expert_rows", "_at",
                 "_helps")

    def __init__(self, layer: EPAll2AllLayer, plan: Tensor, num_tokens: int, buffer: int,
                 num_rows: int | None = None) -> None:
        self.layer = layer
        self.plan = plan
        self.recv: Tensor | None = None
        self.num_tokens = num_tokens
        self.buffer = buffer
        self._num_rows = num_rows  # None: only the device knows
        self._expert_rows: list[int] | None = None  # of each local expert, with host_counts
        self._helps: Helps | None = None  # of a call of EPMoE that balanced its rows
        self._at: dict[str, int] | None = None  # name of a part -> offset, once it is needed

    def _offset(self, name: str) -> int:
        """Return where a part of the plan begins.

        counts and expert_row come before all parts whose offset depends on T, so the layer knows theirs: a
        compiler that traces can read these two without calling the module.
        """
        if name in ("counts", "expert_row"):
            return self.layer._plan_front[name]
        if self._at is None:
            self._at = _C.plan_layout(self.layer._config, self.num_tokens)
        return self._at[name]

    def _part(self, name: str, *shape: int) -> Tensor:
        n = 1
        for d in shape:
            n *= d
        return self.plan.narrow(0, self._offset(name), n).view(shape)

    @property
    def num_rows(self) -> int:
        """M, the number of rows that this rank receives.

        With a capacity this reads the device on each access, because a replayed CUDA graph writes a new plan
        to the same place.
        """
        return int(self.plan[_C.HEAD_NUM_ROWS]) if self._num_rows is None else self._num_rows

    @property
    def counts(self) -> Tensor:
        """[W, E] int32: the number of choices that rank w routes to expert e."""
        return self._part("counts", self.layer.world_size, self.layer.num_experts)

    @property
    def expert_offsets(self) -> Tensor:
        """[L + 1] int32: the first row of each local expert; the last element is M."""
        return self._part("expert_row", self.layer.num_local_experts + 1)

    @property
    def tokens_per_expert(self) -> Tensor:
        """[L] int32: the number of rows of each local expert, with padding rows."""
        return self.expert_offsets.diff()

    @property
    def tokens_per_expert_list(self) -> list[int]:
        """[L] ints on the host: the number of rows of each local expert, with padding rows.

        A layer with host_counts has read it together with num_rows.  Otherwise this reads the device on each
        access.
        """
        return self.tokens_per_expert.tolist() if self._expert_rows is None else list(self._expert_rows)

    @property
    def unpadded_tokens_per_expert(self) -> Tensor:
        """[L] int32: the number of rows of each local expert, without padding rows.

        They are the first ones of the expert.
        """
        first = self.layer.rank * self.layer.num_local_experts
        of_local = self.counts.narrow(1, first, self.layer.num_local_experts)
        return of_local.sum(0, dtype=torch.int32)

    @property
    def helps(self) -> list[tuple[int, int, int]]:
        """[(expert, rank that helped, number of rows)]: what ranks computed for others.

        Of a call of EPMoE with balance=, the same on all ranks; else empty.
        """
        return [] if self._helps is None else self._helps.by_rank(self.layer.num_local_experts)

    @property
    def token_dst_scatter_idx(self) -> Tensor:
        """[T, K] int32: the row of each choice at its expert's rank; -1 for a dropped choice."""
        return self._part("token_row", self.num_tokens, self.layer.topk)

    @property
    def token_sort_indices(self) -> Tensor:
        """[T * K] int32: t * K + k, sorted by expert, token, choice.  Dropped choices leave -1 at the end."""
        return self._part("sort", self.num_tokens * self.layer.topk)

    @property
    def token_slots(self) -> Tensor:
        """[T, W] int32: the position of token t among the tokens of this rank that rank w returns.

        -1 where the token does not go to rank w.
        """
        return self._part("token_slot", self.num_tokens, self.layer.world_size)

    @property
    def send_tokens(self) -> Tensor:
        """[W] int32: the number of distinct tokens that this rank sends to each rank, itself included."""
        return self.plan.narrow(0, _C.HEAD_NUM_SEND, self.layer.world_size)

    @property
    def recv_tokens(self) -> Tensor:
        """[W] int32: the number of distinct tokens that this rank receives from each rank."""
        return self.plan.narrow(0, _C.HEAD_NUM_RECV, self.layer.world_size)

    @property
    def rows_per_rank(self) -> Tensor:
        """[W] int32: M of every rank."""
        return self.plan.narrow(0, _C.HEAD_RANK_ROWS, self.layer.world_size)

    @property
    def recv_offsets(self) -> Tensor:
        """[W, L, W] int32: element [r, l, w] is the first row, at rank r, that rank w sends to r's expert l.

        Computed from counts on each access.
        """
        world_size, align = self.layer.world_size, self.layer.expert_alignment
        per_source = self.counts.view(world_size, world_size, -1).permute(1, 2, 0)  # [r, l, w]
        ends = per_source.cumsum(2, dtype=torch.int32)
        rows = (ends[:, :, -1] + (align - 1)) // align * align
        if self.layer.expert_capacity is not None:
            rows = torch.full_like(rows, self.layer.expert_capacity)
        return (rows.cumsum(1, dtype=torch.int32) - rows)[:, :, None] + ends - per_source

    @property
    def num_tiles(self) -> int:
        """The number of M tiles of the grouped GEMM.  A tile has at most 128 rows, all of one expert.

        Reads the device.
        """
        return int(self.plan[_C.HEAD_NUM_TILES])

    @property
    def tile_expert(self) -> Tensor:
        """[max tiles] int32: the local expert of each tile; valid up to num_tiles."""
        return self._part("tile_expert", self._offset("max_tiles"))

    @property
    def tile_row(self) -> Tensor:
        """[max tiles] int32: the first row of each tile; valid up to num_tiles."""
        return self._part("tile_row", self._offset("max_tiles"))

    def __repr__(self) -> str:
        return (f"epmoe.EPLayout(num_tokens={self.num_tokens}, num_rows={self._num_rows}, "
                f"buffer={self.buffer})")
