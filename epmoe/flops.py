"""What torch.utils.flop_counter.FlopCounterMode counts for epmoe's operators.

As for torch's products, a product of M rows with weights [N, K] counts 2 * M * N * K, and additions,
activations and quantisations count nothing.  M is the number of rows that the offsets of the experts name:
not the rows that only a capacity makes room for, and no dropped choices.  Padding rows that the caller's
offsets include are multiplied, and count.  The host reads the offsets for it.  Where it cannot (a tracer's
tensors, the device "meta", a captured CUDA graph) all rows of the tensor count.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .a2a.ops import expert_offsets
from .a2a.ops import layer_of

_MODULE = "torch.utils.flop_counter"


def _num_rows(offsets: Tensor, rows: Tensor) -> int:
    """Return how many of these rows belong to an expert."""
    most = rows.shape[0]
    cannot_read = (type(offsets) is not torch.Tensor or offsets.device.type == "meta"
                   or offsets.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    if cannot_read:
        return most
    ends = offsets.tolist()
    return min(max(ends[-1] - ends[0], 0), most)


def _product(offsets: Tensor, rows: Tensor, *weights: Tensor) -> int:
    """Return the operations of a product of rows with each of some weights [L, N, K]."""
    return 2 * _num_rows(offsets, rows) * sum(
        math.prod(w.shape[1:]) * (2 if w.dtype == torch.uint8 else 1)  # a byte has two weights of 4 bits
        for w in weights)


def _product_of_layer(layer: str, plan: Tensor, rows: Tensor, *weights: Tensor) -> int:
    return _product(expert_offsets(layer_of(layer), plan), rows, *weights)


# The arguments have the names of the operators' schemas.


def _grouped_gemm(a: Tensor, b: Tensor, offsets: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    kind_is_wgrad = b.dim() == 2
    return _product(offsets, a, out_val if kind_is_wgrad else b)


def _counted_products(rows: Tensor, offsets: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    return _product(offsets, rows, *weights)


def _grouped_wgrad_add(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, *_: Any, **__: Any) -> int:
    return _product(offsets, a, out)


def _wgrad_fp8(a: Tensor, b: Any, offsets: Tensor, a_scale: Any, b_scale: Any, out: Tensor, *_: Any,
               **__: Any) -> int:
    return _product(offsets, a, out)


def _dispatch_gemm(x: Any, x_scale: Any, weight: Any, plan: Tensor, gemm_weight: Tensor, gemm_scale: Any,
                   bias: Any, layer: str, *_: Any, out_val: list[Tensor], **__: Any) -> int:
    return _product_of_layer(layer, plan, out_val[0], gemm_weight)


def _gemm_combine(a: Tensor, a_scale: Any, gemm_weight: Tensor, gemm_scale: Any, bias: Any, row_weight: Any,
                  plan: Tensor, recv: Any, layer: str, *_: Any, **__: Any) -> int:
    return _product_of_layer(layer, plan, a, gemm_weight)


def _experts(x: Any, weight: Any, plan: Tensor, gate_up: Tensor, gate_up_bias: Any, down: Tensor,
             down_bias: Any, layer: str, *_: Any, out_val: list[Tensor], **__: Any) -> int:
    return _product_of_layer(layer, plan, out_val[1], gate_up, down)


def _experts_backward_down(dy: Any, plan: Tensor, down: Tensor, down_bias: Any, h: Tensor, row_weight: Any,
                           layer: str, *_: Any, **__: Any) -> int:
    return _product_of_layer(layer, plan, h, down)


def _experts_backward_up(d_h: Tensor, gate_up: Tensor, d_row_weight: Any, plan: Tensor, recv: Any,
                         layer: str, *_: Any, **__: Any) -> int:
    return _product_of_layer(layer, plan, d_h, gate_up)


def _experts_fp8(rows: Tensor, gate_up: Tensor, down: Tensor, offsets: Tensor, *_: Any, **__: Any) -> int:
    return _product(offsets, rows, gate_up, down)


def _experts_fp8_backward(dy: Tensor, offsets: Tensor, row_weight: Any, rows: Any, row_scale: Any, h: Any,
                          up_t: Tensor, up_t_scale: Any, down_t: Tensor, down_t_scale: Any, activation: Any,
                          wgrad_in_16_bits: Any, transposed: Any, of_gate_up: bool, of_down: bool,
                          **_: Any) -> int:
    return _product(offsets, dy, up_t, down_t, *[up_t] * of_gate_up, *[down_t] * of_down)


_FORMULAS: list[Callable[..., int]] = [
    _grouped_gemm, _counted_products, _grouped_wgrad_add, _wgrad_fp8, _dispatch_gemm, _gemm_combine, _experts,
    _experts_backward_down, _experts_backward_up]


def add_fp8_rows() -> None:
    """Register the formulas of moe/fp8_rows.py, whose operators exist when it has been imported."""
    _FORMULAS.extend(new := (_experts_fp8, _experts_fp8_backward))
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE], new)


def _register(flop_counter: ModuleType, formulas: Iterable[Callable[..., int]] = _FORMULAS) -> None:
    for formula in formulas:
        operator = getattr(torch.ops.epmoe, formula.__name__[1:])
        flop_counter.register_flop_formula(operator, get_raw=True)(formula)


class _WhenImported:
    """A finder of modules that finds torch.utils.flop_counter, and registers the formulas after its import.

    An import by epmoe itself would import Triton, where it is installed: half a second.  A FlopCounterMode
    takes the formulas that are registered when it is created, so the first call of an operator is too late.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _MODULE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)

        loader.exec_module = exec_module
        return spec


def install() -> None:
    """Register the formulas now, or when torch.utils.flop_counter is imported."""
    if _MODULE in sys.modules:
        _register(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported())
