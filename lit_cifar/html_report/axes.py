"""Axes of charts: which values get a tick, and where a value lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on a line from `start` to `end`, in units of the picture.

    Attributes:
        low: Smallest value.
        high: Largest value, above `low`.
        start: Where `low` is.
        end: Where `high` is.
        ticks: The values that are named.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def around(
        cls, values: Sequence[float], start: float, end: float, *, zero: bool = False, whole: bool = False
    ) -> "Axis":
        """An axis that begins and ends with a tick and holds all of the finite `values`, of which there is one or more.

        Args:
            values: What is drawn.
            start: Where the axis starts.
            end: Where it ends.
            zero: Whether it begins at 0.
            whole: Whether only whole numbers get a tick.
        """
        low, high = 0.0 if zero else min(values), max(values)
        if high <= low:
            high = low + (abs(low) * 0.1 or 1.0)
        step = _step((high - low) / 4)
        step = max(step, 1.0) if whole else step
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = tuple(index * step for index in range(first, last + 1))
        return cls(ticks[0], ticks[-1], start, end, ticks)

    def at(self, value: float) -> float:
        """Where `value` is."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def _step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... and their tenths that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def shown(value: float) -> str:
    """A number as a tick shows it, e.g. "0.25" or "1,500"."""
    return f"{value:,.6g}" if abs(value) < 1e5 else f"{value:,.0f}"
