"""Config, the tuning of DeepEP's queues, and how large its buffers would be."""

import functools
import typing

import torch

from ... import _C
from ...a2a.base import DTYPES, Config as LayerConfig

ALIGNMENT = 2 << 20  # of the sizes of buffers, bytes


class Config(typing.NamedTuple):
    """The tuning of a dispatch or combine of DeepEP.  epmoe has no queues: all fields are without effect.

    Args:
        num_sms: As in DeepEP.  Buffer.set_num_sms has an effect.
        num_max_nvl_chunked_send_tokens: As in DeepEP, without effect.
        num_max_nvl_chunked_recv_tokens: As in DeepEP, without effect.
        num_max_rdma_chunked_send_tokens: As in DeepEP, without effect.
        num_max_rdma_chunked_recv_tokens: As in DeepEP, without effect.

    Examples:
        >>> from epmoe.integrations import deep_ep
        >>> deep_ep.Config(24, 8, 256).num_sms
        24
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        """Return the bytes of epmoe's buffers for 4096 tokens of each rank, as a number to pass to Buffer.

        Args:
            hidden_bytes: Bytes of a token.
            num_ranks: W, 1 to 8.

        Returns:
            An int.  Buffer takes it and ignores it: epmoe's buffers grow with the tokens.

        Raises:
            ValueError: For sizes that epmoe does not have.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Config().get_nvl_buffer_size_hint(14336, 8) // 2**20
            454
        """
        return rows_bytes(num_ranks, 4096, hidden_bytes // 4, torch.float32)

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        """Return 0: the ranks of epmoe are on one node.

        Args:
            hidden_bytes: Not read.
            num_ranks: Not read.

        Returns:
            0.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Config().get_rdma_buffer_size_hint(14336, 8)
            0
        """
        return 0


def rows_bytes(num_ranks, max_tokens, hidden, dtype):
    """Return the bytes of a layer with one row for each (token, rank), rounded up to ALIGNMENT."""
    return layer_bytes(num_ranks, num_ranks, num_ranks, max_tokens, hidden, dtype, _C.COMBINE_SCATTER)


@functools.lru_cache(256)
def layer_bytes(num_ranks, num_experts, topk, max_tokens, hidden, dtype, mode, capacity=None):
    """Return the bytes of a layer, rounded up to ALIGNMENT.

    Raises ValueError for sizes that no layer has.
    """
    capacity = num_ranks * max_tokens * topk if capacity is None else capacity
    num_bytes = _C.layer_bytes(LayerConfig(
        ranks=num_ranks, num_experts=num_experts, topk=topk, max_tokens=max_tokens, hidden=hidden,
        dtype=DTYPES[dtype], combine_mode=mode, expert_alignment=1, expert_capacity=0, capacity=capacity,
        num_buffers=1, num_sm=1, reserve_sms=0, host_counts=0, spare_buffers=0))
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
