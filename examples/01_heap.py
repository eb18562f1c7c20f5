"""The symmetric heap alone: memory that every rank can access on every other rank.

    python examples/01_heap.py
    torchrun --nproc-per-node 4 examples/01_heap.py

The ranks form a ring of W ranks.  In each of W steps, a rank puts the numbers that it has to its right
neighbour.  After W steps, each rank has received the numbers of all ranks, and has its own numbers again.
A rank waits only for its left neighbour.
"""

import torch
from _launch import launch

import epmoe


def main(rank, world_size, device):
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    with epmoe.SymmetricHeap(num_bytes=1 << 20, device=device) as heap:
        # All ranks make the same calls in the same order.  So each tensor has the same offset on all ranks.
        inbox = heap.malloc_symmetric((world_size, 4), torch.float32)
        arrived = heap.malloc_symmetric(1, torch.int64)
        if rank == 0:
            print(f"{world_size} ranks on {device.type}\n\nThe address of the inbox of each rank on rank 0")
            for peer in range(world_size):
                print(f"  rank {peer}  offset {heap.offset(inbox)}  address {heap.translate(inbox, peer):#x}")

        mine = torch.full((4,), float(rank), device=device)
        seen = []
        for step in range(world_size):
            # Each step writes its own row of the inbox, so nothing is overwritten before it is read.
            heap.put(inbox[step], mine, right)
            heap.signal(arrived, 0, step + 1, right)  # publishes the put
            heap.wait(arrived, 0, step + 1)  # after this, the put of the left neighbour is readable
            mine = inbox[step].clone()
            seen.append(mine)
        heap.synchronize()
        seen = [int(line[0]) for line in seen]
        assert seen == [(rank - 1 - step) % world_size for step in range(world_size)], seen

        # After a barrier all puts of all ranks are visible.  A peer's memory can be read as a tensor.
        heap.barrier()
        neighbour = heap.peer_view(inbox, left)
        order = [(left - 1 - step) % world_size for step in range(world_size)]
        want = torch.tensor(order, dtype=torch.float32, device=device)[:, None].expand(world_size, 4)
        assert torch.equal(neighbour, want), neighbour
        heap.barrier()  # no rank frees memory that another still reads

        if rank == 0:
            print(f"\nThe ring: rank 0 received the numbers of ranks {seen}")
            print(f"Read through a peer view: rank {left} received {neighbour[:, 0].int().tolist()}")
            print("\nThe heap, in bytes")
            for name, value in heap.stats().items():
                print(f"  {name:16}{value:>9}")
            print("ring: ok")


if __name__ == "__main__":
    launch(main)
