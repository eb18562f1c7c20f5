"""Measures plan, dispatch and combine for every shape, for epmoe and for the peers."""

import functools

from . import deep_ep_v2
from .check import experts, poisoned, rows_error, sums_error
from .measure import graphed


def jobs(run):
    return [(shape.label, functools.partial(measure, run, shape)) for shape in run.with_skews(run.shapes())]


def checked(run, layer, inputs, torch_peer):
    """Run a dispatch and a combine and check both.

    Return (output rows of the stand-in experts, row weights, layout).
    """
    x, idx, weight = inputs
    with poisoned():
        rows, row_weight, layout = layer.dispatch(x, idx, weight)
        y_rows = experts(rows, layout.expert_offsets, layer.rank * layer.num_local_experts)
        y = layer.combine(y_rows, layout, row_weight)
    layer.synchronize()
    run.agree(rows_error(rows, row_weight, torch_peer) or sums_error(y, y_rows, torch_peer))
    return y_rows, row_weight, layout


def measure(run, shape, bench="a2a", num_sm=None, peers=True):
    """Measure one shape: epmoe and, with peers, torch and DeepEP.

    num_sm: thread blocks of epmoe.  Default: the layer's default.
    """
    inputs = x, idx, weight = run.inputs(shape)
    torch_peer = run.torch_peer(shape, inputs)
    options = {"num_sm": num_sm} if num_sm else {}
    with run.layer(shape, x.dtype, **options) as layer:
        rows, row_weight, layout = checked(run, layer, inputs, torch_peer)
        wire = run.wire_bytes((layout.send_tokens, x.shape[1] * x.element_size()))
        record = functools.partial(run.record, bench, shape, num_sm=layer._num_sm)
        dispatch_over, combine_over = {}, {}
        if peers:
            dispatch_over["torch"] = run.time(layer, torch_peer.dispatch)
            combine_over["torch"] = run.time(layer, lambda: torch_peer.combine(rows))
            run.record(bench, shape, "torch dispatch", dispatch_over["torch"])
            run.record(bench, shape, "torch combine", combine_over["torch"])
        for name, module, best_of in (("DeepEP", run.deep_ep, best_deep_ep),
                                      ("V2", run.deep_ep_v2, best_deep_ep_v2)):
            best = best_of(run, layer, shape, bench, inputs, torch_peer) if peers and module else {}
            for stage, over in (("dispatch", dispatch_over), ("combine", combine_over)):
                over |= {name: best[stage]} if stage in best else {}
        if run.on_gpu:
            record("epmoe plan, in a graph", graphed(lambda: layer._plan(idx, None, 0), run.cpu_group))
        record("epmoe plan", run.time(layer, lambda: layer._plan(idx, None, 0)))
        record("epmoe plan + dispatch", run.time(layer, lambda: layer.dispatch(x, idx, weight)), wire,
               dispatch_over)
        record("epmoe cached dispatch",
               run.time(layer, lambda: layer.dispatch(x, weight=weight, layout=layout)), wire)
        record("epmoe combine", run.time(layer, lambda: layer.combine(rows, layout, row_weight)), wire,
               combine_over)
        layer.synchronize()


def best_deep_ep(run, layer, shape, bench, inputs, torch_peer, sm_counts=(24, 48)):
    """Return {stage: ms} of DeepEP's layout + dispatch + permute, and of its unpermute + combine.

    Each at its best number of SMs.  Empty if DeepEP refuses the shape.
    """
    best = {}
    for num_sm in sm_counts:
        run.bar.show(f"{bench} {shape.label}: DeepEP, {num_sm} SMs")
        peer = run.deep_ep_peer(shape, inputs, num_sm)
        if peer is None:
            continue
        peer.tune(lambda fn: run.time(layer, fn, iters=5))
        rows = experts(peer.dispatch(), peer.expert_offsets, layer.rank * layer.num_local_experts)
        run.agree(sums_error(peer.combine(rows), rows, torch_peer)
                  and "DeepEP: the sums differ from those of torch's collectives")
        for stage, fn in (("dispatch", peer.dispatch), ("combine", lambda: peer.combine(rows))):
            ms = run.time(layer, fn)
            run.record(bench, shape, f"DeepEP {stage}, {num_sm} SMs", ms, num_sm=num_sm,
                       chunk=peer.chunk[stage])
            best[stage] = min(ms, best.get(stage, ms))
    return best


def best_deep_ep_v2(run, layer, shape, bench, inputs, torch_peer):
    """Return {stage: ms} of DeepEP V2's dispatch in expand mode and of its combine, as best_deep_ep."""
    best = {}
    buffer = run.deep_ep_v2_peer(shape, inputs)
    for num_sm in deep_ep_v2.SM_COUNTS if buffer else ():
        which = f"{num_sm} SMs" if num_sm else "its own SMs"
        run.bar.show(f"{bench} {shape.label}: DeepEP V2, {which}")
        peer = run.peer("V2", shape, f" with {which}", functools.partial(buffer.with_sms, num_sm))
        if peer is None:
            continue
        first = layer.rank * layer.num_local_experts
        y_rows = experts(torch_peer.dispatch(), torch_peer.expert_offsets, first)
        weighted = peer.weighted(experts(peer.dispatch(), peer.expert_offsets, first))
        # a rounding more than epmoe's: that of the weighted rows
        run.agree(sums_error(peer.combine(weighted), y_rows, torch_peer, slack=2.0)
                  and "DeepEP V2: the sums differ from those of torch's collectives")
        for stage, fn in (("dispatch", peer.dispatch), ("combine", lambda: peer.combine(weighted))):
            ms = run.time(layer, fn)
            run.record(bench, shape, f"DeepEP V2 {stage}, {which}", ms, num_sm=num_sm)
            best[stage] = min(ms, best.get(stage, ms))
    if buffer:
        buffer.close()
    return best
