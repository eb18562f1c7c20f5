"""The `ranks` fixture, which runs a function on every rank, and a summary of what was not run.

pytest
    Ranks are threads of this process, on the CPU.
torchrun --nproc-per-node N -m pytest tests
    Each process is a rank on a GPU. If there are more ranks than GPUs, ranks share GPUs.
EPMOE_TEST_THREADS=cuda pytest
    Ranks are threads of this process and share one GPU.
EPMOE_BACKEND=cpu torchrun --nproc-per-node N -m pytest tests
    Each process is a rank on the CPU.

A test calls ranks(fn, ...), which runs fn(world, device, ...) once on each rank. Every process receives the
results of all ranks. So under torchrun all processes reach the same verdict, and no process waits for a rank
that failed.
"""

import collections
import contextlib
import faulthandler
import os
import pickle
import sys
import traceback

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # rank processes are forked from one that imported numpy
# A rank takes a node for dead after this time without an answer. The default of 2 s is too short for a test
# machine whose CPUs stand still for seconds. Tests of silent nodes set their own time.
os.environ.setdefault("EPMOE_NODE_TIMEOUT_S", "60")

import pytest
import torch

import epmoe
from cases import isolated, poison_memory, process_ranks, share_gpus
from epmoe import _C
from epmoe.testing import set_device
from pace import HANG_S, on_one_core

CAN_CUDA = bool(_C.HAS_CUDA) and torch.cuda.is_available()
TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ
FORCED_CPU = os.environ.get("EPMOE_BACKEND") == "cpu"
RANK = int(os.environ["RANK"]) if TORCHRUN else 0
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if TORCHRUN else 0
NUM_LOCAL = int(os.environ.get("LOCAL_WORLD_SIZE", WORLD_SIZE))
# The number of this worker of xdist. Its ranks that are threads share one core, because other workers use
# the others: a rank that waits yields to the rank that it waits for, and a test takes a third of the time.
# With --long they do not: ranks that run at the same time find races.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
SHARES_CORE = bool(WORKER)
THREADS_ON_CUDA = not TORCHRUN and os.environ.get("EPMOE_TEST_THREADS") == "cuda"
ON_CUDA = (TORCHRUN or THREADS_ON_CUDA) and CAN_CUDA and not FORCED_CPU
# Processes that a test starts find the epmoe that is tested, also where pytest was not started by make.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(os.path.dirname(epmoe.__file__)),
                                                         os.environ.get("PYTHONPATH")]))
# pytest captures what tests write to file descriptor 2, and what it captured is lost when a process ends.
STDERR = sys.__stderr__
# Only a hang reaches this limit, also on a busy machine.
DEFAULT_TIMEOUT_S = 60.0 if TORCHRUN or THREADS_ON_CUDA else 300.0


def to_cpu(value):
    """A copy of value with all tensors on the CPU. It holds no reference to a device or a heap."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [to_cpu(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class Ranks:
    """Runs a function on every rank. See the docstring of the module."""

    def __init__(self):
        self.world = None

    @property
    def device(self):
        return torch.device("cuda", torch.cuda.current_device()) if ON_CUDA else torch.device("cpu")

    @property
    def is_torchrun(self):
        return TORCHRUN

    def size(self, world_size=4):
        """The number of ranks that a call with this world_size uses."""
        return WORLD_SIZE if TORCHRUN else world_size

    def __call__(self, fn, *args, world_size=4, at_least=1, timeout_s=DEFAULT_TIMEOUT_S):
        """Run fn(world, device, *args) on every rank within timeout_s. Returns the results in rank order.

        Under torchrun, the number of ranks is torchrun's. If it is less than at_least, the test is skipped.
        """
        __tracebackhide__ = True
        if not TORCHRUN:
            from epmoe.testing import run_threads

            def main(world):
                world.set_timeout(timeout_s * 0.8)  # epmoe's error comes before the deadline of the threads
                result = fn(world, self.device, *args)
                return to_cpu(result) if ON_CUDA else result

            with on_one_core(SHARES_CORE and not ON_CUDA, int(WORKER or 0)):
                return run_threads(main, world_size, timeout_s=timeout_s, device=self.device)
        if WORLD_SIZE < at_least:
            pytest.skip(f"needs {at_least} ranks, torchrun has {WORLD_SIZE}")
        faulthandler.dump_traceback_later(timeout_s + 30, exit=True, file=STDERR)
        try:
            return self._as_this_rank(fn, args, timeout_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def isolated(self, fn, *args, world_size=4, at_least=1, timeout_s=DEFAULT_TIMEOUT_S):
        """Like a call, but ranks are processes on the CPU too. Use it where fn may end or change its process.

        fn must be a function of a module, so that it can be pickled.
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
            pickle.dumps(result)  # one that cannot be sent to the others is this rank's error
            if ON_CUDA:
                torch.cuda.synchronize()
        except BaseException as e:  # every process reports the error of any rank
            error = traceback.format_exc()
            if isinstance(e, (KeyboardInterrupt, SystemExit)):
                raise
            # Leave the world, so that ranks that are still in an operation do not wait for this rank.
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
        if any(e for _, _, e in outcomes):  # all tests use one world, until a test ends it
            if self.world is not None:
                self.world._leave(False)
            self.world = None
        if any(e for _, e, _ in outcomes):
            raise AssertionError("\n".join(f"rank {r}:\n{e}" for r, (_, e, _) in enumerate(outcomes) if e))
        return [r for r, _, _ in outcomes]

    def close(self):
        """Close the world. The next call creates a new one."""
        if self.world is not None:
            with contextlib.suppress(Exception):
                self.world.close()
            self.world = None


# For every test, so that each passes as the first one too: under torchrun an EPMoE needs the process group.
@pytest.fixture(autouse=True, scope="session")
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


@pytest.fixture(autouse=True)
def return_memory():
    """Give back what torch keeps of a large test: several ranks may share the memory of the GPU."""
    yield
    if ON_CUDA and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End this process, with the stacks of all threads, if a test takes far too long.

    A thread that waits for a lock while it holds the interpreter's lock stops all limits that Python keeps.
    """
    if TORCHRUN:  # Ranks does it
        return (yield)
    faulthandler.dump_traceback_later(HANG_S + 60, exit=True, file=STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---- markers and the summary ----

MARKERS = {
    "cpu_only": "starts its own ranks (threads or processes on the CPU), and kills, stops or forks them",
    "cuda_only": "needs GPUs: torchrun --nproc-per-node N -m pytest tests",
    "long": "takes many seconds, or installs a framework: make check, or pytest --long",
}


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true",
                     help="also run the tests marked long; they also run if files or tests are named")


@pytest.hookimpl(trylast=True)  # after the reporter has been registered
def pytest_configure(config):
    global STDERR, SHARES_CORE
    SHARES_CORE = SHARES_CORE and not config.option.long
    STDERR = os.fdopen(os.dup(2), "w")  # pytest does not capture yet
    if not hasattr(config, "workerinput"):  # the workers of xdist receive the options of this process
        config.option.long |= config.args_source is not config.ArgsSource.TESTPATHS
    for name, text in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    config.addinivalue_line("filterwarnings", "ignore:.*does not have a deterministic implementation.*")
    if RANK:  # only rank 0 prints: every process has the results of all ranks
        from _pytest._io import TerminalWriter

        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw = TerminalWriter(open(os.devnull, "w"))


def pytest_collection_modifyitems(config, items):
    for item in items:
        if not config.option.long and item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason=f"long: {MARKERS['long']}"))
        if (TORCHRUN or THREADS_ON_CUDA) and item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"cpu_only: {MARKERS['cpu_only']}; run plain pytest"))
        if not ON_CUDA and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason=f"cuda_only: {MARKERS['cuda_only']}"))


def pytest_runtest_logreport(report):
    """Name a failure of this process, if it prints no report: the test may have failed in it alone."""
    if RANK and report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = str(crash.message if crash else report.longrepr)[:500]
        print(f"rank {RANK}: {report.nodeid} failed in {report.when}: {text}", file=sys.stderr, flush=True)


def pytest_terminal_summary(terminalreporter):
    say = terminalreporter.write_line
    reasons = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[text.removeprefix("Skipped: ")] += 1
    terminalreporter.section("epmoe: what ran where")
    if ON_CUDA:
        num_gpus = torch.cuda.device_count()
        gpus = f", {NUM_LOCAL} on {num_gpus} GPU" if NUM_LOCAL > num_gpus else " with a GPU"
        text = f"{WORLD_SIZE} ranks, each a process{gpus}"
        if THREADS_ON_CUDA:
            text = "ranks were threads of this process on one GPU"
        say(f"{text} ({torch.cuda.get_device_name()})")
    elif TORCHRUN:
        say(f"{WORLD_SIZE} ranks, each a process on the CPU")
    else:
        say("ranks were threads and processes on the CPU")
    if not ON_CUDA:
        if FORCED_CPU:
            reason = "EPMOE_BACKEND=cpu"
        elif not _C.HAS_CUDA:
            reason = "this build of epmoe has no CUDA backend"
        elif not torch.cuda.is_available():
            reason = "this machine has no GPU"
        else:
            reason = "pytest was not started by torchrun"
        say(f"no test ran on a GPU: {reason}")
    say(f"{sum(reasons.values())} tests were skipped")
    for text, n in reasons.most_common():
        say(f"  {n}  {text}")
