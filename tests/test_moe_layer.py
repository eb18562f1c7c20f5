"""EPMoE and its gradients against an oracle that computes the experts of all ranks in one process."""


import pytest
import torch

import epmoe
from cases import MISTAKE_LIMIT_S, case_id, check_outcomes, keep, outcome
from moe_cases import ACTIVATIONS, Model, check_moe, inputs_of, make_moe, run_moe


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("local", [True, False], ids=["local", "scatter"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_moe_forward_and_gradients(ranks, activation, local, bias):
    model = Model(activation=activation, local=local, bias=bias)
    check_moe(ranks(run_moe, model), model)


@pytest.mark.parametrize("pattern", ["distinct", "one_expert", "one_rank", "own_rank", "sentinels",
                                     "duplicates", "edges"])
@pytest.mark.parametrize("capacity", [False, True], ids=["exact", "capacity"])
def test_moe_pattern(ranks, pattern, capacity):
    model = Model(pattern=pattern, capacity=capacity, bias=True)
    check_moe(ranks(run_moe, model), model)


@pytest.mark.parametrize("mode", ["scatter", "gather"])
def test_moe_capacity_and_mode(ranks, mode):
    model = Model(capacity=True, local=False, mode=mode)
    check_moe(ranks(run_moe, model), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=case_id)
# Without the activations that have a low limit: many values are near it. If rounding moves a value beyond the
# limit, its gradient changes.
@pytest.mark.parametrize("activation", ACTIVATIONS[:6])
def test_moe_low_precision(ranks, activation, dtype):
    model = Model(hidden=64, inner=48, num_local=4, tokens=40, dtype=dtype, activation=activation,
                  bias=activation == "gpt_oss")
    check_moe(ranks(run_moe, model), model)


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_moe_world_size(ranks, world_size):
    model = Model(num_local=1 if world_size == 8 else 3)
    check_moe(ranks(run_moe, model, world_size=world_size), model)


def test_moe_all_choices_dropped(ranks):
    model = Model(pattern="all_dropped", bias=True)
    results = ranks(run_moe, model)
    check_moe(results, model)
    assert all(r["rows"] == 0 and not r["y"].any() and not r["gate_up_proj"].any() for r in results)


@pytest.mark.parametrize("capacity", [False, True], ids=["exact", "capacity"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_moe_ranks_without_tokens(ranks, tokens, capacity):
    """Ranks without tokens take part in forward and backward."""
    model = Model(tokens=tokens, capacity=capacity, bias=True)
    results = ranks(run_moe, model)
    check_moe(results, model)
    if len(results) > 1:
        assert min(len(r["y"]) for r in results) == 0


def test_moe_under_checkpoint(ranks):
    """Activation checkpointing, which recomputes the forward in the backward, gives the same numbers."""
    from torch.utils.checkpoint import checkpoint

    model = Model(bias=True)

    def run(world, device):
        moe = make_moe(world, device, model)
        x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        x.requires_grad_()
        weight.requires_grad_()
        y = checkpoint(moe, x, idx, weight, use_reentrant=False)
        y.backward(dy)
        moe.finalize()
        return {"y": y.detach(), "x": x.grad, "weight": weight.grad,
                **{n: p.grad for n, p in moe.named_parameters()}}

    check_moe(ranks(run), model)


@pytest.mark.parametrize("x_grad, weight_grad", [(True, False), (False, True), (False, False)],
                         ids=["x", "weights", "parameters"])
def test_moe_gradients_of_some_inputs(ranks, x_grad, weight_grad):
    """If tokens or router weights need no gradient, they get none. All other gradients are right."""
    model = Model(bias=True)
    without = () if x_grad else ("x",)
    without += () if weight_grad else ("weight",)
    results = ranks(run_moe, model, x_grad, weight_grad)
    check_moe(results, model, without=without)
    assert all(r[name] is None for r in results for name in without)


def test_moe_without_gradients(ranks):
    def run(world, device, model):
        moe = make_moe(world, device, model)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        with torch.no_grad():
            y = moe(x, idx, weight)
        for p in moe.parameters():
            p.requires_grad_(False)
        again = moe(x, idx, weight)
        with torch.inference_mode():
            third = moe(x, idx, weight)
        moe.finalize()
        assert not y.requires_grad and not again.requires_grad
        return {"y": y, "again": torch.equal(y, again) and torch.equal(y, third)}

    model = Model()
    results = ranks(run, model)
    check_moe(results, model, without=("x", "weight", "gate_up_proj", "down_proj"))
    assert all(r["again"] for r in results)


def test_moe_gradients_are_the_same_in_every_run(ranks):
    """Four runs of forward and backward give the same gradients, bit by bit."""

    def run(world, device, model):
        moe = make_moe(world, device, model)
        seen = []
        for _ in range(4):
            x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
            x.requires_grad_()
            weight.requires_grad_()
            moe.zero_grad()
            moe(x, idx, weight).backward(dy)
            seen.append([x.grad, weight.grad, *(p.grad.clone() for p in moe.parameters())])
        moe.finalize()
        return all(torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later))

    assert all(ranks(run, Model(dtype=torch.bfloat16, tokens=30)))


def test_moe_leading_dimensions(ranks):
    """The result of [batch, sequence, H] has the same shape. Indices may be int32. Inputs may be strided."""

    def run(world, device):
        model = Model(tokens=12, unequal=False)
        moe = make_moe(world, device, model)
        x, idx, weight, _ = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        flat = moe(x, idx, weight)
        shaped = moe(x.view(3, 4, -1), idx.view(3, 4, -1).to(torch.int32), weight.view(3, 4, -1).double())
        strided = moe(x.t().contiguous().t(), idx.t().contiguous().t(), weight)
        moe.finalize()
        is_same = torch.equal(shaped.view(12, -1), flat) and torch.equal(strided, flat)
        return shaped.shape == (3, 4, 16) and is_same

    assert all(ranks(run))


@pytest.mark.parametrize("activation, wide", [("swiglu", 48), ("gpt_oss", 48), ("gelu", 24), ("relu2", 24),
                                              (epmoe.SwiGLU(limit=7.0), 48)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_moe_parameter_names_and_shapes(ranks, activation, wide, bias):
    """Names and shapes are those of common checkpoints. repr() shows the main settings."""

    def run(world, device):
        moe = epmoe.EPMoE(16, 24, 2 * world.size, 3, world, activation, max_tokens=8, dtype=torch.bfloat16,
                          device=device, bias=bias)
        keep(world, moe)
        shapes = {k: tuple(v.shape) for k, v in moe.named_parameters()}  # of this rank
        are_valid = all(p.dtype == torch.bfloat16 and p.requires_grad and p.isfinite().all() and p.any()
                        and p.abs().max() <= 1 for p in moe.parameters())
        text = repr(moe)
        moe.finalize()
        return shapes, bool(are_valid), text

    want = {"gate_up_proj": (2, wide, 16), "down_proj": (2, 16, 24)}
    if bias:
        want |= {"gate_up_proj_bias": (2, wide), "down_proj_bias": (2, 16)}
    for rank, (shapes, are_valid, text) in enumerate(ranks(run)):
        assert shapes == want and list(shapes) == list(want) and are_valid
        assert f"activation={activation}" in text and f"rank={rank} of {ranks.size()}" in text
        assert "local_experts=2" in text


def test_moe_initial_values_are_bounded_by_fan_in(ranks):
    """Initial values are at most 1 / sqrt(fan_in)."""

    def run(world, device):
        moe = epmoe.EPMoE(64, 256, 2 * world.size, 2, world, max_tokens=8, dtype=torch.float32, device=device,
                          bias=True)
        keep(world, moe)
        largest = {k: p.abs().max().item() for k, p in moe.named_parameters()}
        moe.finalize()
        return largest

    for largest in ranks(run, world_size=2):
        for name, bound in (("gate_up_proj", 1 / 8), ("gate_up_proj_bias", 1 / 8), ("down_proj", 1 / 16),
                            ("down_proj_bias", 1 / 16)):
            assert 0.9 * bound < largest[name] <= bound, name


@pytest.mark.parametrize("change, kind", [
    (lambda a: a | {"x": a["x"].double()}, "TypeError"),
    (lambda a: a | {"x": a["x"][:, :8]}, "ValueError"),
    (lambda a: a | {"idx": a["idx"].float()}, "TypeError"),
    (lambda a: a | {"idx": a["idx"][:, :2]}, "ValueError"),
    (lambda a: a | {"weight": a["weight"][:, :2]}, "ValueError"),
    (lambda a: a | {"x": a["x"].to_sparse()}, "ValueError"),
    (lambda a: a | {"x": None}, "TypeError"),
    (lambda a: a | {"x": a["x"][0, 0]}, "ValueError"),
    (lambda a: a | {"idx": a["idx"].tolist()}, "TypeError"),
    (lambda a: a | {"weight": None}, "TypeError"),
    (lambda a: a | {"weight": a["weight"].long()}, "TypeError"),
    (lambda a: a | {"idx": a["idx"] + 1000}, "EpIndexError"),
    (lambda a: {k: torch.cat([v, v]) for k, v in a.items()}, "ValueError"),
], ids=["dtype", "hidden", "index-dtype", "index-topk", "weight-topk", "sparse", "none", "scalar",
        "index-list", "weight-none", "weight-dtype", "index", "tokens"])
def test_moe_wrong_arguments(ranks, change, kind):
    """Rank 1 passes a wrong argument. Afterwards the module still works, and so do its gradients."""
    model = Model(unequal=False)

    def run(world, device):
        moe = make_moe(world, device, model)
        x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        arguments = {"x": x, "idx": idx, "weight": weight}
        world.set_timeout(MISTAKE_LIMIT_S)
        passed = change(arguments) if world.rank == 1 else arguments
        got = outcome(lambda: moe(*passed.values()), moe.layer)
        x.requires_grad_()
        weight.requires_grad_()
        y = moe(x, idx, weight)
        y.backward(dy)
        moe.finalize()
        return got, {"y": y.detach(), "x": x.grad, "weight": weight.grad,
                     **{n: p.grad for n, p in moe.named_parameters()}}

    results = ranks(run, world_size=3, at_least=2)
    kinds = [kind if rank == 1 or kind == "EpIndexError" else "PeerError" for rank in range(len(results))]
    check_outcomes([r[0] for r in results], kinds, "rank 1", on_rank=0)
    check_moe([r[1] for r in results], model)


def test_moe_overflow(ranks):
    """More rows than the capacity raise EpOverflow. A smaller call afterwards works."""

    def run(world, device):
        moe = epmoe.EPMoE(16, 24, 2 * world.size, 2, world, max_tokens=8, dtype=torch.float32, device=device,
                          capacity=7)
        keep(world, moe)
        x, weight = torch.ones(8, 16, device=device), torch.ones(8, 2, device=device)
        got = outcome(lambda: moe(x, torch.zeros(8, 2, dtype=torch.int64, device=device), weight), moe.layer)
        fits = moe(x[:1], torch.full((1, 2), 2 * world.rank, device=device), weight[:1])
        moe.finalize()
        return got, bool(fits.isfinite().all())

    results = ranks(run)
    check_outcomes([r[0] for r in results], "EpOverflow", "rank 0", "7", str(16 * ranks.size()))
    assert all(ok for _, ok in results)


@pytest.mark.cpu_only
@pytest.mark.parametrize("with_grad", [False, True])
def test_moe_host_counts_are_in_its_last_layout(with_grad):
    """The host has read the rows of each expert, also where the experts are one call of the module."""
    moe = epmoe.EPMoE(16, 16, 4, 2, max_tokens=600, host_counts=True, device="cpu")
    idx = torch.tensor([[0, 1], [1, 3], [1, 2]])
    with torch.set_grad_enabled(with_grad):
        moe(torch.randn(3, 16).bfloat16(), idx, torch.ones(3, 2))
    assert moe.last_layout._expert_rows is not None
    assert moe.last_layout.tokens_per_expert_list == [1, 3, 1, 1]
    moe.finalize()
