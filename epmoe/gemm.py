"""Grouped GEMM: rows grouped by expert times each expert's own weights."""

import sys

import torch
import torch.nn.functional as F

from . import _C
from .reference import GptOss, activate, gpt_oss_numbers

_lib = torch.library.Library("epmoe", "FRAGMENT")
_lib.define("grouped_gemm(Tensor a, Tensor b, Tensor offsets, Tensor? bias, Tensor? row_weight, int kind, int activation, bool portable, "
            "float alpha=0, float limit=0) -> Tensor")

FORWARD, DGRAD, WGRAD = range(3)  # kernels/gemm.h says what each multiplies
_ACTIVATIONS = {None: 0, "gelu": 1, "swiglu": 2, "gpt_oss": 3}
_NAMES = {v: k for k, v in _ACTIVATIONS.items()}
_GATED = (2, 3)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def as_kernel(activation):
    """(kind, alpha, limit), as kernels/gemm.h has them.  Raises ValueError where there is no such activation."""
    if numbers := gpt_oss_numbers(activation):
        return _ACTIVATIONS["gpt_oss"], *numbers
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: None, 'gelu', 'swiglu', 'gpt_oss' or GptOss(alpha, limit)")
    return _ACTIVATIONS[activation], 0.0, 0.0


def aligned(t):
    """t, or a copy of it where the kernels could not read it: a gradient is where autograd has put it, a bias may be a part of something
    larger.  None is None."""
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone()


def _out_shape(a, b, offsets, kind, activation):
    if kind == WGRAD:
        return offsets.shape[0] - 1, a.shape[1], b.shape[1]
    if kind == DGRAD:
        return a.shape[0], b.shape[2]
    return a.shape[0], b.shape[1] // (2 if activation in _GATED else 1)


def _by_expert(a, b, offsets, bias, row_weight, kind, activation, alpha, limit):
    """One product an expert, through torch: any device and dtype, with a host read of the offsets.

    As in the kernels, 16-bit numbers are rounded once, at the end.
    """
    def wide(t):
        return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t

    out = a.new_zeros(_out_shape(a, b, offsets, kind, activation))
    ends = offsets.tolist()
    if ends[0] < 0 or ends[-1] > a.shape[0] or any(begin > end for begin, end in zip(ends, ends[1:])):
        raise ValueError(f"experts' rows begin at {ends}: they must not go down, nor past the {a.shape[0]} rows that there are")
    with torch.autocast(a.device.type, enabled=False):  # its precision is the caller's choice already
        for e, (begin, end) in enumerate(zip(ends, ends[1:])):
            rows = wide(a[begin:end])
            if kind == WGRAD:
                out[e] = rows.t() @ wide(b[begin:end])
            elif kind == DGRAD:
                out[begin:end] = rows @ wide(b[e])
            else:
                y = F.linear(rows, wide(b[e]), None if bias is None else wide(bias[e]))
                y = y if activation == 0 else activate(y, GptOss(alpha, limit) if activation == _ACTIVATIONS["gpt_oss"] else _NAMES[activation])
                out[begin:end] = y if row_weight is None else y * row_weight[begin:end, None]
    return out


def _has_kernel(a, b):
    fits = all(0 < n <= 1 << 24 and n % 16 == 0 for n in (a.shape[1], *b.shape[1:]))
    return (_C.HAS_CUDA and a.device.type == "cuda" and a.dtype in (torch.bfloat16, torch.float16) and fits
            and torch.cuda.get_device_capability(a.device)[0] >= 8)


_tickets = {}  # of each device's default stream


def _tickets_of(device):
    """One number in which a launch counts the tiles that it hands out: 0 before and behind it.  Kept for the default stream only: a graph
    may run beside what else its stream does, and memory that another stream gets may be a pool's that wants it back."""
    if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
        return torch.zeros(1, dtype=torch.int64, device=device)
    if device.index not in _tickets:
        _tickets[device.index] = torch.zeros(1, dtype=torch.int64, device=device)
    return _tickets[device.index]


def _grouped_gemm(a, b, offsets, bias, row_weight, kind, activation, portable, alpha=0.0, limit=0.0):
    if not _has_kernel(a, b):
        return _by_expert(a, b, offsets, bias, row_weight, kind, activation, alpha, limit)
    a, b, offsets, bias, row_weight = map(aligned, (a, b, offsets, bias, row_weight))
    out = a.new_empty(_out_shape(a, b, offsets, kind, activation))
    _C.grouped_gemm(kind, activation, alpha, limit, a, b, offsets, bias, row_weight, _tickets_of(a.device), out, portable)
    return out


def untraced(fn):
    """fn as what an operator does: where a graph breaks and the operator runs, a compiler would look into this, too, and warn.  Saying so to
    the compiler imports it, which takes seconds: not where there is none."""
    hidden = torch._disable_dynamo(fn)
    return lambda *args: (hidden if "torch._dynamo" in sys.modules else fn)(*args)


_lib.impl("grouped_gemm", untraced(_grouped_gemm), "CompositeExplicitAutograd")


@torch.library.register_fake("epmoe::grouped_gemm", lib=_lib)
def _(a, b, offsets, bias, row_weight, kind, activation, portable, alpha=0.0, limit=0.0):
    return a.new_empty(_out_shape(a, b, offsets, kind, activation))


def _save(ctx, inputs, output):
    a, b, offsets, _, _, ctx.kind, _, ctx.portable, _, _ = inputs
    ctx.save_for_backward(a, b, offsets)


def _backward(ctx, g):
    a, b, offsets = ctx.saved_tensors
    if ctx.kind != FORWARD:
        raise RuntimeError("the backward of a grouped GEMM has no backward of its own")
    g = g.contiguous()
    op = torch.ops.epmoe.grouped_gemm
    da = op(g, b, offsets, None, None, DGRAD, 0, ctx.portable) if ctx.needs_input_grad[0] else None
    db = op(g, a, offsets, None, None, WGRAD, 0, ctx.portable) if ctx.needs_input_grad[1] else None
    return da, db, *[None] * 8


torch.library.register_autograd("epmoe::grouped_gemm", _backward, setup_context=_save, lib=_lib)


def _check(x, weight, counts, offsets, bias, activation, row_weight):
    """All that the host can know.  What stands in counts and offsets it cannot, without waiting for the device."""
    name, sizes = ("offsets", offsets) if counts is None else ("counts", counts)
    for what, t in (("rows", x), ("weights", weight), (name, sizes), ("bias", bias), ("row weights", row_weight)):
        if t is None and what in ("bias", "row weights"):
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{what}: wanted a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            raise ValueError(f"{what}: wanted a dense tensor, got one of layout {'nested' if t.is_nested else t.layout}")
        if t.device != x.device:
            raise ValueError(f"{what}: wanted a tensor on {x.device}, where the rows are; it is on {t.device}")
        if t is sizes:
            if t.dtype not in ((torch.int32,) if counts is None else _INTEGERS):
                raise TypeError(f"{name}: wanted {'int32' if counts is None else 'integers'}, got {t.dtype}")
        elif not t.dtype.is_floating_point:
            raise TypeError(f"{what}: wanted a floating-point dtype, got {t.dtype}")
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"wanted rows [M, K] and weights [L, N, K], got {list(x.shape)} and {list(weight.shape)}")
    if x.dtype != weight.dtype:
        raise TypeError(f"rows are {x.dtype}, weights {weight.dtype}")
    num_sizes = weight.shape[0] + (counts is None)
    if sizes.shape != (num_sizes,):
        raise ValueError(f"wanted {name} [{num_sizes}], got {list(sizes.shape)}")
    if as_kernel(activation)[0] in _GATED and weight.shape[1] % 2:
        raise ValueError(f"activation {activation!r} wants an even number of weight rows, got {weight.shape[1]}")
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(f"wanted a bias {list(weight.shape[:2])}, got {list(bias.shape)}")
    if row_weight is not None and row_weight.shape != x.shape[:1]:
        raise ValueError(f"wanted row weights [{x.shape[0]}], got {list(row_weight.shape)}")


def add_bias(y, bias, offsets):
    """y [M, N] with each row's expert's bias [L, N]; rows that no expert owns are left alone, and have no gradient."""
    row = torch.arange(len(y), device=y.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets[1:], row, right=True)
    owned = (row >= offsets[0]) & (row < offsets[-1])
    # In float32, rounded once: so is the bias's gradient, a sum over all rows of its expert.
    return (y + torch.where(owned[:, None], bias.to(torch.promote_types(y.dtype, torch.float32))[expert.clamp(max=len(bias) - 1)], 0)).to(y.dtype)


def grouped_gemm(x, weight, counts=None, *, offsets=None, bias=None, activation=None, row_weight=None, portable=False):
    """activation(x[r] @ weight[e(r)].T + bias[e(r)]) * row_weight[r] for the rows of expert after expert.

    Args:
        x: [M, K], first all rows of expert 0, then of expert 1, ...
        weight: [L, N, K], of x's dtype, as checkpoints hold it.
        counts: [L] integers on x's device, rows of each expert; or
        offsets: [L + 1] int32 on x's device, where each expert's rows begin, as EPLayout.expert_offsets.
        bias: None, or [L, N] of any floating-point dtype; rounded to x's where no gradients are wanted.
        activation: None, "gelu", "swiglu" (weight rows: gates, then ups), "gpt_oss" or GptOss(alpha, limit) (interleaved); see
            reference.activate.
        row_weight: None, or [M] of any floating-point dtype; float32 is what the kernels take.
        portable: use the kernel for any GPU, also on a Hopper GPU.

    Returns [M, N], [M, N / 2] for the gated activations.  What stands in rows that no expert owns is undefined.
    bfloat16 and float16 on CUDA with N and K multiples of 16: a kernel of epmoe's own, sums in float32, no host read of the sizes.
    Otherwise: torch, one product an expert.  Differentiable in x, weight, bias and row_weight.
    Raises TypeError for what is no tensor and for wrong dtypes, ValueError for wrong shapes and devices, and for counts or offsets that
    name rows which are not there; but the kernels' host does not wait to look at these: they leave such rows out.
    """
    if (counts is None) == (offsets is None):
        raise ValueError("give either counts or offsets")
    _check(x, weight, counts, offsets, bias, activation, row_weight)
    if offsets is None:
        offsets = F.pad(counts.cumsum(0), (1, 0)).clamp(-1, 2**31 - 1).to(torch.int32)
    op = torch.ops.epmoe.grouped_gemm
    x, weight, offsets = x.contiguous(), weight.contiguous(), offsets.contiguous()
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias, row_weight))):
        bias = None if bias is None else bias.to(x.dtype).contiguous()
        row_weight = None if row_weight is None else row_weight.float().contiguous()
        kind, alpha, limit = as_kernel(activation)
        return op(x, weight, offsets, bias, row_weight, FORWARD, kind, portable, alpha, limit)
    y = op(x, weight, offsets, None, None, FORWARD, 0, portable)  # what follows has gradients of torch's own
    if bias is not None:
        y = add_bias(y, bias, offsets)
    y = y if activation is None else activate(y, activation)
    return y if row_weight is None else (y * row_weight[:, None]).to(x.dtype)
