"""CSV files that are replaced as a whole, so that a reader never sees half a table.

A spreadsheet computes what begins with `=`, `+`, `-` or `@`, and names of files and classes may come from anybody. Such
a cell gets an apostrophe before it, by which a spreadsheet knows a text, unless it is a number.
"""

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_cifar.reporting.synced_files import replacing

_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def replace_csv(path: Path, rows: Iterable[Sequence[Any]], *, lineterminator: str = "\n") -> None:
    """Write the file as a whole: `path` is the old one until the new one is complete, also for a run that is killed."""
    with replacing(path) as file:
        csv.writer(file, lineterminator=lineterminator).writerows(map(_as_text, row) for row in rows)


def replace_split(path: Path, header: Sequence[str], split: str, rows: Iterable[Sequence[Any]]) -> None:
    """Replace the rows of `split`, the first column, and keep those of other splits under the same header."""
    kept: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as old:
            found = [[*map(plain, row)] for row in csv.reader(old)]
        if found[:1] == [[*header]]:
            kept = [row for row in found[1:] if row and row[0] != split]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_csv(path, [header, *kept, *([split, *row] for row in rows)])


def plain(cell: str) -> str:
    """A cell that was read, without the apostrophe that `replace_csv` has put before it."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _as_text(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) and not _is_number(cell) else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
