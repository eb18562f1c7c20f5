"""The exceptions of epmoe.  Wrong arguments raise ValueError or TypeError, as everywhere in Python.

An error on one rank never leaves the others waiting: they raise too, as each class below says.
"""

from . import _C


class EpError(RuntimeError):
    """Base class of all exceptions of epmoe except ValueError and TypeError.

    epmoe raises EpError itself where no subclass fits: for a failed system or CUDA call, for two ranks that
    cannot reach each other's memory, and for invalid data from a peer.

    Examples:
        >>> import epmoe
        >>> issubclass(epmoe.PeerDied, epmoe.EpError) and issubclass(epmoe.EpError, RuntimeError)
        True
    """


class PeerDied(EpError):
    """A rank has died, or has left the world while the others continued.

    All surviving ranks raise it, typically within 50 ms of a death; a rank that leaves alone is missed after
    about two seconds.  The world has ended: create a new one from the surviving ranks (see World.lost_ranks).

    Examples:
        Rank 1 leaves by an exception while rank 0 waits for it:

        >>> import epmoe
        >>> from epmoe.testing import run_threads
        >>> def main(world):
        ...     try:
        ...         with world:
        ...             if world.rank == 1:
        ...                 raise KeyError("a bug")
        ...             world.exchange(b"hello")
        ...     except (KeyError, epmoe.PeerDied) as error:
        ...         return type(error).__name__
        >>> run_threads(main, 2)
        ['PeerDied', 'KeyError']
    """


class EpTimeout(EpError, TimeoutError):
    """A wait reached the world's timeout: a rank is alive, but stuck, or does not make the call.

    All ranks raise it, and the world has ended.  World.flight_record() names the rank that caused it.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> heap = epmoe.SymmetricHeap(epmoe.World(timeout_s=0.2), 1 << 20, device="cpu")
        >>> signal = heap.malloc_symmetric(1, torch.int64)
        >>> heap.wait(signal, 0, 1)
        Traceback (most recent call last):
            ...
        epmoe.errors.EpTimeout: rank 0 timed out: no rank signalled the word on which it waits ...
    """


class EpMismatch(EpError, ValueError):
    """Ranks disagree about an operation: its kind, its sizes, its dtype or another argument.

    All ranks raise it, and the message names the field and both values.  The operation did nothing on any
    rank, and the next one works.

    One case ends the world: ranks that wait in operations of different layers, buffers or heaps.  It ends
    after one second, or at the world's timeout where a rank cannot know the order of its calls.  That is so
    after it has captured a CUDA graph or seen an operation fail, and when several threads of a CPU rank call.

    Examples:
        >>> import epmoe
        >>> from epmoe.testing import run_threads
        >>> def main(world):
        ...     try:
        ...         world.exchange(b"a" * (1 + world.rank))
        ...     except epmoe.EpMismatch as error:
        ...         return "bytes" in str(error)
        >>> run_threads(main, 2)
        [True, True]
    """


class EpOverflow(EpError):
    """A rank would receive more rows than its capacity, or an expert more than its expert_capacity.

    Over several nodes also: a rank would send more tokens to another node than its rail_capacity.  All ranks
    raise it, and the message names the rank or the expert.  No expert was applied, and the next operation
    works.  Increase the layer's `capacity`, `expert_capacity` or `rail_capacity`, or balance the routing.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 1, num_tot_experts=2, capacity=3, device="cpu")
        >>> layer.preprocess(torch.zeros(4, 1, dtype=torch.int64))
        Traceback (most recent call last):
            ...
        epmoe.errors.EpOverflow: rank 0 would receive 4 rows; its capacity is 3. ...
    """


class EpIndexError(EpError, IndexError):
    """An expert index is outside [-1, E] on some rank.

    All ranks raise it, and the message names the rank, the token and the choice.  No row was moved, and the
    next operation works.

    Examples:
        >>> import epmoe
        >>> import torch
        >>> layer = epmoe.EPAll2AllLayer(epmoe.World(), 4, 16, 1, num_tot_experts=2, device="cpu")
        >>> layer.preprocess(torch.tensor([[0], [7]]))
        Traceback (most recent call last):
            ...
        epmoe.errors.EpIndexError: rank 0: expert index 7 of token 1, choice 0 is outside [-1, 2]. ...
    """


class HeapExhausted(EpError, MemoryError):
    """The symmetric heap, or the memory of the machine or GPU, has no room for an allocation.

    All ranks raise it, and nothing was allocated on any.

    Examples:
        >>> import epmoe
        >>> heap = epmoe.SymmetricHeap(epmoe.World(), num_bytes=4096, device="cpu")
        >>> heap.malloc_symmetric(1 << 20)
        Traceback (most recent call last):
            ...
        epmoe.errors.HeapExhausted: symmetric heap exhausted: needs 4194304 bytes, ...
    """


class PeerError(EpError):
    """Another rank could not take part in an operation; its own exception says why.

    The ranks whose call was correct raise it, and the message names the failing rank.  The next operation
    works.

    Examples:
        >>> import epmoe
        >>> from epmoe.testing import run_threads
        >>> def main(world):
        ...     try:
        ...         world.exchange("text" if world.rank == 1 else b"bytes")
        ...     except (TypeError, epmoe.PeerError) as error:
        ...         return type(error).__name__
        >>> run_threads(main, 2)
        ['PeerError', 'TypeError']
    """


class EpClosed(EpError):
    """A world, heap or layer was used after its close, or in a forked child.

    The rank that makes the call raises it.  A wait that is interrupted, for example by Ctrl-C, ends the
    world: then the other ranks raise it, and it names the rank.

    Examples:
        >>> import epmoe
        >>> world = epmoe.World()
        >>> world.close()
        >>> world.exchange(b"")
        Traceback (most recent call last):
            ...
        epmoe.errors.EpClosed: this world is closed: create a new one
    """


_C.set_exceptions({c.__name__: c for c in (EpError, PeerDied, EpTimeout, EpMismatch, EpOverflow, EpIndexError,
                                           HeapExhausted, PeerError, EpClosed, ValueError, TypeError)})
