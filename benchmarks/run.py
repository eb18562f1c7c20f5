"""Run: one rank's part of a benchmark: device, inputs, peers, and the rows of the table and the file."""

import dataclasses
import datetime
import os
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

import epmoe

from . import deep_ep, deep_ep_v2, figures, routing
from .measure import slowest, timed
from .progress import Progress
from .shapes import KNOWN_SHAPES, SHAPES
from .torch_nccl import TorchAllToAll

WIDTH, INDENT = 100, 63  # of a line, and of one that goes on with the ratios of the line before
CPU_NOTE = "CPU figures of small shapes: they show that it works, and say nothing about GPUs"


def commit():
    """Return the commit of this checkout, with "-dirty" if it has changes; None without git."""
    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).resolve().parents[1],
                              capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short",
                   "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def ratio_text(r):
    """Return a ratio in four characters at most, up to 9999: on a busy machine a line stays as short."""
    return f"{r:.2f}" if r < 9.995 else f"{r:.1f}" if r < 99.95 else f"{r:.0f}"


class Run:
    """What each bench uses.  All ranks make the same calls in the same order; rank 0 prints and writes."""

    def __init__(self, options):
        self.options = options
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = epmoe.comm.device.pick_device()
        self.on_gpu = self.device.type == "cuda"
        self.iters = options.iters or (30 if self.on_gpu else 10)
        self.num_sm = options.num_sm[0] if options.num_sm else None
        self.world = epmoe.World.of(None)
        self.cpu_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.deep_ep, self.no_deep_ep = deep_ep.load(self.cpu_group, self.device)
        self.deep_ep_v2, self.no_deep_ep_v2 = deep_ep_v2.load(self.cpu_group)
        self.rows, self.said, self.bar = [], None, None
        self.left_out = {}  # shape -> {peer: why it is not measured}

    def say(self, *text):
        if self.rank == 0:
            print(*text, flush=True)

    def introduce(self):
        gpu = torch.cuda.get_device_name() if self.on_gpu else None
        machine = f"{gpu}, CUDA {torch.version.cuda}" if gpu else f"a CPU of {os.cpu_count()} cores"
        self.say(f"{self.size} ranks on {machine}, torch {torch.__version__}, epmoe {epmoe.__version__}")
        if not self.on_gpu:
            self.say(CPU_NOTE + ".")
        peers = f"peers: torch over {'NCCL' if self.on_gpu else 'gloo'}"
        peers += (", DeepEP" if self.deep_ep else "") + (", DeepEP V2" if self.deep_ep_v2 else "")
        missing = [] if self.deep_ep else [f"no DeepEP: {self.no_deep_ep}"]
        if not self.deep_ep_v2 and self.no_deep_ep_v2 != self.no_deep_ep:
            missing.append(f"no DeepEP V2: {self.no_deep_ep_v2}")
        for line in ("; ".join([peers, *missing[:1]]), *missing[1:]):
            self.say(line[:WIDTH])
        self.say("columns: median of the slowest rank; bytes across links, or work, per second; ratios")
        self.head = {"machine": f"{self.size} x {gpu}" if gpu else "CPU", "gpus": self.size if gpu else 0,
                     "ranks": self.size,
                     "cuda": torch.version.cuda, "torch": torch.__version__,
                     "date": datetime.date.today().isoformat(),
                     "commit": self.options.commit or commit(), **({} if gpu else {"note": CPU_NOTE})}
        self.before, error = None, ""
        if self.options.json and self.options.bench != "all" and self.rank == 0:
            try:
                self.before = figures.figures_before(self.options.json, self.head)
            except ValueError as e:
                error = str(e)
        self.agree(error)

    def progress(self, num_steps):
        self.bar = Progress(num_steps, on=self.rank == 0)
        return self.bar

    # ---- shapes, inputs, peers ----

    def shape(self, name):
        return KNOWN_SHAPES[name] if self.on_gpu else KNOWN_SHAPES[name].small()

    def shapes(self, *default):
        """Return the shapes of --shapes, else the default, else all.

        Shapes whose experts are not a multiple of the ranks are skipped.
        """
        found = [self.shape(name) for name in self.options.shapes or default or SHAPES]
        for s in found:
            if s.experts % self.size:
                self.say(f"skipped: {s.name}, because {s.experts} experts are not a multiple of {self.size} "
                         f"ranks")
        return [s for s in found if s.experts % self.size == 0]

    def with_skews(self, shapes, default=()):
        """Return the shapes, each followed by itself with each skew of --skew, or the default, that its ranks
        can have.
        """
        found = []
        for shape in shapes:
            found.append(shape)
            most = routing.most_skew(shape, self.size)
            for skew in self.options.skew or default:
                if skew <= most:
                    found.append(dataclasses.replace(shape, skew=skew))
                else:
                    self.say(f"skipped: {shape.name} with skew {skew:g}, because {self.size} ranks and "
                             f"{shape.topk} choices of {shape.experts} experts allow at most {most:g}")
        return found

    def inputs(self, shape):
        """Return x [T, H], idx [T, K] (K distinct experts), weight [T, K] (sums of 1).

        Each rank has its own seed.  idx is uniform, or this rank's part of a skewed routing.
        """
        g = torch.Generator(self.device).manual_seed(1000 + self.rank)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        idx = routing.uniform(shape.tokens, shape.experts, shape.topk, g)
        if shape.skew is not None:
            idx = routing.skewed(shape, self.size, shape.skew)[self.rank].to(self.device)
        x = torch.randn(shape.tokens, shape.hidden, device=self.device, generator=g).to(dtype)
        weight = torch.rand(shape.tokens, shape.topk, device=self.device, generator=g)
        return x, idx, weight / weight.sum(1, keepdim=True)

    def layer(self, shape, dtype, kind=epmoe.EPAll2AllLayer, **options):
        options = {"enable_local_combine": True, "num_sm": self.num_sm} | options
        return kind(self.world, shape.tokens, shape.hidden, shape.topk, num_tot_experts=shape.experts,
                    dtype=dtype, device=self.device, **options)

    def torch_peer(self, shape, inputs):
        return TorchAllToAll(*inputs, shape.experts, self.size)

    def deep_ep_peer(self, shape, inputs, num_sm):
        """Return the peer, or None on all ranks, if DeepEP refuses the shape.  Collective."""
        return self.peer("DeepEP", shape, f" with {num_sm} SMs", lambda: deep_ep.DeepEP(
            self.deep_ep, *inputs, shape.experts, self.size, num_sm))

    def deep_ep_v2_peer(self, shape, inputs):
        """Return the peer, or None on all ranks, if DeepEP V2 refuses the shape.  Collective."""
        return self.peer("V2", shape, "", lambda: deep_ep_v2.DeepEPV2(self.deep_ep_v2, *inputs,
                                                                      shape.experts))

    def peer(self, name, shape, which, make):
        """Return the peer of make() after a dispatch and a combine, or None on all ranks.  Collective.

        If a rank could not make it or call it, the peer is left out of the shape's rows: see leave_out.
        """
        peer, error = None, "another rank could not call it"
        try:
            peer = make()
            peer.combine(peer.dispatch())
        except Exception as e:  # an assertion about the number of experts of a rank, for example
            peer, error = None, f"{type(e).__name__}: {e}".strip().split("\n")[0]
        if slowest(self.cpu_group, float(peer is None)):
            self.leave_out(name, shape, error, which)
            return None
        return peer

    def leave_out(self, peer, shape, reason, which=""):
        """Say why a peer is not measured.  The shape's rows that are compared with others have it, too."""
        self.say(f"no {peer} for {shape.label}{which}: {reason}"[:WIDTH])
        self.left_out.setdefault(shape, {})[peer] = reason

    def agree(self, error):
        """Raise on all ranks if any has found an error, so that none waits for it.  Collective."""
        if slowest(self.cpu_group, float(bool(error))):
            raise AssertionError(f"rank {self.rank}: {error or 'another rank found a wrong result'}")

    def time(self, layer, fn, iters=None):
        """Return milliseconds; see measure.timed."""
        return timed(fn, layer.ep_barrier_all, self.device, self.cpu_group, iters or self.iters)

    def wire_bytes(self, sent):
        """Return the most bytes that any rank sends to others.  Collective.

    sent: the rows [W] that this rank sends to each rank, and the bytes of a row.
    """
        counts, row_bytes = sent
        counts = counts.tolist()
        return slowest(self.cpu_group, float((sum(counts) - counts[self.rank]) * row_bytes))

    # ---- output ----

    def title(self, bench, text):
        if self.said != bench:
            self.said = bench
            self.say(f"\n{bench}: {text}")

    def record(self, bench, shape, impl, ms=None, wire_bytes=None, over=None, rate="", ratios=None, **more):
        """Add a row to the table and the file.

        ms is in milliseconds.  wire_bytes: bytes across the links, for GB/s.  over: {peer: its ms}, for the
        ratios, which are in `ratios` where they are known already.  rate: shown instead of GB/s.  more:
        written to the file only.  With a skew, the time over that of the uniform routing is a ratio, too.
        """
        row = {"bench": bench, "shape": shape.name, "tokens": shape.tokens, "impl": impl}
        if shape.skew is not None:
            row["skew"] = shape.skew
        if ms is not None:
            row["ms"] = round(ms, 5)
        if wire_bytes:
            row["wire_bytes"] = int(wire_bytes)
        if ms is not None and wire_bytes:
            row["wire_gbps"] = round(wire_bytes / ms / 1e6, 1)
            rate = rate or f"{row['wire_gbps']:.1f} GB/s"
        ratios = dict(ratios or {name: round(ms / theirs, 4) for name, theirs in (over or {}).items()})
        left_out = {name: why for name, why in self.left_out.get(shape, {}).items() if name not in ratios}
        if ratios and left_out:
            row["left_out"] = left_out
        if shape.skew is not None and ms is not None:
            key = figures.key_of(row | more | {"skew": None})
            ratios |= {"uniform": round(ms / r["ms"], 4) for r in self.rows if figures.key_of(r) == key}
        if ratios:
            row["ratio_to"], row["ratio"] = next(iter(ratios.items()))
            row["ratios"] = ratios
        self.rows.append(row | more)
        kind = "thread blocks" if self.on_gpu else "threads"
        workers = f", {more['num_sm']} {kind}" if bench == "sm" else ""
        if self.said != (bench, shape, workers):
            self.said = bench, shape, workers
            self.say(f"{shape.label}: T {shape.tokens}, H {shape.hidden}, I {shape.inner}, E "
                     f"{shape.experts}, K {shape.topk}{workers}")
        times = "" if ms is None else f"{ms:9.4f} ms"
        line = f"  {impl:32} {times:12} {rate:>13}  "
        for text in (f"{ratio_text(r)} {name}" for name, r in ratios.items()):
            if line[-2:] != "  " and len(line) + len(", ") + len(text) > WIDTH:
                self.say(line + ",")
                line = " " * INDENT
            line += ("" if line.endswith("  ") else ", ") + text
        self.say(line.rstrip())

    def save(self):
        if self.options.json and self.rank == 0:
            found = {**self.head, "rows": self.rows}
            found = figures.merged(self.before, found) if self.before else found
            Path(self.options.json).write_text(figures.text_of(found))

    def close(self):
        if self.options.json:
            self.say(f"\nwrote {self.options.json}")
        if self.deep_ep:
            self.deep_ep.close()
        self.world.close()
