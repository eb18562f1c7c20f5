"""Every public name has a docstring with the sections that a user needs, and all examples run.

The format is Google's, as griffe and mkdocstrings read it.
"""

import doctest
import importlib
import inspect
import re
import textwrap
import warnings

import pytest

import epmoe
from epmoe import errors, reference, testing, world

pytestmark = pytest.mark.cpu_only
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples", "References")
RAISES_NOTHING = {  # beyond what a wrong call of any Python function raises
    "include_dir", "World.lost_ranks", "World.flight_record", "SymmetricHeap.stats", "EPMoE.reset_parameters",
    "EPMoE.extra_repr", "reference.plan", "reference.dispatch", "reference.dispatch_weights",
    "reference.combine",
    "testing.meeting_place", "testing.routing"}
WITHOUT_EXAMPLE = {"EPMoE.extra_repr"}


def own(module):
    """The public functions and classes that a module defines."""
    for name, thing in vars(module).items():
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__:
            yield name, thing


def methods(cls):
    """The public methods that epmoe defines for a class, inherited ones included."""
    for base in cls.__mro__:
        if base.__module__.startswith("epmoe."):
            for name, thing in vars(base).items():
                if not name.startswith("_") and (callable(thing)
                                                 or isinstance(thing, (classmethod, property))):
                    yield name, inspect.getattr_static(cls, name)


def public():
    """{name: object} of everything that a user may call."""
    found = {name: getattr(epmoe, name) for name in epmoe.__all__ if name != "reference"}
    for module in (reference, testing):
        found |= {f"{module.__name__.removeprefix('epmoe.')}.{name}": thing for name, thing in own(module)}
    for name, thing in list(found.items()):
        if inspect.isclass(thing):
            found |= {f"{name}.{method}": m for method, m in methods(thing)}
    return found


PUBLIC = public()


def sections(doc):
    """{title: text} of a docstring, after checks of what griffe would misread."""
    lines = inspect.cleandoc(doc).splitlines()
    titles = [i for i, line in enumerate(lines) if re.fullmatch(r"[A-Z][a-z]+:", line)]
    found = {}
    for i, end in zip(titles, [*titles[1:], len(lines)]):
        title = lines[i][:-1]
        assert title in SECTIONS, f"section {title}: must be one of {SECTIONS}"
        assert title not in found, f"section {title} is there twice"
        assert not lines[i - 1], f"section {title}: needs an empty line before it"
        body = lines[i + 1 : end]
        assert body and body[0].startswith("    "), f"section {title}: must be indented by 4"
        assert all(not line or line.startswith("    ")
                   for line in body), f"section {title}: text is not indented"
        found[title] = textwrap.dedent("\n".join(body))
        if title in ("Returns", "Yields"):  # griffe takes another line without indent for another value
            assert not re.search(r"\n\S", found[title]), f"section {title}: indent the lines after the first"
    return found


def parameters(thing):
    """The names of a callable's parameters, as its signature has them."""
    names = []
    for p in inspect.signature(thing).parameters.values():
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        names.append(stars + p.name)
    return [n for n in names if n not in ("self", "cls")]


def documented(section):
    """The names at the beginning of the entries of a section."""
    return [m[1] for m in re.finditer(r"^(\*{0,2}\w+(?:, \w+)*): ", section, re.MULTILINE)]


def has_parameters(name, thing):
    is_error = inspect.isclass(thing) and issubclass(thing, Exception)
    return not is_error and name not in ("EPLayout", "GptOss",
                                         "reference.GptOss") and not isinstance(thing, property)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_have_their_sections(name):
    """A summary of one line, all parameters in order, what is returned and raised, and an example."""
    thing = PUBLIC[name]
    thing = thing.__func__ if isinstance(thing, classmethod) else thing
    assert thing.__doc__, f"{name} has no docstring"
    summary, *rest = inspect.cleandoc(thing.__doc__).splitlines()
    assert summary[0].isupper() or summary[0] == "[", f"{name}: the summary begins with {summary[:20]!r}"
    assert summary.endswith("."), f"{name}: the summary must end on its first line, with a full stop"
    assert not rest or not rest[0], f"{name}: an empty line must follow the summary"
    found = sections(thing.__doc__)
    if isinstance(thing, property):
        return
    assert "Examples" in found or name in WITHOUT_EXAMPLE, f"{name}: no Examples"
    if not has_parameters(name, thing):
        return
    wanted = parameters(thing)
    assert documented(found.get("Args", "")) == wanted, f"{name}: Args must name {wanted}"
    is_function = not inspect.isclass(thing)
    source = inspect.getsource(thing) if is_function else ""
    if is_function and re.search(r"^\s+return [^N\s]", source, re.MULTILINE) and name not in WITHOUT_EXAMPLE:
        assert found.keys() & {"Returns", "Yields"}, f"{name}: no Returns"
    assert name in RAISES_NOTHING or "Raises" in found, f"{name}: no Raises"


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_name_exceptions_that_exist(name):
    thing = PUBLIC[name]
    thing = thing.__func__ if isinstance(thing, classmethod) else thing
    for entry in documented(sections(thing.__doc__).get("Raises", "")):
        for exception in entry.split(", "):
            kind = getattr(errors, exception, None) or getattr(__import__("builtins"), exception, None)
            assert kind is not None and issubclass(kind, Exception), f"{name}: {exception} is no exception"


MODULES = ("epmoe.errors", "epmoe.world", "epmoe.heap", "epmoe.heap_access", "epmoe.device", "epmoe.layout",
           "epmoe.layer",
           "epmoe.fused", "epmoe.gemm", "epmoe.moe", "epmoe.reference", "epmoe.testing", "epmoe.trace")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name), name)]
    return {t.name.removeprefix("epmoe."): t for t in found if t.examples}


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstrings_examples_run(monkeypatch, name):
    """As a user would type them, without a GPU."""
    monkeypatch.setenv("EPMOE_BACKEND", "cpu")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(world, "_of_group", {})  # a world of this process alone, whatever ran before
    output = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.DocTestRunner(optionflags=FLAGS).run(EXAMPLES[name], out=output.append)
    assert result.attempted and not result.failed, "".join(output)
