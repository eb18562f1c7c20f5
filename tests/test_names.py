"""Names that Python takes from the lists of the C headers: the fields of a configuration, and the spans."""

import re
from pathlib import Path

import pytest

import epmoe
from epmoe import _C, trace
from epmoe.a2a.base import Config

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent


def names_of(header, macro):
    """The names, which are texts in quotes, that the list of a header has."""
    body = re.search(rf"#define {macro}\(.*?\)((?:.*\\\n)+.*)", (ROOT / "csrc" / header).read_text())[1]
    return tuple(re.findall(r'"(.*?)"', body))


def valid_config():
    return Config(ranks=1, num_experts=4, topk=2, max_tokens=8, hidden=16, dtype=_C.F32,
                  combine_mode=_C.COMBINE_LOCAL, expert_alignment=1, expert_capacity=0, capacity=16,
                  num_buffers=1, num_sm=1, reserve_sms=0, host_counts=0, spare_buffers=0)


def test_names_of_a_configuration_are_those_of_the_header():
    listed = names_of("epmoe.h", "EP_CONFIG_FIELDS")
    assert listed == Config._fields
    assert "ranks" in listed


@pytest.mark.parametrize("field", Config._fields)
def test_names_of_a_configuration_belong_to_their_fields(field):
    """The module reports a wrong number under the name that Python used for it."""
    assert _C.layer_bytes(valid_config()) > 0
    with pytest.raises(ValueError, match=f"^{field} -1: .*must be "):
        _C.layer_bytes(valid_config()._replace(**{field: -1}))


def test_names_of_a_layers_configuration():
    with epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 2, num_tot_experts=6, num_buffers=3, num_sm=5,
                              capacity=7, device="cpu") as layer:
        got = layer._config
    assert got == Config(ranks=1, num_experts=6, topk=2, max_tokens=4, hidden=16, dtype=_C.BF16,
                         combine_mode=_C.COMBINE_SCATTER, expert_alignment=1, expert_capacity=0, capacity=7,
                         num_buffers=3, num_sm=5, reserve_sms=0, host_counts=0, spare_buffers=0, num_copies=1)


def test_names_of_spans_are_those_of_the_header():
    assert tuple(trace.SPANS.values()) == names_of("protocol/trace.h", "EP_SPANS")
    assert list(trace.SPANS) == list(range(1, 8)) and trace.SPANS[4] == "wait for rows"


def test_names_of_spans_are_those_that_the_bench_plots():
    from benchmarks import overlap

    assert {"gemm", *(n for names in overlap.KERNELS.values() for n in names)} < set(trace.SPANS.values())
