"""Buffer, the interface of DeepEP V1."""

import torch

from ... import _C
from ...comm.device import integer, pick_device
from ...comm.world import World
from ...torch_modes import check_mode
from .config import rows_bytes
from .low_latency import LowLatency
from .notices import Notices, check_num_experts
from .refusal import before_creation, refuse
from .routes import Plans, Routes, RoutesBySize, plan_steps
from .rows import (biases_of, check_device, check_rows, check_scales, check_tensor, check_topk_idx,
                   combine_tokens, count_choices, dispatch_tokens, to_ranks)
from .settings import Settings
from .utils import EventOverlap, Streams, check_event


class Handle(tuple):
    """What Buffer.dispatch keeps for combine: a tuple as in DeepEP, and epmoe's plan.

    Its elements are rank_prefix_matrix [W, W] (tokens of ranks 0 to i for rank j), None, None, recv_src_idx
    [M], is_token_in_rank [T, W] and send_head [T, W] (the number of the token among those for a rank).
    """

    def __new__(cls, plan, numbers, is_token_in_rank):
        prefix = plan.layout.counts.cumsum(0, dtype=torch.int32)
        self = super().__new__(cls, (prefix, None, None, numbers, is_token_in_rank, plan.layout.token_slots))
        self.plan = plan
        return self


class Buffer(LowLatency, Settings):
    """DeepEP's Buffer (V1) within one node, on the layers of epmoe.

    The methods are DeepEP's; docs/deep_ep.md has a table of what differs.  They are collective, except
    get_dispatch_layout and capture, and all ranks make the same calls.  If one rank passes topk_weights to
    dispatch and others do not, all ranks raise EpMismatch; with num_worst_tokens, where the host reads
    nothing, the world's rule applies: the world ends with an error after a second.  Nothing is
    differentiable, as in DeepEP: call it in a torch.autograd.Function.

    Letters: W ranks, E experts, L = E/W experts of a rank, T tokens of this rank, K choices, M rows received.

    Args:
        group: A ProcessGroup, or an epmoe.World.
        num_nvl_bytes: Kept as an attribute.  epmoe's buffers grow with the tokens.
        num_rdma_bytes: Likewise.
        low_latency_mode: Whether the low_latency methods may be called.
        num_qps_per_rank: Without effect.
        allow_nvlink_for_low_latency_mode: Without effect: NVLink is used.
        allow_mnnvl: Without effect.
        explicitly_destroy: Whether destroy() may be called.
        enable_shrink: Must be False: see World.lost_ranks for what epmoe does when a rank dies.
        comm: Must be None.
        device: As for SymmetricHeap.  DeepEP does not have it.

    Raises:
        ValueError: Without a group, and for another wrong argument.
        NotImplementedError: For enable_shrink and comm.
        PeerError: On the other ranks, when one rank raises one of these, except without a group.
        EpError: As the creation of an EPAll2AllLayer.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> from epmoe.integrations import deep_ep
        >>> buffer = deep_ep.Buffer(epmoe.World(), device="cpu")
        >>> x, idx = torch.ones(3, 8, dtype=torch.bfloat16), torch.tensor([[0], [1], [-1]])
        >>> per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, num_experts=2)
        >>> recv_x, recv_idx, _, counts, handle, _ = buffer.dispatch(
        ...     x, num_tokens_per_rank=per_rank, is_token_in_rank=is_in_rank,
        ...     num_tokens_per_expert=per_expert, topk_idx=idx, topk_weights=torch.ones(3, 1))
        >>> recv_idx.tolist(), counts
        ([[0], [1]], [1, 1])
        >>> buffer.combine(recv_x, handle)[0][:, 0].tolist()
        [1.0, 1.0, 0.0]

    References:
        DeepSeek's DeepEP, deep_ep/buffers/legacy.py.
    """

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
                 allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False,
                 enable_shrink=False, comm=None, *, device=None):
        no_mpi = NotImplementedError("comm: epmoe has no ranks of mpi4py; pass a torch.distributed group")
        no_group = ValueError("group is None: pass a torch.distributed ProcessGroup")
        if group is None:  # the other ranks learn nothing of this, because only the group names them
            raise no_group if comm is None else no_mpi
        self.group = group
        self.world = World.of(group)
        self.rank, self.group_size = self.world.rank, self.world.size
        with before_creation(self.world):
            if comm is not None:
                raise no_mpi
            if enable_shrink:
                raise NotImplementedError("enable_shrink: epmoe has no masked ranks; when a rank dies, all "
                                          "raise PeerDied and make a new Buffer with a new group")
            self.device = pick_device(device)
            self._streams = Streams(self.device, self._layers)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = False
        self._notices = Notices(self.world, self.device)
        self._plans = Plans(self._notices, Handle)
        self._routes = RoutesBySize()
        self._worst = RoutesBySize()  # of calls with num_worst_tokens
        self._low_latency = {}  # (max_tokens, H, K, E) -> LowLatencyAll2All
        self._turns = {}  # key -> communication buffer of its latest dispatch; the newest key last
        self._zero_copies = {}

    def destroy(self):
        """Give the memory back.  Collective.

        Raises:
            RuntimeError: Without explicitly_destroy=True.
            EpError: As EPAll2AllLayer.finalize.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer(epmoe.World(), explicitly_destroy=True, device="cpu").destroy()
        """
        if not self.explicitly_destroy:
            raise RuntimeError("destroy: make the Buffer with explicitly_destroy=True")
        for layer in self._layers():
            layer.finalize()

    def _layers(self):
        return [*self._low_latency.values(), *self._worst.layers(), *self._routes.layers(),
                self._notices.layer]

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False,
                            allocate_on_comm_stream=False):
        """Count the tokens for each rank and expert.  Not collective.

        Args:
            topk_idx: [T, K] int64 or int32; -1: no choice.
            num_experts: E, a multiple of W.
            previous_event: Wait for it before.
            async_finish: Return before it is done, with an event.
            allocate_on_comm_stream: Requires previous_event and async_finish.

        Returns:
            A tuple (num_tokens_per_rank [W] int32, None, num_tokens_per_expert [E] int32, is_token_in_rank
                [T, W] bool, event).

        Raises:
            ValueError: For sizes, devices or options that do not fit together.
            TypeError: When topk_idx is not a tensor of int64 or int32.

        Examples:
            >>> import epmoe
            >>> from epmoe.integrations import deep_ep
            >>> buffer = deep_ep.Buffer(epmoe.World(), device="cpu")
            >>> buffer.get_dispatch_layout(torch.tensor([[0, 1], [1, -1]]), num_experts=2)[:3]
            (tensor([2], dtype=torch.int32), None, tensor([1, 2], dtype=torch.int32))
        """
        self._check_streams(previous_event, async_finish, allocate_on_comm_stream)
        check_topk_idx(topk_idx, self.device)
        check_num_experts("num_experts", num_experts, self.group_size)

        def count():
            per_rank, per_expert, is_in = count_choices(topk_idx, num_experts, self.group_size)
            return per_rank, None, per_expert, is_in

        result, event = self._streams.run(count, (topk_idx,), previous_event, async_finish)
        return *result, EventOverlap(event)

    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None,
                 is_token_in_rank=None, num_tokens_per_expert=None, topk_idx=None, topk_weights=None,
                 expert_alignment=1, num_worst_tokens=0, config=None, previous_event=None, async_finish=False,
                 allocate_on_comm_stream=False):
        """Send tokens to the ranks of their experts, one row for each (token, rank).  Collective.

        Args:
            x: [T, H] bfloat16, float16 or float32; or a pair of [T, H] float8_e4m3fn and scales [T, S]
                float32 or int32.
            handle: That of an earlier dispatch, whose layout is used again, or None.
            num_tokens_per_rank: [W] int32, of get_dispatch_layout.
            num_tokens_per_rdma_rank: Not read.
            is_token_in_rank: [T, W] bool, of get_dispatch_layout.
            num_tokens_per_expert: [E] int32, of get_dispatch_layout.
            topk_idx: [T, K] int64 or int32, or None.
            topk_weights: [T, K] float32, with topk_idx.
            expert_alignment: The counts of the list are rounded up to it.
            num_worst_tokens: Rows of the results, for CUDA graphs: the host reads nothing, and the list is
                empty.  At least W times the most tokens of a rank, and the same on all ranks.  It may differ
                from call to call.  0: exact.
            config: Without effect.
            previous_event: Wait for it before.
            async_finish: Return before it is done, with an event.
            allocate_on_comm_stream: Requires previous_event and async_finish.

        Returns:
            A tuple (recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle,
                event).  Rows are ordered by source rank, then token.  With num_worst_tokens, rows after the
                last have the index -1.  With handle=, what is between recv_x and event is None.

        Raises:
            ValueError, TypeError: On the rank that passes a wrong argument; PeerError on the others.
            EpIndexError: On all ranks, for an index outside of [-1, E); not with num_worst_tokens.
            EpMismatch: On all ranks, when their sizes differ, or only some pass topk_idx.
            EpError: As EPAll2AllLayer.dispatch.

        Examples:
            See Buffer.
        """
        x, scales = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        streams = previous_event, async_finish, allocate_on_comm_stream
        if handle is not None:
            return self._dispatch_again(x, scales, handle, (topk_idx, topk_weights), streams)
        try:
            self._check_streams(*streams)
            self._check_dispatch(x, scales, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
            self._check_topk(x, topk_idx, topk_weights)
            if integer("expert_alignment", expert_alignment) < 1:
                raise ValueError(f"expert_alignment {expert_alignment}: must be at least 1")
            most = self._most_of_worst(num_worst_tokens) if num_worst_tokens else len(x)
            if len(x) > most:
                raise ValueError(f"num_worst_tokens {num_worst_tokens}: must be at least {self.group_size} "
                                 f"times the tokens of a rank, and x has {len(x)}")
        except Exception as error:  # weights have the shape of the indices
            self._refuse_dispatch(error, num_worst_tokens, x, topk_idx, topk_idx, scales)
        routes = self._worst.at_least(most, self._make_worst) if num_worst_tokens else None
        num_local = len(num_tokens_per_expert) // self.group_size

        def send():
            counts = []
            if routes is None:
                tokens, num_rows, counts = self._notices.announce(x, scales, topk_idx, num_tokens_per_rank,
                                                                  num_tokens_per_expert)
                plan = self._routes_for(max(tokens)).plan(to_ranks(is_token_in_rank))
                if num_rows != plan.num_rows:
                    error = ValueError(f"num_tokens_per_rank of the ranks says {num_rows} tokens for this "
                                       f"rank, is_token_in_rank {plan.num_rows}: use those of "
                                       f"get_dispatch_layout")
                    steps = plan.routes.steps(_C.OP_DISPATCH, x, topk_idx, topk_idx, scales)
                    refuse(self.world, error, steps)
            else:
                plan = routes.plan(to_ranks(is_token_in_rank), num_worst_tokens)
            self._plans.add(plan)
            result = dispatch_tokens(plan, x, scales, topk_idx, topk_weights, num_local)
            counts = [-(-n // expert_alignment) * expert_alignment for n in counts]
            return *result, counts, Handle(plan, result[4], is_token_in_rank)

        inputs = (x, scales, topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank,
                  num_tokens_per_expert)
        (recv_x, recv_scales, idx, weights, _, counts, handle), event = self._streams.run(
            send, inputs, previous_event, async_finish)
        recv_x = recv_x if scales is None else (recv_x, recv_scales)
        return recv_x, idx, weights, counts, handle, EventOverlap(event)

    def combine(self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None,
                async_finish=False, allocate_on_comm_stream=False):
        """Add up one row from each rank, without weights.  Collective.

        Sums are in float32 and in the order of the ranks.

        Args:
            x: [M, H] of the dtype bfloat16, float16 or float32.
            handle: That of the dispatch.
            topk_weights: [M, K] float32, which are added up likewise, or None.
            bias: None, or one or two tensors [T, H] of x's dtype, with which the sum begins.
            config: Without effect.
            previous_event: Wait for it before.
            async_finish: Return before it is done, with an event.
            allocate_on_comm_stream: Requires previous_event and async_finish.

        Returns:
            A tuple (combined_x [T, H], combined_topk_weights [T, K] float32 or None, event).

        Raises:
            ValueError, TypeError: On the rank that passes a wrong argument; PeerError on the others.
            EpError: As EPAll2AllLayer.combine.

        Examples:
            See Buffer.
        """
        try:
            self._check_streams(previous_event, async_finish, allocate_on_comm_stream)
            plan = self._plans.of(handle)
            check_mode(x)
            check_rows("x", x, self.device)
            check_tensor("x", x, self.device, x.dtype, plan.num_rows, None)
            if x.element_size() == 1:
                raise TypeError(f"x: cannot add up numbers of {x.dtype}: pass bfloat16")
            if topk_weights is not None:
                check_tensor("topk_weights", topk_weights, self.device, torch.float32, len(x), None)
            biases = biases_of(bias)
            for b in biases:
                check_tensor("bias", b, self.device, x.dtype, plan.num_tokens, x.shape[1])
        except Exception as error:
            self._plans.refuse(error, handle, _C.OP_COMBINE, x, topk_weights)
        (out, weights), event = self._streams.run(lambda: combine_tokens(plan, x, topk_weights, biases),
                                                  (x, topk_weights, *biases, *plan.tensors()), previous_event,
                                                  async_finish)
        return out, weights, EventOverlap(event)

    # ---- parts ----

    def _options(self):
        if self.device.type == "cpu" or Settings._chosen_sms is None:
            return {}
        return {"num_sm": Settings._chosen_sms}

    def _make_routes(self, max_tokens, capacity=None):
        return Routes(self.world, self.device, max_tokens, self.group_size, self.group_size,
                      capacity=capacity, **self._options())

    def _routes_for(self, num_tokens):
        """Return the Routes for the most tokens of a rank; all ranks know the same number."""
        step = max(64, 1 << max(0, num_tokens.bit_length() - 3))
        return self._routes.at_least(max(step, -(-num_tokens // step) * step), self._make_routes)

    def _make_worst(self, max_tokens):
        return self._make_routes(max_tokens, capacity=max_tokens * self.group_size)

    def _most_of_worst(self, num_worst_tokens):
        """Return the most tokens of a rank for which these rows are enough."""
        most = integer("num_worst_tokens", num_worst_tokens) // self.group_size
        if most < 1:
            raise ValueError(f"num_worst_tokens {num_worst_tokens}: must be at least {self.group_size}")
        rows_bytes(self.group_size, most, 4, torch.float32)  # raises for a size that no layer has
        return most

    def _refuse_dispatch(self, error, num_worst_tokens, x, *columns):
        """Refuse a dispatch without a handle; see refuse()."""
        if not num_worst_tokens:
            refuse(self.world, error, [self._notices.step])
        try:
            routes = self._worst.find(self._most_of_worst(num_worst_tokens))
        except (TypeError, ValueError):  # the others have another number: perhaps that of the latest call
            routes = self._worst.latest
        refuse(self.world, error, plan_steps(routes, x, *columns))

    def _dispatch_again(self, x, scales, handle, topk, streams):
        previous_event, async_finish, _ = streams
        try:
            self._check_streams(*streams)
            plan = self._plans.of(handle)
            if topk != (None, None):
                raise ValueError("topk_idx and topk_weights: must be None with a handle")
            check_rows("x", x, self.device)
            check_tensor("x", x, self.device, x.dtype, plan.num_tokens, None)
            if scales is not None:
                check_scales(scales, x, self.device)
        except Exception as error:
            self._plans.refuse(error, handle, _C.OP_DISPATCH, x, scales)
        (recv_x, recv_scales, *_), event = self._streams.run(
            lambda: dispatch_tokens(plan, x, scales, None, None, 0), (x, scales, *plan.tensors()),
            previous_event, async_finish)
        recv_x = recv_x if scales is None else (recv_x, recv_scales)
        return recv_x, None, None, None, None, EventOverlap(event)

    @staticmethod
    def _check_streams(previous_event, async_finish, allocate_on_comm_stream):
        check_event("previous_event", previous_event)
        if allocate_on_comm_stream and not (previous_event is not None and async_finish):
            raise ValueError("allocate_on_comm_stream: needs previous_event and async_finish=True")

    def _check_dispatch(self, x, scales, per_rank, is_in_rank, per_expert):
        check_rows("x", x, self.device)
        if scales is not None:
            check_scales(scales, x, self.device)
        check_tensor("is_token_in_rank", is_in_rank, self.device, torch.bool, len(x), self.group_size)
        check_tensor("num_tokens_per_rank", per_rank, self.device, torch.int32, self.group_size)
        check_tensor("num_tokens_per_expert", per_expert, self.device, torch.int32, None)
        check_num_experts("len(num_tokens_per_expert)", len(per_expert), self.group_size)

    def _check_topk(self, x, topk_idx, topk_weights):
        if (topk_idx is None) != (topk_weights is None):
            raise ValueError("topk_idx and topk_weights: pass both or neither")
        if topk_idx is not None:
            check_topk_idx(topk_idx, self.device, len(x))
            check_tensor("topk_weights", topk_weights, self.device, torch.float32, *topk_idx.shape)
            check_device("topk_weights", topk_weights, self.device)
