"""Every example runs as a reader runs it. test_docs.py runs the programs of README.md and docs/.

On the CPU each example is a process that forks its ranks (see warm/). Under torchrun with GPUs, rank 0 starts
each example with another torchrun, and the other ranks wait.
"""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import frameworks
from epmoe.testing import meeting_place
from rank_processes import LIMIT_S, run

ROOT = Path(__file__).resolve().parent.parent
# The command line of the seed shape, with fewer tokens and a smaller hidden size.
SEED_SMALL = "-M 48 -N 64 --topk 8 -G 384 --drop_ratio 0.3 --enable-local-combine --check --iters 2"
# File, arguments, a line of the output.
EXAMPLES = [
    ("01_heap.py", "", r"ring: ok"),
    ("02_dispatch_combine.py", "", r"dispatch and combine: ok"),
    ("03_moe_layer.py", "", r"largest difference .*: ok"),
    ("04_grouped_gemm.py", "", r"largest difference .*: ok"),
    ("05_fused.py", "", r"two fused calls and four stages: the same bits"),
    ("06_device.py", "", r"ring by kernels: ok"),
    ("lora.py", "", r"saved and loaded, the same logits: ok"),
    ("ep_a2a.py", SEED_SMALL, r"check passed"),
    ("ep_a2a.py", "--check --dtype float16 --empty-rank 1 --no-weight --num-sm 2 --iters 1", r"check passed"),
    ("ep_a2a.py", "-M 33 -N 64 --dtype float32 --combine-mode gather --drop-ratio 1 --seed 7 --iters 1",
     r"not checked"),
    ("train_lm.py", "--quick", r"demo: ok"),
    ("finetune_transformers.py", "", r"fine-tuned: ok"),
    ("finetune_lora.py", "", r"fine-tuned with LoRA: ok"),
    ("generate_transformers.py", "", r"the texts of all ranks .*: ok"),
    ("decode_gpt_oss.py", "", r"MXFP4, bfloat16 and the model in one process .*: ok"),
]
IDS = [f"{name} {arguments}".strip().replace(" ", "_") for name, arguments, _ in EXAMPLES]
OF_FOUR_RANKS = ("train_lm.py", "--quick --nodes 2", r"demo: ok")
SHORT = ("01_heap.py", "03_moe_layer.py", "05_fused.py", "lora.py", IDS[7])
ON_CPU = [pytest.param(*example, id=name, marks=[] if name in SHORT else [pytest.mark.long])
          for example, name in zip([*EXAMPLES, OF_FOUR_RANKS], [*IDS, "train_lm.py_nodes"])]


def check_packages(name):
    """Skip an example whose packages this machine does not have: transformers shards only with accelerate."""
    if name == "decode_gpt_oss.py":
        pytest.importorskip("safetensors")
        pytest.importorskip("transformers.integrations.mxfp4")
    if name.endswith(("_transformers.py", "finetune_lora.py")):
        pytest.importorskip("accelerate")
        pytest.importorskip("transformers.distributed.expert_parallel")
    if name == "finetune_lora.py":
        frameworks.need("peft")


def path_of(name, *folders):
    """Return PYTHONPATH of an example: the folders, and that of the packages it needs beside those here."""
    return ":".join([*folders, *([str(frameworks.FOLDER)] if name == "finetune_lora.py" else [])])


def check(outcome, line):
    """outcome: what run() has returned; line: a pattern that a whole line of the output must match."""
    code, output = outcome
    assert code == 0, output
    assert re.search(f"^{line}$", output, re.MULTILINE), output


def test_examples_are_all_listed():
    files = {p.name for p in (ROOT / "examples").glob("*.py") if not p.name.startswith("_")}
    assert files == {name for name, _, _ in EXAMPLES}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name, arguments, line", ON_CPU)
def test_examples_run_on_the_cpu(tmp_path, name, arguments, line):
    check_packages(name)
    command = [sys.executable, str(ROOT / "examples" / name), *arguments.split()]
    check(run(command, tmp_path, CUDA_VISIBLE_DEVICES="", EPMOE_TEST_WARM="1",
              PYTHONPATH=path_of(name, str(ROOT / "tests/warm"))), line)


@pytest.mark.cpu_only
@pytest.mark.parametrize("built, backend, gpus",
                         [(False, "", 0), (True, "cpu", 0), (True, "", 4), (True, "cuda", 4)])
def test_examples_use_gpus_only_if_epmoe_does(monkeypatch, built, backend, gpus):
    """The machine has four GPUs. A build for the CPU and EPMOE_BACKEND=cpu use none of them."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import _launch
    import train_lm

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(_launch._C, "HAS_CUDA", built)
    monkeypatch.setenv("EPMOE_BACKEND", backend)
    monkeypatch.setattr(sys, "argv", ["train_lm.py"])
    assert _launch.num_gpus() == gpus
    assert train_lm.parse_args().cuda == (gpus > 0)


@pytest.mark.cuda_only
@pytest.mark.parametrize("name, arguments, line", EXAMPLES, ids=IDS)
def test_examples_run_under_torchrun(ranks, tmp_path, name, arguments, line):
    check_packages(name)

    def start(world, device):
        if world.rank != 0:
            return None
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                    str(world.size)]
        return run([*torchrun, str(ROOT / "examples" / name), *arguments.split()], tmp_path,
                   PYTHONPATH=path_of(name, *filter(None, [os.environ.get("PYTHONPATH")])))

    outcome = ranks(start, timeout_s=LIMIT_S + 30)[0]
    check(outcome, line)
    if name != "train_lm.py":
        assert "ranks on cuda" in outcome[1], outcome[1]


# Runs ep_a2a.py with a right layer and with four faulty ones. Prints its exit status and output in one line.
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

def missing_row(self, x, *a, **k):
    if a:
        a = (a[0].clone(), *a[1:])
        a[0][3, 1] = -1
    return dispatch(self, x, *a, **k)

def run_example(**faulty):
    L.dispatch, L.combine = faulty.get("dispatch", dispatch), faulty.get("combine", combine)
    out, code = io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as e:
            code = e.code
    text = out.getvalue() if code in (0, 1, True, False) else code
    print(f"exit status {int(bool(code))}: {text}".replace(chr(10), " "))

run_example()
run_example(combine=wrong_sum)
run_example(dispatch=wrong_row)
run_example(dispatch=wrong_weight)
run_example(dispatch=missing_row)
"""


@pytest.mark.cpu_only
def test_examples_ep_a2a_finds_faults(tmp_path):
    """If the layer returns a wrong result, ep_a2a.py names the fault and its position, and exits with 1."""
    store = meeting_place()
    script, arguments = str(ROOT / "examples/ep_a2a.py"), "-M 16 -N 16 --topk 4 -G 8 --check --iters 1"
    program = f"import sys; sys.argv = [{script!r}, *{arguments!r}.split()]\n{FAULTY_LAYERS}"
    # The variables of torchrun for one rank. So the rank runs in the process that has the faulty layer.
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code, output = run([sys.executable, "-c", program], tmp_path, CUDA_VISIBLE_DEVICES="",
                       PYTHONPATH=f"{ROOT}:{ROOT / 'examples'}", **torchrun)
    printed = [line for line in output.splitlines() if line.startswith("exit status")]
    wanted = ["check passed", "combine: token 5", "dispatch: row 7", "dispatch: weight of row 9",
              "dispatch: 63 rows, wanted 64"]
    assert code == 0 and len(printed) == len(wanted), output
    for i, (line, want) in enumerate(zip(printed, wanted)):
        assert line.startswith(f"exit status {int(i > 0)}"), output
        assert want in line, output
        assert ("check passed" in line) == (i == 0), output


FAILING_RANK = """\
from _launch import launch


def main(rank, world_size, device):
    assert rank != 1, "rank 1 has a reason"


if __name__ == "__main__":
    launch(main, 2)
"""


@pytest.mark.cpu_only
def test_examples_failing_rank_fails_the_program(tmp_path):
    program = tmp_path / "failing.py"
    program.write_text(FAILING_RANK)
    code, output = run([sys.executable, str(program)], tmp_path, CUDA_VISIBLE_DEVICES="", EPMOE_TEST_WARM="1",
                       PYTHONPATH=f"{ROOT / 'tests/warm'}:{ROOT}:{ROOT / 'examples'}")
    assert code == 1 and "rank 1 has a reason" in output, output


@pytest.mark.cpu_only
@pytest.mark.parametrize("line", ["01_heap.py --nonsense", "ep_a2a.py --drop_ratio 1.5"])
def test_examples_reject_wrong_arguments(tmp_path, line):
    name, *arguments = line.split()
    code, output = run([sys.executable, str(ROOT / "examples" / name), *arguments], tmp_path,
                       CUDA_VISIBLE_DEVICES="")
    assert code == 2 and f"{name}: error: " in output, output
