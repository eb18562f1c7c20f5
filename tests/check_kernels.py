#!/usr/bin/env python3
"""Look at what nvcc made of the kernels: registers, spills, local memory, tensor-core instructions.

    check_kernels.py FOLDER    the build's temporary folder: kernels.log (nvcc's own report) and the objects

Fails when a kernel spills registers or has a stack, and when a kernel of the grouped GEMM for Hopper or a
megakernel is
without HGMMA or touches local memory.  The latter needs cuobjdump (the toolkit's, or the one of
requirements-dev.txt); without it that part is said to be unseen.
"""
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MULTIPLIERS = {"gemm_*.cu.o": "gemm_kernel",
               "fused_*.cu.o": "mega_kernel"}  # objects, and what their kernels are called
TOOLS = os.pathsep.join([os.environ.get("PATH", ""), *map(str, Path(sysconfig.get_path("purelib"),
                                                                    "nvidia").glob("*/bin"))])


def report(log):
    """{kernel: (registers, stack bytes, spilled bytes)} of sm_90a, from ptxas -v."""
    kernels, name = {}, None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for 'sm_90a'", line):
            name = found[1]
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
                                line):
            stack, stores, loads = map(int, found.groups())
        elif (found := re.search(r"Used (\d+) registers", line)) and name:
            kernels[name], name = (int(found[1]), stack, stores + loads), None
    return kernels


def disassembled(path):
    """Lines of cuobjdump, which asks nvdisasm."""
    command = [shutil.which("cuobjdump", path=TOOLS), "-sass", path]
    return subprocess.run(command, capture_output=True, text=True, check=True,
                          env={**os.environ, "PATH": TOOLS}).stdout.splitlines()


def instructions(path):
    """{kernel: (HGMMA, local loads and stores)} of an object."""
    seen, name = {}, None
    for line in disassembled(path):
        if found := re.search(r"Function : (\S+)", line):
            name = found[1]
            seen[name] = [0, 0]
        elif name:
            seen[name][0] += "HGMMA" in line
            seen[name][1] += bool(re.search(r"\b(LDL|STL)\b", line))
    return seen


def faults_of_multipliers(folder):
    """What is wrong with the instructions of the kernels that multiply."""
    faults = []
    for objects, kernel in MULTIPLIERS.items():
        with ThreadPoolExecutor() as pool:
            seen = [item for of in pool.map(instructions, sorted(folder.rglob(objects))) for item in of.items()
                    if kernel in item[0]]
        faults += [f"{name}: {hgmma} HGMMA, {local} in local memory" for name,
                   (hgmma, local) in seen if not hgmma or local]
        faults += [] if seen else [f"{objects}: no {kernel} was found"]
    return faults


def main():
    folder = Path(sys.argv[1])
    kernels = report((folder / "kernels.log").read_text())
    faults = [f"{name}: {stack} bytes of stack, {spilled} bytes spilled" for name,
              (_, stack, spilled) in kernels.items() if stack or spilled]
    most = max((registers for registers, _, _ in kernels.values()), default=0)
    if len(kernels) < 10:
        faults.append(f"the report names {len(kernels)} kernels only")
    unseen = ""
    if shutil.which("cuobjdump", path=TOOLS) and shutil.which("nvdisasm", path=TOOLS):
        faults += faults_of_multipliers(folder)
    else:
        unseen = "; their SASS was not looked at (no cuobjdump)"
    for fault in faults:
        print(fault)
    print(f"kernels: {len(kernels)} for sm_90a, {most} registers at most, {len(faults)} faults{unseen}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
