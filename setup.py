"""Build the module epmoe._C, with gcc for the C sources and nvcc for the kernels.

These environment variables change the build:

EPMOE_CUDA       auto (default): build the CUDA backend if there are an nvcc and a GPU
                 0: build no CUDA backend
                 1: build the CUDA backend, or fail if there is no nvcc. make sets it where there is one.
EPMOE_CUDA_ARCH  -gencode arguments of nvcc. The default is code for sm_90a, and PTX for compute_80, which the
                 driver compiles for other GPUs. sm_90 without the a is an error.
EPMOE_CHAOS=N    for tests: add random delays at points of the protocol, on both backends; N is the seed
EPMOE_TRACE=1    compile the profiler into the megakernels
EPMOE_WHEEL=1    end the version with what was built, for wheels: +cpu, or +cu130 with the toolkit CUDA 13.0
CUDA_HOME, CC, CFLAGS, LDFLAGS  as usual
MAX_JOBS         the number of compilers that run at the same time

The build does not import torch. The module reads tensors through the C exchange API of DLPack, and uses no
symbol of torch. So one abi3 module works with torch 2.11 and all newer versions, with and without CUDA.
"""
import logging
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# The driver of a machine with GPUs makes these files, also in a container that is given the GPUs.
DRIVER = [Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl")]
WARN = "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wformat-security -Werror".split()
CFLAGS = ("-std=c11 -O2 -g1 -fPIC -fvisibility=hidden -ffp-contract=off -fstack-protector-strong "
          "-D_GNU_SOURCE -DPy_LIMITED_API=0x030B0000").split()
ARCH = "-gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=compute_80"
NVCC = ("-std=c++17 -O3 -lineinfo "
        "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics "
        "--expt-relaxed-constexpr -Xptxas=-warn-spills -Xptxas=-v").split()


def choose_backends():
    """Return the path of nvcc, or None to build without CUDA, and a text that says what is built."""
    wanted = os.environ.get("EPMOE_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"EPMOE_CUDA={wanted} is not valid: set it to auto, 0 or 1")
    only = "the CPU backend only, in about 10 s: "
    if wanted == "0":
        return None, only + "EPMOE_CUDA=0"
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which(str(Path(home, "bin", "nvcc"))) if home else shutil.which("nvcc")
    nvcc = nvcc or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None and wanted == "1":
        raise SystemExit("EPMOE_CUDA=1, but nvcc was not found in CUDA_HOME, PATH or /usr/local/cuda. "
                         "Install the CUDA toolkit, or set CUDA_HOME to its folder.")
    if nvcc is None:
        return None, only + "there is no nvcc in CUDA_HOME, PATH or /usr/local/cuda"
    if wanted == "auto" and not any(path.exists() for path in DRIVER):
        return None, only + f"there is {nvcc}, but no GPU. EPMOE_CUDA=1 builds the CUDA backend all the same."
    return nvcc, f"the CPU and CUDA backends, with {nvcc}, in about 6 minutes on 2 cores"


def cuda_home(nvcc):
    """Return the folder of the CUDA toolkit. nvcc prints it, also if the nvcc on PATH is a wrapper script."""
    command = [nvcc, "-dryrun", "-x", "cu", "-c", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stderr.splitlines():
        if "TOP=" in line:
            return Path(line.split("TOP=")[1].strip()).resolve()
    return Path(nvcc).resolve().parents[1]


def version_label():
    """Return what EPMOE_WHEEL adds to the version of epmoe/__init__.py: "", "+cpu" or "+cu130"."""
    if not int(os.environ.get("EPMOE_WHEEL") or 0):
        return ""
    nvcc, _ = choose_backends()
    if nvcc is None:
        return "+cpu"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", text)
    if found is None:
        raise SystemExit(f"EPMOE_WHEEL=1: {nvcc} --version prints no release, so the wheel has no name:\n{text}")
    return f"+cu{found[1]}{found[2]}"


def object_of(temp, source):
    """Create the folder of the object file of a source. Return the path of the object file."""
    path = temp / source.relative_to(ROOT).parent / (source.name + ".o")
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


def is_current(made, command):
    """Return whether an object was made by this command, and of files that have not changed since."""
    log, sources = made.with_suffix(".log"), made.with_suffix(".d")
    if not (made.exists() and sources.exists() and log.exists()
            and log.read_text().startswith(command + "\n")):
        return False
    names = sources.read_text().replace("\\\n", " ").split(": ", 1)[1].split()
    return all(os.path.exists(name) and os.stat(name).st_mtime_ns < made.stat().st_mtime_ns for name in names)


class Build(build_ext):
    """Compile the sources that have changed, in parallel, and link the objects with gcc."""

    def build_extension(self, ext):
        out = Path(self.get_ext_fullpath(ext.name)).resolve()
        temp = Path(self.build_temp).resolve()
        out.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir(parents=True, exist_ok=True)
        cc = os.environ.get("CC", "gcc").split()
        nvcc, what = choose_backends()
        self.announce(f"epmoe: building {what}", level=logging.INFO)  # pip shows it with -v
        flags = CFLAGS + WARN + ["-I" + str(ROOT / "csrc"), "-I" + sysconfig.get_paths()["include"]]
        jobs, libs = [], ["-lpthread", "-ldl", "-lrt", "-lm"]
        sources = sorted((ROOT / "csrc").rglob("*.c"))
        chaos = int(os.environ.get("EPMOE_CHAOS") or 0)
        options = [f"-DEP_CHAOS={chaos}"] if chaos else []
        options += ["-DEP_TRACE"] if int(os.environ.get("EPMOE_TRACE") or 0) else []
        flags += options
        if nvcc:
            home = cuda_home(nvcc)
            flags += ["-DEP_HAVE_CUDA", "-isystem", str(home / "include")]
            runtimes = [lib for d in ("lib64", "lib", "targets/*/lib")
                        for lib in sorted(home.glob(d + "/libcudart_static.a"))]
            if not runtimes:
                raise SystemExit(f"{home} has no libcudart_static.a. Set CUDA_HOME to the folder of a "
                                 "complete CUDA toolkit, or set EPMOE_CUDA=0 to build without CUDA.")
            libs = [str(runtimes[0])] + libs
            arch = os.environ.get("EPMOE_CUDA_ARCH", ARCH).split()
            for cu in sorted((ROOT / "csrc/kernels").rglob("*.cu")):
                jobs.append([nvcc, *NVCC, *arch, *options, "-I" + str(ROOT / "csrc"), "-c", str(cu),
                             "-o", object_of(temp, cu)])
        else:
            sources = [c for c in sources if c.parent.name != "cuda"]
        if chaos:
            sources.append(ROOT / "tests/c/chaos.c")
        for c in sources:
            jobs.append([*cc, *flags, *os.environ.get("CFLAGS", "").split(), "-c", str(c),
                         "-o", object_of(temp, c)])
        workers = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(workers) as pool:
            logs = list(pool.map(self.compile, jobs))
        # The log has the registers, shared memory and spills of every kernel.
        (temp / "kernels.log").write_text("".join(logs))
        objects = [job[-1] for job in jobs]
        self.call([*cc, "-shared", "-o", str(out), *objects, *libs, "-Wl,--exclude-libs,ALL",
                      "-Wl,-z,relro,-z,now", *os.environ.get("LDFLAGS", "").split()])

    def compile(self, job):
        """Make an object, the last word of the job, unless it is current. Return the output of the compiler."""
        made, command = Path(job[-1]), " ".join(job)
        log = made.with_suffix(".log")
        if not is_current(made, command):
            log.unlink(missing_ok=True)
            output = self.call([*job[:-2], "-MMD", "-MF", str(made.with_suffix(".d")), *job[-2:]])
            log.write_text(f"{command}\n{output}")
        return log.read_text().split("\n", 1)[1]

    def call(self, command):
        """Run a compiler or the linker. Return its output."""
        self.announce(" ".join(command), level=logging.DEBUG)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"this command failed:\n{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


setup(
    ext_modules=[Extension("epmoe._C", ["csrc/python/module.c"], py_limited_api=True)],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "egg_info": {"tag_build": version_label()}},
)
