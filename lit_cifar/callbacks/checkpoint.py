"""Which checkpoints a run keeps: the best by validation accuracy, and the last."""

from typing import Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class Checkpoint(ModelCheckpoint):
    """`checkpoints/best.ckpt` by `val/acc`, and `checkpoints/last.ckpt` after every epoch.

    A run that holds out no images (`--data.val_size=0`) has no best: it keeps the last alone.

    Args:
        monitor: Logged metric that ranks checkpoints.
        mode: Whether its maximum or its minimum is best.
        save_top_k: How many of the best to keep; -1 for all.
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
            filename="best",
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=True,
            every_n_epochs=every_n_epochs,
            auto_insert_metric_name=False,
        )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Where nothing will be validated, keep the newest in place of the best, under the name of the last."""
        datamodule = getattr(trainer, "datamodule", None)
        if trainer.limit_val_batches == 0 or getattr(datamodule, "val_size", None) == 0:
            self.monitor, self.save_top_k = None, 1
            self.filename, self.save_last = "last", False
        super().setup(trainer, pl_module, stage)

    # Lightning's own callback writes the last checkpoint only where it has also written one of the best.

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the best, and the last whether or not it is among them."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._should_save_on_train_epoch_end(trainer):
            self._save_last(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The same, where validation does not come with the end of an epoch."""
        super().on_validation_end(trainer, pl_module)
        if not self._should_save_on_train_epoch_end(trainer):
            self._save_last(trainer)

    def _save_last(self, trainer: L.Trainer) -> None:
        due = (trainer.current_epoch + 1) % self._every_n_epochs == 0
        if self.save_last and due and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
