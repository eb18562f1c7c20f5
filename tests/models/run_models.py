#!/usr/bin/env python3
"""Check the protocol models in this folder with spin.

Every right version of a model must be searched to the end without an error.
Every wrong version must fail, and in the way that its mistake predicts: if a
wrong version passes, the model has stopped looking at the thing it was written
for.  Names given on the command line choose the runs whose name contains one
of them.  The exit code is 0 when all verdicts are as wanted, 1 when one is
not, and 77 when spin or gcc is missing.
"""

import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOBS = 2                 # searches at the same time
TIME_LIMIT = 30          # seconds of CPU time for each of spin, gcc and the search
HANG_LIMIT = 900         # seconds of any kind: only a hang reaches it
MEMORY_LIMIT = 1500      # megabytes for a search
DEPTH = 5000             # steps; the longest history has fewer than 1000

PASS = "no error"
ASSERT = "assertion violated"
HANG = "invalid end state"

# (file, defines, verdict that is wanted, what the failed assertion is about)
RUNS = [
    ("enter_stage.pml", "N=2 E=4", PASS, ""),
    ("enter_stage.pml", "N=2 E=4 IDLE", PASS, ""),
    ("enter_stage.pml", "N=3 E=3 FEW", PASS, ""),
    ("enter_stage.pml", "HB=1", ASSERT, "header"),
    ("enter_stage.pml", "NOENTER", ASSERT, "stage|flag"),
    ("enter_stage.pml", "SKIP=1", HANG, ""),
    ("enter_stage.pml", "SKIP=2", ASSERT, "header"),
    ("enter_stage.pml", "FLAGFIRST", ASSERT, "stage"),
    ("enter_stage.pml", "EARLYADV", ASSERT, "stage|flag|header"),
    ("enter_stage.pml", "LATEZERO", HANG, ""),

    ("plan_counts.pml", "C=2", PASS, ""),
    ("plan_counts.pml", "NOEPOCH", ASSERT, "seen"),
    ("plan_counts.pml", "TORN", ASSERT, "seen"),
    ("plan_counts.pml", "SHARED", ASSERT, "cell"),

    ("abort.pml", "N=2 E=4 VICTIM=0", PASS, ""),
    ("abort.pml", "N=2 E=4 VICTIM=1", PASS, ""),
    ("abort.pml", "N=3 E=3 FEW VICTIM=1", PASS, ""),
    ("abort.pml", "DEAF=1", HANG, ""),
    ("abort.pml", "DEAF=2", HANG, ""),
    ("abort.pml", "GOON", ASSERT, "header|flag|stage"),
    ("abort.pml", "SENDON", ASSERT, "flag|stage"),
    ("abort.pml", "REUSE", ASSERT, "over"),
    ("abort.pml", "RESUME", ASSERT, "epoch"),

    ("void.pml", "N=2", PASS, ""),
    ("void.pml", "N=2 ALLFAULT", PASS, ""),
    ("void.pml", "N=3", PASS, ""),
    ("void.pml", "NOOPADV", ASSERT, "header"),
    ("void.pml", "UNSTICKY", ASSERT, "header"),
    ("void.pml", "ACKRACE", ASSERT, "header"),
    ("void.pml", "RAISEONLY", ASSERT, "base|ran|header"),
    ("void.pml", "SWALLOW", ASSERT, "header"),
    ("void.pml", "HASTE=1", ASSERT, "header"),
    ("void.pml", "N=3 HASTE=2", ASSERT, "header"),

    ("queue.pml", "R=1 W=2 E=3", PASS, ""),
    ("queue.pml", "R=1 W=3", PASS, ""),
    ("queue.pml", "R=2 W=3", PASS, ""),
    ("queue.pml", "RECVFIRST", HANG, ""),
    ("queue.pml", "FIXEDROLE", HANG, ""),
    ("queue.pml", "FIXEDENTER", HANG, ""),
    ("queue.pml", "FIRSTRESET", ASSERT, "got|sent"),
    ("queue.pml", "NORESET", ASSERT, "got|sent"),

    ("rail.pml", "C=1", PASS, ""),
    ("rail.pml", "C=2", PASS, ""),
    ("rail.pml", "C=1 OTHER", PASS, ""),
    ("rail.pml", "C=3 SERIAL", PASS, ""),
    ("rail.pml", "RES=0", HANG, ""),
    ("rail.pml", "RES=1", HANG, ""),
    ("rail.pml", "OTHER RES=2", HANG, ""),
    ("rail.pml", "SERIAL SWAP", HANG, ""),

    ("low_latency.pml", "N=2 E=4", PASS, ""),
    ("low_latency.pml", "N=2 E=5 HALVES", PASS, ""),
    ("low_latency.pml", "N=3 E=3 FEW HALVES INORDER", PASS, ""),
    ("low_latency.pml", "BANKS=1", ASSERT, "call|number|route|slot"),
    ("low_latency.pml", "SLOTS=1", ASSERT, "slot"),
    ("low_latency.pml", "SLOTS=2", ASSERT, "slot"),
    ("low_latency.pml", "NOCLEAR", ASSERT, "slot"),
    ("low_latency.pml", "EARLYCLEAR", ASSERT, "slot"),
    ("low_latency.pml", "TAGBITS=1", ASSERT, "call|number|route"),
    ("low_latency.pml", "TORN", ASSERT, "number"),
    ("low_latency.pml", "EARLYADV", ASSERT, "call|number|route|slot|verdict"),
    ("low_latency.pml", "HASTE", ASSERT, "call|number|route|slot"),

    ("fused.pml", "OP=1 S=2", PASS, ""),
    ("fused.pml", "OP=1 V=2", PASS, ""),
    ("fused.pml", "OP=1 V=2 TAIL", PASS, ""),
    ("fused.pml", "OP=1 L=2 EXPERT", PASS, ""),
    ("fused.pml", "OP=1 L=2 PAIRS", PASS, ""),
    ("fused.pml", "OP=1 V=2 TAIL FAULTS=0", PASS, ""),
    ("fused.pml", "OP=1 L=2 PAIRS FAULTS=2", PASS, ""),
    ("fused.pml", "OP=2 S=2 R=1", PASS, ""),
    ("fused.pml", "OP=2 V=2 P=1", PASS, ""),
    ("fused.pml", "OP=2 L=2 P=1", PASS, ""),
    ("fused.pml", "OP=2 V=2 SPLIT=1", PASS, ""),
    ("fused.pml", "OP=2 V=2 SPLIT=2", PASS, ""),
    ("fused.pml", "OP=2 FAULTS=2", PASS, ""),
    ("fused.pml", "OP=2 P=1 SERIAL FAULTS=2", PASS, ""),
    ("fused.pml", "OP=3 E=3 L=2 P=1 PAIRS", PASS, ""),
    ("fused.pml", "OP=3 FAULTS=2", PASS, ""),
    ("fused.pml", "OP=1 COUNTFIRST", ASSERT, "rows"),
    ("fused.pml", "OP=2 COUNTFIRST", ASSERT, "made"),
    ("fused.pml", "OP=1 READFIRST", ASSERT, "rows"),
    ("fused.pml", "OP=1 FLAGFIRST", ASSERT, "stage"),
    ("fused.pml", "OP=2 FLAGFIRST", ASSERT, "stage"),
    ("fused.pml", "OP=2 BLINDADD", ASSERT, "stage"),
    ("fused.pml", "OP=2 NOENTER", ASSERT, "stage"),
    ("fused.pml", "OP=1 NORESET", ASSERT, "rows"),
    ("fused.pml", "OP=2 NORESET", ASSERT, "made"),
    ("fused.pml", "OP=3 NORESET", ASSERT, "made"),
    ("fused.pml", "OP=1 KEEPTILES", ASSERT, "read"),
    ("fused.pml", "OP=1 FAULTS=0 KEEPFAILED", ASSERT, "ready"),
    ("fused.pml", "OP=1 FIRSTRESET", HANG, ""),
    ("fused.pml", "OP=2 EARLY", ASSERT, "made"),
    ("fused.pml", "OP=1 RECVFIRST", HANG, ""),
    ("fused.pml", "OP=1 V=2 NOSENDER", HANG, ""),
    ("fused.pml", "OP=1 ONEROLE", HANG, ""),
    ("fused.pml", "OP=1 HOLDS", HANG, ""),
    ("fused.pml", "OP=2 HOLDSEND", HANG, ""),
    ("fused.pml", "OP=2 MOVESFIRST", HANG, ""),
    ("fused.pml", "OP=2 COUNTLATE", HANG, ""),
    ("fused.pml", "OP=1 L=2 PAIRS OWNTICKETS", HANG, ""),
    ("fused.pml", "L=2 PAIRS FAULTS=0 QUITS", HANG, ""),
    ("fused.pml", "OP=1 FAULTS=0 DEAF=1", HANG, ""),
    ("fused.pml", "OP=2 FAULTS=0 DEAF=2", HANG, ""),

    ("open_chunks.pml", "V=2 C=3", PASS, ""),
    ("open_chunks.pml", "V=2 C=3 VAIN", PASS, ""),
    ("open_chunks.pml", "V=3 INORDER", PASS, ""),
    ("open_chunks.pml", "V=3 O=1", PASS, ""),
    ("open_chunks.pml", "BLINDTAKE", ASSERT, "sent"),
    ("open_chunks.pml", "OWNSLOTS", ASSERT, "stage|flag"),
    ("open_chunks.pml", "LOSES", HANG, ""),
    ("open_chunks.pml", "IMPATIENT", HANG, ""),
    ("open_chunks.pml", "UNREADY", ASSERT, "ready"),
]

# Signs that a search did not see every history.
CUT_SHORT = ("max search depth too small", "out of memory", "memory limit",
             "Search not completed", "hash-table full", "VECTORSZ")


class Broken(Exception):
    """A step could not be carried out, so there is no verdict."""


def limit_cpu_time():
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT, TIME_LIMIT + 5))


def step(command, folder):
    """Run one command in the folder and return all it printed."""
    try:
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=HANG_LIMIT, preexec_fn=limit_cpu_time)
    except subprocess.TimeoutExpired:
        raise Broken("%s ran past %d s" % (command[0], HANG_LIMIT))
    if done.returncode == -signal.SIGXCPU:
        raise Broken("%s ran past %d s of CPU time" % (command[0], TIME_LIMIT))
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or ["no output"]
        raise Broken("%s ended with code %d: %s"
                     % (command[0], done.returncode, lines[0]))
    return done.stdout


def search(model, defines, wanted, about):
    """Return the verdict of one run and the number of states it stored."""
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        flags = ["-D" + define for define in defines.split()]
        said = step(["spin", *flags, "-a", str(HERE / model)], folder)
        if "rror:" in said or not (Path(folder) / "pan.c").exists():
            raise Broken("spin: " + said.strip().splitlines()[0])
        # A wrong version fails after few states, and then the compiler takes
        # nearly all the time, so it is asked for less.
        level = "-O2" if wanted == PASS else "-O0"
        step(["gcc", level, "-w", "-DSAFETY", "-DVECTORSZ=512",
              "-DMEMLIM=%d" % MEMORY_LIMIT, "-o", "pan", "pan.c"], folder)
        said = step(["./pan", "-m%d" % DEPTH, "-w20"], folder)

    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"(\d+) states, stored", said)
    if not errors or not states:
        raise Broken("pan gave no verdict")
    stored = int(states.group(1))
    if int(errors.group(1)) == 0:
        for sign in CUT_SHORT:
            if sign in said:
                return "search cut short: " + sign, stored
        return PASS, stored
    if re.search(r"pan:\d+: " + HANG, said):
        return HANG, stored
    failed = re.search(r"pan:\d+: " + ASSERT + r" (.*) \(at depth", said)
    what = failed.group(1) if failed else "unknown"
    if failed and about and re.search(r"\b(" + about + r")\b", what):
        return ASSERT, stored
    return "another error: " + what, stored


def name_of(run):
    return Path(run[0]).stem + " " + run[1]


def judge(run):
    """Return the verdict of one run, the number of states it stored, and the seconds it took."""
    begin = time.monotonic()
    try:
        verdict, stored = search(*run)
    except Broken as trouble:
        verdict, stored = str(trouble), 0
    return verdict, stored, time.monotonic() - begin


def main(chosen):
    for program in ("spin", "gcc"):
        if shutil.which(program) is None:
            print("%s is not on PATH, so the models were not checked" % program)
            return 77
    selected = [run for run in RUNS if not chosen or any(part in name_of(run) for part in chosen)]
    good = 0
    with ThreadPoolExecutor(JOBS) as pool:
        for run, (verdict, stored, spent) in zip(selected, pool.map(judge, selected)):
            wanted = run[2]
            good += verdict == wanted
            remark = "as wanted" if verdict == wanted else "WRONG, wanted: " + wanted
            print("%-32s %-19s %9d states %6.1f s  %s"
                  % (name_of(run), verdict, stored, spent, remark), flush=True)
    bad = len(selected) - good
    print("%d passed, %d failed" % (good, bad))
    return 1 if bad or not good else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
