"""The sizes that EPMoE accepts. Errors of EPMoE.forward name the argument as the caller does."""

import threading

import pytest
import torch

import epmoe
from cases import process_ranks
from epmoe import reference
from epmoe.testing import run_threads
from outcomes import check_outcomes, outcome
from pace import HANG_S

pytestmark = pytest.mark.cpu_only

CASES = {
    "x dtype": (lambda x, i, w: (x.double(), i, w), "TypeError", "x: wanted torch.float32"),
    "index dtype": (lambda x, i, w: (x, i.float(), w), "TypeError", "topk_idx: wanted int32 or int64"),
    "weight dtype": (lambda x, i, w: (x, i, w.long()), "TypeError", "topk_weights: wanted a floating-point"),
    "index tokens": (lambda x, i, w: (x, i[:3], w), "ValueError", "x has 4 tokens, but topk_idx has 3"),
    "weight tokens": (lambda x, i, w: (x, i, w[:3]), "ValueError", "x has 4 tokens, but topk_weights has 3"),
    "too many": (lambda *a: [torch.cat([t] * 3) for t in a], "ValueError", "x has 12 tokens: must be"),
    "index device": (lambda x, i, w: (x, i.to("meta"), w), "ValueError", "topk_idx: wanted a tensor on cpu"),
    "weight negated": (lambda x, i, w: (x, i, torch._neg_view(w)), "ValueError", "is a negated"),
    "weight device": (lambda x, i, w: (x, i, w.to("meta")), "ValueError", "topk_weights: wanted a tensor on"),
}
# What the module says of them.
IN_C = {"x dtype": "x: wanted bfloat16", "index tokens": "topk_idx: wanted size 4 in dimension 0, got 3",
        "weight tokens": "topk_weights: wanted size 4 in dimension 0, got 3"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decode", [False, None, True])
@pytest.mark.parametrize("name", CASES)
def test_moe_arguments_are_named_as_in_the_call(name, decode, dtype):
    """In 16 bits the module checks them, in float32 Python does."""
    change, kind, text = CASES[name]
    if dtype == torch.bfloat16:
        text = IN_C.get(name, text)

    def main(world):
        moe = epmoe.EPMoE(16, 32, 4, 2, world, max_tokens=8, dtype=dtype, device="cpu")
        if decode:
            moe.enable_decode(8)
        good = torch.randn(4, 16, dtype=dtype), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
        with torch.no_grad():
            got = outcome(lambda: moe(*(change(*good) if world.rank else good), decode=decode))
            again = outcome(lambda: moe(*good, decode=decode))
        moe.finalize()
        return got, again

    (peer, first), (wrong, second) = run_threads(main, 2)
    assert peer.kind == "PeerError" and "rank 1" in peer.text, peer
    assert wrong.kind == kind and text in wrong.text, wrong
    assert first.kinds == second.kinds == (), (first, second)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_moe_inner_size_must_be_positive(activation):
    """The smallest inner size is 1."""
    for inner in (0, -1):
        with pytest.raises(ValueError, match=f"inner {inner}: must be positive"):
            epmoe.EPMoE(16, inner, 4, 2, None, activation, device="cpu")
    torch.manual_seed(0)
    moe = epmoe.EPMoE(16, 1, 4, 2, None, activation, max_tokens=8, dtype=torch.float32, device="cpu")
    x, weight = torch.randn(5, 16), torch.rand(5, 2)
    idx = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, -1]])
    with torch.no_grad():
        y = moe(x, idx, weight)
        want = reference.moe(x, idx, weight, moe.gate_up_proj, moe.down_proj, activation)
    assert want.any() and torch.allclose(y, want, rtol=1e-4, atol=1e-5)
    moe.finalize()


TWO = torch.ones(2)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{name: TWO} for name in (
    "hidden", "inner", "num_experts", "topk", "max_tokens", "bias", "capacity", "num_physical", "num_chunks",
    "delay_wgrad_compute", "fuse_wgrad_accumulation", "token_saving", "token_sorting", "block_wise_barrier",
    "enable_local_combine", "rank_invariant", "fused", "num_sm", "num_buffers", "reserve_sms",
    "rail_capacity", "activation")]
    + [{"no memory": torch.empty}, {"no memory": torch.randint}, {"delay_wgrad_compute": True,
                                                                  "weight_dtype": torch.float8_e4m3fn}],
    ids=lambda options: " ".join(options) + str(getattr(options.get("no memory"), "__name__", "")))
def test_moe_is_made_by_all_ranks_or_by_none(monkeypatch, options, size):
    """What one rank cannot make is an error on all, and the next module works."""
    fails = options.get("no memory")
    real, bad = fails, threading.local()
    if fails:
        def make(*args, **kwargs):
            is_right = fails is torch.empty and kwargs.get("dtype") is not torch.float32
            if getattr(bad, "on", False) and not is_right:
                raise torch.OutOfMemoryError("no memory")
            return real(*args, **kwargs)

        monkeypatch.setattr(torch, fails.__name__, make)

    def main(world):
        sizes = {"hidden": 16, "inner": 32, "num_experts": 2 * size, "topk": 2, "max_tokens": 8,
                 "dtype": torch.float32, "device": "cpu"}
        bad.on = world.rank == 1
        mine = sizes | (options if world.rank == 1 and not fails else {})
        got = outcome(lambda: epmoe.EPMoE(ep_group=world, **mine))
        bad.on = False
        with torch.no_grad():
            moe = epmoe.EPMoE(ep_group=world, **sizes)
            y = moe(torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
        moe.finalize()
        return got, bool(y.isfinite().all())

    results = run_threads(main, size, timeout_s=30.0)
    for rank, (got, is_right) in enumerate(results):
        assert is_right and (got.kind == "PeerError") == (rank != 1) and got.kinds, (rank, str(got))
        assert "rank 1" in got.text or rank == 1, got


def test_moe_sizes_must_be_integers():
    for sizes in ((32.5, 32, 2, 1), (32, 32.5, 2, 1), (32, 32, 2.5, 1)):
        with pytest.raises(ValueError, match="must be an integer"):
            epmoe.EPMoE(*sizes, device="cpu")
    moe = epmoe.EPMoE(32.0, 32, 2, 1, device="cpu:0")
    y = moe(torch.ones(1, 32, dtype=torch.bfloat16), torch.tensor([[0]]), torch.ones(1, 1))
    assert y.shape == (1, 32)
    moe.finalize()


def pass_a_dtensor(rank, world_size):
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    got = []
    for dtype in (torch.float32, torch.bfloat16):
        moe = epmoe.EPMoE(16, 32, 4, 2, max_tokens=512, dtype=dtype, device="cpu")
        good = torch.randn(4, 16, dtype=dtype), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
        for at in range(3):
            given = list(good)
            if rank == 1:
                given[at] = DTensor.from_local(good[at], mesh, [Shard(0)], run_check=False)
            got.append(outcome(lambda: moe(*given)))
        got.append(outcome(lambda: moe(*good)))
        moe.finalize()
    return got


def test_moe_refuses_a_dtensor():
    """On one rank only.  Its error says to_local()."""
    peer, wrong = process_ranks(pass_a_dtensor, 2, timeout_s=HANG_S)
    for i in range(8):
        if i % 4 == 3:
            assert peer[i].kinds == wrong[i].kinds == ()
            continue
        name = ("x", "topk_idx", "topk_weights")[i % 4]
        check_outcomes([peer[i], wrong[i]], ["PeerError", "TypeError"], f"{name}.to_local()", on_rank=1,
                       elsewhere=("rank 1",), within_s=5)
