"""ep_implementation="epmoe" of transformers: expert parallelism whose tokens are moved by epmoe."""

import inspect
import os
import struct

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from .. import _C
from ..a2a.fused import EpAll2AllFusedOp
from ..a2a.layer import EPAll2AllLayer
from ..comm.world import World
from ..torch_modes import without_dynamo
from . import transformers_experts as parts

__all__ = ["EpmoeEP", "set_ep_options"]

# What set_ep_options takes: the options of the layer except the sizes, which the model decides.
_LAYER_OPTIONS = {name for kind in (EpAll2AllFusedOp, EPAll2AllLayer)
                  for name in inspect.signature(kind).parameters}
_LAYER_OPTIONS -= {"ep_group", "max_tokens", "hidden", "topk", "rank", "num_tot_experts", "local_world_size",
                   "world_size", "dtype", "device", "heap", "options"}

_options = {}  # of set_ep_options
_shared = {}  # (World, its options) -> Layers, which all modules and models of the world share


def set_ep_options(max_tokens=None, **options):
    """Set the options of the models that are made after this call with ep_implementation="epmoe".

    Not collective, but every rank must make the same call before it makes the model.

    Args:
        max_tokens: The most tokens of a rank in one call; more raise ValueError.  None: any number.  In each
            call the ranks then tell each other how many tokens they have, and make a larger communication
            layer when it is needed.  With a number this exchange, a wait of the host, is saved.
        **options: Of EpAll2AllFusedOp, for example reserve_sms, fused and capacity.  Without fused and
            reserve_sms, the fused kernels run only where NCCL_MAX_CTAS is set, and leave NCCL as many SMs
            and 8 more: FSDP's collectives run at the same time, and both would wait for SMs.

    Raises:
        TypeError: For an unknown option.

    Examples:
        >>> from epmoe.integrations.transformers import set_ep_options
        >>> set_ep_options(max_tokens=8192)
        >>> set_ep_options()  # as at the start
    """
    if unknown := sorted(options.keys() - _LAYER_OPTIONS):
        raise TypeError(f"{', '.join(unknown)}: not an option of EpAll2AllFusedOp")
    _options.clear()
    _options.update(options, max_tokens=max_tokens)


def _layers_of(world):
    options = dict(_options)
    if "fused" not in options and "reserve_sms" not in options:
        channels = os.environ.get("NCCL_MAX_CTAS", "")
        options |= {"reserve_sms": int(channels) + 8} if channels.isdigit() else {"fused": False}
    key = world, tuple(sorted(options.items()))
    if key not in _shared:
        _shared[key] = parts.Layers(world, **options)
    return _shared[key]


@without_dynamo
def _most_tokens(world, num_tokens):
    """Return the largest of all ranks' numbers of tokens.  Collective."""
    return max(struct.unpack("q", its)[0] for its in world.exchange(struct.pack("q", num_tokens)))


class EpmoeEP(EPImplementation):
    """How the experts of a transformers module get their tokens: through epmoe.

    transformers makes one for each module of experts, and calls it instead of the module's forward.  The
    ranks of ep_mesh, at most 8 of one machine, together hold all experts.  Experts whose weights are not
    plain, for example quantized ones, and experts that transformers has not decorated, run their own forward
    on the rows that epmoe brings.

    Args:
        experts: The module of experts.
        ep_mesh: The ranks that hold different experts.
        tp_mesh: The ranks that hold the same tokens.  Each of them sends a part.

    Raises:
        ValueError: On this rank, for more ranks than a World has.
        EpError: On all ranks, as the creation of a World.

    Examples:
        transformers makes it (docs/transformers.md):
        DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="epmoe").

        >>> from epmoe.integrations.transformers import EpmoeEP
        >>> EpmoeEP.needs_shared_batch
        False
    """

    def __init__(self, experts, ep_mesh, tp_mesh):
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.layers = _layers_of(World.of(ep_mesh.get_group()))

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        """Return the weighted sum of the experts of each token: [T, H].  Collective, also for no tokens."""
        num_tokens, hidden = hidden_states.shape
        if self.tp_mesh.size() > 1:  # each rank sends its part of the tokens that they share
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)]).to_local()
                for t in (hidden_states, top_k_index, top_k_weights))
        y = self._experts_of(hidden_states, top_k_index.contiguous(), top_k_weights.contiguous())
        if self.tp_mesh.size() == 1:
            return y
        return DTensor.from_local(y.contiguous(), self.tp_mesh, [Shard(0)], shape=(num_tokens, hidden),
                                  stride=(hidden, 1)).full_tensor()

    def _experts_of(self, x, idx, weight):
        is_plain = parts.is_plain(self.experts)
        x = x.to(self.experts.down_proj.dtype if is_plain else x.dtype).contiguous()
        num_experts = self.num_local_experts * self.ep_mesh.size()
        layers = self.layers
        most = x.shape[0] if layers.max_tokens else _most_tokens(layers.world, x.shape[0])
        layer = layers.get(most, x.shape[1], idx.shape[1], num_experts, x.dtype, x.device)
        if not torch.compiler.is_compiling() and x.shape[0] > layer.max_tokens // layer._copies:
            layer._propagate(_C.OP_PLAN, ValueError(f"{x.shape[0]} tokens, but max_tokens is "
                                                 f"{layers.max_tokens}: pass more to set_ep_options before "
                                                 f"the model is made"), 0)
        if is_plain:
            return parts.compute(self.experts, layer, x, idx, weight)
        return parts.compute_rows(self.experts_forward, layer, x, idx, weight)
