"""EPMoE takes the low-latency path where its shape decides so, and only where no gradient is wanted."""

import copy

import pytest
import torch

import epmoe
from cases import generator, misaligned, same_bits
from epmoe import _C
from epmoe.a2a.base import NO_CONFIG
from gemm_cases import BLIND, kernel_names, needs_hopper
from outcomes import check_outcomes, outcome

SIZES = dict(hidden=64, inner=32, num_experts=24, topk=2)


def make(world, device, max_tokens=8, **options):
    torch.manual_seed(3)
    return epmoe.EPMoE(**SIZES, ep_group=world, max_tokens=max_tokens, device=device, **options)


def inputs(moe, seed, num_tokens=None):
    g = generator(seed, moe.layer.rank)
    t = (moe.layer.rank * 3 + seed) % 9 if num_tokens is None else num_tokens
    weights, idx = torch.randn(t, 24, generator=g).softmax(-1).topk(2)
    x = torch.randn(t, 64, generator=g).to(moe.layer.dtype)
    return [v.to(moe.layer.device) for v in (x, idx, weights)]


@pytest.mark.parametrize("shape, wanted", [
    ((1, 8, 288, 4), True), ((128, 8, 288, 4), True), ((512, 8, 288, 4), False), ((8192, 8, 256, 8), False),
    ((512, 1, 1024, 8), True), ((513, 1, 1024, 8), False)])
def test_moe_decode_depends_on_the_shape(shape, wanted):
    max_tokens, topk, num_experts, ranks = shape
    config = NO_CONFIG._replace(ranks=ranks, num_experts=num_experts, topk=topk, max_tokens=max_tokens,
                                fused=2, combine_mode=_C.COMBINE_LOCAL)
    assert _C.layer_decodes(config) == wanted
    assert not _C.layer_decodes(config._replace(fused=1))
    assert _C.layer_decodes(config._replace(combine_mode=_C.COMBINE_SCATTER)) == wanted


def test_moe_decode_path_for_fewer_tokens(ranks):
    """enable_decode of fewer tokens than the module has: a call without decode takes the stages."""
    def run(world, device):
        moe = epmoe.EPMoE(64, 32, 48 * world.size, 2, world, max_tokens=40, device=device)
        few, many = inputs_of_tokens(moe, 5), inputs_of_tokens(moe, 40)
        with torch.no_grad():
            want = moe(*few, decode=False), moe(*many, decode=False)
            moe.enable_decode(16)
            found = moe(*few), moe(*many), moe(*few, decode=True)
        took = moe.last_layout is None
        moe.finalize()
        return found, want, took

    for (few, many, decoded), want, took in ranks(run):
        same_bits(few, want[0], "few tokens")
        same_bits(many, want[1], "many tokens")
        same_bits(decoded, want[0], "decode=True")
        assert took


def inputs_of_tokens(moe, num_tokens):
    g = generator(7, moe.layer.rank)
    weights, idx = torch.randn(num_tokens, moe.num_experts, generator=g).softmax(-1).topk(2)
    x = torch.randn(num_tokens, 64, generator=g).to(moe.layer.dtype)
    return [v.to(moe.layer.device) for v in (x, idx, weights)]


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"token_saving": False},
                                     {"weight_dtype": torch.float8_e4m3fn}], ids=str)
def test_moe_takes_tokens_at_any_address(ranks, options):
    """Kernels need addresses that are multiples of 16. Tokens may be a part of a larger tensor."""
    def run(world, device):
        moe = epmoe.EPMoE(128, 128, 48 * world.size, 2, world, max_tokens=40, device=device, **options)
        g = generator(8, world.rank)
        weights, idx = (t.to(device) for t in torch.rand(7, moe.num_experts, generator=g).topk(2))
        x = torch.randn(7, 128, generator=g).to(device, moe.layer.dtype)
        with torch.no_grad():
            found = [(moe(misaligned(x), idx, misaligned(weights), decode=decode),
                      moe(x, idx, weights, decode=decode)) for decode in (None, False)]
        moe.finalize()
        return found

    for found in ranks(run):
        for got, want in found:
            same_bits(got, want, "y")


@pytest.mark.parametrize("options", [
    {}, {"activation": "gpt_oss"}, {"bias": True}, {"dtype": torch.float32}, {"rank_invariant": True},
    {"rank_invariant": True, "dtype": torch.float16},
    {"enable_local_combine": False, "combine_mode": "gather"}], ids=str)
def test_moe_decode_has_the_bits_of_the_stages(ranks, options):
    def run(world, device):
        moe, results = make(world, device, **options), []
        for seed in range(6):
            with torch.no_grad():
                args = inputs(moe, seed)
                results.append((moe(*args), moe(*args, decode=False)))
        took_path = moe.layer.low_latency is not None and moe.last_layout is not None
        moe.finalize()
        return results, took_path

    for results, took_path in ranks(run):
        assert took_path
        for fast, slow in results:
            assert torch.equal(fast, slow)


def test_moe_decode_beside_prefill(ranks):
    """One module prefills, and decodes where it is told to."""

    def run(world, device):
        moe = make(world, device, max_tokens=2048)
        moe.enable_decode(8)
        results = []
        for seed in range(4):
            with torch.no_grad():
                prompt = moe(*inputs(moe, seed, num_tokens=300 + seed))
                args = inputs(moe, seed)
                results.append((moe(*args, decode=True), moe(*args), prompt.isfinite().all()))
        moe.finalize()
        return results

    for results in ranks(run):
        for fast, slow, is_finite in results:
            assert is_finite
            torch.testing.assert_close(fast, slow, rtol=1e-2, atol=1e-2)


def test_moe_decode_leaves_gradients_alone(ranks):
    def run(world, device):
        moe = make(world, device, dtype=torch.float32)
        with torch.no_grad():
            moe(*inputs(moe, 1))
        x, idx, weights = inputs(moe, 2)
        moe(x, idx, weights).square().sum().backward()
        with torch.no_grad():
            y = moe(x, idx, weights)
        grads = [p.grad.abs().sum().item() for p in moe.parameters()]
        same = torch.equal(y, moe(x, idx, weights).detach())
        moe.finalize()
        return grads, same

    results = ranks(run)
    assert all(same for _, same in results)
    assert all(any(g[i] > 0 for g, _ in results) for i in range(2))


def test_moe_decode_is_shared(ranks):
    """Modules that share a layer, and copies, share the path."""

    def run(world, device):
        first = make(world, device)
        second = epmoe.EPMoE(**SIZES, layer=first.layer)
        with torch.no_grad():
            args = inputs(first, 5)
            a, b = first(*args), second(*args)
            third = copy.deepcopy(first)
            c = third(*args)
        same = first.layer.low_latency is second.layer.low_latency is third.layer.low_latency
        first.finalize()
        return same, torch.equal(a, c), a.shape == b.shape

    assert all(all(r) for r in ranks(run))


@pytest.mark.parametrize("change, error, text", [
    (lambda m, a: m(a[0].double(), *a[1:]), "TypeError", "bfloat16"),
    (lambda m, a: m(a[0][:, :8], *a[1:]), "ValueError", "64"),
    (lambda m, a: m("x", *a[1:]), "TypeError", "str"),
    (lambda m, a: m(a[0], a[1].half(), a[2]), "TypeError", "topk_idx"),
    (lambda m, a: m(*(torch.cat([t, t, t]) for t in a)), "ValueError", "max_tokens")])
def test_moe_decode_errors(ranks, change, error, text):
    """A wrong call on one rank is an error on all, and the next call works."""

    def run(world, device):
        moe, last = make(world, device), world.rank == world.size - 1
        with torch.no_grad():
            args = inputs(moe, 3, num_tokens=4)
            moe(*args)  # creates the path
            got = outcome(lambda: change(moe, args) if last else moe(*args), moe.layer.low_latency)
            same = torch.equal(moe(*args), moe(*args, decode=False))
        moe.finalize()
        return got, same

    results = ranks(run, at_least=2)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["PeerError"] * last + [error], text, on_rank=last,
                   elsewhere=(f"rank {last}",))
    assert all(same for _, same in results)


def test_moe_decode_wants_a_path_and_no_gradient(ranks):
    def run(world, device):
        moe = make(world, device, max_tokens=2048)
        args = inputs(moe, 3)
        with torch.no_grad():
            no_path = outcome(lambda: moe(*args, decode=True))
        moe.enable_decode(8)
        twice = outcome(lambda: moe.enable_decode(8))
        gradient = outcome(lambda: moe(*args, decode=True))
        with torch.no_grad():
            moe(*args, decode=True)
        moe.finalize()
        return no_path, twice, gradient

    results = ranks(run)
    for i, (error, text) in enumerate([("ValueError", "enable_decode"), ("ValueError", "already"),
                                       ("RuntimeError", "no_grad")]):
        check_outcomes([r[i] for r in results], error, text)


@pytest.mark.parametrize("decode, meant", [(1, True), ("yes", True), (torch.tensor(True), True), (0, False),
                                           (torch.ones(2), False)], ids=str)
def test_moe_decode_takes_true_false_or_none(ranks, decode, meant):
    """The other ranks learn it in the call that it means, and the next call works."""

    def run(world, device):
        moe, last = make(world, device, max_tokens=2048), world.rank == world.size - 1
        moe.enable_decode(8)
        args = inputs(moe, 3, num_tokens=4)
        with torch.no_grad():
            got = outcome(lambda: moe(*args, decode=decode if last else meant), moe.layer)
            y = moe(*args, decode=True)
        moe.finalize()
        return got, bool(y.isfinite().all())

    results = ranks(run, at_least=2)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["PeerError"] * last + ["TypeError"],
                   "decode: wanted True, False or None", on_rank=last, elsewhere=(f"rank {last}",))
    assert all(is_finite for _, is_finite in results)


@pytest.mark.parametrize("size", [2, 3])
def test_moe_decode_leaves_buffers_to_others(ranks, size):
    """A world has 256 communication buffers.  The path takes none of the last, on any rank."""

    def run(world, device):
        size = world.size  # under torchrun, its number
        small = dict(hidden=16, inner=16, num_experts=2 * size, topk=1, ep_group=world, max_tokens=4,
                     dtype=torch.float32, device=device)
        fill = [epmoe.EPAll2AllLayer(world, 1, 16, 1, num_tot_experts=size, num_buffers=16, device=device)
                for _ in range(12)]  # with their heaps 204 buffers
        moes = [epmoe.EPMoE(**small, num_physical=4 * size) for _ in range(13)]  # 230
        args = [t.to(device) for t in (torch.randn(3, 16), torch.tensor([[0], [1], [2]]), torch.ones(3, 1))]
        with torch.no_grad():
            for moe in moes:
                moe(*args)
            paths = sum(moe.layer.low_latency is not None for moe in moes)
            moes[0].set_expert_map(epmoe.balance_experts([9] * 2 * size, size, 4 * size))
            moes.append(epmoe.EPMoE(**small))
            epmoe.SymmetricHeap(world, 1024, device).close()
        for layer in [*fill, *moes]:
            layer.finalize()
        return paths

    assert ranks(run, world_size=size) == [0] * ranks.size(size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("other", ["exchange", "heap", "layer"])
def test_moe_decode_begins_beside_another_call(ranks, size, other):
    """The first call makes the path.  One rank makes another collective call: an error on all, and the next
    call works."""

    def run(world, device):
        moe = make(world, device)
        calls = {"exchange": lambda: world.exchange(b"mine"),
                 "heap": lambda: epmoe.SymmetricHeap(world, 64, device),
                 "layer": lambda: epmoe.EPAll2AllLayer(world, 8, 16, 1, num_tot_experts=world.size,
                                                       device=device)}
        with torch.no_grad():
            args = inputs(moe, 3, num_tokens=4)
            got = outcome(lambda: moe(*args) if world.rank else calls[other]())
            same = torch.equal(moe(*args), moe(*args, decode=False))
        took_path = moe.layer.low_latency is not None
        moe.finalize()
        return got, same and took_path

    results = ranks(run, world_size=size, at_least=2)
    check_outcomes([got for got, _ in results], "EpMismatch")
    assert all(same for _, same in results)


@pytest.mark.cuda_only
def test_moe_decode_multiplies_few_rows(ranks):
    """With several ranks there is room for so many rows that a product of all of them would not be of few."""
    needs_hopper()

    def run(world, device):
        num_experts = 8 * world.size
        torch.manual_seed(3)
        moe = epmoe.EPMoE(256, 128, num_experts, 2, ep_group=world, max_tokens=64, device=device,
                          dtype=torch.bfloat16)
        g = generator(world.rank)
        weights, idx = torch.randn(64, num_experts, generator=g).softmax(-1).topk(2)
        args = [t.to(device) for t in (torch.randn(64, 256, generator=g).bfloat16(), idx, weights)]
        with torch.no_grad():
            moe(*args)
            names = kernel_names(lambda: moe(*args))
        room = moe.layer.low_latency.capacity
        moe.finalize()
        return names, room

    results = ranks(run, at_least=2)
    if not all(names for names, _ in results):
        pytest.skip(BLIND)
    for names, room in results:
        products = [n for n in names if "gemm_kernel" in n]
        assert room > 8 * 24 and len(products) == 2
        assert all("Config<0, 64," in n for n in products), products


@pytest.mark.cuda_only
def test_moe_decode_graphs(ranks):
    """A captured layer, replayed between calls outside of the graph."""
    if not ranks.is_torchrun:
        pytest.skip("ranks that are threads do not replay graphs")

    def run(world, device):
        moe, same = make(world, device), []
        with torch.no_grad():
            fixed = inputs(moe, 0, num_tokens=5)
            moe(*fixed)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = moe(*fixed)
            for seed in range(6):
                for to, new in zip(fixed, inputs(moe, seed, num_tokens=5)):
                    to.copy_(new)
                graph.replay()
                got = y.clone()
                same.append(torch.equal(got, moe(*fixed)) and torch.equal(got, moe(*fixed, decode=False)))
        moe.layer.low_latency.synchronize()
        moe.finalize()
        return same

    assert all(all(r) for r in ranks(run))
