"""Weights of 4 bits: MXFP4 and INT4, as the kernels hold them, and as checkpoints hold them.

A weight is a code, 0 to 15, and groups of weights along k share a scale.

    MXFP4   code: E2M1, a sign and one of 0, .5, 1, 1.5, 2, 3, 4, 6; scale: a byte s of E8M0 for 32 weights;
            weight = E2M1 * 2^(s - 127)
    INT4    scale: a number of 16 bits for 32, 64 or 128 weights; weight = (code - zero) * scale, where zero
            is 8, or in a format with zero points 0 to 15, one for each scale

The kernels read weights [L, N, K] in this layout, with N and K multiples of 64:

    numbers   uint8 [L, N, K/2].  Of 64 rows, the bytes are in the order [K/64, 32, 4, 2, 8]: of 64 values
              of k and two rows, what lane c of four multiplies (the fragment of a tensor core), of one row
              and of the other.  These 8 bytes are two little-endian words.  Word i // 4 has the codes of k =
              8 * i + 2 * c + half (i 0..7, c 0..3, half 0..1).  INT4: the code is nibble i % 4 + 4 * half,
              and nibble n has bits 4n to 4n + 3.  MXFP4: see _scatter.
    scales    [L, N/64, K/256, 64 * 256/group], of each row 256/group, the bytes of MXFP4, or the layer's
              dtype for INT4.  K/256 is rounded up, and what is past K is 0.
    zeros     uint8, as scales, or None

Leading dimensions L may be any number of dimensions, also none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

UNIT = 64  # weights along k that the layout permutes
BLOCK = 256  # weights along k whose scales are next to each other
PACKED_DTYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)  # two codes of MXFP4 in each number
MAX_SCALE_BYTE = 128  # of MXFP4, that the kernels can read
# A magnitude above the n-th has a code above n.  Halfway between two numbers is the one with the even code:
# so each second boundary is the float32 just below.
_BOUNDARIES = (0.25, 0.75 * (1 - 2**-24), 1.25, 1.75 * (1 - 2**-24), 2.5, 3.5 * (1 - 2**-24), 5.0)
_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of a word of AWQ has the n-th column


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """The format MXFP4."""

    name = "mxfp4"
    group_size = 32
    zero_points = False


@dataclasses.dataclass(frozen=True)
class Int4:
    """The format of weights in INT4: a code of 4 bits, and a scale for each group of weights along k.

    A weight is (code - 8) * scale, or with zero points (code - zero) * scale.

    Args:
        group_size: The weights of a group: 32, 64 or 128.
        zero_points: Whether each group has a zero point of 0 to 15.

    Raises:
        ValueError: For another group_size.

    Examples:
        >>> import epmoe
        >>> epmoe.Int4(group_size=128)
        Int4(group_size=128, zero_points=False)
    """

    group_size: int = 32
    zero_points: bool = False
    name = "int4"

    def __post_init__(self) -> None:
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size {self.group_size}: must be 32, 64 or 128")


Format: TypeAlias = Mxfp4 | Int4


class Packed(NamedTuple):
    """Weights [.., N, K] in the layout of the kernels."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None


def as_format(weight_dtype: str | Format) -> Format:
    """Return the format of "mxfp4", "int4" or an Int4.  Raises ValueError or TypeError for another."""
    if isinstance(weight_dtype, (Mxfp4, Int4)):
        return weight_dtype
    if not isinstance(weight_dtype, str):
        raise TypeError(f"weight_dtype {weight_dtype!r}: of 4 bits are \"mxfp4\", \"int4\" and epmoe.Int4")
    for format in (Mxfp4, Int4):
        if weight_dtype == format.name:
            return format()
    raise ValueError(f"weight_dtype {weight_dtype!r}: must be \"mxfp4\", \"int4\" or an epmoe.Int4")


def scale_dtype(format: Format, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scales in the layout of the kernels, for a layer's dtype."""
    return torch.uint8 if isinstance(format, Mxfp4) else dtype


def check_columns(format: Format, name: str, k: int) -> None:
    """Raise ValueError where k rows, or columns, have no layout for the kernels.  name: for errors."""
    unit = max(UNIT, format.group_size)
    if k % unit:
        raise ValueError(f"{name} {k} with weights in {format.name} and groups of {format.group_size}: must "
                         f"be a multiple of {unit}")


def shapes(format: Format, num: int, n: int, k: int
           ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Return the shapes of numbers, scales and zeros (None without zero points) of weights [num, n, k]."""
    scales = num, n // UNIT, -(-k // BLOCK), UNIT * BLOCK // format.group_size
    return (num, n, k // 2), scales, scales if format.zero_points else None


def format_of(numbers: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Format:
    """Return the format of weights in the layout of the kernels, for rows of a dtype.

    Raises:
        TypeError: For dtypes that no format has.
        ValueError: For shapes that no format has.
    """
    for name, t, wanted in (("weights", numbers, (torch.uint8,)), ("b_zero", zeros, (torch.uint8,)),
                            ("b_scale", scales, (torch.uint8, dtype))):
        if t is not None and (not isinstance(t, Tensor) or t.dtype not in wanted):
            raise TypeError(f"{name}: wanted {' or '.join(map(str, wanted))}, got "
                            f"{t.dtype if isinstance(t, Tensor) else type(t).__name__}")
    num, n, k = numbers.shape[0], numbers.shape[1], 2 * numbers.shape[2]
    in_block = (8,) if scales.dtype == torch.uint8 else (8, 4, 2)
    rows = [num, n // UNIT, -(-k // BLOCK)]
    if n % UNIT or k % UNIT or list(scales.shape) not in [[*rows, UNIT * size] for size in in_block]:
        last = " or ".join(str(UNIT * size) for size in in_block)
        raise ValueError(f"b_scale: wanted {rows} and {last} for weights [{num}, {n}, {k}] "
                         f"with N and K multiples of {UNIT}, got {list(scales.shape)}")
    if zeros is not None and (scales.dtype == torch.uint8 or zeros.shape != scales.shape):
        raise ValueError(f"b_zero: wanted {list(scales.shape)}, as b_scale, and none for MXFP4, got "
                         f"{list(zeros.shape)}")
    if scales.dtype == torch.uint8:
        return Mxfp4()
    format = Int4(UNIT * BLOCK // scales.shape[3], zeros is not None)
    check_columns(format, "K", k)
    return format


# ---- the layout of the kernels ----


def _nibbles(packed: Tensor) -> Tensor:
    """Return the codes [.., 2 * B] of bytes [.., B], the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _bytes(codes: Tensor) -> Tensor:
    """Return the inverse of _nibbles."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def pack(format: Format, codes: Tensor, name: str = "weights") -> Tensor:
    """Return codes, uint8 [.., N, K], in the layout of the kernels, uint8 [.., N, K/2].

    name: What errors call the weights.

    Raises ValueError for a size that is not a multiple of 64.
    """
    for what, size in zip(("rows", "columns"), codes.shape[-2:]):
        if size % UNIT:
            raise ValueError(f"{name}: {size} {what} of weights in {format.name}: must be a multiple of "
                             f"{UNIT}")
    # rows: 64, pair, row of it; k: 64 values, i // 4, i % 4, c, half
    parts = codes.unflatten(-1, (-1, 2, 4, 4, 2)).unflatten(-6, (-1, UNIT // 2, 2))
    order = [0, 3, 1, 6, 2, 4, 7, 5]
    words = parts.permute(*_last(order, codes.dim())).flatten(-2)  # [.., half and i % 4]
    packed = _scatter(words) if isinstance(format, Mxfp4) else _bytes(words)
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack(format: Format, numbers: Tensor) -> Tensor:
    """Return the inverse of pack: codes, uint8 [.., N, K]."""
    n, k = numbers.shape[-2], 2 * numbers.shape[-1]
    words = numbers.reshape(*numbers.shape[:-2], n // UNIT, k // UNIT, UNIT // 2, 4, 2, 2, 4)
    codes = _gather(words) if isinstance(format, Mxfp4) else _nibbles(words)
    order = [0, 2, 4, 1, 5, 7, 3, 6]
    parts = codes.unflatten(-1, (2, 4)).permute(*_last(order, numbers.dim()))
    return parts.reshape(*numbers.shape[:-2], n, k)


def _last(order: list[int], num_dims: int) -> list[int]:
    """Return the order of all dimensions where the last two, in parts, have an order."""
    return [*range(num_dims - 2), *(num_dims - 2 + i for i in order)]


# In bf16, the sign of E2M1 is bit 15, and its other bits, as the last ones of the exponent and the first one
# of the mantissa, are bits 8 to 6.  A word of MXFP4 has four pairs of codes, so that a kernel gets a pair,
# each code at these bits of one half of a word, with few instructions: see csrc/protocol/four_bit.h.
# Words are int32 here: a shift to the right copies the sign, so that the copies are masked.
_PAIR = 0x81C081C0 - 2**32
_ROTATIONS = 0, 4, 10  # to the left, of a word: pairs 0 to 2
_BIAS = 126  # EP_MXFP4_BIAS


def _rotate_left(words: Tensor, by: int) -> Tensor:
    """Rotate words, int32."""
    return words << by | words >> (32 - by) & (1 << by) - 1 if by else words


def _shift_right(words: Tensor, by: int) -> Tensor:
    """Shift words, int32, as if they had no sign."""
    return words >> by & (1 << 32 - by) - 1


def _last_pair(word: Tensor) -> Tensor:
    return (word << 6 ^ _shift_right(word, 2)) & _PAIR


def _scatter(codes: Tensor) -> Tensor:
    """Return pairs of codes, uint8 [.., 8], halves first, as words of MXFP4, uint8 [.., 4]."""
    both = (codes[..., :4] | codes[..., 4:] << 4).int()
    pairs = (both & 0x8) << 12 | (both & 0x7) << 6 | (both & 0x80) << 24 | (both & 0x70) << 18
    word = torch.zeros_like(pairs[..., 0])
    for i, by in enumerate(_ROTATIONS):
        word |= _rotate_left(pairs[..., i], -by % 32)
    # What the bits that are left must add to the last pair.  Bits 0 and 10 of a half decide its bits 6 and 8.
    # Bits 25, 17, 9 and 1 of the word decide 31, 23, 15 and 7, each together with the one before.
    rest = pairs[..., 3] ^ _last_pair(word)
    chain = _shift_right(rest, 6) & 0x02020202
    word |= (rest >> 6 & 0x00010001) | (rest & 0x01000100) << 2
    word |= chain ^ chain >> 8 ^ chain >> 16 ^ chain >> 24
    return word[..., None].view(torch.uint8)


def _gather(numbers: Tensor) -> Tensor:
    """Return the inverse of _scatter."""
    word = numbers.contiguous().view(torch.int32)[..., 0]
    pairs = [*(_rotate_left(word, by) & _PAIR for by in _ROTATIONS), _last_pair(word)]
    return torch.stack([(pair >> by + 12 & 8 | pair >> by + 6 & 7).to(torch.uint8)
                        for by in (0, 16) for pair in pairs], -1)


def pack_scales(format: Format, scales: Tensor) -> Tensor:
    """Return scales or zeros [.., N, K/group] in the layout of the kernels."""
    in_block = BLOCK // format.group_size
    if isinstance(format, Mxfp4):
        scales = scales + _BIAS
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % in_block))
    parts = padded.unflatten(-1, (-1, in_block)).unflatten(-3, (-1, UNIT))  # 64 rows, row, block, in it
    return parts.transpose(-3, -2).flatten(-2).contiguous()


def unpack_scales(format: Format, numbers: Tensor, scales: Tensor) -> Tensor:
    """Return the inverse of pack_scales, for scales or zeros of numbers."""
    in_block = scales.shape[-1] // UNIT
    parts = scales.unflatten(-1, (UNIT, in_block)).transpose(-3, -2)
    groups = 2 * numbers.shape[-1] * in_block // BLOCK
    found = parts.flatten(-2).flatten(-3, -2)[..., :groups].contiguous()
    return found - _BIAS if isinstance(format, Mxfp4) else found


def dequantize(format: Format, numbers: Tensor, scales: Tensor, zeros: Tensor | None,
               dtype: torch.dtype) -> Tensor:
    """Return the weights [.., N, K] of the layout of the kernels, each rounded once to dtype."""
    groups = unpack(format, numbers).unflatten(-1, (-1, format.group_size))
    if isinstance(format, Mxfp4):
        values, factors = _e2m1(groups), _power_of_two(unpack_scales(format, numbers, scales))
    else:
        zero = 8 if zeros is None else unpack_scales(format, numbers, zeros)[..., None].float()
        values, factors = groups.float() - zero, unpack_scales(format, numbers, scales).float()
    return (values * factors[..., None]).flatten(-2).to(dtype)


def expert_scale(format: Format, scales: Tensor) -> Tensor:
    """Return a power of two for each expert, [L] float32: no weight of it is larger than 448 times that.

    scales: [L, ..].  The codes are not read: it is the power for the largest code that the format has.  NaN
    if a scale of INT4 is no finite number.
    """
    if isinstance(format, Mxfp4):  # 6 * 2^(byte - 253), and 6 / 448 is less than 2^-6
        most = scales.flatten(2).amax(2).amax(1)  # in two steps, because a GPU then has work for all its SMs
        return ((most.int() - 132).clamp_(min=1) << 23).view(torch.float32)
    least, most = scales.flatten(2).aminmax(dim=2)
    bound = (15 if format.zero_points else 8) * torch.maximum(least.abs(), most.abs()).amax(1).float()
    _, exponent = torch.frexp(bound.clamp(2.0**-100, 2.0**100) / 448)
    return torch.ldexp(torch.ones_like(bound), exponent) + (bound - bound)


def _e2m1(codes: Tensor) -> Tensor:
    """Return the numbers of codes in float32.  A CUDA graph may capture it, unlike a table."""
    magnitude = codes & 7
    exponent = magnitude >> 1  # 0: subnormal, else the number is (2 + mantissa) * 2^(exponent - 2)
    doubled = torch.where(exponent == 0, magnitude, (2 | magnitude & 1) << (exponent.clamp(min=1) - 1))
    return doubled.float() * torch.where(codes < 8, 0.5, -0.5)


def _power_of_two(scales: Tensor) -> Tensor:
    """Return 2^(s - 127) in float32, also the subnormal 2^-127."""
    bits = scales.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)


# ---- quantisation ----


def _check_weight(weight: Tensor, format: Format, name: str = "weight") -> None:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(weight).__name__}")
    if weight.is_nested or weight.layout is not torch.strided:
        raise ValueError(f"{name}: wanted a dense tensor, got one of layout "
                         f"{'nested' if weight.is_nested else weight.layout}")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name}: wanted float32, bfloat16 or float16, got {weight.dtype}")
    if weight.dim() < 2 or weight.shape[-1] % format.group_size:
        raise ValueError(f"{name}: wanted [.., N, K] with K a multiple of {format.group_size}, got "
                         f"{list(weight.shape)}")
    if torch.is_grad_enabled() and weight.requires_grad:
        raise RuntimeError("the quantisation has no gradient: call it under torch.no_grad(), or detach() the "
                           "tensor")


def _groups(weight: Tensor, format: Format, name: str) -> Tensor:
    """Return a matrix [N, K] as float32 [N, K/group, group]."""
    groups = weight.detach().float().unflatten(-1, (-1, format.group_size))
    if not groups.isfinite().all():
        raise ValueError(f"{name}: NaN or infinity cannot be quantised to {format.name}")
    return groups


def _mxfp4_of(weight: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Return the codes [N, K] and the scale bytes [N, K/32] of a matrix."""
    groups = _groups(weight, Mxfp4(), name)
    most = groups.abs().amax(-1)
    scales = (most.frexp().exponent - 1 - 2 + 127).clamp(min=0).masked_fill(most == 0, 0)
    inverse = (254 - scales << 23).view(torch.float32)  # never subnormal: no scale is above 252
    boundaries = torch.tensor(_BOUNDARIES, dtype=torch.float32, device=weight.device)
    magnitudes = (groups.abs() * inverse[..., None]).contiguous()
    magnitudes = torch.bucketize(magnitudes, boundaries, out_int32=True)
    return (magnitudes + 8 * groups.signbit()).to(torch.uint8).flatten(-2), scales.to(torch.uint8)


def _int4_of(weight: Tensor, format: Int4, dtype: torch.dtype,
             name: str = "weight") -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes [N, K], the scales and the zero points [N, K/group] of a matrix.  dtype: of scales."""
    groups = _groups(weight, format, name)
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    # Half of the span, because the whole one may be infinite.  To divide by a number, torch multiplies by its
    # inverse on a GPU.
    half = most / 2 - least / 2 if format.zero_points else torch.maximum(most, -least)
    scales = (half / torch.full_like(half, 7.5)).clamp(min=2**-23).to(dtype)
    if not scales.is_meta and not scales.isfinite().all():
        raise ValueError(f"{name}: a weight is NaN or too large for scales of {dtype}")
    wide = scales.float()
    zeros = (-least / wide).round().clamp(max=15) if format.zero_points else torch.full_like(wide, 8)
    codes = ((groups / wide[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.to(torch.uint8).flatten(-2), scales, zeros.to(torch.uint8)


def _by_matrix(of: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> list[Tensor]:
    """Return what `of` returns for all matrices of weight [.., N, K].

    One after the other, because the computation needs several copies, also of 32 bits a weight.
    """
    leading, size = weight.shape[:-2], weight.shape[-2:]
    matrices = weight.reshape(leading.numel(), *size)
    with torch.autocast(weight.device.type, enabled=False):  # which takes no mixture of dtypes
        parts = [of(m) for m in (matrices if len(matrices) else weight.new_zeros(1, *size))]
        return [torch.stack(t)[:len(matrices)].unflatten(0, leading) if leading else t[0]
                for t in zip(*parts)]


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights to MXFP4: 4 bits each, with a scale that is a power of two for each 32 along k.

    The scale is the largest power of two that is at most the largest magnitude of the 32 weights, divided by
    4, the largest power of two of E2M1.  A weight divided by its scale is rounded to the nearest number of
    E2M1, halfway to the one with an even code; magnitudes above 6 become 6.  32 zeros have the scale 2^-127.

    Checkpoints of gpt-oss hold such tensors, under the names gate_up_proj_blocks, gate_up_proj_scales and so
    on.

    Args:
        weight: [.., N, K] float32, bfloat16 or float16.  K is a multiple of 32.

    Returns:
        A tuple (blocks, scales): uint8 [.., N, K/32, 16], of which a byte has the codes of two weights, the
            first in its low 4 bits; uint8 [.., N, K/32], the exponents of the scales, plus 127.

    Raises:
        ValueError: For NaN or infinity, a tensor that is not dense, and another shape.
        TypeError: For what is not a tensor, and for another dtype.
        RuntimeError: When a gradient of weight is wanted.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> blocks, scales = epmoe.quantize_mxfp4(torch.full((1, 32), 7.0))
        >>> blocks.shape, hex(blocks[0, 0, 0]), scales.tolist()
        (torch.Size([1, 1, 16]), '0x77', [[127]])

    References:
        OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0) and 6.3
            (conversion to MX).
    """
    _check_weight(weight, Mxfp4())
    codes, scales = _by_matrix(_mxfp4_of, weight)
    return _bytes(codes).unflatten(-1, (-1, 16)), scales


def quantize_int4(weight: Tensor, group_size: int = 32, zero_points: bool = False) -> tuple[Tensor, ...]:
    """Quantise weights to INT4: 4 bits each, with a scale for each group along k.

    Without zero points the scale is the largest magnitude of the group / 7.5, and a weight becomes
    (code - 8) * scale.  With zero points the scale is the distance of the smallest from the largest / 15,
    where a group is widened to contain 0, and a weight becomes (code - zero) * scale.  Both round to the
    nearest code, halfway to even.  A scale is at least 2^-23.

    The layout is that of compressed-tensors (format pack-quantized), which calls the three weight_packed,
    weight_scale and weight_zero_point.

    Args:
        weight: [.., N, K] float32, bfloat16 or float16.  K is a multiple of group_size, and with zero points
            N one of 8.
        group_size: The weights that share a scale: 32, 64 or 128.
        zero_points: Whether each group has a zero point.

    Returns:
        A tuple (packed, scales), or (packed, scales, zeros) with zero points: int32 [.., N, K/8], of which a
            word has the codes of 8 weights along k, the first in its lowest 4 bits; [.., N, K/group_size] of
            weight's dtype, or bfloat16 for float32; int32 [.., N/8, K/group_size], of which a word has the
            zero points of 8 rows.

    Raises:
        ValueError: For NaN or infinity, a tensor that is not dense, and another shape or group_size.
        TypeError: For what is not a tensor, and for another dtype.
        RuntimeError: When a gradient of weight is wanted.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> packed, scales = epmoe.quantize_int4(torch.full((1, 32), -15.0))
        >>> packed.tolist(), scales.tolist()
        ([[0, 0, 0, 0]], [[2.0]])

    References:
        compressed-tensors, PackedQuantizationCompressor and calculate_qparams.
    """
    format = Int4(group_size, zero_points)
    _check_weight(weight, format)
    if zero_points and weight.shape[-2] % 8:
        raise ValueError(f"weights of {weight.shape[-2]} rows: with zero points wanted a multiple of 8")
    dtype = torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype
    codes, scales, zeros = _by_matrix(lambda matrix: _int4_of(matrix, format, dtype), weight)
    packed = _words(codes)
    return (packed, scales, _words(zeros.mT).mT.contiguous()) if zero_points else (packed, scales)


def quantize(format: Format, weight: Tensor, dtype: torch.dtype, name: str = "weights") -> Packed:
    """Return weights [.., N, K] of 16 or 32 bits in the layout of the kernels, for a layer's dtype.

    name: What errors call the weights.
    """
    _check_weight(weight, format, name)
    if isinstance(format, Mxfp4):
        codes, scales = _by_matrix(lambda matrix: _mxfp4_of(matrix, name), weight)
        _check_scale_bytes(name, scales)
        return _packed(format, codes, None, scales, None, name)
    codes, scales, zeros = _by_matrix(lambda matrix: _int4_of(matrix, format, dtype, name), weight)
    return _packed(format, codes, None, scales, zeros, name)


# ---- checkpoints ----


def _packed(format: Format, stored: Tensor, codes_of: Callable[[Tensor], Tensor] | None, scales: Tensor,
            zeros: Tensor | None, name: str) -> Packed:
    """Return the layout of the kernels.

    Args:
        format: The format.
        stored: Weights as a checkpoint has them, a matrix in the last two dimensions.
        codes_of: Returns the codes [N, K] of a stored matrix.  None: they are the codes.
        scales: [.., N, K/group].
        zeros: None, or [.., N, K/group].
        name: What errors call the weights.
    """
    def numbers_of(matrix: Tensor) -> tuple[Tensor]:
        return (pack(format, matrix if codes_of is None else codes_of(matrix), name),)

    return Packed(_by_matrix(numbers_of, stored)[0], pack_scales(format, scales),
                  pack_scales(format, zeros) if zeros is not None and format.zero_points else None)


def _stored(format: Format, numbers: Tensor, of_codes: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what of_codes makes of the codes [N, K] of each matrix in the layout of the kernels."""
    return _by_matrix(lambda matrix: (of_codes(unpack(format, matrix)),), numbers)[0]


def _words(codes: Tensor) -> Tensor:
    """Return int32 [.., B/8] of codes [.., B], the first in the lowest 4 bits of a word."""
    packed = _bytes(codes).contiguous()
    if not packed.numel():  # torch views no bytes of a tensor without numbers, whatever its strides are
        return packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 4, dtype=torch.int32)
    return packed.view(torch.int32)


def _codes_of_words(words: Tensor) -> Tensor:
    """Return the inverse of _words."""
    return _nibbles(words.contiguous().view(torch.uint8))


def _check(name: str, t: Tensor, dtypes: tuple[torch.dtype, ...],
           shape: tuple[int, ...] | None = None) -> None:
    """Raise TypeError or ValueError for a tensor of a checkpoint with another dtype or shape."""
    if t.dtype not in dtypes:
        raise TypeError(f"{name}: wanted {' or '.join(map(str, dtypes))}, got {t.dtype}")
    if shape is not None and t.shape != shape:
        raise ValueError(f"{name}: wanted shape {list(shape)}, got {list(t.shape)}")


def _check_scale_bytes(name: str, scales: Tensor) -> None:
    """Raise ValueError for scales of MXFP4 that the kernels cannot read."""
    most = int(scales.max()) if scales.numel() and not scales.is_meta else 0
    if most == 255:
        raise ValueError(f"{name}: a scale is NaN (the byte 255)")
    if most > MAX_SCALE_BYTE:
        raise ValueError(f"{name}: a scale is 2^{most - 127} (the byte {most}): must be at most "
                         f"2^{MAX_SCALE_BYTE - 127}; weights of magnitude 16 or more have larger ones")


def _as_scales(name: str, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales of INT4, rounded to a layer's dtype."""
    _check(name, scales, (torch.float16, torch.bfloat16, torch.float32))
    scales = scales.to(dtype)
    if not scales.is_meta and not scales.isfinite().all():
        raise ValueError(f"{name}: a scale is NaN or too large for {dtype}")
    return scales


def _as_zeros(name: str, format: Int4, zeros: Tensor, scale: Tensor) -> Tensor | None:
    """Return zero points, or None where the format has none, because all are 8, except where a scale is 0."""
    if format.zero_points:
        return zeros
    if not zeros.is_meta and not ((zeros == 8) | (scale == 0)).all():
        raise ValueError(f"{name}: a zero point is not 8: use weight_dtype=epmoe.Int4({format.group_size}, "
                         f"zero_points=True)")
    return None


def read_mxfp4(blocks: Tensor, scales: Tensor, name: str = "weights") -> Packed:
    """Return the layout of the kernels for weights in MXFP4, of gpt-oss or DeepSeek-V4.

    Args:
        blocks: Of gpt-oss uint8 [.., N, K/32, 16], of DeepSeek-V4 [.., N, K/2] of int8, uint8 or
            float4_e2m1fn_x2.  The low 4 bits of a byte are the first of two weights.
        scales: [.., N, K/32] of uint8 or float8_e8m0fnu.
        name: What errors call the weights.

    Raises:
        ValueError: For a shape that does not fit, a K that is no multiple of 64, and scales above 2 or NaN.
        TypeError: For another dtype.
    """
    _check(f"{name}: numbers", blocks, PACKED_DTYPES)
    _check(f"{name}: scales", scales, (torch.uint8, torch.float8_e8m0fnu))
    numbers, scales = blocks.view(torch.uint8), scales.view(torch.uint8)
    if numbers.dim() == scales.dim() + 1:
        numbers = numbers.flatten(-2)
    *rows, bytes_of_row = numbers.shape
    check_columns(Mxfp4(), f"{name}: the size", 2 * bytes_of_row)
    _check(f"{name}: scales", scales, (torch.uint8,), (*rows, bytes_of_row // 16))
    _check_scale_bytes(name, scales)
    return _packed(Mxfp4(), numbers, _nibbles, scales, None, name)


def write_mxfp4(numbers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return (blocks, scales) as gpt-oss holds them: the inverse of read_mxfp4."""
    blocks = _stored(Mxfp4(), numbers, _bytes).unflatten(-1, (-1, 16))
    return blocks, unpack_scales(Mxfp4(), numbers, scales)


def read_compressed_tensors(format: Int4, packed: Tensor, scale: Tensor, zero_point: Tensor | None,
                            dtype: torch.dtype, name: str = "weights") -> Packed:
    """Return the layout of the kernels for weights of compressed-tensors' format pack-quantized.

    Args:
        format: The format.
        packed: weight_packed, int32 [.., N, K/8].
        scale: weight_scale [.., N, K/group], floating point.
        zero_point: None, which means 8, or weight_zero_point, int32 [.., N/8, K/group].
        dtype: The layer's, to which scales are rounded.
        name: What errors call the weights.

    Raises:
        ValueError: For a shape that does not fit, a scale that is not finite in dtype, and zero points other
            than 8 for a format without.
        TypeError: For another dtype.
    """
    _check(f"{name}: packed weights", packed, (torch.int32,))
    *leading, n, words = packed.shape
    check_columns(format, f"{name}: the size", 8 * words)
    groups = 8 * words // format.group_size
    scale = _as_scales(f"{name}: scales", scale, dtype)
    _check(f"{name}: scales", scale, (dtype,), (*leading, n, groups))
    if zero_point is None:
        zeros = torch.full(scale.shape, 8, dtype=torch.uint8, device=scale.device)
    else:
        _check(f"{name}: zero points", zero_point, (torch.int32,), (*leading, -(-n // 8), groups))
        zeros = _codes_of_words(zero_point.mT)[..., :n].mT
    return _packed(format, packed, _codes_of_words, scale, _as_zeros(name, format, zeros, scale), name)


def write_compressed_tensors(numbers: Tensor, scales: Tensor,
                             zeros: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (packed, scale, zero_point or None) of compressed-tensors: the inverse of the reader."""
    zero_point = None if zeros is None else _words(unpack_scales(Int4(), numbers, zeros).mT).mT.contiguous()
    return _stored(Int4(), numbers, _words), unpack_scales(Int4(), numbers, scales), zero_point


def read_gptq(format: Int4, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None,
              dtype: torch.dtype, name: str = "weights") -> Packed:
    """Return the layout of the kernels for weights of a GPTQ checkpoint.

    GPTQ stores a zero point - 1.  Without zero points all are 8, and are stored as 7, or as 8 by the variant
    gptq_v2; the reader takes both.

    Args:
        format: The format.
        qweight: int32 [.., K/8, N], a word of 8 codes along k.
        qzeros: int32 [.., K/group, N/8], a word of 8 zero points along n.
        scales: [.., K/group, N], floating point.
        g_idx: None, or [.., K], the group of each k.
        dtype: The layer's, to which scales are rounded.
        name: What errors call the weights.

    Raises:
        ValueError: For a shape that does not fit, a scale that is not finite in dtype, zero points other than
            8 for a format without, a stored zero point of 15, which readers of GPTQ take for 16 or for 0, and
            groups that are not k // group (act-order).
        TypeError: For another dtype.
    """
    _check(f"{name}.qweight", qweight, (torch.int32,))
    *leading, words, n = qweight.shape
    k = 8 * words
    scales, stored = _columns_of(format, leading, n, k, qzeros, scales, dtype, name)
    stored = stored[..., :n]
    if g_idx is not None:
        check_order(format, f"{name}.g_idx", g_idx, k)
    if format.zero_points:
        if not stored.is_meta and (stored == 15).any():
            raise ValueError(f"{name}.qzeros: a stored zero point is 15, which is 16 or 0, depending on who "
                             f"reads it")
        stored = stored + 1
    elif not stored.is_meta and ((stored == 7) | (scales == 0)).all():
        stored = stored + 1
    return _packed(format, qweight.mT, _codes_of_words, scales.mT,
                   _as_zeros(f"{name}.qzeros", format, stored.mT, scales.mT), name)


def check_order(format: Int4, name: str, g_idx: Tensor, k: int) -> None:
    """Raise ValueError where the groups of the columns, [.., K], are not k // group."""
    _check(name, g_idx, (torch.int32, torch.int64), (*g_idx.shape[:-1], k))
    groups = torch.arange(k, device=g_idx.device) // format.group_size
    if not g_idx.is_meta and not (g_idx == groups).all():
        raise ValueError(f"{name}: weights are not in the order of their groups of {format.group_size} "
                         f"(act-order): quantise with desc_act=False")


def read_awq(format: Int4, qweight: Tensor, qzeros: Tensor, scales: Tensor, dtype: torch.dtype,
             name: str = "weights") -> Packed:
    """Return the layout of the kernels for weights of an AWQ checkpoint (GEMM).

    Args:
        format: The format.
        qweight: int32 [.., K, N/8].  The nibbles of a word, from the lowest, are the columns 0, 2, 4, 6, 1,
            3, 5, 7 of 8.
        qzeros: int32 [.., K/group, N/8], in the same order.
        scales: [.., K/group, N], floating point.
        dtype: The layer's, to which scales are rounded.
        name: What errors call the weights.

    Raises:
        ValueError: For a shape that does not fit, a scale that is not finite in dtype, and zero points other
            than 8 for a format without.
        TypeError: For another dtype.
    """
    _check(f"{name}.qweight", qweight, (torch.int32,))
    *leading, k, words = qweight.shape
    scales, zeros = _columns_of(format, leading, 8 * words, k, qzeros, scales, dtype, name)
    return _packed(format, qweight, lambda words: _in_order(_codes_of_words(words)).mT, scales.mT,
                   _as_zeros(f"{name}.qzeros", format, _in_order(zeros).mT, scales.mT), name)


def _columns_of(format: Int4, leading: list[int], n: int, k: int, qzeros: Tensor, scales: Tensor,
                dtype: torch.dtype, name: str) -> tuple[Tensor, Tensor]:
    """Return the scales and stored zero points [.., K/group, N] of GPTQ and AWQ."""
    check_columns(format, f"{name}: the size", k)
    groups = k // format.group_size
    scales = _as_scales(f"{name}.scales", scales, dtype)
    _check(f"{name}.scales", scales, (dtype,), (*leading, groups, n))
    _check(f"{name}.qzeros", qzeros, (torch.int32,), (*leading, groups, -(-n // 8)))
    return scales, _codes_of_words(qzeros)


def _in_order(codes: Tensor) -> Tensor:
    """Return codes [.., N] of AWQ in the order of their columns."""
    return codes.unflatten(-1, (-1, 8))[..., list(_AWQ_COLUMNS)].flatten(-2)
