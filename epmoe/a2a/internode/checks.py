"""Checks: what a layer over several nodes checks of its arguments, on each rank, before the ranks meet."""

import torch

from ...torch_modes import check_mode
from ..layer_parts import cast, check_rail_capacity
from .fixed import is_capturing
from .plan import NodesLayout


class Checks:
    """The checks of OverNodes."""

    def _check_sizes(self, rank, world_size, num_tot_experts, options):
        for name, got, want in (("rank", rank, self.rank), ("world_size", world_size, self.world_size)):
            if got is not None and got != want:
                raise ValueError(f"{name}={got}, but the group says {want}: leave it out")
        if num_tot_experts is None:
            raise TypeError("num_tot_experts is missing: pass the number of experts of all ranks")
        if int(num_tot_experts) % self.world_size:
            raise ValueError(f"num_tot_experts {num_tot_experts}: must be a multiple of the "
                             f"{self.world_size} ranks")
        if options.get("expert_capacity") is not None:
            raise ValueError(f"expert_capacity {options['expert_capacity']}: not over several nodes: leave "
                             f"it out")
        capacity, rail_capacity = options.get("capacity"), check_rail_capacity(options.get("rail_capacity"))
        if capacity is not None and rail_capacity is None:
            raise ValueError(f"capacity {capacity} without rail_capacity: over several nodes the host reads "
                             f"the tokens between nodes in each call: pass rail_capacity, too, the most "
                             f"tokens that a rank sends to one other node, or leave capacity out")
        if rail_capacity is not None and capacity is None:
            raise ValueError(f"rail_capacity {rail_capacity} without capacity: the host would still read the "
                             f"rows of each rank in each call: pass capacity, too, the most rows that a rank "
                             f"can receive, or leave rail_capacity out")

    def _checked(self, input, exp_indices, weight, full_scatter_indices, layout, buffer):
        """Check the arguments of a dispatch on this rank.  Return the weights as float32."""
        check_mode(input, weight)
        self._check_capture()
        num_tokens = None
        if full_scatter_indices is not None:
            raise ValueError("full_scatter_indices: not over several nodes, where the plan chooses the rows: "
                             "leave it out")
        if layout is not None:
            self._check_layout(layout)
            if buffer not in (0, layout.buffer):
                raise ValueError(f"buffer {buffer!r}, but the layout is of buffer {layout.buffer}: leave "
                                 f"buffer out")
            num_tokens = layout.num_tokens
        self._check_tensor("input", input, self.dtype, (num_tokens, self.hidden))
        if layout is None:
            self._check_indices(exp_indices)
            if exp_indices.shape[0] != input.shape[0]:
                raise ValueError(f"input has {input.shape[0]} tokens, but exp_indices has "
                                 f"{exp_indices.shape[0]}: must be the same")
        if weight is not None:
            self._check_tensor("weight", weight, None, (input.shape[0], self.topk * self._copies))
        return cast(weight, torch.float32)

    def _check_indices(self, exp_indices):
        if exp_indices is None:
            raise TypeError("exp_indices is None: pass them, or the layout of an earlier preprocess or "
                            "dispatch")
        if not isinstance(exp_indices, torch.Tensor):
            raise TypeError(f"exp_indices: wanted a tensor, got {type(exp_indices).__name__}")
        if exp_indices.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"exp_indices: wanted int32 or int64, got {exp_indices.dtype}")
        topk = self.topk * self._copies
        if exp_indices.dim() != 2 or exp_indices.shape[1] != topk:
            raise ValueError(f"exp_indices: wanted shape [*, {topk}], got {list(exp_indices.shape)}")
        if exp_indices.shape[0] > self._most:
            raise ValueError(f"exp_indices has {exp_indices.shape[0]} tokens: must be at most {self._most}; "
                             f"see max_tokens")
        if exp_indices.device != self.device:
            raise ValueError(f"exp_indices: wanted a tensor on {self.device}, where the layer is, got one on "
                             f"{exp_indices.device}")

    def _check_layout(self, layout):
        if not isinstance(layout, NodesLayout):
            raise TypeError(f"layout: wanted a layout of several nodes, got {type(layout).__name__}")
        if layout.layer is not self:
            raise ValueError("the layout belongs to another layer: pass one that this layer's preprocess or "
                             "dispatch returned")
        if layout.is_void:
            raise ValueError("cannot use this layout: its plan has failed. Make another with preprocess")

    def _check_rows(self, name, input, columns, weight, layout):
        """Check the rows and weights of a combine."""
        self._check_capture()
        self._check_layout(layout)
        if not layout.dispatched:
            raise ValueError("combine needs the layout of a dispatch, but this one was only planned: call "
                             "dispatch(layout=...) first")
        self._check_tensor(name, input, self.dtype, (self._rows_of(layout), columns))
        if weight is not None:
            self._check_tensor("weight", weight, None, (input.shape[0],))

    def _rows_of(self, layout):
        return layout.num_rows if self.capacity is None else self.capacity

    def _check_capture(self):
        if self.rail_capacity is None and is_capturing(self.device):
            raise RuntimeError("this layer over several nodes cannot be captured in a CUDA graph, because "
                               "the host reads numbers of rows in each call: create it with capacity and "
                               "rail_capacity, with which sizes are fixed")
