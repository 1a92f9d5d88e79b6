"""A record of runs: JSON that is written after every run, and continued where it ends."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from lit_cifar.errors import ConfigError
from lit_cifar.launch.signals import handlers_put_back
from lit_cifar.tools.terminal import about, exit_orderly_when_terminated
from lit_cifar.tools.verify.runs import workers

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
        if settings != {name: record.get(name) for name in settings}:
            raise ConfigError(f"{output} has been made with other flags", remedy="repeat them, or name a new file")
    with handlers_put_back(), workers(at_once) as pool:
        exit_orderly_when_terminated()
        for row in pool.map(train, cases[len(record["rows"]) :]):
            record["rows"].append(row)
            output.write_text(json.dumps(record, indent=1) + "\n")
            tell(row)
    rows: list[Row] = record["rows"]
    return rows
