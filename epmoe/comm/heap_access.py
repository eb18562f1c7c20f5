"""HeapAccess: how a rank reaches the memory of a symmetric heap, its own and its peers'."""

import torch

from .. import _C
from ..torch_modes import check_writable, mark_written
from .device import stream_of
from .world import Shared

# torch dtype -> (DLPack type code, bits)
DL_TYPES = {torch.float32: (2, 32), torch.float64: (2, 64), torch.float16: (2, 16), torch.bfloat16: (4, 16),
            torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64),
            torch.uint8: (1, 8)}


def check_dtype(dtype):
    if dtype not in DL_TYPES:
        raise TypeError(f"dtype {dtype}: must be one of {', '.join(str(d) for d in DL_TYPES)}")


def check_tensor(t):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"wanted a tensor, got {type(t).__name__}")
    if t.is_meta or t.layout is not torch.strided:
        raise ValueError(f"wanted a dense tensor with memory, got "
                         f"{'a meta tensor' if t.is_meta else t.layout}")


def _flat(t):
    """Return a contiguous tensor as the module takes it: with at most 4 dimensions."""
    return t if t.dim() <= 4 else t.view(-1)


class HeapAccess(Shared):
    """The part of SymmetricHeap that addresses, copies, signals and waits."""

    def _view(self, off, rank, shape, dtype):
        return torch.from_dlpack(_Capsule(_C.heap_tensor(self._c, off, rank, shape, *DL_TYPES[dtype]),
                                          self.device))

    def offset(self, tensor):
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

    def translate(self, tensor, peer):
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

    def peer_view(self, tensor, peer):
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

    def put(self, dst, src, peer):
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

    def get(self, dst, src, peer):
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

    def _check_pair(self, symmetric, other):
        for t in (symmetric, other):
            check_tensor(t)
        if symmetric.dtype != other.dtype or symmetric.numel() != other.numel():
            raise ValueError(f"wanted {symmetric.numel()} elements of {symmetric.dtype}, got {other.numel()} "
                             f"of {other.dtype}")
        if not (symmetric.is_contiguous() and other.is_contiguous()):
            raise ValueError("put and get need contiguous tensors: call contiguous() on the one outside the "
                             "heap")
        return symmetric.numel() > 0

    def _word(self, tensor, index):
        check_tensor(tensor)
        if tensor.dtype != torch.int64:
            raise TypeError(f"signals must be int64 tensors, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("signals must be a contiguous tensor, because index counts words in memory")
        if not 0 <= index < tensor.numel():
            raise IndexError(f"index {index}: must be 0 to {tensor.numel() - 1}, the tensor has "
                             f"{tensor.numel()} signals")
        return self.offset(tensor) + 8 * index

    def signal(self, tensor, index, value, peer, op="set"):
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

    def wait(self, tensor, index, value, cmp="ge"):
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

    def barrier(self):
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

    def device_handle(self):
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

    def synchronize(self):
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


class _Capsule:
    """The interface that torch.from_dlpack needs."""

    def __init__(self, capsule, device):
        self._capsule = capsule
        self._device = device

    def __dlpack__(self, **kwargs):
        return self._capsule

    def __dlpack_device__(self):
        return (2, self._device.index) if self._device.type == "cuda" else (1, 0)
