"""EPMoE with weights of 4 bits, MXFP4 or INT4.  There are no gradients.

The parameters have the layout of the kernels (gemm/four_bit.py), state dicts that of checkpoints:

    parameter               dtype                     in state dicts
    gate_up_proj            uint8                     MXFP4: gate_up_proj_blocks, _scales
    gate_up_proj_scales     uint8, or the layer's     INT4: gate_up_proj_packed, _scale,
    gate_up_proj_zeros      uint8, or None            _zero_point with zero points

and in the same way down_proj.

With dispatch_dtype in FP8, tokens are quantised at their rank and travel as those of weights in FP8.  The
rows that arrive are dequantised to 16 bits, which the products take.  With compute_dtype in FP8, each call
expands the weights to FP8, and goes the way of training in FP8 (fp8_training.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.device import integer
from ..gemm import four_bit
from ..gemm.four_bit import Format, Int4, Mxfp4, Packed
from ..gemm.grouped import FP8_BLOCK
from ..gemm.quantize import expand_fp8
from .fp8 import E4M3
from .shards import as_bytes
from .weights import WEIGHTS, Encoded, Source, WeightDtype, WeightFormat

if TYPE_CHECKING:
    from .experts import Scales
    from .module import EPMoE

SCALES, ZEROS = "_scales", "_zeros"  # what the names of parameters have after that of a weight
_MXFP4 = "weight", "weight_blocks", "weight_scales", "scale", "weight_scale_inv"
_INT4 = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
         "qweight", "qzeros", "scales", "g_idx")
_SAVED_MXFP4 = "weight_blocks", "weight_scales"
_SAVED_INT4 = "weight_packed", "weight_scale", "weight_zero_point"


class FourBits(WeightFormat):
    """Weights in MXFP4 or INT4."""

    has_gradients = False
    is_saved_as_held = False

    def __init__(self, weight_dtype: WeightDtype, dtype: torch.dtype, hidden: int, inner: int,
                 dispatch_dtype: torch.dtype | None = None) -> None:
        assert not isinstance(weight_dtype, torch.dtype)
        format = four_bit.as_format(weight_dtype)
        super().__init__(format if isinstance(format, Int4) else format.name, dtype)
        self.format: Format = format
        self.title = format.name.upper()
        self.ends = ("", SCALES, ZEROS) if format.zero_points else ("", SCALES)
        self.endings = _MXFP4 if isinstance(format, Mxfp4) else _INT4
        self.saved = _SAVED_MXFP4 if isinstance(format, Mxfp4) else _SAVED_INT4[:len(self.ends)]
        if dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"dtype {dtype} with weights in {self.title}: must be torch.bfloat16 or "
                            f"torch.float16")
        self._dtypes = {"": torch.uint8, SCALES: four_bit.scale_dtype(format, dtype), ZEROS: torch.uint8}
        for name, size in (("hidden", integer("hidden", hidden)), ("inner", inner)):
            four_bit.check_columns(format, name, size)
        if dispatch_dtype not in (None, dtype, E4M3):
            raise TypeError(f"dispatch_dtype {dispatch_dtype}: must be {E4M3}, or None: dtype, {dtype}")
        self.sends_fp8 = dispatch_dtype == E4M3
        if self.sends_fp8 and hidden % FP8_BLOCK:
            raise ValueError(f"hidden {hidden} with dispatch_dtype {E4M3}: must be a multiple of "
                             f"{FP8_BLOCK}")

    def parameters(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {end: (shape, dtype)} of the parameters of weights [L, N, K]."""
        return {end: (size, self._dtypes[end]) for end, size in
                zip(("", SCALES, ZEROS), four_bit.shapes(self.format, *shape)) if size is not None}

    def _check_dtypes(self, moe: EPMoE) -> None:
        for name in WEIGHTS:
            for end in self.ends:
                if (got := getattr(moe, name + end).dtype) != self._dtypes[end]:
                    raise TypeError(f"{name}{end} is {got} now, but {self.title} needs {self._dtypes[end]}: "
                                    f"do not cast the module; load its state dict again")

    def scales(self, moe: EPMoE) -> Scales:
        """Return the scales and zeros of both weights, as the kernels read them."""
        up, down = WEIGHTS
        has_zeros = self.format.zero_points
        return (getattr(moe, up + SCALES), getattr(moe, up + ZEROS) if has_zeros else None,
                getattr(moe, down + SCALES), getattr(moe, down + ZEROS) if has_zeros else None)

    def _encoded(self, packed: Packed) -> Encoded:
        return {end: t for end, t in zip(("", SCALES, ZEROS), packed) if t is not None}

    def dequantized(self, moe: EPMoE, name: str) -> Tensor:
        """Return the weights of a name [L, N, K] in the layer's dtype, each rounded once."""
        return four_bit.dequantize(self.format, *self._packed(moe, name), self.dtype)

    def expanded(self, moe: EPMoE, rowwise: bool, name: str) -> tuple[Tensor, Tensor]:
        """Return the weights of a name [L, N, K] in FP8, and the scales of their blocks, for this call.

        rowwise: all blocks of an expert have one scale, for the largest weight that its scales allow.
        """
        packed = self._packed(moe, name)
        if not rowwise:
            return expand_fp8(*packed, self.dtype)
        to = four_bit.expert_scale(self.format, packed.scales)
        q, scales = expand_fp8(*packed, self.dtype, to)
        return q, to[:, None, None].expand_as(scales)

    def _packed(self, moe: EPMoE, name: str) -> Packed:
        return Packed(getattr(moe, name).detach(), getattr(moe, name + SCALES).detach(),
                      getattr(moe, name + ZEROS).detach() if self.format.zero_points else None)

    def encode(self, numbers: Tensor, name: str = "weights") -> Encoded:
        """Return numbers [.., N, K] of 16 or 32 bits as the parameters hold them."""
        return self._encoded(four_bit.quantize(self.format, numbers.detach(), self.dtype, name))

    def read(self, source: Source) -> Encoded:
        """Return what the parameters get from a state dict: {} after a report."""
        try:
            packed = self._read_mxfp4(source) if isinstance(self.format, Mxfp4) else self._read_int4(source)
        except (TypeError, ValueError) as error:
            source.errors.append(f"{error}.")
            return {}
        if packed is None:
            return {}
        *leading, n, half = packed.numbers.shape
        if (*leading, n, 2 * half) != source.shape:
            source.errors.append(f"{source.name}: wanted weights {list(source.shape)}, got "
                                 f"{[*leading, n, 2 * half]}.")
            return {}
        return self._encoded(packed)

    def _all(self, source: Source, *endings: str) -> list[Tensor] | None:
        """Return tensors on the module's device, or None after a report of those that are missing."""
        tensors = [t.detach() for t in map(source.get, endings) if t is not None]
        # as bytes, because torch does not copy all dtypes of 8 bits between all devices
        return ([as_bytes(t).to(source.device) for t in tensors] if len(tensors) == len(endings) else None)

    def _quantized(self, source: Source, others: tuple[str, ...]) -> Packed | None:
        """Return weights of 16 or 32 bits quantised.  others: what may not be given beside them."""
        found = self._all(source, "weight")
        if found is None:
            return None
        for ending in others:
            if source.has(ending):
                source.refuse(ending, f"is given, but the weights are {found[0].dtype}.")
                return None
        return four_bit.quantize(self.format, found[0], self.dtype, source.key("weight"))

    def _read_mxfp4(self, source: Source) -> Packed | None:
        if source.has("weight_blocks") and source.has("weight"):
            source.refuse("weight", f"is given, but {source.key('weight_blocks')} is, too.")
            return None
        if source.has("weight_blocks") or source.is_whole and not source.has("weight"):
            found = self._all(source, "weight_blocks", "weight_scales")  # of gpt-oss
        elif (t := source.get("weight")) is None:
            return None
        elif t.dtype not in four_bit.PACKED_DTYPES:
            return self._quantized(source, ("weight_scales", "scale", "weight_scale_inv"))
        else:  # of DeepSeek-V4, as it is, or as transformers loads it
            scale = "weight_scale_inv" if source.is_whole or source.has("weight_scale_inv") else "scale"
            found = self._all(source, "weight", scale)
        return None if found is None else four_bit.read_mxfp4(found[0], found[1], source.name)

    def _read_int4(self, source: Source) -> Packed | None:
        assert isinstance(self.format, Int4)
        *_, n, k = source.shape
        forms = [form for form in ("weight", "weight_packed", "qweight") if source.has(form)]
        if len(forms) > 1:
            source.refuse(forms[1], f"is given, but {source.key(forms[0])} is, too.")
            return None
        if forms == ["weight"]:
            return self._quantized(source, ("weight_scale", "weight_zero_point", "qzeros", "scales"))
        if forms == ["qweight"]:
            if (found := self._all(source, "qweight", "qzeros", "scales")) is None:
                return None
            shape = found[0].shape[-2:]
            qweight, qzeros, scales = found
            if shape == (k, n // 8):
                return four_bit.read_awq(self.format, qweight, qzeros, scales, self.dtype, source.name)
            if shape == (k // 8, n):
                order = self._all(source, "g_idx") if source.has("g_idx") else None
                return four_bit.read_gptq(self.format, qweight, qzeros, scales,
                                          None if order is None else order[0], self.dtype, source.name)
            raise ValueError(f"{source.key('qweight')}: wanted {[k // 8, n]}, as GPTQ has it, or "
                             f"{[k, n // 8]}, as AWQ has it, got {list(shape)}")
        if (found := self._all(source, "weight_packed", "weight_scale")) is None:
            return None
        packed, scale = found
        zeros = self._all(source, "weight_zero_point") if source.has("weight_zero_point") else None
        if source.has("weight_shape") and source.tensors[source.key("weight_shape")].tolist() != [n, k]:
            raise ValueError(f"{source.key('weight_shape')}: wanted {[n, k]}, got "
                             f"{source.tensors[source.key('weight_shape')].tolist()}")
        if source.has("weight_g_idx") and (order := self._all(source, "weight_g_idx")) is not None:
            if not (order[0] == -1).all():  # -1: no order
                four_bit.check_order(self.format, source.key("weight_g_idx"), order[0], k)
        return four_bit.read_compressed_tensors(self.format, packed, scale, zeros[0] if zeros else None,
                                                self.dtype, source.name)

    def write(self, weight: Encoded) -> dict[str, Tensor]:
        """Return {ending: tensor} of a state dict, of the parameters of experts [.., N, K]."""
        packed: tuple[Tensor | None, ...]
        if isinstance(self.format, Mxfp4):
            packed = four_bit.write_mxfp4(weight[""], weight[SCALES])
        else:
            packed = four_bit.write_compressed_tensors(weight[""], weight[SCALES], weight.get(ZEROS))
        return {ending: t for ending, t in zip(self.saved, packed) if t is not None}
