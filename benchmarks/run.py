"""Run: one rank's part of a benchmark: device, inputs, peers, and the rows of the table and the file."""

import datetime
import os
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist

import epmoe

from . import deep_ep, figures
from .measure import slowest, timed
from .progress import Progress
from .shapes import KNOWN_SHAPES, SHAPES
from .torch_nccl import TorchAllToAll

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
        self.rows, self.said, self.bar = [], None, None

    def say(self, *text):
        if self.rank == 0:
            print(*text, flush=True)

    def introduce(self):
        gpu = torch.cuda.get_device_name() if self.on_gpu else None
        machine = f"{gpu}, CUDA {torch.version.cuda}" if gpu else f"a CPU of {os.cpu_count()} cores"
        self.say(f"{self.size} ranks on {machine}, torch {torch.__version__}, epmoe {epmoe.__version__}")
        if not self.on_gpu:
            self.say(CPU_NOTE + ".")
        deep_ep = ", DeepEP" if self.deep_ep else f"; no DeepEP: {self.no_deep_ep}"
        self.say(f"peers: torch over {'NCCL' if self.on_gpu else 'gloo'}{deep_ep}"[:100])
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

    def inputs(self, shape):
        """Return x [T, H], idx [T, K] (K distinct experts, uniform), weight [T, K] (sums of 1).

    Each rank has its own seed.
    """
        g = torch.Generator(self.device).manual_seed(1000 + self.rank)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        idx = torch.rand(shape.tokens, shape.experts, device=self.device,
                         generator=g).topk(shape.topk).indices
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
        """Return the peer, or None on all ranks and say why, if DeepEP refuses the shape.  Collective."""
        peer, error = None, "another rank could not call it"
        try:
            peer = deep_ep.DeepEP(self.deep_ep, *inputs, shape.experts, self.size, num_sm)
            peer.combine(peer.dispatch())
        except Exception as e:  # an assertion about the number of experts of a rank, for example
            peer, error = None, f"{type(e).__name__}: {e}".strip().split("\n")[0]
        if slowest(self.cpu_group, float(peer is None)):
            self.say(f"no DeepEP for {shape.name} with {num_sm} SMs: {error}"[:100])
            return None
        return peer

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

    def record(self, bench, shape, impl, ms=None, wire_bytes=None, over=None, rate="", **more):
        """Add a row to the table and the file.

        ms is in milliseconds.  wire_bytes: bytes across the links, for GB/s.  over: {peer: its ms}, for the
        ratios.
            rate:
        shown instead of GB/s.  more: written to the file only.
        """
        row = {"bench": bench, "shape": shape.name, "tokens": shape.tokens, "impl": impl}
        if ms is not None:
            row["ms"] = round(ms, 5)
        if wire_bytes:
            row["wire_bytes"] = int(wire_bytes)
        if ms is not None and wire_bytes:
            row["wire_gbps"] = round(wire_bytes / ms / 1e6, 1)
            rate = rate or f"{row['wire_gbps']:.1f} GB/s"
        ratios = {name: round(ms / theirs, 4) for name, theirs in (over or {}).items()}
        if ratios:
            row["ratio_to"], row["ratio"] = next(iter(ratios.items()))
            row["ratios"] = ratios
        self.rows.append(row | more)
        kind = "thread blocks" if self.on_gpu else "threads"
        workers = f", {more['num_sm']} {kind}" if bench == "sm" else ""
        if self.said != (bench, shape, workers):
            self.said = bench, shape, workers
            self.say(f"{shape.name}: T {shape.tokens}, H {shape.hidden}, I {shape.inner}, E "
                     f"{shape.experts}, K {shape.topk}{workers}")
        times = "" if ms is None else f"{ms:9.4f} ms"
        text = ", ".join(f"{ratio_text(r)} {name}" for name, r in ratios.items())
        self.say(f"  {impl:32} {times:12} {rate:>13}  {text}".rstrip())

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
