"""Limits of tests on a machine that may be busy.

A test waits for events (Events, when_waiting, await_stopped).  Where only a clock can judge, the test states
the
limit of an idle machine, and that limit is multiplied by slowness(), which is measured now.  A limit that
only a hang can reach is HANG_S or WAIT_S, and is not measured.
"""

import hashlib
import os
import signal
import threading
import time

TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ  # there, a hang holds GPUs, and conftest.py ends a test sooner
# for a whole test or subprocess: longer than any takes on the busiest machine
HANG_S = 300.0 if TORCHRUN else 900.0
WAIT_S = 40.0 if TORCHRUN else 120.0  # for the waits of a world in which no wait is expected to time out
_measuring = threading.Lock()


def slowness():
    """How many times longer work takes now than on an idle machine; 1.0 on an idle machine, never less.

    It is the larger of two ratios.  The first is elapsed time over CPU time of some work of this thread: it
    shows the
    present.  The second is the load average of the last minute per core: it shows what has just ended."""
    data = bytes(1 << 20)
    with _measuring:  # threads of this process do not slow each other down; hashlib needs no Python lock
        begin, cpu = time.monotonic(), time.thread_time()
        while time.thread_time() - cpu < 0.04:
            hashlib.sha256(data).digest()
        ratio = (time.monotonic() - begin) / (time.thread_time() - cpu)
    return max(1.0, ratio, os.getloadavg()[0] / (os.cpu_count() or 1))


def is_soon(seconds, limit_s):
    """Did this take less than limit_s, on an idle machine?  The slowness is measured only if the answer needs
    it.
    """
    return seconds < limit_s or seconds < limit_s * slowness()


def wait_until(condition, what, limit_s=HANG_S):
    """Return when condition() is true."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:.0f} s for this event: {what}")
        time.sleep(0.005)


class Events:
    """Events that processes tell each other: files in a folder that all of them know."""

    def __init__(self, folder):
        self.folder = str(folder)

    def set(self, name):
        with open(os.path.join(self.folder, name), "w"):
            pass

    def wait(self, name):
        wait_until(lambda: os.path.exists(os.path.join(self.folder, name)), name)


# ---- worlds ----


def until_ended(world):
    """Return when the world has ended: the wait of another rank has timed out, for example."""
    from epmoe import EpError

    def has_ended():
        try:
            world.check()
        except EpError:
            return True
        return False

    wait_until(has_ended, "the end of the world")


def is_waiting(world, name):
    """Is this rank inside the call that its flight record names so?"""
    mine = f"{world.rank} "
    lines = [line for line in world.flight_record().splitlines() if line.lstrip().startswith(mine)]
    return any(name in line and "in flight" in line for line in lines)


def when_waiting(world, name, action, *arguments):
    """In another thread: call action as soon as this rank is inside the call that its flight record names so.
    """

    def main():
        wait_until(lambda: is_waiting(world, name), f"rank {world.rank} is in {name}")
        action(*arguments)

    threading.Thread(target=main, daemon=True).start()


# ---- processes that are stopped ----


def await_stopped(pid):
    """Return when the process has been stopped by a signal."""

    def is_stopped():
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "T"

    wait_until(is_stopped, f"process {pid} is stopped")


def continue_later(pid, seconds=0.0, after=lambda: None):
    """In another thread: continue a process that stops itself, so many seconds after it has stopped, and
    after `after` has returned."""

    def main():
        await_stopped(pid)
        time.sleep(seconds)
        after()
        os.kill(pid, signal.SIGCONT)

    threading.Thread(target=main).start()  # this process does not end before it
