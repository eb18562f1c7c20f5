"""`pip install .` from a copy of the tree, without a network. The installed package is complete and works."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pace import HANG_S

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent
# The files that a build reads. Other files of a working copy are not copied, so that a build cannot use them.
SOURCES = ("csrc", "epmoe", "setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")

USE = """
import importlib.metadata, sys
from pathlib import Path
import torch, epmoe
from epmoe.testing import run_threads

def main(world):
    torch.manual_seed(world.rank)
    layer = epmoe.EPAll2AllLayer(world, max_tokens=8, hidden=16, topk=2, num_tot_experts=4,
                                 dtype=torch.float32, device="cpu")
    x = torch.randn(5 + world.rank, 16)
    rows, _, layout = layer.dispatch(x, torch.tensor([[0, 3]]).expand(len(x), 2).contiguous())
    y = layer.combine(rows, layout)
    layer.finalize()
    return torch.equal(y, 2 * x)

package = Path(sys.argv[1]) / "epmoe"
include = package / "include"
assert Path(epmoe.__file__).parent == Path(epmoe._C.__file__).parent == package, epmoe._C.__file__
assert importlib.metadata.version("epmoe") == epmoe.__version__
assert epmoe.include_dir() == str(include)
headers = sorted(str(p.relative_to(include)) for p in include.rglob("*.*") if p.suffix != ".pyc")
assert headers == ["epmoe_device.h", "protocol/port.h"], headers
assert (package / "py.typed").exists() and (package / "_C.pyi").exists()
assert {p.name.split("-")[0] for p in Path(sys.argv[1]).iterdir()} == {"epmoe"}, "no bench is installed"
assert not epmoe._C.HAS_CUDA and run_threads(main, 2) == [True, True]
print("installed and used")
"""


def copy_sources(tree):
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, tree)


def test_install_source_archive_is_complete(tmp_path):
    """setuptools chooses the files of a source archive. All files that a build reads must be in it."""
    tree = tmp_path / "tree"
    copy_sources(tree)
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(next(tmp_path.glob("epmoe-*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = set(SOURCES[2:])
    for folder in ("csrc", "epmoe"):
        wanted |= {str(p.relative_to(tree)) for p in (tree / folder).rglob("*") if p.is_file()}
    assert wanted <= names, sorted(wanted - names)


def missing_tools():
    # find_spec("pip") is not used: it makes setuptools stop replacing distutils in this process, and
    # torch.compile would then import the wrong distutils.
    installed = {(d.name or "").lower() for d in importlib.metadata.distributions()}
    return [name for name in ("pip", "setuptools") if name not in installed]


@pytest.mark.long
@pytest.mark.skipif(bool(missing_tools()),
                    reason=f"cannot install: this interpreter has no {' and no '.join(missing_tools())}")
def test_install_with_pip(tmp_path):
    """pip -v says what is built. Build isolation is off, because it would download setuptools."""
    tree, target = tmp_path / "tree", tmp_path / "target"
    copy_sources(tree)
    env = {n: v for n, v in os.environ.items() if not n.startswith(("EPMOE_", "PIP_", "PYTHONPATH"))}
    env["EPMOE_CUDA"] = "0"
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "--no-index",
           "--disable-pip-version-check", "--target", str(target), "."]
    done = subprocess.run(pip, cwd=tree, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epmoe: building the CPU backend only, in about 10 s: EPMOE_CUDA=0" in done.stdout + done.stderr
    done = subprocess.run([sys.executable, "-c", USE, str(target)], cwd=tmp_path,
                          env=env | {"PYTHONPATH": str(target)}, capture_output=True, text=True,
                          timeout=HANG_S)
    assert done.returncode == 0 and done.stdout.strip() == "installed and used", done.stdout + done.stderr
