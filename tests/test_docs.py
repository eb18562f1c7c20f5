"""The documents: their Python blocks run, their links lead somewhere, and what they name exists.

The Python blocks of a page are one program, which two ranks run; a block with an `if __name__ == "__main__"`
is a program of its
own.  A block after a comment `<!-- not run: reason -->` is left out; NOT_RUN counts those.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import epmoe
from test_examples import run

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] +
               list((ROOT / "docs").rglob("*.md"))
               + list((ROOT / ".github").rglob("*.md")))
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
NOT_RUN = {"README.md": 1, "docs/guide.md": 4}
BLOCK = re.compile(r"(?P<why><!-- not run: [^>]+ -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
                   re.MULTILINE | re.DOTALL)


def text_of(name):
    return (ROOT / name).read_text()


def python_blocks(name):
    """(line, code, whether it is left out) of each Python block."""
    text = text_of(name)
    return [(text.count("\n", 0, m.start("code")) + 1, m["code"], bool(m["why"]))
            for m in BLOCK.finditer(text) if m["language"] == "python"]


def at_line(line, code):
    """The code where a traceback's line numbers are those of the page."""
    return "\n" * (line - 1) + code


def programs():
    """(name of the page, line, code, number of ranks for torchrun or None)."""
    for name in NAMES:
        blocks = [(line, code) for line, code, left_out in python_blocks(name) if not left_out]
        for line, code in blocks:
            if "__main__" in code:
                yield name, line, at_line(line, code), None
        of_page = [(line, code) for line, code in blocks if "__main__" not in code]
        if of_page:
            program = ""
            for line, code in of_page:
                program += at_line(line - program.count("\n"), code)
            yield name, of_page[0][0], program, 2


PROGRAMS = list(programs())


@pytest.mark.parametrize("name, line, code, num_ranks", PROGRAMS,
                         ids=[f"{name}:{line}" for name, line, _, _ in PROGRAMS])
def test_docs_blocks_run(tmp_path, name, line, code, num_ranks):
    program = tmp_path / Path(name).with_suffix(".py").name
    program.write_text(code)
    compile(code, name, "exec")
    if num_ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(num_ranks), program.name]
        code, output = run(command, tmp_path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
                           PYTHONPATH=str(ROOT))
    elif name == "README.md":  # to the letter
        code, output = run([sys.executable, program.name], tmp_path, CUDA_VISIBLE_DEVICES="",
                           PYTHONPATH=str(ROOT))
        assert "rank 0: 10 tokens, received " in output and "rank 3: 13 tokens" in output, output
    else:
        code, output = run([sys.executable, program.name], tmp_path, CUDA_VISIBLE_DEVICES="",
                           EPMOE_TEST_WARM="1",
                           PYTHONPATH=f"{ROOT / 'tests/warm'}:{ROOT}")
    assert code == 0, output


def test_docs_blocks_that_are_not_run_are_counted():
    left_out = {name: sum(out for _, _, out in python_blocks(name)) for name in NAMES}
    assert {name: n for name, n in left_out.items() if n} == NOT_RUN
    for name in NAMES:
        for line, code, _ in python_blocks(name):
            compile(code, f"{name}:{line}", "exec")  # also those that are not run


# ---- links ----


def prose(name):
    """The text without code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", BLOCK.sub("", text_of(name)), flags=re.DOTALL)


def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", BLOCK.sub("", path.read_text()), re.MULTILINE):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_docs_links_lead_somewhere(name):
    page, wrong = ROOT / name, []
    links = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose(name))
    for link in links:
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            wrong.append(f"{link}: only links inside the repository")
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or not path.is_relative_to(ROOT):
            wrong.append(f"{link}: no such file")
        elif name.startswith("docs/") and not path.is_relative_to(ROOT / "docs"):
            wrong.append(f"{link}: not on the site; name the file in backquotes")
        elif anchor and anchor not in anchors(path):
            wrong.append(f"{link}: no such heading in {path.name}")
    assert not wrong, "\n".join(wrong)


def test_docs_pages_are_all_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", text_of("mkdocs.yml")))
    assert listed == {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}


def test_docs_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 150


# ---- what they name ----


def commands(name):
    """What looks like a command: in backquotes, in indented blocks, and in blocks of a shell."""
    text = text_of(name)
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE) if name != "docs/design.md" else []
    lines += [line for m in BLOCK.finditer(text) if m["language"] in ("sh", "bash", "shell")
              for line in m["code"].splitlines()]
    return [re.sub(r"\s+#.*", "", c) for c in lines + re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))]


def make_targets():
    return set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_docs_commands_exist(name):
    from epmoe.bench.cli import BENCHES

    wrong = []
    for command in commands(name):
        words = shlex.split(command,
                            posix=True) if command.count("'") % 2 == 0 and command.count('"') % 2 == 0 else command.split()
        words = words[next((i for i, w in enumerate(words) if "=" not in w),
                           len(words)):]  # without VARIABLE=value
        if words[:1] == ["make"]:
            wrong += [command for w in words[1:] if re.fullmatch(r"[\w-]+", w) and w not in make_targets()]
        for i, word in enumerate(words[:-1]):
            if word != "-m" or not words[i + 1].startswith("epmoe"):
                continue
            if not importlib.util.find_spec(words[i + 1]):
                wrong.append(command)
            if words[i + 1] == "epmoe.bench" and words[i + 2 : i + 3] and re.fullmatch(r"\w+", words[i + 2]):
                wrong += [command] if words[i + 2] not in {*BENCHES, "all", "report"} else []
        if words and (re.match(r"python3?$|torchrun$", words[0])
                      or words[0].startswith((".ci/", "tests/", "examples/"))):
            wrong += [command for w in words if re.match(r"(examples|tests|\.ci)/[\w/.-]+$", w)
                      and not (ROOT / w).exists()]
    assert not wrong, wrong


@pytest.mark.parametrize("name", [n for n in NAMES if "experiments" not in n and n != "CHANGELOG.md"])
def test_docs_files_and_names_exist(name):
    """A path in backquotes is one of the repository; epmoe.Name is one of the package."""
    folders = "|".join(sorted(p.name.replace(".", r"\.") for p in ROOT.iterdir() if p.is_dir()
                              and p.name not in ("build", ".git")))
    paths = re.findall(rf"`((?:{folders})/[\w./*-]*)`", text_of(name))
    wrong = [p for p in paths if not list(ROOT.glob(p.rstrip("/")))]
    wrong += [f"epmoe.{n}" for n in re.findall(r"\bepmoe\.([A-Z]\w*)", text_of(name))
              if not hasattr(epmoe, n)]
    assert not wrong, wrong


def test_docs_reference_has_every_public_name():
    text = text_of("docs/api.md")
    errors = {n for n in epmoe.__all__ if isinstance(getattr(epmoe, n), type)
              and issubclass(getattr(epmoe, n), epmoe.EpError)}
    assert not [n for n in epmoe.__all__ if n not in errors and f"`{n}`" not in text]
    assert not [n for n in errors - {"EpError"} if f"`{n}`" not in text_of("docs/failures.md")]


# ---- tables of the experiments ----


def test_docs_tables_of_experiments_are_made_from_their_files():
    """If this fails: make report."""
    done = subprocess.run([sys.executable, str(ROOT / "docs/tables.py"), "--check"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
