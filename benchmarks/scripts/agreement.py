"""What it costs that the processes of a run ask one another whether to save or to stop: a callback that times it.

    PYTHONPATH=benchmarks/scripts torchrun --standalone --nproc-per-node=2 -m lit_cifar fit --trainer.strategy=ddp \
        --config configs/quickstart.yaml --trainer.callbacks+=agreement.Timing --trainer.callbacks.path=agreement.json

Lets them ask at every step, in place of once a second. Rank 0 writes, as JSON, the median seconds of asking, of noting
whether a loss is finite, and of a whole step, with commit, versions and hardware.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_cifar.checkpoint.callbacks import StepBoundary
from lit_cifar.tools.commands.terminal import about

WARMUP = 20


class Timing(L.Callback):
    """Times the `StepBoundary` of a run, and whole steps, and writes the medians to `path` at its end."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.seconds: dict[str, list[float]] = {"asking_s": [], "noting_s": [], "step_s": []}
        self._last = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Ask at every step, and time it."""
        boundary: Any = next(callback for callback in trainer.callbacks if isinstance(callback, StepBoundary))
        boundary.agree_every_s = 0.0
        boundary._agree = timed(boundary._agree, self.seconds["asking_s"])
        boundary.on_train_batch_end = timed(boundary.on_train_batch_end, self.seconds["noting_s"])

    def on_train_batch_end(self, *args: Any) -> None:
        """Note the time since the step before."""
        now = time.perf_counter()
        self.seconds["step_s"].append(now - self._last)
        self._last = now

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the medians."""
        if trainer.is_global_zero:
            medians = {name: statistics.median(seconds[WARMUP:]) for name, seconds in self.seconds.items()}
            record = about() | {"n": len(self.seconds["asking_s"]) - WARMUP, **medians}
            self.path.write_text(json.dumps(record, indent=2) + "\n")


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """`method`, noting how long it takes; a GPU has finished what was asked of it before."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    return call
