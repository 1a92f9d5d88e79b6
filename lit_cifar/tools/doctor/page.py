"""The doctor's page: first whether the machine is fit and what is wrong, then the modes, then what was seen."""

from collections.abc import Iterable, Sequence
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lit_cifar.reporting.run_report import counted
from lit_cifar.tools.doctor import Check, Finding, size_of
from lit_cifar.tools.doctor.examination import Examination
from lit_cifar.tools.doctor.measurement import OPERATIONS, SIZES, Measurement
from lit_cifar.tools.doctor.ranks import Ranks


def print_page(found: Examination, out: Console) -> None:
    """Print everything."""
    faults = found.faults
    if faults:
        out.print(f"\n[bold red]Not fit: {counted(len(faults), 'fault')}[/]")
    else:
        out.print(f"\n[bold green]Fit: no fault was found, and {len(found.verdicts)} modes run here[/]")
    for number, fault in enumerate(faults, start=1):
        _print_finding(out, f"{number}.", fault)
    for note in found.findings:
        if not note.modes:
            _print_finding(out, "note", note)
    out.print(_table("modes", _modes(found)))
    out.print(_table("machine", _seen(found.machine)))
    out.print(_table("environment", _seen(found.environment)))
    if found.links:
        out.print("\n[bold italic]links, by nvidia-smi topo -m[/]")
        out.print(Text.from_ansi(found.links), soft_wrap=True)
    out.print(_table("copies", _seen([found.copies])))
    out.print(_table("ranks", _ranks(found.ranks)))
    if len(found.ranks.measurements) > 1:
        out.print(_sweep(found.ranks))


def _print_finding(out: Console, label: str, finding: Finding) -> None:
    table = Table.grid(Column(width=5, justify="right", style="bold"), Column(), padding=(0, 1))
    table.add_row(label, escape(finding.problem))
    out.print(table)
    out.print(f"      {finding.mend}", markup=False, style="cyan", soft_wrap=True)  # a command to paste stays whole


def _table(title: str, rows: Iterable[Sequence[str]], columns: Sequence[Column] = ()) -> Table:
    """A name and a text in each row; or, if there are `columns`, a table with a line of their names."""
    table = Table(
        *(columns or (Column(no_wrap=True), Column())),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE if columns else None,
        show_header=bool(columns),
        padding=(0, 1 if columns else 2),
    )
    for row in rows:
        table.add_row(*row)
    return table


def _seen(checks: Iterable[Check]) -> list[tuple[str, str]]:
    return [(check.name, escape(check.seen)) for check in checks]


def _modes(found: Examination) -> list[tuple[str, str]]:
    rows = []
    for verdict in found.verdicts:
        name = verdict.mode.name
        numbers = [str(number) for number, fault in enumerate(found.faults, start=1) if name in fault.modes]
        rows.append((name, f"[red]no, see {', '.join(numbers)}" if numbers else f"[green]{verdict.verdict}"))
    return rows


def _ranks(ranks: Ranks) -> list[tuple[str, str]]:
    failed = [] if ranks.failure is None else [("failed", escape(ranks.failure))]
    return failed + [(f"rank {each.rank}", _rank(each)) for each in ranks.measurements]


def _rank(found: Measurement) -> str:
    times = ", ".join(f"{name} {1e3 * median(found.seconds[name]):.2f} ms" for name in OPERATIONS)
    return f"{found.device}: {times}, results {'[red]wrong' if any(found.wrong.values()) else '[green]right'}"


def _sweep(ranks: Ranks) -> Table:
    """The median time of all-reduces of each size, and the GB/s that each rank has sent, and received, in a ring."""
    count = len(ranks.measurements)
    # Of each call, the time of the rank that came last: it has not waited for others.
    calls = {size: zip(*(each.sweep[size] for each in ranks.measurements), strict=True) for size in SIZES}
    seconds = {size: median(map(min, of_size)) for size, of_size in calls.items()}
    rows = [
        ("time", *(f"{1e3 * each:.3g} ms" for each in seconds.values())),
        ("GB/s", *(f"{2 * (count - 1) / count * size / 1e9 / each:.2g}" for size, each in seconds.items())),
    ]
    columns = [Column("size"), *(Column(size_of(size), justify="right") for size in SIZES)]
    return _table(f"all-reduce over {count} ranks, {'NCCL' if ranks.accelerator == 'cuda' else 'gloo'}", rows, columns)
