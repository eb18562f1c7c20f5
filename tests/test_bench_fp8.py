"""python -m benchmarks gemm and layer --fp8 on the CPU: what they measure, and that they check results."""

import sys
import types

import pytest
import torch

import epmoe
from benchmarks import gemm_fp8, train
from epmoe.a2a import fused
from epmoe.moe import module as moe_module
from bench_cases import on_the_cpu, run_command  # noqa: F401

pytestmark = pytest.mark.cpu_only
ARGUMENTS = ["gemm", "--fp8", "--shapes", "qwen3-30b", "--iters", "1"]
LAYER = ["layer", *ARGUMENTS[1:]]


def test_bench_fp8_measures_times_and_errors():
    rows, out, _ = run_command(ARGUMENTS)
    found = {row["impl"]: row for row in rows}
    products, peers = ("gate and up", "down"), ("epmoe FP8", "epmoe FP8 by row", "epmoe 16 bits")
    assert {f"{peer} {product}" for product in products for peer in peers} < set(found)
    assert found["epmoe FP8 gate and up"]["ratios"].keys() == {"epmoe 16 bits", "epmoe FP8 SwiGLU",
                                                                "epmoe FP8 by row"}
    assert found["epmoe FP8 by row down"]["ratios"].keys() == {"epmoe FP8"}
    for data in ("gate and up", "gate and up, heavy tails", "down", "down, heavy tails"):
        # e4m3 has 3 bits after the first one: in the mean a number is wrong by some per cent
        assert 0.01 < found[f"error: epmoe FP8 {data}"]["error"] < 0.1
        assert found[f"error: of sums {data}"]["error"] < 1e-3
        assert found[f"error: epmoe 16 bits {data}"]["error"] < 0.01
    for name in ("wgrad of gate and up", "wgrad of down"):
        assert found[f"epmoe FP8 {name}"]["ratios"].keys() == {"epmoe 16 bits"}
        assert 0.01 < found[f"error: epmoe FP8 {name}"]["error"] < 0.1
        assert found[f"error: epmoe 16 bits {name}"]["error"] < 0.01
    for name in ("", " SwiGLU"):
        row = found[f"epmoe quantise{name}"]
        assert row["ratios"].keys() == {f"torch quantise{name}", f"copy of as many bytes{name}"}
    assert "TFLOP/s" in out and "GB/s" in out and "TB/s of weights" in out


def test_bench_fp8_finds_a_wrong_result(monkeypatch):
    right = epmoe.grouped_gemm

    def wrong(*arguments, **options):
        y = right(*arguments, **options)
        return y + torch.full_like(y, 0.5) if "a_scale" in options else y

    monkeypatch.setattr(epmoe, "grouped_gemm", wrong)
    with pytest.raises(AssertionError, match="differ from float64"):
        run_command(ARGUMENTS)


@pytest.mark.parametrize("is_by_row", [False, True])
@pytest.mark.parametrize("expert", [0, 2])
def test_bench_fp8_checks_the_first_and_the_last_expert(expert, is_by_row):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(30, 256, generator=g), torch.randn(3, 128, 256, generator=g)
    offsets = torch.tensor([0, 7, 20, 30], dtype=torch.int32)
    product = gemm_fp8.Product(types.SimpleNamespace(on_gpu=False), x, weight, offsets)
    y = product.epmoe_by_row() if is_by_row else product.epmoe_fp8()
    assert product.error(None, y, is_by_row) == ""
    y[offsets[expert], 3] += 1
    assert f"expert {expert}: 1 of" in product.error(None, y, is_by_row)


@pytest.mark.parametrize("expert", [0, 2])
def test_bench_fp8_checks_the_weight_gradient_of_the_first_and_the_last_expert(expert):
    g = torch.Generator().manual_seed(0)
    dy, x = torch.randn(48, 128, generator=g), torch.randn(48, 64, generator=g)
    offsets = torch.tensor([0, 16, 16, 48], dtype=torch.int32)
    product = gemm_fp8.WeightGradient(types.SimpleNamespace(on_gpu=False), dy, x, offsets)
    got = product.epmoe_fp8()
    assert product.error(got) == ""
    got[expert, 61, 5] += 1
    assert f"expert {expert}: 1 of" in product.error(got)


def test_bench_fp8_heavy_tails_have_three_degrees_of_freedom():
    """Student's t: a normal number, divided by the root of the mean of three squares."""
    drawn = iter([6.0, 1.0, 1.0, 5.0])  # the mean of the squares is 9
    got = gemm_fp8.heavy_tailed(lambda *size: torch.full(size, next(drawn)), 2, 3)
    torch.testing.assert_close(got, torch.full((2, 3), 2.0))
    assert next(drawn, None) is None


def test_bench_fp8_finds_a_wrong_quantisation(monkeypatch):
    right = epmoe.quantize_fp8

    def wrong(x, activation=None, **options):
        q, scales = right(x, activation, **options)
        return (q, scales) if activation is None else (q, scales * 1.01)

    monkeypatch.setattr(epmoe, "quantize_fp8", wrong)
    with pytest.raises(AssertionError, match="numbers or scales differ"):
        run_command(ARGUMENTS)


def test_bench_layer_fp8_measures_times_and_errors():
    rows, out, _ = run_command(LAYER)
    found = {row["impl"]: row for row in rows}
    assert found["epmoe FP8"]["ratios"].keys() == {"16 bits", "16 bits one after the other",
                                                 "one after the other", "own GEMMs"}
    assert {"FP8: quantize + dispatch", "FP8: quantize, then dispatch + gate and up", "FP8: gate and up",
            "FP8: quantize", "FP8: down", "FP8: combine", "dispatch in 16 bits", "epmoe 16 bits",
            "epmoe FP8, one after the other", "FP8: GEMMs alone"} < set(found)
    for data in ("normal", "heavy tails"):
        assert 0.02 < found[f"error: FP8, {data}"]["error"] < 0.15
        assert found[f"error: of sums, {data}"]["error"] < 0.01
        assert found[f"error: 16 bits, {data}"]["error"] < 0.01
    assert "TFLOP/s" in out


def test_bench_layer_fp8_finds_a_wrong_result(monkeypatch):
    right = moe_module.grouped_gemm
    for module in (moe_module, fused):
        monkeypatch.setattr(module, "grouped_gemm", lambda *a, **k: 1.1 * right(*a, **k))
    with pytest.raises(AssertionError, match="differ from float64"):
        run_command(LAYER)


def test_bench_layer_fp8_finds_a_layer_that_differs_from_its_stages(monkeypatch):
    right = fused.grouped_gemm
    monkeypatch.setattr(fused, "grouped_gemm", lambda *a, **k: 1.01 * right(*a, **k))
    with pytest.raises(AssertionError, match="differ in their bits"):
        run_command(LAYER)


def test_bench_fp8_calls_deep_gemm_with_rows_and_scales_of_blocks(monkeypatch):
    """A stand-in: the package needs a GPU."""
    calls = []

    def multiply(rows, weights, out, expert):
        (x, x_scale), (w, w_scale) = rows, weights
        blocks = [-(-n // 128) for n in (w.shape[1], w.shape[2])]
        assert x.shape[1] == w.shape[2] and out.shape == (len(x), w.shape[1]) and len(expert) == len(x)
        assert x_scale.shape == (len(x), blocks[1]) and list(w_scale.shape) == [len(w), *blocks]
        assert (expert.bincount() % 128 == 0).all() and len(expert.unique()) == len(w)
        calls.append(tuple(w.shape[1:]))

    module = types.SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=multiply)
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    products = train.DeepGemmProducts(600, torch.empty(2, 256, 384), torch.empty(2, 384, 128))
    products.backward(products.forward())
    assert calls == [(256, 384), (384, 128), (128, 384), (384, 256)]
