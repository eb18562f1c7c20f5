"""Prints what a bug report needs: versions, the build, devices, limits and settings.

    python -m epmoe.env           plain text, 80 columns
    python -m epmoe.env --json    the same as JSON
    torchrun .. -m epmoe.env --nodes    the rates between the nodes, and warnings (env_nodes.py)

Without --nodes it works without a GPU and without torch.distributed.  It starts no rank and changes nothing.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

import epmoe
from epmoe import _C
from epmoe.comm.device import pick_device

VARIABLES = {
    "EPMOE_BACKEND": "run: cpu or cuda; unset: cuda where there is a GPU and a CUDA build",
    "EPMOE_TIMEOUT_S": "run: timeout in seconds of a wait for a living rank; unset: 300",
    "EPMOE_NODE_TIMEOUT_S": "run: seconds after which a host that does not answer counts as gone; unset: 2",
    "EPMOE_SHARE_GPU": "run: 1 lets several ranks use one GPU (tests: correct, but slow); unset: an error",
    "EPMOE_FLIGHT_RECORD": "run: folder where each rank writes its flight record when a world ends; unset: "
                           "none",
    "EPMOE_VLLM": "run: 1: vLLM's expert-parallel MoE layers use epmoe; unset or 0: they do not",
    "EPMOE_SGLANG": "run: 1: SGLang's MoE layers use epmoe instead of DeepEP; unset or 0: they do not",
    "EPMOE_CUDA": "build: the CUDA backend: 0 never, 1 always, auto (unset) if nvcc and a GPU",
    "EPMOE_CUDA_ARCH": "build: nvcc's -gencode arguments; unset: sm_90a code, compute_80 PTX",
    "EPMOE_CHAOS": "build: seed of random delays in the protocol, for tests; unset or 0: no delays",
    "EPMOE_TRACE": "build: 1: with the profiler in the fused kernels; unset or 0: without",
    "EPMOE_WHEEL": "build: 1: the version ends with what was built, as +cpu; unset or 0: without",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this process may use; it numbers them in this order",
    "RANK": "torchrun: number of this process",
    "WORLD_SIZE": "torchrun: number of processes",
    "LOCAL_RANK": "torchrun: number of this process on its machine",
    "LOCAL_WORLD_SIZE": "torchrun: processes on this machine",
    "MASTER_ADDR": "torchrun: where the processes meet",
    "MASTER_PORT": "torchrun: where the processes meet",
}


def driver_version(path="/proc/driver/nvidia/version"):
    """Return the version of the NVIDIA kernel driver, or None."""
    try:
        found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", Path(path).read_text())
    except OSError:
        return None
    return found and found[1]


def architectures(path):
    """Return the GPU architectures that the module has code for.

    None if cuobjdump, of the CUDA toolkit, is missing.
    """
    tool = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if not tool:
        return None
    names = set()
    for kind, suffix in (("--list-elf", ""), ("--list-ptx", " (PTX)")):
        done = subprocess.run([tool, kind, path], capture_output=True, text=True, timeout=60)
        names |= {name + suffix for name in re.findall(r"\bsm_\d+[a-z]?\b", done.stdout)}
    return sorted(names)


def nvcc():
    """Return the nvcc that a build would use, or None."""
    home = os.environ.get("CUDA_HOME")
    own = shutil.which(os.path.join(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    return own or shutil.which("/usr/local/cuda/bin/nvcc")


def cuda_backend(b):
    """Return whether the module has the CUDA backend, and how to get it."""
    if b["cuda"]:
        return "built"
    if b["nvcc"]:
        return (f"not built. To build it with {b['nvcc']}: EPMOE_CUDA=1 pip install . (in a clone of the "
                "repository; there, make builds it in place)")
    return "not built: the build needs nvcc, of the CUDA toolkit; or install a wheel for CUDA"


def build():
    """Return the facts about the native module."""
    path = Path(_C.__file__)
    return {"file": str(path), "bytes": path.stat().st_size, "cuda": bool(_C.HAS_CUDA),
            "architectures": architectures(path) if _C.HAS_CUDA else [], "nvcc": nvcc(),
            "profiler": bool(_C.TRACE), "chaos": _C.CHAOS}


def devices():
    """Return the facts about each GPU that torch can use."""
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append({"index": i, "name": p.name, "capability": f"{p.major}.{p.minor}",
                      "sms": p.multi_processor_count,
                      "memory_bytes": p.total_memory, "uuid": str(getattr(p, "uuid", "unknown"))})
    return found


def backend():
    """Return the device that a layer uses by default, or why there is none."""
    try:
        return str(pick_device())
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"


def limits():
    """Return {name: [soft, hard]}; None is unlimited."""
    kinds = {"memlock_bytes": resource.RLIMIT_MEMLOCK, "open_files": resource.RLIMIT_NOFILE}
    return {name: [None if v == resource.RLIM_INFINITY else v for v in resource.getrlimit(kind)]
            for name, kind in kinds.items()}


def memfd():
    """Whether this machine provides anonymous memory files (memfd), which CPU heaps need."""
    try:
        os.close(os.memfd_create("epmoe-env"))
        return True
    except OSError:
        return False


def variables():
    """Return the environment variables that epmoe uses, and all others of epmoe and NCCL that are set.

    The latter show misspelt names: an unknown EPMOE_* variable has no effect.
    """
    more = sorted(n for n in os.environ if re.match("(EPMOE|NCCL|TORCH_NCCL|GLOO|TORCHELASTIC)_", n)
                  and n not in VARIABLES)
    table = {n: {"value": os.environ.get(n), "meaning": meaning} for n, meaning in VARIABLES.items()}
    for n in more:
        table[n] = {"value": os.environ[n],
                    "meaning": "not a variable of epmoe" if n.startswith("EPMOE_") else ""}
    return table


def report():
    """Return everything, as a dict of plain values."""
    gpus = devices()
    return {
        "versions": {"epmoe": epmoe.__version__, "torch": torch.__version__,
                     "python": platform.python_version(),
                     "cuda_runtime_of_torch": torch.version.cuda, "nvidia_driver": driver_version(),
                     "system": platform.platform(), "libc": " ".join(platform.libc_ver())},
        "build": build(),
        "backend": backend(),
        "cpu": {"cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0)),
                "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "memfd": memfd()},
        "devices": gpus,
        # [i][j]: whether device i can access the memory of device j directly.
        "p2p": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(len(gpus))]
                for i in range(len(gpus))],
        "limits": limits(),
        "variables": variables(),
    }


def text(r):
    """Return a report as text of at most 80 columns."""
    lines = []

    def put(name, value):
        lines.extend(textwrap.wrap(f"  {name:22} {value}", 80, subsequent_indent=" " * 25,
                                   break_long_words=True))

    def gib(num_bytes):
        return f"{num_bytes / 2**30:.1f} GiB"

    def limit(pair):
        return "soft {}, hard {}".format(*("unlimited" if v is None else v for v in pair))

    lines.append("Versions")
    for name, value in r["versions"].items():
        put(name.replace("_", " "), value or "none")
    b = r["build"]
    lines.append("\nBuild")
    put("module", b["file"])
    put("size", f"{b['bytes'] / 2**10:.0f} KiB")
    put("CUDA backend", cuda_backend(b))
    if b["cuda"]:
        names = b["architectures"]
        put("kernels for", "unknown (cuobjdump is not installed)" if names is None else ", ".join(names))
    put("profiler", "built (EPMOE_TRACE)" if b["profiler"] else "not built")
    delays = f"built (EPMOE_CHAOS={b['chaos']}): slow, for tests only" if b["chaos"] else "not built"
    put("random delays", delays)
    put("device by default", r["backend"])
    lines.append("\nCPU")
    put("cores", f"{r['cpu']['cores']}, {r['cpu']['usable_cores']} usable by this process")
    put("memory", gib(r["cpu"]["memory_bytes"]))
    missing = "" if r["cpu"]["memfd"] else ", which this machine does not provide"
    put("heaps are made of", f"memfd{missing}; the size of /dev/shm does not matter")
    for name, pair in r["limits"].items():
        put("limit " + name.replace("_", " "), limit(pair))
    lines.append("\nGPUs" if r["devices"] else "\nGPUs: none that torch can use")
    for d in r["devices"]:
        put(f"cuda:{d['index']}",
            f"{d['name']}, capability {d['capability']}, {d['sms']} SMs, {gib(d['memory_bytes'])}")
        put("", d["uuid"])
    if r["p2p"]:
        lines.append("\nPeer access (row reaches column)")
        put("", " ".join(f"{j:3}" for j in range(len(r["p2p"]))))
        for i, row in enumerate(r["p2p"]):
            cells = ("-" if i == j else "yes" if ok else "NO" for j, ok in enumerate(row))
            put(f"cuda:{i}", " ".join(f"{cell:>3}" for cell in cells))
    lines.append("\nVariables")
    for name, v in r["variables"].items():
        if v["value"] is not None or not v["meaning"].startswith("torchrun"):
            put(name, f"{'(unset)' if v['value'] is None else repr(v['value'])}  {v['meaning']}".rstrip())
    if all(r["variables"][name]["value"] is None for name in VARIABLES
           if VARIABLES[name].startswith("torchrun")):
        put("of torchrun", "(none set)")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m epmoe.env", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--nodes", action="store_true",
                        help="under torchrun over several nodes: measure the rates between each two of them")
    args = parser.parse_args(arguments)
    if args.nodes:
        from . import env_nodes

        if (r := env_nodes.run()) is not None:
            rates = [{"nodes": list(pair), "bytes_per_second": of} for pair, of in r["rates"].items()]
            print(json.dumps({**r, "rates": rates}, indent=2) if args.json
                  else env_nodes.text(r["rates"], r["warnings"]))
        return
    r = report()
    print(json.dumps(r, indent=2) if args.json else text(r))


if __name__ == "__main__":
    sys.exit(main())
