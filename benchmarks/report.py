"""python -m benchmarks report FILE: tables and plots from the figures that --json wrote.

--readme puts a short table into a README. --page puts all tables and plots into a page.
--plots names the folder of the plots (default: the folder of FILE), which is made if it does not exist.

The command also reads two more files of the folder of FILE, if they exist. Where FILE is h200x4.json:
deep_ep_h200x4.json  figures of DeepEP from another run; DeepEP's rows in FILE take precedence
h200.json            figures of one rank alone on one such GPU, with the training step

If FILE has no rows for a table or a plot, the command leaves it out and says so.
"""

import argparse
import os
import re
import sys
import textwrap
from pathlib import Path

from . import plots, w4_tables
from .figures import STAGES, Figures, plot_name, runs_of
from .shapes import KNOWN_SHAPES

OWN_GEMMS = "epmoe GEMMs alone"
# What the table of skewed routings has, for each shape: {bench: implementations}.
SKEWED = {"a2a": ("epmoe plan + dispatch", "epmoe combine"), "layer": ("epmoe layer", "torch layer"),
          "train": ("epmoe both", "torch both"), "decode": ("epmoe pair", "epmoe layer")}
MARKED = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
W4_TEXT = ("`EPMoE` with weights of 4 bits beside bf16 and FP8. The results in MXFP4 and INT4 have the bits "
           "of those in bf16 with the dequantised weights. `grouped_mm` is what transformers computes after "
           "it has dequantised the weights to bf16, without communication. The speed is that of the weights "
           "of experts that get tokens, in the time of the whole layer.")
OWN_TEXT = ("\"Own GEMMs alone\" are epmoe's two grouped GEMMs on the same rows, the first with the "
            "activation.")
SKEW_TEXT = ("The skew of a routing is the number of rows of its fullest rank over the mean of all ranks. "
             "Each cell has a time, and this time over that of uniform routing in the same run.")
PRODUCTS = ("gate and up", "down", "dgrad of gate and up", "dgrad of down", "wgrad of gate and up",
            "wgrad of down")


# ---- tables ----


def _over(ms, theirs, mark=""):
    return "" if theirs is None else f"{ms / theirs:.2f}{mark}"


def _times(theirs, ms, mark=""):
    return "" if theirs is None or ms is None else f"{theirs / ms:.2f}×{mark}"


def markdown(head, rows):
    """Return the lines of a table, without the columns that are empty in every row."""
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = ["| " + " | ".join(row[i] for i in keep) + " |" for row in (head, *rows)]
    return [lines[0], "|---" * len(keep) + "|", *lines[1:]]


def size(shape):
    """Return "H, I, E, K" of the shape with this name, or "" if the name is not known."""
    known = KNOWN_SHAPES.get(shape.removesuffix("-small").split(" ")[0])
    if not known or shape.endswith("-small"):
        return ""
    return f"{known.hidden}, {known.inner}, {known.experts}, {known.topk}"


def table(figures):
    """Plan, dispatch and combine, one row for each shape: milliseconds, GB/s, ratios to the others' times."""
    rows = []
    for shape in figures.shapes():
        plan = figures.ms("a2a", "epmoe plan, in a graph", shape=shape)
        tokens = figures.find("a2a", STAGES["dispatch"], shape=shape)[0]["tokens"]
        cells = [shape, size(shape), str(tokens), f"{plan * 1e3:.1f} us" if plan else ""]
        for stage, impl in STAGES.items():
            row = figures.find("a2a", impl, shape=shape)[0]
            theirs, same_run = figures.deep_ep("a2a", stage, shape=shape)
            has_links = figures.is_gpu and "wire_gbps" in row
            cells += [f"{row['ms']:.3f} ms", f"{row['wire_gbps']:.0f}" if has_links else "",
                      _over(row["ms"], figures.ms("a2a", f"torch {stage}", shape=shape)),
                      _over(row["ms"], theirs, "" if same_run else "*")]
        rows.append(cells)
    over = ["GB/s", "over torch", "over DeepEP"]
    return markdown(["shape", "H, I, E, K", "T", "plan", "plan + dispatch", *over, "combine", *over], rows)


def layer_table(figures):
    """Whole layers, forward, one row for each shape."""
    rows = []
    for shape in figures.shapes("layer"):
        row = figures.find("layer", "epmoe layer", shape=shape)[0]
        gemms, own = (figures.ms("layer", impl, shape=shape) for impl in ("GEMMs alone", OWN_GEMMS))
        stages = figures.ms("layer", "epmoe layer, one after the other", shape=shape)
        theirs, same_run = figures.deep_ep("layer", "layer", shape=shape)
        over = [_over(row["ms"], gemms), _over(row["ms"], own), _over(stages, gemms) if stages else "",
                _over(row["ms"], figures.ms("layer", "torch layer", shape=shape)),
                _over(row["ms"], theirs, "" if same_run else "*")]
        for kernel, product in (("dispatch + gemm", "gate and up"), ("gemm + combine", "down")):
            ms = [figures.ms("layer", impl, shape=shape)
                  for impl in (f"epmoe {kernel}", f"torch {product} alone")]
            over.append(_over(*ms) if None not in ms else "")
        rows.append([shape, str(row["tokens"]), f"{row['ms']:.3f} ms",
                     f"{row['tflops']:.0f}" if figures.is_gpu else "", *over])
    head = ["shape", "T", "whole layer", "TFLOP/s per GPU", "over GEMMs alone", "over own GEMMs alone",
            "unfused: over GEMMs alone", "over torch", "over DeepEP", "dispatch + gemm over gate and up",
            "gemm + combine over down"]
    return markdown(head, rows)


def short_table(figures):
    """Whole layers as speedups, one row for each model."""
    rows = []
    for shape in figures.shapes("layer"):
        if " T=" in shape:
            continue
        row = figures.find("layer", "epmoe layer", shape=shape)[0]
        step, is_same = figures.training_step(shape)
        theirs, same_run = figures.deep_ep("layer", "layer", shape=shape)
        training = ""
        if step:
            training = _times(step["torch both"]["ms"], step["epmoe both"]["ms"], "" if is_same else "†")
        rows.append([shape, size(shape), str(row["tokens"]), f"{row['ms']:.2f} ms",
                     f"{row['tflops']:.0f}" if figures.is_gpu else "",
                     _times(figures.ms("layer", "torch layer", shape=shape), row["ms"]),
                     _times(theirs, row["ms"], "" if same_run else "\\*"), training])
    head = ["model shape", "H, I, E, K", "T", "forward", "TFLOP/s per GPU", "vs torch + NCCL", "vs DeepEP V1",
            "forward + backward vs torch"]
    return markdown(head, rows)


def train_table(rows):
    """A training step of `python -m benchmarks train`, one row for each shape."""
    by_shape = {}
    for r in rows:
        if r["bench"] == "train" and r.get("skew") is None:
            by_shape.setdefault(r["shape"], {})[r["impl"]] = r
    lines = []
    for shape, of in by_shape.items():
        cells = [shape, str(of["epmoe both"]["tokens"])]
        for what in ("forward", "backward", "both"):
            row = of[f"epmoe {what}"]
            cells += [f"{row['ms']:.2f}", f"{row['tflops']:.0f}",
                      *(f"{row['ratios'][n]:.2f}" for n in ("torch", "GEMMs"))]
        cells.append(f"{of['epmoe both']['ms'] / of['epmoe stages both']['ms']:.2f}")
        sizes = [of.get(f"epmoe {what} bytes") for what in ("kept", "peak")]
        cells += [f"{r['bytes_over_torch']:.2f}" if r else "" for r in sizes]
        if alone := of.get("epmoe inference"):
            cells += [f"{v:.2f}" for v in (alone["ms"], alone["ratios"]["torch"], alone["ratios"]["GEMMs"])]
        lines.append(cells + [""] * (0 if alone else 3))
    passes = [f"{what}{more}" for what in ("forward", "backward", "both")
              for more in (", ms", ": TFLOP/s", ": over torch", ": over GEMMs alone")]
    return markdown(["shape", "T", *passes, "both: over stages", "kept memory over torch",
                     "peak memory over torch", "inference, ms", "inference: over torch",
                     "inference: over GEMMs alone"], lines) if lines else []


def low_latency_table(figures):
    """LowLatencyAll2All, one row for each T: microseconds of its calls, and of a decode layer."""
    calls = ("dispatch", "dispatch fp8", "combine", "pair")
    rows = []
    for row in sorted(figures.find("decode", "epmoe pair"), key=lambda r: r["tokens"]):
        of = {impl: found[0] for impl in (*(f"epmoe {c}" for c in calls), "epmoe layer", "GEMMs alone")
              if (found := figures.find("decode", impl, shape=row["shape"], tokens=row["tokens"]))}
        us = [f"{of[impl]['ms'] * 1e3:.1f}" if impl in of else "" for impl in
              (*(f"epmoe {c}" for c in calls), "epmoe layer", "GEMMs alone")]
        ratios = of.get("epmoe layer", {}).get("ratios", {})
        rows.append([str(row["tokens"]), *us, f"{ratios['GEMMs']:.2f}" if "GEMMs" in ratios else "",
                     f"{row['ratios']['torch']:.2f}" if "torch" in row.get("ratios", {}) else "",
                     f"{row['ratios']['DeepEP']:.2f}" if "DeepEP" in row.get("ratios", {}) else ""])
    head = ["T", "dispatch, us", "dispatch FP8", "combine", "dispatch + combine", "decode layer",
            "its two GEMMs alone", "layer over GEMMs", "dispatch + combine over torch",
            "dispatch + combine over DeepEP"]
    return markdown(head, rows)


def skew_table(figures):
    """Skewed routings, one row for each implementation and shape: milliseconds, and over uniform routing."""
    skews = sorted({r["skew"] for r in figures.skewed})
    rows = []
    for bench, impls in SKEWED.items():
        found = [r for r in figures.skewed if r["bench"] == bench]
        for shape, tokens in dict.fromkeys((r["shape"], r["tokens"]) for r in found):
            for impl in impls:
                at = {"shape": shape, "tokens": tokens, "impl": impl}
                of = {r["skew"]: r for r in found if at.items() <= r.items()}
                if not of:
                    continue
                uniform = figures.ms(bench, impl, shape=shape, tokens=tokens)
                cells = [f"{of[s]['ms']:.3f} ms, {of[s]['ratios']['uniform']:.2f}" if s in of else ""
                         for s in skews]
                rows.append([f"`{bench}`: {impl}", shape, str(tokens),
                             f"{uniform:.3f} ms" if uniform else "", *cells])
    return markdown(["", "shape", "T", "uniform", *(f"skew {s:g}" for s in skews)], rows) if rows else []


def worklog_table(figures):
    """The problem of the worklog, one row for each of its shapes: microseconds."""
    rows = []
    for row in figures.find("worklog", "epmoe"):
        ms = [figures.ms("worklog", impl, shape=row["shape"]) for impl in
              ("torch", "epmoe, factor in weights", "epmoe, in a graph",
               "epmoe, factor in weights, in a graph")]
        us = [f"{t * 1e3:.1f}" if t else "" for t in (row["ms"], *ms)]
        rows.append([row["shape"], str(row["tokens"]), *us, f"{row['ms'] / ms[0]:.2f}"])
    head = ["shape", "most tokens", "epmoe, us", "torch", "factor in weights", "in a graph",
            "factor in weights, in a graph", "over torch"]
    return markdown(head, rows)


def ablation_table(figures):
    """One row for each changed option: times of the layer and its two kernels over those of the defaults."""
    of = [r for r in figures.rows if r["bench"] == "ablation"]
    shapes, choices = (list(dict.fromkeys(r[key] for r in of)) for key in ("shape", "impl"))
    cells = {(r["impl"], r["shape"]): [f"{r['ratios'][k]:.2f}" for k in ("layer", "first", "second")]
             for r in of}
    head = [f"{shape}: {what}" for shape in shapes for what in ("layer", "dispatch + gemm", "gemm + combine")]
    rows = [[choice, *(c for s in shapes for c in cells.get((choice, s), [""] * 3))] for choice in choices]
    return markdown(["", *head], rows)


def gemm_table(figures):
    """One row for each shape: ms and TFLOP/s of gate and up; of the other GEMMs the time over torch's."""
    rows = []
    for row in figures.find("gemm", "epmoe gate and up"):
        ms = {p: [figures.ms("gemm", f"{impl} {p}", shape=row["shape"]) for impl in ("epmoe", "torch")]
              for p in PRODUCTS}
        fused = figures.find("gemm", "epmoe gate and up, SwiGLU", shape=row["shape"])
        over = [_over(*ms[p]) if None not in ms[p] else "" for p in PRODUCTS]
        rows.append([row["shape"], str(row["tokens"]), f"{row['ms']:.3f} ms", f"{row['tflops']:.0f}",
                     over[0], f"{fused[0]['ratio']:.2f}" if fused else "", *over[1:]])
    head = ["shape", "T", "gate and up", "TFLOP/s", "over torch", "with SwiGLU over without", *PRODUCTS[1:]]
    return markdown(head, rows)


# ---- the texts between the markers ----


def of_runs(result, *benches):
    """Return a text about the runs of the rows, all or those of some benches: machine, versions, commit."""
    def of_run(run):
        cuda = f"CUDA {run['cuda']}, " if run["cuda"] else ""
        commit = run["commit"] or "unknown"
        return f"{run['machine']}, {cuda}torch {run['torch']}, {run['date']}, commit {commit}"

    return "; ".join(map(of_run, runs_of(result, *benches)))


def _wrapped(lines):
    wrapped = (textwrap.fill(line, 130, break_long_words=False, break_on_hyphens=False) for line in lines)
    return "\n\n".join(wrapped).split("\n")


def has_recorded(figures):
    """Return whether DeepEP's figures of the same run are used, and whether those of another run are."""
    cells = [("a2a", stage, s) for stage in STAGES for s in figures.shapes()]
    cells += [("layer", "layer", s) for s in figures.shapes("layer")]
    found = [figures.deep_ep(bench, what, shape=s) for bench, what, s in cells]
    same_run = {same for ms, same in found if ms is not None}
    return True in same_run, False in same_run


def sources(figures):
    """Return the paragraphs that explain the columns of the tables and name the run of each figure."""
    lines = ["\"Over\" is the time of epmoe divided by the time of the other: less is better. T is the "
             "number of tokens of each rank; H, I, E, K are hidden size, inner size, experts and choices per "
             "token."]
    if any(figures.ms("a2a", "torch dispatch", shape=s) for s in figures.shapes()):
        lines[0] += " torch is sort + `all_to_all_single` + sort, in the same run."
    same_run, recorded = has_recorded(figures)
    if same_run:
        lines.append("DeepEP is layout + dispatch + permute and unpermute + combine, the better of 24 and 48 "
                     "SMs, in the same run.")
    if recorded:
        o = figures.recorded
        layer = f"; layer: {o['what_layer']}." if figures.shapes("layer") else "."
        lines.append(f"\\* DeepEP was measured in another run, on {o['machine']} (CUDA {o['cuda']}, torch "
                     f"{o['torch']}, {o['date']}). A ratio between two runs is less certain than one within "
                     f"a run. Its set-up: {o['what']}{layer}")
    return _wrapped(lines)


def cpu_note(figures):
    note = figures.result.get("note", "CPU figures: they say nothing about GPUs")
    return [] if figures.is_gpu else [f"**{note}.**", ""]


def images(figures, plots, folder, *names):
    """Return the lines that show the plots with these names.  `folder`: as the document names it."""
    return [line for name, text in plots.items() if name in names
            for line in ("", f"![{text}]({Path(folder, plot_name(figures, name)).as_posix()})")]


def short_block(figures, *_):
    """Return the text between the markers of the README: one table.  The plot is at the top of the page."""
    lines = cpu_note(figures)
    if not figures.shapes("layer"):
        return "\n".join([*lines, f"{of_runs(figures.result)}: no figures of whole layers."]) + "\n"
    lines += [f"One MoE layer, {of_runs(figures.result, 'layer')}:", "", *short_table(figures), ""]
    notes = ["H, I, E, K are hidden size, inner size, experts and choices per token; T is the number of "
             "tokens of each rank; 2× is twice as fast.",
             "torch + NCCL is sort, `all_to_all_single`, `torch._grouped_mm` and weighted sum, in the same "
             "run."]
    if has_recorded(figures)[1]:
        o = figures.recorded
        notes.append(f"\\* DeepEP V1 with torch's grouped GEMMs, recorded in another run ({o['machine']}, "
                     f"{o['date']}).")
    if any("†" in line for line in lines):
        o = figures.one_gpu
        notes.append("† Forward and backward of one rank of four, alone on one GPU, so nothing crosses a "
                     f"link ({o['machine']}, {o['date']}).")
    return "\n".join([*lines, *_wrapped([" ".join(notes)])]) + "\n"


def block(figures, plots, folder):
    """Return the text between the markers of the page.  `plots`: {name: alternative text}."""
    lines = [*cpu_note(figures), f"{of_runs(figures.result)}.", "", *sources(figures)]
    if figures.shapes("layer"):
        lines += ["", "### Whole layers", "",
                  "Forward. \"GEMMs alone\" are torch's two grouped GEMMs on the same rows, measured "
                  "alternately with the layer. \"Unfused\" is epmoe",
                  "with `fused=False`: dispatch, GEMM, GEMM and combine as separate kernels.", "",
                  *([] if not figures.find("layer", OWN_GEMMS) else [OWN_TEXT, ""]),
                  *layer_table(figures)]
    lines += images(figures, plots, folder, "layers", "growth")
    for title, run in (("Training step", figures.result), ("Training step of one rank", figures.one_gpu)):
        if table_of_run := train_table(run.get("rows", [])):
            what = _wrapped([f"{of_runs(run, 'train')}. {run.get('what', '')}".strip()])
            lines += ["", f"### {title}", "", *what, "", *table_of_run]
    if figures.shapes():
        lines += ["", "### Plan, dispatch and combine", "", *table(figures)]
    lines += images(figures, plots, folder, "shapes", "sm", "tokens")
    if figures.find("decode", "epmoe pair"):
        lines += ["", "### Low latency", "",
                  "`LowLatencyAll2All`, calls among many in a CUDA graph, and a layer of dispatch, two",
                  "grouped GEMMs and combine.", "", *low_latency_table(figures),
                  *images(figures, plots, folder, "decode")]
    if of_skews := skew_table(figures):
        lines += ["", "### Skewed routing", "", *_wrapped([SKEW_TEXT]), "", *of_skews]
    if of_4_bits := w4_tables.tables(figures.rows):
        lines += ["", "### Experts of 4 bits", "", *_wrapped([W4_TEXT])]
        for one in of_4_bits:
            lines += ["", *w4_tables.markdown(one)]
    if figures.find("worklog", "epmoe"):
        lines += ["", "### Dispatch, x * (1 + rank), combine", "",
                  "The problem of `python -m benchmarks worklog`, in float16.", "", *worklog_table(figures)]
    if any(r["bench"] == "ablation" for r in figures.rows):
        lines += ["", "### What each choice brings", "",
                  "One option is changed at a time. The number is the time with the change over the time "
                  "with the defaults.", "", *ablation_table(figures)]
    if figures.is_gpu and figures.find("gemm", "epmoe gate and up"):
        lines += ["", "### Grouped GEMM", "",
                  "The rows and experts of one rank of four. epmoe and torch are measured alternately, on "
                  "all GPUs at the same time; the figures",
                  "are those of the slowest GPU.", "", *gemm_table(figures)]
    return "\n".join(lines) + "\n"


# ---- the command ----


def write_between_markers(document, text):
    """Replace the text between the markers of the file."""
    before = document.read_text()
    after, count = MARKED.subn(lambda m: m[1] + text + m[2], before)
    if count != 1:
        raise SystemExit(f"{document}: wanted one <!-- figures --> ... <!-- /figures -->, found {count}")
    if after != before:
        document.write_text(after)


def folder(text):
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: must be a folder")
    return text


def add_arguments(parser):
    add = parser.add_argument
    add("file", metavar="FILE", help="written by --json")
    add("--readme", metavar="FILE",
        help="put the short table and one plot between the figures markers of this file")
    add("--page", metavar="FILE",
        help="put all tables and plots between the figures markers of this file")
    add("--plots", metavar="FOLDER", type=folder,
        help="write the plots to this folder, and make it if needed (default: beside the file of figures)")


def _relative(folder, document):
    """Return the folder as a link in the document names it."""
    return Path(os.path.relpath(folder.resolve(), document.resolve().parent))


def main(options):
    figures = Figures(options.file, options.plots)
    if importable := plots.can_draw():
        figures.plots.mkdir(parents=True, exist_ok=True)
        made = plots.draw(figures)
        for name in made:
            print(f"wrote {figures.plot_path(name)}")
    else:
        wanted = plots.wanted(figures)
        made = {name: text for name, text in wanted.items() if figures.plot_path(name).exists()}
        print("no plots: matplotlib cannot be imported", file=sys.stderr)
    for name in plots.TEXTS:
        if importable and name not in made:
            print(f"not made: the plot {name}, because it has no rows")
    for line in figures.missing():
        print(f"missing in {figures.path}: {line}")
    for document, make in ((options.readme, short_block), (options.page, block)):
        if document:
            folder = _relative(figures.plots, Path(document))
            write_between_markers(Path(document), make(figures, made, folder))
            print(f"wrote the figures in {document}")
    if not options.readme and not options.page:
        print("\n" + block(figures, made, figures.plots), end="")
    return 0
