"""On GPUs: layers and heaps that are only dropped.  A destructor does not wait, and it makes no call of CUDA.

tests/c/test_deferred_free.c shows on the CPU when memory is unmapped and freed.
"""

import datetime
import gc
import weakref

import pytest
import torch

import epmoe
from pace import HANG_S, WAIT_S

pytestmark = pytest.mark.cuda_only


@pytest.fixture(autouse=True)
def processes(ranks):
    if not ranks.is_torchrun:
        pytest.skip("needs ranks that are processes")


def make_layer(world, device):
    return epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=2 * world.size, dtype=torch.float32,
                                capacity=16 * world.size, device=device)


def run_layer(layer, device):
    """Launch operations whose sum is 2. The host waits for nothing."""
    x = torch.ones(8, 16, device=device)
    idx = torch.arange(16, device=device).view(8, 2) % layer.num_experts
    rows, _, layout = layer.dispatch(x, idx)
    return layer.combine(rows, layout)


def _drop_before_peers_come(world, device):
    """Rank 0 drops a layer while its operations wait for the others, which come only after that."""
    from torch.distributed.distributed_c10d import _get_default_store

    own, store = epmoe.World(world.group, timeout_s=WAIT_S), _get_default_store()
    layer = make_layer(own, device)
    run_layer(layer, device)
    layer.synchronize()
    if world.rank:
        store.wait(["dropped"], datetime.timedelta(seconds=HANG_S))
    y = run_layer(layer, device)
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    if world.rank == 0:
        store.set("dropped", "1")
    is_dropped = reference() is None
    torch.cuda.synchronize()
    own.close()
    return is_dropped, y


def test_layer_dropped_before_its_peers_come(ranks):
    for is_dropped, y in ranks(_drop_before_peers_come, at_least=2):
        assert is_dropped and bool((y == 2).all())


def _drop_during_a_capture(world, device):
    own = epmoe.World(world.group, timeout_s=WAIT_S)
    dropped, finalized = make_layer(own, device), make_layer(own, device)
    heaps = [epmoe.SymmetricHeap(own, 1 << 20, device) for _ in range(2)]
    things = [dropped, finalized, *heaps, *(heap.malloc_symmetric(4) for heap in heaps)]
    sums = [run_layer(layer, device) for layer in (dropped, finalized)]
    finalized.finalize()
    heaps[0].close()
    del dropped, finalized, heaps
    counter = torch.zeros(4, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        while things:
            del things[-1]
            gc.collect()
            counter += 1
    graph.replay()
    torch.cuda.synchronize()
    own.close()
    return counter, *sums


def test_layer_dropped_during_a_capture(ranks):
    """The capture stays valid, and the graph has all that was captured."""
    for counter, *sums in ranks(_drop_during_a_capture):
        assert counter.tolist() == [7] * 4 and all(bool((y == 2).all()) for y in sums)


def _memory_of_closed_layers(world, device):
    own = epmoe.World(world.group, timeout_s=WAIT_S)

    def cycle():
        heap = epmoe.SymmetricHeap(own, 64 << 20, device)
        box = heap.malloc_symmetric(1 << 20, torch.uint8)
        heap.close()
        return box

    def free_memory():
        """On all ranks, the creation frees what the last cycle has dropped. Then no rank allocates."""
        epmoe.SymmetricHeap(own, 1 << 20, device).close()
        return torch.cuda.mem_get_info(device)[0]

    cycle()
    lost = []
    for _ in range(5):  # several times, because another program may allocate meanwhile
        before = free_memory()
        for _ in range(8):  # 512 MiB, if nothing were freed
            cycle()
        lost.append(before - free_memory())
    own.close()
    return min(lost) >> 20


def test_layer_memory_of_closed_heaps_is_free(ranks):
    """The tensor of each heap is dropped after the close. A later creation frees the memory."""
    for lost_mib in ranks(_memory_of_closed_layers):
        assert lost_mib < 200
