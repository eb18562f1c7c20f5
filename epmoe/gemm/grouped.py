"""grouped_gemm: rows grouped by expert times each expert's own weights."""

import math
import operator
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _C
from ..comm.device import capabilities
from ..torch_modes import call, check_mode, implement, mark_written, num_not_after, record_gradient
from ..torch_modes import requires_grad
from .activations import (Activation, Kernel, activate, activation_of, as_kernel, has_gates, has_gates_first,
                          out_columns)
from .four_bit import dequantize, format_of
from .weight_gradients import deferred_wgrad_of, gradient_of_node

_lib = torch.library.Library("epmoe", "FRAGMENT")
_lib.define("grouped_gemm(Tensor a, Tensor b, Tensor offsets, Tensor? bias, Tensor? row_weight, "
            "Tensor? a_scale, Tensor? b_scale, int kind, float[] activation, bool portable, "
            "ScalarType? dtype, int expected_rows=0, Tensor? b_zero=None, bool zeros=False) -> Tensor")
_lib.define("grouped_wgrad_add(Tensor a, Tensor b, Tensor offsets, Tensor(a!) out, float scale, bool "
            "portable) -> ()")

_T = TypeVar("_T", Tensor, Tensor | None)
NO_GRADIENT = ("a grouped GEMM of FP8 has no gradient: call it under torch.no_grad(), or use bfloat16 for "
               "training")
NO_GRADIENT_4 = ("a grouped GEMM with weights of 4 bits has no gradient: call it under torch.no_grad(), or "
                 "use weights of 16 bits for training")

FORWARD, DGRAD, WGRAD = range(3)  # csrc/protocol/gemm_params.h says what each multiplies
FP8_BLOCK = 128  # numbers of k, and of n, that share a scale
# The dtypes that epmoe multiplies.
_CPU_DTYPES = (torch.bfloat16, torch.float16)
_CUDA_DTYPES = (*_CPU_DTYPES, torch.float8_e4m3fn)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def aligned(t: _T) -> _T:
    """Return t, or a copy where its address is not a multiple of 16 bytes, as the kernels need it.

    Autograd chooses the address of a gradient, and a bias may be a part of a larger tensor.  What is no dense
    tensor is returned as it is: the module says what is wrong with it, also to the other ranks.
    """
    if not isinstance(t, Tensor) or t.layout is not torch.strided or t.data_ptr() % 16 == 0:
        return t
    return t.clone()


def _out_shape(a: Tensor, b: Tensor, offsets: Tensor, kind: int, activation: Kernel) -> tuple[int, ...]:
    if kind == WGRAD:
        return offsets.shape[0] - 1, a.shape[1], b.shape[1]
    if kind == DGRAD:
        return a.shape[0], b.shape[2]
    return a.shape[0], out_columns(b.shape[1], activation)


def rows_of_experts(offsets: Tensor, num_rows: int) -> list[tuple[int, int, int]]:
    """Return (expert, first row, end) of each expert, read by the host.

    Raises ValueError for offsets that decrease, or that name rows that do not exist.
    """
    ends = offsets.tolist()
    if ends[0] < 0 or ends[-1] > num_rows or any(begin > end for begin, end in zip(ends, ends[1:])):
        raise ValueError(f"offsets {ends}: must not decrease, and must be 0 to {num_rows}, the number of "
                         f"rows")
    return [(e, begin, end) for e, (begin, end) in enumerate(zip(ends, ends[1:]))]


def _in_blocks(rows: Tensor, weight: Tensor, a_scale: Tensor, b_scale: Tensor,
               bias: Tensor | None) -> Tensor:
    """Return rows [M, K] times weight [N, K] plus bias, all of float32, for numbers of FP8 with scales.

    As in the kernels, each 128 products are added up first; their sum is multiplied by the product of the two
    scales and added to the result.
    """
    n, k = weight.shape
    columns = b_scale.repeat_interleave(FP8_BLOCK, 0)[:n]  # [N, K / 128]
    y = rows.new_zeros((len(rows), n))
    for g in range(-(-k // FP8_BLOCK)):
        part = slice(g * FP8_BLOCK, (g + 1) * FP8_BLOCK)
        y += rows[:, part] @ weight[:, part].t() * (a_scale[:, g, None] * columns[:, g])
    return y if bias is None else y + bias


def _by_expert(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, row_weight: Tensor | None,
               a_scale: Tensor | None, b_scale: Tensor | None, kind: int, activation: Kernel,
               dtype: torch.dtype | None) -> Tensor:
    """Compute a grouped GEMM by torch, one product per expert, for any device and dtype.

    The host reads the offsets.  As in the kernels, 16-bit results are rounded once, at the end.
    """
    def wide(t: Tensor) -> Tensor:
        return t.float() if t.dtype.itemsize <= 2 else t

    named = activation_of(activation)
    out = a.new_zeros(_out_shape(a, b, offsets, kind, activation), dtype=dtype)
    with torch.autocast(a.device.type, enabled=False):  # the caller has chosen the precision already
        for e, begin, end in rows_of_experts(offsets, a.shape[0]):
            rows = wide(a[begin:end])
            if kind == WGRAD:
                out[e] = rows.t() @ wide(b[begin:end])
            elif kind == DGRAD:
                out[begin:end] = rows @ wide(b[e])
            else:
                added = None if bias is None else wide(bias[e])
                if a_scale is None or b_scale is None:
                    y = F.linear(rows, wide(b[e]), added)
                else:
                    y = _in_blocks(rows, wide(b[e]), a_scale[begin:end], b_scale[e], added)
                y = y if named is None else activate(y, named)
                out[begin:end] = y if row_weight is None else y * row_weight[begin:end, None]
    return out


def has_kernel(a: Tensor, b: Tensor) -> bool:
    """Return whether epmoe multiplies rows a and weights b.

    On the CPU it multiplies bfloat16 and float16 of any sizes, on a GPU also FP8, and only sizes that the
    kernels take.  Weights of 4 bits have sizes that all of them take.
    """
    sizes = a.shape[1], *b.shape[1:]
    if a.device.type == "cpu":
        return a.dtype in _CPU_DTYPES and 0 < min(sizes) and max(sizes) <= 1 << 24
    fits = 0 < min(sizes) and max(sizes) <= 1 << 24 and math.gcd(*sizes) % 16 == 0
    return (bool(_C.HAS_CUDA) and a.device.type == "cuda" and a.dtype in _CUDA_DTYPES and fits
            and capabilities(a.device).major >= 8)


def _fits_four_bits(a: Tensor, num_columns: int, activation: Kernel) -> bool:
    """Whether the kernels of a device multiply weights of 4 bits with so many columns."""
    # each half has whole tiles
    return num_columns % (128 if has_gates_first(activation) and a.device.type == "cuda" else 64) == 0


def tile_counter(a: Tensor) -> Tensor | None:
    """Return a number in which one launch counts its tiles, or None where the module needs none, or has one.

    The number must be 0 before the launch, which also leaves it at 0, and no launch that overlaps may use it.
    The module has one for each stream, but not for a launch that is captured for a CUDA graph: a replay may
    run beside other work of the stream.  A captured launch gets its own, from the memory of the graph.  Other
    tensors of the graph may use that memory before it, so each replay clears it.
    """
    return None if _C.gemm_has_counter(a) else torch.zeros(1, dtype=torch.int64, device=a.device)


def _grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, row_weight: Tensor | None,
                  a_scale: Tensor | None, b_scale: Tensor | None, kind: int, activation: Kernel,
                  portable: bool, dtype: torch.dtype | None, expected_rows: int = 0,
                  b_zero: Tensor | None = None, zeros: bool = False) -> Tensor:
    """Compute a product.  zeros: rows of the result that belong to no expert are 0, and not undefined."""
    has_four_bits = False
    if b_scale is not None and a_scale is None:
        has_four_bits = has_kernel(a, b) and _fits_four_bits(a, b.shape[1], activation)
        if not has_four_bits:  # the same weights in 16 bits
            b = dequantize(format_of(b, b_scale, b_zero, a.dtype), b, b_scale, b_zero, a.dtype)
            b_scale = b_zero = None
    if not has_kernel(a, b):
        return _by_expert(a, b, offsets, bias, row_weight, a_scale, b_scale, kind, activation, dtype)
    if a.device.type == "cpu":
        rows_of_experts(offsets, a.shape[0])  # raises
    a, b, offsets = map(aligned, (a, b, offsets))
    bias, row_weight = aligned(bias), aligned(row_weight)
    out = a.new_empty(_out_shape(a, b, offsets, kind, activation), dtype=dtype)
    counter = tile_counter(a)
    if has_four_bits:
        b_scale, b_zero = aligned(b_scale), aligned(b_zero)
    elif a_scale is not None:  # DLPack of some versions of torch has no FP8, so the module gets bytes
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    _C.grouped_gemm(kind, activation, 0.0, a, b, offsets, bias, row_weight, counter, out, portable,
                    a_scale, b_scale, b_zero, None, None, None, expected_rows, zeros)
    return out


implement(_lib, "grouped_gemm", _grouped_gemm)


@torch.library.register_fake("epmoe::grouped_gemm", lib=_lib)
def _(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None, row_weight: Tensor | None,
      a_scale: Tensor | None, b_scale: Tensor | None, kind: int, activation: Kernel, portable: bool,
      dtype: torch.dtype | None, expected_rows: int = 0, b_zero: Tensor | None = None,
      zeros: bool = False) -> Tensor:
    return a.new_empty(_out_shape(a, b, offsets, kind, activation), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offsets, _, _, a_scale, b_scale, ctx.kind, _, ctx.portable, *_ = inputs
    if b_scale is not None:
        raise RuntimeError(NO_GRADIENT_4 if a_scale is None else NO_GRADIENT)
    ctx.deferred_wgrad = deferred_wgrad_of(b)
    ctx.save_for_backward(a, b, offsets)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Each of the three products has the other two as its gradients; see csrc/protocol/gemm_params.h."""
    a, b, offsets = ctx.saved_tensors
    check_mode(g, a, b, may_batch=True)
    g = g.contiguous()
    of_inputs = {FORWARD: ((DGRAD, g, b), (WGRAD, g, a)),
                 DGRAD: ((FORWARD, g, b), (WGRAD, a, g)),
                 WGRAD: ((FORWARD, b, g), (DGRAD, a, g))}[ctx.kind]

    def product(kind: int, left: Tensor, right: Tensor) -> Tensor | None:
        if kind == WGRAD:
            return gradient_of_node(ctx.deferred_wgrad, left, right, offsets, ctx.portable)
        # What comes before may read the gradients of all rows, also of those that belong to no expert.
        return torch.ops.epmoe.grouped_gemm(left, right, offsets, None, None, None, None, kind,
                                            as_kernel(None), ctx.portable, None, zeros=True)

    grads = [product(*factors) if needed else None
             for factors, needed in zip(of_inputs, ctx.needs_input_grad)]
    return *grads, *[None] * 12


record_gradient(_lib, "grouped_gemm", _save, _backward)


def _bytes_of(t: Tensor) -> tuple[int, int]:
    """Return where the first element of t begins, and where the last one ends."""
    reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) + 1
    return t.data_ptr(), t.data_ptr() + reach * t.element_size() * (t.numel() > 0)


def _check_apart(out: Tensor, **inputs: Tensor) -> None:
    """Raise ValueError for an out that shares memory with an input, as the module does for its kernels."""
    begin, end = _bytes_of(out)
    for name, (first, last) in ((name, _bytes_of(t)) for name, t in inputs.items()):
        if first < end and begin < last and first < last:
            raise ValueError(f"output shares memory with {name}, but the call writes the first while it uses "
                             f"the second: pass a tensor with memory of its own")


def _add_by_expert(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, scale: float) -> None:
    """Add by torch, one product per expert.  Products of 16-bit numbers are not rounded before the sum."""
    _check_apart(out, rows=a, input=b, offsets=offsets)
    wide = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        for e, begin, end in rows_of_experts(offsets, a.shape[0]):
            if end > begin:
                out[e] += (a[begin:end].to(wide).t() @ b[begin:end].to(wide)).mul_(scale)


def _grouped_wgrad_add(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, scale: float,
                       portable: bool) -> None:
    """out[e] [N, K] += scale * the sum of a[r]^T b[r] over the rows of expert e.

    a is [M, N] and b [M, K].  Where a float32 out is aligned to 16 bytes, the kernel adds to it once, and on
    Hopper the L2 makes the addition.  There, numbers below 2^-126 count as zero.
    """
    if not has_kernel(a, b):
        _add_by_expert(a, b, offsets, out, scale)
        return
    a, b, offsets = map(aligned, (a, b, offsets))
    fits = out.dtype == torch.float32 and out.is_contiguous() and out.data_ptr() % 16 == 0
    sums = out if fits else torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    counter = tile_counter(a)
    mark_written((sums,))
    _C.grouped_gemm(WGRAD, as_kernel(None), scale, a, b, offsets, None, None, counter, sums, portable, None,
                    None, None, None, None, None, 0, False)
    if not fits:
        out.add_(sums)


implement(_lib, "grouped_wgrad_add", _grouped_wgrad_add)


def check_expected_rows(expected_rows: Any) -> int:
    """Return a number of rows as the module takes it.  Raises TypeError or ValueError."""
    number = operator.index(expected_rows)  # raises TypeError
    if number < 1:
        raise ValueError(f"expected_rows {number}: must be at least 1, or None for all rows")
    return number


def check_activation(activation: Activation | None, num_columns: int) -> Kernel:
    """Return as_kernel(activation).

    Raises ValueError for an unknown activation, or a gated one with an odd number of columns.
    """
    kernel = as_kernel(activation)
    if has_gates(kernel) and num_columns % 2:
        raise ValueError(f"activation {activation!r}: needs an even number of weight rows, got {num_columns}")
    return kernel


def _check(x: Tensor, weight: Tensor, counts: Tensor | None, offsets: Tensor | None, bias: Tensor | None,
           activation: Activation | None, row_weight: Tensor | None, has_four_bits: bool) -> Kernel:
    """Check all that the host knows, and return as_kernel(activation).

    The host cannot read the numbers in counts and offsets without a wait.
    """
    name, sizes = ("offsets", cast(Tensor, offsets)) if counts is None else ("counts", counts)
    wanted_dtypes = (torch.int32,) if counts is None else _INTEGERS
    device = None  # that of the rows, which are the first tensor
    tensors = (("rows", x), ("weights", weight), (name, sizes), ("bias", bias), ("row weights", row_weight))
    for what, t in tensors:
        if t is None and what in ("bias", "row weights"):
            continue
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{what}: wanted a tensor, got {type(t).__name__}")
        if t.is_nested or t.layout is not torch.strided:
            layout = "nested" if t.is_nested else t.layout
            raise ValueError(f"{what}: wanted a dense tensor, got one of layout {layout}")
        device = t.device if device is None else device
        if t.device != device:
            raise ValueError(f"{what}: wanted a tensor on {device}, where the rows are, got one on "
                             f"{t.device}")
        if t is sizes:
            if t.dtype not in wanted_dtypes:
                raise TypeError(f"{name}: wanted {'int32' if counts is None else 'integers'}, got {t.dtype}")
        elif not t.dtype.is_floating_point and not (t is weight and has_four_bits):
            raise TypeError(f"{what}: wanted a floating-point dtype, got {t.dtype}")
    rows, weights = x.shape, weight.shape  # each look at a shape costs time
    if len(rows) != 2 or len(weights) != 3 or rows[1] != weights[2] * (2 if has_four_bits else 1):
        numbers = "[L, N, K / 2]" if has_four_bits else "[L, N, K]"
        raise ValueError(f"wanted rows [M, K] and weights {numbers}, got {list(rows)} and {list(weights)}")
    if has_four_bits and x.dtype not in _CPU_DTYPES:
        raise TypeError(f"rows: wanted bfloat16 or float16 for weights of 4 bits, got {x.dtype}")
    if x.dtype != weight.dtype and not has_four_bits:
        raise TypeError(f"wanted rows and weights of one dtype, got {x.dtype} and {weight.dtype}")
    num_sizes = weights[0] + (counts is None)
    if sizes.shape != (num_sizes,):
        raise ValueError(f"wanted {name} [{num_sizes}], got {list(sizes.shape)}")
    kernel = check_activation(activation, weights[1])
    if bias is not None and bias.shape != weights[:2]:
        raise ValueError(f"wanted a bias {list(weights[:2])}, got {list(bias.shape)}")
    if row_weight is not None and row_weight.shape != rows[:1]:
        raise ValueError(f"wanted row weights [{rows[0]}], got {list(row_weight.shape)}")
    return kernel


def _check_scales(x: Tensor, weight: Tensor, a_scale: Tensor | None, b_scale: Tensor | None,
                  out_dtype: torch.dtype | None, leaves: tuple[Tensor | None, ...]) -> bool:
    """Check what only FP8 has.  True for a GEMM of FP8."""
    is_fp8 = x.dtype == torch.float8_e4m3fn
    if not is_fp8 and x.dtype.itemsize == 1:
        raise TypeError(f"rows: of the FP8 dtypes only float8_e4m3fn is supported, got {x.dtype}")
    if not is_fp8:
        for name, v in (("a_scale", a_scale), ("b_scale", b_scale), ("out_dtype", out_dtype)):
            if v is not None:
                raise ValueError(f"{name}: give it only for rows and weights of float8_e4m3fn, got {x.dtype}")
        return False
    of_rows, of_weights = scale_shapes(x, weight)
    for name, t, shapes in (("a_scale", a_scale, [of_rows, [of_rows[0], 1]]),
                            ("b_scale", b_scale, [of_weights, of_weights[:1]])):
        if not isinstance(t, torch.Tensor) or t.dtype != torch.float32 or t.layout is not torch.strided:
            got = t.dtype if isinstance(t, torch.Tensor) else type(t).__name__
            raise TypeError(f"{name}: rows and weights of float8_e4m3fn need scales of float32, got {got}")
        # numel() last: a compiler may not know the number of rows
        if t.device != x.device or (list(t.shape) not in shapes and t.numel() != 1):
            wanted = ", ".join(map(str, shapes))
            raise ValueError(f"{name}: wanted {wanted} or one number, on {x.device}, got {list(t.shape)} on "
                             f"{t.device}")
    if out_dtype not in (None, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        raise TypeError(f"out_dtype {out_dtype}: must be torch.bfloat16, float16 or float8_e4m3fn")
    if requires_grad(*leaves):
        raise RuntimeError(NO_GRADIENT)
    return True


def scale_shapes(x: Tensor, weight: Tensor) -> tuple[list[int], list[int]]:
    """Return the shapes of the scales of FP8 rows [M, K] and weights [L, N, K], with one for each block."""
    num_n, num_k = (-(-size // FP8_BLOCK) for size in weight.shape[1:])
    return [x.shape[0], num_k], [weight.shape[0], num_n, num_k]


def expand_scales(x: Tensor, weight: Tensor, a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked scales with one for each block: the tensors themselves, or views of them."""
    of_rows, of_weights = scale_shapes(x, weight)
    if list(a_scale.shape) != of_rows:
        is_of_all = a_scale.dim() < 2  # the kernel is then that of one scale for all rows, also for one row
        a_scale = a_scale.reshape(-1, 1).expand(of_rows)
        if is_of_all and x.shape[0] == 1:
            a_scale = a_scale.as_strided(of_rows, (0, 0))
    if list(b_scale.shape) != of_weights:
        b_scale = b_scale.reshape(-1, 1, 1).expand(of_weights)
    return a_scale, b_scale


def is_transposed(weight: Tensor) -> bool:
    """Whether weights [L, N, K] are a view of contiguous ones [L, K, N].  They are then read as they are."""
    return weight.dim() == 3 and not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def _cast(t: _T, dtype: torch.dtype) -> _T:
    """Return t as a contiguous tensor of a dtype, or None.  A call of to() that does nothing takes 1 us."""
    return None if t is None else (t if t.dtype == dtype else t.to(dtype)).contiguous()


def add_bias(y: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """Return y [M, N] plus the bias [L, N] of each row's expert.

    Rows that belong to no expert are returned unchanged, and have no gradient.
    """
    row = torch.arange(len(y), device=y.device, dtype=torch.int32)
    # Rows of no expert are before the first expert's (here -1) or after the last one's (here L): both get
    # row L of `wide`, which is zero.
    expert = (num_not_after(offsets, row) - 1) % (len(bias) + 1)
    # In float32 and rounded once.  So is the gradient of the bias, a sum over all rows of its expert.
    wide = F.pad(bias.to(torch.promote_types(y.dtype, torch.float32)), (0, 0, 0, 1))
    # wide[expert] has the same gradient, but its backward adds the rows of an expert one after the other. So
    # F.embedding is taken, except for no rows: torch then fails in its second derivative.
    is_empty = not torch.compiler.is_compiling() and len(y) == 0
    return (y + (wide[expert] if is_empty else F.embedding(expert, wide))).to(y.dtype)


# Its result is a tensor, or a tuple of two if out_dtype is FP8. "| Any" spares callers a check for the tuple.
def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor | None = None, *, offsets: Tensor | None = None,
                 bias: Tensor | None = None, activation: Activation | None = None,
                 row_weight: Tensor | None = None, a_scale: Tensor | None = None,
                 b_scale: Tensor | None = None, b_zero: Tensor | None = None,
                 out_dtype: torch.dtype | None = None, portable: bool = False,
                 expected_rows: int | None = None) -> Tensor | Any:
    """Multiply rows, grouped by expert, with the weights of their experts.  Local to a rank.

    Row r of expert e gives activation(x[r] @ weight[e].T + bias[e]) * row_weight[r].  Differentiable in x,
    weight, bias and row_weight, any number of times.

    bfloat16 and float16 on CUDA (compute capability 8.0 or newer), with N and K multiples of 16: a kernel of
    epmoe, which sums in float32 and needs no host read of the sizes.  bfloat16 and float16 on the CPU: epmoe,
    in C, which also sums in float32.  Otherwise: torch, one product per expert.

    FP8: x and weight of float8_e4m3fn, as quantize_fp8 and quantize_fp8_weight give them.  Each 128 products
    along K are added up first; their sum is multiplied by a_scale * b_scale, rounded to float32, and added to
    the result in float32.  The error of a sum of 128 products is at most 2^-17 of the sum of their magnitudes
    where it is in float32.  The tensor cores of Hopper keep fewer bits when they add numbers of FP8: the
    error is below 2^-9 for random numbers.  A product of two scales below 2^-126 is subnormal and has fewer
    bits.  NaN in a number or a scale gives NaN in the row or the columns that use it.  The kernels are the
    same as for 16 bits; for "swiglu" the fast one needs N to be a multiple of 128, with few rows of 64.  No
    gradients.

    4 bits: x of bfloat16 or float16, and weight uint8 [L, N, K / 2], MXFP4 or INT4 in the layout of
    epmoe.gemm.four_bit, where quantize and the readers of checkpoints make it.  The result has the bits of
    the product with the weights in 16 bits, each rounded once.  N and K are multiples of 64.  No
    gradients.

    FP8 with one scale for each row, or for all, and one for each expert: the tensor cores of Hopper add up
    all products, which is faster.  Elsewhere, and with few rows that share one scale, the sums are as above.

    Args:
        x: [M, K]: first all rows of expert 0, then of expert 1, and so on.
        weight: [L, N, K], of x's dtype, as checkpoints hold it.  Or the view transpose(1, 2) of contiguous
            weights [L, K, N], which is read without a copy: bias, activation and row weights are then torch's
            operators after the kernel, as where a gradient is needed.  Other strides are copied.
        counts: [L] integers on x's device: the number of rows of each expert.  Give either counts or offsets.
        offsets: [L + 1] int32 on x's device: where each expert's rows begin, as EPLayout.expert_offsets.
        bias: None, or [L, N] of any floating-point dtype; rounded to x's dtype where no gradient is needed.
        activation: None, or one of reference.activate, which says in what order the weights have gates and
            ups.
        row_weight: None, or [M] of any floating-point dtype; applied as float32.
        a_scale: For FP8: [M, ceil(K / 128)] float32, a scale for each 128 numbers of a row; or [M, 1], one
            for each row; or one number.
        b_scale: For FP8: [L, ceil(N / 128), ceil(K / 128)] float32, a scale for each block of 128 by 128; or
            [L], one for each expert; or one number.  For 4 bits: uint8 for MXFP4 and x's dtype for
            INT4, [L, N / 64, ceil(K / 256), 64 * 256 / group], as epmoe.gemm.four_bit makes them.  Nothing
            checks here that a byte of MXFP4 is at most 128, a scale of 2: above it results are wrong.
        b_zero: For INT4 with zero points: uint8, as b_scale.
        out_dtype: For FP8: torch.bfloat16 (the default), torch.float16, or torch.float8_e4m3fn: the result is
            then rounded to bfloat16 and quantised by a second kernel, as by quantize_fp8.
        portable: Use the kernel for any GPU also on a Hopper GPU.
        expected_rows: How many of the M rows are expected to belong to experts, where x has room for more, as
            the compact rows of LowLatencyAll2All: T * K if each rank has T tokens.  None: all.  It only
            chooses the kernel: up to 24 rows an expert have another one.  Results have the same bits, but for
            FP8 with one scale for all rows and one for each expert.

    Returns:
        [M, N], or [M, N / 2] for the gated activations, of x's dtype, for FP8 of out_dtype.  Rows that
            belong to no expert are undefined; the gradient of x is 0 there.  With
            out_dtype=torch.float8_e4m3fn a tuple (q, scales), as quantize_fp8 returns it.

    Raises:
        ValueError: For wrong shapes or devices, and for counts or offsets that name rows that do not exist.
            The kernels raise nothing for the latter, because the host does not read them: they skip such
            rows.
        TypeError: For what is not a tensor, and for wrong dtypes.
        RuntimeError: For FP8 and 4 bits, when a gradient is wanted.
        NotImplementedError: For a tensor with a tangent of torch.autograd.forward_ad, and inside a transform
            of torch.func other than vmap.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> x = torch.ones(3, 2)
        >>> weight = torch.tensor([[[1.0, 1.0]], [[10.0, 10.0]]])  # two experts, N = 1, K = 2
        >>> epmoe.grouped_gemm(x, weight, torch.tensor([1, 2]))
        tensor([[ 2.],
                [20.],
                [20.]])
        >>> rows, a_scale = epmoe.quantize_fp8(x)
        >>> fp8, b_scale = epmoe.quantize_fp8_weight(weight)
        >>> epmoe.grouped_gemm(rows, fp8, torch.tensor([1, 2]), a_scale=a_scale, b_scale=b_scale)
        tensor([[ 2.],
                [20.],
                [20.]], dtype=torch.bfloat16)

    References:
        FP8: DeepSeek-V3 Technical Report, section 3.3.2.
    """
    if (counts is None) == (offsets is None):
        given = "neither" if counts is None else "both"
        raise ValueError(f"give either counts or offsets, got {given}")
    has_four_bits = b_scale is not None and a_scale is None and isinstance(weight, Tensor) and (
        weight.dtype == torch.uint8)
    kernel = _check(x, weight, counts, offsets, bias, activation, row_weight, has_four_bits)
    expected = 0 if expected_rows is None else check_expected_rows(expected_rows)
    check_mode(x, weight, bias, row_weight, may_batch=True)
    if offsets is None:
        offsets = F.pad(cast(Tensor, counts).cumsum(0), (1, 0)).clamp(-1, 2**31 - 1).to(torch.int32)
    x, offsets = x.contiguous(), offsets.contiguous()
    leaves = (x, weight, bias, row_weight)
    if has_four_bits:
        if out_dtype not in (None, x.dtype):
            raise TypeError(f"out_dtype {out_dtype}: must be None, or that of the rows, {x.dtype}")
        if requires_grad(*leaves):
            raise RuntimeError(NO_GRADIENT_4)
        scale, zero = cast(Tensor, b_scale), b_zero
        format_of(weight, scale, zero, x.dtype)  # raises
        for name, t in (("b_scale", scale), ("b_zero", zero)):
            if t is not None and t.device != x.device:
                raise ValueError(f"{name}: wanted a tensor on {x.device}, where the rows are, got one on "
                                 f"{t.device}")
        of_four = (x, weight.contiguous(), offsets, _cast(bias, x.dtype), _cast(row_weight, torch.float32),
                   None, scale.contiguous())
        return call("grouped_gemm", of_four, FORWARD, kernel, portable, None, expected,
                    scales=() if zero is None else (zero.contiguous(),))
    if b_zero is not None:
        raise ValueError("b_zero: give it only with b_scale, for weights of 4 bits")
    if _check_scales(x, weight, a_scale, b_scale, out_dtype, (*leaves, a_scale, b_scale)):
        quantises = out_dtype == torch.float8_e4m3fn
        dtype = torch.bfloat16 if quantises or out_dtype is None else out_dtype
        scales = expand_scales(x, weight, cast(Tensor, a_scale), cast(Tensor, b_scale))
        of_fp8 = (x, weight.contiguous(), offsets, _cast(bias, dtype), _cast(row_weight, torch.float32),
                  *scales)
        y = call("grouped_gemm", of_fp8, FORWARD, kernel, portable, dtype, expected)
        return call("quantize_fp8", (y, offsets[-1:]), as_kernel(None)) if quantises else y
    kind = DGRAD if is_transposed(weight) else FORWARD  # DGRAD multiplies rows with [L, K, N]
    weight = weight.transpose(1, 2) if kind == DGRAD else weight.contiguous()
    if kind == FORWARD and not requires_grad(*leaves):
        tensors = x, weight, offsets, _cast(bias, x.dtype), _cast(row_weight, torch.float32), None, None
        return call("grouped_gemm", tensors, FORWARD, kernel, portable, None, expected)
    # Torch's own operators follow the product: they have a backward, and only FORWARD has an epilogue.
    # The gradient of a row weight is a product with the row, also for rows that belong to no expert.
    zeros = row_weight is not None and requires_grad(row_weight)
    y = call("grouped_gemm", (x, weight, offsets, None, None, None, None), kind, as_kernel(None), portable,
             None, expected, None, zeros)
    if bias is not None:
        y = add_bias(y, bias, offsets)
    y = y if activation is None else activate(y, activation)
    return y if row_weight is None else (y * row_weight[:, None]).to(x.dtype)
