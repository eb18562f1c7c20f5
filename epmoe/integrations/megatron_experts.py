"""Megatron-core's experts on epmoe's products, also in FP8: gradients of weights later, and into main_grad.

megatron.py makes it known to Megatron-core: use(experts=True).
"""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.transformer.moe import experts as _megatron

from ..gemm.activations import as_kernel
from ..gemm.grouped import DGRAD
from ..gemm.weight_gradients import WeightGradients
from ..moe.fp8_rows import experts_fp8
from ..moe.fp8_training import E4M3, QuantizedWeight, check_compute_dtype
from ..moe.weights import WeightFormat

__all__ = ["EpmoeGroupedMLP"]

if not hasattr(_megatron, "GroupedMLP"):
    raise ImportError("epmoe's experts extend Megatron-core's GroupedMLP, which versions after 0.16 do not "
                      "have: install megatron-core 0.16, or use epmoe's dispatcher alone: use() without "
                      "experts=True")


# The names of Megatron's activations in epmoe, by gated_linear_unit.
_ACTIVATIONS = {True: {F.silu: "swiglu"}, False: {F.gelu: "gelu", F.silu: "silu", squared_relu: "relu2"}}


def _check_fp8(config):
    """Return (activation, wgrad_dtype) of experts_fp8, or raise ValueError for what it does not have."""
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    if (config.fp8, recipe) != ("e4m3", "blockwise"):
        raise ValueError(f"fp8={config.fp8!r} with fp8_recipe={recipe!r}: EpmoeGroupedMLP has E4M3 with "
                         f"scales of 1x128 and 128x128 only: set fp8='e4m3' and fp8_recipe='blockwise' "
                         f"(--fp8-format e4m3 --fp8-recipe blockwise), or leave fp8 out")
    if config.first_last_layers_bf16:
        raise ValueError("first_last_layers_bf16: EpmoeGroupedMLP does not know which layer it is in, and "
                         "would compute in FP8 in all: leave first_last_layers_bf16 out")
    if config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules:
        raise ValueError("moe_act in recompute_modules: in FP8 EpmoeGroupedMLP keeps no activation for the "
                         "backward: leave moe_act out")
    names = _ACTIVATIONS[config.gated_linear_unit]
    if config.activation_func not in names:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        raise ValueError(f"activation_func {name} with gated_linear_unit={config.gated_linear_unit} and fp8: "
                         f"must be {' or '.join(f.__name__ for f in names)}, or leave fp8 out")
    wgrad_dtype = None if config.fp8_wgrad else config.params_dtype
    try:
        check_compute_dtype(E4M3, WeightFormat(config.params_dtype, config.params_dtype), config.hidden_size,
                            config.moe_ffn_hidden_size, True, wgrad_dtype)
    except TypeError as error:
        raise ValueError(f"params_dtype {config.params_dtype} with fp8: set bf16=True and params_dtype="
                         f"torch.bfloat16 (--bf16)") from error
    return names[config.activation_func], wgrad_dtype


class EpmoeGroupedMLP(_megatron.GroupedMLP):
    """Megatron-core's GroupedMLP, whose products are epmoe's.

    Parameters, their names, initialisation and checkpoints are those of GroupedMLP: weight1 [H, L * 2I] and
    weight2 [L * I, H], which epmoe reads as they are.  It needs neither grouped_gemm nor Transformer Engine,
    takes any dtype, and rows on the CPU too.

    With gradient_accumulation_fusion in the configuration, the gradients of the weights are added to
    main_grad.  With delay_wgrad_compute, backward_dw computes them, which Megatron-core's schedule calls.

    With fp8="e4m3" and fp8_recipe="blockwise" the products are in FP8, forward and backward, by the recipe of
    EPMoE(compute_dtype=torch.float8_e4m3fn).  fp8_wgrad=False keeps the gradients of the weights in 16 bits.
    The parameters stay in 16 bits.  They are quantised in the first micro-batch of a step, and when torch
    knows of a change.

    Args:
        num_local_experts: L.
        config: The TransformerConfig, without bias.
        pg_collection: The process groups.

    Raises:
        ValueError, AssertionError: As GroupedMLP, for a configuration that it does not have; ValueError also
            for fp4, for other values of fp8 and fp8_recipe, and for what does not go together with them.

    Examples:
        See docs/megatron.md.

        >>> EpmoeGroupedMLP.__mro__[1].__name__
        'GroupedMLP'
    """

    def __init__(self, num_local_experts, config, pg_collection=None):
        if config.fp4:
            raise ValueError("EpmoeGroupedMLP has no products in FP4: leave fp4 out, or set fp8='e4m3' and "
                             "fp8_recipe='blockwise'")
        fp8 = _check_fp8(config) if config.fp8 else None
        check = _megatron.gg.assert_grouped_gemm_is_available
        _megatron.gg.assert_grouped_gemm_is_available = lambda: None  # that package is not used
        try:
            super().__init__(num_local_experts, config, pg_collection)
        finally:
            _megatron.gg.assert_grouped_gemm_is_available = check
        delays, fuses = config.delay_wgrad_compute, config.gradient_accumulation_fusion
        self._gradients = WeightGradients(delays, fuses) if delays or fuses else None
        self._fp8 = fp8
        if self._fp8:
            self._quantized = QuantizedWeight(), QuantizedWeight()
            # Megatron-core's name: its schedule sets it before the first micro-batch of a step.
            self.is_first_microbatch = True

    def _weight(self, p, *shape):
        """Return a parameter as [L, K, N]."""
        shape = self.num_local_experts, *shape
        if self._gradients is None or not (p.requires_grad and torch.is_grad_enabled()):
            return p.view(shape)
        return self._gradients.weight(p, 1.0, shape)

    def _act(self, h, probs):
        """Return the activated rows, and a function to call with what is made of them."""
        if not self.activation_recompute:
            return self.activation_func_with_probs(h, probs), lambda y: None
        # The default, False, counts as FP8 of Transformer Engine, too.
        self.activation_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
        act = self.activation_checkpoint.checkpoint(self.activation_func_with_probs, h, probs)
        return act, self.activation_checkpoint.discard_output_and_register_recompute

    def _in_fp8(self, rows, row_weight, offsets):
        """Return the experts' rows, with products in FP8."""
        if self.is_first_microbatch:
            for quantized in self._quantized:
                quantized.forget()
            self.is_first_microbatch = False
        parameters, hidden = (self.weight1, self.weight2), self.config.hidden_size
        shapes = (hidden, -1), (-1, hidden)
        weights = [self._weight(p, *shape) for p, shape in zip(parameters, shapes)]
        pairs = [q.of(p, False, w.shape) for q, p, w in zip(self._quantized, parameters, weights)]
        activation, wgrad_dtype = self._fp8
        return experts_fp8(rows, *weights, offsets, row_weight, activation, wgrad_dtype=wgrad_dtype,
                           transposed=True, quantized=pairs)

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        """Compute the experts of rows that are grouped by expert.

        Args:
            permuted_local_hidden_states: [M, H] of the parameters' dtype.
            tokens_per_expert: [L] integers, on the CPU or with the rows.
            permuted_probs: [M], applied after the activation.

        Returns:
            A tuple ([M, H], None).

        Raises:
            RuntimeError: For a main_grad that is missing or does not fit.
            TypeError: In FP8, for rows of another dtype than the parameters.

        Examples:
            See docs/megatron.md.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            rows, probs = (probs * rows).to(rows.dtype), torch.ones_like(probs)
        if self._gradients is not None and torch.is_grad_enabled():
            weights = {"weight1": self.weight1, "weight2": self.weight2}
            self._gradients.begin({n: p for n, p in weights.items() if p.requires_grad})
        offsets = F.pad(tokens_per_expert.cumsum(0), (1, 0)).to(rows.device, torch.int32, non_blocking=True)

        if self._fp8:
            probs = None if self.config.moe_apply_probs_on_input else permuted_probs
            return self._in_fp8(rows, probs, offsets), None

        def product(a, weight):
            return torch.ops.epmoe.grouped_gemm(a.contiguous(), weight, offsets, None, None, None, None,
                                                DGRAD, as_kernel(None), False, None)

        h = product(rows, self._weight(self.weight1, self.config.hidden_size, -1))
        act, discard = self._act(h, probs)
        y = product(act, self._weight(self.weight2, -1, self.config.hidden_size))
        discard(y)
        return y, None

    def backward_dw(self):
        """Compute the gradients of the weights of the oldest backward pass that waits, if they are delayed.

        Raises:
            RuntimeError: Where no backward pass waits.

        Examples:
            See docs/megatron.md.
        """
        has_gradient = self.weight1.requires_grad or self.weight2.requires_grad
        if self.config.delay_wgrad_compute and has_gradient:
            self._gradients.compute()
