"""The gradient of weights (WGRAD) in FP8, and what FP8 training needs for it: transposed rows and weights.

Tensor cores of Hopper take operands of FP8 only with the contraction along memory.  WGRAD contracts over the
rows of an expert, so both operands are transposed: [C, P].  The rows of an expert take whole blocks of 128
numbers of a line, filled up with zeros.  Expert e begins at block offsets[e] // 128 + e, so P =
128 * (M // 128 + L) has room for all sizes of the experts.  There may be a block between two experts, which
nobody writes or reads.  A block has a scale for each column, [P / 128, C], or an expert has one for each 128
columns, [L, C / 128].  The product of the latter multiplies by scales only at its end, and so is faster.

The functions compute on detached tensors: they have no gradients.
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .. import _C
from ..comm.device import capabilities
from ..torch_modes import mark_written
from .grouped import FP8_BLOCK as BLOCK, aligned, rows_of_experts, tile_counter

FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}  # EpFp8Format
Scales: TypeAlias = Literal["column", "block", "expert"]
_SCALES: dict[Scales, int] = {"column": 0, "block": 1, "expert": 2}  # EpWgradScales


def num_transposed_blocks(num_rows: int, num_experts: int) -> int:
    """Return P / 128: the blocks of transposed rows, for any sizes of the experts."""
    return num_rows // BLOCK + num_experts


def blocks_of_experts(offsets: Tensor, num_rows: int) -> list[tuple[int, int, int, int]]:
    """Return (expert, first row, end, first block) of each expert, read by the host."""
    return [(e, begin, end, begin // BLOCK + e) for e, begin, end in rows_of_experts(offsets, num_rows)]


def _bytes_of(t: Tensor, dtypes: dict[torch.dtype, int], name: str) -> Tensor:
    if t.dtype not in dtypes:
        raise TypeError(f"{name}: wanted {' or '.join(map(str, dtypes))}, got {t.dtype}")
    return aligned(t.detach().contiguous()).view(torch.uint8)


def quantize_fp8_transposed(x: Tensor, offsets: Tensor, scales: Tensor | None = None,
                            dtype: torch.dtype = torch.float8_e4m3fn,
                            by_expert: bool = False) -> tuple[Tensor, Tensor]:
    """Transpose rows for grouped_wgrad_fp8, and quantise them if they are not of FP8 yet.

    Rows of 16 or 32 bits are quantised with a scale for each column of a block of 128 rows: the least power
    of two that is not less than the largest magnitude / the largest number of dtype.  Rows of e4m3 have
    scales for each 128 numbers of a row already.  The 128 rows of a block, or all rows of an expert, then get
    the largest scale among them: a number is multiplied by its old scale / the new one, which is exact if
    both are powers of two, as those of quantize_fp8(..., pow2=True) are, and if it does not become subnormal.
    Numbers of e4m3 span 2^15 without becoming subnormal.  The CPU and CUDA give the same bits.

    Args:
        x: [M, C] rows grouped by expert, float32, bfloat16, float16, or float8_e4m3fn with scales.  On a GPU,
            C is a multiple of 16.
        offsets: [L + 1] int32 on x's device: where each expert's rows begin.
        scales: For float8_e4m3fn [M, ceil(C / 128)] float32, of any strides, as quantize_fp8 returns them.
        dtype: torch.float8_e4m3fn, or torch.float8_e5m2 for x without scales.
        by_expert: The rows of an expert share a scale, for x with scales.

    Returns:
        A tuple (q, scales): [C, P] of dtype, where P = 128 * (M // 128 + L), and [P / 128, C] float32, with
            by_expert [L, ceil(C / 128)].  Rows that belong to no expert are not read.  Blocks that belong to
            no expert are undefined.

    Raises:
        ValueError: For wrong shapes or devices.
        TypeError: For wrong dtypes.

    Examples:
        >>> import torch
        >>> from epmoe.gemm.wgrad_fp8 import quantize_fp8_transposed
        >>> x, offsets = torch.full((3, 16), 14.0), torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> q, scales = quantize_fp8_transposed(x, offsets)
        >>> q.shape, q[0, 128:131].tolist(), scales[1, 0].item()  # expert 1 has two rows, in block 1
        (torch.Size([16, 256]), [448.0, 448.0, 0.0], 0.03125)
    """
    if dtype not in FORMATS:
        raise TypeError(f"dtype: wanted {' or '.join(map(str, FORMATS))}, got {dtype}")
    if x.dim() != 2 or offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"wanted rows [M, C] and offsets [L + 1], got {list(x.shape)} and "
                         f"{list(offsets.shape)}")
    num_blocks = num_transposed_blocks(len(x), len(offsets) - 1)
    q = torch.empty(x.shape[1], num_blocks * BLOCK, dtype=dtype, device=x.device)
    size = (len(offsets) - 1, -(-x.shape[1] // BLOCK)) if by_expert else (num_blocks, x.shape[1])
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    rows = aligned(x.detach().contiguous())
    if scales is not None:
        rows, scales = _bytes_of(rows, {torch.float8_e4m3fn: 0}, "rows with scales"), scales.detach()
    if x.device.type == "cpu":
        rows_of_experts(offsets, len(x))  # raises
    _C.transpose_fp8(rows, scales, aligned(offsets.contiguous()), q.view(torch.uint8), out, FORMATS[dtype],
                     by_expert)
    return q, out


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
                    alpha: float, by_expert: bool) -> None:
    """Multiply by torch, for any device.  The host reads the offsets.

    As in the kernel, the products of a block are added up first; their sum is multiplied by both scales and
    added in float32.  Scales that are powers of two may be applied in any order.
    """
    if by_expert:
        a_scale = a_scale.repeat_interleave(BLOCK, 1)[:, :len(a)]
        b_scale = b_scale.repeat_interleave(BLOCK, 1)[:, :len(b)]
    most = (a.shape[1] // BLOCK - out.shape[0] + 1) * BLOCK - 1  # the most rows for which lines are that long
    with torch.autocast(a.device.type, enabled=False):
        for e, begin, end, first in blocks_of_experts(offsets, most):
            total = torch.zeros(out.shape[1:], dtype=torch.float32, device=a.device)
            for block in range(first, first - (begin - end) // BLOCK):
                part = slice(block * BLOCK, (block + 1) * BLOCK)
                i = e if by_expert else block
                factor = a_scale[i, :, None] * b_scale[i]
                total += a[:, part].float() @ b[:, part].float().t() * factor
            if out.dtype != torch.float32:
                out[e] = total
            elif end > begin:
                out[e] += alpha * total


def grouped_wgrad_fp8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offsets: Tensor,
                      out_dtype: torch.dtype = torch.bfloat16, *, out: Tensor | None = None,
                      alpha: float = 1.0, scales: Scales = "column") -> Tensor:
    """Compute the gradient of weights from two operands of quantize_fp8_transposed.

    The products of a block of 128 rows are added up, and their sum, multiplied by the scales of both columns,
    is added in float32.  With scales of experts, the tensor cores of Hopper add up all rows of an expert.  On
    Hopper a kernel computes this; elsewhere torch does, one product for each block.

    Args:
        a: [N, P] float8_e4m3fn or float8_e5m2: the gradient of the product's output, transposed.
        a_scale: [P / 128, N] float32; for scales="expert" [L, ceil(N / 128)].
        b: [K, P] float8_e4m3fn: the product's input, transposed.
        b_scale: [P / 128, K] float32; for scales="expert" [L, ceil(K / 128)].
        offsets: [L + 1] int32: as for quantize_fp8_transposed.
        out_dtype: torch.bfloat16 or torch.float16, if there is no out.
        out: None, or [L, N, K] float32, contiguous and aligned to 16 bytes, as main_grad: alpha times the
            result is added to it.
        alpha: A factor of what is added to out.
        scales: "expert", if both operands were made by_expert; "block", if each 128 columns of b_scale are
            equal, as they are if b was made from rows of float8_e4m3fn; otherwise "column", which is slowest.

    Returns:
        [L, N, K] of out_dtype, zeros for an expert without rows; or out.

    Raises:
        ValueError: For wrong shapes or devices.
        TypeError: For wrong dtypes.

    Examples:
        >>> import torch
        >>> from epmoe.gemm.wgrad_fp8 import grouped_wgrad_fp8, quantize_fp8_transposed
        >>> offsets = torch.tensor([0, 3], dtype=torch.int32)
        >>> dy, x = torch.ones(3, 16), torch.full((3, 32), 2.0)
        >>> factors = *quantize_fp8_transposed(dy, offsets), *quantize_fp8_transposed(x, offsets)
        >>> grad = grouped_wgrad_fp8(*factors, offsets)
        >>> grad.shape, grad[0, 0, 0].item()
        (torch.Size([1, 16, 32]), 6.0)
    """
    bytes_a = _bytes_of(a, FORMATS, "a")
    bytes_b = _bytes_of(b, {torch.float8_e4m3fn: 0}, "b")
    if out is not None and out.dtype != torch.float32:
        raise TypeError(f"out: wanted float32, got {out.dtype}")
    if out is None and out_dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"out_dtype: wanted bfloat16 or float16, got {out_dtype}")
    if out is None:
        out = torch.empty(len(offsets) - 1, len(a), len(b), dtype=out_dtype, device=a.device)
    if a.device.type == "cuda" and _C.HAS_CUDA and capabilities(a.device).has_hopper:
        mark_written((out,))
        _C.wgrad_fp8(bytes_a, bytes_b, a_scale, b_scale, offsets, tile_counter(a), out, alpha,
                     FORMATS[a.dtype], _SCALES[scales])
    else:
        _wgrad_by_torch(a, a_scale, b, b_scale, offsets, out, alpha, scales == "expert")
    return out
