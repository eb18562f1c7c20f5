"""What compute-sanitizer looks at: `compute-sanitizer [--tool racecheck] python tests/sanitized.py`.

Two ranks, as threads side by side on one GPU, so that the sanitizer sees the kernels of both: plan, dispatch, each form of
combine, and the two megakernels, eagerly and checked against the oracle.  One rank does everything first.  That loads every
kernel before ranks wait for each other: loading all of torch's kernels in advance takes minutes under the sanitizer.
"""

import argparse
import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")

import torch

from cases import MODES, Case, check_case, keep, make_layer, poison_memory, run_routing
from epmoe.testing import run_threads
from soak_fused import run_batch

LIMIT_S = 500
PARTS = ("move", "fused")


def move(world):
    """One routing through a layer of each form of combine; results of this rank, for check_case."""
    device, results = torch.device("cuda", 0), {}
    for mode in MODES:
        case = Case(num_local=3, topk=3, hidden=136, max_tokens=40, tokens="unequal", pattern="sentinels", mode=mode, seed=5)
        layer = make_layer(world, device, case)
        keep(world, layer)
        results[case] = {name: t.cpu() if isinstance(t, torch.Tensor) else t for name, t in run_routing(layer, case).items()}
    return results


def fused(world):
    """Two batches of soak_fused, without graphs; launches whose result was wrong."""
    return sum(run_batch(world, torch.device("cuda", 0), 0, number, 3, graph=False) for number in (0, 1))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("part", choices=PARTS)
    p.add_argument("--ranks", type=int, default=2)
    a = p.parse_args()
    poison_memory()
    for num_ranks in (1, a.ranks):
        results = run_threads(globals()[a.part], num_ranks, timeout_s=LIMIT_S, device="cuda:0")
        if a.part == "fused":
            assert not any(results), f"launches with a wrong result, by rank: {results}"
        else:
            for case in results[0]:
                check_case([r[case] for r in results], case)
        print(f"sanitized: {a.part} on {num_ranks} ranks: right", flush=True)


if __name__ == "__main__":
    main()
