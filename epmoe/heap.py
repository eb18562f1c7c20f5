"""Symmetric memory: the same bytes on every rank, reachable from every rank."""

import contextlib
import math
import os
from pathlib import Path

import torch

from . import _C
from .world import Shared, World

# torch dtype -> (DLPack type code, bits)
_DL = {torch.float32: (2, 32), torch.float64: (2, 64), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int8: (0, 8),
       torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8)}


def _check_dtype(dtype):
    if dtype not in _DL:
        raise TypeError(f"dtype {dtype}: one of {', '.join(str(d) for d in _DL)}")


def _check_tensor(t):
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"wanted a tensor, got {type(t).__name__}")
    if t.is_meta or t.layout is not torch.strided:
        raise ValueError(f"wanted a dense tensor that has memory, got {'a meta tensor' if t.is_meta else t.layout}")


def pick_device(device=None):
    """The device to work on: as given; EPMOE_BACKEND=cpu|cuda; else CUDA where there is a GPU and a CUDA build."""
    wanted = os.environ.get("EPMOE_BACKEND", "")
    if wanted not in ("", "cpu", "cuda"):
        raise ValueError(f"EPMOE_BACKEND={wanted!r}: must be cpu or cuda")
    if device is None:
        device = wanted or ("cuda" if _C.HAS_CUDA and torch.cuda.is_available() else "cpu")
    device = torch.device(device)
    if wanted and device.type != wanted:
        raise ValueError(f"device {device}, but EPMOE_BACKEND={wanted}")
    if device.type == "cuda" and not (_C.HAS_CUDA and torch.backends.cuda.is_built()):
        raise ValueError(f"device {device}: {'this torch' if _C.HAS_CUDA else 'this build of epmoe'} has no CUDA")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: epmoe works on cpu and cuda")
    return device


def stream_of(device):
    """The current stream of a CUDA device as an integer; 0 on the CPU."""
    try:
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    except RuntimeError:
        if torch.cuda._is_in_bad_fork():
            return 0  # a forked child: the call that this is for says so
        raise


def include_dir():
    """The folder of epmoe_device.h, for kernels that use SymmetricHeap.device_handle(): the compiler's -I."""
    here = Path(__file__).resolve().parent
    return str(next(d for d in (here / "include", here.parent / "csrc") if (d / "epmoe_device.h").exists()))


def status_of(error):
    """The code by which the other ranks hear of this rank's exception."""
    no_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return _C.ENOMEM if no_memory else _C.ETYPE if isinstance(error, TypeError) else _C.EINVAL


class SymmetricHeap(Shared):
    """A block of num_bytes on every rank, mapped by all of them, with one allocator that runs in step.

    Creation is collective, and tries every pair of ranks: a pair that cannot write and read each other
    raises EpError on all ranks.  world: a World, ProcessGroup, DeviceMesh or None.  device: "cpu", "cuda",
    "cuda:1", ...; the default is the GPU where there is one.

    Raises EpMismatch on all ranks when they ask for different sizes or kinds of device, HeapExhausted on all when one of
    them has no room; ValueError or TypeError here, and PeerError on the others, for what cannot be.

    Copies, signals, waits and barriers are in the order of the current stream.  On the CPU each raises what went wrong in
    it.  On CUDA they return before they have run: what goes wrong then, as a wait that ends at its limit, is raised by the
    next of them, or by synchronize().

    Every tensor that malloc_symmetric returns keeps the heap's memory alive.  close() is what gives it back: a heap
    on a GPU that is only dropped keeps its block while its world lives, because a peer may still be using it.
    """

    def __init__(self, world=None, num_bytes=1 << 26, device=None):
        self.world = World.of(world)
        try:
            self.device, num_bytes = pick_device(device), int(num_bytes)
            if not 0 <= num_bytes < 1 << 64:  # more than the module can be told; it judges the rest
                raise ValueError(f"a heap of {num_bytes} bytes")
        except Exception as error:
            self._refuse(self.world, error)
            raise
        kind = _C.CUDA if self.device.type == "cuda" else _C.CPU
        self._c = _C.heap_create(self.world._c, kind, self.device.index or 0, num_bytes, 0)
        self._scopes = []

    @staticmethod
    def _refuse(world, error):
        """This rank cannot make the heap that the others are making: let them know."""
        with contextlib.suppress(Exception):
            _C.heap_create(world._c, _C.CPU, 0, 1, status_of(error))

    def malloc_symmetric(self, shape, dtype=torch.float32, alignment=128):
        """A zeroed tensor at the same offset of every rank's heap.

        Collective: the same call, in the same order, with the same size on every rank.  shape: a size, or at most 8 of them.
        dtype: float32, float64, float16, bfloat16, int8, int16, int32, int64 or uint8.  alignment: of the address, in bytes.

        Raises EpMismatch on all ranks when they differ in bytes or alignment, HeapExhausted on all when there is no room; here, and
        PeerError on the others, TypeError for another dtype, ValueError for a shape that cannot be or an alignment that is no power of
        two up to 2 MiB.
        """
        try:
            shape = (shape,) if isinstance(shape, int) else tuple(int(d) for d in shape)
            alignment = int(alignment)
            _check_dtype(dtype)
            if any(d < 0 for d in shape) or len(shape) > 8:
                raise ValueError(f"shape {shape}: at most 8 sizes, none negative")
            if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 21:
                raise ValueError(f"alignment {alignment}: a power of two up to 2 MiB")
            num_bytes = math.prod(shape) * _DL[dtype][1] // 8
            if num_bytes > 1 << 46:
                raise ValueError(f"shape {shape}: too large")
        except Exception as error:
            self._refuse_alloc(error)
            raise
        off = _C.heap_alloc(self._c, num_bytes, alignment, 0)
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self._scopes:
            self._scopes[-1].append(off)
        return self._view(off, self.world.rank, shape, dtype)

    def _refuse_alloc(self, error):
        """This rank cannot make the allocation that the others are making: let them know."""
        with contextlib.suppress(Exception):
            _C.heap_alloc(self._c, 1, 128, status_of(error))

    def _view(self, off, rank, shape, dtype):
        return torch.from_dlpack(_Capsule(_C.heap_tensor(self._c, off, rank, shape, *_DL[dtype]), self.device))

    def free(self, tensor):
        """Give the memory of a tensor of malloc_symmetric back.  Collective.  The tensor must not be used any more.

        Raises EpMismatch on all ranks when they free different tensors; ValueError or TypeError here, and PeerError on the
        others, for what is not an allocation of this heap, or not any more.
        """
        try:
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"free: wanted a tensor of this heap, got {type(tensor).__name__}")
            off = self.offset(tensor) if tensor.numel() else 0  # nothing, but agreed upon
        except Exception:
            with contextlib.suppress(Exception):  # the others hear of it; this rank raises its own reason
                _C.heap_free(self._c, (1 << 63) - 1)
            raise
        _C.heap_free(self._c, off)
        for scope in self._scopes:
            if off in scope:
                scope.remove(off)

    @contextlib.contextmanager
    def scope(self):
        """Free at the end what is allocated inside.  Collective, as the frees are.

        An exception passes through without them, because the other ranks may be elsewhere: what was allocated inside then
        stays until free, where all ranks call it, or until the heap's close.
        """
        self._scopes.append([])
        try:
            yield self
        except BaseException:
            self._scopes.pop()
            raise
        for off in reversed(self._scopes.pop()):
            _C.heap_free(self._c, off)

    def stats(self):
        """Bytes: total, used, free, largest_free, peak; and num_allocations."""
        return _C.heap_stats(self._c)

    def offset(self, tensor):
        """Bytes from the heap's base to the tensor's data.  ValueError if it is not in this heap, TypeError if it is no tensor."""
        _check_tensor(tensor)
        return _C.heap_offset(self._c, tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def translate(self, tensor, peer):
        """The address, in this process, of the same thing in peer's heap.  ValueError if the tensor is not in this heap,
        or peer not a rank.  Tells nobody, waits for nothing."""
        return _C.heap_translate(self._c, self.offset(tensor), peer)

    def peer_view(self, tensor, peer):
        """A tensor over the same thing in peer's heap.  Reading and writing it needs signal, wait or barrier.

        Errors: those of translate; ValueError for a tensor that is not contiguous, TypeError for a dtype that malloc_symmetric has not.
        """
        _check_tensor(tensor)
        _check_dtype(tensor.dtype)
        if not tensor.is_contiguous():
            raise ValueError("peer_view wants a contiguous tensor")
        if tensor.numel() == 0:  # it stands nowhere, as malloc_symmetric has it
            return torch.empty_like(tensor)
        return self._view(self.offset(tensor), peer, tuple(tensor.shape), tensor.dtype)

    def put(self, dst, src, peer):
        """Copy src (any contiguous tensor) over dst (symmetric) of peer, in stream order.

        As many elements, of the same dtype.  ValueError if not, or where dst is not in this heap or peer not a rank: nothing
        is copied then, and no other rank hears of it.  On CUDA see SymmetricHeap for what goes wrong later.
        """
        if self._check_pair(dst, src):
            _C.heap_put(self._c, self.offset(dst), src, peer)

    def get(self, dst, src, peer):
        """Copy src (symmetric) of peer over dst (any contiguous tensor), in stream order.  Errors: those of put."""
        if self._check_pair(src, dst):
            _C.heap_get(self._c, self.offset(src), dst, peer)

    def _check_pair(self, symmetric, other):
        for t in (symmetric, other):
            _check_tensor(t)
        if symmetric.dtype != other.dtype or symmetric.numel() != other.numel():
            raise ValueError(f"wanted {symmetric.numel()} elements of {symmetric.dtype}, got {other.numel()} of {other.dtype}")
        if not (symmetric.is_contiguous() and other.is_contiguous()):
            raise ValueError("put and get copy contiguous tensors")
        return symmetric.numel() > 0

    def _word(self, tensor, index):
        _check_tensor(tensor)
        if tensor.dtype != torch.int64:
            raise TypeError(f"signals are int64 tensors, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("signals are words of a contiguous tensor: index counts them as they stand in memory")
        if not 0 <= index < tensor.numel():
            raise IndexError(f"index {index} of {tensor.numel()} signals")
        return self.offset(tensor) + 8 * index

    def signal(self, tensor, index, value, peer, op="set"):
        """Set, or add to, word `index` of the symmetric int64 tensor at peer: a release at system scope, so what
        this rank has put at peer before is readable there once the word is seen by wait.

        value: 0 to 2^64 - 1.  IndexError, TypeError or ValueError for what cannot be; no other rank hears of it."""
        if op not in ("set", "add"):
            raise ValueError(f"op {op!r}: set or add")
        _C.heap_signal(self._c, self._word(tensor, index), value, int(op == "add"), peer, stream_of(self.device))

    def wait(self, tensor, index, value, cmp="ge"):
        """Until word `index` of this rank's tensor is >= value ("ge") or == value ("eq"): an acquire at system
        scope.  On CUDA the stream waits, not the host.

        Raises EpTimeout at the world's limit and PeerDied when a rank is gone: here on the CPU; on CUDA from the next call on
        the heap or from synchronize().  Both end the world.  IndexError, TypeError or ValueError for what cannot be."""
        if cmp not in ("ge", "eq"):
            raise ValueError(f"cmp {cmp!r}: ge or eq")
        _C.heap_wait(self._c, self._word(tensor, index), value, int(cmp == "eq"), stream_of(self.device))

    def barrier(self):
        """All ranks have come here, in stream order, and see each other's puts.  Collective.  Raises as wait does."""
        _C.heap_barrier(self._c, stream_of(self.device))

    def device_handle(self):
        """The heap as a kernel of your own sees it: the bytes of an EpDeviceHeap (epmoe_device.h in epmoe.include_dir()), to be passed
        by value.  With it a kernel, or a C function for a heap on the CPU, finds addresses of peers, puts, gets, signals, waits
        and meets the others, without the host.  Good until the heap is closed; waits have the limit that the world has now.

        Raises EpClosed after close, and why the world has ended, if it has.
        """
        return _C.heap_handle(self._c)

    def synchronize(self):
        """Wait for the current stream; raise what went wrong in it: PeerDied, EpTimeout."""
        _C.heap_sync(self._c, stream_of(self.device))

    def close(self):
        """Wait for all ranks, then drop the heap.  Collective.  Tensors over it keep its memory."""
        _C.heap_close(self._c)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.close()

    def __repr__(self):
        s = self.stats()
        return f"epmoe.SymmetricHeap({self.device}, {s['used']} of {s['total']} bytes used, {self.world!r})"


class _Capsule:
    """What torch.from_dlpack asks for."""

    def __init__(self, capsule, device):
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **kwargs):
        return self._capsule

    def __dlpack_device__(self):
        return (2, self._device.index) if self._device.type == "cuda" else (1, 0)
