"""What the bits of results depend on: docs/numerics.md has a table whose cells name these tests."""

import dataclasses

import pytest
import torch

import epmoe
import soak_batches
from cases import check_outcomes, first, outcome, same_bits
from epmoe import reference
from epmoe.testing import routing
from nodes_cases import run_nodes

H, I, E, K, T = 64, 48, 8, 3, 37


@pytest.mark.parametrize("dtype", first(2, ["bfloat16", "fp8", "float16", "mxfp4", "int4"]))
def test_numerics_do_not_depend_on_the_batch(ranks, dtype):
    """Random tokens of a pool, through modules of all ways: a short sample of soak_batches.py."""

    def run(world, device):
        return [soak_batches.run_batch(world, device, 3, number, 25, False, dtype=dtype)
                for number in range(2)]

    assert ranks(run, world_size=3) == [[0, 0]] * ranks.size(3)


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", first(1, ["bfloat16", "fp8", "mxfp4", "int4"]))
def test_numerics_do_not_depend_on_the_batch_over_nodes(dtype):
    def run(nodes):
        return [soak_batches.run_batch(nodes, torch.device("cpu"), 1, number, 25, False, dtype=dtype)
                for number in range(2)]

    assert run_nodes(run, 2, 2) == [[0, 0]] * 4


@pytest.mark.cpu_only
def test_numerics_sample_sees_a_dependence(ranks, monkeypatch):
    """A module whose output depends on the number of tokens is found."""
    forward = epmoe.EPMoE.forward

    def wrong(self, x, *args, **options):
        y = forward(self, x, *args, **options)
        return y if len(x) % 2 else torch.nextafter(y, y + 1)

    monkeypatch.setattr(epmoe.EPMoE, "forward", wrong)

    def run(world, device):
        return soak_batches.run_batch(world, device, 3, 0, 60, False)

    assert any(ranks(run, world_size=1))


def of_experts(world, device, dtype, **options):
    """An EPMoE with this rank's part of the experts of all ranks, whatever their number."""
    moe = epmoe.EPMoE(H, I, E, K, world, max_tokens=T, dtype=dtype, device=device, bias=True, **options)
    g, n = torch.Generator().manual_seed(5), E // world.size
    for p in moe.parameters():
        whole = torch.randn(E, *p.shape[1:], generator=g) / p.shape[-1] ** 0.5
        p.data[:n].copy_(whole[world.rank * n : (world.rank + 1) * n])
    return moe


def step(moe, x, idx, weight, dy):
    """y without gradients, of the low-latency path, with gradients; and all gradients."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    if moe.layer.capacity is None and moe.layer.low_latency is None:
        moe.enable_decode(moe.layer.max_tokens)
    with torch.no_grad():
        y = moe(x, idx, weight)
        decoded = moe(x, idx, weight, decode=moe.layer.low_latency is not None)
    trained = moe(leaves[0], idx, leaves[1])
    grads = torch.autograd.grad(trained, [*leaves, *moe.parameters()], dy)
    return [t.detach() for t in (y, decoded, trained, *grads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capacity": 8 * T * K}], ids=str)
def test_numerics_do_not_depend_on_the_number_of_ranks(ranks, options, dtype):
    """With rank_invariant, several ranks give the bits of one, also the gradients of the experts."""

    def run(world, device):
        g = torch.Generator().manual_seed(11)
        idx = routing("uniform", T, K, E, 1, 0, g)
        idx[::7, 0] = -1
        x, dy = (torch.randn(T, H, generator=g).to(device, dtype) for _ in range(2))
        idx, weight = idx.to(device), torch.rand(T, K, generator=g).to(device)
        moe = of_experts(world, device, dtype, rank_invariant=True, **options)
        alone = of_experts(epmoe.thread_worlds(1)[0], device, dtype, rank_invariant=True, **options)
        begin, end = (T * r // world.size for r in (world.rank, world.rank + 1))
        found = step(moe, *(t[begin:end].contiguous() for t in (x, idx, weight, dy)))
        wanted = step(alone, x, idx, weight, dy)
        n = E // world.size
        mine = [slice(begin, end)] * 5 + [slice(world.rank * n, (world.rank + 1) * n)] * 4
        moe.layer.synchronize()
        alone.layer.synchronize()
        for m in (moe, alone):
            m.finalize()
        return found, [t[part] for t, part in zip(wanted, mine)]

    for found, wanted in ranks(run):
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            same_bits(a, b, f"result {i}")


@pytest.mark.parametrize("options", [{}, {"weight_dtype": torch.float8_e4m3fn},
                                     {"compute_dtype": torch.float8_e4m3fn}], ids=str)
def test_numerics_do_not_depend_on_the_placement(ranks, options):
    """With rank_invariant, replicas and other places of experts change no bit."""

    def run(world, device):
        moe = epmoe.EPMoE(128, 128, E, K, world, max_tokens=T, device=device, rank_invariant=True,
                          num_physical=4 * E, **options)
        moe.requires_grad_(False)
        g = torch.Generator().manual_seed(world.rank)
        x = torch.randn(T, 128, generator=g).to(device, moe.layer.dtype)
        weight = torch.rand(T, K, generator=g).to(device)
        idx = routing("uniform", T, K, E, 1, 0, g).to(device)
        with torch.no_grad():
            home = moe(x, idx, weight)
            load = [i * i for i in range(E)]
            moe.set_expert_map(epmoe.balance_experts(load, world.size, 4 * E))
            placed = moe(x, idx, weight)
        promised = epmoe.numerics(moe)
        moe.finalize()
        return home, placed, promised

    for home, placed, promised in ranks(run):
        is_promised = not options or ranks.device.type == "cuda"  # products in FP8 are torch's on the CPU
        assert promised.batch_invariant == promised.rank_invariant == is_promised
        same_bits(placed, home, "y")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_numerics_with_deterministic_algorithms(ranks, dtype):
    """torch.use_deterministic_algorithms(True) changes no bit of a training step, and refuses nothing."""

    def run(world, device):
        moe = of_experts(world, device, dtype)
        g = torch.Generator().manual_seed(world.rank)
        x, dy = (torch.randn(T, H, generator=g).to(device, dtype) for _ in range(2))
        idx = routing("uniform", T, K, E, 1, 0, g).to(device)
        weight = torch.rand(T, K, generator=g).to(device)
        results = []
        for mode in (False, True):
            world.exchange(b"x")  # the setting is that of the process, and so of all ranks that are threads
            torch.use_deterministic_algorithms(mode)
            world.exchange(b"x")
            results.append(step(moe, x, idx, weight, dy))
        moe.finalize()
        return results

    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        results = ranks(run, world_size=2)
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
    for wanted, found in results:
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            same_bits(a, b, f"result {i}")


@pytest.mark.parametrize("dtype, of_output, of_gradient", [(torch.bfloat16, 3.5e-3, 5e-3),
                                                          (torch.float16, 4.4e-4, 6.3e-4)], ids=str)
@pytest.mark.parametrize("activation", soak_batches.ACTIVATIONS, ids=str)
def test_numerics_errors_are_within_the_bounds(ranks, activation, dtype, of_output, of_gradient):
    """The norm of the difference from float64 over the norm of the result: the bounds of docs/numerics.md."""
    hidden, inner, tokens = 512, 256, 96

    def run(world, device):
        moe = epmoe.EPMoE(hidden, inner, E, 2, epmoe.thread_worlds(1)[0], activation=activation,
                          max_tokens=tokens, dtype=dtype, device=device)
        g = torch.Generator().manual_seed(0)
        for p in moe.parameters():
            p.data.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5)
        x, dy = (torch.randn(tokens, hidden, generator=g).to(device, dtype) for _ in range(2))
        weight = torch.rand(tokens, 2, generator=g).to(device)
        idx = torch.rand(tokens, E, generator=g).argsort(1)[:, :2].contiguous().to(device)
        _, _, *found = step(moe, x, idx, weight, dy)
        exact = [t.detach().double().requires_grad_() for t in (x, weight, moe.gate_up_proj, moe.down_proj)]
        y = reference.moe(exact[0], idx, exact[1], *exact[2:], activation, None, None)
        wanted = [y.detach(), *torch.autograd.grad(y, exact, dy.double())]
        moe.finalize()
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]

    # at a limit, rounding can choose the other side of the kink
    factor = 5 if isinstance(activation, epmoe.SwiGLU) else 1
    for of_y, *of_gradients in ranks(run, world_size=1):
        assert of_y < of_output and max(of_gradients) < factor * of_gradient


@pytest.mark.parametrize("options, batch, rank", [
    ({}, True, False), ({"rank_invariant": True}, True, True), ({"dtype": torch.float16}, True, False),
    ({"dtype": torch.float32}, False, False), ({"token_saving": False}, False, False),
    ({"token_saving": False, "rank_invariant": True}, False, False),
    ({"weight_dtype": torch.float8_e4m3fn}, True, False)], ids=str)
def test_numerics_say_what_is_promised(ranks, options, batch, rank):
    def run(world, device):
        moe = epmoe.EPMoE(128, 128, 2 * world.size, 2, world, device=device, max_tokens=4, **options)
        found = epmoe.numerics(moe)
        moe.finalize()
        return dataclasses.asdict(found)

    if "weight_dtype" in options and ranks.device.type == "cpu":
        batch = False  # these products are torch's there
    for found in ranks(run):
        trains = batch and not options.keys() & {"weight_dtype", "token_saving"}
        assert [found["batch_invariant"], found["trains_as_it_infers"], found["rank_invariant"]] == [
            batch, trains, rank]
        assert {name for name, value in found.items() if value is False} == set(found["reasons"])


@pytest.mark.cpu_only
def test_numerics_over_nodes_say_what_is_promised():
    def run(nodes):
        moe = epmoe.EPMoE(16, 16, 8, 2, nodes, max_tokens=4, device="cpu")
        found = epmoe.numerics(moe)
        refused = outcome(lambda: epmoe.EPMoE(16, 16, 8, 2, nodes, rank_invariant=True, device="cpu"))
        moe.finalize()
        return found, refused

    for found, refused in run_nodes(run, 2, 1):
        assert found.batch_invariant and found.trains_as_it_infers and not found.rank_invariant
        assert "ValueError" in refused.kinds and "use one node" in refused.text


def test_numerics_refuse_what_cannot_be(ranks):
    """A shared layer that sums by rank, and one rank alone that asks for it."""

    def run(world, device):
        options = dict(max_tokens=4, device=device)
        moe = epmoe.EPMoE(16, 16, 2 * world.size, 1, world, **options)
        shares = outcome(lambda: epmoe.EPMoE(16, 16, 2 * world.size, 1, layer=moe.layer, rank_invariant=True))
        other = epmoe.EPMoE(16, 16, 2 * world.size, 1, world, rank_invariant=True, **options)
        differs = outcome(lambda: epmoe.EPMoE(16, 16, 2 * world.size, 1, world,
                                              rank_invariant=world.rank == 0, **options))
        for m in (moe, other):
            m.finalize()
        return shares, differs

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([r[0] for r in results], "ValueError", "enable_local_combine=False")
    check_outcomes([r[1] for r in results], "EpMismatch", "combine_mode")
