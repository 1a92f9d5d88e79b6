"""The tables that an evaluation writes, from integer counts: `per_rank.csv` and `confusion.csv`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Column, Table

from lit_cifar.data.images import Batch
from lit_cifar.mode import mode_of
from lit_cifar.reporting.files import replace_split
from lit_cifar.reporting.loggers import log_to_tensorboard
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, pooled
from lit_cifar.reporting.run_folder import run_folder

Split = Literal["val", "test"]
PER_RANK, CONFUSION = "per_rank.csv", "confusion.csv"


class EvaluationTables(Callback):
    """Counts correct and evaluated samples on each rank, and how many of each class were taken for which.

    A rank is a process; if one process holds several replicas (`dp`) a rank is a replica. The counts go to
    `per_rank.csv` in the run folder, and the accuracies to TensorBoard as `val/acc_rank0` and so on; those of classes
    to `confusion.csv`. `validate` and `test` print a table, in which ranks that differ beyond chance are flagged.

    Expects one loader for each split, logits (n, C) as the step's output, a `Batch`, n may be 0, a model whose
    `confusion_matrix(split)` computes what `ConfusionMatrix` does, and a data module with `classes`, C names.
    """

    def __init__(self) -> None:
        self.counts: dict[str, list[AccuracyCount]] = {}
        self._tally = torch.zeros(0, 2, dtype=torch.int64)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_ranks = mode_of(trainer.strategy).layout.num_replicas
        self._tally = torch.zeros(num_ranks, 2, dtype=torch.int64, device=pl_module.device)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Batch, *_: Any) -> None:
        """Add the samples of a batch to those of the ranks that computed them."""
        mode = mode_of(trainer.strategy)
        ranks = torch.full_like(batch.labels, mode.layout.data_parallel_rank * mode.local_replicas)
        if mode.local_replicas > 1:
            ranks += mode.replica_of(len(ranks)).to(ranks.device, non_blocking=True)
        correct = outputs.argmax(dim=1) == batch.labels
        right_and_seen = torch.stack([correct, torch.ones_like(correct)], dim=1).to(self._tally.dtype)
        self._tally.index_add_(0, ranks, right_and_seen)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        split = split_of(trainer)
        summed = trainer.strategy.reduce(self._tally, reduce_op="sum")
        counts = self.counts[split] = [AccuracyCount(correct, total) for correct, total in summed.tolist()]
        # Every process takes part. torchmetrics keeps the result, which the figures use too.
        confusion = pl_module.confusion_matrix(split).compute()
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            if folder is not None:
                write_per_rank(folder, split, counts)
                write_confusion(folder, split, datamodule_of(trainer).classes, confusion.tolist())
            seen = {f"{split}/acc_rank{rank}": count.accuracy for rank, count in enumerate(counts) if count.total}
            log_to_tensorboard(trainer, seen)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and trainer.state.fn != TrainerFn.FITTING:  # the progress bar is closed by now
            split = split_of(trainer)
            title = f"Accuracy per rank, {split}, {datamodule_of(trainer).name}"
            Console().print(_per_rank_table(self.counts[split], title=title))

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end: Any = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
    on_test_end = on_validation_end


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
    replace_split(folder / PER_RANK, ["split", "rank", "correct", "total", "accuracy"], split, rows)


def write_confusion(folder: Path, split: str, classes: Sequence[str], counts: Iterable[Sequence[int]]) -> None:
    """Replace this split's rows in `confusion.csv`; keep those of other splits.

    `counts` are true class, predicted class and number of samples, of the pairs that have samples.
    """
    rows = ([classes[truth], classes[prediction], count] for truth, prediction, count in counts)
    replace_split(folder / CONFUSION, ["split", "class", "predicted", "count"], split, rows)


def split_of(trainer: Trainer) -> Split:
    """The split that a trainer evaluates."""
    return "test" if trainer.testing else "val"


def datamodule_of(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]  # Lightning's own omission
