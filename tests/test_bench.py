"""python -m benchmarks on two CPU ranks: every command prints and writes the expected rows.

test_bench_check.py tests the checks that run before a measurement, test_bench_options.py the command line.
"""

import json
import os
import re
import sys
import unittest.mock
from pathlib import Path

import pytest
import torch

import epmoe
from bench_cases import COMMANDS, liger_modules, on_the_cpu, run_command  # noqa: F401
from benchmarks import ablation, check, features
from benchmarks.run import ratio_text
from cases import first, process_ranks
from epmoe import reference
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
FAKES = Path(__file__).resolve().parent / "fakes"

# The implementations that each command must measure.
EPMOE = {"epmoe plan", "epmoe plan + dispatch", "epmoe cached dispatch", "epmoe combine"}
TORCH = {"torch dispatch", "torch combine"}
GEMMS = ("gate and up", "down", "dgrad of down", "dgrad of gate and up", "wgrad of down",
         "wgrad of gate and up")
CALLS = ("dispatch", "dispatch fp8", "combine", "pair", "pair fp8")
LAYERS = {"torch layer", "GEMMs alone", "epmoe layer, one after the other", "epmoe layer"}
EXPECTED = {
    "a2a": EPMOE | TORCH,
    "sm": EPMOE,
    "tokens": EPMOE | TORCH,
    "layer": LAYERS | {"epmoe layer with a capacity", "torch gate and up alone", "torch down alone",
                       "epmoe dispatch + gemm", "epmoe gemm + combine", "epmoe GEMMs alone",
                       "epmoe gate and up alone", "epmoe down alone"},
    "growth": LAYERS,
    "ablation": {choice for choice, options in ablation.CHOICES.items() if "num_sm" not in options},
    "features": {"combine, pre-reduced", "combine, a row a choice, pushed", "combine, a row a choice, pulled",
                 "dispatch, token saving", "dispatch, a row a choice: bytes",
                 "torch permute, saved by sorting"},
    "gemm": {f"{library} {gemm}" for library in ("torch", "epmoe") for gemm in GEMMS}
            | {"epmoe gate and up, SwiGLU"},
    "host": {"epmoe preprocess, host", "epmoe cached dispatch, host", "epmoe combine, host",
             "epmoe dispatch + gemm, host", "epmoe gemm + combine, host"}
            | {f"epmoe low-latency {call}{out}, host" for call in ("dispatch", "combine")
               for out in ("", ", out=")},
    "nodes": {"epmoe over nodes", "rail slowed down"},
    "decode": {f"epmoe {call}" for call in (*CALLS, "combine fp8")}
              | {f"epmoe {call} {half}" for call in CALLS[:3] for half in ("send", "recv")}
              | {f"torch {call}" for call in ("dispatch", "combine", "pair", "all_to_all_single alone")}
              | {"GEMMs alone", "torch GEMMs alone", "epmoe layer"},
    "train": {f"{name} {what}" for name in ("torch", "torch products", "epmoe stages", "epmoe")
              for what in ("forward", "backward", "both")}
             | {f"{name} kept bytes" for name in ("torch", "epmoe stages", "epmoe")}
             | {"torch inference", "epmoe inference"},
    "transformers": {"eager", "grouped_mm", "batched_mm", "epmoe", "eager, training step",
                     "grouped_mm, training step", "epmoe, training step"},
    "worklog": {"torch", "epmoe", "epmoe, factor in weights"},
}


NUM_QUICK = 1  # the commands that also run where long tests do not


def run_commands(rank, world_size, folder, is_long):
    """Run the commands in one process, so that processes start only once.

    The commands that need DeepEP run last, with its stand-in from the folder fakes.
    """
    # This process may be forked from a server that started before the fixture on_the_cpu.
    os.environ["EPMOE_BACKEND"] = "cpu"
    results = {name: run_command([name, *arguments, "--json", f"{folder}/{name}.json"])
               for name, arguments in list(COMMANDS.items())[:None if is_long else NUM_QUICK]}
    if not is_long:
        return results, None, error_of_wrong_sum(rank), None
    with unittest.mock.patch.dict(sys.modules, liger_modules()):
        results["train with Liger"] = run_command(["train", "--shapes", "mixtral", "--iters", "1"])
    sys.path.insert(0, str(FAKES))
    results["with DeepEP"] = run_command(["a2a", "--shapes", "qwen3-30b", "--iters", "1"])
    results["decode with DeepEP"] = run_command(["decode", "--tokens", "3", "--iters", "1"])
    results["layer with DeepEP"] = run_command(["layer", "--shapes", "qwen3-30b", "--iters", "1"])
    import deep_ep

    with unittest.mock.patch.object(deep_ep.Buffer, "get_dispatch_layout", refuses(rank)):
        for bench in ("layer", "a2a"):
            results[f"{bench}, refused"] = run_command([bench, "--shapes", "qwen3-30b", "--iters", "1"])
    with unittest.mock.patch.object(deep_ep, "ElasticBuffer", refuses(rank)):
        results["a2a, V2 refused"] = run_command(["a2a", "--shapes", "qwen3-30b", "--iters", "1"])
    of_v2 = error_of_wrong_sum(rank, deep_ep.ElasticBuffer, lambda out: out[0])
    return results, deep_ep_and_reference(rank, world_size), error_of_wrong_sum(rank), of_v2


def refuses(rank):
    """DeepEP's get_dispatch_layout where it refuses a shape."""
    def refuse(*arguments, **options):
        raise AssertionError(f"rank {rank}: num_experts_per_rank <= 64")

    return refuse


def error_of_wrong_sum(rank, kind=epmoe.EPAll2AllLayer, sums=lambda out: out):
    """Return the error of a2a when one number of rank 1's combine is wrong.

    kind: the class of the combine.  sums(out): those of its result.
    """
    right = kind.combine

    def wrong(self, *arguments, **options):
        out = right(self, *arguments, **options)
        sums(out)[2, 3] += 1
        return out

    with unittest.mock.patch.object(kind, "combine", wrong if rank == 1 else right):
        try:
            run_command(["a2a", "--shapes", "mixtral", "--iters", "1"])
        except AssertionError as error:
            return str(error)


def deep_ep_and_reference(rank, world_size, num_experts=6, topk=3, hidden=24):
    """Return (rows of the DeepEP adapter, rows of the reference, sums of the adapter, sums of the reference).

    The ranks have different numbers of tokens.
    """
    from benchmarks import deep_ep

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


@pytest.fixture(scope="module")
def results(tmp_path_factory, request):
    """(folder of the JSON files, results of run_commands for each rank)"""
    folder = tmp_path_factory.mktemp("bench")
    return folder, process_ranks(run_commands, 2, str(folder), request.config.option.long, timeout_s=HANG_S)


@pytest.mark.long
def test_bench_train_beside_liger(results):
    rows = {r["impl"]: r for r in results[1][0][0]["train with Liger"][0]}
    assert {"Liger forward", "Liger backward", "Liger both", "Liger kept bytes"} <= rows.keys()
    assert set(rows["epmoe both"]["ratios"]) == {"torch", "GEMMs", "Liger"}


def test_bench_ratios_are_short():
    assert [ratio_text(r) for r in (0.004, 1, 9.994, 9.996, 99.94, 99.96, 1234.5)] == [
        "0.00", "1.00", "9.99", "10.0", "99.9", "100", "1234"]


@pytest.mark.parametrize("command", first(NUM_QUICK, list(COMMANDS)))
def test_bench_command_prints_and_writes_rows(results, command):
    folder, ranks = results
    rows, out, err = ranks[0][0][command]
    assert {r["impl"] for r in rows if r["bench"] == command} == EXPECTED[command]
    assert all(r["bench"] == command for r in rows)
    for row in rows:
        assert "-small" in row["shape"] and row["tokens"] > 0
        assert row["ms"] > 0 if "bytes" not in row["impl"] else "ms" not in row
    assert "say nothing about GPUs" in out and "no DeepEP: ModuleNotFoundError" in out
    assert max(map(len, out.splitlines())) <= 100
    assert re.search(r"^\[1/\d+, \d+ s\] " + command, err, re.MULTILINE)
    written = json.loads((folder / f"{command}.json").read_text())
    assert written["rows"] == rows
    assert written["gpus"] == 0 and written["machine"] == "CPU"
    assert "nothing about GPUs" in written["note"]
    assert {"cuda", "torch", "date", "commit"} <= set(written)
    assert ranks[1][0][command][1:] == ("", "")  # only rank 0 prints


def test_bench_ratio_is_computed_from_times(results):
    rows = {r["impl"]: r for r in results[1][0][0]["a2a"][0] if r["shape"] == "mixtral-small"}
    row = rows["epmoe plan + dispatch"]
    ratio = row["ms"] / rows["torch dispatch"]["ms"]
    assert row["ratio_to"] == "torch" and row["ratio"] == pytest.approx(ratio, rel=0.01, abs=1e-3)
    rate = row["wire_bytes"] / row["ms"] / 1e6
    assert row["num_sm"] == 2 and row["wire_gbps"] == pytest.approx(rate, rel=0.1, abs=0.06)


@pytest.mark.long
def test_bench_measures_every_num_sm_and_token_count(results):
    ranks = results[1]
    assert [r["num_sm"] for r in ranks[0][0]["sm"][0] if r["impl"] == "epmoe combine"] == [1, 3]
    assert [r["tokens"] for r in ranks[0][0]["tokens"][0] if r["impl"] == "epmoe combine"] == [16, 64]
    layers = [(r["shape"], r["tokens"]) for r in ranks[0][0]["layer"][0] if r["impl"] == "epmoe layer"]
    assert layers == [("qwen3-30b-small", 64), ("dsv3-small", 64), ("dsv3-small T=16", 16)]


@pytest.mark.long
def test_bench_features_count_bytes(results):
    """The test makes the same inputs as Run.inputs and counts the bytes itself."""
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


def test_bench_features_count_rows_per_peer(ranks):
    """combine sends the rows of dispatch in the opposite direction.

    Three ranks are needed. With two, the largest count is the same in both directions.
    """
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


@pytest.mark.long
def test_bench_compares_with_deep_ep_if_importable(results):
    rows, out, _ = results[1][0][0]["with DeepEP"]
    times = {r["impl"]: r["ms"] for r in rows}
    for stage, impl in (("dispatch", "epmoe plan + dispatch"), ("combine", "epmoe combine")):
        best = min(times[f"DeepEP {stage}, {n} SMs"] for n in (24, 48))
        ratios = next(r["ratios"] for r in rows if r["impl"] == impl)
        assert ratios["DeepEP"] == pytest.approx(times[impl] / best, rel=0.01, abs=1e-3)
    layers, more, _ = results[1][0][0]["layer with DeepEP"]
    assert "gloo, DeepEP, DeepEP V2" in out and max(map(len, (out + more).splitlines())) <= 100
    assert {"DeepEP layer, 24 SMs", "DeepEP layer, 48 SMs"} < {r["impl"] for r in layers}


@pytest.mark.long
@pytest.mark.parametrize("bench", ["layer", "a2a"])
def test_bench_leaves_out_deep_ep_where_it_refuses_a_shape(results, bench):
    """The rows that would be compared with it say why they are not. The bench goes on with V2."""
    rows, out, _ = results[1][0][0][f"{bench}, refused"]
    why = "AssertionError: rank 0: num_experts_per_rank <= 64"
    assert f"no DeepEP for qwen3-30b-small with 48 SMs: {why}" in out
    impls = {r["impl"] for r in rows}
    assert any("epmoe" in impl for impl in impls)
    assert {impl.startswith("DeepEP V2") for impl in impls if "DeepEP" in impl} == {True} & {bench == "a2a"}
    assert not any("DeepEP" in r.get("ratios", {}) for r in rows)
    compared = {"a2a": "epmoe plan + dispatch", "layer": "epmoe layer"}[bench]
    assert [r["left_out"] for r in rows if r["impl"] == compared] == [{"DeepEP": why}]


@pytest.mark.long
def test_bench_compares_with_deep_ep_v2_if_importable(results):
    rows, _, _ = results[1][0][0]["with DeepEP"]
    times = {r["impl"]: r["ms"] for r in rows}
    for stage, impl in (("dispatch", "epmoe plan + dispatch"), ("combine", "epmoe combine")):
        best = min(times[f"DeepEP V2 {stage}, {which} SMs"] for which in ("its own", 24, 48, 64))
        row = next(r for r in rows if r["impl"] == impl)
        assert row["ratios"]["V2"] == pytest.approx(times[impl] / best, rel=0.01, abs=1e-3)
        assert "left_out" not in row


@pytest.mark.long
def test_bench_leaves_out_deep_ep_v2_where_it_refuses_a_shape(results):
    rows, out, _ = results[1][0][0]["a2a, V2 refused"]
    why = "AssertionError: rank 0: num_experts_per_rank <= 64"
    assert f"no V2 for qwen3-30b-small: {why}" in out
    row = next(r for r in rows if r["impl"] == "epmoe combine")
    assert row["left_out"] == {"V2": why} and "DeepEP" in row["ratios"]


@pytest.mark.long
def test_bench_deep_ep_v2_wrong_sums_stop_all_ranks(results):
    errors = [of_rank[3] for of_rank in results[1]]
    assert "DeepEP V2: the sums differ" in errors[1] and "another rank" in errors[0]


@pytest.mark.long
def test_bench_decode_compares_times_of_one_kind(results):
    rows, out, _ = results[1][0][0]["decode with DeepEP"]
    of = {r["impl"]: r for r in rows}
    assert {f"DeepEP {call}" for call in CALLS} < set(of) and max(map(len, out.splitlines())) <= 100
    for call in CALLS:
        peers = {p: of[f"{p} {call}"]["eager_ms"] for p in ("torch", "DeepEP") if f"{p} {call}" in of}
        ratios = of[f"epmoe {call}"]["ratios"]
        assert set(ratios) == set(peers)
        for peer, ms in peers.items():
            assert ratios[peer] == pytest.approx(of[f"epmoe {call}"]["eager_ms"] / ms, rel=0.05, abs=1e-3)


@pytest.mark.long
def test_bench_deep_ep_adapter_matches_reference(results):
    for _, (rows, want_rows, got, want), *_ in results[1]:
        assert torch.equal(rows, want_rows)
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


def test_bench_wrong_sum_stops_all_ranks(results):
    other, wrong = (of_rank[2] for of_rank in results[1])
    assert "rank 1: combine: 1 of 64 tokens" in wrong and "rank 0: another rank" in other
