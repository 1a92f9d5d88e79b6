"""The rows of `bench`: what was measured, what it should reach, and whether it does."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from lit_cifar.bench.timing import Spread

Unit = Literal["x", "%", "s", "ms", "us", "img/s", "GFLOP/s", "MiB"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound, and on which side of it a value should be."""

    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a goal is either a smallest or a largest value")

    @property
    def bound(self) -> float:
        return self.at_least if self.at_most is None else self.at_most  # type: ignore[return-value]  # __post_init__

    def is_met_by(self, value: float) -> bool:
        return value <= self.bound if self.at_least is None else value >= self.bound

    def in_words(self, unit: Unit) -> str:
        return f"{'<=' if self.at_least is None else '>='} {shown(self.bound, unit)}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    section: str  # of `bench`
    name: str  # what is compared with what
    unit: Unit
    found: Spread
    goal: Goal | None = None  # of the median; None for what is only shown
    note: str = ""  # on what it depends, or why it falls short: one or two sentences

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the goal; None without one."""
        return None if self.goal is None else self.goal.is_met_by(self.found.median)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Row":
        """The row that `to_json` has written."""
        goal = content["goal"]
        return cls(
            **{name: content[name] for name in ("section", "name", "unit", "note")},
            found=Spread(tuple(content["values"])),
            goal=None if goal is None else Goal(**goal),
        )

    def to_json(self) -> dict[str, Any]:
        found = {"median": self.found.median, "low": self.found.low, "high": self.found.high}
        return {name: value for name, value in asdict(self).items() if name != "found"} | {
            **found,
            "values": list(self.found.values),
            "met": self.met,
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
    table.add_column("goal", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        name = escape(row.name) + (f"\n[dim]{escape(row.note)}[/]" if row.note else "")
        middle = f"{shown(row.found.low, row.unit)} to {shown(row.found.high, row.unit)}, n = {row.found.n}"
        table.add_row(
            name,
            "" if row.goal is None else row.goal.in_words(row.unit),
            f"[bold]{shown(row.found.median, row.unit)}[/]\n[dim]{middle}[/]",
            {None: "", True: "[bold green]met[/]", False: "[bold red]not met[/]"}[row.met],
        )
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table for a page."""
    lines = ["| what is measured | goal | median | middle half | n | |", "|---|---|---|---|---|---|"]
    for row in rows:
        goal = "" if row.goal is None else row.goal.in_words(row.unit)
        middle = f"{shown(row.found.low, row.unit)} to {shown(row.found.high, row.unit)}"
        met = {None: "", True: "met", False: "**not met**"}[row.met]
        name = row.name + (f". {row.note}" if row.note else "")
        lines.append(f"| {name} | {goal} | {shown(row.found.median, row.unit)} | {middle} | {row.found.n} | {met} |")
    return "\n".join(lines) + "\n"
