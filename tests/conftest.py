"""How a test gets its ranks, on either backend, and what the summary says about what was not run.

pytest                                                     ranks are threads of this process, on the CPU
torchrun --nproc-per-node N -m pytest tests                every process is a rank on a GPU; more ranks than
GPUs share them
EPMOE_TEST_THREADS=cuda pytest                             ranks are threads of this process, side by side on
one GPU
EPMOE_BACKEND=cpu torchrun --nproc-per-node N -m pytest tests   the same without GPUs

A test calls ranks(fn, ...): fn(world, device, ...) runs once per rank, and the test sees every rank's result
in every process, so all processes of a torchrun come to the same verdict and nobody waits for a rank that
failed.
"""

import collections
import contextlib
import faulthandler
import os
import sys
import traceback

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # processes are forked from one that has imported numpy

import pytest
import torch

import epmoe
from cases import isolated, poison_memory, process_ranks, share_gpus
from epmoe import _C
from epmoe.testing import set_device

CAN_CUDA = bool(_C.HAS_CUDA) and torch.cuda.is_available()
TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ
FORCED_CPU = os.environ.get("EPMOE_BACKEND") == "cpu"
RANK = int(os.environ["RANK"]) if TORCHRUN else 0
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if TORCHRUN else 0
NUM_LOCAL = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE))
THREADS_ON_CUDA = not TORCHRUN and os.environ.get("EPMOE_TEST_THREADS") == "cuda"
ON_CUDA = (TORCHRUN or THREADS_ON_CUDA) and CAN_CUDA and not FORCED_CPU
# only a hang reaches it, also on a busy machine
DEFAULT_TIMEOUT_S = 60.0 if TORCHRUN or THREADS_ON_CUDA else 300.0


def to_cpu(value):
    """The same value with every tensor on the CPU and nothing that holds on to a device or a heap."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_cpu(v) for v in value)
    return value


class Ranks:
    """Runs a function on every rank; see the module's docstring."""

    def __init__(self):
        self.world = None

    @property
    def device(self):
        return torch.device("cuda", torch.cuda.current_device()) if ON_CUDA else torch.device("cpu")

    @property
    def is_torchrun(self):
        return TORCHRUN

    def size(self, world_size=4):
        """How many ranks a call with this world_size gets."""
        return WORLD_SIZE if TORCHRUN else world_size

    def __call__(self, fn, *args, world_size=4, at_least=1, timeout_s=DEFAULT_TIMEOUT_S):
        """[fn(world, device, *args) of rank 0, 1, ...], each within timeout_s.  Under torchrun the number of
        ranks is torchrun's; a test that makes no sense below at_least ranks is skipped there."""
        __tracebackhide__ = True
        if not TORCHRUN:
            from epmoe.testing import run_threads

            def main(world):
                # epmoe's own error comes before the deadline of the threads
                world.set_timeout(timeout_s * 0.8)
                result = fn(world, self.device, *args)
                return to_cpu(result) if ON_CUDA else result

            return run_threads(main, world_size, timeout_s=timeout_s, device=self.device)
        if WORLD_SIZE < at_least:
            pytest.skip(f"needs {at_least} ranks, torchrun has {WORLD_SIZE}")
        faulthandler.dump_traceback_later(timeout_s + 30, exit=True, file=sys.__stderr__)
        try:
            return self._as_this_rank(fn, args, timeout_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def isolated(self, fn, *args, world_size=4, at_least=1, timeout_s=DEFAULT_TIMEOUT_S):
        """The same, with processes as ranks on the CPU too: for what may end a process.

        fn is a function of a module.
        """
        __tracebackhide__ = True
        if TORCHRUN:
            return self(fn, *args, at_least=at_least, timeout_s=timeout_s)
        return process_ranks(isolated, world_size, fn, args, timeout_s, timeout_s=timeout_s)

    def _as_this_rank(self, fn, args, timeout_s):
        import torch.distributed as dist

        result, error = None, None
        try:
            if self.world is None:
                self.world = epmoe.World(dist.group.WORLD, timeout_s)
            self.world.set_timeout(timeout_s * 0.8)
            result = to_cpu(fn(self.world, self.device, *args))
            if ON_CUDA:
                torch.cuda.synchronize()
        except BaseException as e:  # every rank's error is everybody's
            error = traceback.format_exc()
            if isinstance(e, (KeyboardInterrupt, SystemExit)):
                raise
            # a rank that is still in an operation must not wait for this one
            with contextlib.suppress(Exception):
                self.world._leave(False)
        ended = error is not None
        try:
            if self.world is not None:
                self.world.check()
        except epmoe.EpError:
            ended = True
        outcomes = [None] * WORLD_SIZE
        dist.all_gather_object(outcomes, (result, error, ended))
        if any(e for _, _, e in outcomes):  # one world serves all tests, until a test breaks it
            if self.world is not None:
                self.world._leave(False)
            self.world = None
        if any(e for _, e, _ in outcomes):
            raise AssertionError("\n".join(f"rank {r}:\n{e}" for r, (_, e, _) in enumerate(outcomes) if e))
        return [r for r, _, _ in outcomes]

    def close(self):
        """The next call has a new world."""
        if self.world is not None:
            with contextlib.suppress(Exception):
                self.world.close()
            self.world = None


@pytest.fixture(scope="session")
def _ranks():
    if TORCHRUN:
        import torch.distributed as dist

        if ON_CUDA:
            share_gpus(NUM_LOCAL)
            set_device(int(os.environ.get("LOCAL_RANK", RANK)), NUM_LOCAL)
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_CUDA else "gloo")
    r = Ranks()
    yield r
    if TORCHRUN:
        r.close()
        dist.destroy_process_group()


@pytest.fixture
def ranks(_ranks):
    return _ranks


@pytest.fixture(autouse=True, scope="session")
def poison():
    poison_memory()
    yield
    torch.use_deterministic_algorithms(False)


# ---- markers, and an honest summary ----

MARKERS = {
    "cpu_only": "makes ranks of its own (threads or processes on the CPU), and kills, stops or forks them",
    "cuda_only": "needs GPUs: torchrun --nproc-per-node N -m pytest tests",
}


@pytest.hookimpl(trylast=True)  # the reporter must be there
def pytest_configure(config):
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation.*")
    if RANK:  # one rank speaks for all: each has everybody's results
        from _pytest._io import TerminalWriter

        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw = TerminalWriter(open(os.devnull, "w"))


def pytest_collection_modifyitems(items):
    for item in items:
        if (TORCHRUN or THREADS_ON_CUDA) and item.get_closest_marker("cpu_only"):
            item.add_marker(
                pytest.mark.skip(reason=f"cpu_only: {MARKERS['cpu_only']}; run plain pytest for it")
            )
        if not ON_CUDA and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason=f"cuda_only: {MARKERS['cuda_only']}"))


def pytest_terminal_summary(terminalreporter):
    say = terminalreporter.write_line
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    terminalreporter.section("epmoe: what ran where")
    if ON_CUDA:
        shared = (
            f", {NUM_LOCAL} on {torch.cuda.device_count()} GPU"
            if NUM_LOCAL > torch.cuda.device_count()
            else " with a GPU"
        )
        who = (
            "ranks were threads of this process, side by side"
            if THREADS_ON_CUDA
            else f"{WORLD_SIZE} ranks, each a process{shared}"
        )
        say(f"{who} ({torch.cuda.get_device_name()})")
    elif TORCHRUN:
        say(f"{WORLD_SIZE} ranks, each a process on the CPU")
    else:
        say("ranks were threads and processes on the CPU")
    if not ON_CUDA:
        why = ("EPMOE_BACKEND=cpu" if FORCED_CPU else "this build of epmoe has no CUDA backend"
               if not _C.HAS_CUDA else
               "there is no GPU here" if not torch.cuda.is_available()
               else "pytest was not started by torchrun")
        say(f"nothing was run on a GPU on this machine: {why}")
    say(f"{sum(reasons.values())} tests were skipped")
    for text, n in reasons.most_common():
        say(f"  {n}  {text}")
