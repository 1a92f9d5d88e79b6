"""Axes of charts: which values get a tick, and where a value lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values on a line from `start` to `end`, in units of the picture.

    Attributes:
        ticks: Two or more values, rising by equal steps; the axis begins with the first and ends with the last.
        start: Where it begins.
        end: Where it ends.
    """

    ticks: tuple[float, ...]
    start: float
    end: float

    @classmethod
    def around(
        cls, values: Sequence[float], start: float, end: float, *, zero: bool = False, whole: bool = False
    ) -> "Axis":
        """An axis that holds all of the finite `values`, of which there is one or more.

        Args:
            values: What is drawn.
            start: Where the axis begins.
            end: Where it ends.
            zero: Whether it begins at 0; no value is negative then.
            whole: Whether only whole numbers get a tick.
        """
        low, high = 0.0 if zero else min(values), max(values)
        if high <= low:
            high = low + (abs(low) * 0.1 or 1.0)
        step = max(_round_step((high - low) / 5), 1.0 if whole else 0.0)
        # Of values such as 0.3, which is a little less than 3 * 0.1.
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(tuple(index * step for index in range(first, last + 1)), start, end)

    def at(self, value: float) -> float:
        """Where `value` is."""
        low, high = self.ticks[0], self.ticks[-1]
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ..., and of their tenths, hundredths, ..., that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
