"""What `verify` found for each mode, and its printed table, which fits 120 columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rich import box
from rich.table import Table

from lit_cifar.tools.verify.comparison import KINDS, LOGITS, Bounds

COLUMNS = (*KINDS, LOGITS)

# "failed": compared, and wrong. "abstained": it could not be judged. "crashed": its run ended by an error.
Verdict: TypeAlias = Literal["passed", "failed", "abstained", "crashed"]
_SHOWN: dict[Verdict, str] = {
    "passed": "[bold green]PASS[/]",
    "failed": "[bold red]FAIL[/]",
    "abstained": "[bold yellow]ABSTAIN[/]",
    "crashed": "[bold red]CRASH[/]",
}
NO_VERDICT = 3  # the exit status where nothing is known to be wrong, but not everything that ran could be compared


@dataclass
class VerifiedMode:
    """The result of a mode."""

    mode: str
    equals: str  # the single-device computation that it was compared with
    processes: int | None = None  # number of processes; None if the run failed before that was known
    losses: list[float] = field(default_factory=list)  # the loss of the global batch, step by step
    expected_losses: list[float] = field(default_factory=list)  # those of the single-device computation
    differences: Bounds = field(default_factory=dict)  # the largest difference of each kind over all steps
    tolerance: Bounds = field(default_factory=dict)  # what each kind may differ by after the last step
    counts: tuple[int, int] | None = None  # right and seen samples of its last evaluation
    seconds: float = 0.0  # the duration of its run, without that of the reference
    outcome: Verdict = "abstained"  # until it has been compared
    # What is wrong, the first step first; why it was not judged; the last words of a crash; empty if it passed.
    problems: list[str] = field(default_factory=list)
    # Whether these are differences beyond measured bounds alone, which rounding may exceed too.
    may_be_rounding: bool = False

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def exit_status(rows: Sequence[VerifiedMode]) -> int:
    """0 if a mode passed and none failed or crashed, 1 if one was compared and is wrong, else `NO_VERDICT`."""
    outcomes = {row.outcome for row in rows}
    if "failed" in outcomes:
        return 1
    return 0 if "passed" in outcomes and "crashed" not in outcomes else NO_VERDICT


def verdict_table(rows: Sequence[VerifiedMode], *, title: str) -> Table:
    """A row for each mode; below each of the largest differences what it may be."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("mode", no_wrap=True)
    table.add_column("proc.", justify="right")
    table.add_column("equals", max_width=33)
    for kind in COLUMNS:
        table.add_column(kind, justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            row.mode,
            "-" if row.processes is None else str(row.processes),
            row.equals,
            *(_cell(row, kind) for kind in COLUMNS),
            f"{row.seconds:.0f} s",
            _SHOWN[row.outcome],
        )
    return table


def _cell(row: VerifiedMode, kind: str) -> str:
    if kind not in row.differences:
        return "-"
    value, bound = row.differences[kind], row.tolerance[kind]
    shown = f"{value:.1e}" if value else "0"
    return f"{shown if value <= bound else f'[red]{shown}[/]'}\n[dim]<= {f'{bound:.1e}' if bound else '0'}[/]"
