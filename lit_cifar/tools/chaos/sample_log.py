"""A log of the samples that every process trains on, written so that killing the process loses none of it."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L

from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.data.images import Batch

# Environment variable: how often the job was launched; torchrun counts its own restarts.
LAUNCH = "LIT_CIFAR_CHAOS_LAUNCH"
# Which start of the processes: how often the job was launched, how often torchrun restarted it since.
Start: TypeAlias = tuple[int, int]


def start_of(environment: Mapping[str, str]) -> Start:
    """Which start of the processes one with this environment belongs to."""
    return int(environment.get(LAUNCH, "0")), int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One loader step of one process, once the process has finished it."""

    start: Start
    rank: int
    dp_rank: int  # which part of each batch it reads; several processes may read the same
    epoch: int  # from 0
    step: int  # optimizer step, from 0 at the start of the whole training
    ids: tuple[int, ...]


class SampleLog(L.Callback):
    """Appends one JSON line per loader step and process to `folder/rank<r>.jsonl`, once the step is done.

    It uses neither checkpoints nor the code that resumes, so that it can show mistakes in them. A line is one write to
    the system, so it is kept when its process is killed. The first line of a process has no step: it announces the
    process.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.start = start_of(os.environ)
        self._step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._write(trainer, {"pid": os.getpid(), "world_size": trainer.world_size})

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Note the optimizer step: at the end of the batch it may have moved on."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        rank = BatchSplit.of(trainer.strategy).dp_rank
        ids = batch.ids.tolist()
        self._write(trainer, {"dp_rank": rank, "epoch": trainer.current_epoch, "step": self._step, "ids": ids})

    def _write(self, trainer: L.Trainer, content: dict[str, Any]) -> None:
        line = json.dumps({"start": self.start, "rank": trainer.global_rank} | content) + "\n"
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())


class SampleLogReader:
    """Follows the files that the processes append to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[LoggedStep] = []
        self._starts: set[Start] = set()
        self._steps: dict[Start, list[int]] = {}
        self._offsets: dict[Path, int] = {}

    def refresh(self) -> None:
        """Read what is new; a line that is still being written waits for the next time."""
        for path in sorted(self.folder.glob("rank*.jsonl")):
            for content in self._new(path):
                launch, restart = content["start"]
                self._starts.add((launch, restart))
                if "step" in content:
                    line = LoggedStep(**content | {"start": (launch, restart), "ids": tuple(content["ids"])})
                    self.lines.append(line)
                    self._steps.setdefault(line.start, []).append(line.step)

    def first_step(self, start: Start) -> int | None:
        """Where the processes of this start began; None before they have finished a step."""
        return min(self._steps.get(start, ()), default=None)

    def last_step(self, start: Start) -> int | None:
        return max(self._steps.get(start, ()), default=None)

    @property
    def newest(self) -> Start | None:
        return max(self._steps, default=None)

    @property
    def num_starts(self) -> int:
        """How often processes were started, those included that ended before they could announce themselves."""
        newest_restarts = dict(sorted(self._starts))
        return sum(1 + restart for restart in newest_restarts.values())

    def _new(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
        yield from map(json.loads, whole.splitlines())
