"""python -m epmoe.bench.report FILE: the README's table from a file that python -m epmoe.bench --json wrote."""

import json
import sys


def table(result):
    """Markdown: one row a shape; milliseconds, GB/s on the wire, and the ratio to torch's collectives."""
    lines = [f"{result['machine']}, CUDA {result['cuda']}, torch {result['torch']}, {result['date']}, commit {result['commit']}:", "",
             "| shape | T a rank | plan + dispatch | GB/s | over torch | combine | GB/s | over torch |", "|---|---|---|---|---|---|---|---|"]
    rows = {(r["shape"], r["impl"]): r for r in result["rows"] if r["bench"] == "stages"}
    for shape in dict.fromkeys(s for s, _ in rows):
        d, c = rows[shape, "epmoe plan + dispatch"], rows[shape, "epmoe combine"]
        lines.append(f"| {shape} | {d['tokens']} | {d['ms']:.3f} ms | {d['wire_gbps']:.0f} | {d['ratio']:.2f} "
                     f"| {c['ms']:.3f} ms | {c['wire_gbps']:.0f} | {c['ratio']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1]) as f:
        print(table(json.load(f)))
