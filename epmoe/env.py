"""Prints what a bug report needs: versions, the build, devices, limits and settings.

    python -m epmoe.env           plain text, 80 columns
    python -m epmoe.env --json    the same as JSON
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 \\
        -m epmoe.env --nodes      the rates between each two nodes, and warnings

Without --nodes it works without a GPU and without torch.distributed.  It starts no rank and changes nothing.

With --nodes it measures the exchange of rows.  The ranks with the same local number are a rail.  For each
pair of nodes all rails exchange rows at the same time, both ways, as a layer does.  Rank 0 prints the rate of
each rail and warns about slow and uneven ones.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

import epmoe
from epmoe import _C
from epmoe.comm.device import pick_device
from epmoe.testing import set_device

SLOW_GBPS = 35.0  # NCCL reaches 45 on a card of 400 Gb/s; RoCE or GPUDirect that is wrongly set up, 5 to 25
UNEVEN = 0.8  # of the median of all
_MIB = {"cuda": 64, "cpu": 4}  # that a rank sends
_TIMES = 3
Rates: TypeAlias = dict[tuple[int, int], list[float]]  # (node a, node b) -> bytes per second of each rail

VARIABLES = {
    "EPMOE_BACKEND": "run: cpu or cuda; unset: cuda where there is a GPU and a CUDA build",
    "EPMOE_TIMEOUT_S": "run: timeout in seconds of a wait for a living rank; unset: 300",
    "EPMOE_NODE_TIMEOUT_S": "run: seconds after which a host that does not answer counts as gone; unset: 2",
    "EPMOE_WRAP_TORCH": "run: 0 lets epmoe wrap no function of torch (docs/guide.md)",
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


def driver_version(path: str = "/proc/driver/nvidia/version") -> str | None:
    """Return the version of the NVIDIA kernel driver, or None."""
    try:
        found = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", Path(path).read_text())
    except OSError:
        return None
    return found and found[1]


def architectures(path: Path) -> list[str] | None:
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


def nvcc() -> str | None:
    """Return the nvcc that a build would use, or None."""
    home = os.environ.get("CUDA_HOME")
    own = shutil.which(os.path.join(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    return own or shutil.which("/usr/local/cuda/bin/nvcc")


def cuda_backend(b: dict[str, Any]) -> str:
    """Return whether the module has the CUDA backend, and how to get it."""
    if b["cuda"]:
        return "built"
    if b["nvcc"]:
        return (f"not built. To build it with {b['nvcc']}: EPMOE_CUDA=1 pip install . (in a clone of the "
                "repository; there, make builds it in place)")
    return "not built: the build needs nvcc, of the CUDA toolkit; or install a wheel for CUDA"


def build() -> dict[str, Any]:
    """Return the facts about the native module."""
    path = Path(_C.__file__)
    return {"file": str(path), "bytes": path.stat().st_size, "cuda": bool(_C.HAS_CUDA),
            "architectures": architectures(path) if _C.HAS_CUDA else [], "nvcc": nvcc(),
            "profiler": bool(_C.TRACE), "chaos": _C.CHAOS}


def devices() -> list[dict[str, Any]]:
    """Return the facts about each GPU that torch can use."""
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append({"index": i, "name": p.name, "capability": f"{p.major}.{p.minor}",
                      "sms": p.multi_processor_count,
                      "memory_bytes": p.total_memory, "uuid": str(getattr(p, "uuid", "unknown"))})
    return found


def backend() -> str:
    """Return the device that a layer uses by default, or why there is none."""
    try:
        return str(pick_device())
    except (ValueError, RuntimeError) as error:
        return f"none: {error}"


def limits() -> dict[str, list[int | None]]:
    """Return {name: [soft, hard]}; None is unlimited."""
    kinds = {"memlock_bytes": resource.RLIMIT_MEMLOCK, "open_files": resource.RLIMIT_NOFILE}
    return {name: [None if v == resource.RLIM_INFINITY else v for v in resource.getrlimit(kind)]
            for name, kind in kinds.items()}


def memfd() -> bool:
    """Whether this machine provides anonymous memory files (memfd), which CPU heaps need."""
    try:
        os.close(os.memfd_create("epmoe-env"))
        return True
    except OSError:
        return False


def variables() -> dict[str, dict[str, str | None]]:
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


def report() -> dict[str, Any]:
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


def text(r: dict[str, Any]) -> str:
    """Return a report as text of at most 80 columns."""
    lines = []

    def put(name: str, value: object) -> None:
        lines.extend(textwrap.wrap(f"  {name:22} {value}", 80, subsequent_indent=" " * 25,
                                   break_long_words=True))

    def gib(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.1f} GiB"

    def limit(pair: list[int | None]) -> str:
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


# ---- --nodes: the exchange of rows between each two nodes ----


def measure_pair(nodes: epmoe.Nodes, device: torch.device, a: int, b: int, num_bytes: int) -> float:
    """Return the bytes per second between nodes a and b, each way, or 0.0 on another node.  Collective."""
    other = {a: b, b: a}.get(nodes.node)
    splits = [num_bytes if node == other else 0 for node in range(nodes.num_nodes)]
    mine = torch.zeros(sum(splits), 1, dtype=torch.uint8, device=device)
    theirs = torch.empty_like(mine)
    best = float("inf")
    for _ in range(1 + _TIMES):  # the first one connects
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        nodes.exchange(b"")
        begin = time.perf_counter()
        nodes._exchange_rows(theirs, mine, splits, splits)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return num_bytes / best if other is not None else 0.0


def measure_rails(nodes: epmoe.Nodes, device: torch.device, num_bytes: int | None = None) -> Rates:
    """Return {(node a, node b): [bytes per second of each rail, each way]}.  Collective.

    The rate of a rail is that of its slower end.
    """
    num_bytes = num_bytes or _MIB[device.type] << 20
    found = {}
    for a in range(nodes.num_nodes):
        for b in range(a + 1, nodes.num_nodes):
            rate = measure_pair(nodes, device, a, b, num_bytes)
            rates = [struct.unpack("<d", raw)[0] for raw in nodes.exchange(struct.pack("<d", rate))]
            local = nodes.local_size
            found[a, b] = [min(rates[a * local + r], rates[b * local + r]) for r in range(local)]
    return found


def rail_warnings(found: Rates, slow_gbps: float | None) -> list[str]:
    """Return what is wrong with measured rates, as lines of text.

    Args:
        found: As measure_rails returns it.
        slow_gbps: GB/s below which a rail is slow; None: no rate is too low.

    Returns:
        A list of lines, empty where all is well.

    Examples:
        >>> from epmoe.env import rail_warnings
        >>> for line in rail_warnings({(0, 1): [44e9, 45e9, 46e9, 12e9]}, 35.0):
        ...     print(line)
        slow: rail 3 between nodes 0 and 1: 12.0 GB/s, expected at least 35
        uneven: rail 3 between nodes 0 and 1: 12.0 GB/s, 27 % of the median 44.5
    """
    lines = []
    median = statistics.median(rate for rates in found.values() for rate in rates)
    for (a, b), rates in found.items():
        for rail, rate in enumerate(rates):
            where = f"rail {rail} between nodes {a} and {b}: {rate / 1e9:.1f} GB/s"
            if slow_gbps is not None and rate < slow_gbps * 1e9:
                lines.append(f"slow: {where}, expected at least {slow_gbps:g}")
            if rate < UNEVEN * median:
                lines.append(f"uneven: {where}, {100 * rate / median:.0f} % of the median {median / 1e9:.1f}")
    return lines


def rails_text(found: Rates, lines: list[str]) -> str:
    """Return rates and warnings as text of at most 80 columns, for a few rails."""
    num = len(next(iter(found.values())))
    out = ["Rails, GB/s each way, all at the same time", "  nodes     " + "".join(f"{f'rail {r}':>8}"
                                                                                 for r in range(num))]
    out += [f"  {f'{a} - {b}':10}" + "".join(f"{rate / 1e9:8.2f}" for rate in rates)
            for (a, b), rates in found.items()]
    return "\n".join(out + (["", *lines] if lines else ["", "no rail is slow or uneven"]))


def report_rails() -> tuple[Rates, list[str]] | None:
    """Measure.  Return rates and warnings on rank 0, None on the other ranks."""
    if "RANK" not in os.environ:
        sys.exit("python -m epmoe.env --nodes: start it on every node with torchrun, for example: torchrun "
                 "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 -m epmoe.env "
                 "--nodes")
    on_gpu = torch.cuda.is_available()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    device = set_device(int(os.environ["LOCAL_RANK"]), local) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        with epmoe.Nodes() as nodes:
            if nodes.num_nodes == 1:
                sys.exit(f"python -m epmoe.env --nodes: the {nodes.size} ranks are on one node")
            found = measure_rails(nodes, device)
            lines = rail_warnings(found, SLOW_GBPS if on_gpu else None)
            return None if nodes.rank else (found, lines)
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m epmoe.env", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--nodes", action="store_true",
                        help="under torchrun over several nodes: measure the rates between each two of them")
    args = parser.parse_args(arguments)
    if args.nodes:
        if (of_rails := report_rails()) is not None:
            found, lines = of_rails
            rates = [{"nodes": list(pair), "bytes_per_second": of} for pair, of in found.items()]
            print(json.dumps({"rates": rates, "warnings": lines}, indent=2) if args.json
                  else rails_text(found, lines))
        return
    r = report()
    print(json.dumps(r, indent=2) if args.json else text(r))


if __name__ == "__main__":
    main()
