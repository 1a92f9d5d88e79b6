"""`python -m lit_cifar bench`: the costs of training on this machine.

Each section is a module with a function `measure`, which takes `Settings` and returns rows of the table. Machines
differ and are noisy, so a row compares things that were measured in turn in the same run. `trace` and `step_trace`
record one step, for `bench trace`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_cifar.launch.signals import EXIT_REFUSED
from lit_cifar.models import Arch
from lit_cifar.tools.verify.runs import run

Values = NDArray[np.float64]  # numbers of a repeated measurement, one for each round
Unit = Literal["x", "s", "us", "img/s"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    folder: Path  # an existing folder, below which runs write
    rounds: int = 5  # number of times that each of the things that are compared is timed
    small: bool = False  # whether layers, images and steps are few: the figures then say nothing about a machine

    @property
    def arch(self) -> Arch:
        return "tiny" if self.small else "resnet34"


@dataclass(frozen=True)
class Row:
    name: str  # the things that are compared
    unit: Unit
    values: Values
    note: str = ""  # the conditions of the measurement

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The middle half and the median of the values: low, median, high."""
        low, median, high = map(float, np.quantile(self.values, [0.25, 0.5, 0.75]))
        return low, median, high

    def to_json(self) -> dict[str, Any]:
        found = dict(zip(("low", "median", "high"), self.quartiles, strict=True))
        return asdict(self) | found | {"values": self.values.tolist()}


def interleaved(measurements: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, Values]:
    """The result of each measurement, once in every round.

    Every other round goes through them backwards, so that a machine that slows down steadily favours none.
    """
    names = list(measurements)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(measurements[name]())
    return {name: np.array(values) for name, values in found.items()}


def fit(words: Sequence[str], *, folder: Path, threads: int = 1, num_ranks: int = 1) -> None:
    """`python -m lit_cifar fit`; a `ConfigError` if it refuses the user's flags, a `RuntimeError` if it failed."""
    outcome = run("fit", *words, folder=folder, threads=threads, num_ranks=num_ranks)
    if outcome.status == EXIT_REFUSED:
        raise outcome.refusal
    if outcome.status != 0:
        raise RuntimeError(f"fit {' '.join(words)} failed: {outcome.last_words}")
