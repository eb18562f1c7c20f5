"""Measures epmoe and its peers.

Under torchrun, a rank for each GPU:  torchrun --nproc-per-node 4 -m benchmarks all --json FILE
Without torchrun it starts ranks:     python -m benchmarks   (one for each GPU, at most 8; four on the CPU)
The tables and the plots:             python -m benchmarks report benchmarks/results/h200x4.json

On a machine without a GPU the shapes are small, and the figures say nothing about GPUs.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import epmoe
from epmoe.testing import SIDE_BY_SIDE, run_ranks, set_device

from . import (a2a, ablation, decode, decode_w4, features, gemm, gemm_fp8, growth, host, layer, layer_fp8,
               layer_w4, lora, move, nodes, numerics, overlap, replicas, report, scale, side, sm, tokens,
               train, transformers, worklog)
from .run import Run
from .shapes import KNOWN_SHAPES

BENCHES = {
    "a2a": (a2a, "plan, dispatch and combine for every shape, compared with the peers (default)"),
    "sm": (sm, "dispatch and combine by number of thread blocks that move tokens"),
    "tokens": (tokens, "plan, dispatch and combine by T, the tokens of a rank"),
    "layer": (layer, "a whole layer, fused and unfused, compared with the peers and with its GEMMs alone"),
    "growth": (growth, "a whole layer by T, the tokens of a rank"),
    "ablation": (ablation, "the effect of each option of the fused kernels"),
    "gemm": (gemm, "the grouped GEMMs of one rank of four, compared with torch's"),
    "overlap": (overlap, "what the warps of the fused kernels do, and when; needs a build with the profiler"),
    "features": (features, "the effect of token saving, sorting and pre-reduction"),
    "nodes": (nodes, "dispatch and combine over several nodes: the ranks of this machine, cut into nodes"),
    "host": (host, "host overhead per call, in microseconds"),
    "decode": (decode, "low-latency dispatch and combine by T, their halves, and a decode layer"),
    "train": (train, "a training step: forward, backward, memory, compared with torch's layer and products"),
    "lora": (lora, "LoRA: a training step, several adapters, decoding, beside full training, torch and peft"),
    "numerics": (numerics, "what rank_invariant costs: a training step, the forward, decode layers"),
    "move": (move, "calls while experts move to other places: their times, and the longest of them"),
    "replicas": (replicas, "skewed routings with and without replicas of hot experts: decoding, forwards"),
    "transformers": (transformers, "experts of transformers in one process, by each experts_implementation"),
    "worklog": (worklog, "dispatch, y = x * (1 + rank), combine: a known problem, beside plain PyTorch"),
    "side": (side, "the cost of the protocol: ranks side by side on one GPU, flags through the L2"),
}
OF_FP8 = {"gemm": gemm_fp8, "layer": layer_fp8, "train": train}  # what --fp8 measures in their place
OF_W4 = {"layer": (layer_w4, "a whole layer with experts of 4 bits, beside 16 bits and FP8"),  # and --w4
         "decode": (decode_w4, "a decode layer with experts of 4 bits by T, beside 16 bits, FP8 and "
                               "transformers")}
# These start no ranks.
COMPUTES = {"report": report.main, "scale": scale.main}


def positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number")
    return int(text)


def numbers(text):
    return [positive(n) for n in text.split(",")]


def skews(text):
    """Return numbers of at least 1, each once."""
    try:
        found = [float(n) for n in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= n < float("inf") for n in found):
        raise argparse.ArgumentTypeError(f"{text}: must be numbers of at least 1: the rows of the fullest "
                                         f"rank over the mean")
    return list(dict.fromkeys(found))


def new_file(text):
    """Check before the measurements that the file can be written."""
    if not os.access(Path(text).absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot write to its folder")
    return text


def names(text):
    unknown = [n for n in text.split(",") if n not in KNOWN_SHAPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be one of {', '.join(KNOWN_SHAPES)}")
    return text.split(",")


def parse(argv):
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="bench", metavar="BENCH")
    for name, text in {**{n: t for n, (_, t) in BENCHES.items()}, "all": "all of these"}.items():
        s = sub.add_parser(name, help=text, description=text)
        s.add_argument("--shapes", type=names, metavar="A,B,...",
                       help=f"of {', '.join(KNOWN_SHAPES)}; default: those of the bench")
        s.add_argument("--num-sm", type=numbers, metavar="N",
                       help="thread blocks that move tokens; sm: N,N,..., those to measure; not for gemm, "
                            "transformers")
        s.add_argument("--tokens", type=numbers, metavar="T,T,...",
                       help="decode: the numbers of tokens of a rank to measure")
        s.add_argument("--skew", type=skews, metavar="S,S,...",
                       help="a2a, layer, train, decode, replicas: measure also routings whose fullest rank "
                            "has S times the mean number of rows, and their time over that of the uniform "
                            "routing; default of replicas: 1.5,2,3")
        s.add_argument("--balance", type=positive, nargs="?", const=epmoe.Balance().slots, metavar="SLOTS",
                       help="train: also EPMoE with balance, with so many helper slots (default: "
                            f"{epmoe.Balance().slots}); with --skew it shows what the help brings")
        s.add_argument("--local-ranks", type=positive, metavar="L",
                       help="nodes: the ranks of a node (default: half of the ranks)")
        s.add_argument("--fp8", action="store_true",
                       help="gemm, layer, train: those of FP8, beside 16 bits, with their errors")
        s.add_argument("--w4", action="store_true",
                       help="layer, decode: those with experts in MXFP4 and INT4, beside 16 bits and FP8")
        s.add_argument("--iters", type=positive,
                       help="runs; the median counts (default: 30, on the CPU 10; gemm: rounds, 6 and 3)")
        s.add_argument("--json", type=new_file, metavar="FILE", 
                       help="write all figures to FILE (rank 0); a single bench adds its rows to those "
                            "that FILE has")
        s.add_argument("--trace", type=new_file, metavar="FILE",
                       help="overlap: write a trace of all ranks for Perfetto, and a plot (rank 0)")
        s.add_argument("--commit", help="commit to record with the figures; default: that of the checkout")
        s.add_argument("--ranks", type=positive, help="number of ranks to start without torchrun")
    report_help = "write the plots and the tables of the README, from a file of figures"
    report.add_arguments(sub.add_parser("report", help=report_help))
    scale_help = "traffic and time over several nodes, computed from rates; measures nothing"
    scale.add_arguments(sub.add_parser("scale", help=scale_help))
    known = (*sub.choices, "-h", "--help")
    options = p.parse_args(argv if argv and argv[0] in known else ["a2a", *argv])
    if options.bench in COMPUTES:
        return options
    if options.bench != "sm" and options.num_sm and len(options.num_sm) > 1:
        p.error("--num-sm: pass one number; only sm takes several")
    if options.bench in ("gemm", "transformers") and options.num_sm:
        p.error(f"--num-sm: leave it out for {options.bench}, which moves no tokens between ranks")
    if options.bench not in ("decode", "all") and options.tokens:
        p.error("--tokens: only decode takes it")
    if options.bench not in ("a2a", "layer", "train", "decode", "replicas", "all") and options.skew:
        p.error("--skew: only a2a, layer, train, decode and replicas take it")
    if options.bench not in ("train", "all") and options.balance:
        p.error("--balance: only train takes it")
    if options.w4 and options.skew:
        p.error("--skew: leave it out with --w4")
    if options.bench not in ("nodes", "all") and options.local_ranks:
        p.error("--local-ranks: only nodes takes it")
    if options.bench not in OF_FP8 and options.fp8:
        p.error("--fp8: only gemm, layer and train take it")
    if options.bench not in OF_W4 and options.w4:
        p.error("--w4: only layer and decode take it")
    if options.fp8 and options.w4:
        p.error("--w4: pass it without --fp8; it measures FP8, too")
    return options


def jobs_of(name, r):
    """Return the jobs of a bench, as (label, function)."""
    if r.options.w4:
        return OF_W4[name][0].jobs(r)
    return (OF_FP8[name] if r.options.fp8 else BENCHES[name][0]).jobs(r)


def run(options):
    """Run this rank's part and return the rows of the table.

    torch.distributed is initialized, or this is the only rank.
    """
    r = Run(options)
    r.introduce()
    benches = list(BENCHES) if options.bench == "all" else [options.bench]
    jobs = [(name, label, job) for name in benches for label, job in jobs_of(name, r)]
    with r.progress(len(jobs)) as progress:
        for name, label, job in jobs:
            progress.step(f"{name} {label}")
            if label == next(first for bench, first, _ in jobs if bench == name):
                r.title(name, (OF_W4 if options.w4 else BENCHES)[name][1])
            job()
            r.save()
    r.close()
    return r.rows


def use_cuda():
    from epmoe import _C

    return bool(_C.HAS_CUDA) and torch.cuda.is_available() and os.environ.get("EPMOE_BACKEND") != "cpu"


def started_rank(rank, world_size, argv):
    """Run one of the ranks that this program has started itself; run_ranks has given it its GPU."""
    run(parse(argv))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    if options.bench == "side":
        os.environ.update(SIDE_BY_SIDE)  # before anything uses CUDA
    backend = "cpu:gloo,cuda:nccl" if use_cuda() else "gloo"
    if options.bench in COMPUTES:
        return COMPUTES[options.bench](options)
    if "RANK" in os.environ:
        if use_cuda():
            set_device(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        dist.init_process_group(backend)
        run(options)
        dist.destroy_process_group()
        return 0
    try:
        num_ranks = options.ranks or (min(torch.cuda.device_count(), 8) if use_cuda() else 4)
        if options.bench in ("train", "lora") and num_ranks == 1:
            run(options)  # in this process, without a process group
            return 0
        run_ranks(started_rank, num_ranks, argv, backend=backend, timeout_s=3600)
    except AssertionError as error:  # its text has the tracebacks of the ranks
        return str(error)
    return 0

