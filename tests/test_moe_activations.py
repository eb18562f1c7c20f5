"""The activations by hand, because the oracle of the other tests is also what the CPU backend uses."""

import math

import pytest
import torch

import epmoe
from epmoe import _C
from epmoe.gemm import activations
from gemm_cases import ACTIVATIONS


@pytest.mark.parametrize("activation", ["relu", "", None, ["swiglu"], {}])
def test_moe_unknown_activation(activation):
    with pytest.raises(ValueError, match="must be .*'swiglu', .* or GptOss"):
        epmoe.EPMoE(16, 24, 4, 2, None, activation)


@pytest.mark.parametrize("activation", ["relu", "", 3, (1, 2), ["swiglu"], {}])
def test_gemm_unknown_activation(activation):
    with pytest.raises(ValueError, match="must be .*'swiglu', .* or GptOss"):
        epmoe.grouped_gemm(torch.ones(1, 2), torch.ones(1, 2, 2), torch.tensor([1]), activation=activation)


def test_moe_activations_of_the_list_have_a_function_and_tests():
    names = {name for name, _, has_numbers in _C.ACTIVATIONS[1:] if not has_numbers}
    assert names == set(activations._FUNCTIONS)
    assert names == {name for name in ACTIVATIONS if isinstance(name, str)} - {"gpt_oss"}


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gate_up(activation, *values):
    return epmoe.reference.activate(torch.tensor(values, dtype=torch.float64), activation).tolist()[0]


def test_moe_activations_by_hand():
    tanh = 0.5 * 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (2 + 0.044715 * 8)))  # of GELU at 2
    assert gate_up("geglu_tanh", 2.0, 0.5) == pytest.approx(tanh * 0.5)
    assert gate_up("gelu_tanh", 2.0) == pytest.approx(tanh)
    assert gate_up("silu", 2.0) == pytest.approx(2 * sigmoid(2))
    assert [gate_up("relu2", v) for v in (3.0, 0.0, -3.0)] == [9, 0, 0]
    assert gate_up(epmoe.SwiGLU(), 9.0, -9.0) == pytest.approx(gate_up("swiglu", 9.0, -9.0))
    assert gate_up(epmoe.SwiGLU(limit=7.0), 9.0, -9.0) == pytest.approx(-7 * 7 * sigmoid(7))
    assert gate_up(epmoe.SwiGLU(limit=7.0), -9.0, 9.0) == pytest.approx(7 * -9 * sigmoid(-9))
    assert gate_up(epmoe.SwiGLU(0.5, 3.0, 1), -9.0, 9.0) == pytest.approx(4 * -9 * sigmoid(-4.5))
    four = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)  # gates 1 and 2, or gates 1 and 3
    mixed = four[:, [0, 2, 1, 3]]
    assert torch.equal(epmoe.reference.activate(four, epmoe.SwiGLU(1.702, 7.0, 1)),
                       epmoe.reference.activate(mixed, "gpt_oss"))
    with pytest.raises(ValueError, match="an offset of 0 or 1"):
        epmoe.EPMoE(16, 24, 4, 2, None, epmoe.SwiGLU(offset=2))
    with pytest.raises(ValueError, match="finite alpha and a positive limit"):
        epmoe.grouped_gemm(four.float(), torch.ones(1, 2, 4), torch.tensor([1]),
                           activation=epmoe.SwiGLU(limit=-1.0))


def test_moe_gpt_oss_parameters():
    assert gate_up("gpt_oss", 2.0, 0.5) == pytest.approx(1.5 * 2 * sigmoid(1.702 * 2))
    assert gate_up("gpt_oss", 2.0, 0.5) == gate_up(epmoe.GptOss(), 2.0, 0.5)
    assert gate_up("gpt_oss", 9.0, -9.0) == pytest.approx(-6 * 7 * sigmoid(1.702 * 7))
    assert gate_up(epmoe.GptOss(alpha=0.5, limit=3), 9.0, 9.0) == pytest.approx(4 * 3 * sigmoid(1.5))
    assert gate_up(epmoe.GptOss(alpha=0.5, limit=3), -9.0, -9.0) == pytest.approx(-2 * -9 * sigmoid(-4.5))
    assert gate_up(epmoe.GptOss(limit=math.inf), 9.0, 9.0) == pytest.approx(10 * 9 * sigmoid(1.702 * 9))
    for wrong in (epmoe.GptOss(limit=0), epmoe.GptOss(limit=math.nan), epmoe.GptOss(alpha=math.inf)):
        with pytest.raises(ValueError, match="finite alpha and a positive limit"):
            epmoe.EPMoE(16, 24, 4, 2, None, wrong)
