"""Quantized rows for test_integrations_vllm.py: configurations, and vLLM's kernels in plain torch."""

import sys
import types

import torch

import vllm_modules

FP8 = torch.float8_e4m3fn
STATIC = torch.tensor([0.03])  # a scale for all rows, not the best one
POISON = torch.tensor([float("nan")])
# Arguments of FusedMoEQuantConfig.make.
QUANTS = {"block": dict(quant_dtype=FP8, block_shape=[16, 16]),
          "transposed": dict(quant_dtype=FP8, block_shape=[16, 16], is_scale_transposed=True),
          "token": dict(quant_dtype=FP8, per_act_token_quant=True),
          "static": dict(quant_dtype=FP8, a1_scale=STATIC),
          "tensor": dict(quant_dtype=FP8),  # one scale for the rows of a rank
          "int8": dict(quant_dtype=torch.int8, per_act_token_quant=True),
          "nvfp4": dict(quant_dtype="nvfp4", a1_scale=POISON, a1_gscale=torch.tensor([40.0]),
                        is_scale_swizzled=False),
          "mxfp8": dict(quant_dtype="mxfp8", block_shape=[1, 32], is_scale_swizzled=False)}


# ---- the kernels: [M, H] to quantized rows, and scales so that rows * scales are the numbers ----


def _quantize(rows, dims, dtype, scale=None):
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    if scale is None:
        scale = rows.float().abs().amax(dims, keepdim=True).clamp(min=1e-6) / most
    q = rows.float() / scale
    return (q if dtype.is_floating_point else q.round()).clamp(-most, most).to(dtype), scale


def _fp8_of_groups(rows, size, column_major_scales=False):
    q, scales = _quantize(rows.unflatten(1, (-1, size)), 2, FP8)
    scales = scales[:, :, 0]
    return q.flatten(1), scales.t().contiguous().t() if column_major_scales else scales.contiguous()


def _fp8(rows, scale, use_per_token_if_dynamic):
    q, scale = _quantize(rows, 1 if use_per_token_if_dynamic else (0, 1), FP8, scale)
    return q, scale if use_per_token_if_dynamic else scale.flatten()


def _nvfp4(rows, scale, is_sf_swizzled_layout):
    assert not is_sf_swizzled_layout
    return _quantize(rows, None, torch.int8, 1 / scale)


def _mxfp8(rows, is_sf_swizzled_layout, alignment):
    assert not is_sf_swizzled_layout and alignment == 0
    return _fp8_of_groups(rows, 32)


def quantize(rows, name):
    """What vLLM makes of rows in this configuration."""
    config = QUANTS[name]
    if name == "nvfp4":
        return _nvfp4(rows, config["a1_gscale"], False)
    if name == "int8":
        return _quantize(rows, 1, torch.int8)
    if "block_shape" in config:
        return _fp8_of_groups(rows, config["block_shape"][1], config.get("is_scale_transposed", False))
    return _fp8(rows, config.get("a1_scale"), config.get("per_act_token_quant", False))


def numbers(q, scales):
    """The numbers, in float32."""
    if scales.dim() == 2 and scales.shape[1] > 1:
        scales = scales.repeat_interleave(q.shape[1] // scales.shape[1], 1)
    return q.float() * scales


# ---- in vLLM ----


def config_of(name):
    """The quant_config of experts: vLLM's FusedMoEQuantConfig, or what the adapter reads of it."""
    if vllm_modules.is_loaded("source"):
        return sys.modules[vllm_modules.OWN[3]].FusedMoEQuantConfig.make(**(QUANTS[name] if name else {}))
    return types.SimpleNamespace(**dict(
        quant_dtype=None, per_act_token_quant=False, block_shape=None, a1_scale=None, a1_gscale=None,
        is_scale_swizzled=True, is_scale_transposed=False, mx_alignment=0) | (QUANTS[name] if name else {}))


def prepare():
    """Give vLLM's moe_kernel_quantize_input its kernels, or replace it where it is a stand-in."""
    utils = sys.modules[vllm_modules.OWN[4]]
    if not vllm_modules.is_loaded("source"):
        utils.moe_kernel_quantize_input = _stand_in
        return
    utils.current_platform.fp8_dtype.return_value = FP8
    utils.current_platform.is_xpu.return_value = False
    utils.cdiv = lambda a, b: -(-a // b)
    utils.ops.scaled_fp8_quant = _fp8
    utils.ops.scaled_fp4_quant = _nvfp4
    utils.per_token_group_quant_fp8 = _fp8_of_groups
    utils.per_token_quant_int8 = lambda rows: _quantize(rows, 1, torch.int8)
    utils.mxfp8_e4m3_quantize = _mxfp8

    class GroupShape(tuple):  # of vLLM's quant_utils, which imports much
        PER_TENSOR, PER_TOKEN = (-1, -1), (1, -1)
        row, col = property(lambda self: self[0]), property(lambda self: self[1])

        def __new__(cls, row, col):
            return super().__new__(cls, (row, col))

    sys.modules[vllm_modules.OWN[3]].GroupShape = GroupShape


def _stand_in(A, A_scale, quant_dtype, per_act_token_quant, block_shape=None, is_scale_swizzled=True,
              is_scale_transposed=False, quantization_emulation=False, mx_alignment=0):
    """vLLM's function. The adapter must pass what the configuration says."""
    assert not quantization_emulation
    if quant_dtype == "nvfp4":
        return _nvfp4(A, A_scale, is_scale_swizzled)
    if quant_dtype == "mxfp8":
        assert A_scale is None and not per_act_token_quant and block_shape == [1, 32]
        return _mxfp8(A, is_scale_swizzled, mx_alignment)
    if quant_dtype == torch.int8:
        return _quantize(A, 1 if per_act_token_quant else (0, 1), torch.int8, A_scale)
    if block_shape is not None:
        return _fp8_of_groups(A, block_shape[1], is_scale_transposed)
    return _fp8(A, A_scale, per_act_token_quant)
