"""vLLM: experts of 4 bits are multiplied by epmoe, where epmoe moves their tokens.

A quantisation of vLLM is a configuration, which chooses a method for each layer.  use() registers these
configurations in the place of vLLM's, with vLLM's own register_quantization_config:

    gpt_oss_mxfp4         the experts of gpt-oss: MXFP4
    deepseek_v4_fp8       those of DeepSeek-V4: MXFP4
    compressed-tensors    experts in the format pack-quantized: INT4, groups of 32, 64 or 128

They choose Mxfp4Method and Int4Method for experts that epmoe can multiply, and what vLLM chooses for all
other layers.  A method creates the parameters as checkpoints hold them, so that vLLM loads them, repacks them
into the layout of epmoe's kernels, and runs vLLM's modular kernel with EpmoeExperts.
"""

import types
import weakref

import torch
from torch import nn

from vllm.model_executor.layers.fused_moe import (FusedMoEMethodBase, RoutedExperts, all2all_utils,
                                                  modular_kernel as _kernel)
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.quantization import (QUANTIZATION_METHODS, get_quantization_config,
                                                     register_quantization_config)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoEMethod
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.logger import init_logger

from ..comm.device import capabilities
from ..gemm import four_bit
from ..gemm.activations import GptOss, SwiGLU
from ..gemm.four_bit import Int4, Mxfp4
from ..gemm.grouped import grouped_gemm
from .layers import check_methods

__all__ = ["EpmoeExperts", "Int4Method", "Mxfp4Method", "use"]

# What vLLM calls, and with what; and what it is called with.
_METHOD = {"create_weights": "self layer num_experts hidden_size intermediate_size_per_partition "
                             "params_dtype extra_weight_attrs",
           "get_fused_moe_quant_config": "self layer",
           "apply": "self layer x topk_weights topk_ids shared_experts shared_experts_input"}
_EXPERTS = {"workspace_shapes": "self M N K topk global_num_experts local_num_experts expert_tokens_meta "
                                "activation",
            "apply": "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
                     "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
                     "apply_router_weight_on_input",
            "finalize_weight_and_reduce_impl": "self"}
_KERNEL = {"__init__": "self prepare_finalize fused_experts",
           "apply": "self hidden_states w1 w2 topk_weights topk_ids activation global_num_experts expert_map "
                    "apply_router_weight_on_input shared_experts shared_experts_input"}

logger = init_logger("vllm.epmoe")


class EpmoeExperts(_kernel.FusedMoEExpertsModular):
    """The products of one MoE layer, for rows that epmoe has moved.

    The rows are grouped by expert, and have one expert each.  The weights of the router are left to the
    combine.

    Args:
        moe_config: vLLM's FusedMoEConfig.
        quant_config: vLLM's FusedMoEQuantConfig of the rows.
        mover: The EpmoePrepareAndFinalize of the layer.
        activation: One of grouped_gemm's.
        layer: The layer, of which each call takes scales, zeros and biases.  When vLLM loads new weights, it
            keeps the parameters and copies the new numbers to them.

    Examples:
        See docs/vllm.md.
    """

    def __init__(self, moe_config, quant_config, mover, activation, layer):
        super().__init__(moe_config, quant_config)
        self._mover, self._activation = mover, activation
        self._layer = weakref.ref(layer)  # which has this object

    @staticmethod
    def activation_format():
        """Return vLLM's name for the rows of all experts in one tensor.

        Examples:
            See docs/vllm.md.
        """
        return _kernel.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device():
        return True  # `reason_against` has asked for the device of the layer

    @staticmethod
    def _supports_no_act_and_mul():
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return activation_key is None

    @staticmethod
    def _supports_activation(activation):
        return activation.value in ("silu", "swigluoai", "swigluoai_uninterleave")

    @staticmethod
    def _supports_parallel_config(moe_parallel_config):
        return moe_parallel_config.use_all2all_kernels

    @staticmethod
    def _supports_batch_invariance():
        return True

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta,
                         activation):
        """Return the shapes of two workspaces, which are not needed, and of the output.

        Args:
            M: The rows.
            N: Not read, and so are all but K.
            K: H.
            topk: 1.
            global_num_experts: E.
            local_num_experts: Those of this rank.
            expert_tokens_meta: None.
            activation: vLLM's.

        Examples:
            See docs/vllm.md.
        """
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self):
        """Return what is left to do: all.

        Examples:
            See docs/vllm.md.
        """
        return TopKWeightAndReduceDelegate()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts,
              expert_map, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta,
              apply_router_weight_on_input):
        """Multiply the rows of each expert with its weights.  Local to a rank.

        Args:
            output: [M, H] of the dtype of the rows, to write.  Rows that have no expert here are undefined.
            hidden_states: [M, H], as the mover's prepare returned them.
            w1: [L, 2I, H/2] uint8, in the layout of epmoe's kernels.
            w2: [L, H, I/2] uint8, as w1.
            topk_weights: Not read, and so are all that follow.
            topk_ids: The mover knows which rows an expert has.
            activation: vLLM's name for what the layer was made with.
            global_num_experts: E.
            expert_map: Which experts are here.
            a1q_scale: None.
            a2_scale: None.
            workspace13: Empty.
            workspace2: Empty.
            expert_tokens_meta: None.
            apply_router_weight_on_input: Whether the mover has applied the weights.

        Examples:
            See docs/vllm.md.
        """
        at = {"offsets": self._mover.expert_offsets(), "expected_rows": self._mover.expected_rows()}
        h = grouped_gemm(hidden_states, w1, activation=self._activation, **at, **self._beside("w13"))
        output.copy_(grouped_gemm(h, w2, **at, **self._beside("w2")))

    def _beside(self, name):
        """Return what a product reads beside its weights: b_scale, b_zero and bias of grouped_gemm."""
        layer = self._layer()
        return {"b_scale": getattr(layer, f"{name}_weight_scale"),
                "b_zero": getattr(layer, f"{name}_weight_zero_point", None),
                "bias": getattr(layer, f"{name}_bias", None)}


class _Method(FusedMoEMethodBase):
    """What both methods share.  format: one of gemm/four_bit.py."""

    _numbers = "weight"  # what the names of the numbers have after "w13_" and "w2_"

    def __init__(self, moe, format, activation):
        super().__init__(moe)
        self._format, self._activation = format, activation
        logger.info_once("epmoe multiplies the experts in %s", format.name)

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype,
                       **extra_weight_attrs):
        """Create the parameters of a layer, as checkpoints hold them.  vLLM loads them.

        Args:
            layer: A RoutedExperts.
            num_experts: L, those of this rank.
            hidden_size: H.
            intermediate_size_per_partition: I.
            params_dtype: Of scales of INT4 and of biases.
            **extra_weight_attrs: Attributes of each parameter, with vLLM's weight_loader.

        Examples:
            See docs/vllm.md.
        """
        inner = intermediate_size_per_partition
        for name, n, k in (("w13", 2 * inner, hidden_size), ("w2", hidden_size, inner)):
            for end, (shape, dtype, kind) in self._parameters(n, k, params_dtype).items():
                # vLLM makes its models on torch's default device, which it sets.
                numbers = torch.zeros(num_experts, *shape, dtype=dtype, device=torch.get_default_device())
                p = nn.Parameter(numbers, requires_grad=False)
                layer.register_parameter(f"{name}_{end}", p)
                attrs = extra_weight_attrs | ({"quant_method": kind} if kind else {})
                if dtype == torch.uint8:
                    # A method of the layer, as vLLM's own: vLLM would keep the layer of another function.
                    attrs["weight_loader"] = types.MethodType(_load_bytes, layer)
                set_weight_attrs(p, attrs)

    def _parameters(self, n, k, dtype):
        """Return {end of the name: (shape, dtype, how vLLM splits it)} of weights [N, K] of an expert."""
        raise NotImplementedError

    def _read(self, layer, name):
        """Return the Packed of the weights "w13" or "w2" that vLLM has loaded."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer):
        """Repack what was loaded into the layout of epmoe's kernels, and make vLLM's kernel.  Collective.

        Args:
            layer: The layer of create_weights.

        Raises:
            ValueError: For weights that epmoe cannot multiply, with the name of the layer.
            EpError: As EpmoePrepareAndFinalize.

        Examples:
            See docs/vllm.md.
        """
        for name in ("w13", "w2"):
            packed = self._read(layer, name)
            kept = {self._numbers: packed.numbers, "weight_scale": packed.scales,
                    "weight_zero_point": packed.zeros}
            if (bias := getattr(layer, f"{name}_bias", None)) is not None:
                kept["bias"] = bias.data.to(self.moe.in_dtype)
            for end, t in kept.items():
                if t is not None:
                    replace_parameter(layer, f"{name}_{end}", t)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        mover = all2all_utils.maybe_make_prepare_finalize(
            moe=self.moe, quant_config=self.moe_quant_config, routing_tables=None, allow_new_interface=True,
            use_monolithic=False)
        self.moe_kernel = _kernel.FusedMoEKernel(
            mover, EpmoeExperts(self.moe, self.moe_quant_config, mover, self._activation, layer))

    def get_fused_moe_quant_config(self, layer):
        """Return vLLM's configuration of rows that are not quantized; the experts know their weights.

        Args:
            layer: Not read.

        Examples:
            See docs/vllm.md.
        """
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """Apply the experts to tokens.  Collective.

        Args:
            layer: The layer.
            x: [T, H].
            topk_weights: [T, K].
            topk_ids: [T, K].
            shared_experts: vLLM's, or None.
            shared_experts_input: Theirs, or None.

        Returns:
            [T, H].

        Raises:
            EpError: As EpmoePrepareAndFinalize.

        Examples:
            See docs/vllm.md.
        """
        return self.moe_kernel.apply(
            hidden_states=x, w1=getattr(layer, f"w13_{self._numbers}"),
            w2=getattr(layer, f"w2_{self._numbers}"), topk_weights=topk_weights, topk_ids=topk_ids,
            activation=layer.activation, global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map, apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts, shared_experts_input=shared_experts_input)


def _load_bytes(layer, param, loaded_weight, *args, **options):
    """Load as the layer does, but take numbers of 8 bits as bytes, and convert none."""
    if loaded_weight.dtype.itemsize == 1:
        loaded_weight = loaded_weight.view(torch.uint8)
    return layer.weight_loader(param, loaded_weight, *args, **options)


_load_bytes.supports_moe_loading = True  # as vLLM's own says of itself


class Mxfp4Method(_Method):
    """The method of gpt-oss, with gates and ups interleaved, and of DeepSeek-V4, with gates first.

    Examples:
        See docs/vllm.md.
    """

    weight_dtype = "gpt_oss_mxfp4"  # for vLLM's gpt-oss, which else loads single experts as those of 16 bits

    def _parameters(self, n, k, dtype):
        found = {"weight": ((n, k // 2), torch.uint8, None), "weight_scale": ((n, k // 32), torch.uint8,
                                                                              "block")}
        return found | ({"bias": ((n,), dtype, None)} if self.moe.has_bias else {})

    def _read(self, layer, name):
        return four_bit.read_mxfp4(getattr(layer, f"{name}_weight").data,
                                   getattr(layer, f"{name}_weight_scale").data,
                                   f"{layer.layer_name}.{name}_weight")


class Int4Method(_Method):
    """The method of compressed-tensors, pack-quantized.

    Examples:
        See docs/vllm.md.
    """

    _numbers = "weight_packed"

    def _parameters(self, n, k, dtype):
        group = self._format.group_size
        found = {"weight_packed": ((n, k // 8), torch.int32, "group"),
                 "weight_scale": ((n, k // group), dtype, "group"),
                 "weight_shape": ((2,), torch.int64, None)}
        if self._format.zero_points:
            found["weight_zero_point"] = (n // 8, k // group), torch.int32, "group"
        return found

    def _read(self, layer, name):
        zeros = getattr(layer, f"{name}_weight_zero_point", None)
        return four_bit.read_compressed_tensors(
            self._format, getattr(layer, f"{name}_weight_packed").data,
            getattr(layer, f"{name}_weight_scale").data, None if zeros is None else zeros.data,
            self.moe.in_dtype, f"{layer.layer_name}.{name}_weight")


# ---- vLLM's choice of methods ----


def activation_of(layer):
    """Return grouped_gemm's activation for a layer of vLLM, or None.

    Args:
        layer: A RoutedExperts.

    Examples:
        See docs/vllm.md.
    """
    name, limit, beta = layer.activation.value, layer.swiglu_limit, layer.swiglu_beta
    alpha = layer.swiglu_alpha
    if name == "silu" and alpha in (None, 1.0) and not beta:
        return "swiglu" if limit is None else SwiGLU(limit=limit)
    if name == "swigluoai" and beta in (None, 1.0):
        return GptOss(1.702 if alpha is None else alpha, 7.0 if limit is None else limit)
    if name == "swigluoai_uninterleave" and beta == 1.0 and None not in (alpha, limit):  # it has no defaults
        return SwiGLU(alpha, limit, 1)
    return None


def reason_against(layer, format):
    """Return why epmoe does not multiply the experts of a layer, or "".

    Args:
        layer: A RoutedExperts.
        format: An Mxfp4 or Int4 of gemm/four_bit.py.

    Examples:
        See docs/vllm.md.
    """
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    unit = max(four_bit.UNIT, format.group_size)
    sizes = moe.hidden_dim, moe.intermediate_size_per_partition
    if not parallel.use_all2all_kernels:
        return "no tokens move between ranks"
    if moe.moe_backend != "auto":
        return f"--moe-backend is {moe.moe_backend}"
    if parallel.enable_eplb or moe.is_lora_enabled:
        return "--enable-eplb and --enable-lora are not supported"
    if moe.in_dtype not in (torch.bfloat16, torch.float16):
        return f"tokens are {moe.in_dtype}"
    if any(size % unit for size in sizes):
        return f"sizes {sizes[0]} and {sizes[1]} are not multiples of {unit}"
    if not moe.is_act_and_mul or activation_of(layer) is None:
        return f"the activation {layer.activation.value} is not supported with its numbers"
    if isinstance(format, Int4) and moe.has_bias:
        return "biases of experts in INT4 are not supported"
    if not _is_fast_on(torch.device(moe.device)):
        return "epmoe's fast kernels are for GPUs of Hopper"
    return ""


def _is_fast_on(device):
    """Whether epmoe has fast kernels for a device, or it is a CPU, for tests."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device.type == "cpu" or device.type == "cuda" and capabilities(device).has_hopper


def _takes(layer, format):
    reason = reason_against(layer, format)
    if reason:
        logger.info_once("vLLM multiplies the experts in %s: %s", format.name, reason)
    return not reason


def _format_of(method):
    """Return the format of the experts for which vLLM has chosen a method, or None for others."""
    if type(method) in (GptOssMxfp4MoEMethod, Mxfp4MoEMethod):
        return Mxfp4()
    quant = getattr(method, "weight_quant", None)
    if quant is None or getattr(method, "input_quant", None) is not None:
        return None
    is_int4 = (quant.num_bits, quant.type, quant.strategy) == (4, "int", "group")
    if not is_int4 or quant.group_size not in (32, 64, 128) or quant.actorder in ("group", "dynamic"):
        return None
    return Int4(quant.group_size, not quant.symmetric)


def _choosing(name, quantization):
    """Return a subclass of a configuration of vLLM, which chooses epmoe's methods, or None without it.

    name: That of the subclass in this module: vLLM sends configurations to other processes.
    """
    if quantization not in QUANTIZATION_METHODS:
        return None
    base = get_quantization_config(quantization)

    def get_quant_method(self, layer, prefix):
        method = base.get_quant_method(self, layer, prefix)
        format = _format_of(method) if isinstance(layer, RoutedExperts) else None
        if format is None or not _takes(layer, format):
            return method
        kind = Mxfp4Method if isinstance(format, Mxfp4) else Int4Method
        return kind(layer.moe_config, format, activation_of(layer))

    return type(name, (base,), {"get_quant_method": get_quant_method, "__module__": __name__,
                                "__doc__": f"vLLM's {quantization}, with epmoe's methods for experts."})


GptOss4Bits = _choosing("GptOss4Bits", "gpt_oss_mxfp4")
DeepSeek4Bits = _choosing("DeepSeek4Bits", "deepseek_v4_fp8")
CompressedTensors4Bits = _choosing("CompressedTensors4Bits", "compressed-tensors")
_CONFIGURATIONS = {"gpt_oss_mxfp4": GptOss4Bits, "deepseek_v4_fp8": DeepSeek4Bits,
                   "compressed-tensors": CompressedTensors4Bits}


def use():
    """Let vLLM choose epmoe's methods for experts of 4 bits.  epmoe.integrations.vllm.use calls it.

    Raises:
        ImportError: When vLLM's classes are not those for which this adapter was written.

    Examples:
        See docs/vllm.md.
    """
    check_methods("vllm", FusedMoEMethodBase, **_METHOD)
    check_methods("vllm", _kernel.FusedMoEExpertsModular, **_EXPERTS)
    check_methods("vllm", _kernel.FusedMoEKernel, **_KERNEL)
    for cls in (EpmoeExperts, Mxfp4Method, Int4Method):
        if cls.__abstractmethods__:
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise ImportError(f"{cls.__name__}: vLLM's base class has new methods, which it lacks: {missing}")
    found = {name: config for name, config in _CONFIGURATIONS.items() if config is not None}
    for config in found.values():
        check_methods("vllm", config.__base__, get_quant_method="self layer prefix")
    for name, config in found.items():
        register_quantization_config(name)(config)
