"""How trainings differ: parameters, running statistics of BatchNorm, losses that part, and losses that explode."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler
from torch import Tensor

from analysis.run_frames import BLUE, OF_FIT, RED, file_of, tidy
from lit_cifar.checkpoint.format import read_checkpoint

RUNNING = ("running_mean", "running_var")

# From wide and pale to narrow and dark, then points: each is seen where all lie on one another, in grey too.
_LAYERS: tuple[dict[str, Any], ...] = (
    {"color": "#cccccc", "linewidth": 7},
    {"color": BLUE, "linewidth": 3},
    {"color": "black", "linewidth": 1.2, "linestyle": "--"},
    {"color": RED, "linestyle": "", "marker": "o", "markersize": 7, "fillstyle": "none"},
    {"color": "black", "linestyle": "", "marker": "x", "markersize": 4},
)
HIGHEST_LOSS = 1e10  # on the axis of `plot_losses`
_POINTS = (("#d98c1f", "o"), (BLUE, "s"), (RED, "^"), ("black", "x"))


def read_weights(run: str | Path) -> dict[str, Tensor]:
    """The network in the last checkpoint of a run folder.

    Raises:
        ConfigError: If the folder has none.
    """
    path = file_of(run, "checkpoints/last.ckpt", remedy=OF_FIT)
    weights: dict[str, Tensor] = read_checkpoint(path)["state_dict"]
    return weights


def largest_differences(weights: Mapping[str, Mapping[str, Tensor]], *, running: bool) -> pd.DataFrame:
    """The largest absolute difference of any number between each two networks.

    Args:
        weights: What `read_weights` returns, by label.
        running: Compare BatchNorm's running means and variances; else all that is trained.

    Returns:
        Labels as rows and columns.
    """
    return pd.DataFrame(
        {one: {other: _difference(weights[one], weights[other], running) for other in weights} for one in weights}
    )


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], running: bool) -> float:
    names = [name for name, tensor in one.items() if tensor.is_floating_point() and name.endswith(RUNNING) == running]
    return float(np.max([float((one[name].double() - other[name].double()).abs().max()) for name in names]))  # or nan


def shaded(differences: pd.DataFrame, *, caption: str) -> Styler:
    """A table of differences, the darker the larger: what is equal up to rounding stays pale."""
    size = np.log10(differences.clip(lower=1e-16))
    styler = differences.style.format("{:.0e}").background_gradient("Blues", gmap=size, axis=None, vmin=-16, vmax=0)
    return styler.set_caption(caption)


def plot_parts(panels: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """A row for each way to divide a batch: a square for each image, its color that of its part; the means beside it.

    Args:
        panels: By title, the images of each part. An image has its number as its value.
    """
    figure = Figure(figsize=(7.2, 0.3 + 0.62 * len(panels)), layout="constrained")
    axes = figure.subplots()
    for row, (title, parts) in enumerate(panels.items()):
        for color, part in zip((BLUE, "#d98c1f", "#6a994e", RED), parts, strict=False):
            axes.bar(list(part), 0.8, 0.94, row - 0.4, color=color)
            for image in part:
                axes.text(image, row, str(image), ha="center", va="center", color="white")
        means = " and ".join(f"{np.mean(part):g}" for part in parts)
        axes.text(max(map(max, parts)) + 0.8, row, f"mean {means}", va="center")
        axes.text(-0.8, row, title, ha="right", va="center")
    axes.set(xlim=(-2.6, max(max(map(max, parts)) for parts in panels.values()) + 3), ylim=(len(panels) - 0.5, -0.5))
    axes.axis("off")
    return figure


def plot_losses(panels: Mapping[str, Mapping[str, Sequence[float]]], *, xlabels: Sequence[str]) -> Figure:
    """A panel for each group of curves over 0, 1, 2, ..., with one logarithmic axis; a cross where a curve becomes nan.

    The axis ends at `HIGHEST_LOSS`. Where a curve leaves it stands how high the curve goes.

    Args:
        panels: Losses by label, by title. None of the finite ones may be 0 or less.
        xlabels: What is counted on the horizontal axis of each panel.
    """
    figure = Figure(figsize=(3.3 * len(panels), 3.4), layout="constrained")
    every_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves), xlabel in zip(every_axes, panels.items(), xlabels, strict=True):
        for label, losses in curves.items():
            _draw_losses(axes, np.array(losses, dtype=float), label)
        axes.set(yscale="log", xlabel=xlabel)
        axes.set_title(title, fontsize=10)
        _tidy(axes)
    if max(axes.get_ylim()[1] for axes in every_axes) > HIGHEST_LOSS:
        every_axes[0].set_ylim(top=HIGHEST_LOSS)
    every_axes[0].set_ylabel("training loss")
    return figure


def _draw_losses(axes: Axes, losses: np.ndarray[tuple[int], np.dtype[np.float64]], label: str) -> None:
    steps, finite = np.arange(len(losses)), np.isfinite(losses)
    (line,) = axes.plot(steps[finite], losses[finite], marker="." if finite.sum() < 10 else "", label=label)
    if (above := losses > HIGHEST_LOSS).any():
        text = f"to {losses[finite].max():.0e}"
        at, beside = (int(np.argmax(above)), HIGHEST_LOSS), (12, -2)
        axes.annotate(text, at, beside, textcoords="offset points", va="top", fontsize=8, color=line.get_color())
    elif not finite.all():
        first = int(np.argmin(finite))
        height = losses[first - 1] if first else 1.0
        axes.plot([first], [height], marker="x", markersize=9, markeredgewidth=2, color=line.get_color())
        axes.annotate(" nan", (first, height), color=line.get_color(), fontsize=8)


def plot_side_by_side(panels: Mapping[str, Mapping[str, "pd.Series[float]"]], *, xlabel: str, ylabel: str) -> Figure:
    """A panel for each group of curves, with one vertical axis; curves that are equal are all seen.

    Args:
        panels: By title, and there by label, curves over their index; from the fourth on they are drawn as points.
        xlabel: What the index counts.
        ylabel: What is drawn, with the unit.
    """
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    every_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, curves) in zip(every_axes, panels.items(), strict=True):
        for layer, (label, curve) in zip(chain(_LAYERS, cycle(_LAYERS[3:])), curves.items(), strict=False):
            axes.plot(curve.index, curve.to_numpy(), label=label, **layer)
        axes.set_xlabel(xlabel)
        axes.set_title(title, fontsize=10)
        _tidy(axes)
    every_axes[0].set_ylabel(ylabel)
    return figure


def plot_distances(distances: Mapping[str, "pd.Series[float]"], *, xlabel: str, ylabel: str) -> Figure:
    """Curves that grow by orders of magnitude: a logarithmic axis that has a place for 0 below the smallest of them.

    Args:
        distances: By label, curves over their index, four at most; none is negative.
        xlabel: What the index counts.
        ylabel: What is drawn, with the unit.
    """
    figure = Figure(figsize=(7.4, 3.8), layout="constrained")
    axes = figure.subplots()
    for (color, marker), (label, curve) in zip(_POINTS, distances.items(), strict=False):
        axes.plot(curve.index, curve.to_numpy(), color=color, marker=marker, label=label, clip_on=False)
    smallest = min((value for curve in distances.values() for value in curve if value > 0), default=1.0)
    axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(smallest)), linscale=0.5)
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
    _tidy(axes)
    return figure


def _tidy(axes: Axes) -> None:
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)
