"""Tensors that no function of epmoe._C expects: arguments for fuzz_module.py."""

import functools


@functools.cache
def weird_tensors(torch):
    """Tensors, by name, that no function expects: other dtypes, shapes, strides, devices and types."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3, 8)
    return {"scalar": torch.ones(()), "none of it": torch.ones(0, 8),
            "no tokens": torch.zeros(0, 2, dtype=torch.int64), "5 dims": torch.ones(1, 1, 1, 1, 1),
            "double": torch.ones(3, 8).double(), "bool": torch.ones(3, 8) > 0,
            "complex": torch.ones(3, 8, dtype=torch.complex64),
            "conj": torch.ones(3, 8, dtype=torch.complex64).conj(),
            "neg": torch.ones(3, 8, dtype=torch.complex64).conj().imag,
            "neg idx": torch._neg_view(torch.ones(3, 2, dtype=torch.int64)), "half": torch.ones(3, 8).half(),
            "f4": torch.ones(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "meta": torch.ones(3, 8, device="meta"), "fake": fake, "sparse": torch.ones(3, 8).to_sparse(),
            "nested": torch.nested.nested_tensor([torch.ones(8)]),
            "expanded": torch.ones(1, 1).expand(3, 8), "vast": torch.ones(1, 1).expand(1 << 40, 8),
            "vaster": torch.ones(1, 1).expand(1 << 40, 1 << 21),
            "strided": torch.ones(3, 16)[:, ::2], "transposed": torch.ones(8, 3).t(),
            "misaligned": torch.ones(25)[1:].view(3, 8),
            "parameter": torch.nn.Parameter(torch.ones(3, 8)), "too many": torch.ones(99, 8),
            "huge idx": torch.full((3, 2), 2**62), "wild idx": torch.full((3, 2), -9),
            "wild recv": torch.full((18,), 1 << 30, dtype=torch.int32), "a type": torch.Tensor,
            "storage": torch.ones(3).untyped_storage()}


def shared_tensors(torch, plan, in_heap):
    """Tensors, by name, that share memory with others, and plans with invalid content."""
    return {"in heap": in_heap[:24].view(3, 8), "plan as rows": plan[:24].view(torch.float32).view(3, 8),
            "plan as idx": plan[:6].view(3, 2), "plan of zeros": torch.zeros_like(plan),
            "wild plan": torch.full_like(plan, 1 << 30), "negative plan": torch.full_like(plan, -7)}


def scribble(torch, plan, at, value):
    """A copy of a plan or of a handle with one wrong word."""
    plan = plan.clone()
    plan[at % len(plan)] = max(-(2**31), min(2**31 - 1, value))
    return plan
