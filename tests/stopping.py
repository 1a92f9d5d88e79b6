"""Callbacks that stop runs or slow them down, named on the command line as `--trainer.callbacks+=stopping.NAME`."""

import os
import time
from typing import Any

import lightning as L
import torch


class SignalAfter(L.Callback):
    """Asks a process to stop: a signal to `rank` when it has taken `step` optimizer steps."""

    def __init__(self, step: int, rank: int = 0, number: int = 15) -> None:
        self.step, self.rank, self.number = step, rank, number

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Send it."""
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank):
            os.kill(os.getpid(), self.number)


class SignalAtStart(L.Callback):
    """Asks the process to stop before it has taken a step."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Send SIGTERM."""
        os.kill(os.getpid(), 15)


class NotANumber(L.Callback):
    """Spoils the images of `rank` in optimizer step `step`, so that their loss is not a number."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Spoil them."""
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank):
            batch.images.fill_(torch.nan)


class SpoilWeights(L.Callback):
    """Makes a weight infinite after `step` optimizer steps, as a step that is too large does: no loss has seen it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Spoil it."""
        if trainer.global_step == self.step:
            pl_module.network.fc.weight.data[0, 0] = torch.inf


class SlowSteps(L.Callback):
    """Every step takes at least `seconds`: time for a test to do something to the run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Wait."""
        time.sleep(self.seconds)
