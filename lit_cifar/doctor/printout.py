"""What the doctor prints: first whether the machine is fit and what is wrong, then the modes, then what was seen."""

from collections.abc import Iterable, Sequence
from statistics import median

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_cifar.doctor.all_reduce import SIZES
from lit_cifar.doctor.arithmetic import OPERATIONS
from lit_cifar.doctor.examination import Examination
from lit_cifar.doctor.findings import Finding, size_of
from lit_cifar.doctor.links import Link
from lit_cifar.doctor.ranks import Ranks
from lit_cifar.doctor.verdicts import ModeVerdict


def print_page(found: Examination, out: Console) -> None:
    """Print everything."""
    faults, notes = found.faults, [finding for finding in found.findings if not finding.is_fault]
    if faults:
        out.print(f"\n[bold red]Not fit: {_count(len(faults), 'fault')}[/]")
    else:
        out.print(f"\n[bold green]Fit: no fault was found, and {len(found.verdicts)} modes run here[/]")
    for number, finding in enumerate([*faults, *notes], start=1):
        _print_finding(out, f"{number}." if finding.is_fault else "note", finding)
    out.print(_modes(found.verdicts, faults))
    out.print(_facts("machine", found.machine))
    out.print(_facts("environment", found.environment))
    if found.links:
        out.print(_links(found.links))
    out.print(_facts("copies", [("GPU to GPU", found.copies)]))
    _print_ranks(out, found.ranks, found.links)


def _print_finding(out: Console, label: str, finding: Finding) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=5, justify="right", style="bold")
    table.add_column()
    table.add_row(label, escape(finding.problem))
    out.print(table)
    out.print(f"      {finding.mend}", markup=False, style="cyan", soft_wrap=True)  # a command to paste stays whole


def _modes(verdicts: Sequence[ModeVerdict], faults: Sequence[Finding]) -> Table:
    table = _table("modes")
    for verdict in verdicts:
        if verdict.fit:
            words = f"[green]{verdict.reason}"
        else:
            numbers = [str(i) for i, fault in enumerate(faults, start=1) if verdict.mode in fault.modes]
            words = f"[red]no, see {', '.join(numbers)}"
        table.add_row(verdict.mode, words)
    return table


def _facts(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    table = _table(title)
    for name, value in facts:
        table.add_row(name, escape(value))
    return table


def _links(links: Sequence[Link]) -> Table:
    """A row for each GPU that sends, and a column for each that receives."""
    gpus = sorted({link.source for link in links})
    cells = {(link.source, link.destination): link for link in links}
    table = Table(title="\nlinks", title_justify="left", title_style="bold", box=SIMPLE)
    if not all(link.peer for link in links):
        table.caption = "* neither can read the other's memory: copies take the way through the host"
        table.caption_justify = "left"
    table.add_column("from \\ to")
    for gpu in gpus:
        table.add_column(f"GPU {gpu}")
    for gpu in gpus:
        table.add_row(f"GPU {gpu}", *("-" if gpu == other else _of_link(cells[gpu, other]) for other in gpus))
    return table


def _of_link(link: Link) -> str:
    speed = "" if link.gb_s is None else f"\n[dim]{link.gb_s:.0f} GB/s"
    return f"{link.in_words}{'' if link.peer else ' *'}{speed}"


def _print_ranks(out: Console, ranks: Ranks, links: Sequence[Link]) -> None:
    found = ranks.measurements
    table = _table("ranks")
    if ranks.failure is not None:
        table.add_row("failed", escape(ranks.failure))
    for each in found:
        times = ", ".join(f"{name} {1e3 * median(each.seconds[name]):.2f} ms" for name in OPERATIONS)
        right = "[red]wrong" if any(each.wrong.values()) else "[green]right"
        table.add_row(f"rank {each.rank}", f"{each.device}: {times}, results {right}")
    out.print(table)
    if len(found) > 1:
        out.print(_sweep(ranks, links))


def _sweep(ranks: Ranks, links: Sequence[Link]) -> Table:
    backend = "NCCL" if ranks.accelerator == "cuda" else "gloo"
    speeds = [link.gb_s for link in links if link.gb_s is not None]
    best = f"; the slowest link can carry {min(speeds):.0f} GB/s" if speeds else ""
    title = f"\nall-reduce over {len(ranks.measurements)} ranks, {backend}{best}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
    table.add_column("size")
    for size in SIZES:
        table.add_column(size_of(size), justify="right")
    table.add_row("time", *(f"{1e3 * ranks.all_reduce_s(size):.3g} ms" for size in SIZES))
    table.add_row("GB/s", *(f"{ranks.all_reduce_gb_s(size):.2g}" for size in SIZES))
    return table


def _table(title: str) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, show_header=False)
    table.padding = (0, 2)
    table.add_column(no_wrap=True)
    table.add_column()
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
