"""How long others have been silent, for a reader that is itself kept waiting, suspended, or not run."""

from collections.abc import Callable

# What a pause between two reads counts at most, in seconds, and what a turn counts. If it was longer this process was
# not run, and has seen nothing.
_MOST_S = 2.0


class SilenceClock:
    """Counts the time in which a process that writes can be found silent by one that reads.

    Attributes:
        listened_s: Sum of the pauses from an answer of the store to the next question. What the store needs for its
            answers is not in it: a slow store is not silence.
        owed_s: How long the store has owed its answer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn_at = self._answered_at = clock()
        self._pause_s = self.listened_s = self.owed_s = 0.0

    def turn(self, *, owed: bool) -> float:
        """Begin a turn of the reader, with the store's answer `owed` or not; returns the seconds since the last one."""
        now = self._clock()
        passed_s, self._turn_at = now - self._turn_at, now
        if owed:
            self.owed_s += min(passed_s, _MOST_S)
        else:
            self._pause_s = min(now - self._answered_at, _MOST_S)
        return passed_s

    def answer(self) -> None:
        """The store has answered."""
        self._answered_at, self.owed_s = self._clock(), 0.0
        self.listened_s += self._pause_s
