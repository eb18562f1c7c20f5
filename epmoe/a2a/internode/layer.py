"""EPAll2AllLayer over several nodes: rows cross the rail between nodes, a layer of the node does the rest."""

import contextlib
import hashlib
import inspect

import torch
from torch.utils.checkpoint import _StopRecomputationError

from ... import _C
from ...comm.nodes import Nodes
from ...comm.rail import RESERVE_SMS
from ...comm.refusals import is_told, mark_told
from ...comm.validation import BARRIER, COMBINE, DISPATCH, FAILED, FINALIZE, OP_OF, PLAN, SECOND, Header
from ...errors import EpClosed, EpError, EpIndexError, EpMismatch, EpOverflow, PeerError
from ...torch_modes import check_mode, requires_grad
from ..base import cast
from ..fused import EpAll2AllFusedOp, check_no_gradients
from ..layer import EPAll2AllLayer, check_rail_capacity
from . import fixed, ops, pipeline, plan, rows
from .fixed import is_capturing
from .plan import NodesLayout

_DESCRIPTION_BYTES = 480
_POSITIONAL = ("dtype", "weight_dtype", "num_sm", "enable_local_combine")
_OWN = {"device", "heap", "timeout_s", "num_sm", "reserve_sms", "host_counts"}  # may differ between ranks


class InternodeLayer(fixed.Fixed, EPAll2AllLayer):
    """EPAll2AllLayer over several nodes: a layer that has a layer.

    `team_layer` is a layer of the ranks of this node, for the experts of this node and for the tokens of each
    rank and of the ranks of its rail.  A call meets all ranks (validation.py), moves rows over the rail
    (rows.py), and calls the team layer.
    """

    _kind_of_team = EPAll2AllLayer
    may_decode = False
    _is_closed = False
    _num_plans = 0  # that all ranks have made together
    _applies = False  # whether the team layer applies the experts of an EPMoE
    low_latency = None
    _owns_heap = False

    def __init__(self, ep_group, max_tokens, hidden, topk, rank=None, num_tot_experts=None,
                 local_world_size=None, world_size=None, *args, **options):
        timeout_s = options.get("timeout_s")
        nodes = Nodes.of(ep_group, local_world_size, timeout_s)
        self.nodes = self.world = nodes
        self.rank = nodes.rank
        self.world_size = nodes.size
        self.num_nodes = nodes.num_nodes
        self.node = nodes.node
        try:
            self._check_sizes(rank, world_size, num_tot_experts, options)
            if timeout_s is not None:
                nodes.set_timeout(timeout_s)
        except Exception:
            nodes._refuse()
            raise
        shared = {**dict(zip(_POSITIONAL, args)), **options}
        defaults = inspect.signature(self._kind_of_team).parameters
        shared = {name: value for name, value in shared.items()
                  if name in defaults and name not in _OWN and value != defaults[name].default}
        _agree(nodes, f"{self._kind_of_team.__name__} of max_tokens {max_tokens}, hidden {hidden}, topk "
                      f"{topk}, experts {num_tot_experts}, {shared}")
        try:
            self.team_layer = self._kind_of_team(
                nodes.team, _tokens_of_team(nodes, int(max_tokens), options), hidden, topk, None,
                int(num_tot_experts) // nodes.num_nodes, None, None, *args, **options)
        except Exception:
            with contextlib.suppress(EpError):
                nodes._refuse()
            raise
        try:
            _agree(nodes, "created")
        except EpError:
            with contextlib.suppress(EpError):
                self.team_layer.finalize()
            raise
        self._take(self.team_layer, int(max_tokens), int(num_tot_experts))
        if self.device.type == "cuda":  # NCCL connects in its first exchange, for which it allocates
            nodes._exchange_rows(*torch.zeros(2, nodes.num_nodes, dtype=torch.int32, device=self.device))
        self._number = nodes._num_layers
        nodes._num_layers += 1
        # The name in torch.ops.epmoe.nodes_*; as that of other layers, it has all that sizes depend on.
        self.id = f"{nodes.num_nodes} nodes, {self.node}, {self.team_layer.id}"
        ops.layers[self.id] = self

    def _take(self, team, max_tokens, num_experts):
        """Take the attributes of a layer from that of the team."""
        self.hidden, self.topk, self._copies = team.hidden, team.topk, team._copies
        self.dtype, self.weight_dtype, self.rail_dtype = team.dtype, team.weight_dtype, team.rail_dtype
        self.device, self.heap = team.device, team.heap
        self.capacity, self.rail_capacity = team.capacity, team.rail_capacity
        self.expert_alignment, self.expert_capacity = team.expert_alignment, team.expert_capacity
        self.host_counts, self.num_local_experts = team.host_counts, team.num_local_experts
        self._num_buffers, self._config = team._num_buffers, team._config
        self._requested_num_sm = team._requested_num_sm
        self.num_experts = num_experts
        self.max_tokens = max_tokens * team._copies
        self._most = max_tokens
        # Whether NCCL's kernels may run beside those of the node.
        self.leaves_sms = self.device.type == "cpu" or team._config.reserve_sms >= RESERVE_SMS
        team._refuse_now = self._refuse_of_team
        if self.rail_capacity is not None:
            self._init_fixed()

    # ---- meetings and refusals ----

    def _meet(self, op, layout=None, *, weights=False, gradients=False, chunks=0, error=None):
        """Meet all ranks in a call.  Raises `error`, if there is one, after the others know of it.

        layout: with which the call is made, so that no rank moves the rows of another plan.
        An error that only repeats what another rank of this node has done becomes that of all ranks.
        """
        if self._is_closed:
            raise EpClosed("this layer is finalized: create a new one")
        try:
            if error is not None:
                mark_told(error)
            self._settle(error)
            failed = 0 if error is None else SECOND if type(error) is PeerError else FAILED
            plan_number = 0 if layout is None else layout.number
            header = Header(op, self._number, plan_number, weights, gradients, chunks, failed=failed)
            try:
                self.nodes._validate(header)
            except PeerError:
                if failed == FAILED:
                    raise error from None
                raise
        finally:
            del error  # else the error and this frame would be a cycle: see CollectiveLayer._refuse_now

    def _refuse(self, op, error, buffer):
        """Report to all ranks that this one cannot take part in op, then raise the error."""
        try:
            # checkpointing needs no more of this forward
            if not isinstance(error, _StopRecomputationError) and not is_told(error):
                self._meet(OP_OF[op], error=error)
            raise error
        finally:
            del error

    def _refuse_of_team(self, op, error, buffer):
        """Take the place of the team layer's refusals, which happen after a meeting, for lack of memory.

        In _apply the ranks of the node enter the operation, and then all ranks meet.  Elsewhere other nodes
        would not learn it.
        """
        try:
            if self._applies:
                type(self.team_layer)._refuse_now(self.team_layer, op, error, buffer)
            if not isinstance(error, _StopRecomputationError):
                self.nodes._end(error)
            raise error
        finally:
            del error

    @contextlib.contextmanager
    def _ending(self):
        """End the world after an error between a meeting and the end of a call."""
        try:
            yield
        except _StopRecomputationError:
            raise
        except BaseException as error:
            if isinstance(error, (EpIndexError, EpOverflow, PeerError)):
                if getattr(error, "_is_of_all", False):
                    raise
                self._settle(error)
            self.nodes._end(error)
            raise

    # ---- calls ----

    def _plan_rail(self, indices, buffer):
        """Exchange the indices of the rail and make the plan, after a meeting.

        One host read; with rail_capacity none.
        """
        self._num_plans += 1
        with self._ending():
            num_nodes, topk = self.num_nodes, self.topk * self._copies
            limits = torch.iinfo(torch.int32)
            mine = torch.full((self._most, topk), -1, dtype=torch.int32, device=self.device)
            mine[: len(indices)] = indices.clamp(limits.min, limits.max)
            everyone = mine.new_empty(num_nodes * self._most, topk)
            self.nodes._exchange_rows(everyone, mine.repeat(num_nodes, 1))
            everyone = everyone.view(num_nodes, self._most, topk)
            if self.rail_capacity is not None:
                return fixed.make_layout(self, len(indices), buffer, everyone)
            local, hit, facts = plan.local_indices(self, everyone)
            goes_to, owner = plan.destinations(self, indices)
            received, bad, values, sent = self.nodes._read(torch.cat([facts, goes_to.sum(1)[None]]))
        self.nodes._check_indices(bad, values, topk, self.num_experts)
        with self._ending():
            layout = plan.NodesLayout(self, len(indices), buffer, sent, received)
            layout.take(goes_to, owner)
            layout.indices = plan.arrivals(layout, local, hit)
        return layout

    def _plan_team(self, layout):
        with self._ending():
            layout.team = self.team_layer.preprocess(layout.indices, buffer=layout.buffer)
        return layout

    def _enter(self, input, exp_indices, weight, more=(), full_scatter_indices=None, layout=None, buffer=0,
               chunks=0):
        """Check the arguments of a dispatch and meet all ranks.  Returns the weights in float32.

        more: other tensors whose gradients the backward needs.
        """
        op = PLAN if layout is None else DISPATCH
        try:
            weight = self._checked(input, exp_indices, weight, full_scatter_indices, layout, buffer)
        except Exception as error:
            self._meet(op, error=error)
        self._meet(op, layout, weights=weight is not None, gradients=requires_grad(input, weight, *more),
                   chunks=chunks)
        return weight

    def _send(self, input, exp_indices, weight, full_scatter_indices, layout, buffer, *more):
        """Bring the tokens to the nodes of their experts.

        Returns the layout, and the tokens and weights that this rank has for its node.

        more: other tensors whose gradients the backward needs.
        """
        if layout is None:
            self._check_buffer(_C.OP_PLAN, buffer)
        weight = self._enter(input, exp_indices, weight, more, full_scatter_indices, layout, buffer)
        if layout is None:
            layout = self._plan_rail(exp_indices, buffer)
        if layout.team is None and not self._applies:
            self._plan_team(layout)
        with self._ending():
            here, weight_here = rows.Out.apply(input, weight, layout, True)
        layout.dispatched = True
        return layout, here, weight_here

    def _return(self, layout, call, weight, *tensors):
        """Meet, make call(), which is the combine of the team, and bring its rows home."""
        self._meet(COMBINE, layout, weights=weight is not None,
                   gradients=requires_grad(weight, *tensors))
        with self._ending():
            return rows.Home.apply(call(), None, layout, True)[0]

    def _apply(self, moe, x, topk_idx, topk_weights):
        """Apply the experts of an EPMoE: those of this node through the team layer, to what has arrived."""
        params = moe.gate_up_proj, moe.gate_up_proj_bias, moe.down_proj, moe.down_proj_bias
        if torch.compiler.is_compiling() and self.rail_capacity is None:
            return ops.apply(self, moe, requires_grad(x, topk_weights, *params), x, topk_idx,
                             topk_weights.float())
        num_chunks = moe._chunks_of_call(requires_grad(x, topk_weights, *params))
        return self._apply_now(moe, params, num_chunks, x, topk_idx, topk_weights)

    @torch._disable_dynamo
    def _apply_now(self, moe, params, num_chunks, x, topk_idx, topk_weights):
        """Do it as calls.

        The meeting comes after all stages of the node, so that it also tells of an error in one of them.
        """
        error = None
        self._applies = True
        try:
            if num_chunks > 1:
                return pipeline.apply(self, moe, num_chunks, params, x, topk_idx, topk_weights)
            layout, here, weight_here = self._send(x, topk_idx, topk_weights, None, None, 0, *params)
            self._owes_result = self.rail_capacity is not None
            try:
                y, layout.team = moe._compute(self.team_layer, here, layout.indices, weight_here)
            except _StopRecomputationError:
                raise
            except Exception as e:
                error = e
                self._pay_result()
        finally:
            self._applies = False
        try:
            self._meet(COMBINE, layout, gradients=requires_grad(x, topk_weights, *params),
                       error=error)
        finally:
            del error
        with self._ending():
            return rows.Home.apply(y, None, layout, True)[0], layout

    @torch._disable_dynamo
    def preprocess(self, exp_indices, full_scatter_indices=None, *, buffer=0):
        self._check_buffer(_C.OP_PLAN, buffer)
        try:
            check_mode()
            self._check_capture()
            if full_scatter_indices is not None:
                raise ValueError("full_scatter_indices: not over several nodes: leave it out")
            self._check_indices(exp_indices)
        except Exception as error:
            self._meet(PLAN, error=error)
        self._meet(PLAN)
        return self._plan_team(self._plan_rail(exp_indices, buffer))

    @torch._disable_dynamo
    def dispatch(self, input, exp_indices=None, weight=None, full_scatter_indices=None, *, layout=None,
                 buffer=0):
        layout, here, weight_here = self._send(input, exp_indices, weight, full_scatter_indices, layout,
                                               buffer)
        with self._ending():
            out, row_weight, layout.team = self.team_layer.dispatch(here, None, weight_here,
                                                                    layout=layout.team)
        return out, row_weight, layout

    @torch._disable_dynamo
    def dispatch_fp8(self, input, exp_indices=None, weight=None, full_scatter_indices=None, *, layout=None,
                     buffer=0):
        """As EPAll2AllLayer's.  Between nodes tokens travel in the layer's dtype."""
        try:
            if requires_grad(*(t for t in (input, weight) if isinstance(t, torch.Tensor))):
                raise RuntimeError("dispatch_fp8 has no gradients: call it under torch.no_grad(), or use "
                                   "dispatch")
        except Exception as error:
            self._meet(PLAN if layout is None else DISPATCH, error=error)
        layout, here, weight_here = self._send(input, exp_indices, weight, full_scatter_indices, layout,
                                               buffer)
        with self._ending():
            *out, layout.team = self.team_layer.dispatch_fp8(here, None, weight_here, layout=layout.team)
        return *out, layout

    @torch._disable_dynamo
    def combine(self, input, layout, weight=None):
        try:
            check_mode(input, weight)
            self._check_rows("input rows", input, self.hidden, weight, layout)
        except Exception as error:
            self._meet(COMBINE, error=error)
        return self._return(layout, lambda: self.team_layer.combine(input, layout.team, weight), weight,
                            input)

    def ep_barrier_all(self, *, buffer=0):
        self._check_buffer(_C.OP_BARRIER, buffer)
        self.synchronize()
        self._meet(BARRIER)

    def synchronize(self):
        self._settle(now=True)
        self.team_layer.synchronize()

    def finalize(self):
        if not self._is_closed and not self.nodes._has_ended():
            self.nodes._validate(Header(FINALIZE, self._number))
        self.team_layer.finalize()
        self._is_closed = True

    # ---- checks of arguments on each rank, before the ranks meet ----

    def _check_sizes(self, rank, world_size, num_tot_experts, options):
        for name, got, want in (("rank", rank, self.rank), ("world_size", world_size, self.world_size)):
            if got is not None and got != want:
                raise ValueError(f"{name}={got}, but the group says {want}: leave it out")
        if num_tot_experts is None:
            raise TypeError("num_tot_experts is missing: pass the number of experts of all ranks")
        if int(num_tot_experts) % self.world_size:
            raise ValueError(f"num_tot_experts {num_tot_experts}: must be a multiple of the "
                             f"{self.world_size} ranks")
        if options.get("expert_capacity") is not None:
            raise ValueError(f"expert_capacity {options['expert_capacity']}: not over several nodes: leave "
                             f"it out")
        capacity, rail_capacity = options.get("capacity"), check_rail_capacity(options.get("rail_capacity"))
        if capacity is not None and rail_capacity is None:
            raise ValueError(f"capacity {capacity} without rail_capacity: over several nodes the host reads "
                             f"the tokens between nodes in each call: pass rail_capacity, too, the most "
                             f"tokens that a rank sends to one other node, or leave capacity out")
        if rail_capacity is not None and capacity is None:
            raise ValueError(f"rail_capacity {rail_capacity} without capacity: the host would still read the "
                             f"rows of each rank in each call: pass capacity, too, the most rows that a rank "
                             f"can receive, or leave rail_capacity out")

    def _checked(self, input, exp_indices, weight, full_scatter_indices, layout, buffer):
        """Check the arguments of a dispatch on this rank.  Return the weights as float32."""
        check_mode(input, weight)
        self._check_capture()
        num_tokens = None
        if full_scatter_indices is not None:
            raise ValueError("full_scatter_indices: not over several nodes, where the plan chooses the rows: "
                             "leave it out")
        if layout is not None:
            self._check_layout(layout)
            if buffer not in (0, layout.buffer):
                raise ValueError(f"buffer {buffer!r}, but the layout is of buffer {layout.buffer}: leave "
                                 f"buffer out")
            num_tokens = layout.num_tokens
        self._check_tensor("input", input, self.dtype, (num_tokens, self.hidden))
        if layout is None:
            self._check_indices(exp_indices)
            if exp_indices.shape[0] != input.shape[0]:
                raise ValueError(f"input has {input.shape[0]} tokens, but exp_indices has "
                                 f"{exp_indices.shape[0]}: must be the same")
        if weight is not None:
            self._check_tensor("weight", weight, None, (input.shape[0], self.topk * self._copies))
        return cast(weight, torch.float32)

    def _check_indices(self, exp_indices):
        if exp_indices is None:
            raise TypeError("exp_indices is None: pass them, or the layout of an earlier preprocess or "
                            "dispatch")
        if not isinstance(exp_indices, torch.Tensor):
            raise TypeError(f"exp_indices: wanted a tensor, got {type(exp_indices).__name__}")
        if exp_indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"exp_indices: wanted int32 or int64, got {exp_indices.dtype}")
        topk = self.topk * self._copies
        if exp_indices.dim() != 2 or exp_indices.shape[1] != topk:
            raise ValueError(f"exp_indices: wanted shape [*, {topk}], got {list(exp_indices.shape)}")
        if exp_indices.shape[0] > self._most:
            raise ValueError(f"exp_indices has {exp_indices.shape[0]} tokens: must be at most {self._most}; "
                             f"see max_tokens")
        if exp_indices.device != self.device:
            raise ValueError(f"exp_indices: wanted a tensor on {self.device}, where the layer is, got one on "
                             f"{exp_indices.device}")

    def _check_layout(self, layout):
        if not isinstance(layout, NodesLayout):
            raise TypeError(f"layout: wanted a layout of several nodes, got {type(layout).__name__}")
        if layout.layer is not self:
            raise ValueError("the layout belongs to another layer: pass one that this layer's preprocess or "
                             "dispatch returned")
        if layout.is_void:
            raise ValueError("cannot use this layout: its plan has failed. Make another with preprocess")

    def _check_rows(self, name, input, columns, weight, layout):
        """Check the rows and weights of a combine."""
        self._check_capture()
        self._check_layout(layout)
        if not layout.dispatched:
            raise ValueError("combine needs the layout of a dispatch, but this one was only planned: call "
                             "dispatch(layout=...) first")
        self._check_tensor(name, input, self.dtype, (self._rows_of(layout), columns))
        if weight is not None:
            self._check_tensor("weight", weight, None, (input.shape[0],))

    def _rows_of(self, layout):
        return layout.num_rows if self.capacity is None else self.capacity

    def _check_capture(self):
        if self.rail_capacity is None and is_capturing(self.device):
            raise RuntimeError("this layer over several nodes cannot be captured in a CUDA graph, because "
                               "the host reads numbers of rows in each call: create it with capacity and "
                               "rail_capacity, with which sizes are fixed")


class InternodeFusedOp(InternodeLayer, EpAll2AllFusedOp):
    """EpAll2AllFusedOp over several nodes: the megakernels work on the tokens that have arrived."""

    _kind_of_team = EpAll2AllFusedOp

    def _take(self, team, max_tokens, num_experts):
        super()._take(team, max_tokens, num_experts)
        self.fused, self.token_saving, self.token_sorting = team.fused, team.token_saving, team.token_sorting
        self.block_wise_barrier, self.combine_order = team.block_wise_barrier, team.combine_order

    def _check_weights(self, name, leaves, rows, columns, product):
        """Check the product of a fused call, which is in FP8 where it has scales.

        leaves: the other tensors of the call.  product: gemm_weight [L, rows, columns], where None is any
        size, its scales or None, the bias and the activation.
        """
        gemm_weight, gemm_scale, bias, activation = product
        check_mode(*leaves, gemm_weight, bias)
        if gemm_scale is None:
            self._check_product(gemm_weight, rows, columns, bias, activation)
        else:
            check_no_gradients(name, *leaves, gemm_weight, gemm_scale, bias)
            self._check_fp8(rows, columns, *product)

    @torch._disable_dynamo
    def mega_dispatch_group_gemm(self, input, exp_indices=None, layout=None, gemm_weight=None, weight=None, *,
                                 bias=None, activation=None, full_scatter_indices=None, buffer=0,
                                 gemm_scale=None):
        """As EpAll2AllFusedOp's.  Between nodes tokens travel in the layer's dtype, also with gemm_scale."""
        try:
            self._check_weights("dispatch + GEMM", (input, weight), None, self.hidden,
                                (gemm_weight, gemm_scale, bias, activation))
        except Exception as error:
            self._meet(PLAN if layout is None else DISPATCH, error=error)
        layout, here, weight_here = self._send(input, exp_indices, weight, full_scatter_indices, layout,
                                               buffer, gemm_weight, bias)
        with self._ending():
            h, row_weight, layout.team = self.team_layer.mega_dispatch_group_gemm(
                here, None, layout.team, gemm_weight, weight_here, bias=bias, activation=activation,
                gemm_scale=gemm_scale)
        return h, row_weight, layout

    @torch._disable_dynamo
    def mega_group_gemm_combine(self, gemm_input, gemm_weight, layout, weight=None, *, bias=None,
                                gemm_scale=None):
        try:
            self._check_weights("GEMM + combine", (gemm_input, weight), self.hidden, None,
                                (gemm_weight, gemm_scale, bias, None))
            self._check_rows("gemm_input", gemm_input, gemm_weight.shape[2], weight, layout)
        except Exception as error:
            self._meet(COMBINE, error=error)

        def combine():
            return self.team_layer.mega_group_gemm_combine(gemm_input, gemm_weight, layout.team, weight,
                                                           bias=bias, gemm_scale=gemm_scale)

        return self._return(layout, combine, weight, gemm_input, gemm_weight, bias)


EPAll2AllLayer._over_nodes, EpAll2AllFusedOp._over_nodes = InternodeLayer, InternodeFusedOp


def _tokens_of_team(nodes, max_tokens, options):
    """Return the most tokens that a rank has for its node."""
    of_others = min(max_tokens, options.get("rail_capacity") or max_tokens)
    return max_tokens + (nodes.num_nodes - 1) * of_others


def _agree(nodes, mine):
    """Raise EpMismatch on all ranks if they describe different layers."""
    text = mine.encode()
    hashed = hashlib.sha256(text).digest()  # of all of it: the text may be longer than an exchange can be
    descriptions = nodes.exchange(text[:_DESCRIPTION_BYTES].ljust(_DESCRIPTION_BYTES) + hashed)
    for rank, its in enumerate(descriptions):
        if its != descriptions[0]:
            its, first = (d[:_DESCRIPTION_BYTES].decode(errors="replace").rstrip()
                          for d in (its, descriptions[0]))
            raise EpMismatch(f"ranks disagree: rank {rank} creates {its}; rank 0 creates {first}. Create the "
                             f"layer with the same arguments on all ranks.")
