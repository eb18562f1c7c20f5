"""FusedParts: options, checks and calls of the module for EpAll2AllFusedOp."""

import torch

from .. import _C
from ..comm.device import capabilities
from ..gemm.grouped import FORWARD, GATED, aligned, is_transposed
from .layer_parts import cast


def fuses(max_tokens, topk, num_experts, world_size):
    """Whether the fused kernels are the faster way for a layer of this shape.

    They are not where an expert has 24 rows or fewer, as in decoding.  There, reading the weights takes all
    the time, and only the unfused GEMM has tiles for few rows (measured: docs/experiments, E-033).
    """
    return world_size * max_tokens * topk > 24 * num_experts


def fuses_fp8(max_tokens, columns):
    """Whether dispatch and the GEMM of weights [L, columns, H] in FP8 are faster in one launch.

    A product in FP8 of few columns ends before the warps beside it have moved the tokens.  With few tokens
    the launches count (measured: docs/experiments, E-119).
    """
    return columns >= 4096 or max_tokens <= 1024


def fuses_training(columns):
    """Whether the fused kernels train faster in 16 bits, with gate and up weights [L, columns, H].

    With wide experts, communication takes a small part of the time, so a fused launch can hide little.  And a
    GEMM takes a few percent longer when it shares its launch with communication (measured: docs/experiments,
    E-136).
    """
    return columns < 16384


class FusedParts:
    """The private half of EpAll2AllFusedOp."""

    def _check_options(self):
        self.fused = None if self.fused is None else bool(self.fused)
        for name in ("token_saving", "token_sorting", "block_wise_barrier"):
            setattr(self, name, bool(getattr(self, name)))
        if self.combine_order not in ("fuse_scatter", "serial"):
            raise ValueError(f"combine_order {self.combine_order!r}: must be fuse_scatter or serial")
        if self.expert_alignment > 1 or self.expert_capacity is not None:
            raise ValueError("expert_alignment and expert_capacity are options of EPAll2AllLayer: the fused "
                             "kernels have no padding rows")
        if not self.token_saving:  # every choice becomes a token of its own
            self._copies = self.topk
            self.max_tokens *= self.topk
            self.topk = 1
        self._chooses = self.fused is None
        if self._chooses:
            self.fused = fuses(self.max_tokens, self.topk, self.num_experts, self.world_size)
        # Asked here, because a compiler cannot trace the call of the module.
        on_cpu = self.device.type == "cpu"  # where a fused operation runs its stages one after the other
        self._has_fused_fp8 = not on_cpu and capabilities(self.device).has_hopper
        self._has_fused = on_cpu or self._has_fused_fp8
        most = self._num_blocks
        num_sm, num_tail, num_reduce = self._requested_sms
        num_sm = most if num_sm is None else min(int(num_sm), most)
        num_tail = int(num_tail)
        num_reduce = most if num_reduce is None else int(num_reduce)
        if num_tail < 0 or num_tail >= max(num_sm, 1):
            raise ValueError(f"num_tail_sms {num_tail}: must be 0, or fewer than the {num_sm} blocks that "
                             f"move tokens")
        if num_reduce < 1:
            raise ValueError(f"num_reduce_sms {num_reduce}: must be at least 1, because a thread block must "
                             f"add up the tokens")
        self._move_sms = num_sm
        self._tail_sms = num_tail
        self._reduce_sms = num_reduce

    def _is_fused(self, gemm_weight):
        """Whether the fused kernels exist for these weights [L, N, K] on this device."""
        return (self.fused and self._has_fused and self.dtype in (torch.bfloat16, torch.float16)
                and all(n % 16 == 0 for n in gemm_weight.shape[1:]) and not is_transposed(gemm_weight))

    def _is_fused_training(self, gemm_weight, columns):
        """As _is_fused, for a product of a training step whose gate and up weights are [L, columns, H]."""
        return self._is_fused(gemm_weight) and (not self._chooses or fuses_training(columns))

    # The two below allocate outputs and call the module; fused_ops.py makes operators of them.

    def _dispatch_gemm(self, x, weight, plan, gemm_weight, bias, buffer, num_rows, activation, alpha=0.0,
                       limit=0.0, with_grad=False):
        columns = gemm_weight.shape[1] // (2 if activation in GATED else 1)

        def make(n):
            row_weight = None if weight is None else self._empty(n, dtype=torch.float32)
            recv = self._empty(self._recv_words, dtype=torch.int32)
            return ([self._empty(n, self.hidden), row_weight, self._empty(n, columns)],
                    [recv, aligned(gemm_weight), aligned(bias)])

        def launch(outputs, others, awaits_rows):
            rows, row_weight, out = outputs
            return _C.layer_dispatch_gemm(self._c, buffer, (
                x, weight, plan, rows, row_weight, *others, out, None, activation, alpha, limit,
                self._move_sms, self._tail_sms, not self.block_wise_barrier, self._copies, with_grad, FORWARD,
                awaits_rows))

        call = plan, buffer, x.shape[0]
        kept_for = gemm_weight.data_ptr() if with_grad else None
        (rows, row_weight, out), others = self._run_dispatch(call, num_rows, make, launch, kept_for)
        return out, rows, row_weight, others[0]

    def _gemm_combine(self, a, gemm_weight, bias, row_weight, plan, recv, buffer, num_tokens,
                      with_grad=False):
        rows, out = self._empty(a.shape[0], self.hidden), self._empty(num_tokens, self.hidden)
        gemm_weight, bias = aligned(gemm_weight), aligned(bias)
        tensors = a, gemm_weight, bias, rows, row_weight, None, plan, recv, out, None
        _C.layer_gemm_combine(self._c, buffer, (
            *tensors, self._move_sms, self._reduce_sms, self.combine_order == "serial", with_grad, FORWARD))
        return out, rows

    def _check_gemm_input(self, gemm_input, gemm_weight, layout, weight):
        """Check the rows and their weights before GEMM + combine.  Returns the weights, in float32."""
        num_rows = layout._num_rows if self.capacity is None else self.capacity
        self._check_tensor("gemm_input", gemm_input, self.dtype, (num_rows, gemm_weight.shape[2]))
        if weight is None:
            return None
        self._check_tensor("weight", weight, None, (gemm_input.shape[0],))
        return cast(weight, torch.float32)

    # Without token saving, every choice is a token of its own (_copies > 1).

    def _by_token(self, y):
        return y if self._copies == 1 else y.view(-1, self._copies, self.hidden).float().sum(1).to(self.dtype)

    def _by_choice(self, name, t, most):
        """Return [T, K] as [T * K, 1].  The layer below checks the rest."""
        if not isinstance(t, torch.Tensor):
            return t
        if t.dim() != 2 or t.shape[1] != self._copies:
            raise ValueError(f"{name}: wanted shape [*, {self._copies}], got {list(t.shape)}")
        if t.shape[0] > most:
            raise ValueError(f"{name} has {t.shape[0]} tokens: must be at most {most}; see max_tokens")
        return t.reshape(-1, 1)
