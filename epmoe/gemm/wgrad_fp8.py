"""The gradient of weights (WGRAD) in FP8, and what FP8 training needs for it: transposed rows and weights.

Tensor cores of Hopper take operands of FP8 only with the contraction along memory.  WGRAD contracts over the
rows of an expert, so both operands are transposed: [C, P].  The rows of an expert take whole blocks of 128
numbers of a line, filled up with zeros.  Expert e begins at block offsets[e] // 128 + e, so P =
128 * (M // 128 + L) has room for all sizes of the experts.  There may be a block between two experts, which
nobody writes or reads.  All rows of an expert have one scale for each 128 columns, [L, C / 128].

The functions compute on detached tensors: they have no gradients.
"""

import torch
from torch import Tensor

from .. import _C
from ..comm.device import capabilities
from ..torch_modes import mark_written
from .grouped import FP8_BLOCK as BLOCK, aligned, rows_of_experts, tile_counter


def num_transposed_blocks(num_rows: int, num_experts: int) -> int:
    """Return P / 128: the blocks of transposed rows, for any sizes of the experts."""
    return num_rows // BLOCK + num_experts


def blocks_of_experts(offsets: Tensor, num_rows: int) -> list[tuple[int, int, int, int]]:
    """Return (expert, first row, end, first block) of each expert, read by the host."""
    return [(e, begin, end, begin // BLOCK + e) for e, begin, end in rows_of_experts(offsets, num_rows)]


def _bytes_of(t: Tensor, name: str) -> Tensor:
    if t.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}: wanted torch.float8_e4m3fn, got {t.dtype}")
    return aligned(t.detach().contiguous()).view(torch.uint8)


def transpose_fp8(x: Tensor, x_scale: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose rows of FP8 for grouped_wgrad_fp8.

    All rows of an expert get the largest of their scales in each 128 columns: a number is multiplied by its
    old scale / the new one.  That is exact if both are powers of two, as those of quantize_fp8(...,
    pow2=True) are, and if it does not become subnormal.  Numbers of e4m3 span 2^15 without becoming
    subnormal.  The CPU and CUDA give the same bits.

    Args:
        x: [M, C] float8_e4m3fn, rows grouped by expert.  On a GPU, C is a multiple of 16.
        x_scale: [M, ceil(C / 128)] float32, of any strides, as quantize_fp8 returns them.
        offsets: [L + 1] int32 on x's device: where each expert's rows begin.

    Returns:
        A tuple (q, scales): [C, P] float8_e4m3fn, where P = 128 * (M // 128 + L), and [L, ceil(C / 128)]
            float32.  Rows that belong to no expert are not read.  Blocks that belong to no expert are
            undefined.

    Raises:
        ValueError: For wrong shapes or devices.
        TypeError: For wrong dtypes.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> from epmoe.gemm.wgrad_fp8 import transpose_fp8
        >>> x, offsets = torch.full((3, 16), 14.0), torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> q, scales = transpose_fp8(*epmoe.quantize_fp8(x, pow2=True), offsets)
        >>> q.shape, q[0, 128:131].tolist(), scales[1, 0].item()  # expert 1 has two rows, in block 1
        (torch.Size([16, 256]), [448.0, 448.0, 0.0], 0.03125)
    """
    if x.dim() != 2 or offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"wanted rows [M, C] and offsets [L + 1], got {list(x.shape)} and "
                         f"{list(offsets.shape)}")
    rows = _bytes_of(x, "rows")
    num_experts = len(offsets) - 1
    q = torch.empty(x.shape[1], num_transposed_blocks(len(x), num_experts) * BLOCK,
                    dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_experts, -(-x.shape[1] // BLOCK), dtype=torch.float32, device=x.device)
    if x.device.type == "cpu":
        rows_of_experts(offsets, len(x))  # raises
    _C.transpose_fp8(rows, x_scale.detach(), aligned(offsets.contiguous()), q.view(torch.uint8), scales)
    return q, scales


def quantize_fp8_weight_pair(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise weights for both products of a training step, in one pass over them.

    A block of 128 by 128 has the least power of two as its scale that is not less than its largest magnitude
    / 448.  The forward product takes the first two results, and DGRAD, which is the forward product of
    transposed weights, the last two.  The CPU and CUDA give the same bits.

    Args:
        weight: [L, N, K] float32, bfloat16 or float16.  On a GPU, N and K are multiples of 16.

    Returns:
        A tuple (q, scales, q_t, scales_t): [L, N, K] float8_e4m3fn, [L, ceil(N / 128), ceil(K / 128)]
            float32, and the same numbers transposed: [L, K, N] and [L, ceil(K / 128), ceil(N / 128)].

    Raises:
        ValueError: For another number of dimensions, and for sizes that the kernel does not take.
        TypeError: For another dtype.

    Examples:
        >>> import torch
        >>> from epmoe.gemm.wgrad_fp8 import quantize_fp8_weight_pair
        >>> q, scales, q_t, scales_t = quantize_fp8_weight_pair(torch.full((1, 16, 256), 7.0))
        >>> q.shape, scales.tolist(), torch.equal(q_t.float(), q.float().mT)
        (torch.Size([1, 16, 256]), [[[0.015625, 0.015625]]], True)
    """
    if weight.dim() != 3:
        raise ValueError(f"wanted weights [L, N, K], got {list(weight.shape)}")
    num, n, k = weight.shape
    q, q_t = (torch.empty(num, *size, dtype=torch.float8_e4m3fn, device=weight.device)
              for size in ((n, k), (k, n)))
    num_n, num_k = (-(-size // BLOCK) for size in (n, k))
    scales, scales_t = (torch.empty(num, *size, dtype=torch.float32, device=weight.device)
                        for size in ((num_n, num_k), (num_k, num_n)))
    _C.quantize_fp8_weight(aligned(weight.detach().contiguous()), q.view(torch.uint8), q_t.view(torch.uint8),
                           scales, scales_t)
    return q, scales, q_t, scales_t


def _wgrad_by_torch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor, out: Tensor,
                    alpha: float) -> None:
    """Multiply by torch, for any device.  The host reads the offsets.

    Scales that are powers of two may be applied in any order.
    """
    of_a = a_scale.repeat_interleave(BLOCK, 1)[:, :len(a)]
    of_b = b_scale.repeat_interleave(BLOCK, 1)[:, :len(b)]
    most = (a.shape[1] // BLOCK - out.shape[0] + 1) * BLOCK - 1  # the most rows for which lines are that long
    with torch.autocast(a.device.type, enabled=False):
        for e, begin, end, first in blocks_of_experts(offsets, most):
            factor = of_a[e, :, None] * of_b[e]
            total = torch.zeros(out.shape[1:], dtype=torch.float32, device=a.device)
            for block in range(first, first - (begin - end) // BLOCK):
                part = slice(block * BLOCK, (block + 1) * BLOCK)
                total += a[:, part].float() @ b[:, part].float().t() * factor
            if out.dtype != torch.float32:
                out[e] = total
            elif end > begin:
                out[e] += alpha * total


def grouped_wgrad_fp8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor,
                      out_dtype: torch.dtype = torch.bfloat16, *, out: Tensor | None = None,
                      alpha: float = 1.0) -> Tensor:
    """Compute the gradient of weights from two results of transpose_fp8.

    The tensor cores of Hopper add up all rows of an expert.  On other devices torch computes this, one
    product for each block of 128 rows.

    Args:
        a: [N, P] float8_e4m3fn: the gradient of the product's output, transposed.
        a_scale: [L, ceil(N / 128)] float32.
        b: [K, P] float8_e4m3fn: the product's input, transposed.
        b_scale: [L, ceil(K / 128)] float32.
        offsets: [L + 1] int32: as for transpose_fp8.
        out_dtype: torch.bfloat16 or torch.float16, if there is no out.
        out: None, or [L, N, K], contiguous and aligned to 16 bytes.  To float32, as main_grad may have, alpha
            times the result is added; bfloat16 or float16 gets the result.
        alpha: A factor of what is added to out.

    Returns:
        [L, N, K] of out_dtype, zeros for an expert without rows; or out.

    Raises:
        ValueError: For wrong shapes or devices.
        TypeError: For wrong dtypes.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> from epmoe.gemm.wgrad_fp8 import grouped_wgrad_fp8, transpose_fp8
        >>> offsets = torch.tensor([0, 3], dtype=torch.int32)
        >>> dy, x = torch.ones(3, 16), torch.full((3, 32), 2.0)
        >>> a, b = (transpose_fp8(*epmoe.quantize_fp8(t, pow2=True), offsets) for t in (dy, x))
        >>> grad = grouped_wgrad_fp8(*a, *b, offsets)
        >>> grad.shape, grad[0, 0, 0].item()
        (torch.Size([1, 16, 32]), 6.0)
    """
    bytes_a, bytes_b = _bytes_of(a, "a"), _bytes_of(b, "b")
    of_16_bits = torch.bfloat16, torch.float16
    if out is not None and out.dtype not in (torch.float32, *of_16_bits):
        raise TypeError(f"out: wanted float32, bfloat16 or float16, got {out.dtype}")
    if out is None and out_dtype not in of_16_bits:
        raise TypeError(f"out_dtype: wanted bfloat16 or float16, got {out_dtype}")
    if out is None:
        out = torch.empty(len(offsets) - 1, len(a), len(b), dtype=out_dtype, device=a.device)
    if a.device.type == "cuda" and _C.HAS_CUDA and capabilities(a.device).has_hopper:
        mark_written((out,))
        _C.wgrad_fp8(bytes_a, bytes_b, a_scale, b_scale, offsets, tile_counter(a), out, alpha)
    else:
        _wgrad_by_torch(a, a_scale, b, b_scale, offsets, out, alpha)
    return out
