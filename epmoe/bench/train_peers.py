"""The peers of a training step: a layer in PyTorch alone, torch's products alone, and Liger's megakernel.

Each layer is a function of x [T, H] and weight [T, K] that autograd differentiates.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F


def _swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@functools.cache
def swiglu_of(device_type):
    """Return SwiGLU, compiled for a GPU."""
    return torch.compile(_swiglu, dynamic=True) if device_type == "cuda" else _swiglu


def product(a, weight, ends):
    """Multiply the rows of each expert by weight [L, K, N] of the expert: one call on a GPU."""
    if a.device.type == "cuda":
        return torch._grouped_mm(a, weight, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([rows @ w for rows, w in zip(a.split(sizes), weight, strict=True)])


def weight_gradient(a, b, ends):
    """Return [L, N, K]: a [M, N] transposed times b [M, K], for the rows of each expert."""
    if a.device.type == "cuda":
        return torch._grouped_mm(a.t(), b, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.stack([x.t() @ y for x, y in zip(a.split(sizes), b.split(sizes), strict=True)])


class _Exchange(torch.autograd.Function):
    """all_to_all_single of rows.  Its backward sends the gradients back."""

    @staticmethod
    def forward(ctx, rows, received, sent):
        ctx.sizes = received, sent
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        received, sent = ctx.sizes
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class TorchLayer:
    """Sort, all_to_all_single, grouped GEMM, SwiGLU, grouped GEMM, all_to_all_single, weights, index_add.

    With one rank nothing is exchanged: it is what the grouped_mm experts of transformers do.
    """

    def __init__(self, idx, num_experts, world_size, gate_up, down):
        self.idx, self.num_experts, self.world_size = idx, num_experts, world_size
        self.gate_up, self.down = gate_up, down

    def _route(self):
        """Return the choices in the order of their experts, and how many each expert has."""
        flat = self.idx.flatten()
        order = flat.argsort(stable=True)
        return order, torch.bincount(flat, minlength=self.num_experts)

    def experts(self, rows, counts):
        ends = counts.cumsum(0, dtype=torch.int32)
        h = product(rows, self.gate_up.transpose(1, 2), ends)
        return product(swiglu_of(rows.device.type)(h), self.down.transpose(1, 2), ends)

    def _spread_experts(self, rows, counts):
        """Compute the experts of all ranks for the rows of this rank, which are ordered by expert."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = torch.stack([counts, theirs]).view(2, self.world_size, -1).sum(2).tolist()
        local = self.num_experts // self.world_size
        expert = torch.arange(local, device=rows.device).repeat(self.world_size)
        by_expert = expert.repeat_interleave(theirs, output_size=sum(received)).argsort(stable=True)
        got = _Exchange.apply(rows, received, sent)[by_expert]
        y = self.experts(got, theirs.view(self.world_size, local).sum(0))
        back = torch.zeros_like(y).index_copy(0, by_expert, y)
        return _Exchange.apply(back, sent, received)

    def __call__(self, x, weight):
        order, counts = self._route()
        token = order // self.idx.shape[1]
        rows = x[token]
        y = self.experts(rows, counts) if self.world_size == 1 else self._spread_experts(rows, counts)
        y = y * weight.flatten()[order][:, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, y)


def liger_layer(shape, idx, gate_up, down, world_size, device):
    """Return Liger's megakernel as a layer and its weights [gate, up, down].

    Raises an exception where it cannot be used: it needs the wheel liger_cute_kernels, and ranks of NCCL.
    The weights are copies, because it takes gates and ups as separate tensors.  Each forward must be followed
    by its backward, which returns its symmetric memory.
    """
    from liger_cute_kernels import nvshmem, tvm_ffi
    from liger_kernel.ops.cute.ops import moe_fused

    if not dist.is_initialized():
        raise RuntimeError("it needs a process group: start the bench with torchrun")
    nvshmem.init_from_pg()
    tvm_ffi.moe_configure_symmetric(max_tokens=shape.tokens, hidden_dim=shape.hidden,
                                    max_num_experts=shape.experts, max_top_k=shape.topk, num_pes=world_size,
                                    num_hosts=1, gpus_per_host=world_size)
    gate, up = (t.detach().clone().requires_grad_() for t in gate_up.chunk(2, 1))
    down, idx = down.detach().clone().requires_grad_(), idx.to(torch.int32)

    def layer(x, weight):
        return moe_fused(x, idx, weight.to(x.dtype), gate, up, down, shape.experts, shape.topk)

    return layer, [gate, up, down]
