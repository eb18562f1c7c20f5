"""FP8: rows and weights of float8_e4m3fn with a scale for each block."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _C
from ..comm.device import capabilities
from ..torch_modes import call, check_mode, implement
from .activations import Activation, Kernel, activate, activation_of, as_kernel, has_gates, out_columns
from .grouped import FP8_BLOCK as BLOCK, aligned

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_lib = torch.library.Library("epmoe", "FRAGMENT")
_lib.define("quantize_fp8(Tensor x, Tensor? num_rows, float[] activation, bool "
            "pow2=False, bool rowwise=False) -> (Tensor, Tensor)")


def _check_input(x: Tensor, num_dims: int, shape: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"wanted a tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        raise ValueError(f"wanted a dense tensor, got one of layout {'nested' if x.is_nested else x.layout}")
    if x.dtype not in DTYPES:
        raise TypeError(f"wanted float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() != num_dims:
        raise ValueError(f"wanted {shape}, got {list(x.shape)}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("the quantisation has no gradient: call it under torch.no_grad(), or detach() the "
                           "tensor")


def _scale_of(blocks: Tensor, dims: tuple[int, ...], pow2: bool = False) -> tuple[Tensor, Tensor]:
    """Return the scale of each block, and 1 / scale.  dims: the dimensions of a block; they become 1."""
    most = blocks.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(dims, keepdim=True).clamp(min=2.0**-100)
    scales = most / torch.full_like(most, 448)  # to divide by a number, torch multiplies by 1 / 448 on a GPU
    if pow2:  # the next one, by the bits; infinity stays infinity
        scales = ((scales.view(torch.int32) + 0x7fffff) & 0x7f800000).view(torch.float32)
    return scales, 1 / scales


def _empty_rows(x: Tensor, activation: Kernel) -> tuple[Tensor, Tensor]:
    """Return (q, scales) for the rows of x.  The scales are in memory column after column."""
    num_rows, k = x.shape[0], out_columns(x.shape[1], activation)
    q = x.new_empty((num_rows, k), dtype=torch.float8_e4m3fn)
    return q, x.new_empty((-(-k // BLOCK), num_rows), dtype=torch.float32).t()


def _quantize_by_torch(x: Tensor, activation: Kernel, pow2: bool = False) -> tuple[Tensor, Tensor]:
    named = activation_of(activation)
    x = x.float() if named is None else activate(x.float(), named)
    groups = F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scales, inverse = _scale_of(groups, (2,), pow2)
    return (groups * inverse).to(torch.float8_e4m3fn).flatten(1)[:, :x.shape[1]], scales[:, :, 0]


def _quantize_fp8(x: Tensor, num_rows: Tensor | None, activation: Kernel, pow2: bool = False,
                  rowwise: bool = False) -> tuple[Tensor, Tensor]:
    q, scales = _empty_rows(x, activation)
    if x.device.type == "cpu" or (x.device.type == "cuda" and _C.HAS_CUDA
                                  and capabilities(x.device).major >= 8):
        _C.quantize_fp8(activation, aligned(x), num_rows, q.view(torch.uint8), scales.t(), pow2, rowwise)
    else:
        num = len(x) if num_rows is None else min(max(num_rows.item(), 0), len(x))
        q[:num], scales[:num] = _quantize_by_torch(x[:num], activation, pow2)
        if rowwise:
            most = scales[:num].amax(1, keepdim=True)
            ratio = (scales[:num] / most).repeat_interleave(BLOCK, 1)[:, :q.shape[1]]
            q[:num], scales[:num] = (q[:num].float() * ratio).to(q.dtype), most
    return q, scales


implement(_lib, "quantize_fp8", _quantize_fp8)


@torch.library.register_fake("epmoe::quantize_fp8", lib=_lib)
def _(x: Tensor, num_rows: Tensor | None, activation: Kernel, pow2: bool = False,
      rowwise: bool = False) -> tuple[Tensor, Tensor]:
    return _empty_rows(x, activation)


def _check_num_rows(num_rows: Tensor, x: Tensor) -> None:
    if not isinstance(num_rows, torch.Tensor) or num_rows.dtype != torch.int32:
        got = num_rows.dtype if isinstance(num_rows, torch.Tensor) else type(num_rows).__name__
        raise TypeError(f"num_rows: wanted an int32 tensor of one number, as layout.expert_offsets[-1:], got "
                        f"{got}; where the host knows the number n, pass x[:n]")
    if num_rows.numel() != 1 or num_rows.device != x.device:
        raise ValueError(f"num_rows: wanted one number on {x.device}, where the rows are, got "
                         f"{list(num_rows.shape)} on {num_rows.device}")


def quantize_fp8(x: Tensor, activation: Activation | None = None, num_rows: Tensor | None = None, *,
                 pow2: bool = False, rowwise: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise rows to float8_e4m3fn, with a scale for each 128 numbers of a row.

    One kernel reads the rows once.  With an activation it quantises the activations of the rows, which are
    float32 in between: they are not rounded to the dtype of x.  The CPU and CUDA give the same bits.

    The numbers are those of LowLatencyAll2All.dispatch with fp8=True: scale = the largest magnitude / 448,
    q = x * (1 / scale), rounded to nearest even.  A group of zeros has the scale 2^-100 / 448.  A NaN stays
    NaN and does not change the scale.  A group with an infinity has the scale infinity, and all products
    with it are NaN.  So no scale is 0 or subnormal.

    Args:
        x: [M, K] float32, bfloat16 or float16.  Where K is not a multiple of 128, the last group is shorter.
            For an activation with gates [M, 2 * K].
        activation: None, or one of reference.activate, which says how gates and ups are arranged.
        num_rows: None, or one int32 on x's device, for example expert_offsets[-1:] of a layer with a
            capacity: rows from this number on are neither read nor written, and the host reads nothing.
        pow2: Round each scale up to a power of two.  Numbers can then get another scale that is a power of
            two without an error, as long as they stay normal.
        rowwise: With pow2: each scale then becomes the largest one of its row, and the numbers are rounded
            again if they become subnormal.  grouped_gemm takes scales[:, :1], which is faster on Hopper with
            one scale for each expert.  On a GPU, K is a multiple of 16.

    Returns:
        A tuple (q, scales): [M, K] float8_e4m3fn and [M, ceil(K / 128)] float32, in memory column after
            column: grouped_gemm takes any strides, and is fastest with these.  x is about q * scale, with an
            error of at most 2^-4 of its magnitude, or 2^-10 * scale if that is larger.  Rows from num_rows on
            are undefined.

    Raises:
        ValueError: For a tensor that is not dense, another number of dimensions, an unknown activation, gates
            for an odd number of columns, a num_rows of another size or device, and rowwise without pow2 or
            for another K.
        TypeError: For what is not a tensor, and for another dtype.
        RuntimeError: When a gradient of x is wanted.
        NotImplementedError: For a tensor with a tangent of torch.autograd.forward_ad, and inside a transform
            of torch.func other than vmap.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> q, scales = epmoe.quantize_fp8(torch.full((1, 200), 7.0))
        >>> q[0, 199].item(), scales.tolist()
        (448.0, [[0.015625, 0.015625]])
        >>> q, scales = epmoe.quantize_fp8(torch.tensor([[0.0, 8.0, 1.0, 7.0]]), "swiglu")  # 2 gates, 2 ups
        >>> q.tolist(), round(scales.item() * 448, 1)
        ([[0.0, 448.0]], 56.0)

    References:
        DeepSeek-V3 Technical Report, section 3.3.2: 1x128 groups of activations.
    """
    _check_input(x, 2, "rows [M, K]")
    if rowwise and not pow2:
        raise ValueError("rowwise: needs pow2=True, so that numbers get another scale without an error")
    kernel = as_kernel(activation)
    if has_gates(kernel) and x.shape[1] % 2:
        raise ValueError(f"activation {activation!r}: wanted as many gates as ups in a row, got rows of "
                         f"{x.shape[1]} numbers")
    if num_rows is not None:
        _check_num_rows(num_rows, x)
        num_rows = num_rows.reshape(1)
    check_mode(x, may_batch=True)
    return call("quantize_fp8", (x.detach().contiguous(), num_rows), kernel, pow2, rowwise)


def dequantize_fp8(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of float8_e4m3fn in another dtype: the inverse of quantize_fp8, but for its rounding.

    Two operations of torch, with the same bits on CPUs and GPUs.

    Args:
        rows: [M, K] float8_e4m3fn.
        scales: [M, ceil(K / 128)] float32, with any strides.
        dtype: bfloat16, float16 or float32, in which the numbers of rows are exact.

    Returns:
        [M, K] of dtype: each number times its scale, in float32, rounded once; in float16 no infinity.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> from epmoe.gemm.quantize import dequantize_fp8
        >>> dequantize_fp8(*epmoe.quantize_fp8(torch.tensor([[7.0, 3.4]])), torch.bfloat16)
        tensor([[7.0000, 3.5000]], dtype=torch.bfloat16)
    """
    out, num = rows.to(dtype), rows.shape[1] // BLOCK
    out[:, :num * BLOCK].unflatten(1, (num, BLOCK)).mul_(scales[:, :num, None])
    out[:, num * BLOCK:].mul_(scales[:, num:])
    if dtype == torch.float16:  # FP8 may have rounded its largest numbers up, beyond those of float16
        largest = torch.finfo(dtype).max
        out.clamp_(-largest, largest)
    return out


def quantize_fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights to float8_e4m3fn, with a scale for each block of 128 by 128 numbers.

    Scales are computed as by quantize_fp8: the largest magnitude / 448.  Checkpoints of DeepSeek-V3 hold
    such scales under the name weight_scale_inv.

    Args:
        weight: [L, N, K] float32, bfloat16 or float16: the weights of L experts.  Where N or K is not a
            multiple of 128, the last blocks are smaller.

    Returns:
        A tuple (q, scales): [L, N, K] float8_e4m3fn and [L, ceil(N / 128), ceil(K / 128)] float32.

    Raises:
        ValueError: For a tensor that is not dense, and for another number of dimensions.
        TypeError: For what is not a tensor, and for another dtype.
        RuntimeError: When a gradient of weight is wanted.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> q, scales = epmoe.quantize_fp8_weight(torch.full((1, 16, 200), 7.0))
        >>> q.shape, scales.tolist()
        (torch.Size([1, 16, 200]), [[[0.015625, 0.015625]]])

    References:
        DeepSeek-V3 Technical Report, section 3.3.2: 128x128 blocks of weights.
    """
    _check_input(weight, 3, "weights [L, N, K]")
    num, n, k = weight.shape
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = weight.new_empty((num, -(-n // BLOCK), -(-k // BLOCK)), dtype=torch.float32)
    for e in range(num):  # one by one, because the computation needs several copies in float32
        blocks = F.pad(weight[e].detach().float(), (0, -k % BLOCK, 0, -n % BLOCK))
        blocks = blocks.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        scale, inverse = _scale_of(blocks, (1, 3))
        q[e] = (blocks * inverse).to(q.dtype).flatten(2, 3).flatten(0, 1)[:n, :k]
        scales[e] = scale[:, 0, :, 0]
    return q, scales


def rescale_fp8_weight(q: Tensor, scales: Tensor, expert_scale: Tensor) -> None:
    """Give weights in FP8 one scale for each expert, in place.

    A number becomes number * its scale / the new one, rounded to nearest even.  All scales are powers of two,
    so it is the same number, unless it becomes subnormal: e4m3 spans 2^15 without.  The CPU and CUDA then
    give the same bits.

    Args:
        q: [L, N, K] float8_e4m3fn, contiguous.  On a GPU, K is a multiple of 16.
        scales: [L, ceil(N / 128), ceil(K / 128)] float32, of any strides.
        expert_scale: [L] float32: the new scales, powers of two, none less than the old ones.

    Raises:
        ValueError: For wrong shapes or devices.
        TypeError: For wrong dtypes.

    Examples:
        >>> import torch
        >>> from epmoe.gemm.quantize import rescale_fp8_weight
        >>> from epmoe.gemm.wgrad_fp8 import quantize_fp8_weight_pair
        >>> q, scales, *_ = quantize_fp8_weight_pair(torch.full((1, 16, 256), 7.0))
        >>> rescale_fp8_weight(q, scales, torch.tensor([0.125]))
        >>> q[0, 0, 0].item()
        56.0
    """
    if q.dtype != torch.float8_e4m3fn:
        raise TypeError(f"numbers: wanted torch.float8_e4m3fn, got {q.dtype}")
    _C.rescale_fp8_weight(q.view(torch.uint8), scales, expert_scale)


def expand_fp8(numbers: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype,
               expert_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights of 4 bits in FP8, for products of rows in FP8.

    The results have the bits of quantize_fp8_weight_pair of the weights that four_bit.dequantize returns: a
    block of 128 by 128 has the least power of two as its scale that is not less than its largest magnitude
    / 448.  So weights of MXFP4 are exact, but for those that are 2^15 times smaller than the largest one of
    their block.

    Args:
        numbers: uint8 [L, N, K/2], in the layout of the kernels (four_bit.py), and so are the next two.
        scales: [L, N/64, K/256, 64 * 256/group], K/256 rounded up.
        zeros: None, or uint8, as scales.
        dtype: torch.bfloat16 or torch.float16, to which each weight is rounded first.
        expert_scale: None, or [L] float32, powers of two: the scale of all blocks of an expert.

    Returns:
        A tuple (q, scales): [L, N, K] float8_e4m3fn, [L, N/128, K/128] float32, both rounded up.

    Raises:
        ValueError: For shapes that no format has.
        TypeError: For what is not a tensor, and for dtypes that no format has.

    Examples:
        >>> import torch
        >>> from epmoe.gemm import four_bit, quantize
        >>> packed = four_bit.quantize(four_bit.Mxfp4(), torch.full((1, 64, 256), 3.0), torch.bfloat16)
        >>> q, scales = quantize.expand_fp8(*packed, torch.bfloat16)
        >>> q.shape, q[0, 0, 0].item(), scales.tolist()
        (torch.Size([1, 64, 256]), 384.0, [[[0.0078125, 0.0078125]]])
    """
    given = numbers, scales, *(() if zeros is None else (zeros,))
    if not all(isinstance(t, Tensor) for t in given):
        raise TypeError(f"wanted tensors, got {', '.join(type(t).__name__ for t in given)}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype {dtype}: must be torch.bfloat16 or torch.float16")
    if numbers.dim() != 3:
        raise ValueError(f"wanted weights [L, N, K / 2], got {list(numbers.shape)}")
    numbers, scales, *rest = (aligned(t.contiguous()) for t in given)
    num, n, k = numbers.shape[0], numbers.shape[1], 2 * numbers.shape[2]
    q = torch.empty(num, n, k, dtype=torch.float8_e4m3fn, device=numbers.device)
    q_scales = torch.empty(num, -(-n // BLOCK), -(-k // BLOCK), dtype=torch.float32,
                           device=numbers.device)
    _C.expand_fp8(numbers, scales, rest[0] if rest else None, q.view(torch.uint8), q_scales, expert_scale,
                  dtype == torch.float16)
    return q, q_scales
