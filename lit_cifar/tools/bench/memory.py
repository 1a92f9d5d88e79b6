"""What a process keeps in memory for training, measured on request: a mode may divide it or keep it whole in each."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_cifar.reporting.run_folder import run_folder
from lit_cifar.strategies.mesh import local_part

FILES = "memory-rank*.json"
_PROCESS = Path("/proc/self")


class TrainingMemory(Callback):
    """Writes `memory-rank0.json` and so on into the run folder at the end of the training, one for each process.

    Not among the callbacks of every run: `--trainer.callbacks+=lit_cifar.tools.bench.memory.TrainingMemory` adds it.
    `state_bytes` counts the parameters that this process trains, their gradients and the optimizer's state: this
    process's part of a tensor that is shared out. `gpu_peak_bytes` is the most that torch has held on one GPU of this
    process since the training began, activations too; without a GPU it is null. `resident_peak_bytes` is the most by
    which the process's resident memory has grown since then until the end of a step; outside of Linux it is null.
    """

    def __init__(self) -> None:
        self._with_gradient = 0
        self._resident_before: int | None = None
        self._resident_peak: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the peaks of what came before."""
        self._with_gradient = 0
        for device in _gpus(trainer):
            torch.cuda.reset_peak_memory_stats(device)
        self._resident_before = forget_resident_peak()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count parameters and gradients in the first step, when both are there."""
        if not self._with_gradient:
            trained = [parameter for parameter in pl_module.parameters() if parameter.grad is not None]
            self._with_gradient = sum(_own_bytes(its) + _own_bytes(its.grad) for its in trained)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the peak of the steps; to save the last checkpoint takes memory too."""
        if self._resident_before is not None:
            self._resident_peak = resident_peak() - self._resident_before

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the optimizers' state, and write."""
        folder = run_folder(trainer)
        if folder is None:
            return
        states = (value for its in trainer.optimizers for state in its.state.values() for value in state.values())
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
    """What of this process is resident now, from which `resident_peak` begins; None outside of Linux."""
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
    """Of a DTensor the part that this process holds; of what is no tensor, nothing."""
    return local_part(value).nbytes if isinstance(value, Tensor) else 0


def _gpus(trainer: Trainer) -> range:
    """All that are visible: torch counts what this process itself has on each, 0 on the others."""
    return range(torch.cuda.device_count() if trainer.strategy.root_device.type == "cuda" else 0)
