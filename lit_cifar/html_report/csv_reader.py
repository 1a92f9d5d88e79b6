"""Reads the CSV files of a run folder, and says which file and line is damaged."""

import csv
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.files import plain


def damaged(path: Path, problem: str) -> ConfigError:
    """The error about a file that is not as a run writes it."""
    return ConfigError(
        f"{path} is damaged: {problem}", remedy="restore it from a copy, or leave its run out of the report"
    )


class CsvRow:
    """A line of a table, which knows where it stands.

    Attributes:
        cells: What is in it, by column.
    """

    def __init__(self, path: Path, line: int, cells: dict[str, str]) -> None:
        self._path, self._line = path, line
        self.cells = cells

    def count(self, column: str) -> int:
        """A whole number that is not negative.

        Raises:
            ConfigError: It is none.
        """
        if not self.cells[column].isdecimal():
            raise self.damaged(f"{column} is {self.cells[column]!r}, not a whole number")
        return int(self.cells[column])

    def number(self, column: str) -> float:
        """A number; nan and inf are some.

        Raises:
            ConfigError: It is none.
        """
        try:
            return float(self.cells[column])
        except ValueError as error:
            raise self.damaged(f"{column} is {self.cells[column]!r}, not a number") from error

    def damaged(self, problem: str) -> ConfigError:
        """The error about this line."""
        return damaged(self._path, f"line {self._line}: {problem}")


def read_table(path: Path, *columns: str, growing: bool = False) -> list[CsvRow]:
    """The lines of a CSV file.

    Args:
        path: The file.
        *columns: What the header begins with, or, of a growing table, what it has.
        growing: Whether lines are added to the file while the run lasts. Then the last one may be incomplete, and is
            left out. Any other table is replaced as a whole.

    Raises:
        ConfigError: It cannot be read, is incomplete, or has other columns.
    """
    lines = _lines(path, growing=growing)
    _, header = next(lines, (0, []))
    has_columns = set(columns) <= set(header) if growing else tuple(header[: len(columns)]) == columns
    if not has_columns or len(set(header)) < len(header):
        raise damaged(path, f"its first line must name the columns {', '.join(columns)}, each once")
    rows = []
    for number, cells in lines:
        if len(cells) != len(header):
            raise damaged(path, f"line {number} has {len(cells)} cells, and the first has {len(header)}")
        rows.append(CsvRow(path, number, dict(zip(header, cells, strict=True))))
    return rows


def _lines(path: Path, *, growing: bool) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line, with its number."""
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="see its permissions") from error
    if text and not text.endswith("\n"):
        if not growing:
            raise damaged(path, "its last line is incomplete")
        text = text[: text.rfind("\n") + 1]
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        yield from ((reader.line_num, [*map(plain, cells)]) for cells in reader)
    except csv.Error as error:
        raise damaged(path, f"line {reader.line_num}: {error}") from error
