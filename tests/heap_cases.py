"""Heaps for tests."""

import torch

import epmoe
from cases import keep

KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
         torch.int64, torch.uint8)


def make_heap(world, device, num_bytes=1 << 20):
    heap = epmoe.SymmetricHeap(world, num_bytes, device)
    keep(world, heap)
    return heap
