#!/usr/bin/env python3
"""Run one of the long tests in portions, and resume where the last run ended.

    endurance.py routings --total 10000000 [--minutes 60]
    endurance.py ops --total 50000000
    endurance.py                             print what has been done

Each portion is one run of the test with a seed of its own, the number of the portion.  Its result is a line
of tests/endurance.jsonl: the kind, the commit, the seed, what was done, the seconds.  A portion that fails is
not counted, its output is printed, and the command ends.  So a test of many hours can run on several days and
over several commits, and the file says which commit did how much.  Run `make build` first: the command
records the commit of the checkout, and cannot know of which commit the module is.

Kinds with -cuda run four ranks that share one GPU: as threads side by side, or as processes (kills).  ops
uses the module with delays inside the operations where `make soak` has built it; else there are delays
between calls only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "endurance.jsonl"
CHAOS = ROOT / "build" / "chaos" / "lib"
PYTHON = [sys.executable]

# kind: (command without its size and seed, option of the size, size of a portion, its number in the output)
KINDS = {
    "routings": ([*PYTHON, "tests/fuzz_routing.py"], "--cases", 200000, r"(\d+) routings, .*no difference"),
    "routings-cuda": ([*PYTHON, "tests/fuzz_routing.py", "--device", "cuda", "--threads", "4"], "--cases",
                      20000, r"(\d+) routings, .*no difference"),
    "ops": ([*PYTHON, "tests/soak.py", "ops"], "-n", 250000, r"(\d+), every sum right"),
    "ops-cuda": ([*PYTHON, "tests/soak.py", "ops", "--threads", "4"], "-n", 20000,
                 r"(\d+), every sum right"),
    "cycles": ([*PYTHON, "tests/soak.py", "cycles"], "-n", 10000, r"(\d+), \d+ a second"),
    "kills": ([*PYTHON, "tests/faults.py", "--device", "cpu"], "--kills", 100, r"(\d+), \d+ survivors"),
    "kills-cuda": ([*PYTHON, "tests/faults.py", "--device", "cuda", "--ranks", "4"], "--kills", 10,
                   r"(\d+), \d+ survivors"),
}


def read_results():
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def commit():
    """Return the commit of the checkout, with a + if files differ from it, or "" outside of git."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True,
                             text=True)
    others = [line for line in changed.stdout.splitlines() if RESULTS.name not in line]
    return head.stdout.strip() + ("+" if others else "")


def run_portion(kind, seed, size):
    """Run a portion.  Returns the line of its result, or None after a failure, whose output it prints."""
    command, option, _, pattern = KINDS[kind]
    start = time.monotonic()
    has_delays = kind.startswith("ops") and CHAOS.is_dir()
    path = os.pathsep.join([*([str(CHAOS)] if has_delays else []), str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": path} | ({"EPMOE_SHARE_GPU": "1"} if kind.endswith("-cuda") else {})
    done = subprocess.run([*command, option, str(size), "--seed", str(seed)], cwd=ROOT, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = re.search(pattern, done.stdout)
    if done.returncode or not found:
        print(f"{done.stdout}\nFAILED: portion {seed} of {kind}, exit status {done.returncode}")
        return None
    return {"kind": kind, "commit": commit(), "seed": seed, "done": int(found[1]),
            "seconds": round(time.monotonic() - start, 1)} | ({"delays": "inside"} if has_delays else {})


def run_kind(kind, total, minutes):
    """Run portions until `total` is done or the minutes are over.  Returns whether none failed."""
    end = time.monotonic() + 60 * minutes
    results = [r for r in read_results() if r["kind"] == kind]
    done, seed = sum(r["done"] for r in results), 1 + max((r["seed"] for r in results), default=0)
    while done < total and time.monotonic() < end:
        result = run_portion(kind, seed, min(KINDS[kind][2], total - done))
        if result is None:
            return False
        with open(RESULTS, "a") as f:
            f.write(json.dumps(result) + "\n")
        done, seed = done + result["done"], seed + 1
        print(f"{kind}: {done:,} of {total:,}, portion of {result['seconds']:.0f} s", flush=True)
    return True


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
    a = p.parse_args()
    is_ok = a.kind is None or run_kind(a.kind, a.total, a.minutes)
    print_results()
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
