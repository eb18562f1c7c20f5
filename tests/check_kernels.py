#!/usr/bin/env python3
"""Check the machine code of the kernels: registers, spills, local memory, tensor-core instructions.

    check_kernels.py FOLDER    the temporary folder of the build: kernels.log (from nvcc) and the objects

The check fails if a kernel spills registers or has a stack, except for those of MAY_SPILL. It also fails if
a grouped GEMM kernel for Hopper or a megakernel contains no tensor-core instruction of its kind or accesses
local memory. The instruction is HGMMA, for FP8 QGMMA with E4M3 operands, and HMMA for few rows and weights of
4 bits. This second part needs cuobjdump, from the CUDA toolkit or from requirements-dev.txt. Without
cuobjdump, the output says that this part was not checked.
"""
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# objects: a pattern of the names of their kernels
GEMM_KERNELS = {"gemm_*.cu.o": "gemm_(low_rank_|narrow_)?kernel", "fused_*.cu.o": "mega_kernel"}
# Kernels that may spill, and the most bytes of stack. A warp of the low-latency combine loads the sums of
# four ranks at once (docs/experiments/decode.md, E-121). In GEMM + combine in FP8 the MMA warps have most of
# the registers: the others spill some for each chunk (docs/experiments/megakernels.md, E-127).
MAY_SPILL = {"ll_combine_kernel": 192, "grouped_gemm_combine_token_fp8": 120}
NVIDIA_PACKAGES = Path(sysconfig.get_path("purelib"), "nvidia")
TOOLS = os.pathsep.join([os.environ.get("PATH", ""), *map(str, NVIDIA_PACKAGES.glob("*/bin"))])


def report(log):
    """{kernel: (registers, stack bytes, spilled bytes)} for sm_90a, from the output of ptxas -v."""
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
    """The lines that cuobjdump prints. cuobjdump calls nvdisasm."""
    command = [shutil.which("cuobjdump", path=TOOLS), "-sass", path]
    return subprocess.run(command, capture_output=True, text=True, check=True,
                          env={**os.environ, "PATH": TOOLS}).stdout.splitlines()


def tensor_core(kernel):
    """The name of the tensor-core instruction that a kernel must have, and a pattern that finds it."""
    if "fp8" in kernel:
        return "QGMMA", r"\bQGMMA\S*\.E4M3\.E4M3\b"
    name = "HMMA" if "EpGemmW4ConfigILb0E" in kernel else "HGMMA"  # Lb0: not LARGE
    return name, rf"\b{name}\b"


def instructions(path):
    """{kernel: [number of tensor-core instructions, number of local loads and stores]} of an object."""
    seen, name = {}, None
    for line in disassembled(path):
        if found := re.search(r"Function : (\S+)", line):
            name = found[1]
            seen[name] = [0, 0]
        elif name:
            seen[name][0] += bool(re.search(tensor_core(name)[1], line))
            seen[name][1] += bool(re.search(r"\b(LDL|STL)\b", line))
    return seen


def instruction_faults(folder):
    """The faults in the instructions of the kernels that multiply, as texts."""
    faults = []
    for objects, kernel in GEMM_KERNELS.items():
        with ThreadPoolExecutor() as pool:
            by_object = list(pool.map(instructions, sorted(folder.rglob(objects))))
        seen = [item for by_name in by_object for item in by_name.items() if re.search(kernel, item[0])]
        faults += [f"{name}: {num} {tensor_core(name)[0]} instructions, {local} accesses of local memory"
                   for name, (num, local) in seen if not num or local and not allowed_stack(name)]
        faults += [] if seen else [f"{objects}: found no kernel that multiplies"]
    return faults


def allowed_stack(name):
    return next((most for kernel, most in MAY_SPILL.items() if kernel in name), 0)


def main():
    folder = Path(sys.argv[1])
    kernels = report((folder / "kernels.log").read_text())
    faults = [f"{name}: {stack} bytes of stack, {spilled} bytes spilled"
              for name, (_, stack, spilled) in kernels.items()
              if (stack or spilled) and stack > allowed_stack(name)]
    most = max((registers for registers, _, _ in kernels.values()), default=0)
    if len(kernels) < 10:
        faults.append(f"the report names only {len(kernels)} kernels, expected at least 10")
    not_checked = ""
    if shutil.which("cuobjdump", path=TOOLS) and shutil.which("nvdisasm", path=TOOLS):
        faults += instruction_faults(folder)
    else:
        not_checked = "; instructions NOT CHECKED (no cuobjdump)"
    for fault in faults:
        print(fault)
    print(f"kernels: {len(kernels)} for sm_90a, at most {most} registers, {len(faults)} faults{not_checked}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
