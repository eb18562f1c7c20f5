"""The build: which settings cause a new build, what must not compile, and what check_kernels.py finds."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pace import HANG_S

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_build_settings_have_every_variable_of_setup(tmp_path):
    """make builds again if any variable that setup.py reads has another value."""
    names = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', (ROOT / "setup.py").read_text())) - {"MAX_JOBS"}
    bare = {n: v for n, v in os.environ.items() if n not in names and not n.startswith("MAKE")}
    shutil.copy(ROOT / "Makefile", tmp_path)

    def settings(**more):
        command = ["make", "-s", "PYTHON=python3", "build/settings"]
        subprocess.run(command, cwd=tmp_path, env=bare | more, check=True, capture_output=True,
                       timeout=HANG_S)
        return (tmp_path / "build/settings").read_text()

    plain = settings()
    assert "EPMOE_TRACE" in names and settings() == plain
    assert [n for n in sorted(names) if settings(**{n: "1"}) == plain] == []


def fake_nvcc(folder):
    """Make a folder with an nvcc that compiles nothing. Return the folder of the toolkit."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    return folder


CHOOSE = """
import json, os, sys, importlib.util, pathlib, setuptools
setuptools.setup = lambda **_: None
spec = importlib.util.spec_from_file_location("build", "setup.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
for home, cuda, gpu in json.loads(sys.argv[1]):
    os.environ.update(CUDA_HOME=home, EPMOE_CUDA=cuda)
    build.DRIVER = [pathlib.Path("/no/driver"), pathlib.Path(os.devnull if gpu else "/no/device")]
    try:
        print(*build.choose_backends())
    except SystemExit as error:
        print("error", error)
"""


def test_build_compiles_cuda_only_for_a_gpu_unless_asked(tmp_path):
    # setup.py also looks into /usr/local/cuda. No setting hides an nvcc there.
    absent = None if Path("/usr/local/cuda/bin/nvcc").exists() else str(tmp_path)
    home = str(fake_nvcc(tmp_path / "cuda"))
    only, both = "None the CPU backend only, in about 10 s: ", f"{home}/bin/nvcc the CPU and CUDA backends"
    cases = [(home, "auto", False, f"{only}there is {home}/bin/nvcc, but no GPU. EPMOE_CUDA=1 builds"),
             (home, "", False, f"{only}there is"), (home, "auto", True, both), (home, "1", False, both),
             (home, "0", True, f"{only}EPMOE_CUDA=0"), (home, "2", True, "error EPMOE_CUDA=2 is not valid"),
             (absent, "auto", True, f"{only}there is no nvcc in CUDA_HOME"),
             (absent, "1", True, "error EPMOE_CUDA=1, but nvcc was not found")]
    cases = [case for case in cases if case[0]]
    done = subprocess.run([sys.executable, "-c", CHOOSE, json.dumps([case[:3] for case in cases])], cwd=ROOT,
                          capture_output=True, text=True, timeout=HANG_S)
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stdout + done.stderr
    assert [line for line, case in zip(lines, cases) if not line.startswith(case[3])] == []


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize("wanted, asks", [(None, True), ("0", False), ("auto", False), ("1", False)])
def test_build_with_make_compiles_cuda_without_a_gpu(tmp_path, wanted, asks):
    """Where EPMOE_CUDA is not set and there is an nvcc, make asks setup.py for the CUDA backend."""
    bare = {n: v for n, v in os.environ.items() if n != "EPMOE_CUDA" and not n.startswith("MAKE")}
    setting = {} if wanted is None else {"EPMOE_CUDA": wanted}
    done = subprocess.run(["make", "-n", "-W", "setup.py", "PYTHON=python3", "build", "wheels"], cwd=ROOT,
                          env=bare | setting | {"CUDA_HOME": str(fake_nvcc(tmp_path))}, capture_output=True,
                          text=True, timeout=HANG_S)
    for command in ("python3 setup.py -q build_ext --inplace", "python3 tests/wheels.py dist"):
        assert (f"EPMOE_CUDA=1 {command}" in done.stdout) == asks and command in done.stdout, done.stdout


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize("arch, compiles", [("compute_90", False), ("compute_80", True)])
def test_build_has_no_empty_kernels_for_hopper(arch, compiles):
    """compute_90 must not compile, because only compute_90a has wgmma. The error names sm_90a.

    Older GPUs use other kernels, so for them these kernels may be empty.
    """
    command = ["nvcc", "-std=c++17", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", f"-arch={arch}",
               "-ptx", str(ROOT / "csrc/kernels/gemm/gemm_bf16.cu"), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode == 0) == compiles, done.stderr
    assert ("code=sm_90a" in done.stderr) != compiles, done.stderr


def sass(kernel, *instructions):
    """Return the text that cuobjdump -sass prints for a kernel."""
    lines = [f"        /*0000*/                   {i} ;" for i in instructions]
    return "\n".join([f"\t\tFunction : {kernel}", *lines]) + "\n"


GOOD = {"gemm_bf16.cu.o": sass("gemm_kernel", "HGMMA.64x256x16.F32.BF16 R24"),
        "fused_f16.cu.o": sass("mega_kernel_of", "HGMMA.64x192x16.F32 R24")}


@pytest.mark.parametrize("change, fault", [
    ({}, ""),
    ({"gemm_bf16.cu.o": sass("gemm_kernel", "HFMA2 R1")}, "gemm_kernel: 0 HGMMA instructions, 0"),
    ({"fused_f16.cu.o": sass("mega_kernel_of", "HFMA2 R1")}, "mega_kernel_of: 0 HGMMA instructions, 0"),
    ({"fused_bf16.cu.o": sass("mega_kernel_more", "HGMMA.64x192x16.F32 R24", "STL [R1], R2",
                              "LDL.64 R2, [R1]")}, "mega_kernel_more: 1 HGMMA instructions, 2 accesses"),
    ({"fused_f16.cu.o": sass("other", "HGMMA.64x192x16.F32 R24")}, "found no kernel named mega_kernel"),
    ({"gemm_bf16.cu.o": sass("other", "HGMMA.64x192x16.F32 R24")}, "found no kernel named gemm_kernel"),
], ids=["good", "gemm", "mega", "local", "no_mega", "no_gemm"])
def test_build_check_finds_faults_of_gemm_kernels(tmp_path, change, fault):
    """check_kernels.py finds missing HGMMA instructions, local memory and missing kernels."""
    for name in ("cuobjdump", "nvdisasm"):
        (tmp_path / name).write_text('#!/bin/sh\ncat "$2"\n')
        (tmp_path / name).chmod(0o755)
    for name, text in (GOOD | change).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "kernels.log").write_text("".join(
        f"ptxas info    : Compiling entry function 'k{i}' for 'sm_90a'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 90 registers, used 1 barriers\n" for i in range(10)))
    command = [sys.executable, str(ROOT / "tests/check_kernels.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S,
                          env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert done.returncode == (1 if fault else 0) and fault in done.stdout, done.stdout + done.stderr
