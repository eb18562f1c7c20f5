#!/usr/bin/env python3
"""Build and run the C tests: with sanitizers, with random delays, and with seeded faults.

    run_c_tests.py [--quick] [--only NAME] [--csrc FOLDER] [--repeat N]
    run_c_tests.py --hostile N

The script prints one line for each run: name, verdict, seconds.

    header ...  Each host header compiles alone as C11 without a warning. Headers that nvcc also reads
                compile as C++17 too.
    plain       -O2 with random delays (EP_CHAOS)
    swift       -O2 without delays
    tsan        ThreadSanitizer, with delays
    asan        AddressSanitizer and UndefinedBehaviorSanitizer, with delays
    fault N     The tests must detect the seeded fault with this index (see FAULTS).
    ll-fault N  The same with the tests of the low-latency operations (see LL_FAULTS).

With --hostile, the only runs are of two tests with AddressSanitizer: a peer that sends at least N random
frames, and a peer that overwrites at least N words of a heap.

The script uses only the standard library. It needs gcc with libtsan, libasan and libubsan.
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
JOBS = 4  # more than most machines for tests have cores: many tests wait for a limit
HANG_S = 1800  # the limit for a whole test program; longer than any program takes on a busy machine
# The folders of all C sources except those of the Python module and of CUDA.
LIBRARY = ("runtime", "layer", "cpu")
# The sources of csrc/cuda that need only the fake runtime of test_launch.c, test_launch_order.c and
# test_counters.c.
LAUNCH = "capabilities cluster_launch guard launch_order tensor_maps tile_counters".split()
FAKE_CUDA = f"-I{ROOT / 'tests/fakes/cuda'}"
TESTS = ("main harness cases ll_cases steps test_alone test_bootstrap test_counters test_deferred_free "
         "test_device test_fork test_heap test_hostile test_interrupt test_launch test_launch_order "
         "test_low_latency test_memory test_order test_processes test_quantize test_record test_room "
         "test_error_propagation test_sharing test_steps test_tables test_threads test_wire").split()
# The functions of the system that a source calls from the tests instead. Those of harness.c fail at times.
# Of test_record.c, open can block, as it does on a file system that is stuck, and free counts its calls.
REPLACED = {"cpu/backend.c": ("pthread_create", "mmap", "posix_fallocate"),
            "runtime/bootstrap.c": ("geteuid",), "runtime/record_file.c": ("open", "free")}
# Some compilers define _FORTIFY_SOURCE by default. Then fcntl.h of glibc defines open as an inline function.
# The macro open=test_open renames that function too, and the source would call it instead of the tests' one.
WITHOUT_INLINE = " -U_FORTIFY_SOURCE"
# The folder whose sources include the protocol. Only these are compiled with a seeded fault.
FAULTY = "cpu"
HEADER_FLAGS = ("-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror -Wno-unused-function "
                "-D_GNU_SOURCE").split()
VARIANTS = {
    "swift": "-O2",
    "plain": "-O2 -DEP_CHAOS",
    "tsan": "-O1 -g -DEP_CHAOS -fsanitize=thread",
    "asan": ("-O1 -g -DEP_CHAOS -fsanitize=address,undefined -fno-sanitize-recover=all "
             "-fno-omit-frame-pointer"),
}
# Runs of all tests, the longest first: percentage of steps (quick, full) and number of seeds (quick, full).
WHOLE = {
    "asan": (20, 150, 1, 1),
    "tsan": (20, 120, 1, 2),
    "plain": (50, 300, 1, 2),
    "swift": (100, 300, 0, 1),
}
RACE = "data race"
MEMORY = "out of bounds"
DATA = "wrong data"
TIMEOUT = "timeout"
CODE = "wrong error"
HANG = "hang"
# index of the fault: (description, variant, tests, the symptoms that are accepted)
FAULTS = {
    1: ("an acquire load is relaxed", "tsan", "steps_local", {RACE}),
    2: ("a release store is relaxed", "tsan", "steps_local", {RACE}),
    3: ("the last worker does not acquire the copies of the others", "tsan", "steps_gather", {RACE}),
    4: ("enter and header have one bank instead of two", "tsan", "steps_scatter", {RACE, DATA, CODE}),
    5: ("a rank publishes enter before its header", "tsan", "steps_scatter", {RACE, DATA, CODE}),
    6: ("no rank waits for enter", "tsan", "steps_local", {RACE, DATA, CODE, TIMEOUT}),
    7: ("no rank waits for flags", "tsan", "steps_scatter", {RACE, DATA}),
    8: ("the first worker that leaves acts as the last", "tsan", "steps_local", {RACE, DATA, TIMEOUT}),
    9: ("two workers may get the same task", "tsan", "steps_gather", {RACE, DATA, TIMEOUT}),
    10: ("a rank accepts the counts of an earlier plan", "plain", "steps_local", {DATA, CODE, TIMEOUT}),
    11: ("a rank without tokens does not enter", "plain", "steps_local", {TIMEOUT}),
    12: ("a rank does not check the row numbers of a peer", "asan", "hostile", {MEMORY}),
    13: ("a rank sets a flag before it writes the slots", "tsan", "steps_local", {RACE, DATA}),
}
QUICK_FAULTS = (1, 4, 10, 12, 13)
# The same for the low-latency operations, whose words are others.
LL_FAULTS = {
    4: ("words and slots have one bank", "tsan", "ll_steps", {RACE, DATA, CODE, TIMEOUT}),
    5: ("a cell has its epoch before it has its value", "plain", "ll_steps ll_buffers", {DATA, CODE}),
    6: ("no rank waits for heads", "plain", "ll_steps", {DATA, CODE, TIMEOUT}),
    7: ("no rank waits for the words of a slot", "plain", "ll_steps", {DATA}),
    8: ("the first worker that leaves acts as the last", "tsan", "ll_steps", {RACE, DATA, CODE, TIMEOUT}),
    10: ("a rank accepts a cell of an earlier operation", "plain", "ll_steps", {DATA, CODE, TIMEOUT}),
    14: ("a rank does not clear the slots of a void operation", "plain", "ll_error_propagation", {DATA}),
    15: ("a rank does not set a word to 0 after reading it", "plain", "ll_steps", {DATA}),
}
QUICK_LL_FAULTS = (10, 14, 15)
ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66 second_deadlock_stack=1",
    "ASAN_OPTIONS": "exitcode=67 detect_stack_use_after_return=1 strict_string_checks=1",
    "UBSAN_OPTIONS": "exitcode=68 print_stacktrace=1",
}


def flags_of_setup():
    """Return CFLAGS and WARN of setup.py, without the flags of the Python module."""
    lists = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        name = getattr(node.targets[0], "id", None) if isinstance(node, ast.Assign) else None
        if name in ("WARN", "CFLAGS"):
            lists[name] = ast.literal_eval(node.value.func.value).split()
    return [f for f in lists["CFLAGS"] + lists["WARN"] if "Py_LIMITED_API" not in f]


class Builder:
    """Compiles into a temporary folder. Each object and each program is built only once."""

    def __init__(self, csrc, temp):
        self.csrc = csrc
        self.temp = temp
        self.base = flags_of_setup()
        self.lock = Lock()
        self.file_locks = {}

    def make(self, key, out, command):
        with self.lock:
            file_lock = self.file_locks.setdefault(key, Lock())
        with file_lock:  # A second thread that needs the file waits here until the first has built it.
            if not out.exists():
                run([*command, "-o", str(out) + ".tmp"])
                os.replace(str(out) + ".tmp", out)
        return out

    def object(self, source, flags):
        out = self.temp / f"{source.parent.name}-{source.stem}-{abs(hash(flags))}.o"
        command = [*gcc(), *self.base, *flags.split(), f"-I{self.csrc}", "-c", str(source)]
        return self.make((source, flags), out, command)

    def objects(self, variant, fault):
        """Yield (source, flags) of each object of a program."""
        for source in (path for folder in LIBRARY for path in sorted((self.csrc / folder).glob("*.c"))):
            faulty = f" -DEP_FAULT_IDX={fault}" if fault and source.parent.name == FAULTY else ""
            replaced = REPLACED.get(f"{source.parent.name}/{source.name}", ())
            macros = "".join(f" -D{name}=test_{name}" for name in replaced)
            yield source, VARIANTS[variant] + faulty + macros + (WITHOUT_INLINE if replaced else "")
        for name in LAUNCH:
            yield self.csrc / "cuda" / f"{name}.c", f"{VARIANTS[variant]} {FAKE_CUDA}"
        for name in TESTS:
            yield HERE / f"{name}.c", f"{VARIANTS[variant]} {FAKE_CUDA}"

    def program(self, variant, fault=0):
        objects = [str(self.object(*key)) for key in self.objects(variant, fault)]
        out = self.temp / f"test-{variant}-{fault}"
        command = [*gcc(), *VARIANTS[variant].split(), *objects, "-lpthread", "-lm"]
        return self.make((variant, fault), out, command)


def gcc():
    return os.environ.get("CC", "gcc").split()


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def without_random_addresses():
    """Return a command prefix that switches address randomisation off, or [] where this is not possible.

    An older ThreadSanitizer fails if the kernel uses as many random address bits as newer kernels do.
    """
    prefix = ["setarch", "-R"]
    if not shutil.which("setarch"):
        return []
    return [] if subprocess.run([*prefix, "true"], capture_output=True).returncode else prefix


def execute(program, args, limit_s):
    """Return the output and the exit status. The status is None if the program exceeded the limit."""
    child = subprocess.Popen([*PREFIX, str(program), *args], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace",
                             env={**os.environ, **ENVIRONMENT}, start_new_session=True)
    try:
        return child.communicate(timeout=limit_s)[0], child.returncode
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)  # also ends the processes that the program has started
        return child.communicate()[0], None


PREFIX = without_random_addresses()


def symptom_of(output, status):
    """Return the first symptom of a failure, or None if the program succeeded."""
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


# A run is a name and a function that returns (passed, verdict, output to print after a failure).


def header_run(csrc, header, language):
    def go():
        twice = f'#include "{header}"\n#include "{header}"\n'
        command = [*gcc(), "-x", language, f"-std={standard}", *HEADER_FLAGS, f"-I{csrc}", FAKE_CUDA]
        command += ["-fsyntax-only", "-"]
        done = subprocess.run(command, capture_output=True, text=True, input=twice)
        return done.returncode == 0, "compiles" if done.returncode == 0 else "does not compile", done.stderr

    standard = "c11" if language == "c" else "c++17"
    return f"header {header} {standard}", go


def whole_run(builder, variant, seed, percent):
    def go():
        output, status = execute(builder.program(variant), ["-s", str(seed), "-n", str(percent)], HANG_S)
        last = output.strip().splitlines()[-1] if output.strip() else ""
        passed = status == 0 and bool(re.fullmatch(r"[1-9]\d* passed, 0 failed", last))
        return passed, last if passed else symptom_of(output, status) or "no tests", output

    return f"{variant} seed {seed}", go


def hostile_run(builder, test, words, percent, num):
    """Run a test with more and more seeds, until it has sent frames or overwritten words num times."""
    def go():
        done, seed = 0, 0
        while done < num:
            seed += 1
            args = ["-s", str(seed), "-n", str(percent), test]
            output, status = execute(builder.program("asan"), args, HANG_S)
            found = re.search(words, output)
            if status != 0 or not found:
                return False, f"seed {seed}: {symptom_of(output, status) or 'no tests'}", output
            done += int(found[1])
        return True, f"{done} with {seed} seeds", ""

    return f"hostile: {words.partition('(')[0]}", go


def hostile_runs(builder, num):
    return [hostile_run(builder, "wire_call_records", r"sent (\d+) random frames", 5000, num),
            hostile_run(builder, "hostile_peer", r"overwrote (\d+) words", 100, num)]


def fault_run(builder, name, fault, table, repeat):
    description, variant, tests, accepted = table[fault]
    where = f"{variant} {tests}: {description}"

    def go():
        program, seen = builder.program(variant, fault), []
        for seed in range(1, repeat + 1):
            # Waits have a short limit only if a timeout is accepted, because a busy machine can exceed it.
            limit = ["-t", "0.7"] if TIMEOUT in accepted else []
            output, status = execute(program, ["-s", str(seed), "-n", "40", *limit, *tests.split()], HANG_S)
            symptom = symptom_of(output, status)
            seen.append(symptom)
            if symptom not in accepted:
                return False, f"NOT DETECTED: {symptom or 'no failure'} ({where})", output
        return True, f"detected: {', '.join(sorted(set(seen)))} ({where})", ""

    return f"{name} {fault}", go


def all_runs(builder, args):
    """Return the runs that the command line selects, the longest first."""
    csrc, runs = builder.csrc, []
    for variant, (quick_percent, percent, quick_seeds, seeds) in WHOLE.items():
        num_seeds = max(quick_seeds, bool(args.only)) if args.quick else seeds
        for seed in range(1, 1 + num_seeds):
            runs.append(whole_run(builder, variant, seed, quick_percent if args.quick else percent))
    for name, table, quick in (("fault", FAULTS, QUICK_FAULTS), ("ll-fault", LL_FAULTS, QUICK_LL_FAULTS)):
        runs += [fault_run(builder, name, n, table, args.repeat) for n in (quick if args.quick else table)]

    # nvcc reads these headers too, so they must also compile as C++.
    both = ["epmoe.h", "epmoe_device.h"]
    both += [f"protocol/{p.name}" for p in sorted((csrc / "protocol").glob("*.h"))]
    runs += [header_run(csrc, header, language) for header in both for language in ("c", "c++")]
    # The headers of python/ need those of Python, and the headers of kernels/ and cuda/ those of CUDA.
    names = [str(path.relative_to(csrc)) for path in sorted(csrc.rglob("*.h"))]
    c_only = [n for n in names if n not in both and not n.startswith(("cuda/", "kernels/", "python/"))]
    runs += [header_run(csrc, header, "c") for header in c_only]
    return [r for r in runs if r[0].startswith(args.only)]


def timed(go):
    """Return (passed, verdict, output, seconds) of a run."""
    start = time.monotonic()
    try:
        return (*go(), time.monotonic() - start)
    except (RuntimeError, OSError) as error:
        return False, "does not build", str(error), time.monotonic() - start


def execute_runs(runs):
    """Execute the runs, JOBS at a time, and print their verdicts. Return the number of failed runs."""
    num_failed = 0
    with ThreadPoolExecutor(JOBS) as pool:
        names = {pool.submit(timed, go): name for name, go in runs}
        for future in as_completed(names):
            passed, verdict, output, seconds = future.result()
            num_failed += not passed
            print(f"{names[future]:32} {'ok    ' if passed else 'FAILED'} {seconds:6.1f} s  {verdict}",
                  flush=True)
            if not passed:
                print("\n".join("    | " + line for line in output.splitlines()[:80]), flush=True)
    return num_failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true",
                        help="fewer steps, seeds and faults: about a minute on two idle cores")
    parser.add_argument("--only", metavar="NAME", default="", help="only runs whose name begins with NAME")
    parser.add_argument("--csrc", type=Path, default=ROOT / "csrc",
                        help="a folder with other sources than those of the project")
    parser.add_argument("--hostile", type=int, default=0, metavar="N",
                        help="only attacks, with at least N random frames and N overwritten words")
    parser.add_argument("--repeat", type=int, default=1, help="run each fault with this many seeds")
    args = parser.parse_args()
    temp = Path(tempfile.mkdtemp(prefix="epmoe-c-tests-"))
    try:
        builder = Builder(args.csrc.resolve(), temp)
        runs = hostile_runs(builder, args.hostile) if args.hostile else all_runs(builder, args)
        num_failed = execute_runs(runs)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    print(f"{len(runs) - num_failed} passed, {num_failed} failed")
    return 1 if num_failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
