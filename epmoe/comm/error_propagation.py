"""How an error of this rank reaches the other ranks, whatever raised it, and wherever in a call.

A rank that raises before its operation begins would leave the others waiting.  So it propagates the error in
the operation that they are about to enter (CollectiveLayer._propagate), once: an exception of which they know
is marked.  The module marks those of its operations, _propagate_now those that it reports.  So blocks that
report may be nested, and an outer one finds what none of the inner ones has seen.

Each way into the module is inside of such a block: the implementations of the operators and the backwards
(reporting), and what a method does after its plan (reported_after_plan).
"""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from ..errors import EpError
from ..torch_modes import is_watched, is_wrapper

_F = TypeVar("_F", bound=Callable[..., Any])


def is_reported(error: BaseException) -> bool:
    """Whether the other ranks know of an exception."""
    return getattr(error, "_epmoe_reported", False)


def mark_reported(error: Any) -> None:
    """Note that the other ranks know of an exception.  The module does the same (EP_REPORTED)."""
    error._epmoe_reported = True


class reporting:
    """A block that reports an error in it to the other ranks in op, which is their next operation.

    op may be set inside of the block.  awaits_plan: the plan may have failed too.  Then its error is raised,
    because no rank enters op.
    """

    __slots__ = ("layer", "op", "buffer", "plan", "awaits_plan")

    def __init__(self, layer: Any, op: int, buffer: int, plan: Tensor | None,
                 awaits_plan: bool = False) -> None:
        self.layer, self.op, self.buffer, self.plan, self.awaits_plan = layer, op, buffer, plan, awaits_plan

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        # A tracer has another plan; then the other ranks wait for nothing.
        if isinstance(error, Exception) and type(self.plan) is torch.Tensor and not is_reported(error):
            try:
                if self.awaits_plan:
                    try:
                        self.layer._num_rows(self.plan, self.buffer)
                    except EpError:
                        raise
                    except (TypeError, ValueError):
                        pass  # it is no plan, so it has not failed
                self.layer._propagate(self.op, error, self.buffer)
            finally:
                del error, trace


def reported_after_plan(op: int) -> Callable[[_F], _F]:
    """Decorate a function (layer, layout, ...) that runs op with a layout: it reports errors in op.

    Not where a compiler traces: it could not break its graph inside of the block.  The operators report then.
    """
    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def run(layer: Any, layout: Any, *args: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(layer, layout, *args)
            unread = layout._num_rows is None and layer.capacity is None
            with reporting(layer, op, layout.buffer, layout.plan, unread):
                return function(layer, layout, *args)

        return cast(_F, run)

    return decorate


def check_plain(name: str, t: Any) -> None:
    """Raise TypeError for a tensor that has its numbers elsewhere, as a DTensor or a FakeTensor has.

    Where a compiler or a mode of torch sees the operators, such tensors are its own.
    """
    if not is_watched() and is_wrapper(t):
        kind = type(t).__name__
        advice = f"pass its part of this rank, {name}.to_local()" if hasattr(t, "to_local") else (
            "pass a torch.Tensor that has memory of its own")
        raise TypeError(f"{name}: wanted a plain tensor, got a {kind}, which has no memory of its own: "
                        f"{advice}")
