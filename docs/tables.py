#!/usr/bin/env python3
"""The tables of docs/experiments, from the JSON file of each experiment, and the index, from the entries (make report).

    tables.py            write the tables into the pages
    tables.py --check    fail if a page has another table than its file

A page has <!-- table NAME --> and <!-- /table --> around the table of data/NAME.json:
{"experiment": "E-007", "what": .., "columns": [..], "rows": [[..], ..]}, one row a line.  A cell is a text, a number, or null for an empty cell.
A number is printed as the file has it, so a file keeps 0.90 as the text "0.90" where the last digit matters.

A file with "plot" is also drawn: {"file": name in docs/img, "x": label, "y": label, "curves": {name: [columns], ..}}.
Its first column is x; each column of a name is a thin line, and their mean a thick one.  This needs matplotlib.

A file without "columns" has the figures that layer --w4 and decode --w4 of python -m benchmarks write with --json,
and "experiment" beside them: benchmarks/w4_tables.py makes its tables.

Each file of data/ is a table of a page or has a link in one.  data/records.json has a record for each entry of the pages.
The files of data/runs are figures that benches wrote (python -m benchmarks report reads them): older ones, which entries name.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import w4_tables  # noqa: E402  it needs nothing that is not in the standard library
from benchmarks.plots import COLORS, STYLE, can_draw  # noqa: E402  nor does it, until something is drawn

FOLDER = ROOT / "docs" / "experiments"
INDEX = re.compile(r"(<!-- index -->\n).*?(<!-- /index -->)", re.DOTALL)
ENTRY = re.compile(r"^## (E-\d+) ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def table(name):
    """Lines of Markdown."""
    data = json.loads((FOLDER / "data" / f"{name}.json").read_text())
    if "columns" not in data:
        tables = w4_tables.tables(data["rows"])
        assert tables, f"{name}: no columns, and no rows of {w4_tables.LAYER} and {w4_tables.DECODE}"
        return "\n".join("\n".join(["", *w4_tables.markdown(one), ""]) for one in tables)
    lines = [["" if cell is None else str(cell) for cell in row] for row in (data["columns"], *data["rows"])]
    assert all(len(line) == len(lines[0]) for line in lines), f"{name}: rows of different lengths"
    head, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rows]) + "\n"


def draw():
    """Draw the files that have a plot.  Returns the names of the images."""
    found = {path: json.loads(path.read_text()).get("plot") for path in sorted((FOLDER / "data").glob("e*.json"))}
    plots = {path: plot for path, plot in found.items() if plot}
    if "--check" in sys.argv or not plots or not can_draw():
        return [plot["file"] for plot in plots.values()]
    from matplotlib import pyplot as plt
    for path, plot in plots.items():
        rows = json.loads(path.read_text())["rows"]
        with plt.rc_context(STYLE):
            figure, axes = plt.subplots(figsize=(6, 3.4))
            for (name, columns), color in zip(plot["curves"].items(), COLORS.values()):
                x, runs = [row[0] for row in rows], [[float(row[c]) for row in rows] for c in columns]
                for run in runs:
                    axes.plot(x, run, color=color, linewidth=0.7, alpha=0.6)
                axes.plot(x, [sum(of) / len(of) for of in zip(*runs)], color=color, linewidth=2, label=name)
            axes.set(xlabel=plot["x"], ylabel=plot["y"])
            axes.legend()
            figure.savefig(ROOT / "docs" / "img" / plot["file"], dpi=120, bbox_inches="tight")
            plt.close(figure)
    return [plot["file"] for plot in plots.values()]


def entries():
    """{number: line of the index} of all entries; each has a decision and a record."""
    found, records = {}, json.loads((FOLDER / "data" / "records.json").read_text())
    for page in sorted(FOLDER.glob("*.md")):
        for number, title, text in ENTRY.findall(page.read_text()):
            decision = re.search(r"^\*\*Decision: ([^.;:,*]+)", text, re.MULTILINE)
            assert decision and number not in found, f"{page.name}: {number} is there twice, or has no decision"
            anchor = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", f"{number} {title}".lower()))
            found[number] = f"| [{number}]({page.name}#{anchor}) | {title} | {decision[1]} |\n"
    assert set(records) == set(found), f"records.json and the pages differ in {sorted(set(records) ^ set(found))}"
    return found


def index():
    found = entries()
    return "| entry | experiment | decision |\n|---|---|---|\n" + "".join(found[n] for n in sorted(found))


def main():
    wrong, used = [], set()
    wrong += [f"docs/img/{name}: missing" for name in draw() if not (ROOT / "docs" / "img" / name).exists()]
    for page in sorted(FOLDER.glob("*.md")):
        before = page.read_text()
        used |= set(re.findall(r"\(data/([\w-]+)\.json\)", before))
        after = MARKED.sub(lambda m: used.add(m[2]) or m[1] + table(m[2]) + m[3], before)
        after = INDEX.sub(lambda m: m[1] + index() + m[2], after)
        if after != before and "--check" in sys.argv:
            wrong.append(f"{page.name}: a table is not that of its file")
        elif after != before:
            page.write_text(after)
    wrong += [f"{p.name}: in no page" for p in FOLDER.glob("data/*.json") if p.stem not in used]
    return "\n".join(wrong) or None


if __name__ == "__main__":
    sys.exit(main())
