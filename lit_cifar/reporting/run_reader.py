"""What the folder of a run says about it: the one reader of its tables, for `report` and the notebooks.

It needs no pandas, and says which file and line is damaged.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.evaluation_tables import CONFUSION, CONFUSION_COLUMNS, PER_RANK, PER_RANK_COLUMNS
from lit_cifar.reporting.files import plain
from lit_cifar.reporting.rank_statistics import AccuracyCount, pooled
from lit_cifar.reporting.run_report import FILE_NAME as ENVIRONMENT

SPLITS = ("val", "test")
METRICS = "metrics.csv"
_RECEIPT = "receipt.csv"
_REMEDY = "name a run folder: `python -m lit_cifar fit` and `test` print theirs at the end"
_OF_EVERY_RUN = (
    *("started", "command", "git", "versions", "cpu", "gpus"),
    *("data", "strategy", "device", "precision", "world_size"),
)


@dataclass(frozen=True)
class Confusion:
    """How often each class was taken for each.

    Attributes:
        classes: C names.
        counts: C rows, one for each true class, of C counts, one for each predicted class.
    """

    classes: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def of_class(self, index: int) -> AccuracyCount:
        """The images of a class, and how many of them were recognised."""
        return AccuracyCount(self.counts[index][index], sum(self.counts[index]))


@dataclass(frozen=True)
class Epoch:
    """A line of `receipt.csv`: the samples of an epoch, whose digest covers those of all epochs before."""

    number: int
    steps: int
    samples: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class RunContents:
    """A run, as its folder describes it.

    Attributes:
        folder: Where it is.
        settings: `config.yaml` as flags, e.g. "trainer.max_epochs": "15".
        environment: `environment.json`.
        metrics: `metrics.csv`: of each metric the steps at which it was logged, with its values.
        ranks: `per_rank.csv`: the counts of every rank, by split.
        confusion: `confusion.csv` by split; empty for runs of earlier releases, which have no such file.
        epochs: `receipt.csv`; empty for evaluations.
    """

    folder: Path
    settings: dict[str, str]
    environment: dict[str, Any]
    metrics: dict[str, list[tuple[int, float]]]
    ranks: dict[str, list[AccuracyCount]]
    confusion: dict[str, Confusion]
    epochs: list[Epoch]

    @property
    def trained(self) -> bool:
        """Whether it has logged a metric of training."""
        return any(name.startswith("train/") for name in self.metrics)


def read_run(folder: Path) -> RunContents:
    """Read the files of a run folder.

    Raises:
        ConfigError: It is not the folder of a run that has logged something, or one of its files is damaged.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}, not the folder of a run", remedy=_REMEDY)
    metrics = read_metrics(_required(folder, METRICS, "it has logged nothing yet, or it is a `predict`"))
    return RunContents(
        folder=folder,
        settings=dict(_flags(_mapping(_required(folder, "config.yaml", "the folder is not that of a run"), "YAML"))),
        environment=_environment(_required(folder, ENVIRONMENT, "the folder is not that of a run")),
        metrics={name: sorted(logged.items()) for name, logged in metrics.items() if logged and name != "epoch"},
        ranks=read_ranks(folder / PER_RANK),
        confusion=_confusion(folder / CONFUSION),
        epochs=_epochs(folder / _RECEIPT),
    )


def _required(folder: Path, name: str, reason: str) -> Path:
    if not (folder / name).is_file():
        raise ConfigError(f"the run folder {folder} has no {name}: {reason}", remedy=_REMEDY)
    return folder / name


def _mapping(path: Path, kind: str) -> dict[str, Any]:
    """The content of a JSON or YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if kind == "JSON" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise _damaged(path, f"it is not {kind}") from error
    if not isinstance(content, dict):
        raise _damaged(path, f"it is not a {kind} file of names and values")
    return content


def _environment(path: Path) -> dict[str, Any]:
    content = _mapping(path, "JSON")
    missing = [name for name in _OF_EVERY_RUN if name not in content]
    if missing:
        raise _damaged(path, f"it says nothing of {', '.join(missing)}")
    return content


def _flags(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as one types them, e.g. "model.optimizer": "torch.optim.SGD" and "model.optimizer.lr": "0.1"."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and "class_path" in value:
            yield key, str(value["class_path"])
            yield from _flags(value.get("init_args") or {}, f"{key}.")
        elif isinstance(value, dict):
            yield from _flags(value, f"{key}.")
        else:
            yield key, value if isinstance(value, str) else json.dumps(value, default=str)


# ---------------------------------------------------------------- the tables


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """`metrics.csv`: the values of each column by step. What was logged at the same step may be in several lines.

    Raises:
        ConfigError: The file is damaged.
    """
    found: dict[str, dict[int, float]] = {}
    for row in read_table(path, "step", growing=True):
        for name in row.cells.keys() - {"step"}:
            values = found.setdefault(name, {})
            if row.cells[name]:
                values[row.count("step")] = row.number(name)
    return found


def read_ranks(path: Path) -> dict[str, list[AccuracyCount]]:
    """`per_rank.csv`: the counts of every rank, by split; empty without such a file.

    Raises:
        ConfigError: The file is damaged.
    """
    found: dict[str, list[AccuracyCount]] = {}
    for row in read_table(path, *PER_RANK_COLUMNS) if path.exists() else ():
        counts = found.setdefault(row.cells["split"], [])
        correct, total = row.count("correct"), row.count("total")
        if correct > total:
            raise row.damaged(f"not a count: {correct} correct of {total}")
        count = AccuracyCount(correct, total)
        if row.cells["rank"] == "all":
            if count != pooled(counts):
                raise row.damaged(f"it is not the sum of the {len(counts)} ranks above it")
        elif row.cells["rank"] == str(len(counts)):
            counts.append(count)
        else:
            raise row.damaged(f"rank {row.cells['rank']} where rank {len(counts)} must be")
    return found


def _confusion(path: Path) -> dict[str, Confusion]:
    found: dict[str, list[tuple[int, ...]]] = {}
    classes: tuple[str, ...] = ()
    for row in read_table(path, *CONFUSION_COLUMNS) if path.exists() else ():
        classes = tuple(row.cells)[2:]
        counts = found.setdefault(row.cells["split"], [])
        if [row.cells["class"]] != [*classes[len(counts) : len(counts) + 1]]:
            raise row.damaged(f"class {row.cells['class']!r} is not the next of the first line's")
        counts.append(tuple(row.count(name) for name in classes))
    for split, counts in found.items():
        if len(counts) < len(classes):
            raise _damaged(path, f"{split} has {len(counts)} lines for {len(classes)} classes")
    return {split: Confusion(classes, tuple(counts)) for split, counts in found.items()}


def _epochs(path: Path) -> list[Epoch]:
    rows = read_table(path, "epoch", "steps", "samples", "digest") if path.exists() else ()
    return [Epoch(row.count("epoch"), row.count("steps"), row.count("samples"), row.cells["digest"]) for row in rows]


class CsvRow:
    """A line of a table, which knows where it stands.

    Attributes:
        cells: What is in it, by column.
    """

    def __init__(self, path: Path, line: int, cells: dict[str, str]) -> None:
        self._path, self._line = path, line
        self.cells = cells

    def count(self, column: str) -> int:
        """A whole number that is not negative; a ConfigError if it is none."""
        if not self.cells[column].isdecimal():
            raise self.damaged(f"{column} is {self.cells[column]!r}, not a whole number")
        return int(self.cells[column])

    def number(self, column: str) -> float:
        """A number, also nan or inf; a ConfigError if it is none."""
        try:
            return float(self.cells[column])
        except ValueError as error:
            raise self.damaged(f"{column} is {self.cells[column]!r}, not a number") from error

    def damaged(self, problem: str) -> ConfigError:
        """The error about this line."""
        return _damaged(self._path, f"line {self._line}: {problem}")


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
        raise _damaged(path, f"its first line must name the columns {', '.join(columns)}, each once")
    rows = []
    for number, cells in lines:
        if len(cells) != len(header):
            raise _damaged(path, f"line {number} has {len(cells)} cells, and the first has {len(header)}")
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
            raise _damaged(path, "its last line is incomplete")
        text = text[: text.rfind("\n") + 1]
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        yield from ((reader.line_num, [*map(plain, cells)]) for cells in reader)
    except csv.Error as error:
        raise _damaged(path, f"line {reader.line_num}: {error}") from error


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{path} is damaged: {problem}", remedy="restore it from a copy, or leave its run out of the report"
    )
