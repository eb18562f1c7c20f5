"""balance= of EPMoE: in each call, ranks with few rows compute rows of the experts that have most.

The last physical experts of each rank are helper slots.  They hold no expert of their own.  In a call:

1. The plan brings the counts of all ranks to each host.  Each computes the same list of helps from them
   (csrc/protocol/balance.h).  If it is empty, the call goes on as always.
2. The ranks of the helped experts copy the weights to the helpers, into symmetric memory.  This memory is
   `layer.staging`; it has room for the experts of the helper slots of a rank.
3. A second plan sends the choices to the slots.  Its operation is a barrier, too: after it each helper copies
   the weights from its staging into the rows of its parameters that are its slots.
4. Dispatch, products and combine run as in any call.  They know nothing of helps.

All this is one call of the module (csrc/layer/experts.c, balance.c).

Slots keep what they got.  In calls without gradients an expert does not travel to a slot that holds it, as
long as no rank has changed a weight since.  A table says what the slots hold, the same one on all ranks
(Held).  Each rank says in its balance_key whether its own table still counts.

Backward: if another forward has written the slots since, or the products read copies of the weights, the
weights travel again (restore).  The gradients of the slots then return to the experts: each helper copies
them into its staging.  After a barrier the experts' ranks add them to their own, in the order of the slots.

Ranks help each other only where all can.  One that must show its operations to a profiler or a compiler
cannot, nor can one that will have gradients of other weights than the rest, or whose products alone read
copies of the weights.  A number in the headers of the plan says so (balance_key).

When may a rank write the staging of another?  After an operation that this one entered after its last access
to it: each rank enters an operation in stream order.  So a forward writes after the first plan, restore()
after a barrier, and return_gradients() after the operations of the backward.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from .. import _C
from ..comm.device import integer, stream_of
from ..comm.error_propagation import reporting
from ..comm.heap import SymmetricHeap
from ..comm.nodes import Nodes
from ..comm.world import World
from .weights import WEIGHTS, count_steps, num_steps

if TYPE_CHECKING:
    from ..a2a.layer import EPAll2AllLayer
    from .experts import Weights
    from .module import EPMoE
    from .weights import WeightFormat

__all__ = ["Balance"]
_Places: TypeAlias = "list[tuple[weakref.WeakValueDictionary[int, Helps | Held], int]]"
_ALIGNMENT = 256  # bytes, of each weight in the staging
# So many rows take as long to multiply as the weights of their expert take to travel: a row needs 2
# operations for each parameter, which has 2 bytes.  An H200 has about 700 TFLOP/s and 350 GB/s.
_MIN_ROWS = {"cuda": 2048, "cpu": 16}


@dataclasses.dataclass(frozen=True)
class Balance:
    """How an EPMoE balances the rows of its ranks in each call.

    In calls without gradients helpers keep the weights that they got, until a weight changes.  A change that
    torch does not count needs EPMoE.requantize().

    Args:
        slots: Helper slots of each rank, at least 1: experts of other ranks of which it can compute rows at
            the same time.  Each takes the memory of an expert three times: as a part of the parameters, of
            their gradients, and in symmetric memory.
        min_rows: The fewest rows with which an expert goes to a slot.  None: as many as take as long as its
            weights take to travel, 2048 on CUDA and 16 on the CPU.

    Raises:
        ValueError: For numbers below 1.

    Examples:
        >>> import epmoe
        >>> epmoe.Balance(slots=3)
        Balance(slots=3, min_rows=None)
    """

    slots: int = 2
    min_rows: int | None = None

    def __post_init__(self) -> None:
        if integer("slots", self.slots) < 1:
            raise ValueError(f"slots {self.slots}: must be at least 1")
        if self.min_rows is not None and integer("min_rows", self.min_rows) < 1:
            raise ValueError(f"min_rows {self.min_rows}: must be at least 1, or None")


def check(balance: Balance | Literal["auto"] | None, world: World | Nodes, format: WeightFormat,
          dtype: torch.dtype, **options: object) -> Balance | None:
    """Return the Balance of an EPMoE, or raise for one that it cannot have.

    options: of EPMoE, by name, that must have no value.
    """
    if balance is None:
        return None
    if isinstance(balance, str) and balance == "auto":
        balance = Balance()
    if not isinstance(balance, Balance):
        raise TypeError(f"balance: wanted an epmoe.Balance, \"auto\" or None, got {balance!r}")
    if isinstance(world, Nodes):
        raise ValueError("balance over several nodes: weights travel inside of a node only: leave it out")
    if not format.has_gradients or dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"balance: wanted weights in bfloat16 or float16, got "
                         f"{dtype if format.has_gradients else format.title}")
    wrong = [name for name, value in options.items() if value]
    if wrong:
        raise ValueError(f"balance with {', '.join(wrong)}: not possible together: leave one of them out")
    return balance


class Staging:
    """Symmetric memory through which the weights and gradients of helper slots travel; see above.

    Attributes:
        balance: Of the modules that share the layer.
        num_bytes: Of a slot.
    """

    def __init__(self, world: World, device: torch.device, balance: Balance, num_bytes: int) -> None:
        self.balance, self.num_bytes = balance, num_bytes
        self._heap = SymmetricHeap(world, balance.slots * num_bytes + _ALIGNMENT, device)
        try:
            self._memory = self._heap.malloc_symmetric((balance.slots, num_bytes), torch.uint8, _ALIGNMENT)
        except Exception:
            self._heap.close()
            raise

    def parts(self, slot: int, weights: Weights,
              dtype: torch.dtype | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each weight [L, ..]: (the weight, room for one expert's part of it in a slot).

        dtype: of the room; None: that of the weight.
        """
        at = 0
        for w in weights:
            if w is not None:
                size = w[0].numel() * (dtype or w.dtype).itemsize
                yield w, self._memory[slot, at:at + size].view(dtype or w.dtype).view(w.shape[1:])
                at += aligned(size)

    def give_to(self, layer: EPAll2AllLayer) -> None:
        """Let the calls of a layer send weights through it."""
        _C.layer_set_staging(layer._c, self._heap._c, self._heap.offset(self._memory), self.num_bytes,
                             self.balance.slots)

    def at(self, room: Tensor, rank: int) -> Tensor:
        """Return the same room at another rank."""
        return self._heap.peer_view(room, rank)

    def close(self) -> None:
        self._heap.close()


def check_layer(balance: Balance | None, layer: EPAll2AllLayer) -> None:
    """Raise ValueError if a module with balance cannot share a layer."""
    its = None if layer.staging is None else layer.staging.balance
    if balance is not None and balance != its:
        raise ValueError(f"{balance}: the module that created the shared layer has {its}: give both the same")


def check_staging(balance: Balance | None, layer: EPAll2AllLayer, weights: Weights, fuses: bool) -> None:
    """Raise ValueError if the experts of a module do not fit the staging of the layer that it shares."""
    if balance is not None and bytes_of_expert(weights, fuses) > _staging(layer).num_bytes:
        raise ValueError("balance: the experts are larger than those of the module that created the shared "
                         "layer: create the layer with the module of the largest experts")


def make_staging(balance: Balance, layer: EPAll2AllLayer, weights: Weights, fuses: bool) -> None:
    """Give a layer the staging for modules with such weights.  Collective."""
    assert isinstance(layer.world, World)
    layer.staging = Staging(layer.world, layer.device, balance, bytes_of_expert(weights, fuses))
    layer.staging.give_to(layer)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def bytes_of_expert(weights: Weights, fuses: bool) -> int:
    """Return the bytes of a slot of the staging.  fuses: gradients travel in float32."""
    return sum(aligned(w[0].numel() * (4 if fuses else w.element_size())) for w in weights if w is not None)


class Held:
    """What the helper slots of a module hold, for calls without gradients.

    Attributes:
        table: [E + 1, 2] int32 on the CPU, with physical experts: `held` of csrc/protocol/ops.h.
    """

    __slots__ = ("table", "_places", "_versions", "__weakref__")

    def __init__(self, layer: EPAll2AllLayer) -> None:
        num = layer.world.size * layer.num_local_experts
        with torch.inference_mode(False):  # calls outside of that mode write it, too
            self.table = torch.zeros(num + 1, 2, dtype=torch.int32, device="cpu")
        self._places: _Places = []
        self._versions: list[int] = []

    def counts(self, places: _Places, weights: Weights) -> bool:
        """Whether slots of this rank hold what the table says, and its weights are those that traveled."""
        versions = _versions(weights)
        return (bool(versions) and versions == self._versions and bool(self.table[-1, 0])
                and len(places) == len(self._places)  # of the latest call: the table is of its slots alone
                and all(held is its and address == its_address and held.get(address) is self
                        for (held, address), (its, its_address) in zip(places, self._places)))

    def forget(self) -> None:
        self._versions = []

    def note(self, places: _Places, weights: Weights) -> None:
        """After a call: from now on the table counts, if all ranks have it."""
        self._places, self._versions = places, _versions(weights)
        for held, address in places:
            held[address] = self


class Helps:
    """The helps of one call.

    Attributes:
        list: [(physical expert, helper slot: a physical expert too, number of rows)], by slot, the same on
            all ranks.
        wanted: Of which of the four Weights the backward has gradients; of none without a backward.
        places: Of the weights in whose slots they put experts: (_held(weight), its address).  Empty if the
            products of the forward read copies of parameters.
    """

    __slots__ = ("list", "wanted", "places", "_slots", "__weakref__")

    def __init__(self, helps: list[tuple[int, int, int]], wanted: Sequence[bool], places: _Places,
                 slots: int) -> None:
        self.list, self.wanted = sorted(helps, key=lambda help: help[1]), wanted
        self.places = places
        self._slots = slots

    def begin_backward(self) -> bool:
        """Return whether the slots still hold what they held in the forward.

        If not, they must be restored.  All ranks agree, because they run the same forwards and backwards in
        the same order, and note what the slots hold before they do anything that could fail on one rank.
        """
        hold = bool(self.places) and all(held.get(address) is self for held, address in self.places)
        if not hold:
            _forget(self.places)
        return hold

    def are_in(self, weights: Weights) -> bool:
        """Whether weights are those of the places: no program has given the parameters other memory."""
        return all(any(held is its and address == its_address for its, its_address in self.places)
                   for held, address in _places(weights))

    def by_rank(self, local: int) -> list[tuple[int, int, int]]:
        """Return [(logical expert, rank that helped, number of rows)].  local: L."""
        return [(e // local * (local - self._slots) + e % local, slot // local, rows)
                for e, slot, rows in self.list]


class Balancer:
    """Runs the helps of an EPMoE.

    Attributes:
        balance: As passed.
        min_rows: That of balance, or the one of the device.
    """

    def __init__(self, balance: Balance, layer: EPAll2AllLayer, fuses: bool) -> None:
        self._gradient_dtype = torch.float32 if fuses else None  # in the staging; main_grad may have it
        self.balance = balance
        self.min_rows = balance.min_rows or _MIN_ROWS[layer.device.type]
        self._held = Held(layer)
        count_steps()

    def forget(self, moe: EPMoE) -> None:
        """Mark as unknown what the slots hold for a backward.  EPMoE does it at the start of each call.

        All ranks must do it in the same call, also if one of them then raises an error, or takes another
        way than the others.  Else a later backward finds that they disagree.
        """
        params = [moe._parameters.get(name + end) for name in WEIGHTS for end in ("", "_bias")]
        _forget([(_held(p), p.data_ptr()) for p in params if type(p) is torch.nn.Parameter], Helps)

    def forget_weights(self) -> None:
        """Let the next call send weights that slots hold already."""
        self._held.forget()

    def options(self, wanted: Sequence[bool], weights: Weights, parameters: Weights,
                saves: bool) -> tuple[Tensor, int, int, int]:
        """Begin a call.  Returns held, helper_slots, min_helped_rows and balance_key of csrc/protocol/ops.h.

        wanted: see Helps.  weights: those that the products read: the parameters or copies.  saves: for a
        backward.
        """
        places, are_read = _places(parameters), _are_read(parameters, weights)
        holds = are_read and not saves and self._held.counts(places, parameters)
        _forget(places)
        if not holds:
            self._held.forget()
            self._held.table[-1, 0] = 0  # only a call in which all ranks begin anew sets it
        bits = self._gradient_dtype is not None, are_read, *wanted
        key = 1 + sum(bit << i for i, bit in enumerate(bits)) | (_C.BALANCE_HOLDS if holds else 0)
        return self._held.table, self.balance.slots, self.min_rows, key

    def helps(self, layer: EPAll2AllLayer, buffer: int, wanted: Sequence[bool], weights: Weights,
              parameters: Weights, saves: bool) -> Helps | None:
        """Return the helps of the latest call of layer_experts, or None: no rank helped.

        The arguments are as in options.
        """
        found = _C.layer_helps(layer._c, buffer)
        places = _places(parameters) if _are_read(parameters, weights) else []
        if places and not saves:
            self._held.note(places, parameters)
        if not found:
            return None
        helps = Helps(found, wanted, places, self.balance.slots)
        if saves:
            for held, address in places:
                held[address] = helps
        return helps

    def restore(self, layer: EPAll2AllLayer, buffer: int, plan: Tensor, helps: Helps,
                weights: Weights) -> None:
        """Before a backward: let the slots hold what they held in its forward.  Collective.

        weights: those that the products read.  Autograd need not know that they are written: this comes
        before each use.
        """
        gate_up, gate_up_bias, down, down_bias = weights
        _forget(_places(weights))
        _C.layer_restore_weights(layer._c, buffer, plan, helps.list, gate_up, gate_up_bias, down, down_bias)

    def return_gradients(self, layer: EPAll2AllLayer, buffer: int, plan: Tensor, helps: Helps,
                         grads: Sequence[Tensor | None], weights: Weights) -> None:
        """Add the gradients of the helper slots to those of the experts, and set them to zero.  Collective.

        grads: [L, ..], of each weight: those of this backward, or main_grad, to which it has added them.  A
            rank that has none of a weight sends zeros.
        """
        staging, local, rank = _staging(layer), layer.num_local_experts, layer.rank
        with reporting(layer, _C.OP_BARRIER, buffer, plan):
            for _, slot, _ in helps.list:
                if slot // local == rank:
                    for (_, room), grad in zip(self._rooms(staging, slot % local - local, weights),
                                               _given(grads, weights)):
                        if grad is None:
                            room.zero_()
                        else:
                            room.copy_(grad[slot % local])
                            grad[slot % local].zero_()
            _barrier(layer, buffer)
        sums: dict[int, list[Tensor | None]] = {}
        for expert, slot, _ in helps.list:
            if expert // local == rank:
                i = expert % local
                sums.setdefault(i, [None if g is None else g[i].float() for g in _given(grads, weights)])
                for (_, room), total in zip(self._rooms(staging, slot % local - local, weights), sums[i]):
                    if total is not None:
                        total += staging.at(room, slot // local)
        for i, totals in sums.items():
            for grad, total in zip(_given(grads, weights), totals):
                if grad is not None and total is not None:
                    grad[i] = total

    def _rooms(self, staging: Staging, slot: int, weights: Weights) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the parts of a slot for gradients."""
        return staging.parts(slot, weights, self._gradient_dtype)


def count(layer: EPAll2AllLayer, helps: Helps, rows: Tensor) -> Tensor:
    """Return rows [L] of this rank's physical experts as they were without the helps."""
    local, moved = layer.num_local_experts, [0] * layer.num_local_experts
    for expert, slot, num in helps.list:
        if expert // local == layer.rank:
            moved[expert % local] += num
        if slot // local == layer.rank:
            moved[slot % local] -= num
    by_expert = torch.tensor(moved, dtype=rows.dtype, device="cpu", pin_memory=rows.device.type == "cuda")
    return rows + by_expert.to(rows.device, non_blocking=True)  # pinned: the host does not wait


def _are_read(parameters: Weights, weights: Weights) -> bool:
    """Whether weights, which the products read, are the parameters and not copies."""
    return all(w is p for w, p in zip(weights, parameters))


def _held(weight: Tensor) -> weakref.WeakValueDictionary[int, Helps | Held]:
    """Return {address of a weight: the helps, or Held, that its slots hold}, of all weights in a storage.

    It belongs to the storage, because modules can have weights in common, and an address is used again when
    its memory was freed.
    """
    found: weakref.WeakValueDictionary[int, Helps | Held] = weight.untyped_storage().__dict__.setdefault(
        "_epmoe_helps", weakref.WeakValueDictionary())
    return found


def _places(weights: Weights) -> _Places:
    return [(_held(w), w.data_ptr()) for w in weights if w is not None]


def _forget(places: _Places, kind: type = object) -> None:
    """Note that it is not known what the slots hold, where a note of this kind says it."""
    for held, address in places:
        if isinstance(held.get(address), kind):
            held.pop(address, None)


def _versions(weights: Weights) -> list[int]:
    """Return how often torch has seen weights change and optimizers step, or [] if it does not count."""
    if any(w is not None and w.is_inference() for w in weights):
        return []
    return [num_steps(), *(w._version for w in weights if w is not None)]


def _given(grads: Sequence[Tensor | None], weights: Weights) -> list[Tensor | None]:
    """Return the gradients of the weights that there are."""
    return [g for g, w in zip(grads, weights) if w is not None]


def _staging(layer: EPAll2AllLayer) -> Staging:
    assert layer.staging is not None  # of a layer whose EPMoE has a Balancer
    return layer.staging


def _barrier(layer: EPAll2AllLayer, buffer: int) -> None:
    _C.layer_barrier(layer._c, buffer, stream_of(layer.device))
