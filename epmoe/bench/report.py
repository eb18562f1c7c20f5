"""python -m epmoe.bench report FILE: the plots beside FILE, and the table, from figures that --json wrote.

Where FILE is NAME.json, figures of DeepEP that another run recorded are taken from deep_ep_NAME.json beside it, if it is
there; DeepEP's rows in FILE itself go before them.  What FILE lacks is left out, and named.
"""

import hashlib
import json
import re
import sys
import textwrap
from pathlib import Path

MARKED = re.compile(r"(<!-- figures -->\n).*?(<!-- /figures -->)", re.DOTALL)
STAGES = {"dispatch": "epmoe plan + dispatch", "combine": "epmoe combine"}
PRODUCTS = ("gate and up", "down", "dgrad of gate and up", "dgrad of down", "wgrad of gate and up", "wgrad of down")


class Figures:
    """The rows of a file, found by what they are; and those of the file with recorded peers."""

    def __init__(self, path):
        path = Path(path)
        recorded = path.with_name(f"deep_ep_{path.name}")
        texts = [path.read_text(), recorded.read_text() if recorded.exists() else "{}"]
        self.path, (self.result, self.recorded) = path, map(json.loads, texts)
        self.digest = hashlib.sha256("".join(texts).encode()).hexdigest()[:16]  # plots carry it: are they of these files?
        self.rows, self.recorded_rows = self.result["rows"], self.recorded.get("rows", [])

    @property
    def is_gpu(self):
        return bool(self.result["gpus"])

    def find(self, bench, impl, **more):
        """Rows of a bench whose impl is this, in the file's order; more: further fields to match."""
        return [r for r in self.rows if r["bench"] == bench and r["impl"] == impl and all(r.get(k) == v for k, v in more.items())]

    def ms(self, bench, impl, **more):
        """Milliseconds of the row, or None."""
        return next((r["ms"] for r in self.find(bench, impl, **more)), None)

    def deep_ep(self, bench, stage, **more):
        """(milliseconds, whether they are of this run) of DeepEP at its best count of SMs; (None, False) without any."""
        for rows, same_run in ((self.rows, True), (self.recorded_rows, False)):
            times = [r["ms"] for r in rows if r["bench"] == bench and r["impl"].split(",")[0] == f"DeepEP {stage}"
                     and all(r.get(k) == v for k, v in more.items())]
            if times:
                return min(times), same_run
        return None, False

    def shapes(self, bench="a2a"):
        """Names of the shapes that have a dispatch and a combine, or a layer, in order."""
        wanted = ("epmoe layer",) if bench == "layer" else STAGES.values()
        found = [[r["shape"] for r in self.find(bench, impl)] for impl in wanted]
        return [s for s in dict.fromkeys(found[0]) if all(s in names for names in found)]

    def missing(self):
        """What FILE has no rows of, a line each."""
        lines = [f"no rows of {bench}: python -m epmoe.bench {bench}" for bench in ("a2a", "sm", "tokens", "layer", "growth", "ablation", "gemm")
                 if not any(r["bench"] == bench and (bench == "ablation" or r["impl"].startswith("epmoe")) for r in self.rows)]
        without = [s for s in self.shapes() if self.deep_ep("a2a", "dispatch", shape=s)[0] is None]
        if without:
            lines.append(f"no figures of DeepEP for {', '.join(without)}")
        if not any(r["impl"].startswith("DeepEP") for r in self.rows):
            lines.append("no figures of DeepEP in the same run")
        return lines


def plot_name(figures, plot):
    return f"{figures.path.stem}_{plot}.png"


def _over(ms, theirs, mark=""):
    return "" if theirs is None else f"{ms / theirs:.2f}{mark}"


def markdown(head, rows):
    """A table without the columns that are empty in every row."""
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = ["| " + " | ".join(row[i] for i in keep) + " |" for row in (head, *rows)]
    return [lines[0], "|---" * len(keep) + "|", *lines[1:]]


def table(figures):
    """A row a shape: milliseconds, GB/s across links, and epmoe's time over the peers'."""
    rows = []
    for shape in figures.shapes():
        plan = figures.ms("a2a", "epmoe plan, in a graph", shape=shape)
        cells = [shape, str(figures.find("a2a", STAGES["dispatch"], shape=shape)[0]["tokens"]), f"{plan * 1e3:.1f} us" if plan else ""]
        for stage, impl in STAGES.items():
            row = figures.find("a2a", impl, shape=shape)[0]
            theirs, same_run = figures.deep_ep("a2a", stage, shape=shape)
            cells += [f"{row['ms']:.3f} ms", f"{row['wire_gbps']:.0f}" if figures.is_gpu and "wire_gbps" in row else "",
                      _over(row["ms"], figures.ms("a2a", f"torch {stage}", shape=shape)), _over(row["ms"], theirs, "" if same_run else "*")]
        rows.append(cells)
    over = ["GB/s", "over torch", "over DeepEP"]
    return markdown(["shape", "T a rank", "plan", "plan + dispatch", *over, "combine", *over], rows)


def layer_table(figures):
    """The same of whole layers."""
    rows = []
    for shape in figures.shapes("layer"):
        row = figures.find("layer", "epmoe layer", shape=shape)[0]
        gemms, stages = (figures.ms("layer", impl, shape=shape) for impl in ("GEMMs alone", "epmoe layer, one after the other"))
        theirs, same_run = figures.deep_ep("layer", "layer", shape=shape)
        over = [_over(row["ms"], gemms), _over(stages, gemms) if stages else "", _over(row["ms"], figures.ms("layer", "torch layer", shape=shape)),
                _over(row["ms"], theirs, "" if same_run else "*")]
        for kernel, product in (("dispatch + gemm", "gate and up"), ("gemm + combine", "down")):
            ms = [figures.ms("layer", impl, shape=shape) for impl in (f"epmoe {kernel}", f"torch {product} alone")]
            over.append(_over(*ms) if None not in ms else "")
        rows.append([shape, str(row["tokens"]), f"{row['ms']:.3f} ms", f"{row['tflops']:.0f}" if figures.is_gpu else "", *over])
    return markdown(["shape", "T a rank", "whole layer", "TFLOP/s a GPU", "over GEMMs alone", "one after the other: over GEMMs alone", "over torch",
                     "over DeepEP", "dispatch + gemm over gate and up", "gemm + combine over down"], rows)


def ablation_table(figures):
    """A row a choice that was made otherwise: time of the layer and of its two kernels over the time as it is, each shape."""
    of = [r for r in figures.rows if r["bench"] == "ablation"]
    shapes, choices = (list(dict.fromkeys(r[key] for r in of)) for key in ("shape", "impl"))
    cells = {(r["impl"], r["shape"]): [f"{r['ratios'][k]:.2f}" for k in ("layer", "first", "second")] for r in of}
    head = [f"{shape}: {what}" for shape in shapes for what in ("layer", "dispatch + gemm", "gemm + combine")]
    return markdown(["", *head], [[choice, *(c for s in shapes for c in cells.get((choice, s), [""] * 3))] for choice in choices])


def gemm_table(figures):
    """A row a shape: milliseconds and TFLOP/s of gate and up; of the other products the time over torch's, of SwiGLU over none."""
    rows = []
    for row in figures.find("gemm", "epmoe gate and up"):
        ms = {p: [figures.ms("gemm", f"{impl} {p}", shape=row["shape"]) for impl in ("epmoe", "torch")] for p in PRODUCTS}
        fused = figures.find("gemm", "epmoe gate and up, SwiGLU", shape=row["shape"])
        over = [_over(*ms[p]) if None not in ms[p] else "" for p in PRODUCTS]
        rows.append([row["shape"], str(row["tokens"]), f"{row['ms']:.3f} ms", f"{row['tflops']:.0f}", over[0],
                     f"{fused[0]['ratio']:.2f}" if fused else "", *over[1:]])
    return markdown(["shape", "T a rank", "gate and up", "TFLOP/s", "over torch", "with SwiGLU over without", "down", "dgrad of gate and up",
                     "dgrad of down", "wgrad of gate and up", "wgrad of down"], rows)


def of_run(result):
    """One line about a run."""
    cuda = f"CUDA {result['cuda']}, " if result["gpus"] else ""
    return f"{result['machine']}, {cuda}torch {result['torch']}, {result['date']}, commit {result['commit'] or 'unknown'}"


def sources(figures):
    """What the tables' other figures are, and of which run."""
    lines = ["\"Over\" is epmoe's time divided by the other's: less is better."]
    if any(figures.ms("a2a", "torch dispatch", shape=s) for s in figures.shapes()):
        lines[0] += " torch is sort + `all_to_all_single` + sort, in the same run."
    wanted = [("a2a", stage, s) for stage in STAGES for s in figures.shapes()] + [("layer", "layer", s) for s in figures.shapes("layer")]
    found = {same_run for ms, same_run in (figures.deep_ep(b, what, shape=s) for b, what, s in wanted) if ms is not None}
    if True in found:
        lines.append("DeepEP is layout + dispatch + permute and unpermute + combine, the better of 24 and 48 SMs, in the same run.")
    if False in found:
        o = figures.recorded
        lines.append(f"\\* DeepEP did not run in this run. Its figures were recorded in another one, on {o['machine']} (CUDA {o['cuda']}, "
                     f"torch {o['torch']}, {o['date']}), so these ratios are only as good as two runs compare: {o['what']}"
                     + (f"; layer: {o['what_layer']}." if figures.shapes("layer") else "."))
    return "\n\n".join(textwrap.fill(line, 130, break_long_words=False, break_on_hyphens=False) for line in lines).split("\n")


def block(figures, plots, folder):
    """What stands between the README's markers.  plots: {name: alternative text} of those that exist; folder: where they lie."""
    r = figures.result
    lines = [] if figures.is_gpu else [f"**{r.get('note', 'CPU figures: they say nothing about GPUs')}.**", ""]
    lines += [f"{of_run(r)}:", ""]
    if figures.shapes():
        lines += [*table(figures), ""]
    lines += sources(figures)
    if figures.shapes("layer"):
        lines += ["", "Whole layers, forward, by turns with torch's two products on the same rows (\"GEMMs alone\"):", "", *layer_table(figures)]
    if any(r["bench"] == "ablation" for r in figures.rows):
        lines += ["", "What each choice brings: time with one made otherwise, over the time as it is:", "", *ablation_table(figures)]
    if figures.is_gpu and figures.find("gemm", "epmoe gate and up"):
        lines += ["", "Grouped GEMMs of one rank of four, by turns with torch's; all GPUs at the same time, the slowest one:", "", *gemm_table(figures)]
    for name, text in plots.items():
        lines += ["", f"![{text}]({Path(folder, plot_name(figures, name)).as_posix()})"]
    return "\n".join(lines) + "\n"


def write_readme(readme, text):
    """Put text between the markers of the file."""
    before = readme.read_text()
    after, count = MARKED.subn(lambda m: m[1] + text + m[2], before)
    if count != 1:
        raise SystemExit(f"{readme}: wanted one <!-- figures --> ... <!-- /figures -->, found {count}")
    if after != before:
        readme.write_text(after)


def add_arguments(parser):
    parser.add_argument("file", metavar="FILE", help="written by --json")
    parser.add_argument("--readme", metavar="FILE", help="put the table and the plots between this file's figures markers")


def main(options):
    from epmoe.bench import plots

    figures = Figures(options.file)
    if importable := plots.can_draw():
        made = plots.draw(figures)
        for name in made:
            print(f"wrote {figures.path.with_name(plot_name(figures, name))}")
    else:
        made = {name: text for name, text in plots.wanted(figures).items() if figures.path.with_name(plot_name(figures, name)).exists()}
        print("no plots: matplotlib cannot be imported", file=sys.stderr)
    for name in plots.TEXTS:
        if importable and name not in made:
            print(f"not made: the plot {name}, for want of rows")
    for line in figures.missing():
        print(f"missing in {figures.path}: {line}")
    if options.readme:
        readme = Path(options.readme)
        folder = figures.path.resolve().parent
        folder = folder.relative_to(readme.resolve().parent) if folder.is_relative_to(readme.resolve().parent) else folder
        write_readme(readme, block(figures, made, folder))
        print(f"wrote the figures in {readme}")
    else:
        print("\n" + block(figures, made, figures.path.parent), end="")
    return 0
