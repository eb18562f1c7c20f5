"""The methods of Buffer and ElasticBuffer that move no tokens."""

import torch

from ... import _C
from ...a2a.base import default_num_sm
from ...comm.world import World
from .config import Config, layer_bytes, rows_bytes
from .utils import EventHandle, EventOverlap


class Settings:
    """The methods of Buffer that move no tokens: settings, streams, and what is not available."""

    num_sms = 20
    _chosen_sms = None

    @staticmethod
    def is_sm90_compiled():
        """Return True: rows of FP8 travel on every backend.

        Returns:
            True.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer.is_sm90_compiled()
            True
        """
        return True

    @staticmethod
    def set_num_sms(new_num_sms):
        """Set the SMs that move tokens on a GPU, for layers that are created later.

        Call it before the first dispatch.  Without it, epmoe's own number holds.

        Args:
            new_num_sms: An even number.

        Raises:
            ValueError: For an odd number.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer.set_num_sms(23)
            Traceback (most recent call last):
            ValueError: num_sms 23: must be even
        """
        if new_num_sms % 2:
            raise ValueError(f"num_sms {new_num_sms}: must be even")
        Settings.num_sms = Settings._chosen_sms = new_num_sms

    @staticmethod
    def capture():
        """Return an EventOverlap of the current stream.

        Returns:
            An EventOverlap, to pass as previous_event.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer.capture().current_stream_wait()
        """
        return EventOverlap(EventHandle())

    def get_comm_stream(self):
        """Return the stream on which asynchronous calls run.

        Returns:
            A torch.cuda.Stream; without CUDA a torch.cpu.Stream.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.Buffer(epmoe.World(), device="cpu")
            >>> type(buffer.get_comm_stream()).__name__
            'Stream'
        """
        return self._streams.comm

    @staticmethod
    def get_dispatch_config(num_ranks):
        """Return a Config, which has no effect.

        Args:
            num_ranks: Not read.

        Returns:
            A Config with num_sms of this class.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer.get_dispatch_config(8).num_max_nvl_chunked_recv_tokens
            256
        """
        return Config(Settings.num_sms)

    @staticmethod
    def get_combine_config(num_ranks):
        """Return a Config, which has no effect.

        Args:
            num_ranks: Not read.

        Returns:
            A Config with num_sms of this class.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer.get_combine_config(8).num_max_nvl_chunked_recv_tokens
            256
        """
        return Config(Settings.num_sms)

    def internode_dispatch(self, *args, **kwargs):
        """Not available: the ranks of epmoe are on one node.  Call dispatch.

        Args:
            *args: Not read.
            **kwargs: Not read.

        Raises:
            NotImplementedError: Always.

        Examples:
            See docs/deep_ep.md.
        """
        raise NotImplementedError("internode_dispatch: the ranks of epmoe are on one node; call dispatch")

    def internode_combine(self, *args, **kwargs):
        """Not available: the ranks of epmoe are on one node.  Call combine.

        Args:
            *args: Not read.
            **kwargs: Not read.

        Raises:
            NotImplementedError: Always.

        Examples:
            See docs/deep_ep.md.
        """
        raise NotImplementedError("internode_combine: the ranks of epmoe are on one node; call combine")

    def get_local_buffer_tensor(self, *args, **kwargs):
        """Not available: epmoe's buffers have a format of their own.

        Args:
            *args: Not read.
            **kwargs: Not read.

        Raises:
            NotImplementedError: Always.

        Examples:
            See docs/deep_ep.md.
        """
        raise NotImplementedError("get_local_buffer_tensor: the memory of epmoe's layers is not for "
                                  "programs; use an epmoe.SymmetricHeap")


class ElasticSettings:
    """The methods of ElasticBuffer that move no tokens: streams, and numbers that DeepEP computes."""

    @staticmethod
    def capture():
        """Return an EventHandle of the current stream.

        Returns:
            An EventHandle, to pass as previous_event.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.ElasticBuffer.capture().current_stream_wait()
        """
        return EventHandle()

    def get_comm_stream(self):
        """Return the stream on which asynchronous calls run.

        Returns:
            A torch.cuda.Stream; without CUDA a torch.cpu.Stream.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.ElasticBuffer(epmoe.World(), device="cpu")
            >>> type(buffer.get_comm_stream()).__name__
            'Stream'
        """
        return self._streams.comm

    def get_physical_domain_size(self):
        """Return (1, W): all ranks are on one node.

        Returns:
            A tuple of two ints.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.ElasticBuffer(epmoe.World(), device="cpu")
            >>> buffer.get_physical_domain_size()
            (1, 1)
        """
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self):
        """Return (1, W): all ranks are on one node.

        Returns:
            A tuple of two ints.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.ElasticBuffer(epmoe.World(), device="cpu")
            >>> buffer.get_logical_domain_size()
            (1, 1)
        """
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0,
                                sm_read_gbs=200, sm_write_gbs=50):
        """Return the SMs that epmoe uses by default; on the CPU, where nothing uses it, 4.

        Args:
            num_experts: Not read.
            num_topk: Not read.
            num_scaleout_topk: Not read.
            rdma_gbs: Not read.
            nvlink_gbs: Not read.
            sm_read_gbs: Not read.
            sm_write_gbs: Not read.

        Returns:
            An int, to pass as num_sms.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.ElasticBuffer(epmoe.World(), device="cpu")
            >>> buffer.get_theoretical_num_sms(256, 8)
            4
        """
        return max(4, default_num_sm(self.device, 4096))

    def get_theoretical_num_qps(self, num_sms):
        """Return a number to pass as num_qps, which has no effect.

        Args:
            num_sms: The SMs that move tokens.

        Returns:
            An int.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.ElasticBuffer(epmoe.World(), device="cpu")
            >>> buffer.get_theoretical_num_qps(4)
            65
        """
        return min(num_sms * 16 + 1, self.num_allocated_qps)

    @staticmethod
    def get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False,
                             allow_hybrid_mode=True, allow_multiple_reduction=True):
        """Return the bytes of the buffers of bfloat16 rows, without those of indices, weights and scales.

        Args:
            group: A ProcessGroup, or an epmoe.World.
            num_max_tokens_per_rank: The most tokens of a rank.
            hidden: H.
            num_topk: K.
            use_fp8_dispatch: Not read.
            allow_hybrid_mode: Not read.
            allow_multiple_reduction: As for ElasticBuffer.

        Returns:
            An int, a multiple of 2 MiB.

        Raises:
            ValueError: For sizes that epmoe does not have.
            EpError: As World.of.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.ElasticBuffer.get_buffer_size_hint(epmoe.World(), 4096, 7168, 8) // 2**20
            58
        """
        size = World.of(group).size
        expanded = layer_bytes(size, size, max(1, num_topk), num_max_tokens_per_rank, hidden, torch.bfloat16,
                               _C.COMBINE_LOCAL if allow_multiple_reduction else _C.COMBINE_SCATTER)
        return max(expanded, rows_bytes(size, num_max_tokens_per_rank, hidden, torch.bfloat16))
