"""EPMoE as a module: over both kinds of layers, with default options, with shared layers, and finalize()."""

import pytest
import torch

import epmoe
from cases import MISTAKE_LIMIT_S, check_outcomes, keep, outcome
from epmoe import reference
from moe_cases import ACTIVATIONS, Model, check_moe, close, inputs_of, make_moe, parameters_of, run_moe


def over_plain_layer(world, device, model):
    """As make_moe, but over an EPAll2AllLayer, which only moves rows. The GEMMs are separate operations."""
    layer = epmoe.EPAll2AllLayer(world, model.tokens, model.hidden, model.topk,
                                 num_tot_experts=model.num_local * world.size, dtype=model.dtype,
                                 enable_local_combine=model.local, combine_mode=model.mode, device=device)
    moe = epmoe.EPMoE(model.hidden, model.inner, layer.num_experts, model.topk, activation=model.activation,
                      dtype=model.dtype, bias=model.bias, layer=layer)
    keep(world, moe)
    local = slice(world.rank * model.num_local, (world.rank + 1) * model.num_local)
    moe.load_state_dict({k: v[local] for k, v in parameters_of(model, layer.num_experts).items()})
    return moe


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_moe_over_plain_layer(ranks, activation):
    model = Model(activation=activation, bias=True)
    check_moe(ranks(lambda world, device: run_moe(world, device, model, make=over_plain_layer)), model)


def test_moe_default_options(ranks):
    def run(world, device):
        moe = epmoe.EPMoE(16, 24, 2 * world.size, 3, world, dtype=torch.float32, device=device)
        made = moe.layer.max_tokens, moe.layer._config.combine_mode, moe.activation, "topk=3," in repr(moe)
        moe.finalize()
        return made

    assert ranks(run, world_size=2) == [(4096, epmoe._C.COMBINE_LOCAL, "swiglu", True)] * ranks.size(2)


def test_moe_finalize_frees_memory(ranks):
    def run(world, device):
        heap = epmoe.SymmetricHeap(world, 1 << 24, device)
        keep(world, heap)
        moe = make_moe(world, device, Model(), heap=heap)
        before = heap.stats()["used"]
        moe.finalize()
        left = heap.stats()["used"]
        heap.close()
        return before > 0 and left == 0, outcome(moe.layer.ep_barrier_all).kind

    assert ranks(run, world_size=2) == [(True, "EpClosed")] * ranks.size(2)


def test_moe_repr_shows_topk_without_token_saving(ranks):
    def run(world, device):
        return repr(make_moe(world, device, Model(), token_saving=False))

    (text, *_) = ranks(run, world_size=2)
    assert "topk=3," in text


def test_moe_modules_share_layer(ranks):
    """Two modules in sequence use one layer. Forward and backward run through both."""
    model = Model(bias=True, capacity=False)

    def run(world, device):
        first = make_moe(world, device, model)
        second = epmoe.EPMoE(model.hidden, model.inner, model.num_local * world.size, model.topk,
                             dtype=model.dtype, bias=True, layer=first.layer)
        second.load_state_dict({k: 0.5 * v for k, v in first.state_dict().items()})
        x, idx, weight, dy = (t.to(device) for t in inputs_of(model, world.rank, world.size))
        other = inputs_of(model, world.rank, world.size, step=1)[1].to(device)
        x.requires_grad_()
        weight.requires_grad_()
        y = second(first(x, idx, weight), other, weight)
        y.backward(dy)
        first.finalize()
        return {"y": y.detach(), "x": x.grad, "weight": weight.grad,
                **{f"1.{n}": p.grad for n, p in first.named_parameters()},
                **{f"2.{n}": p.grad for n, p in second.named_parameters()}}

    results = ranks(run)
    size = len(results)
    p1 = {k: v.double().requires_grad_() for k, v in parameters_of(model, model.num_local * size).items()}
    p2 = {k: (0.5 * v.detach()).requires_grad_() for k, v in p1.items()}
    order = ("gate_up_proj", "down_proj")
    for rank, got in enumerate(results):
        x, idx, weight, dy = inputs_of(model, rank, size)
        other = inputs_of(model, rank, size, step=1)[1]
        x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
        y = x
        for p, i in ((p1, idx), (p2, other)):
            y = reference.moe(y, i, weight, *(p[n] for n in order), "swiglu", p["gate_up_proj_bias"],
                              p["down_proj_bias"])
        y.backward(dy.double())
        for name, want in (("y", y.detach()), ("x", x.grad), ("weight", weight.grad)):
            close(got[name], want, f"rank {rank}: {name}", 5e-5)
    for rank, got in enumerate(results):
        local = slice(rank * model.num_local, (rank + 1) * model.num_local)
        for i, p in ((1, p1), (2, p2)):
            for name, value in p.items():
                close(got[f"{i}.{name}"], value.grad[local], f"rank {rank}: gradient of {i}.{name}", 5e-5)


def test_moe_shared_layer_must_fit(ranks):
    def run(world, device):
        moe = make_moe(world, device, Model())
        right = {"hidden": 16, "inner": 24, "num_experts": 2 * world.size, "topk": 3, "dtype": torch.float32,
                 "layer": moe.layer}
        wrong = ({"hidden": 32}, {"topk": 2}, {"num_experts": 4 * world.size}, {"dtype": torch.bfloat16},
                 {"num_buffers": 2})
        got = [outcome(lambda o=o: epmoe.EPMoE(**(right | o))) for o in wrong]
        moe.finalize()
        return got

    for got in ranks(run, world_size=2):
        check_outcomes(got[:-1], "ValueError", "but the shared layer has")
        check_outcomes(got[-1:], "TypeError", "num_buffers", "layer=")


def test_moe_shared_layer_has_routing_weights_in_float32(ranks):
    def run(world, device):
        layer = epmoe.EPAll2AllLayer(world, 4, 16, 2, num_tot_experts=2 * world.size, dtype=torch.float32,
                                     weight_dtype=torch.bfloat16, device=device)
        got = outcome(lambda: epmoe.EPMoE(16, 24, 2 * world.size, 2, layer=layer, dtype=torch.float32))
        layer.finalize()
        return got

    check_outcomes(ranks(run, world_size=2), "ValueError", "the shared layer has weight_dtype torch.bfloat16")


@pytest.mark.parametrize("options, texts", [
    ({"inner": 32}, ("inner 32", "inner 24")),
    ({"activation": "gpt_oss"}, ("gpt_oss", "swiglu")),
    ({"bias": True}, ("bias True", "bias False")),
    ({"hidden": 32}, ("hidden",)),
    ({"num_tail_sms": 1, "num_sm": 4}, ()),
], ids=["inner", "activation", "bias", "hidden", "knobs"])
def test_moe_different_options_on_one_rank(ranks, options, texts):
    """Options that must agree are compared, also those that no call would detect. Tuning options may vary."""

    def run(world, device):
        world.set_timeout(MISTAKE_LIMIT_S)
        base = {"hidden": 16, "inner": 24, "num_experts": 2 * world.size, "topk": 3, "dtype": torch.float32,
                "device": device}
        mine = options if world.rank == 1 else {}
        got = outcome(lambda: keep(world, epmoe.EPMoE(**(base | {"ep_group": world} | mine))))
        epmoe.EPMoE(**base, ep_group=world).finalize()  # the world still works
        return got

    wanted = ("EpMismatch", "rank 1", "rank 0", *texts) if texts else ("nothing",)
    check_outcomes(ranks(run, world_size=2, at_least=2), *wanted)
