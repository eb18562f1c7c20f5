"""Prints traffic and time of a layer over several nodes, computed from rates (epmoe/moe/cost_model.py).

Nothing is measured here, and no rank is started. Replace the default rates by those of your machines.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

from epmoe.moe import cost_model
from epmoe.moe.cost_model import SAVINGS, Rates, predict

from .shapes import SHAPES


def _amount(text):
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 and finite")
    return value


def _count(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number")
    return int(text)


def _counts(text):
    return [_count(n) for n in text.split(",")]


def add_arguments(parser):
    add = parser.add_argument
    assumptions = cost_model.__doc__.partition("\n\n")[2]
    parser.description = f"{__doc__}\n{assumptions}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add("--shape", choices=SHAPES, default="dsv3", help="default: dsv3")
    add("--tokens", type=_count, metavar="T", help="tokens of a rank; default: those of the shape")
    add("--nodes", type=_counts, metavar="N,N,...", default=[2, 4, 8, 16, 32, 64],
        help="default: 2,4,8,16,32,64")
    add("--local-ranks", type=_count, metavar="L", default=8, help="ranks of a node; default: 8")
    add("--node-limit", type=_count, metavar="M", default=4,
        help="nodes of a token under group-limited routing; default: 4, as DeepSeek-V3")
    add("--home-bytes", type=int, choices=(2, 4), default=2,
        help="bytes of an element on the way home: 2, or 4 for rail_dtype=float32; default: 2")
    add("--rail-gbps", type=_amount, default=45.0,
        help="GB/s of a rank's network card, each way; default: 45, what NCCL reaches on 400 Gb/s")
    add("--rail-us", type=_amount, default=60.0,
        help="microseconds of a call on the rail beyond its bytes; default: 60, an estimate")
    add("--link-gbps", type=_amount, default=290.0,
        help="GB/s of a rank's links in its node; default: 290, dispatch on 4 x H200")
    add("--gemm-tflops", type=_amount, default=583.0,
        help="TFLOP/s of a rank in a fused layer, with half-full tiles; default: 583, dsv3 on 4 x H200 (549 "
             "without those tiles: docs/performance.md)")
    add("--memory-gbps", type=_amount, default=4000.0,
        help="GB/s of a rank's memory; default: 4000, of 4800 of an H200")
    add("--launch-us", type=_amount, default=15.0,
        help="microseconds of each kernel of the team beyond its work; default: 15, an estimate")
    add("--team-ms", type=_amount,
        help="measured milliseconds of the forward of one node, instead of --gemm-tflops and --link-gbps")
    add("--json", metavar="FILE", help="write all figures to FILE")


def _rates(options):
    return Rates(options.rail_gbps * 1e9, options.link_gbps * 1e9, options.gemm_tflops * 1e12,
                 options.memory_gbps * 1e9, options.rail_us * 1e-6, options.launch_us * 1e-6)


def _limited(options):
    return f"at most {options.node_limit} nodes"


def variants(options, shape, nodes):
    """Return {(routing, saving): (forward, backward)} for one number of nodes."""
    team_s = None if options.team_ms is None else options.team_ms * 1e-3
    return {(routing, saving): tuple(predict(shape, nodes, options.local_ranks, _rates(options), saving,
                                             limit, options.home_bytes, backward, team_s)
                                     for backward in (False, True))
            for routing, limit in (("uniform", None), (_limited(options), options.node_limit))
            for saving in SAVINGS}


def table(options, shape, found):
    """Return the lines of the two tables: traffic, and time."""
    limited = _limited(options)
    names = (("uniform", "choice"), ("uniform", "rank"), ("uniform", "node"), (limited, "node"))
    lines = ["rows of a token that leave its node, and GB that a rank sends in a forward (out and home)",
             "",
             f"       | a row a choice | a row a rank   | a row a node   | {limited:14} | fixed",
             "nodes  |  rows      GB  |  rows      GB  |  rows      GB  |  rows      GB  |  rows"]
    for nodes, variant in found.items():
        cells = [f"{f.rows:6.2f} {(f.out_bytes + f.home_bytes) / 1e9:7.3f} " for f, _ in
                 (variant[n] for n in names)]
        lines.append(f"{nodes:5}  | " + " | ".join(cells) + f" | {nodes - 1:5}")
    lines += ["", "milliseconds of a layer on a rank", "",
              "       | a row a node: forward                    | training step, forward + backward",
              f"nodes  |  out    team   home  serial   best (C)  | a choice   a node   {limited}"]
    for nodes, variant in found.items():
        f, _ = variant["uniform", "node"]
        parts = " ".join(f"{1e3 * s:6.2f}" for s in (f.out_s, f.team_s, f.home_s, f.serial_s))
        steps = [1e3 * sum(p.pipelined_s for p in variant[n]) for n in (names[0], names[2], names[3])]
        lines.append(f"{nodes:5}  | {parts}  {1e3 * f.pipelined_s:6.2f} ({f.chunks})  |"
                     f" {steps[0]:7.2f}  {steps[1]:7.2f}   {steps[2]:7.2f}")
    return lines


def _records(found):
    return [{"nodes": nodes, "routing": routing, "saving": saving,
             "pass": name, **dataclasses.asdict(p)}
            for nodes, variant in found.items() for (routing, saving), pair in variant.items()
            for name, p in zip(("forward", "backward"), pair)]


def main(options):
    """Print the tables and write --json. Return 0, or a text that says what is wrong."""
    shape = SHAPES[options.shape]
    try:
        if options.tokens:
            shape = shape.with_tokens(options.tokens)
        skipped = [n for n in options.nodes if shape.experts % n]
        found = {n: variants(options, shape, n) for n in options.nodes if n not in skipped}
    except ValueError as error:
        return str(error)
    r = _rates(options)
    team = f"{options.team_ms:g} ms measured" if options.team_ms else f"{r.gemm / 1e12:g} TFLOP/s"
    lines = [f"{shape.name}: T {shape.tokens} a rank, H {shape.hidden}, I {shape.inner}, E {shape.experts}, "
             f"K {shape.topk}; {options.local_ranks} ranks a node; computed, not measured",
             f"rail {r.rail / 1e9:g} GB/s and {r.rail_latency * 1e6:g} us a call; "
             f"links {r.link / 1e9:g} GB/s; team {team} and {r.launch * 1e6:g} us a kernel", ""]
    lines += table(options, shape, found)
    lines += ["", "fixed: rows that a rail_capacity sends which never overflows. best (C): the least time,",
              "and its number of chunks. serial: out, team and home one after the other."]
    lines += [f"skipped: {n} nodes, because {shape.experts} experts are not a multiple" for n in skipped]
    print("\n".join(lines))
    if options.json:
        head = {"shape": dataclasses.asdict(shape), "local_ranks": options.local_ranks,
                "node_limit": options.node_limit, "home_bytes": options.home_bytes,
                "team_ms": options.team_ms, "rates": dataclasses.asdict(r)}
        Path(options.json).write_text(json.dumps({**head, "rows": _records(found)}, indent=1) + "\n")
        print(f"\nwrote {options.json}")
    return 0
