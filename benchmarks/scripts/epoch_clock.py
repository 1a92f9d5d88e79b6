"""A callback that times epochs."""

import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch


class EpochClock(L.Callback):
    """Writes to `path`, as JSON, the seconds of every epoch: in training steps, and in all.

    The GPU has finished its work wherever the clock is read. The medians leave out the first epoch, in which memory is
    allocated, and the last, in which the run ends.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._epochs: list[dict[str, float]] = []
        self._began = self._training_s = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget what a GPU has held until now."""
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """An epoch lasts until the next one begins."""
        self._close()
        self._began = _now()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == trainer.num_training_batches:
            self._training_s = _now() - self._began

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
        if self._began:
            self._epochs.append({"training_s": self._training_s, "total_s": _now() - self._began})


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return perf_counter()
