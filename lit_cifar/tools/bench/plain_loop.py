"""The same training twice in one process, in turn: by the Trainer, and by a loop in plain PyTorch."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from lit_cifar.checkpoint.callbacks import files_of
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optim import WarmupDecay

_MANY = 10**6  # optimizer steps


class Small(nn.Sequential):
    """A network that takes so little time that a step is all bookkeeping."""

    def __init__(self) -> None:
        super().__init__(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10))


class PlainLoop:
    """Trains `network` on the batches of `data`, with the optimizer, the schedule and the layout of `module`.

    Loss and accuracy are summed on the device and read every `log_every_n_steps`. `precision` gives the context of a
    forward pass, autocast say.
    """

    def __init__(
        self,
        network: nn.Module,
        module: LitResNet,
        data: CIFAR10DataModule,
        *,
        log_every_n_steps: int,
        precision: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.network = network.train()
        self._layout = torch.channels_last if module.channels_last else torch.contiguous_format
        self._precision = precision
        self.optimizer = module.make_optimizer(network.parameters())
        self.scheduler: Any = module.make_lr_scheduler(self.optimizer)
        if isinstance(self.scheduler, WarmupDecay):
            self.scheduler.set_total_steps(_MANY)
        self.log_every_n_steps = log_every_n_steps
        self.logged: list[tuple[float, float]] = []  # mean loss and accuracy since the beginning
        self._batches = _forever(data)
        device = next(network.parameters()).device
        self._mean, self._std = (
            255 * torch.tensor(each, device=device)[:, None, None] for each in (data.source.mean, data.source.std)
        )
        self._loss = torch.zeros((), device=device)
        self._right = torch.zeros((), dtype=torch.int64, device=device)
        self._images = self._steps = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step(next(self._batches))

    def _step(self, batch: Batch) -> None:
        device = self._mean.device
        images = batch.images.to(device, torch.float32, non_blocking=True).sub_(self._mean).div_(self._std)
        labels = batch.labels.to(device, non_blocking=True)
        with self._precision():
            logits = self.network(images.contiguous(memory_format=self._layout))
            loss = F.cross_entropy(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self._loss += loss.detach() * len(labels)
        self._right += (logits.detach().argmax(dim=1) == labels).sum()
        self._images += len(labels)
        self._steps += 1
        if self._steps % self.log_every_n_steps == 0:
            self.logged.append((float(self._loss) / self._images, int(self._right) / self._images))


def _forever(data: CIFAR10DataModule) -> Iterator[Batch]:
    while True:
        yield from data.train_dataloader()


class InTurn(Callback):
    """Lets a plain loop of a copy of the network take `steps` steps after as many of the Trainer, and times both.

    Args:
        file: JSON: for each turn the seconds of a step of both, by the clock and of processor time, as
            [[fit, plain], [fit, plain]].
        steps: As many as lie between two log points, so that each turn has one.
        skip: So many turns are left out at the start.
    """

    def __init__(self, file: str, *, steps: int = 50, skip: int = 2) -> None:
        self.file = Path(file)
        self.steps = steps
        self.skip = skip
        self._plain: PlainLoop | None = None
        self._turns: list[list[list[float]]] = []
        self._since = (0.0, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.steps == 0:
            fit = self._elapsed(pl_module.device)
            if self._plain is None:
                every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning's own omission
                data: Any = trainer.datamodule  # type: ignore[attr-defined]
                assert isinstance(pl_module, LitResNet)
                self._plain = PlainLoop(
                    deepcopy(pl_module.network),
                    pl_module,
                    data,
                    log_every_n_steps=every,
                    precision=trainer.precision_plugin.forward_context,
                )
            self._start()
            self._plain.run(self.steps)
            plain = self._elapsed(pl_module.device)
            self._turns.append([list(pair) for pair in zip(fit, plain, strict=True)])
            self._start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.write_text(json.dumps(self._turns[self.skip :]))

    def _start(self) -> None:
        self._since = perf_counter(), process_time()

    def _elapsed(self, device: torch.device) -> tuple[float, float]:
        """Seconds of a step since `_start`, by both clocks, when the device has done its work."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (perf_counter() - self._since[0]) / self.steps, (process_time() - self._since[1]) / self.steps


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
