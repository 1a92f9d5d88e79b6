"""A resumed run goes on with the very next sample, in another mode or on another number of processes too.

Order, augmentation and schedule are functions of (seed, epoch, step), so what a checkpoint must say beside weights,
optimizer and schedule is where in the epoch it was written, and what the epoch's metrics had counted until then.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from lit_cifar.callbacks.checkpoint import wait_for_files
from lit_cifar.callbacks.run_report import run_folder
from lit_cifar.checkpoint_files import save_error
from lit_cifar.errors import SaveError
from lit_cifar.layout import Layout

POSITION, METRICS = "position", "metrics"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands.

    Attributes:
        epoch: Epochs that are complete.
        step: Optimizer steps taken in the epoch after these.
        started: Whether that epoch has begun.
        global_step: Optimizer steps taken in all.
        rows: Lines of `metrics.csv`, without its header, that were written by then.
    """

    epoch: int
    step: int
    started: bool
    global_step: int
    rows: int = 0

    @classmethod
    def of(cls, trainer: Trainer) -> "Position":
        """Where `trainer` stands: at a step boundary, or after an epoch or the whole training."""
        epochs: Any = trainer.fit_loop.epoch_progress.current
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        in_epoch = batches.processed // trainer.accumulate_grad_batches
        # A fit that `max_steps` ended in the middle of an epoch has run that epoch's last hooks all the same.
        complete = epochs.processed == epochs.started and batches.processed >= trainer.num_training_batches
        return cls(
            epoch=epochs.started if complete else max(epochs.started - 1, 0),
            step=0 if complete else in_epoch,
            started=epochs.started > 0 and not complete,
            global_step=trainer.global_step,
            rows=_num_rows(trainer),
        )

    def write(self, loops: dict[str, Any], *, accumulation: int) -> None:
        """Turn the progress in `loops`, the "fit_loop" entry of a checkpoint, into that of this position.

        Lightning counts loader batches; how many a step has, the run that resumes decides by its `accumulation`.
        """
        entered = self.epoch + self.started
        epochs = {"ready": entered, "started": entered, "processed": self.epoch, "completed": self.epoch}
        loops["epoch_progress"] = {"total": dict(epochs), "current": dict(epochs)}
        loops["epoch_loop.batch_progress"] = {
            "total": _completed(self.global_step * accumulation),
            "current": _completed(self.step * accumulation),
            "is_last_batch": False,
        }
        loops["epoch_loop.val_loop.batch_progress"] |= {"total": _completed(0), "current": _completed(0)}
        loops["epoch_loop.state_dict"] = {"_batches_that_stepped": self.global_step}
        loops["state_dict"] = {}


class ExactResume(Callback):
    """Writes the position and the metrics' counts into every checkpoint, and goes on from them."""

    def __init__(self) -> None:
        self._resumed: Position | None = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write both down; the processes that hold the shards of the data put their counts together.

        Raises:
            SaveError: The logs, which belong to a checkpoint, could not be written; on every process.
        """
        failure: SaveError | None = trainer.strategy.broadcast(_save_logs(trainer, run_folder(trainer) or Path()))
        if failure is not None:
            raise failure
        checkpoint[POSITION] = asdict(Position.of(trainer))
        checkpoint[METRICS] = _collect(trainer, pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let a fit go on from there; a checkpoint that has no position leaves Lightning to its own."""
        if trainer.state.fn != TrainerFn.FITTING or POSITION not in checkpoint:
            return
        position = Position(**checkpoint[POSITION])
        position.write(checkpoint["loops"]["fit_loop"], accumulation=trainer.accumulate_grad_batches)
        if position.started:
            _restore(pl_module, checkpoint[METRICS], Layout.of(trainer.strategy))
        self._resumed = position

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the loader begin where the epoch was left.

        Lightning would restore its state itself, but not where the number of steps has been asked for before: the
        loader is then made before the checkpoint is read.
        """
        if self._resumed is not None:
            loader: Any = trainer.train_dataloader
            loader.load_state_dict({"step": self._resumed.step})
            if self._resumed.global_step:
                _settle_buckets(trainer, pl_module)

    # Where validation comes right before the position, Lightning's loop takes an empty turn instead of validating
    # again, and counts it as a step: what loggers write would be one step late from there on.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Put the loggers' step right."""
        self._put_right(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the loggers' step right, and do not leave out ReduceLROnPlateau where its metric is known."""
        self._put_right(trainer)
        monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if all(monitor in trainer.callback_metrics for monitor in monitors):
            trainer.fit_loop._restarting = False  # else Lightning leaves it out at the end of this epoch

    def _put_right(self, trainer: Trainer) -> None:
        if self._resumed is not None:
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
            self._resumed = None


def _settle_buckets(trainer: Trainer, pl_module: LightningModule) -> None:
    """Let DistributedDataParallel order its gradient buckets as it has them after the first step.

    It divides the gradients anew once it has seen in which order they become ready. What is summed with what stays, but
    over more than two processes a ring sums every place of a bucket in an order of its own, so that the first step
    would be rounded otherwise than in a run that was not interrupted. One pass on blank images, of which nothing stays.
    """
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
    num_images = 2 * Layout.of(trainer.strategy).num_microbatches  # BatchNorm refuses one value per channel
    shape: tuple[int, ...] = pl_module.image_shape  # type: ignore[assignment]
    blank = torch.zeros(num_images, *shape, device=pl_module.device)
    with trainer.precision_plugin.train_step_context():
        logits = model(trainer.precision_plugin.convert_input(blank))
    logits.sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for name, buffer in pl_module.named_buffers():
            buffer.copy_(buffers[name])


def _save_logs(trainer: Trainer, folder: Path) -> SaveError | None:
    """Why they could not be; None where they were, and where another process writes them."""
    try:
        for logger in trainer.loggers:
            logger.save()
    except OSError as error:
        wait_for_files(trainer)  # which it names
        return save_error(error, folder / "metrics.csv", checkpoints=folder / "checkpoints")
    return None


def _num_rows(trainer: Trainer) -> int:
    """Lines of `metrics.csv` below its header; only the process that writes it has to know."""
    folder = next((logger.log_dir for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
    path = Path(folder or ".") / "metrics.csv"
    if folder is None or not trainer.is_global_zero or not path.exists():
        return 0
    with path.open() as file:
        return sum(1 for _ in file) - 1


def _completed(count: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Metric]]:
    return ((name, child) for name, child in module.named_modules() if isinstance(child, Metric))


def _collect(trainer: Trainer, pl_module: LightningModule) -> dict[str, dict[str, Tensor]]:
    """Every metric's counts, a row for each shard of the data.

    Not their sums: a sum of floats that is taken up again as one number would round otherwise than the undisturbed.
    """
    layout = Layout.of(trainer.strategy)
    collected = {}
    for name, metric in _metrics(pl_module):
        states = {**metric.metric_state, _UPDATES: torch.tensor(metric.update_count, device=metric.device)}
        collected[name] = {
            key: trainer.strategy.reduce(_row(state, layout), reduce_op="sum").cpu() for key, state in states.items()
        }
    return collected


_UPDATES = "update_count"


def _row(state: Any, layout: Layout) -> Tensor:
    """`state` as this shard's row among zeros: (num_shards, *state.shape)."""
    rows: Tensor = state.new_zeros((layout.num_shards, *state.shape))
    rows[layout.shard] = state
    return rows


def _restore(pl_module: LightningModule, collected: dict[str, dict[str, Tensor]], layout: Layout) -> None:
    """Give every shard its counts back; on another number of shards, all of them to the first."""
    for name, metric in _metrics(pl_module):
        own = {key: _own(rows, layout) for key, rows in collected[name].items()}
        metric._update_count = int(own.pop(_UPDATES))
        for key, state in own.items():
            setattr(metric, key, state.to(metric.device))


def _own(rows: Tensor, layout: Layout) -> Tensor:
    if len(rows) == layout.num_shards:
        return rows[layout.shard].clone()
    return rows.sum(dim=0) if layout.shard == 0 else torch.zeros_like(rows[0])
