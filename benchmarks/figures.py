"""The figures of report.py and plots.py: the rows of a file that --json wrote, and of the files beside it."""

import hashlib
import json
from pathlib import Path

STAGES = {"dispatch": "epmoe plan + dispatch", "combine": "epmoe combine"}
BENCHES = ("a2a", "sm", "tokens", "layer", "growth", "ablation", "gemm", "decode")


def _matches(row, more):
    return all(row.get(key) == value for key, value in more.items())


class Figures:
    """The rows of FILE, of the file with DeepEP's recorded figures, and of the file with one rank alone."""

    def __init__(self, path, plots=None):
        path = Path(path)
        texts = [path.read_text()]
        for other in ("deep_ep", "one_gpu"):
            beside = path.with_name(f"{other}_{path.name}")
            texts.append(beside.read_text() if beside.exists() else "{}")
        self.path, self.plots = path, Path(plots) if plots else path.parent
        self.result, self.recorded, self.one_gpu = map(json.loads, texts)
        # Each plot carries this digest of its figures.
        self.digest = hashlib.sha256("".join(texts[:2]).encode()).hexdigest()[:16]
        self.rows, self.recorded_rows = self.result["rows"], self.recorded.get("rows", [])

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
