"""Accuracy of every rank in validation and test, from integer counts."""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lit_cifar.batch_split import BatchSplit
from lit_cifar.data.images import Batch
from lit_cifar.reporting.csv_files import replace_split
from lit_cifar.reporting.evaluation_callback import EvaluationCallback, Split
from lit_cifar.reporting.rank_statistics import AccuracyCount, deviates, pooled
from lit_cifar.reporting.run_report import run_folder
from lit_cifar.reporting.tensorboard import log_to_tensorboard

FILE_NAME = "per_rank.csv"
COLUMNS = ("split", "rank", "correct", "total", "accuracy")


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
        self._batch_split = BatchSplit()
        self._tally = torch.zeros(0, 2, dtype=torch.int64)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._print(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(trainer, pl_module, "test")

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batch_split = BatchSplit.of(trainer.strategy)
        self._tally = torch.zeros(self._batch_split.num_replicas, 2, dtype=torch.int64, device=pl_module.device)

    def _count(self, trainer: Trainer, logits: Tensor, batch: Batch) -> None:
        ranks = self._ranks_of_samples(trainer, len(batch.labels))
        correct = logits.argmax(dim=1) == batch.labels
        right_and_seen = torch.stack([correct, torch.ones_like(correct)], dim=1).to(self._tally.dtype)
        self._tally.index_add_(0, ranks.to(self._tally.device, non_blocking=True), right_and_seen)

    def _ranks_of_samples(self, trainer: Trainer, num_samples: int) -> Tensor:
        """The rank that computed each sample of this process's batch; int64, (num_samples,)."""
        per_rank = self._batch_split.replicas_per_rank
        first = self._batch_split.dp_rank * per_rank
        if per_rank == 1:
            return torch.full((num_samples,), first, device=self._tally.device)
        replicas: Tensor = trainer.strategy.replica_of(num_samples)  # type: ignore[attr-defined]
        return first + replicas

    def _finish(self, trainer: Trainer, pl_module: LightningModule, split: Split) -> None:
        if trainer.sanity_checking:
            return
        summed = trainer.strategy.reduce(self._tally, reduce_op="sum")
        self.counts[split] = [AccuracyCount(correct, total) for correct, total in summed.tolist()]
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            if folder is not None:
                write_per_rank(folder, split, self.counts[split])
            self._log(trainer, split)

    def _log(self, trainer: Trainer, split: str) -> None:
        scalars = {
            f"{split}/acc_rank{rank}": count.accuracy for rank, count in enumerate(self.counts[split]) if count.total
        }
        log_to_tensorboard(trainer, scalars)

    def _print(self, trainer: Trainer, pl_module: LightningModule, split: str) -> None:
        data_name = getattr(getattr(trainer, "datamodule", None), "name", None)
        title = f"Accuracy per rank, {split}" + (f", {data_name}" if data_name else "")
        console = Console()
        with console.capture() as text:
            console.print(per_rank_table(self.counts[split], title=title))
        pl_module.print(text.get().rstrip("\n"))  # on rank 0, and above an open progress bar


def per_rank_table(counts: list[AccuracyCount], *, title: str) -> Table:
    """A table of the ranks and their sum with 95 % intervals; the last column flags ranks that differ beyond chance."""
    table = Table("rank", "correct", "total", "accuracy", "95 % interval", "beyond chance", title=title)
    for column in table.columns[1:5]:
        column.justify = "right"
    for rank, (count, flag) in enumerate(zip(counts, deviates(counts), strict=True)):
        table.add_row(str(rank), *_cells(count), "yes" if flag else "", style="bold red" if flag else None)
    table.add_section()
    table.add_row("all", *_cells(pooled(counts)), "")
    return table


def _cells(count: AccuracyCount) -> tuple[str, str, str, str]:
    low, high = count.interval()
    accuracy = f"{count.accuracy:.2%}" if count.total else "-"
    return f"{count.correct:,}", f"{count.total:,}", accuracy, f"{low:.2%} to {high:.2%}"


def write_per_rank(folder: Path, split: str, counts: list[AccuracyCount]) -> None:
    """Replace this split's rows in `folder/per_rank.csv`, and keep those of other splits.

    The file is replaced as a whole, so that a reader never sees half a table.
    """
    named = [*((str(rank), count) for rank, count in enumerate(counts)), ("all", pooled(counts))]
    rows = [[rank, c.correct, c.total, f"{c.accuracy:.6f}"] for rank, c in named]
    replace_split(folder / FILE_NAME, COLUMNS, split, rows)
