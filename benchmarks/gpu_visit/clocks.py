"""Callbacks that find out where the time of an epoch, and that of a step, goes."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

_NUM_ROWS = 30


class EpochClock(L.Callback):
    """Writes to `path`, as JSON, the seconds of every epoch: in training steps, in validation, and in all else.

    "All else" are checkpoints, figures, counting, and what Lightning does between epochs. The GPU has finished its
    work wherever the clock is read. The medians leave out the first epoch, in which memory is allocated, and the last,
    in which the run ends.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._epochs: list[dict[str, float]] = []
        self._began = self._part_began = 0.0
        self._validation_s = self._training_s = 0.0
        self._fitted = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the validation before the first epoch, and what a GPU has held until now."""
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._validation_s = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An epoch lasts until the next one begins."""
        self._close()
        self._fitted = True
        self._began = self._part_began = _now()
        self._training_s = self._validation_s = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop with the last one."""
        if batch_idx + 1 == trainer.num_training_batches:
            self._training_s = _now() - self._part_began

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start."""
        self._part_began = _now()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop."""
        self._validation_s += _now() - self._part_began

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write, unless the run was another one that only has its configuration."""
        if stage != "fit":
            return
        self._close()
        usual = self._epochs[1:-1] or self._epochs
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        on_gpu = trainer.strategy.root_device.type == "cuda"
        content = {
            "images": min(len(data.sets["train"]), int(trainer.num_training_batches) * data.batch_size),
            "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0,
            "epochs": self._epochs,
            "median": {name: statistics.median(epoch[name] for epoch in usual) for name in usual[0]},
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")

    def _close(self) -> None:
        if not self._fitted:
            return
        total_s = _now() - self._began
        parts = {"training_s": self._training_s, "validation_s": self._validation_s}
        self._epochs.append({**parts, "else_s": total_s - sum(parts.values()), "total_s": total_s})
        self._fitted = False


class StepProfile(L.Callback):
    """Profiles `num_steps` steps from step `first` on: two tables, a chrome trace, and seconds of host and GPU.

    Args:
        folder: Where `profile.txt`, `trace.json.gz` and `step.json` are written; exists.
        first: Step with which it begins.
        num_steps: How many.
    """

    def __init__(self, folder: str, *, first: int = 10, num_steps: int = 3) -> None:
        self.folder = Path(folder)
        self.first = first
        self.num_steps = num_steps
        self._profile: Any = None
        self._began = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin."""
        if trainer.global_step == self.first:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if pl_module.device.type == "cuda" else []
            self._profile = profile(activities=activities)
            self._began = _now()
            self._profile.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End, and write."""
        if self._profile is None or trainer.global_step < self.first + self.num_steps:
            return
        host_s = perf_counter() - self._began
        done_s = _now() - self._began
        self._profile.__exit__(None, None, None)
        self._write({"steps": self.num_steps, "host_s": host_s, "done_s": done_s})
        self._profile = None

    def _write(self, content: dict[str, Any]) -> None:
        averages = self._profile.key_averages()
        tables = [
            averages.table(sort_by=key, row_limit=_NUM_ROWS) for key in ("self_cuda_time_total", "cpu_time_total")
        ]
        (self.folder / "profile.txt").write_text("\n".join(tables))
        self._profile.export_chrome_trace(str(self.folder / "trace.json.gz"))
        content["device_s"] = device_s(averages)
        (self.folder / "step.json").write_text(json.dumps(content, indent=1) + "\n")


def device_s(averages: Iterable[Any]) -> float:
    """Seconds of the kernels and copies among a profile's `key_averages()`.

    Operators have the time of their kernels again, and an annotation spans what lies between its kernels.
    """
    on_device = (event for event in averages if event.device_type != DeviceType.CPU and not event.is_user_annotation)
    return float(sum(event.self_device_time_total for event in on_device)) / 1e6


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()
