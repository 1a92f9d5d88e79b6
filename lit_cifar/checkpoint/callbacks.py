"""Which checkpoints a run keeps: the best by validation accuracy, and the last two, to resume from."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from lit_cifar.checkpoint.files import BEST, LAST
from lit_cifar.checkpoint.lightning_io import CheckpointFiles
from lit_cifar.errors import CheckpointError, ConfigError
from lit_cifar.reporting.run_folder import run_folder


def settle(trainer: L.Trainer) -> None:
    """Return when every checkpoint is on disk; every process must call this, and each raises if one is not."""
    with failing_together(trainer):
        pass


@contextmanager
def failing_together(trainer: L.Trainer, *, behind: bool = False) -> Iterator[None]:
    """If rank 0 fails to write a checkpoint inside, raise that on every process; each must enter this.

    Lightning calls `save_checkpoint` on rank 0 only, and all ranks meet at a barrier after it. An exception would leave
    the others waiting there. With `behind` a failure may be raised at the next save or by `settle`. With a
    `CheckpointIO` other than ours only rank 0 raises, if at all.
    """
    files = files_of(trainer)
    files.behind, files.quiet = behind, True
    try:
        yield
    finally:
        files.behind = files.quiet = False
    if not behind or files.failure is not None:
        files.wait()
    failure: CheckpointError | None = trainer.strategy.broadcast(files.failure)
    if failure is not None:
        files.failure = None
        raise failure


def files_of(trainer: L.Trainer) -> CheckpointFiles:
    """The plugin that writes; for a Trainer with another one, one that has nothing to write."""
    files = trainer.strategy.checkpoint_io
    return files if isinstance(files, CheckpointFiles) else CheckpointFiles()


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint by `val/acc`, `best.ckpt`; none without validation images (`--data.val_size=0`).

    Args:
        monitor: Logged metric that ranks the checkpoints.
        mode: Whether the maximum or the minimum of the metric is best.
        save_top_k: How many of the best checkpoints to keep; from the second on they are called `best-v1.ckpt` and so
            on. With -1 all are kept, with 0 none.
        every_n_epochs: Number of epochs between checkpoints.
    """

    def __init__(
        self,
        *,
        monitor: str = "val/acc",
        mode: Literal["min", "max"] = "max",
        save_top_k: int = 1,
        every_n_epochs: int = 1,
    ) -> None:
        super().__init__(
            filename=Path(BEST).stem,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            every_n_epochs=every_n_epochs,
            auto_insert_metric_name=False,
            # A resumed run that does not yet know of the only best file replaces it.
            enable_version_counter=save_top_k not in (0, 1),
        )

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Recognise the run's best files if its folder was moved or is given by another name.

        Lightning forgets them and their scores unless the folder's name is the same string.
        """
        state = checkpoint["callbacks"].get(self.state_key)
        if state is None:
            return
        scores = {self._here(path): score for path, score in state["best_k_models"].items()}
        if trainer.strategy.broadcast(all(Path(path).exists() for path in scores)):
            paths = {key: self._here(state[key]) for key in ("best_model_path", "kth_best_model_path")}
            state |= {"dirpath": self.dirpath, "best_k_models": scores, **paths}

    def _here(self, path: str) -> str:
        """The file of the same name in this run's folder."""
        return path and str(Path(self.dirpath or "") / Path(path).name)

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Save and warn of nothing if there was no validation, as before the first one that `max_steps` allows."""
        if self.monitor in monitor_candidates or trainer.fit_loop.epoch_loop.val_loop._has_run:
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        # Loggers that upload the file need it complete.
        idle = (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint)
        behind = all(type(logger).after_save_checkpoint in idle for logger in trainer.loggers)
        with failing_together(trainer, behind=behind):
            super()._save_checkpoint(trainer, filepath)

    def file_exists(self, filepath: str | Path, trainer: L.Trainer) -> bool:
        """Whether the file exists once every checkpoint is on disk: names must not depend on the disk's speed."""
        files_of(trainer).wait()
        return super().file_exists(filepath, trainer)


class LastCheckpoint(callbacks.Checkpoint):
    """Keeps the checkpoint that a run resumes from, `last.ckpt`, and the one before it, `previous.ckpt`.

    This callback says when a checkpoint is due. `StepBoundary` calls `save` once all processes have agreed, at the
    start of an optimizer step. The end of training is always saved. Nothing is due before the first step of a run.

    Args:
        every_n_epochs: Save after every n epochs. With 0 the number of epochs is no reason to save.
        every_n_steps: Save after every n optimizer steps. With null the number of steps is no reason to save.
        every_n_seconds: Save when n seconds have passed since the last checkpoint. With null time is no reason to save.

    Attributes:
        newest: The file that this run saved last, or the one it was resumed from; None if there is neither. It is
            complete after `settle`.
    """

    def __init__(
        self, *, every_n_epochs: int = 1, every_n_steps: int | None = None, every_n_seconds: float | None = None
    ) -> None:
        super().__init__()
        _check_interval("every_n_epochs", every_n_epochs, least=0)
        _check_interval("every_n_steps", every_n_steps, least=1)
        _check_interval("every_n_seconds", every_n_seconds, least=0)
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.every_n_seconds = every_n_seconds
        self.newest: Path | None = None
        self._folder = Path()
        self._saved_step = 0
        self._saved_at = 0.0
        self._end_of_epochs: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = run_folder(trainer) or Path(trainer.default_root_dir)
        self._folder = Path(trainer.strategy.broadcast(str(folder))) / "checkpoints"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting: at the start of a run, resumed or not, there is nothing new to save."""
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self.newest = Path(trainer.ckpt_path) if trainer.ckpt_path else None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the step at which `every_n_epochs` epochs have ended."""
        if self.every_n_epochs and trainer.current_epoch % self.every_n_epochs == 0:
            self._end_of_epochs = trainer.global_step

    def due_by_step(self, trainer: L.Trainer) -> bool:
        """Whether a checkpoint is due by the number of steps or epochs; the same on every process."""
        step = trainer.global_step
        if step == self._saved_step:
            return False
        return step == self._end_of_epochs or (self.every_n_steps is not None and step % self.every_n_steps == 0)

    def due_by_time(self, now: float) -> bool:
        """Whether a checkpoint is due by the clock, `time.monotonic()`; processes may differ."""
        return self.every_n_seconds is not None and now - self._saved_at >= self.every_n_seconds

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint, but not in a `fast_dev_run`; every process must call this.

        Training may continue before the file is complete: see `settle`.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        with failing_together(trainer, behind=True):
            trainer.save_checkpoint(self._folder / LAST)
        self.newest = self._folder / LAST
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the end of training, unless that was done, and wait for the files."""
        if self.newest != self._folder / LAST or self._saved_step != trainer.global_step:
            self.save(trainer)
        settle(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Wait for the files, before an error lists them. Lightning skips the teardown if a logger fails as well."""
        files_of(trainer).wait()


def _check_interval(name: str, value: float | None, *, least: int) -> None:
    if value is not None and not value >= least:
        raise ConfigError(
            f"--last_checkpoint.{name}={value} is less than {least}",
            remedy=f"pass --last_checkpoint.{name}={max(least, 1)} or more, or leave it out",
        )
