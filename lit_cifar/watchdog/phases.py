"""The progress of the main thread, and how long its current phase may take."""

import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

# A phase that runs for the first time may compile, tune or load, so its duration cannot be predicted. The same holds
# while a process computes or waits for a disk. Ten minutes are torch's own limit for a collective operation of NCCL.
FIRST_TIME_S = 600.0
# A phase that takes longer than this multiple of the longest one of its kind counts as hung.
FACTOR = 5.0
# The first phase of a kind is often the longest by far. It counts until this many others are known.
_NUM_SETTLED = 3


class Moment(NamedTuple):
    """The current phase of the main thread."""

    phase: str  # its name, e.g. "training step"
    step: int  # optimizer steps that are done
    events: int  # number of phases begun so far, by which processes are compared
    since: float  # when this phase began, on this process's monotonic clock, in seconds
    shape: Hashable = None  # shape of the newest batch. With another shape the same phase may compile again.

    @property
    def kind(self) -> Hashable:
        """Key of the phases that should take equally long."""
        return self.phase, self.shape


class PhaseTimer:
    """Written by the main thread and read by another one; `moment` is replaced as a whole, so there is no lock."""

    def __init__(self, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self.moment = Moment("starting", 0, 0, clock())
        self._durations: dict[Hashable, _Durations] = {}
        self._awake_since = self.moment.since

    def enter(self, phase: str, *, step: int | None = None, shape: Hashable = None) -> None:
        """Note that the main thread begins `phase`; pass `step` and `shape` if they have changed."""
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
        """Restart the timing: the whole process was suspended."""
        self._awake_since = self.clock()

    def idle_s(self) -> float:
        return self.clock() - max(self.moment.since, self._awake_since)

    def patience_s(self) -> float:
        durations = self._durations.get(self.moment.kind)
        expected = FIRST_TIME_S if durations is None else FACTOR * durations.longest()
        return max(self.timeout_s, expected)


class _Durations:
    """Durations of one kind of phase, in seconds."""

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
