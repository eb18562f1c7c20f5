"""The documents: Python blocks run, link targets exist, and commands, files and names exist.

All Python blocks of a page are one program, which two ranks run. A block with `if __name__ == "__main__"` is
a separate program. A block after a comment `<!-- not run: reason -->` does not run; NOT_RUN counts these.
"""

import importlib.util
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import epmoe
from cases import process_ranks
from epmoe.testing import meeting_place
from rank_processes import run

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
                *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")])
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
NOT_RUN = {"README.md": 1, "docs/checkpoints.md": 1, "docs/decode.md": 1, "docs/guide.md": 3,
           "docs/torchtitan.md": 1, "docs/megatron.md": 1, "docs/sglang.md": 1, "docs/vllm.md": 1,
           "docs/lora.md": 2}
# What a page needs beside epmoe.
NEEDS = {"docs/four_bits.md": ("safetensors", "transformers"),
         "docs/transformers.md": ("accelerate", "transformers.distributed.expert_parallel")}
# The page that says how to use torchrun. Elsewhere it would only import torch three times for each page.
BY_TORCHRUN = "docs/guide.md"
BLOCK = re.compile(r"(?P<why><!-- not run: [^>]+ -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
                   re.MULTILINE | re.DOTALL)


def text_of(name):
    return (ROOT / name).read_text()


def python_blocks(name):
    """Return (line, code, whether it is not run) of each Python block."""
    text = text_of(name)
    return [(text.count("\n", 0, m.start("code")) + 1, m["code"], bool(m["why"]))
            for m in BLOCK.finditer(text) if m["language"] == "python"]


def at_line(line, code):
    """Return the code after empty lines, so that a traceback has the line numbers of the page."""
    return "\n" * (line - 1) + code


def programs():
    """Yield (name of the page, line, code, number of ranks for torchrun or None) of each program."""
    for name in NAMES:
        blocks = [(line, code) for line, code, is_not_run in python_blocks(name) if not is_not_run]
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


def as_rank(rank, world_size, program, port):
    """Rank main: run a program in its folder, with the variables that torchrun sets."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True")
    os.chdir(Path(program).parent)
    sys.argv, sys.path[0] = [program], str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


@pytest.mark.parametrize("name, line, code, num_ranks", PROGRAMS,
                         ids=[f"{name}:{line}" for name, line, _, _ in PROGRAMS])
def test_docs_python_blocks_run(tmp_path, name, line, code, num_ranks):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    program = tmp_path / f"page_{Path(name).stem}.py"  # transformers.py would hide the package
    program.write_text(code)
    compile(code, name, "exec")
    if num_ranks and name != BY_TORCHRUN:
        store = meeting_place()
        process_ranks(as_rank, num_ranks, str(program), store.port, backend=None)
        return
    if num_ranks:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(num_ranks), program.name]
        code, output = run(command, tmp_path, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1",
                           PYTHONPATH=str(ROOT))
    elif name == "README.md":  # exactly as a reader runs it, without tests/warm
        code, output = run([sys.executable, program.name], tmp_path, CUDA_VISIBLE_DEVICES="",
                           PYTHONPATH=str(ROOT))
        assert "rank 0: 10 tokens, received " in output and "rank 3: 13 tokens" in output, output
    else:
        code, output = run([sys.executable, program.name], tmp_path, CUDA_VISIBLE_DEVICES="",
                           EPMOE_TEST_WARM="1", PYTHONPATH=f"{ROOT / 'tests/warm'}:{ROOT}")
    assert code == 0, output


def test_docs_blocks_not_run_are_counted():
    num_not_run = {name: sum(is_not_run for _, _, is_not_run in python_blocks(name)) for name in NAMES}
    assert {name: n for name, n in num_not_run.items() if n} == NOT_RUN


def test_docs_all_blocks_compile():
    for name in NAMES:
        for line, code, _ in python_blocks(name):
            compile(code, f"{name}:{line}", "exec")


# ---- links ----


def prose(name):
    """Return the text of a page without code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", BLOCK.sub("", text_of(name)), flags=re.DOTALL)


def anchors(path):
    """Return the anchors that GitHub and the site make from a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", BLOCK.sub("", path.read_text()), re.MULTILINE):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
        found.add(re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", plain)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_docs_links_have_targets(name):
    page = ROOT / name
    wrong = []
    links = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose(name))
    for link in links:
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            wrong.append(f"{link}: links must stay inside the repository")
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or not path.is_relative_to(ROOT):
            wrong.append(f"{link}: the file does not exist in the repository")
        elif name.startswith("docs/") and not path.is_relative_to(ROOT / "docs"):
            wrong.append(f"{link}: the file is not on the site; name it in backquotes instead")
        elif anchor and anchor not in anchors(path):
            wrong.append(f"{link}: {path.name} has no such heading")
    assert not wrong, "\n".join(wrong)


def test_docs_navigation_has_all_pages():
    listed = set(re.findall(r"[\w/-]+\.md", text_of("mkdocs.yml")))
    assert listed == {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}


# ---- commands, files and names ----


def commands(name):
    """Return all text that may be a command: in backquotes, in indented blocks and in shell blocks."""
    text = text_of(name)
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE) if name != "docs/design.md" else []
    lines += [line for m in BLOCK.finditer(text) if m["language"] in ("sh", "bash", "shell")
              for line in m["code"].splitlines()]
    return [re.sub(r"\s+#.*", "", c) for c in lines + re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))]


def make_targets():
    return set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))


def words_of(command):
    """Split a command into words, without VARIABLE=value at its begin."""
    has_pairs_of_quotes = command.count("'") % 2 == 0 and command.count('"') % 2 == 0
    words = shlex.split(command) if has_pairs_of_quotes else command.split()
    return list(itertools.dropwhile(lambda word: "=" in word, words))


def missing_targets(words):
    """Return the targets of a make command that the Makefile does not have."""
    if words[:1] != ["make"]:
        return []
    return [w for w in words[1:] if re.fullmatch(r"[\w-]+", w) and w not in make_targets()]


def missing_modules(words):
    """Return the modules of epmoe after -m that do not exist, and the benches."""
    from benchmarks.cli import BENCHES, COMPUTES

    missing = []
    for option, module, *rest in (words[i:] for i in range(len(words) - 1)):
        if option != "-m" or not module.startswith(("epmoe", "benchmarks")):
            continue
        if not importlib.util.find_spec(module):
            missing.append(module)
        if module == "benchmarks" and rest and re.fullmatch(r"\w+", rest[0]):
            missing += [rest[0]] if rest[0] not in {*BENCHES, *COMPUTES, "all"} else []
    return missing


def missing_files(words):
    """Return the examples and tests in a command that the repository does not have."""
    is_program = words and (re.match(r"python3?$|torchrun$", words[0])
                            or words[0].startswith((".ci/", "tests/", "examples/")))
    if not is_program:
        return []
    return [w for w in words if re.match(r"(examples|tests|\.ci)/[\w/.-]+$", w) and not (ROOT / w).exists()]


@pytest.mark.parametrize("name", NAMES)
def test_docs_commands_exist(name):
    wrong = []
    for command in commands(name):
        words = words_of(command)
        missing = missing_targets(words) + missing_modules(words) + missing_files(words)
        wrong += [f"{command}: {what} does not exist" for what in missing]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [n for n in NAMES if "experiments" not in n and n != "CHANGELOG.md"])
def test_docs_files_and_names_exist(name):
    """The repository has every path in backquotes, and epmoe has every name epmoe.Name."""
    folders = "|".join(sorted(p.name.replace(".", r"\.") for p in ROOT.iterdir()
                              if p.is_dir() and p.name not in ("build", ".git")))
    paths = re.findall(rf"`((?:{folders})/[\w./*-]*)`", text_of(name))
    wrong = [p for p in paths if not list(ROOT.glob(p.rstrip("/")))]
    wrong += [f"epmoe.{n}" for n in re.findall(r"\bepmoe\.([A-Z]\w*)", text_of(name))
              if not hasattr(epmoe, n)]
    assert not wrong, wrong


def test_docs_figures_of_experiments_exist():
    """An entry names the file of its figures, so the file must stay. A file of older runs that no page names
    has no reader: delete it.
    """
    folders = "benchmarks/results", "docs/experiments/data/runs"
    file = re.compile(rf"`((?:{'|'.join(folders)})/\w+\.json)`")
    cited = {path for name in NAMES for path in file.findall(text_of(name))}
    assert len(cited) > 10
    assert not [path for path in cited if not (ROOT / path).is_file()]
    older = {str(path.relative_to(ROOT)) for path in (ROOT / folders[1]).iterdir()}
    assert not older - cited


def test_docs_reference_has_every_public_name():
    text = text_of("docs/api.md")
    classes = {n for n in epmoe.__all__ if isinstance(getattr(epmoe, n), type)}
    errors = {n for n in classes if issubclass(getattr(epmoe, n), epmoe.EpError)}
    assert not [n for n in epmoe.__all__ if n not in errors and f"`{n}`" not in text]
    assert not [n for n in errors - {"EpError"} if f"`{n}`" not in text_of("docs/failures.md")]


# ---- tables of the experiments ----


def test_docs_tables_of_experiments_match_their_files():
    """If this test fails, run make report."""
    done = subprocess.run([sys.executable, str(ROOT / "docs/tables.py"), "--check"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
