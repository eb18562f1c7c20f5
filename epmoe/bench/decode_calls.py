"""What decode.py measures: the calls of a LowLatencyAll2All and a layer over it, with the checks of both."""

import functools

import torch

import epmoe
from epmoe import reference
from epmoe.bench.check import experts, poisoned, sums_error
from epmoe.bench.layer import torch_linear
from epmoe.bench.torch_nccl import TorchAllToAll

HALVES = 8  # calls that are under way at once where halves are measured, each on its own buffer
GROUP = 128  # numbers that share a scale


def arrived(rows, counts):
    """Return the rows [M, ..] that arrived, in the order of experts, from either layout.

    counts: [L], the rows of each expert.
    """
    if rows.dim() == 2:
        return rows[:int(counts.sum())]
    return rows[torch.arange(rows.shape[1], device=rows.device) < counts[:, None]]


class Decode:
    """A LowLatencyAll2All, its inputs, and the peer that says what is right."""

    def __init__(self, run, shape):
        self.run, self.shape = run, shape
        x, idx, weight = run.inputs(shape)
        self.inputs = x.bfloat16(), idx, weight
        self.layer = epmoe.LowLatencyAll2All(
            run.world, shape.tokens, shape.hidden, shape.topk, shape.experts, dtype=torch.bfloat16,
            device=run.device, num_buffers=HALVES, num_sm=run.num_sm)
        self.torch_peer = run.torch_peer(shape, self.inputs)
        self.torch_peer.dispatch()  # now it can combine
        self.kinds = {"": False} if shape.hidden % GROUP else {"": False, " fp8": True}
        if shape.hidden % GROUP:
            run.say(f"left out: fp8, because H is {shape.hidden} and not a multiple of {GROUP}")

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.layer.synchronize()
            self.layer.finalize()

    def experts(self, rows):
        """Return the output of the stand-in experts for rows of the masked layout."""
        num = len(rows)
        each = experts(rows.flatten(1), torch.arange(num + 1, device=rows.device), self.layer.rank * num)
        return each.view_as(rows)

    def sums_error(self, y):
        return sums_error(y, self.y_rows, self.torch_peer)

    def check(self):
        """Check every way to call: rows and scales bit by bit, sums within their bound.

        Afterwards y has the experts' rows in the masked layout, and handle is of its dispatch.
        """
        for layout in ("masked", "compact"):
            for fp8 in self.kinds.values():
                with poisoned():
                    whole = self.layer.dispatch(*self.inputs, fp8=fp8, layout=layout)
                    sent = self.layer.dispatch_send(*self.inputs, fp8=fp8, layout=layout, buffer=1).recv()
                for rows, scales, counts, _ in (whole, sent):
                    self.run.agree(self.rows_error(rows, scales, counts, fp8))
        with poisoned():
            rows, _, counts, self.handle = self.layer.dispatch(*self.inputs)
            self.y = self.experts(rows)
            self.y_rows = arrived(self.y, counts)
            sums = self.layer.combine(self.y, self.handle)
            again = self.layer.combine_send(self.y, self.handle).recv()
            of_fp8 = self.layer.combine(self.y, self.handle, fp8=True) if len(self.kinds) > 1 else sums
        self.layer.synchronize()
        self.run.agree(self.sums_error(sums) or self.sums_error(again))
        wrong = not (of_fp8.float() - sums.float()).norm() <= 0.05 * sums.float().norm()
        self.run.agree("combine: the sums in FP8 differ from those in bfloat16" if wrong else "")

    def rows_error(self, rows, scales, counts, fp8):
        """Return what is wrong with dispatched rows and scales, or ""."""
        self.layer.synchronize()
        x, idx, weight = self.inputs
        wanted, got = [x], [rows]
        if fp8:
            q, lines = reference.quantize_fp8(x)
            wanted = [q.view(torch.uint8), lines]
            got = [rows.view(torch.uint8), scales]
        for what, sent, have in zip(("rows", "scales"), wanted, got):
            want = TorchAllToAll(sent, idx, weight, self.shape.experts, self.run.size).dispatch()
            if not torch.equal(arrived(have, counts), want):
                return f"dispatch: {what} differ from those of torch's collectives"
        return ""

    def calls(self):
        """Return {name: function to time} of the calls in one piece."""
        found = {f"dispatch{name}": functools.partial(self.layer.dispatch, *self.inputs, fp8=fp8)
                 for name, fp8 in self.kinds.items()}
        found["combine"] = lambda: self.layer.combine(self.y, self.handle)
        if len(self.kinds) > 1:
            found["combine fp8"] = lambda: self.layer.combine(self.y, self.handle, fp8=True)

        def pair(fp8):
            *_, handle = self.layer.dispatch(*self.inputs, fp8=fp8)
            return self.layer.combine(self.y, handle)

        return found | {f"pair{name}": functools.partial(pair, fp8) for name, fp8 in self.kinds.items()}

    def sends(self):
        """Return {name: function of a buffer that sends a call and returns it}."""
        handles = [self.layer.dispatch(*self.inputs, buffer=b)[3] for b in range(HALVES)]
        found = {f"dispatch{name}": functools.partial(self._dispatch_send, fp8)
                 for name, fp8 in self.kinds.items()}
        return found | {"combine": lambda buffer: self.layer.combine_send(self.y, handles[buffer])}

    def _dispatch_send(self, fp8, buffer):
        return self.layer.dispatch_send(*self.inputs, fp8=fp8, buffer=buffer)


class DecodeLayer:
    """The experts of a layer between a dispatch and a combine: two grouped GEMMs on compact rows."""

    def __init__(self, run, shape, of):
        self.run, self.of, num = run, of, of.layer.num_local_experts
        g = torch.Generator(run.device).manual_seed(3000 + run.rank)

        def random(*size):
            values = torch.empty(size, dtype=torch.bfloat16, device=run.device)
            return values.normal_(0, size[-1]**-0.5, generator=g)

        self.gate_up = random(num, 2 * shape.inner, shape.hidden)
        self.down = random(num, shape.hidden, shape.inner)
        self.offsets = torch.zeros(num + 1, dtype=torch.int32, device=run.device)

    def __call__(self):
        rows, _, counts, handle = self.of.layer.dispatch(*self.of.inputs, layout="compact")
        torch.cumsum(counts, 0, dtype=torch.int32, out=self.offsets[1:])
        return self.of.layer.combine(self.experts(rows, self.offsets), handle)

    def experts(self, rows, offsets):
        h = epmoe.grouped_gemm(rows, self.gate_up, offsets=offsets, activation="swiglu")
        return epmoe.grouped_gemm(h, self.down, offsets=offsets)

    def check(self):
        y, peer = self(), self.of.torch_peer
        rows = peer.dispatch()
        # a GEMM may round a row differently when it runs again
        self.run.agree(sums_error(y, self.experts(rows, peer.expert_offsets), peer, slack=2.0))

    def gemms(self):
        """Return {name: function to time} of the two GEMMs on the rows that arrive, epmoe's and torch's."""
        rows = self.of.torch_peer.dispatch()
        offsets = self.of.torch_peer.expert_offsets
        inner = epmoe.grouped_gemm(rows, self.gate_up, offsets=offsets, activation="swiglu")
        return {"GEMMs alone": lambda: self.experts(rows, offsets),
                "torch GEMMs alone": lambda: (torch_linear(rows, self.gate_up, offsets),
                                              torch_linear(inner, self.down, offsets))}
