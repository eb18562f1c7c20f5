"""TorchRail: the ranks with the same local number on all nodes, connected by process groups of torch."""

import contextlib
import datetime

import torch
import torch.distributed as dist

from ..errors import EpError, EpTimeout, PeerDied
from ..rendezvous import SIGNS_OF_DEATH

_LOOK = datetime.timedelta(seconds=0.1)  # how often a wait looks whether the nodes have ended


class TorchRail:
    """Moves bytes and rows between the nodes.  All calls are collective over the rail, in the same order.

    Two process groups: `control` is gloo and works on the host; `data` moves the rows of GPUs, with NCCL if
    the group of all ranks has it.  Kernels of NCCL wait for other nodes and take SMs, so small messages,
    which the host needs at once, use the host.

    Freedom from deadlock on CUDA.  A row exchange is enqueued on the caller's stream, as are all operations
    of the layer.  So on each GPU the kernels of NCCL and of epmoe run one after the other, in one order,
    which is the same on all ranks.  The first operation of that order that is not complete has been launched
    everywhere, has its inputs and has the SMs for itself.  So it completes, and then the next.
    tests/models/rail.pml checks it.  On two streams, kernels of a node must leave SMs to those of NCCL.
    """

    def __init__(self, control, data, ranks):
        self.control = control
        self.data = data
        self.ranks = ranks  # of the whole group, in node order
        self.position = dist.get_rank(control)  # the number of this node
        self.size = len(ranks)
        self.has_ended = lambda: False  # whether the nodes have; Nodes sets it

    def meet(self, mine):
        """Give some bytes to all ranks of the rail and return those of every rank, in node order."""
        t = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        out = t.new_empty(self.size * t.numel())
        try:  # an all-to-all: in it every rank waits for every other one, so all see a death at once
            self._wait(dist.all_to_all_single(out, t.repeat(self.size), group=self.control, async_op=True))
        except EpError:
            raise
        except RuntimeError as error:
            raise self._error(error) from error
        return [bytes(o.tolist()) for o in out.chunk(self.size)]

    def exchange(self, out, mine, out_splits=None, splits=None):
        """Send rows of `mine` to the nodes and receive theirs in `out`, in node order.

        splits and out_splits: the rows for and of each node; None: equally many.
        """
        group = self.data if out.device.type == "cuda" else self.control
        try:
            if group is self.control:
                self._wait(dist.all_to_all_single(out, mine, out_splits, splits, group, async_op=True))
            else:
                dist.all_to_all_single(out, mine, out_splits, splits, group)
        except EpError:
            raise
        except RuntimeError as error:
            raise self._error(error) from error

    def set_timeout(self, timeout_s):
        for group in {self.control, self.data}:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)

    def _wait(self, work):
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

    def abort(self):
        """End the kernels of NCCL in which this rank waits.  Called in a thread of its own, after a death."""
        if self.data is not self.control:
            with contextlib.suppress(Exception):  # the end of the nodes is what the rank raises
                self.data.abort()

    def close(self, in_order):
        """Close the connections, so that a rank that still waits for this one raises PeerDied.

        in_order: no rank waits; only then the end of NCCL's communicator does not wait for the others.
        """
        for group in {self.control, self.data} if in_order else {self.control}:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)

    def _error(self, error):
        """Return the error of epmoe for an error of torch, by its text: its class is RuntimeError."""
        text = str(error)
        mine = self.ranks[self.position]
        others = ", ".join(str(rank) for rank in self.ranks if rank != mine)
        if any(sign in text.lower() for sign in SIGNS_OF_DEATH):
            return PeerDied(f"rank {mine}: one of the ranks {others}, with which it exchanges rows between "
                            f"nodes, died or left: {text}")
        if any(sign in text.lower() for sign in ("timed out", "timeout")):
            return EpTimeout(f"rank {mine} timed out: one of the ranks {others}, with which it exchanges "
                             f"rows between nodes, is stuck or makes another call. All ranks of all nodes "
                             f"must make the same calls in the same order, also with zero tokens: {text}")
        return EpError(f"rank {mine}: the exchange with ranks {others} of other nodes failed: {text}")
