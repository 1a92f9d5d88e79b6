"""Callbacks of the runs of a visit: where the host waits, and a SIGTERM."""

import json
import os
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_cifar.checkpoint.callbacks import StepBoundary

_OUTSIDE = ("/torch/", "/warnings.py", "/contextlib.py", "gpu_visit/callbacks.py")
_NUM_FRAMES = 3
_FIRST, _LAST = 4, 12  # steps in which the host should not wait


class HostWaits(L.Callback):
    """Writes to `path`, as JSON, how often the host has waited for the GPU, by place in the code.

    These are the places at which torch warns under `torch.cuda.set_sync_debug_mode("warn")`: with "error" a run would
    end at the first. It begins after the steps in which memory is allocated and kernels are chosen. No agreement
    between processes falls into these steps: there a GPU is waited for, on purpose, once a second. Without a GPU
    nothing is found. With `plant` it waits once itself.
    """

    def __init__(self, path: str, *, plant: bool = False) -> None:
        self.path = Path(path)
        self.plant = plant
        self._places: Counter[str] = Counter()
        self._watch = ExitStack()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Put off the agreements."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StepBoundary):
                callback.agree_every_s = 1e6

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _FIRST and pl_module.device.type == "cuda":
            self._watch.enter_context(warned_of(self._places))
            if self.plant:
                batch.images.sum().item()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _LAST:
            self._watch.close()
            if trainer.is_global_zero:
                self.path.write_text(json.dumps(self._places) + "\n")


@contextmanager
def warned_of(places: Counter[str]) -> Iterator[None]:
    """Notes torch's warnings about operations for which the host waits."""

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing" in str(message):
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _place() -> str:
    """Where in the code that is, innermost call first."""
    frames = [frame for frame in reversed(traceback.extract_stack()) if not any(p in frame.filename for p in _OUTSIDE)]
    return " < ".join(f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in frames[:_NUM_FRAMES])


class Terminate(L.Callback):
    """Sends SIGTERM to this process after so many optimizer steps, as a scheduler does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
