"""EPMoE(recompute_gate_up=True): the backward multiplies by gate_up_proj again, with the same bits."""

import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed.fsdp import fully_shard

import epmoe
from cases import check_outcomes, generator, outcome, process_ranks, same_bits
from nodes_cases import run_nodes
from pace import HANG_S

E4M3 = torch.float8_e4m3fn
H, I, E, K, T = 128, 96, 4, 2, 30
FP8 = {"compute_dtype": E4M3}
ROWWISE = FP8 | {"fp8_recipe": "rowwise"}


def pair(world, device, dtype=torch.bfloat16, **options):
    """A module that keeps gate and up, and one that does not, with the same parameters."""
    modules = [epmoe.EPMoE(H, I, E, K, world, max_tokens=T, dtype=dtype, device=device,
                           recompute_gate_up=recompute, **options) for recompute in (False, True)]
    g = generator(3, world.rank)
    for p, q in zip(*(m.parameters() for m in modules), strict=True):
        p.data.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5)
        q.data.copy_(p.data)
    return modules


def inputs(world, device, dtype=torch.bfloat16):
    g = generator(5, world.rank)
    num = T - 7 * world.rank
    weight, idx = torch.rand(num, E, generator=g).topk(K)
    idx[::5, 1] = -1
    x, dy = (torch.randn(num, H, generator=g).to(device, dtype) for _ in range(2))
    return x, idx.to(device), weight.to(device), dy


def step(moe, x, idx, weight, dy, call=None):
    """The output, and the gradients of x, of the routing weights and of the parameters."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    moe.zero_grad()
    for p in moe.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    y = (moe if call is None else call)(leaves[0], idx, leaves[1])
    y.backward(dy)
    if moe._weight_gradients is not None and moe._weight_gradients.delays:
        moe.backward_dw()
    grads = [p.main_grad if p.grad is None else p.grad for p in moe.parameters()]
    return [y.detach(), *(t.grad for t in leaves), *grads]


def kept_by(moe, x, idx, weight):
    """How many bytes the forward keeps for the backward."""
    sizes = {}

    def pack(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        moe(x.clone().requires_grad_(), idx, weight)
    return sum(sizes.values())


@pytest.mark.parametrize("options", [
    {}, {"dtype": torch.float16, "activation": "gelu"}, {"capacity": 4 * T * K}, {"fused": False},
    {"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}, {"rank_invariant": True},
    {"activation": "gpt_oss", "num_physical": 2 * E}, FP8, ROWWISE, FP8 | {"capacity": 4 * T * K},
    FP8 | {"wgrad_dtype": torch.bfloat16}, ROWWISE | {"delay_wgrad_compute": True}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_moe_recompute_has_the_same_bits_and_keeps_less(ranks, options, bias):
    def run(world, device):
        modules = pair(world, device, bias=bias, **options)
        dtype = modules[0].layer.dtype
        call = inputs(world, device, dtype)
        results = [step(m, *call) for m in modules]
        modules[0].layer.synchronize()
        kept = [kept_by(m, *call[:3]) for m in modules]
        num_rows = modules[1].last_layout.num_rows if modules[1].layer.capacity is None else 4 * T * K
        columns = modules[1].gate_up_proj.shape[1]
        for m in modules:
            m.finalize()
        return results, kept[0] - kept[1], num_rows * columns * dtype.itemsize

    for (wanted, found), less, of_gate_up in ranks(run, world_size=2):
        for a, b in zip(wanted, found, strict=True):
            same_bits(a, b, "a result")
        assert less >= of_gate_up > 0


def test_moe_recompute_without_gradients(ranks):
    def run(world, device):
        modules = pair(world, device, bias=True)
        x, idx, weight, _ = inputs(world, device)
        with torch.no_grad():
            results = [m(x, idx, weight) for m in modules]
        modules[0].layer.synchronize()
        for m in modules:
            m.finalize()
        return results

    for a, b in ranks(run, world_size=2):
        same_bits(a, b, "y")


def _compiled(world, device, options):
    modules = pair(world, device, bias=True, **options)
    call = inputs(world, device)
    fast = torch.compile(modules[1], backend="aot_eager", fullgraph="compute_dtype" not in options)
    results = step(modules[0], *call), step(modules[1], *call, call=fast)
    modules[0].layer.synchronize()
    for m in modules:
        m.finalize()
    return results


@pytest.mark.parametrize("options", [{}, {"capacity": 4 * T * K}, ROWWISE], ids=str)
def test_moe_recompute_compiled(ranks, options):
    for wanted, found in ranks.isolated(_compiled, options, world_size=2, timeout_s=HANG_S):
        for a, b in zip(wanted, found, strict=True):
            same_bits(a, b, "a result")


@pytest.mark.parametrize("options", [{}, FP8], ids=str)
def test_moe_recompute_under_checkpoint(ranks, options):
    def run(world, device):
        modules = pair(world, device, **options)
        call = inputs(world, device)

        def checkpointed(*arguments):
            return torch.utils.checkpoint.checkpoint(modules[1], *arguments, use_reentrant=False)

        results = step(modules[0], *call), step(modules[1], *call, call=checkpointed)
        modules[0].layer.synchronize()
        for m in modules:
            m.finalize()
        return results

    for wanted, found in ranks(run, world_size=2):
        for a, b in zip(wanted, found, strict=True):
            same_bits(a, b, "a result")


def _fsdp(rank, world_size, options):
    """Rank main: replicas of a module with all experts, sharded by FSDP2."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))
    modules = pair(epmoe.thread_worlds(1)[0], "cpu", bias=True, **options)
    epmoe.prepare_fsdp(modules[1])
    fully_shard(modules[1], mesh=mesh)
    x, idx, weight, dy = inputs(modules[0].layer.world, "cpu")
    seen = []
    for m in modules:
        leaf = x.clone().requires_grad_()
        m(leaf, idx, weight).backward(dy)
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in m.parameters()]
        seen.append([leaf.grad, *whole])
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(*seen, strict=True)]


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", [{}, FP8], ids=str)
def test_moe_recompute_under_fsdp(options):
    """FSDP gathers the weights for the backward again, before the product that is computed again."""
    for errors in process_ranks(_fsdp, 2, options):
        assert max(errors) < 1e-2, errors


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", [FP8, ROWWISE], ids=str)
def test_moe_recompute_in_fp8_over_nodes(options):
    def run(nodes):
        modules = pair(nodes, "cpu", bias=True, **options)
        call = inputs(nodes, "cpu")
        results = [step(m, *call) for m in modules]
        for m in modules:
            m.finalize()
        return results

    for wanted, found in run_nodes(run, 2, 1):
        for a, b in zip(wanted, found, strict=True):
            same_bits(a, b, "a result")


@pytest.mark.parametrize("options, text", [
    ({"dtype": torch.float32}, "float32"), ({"weight_dtype": E4M3}, "no gradients"),
    ({"weight_dtype": "mxfp4"}, "no gradients"), ({"balance": "auto"}, "balance"),
    ({"token_saving": False}, "token_saving=False"), ({"hidden": 120}, "multiple of 16")], ids=str)
def test_moe_recompute_refuses(ranks, options, text):
    """Where it cannot be is an error on all ranks."""

    def run(world, device):
        sizes = [options.get("hidden", H), 128 if "weight_dtype" in options else I, E, K]
        others = {k: v for k, v in options.items() if k != "hidden"}
        return outcome(lambda: epmoe.EPMoE(*sizes, world, max_tokens=4, device=device, recompute_gate_up=True,
                                           **others))

    check_outcomes(ranks(run), "ValueError", text)


def test_moe_recompute_refuses_adapters(ranks):
    def run(world, device):
        moe = epmoe.EPMoE(H, I, E, K, world, max_tokens=4, device=device, recompute_gate_up=True)
        got = outcome(lambda: moe.add_adapter("a", 4, 8))
        assert "gate and up recomputed" in repr(moe)
        moe.finalize()
        return got

    check_outcomes(ranks(run), "ValueError", "recompute_gate_up")


@pytest.mark.cpu_only
def test_moe_recompute_refuses_16_bits_over_nodes():
    def run(nodes):
        return outcome(lambda: epmoe.EPMoE(H, I, E, K, nodes, max_tokens=4, device="cpu",
                                           recompute_gate_up=True))

    check_outcomes(run_nodes(run, 2, 1), "ValueError", "several nodes")


def test_moe_recompute_needs_weights_that_the_module_takes_at_once(ranks):
    def run(world, device):
        moe = epmoe.EPMoE(H, I, E, K, world, max_tokens=T, device=device, recompute_gate_up=True)
        transposed = moe.down_proj.detach().transpose(1, 2).contiguous()
        moe.down_proj = torch.nn.Parameter(transposed.transpose(1, 2))
        x, idx, weight, dy = inputs(world, device)
        got = outcome(lambda: moe(x, idx, weight).backward(dy), moe.layer)
        with torch.no_grad():
            y = moe(x, idx, weight)
        moe.layer.synchronize()
        moe.finalize()
        return got, y

    results = ranks(run, world_size=2)
    check_outcomes([got for got, _ in results], "ValueError", "recompute_gate_up", "contiguous")
    assert all(y.isfinite().all() for _, y in results)


def test_moe_recompute_refuses_a_shared_layer_without_token_saving(ranks):
    def run(world, device):
        base = epmoe.EPMoE(H, I, E, K, world, max_tokens=4, device=device, token_saving=False)
        got = outcome(lambda: epmoe.EPMoE(H, I, E, K, layer=base.layer, recompute_gate_up=True))
        base.finalize()
        return got

    check_outcomes(ranks(run), "ValueError", "token_saving=False")


@pytest.mark.parametrize("keeps", [False, True], ids=["backward", "retain_graph"])
@pytest.mark.parametrize("recompute", [False, True])
def test_moe_recompute_in_fp8_frees_old_weights(ranks, recompute, keeps):
    """A loss that still lives keeps no weights in FP8 after its backward, but with retain_graph=True."""

    def run(world, device):
        moe = pair(world, device, **FP8)[recompute]
        x, idx, weight, _ = inputs(world, device)
        loss = moe(x, idx, weight).float().sum()
        loss.backward(retain_graph=keeps)
        old = [weakref.ref(t) for name in ("gate_up_proj", "down_proj") for t in moe._quantized[name]._pair]
        moe.requantize()
        left = [t() is not None for t in old]
        if keeps:
            loss.backward()
        left += [t() is not None for t in old]
        moe.layer.synchronize()
        moe.finalize()
        return left

    for left in ranks(run, world_size=1):
        assert any(left[:8]) == keeps and not any(left[8:])


@pytest.mark.cpu_only
def test_moe_recompute_in_fp8_of_a_computed_weight():
    """Weights that are quantised in each forward are quantised again, not kept."""

    class Half(torch.nn.Module):
        def forward(self, weight):
            return weight * 0.5

    world = epmoe.thread_worlds(1)[0]
    modules, results = pair(world, "cpu", **FP8), []
    for m in modules:
        torch.nn.utils.parametrize.register_parametrization(m, "gate_up_proj", Half())
        x, idx, weight, dy = inputs(world, "cpu")
        leaf = x.clone().requires_grad_()
        y = m(leaf, idx, weight)
        quantized = weakref.ref(m._quantized["gate_up_proj"]._pair[0])
        m.requantize()
        assert quantized() is None  # the graph does not keep it
        y.backward(dy)
        results.append([y.detach(), leaf.grad, *(p.grad for p in m.parameters())])
        m.finalize()
    for a, b in zip(*results, strict=True):
        same_bits(a, b, "a result")
