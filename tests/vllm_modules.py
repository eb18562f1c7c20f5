"""The modules of vLLM that epmoe.integrations.vllm uses: stand-ins, or vLLM's own files.

vLLM with what it needs is too large for a test. "stand-in" makes small modules with the same names, which say
what the adapter relies on. "source" loads vLLM's own files from the folder EPMOE_VLLM_SOURCE, which contains
vllm/ (unpack the source archive of the version in docs/vllm.md there): those of OWN, with MagicMocks for
all that they import from other modules.
"""

import abc
import dataclasses
import enum
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
import unittest.mock
from pathlib import Path

import pytest

MOE = "vllm.model_executor.layers.fused_moe"
OWN = [f"{MOE}.{name}" for name in ("modular_kernel", "all2all_utils", "topk_weight_and_reduce", "config")]
_loaded = []


def source():
    """Return the folder of vLLM's files, or None."""
    return os.environ.get("EPMOE_VLLM_SOURCE")


class _Mock(types.ModuleType):
    """A module in which every name is a MagicMock, but for the modules of OWN, which are imported."""

    def __getattr__(self, name):
        if f"{self.__name__}.{name}" in OWN or name.startswith("__"):
            raise AttributeError(name)
        value = self.__dict__[name] = unittest.mock.MagicMock()
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's own files for OWN, and makes a _Mock of every other module of vllm."""

    def find_spec(self, name, path=None, target=None):
        if name in OWN:
            file = Path(source(), *name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Mock(spec.name)

    def exec_module(self, module):
        pass


def _load_source():
    if not Path(source(), "vllm").is_dir():
        raise FileNotFoundError(f"EPMOE_VLLM_SOURCE={source()}: no folder vllm in it")
    sys.meta_path.insert(0, _Finder())


def _module(name, **contents):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


def _load_stand_in():
    class FusedMoEActivationFormat(enum.Enum):
        Standard = ("standard",)

    @dataclasses.dataclass
    class ExpertTokensMetadata:
        expert_num_tokens: object
        expert_num_tokens_cpu: object

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

        def supports_async(self):
            return False

        @abc.abstractmethod
        def prepare(self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input,
                    quant_config, defer_input_quant):
            """Return rows, scales, ExpertTokensMetadata, ids, weights."""

        @abc.abstractmethod
        def finalize(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input,
                     weight_and_reduce_impl):
            """Write output."""

    def maybe_make_prepare_finalize(moe, quant_config, routing_tables=None, allow_new_interface=False,
                                    use_monolithic=False, all2all_manager=None, input_dtype=None):
        return "vLLM's own"

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", MOE):
        _module(name)
    for name in ("config", "distributed", "logger"):
        _module(f"vllm.{name}", get_current_vllm_config=None, get_ep_group=None,
                init_logger=unittest.mock.MagicMock())
    _module(OWN[0], **{c.__name__: c for c in (FusedMoEActivationFormat, ExpertTokensMetadata,
                                               FusedMoEPrepareAndFinalizeModular)})
    _module(OWN[1], maybe_make_prepare_finalize=maybe_make_prepare_finalize)
    _module(OWN[2], **{name: type(name, (), {}) for name in (
        "TopKWeightAndReduceNoOP", "TopKWeightAndReduceContiguous", "TopKWeightAndReduceDelegate")})


def load(which):
    """Make the modules importable in this process: which is "stand-in" or "source"."""
    _loaded.append(which)
    if which == "source":
        _load_source()
    else:
        _load_stand_in()
    # The adapter asks for the version where vLLM has changed.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.33.0" if name == "vllm" else version(name)


def is_loaded(which):
    """Whether load has made these modules importable in this process."""
    return which in _loaded


def need():
    """Skip the test without vLLM's files."""
    if not source():
        pytest.skip("EPMOE_VLLM_SOURCE is not set: vLLM's own classes are not tested (tests/vllm_modules.py)")
