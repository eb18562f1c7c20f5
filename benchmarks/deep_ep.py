"""The peer DeepEP, where it can be imported: layout + dispatch + permute, and unpermute with weights +
combine.

The interface is deep_ep.Buffer of DeepEP V1 within one node; V2 still has it.  Its combine adds up one row
per (token, rank), without weights.  So unpermute first weights and adds up the experts' rows at their rank.
The index tables of permute and unpermute are made in advance and not timed, which favours DeepEP.
"""

import torch
import torch.distributed as dist

from .measure import slowest

NUM_NVL_BYTES = int(2e9)  # as in DeepEP's own test; twice what 48 SMs, 8 ranks and rows of 14336 bytes need
CHUNK_SLOTS = 256
CHUNKS = {"dispatch": (4, 6, 8, 12, 16, 24, 32), "combine": (1, 2, 4, 6, 9, 12, 16)}


class Library:
    """The module and one Buffer for all shapes."""

    def __init__(self, device):
        import deep_ep

        if dist.get_world_size() not in (2, 4, 8):
            raise ValueError(f"{dist.get_world_size()} ranks: DeepEP needs 2, 4 or 8 within a node")
        # Try what unpermute needs (Triton, a C compiler) now, before the other ranks rely on this one.
        token_row = torch.zeros(1, 1, dtype=torch.int32, device=device)
        unpermute(torch.zeros(1, 8, dtype=torch.bfloat16, device=device), token_row,
                  torch.zeros(1, 1, device=device))
        self.module = deep_ep
        self.buffer = deep_ep.Buffer(dist.group.WORLD, NUM_NVL_BYTES, explicitly_destroy=True)

    def close(self):
        self.buffer.destroy()


def load(cpu_group, device):
    """Return (Library, None), or (None, the reason) on all ranks.  Collective."""
    library, error = None, "there is only one rank"
    if cpu_group is not None:
        try:
            library = Library(device)
        # it must not stop the other measurements; the import of V2 can raise AssertionError
        except Exception as e:
            error = f"{type(e).__name__}: {e}".strip().split("\n")[0]
    if slowest(cpu_group, float(library is None)):
        return None, error if library is None else "it does not work on all ranks"
    return library, None


class DeepEP:
    """dispatch and combine of x [T, H], idx and weight [T, K], on num_sm SMs.

    Rows [M, H] are ordered by local expert, as epmoe's.
    """

    def __init__(self, library, x, idx, weight, num_experts, world_size, num_sm):
        self.module, self.buffer, self.num_sm = library.module, library.buffer, num_sm
        self.x, self.idx, self.weight = x, idx.to(self.module.topk_idx_t), weight
        self.num_experts, self.num_local_experts = num_experts, num_experts // world_size
        self.module.Buffer.set_num_sms(num_sm)
        self.config = {"dispatch": self.buffer.get_dispatch_config(world_size),
                       "combine": self.buffer.get_combine_config(world_size)}
        self.chunk = {"dispatch": None, "combine": None}  # None: DeepEP's own
        self._make_tables()

    def _layout_and_dispatch(self):
        per_rank, _, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(self.idx, self.num_experts)
        received, recv_idx, recv_weight, _, self.handle, _ = self.buffer.dispatch(
            self.x, num_tokens_per_rank=per_rank, is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.idx, topk_weights=self.weight, config=self.config["dispatch"])
        return received, recv_idx, recv_weight

    def _make_tables(self):
        """Compute the token of each row and the rows of each token, which are the same in every call."""
        _, recv_idx, self.recv_weight = self._layout_and_dispatch()
        token, choice = torch.nonzero(recv_idx >= 0, as_tuple=True)
        expert = recv_idx[token, choice]
        order = expert.argsort(stable=True)
        self.row_token = token[order]
        self.token_row = torch.full(recv_idx.shape, -1, dtype=torch.int32, device=recv_idx.device)
        row = torch.arange(len(order), dtype=torch.int32, device=recv_idx.device)
        self.token_row[token[order], choice[order]] = row
        ends = torch.bincount(expert, minlength=self.num_local_experts).cumsum(0, dtype=torch.int32)
        self.expert_offsets = torch.cat([ends.new_zeros(1), ends])

    def dispatch(self):
        """Run layout, dispatch and permute; return rows [M, H]."""
        return self._layout_and_dispatch()[0][self.row_token]

    def combine(self, rows):
        """Run unpermute with weights and combine; return sums [T, H] of rows [M, H] of the last dispatch."""
        partial = unpermute(rows, self.token_row, self.recv_weight)
        return self.buffer.combine(partial, self.handle, config=self.config["combine"])[0]

    def tune(self, time):
        """Choose the fastest chunk sizes.  time(fn) returns milliseconds that are the same on all ranks."""
        rows = self.dispatch()
        for stage, fn in (("dispatch", self._layout_and_dispatch), ("combine", lambda: self.combine(rows))):
            ms = {None: time(fn)}
            configs = {None: self.config[stage]}
            for chunk in CHUNKS[stage]:
                self.config[stage] = configs[chunk] = self.module.Config(self.num_sm, chunk, CHUNK_SLOTS)
                ms[chunk] = time(fn)
            self.chunk[stage] = min(ms, key=ms.get)
            self.config[stage] = configs[self.chunk[stage]]


def unpermute(rows, token_row, weight):
    """Return [R, H]: for each received token the sum over k of weight [r, k] * rows[token_row [r, k]].

    token_row is int32, where -1 means no row.  Sums are in float32.
    """
    if rows.device.type == "cuda":
        # one kernel, as a careful user would write it
        from .unpermute_triton import unpermute as fused

        return fused(rows, token_row, weight)
    out = torch.zeros(len(token_row), rows.shape[1])
    for k in range(token_row.shape[1]):
        there = token_row[:, k] >= 0
        out[there] += weight[there, k, None] * rows[token_row[there, k].long()].float()
    return out.to(rows.dtype)
