"""One row for each (token, rank): what DeepEP sends, from layers of epmoe.

EPAll2AllLayer has one row for each choice of an expert.  Here the "experts" of a layer are the ranks, and the
K = W choices of a token are the ranks to which it goes.  So a rank receives one row of each token that goes
to it, ordered by source rank, then token; and combine adds up one row from each rank, without weights.
"""

import functools
import itertools
import weakref

import torch

from ... import _C
from ...a2a.layer import EPAll2AllLayer
from ...a2a.layout import EPLayout
from ...comm.error_propagation import reporting
from ...gemm.grouped import aligned
from .refusal import refuse
from .rows import check_rows, meta_key, rows_key


class Routes:
    """Layers that differ only in what a row is, so that a plan of one of them serves all.

    A program dispatches rows of one size and combines rows of another, and indices, weights and scales travel
    beside them.  All layers of a Routes have the same ranks, experts, choices, tokens and capacity.  A layer
    is created in the first call that uses rows of its size, which is collective.
    """

    def __init__(self, world, device, max_tokens, num_experts, topk, **options):
        self.world = world
        self.device = device
        self.max_tokens = max_tokens
        self._make = functools.partial(EPAll2AllLayer, world, max_tokens, topk=topk, device=device,
                                       num_tot_experts=num_experts, **options)
        self._layers = {}
        self._latest = {}  # operation -> keys of the layers that the next one is likely to use
        self.planner = self._make(4, dtype=torch.float32)  # makes all plans, so that their numbers are unique

    def layer(self, dtype, hidden):
        key = dtype, hidden
        if key not in self._layers:
            self._layers[key] = self._make(hidden, dtype=dtype)
        return self._layers[key]

    def plan(self, idx, num_rows=None):
        """Plan a dispatch to the experts idx [T, K].  Collective.

        num_rows: The rows of its results where the layers have a capacity, which may be larger.
        """
        return Plan(self, self.planner.preprocess(idx), num_rows)

    def note(self, op, x, *columns):
        """Remember what a call sends, in case a rank cannot say it in the next one."""
        self._latest[op] = self._keys(op, x, columns)
        if op == _C.OP_DISPATCH:  # numbers of one byte return as bfloat16
            dtype = torch.bfloat16 if x.element_size() == 1 else x.dtype
            self._latest[_C.OP_COMBINE] = [(dtype, x.shape[1])]

    def _keys(self, op, x, columns):
        """Return the keys of the layers that move rows x, and what travels beside them."""
        columns = [c for c in columns if isinstance(c, torch.Tensor) and c.dim() == 2]
        is_unknown = op == _C.OP_COMBINE and x.element_size() == 1  # which combine refuses
        key = self._latest[op][0] if is_unknown else rows_key(x)
        return [key, meta_key(*columns)] if columns else [key]

    def steps(self, op, x, *columns):
        """Return the steps of a call for refuse(): the rows x, and what travels beside them.

        If x is wrong, the others are taken to send what the latest call has sent.
        """
        try:
            check_rows("x", x, self.device)
            keys = self._keys(op, x, columns)
        except (KeyError, TypeError, ValueError):
            keys = self._latest.get(op, [None])
        return [(self._layers.get(key), 0, op) for key in keys]

    def layers(self):
        """Return the layers, in the order in which they were created."""
        return [self.planner, *self._layers.values()]


def plan_steps(routes, x, *columns):
    """Return the steps of a plan and a dispatch for refuse(); routes is None if the others create it."""
    if routes is None:
        return [(None, 0, _C.OP_PLAN)]
    return [(routes.planner, 0, _C.OP_PLAN), *routes.steps(_C.OP_DISPATCH, x, *columns)]


class RoutesBySize:
    """Routes that differ only in max_tokens, for calls of any size.

    A call takes the smallest one that is large enough, which is always the same one for a size.  A new one is
    at least twice as large as the largest, so there are few of them whatever sizes a program asks for.  None
    is closed before the buffer is destroyed: a handle or a CUDA graph may still use it.
    """

    def __init__(self):
        self.made = []  # the largest last
        self.latest = None

    def find(self, num_tokens):
        """Return the Routes for so many tokens of a rank, or None."""
        return next((routes for routes in self.made if routes.max_tokens >= num_tokens), None)

    def at_least(self, num_tokens, make):
        """Return the Routes for so many tokens of a rank.  Collective if there is none yet.

        make(max_tokens): Makes a Routes.
        """
        found = self.find(num_tokens)
        if found is None:
            found = make(max(num_tokens, 2 * self.made[-1].max_tokens if self.made else 0))
            self.made.append(found)
        self.latest = found
        return found

    def layers(self):
        """Return the layers of all of them."""
        return [layer for routes in self.made for layer in routes.layers()]


class Plan:
    """A plan, for all layers of its Routes."""

    def __init__(self, routes, layout, num_rows):
        self.routes = routes
        self.layout = layout  # the planner's
        self.num_tokens = layout.num_tokens
        self.num_rows = num_rows if layout._num_rows is None else layout._num_rows
        self.topk_idx = None  # or what travels beside the rows in each dispatch with this plan

    def on(self, layer):
        """Return the EPLayout of a layer."""
        layout = EPLayout(layer, self.layout.plan, self.num_tokens, 0, self.layout._num_rows)
        layout.recv = self.layout.recv
        return layout

    def dispatch(self, rows, weight=None):
        """Return the rows [M, H] that this rank receives of rows [T, H], and the weights [M] or None."""
        layer = self.routes.layer(rows.dtype, rows.shape[1])
        rows = aligned(rows)
        layout, weight, _ = layer._prepare(_C.OP_DISPATCH, rows, None, weight, None, self.on(layer), 0)
        rows, row_weight, layout = layer._dispatch_planned(layout, rows, weight, self.num_rows)
        if self.layout.recv is None:
            self.layout.recv = layout.recv
        return rows, row_weight

    def combine(self, rows, scalar=None, biases=()):
        """Return the sums [T, H] of rows [M, H], and the scalars [T, K] of scalar [M], or None.

        A sum begins with the 0, 1 or 2 biases [T, H].  Rows follow in the order of the choices.  If a rank
        adds up its rows first, the ranks follow in the order of the last choices at them.
        """
        layer = self.routes.layer(rows.dtype, rows.shape[1])
        with reporting(layer, _C.OP_COMBINE, 0, self.layout.plan):
            biases = [aligned(b.contiguous()) for b in biases]
            return layer._combine(aligned(rows), None, scalar, self.layout.plan, self.layout.recv, 0,
                                  self.num_tokens, biases=(*biases, None, None)[:2], by_choice=True)

    def num_inputs(self, op):
        """Return the rows that a rank passes to an operation with this plan."""
        return self.num_tokens if op == _C.OP_DISPATCH else self.num_rows

    def tensors(self):
        return self.layout.plan, self.layout.recv


class Plans:
    """The plans of a buffer's dispatches, which later calls name by a handle.

    notices: The Notices of the buffer.  kind: The class of its handles, which have a plan.
    """

    def __init__(self, notices, kind):
        self.notices = notices
        self.kind = kind
        self._number = itertools.count()
        self._in_use = weakref.WeakValueDictionary()  # the newest last
        self.latest = None  # the Routes of the newest plan

    def add(self, plan):
        self._in_use[next(self._number)] = plan
        self.latest = plan.routes

    def of(self, handle):
        """Return the plan of a handle."""
        if not isinstance(handle, self.kind):
            raise TypeError(f"handle: wanted what dispatch of this buffer returned, got "
                            f"{type(handle).__name__}")
        if handle.plan.routes.world is not self.notices.world:
            raise ValueError("handle: it belongs to a buffer of another group")
        return handle.plan

    def refuse(self, error, handle, op, x, *columns):
        """Refuse a call with a handle; see refuse().

        columns: What travels beside the rows, without the indices of the handle.

        If the handle is wrong, the others are taken to use the newest plan for as many rows as x has, or
        else the newest one.
        """
        try:
            plan = self.of(handle)
        except (TypeError, ValueError):
            num = len(x) if isinstance(x, torch.Tensor) and x.dim() else None
            newest = reversed([*self._in_use.values()])
            plan = next((plan for plan in newest if num == plan.num_inputs(op)), None)
        routes = self.latest if plan is None else plan.routes
        if op == _C.OP_DISPATCH and plan is not None:
            columns = plan.topk_idx, *columns
        steps = routes.steps(op, x, *columns) if routes else [self.notices.step]
        refuse(self.notices.world, error, steps)
