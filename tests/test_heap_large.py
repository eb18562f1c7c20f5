"""Sizes past 2^31 elements and 2^32 bytes: no offset is computed in 32 bits."""

import re

import pytest
import torch

import epmoe
from cases import check_outcomes, outcome, same_bits
from epmoe import _C
from epmoe.a2a.base import Config

MAX_I32 = 2**31


def config(**changes):
    fields = Config(ranks=8, num_experts=256, topk=8, max_tokens=32768, hidden=7168, dtype=_C.BF16,
                    combine_mode=_C.COMBINE_SCATTER, expert_alignment=1, expert_capacity=0,
                    capacity=8 * 32768 * 8, num_buffers=1, num_sm=1, reserve_sms=0, host_counts=0,
                    spare_buffers=0)
    return fields._replace(**changes)


def available_bytes():
    """The memory of this machine that processes can still allocate."""
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))


@pytest.mark.parametrize("mode", ["COMBINE_LOCAL", "COMBINE_SCATTER", "COMBINE_GATHER"])
def test_heap_layer_bytes_past_4_gib(mode):
    """A communication buffer is a little larger than its staging rows, here 3.8 GB to 30 GB."""
    got = _C.layer_bytes(config(combine_mode=getattr(_C, mode)))
    row = 2 * 7168
    staging = {"COMBINE_LOCAL": 8 * 32768, "COMBINE_SCATTER": max(8 * 32768, 32768 * 8),
               "COMBINE_GATHER": 8 * 32768 * 8}[mode] * row
    assert staging <= got <= staging * 1.05 + (64 << 20)


def test_heap_layer_bytes_grow_by_whole_rows():
    """One more token needs one more staging row for each source rank, below and above 2^32 bytes."""
    sizes = [_C.layer_bytes(config(max_tokens=t, combine_mode=_C.COMBINE_LOCAL, topk=2,
                                   capacity=8 * 40000 * 2))
             for t in range(36000, 40000, 400)]
    steps = {b - a for a, b in zip(sizes, sizes[1:])}
    assert sizes[0] < 2**32 < sizes[-1]
    slot = (2 * 7168 + 8 + 16 + 127) // 128 * 128
    assert max(steps) - min(steps) <= 4096 and abs(max(steps) - 8 * 400 * slot) < 1 << 17


def test_heap_layer_bytes_of_buffers_add_up():
    one = _C.layer_bytes(config())
    assert _C.layer_bytes(config(num_buffers=16)) == 16 * one > 2**35


def test_heap_plan_layout_past_2_31_words():
    """One rank has almost 2^31 choices (T * K). Offsets of the plan's parts do not overflow or overlap."""
    tokens = MAX_I32 // 32 // 2 - 1
    at = _C.plan_layout(config(ranks=2, num_experts=2, topk=32, max_tokens=tokens, capacity=MAX_I32 - 1),
                        tokens)
    sizes = {"counts": 4, "expert_row": 2, "token_expert": tokens * 32, "token_row": tokens * 32,
             "token_slot": tokens * 2, "sort": tokens * 32, "send_token": tokens * 2,
             "tile_expert": at["max_tiles"], "tile_row": at["max_tiles"]}
    parts = sorted((at[name], name) for name in sizes)
    for (a, name), (b, _) in zip(parts, parts[1:]):
        assert a + sizes[name] <= b, name
    assert parts[-1][0] + sizes[parts[-1][1]] <= at["num_words"] and at["num_words"] > MAX_I32


@pytest.mark.parametrize("changes", [{"max_tokens": 33_554_432}, {"topk": 32, "max_tokens": 8_388_608},
                                     {"capacity": MAX_I32}, {"max_tokens": 2**32 - 1}])
def test_heap_layer_sizes_past_2_31_are_refused(changes):
    with pytest.raises(ValueError, match=r"2\^31"):
        _C.layer_bytes(config(**changes))


@pytest.mark.cpu_only
@pytest.mark.parametrize("how_much", ["all of it", "far more"])
def test_heap_larger_than_the_machine_is_refused(ranks, how_much):
    """With "all of it" each rank's heap alone fits, but not all together. No rank allocates memory, no
    process is killed, and the world can be used afterwards.
    """
    num_bytes = available_bytes() * 6 // 10 if how_much == "all of it" else 1 << 45

    def body(world, device):
        got = outcome(lambda: epmoe.SymmetricHeap(world, num_bytes, "cpu"))
        heap = epmoe.SymmetricHeap(world, 1 << 16, "cpu")
        heap.barrier()
        heap.close()
        return got

    own_bytes = 64 << 10  # more than what a heap adds for itself
    results = ranks(body, world_size=2)
    check_outcomes(results, "HeapExhausted", "no room for 2 heaps of ", "needed ", "available ", within_s=1)
    for got in results:
        needed, room = (int(n) for n in re.search(r"needed (\d+), available (\d+)", got.text).groups())
        assert 2 * num_bytes < needed < 2 * (num_bytes + own_bytes) and room < needed, got.text


def free_bytes(device):
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


@pytest.mark.long
def test_heap_tensors_past_4_gib(ranks):
    """A tensor has more than 2^31 elements, and the next one has an offset past 2^32. put and peer_view reach
    the right bytes of both.
    """
    free = min(ranks(lambda world, device: free_bytes(device), world_size=1))
    if free < 12 << 30:
        pytest.skip("needs 12 GiB of free memory for each rank")

    def run(world, device):
        heap = epmoe.SymmetricHeap(world, (2**31 + 2**27 + 2**26) * 2, device)
        big = heap.malloc_symmetric((2**31 + 2**27,), torch.int16)
        after = heap.malloc_symmetric((1000,), torch.int32)
        peer = (world.rank + 1) % world.size
        assert heap.offset(after) > 2**32
        distance = heap.translate(after, peer) - heap.translate(big, peer)
        assert distance == heap.offset(after) - heap.offset(big)
        heap.put(after, torch.arange(1000, dtype=torch.int32, device=device), peer)
        heap.peer_view(big, peer)[-5:] = 7
        heap.peer_view(big, peer)[2**31 + 3] = 9
        heap.barrier()
        got = after.clone(), big[-6:].clone(), big[2**31 + 2 : 2**31 + 5].clone(), big[:3].clone()
        heap.barrier()
        heap.close()
        return got

    for after, end, middle, start in ranks(run, world_size=1):  # under torchrun: all of its ranks
        same_bits(after, torch.arange(1000, dtype=torch.int32), "the tensor past 4 GiB")
        assert end.tolist() == [0, 7, 7, 7, 7, 7]
        assert middle.tolist() == [0, 9, 0]
        assert start.tolist() == [0, 0, 0]
