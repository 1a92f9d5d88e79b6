"""Callbacks that stop runs, slow them down or spoil them: `callback("stopping.NAME", ...)` of `commands`."""

import os
import shutil
import time
from typing import Any

import lightning as L
import torch

from lit_cifar.reporting.run_folder import run_folder


class SignalAfter(L.Callback):
    """Asks a process to stop: a signal to `rank` when it has taken `step` optimizer steps."""

    def __init__(self, step: int, rank: int = 0, number: int = 15) -> None:
        self.step, self.rank, self.number = step, rank, number

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_train_batch_end(trainer)

    on_test_start = on_train_start

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank):
            os.kill(os.getpid(), self.number)


class EndAfter(L.Callback):
    """Ends the training when it has taken `step` optimizer steps, or more."""

    def __init__(self, step: int) -> None:
        self.end, self.step = step, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.step -= 1  # no setting any more
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.end


class NotANumber(L.Callback):
    """Spoils the images of `rank` in optimizer step `step`, so that their loss is not a number."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank):
            batch.images.fill_(torch.nan)


class SpoilWeights(L.Callback):
    """Makes a weight infinite after `step` optimizer steps, as a step that is too large does: no loss has seen it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            pl_module.network.fc.weight.data[0, 0] = torch.inf


class FlipBit(L.Callback):
    """Flips a bit of what `rank` holds after `step` optimizer steps: a parameter, its momentum, or a buffer."""

    def __init__(self, step: int, rank: int, of: str = "parameter") -> None:
        self.step, self.rank, self.of = step, rank, of

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank):
            held = [*(pl_module.network.buffers() if self.of == "buffer" else pl_module.network.parameters())][-1]
            held = trainer.optimizers[0].state[held]["momentum_buffer"] if self.of == "momentum" else held.data
            held.view(-1).view(torch.int32)[0] ^= 1


class SlowSteps(L.Callback):
    """Every step takes at least `seconds`: time for a test to do something to the run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(self.seconds)


class NoFolder(L.Callback):
    """Puts a file where the checkpoints' folder would be, which not even root can write into."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = run_folder(trainer)
        if trainer.is_global_zero:
            folder.mkdir(exist_ok=True, parents=True)
            (folder / "checkpoints").touch()


class LoseRunFolder(L.Callback):
    """Takes the run folder away after two optimizer steps, or fills the disk for the file that is `full`."""

    def __init__(self, *, full: str | None = None) -> None:
        self.full = full

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        folder = run_folder(trainer)
        if trainer.global_step != 2 or not trainer.is_global_zero or folder is None:
            return
        if self.full:
            path = next(folder.glob(f"{self.full}*"), folder / self.full)
            path.unlink(missing_ok=True)
            path.symlink_to("/dev/full")
        else:
            shutil.rmtree(folder)
