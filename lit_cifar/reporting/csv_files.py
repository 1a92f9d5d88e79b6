"""CSV files that are replaced as a whole, so that a reader never sees half a table."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_cifar.reporting.synced_files import replacing


def replace_csv(path: Path, rows: Iterable[Sequence[Any]], *, lineterminator: str = "\n") -> None:
    """Write the file as a whole: `path` is the old one until the new one is complete, also for a run that is killed."""
    with replacing(path) as file:
        csv.writer(file, lineterminator=lineterminator).writerows(rows)


def replace_split(path: Path, header: Sequence[str], split: str, rows: Iterable[Sequence[Any]]) -> None:
    """Replace the rows of `split`, the first column, and keep those of other splits under the same header."""
    kept: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as old:
            found = [*csv.reader(old)]
        if found[:1] == [[*header]]:
            kept = [row for row in found[1:] if row and row[0] != split]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_csv(path, [header, *kept, *([split, *row] for row in rows)])
