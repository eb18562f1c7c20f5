"""Every public name has a docstring with the sections that a user needs, and all examples run.

The format is Google's. griffe and mkdocstrings read it.
"""

import builtins
import doctest
import importlib
import inspect
import re
import textwrap
import warnings

import pytest

import epmoe
from epmoe.gemm import activations
from epmoe import errors, reference, testing
from epmoe.comm import world
from epmoe.integrations import deep_ep, layers

pytestmark = pytest.mark.cpu_only
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Examples", "References")
WITHOUT_EXAMPLE = {"EPMoE.extra_repr", "EPMoE.named_children"}


def public_of_module(module):
    """Yield (name, object) of the public functions and classes that a module defines."""
    for name, thing in vars(module).items():
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__:
            yield name, thing


def methods(cls):
    """Yield (name, method) of the public methods that epmoe defines for a class or for its bases."""
    for base in cls.__mro__:
        if base.__module__.startswith("epmoe."):
            for name, thing in vars(base).items():
                is_method = callable(thing) or isinstance(thing, (classmethod, property))
                if not name.startswith("_") and is_method:
                    yield name, inspect.getattr_static(cls, name)


def public():
    """Return {name: object} of everything that a user may call."""
    found = {name: getattr(epmoe, name) for name in epmoe.__all__ if name != "reference"}
    for module in (activations, reference, testing, layers):
        prefix = module.__name__.removeprefix("epmoe.")
        found |= {f"{prefix}.{name}": thing for name, thing in public_of_module(module)}
    found |= {f"integrations.deep_ep.{name}": getattr(deep_ep, name) for name in deep_ep.__all__
              if name != "topk_idx_t"}
    for name, thing in list(found.items()):
        if inspect.isclass(thing):
            found |= {f"{name}.{method}": m for method, m in methods(thing)}
    return found


PUBLIC = public()


def sections(doc):
    """Return {title: text} of a docstring. Check for mistakes that griffe would misread."""
    lines = inspect.cleandoc(doc).splitlines()
    titles = [i for i, line in enumerate(lines) if re.fullmatch(r"[A-Z][a-z]+:", line)]
    found = {}
    for i, end in zip(titles, [*titles[1:], len(lines)]):
        title = lines[i][:-1]
        assert title in SECTIONS, f"section {title}: must be one of {SECTIONS}"
        assert title not in found, f"section {title}: must not appear twice"
        assert not lines[i - 1], f"section {title}: needs an empty line before it"
        body = lines[i + 1 : end]
        assert body and body[0].startswith("    "), f"section {title}: must be indented by 4"
        is_indented = all(not line or line.startswith("    ") for line in body)
        assert is_indented, f"section {title}: text is not indented"
        found[title] = textwrap.dedent("\n".join(body))
        if title in ("Returns", "Yields"):  # griffe reads an unindented line as another value
            assert not re.search(r"\n\S", found[title]), f"section {title}: indent the lines after the first"
    return found


def parameters(thing):
    """Return the names of a callable's parameters, in the order of its signature."""
    names = []
    for p in inspect.signature(thing).parameters.values():
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        names.append(stars + p.name)
    # the functions of moe/lora.py are methods of EPMoE
    is_method = names[:1] in (["self"], ["cls"]) or getattr(thing, "__module__", None) == "epmoe.moe.lora"
    return names[1:] if is_method else names


def documented(section):
    """Return the names at the beginning of a section's entries."""
    found = re.finditer(r"^(\*{0,2}\w+(?:, \w+)*): ", section, re.MULTILINE)
    return [name for m in found for name in m[1].split(", ")]


def has_parameters(name, thing):
    if isinstance(thing, property) or name in ("EPLayout", "GptOss", "LowLatencyHandle", "PendingCall",
                                              "SwiGLU", "gemm.activations.GptOss",
                                              "gemm.activations.SwiGLU", "integrations.deep_ep.EPHandle"):
        return False
    return not (inspect.isclass(thing) and issubclass(thing, Exception))


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_have_their_sections(name):
    """The sections: summary of one line, all parameters in order, return value, example. Exceptions exist."""
    thing = PUBLIC[name]
    thing = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
    assert thing.__doc__, f"{name} has no docstring"
    summary, *rest = inspect.cleandoc(thing.__doc__).splitlines()
    assert summary[0].isupper() or summary[0] == "[", f"{name}: the summary begins with {summary[:20]!r}"
    assert summary.endswith("."), f"{name}: the summary must end on its first line, with a full stop"
    assert not rest or not rest[0], f"{name}: an empty line must follow the summary"
    found = sections(thing.__doc__)
    for entry in documented(found.get("Raises", "")):
        for exception in entry.split(", "):
            kind = getattr(errors, exception, None) or getattr(builtins, exception, None)
            is_exception = kind is not None and issubclass(kind, Exception)
            assert is_exception, f"{name}: {exception} is not an exception"
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


MODULES = ("epmoe.gemm.activations", "epmoe.errors", "epmoe.comm.world", "epmoe.comm.heap",
           "epmoe.comm.device", "epmoe.env",
           "epmoe.moe.placement", "epmoe.a2a.layout", "epmoe.a2a.layer", "epmoe.a2a.fused",
           "epmoe.gemm.grouped", "epmoe.gemm.quantize", "epmoe.a2a.low_latency",
           "epmoe.moe.module", "epmoe.comm.liveness",
           "epmoe.moe.chunks", "epmoe.comm.nodes", "epmoe.moe.parallel",
           "epmoe.reference", "epmoe.testing", "epmoe.trace", "epmoe.integrations.layers",
           "epmoe.integrations.sglang_plugin", "epmoe.integrations.vllm_plugin",
           *(f"epmoe.integrations.deep_ep.{name}" for name in ("buffer", "config", "elastic", "low_latency",
                                                               "settings", "utils")))
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [t for name in MODULES for t in finder.find(importlib.import_module(name), name)]
    return {t.name.removeprefix("epmoe."): t for t in found if t.examples}


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstrings_examples_run(monkeypatch, name):
    """The examples run without a GPU, as a user types them."""
    monkeypatch.setenv("EPMOE_BACKEND", "cpu")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(world, "_of_group", {})  # a new world of one rank, even if other tests made worlds
    output = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.DocTestRunner(optionflags=FLAGS).run(EXAMPLES[name], out=output.append)
    assert result.attempted and not result.failed, "".join(output)
