#!/usr/bin/env python3
"""Run one of the long tests in portions, and resume where the last run ended.

    endurance.py routings --total 10000000 [--minutes 60]
    endurance.py ops --total 50000000 [--jobs 8]
    endurance.py                             print what has been done

Each portion is one run of the test with a seed of its own, the number of the portion.  Its result is a line
of tests/endurance.jsonl: the kind, the commit, the seed, what was done, the seconds.  A portion that fails is
not counted, its output is printed, and the command ends.  So a test of many hours can run on several days and
over several commits, and the file says which commit did how much.  Run `make build` first: the command
records the commit of the checkout, and cannot know of which commit the module is.

With --jobs, so many portions run at the same time.

Kinds with -cuda run four ranks that share one GPU: as threads side by side, or as processes (kills, cycles).
With several GPUs, routings and ops have a rank for each GPU, and the jobs of the other kinds use the GPUs in
turn.  cycles-cuda needs a GPU for itself, because it compares the memory in use there.  ops uses the module
with delays inside the operations where `make soak` has built it; else there are delays between calls only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "endurance.jsonl"
CHAOS = ROOT / "build" / "chaos" / "lib"
PYTHON = [sys.executable]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
THREADS = ["--threads", "4"]

# kind: (command without its size and seed, option of the size, size of a portion, its number in the output)
KINDS = {
    "routings": ([*PYTHON, "tests/fuzz_routing.py"], "--cases", 200000, r"(\d+) routings, .*no difference"),
    "routings-cuda": ([*PYTHON, "tests/fuzz_routing.py", "--device", "cuda", *THREADS], "--cases", 100000,
                      r"(\d+) routings, .*no difference"),
    "ops": ([*PYTHON, "tests/soak.py", "ops"], "-n", 10**6, r"(\d+), every sum right"),
    "ops-cuda": ([*PYTHON, "tests/soak.py", "ops", *THREADS], "-n", 100000, r"(\d+), every sum right"),
    "cycles": ([*PYTHON, "tests/soak.py", "cycles"], "-n", 10000, r"(\d+), \d+ a second"),
    "cycles-cuda": ([*TORCHRUN, "4", "tests/soak.py", "cycles"], "-n", 200, r"(\d+), \d+ a second"),
    "programs": ([*PYTHON, "tests/stress_programs.py"], "--programs", 2000,
                 r"(\d+) programs, .*no difference"),
    "kills": ([*PYTHON, "tests/faults.py", "--device", "cpu"], "--kills", 100, r"(\d+), \d+ survivors"),
    "kills-cuda": ([*PYTHON, "tests/faults.py", "--device", "cuda", "--ranks", "4"], "--kills", 10,
                   r"(\d+), \d+ survivors"),
}


def read_results():
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def commit():
    """Return the commit of the checkout, or "" outside of git. A + says that files differ from it.

    Files of results do not count.
    """
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True,
                             text=True)
    others = [line for line in changed.stdout.splitlines() if not line.endswith(".jsonl")]
    return head.stdout.strip() + ("+" if others else "")


def num_gpus():
    import torch
    return torch.cuda.device_count()


def on_gpus(command, job):
    """Return the command, and the settings of its process, for ranks on the GPUs of this machine."""
    gpus = num_gpus()
    if gpus > 1 and command[-2:] == THREADS:
        return [*TORCHRUN, str(gpus), *command[1:-2]], {}
    return command, {"EPMOE_SHARE_GPU": "1", "CUDA_VISIBLE_DEVICES": str(job % max(gpus, 1))}


def run_portion(kind, seed, size, job=0):
    """Run a portion.  Returns the line of its result, or None after a failure, whose output it prints."""
    command, option, _, pattern = KINDS[kind]
    start = time.monotonic()
    has_delays = kind.startswith("ops") and CHAOS.is_dir()
    path = os.pathsep.join([*([str(CHAOS)] if has_delays else []), str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # there may be many jobs
    if kind.endswith("-cuda"):
        command, settings = on_gpus(command, job)
        env |= settings
    seeds = [] if "cycles" in command else ["--seed", str(seed)]  # cycles draw nothing
    done = subprocess.run([*command, option, str(size), *seeds], cwd=ROOT, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = re.search(pattern, done.stdout)
    if done.returncode or not found:
        print(f"{done.stdout}\nFAILED: portion {seed} of {kind}, exit status {done.returncode}")
        return None
    return {"kind": kind, "commit": commit(), "seed": seed, "done": int(found[1]),
            "seconds": round(time.monotonic() - start, 1)} | ({"delays": "inside"} if has_delays else {})


class Portions:
    """The portions of a kind that are still to run.  Several jobs take them."""

    def __init__(self, kind, total, minutes):
        results = [r for r in read_results() if r["kind"] == kind]
        self.kind, self.total, self.end = kind, total, time.monotonic() + 60 * minutes
        self.done, self.running, self.is_ok = sum(r["done"] for r in results), 0, True
        self.seed = max((r["seed"] for r in results), default=0)
        self.lock = threading.Lock()

    def next(self):
        """Return the seed and the size of the next portion, or None."""
        with self.lock:
            size = min(KINDS[self.kind][2], self.total - self.done - self.running)
            if size <= 0 or time.monotonic() >= self.end or not self.is_ok:
                return None
            self.seed, self.running = self.seed + 1, self.running + size
            return self.seed, size

    def finish(self, size, result):
        with self.lock:
            self.running -= size
            if result is None:
                self.is_ok = False
                return
            with open(RESULTS, "a") as f:
                f.write(json.dumps(result) + "\n")
            self.done += result["done"]
            print(f"{self.kind}: {self.done:,} of {self.total:,}, portion of {result['seconds']:.0f} s",
                  flush=True)

    def run_job(self, job):
        while portion := self.next():
            self.finish(portion[1], run_portion(self.kind, *portion, job))


def run_kind(kind, total, minutes, jobs=1):
    """Run portions until `total` is done or the minutes are over.  Returns whether none failed."""
    portions = Portions(kind, total, minutes)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(portions.run_job, range(jobs)))
    return portions.is_ok


def print_results():
    print(f"{'kind':14} {'done':>12} {'hours':>6}  commits")
    results = read_results()
    for kind in sorted({r["kind"] for r in results}):
        mine = [r for r in results if r["kind"] == kind]
        commits = list(dict.fromkeys(r["commit"] for r in mine))
        print(f"{kind:14} {sum(r['done'] for r in mine):12,} {sum(r['seconds'] for r in mine) / 3600:6.1f}  "
              f"{' '.join(commits)}")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("kind", nargs="?", choices=KINDS)
    p.add_argument("--total", type=int, default=10**6, help="what all portions together shall do")
    p.add_argument("--minutes", type=float, default=1e9, help="begin no portion after this time")
    p.add_argument("--jobs", type=int, default=1, help="portions that run at the same time")
    a = p.parse_args()
    is_ok = a.kind is None or run_kind(a.kind, a.total, a.minutes, a.jobs)
    print_results()
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
