"""Ctrl-C while a rank waits inside an operation on the CPU: on the rank itself, and on the others."""

import os
import signal

import pytest
import torch

import epmoe
from cases import Case, check_outcomes, make_layer, outcome, process_ranks
from pace import WAIT_S, Events, until_ended, when_waiting

pytestmark = pytest.mark.cpu_only
CASE = Case(num_local=2, topk=2, hidden=16, max_tokens=9, dtype=torch.float32)
# What the flight record calls the operation in which ranks 0 and 2 wait for rank 1.
OPERATIONS = {
    "signal": "wait",
    "heap": "heap barrier",
    "barrier": "barrier",
    "plan": "plan",
    "dispatch": "dispatch",
    "combine": "combine",
    "backward": "combine",
    "low_latency": "low-latency dispatch",
}


class Waits:
    """One call for each name of OPERATIONS. Rank 1 makes the calls before it, and not the call itself."""

    def __init__(self, world, name):
        self.is_absent = world.rank == 1
        self.heap = epmoe.SymmetricHeap(world, 1 << 22, "cpu")
        self.words = self.heap.malloc_symmetric(1, torch.int64)
        # Several workers: the interrupted thread may then be one that has no work left.
        self.layer = make_layer(world, "cpu", CASE, heap=self.heap, num_sm=3)
        self.low = epmoe.LowLatencyAll2All(world, 4, 16, 1, world.size, heap=self.heap, dtype=torch.float32)
        self.x, self.idx = torch.ones(3, 16), torch.tensor([[0, 3], [1, 2], [4, 5]])
        getattr(self, "before_" + name, lambda: None)()
        world.exchange(b"go")

    def signal(self):
        self.heap.wait(self.words, 0, 1)

    def heap_barrier(self):
        self.heap.barrier()

    def barrier(self):
        self.layer.ep_barrier_all()

    def plan(self):
        self.layer.preprocess(self.idx)

    def before_dispatch(self):
        self.layout = self.layer.preprocess(self.idx)

    def dispatch(self):
        self.layer.dispatch(self.x, layout=self.layout)

    def before_combine(self):
        self.rows, _, self.layout = self.layer.dispatch(self.x, self.idx)

    def combine(self):
        self.layer.combine(self.rows, self.layout)

    def before_backward(self):
        self.x.requires_grad_()
        self.rows, _, self.layout = self.layer.dispatch(self.x, self.idx)

    def backward(self):
        self.rows.sum().backward()

    def low_latency(self):
        with torch.no_grad():
            self.low.dispatch(self.x, self.idx[:, :1].contiguous())


def _interrupt(rank, world_size):
    """Rank main: for each operation, a world in which SIGINT comes to rank 0 while it waits in it."""
    results = {}
    # SIGINT may be ignored, if the tests were started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, record in OPERATIONS.items():
        world = epmoe.World(timeout_s=WAIT_S)
        waits = Waits(world, name)
        if rank == 1:
            until_ended(world)
        if rank == 0:
            when_waiting(world, record, os.kill, os.getpid(), signal.SIGINT)
        raised = "nothing"
        try:
            getattr(waits, {"heap": "heap_barrier"}.get(name, name))()
        except (KeyboardInterrupt, epmoe.EpError) as error:
            raised = type(error).__name__
        results[name] = raised, outcome(world.check)
        outcome(world.close)
    return results


def test_world_operations_are_interruptible():
    """Each rank learns at once which rank was interrupted. The limit of the waits is far away."""
    results = process_ranks(_interrupt, 3)
    for name in OPERATIONS:
        raised = [r[name][0] for r in results]
        assert raised == ["KeyboardInterrupt", "EpClosed", "EpClosed"], f"{name}: {results}"
        check_outcomes([r[name][1] for r in results], "EpClosed", "rank 0 was interrupted in an operation")


def _handle(rank, world_size, folder):
    """Rank main: rank 0 gets a signal in a barrier. Its handler calls epmoe, and returns."""
    world, events = epmoe.World(timeout_s=WAIT_S), Events(folder)
    waits, seen = Waits(world, "barrier"), []

    def handler(number, frame):
        seen.append(outcome(waits.layer.ep_barrier_all))
        events.set("handled")

    signal.signal(signal.SIGUSR1, handler)
    if rank == 0:
        when_waiting(world, "barrier", os.kill, os.getpid(), signal.SIGUSR1)
    else:
        events.wait("handled")
    waits.barrier()
    waits.barrier()
    world.close()
    return seen


def test_world_handlers_of_signals_run_during_a_wait(tmp_path):
    """A handler that returns does not end the wait. A call of epmoe in a handler would be one too many."""
    seen = process_ranks(_handle, 2, str(tmp_path))
    check_outcomes(seen[0], "ValueError", "a signal handler called epmoe while an operation waits")
    assert len(seen[0]) == 1 and not seen[1]
