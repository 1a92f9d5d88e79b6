"""Reads a run folder's tables, for `report` and the notebooks, without pandas. Errors name file and line of damage."""

import csv
import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from lit_cifar.errors import ConfigError, one_line
from lit_cifar.reporting.evaluation_tables import CONFUSION, CONFUSION_COLUMNS, PER_RANK, PER_RANK_COLUMNS
from lit_cifar.reporting.files import plain
from lit_cifar.reporting.rank_statistics import AccuracyCount
from lit_cifar.reporting.run_report import FILE_NAME as ENVIRONMENT

METRICS = "metrics.csv"
_AUDIT, _CONFIG = "sample_audit.csv", "config.yaml"
_REMEDY = "name a run folder: `python -m lit_cifar fit` and `test` print theirs at the end"
# The types of the entries of `environment.json` that the page shows.
_OF_EVERY_RUN: dict[str, Any] = {
    **dict.fromkeys(("started", "command", "data", "strategy", "device", "precision"), str),
    **{"git": dict | None, "versions": dict, "cpu": dict, "gpus": list, "world_size": int},
}
_TYPES = {**_OF_EVERY_RUN, "git.commit": str, "cpu.cores": int, "num_nodes": int, "num_devices": int}
_COMMIT = re.compile("[0-9a-f]{7,64}")
_CLASS = "class "  # before the name of a class
Row = TypeVar("Row")


@dataclass(frozen=True)
class Confusion:
    """Counts of true and predicted classes."""

    classes: tuple[str, ...]  # C names
    counts: tuple[tuple[int, ...], ...]  # C rows, one for each true class, of C counts of predictions

    def of_class(self, index: int) -> AccuracyCount:
        """The number of images of a class, and of those that were recognised."""
        return AccuracyCount(self.counts[index][index], sum(self.counts[index]))

    @property
    def balanced_accuracy(self) -> float:
        """Mean accuracy of the classes that have images, from 0 to 1; nan without any."""
        found = [count.accuracy for index in range(len(self.classes)) if (count := self.of_class(index)).total]
        return sum(found) / len(found) if found else math.nan

    def most_confused(self, index: int) -> str | None:
        """The class that most wrong images of a class were taken for, and their number; None without wrong ones."""
        wrong = [0 if other == index else count for other, count in enumerate(self.counts[index])]
        return f"{self.classes[wrong.index(max(wrong))]}, {max(wrong):,}" if any(wrong) else None


@dataclass(frozen=True)
class Epoch:
    """A line of `sample_audit.csv`: the samples of an epoch, whose digest covers those of all epochs before."""

    number: int
    steps: int
    samples: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class RunContents:
    """A run, as its folder describes it."""

    folder: Path
    settings: dict[str, str]  # `config.yaml` as flags, such as "trainer.max_epochs": "15"
    environment: dict[str, Any]  # `environment.json`
    metrics: dict[str, list[tuple[int, float]]]  # `metrics.csv`: steps and values of each metric
    ranks: dict[str, list[AccuracyCount]]  # `per_rank.csv`: the counts of every rank, by split
    confusion: dict[str, Confusion]  # `confusion.csv` by split
    epochs: list[Epoch]  # `sample_audit.csv`; empty for evaluations

    @property
    def trained(self) -> bool:
        """Whether the run has logged a metric of training."""
        return any(name.startswith("train/") for name in self.metrics)


def read_run(folder: Path) -> RunContents:
    """Read a run folder; a `ConfigError` if it is not that of a run that has logged something, or a file is damaged."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}, not the folder of a run", remedy=_REMEDY)
    for name in (_CONFIG, ENVIRONMENT, METRICS):
        if not (folder / name).is_file():
            reason = "it is not that of a run, of one that has logged nothing yet, or of a `predict`"
            raise ConfigError(f"the run folder {folder} has no {name}: {reason}", remedy=_REMEDY)
    metrics = read_metrics(folder / METRICS)
    return RunContents(
        folder=folder,
        settings=dict(_flags(_mapping(folder / _CONFIG, yaml.safe_load))),
        environment=_environment(folder / ENVIRONMENT),
        metrics={name: sorted(logged.items()) for name, logged in metrics.items() if name != "epoch"},
        ranks=read_ranks(folder / PER_RANK),
        confusion=_confusion(folder / CONFUSION),
        epochs=read_table(folder / _AUDIT, _epoch, "epoch", "steps", "samples", "digest"),
    )


def _mapping(path: Path, parse: Callable[[str], Any], *, names: Collection[str] = ()) -> dict[str, Any]:
    """The content of a JSON or YAML file, which has these names."""
    try:
        content = parse(_text(path))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise _damaged(path, one_line(error)) from error
    if not isinstance(content, dict) or not content.keys() >= {*names}:
        raise _damaged(path, f"it does not say {', '.join(names) or 'names and values'}")
    return content


def _environment(path: Path) -> dict[str, Any]:
    """`environment.json`. The page puts parts of it into a command to paste, and the folder may be a stranger's."""
    content = _mapping(path, json.loads, names=_OF_EVERY_RUN)
    parts = {part: content[part] for part in ("cpu", "git") if isinstance(content[part], dict)}
    inner = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    for name, value in {**content, **inner}.items():
        if not isinstance(value, _TYPES.get(name, object)):
            raise _damaged(path, f"{name} is {json.dumps(value)[:40]}")
    if content["git"] and not _COMMIT.fullmatch(content["git"].get("commit", "")):
        raise _damaged(path, f"git.commit is {json.dumps(content['git'].get('commit'))[:60]}, not that of a commit")
    return content


def _flags(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as flags, such as "model.optimizer": "torch.optim.SGD" and "model.optimizer.lr": "0.1"."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and "class_path" in value:
            yield key, str(value["class_path"])
            for part, before in (("init_args", ""), ("dict_kwargs", "dict_kwargs.")):
                arguments = value.get(part)
                yield from _flags(arguments if isinstance(arguments, dict) else {}, f"{key}.{before}")
        elif isinstance(value, dict):
            yield from _flags(value, f"{key}.")
        else:
            yield key, value if isinstance(value, str) else json.dumps(value, default=str)


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """`metrics.csv`: the values of each metric by step. Values of one step may be in several lines."""
    found: dict[str, dict[int, float]] = {}

    def add(row: dict[str, str]) -> None:
        step = _count(row.pop("step"))
        for name, cell in row.items():
            if cell:
                found.setdefault(name, {})[step] = float(cell)

    read_table(path, add, "step")
    return found


def read_ranks(path: Path) -> dict[str, list[AccuracyCount]]:
    """`per_rank.csv`: the counts of every rank, by split; empty without such a file."""
    found: dict[str, list[AccuracyCount]] = {}

    def add(row: dict[str, str]) -> None:
        count = AccuracyCount(_count(row["correct"]), _count(row["total"]))
        if row["rank"] != "all":
            found.setdefault(row["split"], []).append(count)

    read_table(path, add, *PER_RANK_COLUMNS)
    return found


def _confusion(path: Path) -> dict[str, Confusion]:
    found: dict[str, dict[str, tuple[int, ...]]] = {}

    def add(row: dict[str, str]) -> tuple[str, ...]:
        split, name = row.pop("split"), row.pop("class")
        found.setdefault(split, {})[name] = tuple(map(_count, row.values()))
        return tuple(column.removeprefix(_CLASS) for column in row)

    def apart(header: list[str]) -> list[str]:
        """A class may have the name of a column."""
        return [*header[:2], *(_CLASS + name for name in header[2:])]

    classes = next(iter(read_table(path, add, *CONFUSION_COLUMNS, named=apart)), ())
    if any(tuple(counts) != classes for counts in found.values()):
        raise _damaged(path, "each split must have a line for each class, in the order of the columns")
    return {split: Confusion(classes, tuple(counts.values())) for split, counts in found.items()}


def _epoch(row: dict[str, str]) -> Epoch:
    return Epoch(_count(row["epoch"]), _count(row["steps"]), _count(row["samples"]), row["digest"])


def _count(cell: str) -> int:
    if not cell.isdecimal():
        raise ValueError(f"{cell!r} is not a whole number")
    return int(cell)


def read_table(
    path: Path,
    convert: Callable[[dict[str, str]], Row],
    *columns: str,
    named: Callable[[list[str]], list[str]] = list,
) -> list[Row]:
    """The lines of a CSV file with these columns, each converted, or a `ConfigError`; none if there is no such file.

    `named` gives the columns other names. An incomplete last line is left out: `metrics.csv` grows while its run lasts.
    `convert` may raise a `ValueError`.
    """
    if not path.exists():
        return []
    text = _text(path)
    reader = csv.reader(StringIO(text[: text.rfind("\n") + 1], newline=""), strict=True)
    try:
        header = [*map(plain, next(reader, []))]
        if not {*columns} <= {*header}:
            raise ValueError(f"it must name the columns {', '.join(columns)}")
        header = named(header)
        return [convert(_named(header, cells)) for cells in reader]
    except (ValueError, csv.Error) as error:
        raise _damaged(path, f"line {reader.line_num}: {one_line(error)}") from error


def _named(header: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) != len(header):
        raise ValueError(f"{len(cells)} cells, and the first line has {len(header)}")
    return dict(zip(header, map(plain, cells), strict=True))


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="see its permissions") from error


def _damaged(path: Path, problem: str) -> ConfigError:
    remedy = "restore it from a copy, or leave its run out of the report"
    return ConfigError(f"{path} is damaged: {problem}", remedy=remedy)
