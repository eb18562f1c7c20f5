"""EPHandle, which ElasticBuffer.dispatch returns and combine takes."""

import torch

from ... import _C
from .notices import NUM_WORDS
from .routes import Routes, RoutesBySize
from .rows import as_rows, combine_tokens, count_choices, dispatch_tokens, pack, to_ranks_by_choice, unpack


def layer_sizes(num_ranks, num_experts, topk, alignment, do_expand):
    """Return the experts, choices and alignment of a dispatch's layers.

    Without do_expand there is one row for each (token, rank).
    """
    return (num_experts, topk, alignment) if do_expand else (num_ranks, num_ranks, 1)


def most_rows(num_ranks, num_experts, topk, max_tokens, alignment):
    """Return the most rows for choices that a rank can receive, with the padding of its experts."""
    num_local = num_experts // num_ranks
    rows = num_ranks * max_tokens * min(topk, num_local) + (alignment - 1) * num_local
    return -(-rows // alignment) * alignment


class EPHandle:
    """What ElasticBuffer.dispatch keeps for combine.

    Attributes:
        do_expand: Whether there is a row for each choice.
        num_experts: E.
        expert_alignment: The rows of an expert are a multiple of it.
        num_max_tokens_per_rank: The most tokens of a rank.
        topk_idx: [T, K].
        num_recv_tokens: The tokens that this rank receives; the most that can arrive without do_cpu_sync.
        num_expanded_tokens: The rows for each choice with padding, likewise.
        num_recv_tokens_per_expert_list: [L] counts with padding; empty without do_cpu_sync.
        psum_num_recv_tokens_per_scaleup_rank: [W] int32: tokens of ranks 0 to i.
        psum_num_recv_tokens_per_expert: [L] int32: with do_expand, the end of an expert's rows before its
            padding; else the padded counts of experts 0 to i.
        num_unaligned_recv_tokens_per_expert: [L] int32: the counts.
        recv_src_metadata: [num_recv_tokens, K + 2] int32: source rank * most tokens + token; source rank *
            K + first choice here; with do_expand the row of each choice, else -1.  -1 after the last token.
        dst_buffer_slot_idx: [T, K] int32: the number of the token among those for the rank of a choice.

    Examples:
        See ElasticBuffer.
    """

    token_metadata_at_forward = None
    channel_linked_list = None

    def __init__(self, buffer, x, scales, topk_idx, sizes, flags):
        """sizes: (E, most tokens of a rank, alignment, SMs or 0).  flags: (expand, host reads, copy idx)."""
        self.num_experts, self.num_max_tokens_per_rank, self.expert_alignment, self.num_sms = sizes
        self.do_expand, is_exact, do_copy = flags
        self.topk_idx = topk_idx.clone() if do_copy else topk_idx
        size, most, topk = buffer.num_ranks, self.num_max_tokens_per_rank, topk_idx.shape[1]
        self.num_local = self.num_experts // size
        per_rank, per_expert, _ = count_choices(topk_idx, self.num_experts, size)
        self.num_recv_tokens_per_expert_list = []
        align = self.expert_alignment
        if is_exact:
            elastic = most, int(self.do_expand), align if self.do_expand else 1
            _, self.num_recv_tokens, counts = buffer._notices.announce(x, scales, topk_idx, per_rank,
                                                                       per_expert, elastic)
            self.num_recv_tokens_per_expert_list = [-(-n // align) * align for n in counts]
            self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
            counts = torch.tensor(counts, dtype=torch.int32, device=buffer.device)
        else:
            notes = torch.nn.functional.pad(per_expert.view(size, -1), (NUM_WORDS, 0))
            received = buffer._notices.exchange(notes)
            counts = received[:, NUM_WORDS : NUM_WORDS + self.num_local].sum(0, dtype=torch.int32)
            self.num_recv_tokens = size * most
            self.num_expanded_tokens = most_rows(size, self.num_experts, topk, most, align)
        self.num_out_rows = self.num_expanded_tokens if self.do_expand else self.num_recv_tokens
        self.num_unaligned_recv_tokens_per_expert = counts
        padded = (counts + (align - 1)) // align * align
        ends = padded.cumsum(0, dtype=torch.int32)
        self.psum_num_recv_tokens_per_expert = ends - padded + counts if self.do_expand else ends
        choices = (self.topk_idx.contiguous() if self.do_expand
                   else to_ranks_by_choice(topk_idx, self.num_experts, size))
        self.plan = self._routes(buffer, topk, is_exact).plan(choices, self.num_out_rows)
        if not self.do_expand:
            self.plan.topk_idx = self.topk_idx
        buffer._plans.add(self.plan)
        self.psum_num_recv_tokens_per_scaleup_rank = self.plan.layout.recv_tokens.cumsum(
            0, dtype=torch.int32)
        is_choice = (topk_idx >= 0) & (topk_idx < self.num_experts)
        rank_of = torch.where(is_choice, topk_idx // self.num_local, 0).long()
        slots = self.plan.layout.token_slots.gather(1, rank_of)
        self.dst_buffer_slot_idx = torch.where(is_choice, slots, -1)
        self.recv_src_metadata = None  # of the first send
        self._is_here = None

    def _routes(self, buffer, topk, is_exact):
        sizes = layer_sizes(buffer.num_ranks, self.num_experts, topk, self.expert_alignment, self.do_expand)
        num_experts, topk, align = sizes

        def make(max_tokens):
            options = {"num_sm": self.num_sms} if self.num_sms and buffer.device.type == "cuda" else {}
            if self.do_expand and buffer.allow_multiple_reduction:
                options["enable_local_combine"] = True
            if not is_exact:
                options["capacity"] = most_rows(buffer.num_ranks, num_experts, topk, max_tokens, align)
            return Routes(buffer.world, buffer.device, max_tokens, num_experts, topk, expert_alignment=align,
                          **options)

        by_size = buffer._routes.setdefault((sizes, self.do_expand, is_exact), RoutesBySize())
        return by_size.at_least(self.num_max_tokens_per_rank, make)

    def _tensors(self):
        return (*self.plan.tensors(), self.topk_idx, self.recv_src_metadata, self._is_here,
                self.num_unaligned_recv_tokens_per_expert)

    def _send(self, x, scales, topk_weights):
        """Return (rows, scales, local indices, weights) that this rank receives."""
        if not self.do_expand:
            rows, scales, idx, topk_weights, numbers = dispatch_tokens(self.plan, x, scales, self.topk_idx,
                                                                       topk_weights, self.num_local)
            if self.recv_src_metadata is None:
                self._is_here = idx >= 0
                self._set_metadata(numbers, self._is_here, torch.full_like(idx, -1, dtype=torch.int32))
            return rows, scales, idx, topk_weights
        self.plan.routes.note(_C.OP_DISPATCH, x, scales)
        rows, topk_weights = self.plan.dispatch(as_rows(x), topk_weights)
        rows = rows.view(x.dtype)
        if scales is not None:
            (scales,) = unpack(self.plan.dispatch(pack(scales))[0], scales)
        if self.recv_src_metadata is None:
            self._read_records()
        return rows, scales, None, topk_weights

    def _combine(self, x, topk_weights, biases):
        """Return the sums [T, H] and the weights [T, K] or None."""
        if not self.do_expand:
            if topk_weights is not None:
                topk_weights = topk_weights.masked_fill(~self._is_here, 0)
            return combine_tokens(self.plan, x, topk_weights, biases)
        self.plan.routes.note(_C.OP_COMBINE, x)
        return self.plan.combine(x, topk_weights, biases)

    # ---- parts ----

    def _set_metadata(self, tokens, is_here, places):
        """Set recv_src_metadata from the number at its source and the choices here of each token."""
        n, topk = is_here.shape
        i = torch.arange(n, dtype=torch.int32, device=tokens.device)
        ends = self.psum_num_recv_tokens_per_scaleup_rank
        source = torch.searchsorted(ends, i, right=True, out_int32=True).clamp(max=len(ends) - 1)
        first = torch.zeros_like(i) if n == 0 else is_here.to(torch.int32).argmax(1).to(torch.int32)
        table = torch.cat([(source * self.num_max_tokens_per_rank + tokens)[:, None],
                           (source * topk + first)[:, None], places], 1)
        self.recv_src_metadata = torch.where((i < ends[-1])[:, None], table, -1)

    def _read_records(self):
        """Set recv_src_metadata from what dispatch keeps for combine."""
        topk, device = self.topk_idx.shape[1], self.topk_idx.device
        ends = self.psum_num_recv_tokens_per_scaleup_rank
        i = torch.arange(self.num_recv_tokens, dtype=torch.int32, device=device)
        source = torch.searchsorted(ends, i, right=True).clamp(max=len(ends) - 1)
        slot = i - (ends - self.plan.layout.recv_tokens)[source]
        records = self.plan.layout.recv.view(len(ends), -1, 1 + topk)
        records = records[source, slot.clamp(max=records.shape[1] - 1).long()]
        places = torch.where((i < ends[-1])[:, None], records[:, 1:], -1)
        self._set_metadata(records[:, 0], places >= 0, places)
