"""What python -m epmoe.bench does: plan, dispatch, combine and the unfused layer beside torch and its collectives.

Under torchrun, one rank a GPU:  torchrun --nproc-per-node 4 -m epmoe.bench --json benchmarks/h200x4.json
On a machine without a GPU:      python -m epmoe.bench        (four CPU ranks, small shapes)

GB/s are of bytes that really cross a link: rows to the own rank are not counted.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import epmoe
from epmoe.bench.measure import graphed, host_microseconds, timed
from epmoe.bench.shapes import SHAPES
from epmoe.bench.torch_nccl import TorchAllToAll


def parse(argv):
    p = argparse.ArgumentParser(prog="python -m epmoe.bench", description=__doc__.split("\n")[0])
    p.add_argument("bench", nargs="?", default="all", choices=("all", "stages", "sms", "tokens", "saving", "host"),
                   help="stages: every shape; sms: over num_sm; tokens: over T; saving: what token saving and pre-reduction bring")
    p.add_argument("--shape", action="append", choices=sorted(SHAPES), help="only this shape (may be given more than once)")
    p.add_argument("--num-sm", type=int, help="thread blocks that move tokens (default: the layer's)")
    p.add_argument("--iters", type=int, default=30)
    p.add_argument("--json", metavar="FILE", help="write all figures to FILE (rank 0)")
    return p.parse_args(argv)


class Run:
    """One process's part of a benchmark: its device, its inputs, its rows of the table."""

    def __init__(self, options):
        self.options = options
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = epmoe.heap.pick_device()
        self.world = epmoe.World.of(None)
        self.cpu_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rows = []

    def say(self, *text):
        if self.rank == 0:
            print(*text, flush=True)

    def shapes(self):
        for name in self.options.shape or SHAPES:
            shape = SHAPES[name] if self.device.type == "cuda" else SHAPES[name].small()
            if shape.experts % self.size == 0:
                yield shape

    def inputs(self, shape):
        g = torch.Generator(self.device).manual_seed(1000 + self.rank)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        idx = torch.rand(shape.tokens, shape.experts, device=self.device, generator=g).topk(shape.topk).indices
        x = torch.randn(shape.tokens, shape.hidden, device=self.device, generator=g).to(dtype)
        weight = torch.rand(shape.tokens, shape.topk, device=self.device, generator=g)
        return x, idx, weight / weight.sum(1, keepdim=True)

    def layer(self, shape, dtype, **options):
        options.setdefault("enable_local_combine", True)
        options.setdefault("num_sm", self.options.num_sm)
        return epmoe.EPAll2AllLayer(self.world, shape.tokens, shape.hidden, shape.topk, num_tot_experts=shape.experts, dtype=dtype,
                                    device=self.device, **options)

    def time(self, layer, fn):
        return timed(fn, layer.ep_barrier_all, self.device, self.cpu_group, self.options.iters)

    def record(self, bench, shape, impl, ms, wire_bytes=None, ratio=None, ratio_to=None, **more):
        row = {"bench": bench, "shape": shape.name, "tokens": shape.tokens, "impl": impl, "ms": round(ms, 5), **more}
        text = f"{bench:9s} {shape.name:16s} T {shape.tokens:6d}  {impl:26s} {ms:9.4f} ms"
        if wire_bytes:
            row["wire_gbps"] = round(wire_bytes / ms / 1e6, 1)
            text += f" {row['wire_gbps']:7.1f} GB/s"
        if ratio is not None:
            row["ratio"], row["ratio_to"] = round(ratio, 4), ratio_to
            text += f"   {ratio:6.3f} x {ratio_to}"
        self.rows.append(row)
        self.say(text)

    def wire_bytes(self, layout, x):
        """The most that any rank sends to others: distinct (token, rank) pairs, own rank left out."""
        sent = layout.send_tokens.tolist()
        t = torch.tensor([(sum(sent) - sent[self.rank]) * x.shape[1] * x.element_size()], dtype=torch.float64)
        if self.cpu_group:
            dist.all_reduce(t, dist.ReduceOp.MAX, group=self.cpu_group)
        return float(t)

    # ---- benches ----

    def stages(self, shape, bench="stages", peer=True):
        """plan, dispatch and combine, and torch's collectives doing the same."""
        x, idx, weight = self.inputs(shape)
        with self.layer(shape, x.dtype) as layer:
            rows, row_weight, layout = layer.dispatch(x, idx, weight)
            y = layer.combine(rows, layout, row_weight)
            wire = self.wire_bytes(layout, x)
            plan = self.time(layer, lambda: layer._plan(idx, None, 0))
            both = self.time(layer, lambda: layer.dispatch(x, idx, weight))
            cached = self.time(layer, lambda: layer.dispatch(x, weight=weight, layout=layout))
            combine = self.time(layer, lambda: layer.combine(rows, layout, row_weight))
            if self.device.type == "cuda":
                self.record(bench, shape, "plan, in a graph", graphed(lambda: layer._plan(idx, None, 0), self.device, self.cpu_group))
            self.record(bench, shape, "plan", plan)
            ratios = {}
            if peer:
                torch_layer = TorchAllToAll(shape.experts, self.size, self.device)
                their_rows, state = torch_layer.dispatch(x, idx)
                theirs = torch_layer.combine(their_rows, state, weight)
                error = (theirs.float() - y.float()).abs().max() / theirs.float().abs().max()
                if error > 0.05:
                    raise AssertionError(f"{shape.name}: torch and epmoe differ by {error:.3f}")
                ratios["dispatch"] = self.time(layer, lambda: torch_layer.dispatch(x, idx))
                ratios["combine"] = self.time(layer, lambda: torch_layer.combine(their_rows, state, weight))
                self.record(bench, shape, "torch dispatch", ratios["dispatch"])
                self.record(bench, shape, "torch combine", ratios["combine"])
                del their_rows, theirs, state
            to = {"ratio_to": "torch"} if peer else {}
            self.record(bench, shape, "epmoe plan + dispatch", both, wire, both / ratios["dispatch"] if peer else None, **to)
            self.record(bench, shape, "epmoe cached dispatch", cached, wire)
            self.record(bench, shape, "epmoe combine", combine, wire, combine / ratios["combine"] if peer else None, **to)
            layer.synchronize()

    def over_sms(self, shape):
        """The same with fewer and more SMs."""
        before = self.options.num_sm
        for num_sm in (16, 24, 32, 48, 64, 96, 128) if self.device.type == "cuda" else (1, 2):
            self.options.num_sm = num_sm
            x, idx, weight = self.inputs(shape)
            with self.layer(shape, x.dtype) as layer:
                rows, row_weight, layout = layer.dispatch(x, idx, weight)
                wire = self.wire_bytes(layout, x)
                dispatch = self.time(layer, lambda: layer.dispatch(x, weight=weight, layout=layout))
                combine = self.time(layer, lambda: layer.combine(rows, layout, row_weight))
                self.record("sms", shape, f"cached dispatch, {num_sm} SMs", dispatch, wire, num_sm=num_sm)
                self.record("sms", shape, f"combine, {num_sm} SMs", combine, wire, num_sm=num_sm)
                layer.synchronize()
        self.options.num_sm = before

    def saving(self, shape):
        """What pre-reduction at the expert's rank brings, and pulling instead of pushing."""
        x, idx, weight = self.inputs(shape)
        ms = {}
        for name, options in (("pre-reduced", {}), ("scatter", {"enable_local_combine": False}),
                              ("gather", {"enable_local_combine": False, "combine_mode": "gather"})):
            with self.layer(shape, x.dtype, **options) as layer:
                rows, row_weight, layout = layer.dispatch(x, idx, weight)
                ms[name] = self.time(layer, lambda: layer.combine(rows, layout, row_weight))
                layer.synchronize()
            self.record("saving", shape, f"combine, {name}", ms[name], ratio=ms[name] / ms["pre-reduced"], ratio_to="pre-reduced")

    def host(self, shape):
        """What a call costs the host, eager, fixed capacity."""
        x, idx, weight = self.inputs(shape)
        sync = torch.cuda.synchronize if self.device.type == "cuda" else (lambda: None)
        with self.layer(shape, x.dtype, capacity=self.size * shape.tokens * shape.topk, num_sm=8) as layer:
            rows, row_weight, layout = layer.dispatch(x, idx, weight)
            calls = {"preprocess": lambda: layer.preprocess(idx), "cached dispatch": lambda: layer.dispatch(x, weight=weight, layout=layout),
                     "combine": lambda: layer.combine(rows, layout, row_weight)}
            for name, fn in calls.items():
                us = host_microseconds(fn, sync, self.cpu_group, calls=100)
                self.record("host", shape, f"{name}, host", us / 1e3)
            layer.synchronize()


def commit():
    try:
        root = Path(__file__).resolve().parents[2]
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def run(options):
    r = Run(options)
    gpu = torch.cuda.get_device_name() if r.device.type == "cuda" else "none: small shapes on the CPU, for the mechanism, not for speed"
    r.say(f"{r.size} ranks, GPU {gpu}, torch {torch.__version__}")
    small = SHAPES["qwen3-30b"].small() if r.device.type == "cpu" else SHAPES["qwen3-30b"]
    if options.bench in ("all", "stages"):
        for shape in r.shapes():
            r.stages(shape)
    if options.bench in ("all", "sms"):
        for shape in r.shapes():
            if options.shape or shape.name.startswith("dsv3"):
                r.over_sms(shape)
    if options.bench in ("all", "saving"):
        for shape in r.shapes():
            if options.shape or shape.name.startswith("dsv3"):
                r.saving(shape)
    if options.bench in ("all", "tokens"):
        from dataclasses import replace

        for tokens in (64, 256, 1024, 4096, 8192, 16384) if r.device.type == "cuda" else (16, 64):
            r.stages(replace(SHAPES["dsv3"] if r.device.type == "cuda" else SHAPES["dsv3"].small(), tokens=tokens), "tokens", peer=False)
    if options.bench in ("all", "host"):
        from dataclasses import replace

        r.host(replace(small, tokens=64))
    if options.json and r.rank == 0:
        result = {"machine": f"{r.size} x {gpu}" if r.device.type == "cuda" else "CPU", "gpus": r.size if r.device.type == "cuda" else 0,
                  "cuda": torch.version.cuda, "torch": torch.__version__, "date": datetime.date.today().isoformat(), "commit": commit(),
                  "rows": r.rows}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
        r.say(f"wrote {options.json}")
    r.world.close()


def cpu_rank(rank, world_size, argv):
    run(parse(argv))


def main():
    options = parse(sys.argv[1:])
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl")
        else:
            dist.init_process_group("gloo")
        run(options)
        dist.destroy_process_group()
    elif torch.cuda.is_available():
        run(options)
    else:
        from epmoe.testing import run_ranks

        run_ranks(cpu_rank, 4, sys.argv[1:], timeout_s=900)
