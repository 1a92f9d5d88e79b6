"""Short runs of `fit`, as a user starts them, timed step by step."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_cifar.bench.settings import Settings
from lit_cifar.verify.runs import run


class StepTimes(Callback):
    """Writes the seconds of every step but the first few, on rank 0, at the end of the training.

    A step lasts from the end of the one before it, so it includes fetching its batch.

    Args:
        file: JSON, a list of seconds.
        skip: So many steps are left out at the start, in which memory is allocated and kernels are chosen.
    """

    def __init__(self, file: str, *, skip: int = 3) -> None:
        self.file = Path(file)
        self.skip = skip
        self._ends: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._ends.append(perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            kept = self._ends[self.skip :]
            seconds = [later - earlier for earlier, later in pairwise(kept)]
            self.file.write_text(json.dumps(seconds))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A `fit` to be timed."""

    flags: Sequence[str]
    num_ranks: int = 1  # processes to start, as torchrun does; with 1 the strategy may start others
    threads: int = 1  # of each process


def seconds_per_step(fit: Fit, settings: Settings, *, steps: int) -> float:
    """The median step of a run, of `steps` optimizer steps of which the first three are not timed.

    Raises:
        RuntimeError: The fit failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="fit", dir=settings.folder))
    times = folder / "steps.json"
    flags = [*fit.flags, f"--trainer.max_steps={steps}", "--trainer.max_epochs=-1", f"--run_dir={folder / 'run'}"]
    flags += [f"--trainer.callbacks+={__name__}.StepTimes", f"--trainer.callbacks.file={times}"]
    outcome = run("fit", *flags, folder=folder, threads=fit.threads, num_ranks=fit.num_ranks)
    if outcome.status != 0:
        raise RuntimeError(f"fit {' '.join(fit.flags)} failed: {outcome.last_words}")
    seconds: list[float] = json.loads(times.read_text())
    return median(seconds)
