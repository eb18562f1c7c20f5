"""Copies of an EPMoE have their own parameters and share the communication. A pickle is refused."""

import copy
import io
import pickle

import pytest
import torch

import epmoe
from cases import keep


def _moe(world, device):
    moe = epmoe.EPMoE(16, 32, 2 * world.size, 2, world, max_tokens=8, dtype=torch.float32, device=device)
    keep(world, moe)
    return moe


def _inputs(world, device):
    g = torch.Generator().manual_seed(world.rank)
    x = torch.randn(6, 16, generator=g)
    weights, idx = torch.rand(6, 2 * world.size, generator=g).topk(2)
    return x.to(device), idx.to(device), weights.to(device)


def test_moe_deepcopy_shares_communication(ranks):
    """A deepcopy has its own parameters and the same layer, also after forward and backward."""

    def body(world, device):
        moe = _moe(world, device)
        x, idx, weights = _inputs(world, device)
        first = moe(x, idx, weights)
        first.sum().backward()
        average = copy.deepcopy(moe)
        assert average.layer is moe.layer and average.gate_up_proj is not moe.gate_up_proj
        assert average.layer.world is world and copy.copy(moe.layer) is moe.layer
        assert copy.deepcopy([moe.layer.heap])[0] is moe.layer.heap
        same = average(x, idx, weights)
        with torch.no_grad():
            for p in moe.parameters():
                p.zero_()
        zero, again = moe(x, idx, weights), average(x, idx, weights)
        again.sum().backward()
        moe.finalize()
        return first, same, again, zero, average.gate_up_proj.grad is not None

    for first, same, again, zero, has_grad in ranks(body):
        assert torch.equal(first, same) and torch.equal(first, again)
        assert not zero.any() and first.any() and has_grad


def test_moe_averaged_model(ranks):
    """torch's AveragedModel, which copies the module, computes an exponential moving average."""

    def body(world, device):
        moe = _moe(world, device)
        ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        average = torch.optim.swa_utils.AveragedModel(moe, multi_avg_fn=ema)
        before = moe.down_proj.detach().clone()
        average.update_parameters(moe)
        with torch.no_grad():
            moe.down_proj.add_(1)
        average.update_parameters(moe)
        y = average(*_inputs(world, device))
        moe.finalize()
        return before, average.module.down_proj.detach(), y

    for before, after, y in ranks(body):
        torch.testing.assert_close(after, before + 0.5)
        assert y.shape == (6, 16) and y.isfinite().all()


def test_moe_pickle_error_names_state_dict(ranks):
    def body(world, device):
        moe = _moe(world, device)
        texts = []
        for thing in (moe, moe.layer, moe.layer.heap, world):
            for save in (pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
                with pytest.raises(TypeError) as error:
                    save(thing)
                texts.append(str(error.value))
        torch.save(moe.state_dict(), io.BytesIO())
        moe.finalize()
        return texts

    for texts in ranks(body, world_size=2):
        assert all("cannot be pickled" in text and "state_dict" in text for text in texts), texts
