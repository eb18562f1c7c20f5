"""python -m benchmarks scale: its numbers of rows against counted routings, its schedule, its options."""

import contextlib
import doctest
import io
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import cli
from benchmarks.shapes import SHAPES
from epmoe import reference
from epmoe.moe import cost_model
from epmoe.moe.cost_model import Rates, mean_nodes, predict, rows_leaving, schedule
from epmoe.testing import routing

pytestmark = pytest.mark.cpu_only


def all_routings(nodes, experts, topk, limit=None):
    """Every set of choices of a token, with repetition where several choices of nodes allow it."""
    of_node = experts // nodes
    for chosen in itertools.combinations(range(nodes), min(limit or nodes, nodes)):
        pool = [n * of_node + i for n in chosen for i in range(of_node)]
        yield from itertools.combinations(pool, topk)


@pytest.mark.parametrize("nodes, local, experts, topk, limit", [
    (1, 2, 8, 3, None), (2, 2, 8, 3, None), (4, 2, 8, 3, None), (4, 1, 8, 1, None), (4, 2, 8, 8, None),
    (4, 2, 8, 3, 2), (4, 1, 8, 2, 1), (4, 2, 8, 3, 7), (8, 4, 8, 3, None),
])
def test_scale_counts_rows_as_all_routings_do(nodes, local, experts, topk, limit):
    """The expected numbers equal the mean over every routing. Node 0 is the token's own node."""
    of_node = experts // nodes
    of_rank = max(1, of_node // local)  # fewer experts than ranks: each expert is on one rank for a token
    found = list(all_routings(nodes, experts, topk, limit))
    node_sets = [{e // of_node for e in choice} for choice in found]
    mean = sum(map(len, node_sets)) / len(found)
    assert mean_nodes(nodes, experts, topk, limit) == pytest.approx(mean)
    away = [[e for e in choice if e >= of_node] for choice in found]
    counted = {"choice": sum(map(len, away)), "rank": sum(len({e // of_rank for e in c}) for c in away),
               "node": sum(len({e // of_node for e in c}) for c in away)}
    for saving, rows in counted.items():
        got = rows_leaving(nodes, local, experts, topk, saving, limit)
        assert got == pytest.approx(rows / len(found)), saving


def test_scale_counts_rows_as_the_plan_of_a_random_routing_does():
    """4 nodes of 2 ranks: the rows that reference.plan sends out of a node are the expected ones, to 2 %."""
    nodes, local, experts, topk, tokens = 4, 2, 32, 4, 4000
    size = nodes * local
    g = torch.Generator().manual_seed(7)
    indices = [routing("distinct", tokens, topk, experts, size, r, g) for r in range(size)]
    sent = reference.plan(indices, experts)["send_tokens"].view(nodes, local, nodes, local).sum((1, 3))
    by_rank = (sent.sum() - sent.diagonal().sum()).item() / (size * tokens)
    assert by_rank == pytest.approx(rows_leaving(nodes, local, experts, topk, "rank"), rel=0.02)
    away = 0
    for rank, idx in enumerate(indices):
        hit = torch.zeros(tokens, nodes).scatter_(1, idx // (experts // nodes), 1)
        away += (hit.sum() - hit[:, rank // local].sum()).item()
    by_node = away / (size * tokens)
    assert by_node == pytest.approx(rows_leaving(nodes, local, experts, topk, "node"), rel=0.02)


@pytest.mark.parametrize("arguments, text", [
    ((3, 8, 256, 8), "256 experts on 3 nodes"), ((8, 2, 8, 4, "node", 2), "4 choices of a token among 2"),
    ((2, 2, 8, 2, "token"), "must be one of choice, rank, node"),
])
def test_scale_rejects_what_cannot_be(arguments, text):
    with pytest.raises(ValueError, match=text):
        rows_leaving(*arguments)


def scheduled_by_steps(out, team, own, home, chunks):
    """The same pipeline as integer steps of two workers, which take their next job when it is ready."""
    rail_jobs = [("out", 0)]
    for c in range(chunks):
        rail_jobs += [("out", c + 1)] if c + 1 < chunks else []
        rail_jobs += [("home", c)]
    gpu_jobs = [("own", 0)] + [("team", c) for c in range(chunks)]
    needs = {"team": "out", "home": "team"}
    length = {"out": out, "team": team, "own": own, "home": home}
    done, busy, now = {}, {}, 0
    while rail_jobs or gpu_jobs or busy:
        for worker, (job, end) in list(busy.items()):
            if end == now:
                done[job] = now
                del busy[worker]
        for worker, jobs in (("rail", rail_jobs), ("gpu", gpu_jobs)):
            ready = jobs and (jobs[0][0] not in needs or (needs[jobs[0][0]], jobs[0][1]) in done)
            if worker not in busy and ready:
                job = jobs.pop(0)
                busy[worker] = (job, now + length[job[0]])
        now += 1
    return max(done.values())


@pytest.mark.parametrize("chunks", (1, 2, 3, 5))
def test_scale_schedule_is_that_of_two_workers(chunks):
    g = torch.Generator().manual_seed(chunks)
    for _ in range(60):
        out, team, own, home = torch.randint(1, 9, (4,), generator=g).tolist()
        got = schedule(out * chunks, team * chunks, own, home * chunks, chunks)
        assert got == pytest.approx(scheduled_by_steps(out, team, own, home, chunks))
        assert got >= max(chunks * (out + home), own + chunks * team)


def test_scale_prediction_adds_up():
    """Without latencies: the bounds, one node, a backward, a measured team, rows home in float32."""
    shape, rates = SHAPES["dsv3"], Rates(rail_latency=0.0, launch=0.0)
    p = predict(shape, 8, 8, rates)
    weights = p.rows * 8192 * 8 * 4
    assert p.out_bytes - p.home_bytes == pytest.approx(7 * (64 + 8192 * 8 * 4) + weights)  # and the indices
    assert p.home_bytes == pytest.approx(p.rows * 8192 * 7168 * 2)
    assert p.serial_s == pytest.approx(p.out_s + p.team_s + p.home_s, rel=1e-2)
    assert max(p.out_s + p.home_s, p.team_s) <= p.pipelined_s < p.serial_s
    assert predict(shape, 8, 8, rates, home_bytes=4).home_s == pytest.approx(2 * p.home_s)
    back = predict(shape, 8, 8, rates, backward=True)
    assert back.home_s == pytest.approx(p.out_s) and back.team_s == pytest.approx(2 * p.team_s)
    assert predict(shape, 8, 8, rates, team_s=5e-3).team_s == pytest.approx(5e-3)
    one = predict(shape, 1, 4, Rates())
    assert one.rows == one.out_bytes == 0 and one.serial_s == one.pipelined_s == one.team_s
    # The layer on 4 x H200 took 10.5 ms (docs/performance.md), and its GEMMs' rate is from there.
    assert one.team_s == pytest.approx(10.5e-3, rel=0.02)
    slow = predict(shape, 8, 8, Rates(link=20e9))
    assert slow.team_s > 2 * p.team_s  # links so slow that the GEMMs do not hide them


def test_scale_examples_run():
    assert doctest.testmod(cost_model).failed == 0


def run(capsys, *arguments):
    code = cli.main(["scale", *arguments])
    return code, capsys.readouterr().out


def test_scale_command_prints_and_writes(capsys, tmp_path):
    file = tmp_path / "scale.json"
    code, out = run(capsys, "--nodes", "2,3,8", "--node-limit", "4", "--json", str(file))
    assert code == 0 and "skipped: 3 nodes, because 256 experts are not a multiple" in out
    assert max(map(len, out.splitlines())) <= 100, "the table fits a terminal"
    assert "    8  |   7.00   1.648  |   6.72   1.581  |   4.63   1.091  |   3.18" in out
    figures = json.loads(file.read_text())
    rows = {(r["nodes"], r["routing"], r["saving"], r["pass"]): r for r in figures["rows"]}
    assert len(rows) == len(figures["rows"]) == 2 * 2 * 3 * 2
    assert figures["rates"]["rail"] == 45e9 and figures["shape"]["experts"] == 256
    assert rows[8, "uniform", "node", "forward"]["rows"] == pytest.approx(rows_leaving(8, 8, 256, 8))
    assert rows[2, "at most 4 nodes", "node", "forward"] | {"routing": "uniform"} \
        == rows[2, "uniform", "node", "forward"], "two nodes are no limit"


def test_scale_command_takes_every_rate(capsys):
    """Each option changes the time."""
    _, normal = run(capsys, "--nodes", "8")
    for option in ("--rail-gbps 30", "--rail-us 900", "--link-gbps 20", "--gemm-tflops 100", "--team-ms 3",
                   "--memory-gbps 10", "--launch-us 900", "--tokens 64", "--local-ranks 4",
                   "--home-bytes 4", "--node-limit 2", "--shape qwen3-30b"):
        _, changed = run(capsys, "--nodes", "8", *option.split())
        assert changed.splitlines()[3:] != normal.splitlines()[3:], option


@pytest.mark.parametrize("arguments, text", [
    (["--rail-gbps", "0"], "0: must be more than 0 and finite"),
    (["--rail-us", "inf"], "inf: must be more than 0 and finite"),
    (["--nodes", "2,x"], "x: must be a positive number"),
    (["--local-ranks", "0"], "0: must be a positive number"), (["--shape", "gpt"], "invalid choice"),
    (["--node-limit", "-1"], "must be a positive number"),
])
def test_scale_command_rejects_wrong_arguments(arguments, text, capsys):
    with pytest.raises(SystemExit):
        cli.main(["scale", *arguments])
    assert text in capsys.readouterr().err


def test_scale_command_says_what_is_wrong(capsys):
    code, _ = run(capsys, "--shape", "mixtral", "--nodes", "8", "--node-limit", "1")
    assert code == "2 choices of a token among 1 experts on 1 nodes: too many"


def test_scale_tables_of_the_document_are_printed():
    """docs/nodes_scale.md has the numbers that the command prints."""
    shape, out = SHAPES["dsv3"], io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main(["scale"]) == 0
    printed = [re.findall(r"[\d.]+", line) for line in out.getvalue().splitlines()]
    page = (Path(__file__).resolve().parent.parent / "docs/nodes_scale.md").read_text()
    assert f"H = {shape.hidden}, {shape.tokens} tokens" in page
    rows = [re.findall(r"[\d.]+", line) for line in page.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == 12 and [row for row in printed if row in rows] == rows
