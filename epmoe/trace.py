"""Records what the warps of the fused kernels do, and when; merges all ranks into one trace for Perfetto.

Only a module built with EPMOE_TRACE=1 records anything.  The kernels of any other module have no such code.
"""

import json
import os
from collections.abc import Iterable
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from . import _C
from .a2a.fused import EpAll2AllFusedOp
from .comm.device import capabilities

SPANS = dict(enumerate(_C.SPANS, 1))
_ENTER = 1 + _C.SPANS.index("enter")
_WARPS = _C.TRACE_WARPS  # of a thread block


class Trace:
    """Records the fused operations of an EpAll2AllFusedOp inside a `with` block.

    Args:
        op: The EpAll2AllFusedOp, on a CUDA device.
        buffer: The communication buffer whose operations are recorded.
        room: The number of events that each warp can record, at least 1; further ones are left out.

    Raises:
        ValueError: For an operator on the CPU, and, at the start of the block, for a module without the
            profiler or a buffer that does not exist.

    Examples:
        On a GPU: `with Trace(op) as trace:` around calls of op; then `save(path, trace.gather())`.

        >>> import epmoe
        >>> from epmoe.trace import Trace
        >>> with epmoe.EpAll2AllFusedOp(epmoe.World(), 4, 16, 2, num_tot_experts=2, device="cpu") as op:
        ...     try:
        ...         Trace(op)
        ...     except ValueError as error:
        ...         print("needs a GPU")
        needs a GPU
    """

    def __init__(self, op: EpAll2AllFusedOp, buffer: int = 0, room: int = 512) -> None:
        if op.device.type != "cuda":
            raise ValueError(f"the profiler is in the CUDA kernels, but the operator is on {op.device}: use "
                             f"a GPU")
        blocks = capabilities(op.device).num_sms
        self.op = op
        self.buffer = buffer
        self.room = room
        self._raw = torch.zeros(blocks * _WARPS * room * 2, dtype=torch.int64, device=op.device)

    def __enter__(self) -> Self:
        _C.layer_trace(self.op._c, self.buffer, self._raw, self.room)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self.op.device)
        _C.layer_trace(self.op._c, self.buffer, None, 0)

    def events(self) -> Tensor:
        """Return this rank's events.

        Time 0 is when this rank left its first "enter", which all ranks leave within some microseconds.

        Returns:
            [num, 6] int64 on the CPU: thread block, warp, begin in ns, length in ns, span (see SPANS), and
                the rank or expert that the span was for.
        """
        raw = self._raw.view(-1, _WARPS, self.room, 2).cpu()
        block, warp, n = torch.nonzero(raw[..., 0], as_tuple=True)
        begin, rest = raw[block, warp, n].unbind(1)
        length = rest & 0xFFFFFFFF
        span = rest >> 32 & 0xFFFF
        of = rest >> 48 & 0xFFFF
        entered = span == _ENTER
        zero = (begin + length)[entered].min() if entered.any() else begin.min() if len(begin) else 0
        return torch.stack([block, warp, begin - zero, length, span, of], 1)

    def gather(self) -> list[Tensor] | None:
        """Return the events of all ranks.  Collective over torch.distributed.

        Returns:
            On rank 0 a list of each rank's events(); None on the others.
        """
        mine = self.events()
        if not dist.is_initialized():
            return [mine]
        out: list[Tensor] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, out)
        return out


def summary(events: Tensor) -> dict[str, tuple[int, float, float]]:
    """Sum up one rank's events by span.

    Args:
        events: [num, 6], as Trace.events returns them.

    Returns:
        {span: (number of events, their total time in us, their share of the time of the warps that have
            any)}.
    """
    found = {}
    whole = 1
    if len(events):
        whole = max(1, int((events[:, 2] + events[:, 3]).max()) - int(events[:, 2].min()))
    for number, name in SPANS.items():
        of = events[events[:, 4] == number]
        if len(of):
            warps = len({(int(b), int(w)) for b, w in of[:, :2].tolist()})
            spent = int(of[:, 3].sum())
            found[name] = len(of), spent / 1e3, spent / (warps * whole)
    return found


def busy(events: Tensor, spans: Iterable[str], bins: int = 400) -> tuple[Tensor, dict[str, Tensor]]:
    """Count the warps that are in each span, over time, for a plot.

    Args:
        events: [num, 6] of one rank, as Trace.events returns them.
        spans: Names of spans, values of SPANS.
        bins: The number of points in time.

    Returns:
        A tuple (times in us [bins], {span: mean number of warps in it [bins]}).  Without events all numbers
            are zero.
    """
    end = int((events[:, 2] + events[:, 3]).max()) if len(events) else bins
    edges = torch.linspace(0, end, bins + 1, dtype=torch.float32, device=events.device)
    found = {}
    for name in spans:
        number = next(n for n, text in SPANS.items() if text == name)
        of = events[events[:, 4] == number].double()
        begins = of[:, 2].clamp(min=0)
        ends = (of[:, 2] + of[:, 3]).clamp(min=0)
        # The time in spans up to each edge, summed over the spans.
        upto = torch.stack([((edge - begins).clamp(min=0) - (edge - ends).clamp(min=0)).sum()
                            for edge in edges])
        found[name] = upto.diff() / (end / bins)
    return (edges[:-1] + end / bins / 2) / 1e3, found


def _role(warp: int) -> str:
    if warp == 0:
        return "producer"
    return f"communication {warp}" if warp < 4 else f"mma {warp - 4}"


def save(path: str | os.PathLike[str], ranks: Iterable[Tensor]) -> None:
    """Write a Chrome trace, which Perfetto (ui.perfetto.dev) opens: a process per rank, a thread per warp.

    Args:
        path: The file to write.
        ranks: The events of all ranks, as Trace.gather returns them on rank 0.
    """
    out = []
    for rank, events in enumerate(ranks):
        out.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for block, warp in {(int(b), int(w)) for b, w in events[:, :2].tolist()}:
            out.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": block * _WARPS + warp,
                        "args": {"name": f"block {block} {_role(warp)}"}})
        for block, warp, begin, length, span, of in events.tolist():
            out.append({"name": SPANS.get(span, str(span)), "ph": "X", "pid": rank,
                        "tid": block * _WARPS + warp,
                        "ts": begin / 1e3, "dur": length / 1e3, "args": {"of": of}})
    with open(path, "w") as f:
        json.dump({"traceEvents": out, "displayTimeUnit": "ns"}, f)
