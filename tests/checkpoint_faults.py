"""Callbacks that spoil a run's checkpoints, for tests that start processes; `--trainer.callbacks+=` takes them."""

import shutil

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.reporting.run_folder import run_folder


class NoFolder(Callback):
    """Puts a file where the checkpoints' folder would be, which not even root can write into."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before anything is saved."""
        folder = run_folder(trainer)
        assert folder is not None
        if trainer.is_global_zero:
            folder.mkdir(exist_ok=True, parents=True)
            (folder / "checkpoints").touch()


class LoseRunFolder(Callback):
    """Takes the run folder away after two optimizer steps, or fills the disk for `metrics.csv`."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Do it."""
        folder = run_folder(trainer)
        if trainer.global_step != 2 or not trainer.is_global_zero or folder is None:
            return
        if self.full:
            (folder / "metrics.csv").unlink(missing_ok=True)
            (folder / "metrics.csv").symlink_to("/dev/full")
        else:
            shutil.rmtree(folder)
