"""EPMoE under torch.compile, and torch's opcheck of the operators."""

import shutil
import unittest.mock
import warnings

import pytest
import torch

import epmoe
from cases import first, keep, outcome
from moe_cases import Model, check_moe, inputs_of, make_moe
from pace import HANG_S

MODELS = (Model(num_local=1, capacity=True, activation=epmoe.GptOss(alpha=1.3, limit=0.6), bias=True,
                local=False, unequal=False),
          Model(num_local=1, bias=True, dtype=torch.bfloat16, unequal=False),
          Model(num_local=1, capacity=True, unequal=False),
          Model(num_local=1, capacity=True, activation=epmoe.SwiGLU(limit=0.6), unequal=False),
          Model(num_local=1, capacity=True, activation="relu2", bias=True, unequal=False))
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static",
          "test_aot_dispatch_dynamic")


def routed(world, device, tokens):
    """Random x [T, 16], expert indices and weights [T, 2] for 2 experts on each rank."""
    g = torch.Generator().manual_seed(world.rank + 100 * tokens)
    x = torch.randn(tokens, 16, generator=g).to(device)
    scores = torch.rand(tokens, 2 * world.size, generator=g).to(device)
    weight, idx = scores.topk(2)
    return x, idx, weight


def compiled(world, device, model):
    """As run_moe, with a compiled module without graph breaks. The second call reuses the graph."""
    torch._dynamo.reset()
    moe = make_moe(world, device, model)
    x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
    eager = moe(x, idx, weight)
    fast = torch.compile(moe, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        moe.zero_grad()
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = fast(x, idx, weight)
        y.backward(dy)
    assert torch.equal(y, eager)
    grads = {name: p.grad for name, p in moe.named_parameters()}
    moe.finalize()
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad, **grads}


@pytest.mark.parametrize("model", first(2, MODELS), ids=str)
def test_moe_compile_without_graph_breaks(ranks, model):
    check_moe(ranks.isolated(compiled, model, world_size=2, timeout_s=HANG_S), model)


def stages(world, device):
    """True if dispatch and combine, with and without weights, give the same in one compiled graph."""
    torch._dynamo.reset()
    layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=2 * world.size, dtype=torch.float32,
                                 device=device, capacity=world.size * 16)
    keep(world, layer)

    def step(x, idx, weight):
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        bare, _, _ = layer.dispatch(x, layout=layout)
        return layer.combine(rows * 2, layout, row_weight) + layer.combine(bare, layout)

    g = torch.Generator().manual_seed(world.rank)
    x, weight = torch.randn(8, 16, generator=g).to(device), torch.rand(8, 2, generator=g).to(device)
    idx = torch.randint(-1, 2 * world.size + 1, (8, 2), generator=g).to(device)
    same = torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x, idx, weight),
                       step(x, idx, weight))
    layer.finalize()
    return same


def test_moe_compile_stages(ranks):
    assert all(ranks.isolated(stages, world_size=2, timeout_s=HANG_S))


def wrong_ranks(world, device):
    """Calls with arguments that have a wrong number of dimensions, eager and compiled.

    Returns (the kinds of errors, whether a right call still works).
    """
    torch._dynamo.reset()
    layer = epmoe.EPAll2AllLayer(world, 8, 16, 1, num_tot_experts=2 * world.size, dtype=torch.float32,
                                 device=device, capacity=world.size * 8)
    keep(world, layer)
    x, idx = torch.ones(8, 16, device=device), torch.zeros(8, 1, dtype=torch.int64, device=device)
    weight, rows = torch.full((8, 1), 0.5, device=device), layer.capacity

    def step(weight, scatter, row_weight):
        out, got, layout = layer.dispatch(x, idx, weight, scatter)
        return layer.combine(out, layout, got if row_weight is None else row_weight)

    seen = []
    for wrong in ((weight[:, 0], None, None),
                  (weight, torch.zeros(8, dtype=torch.int32, device=device), None),
                  (weight, torch.zeros((), dtype=torch.int32, device=device), None),
                  (weight, None, torch.ones(rows, 1, device=device)),
                  (weight, None, torch.tensor(2.0, device=device))):
        for fn in (step, torch.compile(step, backend="eager")):
            seen.append(outcome(lambda: fn(*wrong), layer).kind)
            world.exchange(b"back")
    right = torch.equal(torch.compile(step, backend="eager")(weight, None, None), 0.5 * x)
    layer.finalize()
    return seen, right


def wrong_by_choice(world, device):
    """Calls with weights of the right size and a wrong shape, without token saving: the kinds of errors."""
    torch._dynamo.reset()
    op = epmoe.EpAll2AllFusedOp(world, 8, 16, 2, num_tot_experts=2 * world.size, dtype=torch.float32,
                                device=device, token_saving=False)
    keep(world, op)
    x, weight = torch.ones(8, 16, device=device), torch.ones(8, 2, device=device)
    idx = torch.zeros(8, 2, dtype=torch.int64, device=device)
    seen = []
    for wrong in (weight.view(2, 8), weight.view(4, 4), weight.view(16), weight.view(8, 2, 1)):
        for fn in (op.dispatch, torch.compile(op.dispatch, backend="eager")):
            seen.append(outcome(lambda: fn(x, idx, wrong), op).kind)
            world.exchange(b"back")
    op.finalize()
    return seen


@pytest.mark.long
def test_moe_compile_rejects_wrong_shapes(ranks):
    for seen, right in ranks.isolated(wrong_ranks, world_size=2, timeout_s=HANG_S):
        assert seen == ["ValueError"] * 10 and right
    for seen in ranks.isolated(wrong_by_choice, world_size=2, timeout_s=HANG_S):
        assert seen == ["ValueError"] * 8


def wrong_on_one_rank(world, device):
    """Calls of a compiled module with wrong arguments on the last rank.

    Returns (the kinds of errors of this rank, whether right calls give the right result).
    """
    torch._dynamo.reset()
    moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, max_tokens=16, dtype=torch.float32, device=device)
    keep(world, moe)
    fast = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    x, idx, weight = routed(world, device, 6)
    with torch.no_grad():  # a graph for each wrong call takes seconds, with gradients three times as long
        right, seen = [torch.equal(fast(x, idx, weight), moe(x, idx, weight))], []
        for wrong in ((x.bfloat16(), idx, weight), (x[:, :8], idx, weight), (x, idx[:, :1], weight),
                      (x, idx.float(), weight), (x, idx, weight.long()), (x, idx, weight[:, :1])):
            arguments = wrong if world.rank == world.size - 1 else (x, idx, weight)
            seen.append(outcome(lambda: fast(*arguments), moe.layer).kind)
            right.append(torch.equal(fast(x, idx, weight), moe(x, idx, weight)))
    moe.finalize()
    return seen, all(right)


@pytest.mark.long
def test_moe_compile_reports_errors_to_other_ranks(ranks):
    """Arguments are checked when the graph runs, because the compiler cannot notify the other ranks."""
    *others, (seen, right) = ranks.isolated(wrong_on_one_rank, world_size=2, timeout_s=HANG_S)
    assert right and seen == ["TypeError", "ValueError", "ValueError", "TypeError", "TypeError", "ValueError"]
    assert all(right and seen == ["PeerError"] * 6 for seen, right in others)


def wrong_rows_on_one_rank(world, device):
    """Training calls of a compiled module, first with fewer rows in one argument on the last rank."""
    seen = []
    for wrong in range(3):
        torch._dynamo.reset()
        moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, max_tokens=16, dtype=torch.float32, device=device)
        keep(world, moe)
        fast = torch.compile(moe, fullgraph=True, backend="aot_eager")
        right = routed(world, device, 6)
        is_last = world.rank == world.size - 1
        arguments = [t[:4] if is_last and i == wrong else t for i, t in enumerate(right)]
        seen.append(outcome(lambda: fast(*arguments).sum().backward(), moe.layer).kind)
        seen.append(torch.equal(fast(*right), moe(*right)))
        moe.finalize()
    return seen


@pytest.mark.cpu_only
def test_moe_compile_reports_wrong_numbers_of_rows_to_other_ranks(ranks):
    *others, of_last = ranks.isolated(wrong_rows_on_one_rank, world_size=2, timeout_s=HANG_S)
    assert of_last == ["ValueError", True] * 3
    assert all(of_other == ["PeerError", True] * 3 for of_other in others)


def with_no_tokens(world, device):
    """A compiled residual block in which the last rank has no tokens.

    The result of this rank is empty, but its operations must run, because the other rank waits for them.
    """
    torch._dynamo.reset()
    moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, max_tokens=16, dtype=torch.float32, device=device)
    keep(world, moe)
    step = torch.compile(lambda x, idx, weight: x + moe(x, idx, weight), fullgraph=True)
    from torch._inductor import config, cpu_vec_isa

    x, idx, weight = routed(world, device, 0 if world.rank == world.size - 1 else 9)
    # A cached graph of an earlier run would not test this code. The detection of vector extensions compiles a
    # program for each of them, which would take half of the time.
    no_caches = config.patch(force_disable_caches=True)
    no_detection = unittest.mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list)
    with no_caches, no_detection:
        for with_grad in (False, True):
            with torch.set_grad_enabled(with_grad):
                y, want = step(x, idx, weight), x + moe(x, idx, weight)
            torch.testing.assert_close(y, want)
    moe.finalize()


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("g++"), reason="torch's compiler for the CPU needs g++")
def test_moe_compile_rank_without_tokens(ranks):
    """With inductor, which removes operations whose results are not used."""
    ranks.isolated(with_no_tokens, world_size=2, timeout_s=HANG_S)


def many_sizes(world, device, capacity, fullgraph, activation="swiglu"):
    """Calls with different numbers of tokens, compiled with dynamic=True. Returns the number of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, activation=activation, max_tokens=16, dtype=torch.float32,
                      device=device, capacity=32 * world.size if capacity else None)
    keep(world, moe)
    step = torch.compile(moe, backend="aot_eager", dynamic=True, fullgraph=fullgraph)
    for tokens in (5, 9, 7, 6, 8, 10, 11, 12, 13, 14, 15, 16):
        x, idx, weight = routed(world, device, tokens)
        x.requires_grad_()
        y = step(x, idx, weight)
        y.sum().backward()
        torch.testing.assert_close(y, moe(x, idx, weight))
    moe.finalize()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("capacity, activation",
                         first(1, [(False, "swiglu"), (True, "swiglu"), (True, "gpt_oss")]),
                         ids=["exact", "capacity", "gpt_oss"])
def test_moe_compile_many_sizes_in_one_graph(ranks, capacity, activation):
    results = ranks.isolated(many_sizes, capacity, True, activation, world_size=2, timeout_s=HANG_S)
    assert all(n == 1 for n in results)


@pytest.mark.long
def test_moe_compile_with_graph_breaks(ranks):
    ranks.isolated(many_sizes, False, False, world_size=2, timeout_s=HANG_S)


def test_moe_compile_layer_ids_differ_by_size():
    """torch finds cached graphs by their constants. So layers of different sizes need different ids."""
    a, b = (epmoe.EPAll2AllLayer(epmoe.thread_worlds(1)[0], n, 16, 2, num_tot_experts=2, device="cpu")
            for n in (8, 9))
    assert a.id.split(" ", 1)[1] != b.id.split(" ", 1)[1]
    for layer in (a, b):
        for tokens in range(9):
            assert layer._plan_words(tokens) == epmoe._C.plan_layout(layer._config, tokens)["num_words"]
        layer.finalize()


def two_plans(world, device, order):
    """Two plans of different sizes in one buffer, then their dispatches. True if all results are right.

    Each dispatch must return as many rows as its own plan has.
    """
    torch._dynamo.reset()
    layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=2 * world.size, dtype=torch.float32,
                                 device=device)
    keep(world, layer)

    def step(x, *indices):
        layouts = [layer.preprocess(idx) for idx in indices]
        return [layer.combine(layer.dispatch(x[: len(idx)], layout=layout)[0] * 2, layout)
                for idx, layout in zip(indices, layouts)]

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(world.rank)).to(device)
    few = torch.full((3, 2), 2 * world.size - 1, device=device)
    many = torch.zeros(8, 2, dtype=torch.int64, device=device)
    indices = (few, many) if order == "larger" else (many, few)
    want = step(x, *indices)
    got = torch.compile(step, backend="eager", fullgraph=True)(x, *indices)
    same = all(torch.equal(a, b) for a, b in zip(got, want))
    same &= all(torch.allclose(y, 4 * x[: len(y)]) for y in want)
    layer.finalize()
    return same


def breaks():
    """The first line of each graph break since the reset of the counters."""
    return [text.splitlines()[0] for text in torch._dynamo.utils.counters["graph_break"].elements()]


def compiled_with_defaults(world, device):
    """A module without capacity, compiled with default options.

    Returns (whether results and gradients are those of eager mode, epmoe's warnings, the graph breaks).
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, world, max_tokens=16, dtype=torch.float32, device=device)
    keep(world, moe)
    fast, g, same = torch.compile(moe, backend="aot_eager"), torch.Generator().manual_seed(world.rank), []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for tokens in (8, 12, 0, 8):
            x = torch.randn(tokens, 16, generator=g).to(device).requires_grad_()
            weight = torch.rand(tokens, 2, generator=g).to(device)
            idx = torch.randint(0, 2 * world.size, (tokens, 2), generator=g).to(device)
            both = []
            for call in (fast, moe):
                y = call(x, idx, weight)
                both.append((y.detach(), *torch.autograd.grad(y.square().sum(), [x, *moe.parameters()])))
            same.append(all(torch.equal(a, b) for a, b in zip(*both)))
    moe.finalize()
    return all(same), [str(w.message) for w in seen if "epmoe" in str(w.message)], breaks()


def test_moe_compile_with_defaults_is_one_graph(ranks):
    """Without capacity, the number of rows is known only at run time. EPMoE needs no option for that."""
    for same, warnings_seen, found in ranks.isolated(compiled_with_defaults, world_size=2, timeout_s=HANG_S):
        assert same and not warnings_seen and not found, (warnings_seen, found)


def stages_with_defaults(world, device):
    """Stages of a layer without capacity, between them code that depends on the number of rows.

    Returns (whether the result is that of eager mode, the graph breaks).
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = epmoe.EPAll2AllLayer(world, 16, 16, 2, num_tot_experts=2 * world.size, dtype=torch.float32,
                                 device=device)
    keep(world, layer)

    def step(x, idx, weight):
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        if rows.shape[0] > 16:
            rows = rows * 2
        return layer.combine(rows, layout, row_weight)

    fast = torch.compile(step, backend="eager")
    inputs = [routed(world, device, tokens) for tokens in (9, 3, 0)]
    same = [torch.equal(fast(*given), step(*given)) for given in inputs]
    layer.finalize()
    return all(same), breaks()


@pytest.mark.long
def test_moe_compile_breaks_only_at_sizes_of_the_run(ranks):
    """The caller's code may depend on the size. So by default torch breaks the graph at a dispatch.

    It does not trace into operators, which then run between two graphs.
    """
    for same, found in ranks.isolated(stages_with_defaults, world_size=2, timeout_s=HANG_S):
        assert same and found and set(found) == {"Dynamic shape operator"}, found


@pytest.mark.parametrize("order", first(1, ["smaller", "larger"]))
def test_moe_compile_two_plans_in_one_buffer(ranks, order):
    """The second plan is smaller or larger than the first."""
    assert all(ranks.isolated(two_plans, order, world_size=2, timeout_s=HANG_S))


def checked(world, device):
    """opcheck of schema, fake tensors, gradients and tracing of every operator.

    The arguments are those that layer.py passes.
    """
    for mode in ("scatter", "gather", "local"):
        layer = epmoe.EPAll2AllLayer(world, 8, 16, 2, num_tot_experts=2 * world.size, dtype=torch.float32,
                                     device=device, capacity=world.size * 16,
                                     combine_mode="gather" if mode == "gather" else "scatter",
                                     enable_local_combine=mode == "local")
        keep(world, layer)
        ops, g = torch.ops.epmoe, torch.Generator().manual_seed(world.rank)
        idx = torch.randint(0, 2 * world.size, (8, 2), generator=g).to(device)
        x = torch.randn(8, 16, generator=g).to(device).requires_grad_()
        weight = torch.rand(8, 2, generator=g).to(device).requires_grad_()
        plan = ops.plan(idx, None, layer.id, 0)
        dispatched = ops.dispatch(x, None, weight, plan, layer.id, 0, layer.capacity)
        rows, row_weight, recv = (t.detach() for t in dispatched[:3])
        rows.requires_grad_()
        row_weight.requires_grad_()
        # The last two checks compare two runs. Plans of two runs differ in one word, the number of the call.
        torch.library.opcheck(ops.plan, (idx, None, layer.id, 0), test_utils=CHECKS[:3])
        # Without weights, one output is never written, so two runs of it cannot be compared either.
        for w in (weight, None):
            torch.library.opcheck(ops.dispatch, (x, None, w, plan, layer.id, 0, layer.capacity),
                                  test_utils=CHECKS[: 5 if w is weight else 3])
        for w, scalar in ((row_weight, None), (None, None), (None, row_weight.detach()),
                          (row_weight, row_weight.detach())):
            torch.library.opcheck(ops.combine, (rows, w, scalar, plan, recv, layer.id, 0, 8),
                                  test_utils=CHECKS[: 3 if scalar is None else 5])
        layer.finalize()
    return True


def test_moe_operators_pass_opcheck(ranks):
    assert all(ranks.isolated(checked, world_size=2, timeout_s=HANG_S))


def test_moe_operator_of_deleted_layer_raises():
    with pytest.raises(RuntimeError, match="this process has no epmoe layer"):
        torch.ops.epmoe.plan(torch.zeros(1, 2, dtype=torch.int64), None, "1000000000 ()", 0)
