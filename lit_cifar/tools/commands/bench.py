"""`python -m lit_cifar bench`: measures sections, prints their rows, and writes them down."""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lit_cifar.errors import ConfigError
from lit_cifar.tools.bench import data_path, mode_speed, overhead, recovery
from lit_cifar.tools.bench.measurements import Report, Row, Settings, markdown, result_table
from lit_cifar.tools.commands import trace
from lit_cifar.tools.commands.terminal import (
    CommandParser,
    about,
    console,
    exit_orderly_when_terminated,
    say,
    writable,
    write_json,
)

# By name, in the order in which `bench all` measures them.
SECTIONS: dict[str, Callable[[Settings, Report], list[Row]]] = {
    "data": data_path.measure,
    "overhead": overhead.measure,
    "modes": mode_speed.measure,
    "recovery": recovery.measure,
}
_DESCRIPTION = """\
Measure what training costs on this machine. Each row is a ratio or difference of things that were measured in turn, in
the same run. `bench trace` shows where the time and the memory of one training step go; it has a --help of its own."""


def main(args: list[str]) -> int:
    """Measure, print and write; return 0."""
    if args and args[0] == "trace":
        return trace.main(args[1:])
    options = bench_parser().parse_args(args)
    names = _sections(options.sections)
    if options.rounds < 1:
        raise ConfigError(f"--rounds={options.rounds} would measure nothing", remedy="pass --rounds 5")
    json_file, page = writable(options.json), writable(options.markdown, option="--markdown")
    record = about()
    exit_orderly_when_terminated()
    rows = _measure(names, options)
    write_json(json_file, record | {"rows": [row.to_json() for row in rows]})
    if page is not None:
        page.write_text(markdown(rows))
    return 0


def _measure(names: list[str], options: argparse.Namespace) -> list[Row]:
    """The rows of all sections; a section's table is printed when it has been measured."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="lit_cifar-bench-") as folder:
        settings = Settings(
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            folder=Path(folder),
            rounds=options.rounds,
            small=options.small,
        )
        console().print(_title(about()), markup=False)
        for name in names:
            found = SECTIONS[name](settings, lambda line: say(f"measuring {line}"))
            console().print(result_table(found, title=name))
            rows += found
    return rows


def _title(record: dict[str, object]) -> str:
    """What was measured on, in a line."""
    cpu, versions, gpus = record["cpu"], record["versions"], record["gpus"]
    assert isinstance(cpu, dict)
    assert isinstance(versions, dict)
    assert isinstance(gpus, list)
    return f"{cpu['model']}, {cpu['cores']} cores; {', '.join(gpus) or 'no GPU'}; torch {versions['torch']}"


def _sections(names: list[str]) -> list[str]:
    known = [*SECTIONS, "all"]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"bench has no section {unknown[0]!r}", remedy=f"choose among {', '.join(known)}")
    return list(SECTIONS) if "all" in names else [name for name in SECTIONS if name in names]


def bench_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = CommandParser("bench", description=_DESCRIPTION)
    parser.add_argument(
        "sections",
        nargs="*",
        default=["all"],
        metavar="SECTION",
        help=f"What to measure: {', '.join(SECTIONS)}, or all (default).",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="How often each is timed (default: 5).")
    parser.add_argument("--json", metavar="FILE", help="Write every value, versions and hardware to it.")
    parser.add_argument("--markdown", metavar="FILE", help="Write the rows to it, as a table for a page.")
    parser.add_argument("--small", action="store_true", help="A tiny network, for a look at the command itself.")
    return parser
