"""How a call ended on one rank, and the comparison with how it should have ended."""

import dataclasses
import time

import pace

# The limit of waits in tests of mistakes.  It is far longer than any of these tests takes: a rank that a busy
# machine delays must not cause a timeout, and an error that only the timeout brings is of the wrong class,
# EpTimeout.
MISTAKE_LIMIT_S = pace.WAIT_S


@dataclasses.dataclass
class Outcome:
    """How a call ended on one rank."""

    kinds: tuple  # names of the exception's classes, the raised one first; () when nothing was raised
    text: str
    seconds: float
    value: object = None
    slowness: float = 1.0  # of the machine, where the call took long

    def is_within(self, limit_s):
        """Did the call end within limit_s, on an idle machine?"""
        return self.seconds < limit_s * self.slowness

    @property
    def kind(self):
        return self.kinds[0] if self.kinds else "nothing"

    def __str__(self):
        return f"{self.kind} after {self.seconds:.2f} s: {self.text}"


def outcome(call, layer=None):
    """Run call and, where work is asynchronous, wait for what it started."""
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
    # The rank that was late measures at once, so that all ranks of a test compare with the same number.
    return Outcome(kinds, text, seconds, value, pace.slowness() if seconds > 0.5 else 1.0)


def check_outcomes(outcomes, wanted, *texts, within_s=2.0, who=None, elsewhere=()):
    """wanted: the exception of every rank, or of each rank in turn.  texts: what its message holds, on rank
    `who` (default: on all); elsewhere: what the other ranks' message holds."""
    wanted = [wanted] * len(outcomes) if isinstance(wanted, str) else wanted
    for rank, (got, want) in enumerate(zip(outcomes, wanted)):
        assert want in got.kinds or (want == "nothing"
                                     and not got.kinds), f"rank {rank}: wanted {want}, got {got}"
        assert got.is_within(
            within_s
        ), f"rank {rank}: later than {within_s} s times {got.slowness:.1f}: {got}"
        for text in texts if who is None or who == rank else elsewhere:
            assert text in got.text, f"rank {rank}: {text!r} is not in {got.text!r}"
