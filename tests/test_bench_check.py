"""benchmarks.check: the checks that a bench makes before it measures find wrong results."""

import unittest.mock

import pytest
import torch

import epmoe
from bench_cases import on_the_cpu, run_command  # noqa: F401
from benchmarks import check, train
from benchmarks.gemm import product_error
from benchmarks.layer import Layer
from benchmarks.torch_nccl import TorchAllToAll
from epmoe.gemm.grouped import FORWARD

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def dispatched():
    """(layer, its inputs, torch's all-to-all of the same inputs) in a world of one rank."""
    x, idx, weight = torch.randn(20, 16), torch.rand(20, 6).topk(3).indices, torch.rand(20, 3)
    with epmoe.World() as world, epmoe.EPAll2AllLayer(world, 20, 16, 3, num_tot_experts=6,
                                                      dtype=torch.float32, enable_local_combine=True,
                                                      device="cpu") as layer:
        yield layer, (x, idx, weight), TorchAllToAll(x, idx, weight, 6, 1)


def test_bench_check_accepts_only_right_results(dispatched):
    layer, inputs, peer = dispatched
    rows, row_weight, layout = layer.dispatch(*inputs)
    assert check.rows_error(rows, row_weight, peer) == ""
    other = rows.clone()
    other[5, 3] += 1
    assert "1 of 60 rows" in check.rows_error(other, row_weight, peer)
    assert "weights" in check.rows_error(rows, row_weight.flip(0), peer)
    assert "wanted rows of shape" in check.rows_error(rows[:-1], row_weight, peer)
    y_rows = check.experts(rows, layout.expert_offsets, 0)
    y = layer.combine(y_rows, layout, row_weight)
    assert check.sums_error(y, y_rows, peer) == ""
    unweighted = layer.combine(y_rows, layout)
    assert "tokens differ" in check.sums_error(unweighted, y_rows, peer)
    y[7, 2] = float("nan")
    assert "1 of 20 tokens" in check.sums_error(y, y_rows, peer)


def test_bench_stand_in_experts_differ(dispatched):
    """Neighbouring stand-in experts have different factors.

    With equal factors, a row at a wrong expert would not change the sum.
    """
    layer, (x, idx, weight), peer = dispatched
    rows, _, layout = layer.dispatch(x, idx, weight)
    y_rows = check.experts(rows, layout.expert_offsets, 0)
    expert = torch.repeat_interleave(torch.arange(6), layout.tokens_per_expert)
    assert torch.equal(y_rows, rows * torch.tensor([0.5, 1.0, 2.0, 4.0, 0.5, 1.0])[expert][:, None])


def test_bench_poisons_outputs():
    before = torch.are_deterministic_algorithms_enabled()
    with check.poisoned():
        assert torch.empty(1000).isnan().all()
        assert (torch.empty(9, dtype=torch.int32) == 2**31 - 1).all()
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_bench_gemm_checks_sums_to_the_precision_of_float32(expert):
    """The first, middle and last expert are checked: a sum of 64 products may differ by less than 0.001."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(30, 64, generator=g), torch.randn(3, 8, 64, generator=g)
    offsets = torch.tensor([0, 7, 20, 30], dtype=torch.int32)
    y = epmoe.grouped_gemm(a, b, offsets=offsets)
    assert product_error(FORWARD, None, a, b, offsets, y) == ""
    y[offsets[expert], 3] += 1e-3
    assert f"numbers of expert {expert} differ" in product_error(FORWARD, None, a, b, offsets, y)


@pytest.mark.parametrize("wrong, text", [
    (lambda layer, x, w: 1.5 * layer(x, w), "y differs"),
    (lambda layer, x, w: layer(x, w) + 3 * (x - x.detach()), "gradient of x differs"),
    (lambda layer, x, w: layer(x, w) + (layer.down - layer.down.detach()).sum(), "gradient of down"),
], ids=["y", "x", "down"])
def test_bench_train_checks_values_and_gradients(wrong, text):
    layer = train.TorchLayer

    def make(*arguments):
        right = layer(*arguments)
        return lambda x, w: wrong(right, x, w)

    with unittest.mock.patch.object(train, "TorchLayer", make), pytest.raises(AssertionError, match=text):
        run_command(["train", "--shapes", "mixtral", "--iters", "1"])


def test_bench_layer_checks_the_layer_with_a_capacity(monkeypatch):
    right = epmoe.EPMoE.forward
    monkeypatch.setattr(epmoe.EPMoE, "forward", lambda moe, *inputs: right(moe, *inputs) *
                        (1.0 if moe.layer.capacity is None else 1.5))
    with pytest.raises(AssertionError, match="with a capacity differs in its bits"):
        run_command(["layer", "--shapes", "qwen3-30b", "--iters", "1"])


@pytest.mark.parametrize("owner, name, text", [
    (epmoe.EPMoE, "forward", "tokens differ"),
    (Layer, "unfused", "fused and unfused results differ"),
], ids=["sums", "bits"])
def test_bench_layer_checks_the_sums_and_their_bits(monkeypatch, owner, name, text):
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: 1.5 * right(*arguments))
    with pytest.raises(AssertionError, match=text):
        run_command(["layer", "--shapes", "qwen3-30b", "--iters", "1"])
