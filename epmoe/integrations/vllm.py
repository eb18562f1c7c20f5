"""vLLM: its expert-parallel MoE layers move the tokens with epmoe.

    EPMOE_VLLM=1 vllm serve MODEL --data-parallel-size 8 --enable-expert-parallel

vLLM finds epmoe through the entry point "vllm.general_plugins" of the installed package.  vLLM has no
registry for what moves the tokens, so use() replaces the function that chooses it, and takes the place of
--all2all-backend allgather_reducescatter, the default.  Routers, experts and weights stay vLLM's, but for
experts of 4 bits, which epmoe multiplies where it can (vllm_four_bits.py).

It needs vLLM 0.33.
"""

import os
import sys

import torch
from torch.nn.functional import pad

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import get_ep_group
    from vllm.forward_context import get_forward_context
    from vllm.logger import init_logger
    from vllm.model_executor.layers.fused_moe import (all2all_utils as _all2all, modular_kernel as _kernel,
                                                      topk_weight_and_reduce as _reduce, utils as _utils)
    from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

    _Base = _kernel.FusedMoEPrepareAndFinalizeModular
    _chosen_by_vllm = _all2all.maybe_make_prepare_finalize
except (ImportError, AttributeError) as error:
    raise ImportError(f"epmoe.integrations.vllm needs vLLM 0.33: {error}") from error

from . import layers
from .layers import check_methods

__all__ = ["EpmoePrepareAndFinalize", "use"]

# What vLLM calls, and with what.
_CALLED = {
    "post_init_setup": "self fused_experts",
    "prepare": "self a1 topk_weights topk_ids num_experts expert_map apply_router_weight_on_input "
               "quant_config defer_input_quant",
    "finalize": "self output fused_expert_output topk_weights topk_ids apply_router_weight_on_input "
                "weight_and_reduce_impl",
}
_CHOICE = "moe quant_config routing_tables allow_new_interface use_monolithic all2all_manager input_dtype"
_QUANTIZE = ("A A_scale quant_dtype per_act_token_quant block_shape is_scale_swizzled is_scale_transposed "
             "quantization_emulation mx_alignment")
_BACKEND = "allgather_reducescatter"
# The dtypes of rows that vLLM's moe_kernel_quantize_input makes on an NVIDIA GPU.
_QUANTIZED = torch.float8_e4m3fn, torch.int8, "nvfp4", "mxfp8"

logger = init_logger("vllm.epmoe")  # vLLM shows what loggers below "vllm" say


class EpmoePrepareAndFinalize(_Base):
    """What moves the tokens of one MoE layer.  After use(), vLLM makes it.

    Layers of one shape share a communication layer.  The number of tokens may differ between ranks and be 0.
    Each row has one expert: the experts get [M, 1] ids and weights.  Tokens are moved in their own dtype; the
    receiver quantizes the rows for experts that expect quantized input, with vLLM's own function.

    Args:
        group: The ProcessGroup of the expert-parallel ranks, at most 8, or None for this process alone.
        max_tokens: The most tokens of a rank in one call.
        hidden: H.
        topk: K.
        num_experts: E, with redundant experts.  As vLLM spreads them, each rank has E / W in order, and each
            of the first E mod W ranks one more.
        dtype: Of the tokens: bfloat16, float16 or float32.
        device: Of the tokens.
        graph_tokens: The most tokens of a rank in a CUDA graph, or 0.  Where no rank has more tokens in a
            call, the outputs of prepare have a fixed size and the host reads nothing.
        sequence_ranks: The ranks that share the tokens of one data-parallel rank (sequence parallelism).
        has_equal_tokens: All ranks have the same number of tokens in a call, as without data parallelism.
        locks_memory: vLLM gives its experts no more memory after its first calls, as it does when it has
            captured graphs.

    Raises:
        ValueError, TypeError, EpError: As EPAll2AllLayer.

    Examples:
        See docs/vllm.md.

        >>> mover = EpmoePrepareAndFinalize(None, 8, 16, 2, 4, torch.float32, "cpu")
        >>> mover.num_dispatchers(), mover.output_is_reduced()
        (1, True)
    """

    def __init__(self, group, max_tokens, hidden, topk, num_experts, dtype, device, graph_tokens=0,
                 sequence_ranks=1, has_equal_tokens=False, locks_memory=False):
        super().__init__()
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._group = group
        # Then the sum of a token depends neither on the ranks of its experts, nor on replicas.
        self._options = {"enable_local_combine": False} if _is_batch_invariant() else {}
        self._layout = None  # from prepare to finalize
        world = layers.world_of(group)
        self._num_ranks = world.size
        num, more = divmod(num_experts, world.size)
        ends = [(r + 1) * num + min(r + 1, more) for r in range(world.size)]
        self._own = range(([0] + ends)[world.rank], ends[world.rank])
        self._num_experts = num_experts
        self._num, self._more = num, more
        self._num_physical = (num + (more > 0)) * world.size  # of the layer, in which all ranks have as many
        shape = hidden, topk, self._num_physical, dtype, device
        layers.make_layer(group, max_tokens, *shape, **self._options)
        self._sequence_ranks = sequence_ranks
        self._has_equal_tokens = has_equal_tokens
        self._locks_memory = locks_memory or graph_tokens > 0
        self._fixed = [layers.make_layer(group, size, *shape, capacity=world.size * size * topk,
                                         **self._options) for size in _graph_sizes(graph_tokens)]

    def post_init_setup(self, fused_experts):
        """Check that the chosen experts take rows of one expert each.  vLLM calls it once for each layer.

        Args:
            fused_experts: vLLM's experts.

        Raises:
            NotImplementedError: When they expect K experts for each row, whatever the shape of the ids.

        Examples:
            See docs/vllm.md.
        """
        topk = getattr(fused_experts, "topk", 1)
        if topk != 1:
            raise NotImplementedError(f"{type(fused_experts).__name__} expects {topk} experts for each row, "
                                      f"and epmoe's rows have one: choose others with --moe-backend, for "
                                      f"example deep_gemm or triton")

    @property
    def activation_format(self):
        """The rows of all experts in one tensor.

        Examples:
            See docs/vllm.md.
        """
        return _kernel.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self):
        """Return the dtype of the ids that vLLM's router must make.

        Examples:
            See docs/vllm.md.
        """
        return torch.int32

    def max_num_tokens_per_rank(self):
        """Return None: vLLM need not split its batches.

        Examples:
            See docs/vllm.md.
        """
        return None

    def num_dispatchers(self):
        """Return W.

        Examples:
            See docs/vllm.md.
        """
        return self._num_ranks

    def output_is_reduced(self):
        """Return True: after finalize each rank has the whole sums of its tokens.

        Examples:
            See docs/vllm.md.
        """
        return True

    def prepare(self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input,
                quant_config, defer_input_quant=False):
        """Send tokens to their experts' ranks.  Collective.

        Args:
            a1: [T, H], not quantized.
            topk_weights: [T, K] of a floating-point dtype.
            topk_ids: [T, K] int32 or int64; -1 means none.
            num_experts: E.
            expert_map: Not read: the experts of a rank are consecutive.
            apply_router_weight_on_input: True multiplies the tokens by their weights first; K must be 1 then.
            quant_config: The experts' FusedMoEQuantConfig.
            defer_input_quant: True if the experts quantize their input themselves.

        Returns:
            A tuple (rows [M, H], scales, None, ids [M, 1], weights [M, 1]).  rows are ordered by expert,
                source rank, token; ids count all E experts.  scales is None unless the rows are quantized.
                Then rows and scales are what vLLM's moe_kernel_quantize_input returns for this
                quant_config: for float8_e4m3fn, scales are [M, H / 128] float32 with block_shape [128,
                128], [M, 1] for each token, or 1 element for all rows of this rank.  Where no rank has more
                than graph_tokens tokens, rows of zeros follow, with the id of an expert of another rank,
                and a fixed number of rows takes the place of M.

        Raises:
            NotImplementedError: When the experts want rows of a dtype that vLLM cannot make, and with
                VLLM_BATCH_INVARIANT=1 when one dynamic scale is for all rows.
            RuntimeError: In the capture of a CUDA graph, with more than graph_tokens tokens.
            ValueError, TypeError, EpError: As EPAll2AllLayer.dispatch.

        Examples:
            See docs/vllm.md.
        """
        quantizes = quant_config.quant_dtype is not None and not defer_input_quant
        if quantizes and quant_config.quant_dtype not in _QUANTIZED:
            raise NotImplementedError(f"the experts want rows of {quant_config.quant_dtype}, which vLLM has "
                                      f"no function to make: choose others with --moe-backend, for example "
                                      f"triton, or unset EPMOE_VLLM")
        if quantizes and _is_batch_invariant() and _has_scale_of_all_rows(quant_config):
            raise NotImplementedError("VLLM_BATCH_INVARIANT=1 with a dynamic scale of all rows: it depends "
                                      "on the batch: choose a model with static scales, or with one for "
                                      "each token or block, or unset VLLM_BATCH_INVARIANT")
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ValueError(f"apply_router_weight_on_input with {topk_ids.shape[1]} experts for each "
                                 f"token: it needs one")
            a1 = a1 * topk_weights.to(a1.dtype)
        call = a1.contiguous(), self._physical(topk_ids).contiguous(), topk_weights.contiguous()
        most = self._most_tokens(a1)
        layer = self._layer_of_fixed_size(a1, most)
        if layer is None:
            rows, weights, self._layout = layers.dispatch(self._group, *call, self._num_physical,
                                                          **self._options)
        else:
            rows, weights, self._layout = layer.dispatch(*call)
        self._num_rows = len(rows)
        self._num_expected = max(1, len(rows)) if layer is None else layer.expected_rows
        if layer is None and most is not None and self._locks_memory and _workspace_grows():
            # Soon vLLM's experts get no more memory: show them the most rows now.
            more = self._num_ranks * most * topk_ids.shape[1] - len(rows)
            rows, weights = pad(rows, (0, 0, 0, more)), pad(weights, (0, more))
        counts = self._layout.tokens_per_expert[:len(self._own)]
        ids = self._ids(counts, len(rows)).to(topk_ids.dtype)
        scales = None
        if quantizes and len(rows):  # without rows vLLM calls no experts
            rows, scales = _quantized(rows, quant_config)
        # As after vLLM's own dispatch there are no counts: its CUTLASS experts for FP8 refuse them.
        return rows, scales, None, ids[:, None], weights[:, None]

    def expert_offsets(self):
        """Return where the rows of each expert of this rank begin, after prepare: [L + 1] int32.

        Examples:
            See docs/vllm.md.
        """
        return self._layout.expert_offsets[:len(self._own) + 1]

    def expected_rows(self):
        """Return how many rows are expected to be of this rank's experts, after prepare.

        The layers of graphs make room for more.  See epmoe.grouped_gemm.

        Examples:
            See docs/vllm.md.
        """
        return self._num_expected

    def _physical(self, ids):
        """Return the layer's experts of vLLM's ids.  -1 stays, and E becomes the layer's number of experts.

        The first ranks have an expert more than the others, in whose place these have none.  Not a table: a
        CUDA graph reads its memory also after vLLM has replaced this object, and in vLLM's sleep the memory
        loses what it holds.
        """
        if not self._more:
            return ids
        first = self._more * (self._num + 1)  # of the ranks that have fewer experts
        if self._num:
            return ids + ((ids - first) // self._num).clamp_min(0)
        return ids + (ids >= first) * (self._num_physical - first)

    def _most_tokens(self, a1):
        """Return the most tokens of any rank in this call, the same on all ranks, or None if unknown."""
        metadata = get_forward_context().dp_metadata if self._fixed or self._locks_memory else None
        if metadata is None:
            return a1.shape[0] if self._has_equal_tokens else None
        return -(-int(metadata.num_tokens_across_dp_cpu.max()) // self._sequence_ranks)  # on the host

    def _layer_of_fixed_size(self, a1, most):
        """Return the layer whose outputs have a fixed size for this number of tokens, or None."""
        for layer in self._fixed if most is not None else ():
            if most <= layer.max_tokens:
                return layer
        if a1.is_cuda and torch.cuda.is_current_stream_capturing():
            most = self._fixed[-1].max_tokens if self._fixed else 0
            raise RuntimeError(f"a CUDA graph with {a1.shape[0]} tokens: epmoe expects at most {most}, "
                               f"from vLLM's max_cudagraph_capture_size: add --enforce-eager")
        return None

    def _ids(self, counts, num_rows):
        """Return the expert of each row, [num_rows] int64.  Rows after the last have one of another rank."""
        ends = counts.cumsum(0)
        local = torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)
        # Experts skip such rows, as they do after vLLM's own dispatch, which gives every row to every rank.
        elsewhere = self._own.stop % self._num_experts if len(self._own) < self._num_experts else -1
        return torch.where(local < len(self._own), local + self._own.start, elsewhere)

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input,
                 weight_and_reduce_impl):
        """Return the experts' rows to their tokens' ranks, and write the sums to output.  Collective.

        Args:
            output: [T, H].
            fused_expert_output: [M, H] or [M, 1, H], in the order of prepare's rows.
            topk_weights: [M, 1], as prepare returned them.
            topk_ids: Not read.
            apply_router_weight_on_input: True if prepare has applied the weights.
            weight_and_reduce_impl: What the experts have left to do: TopKWeightAndReduceNoOP if they have
                applied the weights.

        Raises:
            NotImplementedError: For another weight_and_reduce_impl than NoOP, Contiguous and Delegate.
            RuntimeError: Without a prepare before.
            ValueError, TypeError, EpError: As EPAll2AllLayer.combine.

        Examples:
            See docs/vllm.md.
        """
        layout, self._layout = self._layout, None
        if layout is None:
            raise RuntimeError("finalize without a prepare before")
        if isinstance(weight_and_reduce_impl, _reduce.TopKWeightAndReduceNoOP):
            weights = None
        elif isinstance(weight_and_reduce_impl, (_reduce.TopKWeightAndReduceContiguous,
                                                 _reduce.TopKWeightAndReduceDelegate)):
            weights = None if apply_router_weight_on_input else topk_weights.reshape(-1)
        else:
            raise NotImplementedError(f"experts that leave {type(weight_and_reduce_impl).__name__} to do: "
                                      f"choose others with --moe-backend, for example triton")
        weights = None if weights is None else weights[:self._num_rows]
        y = fused_expert_output.reshape(-1, fused_expert_output.shape[-1])[:self._num_rows].contiguous()
        output.copy_(layout.layer.combine(y, layout, weights), non_blocking=True)


def _graph_sizes(most):
    """Return the token counts for which layers of a fixed size are made, ascending; the last one is most."""
    sizes = [most] if most else []
    while sizes and sizes[-1] > 8:
        sizes.append(-(-sizes[-1] // 4))
    return sizes[::-1]


def _workspace_grows():
    """Whether vLLM still fits the memory of its experts to the calls: until it has captured graphs."""
    return is_workspace_manager_initialized() and not current_workspace_manager().is_locked()


def _is_batch_invariant():
    """Whether vLLM was told that the results of a request must not depend on the others."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def _has_scale_of_all_rows(config):
    """Whether the rows of a rank are quantized with one scale, which is made of all of them."""
    return (config.quant_dtype == torch.float8_e4m3fn and not config.per_act_token_quant
            and config.block_shape is None and config.a1_scale is None)


def _quantized(rows, config):
    """Return rows and their scales as vLLM quantizes the input of experts where no tokens move."""
    scale = config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale
    return _utils.moe_kernel_quantize_input(
        rows, scale, config.quant_dtype, config.per_act_token_quant, config.block_shape,
        is_scale_swizzled=config.is_scale_swizzled, is_scale_transposed=config.is_scale_transposed,
        mx_alignment=config.mx_alignment)


# ---- vLLM's choice of what moves the tokens ----


def _check(moe, use_monolithic):
    """Raise for what epmoe does not have, with what to write."""
    parallel = moe.moe_parallel_config
    if parallel.all2all_backend != _BACKEND:
        raise ValueError(f"EPMOE_VLLM=1 takes the place of --all2all-backend {_BACKEND}, but the backend is "
                         f"{parallel.all2all_backend}: leave --all2all-backend out, or the --moe-backend "
                         f"that chose it, or unset EPMOE_VLLM")
    if use_monolithic:
        raise NotImplementedError("the chosen experts also route, and epmoe moves routed tokens: choose "
                                  "others with --moe-backend, for example triton")
    if moe.skip_final_all_reduce:
        raise NotImplementedError("this model adds up the partial sums of its ranks itself, and epmoe "
                                  "returns whole sums: unset EPMOE_VLLM")
    if moe.is_lora_enabled:
        raise NotImplementedError("epmoe does not move the LoRA ids of tokens: serve without --enable-lora, "
                                  "or unset EPMOE_VLLM")
    if _config().parallel_config.enable_elastic_ep:  # moe.elastic_ep_max_dp_size is set without it, too
        raise NotImplementedError("epmoe's ranks are fixed: serve without --enable-elastic-ep, or unset "
                                  "EPMOE_VLLM")


_known_config = []  # vLLM's configuration, once a call has seen it


def _config():
    """Return vLLM's configuration.  A program that loads weights anew need not have set it."""
    config = get_current_vllm_config_or_none()
    if config is not None:
        _known_config[:] = [config]
    if not _known_config:
        raise RuntimeError("vLLM's configuration is not set: load the weights inside of "
                           "vllm.config.set_current_vllm_config()")
    return _known_config[0]


def _graph_options(moe):
    """Return graph_tokens and locks_memory of EpmoePrepareAndFinalize, by name."""
    settings = _config().compilation_config
    if torch.device(moe.device).type != "cuda":
        return {}
    has_graphs = getattr(settings.cudagraph_mode, "name", "NONE") != "NONE"
    most = settings.max_cudagraph_capture_size or 0 if has_graphs else 0
    return {"graph_tokens": -(-most // moe.moe_parallel_config.sp_size),
            # vLLM locks the memory also where it captures only the encoder of images.
            "locks_memory": has_graphs or bool(settings.cudagraph_mm_encoder)}


def _choose(moe, quant_config, routing_tables=None, allow_new_interface=False, use_monolithic=False,
            all2all_manager=None, input_dtype=None):
    """vLLM's maybe_make_prepare_finalize, with epmoe wherever tokens move between ranks."""
    if not (moe.moe_parallel_config.use_all2all_kernels and allow_new_interface):
        logger.warning_once("EPMOE_VLLM=1 has no effect on MoE layers where no tokens move between ranks: "
                            "epmoe needs --enable-expert-parallel, and --data-parallel-size or "
                            "--prefill-context-parallel-size of at least 2")
        return _chosen_by_vllm(moe, quant_config, routing_tables, allow_new_interface, use_monolithic,
                               all2all_manager, input_dtype)
    _check(moe, use_monolithic)
    parallel = moe.moe_parallel_config
    mover = EpmoePrepareAndFinalize(get_ep_group().cpu_group, moe.max_num_tokens, moe.hidden_dim,
                                    moe.experts_per_token, moe.num_experts, moe.in_dtype, moe.device,
                                    sequence_ranks=parallel.sp_size, has_equal_tokens=parallel.dp_size == 1,
                                    **_graph_options(moe))
    logger.info_once("epmoe moves the tokens of the MoE layers between %d ranks", mover.num_dispatchers())
    return mover


def use():
    """Let vLLM make an EpmoePrepareAndFinalize for each expert-parallel MoE layer from now on.

    The plugin calls it where EPMOE_VLLM is 1.  A second call does nothing.  Where vLLM's classes for experts
    of 4 bits are not those for which this adapter was written, a warning says so, and vLLM multiplies them.

    Raises:
        ImportError: When vLLM's classes and functions are not those for which this adapter was written.

    Examples:
        >>> use()
        >>> from vllm.model_executor.layers.fused_moe import all2all_utils
        >>> all2all_utils.maybe_make_prepare_finalize.__module__
        'epmoe.integrations.vllm'
    """
    if _all2all.maybe_make_prepare_finalize is _choose:
        return
    check_methods("vllm", _all2all, maybe_make_prepare_finalize=_CHOICE)
    check_methods("vllm", _utils, moe_kernel_quantize_input=_QUANTIZE)
    check_methods("vllm", _Base, **_CALLED)
    if EpmoePrepareAndFinalize.__abstractmethods__:
        missing = ", ".join(sorted(EpmoePrepareAndFinalize.__abstractmethods__))
        raise ImportError(f"vLLM's {_Base.__name__} has new methods, which epmoe's adapter lacks: {missing}; "
                          f"install vLLM 0.33")
    # Modules that have imported the function have a name of their own for it.
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("maybe_make_prepare_finalize") is _chosen_by_vllm:
            module.maybe_make_prepare_finalize = _choose
    logger.info("EPMOE_VLLM=1: epmoe moves the tokens of expert-parallel MoE layers")
    try:
        from . import vllm_four_bits

        vllm_four_bits.use()
    except Exception as error:  # any change of vLLM's classes; its own kernels multiply these experts, too
        logger.warning("epmoe does not multiply experts of 4 bits: %s", error)
