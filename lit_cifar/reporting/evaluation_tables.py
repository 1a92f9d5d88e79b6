"""The tables that an evaluation writes, from integer counts: `per_rank.csv`, `confusion.csv` and `predictions.csv`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.mode import Layout, mode_of
from lit_cifar.reporting.files import replace_csv, replace_split
from lit_cifar.reporting.loggers import log_to_tensorboard
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, pooled
from lit_cifar.reporting.run_folder import run_folder

Split = Literal["val", "test"]
PER_RANK, CONFUSION, PREDICTIONS = "per_rank.csv", "confusion.csv", "predictions.csv"
_PER_RANK_COLUMNS = ("split", "rank", "correct", "total", "accuracy")
_CONFUSION_COLUMNS = ("split", "class")  # the names of the classes follow
_PREDICTION_COLUMNS = ("file", "class", "confidence", "error")


class EvaluationCallback(Callback):
    """Treats validation and test alike: calls `_start`, `_count` for every batch, and `_finish`, in every process."""

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None: ...

    def _count(self, trainer: Trainer, logits: Any, batch: Batch) -> None: ...

    def _finish(self, trainer: Trainer, pl_module: LightningModule, split: Split) -> None: ...

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *_: Any, **__: Any
    ) -> None:
        self._count(trainer, outputs, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._finish(trainer, pl_module, "val")

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "test")


class PerRankAccuracy(EvaluationCallback):
    """Counts correct and evaluated samples on each rank, and reports them with their exact sum.

    A rank is a process; if one process holds several replicas (`dp`) a rank is a replica. The counts are int64 on the
    device until the epoch ends. Then they are summed over the processes, and written to `per_rank.csv` in the run
    folder, in place of those of an earlier evaluation of the split, and to TensorBoard as `val/acc_rank0` and so on.
    `validate` and `test` print a table with 95 % intervals, in which a rank that differs from the others beyond chance
    is flagged (see `lit_cifar.reporting.rank_statistics.deviates`).

    Expects one loader for each split, logits (n, C) as the step's output, and a `Batch`; n may be 0.
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[AccuracyCount]] = {}
        self._layout = Layout()
        self._tally = torch.zeros(0, 2, dtype=torch.int64)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._print(trainer, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(trainer, "test")

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._layout = mode_of(trainer.strategy).layout
        self._tally = torch.zeros(self._layout.num_replicas, 2, dtype=torch.int64, device=pl_module.device)

    def _count(self, trainer: Trainer, logits: Tensor, batch: Batch) -> None:
        ranks = self._ranks_of_samples(trainer, len(batch.labels))
        correct = logits.argmax(dim=1) == batch.labels
        right_and_seen = torch.stack([correct, torch.ones_like(correct)], dim=1).to(self._tally.dtype)
        self._tally.index_add_(0, ranks.to(self._tally.device, non_blocking=True), right_and_seen)

    def _ranks_of_samples(self, trainer: Trainer, num_samples: int) -> Tensor:
        """The rank that computed each sample of this process's batch; int64, (num_samples,)."""
        if self._layout.local_replicas == 1:
            return torch.full((num_samples,), self._layout.data_parallel_rank, device=self._tally.device)
        replicas = mode_of(trainer.strategy).replica_of(num_samples)
        return self._layout.data_parallel_rank * self._layout.local_replicas + replicas

    def _finish(self, trainer: Trainer, pl_module: LightningModule, split: Split) -> None:
        summed = trainer.strategy.reduce(self._tally, reduce_op="sum")
        counts = self.counts[split] = [AccuracyCount(correct, total) for correct, total in summed.tolist()]
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            if folder is not None:
                write_per_rank(folder, split, counts)
            seen = {f"{split}/acc_rank{rank}": count.accuracy for rank, count in enumerate(counts) if count.total}
            log_to_tensorboard(trainer, seen)

    def _print(self, trainer: Trainer, split: str) -> None:
        if trainer.is_global_zero:  # the progress bar is closed by now
            title = f"Accuracy per rank, {split}, {_datamodule(trainer).name}"
            Console().print(_per_rank_table(self.counts[split], title=title))


def _per_rank_table(counts: list[AccuracyCount], *, title: str) -> Table:
    """A table of the ranks and their sum with 95 % intervals; the last column flags ranks that differ beyond chance."""
    right = [Column(name, justify="right") for name in ("correct", "total", "accuracy", "95 % interval")]
    table = Table("rank", *right, "beyond chance", title=title)
    for rank, (count, flag) in enumerate(zip(counts, deviates(counts), strict=True)):
        table.add_row(str(rank), *_in_cells(count), "yes" if flag else "", style="bold red" if flag else None)
    table.add_section()
    table.add_row("all", *_in_cells(pooled(counts)), "")
    return table


def _in_cells(count: AccuracyCount) -> tuple[str, str, str, str]:
    low, high = count.interval()
    accuracy = f"{count.accuracy:.2%}" if count.total else "-"
    return f"{count.correct:,}", f"{count.total:,}", accuracy, f"{low:.2%} to {high:.2%}"


def write_per_rank(folder: Path, split: str, counts: list[AccuracyCount]) -> None:
    """Replace this split's rows in `folder/per_rank.csv`, and keep those of other splits."""
    named = [*((str(rank), count) for rank, count in enumerate(counts)), ("all", pooled(counts))]
    rows = [[rank, c.correct, c.total, f"{c.accuracy:.6f}"] for rank, c in named]
    replace_split(folder / PER_RANK, _PER_RANK_COLUMNS, split, rows)


class ConfusionCounts(EvaluationCallback):
    """Writes `confusion.csv` into the run folder after each evaluation.

    It has a row for each class: the images of that class, counted by the class that the network has chosen, in the
    columns. A later evaluation of the same split replaces its rows.

    Expects `confusion_matrix(split)` of the model, a metric that computes int64, (C, C), rows are the truth, and a data
    module with `classes`, C names.
    """

    def _finish(self, trainer: Trainer, pl_module: Any, split: Split) -> None:
        folder = run_folder(trainer)
        if folder is None:
            return
        # Every process takes part. torchmetrics keeps the sum, which the figures use too.
        counts = pl_module.confusion_matrix(split).compute()
        if trainer.is_global_zero:
            write_confusion(folder, split, _datamodule(trainer).classes, counts.tolist())


def write_confusion(folder: Path, split: str, classes: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
    """Replace this split's rows of counts, true by predicted class, in `confusion.csv`; keep those of other splits."""
    rows = ([name, *row] for name, row in zip(classes, counts, strict=True))
    replace_split(folder / CONFUSION, [*_CONFUSION_COLUMNS, *classes], split, rows)


class PredictionWriter(Callback):
    """Writes `predictions.csv` (`file,class,confidence,error`) into the run folder, rows in input order.

    A file that could not be read has an error and no class. Expects softmax probabilities (n, C) of `predict_step`.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []
        self._table = torch.zeros(0, 3, dtype=torch.float64)

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # One row for each readable image: class, confidence, how often it was classified. A row stays zero except on
        # the process that classifies the image, so that the sum over processes is the whole table.
        num_images = len(_datamodule(trainer).sets["predict"])
        self._table = torch.zeros(num_images, 3, dtype=torch.float64, device=trainer.strategy.root_device)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *_: Any, **__: Any
    ) -> None:
        """Fill in the batch's rows, without waiting for the device."""
        probabilities: Tensor = outputs
        confidence, classes = probabilities.max(dim=1)
        filled = torch.stack([classes, confidence, torch.ones_like(confidence)], dim=1)
        self._table[batch.ids] = filled.to(self._table)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        table = trainer.strategy.reduce(self._table, reduce_op="sum")
        folder = run_folder(trainer)
        if not trainer.is_global_zero:
            return
        datamodule = _datamodule(trainer)
        results = _predicted(table.cpu(), datamodule.classes)
        self.rows = [
            (file.as_posix(), *(next(results) if error is None else ("", "", error)))
            for file, error in zip(datamodule.folder.files, datamodule.folder.errors, strict=True)
        ]
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            replace_csv(folder / PREDICTIONS, [_PREDICTION_COLUMNS, *self.rows])


def _predicted(table: Tensor, classes: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Class, confidence and error of each image; `table` is (N, 3) and summed over processes."""
    for label, confidence, times in table.tolist():
        if times == 0:
            yield "", "", "not classified: the run was limited to fewer batches"
        else:  # processes that hold one replica have equal results, so the mean is the result
            yield classes[round(label / times)], f"{confidence / times:.6f}", ""


def _datamodule(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
