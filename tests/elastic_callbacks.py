"""Callbacks for runs that torchrun starts again, named on the command line as `--trainer.callbacks+=...`."""

import os
import signal
import time

import lightning as L

from lit_cifar.data import Batch


class KillRanks(L.Callback):
    """In each of the first `times` starts by torchrun another rank kills its process before optimizer step `step`.

    The step is counted from where the start began: a resumed one gets as far as a new one before it dies.
    """

    def __init__(self, times: int, step: int = 1) -> None:
        self.times = times
        self.step = step
        self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember where this start begins."""
        self._first_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Die as by the hand of the kernel, or live."""
        start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        own_turn = trainer.global_rank == start % trainer.world_size
        if start < self.times and own_turn and trainer.global_step - self._first_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class SlowSteps(L.Callback):
    """Every step takes at least `seconds`: time for a test to do something to the run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Wait."""
        time.sleep(self.seconds)
