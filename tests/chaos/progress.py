"""Which step every process is at, written so that killing it loses no line."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import lightning as L

LAUNCH = "LIT_CIFAR_CHAOS_LAUNCH"  # environment variable: number of launches of the job
# A start of the processes: number of launches of the job, and of restarts by torchrun since.
Start: TypeAlias = tuple[int, int]


class DoneStep(NamedTuple):
    """A loader step that a process has finished."""

    start: Start
    step: int  # optimizer step, from 0 at the start of the whole training


class StepLog(L.Callback):
    """Appends one JSON line per loader step and process to `folder/rank<r>.jsonl`, once the step is done.

    A line is one write to the system, so it is kept when its process is killed.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._step = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the optimizer step: at the end of the batch it may have moved on."""
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        start = int(os.environ[LAUNCH]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(DoneStep(start, self._step)).encode() + b"\n")


def read_log(folder: Path) -> list[DoneStep]:
    """The whole lines of all processes; one that is still being written is left out."""
    found = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for (launch, restart), step in map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines()):
            found.append(DoneStep((launch, restart), step))
    return found
