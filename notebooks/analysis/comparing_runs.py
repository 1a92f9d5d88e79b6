"""Is one kind of run better than another, or is the difference no larger than between seeds?"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.run_frames import BLUE, GREY, RED, read_metrics, tidy
from lit_cifar.errors import ConfigError

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two groups of runs, compared by their means."""

    num_runs: tuple[int, int]  # number of runs in each group
    difference: float  # mean of the first group minus mean of the second
    low: float  # lower end of the 95 % interval of the difference
    high: float  # upper end of it
    p: float  # probability of a difference of at least this size if both groups have the same mean


def welch(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two groups that may differ in their spread (B. L. Welch, Biometrika 34, 1947).

    Raises:
        ConfigError: A group of fewer than two runs, or no spread at all.
    """
    groups = [np.asarray(group, float) for group in (first, second)]
    if min(map(len, groups)) < 2:
        raise ConfigError("a comparison needs two runs or more in each group", remedy="train more seeds")
    parts = [group.var(ddof=1) / len(group) for group in groups]
    if not sum(parts):
        raise ConfigError(
            "the runs of each group are all equal, so nothing is known of chance", remedy="train more seeds"
        )
    freedom = sum(parts) ** 2 / sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    return _compared(
        groups[0].mean() - groups[1].mean(), np.sqrt(sum(parts)), freedom, num_runs=(len(first), len(second))
    )


def paired(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare runs pair by pair, as those with the same seed (Student's t of their differences).

    Raises:
        ConfigError: Fewer than two pairs, or no spread at all.
    """
    differences = np.asarray(first, float) - np.asarray(second, float)
    if len(differences) < 2 or not differences.std():
        raise ConfigError("a comparison needs two or more pairs that differ", remedy="train more seeds")
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return _compared(differences.mean(), error, len(differences) - 1, num_runs=(len(first), len(second)))


def _compared(difference: float, error: float, freedom: float, *, num_runs: tuple[int, int]) -> Comparison:
    values, shares = _student(freedom)
    margin = float(np.interp(0.975, shares, values)) * error
    p = 2 * (1 - float(np.interp(abs(difference) / error, values, shares)))
    return Comparison(
        num_runs=num_runs,
        difference=float(difference),
        low=float(difference - margin),
        high=float(difference + margin),
        p=p,
    )


def _student(freedom: float) -> tuple[Floats, Floats]:
    """Student's t distribution as a table: values, and the share of the distribution below each.

    With t = sqrt(freedom) tan(angle) its density is cos(angle) ** (freedom - 1).
    """
    angles = np.linspace(-np.pi / 2, np.pi / 2, 200_001)[1:-1]
    shares = np.cumsum(np.cos(angles) ** (freedom - 1))
    return np.sqrt(freedom) * np.tan(angles), (shares - shares[0] / 2) / shares[-1]


def read_run(run: str | Path) -> dict[str, float]:
    """Accuracy of the last validation, and mean training loss of the last epoch.

    Raises:
        ConfigError: The folder has no metrics of both.
    """
    metrics = read_metrics(run)
    missing = [name for name in ("val/acc", "train/loss") if name not in metrics]
    if missing:
        raise ConfigError(
            f"{run} has logged no {missing[0]}: the epoch was not finished, or there was no validation",
            remedy="train for an epoch or more with --data.val_size=1000",
        )
    accuracy, loss = (float(metrics[name].dropna().iloc[-1]) for name in ("val/acc", "train/loss"))
    return {"accuracy": accuracy, "loss": loss}


def read_shuffling(record: str | Path) -> pd.DataFrame:
    """A row for each run of benchmarks/shuffling/2026-11-23: seed, processes, set_epoch, accuracy, loss."""
    frame = pd.DataFrame(json.loads(Path(record).read_text(encoding="utf-8"))["rows"])
    frame = frame.assign(accuracy=frame["correct"] / frame["total"], loss=frame["losses"].str[-1])
    return frame[["seed", "processes", "set_epoch", "accuracy", "loss"]]


def plot_groups(panels: Mapping[str, Mapping[str, Sequence[float]]], *, ylabel: str) -> Figure:
    """A panel for each title: a column of points for each group of runs, its mean a line, groups in the order given.

    A unit is equally long in all panels.

    Args:
        panels: By title, and there by label, the values of the runs.
        ylabel: What they are, with the unit.
    """
    widths = [len(groups) for groups in panels.values()]
    figure = Figure(figsize=(1.4 + 1.3 * sum(widths), 3.4), layout="constrained")
    drawn = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for axes, (title, groups) in zip(drawn, panels.items(), strict=True):
        _draw_groups(axes, groups)
        axes.set_title(title, fontsize=10)
    drawn[0].set_ylabel(ylabel)
    height = max(high - low for low, high in (axes.get_ylim() for axes in drawn))
    for axes in drawn:
        middle = sum(axes.get_ylim()) / 2
        axes.set_ylim(middle - height / 2, middle + height / 2)
    return figure


def _draw_groups(axes: Axes, groups: Mapping[str, Sequence[float]]) -> None:
    for place, values in enumerate(groups.values()):
        beside = np.linspace(-0.12, 0.12, len(values)) if len(values) > 1 else [0.0]
        axes.plot(place + np.asarray(beside), values, "o", color=(BLUE, RED)[place % 2], markersize=5, alpha=0.7)
        axes.hlines(float(np.mean(values)), place - 0.25, place + 0.25, color=GREY, linewidth=2)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.5, len(groups) - 0.5)
    tidy(axes, grid="y")
