"""Several ranks on one GPU. The program must allow it, and the memory of all ranks is counted together.

tests/c/test_sharing.c tests the rules themselves. All tests with more ranks than GPUs run under these rules.
"""

import os

import pytest
import torch

import epmoe
from cases import check_outcomes, outcome, share_gpus
from epmoe import testing

NCCL = ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")


@pytest.fixture
def one_gpu(monkeypatch):
    """set_device sees one GPU. Returns the list of devices that it selects."""
    for name in (*NCCL, "EPMOE_SHARE_GPU"):
        monkeypatch.delenv(name, raising=False)
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize("local_rank", [0, 3])
def test_heap_sharing_puts_all_ranks_on_one_gpu(one_gpu, monkeypatch, local_rank):
    # An inherited value would be the same on all ranks. set_device must replace it.
    monkeypatch.setenv("NCCL_HOSTID", "inherited")
    device = torch.device("cuda", 0)
    assert testing.set_device(local_rank, 4) == device
    assert one_gpu == [device]
    assert os.environ["NCCL_HOSTID"] == f"epmoe-rank-{local_rank}"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_heap_sharing_sets_no_nccl_variable_if_each_rank_has_a_gpu(one_gpu):
    assert testing.set_device(0, 1) == torch.device("cuda", 0)
    assert not any(name in os.environ for name in NCCL)


def test_heap_sharing_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="no GPU"):
        testing.set_device(0, 1)


@pytest.mark.parametrize("value, allowed", [("1", True), ("0", False), (None, False)])
def test_heap_sharing_is_allowed_by_a_variable(monkeypatch, value, allowed):
    monkeypatch.delenv("EPMOE_SHARE_GPU", raising=False)
    if value is not None:
        monkeypatch.setenv("EPMOE_SHARE_GPU", value)
    assert testing.shares_gpu() == allowed


def test_heap_sharing_is_allowed_by_share_gpus(one_gpu):
    """share_gpus, a helper of the tests, sets the variable if there are more ranks than GPUs."""
    share_gpus(1)
    assert "EPMOE_SHARE_GPU" not in os.environ
    share_gpus(2)
    assert os.environ["EPMOE_SHARE_GPU"] == "1"


@pytest.mark.parametrize("missing", list(testing.SIDE_BY_SIDE))
def test_heap_sharing_threads_need_their_settings(monkeypatch, missing):
    for name, value in testing.SIDE_BY_SIDE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(RuntimeError, match=missing):
        testing.run_threads(lambda world: None, 2, device="cuda:0")


def share_a_gpu(ranks):
    """Whether several processes of a torchrun run on one GPU."""
    return ranks.is_torchrun and ranks.size() > torch.cuda.device_count()


@pytest.mark.cuda_only
@pytest.mark.parametrize("without", ["all", "last"])
def test_heap_sharing_is_refused_by_default(ranks, monkeypatch, without):
    """All ranks raise an error that says what to do. Afterwards the world can be used."""
    if not share_a_gpu(ranks):
        pytest.skip("needs more ranks than GPUs")

    def run(world, device):
        if without == "all" or world.rank == world.size - 1:
            monkeypatch.delenv("EPMOE_SHARE_GPU")
        refused = outcome(lambda: epmoe.SymmetricHeap(world, 1 << 20, device))
        monkeypatch.setenv("EPMOE_SHARE_GPU", "1")
        with epmoe.SymmetricHeap(world, 1 << 20, device) as heap:
            heap.barrier()
            heap.synchronize()
        return refused

    first = 0 if without == "all" else ranks.size() - 1
    check_outcomes(ranks(run, at_least=2), "ValueError", f"rank {first} shares its GPU", "EPMOE_SHARE_GPU=1",
                   "set_device")


@pytest.mark.cuda_only
def test_heap_sharing_setting_must_be_0_or_1(ranks, monkeypatch):
    def run(world, device):
        monkeypatch.setenv("EPMOE_SHARE_GPU", "yes")
        return outcome(lambda: epmoe.SymmetricHeap(world, 1 << 20, device))

    check_outcomes(ranks(run), "ValueError", "EPMOE_SHARE_GPU=yes", "must be 0 or 1")


@pytest.mark.cuda_only
def test_heap_sharing_counts_the_memory_of_all_ranks(ranks):
    """Each heap alone fits, but not all together."""
    if not share_a_gpu(ranks):
        pytest.skip("needs more ranks than GPUs")

    def run(world, device):
        free = torch.cuda.mem_get_info(device)[0]
        world.exchange(b"x")
        num_bytes = int.from_bytes(min(world.exchange(int(free * 0.8).to_bytes(8, "big"))), "big")
        return outcome(lambda: epmoe.SymmetricHeap(world, num_bytes, device))

    check_outcomes(ranks(run, at_least=2), "HeapExhausted", "no room for", "needed", "available")


@pytest.mark.cuda_only
def test_heap_sharing_threads_need_separate_streams(ranks):
    """On the default stream the kernel of one rank would wait for that of the next rank: a deadlock. All
    ranks raise an error instead.
    """
    if ranks.is_torchrun:
        pytest.skip("needs ranks that are threads: EPMOE_TEST_THREADS=cuda pytest")

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 20, device)
        with torch.cuda.stream(torch.cuda.default_stream(device)):
            return outcome(heap.barrier)

    check_outcomes(ranks(run, world_size=2), "ValueError", "default stream")
