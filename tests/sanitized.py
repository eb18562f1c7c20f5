"""What compute-sanitizer looks at: two ranks on one GPU.

    compute-sanitizer [--tool racecheck] --target-processes all torchrun --nproc-per-node 2 tests/sanitized.py
    move|fused

move: plan, dispatch and each form of combine, checked against the oracle.  fused: the two megakernels,
compared with the
separate stages.  The ranks are processes.  In one process, memcheck did not get past the first operation of
two ranks that wait for each other (H200, CUDA 13.0).
"""

import argparse

import torch
import torch.distributed as dist

from cases import MODES, Case, check_case, make_layer, poison_memory, run_routing
from soak import RANK, torchrun_world
from soak_fused import run_batch

PARTS = ("move", "fused")


def move(world, device):
    """One routing through a layer of each form of combine; rank 0 checks what all ranks got."""
    for mode in MODES:
        case = Case(num_local=3, topk=3, hidden=136, max_tokens=40, tokens="unequal", pattern="sentinels",
                    mode=mode, seed=5)
        layer = make_layer(world, device, case)
        mine = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name,
                t in run_routing(layer, case).items()}
        results = [None] * world.size
        dist.all_gather_object(results, mine)
        if world.rank == 0:
            check_case(results, case)
        layer.finalize()


def fused(world, device):
    """Two batches of soak_fused, without graphs."""
    wrong = sum(run_batch(world, device, 0, number, 3, graph=False) for number in (0, 1))
    assert not wrong, f"{wrong} launches of rank {world.rank} had a wrong result"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("part", choices=PARTS)
    part = p.parse_args().part
    with torchrun_world() as (world, device):
        poison_memory()
        {"move": move, "fused": fused}[part](world, device)
        world.exchange(b"x")
        if RANK == 0:
            print(f"sanitized: {part} on {world.size} ranks: right", flush=True)


if __name__ == "__main__":
    main()
