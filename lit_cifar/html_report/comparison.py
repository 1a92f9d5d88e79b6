"""Several runs beside one another: whether they can be compared, what to call them, in what they differ."""

import os
from collections.abc import Sequence
from pathlib import Path

from lit_cifar.errors import ConfigError
from lit_cifar.html_report.run import Run

# A run folder of its own, and what a resumed or tested run is given, make no other training.
_OF_EVERY_RUN = {"run_dir", "resume", "config"}


def names_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its path without the parts that all begin and end with.

    Raises:
        ConfigError: A folder is given twice.
    """
    paths = [Path(os.path.normpath(folder.absolute())).parts for folder in folders]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ConfigError(f"the run folder {folders[index]} is given twice", remedy="name it once")
    if len(paths) == 1:
        return [paths[0][-1]]
    shortest = min(map(len, paths))
    front = _num_common(paths, shortest - 1)
    back = _num_common([path[::-1] for path in paths], shortest - 1 - front)
    return ["/".join(path[front : len(path) - back]) for path in paths]


def _num_common(paths: Sequence[Sequence[str]], most: int) -> int:
    """How many parts all paths begin with, up to `most`."""
    same = (len(set(parts)) == 1 for parts in zip(*paths, strict=False))
    return next((index for index, equal in enumerate(same) if not equal or index == most), most)


def check_comparable(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Find out whether the runs have the same data set.

    Raises:
        ConfigError: They have different ones.
    """
    first = runs[0].environment["data"]
    classes = {c.classes: names[i] for i, run in enumerate(runs) for c in run.confusion.values()}
    for run, name in zip(runs, names, strict=True):
        data = run.environment["data"]
        if data != first:
            raise _other_data(f"{names[0]} has {first}, {name} has {data}", run.folder)
    if len(classes) > 1:
        one, other = list(classes.values())[:2]
        raise _other_data(f"{one} and {other} have other classes", runs[names.index(other)].folder)


def _other_data(problem: str, folder: Path) -> ConfigError:
    return ConfigError(
        f"the runs have different data sets, whose results cannot be compared: {problem}",
        remedy=f"make a page for each, e.g. python -m lit_cifar report {folder}",
    )


def different_settings(runs: Sequence[Run]) -> dict[str, list[str | None]]:
    """The flags in which the runs differ, each with the value of every run, None where a run has no such setting.

    A whole part that some command lacks is left out: a `test` has no flags for checkpoints.
    """
    parts = set.intersection(*({key.partition(".")[0] for key in run.settings} for run in runs)) - _OF_EVERY_RUN
    keys = dict.fromkeys(key for run in runs for key in run.settings if key.partition(".")[0] in parts)
    rows = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}
