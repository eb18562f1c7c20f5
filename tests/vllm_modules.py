"""The modules of vLLM that epmoe.integrations.vllm uses: stand-ins, or vLLM's own files.

vLLM with what it needs is too large for a test. "stand-in" makes small modules with the same names, which say
what the adapter relies on. "source" loads vLLM's own files from the folder EPMOE_VLLM_SOURCE, which contains
vllm/ (unpack the source archive of the version in docs/vllm.md there): those of OWN (framework_source.py).
"""

import abc
import enum
import importlib
import importlib.metadata
import math
import sys
import types
import unittest.mock

import torch

from framework_source import Source, add_module

MOE = "vllm.model_executor.layers.fused_moe"
OWN = [f"{MOE}.{name}" for name in ("modular_kernel", "all2all_utils", "topk_weight_and_reduce", "config",
                                    "utils")]
QUANTIZATION = "vllm.model_executor.layers.quantization"
FOUR_BITS = [*(f"{MOE}.{name}" for name in ("activation", "fused_moe_method_base", "routed_experts")),
             "vllm.model_executor.custom_op", "vllm.model_executor.utils", QUANTIZATION,
             f"{QUANTIZATION}.base_config", f"{QUANTIZATION}.mxfp4"]
SOURCE = Source("vllm", "EPMOE_VLLM_SOURCE", OWN)
# vLLM's own methods ask for the GPU when they are made
MXFP4_METHODS = {name: type(name, (), {"__init__": lambda self, *moe: None})
                 for name in ("GptOssMxfp4MoEMethod", "Mxfp4MoEMethod")}
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

    class MoEActivation(enum.Enum):
        SILU = "silu"
        SWIGLUOAI = "swigluoai"
        SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
        GELU = "gelu"

    class FusedMoEExpertsModular(abc.ABC):
        def __init__(self, moe_config, quant_config):
            self.moe_config, self.quant_config = moe_config, quant_config

        @abc.abstractmethod
        def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta,
                             activation):
            """The shapes of two workspaces and the output."""

        @abc.abstractmethod
        def finalize_weight_and_reduce_impl(self):
            """A TopKWeightAndReduce."""

        @abc.abstractmethod
        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
                  expert_map, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta,
                  apply_router_weight_on_input):
            """Write output."""

    class FusedMoEKernel:
        def __init__(self, prepare_finalize, fused_experts):
            self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts
            prepare_finalize.post_init_setup(fused_experts)
            assert prepare_finalize.activation_format == fused_experts.activation_format()

        def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
                  expert_map, apply_router_weight_on_input, shared_experts=None, shared_experts_input=None):
            experts, on_input = self.fused_experts, apply_router_weight_on_input
            rows, scales, meta, ids, weights = self.prepare_finalize.prepare(
                hidden_states, topk_weights, topk_ids, global_num_experts, expert_map, on_input,
                experts.quant_config, defer_input_quant=False)
            out = torch.empty_like(rows)
            if len(rows):
                shapes = experts.workspace_shapes(len(rows), w1.shape[1], rows.shape[1], 1,
                                                  global_num_experts, len(w1), meta, activation)
                one, two, out = (rows.new_full(shape, torch.nan) for shape in shapes)
                experts.apply(output=out, hidden_states=rows, w1=w1, w2=w2, topk_weights=weights,
                              topk_ids=ids, activation=activation, global_num_experts=global_num_experts,
                              expert_map=expert_map, a1q_scale=scales, a2_scale=None, workspace13=one,
                              workspace2=two, expert_tokens_meta=meta, apply_router_weight_on_input=on_input)
            y = torch.full_like(hidden_states, torch.nan)
            self.prepare_finalize.finalize(y, out, weights, ids, on_input,
                                           experts.finalize_weight_and_reduce_impl())
            return y

    class FusedMoEMethodBase(abc.ABC):
        def __init__(self, moe):
            self.moe, self.moe_quant_config, self.moe_kernel = moe, None, None

        @abc.abstractmethod
        def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition,
                           params_dtype, **extra_weight_attrs):
            """Register the parameters."""

        def process_weights_after_loading(self, layer):
            """Called when all weights are loaded."""

        @abc.abstractmethod
        def get_fused_moe_quant_config(self, layer):
            """A FusedMoEQuantConfig."""

        def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
            """Return the sums."""
            raise NotImplementedError

    class RoutedExperts(torch.nn.Module):
        """The attributes are those that the adapter reads; the loader does what vLLM's does without TP."""

        def __init__(self, layer_name, params_dtype, moe_config, quant_config, expert_map_manager,
                     swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None,
                     apply_router_weight_on_input=False):
            super().__init__()
            self.moe_config, self.quant_config, self.layer_name = moe_config, quant_config, layer_name
            self.activation, self.global_num_experts = moe_config.activation, moe_config.num_experts
            self.expert_map_manager, self.expert_map = expert_map_manager, expert_map_manager.expert_map
            self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta = swiglu_limit, swiglu_alpha, swiglu_beta
            self.apply_router_weight_on_input = apply_router_weight_on_input
            self.quant_method = quant_config.get_quant_method(self, layer_name)
            if isinstance(self.quant_method, FusedMoEMethodBase):
                self.quant_method.create_weights(
                    layer=self, num_experts=moe_config.num_local_experts, hidden_size=moe_config.hidden_dim,
                    unpadded_hidden_size=moe_config.hidden_dim,
                    intermediate_size_per_partition=moe_config.intermediate_size_per_partition,
                    params_dtype=params_dtype, weight_loader=self.weight_loader,
                    global_num_experts=moe_config.num_experts)

        def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id):
            """expert_id: of all experts, except for gpt-oss."""
            if self.quant_config.get_name() == "gpt_oss_mxfp4":  # all experts of this rank
                param.data[tuple(map(slice, loaded_weight.shape))].copy_(loaded_weight)
                return
            expert_id = self.expert_map_manager.map_global_to_local(expert_id)
            if expert_id < 0:
                return
            if "weight_shape" in weight_name:
                param.data[expert_id] = loaded_weight
                return
            if "scale" in weight_name or "zero" in weight_name:
                assert param.quant_method in ("group", "block")
            data = param.data[expert_id]
            if shard_id != "w2":
                half = data.shape[0] // 2
                data = data[:half] if shard_id == "w1" else data[half:]
            assert data.shape == loaded_weight.shape
            data.copy_(loaded_weight)

    class QuantizationConfig:
        """of_vllm: the method that vLLM would choose."""

        def get_quant_method(self, layer, prefix):
            return self.of_vllm

        @classmethod
        def get_name(cls):
            return cls.name

    own = {name: type("Config", (QuantizationConfig,), {"name": name, "of_vllm": None})
           for name in ("gpt_oss_mxfp4", "deepseek_v4_fp8", "compressed-tensors")}

    def register_quantization_config(quantization):
        return lambda config: own.update({quantization: config})

    def set_weight_attrs(weight, weight_attrs):
        for key, value in weight_attrs.items():
            assert not hasattr(weight, key), key
            setattr(weight, key, value)

    def replace_parameter(layer, param_name, new_tensor):
        layer.register_parameter(param_name, torch.nn.Parameter(new_tensor, requires_grad=False))

    for name in ("config", "distributed", "forward_context", "logger"):
        add_module(f"vllm.{name}", get_current_vllm_config_or_none=None, get_ep_group=None,
                   get_forward_context=None, init_logger=unittest.mock.MagicMock())
    add_module("vllm.v1.worker.workspace", current_workspace_manager=None,
               is_workspace_manager_initialized=lambda: False)
    add_module(FOUR_BITS[0], MoEActivation=MoEActivation)
    add_module(OWN[0], FusedMoEActivationFormat=FusedMoEActivationFormat,
               FusedMoEPrepareAndFinalizeModular=FusedMoEPrepareAndFinalizeModular,
               FusedMoEExpertsModular=FusedMoEExpertsModular, FusedMoEKernel=FusedMoEKernel)
    for name, thing in (("FusedMoEMethodBase", FusedMoEMethodBase), ("RoutedExperts", RoutedExperts)):
        setattr(sys.modules[MOE], name, thing)
    add_module(QUANTIZATION, register_quantization_config=register_quantization_config,
               get_quantization_config=own.__getitem__, QUANTIZATION_METHODS=list(own))
    add_module(f"{QUANTIZATION}.mxfp4", **MXFP4_METHODS)
    add_module("vllm.model_executor.utils", set_weight_attrs=set_weight_attrs,
               replace_parameter=replace_parameter)
    add_module(OWN[1], maybe_make_prepare_finalize=maybe_make_prepare_finalize)
    add_module(OWN[2], **{name: type(name, (), {}) for name in (
        "TopKWeightAndReduceNoOP", "TopKWeightAndReduceContiguous", "TopKWeightAndReduceDelegate")})
    add_module(OWN[3], FUSED_MOE_UNQUANTIZED_CONFIG=types.SimpleNamespace(quant_dtype=None))
    add_module(OWN[4], moe_kernel_quantize_input=moe_kernel_quantize_input)


def _load_four_bits():
    """Import vLLM's own classes for quantized experts, into the modules that export them."""
    importlib.import_module("vllm.platforms").current_platform.use_sync_weight_loader.return_value = False
    moe = importlib.import_module(MOE)
    base = moe.FusedMoEMethodBase = importlib.import_module(FOUR_BITS[1]).FusedMoEMethodBase
    sys.modules[f"{MOE}.unquantized_fused_moe_method"] = types.SimpleNamespace(
        UnquantizedFusedMoEMethod=type("UnquantizedFusedMoEMethod", (base,), {}))
    moe.RoutedExperts = importlib.import_module(FOUR_BITS[2]).RoutedExperts
    mxfp4 = importlib.import_module(f"{QUANTIZATION}.mxfp4")
    mxfp4.LinearBase = mxfp4.Attention = type("LinearBase", (), {})
    vars(mxfp4).update(MXFP4_METHODS)
    config = importlib.import_module(f"{QUANTIZATION}.base_config").QuantizationConfig

    class Other(config):
        """vLLM's own need the package compressed-tensors, and the model of DeepSeek-V4."""

        def get_name(self):
            return "other"

        def get_quant_method(self, layer, prefix):
            return self.of_vllm

        get_supported_act_dtypes = get_min_capability = get_config_filenames = from_config = None

    add_module(f"{QUANTIZATION}.compressed_tensors.compressed_tensors", CompressedTensorsConfig=Other)
    add_module(f"{QUANTIZATION}.online.moe_base", OnlineMoEMethodBase=type("Online", (), {}))
    add_module("vllm.models.deepseek_v4", DeepseekV4FP8Config=Other)
    add_module("vllm.models.deepseek_v41", DeepseekV4FP8Config=Other)


def load(which, four_bits=False):
    """Make the modules importable in this process: which is "stand-in" or "source".

    four_bits: also those of FOUR_BITS, which stand-ins have in any case.
    """
    _loaded.append(which)
    if which == "source":
        SOURCE.own = OWN + FOUR_BITS * four_bits
        SOURCE.load()
        if four_bits:
            _load_four_bits()
        with unittest.mock.patch("torch.compile", lambda *_, **__: lambda function: function):
            importlib.import_module(OWN[4])
    else:
        _load_stand_in()
    # The adapter asks for the version where vLLM has changed.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.33.0" if name == "vllm" else version(name)


def prepare_kernel():
    """Give vLLM's own kernel the parts of other modules that it runs on a CPU."""
    kernel = sys.modules[OWN[0]]
    kernel.current_platform.is_cuda.return_value = kernel.current_platform.is_rocm.return_value = False
    kernel.dbo_enabled = lambda: False
    kernel.UnfinalizedMoEOutput = type("UnfinalizedMoEOutput", (), {})
    kernel._resize_cache = lambda t, shape: t[: math.prod(shape)].view(shape)
    kernel.current_workspace_manager = lambda: types.SimpleNamespace(
        get_simultaneous=lambda *of: [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in of])


def is_loaded(which):
    """Whether load has made these modules importable in this process."""
    return which in _loaded
