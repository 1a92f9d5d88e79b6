"""Callbacks that note what a run does, or let it fail: `callback("recorder.NAME", ...)` of `commands`."""

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_cifar.data import Batch
from lit_cifar.models import compiled


class RecordIds(L.Callback):
    """One JSON line per step and process in `folder/rank<r>.jsonl`: pid, epoch, optimizer step, ids."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, *_: object) -> None:
        at = {"pid": os.getpid(), "epoch": trainer.current_epoch, "step": trainer.global_step}
        line = at | {"ids": batch.ids.tolist()}
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def global_steps(folder: Path) -> list[tuple[int, int, list[int]]]:
    """Epoch, step and the sorted ids of all processes, step by step."""
    seen: dict[tuple[int, int], list[int]] = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            seen.setdefault((line["epoch"], line["step"]), []).extend(line["ids"])
    return [(epoch, step, sorted(ids)) for (epoch, step), ids in sorted(seen.items())]


def has_reached(folder: Path, step: int) -> bool:
    """Whether a process has begun this step or a later one."""
    return any(number >= step for _, number, _ in global_steps(folder))


class AskAlone(L.Callback):
    """Asks for the means of an epoch on rank 0 alone, as bars of Lightning's do."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            _ = trainer.callback_metrics

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end


class QuickCompiler(L.Callback):
    """Traces, cuts and differentiates as torch.compile does, and makes no kernels, which would take minutes."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        compiled.BACKEND = "aot_eager"


class Nudge(L.Callback):
    """Moves the weights of the classifier `by` a constant before the first step."""

    def __init__(self, by: float) -> None:
        self.by = by

    @torch.no_grad()
    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step == 0:
            pl_module.network.fc.weight.add_(self.by * torch.arange(pl_module.network.fc.weight.numel()).view(10, -1))


class FailOn(L.Callback):
    """Fails on one rank at the start of a step, while the others go on."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            self.act()

    def act(self) -> None:
        raise RuntimeError(f"rank {self.rank} fails at step {self.step}")


class WritePids(L.Callback):
    """Writes each process's pid to `folder/rank<r>` once it has done a step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 1:
            draft = self.folder / f".rank{trainer.global_rank}"
            draft.write_text(str(os.getpid()))
            draft.replace(self.folder / f"rank{trainer.global_rank}")


class HangOn(FailOn):
    """Hangs there, in Python."""

    def act(self) -> None:
        while True:
            time.sleep(1)
