"""EPAll2AllLayer over several nodes: rows cross the rail between nodes, a layer of the node does the rest."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ... import _C
from ...comm.device import integer
from ...comm.nodes import Nodes
from ...comm.rail import RESERVE_SMS
from ...comm.error_propagation import is_reported, mark_reported
from ...comm.validation import BARRIER, COMBINE, DISPATCH, FAILED, FINALIZE, OP_OF, PLAN, SECOND, Header
from ...comm.validation import agree
from ...errors import EpClosed, EpError, EpIndexError, EpOverflow, PeerError
from ...torch_modes import StopRecomputation, check_mode, requires_grad, without_dynamo
from ...gemm.activations import Activation
from ..base import cast, nodes_of
from ..fused import EpAll2AllFusedOp, check_no_gradients
from ..layer import EPAll2AllLayer, check_rail_capacity
from ..layout import Layout
from . import ops, pipeline, plan, rows
from .fixed import FixedPlans, is_capturing
from .plan import NodesLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ...moe.module import EPMoE

_POSITIONAL = ("dtype", "weight_dtype", "num_sm", "enable_local_combine")
_OWN = {"device", "heap", "timeout_s", "num_sm", "reserve_sms", "host_counts"}  # may differ between ranks


class InternodeLayer(EPAll2AllLayer):
    """EPAll2AllLayer over several nodes: a layer that has a layer.

    `team_layer` is a layer of the ranks of this node, for the experts of this node and for the tokens of each
    rank and of the ranks of its rail.  All ranks validate a call (validation.py).  Then it moves rows over
    the rail (rows.py), and calls the team layer.
    """

    world: Nodes
    nodes: Nodes
    num_nodes: int
    node: int
    team_layer: EPAll2AllLayer
    leaves_sms: bool  # whether NCCL's kernels may run beside those of the node
    _kind_of_team: type[EPAll2AllLayer] = EPAll2AllLayer
    _fixed: FixedPlans | None = None  # with rail_capacity
    _most: int  # tokens of a rank
    may_decode = False
    _is_closed = False
    _num_plans = 0  # that all ranks have made together
    _applies = False  # whether the team layer applies the experts of an EPMoE
    low_latency = None
    _owns_heap = False

    def __init__(self, ep_group: Nodes | ProcessGroup | DeviceMesh | None, max_tokens: int, hidden: int,
                 topk: int, rank: int | None = None, num_tot_experts: int | None = None,
                 local_world_size: int | None = None, world_size: int | None = None, *args: Any,
                 **options: Any) -> None:
        timeout_s = options.get("timeout_s")
        nodes = nodes_of(ep_group, local_world_size, timeout_s)
        self.nodes = self.world = nodes
        self.rank = nodes.rank
        self.world_size = nodes.size
        self.num_nodes = nodes.num_nodes
        self.node = nodes.node
        try:
            max_tokens = integer("max_tokens", max_tokens)
            num_experts = self._check_sizes(rank, world_size, num_tot_experts, options)
            if timeout_s is not None:
                nodes.set_timeout(timeout_s)
        except Exception:
            nodes._propagate()
            raise
        shared = {**dict(zip(_POSITIONAL, args)), **options}
        defaults = inspect.signature(self._kind_of_team).parameters
        shared = {name: value for name, value in shared.items()
                  if name in defaults and name not in _OWN and value != defaults[name].default}
        _agree(nodes, f"{self._kind_of_team.__name__} of max_tokens {max_tokens}, hidden {hidden}, topk "
                      f"{topk}, experts {num_tot_experts}, {shared}")
        try:
            self.team_layer = self._kind_of_team(
                nodes.team, _tokens_of_team(nodes, max_tokens, options), hidden, topk, None,
                num_experts // nodes.num_nodes, None, None, *args, **options)
        except Exception:
            with contextlib.suppress(EpError):
                nodes._propagate()
            raise
        try:
            _agree(nodes, "created")
        except EpError:
            with contextlib.suppress(EpError):
                self.team_layer.finalize()
            raise
        self._take(max_tokens, num_experts)
        if self.device.type == "cuda":  # NCCL connects in its first exchange, for which it allocates
            nodes._exchange_rows(*torch.zeros(2, nodes.num_nodes, dtype=torch.int32, device=self.device))
        self._number = nodes._num_layers
        nodes._num_layers += 1
        # The name in torch.ops.epmoe.nodes_*; as that of other layers, it has all that sizes depend on.
        self.id = f"{nodes.num_nodes} nodes, {self.node}, {self.team_layer.id}"
        ops.layers[self.id] = self

    def _take(self, max_tokens: int, num_experts: int) -> None:
        """Take the attributes of a layer from that of the team."""
        team = self.team_layer
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
        self.leaves_sms = self.device.type == "cpu" or team._config.reserve_sms >= RESERVE_SMS
        team._propagate_now = self._propagate_of_team  # type: ignore[method-assign]
        if self.rail_capacity is not None:
            self._fixed = FixedPlans(self, self.rail_capacity)

    # ---- validations and refusals ----

    def _validate(self, op: int, layout: NodesLayout | None = None, *, weights: bool = False,
                  gradients: int = 0, chunks: int = 0, error: BaseException | None = None) -> None:
        """Validate a call with all ranks.  Raises `error`, if there is one, after the others know of it.

        layout: with which the call is made, so that no rank moves the rows of another plan.
        An error that only repeats what another rank of this node has done becomes that of all ranks.
        """
        if self._is_closed:
            raise EpClosed("this layer is finalized: create a new one")
        try:
            if error is not None:
                mark_reported(error)
            if self._fixed is not None:
                self._fixed.settle(error)
            failed = 0 if error is None else SECOND if type(error) is PeerError else FAILED
            plan_number = 0 if layout is None else layout.number
            header = Header(op, self._number, plan_number, weights, gradients, chunks, failed=failed)
            try:
                self.nodes._validate(header)
            except PeerError:
                if error is not None and failed == FAILED:
                    raise error from None
                raise
        finally:
            del error  # else the error and this frame would be a cycle: see CollectiveLayer._propagate_now

    def _propagate(self, op: int, error: BaseException, buffer: Any) -> NoReturn:
        """Report to all ranks that this one cannot take part in op, then raise the error."""
        try:
            # checkpointing needs no more of this forward
            if not isinstance(error, StopRecomputation) and not is_reported(error):
                self._validate(OP_OF[op], error=error)
            raise error
        finally:
            del error

    def _propagate_of_team(self, op: int, error: BaseException, buffer: Any) -> NoReturn:
        """Propagate an error of the team layer, which happens after a validation, for lack of memory.

        In _apply the ranks of the node enter the operation, and then all ranks validate.  Elsewhere other
        nodes would not learn it.
        """
        try:
            if self._applies:
                type(self.team_layer)._propagate_now(self.team_layer, op, error, buffer)
            if not isinstance(error, StopRecomputation):
                self.nodes._end(error)
            raise error
        finally:
            del error

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End the world after an error between a validation and the end of a call."""
        try:
            yield
        except StopRecomputation:
            raise
        except BaseException as error:
            if isinstance(error, (EpIndexError, EpOverflow, PeerError)):
                if getattr(error, "_is_of_all", False):
                    raise
                if self._fixed is not None:
                    self._fixed.settle(error)
            self.nodes._end(error)
            raise

    # ---- calls ----

    def _plan_rail(self, indices: Tensor, buffer: int) -> NodesLayout:
        """Exchange the indices of the rail and make the plan, after a validation.

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
            if self._fixed is not None:
                return self._fixed.make_layout(len(indices), buffer, everyone)
            local, hit, facts = plan.local_indices(self, everyone)
            goes_to, owner = plan.destinations(self, indices)
            received, bad, values, sent = self.nodes._read(torch.cat([facts, goes_to.sum(1)[None]]))
        self.nodes._check_indices(bad, values, topk, self.num_experts)
        with self._ending():
            layout = plan.NodesLayout(self, len(indices), buffer, sent, received)
            layout.take(goes_to, owner)
            layout.indices = plan.arrivals(layout, local, hit)
        return layout

    def _plan_team(self, layout: NodesLayout) -> NodesLayout:
        with self._ending():
            layout.team = self.team_layer.preprocess(layout.indices, buffer=layout.buffer)
        return layout

    def _enter(self, input: Tensor, exp_indices: Any, weight: Tensor | None,
               more: Iterable[Tensor | None] = (), full_scatter_indices: Tensor | None = None,
               layout: Layout | None = None, buffer: int = 0,
               chunks: int = 0) -> tuple[Tensor | None, NodesLayout | None]:
        """Check the arguments of a dispatch and validate it.  Return the weights in float32, and the layout.

        more: other tensors of the call.  All ranks must want gradients of some of them, or none, and likewise
        of input and weight: the backward of each makes calls.
        """
        op = PLAN if layout is None else DISPATCH
        try:
            weight, layout = self._checked(input, exp_indices, weight, full_scatter_indices, layout, buffer)
        except Exception as error:
            self._validate(op, error=error)
            raise
        self._validate(op, layout, weights=weight is not None,
                       gradients=requires_grad(input, weight) + 2 * requires_grad(*more), chunks=chunks)
        return weight, layout

    def _send(self, input: Tensor, exp_indices: Any, weight: Tensor | None,
              full_scatter_indices: Tensor | None, layout: Layout | None, buffer: int,
              *more: Tensor | None) -> tuple[NodesLayout, Tensor, Tensor | None]:
        """Bring the tokens to the nodes of their experts.

        Returns the layout, and the tokens and weights that this rank has for its node.

        more: other tensors of the call.
        """
        if layout is None:
            self._check_buffer(_C.OP_PLAN, buffer)
        weight, checked = self._enter(input, exp_indices, weight, more, full_scatter_indices, layout, buffer)
        mine = self._plan_rail(exp_indices, buffer) if checked is None else checked
        if mine.team is None and not self._applies:
            self._plan_team(mine)
        with self._ending():
            here, weight_here = rows.Out.apply(input, weight, mine)
        mine.dispatched = True
        return mine, here, weight_here

    def _return(self, layout: NodesLayout, call: Callable[[], Tensor], weight: Tensor | None,
                *tensors: Tensor | None) -> Tensor:
        """Validate, make call(), which is the combine of the team, and bring its rows back."""
        self._validate(COMBINE, layout, weights=weight is not None,
                       gradients=requires_grad(weight, *tensors))
        with self._ending():
            return rows.Return.apply(call(), None, layout)[0]

    def _apply(self, moe: EPMoE, x: Tensor, topk_idx: Tensor,
               topk_weights: Tensor) -> tuple[Tensor, Layout | None]:
        """Apply the experts of an EPMoE: those of this node through the team layer, to what has arrived."""
        params: Any = (moe.gate_up_proj, moe.gate_up_proj_bias, moe.down_proj, moe.down_proj_bias,
                       *moe._adapter_leaves())
        if torch.compiler.is_compiling() and self.rail_capacity is None:
            return ops.apply(self, moe, requires_grad(x, topk_weights, *params), x, topk_idx,
                             topk_weights.float())
        num_chunks = moe._chunks_of_call(requires_grad(x, topk_weights, *params))
        return self._apply_now(moe, params, num_chunks, x, topk_idx, topk_weights)

    @without_dynamo
    def _apply_now(self, moe: EPMoE, params: tuple[Tensor | None, ...], num_chunks: int, x: Tensor,
                   topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, NodesLayout]:
        """Do it as calls.

        The validation comes after all stages of the node, so that it also tells of an error in one of them.
        """
        y, error = None, None
        self._applies = True
        try:
            if num_chunks > 1:
                return pipeline.apply(self, moe, num_chunks, params, x, topk_idx, topk_weights)
            layout, here, weight_here = self._send(x, topk_idx, topk_weights, None, None, 0)
            assert weight_here is not None  # topk_weights is a tensor
            layout.of_experts_in_16_bits = self.dtype != torch.float32
            if self._fixed is not None:
                self._fixed.owes_result = True
            try:
                y, layout.team = moe._compute(self.team_layer, here, layout.indices, weight_here)
            except StopRecomputation:
                raise
            except Exception as e:
                error = e
                if self._fixed is not None:
                    self._fixed.pay_result()
        finally:
            self._applies = False
        try:
            self._validate(COMBINE, layout, gradients=requires_grad(x, topk_weights, *params), error=error)
        finally:
            del error
        with self._ending():
            return rows.Return.apply(y, None, layout)[0], layout

    @without_dynamo
    def preprocess(self, exp_indices: Tensor, full_scatter_indices: Tensor | None = None, *,
                   buffer: int = 0) -> NodesLayout:
        self._check_buffer(_C.OP_PLAN, buffer)
        try:
            check_mode()
            self._check_capture()
            if full_scatter_indices is not None:
                raise ValueError("full_scatter_indices: not over several nodes: leave it out")
            self._check_indices(exp_indices)
        except Exception as error:
            self._validate(PLAN, error=error)
        self._validate(PLAN)
        return self._plan_team(self._plan_rail(exp_indices, buffer))

    @without_dynamo
    def dispatch(self, input: Tensor, exp_indices: Tensor | None = None, weight: Tensor | None = None,
                 full_scatter_indices: Tensor | None = None, *, layout: Layout | None = None,
                 buffer: int = 0) -> tuple[Tensor, Tensor | None, NodesLayout]:
        mine, here, weight_here = self._send(input, exp_indices, weight, full_scatter_indices, layout, buffer)
        with self._ending():
            out, row_weight, mine.team = self.team_layer.dispatch(here, None, weight_here, layout=mine.team)
        return out, row_weight, mine

    @without_dynamo
    def dispatch_fp8(self, input: Tensor, exp_indices: Tensor | None = None, weight: Tensor | None = None,
                     full_scatter_indices: Tensor | None = None, *, layout: Layout | None = None,
                     buffer: int = 0) -> tuple[Tensor, Tensor, Tensor | None, NodesLayout]:
        """As EPAll2AllLayer's.  Between nodes tokens travel in the layer's dtype."""
        try:
            if requires_grad(*(t for t in (input, weight) if isinstance(t, torch.Tensor))):
                raise RuntimeError("dispatch_fp8 has no gradients: call it under torch.no_grad(), or use "
                                   "dispatch")
        except Exception as error:
            self._validate(PLAN if layout is None else DISPATCH, error=error)
        mine, here, weight_here = self._send(input, exp_indices, weight, full_scatter_indices, layout, buffer)
        with self._ending():
            out, scales, row_weight, mine.team = self.team_layer.dispatch_fp8(here, None, weight_here,
                                                                              layout=mine.team)
        return out, scales, row_weight, mine

    @without_dynamo
    def combine(self, input: Tensor, layout: Layout, weight: Tensor | None = None) -> Tensor:
        try:
            check_mode(input, weight)
            mine, team = self._check_rows("input rows", input, self.hidden, weight, layout)
        except Exception as error:
            self._validate(COMBINE, error=error)
            raise
        return self._return(mine, lambda: self.team_layer.combine(input, team, weight), weight, input)

    def ep_barrier_all(self, *, buffer: int = 0) -> None:
        self._check_buffer(_C.OP_BARRIER, buffer)
        self.synchronize()
        self._validate(BARRIER)

    def synchronize(self) -> None:
        if self._fixed is not None:
            self._fixed.settle(now=True)
        self.team_layer.synchronize()

    def finalize(self) -> None:
        if not self._is_closed and not self.nodes._has_ended():
            self.nodes._validate(Header(FINALIZE, self._number))
        self.team_layer.finalize()
        self._is_closed = True

    # ---- checks of arguments on each rank, before the validation ----

    def _check_sizes(self, rank: int | None, world_size: int | None, num_tot_experts: int | None,
                     options: dict[str, Any]) -> int:
        """Check what all ranks must have alike.  Returns the number of experts."""
        for name, got, want in (("rank", rank, self.rank), ("world_size", world_size, self.world_size)):
            if got is not None and got != want:
                raise ValueError(f"{name}={got}, but the group says {want}: leave it out")
        if num_tot_experts is None:
            raise TypeError("num_tot_experts is missing: pass the number of experts of all ranks")
        num_experts = integer("num_tot_experts", num_tot_experts)
        if num_experts % self.world_size:
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
        return num_experts

    def _checked(self, input: Tensor, exp_indices: Any, weight: Tensor | None,
                 full_scatter_indices: Tensor | None, layout: Layout | None,
                 buffer: int) -> tuple[Tensor | None, NodesLayout | None]:
        """Check the arguments of a dispatch on this rank.  Return the weights as float32, and the layout."""
        check_mode(input, weight)
        self._check_capture()
        mine, num_tokens = None, None
        if full_scatter_indices is not None:
            raise ValueError("full_scatter_indices: not over several nodes, where the plan chooses the rows: "
                             "leave it out")
        if layout is not None:
            mine = self._check_nodes_layout(layout)
            if buffer not in (0, mine.buffer):
                raise ValueError(f"buffer {buffer!r}, but the layout is of buffer {mine.buffer}: leave "
                                 f"buffer out")
            num_tokens = mine.num_tokens
        self._check_tensor("input", input, self.dtype, (num_tokens, self.hidden))
        if layout is None:
            self._check_indices(exp_indices)
            if exp_indices.shape[0] != input.shape[0]:
                raise ValueError(f"input has {input.shape[0]} tokens, but exp_indices has "
                                 f"{exp_indices.shape[0]}: must be the same")
        if weight is not None:
            self._check_tensor("weight", weight, None, (input.shape[0], self.topk * self._copies))
        return cast(weight, torch.float32), mine

    def _check_indices(self, exp_indices: Any) -> None:
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

    def _check_nodes_layout(self, layout: Any) -> NodesLayout:
        """Return the layout, which must be one of this layer."""
        if not isinstance(layout, NodesLayout):
            raise TypeError(f"layout: wanted a layout of several nodes, got {type(layout).__name__}")
        if layout.layer is not self:
            raise ValueError("the layout belongs to another layer: pass one that this layer's preprocess or "
                             "dispatch returned")
        if layout.is_void:
            raise ValueError("cannot use this layout: its plan has failed. Make another with preprocess")
        return layout

    def _check_rows(self, name: str, input: Any, columns: int, weight: Any,
                    layout: Any) -> tuple[NodesLayout, Layout]:
        """Check the rows and weights of a combine.  Returns the layout, and that of the node."""
        self._check_capture()
        layout = self._check_nodes_layout(layout)
        if not layout.dispatched:
            raise ValueError("combine needs the layout of a dispatch, but this one was only planned: call "
                             "dispatch(layout=...) first")
        if layout.team is None:
            raise ValueError("the layout is of a call of EPMoE with num_chunks, whose rows have returned: "
                             "pass the layout of a dispatch")
        self._check_tensor(name, input, self.dtype, (self._rows_of(layout), columns))
        if weight is not None:
            self._check_tensor("weight", weight, None, (input.shape[0],))
        return layout, layout.team

    def _rows_of(self, layout: NodesLayout) -> int:
        return layout.num_rows if self.capacity is None else self.capacity

    def _check_capture(self) -> None:
        if self.rail_capacity is None and is_capturing(self.device):
            raise RuntimeError("this layer over several nodes cannot be captured in a CUDA graph, because "
                               "the host reads numbers of rows in each call: create it with capacity and "
                               "rail_capacity, with which sizes are fixed")


class InternodeFusedOp(InternodeLayer, EpAll2AllFusedOp):
    """EpAll2AllFusedOp over several nodes: the megakernels work on the tokens that have arrived."""

    team_layer: EpAll2AllFusedOp
    _kind_of_team = EpAll2AllFusedOp

    def _take(self, max_tokens: int, num_experts: int) -> None:
        super()._take(max_tokens, num_experts)
        team = self.team_layer
        self.token_saving, self.token_sorting = team.token_saving, team.token_sorting
        self.block_wise_barrier, self.combine_order = team.block_wise_barrier, team.combine_order

    @property
    def fused(self) -> bool:
        """As that of the layer of this node."""
        return self.team_layer.fused

    def _check_weights(self, name: str, leaves: tuple[Tensor | None, ...], rows: int | None,
                       columns: int | None,
                       product: tuple[Any, Any, Tensor | None, Activation | None]) -> None:
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

    @without_dynamo
    def mega_dispatch_group_gemm(self, input: Tensor, exp_indices: Tensor | None = None,
                                 layout: Layout | None = None, gemm_weight: Tensor | None = None,
                                 weight: Tensor | None = None, *, bias: Tensor | None = None,
                                 activation: Activation | None = None,
                                 full_scatter_indices: Tensor | None = None, buffer: int = 0,
                                 gemm_scale: Tensor | None = None
                                 ) -> tuple[Tensor, Tensor | None, NodesLayout]:
        """As EpAll2AllFusedOp's.  Between nodes tokens travel in the layer's dtype, also with gemm_scale."""
        try:
            self._check_weights("dispatch + GEMM", (input, weight), None, self.hidden,
                                (gemm_weight, gemm_scale, bias, activation))
        except Exception as error:
            self._validate(PLAN if layout is None else DISPATCH, error=error)
        mine, here, weight_here = self._send(input, exp_indices, weight, full_scatter_indices, layout, buffer,
                                             gemm_weight, bias)
        with self._ending():
            h, row_weight, mine.team = self.team_layer.mega_dispatch_group_gemm(
                here, None, mine.team, gemm_weight, weight_here, bias=bias, activation=activation,
                gemm_scale=gemm_scale)
        return h, row_weight, mine

    @without_dynamo
    def mega_group_gemm_combine(self, gemm_input: Tensor, gemm_weight: Tensor, layout: Layout,
                                weight: Tensor | None = None, *, bias: Tensor | None = None,
                                gemm_scale: Tensor | None = None) -> Tensor:
        try:
            self._check_weights("GEMM + combine", (gemm_input, weight), self.hidden, None,
                                (gemm_weight, gemm_scale, bias, None))
            mine, team = self._check_rows("gemm_input", gemm_input, gemm_weight.shape[2], weight, layout)
        except Exception as error:
            self._validate(COMBINE, error=error)
            raise

        def combine() -> Tensor:
            return self.team_layer.mega_group_gemm_combine(gemm_input, gemm_weight, team, weight, bias=bias,
                                                           gemm_scale=gemm_scale)

        return self._return(mine, combine, weight, gemm_input, gemm_weight, bias)


EPAll2AllLayer._over_nodes, EpAll2AllFusedOp._over_nodes = InternodeLayer, InternodeFusedOp


def _tokens_of_team(nodes: Nodes, max_tokens: int, options: dict[str, Any]) -> int:
    """Return the most tokens that a rank has for its node."""
    of_others: int = min(max_tokens, options.get("rail_capacity") or max_tokens)
    return max_tokens + (nodes.num_nodes - 1) * of_others


def _agree(nodes: Nodes, mine: str) -> None:
    """Raise EpMismatch on all ranks if they describe different layers."""
    agree(nodes, mine, "rank {rank} creates {its}; rank 0 creates {first}. Create the layer with the same "
                       "arguments on all ranks.")
