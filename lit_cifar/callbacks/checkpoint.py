"""Which checkpoints a run keeps: the best by validation accuracy, and the last two to go on from."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_cifar.callbacks.run_report import run_folder
from lit_cifar.checkpoint_files import BEST, LAST
from lit_cifar.checkpoint_io import CheckpointFiles
from lit_cifar.errors import CheckpointError, ConfigError


def save_everywhere(trainer: L.Trainer, path: Path, *, behind: bool = False) -> None:
    """Write a checkpoint; every process must call this.

    Args:
        trainer: Has the state.
        path: The file.
        behind: Whether training may go on before the file is there. `settle` waits for it.

    Raises:
        CheckpointError: It could not be written, or one before it; on every process, with the reason that rank 0 had.
    """
    with failing_together(trainer, behind=behind):
        trainer.save_checkpoint(path)


def settle(trainer: L.Trainer) -> None:
    """Return when all that was saved is on disk; every process must call this.

    Raises:
        CheckpointError: Something could not be written; on every process.
    """
    with failing_together(trainer):
        files = trainer.strategy.checkpoint_io
        if isinstance(files, CheckpointFiles):
            files.settle()


def has_failed(trainer: L.Trainer) -> bool:
    """Whether this process knows that something could not be written, as the next save will say."""
    files = trainer.strategy.checkpoint_io
    return isinstance(files, CheckpointFiles) and files.has_failed


def wait_for_files(trainer: L.Trainer) -> None:
    """Return when this process has nothing left to write; what could not be written is told later."""
    files = trainer.strategy.checkpoint_io
    if isinstance(files, CheckpointFiles):
        files.wait()


@contextmanager
def failing_together(trainer: L.Trainer, *, behind: bool = False) -> Iterator[None]:
    """Make a failure of rank 0 to write a checkpoint, inside, one of all processes; each must come here.

    With another `CheckpointIO` than ours it is raised on rank 0, if that one raises at all.

    Args:
        trainer: Writes it.
        behind: As of `save_everywhere`.
    """
    files = trainer.strategy.checkpoint_io
    if not isinstance(files, CheckpointFiles):
        yield
        return
    with files.deferring(behind=behind):
        yield
    failure: CheckpointError | None = trainer.strategy.broadcast(files.failure)
    if failure is not None:
        raise failure


class BestCheckpoint(ModelCheckpoint):
    """`checkpoints/best.ckpt` by `val/acc`; none where no images are held out (`--data.val_size=0`).

    Args:
        monitor: Logged metric that ranks checkpoints.
        mode: Whether its maximum or its minimum is best.
        save_top_k: How many of the best to keep, the others as `best-v1.ckpt` and so on; -1 for all, 0 for none.
        every_n_epochs: Epochs between checkpoints.
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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Where nothing will be validated, nothing is the best."""
        datamodule = getattr(trainer, "datamodule", None)
        if trainer.limit_val_batches == 0 or getattr(datamodule, "val_size", None) == 0:
            self.save_top_k = 0
        super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Know the run's best files again where its folder was moved, or is named in another way.

        Lightning forgets them, and the score to surpass, unless the folder's name is the very same string.
        """
        state, folder = checkpoint["callbacks"].get(self.state_key), Path(self.dirpath or "")
        if state is None:
            return
        names = {path: str(folder / Path(path).name) if path else path for path in _paths(state)}
        if trainer.strategy.broadcast(all(Path(name).exists() for name in names.values() if name)):
            state["dirpath"] = self.dirpath
            state["best_k_models"] = {names[path]: score for path, score in state["best_k_models"].items()}
            state |= {key: names[state[key]] for key in _PATHS}

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        """Nothing is the best where `max_steps` ends a run before it has been validated: no reason for a warning."""
        if self.monitor in monitor_candidates or trainer.fit_loop.epoch_loop.val_loop._has_run:
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        # Loggers that then take the file elsewhere must find it.
        told = [type(logger).after_save_checkpoint for logger in trainer.loggers]
        with failing_together(trainer, behind=all(hook in _DOES_NOTHING for hook in told)):
            super()._save_checkpoint(trainer, filepath)

    def file_exists(self, filepath: str | Path, trainer: L.Trainer) -> bool:
        """Whether it does when all that was saved is on disk: names must not depend on how fast that is."""
        wait_for_files(trainer)
        return super().file_exists(filepath, trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let no training end before its files are there."""
        super().on_train_end(trainer, pl_module)
        settle(trainer)


class LastCheckpoint(callbacks.Checkpoint):
    """`checkpoints/last.ckpt`, from which a run goes on, and `checkpoints/previous.ckpt`, the one before.

    Says when one is due, and saves when told to: all processes must agree first, at the start of an optimizer step.
    The end of training is saved in any case. Nothing is due until a step has been taken, or taken again.

    Args:
        every_n_epochs: Save after every n epochs; 0: never for this reason.
        every_n_steps: Save after every n optimizer steps; null: never for this reason.
        every_n_seconds: Save when n seconds have passed since the last time; null: never for this reason.

    Attributes:
        newest: The file that this run has saved last, or the one it goes on from; None if there is neither. It is
            there after `settle`, before that perhaps not yet.
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
        """Agree on the folder."""
        folder = run_folder(trainer) or Path(trainer.default_root_dir)
        self._folder = Path(trainer.strategy.broadcast(str(folder))) / "checkpoints"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to count: where a run begins or goes on there is nothing new to save."""
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self.newest = Path(trainer.ckpt_path) if trainer.ckpt_path else None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the step at which as many epochs have ended as `every_n_epochs` says."""
        if self.every_n_epochs and trainer.current_epoch % self.every_n_epochs == 0:
            self._end_of_epochs = trainer.global_step

    def due_by_step(self, trainer: L.Trainer) -> bool:
        """Whether the steps taken say that it is time; the same on every process."""
        step = trainer.global_step
        if step == self._saved_step:
            return False
        return step == self._end_of_epochs or (self.every_n_steps is not None and step % self.every_n_steps == 0)

    def due_by_time(self, now: float) -> bool:
        """Whether the clock says so; processes may differ.

        Args:
            now: `time.monotonic()`, in seconds.
        """
        return self.every_n_seconds is not None and now - self._saved_at >= self.every_n_seconds

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint, but none of a test or a trial run; every process must call this.

        Training may go on before the file is there: see `settle`.

        Raises:
            CheckpointError: One before it could not be written; on every process.
        """
        if trainer.fast_dev_run or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:  # type: ignore[attr-defined]
            return
        save_everywhere(trainer, self._folder / LAST, behind=True)
        self.newest = self._folder / LAST
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the end, unless it has been, and let no training end before its files are there."""
        if self.newest != self._folder / LAST or self._saved_step != trainer.global_step:
            self.save(trainer)
        settle(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let nobody say what is left before all is there: Lightning tears nothing down if a logger fails, too."""
        wait_for_files(trainer)


_DOES_NOTHING = (Logger.after_save_checkpoint, TensorBoardLogger.after_save_checkpoint)
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


def _paths(state: dict[str, Any]) -> list[str]:
    """The files that the state of a `ModelCheckpoint` names; some may be empty."""
    return [*state["best_k_models"], *(state[key] for key in _PATHS)]


def _check_interval(name: str, value: float | None, *, least: int) -> None:
    if value is not None and not value >= least:
        raise ConfigError(
            f"--last_checkpoint.{name}={value} is less than {least}",
            remedy=f"pass --last_checkpoint.{name}={max(least, 1)} or more, or leave it out",
        )
