"""Megatron-core's experts on epmoe's grouped GEMM: gradients of weights later, and into main_grad.

megatron.py makes it known to Megatron-core: use(experts=True).
"""

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import experts as _megatron

from ..gemm.grouped import DGRAD
from ..gemm.weight_gradients import WeightGradients

__all__ = ["EpmoeGroupedMLP"]

if not hasattr(_megatron, "GroupedMLP"):
    raise ImportError("epmoe's experts extend Megatron-core's GroupedMLP, which versions after 0.16 do not "
                      "have: install megatron-core 0.16, or use epmoe's dispatcher alone: use() without "
                      "experts=True")


class EpmoeGroupedMLP(_megatron.GroupedMLP):
    """Megatron-core's GroupedMLP, whose products are epmoe's.

    Parameters, their names, initialisation and checkpoints are those of GroupedMLP: weight1 [H, L * 2I] and
    weight2 [L * I, H], which epmoe reads as they are.  It needs neither grouped_gemm nor Transformer Engine,
    takes any dtype, and rows on the CPU too.

    With gradient_accumulation_fusion in the configuration, the gradients of the weights are added to
    main_grad.  With delay_wgrad_compute, backward_dw computes them, which Megatron-core's schedule calls.

    Args:
        num_local_experts: L.
        config: The TransformerConfig, without bias.
        pg_collection: The process groups.

    Raises:
        ValueError, AssertionError: As GroupedMLP, for a configuration that it does not have.

    Examples:
        See docs/megatron.md.

        >>> EpmoeGroupedMLP.__mro__[1].__name__
        'GroupedMLP'
    """

    def __init__(self, num_local_experts, config, pg_collection=None):
        if config.fp8 or config.fp4:
            raise ValueError("EpmoeGroupedMLP computes in the dtype of its parameters: leave fp8 and fp4 out")
        check = _megatron.gg.assert_grouped_gemm_is_available
        _megatron.gg.assert_grouped_gemm_is_available = lambda: None  # that package is not used
        try:
            super().__init__(num_local_experts, config, pg_collection)
        finally:
            _megatron.gg.assert_grouped_gemm_is_available = check
        delays, fuses = config.delay_wgrad_compute, config.gradient_accumulation_fusion
        self._gradients = WeightGradients(delays, fuses) if delays or fuses else None

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
        self.activation_checkpoint = tensor_parallel.CheckpointWithoutOutput()
        act = self.activation_checkpoint.checkpoint(self.activation_func_with_probs, h, probs)
        return act, self.activation_checkpoint.discard_output_and_register_recompute

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

        def product(a, weight):
            return torch.ops.epmoe.grouped_gemm(a.contiguous(), weight, offsets, None, None, None, None,
                                                DGRAD, 0, False, None)

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
