"""Several runs beside one another: what to call them, whether they can be compared, in what they differ."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_cifar.errors import ConfigError
from lit_cifar.html_report.run_reader import RunContents


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
    most = min(map(len, paths)) - 1  # a part of each path is left
    front = _num_common(paths, most)
    back = _num_common([path[::-1] for path in paths], most - front)
    return ["/".join(path[front : len(path) - back]) for path in paths]


def _num_common(paths: Sequence[Sequence[str]], most: int) -> int:
    """How many parts, up to `most`, all paths begin with."""
    return next((index for index in range(most) if len({path[index] for path in paths}) > 1), most)


def check_comparable(runs: Mapping[str, RunContents]) -> None:
    """Find out whether the runs have the same data set.

    Raises:
        ConfigError: They have different ones.
    """
    first, *others = runs
    for name in others:
        for what, one, other in zip(("data", "classes"), _data_of(runs[first]), _data_of(runs[name]), strict=True):
            if one and other and one != other:
                page = shlex.join(["python", "-m", "lit_cifar", "report", str(runs[name].folder)])
                raise ConfigError(
                    f"the runs have different {what}, and cannot be compared:\n{first} has {one}\n{name} has {other}",
                    remedy=f"make a page for each, e.g. {page}",
                )


def _data_of(run: RunContents) -> tuple[str, str]:
    """The title of the data set, and its classes where they are known."""
    classes = [confusion.classes for confusion in run.confusion.values()]
    return run.environment["data"], ", ".join(classes[0]) if classes else ""


def different_settings(runs: Sequence[RunContents]) -> dict[str, list[str | None]]:
    """The flags in which the runs differ, each with the value of every run, None where a run has no such flag.

    A whole part of the configuration that some run lacks is left out: `test` has no flags for checkpoints.
    """
    parts = set.intersection(*({key.partition(".")[0] for key in run.settings} for run in runs))
    keys = dict.fromkeys(key for run in runs for key in run.settings if key.partition(".")[0] in parts)
    rows = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}
