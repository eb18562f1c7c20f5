"""What torch's modes require of a call: autograd, torch.func, compilers, tracers and dispatch modes.

Torch sees neither what C writes nor tangents that C does not carry, and its dispatcher takes the host some
microseconds for each call of an operator.  So calls bypass torch.ops.epmoe.* when nothing needs to see it.

This file has the private names of torch that several files need, and says why there is no public one.  Those
that one file needs are there, once: guards.py, parallel.py, module.py and checkpoint.py of epmoe/moe,
a2a/inductor.py, comm/rail.py and gemm/weight_gradients.py.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch._C import _functorch
from torch._library.fake_impl import allocate_size
from torch.autograd import forward_ad
from torch.utils import checkpoint

_F = TypeVar("_F", bound=Callable[..., Any])

# Torch has public names to make a dispatch mode, and none to ask which are active.
_num_modes = torch._C._len_torch_dispatch_stack
_mode_of = torch._C._get_dispatch_mode
# The modes of torch's own tracers. All other dispatch modes only watch, or change single operators.
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))
_keys_of = torch._C._dispatch_keys  # of a tensor; torch has public names for the keys alone
# The innermost transform of torch.func, or None.  torch.func has no function that tells.
_transform = _functorch.peek_interpreter_stack
# Of a tensor: whether it is a batch of gradients, which autograd passes to a backward with
# is_grads_batched=True. That is another vmap than torch.vmap, and _transform does not see it.
is_batch = _functorch.is_legacy_batchedtensor
# Of an iterable of tensors. torch.autograd.graph.increment_version is the same, and takes 0.31 us instead of
# 0.17 (x86-64, torch 2.11 and 2.13, 2026-11-29): too much for a call of low latency.
mark_written = torch._C._increment_version
# For a function that no compiler traces. torch.compiler.disable is the same, but imports dynamo, which takes
# seconds, when a function is decorated; this does when the function is called.
without_dynamo = torch._disable_dynamo
# By this exception checkpointing ends a forward of which it needs no more.
StopRecomputation = checkpoint._StopRecomputationError
_implementations: dict[str, Callable[..., Any]] = {}  # name of an operator -> function
# The dispatch keys with which torch only calls the implementation.  epmoe's operators have no rules for
# autocast, and _are_plain looks at gradients by itself.
_PLAIN_KEYS = 0
for _key in ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"):
    _PLAIN_KEYS |= DispatchKeySet(getattr(DispatchKey, _key)).raw_repr()
_PYTHON_KEY = DispatchKeySet(DispatchKey.Python).raw_repr()  # of subclasses with a __torch_dispatch__


def untraced(fn: _F) -> _F:
    """Mark fn, an operator's implementation, so that dynamo traces neither fn nor what fn calls.  Return fn.

    After a graph break the operator runs between two graphs, and dynamo would try to trace fn there.
    torch.compiler.disable would do the same, but it imports dynamo, which takes seconds.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(fn.__code__, dynamo._FrameExecStrategy(skip, skip))
    return fn


def implement(lib: torch.library.Library, name: str, fn: Callable[..., Any]) -> None:
    """Make fn the implementation of operator `name` of `lib`, on all devices, also for call()."""
    lib.impl(name, untraced(fn), "CompositeExplicitAutograd")
    _implementations[name] = fn


def record_gradient(lib: torch.library.Library, name: str, setup: Callable[[Any, tuple[Any, ...], Any], None],
                    backward: Callable[..., tuple[Tensor | None, ...]]) -> None:
    """Give operator `name` of `lib` a gradient, as torch.library.register_autograd.

    setup(ctx, inputs, output) saves what backward(ctx, *gradients) needs.  register_autograd looks at all
    arguments of a schema once for each of them.  With it a call of grouped_gemm with ten arguments took the
    host 65 us, and with thirteen it would take 83 us; here it takes 40 us (one CPU, torch 2.13, 2026-11-29).
    """
    op = getattr(torch.ops.epmoe, name).default
    defaults = tuple(a.default_value for a in op._schema.arguments)

    def below_autograd(keys: Any, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys & torch._C._after_autograd_keyset, *args)

    def forward(ctx: Any, *args: Any) -> Any:
        output = below_autograd(args[-1], args[:-1])
        setup(ctx, args[:-1], output)
        return output

    def of_inputs(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        return *backward(ctx, *gradients), None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(of_inputs)}
    function: Any = type(f"Epmoe_{name}_", (torch.autograd.Function,), methods)  # profilers show the name

    def run(keys: Any, *args: Any) -> Any:
        if requires_grad(*(a for a in args if isinstance(a, torch.Tensor))):
            # torch leaves out the last arguments where they are as by default
            return function.apply(*args, *defaults[len(args):], keys)
        return below_autograd(keys, args)

    lib.impl(name, untraced(run), "Autograd", with_keyset=True)


def constant_for_dynamo(fn: _F) -> _F:
    """Mark fn, so that dynamo calls it and does not trace it: its result is a constant.  Return fn.

    torch.compiler.assume_constant_result would do the same, but it imports dynamo.
    """
    setattr(fn, "_dynamo_marked_constant", True)
    return fn


def new_size(breaks_graph: bool) -> Any:
    """Return a new dynamic size, in the fake implementation of an operator.

    By default torch.compile breaks the graph at an operator of dynamic size, because code that uses the size
    may be untraceable, and torch has no public name to ask for none.
    """
    tracer = torch.library.get_ctx()
    shape_env = tracer._shape_env
    return tracer.new_dynamic_size() if breaks_graph or shape_env is None else allocate_size(shape_env)


def is_traced() -> bool:
    """Whether a compiler or a tracer runs this, which makes a program of the operators that it sees."""
    return (torch.compiler.is_compiling() or torch.jit.is_tracing()
            or _num_modes() > 0 and any(_mode_of(key) is not None for key in _TRACERS))


def is_watched() -> bool:
    """Whether a compiler, a tracer or a dispatch mode needs to see the operators.

    If not, and if no gradient is needed, callers may bypass them.  A mode may be active on one rank alone,
    for example to count operations: it must not change which collective operations the rank makes.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or _num_modes() > 0


def num_not_after(ends: Tensor, row: Tensor) -> Tensor:
    """Return for each row how many of the ends, which ascend, are at most it: [M] int64.

    It is a search, but compared one by one where a compiler sees it: on GPUs, inductor of torch 2.11 reads a
    view, as expert_offsets of a plan are, from the beginning of the tensor of which it is one.
    """
    if is_watched():
        return (row[:, None] >= ends).sum(1)
    return torch.searchsorted(ends, row, right=True)


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors (None is none)."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def is_wrapper(t: Tensor) -> bool:
    """Whether a tensor has its numbers elsewhere, as a DTensor or a FakeTensor has."""
    return bool(_keys_of(t).raw_repr() & _PYTHON_KEY)


def _are_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether no tensor needs a gradient, and torch would do no more for them than call the implementation.

    It does more for subclasses, inside vmap, for negated views and on the device "meta", for example.
    """
    with_grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (with_grad and t.requires_grad
                              or _keys_of(t).raw_repr() & ~_PLAIN_KEYS):
            return False
    return not torch.overrides.has_torch_function(tensors)  # of a subclass, or of a mode


def call(name: str, tensors: tuple[Tensor | None, ...], *numbers: Any,
         scales: tuple[Tensor, ...] = ()) -> Any:
    """Call torch.ops.epmoe.<name>, or its implementation if nothing needs to see the operator.

    Profilers list the operator only in the first case.  scales: the tensors that come last.
    """
    if is_watched() or not _are_plain(tensors + scales):
        return getattr(torch.ops.epmoe, name)(*tensors, *numbers, *scales)
    return _implementations[name](*tensors, *numbers, *scales)


def is_transformed() -> bool:
    """Whether a transform of torch.func runs this."""
    return _transform() is not None


def is_plain() -> bool:
    """True outside of torch.func and of dual_level(), where check_mode has nothing to find.  A few 100 ns.

    unpack_dual, the public way to ask for the second, takes longer and needs a tensor.
    """
    return _transform() is None and forward_ad._current_level < 0


def _has_tangent(tensors: tuple[Any, ...]) -> bool:
    return any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _check_tangents(tensors: tuple[Any, ...]) -> None:
    if _has_tangent(tensors):
        raise NotImplementedError("epmoe does not support forward-mode differentiation, but a tensor has a "
                                  "tangent (torch.autograd.forward_ad): use backward() or "
                                  "torch.autograd.grad()")


# A compiler sees no tangents.  So inside of dual_level() it breaks the graph here, and Python runs this.
_check_untraced = without_dynamo(_check_tangents)


def _is_batched_only(stack: list[Any]) -> bool:
    return all(level.key().name == "Vmap" for level in stack)


def check_mode(*tensors: Tensor | None, may_batch: bool = False) -> None:
    """Raise NotImplementedError inside a transform of torch.func, and for a tensor that has a tangent.

    The transforms would take the gradients of the operators for zeros, and forward-mode differentiation the
    tangents of their results.  may_batch: torch.vmap is right, because torch calls the operator for each
    element of the batch; autograd uses it for is_grads_batched.
    """
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:  # inside of a dual_level(), at the cost of a look
            _check_untraced(tensors)
        return
    if is_plain():
        return
    if is_transformed() and not (may_batch and _is_batched_only(_functorch.get_interpreter_stack())):
        raise NotImplementedError("epmoe does not support torch.func's transforms: use torch.autograd")
    _check_tangents(tensors)


def check_backward(*tensors: Tensor | None) -> None:
    """As check_mode, in a backward that takes one gradient at a time."""
    if any(t is not None and is_batch(t) for t in tensors):
        raise NotImplementedError("is_grads_batched=True: this backward takes one gradient at a time: call "
                                  "torch.autograd.grad() once for each")
    check_mode(*tensors)


def check_recordable(*tensors: Tensor | None) -> None:
    """Raise RuntimeError where autograd would record a call with these tensors in inference mode.

    torch.enable_grad() inside of inference mode, or a checkpoint whose backward runs there, want that.  torch
    would raise an error when the operations have run, and the other ranks would wait for the backward.
    """
    if requires_grad(*tensors):
        raise RuntimeError("a gradient is wanted inside of torch.inference_mode(), where nothing can be "
                           "saved for a backward: leave inference mode out, also around the backward of a "
                           "checkpoint")


def check_writable(name: str, *tensors: Tensor | None) -> None:
    """Raise RuntimeError for a tensor that requires grad or has a tangent, as torch does for out=.

    Where this passes, the caller calls mark_written(tensors) before C writes them: a backward that has saved
    one of them, or a view of it, then raises an error instead of using the new numbers.
    """
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError(f"{name} requires grad, but writing it has no gradient: call this under "
                           f"torch.no_grad(), or pass detach() of it")
    if forward_ad._current_level >= 0 and _has_tangent(tensors):
        raise RuntimeError(f"{name} has a tangent (torch.autograd.forward_ad), which would not fit what is "
                           f"written: pass detach() of it")


def writing(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context in which tensors may be written in place, without gradients.

    What was made in inference mode can be written only there.
    """
    return torch.inference_mode() if any(t.is_inference() for t in tensors) else torch.no_grad()


class _Joined(torch.autograd.Function):
    """The identity of the first two tensors.  In the graph, all others come before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.num_others = len(others)
        return x.view_as(x), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor | None, d_weight: Tensor | None) -> tuple[Tensor | None, ...]:
        return d_x, d_weight, *[None] * ctx.num_others


def join_backward(x: Tensor, weight: Tensor, *parameters: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x [T, H] and weight [T, K], so that the backward of experts makes the same calls on all ranks.

    A backward runs only what leads to the gradients that its rank wants: those of all tensors that require
    one, or those that torch.autograd.grad() is asked for.  But the gradients of rows return to the ranks of
    their tokens, and for that all ranks must send.  So the results depend on all parameters in the graph.
    Then every backward runs down to them, whatever gradient its rank wants.  A parameter may be None.

    Raises NotImplementedError as check_mode, before torch does it for _Joined in other words.
    """
    if not requires_grad(x, weight, *parameters):
        return x, weight
    check_mode(x, weight)
    joined: tuple[Tensor, Tensor] = _Joined.apply(
        x, weight, *(p for p in parameters if p is not None and p.requires_grad))
    return joined


# Takes sizes, strides and dtype.
Allocate: TypeAlias = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


def allocator_of(device: torch.device) -> Callable[[], Allocate]:
    """Return a function that returns a function (sizes, strides, dtype), which allocates on the device.

    The second is asked for in each call.  Its tensors are uninitialised, and come from torch's allocator.
    Where torch has the function that the code of its compiler calls, a tensor costs the host 1.0 us instead
    of 1.7 (E-103).  That function allocates on the current device, and does not fill the memory as
    torch.use_deterministic_algorithms() wants it.
    """
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    is_deterministic = torch.are_deterministic_algorithms_enabled
    is_cuda = device.type == "cuda"

    def allocate(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    def allocator() -> Allocate:
        # torch.cuda.current_device() also looks whether CUDA is there, in each call
        if fast is None or is_deterministic() or is_cuda and torch._C._cuda_getDevice() != device.index:
            return allocate
        return fast

    return allocator
