"""What Anthony Peng's articles on multi-GPU training print, and recorded runs beside it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis.run_frames import GREY, read_metrics, read_per_rank
from lit_cifar.errors import ConfigError

PRINTED_LOSSES = (2.07, 1.46, 1.21, 0.99, 0.82, 0.55)
"""Mean training loss of epochs 1 to 6, one process."""

PRINTED_RUNS = pd.DataFrame(
    [
        ("Part 1", "one device", "single", 128, "not printed", "74.79 to 76.04"),
        ("Part 2", "dp, 2 GPUs", "dp", 128, "not printed", "74.79"),
        ("Part 3", "ddp, 2 GPUs", "ddp", 256, 196, "71.29 and 70.12"),
    ],
    columns=["article", "run", "config", "batch", "steps per epoch", "test accuracy (%)"],
)
"""`config` is a file of configs/reproduce; `batch` is the global one."""

RECORDS = Path(__file__).parents[2] / "benchmarks"
_RATE_DROPS = (5, 10)  # epochs after which the learning rate is divided by 10


def epoch_means(run: str | Path) -> pd.DataFrame:
    """Mean training loss and accuracy of the epochs that a run has completed.

    Args:
        run: A run folder.

    Returns:
        Columns loss and accuracy; the index is the epoch, counted from 1.

    Raises:
        ConfigError: If the run has not completed an epoch.
    """
    metrics = read_metrics(run)
    if "train/loss" not in metrics or metrics["train/loss"].dropna().empty:
        raise ConfigError(f"no epoch is complete in {run}", remedy="wait for the end of its first epoch")
    means = metrics.dropna(subset=["train/loss"]).reset_index(drop=True)
    means.index = pd.RangeIndex(1, len(means) + 1, name="epoch")
    return means[["train/loss", "train/acc"]].set_axis(["loss", "accuracy"], axis="columns")


def accuracy_of_test(run: str | Path) -> float:
    """Test accuracy of a run folder of `test`; nan if there is none."""
    if not Path(run).is_dir():
        return float("nan")
    return float(read_per_rank(run, split="test").set_index("rank")["accuracy"]["all"])


def beside_printed(runs: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The losses of epochs 1 to 6 as printed and of each run, nan where an epoch has not been trained.

    Args:
        runs: Frames of `epoch_means` by label.

    Returns:
        A row for each run; columns 1 to 6, and distance: the mean of the absolute differences from the printed losses.
    """
    printed = pd.Series(PRINTED_LOSSES, index=range(1, len(PRINTED_LOSSES) + 1))
    rows = {"printed": printed} | {label: run["loss"].reindex(printed.index) for label, run in runs.items()}
    frame = pd.DataFrame(rows).T
    return frame.assign(distance=(frame - printed).abs().mean(axis="columns"))


def plot_beside_printed(runs: Mapping[str, pd.DataFrame]) -> Figure:
    """Training loss by epoch: the printed ones as crosses, and a line for each run.

    Args:
        runs: Frames of `epoch_means` by label.
    """
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (label, run) in enumerate(runs.items()):
        axes.plot(run.index, run["loss"], marker="o", markersize=3, color=f"C{number}", label=label)
    epochs = np.arange(1, len(PRINTED_LOSSES) + 1)
    axes.plot(epochs, PRINTED_LOSSES, "x", color="black", markersize=8, mew=2, label="printed in the articles")
    for drop in _RATE_DROPS:
        axes.axvline(drop + 0.5, color=GREY, linewidth=0.8, linestyle=":")
    longest = max([len(epochs), *(len(run) for run in runs.values())])
    axes.set(xlabel="epoch (dotted: learning rate divided by 10)", ylabel="mean training loss (nats)", ylim=(0, None))
    axes.set_xticks(range(1, longest + 1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure
