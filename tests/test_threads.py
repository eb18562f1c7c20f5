"""Threads: run_threads, whose ranks are threads, and ranks that have several threads of their own."""

import gc
import sys
import threading

import pytest
import torch

import epmoe
from cases import process_ranks
from epmoe.testing import run_threads
from pace import WAIT_S

pytestmark = pytest.mark.cpu_only


def test_threads_run_without_the_garbage_collector():
    """A collection inside of torch.get_rng_state, which holds a lock, deadlocks with another rank's call."""
    assert gc.isenabled()
    assert run_threads(lambda world: gc.isenabled(), 2) == [False, False]
    assert gc.isenabled()


def test_threads_of_a_rank_that_fails_restore_the_garbage_collector():
    with pytest.raises(AssertionError, match="(?s)rank 1: .*ZeroDivisionError"):
        run_threads(lambda world: 1 / (1 - world.rank), 2)
    assert gc.isenabled()


class Steps(threading.Thread):
    """A thread that dispatches and combines.  Every row returns to its token, so a step returns its input."""

    def __init__(self, layer, num_steps):
        super().__init__(daemon=True)
        self.layer, self.num_steps, self.num_right, self.error = layer, num_steps, 0, None
        self.start()

    def run(self):
        num_experts = self.layer.num_experts
        idx = torch.arange(8).reshape(8, 1) % num_experts
        try:
            for i in range(self.num_steps):
                x = torch.full((8, 256), float(i + 1 + 100 * self.layer.rank))
                rows, _, layout = self.layer.dispatch(x, idx)
                self.num_right += torch.equal(self.layer.combine(rows, layout), x)
        except Exception as error:
            self.error = error

    def result(self):
        self.join(WAIT_S)
        return self.num_right, repr(self.error)


def _layer(world, heap):
    return epmoe.EPAll2AllLayer(world, 8, 256, 1, num_tot_experts=world.size, dtype=torch.float32, heap=heap)


def _allocate_beside_steps(rank, world_size):
    """Rank main: one thread runs the steps of a layer, the other allocates."""
    world = epmoe.World(timeout_s=WAIT_S)
    heap = epmoe.SymmetricHeap(world, 1 << 22, device="cpu")
    layer = _layer(world, heap)
    sys.setswitchinterval(1e-5)  # the threads meet in more places
    steps = Steps(layer, 400)
    tensors = [heap.malloc_symmetric(64) for _ in range(600)]
    right = steps.result()
    heap.put(tensors[-1], torch.full((64,), float(rank)), (rank + 1) % world_size)
    heap.barrier()
    return right, [heap.offset(t) for t in tensors], tensors[-1].tolist(), world.check()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_threads_of_a_rank_allocate_beside_operations(num_ranks):
    """Each allocation succeeds on all ranks, and is at the same place on all of them."""
    results = process_ranks(_allocate_beside_steps, num_ranks)
    assert [r[0] for r in results] == num_ranks * [(400, "None")]
    assert all(r[1] == results[0][1] for r in results)
    assert [r[2] for r in results] == [64 * [float((r - 1) % num_ranks)] for r in range(num_ranks)]


def _finalize_beside_steps(rank, world_size):
    """Rank main: rank 0 finalizes its layer while its other thread still has steps to run.

    The next layer has the memory of the first one, and its steps begin at once.
    """
    world = epmoe.World(timeout_s=WAIT_S)
    heap = epmoe.SymmetricHeap(world, 1 << 22, device="cpu")
    got = []
    for _ in range(10):
        layer = _layer(world, heap)
        steps = Steps(layer, 5)
        if rank != 0:
            got.append(steps.result())
        layer.finalize()
        with _layer(world, heap) as following:
            got.append(Steps(following, 2).result())
        if rank == 0:
            got.append(steps.result())
    return sorted(got)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_threads_of_a_rank_finalize_beside_operations(num_ranks):
    """The operations go on until all ranks have come to the close. So they have the right results."""
    results = process_ranks(_finalize_beside_steps, num_ranks)
    assert results == num_ranks * [10 * [(2, "None")] + 10 * [(5, "None")]]
