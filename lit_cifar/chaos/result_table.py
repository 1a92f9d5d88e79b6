"""The result of a job, and the table of results."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from lit_cifar.chaos.injector import Event


@dataclass
class JobResult:
    """The result of a job."""

    mode: str
    sizes: tuple[int, ...]  # numbers of processes of the job, in order
    precision: str  # its `--trainer.precision`
    bound: float  # the largest difference allowed
    events: list[Event] = field(default_factory=list)
    restarts: int = 0  # how often its processes were started again
    own_restarts: int = 0  # restarts that no fault has caused
    anew: int = 0  # restarts that started a new Python; the others were forked
    repeated: int = 0  # optimizer steps that were run again after a restart
    missing: int | None = None  # samples that no step of an epoch has counted
    doubled: int | None = None  # samples that an epoch counts too often
    # The largest difference from the end of the uninterrupted run; None if the job did not end.
    difference: float | None = None
    tensor: str | None = None  # the tensor with the largest difference
    seconds: float = 0.0  # duration, without that of the uninterrupted run
    problems: list[str] = field(default_factory=list)  # what is wrong; empty for a PASS

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def kinds(self) -> Counter[str]:
        return Counter(event.fault.kind for event in self.events)


_NAMES = {"kill": "SIGKILL", "term": "SIGTERM", "stop": "SIGSTOP", "resize": "resized", "truncate": "truncated"}
_NAMES |= {"disk": "disk full"}


def result_table(rows: Sequence[JobResult], *, title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("mode", no_wrap=True)
    table.add_column("processes", no_wrap=True)
    table.add_column("faults")
    for name in ("restarts", "steps\nrepeated", "ids\nmissing", "ids\ndoubled", "difference", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        sizes = ", ".join(map(str, row.sizes)) + (f"\n[dim]{row.precision}[/]")
        table.add_row(row.mode, sizes, *_cells([row]), end_section=row is rows[-1])
    table.add_row("total", "", *_cells(rows))
    return table


def _cells(rows: Sequence[JobResult]) -> list[str]:
    kinds = sum((row.kinds for row in rows), Counter[str]())
    restarts, own, anew = (sum(getattr(row, name) for row in rows) for name in ("restarts", "own_restarts", "anew"))
    during_saves = sum(event.during_save for row in rows for event in row.events)
    faults = ", ".join(f"{count} {_NAMES[kind]}" for kind, count in kinds.items())
    return [
        f"{kinds.total()}: {faults}\n[dim]{during_saves} during a save[/]",
        f"{restarts}\n[dim]{anew} new[/]" + (f"\n[dim]{own} unplanned[/]" if own else ""),
        str(sum(row.repeated for row in rows)),
        _sum([row.missing for row in rows]),
        _sum([row.doubled for row in rows]),
        _difference(rows[0]) if len(rows) == 1 else "",
        f"{sum(row.seconds for row in rows):.0f} s",
        "[bold green]PASS[/]" if all(row.passed for row in rows) else "[bold red]FAIL[/]",
    ]


def _sum(counts: Sequence[int | None]) -> str:
    """The sum of counts; a dash where one of them is not known."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return "-"
    return f"[red]{sum(known)}[/]" if sum(known) else "0"


def _difference(row: JobResult) -> str:
    if row.difference is None:
        return "-"
    shown = f"{row.difference:.1e}" if row.difference else "0"
    bound = f"<= {row.bound:.0e}" if row.bound else "bitwise"
    return f"{shown if row.difference <= row.bound else f'[red]{shown}[/]'}\n[dim]{bound}[/]"
