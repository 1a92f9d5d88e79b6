"""A record of runs: JSON that is written after every run, and continued where it ends; and scripts that make one."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from lit_cifar.cli.usage_errors import cli_exit
from lit_cifar.errors import ConfigError
from lit_cifar.launch.forked import workers
from lit_cifar.launch.signals import handlers_put_back
from lit_cifar.tools.terminal import about, exit_orderly_when_terminated

Case = TypeVar("Case")
Row: TypeAlias = dict[str, Any]


def complete(
    output: Path,
    cases: Sequence[Case],
    train: Callable[[Case], Row],
    *,
    settings: Row,
    tell: Callable[[Row], object],
    at_once: int = 1,
) -> list[Row]:
    """Train those of `cases`, in their order, that `output` lacks, and return the rows of all.

    Args:
        output: The file. It holds `settings`, the time, command, versions and hardware of its beginning, and `rows`.
        cases: All that the record shall have; those that it has already come first.
        train: Trains one, and returns its row.
        settings: What all cases have in common.
        tell: Called with each new row.
        at_once: How many are trained at a time.

    Raises:
        ConfigError: The file has been made with other settings, or a run failed.
    """
    record: Row = about() | settings | {"rows": []}
    if output.exists():
        record = json.loads(output.read_text())
        if other := [name for name, value in settings.items() if record.get(name) != value]:
            problem = f"{output} has been made with other {', '.join(other)}"
            raise ConfigError(problem, remedy="repeat them, or name a new file")
    with handlers_put_back(), workers(at_once) as pool:
        exit_orderly_when_terminated()
        for row in pool.map(train, cases[len(record["rows"]) :]):
            record["rows"].append(row)
            output.write_text(json.dumps(record, indent=1) + "\n")
            tell(row)
    rows: list[Row] = record["rows"]
    return rows


def with_seeds(parser: argparse.ArgumentParser, *, what: str) -> argparse.ArgumentParser:
    """The parser of a script whose other arguments go to `fit`; `what` it trains with each seed."""
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=5, help=what)
    parser.add_argument("--at_once", type=int, default=1, help="runs at a time")
    return parser


def run_script(parser: argparse.ArgumentParser, main: Callable[..., None]) -> None:
    """Call `main` with the options, and with the other arguments as `flags`; mistakes are answered in a few lines."""
    options, flags = parser.parse_known_args()
    with cli_exit():
        main(flags=flags, **vars(options))
