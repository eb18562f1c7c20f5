"""The packages of requirements-integrations.txt, installed into a folder in build/ when a test needs them.

They are not in the environment of the project: the tests that need them add the folder to sys.path in
processes of their own. Without a package index these tests are skipped, which the summary of pytest counts
and `make check` prints as NOT CHECKED. EPMOE_MEGATRON_SOURCE=FOLDER, which contains the package megatron, has
the tests run another version of Megatron-core.
"""

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements-integrations.txt"
FOLDER = ROOT / "build" / f"integrations-{sys.version_info.major}.{sys.version_info.minor}"
LIMIT_S = 300


def _pip(target):
    """Install into a folder. Return pip's last words if it fails."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--retries", "1",
               "--timeout", "20", "--disable-pip-version-check", "--target", str(target), "-r",
               str(REQUIREMENTS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"pip did not end after {LIMIT_S} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def install():
    """Install what is missing. Return None, or why it could not be installed."""
    FOLDER.parent.mkdir(exist_ok=True)
    with open(f"{FOLDER}.lock", "w") as lock:  # processes of torchrun come here at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = FOLDER / REQUIREMENTS.name
        if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
            return None
        shutil.rmtree(FOLDER, ignore_errors=True)
        error = _pip(FOLDER)
        if error is None:
            shutil.copy(REQUIREMENTS, stamp)
        return error


def need(name):
    """Install, or skip the test: `name` is the framework, for the message."""
    error = install()
    if error is not None:
        reason = f"{name} could not be installed ({REQUIREMENTS.name})"
        not_checked = ROOT / "build" / "not_checked"
        if not_checked.exists() and reason not in not_checked.read_text().splitlines():
            with open(not_checked, "a") as f:
                f.write(reason + "\n")
        pytest.skip(f"{reason}: {error}")


def add_to_path():
    """Make the frameworks importable in this process, also without triton.

    torchtitan and Megatron-core, from 0.18 on, import kernels in Triton that no test uses: stand-ins here.
    """
    if str(FOLDER) not in sys.path:
        sys.path += filter(None, [os.environ.get("EPMOE_MEGATRON_SOURCE"), str(FOLDER)])
    if importlib.util.find_spec("triton") is None:
        for name in ("torchtitan.distributed.minimal_async_ep.kernels",
                     "megatron.core.transformer.moe.paged_stash"):
            sys.modules.setdefault(name, unittest.mock.MagicMock())


class _Stream:
    """A stand-in for a CUDA stream, which Megatron's all-to-all dispatcher uses without a GPU too."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


def prepare_megatron():
    """Make Megatron-core importable, and let its MoELayer run in this process without a GPU."""
    import torch
    import torch.distributed as dist

    add_to_path()
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda *args: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")
    exchange = dist.all_to_all_single

    def with_lists(out, x, output_split_sizes=None, input_split_sizes=None, **options):
        """Megatron makes arrays of the sizes only where they come from a GPU."""
        sizes = (None if s is None else [int(n) for n in s] for s in (output_split_sizes, input_split_sizes))
        return exchange(out, x, *sizes, **options)

    dist.all_to_all_single = with_lists
    from megatron.core import jit

    jit.disable_jit_fuser()  # it would compile for a minute
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # undefined there without Transformer Engine
        moe_utils.te_general_gemm = None


def prepare_sglang():
    """Make stand-ins of SGLang's modules importable, in a state in which SGLang has read its options."""
    import sglang_modules

    sglang_modules.load("stand-in")


def prepare_vllm():
    """Make stand-ins of vLLM's modules importable."""
    import vllm_modules

    vllm_modules.load("stand-in")


def run_page(name, tmp_path, run, num_ranks=2, prepare="add_to_path"):
    """Run the Python blocks of docs/{name} as one program on several ranks. Return its output.

    run: that of test_examples. prepare: the function of this module that the program calls first.
    """
    from test_docs import python_blocks

    code = "\n".join(code for _, code, _ in python_blocks(f"docs/{name}"))
    program = tmp_path / f"page_{Path(name).stem}.py"  # not the name of the framework
    program.write_text(f"import frameworks\nframeworks.{prepare}()\n" + code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(num_ranks), program.name]
    status, output = run(command, tmp_path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
                         PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert status == 0, output
    return output
