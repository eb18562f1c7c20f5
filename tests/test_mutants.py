"""tests/mutants.py changes code in one place, outside of comments and texts, and knows its tests."""

import ast

import pytest

import mutants

pytestmark = pytest.mark.cpu_only
C_CODE = """#include <stdio.h> /* 1 < 2 */
#define LONG \\
    (1 + 2)
static int f(int a, bool b) {
    const char *text = "a < 3 \\" && 4";
    if (a < 10 && (b || a == 'x')) return a + 1;
    call(a); // call(7)
    call(a);
    return true;
}
"""
PYTHON_CODE = '''def f(a, b):
    """Return 1 < 2."""
    if a < 10 and not b:
        raise ValueError("a < 3")
    call(a)
    return a + 1 if True else "2"
'''


def changed(name, code):
    """The change and the changed code, for each change."""
    return {(c.old, c.new): mutants.apply(code, c) for c in mutants.changes_of(name, code)}


def test_mutants_of_c():
    found = changed("f.c", C_CODE)
    condition = "(a < 10 && (b || a == 'x'))"
    assert set(found) == {("<", "<="), ("10", "11"), ("&&", "||"), ("||", "&&"), ("==", "!="), ("+", "-"),
                          ("1", "2"), ("true", "false"), ("call(a);", ";"), (condition, f"(!{condition})")}
    assert f"if (!{condition}) return" in found[condition, f"(!{condition})"]
    for code in found.values():
        assert len(code.splitlines()) == len(C_CODE.splitlines())
    of_line = [c.line for c in mutants.changes_of("f.c", C_CODE) if c.old == "call(a);"]
    assert of_line == [8]  # what has a comment after it is left out


def test_mutants_of_python():
    found = changed("f.py", PYTHON_CODE)
    test = "a < 10 and not b"
    assert set(found) == {("<", "<="), ("10", "11"), ("and", "or"), ("+", "-"), ("1", "2"), ("True", "False"),
                          ("call(a)", "pass"), ('raise ValueError("a < 3")', "pass"),
                          (test, f"(not ({test}))"), ("True", "(not (True))")}
    for code in found.values():
        ast.parse(code)


@pytest.mark.long
def test_mutants_of_the_tree():
    """Each file has tests that concern it, and the order follows from the seed."""
    changes = mutants.draw(1)
    assert changes == mutants.draw(1) and len(changes) > 5000
    without = {c.file for c in changes if mutants.tests_of(c.file) == (False, [])}
    assert not without, f"tests/mutants.py: CONCERN has no tests for {sorted(without)}"


class Folder(mutants.Tree):
    """A folder of one module and its test, instead of a copy of the tree."""

    def __init__(self, folder):
        self.folder, self.limit_s, self.failing = folder, 900, set()


@pytest.mark.long
@pytest.mark.parametrize("test, want", [("assert one() == 1", "tests/test_one.py"),
                                        ("assert True", "survived"), ("assert False", "survived")])
def test_mutants_are_judged(tmp_path, monkeypatch, test, want):
    """A test that fails, also without the change, catches nothing."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "one.py").write_text("def one():\n    return 1\n")
    (tmp_path / "tests/test_one.py").write_text(f"from one import one\ndef test():\n    {test}\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "tests_of", lambda file: (False, ["tests/test_one.py"]))
    change, = [c for c in mutants.changes_of("one.py", (tmp_path / "one.py").read_text()) if c.old == "1"]
    folder = Folder(tmp_path)
    assert folder.judge(change) == want
    assert folder.failing == ({"tests/test_one.py"} if "False" in test else set())
    assert "return 1" in (tmp_path / "one.py").read_text()
