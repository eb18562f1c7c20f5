#!/usr/bin/env python3
"""Build the CPU side of epmoe under sanitizers, with random delays and with seeded faults; run the C tests.

    run_c_tests.py [--quick] [--only NAME] [--csrc FOLDER] [--repeat N]

Runs, one line each (name, verdict, seconds):
    header ...  every header of the host compiles alone as C11, and those that nvcc reads too as C++17,
    without a warning
    plain       -O2 with random delays (EP_CHAOS); "swift" is the same without them
    tsan, asan  the thread sanitizer; the address and undefined-behaviour sanitizers; both with delays
    fault N     a build with the seeded fault EP_FAULT(N) must be caught, in the way that FAULTS says

Standard library only.  Needs gcc with libtsan, libasan and libubsan.
"""
import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
JOBS = 2
HANG_S = 1800  # for a whole test program: longer than any takes on the busiest machine
# all but the Python module and CUDA
LIBRARY = ("runtime", "layer", "cpu")
TESTS = "main harness cases steps test_alone test_device test_heap test_hostile test_order test_processes test_refusals test_sharing test_steps test_wire".split()
# a fault is seeded in these only: the protocol, not the sockets of the world
FAULTY = "cpu"
HEADER_FLAGS = (
    "-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -Wno-unused-function -D_GNU_SOURCE".split()
)
VARIANTS = {
    "swift": "-O2",
    "plain": "-O2 -DEP_CHAOS",
    "tsan": "-O1 -g -DEP_CHAOS -fsanitize=thread",
    "asan": "-O1 -g -DEP_CHAOS -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer",
}
# The whole test program, longest first: percentage of steps (quick, full) and number of seeds (quick, full).
WHOLE = {"asan": (20, 150, 1, 1), "tsan": (20, 120, 1, 2), "plain": (50, 300, 1, 2),
         "swift": (100, 300, 0, 1)}
RACE, MEMORY, DATA, TIMEOUT, CODE, HANG = (
    "data race",
    "out of bounds",
    "wrong data",
    "time-out",
    "wrong error",
    "hang",
)
# fault: what is wrong, variant, tests, and the ways in which it may be caught.
FAULTS = {
    1: ("a load that should acquire is relaxed", "tsan", "steps_local", {RACE}),
    2: ("a store that should release is relaxed", "tsan", "steps_local", {RACE}),
    3: ("the last copier does not acquire what the others copied", "tsan", "steps_gather", {RACE}),
    4: ("one bank of enter and header instead of two", "tsan", "steps_scatter", {RACE, DATA, CODE}),
    5: ("enter is published before its header", "tsan", "steps_scatter", {RACE, DATA, CODE}),
    6: ("nobody waits for enter", "tsan", "steps_local", {RACE, DATA, CODE, TIMEOUT}),
    7: ("nobody waits for flags", "tsan", "steps_scatter", {RACE, DATA}),
    8: ("the first worker out believes to be the last", "tsan", "steps_local", {RACE, DATA, TIMEOUT}),
    9: ("two workers may take the same task", "tsan", "steps_gather", {RACE, DATA, TIMEOUT}),
    10: ("counts of an earlier plan are believed", "plain", "steps_local", {DATA, CODE, TIMEOUT}),
    11: ("a rank without tokens does not enter", "plain", "steps_local", {TIMEOUT}),
    12: ("row numbers of a peer are not checked", "asan", "hostile", {MEMORY}),
    13: ("a flag is set before its slots are written", "tsan", "steps_local", {RACE, DATA}),
}
QUICK_FAULTS = (1, 4, 10, 12, 13)
ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 second_deadlock_stack=1",
    "ASAN_OPTIONS": "exitcode=67 detect_stack_use_after_return=1 strict_string_checks=1",
    "UBSAN_OPTIONS": "exitcode=68 print_stacktrace=1",
}


def flags_of_setup():
    """WARN and CFLAGS as setup.py has them, without what is for the Python module."""
    lists = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0],
                                                       ast.Name) and node.targets[0].id in ("WARN", "CFLAGS"):
            lists[node.targets[0].id] = ast.literal_eval(node.value.func.value).split()
    return [f for f in lists["CFLAGS"] + lists["WARN"] if "Py_LIMITED_API" not in f]


class Builder:
    """Compiles into a temporary folder.

    An object is made once per source and set of flags, a program once.
    """

    def __init__(self, csrc, temp):
        self.csrc, self.temp, self.base = csrc, temp, flags_of_setup()
        self.lock, self.made = Lock(), {}

    def make(self, key, out, command):
        with self.lock:
            mine = self.made.setdefault(key, Lock())
        with mine:  # who comes second waits until it is there
            if not out.exists():
                run([*command, "-o", str(out) + ".tmp"])
                os.replace(str(out) + ".tmp", out)
        return out

    def object(self, source, flags):
        out = self.temp / f"{source.parent.name}-{source.stem}-{abs(hash(flags))}.o"
        return self.make((source, flags), out, [*gcc(), *self.base, *flags.split(), f"-I{self.csrc}", "-c",
                                                str(source)])

    def objects(self, variant, fault):
        sources = [source for folder in LIBRARY for source in sorted((self.csrc / folder).glob("*.c"))]
        for source in sources:
            faulty = f" -DEP_FAULT_IDX={fault}" if fault and source.parent.name == FAULTY else ""
            # see harness.c
            is_backend = (source.parent.name, source.name) == ("cpu", "backend.c")
            scarce = " -Dpthread_create=test_pthread_create -Dmmap=test_mmap" if is_backend else ""
            yield source, VARIANTS[variant] + faulty + scarce
        for name in TESTS:
            yield HERE / f"{name}.c", VARIANTS[variant]

    def program(self, variant, fault=0):
        objects = [str(self.object(*key)) for key in self.objects(variant, fault)]
        return self.make((variant, fault), self.temp / f"test-{variant}-{fault}",
                         [*gcc(), *VARIANTS[variant].split(), *objects, "-lpthread"])


def gcc():
    return os.environ.get("CC", "gcc").split()


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def without_random_addresses():
    """A prefix of commands: the older thread sanitizers cannot live with as random addresses as newer kernels
    give.
    """
    prefix = ["setarch", "-R"]
    usable = shutil.which("setarch") and subprocess.run([*prefix, "true"],
                                                        capture_output=True).returncode == 0
    return prefix if usable else []


def execute(program, args, limit_s):
    """Output, and exit status (None: ran past the limit)."""
    child = subprocess.Popen([*PREFIX, str(program), *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, errors="replace",
                             env={**os.environ, **ENVIRONMENT}, start_new_session=True)
    try:
        return child.communicate(timeout=limit_s)[0], child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)  # its children too
        return child.communicate()[0], None


PREFIX = without_random_addresses()


def how_caught(output, status):
    if status is None or "hangs in" in output:
        return HANG
    if "WARNING: ThreadSanitizer: data race" in output:
        return RACE
    if "ERROR: AddressSanitizer" in output or "runtime error:" in output:
        return MEMORY
    first = re.search(r"^FAILED.*$", output, re.M)
    if first:
        return TIMEOUT if "EP_ETIMEOUT" in first[0] else CODE if ": got EP_" in first[0] else DATA
    return None if status == 0 else f"exit status {status}"


# A run is a name and a function that returns (passed, verdict, output to show when it failed).

def header_run(csrc, header, language):
    def go():
        standard = "-std=c11" if language == "c" else "-std=c++17"
        done = subprocess.run([*gcc(), "-x", language, standard, *HEADER_FLAGS, f"-I{csrc}", "-fsyntax-only",
                               "-"], capture_output=True,
                              text=True, input=f'#include "{header}"\n#include "{header}"\n')
        return done.returncode == 0, "compiles" if done.returncode == 0 else "does not compile", done.stderr
    return f"header {header} {'c11' if language == 'c' else 'c++17'}", go


def whole_run(builder, variant, seed, percent):
    def go():
        output, status = execute(builder.program(variant), ["-s", str(seed), "-n", str(percent)], HANG_S)
        last = output.strip().splitlines()[-1] if output.strip() else ""
        passed = status == 0 and bool(re.fullmatch(r"[1-9]\d* passed, 0 failed", last))
        return passed, last if passed else how_caught(output, status) or "no tests", output
    return f"{variant} seed {seed}", go


def fault_run(builder, fault, repeat):
    what, variant, tests, ways = FAULTS[fault]

    def go():
        program, seen = builder.program(variant, fault), []
        for seed in range(1, repeat + 1):
            # A short limit for waits only where a time-out is one of the ways: a busy machine can exceed it.
            waits = ["-t", "0.7"] if TIMEOUT in ways else []
            output, status = execute(program, ["-s", str(seed), "-n", "40", *waits, *tests.split()], HANG_S)
            seen.append(how_caught(output, status))
            if seen[-1] not in ways:
                return False, f"NOT CAUGHT: {seen[-1] or 'nothing seen'} ({variant} {tests}: {what})", output
        return True, f"caught: {', '.join(sorted(set(seen)))} ({variant} {tests}: {what})", ""
    return f"fault {fault}", go


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true",
                        help="fewer steps, seeds and faults: under 40 seconds")
    parser.add_argument("--only", metavar="NAME", help="runs whose name begins with this")
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc",
                        help="other sources than those of the project")
    parser.add_argument("--repeat", type=int, default=1, help="try every fault with this many seeds")
    args = parser.parse_args()
    csrc, temp = args.csrc.resolve(), Path(tempfile.mkdtemp(prefix="epmoe-c-tests-"))
    builder = Builder(csrc, temp)
    runs = []
    for variant, (quick_percent, percent, quick_seeds, seeds) in WHOLE.items():
        for seed in range(1, 1 + (max(quick_seeds, bool(args.only)) if args.quick else seeds)):
            runs.append(whole_run(builder, variant, seed, quick_percent if args.quick else percent))
    runs += [fault_run(builder, n, args.repeat) for n in (QUICK_FAULTS if args.quick else FAULTS)]
    both = ["epmoe.h", "epmoe_device.h",
            *(f"protocol/{p.name}" for p in sorted((csrc / "protocol").glob("*.h")))]  # nvcc reads these too
    runs += [header_run(csrc, header, language) for header in both for language in ("c", "c++")]
    inside = [str(path.relative_to(csrc)) for path in sorted(csrc.rglob("*.h"))]
    runs += [header_run(csrc, name, "c") for name in inside
             if name not in both and not name.startswith(("kernels/", "python/"))]
    if args.only:
        runs = [r for r in runs if r[0] == args.only or r[0].startswith(args.only)]

    def timed(go):
        start = time.monotonic()
        try:
            return (*go(), time.monotonic() - start)
        except (RuntimeError, OSError) as error:
            return False, "does not build", str(error), time.monotonic() - start

    num_failed = 0
    try:
        with ThreadPoolExecutor(JOBS) as pool:
            names = {pool.submit(timed, go): name for name, go in runs}
            for future in as_completed(names):
                passed, verdict, output, seconds = future.result()
                num_failed += not passed
                print(f"{names[future]:32} {'ok    ' if passed else 'FAILED'} {seconds:6.1f} s  {verdict}",
                      flush=True)
                if not passed:
                    print("\n".join("    | " + line for line in output.splitlines()[:80]), flush=True)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    print(f"{len(runs) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
