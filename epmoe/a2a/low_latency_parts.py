"""What LowLatencyAll2All is made of: its handles, and how the arguments of the module are prepared."""

import contextlib
import math
import weakref

import torch
from torch import Tensor

from .. import _C
from ..torch_modes import check_mode, is_plain, mark_written
from .layer_parts import LayerParts, cast

FP8 = {False: 0, True: 1, "pow2": 2, "ue8m0": 3}  # EpLlFp8
LAYOUTS = {"masked": True, "compact": False}
GROUP = 128  # numbers that share a scale
SEND, RECEIVE, BOTH = 1, 2, 3  # EpLlParts


def strides_of(shape):
    """Return the strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))


class LowLatencyHandle:
    """What a dispatch keeps for its combine.  LowLatencyAll2All.dispatch returns it.

    Attributes:
        num_tokens: T of this rank.
        layout: "masked" or "compact".
        buffer: The communication buffer.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a, torch.no_grad():
        ...     x = torch.ones(3, 16, dtype=torch.bfloat16)
        ...     *_, handle = a2a.dispatch(x, torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
        >>> handle.num_tokens, handle.layout
        (3, 'masked')
    """

    __slots__ = ("_owner", "_key", "_outputs", "_written", "num_tokens", "layout", "buffer")

    def __init__(self, owner, key, outputs):
        self._owner = owner
        self._key = key  # (fp8, layout)
        self._outputs = outputs  # the module's arguments from the handle's words on
        # The tensors among them, which a dispatch writes.  The user has these, or views of them.
        self._written = outputs[:4] if outputs[2] is not None else (outputs[0], outputs[1], outputs[3])
        self.layout = key[1]

    def _drop_rows(self):
        """Keep only what combine reads, so that the owner of the rows can free them.  Not for out= again."""
        self._outputs, self._written = self._outputs[:1], ()

    @property
    def expert_offsets(self):
        """[L + 1] int32 on the device: the first row of each local expert, for epmoe.grouped_gemm.

        Only of the layout "compact".

        Raises:
            ValueError: For the layout "masked".

        Examples:
            >>> import epmoe
            >>> import torch
            >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a:
            ...     x = torch.ones(3, 16, dtype=torch.bfloat16)
            ...     *_, handle = a2a.dispatch(x, torch.tensor([[1], [0], [1]]), layout="compact")
            >>> handle.expert_offsets.tolist()
            [0, 1, 3]
        """
        if self.layout != "compact":
            raise ValueError("expert_offsets are of the layout compact, but this handle is masked: use "
                             "recv_counts")
        return self._outputs[0].narrow(0, self._owner._offsets_at, self._owner.num_local_experts + 1)


class PendingCall:
    """A dispatch or combine whose rows have been sent.  dispatch_send and combine_send return it.

    Until recv, do not change the tensors that were passed: this rank's own rows are read from them by recv.
    If the PendingCall is lost, the next call on its buffer receives, and drops what it has received.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a, torch.no_grad():
        ...     x = torch.ones(3, 16, dtype=torch.bfloat16)
        ...     pending = a2a.dispatch_send(x, torch.tensor([[1], [0], [1]]), torch.ones(3, 1))
        ...     # other work of this rank goes here
        ...     rows, scales, counts, handle = pending.recv()
        >>> counts.tolist()
        [1, 2]
    """

    def __init__(self, owner, buffer, call, arguments, result, written):
        self._owner, self._buffer = owner, buffer
        self._call, self._arguments, self._result = call, arguments, result
        self._written = written  # tensors that the user had before the call

    def recv(self):
        """Receive, in stream order.  Collective.

        Returns:
            What the call without halves returns.

        Raises:
            RuntimeError: On this rank, for a second recv.
            EpError: As the call without halves.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> with epmoe.LowLatencyAll2All(epmoe.World(), 4, 16, 1, 2, device="cpu") as a2a:
            ...     x = torch.ones(1, 16, dtype=torch.bfloat16)
            ...     rows, _, _, handle = a2a.dispatch(x, torch.tensor([[1]]), torch.full((1, 1), 0.5))
            ...     y = a2a.combine_send(rows, handle).recv()
            >>> y[0, 0].item()
            0.5
        """
        under_way = self._owner._pending[self._buffer]
        if under_way is None or under_way.pending() is not self:
            raise RuntimeError("this call has been received already: keep what the first recv returned")
        self._owner._pending[self._buffer] = None
        mark_written(self._written)
        self._call(self._owner._c, self._buffer, (*self._arguments, RECEIVE))
        return self._result


class _UnderWay:
    """A call whose rows have been sent.  Its owner keeps it: the caller may lose the PendingCall."""

    __slots__ = ("pending", "call", "arguments")

    def __init__(self, pending):
        self.pending = weakref.ref(pending)
        self.call, self.arguments = pending._call, pending._arguments


class LowLatencyParts(LayerParts):
    """The private half of LowLatencyAll2All."""

    # A call must cost its host few microseconds.  So only what the module cannot check is checked here.  The
    # module checks the tensors, and tells the other ranks what is wrong.

    def _check_idle(self, op, buffer):
        if type(buffer) is not int or not 0 <= buffer < self._num_buffers:
            self._check_buffer(op, buffer)
        under_way = self._pending[buffer]
        if under_way is not None and under_way.pending() is None:
            # Nobody can receive it any more.  The peers have received, or do it here, too: so receive now.
            self._pending[buffer] = None
            with contextlib.suppress(Exception):  # an error of that call; one that ends the world comes again
                under_way.call(self._c, buffer, (*under_way.arguments, RECEIVE))
        elif under_way is not None:
            raise RuntimeError(f"a call is under way on buffer {buffer}: call recv() on what its send "
                               f"returned, or use another buffer")

    @staticmethod
    def _check_gradients(*tensors):
        if any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
            raise RuntimeError("LowLatencyAll2All has no gradients: call it under torch.no_grad(), or use "
                               "EPAll2AllLayer")

    def _prepare_dispatch(self, x, topk_idx, topk_weights, fp8, layout, buffer, out):
        """Return the arguments of the module without the last, and the result."""
        self._check_idle(_C.OP_LL_DISPATCH, buffer)
        try:
            if torch.is_grad_enabled():
                self._check_gradients(x, topk_weights, *(out[:3] if type(out) is tuple else ()))
            if not is_plain():
                check_mode(x, topk_weights, *(out[:3] if type(out) is tuple else ()))
            if out is None:
                out = self._make_result(fp8, layout)
                handle = out[3]
            else:
                handle = self._check_result(out, fp8, layout)
                mark_written(handle._written)
            shape = x.shape if isinstance(x, Tensor) else ()
            handle.num_tokens = shape[0] if shape else 0
            handle.buffer = buffer
            if isinstance(topk_weights, Tensor) and topk_weights.dtype is not torch.float32:
                topk_weights = cast(topk_weights, torch.float32)
        except Exception as error:
            self._refuse(_C.OP_LL_DISPATCH, error, buffer)
        return (x, topk_idx, topk_weights, *handle._outputs), out

    def _make_result(self, fp8, layout):
        """Return the result of a dispatch that is to be run."""
        make = self._outputs.get((fp8, layout)) or self._add_outputs(fp8, layout)
        rows, raw, lines, scales = make()
        words = self._allocate((self._handle_words,), (1,), torch.int32)
        counts = self._allocate((self.num_local_experts,), (1,), torch.int32)
        handle = LowLatencyHandle(self, (fp8, layout), (words, raw, lines, counts, LAYOUTS[layout], FP8[fp8]))
        return rows, scales, counts, handle

    def _check_result(self, out, fp8, layout):
        """Return the handle of out, which must be the result of an earlier dispatch of this kind."""
        if type(out) is not tuple or len(out) != 4:
            raise TypeError(f"out: wanted the tuple that a dispatch returned, got {type(out).__name__}")
        handle = out[3]
        if type(handle) is not LowLatencyHandle or handle._owner is not self:
            self._check_handle(handle)
        if any(self._pending):
            words = handle._outputs[0]
            if any(a is words for one in self._pending if one and one.pending() for a in one.arguments):
                raise RuntimeError("out: a call that uses its handle is under way: call recv() first")
        if handle._key != (fp8, layout):
            raise ValueError(f"out is of a dispatch with fp8={handle._key[0]!r} and layout="
                             f"{handle.layout!r}, but this one has fp8={fp8!r} and layout={layout!r}")
        return handle

    def _add_outputs(self, fp8, layout):
        """Return a function that allocates the outputs.

        It returns the rows, the memory of the rows, the memory of the scales, and the scales as rows are
        indexed.
        """
        if fp8 not in FP8:
            raise ValueError(f"fp8 {fp8!r}: must be False, True, 'pow2' or 'ue8m0'")
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout!r}: must be masked or compact")
        group = 4 * GROUP if fp8 == "ue8m0" else GROUP  # numbers whose scales share a word
        if fp8 and self.hidden % group:
            raise ValueError(f"hidden {self.hidden}: fp8={fp8!r} needs a multiple of {group}")
        shape = self._shapes[layout]
        lines_shape = (*shape[:-2], self.hidden // group, (shape[-2] + 3) // 4 * 4)
        strides, lines_strides = strides_of(shape), strides_of(lines_shape)
        dtype = torch.float8_e4m3fn if fp8 else self.dtype
        scales_dtype = torch.int32 if fp8 == "ue8m0" else torch.float32
        allocate = self._allocate

        def make_plain():
            rows = allocate(shape, strides, dtype)
            return rows, rows, None, None

        def make_fp8():
            rows, lines = allocate(shape, strides, dtype), allocate(lines_shape, lines_strides, scales_dtype)
            return rows, rows.view(torch.uint8), lines, lines[..., :shape[-2]].transpose(-1, -2)

        self._outputs[fp8, layout] = make_fp8 if fp8 else make_plain
        return self._outputs[fp8, layout]

    def _check_handle(self, handle):
        if not isinstance(handle, LowLatencyHandle):
            raise TypeError(f"handle: wanted a LowLatencyHandle, got {type(handle).__name__}")
        if handle._owner is not self:
            raise ValueError("the handle belongs to another LowLatencyAll2All: pass one that this one's "
                             "dispatch returned")

    def _prepare_combine(self, y, handle, fp8, out):
        buffer = getattr(handle, "buffer", 0)
        self._check_idle(_C.OP_LL_COMBINE, buffer)
        try:
            if torch.is_grad_enabled():
                self._check_gradients(y, out)
            if not is_plain():
                check_mode(y, out)
            if type(handle) is not LowLatencyHandle or handle._owner is not self:
                self._check_handle(handle)
            if type(fp8) is not bool:
                raise TypeError(f"fp8: wanted True or False, got {fp8!r}")
            if out is None:
                out = self._allocate((handle.num_tokens, self.hidden), (self.hidden, 1), self.dtype)
            elif out.shape[0] != handle.num_tokens:
                raise ValueError(f"out: wanted {handle.num_tokens} rows, the tokens of the dispatch, got "
                                 f"{out.shape[0]}")
            else:
                mark_written((out,))
        except Exception as error:
            self._refuse(_C.OP_LL_COMBINE, error, buffer)
        return (y, handle._outputs[0], out, LAYOUTS[handle.layout], fp8), out

    def _set_pending(self, buffer, call, arguments, result, written):
        pending = PendingCall(self, buffer, call, arguments, result, written)
        self._pending[buffer] = _UnderWay(pending)
        return pending
