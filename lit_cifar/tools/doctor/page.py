"""The doctor's page: first whether the machine is fit and what is wrong, then the modes, then what was seen.

And a picture of the GPUs and the links between them.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lit_cifar.tools.doctor import Check, Finding, counted, size_of
from lit_cifar.tools.doctor.arithmetic import OPERATIONS
from lit_cifar.tools.doctor.examination import Examination
from lit_cifar.tools.doctor.links import Link
from lit_cifar.tools.doctor.measurement import SIZES, Measurement
from lit_cifar.tools.doctor.ranks import Ranks

_NVLINK, _HOST = "#1a9850", "#999999"
_COLORS = dict.fromkeys(("PIX", "PXB", "PHB"), "#4575b4")


def print_page(found: Examination, out: Console) -> None:
    """Print everything."""
    faults, notes = found.faults, [finding for finding in found.findings if not finding.is_fault]
    if faults:
        out.print(f"\n[bold red]Not fit: {counted(len(faults), 'fault')}[/]")
    else:
        out.print(f"\n[bold green]Fit: no fault was found, and {len(found.verdicts)} modes run here[/]")
    for number, finding in enumerate([*faults, *notes], start=1):
        _print_finding(out, f"{number}." if finding.is_fault else "note", finding)
    out.print(_table("modes", _modes(found)))
    out.print(_table("machine", _seen(found.machine)))
    out.print(_table("environment", _seen(found.environment)))
    if found.links:
        out.print(_links(found.links))
    out.print(_table("copies", _seen([found.copies])))
    out.print(_table("ranks", _ranks(found.ranks)))
    if len(found.ranks.measurements) > 1:
        out.print(_sweep(found.ranks, found.links))


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
        caption_justify="left",
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


def _links(links: Sequence[Link]) -> Table:
    """A row for each GPU that sends, and a column for each that receives."""
    gpus = sorted({link.source for link in links})
    cells = {(link.source, link.destination): _link(link) for link in links}
    rows = [(f"GPU {gpu}", *(cells.get((gpu, other), "-") for other in gpus)) for gpu in gpus]
    table = _table("links", rows, [Column("from \\ to"), *(Column(f"GPU {gpu}") for gpu in gpus)])
    if not all(link.peer for link in links):
        table.caption = "* neither can read the other's memory: copies take the way through the host"
    return table


def _link(link: Link) -> str:
    speed = "" if link.gb_s is None else f"\n[dim]{link.gb_s:.0f} GB/s"
    return f"{link.in_words}{'' if link.peer else ' *'}{speed}"


def _ranks(ranks: Ranks) -> list[tuple[str, str]]:
    failed = [] if ranks.failure is None else [("failed", escape(ranks.failure))]
    return failed + [(f"rank {each.rank}", _rank(each)) for each in ranks.measurements]


def _rank(found: Measurement) -> str:
    times = ", ".join(f"{name} {1e3 * median(found.seconds[name]):.2f} ms" for name in OPERATIONS)
    return f"{found.device}: {times}, results {'[red]wrong' if any(found.wrong.values()) else '[green]right'}"


def _sweep(ranks: Ranks, links: Sequence[Link]) -> Table:
    """The median time of all-reduces of each size, and the GB/s that each rank has sent, and received, in a ring."""
    backend = "NCCL" if ranks.accelerator == "cuda" else "gloo"
    speeds = [link.gb_s for link in links if link.gb_s is not None]
    best = f"; the slowest link can carry {min(speeds):.0f} GB/s" if speeds else ""
    count = len(ranks.measurements)
    sweeps = [each.sweep for each in ranks.measurements]
    # Of each call, the time of the rank that came last: it has not waited for others.
    seconds = [median(map(min, zip(*(sweep[size] for sweep in sweeps), strict=True))) for size in SIZES]
    sent = [2 * (count - 1) / count * size / 1e9 for size in SIZES]
    rows = [
        ("time", *(f"{1e3 * each:.3g} ms" for each in seconds)),
        ("GB/s", *(f"{gb / each:.2g}" for gb, each in zip(sent, seconds, strict=True))),
    ]
    columns = [Column("size"), *(Column(size_of(size), justify="right") for size in SIZES)]
    return _table(f"all-reduce over {count} ranks, {backend}{best}", rows, columns)


def draw(links: Sequence[Link], file: Path) -> None:
    """Draw the GPUs in a circle, with a line for each pair: dotted where one cannot read the other's memory."""
    figure = Figure(figsize=(6, 7), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
    axes.axis("off")
    if links:
        _draw_all(figure, axes, links)
    else:
        axes.text(0, 0, "torch sees fewer than two GPUs", ha="center")
    figure.savefig(file)


def _draw_all(figure: Figure, axes: Axes, links: Sequence[Link]) -> None:
    count = 1 + max(link.source for link in links)
    angles = [math.pi * (1 - 2 * index / count) for index in range(count)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    legend = {}
    for link in links:
        if link.source < link.destination:
            ends = zip(places[link.source], places[link.destination], strict=True)
            color = _NVLINK if link.kind.startswith("NV") else _COLORS.get(link.kind, _HOST)
            (line,) = axes.plot(*ends, "-" if link.peer else ":", color=color, linewidth=2, zorder=1)
            legend[link.in_words + ("" if link.peer else ", no direct copies")] = line
    for index, (x, y) in enumerate(places):
        axes.plot([x], [y], "o", markersize=36, color="white", markeredgecolor="black", zorder=2)
        axes.text(x, y, f"GPU {index}", ha="center", va="center", fontsize=8, zorder=3)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=1, frameon=False)
