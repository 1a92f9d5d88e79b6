"""What the folder of a run says about it, without pandas."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lit_cifar.errors import ConfigError
from lit_cifar.html_report.csv_reader import damaged, read_table
from lit_cifar.reporting.evaluation_tables import CONFUSION, CONFUSION_COLUMNS, PER_RANK, PER_RANK_COLUMNS
from lit_cifar.reporting.rank_statistics import AccuracyCount, pooled
from lit_cifar.reporting.run_report import FILE_NAME as ENVIRONMENT

SPLITS = ("val", "test")
_RECEIPT = "receipt.csv"
_KNOWN = (
    "started",
    "command",
    "git",
    "versions",
    "cpu",
    "gpus",
    "data",
    "strategy",
    "device",
    "precision",
    "world_size",
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

    def count(self, split: str) -> AccuracyCount | None:
        """The latest evaluation of a split, over all ranks."""
        return pooled(self.ranks[split]) if split in self.ranks else None


def read_run(folder: Path) -> RunContents:
    """Read the files of a run folder.

    Raises:
        ConfigError: It is not the folder of a run that has logged something, or one of its files is damaged.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}, not the folder of a run", remedy=_REMEDY)
    metrics = _required(folder, "metrics.csv", "it has logged nothing yet, or it is a `predict`")
    return RunContents(
        folder=folder,
        settings=dict(_flags(_mapping(_required(folder, "config.yaml", "the folder is not that of a run"), "YAML"))),
        environment=_environment(_required(folder, ENVIRONMENT, "the folder is not that of a run")),
        metrics=_metrics(metrics),
        ranks=_ranks(folder / PER_RANK),
        confusion=_confusion(folder / CONFUSION),
        epochs=_epochs(folder / _RECEIPT),
    )


_REMEDY = "name a run folder: `python -m lit_cifar fit` and `test` print theirs at the end"


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
        raise damaged(path, f"it is not {kind}") from error
    if not isinstance(content, dict):
        raise damaged(path, f"it is not a {kind} file of names and values")
    return content


def _environment(path: Path) -> dict[str, Any]:
    content = _mapping(path, "JSON")
    missing = [name for name in _KNOWN if name not in content]
    if missing:
        raise damaged(path, f"it says nothing of {', '.join(missing)}")
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


def _metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """The values of each metric by step; metrics that were logged at the same step may be in several lines."""
    found: dict[str, dict[int, float]] = {}
    for row in read_table(path, "step", growing=True):
        for name in row.cells.keys() - {"step", "epoch"}:
            if row.cells[name]:
                found.setdefault(name, {})[row.count("step")] = row.number(name)
    return {name: sorted(values.items()) for name, values in found.items()}


def _ranks(path: Path) -> dict[str, list[AccuracyCount]]:
    found: dict[str, list[AccuracyCount]] = {}
    if not path.exists():
        return found
    for row in read_table(path, *PER_RANK_COLUMNS):
        counts = found.setdefault(row.cells["split"], [])
        try:
            count = AccuracyCount(row.count("correct"), row.count("total"))
        except ValueError as error:  # a ConfigError is one too
            raise error if isinstance(error, ConfigError) else row.damaged(str(error)) from error
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
    if not path.exists():
        return {}
    rows = read_table(path, *CONFUSION_COLUMNS)
    classes = tuple(list(rows[0].cells)[2:]) if rows else ()
    for row in rows:
        counts = found.setdefault(row.cells["split"], [])
        if [row.cells["class"]] != [*classes[len(counts) : len(counts) + 1]]:
            raise row.damaged(f"class {row.cells['class']!r} is not the next of the first line's")
        counts.append(tuple(row.count(name) for name in classes))
    for split, counts in found.items():
        if len(counts) < len(classes):
            raise damaged(path, f"{split} has {len(counts)} lines for {len(classes)} classes")
    return {split: Confusion(classes, tuple(counts)) for split, counts in found.items()}


def _epochs(path: Path) -> list[Epoch]:
    if not path.exists():
        return []
    rows = read_table(path, "epoch", "steps", "samples", "digest")
    return [Epoch(row.count("epoch"), row.count("steps"), row.count("samples"), row.cells["digest"]) for row in rows]
