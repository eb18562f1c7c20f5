"""How SGLang finds epmoe: the entry point, the hooks, and what is an error; and the page runs."""

import doctest
import importlib
import sys
import unittest.mock

import pytest

import frameworks
import sglang_modules
from cases import process_ranks
from rank_processes import run
from sglang_modules import message, server

pytestmark = pytest.mark.cpu_only


def _alone(rank, world_size, which):
    """The examples run. Without the DeepEP backend a warning says so. Changed classes are errors."""
    sglang_modules.load(which)
    from epmoe.integrations import sglang as integration

    deepep, moe = sys.modules[sglang_modules.DEEPEP], sys.modules[f"{sglang_modules.MOE}.utils"]
    own = deepep.DeepEPDispatcher
    moe.initialize_moe_config()
    tried = doctest.testmod(integration)
    integration.use()
    server.backend = "mooncake"
    with unittest.mock.patch.object(integration.logger, "warning") as warning:
        moe.initialize_moe_config()
    warned = warning.call_args.args
    server.backend = "deepep"
    found = []
    deepep.DeepEPDispatcher = own  # as if another plugin had won
    found.append(message(moe.initialize_moe_config))
    deepep.DeepEPDispatcher = type("DeepEPDispatcher", (own,), {"drain": lambda self: None})
    found.append(message(integration.register_hooks))
    changed = {"dispatch_a": lambda self, hidden_states, topk_output, layer: None}
    deepep.DeepEPDispatcher = type("DeepEPDispatcher", (own,), changed)
    found.append(message(integration.register_hooks))
    return tried, warned[0] % warned[1:], found


@pytest.mark.parametrize("which", ("stand-in", "source"))
def test_integrations_sglang_registration(which):
    if which == "source":
        sglang_modules.SOURCE.need()
    (failed, attempted), warned, found = process_ranks(_alone, 1, which, backend=None)[0]
    assert attempted > 4 and not failed
    assert warned.startswith("epmoe is not used with --moe-a2a-backend mooncake")
    assert found[0].startswith("RuntimeError: SGLang's DeepEPDispatcher is not epmoe's")
    assert "new methods, which epmoe's adapter lacks: drain" in found[1]
    assert "dispatch_a has changed: its parameters are (self hidden_states topk_output layer)" in found[2]


@pytest.mark.long
def test_integrations_sglang_page_runs(tmp_path):
    output = frameworks.run_page("sglang.md", tmp_path, run, prepare="prepare_sglang")
    assert output.count("the same") == 2


def test_integrations_sglang_entry_point(monkeypatch):
    """SGLang calls it in every process where epmoe is installed."""
    module, name = sglang_modules.entry_point()
    register = getattr(importlib.import_module(module), name)
    monkeypatch.setitem(sys.modules, "sglang", None)  # it cannot be imported
    for value in ("", "0"):
        monkeypatch.setenv("EPMOE_SGLANG", value)
        register()
    monkeypatch.delenv("EPMOE_SGLANG")
    register()
    # SGLang would log an exception, continue, and use DeepEP.
    monkeypatch.setenv("EPMOE_SGLANG", "1")
    with pytest.raises(SystemExit, match="EPMOE_SGLANG=1: epmoe.integrations.sglang needs SGLang 0.5.23"):
        register()
    monkeypatch.setenv("EPMOE_SGLANG", "yes")
    with pytest.raises(SystemExit, match="EPMOE_SGLANG=yes: wanted 1"):
        register()
