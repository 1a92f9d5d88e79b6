"""How far the main thread is, and how long it may take for what it does now."""

import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

# What happens for the first time may compile, tune or load anything, and nothing is known of how long it takes; nor is
# it of what computes or waits for a disk. Ten minutes are torch's own limit for a collective operation of NCCL.
FIRST_TIME_S = 600.0
# What is longer than this many times the longest of its kind is not late but stuck.
FACTOR = 5.0
# The first of a kind is often the longest by far. It counts until so many others are known.
_NUM_SETTLED = 3


class Moment(NamedTuple):
    """What the main thread has begun.

    Attributes:
        phase: What it does, e.g. "training step".
        step: Optimizer steps that are done.
        events: How many phases have begun so far: what two processes are compared by.
        since: When this one began, on this process's monotonic clock, in seconds.
        shape: Of the newest batch. For another one the same phase may compile again.
    """

    phase: str
    step: int
    events: int
    since: float
    shape: Hashable = None

    @property
    def kind(self) -> Hashable:
        """What a duration is expected by."""
        return self.phase, self.shape


class Progress:
    """Notes of the main thread, read by another one: a note replaces `moment` as a whole, so there is no lock.

    Args:
        timeout_s: What every phase may take.
        clock: Seconds; monotonic.
    """

    def __init__(self, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self.moment = Moment("starting", 0, 0, clock())
        self._durations: dict[Hashable, _Durations] = {}
        self._awake_since = self.moment.since

    def enter(self, phase: str, *, step: int | None = None, shape: Hashable = None) -> None:
        """The main thread begins `phase`; `step` and `shape` if they have changed."""
        last, now = self.moment, self.clock()
        durations = self._durations.get(last.kind)
        if durations is None:
            durations = self._durations[last.kind] = _Durations()
        durations.add(now - max(last.since, self._awake_since))
        self.moment = Moment(
            phase,
            last.step if step is None else step,
            last.events + 1,
            now,
            last.shape if shape is None else shape,
        )

    def forgive(self) -> None:
        """Count from now on: the whole process was suspended, so that nothing could happen."""
        self._awake_since = self.clock()

    def idle_s(self) -> float:
        """How long the main thread has been in its phase."""
        return self.clock() - max(self.moment.since, self._awake_since)

    def patience_s(self) -> float:
        """How long it may be."""
        durations = self._durations.get(self.moment.kind)
        expected = FIRST_TIME_S if durations is None else FACTOR * durations.longest()
        return max(self.timeout_s, expected)


class _Durations:
    """Of one kind, in seconds."""

    def __init__(self) -> None:
        self._first = 0.0
        self._longest_other = 0.0
        self._count = 0

    def add(self, duration_s: float) -> None:
        if self._count == 0:
            self._first = duration_s
        else:
            self._longest_other = max(self._longest_other, duration_s)
        self._count += 1

    def longest(self) -> float:
        settled = self._count > _NUM_SETTLED
        return self._longest_other if settled else max(self._first, self._longest_other)
