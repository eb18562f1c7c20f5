"""What epmoe owes torch's autograd: C writes tensors, and autograd does not see it."""

import torch
from torch.autograd.graph import increment_version as mark_written

__all__ = ["check_writable", "mark_written"]


def check_writable(name, *tensors):
    """Raise RuntimeError for a tensor that requires grad, as torch's operations with out= do.

    Where this passes, the caller calls mark_written(tensors) before C writes them: a backward that has saved
    one of them, or a view of it, then raises an error instead of using the new numbers.
    """
    if torch.is_grad_enabled():
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.requires_grad:
                raise RuntimeError(f"{name} requires grad, but writing it has no gradient: call this under "
                                   f"torch.no_grad(), or pass detach() of it")
