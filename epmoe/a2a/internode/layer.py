"""EPAll2AllLayer over several nodes: rows cross the rail between nodes, a layer of the node does the rest."""

import contextlib
import hashlib

import torch
from torch.utils.checkpoint import _StopRecomputationError

from ... import _C
from ...comm.nodes import Nodes
from ...comm.rail import RESERVE_SMS
from ...comm.refusals import is_told, mark_told
from ...comm.validation import BARRIER, COMBINE, DISPATCH, FAILED, FINALIZE, OP_OF, PLAN, SECOND, Header
from ...errors import EpClosed, EpError, EpIndexError, EpMismatch, EpOverflow, PeerError
from ...torch_modes import check_mode, requires_grad
from ..layer import EPAll2AllLayer
from . import fixed, ops, pipeline, plan, rows
from .checks import Checks

_DESCRIPTION_BYTES = 480


class OverNodes(fixed.Fixed, Checks):
    """What EPAll2AllLayer and EpAll2AllFusedOp have in common over several nodes.

    `team_layer` is a layer of the ranks of this node, for the experts of this node and for the tokens of each
    rank and of the ranks of its rail.  A call meets all ranks (validation.py), moves rows over the rail
    (rows.py), and calls the team layer.
    """

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
        shared = {name: value for name, value in shared.items() if name not in _OWN}
        _agree(nodes, f"{type(self).__name__} of max_tokens {max_tokens}, hidden {hidden}, topk {topk}, "
                      f"experts {num_tot_experts}, {shared}")
        try:
            self.team_layer = self._team_class(
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
        for name in ("hidden", "topk", "dtype", "weight_dtype", "device", "heap", "expert_alignment",
                     "expert_capacity", "host_counts", "capacity", "num_local_experts", "_copies",
                     "_num_buffers", "_config", "_requested_num_sm", "rail_dtype", "rail_capacity"):
            setattr(self, name, getattr(team, name))
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
            del error  # else the error and this frame would be a cycle: see LayerParts._refuse_now

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
        num_chunks = moe._num_chunks_of(requires_grad(x, topk_weights, *params))
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


class LayerOverNodes(OverNodes, EPAll2AllLayer):
    """EPAll2AllLayer over several nodes."""

    _team_class = EPAll2AllLayer


EPAll2AllLayer._over_nodes = LayerOverNodes

_POSITIONAL = ("dtype", "weight_dtype", "num_sm", "enable_local_combine")
_OWN = {"device", "heap", "timeout_s", "num_sm", "reserve_sms", "host_counts"}  # may differ between ranks


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
