"""Where the gradients of an EPMoE's weights go: later, by a call of its own, or into main_grad.

By default the backward of a product computes the gradient of its weights (WGRAD) and returns it to autograd.
An EPMoE that wants something else passes its product an alias of the weights that carries a DeferredWgrad.
The product's backward then gives the factors of the gradient to the deferred wgrad (gradient_of).

Names and meanings are those of Transformer Engine and Megatron-LM: delay_wgrad_compute, backward_dw,
fuse_wgrad_accumulation, main_grad, grad_added_to_main_grad.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _C
from ..torch_modes import check_backward
from .activations import as_kernel

if TYPE_CHECKING:
    from ..a2a.layer import EPAll2AllLayer

WGRAD = 2  # as in grouped.py, which uses this file

_delaying: weakref.WeakSet[WeightGradients] = weakref.WeakSet()  # the WeightGradients that delay
_lock = threading.Lock()  # ranks may be threads
_is_installed = False


def deferred_wgrad_of(weight: Tensor) -> DeferredWgrad | None:
    """Return the DeferredWgrad that weights carry, or None."""
    return getattr(weight, "_epmoe_deferred_wgrad", None)


class of_one_backward:
    """A context manager around one backward.  If that fails, the factors that it has deferred are dropped.

    On CUDA, the error of an operation comes after the backward: then they are dropped before the next use.
    The other ranks learn only of errors inside of the block, so entering it calls nothing that can fail.

    layer: The layer of the backward's operations, or None if it has none.  buffer: Their buffer.
    """

    __slots__ = ("before", "buffer", "layer")

    def __init__(self, layer: EPAll2AllLayer | None, buffer: int, *deferred: DeferredWgrad | None) -> None:
        self.layer, self.buffer = layer, buffer
        # A _Total of pipeline.py is not a DeferredWgrad. It keeps nothing for backward_dw.
        owners = {id(d.owner): d.owner for d in deferred if isinstance(d, DeferredWgrad) and d.owner.delays}
        self.before = [(owner, [(of, waiting, len(waiting)) for of, waiting in owner.pending])
                       for owner in owners.values()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            if self.before and self.layer is not None:
                self._remember_call(self.layer)
            return
        for owner, entries in self.before:
            for _, waiting, num in entries:
                del waiting[num:]
            owner.pending = collections.deque((of, waiting) for of, waiting, _ in entries)

    def _remember_call(self, layer: EPAll2AllLayer) -> None:
        call = layer, self.buffer, _C.layer_newest_call(layer._c, self.buffer)
        for owner, entries in self.before:
            old = {id(waiting): num for _, waiting, num in entries}
            for _, waiting in owner.pending:
                for factors in waiting[old.get(id(waiting), 0):]:
                    factors.call = call


def gradient_of(deferred: DeferredWgrad | None, a: Tensor, b: Tensor, offsets: Tensor,
                portable: bool = False) -> Tensor | None:
    """Return the gradient [L, N, K] of weights, of a [M, N] and b [M, K], or what deferred returns."""
    return gradient_of_factors(deferred, Factors(a, b, offsets, portable=portable))


def gradient_of_node(deferred: DeferredWgrad | None, a: Tensor, b: Tensor, offsets: Tensor,
                     portable: bool) -> Tensor | None:
    """Do what gradient_of does, in a node of autograd for one product.

    Where Step.combines, the layer's next operation after these nodes is a combine.  An error in a node is
    reported to the other ranks in that combine.
    """
    factors, step = Factors(a, b, offsets, portable=portable), None if deferred is None else deferred.step
    try:
        grad = gradient_of_factors(deferred, factors)
        if step is not None and step.layer is not None:
            factors.call = step.layer, 0, _C.layer_newest_call(step.layer._c, 0) + step.combines
        return grad
    except Exception as error:
        if step is None or step.layer is None or not step.combines:
            raise
        step.layer._propagate(_C.OP_COMBINE, error, 0)


def gradient_of_factors(deferred: DeferredWgrad | None, factors: Factors) -> Tensor | None:
    """Return the gradient [L, N, K] of weights, or what deferred returns."""
    return factors.product() if deferred is None else deferred.take(factors)


def gradient_at(deferred: DeferredWgrad | None, grad: Tensor | None) -> Tensor | None:
    """Return where the gradient [L, N, K] of weights is now: main_grad, or `grad`, of a gradient_of."""
    return grad if deferred is None else main_grad_of(deferred.parameter).view(deferred.shape)


class Factors:
    """The factors of a gradient, and what must be known to multiply them later.

    tensors: a [M, N], b [M, K], and the offsets of the experts' rows.
    """

    deferred_wgrad: DeferredWgrad

    def __init__(self, *tensors: Tensor, portable: bool = False) -> None:
        self.tensors, self.portable = tensors, portable
        self.versions = self._versions()
        self.is_added = False  # to main_grad
        self.stream: torch.cuda.Stream | None = None
        self.ready: torch.cuda.Event | None = None
        # The last operation of the backward: its layer, buffer and number.  On CUDA its error comes later.
        self.call: tuple[EPAll2AllLayer, int, int] | None = None

    def product(self) -> Tensor:
        """Return the gradient [L, N, K]."""
        a, b, offsets = self.tensors
        return torch.ops.epmoe.grouped_gemm(a, b, offsets, None, None, None, None, WGRAD,
                                            as_kernel(None), self.portable, None)

    def add_to(self, out: Tensor, scale: float) -> None:
        """Add the gradient, times scale, to out [L, N, K] of float32 or of the dtype of the factors."""
        torch.ops.epmoe.grouped_wgrad_add(*self.tensors, out, scale, self.portable)

    def _versions(self) -> list[int]:
        """Return how often each tensor was modified in place.  torch has no public name to ask."""
        return [0 if t.is_inference() else t._version for t in self.tensors]

    def keep(self) -> None:
        """Remember the stream, if the product is made later."""
        device = self.tensors[0].device
        if device.type == "cuda":
            self.stream = torch.cuda.current_stream(device)
            self.ready = self.stream.record_event()

    def has_failed(self) -> bool:
        """Whether the backward has failed, as far as errors have been raised: the factors hold nothing."""
        if self.call is None:
            return False
        layer, buffer, number = self.call
        return _C.layer_was_void(layer._c, buffer, number)

    def _wait(self) -> None:
        if self.stream is None:
            return
        now = torch.cuda.current_stream(self.stream.device)
        if now != self.stream:
            now.wait_event(cast(torch.cuda.Event, self.ready))
            for t in self.tensors:
                t.record_stream(now)

    def multiply(self) -> Tensor | None:
        """Return the gradient for autograd: [L, N, K], or None where main_grad has received it."""
        self._wait()
        if self._versions() != self.versions:
            raise RuntimeError("backward_dw: a tensor that the gradient of the weights needs was modified in "
                               "place after the backward pass: leave it as it is until backward_dw()")
        p, scale = self.deferred_wgrad.parameter, self.deferred_wgrad.scale
        if self.deferred_wgrad.owner.fuses:
            if not self.is_added:  # a backward_dw whose hooks raised an error has added it already
                self.add_to(main_grad_of(p).view(self.deferred_wgrad.shape), scale)
                self.is_added = True
            return _stand_in(p, self.deferred_wgrad.shape)
        grad = self.product()
        return grad if scale == 1 else grad * scale


def main_grad_of(p: Tensor, name: str = "a parameter") -> Tensor:
    """Return p.main_grad after checks.  Raises RuntimeError where it does not fit."""
    grad = getattr(p, "main_grad", None)
    wanted = f"{list(p.shape)} of float32 or {p.dtype} on {p.device}, contiguous"
    if not isinstance(grad, torch.Tensor):
        raise RuntimeError(f"{name} has no main_grad, which fuse_wgrad_accumulation=True needs: set "
                           f"p.main_grad to a tensor {wanted}, for example "
                           f"torch.zeros_like(p, dtype=torch.float32)")
    fits = grad.dtype in (torch.float32, p.dtype) and grad.is_contiguous() and not grad.requires_grad
    if not fits or grad.shape != p.shape or grad.device != p.device:
        raise RuntimeError(f"main_grad of {name}: wanted a tensor {wanted}, that requires no grad; got "
                           f"{list(grad.shape)} of {grad.dtype} on {grad.device}, strides {grad.stride()}")
    if getattr(p, "overwrite_main_grad", False):
        raise RuntimeError(f"{name} has overwrite_main_grad: epmoe only adds to main_grad")
    return grad


def _stand_in(p: Any, shape: torch.Size) -> Tensor | None:
    """Return what autograd gets where main_grad has the gradient, as Megatron-LM's hooks expect it.

    They run when autograd accumulates the gradient of p, and drop what they find there.
    """
    if not hasattr(p, "grad_added_to_main_grad"):
        return None
    p.grad_added_to_main_grad = True
    return p.new_zeros(shape) if getattr(p, "zero_out_wgrad", False) else p.new_empty(shape)


class _Later(torch.autograd.Function):
    """Runs Factors.multiply as the backward of a parameter, so that the hooks of the parameter run too."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, factors: Factors) -> Tensor:
        ctx.factors = factors
        return p.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        grad = ctx.factors.multiply()
        return grad if grad is None else grad.view_as(ctx.factors.deferred_wgrad.parameter), None


class Step:
    """A forward pass and its backwards.

    layer: The layer of their operations, in its buffer 0, or None.  combines: Whether each backward ends with
    a combine.
    """

    __slots__ = ("combines", "layer")

    def __init__(self, layer: EPAll2AllLayer | None, combines: bool) -> None:
        self.layer, self.combines = layer, combines


class DeferredWgrad:
    """Takes the factors of the gradient of one parameter, in the backward of one forward pass."""

    def __init__(self, owner: WeightGradients, step: Step, parameter: Tensor, scale: float,
                 shape: torch.Size) -> None:
        self.owner, self.step, self.parameter = owner, step, parameter
        self.scale, self.shape = scale, shape  # a factor of the gradient, and [L, N, K]
        self.leaf: Any = None  # the node of the graph that accumulates the gradient

    def take(self, factors: Factors) -> Tensor | None:
        """Return what the backward of a product returns for its weights."""
        factors.deferred_wgrad = self
        check_backward(*factors.tensors)
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: with delay_wgrad_compute or fuse_wgrad_accumulation, "
                               "gradients of gradients are not supported: leave these options out")
        if any(type(t) is not torch.Tensor for t in factors.tensors):
            raise RuntimeError("delay_wgrad_compute and fuse_wgrad_accumulation need the tensors themselves, "
                               "but a tracer runs the backward: leave these options out")
        is_wanted = self._is_wanted()
        if not self.owner.delays:
            return factors.multiply() if is_wanted else None
        if not is_wanted:
            raise RuntimeError("delay_wgrad_compute goes with backward() without inputs=, and not with "
                               "torch.autograd.grad(): call backward(), then backward_dw()")
        factors.keep()
        self.owner.add(self.step, factors)
        return None

    def _is_wanted(self) -> bool:
        """Whether this backward pass computes the gradient of the weights."""
        try:
            return torch._C._will_engine_execute_node(self.leaf)  # private: needs_input_grad does not tell it
        except RuntimeError as error:  # what torch says of a leaf in autograd.grad()
            raise RuntimeError("torch.autograd.grad() of a parameter whose gradient goes to main_grad: call "
                               "backward(), or leave fuse_wgrad_accumulation out") from error


class WeightGradients:
    """The deferred wgrads of an EPMoE, and the gradients that wait for backward_dw.

    delays: gradients wait for backward_dw.  fuses: they are added to main_grad.
    """

    def __init__(self, delays: bool, fuses: bool) -> None:
        self.delays, self.fuses = bool(delays), bool(fuses)
        # (forward pass, factors) of each backward, in their order
        self.pending: collections.deque[tuple[Step, list[Factors]]] = collections.deque()
        self._step = Step(None, False)
        if self.delays:
            _watch(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        return WeightGradients(self.delays, self.fuses)  # what waits is the original's

    def begin(self, parameters: Mapping[str, Tensor], layer: EPAll2AllLayer | None = None,
              combines: bool = False) -> None:
        """Begin a forward pass.  Raises for parameters that cannot have a deferred wgrad.

        Args:
            parameters: {name: parameter} of those that require grad.
            layer: See Step.
            combines: See there.
        """
        self._step = Step(layer, combines)
        for name, p in parameters.items():
            if not p.is_leaf or not p.is_contiguous():
                raise RuntimeError(f"{name} is a view or has other strides, but delay_wgrad_compute and "
                                   f"fuse_wgrad_accumulation need a contiguous parameter: FSDP and "
                                   f"parametrizations do not go together with them")
            if self.fuses:
                main_grad_of(p, name)

    def weight(self, p: Tensor, scale: float, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return an alias [L, N, K] of a parameter, whose gradient is deferred in this forward pass.

        shape: L, N, K, if the parameter has another shape; -1 as for view.
        """
        shape = p.shape if shape is None else p.detach().view(shape).shape
        deferred = DeferredWgrad(self, self._step, p, scale, shape)
        # With delay, p is not in the graph: no hook of p runs in the backward.
        leaf = p.detach().requires_grad_() if self.delays else p
        alias: Any = leaf.view(shape)
        # It refers to leaf, which must not refer to the deferred wgrad.
        deferred.leaf = alias.grad_fn.next_functions[0][0]
        alias._epmoe_deferred_wgrad = deferred
        return alias

    def add(self, step: Step, factors: Factors) -> None:
        """Keep the factors of a weight until backward_dw."""
        for of, waiting in self.pending:
            # with retain_graph=True, a forward pass may have several backwards
            if of is step and all(f.deferred_wgrad is not factors.deferred_wgrad for f in waiting):
                waiting.append(factors)
                return
        self.pending.append((step, [factors]))

    def drop_failed(self) -> None:
        """Drop the factors of backward passes whose error came later."""
        for entry in list(self.pending):
            if any(f.has_failed() for f in entry[1]):
                self.pending.remove(entry)

    def compute(self) -> None:
        """Compute the gradients of the oldest backward pass that waits.  After an error they wait further."""
        self.drop_failed()
        if not self.pending:
            raise RuntimeError("backward_dw: no backward pass of this module waits for it: call it once "
                               "after each backward pass, not more often")
        _, waiting = self.pending[0]
        while waiting:
            with torch.enable_grad():
                token = _Later.apply(waiting[0].deferred_wgrad.parameter, waiting[0])
            token.backward(token.detach())
            del waiting[0]
        self.pending.popleft()


def _watch(gradients: WeightGradients) -> None:
    """Raise an error in the step of an optimizer for whose parameters backward_dw was not called."""
    global _is_installed
    with _lock:
        _delaying.add(gradients)
        if not _is_installed:
            register_optimizer_step_pre_hook(_before_step)
            _is_installed = True


def check_no_delay(parameters: Iterable[Tensor], use: str, before: str) -> None:
    """Raise RuntimeError if gradients of parameters wait for backward_dw.

    use, before: Parts of the error's text: what the program does with the gradients, and the call that must
    come after backward_dw().
    """
    # Ranks may be threads, and _delaying has the gradients of all of them: nothing is changed here.
    factors = [f for g in list(_delaying) for _, fs in list(g.pending) for f in list(fs)]
    if not factors:
        return
    wanted = {id(p) for p in parameters}
    if any(id(f.deferred_wgrad.parameter) in wanted and not f.has_failed() for f in factors):
        raise RuntimeError(f"{use}, but gradients of its parameters wait for backward_dw(): call it once for "
                           f"each backward pass before {before}")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_no_delay(parameters_of(optimizer), "an optimizer makes a step", "the step")
