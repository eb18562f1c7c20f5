"""python -m epmoe.env, and epmoe/_C.pyi, the stubs of the native module."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epmoe
from epmoe import _C, env
from pace import HANG_S

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments, **more):
    """Run python -m epmoe.env without other EPMOE_ variables. Return its output."""
    variables = {n: v for n, v in os.environ.items() if not n.startswith("EPMOE_")}
    command = [sys.executable, "-m", "epmoe.env", *arguments]
    env = variables | {"PYTHONPATH": str(ROOT)} | more
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_gpus(report, n):
    """Return the report of a machine with n GPUs. The first and the last GPU cannot access each other."""
    gpus = [{"index": i, "name": "NVIDIA H200", "capability": "9.0", "sms": 132, "memory_bytes": 150754820096,
             "uuid": "7f2c0d5e-0000-1111-2222-0123456789ab"} for i in range(n)]
    p2p = [[abs(i - j) < n - 1 or n == 1 for j in range(n)] for i in range(n)]
    return report | {"devices": gpus, "p2p": p2p}


@pytest.mark.long
def test_env_text_has_what_a_report_needs():
    text = run()
    for word in (epmoe.__version__, torch.__version__, "memfd", "EPMOE_BACKEND", "EPMOE_CUDA_ARCH",
                 "limit memlock"):
        assert word in text


def test_env_json_has_build_and_variables():
    report = json.loads(run("--json", EPMOE_TIMEOUT_S="7", NCCL_DEBUG="WARN"))
    assert report["versions"]["torch"] == torch.__version__
    assert report["build"]["cuda"] == bool(_C.HAS_CUDA) and report["build"]["file"] == _C.__file__
    assert report["build"]["bytes"] == os.path.getsize(_C.__file__)
    assert report["variables"]["EPMOE_TIMEOUT_S"]["value"] == "7"
    assert report["variables"]["NCCL_DEBUG"]["value"] == "WARN"
    assert report["build"]["profiler"] == bool(_C.TRACE) and report["build"]["chaos"] == _C.CHAOS
    assert len(report["devices"]) == torch.cuda.device_count() == len(report["p2p"])
    assert all(len(pair) == 2 for pair in report["limits"].values())


def test_env_backend_is_the_default_device(monkeypatch):
    monkeypatch.setenv("EPMOE_BACKEND", "cpu")
    assert env.backend() == "cpu"
    monkeypatch.setenv("EPMOE_BACKEND", "tpu")
    assert "must be cpu or cuda" in env.backend()
    monkeypatch.delenv("EPMOE_BACKEND")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert env.backend() == "cpu"


def test_env_reports_misspelt_variable(monkeypatch):
    monkeypatch.setenv("EPMOE_BACKEND", "cpu")
    assert "not a variable of epmoe" not in env.text(env.report())
    monkeypatch.setenv("EPMOE_BACKND", "cpu")
    assert "not a variable of epmoe" in env.text(env.report())


def test_env_knows_build_variables(monkeypatch):
    """env knows every variable that setup.py reads, and what was built with EPMOE_TRACE and EPMOE_CHAOS."""
    names = set(re.findall(r"EPMOE_[A-Z_]+", (ROOT / "setup.py").read_text()))
    assert {"EPMOE_CHAOS", "EPMOE_TRACE"} <= names <= env.VARIABLES.keys()
    monkeypatch.setattr(_C, "CHAOS", 0)
    monkeypatch.setattr(_C, "TRACE", 0)
    text = env.text(env.report())
    assert "not a variable" not in text
    assert len(re.findall(r"^  (?:profiler|random delays) +not built$", text, re.MULTILINE)) == 2
    for name in ("EPMOE_CHAOS", "EPMOE_TRACE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(_C, "CHAOS", 77)
    monkeypatch.setattr(_C, "TRACE", 1)
    text = env.text(env.report())
    assert "not a variable" not in text
    assert "built (EPMOE_TRACE)" in text and "EPMOE_CHAOS=77" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("n", [1, 8])
def test_env_text_shows_gpus(n):
    report = with_gpus(env.report(), n)
    report["build"]["file"] = "/a" * 60
    text = env.text(report)
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("132 SMs, 140.4 GiB") == n
    assert text.count(" NO") == (2 if n > 1 else 0)


@pytest.mark.parametrize("line, version", [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
     "535.104.05"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)",
     "580.65.06"),
    ("", None),
])
def test_env_driver_version(tmp_path, line, version):
    (tmp_path / "version").write_text(line + "\nGCC version:  gcc version 12.2.0\n")
    assert env.driver_version(tmp_path / "version") == version
    assert env.driver_version(tmp_path / "missing") is None


def test_env_architectures_come_from_cuobjdump(tmp_path, monkeypatch):
    tool = tmp_path / "cuobjdump"
    tool.write_text("#!/bin/sh\ncase $1 in --list-elf) echo 'ELF file    1: _C.1.sm_90a.cubin';;\n"
                    "*) echo 'PTX file    1: _C.1.sm_80.ptx';; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert env.architectures("anything") == ["sm_80 (PTX)", "sm_90a"]


def test_env_says_how_to_get_cuda(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "nvcc"
    tool.parent.mkdir()
    tool.write_text("")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    report = env.report()
    assert report["build"]["nvcc"] == str(tool)
    report["build"].update(cuda=False, nvcc="/n/nvcc")
    text = env.text(report)
    assert "not built. To build it with /n/nvcc: EPMOE_CUDA=1 pip install ." in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    report["build"].update(nvcc=None)
    assert "not built: the build needs nvcc" in env.text(report)
    report["build"].update(cuda=True)
    assert re.search("^  CUDA backend +built$", env.text(report), re.MULTILINE)


def test_env_stubs_match_the_native_module():
    tree = ast.parse((ROOT / "epmoe/_C.pyi").read_text()).body
    functions = {n.name: n for n in tree if isinstance(n, ast.FunctionDef)}
    constants = {n.target.id for n in tree if isinstance(n, ast.AnnAssign)}
    real = {n: getattr(_C, n) for n in dir(_C) if not n.startswith("__")}
    assert set(functions) == {n for n, v in real.items() if callable(v)}
    assert constants == {n for n, v in real.items() if isinstance(v, (int, tuple))}
    # The error of a call with one argument too many names the expected number.
    for name, f in functions.items():
        wanted = len(f.args.posonlyargs)
        with pytest.raises(TypeError, match=f"wanted {wanted} argument"):
            real[name](*[None] * (wanted + 1))
