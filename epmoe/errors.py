"""What epmoe raises.  Wrong arguments are ValueError and TypeError, as everywhere in Python."""

from . import _C


class EpError(RuntimeError):
    """Base of all that epmoe raises besides ValueError and TypeError."""


class PeerDied(EpError):
    """A rank of the world is gone.  The world has ended; build a new one from the survivors."""


class EpTimeout(EpError, TimeoutError):
    """A wait reached its limit: a rank is alive but stuck, or does not take part.  The world has ended."""


class EpMismatch(EpError, ValueError):
    """Ranks disagree about an operation.  It did nothing on any rank; the next one works.  Where they disagree about which one it is, each
    stuck in that of another layer, buffer or heap, the world has ended: after one second, unless a rank cannot know, for it has captured a
    graph, or seen an operation fail before, or on the CPU calls from several threads.  Then the limit of waits ends it."""


class EpOverflow(EpError):
    """A rank would receive more rows than its capacity.  Nothing was moved; the next operation works."""


class EpIndexError(EpError, IndexError):
    """An expert index outside [-1, E] on some rank.  Nothing was moved; the next operation works."""


class HeapExhausted(EpError, MemoryError):
    """The symmetric heap, or the machine, has no room for an allocation."""


class PeerError(EpError):
    """Another rank could not take part in an operation (its own error says why).  The next one works."""


class EpClosed(EpError):
    """Used after close, or in a forked child."""


_C.set_exceptions({c.__name__: c for c in (EpError, PeerDied, EpTimeout, EpMismatch, EpOverflow, EpIndexError,
                                           HeapExhausted, PeerError, EpClosed, ValueError, TypeError)})
