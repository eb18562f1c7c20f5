"""make wheels (tests/wheels.py): the wheel for the CPU is complete and works, and wrong wheels are found."""

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import epmoe
import wheels
from pace import HANG_S

ROOT = Path(__file__).resolve().parent.parent


def missing(*names):
    installed = {(d.name or "").lower() for d in importlib.metadata.distributions()}
    return " and ".join(name for name in names if name not in installed)


pytestmark = [pytest.mark.cpu_only, pytest.mark.long,
              pytest.mark.skipif(bool(missing("pip", "setuptools")),
                                 reason=f"cannot build wheels: no {missing('pip', 'setuptools')}")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return wheels.build(tmp_path_factory.mktemp("wheel"), cuda=False)


def test_wheels_of_the_cpu_work_in_an_empty_environment(wheel, tmp_path):
    assert wheel.name.startswith(f"epmoe-{epmoe.__version__}+cpu-cp311-abi3-linux_")
    wheels.check_contents(wheel, tmp_path)
    assert wheels.use(wheel, tmp_path).startswith("ran on 2 CPU ranks, with torch")


@pytest.mark.skipif(bool(missing("auditwheel", "patchelf")),
                    reason=f"no manylinux tag: no {missing('auditwheel', 'patchelf')}")
def test_wheels_get_a_manylinux_tag_and_no_library(wheel, tmp_path):
    tagged = wheels.repair(wheel, tmp_path / "dist")
    assert "-cp311-abi3-manylinux_2_" in tagged.name
    wheels.check_contents(tagged, tmp_path)


def changed(wheel, folder, add=(), drop=(), name=None):
    """Copy a wheel. Add the files of a dict, and leave out those of a list."""
    copy = folder / (name or wheel.name)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w") as new:
        for entry in old.namelist():
            if entry not in drop and entry not in add:
                new.writestr(entry, old.read(entry))
        for entry in add:
            new.writestr(entry, add[entry])
    return copy


def test_wheels_with_wrong_contents_are_found(wheel, tmp_path):
    plain = wheel.name.replace("+cpu", "")
    for change, message in ((dict(add={"epmoe.libs/libz.so.1": b""}), r"unexpected \['epmoe.libs/"),
                            (dict(drop=["epmoe/integrations/transformers.py"]), r"missing \['epmoe/integ"),
                            (dict(name=plain), "is not named")):
        with pytest.raises(SystemExit, match=message):
            wheels.check_contents(changed(wheel, tmp_path, **change), tmp_path)
    source, module = tmp_path / "module.c", tmp_path / "_C.abi3.so"
    source.write_text("int version(void) { return 0; }\n")
    command = ["gcc", "-shared", "-Wl,--no-as-needed", str(source), "-lgcc_s", "-o", str(module)]
    subprocess.run(command, check=True, timeout=HANG_S)
    with pytest.raises(SystemExit, match=r"the module needs \['libgcc_s"):
        other = changed(wheel, tmp_path, add={"epmoe/_C.abi3.so": module.read_bytes()})
        wheels.check_contents(other, tmp_path)


@pytest.mark.parametrize("settings, label", [
    ({}, ""),
    ({"EPMOE_WHEEL": "1", "EPMOE_CUDA": "0"}, "+cpu"),
    ({"EPMOE_WHEEL": "1", "EPMOE_CUDA": "1"}, "+cu128"),
])
def test_wheels_are_labelled_with_what_was_built(tmp_path, settings, label):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S,
                   env=wheels.environment(CUDA_HOME=str(tmp_path), **settings))
    text = (tmp_path / "epmoe.egg-info" / "PKG-INFO").read_text()
    assert f"\nVersion: {epmoe.__version__}{label}\n" in text
