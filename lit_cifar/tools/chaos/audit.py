"""The samples that every process trains on, and how a training that was hit compares with the baseline run.

The log is written so that killing a process loses none of it. A job that is killed runs some steps again. Only the last
run of an optimizer step counts: earlier ones came after the checkpoint from which the job resumed, and were lost with
the process. The ends of both runs and their metrics are compared too.
"""

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import lightning as L
import torch
from torch import Tensor

from lit_cifar.data.images import Batch
from lit_cifar.internals import keystr, tree_flatten_with_path
from lit_cifar.mode import mode_of
from lit_cifar.tools.verify.record import difference

# Environment variable: number of launches of the job; torchrun counts its own restarts.
LAUNCH = "LIT_CIFAR_CHAOS_LAUNCH"
RESIZED_BOUND = 1e-5  # bound of a resized training: the number of processes changes the rounding of sums
_CLOCKED = "per_s"  # suffix of the metrics that depend on the speed of the machine

# A start of the processes: number of launches of the job, and of restarts by torchrun since.
ProcessStart: TypeAlias = tuple[int, int]
StepKey: TypeAlias = tuple[int, int]  # epoch and optimizer step
Batches: TypeAlias = dict[StepKey, list[int]]  # the ids of the global batch of every step, by data-parallel rank


class LoggedStep(NamedTuple):
    """One loader step of one process, once the process has finished it."""

    start: ProcessStart
    rank: int
    data_parallel_rank: int  # its part of each batch; several processes may have the same
    epoch: int  # epoch, from 0
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
        start = int(os.environ[LAUNCH]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        rank, data_parallel_rank = trainer.global_rank, mode_of(trainer.strategy).layout.data_parallel_rank
        line = LoggedStep(start, rank, data_parallel_rank, trainer.current_epoch, self._step, batch.ids.tolist())
        with (self.folder / f"rank{rank}.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


class SampleLogReader:
    """Follows the files that the processes append to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[LoggedStep] = []
        self._steps: dict[ProcessStart, list[int]] = {}
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

    def first_step(self, start: ProcessStart | None) -> int | None:
        """The step at which the processes of this start began; None before they have finished a step."""
        return min(self._steps.get(start, ()), default=None) if start else None

    def last_step(self, start: ProcessStart | None) -> int | None:
        return max(self._steps.get(start, ()), default=None) if start else None

    @property
    def newest(self) -> ProcessStart | None:
        return max(self._steps, default=None)

    @property
    def num_starts(self) -> int:
        """Number of starts of processes, with those that ended before their first step."""
        newest_restarts = dict(sorted(self._steps))
        return sum(1 + restart for restart in newest_restarts.values())


@dataclass
class Audit:
    missing: int  # samples of an epoch that no step counts
    doubled: int  # samples that an epoch counts too often, or that are not in the data set
    repeated: int  # number of runs of an optimizer step that did not count
    problems: list[str]  # the mistakes in words, the first step first


def audit(lines: Iterable[LoggedStep], *, baseline: Mapping[StepKey, Iterable[int]]) -> Audit:
    """Compare the samples of a job with those of the baseline run, step by step and epoch by epoch."""
    lines = list(lines)
    batches, problems = effective(lines)
    for key in sorted(batches.keys() | baseline.keys()):
        if Counter(batches.get(key, ())) != Counter(baseline.get(key, ())):
            what = "other samples than in the uninterrupted run" if key in baseline else "not in the uninterrupted run"
            problems.append(f"{_words(key)}: {what if key in batches else 'was never run'}")
    seen, wanted = _by_epoch(batches), _by_epoch(baseline)
    repeated = len({(line.epoch, line.step, line.start) for line in lines}) - len(batches)
    return Audit((wanted - seen).total(), (seen - wanted).total(), repeated, problems)


def effective(lines: Iterable[LoggedStep]) -> tuple[Batches, list[str]]:
    """The global batch in the last run of every step, and places where processes disagree that must read the same."""
    read: dict[tuple[StepKey, ProcessStart], dict[tuple[int, int], list[int]]] = {}
    for line in lines:
        by_rank = read.setdefault(((line.epoch, line.step), line.start), {})
        by_rank.setdefault((line.data_parallel_rank, line.rank), []).extend(line.ids)
    last_run = dict(sorted(read))
    batches: Batches = {key: [] for key in last_run}
    problems = []
    for key, start in last_run.items():
        for data_parallel_rank, ranks in groupby(sorted(read[key, start].items()), key=lambda item: item[0][0]):
            first, *others = (ids for _, ids in ranks)
            batches[key] += first
            if any(ids != first for ids in others):
                who = f"the processes of data-parallel rank {data_parallel_rank}"
                problems.append(f"{_words(key)}: {who} read different samples")
    return batches, problems


def _by_epoch(batches: Mapping[StepKey, Iterable[int]]) -> Counter[tuple[int, int]]:
    """Number of uses of each sample in each epoch."""
    return Counter((epoch, sample) for (epoch, _), ids in batches.items() for sample in ids)


def _words(key: StepKey) -> str:
    return f"epoch {key[0]}, step {key[1]}"


def distance(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, str]:
    """The largest difference between two checkpoints, as `verify` measures a tensor's, and its tensor.

    It is 0 if and only if all parameters, buffers, numbers of optimizer and schedule, and counters are the same.
    """
    mine, theirs = _numbers(found), _numbers(expected)
    names = mine.keys() | theirs.keys()
    both = mine.keys() & theirs.keys()
    return max((difference(mine[name], theirs[name]) if name in both else math.inf, name) for name in names)


def _numbers(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step")
    leaves, _ = tree_flatten_with_path({name: checkpoint[name] for name in kept})
    return {keystr(path): torch.as_tensor(leaf) for path, leaf in leaves if isinstance(leaf, Tensor | float | int)}


def metric_problems(found: Path, expected: Path) -> list[str]:
    """The first difference between two `metrics.csv`, without metrics that depend on the clock."""
    none: dict[str, str] = {}
    for own, other in zip_longest(_rows(found), _rows(expected), fillvalue=none):
        for name in sorted(own.keys() | other.keys()):
            if own.get(name) != other.get(name):
                where = f"step {(other or own).get('step')} in metrics.csv"
                return [f"{name} of {where} is {own.get(name)}, {other.get(name)} in the uninterrupted run"]
    return []


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = [{k: v for k, v in row.items() if v and not k.endswith(_CLOCKED)} for row in csv.DictReader(file)]
    return [row for row in rows if row.keys() - {"epoch", "step"}]
