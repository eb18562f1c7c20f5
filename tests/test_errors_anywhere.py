"""An exception at any place of a call on one rank: the other ranks learn of it, and the next call works.

A program makes the calls of a layer.  A profile function counts what Python calls inside of epmoe, and raises
an exception at the n-th call on rank BAD, for every place in the source from which something is called.  So
the test knows no place by name: it finds those that a later change adds.
"""

import contextlib
import functools
import os
import sys

import pytest
import torch

import epmoe
from call_cases import fake
from cases import check_outcomes, generator, keep, outcome
from pace import slowness

BAD = 1
HERE = os.path.dirname(epmoe.__file__)
NUM_TOKENS, HIDDEN, INNER, TOPK = 6, 128, 128, 2
# What runs before a call or after its last operation, what tells the other ranks, and what only looks at
# flags of torch, to learn which operation is next (path_of, is_traced).
OUTSIDE = {"forward", "_propagate", "_propagate_now", "status_of", "is_watched", "layer_of", "unflatten",
           "_by_token", "cast", "deferred_wgrad_of", "_weigh", "row_dots", "path_of", "is_traced"}


class Injected(Exception):
    pass


class Places:
    """Counts the calls from epmoe to other code, in this thread.  Raises at one of them.

    Calls of the module are not counted: it tells the other ranks by itself.
    """

    def __init__(self, at=None):
        self.at, self.num, self.first = at, 0, {}

    def __enter__(self):
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _see(self, frame, event, function):
        if event == "call" and not frame.f_code.co_filename.startswith(HERE):
            frame = frame.f_back
        elif event != "c_call" or getattr(function, "__module__", None) in ("builtins", "epmoe._C"):
            return
        code = frame.f_code if frame else None
        if not code or not code.co_filename.startswith(HERE) or is_outside(frame):
            return
        self.first.setdefault((code.co_filename, frame.f_lasti), self.num)
        self.num += 1
        if self.num - 1 == self.at:
            raise Injected(f"{code.co_filename}:{frame.f_lineno}, {code.co_name}")


def is_outside(frame):
    name = frame.f_code.co_name
    return (name in OUTSIDE or name.startswith("_save") or os.path.basename(frame.f_code.co_filename)
            in ("errors.py", "world.py", "heap.py", "error_propagation.py"))


def tensors(world, dtype):
    g = generator(11, world.rank)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=g).to(dtype)
    idx = torch.randint(0, 2 * world.size, (NUM_TOKENS, TOPK), generator=g)
    return x, idx, torch.rand(NUM_TOKENS, TOPK, generator=g)


def make_moe(world, dtype, with_grad=False, backward=False, **options):
    torch.manual_seed(0)
    options = {"max_tokens": 64} | options
    moe = epmoe.EPMoE(HIDDEN, INNER, 2 * world.size, TOPK, world, dtype=dtype, device="cpu", **options)
    keep(world, moe)
    x, idx, weight = tensors(world, dtype)
    return run_of(lambda: (moe(x, idx, weight),), with_grad, backward, x, weight)


def run_of(forward, with_grad, backward, *leaves):
    """Return (before, program): what prepares a program, and the program, which gets what that returned."""
    for t in leaves:
        t.requires_grad_(with_grad)
    if backward:
        def before():
            for t in leaves:
                t.grad = None
            return forward()[0].float().sum()

        def program(y):
            y.backward()
            return [t.grad for t in leaves]

        return before, program

    def run(_):
        with torch.set_grad_enabled(with_grad):
            return [t.detach() for t in forward()]

    return lambda: None, run


def make_layer(world, kind, dtype, calls, with_grad=False, backward=False, **options):
    layer = kind(world, NUM_TOKENS, HIDDEN, TOPK, num_tot_experts=2 * world.size, dtype=dtype, device="cpu",
                 **options)
    keep(world, layer)
    x, idx, weight = tensors(world, dtype)
    return run_of(lambda: (calls(layer, x, idx, weight),), with_grad, backward, x, weight)


def stages(layer, x, idx, weight):
    layout = layer.preprocess(idx)
    rows, row_weight, layout = layer.dispatch(x, weight=weight, layout=layout)
    return layer.combine(rows, layout, row_weight)


def direct_stages(layer, x, idx, weight):
    rows, row_weight, layout = layer.dispatch(x, idx, weight)
    return layer.combine(rows, layout, row_weight)


def fused(layer, x, idx, weight):
    w = torch.ones(2, HIDDEN, HIDDEN, dtype=x.dtype) / 64
    rows, row_weight, layout = layer.mega_dispatch_group_gemm(x, idx, weight=weight, gemm_weight=w,
                                                              activation="relu2")
    return layer.mega_group_gemm_combine(rows, w, layout, row_weight)


def fp8(layer, x, idx, weight):
    rows, scales, row_weight, layout = layer.dispatch_fp8(x, idx, weight)
    return layer.combine(rows.to(x.dtype), layout, row_weight)


def make_low_latency(world):
    a2a = epmoe.LowLatencyAll2All(world, NUM_TOKENS, HIDDEN, TOPK, 2 * world.size, device="cpu")
    keep(world, a2a)
    x, idx, weight = tensors(world, torch.bfloat16)

    def run(_):
        rows, _, _, handle = a2a.dispatch(x, idx, weight, layout="compact")
        return [a2a.combine(rows, handle)]

    return lambda: None, run


F32, BF16 = torch.float32, torch.bfloat16
LAYER, FUSED = epmoe.EPAll2AllLayer, epmoe.EpAll2AllFusedOp
PROGRAMS = {
    "module-f32": functools.partial(make_moe, dtype=F32),
    "module-f32-grad": functools.partial(make_moe, dtype=F32, with_grad=True),
    "module-bf16": functools.partial(make_moe, dtype=BF16),
    "module-bf16-grad": functools.partial(make_moe, dtype=BF16, with_grad=True, bias=True),
    "module-bf16-backward": functools.partial(make_moe, dtype=BF16, with_grad=True, backward=True, bias=True),
    "module-fp8": functools.partial(make_moe, dtype=BF16, weight_dtype=torch.float8_e4m3fn),
    "module-int4": functools.partial(make_moe, dtype=BF16, weight_dtype="int4"),
    "module-decode": functools.partial(make_moe, dtype=BF16, max_tokens=NUM_TOKENS),
    "stages": functools.partial(make_layer, kind=LAYER, dtype=F32, calls=stages),
    "stages-grad": functools.partial(make_layer, kind=LAYER, dtype=F32, calls=direct_stages, with_grad=True),
    "stages-backward": functools.partial(make_layer, kind=LAYER, dtype=F32, calls=direct_stages,
                                         with_grad=True, backward=True),
    "fp8": functools.partial(make_layer, kind=LAYER, dtype=BF16, calls=fp8),
    "fused": functools.partial(make_layer, kind=FUSED, dtype=BF16, calls=fused),
    "fused-grad": functools.partial(make_layer, kind=FUSED, dtype=BF16, calls=fused, with_grad=True),
    "fused-copies": functools.partial(make_layer, kind=FUSED, dtype=BF16, calls=fused, token_saving=False),
    "low-latency": make_low_latency,
}


def run_places(world, device, name):
    """Run a program with an exception at each place.  Return {place: outcomes}, and whether all was right."""
    before, program = PROGRAMS[name](world)
    want = program(before())
    program(before())  # the second call goes other ways: rooms for outputs are known
    ready = before()
    with Places() as places:
        program(ready)
    left = sorted(places.first.values())
    world.set_timeout(10 * slowness())
    got, is_right = [], True
    while (at := said_by_bad(world, str(left.pop() if left else ""))):
        ready = before()

        def call():
            with Places(int(at)) if world.rank == BAD else contextlib.nullcontext():
                program(ready)

        own = outcome(call)
        got.append((said_by_bad(world, own.text), own))
        is_right = all(torch.equal(a, b) for a, b in zip(program(before()), want)) and is_right
    return got, is_right


def said_by_bad(world, text):
    return world.exchange(text.encode()[:400].ljust(400))[BAD].decode(errors="replace").strip()


@pytest.mark.cpu_only
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_errors_at_any_place(ranks, name, num_ranks):
    results = ranks(run_places, name, world_size=num_ranks)
    assert all(is_right for _, is_right in results)
    outcomes = list(zip(*(got for got, _ in results)))
    num_raised = 0
    for at_place in outcomes:
        place, own = at_place[BAD]
        others = [got for rank, (_, got) in enumerate(at_place) if rank != BAD]
        # Nothing is raised at a place where epmoe knows what to do, as without memory for a room.
        num_raised += bool(own.kinds)
        kinds = {o.kind for o in others}
        assert kinds == {"nothing"} or kinds == {"PeerError"} and own.kinds, (place, *map(str, others))
        check_outcomes(others, others[0].kind)
    assert num_raised > 5


# ---- what torch's dispatcher would refuse, or take for something else ----


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as a DTensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:  # nn.Parameter calls it
            return cls(args[0])
        raise NotImplementedError("got mixed tensors")


def change_parameter(change):
    def apply(moe, arguments):
        moe.down_proj = change(moe.down_proj.detach())

    return apply


def change_argument(at, change):
    def apply(moe, arguments):
        arguments[at] = change(arguments[at].detach())

    return apply


def change_activation(moe, arguments):
    moe.activation = "nope"


PLAIN = "no memory of its own"
FOREIGN = {
    "x-fake": (change_argument(0, fake), "TypeError", ("x", "FakeTensor", PLAIN)),
    "x-wrapper": (change_argument(0, Wrapper), "Error", ()),
    "idx-fake": (change_argument(1, fake), "TypeError", ("topk_idx", PLAIN)),
    "weights-fake": (change_argument(2, fake), "TypeError", ("topk_weights", PLAIN)),
    "down-wrapper": (change_parameter(lambda p: torch.nn.Parameter(Wrapper(p))), "TypeError",
                     ("down_proj", "Wrapper", PLAIN)),
    "down-meta": (change_parameter(lambda p: torch.nn.Parameter(p.to("meta"))), "ValueError",
                  ("down_proj", "meta", "cpu")),
    "down-none": (change_parameter(lambda p: None), "TypeError", ("down_proj", "NoneType")),
    "down-strided": (change_parameter(lambda p: torch.nn.Parameter(p.repeat(1, 1, 2)[..., ::2])),
                     "ValueError", ("down_proj", "contiguous")),
    "activation": (change_activation, "ValueError", ("activation", "nope")),
}


def run_foreign(world, device, name, dtype, max_tokens):
    torch.manual_seed(0)
    moe = epmoe.EPMoE(HIDDEN, INNER, 2 * world.size, TOPK, world, dtype=dtype, device="cpu",
                      max_tokens=max_tokens)
    keep(world, moe)
    want = moe(*tensors(world, dtype))
    got = []
    for with_grad in (True, False):
        arguments, before, activation = list(tensors(world, dtype)), moe.down_proj, moe.activation
        world.exchange(b"go")
        if world.rank == BAD:
            FOREIGN[name][0](moe, arguments)
        with torch.set_grad_enabled(with_grad):
            got.append(outcome(lambda: moe(*arguments)))
        moe.down_proj, moe.activation = before, activation
        again = moe(*tensors(world, dtype))
    return got, torch.equal(again, want)


@pytest.mark.cpu_only
@pytest.mark.parametrize("max_tokens", [64, NUM_TOKENS], ids=["layer", "decode"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("name", FOREIGN)
def test_errors_of_foreign_tensors(ranks, name, dtype, max_tokens):
    _, error, texts = FOREIGN[name]
    if name == "down-strided" and max_tokens == NUM_TOKENS:
        return  # decoding takes it
    results = ranks(run_foreign, name, dtype, max_tokens, world_size=3, timeout_s=60)
    for outcomes in zip(*(got for got, _ in results)):
        wanted = ["PeerError", outcomes[BAD].kind if error == "Error" else error, "PeerError"]
        check_outcomes(outcomes, wanted, *texts, on_rank=BAD, elsewhere=(f"rank {BAD}",))
        assert outcomes[BAD].kinds
    assert all(is_right for _, is_right in results)
