"""SGLang: its expert-parallel MoE layers move the tokens with epmoe instead of DeepEP.

    EPMOE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --tp 8 --moe-a2a-backend deepep

SGLang finds epmoe through the entry point "sglang.srt.plugins" of the installed package.  A hook of SGLang's
plugin framework replaces the class DeepEPDispatcher by EpmoeDispatcher.  Routers, experts, weights and
--deepep-mode stay SGLang's.  DeepEP need not be installed.

It needs SGLang 0.5.23.
"""

import inspect
import logging

from .sglang_transport import (LowLatency, MaskedResults, MaskedRows, Mode, Normal, NormalResults, NormalRows,
                           deepep, moe)

try:
    from sglang.srt.layers.dp_attention import get_is_extend_in_batch
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_parallel
except (ImportError, AttributeError) as error:
    raise ImportError(f"epmoe.integrations.sglang needs SGLang 0.5.23: {error}") from error

from ..comm.world import World
from .deep_ep import Buffer
from .layers import check_methods

__all__ = ["EpmoeDispatcher", "register_hooks", "use"]

_MAX_RANKS = 8
_RESULT_FIELDS = "hidden_states topk_ids topk_weights"
_FIELDS = {NormalRows: "hidden_states hidden_states_scale topk_ids topk_weights num_recv_tokens_per_expert",
           MaskedRows: "hidden_states hidden_states_scale topk_ids topk_weights masked_m expected_m",
           NormalResults: _RESULT_FIELDS, MaskedResults: _RESULT_FIELDS}

logger = logging.getLogger(__name__)


class EpmoeDispatcher(BaseDispatcher):
    """What moves the tokens of one MoE layer.  After use(), SGLang makes it in the place of DeepEPDispatcher.

    Creation is collective.  The layers of a process share the communication buffers.  The number of tokens
    may differ between ranks and be 0.

    Letters: W ranks, E experts, L = E/W experts of a rank, T tokens of this rank, K choices, H hidden.

    Args:
        group: The ProcessGroup of the expert-parallel ranks, or an epmoe.World.  At most 8, on one node.
        router_topk: Not read: K is that of topk_ids, which may have a shared expert beside the router's.
        permute_fusion: Not read.
        num_experts: E, with redundant experts; rank r has the experts r * L to (r + 1) * L.
        num_local_experts: Not read: some models leave the redundant experts out.
        hidden_size: Not read: H is that of the tokens.
        params_dtype: Not read: the dtype is that of the tokens.
        deepep_mode: SGLang's DeepEPMode.  AUTO: normal where the batch has a prefill, else low latency.
        async_finish: Not read: dispatch_a and combine_a tell whether other work runs beside.
        return_recv_hook: Not read, likewise.
        runner_backend: SGLang's MoeRunnerBackend, which helps to choose bf16 or fp8, or None.

    Raises:
        ValueError: For more than 8 ranks, several nodes, an E that is no multiple of W, or --deepep-config.
        TypeError: Without num_experts.
        NotImplementedError: When the experts want rows of another dtype than bf16 or fp8.
        EpError: As World.of.

    Examples:
        See docs/sglang.md.

        >>> import epmoe
        >>> dispatcher = EpmoeDispatcher(epmoe.World(), 2, num_experts=4, num_local_experts=4)
        >>> dispatcher.expert_mask_gpu is None
        True
    """

    expert_mask_gpu = None  # for AMD's experts

    def __init__(self, group, router_topk, permute_fusion=False, num_experts=None, num_local_experts=None,
                 hidden_size=None, params_dtype=None, deepep_mode=Mode.AUTO, async_finish=False,
                 return_recv_hook=False, runner_backend=None):
        super().__init__()
        _check(group.size if isinstance(group, World) else group.size(), num_experts)
        world = World.of(group)
        self.deepep_mode = deepep_mode
        self.runner_backend = runner_backend
        self._hooks = deepep.DeepEPPDispatchHooks()
        self._transports = {}
        if deepep_mode.enable_normal():
            self._transports[Mode.NORMAL] = Normal(world, num_experts, runner_backend)
        if deepep_mode.enable_low_latency():
            self._transports[Mode.LOW_LATENCY] = LowLatency(world, num_experts, runner_backend)
        self._transport = None  # of the last dispatch
        self._pending = None  # what the second half of a call has to do
        _log_once(world.size)

    def dispatch(self, hidden_states, topk_output):
        """Send tokens to their experts' ranks.  Collective.

        Args:
            hidden_states: [T, H] bfloat16, float16 or float32.
            topk_output: SGLang's StandardTopKOutput: topk_ids [T, K] int32 or int64 of all E experts, -1 for
                none, and topk_weights [T, K] of a floating-point dtype.

        Returns:
            Normal: a DeepEPNormalDispatchOutput with one row for each (token, rank), ordered by source rank,
                then token, and local topk_ids.  Low latency: a DeepEPLLDispatchOutput with [L, W * max, H]
                rows, where max is SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.

        Raises:
            ValueError: On this rank, for more tokens than max.  PeerError on the others.
            ValueError, TypeError, EpError: As Buffer.dispatch of epmoe.integrations.deep_ep and
                LowLatencyAll2All.dispatch.

        Examples:
            See docs/sglang.md.
        """
        is_split = bool(self._hooks.hook_dict)
        self._begin_dispatch(hidden_states, topk_output, is_split)
        self._hooks(self)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states, topk_output):
        """Begin a dispatch, beside which other work is launched before dispatch_b.  Collective.

        Args:
            hidden_states: As for dispatch.
            topk_output: As for dispatch.

        Raises:
            EpError: As dispatch.

        Examples:
            See docs/sglang.md.
        """
        self._begin_dispatch(hidden_states, topk_output, True)

    def dispatch_b(self):
        """Complete the dispatch of dispatch_a, and return what dispatch returns.  Collective.

        Raises:
            RuntimeError: Without a dispatch_a before.
            EpError: As dispatch.

        Examples:
            See docs/sglang.md.
        """
        return self._complete("dispatch")

    def combine(self, combine_input):
        """Return the experts' results to their tokens' ranks, and add them up there.  Collective.

        Args:
            combine_input: Normal: a DeepEPNormalCombineInput whose rows have their weights already.  Low
                latency: a DeepEPLLCombineInput without weights, and with the topk_weights that dispatch
                returned, with which the rows are multiplied here.

        Returns:
            [T, H] of the rows' dtype.

        Raises:
            RuntimeError: Without a dispatch before, or with other topk_weights.
            TypeError: For the combine input of another mode.
            ValueError, TypeError, EpError: As Buffer.combine of epmoe.integrations.deep_ep and
                LowLatencyAll2All.combine.

        Examples:
            See docs/sglang.md.
        """
        self._begin_combine(combine_input, False)
        return self.combine_b()

    def combine_a(self, combine_input):
        """Begin a combine, beside which other work is launched before combine_b.  Collective.

        Args:
            combine_input: As for combine.  Do not change its rows before combine_b.

        Raises:
            EpError: As combine.

        Examples:
            See docs/sglang.md.
        """
        self._begin_combine(combine_input, True)

    def combine_b(self):
        """Complete the combine of combine_a, and return what combine returns.  Collective.

        Raises:
            RuntimeError: Without a combine_a before.
            EpError: As combine.

        Examples:
            See docs/sglang.md.
        """
        return self._complete("combine")

    def set_quant_config(self, quant_config):
        """Choose bf16 or fp8 for the rows, as SGLang's get_deepep_output_dtype does.

        Args:
            quant_config: A dict of SGLang's quantization method.

        Raises:
            NotImplementedError: When the experts want rows of another dtype.

        Examples:
            See docs/sglang.md.
        """
        super().set_quant_config(quant_config)
        for transport in self._transports.values():
            transport.set_quant_config(quant_config)

    def set_overlap_args(self, combine_overlap_args, meta_overlap_args):
        """Refuse to begin a combine before the experts are done.

        Args:
            combine_overlap_args: SGLang's CombineOverlapArgs, whose `overlap` says whether combine shall run
                beside the last GEMM, or None where only dispatch is overlapped.
            meta_overlap_args: Not read.

        Raises:
            NotImplementedError: Where combine shall overlap with the last GEMM.

        Examples:
            See docs/sglang.md.
        """
        if combine_overlap_args is not None and combine_overlap_args.overlap:
            raise NotImplementedError("epmoe's combine does not overlap with the GEMM before it: serve "
                                      "without --enable-single-batch-overlap, or unset EPMOE_SGLANG")

    def register_deepep_dispatch_hook(self, hook):
        """Call a function between the halves of each dispatch, to launch work that runs beside it.

        Args:
            hook: A function of this dispatcher.

        Returns:
            An object with a method remove().

        Examples:
            See docs/sglang.md.
        """
        return self._hooks.register_hook(hook)

    def _begin_dispatch(self, x, topk, is_split):
        if self._pending is not None:
            raise RuntimeError(f"dispatch before the {self._pending[0]}_b of the last call")
        mode = self.deepep_mode.resolve(get_is_extend_in_batch())
        self._transport = self._transports[mode]
        self._pending = "dispatch", self._transport.send(x, topk, is_split)

    def _begin_combine(self, results, is_split):
        transport = self._transport
        if self._pending is not None or transport is None or transport.handle is None:
            raise RuntimeError("combine without a dispatch before")
        if not isinstance(results, transport.results):
            raise TypeError(f"combine after a dispatch in the mode {transport.dispatch_mode.value}: wanted a "
                            f"{transport.results.__name__}, got a {type(results).__name__}")
        self._pending = "combine", transport.send_back(results, is_split)

    def _complete(self, name):
        pending, self._pending = self._pending, None
        if pending is None or pending[0] != name:
            raise RuntimeError(f"{name}_b without a {name}_a before")
        return pending[1]()


def _check(num_ranks, num_experts):
    """Raise for what epmoe does not have, with what to write."""
    parallel = get_parallel()
    if num_ranks > _MAX_RANKS or parallel.nnodes > parallel.pp_size:
        num_nodes = max(1, parallel.nnodes // parallel.pp_size)
        raise ValueError(f"{num_ranks} expert-parallel ranks on {num_nodes} nodes: epmoe serves at most "
                         f"{_MAX_RANKS} ranks of one node; use a --tp of at most {_MAX_RANKS} on one node, "
                         f"or unset EPMOE_SGLANG")
    if num_experts is None:
        raise TypeError("num_experts is missing: pass the number of experts of all ranks")
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts on {num_ranks} ranks: epmoe wants as many on each rank; add "
                         f"--ep-num-redundant-experts, or unset EPMOE_SGLANG")
    if moe.get_deepep_config():
        raise ValueError("--deepep-config sets DeepEP's queues, which epmoe does not have: leave it out, or "
                         "unset EPMOE_SGLANG")


_logged = []


def _log_once(num_ranks):
    if not _logged:
        _logged.append(True)
        logger.info("epmoe moves the tokens of the MoE layers between %d ranks", num_ranks)


# ---- hooks ----


def _clean_buffer(cls):
    """Do nothing, in the place of DeepEPBuffer.clean_buffer: there is no DeepEP buffer."""


def _check_backend(result, *args, **kwargs):
    """After SGLang has read its options for MoE layers: say so if epmoe is not used."""
    if not moe.get_moe_a2a_backend().is_deepep():
        logger.warning("epmoe is not used with --moe-a2a-backend %s: it takes the place of deepep",
                       moe.get_moe_a2a_backend().value)
    elif deepep.DeepEPDispatcher is not EpmoeDispatcher:
        raise RuntimeError("SGLang's DeepEPDispatcher is not epmoe's: the log says which other plugin "
                           "replaces it, or why the hook failed; unload that plugin, or unset EPMOE_SGLANG")


def register_hooks():
    """Register epmoe's hooks with SGLang's HookRegistry.

    The plugin calls it where EPMOE_SGLANG is 1; SGLang applies the hooks when it has loaded all plugins.

    Raises:
        ImportError: When SGLang's classes are not those for which this adapter was written.

    Examples:
        See use.
    """
    replaced = deepep.DeepEPDispatcher
    if replaced is EpmoeDispatcher:
        return
    methods = [name for name, value in vars(replaced).items()
               if inspect.isfunction(value) and not name.startswith("_")]
    missing = [name for name in methods if not hasattr(EpmoeDispatcher, name)]
    missing += sorted(EpmoeDispatcher.__abstractmethods__)
    if missing:
        raise ImportError(f"SGLang's DeepEPDispatcher has new methods, which epmoe's adapter lacks: "
                          f"{', '.join(missing)}; install SGLang 0.5.23")
    check_methods("sglang", replaced, **{
        name: " ".join(inspect.signature(getattr(EpmoeDispatcher, name)).parameters)
        for name in ("__init__", *methods)})
    check_methods("sglang", moe, get_deepep_output_dtype="self")
    for cls, fields in _FIELDS.items():
        if " ".join(cls._fields) != fields:
            raise ImportError(f"SGLang's {cls.__name__} has changed: its fields are "
                              f"({' '.join(cls._fields)}), and epmoe's adapter was written for ({fields}); "
                              f"install SGLang 0.5.23")
    if not hasattr(deepep, "Buffer"):  # DeepEP is not installed, but two-batch overlap reads Buffer.num_sms
        deepep.Buffer = Buffer
    prefix = deepep.__name__
    HookRegistry.register(f"{prefix}.DeepEPDispatcher", EpmoeDispatcher, HookType.REPLACE)
    HookRegistry.register(f"{prefix}.DeepEPBuffer.clean_buffer", _clean_buffer, HookType.REPLACE)
    HookRegistry.register(f"{moe.__name__}.initialize_moe_config", _check_backend, HookType.AFTER)


def use():
    """Let SGLang make an EpmoeDispatcher for each expert-parallel MoE layer of this process from now on.

    SGLang's servers and engines run the layers in processes of their own: set EPMOE_SGLANG=1 for them.  A
    second call does nothing.

    Raises:
        ImportError: As register_hooks.
        RuntimeError: When SGLang has not applied a hook; its log says why.

    Examples:
        >>> use()
        >>> from sglang.srt.layers.moe.token_dispatcher import deepep
        >>> deepep.DeepEPDispatcher.__name__
        'EpmoeDispatcher'
    """
    register_hooks()
    HookRegistry.apply_hooks()
    if deepep.DeepEPDispatcher is not EpmoeDispatcher:
        raise RuntimeError("SGLang's HookRegistry has not replaced DeepEPDispatcher: see its log")
