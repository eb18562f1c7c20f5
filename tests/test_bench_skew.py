"""python -m benchmarks --skew: routings have the asked skew, rows the time over that of uniform routing."""

import dataclasses
import unittest.mock

import pytest
import torch

from bench_cases import on_the_cpu, run_command  # noqa: F401
from benchmarks import cli, figures, report, routing, train
from benchmarks.measure import slowest
from benchmarks.run import Run
from benchmarks.shapes import SHAPES, Shape
from cases import process_ranks
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
SIZES = [Shape(64, 16, 16, 32, 8, "many"), Shape(37, 16, 16, 8, 2, "few"), Shape(1, 16, 16, 24, 5, "one"),
         Shape(50, 16, 16, 16, 8, "more choices than a rank has experts")]


def rows_of_ranks(idx, shape, size):
    return torch.bincount(idx.flatten() // (shape.experts // size), minlength=size)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SIZES, ids=lambda s: s.name)
def test_bench_skew_is_that_of_the_fullest_rank(shape, size):
    """Rank 0 has exactly the asked rows, the others equally many. Experts of a token are distinct."""
    most = routing.most_skew(shape, size)
    mean = shape.tokens * shape.topk
    for skew in {1.0, *(s for s in (1.1, 1.5, 2.0, 3.0) if s <= most), most}:
        idx = routing.skewed(shape, size, skew)
        assert idx.shape == (size, shape.tokens, shape.topk)
        assert idx.min() >= 0 and idx.max() < shape.experts
        ordered = idx.sort(-1).values
        assert (ordered[..., 1:] > ordered[..., :-1]).all()
        counts = rows_of_ranks(idx, shape, size)
        assert counts[0] == round(skew * mean) == counts.max()
        if size > 1:
            others = counts[1:]
            assert others.max() - others.min() <= 1 and counts.sum() == size * mean
        assert torch.equal(idx, routing.skewed(shape, size, skew))
        if size > 1 and shape.tokens > 1:
            assert not torch.equal(idx[0], idx[1])


def test_bench_skew_comes_from_hot_experts():
    """The first experts of the fullest rank get the most. Without a skew all get about equally many."""
    shape = SHAPES["qwen3-30b"].with_tokens(2000)
    of = {skew: torch.bincount(routing.skewed(shape, 4, skew).flatten(), minlength=128)
          for skew in (1.0, 2.0)}
    assert of[1.0].max() < 1.3 * of[1.0].float().mean()
    hot = of[2.0][:32].float()
    assert hot[0] > hot[1] > hot[3] > 2 * hot[16:].mean()
    assert of[2.0][32:].max() < 1.3 * of[2.0][32:].float().mean()


def test_bench_skew_without_a_skew_is_uniform_also_over_ranks_of_a_token():
    """Balanced tokens send as many rows as uniform ones: they do not choose evenly among the ranks."""
    shape = SHAPES["qwen3-30b"].with_tokens(4000)
    g = torch.Generator().manual_seed(0)
    ranks = [torch.stack([(idx // 32 == r).any(-1) for r in range(4)]).float().mean()
             for idx in (routing.skewed(shape, 4, 1.0), routing.uniform(16000, 128, 8, g))]
    assert abs(ranks[0] - ranks[1]) < 0.01


@pytest.mark.parametrize("skew", [0.5, 2.1, float("inf")])
def test_bench_skew_refuses_what_distinct_experts_cannot_have(skew):
    with pytest.raises(ValueError, match="must be 1 to 2 for 8 distinct experts of 32 on 2 ranks"):
        routing.skewed(SIZES[0], 2, skew)


@pytest.mark.parametrize("argv, text", [
    (["gemm", "--skew", "2"], "--skew: only a2a, layer, train, decode and replicas take it"),
    (["layer", "--w4", "--skew", "2"], "--skew: leave it out with --w4"),
    (["layer", "--skew", "0.9"], "0.9: must be numbers of at least 1"),
    (["layer", "--skew", "2,inf"], "2,inf: must be numbers of at least 1"),
    (["layer", "--skew", "nan"], "nan: must be numbers of at least 1"),
    (["layer", "--skew", "much"], "much: must be numbers of at least 1"),
])
def test_bench_skew_rejects_wrong_arguments(argv, text, capsys):
    with pytest.raises(SystemExit):
        cli.parse(argv)
    assert text in capsys.readouterr().err


def test_bench_skew_is_measured_after_the_uniform_routing(capsys):
    run = Run(cli.parse(["train", "--skew", "1,2,3", "--shapes", "mixtral"]))
    run.introduce()
    with unittest.mock.patch.object(run, "size", 2):
        labels = [label for label, _ in train.jobs(run)]
    run.close()
    assert labels == ["mixtral-small", "mixtral-small, skew 1", "mixtral-small, skew 2"]
    assert "skipped: mixtral-small with skew 3, because 2 ranks and 2 choices" in capsys.readouterr().out


COMMANDS = {"a2a": ["a2a", "--shapes", "qwen3-30b"], "layer": ["layer", "--shapes", "qwen3-30b"],
            "layer --fp8": ["layer", "--fp8", "--shapes", "qwen3-30b"],
            "train": ["train", "--shapes", "mixtral"], "decode": ["decode", "--tokens", "3"]}


def run_commands(rank, world_size):
    results = {name: run_command([*argv, "--iters", "1", "--skew", "1.5,2"])
               for name, argv in COMMANDS.items()}
    run = Run(cli.parse(["a2a"]))
    inputs = [run.inputs(dataclasses.replace(SIZES[0], skew=s)) for s in (None, 1.5)]
    differs = slowest(run.cpu_group, float(not torch.equal(
        inputs[1][1], routing.skewed(SIZES[0], world_size, 1.5)[rank])))
    run.close()
    return results, inputs, differs


@pytest.fixture(scope="module")
def results():
    return process_ranks(run_commands, 2, timeout_s=HANG_S)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_bench_skew_rows_have_the_time_over_uniform(results, command):
    rows, out, _ = results[0][0][command]
    uniform = {r["impl"]: r["ms"] for r in rows if "skew" not in r and "ms" in r}
    assert {r.get("skew") for r in rows} == {None, 1.5, 2.0} and max(map(len, out.splitlines())) <= 100
    timed = [r for r in rows if "skew" in r and "ms" in r]
    assert {r["impl"] for r in timed} == set(uniform)
    for r in timed:
        assert r["ratios"]["uniform"] == pytest.approx(r["ms"] / uniform[r["impl"]], rel=0.01, abs=1e-3)
    assert not any("uniform" in r.get("ratios", {}) for r in rows if "skew" not in r)
    shape = rows[0]["shape"]
    assert out.count(f"\n{shape}: T ") == out.count(f"\n{shape}, skew 1.5: T ") == 1


@pytest.mark.long
def test_bench_skew_changes_the_choices_only(results):
    for _, ((x, idx, weight), (same_x, skewed, same_weight)), differs in results:
        assert torch.equal(x, same_x) and torch.equal(weight, same_weight) and differs == 0
        assert not torch.equal(idx, skewed)


def test_bench_skew_has_a_table_of_its_own(tmp_path, capsys):
    """The other tables are of uniform routings. A file may have rows of other runs between those of one."""
    def row(bench, impl, ms, **more):
        return {"bench": bench, "shape": "c", "tokens": 8, "impl": impl, "ms": ms, "tflops": 9.0, **more}

    rows = [row("layer", "epmoe layer", 3.0, skew=2.0, ratios={"uniform": 1.5}),
            row("layer", "epmoe layer", 2.0), row("layer", "torch layer", 4.0),
            row("layer", "GEMMs alone", 1.0), row("layer", "epmoe GEMMs alone", 1.6),
            row("a2a", "epmoe combine", 0.5, skew=1.5, ratios={"uniform": 1.25})]
    head = {"machine": "CPU", "gpus": 0, "ranks": 2, "cuda": None, "torch": "2.11", "date": "2026-01-02",
            "commit": "abc"}
    path = tmp_path / "some.json"
    path.write_text(figures.text_of(head | {"rows": rows}))
    found = report.Figures(path)
    assert report.skew_table(found)[2:] == [
        "| `a2a`: epmoe combine | c | 8 |  | 0.500 ms, 1.25 |  |",
        "| `layer`: epmoe layer | c | 8 | 2.000 ms |  | 3.000 ms, 1.50 |"]
    assert cli.main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| c | 8 | 2.000 ms | 2.00 | 1.25 | 0.50 |" in out and out.count("### Skewed routing") == 1
    assert '"Own GEMMs alone" are epmoe\'s two' in out


def test_bench_skew_rows_replace_those_of_the_same_skew():
    def of(*rows):
        return {"cuda": None, "torch": "2", "date": "d", "commit": "c",
                "rows": [{"bench": "a2a", "shape": "c", "tokens": 8, "impl": "i", **r} for r in rows]}

    merged = figures.merged(of({"ms": 1}, {"ms": 2, "skew": 2.0}),
                            of({"ms": 3, "skew": 2.0}, {"ms": 4, "skew": 1.5}))
    assert [(r["ms"], r.get("skew")) for r in merged["rows"]] == [(1, None), (3, 2.0), (4, 1.5)]
