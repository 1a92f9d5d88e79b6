"""The samples that every process trains on, written so that killing a process loses none of it.

A job that is killed runs some steps again. Only the last run of an optimizer step counts: earlier ones came after the
checkpoint from which the job resumed, and were lost with the process.
"""

import json
import os
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import lightning as L

from lit_cifar.data.images import Batch
from lit_cifar.mode import mode_of

LAUNCH = "LIT_CIFAR_CHAOS_LAUNCH"  # environment variable: number of launches of the job
# A start of the processes: number of launches of the job, and of restarts by torchrun since.
Start: TypeAlias = tuple[int, int]
StepKey: TypeAlias = tuple[int, int]  # epoch and optimizer step


class LoggedStep(NamedTuple):
    """One loader step of one process, once the process has finished it."""

    start: Start
    rank: int
    data_parallel_rank: int  # its part of each batch; several processes may have the same
    epoch: int
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

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Note the optimizer step: at the end of the batch it may have moved on."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        start = int(os.environ[LAUNCH]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        rank, data_parallel_rank = trainer.global_rank, mode_of(trainer.strategy).layout.data_parallel_rank
        line = LoggedStep(start, rank, data_parallel_rank, trainer.current_epoch, self._step, batch.ids.tolist())
        with (self.folder / f"rank{rank}.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def read_log(folder: Path) -> list[LoggedStep]:
    """The whole lines of all processes; one that is still being written is left out."""
    found = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for (launch, restart), *content in map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines()):
            found.append(LoggedStep((launch, restart), *content))
    return found


def batches(lines: Iterable[LoggedStep]) -> dict[StepKey, list[int]]:
    """The ids of the global batch in the last run of every step, in rising order.

    Raises:
        AssertionError: Processes of one data-parallel rank have read different samples.
    """
    read: dict[tuple[StepKey, Start], dict[tuple[int, int], list[int]]] = {}
    for line in lines:
        by_rank = read.setdefault(((line.epoch, line.step), line.start), {})
        by_rank.setdefault((line.data_parallel_rank, line.rank), []).extend(line.ids)
    found: dict[StepKey, list[int]] = {}
    for key, start in dict(sorted(read)).items():
        found[key] = []
        for data_parallel_rank, ranks in groupby(sorted(read[key, start].items()), key=lambda item: item[0][0]):
            first, *others = (ids for _, ids in ranks)
            assert all(ids == first for ids in others), f"{key}: data-parallel rank {data_parallel_rank} disagrees"
            found[key] += first
    return {key: sorted(ids) for key, ids in found.items()}


def problems(found: Mapping[StepKey, list[int]], expected: Mapping[StepKey, list[int]]) -> list[str]:
    """The steps that have used other samples than those of the undisturbed run, in words, the first step first."""
    wrong = [key for key in sorted(found.keys() | expected.keys()) if found.get(key) != expected.get(key)]
    return [f"epoch {epoch}, step {step}: {_what(found, expected, (epoch, step))}" for epoch, step in wrong]


def _what(found: Mapping[StepKey, list[int]], expected: Mapping[StepKey, list[int]], key: StepKey) -> str:
    if key not in found:
        return "was never run"
    return "other samples" if key in expected else "one too many"
