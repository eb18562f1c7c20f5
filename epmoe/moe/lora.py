"""LoRA on the experts of EPMoE: adapters, which of them is active, and their exchange with peft.

With an adapter, the weight W [N, K] of an expert acts as W + s B A, where A is [r, K], B is [N, r], and
s = alpha / r.  The sum of weights is never made.  The rows of an expert are multiplied by W, and by A and B:

    h = rows @ W.T + bias + s * (dropout(rows) @ A.T) @ B.T

lora_products.py computes it, between the dispatch and the combine of EPMoE's stages.  W has no gradient.  So
the backward makes no product for it, and W may have 8 or 4 bits.

    class            what it is
    Factors          A [L, r, K] and B [L, N, r] of a weight, for the L experts of a rank
    Adapter          the Factors of its targets, with r, alpha and dropout
    State            which adapter is active, and what the module had before
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import _C
from ..a2a.base import together
from ..comm import validation
from ..comm.device import integer
from ..torch_modes import writing
from .lora_products import CopiedFactors
from .guards import may_be_sharded
from .shards import fsdp_shards, is_dtensor, joined, sharing, tensors, to_first
from .weights import WEIGHTS

if TYPE_CHECKING:
    from ..a2a.layer import EPAll2AllLayer
    from ..a2a.layout import Layout
    from ..comm.nodes import Nodes
    from ..comm.world import World
    from .module import EPMoE

_MOST_CHARACTERS = 64  # of the name of an adapter
_DTYPES = torch.float32, torch.float16, torch.bfloat16


# ---- adapters ----


class Factors(nn.Module):
    """The two factors of what an adapter adds to a weight [L, N, K].

    Attributes:
        lora_A: A parameter [L, r, K].
        lora_B: A parameter [L, N, r].
    """

    def __init__(self, shape: tuple[int, int, int], r: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        num, n, k = shape
        self.lora_A = nn.Parameter(torch.empty(num, r, k, dtype=dtype, device=device), False)
        self.lora_B = nn.Parameter(torch.zeros(num, n, r, dtype=dtype, device=device), False)


class Adapter(nn.Module):
    """What an adapter adds to the experts of a rank.

    The factors of a target are under its name, for example adapter.down_proj.lora_A.

    Attributes:
        targets: The names of the weights that it changes.
        r: The rank of what it adds to each.
        alpha: s * r.
        scaling: s.
        dropout: The probability with which a number of the rows is zero in the product with A, in training.
    """

    def __init__(self, moe: EPMoE, r: int, alpha: float, targets: tuple[str, ...], dropout: float,
                 dtype: torch.dtype) -> None:
        super().__init__()
        self.r, self.alpha, self.targets, self.dropout = r, alpha, targets, dropout
        for name in targets:
            self.add_module(name, Factors(moe._shapes[name], r, dtype, moe.layer.device))

    @property
    def scaling(self) -> float:
        return self.alpha / self.r

    def factors(self, name: str) -> Factors | None:
        """Return the factors of a weight, or None for one that the adapter leaves alone."""
        return cast("Factors | None", self._modules.get(name))

    def fill(self, seed: int, held: list[int]) -> None:
        """Give A the numbers of nn.Linear, for each expert others, and B zeros.

        held: the experts of this rank, or -1.  The numbers of an expert depend on the seed and its number.
        """
        for i, e in enumerate(held):
            generator = torch.Generator(next(self.parameters()).device)
            generator.manual_seed(seed + e)
            for name in self.targets:
                a = cast(Factors, self.factors(name)).lora_A.detach()[i]
                bound = 1 / math.sqrt(a.shape[1])  # kaiming_uniform_ with a = sqrt(5), as in peft
                if e < 0:
                    a.zero_()
                else:
                    a.uniform_(-bound, bound, generator=generator)

    def extra_repr(self) -> str:
        """Return the numbers for the module's repr."""
        return f"r={self.r}, alpha={self.alpha}, dropout={self.dropout}"


@dataclasses.dataclass
class State:
    """Which adapter of a module is active.

    Attributes:
        active: Its name, or None.
        mixed: The names of the adapters of which each token has its own, or ().
        trained: {name: requires_grad} of the parameters that an active adapter freezes, as they were before.
        factors: The factors of the merged adapter that required gradients before.
        unmerged: {name: the weight before the adapter was added to it, on the CPU}; empty if none is merged.
        copied: The factors of `mixed` in one tensor, or None: not copied yet.
    """

    active: str | None = None
    mixed: tuple[str, ...] = ()
    trained: dict[str, bool] = dataclasses.field(default_factory=dict)
    unmerged: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    factors: list[nn.Parameter] = dataclasses.field(default_factory=list)
    copied: CopiedFactors | None = None

    def adapters(self, moe: EPMoE) -> list[Adapter]:
        """Return the adapters of `mixed`."""
        return [adapters_of(moe)[name] for name in self.mixed]

    def copied_factors(self, moe: EPMoE) -> CopiedFactors:
        """Return the factors of `mixed`, as the parameters are now."""
        if self.copied is None or not self.copied.fits(moe):
            self.copied = CopiedFactors(moe, self.adapters(moe))
        self.copied.update(always=may_be_sharded(moe))  # FSDP2 fills parameters and counts no version
        return self.copied


def adapters_of(moe: EPMoE) -> dict[str, Adapter]:
    """Return {name: adapter} of a module."""
    found = moe._modules.get("adapters")
    return {} if found is None else cast("dict[str, Adapter]", dict(cast(nn.ModuleDict, found).items()))


def adapter_of_call(moe: EPMoE) -> Adapter | None:
    """Return the adapter whose products forward adds, or None: none is active, or the weights have it."""
    state = moe._lora
    if state is None or state.active is None or state.unmerged:
        return None
    return adapters_of(moe)[state.active]


def mixture_of_call(moe: EPMoE) -> list[Adapter]:
    """Return the adapters of which each token has its own, or []."""
    return [] if moe._lora is None else moe._lora.adapters(moe)


def adapters_of_call(moe: EPMoE) -> list[Adapter]:
    """Return the adapters whose products forward adds."""
    adapter = adapter_of_call(moe)
    return mixture_of_call(moe) if adapter is None else [adapter]


def is_active(moe: EPMoE) -> bool:
    """Whether forward adds products of adapters."""
    state = moe._lora
    return state is not None and not state.unmerged and (state.active is not None or bool(state.mixed))


def check_unmerged(moe: EPMoE, what: str) -> None:
    """Raise RuntimeError where the weights of a module have an adapter, for a time, perhaps another's."""
    for module in sharing(moe):
        if module._lora is not None and module._lora.unmerged:
            whose = "this EPMoE" if module is moe else "this EPMoE, which another one has, too,"
            raise RuntimeError(f"{what}: the weights of {whose} hold the adapter {module._lora.active!r} "
                               f"now: call its unmerge_adapter() first")


# ---- calls of all ranks ----


def agree(world: World | Nodes, mine: str) -> None:
    """Raise EpMismatch on all ranks if they make different calls.  Collective."""
    validation.agree(world, mine,
                     "rank {rank} called {its}, rank 0 {first}. Make the same call on all ranks.")


def check_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of an adapter: wanted a text, got {type(name).__name__}")
    if not name or "." in name or len(name) > _MOST_CHARACTERS or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"the name of an adapter, {name!r}: must have 1 to {_MOST_CHARACTERS} characters "
                         f"and no dot, and cannot be the name of an attribute of torch.nn.ModuleDict")
    return name


def _known(moe: EPMoE, name: Any) -> Adapter:
    adapters = adapters_of(moe)
    if check_name(name) not in adapters:
        raise ValueError(f"no adapter {name!r}: this EPMoE has {sorted(adapters) or 'none'}")
    return adapters[name]


def _check_module(moe: EPMoE, what: str) -> None:
    """Raise an error for a module that cannot have adapters."""
    if moe.computes_fp8:
        raise ValueError(f"{what}: not with compute_dtype in FP8: leave compute_dtype out, or give the "
                         f"frozen weights FP8 by weight_dtype=torch.float8_e4m3fn")
    if moe.recompute_gate_up:
        raise ValueError(f"{what}: not with recompute_gate_up: the product of an adapter with gate and up is "
                         f"kept, so leave it out")
    if moe._has_other_gradients:
        raise ValueError(f"{what}: not with delay_wgrad_compute or fuse_wgrad_accumulation: the weights have "
                         f"no gradients beside an adapter, so leave these options out")
    if hasattr(moe, "unshard") or any(is_dtensor(p) for p in tensors(moe)):
        raise RuntimeError(f"{what}: FSDP has sharded this EPMoE: call it before fully_shard")


def _check_sizes(moe: EPMoE, r: Any, alpha: Any, targets: Any, dropout: Any,
                 dtype: Any) -> tuple[int, float, tuple[str, ...], float, torch.dtype]:
    """Return the arguments of add_adapter, or raise an error."""
    r = integer("r", r)
    if r < 1:
        raise ValueError(f"r {r}: must be positive")
    alpha, dropout = float(alpha), float(dropout)
    if not math.isfinite(alpha):
        raise ValueError(f"alpha {alpha}: must be finite")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout}: must be at least 0 and less than 1")
    given = (targets,) if isinstance(targets, str) else tuple(targets)
    if not given or set(given) - set(WEIGHTS):
        raise ValueError(f"targets {given}: must be one or both of {', '.join(WEIGHTS)}")
    dtype = moe.layer.dtype if dtype is None else dtype
    if dtype not in _DTYPES:
        raise TypeError(f"dtype {dtype} of an adapter: must be torch.float32, float16 or bfloat16")
    return r, alpha, tuple(name for name in WEIGHTS if name in given), dropout, dtype


def _add(moe: EPMoE, name: Any, r: Any, alpha: Any, targets: Any, dropout: Any, dtype: Any,
         seed: int) -> Adapter:
    """Check the arguments, and add an adapter.  seed: of its numbers; see Adapter.fill."""
    what = "add_adapter"
    _check_module(moe, what)
    if check_name(name) in adapters_of(moe):
        raise ValueError(f"{what}: this EPMoE has an adapter {name!r} already")
    numbers = _check_sizes(moe, r, alpha, targets, dropout, dtype)
    with torch.inference_mode(False), torch.no_grad():
        adapter = Adapter(moe, *numbers)
        adapter.fill(seed, moe._held)
    adapter.train(moe.training)
    if "adapters" not in moe._modules:
        moe.add_module("adapters", nn.ModuleDict())
        moe._lora = State()
    cast(nn.ModuleDict, moe._modules["adapters"])[name] = adapter
    return adapter


def remove(moe: EPMoE, name: str) -> None:
    state, adapters = moe._lora, cast(nn.ModuleDict, moe._modules["adapters"])
    assert state is not None
    if name == state.active or name in state.mixed:
        _activate(moe, None)
    del adapters[name]
    if not adapters:
        del moe._modules["adapters"]
        moe._lora = None


def _activate(moe: EPMoE, name: str | None, mixed: tuple[str, ...] = ()) -> None:
    """Let forward use an adapter, several, or none, and let exactly what trains then require gradients."""
    state = moe._lora
    if state is None:
        return
    base = {n: p for n, p in moe.named_parameters() if not n.startswith("adapters.")}
    shards = fsdp_shards(moe)  # of which FSDP2 takes requires_grad

    def require(p: nn.Parameter, grad: bool) -> None:
        for t in (p, shards.get(id(p))):
            if t is not None:
                t.requires_grad_(grad)

    freezes = name is not None or bool(mixed)
    if freezes and not state.trained:
        state.trained = {n: p.requires_grad for n, p in base.items()}
    for n, p in base.items():
        if freezes:
            require(p, False)
        elif state.trained.get(n):
            require(p, True)
    if not freezes:
        state.trained = {}
    state.active, state.mixed, state.copied = name, mixed, None
    moe._checked_ddp = 0  # a DistributedDataParallel averages what trained when it was made
    for other, adapter in adapters_of(moe).items():
        for p in adapter.parameters():
            require(p, other == name)


def _put_back(moe: EPMoE, before: Mapping[str, Tensor]) -> None:
    """Give weights the numbers that they had before an adapter was merged."""
    for name, t in before.items():
        weight = getattr(moe, name).detach()
        with writing([weight]):
            weight.copy_(t)


def _merge(moe: EPMoE, adapter: Adapter) -> None:
    """Add an adapter to the weights."""
    for name in adapter.targets:
        weight, factors = getattr(moe, name).detach(), cast(Factors, adapter.factors(name))
        with writing([weight]):
            for i in range(len(weight)):
                a, b = factors.lora_A[i].float(), factors.lora_B[i].float()
                with torch.autocast(weight.device.type, enabled=False):  # which would round the factors
                    whole = torch.addmm(weight[i].float(), b, a, alpha=adapter.scaling)
                weight[i] = whole.to(weight.dtype)


# ---- peft ----

# peft puts one wrapper around the module for each of its parameters, in their order.  So the names of the
# first one, inside, have one more "base_layer".  B of all experts is [N, r * E], with the experts innermost.
_OUTER, _INNER = "", "base_layer."


def _key(wrapper: str, factor: str) -> str:
    return f"{wrapper}lora_{factor}.weight"


def keys_of(name: str, targets: tuple[str, ...]) -> tuple[str, str]:
    """Return peft's names of A and B of a weight, of an adapter with these targets."""
    wrapper = _INNER if len(targets) > 1 and name == WEIGHTS[0] else _OUTER
    return _key(wrapper, "A"), _key(wrapper, "B")


def _to_peft(name: str, targets: tuple[str, ...], a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return peft's tensors of a weight.  a: [E, r, K] of all experts.  b: [E, N, r]."""
    of_a, of_b = keys_of(name, targets)
    return {of_a: a.flatten(0, 1).contiguous(), of_b: b.permute(1, 2, 0).flatten(1, 2).contiguous()}


def _shapes_in_peft(moe: EPMoE, name: str, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    _, n, k = moe._shapes[name]
    return (r * moe.num_experts, k), (n, r * moe.num_experts)


def _from_peft(moe: EPMoE, state: Mapping[str, Tensor], prefix: str,
               targets: tuple[str, ...] | None) -> tuple[int, dict[str, tuple[Tensor, Tensor]]]:
    """Return r and {weight: (A [E, r, K], B [E, N, r])} of a state dict of peft.

    targets: those of the adapter, or None: as the shapes say.
    """
    own = {key.removeprefix(prefix): t for key, t in state.items() if key.startswith(prefix)}
    wrappers = [w for w in (_INNER, _OUTER) if _key(w, "A") in own or _key(w, "B") in own]
    wanted = {_key(w, factor) for w in wrappers for factor in "AB"}
    if not wrappers or set(own) != wanted:
        few = sorted(own)[:4]
        raise ValueError(f"wanted the tensors {sorted(wanted) or [_key(_OUTER, 'A'), _key(_OUTER, 'B')]} "
                         f"after {prefix!r}, got {few if few else 'none'}{', ..' if len(own) > 4 else ''}: "
                         f"prefix= must be what peft's names have before them")
    pairs = {w: (own[_key(w, "A")], own[_key(w, "B")]) for w in wrappers}
    for w, pair in pairs.items():
        for factor, t in zip("AB", pair):
            if not isinstance(t, Tensor) or t.dim() != 2 or not t.dtype.is_floating_point:
                raise ValueError(f"{prefix}{_key(w, factor)}: wanted a tensor of two dimensions and a "
                                 f"floating-point dtype")
    shapes = {w: (tuple(a.shape), tuple(b.shape)) for w, (a, b) in pairs.items()}
    rows = {a[0] for a, _ in shapes.values()} | {b[1] for _, b in shapes.values()}
    r = min(rows) // moe.num_experts
    if len(rows) > 1 or r < 1 or r * moe.num_experts not in rows:
        raise ValueError(f"the tensors have {sorted(rows)} rows of A or columns of B: must all have r for "
                         f"each of the {moe.num_experts} experts")
    found = []
    # peft of before 0.19 took N for K and K for N, where a weight is [E, N, K]: B A is then transposed
    for names, swapped in itertools.product(itertools.permutations(WEIGHTS, len(wrappers)), (False, True)):
        if targets is not None and set(names) != set(targets):
            continue
        want = [_shapes_in_peft(moe, name, r) for name in names]
        if swapped:
            want = [((b[1], b[0]), (a[1], a[0])) for a, b in want]
        if [shapes[w] for w in wrappers] == want:
            found.append((names, swapped))
    if not found:
        raise ValueError(f"the tensors are {list(shapes.values())}, which fits no adapter of "
                         f"{' and '.join(targets or WEIGHTS)} with {moe.num_experts} experts")
    if targets is None and len({frozenset(names) for names, _ in found}) > 1:
        raise ValueError("the tensors fit each of the two weights: pass targets=")
    names, swapped = found[0]
    whole = {}
    for w, name in zip(wrappers, names):
        a, b = pairs[w]
        a, b = a.unflatten(0, (moe.num_experts, r)), b.unflatten(1, (r, moe.num_experts))
        if swapped:
            whole[name] = b.permute(2, 1, 0), a.transpose(1, 2)
        else:
            whole[name] = a, b.permute(2, 0, 1)
    return r, whole


def _copy(moe: EPMoE, adapter: Adapter, whole: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Give an adapter the factors of this rank's experts.  whole: of all experts."""
    for name, pair in whole.items():
        factors = cast(Factors, adapter.factors(name))
        own = factors.lora_A.detach(), factors.lora_B.detach()
        with writing(own):
            for to, t in zip(own, pair):
                for i, e in enumerate(moe._held):
                    if e >= 0:
                        to[i].copy_(t[e])


# ---- the methods of EPMoE ----


# Methods of EPMoE, under these names; active_adapter and is_merged are properties.


def active_adapter(moe: EPMoE) -> str | None:
    """The name of the adapter that forward uses, or None."""
    return None if moe._lora is None else moe._lora.active


def is_merged(moe: EPMoE) -> bool:
    """Whether the weights hold the active adapter: see merge_adapter."""
    return moe._lora is not None and bool(moe._lora.unmerged)


def leaves_of_call(moe: EPMoE) -> tuple[Tensor, ...]:
    """Return the factors that a call of forward uses."""
    adapter = adapter_of_call(moe)
    return () if adapter is None else tuple(adapter.parameters())


def add_adapter(moe: EPMoE, name: str, r: int, alpha: float,
                targets: Sequence[str] = WEIGHTS, dropout: float = 0.0,
                dtype: torch.dtype | None = None) -> None:
    """Add a LoRA adapter to the experts, which set_adapter then makes the active one.  Collective.

    For each target it adds parameters to the module: adapters.NAME.TARGET.lora_A [L, r, K], which starts
    uniform in +-1/sqrt(K), as in peft, and lora_B [L, N, r], which starts at zero.  With the same seed on
    all ranks, they do not depend on W.  Call it before prepare_ddp and prepare_fsdp.

    Args:
        name: A name without dots.
        r: The rank of what the adapter adds to each weight, at least 1.
        alpha: The adapter is multiplied by alpha / r.
        targets: "gate_up_proj", "down_proj" or both.
        dropout: The probability with which a number of the rows is taken as zero in the adapter's
            product, in training.
        dtype: Of the parameters and the products of the adapter: float32, float16 or bfloat16; None: the
            layer's.

    Raises:
        ValueError: On this rank, for an argument out of range, a name that is taken, and for a module
            with compute_dtype, recompute_gate_up, delay_wgrad_compute or fuse_wgrad_accumulation.
        TypeError: On this rank, for a wrong type or dtype.
        RuntimeError: On this rank, after fully_shard.
        PeerError: On the other ranks, when one rank raises one of these.
        EpMismatch: On all ranks, when they make different calls.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> moe.add_adapter("a", r=4, alpha=8)
        >>> moe.set_adapter("a")
        >>> [name for name, p in moe.named_parameters() if p.requires_grad][:2]
        ['adapters.a.gate_up_proj.lora_A', 'adapters.a.gate_up_proj.lora_B']
        >>> moe.finalize()

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; target_parameters of peft.
    """
    adapter, seed = None, int(torch.randint(1 << 40, (), device="cpu"))  # also on a rank that then fails
    try:
        with together(moe.layer.world):
            adapter = _add(moe, name, r, alpha, targets, dropout, dtype, seed)
        agree(moe.layer.world, f"add_adapter({name!r}, r={adapter.r}, alpha={adapter.alpha}, targets="
                               f"{adapter.targets}, dropout={adapter.dropout}, dtype={dtype})")
    except BaseException:
        if adapter is not None:
            remove(moe, name)
        raise


def set_adapter(moe: EPMoE, name: str | Sequence[str] | None) -> None:
    """Let forward use an adapter, none, or for each token another one.  Collective.

    With an adapter its parameters require gradients.  Those of the experts and of the other adapters
    require none, and get none.  With None, the experts' parameters require gradients as they did before
    the first adapter became active.

    With a list of names, forward needs adapters=, the number of each token's adapter in the list.  It
    then has no gradients, and nothing requires any.

    Args:
        name: The name of an adapter, a list of names, or None.

    Raises:
        ValueError: On this rank, for a name that no adapter has, and for a list of adapters of different
            dtypes.
        RuntimeError: On this rank, while an adapter is merged.
        EpError: As add_adapter.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, dtype=torch.float32, device="cpu")
        >>> moe.add_adapter("a", r=4, alpha=8)
        >>> moe.set_adapter("a")
        >>> moe.active_adapter, moe.down_proj.requires_grad
        ('a', False)
        >>> moe.set_adapter(None)
        >>> moe.active_adapter, moe.down_proj.requires_grad
        (None, True)
        >>> moe.finalize()
    """
    with together(moe.layer.world):
        check_unmerged(moe, "set_adapter")
        names = () if name is None else (name,) if isinstance(name, str) else tuple(name)
        if name is not None and not names:
            raise ValueError("set_adapter: an empty list: pass None for no adapter")
        dtypes = {next(_known(moe, one).parameters()).dtype for one in names}
        if len(dtypes) > 1 or len(set(names)) < len(names):
            raise ValueError(f"set_adapter: the adapters {list(names)} must be different ones of one "
                             f"dtype")
    agree(moe.layer.world, f"set_adapter({name if name is None or isinstance(name, str) else names!r})")
    if name is None or isinstance(name, str):
        _activate(moe, name)
    else:
        _activate(moe, None, names)


def remove_adapter(moe: EPMoE, name: str) -> None:
    """Remove an adapter and its parameters.  Collective.

    If it is the active one, none is active afterwards.

    Args:
        name: The name of an adapter.

    Raises:
        ValueError: On this rank, for a name that no adapter has.
        RuntimeError: On this rank, while an adapter is merged.
        EpError: As add_adapter.

    Examples:
        >>> import epmoe
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu")
        >>> moe.add_adapter("a", r=4, alpha=8)
        >>> moe.remove_adapter("a")
        >>> len(list(moe.parameters()))
        2
        >>> moe.finalize()
    """
    with together(moe.layer.world):
        check_unmerged(moe, "remove_adapter")
        _known(moe, name)
    agree(moe.layer.world, f"remove_adapter({name!r})")
    remove(moe, name)


def merge_adapter(moe: EPMoE, unload: bool = False) -> None:
    """Add the active adapter to the weights, so that forward needs no product of it.  Collective.

    Each sum is computed in float32 and rounded once.  forward then takes the same way as without an
    adapter, with the fused kernels.  Until unmerge_adapter, a copy of the weights before is in the memory
    of the host, and there is no state_dict() or load_state_dict().

    Args:
        unload: True: for good.  No copy is kept, the adapter is removed, and the weights require
            gradients as they did before it became active.

    Raises:
        ValueError: On this rank, where no adapter is active, and for weights in FP8 or 4 bits, which
            would have to be quantised again.
        RuntimeError: On this rank, where the adapter is merged already, where another EPMoE with the same
            weights has an adapter active, where a parametrization or pruning computes a weight, and after
            fully_shard.
        EpError: As add_adapter.

    Examples:
        >>> import epmoe
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu")
        >>> moe.add_adapter("a", r=4, alpha=8)
        >>> moe.set_adapter("a")
        >>> moe.merge_adapter()
        >>> moe.is_merged
        True
        >>> moe.unmerge_adapter()
        >>> moe.finalize()
    """
    before = dict[str, Tensor]()
    with together(moe.layer.world):
        what = "merge_adapter"
        check_unmerged(moe, what)
        adapter = adapter_of_call(moe)
        if adapter is None:
            raise ValueError(f"{what}: no adapter is active: call set_adapter first")
        if not moe._format.has_gradients:
            raise ValueError(f"{what}: weights in {moe._format.title} would have to be quantised again: "
                             f"use the adapter without a merge, or merge it into weights of 16 bits")
        if moe._computed:
            raise RuntimeError(f"{what}: {', '.join(moe._computed)} of this EPMoE: computed by a "
                               f"parametrization or pruning: remove it first")
        _check_module(moe, what)
        for other in sharing(moe)[1:]:
            if is_active(other):
                raise RuntimeError(f"{what}: another EPMoE has the same weights, and would add the product "
                                   f"of its own adapter to them: call its set_adapter(None) first")
    agree(moe.layer.world, f"merge_adapter({bool(unload)}) of {moe.active_adapter!r}")
    try:
        with together(moe.layer.world):
            for target in adapter.targets:
                before[target] = getattr(moe, target).detach().to("cpu", copy=True)
            _merge(moe, adapter)
    except BaseException:
        _put_back(moe, before)
        raise
    state, name = moe._lora, moe.active_adapter
    assert state is not None and name is not None
    if unload:
        remove(moe, name)
    else:
        state.unmerged = before
        state.factors = [p for p in adapter.parameters() if p.requires_grad]
        adapter.requires_grad_(False)


def unmerge_adapter(moe: EPMoE) -> None:
    """Give the weights the numbers that they had before merge_adapter, bit for bit.  Collective.

    Raises:
        RuntimeError: On this rank, where no adapter is merged.
        EpError: As add_adapter.

    Examples:
        See merge_adapter.

        >>> import epmoe
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu")
        >>> moe.unmerge_adapter()
        Traceback (most recent call last):
        RuntimeError: unmerge_adapter: no adapter is merged: call merge_adapter first
        >>> moe.finalize()
    """
    state = moe._lora
    with together(moe.layer.world):
        if state is None or not state.unmerged:
            raise RuntimeError("unmerge_adapter: no adapter is merged: call merge_adapter first")
    agree(moe.layer.world, "unmerge_adapter()")
    _put_back(moe, state.unmerged)
    state.unmerged = {}
    for p in state.factors:
        p.requires_grad_()
    state.factors = []


def adapter_state_dict(moe: EPMoE, name: str) -> dict[str, Tensor]:
    """Return an adapter of all experts with the names and shapes of peft.  Collective.

    They are those that peft's files have for an experts module of transformers whose gate_up_proj and
    down_proj are target_parameters (peft 0.19 and newer), after the path of the module:

        base_layer.lora_A.weight    of gate_up_proj [r * E, H]
        base_layer.lora_B.weight    of gate_up_proj [2I, r * E]
        lora_A.weight               of down_proj [r * E, I]
        lora_B.weight               of down_proj [H, r * E]

    With one target, its tensors have no "base_layer.".  In A the numbers of an expert are rows one after
    the other; in B column c belongs to the expert c mod E.

    Args:
        name: The name of an adapter.

    Returns:
        On rank 0 a dict of tensors on the CPU; on the others {}.

    Raises:
        ValueError: On this rank, for a name that no adapter has.
        RuntimeError: On this rank, after fully_shard.
        EpError: As add_adapter.

    Examples:
        >>> import epmoe
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu")
        >>> moe.add_adapter("a", r=4, alpha=8, targets=["down_proj"])
        >>> {key: list(t.shape) for key, t in moe.adapter_state_dict("a").items()}
        {'lora_A.weight': [8, 32], 'lora_B.weight': [16, 8]}
        >>> moe.finalize()

    References:
        ParamWrapper of peft, src/peft/tuners/lora/layer.py.
    """
    with together(moe.layer.world):
        adapter = _known(moe, name)
        _check_module(moe, "adapter_state_dict")
    agree(moe.layer.world, f"adapter_state_dict({name!r})")
    found: dict[str, Tensor] = {}
    for target in adapter.targets:
        factors = cast(Factors, adapter.factors(target))
        a, b = (_of_all_experts(moe, t) for t in (factors.lora_A, factors.lora_B))
        if a is not None and b is not None:
            found |= _to_peft(target, adapter.targets, a, b)
    return found


def load_adapter(moe: EPMoE, name: str, state: Mapping[str, Tensor], *, alpha: float | None = None,
                 prefix: str = "", targets: Sequence[str] | None = None, dropout: float = 0.0,
                 dtype: torch.dtype | None = None) -> None:
    """Load an adapter of all experts, as adapter_state_dict returns it and peft saves it.  Collective.

    Each rank takes the factors of its experts, on any number of ranks.  An adapter of this name is
    overwritten in place, else one is added.  Files of peft before 0.19 are recognised by their shapes,
    and their factors are exchanged: there, A and B of weights [E, N, K] have the places of each other.
    Where N = K, shapes do not tell, and the file is taken for one of a newer peft.

    Args:
        name: The name of the adapter.
        state: {key: tensor}, the same on all ranks.
        alpha: Of a new adapter, lora_alpha in peft's adapter_config.json; with use_rslora multiplied by
            sqrt(r).  None: as the adapter has it.
        prefix: What the keys have before those of adapter_state_dict, for example
            "base_model.model.model.layers.0.mlp.experts."; other keys are left out.
        targets: Of a new adapter; None: as the shapes say.
        dropout: Of a new adapter, as for add_adapter.
        dtype: Of a new adapter, as for add_adapter.

    Raises:
        ValueError: On this rank, for tensors that do not fit, for a new adapter without alpha, and as
            add_adapter.  Nothing was loaded.
        RuntimeError: On this rank, while an adapter is merged, and after fully_shard.
        EpError: As add_adapter.

    Examples:
        >>> import epmoe
        >>> moe = epmoe.EPMoE(16, 32, num_experts=2, topk=1, device="cpu")
        >>> moe.add_adapter("a", r=4, alpha=8)
        >>> moe.load_adapter("b", moe.adapter_state_dict("a"), alpha=8)
        >>> bool((moe.adapters.a.down_proj.lora_A == moe.adapters.b.down_proj.lora_A).all())
        True
        >>> moe.finalize()
    """
    is_new = False
    try:
        with together(moe.layer.world):
            what = "load_adapter"
            check_unmerged(moe, what)
            _check_module(moe, what)
            old = adapters_of(moe).get(check_name(name))
            wanted = None if targets is None else _check_sizes(moe, 1, 1, targets, 0, None)[2]
            r, whole = _from_peft(moe, state, prefix, wanted if old is None else old.targets)
            if old is None and alpha is None:
                raise ValueError(f"{what}: {name!r} is a new adapter: pass alpha=, which is lora_alpha "
                                 f"in peft's adapter_config.json")
            if old is not None and old.r != r:
                raise ValueError(f"{what}: the adapter {name!r} has r = {old.r}, but the tensors have "
                                 f"{r}: remove_adapter first")
            if old is not None and alpha not in (None, old.alpha):
                raise ValueError(f"{what}: the adapter {name!r} has alpha = {old.alpha}, not {alpha}: "
                                 f"leave alpha out, or remove_adapter first")
            if old is None:
                old = _add(moe, name, r, alpha, tuple(whole), dropout, dtype, 0)  # overwritten below
                is_new = True
        agree(moe.layer.world, f"load_adapter({name!r}, r={r}, alpha={old.alpha}, targets="
                               f"{old.targets}, dropout={old.dropout}, dtype={dtype})")
        _copy(moe, old, whole)
    except BaseException:
        if is_new:
            remove(moe, name)
        raise


def _of_all_experts(moe: EPMoE, p: Tensor) -> Tensor | None:
    """Return [E, ..] of all experts on rank 0, else None.  Collective.  p: [L, ..]."""
    parts = to_first(moe.layer.world, p)
    if not parts:
        return None
    whole = joined(torch.cat, parts)
    if moe.expert_map is not None:
        whole = whole[moe.expert_map.logical_to_physical_map[:, 0].cpu()]
    return whole
