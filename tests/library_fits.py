"""A user's own script that saves and resumes within an epoch; `python library_fits.py FOLDER` does so in `ddp`."""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from own_networks import Drawing
from recorder import AskAlone
from short_fits import data, fit
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar import LitResNet
from lit_cifar.data.images import Batch


class Watch(L.Callback):
    """Keeps the ids of each batch, and saves after optimizer step `step`, in a hook."""

    def __init__(self, file: Path, step: int, *, hook: str = "on_train_batch_end") -> None:
        self.file, self.step = file, step
        self.read: list[tuple[int, int, list[int]]] = []
        setattr(self, hook, self.save)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        self.read.append((trainer.current_epoch, batch_idx, batch.ids.tolist()))

    def save(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.file)
            self.step = -1


class Foreign(L.LightningModule):
    """Not of this package. It asks for the number of steps, so Lightning makes the loader before it reads a file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch.images), batch.labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.layers(batch.images), batch.labels), batch_size=len(batch.ids))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1 / float(self.trainer.estimated_stepping_batches))


def make(kind: str) -> L.LightningModule:
    if kind == "foreign":
        return Foreign()
    return LitResNet(network=Drawing()) if kind == "drawing" else LitResNet("tiny", stem="imagenet")


def ends_alike(folder: Path, *, kind: str = "own", step: int, hook: str = "on_train_batch_end", **how: Any) -> bool:
    """Whether a run of two epochs that is resumed after `step` steps reads and ends as the uninterrupted one."""
    found = []
    for seed, resume in enumerate((None, folder / "within.ckpt")):
        L.seed_everything(seed)  # nothing may follow from what was drawn before
        watch, model = Watch(folder / "within.ckpt", step if resume is None else -1, hook=hook), make(kind)
        asked = {"max_epochs": 2, "callbacks": [watch, AskAlone()]} | how
        trainer = fit(model, folder, data(), resume=resume, **asked)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found.append((watch.read, logged, [*model.state_dict().values()]))
    (read, logged, weights), (rest, logged_too, weights_too) = found
    assert 0 < len(rest) == len(read) - step * trainer.accumulate_grad_batches
    assert rest == read[-len(rest) :]
    assert logged == logged_too
    return all(map(torch.equal, weights, weights_too))


if __name__ == "__main__":
    assert ends_alike(Path(sys.argv[1]), step=3, devices=2, strategy="ddp", accumulate_grad_batches=2)
