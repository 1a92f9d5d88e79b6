"""Callbacks for runs in processes of their own, where no test can patch anything."""

from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_cifar.models import compiled


class QuickCompiler(L.Callback):
    """Traces, cuts and differentiates as torch.compile does, and makes no kernels, which would take minutes."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        compiled.BACKEND = "aot_eager"


class Overflow(L.Callback):
    """In the second step a gradient of the last process alone overflows; writes down the scale after every step.

    The first scale is one at which nothing overflows by itself.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        scaler = _scaler(trainer)
        scaler.load_state_dict(scaler.state_dict() | {"scale": 1024.0})

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            part = getattr(gradients[-1], "to_local", lambda: gradients[-1])()
            part.view(-1)[:1] = torch.inf

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        with Path(f"{self.path}{trainer.global_rank}").open("a") as file:
            print(_scaler(trainer).get_scale(), file=file)


def _scaler(trainer: Any) -> torch.amp.GradScaler:
    scaler: torch.amp.GradScaler = trainer.precision_plugin.scaler
    return scaler
