"""Figures: how a file of them is written, and what report.py and plots.py read from it.

A file has the figures of one machine: {"machine": .., "date": .., "commit": .., "rows": [{..}, ..]}, one row
a line. A row of another run has the fields of RUN itself, as far as they differ from those of the file.
"""

import hashlib
import json
import re
from pathlib import Path

STAGES = {"dispatch": "epmoe plan + dispatch", "combine": "epmoe combine"}
BENCHES = ("a2a", "sm", "tokens", "layer", "growth", "ablation", "gemm", "decode")
RUN = ("cuda", "torch", "date", "commit")
KEY = ("bench", "shape", "tokens", "impl", "num_sm", "skew")  # no two rows of a file agree in all of these


def text_of(figures):
    """Return the figures as JSON: a field of the head a line, and a row a line."""
    head = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)},\n"
            for key, value in figures.items() if key != "rows"]
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in figures["rows"])
    return f"{{\n{''.join(head)} \"rows\": [\n{rows}\n ]\n}}\n"


def key_of(row):
    return tuple(map(row.get, KEY))


def merged(before, figures):
    """Return the figures of a file with those of a new run on the same machine.

    A new row takes the place of the row with its KEY. If no row stays, the result is the new run alone.
    """
    own = {field: figures[field] for field in RUN if figures[field] != before[field]}
    new = {key_of(row): row | own for row in figures["rows"]}
    stay = [row for row in before["rows"] if key_of(row) not in new]
    if not stay:
        return figures
    rows = [new.pop(key_of(row), row) for row in before["rows"]]
    return before | {"rows": [*rows, *new.values()]}


def runs_of(figures, *benches):
    """Return the runs of which the rows are, all or those of some benches: a head without rows for each."""
    head = {key: value for key, value in figures.items() if key != "rows"}
    runs = [head | {field: row[field] for field in RUN if field in row} for row in figures["rows"]
            if not benches or row["bench"] in benches]
    return [run for i, run in enumerate(runs) if run not in runs[:i]] or [head]


def figures_before(path, head):
    """Return the figures that a file has, to which those of a run will be added, or None without the file.

    Raises ValueError when the file has other contents, or figures of another machine or number of ranks.
    """
    if not Path(path).exists():
        return None
    try:
        before = json.loads(Path(path).read_text())
        theirs, ours = ((h["machine"], h["ranks"]) for h in (before, head))
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"--json {path}: the file exists, and has no figures of a benchmark") from None
    if theirs != ours:
        theirs, ours = (f"{num_ranks} ranks on {machine}" for machine, num_ranks in (theirs, ours))
        raise ValueError(f"--json {path}: the file has figures of {theirs}, these are of {ours}: name "
                         f"another file")
    return before


def _matches(row, more):
    return all(row.get(key) == value for key, value in more.items())


class Figures:
    """The rows of FILE, of the file with DeepEP's recorded figures, and of the file of one GPU alone."""

    def __init__(self, path, plots=None):
        path = Path(path)
        texts = [path.read_text()]
        one_gpu = re.sub(r"x\d+$", "", path.stem)
        for beside in (path.with_name(f"deep_ep_{path.name}"), path.with_name(f"{one_gpu}.json")):
            texts.append(beside.read_text() if beside.exists() and beside != path else "{}")
        self.path, self.plots = path, Path(plots) if plots else path.parent
        self.result, self.recorded, self.one_gpu = map(json.loads, texts)
        # Each plot carries this digest of its figures.
        self.digest = hashlib.sha256("".join(texts[:2]).encode()).hexdigest()[:16]
        # Tables and plots are of uniform routings, but for that of skewed ones.
        self.rows, self.skewed = ([r for r in self.result["rows"] if (r.get("skew") is not None) == is_skewed]
                                  for is_skewed in (False, True))
        self.recorded_rows = self.recorded.get("rows", [])

    def plot_path(self, plot):
        return self.plots / plot_name(self, plot)

    def training_step(self, shape):
        """Return {"epmoe both": row, "torch both": row, ...}, and whether they are of this run.

        Else they are of one rank alone; {} without this shape.
        """
        for rows, same_run in ((self.rows, True), (self.one_gpu.get("rows", []), False)):
            found = {r["impl"]: r for r in rows if r["bench"] == "train" and r["shape"] == shape}
            if found:
                return found, same_run
        return {}, False

    @property
    def is_gpu(self):
        return bool(self.result["gpus"])

    def find(self, bench, impl, **more):
        """Return the rows of a bench and an implementation, in the file's order; `more`: fields to match."""
        return [r for r in self.rows if r["bench"] == bench and r["impl"] == impl and _matches(r, more)]

    def ms(self, bench, impl, **more):
        """Return the milliseconds of the row, or None."""
        return next((r["ms"] for r in self.find(bench, impl, **more)), None)

    def deep_ep(self, bench, stage, **more):
        """Return DeepEP's milliseconds with its best number of SMs, and whether they are of this run.

        Without figures of DeepEP, return (None, False).
        """
        for rows, same_run in ((self.rows, True), (self.recorded_rows, False)):
            times = [r["ms"] for r in rows if r["bench"] == bench
                     and r["impl"].split(",")[0] == f"DeepEP {stage}" and _matches(r, more)]
            if times:
                return min(times), same_run
        return None, False

    def shapes(self, bench="a2a"):
        """Return the names of the shapes that have a dispatch and a combine, or a layer, in order."""
        impls = ("epmoe layer",) if bench == "layer" else STAGES.values()
        found = [[r["shape"] for r in self.find(bench, impl)] for impl in impls]
        return [s for s in dict.fromkeys(found[0]) if all(s in names for names in found)]

    def missing(self):
        """Return a line for each kind of rows that FILE does not have."""
        lines = [f"no rows of {bench}: python -m benchmarks {bench}" for bench in BENCHES
                 if not any(r["bench"] == bench and (bench == "ablation" or r["impl"].startswith("epmoe"))
                            for r in self.rows)]
        without = [s for s in self.shapes() if self.deep_ep("a2a", "dispatch", shape=s)[0] is None]
        if without:
            lines.append(f"no figures of DeepEP for {', '.join(without)}")
        if not any(r["impl"].startswith("DeepEP") for r in self.rows):
            lines.append("no figures of DeepEP in the same run")
        return lines


def plot_name(figures, plot):
    return f"{figures.path.stem}_{plot}.png"
