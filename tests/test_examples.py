"""Every example, run as a reader would run it.  test_docs.py runs the programs of README.md and docs/.

On the CPU each is a process that starts its own ranks (forked from it, see warm/); under torchrun with GPUs,
rank 0 starts each with a torchrun of its own while the other ranks wait.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epmoe.testing import meeting_place
from pace import HANG_S

ROOT = Path(__file__).resolve().parent.parent
# their command line, but small
SEEDS = "-M 48 -N 64 --topk 8 -G 384 --drop_ratio 0.3 --enable-local-combine --check --iters 2"
# file, arguments, a line of the output
EXAMPLES = [
    ("01_heap.py", "", r"ring: ok"),
    ("02_dispatch_combine.py", "", r"dispatch and combine: ok"),
    ("03_moe_layer.py", "", r"largest difference .*: ok"),
    ("04_grouped_gemm.py", "", r"largest difference .*: ok"),
    ("05_fused.py", "", r"two fused calls and four stages: the same bits"),
    ("06_device.py", "", r"ring by kernels: ok"),
    ("ep_a2a.py", SEEDS, r"check passed"),
    ("ep_a2a.py", "--check --dtype float16 --empty-rank 1 --no-weight --num-sm 2 --iters 1", r"check passed"),
    ("ep_a2a.py", "-M 33 -N 64 --dtype float32 --combine-mode gather --drop-ratio 1 --seed 7 --iters 1",
     r"not checked"),
    ("train_lm.py", "--quick", r"demo: ok"),
]
IDS = [f"{name} {arguments}".strip().replace(" ", "_") for name, arguments, _ in EXAMPLES]
LIMIT_S = HANG_S


def environment(**more):
    """This one, without what torchrun has set for this process, and without a PYTHONPATH: examples run from a
    clone.
    """
    env = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "MASTER_ADDR",
                                                            "MASTER_PORT", "ROLE_RANK", "PYTHONPATH")
           and not n.startswith(("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_"))}
    return env | more


def run(command, cwd, **env):
    """(exit code, output) of a command that is ended, with all that it started, when it takes too long."""
    process = subprocess.Popen(command, cwd=cwd, env=environment(**env), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nnot done after {LIMIT_S} s"
    return process.returncode, output


def check(outcome, line):
    code, output = outcome
    assert code == 0, output
    assert re.search(f"^{line}$", output, re.MULTILINE), output


def test_examples_are_all_listed():
    files = {p.name for p in (ROOT / "examples").glob("*.py") if not p.name.startswith("_")}
    assert files == {name for name, _, _ in EXAMPLES}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name, arguments, line", EXAMPLES, ids=IDS)
def test_examples_run_on_the_cpu(tmp_path, name, arguments, line):
    command = [sys.executable, str(ROOT / "examples" / name), *arguments.split()]
    check(run(command, tmp_path, CUDA_VISIBLE_DEVICES="", EPMOE_TEST_WARM="1",
              PYTHONPATH=str(ROOT / "tests/warm")), line)


@pytest.mark.cpu_only
@pytest.mark.parametrize("built, backend, gpus", [(False, "", 0), (True, "cpu", 0), (True, "", 4),
                                                  (True, "cuda", 4)])
def test_examples_take_gpus_only_where_epmoe_does(monkeypatch, built, backend, gpus):
    """On a machine that has four: neither with a build for the CPU nor with EPMOE_BACKEND=cpu."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import _launch
    import train_lm

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(_launch._C, "HAS_CUDA", built)
    monkeypatch.setenv("EPMOE_BACKEND", backend)
    monkeypatch.setattr(sys, "argv", ["train_lm.py"])
    assert _launch.num_gpus() == gpus and train_lm.parse_args().cuda == (gpus > 0)


@pytest.mark.cuda_only
@pytest.mark.parametrize("name, arguments, line", EXAMPLES, ids=IDS)
def test_examples_run_under_torchrun(ranks, tmp_path, name, arguments, line):
    def start(world, device):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(world.size)]
        return run([*command, str(ROOT / "examples" / name), *arguments.split()],
                   tmp_path) if world.rank == 0 else None

    outcome = ranks(start, timeout_s=LIMIT_S + 30)[0]
    check(outcome, line)
    if name != "train_lm.py":
        assert "ranks on cuda" in outcome[1], outcome[1]


FAULTY_LAYERS = r"""
import contextlib, io, runpy, sys
import epmoe
L = epmoe.EPAll2AllLayer
dispatch, combine = L.dispatch, L.combine

def wrong_sum(self, *a):
    y = combine(self, *a).clone()
    y[5, 3] += 1
    return y

def wrong_row(self, *a, **k):
    rows, weights, layout = dispatch(self, *a, **k)
    rows[7, 0] += 1
    return rows, weights, layout

def wrong_weight(self, *a, **k):
    rows, weights, layout = dispatch(self, *a, **k)
    weights[9] *= 2
    return rows, weights, layout

def row_missing(self, x, *a, **k):
    if a:
        a = (a[0].clone(), *a[1:])
        a[0][3, 1] = -1
    return dispatch(self, x, *a, **k)

def says(**faulty):
    L.dispatch, L.combine = faulty.get("dispatch", dispatch), faulty.get("combine", combine)
    out, code = io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as e:
            code = e.code
    print(f"exit status {int(bool(code))}: {out.getvalue() if code in (0, 1, True, False) else code}".replace(chr(10), " "))

says(), says(combine=wrong_sum), says(dispatch=wrong_row), says(dispatch=wrong_weight), says(dispatch=row_missing)
"""


@pytest.mark.cpu_only
def test_examples_ep_a2a_finds_faults(tmp_path):
    """What a faulty layer would give, put between the layer and ep_a2a.py: which says what is wrong, where.
    """
    store = meeting_place()  # one rank, as torchrun would start it, so that the fault is in its process
    arguments = "-M 16 -N 16 --topk 4 -G 8 --check --iters 1"
    program = f"import sys; sys.argv = [{str(ROOT / 'examples/ep_a2a.py')!r}, *{arguments!r}.split()]\n{FAULTY_LAYERS}"
    code, output = run([sys.executable, "-c", program], tmp_path, CUDA_VISIBLE_DEVICES="", RANK="0",
                       WORLD_SIZE="1", LOCAL_RANK="0",
                       LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port),
                       TORCHELASTIC_USE_AGENT_STORE="True",
                       PYTHONPATH=f"{ROOT}:{ROOT / 'examples'}")
    said = [line for line in output.splitlines() if line.startswith("exit status")]
    wanted = ["check passed", "combine: token 5", "dispatch: row 7", "dispatch: weight of row 9",
              "dispatch: 63 rows, wanted 64"]
    assert code == 0 and len(said) == len(wanted), output
    for i, (line, want) in enumerate(zip(said, wanted)):
        assert (
            line.startswith(f"exit status {int(i > 0)}")
            and want in line
            and ("check passed" in line) == (i == 0)
        ), output


@pytest.mark.cpu_only
def test_examples_failing_rank_fails_the_program(tmp_path):
    program = tmp_path / "failing.py"
    program.write_text("from _launch import launch\n\n\ndef main(rank, world_size, device):\n"
                       "    assert rank != 1, 'rank 1 has a reason'\n\n\nif __name__ == '__main__':\n    launch(main, 2)\n")
    code, output = run([sys.executable, str(program)], tmp_path, CUDA_VISIBLE_DEVICES="", EPMOE_TEST_WARM="1",
                       PYTHONPATH=f"{ROOT / 'tests/warm'}:{ROOT}:{ROOT / 'examples'}")
    assert code == 1 and "rank 1 has a reason" in output, output


@pytest.mark.cpu_only
@pytest.mark.parametrize("line", ["01_heap.py --nonsense", "ep_a2a.py --drop_ratio 1.5", "ep_a2a.py -M -1"])
def test_examples_refuse_arguments(tmp_path, line):
    name, *arguments = line.split()
    code, output = run([sys.executable, str(ROOT / "examples" / name), *arguments], tmp_path,
                       CUDA_VISIBLE_DEVICES="")
    assert code == 2 and f"{name}: error: " in output, output
