"""What the warps of the megakernels do, and when: needs a module built with the profiler (make trace).

A table of their time, a plot of how many are in what, and with --trace FILE a file for Perfetto (ui.perfetto.dev) of all ranks.
"""

import functools
from pathlib import Path

import torch

from epmoe import _C, trace
from epmoe.bench import plots

from .layer import Layer

KERNELS = {"dispatch + gemm": ("send", "receive"), "gemm + combine": ("return", "add up")}


def jobs(run):
    if not _C.TRACE:
        run.say("left out: overlap, for want of a module with the profiler (make trace)")
        return []
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes("seed")]


@torch.no_grad()
def measure(run, shape):
    ranks = {}
    with Layer(run, shape) as layer:
        layer.check()
        parts = layer.parts()
        for kernel in KERNELS:
            for _ in range(3):
                parts[kernel]()
            layer.op.ep_barrier_all()
            with trace.Trace(layer.op, room=1024) as t:
                parts[kernel]()
            ranks[kernel] = t.gather()
            for span, (num, us, share) in trace.summary(t.events()).items():
                run.record("overlap", shape, f"{kernel}: {span}", us / 1e3, rate=f"{num} spans", spans=num, share=round(share, 4))
    if run.rank:
        return
    if run.options.trace:
        for kernel, events in ranks.items():
            path = Path(run.options.trace)
            trace.save(path.with_stem(f"{path.stem}_{kernel.replace(' + ', '_')}"), events)
    if run.options.json and plots.can_draw():
        path = Path(run.options.json)
        draw(path.with_name(f"{path.stem}_overlap.png"), shape, {kernel: events[0] for kernel, events in ranks.items()}, run)


def draw(path, shape, events, run):
    """For each kernel: multipliers at work above, movers below, over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(2, len(events), figsize=(10, 4.2), sharex="col", sharey="row", constrained_layout=True)
        for (kernel, of), (top, bottom) in zip(events.items(), axes.T):
            times, busy = trace.busy(of, ("gemm", *KERNELS[kernel]))
            top.fill_between(times, busy["gemm"] / 2, color="#0072B2", linewidth=0)  # two of a block's warps note their tiles
            top.set_title(kernel)
            bottom.stackplot(times, *(busy[n] for n in KERNELS[kernel]), labels=KERNELS[kernel], colors=("#E69F00", "#009E73"), linewidth=0)
            bottom.set_xlabel("microseconds")
            bottom.legend(loc="upper right")
        axes[0, 0].set_ylabel("blocks that\nmultiply")
        axes[1, 0].set_ylabel("warps that\nmove tokens")
        figure.suptitle(f"{shape.name} on one of {run.size} x {torch.cuda.get_device_name() if run.on_gpu else 'CPU'}, {run.head['date']}")
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)
    run.say(f"wrote {path}")
