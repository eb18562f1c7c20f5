"""csrc/protocol/ops.h is the one table of operations: the module and the operators of torch agree with it."""

import re
from pathlib import Path

import pytest
import torch

import epmoe
from epmoe import _C
from epmoe.a2a import ops  # defines the operators

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "csrc/protocol/ops.h").read_text()
NAMES = dict(re.findall(r"^    [XB]\(([A-Z_0-9]{2,}), (\w+),", TEXT, flags=re.M))
CALLS = re.findall(r"^    C\((\w+), \w+, [A-Z_]+\)", TEXT, flags=re.M)  # each runs several operations
ARGUMENTS = {
    name: re.findall(r"X\(S, (\w+), (\w+)\)", body)
    for name, body in re.findall(r"#define EP_ARGS_(\w+)\(X, S\)((?:.*\\\n)+.*)", TEXT)
}
INPUTS = {"TENSOR": "Tensor", "OPTIONAL": "Tensor | None", "OWN": "Tensor", "PLAN": "Tensor"}
OUTPUTS = {"OUT": "Tensor", "OWN_OUT": "Tensor", "OWN_OUT_OPTIONAL": "Tensor | None", "PLAN_OUT": "Tensor"}


def test_operations_table_was_read():
    assert set(ARGUMENTS) == (set(NAMES.values()) - {"barrier"}) | set(CALLS)
    assert CALLS == ["experts", "experts_down", "experts_up", "ll_experts"]


def test_operations_have_numbers_in_the_module():
    assert [getattr(_C, f"OP_{name}") for name in NAMES] == list(range(1, len(NAMES) + 1))


@pytest.mark.parametrize("name", [n for n in sorted(ARGUMENTS) if not n.startswith("ll_") and n not in CALLS])
def test_operations_have_their_tensors_in_the_operators_of_torch(name):
    """An operator has the input tensors of the operation under the same names.  It returns the outputs."""
    assert ops
    schema = getattr(torch.ops.epmoe, name).default._schema
    kinds = {a: kind for kind, a in ARGUMENTS[name]}
    for a in schema.arguments:
        if a.name != "after" and isinstance(a.type, (torch.TensorType, torch.OptionalType)):
            is_optional = isinstance(a.type, torch.OptionalType)
            assert INPUTS[kinds[a.name]] == ("Tensor | None" if is_optional else "Tensor")
    assert len(schema.returns) <= sum(kind in OUTPUTS for kind in kinds.values())


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_operations_count_their_arguments(name):
    run, num = getattr(_C, f"layer_{name}"), len(ARGUMENTS[name])
    with epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 1, num_tot_experts=2, device="cpu") as layer:
        with pytest.raises(TypeError, match="wanted 3 arguments, got 1"):
            run(None)
        for arguments in ((None,) * (num + 1), (None,) * (num - 1), [None] * num, None):
            with pytest.raises(TypeError, match=f"wanted a tuple of {num} arguments, got"):
                run(layer._c, 0, arguments)
