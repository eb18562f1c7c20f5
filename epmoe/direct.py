"""When a call may go past torch.ops.epmoe.*: a call of an operator takes torch about 10 us."""

import torch

_implementations = {}  # name of an operator -> function


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
