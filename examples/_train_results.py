"""The tables and the plot that train_lm.py prints and writes at the end."""

import math


def print_results(train, val, table, moved, choices, nodes, distinct, row_bytes, waited_s):
    """Print the tables.

    train: loss of each step.  val: {step: validation loss}.  table: [(name of the tensor, max|reference|,
    relative difference)].  moved: the number of routings that differ.  choices: [source rank, expert].
    nodes: how many.  distinct: rows to other ranks, or, with several nodes, to other nodes.  row_bytes: size
    of a row.  waited_s: [r, s]: how long rank r waited for rank s.
    """
    print("\nLoss (nats per byte)\n  step     train  validation  bits/byte")
    for step, value in val.items():
        before = train[max(step - 1, 0)]
        print(f"  {step:4d}  {before:8.3f}  {value:10.3f}  {value / math.log(2):9.3f}")

    print("\nDifference from the same model in one process without epmoe (float64)")
    print(f"  {'tensor':28}  {'max|reference|':>14}  {'relative difference':>19}")
    for name, largest, difference in table:
        print(f"  {name:28}  {largest:14.3e}  {difference:19.2e}")
    print(f"  routings that the reference would have chosen differently: {moved}")

    size, experts = choices.shape
    load = choices.sum(0) / choices.sum()
    by_rank = load.view(size, -1).sum(1).tolist()
    print("\nTokens per expert and rank, all layers and steps")
    print("  rank   share  expert     tokens   share")
    for expert, share in enumerate(load.tolist()):
        rank, i = divmod(expert, experts // size)
        head = f"{'':12}" if i else f"{rank:4d}  {by_rank[rank]:6.2%}"
        bar = "#" * min(38, round(16 * experts * share))  # An equal share has 16 marks.
        print(f"  {head}  {expert:6d}  {choices[:, expert].sum():9d}  {share:6.2%}  {bar}")

    parts, part = (nodes, "node") if nodes > 1 else (size, "rank")
    between = choices.view(parts, size // parts, parts, -1).sum((1, 3))
    away = between.fill_diagonal_(0).sum().item()
    print(f"\nToken saving in dispatch (forward passes, rows to other {part}s)")
    sent = ("one row for each choice", away), (f"one row for each token and {part}", distinct)
    for text, rows in (*sent, ("saved", away - distinct)):
        megabytes, share = rows * row_bytes / 1e6, rows / max(away, 1)
        print(f"  {text:32}  {rows:10d} rows  {megabytes:9.1f} MB  {share:6.1%}")

    slowest = waited_s.sum(0).argmax().item()
    print(f"\nSeconds that ranks waited for others to enter an operation; longest for rank {slowest}")
    print("  " + " " * 6 + "".join(f"{f'for {rank}':>9}" for rank in range(size)))
    for rank, row in enumerate(waited_s.tolist()):
        print(f"  rank {rank}" + "".join(f"{seconds:9.3f}" for seconds in row))


def write_plot(path, train, val, choices, waited_s):
    """Plot the losses, the load of each expert in each layer, and the waits.

    choices: [layer, source rank, expert].  waited_s: see print_results.
    """
    try:
        import matplotlib
    except ImportError:
        print("\nno plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right, waits) = pyplot.subplots(1, 3, figsize=(16, 4.2), layout="constrained",
                                                   width_ratios=(6, 6, 4))
    left.plot(range(1, len(train) + 1), train, lw=1, label="train, mean of all ranks")
    left.plot(list(val), list(val.values()), "o-", ms=4, label="validation")
    left.set(xlabel="step", ylabel="nats per byte", title="Loss")
    left.legend()
    load = choices.sum(1) / choices.sum((1, 2)).unsqueeze(1) * choices.shape[2]
    image = right.imshow(load, aspect="auto", vmin=0, vmax=max(2.0, load.max().item()))
    for rank in range(1, choices.shape[1]):
        right.axvline(rank * choices.shape[2] / choices.shape[1] - 0.5, color="white", lw=2)
    right.set(xlabel="expert (white lines separate the ranks)", ylabel="layer", title="Expert load")
    right.set_yticks(range(len(load)))
    figure.colorbar(image, label="tokens, relative to an equal share")
    image = waits.imshow(waited_s, vmin=0, cmap="magma")
    waits.set(xlabel="for rank", ylabel="rank", title="Waits at operations", xticks=range(len(waited_s)),
              yticks=range(len(waited_s)))
    figure.colorbar(image, label="seconds")
    figure.savefig(path, dpi=120)
    print(f"\nplot written to {path}")
