"""What the warps of the megakernels do, and when: needs a module built with the profiler (make trace).

A table of their time and its share; with --trace FILE a file a kernel for Perfetto (ui.perfetto.dev), of all ranks; and beside
the files of --trace and of --json a picture of how many are in what.
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
    run.say("columns here: time of all warps of rank 0; its share of the time of the warps that do it; spans")
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
            tell(run, shape, kernel, t.events())
    if run.rank == 0:
        write(run, shape, ranks)


def tell(run, shape, kernel, events):
    """A row a span: the time in it of this rank's warps together, in us, and its share of the whole time of the warps that have such spans."""
    for span, (num, us, share) in trace.summary(events).items():
        run.record("overlap", shape, f"{kernel}: {span}", rate=f"{us:10.1f} us {share:6.1%} {num:7} spans of {us / num:.2f} us",
                   total_us=round(us, 3), share=round(share, 4), spans=num)


def write(run, shape, ranks):
    """The files, from {kernel: events of every rank}: the trace where --trace says, the picture beside it and beside --json's file."""
    if run.options.trace:
        for kernel, events in ranks.items():
            path = Path(run.options.trace)
            trace.save(path.with_stem(f"{path.stem}_{kernel.replace(' + ', '_')}"), events)
    for path in map(Path, filter(None, (run.options.trace, run.options.json))):
        if plots.can_draw():
            draw(path.with_name(f"{path.stem}_overlap.png"), shape, {kernel: events[0] for kernel, events in ranks.items()}, run)
        else:
            run.say("no picture: matplotlib cannot be imported")


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
            bottom.legend(loc="upper left")
        axes[0, 0].set_ylabel("blocks that\nmultiply")
        axes[1, 0].set_ylabel("warps that\nmove tokens")
        figure.suptitle(f"{shape.name} on one of {run.size} x {torch.cuda.get_device_name() if run.on_gpu else 'CPU'}, {run.head['date']}")
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)
    run.say(f"wrote {path}")
