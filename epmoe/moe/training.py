"""MoeTraining: the part of EPMoE that says where the gradients of its weights go."""

import torch

from ..gemm.weight_gradients import WeightGradients
from .parallel_parts import ScaledGradient

GRADIENT_OPTIONS = ("delay_wgrad_compute", "fuse_wgrad_accumulation")  # of EPMoE
_WEIGHTS = ("gate_up_proj", "down_proj")  # biases have ordinary gradients


class MoeTraining:
    """The part of EPMoE that says where the gradients of its weights go."""

    def _init_gradients(self, delay_wgrad_compute=False, fuse_wgrad_accumulation=False):
        wants = delay_wgrad_compute or fuse_wgrad_accumulation
        self._weight_gradients = None
        if wants:
            self._weight_gradients = WeightGradients(delay_wgrad_compute, fuse_wgrad_accumulation)

    @property
    def _has_other_gradients(self):
        """Whether the gradients of the weights do not simply go to .grad in the backward."""
        return self._weight_gradients is not None

    @property
    def _fuses_gradients(self):
        return self._weight_gradients is not None and self._weight_gradients.fuses

    def _begin_gradients(self):
        """Begin a forward pass.  Raises RuntimeError for parameters whose gradients cannot go elsewhere."""
        if self._weight_gradients is not None and torch.is_grad_enabled():
            wanted = {n: getattr(self, n) for n in _WEIGHTS}
            self._weight_gradients.begin({n: p for n, p in wanted.items() if p.requires_grad})

    def _scaled(self, name):
        """Return a parameter, whose gradient will be multiplied by gradient_scale."""
        p = getattr(self, name)
        if p is None or not (p.requires_grad and torch.is_grad_enabled()):
            return p
        if self._weight_gradients is not None and name in _WEIGHTS:
            return self._weight_gradients.weight(p, self.gradient_scale)
        return p if self.gradient_scale == 1 else ScaledGradient.apply(p, self.gradient_scale)

    @torch._disable_dynamo
    def _run_untraced(self, *args):
        """Run the forward pass outside of compiled code, which would not see what a backward keeps."""
        return self._run(*args)

    def backward_dw(self):
        """Compute the gradients of the weights of the oldest backward pass that waits.  Not collective.

        For delay_wgrad_compute=True: call it once for each backward pass of this module, at any time before
        the step of the optimizer, for example while a pipeline waits for its neighbour.  Until then the
        module keeps the factors of the gradients: the rows that it has received, and the gradients of its two
        products.  The result has the same bits as without delay_wgrad_compute.  Hooks of the parameters run
        now, and not in the backward.  It may be called on another stream than the backward: the stream waits
        for the factors.

        Raises:
            RuntimeError: Where no backward pass waits, without delay_wgrad_compute, and where a tensor that
                the gradients need was modified in place.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu",
            ...                   delay_wgrad_compute=True)
            >>> moe(torch.ones(2, 16), torch.tensor([[0], [1]]), torch.ones(2, 1)).sum().backward()
            >>> moe.down_proj.grad is None
            True
            >>> moe.backward_dw()
            >>> moe.down_proj.grad.shape
            torch.Size([2, 16, 32])
            >>> moe.finalize()

        References:
            `backward_dw` of the modules of Transformer Engine and Megatron-LM; the weights' half of the
            backward in "Zero Bubble Pipeline Parallelism", Qi et al., 2023.
        """
        if self._weight_gradients is None or not self._weight_gradients.delays:
            raise RuntimeError("backward_dw: the backward of this module computes the gradients of its "
                               "weights: create it with delay_wgrad_compute=True, or leave this call out")
        if any(getattr(self, n).requires_grad for n in _WEIGHTS) or self._weight_gradients.pending:
            self._weight_gradients.compute()
