"""A callback that asks the run to stop, as a scheduler does."""

import os
import signal
from typing import Any

import lightning as L


class Terminate(L.Callback):
    """Sends SIGTERM to this process after so many optimizer steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Send it."""
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
