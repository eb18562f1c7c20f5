"""The command line of python -m benchmarks: options, refused arguments, ranks that it starts, progress."""

import json
import os
import re
import subprocess
import sys
import unittest.mock
from pathlib import Path

import pytest
import torch

import epmoe
from bench_cases import COMMANDS, on_the_cpu, run_command  # noqa: F401
from benchmarks import cli, layer, nodes, shapes, train
from benchmarks.progress import Progress
from benchmarks.run import Run
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run_of():
    """run_of(argv) returns the Run of a command whose only rank is this process."""
    runs = []

    def start(*argv):
        runs.append(Run(cli.parse(list(argv))))
        runs[-1].introduce()
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_bench_layer_measures_decoding_too(run_of):
    """On a GPU, layer adds two shapes with few tokens, but only if it measures dsv3."""
    run, other = run_of("layer"), run_of("layer", "--shapes", "seed")
    with (unittest.mock.patch.object(run, "on_gpu", True),
          unittest.mock.patch.object(run, "device", torch.device("cuda"))):
        found = {s.name: s for s in layer.shapes(run)}
    decode = {n: s for n, s in found.items() if n not in shapes.SHAPES}
    assert list(found)[1:4] == ["dsv3", "dsv3 T=128", "dsv3 T=1024"]
    assert [s.tokens for s in decode.values()] == [128, 1024]
    assert len(found) == len(shapes.SHAPES) + 2
    assert {(s.hidden, s.inner, s.experts, s.topk) for s in decode.values()} == {(7168, 2048, 256, 8)}
    assert [s.name for s in layer.shapes(other)] == ["seed-small"]


def test_bench_layer_fp8_measures_decoding_too(run_of):
    run = run_of("layer", "--fp8", "--shapes", "dsv3,seed")
    labels = [label for label, _ in cli.jobs_of("layer", run)]
    assert labels == ["dsv3-small", "dsv3-small T=16", "seed-small"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("gemm", "sm", "nodes", "transformers")])
def test_bench_num_sm_applies_to_every_layer(command):
    with unittest.mock.patch.object(epmoe._C, "layer_create", wraps=epmoe._C.layer_create) as create:
        rows, out, _ = run_command([command, "--shapes", "qwen3-30b", "--num-sm", "2", "--iters", "1"])
    # The second argument is the configuration.
    assert rows and {call.args[1].num_sm for call in create.call_args_list} == {2}
    assert (command == "ablation") == ("skipped: two-stage dispatch, 32 tail SMs" in out)


def test_bench_num_sm_of_a_choice_has_priority(run_of):
    run = run_of("ablation", "--num-sm", "2")
    op = run.layer(run.shape("qwen3-30b"), torch.float32, epmoe.EpAll2AllFusedOp, num_sm=3)
    assert op._config.num_sm == 3
    op.finalize()


def test_bench_says_which_shapes_it_skips(run_of, capsys):
    """16 ranks: the 8 experts of mixtral are too few, the 32 of qwen3-30b are two of each rank."""
    run = run_of("a2a", "--shapes", "mixtral,qwen3-30b")
    capsys.readouterr()
    with unittest.mock.patch.object(run, "size", 16):
        assert [s.name for s in run.shapes()] == ["qwen3-30b-small"]
    said = capsys.readouterr().out
    assert said == "skipped: mixtral-small, because 8 experts are not a multiple of 16 ranks\n"


@pytest.mark.parametrize("ranks, local, wanted", [
    (1, None, "1 ranks are not several nodes of 1"), (4, 3, "4 ranks are not several nodes of 3"),
    (4, 4, "4 ranks are not several nodes of 4"), (4, None, ["dsv3-small, 2 x 2"]),
    (4, 1, ["dsv3-small, 4 x 1"]),
])
def test_bench_nodes_requires_several_nodes(run_of, capsys, ranks, local, wanted):
    """Without --local-ranks a node has half of the ranks."""
    run = run_of("nodes", *(["--local-ranks", str(local)] if local else []))
    with unittest.mock.patch.object(run, "size", ranks):
        labels = [label for label, _ in nodes.jobs(run)]
    if isinstance(wanted, list):
        assert labels == wanted
    else:
        assert labels == [] and f"skipped: nodes, because {wanted}\n" in capsys.readouterr().out


@pytest.mark.parametrize("on_gpu, iters, rounds", [(False, None, 2), (False, 5, 5), (True, None, 6),
                                                   (True, 4, 4)])
def test_bench_train_alternates_in_rounds(run_of, on_gpu, iters, rounds):
    """--iters is the number of rounds after one to warm up. Every other round has the reverse order."""
    run, timed = run_of("train", *(["--iters", str(iters)] if iters else [])), []

    def timed_steps(run, step, calls):
        timed.append((step, calls))
        return [1.0, 2.0] if step == "a" else [3.0, 4.0]

    with (unittest.mock.patch.object(run, "on_gpu", on_gpu),
          unittest.mock.patch.object(train, "timed_steps", timed_steps)):
        found = train.alternate(run, {"a": "a", "b": "b"})
    calls = {"a": 20, "b": 8} if on_gpu else {"a": 1, "b": 1}  # 60 ms of each on a GPU
    names = [name for r in range(rounds + 1) for name in ("ab" if r % 2 else "ba")]
    assert timed[4:] == [(name, calls[name]) for name in names]
    assert found == {"a": {"forward": 1.0, "backward": 2.0, "both": 3.0},
                     "b": {"forward": 3.0, "backward": 4.0, "both": 7.0}}


def bench(*arguments, **env):
    """Run the command in a process. Return (exit code, stdout, stderr)."""
    variables = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S,
                          env=variables | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | env)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long
def test_bench_starts_its_ranks_without_torchrun():
    code, out, err = bench("--shapes", "mixtral", "--ranks", "2", "--iters", "1")
    assert code == 0, err
    assert out.startswith("2 ranks on a CPU") and "epmoe plan + dispatch" in out


@pytest.mark.parametrize("argv, text", [
    (["a2a", "--shapes", "mixtral,none"], "none: must be one of seed"),
    (["a2a", "--num-sm", "8,16"], "only sm takes several"),
    (["gemm", "--num-sm", "8"], "leave it out for gemm"),
    (["transformers", "--num-sm", "8"], "leave it out for transformers"),
    (["a2a", "--tokens", "8"], "only decode takes it"),
    (["a2a", "--local-ranks", "2"], "only nodes takes it"),
    (["a2a", "--fp8"], "only gemm, layer and train take it"),
    (["gemm", "--w4"], "only layer and decode take it"),
    (["layer", "--w4", "--fp8"], "pass it without --fp8"),
    (["decode", "--tokens", "8,0"], "0: must be a positive number"),
    (["sm", "--num-sm", "many"], "many: must be a positive number"),
    (["a2a", "--num-sm", "0"], "0: must be a positive number"),
    (["layer", "--iters", "0"], "0: must be a positive number"),
    (["a2a", "--json", "/no/such/folder/x.json"], "cannot write to its folder"),
])
def test_bench_rejects_wrong_arguments(argv, text, capsys):
    with pytest.raises(SystemExit):
        cli.parse(argv)
    assert text in capsys.readouterr().err


def test_bench_adds_its_rows_to_those_of_the_machine(tmp_path):
    """A bench leaves the rows of other benches in the file, and refuses figures of another machine."""
    path = tmp_path / "figures.json"
    command = ["worklog", "--iters", "1", "--json", str(path), "--commit", "new"]
    run_command(command)
    written = json.loads(path.read_text())
    assert written["commit"] == "new" and {r["bench"] for r in written["rows"]} == {"worklog"}
    other = {"bench": "layer", "shape": "c", "tokens": 4, "impl": "epmoe layer", "ms": 1.0}
    path.write_text(json.dumps(written | {"commit": "old", "rows": [other, *written["rows"]]}))
    run_command(command)
    again = json.loads(path.read_text())
    assert again["commit"] == "old" and again["rows"][0] == other
    assert [r.get("commit") for r in again["rows"][1:]] == ["new"] * len(written["rows"])
    path.write_text(json.dumps(written | {"machine": "4 x GPU"}))
    with pytest.raises(AssertionError, match="figures of 1 ranks on 4 x GPU, these are of 1 ranks on CPU"):
        run_command(command)


def test_bench_progress_prints_lines_without_a_terminal(capsys):
    lines = "[1/2, 0 s] one\n[1/2, 0 s] half of one\n[2/2, 0 s] two\n"
    for on in (True, False):
        with Progress(2, on=on) as progress:
            progress.step("one")
            progress.show("half of one")
            progress.step("two")
        out, err = capsys.readouterr()
        assert out == "" and re.sub(r"\d+ s", "0 s", err) == (lines if on else "")
