"""The rows of `bench`: what was measured, and how far its repeats spread."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from lit_cifar.bench.timing import Spread

Unit = Literal["x", "%", "s", "ms", "us", "img/s", "GFLOP/s", "MiB"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    section: str  # of `bench`
    name: str  # what is compared with what
    unit: Unit
    found: Spread
    note: str = ""  # on what it depends: one or two sentences

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Row":
        """The row that `to_json` has written."""
        found = Spread(tuple(content["values"]))
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
