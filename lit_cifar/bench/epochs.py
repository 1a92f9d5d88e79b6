"""What an epoch costs beside its steps, and when the first step comes: callbacks that write it down."""

import json
import os
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.checkpoint.callbacks import files_of


class EpochTimes(Callback):
    """Writes how long each epoch was outside of training and validation steps, and the median step.

    The epochs may be short. What continues behind a long one, the writing of a checkpoint, is waited for.

    Args:
        file: JSON: "outside_s", a number for each change of epochs, and "step_s", in seconds.
    """

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self._outside: list[float] = []
        self._steps: list[float] = []
        self._began_at = self._ended_at = self._validation_at = 0.0
        self._validation_s = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Also after the checkpoint that `StepBoundary` writes before the first step of an epoch."""
        now = perf_counter()
        if batch_idx == 0 and trainer.current_epoch > 0:
            self._outside.append(now - self._ended_at - self._validation_s)
            files_of(trainer).wait()
        self._validation_s = 0.0
        self._began_at = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ended_at = perf_counter()
        self._steps.append(self._ended_at - self._began_at)

    def on_validation_batch_start(self, *_: Any) -> None:
        self._validation_at = perf_counter()

    def on_validation_batch_end(self, *_: Any) -> None:
        self._validation_s += perf_counter() - self._validation_at

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The first change of epochs makes what the others find: files, figures' fonts, memory.
        self.file.write_text(json.dumps({"outside_s": self._outside[1:], "step_s": median(self._steps[1:])}))


class EndAtFirstStep(Callback):
    """Ends the process when the first training step begins, and nothing else is done."""

    def on_train_batch_start(self, *_: Any) -> None:
        os._exit(0)
