"""TorchRail: the ranks with the same local number on all nodes, connected by process groups of torch."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import EpError, EpTimeout, PeerDied
from .rendezvous import SIGNS_OF_DEATH, environment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

RAIL_CTAS = 8  # the most CTAs of NCCL for the rows between nodes
RESERVE_SMS = RAIL_CTAS + 8  # SMs that are left to them: CTAs of fused kernels come in pairs of neighbours
_LOOK = datetime.timedelta(seconds=0.1)  # how often a wait looks whether the nodes have ended
_SPIN_S = 2e-4  # a read is usually short; after this time it sleeps between its looks
# By default torch's watchdog ends the process when a peer of NCCL has died or a wait has timed out.  Here the
# nodes name the dead rank and abort NCCL.  torch reads these when a process group is made.
_NCCL_LEAVES_ERRORS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_PROPAGATE_ERROR": "0",
                       "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}


def new_group(name: str, ranks: list[int], backend: str, timeout_s: float,
              options: Any = None) -> ProcessGroup:
    """Create a process group of ranks of the default group, of which this is one.  Collective over them.

    dist.new_group makes the name of a group of the number of groups that the process has.  Ranks whose
    numbers differ, for example after an error that only some have seen, would wait for each other in vain.

    name: the same on all these ranks, and of no other group in the life of the default group.
    """
    # Private: torch has no public name for a group with a name, nor to enter its ranks for recv and others.
    c10d: Any = dist.distributed_c10d
    default: Any = dist.group.WORLD
    timeout = datetime.timedelta(seconds=timeout_s)
    if options is not None:
        options._timeout = timeout  # torch warns where it has to set it
    group, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(dist.get_rank()), ranks, dist.Backend(backend),
        default.get_group_store(), name, backend_options=options, timeout=timeout, group_desc=name)
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


@contextlib.contextmanager
def named(mine: int, others: Iterable[int]) -> Iterator[None]:
    """Make errors of epmoe of errors of torch."""
    try:
        yield
    except EpError:
        raise
    except RuntimeError as error:
        raise _error(error, mine, ", ".join(map(str, others))) from error


def is_open(group: ProcessGroup) -> bool:
    """Whether torch.distributed still has a process group: nobody has destroyed it."""
    try:
        dist.get_backend(group)
    except (TypeError, ValueError):  # versions of torch differ
        return False
    return True


class TorchRail:
    """Moves bytes and rows between the nodes.  All calls are collective over the rail, in the same order.

    Two process groups: `control` is gloo and works on the host; `data` moves the rows, with NCCL if the group
    of all ranks has it, else with gloo.  Kernels of NCCL wait for other nodes and take SMs, so small
    messages, which the host needs at once, use the host.

    Freedom from deadlock on CUDA.  A row exchange is enqueued on the caller's stream, as are all operations
    of the layer.  So on each GPU the kernels of NCCL and of epmoe run one after the other, in one order,
    which is the same on all ranks.  The first operation of that order that is not complete has been launched
    everywhere, has its inputs and has the SMs for itself.  So it completes, and then the next.  Exchanges
    that are started (pipeline.py) run on a stream of NCCL: then the kernels of the node leave RESERVE_SMS
    SMs to those of NCCL, so that the next kernel of each stream can start.  tests/models/rail.pml checks
    both.
    """

    @classmethod
    def create(cls, group: ProcessGroup, ranks: list[int], on_rail: list[int], name: str,
               timeout_s: float) -> Self:
        """Create the process groups.  Collective over the rail.

        group: the ProcessGroup of all ranks; ranks: their numbers in the job; on_rail: the numbers in `group`
        of this rail's ranks, in node order; name: of this rail, and of no other in the life of the job.
        """
        members = [ranks[r] for r in on_rail]
        control = new_group(f"epmoe rail {name}", members, "gloo", timeout_s)
        # Rows have a group of their own, so that a meeting does not queue behind rows that are under way.
        if "nccl" in dist.get_backend(group):
            of_nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            of_nccl.config.max_ctas = RAIL_CTAS
            with environment(_NCCL_LEAVES_ERRORS):
                data = new_group(f"epmoe rows {name}", members, "nccl", timeout_s, of_nccl)
        else:
            data = new_group(f"epmoe rows {name}", members, "gloo", timeout_s)
        return cls(control, data, on_rail, timeout_s)

    def __init__(self, control: ProcessGroup, data: ProcessGroup, ranks: list[int], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.control = control
        self.data = data
        self.is_nccl = dist.get_backend(data) == "nccl"
        self.ranks = ranks  # of the whole group, in node order
        self.position = dist.get_rank(control)  # the number of this node
        self.size = len(ranks)
        self.has_ended = lambda: False  # whether the nodes have; Nodes sets it
        self._is_in_graphs = False  # whether a CUDA graph has captured an exchange of rows

    def meet(self, mine: bytes) -> list[bytes]:
        """Give some bytes to all ranks of the rail and return those of every rank, in node order."""
        t = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        out = t.new_empty(self.size * t.numel())
        with self._named():  # an all-to-all: every rank waits for every other one, so all see a death at once
            self._wait(dist.all_to_all_single(out, t.repeat(self.size), group=self.control, async_op=True))
        return [bytes(o.tolist()) for o in out.chunk(self.size)]

    def exchange(self, out: Tensor, mine: Tensor, out_splits: list[int] | None = None,
                 splits: list[int] | None = None) -> None:
        """Send rows of `mine` to the nodes and receive theirs in `out`, in node order.

        splits and out_splits: the rows for and of each node; None: equally many.
        """
        if self.is_nccl and out.device.type == "cuda":
            self._is_in_graphs |= torch.cuda.is_current_stream_capturing()
            with self._named():
                dist.all_to_all_single(out, mine, out_splits, splits, self.data)
        else:
            self.start(out, mine, out_splits, splits)()

    def start(self, out: Tensor, mine: Tensor, out_splits: list[int] | None = None,
              splits: list[int] | None = None) -> Callable[[], None]:
        """Start an exchange, and return a function that waits for it: the host, or with NCCL the stream.

        Several may be under way.  All ranks start them in the same order.
        """
        group = self.control if self.is_nccl and out.device.type == "cpu" else self.data
        with self._named():
            work = dist.all_to_all_single(out, mine, out_splits, splits, group, async_op=True)

        # The tensors live as long as the exchange.
        def finish(kept: tuple[Tensor, Tensor] = (out, mine)) -> None:
            with self._named():
                if self.is_nccl and group is self.data:
                    work.wait()
                else:
                    self._wait(work)

        return finish

    def _named(self) -> AbstractContextManager[None]:
        """Make errors of epmoe of errors of torch."""
        mine = self.ranks[self.position]
        return named(mine, [rank for rank in self.ranks if rank != mine])

    def read(self, t: Tensor) -> Any:
        """Return the numbers of a tensor as lists.

        The host looks again and again, and does not wait inside of CUDA: a kernel of NCCL before it in the
        stream may wait for a dead rank, and ends only when it is aborted.
        """
        if t.device.type == "cpu":
            return t.tolist()
        with self._named():
            host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
            host.copy_(t, non_blocking=True)
            self.wait_for(torch.cuda.current_stream(t.device).record_event())
        return host.tolist()

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until a CUDA event has happened, at most until the nodes have ended."""
        with self._named():
            begin = time.monotonic()
            while not event.query():
                waited_s = time.monotonic() - begin
                if self.has_ended():
                    raise PeerDied(f"rank {self.ranks[self.position]}: the nodes have ended")
                if waited_s > self.timeout_s:
                    raise RuntimeError(f"timed out after {self.timeout_s:g} s")
                if waited_s > _SPIN_S:
                    time.sleep(_SPIN_S / 4)

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        for group in (self.control, self.data):
            with contextlib.suppress(RuntimeError):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL torch 2.11 cannot
                group.set_timeout(datetime.timedelta(seconds=timeout_s))

    def _wait(self, work: dist.Work) -> None:
        """Wait for work of gloo, at most until the nodes have ended: gloo cannot abort it."""
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises its error, if it has one
                    return
                if self.has_ended():
                    raise PeerDied(f"rank {self.ranks[self.position]}: the nodes have ended") from None

    def abort(self) -> None:
        """End the kernels of NCCL in which this rank waits.  Called in a thread of its own, after a death."""
        if self.is_nccl:
            with contextlib.suppress(Exception):  # the end of the nodes is what the rank raises
                self.data.abort()

    def close(self, in_order: bool) -> None:
        """Close the connections, so that a rank that still waits for this one raises PeerDied.

        in_order: no rank waits; only then the end of NCCL's communicator does not wait for the others.

        A communicator of NCCL also waits, without a limit, for the end of all CUDA graphs that captured it.
        So one that is in graphs stays until the process ends its default group.
        """
        ends_rows = not self.is_nccl or in_order and not self._is_in_graphs
        for group in (self.control, self.data) if ends_rows else (self.control,):
            if is_open(group):
                dist.destroy_process_group(group)


def _error(error: RuntimeError, mine: int, others: str) -> EpError:
    """Return the error of epmoe for an error of torch, by its text: its class is RuntimeError."""
    text = str(error)
    if any(sign in text.lower() for sign in SIGNS_OF_DEATH):
        return PeerDied(f"rank {mine}: one of the ranks {others}, with which it exchanges rows between "
                        f"nodes, died or left: {text}")
    if any(sign in text.lower() for sign in ("timed out", "timeout")):
        return EpTimeout(f"rank {mine} timed out: one of the ranks {others}, with which it exchanges "
                         f"rows between nodes, is stuck or makes another call. All ranks of all nodes "
                         f"must make the same calls in the same order, also with zero tokens: {text}")
    return EpError(f"rank {mine}: the exchange with ranks {others} of other nodes failed: {text}")
