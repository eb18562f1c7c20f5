"""The tables of experts of 4 bits, from the rows that `layer --w4` and `decode --w4` write.

A table is (caption, head, lines of cells).  docs/tables.py needs this without torch.
"""

LAYER, DECODE = "layer --w4", "decode --w4"  # what rows call the benches
FORMATS = ("bf16", "FP8", "MXFP4", "INT4")
# of layer --w4: the weights of MXFP4, expanded to FP8 in each call, and the recipe of their scales
IN_FP8 = {"W4A8": "blockwise", "W4A8 row": "rowwise"}
PEERS = ("grouped_mm", "Triton MXFP4")  # of transformers
HBM_TBPS = 4.8  # of an H200: what its memory can deliver


def impl_of(name):
    """Return what rows call a format or a peer."""
    return f"{'epmoe' if name in (*FORMATS, *IN_FP8) else 'transformers'} {name}"


def _found(rows, bench):
    """Return {shape: {T: {name of a format or peer: row}}} of a bench."""
    names, found = {impl_of(name): name for name in (*FORMATS, *IN_FP8, *PEERS)}, {}
    for row in rows:
        if row["bench"] == bench and row["impl"] in names:
            of_tokens = found.setdefault(row["shape"], {}).setdefault(row["tokens"], {})
            of_tokens[names[row["impl"]]] = row
    return found


def _ratio(of, name, over):
    return f"{of[name]['ms'] / of[over]['ms']:.2f}" if name in of and over in of else ""


def _cells(of, names, text):
    return [text(of[name]) if name in of else "" for name in names]


def _without_empty(caption, head, lines):
    """Return the table without the columns that are empty in every line."""
    keep = [i for i in range(len(head)) if any(line[i] for line in lines)]
    return caption, [head[i] for i in keep], [[line[i] for i in keep] for line in lines]


def _ranks(row):
    return f", one rank of {row['of_ranks']} alone" if "of_ranks" in row else ""


def decode_tables(rows):
    """Return two tables for each shape: the times by T, and the speeds at which weights are read."""
    tables = []
    for shape, by_tokens in _found(rows, DECODE).items():
        times, speeds = [], []
        for tokens, of in sorted(by_tokens.items()):
            times.append([str(tokens), *_cells(of, (*FORMATS, *PEERS), lambda row: f"{row['ms'] * 1e3:.1f}"),
                          _ratio(of, "MXFP4", "FP8"), _ratio(of, "MXFP4", "bf16")])
            row = next(iter(of.values()))
            speeds.append([str(tokens), f"{row['experts']:.1f}", *_cells(
                of, (*FORMATS, *PEERS), lambda row: f"{row['tbps']:.2f}, {row['tbps'] / HBM_TBPS:.0%}")])
        names = [*FORMATS, *PEERS]
        tables += [_without_empty(f"{shape}{_ranks(row)}: us of a decode layer, by tokens of a rank, T",
                                  ["T", *names, "MXFP4/FP8", "MXFP4/bf16"], times),
                   _without_empty(f"{shape}: TB/s of the weights of experts that get tokens, % of {HBM_TBPS}",
                                  ["T", "experts", *names], speeds)]
    return tables


def layer_tables(rows):
    """Return one table with a line for each shape, or none without rows."""
    lines, names = [], (*FORMATS, *IN_FP8)
    pairs = ("MXFP4", "bf16"), ("W4A8 row", "FP8"), ("W4A8 row", "bf16")
    for shape, by_tokens in _found(rows, LAYER).items():
        for tokens, of in by_tokens.items():
            row = next(iter(of.values()))
            lines.append([shape, str(tokens), *_cells(of, names, lambda row: f"{row['ms']:.2f}"),
                          *(_ratio(of, *pair) for pair in pairs)])
    head = ["shape", "T", *names, *("/".join(pair) for pair in pairs)]
    return [_without_empty(f"Whole layers{_ranks(row)}, ms", head, lines)] if lines else []


def tables(rows):
    """Return all tables that the rows have."""
    return decode_tables(rows) + layer_tables(rows)


def aligned(table):
    """Return the lines of a table for a terminal."""
    caption, head, lines = table
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    return [caption, *("  ".join(cell.rjust(n) for cell, n in zip(line, widths)).rstrip()
                       for line in (head, *lines))]


def markdown(table):
    """Return the lines of a table in Markdown, below its caption."""
    caption, head, lines = table
    head, *lines = ["| " + " | ".join(line) + " |" for line in (head, *lines)]
    return [f"{caption}:", "", head, "|---" * len(table[1]) + "|", *lines]
