"""The same training twice in one process, in turn: by the Trainer, and by a loop in plain PyTorch."""

import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.module import LitResNet
from lit_cifar.optim import WarmupDecay

_MANY = 10**6  # optimizer steps


class Small(nn.Sequential):
    """A network that takes so little time that a step is all bookkeeping."""

    def __init__(self) -> None:
        super().__init__(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 10))


class PlainLoop:
    """Trains a network of its own on the batches of `data`, with the optimizer and the schedule of `module`.

    Loss and accuracy are summed on the device and read every `log_every_n_steps`.
    """

    def __init__(
        self, network: nn.Module, module: LitResNet, data: CIFAR10DataModule, *, log_every_n_steps: int
    ) -> None:
        self.network = network.train()
        self.optimizer = module.make_optimizer(network.parameters())
        self.scheduler: Any = module.make_lr_scheduler(self.optimizer)
        if isinstance(self.scheduler, WarmupDecay):
            self.scheduler.set_total_steps(_MANY)
        self.log_every_n_steps = log_every_n_steps
        self.logged: list[tuple[float, float]] = []  # mean loss and accuracy since the beginning
        self._batches = _forever(data)
        self._mean, self._std = (
            255 * torch.tensor(each)[:, None, None] for each in (data.source.mean, data.source.std)
        )
        self._loss, self._right = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        self._images = self._steps = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step(next(self._batches))

    def _step(self, batch: Batch) -> None:
        images = batch.images.to(torch.float32).sub_(self._mean).div_(self._std)
        logits = self.network(images)
        loss = F.cross_entropy(logits, batch.labels)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self._loss += loss.detach() * len(batch.labels)
        self._right += (logits.detach().argmax(dim=1) == batch.labels).sum()
        self._images += len(batch.labels)
        self._steps += 1
        if self._steps % self.log_every_n_steps == 0:
            self.logged.append((float(self._loss) / self._images, int(self._right) / self._images))


def _forever(data: CIFAR10DataModule) -> Iterator[Batch]:
    while True:
        yield from data.train_dataloader()


class InTurn(Callback):
    """Lets a plain loop take `steps` steps after every `steps` of the Trainer's, and writes how long both took.

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
            fit = self._elapsed()
            if self._plain is None:
                every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # Lightning's own omission
                data: Any = trainer.datamodule  # type: ignore[attr-defined]
                assert isinstance(pl_module, LitResNet)
                self._plain = PlainLoop(Small(), pl_module, data, log_every_n_steps=every)
            self._start()
            self._plain.run(self.steps)
            self._turns.append([list(pair) for pair in zip(fit, self._elapsed(), strict=True)])
            self._start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.file.write_text(json.dumps(self._turns[self.skip :]))

    def _start(self) -> None:
        self._since = perf_counter(), process_time()

    def _elapsed(self) -> tuple[float, float]:
        """Seconds of a step since `_start`, by both clocks."""
        return (perf_counter() - self._since[0]) / self.steps, (process_time() - self._since[1]) / self.steps
