"""Build epmoe._C: gcc for the C sources, nvcc for the kernels when there is one.

EPMOE_CUDA=auto|0|1   build the CUDA backend if nvcc is found (default), never, or fail without it
EPMOE_CUDA_ARCH       -gencode arguments, default: sm_90a code, and compute_80 PTX for other GPUs; sm_90 without the a is an error
CUDA_HOME, CC, CFLAGS as usual
EPMOE_CHAOS=N         for tests: random delays at points of the protocol, on both backends; N is their seed
EPMOE_TRACE=1         with the profiler in the megakernels

torch is not imported and not needed: the module reads tensors through DLPack's C exchange API and
binds no symbol of torch, so one abi3 module serves every torch from 2.11 on, with and without CUDA.
"""
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
WARN = "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wformat-security -Werror".split()
CFLAGS = ("-std=c11 -O2 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -fstack-protector-strong -D_GNU_SOURCE "
          "-DPy_LIMITED_API=0x030B0000").split()
ARCH = "-gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=compute_80"
NVCC = ("-std=c++17 -O3 -lineinfo -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics "
        "--expt-relaxed-constexpr -Xptxas=-warn-spills -Xptxas=-v").split()


def find_nvcc():
    wanted = os.environ.get("EPMOE_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"EPMOE_CUDA={wanted}: must be auto, 0 or 1")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which(str(Path(home, "bin", "nvcc"))) if home else shutil.which("nvcc")
    nvcc = nvcc or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None and wanted == "1":
        raise SystemExit("EPMOE_CUDA=1, but there is no nvcc (looked at CUDA_HOME and PATH)")
    return nvcc


def cuda_home(nvcc):
    """The toolkit's folder, which nvcc itself knows best (it may be a wrapper on PATH)."""
    out = subprocess.run([nvcc, "-dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True).stderr
    for line in out.splitlines():
        if "TOP=" in line:
            return Path(line.split("TOP=")[1].strip()).resolve()
    return Path(nvcc).resolve().parents[1]


def object_of(temp, source):
    """The path of a source's object file; its folder is created."""
    path = temp / source.relative_to(ROOT).parent / (source.name + ".o")
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


class Build(build_ext):
    """Compile each source by itself, side by side; link with gcc."""

    def build_extension(self, ext):
        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        temp = Path(self.build_temp).resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir(parents=True, exist_ok=True)
        cc = os.environ.get("CC", "gcc").split()
        nvcc = find_nvcc()
        flags = CFLAGS + WARN + ["-I" + str(ROOT / "csrc"), "-I" + sysconfig.get_paths()["include"]]
        jobs, libs = [], ["-lpthread", "-ldl", "-lrt"]
        sources = sorted((ROOT / "csrc").rglob("*.c"))
        chaos = int(os.environ.get("EPMOE_CHAOS") or 0)
        delays = [f"-DEP_CHAOS={chaos}"] if chaos else []
        delays += ["-DEP_TRACE"] if int(os.environ.get("EPMOE_TRACE") or 0) else []
        flags += delays
        if nvcc:
            home = cuda_home(nvcc)
            flags += ["-DEP_HAVE_CUDA", "-isystem", str(home / "include")]
            runtimes = [lib for d in ("lib64", "lib", "targets/*/lib") for lib in sorted(home.glob(d + "/libcudart_static.a"))]
            if not runtimes:
                raise SystemExit(f"no libcudart_static.a under {home}: CUDA_HOME names the toolkit; EPMOE_CUDA=0 leaves CUDA out")
            libs = [str(runtimes[0])] + libs
            arch = os.environ.get("EPMOE_CUDA_ARCH", ARCH).split()
            for cu in sorted((ROOT / "csrc/kernels").rglob("*.cu")):
                jobs.append([nvcc, *NVCC, *arch, *delays, "-I" + str(ROOT / "csrc"), "-c", str(cu), "-o", object_of(temp, cu)])
        else:
            sources = [c for c in sources if c.parent.name != "cuda"]
        if chaos:
            sources.append(ROOT / "tests/c/chaos.c")
        for c in sources:
            jobs.append([*cc, *flags, *os.environ.get("CFLAGS", "").split(), "-c", str(c), "-o", object_of(temp, c)])
        workers = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(workers) as pool:
            logs = list(pool.map(self.compile, jobs))
        (temp / "kernels.log").write_text("".join(logs))  # registers, shared memory and spills of every kernel
        objects = [job[-1] for job in jobs]
        link = [*cc, "-shared", "-o", str(out), *objects, *libs, "-Wl,--exclude-libs,ALL", "-Wl,-z,relro,-z,now",
                *os.environ.get("LDFLAGS", "").split()]
        self.compile(link)

    def compile(self, command):
        self.announce(" ".join(command), level=2)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


setup(
    ext_modules=[Extension("epmoe._C", ["csrc/python/module.c"], py_limited_api=True)],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
