"""Random routings through layers over several nodes, compared bit by bit with the oracle.

    python tests/fuzz_nodes.py --cases 20000 --seed 1
    python tests/fuzz_nodes.py --seed 1 --batch 17       repeats one batch; a failure prints this command

A batch is one layer over 2 to 4 nodes of 1 to 4 ranks, which are threads, and several routings through it,
forward and backward. Some layers have fixed sizes, of as many rows as are used, or of more. Everything in a
batch follows from the seed and its number.
"""

import argparse
import gc
import random
import sys
import time

import torch

from cases import DTYPES, MODES, Case, keep, poison_memory
from epmoe.testing import PATTERNS
from nodes_cases import check_one, layer_of, most_of, run_nodes, run_one

ROUTINGS = 5  # through the layer of a batch


def make_batch(seed, number):
    """Return the nodes, the ranks of a node, the cases and the capacities of a batch."""
    r = random.Random(seed * 1000003 + number)
    num_nodes, num_local = r.choice((2, 2, 3, 4)), r.choice((1, 2, 2, 4))
    layer = {"num_local": r.choice((1, 2, 3)), "topk": r.choice((1, 2, 3, 8)), "dtype": r.choice(DTYPES),
             "hidden": r.choice((8, 16, 40)), "max_tokens": r.choice((1, 3, 8, 20)), "mode": r.choice(MODES)}
    tokens = ("full", "unequal", "unequal", "first_none", "only_last", "none")
    cases = [Case(**layer, pattern=r.choice(PATTERNS), tokens=r.choice(tokens), seed=r.randrange(1 << 30),
                  index_dtype=r.choice((torch.int32, torch.int64))) for _ in range(ROUTINGS)]
    return num_nodes, num_local, cases, sizes_of(r, cases, num_nodes, num_local)


def sizes_of(r, cases, num_nodes, num_local):
    """The capacities of the layer: none, as many as the cases need, or more."""
    more = r.choice((None, 0, 0, 3))
    if more is None:
        return {}
    sent, rows = (max(1, *numbers) for numbers in zip(*(most_of(c, num_nodes, num_local) for c in cases)))
    return {"rail_capacity": sent + more, "capacity": rows + more}


def run_batch(seed, number):
    num_nodes, num_local, cases, sizes = make_batch(seed, number)

    def main(nodes):
        layer = layer_of(nodes, cases[0], **sizes)
        keep(nodes.team, layer)
        return [run_one(layer, case) for case in cases]

    try:
        results = run_nodes(main, num_nodes, num_local)
        for i, case in enumerate(cases):
            check_one([r[i] for r in results], case, num_nodes)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{num_nodes} nodes of {num_local} ranks, {sizes}; repeat it with: "
                             f"python tests/fuzz_nodes.py --seed {seed} --batch {number}") from error
    return len(cases)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", type=int, default=1000, help="routings (default 1000)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--batch", type=int, help="only this batch")
    p.add_argument("--first", type=int, default=0, help="begin with this batch (default 0)")
    args = p.parse_args()
    torch.set_num_threads(1)
    poison_memory()
    if args.batch is not None:
        run_batch(args.seed, args.batch)
        return "no difference"
    done, number, start = 0, args.first, time.monotonic()
    while done < args.cases:
        done += run_batch(args.seed, number)
        number += 1
        if number % 10 == 0:
            gc.collect()  # worlds and layers refer to each other, and a process has at most 256 worlds
        if number % 50 == 0:
            print(f"{done} routings, {time.monotonic() - start:.0f} s", flush=True)
    return f"{done} routings in {time.monotonic() - start:.0f} s: no difference"


if __name__ == "__main__":
    print(main())
    sys.exit(0)
