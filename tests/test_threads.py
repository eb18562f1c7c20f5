"""run_threads: ranks that are threads of one process."""

import gc

import pytest

from epmoe.testing import run_threads

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
