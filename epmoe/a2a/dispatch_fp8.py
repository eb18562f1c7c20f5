"""EPAll2AllLayer.dispatch_fp8: tokens are quantised at the source, and travel in FP8 with their scales."""

import torch

from .. import _C
from ..comm.refusals import reported_after_plan, reporting
from ..gemm.grouped import FP8_BLOCK, aligned
from ..gemm.quantize import quantize_fp8
from ..torch_modes import implement, is_watched, requires_grad
from . import ops
from .layer_parts import cast

ops.lib.define("dispatch_fp8(Tensor x, Tensor x_scale, Tensor? weight, Tensor plan, str layer, int buffer, "
               "SymInt num_rows, Tensor? after=None) -> (Tensor, Tensor, Tensor, Tensor)")


def _run(x, x_scale, weight, plan, layer, buffer, num_rows, after=None):
    layer = ops.layer_of(layer)
    with reporting(layer, _C.OP_DISPATCH_FP8, buffer, plan, num_rows < 0):
        rows, scales, row_weight, recv = layer._dispatch_fp8(aligned(x), x_scale, aligned(weight), plan,
                                                             buffer, num_rows)
    return rows, scales, ops.absent(x_scale) if row_weight is None else row_weight, recv


implement(ops.lib, "dispatch_fp8", _run)


@ops.register_fake("dispatch_fp8")
def _(x, x_scale, weight, plan, layer, buffer, num_rows, after=None):
    layer = ops.layer_of(layer)
    num_rows = ops.rows_to_trace(layer, num_rows)
    row_weight = ops.absent(x_scale) if weight is None else x_scale.new_empty(num_rows)
    return (x.new_empty(num_rows, layer.hidden), x_scale.new_empty(num_rows, x_scale.shape[1]), row_weight,
            plan.new_empty(layer._recv_words))


class Fp8Dispatch:
    """The part of EPAll2AllLayer for rows in FP8."""

    def dispatch_fp8(self, input, exp_indices=None, weight=None, full_scatter_indices=None, *, layout=None,
                     buffer=0):
        """Send tokens to their experts' ranks in float8_e4m3fn, with their scales.  Collective.

        A token is quantised once, at its rank, as quantize_fp8 does, and its H + 4 ceil(H / 128) bytes are
        what crosses the link: about half of dispatch in 16 bits.  The rows are for grouped_gemm.  combine
        then returns the results in the layer's dtype.  For inference: it has no gradients.

        Args:
            input: [T, H] of the layer's dtype, contiguous; H a multiple of 16.
            exp_indices: As for dispatch, and so are all other arguments.
            weight: As there.
            full_scatter_indices: As there.
            layout: As there.
            buffer: As there.

        Returns:
            A tuple (rows, scales, row_weights, layout).  rows is [M, H] float8_e4m3fn, in the order of
                dispatch's rows; scales is [M, ceil(H / 128)] float32, contiguous.  row_weights and layout are
                as dispatch returns them.  With a capacity there are `capacity` rows.  Rows after the first M
                and padding rows are zero, and so are their scales.

        Raises:
            RuntimeError: On this rank, when a gradient of input or weight is wanted.
            ValueError: As dispatch, and for another H.
            TypeError: As dispatch.
            PeerError: On the other ranks, when one rank raises one of these.
            EpMismatch: On all ranks, when they are not in the same call.
            PeerDied: On all surviving ranks, when a rank dies.
            EpTimeout: On all ranks, when one does not make the call before the timeout.
            EpClosed: After finalize.
            NotImplementedError: As dispatch.
            EpIndexError: Without a layout, as preprocess.
            EpOverflow: Without a layout, as preprocess.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), 4, 128, 1, num_tot_experts=2, device="cpu")
            >>> x = torch.tensor([[7.0], [3.5]]).expand(2, 128).bfloat16().contiguous()
            >>> rows, scales, _, layout = layer.dispatch_fp8(x, torch.tensor([[1], [0]]))
            >>> rows[:, 0].float(), scales
            (tensor([448., 448.]), tensor([[0.0078],
                    [0.0156]]))
            >>> layer.finalize()

        References:
            DeepSeek-V3 Technical Report, section 3.3.2 (1x128 groups) and 3.3.3 (dispatch in FP8).
        """
        op = _C.OP_DISPATCH_FP8
        try:
            if requires_grad(*(t for t in (input, weight) if isinstance(t, torch.Tensor))):
                raise RuntimeError("dispatch_fp8 has no gradients: call it under torch.no_grad(), or use "
                                   "dispatch")
            if self.hidden % 16:
                raise ValueError(f"hidden {self.hidden}: dispatch_fp8 needs a multiple of 16")
        except Exception as error:
            self._refuse(_C.OP_PLAN if layout is None else op, error, self._buffer_of(layout, buffer))
        layout, weight, num_rows = self._prepare(op, input, exp_indices, weight, full_scatter_indices, layout,
                                                 buffer)
        return self._dispatch_fp8_planned(layout, input, weight, num_rows)

    @reported_after_plan(_C.OP_DISPATCH_FP8)
    def _dispatch_fp8_planned(self, layout, input, weight, num_rows):
        x, x_scale = quantize_fp8(input.contiguous())
        if self._copies > 1:
            x, x_scale = x.repeat_interleave(self._copies, 0), x_scale.repeat_interleave(self._copies, 0)
        if is_watched():
            rows, scales, row_weight, recv = torch.ops.epmoe.dispatch_fp8(
                x, x_scale, weight, layout.plan, self.id, layout.buffer, num_rows)
            row_weight = None if weight is None else row_weight
        else:
            rows, scales, row_weight, recv = self._dispatch_fp8(x, x_scale, weight, layout.plan,
                                                                layout.buffer, num_rows)
        self._set_dispatched(layout, rows, recv)
        return rows, scales, cast(row_weight, self.weight_dtype), layout

    def _fp8_outputs(self, weight, num_rows, by_row):
        """Allocate what a dispatch writes: the rows as bytes, their scales, their weights or None, and recv.

        by_row: The scales of a row are next to each other in memory, else those of a group.
        """
        rows = self._empty(num_rows, self.hidden, dtype=torch.uint8)
        groups = -(-self.hidden // FP8_BLOCK)
        if by_row:
            row_scale = self._empty(num_rows, groups, dtype=torch.float32)
        else:
            row_scale = self._empty(groups, num_rows, dtype=torch.float32).t()
        row_weight = None if weight is None else self._empty(num_rows, dtype=torch.float32)
        return rows, row_scale, row_weight, self._empty(self._recv_words, dtype=torch.int32)

    def _dispatch_fp8(self, x, x_scale, weight, plan, buffer, num_rows):
        """Allocate the outputs and call the module."""
        x = x.view(torch.uint8)  # DLPack of some versions of torch has no FP8, so the module gets bytes

        def make(n):
            *outputs, recv = self._fp8_outputs(weight, n, by_row=True)
            return outputs, [recv]

        def launch(outputs, others, awaits_rows):
            return _C.layer_dispatch_fp8(self._c, buffer, (x, x_scale, weight, plan, *outputs, *others,
                                                           awaits_rows))

        call = plan, buffer, x.shape[0]
        (rows, row_scale, row_weight), (recv,) = self._run_dispatch(call, num_rows, make, launch)
        return rows.view(torch.float8_e4m3fn), row_scale, row_weight, recv
