"""The outcome of a call on one rank, and its comparison with the expected outcome."""

import dataclasses
import time

import pace

# The limit of waits in tests of wrong calls. It is far longer than any of these tests takes, so a rank that
# is slow on a busy machine causes no timeout. If only the timeout ends a wait, the error has the wrong class,
# EpTimeout.
MISTAKE_LIMIT_S = pace.WAIT_S


@dataclasses.dataclass
class Outcome:
    """The outcome of a call on one rank: what it raised or returned, and its duration."""

    kinds: tuple  # names of the exception's classes, the raised class first; () if nothing was raised
    text: str
    seconds: float
    value: object = None
    slowness: float = 1.0  # of the machine; measured only if the call took long

    def is_within(self, limit_s):
        """Did the call end within limit_s, on an idle machine?"""
        return self.seconds < limit_s * self.slowness

    @property
    def kind(self):
        return self.kinds[0] if self.kinds else "nothing"

    def __str__(self):
        return f"{self.kind} after {self.seconds:.2f} s: {self.text}"


def outcome(call, layer=None):
    """The Outcome of call(). If a layer is given, this includes the asynchronous work of the layer."""
    start = time.monotonic()
    try:
        value = call()
        if layer is not None:
            layer.synchronize()
    except Exception as e:
        return _outcome(start, tuple(c.__name__ for c in type(e).__mro__), str(e))
    return _outcome(start, (), "", value if isinstance(value, (int, float, str, bool, tuple, list)) else None)


def _outcome(start, kinds, text, value=None):
    seconds = time.monotonic() - start
    # The slow rank measures the slowness immediately. All processes of a test then use the same number.
    return Outcome(kinds, text, seconds, value, pace.slowness() if seconds > 0.5 else 1.0)


def check_outcomes(outcomes, wanted, *texts, within_s=2.0, on_rank=None, elsewhere=()):
    """Assert that every rank's outcome is the expected one, and came within within_s on an idle machine.

    wanted: the name of the exception's class, for all ranks or as a list with one name for each rank.
    "nothing" means that no exception is expected.
    texts: each text must be in the message of rank `on_rank`, or of all ranks if `on_rank` is None.
    elsewhere: each of these texts must be in the messages of the other ranks.
    """
    wanted = [wanted] * len(outcomes) if isinstance(wanted, str) else wanted
    for rank, (got, want) in enumerate(zip(outcomes, wanted)):
        is_right = want in got.kinds or (want == "nothing" and not got.kinds)
        assert is_right, f"rank {rank}: wanted {want}, got {got}"
        limit = f"{within_s} s (times the machine's slowness, {got.slowness:.1f})"
        assert got.is_within(within_s), f"rank {rank}: took longer than {limit}: {got}"
        for text in texts if on_rank is None or on_rank == rank else elsewhere:
            assert text in got.text, f"rank {rank}: {text!r} is not in {got.text!r}"
