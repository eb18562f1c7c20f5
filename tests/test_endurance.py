"""tests/endurance.py: portions of long tests, which resume."""

import sys

import pytest

import endurance

pytestmark = pytest.mark.cpu_only

FAILS = [sys.executable, "-c", "print('7 numbers, no difference'); raise SystemExit(3)"]
WORKS = [sys.executable, "-c", "import sys; print(sys.argv[2] + ' numbers, no difference', sys.argv[3:])"]


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


def test_endurance_counts_the_portions_of_all_jobs(results):
    assert endurance.run_kind("works", 650, 1, jobs=3)
    assert sorted(r["seed"] for r in results()) == [1, 2, 3, 4, 5, 6, 7]
    assert sum(r["done"] for r in results()) == 650
    assert not endurance.run_kind("fails", 300, 1, jobs=3) and len(results()) == 7


@pytest.mark.long
@pytest.mark.parametrize("kind, size", [("ops", 600), ("routings", 70)])
def test_endurance_knows_what_the_long_tests_print(results, kind, size):
    assert endurance.run_kind(kind, size, 1)
    assert [r["seed"] for r in results()] == [1] and results()[0]["done"] >= size
