"""LayerCalls: how EPAll2AllLayer calls the module: plan, dispatch and combine.

Each call allocates its outputs and calls the module.  Its caller reports an error to the other ranks
(refusals.py).  ops.py makes operators of them, for autograd and torch.compile.

A dispatch takes the number of its rows, or -1 if only the plan has it.  The GPU has nothing to do from the
moment when the plan has the number until the launch of the dispatch.  So the host allocates the outputs and
prepares the launch before that moment.  The outputs have room for the most rows of recent calls and some
more.  A call with few tokens must not take the memory of a call with many tokens.  So each power of two of
the number of tokens has a room of its own (_rooms).

A training step keeps its outputs until the backward, so there the room must fit.  Calls that have weights
(those of EPMoE in 16 bits) have rooms of their own for each address of the weights.  Outputs with much more
room than rows are not used: the host then allocates when it knows the number.
"""

import torch

from .. import _C
from ..torch_modes import is_watched
from . import ops
from .layout import EPLayout

ANY_ROOM = 0xffffffff  # awaits_rows of protocol/ops.h: the outputs may have any number of rows too many
MOST_ROOMS = 1024  # of a layer: addresses of weights may change from step to step
NO_ROOM = -1  # in the place of a room for which there was no memory: it is not tried again


def room_after(room, num_rows, is_kept=False, too_large=False):
    """Return the rows to make room for in the next call, after a call that had room and got num_rows.

    It goes up at once, and down slowly, because the modules of a model may share a layer.  is_kept: outputs
    are kept for a backward.  too_large: the room goes down at once.
    """
    wanted = num_rows + num_rows // (32 if is_kept else 16)
    return wanted if too_large else max(wanted, room - (room - wanted) // 32)


class LayerCalls:
    """The private half of EPAll2AllLayer that calls the module."""

    def _empty(self, *sizes, dtype=None):
        """Return an uninitialised tensor of one or two dimensions, of the layer's dtype or another."""
        return self._allocate(sizes, (*sizes[1:], 1), dtype or self.dtype)

    def _plan(self, exp_indices, scatter, buffer):
        try:
            has_tokens = isinstance(exp_indices, torch.Tensor) and exp_indices.dim()
            num_tokens = min(exp_indices.size(0), self.max_tokens) if has_tokens else 0
            plan = self._empty(self._plan_words(num_tokens), dtype=torch.int32)
        except Exception as error:
            self._refuse(_C.OP_PLAN, error, buffer)
        _C.layer_plan(self._c, buffer, (exp_indices, scatter, plan, self.token_sorting))
        return plan

    def _plan_words(self, num_tokens):
        """Return the length of a plan, as ep_plan_layout computes it.

        num_tokens may be a tracer's symbol.
        """
        words_of_tokens = (num_tokens + 3) // 4 * 4 * (3 * self.topk + 2 * self.world_size)
        return self._plan_front["num_words"] + words_of_tokens

    def _num_rows(self, plan, buffer):
        return _C.layer_num_rows(self._c, buffer, plan)

    def _make_layout(self, exp_indices, scatter, buffer):
        """Launch a plan.  Its layout does not have the number of rows yet: see _read_rows."""
        self._check_mode(buffer, exp_indices)
        if is_watched():
            plan = ops.plan(self, exp_indices, scatter, buffer)
        else:
            plan = self._plan(exp_indices, scatter, buffer)
        return EPLayout(self, plan, exp_indices.shape[0], buffer)

    def _read_rows(self, layout):
        """Wait until the plan of a layout has the number of rows.  Returns the layout, which knows it then.

        Raises the plan's error.  With a capacity, and where a compiler traces, only the device learns the
        number, and this does nothing.
        """
        if layout._num_rows is not None or self.capacity is not None or is_watched():
            return layout
        if self.host_counts:
            layout._expert_rows = _C.layer_expert_rows(self._c, layout.buffer, layout.plan)
            layout._num_rows = sum(layout._expert_rows)
        else:
            layout._num_rows = self._num_rows(layout.plan, layout.buffer)
        return layout

    def _set_dispatched(self, layout, rows, recv):
        """Give a layout what its dispatch has returned: the received rows, and recv."""
        layout.recv = recv
        if self.capacity is None and not is_watched():
            layout._num_rows = rows.shape[0]

    def _run_dispatch(self, call, num_rows, make, launch, kept_for=None):
        """Run a dispatch.  Returns its outputs.

        call: the plan, the buffer and the number of tokens.  make(n): returns the outputs, a
        list of tensors with n rows, and a list of other tensors.  launch(outputs, others, awaits_rows): calls
        the module, and returns what it returns.  kept_for: None, or the address of the weights for whose
        backward the outputs are kept.
        """
        plan, buffer, _ = call
        if num_rows < 0:
            made = self._run_ahead(call, make, launch, kept_for)
            if made is not None:
                return made
        if num_rows < 0:
            num_rows = self._num_rows(plan, buffer)
        made = make(num_rows)
        launch(*made, 0)
        return made

    def _run_ahead(self, call, make, launch, kept_for):
        """Prepare a dispatch before the number of rows is known.  Returns its outputs.

        Returns None, and launches nothing, if there are more rows than room, or no memory for the room, or if
        the outputs are kept and more than an eighth of them would have no rows.
        """
        plan, buffer, num_tokens = call
        key = num_tokens.bit_length(), kept_for  # in _rooms: the number of rows to make room for
        room = self._rooms.get(key, 0)
        if room == NO_ROOM:
            return None
        try:
            made = make(room)
        except Exception:  # no memory for so many rows, but perhaps for as many as are needed
            self._rooms[key] = NO_ROOM  # torch frees all memory that it caches before it gives up
            return None
        is_kept = kept_for is not None
        awaits_rows = 1 + room // 8 if is_kept else ANY_ROOM
        num_rows, is_launched, _ = launch(*made, awaits_rows)
        too_large = room - num_rows >= awaits_rows
        if len(self._rooms) >= MOST_ROOMS and key not in self._rooms:
            self._rooms.clear()
        self._rooms[key] = room_after(room, num_rows, is_kept, too_large)
        if not is_launched:
            return None
        for t in made[0] if num_rows < room else ():
            if t is not None:
                t.resize_(num_rows, *t.shape[1:])
        return made

    def _dispatch(self, x, weight, plan, buffer, num_rows, with_grad=False, kept_for=0):
        """kept_for: with_grad, as for _run_dispatch; 0 if there are no weights."""
        def make(n):
            row_weight = None if weight is None else self._empty(n, dtype=torch.float32)
            recv = self._empty(self._recv_words, dtype=torch.int32)
            return [self._empty(n, self.hidden), row_weight], [recv]

        def launch(outputs, others, awaits_rows):
            return _C.layer_dispatch(self._c, buffer, (x, weight, plan, *outputs, *others, with_grad,
                                                       awaits_rows))

        call = plan, buffer, x.shape[0]
        (rows, row_weight), (recv,) = self._run_dispatch(call, num_rows, make, launch,
                                                         kept_for if with_grad else None)
        return rows, row_weight, recv

    def _combine(self, rows, row_weight, row_scalar, plan, recv, buffer, num_tokens, with_grad=False,
                 biases=(None, None), by_choice=False):
        """biases, by_choice: see EP_ARGS_combine of csrc/protocol/ops.h."""
        out = self._empty(num_tokens, self.hidden)
        out_scalar = None
        if row_scalar is not None:
            out_scalar = self._empty(num_tokens, self.topk, dtype=torch.float32)
        _C.layer_combine(self._c, buffer, (rows, row_weight, row_scalar, *biases, plan, recv, out, out_scalar,
                                           with_grad, by_choice))
        return out, out_scalar
