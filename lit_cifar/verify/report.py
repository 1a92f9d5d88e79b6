"""What `verify` prints: a table that fits 120 columns, and below it what is wrong."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from lit_cifar.verify.comparison import KINDS
from lit_cifar.verify.row import Row


def verdict_table(rows: Sequence[Row], *, title: str) -> Table:
    """A row for each mode; below each of the largest differences what it may be."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("mode", no_wrap=True)
    table.add_column("proc.", justify="right")
    table.add_column("equals", max_width=33)
    for kind in KINDS:
        table.add_column(kind, justify="right", no_wrap=True)
    table.add_column("evaluated", justify="right")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            row.mode,
            "-" if row.processes is None else str(row.processes),
            row.equals,
            *(_cell(row, kind) for kind in KINDS),
            "-" if row.counts is None else f"{row.counts[0]} of {row.counts[1]}",
            f"{row.seconds:.0f} s",
            "[bold green]PASS[/]" if row.passed else "[bold red]FAIL[/]",
        )
    return table


def _cell(row: Row, kind: str) -> str:
    if kind not in row.differences:
        return "-"
    value, bound = row.differences[kind], row.tolerance[kind]
    shown = f"{value:.1e}" if value else "0"
    return f"{shown if value <= bound else f'[red]{shown}[/]'}\n[dim]<= {bound:.1e}[/]"


def problem_lines(rows: Sequence[Row]) -> list[str]:
    """What is wrong with each mode that failed, the first three things."""
    lines = []
    for row in rows:
        lines += [f"{row.mode}: {problem}" for problem in row.problems[:3]]
    return lines
