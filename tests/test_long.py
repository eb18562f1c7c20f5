"""The marker long: which runs of pytest include the tests that have it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu_only, pytest.mark.long]

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import pytest

def test_short():
    pass

@pytest.mark.long
def test_long():
    pass
"""


def counts(folder, *options):
    """Run pytest there with the conftest.py of the project. Return (passed, skipped)."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rs",
                           *options], cwd=folder, capture_output=True, text=True, timeout=300)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("long: takes many seconds" in done.stdout) == ("skipped" in last)
    found = dict(reversed(pair) for pair in re.findall(r"(\d+) (passed|skipped)", last))
    return int(found["passed"]), int(found.get("skipped", 0))


@pytest.mark.parametrize("options, want", [(("--numprocesses", "1"), (1, 1)), (("test_some.py",), (2, 0))])
def test_long_tests_run_when_asked(tmp_path, monkeypatch, options, want):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    assert counts(tmp_path, *options) == want
