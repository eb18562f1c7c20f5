"""tests/endurance.py: portions of long tests, which resume."""

import sys

import endurance
import pytest

FAILS = [sys.executable, "-c", "print('7 numbers, no difference'); raise SystemExit(3)"]
WORKS = [sys.executable, "-c", "import sys; print(sys.argv[2] + ' numbers, no difference', sys.argv[3:])"]
MEETS = [sys.executable, "-c", """if True:
    import pathlib, sys, time
    folder, size, seed = pathlib.Path(sys.argv[1]), sys.argv[3], sys.argv[5]
    (folder / f"{seed}.begun").touch()
    end = time.monotonic() + 30
    while len(list(folder.glob("*.begun"))) < 3:
        if time.monotonic() > end:
            sys.exit("the other portions have not begun")
        time.sleep(0.01)
    print(size, "numbers")
"""]


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(endurance, "RESULTS", tmp_path / "endurance.jsonl")
    for name, command in (("works", WORKS), ("fails", FAILS)):
        monkeypatch.setitem(endurance.KINDS, name, (command, "-n", 100, r"(\d+) numbers, no difference"))
    return endurance.read_results


def test_endurance_resumes_with_the_next_seed(results, capsys):
    assert endurance.run_kind("works", 250, 1) and endurance.run_kind("works", 250, 1)
    assert [(r["seed"], r["done"]) for r in results()] == [(1, 100), (2, 100), (3, 50)]
    assert endurance.run_kind("works", 300, 1)
    assert [(r["seed"], r["done"]) for r in results()][3:] == [(4, 50)]
    endurance.print_results()
    assert ["works", "300"] == capsys.readouterr().out.splitlines()[-1].split()[:2]


def test_endurance_does_not_count_a_portion_that_fails(results, capsys):
    assert not endurance.run_kind("fails", 100, 1) and results() == []
    assert "FAILED: portion 1 of fails, exit status 3" in capsys.readouterr().out


def test_endurance_runs_portions_at_the_same_time(results, monkeypatch, tmp_path):
    """Each portion waits until three have begun."""
    monkeypatch.setitem(endurance.KINDS, "meets", ([*MEETS, str(tmp_path)], "-n", 100, r"(\d+) numbers"))
    assert endurance.run_kind("meets", 300, 1, jobs=3)
    assert [r["seed"] for r in sorted(results(), key=lambda r: r["seed"])] == [1, 2, 3]


def test_endurance_counts_the_portions_of_all_jobs(results):
    assert endurance.run_kind("works", 650, 1, jobs=3)
    assert sorted(r["seed"] for r in results()) == [1, 2, 3, 4, 5, 6, 7]
    assert sum(r["done"] for r in results()) == 650
    assert not endurance.run_kind("fails", 300, 1, jobs=3) and len(results()) == 7


def test_endurance_begins_no_portion_after_its_time(results):
    assert endurance.run_kind("works", 100, 0) and results() == []


def test_endurance_has_a_rank_for_each_gpu(monkeypatch):
    """Threads share one GPU. Kills and cycles are processes, and share a GPU also where there are several."""
    commands = {kind: endurance.KINDS[kind][0] for kind in ("ops-cuda", "kills-cuda")}
    for num_gpus in (1, 2):
        monkeypatch.setattr(endurance, "num_gpus", lambda num=num_gpus: num)
        of_one = {"EPMOE_SHARE_GPU": "1", "CUDA_VISIBLE_DEVICES": str(3 % num_gpus)}
        assert endurance.on_gpus(commands["kills-cuda"], 3) == (commands["kills-cuda"], of_one)
        command, settings = endurance.on_gpus(commands["ops-cuda"], 3)
        if num_gpus == 1:
            assert (command, settings) == (commands["ops-cuda"], of_one)
        else:
            assert command == [*endurance.TORCHRUN, "2", "tests/soak.py", "ops"] and settings == {}


@pytest.mark.long
@pytest.mark.parametrize("kind, size", [("ops", 600), ("routings", 70)])
def test_endurance_knows_what_the_long_tests_print(results, kind, size):
    assert endurance.run_kind(kind, size, 1)
    assert [r["seed"] for r in results()] == [1] and results()[0]["done"] >= size
