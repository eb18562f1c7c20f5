"""Records what the warps of the fused kernels do, and when.  Needs a build with the profiler (make trace).

Output: a table of the time in each span and its share.  With --trace FILE, one file per kernel for Perfetto
(ui.perfetto.dev), with all ranks.  Next to the files of --trace and --json, a plot of the number of warps in
each span.
"""

import functools
from pathlib import Path

import torch

from epmoe import _C, trace

from . import plots
from .layer import Layer

KERNELS = {"dispatch + gemm": ("send", "receive"), "gemm + combine": ("return", "add up")}


def jobs(run):
    if not _C.TRACE:
        run.say("skipped: overlap, because this module was built without the profiler (make trace)")
        return []
    return [(shape.name, functools.partial(measure, run, shape)) for shape in run.shapes("seed")]


@torch.no_grad()
def measure(run, shape):
    ranks = {}
    run.say("columns here: time of all warps of rank 0; share of the time of warps with such spans; spans")
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
            record_spans(run, shape, kernel, t.events())
    if run.rank == 0:
        write(run, shape, ranks)


def record_spans(run, shape, kernel, events):
    """Record a row for each span: the time of this rank's warps in it, in us, and its share.

    The share is of the whole time of the warps that have such spans.
    """
    for span, (num, us, share) in trace.summary(events).items():
        run.record("overlap", shape, f"{kernel}: {span}",
                   rate=f"{us:10.1f} us {share:6.1%} {num:7} spans of {us / num:.2f} us",
                   total_us=round(us, 3), share=round(share, 4), spans=num)


def write(run, shape, ranks):
    """Write the files, from {kernel: events of every rank}: the traces of --trace, and the plots."""
    if run.options.trace:
        for kernel, events in ranks.items():
            path = Path(run.options.trace)
            trace.save(path.with_stem(f"{path.stem}_{kernel.replace(' + ', '_')}"), events)
    for path in map(Path, filter(None, (run.options.trace, run.options.json))):
        if plots.can_draw():
            draw(path.with_name(f"{path.stem}_overlap.png"), shape,
                 {kernel: events[0] for kernel, events in ranks.items()}, run)
        else:
            run.say("skipped: the plot, because matplotlib cannot be imported")


def draw(path, shape, events, run):
    """Plot for each kernel, over time: above the MMA warps at work, below the communication warps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(2, len(events), figsize=(10, 4.2), sharex="col", sharey="row",
                                    constrained_layout=True)
        for (kernel, of), (top, bottom) in zip(events.items(), axes.T):
            times, busy = trace.busy(of, ("gemm", *KERNELS[kernel]))
            # two warps of a CTA record their tiles
            top.fill_between(times, busy["gemm"] / 2, color="#0072B2", linewidth=0)
            top.set_title(kernel)
            bottom.stackplot(times, *(busy[n] for n in KERNELS[kernel]), labels=KERNELS[kernel],
                             colors=("#E69F00", "#009E73"), linewidth=0)
            bottom.set_xlabel("microseconds")
            bottom.legend(loc="upper left")
        axes[0, 0].set_ylabel("CTAs that\nmultiply")
        axes[1, 0].set_ylabel("warps that\nmove tokens")
        figure.suptitle(f"{shape.name} on one of {run.size} x "
                        f"{torch.cuda.get_device_name() if run.on_gpu else 'CPU'}, {run.head['date']}")
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)
    run.say(f"wrote {path}")
