"""torchtitan: its Mixture-of-Experts models dispatch and combine with epmoe.

    torchtitan_train ... --override.imports epmoe.integrations.torchtitan.token_dispatcher

That is torchtitan's own mechanism of overrides; nothing is patched.  It works with any moe_comm_backend of
the model, with or without expert parallelism, and with the padding of quantised experts.  Another override,
grouped_experts, trains the experts with products in FP8.

It needs torchtitan 0.3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

try:
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher
except ImportError as error:
    raise ImportError(f"epmoe.integrations.torchtitan needs torchtitan 0.3: {error}") from error

from ..comm.device import pick_device
from ..moe.fp8_rows import experts_fp8
from ..moe.fp8_training import E4M3, check_compute_dtype
from ..moe.weights import WeightFormat
from . import layers
from .layers import check_methods

__all__ = ["EpmoeGroupedExperts", "EpmoeSelectiveAC", "EpmoeTokenDispatcher", "grouped_experts",
           "selective_ac", "token_dispatcher"]

check_methods("torchtitan", BaseEPTokenDispatcher,
              wire_meshes="self ep_mesh", init_buffer="self", combine="self routed_output_RD metadata x_TD",
              dispatch="self x_TD topk_scores_TK topk_expert_ids_TK num_local_tokens_per_expert_E")
check_methods("torchtitan", GroupedExperts, forward="self x_RD num_tokens_per_expert_E")


def _dtype_of(name, value):
    """Return a dtype of torch, of which value is the name, or None."""
    found = value if value is None else getattr(torch, str(value).removeprefix("torch."), None)
    if value is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"{name} {value!r}: must be the name of a dtype of torch, for example bfloat16")
    return found


class EpmoeTokenDispatcher(BaseEPTokenDispatcher):
    """A token dispatcher of torchtitan: RoutedExperts calls dispatch, computes the experts, calls combine.

    The dispatchers of one shape share a communication layer.  It is made when torchtitan installs the
    meshes, if the configuration has hidden_dim, num_max_tokens_per_rank and dtype, and otherwise in the first
    dispatch.  A call with more tokens on some rank makes a larger one on all ranks.  Only in compiled code it
    is an error: set num_max_tokens_per_rank to the most tokens.

    Fields of Config: those of torchtitan's BaseEPTokenDispatcher (num_experts, top_k), and

    - hidden_dim: H, or None until the first dispatch.
    - num_max_tokens_per_rank: The most tokens of a rank in one call, or None until the first dispatch.
    - dtype: Of the tokens, or None until the first dispatch.
    - pad_multiple: Pad the rows of each expert with zeros to a multiple, as torchao's FP8 and MXFP8 grouped
      GEMMs require.  An expert without rows gets one block of zeros, as in torchao.  None: no padding.

    Args:
        config: A Config.

    Raises:
        ValueError: For a pad_multiple less than 1.

    Examples:
        >>> config = EpmoeTokenDispatcher.Config(num_experts=2, top_k=1, pad_multiple=4)
        >>> dispatcher = config.build()
        >>> x, scores, ids = torch.ones(3, 16), torch.full((3, 1), 0.5), torch.tensor([[1], [0], [1]])
        >>> rows, counts, metadata = dispatcher.dispatch(x, scores, ids, torch.tensor([1, 2]))
        >>> counts.tolist()
        [4, 4]
        >>> dispatcher.combine(2 * rows, metadata, x)[:, 0]
        tensor([1., 1., 1.])
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        hidden_dim: int | None = None
        num_max_tokens_per_rank: int | None = None
        dtype: torch.dtype | None = None
        pad_multiple: int | None = None

    def __init__(self, config):
        super().__init__(config)
        if config.pad_multiple is not None and config.pad_multiple < 1:
            raise ValueError(f"pad_multiple {config.pad_multiple}: must be at least 1, or None")
        self.config = config
        self.layer = None  # for compiled code, which must not make one

    def init_buffer(self):
        """Make the communication layer, if all of its sizes are known.  Collective.

        torchtitan calls it from wire_meshes.

        Raises:
            ValueError, TypeError, EpError: As EPAll2AllLayer.

        Examples:
            >>> EpmoeTokenDispatcher.Config(num_experts=2, top_k=1).build().wire_meshes(ep_mesh=None)
        """
        c = self.config
        layers.world_of(self.ep_mesh)  # also where it makes no layer: the ranks meet here
        if None not in (c.hidden_dim, c.num_max_tokens_per_rank, c.dtype):
            device = pick_device(None if self.ep_mesh is None else self.ep_mesh.device_type)
            self.layer = layers.make_layer(self.ep_mesh, c.num_max_tokens_per_rank, c.hidden_dim, self.top_k,
                                           self.num_experts, c.dtype, device)

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        """Send tokens to their experts' ranks.  Collective.

        Args:
            x_TD: [T, H]; T may differ between ranks and be 0.
            topk_scores_TK: [T, K] of a floating-point dtype.
            topk_expert_ids_TK: [T, K] int64.
            num_local_tokens_per_expert_E: Not read.

        Returns:
            A tuple (rows, counts, metadata).  rows is [R, H], ordered by expert, source rank, token.  counts
                is [L] int32, with the padding.  R is the sum of counts, or with pad_multiple more: the
                rest are zeros.

        Raises:
            RuntimeError: In compiled code, when no layer has been made before; and in the capture of a CUDA
                graph.
            ValueError, TypeError, EpError: As EPAll2AllLayer.dispatch.

        Examples:
            See the class.
        """
        del num_local_tokens_per_expert_E
        if x_TD.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("epmoe's dispatcher in a CUDA graph: the host reads the number of rows, which "
                               "a graph cannot do: set --training.disable_cuda_graphs")
        x, scores, ids = (t.contiguous() for t in (x_TD, topk_scores_TK, topk_expert_ids_TK))
        if torch.compiler.is_compiling():
            if self.layer is None:
                raise RuntimeError("epmoe cannot make its communication layer in compiled code: set "
                                   "max_tokens, hidden and dtype in the override, or run one step without "
                                   "torch.compile")
            rows, row_weight, layout = self.layer.dispatch(x, ids, scores)
        else:
            rows, row_weight, layout = layers.dispatch(self.ep_mesh, x, ids, scores, self.num_experts)
            self.layer = layout.layer
        counts, places = layout.tokens_per_expert, None
        pad = self.config.pad_multiple
        if pad is not None:
            padded = layers.padded_counts(counts, pad, least=pad)
            places = layers.padded_places(counts, padded, rows.shape[0])
            # The most that padding can need, so that the host does not wait for the sum of the counts.
            num_padded = -(-rows.shape[0] // pad) * pad + counts.shape[0] * pad
            rows, counts = layers.pad_rows(rows, places, num_padded), padded
        return rows, counts, (layout, row_weight, places)

    def combine(self, routed_output_RD, metadata, x_TD):
        """Return the experts' rows to their tokens' ranks, and sum them there with the scores.  Collective.

        Args:
            routed_output_RD: [R, H], in the order of dispatch's rows.
            metadata: What dispatch returned.
            x_TD: Not read.

        Returns:
            [T, H] of the dtype of the tokens.

        Raises:
            ValueError, TypeError, EpError: As EPAll2AllLayer.combine.

        Examples:
            See the class.
        """
        del x_TD
        layout, row_weight, places = metadata
        if places is not None:
            routed_output_RD = routed_output_RD.index_select(0, places)
        return layout.layer.combine(routed_output_RD.contiguous(), layout, row_weight)


@override(target=LocalTokenDispatcher.Config, description="dispatch and combine with epmoe")
def token_dispatcher(config, *, max_tokens=None, hidden=None, dtype=None):
    """Replace the configuration of a token dispatcher of torchtitan by that of EpmoeTokenDispatcher.

    torchtitan calls it for every token dispatcher of the model, if its import path is in --override.imports.
    Fields that both have are copied, among them the pad_multiple of TorchAOTokenDispatcher.  The arguments
    are needed for torch.compile; torchtitan passes those in the entry:

        --override.imports 'epmoe.integrations.torchtitan.token_dispatcher={"max_tokens": 8192, "hidden":
        4096, "dtype": "bfloat16"}'

    Args:
        config: The configuration that is replaced.
        max_tokens: num_max_tokens_per_rank of Config.
        hidden: hidden_dim of Config.
        dtype: The name of a dtype of torch, for example "bfloat16".

    Returns:
        An EpmoeTokenDispatcher.Config.

    Raises:
        ValueError: For settings that epmoe does not have, which are DeepEP's cudagraphable and HybridEP's
            non_blocking_capacity_factor, and for a dtype that torch does not have.

    Examples:
        >>> from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
        >>> config = AllToAllTokenDispatcher.Config(num_experts=8, top_k=2)
        >>> token_dispatcher(config, max_tokens=64).num_max_tokens_per_rank
        64
    """
    for name in ("cudagraphable", "non_blocking_capacity_factor"):
        if getattr(config, name, None):
            raise ValueError(f"epmoe's token dispatcher has no {name}: leave it out of the model's "
                             f"configuration")
    given = {"num_max_tokens_per_rank": max_tokens, "hidden_dim": hidden, "dtype": _dtype_of("dtype", dtype)}
    return derive(config, EpmoeTokenDispatcher.Config,
                  **{name: value for name, value in given.items() if value is not None})


# ---- experts in FP8 ----


class EpmoeGroupedExperts(GroupedExperts):
    """torchtitan's GroupedExperts with products in FP8, forward and backward.

    Parameters, their names, sharding and checkpoints are those of GroupedExperts.  The recipe is that of
    EPMoE(compute_dtype=torch.float8_e4m3fn), and so are the bits of the same rows.  The weights are quantised
    in each forward.  It needs neither torchao nor padded rows, and takes them as they are.

    Fields of Config: those of GroupedExperts (dim, hidden_dim, num_experts), and

    - compute_dtype: torch.float8_e4m3fn, the dtype of the operands of all products.
    - wgrad_dtype: torch.bfloat16 for gradients of the weights in 16 bits, or None: compute_dtype.

    Args:
        config: A Config.

    Raises:
        TypeError: For another compute_dtype or wgrad_dtype.
        ValueError: For a dim or hidden_dim that is not a multiple of 16.

    Examples:
        >>> config = EpmoeGroupedExperts.Config(dim=16, hidden_dim=32, num_experts=2,
        ...                                     compute_dtype=torch.float8_e4m3fn)
        >>> experts = config.build()
        >>> for p in experts.parameters():
        ...     _ = torch.nn.init.ones_(p)
        >>> experts(torch.ones(3, 16), torch.tensor([1, 2])).shape
        torch.Size([3, 16])
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        compute_dtype: torch.dtype
        wgrad_dtype: torch.dtype | None = None

    def __init__(self, config):
        if config.compute_dtype != E4M3:
            raise TypeError(f"compute_dtype {config.compute_dtype}: must be torch.float8_e4m3fn; for experts "
                            f"in 16 bits leave grouped_experts out of the overrides")
        check_compute_dtype(E4M3, WeightFormat(torch.bfloat16, torch.bfloat16), config.dim, config.hidden_dim,
                            True, config.wgrad_dtype)
        super().__init__(config)
        self.wgrad_dtype = config.wgrad_dtype

    def _weight(self, name):
        p = getattr(self, name)
        p = p.to_local() if isinstance(p, DTensor) else p
        if type(p) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(f"{name} is a {type(p).__name__}: a converter of quantised experts has swapped "
                             f"the parameters; leave Float8GroupedExpertsConverter and torchao's quantize_ "
                             f"out, or epmoe's override grouped_experts")
        return p.bfloat16()

    def forward(self, x_RD, num_tokens_per_expert_E):
        """Compute the experts of rows that are grouped by expert.

        Args:
            x_RD: [R, H]; computed in bfloat16, as by GroupedExperts.
            num_tokens_per_expert_E: [L] integers: the rows of each expert.  There may be more rows.

        Returns:
            [R, H] of the dtype of x_RD.  Rows after those of the last expert are undefined.

        Raises:
            ValueError: For parameters that a converter has swapped, and for shards of tensor parallelism
                with sizes that are not multiples of 16.

        Examples:
            See the class.
        """
        gate, down, up = map(self._weight, ("w1_EFD", "w2_EDF", "w3_EFD"))
        offsets = F.pad(num_tokens_per_expert_E.cumsum(0, dtype=torch.int32), (1, 0))
        y = experts_fp8(x_RD.bfloat16(), torch.cat([gate, up], 1), down, offsets,
                        wgrad_dtype=self.wgrad_dtype)
        return y.type_as(x_RD)


@override(target=GroupedExperts.Config, description="experts with epmoe's products in FP8")
def grouped_experts(config, *, compute_dtype, wgrad_dtype=None):
    """Replace the configuration of torchtitan's GroupedExperts by that of EpmoeGroupedExperts.

        --override.imports epmoe.integrations.torchtitan.token_dispatcher
        'epmoe.integrations.torchtitan.grouped_experts={"compute_dtype": "float8_e4m3fn"}'

    It takes the place of torchtitan's converter for FP8 experts, Float8GroupedExpertsConverter.

    Args:
        config: The configuration that is replaced.
        compute_dtype: "float8_e4m3fn".
        wgrad_dtype: "bfloat16" for gradients of the weights in 16 bits, or None.

    Returns:
        An EpmoeGroupedExperts.Config.

    Raises:
        ValueError: For experts that a converter of torchtitan has quantised already, for those of another
            class than GroupedExperts, as GPT-OSS has them, and for a dtype that torch does not have.

    Examples:
        >>> config = GroupedExperts.Config(dim=16, hidden_dim=32, num_experts=2)
        >>> grouped_experts(config, compute_dtype="float8_e4m3fn").compute_dtype
        torch.float8_e4m3fn
    """
    if type(config) is not GroupedExperts.Config:
        name = type(config)._owner.__name__
        for kind in "Float8", "MXFP8":
            if name.startswith(kind):
                raise ValueError(f"{name}: torchtitan's converter has quantised the experts already: leave "
                                 f"{kind}GroupedExpertsConverter out of the model's converters, or "
                                 f"epmoe's override grouped_experts")
        raise ValueError(f"{name}: epmoe has products in FP8 for torchtitan's GroupedExperts (SwiGLU without "
                         f"biases): leave grouped_experts out of the overrides of this model")
    return derive(config, EpmoeGroupedExperts.Config, compute_dtype=_dtype_of("compute_dtype", compute_dtype),
                  wgrad_dtype=_dtype_of("wgrad_dtype", wgrad_dtype))


# ---- selective activation checkpointing ----


class EpmoeSelectiveAC(SelectiveAC):
    """torchtitan's selective activation checkpointing, which also saves what epmoe has moved.

    Without it the recomputation dispatches and combines again: correct, but twice the communication of the
    forward.

    Args:
        config: A Config, with the fields of torchtitan's SelectiveAC.Config.

    Examples:
        >>> torch.ops.epmoe.dispatch.default in EpmoeSelectiveAC.Config().build().get_save_ops()
        True
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self):
        """Return the operators with results that are saved: torchtitan's and those of epmoe.

        Examples:
            See the class.
        """
        own = torch.ops.epmoe
        return super().get_save_ops() | {own.plan.default, own.dispatch.default, own.combine.default}


@override(target=SelectiveAC.Config, description="save what epmoe has moved")
def selective_ac(config):
    """Replace the configuration of torchtitan's SelectiveAC by that of EpmoeSelectiveAC.

        --override.imports epmoe.integrations.torchtitan.token_dispatcher
        epmoe.integrations.torchtitan.selective_ac

    Args:
        config: The configuration that is replaced.

    Returns:
        An EpmoeSelectiveAC.Config.

    Examples:
        >>> type(selective_ac(SelectiveAC.Config())).__qualname__
        'EpmoeSelectiveAC.Config'
    """
    return derive(config, EpmoeSelectiveAC.Config)
