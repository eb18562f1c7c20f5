"""The training step of EPMoE in 16 bits, whose backward is epmoe's own: fused equal to the stages bit by bit,
and both to float64 within rounding.
"""

import dataclasses
import math
import threading
import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import epmoe
import soak_train
from cases import MODES, check_outcomes, keep, outcome, same_bits
from epmoe import _C
from epmoe.a2a.base import NO_CONFIG
from epmoe.gemm.activations import as_kernel
from epmoe.moe import experts as experts_ops
from experts_cases import NAMES, gradients, make_moe, step, works_after
from fused_cases import (ACTIVATIONS, LEAVES, LOW, TOLERANCE, Experts, check_gradients, grown,
                         has_fused_path, tensors)
from layer_cases import problem
from moe_cases import close


@pytest.mark.parametrize("activation, columns", [("swiglu", 48), ("relu2", 24)])
def test_experts_backward_has_the_sizes_of_its_rows(activation, columns):
    """torch.compile takes the sizes of the outputs from here, before anything runs."""
    moe = epmoe.EPMoE(16, 24, 2, 1, epmoe.thread_worlds(1)[0], activation=activation, max_tokens=5,
                      dtype=torch.bfloat16, device="cpu")
    with FakeTensorMode():
        dy, down = torch.empty(5, 16), torch.empty(2, 16, 24)
        h, plan = torch.empty(7, columns), torch.empty(99, dtype=torch.int32)
        found = torch.ops.epmoe.experts_backward_down(
            dy, plan, down, None, h, torch.empty(7), moe.layer.id, 0, as_kernel(activation))
    assert [tuple(t.shape) for t in found] == [(7, 16), (7, columns), (7, 24), (7,)]
    moe.finalize()


@pytest.mark.parametrize("inner, num_of_training", [(8176, 4), (8192, 0)])
def test_experts_choose_the_fused_kernels(ranks, inner, num_of_training):
    """By default, wide experts train with the stages. fused=True and inference use the fused kernels."""
    case = Experts(topk=2, hidden=16, max_tokens=30, inner=inner, bias=False)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        launches, results = [], []
        for fused in (None, True):
            moe = make_moe(world, device, case, t, fused=fused)
            with torch.no_grad():
                moe(t.x, t.idx, t.weight)
            launches.append(moe.layer.num_launches)
            results.append(step(moe, t, LEAVES))
            launches.append(moe.layer.num_launches - launches[-1])
            moe.layer.synchronize()
            moe.finalize()
        for name, value in results[0].items():
            same_bits(results[1][name], value, name)
        assert launches == ([2, num_of_training, 2, 4] if has_fused_path(device) else [0, 0, 0, 0])

    ranks(run, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_experts_gradients_of_ranks(ranks, world_size):
    case = grown(ranks, Experts(mode="local", activation="swiglu", bias=False, max_tokens=20), 12)
    check_gradients(ranks(gradients, case, world_size=world_size), case)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS[1:4], "geglu_tanh", "relu2", "gelu_tanh", "silu",
                                        epmoe.GptOss(alpha=1.3, limit=math.inf),
                                        epmoe.SwiGLU(1.3, math.inf, 1)], ids=str)
def test_experts_gradients_of_activations(ranks, activation, bias):
    """GptOss and SwiGLU have no limit here: see test_fused_gradients."""
    case = grown(ranks, Experts(mode=MODES[bias], activation=activation, bias=bias, dtype=LOW[bias],
                                max_tokens=20, capacity="roomy" if bias else None), 12)
    check_gradients(ranks(gradients, case, world_size=2), case)


@pytest.mark.parametrize("capacity", [None, "exact"])
@pytest.mark.parametrize("pattern", ["one_expert", "one_rank", "sentinels", "duplicates", "all_dropped"])
def test_experts_gradients_routing_pattern(ranks, pattern, capacity):
    case = grown(ranks, Experts(mode="local", pattern=pattern, capacity=capacity, bias=capacity is None,
                                tokens="first_none"))
    check_gradients(ranks(gradients, case), case)


@pytest.mark.parametrize("leaves", [("x",), ("weight",), ("w1",), ("w2",), ("b1",), ("b2",), ("x", "w2"),
                                    ("weight", "w1")], ids="-".join)
def test_experts_gradients_of_some_leaves(ranks, leaves):
    """Tokens, router or experts are frozen. The other leaves still get the right gradients."""
    case = Experts(mode="scatter", activation="gelu", dtype=torch.float16)
    results = ranks(gradients, case, leaves, world_size=2)
    assert all(set(r) == {"y", *leaves} for r in results)
    check_gradients(results, case)


def test_experts_gradients_of_a_layer_without_megakernels(ranks):
    """An EPAll2AllLayer with padding rows, and sizes for which there are no kernels."""
    case = Experts(hidden=40, inner=24, bias=True, activation="gpt_oss")

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        seen = []
        for alignment in (1, 16):
            layer = epmoe.EPAll2AllLayer(world, case.max_tokens, case.hidden, case.topk, device=device,
                                         num_tot_experts=case.num_local * world.size,
                                         expert_alignment=alignment)
            keep(world, layer)
            moe = epmoe.EPMoE(case.hidden, case.inner, layer.num_experts, case.topk, bias=True, device=device,
                              activation="gpt_oss", layer=layer)
            with torch.no_grad():
                for name, attribute in NAMES.items():
                    getattr(moe, attribute).copy_(getattr(t, name))
            seen.append(step(moe, t, LEAVES))
            moe.finalize()
        for name, value in seen[0].items():
            close(seen[1][name], value.cpu(), f"rank {world.rank}: {name}", TOLERANCE[case.dtype])
        return seen[0]

    check_gradients(ranks(run, world_size=2), case)


def test_experts_gradients_with_checkpointing(ranks):
    """The forward runs again during the backward. The gradients have the same bits."""
    case = grown(ranks, Experts(bias=True))

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t)
        want = step(moe, t, LEAVES)
        for reentrant in (False, True):
            got = step(moe, t, LEAVES, lambda *args: checkpoint(moe, *args, use_reentrant=reentrant))
            for name, value in want.items():
                if name != "y" or not reentrant:  # else the forward has no gradients and other roundings
                    same_bits(got[name], value, f"rank {world.rank}: {name}, reentrant {reentrant}")
        moe.layer.synchronize()
        moe.finalize()
        return want

    check_gradients(ranks(run, world_size=2), case)


def test_experts_make_room_for_all_rows_of_few_tokens():
    few = NO_CONFIG._replace(capacity=4096, hidden=2048, dtype=_C.BF16)  # 16 MiB
    assert _C.layer_unread_rows(few) == 4096
    for more in ({"capacity": 4097}, {"hidden": 2056}, {"dtype": _C.F32}, {"hidden": 1 << 20}):
        assert _C.layer_unread_rows(few._replace(**more)) == 0


@pytest.mark.parametrize("host_counts", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_experts_do_not_read_the_number_of_few_rows(ranks, fused, host_counts):
    """Room for all rows that can come gives the bits of room for those that come. A wrong index is an error
    on all ranks, and the next step is right."""
    case = dataclasses.replace(Experts(activation="relu2"), max_tokens=20)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t, fused=fused, host_counts=host_counts)
        unread, found, known, wrong = moe.layer._unread_rows, [], [], t.idx.clone()
        wrong[:1] = -2
        for rows in (0, unread):
            moe.layer._unread_rows = rows
            found.append(step(moe, t, LEAVES))
            layout = moe.last_layout
            known.append((layout._num_rows is None, layout.num_rows, layout.tokens_per_expert_list))

        failed = outcome(lambda: moe(t.x.requires_grad_(), wrong if world.rank == 0 else t.idx, t.weight),
                         moe.layer)
        found.append(step(moe, t, LEAVES))
        moe.layer.synchronize()
        moe.finalize()
        return found, known, unread == world.size * 20 * case.topk, failed

    results = ranks(run, world_size=2)
    for found, known, unread, _ in results:
        assert unread and known[0][1:] == known[1][1:]
        assert [k[0] for k in known] == [False, not host_counts]
        for later in found[1:]:
            for name, value in found[0].items():
                same_bits(later[name], value, name)
    check_outcomes([r[3] for r in results], "EpIndexError", "-2")


def test_experts_save_only_rows_and_gate_up(ranks):
    """Between forward and backward, only the received rows, gate and up, and small tensors are kept."""
    case = dataclasses.replace(Experts(hidden=256, inner=128, bias=False), max_tokens=64)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t)
        moe.layer._unread_rows = 0  # as if the rows were too many to make room for all that can come
        kept = {}
        parameters = {p.untyped_storage().data_ptr() for p in moe.parameters()}

        def pack(s):
            kept[s.untyped_storage().data_ptr()] = s.untyped_storage().nbytes()
            return s

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda s: s):
            moe(t.x.requires_grad_(), t.idx, t.weight.requires_grad_())
        m = moe.last_layout.num_rows
        moe.layer.synchronize()
        moe.finalize()
        return sum(n for at, n in kept.items() if at not in parameters), 2 * m * (256 + 2 * 128)

    for got, rows in ranks(run, world_size=2):
        assert rows <= got <= rows + 30_000 and rows > 60_000


@pytest.mark.parametrize("keeps", [False, True], ids=["backward", "retain_graph"])
def test_experts_free_gate_and_up_before_the_gradients_of_weights(ranks, keeps, monkeypatch):
    """Before them, the backward frees what is saved. With retain_graph, a second backward works."""
    case = dataclasses.replace(Experts(hidden=256, inner=128, bias=False), max_tokens=64)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t)
        parameters = {p.data_ptr() for p in moe.parameters()}
        saved, alive = [], []

        class Kept:  # autograd holds it as long as it holds the tensor
            def __init__(self, tensor):
                self.tensor = tensor

        def pack(tensor):
            kept = Kept(tensor)
            if tensor.data_ptr() not in parameters and tensor.dim() == 2:
                saved.append(weakref.ref(kept))
            return kept

        experts_up = _C.layer_experts_up

        def observed(*arguments):
            alive.append(sum(s() is not None for s in saved))
            return experts_up(*arguments)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            y = moe(t.x.requires_grad_(), t.idx, t.weight.requires_grad_())
        num_saved = len(saved)
        monkeypatch.setattr(_C, "layer_experts_up", observed)
        y.sum().backward(retain_graph=keeps)
        if keeps:
            y.sum().backward()
        moe.layer.synchronize()
        moe.finalize()
        return num_saved, alive

    for num_saved, alive in ranks(run, world_size=1):
        assert num_saved >= 2  # the received rows, and gate and up
        assert alive == ([num_saved, 0] if keeps else [0])


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=str)
def test_experts_free_rows_before_the_gradient_of_gate_and_up(ranks, monkeypatch, options):
    """With many rows, this gradient gets memory when the rows of dy are free again. The bits are the same."""
    case = dataclasses.replace(Experts(hidden=256, inner=128), max_tokens=64)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t, **options)
        wanted = step(moe, t, LEAVES)
        experts_up, gradient_of, alive = _C.layer_experts_up, experts_ops.gradient_of, []

        def observed(layer, buffer, arguments):
            alive.extend(weakref.ref(a) for a in arguments[6:8])  # g and weighted
            return experts_up(layer, buffer, arguments)

        def observed_gradient(*arguments):
            alive[:] = [a() is not None for a in alive]
            return gradient_of(*arguments)

        monkeypatch.setattr(experts_ops, "MANY_ROWS_BYTES", 0)
        monkeypatch.setattr(_C, "layer_experts_up", observed)
        monkeypatch.setattr(experts_ops, "gradient_of", observed_gradient)
        found = step(moe, t, LEAVES)
        moe.layer.synchronize()
        moe.finalize()
        return wanted, found, alive

    for wanted, found, alive in ranks(run, world_size=1):
        assert alive == [False, False]
        for name, value in wanted.items():
            same_bits(found[name], value, name)


def test_experts_have_no_second_derivatives_in_16_bits(ranks):
    case = Experts(bias=False)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t)
        y = moe(t.x.requires_grad_(), t.idx, t.weight)
        with pytest.raises(NotImplementedError, match="create_graph=True: .* use dtype=torch.float32"):
            torch.autograd.grad(y.sum(), t.x, create_graph=True)
        world.exchange(b"raised")
        want = step(moe, t, ("x",))  # the module can be used again
        moe.layer.synchronize()
        moe.finalize()
        return want

    assert all(r["x"].isfinite().all() for r in ranks(run, world_size=2))


@pytest.mark.parametrize("options", [
    {}, {"balance": "auto"}, {"token_saving": False}, {"dtype": torch.float32},
    {"compute_dtype": torch.float8_e4m3fn}, {"adapter": {}}, {"adapter": {}, "token_saving": False}], ids=str)
def test_experts_take_a_batch_of_gradients(ranks, options):
    """is_grads_batched=True and torch.vmap have the bits of one gradient after the other, or are an error."""

    def run(world, device):
        others = {n: v for n, v in options.items() if n != "adapter"}
        moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, world, max_tokens=8, device=device, **others)
        keep(world, moe)
        if "adapter" in options:
            moe.add_adapter("a", 2, 2)
            moe.set_adapter("a")
        x = torch.randn(4, 16, device=device).to(moe.layer.dtype).requires_grad_()
        idx = torch.tensor([[0, 1], [1, 0], [-1, 1], [0, 1]], device=device)
        leaves = [x, *(p for p in moe.parameters() if p.requires_grad)]
        y = moe(x, idx, torch.rand(4, 2, device=device))
        batch = torch.stack([torch.ones_like(y), 2 * torch.ones_like(y)])
        want = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in batch]

        def gradients(g, **batched):
            return torch.autograd.grad(y, leaves, g, retain_graph=True, **batched)

        def check(found):
            for i, t in enumerate(found):
                same_bits(t, torch.stack([grads[i] for grads in want]), f"leaf {i}")

        calls = (lambda: check(gradients(batch, is_grads_batched=True)),
                 lambda: check(torch.vmap(gradients)(batch)))
        got = [outcome(call, moe.layer) for call in calls]
        check([torch.stack(t) for t in zip(*map(gradients, batch))])
        moe.finalize()
        return got

    found = ranks(run, world_size=2)
    is_error = "compute_dtype" in options or "adapter" in options
    texts = "call torch.autograd.grad() once for each", "torch.func's transforms"
    for got, text in zip(zip(*found), texts):
        check_outcomes(got, "NotImplementedError" if is_error else "nothing", *([text] if is_error else []))


def test_experts_in_float32_use_the_differentiable_stages(ranks):
    """In float32 the experts have derivatives of any order, so they do not use the operator."""

    def run(world, device):
        moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, world, max_tokens=9, dtype=torch.float32, device=device)
        keep(world, moe)
        x, weight, _, idx = problem(world, device, Experts(hidden=16, topk=2, max_tokens=9, tokens="full",
                                                           dtype=torch.float32))
        first, = torch.autograd.grad(moe(x, idx, weight).square().sum(), x, create_graph=True)
        second, = torch.autograd.grad(first.square().sum(), x)
        moe.finalize()
        return second

    assert all(d.isfinite().all() and d.abs().max() > 1e-3 for d in ranks(run, world_size=2))


NARROW = Experts(bias=False)
WIDE = Experts(topk=2, hidden=16, max_tokens=30, inner=8192, bias=False)  # trains with the stages


# before the first operation, and before the second
@pytest.mark.parametrize("failing", ["aligned_all", "backward_up"])
@pytest.mark.parametrize("case, fused", [(NARROW, True), (NARROW, False), (WIDE, None)],
                         ids=["fused", "stages", "wide"])
def test_experts_report_an_error_between_two_operations(ranks, monkeypatch, case, fused, failing):
    """A rank that has no memory in its backward ends the call of its peers, too."""
    function, fails = getattr(experts_ops, failing), threading.local()

    def with_error(*args, **options):
        if getattr(fails, "now", False):
            raise MemoryError("no memory here")
        return function(*args, **options)

    monkeypatch.setattr(experts_ops, failing, with_error)

    def run(world, device):
        t = tensors(case, world.rank, world.size, device)
        moe = make_moe(world, device, case, t, fused=fused)
        keep(world, moe)
        y = moe(t.x.requires_grad_(), t.idx, t.weight)
        with torch.autograd.set_multithreading_enabled(False):  # the backward runs in this thread on GPUs too
            fails.now = world.rank == 1
            got = outcome(lambda: y.backward(t.dy), moe.layer)
            fails.now = False
        return got, works_after(world, moe, t)

    results = ranks(run, world_size=2, at_least=2)
    check_outcomes([got for got, _ in results], ["MemoryError" if r == 1 else "PeerError"
                                                 for r in range(len(results))],
                   "no memory here", on_rank=1, elsewhere=["rank 1 failed before its", "no memory"])
    assert all(is_finite for _, is_finite in results)


def test_experts_soak_sample(ranks):
    """Random shapes and options: a short sample of soak_train.py."""

    def run(world, device):
        return [soak_train.run_batch(world, device, 5, number, 6, False) for number in (0, 4)]

    assert not any(map(any, ranks(run, world_size=3)))
