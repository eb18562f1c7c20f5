"""python -m benchmarks report: tables and plots match the JSON files from which they are made.

This includes the tables and plots of README.md and docs/performance.md.
"""

import json
import struct
from pathlib import Path

import pytest

from benchmarks import cli, figures, plots, report

pytestmark = pytest.mark.cpu_only
ROOT = Path(__file__).resolve().parent.parent
FIGURES, PLOTS = ROOT / "benchmarks/results/h200x4.json", ROOT / "docs" / "img"
NAMES = ("layers", "shapes", "sm", "tokens", "decode")


def repository_figures():
    return report.Figures(FIGURES, PLOTS)


def png_texts(path):
    """Return the text chunks of a PNG file, as {key: value}."""
    data, at, texts = path.read_bytes(), 8, {}
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        if kind == b"tEXt":
            key, value = data[at + 8 : at + 8 + length].split(b"\0")
            texts[key.decode()] = value.decode()
        at += length + 12
    return texts


def row(bench, shape, impl, ms, tokens=64, **more):
    return {"bench": bench, "shape": shape, "tokens": tokens, "impl": impl, "ms": ms, **more}


def of_run(rows, **head):
    return {"machine": "CPU", "gpus": 0, "ranks": 2, "cuda": None, "torch": "2.11", "date": "2026-01-02",
            "commit": "abc"} | head | {"rows": rows}


def write(path, rows, **head):
    path.write_text(figures.text_of(of_run(rows, **head)))
    return path


MARKERS = "before\n<!-- figures -->\nold\n<!-- /figures -->\nafter\n"


def make_report(folder, rows, document="--page", name="some", **head):
    """Write rows to a file and run the command. Return (Figures, the text of the written document)."""
    path, page = write(folder / f"{name}.json", rows, **head), folder / "page.md"
    page.write_text(MARKERS)
    assert cli.main(["report", str(path), document, str(page)]) == 0
    return report.Figures(path), page.read_text()


@pytest.mark.parametrize("document, make, folder", [("README.md", report.short_block, "docs/img"),
                                                    ("docs/performance.md", report.block, "img")])
def test_bench_report_documents_match_the_file(document, make, folder):
    """If this test fails, run make report."""
    found = repository_figures()
    text = make(found, plots.wanted(found), folder)
    assert f"<!-- figures -->\n{text}<!-- /figures -->" in (ROOT / document).read_text()


def test_bench_report_readme_has_one_table():
    found = repository_figures()
    text = report.short_block(found, plots.wanted(found), "docs/img")
    assert text.count("|---") == text.split("\n")[2].count("|") - 1
    assert "![" not in text and len(text.split("\n")) < 20
    for shape in ("seed", "dsv3", "qwen3-235b", "mixtral", "gpt-oss-120b", "qwen3-30b"):
        assert f"| {shape} | {report.size(shape)} |" in text


def test_bench_report_plots_match_the_file():
    """If this test fails, run make report."""
    found = repository_figures()
    for name in plots.wanted(found):
        assert png_texts(found.plot_path(name))["Figures"] == found.digest, name


def test_bench_report_recorded_peers_are_described():
    recorded = repository_figures().recorded
    assert {"machine", "gpus", "cuda", "torch", "date", "what", "link_gbps"} <= set(recorded)
    for r in recorded["rows"]:
        parts_ms = r.get("parts_ms", {"all": r["ms"]})
        assert r["impl"].startswith("DeepEP") and r["ms"] == pytest.approx(sum(parts_ms.values()))


def test_bench_report_writes_plots_to_a_folder(tmp_path):
    rows = [row("layer", "c", impl, ms, tflops=9.0)
            for impl, ms in (("epmoe layer", 1.5), ("GEMMs alone", 1.0), ("torch layer", 3.0))]
    path, page, folder = write(tmp_path / "some.json", rows), tmp_path / "page.md", tmp_path / "docs" / "img"
    page.write_text(MARKERS)
    for _ in range(2):  # the first run makes the folder, the second finds it
        assert cli.main(["report", str(path), "--readme", str(page), "--plots", str(folder)]) == 0
        assert "| c | 64 | 1.50 ms | 2.00× |" in page.read_text()
        assert (folder / "some_layers.png").exists() and not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("document", [None, "--readme", "--page"])
def test_bench_report_prints_what_no_document_gets(tmp_path, capsys, document):
    """Without a document the command prints all tables."""
    page = tmp_path / "page.md"
    page.write_text(MARKERS)
    rows = [row("layer", "c", impl, 1.5, tflops=9.0) for impl in ("epmoe layer", "torch layer")]
    options = [document, str(page)] if document else []
    assert cli.main(["report", str(write(tmp_path / "some.json", rows)), *options]) == 0
    assert ("| c |" in capsys.readouterr().out) == (document is None)
    assert ("| c |" in page.read_text()) == (document is not None)


def test_bench_report_refuses_a_file_in_place_of_the_folder(tmp_path, capsys):
    path = write(tmp_path / "some.json", [])
    with pytest.raises(SystemExit):
        cli.main(["report", str(path), "--plots", str(path)])
    assert "some.json: must be a folder" in capsys.readouterr().err


def test_bench_report_of_a_training_step(tmp_path):
    rows = [row("train", "c", f"epmoe {what}", ms, tflops=300.0, ratios={"torch": 0.61, "GEMMs": 1.13})
            for what, ms in (("forward", 1.0), ("backward", 2.0), ("both", 3.0))]
    rows += [row("train", "c", "epmoe stages both", 4.0),
             {"bench": "train", "shape": "c", "impl": "epmoe kept bytes", "bytes_over_torch": 0.8}]
    text = make_report(tmp_path, rows)[1]
    assert "### Training step" in text and "peak memory" not in text and "inference" not in text
    numbers = "1.00 | 300 | 0.61 | 1.13 | 2.00 | 300 | 0.61 | 1.13 | 3.00 | 300 | 0.61 | 1.13"
    assert f"| c | 64 | {numbers} | 0.75 | 0.80 |" in text


def test_bench_report_of_one_gpu(tmp_path):
    """The report takes the ratios of one rank alone from the file; it does not compute them."""
    rows = [row("layer", "c", impl, ms, tflops=9.0)
            for impl, ms in (("epmoe layer", 1.5), ("torch layer", 3.0))]
    alone = [row("train", "c", f"epmoe {what}", ms, tflops=300.0, ratios={"torch": 0.51, "GEMMs": 0.81})
             for what, ms in (("forward", 1.0), ("backward", 3.0), ("both", 4.0), ("inference", 0.9))]
    alone += [row("train", "c", "epmoe stages both", 5.0), row("train", "c", "torch both", 5.0)]
    write(tmp_path / "some.json", alone, what="alone.")
    page = make_report(tmp_path, rows, name="somex4")[1]
    assert "4.00 | 300 | 0.51 | 0.81 | 0.80 | 0.90 | 0.51 | 0.81 |" in page and "commit abc. alone." in page
    assert "| c | 64 | 1.50 ms | 2.00× | 1.25×† |" in make_report(tmp_path, rows, "--readme", "somex4")[1]
    rows += [row("train", "c", f"{who} both", ms) for who, ms in (("epmoe", 4.0), ("torch", 6.0))]
    readme = make_report(tmp_path, rows, "--readme", "somex4")[1]
    assert "| c | 64 | 1.50 ms | 2.00× | 1.50× |" in readme  # of this run


def test_bench_figures_have_one_row_a_line():
    rows = [row("layer", "c", f"epmoe {n}", float(n), what="K·T") for n in range(3)]
    for some in ([], rows):
        text = figures.text_of(of_run(some))
        assert json.loads(text) == of_run(some)
        assert len([line for line in text.splitlines() if "K·T" in line]) == len(some)


def test_bench_figures_of_two_runs():
    """The rows of another run keep its date and commit. A new row replaces that of the same call."""
    rows = [row("layer", "c", "epmoe layer", 2.0), row("layer", "c", "torch layer", 4.0),
            row("sm", "c", "epmoe combine", 1.0, num_sm=8), row("sm", "c", "epmoe combine", 3.0, num_sm=24)]
    again = [row("sm", "c", "epmoe combine", 0.5, num_sm=24), row("gemm", "c", "epmoe down", 7.0)]
    own = {"date": "2026-01-03", "commit": "def"}
    both = figures.merged(of_run(rows), of_run(again, **own))
    assert both == of_run([*rows[:3], again[0] | own, again[1] | own])
    assert figures.runs_of(both, "layer") == figures.runs_of(of_run([]))
    assert len(figures.runs_of(both, "sm")) == 2
    assert report.of_runs(both, "gemm") == "CPU, torch 2.11, 2026-01-03, commit def"
    assert figures.merged(both, of_run(again)) == of_run([*rows[:3], *again])
    assert figures.merged(of_run(again), of_run(again, **own)) == of_run(again, **own)


def test_bench_report_names_every_run(tmp_path):
    rows = [row("layer", "c", "epmoe layer", 2.0, tflops=9.0),
            row("layer", "c", "torch layer", 4.0, commit="def")]
    text = "CPU, torch 2.11, 2026-01-02, commit abc; CPU, torch 2.11, 2026-01-02, commit def"
    assert text in make_report(tmp_path, rows)[1] and text in make_report(tmp_path, rows, "--readme")[1]


def test_bench_figures_are_added_to_those_of_the_machine(tmp_path):
    path, head = tmp_path / "some.json", of_run([])
    assert figures.figures_before(path, head) is None
    write(path, [row("layer", "c", "epmoe layer", 2.0)])
    assert figures.figures_before(path, head)["rows"][0]["ms"] == 2.0
    with pytest.raises(ValueError, match="figures of 2 ranks on CPU, these are of 4 ranks on CPU: name"):
        figures.figures_before(path, head | {"ranks": 4})
    for text in ("[]", "no figures", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="some.json: the file exists, and has no figures of a benchmark"):
            figures.figures_before(path, head)


def test_bench_report_of_a_cpu(tmp_path, capsys):
    runs = (("a2a", 64, 1), ("sm", 64, 1), ("sm", 64, 2), ("tokens", 16, 1), ("tokens", 64, 1))
    times = (("epmoe plan + dispatch", 0.25), ("epmoe cached dispatch", 0.2), ("epmoe combine", 0.5))
    rows = [row(bench, "a-small", impl, ms, tokens, num_sm=n, wire_gbps=0.5)
            for bench, tokens, n in runs for impl, ms in times]
    rows += [row("a2a", "a-small", "torch dispatch", 1.0), row("a2a", "a-small", "torch combine", 4.0)]
    rows += [row("layer", "a-small", impl, ms, tflops=0.01)
             for impl, ms in (("epmoe layer", 3.0), ("torch layer", 6.0), ("GEMMs alone", 2.0))]
    rows += [row("decode", "decode-small", f"{peer} {call}", 0.01 * t, t) for peer in ("epmoe", "torch")
             for call in ("dispatch", "combine", "pair") for t in (1, 16)]
    found, text = make_report(tmp_path, rows)
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "nothing about GPUs" in text
    assert "| a-small | 64 | 0.250 ms | 0.25 | 0.500 ms | 0.12 |" in text
    assert "GB/s |" not in text and "DeepEP |" not in text
    assert "| a-small | 64 | 3.000 ms | 1.50 | 0.50 |" in text
    for name in NAMES:
        assert f"](some_{name}.png)" in text
        assert png_texts(tmp_path / f"some_{name}.png")["Figures"] == found.digest
    assert "no figures of DeepEP for a-small" in capsys.readouterr().out


def test_bench_report_names_missing_rows_and_plots(tmp_path, capsys):
    rows = [row("tokens", "b", "epmoe combine", 1.0)]
    _, text = make_report(tmp_path, rows, machine="4 x GPU", gpus=4, cuda="13")
    out = capsys.readouterr().out
    for bench in ("a2a", "sm", "layer"):
        assert f"no rows of {bench}: python -m benchmarks {bench}" in out
    assert "no rows of tokens" not in out and ".png" not in text and not list(tmp_path.glob("*.png"))
    for name in NAMES:
        assert f"not made: the plot {name}" in out


@pytest.mark.parametrize("same_run", [True, False])
def test_bench_report_marks_figures_of_another_run(tmp_path, same_run):
    """Figures of DeepEP from the same run replace those of another run, which have a mark."""
    head = {"machine": "4 x GPU", "gpus": 4, "cuda": "13"}
    rows = [row("a2a", "c", "epmoe plan + dispatch", 1.0), row("a2a", "c", "epmoe combine", 1.0)]
    theirs = [row("a2a", "c", f"DeepEP {stage}, {n} SMs", ms, num_sm=n)
              for stage in ("dispatch", "combine") for n, ms in ((24, 4.0), (48, 2.0))]
    recorded = [row("a2a", "c", "DeepEP dispatch", 5.0), row("a2a", "c", "DeepEP combine", 5.0)]
    write(tmp_path / "deep_ep_some.json", recorded, what="measured at another time", **head)
    _, text = make_report(tmp_path, rows + theirs if same_run else rows, **head)
    assert ("| c | 64 | 1.000 ms | 0.50 | 1.000 ms | 0.50 |" if same_run
            else "| c | 64 | 1.000 ms | 0.20* | 1.000 ms | 0.20* |") in text
    assert ("measured at another time" in text) != same_run
    assert ("the better of 24 and 48 SMs, in the same run" in text) == same_run


def test_bench_report_plots_points_of_another_run(tmp_path):
    """Recorded figures of DeepEP are points beside epmoe's lines over the thread blocks."""
    rows = [row("sm", "c", f"epmoe {what}", 1.0, num_sm=n) for what in ("cached dispatch", "combine")
            for n in (8, 24)]
    recorded = [row("sm", "c", f"DeepEP {what}", 2.0, num_sm=24)
                for what in ("cached dispatch without permute", "combine without unpermute")]
    write(tmp_path / "deep_ep_some.json", recorded, what="measured at another time")
    _, text = make_report(tmp_path, rows)
    assert "some_sm.png" in text and (tmp_path / "some_sm.png").stat().st_size > 0


@pytest.mark.parametrize("gpus, workers, label", [(0, "threads", "threads"),
                                                  (4, "thread blocks", "thread blocks, one an SM")])
def test_bench_report_plot_over_workers_names_them(tmp_path, gpus, workers, label):
    """The figures of a CPU are over threads, those of GPUs over thread blocks."""
    from matplotlib import pyplot

    rows = [row("sm", "c", f"epmoe {what}", 1.0, num_sm=n) for what in ("cached dispatch", "combine")
            for n in (8, 24)]
    figure = plots.draw_sm(report.Figures(write(tmp_path / "some.json", rows, gpus=gpus)), pyplot)
    (ax,) = figure.axes
    assert ax.get_xlabel() == label and ax.get_xticks().tolist() == [8, 24]
    assert ax.get_title(loc="left").startswith(f"c, T = 64: time over {workers}\n")
    pyplot.close(figure)


def test_bench_report_plots_over_tokens_name_each_number():
    from matplotlib import pyplot

    figure, ax = pyplot.subplots()
    ax.plot([1, 512], [0.02, 0.3])
    plots.over_tokens(ax, {512, 8, 1})
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "8", "512"]
    pyplot.close(figure)


def test_bench_report_of_a_decoding_layer(tmp_path):
    """A shape with few tokens has its own row.

    The report does not compare it with DeepEP's figures, which were recorded with many tokens.
    """
    head = {"machine": "4 x GPU", "gpus": 4, "cuda": "13"}
    times = (("epmoe layer", 1.5), ("GEMMs alone", 1.0), ("torch layer", 3.0))
    rows = [row("layer", name, impl, ms, tokens, tflops=9.0)
            for name, tokens in (("c", 8192), ("c T=128", 128)) for impl, ms in times]
    recorded = [row("layer", "c", "DeepEP layer", 3.0)]
    write(tmp_path / "deep_ep_some.json", recorded, what="w", what_layer="l", **head)
    _, text = make_report(tmp_path, rows, **head)
    assert "| c | 8192 | 1.500 ms | 9 | 1.50 | 0.50 | 0.50* |" in text
    assert "| c T=128 | 128 | 1.500 ms | 9 | 1.50 | 0.50 |  |" in text


def test_bench_report_requires_markers(tmp_path):
    readme = tmp_path / "page.md"
    readme.write_text("nothing marked\n")
    with pytest.raises(SystemExit, match="found 0"):
        cli.main(["report", str(write(tmp_path / "some.json", [])), "--readme", str(readme)])
    assert readme.read_text() == "nothing marked\n"


def test_bench_report_of_grouped_gemms(tmp_path):
    gemms = [row("gemm", "c", f"{impl} {gemm}", ms, tflops=600.0)
             for impl, ms in (("torch", 4.0), ("epmoe", 3.0)) for gemm in report.PRODUCTS]
    gemms.append(row("gemm", "c", "epmoe gate and up, SwiGLU", 3.06, tflops=588.0, ratio=1.02))
    _, text = make_report(tmp_path, gemms, machine="4 x GPU", gpus=4, cuda="13")
    assert "| c | 64 | 3.000 ms | 600 | 0.75 | 1.02 | 0.75 | 0.75 | 0.75 | 0.75 | 0.75 |" in text
