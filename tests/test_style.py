"""check_style.py finds each kind of fault, and no fault in files that follow the rules."""

import pytest

import check_style

GOOD = """int f(int a) {
    int b = 1, c = 2;
    for (a = 1, b = 2; a < b; a++) c = a;
    return b + c;
}
"""
FAULTS = {
    "columns": {"epmoe/a.py": "x = 1  # " + "y" * 110},
    "chain": {"csrc/a.c": "int f(int a) {\n    a = 1, b->c[a] = 2;\n}\n"},
    "include": {"csrc/a.h": '#include "b.h"\n', "csrc/b.h": '#include "a.h"\n'},
    "call": {"csrc/a.c": "int ep_a(void) {\n    return ep_b();\n}\n",
             "csrc/b.cu": "int ep_b(void) {\n    return 0;\n}\nint ep_c(void) { return ep_a(); }\n"},
    "call-table": {"csrc/a.c": "void f(void) {\n    g(ep_list);\n}\nint ep_a(void) {\n    return 0;\n}\n",
                   "csrc/b.c": "Method ep_list[] = {ep_a};\n"},
    "import": {"epmoe/a.py": "def f():\n    from . import b\n", "epmoe/b.py": "from epmoe.a import f\n"},
    "braces": {"csrc/a.c": "int f(int a) {\n"},
}


def faults_of(root, files):
    """Write files, {path: text}. Returns all faults."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return list(check_style.all_faults(root))


@pytest.mark.parametrize("kind", FAULTS)
def test_style_check_finds(tmp_path, kind):
    faults = faults_of(tmp_path, {"csrc/good.c": GOOD, **FAULTS[kind]})
    assert [f.rule for f in faults] == [kind.split("-")[0]]


def test_style_check_accepts_good_files(tmp_path):
    assert faults_of(tmp_path, {"csrc/a.c": GOOD, "epmoe/a.py": "def f():\n    return 1\n"}) == []
