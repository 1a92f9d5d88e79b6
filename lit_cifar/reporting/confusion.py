"""`confusion.csv`: how often each class was taken for each, in whole numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.reporting.csv_files import replace_split
from lit_cifar.reporting.run_report import run_folder

FILE_NAME = "confusion.csv"
COLUMNS = ("split", "class")


class ConfusionCounts(Callback):
    """Writes `confusion.csv` into the run folder after each evaluation.

    It has a row for each class: the images of that class, counted by the class that the network has chosen, in the
    columns. A later evaluation of the same split replaces its rows.

    Expects `evaluation_metrics(split)` of the model, whose `confusion` is int64, (C, C), rows are the truth, and a data
    module with `classes`, C names.
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum over the processes and write."""
        self._write(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum over the processes and write."""
        self._write(trainer, pl_module, "test")

    def _write(self, trainer: Trainer, pl_module: Any, split: str) -> None:
        folder = None if trainer.sanity_checking else run_folder(trainer)
        if folder is None:
            return
        # Every process takes part; torchmetrics keeps the sum, also for the figures.
        counts = pl_module.evaluation_metrics(split).compute()["confusion"]
        if trainer.is_global_zero:
            classes: Sequence[str] = trainer.datamodule.classes  # type: ignore[attr-defined]  # Lightning's omission
            write_confusion(folder, split, classes, counts.tolist())


def write_confusion(folder: Path, split: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
    """Replace this split's rows in `folder/confusion.csv`, and keep those of another split of the same classes.

    Args:
        folder: The run folder.
        split: "val" or "test".
        classes: C names.
        counts: C rows, one for each true class, of C counts, one for each predicted class.
    """
    rows = ([name, *row] for name, row in zip(classes, counts, strict=True))
    replace_split(folder / FILE_NAME, [*COLUMNS, *classes], split, rows)
