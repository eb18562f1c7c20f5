"""EPLayout: the plan of one call, as its parts."""

import torch

from . import _C


class EPLayout:
    """The plan of one call: where every choice of this rank goes, and what this rank receives.

    Reusable: dispatch(layout=...) repeats a dispatch, combine brings the rows of its dispatch home.
    Letters: W ranks, E experts, L = E/W of them here, T tokens, K choices, M rows received.
    """

    __slots__ = ("layer", "plan", "recv", "num_tokens", "buffer", "_num_rows", "_at")

    def __init__(self, layer, plan, num_tokens, buffer, num_rows):
        self.layer, self.plan, self.num_tokens, self.buffer, self._num_rows = layer, plan, num_tokens, buffer, num_rows
        self.recv = None  # which row came from which token: dispatch gives it, combine needs it
        self._at = None

    def _offset(self, name):
        """Where a part of the plan begins.  The first two stand before all that depends on T, so the layer knows
        them: a compiler that traces can read those without calling the module."""
        if name in ("counts", "expert_row"):
            return self.layer._plan_front[name]
        if self._at is None:
            self._at = _C.plan_layout(self.layer._config, self.num_tokens)
        return self._at[name]

    def _part(self, name, *shape):
        n = 1
        for d in shape:
            n *= d
        return self.plan.narrow(0, self._offset(name), n).view(shape)

    @property
    def num_rows(self):
        """M: rows this rank receives.  In fixed-capacity mode this reads the device, each time: a replayed graph
        makes a new plan in the same place."""
        return int(self.plan[_C.HEAD_NUM_ROWS]) if self._num_rows is None else self._num_rows

    @property
    def counts(self):
        """[W, E] int32: choices that rank w routes to expert e."""
        return self._part("counts", self.layer.world_size, self.layer.num_experts)

    @property
    def expert_offsets(self):
        """[L + 1] int32: first row of each local expert; the last is M."""
        return self._part("expert_row", self.layer.num_local_experts + 1)

    @property
    def tokens_per_expert(self):
        """[L] int32: rows of each local expert."""
        return self.expert_offsets.diff()

    @property
    def token_dst_scatter_idx(self):
        """[T, K] int32: row of each choice at its expert's rank; -1 for a dropped choice."""
        return self._part("token_row", self.num_tokens, self.layer.topk)

    @property
    def token_sort_indices(self):
        """[T * K] int32: t * K + k by expert, token, choice; dropped choices leave -1 at the end."""
        return self._part("sort", self.num_tokens * self.layer.topk)

    @property
    def token_slots(self):
        """[T, W] int32: position of a token among those that a rank sends home; -1 if it does not go there."""
        return self._part("token_slot", self.num_tokens, self.layer.world_size)

    @property
    def send_tokens(self):
        """[W] int32: distinct tokens that this rank sends to each rank (its own included)."""
        return self.plan.narrow(0, _C.HEAD_NUM_SEND, self.layer.world_size)

    @property
    def recv_tokens(self):
        """[W] int32: distinct tokens that this rank gets from each rank."""
        return self.plan.narrow(0, _C.HEAD_NUM_RECV, self.layer.world_size)

    @property
    def rows_per_rank(self):
        """[W] int32: M of every rank."""
        return self.plan.narrow(0, _C.HEAD_RANK_ROWS, self.layer.world_size)

    @property
    def recv_offsets(self):
        """[W, L, W] int32: the first row at rank r of what source rank w routes to r's local expert l, as [r, l, w].  Made from counts
        when asked for."""
        per_source = self.counts.view(self.layer.world_size, self.layer.world_size, -1).permute(1, 2, 0)  # [r, l, w]
        rows = per_source.reshape(self.layer.world_size, -1)
        return (rows.cumsum(1, dtype=torch.int32) - rows).view(per_source.shape)

    @property
    def num_tiles(self):
        """M tiles (128 rows, none across experts) of the grouped GEMM.  Reads the device."""
        return int(self.plan[_C.HEAD_NUM_TILES])

    @property
    def tile_expert(self):
        """[max tiles] int32: local expert of each tile; valid up to num_tiles."""
        return self._part("tile_expert", self._offset("max_tiles"))

    @property
    def tile_row(self):
        """[max tiles] int32: first row of each tile; valid up to num_tiles."""
        return self._part("tile_row", self._offset("max_tiles"))

    def __repr__(self):
        return f"epmoe.EPLayout(num_tokens={self.num_tokens}, num_rows={self._num_rows}, buffer={self.buffer})"
