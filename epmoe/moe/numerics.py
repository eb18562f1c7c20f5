"""What the bits of an EPMoE's results depend on: see docs/numerics.md."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from .. import _C
from ..comm.device import capabilities
from ..comm.nodes import Nodes
from . import experts as experts_ops, lora

if TYPE_CHECKING:
    from ..a2a.layer import EPAll2AllLayer
    from ..comm.world import World
    from .module import EPMoE


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What epmoe promises for the bits of a module's results.

    Attributes:
        batch_invariant: The output of a token, its gradient and those of its routing weights do not depend on
            the other tokens: their number, order and ranks, max_tokens, capacity, the SMs, fused kernels or
            stages, prefill or decoding, a call or a CUDA graph.
        trains_as_it_infers: A forward with gradients has the bits of one without.
        rank_invariant: The results, with the gradients of the parameters, do not depend on the number of
            ranks, nor on which rank has which expert.
        reasons: For each of the three that is False, {its name: why}.

    Examples:
        See numerics.
    """

    batch_invariant: bool
    trains_as_it_infers: bool
    rank_invariant: bool
    reasons: dict[str, str]


def numerics(moe: EPMoE) -> Numerics:
    """Return what epmoe promises for the bits of a module's results, as it is now.  Not collective.

    Tests keep each promise (docs/numerics.md names them).  What is not promised can hold nevertheless.

    Args:
        moe: The module.

    Returns:
        A Numerics.

    Examples:
        >>> import epmoe
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu")
        >>> epmoe.numerics(moe).batch_invariant
        True
        >>> epmoe.numerics(moe).reasons
        {'rank_invariant': 'each rank adds up its rows of a token and rounds: pass rank_invariant=True'}
        >>> moe.finalize()
    """
    of_products = _products_reason(moe)
    of_batch = of_products or _replicas_reason(moe) or _balance_reason(moe) or (
        "with token_saving=False decoding adds up and multiplies otherwise than prefill"
        if moe.layer._copies > 1 else "")
    of_ranks = (of_products or _helped_gradients_reason(moe) or (
        "with token_saving=False the number of ranks decides whether a call decodes, with other products"
        if moe.layer._copies > 1 else "")) if moe.rank_invariant else (
        "each rank adds up its rows of a token and rounds: pass rank_invariant=True")
    with torch.no_grad():
        weights = moe._weights()
    of_training = of_batch
    adapters = lora.adapters_of_call(moe)
    if lora.mixture_of_call(moe):
        of_training = "a mixture of adapters has no gradients"
    elif adapters:
        if not of_batch and adapters[0].dropout:
            of_training = "the adapter has dropout, which only training has"
    elif not moe._format.has_gradients:
        of_training = f"experts in {moe._format.title} have no gradients"
    elif not of_batch and not (moe.computes_fp8 or experts_ops.is_one_call(
            getattr(moe.layer, "team_layer", moe.layer), weights)):
        of_training = ("a training step with token_saving=False, or with weights that are not contiguous, "
                       "applies the activation to the rounded product")
    reasons = {"batch_invariant": of_batch, "rank_invariant": of_ranks, "trains_as_it_infers": of_training}
    return Numerics(**{name: not reason for name, reason in reasons.items()},
                    reasons={name: reason for name, reason in reasons.items() if reason})


def _products_reason(moe: EPMoE) -> str:
    """Return why a row of a product may depend on the other rows, or ""."""
    layer, on_gpu = moe.layer, moe.layer.device.type == "cuda"
    adapters = lora.adapters_of_call(moe)
    if torch.float32 in (layer.dtype, *(p.dtype for adapter in adapters for p in adapter.parameters())):
        return "products in float32 are those of torch, whose bits depend on the number of rows"
    if not lora.mixture_of_call(moe) and any(a.dropout and a.training for a in adapters):
        return "the adapter has dropout, whose mask depends on the number of rows"
    if not on_gpu and (moe.is_fp8 or moe.computes_fp8):
        return "on the CPU products in FP8 are those of torch, whose bits depend on the number of rows"
    if on_gpu and not experts_ops.fits_kernels(*(n for shape in moe._shapes.values() for n in shape[1:])):
        return "products with sizes that are no multiples of 16 are those of torch"
    if on_gpu and not capabilities(layer.device).has_hopper:
        return "not tested on GPUs other than those of compute capability 9.0"
    return ""


def _replicas_reason(moe: EPMoE) -> str:
    """Return why the sum of a token may depend on its place in the batch, or ""."""
    holds = [expert for expert in moe._holds if expert >= 0]
    if not moe.rank_invariant and len(set(holds)) < len(holds):
        return ("the place of a token in the batch chooses the replica of an expert, and each rank rounds "
                "its sum: pass rank_invariant=True")
    return ""


def _balance_reason(moe: EPMoE) -> str:
    """Return why helpers make the sum of a token depend on the batch, or ""."""
    if moe.balance is not None and moe.layer._config.combine_mode == _C.COMBINE_LOCAL:
        return ("the rows of the batch choose the ranks that help, and each rank rounds its sum: pass "
                "rank_invariant=True")
    return ""


def _helped_gradients_reason(moe: EPMoE) -> str:
    return "" if moe.balance is None else (
        "ranks that help round their parts of the gradients of parameters; outputs do not depend on it")


def check_rank_invariant(world: World | Nodes, layer: EPAll2AllLayer | None) -> None:
    """Raise ValueError where rank_invariant is impossible.  layer: that of other modules, or None."""
    if isinstance(world, Nodes):
        raise ValueError("rank_invariant over several nodes: the sum of each node is rounded before it "
                         "leaves the node: use one node")
    if layer is not None and layer._config.combine_mode == _C.COMBINE_LOCAL:
        raise ValueError("rank_invariant, but the shared layer adds up the rows of each rank first: create "
                         "it with enable_local_combine=False")
