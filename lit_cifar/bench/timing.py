"""Things timed in turn, so that a machine that becomes slower meanwhile is slower for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from time import perf_counter

import torch


@dataclass(frozen=True)
class Spread:
    """A repeated measurement: its median and where the middle half lies."""

    values: tuple[float, ...]  # one or more, in the order in which they were measured

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        """The first quartile; of a single value, that value."""
        return self._quartiles[0]

    @property
    def high(self) -> float:
        """The third quartile."""
        return self._quartiles[2]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def _quartiles(self) -> Sequence[float]:
        return quantiles(self.values, n=4, method="inclusive") if self.n > 1 else self.values * 3


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Spread]:
    """Seconds that each call takes, once in every round.

    Every other round goes through the calls backwards, so that what slows the machine down steadily favours none.

    Args:
        calls: By name.
        rounds: How often each is timed.
        warmup: How often each is called before, untimed.
        wait: Returns when all queued work has been done. A GPU needs it.
        clock: Seconds.
    """

    def timed(call: Callable[[], object]) -> float:
        wait()
        start = clock()
        call()
        wait()
        return clock() - start

    for _ in range(warmup):
        for call in calls.values():
            call()
    return measured_in_turn({name: partial(timed, call) for name, call in calls.items()}, rounds=rounds)


def measured_in_turn(measurements: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, Spread]:
    """What each measurement returns, once in every round; every other round goes through them backwards."""
    names = list(measurements)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(measurements[name]())
    return {name: Spread(tuple(values)) for name, values in found.items()}


def ratio(above: Spread, below: Spread) -> Spread:
    """Of two that were measured in turn: the quotient of each round.

    Raises:
        ValueError: They were not measured equally often.
    """
    return Spread(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


def difference(left: Spread, right: Spread) -> Spread:
    """Of two that were measured in turn: left minus right in each round.

    Raises:
        ValueError: They were not measured equally often.
    """
    return Spread(tuple(a - b for a, b in zip(left.values, right.values, strict=True)))


def wait_for(device: torch.device) -> Callable[[], None]:
    """For `in_turn`: what to call until all work that is queued on the device has been done."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
