"""Models that transformers shards with ep_implementation="epmoe", and the same models in one process.

Each of compare, train and compiled runs on every rank and returns differences. The tests call them for some
families and numbers of ranks (test_integrations_transformers_ep.py). This file as a program calls each of
them for each family with 2 and with 4 ranks, prints a table, and exits with 1 if a difference is too large:

    PYTHONPATH=.:tests python tests/transformers_ranks.py --ranks 4 --jobs train
"""

import argparse
import functools
import logging
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import epmoe.integrations.transformers  # noqa: F401  it registers ep_implementation="epmoe"
from cases import process_ranks
from transformers_cases import SPREAD, kind_of, make, step, tokens

LARGEST = 2e-6  # difference of a logit, a gradient or a parameter in float32


def sharded(folder, family, **grid):
    config = DistributedConfig(**grid, ep_implementation="epmoe")
    load = kind_of(family).from_pretrained
    return load(f"{folder}/{family}", dtype=torch.float32, distributed_config=config).eval()


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def mean_step(model, batches, forward=None):
    """Return the logits of each batch, and the mean gradients: what data-parallel ranks must compute."""
    results = [step(model, ids, forward) for ids in batches]
    return [r[0] for r in results], {n: sum(g[n] for _, g in results) / len(results) for n in results[0][1]}


def batches_of(num_batches):
    return [tokens(2, 5 + b, seed=b) for b in range(num_batches)]


def difference(got, want):
    return (whole(got) - want).abs().max().item()


def largest_difference(got, want):
    """Return (the largest difference, its name). Names must be the same."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    return max((difference(got[n], want[n]), n) for n in want)


# ---- what the ranks do ----


def compare(rank, num_ranks, folder, family, grid=None):
    """Return the differences of logits and gradients from the unmodified model."""
    grid = grid or dict(fsdp_size=num_ranks, ep_size=num_ranks)
    batch = rank // grid.get("tp_size", 1)
    batches = batches_of(num_ranks // grid.get("tp_size", 1))
    want_logits, want = mean_step(make(family), batches)
    logits, got = step(sharded(folder, family, **grid), batches[batch])
    return difference(logits, want_logits[batch]), *largest_difference(got, want)


def train(rank, num_ranks, folder, family):
    """Train with checkpointing, save, and load in one process: (differences of parameters, of logits)."""
    batches, model = batches_of(num_ranks), sharded(folder, family, fsdp_size=num_ranks, ep_size=num_ranks)
    reference = make(family)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4) for m in (model, reference)]
    for _ in range(3):
        _, grads = mean_step(reference, batches)
        for name, p in reference.named_parameters():
            p.grad = grads.get(name)
        step(model, batches[rank])
        for optimizer in optimizers:
            optimizer.step()
    trained, want = dict(model.named_parameters()), dict(reference.named_parameters())
    worst = largest_difference(trained, want)
    moved = min((want[n] - p).abs().max().item() for n, p in make(family).named_parameters()
                if n.endswith(("gate_up_proj", "up_proj.weight")) or "experts.up_proj" in n)
    model.save_pretrained(f"{folder}/trained_{family}")
    dist.barrier()
    again = kind_of(family).from_pretrained(f"{folder}/trained_{family}", dtype=torch.float32)
    saved = largest_difference(trained, dict(again.named_parameters()))
    return worst, moved, saved


def compiled(rank, num_ranks, folder, family, dynamic=False):
    """Differences of a compiled model; dynamic: with dynamic sizes, and also of a call with more tokens."""
    model = sharded(folder, family, fsdp_size=num_ranks, ep_size=num_ranks)
    forward = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    found = []
    for more in (0, 3) if dynamic else (0,):
        batches = [tokens(2, 5 + b + more, seed=b) for b in range(num_ranks)]
        want_logits, want = mean_step(make(family), batches)
        logits, got = step(model, batches[rank], forward)
        found.append((difference(logits, want_logits[rank]), *largest_difference(got, want)))
    return found


# ---- all of them ----


def check(family, job, result):
    """Return the largest difference that a rank found. Raise AssertionError if it is too large."""
    assert not isinstance(result, str), result
    if job == "train":
        (trained, name), moved, (saved, _) = result
        assert trained <= LARGEST and moved > 1e-3, (family, trained, name, moved)
        assert saved == 0, (family, saved)
        return trained
    calls = [result] if job == "compare" else result
    for logits, grads, name in calls:
        assert logits <= LARGEST and grads <= LARGEST, (family, logits, grads, name)
    return max(max(call[:2]) for call in calls)


JOBS = {"compare": compare, "train": train, "compiled": compiled,
        "dynamic": functools.partial(compiled, dynamic=True)}


def run_all(rank, num_ranks, folder, families, jobs):
    """Rank main: {(family, job): the result, or a traceback}."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    results = {}
    for family in families:
        for job in jobs:
            try:
                results[family, job] = JOBS[job](rank, num_ranks, folder, family)
            except Exception:
                results[family, job] = traceback.format_exc()
            if rank == 0:
                print(num_ranks, family, job, results[family, job], file=sys.stderr, flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--families", nargs="+", default=SPREAD)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    args = parser.parse_args()
    errors = []
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            for family in args.families:
                make(family).save_pretrained(f"{folder}/{family}")
            results = process_ranks(run_all, num_ranks, folder, args.families, args.jobs, timeout_s=7200)
        for family, job in results[0]:
            try:
                worst = max(check(family, job, of_rank[family, job]) for of_rank in results)
                print(f"{num_ranks} ranks  {family:20} {job:10} {worst:.1e}", flush=True)
            except AssertionError as error:
                errors.append(f"{num_ranks} ranks, {family}, {job}: {error}")
                print(f"{num_ranks} ranks  {family:20} {job:10} FAILED", flush=True)
    print("\n".join(errors) or "all equal")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
