"""How calls bypass torch.ops.epmoe.* when nothing needs to see the operator.

Torch's dispatcher takes the host some microseconds for each call of an operator.
"""

import torch
from torch._C import DispatchKey, DispatchKeySet

# The modes of torch's own tracers.  All other dispatch modes only watch, or change single operators.
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))
_implementations = {}  # name of an operator -> function
# The dispatch keys with which torch only calls the implementation.  epmoe's operators have no rules for
# autocast, and _are_plain looks at gradients by itself.
_PLAIN_KEYS = 0
for _key in ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"):
    _PLAIN_KEYS |= DispatchKeySet(getattr(DispatchKey, _key)).raw_repr()


def untraced(fn):
    """Mark fn, an operator's implementation, so that dynamo traces neither fn nor what fn calls.  Return fn.

    After a graph break the operator runs between two graphs, and dynamo would try to trace fn there.
    torch.compiler.disable would do the same, but it imports dynamo, which takes seconds.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(fn.__code__, dynamo._FrameExecStrategy(skip, skip))
    return fn


def implement(lib, name, fn):
    """Make fn the implementation of operator `name` of `lib`, on all devices, also for call()."""
    lib.impl(name, untraced(fn), "CompositeExplicitAutograd")
    _implementations[name] = fn


def is_traced():
    """Whether a compiler or a tracer runs this, which makes a program of the operators that it sees."""
    return (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
            or torch._C._len_torch_dispatch_stack() > 0
            and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS))


def is_watched():
    """Whether a compiler, a tracer or a dispatch mode needs to see the operators.

    If not, and if no gradient is needed, callers may bypass them.  A mode may be active on one rank alone,
    for example to count operations: it must not change which collective operations the rank makes.
    """
    return (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
            or torch._C._len_torch_dispatch_stack() > 0)


def requires_grad(*tensors):
    """Whether autograd records a call with these tensors (None is none)."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def _are_plain(tensors):
    """Whether no tensor needs a gradient, and torch would do no more for them than call the implementation.

    It does more for subclasses, inside vmap, for negated views and on the device "meta", for example.
    """
    with_grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (with_grad and t.requires_grad
                              or torch._C._dispatch_keys(t).raw_repr() & ~_PLAIN_KEYS):
            return False
    return not torch._C._has_torch_function(tensors)  # of a subclass, or of a mode


def call(name, tensors, *numbers):
    """Call torch.ops.epmoe.<name>, or its implementation if nothing needs to see the operator.

    Profilers list the operator only in the first case.
    """
    if is_watched() or not _are_plain(tensors):
        return getattr(torch.ops.epmoe, name)(*tensors, *numbers)
    return _implementations[name](*tensors, *numbers)
