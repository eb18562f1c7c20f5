"""Random batches of the same tokens: the results of a token must not depend on the others, nor on the way.

    torchrun --nproc-per-node 4 tests/soak_batches.py [-n 100000] [--shape qwen3-30b] [--dtype fp8]

The options are those of soak_fused.py.  Each batch has a pool of tokens with their choices, weights and
gradients of the output, and modules with the same experts and other numbers of tokens, capacities, SMs and
ways: fused, in stages, decoding, in a CUDA graph.  In each step random tokens of the pool, in a random order
and on random ranks, go through one of the modules, with gradients or without.  The output of each token, and
the gradients of the token and of its routing weights, must have the bits that the whole pool gave at first.
--shape: random small sizes, or a shape of the benchmarks.  --dtype fp8, mxfp4 or int4: experts in this
format, without gradients.  With 4 bits the tokens are in bfloat16 or float16, and INT4 has groups of any size
with or without zero points.
--tokens: the most tokens of a pool.
Without GPUs, the ranks are threads on the CPU.
"""

import random
import sys

import torch

import epmoe
from benchmarks.check import poisoned
from benchmarks.shapes import SHAPES
from cases import generator
from soak_fused import main

ACTIVATIONS = ("swiglu", "gpt_oss", "gelu", "geglu_tanh", "relu2", "silu", epmoe.SwiGLU(1.3, 3.0, 1))
MOST_TOKENS = {"cpu": 60, "cuda": 3000}  # of a pool
FEW = 16  # tokens of a module that decodes
# --dtype of experts that are quantised: H and I are multiples of the first number, at most so many times
UNITS = {"fp8": (128, (5, 3)), "mxfp4": (64, (10, 6)), "int4": (64, (10, 6))}


class Sizes:
    def __init__(self, r, shape, size, on_gpu, dtype, most_tokens):
        if shape == "random":
            unit, most = UNITS.get(dtype, (16, (40, 24)))
            self.hidden, self.inner = (unit * r.randint(1, n) for n in most)
            self.num_experts = size * r.randint(1, 9)
            self.topk = r.randint(1, min(6, self.num_experts))
            self.activation, self.bias = r.choice(ACTIVATIONS), r.random() < 0.3
        else:
            s = SHAPES[shape] if on_gpu else SHAPES[shape].small()
            self.hidden, self.inner, self.num_experts, self.topk = s.hidden, s.inner, s.experts, s.topk
            self.activation, self.bias = "swiglu", False
        self.num_tokens = r.randint(1, most_tokens or MOST_TOKENS["cuda" if on_gpu else "cpu"])
        self.dtype = torch.bfloat16 if dtype in UNITS else getattr(torch, dtype)
        self.weight_dtype = {"fp8": torch.float8_e4m3fn, "mxfp4": "mxfp4"}.get(dtype)
        if dtype in ("mxfp4", "int4"):
            self.dtype = r.choice((torch.bfloat16, torch.float16))
        if dtype == "int4":
            groups = [g for g in (32, 64, 128) if self.hidden % g == self.inner % g == 0]
            self.weight_dtype = epmoe.Int4(r.choice(groups), r.random() < 0.5)


def make_modules(world, device, r, s):
    """{name: an EPMoE}, all with the same experts."""
    options = dict(hidden=s.hidden, inner=s.inner, num_experts=s.num_experts, topk=s.topk,
                   ep_group=world, activation=s.activation, bias=s.bias, device=device,
                   dtype=s.dtype, weight_dtype=s.weight_dtype,
                   rank_invariant=r.random() < 0.3 and not isinstance(world, epmoe.Nodes))
    most = s.num_tokens
    ways = {"default": {}, "fused": {"fused": True}, "stages": {"fused": False},
            "capacity": {"capacity": world.size * most * s.topk} | (
                {"rail_capacity": most} if isinstance(world, epmoe.Nodes) else {}),
            "other sizes": {"max_tokens": most + r.randint(1, 99), "num_sm": r.randint(1, 8),
                            "token_sorting": False, "reserve_sms": 16 if device.type == "cuda" else 0},
            "few": {"max_tokens": min(most, FEW)},
            "few, fused": {"max_tokens": min(most, FEW), "fused": True}}
    first, modules = None, {}
    for name, way in ways.items():
        moe = epmoe.EPMoE(**options | {"max_tokens": most} | way)
        if first is None:
            first = moe
        else:  # the same parameters, not copies: a large shape fits once
            for key, p in first.named_parameters():
                setattr(moe, key, p)
            for key, b in first.named_buffers():
                setattr(moe, key, b)
        modules[name] = moe
    return modules


class Pool:
    """Tokens with their choices, routing weights and gradients of the output; the same on all ranks."""

    def __init__(self, s, dtype, device, *seeds):
        g = generator(*seeds)
        n = s.num_tokens
        self.x, self.dy = (torch.randn(n, s.hidden, generator=g).to(device, dtype) for _ in range(2))
        self.idx = torch.rand(n, s.num_experts, generator=g).argsort(1)[:, : s.topk].contiguous()
        gone = torch.rand(self.idx.shape, generator=g)
        self.idx = torch.where(gone < 0.05, -1, torch.where(gone > 0.95, s.num_experts, self.idx)).to(device)
        self.weight = torch.rand(n, s.topk, generator=g).to(device)


def replayed(moe, *args, **options):
    """y of the replay of a CUDA graph."""
    moe(*args, **options)  # creates what a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(*args, **options)
    y.fill_(float("nan"))
    graph.replay()
    return y


def results(moe, pool, tokens, trains, call=epmoe.EPMoE.__call__, **options):
    """[y, dx, the gradients of the routing weights] of tokens, as integers; only y if nothing trains."""
    x, idx, weight, dy = (t[tokens] for t in (pool.x, pool.idx, pool.weight, pool.dy))
    with torch.set_grad_enabled(trains):
        if trains:
            x, weight = x.requires_grad_(), weight.requires_grad_()
        y = call(moe, x, idx, weight, **options)
        found = [y, *torch.autograd.grad(y, [x, weight], dy)] if trains else [y]
    return [t.detach().view(torch.int16 if t.element_size() == 2 else torch.int32) for t in found]


def run_batch(world, device, seed, number, num_steps, graph, shape="random", dtype="bfloat16", tokens=0):
    """The number of steps with a wrong result."""
    r = random.Random(f"{seed} {number} {world.size}")  # the same on all ranks
    s = Sizes(r, shape, world.size, device.type == "cuda", dtype, int(tokens))
    torch.manual_seed(r.randrange(1 << 30))
    modules = make_modules(world, device, r, s)
    pool = Pool(s, s.dtype, device, seed, number, world.size)
    everything = torch.arange(s.num_tokens, device=device)
    may_train = dtype not in UNITS
    wanted = results(modules["default"], pool, everything, may_train)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    names = list(modules)
    for n in range(num_steps):
        name = r.choice(names)
        moe, trains = modules[name], may_train and r.random() < 0.4
        most = moe.layer.max_tokens // moe.layer._copies
        counts = [min(most, int(2 ** (r.random() * 13)) - 1) for _ in range(world.size)]
        order = r.sample(range(s.num_tokens), min(s.num_tokens, sum(counts)))
        begin = sum(counts[: world.rank])
        mine = torch.tensor(order[begin : begin + counts[world.rank]], dtype=torch.int64).to(device)
        options = {} if trains or r.random() < 0.5 or dtype == "fp8" else {"decode": False}
        # What waits for the number of rows on the host cannot be captured.
        if graph and device.type == "cuda" and not trains and r.random() < 0.3 and (
                moe.layer.capacity is not None or name == "few" and not options and moe.layer.may_decode):
            options["call"] = replayed
        with poisoned():
            found = results(moe, pool, mine, trains, **options)
        differ = [(a != b[mine]).any() for a, b in zip(found, wanted)]
        wrong += torch.stack(differ).any()
        if n % 50 == 49:
            moe.layer.synchronize()
    for moe in modules.values():
        moe.layer.synchronize()
        moe.finalize()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(run_batch, "soak_batches", "random batches", 2000, shape="random", dtype="bfloat16",
                  tokens=0))
