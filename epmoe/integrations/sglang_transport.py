"""How epmoe.integrations.sglang moves tokens: in the mode normal, and in low latency."""

import itertools

import torch

try:
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.srt.environ import envs
    from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import utils as moe
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.runtime_context import get_parallel

    Mode, Dtype = moe.DeepEPMode, moe.DispatcherOutputDtype
    # What the experts of a layer receive and return.
    NormalRows, MaskedRows = deepep.DeepEPNormalDispatchOutput, deepep.DeepEPLLDispatchOutput
    NormalResults, MaskedResults = deepep.DeepEPNormalCombineInput, deepep.DeepEPLLCombineInput
except (ImportError, AttributeError) as error:
    raise ImportError(f"epmoe.integrations.sglang needs SGLang 0.5.23: {error}") from error

from ..a2a.low_latency import LowLatencyAll2All
from .deep_ep import Buffer

_shared = {}  # what the layers of this process share: (world, sizes) -> a Buffer or a LowLatencyAll2All


class Transport:
    """One mode of a dispatcher.

    send and send_back return a function, which completes the operation.  is_split tells whether other work is
    launched before that function is called.
    """

    def __init__(self, world, num_experts, runner_backend):
        self.world = world
        self.num_experts = num_experts
        self.runner_backend = runner_backend
        self.handle = None  # from a dispatch to its combine
        self.set_quant_config({})

    def set_quant_config(self, quant_config):
        self.quant_config = quant_config
        dtype = moe.get_deepep_output_dtype(self)  # reads quant_config, runner_backend, dispatch_mode
        if dtype not in (Dtype.BF16, Dtype.FP8):
            raise NotImplementedError(f"the experts want rows of {dtype.value}, and epmoe moves bf16 and "
                                      f"fp8: add --deepep-dispatcher-output-dtype bf16, or unset "
                                      f"EPMOE_SGLANG")
        self.is_fp8 = dtype is Dtype.FP8


class Normal(Transport):
    """Prefill: one row for each (token, rank).  The host reads the number of rows."""

    dispatch_mode = Mode.NORMAL
    results = NormalResults

    def _buffer(self, device):
        key = self.world, device
        if key not in _shared:
            _wait_for_compilation()  # the creation is collective
            _shared[key] = Buffer(self.world, device=device)
        return _shared[key]

    def send(self, x, topk, is_split):
        buffer = self._buffer(x.device)
        x, idx = x.contiguous(), topk.topk_ids.long().contiguous()
        weights = topk.topk_weights.float().contiguous()
        if self.is_fp8 and deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
            is_packed = deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0
            x = sglang_per_token_group_quant_fp8(x, 128, column_major_scales=is_packed,
                                                 scale_tma_aligned=is_packed, scale_ue8m0=is_packed)
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, self.num_experts)
        alignment = 128 if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM else 1
        overlap = _overlap(is_split)

        def receive():
            _wait_for_compilation()
            rows, ids, row_weights, counts, self.handle, event = buffer.dispatch(
                x, num_tokens_per_rank=per_rank, is_token_in_rank=is_in_rank, topk_idx=idx,
                num_tokens_per_expert=per_expert, topk_weights=weights, expert_alignment=alignment, **overlap)
            if is_split:
                event.current_stream_wait()
            get_global_expert_distribution_recorder().on_deepep_dispatch_normal(
                counts, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=None,
                num_tokens_per_expert=per_expert)
            rows, scales = rows if isinstance(rows, tuple) else (rows, None)
            return NormalRows(rows, scales, ids, row_weights, counts)

        return receive

    def send_back(self, results, is_split):
        handle, self.handle = self.handle, None
        y = results.hidden_states.contiguous()
        buffer, overlap = self._buffer(y.device), _overlap(is_split)

        def receive():
            _wait_for_compilation()
            sums, _, event = buffer.combine(y, handle, **overlap)
            if is_split:
                event.current_stream_wait()
            return sums

        return receive


class LowLatency(Transport):
    """Decode: a slab of rows for each local expert.  The host reads nothing, so it runs in CUDA graphs."""

    dispatch_mode = Mode.LOW_LATENCY
    results = MaskedResults

    def _layer(self, x, topk):
        """Return the LowLatencyAll2All, and an iterator over its communication buffers."""
        max_tokens = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
        num_buffers = 2 if moe.is_tbo_enabled() else 1  # one for each micro-batch
        sizes = max_tokens, x.shape[1], topk.topk_ids.shape[1], self.num_experts
        key = self.world, sizes, x.dtype, x.device, num_buffers
        if key not in _shared:
            layer = LowLatencyAll2All(self.world, *sizes, dtype=x.dtype, device=x.device,
                                      num_buffers=num_buffers)
            _shared[key] = layer, itertools.cycle(range(num_buffers))
        return _shared[key]

    def send(self, x, topk, is_split):
        _wait_for_compilation()  # also before the creation of the layer, which is collective
        layer, buffers = self._layer(x, topk)
        fp8 = self.is_fp8
        if fp8 and deep_gemm_wrapper.DEEPGEMM_BLACKWELL:
            fp8 = "ue8m0"
        if is_split:  # the second half reads the tokens of this rank's experts, and x may change before
            x, dispatch = x.clone(memory_format=torch.contiguous_format), layer.dispatch_send
        else:
            x, dispatch = x.contiguous(), layer.dispatch
        try:
            sent = dispatch(x, topk.topk_ids.contiguous(), topk.topk_weights.contiguous(), fp8=fp8,
                            buffer=next(buffers))
        except ValueError as error:
            if len(x) <= layer.max_tokens:
                raise
            raise ValueError(f"{len(x)} tokens in a low-latency dispatch, which has room for "
                             f"{layer.max_tokens}: set SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK to the "
                             f"most decode tokens of a rank, or lower --max-running-requests") from error

        def receive():
            rows, scales, counts, handle = sent.recv() if is_split else sent
            handle._drop_rows()  # SGLang frees them after the first GEMM
            self.handle = layer, handle, topk.topk_weights
            get_global_expert_distribution_recorder().on_deepep_dispatch_low_latency(counts)
            num_choices = topk.topk_ids.numel() * self.world.size  # as SGLang estimates it
            expected = (num_choices + self.num_experts) // self.num_experts
            return MaskedRows(rows, scales, topk.topk_ids, topk.topk_weights, counts, expected)

        return receive

    def send_back(self, results, is_split):
        (layer, handle, weights), self.handle = self.handle, None
        if results.topk_weights is not weights:
            raise RuntimeError("combine has other topk_weights than its dispatch: epmoe has sent those with "
                               "the tokens; pass the topk_weights that dispatch returned")
        _wait_for_compilation()
        y = results.hidden_states.contiguous()
        if is_split:
            return layer.combine_send(y, handle).recv
        sums = layer.combine(y, handle)
        return lambda: sums


def _overlap(is_split):
    """Return the options with which a Buffer runs beside what is launched from now on."""
    if not is_split:
        return {}
    return {"previous_event": Buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}


def _wait_for_compilation():
    """Let the ranks wait for each other, without epmoe's timeout, while DeepGEMM compiles."""
    if envs.SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE.get():
        get_parallel().tp_group.barrier()
