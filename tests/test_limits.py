"""Limits of a heap, a world and a process: exact, with an error that says what to do."""

import pytest
import torch

import epmoe
from cases import check_outcomes, outcome, process_ranks

MOST_ALLOCATIONS = 1024
MOST_BUFFERS = 256
MOST_WORLDS = 256


@pytest.mark.parametrize("alignment", [128, 512], ids=["dense", "with gaps"])
def test_limits_of_the_allocations_of_a_heap(ranks, alignment):
    """Blocks that lie between two allocations do not count."""

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        tensors = [heap.malloc_symmetric(1, alignment=alignment) for _ in range(MOST_ALLOCATIONS)]
        got = outcome(lambda: heap.malloc_symmetric(1))
        for t in tensors[1::2]:
            heap.free(t)
        tensors[1::2] = [heap.malloc_symmetric(1, alignment=alignment) for _ in tensors[1::2]]
        again = outcome(lambda: heap.malloc_symmetric(1))
        num_allocations = heap.stats()["num_allocations"]
        heap.close()
        return got, again, num_allocations

    for got, again, num_allocations in ranks(run, world_size=1):
        check_outcomes([got, again], "HeapExhausted", f"at most {MOST_ALLOCATIONS} allocations", "free some")
        assert num_allocations == MOST_ALLOCATIONS


def test_limits_of_the_buffers_of_a_world(ranks):
    """A layer with a heap of its own takes two: the heap's and its own."""

    def run(world, device):
        def make(heap=None):
            return epmoe.LowLatencyAll2All(world, 1, 16, 1, world.size, dtype=torch.float32, heap=heap,
                                           device=device if heap is None else None)

        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        layers, got = [make(heap)], []
        while not got or not got[0].kinds:
            got = [outcome(lambda: layers.append(make()))]
        got += [outcome(lambda: epmoe.SymmetricHeap(world, 1 << 10, device)), outcome(lambda: make(heap))]
        num_layers = len(layers)
        layers.pop(1).finalize()
        layers.append(make())
        idx = torch.zeros(1, 1, dtype=torch.int64, device=device)
        rows, _, _, handle = layers[-1].dispatch(torch.ones(1, 16, device=device), idx)
        result = layers[-1].combine(rows, handle).unique().tolist()
        for layer in layers:
            layer.finalize()
        heap.close()
        return num_layers, got, result

    for num_layers, got, result in ranks(run, world_size=2):
        # Under torchrun all tests share a world, and an earlier test may have left something in it.
        assert num_layers == MOST_BUFFERS // 2 or ranks.is_torchrun and num_layers < MOST_BUFFERS // 2
        text = f"at most {MOST_BUFFERS} communication buffers"
        check_outcomes(got, "HeapExhausted", text, "layer=", "heap=")
        assert result == [1.0]


def make_worlds(rank, world_size):
    """Make worlds up to the limit, in a process without others."""
    worlds = []
    with pytest.raises(epmoe.HeapExhausted) as error:
        while True:
            worlds.append(epmoe.World())
    assert f"at most {MOST_WORLDS} open worlds: close some" in str(error.value)
    assert len(worlds) == MOST_WORLDS
    worlds[0].close()
    worlds.append(epmoe.World())
    assert worlds[0].flight_record().startswith("culprit: none")
    with pytest.raises(epmoe.HeapExhausted):
        epmoe.World()
    for world in worlds:
        world.close()


@pytest.mark.cpu_only
def test_limits_of_the_worlds_of_a_process():
    """A closed world does not count, also while it is kept for its flight record."""
    process_ranks(make_worlds, 1, backend=None)
