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


SETUP = """
import json, os, sys, importlib.util, pathlib, setuptools
setuptools.setup = lambda **_: None
spec = importlib.util.spec_from_file_location("build", "setup.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
"""
CHOOSE = SETUP + """
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


COMPILE = SETUP + """
import logging
from setuptools.dist import Distribution
command, folder = build.Build(Distribution()), pathlib.Path(sys.argv[1])
calls, call = [], command.call
command.call = lambda words: calls.append(words) or call(words)
def make(*flags):
    calls.clear()
    said = command.compile(["gcc", "-Wall", *flags, "-c", str(folder / "a.c"), "-o", str(folder / "a.c.o")])
    return len(calls), "unused" in said
found = [make(), make(), make("-DX"), make("-DX")]
for name in ("a.h", "a.c"):
    os.utime(folder / name)
    found.append(make("-DX"))
(folder / "a.h").unlink()
try:
    make("-DX")
except SystemExit as error:
    found.append("a.h" in str(error))
(folder / "a.h").write_text("")
found.append(make("-DX"))
print(json.dumps(found))
"""


def test_build_compiles_what_has_changed(tmp_path):
    """A source, a header that it includes, or the command.  Warnings are said each time."""
    (tmp_path / "a.c").write_text('#include "a.h"\nstatic int unused;\n')
    (tmp_path / "a.h").write_text("")
    done = subprocess.run([sys.executable, "-c", COMPILE, str(tmp_path)], cwd=ROOT, capture_output=True,
                          text=True, timeout=HANG_S)
    assert json.loads(done.stdout or "0") == [
        [1, True], [0, True], [1, True], [0, True], [1, True], [1, True], True, [1, True]], done.stderr


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


NO_NVCC = not shutil.which("nvcc")
IN_THE_HEAD = [f"room for every rank in {name}" for name in ("NUM_SEND", "NUM_RECV", "RANK_ROWS", "SOURCES")]
ROW = 'X(SILU, "silu", ONE, 1.0f)'
ACTIVATION = "activation.h", ROW, ROW + ' X(NEW, "new", ONE, 1.0f)'
GATE = "activation.h", ROW, ROW + ' X(NEW, "new", GATES_FIRST, 1.0f)'
KIND = "gemm_params.h", "EP_GEMM_WGRAD = 2,", "EP_GEMM_WGRAD = 2, EP_GEMM_NEW = 3,"
MODE = "shape.h", "EP_LOW_LATENCY_SCATTER = 4,", "EP_LOW_LATENCY_SCATTER = 4, EP_COMBINE_NEW = 5,"
DTYPE = "shape.h", 'X(BF16, 2, 2, "bfloat16")', 'X(BF16, 2, 2, "bfloat16") X(NEW, 3, 4, "new")'
FP8 = "params.h", "EP_FP8_UE8M0 = 3,", "EP_FP8_UE8M0 = 3, EP_FP8_NEW = 4,"
BARRIER = 'B(BARRIER, barrier, Barrier, "barrier")'
OPERATION = "ops.h", BARRIER, BARRIER + ' B(NEW, new, New, "new")'


def stops(*files):
    """Return patterns of what gcc says of EP_HANDLES_ALL in these files."""
    return [rf"/{re.escape(name)}:[\d:]* note: in expansion of macro .EP_HANDLES_ALL" for name in files]


def errors_after(change, source, folder, *compiler):
    """Return what the compiler says of a source after a change of a header in csrc/protocol."""
    name, old, new = change
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    header = folder / "csrc/protocol" / name
    text = header.read_text()
    assert text.count(old) == 1
    header.write_text(text.replace(old, new))
    done = subprocess.run([*compiler, "-I", folder / "csrc", folder / "csrc" / source], capture_output=True,
                          text=True, timeout=HANG_S)
    assert done.returncode
    return done.stderr


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize("change, source, texts", [
    (("shape.h", "EP_MAX_RANKS 8u", "EP_MAX_RANKS 9u"), "cpu/low_latency.c", IN_THE_HEAD),
    (("shape.h", "EP_MAX_RANKS 8u", "EP_MAX_RANKS 32u"), "runtime/world.c", ["a mask of 32 bits"]),
    (("shape.h", "EP_MAX_TOPK 32u", "EP_MAX_TOPK 33u"), "cpu/ops.c", ["is a choice of a token"]),
    (("shape.h", "EP_MAX_EXPERTS 1024u", "EP_MAX_EXPERTS 65535u"), "cpu/low_latency.c",
     ["no expert is taken"]),
    (("low_latency.h", "EP_LL_MAX_TOKENS 4096u", "EP_LL_MAX_TOKENS 65536u"), "cpu/low_latency.c",
     ["holds a number of tokens"]),
    (ACTIVATION, "cpu/activation.c", stops("activation_math.h")),
    (ACTIVATION, "cpu/quantize.c", stops("activation_math.h")),
    (GATE, "layer/activation.c", ["gates stand from SWIGLU"]),
    (KIND, "kernels/gemm/gemm_maps.h", stops("gemm_params.h", "gemm_maps.h")),
    (KIND, "kernels/gemm/gemm_tile_scheduler.h", stops("gemm_tile_scheduler.h")),
    (MODE, "cpu/ops.c", stops("layout.h", "ops.c")),
    (MODE, "layer/layer.c", ["every mode has a name"]),
    (DTYPE, "cpu/rows.c", stops("rows.c")),
    (FP8, "cpu/rows.c", stops("low_latency.h", "rows.c")),
    (OPERATION, "layer/layer_ops.c", [r"layer_ops.c:[^\n]*EP_OP_NEW.[^\n]* not handled(.|\n)*" * 3]),
], ids=lambda value: value[-1] if type(value) is tuple else str(value) if type(value) is str else "")
def test_build_stops_where_a_limit_or_a_list_has_grown(tmp_path, change, source, texts):
    """Nothing indexes past its array, and no new member is taken for another one."""
    said = errors_after(change, source, tmp_path, "gcc", "-std=c11", "-Wall", "-Werror", "-D_GNU_SOURCE",
                        "-fsyntax-only", "-x", "c")
    for text in texts:
        assert re.search(text, said), (text, said)


@pytest.mark.skipif(NO_NVCC, reason="no nvcc")
@pytest.mark.parametrize("change, source, name", [
    (ACTIVATION, "kernels/quantize/quantize.cu", "activation_math.h"),
    (ACTIVATION, "kernels/gemm/activation.cu", "activation_math.h"),
    (ACTIVATION, "kernels/gemm/gemm.cu", "activation_math.h"),
    (MODE, "kernels/stage/combine.cu", "combine.cuh"),
    (DTYPE, "kernels/stage/combine.cu", "combine.cu"),
    (("layout.h", "EP_CHUNK_SLOTS 4u", "EP_CHUNK_SLOTS 8u"), "kernels/stage/combine.cu", "open_chunks.cuh"),
], ids=lambda value: value[-1] if type(value) is tuple else str(value) if type(value) is str else "")
def test_build_of_kernels_stops_where_a_list_has_grown(tmp_path, change, source, name):
    said = errors_after(change, source, tmp_path, "nvcc", "-std=c++17", "--expt-relaxed-constexpr",
                        "-arch=sm_90a", "-ptx", "-o", os.devnull)
    assert re.search(rf"{re.escape(name)}\(\d+\): error: static assertion", said), said


@pytest.mark.skipif(NO_NVCC, reason="no nvcc")
@pytest.mark.parametrize("header, use", [
    ("gemm/gemm_epilogue.cuh", "ep_gemm_activate<EP_ACT_SILU>((const EpGemmParams *)p, d, d)"),
    ("quantize/quantize.cuh",
     "ep_quantize_task<EP_F16, EP_ACT_SILU, true, 2>(*(const EpQuantizeParams *)p, 0, 0, 0)"),
    ("gemm/activation.cuh",
     "ep_act_row<EP_ACT_GEGLU_TANH, EP_F16, false>(*(const EpActivationParams *)p, 0)")])
def test_build_refuses_a_kernel_of_its_own_for_a_shared_activation(tmp_path, header, use):
    source = tmp_path / "kernel.cu"
    source.write_text(f'#include "kernels/{header}"\n'
                      f'__global__ void k(const void *p, float *d) {{ {use}; }}\n')
    command = ["nvcc", "-std=c++17", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", "-arch=sm_90a", "-ptx",
               str(source), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode and "read from the parameters" in done.stderr, done.stderr


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
    ({"fused_f16.cu.o": sass("other", "HGMMA.64x192x16.F32 R24")}, "found no kernel that multiplies"),
    ({"gemm_bf16.cu.o": sass("other", "HGMMA.64x192x16.F32 R24")}, "found no kernel that multiplies"),
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
