"""The memory that a process keeps for training, measured on request. A mode may divide it, or repeat it in each."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_cifar.mode.tensors import local_part
from lit_cifar.reporting.run_folder import run_folder

FILES = "memory-rank*.json"
_PROCESS = Path("/proc/self")


class TrainingMemory(Callback):
    """Writes `memory-rank0.json` and so on into the run folder at the end of the training, one for each process.

    `--trainer.callbacks+=analysis.memory.TrainingMemory` adds it to a run. `state_bytes` counts the
    parameters that this process trains, their gradients and the optimizer's state: of a divided tensor this process's
    part. `gpu_peak_bytes` is the most that torch has held on one GPU of this process since the training began, with
    activations; without a GPU it is null. `resident_peak_bytes` is the most by which the process's resident memory has
    grown since then until the end of a step; outside of Linux it is null.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._with_gradient = 0
        for device in _gpus(trainer):
            torch.cuda.reset_peak_memory_stats(device)
        self._resident_before = forget_resident_peak()
        self._resident_peak: int | None = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count parameters and gradients in the first step, when both exist."""
        if not self._with_gradient:
            trained = [parameter for parameter in pl_module.parameters() if parameter.grad is not None]
            self._with_gradient = sum(_own_bytes(each) + _own_bytes(each.grad) for each in trained)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the peak of the steps, without that of saving the last checkpoint."""
        if self._resident_before is not None:
            self._resident_peak = resident_peak() - self._resident_before

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = run_folder(trainer)
        if folder is None:
            return
        states = (value for each in trainer.optimizers for state in each.state.values() for value in state.values())
        peaks = [torch.cuda.max_memory_allocated(device) for device in _gpus(trainer)]
        found = {
            "rank": trainer.global_rank,
            "state_bytes": self._with_gradient + sum(map(_own_bytes, states)),
            "gpu_peak_bytes": max(peaks, default=None),
            "resident_peak_bytes": self._resident_peak,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILES.replace("*", str(trainer.global_rank))).write_text(json.dumps(found) + "\n")


def forget_resident_peak() -> int | None:
    """Start `resident_peak` anew. Return the bytes of this process that are resident now; None outside of Linux."""
    try:
        (_PROCESS / "clear_refs").write_text("5")  # proc(5)
    except OSError:
        return None
    return resident_peak()


def resident_peak() -> int:
    """The most bytes of this process that were resident at a time since `forget_resident_peak`."""
    (line,) = (line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def _own_bytes(value: Any) -> int:
    """Bytes of a tensor, or of this process's part of a DTensor; 0 for other values."""
    return local_part(value).nbytes if isinstance(value, Tensor) else 0


def _gpus(trainer: Trainer) -> range:
    """All visible GPUs: torch counts this process's own memory on each, which is 0 on those that it does not use."""
    return range(torch.cuda.device_count() if trainer.strategy.root_device.type == "cuda" else 0)
