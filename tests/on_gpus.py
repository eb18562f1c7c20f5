#!/usr/bin/env python3
"""Everything that only GPUs can tell, one step after the other, with a table at the end.

    on_gpus.py [--out FOLDER] [--seconds N] [--only NAME,...] [--list]

A step has a limit of its own, and one that the remaining --seconds do not cover is not begun: it is listed as not
run.  Each step's output goes to FOLDER/NAME.log, figures to FOLDER/*.json.  Exits with 1 when a step has failed.
Needs the package built in place (make build) and a torch with CUDA.
"""

import argparse
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Step:
    name: str
    command: list
    limit_s: int
    wants: str = ""  # what its output must hold, besides an exit status of 0


def torchrun(n, *command):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *command]


def steps(num_gpus, out):
    """From what is quick and tells most to what is long."""
    python, sizes = [sys.executable], sorted({1, min(2, num_gpus), num_gpus})
    gemm = ["-m", "pytest", "-q", "tests/test_gemm_products.py", "tests/test_gemm_arguments.py"]
    yield Step("gemm-tests", torchrun(1, *gemm), 240, "passed")
    yield Step("gemm-bench", [*python, "-m", "epmoe.bench", "gemm", "--ranks", "1", "--json", str(out / "gemm.json")], 240)
    for n in reversed(sizes):
        yield Step(f"tests-{n}", torchrun(n, "-m", "pytest", "-q", "tests"), 400, "passed")
    if num_gpus > 1:
        layer = torchrun(num_gpus, "examples/ep_a2a.py", "--topk", "8", "--check")
        yield Step("a2a-seed", [*layer, "-M", "32768", "-N", "1536", "-G", "384", "--drop_ratio", "0.3", "--enable-local-combine"], 90, "check passed")
        yield Step("a2a-wide", [*layer, "-M", "8192", "-N", "7168", "-G", "256"], 90, "check passed")
        yield Step("a2a-empty", [*layer, "-M", "8192", "-N", "2048", "-G", "128", "--empty-rank", "1"], 90, "check passed")
        yield Step("fused", torchrun(num_gpus, "tests/soak_fused.py", "-n", "10000"), 300, "the same to the bit")
        yield Step("bench", torchrun(num_gpus, "-m", "epmoe.bench", "all", "--json", str(out / "bench.json")), 400)
        yield Step("overlap", ["make", "trace", f"ARGS=--json {out / 'overlap.json'}"], 200)
        yield Step("kills", [*python, "tests/faults.py", "--device", "cuda"], 200)
        yield Step("endings", [*python, "tests/soak.py", "leaks", "--device", "cuda", "-n", "1"], 200, "nothing left")
        yield Step("routings", torchrun(num_gpus, "tests/fuzz_routing.py", "--device", "cuda", "--cases", "2500", "--seed", "21"), 200)
        yield Step("ops", torchrun(num_gpus, "tests/soak.py", "ops", "-n", "20000"), 300)
        yield Step("cycles", torchrun(num_gpus, "tests/soak.py", "cycles", "-n", "200"), 200)
    yield Step("demo", [*python, "examples/train_lm.py"], 120, "demo: ok")
    if shutil.which("compute-sanitizer"):
        check = ["compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9", "--print-limit", "5"]
        small = ["-k", "mixed or counts or past or rows", "-x"]
        yield Step("memcheck-gemm", [*check, *torchrun(1, *gemm, *small)], 400, "passed")
        yield Step("memcheck-layer", [*check, *torchrun(min(2, num_gpus), "-m", "pytest", "-q", "-x", "tests/test_dispatch_rows.py",
                                                        "tests/test_combine_sums.py", "-k", "bfloat16")], 400, "passed")
        yield Step("memcheck-fused", [*check, *torchrun(min(2, num_gpus), "tests/soak_fused.py", "-n", "8", "--each", "2")], 400, "the same")


def run(step, log):
    """ok, or what was wrong."""
    with open(log, "w") as f:
        child = subprocess.Popen(step.command, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT, start_new_session=True,
                                 env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])})
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
    return "ok" if step.wants in text else f"FAILED: {step.wants!r} is not in its output"


def last_words(log):
    """The line of a log that tells most: pytest's or the command's last."""
    lines = [line.strip("= ") for line in log.read_text(errors="replace").splitlines() if line.strip("= ")]
    return next((line for line in reversed(lines) if " passed" in line or " failed" in line), lines[-1] if lines else "")[:70]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=ROOT / "build" / "on_gpus")
    p.add_argument("--seconds", type=float, default=3600, help="for all of it (default 3600)")
    p.add_argument("--only", type=lambda text: text.split(","), help="these steps, or those that begin so")
    p.add_argument("--list", action="store_true", help="name the steps and their commands")
    args = p.parse_args()
    num_gpus = torch.cuda.device_count()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in steps(max(num_gpus, 1), args.out) if not args.only or any(s.name.startswith(o) for o in args.only)]
    if args.list:
        for s in chosen:
            print(f"{s.name:15} {s.limit_s:4} s  {' '.join(map(str, s.command))}")
        return 0
    if num_gpus == 0:
        return "there is no GPU here"
    end, results = time.monotonic() + args.seconds, []
    for i, s in enumerate(chosen):
        left, log, start = end - time.monotonic(), args.out / f"{s.name}.log", time.monotonic()
        if left < min(s.limit_s, 30):
            results.append((s.name, "not run", 0, ""))
            continue
        s.limit_s = int(min(s.limit_s, left))
        print(f"[{i + 1}/{len(chosen)}] {s.name} ...", flush=True)
        verdict = run(s, log)
        results.append((s.name, verdict, time.monotonic() - start, last_words(log)))
        print(f"      {verdict}, {results[-1][2]:.0f} s: {results[-1][3]}", flush=True)
    print(f"\n{num_gpus} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}")
    for name, verdict, seconds, words in results:
        print(f"{name:15} {verdict:34} {seconds:5.0f} s  {words}")
    return any(verdict != "ok" for _, verdict, _, _ in results)


if __name__ == "__main__":
    sys.exit(main())
