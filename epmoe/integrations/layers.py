"""What the adapters for training frameworks share: communication layers that grow, and padded rows.

Letters: W ranks, E experts, L = E / W, T tokens of this rank, K choices, H hidden, M rows received.
"""

import importlib.metadata
import inspect

import torch

from ..a2a.layer import EPAll2AllLayer
from ..comm.world import World, thread_worlds
from ..errors import EpIndexError, EpMismatch, EpOverflow, EpTimeout, PeerDied

_alone = []  # the world of this process alone, once there is one
# What layers of one kind have in common -> those layers, the largest last.  All are kept: a backward may
# still use a smaller one.
_layers = {}


def world_of(group):
    """Return the World of a group.  The first call for a group is collective.

    Args:
        group: As for make_layer.

    Returns:
        A World; for None that of this process alone, also under torch.distributed.

    Raises:
        ValueError, TypeError, EpError: As World.of.

    Examples:
        >>> from epmoe.integrations.layers import world_of
        >>> world_of(None).size
        1
    """
    if group is not None:
        return World.of(group)
    if not _alone:
        _alone.extend(thread_worlds(1))
    return _alone[0]


def _forget_ended_worlds():
    """Drop the layers of worlds that have ended."""
    for kind in list(_layers):
        try:
            kind[0].check()
        except EpError:
            del _layers[kind]


def make_layer(group, max_tokens, hidden, topk, num_experts, dtype, device, **options):
    """Return a layer for at least max_tokens: one of its kind that exists, or a new one.  Collective.

    Modules of one kind share their layers.  Without enable_local_combine=False, sums are made at the expert's
    rank first, so that one row for each (token, rank) returns.

    Args:
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for this process alone.
        max_tokens: The most tokens of a rank in one call, the same on all ranks.
        hidden: H.
        topk: K.
        num_experts: E.
        dtype: Of the tokens.
        device: Of the tokens, a torch.device.
        **options: Others of EPAll2AllLayer, for example expert_alignment and host_counts.

    Returns:
        An EPAll2AllLayer.

    Raises:
        ValueError, TypeError, EpError: As EPAll2AllLayer.

    Examples:
        >>> from epmoe.integrations.layers import make_layer
        >>> layer = make_layer(None, 8, 16, 2, 4, torch.float32, torch.device("cpu"))
        >>> make_layer(None, 5, 16, 2, 4, torch.float32, torch.device("cpu")) is layer
        True
    """
    kind = world_of(group), hidden, topk, num_experts, dtype, device, *sorted(options.items())
    if kind not in _layers:
        _forget_ended_worlds()
    layers = _layers.setdefault(kind, [])
    if not layers or layers[-1].max_tokens < max_tokens:
        layers.append(EPAll2AllLayer(kind[0], max_tokens, hidden, topk, num_tot_experts=num_experts,
                                     dtype=dtype, device=device,
                                     **{"enable_local_combine": True} | options))
    return layers[-1]


def _most_tokens(world, num_tokens):
    """Return the largest num_tokens of any rank.  Collective."""
    return max(int.from_bytes(b, "little") for b in world.exchange(num_tokens.to_bytes(8, "little")))


def dispatch(group, x, idx, weight, num_experts, **options):
    """Send tokens to their experts' ranks, in a layer that is large enough on every rank.  Collective.

    The first call of a kind makes a layer for the most tokens of any rank.  Where a later call has more
    tokens on some rank, that rank propagates the error, and so all ranks learn of it in the same call: they
    make a larger layer and repeat the call.  Until then agreeing costs nothing.

    Args:
        group: As for make_layer.
        x: [T, H] of float32, float16 or bfloat16, contiguous.
        idx: [T, K] int32 or int64, contiguous: the experts of each token; -1 and E mean none.
        weight: [T, K] of a floating-point dtype.
        num_experts: E.
        **options: As for make_layer.

    Returns:
        A tuple (rows, row_weights, layout), as EPAll2AllLayer.dispatch.

    Raises:
        ValueError, TypeError, EpError: As EPAll2AllLayer and its dispatch.

    Examples:
        >>> from epmoe.integrations.layers import dispatch
        >>> x, idx, weight = torch.ones(3, 16), torch.tensor([[1], [0], [1]]), torch.ones(3, 1)
        >>> rows, row_weights, layout = dispatch(None, x, idx, weight, 2)
        >>> layout.tokens_per_expert.tolist()
        [1, 2]
    """
    num_tokens = x.shape[0]
    shape = x.shape[1], idx.shape[1], num_experts, x.dtype, x.device
    world = world_of(group)
    known = _layers.get((world, *shape, *sorted(options.items())))
    if known is None:
        known = [make_layer(group, max(1, _most_tokens(world, num_tokens)), *shape, **options)]
    try:
        return known[-1].dispatch(x, idx, weight)
    except Exception as error:
        # These are raised on all ranks. Any other error is of one rank. The others get a PeerError, and wait
        # for this rank in _most_tokens.
        if isinstance(error, (EpIndexError, EpMismatch, EpOverflow, EpTimeout, PeerDied)):
            raise
        most = _most_tokens(world, num_tokens)
        if most <= known[-1].max_tokens:
            raise
    # At least twice as large, so that all layers together take less than twice the memory of the largest.
    larger = make_layer(group, max(most, 2 * known[-1].max_tokens), *shape, **options)
    return larger.dispatch(x, idx, weight)


# ---- rows of each expert padded to a multiple ----


def padded_counts(counts, multiple, least=0):
    """Return counts, each rounded up to a multiple.

    Args:
        counts: [L] of an integer dtype.
        multiple: At least 1.
        least: What an expert without rows gets: 0, or multiple.

    Returns:
        [L] of the same dtype.

    Examples:
        >>> from epmoe.integrations.layers import padded_counts
        >>> padded_counts(torch.tensor([3, 0, 8]), 4).tolist()
        [4, 0, 8]
        >>> padded_counts(torch.tensor([3, 0, 8]), 4, least=4).tolist()
        [4, 4, 8]
    """
    return ((counts + multiple - 1) // multiple * multiple).clamp_min(least)


def padded_places(counts, padded, num_rows):
    """Return where each row is when the rows of each expert are followed by padding.

    Args:
        counts: [L]: the rows of each expert.
        padded: [L]: the same with padding, as padded_counts returns it.
        num_rows: M, the sum of counts.

    Returns:
        [M] int64, ascending.

    Examples:
        >>> from epmoe.integrations.layers import padded_places
        >>> padded_places(torch.tensor([1, 2]), torch.tensor([4, 4]), 3).tolist()
        [0, 4, 5]
    """
    shift = (padded - counts).cumsum(0) - (padded - counts)  # the padding of all experts before
    return (torch.arange(num_rows, device=counts.device)
            + shift.repeat_interleave(counts, output_size=num_rows))


def pad_rows(rows, places, num_padded):
    """Return [num_padded, ..], where the rows are at places and all others are zero.  Differentiable.

    rows.index_select(0, places) of the result is the inverse.

    Args:
        rows: [M, ..].
        places: [M] int64, as padded_places returns it.
        num_padded: At least the sum of the padded counts.

    Returns:
        [num_padded, ..] of the dtype of rows.

    Examples:
        >>> from epmoe.integrations.layers import pad_rows
        >>> pad_rows(torch.tensor([5.0, 6.0]), torch.tensor([0, 2]), 4).tolist()
        [5.0, 0.0, 6.0, 0.0]
    """
    return rows.new_zeros(num_padded, *rows.shape[1:]).index_copy(0, places, rows)


# ---- extension points ----


def _version(package):
    """Return the version of a distribution, for a message."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # it runs from its source tree
        return "of unknown version"


def check_methods(package, cls, **parameters):
    """Raise if methods of a class do not have the parameters for which its adapter was written.

    Args:
        package: The name of the distribution, for the message.
        cls: The class.
        **parameters: name of the method = names of its parameters, as one text.

    Raises:
        ImportError: With the method, its parameters, those that were expected, and the version.

    Examples:
        >>> from epmoe.integrations.layers import check_methods
        >>> check_methods("torch", EPAll2AllLayer, combine="self input layout weight")
    """
    for name, expected in parameters.items():
        method = getattr(cls, name, None)
        found = " ".join(inspect.signature(method).parameters) if method else "missing"
        if found != expected:
            raise ImportError(f"{package} {_version(package)}: {cls.__name__}.{name} has "
                              f"changed: its parameters are ({found}), and epmoe's adapter was written for "
                              f"({expected}); install the version that epmoe's documentation names")
