"""Megatron-core: its flex token dispatcher dispatches and combines with epmoe.

    import epmoe.integrations.megatron
    epmoe.integrations.megatron.use()  # before the model is made; use(experts=True): the experts too

Then --moe-token-dispatcher-type flex means epmoe.  Megatron-core has no registry for the communication of
that dispatcher, so use() replaces the one that it would make for DeepEP, the default of
--moe-flex-dispatcher-backend.  The rest of Megatron treats it as that one.

It needs megatron-core 0.16 to 0.19, and for the experts 0.16.
"""

import functools

import torch

try:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe import moe_utils, token_dispatcher as _megatron
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
except ImportError as error:
    raise ImportError(f"epmoe.integrations.megatron needs megatron-core 0.16 to 0.19: {error}") from error

from ..errors import EpIndexError
from . import layers
from .layers import check_methods

__all__ = ["EpmoeManager", "use"]

# What MoEFlexTokenDispatcher calls, and with what.
_CALLED = {
    "__init__": "self group num_local_experts router_topk num_experts config",
    "setup_metadata": "self routing_map probs",
    "dispatch": "self hidden_states async_finish allocate_on_comm_stream",
    "combine": "self hidden_states async_finish allocate_on_comm_stream",
    "get_permuted_hidden_states_by_experts": "self hidden_states",
    "get_restored_hidden_states_by_experts": "self hidden_states",
    "get_number_of_tokens_per_expert": "self",
}


# Whether the experts count on the dispatcher to pad their rows. megatron-core 0.16 and 0.17 have no function
# for it.
_expects_padding = getattr(moe_utils, "skip_routed_expert_padding",
                           lambda config: config.moe_router_padding_for_quantization)


def choices_of(routing_map, probs, topk):
    """Return the choices of each token, in the order of the experts, from a map of choices.

    Args:
        routing_map: [T, E] bool.
        probs: [T, E] of a floating-point dtype.
        topk: K.

    Returns:
        A tuple (idx, weight).  idx is [T, K] int64: E where a token has fewer than K choices, and E + 1,
            which dispatch refuses, where it has more.  weight is [T, K] of the dtype of probs, 0 for none.

    Examples:
        >>> from epmoe.integrations.megatron import choices_of
        >>> routing_map = torch.tensor([[True, False, True], [False, True, False], [True, True, True]])
        >>> idx, weight = choices_of(routing_map, torch.full((3, 3), 0.5), 2)
        >>> idx.tolist(), weight.tolist()
        ([[0, 2], [1, 3], [4, 1]], [[0.5, 0.5], [0.5, 0.0], [0.5, 0.5]])
    """
    num_experts = routing_map.shape[1]
    idx = torch.where(routing_map, torch.arange(num_experts, device=routing_map.device), num_experts)
    idx = idx.topk(topk, dim=1, largest=False, sorted=True).values
    weight = probs.gather(1, idx.clamp_max(num_experts - 1)).masked_fill(idx == num_experts, 0)
    too_many = routing_map.sum(1) > topk
    first = torch.where(too_many, num_experts + 1, idx[:, 0])
    return torch.cat([first[:, None], idx[:, 1:]], 1), weight


class EpmoeManager(_megatron._DispatchManager):
    """The communication of one MoEFlexTokenDispatcher.  use() lets Megatron-core make it.

    Managers of one shape share a communication layer, which the first dispatch makes; a call with more tokens
    on some rank makes a larger one on all ranks.  The number of tokens may differ between ranks and be 0.

    The experts apply the probabilities, as everywhere in Megatron-core, so combine makes plain sums.  With
    moe_router_padding_for_quantization the rows of each expert are padded with zeros, and their probabilities
    too; an expert without rows gets none, as in Megatron-core.

    Args:
        group: The ProcessGroup of all tensor and expert parallel ranks, at most 8.
        num_local_experts: L.
        router_topk: The most choices of a token: moe_router_topk times the expert tensor parallel size.
        num_experts: L times the ranks of the group.
        config: The TransformerConfig.

    Attributes:
        token_probs: [T, K], after setup_metadata.
        token_indices: [T, K] int64, after setup_metadata.
        dispatched_probs: [M], after dispatch, with padding.
        tokens_per_expert: [L] int64 on the CPU, after dispatch, with padding.

    Raises:
        ValueError: For moe_pad_expert_input_to_capacity, which epmoe does not have, and for a group of more
            than 8 ranks.
        EpError: As World.

    Examples:
        See docs/megatron.md.

        >>> EpmoeManager.__name__
        'EpmoeManager'
    """

    def __init__(self, group, num_local_experts, router_topk, num_experts, config):
        if config.moe_pad_expert_input_to_capacity:
            raise ValueError("epmoe does not pad the rows of an expert to a capacity: leave "
                             "moe_pad_expert_input_to_capacity out; without it rows are not padded")
        self.group = group
        self.num_local_experts = num_local_experts
        self.router_topk = router_topk
        self.num_experts = num_experts
        self.config = config
        self.token_probs = None
        self.token_indices = None
        self.dispatched_probs = None
        self.tokens_per_expert = None
        self.handle = None  # the EPLayout, from dispatch to combine
        layers.world_of(group)

    def setup_metadata(self, routing_map, probs):
        """Take the choices of the router.

        Args:
            routing_map: [T, W, L] bool, or [T, E].
            probs: The same shape, of a floating-point dtype.

        Examples:
            See docs/megatron.md.
        """
        num_tokens = routing_map.shape[0]
        self.token_indices, self.token_probs = choices_of(routing_map.reshape(num_tokens, self.num_experts),
                                                          probs.reshape(num_tokens, self.num_experts),
                                                          self.router_topk)

    def dispatch(self, hidden_states, async_finish=False, allocate_on_comm_stream=False):
        """Send tokens to their experts' ranks.  Collective.

        Args:
            hidden_states: [T, H].
            async_finish: Not read: on a GPU, operations run in the order of the stream.
            allocate_on_comm_stream: Not read.

        Returns:
            [M, H], ordered by expert, source rank, token, with padding if wanted.

        Raises:
            EpIndexError: On all ranks, when a token has more than router_topk choices.
            ValueError, TypeError, EpError: As EPAll2AllLayer.dispatch.

        Examples:
            See docs/megatron.md.
        """
        options = {}
        if _expects_padding(self.config):
            options["expert_alignment"] = get_align_size_for_quantization(self.config)
        try:
            rows, self.dispatched_probs, self.handle = layers.dispatch(
                self.group, hidden_states.contiguous(), self.token_indices, self.token_probs.contiguous(),
                self.num_experts, host_counts=True, **options)
        except EpIndexError as error:
            raise EpIndexError(
                f"a token has more than {self.router_topk} experts in the routing map, which is "
                f"moe_router_topk ({self.config.moe_router_topk}) times the expert tensor parallel size: "
                f"increase moe_router_topk, or use a router that gives each token at most that many ({error})"
            ) from error
        if self.config.moe_router_dtype == "fp64":
            self.dispatched_probs = self.dispatched_probs.double()
        self.tokens_per_expert = torch.tensor(self.handle.tokens_per_expert_list, device="cpu",
                                              dtype=torch.int64)
        return rows

    def combine(self, hidden_states, async_finish=False, allocate_on_comm_stream=False):
        """Return the experts' rows to their tokens' ranks, and sum them there.  Collective.

        Args:
            hidden_states: [M, H], in the order of dispatch's rows.
            async_finish: Not read.
            allocate_on_comm_stream: Not read.

        Returns:
            [T, H].

        Raises:
            ValueError, TypeError, EpError: As EPAll2AllLayer.combine.

        Examples:
            See docs/megatron.md.
        """
        layout, self.handle = self.handle, None
        return layout.layer.combine(hidden_states.contiguous(), layout)

    def get_permuted_hidden_states_by_experts(self, hidden_states):
        """Return what the experts take: the rows and probabilities of dispatch.

        Args:
            hidden_states: [M, H], of dispatch.

        Returns:
            A tuple (rows [M, H], probs [M]).

        Examples:
            See docs/megatron.md.
        """
        # With this option Megatron frees the rows of dispatch after the forward of the experts, which keep
        # what they take for their backward. It expects a permutation here, whose result is other memory.
        if self.config.overlap_moe_expert_parallel_comm:
            hidden_states = hidden_states.clone()
        return hidden_states, self.dispatched_probs

    def get_restored_hidden_states_by_experts(self, hidden_states):
        """Return what combine takes: the experts' rows.

        Args:
            hidden_states: [M, H].

        Returns:
            [M, H].

        Examples:
            See docs/megatron.md.
        """
        return hidden_states

    def get_number_of_tokens_per_expert(self):
        """Return the rows of each local expert, with padding, [L] int64 on the CPU.

        Examples:
            See docs/megatron.md.
        """
        return self.tokens_per_expert


def _use_experts():
    """Let --moe-grouped-gemm mean EpmoeGroupedMLP."""
    from .megatron_experts import EpmoeGroupedMLP

    for provider in (LocalSpecProvider, TESpecProvider):
        made = provider.grouped_mlp_modules
        if getattr(made, "is_epmoe", False):
            continue
        check_methods("megatron-core", provider,
                      grouped_mlp_modules="self moe_use_grouped_gemm moe_use_legacy_grouped_gemm")

        @functools.wraps(made)
        def modules(self, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm, made=made):
            if moe_use_grouped_gemm:
                return EpmoeGroupedMLP, None
            return made(self, moe_use_grouped_gemm, moe_use_legacy_grouped_gemm)

        modules.is_epmoe = True
        provider.grouped_mlp_modules = modules


def use(experts=False):
    """Let Megatron-core make an EpmoeManager for each flex token dispatcher from now on.

    Call it on every rank before the model is made, and set --moe-token-dispatcher-type flex and leave
    --moe-flex-dispatcher-backend at its default, deepep.  DeepEP is then neither needed nor used.  A second
    call does nothing.

    Args:
        experts: Whether --moe-grouped-gemm makes EpmoeGroupedMLP from now on, in the specifications of
            Transformer Engine and in the local ones.

    Raises:
        ImportError: When Megatron-core's dispatcher is not one for which this adapter was written, and for
            experts=True with megatron-core 0.17 or newer.

    Examples:
        >>> use()
        >>> from megatron.core.transformer.moe import token_dispatcher
        >>> token_dispatcher._DeepepManager is EpmoeManager
        True
    """
    if experts:
        _use_experts()
    made = getattr(_megatron, "_DeepepManager", None)
    if made is EpmoeManager:
        return
    if made is None or not hasattr(_megatron, "MoEFlexTokenDispatcher"):
        raise ImportError("megatron-core has no _DeepepManager or MoEFlexTokenDispatcher: epmoe needs "
                          "megatron-core 0.16 to 0.19")
    check_methods("megatron-core", made, **_CALLED)
    _megatron._DeepepManager = EpmoeManager
