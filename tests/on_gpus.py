#!/usr/bin/env python3
"""Run everything that needs a GPU, one step after the other, and print a table of the results.

    on_gpus.py [--out FOLDER] [--seconds N] [--only NAME,...] [--skip NAME,...] [--list]

One GPU is enough: there the ranks share it (EPMOE_SHARE_GPU=1).  Steps whose names end with -threads run
their ranks as threads of one process, side by side on the GPU.  In all other steps the ranks are processes.
Under NVIDIA MPS (names that end with -mps, and the suite) their kernels also run side by side, else the
kernels alternate.  The steps of the suite run beside each other.  On one GPU each has an MPS server of its
own.  The kernels of different steps alternate.
Steps that need several GPUs, because they measure links, are listed as not run.

Each step has its own time limit of at most 9 minutes.  A step for which too little of --seconds is left is
not started and is listed as not run.  The output of a step goes to FOLDER/NAME.log, figures to FOLDER/*.json.
The exit status is 1 if a step failed.  Needs the package built in place (make build) and a torch with CUDA.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from epmoe.testing import SIDE_BY_SIDE  # noqa: E402

LONGEST_S = 540

# racecheck knows no order from a lane to the mbarrier arrival of another lane after a __syncwarp: a kernel of
# 30 lines that only does that gets the same report (docs/experiments, E-062). In the grouped GEMM, all lanes
# of an MMA warp read the info of a tile, and lane 0 releases the pipeline stage.
STAGE_INFO = (r"Race reported between Read access at ep_ld_shared\(.*\n"
              r"=+ +and Write access at ep_st_shared\(.*\n")
# Loads and stores that are relaxed or release are atomic, so they may meet. racecheck takes those of shared
# memory for ordinary ones. The table of open chunks uses them (csrc/kernels/stage/open_chunks.cuh).
ATOMIC = (r"Race reported between Write access at ep_st_re(?:laxed|lease)_shared\(.*\n"
          r"(?:=+ +and (?:Read access at ep_ld_relaxed|Write access at ep_st_re(?:laxed|lease))_shared\("
          r".*\n)+(?!=+ +and )")
CHAOS = ROOT / "build" / "chaos" / "lib"
MPS = "nvidia-cuda-mps-control"

# The suite in parts, so that each ends within LONGEST_S also where four ranks take turns on one GPU. A file
# is in the part that names the first word of its name, else in "rest".
PARTS = {
    "gemm": ("gemm", "four"),
    "moe": ("moe", "numerics", "balance"),
    "layer": ("layer", "examples", "integrations", "expert", "experts", "shards", "tuning", "activation"),
    "errors": ("errors", "written"),
    "fused": ("fused", "low", "fp8"),
    "fuzz": ("fuzz", "soak", "stages"),
    "nodes": ("nodes",),
    "rest": (),
}
RANKS_MOST = 4  # of a step on one GPU
PARALLEL = 8  # the most steps that run beside each other


@dataclasses.dataclass
class Step:
    name: str
    command: list
    limit_s: int
    wants: str = ""  # what its output must contain, besides an exit status of 0
    env: dict = dataclasses.field(default_factory=dict)
    needs: str = ""  # why it cannot run here
    explained: str = ""  # a pattern of reports that are not faults
    mps: bool = False  # under NVIDIA MPS
    alone: bool = True  # no other step may run beside it


def torchrun(n, *command):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n),
            *command]


def files(part):
    part_of = {word: name for name, words in PARTS.items() for word in words}
    return [f"tests/{p.name}" for p in sorted((ROOT / "tests").glob("test_*.py"))
            if part_of.get(p.stem.split("_")[1], "rest") == part]


def tests(sizes, num_gpus):
    """The whole suite at each number of ranks, the longest steps first."""
    is_shared = num_gpus == 1
    has_mps = is_shared and bool(shutil.which(MPS))
    are_chosen = is_shared or "CUDA_VISIBLE_DEVICES" in os.environ
    first = itertools.count()  # the first GPU of a step with fewer ranks than GPUs
    for n in sorted(sizes, reverse=True):
        for part in [p for p in PARTS if p != "nodes" or n > 1]:
            at = next(first) if n < num_gpus else 0
            gpus = ",".join(str((at + i) % num_gpus) for i in range(num_gpus))
            # A rank counts only the ranks of its node, so under MPS the kernels of two nodes would not fit.
            # Ranks that see no GPU run on the CPU. Then "GPU (" is not in the summary.
            command = torchrun(n, "-m", "pytest", "-q", "-rsfE", "--tb=short", *files(part))
            yield Step(f"tests-{n}-{part}", command, LONGEST_S, "GPU (",
                       {} if are_chosen else {"CUDA_VISIBLE_DEVICES": gpus},
                       mps=has_mps and n > 1 and part != "nodes", alone=is_shared and not has_mps)


def layers(n):
    """The command lines of the documents, with a check of every sum."""
    a2a = torchrun(n, "examples/ep_a2a.py", "--topk", "8", "--check")
    yield Step("a2a-seed", [*a2a, "-M", "32768", "-N", "1536", "-G", "384", "--drop_ratio", "0.3",
                            "--enable-local-combine"], 240, "check passed")
    yield Step("a2a-wide", [*a2a, "-M", "8192", "-N", "7168", "-G", "256"], 240, "check passed")
    yield Step("a2a-empty", [*a2a, "-M", "8192", "-N", "2048", "-G", "128", "--empty-rank", "1"], 240,
               "check passed")


def soaks(n, is_shared):
    """Long runs.  On one GPU the longest run their ranks side by side, which is many times faster."""
    python, chaos = [sys.executable], {"PYTHONPATH": str(CHAOS)} if CHAOS.is_dir() else {}
    if is_shared:
        threads = ["--threads", str(n)]
        missing = "" if shutil.which(MPS) else f"{MPS} is not installed"
        yield Step("fused-mps", torchrun(n, "tests/soak_fused.py", "-n", "10000"), LONGEST_S,
                   "the same to the bit", chaos, missing, mps=True)
        yield Step("train-mps", torchrun(n, "tests/soak_train.py", "-n", "5000"), LONGEST_S,
                   "the same to the bit", chaos, missing, mps=True)
        yield Step("train-fp8-mps", torchrun(n, "tests/soak_train.py", "--compute", "fp8", "-n", "5000"),
                   LONGEST_S, "the same to the bit", chaos, missing, mps=True)
        yield Step("balance-mps", torchrun(n, "tests/soak_train.py", "--balance", "yes", "-n", "2000"),
                   LONGEST_S, "the same to the bit", chaos, missing, mps=True)
        yield Step("batches-threads", [*python, "tests/soak_batches.py", "-n", "4000", *threads], LONGEST_S,
                   "the same to the bit", SIDE_BY_SIDE)
        yield Step("decode-mps", torchrun(n, "tests/soak_decode.py", "-n", "100000"), LONGEST_S,
                   "the same to the bit", chaos, missing, mps=True)
        yield Step("nodes-mps", torchrun(n, "tests/soak_nodes.py"), LONGEST_S, "the same to the bit", chaos,
                   missing, mps=True)
        yield Step("fused-threads", [*python, "tests/soak_fused.py", "-n", "2000", *threads], LONGEST_S,
                   "the same to the bit", chaos | SIDE_BY_SIDE)
        yield Step("ops-threads", [*python, "tests/soak.py", "ops", "-n", "100000", *threads], LONGEST_S,
                   "no fault", chaos | SIDE_BY_SIDE)
        yield Step("routings-threads", [*python, "tests/fuzz_routing.py", "--device", "cuda", *threads,
                                        "--cases", "20000", "--seed", "22"], LONGEST_S, "no difference",
                   SIDE_BY_SIDE)
    else:
        yield Step("fused", torchrun(n, "tests/soak_fused.py", "-n", "10000"), LONGEST_S,
                   "the same to the bit", chaos)
        yield Step("train", torchrun(n, "tests/soak_train.py", "-n", "5000"), LONGEST_S,
                   "the same to the bit", chaos)
        yield Step("train-fp8", torchrun(n, "tests/soak_train.py", "--compute", "fp8", "-n", "5000"),
                   LONGEST_S, "the same to the bit", chaos)
        yield Step("balance", torchrun(n, "tests/soak_train.py", "--balance", "yes", "-n", "2000"),
                   LONGEST_S, "the same to the bit", chaos)
        yield Step("batches", torchrun(n, "tests/soak_batches.py", "-n", "20000"), LONGEST_S,
                   "the same to the bit")
        yield Step("decode", torchrun(n, "tests/soak_decode.py", "-n", "100000"), LONGEST_S,
                   "the same to the bit", chaos)
        yield Step("nodes", torchrun(n, "tests/soak_nodes.py"), LONGEST_S, "the same to the bit", chaos)
        yield Step("ops", torchrun(n, "tests/soak.py", "ops", "-n", "100000"), LONGEST_S, "no fault", chaos)
    yield Step("kills", [*python, "tests/faults.py", "--device", "cuda", "--ranks", str(n)], LONGEST_S,
               "no fault")
    yield Step("endings", [*python, "tests/soak.py", "leaks", "--device", "cuda", "-n", "1"], 300,
               "nothing left")
    yield Step("routings", torchrun(n, "tests/fuzz_routing.py", "--device", "cuda", "--cases", "2500",
                                    "--seed", "21"), LONGEST_S, "no difference")
    yield Step("cycles", torchrun(n, "tests/soak.py", "cycles", "-n", "200"), LONGEST_S, "no fault")


def sanitizers():
    """compute-sanitizer over one rank, and over two side by side: see sanitized.py."""
    missing = "" if shutil.which("compute-sanitizer") else "compute-sanitizer is not installed"
    no_mps = missing or ("" if shutil.which(MPS) else f"{MPS} is not installed")
    check = ["compute-sanitizer", "--target-processes", "all", "--print-limit", "1000"]
    memcheck = [*check, "--error-exitcode", "9"]
    gemm = torchrun(1, "-m", "pytest", "-q", "-x", "tests/test_gemm_products.py",
                    "tests/test_gemm_arguments.py", "-k", "mixed or counts or past or rows")
    yield Step("memcheck-gemm", [*memcheck, *gemm], LONGEST_S, "passed", needs=missing)
    for part in ("move", "fused", "fp8", "decode"):
        ranks, right = torchrun(2, "tests/sanitized.py", part), "on 2 ranks: right"
        yield Step(f"memcheck-{part}", [*memcheck, *ranks], LONGEST_S, right, needs=no_mps, mps=True)
        yield Step(f"racecheck-{part}", [*check, "--tool", "racecheck", *ranks], LONGEST_S, right,
                   needs=no_mps, explained=f"{STAGE_INFO}|{ATOMIC}", mps=True)


def steps(num_gpus, out):
    """From what is quick and tells most to what is long."""
    python, is_shared = [sys.executable], num_gpus == 1
    most = RANKS_MOST if is_shared else num_gpus
    several = "needs several GPUs: its figures are of links" if is_shared else ""
    yield Step("gemm-bench", [*python, "-m", "benchmarks", "gemm", "--ranks", "1", "--json",
                              str(out / "gemm.json")], 240)
    yield Step("decode-bench", [*python, "-m", "benchmarks", "decode", "--ranks", "1", "--json",
                                str(out / "decode.json")], 240)
    yield Step("side-bench", [*python, "-m", "benchmarks", "side", "--ranks", "1", "--json",
                              str(out / "side.json")], 240)
    yield from tests({1, 2, most}, num_gpus)
    yield from layers(most)
    yield from soaks(most, is_shared)
    yield Step("demo", [*python, "examples/train_lm.py"], 240, "demo: ok")
    yield from sanitizers()
    yield Step("bench", torchrun(num_gpus, "-m", "benchmarks", "all", "--json", str(out / "bench.json")),
               LONGEST_S, needs=several)
    yield Step("overlap", ["make", "trace", f"ARGS=--json {out / 'overlap.json'}"], 300, needs=several)


@contextlib.contextmanager
def mps_server():
    """Start an MPS server. Yields the environment of processes that use it."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([MPS, "-d"], env=os.environ | env, check=True)
        try:
            # The server gives numbers from 0 on to the GPUs that it sees.
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            yield env if seen is None else env | {
                "CUDA_VISIBLE_DEVICES": ",".join(str(i) for i in range(len(seen.split(","))))}
        finally:
            subprocess.run([MPS], input="quit\n", text=True, env=os.environ | env, check=False)


def run(step, log):
    """ok, or what was wrong."""
    with mps_server() if step.mps else contextlib.nullcontext({}) as env:
        return run_in(step, log, env)


def run_in(step, log, more_env):
    path = os.pathsep.join([*([step.env["PYTHONPATH"]] if "PYTHONPATH" in step.env else []), str(ROOT),
                            str(ROOT / "tests")])
    env = {**os.environ, **step.env, **more_env, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with open(log, "w") as f:
        child = subprocess.Popen(step.command, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT,
                                 start_new_session=True, env=env)
        try:
            status = child.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)  # torchrun ends its ranks
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            return f"FAILED: not done after {step.limit_s} s"
    text = log.read_text(errors="replace")
    if status:
        return f"FAILED: exit status {status}"
    if step.explained:
        reports = len(re.findall("Race reported", text)) - len(re.findall(step.explained, text))
        if reports or "RACECHECK SUMMARY" not in text:
            return f"FAILED: {reports} reports of races"
    return "ok" if step.wants in text else f"FAILED: {step.wants!r} is not in its output"


def last_words(log):
    """The line of a log that tells most: pytest's or the command's last."""
    lines = [line.strip("= ") for line in log.read_text(errors="replace").splitlines() if line.strip("= ")]
    return next((line for line in reversed(lines) if " passed" in line or " failed" in line),
                lines[-1] if lines else "")[:70]


def parse():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=ROOT / "build" / "on_gpus")
    p.add_argument("--seconds", type=float, default=3600, help="for all of it (default 3600)")
    p.add_argument("--only", type=lambda text: text.split(","), help="these steps, or those that begin so")
    p.add_argument("--skip", type=lambda text: text.split(","), default=[],
                   help="not these steps, nor those that begin so")
    p.add_argument("--list", action="store_true", help="name the steps and their commands")
    return p.parse_args()


def run_all(chosen, out, seconds):
    """[(name, verdict, seconds, last words)]"""
    end, results, num_begun = time.monotonic() + seconds, [], itertools.count(1)

    def run_one(s):
        left, log, start = end - time.monotonic(), out / f"{s.name}.log", time.monotonic()
        number = next(num_begun)
        if s.needs or left < min(s.limit_s, 30):
            return s.name, "not run", 0, s.needs or "no time was left"
        s.limit_s = int(min(s.limit_s, left))
        print(f"[{number}/{len(chosen)}] {s.name} ...", flush=True)
        verdict = run(s, log)
        result = s.name, verdict, time.monotonic() - start, last_words(log)
        print(f"      {s.name}: {verdict}, {result[2]:.0f} s: {result[3]}", flush=True)
        return result

    for alone, group in itertools.groupby(chosen, key=lambda s: s.alone):
        # a rank keeps a core busy
        parallel = 1 if alone else min(PARALLEL, max(1, len(os.sched_getaffinity(0)) // RANKS_MOST))
        with concurrent.futures.ThreadPoolExecutor(parallel) as pool:
            results += pool.map(run_one, group)
    return results


def main():
    args = parse()
    num_gpus = torch.cuda.device_count()
    args.out.mkdir(parents=True, exist_ok=True)

    def among(step, names):
        return any(step.name.startswith(name) for name in names)

    chosen = [s for s in steps(max(num_gpus, 1), args.out) if (not args.only or among(s, args.only))
              and not among(s, args.skip)]
    if args.list:
        for s in chosen:
            print(f"{s.name:15} {s.limit_s:4} s  {' '.join(map(str, s.command))}")
        return 0
    if num_gpus == 0:
        return "there is no GPU here"
    if num_gpus == 1:
        os.environ["EPMOE_SHARE_GPU"] = "1"
    results = run_all(chosen, args.out, args.seconds)
    print(
        f"\n{num_gpus} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}"
    )
    for name, verdict, seconds, words in results:
        print(f"{name:15} {verdict:34} {seconds:5.0f} s  {words}")
    return any(verdict not in ("ok", "not run") for _, verdict, _, _ in results)


if __name__ == "__main__":
    sys.exit(main())
