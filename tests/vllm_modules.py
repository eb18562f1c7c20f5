"""The modules of vLLM that epmoe.integrations.vllm uses: stand-ins, or vLLM's own files.

vLLM with what it needs is too large for a test. "stand-in" makes small modules with the same names, which say
what the adapter relies on. "source" loads vLLM's own files from the folder EPMOE_VLLM_SOURCE, which contains
vllm/ (unpack the source archive of the version in docs/vllm.md there): those of OWN (framework_source.py).
"""

import abc
import enum
import importlib
import importlib.metadata
import types
import unittest.mock

from framework_source import Source, add_module

MOE = "vllm.model_executor.layers.fused_moe"
OWN = [f"{MOE}.{name}" for name in ("modular_kernel", "all2all_utils", "topk_weight_and_reduce", "config",
                                    "utils")]
SOURCE = Source("vllm", "EPMOE_VLLM_SOURCE", OWN)
_loaded = []


def moe_kernel_quantize_input(A, A_scale, quant_dtype, per_act_token_quant, block_shape=None,
                              is_scale_swizzled=True, is_scale_transposed=False,
                              quantization_emulation=False, mx_alignment=0):
    """vllm_quantized.py replaces it."""
    raise NotImplementedError


def _load_stand_in():
    class FusedMoEActivationFormat(enum.Enum):
        Standard = ("standard",)

    class FusedMoEPrepareAndFinalizeModular(abc.ABC):
        @property
        @abc.abstractmethod
        def activation_format(self):
            """One of FusedMoEActivationFormat."""

        @abc.abstractmethod
        def topk_indices_dtype(self):
            """A dtype, or None."""

        @abc.abstractmethod
        def max_num_tokens_per_rank(self):
            """A number, or None."""

        @abc.abstractmethod
        def num_dispatchers(self):
            """A number."""

        @abc.abstractmethod
        def output_is_reduced(self):
            """A bool."""

        def post_init_setup(self, fused_experts):
            """Called with the chosen experts."""

        def supports_async(self):
            return False

        @abc.abstractmethod
        def prepare(self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input,
                    quant_config, defer_input_quant):
            """Return rows, scales, ExpertTokensMetadata or None, ids, weights."""

        @abc.abstractmethod
        def finalize(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input,
                     weight_and_reduce_impl):
            """Write output."""

    def maybe_make_prepare_finalize(moe, quant_config, routing_tables=None, allow_new_interface=False,
                                    use_monolithic=False, all2all_manager=None, input_dtype=None):
        return "vLLM's own"

    for name in ("config", "distributed", "forward_context", "logger"):
        add_module(f"vllm.{name}", get_current_vllm_config=None, get_ep_group=None, get_forward_context=None,
                   init_logger=unittest.mock.MagicMock())
    add_module("vllm.v1.worker.workspace", current_workspace_manager=None,
               is_workspace_manager_initialized=lambda: False)
    add_module(OWN[0], FusedMoEActivationFormat=FusedMoEActivationFormat,
               FusedMoEPrepareAndFinalizeModular=FusedMoEPrepareAndFinalizeModular)
    add_module(OWN[1], maybe_make_prepare_finalize=maybe_make_prepare_finalize)
    add_module(OWN[2], **{name: type(name, (), {}) for name in (
        "TopKWeightAndReduceNoOP", "TopKWeightAndReduceContiguous", "TopKWeightAndReduceDelegate")})
    add_module(OWN[3], FUSED_MOE_UNQUANTIZED_CONFIG=types.SimpleNamespace(quant_dtype=None))
    add_module(OWN[4], moe_kernel_quantize_input=moe_kernel_quantize_input)


def load(which):
    """Make the modules importable in this process: which is "stand-in" or "source"."""
    _loaded.append(which)
    if which == "source":
        SOURCE.load()
        with unittest.mock.patch("torch.compile", lambda *_, **__: lambda function: function):
            importlib.import_module(OWN[4])
    else:
        _load_stand_in()
    # The adapter asks for the version where vLLM has changed.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.33.0" if name == "vllm" else version(name)


def is_loaded(which):
    """Whether load has made these modules importable in this process."""
    return which in _loaded
