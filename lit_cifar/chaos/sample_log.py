"""A log of the samples that every process trains on, written so that killing the process loses none of it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L

from lit_cifar.batch_split import BatchSplit
from lit_cifar.chaos.sample_history import LoggedStep, Start
from lit_cifar.chaos.workers import start_of
from lit_cifar.data.images import Batch


class Journal(L.Callback):
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(self.folder / f"rank{trainer.global_rank}.jsonl", flags, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)


class JournalReader:
    """Follows the files that the processes append to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[LoggedStep] = []
        self.starts: set[Start] = set()
        self._offsets: dict[Path, int] = {}
        self._last: dict[Start, int] = {}
        self._first: dict[Start, int] = {}

    def refresh(self) -> None:
        """Read what is new; a line that is still being written waits for the next time."""
        for path in sorted(self.folder.glob("rank*.jsonl")):
            for content in self._new(path):
                if "step" in content:
                    self._add(LoggedStep.of(content))
                else:
                    launch, restart = content["start"]
                    self.starts.add((launch, restart))

    def first_step(self, start: Start) -> int | None:
        """Where the processes of this start began; None before they have finished a step."""
        return self._first.get(start)

    def last_step(self, start: Start) -> int | None:
        return self._last.get(start)

    @property
    def newest(self) -> Start | None:
        return max(self._last, default=None)

    @property
    def num_starts(self) -> int:
        """How often processes were started, those included that ended before they could announce themselves."""
        launches = {launch for launch, _ in self.starts}
        return sum(1 + max(restart for other, restart in self.starts if other == launch) for launch in launches)

    def _add(self, line: LoggedStep) -> None:
        self.lines.append(line)
        self._first.setdefault(line.start, line.step)
        self._last[line.start] = max(self._last.get(line.start, line.step), line.step)

    def _new(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
        yield from map(json.loads, whole.splitlines())
