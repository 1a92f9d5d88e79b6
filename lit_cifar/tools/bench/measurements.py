"""What the sections of `bench` are told, how they measure, and the rows that they yield.

Things are timed in turn, so that a machine that becomes slower meanwhile is slower for all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from lit_cifar.models import Arch

Report = Callable[[str], None]  # called with a line about what is measured next
Unit = Literal["x", "%", "s", "ms", "us", "img/s", "GFLOP/s", "MiB"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """On what is measured, and how often."""

    device: torch.device
    folder: Path  # exists; runs write below it
    rounds: int = 5  # how often each of the things that are compared is timed
    # A network of a few layers, few images and few rounds, for tests: the figures then say nothing about a machine.
    small: bool = False

    @property
    def arch(self) -> Arch:
        return "tiny" if self.small else "resnet34"


@dataclass(frozen=True)
class Quantiles:
    """A repeated measurement: its median and where the middle half lies."""

    values: tuple[float, ...]  # one or more, in the order in which they were measured

    @property
    def low(self) -> float:
        """The first quartile."""
        return float(np.quantile(self.values, 0.25))

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def high(self) -> float:
        """The third quartile."""
        return float(np.quantile(self.values, 0.75))

    @property
    def n(self) -> int:
        return len(self.values)


def interleaved(measurements: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, Quantiles]:
    """What each measurement returns, once in every round.

    Every other round goes through them backwards, so that what slows the machine down steadily favours none.
    """
    names = list(measurements)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(measurements[name]())
    return {name: Quantiles(tuple(values)) for name, values in found.items()}


def ratio(above: Quantiles, below: Quantiles) -> Quantiles:
    """Of two that were interleaved: the quotient of each round.

    Raises:
        ValueError: They were not measured equally often.
    """
    return Quantiles(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))


def difference(left: Quantiles, right: Quantiles) -> Quantiles:
    """Of two that were interleaved: left minus right in each round.

    Raises:
        ValueError: They were not measured equally often.
    """
    return Quantiles(tuple(a - b for a, b in zip(left.values, right.values, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    section: str  # of `bench`
    name: str  # what is compared with what
    unit: Unit
    found: Quantiles
    note: str = ""  # on what it depends: one or two sentences

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Row":
        """The row that `to_json` has written."""
        found = Quantiles(tuple(content["values"]))
        return cls(**{name: content[name] for name in ("section", "name", "unit", "note")}, found=found)

    def to_json(self) -> dict[str, Any]:
        found = {"median": self.found.median, "low": self.found.low, "high": self.found.high}
        return {name: value for name, value in asdict(self).items() if name != "found"} | {
            **found,
            "values": list(self.found.values),
        }


def shown(value: float, unit: Unit) -> str:
    """With three significant digits, and the unit as one writes it behind a number.

    >>> shown(0.9168, "x"), shown(0.12345, "%"), shown(34567.0, "img/s")
    ('0.917x', '12.3 %', '34,600 img/s')
    """
    if unit == "%":
        value *= 100
    digits = f"{value:#.3g}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):,.0f}"
    return f"{digits.rstrip('.')}{unit if unit == 'x' else f' {unit}'}"


def result_table(rows: Sequence[Row], *, title: str) -> Table:
    """A row for each measurement; below the median the middle half of the repeats and their number."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("what is measured", ratio=1)
    table.add_column("measured", justify="right", no_wrap=True)
    for row in rows:
        name = escape(row.name) + (f"\n[dim]{escape(row.note)}[/]" if row.note else "")
        middle = f"{shown(row.found.low, row.unit)} to {shown(row.found.high, row.unit)}, n = {row.found.n}"
        table.add_row(
            name,
            f"[bold]{shown(row.found.median, row.unit)}[/]\n[dim]{middle}[/]",
        )
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table for a page."""
    lines = ["| what is measured | median | middle half | n |", "|---|---|---|---|"]
    for row in rows:
        middle = f"{shown(row.found.low, row.unit)} to {shown(row.found.high, row.unit)}"
        name = row.name + (f". {row.note}" if row.note else "")
        lines.append(f"| {name} | {shown(row.found.median, row.unit)} | {middle} | {row.found.n} |")
    return "\n".join(lines) + "\n"
