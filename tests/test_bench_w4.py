"""python -m benchmarks layer and decode --w4 on the CPU: what they measure, their checks, their tables."""

import collections
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types
import unittest.mock
from pathlib import Path

import pytest
import torch

import epmoe
from bench_cases import on_the_cpu, run_command  # noqa: F401
from benchmarks import cli, decode_w4, figures, layer_w4, report, shapes, w4, w4_tables, w4_transformers
from cases import first, process_ranks
from epmoe import reference
from epmoe.gemm import four_bit
from pace import HANG_S

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent
DECODE = ["decode", "--w4", "--tokens", "2,3", "--iters", "1", "--shapes"]
LAYER = ["layer", "--w4", "--iters", "1", "--shapes"]
ALL = {"epmoe bf16", "epmoe FP8", "epmoe MXFP4", "epmoe INT4"}


# ---- both commands ----


def run_both(rank, world_size, folder):
    os.environ["EPMOE_BACKEND"] = "cpu"  # this process may be forked from a server
    return {argv[0]: run_command([*argv, "gpt-oss-120b,v4-flash", "--json", f"{folder}/{argv[0]}.json"])
            for argv in (DECODE, LAYER)}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def results(request, tmp_path_factory):
    """(ranks, folder, {command: (rows, stdout, stderr)} of rank 0)"""
    folder = tmp_path_factory.mktemp("w4")
    run = run_both(0, 1, folder) if request.param == 1 else process_ranks(run_both, 2, str(folder),
                                                                          timeout_s=HANG_S)[0]
    return request.param, folder, run


def by_impl(rows, shape, tokens):
    return {r["impl"]: r for r in rows if r["shape"] == shape and r["tokens"] == tokens}


@pytest.mark.parametrize("command", ["decode", "layer"])
def test_bench_w4_prints_and_writes_rows(results, command):
    ranks, folder, found = results
    rows, out, _ = found[command]
    for tokens in (2, 3) if command == "decode" else (64,):
        more = {"transformers grouped_mm"} if command == "decode" else {"epmoe W4A8", "epmoe W4A8 row"}
        wanted = ALL | more
        assert set(by_impl(rows, "v4-flash-small", tokens)) == wanted
        assert set(by_impl(rows, "gpt-oss-120b-small", tokens)) == wanted - {"epmoe FP8"}
    for row in rows:
        assert row["bench"] == f"{command} --w4" and row["ms"] > 0
        assert row.get("of_ranks") == (4 if ranks == 1 else None)
        over = {"FP8": {"bf16"}, **dict.fromkeys(("MXFP4", "INT4", "W4A8", "W4A8 row"), {"bf16", "FP8"})}
        wanted = over.get(row["impl"].removeprefix("epmoe "), set()) - (
            {"FP8"} if row["shape"].startswith("gpt") else set())
        assert set(row.get("ratios", ())) == wanted
    assert json.loads((folder / f"{command}.json").read_text())["rows"] == rows
    assert "gpt-oss-120b-small: no FP8, because of hidden 192" in out
    assert max(map(len, out.splitlines())) <= 110
    for table in w4_tables.tables(rows):
        assert "\n".join(w4_tables.aligned(table)) in out
    if command == "decode":
        said = " ".join(out.split())
        assert "gpt-oss-120b-small: no Triton MXFP4 of transformers, because of" in said
        assert ("v4-flash-small: no Triton MXFP4 of transformers, because of ValueError('its kernels are for "
                "GPT-OSS')") in said


def test_bench_w4_errors_are_those_of_the_formats(results):
    """A weight of 4 bits is wrong by about a tenth, one of e4m3 by some per cent."""
    for rows, _, _ in results[2].values():
        for row in rows:
            least, most = {"bf16": (1e-4, 0.02), "FP8": (0.02, 0.1), "MXFP4": (0.1, 0.3), "INT4": (0.05, 0.2),
                           "W4A8": (0.1, 0.3), "W4A8 row": (0.1, 0.3),
                           "grouped_mm": (0, 0.02)}[row["impl"].split()[1]]
            assert least < row["error"] < most or row["error"] == least == 0, row


def test_bench_w4_measures_the_named_shapes():
    run = unittest.mock.Mock(size=1, on_gpu=True, device=torch.device("cuda"))
    run.shapes = lambda *names: [shapes.KNOWN_SHAPES[n] for n in names]
    found = {s.name: (s.hidden, s.inner, s.experts, s.topk) for s in w4.shapes(run)}
    assert found == {"gpt-oss-120b": (2880, 2880, 128, 4), "dsv3": (7168, 2048, 256, 8),
                     "v4-flash": (4096, 2048, 256, 6)}
    for bench in (layer_w4, decode_w4):
        assert [label for label, _ in bench.jobs(run)] == list(found)
    assert all(s.tokens == 8192 for s in w4.shapes(run)) and decode_w4.TOKENS["cuda"] == (1, 2, 4, 8, 16, 32)
    assert "v4-flash" not in shapes.SHAPES  # the other benches do not measure it by default


def test_bench_w4_skips_what_4_bits_cannot_have(capsys):
    run = unittest.mock.Mock(size=1, on_gpu=True)
    run.shapes = lambda *names: [dataclasses.replace(shapes.SHAPES["seed"], hidden=96)]
    assert w4.shapes(run) == [] and "skipped: seed" in run.say.call_args.args[0]


# ---- one rank of four, and the experts that get tokens ----


def inputs_and_shape(size, rank, tokens):
    run = types.SimpleNamespace(size=size, rank=rank, device=torch.device("cpu"))
    shape = shapes.SHAPES["dsv3"].with_tokens(tokens)
    shape = dataclasses.replace(shape, hidden=64)
    return run, shape, decode_w4.inputs_of(run, shape, 0)


def test_bench_w4_a_rank_alone_is_one_of_four():
    """It gets the tokens of four ranks; a choice is its own with a probability of a quarter."""
    run, shape, (x, idx, weight) = inputs_and_shape(1, 0, 500)
    assert len(x) == len(idx) == len(weight) == 2000
    assert w4.held(run, shape).experts == 64 and set(idx.unique().tolist()) == {-1, *range(64)}
    assert abs((idx >= 0).float().mean() - 0.25) < 0.02
    assert all(len(set(kept)) == len(kept) for kept in ([e for e in row if e >= 0] for row in idx.tolist()))
    run, shape, (x, idx, _) = inputs_and_shape(4, 1, 500)
    assert len(x) == 500 and w4.held(run, shape).experts == 256
    assert set(idx.unique().tolist()) == set(range(256))
    assert not torch.equal(idx[:9], inputs_and_shape(4, 2, 500)[2][1][:9])


def test_bench_w4_counts_only_experts_with_tokens():
    assert decode_w4.num_chosen(torch.tensor([[3, -1], [5, 3], [-1, -1]])) == 2
    assert decode_w4.num_chosen(torch.full((2, 2), -1)) == 0


def test_bench_w4_speed_is_of_experts_with_tokens():
    run, found = unittest.mock.Mock(size=1), {}
    run.record = lambda bench, shape, impl, ms, **more: found.update(more | {"ms": ms})
    shape = dataclasses.replace(shapes.SHAPES["dsv3"], tokens=4)
    decode_w4.record(run, shape, "MXFP4", {"MXFP4": 0.5, "FP8": 1.0, "bf16": 2.0}, 10.5, 2e8)
    assert found["ms"] == 0.5 and found["tbps"] == pytest.approx(10.5 * 2e8 / 0.5e-3 / 1e12, abs=1e-4)
    assert found["experts"] == 10.5 and found["rate"] == "4.20 TB/s, 88%" and found["of_ranks"] == 4
    assert found["over"] == {"FP8": 1.0, "bf16": 2.0}


@pytest.mark.parametrize("tokens", [2, 3])
def test_bench_w4_rows_count_experts_and_bytes(results, tokens):
    """The test makes the same inputs and counts by itself."""
    ranks, _, found = results
    shape = shapes.KNOWN_SHAPES["v4-flash"].small().with_tokens(tokens)
    shape = dataclasses.replace(shape, hidden=256, inner=128)
    counts = []
    for call in range(decode_w4.CALLS["cpu"]):
        chosen = torch.cat([decode_w4.inputs_of(types.SimpleNamespace(
            size=ranks, rank=rank, device=torch.device("cpu")), shape, call)[1] for rank in range(ranks)])
        local = 8 if ranks == 1 else 16
        counts.append([len({e for e in chosen.flatten().tolist() if first <= e < first + local})
                       for first in range(0, local * ranks, local)])
    wanted = max(sum(of_rank) / len(counts) for of_rank in zip(*counts))
    rows = by_impl(found["decode"][0], "v4-flash-small", tokens)
    weights = 3 * 256 * 128
    # MXFP4: a byte for 32 weights; INT4: two bytes; scales are padded to 256 of k, so those of down double
    sizes = {"epmoe bf16": 2 * weights, "transformers grouped_mm": 2 * weights,
             "epmoe FP8": weights + 4 * 3 * 2,
             "epmoe MXFP4": weights // 2 + (2 * 128 * 8 + 256 * 8),
             "epmoe INT4": weights // 2 + 2 * (2 * 128 * 8 + 256 * 8)}
    for impl, num_bytes in sizes.items():
        row = rows[impl]
        assert row["experts"] == pytest.approx(wanted, abs=0.01) and row["bytes_of_expert"] == num_bytes, impl
        assert row["tbps"] == pytest.approx(wanted * num_bytes / row["ms"] / 1e9, rel=0.01, abs=1e-4)


# ---- tables ----


def made_up():
    """Rows of decode and layer, of one rank of four; gpt-oss has no FP8."""
    def row(bench, shape, tokens, name, ms, **more):
        return {"bench": bench, "shape": shape, "tokens": tokens, "impl": w4_tables.impl_of(name), "ms": ms,
                "of_ranks": 4, **more}

    ms = {"bf16": 0.9, "FP8": 0.5, "MXFP4": 0.3, "INT4": 0.31, "grouped_mm": 1.2}
    rows = [row("decode --w4", "dsv3", tokens, name, t * tokens, experts=7.63, tbps=4.2, error=0.1)
            for tokens in (1, 2) for name, t in ms.items()]
    rows += [row("layer --w4", shape, 8192, name, 10 * t) for shape in ("gpt-oss-120b", "dsv3")
             for name, t in ms.items() if name != "grouped_mm" and (shape, name) != ("gpt-oss-120b", "FP8")]
    rows += [row("layer --w4", "dsv3", 8192, name, t) for name, t in zip(w4_tables.IN_FP8, (2.5, 2.0))]
    return [*rows, {"bench": "decode", "shape": "dsv3", "tokens": 1, "impl": "epmoe pair", "ms": 1.0}]


def test_bench_w4_tables_have_times_ratios_and_speeds():
    times, speeds, layers = w4_tables.tables(made_up())
    assert times == ("dsv3, one rank of 4 alone: us of a decode layer, by tokens of a rank, T",
                     ["T", "bf16", "FP8", "MXFP4", "INT4", "grouped_mm", "MXFP4/FP8", "MXFP4/bf16"],
                     [["1", "900.0", "500.0", "300.0", "310.0", "1200.0", "0.60", "0.33"],
                      ["2", "1800.0", "1000.0", "600.0", "620.0", "2400.0", "0.60", "0.33"]])
    assert speeds[1] == ["T", "experts", "bf16", "FP8", "MXFP4", "INT4", "grouped_mm"]
    assert speeds[2][0] == ["1", "7.6", *["4.20, 88%"] * 5]
    assert layers[0] == "Whole layers, one rank of 4 alone, ms"
    assert layers[1] == ["shape", "T", "bf16", "FP8", "MXFP4", "INT4", "W4A8", "W4A8 row", "MXFP4/bf16",
                         "W4A8 row/FP8", "W4A8 row/bf16"]
    assert layers[2] == [["gpt-oss-120b", "8192", "9.00", "", "3.00", "3.10", "", "", "0.33", "", ""],
                         ["dsv3", "8192", "9.00", "5.00", "3.00", "3.10", "2.50", "2.00", "0.33", "0.40",
                          "0.22"]]
    for table in (times, speeds, layers):
        assert max(map(len, w4_tables.aligned(table))) <= 110
    assert w4_tables.tables([]) == []


def of_run(rows):
    return {"machine": "1 x GPU", "gpus": 1, "ranks": 1, "cuda": "13.0", "torch": "2.13",
            "date": "2026-01-02", "commit": "abc", "rows": rows}


def test_bench_w4_report_has_the_tables(tmp_path):
    path, page = tmp_path / "some.json", tmp_path / "page.md"
    path.write_text(figures.text_of(of_run(made_up()[:-1])))
    page.write_text("<!-- figures -->\n<!-- /figures -->\n")
    assert cli.main(["report", str(path), "--page", str(page), "--plots", str(tmp_path)]) == 0
    text = page.read_text()
    assert "### Experts of 4 bits" in text
    assert "| 1 | 900.0 | 500.0 | 300.0 | 310.0 | 1200.0 | 0.60 | 0.33 |" in text
    assert "| dsv3 | 8192 | 9.00 | 5.00 | 3.00 | 3.10 | 2.50 | 2.00 | 0.33 | 0.40 | 0.22 |" in text
    path.write_text(figures.text_of(of_run(made_up()[-1:])))
    assert "4 bits" not in report.block(report.Figures(path), {}, "")


def test_docs_tables_take_the_figures_of_w4(tmp_path, monkeypatch):
    """A file of docs/experiments/data is what --json writes, and "experiment"."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "e145.json"
    file.write_text(json.dumps({"experiment": "E-145", **of_run(made_up())}))
    text = tables.table("e145")
    for caption, head, lines in w4_tables.tables(made_up()):
        lines = ["| " + " | ".join(line) + " |" for line in (head, *lines)]
        assert f"\n{caption}:\n\n{lines[0]}\n|---" in text and all(f"{line}\n" in text for line in lines)
    file.write_text(json.dumps({"experiment": "E-145", **of_run(made_up()[-1:])}))
    with pytest.raises(AssertionError, match="e145: no columns, and no rows of layer --w4 and decode --w4"):
        tables.table("e145")


def test_docs_tables_need_no_torch():
    """The tables are made where torch may not be installed."""
    code = "import sys; sys.modules['torch'] = None; import benchmarks.w4_tables"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---- checks ----


def change(weight_dtype, changed):
    """Replace the results of EPMoE modules of a weight_dtype."""
    right = epmoe.EPMoE.forward

    def forward(self, *args, **options):
        y = right(self, *args, **options)
        return changed(y) if self.weight_dtype == weight_dtype else y

    return unittest.mock.patch.object(epmoe.EPMoE, "forward", forward)


def one_bit(y):
    y.view(torch.int16)[-1, -1] ^= 1
    return y


def unwritten_row(y):
    """The last row is what torch.empty has left there."""
    out = torch.empty_like(y)
    out[:-1] = y[:-1]
    return out


@pytest.mark.parametrize("command", first(1, [LAYER, DECODE]), ids=["layer", "decode"])
@pytest.mark.parametrize("weight_dtype, changed, text", [
    ("mxfp4", one_bit, "MXFP4: the layer and one in 16 bits"),
    (four_bit.Int4(), one_bit, "INT4: the layer and one in 16 bits"),
    ("mxfp4", unwritten_row, "MXFP4: the layer and one in 16 bits"),
    (torch.float8_e4m3fn, lambda y: 1.2 * y, "FP8: wrong by"),
    (torch.float8_e4m3fn, unwritten_row, "FP8: wrong by nan"),
])
def test_bench_w4_finds_wrong_results(command, weight_dtype, changed, text):
    with change(weight_dtype, changed), pytest.raises(AssertionError, match=text):
        run_command([*command, "v4-flash"])


def test_bench_w4_finds_results_that_are_wrong_in_all_formats():
    """What all share is compared with float64."""
    right = epmoe.EPMoE.forward
    with (unittest.mock.patch.object(epmoe.EPMoE, "forward", lambda *a, **k: 1.1 * right(*a, **k)),
          pytest.raises(AssertionError, match="bf16: wrong by 0.1")):
        run_command([*LAYER, "v4-flash"])


def test_bench_w4_finds_weights_that_a_format_does_not_hold():
    """The twin would have them, too."""
    right = four_bit.quantize
    with (unittest.mock.patch.object(four_bit, "quantize", lambda f, w, *more: right(f, w.flip(-1), *more)),
          pytest.raises(AssertionError, match="MXFP4: wrong by|INT4: wrong by")):
        run_command([*LAYER, "gpt-oss-120b"])


def test_bench_w4_finds_a_wrong_peer():
    right, calls = w4_transformers.Peer.__call__, []

    def wrong(self, *args):
        calls.append(args)
        return right(self, *args) * (1.1 if len(calls) > 1 else 1)

    with (unittest.mock.patch.object(w4_transformers.Peer, "__call__", wrong),
          pytest.raises(AssertionError, match="transformers differs from EPMoE by 0.1")):
        run_command([*DECODE, "gpt-oss-120b"])


def test_bench_w4_leaves_out_a_peer_that_cannot_run():
    with unittest.mock.patch.object(w4_transformers.Peer, "__call__", side_effect=OSError("no kernel")):
        rows, out, _ = run_command([*DECODE, "v4-flash"])
    assert {r["impl"] for r in rows} == ALL
    assert "v4-flash-small: no grouped_mm of transformers, because of OSError('no kernel')" in out


# ---- graphs ----


class Graph:
    """A stand-in of a CUDA graph of Calls.  writes: the calls whose results a replay writes."""

    def __init__(self, calls, writes):
        calls()
        self.calls, self.writes = calls, writes

    def replay(self):
        for y, args in list(zip(self.calls.results, self.calls.inputs))[:self.writes]:
            y.copy_(self.calls.layer(*args))


@pytest.mark.parametrize("writes", [1, 2])
def test_bench_w4_checks_what_graphs_write(monkeypatch, writes):
    monkeypatch.setattr(decode_w4, "captured", lambda fns: [Graph(fn, writes) for fn in fns])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    said = []
    run = types.SimpleNamespace(on_gpu=True, device=torch.device("cpu"), cpu_group=None, iters=2,
                                agree=said.append)
    inputs = [(torch.randn(3, 4, dtype=torch.bfloat16),) for _ in range(2)]
    calls = {name: decode_w4.Calls(lambda x: x * 2, inputs) for name in ("bf16", "MXFP4", "grouped_mm")}
    ms = decode_w4.times(run, calls, {name: [x * 2 for x, in inputs] for name in calls})
    assert set(ms) == set(calls) and all(t >= 0 for t in ms.values())
    wrong = [f"{name}: the graph gives another result" for name in calls]
    assert said == (wrong if writes == 1 else [""] * 3)


# ---- transformers' kernels ----


Routing = collections.namedtuple("Routing", "gate_scal hist num_experts topk expt_data")


class Wrapped:
    """A tensor as the kernels have it."""

    def __init__(self, data, dtype=None):
        self.data, self.shape = data, data.shape


def matmul_ogs(x, w, bias, routing, gather_indx=None, scatter_indx=None, precision_config=None, gammas=None,
               fused_activation=None):
    """What matmul_ogs of triton_kernels computes: the rows of each expert, by torch."""
    blocks, scales = (t.data.transpose(-1, -2) for t in (w, precision_config["weight_scale"]))
    packed = four_bit.read_mxfp4(blocks.contiguous(), scales.contiguous())
    weights = four_bit.dequantize(four_bit.Mxfp4(), *packed, torch.float32)
    num = routing.hist.long()
    choices = (scatter_indx or gather_indx)["dst_indx" if scatter_indx else "src_indx"][:num.sum()].long()
    rows = x[choices // routing.topk] if gather_indx else x[:num.sum()]
    expert = torch.repeat_interleave(torch.arange(len(num)), num)
    y = (weights[expert] @ rows.float()[..., None])[..., 0] + bias[expert]
    if fused_activation:
        _, (alpha, limit), _ = fused_activation
        return reference.activate(y, epmoe.GptOss(alpha, limit)).to(x.dtype)
    out = torch.zeros(len(routing.gate_scal) // routing.topk, y.shape[1])
    return out.index_add_(0, choices // routing.topk, y * gammas[:len(y), None]).to(x.dtype)


def triton_kernels():
    """{name: module} of stand-ins of triton_kernels."""
    kernels = types.SimpleNamespace(
        matmul_ogs=types.SimpleNamespace(
            PrecisionConfig=dict, FlexCtx=dict, InFlexData=dict, matmul_ogs=matmul_ogs,
            FnSpecs=lambda *a: a, FusedActivation=lambda *a: a),
        routing=types.SimpleNamespace(
            GatherIndx=dict, ScatterIndx=dict, compute_expt_data_torch=lambda *a: None,
            RoutingData=Routing),
        swiglu=types.SimpleNamespace(swiglu_fn=None),
        tensor=types.SimpleNamespace(FP4=None, convert_layout=lambda t, layout, **_: t,
                                     wrap_torch_tensor=Wrapped),
        tensor_details=types.SimpleNamespace(layout=types.SimpleNamespace(
            StridedLayout=None, make_default_matmul_mxfp4_w_layout=lambda mx_axis: (None, {}))))
    return {"triton_kernels": kernels,
            **{f"triton_kernels.{name}": kernels for name in w4_transformers.TRITON_KERNELS}}


def test_bench_w4_measures_the_kernels_of_transformers(monkeypatch):
    """With stand-ins of triton_kernels: they get the weights, biases, activation and choices of the layer."""
    from transformers.integrations import mxfp4

    histc = torch.histc
    monkeypatch.setattr(mxfp4, "triton_kernels_hub", None, raising=False)
    # A build of torch with CUDA names a GPU also where there is none.
    monkeypatch.setattr(mxfp4, "get_current_accelerator", lambda: None, raising=False)
    monkeypatch.setattr(torch, "histc", lambda t, **k: histc(t.float(), **k))  # of integers only on a GPU
    with unittest.mock.patch.dict(sys.modules, triton_kernels()):
        rows, out, _ = run_command([*DECODE, "gpt-oss-120b"])
    found = by_impl(rows, "gpt-oss-120b-small", 3)
    assert 0 < found["transformers Triton MXFP4"]["error"] < 0.02
    assert found["transformers Triton MXFP4"]["bytes_of_expert"] == found["epmoe MXFP4"]["bytes_of_expert"]
    assert "no Triton" not in out
