"""A log of the samples that every process trains on, written so that killing the process loses none of it."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import lightning as L

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.data.images import Batch

# Environment variable: how often the job was launched; torchrun counts its own restarts.
LAUNCH = "LIT_CIFAR_CHAOS_LAUNCH"
# Which start of the processes: how often the job was launched, how often torchrun restarted it since.
Start: TypeAlias = tuple[int, int]


class LoggedStep(NamedTuple):
    """One loader step of one process, once the process has finished it."""

    start: Start
    rank: int
    dp_rank: int  # which part of each batch it reads; several processes may read the same
    epoch: int  # from 0
    step: int  # optimizer step, from 0 at the start of the whole training
    ids: list[int]


class SampleLog(L.Callback):
    """Appends one JSON line per loader step and process to `folder/rank<r>.jsonl`, once the step is done.

    It uses neither checkpoints nor the code that resumes, so that it can show mistakes in them. A line is one write to
    the system, so it is kept when its process is killed.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._step = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Note the optimizer step: at the end of the batch it may have moved on."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        start = int(os.environ[LAUNCH]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        rank, dp_rank = trainer.global_rank, BatchSplit.of(trainer.strategy).dp_rank
        line = LoggedStep(start, rank, dp_rank, trainer.current_epoch, self._step, batch.ids.tolist())
        with (self.folder / f"rank{rank}.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


class SampleLogReader:
    """Follows the files that the processes append to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[LoggedStep] = []
        self._steps: dict[Start, list[int]] = {}
        self._offsets: dict[Path, int] = {}

    def refresh(self) -> None:
        """Read what is new; a line that is still being written waits for the next time."""
        for path in sorted(self.folder.glob("rank*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            for (launch, restart), *content in map(json.loads, whole.splitlines()):
                line = LoggedStep((launch, restart), *content)
                self.lines.append(line)
                self._steps.setdefault(line.start, []).append(line.step)

    def first_step(self, start: Start | None) -> int | None:
        """Where the processes of this start began; None before they have finished a step."""
        return min(self._steps.get(start, ()), default=None) if start else None

    def last_step(self, start: Start | None) -> int | None:
        return max(self._steps.get(start, ()), default=None) if start else None

    @property
    def newest(self) -> Start | None:
        return max(self._steps, default=None)

    @property
    def num_starts(self) -> int:
        """How often processes were started, those included that ended before their first step."""
        newest_restarts = dict(sorted(self._steps))
        return sum(1 + restart for restart in newest_restarts.values())
