"""`python -m lit_cifar bench`: measures sections, prints their rows, and writes them down."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from lit_cifar.errors import ConfigError
from lit_cifar.tools import terminal
from lit_cifar.tools.bench import Row, Settings, Unit, mode_speed, overhead, trace

# The sections by name, in the order in which `bench all` measures them.
SECTIONS: dict[str, Callable[[Settings], list[Row]]] = {
    "overhead": overhead.measure,
    "modes": mode_speed.measure,
}
_DESCRIPTION = """\
Measure what training costs on this machine. Each row is a ratio or difference of things that were measured in turn, in
the same run. `bench trace` shows where the time of one training step goes; it has a --help of its own."""


def main(args: list[str]) -> int:
    if args and args[0] == "trace":
        return trace.main(args[1:])
    options = bench_parser().parse_args(args)
    if options.rounds < 1:
        raise ConfigError(f"--rounds={options.rounds} would measure nothing", remedy="pass --rounds 5")
    file = terminal.writable(options.json)
    record = terminal.about()
    terminal.exit_orderly_when_terminated()
    terminal.say(f"{record['cpu']['model']}, {record['cpu']['cores']} cores; {', '.join(record['gpus']) or 'no GPU'}")
    found = []
    with tempfile.TemporaryDirectory(prefix="lit_cifar-bench-") as folder:
        settings = Settings(folder=Path(folder), rounds=options.rounds, small=options.small)
        for name in [name for name in SECTIONS if name in options.sections or "all" in options.sections]:
            terminal.say(f"measuring {name}")
            rows = SECTIONS[name](settings)
            terminal.console().print(_result_table(rows, title=name))
            found += [{"section": name} | row.to_json() for row in rows]
    terminal.write_json(file, record | {"rows": found})
    return 0


def _result_table(rows: list[Row], *, title: str) -> Table:
    """A row for each measurement; below the median the middle half of the repeats and their number."""
    found = terminal.table(title)
    found.add_column("what is measured", ratio=1)
    found.add_column("measured", justify="right", no_wrap=True)
    for row in rows:
        low, median, high = (shown(value, row.unit) for value in row.quartiles)
        name = escape(row.name) + (f"\n[dim]{escape(row.note)}[/]" if row.note else "")
        found.add_row(name, f"[bold]{median}[/]\n[dim]{low} to {high}, n = {len(row.values)}[/]")
    return found


def shown(value: float, unit: Unit) -> str:
    """A number with three significant digits and its unit: 0.917x, 34,600 img/s."""
    digits = f"{value:#.3g}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):,.0f}"
    return f"{digits.rstrip('.')}{unit if unit == 'x' else f' {unit}'}"


def bench_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("bench", description=_DESCRIPTION)
    parser.add_argument("sections", nargs="*", default="all", choices=[*SECTIONS, "all"], help="What to measure.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="How often each is timed (default: 5).")
    parser.add_argument("--json", metavar="FILE", help="Write every value, versions and hardware to it.")
    parser.add_argument("--small", action="store_true", help="A tiny network, for a look at the command itself.")
    return parser
