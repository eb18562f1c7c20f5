"""Checks the rules of CONTRIBUTING.md that can be counted.

    python tests/check_style.py [folder of the repository]

Rules: columns, chains of assignments; circles of includes, of calls between C sources, and of imports. The
script prints each fault as "file:line: what is wrong". It exits with 1 if there was a fault.
"""

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

MAX_COLUMNS = 110

FOLDERS = ("csrc", "epmoe", "benchmarks", "tests", "examples")
C_SUFFIXES = {".c", ".h", ".cu", ".cuh", ".cpp"}
PYTHON_SUFFIXES = {".py", ".pyi"}


class Fault(NamedTuple):
    rule: str  # columns, chain, include, call, import, braces
    path: str
    line: int
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.text}"


def blank(match):
    """The same number of lines and columns, without the text."""
    return re.sub(r"[^\n]", " ", match.group())


def without_comments(text):
    """C without comments, literals and preprocessor lines; every line keeps its number."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", blank, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def declared_name(head):
    """The name of the function that a head such as "static int f(int a, int b)" declares."""
    found = None
    depth = 0
    for i, c in enumerate(head):
        if c == "(":
            if depth == 0:
                start = i
            depth += 1
        elif c == ")":
            depth -= 1
            name = re.search(r"([\w~]+)\s*$", head[:start])
            if depth == 0 and name and not re.fullmatch(r"__\w+__|alignas|noexcept", name[1]):
                found = name[1]
        elif c == ":" and depth == 0 and found and "::" not in head[i - 1:i + 2]:
            break  # the list of initialisers of a C++ constructor
    return found


CHAIN = object()


def opened(inside, head):
    """What a brace inside a function opens: a list of values or a block."""
    return "list" if inside == "list" or re.search(r"(?<![=!<>])=[^=]*$|,\s*$|return[^;]*$|\benum\b|[(]$",
                                                   head.rstrip()) else "block"


def c_functions(text):
    """(name, first line, whether it has a body) of the functions of cleaned C.

    A chain of assignments yields CHAIN as the name, braces that do not match yield None.

    A brace after struct, union, class, namespace or extern opens a scope that may hold functions. A brace
    after "=" opens a list. Any other brace after a pair of parentheses opens the body of a function.
    """
    scopes = []  # what each open brace is: "scope", "list" or a function's (name, line)
    start = 0
    line = 1
    for i, c in enumerate(text):
        line += c == "\n"
        if c not in "{};":
            continue
        inside = next((s for s in scopes if s != "scope"), None)
        head = text[start:i]
        top = re.sub(r"\([^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*\)", "()", head)
        declared = None if inside or re.search(r"[^=!<>]=[^=]|\btypedef\b", top) else declared_name(head)
        first = line - head.lstrip().count("\n")
        if c == "{":
            is_scope = re.search(r"\b(struct|union|class|enum|namespace|extern)\b", top) and "()" not in top
            scopes.append(opened(inside, head) if inside else "scope" if is_scope or not declared
                          else (declared, first))
        elif c == "}":
            if not scopes:
                yield None, line, False
                return
            closed = scopes.pop()
            if isinstance(closed, tuple):
                yield *closed, True
        elif inside and "list" not in scopes and is_chain(head):
            yield CHAIN, line - head.lstrip().count("\n"), False
        elif declared:
            yield declared, first, False
        start = i + 1
    if scopes:
        yield None, line, False


# The start of an assignment such as "a = 1", "b->c += 2" or "d[i] = 3"; the type of a declaration may precede
# it.
ASSIGNMENT = re.compile(r"\s*[*&]*\w[\w.\->]*(?:\[[^=]*?\])*\s*(?:[-+*/|&^]|<<|>>)?=[^=]")


def is_chain(head):
    """Whether a comma joins two assignments in a statement. A declaration begins with a type and is none."""
    while (shorter := re.sub(r"\([^()]*\)|\{[^{}]*\}", "_", head)) != head:
        head = shorter
    head = re.sub(r"^\s*(?:(?:if|while|for)\s*_|else\b|case\b[^:]*:|default\s*:)\s*", "", head)
    parts = head.split(",")
    return "(" not in head and len([p for p in parts
                                    if ASSIGNMENT.match(p)]) > 1 and bool(ASSIGNMENT.match(parts[0]))


def c_faults(path, text):
    clean = without_comments(text)
    for name, line, _ in c_functions(clean):
        if name is None:
            yield Fault("braces", path, line,
                        "the braces do not match; this script reads no #if with half a block")
        elif name is CHAIN:
            yield Fault("chain", path, line, "a comma joins two assignments; write one assignment a line")


def circle_faults(rule, what, edges):
    """The circles among files, from {file: the files that it needs}. Each is reported once, at its first file
    in alphabetical order.
    """
    seen = set()
    done = set()

    def walk(path, way):
        if path in way:
            circle = way[way.index(path):]
            if frozenset(circle) not in seen:
                seen.add(frozenset(circle))
                yield Fault(rule, path, 1, f"circle of {what}: " + " -> ".join([*circle, path]))
        elif path not in done:
            for other in edges.get(path, []):
                yield from walk(other, [*way, path])
            done.add(path)

    for path in sorted(edges):
        yield from walk(path, [])


def includes(root, texts):
    """{header of csrc: the headers that it includes}."""
    edges = {}
    for path, text in texts.items():
        if path.startswith("csrc/") and Path(path).suffix in (".h", ".cuh"):
            names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.M)
            near = [(Path(path).parent / n, Path("csrc") / n) for n in names]
            real = [next((p for p in pair if (root / p).exists()), None) for pair in near]
            edges[path] = [(root / p).resolve().relative_to(root.resolve()).as_posix() for p in real if p]
    return edges


def calls(texts):
    """{source of csrc: the sources whose functions and tables it uses}. Their names begin with ep_."""
    clean = {path: without_comments(text) for path, text in texts.items()
             if path.startswith("csrc/") and Path(path).suffix in (".c", ".cu")}
    home = {}
    for path, text in clean.items():
        functions = [name for name, _, has_body in c_functions(text) if has_body and isinstance(name, str)]
        tables = re.findall(r"^(?!static\b)[\w ]+\b(ep_\w+)(?:\[\])? = \{", text, flags=re.M)
        home |= {name: path for name in (*functions, *tables) if name.startswith("ep_")}
    return {path: sorted({home[n] for n in re.findall(r"\bep_\w+", text) if n in home} - {path})
            for path, text in clean.items()}


def imports(texts):
    """{module of epmoe: the modules that it imports, also those inside functions}.

    What only a type checker imports (if TYPE_CHECKING) does not count: modules may name each other's types.
    """
    files = {".".join(Path(path).with_suffix("").parts): path for path in texts
             if path.startswith("epmoe/") and path.endswith(".py")}
    edges = {}
    for module, path in files.items():
        names = set()
        tree = ast.parse(texts[path])
        for node in tree.body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                package = module.split(".")[:-node.level] if node.level else []
                base = ".".join([*package, *filter(None, [node.module])])
                names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        edges[path] = sorted({files[n] for n in names if n in files} - {path})
    return edges


def all_faults(root):
    texts = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in C_SUFFIXES | PYTHON_SUFFIXES and "__pycache__" not in file.parts:
                texts[file.relative_to(root).as_posix()] = file.read_text()
    for path, text in texts.items():
        lines = text.splitlines()
        for i, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                yield Fault("columns", path, i, f"{len(line)} columns, at most {MAX_COLUMNS}")
        if Path(path).suffix in C_SUFFIXES:
            yield from c_faults(path, text)
    yield from circle_faults("include", "includes", includes(root, texts))
    yield from circle_faults("call", "calls", calls(texts))
    yield from circle_faults("import", "imports", imports(texts))


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    faults = list(all_faults(root))
    for fault in faults:
        print(fault)
    print(f"style: {len(faults)} faults" if faults else "style: ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
