"""EPMoE as a module: over layers of either kind, with its defaults, and when it is given up."""

import pytest
import torch

import epmoe
from cases import keep, outcome
from test_moe_layer import ACTIVATIONS, Model, check_moe, make_moe, parameters_of, run_moe


def over_plain_layer(world, device, model):
    """The same over a layer that only moves rows: the products come one after the other."""
    layer = epmoe.EPAll2AllLayer(world, model.tokens, model.hidden, model.topk, num_tot_experts=model.num_local * world.size, dtype=model.dtype,
                                 enable_local_combine=model.local, combine_mode=model.mode, device=device)
    moe = epmoe.EPMoE(model.hidden, model.inner, layer.num_experts, model.topk, activation=model.activation, dtype=model.dtype, bias=model.bias, layer=layer)
    keep(world, moe)
    local = slice(world.rank * model.num_local, (world.rank + 1) * model.num_local)
    moe.load_state_dict({k: v[local] for k, v in parameters_of(model, layer.num_experts).items()})
    return moe


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_moe_over_a_layer_that_only_moves(ranks, activation):
    model = Model(activation=activation, bias=True)
    check_moe(ranks(lambda world, device: run_moe(world, device, model, make=over_plain_layer)), model)


def test_moe_as_it_is_made(ranks):
    def run(world, device):
        moe = epmoe.EPMoE(16, 24, 2 * world.size, 3, world, dtype=torch.float32, device=device)
        made = moe.layer.max_tokens, moe.layer._config[6], moe.activation, "topk=3," in repr(moe)
        moe.finalize()
        return made

    assert ranks(run, world_size=2) == [(4096, epmoe._C.COMBINE_LOCAL, "swiglu", True)] * ranks.size(2)


def test_moe_finalize_gives_the_memory_back(ranks):
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


def test_moe_without_token_saving_says_its_own_topk(ranks):
    (text, *_) = ranks(lambda world, device: repr(make_moe(world, device, Model(), token_saving=False)), world_size=2)
    assert "topk=3," in text
