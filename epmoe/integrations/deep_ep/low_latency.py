"""The low-latency half of Buffer, on LowLatencyAll2All."""

import collections.abc

import torch

from ... import _C
from ...a2a.low_latency import LowLatencyAll2All
from ...a2a.low_latency import LowLatencyHandle
from ...comm.device import integer
from .config import ALIGNMENT, layer_bytes
from .notices import check_num_experts
from .refusal import refuse
from .rows import check_tensor, check_topk_idx
from .utils import EventOverlap

_WEIGHTS_HIDDEN = 8  # numbers of a row that travels only for its weights


class DecodeHandle(collections.abc.Sequence):
    """What low_latency_dispatch keeps for low_latency_combine, a sequence as DeepEP's tuple.

    Its elements are src_info [L, W * max] int32 (the token of each row at its source), layout_range [L, W]
    int64 (first row << 32 | rows, of each source), max, H and E.  The first two are computed when they are
    read.
    """

    def __init__(self, key, a2a, handle, topk_idx):
        self.key, self.a2a, self.handle, self.topk_idx = key, a2a, handle, topk_idx

    def __len__(self):
        return 5

    def __getitem__(self, i):
        if isinstance(i, slice):
            return tuple(self)[i]
        if i in (0, 1, -5, -4):
            return self._tables()[i % 5]
        return (None, None, self.a2a.max_tokens, self.a2a.hidden, self.a2a.num_experts)[i]

    def _tables(self):
        """Return src_info and layout_range, from the rows of all choices in epmoe's handle."""
        a2a, words = self.a2a, self.handle._outputs[0]
        size, most, topk, num_local = a2a.world_size, a2a.max_tokens, a2a.topk, a2a.num_local_experts
        first = _rows_at(num_local, most)
        rows = words[first : first + size * most * topk].view(size, most, topk)
        token = torch.arange(most, device=words.device, dtype=torch.int32)[None, :, None]
        is_there = (token < words[8 : 8 + size, None, None]) & (rows >= 0)
        num_rows = num_local * size * most
        place = torch.where(is_there, rows, num_rows).long().flatten()
        source = torch.arange(size, device=words.device, dtype=torch.int32)[:, None, None]
        src_info = words.new_zeros(num_rows + 1)
        src_info.scatter_(0, place, token.expand(rows.shape).flatten())
        owner = words.new_full((num_rows + 1,), -1)
        owner.scatter_(0, place, source.expand(rows.shape).flatten())
        owner = owner[:-1].view(num_local, -1, 1)
        counts = (owner == source.view(1, 1, -1)).sum(1)
        begins = counts.cumsum(1) - counts
        return src_info[:-1].view(num_local, -1), begins << 32 | counts


def _rows_at(num_local_experts, max_tokens):
    """Return where the rows begin in a handle: ep_ll_handle of csrc/protocol/low_latency.h."""
    targets = (16 + num_local_experts + 1 + 3) // 4 * 4
    return (targets + max_tokens + 3) // 4 * 4


class LowLatency:
    """The low_latency methods of Buffer."""

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        """Return about the bytes of the buffers, as a number to pass to Buffer, which ignores it.

        Args:
            num_max_dispatch_tokens_per_rank: The most tokens of a rank.
            hidden: H.
            num_ranks: W.
            num_experts: Not read.

        Returns:
            An int, in bytes.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) // 2**20
            58
        """
        num_bytes = 4 * num_ranks * num_max_dispatch_tokens_per_rank * (2 * hidden + 128)
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank, hidden, num_experts):
        """Do nothing: epmoe's buffers are never dirty.

        Args:
            num_max_dispatch_tokens_per_rank: Not read.
            hidden: Not read.
            num_experts: Not read.

        Raises:
            ValueError: For a Buffer without low_latency_mode=True.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.Buffer(epmoe.World(), low_latency_mode=True, device="cpu")
            >>> buffer.clean_low_latency_buffer(128, 7168, 256)
        """
        self._check_mode()

    def low_latency_dispatch(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
                             cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None,
                             use_fp8=True, round_scale=False, use_ue8m0=False, async_finish=False,
                             return_recv_hook=False):
        """Send few tokens to their experts.  Collective.

        Args:
            x: [T, H] bfloat16; T is at most num_max_dispatch_tokens_per_rank.
            topk_idx: [T, K] int64 or int32; -1: no choice.
            num_max_dispatch_tokens_per_rank: The most tokens of a rank, the same on all ranks.
            num_experts: E.
            cumulative_local_expert_recv_stats: [L] int32, to which the counts are added, or None.
            dispatch_wait_recv_cost_stats: Must be None.
            use_fp8: Whether rows become float8_e4m3fn with a scale for each 128 numbers.
            round_scale: Whether scales are powers of two.
            use_ue8m0: Whether four scales are packed in an int32.  Needs round_scale.
            async_finish: Return before it is done, with an event.
            return_recv_hook: Send only; the hook receives.

        Returns:
            A tuple (recv_x, recv_count [L] int32, handle, event, hook).  recv_x is [L, W * max, H], or a pair
                of it and the scales [L, W * max, H / 128].

        Raises:
            ValueError, TypeError: On the rank that passes a wrong argument; PeerError on the others.  For a
                Buffer without low_latency_mode=True.
            NotImplementedError: For dispatch_wait_recv_cost_stats.
            EpError: As LowLatencyAll2All.dispatch.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.Buffer(epmoe.World(), low_latency_mode=True, device="cpu")
            >>> x, idx = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0], [1], [1]])
            >>> rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, 2, use_fp8=False)
            >>> rows.shape, counts.tolist()
            (torch.Size([2, 4, 128]), [1, 2])
            >>> y, _, _ = buffer.low_latency_combine(rows, idx, torch.full((3, 1), 0.5), handle)
            >>> y[:, 0].tolist()
            [0.5, 0.5, 0.5]
        """
        fp8 = ("ue8m0" if use_ue8m0 else "pow2" if round_scale else True) if use_fp8 else False
        stats, key = cumulative_local_expert_recv_stats, None
        try:
            self._check_mode()
            if dispatch_wait_recv_cost_stats is not None:
                raise NotImplementedError("dispatch_wait_recv_cost_stats: epmoe does not measure it; see "
                                          "World.flight_record for what a rank waits for")
            _check_hook(async_finish, return_recv_hook)
            for name, t in (("x", x), ("topk_idx", topk_idx)):  # the layer checks the rest
                if not isinstance(t, torch.Tensor) or t.dim() != 2:
                    check_tensor(name, t, self.device, getattr(t, "dtype", None), None, None)
            if x.dtype != torch.bfloat16:
                raise TypeError(f"x: wanted bfloat16, got {x.dtype}")
            key = self._check_key(num_max_dispatch_tokens_per_rank, x.shape[1], topk_idx.shape[1],
                                  num_experts)
            if use_ue8m0 and not (round_scale and use_fp8):
                raise ValueError("use_ue8m0: needs use_fp8=True and round_scale=True")
            if stats is not None:
                check_tensor("cumulative_local_expert_recv_stats", stats, self.device, torch.int32,
                             num_experts // self.group_size)
        except Exception as error:
            if key is None:
                key = self._newest_key(_valid(self._check_max, num_max_dispatch_tokens_per_rank),
                                       _size(x, 1), _size(topk_idx, 1),
                                       _valid(self._check_experts, num_experts))
            a2a = self._low_latency.get(key)
            buffer = 0 if a2a is None else self._take_turn(key)  # a rank that creates it has no turn yet
            refuse(self.world, error, [(a2a, buffer, _C.OP_LL_DISPATCH)])
        a2a = self._decoder(*key)
        buffer = self._take_turn(key)
        idx = topk_idx.clone()  # combine needs it as it was at this call

        def send():
            # Until the hook, the program may overwrite x.
            tokens = x.clone() if return_recv_hook else x
            send = a2a.dispatch_send if return_recv_hook else a2a.dispatch
            sent = send(tokens, idx, fp8=fp8, buffer=buffer)
            rows, scales, counts, inner = sent._result if return_recv_hook else sent
            if stats is not None and not return_recv_hook:
                stats.add_(counts)
            return rows, scales, counts, DecodeHandle(key, a2a, inner, idx), sent

        (rows, scales, counts, handle, sent), event = self._streams.run(
            send, (x, idx, stats), None, async_finish)

        def hook():
            sent.recv()
            if stats is not None:
                stats.add_(counts)

        return ((rows, scales) if use_fp8 else rows, counts, handle, EventOverlap(event),
                hook if return_recv_hook else None)

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False,
                            async_finish=False, return_recv_hook=False, out=None,
                            combine_wait_recv_cost_stats=None):
        """Return the experts' rows, and add them up with weights.  Collective.

        The weights first go to the ranks of the experts, in a small dispatch.  There, a rank's rows are added
        up in float32 and rounded to bfloat16, then the sums of the ranks likewise.

        Args:
            x: [L, W * max, H] bfloat16.  Do not overwrite it before the hook.
            topk_idx: [T, K] as for the dispatch; a choice that is -1 here has the weight 0.
            topk_weights: [T, K] float32.
            handle: That of low_latency_dispatch.
            use_logfmt: Without effect: rows travel as bfloat16, which is more precise.
            zero_copy: Take the rows from get_next_low_latency_combine_buffer(handle) instead of x.
            async_finish: Return before it is done, with an event.
            return_recv_hook: Send only; the hook receives.
            out: [T, H] bfloat16 to write, or None.
            combine_wait_recv_cost_stats: Must be None.

        Returns:
            A tuple (combined_x [T, H] bfloat16, event, hook).

        Raises:
            ValueError, TypeError: On the rank that passes a wrong argument; PeerError on the others.  For a
                Buffer without low_latency_mode=True.
            NotImplementedError: For combine_wait_recv_cost_stats.
            EpError: As LowLatencyAll2All.combine.

        Examples:
            See low_latency_dispatch.
        """
        try:
            self._check_mode()
            if combine_wait_recv_cost_stats is not None:
                raise NotImplementedError("combine_wait_recv_cost_stats: epmoe does not measure it")
            _check_hook(async_finish, return_recv_hook)
            self._check_decode_handle(handle)
            a2a, inner = handle.a2a, handle.handle
            check_topk_idx(topk_idx, self.device, *handle.topk_idx.shape)
            check_tensor("topk_weights", topk_weights, self.device, torch.float32, *topk_idx.shape)
            if zero_copy:
                x = self.get_next_low_latency_combine_buffer(handle)
            check_tensor("x", x, self.device, torch.bfloat16, *a2a._shapes["masked"])
            if out is not None:
                check_tensor("out", out, self.device, torch.bfloat16, inner.num_tokens, a2a.hidden)
        except Exception as error:
            key, buffer = self._key_of(handle, x, topk_idx)
            refuse(self.world, error,
                   [(self._low_latency.get(_weigher_key(key)), buffer, _C.OP_LL_DISPATCH),
                    (self._low_latency.get(key), buffer, _C.OP_LL_COMBINE)])
        weigher = self._decoder(*_weigher_key(handle.key))

        def send():
            weights = topk_weights.masked_fill(topk_idx < 0, 0)
            rows = x.new_zeros(inner.num_tokens, _WEIGHTS_HIDDEN)
            weighed = weigher.dispatch(rows, handle.topk_idx, weights, buffer=inner.buffer)[3]
            # The words of a handle do not depend on H: those with the weights serve for the rows of x, too.
            # With the number of the rows' dispatch, combine sees whether the ranks combine different ones.
            weighed._outputs[0][_C.LL_ID].copy_(inner._outputs[0][_C.LL_ID])
            both = LowLatencyHandle(a2a, inner._key, (weighed._outputs[0], *inner._outputs[1:]))
            both.num_tokens, both.buffer = inner.num_tokens, inner.buffer
            if return_recv_hook:
                sent = a2a.combine_send(x, both, out=out)
                return sent._result, sent
            return a2a.combine(x, both, out=out), None

        inputs = (x, topk_idx, topk_weights, out, handle.topk_idx, inner._outputs[0])
        (result, sent), event = self._streams.run(send, inputs, None, async_finish)
        return result, EventOverlap(event), (lambda: _receive(sent)) if return_recv_hook else None

    def get_next_low_latency_combine_buffer(self, handle):
        """Return a tensor to fill with the experts' rows for low_latency_combine(zero_copy=True).

        Args:
            handle: That of low_latency_dispatch.

        Returns:
            [L, W * max, H] bfloat16, the same tensor for each handle of these sizes and this turn.

        Raises:
            TypeError: For another handle.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.Buffer(epmoe.World(), low_latency_mode=True, device="cpu")
            >>> x, idx = torch.ones(3, 128, dtype=torch.bfloat16), torch.tensor([[0], [1], [1]])
            >>> rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, 2, use_fp8=False)
            >>> _ = buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
            >>> y, _, _ = buffer.low_latency_combine(rows, idx, torch.ones(3, 1), handle, zero_copy=True)
            >>> y[:, 0].tolist()
            [1.0, 1.0, 1.0]
        """
        self._check_decode_handle(handle)
        key = handle.key, handle.handle.buffer
        if key not in self._zero_copies:
            self._zero_copies[key] = torch.zeros(handle.a2a._shapes["masked"], dtype=torch.bfloat16,
                                                 device=self.device)
        return self._zero_copies[key]

    def low_latency_update_mask_buffer(self, rank_to_mask, mask=False):
        """Not available: shrink mode is not.

        Args:
            rank_to_mask: Not read.
            mask: Not read.

        Raises:
            NotImplementedError: Always.

        Examples:
            See docs/deep_ep.md.
        """
        raise NotImplementedError("low_latency_update_mask_buffer: epmoe has no masked ranks")

    def low_latency_query_mask_buffer(self, mask_status):
        """Not available: shrink mode is not.

        Args:
            mask_status: Not read.

        Raises:
            NotImplementedError: Always.

        Examples:
            See docs/deep_ep.md.
        """
        raise NotImplementedError("low_latency_query_mask_buffer: epmoe has no masked ranks")

    def low_latency_clean_mask_buffer(self):
        """Not available: shrink mode is not.

        Raises:
            NotImplementedError: Always.

        Examples:
            See docs/deep_ep.md.
        """
        raise NotImplementedError("low_latency_clean_mask_buffer: epmoe has no masked ranks")

    # ---- parts ----

    def _check_mode(self):
        if not self.low_latency_mode:
            raise ValueError("the low_latency methods need Buffer(low_latency_mode=True)")

    def _decoder(self, *key):
        """Return the LowLatencyAll2All for (max_tokens, H, K, E).  The first call is collective."""
        if key not in self._low_latency:
            self._low_latency[key] = LowLatencyAll2All(self.world, *key, device=self.device, num_buffers=2)
        return self._low_latency[key]

    def _take_turn(self, key):
        """Return the communication buffer of the next dispatch: the two of a layer alternate."""
        self._turns[key] = 1 - self._turns.pop(key, 1)
        return self._turns[key]

    def _check_key(self, max_tokens, hidden, topk, num_experts):
        """Return the key of a layer.  Raises for sizes that no layer has."""
        key = max_tokens, hidden, topk, num_experts
        if key not in self._low_latency:
            self._check_experts(num_experts)
            self._check_max(max_tokens)
            layer_bytes(self.group_size, num_experts, topk, max_tokens, hidden, torch.bfloat16,
                        _C.LOW_LATENCY)
        return key

    def _check_experts(self, num_experts):
        check_num_experts("num_experts", num_experts, self.group_size)

    @staticmethod
    def _check_max(max_tokens):
        if integer("num_max_dispatch_tokens_per_rank", max_tokens) < 1:
            raise ValueError(f"num_max_dispatch_tokens_per_rank {max_tokens}: must be at least 1")

    def _check_decode_handle(self, handle):
        if not isinstance(handle, DecodeHandle):
            raise TypeError(f"handle: wanted what low_latency_dispatch returned, got {type(handle).__name__}")
        if handle.a2a.world is not self.world:
            raise ValueError("handle: it belongs to a Buffer of another group")

    def _newest_key(self, *sizes):
        """Return the key of the latest dispatch with these sizes, or None.

        sizes: As in a key.  None is any.
        """
        return next((k for k in reversed(self._turns)
                     if all(size in (None, its) for size, its in zip(sizes, k))), None)

    def _key_of(self, handle, x, topk_idx):
        """Return the key and the communication buffer of a combine.

        If the handle is wrong: those of the latest dispatch whose sizes the tensors have, or else of the
        latest.
        """
        try:
            self._check_decode_handle(handle)
            return handle.key, handle.handle.buffer
        except (TypeError, ValueError):
            local, rows, hidden = (_size(x, dim) for dim in range(3))
            key = self._newest_key(rows and rows // self.group_size, hidden, _size(topk_idx, 1),
                                   local and local * self.group_size) or self._newest_key()
            return key, self._turns.get(key, 0)


def _weigher_key(key):
    """Return the key of the layer that moves the weights for the layer of this key, which may be None."""
    return key and (key[0], _WEIGHTS_HIDDEN, *key[2:])


def _valid(check, size):
    """Return a size if it is one, else None."""
    try:
        check(size)
    except (TypeError, ValueError):
        return None
    return size


def _size(t, dim):
    """Return a size of a tensor, or None."""
    return t.shape[dim] if isinstance(t, torch.Tensor) and dim < t.dim() else None


def _check_hook(async_finish, return_recv_hook):
    if async_finish and return_recv_hook:
        raise ValueError("async_finish and return_recv_hook: set at most one")


def _receive(sent):
    sent.recv()
