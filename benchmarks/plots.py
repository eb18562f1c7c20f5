"""The plots of report.py, as PNG: times by shape, by thread blocks, and by T."""

import importlib.util

from .figures import STAGES

# Okabe and Ito's colours, which colour-blind readers can tell apart; hatches and markers repeat the
# information.
COLORS = {"epmoe": "#0072B2", "DeepEP": "#E69F00", "torch": "#999999"}
STAGE_STYLE = {"dispatch": ("o", "-"), "combine": ("s", "--")}
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#dddddd",
         "grid.linewidth": 0.6, "axes.axisbelow": True, "figure.facecolor": "white",
         "savefig.facecolor": "white", "legend.frameon": False,
         "hatch.linewidth": 0.7}
TEXTS = {"layers": "Time of a whole layer for each shape, epmoe beside DeepEP and torch",
         "shapes": "Time of dispatch and of combine for each shape, epmoe beside DeepEP and torch",
         "sm": "Time of dispatch and of combine over the thread blocks that move tokens",
         "tokens": "Time of dispatch and of combine over the tokens of a rank",
         "growth": "Time of a whole layer over the tokens of a rank",
         "decode": "Time of low-latency dispatch and combine over the tokens of a rank"}


def can_draw():
    return importlib.util.find_spec("matplotlib") is not None


def wanted(figures):
    """Return {name: alternative text} of the plots that the figures suffice for.  A line needs two points."""
    there = {"layers": bool(figures.shapes("layer")), "shapes": bool(figures.shapes())}
    for name in ("sm", "tokens"):
        there[name] = bool(sweep_shape(figures, name))
    there["growth"] = bool(sweep_shape(figures, "growth", "epmoe layer"))
    there["decode"] = bool(sweep_shape(figures, "decode", "epmoe pair"))
    return {name: text for name, text in TEXTS.items() if there[name]}


def sweep_shape(figures, bench, impl=STAGES["combine"]):
    """Return the first shape with at least two points of a sweep, or None."""
    shapes = [r["shape"] for r in figures.find(bench, impl)]
    return next((s for s in shapes if shapes.count(s) > 1), None)


def draw(figures):
    """Write the wanted plots and return wanted(figures)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plots = wanted(figures)
    for name in plots:
        with plt.rc_context(STYLE):
            figure = {"layers": draw_layers, "shapes": draw_shapes, "sm": draw_sm, "tokens": draw_tokens,
                      "growth": draw_growth, "decode": draw_decode}[name](figures, plt)
            # Without Software, matplotlib's version: the file depends on the figures only.
            figure.savefig(figures.plot_path(name), dpi=150,
                           metadata={"Software": None, "Figures": figures.digest})
            plt.close(figure)
    return plots


def title(figures, text):
    r = figures.result
    note = "" if figures.is_gpu else ": small shapes on a CPU, nothing about GPUs"
    return f"{text}\n{r['machine']}, {r['date']}{note}"


def peer_name(figures):
    return "torch + NCCL" if figures.is_gpu else "torch + gloo"


def link_ms(figures, row):
    """Return the ms that the row's bytes need at the link's measured rate, or None where it is unknown."""
    rate = figures.recorded.get("link_gbps")
    return row["wire_gbps"] * row["ms"] / rate if rate and "wire_gbps" in row else None


def draw_shapes(figures, plt):
    """Draw bars: a panel for each stage, a group for each shape."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 6.4), layout="constrained")
    shapes, another_run = figures.shapes(), False
    for ax, (stage, impl) in zip(axes, STAGES.items()):
        for i, shape in enumerate(shapes):
            row = figures.find("a2a", impl, shape=shape)[0]
            deep_ep, same_run = figures.deep_ep("a2a", stage, shape=shape)
            another_run |= deep_ep is not None and not same_run
            bars = [("epmoe", row["ms"]), ("DeepEP", deep_ep),
                    ("torch", figures.ms("a2a", f"torch {stage}", shape=shape))]
            bars = [(peer, ms) for peer, ms in bars if ms is not None]
            for j, (peer, ms) in enumerate(bars):
                at = i + (j - (len(bars) - 1) / 2) * 0.27
                hatched = peer == "DeepEP" and not same_run
                ax.bar(at, ms, 0.25, color=COLORS[peer], hatch="///" if hatched else None, edgecolor="white",
                       linewidth=0)
                ax.annotate(f"{ms:.2f}", (at, ms), (0, 2), textcoords="offset points", ha="center",
                            fontsize=8.5)
                floor = link_ms(figures, row)
                if peer == "epmoe" and floor:
                    ax.plot([at - 0.125, at + 0.125], [floor, floor], color="black", linewidth=1.6)
        ax.set_xticks(range(len(shapes)),
                      [f"{s}\nT = {figures.find('a2a', impl, shape=s)[0]['tokens']}" for s in shapes])
        ax.tick_params(axis="x", length=0)
        ax.margins(y=0.1)
        ax.grid(axis="x", visible=False)
        ax.set_ylabel(f"{'plan + dispatch' if stage == 'dispatch' else stage} (ms)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS["epmoe"])]
    labels = ["epmoe"]
    if any(figures.deep_ep("a2a", s, shape=shape)[0] for s in STAGES for shape in shapes):
        hatch = "///" if another_run else None
        handles.append(plt.Rectangle((0, 0), 1, 1, facecolor=COLORS["DeepEP"], edgecolor="white", linewidth=0,
                                     hatch=hatch))
        labels.append("DeepEP + permute" + (", recorded in another run" if another_run else ""))
    if any(figures.find("a2a", f"torch {s}") for s in STAGES):
        handles.append(plt.Rectangle((0, 0), 1, 1, color=COLORS["torch"]))
        labels.append(peer_name(figures))
    if figures.recorded.get("link_gbps"):
        handles.append(plt.Line2D([], [], color="black", linewidth=1.6))
        labels.append(f"the same bytes at {figures.recorded['link_gbps']} GB/s")
    axes[0].legend(handles, labels, loc="upper right")
    axes[0].set_title(title(figures, "Time of a stage, less is better"), loc="left", fontsize=11)
    return figure


def draw_layers(figures, plt):
    """Bars, one group for each shape; a line at the time of torch's two GEMMs alone."""
    figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
    shapes, hatched = [s for s in figures.shapes("layer") if " T=" not in s], False
    for i, shape in enumerate(shapes):
        deep_ep, same_run = figures.deep_ep("layer", "layer", shape=shape)
        bars = [("epmoe", figures.ms("layer", "epmoe layer", shape=shape)), ("DeepEP", deep_ep),
                ("torch", figures.ms("layer", "torch layer", shape=shape))]
        bars = [(who, ms) for who, ms in bars if ms is not None]
        for j, (who, ms) in enumerate(bars):
            at, mark = i + (j - (len(bars) - 1) / 2) * 0.27, who == "DeepEP" and not same_run
            hatched |= mark
            ax.bar(at, ms, 0.25, color=COLORS[who], hatch="///" if mark else None, edgecolor="white",
                   linewidth=0)
            ax.annotate(f"{ms:.1f}", (at, ms), (0, 2), textcoords="offset points", ha="center", fontsize=8.5)
        if gemms := figures.ms("layer", "GEMMs alone", shape=shape):
            ax.plot([i - 0.42, i + 0.42], [gemms, gemms], color="black", linewidth=1.4, linestyle=":")
    tokens = {s: figures.find("layer", "epmoe layer", shape=s)[0]["tokens"] for s in shapes}
    ax.set_xticks(range(len(shapes)), [f"{s}\nT = {tokens[s]}" for s in shapes])
    ax.tick_params(axis="x", length=0)
    ax.margins(y=0.1)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel("forward (ms)")
    names = {"epmoe": "epmoe", "torch": peer_name(figures),
             "DeepEP": "DeepEP + torch's GEMMs" + (", recorded in another run" if hatched else "")}
    has = {"epmoe": True, "DeepEP": any(figures.deep_ep("layer", "layer", shape=s)[0] for s in shapes),
           "torch": bool(figures.find("layer", "torch layer"))}
    names = {name: names[name] for name in ("epmoe", "DeepEP", "torch")}  # the order of the legend
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=COLORS[w], edgecolor="white", linewidth=0,
                             hatch="///" if w == "DeepEP" and hatched else None) for w in names if has[w]]
    handles.append(plt.Line2D([], [], color="black", linewidth=1.4, linestyle=":"))
    ax.legend(handles, [*(names[w] for w in names if has[w]), "torch's two GEMMs alone, no communication"])
    ax.set_title(title(figures, "Time of a whole MoE layer, less is better"), loc="left", fontsize=11)
    return figure


def _line(ax, figures, bench, impl, shape, x, peer, stage, label):
    rows = sorted(figures.find(bench, impl, shape=shape), key=lambda r: r[x])
    if rows:
        marker, style = STAGE_STYLE[stage]
        ax.plot([r[x] for r in rows], [r["ms"] for r in rows], marker=marker, linestyle=style,
                color=COLORS[peer], markersize=5, label=label)
    return rows


def _points(ax, rows, x, stage, label):
    """Draw hollow points without a line: figures of few points, or of another run."""
    if rows:
        ax.plot([r[x] for r in rows], [r["ms"] for r in rows], linestyle="", marker=STAGE_STYLE[stage][0],
                markersize=7,
                markerfacecolor="none", markeredgewidth=1.6, color=COLORS["DeepEP"], label=label)


def draw_sm(figures, plt):
    """Draw lines over the number of thread blocks.

    DeepEP's figures of the same run include its layout, so epmoe's dispatch then includes its plan.  DeepEP's
    recorded figures are of the bare, cached calls.
    """
    figure, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
    shape, counts = sweep_shape(figures, "sm"), set()
    same_run = [r for r in figures.rows if r["bench"] == "a2a" and r["impl"].startswith("DeepEP")
                and r["shape"] == shape]
    dispatch = ("epmoe cached dispatch", "epmoe dispatch of a plan made before")
    if same_run:
        dispatch = ("epmoe plan + dispatch",) * 2
    for stage, (impl, label) in zip(STAGES, (dispatch, ("epmoe combine",) * 2)):
        counts |= {r["num_sm"]
                   for r in _line(ax, figures, "sm", impl, shape, "num_sm", "epmoe", stage, label)}
    for stage, impl in (("dispatch", "cached dispatch without permute"),
                        ("combine", "combine without unpermute")):
        if same_run:
            _points(ax, [r for r in same_run if f" {stage}," in r["impl"]], "num_sm", stage,
                    f"DeepEP + permute, {stage}")
        else:
            rows = [r for r in figures.recorded_rows
                    if (r["bench"], r["impl"], r["shape"]) == ("sm", f"DeepEP {impl}", shape)]
            _points(ax, rows, "num_sm", stage, f"DeepEP {impl}, another run")
    workers = "thread blocks" if figures.is_gpu else "threads"
    ax.set(xlabel=f"{workers}, one an SM" if figures.is_gpu else workers, ylabel="time (ms)", ylim=(0, None))
    ax.set_xticks(sorted(counts))
    tokens = figures.find("sm", "epmoe combine", shape=shape)[0]["tokens"]
    ax.set_title(title(figures, f"{shape}, T = {tokens}: time over {workers}"), loc="left", fontsize=11)
    ax.legend()
    return figure


def over_tokens(ax, ticks, unit="ms"):
    """Make both axes logarithmic, with readable numbers."""
    ax.set(xscale="log", yscale="log", xlabel="T, tokens of a rank", ylabel=f"time ({unit})")
    ax.set_xticks(sorted(ticks), [str(t) for t in sorted(ticks)])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    steps = [a * 10**e for e in range(-4, 6) for a in (1, 2, 5) if low <= a * 10**e <= high]
    ax.set_yticks(steps, [f"{s:g}" for s in steps])


def draw_growth(figures, plt):
    """Draw lines over T, one for each way to compute a layer."""
    figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    shape, ticks = sweep_shape(figures, "growth", "epmoe layer"), set()
    ways = (("epmoe layer", "#0072B2", "o-"), ("epmoe layer, one after the other", "#56B4E9", "s--"),
            ("GEMMs alone", "black", ":"), ("torch layer", "#999999", "^-"))
    for impl, color, style in ways:
        rows = sorted(figures.find("growth", impl, shape=shape), key=lambda r: r["tokens"])
        ticks |= {r["tokens"] for r in rows}
        label = {"epmoe layer, one after the other": "epmoe layer, fused=False",
                 "GEMMs alone": "torch's two GEMMs alone",
                 "torch layer": f"{peer_name(figures)} layer"}.get(impl, impl)
        ax.plot([r["tokens"] for r in rows], [r["ms"] for r in rows], style, color=color, markersize=5,
                label=label)
    over_tokens(ax, ticks)
    ax.set_title(title(figures, f"{shape}: time of a layer over T"), loc="left", fontsize=11)
    ax.legend()
    return figure


def draw_decode(figures, plt):
    """Draw lines over T: dispatch in bfloat16 and FP8, combine, and both, in a graph where there is a GPU."""
    figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    shape, ticks = sweep_shape(figures, "decode", "epmoe pair"), set()
    ways = {"dispatch": "o-", "dispatch fp8": "v-.", "combine": "s--", "pair": "D:"}
    for peer in COLORS:
        for call, style in ways.items():
            rows = sorted(figures.find("decode", f"{peer} {call}", shape=shape), key=lambda r: r["tokens"])
            if rows:
                ticks |= {r["tokens"] for r in rows}
                name = peer_name(figures) if peer == "torch" else peer
                label = f"{name} {'dispatch + combine' if call == 'pair' else call}"
                ax.plot([r["tokens"] for r in rows], [r["ms"] * 1e3 for r in rows], style, color=COLORS[peer],
                        markersize=5, label=label)
    over_tokens(ax, ticks, "us")
    how = "low latency, in a CUDA graph; torch eager" if figures.is_gpu else "low latency"
    ax.set_title(title(figures, f"{shape}: time over T, {how}"), loc="left", fontsize=11)
    ax.legend(ncols=2, fontsize=8.5)
    return figure


def draw_tokens(figures, plt):
    """Draw lines over T, with both axes logarithmic."""
    figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
    shape, ticks = sweep_shape(figures, "tokens"), set()
    for stage, impl in STAGES.items():
        rows = _line(ax, figures, "tokens", impl, shape, "tokens", "epmoe", stage, impl)
        ticks |= {r["tokens"] for r in rows}
        _line(ax, figures, "tokens", f"torch {stage}", shape, "tokens", "torch", stage,
              f"{peer_name(figures)} {stage}")
        theirs = {t: figures.deep_ep("tokens", stage, shape=shape, tokens=t) for t in sorted(ticks)}
        same_run = {t: ms for t, (ms, same) in theirs.items() if same}
        other_run = [r for r in figures.recorded_rows if r["impl"] == f"DeepEP {stage}"
                     and r["shape"] == shape]
        if same_run:
            marker, style = STAGE_STYLE[stage]
            ax.plot(list(same_run), list(same_run.values()), marker=marker, linestyle=style,
                    color=COLORS["DeepEP"], markersize=5,
                    label=f"DeepEP + permute {stage}")
        else:
            _points(ax, other_run, "tokens", stage, f"DeepEP + permute, {stage}, another run")
        floors = [(r["tokens"], link_ms(figures, r)) for r in rows if link_ms(figures, r)]
        if floors and stage == "dispatch":
            ax.plot(*zip(*floors), color="black", linestyle=":",
                    label=f"the same bytes at {figures.recorded['link_gbps']} GB/s")
    over_tokens(ax, ticks)
    ax.set_title(title(figures, f"{shape}: time over T"), loc="left", fontsize=11)
    handles, labels = ax.get_legend_handles_labels()
    order = sorted(range(len(labels)),
                   key=lambda i: (not labels[i].startswith("epmoe"), labels[i].startswith("the same")))
    ax.legend([handles[i] for i in order], [labels[i] for i in order])
    return figure
