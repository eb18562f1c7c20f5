"""EPMoE under torch.jit.trace, make_fx, FlopCounterMode and torch.func, which EPMoE does not support."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import epmoe
from cases import check_outcomes, generator, keep, outcome
from pace import HANG_S


def make(world, device, capacity):
    torch.manual_seed(0)
    moe = epmoe.EPMoE(16, 24, 2 * world.size, 2, world, max_tokens=8, dtype=torch.float32, device=device,
                      capacity=16 * world.size if capacity else None)
    keep(world, moe)
    return moe


def inputs(world, device, seed):
    g = generator(seed, world.rank)
    x = torch.randn(8, 16, generator=g).to(device)
    idx = torch.rand(8, 2 * world.size, generator=g).topk(2).indices.to(device)
    return x, idx, torch.rand(8, 2, generator=g).to(device)


def traced(world, device, how, capacity):
    """Trace one call, and compare traced and normal calls on other inputs. Returns whether each is equal."""
    moe = make(world, device, capacity)
    with torch.no_grad():
        first, second = inputs(world, device, 1), inputs(world, device, 2)
        again = torch.jit.trace(moe, first, check_trace=False) if how == "jit" else make_fx(moe)(*first)
        same = [torch.equal(again(*given), moe(*given)) for given in (second, first)]
        with FlopCounterMode(display=False):
            same.append(torch.equal(moe(*second), again(*second)))
    moe.finalize()
    return same


@pytest.mark.parametrize("capacity", [False, True], ids=["exact", "capacity"])
@pytest.mark.parametrize("how", ["jit", "fx"])
def test_moe_traced_calls_are_right(ranks, how, capacity):
    for same in ranks.isolated(traced, how, capacity, world_size=2, timeout_s=HANG_S):
        assert same == [True, True, True]


def refused(world, device, options):
    """The outcomes of traces on all ranks and on one, and after each whether a normal call is right."""
    moe = epmoe.EPMoE(64, 64, 2 * world.size, 2, world, max_tokens=1024, device=device, **options)
    keep(world, moe)
    if "compute_dtype" not in options:
        moe.add_adapter("a", 8, 16)
        moe.set_adapter("a")
    g = generator(5, world.rank)
    x = torch.randn(8, 64, generator=g).bfloat16().to(device)
    idx = torch.rand(8, 2 * world.size, generator=g).topk(2).indices.to(device)
    args, found = (x, idx, torch.rand(8, 2, generator=g).to(device)), []
    with torch.no_grad():
        want = moe(*args)
        for of_all in (True, False):
            for trace in (lambda: torch.jit.trace(moe, args, check_trace=False), lambda: make_fx(moe)(*args)):
                traces = of_all or world.rank == 0
                found.append(outcome(lambda: (trace() if traces else moe(*args)) is None, moe.layer))
                found.append(torch.equal(moe(*args), want))
    moe.layer.synchronize()
    moe.finalize()
    return found


@pytest.mark.parametrize("options", [{"compute_dtype": torch.float8_e4m3fn},
                                     {"compute_dtype": torch.float8_e4m3fn, "weight_dtype": "mxfp4"},
                                     {}, {"weight_dtype": "mxfp4"}], ids=str)
def test_moe_traced_with_what_tracers_do_not_see(ranks, options):
    """make_fx would give a program that returns other numbers."""
    results = ranks.isolated(refused, options, world_size=2, timeout_s=HANG_S)
    outcomes = list(zip(*results))
    for got in outcomes[0], outcomes[2]:
        check_outcomes(got, "NotImplementedError", "take torch.compile")
    for got in outcomes[4], outcomes[6]:
        check_outcomes(got, ["NotImplementedError"] + ["PeerError"] * (len(results) - 1))
    assert all(all(is_right) for is_right in outcomes[1::2])


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype, strict", [(torch.float32, False), (torch.bfloat16, True)])
def test_moe_is_not_exported(dtype, strict):
    """An exported program would name the layer by its number, which is another layer in another process."""
    moe = epmoe.EPMoE(16, 16, 4, 2, max_tokens=8, dtype=dtype, device="cpu")
    args = torch.ones(4, 16, dtype=dtype), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    with pytest.raises(RuntimeError, match="torch.export: a layer of epmoe is memory that the ranks"):
        torch.export.export(moe, args, strict=strict)
    assert moe(*args).shape == (4, 16)
    moe.finalize()


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
}


def transformed(world, device, name):
    """Returns (the outcome of a transform of torch.func, whether a normal call after it is still right)."""
    moe = make(world, device, False)
    x, idx, weight = inputs(world, device, 3)
    before = moe(x, idx, weight)
    got = outcome(lambda: TRANSFORMS[name](lambda x: moe(x, idx, weight), x) and None, moe.layer)
    after = moe(x, idx, weight)
    moe.layer.synchronize()
    moe.finalize()
    return got, torch.equal(before, after)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_moe_rejects_torch_func(ranks, name):
    """Without this error, torch.func would silently give zero gradients."""
    results = ranks.isolated(transformed, name, world_size=2, timeout_s=HANG_S)
    check_outcomes([got for got, _ in results], "NotImplementedError",
                   "epmoe does not support torch.func's transforms")
    assert all(same for _, same in results)
