"""The modules of SGLang that epmoe.integrations.sglang uses: stand-ins, or SGLang's own files.

SGLang with what it needs is too large for a test. "stand-in" makes small modules with the same names, which
say what the adapter relies on. "source" loads SGLang's own files from the folder EPMOE_SGLANG_SOURCE, which
contains sglang/ (unpack the wheel of the version in docs/sglang.md there): those of OWN
(framework_source.py).

Both read `server`, which a test changes, and call `recorded` where SGLang counts the tokens of experts.
"""

import abc
import collections
import enum
import importlib
import importlib.metadata
import os
import sys
import tomllib
import types
import typing
import unittest.mock
from pathlib import Path

from epmoe import EpError, reference
from framework_source import Source, add_module

SRT = "sglang.srt"
MOE = f"{SRT}.layers.moe"
BASE, DEEPEP = f"{MOE}.token_dispatcher.base", f"{MOE}.token_dispatcher.deepep"
HOOKS = f"{SRT}.plugins.hook_registry"
LAYER = f"{MOE}.fused_moe_triton.layer"
OWN = [MOE, f"{MOE}.utils", f"{MOE}.token_dispatcher", BASE, DEEPEP, LAYER, f"{SRT}.plugins", HOOKS,
       f"{SRT}.batch_overlap.two_batch_overlap", f"{SRT}.environ"]
SOURCE = Source("sglang", "EPMOE_SGLANG_SOURCE", OWN)
MAX_TOKENS = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
# What the user has chosen, and what SGLang knows of the machine and of the batch.
server = types.SimpleNamespace(is_extend=True, output_dtype="auto", has_deep_gemm=False, is_blackwell=False,
                               backend="deepep", deepep_mode="auto", deepep_config="", has_two_batches=False)
parallel = types.SimpleNamespace(nnodes=1, pp_size=1, tp_group=unittest.mock.MagicMock())
recorded = []


def quantize(x, group_size, column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False):
    """SGLang's sglang_per_token_group_quant_fp8, which is a kernel."""
    assert group_size == 128 and column_major_scales == scale_tma_aligned == scale_ue8m0
    rows, scales = reference.quantize_fp8(x, pow2=scale_ue8m0)
    return rows, reference.pack_ue8m0(scales).T.contiguous().T if scale_ue8m0 else scales


class _Recorder:
    def on_deepep_dispatch_normal(self, local_physical_count_of_layer, num_tokens_per_rank,
                                  num_tokens_per_rdma_rank, num_tokens_per_expert):
        recorded.append(("normal", local_physical_count_of_layer, num_tokens_per_expert))

    def on_deepep_dispatch_low_latency(self, local_physical_count_of_layer):
        recorded.append(("low_latency", local_physical_count_of_layer))


class _Wrapper(types.ModuleType):
    """sglang.srt.layers.deep_gemm_wrapper."""

    ENABLE_JIT_DEEPGEMM = property(lambda self: server.has_deep_gemm)
    DEEPGEMM_BLACKWELL = DEEPGEMM_SCALE_UE8M0 = property(
        lambda self: server.has_deep_gemm and server.is_blackwell)


def _load_common():
    """Make the modules that both ways need, of what runs on a GPU or knows the whole server."""
    add_module("sglang.kernels.ops.quantization.fp8_kernel", sglang_per_token_group_quant_fp8=quantize)
    add_module(f"{SRT}.eplb.expert_distribution", get_global_expert_distribution_recorder=_Recorder)
    add_module(f"{SRT}.layers.dp_attention", get_is_extend_in_batch=lambda: server.is_extend,
               is_dp_attention_enabled=lambda: True)
    wrapper = sys.modules[f"{SRT}.layers.deep_gemm_wrapper"] = _Wrapper(f"{SRT}.layers.deep_gemm_wrapper")
    sys.modules[f"{SRT}.layers"].deep_gemm_wrapper = wrapper


# ---- SGLang's own files ----


def _load_source():
    SOURCE.load()
    import sglang.srt.runtime_context as context
    import sglang.srt.utils as utils

    utils.is_npu = utils.is_hip = utils.is_cuda = lambda: False
    context.get_exec = lambda: types.SimpleNamespace(
        moe=types.SimpleNamespace(
            deepep_dispatcher_output_dtype=server.output_dtype, moe_a2a_backend=server.backend,
            moe_runner_backend="auto", deepep_mode=server.deepep_mode, deepep_config=server.deepep_config,
            disable_flashinfer_cutlass_moe_fp4_allgather=False),
        overlap=types.SimpleNamespace(
            enable_two_batch_overlap=server.has_two_batches, enable_single_batch_overlap=False,
            tbo_token_distribution_threshold=0.48))
    context.get_spec = lambda: types.SimpleNamespace(speculative_moe_runner_backend=None,
                                                     speculative_moe_a2a_backend=None)
    context.get_parallel = lambda: parallel
    flags = types.SimpleNamespace(moe=types.SimpleNamespace())
    context.get_flags = lambda: flags
    importlib.import_module("sglang.kernels.ops.quantization")
    importlib.import_module(f"{SRT}.eplb")
    importlib.import_module(f"{SRT}.layers")
    _load_common()


# ---- stand-ins ----


def _env(name, default):
    return types.SimpleNamespace(get=lambda: type(default)(os.environ.get(name, default)))


def _rows(name, format, *fields):
    cls = typing.NamedTuple(name, [(f, object) for f in fields])
    cls.format = property(lambda self: format)
    return cls


def _make_base():
    class DispatcherBaseHooks:
        def __init__(self):
            self.hook_dict = collections.OrderedDict()

        def register_hook(self, hook_fun):
            key = object()
            self.hook_dict[key] = hook_fun
            return types.SimpleNamespace(remove=lambda: self.hook_dict.pop(key, None))

    class BaseDispatcher(abc.ABC):
        def __init__(self):
            self.quant_config = {}
            self.runner_backend = None
            self.overlap_args = self.meta_overlap_args = None

        @abc.abstractmethod
        def dispatch(self, hidden_states, topk_output):
            """Return a DispatchOutput."""

        @abc.abstractmethod
        def combine(self, combine_input):
            """Return a tensor."""

        def set_quant_config(self, quant_config):
            self.quant_config = quant_config

        def set_overlap_args(self, combine_overlap_args, meta_overlap_args):
            self.overlap_args, self.meta_overlap_args = combine_overlap_args, meta_overlap_args

        def clear_overlap_args(self):
            self.overlap_args = self.meta_overlap_args = None

    add_module(BASE, DispatcherBaseHooks=DispatcherBaseHooks, BaseDispatcher=BaseDispatcher)
    return DispatcherBaseHooks, BaseDispatcher


def _make_deepep():
    hooks, base = _make_base()

    class DeepEPPDispatchHooks(hooks):
        def __call__(self, dispatcher):
            for hook in self.hook_dict.values():
                hook(dispatcher)

    class DeepEPDispatcher(base):
        def __init__(self, group, router_topk, permute_fusion=False, num_experts=None,
                     num_local_experts=None, hidden_size=None, params_dtype=None, deepep_mode=None,
                     async_finish=False, return_recv_hook=False, runner_backend=None):
            raise AssertionError("DeepEP would be used")

        def dispatch(self, hidden_states, topk_output):
            pass

        def dispatch_a(self, hidden_states, topk_output):
            pass

        def dispatch_b(self):
            pass

        def combine(self, combine_input):
            pass

        def combine_a(self, combine_input):
            pass

        def combine_b(self):
            pass

        def register_deepep_dispatch_hook(self, hook):
            pass

    class DeepEPBuffer:
        @classmethod
        def clean_buffer(cls):
            raise AssertionError("there is no DeepEP buffer")

    sent = "hidden_states", "hidden_states_scale", "topk_ids", "topk_weights"
    returned = "hidden_states", "topk_ids", "topk_weights"
    rows = (_rows("DeepEPNormalDispatchOutput", "deepep_normal", *sent, "num_recv_tokens_per_expert"),
            _rows("DeepEPLLDispatchOutput", "deepep_ll", *sent, "masked_m", "expected_m"),
            _rows("DeepEPNormalCombineInput", "deepep_normal", *returned),
            _rows("DeepEPLLCombineInput", "deepep_ll", *returned))
    add_module(DEEPEP, **{c.__name__: c for c in (DeepEPPDispatchHooks, DeepEPDispatcher, DeepEPBuffer,
                                                  *rows)})


def _make_utils():
    class DeepEPMode(enum.Enum):
        NORMAL = "normal"
        LOW_LATENCY = "low_latency"
        AUTO = "auto"

        def enable_normal(self):
            return self is not DeepEPMode.LOW_LATENCY

        def enable_low_latency(self):
            return self is not DeepEPMode.NORMAL

        def resolve(self, is_extend_in_batch):
            if self is not DeepEPMode.AUTO:
                return self
            return DeepEPMode.NORMAL if is_extend_in_batch else DeepEPMode.LOW_LATENCY

    class DispatcherOutputDtype(enum.Enum):
        BF16 = "bf16"
        FP8 = "fp8"
        NVFP4 = "nvfp4"

    def get_deepep_output_dtype(self):
        if server.output_dtype != "auto":
            return DispatcherOutputDtype(server.output_dtype)
        if "input_global_scale" in self.quant_config:
            return DispatcherOutputDtype.NVFP4
        name = f"{self.dispatch_mode.value}_dispatcher_output_dtype"
        return DispatcherOutputDtype(self.quant_config.get(
            name, self.quant_config.get("dispatcher_output_dtype", "fp8")))

    def get_moe_a2a_backend():
        return types.SimpleNamespace(value=server.backend, is_deepep=lambda: server.backend == "deepep")

    add_module(f"{MOE}.utils", DeepEPMode=DeepEPMode, DispatcherOutputDtype=DispatcherOutputDtype,
               get_deepep_output_dtype=get_deepep_output_dtype, get_moe_a2a_backend=get_moe_a2a_backend,
               get_deepep_config=lambda: server.deepep_config, initialize_moe_config=lambda: None,
               is_tbo_enabled=lambda: server.has_two_batches)


def _make_hooks():
    class HookType(enum.Enum):
        AFTER = "after"
        REPLACE = "replace"

    class HookRegistry:
        _hooks = {}

        @classmethod
        def register(cls, target, hook, hook_type):
            cls._hooks[target] = hook, hook_type

        @classmethod
        def apply_hooks(cls):
            for target, (hook, hook_type) in cls._hooks.items():
                place, _, name = target.rpartition(".")
                module, _, owner = place.rpartition(".")
                place = sys.modules.get(place) or getattr(sys.modules[module], owner)
                old = getattr(place, name)
                if isinstance(vars(place)[name], classmethod):
                    hook = classmethod(hook)
                elif hook_type is HookType.AFTER:
                    def hook(*args, old=old, after=hook):
                        result = old(*args)
                        return after(result, *args) or result
                setattr(place, name, hook)

    add_module(HOOKS, HookType=HookType, HookRegistry=HookRegistry)


def _load_stand_in():
    _make_utils()
    _make_deepep()
    _make_hooks()
    add_module(f"{SRT}.environ", envs=types.SimpleNamespace(
        SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=_env("SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE", 0),
        SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=_env(MAX_TOKENS, 128)))
    topk = typing.NamedTuple("StandardTopKOutput", [(f, object) for f in ("topk_weights", "topk_ids",
                                                                          "router_logits")])
    add_module(f"{MOE}.topk", StandardTopKOutput=topk)
    add_module(f"{SRT}.runtime_context", get_parallel=lambda: parallel)
    _load_common()


def load(which):
    """Make the modules importable in this process: which is "stand-in" or "source"."""
    _load_source() if which == "source" else _load_stand_in()
    # The adapter asks for the version where SGLang has changed.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.5.23" if name == "sglang" else version(name)


def entry_point():
    """Return (module, function) of the entry point of pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    return project["entry-points"]["sglang.srt.plugins"]["epmoe"].split(":")


def plug_in(which):
    """Do what SGLang does when a process of it starts."""
    os.environ.update(EPMOE_SGLANG="1", SGLANG_PLUGINS="epmoe")
    module, name = entry_point()
    if which == "source":
        from sglang.srt import plugins

        point = importlib.metadata.EntryPoint("epmoe", f"{module}:{name}", plugins.GENERAL_PLUGINS_GROUP)
        plugins.entry_points = lambda group: [point] if group == point.group else []
        plugins.load_plugins()
    else:
        getattr(importlib.import_module(module), name)()
        sys.modules[HOOKS].HookRegistry.apply_hooks()


def message(fn, *args, **options):
    """Return the error that fn raises, as a text."""
    try:
        fn(*args, **options)
    except (ValueError, TypeError, ImportError, NotImplementedError, RuntimeError, EpError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
