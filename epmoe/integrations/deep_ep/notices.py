"""What ranks tell each other before a dispatch: how many tokens for which expert, and what kind of call."""

import torch

from ... import _C
from ...a2a.layer import EPAll2AllLayer
from ...comm.device import integer
from ...errors import EpIndexError, EpMismatch

MAX_LOCAL_EXPERTS = 1024  # of a rank
SAME = ("num_experts", "num_topk (0: without topk_idx)", "the bytes of a token", "the scales of a token",
        "num_max_tokens_per_rank", "do_expand", "expert_alignment with do_expand")
NUM_WORDS = 12  # T, SAME, tokens for that rank, whether an index is wrong, two 0; counts of experts follow


def check_num_experts(name, num_experts, num_ranks):
    number = integer(name, num_experts or 0)
    if number <= 0 or number % num_ranks or number > num_ranks * MAX_LOCAL_EXPERTS:
        raise ValueError(f"{name} {num_experts}: must be a multiple of {num_ranks} ranks, and at most "
                         f"{MAX_LOCAL_EXPERTS} for each")


class Notices:
    """Numbers that each rank sends to each rank: a row of int32 for each pair of ranks."""

    def __init__(self, world, device):
        self.world = world
        self.device = device
        self.layer = EPAll2AllLayer(world, world.size, MAX_LOCAL_EXPERTS + NUM_WORDS, 1,
                                    num_tot_experts=world.size, dtype=torch.float32, device=device)
        ranks = torch.arange(world.size, dtype=torch.int32, device=device)
        self._layout = self.layer.preprocess(ranks[:, None])  # row r goes to rank r, in every call

    @property
    def step(self):
        """The operation of exchange, for refuse()."""
        return self.layer, 0, _C.OP_DISPATCH

    def exchange(self, notes):
        """Send row r of notes [W, n] int32 to rank r; return a row from each rank.  Collective."""
        notes = torch.nn.functional.pad(notes, (0, self.layer.hidden - notes.shape[1])).view(torch.float32)
        return self.layer.dispatch(notes, layout=self._layout)[0].view(torch.int32)

    def announce(self, x, scales, topk_idx, tokens_per_rank, tokens_per_expert, elastic=(0, 0, 0)):
        """Tell all ranks about a dispatch, and check that all do the same.  Collective; the host waits.

        elastic: The last three of SAME, which only an ElasticBuffer has.

        Returns (T of each rank, the tokens that this rank receives, the tokens of its experts), on the host.
        """
        num_ranks, num_experts = self.world.size, len(tokens_per_expert)
        per_expert = tokens_per_expert.view(num_ranks, -1)
        is_wrong = torch.zeros((), dtype=torch.int32, device=self.device)
        if topk_idx is not None:
            is_wrong = ((topk_idx < -1) | (topk_idx >= num_experts)).any().to(torch.int32)
        same = (num_experts, 0 if topk_idx is None else topk_idx.shape[1], x.shape[1] * x.element_size(),
                0 if scales is None else scales.shape[1], *elastic)
        words = torch.tensor([len(x), *same], dtype=torch.int32, device=self.device)
        received = self.exchange(torch.cat([
            words.expand(num_ranks, -1), tokens_per_rank[:, None], is_wrong.expand(num_ranks, 1),
            per_expert.new_zeros(num_ranks, NUM_WORDS - len(SAME) - 3), per_expert], 1))
        rows = received[:, : NUM_WORDS + per_expert.shape[1]].tolist()
        self.layer.synchronize()  # raises what went wrong
        for rank, row in enumerate(rows):
            for i, name in enumerate(SAME, 1):
                if row[i] != rows[0][i]:
                    raise EpMismatch(f"dispatch: {name} must be the same on all ranks, but it is "
                                     f"{rows[0][i]} on rank 0 and {row[i]} on rank {rank}")
        for rank, row in enumerate(rows):
            if row[len(SAME) + 2]:
                raise EpIndexError(f"rank {rank}: an index of topk_idx is outside [-1, {num_experts})")
        return ([row[0] for row in rows], sum(row[len(SAME) + 1] for row in rows),
                [sum(counts) for counts in zip(*(row[NUM_WORDS:] for row in rows))])
