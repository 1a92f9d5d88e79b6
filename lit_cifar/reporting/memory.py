"""What a process keeps in memory for training, measured on request: a mode may divide it or keep it whole in each."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_cifar.reporting.run_report import run_folder

FILES = "memory-rank*.json"


class TrainingMemory(Callback):
    """Writes `memory-rank0.json` and so on into the run folder at the end of the training, one for each process.

    Not among the callbacks of every run: `--trainer.callbacks+=lit_cifar.reporting.memory.TrainingMemory` adds it.
    `state_bytes` counts the parameters that this process trains, their gradients and the optimizer's state: this
    process's part of a tensor that is shared out. `gpu_peak_bytes` is the most that torch has held on one GPU of this
    process since the training began, activations too; without a GPU it is null.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the peaks of what came before."""
        for device in _gpus(trainer):
            torch.cuda.reset_peak_memory_stats(device)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure: the gradients of the last step are still there."""
        folder = run_folder(trainer)
        if folder is None:
            return
        peaks = [torch.cuda.max_memory_allocated(device) for device in _gpus(trainer)]
        found = {
            "rank": trainer.global_rank,
            "state_bytes": sum(map(_own_bytes, _state(trainer, pl_module))),
            "gpu_peak_bytes": max(peaks, default=None),
        }
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder / FILES.replace("*", str(trainer.global_rank))).write_text(json.dumps(found) + "\n")


def _state(trainer: Trainer, pl_module: LightningModule) -> Iterator[Tensor]:
    """The parameters with a gradient, these gradients, and the tensors that the optimizers keep."""
    for parameter in pl_module.parameters():
        if parameter.grad is not None:
            yield from (parameter, parameter.grad)
    for optimizer in trainer.optimizers:
        for kept in optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, Tensor))


def _own_bytes(tensor: Any) -> int:
    """Of a DTensor the part that this process holds."""
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(own.nbytes)


def _gpus(trainer: Trainer) -> list[torch.device]:
    """Of this process."""
    strategy: Any = trainer.strategy
    several = getattr(strategy, "parallel_devices", None) if trainer.world_size == 1 else None
    devices = several or [strategy.root_device]
    return sorted({device for device in devices if device.type == "cuda"}, key=str)
