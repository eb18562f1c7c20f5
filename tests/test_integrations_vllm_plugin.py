"""vLLM's entry point of epmoe, and the program of docs/vllm.md."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import epmoe
import frameworks
from pace import HANG_S
from rank_processes import run

pytestmark = pytest.mark.cpu_only


@pytest.mark.long
def test_integrations_vllm_page_runs(tmp_path):
    output = frameworks.run_page("vllm.md", tmp_path, run, prepare="prepare_vllm")
    assert output.count("the same") == 2


def _entry_point(module, name, **variables):
    code = (f"import sys\nimport {module} as m\nassert 'vllm' not in sys.modules\n"
            f"sys.modules['vllm'] = None\nm.{name}()\nprint('nothing done')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S,
                          env={"PATH": "", "PYTHONPATH": str(Path(epmoe.__file__).parents[1])} | variables)
    return done.stdout + done.stderr


@pytest.mark.long
def test_integrations_vllm_entry_point():
    """vLLM loads it in every process where epmoe is installed."""
    project = tomllib.loads((Path(epmoe.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["epmoe"].split(":")
    for value in ({}, {"EPMOE_VLLM": ""}, {"EPMOE_VLLM": "0"}):
        assert _entry_point(module, name, **value).strip() == "nothing done"
    assert "epmoe.integrations.vllm needs vLLM 0.33" in _entry_point(module, name, EPMOE_VLLM="1")
    assert "EPMOE_VLLM=yes: wanted 1" in _entry_point(module, name, EPMOE_VLLM="yes")
