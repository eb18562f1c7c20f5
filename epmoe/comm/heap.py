"""SymmetricHeap: the same bytes on every rank, which every other rank can reach."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from .. import _C
from ..errors import EpClosed
from ..torch_modes import check_writable, mark_written
from .device import integer, pick_device, status_of, stream_of
from .world import Shared, World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_MAX_ALIGNMENT = 1 << 21
_NO_OFFSET = (1 << 63) - 1  # where no allocation can begin
# torch dtype -> (DLPack type code, bits)
DL_TYPES = {torch.float32: (2, 32), torch.float64: (2, 64), torch.float16: (2, 16), torch.bfloat16: (4, 16),
            torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
            torch.uint8: (1, 8)}


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in DL_TYPES:
        raise TypeError(f"dtype {dtype}: must be one of {', '.join(str(d) for d in DL_TYPES)}")


def check_tensor(t: Tensor) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"wanted a tensor, got {type(t).__name__}")
    if t.is_meta or t.layout is not torch.strided:
        raise ValueError(f"wanted a dense tensor with memory, got "
                         f"{'a meta tensor' if t.is_meta else t.layout}")


def _flat(t: Tensor) -> Tensor:
    """Return a contiguous tensor as the module takes it: with at most 4 dimensions."""
    return t if t.dim() <= 4 else t.view(-1)


class _Capsule:
    """The interface that torch.from_dlpack needs."""

    def __init__(self, capsule: _C._DLPackCapsule, device: torch.device) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **kwargs: Any) -> _C._DLPackCapsule:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device.index) if self._device.type == "cuda" else (1, 0)


class SymmetricHeap(Shared):
    """A block of memory on every rank, mapped by all ranks, with one allocator that runs in step.

    Because all ranks allocate in the same order, a tensor has the same offset in every rank's heap.  So a
    rank can address the same tensor of a peer.

    Creation is collective.  It tests that each pair of ranks can write and read each other's memory.

    Copies, signals, waits and barriers follow the order of the current stream.  On the CPU each of them
    raises its own errors.  On CUDA they return before they have run: an error, such as a wait that times out,
    is raised by the next of them or by synchronize().

    Each tensor of malloc_symmetric keeps the heap's memory alive.  Only close() gives the memory back: a heap
    on a GPU that is dropped without close() keeps its block while its world lives, because a peer may still
    use it.  A heap is also a context manager, which closes it unless an exception leaves the block.

    Args:
        world: A World, a ProcessGroup, a one-dimensional DeviceMesh, or None for the default group.  The
            layers and heaps of a group share its world.
        num_bytes: Bytes on each rank that can be allocated, equal on all ranks.  Default: 64 MiB.
        device: "cpu", "cuda", "cuda:1", a torch.device, or None.  None: the device type of EPMOE_BACKEND,
            else the current GPU where there is a GPU and a CUDA build, else the CPU.

    Attributes:
        world: The World of the heap.
        device: The torch.device of the heap.

    Raises:
        EpMismatch: On all ranks, when they ask for different sizes or kinds of device.
        HeapExhausted: On all ranks, when one of them has no room.
        EpError: On all ranks, for a pair that cannot write and read each other; the message names the pair.
        ValueError: On this rank, for a wrong size or device.
        TypeError: On this rank, for an argument of the wrong type.
        PeerError: On the other ranks, when one rank raises ValueError or TypeError.
        PeerDied: On all surviving ranks, when a rank dies.
        EpTimeout: On all ranks, when one does not make the call before the timeout.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> from epmoe.testing import run_threads
        >>> def main(world):
        ...     with epmoe.SymmetricHeap(world, 1 << 20, device="cpu") as heap:
        ...         box = heap.malloc_symmetric((world.size,), torch.int32)
        ...         for peer in range(world.size):
        ...             heap.put(box[world.rank], torch.tensor(world.rank, dtype=torch.int32), peer)
        ...         heap.barrier()
        ...         return box.tolist()
        >>> run_threads(main, 2)
        [[0, 1], [0, 1]]

    References:
        The symmetric heap and `malloc_symmetric` follow "My first Multi-GPU kernel: Writing All-to-all for
        AMD MI300X", a worklog on GPU MODE's AMD Distributed Challenge.
    """

    def __init__(self, world: World | ProcessGroup | DeviceMesh | None = None, num_bytes: int = 1 << 26,
                 device: torch.device | str | None = None) -> None:
        self.world = World.of(world)
        try:
            self.device = pick_device(device)
            num_bytes = int(num_bytes)
            if not 0 <= num_bytes < 1 << 64:  # the module takes 64 bits, and checks the rest
                raise ValueError(f"a heap of {num_bytes} bytes: must be more than 0 and less than 2^64")
        except Exception as error:
            self._propagate(self.world, error)
            raise
        kind = _C.CUDA if self.device.type == "cuda" else _C.CPU
        self._c = _C.heap_create(self.world._c, kind, self.device.index or 0, num_bytes, 0)
        # Of each allocation of malloc_symmetric, by its offset: its bytes, and the identity of its storage.
        self._allocations: dict[int, tuple[int, int]] = {}
        self._scopes: list[list[int]] = []  # the offsets that each open scope() frees

    @staticmethod
    def _propagate(world: World, error: Exception) -> None:
        """Tell the other ranks, which are creating a heap, that this rank cannot."""
        with contextlib.suppress(Exception):
            _C.heap_create(world._c, _C.CPU, 0, 1, status_of(error))

    def malloc_symmetric(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32,
                         alignment: int = 128) -> Tensor:
        """Allocate a tensor, filled with zeros, at the same offset of every rank's heap.

        Collective: all ranks make the same calls in the same order, with the same size.

        Args:
            shape: A size, or a sequence of at most 8 sizes.  At most 2^46 bytes.
            dtype: float32, float64, float16, bfloat16, int8, int16, int32, int64 or uint8.
            alignment: Of the address in bytes, a power of two up to 2 MiB.  Default: 128.

        Returns:
            A tensor on the heap's device, over this rank's part.  A tensor without elements takes no memory
                of the heap.

        Raises:
            EpMismatch: On all ranks, when they ask for different sizes in bytes or alignments, or are in
                different calls.
            HeapExhausted: On all ranks, when the heap has no room.  The message has the needed and free
                bytes.
            TypeError: On this rank, for another dtype.
            ValueError: On this rank, for a wrong shape or alignment.
            PeerError: On the other ranks, when one rank raises TypeError or ValueError.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> heap.malloc_symmetric((2, 3))
            tensor([[0., 0., 0.],
                    [0., 0., 0.]])
        """
        try:
            shape = (shape,) if isinstance(shape, int) else tuple(integer("shape", d) for d in shape)
            alignment = integer("alignment", alignment)
            check_dtype(dtype)
            if any(d < 0 for d in shape) or len(shape) > 8:
                raise ValueError(f"shape {shape}: must have at most 8 sizes, none negative")
            if alignment < 1 or alignment & (alignment - 1) or alignment > _MAX_ALIGNMENT:
                raise ValueError(f"alignment {alignment}: must be a power of two up to 2 MiB")
            num_bytes = math.prod(shape) * DL_TYPES[dtype][1] // 8
            if num_bytes > 1 << 46:
                raise ValueError(f"shape {shape}: too large, must have at most 2^46 bytes")
        except Exception as error:
            self._propagate_alloc(error)
            raise
        off = _C.heap_alloc(self._c, num_bytes, alignment, 0)
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self._scopes:
            self._scopes[-1].append(off)
        tensor = self._view(off, self.world.rank, shape, dtype)
        self._allocations[off] = num_bytes, tensor.untyped_storage()._cdata
        return tensor

    def _propagate_alloc(self, error: Exception) -> None:
        """Tell the other ranks, which are making an allocation, that this rank cannot."""
        with contextlib.suppress(Exception):
            _C.heap_alloc(self._c, 1, 128, status_of(error))

    def free(self, tensor: Tensor) -> None:
        """Give back the memory of a tensor of malloc_symmetric.  Collective.

        The tensor must not be used after that.

        Args:
            tensor: The tensor that malloc_symmetric returned, on all ranks the one of the same call.

        Raises:
            EpMismatch: On all ranks, when they free different tensors or are in different calls.
            ValueError: On this rank, for what is not an allocation of this heap, or was freed before.
            TypeError: On this rank, for what is not a tensor.
            PeerError: On the other ranks, when one rank raises ValueError or TypeError.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> heap.free(heap.malloc_symmetric(100))
            >>> heap.stats()["num_allocations"]
            0
        """
        try:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"free: wanted a tensor of this heap, got {type(tensor).__name__}")
            off = self.offset(tensor) if tensor.numel() else 0  # no memory, but all ranks agree on it
            num_bytes = tensor.numel() * tensor.element_size()
            if tensor.numel():
                self._check_allocation(tensor, off, num_bytes)
        except Exception:
            with contextlib.suppress(Exception):  # tells the other ranks; this rank raises its own reason
                _C.heap_free(self._c, _NO_OFFSET)
            raise
        _C.heap_free(self._c, off)
        self._allocations.pop(off, None)
        for scope in self._scopes:
            if off in scope:
                scope.remove(off)

    @contextlib.contextmanager
    def scope(self) -> Iterator[SymmetricHeap]:
        """Return a context manager that frees what is allocated inside it.  Its end is collective.

        An exception passes through without the frees, because the other ranks may be in another call.  What
        was allocated inside then stays until all ranks free it, or until the heap's close.

        Yields:
            The heap.

        Raises:
            EpError: At the end of the block, those of free.

        Examples:
            >>> import epmoe
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> with heap.scope():
            ...     t = heap.malloc_symmetric(100)
            >>> heap.stats()["used"]
            0
        """
        self._scopes.append([])
        try:
            yield self
        except BaseException:
            self._scopes.pop()
            raise
        for off in reversed(self._scopes.pop()):
            _C.heap_free(self._c, off)
            self._allocations.pop(off, None)

    def _check_allocation(self, tensor: Tensor, off: int, num_bytes: int) -> None:
        """Raise ValueError for what is not a tensor of malloc_symmetric, or was freed."""
        wanted, storage = self._allocations.get(off, (0, 0))
        if not wanted:
            raise ValueError(f"free: no allocation begins at offset {off}: pass the tensor that "
                             f"malloc_symmetric returned, once")
        if wanted != num_bytes:
            raise ValueError(f"free: the tensor is a part of an allocation, {num_bytes} of {wanted} bytes: "
                             f"pass the one that malloc_symmetric returned")
        # A tensor that is still held keeps its storage, so a newer one at its offset has another.
        if storage != tensor.untyped_storage()._cdata:
            raise ValueError("free: the tensor was freed before, or is not the one that malloc_symmetric "
                             "returned: another one is at its offset now")

    def _view(self, off: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.from_dlpack(_Capsule(_C.heap_tensor(self._c, off, rank, shape, *DL_TYPES[dtype]),
                                          self.device))

    def offset(self, tensor: Tensor) -> int:
        """Return the distance in bytes from the heap's base to the tensor's data.

        Args:
            tensor: A tensor in this rank's part of the heap, or a view of one.

        Returns:
            The offset, an int.  It is the same on all ranks.

        Raises:
            ValueError: For a tensor that is not in this heap.
            TypeError: For what is not a tensor.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> t = heap.malloc_symmetric((4, 8))
            >>> heap.offset(t[2]) - heap.offset(t)
            64
        """
        check_tensor(tensor)
        return _C.heap_offset(self._c, tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def translate(self, tensor: Tensor, peer: int) -> int:
        """Return the address, in this process, of the same tensor in a peer's heap.  Not collective.

        Args:
            tensor: A tensor in this rank's part of the heap, or a view of one.
            peer: The rank, 0 to W - 1.

        Returns:
            The address, an int: pointer - own base + peer's base.

        Raises:
            ValueError: For a tensor that is not in this heap, or a peer that is not a rank.
            TypeError: For what is not a tensor.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> t = heap.malloc_symmetric(4)
            >>> heap.translate(t, 0) == t.data_ptr()
            True

        References:
            "My first Multi-GPU kernel: Writing All-to-all for AMD MI300X", a worklog on GPU MODE's AMD
            Distributed Challenge.
        """
        return _C.heap_translate(self._c, self.offset(tensor), peer)

    def peer_view(self, tensor: Tensor, peer: int) -> Tensor:
        """Return a tensor over the same tensor in a peer's heap.  Not collective.

        Reading and writing it needs signal and wait, or a barrier, to be in order with the peer.

        Args:
            tensor: A contiguous tensor in this rank's part of the heap, or a contiguous view of one.
            peer: The rank, 0 to W - 1.

        Returns:
            A tensor of the same shape and dtype.

        Raises:
            ValueError: For a tensor that is not in this heap or not contiguous, or a peer that is not a rank.
            TypeError: For what is not a tensor, or has a dtype that malloc_symmetric does not have.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> from epmoe.testing import run_threads
            >>> def main(world):
            ...     with epmoe.SymmetricHeap(world, 1 << 20, device="cpu") as heap:
            ...         t = heap.malloc_symmetric(1)
            ...         t.fill_(world.rank)
            ...         heap.barrier()
            ...         seen = heap.peer_view(t, 1 - world.rank).item()
            ...         heap.barrier()
            ...         return seen
            >>> run_threads(main, 2)
            [1.0, 0.0]
        """
        check_tensor(tensor)
        check_dtype(tensor.dtype)
        if not tensor.is_contiguous():
            raise ValueError("peer_view needs a contiguous tensor: take a contiguous view of the allocation")
        if tensor.numel() == 0:  # it has no place in the heap, as in malloc_symmetric
            return torch.empty_like(tensor)
        off = self.offset(tensor)
        if peer == self.world.rank:  # with the version counter of the tensor, so that autograd sees writes
            return tensor.detach()
        return self._view(off, peer, tuple(tensor.shape), tensor.dtype)

    def put(self, dst: Tensor, src: Tensor, peer: int) -> None:
        """Copy a tensor to a peer, in stream order.  Not collective.

        The copy has no gradient.  Autograd at the peer does not see that a tensor there has changed.

        Args:
            dst: A contiguous tensor in this heap; the copy goes to the same place at the peer.
            src: Any contiguous tensor with as many elements of the same dtype.
            peer: The rank, 0 to W - 1.

        Raises:
            ValueError: For different numbers of elements or dtypes, a tensor that is not contiguous, a dst
                that is not in this heap, a peer that is not a rank, or a copy onto a part of its own source
                (onto the whole of it: nothing happens).  Nothing is copied.
            TypeError: For what is not a tensor.
            RuntimeError: For a dst that requires grad, where peer is this rank and gradients are enabled.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> t = heap.malloc_symmetric(3)
            >>> heap.put(t, torch.arange(3.0), peer=0)
            >>> t
            tensor([0., 1., 2.])
        """
        if self._check_pair(dst, src):
            if peer == self.world.rank:
                check_writable("dst", dst)
                mark_written((dst,))
            _C.heap_put(self._c, self.offset(dst), _flat(src), peer)

    def get(self, dst: Tensor, src: Tensor, peer: int) -> None:
        """Copy a tensor from a peer, in stream order.  Not collective.

        The copy has no gradient.  To autograd it is an in-place operation on dst.

        Args:
            dst: Any contiguous tensor with as many elements of the same dtype.
            src: A contiguous tensor in this heap; the copy comes from the same place at the peer.
            peer: The rank, 0 to W - 1.

        Raises:
            ValueError: As put, with src in the heap.
            TypeError: For what is not a tensor.
            RuntimeError: For a dst that requires grad, where gradients are enabled.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> t = torch.ones(3)
            >>> heap.get(t, heap.malloc_symmetric(3), peer=0)
            >>> t
            tensor([0., 0., 0.])
        """
        if self._check_pair(src, dst):
            check_writable("dst", dst)
            mark_written((dst,))
            _C.heap_get(self._c, self.offset(src), _flat(dst), peer)

    def _check_pair(self, symmetric: Tensor, other: Tensor) -> bool:
        for t in (symmetric, other):
            check_tensor(t)
        if symmetric.dtype != other.dtype or symmetric.numel() != other.numel():
            raise ValueError(f"wanted {symmetric.numel()} elements of {symmetric.dtype}, got {other.numel()} "
                             f"of {other.dtype}")
        if not (symmetric.is_contiguous() and other.is_contiguous()):
            raise ValueError("put and get need contiguous tensors: call contiguous() on the one outside the "
                             "heap")
        return symmetric.numel() > 0

    def _word(self, tensor: Tensor, index: int) -> int:
        check_tensor(tensor)
        if tensor.dtype != torch.int64:
            raise TypeError(f"signals must be int64 tensors, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("signals must be a contiguous tensor, because index counts words in memory")
        if not 0 <= index < tensor.numel():
            raise IndexError(f"index {index}: must be 0 to {tensor.numel() - 1}, the tensor has "
                             f"{tensor.numel()} signals")
        return self.offset(tensor) + 8 * index

    def signal(self, tensor: Tensor, index: int, value: int, peer: int,
               op: Literal["set", "add"] = "set") -> None:
        """Set, or add to, a word of a peer, in stream order: a release at system scope.  Not collective.

        What this rank has put at the peer before is readable there once the peer's wait has seen the word.

        Args:
            tensor: A contiguous int64 tensor in this heap.
            index: The word: its index among the elements of the tensor.
            value: 0 to 2^64 - 1.
            peer: The rank, 0 to W - 1.
            op: "set" or "add".

        Raises:
            IndexError: For an index outside the tensor.
            TypeError: For another dtype, or a value that is not an integer.
            ValueError: For another op, a value or peer out of range, or a tensor that is not in this heap or
                not contiguous.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> words = heap.malloc_symmetric(2, torch.int64)
            >>> heap.signal(words, 1, 5, peer=0, op="add")
            >>> words
            tensor([0, 5])
        """
        if op not in ("set", "add"):
            raise ValueError(f"op {op!r}: must be set or add")
        word = self._word(tensor, index)
        if peer == self.world.rank:
            mark_written((tensor,))
        _C.heap_signal(self._c, word, value, int(op == "add"), peer, stream_of(self.device))

    def wait(self, tensor: Tensor, index: int, value: int, cmp: Literal["ge", "eq"] = "ge") -> None:
        """Wait until a word of this rank has a value, in stream order: an acquire at system scope.

        On CUDA the stream waits, not the host.

        Args:
            tensor: A contiguous int64 tensor in this heap.
            index: The word: its index among the elements of the tensor.
            value: 0 to 2^64 - 1.
            cmp: "ge" waits until word >= value, "eq" until word == value.

        Raises:
            EpTimeout: When the world's timeout is reached.  It ends the world.  On the CPU this call raises
                it; on CUDA the next call on the heap, or synchronize().
            PeerDied: When a rank has died.  It ends the world.  Raised as EpTimeout is.
            IndexError: For an index outside the tensor.
            TypeError: For another dtype, or a value that is not an integer.
            ValueError: For another cmp, a value out of range, or a tensor that is not in this heap or not
                contiguous.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> import torch
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> words = heap.malloc_symmetric(1, torch.int64)
            >>> heap.signal(words, 0, 3, peer=0)
            >>> heap.wait(words, 0, 2)
        """
        if cmp not in ("ge", "eq"):
            raise ValueError(f"cmp {cmp!r}: must be ge or eq")
        _C.heap_wait(self._c, self._word(tensor, index), value, int(cmp == "eq"), stream_of(self.device))

    def barrier(self) -> None:
        """Wait until all ranks have reached this call, in stream order.  Collective.

        After it, what any rank has put before is readable on all ranks.

        Raises:
            EpTimeout: As wait raises it.
            PeerDied: As wait raises it.
            EpMismatch: On all ranks, when they are in different operations (see EpMismatch).
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu").barrier()
        """
        _C.heap_barrier(self._c, stream_of(self.device))

    def device_handle(self) -> bytes:
        """Return the heap as a kernel of your own sees it.

        With the handle a kernel, or a C function for a heap on the CPU, addresses peers, puts, gets, signals,
        waits and runs barriers without the host; see epmoe_device.h in epmoe.include_dir().  The handle is
        valid until the heap is closed.  Its waits have the timeout that the world has now.

        Returns:
            The bytes of an EpDeviceHeap, to be passed by value.

        Raises:
            EpClosed: After close.
            EpError: The reason why the world has ended, if it has.

        Examples:
            >>> import epmoe
            >>> type(epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu").device_handle())
            <class 'bytes'>
        """
        return _C.heap_handle(self._c)

    def synchronize(self) -> None:
        """Wait on the host for the current stream, and raise what went wrong in it.

        Raises:
            EpTimeout: When a wait or barrier reached the world's timeout.
            PeerDied: When a rank has died.
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu").synchronize()
        """
        _C.heap_sync(self._c, stream_of(self.device))

    def stats(self) -> dict[str, int]:
        """Return the usage of this rank's heap.

        Returns:
            A dict of int: total, used, free, largest_free and peak in bytes, and num_allocations.  total is
                num_bytes, rounded up to a multiple of 256, to which each allocation is rounded up too.

        Raises:
            EpClosed: After close.

        Examples:
            >>> import epmoe
            >>> epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu").stats()["used"]
            0
        """
        return _C.heap_stats(self._c)

    def close(self) -> None:
        """Wait for all ranks, then drop the heap.  Collective; a second call does nothing.

        Tensors over the heap keep its memory until they are dropped too.

        Raises:
            EpMismatch: On all ranks, when one of them is in another call.  The heap stays open on all ranks.
            PeerDied: On all surviving ranks, when a rank has died.
            EpTimeout: On all ranks, when one does not make the call before the timeout.

        Examples:
            >>> import epmoe
            >>> heap = epmoe.SymmetricHeap(epmoe.World(), 1 << 20, device="cpu")
            >>> heap.close()
        """
        _C.heap_close(self._c)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        try:
            s = self.stats()
            state = f"{s['used']} of {s['total']} bytes used"
        except EpClosed:
            state = "closed"
        return f"epmoe.SymmetricHeap({self.device}, {state}, {self.world!r})"
