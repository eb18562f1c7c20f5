"""The rail works while the node multiplies: the experts of an EPMoE over several nodes, in chunks.

Every rank has the tokens of its rail for its node.  Those of its own node are chunk 0 and cross nothing.  The
tokens of the other nodes are cut into C chunks: chunk c has the same part of the tokens of each node, in
order, so both ends of the rail know it from the counts of the plan.  The host launches in this order, which
is the same on all ranks (D: out over the rail, X: the stages of the node, R: back over the rail):

    D1 X0 D2 X1 R1 D3 X2 R2 ... XC RC

Exchanges are asynchronous: on NCCL they run on a stream of their own, on gloo in threads.  After each X all
ranks validate on the host, so that an error in it reaches all before its rows go back.  The backward launches
the reverse: D for the gradient of chunk C first, the own tokens last.

The sum of a token does not depend on C: node n contributes one row, whatever the chunk in which it comes, and
rows are added up in node order when all are back.

Freedom from deadlock: as in rail.py, and on CUDA the team's kernels leave SMs to those of NCCL (RESERVE_SMS),
so that the next kernel of each stream can start.  tests/models/rail.pml checks this order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...comm import validation
from ...torch_modes import StopRecomputation, requires_grad
from ...gemm.weight_gradients import Factors
from . import rows
from .plan import NodesLayout

if TYPE_CHECKING:
    from ...moe.module import EPMoE
    from .layer import InternodeLayer

# Gate and up, their bias or None, down, its bias or None, as EPMoE._weights returns them.
Weights: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


class Flight:
    """One forward pass and its backward: the chunks, and the exchanges that are under way."""

    def __init__(self, layout: NodesLayout, num_chunks: int) -> None:
        self.layout = layout
        self.layer = layout.layer
        self.parts = layout.parts(num_chunks)
        self.chunks = range(1, num_chunks + 1)
        self.arriving: dict[int, Tensor] = {}  # chunk -> the gradients of its rows, in a backward
        self.returned: dict[int, Tensor] = {}  # chunk -> the gradients of its tokens, in a backward
        self.totals: list[_Total] = []  # of the weights, in a backward
        self._waits: dict[tuple[str, int], Callable[[], None]] = {}  # name of an exchange -> waits for it
        self._source: Tensor | None = None  # the rows still to be sent: tokens, or the gradient of the sums
        self._to_fill: dict[int, Tensor] = {}  # chunk -> where its rows arrive

    def begin(self, source: Tensor) -> list[Tensor]:
        """Say which rows [T, H] leave, and return where each chunk of the other ranks' rows arrives."""
        self._source = source
        made = [source.new_empty(sum(self.parts[c].recv_tokens), source.shape[1]) for c in self.chunks]
        # aliases that autograd does not see: the rail writes them after they have left this function
        self._to_fill = {c: t.detach() for c, t in zip(self.chunks, made)}
        return made

    def send(self, chunk: int) -> None:
        """Start D of a chunk, if there is such a chunk."""
        if self._source is None or chunk not in self._to_fill:
            return
        part, into = self.parts[chunk], self._to_fill.pop(chunk)
        self._start(("out", chunk), into, self._source[part.send_idx], part.recv_tokens, part.send_tokens)
        if not self._to_fill:
            self._source = None

    def bring(self, chunk: int, t: Tensor) -> Tensor:
        """Start R of a chunk with rows t [A, H], rounded to rail_dtype.  Returns where they arrive."""
        part, t = self.parts[chunk], t.to(self.layer.rail_dtype)
        back = t.new_empty(sum(part.send_tokens), t.shape[1])
        self._start(("return", chunk), back.detach(), t.contiguous(), part.send_tokens, part.recv_tokens)
        return back

    def _start(self, name: tuple[str, int], out: Tensor, mine: Tensor, out_splits: list[int],
               splits: list[int]) -> None:
        self._waits[name] = self.layer.nodes._start_rows(out, mine, out_splits, splits)

    def wait(self, way: str, chunk: int) -> None:
        self._waits.pop((way, chunk))()

    def drain(self) -> None:
        """Wait for what is under way after an error, which all ranks know: all have started the same."""
        waits, self._waits, self._source, self._to_fill = list(self._waits.values()), {}, None, {}
        if not self.layer.nodes._has_ended():
            for wait in waits:
                wait()

    def total(self, own: Tensor, backs: Sequence[Tensor]) -> Tensor:
        """Return the sums [T, H] of the rows of each node, in node order, in float32, rounded once."""
        total = own.new_zeros(self.layout.num_tokens, own.shape[1], dtype=torch.float32)
        dtype, own = own.dtype, own.to(self.layer.rail_dtype)
        for node in range(self.layer.num_nodes):
            if node == self.layer.node:
                total.index_add_(0, self.parts[0].send_idx, own.float())
                continue
            for c, back in zip(self.chunks, backs):
                _, first, end = self.parts[c].segments(self.parts[c].send_tokens)[node]
                total.index_add_(0, self.parts[c].send_idx[first:end], back[first:end].float())
        return total.to(dtype)


class _Send(torch.autograd.Function):
    """Tokens [T, H] to the own tokens and the chunks, which arrive later.  Backward: the gradients' sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> tuple[Tensor, ...]:
        ctx.flight = flight
        return (x[flight.parts[0].send_idx], *flight.begin(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_own: Tensor, *_: Any) -> tuple[Tensor, None]:
        flight: Flight = ctx.flight
        with flight.layer._ending():
            for c in reversed(flight.chunks):
                flight.wait("return", c)
            return flight.total(d_own, [flight.returned.pop(c) for c in flight.chunks]), None


class _Arrive(torch.autograd.Function):
    """Wait for a chunk.  Backward: start the way back of its gradients."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, flight: Flight, chunk: int) -> Tensor:
        ctx.flight, ctx.chunk = flight, chunk
        flight.wait("out", chunk)
        return t.view_as(t)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
        rows.validate_backward(ctx.flight.layout, validation.DISPATCH_BACKWARD, d_rows)
        with ctx.flight.layer._ending():
            ctx.flight.returned[ctx.chunk] = ctx.flight.bring(ctx.chunk, d_rows)
        return d_rows, None, None


class _Return(torch.autograd.Function):
    """Start the way back of the rows of a chunk.  Backward: wait for their gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, flight: Flight, chunk: int) -> Tensor:
        ctx.flight, ctx.chunk = flight, chunk
        return flight.bring(chunk, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any) -> tuple[Tensor, None, None]:
        with ctx.flight.layer._ending():
            ctx.flight.send(ctx.chunk - 1)
            ctx.flight.wait("out", ctx.chunk)
        return ctx.flight.arriving.pop(ctx.chunk), None, None


class _Sum(torch.autograd.Function):
    """Wait for all chunks and add up the rows of each token.  Backward: start the way out of its gradient."""

    @staticmethod
    def forward(ctx: Any, flight: Flight, own: Tensor, *backs: Tensor) -> Tensor:
        ctx.flight = flight
        for c in flight.chunks:
            flight.wait("return", c)
        return flight.total(own, backs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows.validate_backward(ctx.flight.layout, validation.COMBINE_BACKWARD, dy)
        return _Sum.begin(ctx, dy)

    @staticmethod
    @once_differentiable
    def begin(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        flight: Flight = ctx.flight
        with flight.layer._ending():
            flight.drain()  # what a backward that failed has left
            for total in flight.totals:
                total.begin()
            dy = dy.contiguous()
            flight.arriving = dict(zip(flight.chunks, flight.begin(dy)))
            flight.returned = {}
            flight.send(flight.chunks[-1])
            # What _Return receives is not read: only its shape must be right.
            shapes = [sum(flight.parts[c].send_tokens) for c in flight.chunks]
            zero = dy.new_zeros(1, 1, dtype=flight.layer.rail_dtype)
            return (None, dy[flight.parts[0].send_idx], *(zero.expand(n, dy.shape[1]) for n in shapes))


class _Scalars(torch.autograd.Function):
    """Routing weights [T, K] to the tokens' nodes, as the chunks [A, K] in one.  Backward: back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layout: NodesLayout) -> Tensor:
        ctx.layout = layout
        return rows.out(layout, weight, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weight: Tensor) -> tuple[Tensor, None]:
        with ctx.layout.layer._ending():
            return rows.scalars_back(ctx.layout, d_weight.contiguous()), None


class _Total:
    """The gradient of a weight of 16 bits that several products use: their sum in float32, rounded once.

    Autograd would round each partial sum to the dtype of the weight.  It takes the place of a DeferredWgrad
    (weight_gradients.py), so a product of rows adds its gradient to the sum and stores it nowhere else.
    """

    def __init__(self, p: Tensor, num_uses: int) -> None:
        self.shape, self.dtype = p.shape, p.dtype
        self.num_uses = num_uses
        self.begin()

    def begin(self) -> None:
        """Begin a backward."""
        self.left, self.sum = self.num_uses, cast("Tensor | None", None)

    def take(self, factors: Factors) -> Tensor | None:
        """Add the product of the factors.  Returns what add returns."""
        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph=True: with num_chunks there are no second derivatives: "
                                      "pass num_chunks=1")
        if self.sum is None:
            self.sum = factors.tensors[0].new_zeros(self.shape, dtype=torch.float32)
        factors.add_to(self.sum, 1.0)
        return self._count(self.sum)

    def add(self, grad: Tensor) -> Tensor | None:
        """Add a gradient.  Returns the sum if it is the last of a backward pass, else None."""
        self.sum = grad.float() if self.sum is None else self.sum.add_(grad)
        return self._count(self.sum)

    def _count(self, total: Tensor) -> Tensor | None:
        self.left -= 1
        if self.left:
            return None
        self.begin()
        return total.to(self.dtype)


class _Use(torch.autograd.Function):
    """One use of a bias.  Backward: to its _Total."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, total: _Total) -> Tensor:
        ctx.total = total
        return p.view_as(p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.total.add(grad), None


def _weights_of(moe: EPMoE, num_uses: int) -> tuple[list[Weights], list[_Total]]:
    """Return a list of the experts' weights and biases for each chunk, and the totals of their gradients."""
    lists: list[list[Any]] = []
    totals: list[_Total] = []
    for p in moe._weights():
        uses: list[Any] = [p] * num_uses
        if p is not None and requires_grad(p) and p.dtype != torch.float32:
            total = _Total(p, num_uses)
            totals.append(total)
            if p.dim() == 3 and p.is_contiguous():
                alias = p.view_as(p)
                setattr(alias, "_epmoe_deferred_wgrad", total)
                uses = [alias] * num_uses
            else:
                uses = [_Use.apply(p, total) for _ in uses]
        lists.append(uses)
    of_chunks: list[Any] = list(zip(*lists))
    return of_chunks, totals


def apply(layer: InternodeLayer, moe: EPMoE, num_chunks: int, params: tuple[Tensor | None, ...], x: Tensor,
          topk_idx: Tensor, topk_weights: Tensor) -> tuple[Tensor, NodesLayout]:
    """Apply the experts of an EPMoE in chunks.  Returns (y, layout)."""
    weight, _ = layer._enter(x, topk_idx, topk_weights, chunks=num_chunks)
    layout = layer._plan_rail(topk_idx, 0)
    layout.of_experts_in_16_bits = layer.dtype != torch.float32
    gradients = requires_grad(x, topk_weights, *params)
    with layer._ending():
        flight = Flight(layout, num_chunks)
        weight = _Scalars.apply(weight, layout)
        tokens = list(_Send.apply(x, flight))
        uses, flight.totals = _weights_of(moe, num_chunks + 1)
        flight.send(1)
    try:
        own: Any = None
        backs: list[Tensor] = []
        for c, part in enumerate(flight.parts):
            with layer._ending():
                if c:
                    flight.send(c + 1)
                    tokens[c] = _Arrive.apply(tokens[c], flight, c)
                here, weight_here = tokens[c], weight[part.places]
            y, error = None, None
            try:
                y, part.team = moe._compute(layer.team_layer, here, part.indices, weight_here, uses[c])
            except StopRecomputation:
                raise
            except Exception as e:
                error = e
            tokens[c] = here = None  # what the backward does not need
            try:
                layer._validate(validation.COMBINE, layout, gradients=gradients, error=error,
                                chunks=num_chunks)
            finally:
                del error
            with layer._ending():
                if c:
                    backs.append(_Return.apply(y, flight, c))
                else:
                    own = y
        with layer._ending():
            y = _Sum.apply(flight, own, *backs)
    except BaseException:
        with contextlib.suppress(Exception):
            flight.drain()
        raise
    layout.chunks = flight.parts
    layout.dispatched = True
    return y, layout
