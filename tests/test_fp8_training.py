"""EPMoE with compute_dtype=torch.float8_e4m3fn: products in FP8, forward and backward."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

import epmoe
from cases import check_outcomes, outcome, same_bits
from epmoe import reference
from epmoe.moe import fp8_training
from epmoe.moe.fp8_training import QuantizedWeight
from epmoe.testing import routing
from experts_cases import capture
from nodes_cases import run_nodes
from pace import HANG_S, WAIT_S
from rank_processes import process_ranks

E4M3 = torch.float8_e4m3fn
H, I, E, K, T = 256, 128, 8, 2, 48
RECIPES = "blockwise", "rowwise"


def make(world, device, dtype=torch.bfloat16, data="normal", **options):
    """An EPMoE with this rank's part of the experts of all ranks."""
    options = {"compute_dtype": E4M3, "max_tokens": T} | options
    moe = epmoe.EPMoE(H, I, E, K, world, dtype=dtype, device=device, **options)
    g, n = torch.Generator().manual_seed(5), E // world.size
    for p in moe.parameters():
        whole = numbers((E, *p.shape[1:]), g, data) / p.shape[-1] ** 0.5
        p.data[:n].copy_(whole[world.rank * n : (world.rank + 1) * n])
    return moe


def numbers(shape, g, data):
    x = torch.randn(shape, generator=g)
    if data == "heavy":  # each row and column of its own magnitude, and outliers
        x *= torch.exp2(2 * torch.randn(*shape[:-1], 1, generator=g))
        x *= torch.where(torch.rand(shape, generator=g) < 1e-3, 30.0, 1.0)
    return x * 2.0**-24 if data == "tiny" else x


def inputs(world, device, dtype=torch.bfloat16, data="normal", seed=11):
    """Tokens, choices, weights and gradients of the output of all ranks, and this rank's slice of them."""
    g = torch.Generator().manual_seed(seed)
    idx = routing("uniform", T, K, E, 1, 0, g)
    idx[::7, 0] = -1
    x, dy = (numbers((T, H), g, "heavy" if data == "heavy" else "normal").to(device, dtype) for _ in range(2))
    mine = slice(T * world.rank // world.size, T * (world.rank + 1) // world.size)
    return (x, idx.to(device), torch.rand(T, K, generator=g).to(device), dy), mine


def step(moe, x, idx, weight, dy):
    """y with gradients, and the gradients of x, of the routing weights and of the parameters."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = moe(leaves[0], idx, leaves[1])
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *moe.parameters()], dy)]


def run_step(ranks, data="normal", dtype=torch.bfloat16, **options):
    """The results of each rank, and those in float64."""

    def run(world, device):
        moe = make(world, device, dtype, data, **options)
        everything, mine = inputs(world, device, dtype, data)
        found = step(moe, *(t[mine].contiguous() for t in everything))
        moe.layer.synchronize()
        alone = make(epmoe.thread_worlds(1)[0], device, dtype, data,
                     **options | {"compute_dtype": None, "fp8_recipe": None})
        x, idx, weight, dy = everything
        leaves = {n: p.detach().double().requires_grad_() for n, p in alone.named_parameters()}
        exact = [t.detach().double().requires_grad_() for t in (x, weight)]
        y = reference.moe(exact[0], idx, exact[1], leaves["gate_up_proj"], leaves["down_proj"],
                          moe.activation, leaves.get("gate_up_proj_bias"), leaves.get("down_proj_bias"))
        wanted = [y.detach(), *torch.autograd.grad(y, [*exact, *leaves.values()], dy.double())]
        n = E // world.size
        experts = slice(world.rank * n, (world.rank + 1) * n)
        for m in (moe, alone):
            m.finalize()
        return found, [t[mine if i < 3 else experts] for i, t in enumerate(wanted)]

    return ranks(run)


def errors(results):
    """The error of each result over all ranks: a norm over a norm."""
    squares = [[(((a.double() - b) ** 2).sum(), (b ** 2).sum()) for a, b in zip(*r, strict=True)]
               for r in results]
    return [(sum(d for d, _ in of) / sum(n for _, n in of)).sqrt().item() for of in zip(*squares)]


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss", "gelu", epmoe.SwiGLU(1.3, 3.0, 1)], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"wgrad_dtype": torch.bfloat16},
                                     {"fp8_recipe": "rowwise"}, {"fp8_recipe": "rowwise", "bias": True},
                                     {"fp8_recipe": "rowwise", "wgrad_dtype": torch.bfloat16}], ids=str)
def test_fp8_training_gradients(ranks, activation, options):
    # at a limit, rounding can choose the other side of the kink
    bound = 0.2 if isinstance(activation, epmoe.SwiGLU) else 0.1
    assert max(errors(run_step(ranks, activation=activation, **options))) < bound


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("data, bound", [("heavy", 0.12), ("tiny", 0.1)])
def test_fp8_training_gradients_of_other_data(ranks, data, bound, recipe):
    """Heavy-tailed numbers and tiny weights.  Gradients of routing weights cancel: they have more error."""
    found = errors(run_step(ranks, data=data, fp8_recipe=recipe))
    assert max(found[:2] + found[3:]) < bound and found[2] < 2 * bound


@pytest.mark.parametrize("options", [{"dtype": torch.float16}, {"capacity": 8 * T * K}, {"fused": True},
                                     {"fused": False}, {"rank_invariant": True},
                                     {"fp8_recipe": "rowwise", "dtype": torch.float16},
                                     {"fp8_recipe": "rowwise", "capacity": 8 * T * K},
                                     {"combine_mode": "gather", "enable_local_combine": False}], ids=str)
def test_fp8_training_options(ranks, options):
    assert max(errors(run_step(ranks, **options))) < 0.1


def check_same_bits(ranks, make_modules):
    """Steps of several modules with the same numbers: all have the bits of the first."""

    def run(world, device):
        everything, mine = inputs(world, device)
        part = [t[mine].contiguous() for t in everything]
        results = []
        for build in make_modules:
            moe = build(world, device)
            results.append(step(moe, *part))
            moe.layer.synchronize()
            moe.finalize()
        return results

    for first, *others in ranks(run):
        for other in others:
            for i, (a, b) in enumerate(zip(first, other, strict=True)):
                same_bits(a, b, f"result {i}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_training_has_the_same_bits(ranks, recipe):
    """In a second run, fused and in stages, with a capacity, and with other max_tokens."""
    ways = [{}, {}, {"fused": True}, {"fused": False}, {"capacity": 8 * T * K}, {"max_tokens": 300 * T}]
    check_same_bits(ranks, [lambda w, d, o=o: make(w, d, bias=True, fp8_recipe=recipe, **o) for o in ways])


@pytest.mark.parametrize("weight_dtype", [None, "mxfp4", epmoe.Int4(32)], ids=str)
def test_fp8_training_rowwise_has_one_scale_for_a_row_and_an_expert(ranks, monkeypatch, weight_dtype):
    """All products of rows get such scales, of numbers that have them."""
    seen, product = [], fp8_training.grouped_gemm

    def note(rows, w, *, a_scale, b_scale, **options):
        seen.append((a_scale.stride(1), *b_scale.stride()[1:]))
        return product(rows, w, a_scale=a_scale, b_scale=b_scale, **options)

    monkeypatch.setattr(fp8_training, "grouped_gemm", note)

    def run(world, device):
        (x, idx, weight, dy), mine = inputs(world, device)
        part = [t[mine].contiguous() for t in (x, idx, weight, dy)]
        found = []
        for recipe in RECIPES:
            moe = epmoe.EPMoE(H, 256, E, K, world, max_tokens=T, device=device, compute_dtype=E4M3,
                              fp8_recipe=recipe, weight_dtype=weight_dtype)
            if found:
                moe.load_state_dict(state)
            state = moe.state_dict()
            with torch.no_grad():
                found.append(moe(*part[:3]))
            if weight_dtype is None:
                step(moe, *part)
            moe.finalize()
        return found

    for blockwise, rowwise in ranks(run):
        assert (blockwise - rowwise).norm() <= 0.02 * blockwise.norm()
    of_recipe = [strides for strides in seen if 0 in strides]
    assert of_recipe and all(strides == (0, 0, 0) for strides in of_recipe)
    assert len(of_recipe) >= len(seen) / 2  # on a GPU with one rank blockwise products may be fused


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_training_infers_as_it_trains(ranks, recipe):
    """Inference has the bits of the training forward, and the bits of a token do not depend on the others."""

    def run(world, device):
        moe = make(world, device, fp8_recipe=recipe)
        (x, idx, weight, dy), mine = inputs(world, device)
        x, idx, weight, dy = (t[mine].contiguous() for t in (x, idx, weight, dy))
        y, dx, d_weight, *_ = step(moe, x, idx, weight, dy)
        some = torch.arange(len(x), device=x.device)[world.rank % 2 :: 2]
        with torch.no_grad():
            z = moe(x, idx, weight)
        y2, dx2, d_weight2, *_ = step(moe, x[some], idx[some], weight[some], dy[some])
        promised = epmoe.numerics(moe)
        moe.layer.synchronize()
        moe.finalize()
        return (y, z), (y[some], y2), (dx[some], dx2), (d_weight[some], d_weight2), promised

    for *pairs, promised in ranks(run):
        for a, b in pairs:
            same_bits(a, b, "a result")
        is_promised = ranks.device.type == "cuda"  # on the CPU these products are torch's
        assert promised.trains_as_it_infers == promised.batch_invariant == is_promised


def test_fp8_training_scales_gradients(ranks):
    """gradient_scale, which prepare_ddp sets: a power of two changes no other bit of a gradient."""

    def run(world, device):
        everything, mine = inputs(world, device)
        part = [t[mine].contiguous() for t in everything]
        moe = make(world, device)
        plain = step(moe, *part)
        moe.gradient_scale = 0.5
        scaled = step(moe, *part)
        moe.layer.synchronize()
        moe.finalize()
        return plain, scaled

    for plain, scaled in ranks(run):
        for i, (a, b) in enumerate(zip(plain, scaled, strict=True)):
            same_bits(a * 0.5 if i > 2 else a, b, f"result {i}")


@pytest.mark.parametrize("wgrad_dtype", [None, torch.bfloat16], ids=str)
def test_fp8_training_with_other_gradients(ranks, wgrad_dtype):
    """backward_dw() and main_grad: the gradients have the bits of the backward; main_grad is float32."""

    def run(world, device):
        everything, mine = inputs(world, device)
        part = [t[mine].contiguous() for t in everything]
        plain = make(world, device, wgrad_dtype=wgrad_dtype)
        *_, up, down = step(plain, *part)
        later = make(world, device, delay_wgrad_compute=True, wgrad_dtype=wgrad_dtype)
        later(part[0], part[1], part[2]).backward(part[3])
        before = later.down_proj.grad
        later.backward_dw()
        fused = make(world, device, fuse_wgrad_accumulation=True, wgrad_dtype=wgrad_dtype)
        for p in fused.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        for _ in range(2):
            fused(part[0], part[1], part[2]).backward(part[3])
        sums = [p.main_grad / 2 for p in (fused.gate_up_proj, fused.down_proj)]
        for m in (plain, later, fused):
            m.layer.synchronize()
            m.finalize()
        added = list(zip((up, down), sums))
        return before, (up, later.gate_up_proj.grad), (down, later.down_proj.grad), added

    for before, *pairs, added in ranks(run):
        assert before is None
        for a, b in pairs:
            same_bits(a, b, "a gradient")
        for a, b in added:
            torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2 * b.abs().max().item())


def test_fp8_training_sees_new_weights(ranks):
    """After each way to change a weight, y is that of a new module with the changed weights."""

    def change(p, way, moe):
        with torch.no_grad():
            if way == "in place":
                p.mul_(-0.5)
            elif way == "step":  # of an optimizer that writes through .data
                class Through(torch.optim.Optimizer):
                    def step(self):
                        for group in self.param_groups:
                            for q in group["params"]:
                                q.data.mul_(0.25)

                Through([p], {}).step()
            elif way == "load":
                moe.load_state_dict({n: q * 2 for n, q in moe.state_dict().items()})
            else:
                p.data.neg_()
                moe.requantize()

    def run(world, device):
        (x, idx, weight, _), mine = inputs(world, device)
        x, idx, weight = (t[mine].contiguous() for t in (x, idx, weight))
        moe = make(world, device)
        results = []
        for way in ("in place", "step", "load", "requantize"):
            with torch.no_grad():
                old = moe(x, idx, weight)
                change(moe.down_proj, way, moe)
                new = make(world, device)
                new.load_state_dict(moe.state_dict())
                results.append((moe(x, idx, weight), new(x, idx, weight), old))
                new.layer.synchronize()
                new.finalize()
        twin = copy.deepcopy(moe)
        with torch.no_grad():
            twin.down_proj.zero_()
            results.append((moe(x, idx, weight), moe(x, idx, weight), twin(x, idx, weight)))
        moe.finalize()
        return results

    for results in ranks(run):
        for a, b, old in results:
            same_bits(a, b, "y")
            assert len(a) == 0 or not torch.equal(a, old)


def test_fp8_training_under_checkpoint(ranks):
    def run(world, device):
        moe = make(world, device)
        (x, idx, weight, dy), mine = inputs(world, device)
        x, idx, weight, dy = (t[mine].contiguous() for t in (x, idx, weight, dy))
        wanted = step(moe, x, idx, weight, dy)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = torch.utils.checkpoint.checkpoint(moe, leaves[0], idx, leaves[1], use_reentrant=False)
        found = [y.detach(), *torch.autograd.grad(y, [*leaves, *moe.parameters()], dy)]
        moe.layer.synchronize()
        moe.finalize()
        return wanted, found

    for wanted, found in ranks(run, world_size=2):
        for a, b in zip(wanted, found, strict=True):
            same_bits(a, b, "a result")


def _compiled(world, device):
    """A step of a module, and one of it compiled, with a graph break."""
    moe = make(world, device)
    (x, idx, weight, dy), mine = inputs(world, device)
    part = [t[mine].contiguous() for t in (x, idx, weight, dy)]
    fast = torch.compile(moe, backend="eager")
    results = step(moe, *part), step(fast, *part)
    moe.layer.synchronize()
    moe.finalize()
    return results


def test_fp8_training_compiled(ranks):
    for wanted, found in ranks.isolated(_compiled, world_size=2, timeout_s=HANG_S):
        for a, b in zip(wanted, found, strict=True):
            same_bits(a, b, "a result")


@pytest.mark.cuda_only
def test_fp8_training_in_a_cuda_graph(ranks):
    """Replays with new tokens and new weights have the bits of steps outside of the graph."""
    if not ranks.is_torchrun:
        pytest.skip("ranks that are threads do not replay graphs")

    def run(world, device):
        moe = make(world, device, capacity=8 * T * K)
        (x, idx, weight, dy), _ = inputs(world, device)
        found = []

        def forward_and_backward():
            leaves = [x.requires_grad_(), weight.requires_grad_()]
            y = moe(leaves[0], idx, leaves[1])
            return [y.detach(), *torch.autograd.grad(y, [*leaves, *moe.parameters()], dy)]

        graph, captured = capture(world, moe, forward_and_backward)
        for seed in range(3):
            with torch.no_grad():
                for t, new in zip((x, idx, weight, dy), inputs(world, device, seed=20 + seed)[0]):
                    t.copy_(new)
                for p in moe.parameters():
                    p.mul_(-0.75)
            graph.replay()
            moe.layer.synchronize()
            replayed = [t.clone() for t in captured]
            found.append((replayed, step(moe, x.detach(), idx, weight.detach(), dy)))
        moe.layer.synchronize()
        moe.finalize()
        return found

    for found in ranks(run):
        for replayed, wanted in found:
            for i, (a, b) in enumerate(zip(replayed, wanted, strict=True)):
                same_bits(a, b, f"result {i}")


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        torch.manual_seed(0)
        self.moe = epmoe.EPMoE(H, I, E, K, group, max_tokens=T, device="cpu", compute_dtype=E4M3,
                               timeout_s=WAIT_S)

    def forward(self, x, idx, weight):
        return self.moe(x, idx, weight)


def _fsdp(rank, world_size):
    """Each rank has all experts, whose parameters FSDP2 shards; beside it the same without FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    groups = [dist.new_group([r]) for r in range(world_size)]
    model, plain = Block(groups[rank]), Block(groups[rank])
    fully_shard(epmoe.prepare_fsdp(model), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    g = torch.Generator().manual_seed(rank)
    idx = routing("uniform", T, K, E, 1, 0, g)
    x, dy = (torch.randn(T, H, generator=g).bfloat16() for _ in range(2))
    weight, results = torch.rand(T, K, generator=g), []
    for change in ("step", "step", "in place", "nothing"):
        y, z = model(x, idx, weight), plain(x, idx, weight)
        results.append((y.detach(), z.detach()))
        if change == "step":
            y.backward(dy)
            z.backward(dy)
            optimizer.step()
            optimizer.zero_grad()
            for p in plain.parameters():
                dist.all_reduce(p.grad)
        with torch.no_grad():
            for p in plain.parameters():
                p.copy_(p - 0.5 / world_size * p.grad if change == "step" else -p)
                p.grad = None
            for p in model.parameters() if change == "in place" else ():
                p.neg_()
    for m in (model, plain):
        m.moe.layer.world.close()
    return model.moe._is_sharded, results


@pytest.mark.cpu_only
def test_fp8_training_quantises_a_sharded_weight_each_time():
    weight, cache = torch.ones(1, 16, 16), QuantizedWeight()
    assert cache.of(weight, False)[1].item() == cache.of(weight, False)[1].item() == 2.0**-8
    weight.data.fill_(4.0)  # which torch does not count
    assert cache.of(weight, False)[1].item() == 2.0**-8
    assert cache.of(weight, True)[1].item() == 2.0**-6
    weight.data.fill_(1.0)
    assert cache.of(weight.detach(), False)[1].item() == 2.0**-8  # another tensor, at the same address


@pytest.mark.cpu_only
@torch.inference_mode()
def test_fp8_training_sees_new_weights_that_were_made_in_inference_mode():
    """torch counts no changes of such tensors."""
    moe = make(epmoe.World(), "cpu")
    (x, idx, weight, _), _ = inputs(epmoe.World(), "cpu")
    changes = (lambda: moe.load_state_dict({n: 2 * t for n, t in moe.state_dict().items()}),
               lambda: moe.down_proj.mul_(2), moe.reset_parameters)
    before = moe(x, idx, weight)
    for change in changes:
        change()
        y = moe(x, idx, weight)
        moe.requantize()
        same_bits(y, moe(x, idx, weight), "y")
        assert not torch.equal(y, before)
        before = y
    moe.finalize()


@pytest.mark.cpu_only
def test_fp8_training_lets_torch_swap_weights():
    """What was quantised keeps no weak reference to a parameter, and sees that its tensor is another."""
    moe = epmoe.EPMoE(H, I, 2, 1, max_tokens=T, device="cpu", compute_dtype=E4M3)
    call = torch.randn(T, H, dtype=torch.bfloat16), torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        moe(*call).sum().backward()
        moe.zero_grad()
        moe._apply(lambda t: 2 * t)
        with torch.no_grad():
            doubled = moe(*call)
        moe.load_state_dict({n: torch.zeros_like(t) for n, t in moe.state_dict().items()})
        assert doubled.count_nonzero() and not moe(*call).count_nonzero()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    moe.finalize()


@pytest.mark.cpu_only
def test_fp8_training_under_fsdp():
    """FSDP gathers the weights for each forward: a change between two forwards is never missed."""
    for is_sharded, results in process_ranks(_fsdp, 2):
        assert is_sharded
        for i, (y, z) in enumerate(results):
            error = ((y.float() - z.float()).norm() / z.float().norm()).item()
            assert error < (2e-2 if i else 1e-6), (i, error)
            assert i == 0 or not torch.equal(y, results[i - 1][0])


@pytest.mark.cpu_only
def test_fp8_training_over_nodes():
    def run(nodes):
        moe = epmoe.EPMoE(H, I, E, K, nodes, max_tokens=T, device="cpu", compute_dtype=E4M3)
        plain = epmoe.EPMoE(H, I, E, K, nodes, max_tokens=T, device="cpu")
        plain.load_state_dict(moe.state_dict())
        (x, idx, weight, dy), _ = inputs(nodes, "cpu", seed=nodes.rank)
        pairs = list(zip(step(moe, x, idx, weight, dy), step(plain, x, idx, weight, dy), strict=True))
        for m in (moe, plain):
            m.finalize()
        return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]

    for found in run_nodes(run, 2, 2):
        assert max(found) < 0.1


def test_fp8_training_on_a_rank_alone_without_gradients(ranks):
    """One rank has no tokens, another wants no gradient of its tokens: all make the same calls."""

    def run(world, device):
        moe = make(world, device)
        (x, idx, weight, dy), _ = inputs(world, device)
        n = 0 if world.rank == 0 else T
        x = x[:n].requires_grad_(world.rank != 1)
        moe(x, idx[:n], weight[:n]).backward(dy[:n])
        moe.layer.synchronize()
        has = moe.down_proj.grad.isfinite().all().item()
        moe.finalize()
        return has

    assert all(ranks(run))


@pytest.mark.parametrize("options, error, text", [
    ({"compute_dtype": torch.float16}, "TypeError", "compute_dtype"),
    ({"compute_dtype": E4M3, "dtype": torch.float32}, "TypeError", "float16"),
    ({"compute_dtype": E4M3, "weight_dtype": E4M3}, "ValueError", "weight_dtype"),
    ({"compute_dtype": E4M3, "wgrad_dtype": torch.float16}, "TypeError", "wgrad_dtype"),
    ({"wgrad_dtype": E4M3}, "ValueError", "compute_dtype"),
    ({"fp8_recipe": "rowwise"}, "ValueError", "compute_dtype"),
    ({"compute_dtype": E4M3, "fp8_recipe": "tensorwise"}, "ValueError", "rowwise"),
    ({"compute_dtype": E4M3, "token_saving": False}, "ValueError", "token_saving")], ids=str)
def test_fp8_training_refuses(ranks, options, error, text):
    """What EPMoE does not have with products in FP8 is an error on all ranks."""

    def run(world, device):
        return outcome(lambda: epmoe.EPMoE(H, I, E, K, world, max_tokens=4, device=device, **options))

    check_outcomes(ranks(run), error, text)


def test_fp8_training_refuses_calls(ranks):
    """A low-latency path, a second derivative, and ranks with other compute_dtypes."""

    def run(world, device):
        moe = make(world, device)
        (x, idx, weight, dy), _ = inputs(world, device)
        decodes = outcome(lambda: moe.enable_decode(4))
        leaf = x.clone().requires_grad_()
        y = moe(leaf, idx, weight)
        twice = outcome(lambda: torch.autograd.grad(y, leaf, dy, create_graph=True))
        differs = outcome(lambda: epmoe.EPMoE(H, I, E, K, world, max_tokens=4, device=device,
                                              compute_dtype=E4M3 if world.rank == 0 else None))
        recipes = outcome(lambda: epmoe.EPMoE(H, I, E, K, world, max_tokens=4, device=device,
                                              compute_dtype=E4M3, fp8_recipe=RECIPES[world.rank % 2]))
        moe.finalize()
        return decodes, twice, differs, recipes

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([r[0] for r in results], "ValueError", "low-latency")
    check_outcomes([r[1] for r in results], "NotImplementedError", "create_graph")
    check_outcomes([r[2] for r in results], "EpMismatch", "compute_dtype")
    check_outcomes([r[3] for r in results], "EpMismatch", "rowwise")


@pytest.mark.parametrize("where, error, text", [("forward", "TypeError", "x"),
                                                ("between", "MemoryError", "no memory"),
                                                ("backward", "RuntimeError", "inplace operation")])
def test_fp8_training_error_of_one_rank_reaches_all(ranks, monkeypatch, where, error, text):
    """A rank raises before dispatch, between it and combine, or in its backward.  The next step is right."""
    here, quantised = threading.local(), fp8_training._quantized_activation

    def fails(*args):
        if getattr(here, "fails", False):
            raise MemoryError("no memory")
        return quantised(*args)

    monkeypatch.setattr(fp8_training, "_quantized_activation", fails)

    def run(world, device):
        moe = make(world, device)
        (x, idx, weight, dy), mine = inputs(world, device)
        x, idx, weight, dy = (t[mine].contiguous() for t in (x, idx, weight, dy))
        wanted = step(moe, x, idx, weight, dy)
        is_wrong = world.rank == world.size - 1

        def wrong():
            here.fails = is_wrong and where == "between"
            leaf = x.float() if is_wrong and where == "forward" else x.clone()
            y = moe(leaf.requires_grad_(), idx, weight)
            if is_wrong and where == "backward":
                with torch.no_grad():
                    moe.down_proj.mul_(1)
            y.backward(dy)

        got = outcome(wrong, moe.layer)
        here.fails = False
        again = step(moe, x, idx, weight, dy)
        moe.layer.synchronize()
        moe.finalize()
        return got, wanted, again

    results = ranks(run, world_size=2, at_least=2)
    last = len(results) - 1
    check_outcomes([r[0] for r in results], ["PeerError"] * last + [error], text, on_rank=last,
                   elsewhere=(f"rank {last}",))
    for _, wanted, again in results:
        for a, b in zip(wanted, again, strict=True):
            same_bits(a, b, "a result")


class DropConnect(torch.nn.Module):
    """Another mask each time."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def forward(self, p):
        self.masks.append((torch.rand(p.shape) < 0.5).to(p.dtype))
        return p * self.masks[-1]


@pytest.mark.cpu_only
def test_fp8_training_multiplies_the_weights_that_get_the_gradient():
    """Also where a parametrization computes others each time it is asked."""
    moe = make(epmoe.World(), "cpu")
    (x, idx, weight, _), _ = inputs(epmoe.World(), "cpu")
    drop = DropConnect()
    torch.nn.utils.parametrize.register_parametrization(moe, "gate_up_proj", drop)
    original = moe.parametrizations.gate_up_proj.original
    drop.masks.clear()
    y = moe(x.requires_grad_(), idx, weight)
    y.float().square().sum().backward()
    of_gradient = [bool((original.grad[mask == 0] == 0).all()) for mask in drop.masks]
    twin, of_forward = make(epmoe.World(), "cpu"), []
    for mask in drop.masks:
        with torch.no_grad():
            twin.gate_up_proj.copy_(original * mask)
            twin.down_proj.copy_(moe.down_proj)
            of_forward.append(torch.equal(twin(x, idx, weight), y))
    assert of_forward == of_gradient and sum(of_forward) == 1
    moe.finalize()
    twin.finalize()
