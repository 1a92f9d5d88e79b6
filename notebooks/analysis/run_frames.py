"""Metrics and accuracy per rank, read from run folders and drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.evaluation_tables import PER_RANK
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, pooled
from lit_cifar.reporting.run_folder import file_in

BLUE, RED, GREY = "#1f6fb4", "#c8321e", "#666666"
OF_FIT = "python -m lit_cifar fit writes one; its run folder is printed at the end"


def read_metrics(run: str | Path) -> pd.DataFrame:
    """`metrics.csv` of a run folder with one row for each step; nan where a metric was not logged at that step.

    Files of earlier versions have several rows for a step, which become one here.

    Raises:
        ConfigError: If the folder has no such file.
    """
    return pd.read_csv(file_of(run, "metrics.csv", remedy=OF_FIT)).groupby("step", as_index=False).last()


def read_digests(run: str | Path) -> "pd.Series[str]":
    """The SHA-256 of parameters and buffers after each saved epoch, from `weights.sha256` of a run; epochs are counted from 1.

    Raises:
        ConfigError: If the folder has no such file.
    """
    lines = [line.split() for line in file_of(run, DIGESTS, remedy=OF_FIT).read_text().splitlines()]
    return pd.Series({int(epoch) + 1: digest for digest, _, epoch in lines}, name="SHA-256").rename_axis("epoch")


def read_per_rank(run: str | Path, *, split: str) -> pd.DataFrame:
    """The rows of `split` in `per_rank.csv`, ranks in order and `all` last.

    Args:
        run: A run folder.
        split: "val" or "test".

    Returns:
        Columns split, rank ("0", "1", ..., "all"), correct, total, accuracy, low and high (95 % interval), deviates
        (differs from the other ranks beyond chance; see `lit_cifar.reporting.rank_statistics.deviates`).

    Raises:
        ConfigError: If the folder has no such file, or it has no such split.
    """
    command = "validate" if split == "val" else split
    remedy = f"python -m lit_cifar {command} --ckpt_path CHECKPOINT writes one into its run folder"
    path = file_of(run, PER_RANK, remedy=remedy)
    rows = pd.read_csv(path, dtype={"rank": str}).query("split == @split and rank != 'all'")
    if rows.empty:
        raise ConfigError(f"{path} has no rows of split={split}", remedy=remedy)
    counts = [AccuracyCount(*row) for row in rows[["correct", "total"]].to_numpy().tolist()]
    return per_rank_frame(counts, split=split, whole=pooled(counts))


def per_rank_frame(counts: Sequence[AccuracyCount], *, split: str, whole: AccuracyCount | None = None) -> pd.DataFrame:
    """The frame that `read_per_rank` would return for these counts; without their sum, `whole`, unless it is given."""
    named = [(str(rank), count, flag) for rank, (count, flag) in enumerate(zip(counts, deviates(counts), strict=True))]
    if whole is not None:
        named.append(("all", whole, False))
    rows = [
        (split, name, count.correct, count.total, count.accuracy, *count.interval(), flag)
        for name, count, flag in named
    ]
    columns = ["split", "rank", "correct", "total", "accuracy", "low", "high", "deviates"]
    return pd.DataFrame(rows, columns=columns)


def plot_per_rank(evaluations: Mapping[str, pd.DataFrame]) -> Figure:
    """A panel for each evaluation: every rank's accuracy with its 95 % interval; deviating ranks in red.

    Args:
        evaluations: Frames of `read_per_rank` or `per_rank_frame` by title. A row `all` becomes a horizontal line.
    """
    widths = [max(2, len(frame)) for frame in evaluations.values()]
    figure = Figure(figsize=(2.0 + 0.42 * sum(widths), 3.6), layout="constrained")
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    for axes, (title, frame) in zip(panels, evaluations.items(), strict=True):
        _draw_ranks(axes, frame)
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("accuracy, 95 % interval")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _draw_ranks(axes: Axes, frame: pd.DataFrame) -> None:
    whole, ranks = frame[frame["rank"] == "all"], frame[frame["rank"] != "all"]
    if not whole.empty:
        axes.axhline(float(whole["accuracy"].iloc[0]), color=GREY, linewidth=1, linestyle="--", label="all ranks")
    for flag, color, label in ((False, BLUE, "one rank"), (True, RED, "one rank, beyond chance")):
        some = ranks[ranks["deviates"] == flag]
        if not some.empty:
            # Arrays, not Series: matplotlib takes a Series of one row for a number.
            middle, low, high = (some[column].to_numpy() for column in ("accuracy", "low", "high"))
            ends = np.array([middle - low, high - middle])
            axes.errorbar(some.index.to_numpy(), middle, yerr=ends, fmt="o", color=color, elinewidth=2, label=label)
    axes.set_xticks(range(len(ranks)), list(ranks["rank"]))
    axes.set_xlim(-0.6, len(ranks) - 0.4)
    axes.set_xlabel("rank")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
    tidy(axes, grid="y")


def plot_curves(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """Training loss and validation accuracy over the steps, a line for each run.

    Args:
        runs: Frames of `read_metrics` by label. A run that did not log one is left out of that panel.
    """
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("train/loss", "val/acc"), strict=True):
        for label, frame in runs.items():
            if metric in frame:
                logged = frame.dropna(subset=[metric])
                axes.plot(logged["step"], logged[metric], marker=".", label=label)
        axes.set(xlabel="optimizer step", title=metric)
        tidy(axes)
        if axes.lines:
            axes.legend(frameon=False)
    return figure


def tidy(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(axis=grid, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def file_of(run: str | Path, name: str, *, remedy: str) -> Path:
    """A file of a run folder; a `ConfigError` if it is not there."""
    return file_in(Path(run), name, remedy=remedy)
