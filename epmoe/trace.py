"""What the megakernels' warps did, and when: recorded on the device, merged into one trace that Perfetto opens.

Only a module built with EPMOE_TRACE=1 records anything; the kernels of any other have no trace of it.
"""

import json

import torch
import torch.distributed as dist

from . import _C

SPANS = {1: "enter", 2: "send", 3: "receive", 4: "wait for rows", 5: "gemm", 6: "return", 7: "add up"}
_WARPS = 12  # of a thread block


class Trace:
    """Records the fused operations on a buffer of an EpAll2AllFusedOp while it is entered.

    Args:
        op: the EpAll2AllFusedOp.
        buffer: its communication buffer.
        room: events that a warp can note; more are left out.

    with Trace(op) as trace: ...; then save(path, trace.gather()), summary(trace.events()).
    Raises ValueError where the module was built without the profiler.
    """

    def __init__(self, op, buffer=0, room=512):
        if op.device.type != "cuda":
            raise ValueError("the profiler is in the kernels; this operator is on the CPU")
        blocks = torch.cuda.get_device_properties(op.device).multi_processor_count
        self.op, self.buffer, self.room = op, buffer, room
        self._raw = torch.zeros(blocks * _WARPS * room * 2, dtype=torch.int64, device=op.device)

    def __enter__(self):
        _C.layer_trace(self.op._c, self.buffer, self._raw, self.room)
        return self

    def __exit__(self, *_):
        torch.cuda.synchronize(self.op.device)
        _C.layer_trace(self.op._c, self.buffer, None, 0)

    def events(self):
        """[num, 6] int64 of this rank: block, warp, begin and length in ns, span (see SPANS), and the rank or expert it was for.
        Time begins where this rank left the first enter, which all ranks leave within some microseconds."""
        raw = self._raw.view(-1, _WARPS, self.room, 2).cpu()
        block, warp, n = torch.nonzero(raw[..., 0], as_tuple=True)
        begin, rest = raw[block, warp, n].unbind(1)
        length, what, of = rest & 0xFFFFFFFF, rest >> 32 & 0xFFFF, rest >> 48 & 0xFFFF
        entered = what == 1
        zero = (begin + length)[entered].min() if entered.any() else begin.min() if len(begin) else 0
        return torch.stack([block, warp, begin - zero, length, what, of], 1)

    def gather(self):
        """events() of every rank, on rank 0; None on the others.  Collective over torch.distributed."""
        mine = self.events()
        if not dist.is_initialized():
            return [mine]
        out = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, out)
        return out


def summary(events):
    """{span: (how many, their us in all, share of the time of the warps that have such spans)} of one rank's events."""
    found, all_of_it = {}, max(1, int((events[:, 2] + events[:, 3]).max()) - int(events[:, 2].min())) if len(events) else 1
    for what, name in SPANS.items():
        of = events[events[:, 4] == what]
        if len(of):
            warps = len({(int(b), int(w)) for b, w in of[:, :2].tolist()})
            spent = int(of[:, 3].sum())
            found[name] = len(of), spent / 1e3, spent / (warps * all_of_it)
    return found


def busy(events, spans, bins=400):
    """(times in us, {span: how many warps are in it at that time}) of one rank's events, for a plot."""
    end = int((events[:, 2] + events[:, 3]).max())
    edges = torch.linspace(0, end, bins + 1)
    found = {}
    for name in spans:
        what = next(w for w, n in SPANS.items() if n == name)
        of = events[events[:, 4] == what].double()
        begins, ends = of[:, 2].clamp(min=0), (of[:, 2] + of[:, 3]).clamp(min=0)
        # Time in spans up to each edge: the sum over spans of how far each has come.
        upto = torch.stack([((edge - begins).clamp(min=0) - (edge - ends).clamp(min=0)).sum() for edge in edges])
        found[name] = upto.diff() / (end / bins)
    return (edges[:-1] + end / bins / 2) / 1e3, found


def save(path, ranks):
    """Write the events of all ranks (of Trace.gather) as a Chrome trace: a process a rank, a thread a warp of a block."""
    out = []
    for rank, events in enumerate(ranks):
        out.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for block, warp in {(int(b), int(w)) for b, w in events[:, :2].tolist()}:
            role = "loader" if warp == 0 else f"mover {warp}" if warp < 4 else f"multiplier {warp - 4}"
            out.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": block * _WARPS + warp, "args": {"name": f"block {block} {role}"}})
        for block, warp, begin, length, what, of in events.tolist():
            name = SPANS.get(what, str(what))
            out.append({"name": name, "ph": "X", "pid": rank, "tid": block * _WARPS + warp, "ts": begin / 1e3, "dur": length / 1e3, "args": {"of": of}})
    with open(path, "w") as f:
        json.dump({"traceEvents": out, "displayTimeUnit": "ns"}, f)
