#!/usr/bin/env python3
"""Random programs of several threads a rank: correct ones, and ones in which a rank differs in one call.

    python tests/stress_programs.py --programs 10000 --ranks 2,3 --seed 1
    python tests/stress_programs.py --seed 1 --program 4711 --repeat 200     one program, many times

A failure prints the command that repeats the program, and its steps.

A program has 1 to 3 threads on each rank. All ranks have the same list of calls, and each call belongs to a
thread. A correct program keeps these rules of docs/guide.md and of the docstrings, and nothing else:

- The calls of a thread have the same order on all ranks.
- A communication buffer belongs to one thread: that of its own layer, or its own buffer of a shared layer.
- Exchanges, creations, allocations, frees and ends, and the first call of an EPMoE without gradients (it
  creates its decode path), have one order over all threads, the same on all ranks: each waits for its turn.
- Copies, signals, waits and barriers of a heap are made by the thread that owns it.
- No call is made on an object that another call creates or ends at that time.

So the calls of different threads may interleave in any way, and differently on each rank. All numbers are
small integers, so that every sum is exact in every dtype: each rank computes the right results by itself, and
compares them bit by bit.

In other programs something is wrong:

- "ended": a thread of each rank ends the shared layer, while other threads use it. Where a rank has begun a
  call that another rank begins too late, it may wait for the limit, and the world ends. Each call has the
  right result or raises an error; as long as the world lives, only calls on that layer may raise one.
- "refused": in one call, one rank differs: an argument is wrong, or differs in a way that the ranks compare,
  or this rank exchanges bytes where the others create, allocate, free or end.
  All ranks must raise an error in this call, soon, and none that ends the world. All other calls must have
  the right results.
- "lost": one rank gets out of step: a call is missing, one too many or another one, an object is closed too
  soon, or the rank leaves by an exception. Each call has the right result or raises an error, and no rank
  waits longer than the limit. While the world lives, a call has succeeded on all ranks or on none, and the
  objects are the same on all ranks. An error ends its thread, because a later call would meet another one.

After each program all objects are closed, and a heap and an exchange must work: in the same world if it
lives, else in a new one. A world lives as long as programs permit.

Sizes in bytes are unique in a program, so that calls of a lost program that do not belong together differ.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch.distributed as dist

import epmoe
from epmoe.testing import collector_off
from rank_processes import process_ranks

HANG_S = 150.0  # no thread takes that long
PATIENT_S = 60.0  # the limit of waits where none is expected to time out
LOST_S = 1.0  # the limit of waits in a lost program
ALL_S = 10.0**6  # of all programs
SAY_S = 5.0  # between two lines that say how far it is
DTYPES = {"layer": (torch.float32, torch.bfloat16, torch.float16), "moe": (torch.float32, torch.bfloat16)}
DTYPES["ll"] = DTYPES["layer"]
MAY_END = ("lost", "ended")  # programs after which the world may have ended
SHARED = "shared"  # a layer with a buffer for each thread
IN_TURN = ("create", "finalize", "exchange", "malloc", "free")

REFUSED = {
    "step": ("dtype", "shape", "too_many", "index", "list", "rows", "no_weight", "gradient", "None"),
    "ll_step": ("dtype", "shape", "too_many", "index", "list", "rows", "weights_list", "weights_long"),
    "moe_step": ("dtype", "shape", "too_many", "index", "list", "integer_weights", "gradient", "None",
                 "meta", "no_parameter", "other_call"),
    "malloc": ("size", "dtype", "shape", "alignment", "other_call"),
    "free": ("foreign", "type", "other_call"),
    "exchange": ("size", "long", "type", "other_call"),
    "create": ("argument", "size", "dtype", "other_call"),
    "finalize": ("other_call",),
}


class Skipped(Exception):
    """The object of a call does not exist, because its creation has failed."""


class Mistake(Exception):
    """What a rank of a lost program raises itself."""


@dataclasses.dataclass
class Call:
    number: int  # its place in the list of all threads
    thread: int
    kind: str
    thing: str | None = None  # the object
    turn: bool = False
    args: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        args = ", ".join(f"{k} {str(v).removeprefix('torch.')}" for k, v in self.args.items())
        return f"#{self.number} {self.kind} {self.thing or ''} {args}{'  (in turn)' if self.turn else ''}"


@dataclasses.dataclass
class Program:
    seed: int
    number: int
    size: int
    threads: int
    setup: list
    calls: list
    wrong: str | None = None  # None, "ended", "refused" or "lost"
    wrong_call: int = -1
    wrong_rank: int = -1
    wrong_how: str = ""

    def __str__(self):
        lines = [f"program {self.number} of seed {self.seed}: {self.size} ranks, {self.threads} threads each"]
        lines += [f"  before: {c}" for c in self.setup]
        lines += [f"  thread {c.thread}: {c}" for c in self.calls]
        if self.wrong:
            who = f"rank {self.wrong_rank}" if self.wrong_rank >= 0 else "all ranks"
            lines.append(f"  {self.wrong}: {who} in #{self.wrong_call}: {self.wrong_how}")
        return "\n".join(lines)


# ---- the programs ----


class Maker:
    """Makes the program of a number."""

    def __init__(self, seed, number, size):
        self.r = random.Random(f"{seed} {number}")
        self.p = Program(seed, number, size, self.r.choice((1, 2, 2, 3)), [], [])
        self.next = 0
        self.things = [[] for _ in range(self.p.threads)]  # of each thread: calls that create
        self.tensors = [[] for _ in range(self.p.threads)]  # of each thread: (heap, name)
        self.decoded = set()

    def call(self, thread, kind, thing=None, **args):
        c = Call(self.next, thread, kind, thing, kind in IN_TURN, args)
        self.next += 1
        return c

    def create(self, thread, what, name, **more):
        n, r = self.next, self.r
        args = {"what": what}
        if what == "heap":
            args |= {"num_bytes": (1 << 16) + 256 * n}
        else:
            args |= {"hidden": 16 * (1 + n % 8), "max_tokens": 2 + n // 8, "topk": r.choice((1, 2)),
                     "local": r.choice((1, 2)), "dtype": r.choice(DTYPES[what])}
        if what == "layer":
            args |= {"mode": r.choice(("scatter", "gather", "local")), "num_buffers": 1}
        return self.call(thread, "create", name, **(args | more))

    def make(self):
        r, p = self.r, self.p
        if p.threads > 1 and r.random() < 0.4:
            p.setup.append(self.create(0, "layer", SHARED, num_buffers=p.threads))
        length = r.randint(2, 5) * p.threads
        end = r.randrange(length) if p.setup and r.random() < 0.25 else length
        while len(p.calls) < length:
            t = r.randrange(p.threads)
            if len(p.calls) >= end and not p.wrong:
                p.wrong, p.wrong_call, p.wrong_how = "ended", self.next, "finalize"
                p.calls.append(self.call(t, "finalize", SHARED))
            p.calls += self.some(t)
        kind = r.random()
        if not p.wrong and kind > 0.5:  # a lost program takes a second, all others milliseconds
            self.spoil("refused" if kind < 0.88 else "lost")
        return p

    def some(self, t):
        r, mine = self.r, self.things[t]
        heaps = [c.thing for c in mine if c.args["what"] == "heap"]
        layers = [c for c in mine if c.args["what"] != "heap"]
        if self.p.setup:
            layers.append(self.p.setup[0])
        what = r.random()
        if what < 0.12 or (what < 0.6 and not layers):
            kind = r.choice(("layer", "layer", "ll", "moe"))
            c = self.create(t, kind, f"{kind}{self.next}")
            if heaps and kind == "layer" and r.random() < 0.3 and c.args["max_tokens"] < 4:
                c.args["heap"] = heaps[0]
            mine.append(c)
            return [c, self.step(t, c)]
        if what < 0.6:
            return [self.step(t, r.choice(layers))]
        if what < 0.7:
            return [self.call(t, "exchange", num_bytes=1 + self.next)]
        if what < 0.78 and layers and layers[0] in mine and layers[0].args.get("heap") is None:
            mine.remove(layers[0])
            return [self.call(t, "finalize", layers[0].thing)]
        if not heaps:
            c = self.create(t, "heap", f"heap{self.next}")
            mine.append(c)
            heaps, calls = [c.thing], [c]
        else:
            calls = []
        of_heap = [name for heap, name in self.tensors[t] if heap == heaps[0]]
        if of_heap and r.random() < 0.3:
            self.tensors[t].remove((heaps[0], of_heap[0]))
            return [*calls, self.call(t, "free", heaps[0], tensor=of_heap[0])]
        if not of_heap or r.random() < 0.4:
            c = self.call(t, "malloc", heaps[0], tensor=f"tensor{self.next}", elements=64 * (1 + self.next))
            self.tensors[t].append((heaps[0], c.args["tensor"]))
            return [*calls, c]
        how = r.choice(("put", "get"))
        return [*calls, self.call(t, "ring", heaps[0], tensor=r.choice(of_heap), how=how)]

    def step(self, t, made):
        r, what = self.r, made.args["what"]
        if what == "ll":
            return self.call(t, "ll_step", made.thing, halves=r.random() < 0.3,
                             layout=r.choice(("compact", "masked")))
        if what == "moe":
            c = self.call(t, "moe_step", made.thing, backward=r.random() < 0.5)
            if not c.args["backward"] and made.thing not in self.decoded:
                self.decoded.add(made.thing)
                c.turn = True
            return c
        return self.call(t, "step", made.thing, buffer=t if made.thing == SHARED else 0,
                         plan=r.random() < 0.5, backward=r.random() < 0.3)

    def spoil(self, wrong):
        """Let one rank differ in one call."""
        r, p = self.r, self.p
        p.wrong, p.wrong_rank = wrong, r.randrange(p.size)
        if wrong == "refused":
            candidates = [c for c in p.calls if c.kind in REFUSED]
            if not candidates:
                p.wrong = None
                return
            c = r.choice(candidates)
            hows = list(REFUSED[c.kind])
            if c.kind == "create":
                hows = ["size", "other_call"] if c.args["what"] == "heap" else hows
            if c.kind == "moe_step" and not c.args["backward"]:
                hows.remove("gradient")
            if not c.turn:  # operations of buffers do not meet an exchange
                hows = [how for how in hows if how != "other_call"]
            p.wrong_call, p.wrong_how = c.number, r.choice(hows)
            for later in p.calls:  # the next call makes the decode path that this one does not make
                later.turn |= c.turn and c.kind == "moe_step" == later.kind and later.thing == c.thing
            return
        c = r.choice(p.calls)
        hows = ["stop", "stop", "leave", "extra_exchange", "extra_exchange"]
        # Without a step, the next one meets another one of the peers: gradients of experts are then sums over
        # other tokens, and no rank can know it.
        meets = [d for d in p.calls if d.kind == "moe_step" == c.kind and d.thing == c.thing and d is not c]
        if c.kind != "ring":
            hows += ["other_exchange"] if meets else ["missing", "missing", "other_exchange"]
        if c.kind == "step":
            hows += ["extra_plan", "extra_barrier"]
        if c.kind == "moe_step":
            hows += ["grad_mode"]  # without gradients an EPMoE may take another path
        if any(heap for heap, _ in self.tensors[c.thread]):
            hows.append("extra_malloc")
        if c.thing and c.kind not in ("create", "finalize"):
            hows += ["early_end"]
        p.wrong_call, p.wrong_how = c.number, r.choice(hows)


def make_program(seed, number, size):
    return Maker(seed, number, size).make()


# ---- the right results ----


def scale(idx):
    """What an expert multiplies with."""
    return 1 + idx % 5


class Inputs:
    """The tokens of all ranks in a step. Every rank can compute them."""

    def __init__(self, program, call, a):
        self.size, self.a = program.size, a
        self.num_experts = a["local"] * program.size
        g = torch.Generator().manual_seed((program.seed * 1_000_003 + program.number) * 64 + call.number)
        self.x, self.idx, self.weights, self.gy = [], [], [], []
        for _ in range(program.size):
            t = int(torch.randint(0, a["max_tokens"] + 1, (), generator=g))
            self.x.append(torch.randint(0, 4, (t, a["hidden"]), generator=g).to(a["dtype"]))
            order = torch.rand(t, self.num_experts, generator=g).argsort(1)  # a token takes an expert once
            idx = order[:, :a["topk"]]
            if idx.shape[1] < a["topk"]:
                idx = torch.cat([idx, torch.full((t, a["topk"] - idx.shape[1]), -1)], 1)
            dropped = torch.rand(idx.shape, generator=g)
            idx = torch.where(dropped < 0.1, -1, torch.where(dropped > 0.93, self.num_experts, idx))
            self.idx.append(idx.contiguous())
            self.weights.append(torch.randint(1, 3, idx.shape, generator=g).float())
            self.gy.append(torch.randint(0, 2, (t, a["hidden"]), generator=g).to(a["dtype"]))

    def factor(self, rank, factors):
        """[T]: the sum of weight * factor over the choices of each token. factors: a function of experts."""
        idx, w = self.idx[rank], self.weights[rank]
        kept = (idx >= 0) & (idx < self.num_experts)
        return torch.where(kept, w * factors(idx), 0).sum(1, keepdim=True)

    def rows(self, rank):
        """(rows [M, H], weights [M], experts [M]) that this rank receives."""
        flat = torch.cat(self.idx).reshape(-1)
        first = rank * self.a["local"]
        mine = ((flat >= first) & (flat < first + self.a["local"])).nonzero()[:, 0]
        mine = mine[flat[mine].argsort(stable=True)]
        weights = torch.cat(self.weights).reshape(-1)[mine]
        return torch.cat(self.x)[mine // self.a["topk"]], weights, flat[mine]


def same(got, want, what):
    """Assert that got is want, bit by bit."""
    if got.dtype != want.dtype or got.shape != want.shape:
        raise AssertionError(f"{what}: got {got.dtype} {list(got.shape)}, wanted {want.dtype} "
                             f"{list(want.shape)}")
    if not torch.equal(got, want):
        at = tuple((got != want).nonzero()[0].tolist())
        raise AssertionError(f"{what}: at {at} got {got[at].item()}, wanted {want[at].item()}")


# ---- one rank ----


class Turns:
    """The order of the calls that have one order over all threads of a rank."""

    def __init__(self, numbers):
        self.left, self.changed = sorted(numbers), threading.Condition()

    def wait(self, number):
        end = time.monotonic() + HANG_S
        with self.changed:
            while self.left and self.left[0] < number:
                if not self.changed.wait(max(0.0, end - time.monotonic())):
                    raise AssertionError(f"call {number} did not get its turn, but {self.left[0]} has it")

    def done(self, number):
        with self.changed:
            if number in self.left:
                self.left.remove(number)
            self.changed.notify_all()


class Run:
    """A program on one rank."""

    def __init__(self, world, program):
        self.world, self.p, self.rank = world, program, world.rank
        self.things, self.tensors = {}, {}
        self.args = {c.thing: c.args for c in program.setup + program.calls if c.kind == "create"}
        self.outcomes = {}  # number of a call -> (what, names of classes, text, seconds)
        self.turns = Turns(c.number for c in program.calls if c.turn)

    # -- threads --

    def run(self):
        """Run the program. Returns what judge() needs."""
        self.world.set_timeout(LOST_S if self.p.wrong in MAY_END else PATIENT_S)
        for c in self.p.setup:
            self.outcome(c)
        threads = [threading.Thread(target=self.run_thread, args=(t,), daemon=True)
                   for t in range(self.p.threads)]
        for t in threads:
            t.start()
        end = time.monotonic() + HANG_S
        for i, t in enumerate(threads):
            t.join(max(0.0, end - time.monotonic()))
            if t.is_alive():
                frame = sys._current_frames().get(t.ident)
                stack = "".join(traceback.format_stack(frame))
                return {"hang": f"thread {i}:\n{stack}", "outcomes": self.outcomes}
        try:
            self.world.check()
            ended = ""
        except epmoe.EpError as e:
            ended = f"{type(e).__name__}: {e}"
        sizes = {}
        if not ended:
            for name, thing in self.things.items():
                if isinstance(thing, epmoe.SymmetricHeap):
                    s = thing.stats()
                    sizes[name] = s["used"], s["num_allocations"], s["largest_free"]
        return {"hang": "", "outcomes": self.outcomes, "ended": ended, "things": list(self.things),
                "tensors": sorted(self.tensors), "heaps": sizes}

    def run_thread(self, t):
        torch.set_num_threads(1)
        mine = [c for c in self.p.calls if c.thread == t]
        for i, c in enumerate(mine):
            what = self.outcome(c)
            if what != "ok" and self.p.wrong == "lost":
                for later in mine[i:]:
                    self.turns.done(later.number)
                break

    def outcome(self, c):
        start, names, text, what = time.monotonic(), (), "", "ok"
        try:
            if c.turn and c in self.p.calls:
                self.turns.wait(c.number)
                start = time.monotonic()
            self.make_call(c)
        except (Skipped, Mistake) as e:
            what, text = "skipped", str(e)
        except AssertionError as e:
            what, text = "wrong", str(e)
        except Exception as e:
            what, names = "error", tuple(k.__name__ for k in type(e).__mro__)
            at = [f"{f.name}:{f.lineno}" for f in traceback.extract_tb(e.__traceback__)[2:]]
            text = f"{type(e).__name__}: {e} (in {' '.join(at)})"
        finally:
            self.turns.done(c.number)
        self.outcomes[c.number] = what, names, text, time.monotonic() - start
        return what

    def make_call(self, c):
        how = self.p.wrong_how if (c.number, self.rank) == (self.p.wrong_call, self.p.wrong_rank) else None
        if how == "other_call":
            return self.world.exchange(bytes(500))
        if how is None or self.p.wrong == "refused":
            return getattr(self, c.kind)(c, how)
        if how == "stop":
            raise Mistake("stops")
        if how == "leave":
            error = Mistake("leaves")
            self.world.__exit__(Mistake, error, None)
            raise error
        if how == "missing":
            if c.kind in ("step", "ll_step"):
                return getattr(self, c.kind)(c, how)
            return None
        if how == "early_end":
            self.thing(c).close() if "heap" in c.thing else self.thing(c).finalize()
        if how == "extra_exchange" or how == "other_exchange":
            self.world.exchange(bytes(500))
        if how == "extra_malloc":
            for thing in list(self.things.values()):
                if isinstance(thing, epmoe.SymmetricHeap):
                    thing.malloc_symmetric(333)
        if how == "extra_plan":
            self.thing(c).preprocess(Inputs(self.p, c, self.args[c.thing]).idx[self.rank][:1].contiguous(),
                                     buffer=c.args["buffer"])
        if how == "extra_barrier":
            self.thing(c).ep_barrier_all(buffer=c.args["buffer"])
        if how == "other_exchange":
            return None
        return getattr(self, c.kind)(c, how if how == "grad_mode" else None)

    def thing(self, c):
        if c.thing not in self.things:
            raise Skipped(c.thing)
        return self.things[c.thing]

    # -- calls --

    def create(self, c, how):
        a = dict(c.args)
        if how == "argument":
            a["topk"] = 99
        if how == "size":
            a["num_bytes" if a["what"] == "heap" else "max_tokens"] *= 2
        if how == "dtype":
            a["dtype"] = torch.int32
        if a["what"] == "heap":
            thing = epmoe.SymmetricHeap(self.world, a["num_bytes"], "cpu")
        elif a["what"] == "ll":
            thing = epmoe.LowLatencyAll2All(self.world, a["max_tokens"], a["hidden"], a["topk"],
                                            a["local"] * self.p.size, dtype=a["dtype"], device="cpu")
        elif a["what"] == "moe":
            thing = epmoe.EPMoE(a["hidden"], a["hidden"], a["local"] * self.p.size, a["topk"], self.world,
                                activation="relu2", max_tokens=a["max_tokens"], dtype=a["dtype"],
                                device="cpu")
            with torch.no_grad():
                for i in range(a["local"]):
                    torch.nn.init.eye_(thing.gate_up_proj[i]).mul_(1 + (self.rank * a["local"] + i) % 2)
                    torch.nn.init.eye_(thing.down_proj[i])
        else:
            options = {"device": "cpu"}
            if a.get("heap"):
                if a["heap"] not in self.things:
                    raise Skipped(a["heap"])
                options = {"heap": self.things[a["heap"]]}
            thing = epmoe.EPAll2AllLayer(
                self.world, a["max_tokens"], a["hidden"], a["topk"], num_tot_experts=a["local"] * self.p.size,
                dtype=a["dtype"], num_buffers=a["num_buffers"], enable_local_combine=a["mode"] == "local",
                combine_mode="gather" if a["mode"] == "gather" else "scatter", **options)
        self.things[c.thing] = thing

    def finalize(self, c, how):
        self.thing(c).finalize()
        del self.things[c.thing]

    def exchange(self, c, how):
        n = c.args["num_bytes"]
        mine = {"size": bytes(n + 1), "long": bytes(513), "type": "text"}.get(how, bytes([self.rank]) * n)
        got = self.world.exchange(mine)
        want = [bytes([r]) * n for r in range(self.p.size)]
        if got != want:
            raise AssertionError(f"exchange: got {got}, wanted {want}")

    def malloc(self, c, how):
        shape, options = c.args["elements"], {}
        if how == "size":
            shape += 1
        if how == "dtype":
            options["dtype"] = torch.bool
        if how == "shape":
            shape = -1
        if how == "alignment":
            options["alignment"] = 3
        t = self.thing(c).malloc_symmetric(shape, **options)
        same(t, torch.zeros(c.args["elements"]), "malloc_symmetric")
        self.tensors[c.args["tensor"]] = t

    def free(self, c, how):
        heap = self.thing(c)
        if c.args["tensor"] not in self.tensors:
            raise Skipped(c.args["tensor"])
        t = self.tensors[c.args["tensor"]]
        heap.free({"foreign": torch.zeros(3), "type": 7}.get(how, t))
        del self.tensors[c.args["tensor"]]

    def ring(self, c, how):
        """Give numbers to the next rank, and signal them; or barriers, and a get from there."""
        heap = self.thing(c)
        if c.args["tensor"] not in self.tensors:
            raise Skipped(c.args["tensor"])
        t, size = self.tensors[c.args["tensor"]], self.p.size
        n, after, before = len(t) // 2, (self.rank + 1) % size, (self.rank - 1) % size
        numbers = torch.arange(float(n)) + 1000 * c.number
        heap.barrier()
        if c.args["how"] == "put":
            words = t[n:].view(torch.int64)
            t[:n] = -1
            words.zero_()
            heap.barrier()
            heap.put(t[:n], numbers + self.rank, after)
            heap.signal(words, 1, c.number + 1, after)
            heap.wait(words, 1, c.number + 1)
            same(t[:n], numbers + before, "put")
        else:
            t[:n] = numbers + self.rank
            heap.barrier()
            got = torch.full((n,), -1.0)
            heap.get(got, t[:n], after)
            same(got, numbers + after, "get")
        heap.barrier()

    def tokens(self, c, how):
        """(Inputs, x, idx, weights) of this rank, wrong as `how` says."""
        inputs = Inputs(self.p, c, self.args[c.thing])
        x, idx, w = (v[self.rank].clone() for v in (inputs.x, inputs.idx, inputs.weights))
        a = inputs.a
        if how in ("too_many", "index"):
            t = a["max_tokens"] + (how == "too_many")
            x = torch.ones(t, a["hidden"], dtype=a["dtype"])
            idx, w = torch.zeros(t, a["topk"], dtype=torch.int64), torch.ones(t, a["topk"])
            if how == "index":
                idx[-1, 0] = inputs.num_experts + 3
        x = {"dtype": lambda: x.double(), "shape": lambda: torch.cat([x, x], 1), "list": lambda: x.tolist(),
             "None": lambda: None, "meta": lambda: x.to("meta")}.get(how, lambda: x)()
        w = {"no_weight": lambda: None, "integer_weights": lambda: w.int(),
             "weights_list": lambda: w.tolist(),
             "weights_long": lambda: torch.ones(a["max_tokens"] + 2, a["topk"])}.get(how, lambda: w)()
        return inputs, x, idx, w

    def step(self, c, how):
        layer = self.thing(c)
        inputs, x, idx, w = self.tokens(c, how)
        buffer, backward = c.args["buffer"], c.args["backward"] != (how == "gradient")
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_(backward)
        if c.args["plan"]:
            layout = layer.preprocess(idx, buffer=buffer)
            rows, row_weights, layout = layer.dispatch(x, weight=w, layout=layout)
        else:
            rows, row_weights, layout = layer.dispatch(x, idx, w, buffer=buffer)
        if how == "missing":
            return
        want, want_weights, experts = inputs.rows(self.rank)
        same(rows.detach(), want, "rows")
        same(row_weights.detach(), want_weights, "row weights")
        y = rows * scale(experts)[:, None].to(rows.dtype)
        if how == "rows":
            y = torch.cat([y, y[:1] if len(y) else y.new_ones(1, y.shape[1])])
        out = layer.combine(y, layout, row_weights)
        factor = inputs.factor(self.rank, scale)
        same(out.detach(), (factor * inputs.x[self.rank].float()).to(out.dtype), "combine")
        if backward:
            out.backward(inputs.gy[self.rank])
            same(x.grad, (factor * inputs.gy[self.rank].float()).to(x.dtype), "gradient of x")

    def ll_step(self, c, how):
        layer = self.thing(c)
        inputs, x, idx, w = self.tokens(c, how)
        options = {"layout": c.args["layout"]}
        if c.args["halves"]:
            rows, _, counts, handle = layer.dispatch_send(x, idx, w, **options).recv()
        else:
            rows, _, counts, handle = layer.dispatch(x, idx, w, **options)
        if how == "missing":
            return
        want, _, experts = inputs.rows(self.rank)
        of_expert = torch.bincount(experts - self.rank * inputs.a["local"], minlength=inputs.a["local"])
        same(counts, of_expert.int(), "counts")
        y = torch.full_like(rows, torch.nan)
        at = 0
        for i, n in enumerate(of_expert.tolist()):
            here = slice(at, at + n) if c.args["layout"] == "compact" else (i, slice(n))
            same(rows[here], want[at : at + n], f"rows of expert {i}")
            y[here] = rows[here] * scale(self.rank * inputs.a["local"] + i)
            at += n
        if how == "rows":
            y = y[..., :-1].contiguous()
        out = layer.combine_send(y, handle).recv() if c.args["halves"] else layer.combine(y, handle)
        same(out, (inputs.factor(self.rank, scale) * inputs.x[self.rank].float()).to(out.dtype), "combine")

    def moe_step(self, c, how):
        """The experts compute down relu(gate_up x)^2; down is 1 on the diagonal, and gate_up 1 or 2."""
        moe = self.thing(c)
        inputs, x, idx, w = self.tokens(c, how)
        backward = c.args["backward"] != (how == "grad_mode")
        with torch.set_grad_enabled(backward):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_(backward and how != "gradient")
            kept, moe.down_proj = moe.down_proj, None if how == "no_parameter" else moe.down_proj
            try:
                out = moe(x, idx, w)
            finally:
                moe.down_proj = kept
        x0, gy = inputs.x[self.rank].float(), inputs.gy[self.rank]
        factor = inputs.factor(self.rank, lambda e: (1 + e % 2) ** 2)
        same(out.detach(), (factor * x0 * x0).to(out.dtype), "y")
        if not backward:
            return
        moe.zero_grad()
        out.backward(gy)
        if x.requires_grad:
            same(x.grad, (factor * 2 * x0 * gy.float()).to(x.dtype), "gradient of x")
        if moe.layer.dtype == torch.float32:
            for i in range(inputs.a["local"]):
                self.check_gradients(moe, inputs, i)

    def check_gradients(self, moe, inputs, i):
        """Check the gradients of the weights of local expert i."""
        e = self.rank * inputs.a["local"] + i
        s = 1 + e % 2
        chosen = torch.cat(inputs.idx) == e
        w = (torch.cat(inputs.weights) * chosen).sum(1, keepdim=True)
        x, gy = torch.cat(inputs.x), torch.cat(inputs.gy) * w
        same(moe.down_proj.grad[i], gy.T @ (s * x) ** 2, "gradient of down_proj")
        same(moe.gate_up_proj.grad[i], (gy * 2 * s * x).T @ x, "gradient of gate_up_proj")

    # -- the end --

    def end(self):
        """Close all objects, and use the world once more."""
        self.world.set_timeout(PATIENT_S)
        self.tensors.clear()
        for name in reversed(list(self.things)):
            thing = self.things.pop(name)
            thing.close() if isinstance(thing, epmoe.SymmetricHeap) else thing.finalize()
        probe(self.world, self.p.number)


def probe(world, number):
    """A heap and an exchange must work."""
    mine = f"{number} {world.rank}".ljust(40).encode()
    got = world.exchange(mine)
    want = [f"{number} {r}".ljust(40).encode() for r in range(world.size)]
    if got != want:
        raise AssertionError(f"the exchange after the program: got {got}, wanted {want}")
    with epmoe.SymmetricHeap(world, 1 << 12, "cpu") as heap:
        t = heap.malloc_symmetric(world.size)
        for peer in range(world.size):
            heap.put(t[world.rank : world.rank + 1], torch.tensor([float(number + world.rank)]), peer)
        heap.barrier()
        same(t, torch.arange(float(world.size)) + number, "the heap after the program")


# ---- the judgement ----

ALLOWED = {"EpError", "ValueError", "TypeError", "NotImplementedError", "RuntimeError"}
ENDS = {"EpTimeout", "PeerDied", "EpClosed"}


def may_fail(p, c, has_ended):
    """Whether a call may raise an error of epmoe that the rest of judge() looks at."""
    if p.wrong == "ended":
        return has_ended or c.thing == SHARED
    return p.wrong is not None


def judge(p, reports):
    """What is wrong with the reports of all ranks: a list of texts. Every rank comes to the same result."""
    bad = []

    def say(rank, number, text):
        bad.append(f"rank {rank}, #{number}: {text}")

    for rank, report in enumerate(reports):
        if report["hang"]:
            bad.append(f"rank {rank} hangs: {report['hang']}")
    if bad:
        return bad
    ended = [report["ended"] for report in reports]
    for c in p.setup + p.calls:
        whats = []
        for rank, report in enumerate(reports):
            what, names, text, seconds = report["outcomes"].get(c.number, ("not made", (), "", 0.0))
            whats.append(what)
            if what == "wrong":
                say(rank, c.number, f"a wrong result: {text}")
            elif what == "error" and not may_fail(p, c, any(ended)):
                say(rank, c.number, text)
            elif what == "error" and not ALLOWED & set(names):
                say(rank, c.number, f"not an error of epmoe: {text}")
            elif what == "error" and p.wrong == "refused" and (c.number != p.wrong_call or ENDS & set(names)):
                say(rank, c.number, text)
            elif p.wrong in MAY_END and seconds > 5 * LOST_S + 5 * slowness(seconds):
                say(rank, c.number, f"took {seconds:.1f} s: {what} {text}")
        # Experts whose parameters require gradients need not refuse an x that requires one on one rank only.
        may_succeed = c.kind == "moe_step" and p.wrong_how == "gradient"
        if p.wrong == "refused" and c.number == p.wrong_call:
            if set(whats) not in ({"error"}, {"skipped"}) and not (may_succeed and set(whats) == {"ok"}):
                say(p.wrong_rank, c.number, f"wanted an error on all ranks, got {whats}")
        elif not any(ended) and 0 < whats.count("ok") < p.size and not (p.wrong == "lost"
                                                                        and c.number == p.wrong_call):
            say("*", c.number, f"has succeeded on some ranks only: {whats}")
    if any(ended) and p.wrong not in MAY_END:
        bad.append(f"the world has ended: {ended}")
    if not any(ended):
        for key in ("things", "tensors", "heaps"):
            if any(report[key] != reports[0][key] for report in reports):
                bad.append(f"ranks have different {key}: {[report[key] for report in reports]}")
    return bad


def slowness(seconds):
    """How much longer things take on this machine now, at least 1."""
    return max(1.0, os.getloadavg()[0] / os.cpu_count()) if seconds > 2 * LOST_S else 1.0


# ---- ranks ----


class ProcessRank:
    """A rank that is a process. Worlds have a group of their own, beside the one of gather()."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group, self.world = dist.new_group(), None

    def gather(self, value):
        out = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def new_world(self):
        self.world = epmoe.World(self.group, PATIENT_S)


class ThreadRank:
    """A rank that is a thread. all_ranks: of all of them, (barrier, list for values)."""

    def __init__(self, rank, size, barrier, values):
        self.rank, self.size, self.barrier, self.values = rank, size, barrier, values
        self.world, self.kept = None, []

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait(HANG_S + 60)
        out = list(self.values)
        self.barrier.wait(HANG_S + 60)
        return out

    def new_world(self):
        worlds = self.gather(epmoe.thread_worlds(self.size, PATIENT_S) if self.rank == 0 else None)
        self.world = worlds[0][self.rank]


def run_program(me, p):
    """Run a program on this rank. Returns what is wrong, a list of texts, and the kind of each error."""
    if me.world is None:
        me.new_world()
    run = Run(me.world, p)
    reports = me.gather(run.run())
    bad = judge(p, reports)
    if bad:
        return bad
    error = ""
    try:
        if any(report["ended"] for report in reports):
            with contextlib.suppress(Exception):
                me.world._leave(False)
            me.gather(None)  # ranks that are threads share memory, which no rank drops before all have come
            run.things.clear()
            run.tensors.clear()
            me.new_world()
            probe(me.world, p.number)
        else:
            run.end()
    except (Exception, AssertionError):
        error = traceback.format_exc()
    errors = me.gather(error)
    if any(errors):
        states = [r["ended"] or "alive" for r in reports]
        return [f"after the program (worlds: {states}), rank {r}: {e}" for r, e in enumerate(errors) if e]
    return []


def run_programs(me, seed, numbers, stop=None, begin=lambda number: None):
    """Run programs until the time `stop`.

    Returns (how many, the number of the one that has failed or None, text, how many of each kind).
    begin: called before each program.
    """
    done, shown, start = 0, time.monotonic(), time.monotonic()
    kinds = {}
    for number in numbers:
        begin(number)
        p = make_program(seed, number, me.size)
        bad = run_program(me, p)
        if bad:
            return done, number, f"{p}\n" + "\n".join(bad), kinds
        done += 1
        kinds[p.wrong] = kinds.get(p.wrong, 0) + 1
        now = time.monotonic()
        if me.rank == 0 and now - shown > SAY_S:
            print(f"{me.size} ranks: {done} programs, {done / (now - start):.1f}/s", flush=True)
            shown = now
        if stop is not None and any(me.gather(now > stop)):
            break
    return done, None, "", kinds


def process_main(rank, size, seed, numbers, seconds, at):
    """What a rank that is a process does. at: the name of a file for the number of the program."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)

    def begin(number):
        faulthandler.dump_traceback_later(2 * HANG_S, exit=True)
        if rank == 0:
            with open(at, "w") as f:
                f.write(str(number))

    me = ProcessRank()
    result = run_programs(me, seed, numbers, seconds and time.monotonic() + seconds, begin)
    if me.world is not None and result[1] is None:
        me.world.close()
    faulthandler.cancel_dump_traceback_later()
    return result


def stress_processes(seed, numbers, size, seconds=None):
    """Run programs with ranks that are processes. Returns what run_programs returns."""
    numbers = list(numbers)
    with tempfile.NamedTemporaryFile("r") as at:
        try:
            return process_ranks(process_main, size, seed, numbers, seconds, at.name, timeout_s=ALL_S)[0]
        except AssertionError as e:  # a rank has crashed, or hangs outside of the program's threads
            number = int(at.read() or numbers[0])
            return numbers.index(number), number, f"{make_program(seed, number, size)}\n{e}", {}


def stress_threads(seed, numbers, size, seconds=None):
    """The same with ranks that are threads of this process."""
    barrier, values, results = threading.Barrier(size), [None] * size, [None] * size
    stop = seconds and time.monotonic() + seconds

    def main(rank):
        me = ThreadRank(rank, size, barrier, values)
        try:
            results[rank] = run_programs(me, seed, numbers, stop)
        except BaseException:
            results[rank] = 0, -1, traceback.format_exc(), {}
            barrier.abort()
        finally:
            if me.world is not None:
                me.world._leave(False)

    with collector_off():
        threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    return results[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=10000, help="how many, for all numbers of ranks")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", action="store_true", help="ranks are threads of this process")
    parser.add_argument("--program", type=int, help="run this program only")
    parser.add_argument("--repeat", type=int, default=1, help="how often each program runs, in a row")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--keep-on", action="store_true", help="after a failure go on, with new ranks")
    a = parser.parse_args()
    sizes = [int(n) for n in a.ranks.split(",")]
    stress = stress_threads if a.threads else stress_processes
    every = range(a.first, a.first + a.programs) if a.program is None else [a.program]
    start, total, failed = time.monotonic(), 0, []
    for i, size in enumerate(sizes):
        todo = [n for n in every if n % len(sizes) == i for _ in range(a.repeat)]
        while todo:
            done, number, text, kinds = stress(a.seed, todo, size)
            total += done
            print(f"{size} ranks: {done} programs {kinds}", flush=True)
            if number is None:
                break
            failed.append(number)
            options = f"--seed {a.seed} --ranks {a.ranks} {'--threads ' if a.threads else ''}"
            print(f"{text}\nFAILED. To repeat: python tests/stress_programs.py {options}--program {number} "
                  f"--repeat 200", flush=True)
            if not a.keep_on:
                break
            todo = todo[done + 1 :]
    seconds = time.monotonic() - start
    print(f"{total} programs, {seconds:.0f} s, {total / seconds:.1f}/s, "
          + (f"FAILED: {len(failed)}: {failed}" if failed else "no difference"), flush=True)
    sys.stdout.flush()
    os._exit(1 if failed else 0)  # without cleanup, because threads may still wait


if __name__ == "__main__":
    main()
