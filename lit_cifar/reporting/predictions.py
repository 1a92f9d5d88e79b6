"""The table of predictions, `predictions.csv`."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.reporting.evaluation_tables import datamodule_of
from lit_cifar.reporting.files import replace_csv
from lit_cifar.reporting.run_folder import run_folder

PREDICTIONS = "predictions.csv"
_COLUMNS = ("file", "class", "confidence", "error")


class PredictionWriter(Callback):
    """Writes `predictions.csv` (`file,class,confidence,error`) into the run folder, rows in input order.

    A file that could not be read has an error and no class. Expects softmax probabilities (n, C) of `predict_step`.
    """

    _table: Tensor

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A row for each readable image: class, from 1, and confidence; zeros on other replicas: the sum is the table.
        num_images = len(datamodule_of(trainer).sets["predict"])
        self._table = torch.zeros(num_images, 2, dtype=torch.float64, device=trainer.strategy.root_device)

    def on_predict_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Batch, *_: Any) -> None:
        """Fill in the batch's rows, without waiting for the device."""
        confidence, classes = outputs.max(dim=1)
        self._table[batch.ids] = torch.stack([classes + 1, confidence.double()], dim=1)  # bfloat16 would round classes

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        table = trainer.strategy.reduce(self._table, reduce_op="sum")
        if (folder := run_folder(trainer)) is not None and trainer.is_global_zero:
            results = _predicted(table.cpu(), datamodule_of(trainer).classes)
            rows = [_COLUMNS]
            for file, error in datamodule_of(trainer).files.items():
                rows.append((file.replace("\r", "\\r"), *(next(results) if error is None else ("", "", error))))
            replace_csv(folder / PREDICTIONS, rows)


def _predicted(table: Tensor, classes: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Class, confidence and error of each image; `table` is (N, 2) and summed over replicas."""
    for number, confidence in table.tolist():
        if number == 0:
            yield "", "", "not classified: the run was limited to fewer batches"
        else:
            yield classes[round(number) - 1], f"{confidence:.6f}", ""
