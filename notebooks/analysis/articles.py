"""What Anthony Peng's articles on multi-GPU training print, and what a run has reached after each epoch."""

from pathlib import Path

import pandas as pd

from analysis.run_frames import read_metrics
from lit_cifar.errors import ConfigError

PRINTED_LOSSES = (2.07, 1.46, 1.21, 0.99, 0.82, 0.55)
"""Mean training loss of epochs 1 to 6, one process."""


def epoch_means(run: str | Path) -> pd.DataFrame:
    """Mean training loss and accuracy of the epochs that a run has completed, from its folder.

    Returns:
        Columns loss and accuracy; the index is the epoch, counted from 1.

    Raises:
        ConfigError: If the run has not completed an epoch.
    """
    metrics = read_metrics(run)
    if "train/loss" not in metrics or metrics["train/loss"].dropna().empty:
        raise ConfigError(f"no epoch is complete in {run}", remedy="wait for the end of its first epoch")
    means = metrics.dropna(subset=["train/loss"]).drop_duplicates("epoch", keep="last")
    means.index = pd.RangeIndex(1, len(means) + 1, name="epoch")
    return means[["train/loss", "train/acc"]].set_axis(["loss", "accuracy"], axis="columns")
