"""Time limits for tests on a machine that may be busy.

A test waits for events where it can (Events, when_waiting, await_stopped). Otherwise it compares a time with
a limit for an idle machine, and multiplies this limit by slowness(), which is measured at that moment. HANG_S
and WAIT_S are limits that only a hang can reach. They are constants.
"""

import contextlib
import hashlib
import os
import signal
import threading
import time

# Under torchrun, a hang occupies GPUs, and conftest.py ends a test sooner.
TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
# For a whole test or subprocess. No test takes that long, also on a very busy machine.
HANG_S = 300.0 if TORCHRUN else 900.0
# For the waits of a world in which no wait is expected to time out.
WAIT_S = 40.0 if TORCHRUN else 120.0
_measuring = threading.Lock()


def slowness():
    """How many times longer work takes now than on an idle machine. It is at least 1.0.

    It is the larger of two ratios. The first is elapsed time over CPU time of some work of this thread: it
    shows the present load. The second is the load average of the last minute per core: it also shows load
    that has just ended.
    """
    data = bytes(1 << 20)
    with _measuring:  # one thread measures at a time; hashlib releases the Python lock
        begin, cpu = time.monotonic(), time.thread_time()
        while time.thread_time() - cpu < 0.04:
            hashlib.sha256(data).digest()
        ratio = (time.monotonic() - begin) / (time.thread_time() - cpu)
    return max(1.0, ratio, os.getloadavg()[0] / (os.cpu_count() or 1))


def is_soon(seconds, limit_s):
    """Whether seconds is less than limit_s times the slowness, which is measured only if it is needed."""
    return seconds < limit_s or seconds < limit_s * slowness()


def wait_until(condition, what, limit_s=HANG_S):
    """Return when condition() is true. `what` describes the event in the error message."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:.0f} s for this event, which did not happen: {what}")
        time.sleep(0.005)


@contextlib.contextmanager
def on_one_core(is_wanted, number):
    """If is_wanted, threads that start in the block share one core. `number` chooses it.

    A rank that waits polls and yields its core. On one core it yields to the rank that it waits for, and the
    operations need half of the time. On several cores it takes time from other processes.
    """
    cores = os.sched_getaffinity(0)
    if is_wanted:
        os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class Events:
    """Events that processes signal to each other, as files in a folder that all of them know."""

    def __init__(self, folder):
        self.folder = str(folder)

    def set(self, name):
        with open(os.path.join(self.folder, name), "w"):
            pass

    def wait(self, name):
        wait_until(lambda: os.path.exists(os.path.join(self.folder, name)), name)


# ---- worlds ----


def until_ended(world):
    """Return when the world has ended, for example because a wait of another rank has timed out."""
    from epmoe import EpError

    def has_ended():
        try:
            world.check()
        except EpError:
            return True
        return False

    wait_until(has_ended, "the end of the world")


def is_waiting(world, name):
    """Whether this rank is inside the call that has this name in its flight record."""
    mine = f"{world.rank} "
    lines = [line for line in world.flight_record().splitlines() if line.lstrip().startswith(mine)]
    return any(name in line and "in flight" in line for line in lines)


def when_waiting(world, name, action, *arguments):
    """Start a thread that calls action(*arguments) as soon as is_waiting(world, name)."""

    def main():
        wait_until(lambda: is_waiting(world, name), f"rank {world.rank} is in {name}")
        action(*arguments)

    threading.Thread(target=main, daemon=True).start()


# ---- processes that are stopped by a signal ----


def await_stopped(pid):
    """Return when the process has been stopped by a signal."""

    def is_stopped():
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "T"

    wait_until(is_stopped, f"process {pid} is stopped")


def continue_later(pid, seconds=0.0, after=lambda: None):
    """Start a thread that continues a process that stops itself by SIGSTOP.

    The thread waits until the process is stopped, sleeps, calls after(), and then sends SIGCONT.
    """

    def main():
        await_stopped(pid)
        time.sleep(seconds)
        after()
        os.kill(pid, signal.SIGCONT)

    threading.Thread(target=main).start()  # no daemon: this process lives until the thread has ended
