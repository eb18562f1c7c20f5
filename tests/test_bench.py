"""python -m epmoe.bench on the CPU: each command runs and tells what it should, and what it times has been
checked.
"""

import contextlib
import io
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
from cases import process_ranks
from epmoe import reference, trace
from epmoe.bench import ablation, check, cli, features, layer, overlap, shapes
from epmoe.bench.progress import Progress
from epmoe.bench.run import Run
from epmoe.bench.torch_nccl import TorchAllToAll
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent
FAKES = Path(__file__).resolve().parent / "fakes"
COMMANDS = {
    "a2a": ["--shapes", "mixtral,qwen3-30b", "--num-sm", "2", "--iters", "2"],
    "sm": ["--shapes", "mixtral", "--num-sm", "1,3", "--iters", "1"],
    "tokens": ["--shapes", "seed", "--iters", "1"],
    "layer": ["--shapes", "qwen3-30b,dsv3", "--iters", "1"],
    "growth": ["--shapes", "qwen3-30b", "--iters", "1"],
    "ablation": ["--shapes", "qwen3-30b", "--iters", "1"],
    "features": ["--shapes", "gpt-oss-120b", "--iters", "1"],
    "gemm": ["--shapes", "qwen3-30b", "--iters", "1"],
    "host": ["--iters", "1"],
}
EPMOE = {"epmoe plan", "epmoe plan + dispatch", "epmoe cached dispatch", "epmoe combine"}
TORCH = {"torch dispatch", "torch combine"}
GEMMS = ("gate and up", "down", "dgrad of down", "dgrad of gate and up", "wgrad of down",
         "wgrad of gate and up")
LAYERS = {"torch layer", "GEMMs alone", "epmoe layer, one after the other", "epmoe layer"}
EXPECTED = {
    "a2a": EPMOE | TORCH,
    "sm": EPMOE,
    "tokens": EPMOE | TORCH,
    "layer": LAYERS | {"torch gate and up alone", "torch down alone", "epmoe dispatch + gemm",
                       "epmoe gemm + combine"},
    "growth": LAYERS,
    "ablation": {choice for choice, options in ablation.CHOICES.items() if "num_sm" not in options},
    "features": {"combine, pre-reduced", "combine, a row a choice, pushed", "combine, a row a choice, pulled",
                 "dispatch, token saving",
                 "dispatch, a row a choice: bytes", "torch permute, saved by sorting"},
    "gemm": {f"{who} {what}" for who in ("torch", "epmoe") for what in GEMMS} | {"epmoe gate and up, SwiGLU"},
    "host": {"epmoe preprocess, host", "epmoe cached dispatch, host", "epmoe combine, host"},
}


def told(argv):
    """(rows, stdout, stderr) of this rank's part of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        rows = cli.run(cli.parse(argv))
    return rows, out.getvalue(), err.getvalue()


def every_command(rank, world_size, folder):
    """All commands one after the other: processes start once.  Then what needs DeepEP, with its stand-in."""
    os.environ["EPMOE_BACKEND"] = "cpu"  # this process may come from one that started before on_the_cpu
    results = {name: told([name, *more, "--json", f"{folder}/{name}.json"]) for name,
               more in COMMANDS.items()}
    sys.path.insert(0, str(FAKES))
    results["with DeepEP"] = told(["a2a", "--shapes", "qwen3-30b", "--iters", "1"])
    results["layer with DeepEP"] = told(["layer", "--shapes", "qwen3-30b", "--iters", "1"])
    return results, deep_ep_beside_oracle(rank, world_size), what_a_wrong_sum_says(rank)


def what_a_wrong_sum_says(rank):
    """How a2a ends when rank 1's combine is wrong in one number."""
    right = epmoe.EPAll2AllLayer.combine

    def wrong(self, *arguments):
        y = right(self, *arguments)
        y[2, 3] += 1
        return y

    with unittest.mock.patch.object(epmoe.EPAll2AllLayer, "combine", wrong if rank == 1 else right):
        try:
            told(["a2a", "--shapes", "mixtral", "--iters", "1"])
        except AssertionError as error:
            return str(error)


def deep_ep_beside_oracle(rank, world_size, num_experts=6, topk=3, hidden=24):
    """(the adapter's rows, the oracle's, the adapter's sums, the oracle's), of ranks with different numbers
    of tokens.
    """
    from epmoe.bench import deep_ep

    xs, idxs, ws = [], [], []
    for r in range(world_size):
        g = torch.Generator().manual_seed(int.from_bytes(os.urandom(6)) if r == rank else 0)
        xs.append(torch.randn(17 + 5 * r, hidden, generator=g))
        idxs.append(torch.rand(17 + 5 * r, num_experts, generator=g).topk(topk).indices)
        ws.append(torch.rand(17 + 5 * r, topk, generator=g))
    for tensors in (xs, idxs, ws):
        for r in range(world_size):
            torch.distributed.broadcast(tensors[r], r)
    library, error = deep_ep.load(torch.distributed.group.WORLD, torch.device("cpu"))
    assert library is not None, error
    peer = deep_ep.DeepEP(library, xs[rank], idxs[rank], ws[rank], num_experts, world_size, 24)
    peer.tune(lambda fn: (fn(), 1.0)[1])
    rows = peer.dispatch()
    plan = reference.plan(idxs, num_experts)
    want_rows = reference.dispatch(xs, plan)
    local = num_experts // world_size
    offsets = torch.cat([torch.zeros(world_size, 1, dtype=torch.int64),
                         plan["counts"].sum(0).view(world_size, local).cumsum(1)], 1)
    outs = [check.experts(r, offsets[w], w * local) for w, r in enumerate(want_rows)]
    want = reference.combine(outs, plan, idxs, num_experts, reference.dispatch_weights(ws, plan),
                             local_combine=True)
    got = peer.combine(check.experts(rows, peer.expert_offsets, rank * local))
    library.close()
    return rows, want_rows[rank], got, want[rank]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """Also where there are GPUs, and in the processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPMOE_BACKEND", "cpu")
        yield


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return folder, process_ranks(every_command, 2, str(folder), timeout_s=HANG_S)


@pytest.mark.parametrize("command", COMMANDS)
def test_bench_command_tells_and_writes(results, command):
    folder, ranks = results
    rows, out, err = ranks[0][0][command]
    assert {r["impl"] for r in rows
            if r["bench"] == command} == EXPECTED[command] and all(r["bench"] == command for r in rows)
    for row in rows:
        assert "-small" in row["shape"] and row["tokens"] > 0
        assert row["ms"] > 0 if "bytes" not in row["impl"] else "ms" not in row
    assert "say nothing about GPUs" in out and "no DeepEP: ModuleNotFoundError" in out
    assert max(map(len, out.splitlines())) <= 100
    assert re.search(r"^\[1/\d+, \d+ s\] " + command, err, re.MULTILINE)
    written = json.loads((folder / f"{command}.json").read_text())
    assert (
        written["rows"] == rows
        and written["gpus"] == 0
        and written["machine"] == "CPU"
        and "nothing about GPUs" in written["note"]
    )
    assert {"cuda", "torch", "date", "commit"} <= set(written)
    assert ranks[1][0][command][1:] == ("", "")  # one rank speaks


def test_bench_ratio_is_of_the_times(results):
    rows = {r["impl"]: r for r in results[1][0][0]["a2a"][0] if r["shape"] == "mixtral-small"}
    row = rows["epmoe plan + dispatch"]
    assert row["ratio_to"] == "torch" and row["ratio"] == pytest.approx(
        row["ms"] / rows["torch dispatch"]["ms"], rel=0.01, abs=1e-3
    )
    assert row["num_sm"] == 2 and row["wire_gbps"] == pytest.approx(row["wire_bytes"] / row["ms"] / 1e6,
                                                                    rel=0.1, abs=0.06)


def test_bench_goes_over_what_it_should(results):
    ranks = results[1]
    assert [r["num_sm"] for r in ranks[0][0]["sm"][0] if r["impl"] == "epmoe combine"] == [1, 3]
    assert [r["tokens"] for r in ranks[0][0]["tokens"][0] if r["impl"] == "epmoe combine"] == [16, 64]
    layers = [(r["shape"], r["tokens"]) for r in ranks[0][0]["layer"][0] if r["impl"] == "epmoe layer"]
    assert layers == [("qwen3-30b-small", 64), ("dsv3-small", 64), ("dsv3-small T=16", 16)]


def test_bench_features_count_bytes(results):
    """By a count of our own, from inputs as Run.inputs makes them."""
    rows = {r["impl"]: r for r in results[1][0][0]["features"][0]}
    distinct, choices = [], []
    for rank in range(2):
        g = torch.Generator().manual_seed(1000 + rank)
        away = torch.rand(64, 32, generator=g).topk(4).indices // 16 != rank
        choices.append(int(away.sum()))
        distinct.append(int(away.any(1).sum()))
    row_bytes = 180 * 4
    assert rows["dispatch, token saving"]["wire_bytes"] == max(distinct) * row_bytes
    assert rows["dispatch, a row a choice: bytes"]["wire_bytes"] == max(choices) * row_bytes
    assert rows["combine, pre-reduced"]["wire_bytes"] == max(distinct) * row_bytes
    assert rows["combine, a row a choice, pulled"]["wire_bytes"] == max(choices) * row_bytes


def test_bench_features_know_who_sends(ranks):
    """combine goes the way of dispatch back; with two ranks the most that one sends would not tell."""
    idxs = [torch.rand(11 + 4 * r, 6).topk(3).indices for r in range(3)]

    def rank_main(world, device):
        with epmoe.EPAll2AllLayer(world, 20, 16, 3, num_tot_experts=6, dtype=torch.float32,
                                  device=device) as layer:
            layout = layer.preprocess(idxs[world.rank])
            return [features.rows_sent(layout, stage, once).tolist() for stage in ("dispatch", "combine")
                    for once in (True, False)]

    to = [[(idx // 2 == r) for r in range(3)] for idx in idxs]
    once = [[int(at.any(1).sum()) for at in row] for row in to]
    every = [[int(at.sum()) for at in row] for row in to]
    for rank, got in enumerate(ranks(rank_main, world_size=3)):
        assert got == [once[rank], every[rank], [row[rank] for row in once], [row[rank] for row in every]]


def test_bench_deep_ep_is_a_peer_where_it_can_be_imported(results):
    rows, out, _ = results[1][0][0]["with DeepEP"]
    times = {r["impl"]: r["ms"] for r in rows}
    for stage, impl in (("dispatch", "epmoe plan + dispatch"), ("combine", "epmoe combine")):
        best = min(times[f"DeepEP {stage}, {n} SMs"] for n in (24, 48))
        ratios = next(r["ratios"] for r in rows if r["impl"] == impl)
        assert ratios["DeepEP"] == pytest.approx(times[impl] / best, rel=0.01, abs=1e-3)
    layers, more, _ = results[1][0][0]["layer with DeepEP"]
    assert "gloo, DeepEP" in out and max(map(len, (out + more).splitlines())) <= 100
    assert {"DeepEP layer, 24 SMs", "DeepEP layer, 48 SMs"} < {r["impl"] for r in layers}


def test_bench_deep_ep_does_what_the_oracle_does(results):
    for _, (rows, want_rows, got, want), _ in results[1]:
        assert torch.equal(rows, want_rows)
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


# ---- what is timed is right ----


def test_bench_ends_on_all_ranks_when_one_is_wrong(results):
    (*_, other), (*_, wrong) = results[1]
    assert "rank 1: combine: 1 of 64 tokens" in wrong and "rank 0: another rank" in other


@pytest.fixture
def dispatched():
    """(layer, its inputs, torch's way of the same) of a world of this process alone."""
    x, idx, weight = torch.randn(20, 16), torch.rand(20, 6).topk(3).indices, torch.rand(20, 3)
    with epmoe.World() as world, epmoe.EPAll2AllLayer(world, 20, 16, 3, num_tot_experts=6,
                                                      dtype=torch.float32, enable_local_combine=True,
                                                      device="cpu") as layer:
        yield layer, (x, idx, weight), TorchAllToAll(x, idx, weight, 6, 1)


def test_bench_check_passes_what_is_right_and_nothing_else(dispatched):
    layer, inputs, peer = dispatched
    rows, row_weight, layout = layer.dispatch(*inputs)
    assert check.rows_error(rows, row_weight, peer) == ""
    other = rows.clone()
    other[5, 3] += 1
    assert "1 of 60 rows" in check.rows_error(other, row_weight, peer)
    assert "weights" in check.rows_error(rows, row_weight.flip(0), peer)
    assert "wanted rows of shape" in check.rows_error(rows[:-1], row_weight, peer)
    y_rows = check.experts(rows, layout.expert_offsets, 0)
    y = layer.combine(y_rows, layout, row_weight)
    assert check.sums_error(y, y_rows, peer) == ""
    unweighted = layer.combine(y_rows, layout)
    assert "tokens differ" in check.sums_error(unweighted, y_rows, peer)
    y[7, 2] = float("nan")
    assert "1 of 20 tokens" in check.sums_error(y, y_rows, peer)


def test_bench_experts_tell_experts_apart(dispatched):
    """Without the stand-in a choice that went to the wrong expert would leave the sum as it is."""
    layer, (x, idx, weight), peer = dispatched
    rows, _, layout = layer.dispatch(x, idx, weight)
    y_rows = check.experts(rows, layout.expert_offsets, 0)
    expert = torch.repeat_interleave(torch.arange(6), layout.tokens_per_expert)
    assert torch.equal(y_rows, rows * torch.tensor([0.5, 1.0, 2.0, 4.0, 0.5, 1.0])[expert][:, None])


def test_bench_poisons_outputs():
    before = torch.are_deterministic_algorithms_enabled()
    with check.poisoned():
        assert torch.empty(1000).isnan().all() and (torch.empty(9, dtype=torch.int32) == 2**31 - 1).all()
    assert torch.are_deterministic_algorithms_enabled() == before


# ---- one rank's part, in this process ----


@pytest.fixture
def run_of():
    """run_of(argv): the Run of a command of this process alone."""
    runs = []

    def start(*argv):
        runs.append(Run(cli.parse(list(argv))))
        runs[-1].introduce()
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def test_bench_layer_decodes_too(run_of):
    """On a GPU: without --shapes, and where dsv3 is asked for."""
    run, other = run_of("layer"), run_of("layer", "--shapes", "seed")
    with unittest.mock.patch.object(run, "on_gpu", True), unittest.mock.patch.object(run, "device",
                                                                                     torch.device("cuda")):
        found = {s.name: s for s in layer.shapes(run)}
    decode = {n: s for n, s in found.items() if n not in shapes.SHAPES}
    assert list(found)[1:4] == ["dsv3", "dsv3 T=128",
                                "dsv3 T=1024"] and [s.tokens for s in decode.values()] == [128, 1024]
    assert len(found) == len(shapes.SHAPES) + 2 and {(s.hidden, s.inner, s.experts, s.topk)
                                                     for s in decode.values()} == {(7168, 2048, 256, 8)}
    assert [s.name for s in layer.shapes(other)] == ["seed-small"]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("gemm", "sm")])
def test_bench_num_sm_is_that_of_every_layer(command):
    with unittest.mock.patch.object(epmoe._C, "layer_create", wraps=epmoe._C.layer_create) as create:
        rows, out, _ = told([command, "--shapes", "qwen3-30b", "--num-sm", "2", "--iters", "1"])
    assert rows and {call.args[1][9]
                     for call in create.call_args_list} == {2}  # the last of the config is num_sm
    assert (command == "ablation") == ("skipped: two-stage dispatch, 32 tail SMs" in out)


def test_bench_num_sm_gives_way_to_what_a_choice_is_about(run_of):
    run = run_of("ablation", "--num-sm", "2")
    op = run.layer(run.shape("qwen3-30b"), torch.float32, epmoe.EpAll2AllFusedOp, num_sm=3)
    assert op._config[9] == 3
    op.finalize()


# ---- overlap: what it makes of the events, which only GPUs record ----

SEND, GEMM = (next(w for w, n in trace.SPANS.items() if n == name) for name in ("send", "gemm"))
EVENTS = torch.tensor([[0, 1, 0, 2000, SEND, 1], [0, 1, 3000, 1000, SEND, 0], [1, 2, 0, 3000, SEND, 1],
                       [0, 4, 0, 8000, GEMM, 5]])  # 8 us


class Recorded(contextlib.nullcontext):
    """In the place of trace.Trace: these events on each of two ranks."""

    def __init__(self, op, room):
        super().__init__(self)

    def events(self):
        return EVENTS

    def gather(self):
        return [EVENTS, EVENTS]


@pytest.mark.parametrize("given", [["trace"], ["json"], ["trace", "json"]])
def test_bench_overlap_tells_shares_and_draws(tmp_path, given):
    """A picture beside every file that is asked for."""
    with unittest.mock.patch.object(epmoe._C, "TRACE", 1), unittest.mock.patch.object(trace, "Trace",
                                                                                      Recorded):
        rows, out, _ = told(["overlap", *(a for what in given for a in (f"--{what}",
                                                                        str(tmp_path / f"{what}.json")))])
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 100
    for kernel in overlap.KERNELS:
        found = {r["impl"]: (r["total_us"], r["share"], r["spans"]) for r in rows
                 if r["impl"].startswith(kernel)}
        assert found == {f"{kernel}: send": (6.0, 6 / 16, 3),
                         f"{kernel}: gemm": (8.0, 1.0, 1)}  # of two movers, and of one multiplier
        assert re.search(re.escape(kernel) + r": send +6\.0 us +37\.5% +3 spans of 2\.00 us$", out,
                         re.MULTILINE)
        assert re.search(re.escape(kernel) + r": gemm +8\.0 us +100\.0% +1 spans of 8\.00 us$", out,
                         re.MULTILINE)
    pictures, traces = {f"{what}_overlap.png" for what in given}, {f"trace_{k.replace(' + ', '_')}.json"
                                                                   for k in overlap.KERNELS
                                                                   if "trace" in given}
    assert {p.name for p in tmp_path.iterdir()} - {"json.json"} == pictures | traces
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    for name in traces:
        assert len([e for e in json.loads((tmp_path / name).read_text())["traceEvents"]
                    if e["ph"] == "X"]) == 2 * len(EVENTS)


# ---- the command line ----


def bench(*arguments, **env):
    variables = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "epmoe.bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S,
                          env=variables | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | env)
    return done.returncode, done.stdout, done.stderr


def test_bench_alone_starts_its_ranks():
    code, out, err = bench("--shapes", "mixtral", "--ranks", "2", "--iters", "1")
    assert code == 0, err
    assert out.startswith("2 ranks on a CPU") and "epmoe plan + dispatch" in out


@pytest.mark.parametrize("argv, says", [
    (["a2a", "--shapes", "mixtral,none"], "none: must be one of seed"),
    (["a2a", "--num-sm", "8,16"], "only sm takes several"),
    (["gemm", "--num-sm", "8"], "leave it out for gemm"),
    (["sm", "--num-sm", "many"], "many: must be a positive number"),
    (["a2a", "--num-sm", "0"], "0: must be a positive number"),
    (["layer", "--iters", "0"], "0: must be a positive number"),
    (["a2a", "--json", "/no/such/folder/x.json"], "cannot write to its folder"),
])
def test_bench_refuses(argv, says, capsys):
    with pytest.raises(SystemExit):
        cli.parse(argv)
    assert says in capsys.readouterr().err


def test_bench_progress_is_lines_where_nobody_watches(capsys):
    for on in (True, False):
        with Progress(2, on=on) as progress:
            progress.step("one")
            progress.show("half of one")
            progress.step("two")
        out, err = capsys.readouterr()
        assert out == "" and re.sub(r"\d+ s", "0 s",
                                    err) == ("[1/2, 0 s] one\n[1/2, 0 s] half of one\n[2/2, 0 s] two\n" if on
                                             else "")
