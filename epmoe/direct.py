"""How calls go past torch.ops.epmoe.*, where nothing must see the operator.  That saves some microseconds."""

import torch
from torch._C import DispatchKey, DispatchKeySet

_implementations = {}  # name of an operator -> function
# A tensor with any other key makes torch do more than to call the implementation.
_PLAIN_KEYS = 0
for _key in ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"):
    _PLAIN_KEYS |= DispatchKeySet(getattr(DispatchKey, _key)).raw_repr()


def untraced(fn):
    """Return fn, an operator's implementation, marked for dynamo: it traces neither fn nor what fn calls.

    After a graph break dynamo would trace it, because the operator runs between two graphs.  The marks of
    torch.compiler.disable would do the same, but import dynamo, which takes seconds.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(fn.__code__, dynamo._FrameExecStrategy(skip, skip))
    return fn


def implement(lib, name, fn):
    """Make fn the implementation of an operator of this library, on all devices."""
    lib.impl(name, untraced(fn), "CompositeExplicitAutograd")
    _implementations[name] = fn


def is_watched():
    """Whether a compiler, a tracer or a dispatch mode must see the operators.

    If not, and without gradients, the module is called directly, which takes some microseconds less.
    """
    return (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
            or torch._C._len_torch_dispatch_stack() > 0)


def requires_grad(*tensors):
    """Whether a gradient flows through a call with these tensors, so that its backward makes a call too."""
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
    """Call torch.ops.epmoe.<name>, or its implementation where nothing could tell the difference."""
    if is_watched() or not _are_plain(tensors):
        return getattr(torch.ops.epmoe, name)(*tensors, *numbers)
    return _implementations[name](*tensors, *numbers)
