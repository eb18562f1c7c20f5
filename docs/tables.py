#!/usr/bin/env python3
"""The tables of docs/experiments, from the JSON file of each experiment (make report).

    tables.py            write the tables into the pages
    tables.py --check    fail if a page has another table than its file

A page has <!-- table NAME --> and <!-- /table --> around the table of data/NAME.json:
{"experiment": "E-007", "what": .., "columns": [..], "rows": [[..], ..]}.  A cell is a text, a number, or null for an empty cell.
A number is printed as the file has it, so a file keeps 0.90 as the text "0.90" where the last digit matters.
"""

import json
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "experiments"
MARKED = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def table(name):
    """Lines of Markdown."""
    data = json.loads((FOLDER / "data" / f"{name}.json").read_text())
    lines = [["" if cell is None else str(cell) for cell in row] for row in (data["columns"], *data["rows"])]
    assert all(len(line) == len(lines[0]) for line in lines), f"{name}: rows of different lengths"
    head, *rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rows]) + "\n"


def main():
    wrong, used = [], set()
    for page in sorted(FOLDER.glob("*.md")):
        before = page.read_text()
        after = MARKED.sub(lambda m: used.add(m[2]) or m[1] + table(m[2]) + m[3], before)
        if after != before and "--check" in sys.argv:
            wrong.append(f"{page.name}: a table is not that of its file")
        elif after != before:
            page.write_text(after)
    wrong += [f"{p.name}: in no page" for p in FOLDER.glob("data/*.json") if p.stem not in used]
    return "\n".join(wrong)


if __name__ == "__main__":
    sys.exit(main())
